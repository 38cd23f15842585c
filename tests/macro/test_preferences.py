"""Training on pairs: rows of a chosen and a rejected answer, pairs made of generated responses, and what keeps a pair together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reference, Reward, Sample, best_and_worst, dpo, flow, ipo, kto, log, simpo, steps
from m2flow.errors import DatasetError
from m2flow.macro.critics import _places
from m2flow.macro.graph import Granularity
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import accumulation_unit
from m2flow.samples import Batch, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}{i + 3}=", "chosen": f"{i}", "rejected": f"{i}{i}{i}", "level": i} for i in range(6)]
DIGITS = "flows/models/digits"


def drawn(rows: list[dict[str, object]], count: int) -> Batch:
    """The samples of the first pairs of these rows."""

    @flow
    def one_draw() -> None:
        Dataset(rows, shuffle=False).pairs().take(count)

    found = trace(one_draw, {})[0].calls[0].options["rows"]
    assert isinstance(found, Batch)
    return found


def texts(batch: Batch, column: str) -> list[object]:
    return [batch.ragged(column).item(i) for i in range(len(batch))]


def test_a_pair_is_a_group_of_the_chosen_and_the_rejected_answer() -> None:
    batch = drawn(ROWS, 2)
    assert batch.group_bounds() == [(0, 2), (2, 4)]
    assert texts(batch, "prompt") == ["03=", "03=", "14=", "14="]
    assert texts(batch, "target") == ["0", "000", "1", "111"]
    assert (batch.dense("chosen").tolist(), batch.dense("level").tolist()) == ([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    assert "rejected" not in batch


def say(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": say("hi"), "chosen": say("hi", "good")[1:], "rejected": say("hi", "bad")[1:]},
        {"prompt": say("hi"), "chosen": say("hi", "good"), "rejected": say("hi", "bad")},
        {"prompt": "hi", "chosen": say("hi", "good"), "rejected": "bad"},
        {"chosen": say("hi", "good"), "rejected": say("hi", "bad")},
        {"chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}], "rejected": say("hi", "bad")},
    ],
)
def test_answers_are_texts_or_messages_or_whole_conversations(row: dict[str, object]) -> None:
    batch = drawn([row], 1)
    assert texts(batch, "target") == ["good", "bad"]
    assert texts(batch, "prompt") == [row.get("prompt", say("hi"))] * 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "target": "b"}, "it has other columns"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "the 'rejected' of row 0 of the dataset 'dataset' is neither"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "the 'chosen' of row 0"),
        ({"chosen": say("hi", "good"), "rejected": say("hello", "bad")}, "the 'rejected' of row 0 .* answers another conversation"),
    ],
)
def test_rows_without_two_answers_to_one_prompt_are_refused(row: dict[str, object], said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        drawn([row], 1)


def test_a_dataset_of_pairs_counts_pairs_and_is_neither_paired_nor_mixed_again() -> None:
    train, heldout = Dataset(ROWS).pairs().split(2)
    assert (len(train), len(heldout)) == (4, 2)
    assert len(Dataset.mix([Dataset(ROWS), Dataset(ROWS, name="other")]).pairs()) == 12
    with pytest.raises(DatasetError, match="pairs already"):
        Dataset(ROWS).pairs().pairs()
    with pytest.raises(DatasetError, match="no pairs"):
        Dataset.mix([Dataset(ROWS).pairs()])


def length_share(sample: Sample) -> float:
    return sample.num_tokens / 16


@flow
def preferences(model: str = DIGITS, num_steps: int = 2, batch: int = 3, minibatch: int = 0) -> None:
    """Every loss on preferences, on given pairs and on those of generated responses."""
    policy, verifier = Policy(model, init="random"), Reward(length_share)
    reference = Reference(policy)
    pairs, prompts = Dataset(ROWS, name="pairs").pairs(), Dataset(ROWS, name="prompts")
    for step in steps(num_steps):
        given = pairs.take(batch)
        loss = (dpo(label_smoothing=0.1), ipo())[step % 2]
        metrics = policy.update(given, loss=loss, reference=reference)
        again = policy.update(given, loss=simpo(), minibatch_size=minibatch or None)
        responses = policy.generate(prompts.take(batch), n=3, max_new_tokens=6)
        drift = (policy.logprobs(responses) - reference.logprobs(responses)).sum(over="sample")
        rewards = verifier.score(responses)
        labels = {"chosen": (rewards > 0.4) * 1.0, "baseline": 0 * rewards + drift.mean()}
        policy.update(responses, loss=kto(), reference=reference, columns=labels)
        last = policy.update(best_and_worst(responses, rewards), loss=dpo(), reference=reference, epochs=2)
        log(sequences=metrics["num_sequences"], loss=metrics["loss"], again=again["loss"], last=last["loss"])


sizes = st.fixed_dictionaries({"model": st.just("fake"), "batch": st.integers(1, 4), "minibatch": st.integers(0, 2)})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), sizes, st.integers(0, 2**30))
def test_updates_on_pairs_are_the_same_planned_and_eager(spec: ClusterSpec, options: dict[str, object], order_seed: int) -> None:
    eager = run_eager(preferences, options, spec)
    assert eager.error == ""
    assert run_planned(preferences, options, spec, order_seed=order_seed) == eager


def real(token_budget: int) -> ClusterSpec:
    train, functions = TrainSpec(token_budget=token_budget), FunctionSpec(chunk=2)
    return ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(), train=train, functions=functions)


@flow
def offline(batch: int = 3) -> None:
    policy = Policy(DIGITS, init="random")
    reference, pairs = Reference(policy), Dataset(ROWS).pairs()
    for name, loss in (("first", dpo()), ("second", dpo(label_smoothing=0.1)), ("third", simpo())):
        log(**{name: policy.update(pairs.take(batch), loss=loss, reference=reference)["loss"]})


def test_a_real_model_trains_on_pairs_the_same_planned_and_eager_and_in_any_micro_batches() -> None:
    answers = [run_eager(offline, {}, real(budget), deterministic=True) for budget in (4096, 1)]
    assert [answer.error for answer in answers] == ["", ""]
    assert run_planned(offline, {}, real(1), deterministic=True) == answers[1]
    whole, cut = ([value for *_, value in answer.logs] for answer in answers)
    assert whole == pytest.approx(cut, rel=1e-5)
    assert whole[0] == pytest.approx(math.log(2))  # A policy that is its reference has no preference.


def test_updates_on_pairs_accumulate_by_groups() -> None:
    updates = [call for call in trace(preferences, {}, steps=1)[0].calls if call.method == "update"]
    units = [(call.options["loss"].name, accumulation_unit(call)) for call in updates]  # type: ignore[attr-defined]
    whole, single = Granularity.GROUP, Granularity.SAMPLE
    assert units == [("dpo", whole), ("simpo", whole), ("kto", single), ("dpo", whole)]


@flow
def half() -> None:
    policy = Policy(DIGITS, init="random")
    pairs = Dataset(ROWS).pairs().take(2)
    policy.update(pairs.select(pairs.chosen > 0.5), loss=simpo())


def test_half_a_pair_is_refused() -> None:
    assert "a group is no pair of one chosen and one rejected answer" in run_eager(half, {}, real(4096)).error


def test_the_best_and_the_worst_of_a_group_are_its_pair_and_equal_rewards_make_none() -> None:
    rewards = np.array([1.0, 3.0, 2.0, 3.0, 5.0, 5.0, 1.0, -1.0, -1.0])
    rows = Batch(np.concatenate([make_ids(0, 1, 4), make_ids(1, 1, 2), make_ids(2, 1, 3)]), {"rewards": rewards})
    assert _places(rows, {}).tolist() == [0, 1, -1, -1, -1, -1, 1, 0, -1]


@flow
def online(num_prompts: int = 6) -> None:
    policy = Policy("fake")
    responses = policy.generate(Dataset(ROWS).take(num_prompts), n=4, max_new_tokens=12)
    pairs = best_and_worst(responses, Reward(length_share).score(responses))
    spread = responses.length.max(over="group") - responses.length.min(over="group")
    contrast = ((2 * pairs.chosen - 1) * pairs.length).sum()
    log(pairs=pairs.count(), chosen=pairs.chosen.sum(), contrast=contrast, spread=spread.mean(), all=responses.count())


def test_pairs_of_generated_responses_have_the_longest_and_the_shortest_where_length_is_the_reward() -> None:
    fake = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    answer = run_eager(online, {}, fake)
    logs = {name: value for _, name, value in answer.logs}
    assert logs["chosen"] == logs["pairs"] / 2 > 0
    assert logs["contrast"] == pytest.approx(logs["spread"] * logs["all"] / 4)
    assert run_planned(online, {}, fake) == answer
