"""Advantages, KL estimators and losses against numbers worked out by hand, and against their definitions."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import m2flow
from m2flow.algorithms import advantages, losses, preferences
from m2flow.algorithms.gae import gae, gae_rows, length_adaptive_lam, vtrace
from m2flow.algorithms.losses import Direction, kl_estimate, top_k_divergence
from m2flow.algorithms.shaping import Moments, adaptive_entropy_coef, adaptive_kl_coef, length_reward, overlong_penalty
from m2flow.errors import OpError, OptionError, RewardError, ShapeError
from m2flow.macro.loss_declarations import LOSSES
from m2flow.recipe import BatchAdvantage, Correction, GroupAdvantage, KlEstimator, KlPenalty
from m2flow.samples import Batch, Ragged, Segment, make_ids

ALL = [advantages.grpo, advantages.grpo_population, advantages.dr_grpo, advantages.rloo]
"""Advantages of any rewards, which look at one group at a time and at nothing but rewards."""
OF_BATCHES = list(advantages.OF_BATCHES.values())
ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)

PAIRED = {"bradley_terry", "dpo", "ipo", "simpo"}
"""Losses on whole pairs of a chosen and a rejected answer."""
GROUPED = {*PAIRED, "clip_cov", "kl_cov"}
"""Losses on whole groups: in tests, each two samples."""

EVERY_OPTION: dict[str, list[dict[str, float | str]]] = {
    "ppo_clip": [{}, {"dual_clip": 3.0}, {"entropy_coef": 0.01}, *({"kl_coef": 0.1, "kl": kl} for kl in get_args(KlPenalty))],
    "distill": [{}, {"clip": 0.2}, {"direction": "forward"}, {"direction": "js"}],
    "distill_top_k": [{}, {"direction": "forward"}, {"direction": "js"}],
    "clipped_value": [{}, {"clip": 0.2}],
    "gspo": [{}, {"eps_low": 0.2, "eps_high": 0.3}],
    "gspo_token": [{}, {"eps_low": 0.2, "eps_high": 0.3}],
    "cispo": [{}, {"eps_low": 0.2}],
    "decoupled_ppo": [{}, {"proximal": "interpolated"}],
    "dppo": [{}, {"divergence": "kl", "most": 0.05}],
    "opmd": [{}, {"tau": 0.1}],
    "dpo": [{}, {"label_smoothing": 0.2}],
    "ipo": [{}, {"average": False}],
    "clip_cov": [{}, {"share": 0.5, "cov_low": 0.0, "cov_high": 9.0}],
    "kl_cov": [{}, {"share": 0.5, "kl_coef": 0.1}],
    "bradley_terry": [{}, {"center": 0.01}],
    "kto": [{}, {"desirable_weight": 0.5, "undesirable_weight": 2.0}],
}
"""Options that choose another branch of a loss; any other loss is tried with its defaults."""

LOSS_CASES = [(name, options) for name in LOSSES for options in EVERY_OPTION.get(name, [{}])]

reward_groups = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=5)


def flatten(groups: list[list[float]]) -> tuple[Tensor, list[int]]:
    return torch.tensor([r for group in groups for r in group]), [len(group) for group in groups]


def test_the_names_of_advantages_that_a_flow_may_use_are_those_of_the_functions() -> None:
    assert (*get_args(GroupAdvantage), "pass_at_k") == tuple(advantages.OF_GROUPS)
    assert get_args(BatchAdvantage) == tuple(advantages.OF_BATCHES)


def test_maxrl_divides_by_the_mean_and_keeps_a_group_of_zeros_at_zero() -> None:
    # Rewards 1, 1, 0, 0: mean 0.5.
    assert advantages.maxrl(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), [4, 2]).tolist() == [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]
    with pytest.raises(RewardError, match="negative"):
        advantages.maxrl(torch.tensor([1.0, -1.0]), [2])


def test_the_baseline_of_opo_is_the_mean_by_length() -> None:
    # Baseline (1 * 3 + 4 * 1) / 4 = 1.75; of a group without tokens the mean.
    result = advantages.opo(torch.tensor([1.0, 4.0, 2.0, 0.0]), [2, 2], lengths=torch.tensor([3.0, 1.0, 0.0, 0.0]))
    assert result.tolist() == [-0.75, 2.25, 1.0, -1.0]
    with pytest.raises(ShapeError, match="lengths"):
        advantages.opo(torch.ones(2), [2], lengths=torch.ones(1))


@given(reward_groups)
def test_opo_with_equal_lengths_only_centres_and_any_lengths_make_its_weighted_sum_zero(groups: list[list[float]]) -> None:
    rewards, sizes = flatten(groups)
    wide = rewards.double()
    torch.testing.assert_close(advantages.opo(wide, sizes, lengths=torch.full_like(wide, 7.0)), advantages.dr_grpo(wide, sizes))
    lengths = torch.arange(1.0, len(wide) + 1, dtype=torch.float64)
    weighted = advantages.opo(wide, sizes, lengths=lengths) * lengths
    assert all(abs(float(part.sum())) < 1e-6 for part in weighted.split(sizes))


@pytest.mark.parametrize(("size", "k"), [(2, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_mean_over_every_choice_of_k_samples(size: int, k: int) -> None:
    for num_right in range(size + 1):
        rewards = [1.0] * num_right + [0.0] * (size - num_right)
        choices = list(itertools.combinations(range(size), k))
        best = [max(rewards[i] for i in choice) for choice in choices]
        mean = sum(best) / len(best)
        deviation = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
        # A sample's advantage is the mean over the choices that it is in, of their advantage.
        shares = [[b - mean for b, choice in zip(best, choices, strict=True) if i in choice] for i in range(size)]
        expected = [sum(share) / len(share) / deviation if deviation else 0.0 for share in shares]
        found = advantages.pass_at_k(torch.tensor(rewards, dtype=torch.float64), [size], k=k)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
        if k == 1:
            scaled = advantages.grpo_population(torch.tensor(rewards, dtype=torch.float64), [size], eps=0.0) if deviation else found
            assert found.tolist() == pytest.approx(scaled.tolist())


def test_turns_from_one_state_are_compared_with_each_other_and_no_group_sees_another() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    states = [["start", "door"], ["start", "wall", "door"], ["start"], ["start"], ["start", "door"]]
    found = advantages.gigpo(rewards, [3, 2], states=states, discount=0.5, weight=2.0)
    whole = advantages.grpo(rewards, [3, 2])
    start = advantages.grpo(torch.tensor([0.5, 0.0, 0.0, 1.0, 1.5], dtype=torch.float64), [3, 2])
    door = advantages.grpo(torch.tensor([1.0, 0.0], dtype=torch.float64), [2])
    expected = [
        [whole[0] + 2 * start[0], whole[0] + 2 * door[0]],
        [whole[1] + 2 * start[1], whole[1], whole[1] + 2 * door[1]],
        [whole[2] + 2 * start[2]],
        [whole[3] + 2 * start[3]],
        [whole[4] + 2 * start[4], whole[4]],
    ]
    for turns, values in zip(found, expected, strict=True):
        torch.testing.assert_close(turns, torch.stack(values))
    assert [turns.tolist() for turns in advantages.gigpo(rewards, [5], states=[[]] * 5)] == [[]] * 5


def test_the_turns_of_rows_are_what_was_generated_and_begin_where_the_same_tokens_came_before() -> None:
    prompt, model, tool = Segment.PROMPT, Segment.GENERATED, Segment.TOOL
    rows = [
        ([1, 2, 7, 7, 5, 8], [(prompt, 2), (model, 2), (tool, 1), (model, 1)]),
        ([1, 2, 9, 5, 6, 6], [(prompt, 2), (model, 1), (tool, 1), (model, 2)]),
        ([1, 2, 4], [(prompt, 2), (model, 1)]),
    ]
    columns = {
        "tokens": Ragged.of([tokens for tokens, _ in rows], np.int32),
        "segment_kinds": Ragged.of([[kind for kind, _ in segments] for _, segments in rows], np.uint8),
        "segment_lengths": Ragged.of([[count for _, count in segments] for _, segments in rows], np.int32),
    }
    rewards = np.array([1.0, 0.0, 0.5])
    found = advantages.of_turns(rewards, Batch(make_ids(0, 1, 3), columns), discount=0.9, weight=1.0)
    states = [["12", "5"], ["12", "5"], ["12"]]
    a, b, c = (turns.tolist() for turns in advantages.gigpo(torch.from_numpy(rewards), [3], states=states, discount=0.9))
    expected = [[0, 0, a[0], a[0], 0, a[1]], [0, 0, b[0], 0, b[1], b[1]], [0, 0, c[0]]]
    for row, values in enumerate(expected):
        np.testing.assert_allclose(found.row(row), values, rtol=1e-6)


@pytest.mark.parametrize("name", advantages.OF_GROUPS)
def test_a_group_that_has_lost_samples_changes_no_other_and_one_that_is_left_teaches_nothing(name: str) -> None:
    """Down to one sample; of `pass_at_k`, to fewer than k. A group that has lost all of them has no rows, and is none."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    lengths = torch.arange(3, 11)
    options = {"k": 3} if name == "pass_at_k" else {}

    def found(rewards: torch.Tensor, sizes: list[int], lengths: torch.Tensor) -> torch.Tensor:
        of_length = {"lengths": lengths} if name == "opo" else {}
        return advantages.OF_GROUPS[name](rewards, sizes, **options, **of_length)

    whole = found(rewards[:4], [4], lengths[:4])
    assert bool((whole != 0).any())
    for left in (1, 2, 3):
        both = found(rewards[: 4 + left], [4, left], lengths[: 4 + left])
        assert both[:4].tolist() == whole.tolist()
        alone = found(rewards[4 : 4 + left], [left], lengths[4 : 4 + left])
        assert both[4:].tolist() == alone.tolist()
        assert bool(torch.isfinite(alone).all())
        if left < options.get("k", 2):
            assert alone.tolist() == [0.0] * left


