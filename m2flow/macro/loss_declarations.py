"""Declare losses in a flow, and refuse updates whose loss can't be right for their samples.

Only the declaration is here (`m2flow.recipe.Loss`); the functions on tensors are in `m2flow.algorithms.losses` and, on preferences, in
`m2flow.algorithms.preferences`. Both load no torch, so a flow that names a loss loads none either. Each function is a word here: those
below have a declaration of their own, and that of any other is made of its function's signature when it is asked for.

A policy gradient without importance weights is right only for samples of the very weights that it changes. Samples are of other weights
where a generate may be stale, where an update makes several optimiser steps, and where the weights were updated since. A loss says by
its `needs` whether it corrects for that (`behaviour_logprobs`); nothing else is looked at, so a loss that names them and ignores them
passes. A loss that weights tokens by nothing is their likelihood, which is right for any samples: fine-tuning on filtered samples of the
policy's own, say. So is one that compares answers by whether they were `chosen`, whoever gave them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from m2flow.algorithms import losses, preferences
from m2flow.algorithms.losses import Direction, Divergence, Proximal, Terms
from m2flow.errors import OptionError, TraceError, did_you_mean
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.handles import describe
from m2flow.macro.oversampling import is_cut, timeout_of
from m2flow.recipe import (
    PROXIMAL,
    REFERENCE_TOP_LOGPROBS,
    TOP_LOGPROBS,
    VERSION_AGES,
    Advantage,
    Counts,
    Denominator,
    Episodes,
    KlPenalty,
    Loss,
    check_choice,
    check_flag,
    check_names,
    check_number,
)

AnyDenominator = Denominator | Callable[[Counts], float]

LOSSES: Mapping[str, Callable[..., Terms]] = MappingProxyType(
    {
        name: one
        for module in (losses, preferences)
        for name, one in vars(module).items()
        if name[0] != "_" and getattr(one, "__annotations__", {}).get("return") == "Terms" and one.__module__ == module.__name__
    }
)
"""Every loss of m2flow by its name: the functions on tensors."""


def ppo_clip(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 0.0,
    kl_coef: float = 0.0,
    kl: KlPenalty = "k3",
    entropy_coef: float = 0.0,
    denominator: AnyDenominator = "tokens",
) -> Loss:
    """The clipped surrogate of PPO on group or any other advantages; with `kl_coef` a penalty against a reference.

    Args:
        eps_low, eps_high: how far the ratio may fall and rise before its gradient stops; from 0 to 1, and from 0.
        dual_clip: bound on the ratio where the advantage is negative; 0 is off, else above 1.
        kl_coef: weight of the penalty, in units of advantage a nat, 0 or more. kl: its estimator (`m2flow.algorithms.losses`);
            `top_k` compares whole distributions, and needs `reference=reference.logprobs(responses, top_k=16)`.
        entropy_coef: weight of a bonus for the entropy of the next token, in units of advantage a nat, 0 or more.
        denominator: how terms of tokens become one number (`m2flow.recipe.Denominator`).
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
    check_choice("kl", kl, KlPenalty)
    check_number("entropy_coef", entropy_coef, low=0)
    needs = ["logprobs", "behaviour_logprobs", "advantages"]
    options: list[tuple[str, float | int | str | bool]] = [("eps_low", eps_low), ("eps_high", eps_high)]
    options += [("dual_clip", dual_clip)] if dual_clip else []
    if kl_coef:
        needs += [TOP_LOGPROBS, REFERENCE_TOP_LOGPROBS] if kl == "top_k" else ["reference_logprobs"]
        options += [("kl_coef", kl_coef), ("kl", kl)]
    if entropy_coef:
        needs.append("entropy")
        options += [("entropy_coef", entropy_coef)]
    return _built_in("ppo_clip", needs, denominator, options)


def nll(*, denominator: AnyDenominator = "tokens") -> Loss:
    """Negative log-likelihood of the tokens under the loss mask: supervised fine-tuning."""
    return _built_in("nll", ["logprobs"], denominator, [])


