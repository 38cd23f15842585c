"""The policy `gather`: in the tail, instances are emptied as a whole, as far as the end comes hardly later."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from simulated import cluster, costs_of, long_answers, ran

from m2flow.rollout_scheduling.decode_model import DecodeModel
from m2flow.rollout_scheduling.lengths import StepLengths, parse_lengths
from m2flow.rollout_scheduling.policies import POLICIES, Gather
from m2flow.rollout_scheduling.policy import Load, Move, MoveCost, Seen
from m2flow.rollout_scheduling.predictors import Oracle
from m2flow.rollout_scheduling.study import play

MODEL = DecodeModel(1.0, 0.01, 8)


def gather(lengths: Sequence[int], slack: float = 0.05) -> Gather:
    oracle = Oracle()
    oracle.know(lengths)
    return Gather(oracle, slack)


def seen_of(place: dict[int, int], *, num_instances: int, finished: int = 8, cost: MoveCost | None = None) -> Seen:
    """Samples that run, each of a prompt of its own with 10 tokens; the others, which are counted on from those, have ended."""
    num = len(place) + finished
    seen = Seen(MODEL, num_instances, [10] * num, list(range(num)), [[i] for i in range(num)], None, [()] * num, cost or MoveCost(0.0, 0.0))
    seen.place, seen.loads = dict(place), [list(place.values()).count(j) for j in range(num_instances)]
    return seen


def moves_of(policy: Gather, seen: Seen) -> set[Move]:
    policy.begin(seen)
    seen.finished = dict.fromkeys(range(len(seen.place), len(seen.groups)), 5)
    return set(policy.moves())


def test_a_tail_that_is_spread_out_ends_on_one_instance_and_hardly_later() -> None:
    lengths = [100, 110, 120, 130, 10, 10, 10, 10]
    played = play(StepLengths.of([0] * 4, [lengths[i : i + 2] for i in range(0, 8, 2)]), gather(lengths), MODEL, 4, cost=MoveCost(0.0, 0.0))
    assert played.num_moves == 3
    assert 130 * 1.01 < played.makespan_s <= 130 * 1.01 * 1.05


def test_nothing_moves_if_the_end_came_later_than_it_may() -> None:
    seen = seen_of({0: 0, 1: 1}, num_instances=2)
    assert moves_of(gather([100, 100, *[5] * 8], slack=0.02), seen) == {Move(0, 1)}
    assert moves_of(gather([100, 100, *[5] * 8], slack=0.005), seen) == set()
    seen = seen_of({0: 0, 1: 1}, num_instances=2, cost=MoveCost(1.0, 0.1))
    assert moves_of(gather([100, 100, *[5] * 8], slack=0.02), seen) == set()  # The prefix takes a second more, and the move another.


def test_an_instance_gives_all_of_its_samples_away_or_none() -> None:
    seen = seen_of({0: 0, 1: 0, 2: 1, 3: 1, 4: 2}, num_instances=3)
    lengths = [50, 50, 90, 90, 20, *[5] * 8]
    assert moves_of(gather(lengths), seen) == {Move(4, 1), Move(0, 1), Move(1, 1)}
    seen.reports = {1: Load(2, 0, 100, 600)}  # 540 may be used: 100 are, 180 will be; three more need 150.
    assert moves_of(gather(lengths), seen) == {Move(4, 1), Move(0, 1), Move(1, 1)}
    seen.reports = {1: Load(2, 0, 100, 470)}  # Room for one of the two only, so they stay where they are.
    assert moves_of(gather(lengths), seen) == {Move(4, 1)}


def test_what_is_told_to_move_is_let_arrive_first_and_all_moves_together_have_one_slack() -> None:
    seen = seen_of({0: 0, 1: 1, 2: 2}, num_instances=3)
    ended = dict.fromkeys(range(3, 11), 5)
    for slack, again in ((0.015, []), (0.025, [Move(1, 2)])):  # Each makes the end a hundredth later.
        seen.place[0] = 0
        policy = gather([100, 100, 100, *[5] * 8], slack=slack)
        policy.begin(seen)
        seen.finished = {3: 5}
        if slack < 0.02:
            assert policy.moves() == [Move(0, 2)]
            seen.finished = ended
            assert policy.moves() == ()
            seen.place[0] = 2
        else:
            seen.place[0] = 2
            seen.finished = ended
        assert policy.moves() == again


def test_a_simulated_run_gathers_its_tail_and_ends_no_later_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Move] = []
    moves = Gather.moves

    def watched(self: Gather) -> Sequence[Move]:
        found = moves(self)
        moved.extend(found)
        return found

    monkeypatch.setattr(Gather, "moves", watched)
    lengths = parse_lengths("lognormal:median=200,sigma=1.0,cap=4000,prompt=64")

    def makespan_s(policy: str) -> float:
        spec = cluster(instances=3, max_running=32).with_policy(policy)
        spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"predictor": "oracle"})})
        return ran(long_answers, costs_of(35e-6, 80e-6), lengths, spec, options={"batch": 12}).totals.makespan_s

    plain_s = makespan_s("first-come-first-served")
    assert not moved
    gathered_s = makespan_s("gather")
    assert moved
    assert plain_s < gathered_s <= 1.1 * plain_s  # The simulator's decoding is another model than the policy's: nearly a twentieth.


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_whether_it_is_a_baseline_or_where_it_wins_or_why_it_is_kept(name: str) -> None:
    said = POLICIES[name].__doc__ or ""
    has_source = re.search(r"^ *(Published baseline: |Baseline after )|\bwins on (?!no )", said, re.MULTILINE) is not None
    assert has_source is (name not in ("round-robin", "auto")), said
    assert has_source is ("Kept because " not in said), said
    assert len(said.splitlines()) < 30
