"""Policies on virtual instances: whatever they decide, every sample ends, once, no earlier than any schedule could."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import InternalError, SpecError
from m2flow.rollout_scheduling.decode_model import DecodeModel, k_longest_s, rollout_bounds, run_queue, unknown_lengths_s
from m2flow.rollout_scheduling.lengths import StepLengths, parse_lengths
from m2flow.rollout_scheduling.policies import (
    POLICIES,
    AdaptiveConcurrency,
    Admission,
    Auto,
    FirstCome,
    LeastLoaded,
    LongestFirst,
    OldestFirst,
    ProbeFirst,
    RoundRobin,
    Split,
    make_policy,
    split,
)
from m2flow.rollout_scheduling.policy import Load, Move, MoveCost, SchedulingPolicy, Seen, composed
from m2flow.rollout_scheduling.predictors import (
    EarlierSteps,
    Learned,
    Oracle,
    Predictor,
    PromptBuckets,
    Siblings,
    fit_cut_normal,
    hazard,
    log_tail,
)
from m2flow.rollout_scheduling.study import QUANTILES, StudyStep, play, skill_of, steps_of, study_known, study_policy, total

MODEL = DecodeModel(1.0, 0.25, 3)
FREE = MoveCost(0.0, 0.0)


class Restless(SchedulingPolicy):
    """Moves at every chance, to wherever; what the virtual cluster must survive."""

    name = "restless"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._turn = itertools.count()

    def next_sample(self, instance: int) -> int | None:
        return next(iter(self.seen.waiting), None)

    def moves(self) -> Sequence[Move]:
        return [Move(sample, next(self._turn) % self.seen.num_instances) for sample in sorted(self.seen.place)]


def _groups(rows: Sequence[Sequence[int]]) -> StepLengths:
    return StepLengths.of([10] * len(rows), rows)


rows = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=8)
models = st.builds(DecodeModel, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.01, 0.25, 1.0]), st.integers(1, 4))
makers = st.sampled_from([*(lambda predictor, name=name: make_policy(name, predictor) for name in POLICIES), lambda predictor: Restless()])


@given(rows, models, st.integers(1, 4), makers, st.booleans())
@settings(deadline=None, max_examples=200)
def test_every_policy_ends_every_sample_and_beats_no_bound(
    lengths: list[list[int]], model: DecodeModel, num_instances: int, make: Callable[[Predictor], SchedulingPolicy], is_free: bool
) -> None:
    step, policy = _groups(lengths), make(Siblings())
    bounds = rollout_bounds(step.responses, model, num_instances)
    for _ in range(2):
        played = play(step, policy, model, num_instances, cap=30, cost=FREE if is_free else MoveCost(0.5, 0.01))
        assert (played.finish_s >= step.responses * model.alone_token_s * (1 - 1e-9)).all()
        assert played.makespan_s >= (bounds.with_migration_s if played.num_moves else bounds.no_migration_s) * (1 - 1e-9)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), models)
@settings(deadline=None)
def test_one_instance_first_come_first_served_is_a_queue(lengths: list[int], model: DecodeModel) -> None:
    played = play(_groups([lengths]), LeastLoaded(), model, 1)
    assert played.finish_s == pytest.approx(run_queue(lengths, model).finish_s)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), models, st.integers(1, 3))
@settings(deadline=None)
def test_round_robin_is_a_queue_on_each_instance(lengths: list[int], model: DecodeModel, num_instances: int) -> None:
    played = play(_groups([lengths]), RoundRobin(), model, num_instances)
    for j in range(num_instances):
        assert played.finish_s[j::num_instances] == pytest.approx(run_queue(lengths[j::num_instances], model).finish_s)


def test_a_move_costs_the_prefix_and_stalls_who_is_there() -> None:
    class Once(LeastLoaded):
        def moves(self) -> Sequence[Move]:
            return [Move(1, 1)] if set(self.seen.finished) == {2} else []

        def next_sample(self, instance: int) -> int | None:
            return next((s for s in self.seen.waiting if (s == 3) == (instance == 1)), None)

    model = DecodeModel(1.0, 0.0, 8)
    played = play(StepLengths.of([5], [[50, 20, 8, 30]]), Once(), model, 2, cost=MoveCost(2.5, 0.1))
    # Sample 1 leaves after the step that was beginning when 2 ended at 8 s, or at once; its prefix of 8 and the prompt of 5 come again.
    assert played.num_moves == 1
    assert played.moved_tokens == 13
    assert played.finish_s[[0, 2]].tolist() == [50.0, 8.0]
    assert played.finish_s[3] == pytest.approx(30 + 1.3)
    assert played.finish_s[1] == pytest.approx(11 + 1.3 + 12)


def test_a_policy_never_sees_a_length_before_its_sample_ended() -> None:
    class Spy(LeastLoaded):
        def moves(self) -> Sequence[Move]:
            assert not set(self.seen.finished) & set(self.seen.place)
            for sample in self.seen.place:
                assert 0 <= self.seen.tokens_so_far(sample) < lengths[sample]
            return ()

    step = _groups([[9, 3, 7], [2, 12, 5]])
    lengths = step.responses.tolist()
    assert not [name for name in Seen.__dataclass_fields__ if "length" in name]
    play(step, Spy(), MODEL, 2)


def test_starting_what_does_not_wait_or_leaving_samples_waiting_is_an_error_that_names_the_policy() -> None:
    class Twice(LeastLoaded):
        name = "twice"

        def next_sample(self, instance: int) -> int | None:
            return 0

    class Never(LeastLoaded):
        name = "never"

        def next_sample(self, instance: int) -> int | None:
            return None

    for policy in (Twice(), Never()):
        with pytest.raises(InternalError, match=policy.name):
            play(_groups([[3, 4]]), policy, MODEL, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_study_gives_the_same_numbers_again(name: str) -> None:
    lengths = parse_lengths("lognormal:median=400,sigma=1,cap=4000,icc=0.8")
    steps = list(steps_of(lengths, 2, num_groups=24, n=4, seed=1, num_earlier=4))
    known = study_known(steps, DecodeModel(), 3)
    first, second = (study_policy(make_policy(name, Siblings()), steps, known, DecodeModel(), num_instances=3, cap=4000) for _ in range(2))
    assert first == second
    assert all(result.makespan_s >= result.bound_s or result.num_moves for result in first)


def _regret(
    policy: SchedulingPolicy, steps: Sequence[StudyStep], num_instances: int, cap: int | None, oracle: Oracle | None = None
) -> float:
    known = study_known(steps, DecodeModel(), num_instances)
    return total(study_policy(policy, steps, known, DecodeModel(), num_instances=num_instances, cap=cap, oracle=oracle)).regret


def test_splitting_with_an_oracle_comes_near_the_assignment() -> None:
    lengths = parse_lengths("lognormal:median=4000,sigma=0.8,cap=32768")
    steps = list(steps_of(lengths, 1, num_groups=128, n=8, seed=0))
    for num_instances in (4, 16):
        oracle = Oracle()
        assert _regret(Split(oracle), steps, num_instances, lengths.cap, oracle) < 1.06
        assert _regret(LeastLoaded(), steps, num_instances, lengths.cap) > 1.1


def test_where_prompts_tell_their_length_split_takes_most_of_the_regret_away() -> None:
    lengths = parse_lengths("lognormal:median=4000,sigma=0.8,cap=32768,icc=0.9")
    steps = list(steps_of(lengths, 2, num_groups=128, n=8, seed=0, num_earlier=8))
    for num_instances in (4, 16):
        plain = _regret(LeastLoaded(), steps, num_instances, lengths.cap)
        assert _regret(Split(Siblings()), steps, num_instances, lengths.cap) - 1 < 0.5 * (plain - 1)


def test_where_nothing_can_be_told_split_keeps_to_least_loaded() -> None:
    policy = Split(Siblings())
    policy.begin(_seen(_groups([[5, 6, 7]] * 9)))
    assert [part.num_instances for part in policy.classes] == [2]
    assert _started(policy, 4) == [0, 1, 2, 3]


def _started(policy: SchedulingPolicy, number: int) -> list[int | None]:
    """What a policy hands out to the first instance, one after the other."""
    found = []
    for _ in range(number):
        found.append(policy.next_sample(0))
        del policy.seen.waiting[found[-1]]
    return found


def _seen(step: StepLengths, earlier: Sequence[Sequence[int]] = ()) -> Seen:
    members = [np.flatnonzero(step.groups == group).tolist() for group in range(len(step.prompts))]
    before = earlier or [()] * len(members)
    seen = Seen(MODEL, 2, step.prompts.tolist(), step.groups.tolist(), members, None, before, MoveCost())
    seen.waiting = OrderedDict.fromkeys(range(len(step)))
    return seen


def test_probing_begins_only_when_the_correlation_that_was_measured_justifies_it() -> None:
    for icc, is_open in ((0.0, False), (0.9, True)):
        lengths = parse_lengths(f"lognormal:median=400,sigma=0.8,icc={icc}")
        policy = ProbeFirst()
        assert not policy.is_open
        for step in steps_of(lengths, 1, num_groups=40, n=4, seed=0):
            play(step.samples, policy, DecodeModel(), 2)
        assert policy.is_open == is_open


def test_a_probe_of_each_group_goes_first_and_the_longest_group_next() -> None:
    probe = ProbeFirst()
    policy = composed([probe])
    play(_groups([[10 * g + 1, 10 * g + 2] for g in range(1, 9)]), policy, MODEL, 2)
    assert probe.is_open
    policy.begin(_seen(_groups([[1, 1], [1, 1], [1, 1]])))
    assert _started(policy, 3) == [0, 2, 4]
    for sample, length in ((0, 5), (2, 9)):
        policy.ended(sample, length)
    assert _started(policy, 3) == [5, 3, 1]


def test_longest_first_starts_what_the_oracle_says() -> None:
    oracle = Oracle()
    oracle.know([3, 9, 1, 7])
    policy = composed([LongestFirst(oracle)])
    policy.begin(_seen(_groups([[3, 9], [1, 7]])))
    assert _started(policy, 4) == [1, 3, 0, 2]


def test_siblings_learn_the_correlation_and_expect_what_the_group_says() -> None:
    lengths, predictor = parse_lengths("lognormal:median=400,sigma=0.8,icc=0.8"), Siblings()
    for step in steps_of(lengths, 2, num_groups=80, n=8, seed=0):
        play(step.samples, LongestFirst(predictor), DecodeModel(), 4)
    predictor.begin(_seen(_groups([[1, 1], [1, 1]]), earlier=[[50, 60, 55], [3000, 2500, 2800]]))
    assert predictor.icc == pytest.approx(0.8, abs=0.11)
    short, _, long, _ = predictor.expected().tolist()
    assert short < 100
    assert long > 1500
    drawn = predictor.scenarios(400)
    assert drawn.shape == (400, 4)
    assert drawn.mean(axis=0) == pytest.approx(predictor.expected(), rel=0.1)


class _Watch(LeastLoaded):
    """Asks a predictor about one sample whenever another has ended."""

    def __init__(self, predictor: Predictor, sample: int) -> None:
        self._predictor, self._sample = predictor, sample
        self.said: list[float] = []

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._predictor.begin(seen)
        self.said.append(float(self._predictor.expected()[self._sample]))

    def moves(self) -> Sequence[Move]:
        if self._sample in self.seen.place:
            self.said.append(float(self._predictor.expected()[self._sample]))
        return ()


@pytest.mark.parametrize("make", [Siblings, Learned, EarlierSteps, PromptBuckets])
def test_a_running_sample_is_expected_to_grow_further_the_longer_it_is(make: Callable[[], Predictor]) -> None:
    step, model, predictor = _groups([[20, 30, 45], [60, 90, 130], [25, 70, 400], [15, 40, 220]] * 4), DecodeModel(1.0, 0.01, 64), make()
    play(step, LongestFirst(predictor), model, 1)
    watch = _Watch(predictor, 8)
    play(step, watch, model, 1)
    assert watch.said[-1] > 2 * watch.said[0]


def test_hard_prompts_are_expected_to_have_answers_like_those_to_other_hard_ones_until_they_have_their_own() -> None:
    predictor, difficulties = Siblings(), ["easy", "easy", "hard", "hard"] * 4
    first = _groups([[20, 30, 25], [24, 18, 33], [300, 220, 410], [260, 340, 190]] * 4)
    play(first, LongestFirst(predictor), DecodeModel(1.0, 0.01, 64), 1, difficulties=difficulties)
    seen = _seen(_groups([[1], [1], [1], [1]]), earlier=[(), (), (), (22, 27, 21, 25, 30, 24)])
    seen.difficulties = ["hard", "easy", "", "hard"]
    predictor.begin(seen)
    hard, easy, unknown, known = predictor.expected()
    assert predictor.is_informed
    assert hard > 2.5 * easy
    assert easy < unknown < hard
    assert known < hard / 2
    drawn = predictor.scenarios(200).mean(axis=0)
    assert drawn[0] > 2.5 * drawn[1]


def test_answers_that_were_cut_count_as_longer_for_their_difficulty_too() -> None:
    expected = []
    for cap in (None, 64):
        predictor = Siblings()
        lengths = [[20, 30, 25], [64, 64, 64]] * 10
        play(_groups(lengths), LongestFirst(predictor), DecodeModel(1.0, 0.01, 64), 1, cap=cap, difficulties=["easy", "hard"] * 10)
        seen = _seen(_groups([[1]]))
        seen.difficulties = ["hard"]
        predictor.begin(seen)
        expected.append(float(predictor.expected()[0]))
    assert expected[1] > 1.2 * expected[0]


# ---- lengths that nobody knows


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    models,
    st.integers(1, 3),
    st.sampled_from(
        [FirstCome, RoundRobin, Restless, lambda: make_policy("repack", Learned()), lambda: make_policy("longest-first", Learned())]
    ),
)
@settings(deadline=None, max_examples=150)
def test_no_policy_that_cannot_tell_samples_apart_beats_the_bound_on_average(
    lengths: list[int], model: DecodeModel, num_instances: int, make: Callable[[], SchedulingPolicy]
) -> None:
    bound_s = unknown_lengths_s(lengths, model, num_instances)
    every = [play(_groups([[one] for one in order]), make(), model, num_instances, cost=FREE) for order in itertools.permutations(lengths)]
    assert np.mean([played.makespan_s for played in every]) >= bound_s * (1 - 1e-9)
    assert bound_s >= k_longest_s(lengths, model, num_instances)


def test_the_bound_for_unknown_lengths_says_what_knowing_them_is_worth_at_least() -> None:
    lengths, model = [1000] + [100] * 99, DecodeModel(1.0, 0.1, 10)
    assert k_longest_s(lengths, model, 4) == pytest.approx(1.1 * 1000)
    # Until the longest has 100 tokens, half of the others' 9,900 are done on average: 4,950 at 20/s, of which 3 x 110 s were beside it.
    assert unknown_lengths_s(lengths, model, 4) == pytest.approx(1.1 * 1000 + (4950 - 3 * 110 * 5) / 20)


def _told(steps: Sequence[StudyStep], said: Callable[[int, StudyStep], list[str]]) -> list[StudyStep]:
    return [StudyStep(step.samples, difficulties=said(number, step)) for number, step in enumerate(steps)]


def _embeddings(number: int, step: StudyStep) -> list[str]:
    """Vectors of 24 numbers of which one direction says the mean log length of the prompt's responses, in noise."""
    dice = np.random.default_rng(number)
    direction = np.random.default_rng(99).standard_normal(24) / math.sqrt(24)
    logs = np.log(step.samples.responses).reshape(len(step.samples.prompts), -1).mean(axis=1)
    vectors = (logs - logs.mean())[:, None] * 3 * direction + dice.standard_normal((len(logs), 24)) * 0.2
    return [str([round(float(one), 4) for one in vector]) for vector in vectors]


