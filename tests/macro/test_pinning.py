"""`--pin-plan`: every step has the calls of the first one, or of a given plan, or the run stops at the line that differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from m2flow import Dataset, Policy, Reward, Sample, flow, load_flow, steps
from m2flow.cli.main import cli
from m2flow.errors import DivergenceError, M2FlowError, SpecError
from m2flow.macro.replay import PinnedBackend, read_structure, structure_of
from m2flow.macro.session import Backend
from m2flow.macro.tracing import trace
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

SPEC = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def judged(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow
def loop(extra_in: int = -1, less_in: int = -1, other_in: int = -1, on_earlier_in: int = -1) -> None:
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": str(i)} for i in range(9)])
    first = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
    for step in steps(4):
        n = 3 if step == other_in else 2
        responses = policy.generate(prompts.take(2), n=n, max_new_tokens=5)
        rewards = judge.score(first if step == on_earlier_in else responses)
        if step == extra_in:
            judge.score(responses)
        if step != less_in:
            policy.update(first if step == on_earlier_in else responses, rewards)
    judge.score(policy.generate(prompts.take(1), max_new_tokens=5))


def pinned(run: Callable[..., Answer], structure: object = None, **options: object) -> str:
    def around(live: Backend) -> Backend:
        return PinnedBackend(live, structure, source="the plan") if structure else PinnedBackend(live)  # type: ignore[arg-type]

    return run(loop, options, SPEC, around=around).error


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_steps_of_one_structure_pass_whatever_is_outside_of_them(run):
    assert pinned(run) == ""


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_a_step_of_another_structure_stops_the_run(run):
    assert "call 3 of step 2 is not" in pinned(run, extra_in=2)
    assert "step 3 ends before" in pinned(run, less_in=3)
    assert "call 1 of step 1 is not" in pinned(run, other_in=1)
    assert "call 2 of step 1 is not" in pinned(run, on_earlier_in=1)


def test_the_first_line_that_differs_is_named_with_what_it_should_be():
    error: list[M2FlowError] = []

    class Catching(PinnedBackend):
        def submit(self, call):
            try:
                super().submit(call)
            except M2FlowError as raised:
                error.append(raised)
                raise

    run_eager(loop, {"other_in": 2}, SPEC, around=lambda live: Catching(live))
    where, what, pinned_line, now_line, *_ = str(error[0]).splitlines()
    assert "responses = policy.generate(prompts.take(2), n=n" in where
    assert what.startswith("  call 1 of step 2")
    assert pinned_line.startswith("  pinned: policy.generate(n=2, max_new_tokens=5) on prompts=1 back  ")
    assert now_line.startswith("  now:    policy.generate(n=3, max_new_tokens=5) on prompts=1 back  ")


def test_a_run_is_pinned_to_what_plan_printed(tmp_path):
    source = """
from m2flow import Dataset, Policy, flow, steps
@flow
def tiny(extra: bool = False):
    policy, prompts = Policy("fake"), Dataset([{"prompt": "a"}])
    for step in steps(2):
        policy.generate(prompts.take(1), max_new_tokens=4)
        if extra:
            policy.generate(prompts.take(1), max_new_tokens=5)
"""
    (tmp_path / "tiny.py").write_text(source)
    (tmp_path / "plan.json").write_text(CliRunner().invoke(cli, ["plan", str(tmp_path / "tiny.py"), "--json", "--no-try"]).stdout)
    structure = read_structure(tmp_path / "plan.json")
    settings = RunSettings(eager=True, runs_dir=str(tmp_path))
    program = load_flow(str(tmp_path / "tiny.py"))
    assert Run(program, {}, SPEC, settings, pin_to=structure).execute().steps == 2
    with pytest.raises(DivergenceError, match=r"tiny\.py:9 .*\n  call 2 of step 0 is not"):
        Run(program, {"extra": True}, SPEC, settings, pin_to=structure).execute()
    assert Run(program, {"extra": True}, SPEC, settings, pin_plan=True).execute().steps == 2
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(SpecError, match=r"plan\.json is no plan to pin a run to"):
        read_structure(tmp_path / "plan.json")


def test_a_given_structure_holds_for_the_first_step_too():
    structure = structure_of(trace(loop, {})[0])
    assert pinned(run_eager, structure) == ""
    assert "call 1 of step 0 is not" in pinned(run_eager, structure, other_in=0)
