"""Ops of several arguments, on every unit: what each parameter gets, the same planned and eager; and what is refused."""

import random

import numpy as np
import pytest
import torch
from fake_flows import ROWS, digit_share
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, Sample, flow, log, op, steps
from m2flow.errors import OptionError, TraceError
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

some = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
ONE = ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def spec(chunk: int = 64, workers: int = 1) -> ClusterSpec:
    functions = FunctionSpec(workers=workers, chunk=chunk)
    return ClusterSpec(rollout=RolloutSpec(engine="fake", max_running=3), train=TrainSpec(engine="fake"), functions=functions)


@op(granularity="sample")
def shaped(sample: Sample, reward: float, mean: float, weights: dict[str, float], *, power: int = 1) -> float:
    weights["seen"] = weights.get("seen", 0.0) + 1  # A unit's own copy: the next one does not see it.
    return round((reward - mean) * weights["w"] ** power + sample.num_tokens * weights["seen"], 6)


@op(granularity="sample")
async def doubled(value: float) -> float:
    return 2 * value


@op(granularity="group")
def above_best_of_others(samples: list[Sample], rewards: list[float], margin: float = 0.0) -> list[bool]:
    return [all(r >= other + margin for k, other in enumerate(rewards) if k != i) for i, r in enumerate(rewards)]


@op(granularity="minibatch", size=2)
def whitened(rewards: list[float], shaped: list[float]) -> np.ndarray:
    values = np.array(rewards) + 0.01 * np.array(shaped)
    return np.round(values - values.mean() + 1000 * len(values), 6)


@op(granularity="minibatch", size=2)
async def on_tensors(shaped: list[float]) -> torch.Tensor:
    return torch.tensor(shaped, dtype=torch.float64).cumsum(0)


@op(granularity="batch")
def correlation(rewards: list[float], shaped: list[float], metrics: dict[str, float], loss: float) -> dict[str, float]:
    metrics["num_tokens"] += 1  # Its own copy.
    return {"product": round(sum(a * b for a, b in zip(rewards, shaped, strict=True)), 6), "tokens": metrics["num_tokens"] + 0 * loss}


@op(granularity="batch")
def difference(left: dict[str, float], right: float) -> float:
    return left["product"] - right


@op(granularity="sample")
def longer_than_its_twin(sample: Sample, twin: Sample) -> bool:
    assert sample.id == twin.id
    return len(str(sample.text)) > len(str(twin.prompt))


@flow
def arguments(num_steps: int = 2, batch: int = 5, n: int = 2) -> None:
    policy, verifier, prompts = Policy("fake"), Reward(digit_share), Dataset(ROWS)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards = verifier.score(responses)
        weights = {"w": 2.0 + step}
        values = shaped(responses, rewards, rewards.mean(), weights, power=2)
        weights["w"] = 1e9  # The call has its own.
        best = above_best_of_others(responses, rewards, margin=0.01)
        white, sums = whitened(rewards, shaped=values), on_tensors(values)
        metrics = policy.update(responses, rewards)
        total = correlation(doubled(rewards), values, metrics, metrics["loss"])
        left = difference(total, rewards.mean())
        longer = longer_than_its_twin(responses, responses)
        for name, rows in (("values", values), ("best", best), ("white", white), ("sums", sums), ("longer", longer)):
            log(**{name: float(sum(position * float(value) for position, value in enumerate(rows)))})  # type: ignore[arg-type]
        log(left=left)


@some
@given(clusters(), st.integers(1, 5), st.integers(2, 3), st.integers(0, 2**30))
def test_ops_of_every_unit_get_their_arguments_by_identity_planned_and_eager(cluster, batch, n, order_seed):
    options = {"batch": batch, "n": n}
    eager = run_eager(arguments, options, cluster)
    assert eager.error == ""
    assert len(eager.logs) == 12
    assert run_planned(arguments, options, cluster, order_seed=order_seed) == eager


FOUND: dict[str, list[object]] = {}


@op(granularity="sample")
def drawn(sample: Sample, rng: random.Random) -> float:
    return rng.random()


