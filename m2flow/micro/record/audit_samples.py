"""What must hold of the samples that a run wrote down, and of their tokens; each check yields what breaks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from m2flow.errors import M2FlowError
from m2flow.micro.record.decisions import stretches_of
from m2flow.micro.record.endings import ENDINGS
from m2flow.micro.record.facts import Facts, SampleFact, named
from m2flow.micro.record.segments import Place, read_segment
from m2flow.samples import Batch, Finish, SampleId, Segment, by_group


@dataclass(frozen=True)
class ReadBack:
    """What the segment files say of the samples."""

    breaches: list[str] = field(default_factory=list)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Sample -> the oldest and the newest version among its tokens."""


def samples_are_who_they_say(facts: Facts) -> Iterator[str]:
    for packed, sample in facts.samples.items():
        who, n = SampleId.unpack(packed), facts.number(sample.call, "n")
        if (who.call, who.prompt, who.index) != (sample.call, sample.prompt, sample.member):
            yield f"sample {named(packed)} is written down as {sample.call}/{sample.prompt}/{sample.member}"
        if sample.call in facts.record and (n is None or not facts.is_generation(sample.call) or sample.member >= n):
            yield f"sample {named(packed)}: call {sample.call}, {facts.record[sample.call].name}, draws no such sample"


def groups_are_whole(facts: Facts) -> Iterator[str]:
    for call, ids in facts.counted.items():
        if call not in facts.calls or facts.calls[call].state != "done":
            continue
        n, groups = facts.number(call, "n"), by_group(sorted(ids))
        for rows in groups.values():
            if n is not None and len(rows) != n:
                yield f"call {call} is done, and its result has {len(rows)} of the {n} samples of the prompt of {named(rows[0])}"
        wanted = facts.num_rows.get(facts.inputs(call).get("prompts", -1))
        is_plain = facts.option(call, "late") in (None, "'wait'") and not facts.is_gated(call)
        if is_plain and wanted is not None and len(groups) != wanted:
            yield f"call {call} is done, with {len(groups)} of {wanted} prompts answered"


def samples_end_once(facts: Facts) -> Iterator[str]:
    for packed, (ending, reason) in facts.endings.items():
        sample = facts.samples[packed]
        if ending not in ENDINGS or not reason:
            yield f"sample {named(packed)} ended as {ending!r}, because {reason!r}"
        if ending == "consumed" and packed in facts.dropped:
            yield f"sample {named(packed)} was trained on, and is in no result: {facts.dropped[packed][1]}"
        if ending == "consumed" and sample.prompt > facts.discarded.get(sample.call, sample.prompt):
            yield f"sample {named(packed)} was trained on, and lies beyond the last prompt that was needed"
        if ending == "consumed" and sample.finish == Finish.ABORT:
            yield f"sample {named(packed)} was trained on, and was never finished"
        if facts.is_over and sample.finish == Finish.ABORT and packed not in facts.dropped:
            yield f"sample {named(packed)} counts, and was never finished"


def rewards_belong_to_samples(facts: Facts) -> Iterator[str]:
    for call, rewards in facts.rewards.items():
        for packed, (name, value) in rewards.items():
            maker = SampleId.unpack(packed).call
            if not np.isfinite(value):
                yield f"the reward of sample {named(packed)} by call {call} is {value}"
            if maker >= call or (packed not in facts.samples and maker not in facts.num_rows):
                yield f"call {call} rewarded {named(packed)}, which nothing made"
            if call in facts.calls and not facts.calls[call].name.startswith(name):
                yield f"call {call} is {facts.calls[call].name}, and a reward by it says {name}"
    for call in facts.record:
        if facts.option(call, "column") == "'reward'" and call in facts.calls and facts.calls[call].state == "done":
            made_by = facts.inputs(call).get("samples", -1)
            wanted = facts.counted.get(made_by, []) if facts.is_generation(made_by) and not facts.is_gated(call) else []
            unrewarded = set(wanted) - facts.rewards.get(call, {}).keys()
            if unrewarded:
                yield f"call {call} is done, and {len(unrewarded)} samples have no reward by it: {named(min(unrewarded))} ..."