def test_pass_at_k_refuses_rewards_that_are_no_verdicts() -> None:
    with pytest.raises(RewardError, match="neither 0 nor 1"):
        advantages.pass_at_k(torch.tensor([0.5, 1.0]), [2], k=1)
    with pytest.raises(OptionError, match="k is 0"):
        advantages.pass_at_k(torch.ones(2), [2], k=0)


def test_reinforce_pp_scales_by_the_moments_of_the_batch() -> None:
    # Rewards 0, 0, 0, 4: mean 1, variance (1 + 1 + 1 + 9) / 3 = 4, whatever the groups.
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0])
    assert advantages.reinforce_pp(rewards, [1, 3], eps=0.0).tolist() == [-0.5, -0.5, -0.5, 1.5]
    # Centred in groups of two: 0, 0, -2, 2, variance 8 / 3.
    expected = torch.tensor([0.0, 0.0, -2.0, 2.0]) / math.sqrt(8 / 3)
    torch.testing.assert_close(advantages.reinforce_pp_baseline(rewards, [2, 2], eps=0.0), expected)


def test_gpg_counts_only_samples_whose_group_differs() -> None:
    # Two of six samples have a gradient: alpha is 3.
    assert advantages.gpg(torch.tensor([1.0, 0.0, 5.0, 5.0, 2.0, 2.0]), [2, 2, 2]).tolist() == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]


@given(reward_groups)
def test_advantages_of_a_batch_are_the_same_in_every_order_of_groups(groups: list[list[float]]) -> None:
    rewards, sizes = flatten(groups)
    turned, turned_sizes = flatten(groups[::-1])
    for function in OF_BATCHES:
        parts = function(turned.double(), turned_sizes).split(turned_sizes)
        torch.testing.assert_close(function(rewards.double(), sizes), torch.cat(parts[::-1]), rtol=1e-9, atol=1e-9)


def test_remax_subtracts_the_greedy_answers_reward() -> None:
    assert advantages.remax(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])).tolist() == [0.0, -1.0, 1.0]
    with pytest.raises(ShapeError):
        advantages.remax(torch.ones(2), torch.ones(1))


def test_grpo_scales_by_the_standard_deviation_of_a_sample_as_trl_and_verl_do() -> None:
    # Rewards 0, 0, 0, 4: mean 1, the sample's variance (1 + 1 + 1 + 9) / 3 = 4.
    result = advantages.grpo(torch.tensor([[0.0, 0.0, 0.0, 4.0]]), eps=0.0)
    torch.testing.assert_close(result, torch.tensor([[-0.5, -0.5, -0.5, 1.5]]))


@given(reward_groups)
def test_grpo_has_the_standard_deviation_that_torch_has(groups: list[list[float]]) -> None:
    rewards, sizes = flatten(groups)
    for ddof, function in ((1, advantages.grpo), (0, advantages.grpo_population)):
        wide = rewards.double()
        expected = torch.cat([(r - r.mean()) / (r.std(correction=ddof) + 1e-6) for r in wide.split(sizes)])
        torch.testing.assert_close(function(wide, sizes), expected, rtol=1e-6, atol=1e-6)


def test_grpo_by_the_standard_deviation_of_the_population_is_another_choice() -> None:
    # Rewards 0, 0, 0, 4: mean 1, population variance (1 + 1 + 1 + 9) / 4 = 3.
    result = advantages.grpo_population(torch.tensor([[0.0, 0.0, 0.0, 4.0]]), eps=0.0)
    torch.testing.assert_close(result, torch.tensor([[-1.0, -1.0, -1.0, 3.0]]) / math.sqrt(3))


def test_dr_grpo_only_centres() -> None:
    assert advantages.dr_grpo(torch.tensor([0.0, 4.0, 7.0]), [2, 1]).tolist() == [-2.0, 2.0, 0.0]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    result = advantages.rloo(torch.tensor([1.0, 2.0, 6.0, 5.0, 1.0]), [3, 2])
    torch.testing.assert_close(result, torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5, 4.0, -4.0]))


@given(reward_groups)
def test_rloo_is_its_definition_in_groups_of_any_size(groups: list[list[float]]) -> None:
    expected = [r - (sum(group) - r) / (len(group) - 1) for group in groups for r in group]
    torch.testing.assert_close(advantages.rloo(*flatten(groups)), torch.tensor(expected), rtol=1e-4, atol=1e-3)


@given(reward_groups)
def test_advantages_of_a_group_do_not_depend_on_other_groups(groups: list[list[float]]) -> None:
    for function in ALL:
        alone = torch.cat([function(torch.tensor(group), [len(group)]) for group in groups])
        assert torch.equal(function(*flatten(groups)), alone)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
@example(0.1, 3)  # whose mean is not 0.1 in float64
def test_equal_rewards_give_exact_zeros(reward: float, size: int) -> None:
    for function in [*ALL, *OF_BATCHES]:
        for dtype in (torch.float32, torch.float64):
            assert function(torch.full((size,), reward, dtype=dtype), [size]).tolist() == [0.0] * size


@given(reward_groups)
def test_advantages_of_a_group_add_up_to_zero(groups: list[list[float]]) -> None:
    rewards, sizes = flatten(groups)
    for function in ALL:
        for part in function(rewards.double(), sizes).split(sizes):
            assert abs(float(part.sum())) < 1e-6


def test_a_matrix_of_rewards_is_as_good_as_flat_ones_with_sizes() -> None:
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for function in ALL:
        assert torch.equal(function(rewards).flatten(), function(rewards.flatten(), [4] * 5))


@pytest.mark.parametrize("function", [*ALL, advantages.maxrl, *OF_BATCHES])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(function: Callable[..., Tensor], bad: float) -> None:
    with pytest.raises(RewardError, match="reward 1 of 2"):
        function(torch.tensor([1.0, bad]), [2])


@pytest.mark.parametrize("function", [*ALL, advantages.maxrl, *OF_BATCHES])
def test_sizes_that_do_not_fit_are_refused(function: Callable[..., Tensor]) -> None:
    for rewards, sizes in [(torch.ones(3), [2]), (torch.ones(3), [3, 0]), (torch.ones(2, 2), [2, 2]), (torch.ones(3), None)]:
        with pytest.raises(ShapeError):
            function(rewards, sizes)


def test_the_only_sample_that_is_left_of_a_group_has_no_leave_one_out_advantage() -> None:
    assert advantages.rloo(torch.tensor([1.0, 0.0, 5.0]), [2, 1]).tolist() == [1.0, -1.0, 0.0]


def test_estimators_agree_with_numbers_worked_out_by_hand() -> None:
    policy, reference = torch.tensor([0.5]).log(), torch.tensor([1.0]).log()
    values = [kl_estimate(policy, reference, estimator).item() for estimator in ESTIMATORS]
    assert values == pytest.approx([-math.log(2), math.log(2) ** 2 / 2, 2 - 1 - math.log(2)])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator: KlEstimator) -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), estimator)).sum(), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_of_estimators_are_their_finite_differences(estimator: KlEstimator) -> None:
    generator = torch.Generator().manual_seed(1)
    policy = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: kl_estimate(a, b, estimator), (policy, reference))