@op(granularity="group")
def drawn_together(samples: list[Sample], rng: np.random.Generator) -> list[float]:
    return rng.random(len(samples)).tolist()


@op(granularity="batch")
def drawn_once(rng) -> float:
    return float(rng.random())


@op(granularity="sample")
def given_one(sample: Sample, rng: float) -> float:
    return rng


@flow
def draws() -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS, shuffle=False)
    responses = policy.generate(prompts.take(4), n=2, max_new_tokens=6)
    FOUND["sample"], FOUND["again"] = list(drawn(responses)), list(drawn(responses))
    FOUND["group"], FOUND["batch"] = list(drawn_together(responses)), [float(drawn_once())]  # type: ignore[arg-type]
    FOUND["given"] = list(given_one(responses, 0.5))


def draws_of(cluster: ClusterSpec, seed: int = 0, order_seed: int = 0, *, eager: bool = False) -> dict[str, list[object]]:
    answer = run_eager(draws, {}, cluster, seed=seed) if eager else run_planned(draws, {}, cluster, seed=seed, order_seed=order_seed)
    assert answer.error == ""
    return dict(FOUND)


def test_an_ops_random_numbers_are_keyed_by_run_op_and_unit_and_never_by_arrival():
    first = draws_of(spec(), eager=True)
    assert [draws_of(spec(chunk, workers), order_seed=chunk) for chunk, workers in ((1, 2), (3, 1), (64, 2))] == [first] * 3
    numbers = [*first["sample"], *first["again"], *first["group"], *first["batch"]]
    assert len(set(numbers)) == len(numbers)  # Each unit, each op and each call on the same samples has its own.
    assert first["given"] == [0.5] * 8
    other = draws_of(spec(), seed=1, eager=True)
    assert not set(numbers) & {*other["sample"], *other["group"], *other["batch"]}


@flow
def draws_one_by_one() -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS, shuffle=False)
    FOUND["sample"] = [value for _ in range(4) for value in drawn(policy.generate(prompts.take(1), n=2, max_new_tokens=6))]


def test_random_numbers_of_prompts_drawn_one_by_one_are_those_of_prompts_drawn_together():
    together = draws_of(spec(), eager=True)["sample"]
    assert run_eager(draws_one_by_one, {}, spec()).error == ""
    assert FOUND["sample"] == together


@op(granularity="sample")
def scaled_draw(sample: Sample, rng: random.Random, scale: float = 1.0, shift: float = 0.0) -> float:
    return scale * rng.random() + shift


@flow
def scaled() -> None:
    responses = Policy("fake").generate(Dataset(ROWS, shuffle=False).take(2), n=2, max_new_tokens=6)
    FOUND["shifted"] = list(scaled_draw(responses, scale=0.0, shift=3.0))
    FOUND["by keyword"] = list(scaled_draw(sample=responses, shift=2.0, scale=0.0))


def test_parameters_after_rng_can_be_passed_without_it():
    for run in (run_eager, run_planned):
        FOUND.clear()
        assert run(scaled, {}, spec()).error == ""
        assert (FOUND["shifted"], FOUND["by keyword"]) == ([3.0] * 4, [2.0] * 4)


# What is refused


def traced(body) -> None:  # type: ignore[no-untyped-def]
    @flow
    def asked() -> None:
        responses = Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        body(responses)

    trace(asked, {})


def test_arguments_that_do_not_fit_are_refused_at_their_line():
    wrong = {
        r"power=1\) can't be called like this: missing a required argument: 'mean'": lambda rows: shaped(rows, rows),
        "got an unexpected keyword argument 'bonus'": lambda rows: doubled(rows, bonus=1),
        "doubled runs on each sample, and got a float; it needs rows": lambda rows: doubled(0.5),
        "above_best_of_others runs on each group, and got a str, a list": lambda rows: above_best_of_others("a", [1.0]),
        r"shaped got the rows of digit_share.score \(.*\) inside a dict, for weights": lambda rows: shaped(
            rows, 0.0, 0.0, {"rewards": Reward(digit_share).score(rows)}
        ),
        "that dataset.take made": lambda rows: longer_than_its_twin(rows, Dataset(ROWS, name="dataset").take(2)),
    }
    for message, body in wrong.items():
        with pytest.raises(TraceError, match=message) as refused:
            traced(body)
        assert "test_op_arguments.py" in refused.value.where


