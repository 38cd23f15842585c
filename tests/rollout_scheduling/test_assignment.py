"""The assignment of known lengths: a legal schedule, as long as it says, and within 1.01 of the bound without migration."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.rollout_scheduling.decode_model import Assignment, DecodeModel, assign, queue_s
from m2flow.rollout_scheduling.lengths import parse_lengths

models = st.builds(DecodeModel, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.01, 0.25, 1.0]), st.integers(1, 4))


def _check_legal(plan: Assignment, lengths: list[int], model: DecodeModel) -> None:
    """Every token once, in one place, one at a time, in a slot; and each instance ends when it says, counted step by step."""
    where = defaultdict(set)
    for j, instance in enumerate(plan.instances):
        steps = Counter()
        own = defaultdict(list)
        for piece in instance.pieces:
            where[piece.sample].add(j)
            own[piece.sample].append(piece)
            steps.update(range(piece.start, piece.start + piece.steps))
        for sample, pieces in own.items():
            assert sum(piece.steps for piece in pieces) == lengths[sample]
            for before, after in itertools.pairwise(sorted(pieces, key=lambda piece: piece.start)):
                assert before.start + before.steps <= after.start
        assert max(steps.values(), default=0) <= model.max_batch
        seconds = sum(model.step_s(batch) for batch in steps.values())
        assert instance.end_s(model) == pytest.approx(seconds)
        assert (instance.num_steps, instance.num_tokens) == (len(steps), sum(steps.values()))
        if not instance.num_pauses:
            assert queue_s([lengths[sample] for sample in instance.queue], model) == pytest.approx(seconds)
    assert sorted(where) == list(range(len(lengths)))
    assert all(len(at) == 1 for at in where.values())
    assert plan.makespan_s == pytest.approx(max(instance.end_s(model) for instance in plan.instances))
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), models, st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=200)
def test_an_assignment_is_a_legal_schedule_that_takes_as_long_as_it_says(
    lengths: list[int], model: DecodeModel, num_instances: int, may_pause: bool
) -> None:
    plan = assign(lengths, model, num_instances, may_pause=may_pause)
    _check_legal(plan, lengths, model)
    assert len(plan.instances) == num_instances
    if not may_pause:
        assert plan.num_pauses == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), models, st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_small_assignments_of_whole_samples_are_near_the_best_there_is(lengths: list[int], model: DecodeModel, num_instances: int) -> None:
    @functools.cache
    def least_s(part: tuple[int, ...]) -> float:
        return min(queue_s(order, model) for order in itertools.permutations(part))

    best = float("inf")
    for where in itertools.product(range(num_instances), repeat=len(lengths)):
        parts = [tuple(sorted(length for length, at in zip(lengths, where, strict=True) if at == j)) for j in range(num_instances)]
        best = min(best, max(map(least_s, parts)))
    whole = assign(lengths, model, num_instances, may_pause=False).makespan_s
    assert best * (1 - 1e-9) <= whole <= best * 1.02


@pytest.mark.parametrize("num_instances", [1, 2, 3, 4, 6, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", ["dapo-qwen2.5-32b", "video-qwen2.5-vl-7b"])
def test_on_the_traces_the_plan_is_within_one_percent_of_the_bound(name: str, num_instances: int) -> None:
    trace = parse_lengths(name)
    for k in range(trace.num_steps() or 0):
        lengths = trace.step(k, num_groups=0, n=0, seed=0).responses.tolist()
        plan = assign(lengths, DecodeModel(), num_instances)
        assert plan.ratio <= 1.01
        if k == 3:
            _check_legal(plan, lengths, DecodeModel())


@pytest.mark.parametrize("num_groups", [16, 128, 512])
@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.2])
def test_on_lognormals_the_plan_is_within_one_percent_of_the_bound(sigma: float, num_groups: int) -> None:
    drawn = parse_lengths(f"lognormal:median=4000,sigma={sigma},cap=32768").draw(num_groups, 8, seed=num_groups).ravel()
    for num_instances in (1, 3, 4, 16, 64, 200):
        assert assign(drawn, DecodeModel(), num_instances).ratio <= 1.01


def test_pauses_are_used_only_where_whole_samples_leave_gaps() -> None:
    video, model = parse_lengths("video-qwen2.5-vl-7b"), DecodeModel()
    even, runaway = (video.step(k, num_groups=0, n=0, seed=0).responses for k in (8, 1))
    assert assign(even, model, 4, may_pause=False).ratio > 1.05
    assert 0 < assign(even, model, 4).num_pauses < len(even) / 2
    assert assign(runaway, model, 4).num_pauses == 0


def test_the_longest_sample_gets_an_instance_with_little_else() -> None:
    plan = assign(np.array([1000] + [100] * 40), DecodeModel(1.0, 0.01, 8), 4)
    (first,) = [instance for instance in plan.instances if any(piece.sample == 0 for piece in instance.pieces)]
    assert first.num_tokens == 1000
    assert plan.ratio == pytest.approx(1.0)


def test_nothing_to_generate_takes_no_time() -> None:
    plan = assign([], DecodeModel(), 3)
    assert (plan.makespan_s, plan.ratio, len(plan.instances)) == (0.0, 1.0, 3)
