"""Flows run from Python, as in a script or under pytest: the run, its tables, its model, its picture; and what is wrong is said."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import m2flow
from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import FlowLoadError, MissingExtra, OptionError, RewardError, RunInterrupted, SpecError
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.runs import opened
from m2flow.runs.display import curve
from m2flow.runs.entrance import options_of, settings_of, spec_of, target_of
from m2flow.runs.opened import frame_of

DIGITS = Path(__file__).resolve().parents[2] / "flows" / "models" / "digits"
has_frames = pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ("pandas", "pyarrow")), reason="needs the extra frames")


def task(rng: random.Random) -> dict[str, str]:
    return {"prompt": f"{rng.randint(0, 9)}=", "answer": "1"}


def first_is_even(sample: Sample) -> float:
    return float(sample.text[:1] in ("0", "2", "4", "6", "8"))


@flow
def tiny(num_steps: int = 2, n: int = 2, lr: float = 1e-3, cluster: str = "none") -> None:
    """A flow of this test's module, which no worker can import."""
    policy, verifier = Policy(DIGITS, init="random"), Reward(first_is_even)
    prompts = Dataset.generate(task, num_steps * 4, seed=1, name="prompts")
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=n, max_new_tokens=3)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(lr))


def test_a_flow_of_a_tests_module_is_planned_and_simulated_here(tmp_path: Path) -> None:
    planned = m2flow.plan(tiny, cluster={"placement": "split"}, n=4, options={"cluster": "some"})
    assert planned.plan.mode == "split"
    assert "policy.generate(%0, n=4, max_new_tokens=3)" in str(planned)
    assert "<pre" in planned._repr_html_()
    simulated = m2flow.simulate(tiny, steps=2, lengths="lognormal:median=2,sigma=0.3,cap=3")
    assert len(simulated.outcome.report.steps) == 2
    assert 0 < simulated.efficiency <= 1
    assert "all steps" in str(simulated)
    again = simulated.save(tmp_path / "simulated")
    assert again.state == "simulated"


def test_the_command_line_and_python_say_the_same_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from m2flow.cli.main import cli

    monkeypatch.chdir(DIGITS.parents[2])
    done = CliRunner().invoke(cli, ["plan", "flows/grpo.py", "--num-steps", "3", "--no-try"])
    assert done.exit_code == 0, done.output
    mine = str(m2flow.plan("flows/grpo.py", num_steps=3)).partition("\n\ntried on")[0]
    assert done.output.rstrip() == mine


def test_the_table_of_metrics_has_the_step_and_the_last_value_of_a_name_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [(0, {"loss": 1.0, "step": 7.0}), (0, {"loss": 2.0}), (1, {"loss": 3.0, "step": 8.0})]
    text = "".join(json.dumps({"step": step, "time_s": 0.0, "values": values}) + "\n" for step, values in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    monkeypatch.setattr(opened, "frame_of", lambda columns, kind: columns)
    assert opened.Run(tmp_path).metrics() == {"step": [0, 1], "loss": [2.0, 3.0], "log/step": [7.0, 8.0]}


@pytest.mark.parametrize(
    ("name", "said"), [("checkpoint_every", "checkpoint_steps is a number of steps"), ("keep_checkpoints", "checkpoints_kept")]
)
def test_a_setting_by_the_name_of_a_commands_option_is_told_what_it_is_called_here(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"no run setting '{name}'(?s:.*){said}"):
        settings_of({name: 20}, 0, False, False, "runs")


@pytest.mark.slow
@has_frames
def test_a_run_gives_tables_a_model_and_a_picture(tmp_path: Path) -> None:
    run = m2flow.run(tiny, seed=3, runs_dir=tmp_path, quiet=True, num_steps=2)
    assert run.summary is not None
    assert run.summary.samples == 16
    assert run.state == "done"
    assert repr(run).startswith(f"Run({run.path}: done, 2 steps, 16 samples")
    samples = run.samples(order="step DESC")
    assert len(samples) == 16
    assert set(samples["step"]) == {0, 1}
    assert len(run.samples("step = 1", limit=3)) == 3
    assert all(text.endswith("=") for text in samples["prompt_text"])
    assert run.metrics()["step"].tolist() == [0, 1]
    assert run.steps(frame="arrow").column("step").to_pylist() == [0, 1]
    spans = run.spans(frame="arrow").to_pydict()
    assert spans["name"].count("sample") >= 16
    scored = next(one for name, one in zip(spans["name"], spans["attributes"], strict=True) if name == "function.call")
    assert '"rewards"' in scored
    model = run.policy("policy")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert run.tokenizer()("7=")["input_ids"]
    shown = run._repr_html_()
    assert "<svg" in shown
    assert "probability" in shown
    assert Path(run.config["flow"]).name == "test_python_entrance.py"
    with pytest.raises(OptionError, match="can't be used"):
        run.samples("reward <")
    assert m2flow.open_run(runs_dir=tmp_path).path == run.path
    assert "asked for the same" in str(run.compare(run))


def right_at_first(sample: Sample) -> float:
    assert sample.prompt != "1="
    return 1.0


def test_a_run_that_failed_counts_the_steps_that_are_done(tmp_path: Path) -> None:
    @flow
    def fails_in_its_second_step(num_steps: int = 3) -> None:
        policy, verifier = Policy(DIGITS, init="random"), Reward(right_at_first)
        prompts = Dataset([{"prompt": "0="}, {"prompt": "1="}], shuffle=False)
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(1), n=2, max_new_tokens=3)
            policy.update(responses, verifier.score(responses))

    with pytest.raises(RewardError) as failed:
        m2flow.run(fails_in_its_second_step, runs_dir=tmp_path, quiet=True, eager=True)
    assert "1 step is done" in failed.value.__notes__[0]
    run = m2flow.open_run(runs_dir=tmp_path)
    assert ", 1 step, reward 1 -> 1" in repr(run)
    with pytest.raises(SpecError, match="there is no run nowhere"):
        run.compare("nowhere")
    with SampleQuery(run.path) as query, pytest.raises(OptionError, match="limit"):
        query.columns(limit=-1)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal: where tests run as a background job, its signal is ignored, and stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_an_interrupted_run_is_kept_and_goes_on(tmp_path: Path) -> None:
    def num_steps_written() -> int:
        return sum(path.read_bytes().count(b'"reward"') for path in tmp_path.glob("*/metrics.jsonl"))

    def stop(after: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until:
            if num_steps_written() > after:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.1)

    thread = threading.Thread(target=stop, args=(0,))
    thread.start()
    num_steps = 400
    with pytest.raises(RunInterrupted, match="stopped by Ctrl-C in step") as stopped:
        m2flow.run(tiny, runs_dir=tmp_path, quiet=True, num_steps=num_steps, settings={"checkpoint_steps": 1})
    thread.join()
    assert "to go on: m2flow.run(tiny, resume=" in stopped.value.__notes__[0]
    run = m2flow.open_run(runs_dir=tmp_path)
    with pytest.raises(OptionError, match="lr is given, and the run in"):
        m2flow.run(tiny, resume=run, lr=1.0)
    before = {path.name for path in (run.path / "segments").iterdir()}
    assert before
    thread = threading.Thread(target=stop, args=(num_steps_written() + 1,))
    thread.start()
    with pytest.raises(RunInterrupted):
        m2flow.run(tiny, resume=run, quiet=True)
    thread.join()
    assert before <= {path.name for path in (run.path / "segments").iterdir()}


