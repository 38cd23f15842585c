"""FSDP2 over two ranks in real runs: rewards, losses and samples are the embedded trainer's; a killed rank changes nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from cramped import LR, learns
from disturbing import disturbed, same, undisturbed
from mixture_routing import MIXTURES
from safetensors.torch import load_file
from tiny_models import save_config

from m2flow import AdamW, Balance, Dataset, Lora, Policy, Reference, Reward, Sample, flow, log, ppo_clip, steps
from m2flow.engines.registry import train_options
from m2flow.macro.tracing import anticipate, explore
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.records.ledger import read_incidents
from m2flow.observe.store import read_spans
from m2flow.planner.planning import question_of
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec

pytestmark = pytest.mark.slow
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")

DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"


def digits_seen(sample: Sample) -> float:
    return len(set(str(sample.text))) / 8


@flow
def sorts(num_steps: int = 3, rank: int = 0) -> None:
    """Two epochs, so that the loss is no zero; a reference that has other weights than the model began with."""
    policy, verifier = Policy(DIGITS, init="random", lora=Lora(rank) if rank else None), Reward(digits_seen)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(12)], shuffle=False)
    first = policy.generate(prompts.take(4), n=2, max_new_tokens=8)
    policy.update(first, verifier.score(first), optimizer=AdamW(1e-2))
    reference = Reference(policy)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=8)
        rewards = verifier.score(responses)
        metrics = policy.update(
            responses, rewards, reference=reference.logprobs(responses), loss=ppo_clip(kl_coef=0.1), optimizer=AdamW(1e-3), epochs=2
        )
        log(reward=rewards.mean(), total=metrics["loss"])


def run(runs_dir: Path, train: TrainSpec, placement: str, rank: int, *, eager: bool) -> tuple[Summary, dict[str, list[float]]]:
    """Also what was logged, and what updates said: by name, in order."""
    spec = ClusterSpec(placement=placement, device="cpu", cores=2, rollout=RolloutSpec(threads=1), train=train)  # type: ignore[arg-type]
    summary = Run(sorts, {"rank": rank}, spec, RunSettings(runs_dir=str(runs_dir), deterministic=True, eager=eager)).execute()
    said: dict[str, list[float]] = {}
    for line in (Path(summary.run_dir) / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line)["values"].items():
            said.setdefault(name, []).append(value)
    return summary, said


@pytest.mark.parametrize(
    ("placement", "rank", "pp"),
    [
        ("split", 0, 1),
        ("time-shared", 0, 1),
        pytest.param("split", 4, 1, marks=needs_peft),
        ("time-shared", 0, 2),
        ("split", 0, 2),
        pytest.param("split", 4, 2, marks=needs_peft),
    ],
    ids=["split", "time-shared", "adapters", "stages", "split stages", "adapters on stages"],
)
def test_rewards_losses_and_samples_are_those_of_the_embedded_trainer(tmp_path: Path, placement: str, rank: int, pp: int) -> None:
    alone, expected = run(tmp_path, TrainSpec(token_budget=60), placement, rank, eager=True)
    spread, found = run(
        tmp_path, TrainSpec(engine="fsdp", ranks=2, threads=1, token_budget=60, options={"pp": pp}), placement, rank, eager=False
    )
    assert spread.samples_sha256 == alone.samples_sha256
    for name in ("reward", "total", "loss", "kl", "grad_norm", "rollout_diff/max"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert len(found["loss"]) == len(found["total"]) == 3
    written = [span.attributes for span in read_spans(Path(spread.run_dir)) if span.name == "weights.publish"]
    # In one process, and as adapters, weights are gathered.
    assert len(written) == (3 if placement == "split" else 0)
    for publish in written:
        assert ("rank_bytes" in publish) is not bool(rank)
        if not rank:
            of_ranks = publish["rank_bytes"]
            assert isinstance(of_ranks, list)
            assert len(of_ranks) == 2
            assert max(of_ranks) < 1.1 * min(of_ranks)
    assert max(map(abs, found["kl"])) > (0 if rank else 1e-6)  # Adapters have moved little so soon.


def told_by_a_plan() -> dict[str, Any]:
    """The options of the trainer on two stages of two GPUs, as a search chooses them."""
    exploration = explore(sorts, {})
    pin = PinSpec(num_devices=2, layout=LayoutSpec(pp=2, tp=1, sp=1, dp=1))
    spec = ClusterSpec(
        pools={"main": PoolSpec(device="h100", devices_per_node=4)}, rollout=RolloutSpec(engine="sglang"), train=TrainSpec(engine="fsdp")
    ).model_copy(update={"pin": {"policy.train": pin}})
    graph = anticipate(sorts, {}, exploration, steps=TRACED_STEPS)
    choice = question_of(graph, exploration.models, spec).choose()
    workers = workers_of_choice(choice, spec, "cuda:0")
    (slot,) = [slot for worker in workers for slot in worker.engines if (slot.role, slot.kind) == ("policy", "train")]
    return train_options("fsdp", {}, slot.planned)


def test_a_run_in_the_order_of_stages_that_a_search_chose_is_the_eager_one(tmp_path: Path) -> None:
    options = told_by_a_plan()
    assert options["pp"] == 2
    assert options.get("vpp", 1) > 1 or options.get("schedule") == "zero-bubble"
    alone, expected = run(tmp_path, TrainSpec(token_budget=60), "split", 0, eager=True)
    train = TrainSpec(engine="fsdp", ranks=2, threads=1, token_budget=60, options=options)
    ordered, found = run(tmp_path, train, "split", 0, eager=False)
    assert ordered.samples_sha256 == alone.samples_sha256
    for name in ("reward", "total", "loss", "kl", "grad_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


@flow
def routes(path: str, num_steps: int = 3, routing: str = "rollout") -> None:
    balance = Balance(loss=0.1, z_loss=0.01, bias_step=0.01)
    policy = Policy(path, init="random", replay_routing=routing, balance=balance, optimizer=AdamW(1e-3))
    verifier, prompts = Reward(digits_seen), Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(12)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=8)
        policy.update(responses, verifier.score(responses), epochs=2)


@pytest.mark.parametrize(("routing", "is_spread"), [("rollout", False), ("trainer", True)])
def test_a_mixture_on_stages_learns_from_the_routing_of_the_rollout_or_its_own_as_with_the_embedded_trainer(
    routing: str, is_spread: bool, tmp_path: Path
) -> None:
    """Checkpoints are written in the background meanwhile, whole or in parts."""
    path, found = save_config("DeepseekV3", tmp_path / "model", **MIXTURES["DeepseekV3"]), []
    options: dict[str, Any] = {"pp": 2, "spread_checkpoints": is_spread}
    for train in (TrainSpec(token_budget=60), TrainSpec(engine="fsdp", ranks=2, threads=1, token_budget=60, options=options)):
        spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(threads=1), train=train)
        settings = RunSettings(runs_dir=str(tmp_path), checkpoint_steps=1, checkpoint_behind=True)
        summary = Run(routes, {"path": path, "routing": routing}, spec, settings).execute()
        lines = (Path(summary.run_dir) / "metrics.jsonl").read_text().splitlines()
        found.append([values for line in lines if "rerouted" in (values := json.loads(line)["values"])])
        checkpoints = sorted(point.parent for point in Path(summary.run_dir).glob("checkpoints/*/point.json"))
        assert checkpoints
        for checkpoint in checkpoints:
            parts = checkpoint / "policy" / "m2flow_parts"
            assert parts.exists() == (is_spread and train.engine == "fsdp") != (checkpoint / "policy" / "model.safetensors").exists()
    assert len(found[0]) == len(found[1]) == 3
    for name in ("loss", "grad_norm", "rerouted", "balance_loss", "z_loss", "expert_load/max", "expert_load/idle"):
        # Later steps are of other samples: rounding decides some of them where decoding is not deterministic.
        np.testing.assert_allclose(found[1][0][name], found[0][0][name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "pp"), [("20 10000", 1), ("10000 20", 1), ("20 10000", 2)], ids=["on the way in", "on the way back", "in a stage"]
)
def test_ranks_that_run_out_of_memory_go_on_in_smaller_parts_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, pp: int
) -> None:
    """One rank has too many tokens in the middle of a pass, where the other waits for it."""

    def trained(name: str, tokens: str) -> tuple[dict[str, torch.Tensor], list[str], dict[str, float]]:
        monkeypatch.setenv("M2FLOW_TEST_ROOM", tokens)
        train = TrainSpec(engine="fsdp", ranks=2, threads=1, token_budget=10_000, options={"pp": pp})
        spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(threads=1), train=train)
        settings = RunSettings(runs_dir=str(tmp_path / name), deterministic=True)
        run_dir = Path(Run(learns, {}, spec, settings, flow_file=__file__, warn=lambda text: None).execute().run_dir)
        (first, *_) = (run_dir / "metrics.jsonl").read_text().splitlines()
        weights = load_file(run_dir / "checkpoints" / "final" / "policy" / "model.safetensors")
        return weights, [incident.kind for incident in read_incidents(run_dir)], json.loads(first)["values"]

    (whole, nothing, _), (parts, incidents, said) = trained("whole", "10000 10000"), trained("parts", room)
    assert nothing == []
    assert incidents == ["out of memory"]
    assert said["micro_batches_halved"] == 2
    for name, tensor in whole.items():
        # AdamW's step has the size of its learning rate where a gradient is next to nothing, whatever its sign.
        assert float((tensor - parts[name]).abs().mean()) < 0.02 * LR, name


def test_a_run_whose_rank_is_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    arguments = (str(DIGITS), "ranks=2", "rollouts=1", "retry_wait_s=0.0", "num_steps=3")
    said, _ = disturbed(tmp_path / "runs", arguments, "train-0#1", 12_000, lambda process: process.kill(), held_at=2, returns=False)
    assert said.get("error") is None
    assert [incident[1:3] for incident in said["incidents"]] == [["lost", "train-0"]]
    alone = undisturbed(*arguments)
    assert alone.get("error") is None
    assert same(said, alone)


@needs_peft
@pytest.mark.parametrize("sent", ["alone", "added"])
def test_adapters_of_split_layers_are_trained_and_sent_as_with_the_embedded_trainer(
    sent: Literal["alone", "added"], tmp_path: Path
) -> None:
    alone, expected = run(tmp_path, TrainSpec(token_budget=60), "split", 4, eager=True)
    train = TrainSpec(engine="fsdp", ranks=2, threads=1, token_budget=60, options={"tp": 2})
    rollout, weights = RolloutSpec(threads=1), WeightsSpec(adapters=sent)
    spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=rollout, train=train, weights=weights)
    spread = Run(sorts, {"rank": 4}, spec, RunSettings(runs_dir=str(tmp_path), deterministic=True)).execute()
    said = [json.loads(line)["values"] for line in (Path(spread.run_dir) / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward", "loss", "grad_norm", "rollout_diff/max"):
        found = [values[name] for values in said if name in values]
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert spread.samples_sha256 == alone.samples_sha256