def test_expected_gradient_of_k2_is_that_of_the_divergence() -> None:
    logits, q = torch.tensor([0.3, -0.2, 1.0]).double().requires_grad_(), torch.tensor([0.3, 0.3, 0.4]).double()
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((logp.exp().detach() * kl_estimate(logp, q.log(), "k2")).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_k3_keeps_the_digits_of_a_small_divergence() -> None:
    small = torch.tensor([1e-4], dtype=torch.float32)
    assert kl_estimate(torch.zeros(1), small, "k3").item() == pytest.approx(5e-9, rel=0.02)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(OptionError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def surrogate(ratio: float, advantage: float, **options: float) -> tuple[float, float, float]:
    """The term, its derivative by the log-probability, and whether it counts as clipped."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    terms, metrics = losses.ppo_clip(logprobs=logprobs, behaviour_logprobs=zero, advantages=zero + advantage, **options)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(terms.sum(), logprobs)
    return terms.item(), gradient.item(), metrics["clipped"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, (-2.2, -2.2, 0.0)),
        (1.5, 2.0, (-2.6, 0.0, 1.0)),
        (0.5, 2.0, (-1.0, -1.0, 0.0)),
        (0.5, -2.0, (1.6, 0.0, 1.0)),
        (1.5, -2.0, (3.0, 3.0, 0.0)),
        (5.0, -2.0, (6.0, 0.0, 1.0)),
    ],
)
def test_clipping_follows_the_table(ratio: float, advantage: float, expected: tuple[float, float, float]) -> None:
    assert surrogate(ratio, advantage, eps_low=0.2, eps_high=0.3, dual_clip=3.0) == pytest.approx(expected)


@settings(max_examples=50)
@given(st.floats(0.05, 20), st.floats(-5, 5))
def test_a_clipped_token_has_no_gradient_and_another_the_policy_gradient(ratio: float, advantage: float) -> None:
    _, gradient, clipped = surrogate(ratio, advantage, dual_clip=4.0)
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_penalty_adds_the_weighted_divergence() -> None:
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    terms, metrics = losses.ppo_clip(
        logprobs=logprobs,
        behaviour_logprobs=logprobs,
        advantages=torch.zeros(1),
        reference_logprobs=reference,
        kl_coef=0.1,
        kl="k1",
    )
    assert terms.item() == pytest.approx(0.05)
    assert metrics["kl"].item() == pytest.approx(0.5)


def test_a_penalty_without_a_reference_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(OptionError, match="reference"):
        losses.ppo_clip(logprobs=one, behaviour_logprobs=one, advantages=one, kl_coef=0.1)


@pytest.mark.parametrize("options", [{"eps_low": 1.5}, {"eps_high": -0.1}, {"dual_clip": 0.5}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        surrogate(1.0, 1.0, **options)


def test_on_policy_the_surrogate_has_the_gradient_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = torch.tensor([0.5, -1.5])
    clip, _ = losses.ppo_clip(logprobs=logprobs, behaviour_logprobs=logprobs.detach(), advantages=weights)
    plain, _ = losses.reinforce(logprobs=logprobs, advantages=weights)
    torch.testing.assert_close(torch.autograd.grad(clip.sum(), logprobs), torch.autograd.grad(plain.sum(), logprobs))


def test_losses_refuse_tensors_of_different_shape() -> None:
    with pytest.raises(ShapeError, match="advantages"):
        losses.reinforce(logprobs=torch.zeros(3), advantages=torch.zeros(1))


def test_nll_is_the_negative_log_probability() -> None:
    assert losses.nll(logprobs=torch.tensor([-0.25]))[0].tolist() == [0.25]


def test_terms_of_a_sample_add_up_to_its_mean_if_lengths_are_given() -> None:
    lengths = torch.tensor([2.0, 2.0, 1.0])
    logprobs, ones = torch.tensor([-1.0, -3.0, -5.0]), torch.ones(3)
    assert losses.nll(logprobs=logprobs, sequence_lengths=lengths)[0].tolist() == [0.5, 1.5, 5.0]
    assert losses.reinforce(logprobs=logprobs, advantages=ones, sequence_lengths=lengths)[0].tolist() == [0.5, 1.5, 5.0]
    terms, _ = losses.ppo_clip(logprobs=logprobs, behaviour_logprobs=logprobs, advantages=ones, sequence_lengths=lengths)
    assert terms.tolist() == [-0.5, -0.5, -1.0]


def test_advantages_by_name_take_the_bounds_of_a_batch() -> None:
    rewards = np.array([1.0, 0.0, 2.0, 4.0, 6.0])
    result = advantages.on_arrays("dr_grpo", rewards, [(0, 2), (2, 5)])
    assert result.dtype == np.float32
    assert result.tolist() == [0.5, -0.5, -2.0, 0.0, 2.0]


def test_the_adaptive_coefficient_brings_a_divergence_that_falls_with_it_to_its_target() -> None:
    assert adaptive_kl_coef(0.5, 0.15, target=0.1) == pytest.approx(0.5 * 1.02)
    assert adaptive_kl_coef(0.5, 0.09, target=0.1) == pytest.approx(0.5 * 0.99)
    for coef in (1e-3, 10.0):
        for _ in range(1000):
            coef = adaptive_kl_coef(coef, 0.02 / coef, target=0.1)
        assert coef == pytest.approx(0.2, rel=0.01)
    for options in ({"target": 0.0}, {"target": 1.0, "clip": 2.0}, {"target": 1.0, "gain": -1.0}):
        with pytest.raises(OptionError, match="target"):
            adaptive_kl_coef(0.1, 0.1, **options)


def test_the_adaptive_entropy_coefficient_brings_an_entropy_that_rises_with_it_to_its_target() -> None:
    coef = 0.0
    for _ in range(200):
        coef = adaptive_entropy_coef(coef, 2 * coef, target=0.3, step=0.01)
    assert coef == pytest.approx(0.15, abs=0.0101), "within a step of it"
    assert adaptive_entropy_coef(0.0, 9.0, target=0.3) == 0.0
    assert adaptive_entropy_coef(1.0, 0.0, target=0.3) == 1.0
    for options in ({"target": 0.0}, {"target": 1.0, "step": -1.0}, {"target": 1.0, "most": -1.0}):
        with pytest.raises(OptionError, match="target"):
            adaptive_entropy_coef(0.1, 0.1, **options)


EXTREMES = [0.0, 1e4, -1e4, 90.0, -90.0, 20.0, -20.0]
"""Log-probabilities, advantages, values: float32 has no exp(89)."""


def inputs_of(name: str, options: dict[str, float | str]) -> list[str]:
    """The inputs of a loss with these options, but for what says where samples begin and end."""
    return [need for need in getattr(m2flow, name)(**options).needs if not need.startswith(("sequence_", "group_"))]


def with_sequences(name: str, lengths: list[int], *, is_mean: bool = True) -> dict[str, Tensor]:
    """What a loss takes of `sequence_ids`, `group_ids` and `sequence_lengths`."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    known = {
        "group_ids": (torch.arange(len(counts)) // 2).repeat_interleave(counts),
        "sequence_ids": torch.arange(len(counts)).repeat_interleave(counts),
        "sequence_lengths": counts.repeat_interleave(counts).double(),
    }
    parameters = inspect.signature(LOSSES[name]).parameters
    return {key: known[key] for key in known if key in parameters and (is_mean or parameters[key].default is inspect.Parameter.empty)}


def is_chosen(lengths: list[int]) -> Tensor:
    """1 for each token of every other sample, from the first on."""
    return (torch.arange(len(lengths)) % 2 == 0).double().repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def extreme_tokens(count: int, names: list[str]) -> dict[str, Tensor]:
    """Every combination of two extremes for the first two inputs, each with every extreme of the third."""
    columns = torch.tensor(list(itertools.product(EXTREMES, repeat=len(names)))).T
    return {
        name: of_likeliest(column[:count]) if name.endswith("top_logprobs") else column[:count].clone()
        for name, column in zip(names, columns, strict=True)
    }


def of_likeliest(values: Tensor) -> Tensor:
    """A distribution over three tokens for each value: [T] to [T, 3]."""
    return torch.stack([values, torch.zeros_like(values), -values / 3], 1).log_softmax(1)


@pytest.mark.parametrize("count", [0, 1, None], ids=["empty", "one token", "all"])
@pytest.mark.parametrize(("name", "options"), LOSS_CASES)
def test_a_loss_and_its_gradient_are_finite_at_extreme_inputs(name: str, options: dict[str, float | str], count: int | None) -> None:
    tensors = inputs_of(name, options)
    for per_sample in (1, 7):
        inputs = extreme_tokens(7 ** len(tensors) if count is None else count, tensors)
        num_tokens = len(next(iter(inputs.values())))
        num_samples = max(1, num_tokens // per_sample) if num_tokens else 0
        lengths = [per_sample] * (num_samples - 1) + [num_tokens - per_sample * (num_samples - 1)] if num_samples else []
        if name in GROUPED:
            lengths = lengths[: len(lengths) // 2 * 2]
            inputs = {key: one[: sum(lengths)] for key, one in inputs.items()}
        if "chosen" in inputs:
            inputs["chosen"] = is_chosen(lengths).float()
        trained = inputs[trained_by(name)].requires_grad_()
        shape = {key: one.float() if key == "sequence_lengths" else one for key, one in with_sequences(name, lengths).items()}
        terms, metrics = LOSSES[name](**inputs, **shape, **options)
        assert terms.isfinite().all()
        assert all(metric.isfinite().all() for metric in metrics.values())
        assert all(metric.shape == terms.shape and not metric.requires_grad for metric in metrics.values())
        (gradient,) = torch.autograd.grad(terms.sum(), trained)
        assert gradient.isfinite().all()
        if "advantages" in inputs and per_sample == 1 and name not in {"opmd", "kl_cov"} and not {"kl_coef", "entropy_coef"} & set(options):
            assert not gradient[inputs["advantages"] == 0].any()


def test_every_loss_is_a_public_function_of_its_module_and_a_word_of_flows() -> None:
    modules = (losses, preferences)
    public = {name for of in modules for name, found in vars(of).items() if inspect.isfunction(found) and found.__module__ == of.__name__}
    helpers = {"kl_estimate", "top_k_divergence", "sequence_sum", "sequence_mean", "correction_weights", "per_sequence", "check_shapes"}
    assert {name for name in public if not name.startswith("_")} == {*LOSSES, *helpers}
    for name in LOSSES:
        declared = getattr(m2flow, name)()
        assert declared.function == f"{LOSSES[name].__module__}:{name}"
        assert set(declared.needs) <= set(inspect.signature(LOSSES[name]).parameters)


LENGTHS = [3, 1, 4, 2]


def random_inputs(name: str, options: dict[str, float | str] | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Float64 inputs near each other, so that some tokens are clipped and some are not; advantages are one number a sample."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    base = -torch.rand(num_tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
    inputs = {key: base + 0.3 * torch.randn(num_tokens, generator=generator, dtype=torch.float64) for key in inputs_of(name, options or {})}
    inputs |= {key: of_likeliest(one) for key, one in inputs.items() if key.endswith("top_logprobs")}
    if "advantages" in inputs:
        inputs["advantages"] = torch.tensor([1.5, -1.0, -0.5, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    if "chosen" in inputs:
        inputs["chosen"] = is_chosen(LENGTHS)
    if "random_numbers" in inputs:
        inputs["random_numbers"] = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    if "version_ages" in inputs:
        inputs["version_ages"] = torch.tensor([0, 0, 1, 1, 2, 3, 0, 4, 1, 0])
    if "labels" in inputs:
        inputs["labels"] = torch.tensor([-1.0, 0.3, 1.0, -1.0, 0.0, -1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    if "baseline" in inputs:
        inputs["baseline"] = torch.full((num_tokens,), 0.2, dtype=torch.float64)
    return inputs


def trained_by(name: str) -> str:
    parameters = inspect.signature(LOSSES[name]).parameters
    return next(key for key in ("values", "logprobs", "top_logprobs") if key in parameters)


def sum_and_gradient(
    name: str,
    options: dict[str, float | str],
    inputs: dict[str, Tensor],
    lengths: list[int],
    *,
    is_mean: bool,
    correction: Correction | None = None,
):
    """What a trainer sums of a cut: terms, weighted by the correction of the columns `proximal` and `rollout` if there is one."""
    inputs = {key: one.detach().clone() for key, one in inputs.items()}
    both = [inputs.pop(key) for key in ("proximal", "rollout") if key in inputs]
    trained = inputs[trained_by(name)].requires_grad_()
    terms, metrics = LOSSES[name](**inputs, **with_sequences(name, lengths, is_mean=is_mean), **options)
    if correction is not None:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        weights, found = losses.correction_weights(*both, ids, correction)
        terms, metrics = terms * weights, {**metrics, **found}
    (gradient,) = torch.autograd.grad(terms.sum(), trained)
    return terms.sum().detach(), gradient, {key: metric.sum() for key, metric in metrics.items()}


CORRECTIONS = [
    None,
    *(
        Correction(level=level, mode=mode, lower=0.7, upper=1.3)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    ),
    Correction(veto=0.5),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("is_mean", [False, True], ids=["tokens", "sequences"])
@pytest.mark.parametrize(("name", "options"), LOSS_CASES)
def test_a_losss_sums_and_gradient_do_not_depend_on_cuts_and_order(
    name: str, options: dict[str, float | str], is_mean: bool, correction: Correction | None
) -> None:
    inputs = random_inputs(name, options)
    if correction is not None:
        pair = random_inputs("decoupled_ppo", seed=1)
        inputs |= {"proximal": pair["proximal_logprobs"], "rollout": pair["behaviour_logprobs"]}
    expected, gradient, metrics = sum_and_gradient(name, options, inputs, LENGTHS, is_mean=is_mean, correction=correction)
    parts = {key: one.split(LENGTHS) for key, one in inputs.items()}
    orders, all_cuts = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)), ((), (1,), (2, 3), (1, 2, 3))
    if name in GROUPED:
        orders, all_cuts = ((0, 1, 2, 3), (3, 2, 0, 1), (2, 3, 1, 0)), ((), (2,))

    @functools.cache
    def of_samples(chosen: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
        """Sum and metrics, and the gradient by sample."""
        chunk = {key: torch.cat([one[i] for i in chosen]) for key, one in parts.items()}
        lengths = [LENGTHS[i] for i in chosen]
        of_chunk = sum_and_gradient(name, options, chunk, lengths, is_mean=is_mean, correction=correction)
        return summed(*of_chunk), dict(zip(chosen, of_chunk[1].split(lengths), strict=True))

    def summed(total: Tensor, _: Tensor, of: dict[str, Tensor]) -> Tensor:
        return torch.stack([total, *(of[key].to(total.dtype) for key in metrics)])

    all_found = []
    for order in orders:
        for cuts in all_cuts:
            found = [of_samples(order[start:end]) for start, end in itertools.pairwise((0, *cuts, len(order)))]
            gradients = {sample: one for _, of in found for sample, one in of.items()}
            all_found.append(torch.cat([sum(one for one, _ in found), *(gradients[sample].flatten() for sample in range(len(LENGTHS)))]))
    wanted = torch.cat([summed(expected, gradient, metrics), gradient.flatten()])
    torch.testing.assert_close(torch.stack(all_found), wanted.expand(len(all_found), -1), rtol=1e-12, atol=1e-12)


STOPPED = {"distill", "clip_cov", "gspo_token", "cispo", "importance_reinforce", "topr"}
"""Losses of which a part has no gradient by design, so that it is not that of their value."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), [case for case in LOSS_CASES if case[0] not in STOPPED])
def test_the_gradient_of_a_loss_is_its_finite_difference(name: str, options: dict[str, float | str], seed: int) -> None:
    inputs = random_inputs(name, options, seed)
    shape = with_sequences(name, LENGTHS)

    def terms(trained: Tensor) -> Tensor:
        return LOSSES[name](**{**inputs, trained_by(name): trained}, **shape, **options)[0]

    if name == "dppo":  # Beyond the bound the value is kept, and the gradient is not.
        clipped = LOSSES[name](**inputs, **shape, **options)[1]["clipped"].bool()
        trained = inputs[trained_by(name)].requires_grad_()
        assert not torch.autograd.grad(terms(trained).sum(), trained)[0][clipped].any()
        inputs = {
            key: one.detach().where(~clipped, inputs["behaviour_logprobs"]) if key == "logprobs" else one for key, one in inputs.items()
        }
    assert torch.autograd.gradcheck(terms, inputs[trained_by(name)].detach().requires_grad_())


def test_losses_with_stopped_parts_have_the_gradient_that_they_state() -> None:
    lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS)).double()
    for seed in range(3):
        for name in sorted(STOPPED - {"distill", "clip_cov"}):
            inputs = random_inputs(name, seed=seed)
            log_ratio, advantages_of = inputs["logprobs"] - inputs["behaviour_logprobs"], inputs["advantages"]
            of_samples = torch.cat([part.sum().expand(len(part)) for part in log_ratio.split(LENGTHS)])
            geometric = (of_samples / lengths).exp()
            stops = ((advantages_of > 0) & (geometric > 1 + 4e-4)) | ((advantages_of < 0) & (geometric < 1 - 3e-4))
            weights = {
                "cispo": log_ratio.exp().clamp(0.0, 1.28),
                "importance_reinforce": log_ratio.exp().clamp(max=2.0),
                "topr": of_samples.exp().clamp(max=1.0).where(advantages_of < 0, torch.tensor(1.0).double()),
                "gspo_token": geometric.where(~stops, torch.tensor(0.0).double()),
            }[name]
            _, gradient, _ = sum_and_gradient(name, {}, inputs, LENGTHS, is_mean=True)
            torch.testing.assert_close(gradient, -weights * advantages_of / lengths)


def test_losses_on_preferences_are_what_trl_computes_pair_by_pair() -> None:
    for seed in range(3):
        inputs = random_inputs("dpo", seed=seed)
        policy, reference = (inputs[key].split(LENGTHS) for key in ("logprobs", "reference_logprobs"))
        sums = [float((p - r).sum()) for p, r in zip(policy, reference, strict=True)]
        means = [float((p - r).mean()) for p, r in zip(policy, reference, strict=True)]
        alone = [float(p.mean()) for p in policy]

        def log_sigmoid(value: float) -> float:
            return -math.log1p(math.exp(-value))

        expected: dict[tuple[str, str], list[float]] = {}
        for good, bad in ((0, 1), (2, 3)):  # As `DPOTrainer.dpo_loss` and `CPOTrainer.cpo_loss` of TRL write them.
            h = 0.1 * (sums[good] - sums[bad])
            of_pair = {
                ("dpo", "{}"): -log_sigmoid(h),
                ("dpo", "{'label_smoothing': 0.2}"): -0.8 * log_sigmoid(h) - 0.2 * log_sigmoid(-h),
                ("ipo", "{}"): (means[good] - means[bad] - 5.0) ** 2,
                ("ipo", "{'average': False}"): (sums[good] - sums[bad] - 5.0) ** 2,
                ("simpo", "{}"): -log_sigmoid(2.0 * (alone[good] - alone[bad] - 0.5)),
            }
            for key, value in of_pair.items():
                expected.setdefault(key, []).extend([value] * (LENGTHS[good] + LENGTHS[bad]))
        for name in PAIRED - {"bradley_terry"}:
            for options in EVERY_OPTION.get(name, [{}]):
                terms, _ = LOSSES[name](**random_inputs(name, seed=seed), **with_sequences(name, LENGTHS), **options)
                assert terms.tolist() == pytest.approx(expected[name, str(options)], rel=1e-12)


def test_kto_judges_each_answer_against_the_baseline() -> None:
    # r is 3 nats for the first answer and -1 for the second; the baseline is 1.
    given = {
        "logprobs": torch.tensor([-1.0, -1.0, -2.0]),
        "reference_logprobs": torch.tensor([-2.0, -3.0, -1.0]),
        "chosen": torch.tensor([1.0, 1.0, 0.0]),
        "sequence_ids": torch.tensor([0, 0, 1]),
        "sequence_lengths": torch.tensor([2.0, 2.0, 1.0]),
    }
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    terms, metrics = preferences.kto(**given, baseline=torch.ones(3), beta=0.5, desirable_weight=1.0, undesirable_weight=3.0)
    assert terms.tolist() == pytest.approx([(1 - sigmoid(1.0)) / 2, (1 - sigmoid(1.0)) / 2, 3 * (1 - sigmoid(1.0))])
    assert metrics["implied_reward"].tolist() == [1.5, 1.5, -0.5]
    below, _ = preferences.kto(**given, baseline=-torch.ones(3))
    torch.testing.assert_close(below, preferences.kto(**given, baseline=torch.zeros(3))[0])


@pytest.mark.parametrize("name", sorted(PAIRED))
@pytest.mark.parametrize(("lengths", "chosen"), [([2, 1], [1.0, 1.0]), ([3], [0.0]), ([1, 1, 1], [1.0, 0.0, 0.0]), ([1, 1], [0.0, 0.0])])
def test_a_group_that_is_no_pair_is_refused(name: str, lengths: list[int], chosen: list[float]) -> None:
    counts = torch.tensor(lengths)
    shape = {
        "sequence_ids": torch.arange(len(counts)).repeat_interleave(counts),
        "group_ids": torch.zeros(sum(lengths), dtype=torch.int64),
        "chosen": torch.tensor(chosen).repeat_interleave(counts),
    }
    inputs = {key: torch.zeros(sum(lengths)) for key in inputs_of(name, {}) if key != "chosen"}
    with pytest.raises(ShapeError, match="no pair"):
        LOSSES[name](**inputs, **shape)


def test_losses_on_pairs_are_means_over_groups_and_nothing_else() -> None:
    for name in GROUPED:
        assert getattr(m2flow, name)().denominator == "groups"
        with pytest.raises(OptionError, match="mean over groups"):
            getattr(m2flow, name)(denominator="tokens")
    with pytest.raises(OptionError, match=r"label_smoothing"):
        m2flow.dpo(label_smoothing=0.6)


def test_bradley_terry_compares_the_values_of_last_tokens_and_leaves_the_others_without_gradient() -> None:
    values = torch.tensor([5.0, 2.0, -4.0, 0.5, 7.0, 1.0], dtype=torch.float64, requires_grad=True)
    shape = {"sequence_ids": torch.tensor([0, 0, 1, 1, 2, 3]), "group_ids": torch.tensor([0, 0, 0, 0, 1, 1])}
    terms, metrics = preferences.bradley_terry(values=values, chosen=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0]), **shape, center=0.1)
    first, second = math.log1p(math.exp(-1.5)) + 0.1 * 2.5**2, math.log1p(math.exp(6.0)) + 0.1 * 8.0**2
    assert terms.tolist() == pytest.approx([first] * 4 + [second] * 2)
    assert (metrics["accuracy"].tolist(), metrics["score"].tolist()) == ([1.0] * 4 + [0.0] * 2, [1.25] * 4 + [4.0] * 2)
    (gradient,) = torch.autograd.grad((terms / torch.tensor([4.0, 4.0, 4.0, 4.0, 2.0, 2.0])).sum(), values)
    pull = 1 / (1 + math.exp(1.5))
    assert gradient[:4].tolist() == pytest.approx([0.0, 0.5 - pull, 0.0, 0.5 + pull])


def test_process_reward_is_the_mean_over_labelled_steps_of_their_cross_entropy() -> None:
    values = torch.tensor([9.0, 1.0, -2.0, 3.0, 4.0])
    ids, lengths = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0])
    labels = torch.tensor([-1.0, 0.25, 1.0, 0.0, -1.0])
    terms, metrics = preferences.process_reward(values=values, labels=labels, sequence_ids=ids, sequence_lengths=lengths)
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    soft = -0.25 * math.log(sigmoid(1.0)) - 0.75 * math.log(1 - sigmoid(1.0))
    assert terms.tolist() == pytest.approx([0.0, soft / 2, -math.log(sigmoid(-2.0)) / 2, -math.log(1 - sigmoid(3.0)), 0.0], rel=1e-5)
    assert metrics["step_accuracy"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    _, others = preferences.process_reward(values=values, labels=1 - labels.abs(), sequence_ids=ids, sequence_lengths=lengths)
    assert others["step_accuracy"].tolist() == pytest.approx([2 / 3] * 3 + [1.0, 0.0])


def cov_inputs() -> dict[str, Tensor]:
    """Two groups: covariances 4, 0, 4 of log-probabilities -1, -3, -5 and advantages 2, 0, -2; and 1, 1 of -1, -3 and 1, -1."""
    logprobs = torch.tensor([-1.0, -3.0, -5.0, -1.0, -3.0], dtype=torch.float64)
    advantages_of = torch.tensor([2.0, 0.0, -2.0, 1.0, -1.0], dtype=torch.float64)
    return {"logprobs": logprobs.requires_grad_(), "advantages": advantages_of, "group_ids": torch.tensor([0, 0, 0, 1, 1])}


def test_clip_cov_stops_the_gradient_of_a_share_of_the_tokens_within_its_bounds() -> None:
    given = cov_inputs()
    behaviour = given["logprobs"].detach() + torch.tensor([0.0, 0.0, 0.0, -0.5, 0.0])  # The ratio of the fourth is above its clip.
    draws = torch.tensor([0.2, 0.2, 0.8, 0.2, 0.2], dtype=torch.float64)
    terms, metrics = losses.clip_cov(**given, behaviour_logprobs=behaviour, random_numbers=draws, share=0.25, cov_low=0.5, cov_high=5.0)
    # Chances: 0.25 * 3 / 2 in the first group, 0.25 * 2 / 1 in the second, where the clip acts on one of two.
    assert metrics["covariance"].tolist() == [4.0, 0.0, 4.0, 1.0, 1.0]
    assert (metrics["stopped"].tolist(), metrics["clipped"].tolist()) == ([1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0])
    (gradient,) = torch.autograd.grad(terms.sum(), given["logprobs"])
    assert gradient.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0]
    plain, _ = losses.ppo_clip(logprobs=given["logprobs"], behaviour_logprobs=behaviour, advantages=given["advantages"])
    torch.testing.assert_close(terms, plain)


def test_clip_cov_stops_its_share_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 4000
    given = {name: torch.randn(count, generator=generator, dtype=torch.float64) for name in ("logprobs", "advantages")}
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    groups = torch.arange(count) // 100
    _, metrics = losses.clip_cov(
        **given, behaviour_logprobs=given["logprobs"], random_numbers=draws, group_ids=groups, share=0.05, cov_low=0.5, cov_high=5.0
    )
    assert metrics["stopped"].mean().item() == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / count))


@pytest.mark.parametrize(("share", "held"), [(0.0, [1, 0, 1, 1, 1]), (0.34, [1, 0, 1, 1, 1]), (1.0, [1, 0, 1, 1, 1])])
def test_kl_cov_holds_ties_together_and_no_token_without_covariance(share: float, held: list[int]) -> None:
    given = cov_inputs()
    terms, metrics = losses.kl_cov(**given, behaviour_logprobs=given["logprobs"].detach() - 0.5, share=share, kl_coef=2.0)
    assert metrics["held"].tolist() == held
    expected = -math.exp(0.5) * given["advantages"] + torch.tensor(held) * 2.0 * 0.5
    torch.testing.assert_close(terms.detach(), expected)


def test_kl_cov_holds_the_share_of_each_group_with_the_largest_covariance() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages_of = (torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(2))
    groups = torch.tensor([0] * 10 + [1] * 20)
    _, metrics = losses.kl_cov(logprobs=logprobs, behaviour_logprobs=logprobs, advantages=advantages_of, group_ids=groups, share=0.15)
    for group, count in ((0, 1), (1, 3)):
        covariance, held = metrics["covariance"][groups == group], metrics["held"][groups == group] > 0
        assert held.sum() == count
        assert covariance[held].min() > covariance[~held].max()


def test_gspo_and_gspo_token_agree_where_advantages_are_those_of_samples() -> None:
    inputs = random_inputs("gspo")
    for options in EVERY_OPTION["gspo"]:
        whole = sum_and_gradient("gspo", options, inputs, LENGTHS, is_mean=True)
        torch.testing.assert_close(sum_and_gradient("gspo_token", options, inputs, LENGTHS, is_mean=True), whole)


POLICY_LOSSES = [name for name in LOSSES if "advantages" in inputs_of(name, {})]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_policy_loss_has_the_gradient_of_reinforce(name: str) -> None:
    inputs = random_inputs(name)
    inputs = {key: inputs["logprobs"] if key.endswith("logprobs") else one for key, one in inputs.items()}
    _, gradient, _ = sum_and_gradient(name, {}, inputs, LENGTHS, is_mean=True)
    is_mean = name not in GROUPED  # The engine divides the terms of a loss on groups.
    expected = sum_and_gradient("reinforce", {}, {key: inputs[key] for key in ("logprobs", "advantages")}, LENGTHS, is_mean=is_mean)[1]
    torch.testing.assert_close(gradient, expected)


def test_decoupled_ppo_with_the_sampling_policy_as_the_proximal_one_is_ppo() -> None:
    inputs = random_inputs("ppo_clip")
    both = {key: inputs[key] for key in ("logprobs", "behaviour_logprobs", "advantages")}
    found = sum_and_gradient("decoupled_ppo", {}, {**both, "proximal_logprobs": inputs["behaviour_logprobs"]}, LENGTHS, is_mean=True)
    expected = sum_and_gradient("ppo_clip", {}, both, LENGTHS, is_mean=True)
    torch.testing.assert_close(found[:2], expected[:2])


def test_an_interpolated_proximal_policy_is_the_sampling_one_on_fresh_tokens_and_nears_the_new_one_with_age() -> None:
    old, new = torch.tensor([0.2], dtype=torch.float64).log(), torch.tensor([0.3], dtype=torch.float64).log()
    found = []
    for age in (0, 1, 3, 10**6):
        given = {"logprobs": new, "behaviour_logprobs": old, "advantages": torch.ones(1, dtype=torch.float64)}
        _, metrics = losses.decoupled_ppo(**given, version_ages=torch.tensor([age]), proximal="interpolated", eps_high=9.0)
        found.append((metrics["ratio"].item(), metrics["weight"].item()))
    assert found[0] == pytest.approx((1.5, 1.0))
    assert found[1] == pytest.approx((1.5**0.5, 1.5**0.5))
    assert found[2] == pytest.approx((1.5**0.25, 1.5**0.75))
    assert found[3] == pytest.approx((1.0, 1.5), abs=1e-5)
    with pytest.raises(OptionError, match="is not given"):
        losses.decoupled_ppo(**given, proximal="interpolated")


@pytest.mark.parametrize(("kl", "p_new", "p_old", "distance"), [("tv", 0.5, 0.3, 0.2), ("kl", 0.5, 0.25, 0.13081)])
def test_the_divergence_of_dppo_is_that_of_the_token_against_the_others(kl: str, p_new: float, p_old: float, distance: float) -> None:
    one = torch.ones(1, dtype=torch.float64)
    _, metrics = losses.dppo(
        logprobs=(p_new * one).log(),
        behaviour_logprobs=(p_old * one).log(),
        advantages=one,
        divergence=kl,  # type: ignore[arg-type]
    )
    assert metrics["divergence"].item() == pytest.approx(distance, abs=1e-5)


def test_sums_and_means_of_samples_are_given_to_each_token_and_have_gradients() -> None:
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0, 1])
    assert torch.autograd.gradcheck(lambda v: losses.sequence_sum(v, ids), values)
    assert torch.autograd.gradcheck(lambda v: losses.sequence_mean(v, ids), values)
    assert losses.sequence_mean(values, ids).tolist() == [1.5, 1.5, 6.0]
    with pytest.raises(ShapeError, match="sequence_ids"):
        losses.sequence_sum(values, ids[:1])


def test_expected_gradients_of_k1_and_k3_are_none_and_that_of_the_other_direction() -> None:
    logits, q = torch.tensor([0.3, -0.2, 1.0]).double().requires_grad_(), torch.tensor([0.3, 0.3, 0.4]).double()
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    of_k1, of_k3 = (torch.autograd.grad((p * kl_estimate(logp, q.log(), k)).sum(), logits, retain_graph=True)[0] for k in ("k1", "k3"))  # type: ignore[arg-type]
    (reverse,) = torch.autograd.grad((q * (q.log() - logp)).sum(), logits)
    torch.testing.assert_close(of_k1, torch.zeros(3).double())
    torch.testing.assert_close(of_k3, reverse)


def test_k1_in_the_reward_has_the_gradient_of_the_divergence_and_so_equals_k2_in_the_loss() -> None:
    logits, q = torch.tensor([0.3, -0.2, 1.0]).double().requires_grad_(), torch.tensor([0.3, 0.3, 0.4]).double()
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    advantages_of = -kl_estimate(logp.detach(), q.log(), "k1")
    in_reward, _ = losses.reinforce(logprobs=logp, advantages=advantages_of)
    in_loss = kl_estimate(logp, q.log(), "k2")
    found, expected = (torch.autograd.grad((p * terms).sum(), logits, retain_graph=True)[0] for terms in (in_reward, in_loss))
    torch.testing.assert_close(found, expected)


def divergence_of(p: Tensor, q: Tensor, direction: Direction) -> Tensor:
    """The divergence of whole distributions, by its definition: [..., V] of probabilities to [...]."""
    middle = (p + q) / 2
    to = {"reverse": [(p, q, 1.0)], "forward": [(q, p, 1.0)], "js": [(p, middle, 0.5), (q, middle, 0.5)]}[direction]
    return torch.stack([weight * (a * (a / b).log()).sum(-1) for a, b, weight in to]).sum(0)


def some_logits(vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits, other = (2 * torch.randn(4, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(), other


def over_likeliest(logits: Tensor, other: Tensor, k: int) -> list[Tensor]:
    """Log-probabilities of the other's k likeliest tokens and of the rest: two [T, k + 1]."""
    ids = other.topk(k).indices
    found = []
    for one in (logits, other):
        top = one.log_softmax(-1).gather(1, ids)
        found.append(torch.cat((top, (1 - top.exp().sum(1, keepdim=True)).log()), 1))
    return found


@pytest.mark.parametrize("direction", get_args(Direction))
def test_a_divergence_over_likeliest_tokens_grows_to_that_of_the_whole_distributions_with_its_gradient(direction: Direction) -> None:
    logits, other = some_logits(6)
    whole = divergence_of(logits.softmax(-1), other.softmax(-1), direction)
    by_k = torch.stack([top_k_divergence(*over_likeliest(logits, other, k), direction) for k in range(1, 6)])
    assert (by_k.diff(dim=0) >= -1e-12).all()  # Finer cells of the same tokens: data processing.
    assert (by_k >= 0).all()
    torch.testing.assert_close(by_k[-1], whole)
    found, expected = (torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (by_k[-1], whole))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("direction", get_args(Direction))
def test_distillation_on_sampled_tokens_has_the_expected_gradient_of_its_divergence(direction: Direction) -> None:
    logits, other = some_logits(6)
    whole = divergence_of(logits.softmax(-1), other.softmax(-1), direction)
    logp, teacher = logits.log_softmax(-1), other.log_softmax(-1)
    terms, _ = losses.distill(logprobs=logp, behaviour_logprobs=logp.detach(), teacher_logprobs=teacher, direction=direction)
    found, expected = (torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (logp.exp().detach() * terms, whole))
    torch.testing.assert_close(found, expected)


def test_directions_that_are_none_are_refused() -> None:
    with pytest.raises(OptionError, match=r"no direction 'revers'.*\n?.*reverse"):
        top_k_divergence(torch.zeros(1, 2), torch.zeros(1, 2), "revers")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="direction"):
        m2flow.distill_top_k(direction="revers")  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimate_of_the_divergence_and_its_gradient_are_finite_at_extreme_inputs(estimator: KlEstimator) -> None:
    for count in (0, 1, 49):
        inputs = extreme_tokens(count, ["logprobs", "reference_logprobs"])
        estimate = kl_estimate(inputs["logprobs"].requires_grad_(), inputs["reference_logprobs"].requires_grad_(), estimator)
        gradients = torch.autograd.grad(estimate.sum(), list(inputs.values()))
        assert estimate.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clamping_changes_no_estimate_of_a_moderate_ratio(estimator: KlEstimator) -> None:
    r = torch.linspace(-19, 19, 101, dtype=torch.float64)
    expected = {"k1": -r, "k2": r.square() / 2, "k3": r.exp() - 1 - r}[estimator]
    torch.testing.assert_close(kl_estimate(torch.zeros_like(r), r, estimator), expected)


@pytest.mark.parametrize("function", [*ALL, *OF_BATCHES])
def test_advantages_are_finite_at_extreme_rewards(function: Callable[..., Tensor]) -> None:
    for rewards in itertools.product([*EXTREMES, 1e30, -1e30, 1e-30], repeat=2):
        for dtype in (torch.float32, torch.float64):
            assert function(torch.tensor([rewards], dtype=dtype)).isfinite().all()
    assert function(torch.zeros(0), []).tolist() == []
    assert function(torch.tensor([[1e300, -1e300]], dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("name", [function.__name__ for function in (*ALL, *OF_BATCHES)])
def test_an_advantage_that_no_float32_holds_is_refused_by_name(name: str) -> None:
    rewards = np.array([1e300, -1e300])
    if name.startswith(("grpo", "reinforce_pp")):
        assert np.isfinite(advantages.on_arrays(name, rewards, [(0, 2)])).all()
    else:
        with pytest.raises(RewardError, match="float32"):
            advantages.on_arrays(name, rewards, [(0, 2)])


def test_estimated_advantages_are_finite_at_extreme_rewards_and_values() -> None:
    for reward, value in itertools.product([*EXTREMES, 1e30], repeat=2):
        for length in (0, 1, 3):
            rewards, values = np.full(length, reward), np.full(length, value)
            for found in gae(rewards, values, np.array([length])):
                assert np.isfinite(found).all()
                assert len(found) == length


def test_decoupled_estimates_have_the_returns_of_their_own_lam() -> None:
    rng = np.random.default_rng(3)
    rewards, values, lengths = rng.normal(size=9), rng.normal(size=9), np.array([4, 0, 5])
    advantages_of, returns = gae(rewards, values, lengths, gamma=0.9, lam=0.5, critic_lam=1.0)
    assert np.array_equal(advantages_of, gae(rewards, values, lengths, gamma=0.9, lam=0.5)[0])
    sums = [sum(0.9**j * rewards[i + j] for j in range(end - i)) for start, end in ((0, 4), (4, 9)) for i in range(start, end)]
    assert returns == pytest.approx(sums)


def test_a_lam_for_each_sample_is_that_lam_on_the_sample_alone() -> None:
    rng = np.random.default_rng(4)
    rewards, values, lengths = rng.normal(size=60), rng.normal(size=60), np.array([10, 50])
    lams = length_adaptive_lam(lengths, 0.05)
    assert lams.tolist() == pytest.approx([0.0, 0.6])
    both, _ = gae(rewards, values, lengths, lam=lams)
    alone = [
        gae(rewards[a:b], values[a:b], np.array([b - a]), lam=float(lam))[0] for (a, b), lam in zip([(0, 10), (10, 60)], lams, strict=True)
    ]
    assert both == pytest.approx(np.concatenate(alone))


def test_vtrace_of_the_current_weights_is_gae_with_lam_one() -> None:
    rng = np.random.default_rng(5)
    rewards, values, lengths = rng.normal(size=9), rng.normal(size=9), np.array([4, 5])
    found = vtrace(rewards, values, np.zeros(9), lengths, gamma=0.9)
    for one, other in zip(found, gae(rewards, values, lengths, gamma=0.9, lam=1.0), strict=True):
        assert one == pytest.approx(other)


def test_vtrace_is_its_definition_on_one_sample() -> None:
    rng = np.random.default_rng(6)
    rewards, values, ratios, gamma = rng.normal(size=4), rng.normal(size=4), rng.uniform(0.2, 3.0, size=4), 0.9
    rho, c = np.minimum(ratios, 1.5), 0.8 * np.minimum(ratios, 1.0)
    after = np.append(values[1:], 0.0)
    deltas = rho * (rewards + gamma * after - values)
    expected = [values[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * deltas[t] for t in range(s, 4)) for s in range(4)]
    found, returns = vtrace(rewards, values, np.log(ratios), np.array([4]), gamma=gamma, lam=0.8, rho_max=1.5, c_max=1.0)
    assert returns == pytest.approx(expected)
    assert found == pytest.approx(rewards + gamma * np.append(returns[1:], 0.0) - values)


def test_vtrace_is_finite_at_extreme_ratios_and_without_samples() -> None:
    for ratio in EXTREMES:
        assert all(np.isfinite(one).all() for one in vtrace(np.ones(2), np.ones(2), np.full(2, ratio), np.array([2])))
    assert [len(one) for one in vtrace(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))] == [0, 0]


def test_estimates_refuse_options_out_of_range() -> None:
    one, lengths = np.ones(1), np.array([1])
    for options in ({"lam": 1.5}, {"critic_lam": -0.1}, {"gamma": 2.0}, {"lam": np.array([-1.0])}):
        with pytest.raises(OptionError):
            gae(one, one, lengths, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        vtrace(one, one, one, lengths, rho_max=0.0)
    with pytest.raises(OptionError):
        length_adaptive_lam(lengths, 0.0)


def test_the_penalty_for_overlong_responses_falls_over_the_buffer() -> None:
    lengths = np.array([0, 90, 95, 100, 101, 10**9])
    assert overlong_penalty(lengths, longest=100, buffer=10).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    for buffer in (0, 101):
        with pytest.raises(OptionError, match="buffer"):
            overlong_penalty(1, longest=100, buffer=buffer)


def test_a_wrong_answer_gains_nothing_by_being_short() -> None:
    assert length_reward([10, 20, 30, 10], [True, False, True, False]).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert length_reward([7, 7], [True, False]).tolist() == [0.0, 0.0]
    assert length_reward([], []).tolist() == []
    with pytest.raises(ShapeError):
        length_reward([1, 2], [True])


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_running_moments_are_those_of_all_rewards_however_they_are_cut(batches: list[list[float]]) -> None:
    moments = Moments()
    for batch in batches:
        moments = moments.with_batch(np.array(batch, np.float64))
        assert moments == moments.with_batch(np.zeros(0))
    everything = np.array([reward for batch in batches for reward in batch])
    assert moments.count == len(everything)
    if len(everything) > 1:
        assert moments.mean == pytest.approx(everything.mean(), abs=1e-6)
        assert moments.deviation == pytest.approx(everything.std(ddof=1), abs=1e-6)
    assert np.abs(moments.normalised(np.array([1e30]), clip=5.0)).max() <= 5.0


RATIOS = torch.tensor([3.0, 0.5, 1.0, 0.1, 1.5], dtype=torch.float64)
RATIO_IDS = torch.tensor([0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(), [2.0, 0.5, 1.0, 0.1, 1.5]),
        (Correction(upper=10.0, lower=0.2), [3.0, 0.5, 1.0, 0.2, 1.5]),
        (Correction(mode="mask", lower=0.2), [0.0, 0.5, 1.0, 0.0, 1.5]),
        (Correction(level="sequence", upper=1.4), [1.4, 1.4, 0.1, 0.1, 1.4]),
        (Correction(level="geometric", mode="mask", lower=0.5, upper=1.3), [1.5**0.5, 1.5**0.5, 0.0, 0.0, 0.0]),
        (Correction(upper=10.0, veto=0.2), [3.0, 0.5, 0.0, 0.0, 1.5]),
    ],
    ids=str,
)
def test_corrections_are_bounded_ratios_of_tokens_and_of_samples(correction: Correction, expected: list[float]) -> None:
    weights, metrics = losses.correction_weights(RATIOS.log(), torch.zeros(5).double(), RATIO_IDS, correction)
    assert weights.tolist() == pytest.approx(expected)
    of_level = {
        "token": RATIOS,
        "sequence": torch.tensor([1.5, 1.5, 0.1, 0.1, 1.5]),
        "geometric": torch.tensor([1.5, 1.5, 0.1, 0.1, 2.25]).sqrt(),
    }
    changed = (weights - of_level[correction.level].double()).abs() > 1e-6
    assert metrics["correction_clipped"].bool().tolist() == changed.tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(upper=(4.0, 2.5, 1.2), lower=(0.0, 0.2)), [3.0, 0.5, 1.0, 0.2, 1.2]),
        (Correction(upper=[2.5, 4.0], lower=0.3), [2.5, 0.5, 1.0, 0.3, 1.5]),
        (Correction(mode="mask", upper=(4.0, 2.5, 1.2), lower=(0.0, 0.2)), [3.0, 0.5, 1.0, 0.0, 0.0]),
        (Correction(level="sequence", upper=(1.4, 1.3, 1.2), lower=(0.0, 0.5, 0.2)), [1.3, 1.3, 0.5, 0.5, 1.2]),
        (Correction(level="geometric", mode="mask", upper=(1.1, 1.3), lower=(0.4, 0.3)), [1.5**0.5, 1.5**0.5, 0.1**0.5, 0.1**0.5, 0.0]),
    ],
    ids=str,
)
def test_bounds_by_version_age_are_of_the_token_or_of_a_responses_oldest_token(correction: Correction, expected: list[float]) -> None:
    # The last is older than there are bounds, and the first is younger than the weights.
    ages = torch.tensor([-1, 1, 0, 1, 7])
    weights, metrics = losses.correction_weights(RATIOS.log(), torch.zeros(5).double(), RATIO_IDS, correction, ages)
    assert weights.tolist() == pytest.approx(expected)
    order = torch.tensor([4, 2, 1, 3, 0])
    turned, _ = losses.correction_weights(RATIOS.log()[order], torch.zeros(5).double(), RATIO_IDS[order], correction, ages[order])
    assert turned.tolist() == pytest.approx(weights[order].tolist())
    parts = [
        losses.correction_weights(
            RATIOS.log()[rows], torch.zeros(len(rows)).double(), torch.zeros(len(rows)).long(), correction, ages[rows]
        )
        for rows in ([0, 1], [2, 3], [4])
    ]
    assert torch.cat([part for part, _ in parts]).tolist() == weights.tolist()
    assert torch.cat([of_part["correction_clipped"] for _, of_part in parts]).tolist() == metrics["correction_clipped"].tolist()
    empty = torch.zeros(0)
    assert losses.correction_weights(empty, empty, empty.long(), correction, empty.long())[0].shape == (0,)
    with pytest.raises(ShapeError, match="version_ages"):
        losses.correction_weights(RATIOS.log(), torch.zeros(5).double(), RATIO_IDS, correction)


@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        ({"upper": ()}, "upper is empty"),
        ({"lower": []}, "lower is empty"),
        ({"upper": (2.0, 0.0)}, "upper of version age 1 is 0.0"),
        ({"upper": (2.0, 0.5, 3.0), "lower": 0.6}, "lower of version age 1 is 0.6"),
        ({"upper": 1.0, "lower": (0.5, 1.5)}, "lower of version age 1 is 1.5"),
        ({"upper": (2.0, "3")}, "upper of version age 1 is '3'"),
        ({"upper": {0: 2.0}}, "upper is {0: 2.0}"),
    ],
)
def test_bounds_by_version_age_are_checked_for_each_age(bounds: dict[str, Any], error: str) -> None:
    with pytest.raises(OptionError, match=re.escape(error)):
        Correction(**bounds)


def test_metrics_of_a_correction_average_to_what_they_are_named_after() -> None:
    rollout, proximal = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    _, metrics = losses.correction_weights(proximal.log(), rollout.log(), torch.arange(3), Correction(upper=100.0))
    expected = {
        "correction_weight": 1.0,
        "rollout_kl": (rollout * (rollout / proximal).log()).sum().item(),
        "proximal_kl": (proximal * (proximal / rollout).log()).sum().item(),
        "chi_square": ((proximal - rollout).square() / rollout).sum().item(),
        "correction_weight_square": ((proximal - rollout).square() / rollout).sum().item() + 1,
    }
    assert {name: (rollout * metrics[name]).sum().item() for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_corrections_are_finite_at_extremes_and_do_not_depend_on_order(level: str, mode: str) -> None:
    correction = Correction(level=level, mode=mode, upper=3.0, lower=0.1, veto=1e-4)  # type: ignore[arg-type]
    inputs = extreme_tokens(49, ["proximal", "rollout"])
    ids = torch.arange(49) // 7
    weights, metrics = losses.correction_weights(inputs["proximal"], inputs["rollout"], ids, correction)
    assert all(one.isfinite().all() for one in (weights, *metrics.values()))
    turned = losses.correction_weights(inputs["proximal"].flip(0), inputs["rollout"].flip(0), 6 - ids.flip(0), correction)[0]
    torch.testing.assert_close(turned.flip(0), weights)
    alone = [
        losses.correction_weights(inputs["proximal"][i : i + 7], inputs["rollout"][i : i + 7], ids[:7], correction)[0]
        for i in range(0, 49, 7)
    ]
    torch.testing.assert_close(torch.cat(alone), weights)
    empty = losses.correction_weights(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), correction)[0]
    assert empty.tolist() == []


BANDIT_REWARDS = torch.tensor([0.0, 0.3, 1.0, 0.6])
POLICY_LOSSES = [name for name in LOSSES if "advantages" in inspect.signature(LOSSES[name]).parameters]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_a_bandit_every_policy_loss_finds_the_best_arm(name: str) -> None:
    logits, generator = torch.zeros(4, requires_grad=True), torch.Generator().manual_seed(0)
    for _ in range(150):
        sampled = logits.detach().log_softmax(0)
        arms = torch.multinomial(sampled.exp(), 64, replacement=True, generator=generator)
        given = bandit_inputs(BANDIT_REWARDS[arms], sampled[arms])
        for _ in range(2):  # Off policy in the second, but for a loss that has no ratio.
            logprobs = logits.log_softmax(0)[arms]
            wanted = inspect.signature(LOSSES[name]).parameters
            terms, _ = LOSSES[name](logprobs=logprobs, **{key: value for key, value in given.items() if key in wanted})
            (gradient,) = torch.autograd.grad(terms.mean(), logits)
            logits.data -= 0.5 * gradient
            if "behaviour_logprobs" not in wanted:
                break
    assert logits.softmax(0)[2] > 0.9


def bandit_inputs(rewards: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """What a loss may need of 64 answers of one token to one prompt."""
    count = len(rewards)
    return {
        "advantages": advantages.dr_grpo(rewards, [count]),
        "behaviour_logprobs": sampled,
        "proximal_logprobs": sampled,
        "sequence_ids": torch.arange(count),
        "group_ids": torch.zeros(count, dtype=torch.int64),
        "sequence_lengths": torch.ones(count),
        "random_numbers": torch.linspace(0, 1, count),
    }


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_on_a_bandit_a_penalty_for_kl_in_the_reward_ends_at_its_known_optimum(beta: float) -> None:
    # The best policy is the reference times exp(reward / beta), normalised.
    reference = torch.tensor([0.4, 0.3, 0.1, 0.2]).log()
    expected = (reference + BANDIT_REWARDS / beta).softmax(0)
    logits = torch.zeros(4, requires_grad=True)
    for _ in range(1000):
        logprobs = logits.log_softmax(0)
        shaped = BANDIT_REWARDS - beta * kl_estimate(logprobs.detach(), reference, "k1")
        chances = logprobs.detach().exp()  # Every arm, weighted by its chance: the expectation itself.
        terms, _ = losses.reinforce(logprobs=logprobs, advantages=shaped - (chances * shaped).sum())
        (gradient,) = torch.autograd.grad((chances * terms).sum(), logits)
        logits.data -= gradient
    torch.testing.assert_close(logits.detach().softmax(0), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_on_a_bandit_a_penalty_for_kl_in_the_loss_ends_where_its_gradient_says(estimator: KlEstimator) -> None:
    # k2's expected gradient is that of KL(policy || reference), k3's that of KL(reference || policy): their optima differ.
    beta, reference = 0.5, torch.tensor([0.4, 0.3, 0.1, 0.2]).log()
    logits, exact = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    for _ in range(400):
        logprobs = logits.log_softmax(0)
        chances = logprobs.detach().exp()
        given = {"logprobs": logprobs, "behaviour_logprobs": logprobs.detach(), "reference_logprobs": reference}
        terms, _ = losses.ppo_clip(**given, advantages=BANDIT_REWARDS, kl_coef=beta, kl=estimator)
        logits.data -= 0.5 * torch.autograd.grad((chances * terms).sum(), logits)[0]
        p = exact.softmax(0)
        divergence = (p * (p.log() - reference)).sum() if estimator == "k2" else (reference.exp() * (reference - p.log())).sum()
        exact.data -= 0.5 * torch.autograd.grad(beta * divergence - (p * BANDIT_REWARDS).sum(), exact)[0]
    torch.testing.assert_close(logits.detach().softmax(0), exact.detach().softmax(0), atol=1e-3, rtol=0)


def _episodes(spoken: list[list[tuple[str, str, int]]], rewards: list[dict[str, float]]) -> Batch:
    """Episodes of one group: of each conversation its name, its parent and how many tokens the model said, after a prompt of two."""
    records, kinds, lengths, mask = [], [], [], []
    for of, reward in zip(spoken, rewards, strict=True):
        rewarded = {name: name if name in reward else parent for name, parent, _ in of} if reward else {}
        named = [{"name": name, "parent": parent} for name, parent, _ in of]
        records.append({"conversations": named, "rewards": reward, "rewarded": rewarded})
        kinds.append([Segment.PROMPT, Segment.GENERATED] * len(of))
        lengths.append([count for _, _, said in of for count in (2, said)])
        mask.append([bit for _, _, said in of for bit in [False] * 2 + [True] * said])
    return Batch(
        make_ids(0, 1, len(spoken)),
        {
            "tokens": Ragged.of(mask, np.int32),
            "loss_mask": Ragged.of(mask, np.bool_),
            "segment_kinds": Ragged.of(kinds, np.uint8),
            "segment_lengths": Ragged.of(lengths, np.int32),
            "episode": Ragged.json(records),
        },
    )


def test_conversations_are_compared_with_those_of_their_name_and_a_fork_goes_by_its_parents_reward():
    spoken = [[("a", "", 1), ("a/1", "a", 2), ("b", "", 1)], [("a", "", 1), ("b", "", 3)], [("b", "", 1), ("c", "", 1)]]
    rewards = [{"a": 4.0, "b": 1.0}, {"a": 2.0, "b": 0.0}, {"b": 5.0, "c": 7.0}]
    means = np.array([2.5, 1.0, 6.0])
    found = advantages.of_conversations("dr_grpo", means, _episodes(spoken, rewards))
    assert [row.tolist() for row in (found.row(0), found.row(1), found.row(2))] == [
        [0, 0, 1, 0, 0, 1, 1, 0, 0, -1],
        [0, 0, -1, 0, 0, -2, -2, -2],
        [0, 0, 3, 0, 0, 0],
    ]
    longer = advantages.of_conversations("opo", means, _episodes(spoken, rewards))
    assert longer.row(1)[2] == pytest.approx(2.0 - (3 * 4.0 + 1 * 2.0) / 4), "the tokens of a fork count with its parent's"
    with pytest.raises(OpError, match="its conversations have others"):
        advantages.of_conversations("grpo", means + 1, _episodes(spoken, rewards))
    one = advantages.of_conversations("dr_grpo", np.array([1.0, 3.0]), _episodes(spoken[:2], [{}, {}]))
    assert [row[mask.astype(bool)].tolist() for row, mask in ((one.row(0), np.array([0, 0, 1, 0, 0, 1, 1, 0, 0, 1])),)] == [
        [-1, -1, -1, -1]
    ]


def test_gae_gives_each_conversation_the_reward_at_its_end_and_nothing_crosses_to_the_next():
    rows = _episodes([[("a", "", 2), ("b", "", 1)], [("a", "", 1)]], [{}, {}])
    values = Ragged(np.where(rows.ragged("loss_mask").values, 0.5, 0.0), rows.ragged("tokens").offsets)
    rows = rows.with_columns(rewards=np.array([1.0, 2.0]), values=values)
    found = gae_rows(rows, {}, gamma=1.0, lam=0.0)
    assert found.ragged("advantages").row(0).tolist() == [0, 0, 0, 0.5, 0, 0, 0.5]
    assert found.ragged("returns").row(1).tolist() == [0, 0, 2.0]
    penal = rows.with_columns(penalties=Ragged(np.array([0.0, 0.25, 0.0, 0.0]), np.array([0, 3, 4])))
    assert gae_rows(penal, {}, gamma=1.0, lam=0.0).ragged("advantages").row(0).tolist() == [0, 0, 0, 0.25, 0, 0, 0.5]
    apart = _episodes([[("a", "", 1), ("b", "", 1)]], [{"a": 1.0, "b": -1.0}])
    values = Ragged(np.zeros(6), apart.ragged("tokens").offsets)
    with pytest.raises(OpError, match="gae takes one for an episode"):
        gae_rows(apart.with_columns(rewards=np.array([0.0]), values=values), {}, gamma=1.0, lam=0.0)
