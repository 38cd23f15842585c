"""The decode model in closed form, and the lower bounds against the best of all schedules: a bound above it fails."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import SpecError
from m2flow.rollout_scheduling.decode_model import (
    DecodeModel,
    RolloutBounds,
    fractional_s,
    k_longest_s,
    num_steps,
    queue_s,
    rollout_bounds,
    run_queue,
)

models = st.builds(DecodeModel, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.01, 0.25, 1.0]), st.integers(1, 3))
queues = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def _token_by_token(lengths: list[int], model: DecodeModel) -> tuple[list[float], list[float]]:
    """A queue worked one step after the other."""
    left, waiting, running, now = list(lengths), list(range(len(lengths))), [], 0.0
    starts, ends = [0.0] * len(lengths), [0.0] * len(lengths)
    while waiting or running:
        while waiting and len(running) < model.max_batch:
            running.append(waiting.pop(0))
            starts[running[-1]] = now
        now += model.step_s(len(running))
        for i in running:
            left[i] -= 1
            if not left[i]:
                ends[i] = now
        running = [i for i in running if left[i]]
    return starts, ends


def _least_steps(lengths: tuple[int, ...], max_batch: int) -> int:
    """Of all ways to put samples on slots."""
    if not lengths:
        return 0
    best = sum(lengths)
    for slots in itertools.product(range(max_batch), repeat=len(lengths)):
        loads = [0] * max_batch
        for slot, length in zip(slots, lengths, strict=True):
            loads[slot] += length
        best = min(best, max(loads))
    return best


def _best_without_migration(lengths: list[int], model: DecodeModel, num_instances: int) -> float:
    best = float("inf")
    for where in itertools.product(range(num_instances), repeat=len(lengths)):
        parts = [tuple(length for length, at in zip(lengths, where, strict=True) if at == j) for j in range(num_instances)]
        best = min(best, max(model.t0_s * _least_steps(part, model.max_batch) + model.t1_s * sum(part) for part in parts))
    return best


def _best_with_migration(lengths: list[int], model: DecodeModel, num_instances: int) -> float:
    """Of all schedules in which a sample may run each of its steps anywhere, or wait: the shortest path over states.

    A state is what each sample still needs, and of each instance how long its present step lasts and who is in it.
    """
    start = (tuple(lengths), ((0.0, ()),) * num_instances)
    frontier: list[tuple[float, int, tuple[tuple[int, ...], tuple[tuple[float, tuple[int, ...]], ...]]]] = [(0.0, 0, start)]
    seen, order = set(), itertools.count(1)
    while frontier:
        now, _, (left, instances) = heapq.heappop(frontier)
        if not any(left):
            return now
        if (left, instances) in seen:
            continue
        seen.add((left, instances))
        busy = {i for _, members in instances for i in members}
        free = [i for i, tokens in enumerate(left) if tokens and i not in busy]
        idle = [j for j, (_, members) in enumerate(instances) if not members]
        for where in itertools.product([-1, *idle], repeat=len(free)):
            batches = {j: tuple(i for i, at in zip(free, where, strict=True) if at == j) for j in idle}
            if any(len(batch) > model.max_batch for batch in batches.values()):
                continue
            begun = [
                (round(model.step_s(len(batches[j])), 9), batches[j]) if batches.get(j) else instances[j] for j in range(num_instances)
            ]
            running = [duration for duration, members in begun if members]
            if not running:
                continue
            passed = min(running)
            after, rest = list(begun), list(left)
            for j, (duration, members) in enumerate(begun):
                if members:
                    done = duration - passed < 1e-9
                    after[j] = (0.0, ()) if done else (round(duration - passed, 9), members)
                    for i in members if done else ():
                        rest[i] -= 1
            heapq.heappush(frontier, (now + passed, next(order), (tuple(rest), tuple(sorted(after)))))
    raise AssertionError("no schedule")


@given(queues, models)
@settings(deadline=None)
def test_a_queue_ends_as_it_does_step_by_step(lengths: list[int], model: DecodeModel) -> None:
    starts, ends = _token_by_token(lengths, model)
    run = run_queue(lengths, model)
    assert run.start_s == pytest.approx(starts)
    assert run.finish_s == pytest.approx(ends)
    assert run.end_s == pytest.approx(max(ends))
    assert queue_s(lengths, model) == pytest.approx(run.end_s)
    assert run.num_steps == num_steps(lengths, model.max_batch)


def test_equal_samples_that_fit_take_one_length() -> None:
    run = run_queue([100] * 32, DecodeModel(0.008, 0.00008, 32))
    assert run.end_s == pytest.approx(100 * (0.008 + 32 * 0.00008))
    assert run.start_s.tolist() == [0.0] * 32


def test_an_empty_queue_takes_no_time() -> None:
    assert run_queue([], DecodeModel()).end_s == 0.0
    assert queue_s([], DecodeModel()) == 0.0
    assert rollout_bounds([], DecodeModel(), 4) == RolloutBounds(0.0, 0.0, 0.0, 0.0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), models, st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_no_bound_is_above_the_best_schedule_without_migration(lengths: list[int], model: DecodeModel, num_instances: int) -> None:
    best = _best_without_migration(lengths, model, num_instances)
    bounds = rollout_bounds(lengths, model, num_instances)
    assert bounds.no_migration_s <= best * (1 + 1e-9)
    assert bounds.with_migration_s <= best * (1 + 1e-9)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.builds(DecodeModel, st.sampled_from([1.0, 3.0]), st.sampled_from([0.25, 1.0, 2.0]), st.integers(1, 3)),
    st.integers(1, 2),
)
@settings(deadline=None, max_examples=40)
def test_no_bound_is_above_the_best_schedule_with_free_migration(lengths: list[int], model: DecodeModel, num_instances: int) -> None:
    best = _best_with_migration(lengths, model, num_instances)
    assert rollout_bounds(lengths, model, num_instances).with_migration_s <= best * (1 + 1e-9)


def test_migration_can_beat_the_bound_without_it() -> None:
    lengths, model = [3, 3, 3], DecodeModel(1.0, 1.0, 3)
    with_migration = _best_with_migration(lengths, model, 2)
    assert with_migration < _best_without_migration(lengths, model, 2)
    assert rollout_bounds(lengths, model, 2).with_migration_s <= with_migration


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), models, st.integers(1, 9), st.data())
@settings(deadline=None)
def test_longer_samples_never_make_a_bound_smaller_nor_does_another_instance_make_one_larger(
    lengths: list[int], model: DecodeModel, num_instances: int, data: st.DataObject
) -> None:
    longer = [
        length + extra for length, extra in zip(lengths, data.draw(st.lists(st.integers(0, 900), min_size=len(lengths))), strict=False)
    ]
    bounds, of_longer = rollout_bounds(lengths, model, num_instances), rollout_bounds(longer, model, num_instances)
    of_more = rollout_bounds(lengths, model, num_instances + 1)
    slack = 1 + 1e-9
    for name in ("longest_s", "work_s", "k_longest_s", "fractional_s", "no_migration_s", "with_migration_s"):
        assert getattr(bounds, name) <= getattr(of_longer, name) * slack, name
        assert getattr(of_more, name) <= getattr(bounds, name) * slack, name


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), models, st.integers(1, 9))
@settings(deadline=None)
def test_the_k_longest_bound_contains_the_longest_sample_and_the_work(lengths: list[int], model: DecodeModel, num_instances: int) -> None:
    bounds = rollout_bounds(lengths, model, num_instances)
    assert bounds.k_longest_s >= max(bounds.longest_s, bounds.work_s) * (1 - 1e-9)
    assert bounds.fractional_s >= bounds.work_s * (1 - 1e-9)


def test_one_instance_has_its_closed_form() -> None:
    model = DecodeModel(0.008, 0.00008, 128)
    short, long = np.full(1280, 100), np.array([5000] + [100] * 127)
    assert fractional_s(short, model, 1) == pytest.approx(0.008 * 1000 + 0.00008 * 128000)
    assert fractional_s(long, model, 1) == pytest.approx(0.008 * 5000 + 0.00008 * 17700)
    assert fractional_s(short, model, 10) == pytest.approx(fractional_s(short, model, 1) / 10)


def test_one_sample_of_each_length_has_its_closed_form_under_migration() -> None:
    model = DecodeModel(1.0, 0.5, 4)
    assert k_longest_s([10, 10], model, 2) == pytest.approx(15.0)
    assert k_longest_s([10, 10], model, 1) == pytest.approx(20.0)


@pytest.mark.parametrize("fields", [{"t0_s": 0.0}, {"t1_s": -1.0}, {"t0_s": float("nan")}, {"max_batch": 0}])
def test_a_decode_model_that_is_none_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="can't"):
        DecodeModel(**fields)  # type: ignore[arg-type]


def test_no_instance_is_refused() -> None:
    with pytest.raises(SpecError, match="0 instances"):
        rollout_bounds([1], DecodeModel(), 0)