SHAPE = "mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=8000,icc=0.8"


def test_a_learned_predictor_reads_embeddings_and_numbers_and_is_judged_on_steps_that_it_has_not_seen() -> None:
    lengths = parse_lengths(SHAPE)
    steps = list(steps_of(lengths, 4, num_groups=96, n=4, seed=3))
    blind = skill_of(Learned(), steps, cap=lengths.cap)
    assert abs(blind.gain) < 0.01
    assert blind.num_steps == 3
    by_vector = skill_of(Learned(), _told(steps, _embeddings), cap=lengths.cap)
    assert by_vector.gain > 0.2
    assert by_vector.covered == pytest.approx(QUANTILES, abs=0.08)
    by_number = _told(steps, lambda _, step: [str(row.mean()) for row in np.log(step.samples.responses).reshape(96, -1)])
    assert skill_of(Learned(), by_number, cap=lengths.cap).gain > 0.4
    assert skill_of(Siblings(), by_number, cap=lengths.cap).gain < 0.05, "each number is a label of its own to it"


def test_embeddings_that_only_prompts_without_answers_have_are_left_out() -> None:
    """As where an engine could embed the prompts of one step and not of the others."""
    predictor = Learned()
    seen = _seen(_groups([[10 + k % 9, 20 + k % 7] for k in range(30)]))
    seen.difficulties = ["[0.5, 1.5]"] + [""] * 29
    predictor.begin(seen)
    seen.finished = {sample: 10 + sample % 9 for sample in range(2, 60)}
    predictor.end()
    predictor.begin(_seen(_groups([[1], [1]])))
    assert (predictor.gain, predictor.is_blind) == (0.0, False)
    assert predictor.expected() == pytest.approx([14, 14], abs=2)


