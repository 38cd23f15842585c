"""`generate(sampling_mask=True)`: the trainer goes by what each token was drawn from, as the rollout engine does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_clusters import SPLIT
from tiny_models import byte_tokenizer, save_config

from m2flow import Dataset, Policy, Reference, Reward, Sample, concat, distill_top_k, flow, steps
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import OptionError, PlanError, TraceError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.capabilities import check_sampling
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Ragged, unpacked_masks
from m2flow.testing.rollout_suite import check_what_tokens_were_drawn_from_is_recorded, generate, group_requests
from m2flow.testing.world import run_eager, run_planned

CUTS = {
    "top_p": Sampling(12, top_p=0.8, temperature=1.5, sampling_mask=True),
    "top_k": Sampling(12, top_k=3, sampling_mask=True),
    "min_p": Sampling(12, min_p=0.6, min_new_tokens=4, sampling_mask=True),
    "shifted": Sampling(12, top_k=4, logit_bias=((7, 2.0),), repetition_penalty=1.3, sampling_mask=True),
    "regex": Sampling(12, regex="[0-9=]{2,9}", sampling_mask=True),
    "nothing": Sampling(12, sampling_mask=True),
    "greedy": Sampling(12, temperature=0.0, top_k=3, sampling_mask=True),
}


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_trainer_and_rollout_engine_agree_on_what_was_left(cut: str, is_fixed: bool, tmp_path: Path) -> None:
    if CUTS[cut].is_constrained:
        pytest.importorskip("llguidance")
    size = len(byte_tokenizer(tmp_path, merges=["1 2"]))
    path = save_config("Qwen2", tmp_path, vocab_size=size, eos_token_id=0, pad_token_id=0, tokenizer=False)
    model, settings = Model(path, init="random"), EngineSettings(deterministic=is_fixed)
    rollout, trainer = EmbeddedRollout(model, settings), EmbeddedTrain(model, settings)
    rollout.start()
    trainer.start()
    made = sorted(generate(rollout, group_requests(CUTS[cut], num_per_prompt=2)).values(), key=lambda one: one.id)
    batch = Batch(
        np.array([one.id for one in made]),
        {
            "tokens": Ragged.of([np.concatenate((one.prompt_tokens, one.tokens)) for one in made], np.int32),
            "loss_mask": Ragged.of(
                [np.arange(len(one.prompt_tokens) + len(one.tokens)) >= len(one.prompt_tokens) for one in made], np.bool_
            ),
            "temperature": np.full(len(made), CUTS[cut].temperature or 1.0),
            "sampling_mask": Ragged.of([one.sampling_mask for one in made], np.int32),
        },
    )
    found, plain = (trainer.logprobs(rows).ragged("reference_logprobs") for rows in (batch, batch.without(["sampling_mask"])))
    own = batch.ragged("loss_mask").values.astype(bool)
    said = np.concatenate([one.logprobs for one in made])
    np.testing.assert_allclose(found.values[own], said, atol=2e-5)
    masks = [mask for one in made for mask in unpacked_masks(one.sampling_mask, len(one.tokens))]
    is_cut = np.array([len(mask) > 0 for mask in masks])
    assert (np.abs(plain.values[own] - said)[is_cut] > 1e-4).mean() > 0.9 if is_cut.any() else cut in ("nothing", "greedy")


def test_engines_whose_results_go_by_the_place_of_a_sample_record_it_too(tmp_path: Path) -> None:
    model = Model(save_config("Qwen2", tmp_path), init="random")

    def fixed(settings: EngineSettings) -> EmbeddedRollout:
        return EmbeddedRollout(model, EngineSettings(deterministic=True, max_running=settings.max_running))

    check_what_tokens_were_drawn_from_is_recorded(fixed)


def length(sample: Sample) -> float:
    return sample.num_tokens / 8


@flow
def twice(sampling_mask: bool = True) -> None:
    """The second generation answers the first one's responses: their masks are not its own."""
    policy, reward = Policy("fake", init="random"), Reward(length)
    prompts = Dataset([{"prompt": str(i)} for i in range(6)])
    for _ in steps(2):
        first = policy.generate(prompts.take(3), n=2, max_new_tokens=9, top_k=4, sampling_mask=sampling_mask)
        policy.update(first, reward.score(first), minibatch_size=1)
        second = policy.generate(first, max_new_tokens=9)
        policy.update(second, reward.score(second), advantages="reinforce_pp")


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_masks_go_with_their_samples_planned_and_eager(placement: str) -> None:
    cluster = SPLIT.model_copy(update={"placement": placement})
    eager, without = (run_eager(twice, {"sampling_mask": one}, cluster) for one in (True, False))
    assert eager.error == without.error == ""
    assert run_planned(twice, {}, cluster, order_seed=3) == eager
    assert eager.weights != without.weights


def test_samples_with_and_without_a_mask_are_not_put_together() -> None:
    @flow
    def mixed() -> None:
        policy, prompts = Policy("fake", init="random"), Dataset([{"prompt": str(i)} for i in range(6)])
        first = policy.generate(prompts.take(3), max_new_tokens=9, top_k=4, sampling_mask=True)
        concat([first, policy.generate(prompts.take(3), max_new_tokens=9)])

    with pytest.raises(TraceError, match="sampling mask"):
        trace(mixed, {})


def test_what_a_line_carries_has_a_mask_in_each_of_its_calls_or_in_none() -> None:
    @flow(staleness=2)
    def mixed() -> None:
        policy, prompts = Policy("fake", init="random"), Dataset([{"prompt": str(i)} for i in range(8)])
        for step in steps(2):
            policy.generate(prompts.take(3), n=2, max_new_tokens=9, oversample=1.5, late="carry", sampling_mask=step % 2 == 0)

    with pytest.raises(OptionError, match="a sampling mask in one call, and none in the other"):
        trace(mixed, {}, steps=2)


def test_whole_distributions_are_not_compared_for_samples_with_a_mask() -> None:
    @flow
    def distilled() -> None:
        policy, prompts = Policy("fake", init="random"), Dataset([{"prompt": str(i)} for i in range(6)])
        responses = policy.generate(prompts.take(3), max_new_tokens=9, top_k=4, sampling_mask=True)
        policy.update(responses, loss=distill_top_k(), reference=Reference(policy).logprobs(responses, top_k=4))

    with pytest.raises(TraceError, match="top_k compares whole distributions"):
        trace(distilled, {})


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_does_not_say_it_is_refused_by_the_plan(engine: str) -> None:
    graph, *_ = trace(twice, {})
    worker = WorkerPlan("rollout-0", "cpu", 1, (EngineSlot("policy", "rollout", engine),))
    with pytest.raises(PlanError, match=f"sampling_mask, which the rollout engine '{engine}' can't honour"):
        check_sampling(graph, [worker])
