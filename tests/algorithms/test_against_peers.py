"""Losses and advantages against what TRL's and verl's own functions gave for the same random inputs.

`tests/support/peer_values.py` wrote tests/expected/values-*.json with the packages installed; here neither is needed. Where a case is not
theirs as it stands, its comment says why. These have no case: verl's `grpo_passk` is of another paper than `pass_at_k`; GDPO and the
token baselines are not ours; a peer's losses on preferences are inside trainers, and have their oracle in test_algorithms.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_values import EQUAL, LENGTHS, flat, inputs
from torch import Tensor

from m2flow.algorithms import advantages, losses
from m2flow.algorithms.gae import gae
from m2flow.algorithms.losses import Direction, correction_weights, kl_estimate, top_k_divergence
from m2flow.macro.loss_declarations import LOSSES
from m2flow.recipe import Correction

EXPECTED = Path(__file__).resolve().parents[1] / "expected"
VALUES: dict[str, dict[str, Any]] = {peer: json.loads((EXPECTED / f"values-{peer}.json").read_text()) for peer in ("trl", "verl")}
GIVEN = {name: torch.from_numpy(value if name.endswith("logits") else flat(value)) for name, value in inputs().items()}
REWARDS = torch.from_numpy(inputs()["rewards"])
COUNTS = torch.tensor(LENGTHS)
IDS = torch.arange(4).repeat_interleave(COUNTS)
SHAPES = {"sequence_ids": IDS, "sequence_lengths": COUNTS.repeat_interleave(COUNTS).double(), "group_ids": IDS * 0}
"""For losses on groups all four samples are one group: peers take moments over the mini-batch."""


def terms_of(name: str, *, by_sample: bool, **options: Any) -> Callable[[Tensor], Tensor]:
    """Make a function of what is trained that gives the loss's terms [T]."""
    parameters = LOSSES[name].__kwdefaults__ or {}
    needs = LOSSES[name].__annotations__
    of_shape = {key: value for key, value in SHAPES.items() if key in needs and (key not in parameters or by_sample)}
    given = {key: value for key, value in GIVEN.items() if key in needs and key != "reference_logprobs"} | of_shape
    given |= {"reference_logprobs": GIVEN["reference_logprobs"]} if "kl" in options else {}
    given |= {"random_numbers": torch.zeros(10, dtype=torch.float64)} if "random_numbers" in needs else {}
    trained = "values" if "values" in needs else "logprobs"
    return lambda values: LOSSES[name](**{**given, trained: values}, **options)[0]


def agree(terms: Callable[[Tensor], Tensor], divisor: float, expected: dict[str, Any], trained: Tensor, *, with_value: bool = True) -> None:
    trained = trained.clone().requires_grad_()
    loss = terms(trained).sum() / divisor
    (gradient,) = torch.autograd.grad(loss, trained)
    if with_value:
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-9)


ASYMMETRIC = {"eps_low": 0.2, "eps_high": 0.28}
POLICY = [
    ("verl", "ppo_clip, tokens", "ppo_clip", False, {**ASYMMETRIC, "dual_clip": 1.5}),
    ("verl", "ppo_clip, sequences", "ppo_clip", True, ASYMMETRIC),
    ("verl", "gspo", "gspo", True, {"eps_low": 0.1, "eps_high": 0.15}),
    ("verl", "gspo", "gspo_token", True, {"eps_low": 0.1, "eps_high": 0.15}),
    ("verl", "sapo", "sapo", True, {}),
    ("verl", "cispo", "cispo", False, {}),
    ("verl", "gmpo", "gmpo", True, {"log_eps_low": 0.2, "log_eps_high": 0.2}),
    ("verl", "reinforce", "reinforce", False, {}),
    ("verl", "kl_cov", "kl_cov", False, {"share": 0.25, "kl_coef": 0.5}),
    ("trl", "ppo_clip, dapo", "ppo_clip", False, ASYMMETRIC),
    ("trl", "ppo_clip, bnpo", "ppo_clip", False, {**ASYMMETRIC, "dual_clip": 1.5}),
    ("trl", "ppo_clip, grpo", "ppo_clip", True, {**ASYMMETRIC, "kl_coef": 0.1, "kl": "k3"}),
    ("trl", "gspo", "gspo", True, ASYMMETRIC),
    ("trl", "cispo", "cispo", False, {}),  # Its `epsilon_high` is the bound itself, ours the distance from 1.
    ("trl", "sapo", "sapo", True, {}),
]


@pytest.mark.parametrize(("peer", "case", "name", "by_sample", "options"), POLICY)
def test_a_policy_loss_and_its_gradient_are_the_peers(peer: str, case: str, name: str, by_sample: bool, options: dict[str, Any]) -> None:
    agree(terms_of(name, by_sample=by_sample, **options), 4 if by_sample else 10, VALUES[peer][case], GIVEN["logprobs"])


