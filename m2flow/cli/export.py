"""Implement `m2flow export`, `serve`, `trace` and `send`: hand a run's model, schedule and records to other tools.

export   the trained model, or its adapters, as a Hugging Face directory
serve    the trained model as a server of chat completions
trace    the schedule as a file for Perfetto or chrome://tracing
send     spans and metrics to OpenTelemetry, Weights & Biases or MLflow
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from m2flow import __version__
from m2flow.cli.main import find_run
from m2flow.cli.run import to_option
from m2flow.errors import OptionError, SpecError
from m2flow.recipe import Dtype, Model

if TYPE_CHECKING:
    from m2flow.micro.records.checkpoints import CheckpointPart

# ---- export


@click.command("export")
@click.argument("run", required=False)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Export the checkpoint after so many steps.  [default: the final one, or the newest]",
)
@click.option("--role", metavar="ROLE", help="The role whose model is exported, if several are trained.")
@click.option("--like", metavar="MODEL", help="RUN is a checkpoint that Megatron wrote, of a model with this one's configuration.")
@click.option("--adapters", is_flag=True, help="Export only the adapters of a policy with lora=, as peft reads them.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where it goes.  [default: RUN/export/ROLE-STEP[-adapters]]")
@click.option("--shard-size", metavar="SIZE", help="Most that a file of weights may have: 5GB, 500MB.  [default: as they are]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "gguf"]),
    default="safetensors",
    show_default=True,
    help="gguf: one file for llama.cpp, of a Llama, Mistral, Qwen2 or Qwen3.",
)
@click.option(
    "--dtype", type=click.Choice(get_args(Dtype)), help="With --format gguf: type of the matrices.  [default: as they were trained]"
)
@click.option("--push", metavar="OWNER/NAME", help="Upload it to this repository of the Hugging Face hub; it is made if need be.")
@click.option("--public", is_flag=True, help="With --push: a repository that is made is public.  [default: private]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(
    run: str | None,
    step: int | None,
    role: str | None,
    like: str | None,
    adapters: bool,
    out: Path | None,
    shard_size: str | None,
    form: str,
    dtype: str | None,
    push: str | None,
    public: bool,
    runs_dir: Path,
) -> None:
    """Write the model of a run as a Hugging Face directory, which `transformers` loads; it is loaded and compared before it is there.

    RUN is a run directory or its name; the newest one by default. The run may still be going on. A model card, README.md, says what
    the model was trained with. --push uploads as the user who is logged in by `hf auth login`.

    With --like, RUN is a directory that Megatron-core wrote in its format torch_dist, under whatever layout, and --out says where to.

    \b
    Example:
      m2flow export grpo-20260102-030405 --step 40 --out sorted-digits
      m2flow export grpo-20260102-030405 --format gguf --dtype float16
      m2flow export grpo-20260102-030405 --adapters
      m2flow export grpo-20260102-030405 --push me/sorted-digits
      m2flow export checkpoints/iter_0001000 --like Qwen/Qwen2.5-0.5B --out qwen-tuned
    """
    from m2flow.micro.records.checkpoints import export_part, export_part_adapters, export_part_gguf, find_part

    if shard_size is not None and (adapters or not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", shard_size)):
        raise OptionError(f"--shard-size {shard_size} " + ("goes with whole models" if adapters else "is no size"), now="Write 5GB, 500MB.")
    if form == "gguf" and (adapters or shard_size is not None):
        raise OptionError(f"--format gguf and {'--adapters' if adapters else '--shard-size'} exclude each other", now="Leave one out.")
    if dtype is not None and form != "gguf":
        raise OptionError(f"--dtype {dtype} goes with --format gguf", now="Other exports have the type that was trained.")
    if like is not None:
        others = {"--step": step, "--role": role, "--adapters": adapters, "--format gguf": form == "gguf", "--push": push}
        _convert(run, like, out, shard_size, [name for name, given in others.items() if given])
        return
    run_dir = find_run(run, runs_dir)
    part = find_part(run_dir, step, role)
    kind = "adapters" if adapters else form
    target = out or run_dir / "export" / f"{part.role}-{part.which.replace(' ', '-')}{'' if kind == 'safetensors' else f'-{kind}'}"
    if kind == "gguf":
        click.echo(f"{export_part_gguf(part, target, dtype)}: {part.role} at {part.which}, written for llama.cpp, read back and compared")
    elif adapters:
        base = _with_hub_base(target, export_part_adapters(part, target), _origin(run_dir, part.role))
        click.echo(f"{target}: adapters of {part.role} at {part.which}, for {base}; loaded by peft, added and compared")
    else:
        digest = export_part(part, target, shard_size)
        click.echo(f"{target}: {part.role} at {part.which}, weights {digest[:12]}, loaded by transformers and compared")
    (target / "README.md").write_text(_card(run_dir, part, kind))
    if push is not None:
        click.echo(_pushed(target, push, is_private=not public))


def _convert(checkpoint: str | None, like: str, out: Path | None, shard_size: str | None, others: Sequence[str]) -> None:
    """Write a checkpoint of Megatron's as a Hugging Face directory."""
    from m2flow.engines.megatron.conversion import convert

    if others:
        raise OptionError(
            f"--like and {others[0]} exclude each other: a checkpoint of Megatron's is converted as it is", now="Leave one out."
        )
    if checkpoint is None or out is None:
        raise OptionError("--like goes with a checkpoint and --out", now="Write: m2flow export CHECKPOINT --like MODEL --out DIR.")
    convert(Path(checkpoint), Model(like), out, **({"shard_size": shard_size} if shard_size else {}))
    click.echo(f"{out}: converted from {checkpoint}, loaded by transformers and compared")


