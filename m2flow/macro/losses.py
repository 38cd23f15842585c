"""Losses as a flow names them: the built-in ones, and `@loss` for the user's own.

Here is only the declaration (`m2flow.recipe.Loss`); the functions on tensors are in `m2flow.algorithms.losses`, which the
engine imports. So a flow that names a loss loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from m2flow.errors import OptionError
from m2flow.recipe import Counts, Loss, check_choice, check_names, check_number

Denominator = Literal["tokens", "sequences"]
AnyDenominator = Denominator | Callable[[Counts], float]


def ppo_clip(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 0.0,
    kl_coef: float = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k3",
    denominator: Denominator = "tokens",
) -> Loss:
    """The clipped surrogate of PPO on group or any other advantages; with `kl_coef` a penalty against a reference.

    Args:
        eps_low, eps_high: how far the ratio may fall and rise before its gradient stops; from 0 to 1, and from 0.
        dual_clip: bound on the ratio where the advantage is negative; 0 is off, else above 1.
        kl_coef: weight of the penalty, in units of advantage a nat, 0 or more. kl: its estimator (`m2flow.algorithms.kl`).
        denominator: what the sum over a mini-batch is divided by; with `sequences`, each sample's terms are its mean.
    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric clipping after DAPO, arXiv:2503.14476, eq. 10; dual clip after Ye et
        al. 2020, arXiv:1912.09729, eq. 5.
    """
    check_number("eps_low", eps_low, low=0, high=1)
    check_number("eps_high", eps_high, low=0)
    check_number("kl_coef", kl_coef, low=0)
    check_number("dual_clip", dual_clip, low=0)
    if 0 < dual_clip <= 1:
        raise OptionError(f"dual_clip is {dual_clip}; it must be 0 (off) or above 1")
    check_choice("kl", kl, ("k1", "k2", "k3"))
    needs = ["logprobs", "behaviour_logprobs", "advantages"]
    options: list[tuple[str, float | int | str | bool]] = [("eps_low", eps_low), ("eps_high", eps_high)]
    options += [("dual_clip", dual_clip)] if dual_clip else []
    if kl_coef:
        needs.append("reference_logprobs")
        options += [("kl_coef", kl_coef), ("kl", kl)]
    return _built_in("ppo_clip", needs, denominator, options)


def nll(*, denominator: Denominator = "tokens") -> Loss:
    """Negative log-likelihood of the tokens under the loss mask: supervised fine-tuning."""
    return _built_in("nll", ["logprobs"], denominator, [])


def reinforce(*, denominator: Denominator = "tokens") -> Loss:
    """Advantage times negative log-likelihood. Right only for samples of the current weights.

    Source:
        Williams 1992, doi:10.1007/BF00992696.
    """
    return _built_in("reinforce", ["logprobs", "advantages"], denominator, [])


def distill(*, clip: float = 0.0, denominator: Denominator = "tokens") -> Loss:
    """On-policy distillation: the reverse KL to a teacher, on tokens that the policy itself sampled.

    Needs the column `teacher_logprobs`: `columns={"teacher_logprobs": teacher.logprobs(responses)}`, with `teacher = Reference(path)`.

    Args:
        clip: bound on the ratio of the weights to those that sampled, as `ppo_clip`'s eps; 0 is off.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649; Gu et al. 2024 (MiniLLM), arXiv:2306.08543. See `m2flow.algorithms.losses`.
    """
    check_number("clip", clip, low=0)
    return _built_in("distill", ["logprobs", "behaviour_logprobs", "teacher_logprobs"], denominator, [("clip", clip)])


def clipped_value(*, clip: float = 0.2, denominator: Denominator = "tokens") -> Loss:
    """The squared error of a critic, clipped around its old values; `clip=0` is without. What `Critic.update` minimises.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, section 5. See `m2flow.algorithms.losses`.
    """
    check_number("clip", clip, low=0)
    needs = ["values", "returns"] + (["old_values"] if clip else [])
    return _built_in("clipped_value", needs, denominator, [("clip", clip)])


def loss(*, needs: Sequence[str], denominator: AnyDenominator = "tokens") -> Callable[[Callable[..., object]], Loss]:
    """Declare a function of the user's as a loss: it gets each of `needs` as a flat tensor [T] and returns per-token terms [T].

    Args:
        needs: see `m2flow.recipe.Loss`; a name that is none of its own is a column of the samples, or one of `update(columns=...)`.
        denominator: what the sum over a mini-batch is divided by: its `tokens` under the loss mask, its `sequences`, or a function
            of its `Counts` (`lambda counts: 512 * counts.num_sequences`). They are the whole mini-batch's, however it was cut.
    Raises:
        OptionError: a denominator that is none of these.
    """
    needs = check_names("needs", needs, example=("logprobs", "advantages"))
    if not callable(denominator):
        check_choice("denominator", denominator, Denominator, "or a function of the mini-batch's Counts")

    def declare(function: Callable[..., object]) -> Loss:
        if not callable(function):
            raise OptionError(f"@loss(...) got {function!r:.60}; it goes above a function")
        return Loss(getattr(function, "__name__", "loss"), function, needs, denominator)

    return declare


def _built_in(name: str, needs: list[str], denominator: Denominator, options: list[tuple[str, float | int | str | bool]]) -> Loss:
    check_choice("denominator", denominator, Denominator)
    if denominator == "sequences":
        needs.append("sequence_lengths")
    return Loss(name, f"m2flow.algorithms.losses:{name}", tuple(needs), denominator, tuple(options))
