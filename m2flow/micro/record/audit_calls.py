"""What must hold of the calls and updates that a run wrote down; each check yields what breaks it (`m2flow.micro.record.audit`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from m2flow.micro.record.facts import Facts, named
from m2flow.samples import SampleId

_STATES = ("pending", "done", "failed")


def calls_are_those_of_the_program(facts: Facts) -> Iterator[str]:
    for kind, known in (("the program's record", facts.record), ("the calls", facts.calls)):
        missing = sorted(set(range(max(known, default=-1))) - set(known))
        if missing:
            yield f"{kind} lack {missing[:5]}, before {max(known)}"
    for ordinal in facts.record.keys() & facts.calls.keys():
        written, call = facts.record[ordinal], facts.calls[ordinal]
        if (written.step, written.name, written.site) != (call.step, call.name, call.site):
            yield f"call {ordinal} is {call.name} in step {call.step}, and in the program {written.name} in step {written.step}"
    if facts.is_over and facts.record.keys() != facts.calls.keys():
        yield f"the run is over, with {len(facts.record)} calls in the program and {len(facts.calls)} performed"


def calls_end_after_what_they_need(facts: Facts) -> Iterator[str]:
    for ordinal, call in facts.calls.items():
        if call.state not in _STATES or (call.state == "failed") != (call.error is not None):
            yield f"call {ordinal}, {call.name}, is {call.state}, with {'an' if call.error else 'no'} error"
        if facts.is_over and call.state == "pending":  # The flow has caught the error of one that failed.
            yield f"the run is over, and call {ordinal}, {call.name}, is {call.state}"
        for name, needed in facts.inputs(ordinal).items() if call.state == "done" else ():
            if needed not in facts.calls or facts.calls[needed].state != "done":
                yield f"call {ordinal}, {call.name}, is done, and its {name} (call {needed}) is not"


def versions_come_one_after_the_other(facts: Facts) -> Iterator[str]:
    newest: dict[str, tuple[int, int, bool]] = {}
    for ordinal in sorted(facts.record):
        is_done = ordinal in facts.calls and facts.calls[ordinal].state == "done"
        for resource, version in facts.writes(ordinal):
            before, by, was_done = newest.get(resource, (version - 1, -1, True))
            if version != before + 1:
                yield f"call {ordinal} writes {resource}@{version} after {before}"
            if is_done and not was_done:
                yield f"call {ordinal} wrote {resource}@{version}, and call {by}, which writes {before}, is not done"
            newest[resource] = (version, ordinal, is_done)


def each_sample_is_trained_on_once_an_epoch(facts: Facts) -> Iterator[str]:
    for call, epochs in facts.consumption.items():
        if call in facts.record and not facts.is_update(call):
            yield f"call {call}, {facts.record[call].name}, is no update, and trained on samples"
            continue
        sets = {epoch: set(ids) for epoch, ids in epochs.items()}
        if any(len(sets[epoch]) != len(ids) for epoch, ids in epochs.items()):
            yield f"call {call} trained on a sample twice in an epoch"
        for first, second in itertools.pairwise(sorted(sets)):
            if not sets[first] >= sets[second]:
                yield f"call {call} trained in epoch {second} on samples that it had not trained on in epoch {first}"
        for packed in sets[min(sets)]:
            maker = SampleId.unpack(packed).call
            if maker >= call or (packed not in facts.samples and maker not in facts.num_rows):
                yield f"call {call} trained on {named(packed)}, which nothing made"
        yield from _is_whole(facts, call, sets)


def _is_whole(facts: Facts, call: int, sets: dict[int, set[int]]) -> Iterator[str]:
    """An update that is done has trained on all that it was given, in each of its epochs."""
    if call not in facts.calls or facts.calls[call].state != "done":
        return
    wanted = facts.number(call, "epochs")
    if wanted is not None and sorted(sets) != list(range(wanted)):
        yield f"call {call} is done, and trained in the epochs {sorted(sets)} of {wanted}"
    if any(ids != sets[min(sets)] for ids in sets.values()):
        yield f"call {call} is done, and trained on more samples in some epochs than in others"
    given = facts.inputs(call).get("samples", -1)
    if facts.is_generation(given) and not facts.is_gated(given) and sets[min(sets)] != set(facts.counted.get(given, ())):
        yield f"call {call} is done, and trained on {len(sets[min(sets)])} of {len(facts.counted.get(given, ()))} samples"
