"""Losses and biases of routers on tiny random mixtures, against passes of transformers over one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixture_routing import BALANCE, MIXTURES, NLL, balance_history, biases_of, grouped_batch
from tiny_models import save_config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from m2flow import Dataset, Flow, Policy, Reward, Sample, flow, steps
from m2flow.engines.contract import EngineSettings, Objective, Sums, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import ReplicatedTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.routing import BALANCE_LOSS, Z_LOSS
from m2flow.engines.registry import make_train
from m2flow.errors import EngineError, OptionError, PlanError
from m2flow.recipe import SGD, AdamW, Balance, Denominator, Lora, Loss, Model, Routing
from m2flow.runner.run import Run
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, SampleId, compact_experts
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import started

CPU = EngineSettings()
KINDS = {**MIXTURES, "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}


def mean_of_sequences(*, logprobs: torch.Tensor, sequence_lengths: torch.Tensor) -> torch.Tensor:
    return -logprobs / sequence_lengths


def plain(*, logprobs: torch.Tensor) -> torch.Tensor:
    return -logprobs


LOSSES: dict[str, Loss] = {
    "tokens": NLL,
    "sequences": Loss("mean_of_sequences", mean_of_sequences, ("logprobs", "sequence_lengths"), "sequences"),
    "groups": Loss("plain", plain, ("logprobs",), "groups"),
}


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config(request.param, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config("DeepseekV3", tmp_path_factory.mktemp("deepseek"), **MIXTURES["DeepseekV3"])


def expected_of(model: Any, batch: Batch, denominator: Denominator, balance: Balance) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Gradients of the sum of terms with the losses of routers, and the sums of both over predicted tokens: each sample by itself."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    seen = list[tuple[torch.Tensor, torch.Tensor]]()
    hooks = [one.register_forward_hook(lambda _module, _given, found: seen.append((found[0], found[2]))) for one in routers]
    tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
    lengths = dict[int, int]()
    for i, packed in enumerate(batch.ids.tolist()):
        prompt = SampleId.unpack(packed).prompt
        lengths[prompt] = lengths.get(prompt, 0) + int(mask.item(i).sum())
    total, sums = torch.zeros(()), [0.0, 0.0]
    for i, packed in enumerate(batch.ids.tolist()):
        places = np.flatnonzero(mask.item(i))
        own = torch.tensor(np.asarray(tokens.item(i), np.int64))[: places[-1] + 1]
        seen.clear()
        logits = model(input_ids=own[None, :-1], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, own[1:, None])[places - 1, 0]
        losses = torch.stack([torch.stack(losses_of(one, experts, type(routers[0]).__name__)) for one, experts in seen]).mean(0)
        weight = {"tokens": 1.0, "sequences": 1 / len(places), "groups": 1 / lengths[SampleId.unpack(packed).prompt]}[denominator]
        total = total + weight * (-logprobs.sum() + len(places) * (balance.loss * losses[0] + balance.z_loss * losses[1]))
        sums = [one + len(places) * value for one, value in zip(sums, losses.tolist(), strict=True)]
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    total.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, sums


def losses_of(logits: torch.Tensor, experts: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    count, chosen = logits.shape[1], experts.shape[1]
    z = logits.logsumexp(1).square().mean()
    if not kind.startswith("Deepseek"):
        return load_balancing_loss_func((logits,), count, chosen), z
    scores = logits.sigmoid()
    sent = torch.nn.functional.one_hot(experts, count).sum(1).float().mean(0)
    return count * (sent * (scores / scores.sum(1, keepdim=True)).mean(0)).sum(), z


def accumulated(engine: EmbeddedTrain, batches: Sequence[Batch], loss: Loss = NLL) -> tuple[dict[str, torch.Tensor], list[Sums]]:
    sums = [engine.accumulate(batch, Objective(loss)) for batch in batches]
    found = {name: one.grad.clone() for name, one in engine._model.named_parameters() if one.grad is not None}
    engine.discard()
    return found, sums


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of gradients, in parts of the largest; a NaN is one."""
    assert set(found) == set(expected)
    assert all(one.isfinite().all() for one in found.values())
    return max(float((found[name] - one).abs().max()) for name, one in expected.items()) / max(
        float(one.abs().max()) for one in expected.values()
    )


@pytest.mark.parametrize("denominator", LOSSES)
def test_gradients_and_metrics_are_those_of_transformers_one_sequence_at_a_time(path: str, denominator: Denominator) -> None:
    """Whether a micro-batch shares prompts, or a mini-batch is cut: a shared prompt counts for each sample that has it."""
    batch, source = grouped_batch(), Model(path, "random", balance=BALANCE)
    expected, sums = expected_of(load_model(source, device="cpu", attention="eager"), batch, denominator, BALANCE)
    without, _ = expected_of(load_model(source, device="cpu", attention="eager"), batch, denominator, Balance(loss=1e-9))
    assert apart(without, expected) > 1e-2
    groups = [np.arange(3 * i, 3 * i + 3) for i in range(3)]
    cuts = {"whole": [np.arange(9)], "by group": groups[::-1]}
    if denominator != "groups":
        cuts["one by one"] = [np.array([i]) for i in (4, 1, 8, 0, 2, 7, 3, 5, 6)]
    for shares in (True, False):
        engine = EmbeddedTrain(source, EngineSettings(options={"share_prompts": shares}))
        with started(engine):
            for cut, rows in cuts.items():
                found, said = accumulated(engine, [batch.take(one) for one in rows], LOSSES[denominator])
                assert apart(found, expected) < 1e-5, (cut, shares)
                for name, value in zip((BALANCE_LOSS, Z_LOSS), sums, strict=True):
                    assert sum(one.metrics[name] for one in said) == pytest.approx(value, rel=1e-5)


