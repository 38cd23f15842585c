"""Two SGLang servers in one run: instances of one role, and one of each of two roles. Each holds the weights of its role."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from sglang_here import NEEDS_SGLANG, OPTIONS
from synced_run import DIGITS, digits_seen, synced

from m2flow import AdamW, Dataset, Policy, Reward, flow, steps
from m2flow.micro.records.ledger import read_samples
from m2flow.observe.spans import Span
from m2flow.observe.store import read_spans
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), NEEDS_SGLANG]


@flow
def rivals() -> None:
    """Two policies, each with updates of its own."""
    first, second, verifier = Policy(DIGITS, init="random", name="first"), Policy(DIGITS, init="random", name="second"), Reward(digits_seen)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8)], shuffle=False)
    for _ in steps(2):
        asked = prompts.take(4)
        for policy in (first, second):
            responses = policy.generate(asked, n=2, max_new_tokens=6)
            policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


def served(num_workers: int) -> ClusterSpec:
    return ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="sglang", workers=num_workers, options={**OPTIONS, "start_timeout_s": 600}),
        train=TrainSpec(token_budget=64),
        weights=WeightsSpec(probe="always"),  # After each sync the server's log-probabilities are the trainer's, or the run ends.
    )


def by_worker(run_dir: Path, name: str) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in read_spans(run_dir):
        if span.name == name:
            found[span.lane[0]].append(span)
    return found


def assert_every_sample_is_of_one_version(run_dir: Path, number: int) -> None:
    samples = [sample for sample, _ in read_samples(run_dir)]
    assert len(samples) == number
    for sample in samples:
        assert len(set(sample.ragged("versions").values[sample.ragged("loss_mask").values.astype(bool)].tolist())) == 1


def assert_rollout_and_trainer_agree(run_dir: Path, number: int) -> None:
    logged = [json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    differences = [value for values in logged for name, value in values.items() if name.endswith("rollout_diff/max")]
    assert len(differences) == number
    assert max(differences) < 1e-3


def test_two_instances_of_a_role_share_its_samples_and_each_takes_every_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD_IN", str(tmp_path))  # One alone could make the answers of a step.
    run = Run(synced, {"model": str(DIGITS)}, served(2), RunSettings(runs_dir=str(tmp_path)))
    run.execute()
    lives, loads = by_worker(run.run_dir, "sample"), by_worker(run.run_dir, "weights.load")
    assert set(lives) == set(loads) == {"rollout-0", "rollout-1"}
    assert len({span.attributes["sample"] for spans in lives.values() for span in spans}) == 24
    first, second = ([span.attributes["version"] for span in loads[worker]] for worker in ("rollout-0", "rollout-1"))
    assert first == second
    assert len(first) >= 2
    assert_every_sample_is_of_one_version(run.run_dir, 24)
    assert_rollout_and_trainer_agree(run.run_dir, 3)


def test_two_roles_have_a_server_each_with_the_weights_of_its_role(tmp_path: Path) -> None:
    run = Run(rivals, {}, served(1), RunSettings(runs_dir=str(tmp_path)))
    run.execute()
    probed = {str(span.attributes["label"]) for spans in by_worker(run.run_dir, "rollout.probe").values() for span in spans}
    assert len(probed) == 2
    assert_every_sample_is_of_one_version(run.run_dir, 32)
    assert_rollout_and_trainer_agree(run.run_dir, 4)
