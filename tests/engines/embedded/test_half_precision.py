"""bfloat16 has no NumPy type; its weights must travel all the same."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY
from torch import Tensor

from m2flow import AdamW, Batch, Dataset, Policy, Reward, flow, steps
from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.optimizers import Optimizers
from m2flow.errors import EngineError
from m2flow.observe.metrics import read_metrics
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, samples, started
from m2flow.testing.world import run_planned

NEEDS_DEEPSPEED = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]
DIGITS = Path(__file__).resolve().parents[3] / "flows" / "models" / "digits"


@flow
def half() -> None:
    policy, verifier = Policy(DIGITS, init="random", dtype="bfloat16"), Reward(lambda sample: float(len(str(sample.text))))
    prompts = Dataset([{"prompt": "12="}, {"prompt": "345="}])
    for _ in steps(2):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


def test_bfloat16_weights_reach_a_rollout_engine_in_another_process_unchanged():
    split, shared = (run_planned(half, {}, ClusterSpec(placement=mode, cores=1, device="cpu")) for mode in ("split", "time-shared"))
    assert split.error == shared.error == ""
    assert [versions[-1] for _, versions in split.samples.values()] == [0] * 4 + [1] * 4


# Masters

SMALL_STEP = AdamW(lr=3e-6)


def trainer(name: str, model: Model, followers: Followers, **options: object) -> TrainEngine:
    if name == "embedded":
        return EmbeddedTrain(model, EngineSettings(options=options))
    if name == "fsdp":
        return Mirrored(FsdpTrain, model, EngineSettings(options=options), followers)
    from m2flow.engines.distributed.deepspeed import DeepSpeedTrain

    return Mirrored(DeepSpeedTrain, model, EngineSettings(options={"zero": 2, **options}), followers)


def test_steps_too_small_for_bfloat16_add_up():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(4))
    lossy = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    three = [(parameter, Optimizers([parameter])), (exact, Optimizers([exact])), (lossy, Optimizers([lossy], has_masters=False))]
    for _ in range(100):
        for held, optimizers in three:
            held.grad = torch.ones_like(held)
            optimizers.step(AdamW(1e-3), 1.0)
    assert torch.equal(parameter, exact.bfloat16())
    assert lossy.tolist() == [1.0] * 4


def test_a_weight_that_someone_else_sets_is_stepped_from_there():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizers = Optimizers([parameter])
    for value in (1.0, 3.0, 5.0):
        with torch.no_grad():
            parameter[0] = value
        parameter.grad = torch.ones_like(parameter)
        optimizers.step(AdamW(0.25), 1.0)
        assert parameter[0].item() == value - 0.25
    assert parameter[1:].tolist() == [0.25] * 3
    assert [master.dtype for master in optimizers.masters()] == [torch.float32]


def test_the_share_of_weights_that_move_is_told():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 1e-6], dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert Optimizers([parameter]).step(AdamW(1e-6), 1.0)["weights_moved"] == 0.5
    exact = torch.nn.Parameter(torch.ones(2))
    exact.grad = torch.ones(2)
    assert "weights_moved" not in Optimizers([exact]).step(AdamW(1e-6), 1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("embedded", {}, marks=pytest.mark.core),
        pytest.param("fsdp", {}, marks=pytest.mark.core),
        *(pytest.param("deepspeed", {"zero": zero}, marks=NEEDS_DEEPSPEED, id=f"deepspeed zero {zero}") for zero in (1, 2, 3)),
    ],
)
def test_every_trainer_tells_the_share_of_weights_that_a_step_moves(name, options, model, followers):
    batch = samples(VOCABULARY)
    with started(trainer(name, replace(model, dtype="bfloat16"), followers, **options)) as engine:
        first = copied(engine)
        engine.accumulate(batch, PPO)
        told = engine.apply(SMALL_STEP, 3.0)["weights_moved"]
        last = copied(engine)
    share = moved(last, first) / sum(tensor.numel() for tensor in first.values())
    is_whole = name == "embedded" or options.get("zero") in (1, 2)
    assert told == pytest.approx(share, abs=1e-6 if is_whole else 0.1)  # Of a trainer whose ranks have parts, those of the first.
    assert 0 < told < 1
    with started(trainer(name, model, followers, **options)) as engine:
        engine.accumulate(batch, PPO)
        assert "weights_moved" not in engine.apply(SMALL_STEP, 3.0)


@pytest.mark.parametrize(
    "name", [pytest.param("embedded", marks=pytest.mark.core), "fsdp", pytest.param("deepspeed", marks=NEEDS_DEEPSPEED)]
)
def test_small_steps_in_bfloat16_add_up_in_every_trainer_and_a_checkpoint_keeps_them(name, model, followers, tmp_path):
    model, batch = replace(model, dtype="bfloat16"), samples(VOCABULARY)
    with started(trainer(name, model, followers)) as engine:
        first = copied(engine)
        for count in range(16):
            if count == 8:
                engine.save(str(tmp_path / "half"))
            step(engine, batch, SMALL_STEP)
        last = copied(engine)
    with started(trainer(name, model, followers)) as engine:
        engine.load(str(tmp_path / "half"))
        for _ in range(8):
            step(engine, batch, SMALL_STEP)
        resumed = copied(engine)
    assert moved(resumed, last) == 0
    with started(EmbeddedTrain(model, EngineSettings(options={"masters": False}))) as engine:
        for _ in range(16):
            step(engine, batch, SMALL_STEP)
        lossy = copied(engine)
    assert moved(last, first) > 3 * moved(lossy, first)


def step(engine: TrainEngine, batch: Batch, recipe: AdamW) -> None:
    engine.accumulate(batch, PPO)
    engine.apply(recipe, 3.0)


def copied(engine: TrainEngine) -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in engine.weights()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    return found


def moved(weights: dict[str, Tensor], first: dict[str, Tensor]) -> int:
    return sum(int((weights[name] != tensor).sum()) for name, tensor in first.items())


def test_a_run_says_once_that_few_weights_move(tmp_path):
    @flow
    def slow(lr: float = 1e-8) -> None:
        policy, verifier = (
            Policy(DIGITS, init="random", dtype="bfloat16"),
            Reward(lambda sample: float(len(str(sample.text))), name="judge"),
        )
        prompts = Dataset([{"prompt": "12="}, {"prompt": "345="}])
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=4, max_new_tokens=3)
            policy.update(responses, verifier.score(responses), optimizer=AdamW(lr))

    for lr, times in ((1e-8, 1), (1e-2, 0)):
        said: list[str] = []
        run = Run(slow, {"lr": lr}, ClusterSpec(cores=1, device="cpu"), RunSettings(runs_dir=str(tmp_path), eager=True), warn=said.append)
        run.execute()
        shares = [share for _, share in read_metrics(run.run_dir)["weights_moved"]]
        assert len(shares) == 2
        assert (max(shares) < 0.01) == (times == 1)
        assert len([text for text in said if "of the weights, as half precision holds them" in text]) == times


def test_the_option_masters_is_true_or_false(model):
    with pytest.raises(EngineError, match=r"masters .*'embedded' is 'no'"):
        EmbeddedTrain(model, EngineSettings(options={"masters": "no"})).start()
