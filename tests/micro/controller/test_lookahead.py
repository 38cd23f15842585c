"""How far Python may be ahead; and that eager repeats a run of real processes from its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import SpecError
from m2flow.macro.tracing import trace
from m2flow.micro.controller.controller import Lookahead
from m2flow.micro.records.ledger import read_decisions
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec


def letters(sample: Sample) -> float:
    return len(set(str(sample.text))) / 8


@flow(staleness="lag")
def loop(lag: int = 1, num_steps: int = 8) -> None:
    policy, reward = Policy("fake"), Reward(letters)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(10, 50)], name="prompts")
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(10), n=2, max_new_tokens=32)
        policy.update(responses, reward.score(responses), optimizer=AdamW(1e-4))


def due(lag: int, budget_bytes: int) -> list[int]:
    """The step that must be over at the end of each of five."""
    graph, _, _ = trace(loop, {"lag": lag}, steps=5)
    ahead = Lookahead(lag, budget_bytes)
    found = []
    for step in range(5):
        for call in graph.calls:
            if call.step == step:
                ahead.add(call)
        found.append(ahead.due(step))
    return found


def test_python_is_ahead_by_the_staleness_and_one_step() -> None:
    assert due(0, 1) == [-1, 0, 1, 2, 3]
    assert due(1, 2**30) == [-2, -1, 0, 1, 2]
    assert due(3, 2**30) == [-4, -3, -2, -1, 0]


def test_a_budget_of_memory_holds_python_back_and_never_below_one_step_at_a_time() -> None:
    step = 20 * (32 + len("10=") + 1) * 16  # Rows, tokens of each at most, bytes of each.
    assert due(3, 2 * step) == [-4, -3, 0, 1, 2]
    assert due(3, 2 * step - 1) == [-4, 0, 1, 2, 3]
    assert due(3, 1) == [0, 1, 2, 3, 4]


def test_a_run_of_processes_records_what_time_decided_and_an_eager_run_repeats_it(tmp_path: Path) -> None:
    rollout, train = RolloutSpec(engine="fake", max_running=8), TrainSpec(engine="fake", token_budget=128)
    spec = ClusterSpec(device="cpu", cores=2, placement="split", rollout=rollout, train=train)
    settings = RunSettings(runs_dir=str(tmp_path / "runs"))
    planned = Run(loop, {}, spec, settings).execute()
    decisions = read_decisions(Path(planned.run_dir))
    assert len(decisions) == 7 * 20
    assert "staleness=1" in (Path(planned.run_dir) / "plan.txt").read_text()

    settings = settings.model_copy(update={"eager": True})
    eager = Run(loop, {}, spec, settings, decisions=decisions).execute()
    assert (eager.samples_sha256, eager.weights_sha256) == (planned.samples_sha256, planned.weights_sha256)
    assert read_decisions(Path(eager.run_dir)) == decisions
    with pytest.raises(SpecError, match="can't read the decisions of"):
        read_decisions(tmp_path)