# ---- serve


@click.command("serve")
@click.argument("run", required=False)
@click.option("--model", metavar="PATH", help="Serve this model instead: a Hugging Face directory, or a name of the hub.")
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="The checkpoint after so many steps.  [default: the final one, or the newest]"
)
@click.option("--role", metavar="ROLE", help="The role whose model is served, if several are trained.")
@click.option("--name", metavar="NAME", help="The model's name in answers.  [default: the run's, or the model's]")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to answer on; any but loopback asks for a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False), help="A file with the API key that clients have to give.")
@click.option("--max-running", type=click.IntRange(min=1), default=64, show_default=True, help="Responses that decode together.")
@click.option("--device", metavar="DEVICE", help="cpu or cuda:N.  [default: the first GPU if there is one]")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one for each core]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def serve_command(
    run: str | None,
    model: str | None,
    step: int | None,
    role: str | None,
    name: str | None,
    host: str,
    port: int,
    key_file: Path | None,
    max_running: int,
    device: str | None,
    threads: int | None,
    runs_dir: Path,
) -> None:
    """Serve the trained model of a run to clients of OpenAI's chat completions and responses, and of Anthropic's messages.

    RUN is a run directory or its name; the newest one by default. The embedded engine serves streams, tools, several answers, stop texts,
    log-probabilities, seeds and JSON schemas; what is not served is refused by name. The other two APIs have no seed, and one answer.
    Another server, such as vLLM, takes what `m2flow export` writes.

    \b
    Examples:
      m2flow serve grpo-20260102-030405
      m2flow serve --model ./sorted-digits --port 8001
      OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py
      ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=none python my_agent.py
    """
    from m2flow.agents.endpoint import serve_chat
    from m2flow.engines.contract import EngineSettings
    from m2flow.engines.registry import make_rollout
    from m2flow.micro.records.checkpoints import export_part, find_part
    from m2flow.recipe import Model
    from m2flow.viewer.serving import LOOPBACK, open_socket

    if model is not None and (run or step or role):
        raise OptionError("--model and a run exclude each other", now="Leave RUN, --step and --role out, or --model.")
    key = _key_in(key_file) if key_file else ""
    if host not in LOOPBACK and not key:
        raise OptionError(
            f"--host {host} can be reached by others, and there is no key", now="Write a key into a file, and pass --key-file."
        )
    with tempfile.TemporaryDirectory(prefix="m2flow-serve-") as directory, open_socket(host, port) as listener:
        path, called = model or str(Path(directory) / "model"), name or Path(model or "").name
        if model is None:
            run_dir = find_run(run, runs_dir)
            export_part(find_part(run_dir, step, role), Path(path))
            called = name or run_dir.name
        settings = EngineSettings(device=device or _first_device(), threads=threads or _num_cores(), max_running=max_running)
        engine = make_rollout("embedded", Model(path), settings)
        click.echo(f"loading {called} on {settings.device}", err=True)
        try:
            engine.start()
            shown = f"[{host}]" if ":" in host else host
            click.echo(f"http://{shown}:{listener.getsockname()[1]}/v1 serves {called} on {settings.device}  (Ctrl-C ends it)")
            serve_chat(engine, called, listener, key=key)
        finally:
            engine.stop()


