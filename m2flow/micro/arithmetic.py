"""The arithmetic of a run that people get wrong, each number with its formula: shown by `m2flow plan` and at the start of a run."""

from __future__ import annotations

import math

from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.plan import Line
from m2flow.micro.routing import count_samples
from m2flow.recipe import Sampling


def arithmetic(graph: MacroGraph, *, num_steps: int, token_budget: int) -> tuple[Line, ...]:
    """Lines about the step of the flow and about the whole run.

    Args:
        graph: the first step, with what comes before it.
        num_steps: steps of the outermost iterator; 0 for a flow without one.
    """
    lines = [
        Line("steps", str(max(num_steps, 1)), "of the flow's outermost iterator" if num_steps else "this flow has no iterator of m2flow")
    ]
    num_samples, num_tokens, num_optimizer_steps = 0, 0, 0
    for call in graph.calls:
        repeats = max(num_steps, 1) if call.step >= 0 else 1
        if call.method == "generate":
            samples, longest = _generation(graph, call, lines)
            num_samples += samples * repeats
            num_tokens += samples * longest * repeats
        elif call.method == "update":
            num_optimizer_steps += _update(graph, call, token_budget, lines) * repeats
    lines.append(Line("samples in the run", f"at most {num_samples:,}", "each generate call of the traced step, every step"))
    lines.append(Line("tokens in the run", f"at most {num_tokens:,}", "samples x max_new_tokens; most responses end sooner"))
    lines.append(Line("optimiser steps in the run", f"{num_optimizer_steps:,}", "epochs x mini-batches, summed over the updates"))
    return tuple(lines)


def _generation(graph: MacroGraph, call: Call, lines: list[Line]) -> tuple[int, int]:
    sampling, n = call.options["sampling"], call.options["n"]
    assert isinstance(sampling, Sampling)
    assert isinstance(n, int)
    samples = count_samples(graph, call)
    lines.append(
        Line(f"samples of {call.site}", f"{samples:,}", f"{samples // n} prompts x n={n}, each up to {sampling.max_new_tokens} new tokens")
    )
    return samples, sampling.max_new_tokens


def _update(graph: MacroGraph, call: Call, token_budget: int, lines: list[Line]) -> int:
    """Adds the lines of one update; returns its optimiser steps."""
    ref = call.input("samples")
    source = next((c for c in graph.calls if ref is not None and c.ordinal == ref.call), None)
    n = source.options.get("n", 1) if source else 1
    size, epochs = call.options["minibatch_size"], call.options["epochs"]
    assert isinstance(n, int)
    assert isinstance(epochs, int)
    prompts = count_samples(graph, call) // n
    if not isinstance(size, int):
        size = max(prompts, 1)
    minibatches = math.ceil(prompts / size)
    last = prompts - (minibatches - 1) * size
    smaller = f"; the last one has {last}, divided by its own count" if minibatches and last != size else "; none is dropped"
    lines.append(
        Line(
            f"optimiser steps of {call.site}",
            f"{epochs * minibatches:,}",
            f"{epochs} epochs x ceil({prompts:,} prompts / {size:,}) mini-batches{smaller}",
        )
    )
    context = "prompt and response tokens of a mini-batch"
    lines.append(
        Line(
            f"gradient accumulation of {call.site}",
            f"about 1 / {token_budget:,} tokens",
            f"ceil({context} / token budget) micro-batches a step, on 1 rank",
        )
    )
    return epochs * minibatches