@pytest.mark.parametrize("start", [m2flow.run, m2flow.plan, m2flow.simulate])
def test_an_option_without_a_default_is_missed_before_the_flow_runs(start: Callable[..., object]) -> None:
    @flow
    def needs(num_steps: int) -> None:
        raise AssertionError(num_steps)

    with pytest.raises(OptionError, match="the flow needs needs a value for num_steps") as missed:
        start(needs)
    assert "NAME=VALUE" in missed.value.now


def test_a_plan_and_a_simulation_have_a_step_and_take_one_assumption_as_a_text() -> None:
    for start in (m2flow.plan, m2flow.simulate):
        with pytest.raises(OptionError, match="steps is 0"):
            start(tiny, steps=0)
        start(tiny, assume="reward=0.5")


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(OptionError, match="no option 'lrr'") as wrong:
        options_of(tiny, None, {"lrr": 1})
    assert "lr" in wrong.value.now
    with pytest.raises(OptionError, match="given twice"):
        options_of(tiny, {"lr": 1.0}, {"lr": 2.0})
    with pytest.raises(SpecError, match="placement"):
        spec_of({"placement": "everywhere"})
    with pytest.raises(OptionError, match="no run setting 'checkpoint_step'"):
        settings_of({"checkpoint_step": 3}, 0, False, False, "runs")
    with pytest.raises(FlowLoadError, match="is no flow"):
        m2flow.run(3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="there is no run"):
        m2flow.open_run("nowhere")
    assert settings_of({"checkpoint_steps": 3}, 5, False, False, "runs").seed == 5
    assert target_of(tiny).endswith("test_python_entrance.py")


def test_a_table_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as missing:
        frame_of({"a": [1]})
    assert "pip install 'm2flow[frames]'" in missing.value.now
    monkeypatch.undo()

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(opened.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match="pyarrow"):
        frame_of({"a": [1]}, "arrow")
    with pytest.raises(OptionError, match="no kind of table"):
        frame_of({"a": [1]}, "excel")  # type: ignore[arg-type]


@has_frames
def test_columns_of_mixed_types_become_one_type() -> None:
    table = frame_of({"whole": [1, None, 2.5], "odd": [1, "x", None]}, "arrow")
    assert table.to_pydict() == {"whole": [1.0, None, 2.5], "odd": ["1", "x", None]}


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    assert "nan" not in curve({"reward": [(0, 0.5), (1, float("nan")), (2, 1.0)]})
    assert curve({"reward": [(0, float("nan"))]}) == ""