def test_a_decorator_that_says_what_can_not_be_is_refused():
    def function(samples: list[Sample]) -> list[int]:
        return []

    for keywords, message in (
        ({"granularity": "token"}, "known are sample, group, minibatch, batch"),
        ({"granularity": "minibatch"}, "size is the number of prompts"),
        ({"granularity": "minibatch", "size": 0}, "size is the number of prompts"),
        ({"granularity": "group", "size": 2}, "size is the number of prompts"),
        ({"writes": "file"}, "Give a list"),
        ({"writes": ["policy.weights"]}, "only m2flow's own roles and datasets write that"),
        ({"reads": ["a b"]}, "a resource has a name"),
    ):
        with pytest.raises(OptionError, match=message):
            op(**keywords)(function)


@op(granularity="minibatch", size=2)
def too_few(samples: list[Sample]) -> list[int]:
    return [0]


@op(granularity="sample")
def no_such_metric(sample: Sample, number: float) -> float:
    return number


@op(granularity="sample", timeout_s=0.05)
async def hangs(sample: Sample) -> float:
    import asyncio

    await asyncio.Event().wait()
    return 0.0


@op(granularity="sample")
def in_bytes(sample: Sample) -> bytes:
    return b"0.5"


@op(granularity="sample")
def too_long_a_number(sample: Sample) -> int:
    return 10**5000


@flow
def returns_bytes() -> None:
    in_bytes(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=4))


@flow
def returns_too_long_a_number() -> None:
    too_long_a_number(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=4))


@flow
def returns_too_few() -> None:
    too_few(Policy("fake").generate(Dataset(ROWS).take(3), n=2, max_new_tokens=4))


@flow
def asks_for_another_metric() -> None:
    policy = Policy("fake")
    responses = policy.generate(Dataset(ROWS).take(3), n=2, max_new_tokens=4)
    no_such_metric(responses, policy.update(responses, Reward(digit_share).score(responses))["accuracy"])


@flow
def waits_for_ever() -> None:
    hangs(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=4))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (returns_bytes, "in_bytes returned a bytes on sample p0/0, which can't travel"),
        (returns_too_long_a_number, "too_long_a_number returned a int on sample p0/0, which can't travel: Exceeds the limit"),
        (returns_too_few, r"too_few returned \[0\] for the mini-batch p0/0 to p1/1, which has 4 samples"),
        (asks_for_another_metric, "there is no 'accuracy' for number; there is grad_norm"),
        (waits_for_ever, "hangs took longer than 0.05 s on sample p0/0"),
    ],
)
def test_what_an_op_does_wrong_is_said_in_both_modes(program, message):
    import re

    for answer in (run_eager(program, {}, ONE), run_planned(program, {}, ONE)):
        assert re.search(message, answer.error), answer.error


@op(granularity="batch")
def both(samples: list[Sample], kept: list[float]) -> dict[str, float]:
    return {"samples": len(samples), "kept": len(kept), "sum": sum(kept)}


@flow
def filters() -> None:
    responses = Policy("fake").generate(Dataset(ROWS).take(4), n=2, max_new_tokens=8)
    rewards = Reward(digit_share).score(responses)
    kept = rewards[rewards > 0.3]
    counts = both(responses, kept)
    log(kept=counts["kept"], samples=counts["samples"], total=counts["sum"])
    log(above=float(above(shaped(responses, kept, 0.0, {"w": 1.0}), number=counts["sum"] + 1)))


@op(granularity="batch")
def above(values: list[float], number: float) -> float:
    assert number > 1
    return len(values)


def test_of_filtered_handles_the_narrowest_says_which_samples_there_are():
    eager = run_eager(filters, {}, ONE)
    assert eager.error == ""
    logs = {name: value for _, name, value in eager.logs}
    assert 0 < logs["kept"] == logs["samples"] == logs["above"] < 8
    assert run_planned(filters, {}, spec(chunk=1, workers=2), order_seed=3) == eager