def test_noise_is_not_taken_for_prediction() -> None:
    lengths, predictor = parse_lengths("lognormal:median=400,sigma=1,cap=4000"), Learned()
    dice = np.random.default_rng(5)
    steps = _told(
        list(steps_of(lengths, 3, num_groups=64, n=4, seed=1)), lambda _, step: [str(dice.standard_normal(40).tolist()) for _ in range(64)]
    )
    assert abs(skill_of(predictor, steps, cap=lengths.cap).gain) < 0.01
    assert (predictor.gain, predictor.icc, predictor.is_informed) == (0.0, 0.0, False)


@pytest.mark.parametrize("trace", ["dapo-qwen2.5-32b", "video-qwen2.5-vl-7b"])
def test_on_real_traces_learned_quantiles_are_no_worse_than_one_prediction_for_all_and_calibrated(trace: str) -> None:
    lengths = parse_lengths(trace)
    steps = list(steps_of(lengths, None, num_groups=0, n=0, seed=0))
    skill = skill_of(Learned(), steps, cap=lengths.cap)
    assert -0.005 < skill.gain < 0.01
    assert skill.covered == pytest.approx(QUANTILES, abs=0.03)
    if trace.startswith("dapo"):
        assert skill_of(Siblings(), steps, cap=lengths.cap).gain < -0.03, "what a lognormal makes of them"