def reinforce(*, denominator: AnyDenominator = "tokens") -> Loss:
    """Advantage times negative log-likelihood. Right only for samples of the current weights.

    Source:
        Williams 1992, doi:10.1007/BF00992696.
    """
    return _built_in("reinforce", ["logprobs", "advantages"], denominator, [])


def distill(*, direction: Direction = "reverse", clip: float = 0.0, denominator: AnyDenominator = "tokens") -> Loss:
    """On-policy distillation: the divergence from a teacher, on tokens that the policy itself sampled.

    `distill_top_k` compares the distributions that these tokens come from.

    Needs the column `teacher_logprobs`: `columns={"teacher_logprobs": teacher.logprobs(responses)}`, with `teacher = Reference(path)`.

    Args:
        direction: `reverse` is KL(policy || teacher), `forward` the other one, `js` Jensen-Shannon.
        clip: bound on the ratio of the weights to those that sampled, as `ppo_clip`'s eps; 0 is off.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649; Gu et al. 2024 (MiniLLM), arXiv:2306.08543. See `m2flow.algorithms.losses`.
    """
    check_choice("direction", direction, Direction)
    check_number("clip", clip, low=0)
    options: list[tuple[str, float | int | str | bool]] = [("clip", clip)]
    options += [("direction", direction)] if direction != "reverse" else []
    return _built_in("distill", ["logprobs", "behaviour_logprobs", "teacher_logprobs"], denominator, options)


def decoupled_ppo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    max_weight: float = 5.0,
    proximal: Proximal = "computed",
    denominator: AnyDenominator = "tokens",
) -> Loss:
    """PPO that clips around a proximal policy instead of the one that sampled, for samples of older weights.

    Args:
        eps_low, eps_high: as of `ppo_clip`.
        max_weight: bound on how much likelier than the sampling policy the proximal one counts; above 0.
        proximal: `computed` needs the column `proximal_logprobs`: `columns={"proximal_logprobs": policy.logprobs(responses)}`, a pass of
            the trainer. `interpolated` makes it of what is there, by how many versions old a token is.
        denominator: as of `ppo_clip`.
    Source:
        Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025 (AReaL), arXiv:2505.24298. See `m2flow.algorithms.losses`.
    """
    check_number("eps_low", eps_low, low=0, high=1)
    check_number("eps_high", eps_high, low=0)
    check_number("max_weight", max_weight, above=0)
    check_choice("proximal", proximal, Proximal)
    needs = ["logprobs", "behaviour_logprobs", VERSION_AGES if proximal == "interpolated" else PROXIMAL, "advantages"]
    options: list[tuple[str, float | int | str | bool]] = [("eps_low", eps_low), ("eps_high", eps_high), ("max_weight", max_weight)]
    options += [("proximal", proximal)] if proximal != "computed" else []
    return _built_in("decoupled_ppo", needs, denominator, options)


def clipped_value(*, clip: float = 0.2, denominator: AnyDenominator = "tokens") -> Loss:
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
        denominator: what the sum over a mini-batch is divided by: its `tokens` under the loss mask, its `sequences`, its `groups` (each
            term is divided by the tokens of its group first), or a function of its `Counts`, such as `PerSequence(512)`. They are the whole
            mini-batch's, however it was cut.
    Raises:
        OptionError: a denominator that is none of these, or a function whose parameters are not its needs.
    """
    needs = check_names("needs", needs, example=("logprobs", "advantages"))
    if not callable(denominator):
        check_choice("denominator", denominator, Denominator, "or a function of the mini-batch's Counts")

    def declare(function: Callable[..., object]) -> Loss:
        if not callable(function):
            raise OptionError(f"@loss(...) got {function!r:.60}; it goes above a function")
        name = getattr(function, "__name__", "loss")
        try:
            inspect.signature(function).bind(**dict.fromkeys(needs))
        except ValueError:
            pass  # A builtin that does not tell its parameters.
        except TypeError as error:
            now = f"Name its parameters as in needs: def {name}({', '.join(needs)})."
            raise OptionError(f"the loss {name} can't be called with what it needs: {error}", now=now) from None
        return Loss(name, function, needs, denominator)

    return declare


if TYPE_CHECKING:  # Type checkers take any name for there where a module has a `__getattr__`, and pyright knows no type of it.
    bradley_terry: Callable[..., Loss]
    cispo: Callable[..., Loss]
    clip_cov: Callable[..., Loss]
    distill_top_k: Callable[..., Loss]
    dpo: Callable[..., Loss]
    dppo: Callable[..., Loss]
    gmpo: Callable[..., Loss]
    gspo: Callable[..., Loss]
    gspo_token: Callable[..., Loss]
    importance_reinforce: Callable[..., Loss]
    ipo: Callable[..., Loss]
    kl_cov: Callable[..., Loss]
    kto: Callable[..., Loss]
    opmd: Callable[..., Loss]
    process_reward: Callable[..., Loss]
    sapo: Callable[..., Loss]
    simpo: Callable[..., Loss]
    topr: Callable[..., Loss]
else:

    def __getattr__(name: str) -> Callable[..., Loss]:
        """The declaration of a loss that has none of its own here, made of its function's signature."""
        if name not in LOSSES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = declaration(name)
        globals()[name] = found
        return found


