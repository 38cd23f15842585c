"""A recorded run goes on live with worker processes: nothing is executed up to the point, and the answer is that of the whole run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from replayed import ROWS, Counting, digits

from m2flow import AdamW, Dataset, Flow, Policy, Reference, Reward, flow, log, ppo_clip, steps
from m2flow.errors import DivergenceError
from m2flow.macro.graph import Call
from m2flow.macro.replay import Record, ReplayBackend, nothing, prints_muted, trains
from m2flow.macro.session import Backend
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.ledger import read_samples
from m2flow.runner.run import Run, Summary
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

SPEC = ClusterSpec(
    device="cpu",
    cores=2,
    placement="split",
    rollout=RolloutSpec(engine="fake", max_running=4),
    train=TrainSpec(engine="fake", token_budget=60),
    functions=FunctionSpec(chunk=2),
)


@flow
def loop(num_steps: int = 4, seen: list[object] | None = None) -> None:
    """What comes next depends on what was seen, and on the flow's own dice; the last steps use rows of the first."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference, first = Reference(policy), None
    if seen is not None:
        seen.clear()
    for step in steps(num_steps):
        n = random.choice([2, 3, 4])
        responses = policy.generate(prompts.take(2), n=n, max_new_tokens=12)
        first = first if first is not None else responses
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, optimizer=AdamW(1e-3))
        log(again=judge.score(policy.generate(first, max_new_tokens=3)).mean())
        if float(metrics["num_tokens"]) % 2:
            prompts.take(1)
        print(f"step {step}")
        if seen is not None:
            seen.append((n, prompts.cursor, metrics.lagged(1), random.random()))


@flow
def frozen(num_steps: int = 4, seen: list[object] | None = None) -> None:
    """Nothing is trained."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    if seen is not None:
        seen.clear()
    count = 1
    for _ in steps(num_steps):
        rewards = judge.score(policy.generate(prompts.take(count), n=2, max_new_tokens=12))
        count = 1 + int(1000 * float(rewards.mean())) % 3
        log(spread=rewards.max() - rewards.min())
        if seen is not None:
            seen.append((count, list(rewards)))


class Resumed(Run):
    """A run of worker processes that begins where another was. Updates are made again, where there are any: no checkpoint is taken."""

    def __init__(self, flow: Flow, seen: list[object], runs: Path, record: Record, until_step: int, redoes: Callable[[Call], bool]) -> None:
        super().__init__(flow, {"seen": seen}, SPEC, RunSettings(runs_dir=str(runs)))
        self._from = record, until_step, redoes
        self.replay: ReplayBackend | None = None
        self.executed: list[Call] = []

    def _recorded(self, backend: Backend) -> Backend:
        record, until_step, redoes = self._from
        live = Counting(backend)
        self.executed = live.calls
        self.replay = ReplayBackend(record, live, until_step=until_step, redoes=redoes)
        return super()._recorded(self.replay)

    def go_on(self) -> Summary:
        self.prepare()
        with prints_muted(lambda: self.replay is None or not self.replay.is_live):
            return self.execute()


def whole(program: Flow, runs: Path) -> tuple[Summary, list[object]]:
    seen: list[object] = []
    return Run(program, {"seen": seen}, SPEC, RunSettings(runs_dir=str(runs / "whole"))).execute(), seen


def samples_of(summary: Summary) -> dict[SampleId, tuple[list[int], list[float]]]:
    rows = read_samples(Path(summary.run_dir))
    return {SampleId.unpack(int(row.ids[0])): (row.ragged("tokens").row(0).tolist(), rewards) for row, rewards in rows}


@pytest.mark.parametrize(("program", "until_step", "redoes"), [(loop, 2, trains), (frozen, 2, nothing)], ids=["trained", "frozen"])
def test_a_run_of_processes_goes_on_from_the_middle_of_its_record(tmp_path, capsys, program, until_step, redoes):
    summary, seen = whole(program, tmp_path)
    capsys.readouterr()
    again: list[object] = []
    resumed = Resumed(program, again, tmp_path / "resumed", read_record(Path(summary.run_dir)), until_step, redoes)
    went_on = resumed.go_on()

    done_again = [call for call in resumed.executed if call.step < until_step and call.engine != "source"]
    assert all(call.engine == "train" for call in done_again)
    assert bool(done_again) == (redoes is trains)
    assert again == seen
    assert went_on.weights_sha256 == summary.weights_sha256
    before, after = samples_of(summary), samples_of(went_on)
    record = read_record(Path(summary.run_dir))
    assert after == {who: what for who, what in before.items() if record.calls[who.call].step >= until_step}
    assert 0 < len(after) < len(before)
    if program is loop:
        assert capsys.readouterr().out.splitlines() == [f"step {step}" for step in range(until_step, 4)]


def test_a_flow_that_was_changed_before_the_point_stops_before_a_worker_has_work(tmp_path):
    summary, _ = whole(frozen, tmp_path)
    resumed = Resumed(loop, [], tmp_path / "resumed", read_record(Path(summary.run_dir)), 2, nothing)
    with pytest.raises(DivergenceError, match=r"call 0: .*reference\.copy_of .*recorded .*dataset\.take"):
        resumed.go_on()
    assert resumed.executed == []
