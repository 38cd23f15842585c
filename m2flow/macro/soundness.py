"""Refuse, when it is traced, an update whose loss can't be right for its samples.

A policy gradient without importance weights is right for samples of the very weights that it changes, and for them alone. Samples are
of other weights where a generate may be stale, where an update makes several optimiser steps, and where the weights were
updated since. A loss says by its `needs` whether it corrects for that (`behaviour_logprobs`); nothing else of it is looked at, so a
loss that names them and ignores them passes. One that weighs tokens by nothing is their likelihood, which is right for any samples:
fine-tuning on filtered samples of the policy's own, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.late import is_cut, timeout_of
from m2flow.recipe import Loss

_OF_LIKELIHOOD = {"logprobs", "sequence_lengths"}
"""What a loss needs that is nothing but the likelihood of the tokens it is given."""


def check_update(loss: Loss, origins: Sequence[Call], *, name: str, version: int, epochs: int, minibatch_size: int | None) -> None:
    """Check an update of the role `name`, which reads its weights at `version`, on samples that `origins` drew from that role.

    Raises:
        TraceError: the samples may be of other weights, and the loss does not need `behaviour_logprobs`.
    """
    if not origins or "behaviour_logprobs" in loss.needs or not set(loss.needs) - _OF_LIKELIHOOD:
        return
    found = _reuse(origins, version, epochs, minibatch_size)
    if found is not None:
        reason, instead = found
        raise TraceError(
            f"{name}.update with the loss {loss.name} can't be right: {reason}, and {loss.name} does not need 'behaviour_logprobs', so "
            "it takes them for samples of the weights that it changes",
            now=f"Take a loss that corrects for it (ppo_clip, or needs=['behaviour_logprobs', ...]), or {instead}.\n"
            "allow_unsound=True does it nevertheless; the plan then says so.",
        )


def _reuse(origins: Sequence[Call], version: int, epochs: int, minibatch_size: int | None) -> tuple[str, str] | None:
    """Why samples may be of other weights than those that an update changes, and how not."""
    stale = next((call for call in origins if call.options["staleness"]), None)
    if stale is not None:
        found = f"with staleness={stale.options['staleness']} the samples of {stale.site} may be of older weights"
        return found, "generate them with staleness=0"
    if epochs > 1:
        return f"with epochs={epochs} all passes but the first train weights that the samples are not of", "take epochs=1"
    if minibatch_size is not None and minibatch_size < sum(_most_groups(call) for call in origins):
        return "each of its mini-batches but the first trains weights that the samples are not of", "leave out minibatch_size"
    older = next((call for call in origins if call.reads[0].version < version), None)
    if older is not None:
        updates = version - older.reads[0].version
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
    """What the plan says about time in a flow: what may differ from one run to the next, and where Python takes the gain away.

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
    told = set()
    for seen in graph.observations:
        call = by_ordinal.get(seen.call)
        if seen.step < 0 or seen.lag >= staleness or call is None or call.engine == "source" or (seen.site, seen.why) in told:
            continue
        told.add((seen.site, seen.why))  # The line of a loop is told once, with its first turn.
        effect = (
            f"lets no more than {_count(seen.lag, 'step')} run ahead" if seen.lag else "makes this flow synchronous, whatever its staleness"
        )
        notes.append(
            f"waiting for {names.get(seen.call, seen.call)} at {seen.site} ({seen.why}) {effect}; "
            f"metrics.lagged({staleness}), the value of {_count(staleness, 'step')} ago, would not"
        )
    return tuple(notes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