def _key_in(file: Path) -> str:
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"the key can't be read from {file}: {error}", now="Give a file that you may read, whose content is the key alone."
        ) from None
    if len(key) < _LEAST_KEY:
        raise OptionError(f"the key in {file} has {len(key)} characters", now=f"Use {_LEAST_KEY} or more that nobody can guess.")
    return key


_LEAST_KEY = 16


def _first_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _json_of(file: Path) -> dict[str, Any]:
    """The object in a file of the run; empty if there is none."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _origin(run_dir: Path, role: str) -> dict[str, str]:
    """Where the role's model came from (`m2flow.recipe.origin`); empty if the run's record does not say."""
    return dict(_json_of(run_dir / "config.json").get("models", {}).get(role, {}))


def _with_hub_base(adapters: Path, base: Path, origin: Mapping[str, str]) -> str:
    """Name the hub's model in the configuration of adapters, where their base is one: its place in this machine's cache is of no use to
    others. Returns what the base is called.
    """
    if "hub" not in origin:
        return str(base)
    file = adapters / "adapter_config.json"
    named = {"base_model_name_or_path": origin["hub"], "revision": origin["revision"] or None}
    file.write_text(json.dumps(_json_of(file) | named, indent=2) + "\n")
    return origin["hub"]


def _base_in_words(origin: Mapping[str, str]) -> str:
    """The model that training began with, by a name that says nothing of this machine's directories."""
    name = origin.get("hub") or Path(origin.get("path", "")).name
    revision = f", revision {origin['revision']}" if origin.get("revision") else ""
    return name + revision + (", its weights drawn at random" if origin.get("init") == "random" else "")


_LOADED_BY = {
    "safetensors": "transformers.AutoModelForCausalLM.from_pretrained(path)",
    "adapters": "peft.PeftModel.from_pretrained(base, path)",
    "gguf": "llama-cli -m FILE.gguf",
}


def _card(run_dir: Path, part: CheckpointPart, kind: str) -> str:
    """The model card: what the run's records say of how the model came to be. No path of this machine is in it."""
    config, plan, origin = _json_of(run_dir / "config.json"), _json_of(run_dir / "plan.json"), _origin(run_dir, part.role)
    rows = {
        "flow": plan.get("flow", ""),
        "base model": _base_in_words(origin),
        "options": ", ".join(f"{name}={value!r}" for name, value in config.get("options", {}).items() if not isinstance(value, str)),
        "seed": str(config.get("settings", {}).get("seed", "")),
        "role": part.role,
        "after": part.which,
        "cluster": plan.get("cluster", ""),
        "trained with": f"m2flow {__version__}",
    }
    values = _last_values(run_dir, part)
    lines = ["---", _card_data(origin, kind), "---", ""]
    lines += [f"# {part.role} of {rows['flow'] or 'a flow'}", "", f"Load it with `{_LOADED_BY[kind]}`.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value]
    lines += ["", "Last values of the run:", "", "| metric | value |", "|---|---|"] if values else []
    return "\n".join([*lines, *(f"| {name} | {value:.4g} |" for name, value in sorted(values.items())), ""])


def _card_data(origin: Mapping[str, str], kind: str) -> str:
    """What the hub reads of a model card. A base model is one of the hub, with weights that training began from."""
    from huggingface_hub import ModelCardData

    base = origin.get("hub") if origin.get("init") == "pretrained" else None
    data = ModelCardData(
        library_name={"adapters": "peft", "gguf": "gguf"}.get(kind, "transformers"),
        pipeline_tag="text-generation",
        base_model=base,
        tags=["m2flow", "reinforcement-learning", *(["lora"] if kind == "adapters" else [])],
    )
    if base:
        data["base_model_relation"] = "adapter" if kind == "adapters" else "finetune"
    return str(data.to_yaml())


def _last_values(run_dir: Path, part: CheckpointPart) -> dict[str, float]:
    """What the flow logged last, up to the checkpoint: rewards, accuracies, evaluations; no sizes and times."""
    from m2flow.observe.metrics import read_metrics

    last = int(part.which.removeprefix("step ")) - 1 if part.which.startswith("step ") else math.inf
    found: dict[str, float] = {}
    for name, points in read_metrics(run_dir).items():
        is_of_flow = "/" not in name or name.startswith(("eval/", "reward/"))
        values = [value for step, value in points if step <= last and math.isfinite(value)]
        if values and is_of_flow and not name.startswith("num_"):
            found[name] = values[-1]
    return found


def _pushed(folder: Path, repo: str, *, is_private: bool) -> str:
    """Upload a directory to the hub, and return the address of the commit.

    Raises:
        SpecError: the hub can't be reached, or refuses it.
    """
    from huggingface_hub import HfApi

    hub = HfApi(library_name="m2flow", library_version=__version__)
    try:
        hub.create_repo(repo, private=is_private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="m2flow export"))
    except Exception as error:  # The package's own kinds, and those of what it uploads with.
        now = f"The model is in {folder}. Log in with `hf auth login`, then: hf upload {repo} {folder}"
        raise SpecError(f"{repo} can't be pushed: {error}", now=now) from None