@pytest.mark.parametrize(("peer", "case"), [("verl", "ppo_clip, constant"), ("trl", "ppo_clip, dr_grpo")])
def test_a_sum_over_sequences_by_a_constant_is_the_peers(peer: str, case: str) -> None:
    agree(terms_of("ppo_clip", by_sample=False, **ASYMMETRIC), 4 * 8, VALUES[peer][case], GIVEN["logprobs"])


@pytest.mark.parametrize(
    ("case", "name", "options"),
    [
        # verl's surrogate is log p times the ratio without gradient, ours the ratio: one gradient, two values.
        ("dppo, tv", "dppo", {"divergence": "tv", "most": 0.05}),
        ("dppo, kl", "dppo", {"divergence": "kl", "most": 0.01}),
        # verl leaves stopped tokens out of the value, too. A share of 1 stops every token within the bounds, whatever is drawn.
        ("clip_cov", "clip_cov", {**ASYMMETRIC, "share": 1.0, "cov_low": 0.1, "cov_high": 5.0}),
    ],
)
def test_a_policy_loss_has_the_gradient_of_verls_where_its_value_is_another(case: str, name: str, options: dict[str, Any]) -> None:
    agree(terms_of(name, by_sample=False, **options), 10, VALUES["verl"][case], GIVEN["logprobs"], with_value=False)


def test_the_loss_of_a_critic_is_verls() -> None:
    agree(terms_of("clipped_value", by_sample=False, clip=0.2), 10, VALUES["verl"]["clipped_value"], GIVEN["values"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_corrected_loss_is_verls(level: Any) -> None:
    # The reference stands in for the rollout, the behaviour for the proximal policy.
    weights, _ = correction_weights(GIVEN["behaviour_logprobs"], GIVEN["reference_logprobs"], IDS, Correction(level=level, upper=1.2))
    terms = terms_of("ppo_clip", by_sample=False, **ASYMMETRIC)
    agree(lambda logprobs: terms(logprobs) * weights, 10, VALUES["verl"][f"correction, {level}"], GIVEN["logprobs"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_are_verls(estimator: Any) -> None:
    agree(lambda logprobs: kl_estimate(logprobs, GIVEN["reference_logprobs"], estimator), 1, VALUES["verl"][estimator], GIVEN["logprobs"])


def over_likeliest(logits: Tensor, num: int) -> Tensor:
    """Log-probabilities of the first tokens, and of the others."""
    top = logits.log_softmax(-1)[:, :num]
    return torch.cat((top, (1 - top.exp().sum(1, keepdim=True)).log()), 1)


@pytest.mark.parametrize("direction", ["reverse", "forward", "js"])
@pytest.mark.parametrize(("case", "num"), [("tail", 3), ("whole", 5)])
def test_divergences_over_likeliest_tokens_are_those_of_trls_distillation(direction: Direction, case: str, num: int) -> None:
    teacher = over_likeliest(GIVEN["reference_top_logits"], num)
    agree(
        lambda logits: losses.distill_top_k(top_logprobs=over_likeliest(logits, num), reference_top_logprobs=teacher, direction=direction)[
            0
        ],
        1,
        VALUES["trl"][f"{direction}, {case}"],
        GIVEN["top_logits"],
    )
    assert top_k_divergence(teacher, teacher, direction).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("grpo", advantages.grpo(REWARDS, [2, 2])),
        ("dr_grpo", advantages.dr_grpo(REWARDS, [2, 2])),
        ("rloo", advantages.rloo(REWARDS, [2, 2])),
        ("opo", advantages.opo(REWARDS, [2, 2], lengths=COUNTS.double())),
        # verl counts rewards that are not 0, ours groups that differ: these rewards make both two samples.
        ("gpg", advantages.gpg(torch.tensor(EQUAL, dtype=torch.float64).flatten(), [2, 2])),
        # verl's moments are over tokens: with one token each, over samples.
        ("reinforce_pp", advantages.reinforce_pp(REWARDS, [2, 2])),
        ("reinforce_pp_baseline", advantages.reinforce_pp_baseline(REWARDS, [2, 2])),
        ("remax", advantages.remax(REWARDS, REWARDS.flip(0))),
    ],
)
def test_advantages_are_verls(name: str, found: Tensor) -> None:
    torch.testing.assert_close(found, torch.tensor(VALUES["verl"][name], dtype=torch.float64), rtol=2e-6, atol=1e-9)


def test_returns_of_generalised_advantage_estimation_are_verls() -> None:
    # verl whitens the advantages that it gives; the returns are before that.
    at_end = np.zeros(10)
    at_end[np.cumsum(LENGTHS) - 1] = inputs()["rewards"]
    _, returns = gae(at_end, flat(inputs()["values"]), np.array(LENGTHS), gamma=0.9, lam=0.8)
    np.testing.assert_allclose(returns, VALUES["verl"]["gae"], rtol=1e-9)