def read_back(facts: Facts) -> ReadBack:
    """Read every sample's record, check it against the ledger, and note its versions."""
    versions: dict[int, tuple[int, int]] = {}
    return ReadBack(list(_segments_hold_the_samples(facts, versions)), versions)


def _segments_hold_the_samples(facts: Facts, versions: dict[int, tuple[int, int]]) -> Iterator[str]:
    directory = facts.run_dir / "segments"
    ends: dict[str, tuple[int, int]] = {}
    for segment, offset, size, _ in sorted(_places(facts)):
        start, end = ends.get(segment, (0, 0))
        if offset < end and offset != start:
            yield f"records of {segment} overlap at byte {offset}"
        ends[segment] = (offset, offset + size)
    for place, ids in _places(facts).items():
        try:
            batch = read_segment(directory, place)
        except (M2FlowError, OSError) as error:
            yield f"{len(ids)} samples from {named(ids[0])} on can't be read: {error}"
            continue
        rows = {packed: row for row, packed in enumerate(batch.ids.tolist())}
        for packed in ids:
            if packed not in rows:
                yield f"the record of sample {named(packed)} in {place[0]} is of others"
            else:
                row = batch.take([rows[packed]])
                used = np.asarray(row.ragged("versions").values)
                if np.any(used >= 0):
                    versions[packed] = int(used[used >= 0].min()), int(used.max())
                yield from _row_is_sound(facts, packed, facts.samples[packed], row)


def _row_is_sound(facts: Facts, packed: int, sample: SampleFact, row: Batch) -> Iterator[str]:
    tokens, logprobs = row.ragged("tokens").row(0), np.asarray(row.ragged("logprobs").row(0), np.float32)
    versions = np.asarray(row.ragged("versions").row(0), np.int32)
    kinds, lengths = row.ragged("segment_kinds").row(0), row.ragged("segment_lengths").row(0)
    made = versions >= 0
    if not len(tokens) == len(versions) == len(logprobs) == int(np.sum(lengths)) == sample.num_tokens:
        yield f"sample {named(packed)} has {sample.num_tokens} tokens in the ledger, {len(tokens)} in its segment"
        return
    if not int(np.sum(made)) == int(np.sum(lengths[kinds == Segment.GENERATED])) == sample.num_generated:
        yield f"sample {named(packed)}: {sample.num_generated} tokens were generated, and {int(np.sum(made))} have a version"
    if not np.all(np.isfinite(logprobs[made])) or np.any(logprobs[made] > 1e-3):
        yield f"sample {named(packed)} has log-probabilities that are none"
    decision = facts.decisions.get(packed)
    if decision is not None and sample.finish != Finish.ABORT and decision.stretches != stretches_of(row)[0]:
        yield f"sample {named(packed)} was decided to be {decision.stretches}, and is {stretches_of(row)[0]}"


def versions_are_within_the_bound(facts: Facts, versions: Mapping[int, tuple[int, int]]) -> Iterator[str]:
    for packed, (oldest, newest) in versions.items():
        decision, drawn_by = facts.decisions.get(packed), facts.samples[packed].call
        giver = drawn_by if decision is None else decision.call
        window = facts.window(giver)
        if window is not None and packed not in facts.dropped and not window[0] <= oldest <= newest <= window[1]:
            yield f"sample {named(packed)} is of versions {oldest} to {newest}; call {giver} may give {window[0]} to {window[1]}"


def _places(facts: Facts) -> dict[Place, list[int]]:
    found: dict[Place, list[int]] = {}
    for packed, sample in facts.samples.items():
        found.setdefault(sample.place, []).append(packed)
    return found