# ---- trace


@click.command("trace")
@click.argument("run", required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where it goes.  [default: in RUN]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def trace_command(run: str | None, out: Path | None, runs_dir: Path) -> None:
    """Write the schedule of a run as a file for Perfetto, and print its path.

    RUN is a run directory or its name; the newest one by default. Open the file at https://ui.perfetto.dev, which keeps it in your
    browser. A name that ends in .pftrace is written in Perfetto's own format; any other as JSON, which chrome://tracing opens too. With a
    further .gz it is compressed.

    \b
    Examples:
      m2flow trace runs/grpo-20260102-030405 -o trace.pftrace
      m2flow trace runs/grpo-20260102-030405 -o trace.json.gz
    """
    from m2flow.observe.perfetto import write_trace
    from m2flow.observe.store import spans_path
    from m2flow.viewer.run_trace import read_plan_of

    run_dir = find_run(run, runs_dir)
    if not spans_path(run_dir).is_file() or not spans_path(run_dir).stat().st_size:
        raise SpecError(f"the run in {run_dir} has recorded nothing", now="Wait for its first call to begin, or name another run.")
    file = out or run_dir / "trace.json.gz"
    try:
        plan = read_plan_of(run_dir)
        write_trace(run_dir, file, devices=plan.device_names if plan else None)
    except OSError as error:
        raise SpecError(f"can't write {file}: {error.strerror}", now="Give another place with -o.") from None
    click.echo(file)


# ---- send

_A_DAY_S = 86_400.0


@click.command("send")
@click.argument("run", required=False)
@click.option("--otlp", default="", metavar="URL", help="An OpenTelemetry collector.  [default: what the environment names]")
@to_option
@click.option("--again", is_flag=True, help="Send everything, including what arrived before.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def send_command(run: str | None, otlp: str, metrics_to: tuple[str, ...] | None, again: bool, runs_dir: Path) -> None:
    """Send the spans and metrics of a run to an OpenTelemetry collector, Weights & Biases, MLflow or TensorBoard.

    RUN is a run directory or its name; the newest one by default. A run does this while it goes on, if it is told to
    (`m2flow run --otlp URL`); this is for runs that were not, and for what could not be delivered then.

    \b
    Example:
      m2flow send runs/grpo-20260102-030405 --otlp http://localhost:4318
    """
    import threading

    from m2flow.micro.records.sample_query import SHOWN_BY
    from m2flow.observe.forwarding import deliver, destinations
    from m2flow.spec import RunSettings

    run_dir = find_run(run, runs_dir)
    settings = RunSettings.model_validate({"otlp": otlp, "metrics_to": metrics_to})
    flow = run_dir.name.rpartition("-")[0].rpartition("-")[0]
    wanted = destinations(settings, run_dir, flow, lambda said: click.echo(said, err=True), SHOWN_BY)
    if not wanted:
        raise OptionError("nobody is named to send to", now="Say --otlp http://HOST:4318, or --metrics-to wandb, mlflow or tensorboard.")
    ends = threading.Event()
    ends.set()
    sinks = wanted.sinks()
    for sink in sinks if again else ():
        sink.reset()
    failed = []
    for report in deliver(sinks, ends, _A_DAY_S):
        click.echo(f"{report.where}: {report.num_spans:,} spans, {report.num_points:,} numbers")
        if report.is_short:
            failed.append(f"{report.where} did not take everything, {report.num_left_bytes:,} bytes are left: {report.error}")
    if failed:
        now = (
            "Mend that, and send again: what did arrive is not sent a second time. A collector's key is set by OTEL_EXPORTER_OTLP_HEADERS."
        )
        raise SpecError("; ".join(failed), now=now)