def test_learned_quantiles_follow_the_hazard_of_earlier_steps_and_not_a_lognormal() -> None:
    """Half of the responses stop at 100 tokens, the others run to about 1,000: who has 120 is one of those."""
    predictor = Learned()
    lengths = [[100 + i % 3, 1000 + 7 * i % 40] for i in range(60)]
    play(_groups(lengths), LongestFirst(predictor), DecodeModel(1.0, 0.01, 256), 1)
    seen = _seen(_groups([[1, 1, 1]]))
    predictor.begin(seen)
    low, middle = predictor.quantiles((0.25, 0.75))[:, 0]
    assert low == pytest.approx(101, abs=3)
    assert middle == pytest.approx(1020, rel=0.05)
    seen.place, seen.tokens_so_far = {0: 0, 1: 0}, lambda sample: (120, 1015)[sample]
    running = predictor.quantiles((0.1, 0.5, 0.9))
    assert running[0, 0] > 950
    assert (np.diff(running, axis=0) >= 0).all()
    assert (running[:, 1] > 1015).all()
    assert 1015 < predictor.expected()[1] < 1060
    assert predictor.expected()[0] == pytest.approx(1020, rel=0.05)


def test_auto_gains_where_prompts_tell_their_lengths_and_keeps_to_first_come_where_not() -> None:
    for kind, num_levels, num_earlier, most in (
        ("icc=0", 0, 0, 1.0),
        ("icc=0.5", 0, 0, 1.0),
        ("icc=0.9", 5, 0, 0.96),
        ("icc=0.9", 0, 8, 0.92),
    ):
        lengths = parse_lengths(f"lognormal:median=4000,sigma=1.2,cap=32768,{kind}")
        steps = list(steps_of(lengths, 4, num_groups=128, n=8, seed=0, num_levels=num_levels, num_earlier=num_earlier))
        plain, mine = (_regret(policy, steps, 4, lengths.cap) for policy in (FirstCome(), Auto(Learned())))
        assert mine <= most * plain
        if most == 1.0:
            assert mine == plain


