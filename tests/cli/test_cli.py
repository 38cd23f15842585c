"""The command line without runs: what it says, what it accepts, what it loads."""

import enum
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner, Result
from observed_run import record_run, store_run

from m2flow.cli.flow_options import find_target, option_type
from m2flow.cli.main import cli, failure_of, main
from m2flow.errors import InternalError, RewardError, RunInterrupted
from m2flow.micro.records.accounting import Tally
from m2flow.micro.records.rundir import write_config
from m2flow.runs.display import Rates, duration, sparkline
from m2flow.runs.planning import OTHER_WAITS
from m2flow.samples import EPISODE
from m2flow.spec import ClusterSpec, RunSettings

ROOT = Path(__file__).parents[2]
GRPO = str(ROOT / "flows" / "grpo.py")
HEAVY = ("torch", "transformers", "zmq", "matplotlib", "networkx", "urllib.request")

TINY = """
from pathlib import Path
from typing import Literal
from m2flow import Dataset, Policy, Reward, flow, steps

def good(sample):
    return 1.0

@flow
def tiny(
    num_steps: int = 2, rate: float | None = 0.5, shuffle: bool = True, kind: Literal["short", "very_long"] = "short",
    where: Path = Path("data"), seed: int = 7, table: dict[str, int] = {{}}, name="x",
):
    \"\"\"Do next to nothing.

    Args:
        num_steps: how long
            it goes on.
    \"\"\"
    {body}
"""
LOOP = f"""policy = Policy({str(ROOT / "flows" / "models" / "digits")!r}, init="random")
    prompts = Dataset([{{"prompt": "a"}}])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
        policy.update(responses, Reward(good, name=f"good_{{_}}").score(responses))"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return write(tmp_path, LOOP)


def write(folder: Path, body: str) -> str:
    file = folder / "tiny.py"
    file.write_text(TINY.format(body=body))
    return str(file)


def m2flow(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def loaded_by(*arguments: str) -> set[str]:
    """Which heavy modules a command has loaded when it ends."""
    probe = (
        "import sys, contextlib\n"
        "from m2flow.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240)
    return set(done.stderr.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", GRPO], ["run", GRPO, "--help"], ["doctor"], ["engines"]], ids=lambda a: " ".join(a[:1] + a[2:])
)
def test_nothing_heavy_is_loaded_by(arguments: list[str]) -> None:
    assert loaded_by(*arguments) == set()


@pytest.mark.parametrize("first", ["main._load_ahead", "main.Commands.get_command"])
def test_a_second_interrupt_while_the_first_ends_the_command_shows_no_traceback(first: str) -> None:
    probe = (
        "import gc, os, signal\n"
        "from m2flow.cli import main\n"
        "interrupt = lambda *given: os.kill(os.getpid(), signal.SIGINT)\n"
        f"{first} = gc.collect = interrupt\n"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", probe, "engines"], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "RunInterrupted: stopped by Ctrl-C before the run began\n"


CYCLE = """
class Left:
    def __del__(self):
        print("finalized")

@flow
def leaving():
    left = Left()
    left.itself = left
    Dataset([{"prompt": "a"}], name="rows").take(1)