def test_experts_that_are_replayed_are_those_that_tokens_are_sent_to(path: str) -> None:
    batch, routing = grouped_batch(), "rollout"
    source = Model(path, "random", balance=BALANCE, routing=routing)
    engine = EmbeddedTrain(source, CPU)
    with started(engine):
        assert engine._routers is not None
        mixture = engine._routers.mixture
        alone = np.tile(np.arange(mixture.num_of_token), (len(batch.ragged("tokens").values), mixture.num, 1)).astype(np.int16)
        sent = batch.with_columns(**{ROUTED_EXPERTS: Ragged(compact_experts(alone, mixture.num_experts), batch.ragged("tokens").offsets)})
        own, replayed = (engine.accumulate(rows, Objective(NLL)).metrics[BALANCE_LOSS] for rows in (batch, sent))
        tokens = engine.accumulate(batch, Objective(NLL)).num_tokens
        assert replayed != pytest.approx(own, rel=1e-3)
        # All tokens at the same k of E experts: E times their probability, which is about k / E.
        assert replayed / tokens == pytest.approx(mixture.num_of_token, rel=0.3)
        assert engine.apply(SGD(lr=0.1), 1.0)["expert_load/max"] > 1


@pytest.mark.parametrize("kind", [FsdpTrain, ReplicatedTrain])
@pytest.mark.parametrize("routing", [None, "trainer"])
def test_ranks_of_shards_or_replicas_balance_as_one(kind: Any, routing: Routing | None, path: str, followers: Followers) -> None:
    batch = grouped_batch(5, 2)
    source = Model(path, "random", balance=BALANCE, routing=routing)
    found = [balance_history(engine, batch) for engine in (EmbeddedTrain(source, CPU), Mirrored(kind, source, CPU, followers))]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "recomputes"), [(1, False), (3, True)])
def test_ranks_of_deepspeed_balance_as_one(zero: int, recomputes: bool, path: str, followers: Followers) -> None:
    pytest.importorskip("deepspeed")
    from m2flow.engines.distributed.deepspeed import DeepSpeedTrain

    batch = grouped_batch(5, 2)
    bias_step = 1e-3 if "Deepseek" in path else 0.0
    source = Model(path, "random", balance=Balance(loss=0.5, z_loss=0.3, bias_step=bias_step))
    settings = EngineSettings(options={"zero": zero, "activation_checkpointing": recomputes})
    engines = (EmbeddedTrain(source, CPU), Mirrored(DeepSpeedTrain, source, settings, followers))
    found = [balance_history(engine, batch, optimizer=AdamW(1e-3, eps=1e-3)) for engine in engines]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=2e-6, err_msg=name)
    with pytest.raises(EngineError, match="experts are not balanced where a loss is scaled"):
        DeepSpeedTrain(source, EngineSettings(options={"compute_dtype": "float16"}, num_ranks=2))