_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "Share": {"low": 0, "high": 1},
    "Half": {"low": 0, "high": 0.5},
    "NotNegative": {"low": 0},
    "Positive": {"above": 0},
}
_CHOICES: Mapping[str, object] = {"Divergence": Divergence, "Direction": Direction}
"""Annotation of an option of a loss -> what it may be."""


def declaration(name: str) -> Callable[..., Loss]:
    """Make the word of a flow for one of `LOSSES`: it takes the function's options and `denominator`, and checks them."""
    function = LOSSES[name]
    parameters = inspect.signature(function).parameters
    options = {key: one for key, one in parameters.items() if "Tensor" not in one.annotation}
    needs = [key for key, one in parameters.items() if one.annotation == "Tensor"]
    usual: AnyDenominator = "groups" if "group_ids" in needs else "sequences" if "sequence_lengths" in needs else "tokens"
    aggregation = inspect.Parameter("denominator", inspect.Parameter.KEYWORD_ONLY, default=usual, annotation="AnyDenominator")

    @functools.wraps(function)
    def declare(*, denominator: AnyDenominator = usual, **given: float | int | str | bool) -> Loss:
        for key, value in given.items():
            if key not in options:
                raise OptionError(f"{name} has no option {key!r}", now=did_you_mean(key, [*options, "denominator"], ""))
            _check_option(key, value, options[key].annotation)
        every = {key: one.default for key, one in options.items()} | given
        return _built_in(name, [*needs], denominator, [(key, every[key]) for key in options])

    declare.__signature__ = inspect.Signature([*options.values(), aggregation], return_annotation="Loss")  # type: ignore[attr-defined]
    return declare


def _check_option(name: str, value: object, annotation: str) -> None:
    if annotation in _CHOICES:
        check_choice(name, value, _CHOICES[annotation])
    elif annotation == "bool":
        check_flag(name, value)
    else:
        check_number(name, value, **_BOUNDS[annotation])


def _built_in(name: str, needs: list[str], denominator: AnyDenominator, options: list[tuple[str, float | int | str | bool]]) -> Loss:
    if not callable(denominator):
        check_choice("denominator", denominator, Denominator, "or a function of the mini-batch's Counts")
    if "group_ids" in needs and denominator != "groups":
        raise OptionError(f"{name} is a mean over groups; denominator={denominator!r:.60} is none", now="Leave it out.")
    if denominator == "sequences" and "sequence_lengths" not in needs:
        needs.append("sequence_lengths")
    elif denominator != "sequences" and "sequence_lengths" in needs:
        raise OptionError(f"{name} is a mean over sequences; denominator={denominator!r:.60} is none", now="Leave it out.")
    return Loss(name, f"{LOSSES[name].__module__}:{name}", tuple(needs), denominator, tuple(options))


_OF_LIKELIHOOD = {"logprobs", TOP_LOGPROBS, REFERENCE_TOP_LOGPROBS, "sequence_lengths", "sequence_ids"}
"""What a loss needs that is nothing but the likelihood of the tokens it is given, or of what might have come in their place."""


