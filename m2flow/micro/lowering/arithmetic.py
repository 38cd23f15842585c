"""Sizes of a run, each number with its formula: samples, tokens, optimiser steps, gradient accumulation, learning rate.

`m2flow plan` shows these lines, and `m2flow run` shows them at its start, because they are what is easily got wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from m2flow.macro.graph import Call, MacroGraph, Ref
from m2flow.micro.protocol.call_semantics import num_tokens_of
from m2flow.micro.protocol.plan import Line
from m2flow.recipe import PROXIMAL, Optimizer, Sampling, longest_response
from m2flow.samples import Batch

TRACED_STEPS = 100
"""Steps that are traced before a run for these sizes; the plan itself needs only the first."""


def arithmetic(graph: MacroGraph, *, num_steps: int, token_budget: int, num_ranks: int = 1) -> tuple[Line, ...]:
    """The lines about one step of the flow and about the whole run.

    Args:
        graph: as many steps as were traced, with what comes before and after them.
        num_steps: steps of the outermost iterator; 0 for a flow without one.
        token_budget: tokens that a micro-batch is filled up to.
        num_ranks: of the trainer, which divide a micro-batch among them.
    """
    iterator = "of the flow's outermost iterator" if num_steps else "this flow has no iterator of m2flow"
    if graph.is_cut and not num_steps:
        iterator = f"as far as the flow comes before it needs a value, at {graph.observations[-1].site}"
    lines = {"steps": Line("steps", str(max(num_steps, 1)), iterator)}
    totals = {"outside": [0, 0, 0], "inside": [0, 0, 0]}
    rates = _Rates()
    traced = sorted({call.step for call in graph.calls if call.step >= 0})
    whole = [step for step in traced if not (graph.is_cut and step == graph.observations[-1].step)]
    counted = whole or traced
    calls = {call.ordinal: call for call in graph.calls}
    for call in graph.calls:
        if call.step >= 0 and call.step not in counted:
            continue
        total = totals["inside" if call.step >= 0 else "outside"]
        if call.engine == "rollout":
            samples, tokens, line = _generation(call)
            total[0] += samples
            total[1] += tokens
            lines.setdefault(line.name, line)
        elif call.method == "update":
            num_optimizer_steps, *more = _update(calls, call, token_budget, num_ranks)
            total[2] += num_optimizer_steps
            rates.add(call, num_optimizer_steps)
            more += [_pass_before(calls, call)] if call.input(PROXIMAL) is not None else []
            lines |= {line.name: line for line in more if line.name not in lines}
    if graph.is_cut and not whole:
        return (*lines.values(), *rates.lines(num_steps, 1), *_at_least(graph, totals))
    is_most = any("refill" in call.options for call in graph.calls if call.engine == "rollout")
    num_counted = len(counted)
    scale = num_steps / num_counted if num_counted else 0
    samples, tokens, updates = (round(a + b * scale) for a, b in zip(totals["outside"], totals["inside"], strict=True))
    which = f"all {num_counted} steps" if num_counted else "the flow"
    about = ""
    if scale > 1:
        which, about = f"the first {num_counted} of {num_steps} steps, scaled up", "about "
    at_most = "at most " if is_most else about
    return (
        *lines.values(),
        *rates.lines(num_steps, scale),
        Line("samples in the run", f"{at_most}{samples:,}", f"generate calls of {which}, evaluations included"),
        Line("tokens in the run", f"at most {tokens:,}", "samples x max_new_tokens; most responses end sooner"),
        Line("optimiser steps in the run", f"{about}{updates:,}", f"epochs x mini-batches, summed over the updates of {which}"),
    )


def _at_least(graph: MacroGraph, totals: Mapping[str, Sequence[int]]) -> tuple[Line, ...]:
    """The lines about the whole run where the trace ended before a whole step: what is known of it."""
    samples, _, updates = (a + b for a, b in zip(*totals.values(), strict=True))
    refills = [call for call in graph.calls if call.engine == "rollout" and "refill" in call.options]
    samples -= sum(call.most_candidates - call.options["refill"] * call.options["n"] for call in refills)  # type: ignore[operator]
    which = f"before the flow needs a value, at {graph.observations[-1].site}; `m2flow plan` follows it further"
    return (
        Line("samples in the run", f"at least {samples:,}", f"generate calls {which}"),
        Line("optimiser steps in the run", f"at least {updates:,}", "epochs x mini-batches, summed over the updates before it"),
    )


class _Rates:
    """Collect the learning-rate schedules of a run: one line for each (role, recipe) whose rate is not constant."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, Optimizer], tuple[Call, list[int]]] = {}
        """(role, recipe) -> its first call, and the optimiser steps [outside, inside] of the loop."""

    def add(self, call: Call, num_optimizer_steps: int) -> None:
        recipe = call.options["optimizer"]
        assert isinstance(recipe, Optimizer)
        if recipe.schedule != "constant" or recipe.warmup_steps:
            _, counts = self._of.setdefault((call.role, recipe), (call, [0, 0]))
            counts[call.step >= 0] += num_optimizer_steps

    def lines(self, num_steps: int, scale: float) -> list[Line]:
        """One line for each schedule, with the learning rates at five moments of the run.

        Args:
            num_steps: of the flow. scale: those over the steps that were traced.
        """
        return [
            self._line(recipe, call, num_steps if recipe.counts_flow_steps else round(a + b * scale))
            for (_, recipe), (call, (a, b)) in self._of.items()
        ]

    def _line(self, recipe: Optimizer, call: Call, num_steps: int) -> Line:
        unit = "steps of the flow" if recipe.counts_flow_steps else "optimiser steps"
        shape = [f"{recipe.warmup_steps:,} {unit} of warm-up"] if recipe.warmup_steps else []
        shape += [f"{recipe.schedule} to 0 at {recipe.total_steps:,} {unit}"] if recipe.schedule != "constant" else ["constant"]
        words = [", then ".join(shape)]
        if recipe.schedule != "constant":
            course = " -> ".join(f"{recipe.rate(quarter * max(num_steps - 1, 0) // 4):.3g}" for quarter in range(5))
            words.append(f"{course} at 0, 1/4, 1/2, 3/4 and the end of {num_steps:,}")
        if recipe.schedule != "constant" and num_steps > recipe.total_steps:
            now = "" if recipe.counts_flow_steps else ": total_steps counts the optimiser's steps, with steps_of='flow' the flow's"
            words.append(f"the last {num_steps - recipe.total_steps:,} of them train nothing{now}")
        return Line(f"learning rate of {call.site}", f"at most {recipe.lr:g}", "; ".join(words))