def test_biases_follow_the_loads_of_a_step_and_even_them_out(deepseek: str, tmp_path: Path, followers: Followers) -> None:
    source, batch = Model(deepseek, "random", balance=Balance(bias_step=0.01)), grouped_batch(8, 4)
    engine = EmbeddedTrain(source, CPU)
    with started(engine):
        before = biases_of(engine)
        engine.accumulate(batch, Objective(NLL))
        assert engine._routers is not None
        loads = engine._routers.loads.taken()
        engine._routers.loads._counts = loads.clone()
        assert BALANCE_LOSS not in engine.accumulate(batch.take(np.arange(0)), Objective(NLL)).metrics
        first = engine.apply(SGD(lr=1e-9), 1.0)
        moved = biases_of(engine)
        assert len(moved) == len(loads) == 2
        for own, (name, bias) in zip(loads, moved.items(), strict=True):
            np.testing.assert_allclose(bias - before[name], 0.01 * np.sign(float(own.mean()) - own.numpy()), atol=1e-7)
        engine.save(str(tmp_path / "saved"))
        for _ in range(30):
            engine.accumulate(batch, Objective(NLL))
            last = engine.apply(SGD(lr=1e-9), 1.0)
        assert last["expert_load/max"] < 0.8 * first["expert_load/max"]
        evened = biases_of(engine)
        engine.load(str(tmp_path / "saved"))
        assert all((biases_of(engine)[name] != one).any() for name, one in evened.items())
        engine.accumulate(batch, Objective(NLL))
        engine.discard()
        with pytest.raises(EngineError):
            engine.apply(SGD(lr=1e-9), 1.0)
    for kind in (FsdpTrain, ReplicatedTrain):
        one, several = (history_of_biases(each, batch) for each in (EmbeddedTrain(source, CPU), Mirrored(kind, source, CPU, followers)))
        assert one.keys() == several.keys()
        assert all((one[name] == several[name]).all() for name in one)
        assert any(one[name].any() for name in one)


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_biases_of_a_model_in_half_precision_move_by_steps_that_would_be_lost_in_it(init: str, deepseek: str, tmp_path: Path) -> None:
    source = Model(deepseek, "random", dtype="bfloat16", balance=Balance(bias_step=1e-3))
    if init == "pretrained":
        with started(EmbeddedTrain(source, CPU)) as first:
            first.save(str(tmp_path / "saved"))
        source = Model(str(tmp_path / "saved"), "pretrained", dtype="bfloat16", balance=Balance(bias_step=1e-3))
    with started(EmbeddedTrain(source, CPU)) as engine:
        biases = {name: one for name, one in engine._model.named_buffers() if name.endswith("e_score_correction_bias")}
        for one in biases.values():
            one.fill_(0.9)
        engine.accumulate(grouped_batch(8, 4), Objective(NLL))
        engine.apply(SGD(lr=1e-9), 1.0)
        moved = {round(abs(float(value) - 0.9), 6) for one in biases.values() for value in one.flatten()}
        assert 0.001 in moved
        assert moved <= {0.0, 0.001}


def history_of_biases(engine: TrainEngine, batch: Batch) -> dict[str, Any]:
    with started(engine):
        for _ in range(2):
            for rows in (np.arange(5), np.arange(5, len(batch))):
                engine.accumulate(batch.take(rows), Objective(NLL))
            engine.apply(SGD(lr=1e-9), 1.0)
        return biases_of(engine)


def balancing(path: str, seen: list[dict[str, float]]) -> Flow:
    @flow
    def balanced(num_steps: int = 2) -> None:
        policy = Policy(path, init="random", balance=Balance(loss=0.1, z_loss=0.01, bias_step=0.01), optimizer=AdamW(1e-2))
        verifier, prompts = Reward(longer), Dataset([{"prompt": f"{i}+{i + 1}="} for i in range(8)], shuffle=False)
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(4), n=4, max_new_tokens=6)
            metrics = policy.update(responses, verifier.score(responses))
            seen.append({name: float(metrics[name]) for name in (BALANCE_LOSS, Z_LOSS, "expert_load/max")})

    return balanced


def longer(sample: Sample) -> float:
    return float(len(sample.tokens))


@pytest.mark.slow
def test_a_run_reports_losses_and_loads_and_sends_biases_to_the_rollout_engine(deepseek: str, tmp_path: Path) -> None:
    """With the weights, whose checksums and log-probabilities are compared."""
    seen = list[dict[str, float]]()
    spec = ClusterSpec(device="cpu", cores=2, placement="split")
    summary = Run(balancing(deepseek, seen), {}, spec, RunSettings(runs_dir=str(tmp_path))).execute()
    assert seen
    for metrics in seen[-2:]:
        assert 2.0 < metrics[BALANCE_LOSS] < 8.0
        assert metrics[Z_LOSS] > 1.0
        assert metrics["expert_load/max"] >= 1.0
    assert summary.weights_sha256


def test_a_plan_with_an_engine_that_balances_nothing_is_refused(deepseek: str) -> None:
    spec = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    with pytest.raises(PlanError, match=r"policy has balance=.*'fake' can't balance") as caught:
        Run(balancing(deepseek, []), {}, spec, RunSettings()).prepare()
    assert "megatron" in str(caught.value)
    with pytest.raises(EngineError, match="can't balance experts"):
        make_train("fake", Model(deepseek, balance=BALANCE), CPU)


def test_what_has_no_place_for_it_is_refused_by_name(path: str, tmp_path: Path) -> None:
    dense = save_config("Qwen3", tmp_path / "dense", head_dim=8)
    with pytest.raises(EngineError, match="'qwen3' model is no mixture"):
        EmbeddedTrain(Model(dense, "random", balance=BALANCE), CPU).start()
    with pytest.raises(EngineError, match="'qwen3' model is no mixture"):
        check_fsdp(Model(dense, "random", balance=BALANCE), {"pp": 2}, 2)
    engine = EmbeddedTrain(Model(path, "random", balance=Balance(bias_step=1e-3)), CPU)
    if "Deepseek" not in path:
        with pytest.raises(EngineError, match="have no bias that counts for the choice of experts alone"):
            engine.start()
    with pytest.raises(OptionError, match="bias_step moves weights below adapters"):
        Model(path, "random", balance=Balance(bias_step=1e-3), lora=Lora())
    with pytest.raises(OptionError, match=r"Balance\(\) balances nothing"):
        Balance()
