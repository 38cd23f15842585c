"""The stages of the GPU kit (`kit.py`). Each takes a device and returns facts, and rows of measurements with what the planner predicts.

    python benchmarks/gpu/stages.py STAGE --device cuda --into RESULT.json

On `cpu` every stage runs at toy size: what is measured then says nothing, but that the stage works. Models have random weights in the
shapes of `m2flow/planner/models`, drawn on the device (`model_folder`); no stage needs a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from kit import FOLDER, STAGES
from tokenizers import Tokenizer, models

from m2flow.channels.weights import Manifest, Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.tensors import from_wire
from m2flow.engines.contract import EngineSettings, Objective, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.registry import make_train
from m2flow.micro.protocol.cost_terms import Layout
from m2flow.planner.cost_model import decode_cost, train_cost, train_footprint
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import Pool, pools_of
from m2flow.planner.workload import Extent
from m2flow.recipe import AdamW, Dtype, Loss, Model, Sampling
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "m2flow" / "planner" / "models"
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PPO = Objective(Loss("ppo_clip", "m2flow.algorithms.losses:ppo_clip", ("logprobs", "behaviour_logprobs", "advantages")))
Row = dict[str, Any]


@dataclasses.dataclass
class Found:
    """What a stage found."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    """Parts that failed while others gave rows."""


# ---- models, and what is predicted of them


SIZES: tuple[tuple[str, int | None], ...] = (("Qwen2.5-0.5B", None), ("Qwen2.5-7B", 4))
"""The models that are measured: a whole one, and of a large one as many layers as fit."""


def model_folder(shape: str, device: str, num_layers: int | None = None) -> str:
    """A model's directory beside the results, made when it is first asked for: a tokenizer of words, and random weights in its shape.

    The weights are drawn on the device: on the host that takes longer than all that is measured.
    """
    folder = Path(os.environ.get(FOLDER, tempfile.gettempdir())) / f"{shape}-{num_layers or 'all'}-{device}"  # Toys are another model.
    if (folder / "complete").exists():
        return str(folder)
    write_config(folder, shape, is_toy=device == "cpu", num_layers=num_layers)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype_of(device)))
    model.save_pretrained(folder)
    (folder / "complete").touch()
    return str(folder)


def write_config(folder: str | Path, shape: str, *, is_toy: bool, num_layers: int | None = None) -> None:
    """Write a model's configuration in the shape of a Qwen2.5, without weights, and a tokenizer of words.

    Args:
        num_layers: fewer layers than the model has, so that a part of a large one fits.
    """
    told = json.loads((ZOO / f"{shape}.json").read_text())
    told.update(TOY if is_toy else {})
    if num_layers is not None:
        told["num_hidden_layers"] = num_layers
    known = {name: told[name] for name in (*TOY, "tie_word_embeddings", "rope_theta", "rms_norm_eps") if name in told}
    config = transformers.Qwen2Config(
        **known, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=None, architectures=["Qwen2ForCausalLM"]
    )
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def named(shape: str, num_layers: int | None) -> str:
    return f"{shape}, {num_layers} layers" if num_layers else shape


def model_of(folder: str, device: str) -> Model:
    return Model(folder, dtype=dtype_of(device))


def vocabulary_of(folder: str) -> int:
    return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])


def dtype_of(device: str) -> Dtype:
    return "float32" if device == "cpu" else "bfloat16"


def pool_here(device: str) -> Pool:
    """This machine as the planner sees it."""
    return next(iter(pools_of(ClusterSpec(device="cpu" if device == "cpu" else "cuda:0")).values()))


def shape_of(folder: str, device: str) -> ModelShape:
    return ModelShape.from_config(Path(folder) / "config.json").with_dtype(dtype_of(device))


def beside(row: Row, name: str, measured: float, predicted: float | None) -> Row:
    """Add a number, its prediction and their ratio to a row."""
    row[name] = _rounded(measured)
    if predicted:
        row |= {f"{name} predicted": _rounded(predicted), "predicted/measured": round(predicted / measured, 2)}
    return row


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(device: str, action: Callable[[], object], rounds: int = 3) -> float:
    """Median seconds of an action after one round that counts for nothing."""
    took = []
    for _ in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:])


def peak_gib(device: str) -> float:
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30


# ---- stages


def environment(device: str) -> Found:
    """Report the machine and its libraries; prove that the device computes."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    facts |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "GPUs": torch.cuda.device_count(), "memory GiB": round(properties.total_memory / 2**30, 1)}
        facts |= {"cuda": torch.version.cuda, "capability": ".".join(map(str, torch.cuda.get_device_capability()))}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in ("flash_attn", "sglang", "vllm", "deepspeed", "ray"):
        facts[name] = "installed" if importlib.util.find_spec(name) else "not installed"
    size = 256 if device == "cpu" else 8192
    left = torch.randn(size, size, device=device, dtype=getattr(torch, dtype_of(device)))
    seconds = timed(device, lambda: left @ left)
    row = beside({"what": f"matrix product {size}", "dtype": dtype_of(device)}, "TFLOP/s", 2 * size**3 / seconds / 1e12, None)
    row["peak of the device list"] = _rounded(pool_here(device).device.flops(2 if device != "cpu" else 4) / 1e12)
    return Found(facts, [row])


