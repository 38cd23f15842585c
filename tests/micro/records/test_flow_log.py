"""What is logged is written in the order of the program, planned as eager, also by a run that fails: nothing of the steps after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_clusters import FAKES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, Sample, flow, log, op, steps
from m2flow.errors import RewardError, TraceError
from m2flow.micro.records.flow_record import FlowLog, Logged
from m2flow.runner.run import Run
from m2flow.spec import RunSettings
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 1000}="} for i in range(9)]
few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@flow(staleness="lag")
def fails(at: int = 1, how: str = "reward", lag: int = 0, num_steps: int = 4) -> None:
    """Logs numbers that are known at once, soon and late, around what goes wrong in one step."""

    def judged(sample: Sample) -> float:
        if how == "reward" and sample.day == at:
            raise ValueError("no verdict")
        return float(sample.num_tokens)

    policy, judge, fine = Policy("fake"), Reward(judged), Reward(lambda sample: float(sample.num_tokens), name="fine")
    for step in steps(num_steps):
        prompts = Dataset([{"prompt": f"{i}{step}", "day": step} for i in range(3)], name=f"day {step}")
        responses = policy.generate(prompts.all(), n=2, max_new_tokens=9)
        late = policy.generate(prompts.all(), max_new_tokens=40, min_new_tokens=30, staleness=0)
        log(late=fine.score(late).mean(), step=float(step))
        rewards = judge.score(responses)
        log(reward=rewards.mean(), length=responses.length.mean())
        metrics = policy.update(responses, rewards)
        if step == at and how == "raises":
            log(before=1.0, after=fine.score(responses).max())
            raise LookupError("the flow's own")
        if step == at and how == "looks":
            log(first=fine.score(responses).min())
            float(metrics["nothing of the kind"])
        log(loss=metrics["loss"])


@few
@given(clusters(), st.sampled_from(["reward", "raises", "looks", "none"]), st.integers(1, 3), st.integers(0, 2**30))
def test_a_run_that_fails_leaves_the_logs_that_it_leaves_call_by_call(cluster, how, at, order_seed):
    options = {"how": how, "at": at}
    eager = run_eager(fails, options, cluster)
    planned = run_planned(fails, options, cluster, order_seed=order_seed)
    assert (planned.error, planned.where) == (eager.error, eager.where)
    assert bool(eager.error) == (how != "none")
    assert planned.logs == eager.logs
    assert {step for step, _, _ in eager.logs} == set(range(4 if how == "none" else at + 1))


def logs_of(run_dir: str | Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    logged = ("late", "reward", "length", "before", "after", "first", "loss")
    return [(line["step"], name) for line in lines for name in line if name in logged]


@pytest.mark.parametrize(("how", "error"), [("reward", RewardError), ("looks", TraceError)])
def test_so_do_runs_of_processes_though_python_is_steps_ahead(tmp_path, how, error):
    found = []
    for is_eager in (True, False):
        run = Run(fails, {"how": how, "at": 4, "num_steps": 6}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=is_eager))
        with pytest.raises(error):
            run.execute()
        found.append((logs_of(run.run_dir), run.tally.num_steps, sorted(run.tally.logs)))
    assert found[0] == found[1]
    assert found[0][1] == 4


@flow
def misnamed(text: bool = False) -> None:
    @op(granularity="batch")
    def said(samples: list[Sample]) -> str:
        return "a text"

    policy, fine = Policy("fake"), Reward(lambda sample: 1.0, name="fine")
    responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
    metrics = policy.update(responses, fine.score(responses))
    log(well=metrics["loss"], badly=said(responses) if text else metrics["los"], after=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [(False, "there is no metric 'los'; there are grad_norm, groups_without_advantage, loss"), (True, "a str is no number")],
)
def test_a_log_of_what_is_no_number_names_its_line_in_both_modes(text, said):
    for answer in (
        run_eager(misnamed, {"text": text}, FAKES),
        *(run_planned(misnamed, {"text": text}, FAKES, order_seed=i) for i in range(3)),
    ):
        assert answer.error.startswith(f"TraceError: log: {said}")
        assert "badly=said(responses)" in answer.where


class Results:
    """A program of calls that this test ends one by one."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.failed: set[int] = set()

    def is_resolved(self, ordinal: int) -> bool:
        return ordinal in self.values

    def has_failed(self, ordinal: int) -> bool:
        return ordinal in self.failed

    def are_well(self, num_calls: int) -> bool:
        return all(ordinal in self.values for ordinal in range(num_calls))

    def are_effects_over(self, num_calls: int) -> bool:
        return True

    def has_lost_effect(self, num_calls: int) -> bool:
        return False

    def number(self, ordinal: int, name: str | None) -> float:
        if name == "none":
            raise TraceError("there is none")
        return self.values[ordinal]


def test_logs_are_written_in_the_order_of_the_program_as_soon_as_their_steps_are_well():
    results, written = Results(), []
    book = FlowLog(results, lambda step, name, number: written.append((step, name, number)))
    book.add(Logged(0, "first", (0, None), 0))
    book.add(Logged(0, "second", 2.0, 0))
    book.add(Logged(0, "never", (1, None), 0))
    book.add(Logged(1, "next", 3.0, 2))
    assert written == []
    results.values[0] = 1.0
    book.call_ended(0)
    book.write_due()
    assert written == [(0, "first", 1.0), (0, "second", 2.0)]
    results.failed.add(1)
    book.call_ended(1)
    book.write_due()
    assert len(written) == 2
    results.failed.clear()
    results.values[1] = 0.0
    book.write_due()
    assert written[2:] == [(1, "next", 3.0)]
    with pytest.raises(TraceError, match=r"flow\.py:3  log"):
        book.add(Logged(1, "wrong", (0, "none"), 2, 2, "flow.py:3  log(...)"))
