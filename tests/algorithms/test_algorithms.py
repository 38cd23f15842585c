"""Advantages, KL estimators and losses against numbers worked out by hand, and against their definitions."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algorithms import advantages, losses
from m2flow.algorithms.gae import gae
from m2flow.algorithms.losses import kl_estimate
from m2flow.errors import OptionError, RewardError, ShapeError
from m2flow.recipe import AdvantageName, KlEstimator

ALL = list(advantages.ADVANTAGES.values())
ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)

EVERY_OPTION: dict[str, list[dict[str, float | str]]] = {
    "ppo_clip": [{}, {"dual_clip": 3.0}, *({"kl_coef": 0.1, "kl": estimator} for estimator in ESTIMATORS)],
    "reinforce": [{}],
    "distill": [{}, {"clip": 0.2}],
    "clipped_value": [{}, {"clip": 0.2}],
    "nll": [{}],
}
"""Options that choose another branch of a loss."""

reward_groups = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=5)


def flatten(groups: list[list[float]]) -> tuple[Tensor, list[int]]:
    return torch.tensor([r for group in groups for r in group]), [len(group) for group in groups]


def test_the_names_of_advantages_that_a_flow_may_use_are_those_of_the_functions() -> None:
    assert tuple(advantages.ADVANTAGES) == tuple(advantages.BY_NAME) == get_args(AdvantageName)


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
    for function in ALL:
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


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(function: Callable[..., Tensor], bad: float) -> None:
    with pytest.raises(RewardError, match="reward 1 of 2"):
        function(torch.tensor([1.0, bad]), [2])


@pytest.mark.parametrize("function", ALL)
def test_sizes_that_do_not_fit_are_refused(function: Callable[..., Tensor]) -> None:
    for rewards, sizes in [(torch.ones(3), [2]), (torch.ones(3), [3, 0]), (torch.ones(2, 2), [2, 2]), (torch.ones(3), None)]:
        with pytest.raises(ShapeError):
            function(rewards, sizes)


def test_leave_one_out_refuses_a_group_of_one() -> None:
    with pytest.raises(ShapeError, match="group 1 has one sample"):
        advantages.rloo(torch.ones(3), [2, 1])


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
    result = advantages.BY_NAME["dr_grpo"](rewards, [(0, 2), (2, 5)])
    assert result.dtype == np.float32
    assert result.tolist() == [0.5, -0.5, -2.0, 0.0, 2.0]


EXTREMES = [0.0, 1e4, -1e4, 90.0, -90.0, 20.0, -20.0]
"""Log-probabilities, advantages, values: float32 has no exp(89)."""

PER_TOKEN = {"logprobs", "behaviour_logprobs", "reference_logprobs", "teacher_logprobs", "advantages", "values", "returns", "old_values"}


def extreme_tokens(count: int, names: list[str]) -> dict[str, Tensor]:
    """Every combination of two extremes for the first two inputs, each with every extreme of the third."""
    columns = torch.tensor(list(itertools.product(EXTREMES, repeat=len(names)))).T
    return {name: column[:count].clone() for name, column in zip(names, columns, strict=True)}


@pytest.mark.parametrize("count", [0, 1, None], ids=["empty", "one token", "all"])
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_a_loss_and_its_gradient_are_finite_at_extreme_inputs(name: str, count: int | None) -> None:
    function: Callable[..., tuple[Tensor, dict[str, Tensor]]] = getattr(losses, name)
    parameters = inspect.signature(function).parameters
    tensors = [parameter for parameter in parameters if parameter in PER_TOKEN]
    for options in EVERY_OPTION[name]:
        inputs = extreme_tokens(7**4 if count is None else count, tensors)
        trained = inputs["values" if "values" in inputs else "logprobs"].requires_grad_()
        terms, metrics = function(**inputs, sequence_lengths=torch.ones(len(trained)), **options)
        assert terms.isfinite().all()
        assert all(metric.isfinite().all() for metric in metrics.values())
        (gradient,) = torch.autograd.grad(terms.sum(), trained)
        assert gradient.isfinite().all()
        if "advantages" in inputs and not options.get("kl_coef"):
            assert not gradient[inputs["advantages"] == 0].any()


def test_every_loss_of_the_module_is_tried_at_extreme_inputs() -> None:
    public = {name for name, found in vars(losses).items() if inspect.isfunction(found) and found.__module__ == losses.__name__}
    assert {name for name in public if not name.startswith("_")} == {*EVERY_OPTION, "kl_estimate"}  # The estimators are tried below.


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


@pytest.mark.parametrize("function", ALL)
def test_advantages_are_finite_at_extreme_rewards(function: Callable[..., Tensor]) -> None:
    for rewards in itertools.product([*EXTREMES, 1e30, -1e30, 1e-30], repeat=2):
        for dtype in (torch.float32, torch.float64):
            assert function(torch.tensor([rewards], dtype=dtype)).isfinite().all()
    assert function(torch.zeros(0), []).tolist() == []
    assert function(torch.tensor([[1e300, -1e300]], dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("name", advantages.BY_NAME)
def test_an_advantage_that_no_float32_holds_is_refused_by_name(name: str) -> None:
    rewards = np.array([1e300, -1e300])
    if name.startswith("grpo"):
        assert np.isfinite(advantages.BY_NAME[name](rewards, [(0, 2)])).all()
    else:
        with pytest.raises(RewardError, match="float32"):
            advantages.BY_NAME[name](rewards, [(0, 2)])


def test_estimated_advantages_are_finite_at_extreme_rewards_and_values() -> None:
    for reward, value in itertools.product([*EXTREMES, 1e30], repeat=2):
        for length in (0, 1, 3):
            rewards, values = np.full(length, reward), np.full(length, value)
            for found in gae(rewards, values, np.array([length])):
                assert np.isfinite(found).all()
                assert len(found) == length