def tests(device: str) -> Found:
    """Run the tests that need a GPU, or without one those of weights on a device that run anywhere."""
    chosen = ["-m", "gpu"] if device != "cpu" else ["tests/channels/weights/test_device_weights.py", "-m", "not gpu"]
    if importlib.util.find_spec("pytest") is None:
        return Found({"tests": "pytest is not installed"})
    spread = ["-n", str(min(6, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") and device != "cpu" else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *spread, *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    print(done.stdout[-40000:], done.stderr[-2000:])
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise SystemExit(f"tests failed: {done.stdout.strip().splitlines()[-1:]} {' '.join(failed[:20])}")
    return Found({"tests": done.stdout.strip().splitlines()[-1]})


def agreement(device: str) -> Found:
    """Compare the device's log-probabilities and gradients with those of the CPU in float32, on the same samples and weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, "Qwen2.5-0.5B", is_toy=True)
        vocabulary = TOY["vocab_size"]
        batch = make_samples(8, 4, 12, 20, vocabulary)
        source = Model(folder, init="random")
        found: dict[str, tuple[np.ndarray, float, list[list[int]], np.ndarray]] = {}
        for where in dict.fromkeys(("cpu", device)):
            trainer = EmbeddedTrain(source, EngineSettings(device=where))
            trainer.start()
            logprobs = trainer.logprobs(batch).ragged("reference_logprobs").values
            trainer.accumulate(batch, PPO)
            norm = trainer.apply(AdamW(1e-4), 100.0)["grad_norm"]
            trainer.stop()
            engine = EmbeddedRollout(source, EngineSettings(device=where))
            engine.start()
            greedy = sorted(generate(engine, 8, 8, [16] * 8, vocabulary, temperature=0.0), key=lambda sample: sample.id)
            found[where] = logprobs, norm, [list(sample.tokens) for sample in greedy], np.concatenate([s.logprobs for s in greedy])
            engine.stop()
        (ours, norm, tokens, logps), (theirs, norm_cpu, tokens_cpu, logps_cpu) = found[device], found["cpu"]
    same = float(np.mean([a == b for a, b in zip(tokens, tokens_cpu, strict=True)]))
    apart = float(np.abs(ours - theirs).max())
    if apart > 1e-3 or abs(norm / norm_cpu - 1) > 1e-3:
        raise SystemExit(f"log-probabilities differ by {apart} nats, gradient norms by a factor of {norm / norm_cpu}")
    rows = [
        {"what": "largest difference of a log-probability, float32 (nats)", "value": _rounded(apart)},
        {"what": "gradient norm over the CPU's", "value": round(norm / norm_cpu, 6)},
        {"what": "share of greedy answers that are the same", "value": same},
        {"what": "mean difference of a sampled token's log-probability", "value": _rounded(float(np.abs(logps.mean() - logps_cpu.mean())))},
    ]
    return Found({}, rows)


def make_samples(prompts: int, per_prompt: int, prompt_tokens: int, new_tokens: int, vocabulary: int) -> Batch:
    """Samples of equal lengths with random tokens, whose behaviour log-probabilities are those of a uniform policy."""
    generator = np.random.default_rng(0)
    starts = generator.integers(3, vocabulary, (prompts, prompt_tokens)).repeat(per_prompt, 0)
    tokens = np.concatenate([starts, generator.integers(3, vocabulary, (prompts * per_prompt, new_tokens))], axis=1).astype(np.int32)
    mask = np.broadcast_to(np.arange(tokens.shape[1]) >= prompt_tokens, tokens.shape)
    ids = make_ids(0, prompts, per_prompt)
    columns: dict[str, Any] = {"tokens": Ragged.of(list(tokens), np.int32), "loss_mask": Ragged.of(list(mask), bool)}
    behaviour = np.where(mask, np.float32(-np.log(vocabulary)), np.float32(0)).astype(np.float32)
    columns["logprobs"] = Ragged.of(list(behaviour), np.float32)
    return Batch(ids, {**columns, "advantages": generator.normal(size=len(ids)).astype(np.float32)})


def generate(
    engine: EmbeddedRollout, num_samples: int, prompt_tokens: int, lengths: Sequence[int], vocabulary: int, *, temperature: float = 1.0
) -> list[Any]:
    """Generate samples of given lengths, each from a prompt of its own."""
    generator = np.random.default_rng(1)
    prompts = generator.integers(3, vocabulary, (num_samples, prompt_tokens))
    engine.add(
        [
            Request(int(i), tuple(prompts[k].tolist()), k, Sampling(lengths[k], min_new_tokens=lengths[k], temperature=temperature))
            for k, i in enumerate(make_ids(0, num_samples, 1))
        ]
    )
    done: list[Any] = []
    while engine.num_unfinished:
        done += engine.step()
    return done


def decode(device: str) -> Found:
    """Measure tokens a second of the embedded rollout engine by batch and context, by CUDA graphs; of the smaller model without, too.

    Of a 7B model a slice of its layers.
    """
    rows = []
    is_toy = device == "cpu"
    for shape, num_layers in SIZES[: 1 if is_toy else None]:
        folder = model_folder(shape, device, num_layers)
        pool, planned, vocabulary = pool_here(device), shape_of(folder, device), vocabulary_of(folder)
        sizes = ((4, 16, 8),) if is_toy else ((1, 128, 128), (32, 512, 128), (128, 512, 128), (256, 128, 128))
        for has_graphs in (False, True) if num_layers is None else (True,):
            options = {"cuda_graphs": has_graphs}
            engine = EmbeddedRollout(model_of(folder, device), EngineSettings(device=device, max_running=256, options=options))
            engine.start()
            for batch, prompt, new in sizes[:: 1 if has_graphs else 2]:
                seconds = timed(device, lambda: generate(engine, batch, prompt, [new] * batch, vocabulary), rounds=1)  # noqa: B023
                first = timed(device, lambda: generate(engine, batch, prompt, [1] * batch, vocabulary), rounds=1)  # noqa: B023
                step_s = (seconds - first) / (new - 1)
                cost = decode_cost(planned, pool, Layout(), Extent.of([new] * batch, prompt=prompt), batch)
                row: Row = {"model": named(shape, num_layers), "graphs": has_graphs, "batch": batch, "prompt": prompt, "new": new}
                row |= {"tokens/s": round(batch / step_s), "prefill tokens/s": round(batch * prompt / first)}
                rows.append(beside(row, "step ms", step_s * 1e3, (cost.step_s + batch * cost.sample_s) * 1e3))
            engine.stop()
    return Found({"engine": "embedded"}, rows)


def training(device: str) -> Found:
    """Measure tokens a second, share of peak and memory of the trainers; of a 7B model a slice of its layers."""
    rows: list[Row] = []
    failed: list[str] = []
    is_toy = device == "cpu"
    sizes: list[tuple[str, int | None, str]] = [("Qwen2.5-0.5B", None, engine) for engine in ("embedded", "fsdp")]
    for shape, num_layers, engine in sizes if is_toy else [*sizes, (*SIZES[1], "embedded")]:
        try:
            rows.append(_trained(model_folder(shape, device, num_layers), engine, device, named(shape, num_layers)))
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{engine}: {type(error).__name__}: {error}")
    return Found({"attention": attention_of(model_folder(*SIZES[0][:1], device))}, rows, failed)


def deepspeed(device: str) -> Found:
    """The same of DeepSpeed, where it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return Found({"deepspeed": "not installed"})
    return Found({}, [_trained(model_folder("Qwen2.5-0.5B", device), "deepspeed", device, "Qwen2.5-0.5B")])


def _trained(folder: str, engine: str, device: str, name: str) -> Row:
    is_toy = device == "cpu"
    planned, pool = shape_of(folder, device), pool_here(device)
    vocabulary = vocabulary_of(folder)
    batch = make_samples(*((2, 2, 8, 24) if is_toy else (8, 1, 256, 768)), vocabulary)
    tokens = int(batch.ragged("tokens").lengths.sum())
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = make_train(engine, model_of(folder, device), EngineSettings(device=device))
    trainer.start()
    seconds = timed(device, lambda: trainer.accumulate(batch, PPO))
    forward = timed(device, lambda: trainer.logprobs(batch))
    step = timed(device, lambda: (trainer.accumulate(batch, PPO), trainer.apply(AdamW(1e-6), 1.0)), rounds=2) - seconds
    trainer.stop()
    cost, _ = train_cost(planned, pool, Layout(), microbatch_tokens=tokens, is_trained=True, recomputes=False)
    footprint = train_footprint(planned, Layout(), tokens, is_trained=True, recomputes=False)
    predicted = cost.update.seconds([int(length) for length in batch.ragged("tokens").lengths])
    peak = pool.device.flops(planned.bytes_each)
    row: Row = {"model": name, "engine": engine, "tokens": tokens, "tokens/s": round(tokens / seconds)}
    row |= {"MFU": round(6 * planned.num_multiplied * tokens / seconds / peak, 3)}
    row |= {"logprobs ms": _rounded(forward * 1e3), "optimizer ms": _rounded(max(step, 0) * 1e3)}
    row |= {"peak GiB": _rounded(peak_gib(device)), "peak GiB predicted": _rounded(footprint.device_bytes / 2**30)}
    return beside(row, "accumulate ms", seconds * 1e3, predicted * 1e3)


def attention_of(folder: str) -> str:
    return str(load_model(Model(folder), device="cpu", attention="sdpa").config._attn_implementation)


def switches(device: str) -> Found:
    """Measure how long engines take to leave the device and to come back, and what they leave behind."""
    rows = []
    folder = model_folder("Qwen2.5-0.5B", device)
    settings = EngineSettings(device=device, max_running=4 if device == "cpu" else 128)
    for name, kind in (("trainer", EmbeddedTrain), ("rollout", EmbeddedRollout)):
        one = kind(model_of(folder, device), settings)
        one.start()
        if isinstance(one, EmbeddedTrain):
            one.accumulate(make_samples(2, 1, 8, 24, vocabulary_of(folder)), PPO)
            one.apply(AdamW(1e-6), 1.0)
        held = one.memory().total
        times: dict[str, list[float]] = {"offload": [], "onload": []}
        for _ in range(3):
            for way, took in times.items():
                synchronize(device)
                started = time.perf_counter()
                getattr(one, way)()
                synchronize(device)
                took.append(time.perf_counter() - started)
        one.offload()
        left = 0 if device == "cpu" else torch.cuda.memory_allocated()
        row: Row = {"engine": name, "GiB held": _rounded(held / 2**30)}
        row |= {f"{way} s": _rounded(statistics.median(took)) for way, took in times.items()}
        rows.append({**row, "GiB left on the device": _rounded(left / 2**30)})
        one.stop()
    return Found({}, rows)


def weights(device: str) -> Found:
    """Measure GB/s of weight syncs from a trainer's process into a rollout engine's tensors, by transport, checksums included."""
    total = (8 if device == "cpu" else 2048) << 20
    tensors = [(f"layers.{i}", torch.randn(1 << 20, device=device)) for i in range(total >> 22)]
    rows = []
    for transport in ("shared memory", "file", *(() if device == "cpu" else ("cuda ipc",))):
        with tempfile.TemporaryDirectory() as folder:
            publisher = Publisher(f"gpu-kit-{os.getpid()}", WeightOptions((transport,), folder, changes="never", device=device))
            publish_s = timed(device, lambda: publisher.publish(iter(tensors), 1), rounds=1)  # noqa: B023
            manifest = publisher.publish(iter(tensors), 2)
            child = [sys.executable, str(Path(__file__)), "--load", transport, folder, device]
            done = subprocess.run(child, input=_hex(manifest), capture_output=True, text=True, check=False)
            publisher.close()
        if done.returncode:
            raise SystemExit(f"{transport}: {done.stderr[-1500:]}")
        load_s = json.loads(done.stdout.splitlines()[-1])
        row = {"transport": transport, "GB": _rounded(total / 1e9), "publish GB/s": _rounded(total / publish_s / 1e9)}
        rows.append({**row, "load GB/s": _rounded(total / load_s / 1e9)})
    return Found({}, rows)


def _hex(manifest: Manifest) -> str:
    return msgspec.msgpack.encode(manifest).hex() + "\n"


def _load(transport: str, folder: str, device: str) -> None:
    """In the other process: load what was published into tensors of the device, twice; print the seconds of the second time."""
    manifest = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Manifest)
    mine = {entry.name: torch.empty(tuple(entry.shape), device=device) for entry in manifest.tensors}
    subscriber = Subscriber("gpu-kit-reader", directory=folder, device=device)

    def load() -> None:
        for name, tensor in from_wire(subscriber.tensors(manifest, transport), next(iter(mine.values()))):
            mine[name].copy_(tensor)

    print(json.dumps(timed(device, load, rounds=1)))
    subscriber.close()


def main_job(device: str) -> Found:
    """Run flows/grpo.py time-shared and split, and read its accuracy and the time of a step."""
    rows = []
    for placement in ("time-shared", "split"):
        with tempfile.TemporaryDirectory() as folder:
            spec = Path(folder) / "cluster.yaml"
            spec.write_text(f"name: kit\nplacement: {placement}\ndevice: {'cpu' if device == 'cpu' else 'auto'}\n")
            options = ["--num-steps", "2", "--warm-steps", "2", "--batch", "4", "--n", "2"] if device == "cpu" else []
            command = [sys.executable, "-m", "m2flow", "run", str(ROOT / "flows" / "grpo.py"), "--cluster", str(spec), *options]
            started = time.perf_counter()
            done = subprocess.run([*command, "--runs-dir", folder, "--json", "--quiet"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{placement}: {done.stderr[-2000:]}")
            said = json.loads(done.stdout.strip().splitlines()[-1])
            rows.append({"placement": placement, "seconds": round(time.perf_counter() - started, 1), **_told(said)})
    return Found({}, rows)


def _told(said: Mapping[str, Any]) -> Row:
    return {name: value for name, value in said.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def sized_job(device: str) -> Found:
    """Run GRPO on a model of 0.5B parameters, time-shared, in its own processes, and set the measured step beside the planned one."""
    model = model_folder("Qwen2.5-0.5B", device)
    with tempfile.TemporaryDirectory() as folder:
        spec, planned_spec = Path(folder) / "cluster.yaml", Path(folder) / "planned.yaml"
        same = "name: kit\nplacement: time-shared\nrollout: {max_running: 256}\n"
        spec.write_text(f"{same}device: {'cpu' if device == 'cpu' else 'cuda:0'}\n")
        kind = "h100" if device == "cpu" else pool_here(device).device.name
        planned_spec.write_text(f"{same}pools: {{main: {{device: {kind}, nodes: 1, devices_per_node: 1}}}}\n")
        size = {"batch": 2, "n": 2, "max-new-tokens": 8} if device == "cpu" else {"batch": 16, "n": 8, "max-new-tokens": 256}
        options = [str(ROOT / "benchmarks" / "gpu" / "sized_job.py"), "--model", model, "--dtype", dtype_of(device)]
        options += [word for name, value in size.items() for word in (f"--{name}", str(value))]
        planned = _m2flow("plan", *options, "--cluster", str(planned_spec))
        ran = _m2flow("run", *options, "--cluster", str(spec), "--runs-dir", folder, "--json", "--quiet")
        told = json.loads(ran.strip().splitlines()[-1])
        ends = [json.loads(line) for line in (Path(told["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    predicted = [line.removeprefix("step: ") for line in planned.splitlines() if line.startswith("step: ")]
    by_step = {line["step"]: line["time_s"] for line in ends}  # The last line of each step.
    steps_s = np.diff([by_step[step] for step in sorted(by_step)]).tolist()
    facts = {
        "samples a step": size["batch"] * size["n"],
        "tokens a sample": size["max-new-tokens"],
        f"predicted on {kind}": (predicted or ["nothing"])[0],
    }
    return Found(facts | {"measured steps s": [_rounded(seconds) for seconds in steps_s]})


def _m2flow(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "m2flow", *words], capture_output=True, text=True, check=False)
    print(done.stdout[-8000:], done.stderr[-4000:])
    if done.returncode:
        raise SystemExit(f"m2flow {words[0]}: {done.stderr[-2000:] or done.stdout[-2000:]}")
    return done.stdout


def plan_7b(_: str) -> Found:
    """Predict a step of GRPO on a 7B model on one GPU, time-shared: the spec that `clusters/h200-7b.yaml` has ready."""
    spec = ROOT / "clusters" / "h200-7b.yaml"
    options = ["--cluster", str(spec), "--shape", "policy=Qwen2.5-7B"]
    command = [sys.executable, "-m", "m2flow", "plan", str(ROOT / "flows" / "grpo.py"), *options, "--max-new-tokens", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    told = [line.removeprefix("step: ") for line in done.stdout.splitlines() if line.startswith("step: ")]
    if not told:
        raise SystemExit("the plan names no predicted step")
    return Found({"one step on one H200": told[0]})


_RUNS: Mapping[str, Callable[[str], Found]] = {name: globals()[name] for name in STAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.load:
        _load(*a.load)
        return
    if a.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here. `make gpu DEVICE=cpu` runs the kit at toy size.")
    found = _RUNS[a.stage](a.device)
    a.into.write_text(json.dumps(dataclasses.asdict(found)))
    if found.failed:
        raise SystemExit("; ".join(found.failed))


if __name__ == "__main__":
    main()