def check_update(loss: Loss, origins: Sequence[Call], *, name: str, version: int, epochs: int, minibatch_size: int | None) -> None:
    """Check an update of the role `name`, which reads its weights at `version`, on samples that `origins` drew from that role.

    Raises:
        TraceError: the samples may be of other weights, and the loss does not need `behaviour_logprobs`.
    """
    if not origins or {"behaviour_logprobs", "chosen"} & set(loss.needs) or not set(loss.needs) - _OF_LIKELIHOOD:
        return
    found = _reuse(origins, name, version, epochs, minibatch_size)
    if found is not None:
        reason, instead = found
        raise TraceError(
            f"{name}.update with the loss {loss.name} can't be right: {reason}, and {loss.name} does not need 'behaviour_logprobs', so "
            "it takes them for samples of the weights that it changes",
            now=f"Take a loss that corrects for it (ppo_clip, or needs=['behaviour_logprobs', ...]), or {instead}.\n"
            "allow_unsound=True does it nevertheless; the plan then says so.",
        )


def missing_need(loss: Loss, need: str, name: str, fields: frozenset[str], *, is_taken: bool) -> TraceError:
    """Describe a need that the role `name`, its update and the samples with these fields lack.

    Args:
        is_taken: `columns=` of an update may not have that name.
    """
    column, instead = (f"own_{need}", f" The loss must call it so, too: {need!r} is taken.") if is_taken else (need, "")
    now = f"Pass it: update(..., columns={{{column!r}: ...}}), one number a sample or one a token.{instead}"
    return TraceError(
        f"the loss {loss.name} needs {need!r}, which neither the samples nor this {name}.update have; the samples have "
        f"{', '.join(sorted(fields))}",
        now="A loss gets the reference's log-probabilities, as 'reference_logprobs'." if need == "reference" else now,
    )


def _reuse(origins: Sequence[Call], name: str, version: int, epochs: int, minibatch_size: int | None) -> tuple[str, str] | None:
    """Explain why samples may be of other weights than those that an update changes, and how to avoid it."""
    stale = next((call for call in origins if call.options["staleness"]), None)
    if stale is not None:
        found = f"with staleness={stale.options['staleness']} the samples of {stale.site} may be of older weights"
        return found, "generate them with staleness=0"
    if epochs > 1:
        return f"with epochs={epochs} all passes but the first train weights that the samples are not of", "take epochs=1"
    if minibatch_size is not None and minibatch_size < sum(_most_groups(call) for call in origins):
        return "each of its mini-batches but the first trains weights that the samples are not of", "leave out minibatch_size"
    read = [(call, call.weights_of(name)) for call in origins]
    older, had = next(((call, of.version) for call, of in read if of is not None and of.version < version), (None, version))
    if older is not None:
        updates = version - had
        many = "once" if updates == 1 else f"{updates} times"
        return f"the weights were updated {many} since the samples of {older.site} were generated", "generate new ones before it"
    return None


def _most_groups(call: Call) -> int:
    n = call.options["n"]
    assert isinstance(n, int)
    return call.most_rows // n


_LATER = {
    "drop": "drops those that are late",
    "carry": "carries those that are late into its next turn",
    "defer": "defers the prompts of those that are late to a long round",
}


def asynchrony(graph: MacroGraph, names: Mapping[int, str]) -> tuple[str, ...]:
    """List a plan's notes on asynchrony: what may differ from one run to the next, and where waiting Python prevents overlap.

    An observation in the loop keeps the later steps' calls from being known; one of `lag` steps ago, at least as many as the staleness,
    keeps nothing from running.
    """
    cuts = [
        f"{call.name} at {call.site} gives the groups that are whole "
        + (f"in {timeout_of(call.options):g} s, and " if timeout_of(call.options) else "first, and ")
        + _LATER[str(call.options["late"])]
        + "; the run records which"
        for call in graph.calls
        if is_cut(call.options)
    ]
    cuts = list(dict.fromkeys(cuts))
    staleness = graph.staleness
    if not staleness:
        return tuple(cuts)
    notes = [
        *cuts,
        f"staleness={staleness}: responses may come from weights that are up to {_count(staleness, 'update')} older than the loop would "
        "have one call at a time; the run records which, and `m2flow run --eager --decisions RUN_DIR` repeats it",
    ]
    by_ordinal = {call.ordinal: call for call in graph.calls}
    reported = set()
    for seen in graph.observations:
        call = by_ordinal.get(seen.call)
        if seen.step < 0 or seen.lag >= staleness or call is None or call.engine == "source" or (seen.site, seen.why) in reported:
            continue
        reported.add((seen.site, seen.why))  # A line of a loop is reported once, with its first iteration.
        effect = (
            f"lets no more than {_count(seen.lag, 'step')} run ahead" if seen.lag else "makes this flow synchronous, whatever its staleness"
        )
        notes.append(
            f"waiting for {names.get(seen.call, seen.call)} at {seen.site} ({seen.why}) {effect}; "
            f"metrics.lagged({staleness}), the value of {_count(staleness, 'step')} ago, would not"
        )
    return tuple(notes)