def test_auto_goes_back_to_first_come_when_what_it_was_told_turns_out_to_be_wrong() -> None:
    """The labels say which prompts are long for two steps, and from then on the contrary."""
    lengths = parse_lengths("lognormal:median=400,sigma=1,cap=4000,icc=0.9")
    steps = list(steps_of(lengths, 5, num_groups=64, n=8, seed=0, num_levels=2))
    turned = [
        step if k < 2 else StudyStep(step.samples, difficulties=["10"[int(one)] for one in step.difficulties])
        for k, step in enumerate(steps)
    ]
    policy, chosen = Auto(Siblings()), []
    for step in turned:
        play(step.samples, policy, DecodeModel(), 2, cap=4000, difficulties=step.difficulties)
        chosen.append((policy.chosen, policy.expected_gain))
    assert chosen[0] == ("first-come-first-served", 0.0)
    assert chosen[1][0] != "first-come-first-served"
    assert chosen[1][1] > 0.01
    assert chosen[3] == ("first-come-first-served", 0.0)


def test_without_difference_there_is_one_class_and_with_it_the_long_ones_get_room() -> None:
    model = DecodeModel(1.0, 0.1, 16)
    assert len(split(np.full((4, 64), 100.0), model, 4)) == 1
    two = split(np.array([[1000.0] + [100.0] * 63]), model, 4)
    assert len(two) > 1
    assert (two[0].first, two[0].num_instances) == (0, 1)
    assert two[0].end < 12
    assert sum(part.num_instances for part in two) == 4
    assert two[-1].end == 64