"""


def test_a_command_never_looks_for_garbage_among_modules_and_finalizes_what_a_flow_leaves(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(f"from m2flow import Dataset, flow\n{CYCLE}")
    probe = (
        "import gc, contextlib\n"
        "from m2flow.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(gc.get_threshold()[0], gc.get_freeze_count(), len(gc.get_objects()))"
    )
    program = [sys.executable, "-c", probe, "plan", "leaving.py"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    threshold, frozen, seen = map(int, done.stdout.splitlines()[-1].split())
    assert threshold >= 20_000
    assert frozen > 50_000 > 1_000 > seen
    assert "finalized" in done.stdout.splitlines()[:-1]


def test_help_imports_no_command() -> None:
    probe = "import sys\nfrom click.testing import CliRunner\nfrom m2flow.cli.main import cli\nCliRunner().invoke(cli, ['--help'])\n"
    probe += "print([n for n in sys.modules if n.startswith('m2flow.cli.')])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "['m2flow.cli.main']"


def test_help_lists_every_command_with_an_example_each() -> None:
    listed = m2flow("--help").stdout
    assert "m2flow demo" in listed.partition("Start with")[2]  # Which an installed wheel has too.
    for name in ("run", "plan", "view", "trace", "doctor", "engines"):
        assert f"  {name} " in listed
        shown = m2flow(name, "--help")
        assert shown.exit_code == 0
        assert f"m2flow {name}" in shown.stdout.partition("Example")[2]


def test_help_of_a_sample_names_what_a_users_function_finds_in_it() -> None:
    shown = m2flow("help", "Sample").stdout
    for name in ("prompt", "text", "tokens", "logprobs", "loss_mask", *EPISODE):
        assert f"`{name}`" in shown
    for line in shown.partition("Methods:")[2].splitlines():
        assert not line.endswith("(a property)")


def test_details_of_a_search_are_not_asked_for_in_vain(tiny: str) -> None:
    for option in ("--why", "--full", "--terms"):
        done = m2flow("plan", tiny, "--no-try", option)
        assert done.exit_code == 0, done.output
        assert f"{option} shows nothing here" in done.stdout
        assert "the cluster spec says time-shared" in done.stdout


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "m2flow", "--version"], capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith("m2flow, version ")


def test_ctrl_c_while_the_command_line_loads_is_told_as_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that workers are forked from may be there already: who looks for workers may well press it then."""

    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("m2flow.cli.main._load_ahead", interrupted)
    monkeypatch.setattr(sys, "argv", ["m2flow", "run", "flow.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "RunInterrupted: stopped by Ctrl-C" in capsys.readouterr().err


def test_plan_prints_calls_barriers_and_arithmetic() -> None:
    shown = m2flow("plan", GRPO, "--batch", "16")
    assert shown.exit_code == 0, shown.output
    assert "policy.generate(%6, n=8, max_new_tokens=8)" in shown.stdout
    assert "policy.update(%responses, %rewards, loss='ppo_clip', advantages='grpo')" in shown.stdout
    assert "barriers: none" in shown.stdout
    assert f"(idle for `barrier`, in m2flow analyze: for {OTHER_WAITS})" in shown.stdout
    assert "plan of grpo on laptop: time-shared" in shown.stdout
    assert "16 prompts x n=8" in shown.stdout


def test_plan_shows_both_outcomes_of_what_python_waits_for_or_the_one_that_is_assumed(tmp_path: Path) -> None:
    loop = LOOP.replace("policy.update", "metrics = policy.update")
    body = loop + '\n        if float(metrics["loss"]) > 1:\n            print("seen")\n            prompts.take(3)'
    flow = write(tmp_path, body)
    shown = m2flow("plan", flow).stdout
    calls, _, barriers = shown.partition("barriers: here Python waits")
    assert "tiny.py:25" in barriers
    assert "--assume NAME=NUMBER" in barriers
    assert calls.index("if %metrics['loss'] > 1:") < calls.index("take(count=3)")
    assert "seen" not in shown.splitlines()
    low, high = (m2flow("plan", flow, "--assume", f"loss={value}").stdout for value in (0, 2))
    assert "take(count=3)" not in low
    assert "take(count=3)" in high
    assert "by --assume loss=2" in high
    assert "--assume NAME=NUMBER" not in high
    assert [path["outcomes"][0]["outcome"] for path in json.loads(m2flow("plan", flow, "--json").stdout)["paths"]] == [False, True]


def test_plan_from_what_is_no_run_says_so(tiny: str, tmp_path: Path) -> None:
    result = m2flow("plan", tiny, "--from", str(tmp_path))
    assert result.exit_code == 2
    assert "SpecError: there is no run in" in result.stderr


def test_plan_as_json_has_the_calls_and_the_plan() -> None:
    document = json.loads(m2flow("plan", GRPO, "--json").stdout)
    assert [call["call"] for call in document["calls"][:2]] == ["demos.all", "policy.update"]
    assert document["plan"]["mode"] == "time-shared"


def test_help_of_a_flow_lists_its_parameters_with_types_defaults_and_its_docstring(tiny: str) -> None:
    shown = m2flow("run", tiny, "--help").stdout
    assert "Do next to nothing." in shown
    assert "Args:" not in shown
    text = " ".join(shown.split())
    assert "--num-steps INTEGER how long it goes on. [default 2]" in text
    assert "--rate FLOAT|none default 0.5" in text
    assert "--shuffle / --no-shuffle default true" in text
    assert "--kind [short|very_long] default short" in text
    assert "--where PATH default data" in text
    assert "--name STRING default x" in text or "--name TEXT default x" in text
    assert "--deterministic" in text


def test_a_parameter_with_the_name_of_an_option_is_reached_by_set(tiny: str) -> None:
    text = " ".join(m2flow("run", tiny, "--help").stdout.split())
    assert "give the flow's with --set seed=VALUE" in text
    assert "table is a dict" in text
    assert m2flow("plan", tiny, "--set", "seed=3", "--seed", "4").exit_code == 0


def plan_with(tmp_path: Path, *options: str) -> str:
    """What the flow's parameters were, as its own words."""
    flow = write(tmp_path, 'raise RuntimeError(f"{num_steps!r} {rate!r} {shuffle!r} {kind!r} {where!r} {name!r}")')
    result = m2flow("plan", flow, *options)
    assert result.exit_code == 1
    return result.stderr.partition("RuntimeError: ")[2].splitlines()[0]


def test_options_reach_the_flow_with_their_types(tmp_path: Path) -> None:
    assert plan_with(tmp_path) == f"2 0.5 True 'short' {Path('data')!r} 'x'"
    options = ["--num-steps", "5", "--rate", "none", "--no-shuffle", "--kind", "very_long", "--where", "/tmp", "--name", "y"]
    assert plan_with(tmp_path, *options) == f"5 None False 'very_long' {Path('/tmp')!r} 'y'"
    options = ["--set", "num_steps=6", "--set", "rate=1e-3", "--set", "shuffle=no", "--set", "kind=very_long"]
    assert plan_with(tmp_path, *options) == f"6 0.001 False 'very_long' {Path('data')!r} 'x'"


def test_options_may_come_before_the_file(tmp_path: Path) -> None:
    flow = write(tmp_path, "raise RuntimeError(num_steps)")
    assert "RuntimeError: 9" in m2flow("plan", "--num-steps", "9", flow).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-step", "3"], "OptionError: --num-step is no option of m2flow plan and of the flow tiny\n  Did you mean '--num-steps'?"),
        (["--lr", "3"], "OptionError: --lr is no option of m2flow plan and of the flow tiny\n  `cli plan "),
        (["--num-steps", "x"], "OptionError: --num-steps: 'x' is not a valid integer"),
        (["--kind", "shrt"], "OptionError: --kind: 'shrt' is not one of short, very_long. Did you mean 'short'?"),
        (["--set", "num_step=3"], "OptionError: --set num_step=3: the flow tiny has no parameter 'num_step'\n  Did you mean 'num_steps'?"),
        (["--set", "num_steps=x"], "OptionError: --set num_steps=x: 'x' is not a valid integer"),
        (["--set", "num_steps"], "OptionError: --set num_steps: there is no value"),
        (["--num-steps", "1", "--set", "num_steps=2"], "OptionError: num_steps is given twice"),
        (["--set", "table=1"], "OptionError: --set table=1: table is a dict"),
        (["--num-steps"], "OptionError: Option '--num-steps' requires an argument"),
        (["--shuffle", "true"], "OptionError: --shuffle is a flag: leave `true` out, or say --no-shuffle\n"),
        (["--shuffle=true"], "OptionError: --shuffle is a flag: leave `=true` out, or say --no-shuffle\n"),
        (["--shuffle", "False"], "OptionError: --shuffle is a flag: say --no-shuffle in place of `--shuffle False`\n"),
        (["--no-shuffle=no"], "OptionError: --no-shuffle is a flag: say --shuffle in place of `--no-shuffle=no`\n"),
        (["--terms", "1"], "OptionError: --terms is a flag: leave `1` out\n"),
        (["--rate", "x"], "OptionError: --rate: 'x' is not a valid float"),
        (["more"], "OptionError: Got unexpected extra argument (more)"),
        (["--cluster", "none.yaml"], "SpecError: the cluster spec none.yaml can't be read"),
        (["--steps", "0"], "OptionError: --steps: 0 is not in the range x>=1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_a_usage_error_that_says_what_is_right(tiny: str, options: list[str], message: str) -> None:
    result = m2flow("plan", tiny, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_required_parameter_can_be_given_either_way_and_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "needy.py"
    file.write_text("from m2flow import flow\n@flow\ndef needy(big_count: int):\n    raise RuntimeError(big_count)\n")
    missed = m2flow("plan", str(file))
    assert missed.exit_code == 2
    assert "the flow needy needs big_count\n  Add --big-count ..." in missed.stderr
    assert "--big-count INTEGER  required" in m2flow("plan", str(file), "--help").stdout
    assert "RuntimeError: 4" in m2flow("plan", str(file), "--big-count", "4").stderr
    assert "RuntimeError: 5" in m2flow("plan", str(file), "--set", "big-count=5").stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "FlowLoadError: there is no file"),
        ("def f(:\n", "flow.py:1  def f(:\n  syntax error"),
        ("import nothing_of_that_name\n", "flow.py:1  import nothing_of_that_name\n  importing the flow raised ModuleNotFoundError"),
        ("x = 1\n", "has no flow\n  Decorate its loop with @flow"),
        ("from m2flow import flow\n@flow\ndef a(): ...\n@flow\ndef b(): ...\n", "has 2 flows: a, b\n  Choose one: "),
        ("from m2flow import flow\n@flow\ndef a(*more): ...\n", "has *more; its options must be named parameters"),
    ],
    ids=["no file", "syntax error", "import error", "no flow", "two flows", "varargs"],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_file_that_is_no_flow_is_a_usage_error(tmp_path: Path, command: str, text: str | None, message: str) -> None:
    file = tmp_path / "flow.py"
    if text is not None:
        file.write_text(text)
    result = m2flow(command, str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("FlowLoadError: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_one_of_two_flows_is_chosen_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "flow.py"
    file.write_text("from m2flow import flow\n@flow\ndef a(): raise RuntimeError('a')\n@flow\ndef b(): raise RuntimeError('b')\n")
    assert "RuntimeError: b" in m2flow("plan", f"{file}:b").stderr


def test_what_the_flow_raises_is_the_flows_and_has_its_line(tmp_path: Path) -> None:
    result = m2flow("plan", write(tmp_path, "return 1 // 0"))
    assert result.exit_code == 1
    assert result.stderr.startswith("FlowError: ")
    assert "tiny.py:20  return 1 // 0\n" in result.stderr
    assert "the flow raised ZeroDivisionError" in result.stderr


def test_an_empty_dataset_is_named(tmp_path: Path) -> None:
    result = m2flow("plan", write(tmp_path, 'Dataset([], name="problems")'))
    assert result.exit_code == 1
    assert result.stderr.startswith("DatasetError: ")
    assert "the dataset 'problems' has no rows" in result.stderr


def test_an_unknown_command_names_the_nearest() -> None:
    result = m2flow("rnu", "x")
    assert result.exit_code == 2
    assert "'rnu'. Did you mean 'run'?" in result.stderr
    assert "m2flow run flows/grpo.py" in m2flow("flows/grpo.py").stderr


def test_a_failure_of_our_own_says_so_and_leaves_its_traceback_in_the_logs(tmp_path: Path) -> None:
    try:
        option_type.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        error.__traceback__ = None  # as if it had come from no flow's line
        failure = failure_of(error, tmp_path)
    assert isinstance(failure.error, InternalError)
    assert "please report it" in failure.format_message()
    assert "AttributeError" in (tmp_path / "logs" / "m2flow.log").read_text()


def test_exit_statuses_tell_usage_failure_and_interruption_apart(tmp_path: Path) -> None:
    assert failure_of(RewardError("x")).exit_code == 1
    assert failure_of(RunInterrupted("x")).exit_code == 130
    assert m2flow("view", str(tmp_path)).exit_code == 2


def test_view_and_trace_find_the_newest_run(tmp_path: Path) -> None:
    for age, name in ((20, "grpo-1"), (10, "grpo-2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        moment = (tmp_path / name / "config.json").stat().st_mtime - age
        os.utime(tmp_path / name / "config.json", (moment, moment))
    page = tmp_path / "page.html"
    newest = m2flow("view", "--runs-dir", str(tmp_path), "--html", str(page))
    assert newest.stdout.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")
    empty = m2flow("trace", "grpo-1", "--runs-dir", str(tmp_path), "-o", str(tmp_path / "t.json.gz"))
    assert empty.exit_code == 2
    assert "has recorded nothing" in empty.stderr
    assert not (tmp_path / "t.json.gz").exists()
    store_run(tmp_path / "grpo-1", record_run())
    named = m2flow("trace", "grpo-1", "--runs-dir", str(tmp_path), "-o", str(tmp_path / "t.json.gz"))
    assert named.exit_code == 0, named.output
    assert (tmp_path / "t.json.gz").is_file()
    missing = m2flow("view", "grpo-3", "--runs-dir", str(tmp_path))
    assert missing.exit_code == 2
    assert "there is no run grpo-3" in missing.stderr
    assert "grpo-1, grpo-2" in missing.stderr


def test_doctor_finds_what_the_tests_run_with() -> None:
    result = m2flow("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["torch"]["state"] == "ok"
    assert findings["python"]["value"] == sys.version.split()[0]
    assert {"cpu cores", "memory", "shared memory", "disk", "gpu devices", "gpu use", "extra sglang"} <= set(findings)
    assert result.exit_code == any(finding["state"] == "missing" for finding in findings.values())


def test_engines_lists_the_embedded_ones_as_usable() -> None:
    found = json.loads(m2flow("engines", "--json").stdout)
    assert {"rollout", "train"} == {info["kind"] for info in found if info["name"] == "embedded" and info["usable"]}
    shown = m2flow("engines").stdout
    assert "Continuous batching" in shown
    assert "not to run here" not in shown  # What a plan offers, a run accepts.
    assert "h100, h800, h200" in shown


class Colour(enum.Enum):
    RED = 1


def convert(annotation: object, text: str) -> object:
    kind = option_type(annotation)
    assert kind is not None
    return kind.convert(text, None, None)


def test_annotations_become_option_types() -> None:
    assert convert(Annotated[int, "of apples"], "3") == 3
    assert convert(int | str, "3") == 3
    assert convert(int | str, "x") == "x"
    assert convert(Literal[1, 2] | None, "none") is None
    assert convert(Literal[1, 2] | None, "2") == 2
    assert convert(Colour, "RED") is Colour.RED
    assert option_type(list[int]) is None
    assert option_type(list[int] | None) is None
    with pytest.raises(click.BadParameter, match="'3' is not one of 1, 2"):
        convert(Literal[1, 2], "3")


def test_the_flow_is_found_among_the_arguments() -> None:
    params = [click.Option(["--seed"], type=int), click.Option(["--json"], is_flag=True)]
    assert find_target(["--seed", "3", "a.txt"], params) == "a.txt"
    assert find_target(["--json", "a.py:b", "--n", "3"], params) == "a.py:b"
    assert find_target(["--n", "3", "a.py"], params) == "a.py"
    assert find_target(["--json"], params) is None


def test_a_sparkline_has_bounded_width_and_ignores_what_is_not_finite() -> None:
    assert sparkline([]) == ""
    assert sparkline([float("nan"), 1.0, float("inf"), 1.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], width=30)) == 30


def test_rates_begin_anew_where_a_run_goes_on_from_an_earlier_point() -> None:
    rates = Rates()
    rates.add(1.0, Tally(num_tokens=500, num_samples=50))
    assert rates.add(2.0, Tally(num_tokens=400, num_samples=40, tokens_before=400, samples_before=40)) == (0.0, 0.0)
    assert rates.add(3.0, Tally(num_tokens=410, num_samples=42, tokens_before=400, samples_before=40)) == (10.0, 2.0)


def test_rates_are_over_the_last_moments_only() -> None:
    rates = Rates()
    rates.add(0.0, Tally())  # Before it has read what was there when the run was taken up again.
    assert rates.add(10.0, Tally(num_tokens=9100, num_samples=910, tokens_before=9000, samples_before=900)) == (10.0, 1.0)
    assert rates.add(20.0, Tally(num_tokens=9400, num_samples=910, tokens_before=9000, samples_before=900)) == (30.0, 0.0)


def test_durations_are_written_for_people() -> None:
    assert [duration(s) for s in (0.04, 61, 3600)] == ["0.0 s", "1:01", "1:00:00"]


def test_a_run_of_a_notebook_is_resumed_there_and_one_whose_file_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, flow in (("cell", "In[3]"), ("session", "<stdin>"), ("file", "gone.py:tiny")):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, flow_file=flow, options={}, settings=RunSettings(), spec=ClusterSpec(), models={})
    for name, flow in (("cell", "In[3]"), ("session", "<stdin>")):
        said = m2flow("run", "--resume", name).stderr
        assert f"its flow is {flow} of a notebook or a session of Python, which no command can read" in said
        assert f"Define the flow there again, and call m2flow.run(flow, resume='{name}')." in said
    assert (
        "the flow of file is gone.py:tiny, and there is no such file here\n  Put it back as it was."
        in m2flow("run", "--resume", "file").stderr
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"Begin in {tmp_path}." in m2flow("run", "--resume", "../file").stderr