def notes_on_updates(graph: MacroGraph) -> tuple[str, ...]:
    """List a plan's notes on updates: what they are given and their loss does not use, and optimisers that begin anew at each step."""
    updates = [call for call in graph.calls if isinstance(call.options.get("loss"), Loss)]
    notes = [f"{call.name} at {call.site} {said}" for call in updates for said in _unused_inputs(call)]
    by_line: dict[tuple[str, str], list[Call]] = {}
    for call in updates:
        by_line.setdefault((call.name, str(call.site)), []).append(call)
    for (name, site), calls in by_line.items():
        states = {call.step: call.options["optimizer"].state_key for call in calls}  # type: ignore[attr-defined]
        if len(states) > 2 and len(set(states.values())) == len(states):
            notes.append(
                f"{name} at {site} has another optimiser at each step, each with moments of its own, which begin at 0 and are all kept: "
                "write its rate as a schedule (schedule=, steps_of='flow'), or give one that differs in lr alone, without warmup_steps"
            )
    return tuple(dict.fromkeys(notes))


def _unused_inputs(call: Call) -> Iterator[str]:
    """What is given to an update and changes nothing."""
    found = call.options["loss"]
    assert isinstance(found, Loss)
    needs = {*found.needs, *(found.correction.needs if found.correction is not None else ())}
    given = {name for name, _ in call.inputs}
    its = f"and its loss {found.name}"
    if "rewards" in given and not needs & {"advantages", "reward"}:
        yield f"is given rewards, {its} uses no advantages: they are a metric, and change no weight"
    elif "advantages" in given and "advantages" not in needs:
        yield f"is given advantages, {its} uses none"
    if "reference" in given and not needs & {"reference_logprobs", REFERENCE_TOP_LOGPROBS}:
        yield f"is given a reference, {its} uses none (kl_coef is 0?): its log-probabilities are computed for nothing"
    columns = call.options["columns"]
    assert isinstance(columns, Mapping)
    for name in columns:
        if name not in needs and name not in ("rewards", "advantages", "reference", PROXIMAL):
            yield f"is given {name!r}, {its} does not need it"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def check_comparison(advantages: object, responses: object) -> None:
    """Check that these advantages can be computed of what a generate or a rollout has made.

    Raises:
        TraceError: of too few responses to a prompt, or of episodes that are made in another way.
    """
    maker: Call = responses.maker  # type: ignore[attr-defined]
    chosen = advantages if isinstance(advantages, Advantage) else Advantage(str(advantages))
    n, bounds = maker.options["n"], maker.options.get("episodes")
    assert isinstance(n, int)
    if n < chosen.least_responses:
        what = f"advantages={str(advantages)!r} compares the responses to one prompt, and {describe(responses)} have"
        raise TraceError(f"{what} {'one' if n == 1 else n} for each", now=f"Generate with n={chosen.least_responses} or more.")
    if chosen.by_conversation and not isinstance(bounds, Episodes):
        raise TraceError(f"advantages={chosen} compares conversations, and {describe(responses)} have none", now="Take policy.rollout().")
    if chosen.name == "gigpo" and isinstance(bounds, Episodes) and bounds.has_sequences:
        said = "advantages=gigpo() compares turns that follow each other, and these episodes may have several conversations"
        raise TraceError(said, now="Take by_conversation(), or a rollout of one conversation with history='append'.")