def test_the_fit_of_a_cut_normal_finds_the_whole_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 20000)
    mean, deviation = fit_cut_normal(values[values < 4], np.full((values >= 4).sum(), 4.0))
    assert (mean, deviation) == (pytest.approx(3.0, abs=0.1), pytest.approx(2.0, abs=0.1))


def test_the_normal_tail_is_right_far_out() -> None:
    scores = np.array([-5.0, 0.0, 3.0, 10.0, 29.0, 35.0])
    assert np.exp(log_tail(scores[:3])) == pytest.approx([0.9999997133, 0.5, 0.001349898], rel=1e-4)
    assert hazard(scores[3:]) == pytest.approx(scores[3:] + 1 / scores[3:], rel=1e-3)


def test_earlier_answers_of_a_record_are_refused() -> None:
    with pytest.raises(SpecError, match="does not say which prompts"):
        list(steps_of(parse_lengths("dapo-qwen2.5-32b"), 1, num_groups=1, n=1, seed=0, num_earlier=2))
    with pytest.raises(SpecError, match="does not say how hard"):
        list(steps_of(parse_lengths("dapo-qwen2.5-32b"), 1, num_groups=1, n=1, seed=0, num_levels=2))


def test_knowing_how_hard_prompts_are_shortens_a_rollout() -> None:
    regrets = []
    for num_levels in (0, 5):
        lengths = parse_lengths("lognormal:median=4000,sigma=0.8,icc=0.9,cap=32768")
        steps = list(steps_of(lengths, 2, num_groups=128, n=8, seed=0, num_levels=num_levels))
        known = study_known(steps, DecodeModel(), 4)
        results = study_policy(make_policy("longest-first", Siblings()), steps, known, DecodeModel(), num_instances=4, cap=32768)
        regrets.append(results[1].regret)
    assert regrets[1] < regrets[0] - 0.02