def _generation(call: Call) -> tuple[int, int, Line]:
    """Samples of one generate call, its new tokens at most, and the line that shows them."""
    sampling, n = call.options["sampling"], call.options["n"]
    assert isinstance(sampling, Sampling)
    assert isinstance(n, int)
    samples = call.most_candidates
    formula = f"{samples // n:,} prompts x n={n}, each up to {longest_response(call.options)} new tokens"
    count = call.options.get("refill")
    if count is None:
        return samples, samples * longest_response(call.options), Line(f"samples of {call.site}", f"{samples:,}", formula)
    formula = f"{formula}; it draws until {count:,} groups are kept"
    return samples, samples * longest_response(call.options), Line(f"samples of {call.site}", f"at most {samples:,}", formula)


def _update(calls: Mapping[int, Call], call: Call, token_budget: int, num_ranks: int) -> tuple[int, Line, Line]:
    """Optimiser steps of one update call, and the lines that derive these and its gradient accumulation."""
    size, epochs = call.options["minibatch_size"], call.options["epochs"]
    assert isinstance(epochs, int)
    makers, is_filtered = _makers(calls, call.input("samples"))
    prompts = sum(_groups(maker) for maker in makers.values())  # Fewer than were generated if the generation was over-sampled.
    n = math.ceil(sum(maker.most_rows for maker in makers.values()) / max(prompts, 1))
    if not isinstance(size, int):
        size = max(prompts, 1)
    minibatches = math.ceil(prompts / size)
    last = prompts - (minibatches - 1) * size
    smaller = f"; the last has {last}, divided by its own count" if minibatches and last != size else "; none is dropped"
    smaller = "; fewer where all rows of prompts are filtered out" if is_filtered else smaller
    longest = _longest(calls, call.input("samples")) * n * min(size, prompts)
    num_steps = epochs * minibatches
    where = "on 1 rank" if num_ranks == 1 else f"each over {num_ranks} ranks"
    return (
        num_steps,
        Line(f"optimiser steps of {call.site}", f"{num_steps:,}", f"{epochs} epochs x ceil({prompts:,} prompts / {size:,}){smaller}"),
        Line(
            f"gradient accumulation of {call.site}",
            f"about {max(1, math.ceil(longest / token_budget))}",
            f"ceil({longest:,} bytes of text and new tokens of a mini-batch / {token_budget:,}) micro-batches a step, {where}",
        ),
    )


def _pass_before(calls: Mapping[int, Call], call: Call) -> Line:
    """The line of the trainer's log-probabilities before an update, for a correction, a proximal policy or its own routing.

    A pass without gradient takes 2 operations for each weight and token, training 6 (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    epochs = call.options["epochs"]
    assert isinstance(epochs, int)
    tokens = _longest(calls, call.input("samples")) * call.most_rows
    share = f"1/{3 * epochs} of the operations of training"
    return Line(f"pass before {call.site}", f"at most {tokens:,} tokens", f"log-probabilities of its samples without gradient, {share}")


def _carriers(calls: Mapping[int, Call], call: Call) -> list[Ref]:
    """The inputs whose rows a function gives on: all of a concatenation, else the first."""
    refs = [ref for _, ref in call.inputs if ref.call in calls]
    return refs if call.options.get("gives") == "concat" else refs[:1]


def _makers(calls: Mapping[int, Call], ref: Ref | None) -> tuple[dict[int, Call], bool]:
    """The calls that made the rows of a result, by ordinal, and whether rows may have been filtered out since."""
    call = calls.get(ref.call) if ref is not None else None
    if call is None:
        return {}, False
    if call.engine in ("source", "rollout") or not call.inputs:
        return {call.ordinal: call}, False
    found = [_makers(calls, carrier) for carrier in _carriers(calls, call)]
    drops = call.drops and not call.is_gated  # A refill makes up for what it drops.
    return {ordinal: maker for makers, _ in found for ordinal, maker in makers.items()}, drops or any(filtered for _, filtered in found)


def _groups(maker: Call) -> int:
    n = maker.options.get("n", 1)
    assert isinstance(n, int)
    return maker.most_rows // n


def _longest(calls: Mapping[int, Call], ref: Ref | None) -> int:
    """Bytes of the longest prompt and tokens of the longest response. What a chat template adds is not in it."""
    call = calls.get(ref.call) if ref is not None else None
    if call is None:
        return 0
    rows = call.options.get("rows")
    if isinstance(rows, Batch):
        return max(num_tokens_of(rows), default=0)
    own = longest_response(call.options) if call.engine == "rollout" else 0
    return own + max((_longest(calls, carrier) for carrier in _carriers(calls, call)), default=0)