def test_a_policy_of_the_users_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = f"{tmp_path}/own.py"
    with open(file, "w") as out:
        out.write(
            "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n"
            "from m2flow.rollout_scheduling.policy import SchedulingPolicy\n\n\n@dataclass\nclass Noted:\n    num: int = 0\n\n\n"
            "class Last(SchedulingPolicy):\n    name = 'last'\n\n"
            "    def begin(self, seen):\n        self.seen = seen\n\n"
            "    def next_sample(self, instance):\n        return max(self.seen.waiting, default=None)\n"
        )
    assert play(_groups([[3, 4]]), make_policy(f"{file}:Last", EarlierSteps()), MODEL, 1).makespan_s > 0
    for wrong, message in (
        (f"{file}:First", "not a SchedulingPolicy"),
        ("nowhere.py:Last", "can't read"),
        ("repak", "Did you mean 'repack'"),
        ("adaptive", "split+repack"),
        ("balanced", "least-loaded"),
        ("group-completing", "first-come-first-served"),
    ):
        with pytest.raises(SpecError) as caught:
            make_policy(wrong, EarlierSteps())
        assert message in str(caught.value)


def test_concurrency_follows_what_an_engine_says_of_its_cache() -> None:
    policy = AdaptiveConcurrency(start=4)
    seen = _seen(_groups([[1] * 40]))
    seen.has_reports, seen.loads = True, [4, 0]
    policy.begin(seen)
    assert not policy.allows(0, 0)
    assert policy.allows(0, 1)

    def said(share: float, running: int) -> float:
        seen.loads[0] = running
        seen.reports[0] = Load(running, 0, int(100 * share), 100)
        policy.reported(0)
        return policy.limit(0)

    assert said(0.3, 4) == 5
    assert said(0.3, 2) == 5  # It has room that it does not use: more would be no use.
    assert said(0.7, 5) == 5
    assert said(0.85, 20) == 18
    assert said(0.95, 18) == 9
    seen.reports[0] = Load(9, 0, 0, 0)
    policy.reported(0)
    assert policy.limit(0) == math.inf


def test_groups_of_a_later_step_begin_as_far_as_the_trainer_has_come_and_what_is_refused_gives_its_place_back() -> None:
    policy = composed([Admission(target=0.5)])
    seen = _seen(_groups([[1, 1]] * 4))
    seen.num_wanted, seen.behind = 4, 1
    policy.begin(seen)

    def begin_all() -> list[int]:
        begun = []
        while (sample := policy.next_sample(0)) is not None:
            del seen.waiting[sample]
            policy.started(sample, 0)
            begun.append(sample)
        return begun

    assert begin_all() == [0, 1, 2, 3]  # Half of the groups, whole.
    seen.num_rejected = 1
    assert begin_all() == [4, 5]
    seen.behind = 0
    assert begin_all() == [6, 7]


def test_carried_samples_with_the_oldest_tokens_go_first() -> None:
    policy = composed([OldestFirst()])
    seen = _seen(_groups([[1, 1], [1, 1]]))
    seen.oldest = {3: 4, 1: 3}
    policy.begin(seen)
    assert _started(policy, 4) == [1, 3, 0, 2]


def test_ranks_count_in_the_order_of_the_policies_and_one_refusal_is_enough() -> None:
    class Even(SchedulingPolicy):
        name = "even"

        def rank(self, sample: int) -> float:
            return sample % 2

        def allows(self, sample: int, instance: int) -> bool:
            return instance == 0

    class Last(SchedulingPolicy):
        name = "last"

        def rank(self, sample: int) -> float:
            return -sample

    policy = composed([Even(), Last()])
    policy.begin(_seen(_groups([[1, 1, 1, 1, 1]])))
    assert policy.next_sample(1) is None
    assert _started(policy, 5) == [4, 2, 0, 3, 1]
