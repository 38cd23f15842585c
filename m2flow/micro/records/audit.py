"""Audit a run's record: what must hold of its calls, samples, tokens and updates, check by check.

ledger.db --read_facts--> Facts --(m2flow.micro.records.audit)--> what is wrong with it

Holds everything but tokens in memory: some hundred bytes a sample.

meters (what the processes generated) == trained + wasted, by reason + lost, by reason + unfinished

The left side is counted by the workers' engines as they decode and kept where a kill can't take it
(`m2flow.micro.records.token_accounting`); the
right side is added up from the ledger. So the two can be held against each other. Limit: of a run that goes on, what runs is on the
left side alone; of one that was killed, what nobody wrote down, until it is resumed; eager runs have no meters, and there the left side
is the right one.

ledger.db, segments/ --audit--> Audit: each check, and what breaks it

`m2flow doctor RUN` prints it; tests hold every kind of run to it. Reads only. A run may have ended well, have failed or have been
killed at any moment, or still go on: what had not been written yet is not missed, what was written must hold.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m2flow.errors import M2FlowError, SpecError
from m2flow.macro.replay import CallRecord
from m2flow.micro.protocol.staleness import Decision, version_spans_of
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.ledger import ENDINGS, IS_CURRENT, add_endings, read_decisions
from m2flow.micro.records.segments import Place, read_segment
from m2flow.micro.records.token_accounting import read_meter
from m2flow.samples import Batch, Finish, SampleId, Segment, by_group

_READS = re.compile(r"reads (\S+)@(\d+)(?:\.\.(\d+))?$")
_WRITES = re.compile(r"writes (\S+)@(\d+)$")


class CallFact(NamedTuple):
    """A call as the controller knew it."""

    step: int
    name: str
    site: str
    state: str
    """`pending`, `done` or `failed`."""
    error: str | None


class SampleFact(NamedTuple):
    """A sample that came in."""

    call: int
    prompt: int
    member: int
    num_tokens: int
    num_generated: int
    finish: int
    place: Place


@dataclass(frozen=True)
class Facts:
    """One run."""

    run_dir: Path
    is_over: bool
    """It ended well, and wrote its final weights."""
    calls: Mapping[int, CallFact]
    record: Mapping[int, CallRecord]
    """The calls as the program made them."""
    num_rows: Mapping[int, int]
    """Dataset call -> rows that it gave."""
    samples: Mapping[int, SampleFact]
    rewards: Mapping[int, Mapping[int, tuple[str, float]]]
    """Call -> sample -> role and value."""
    consumption: Mapping[int, Mapping[int, list[int]]]
    """Update call -> epoch -> samples."""
    dropped: Mapping[int, tuple[int, str]]
    """Sample -> call and reason."""
    discarded: Mapping[int, int]
    """Call -> the last prompt that it needed."""
    filtered: Mapping[int, list[int]]
    """Sample -> calls that left it out."""
    expired: Mapping[tuple[int, int], int]
    """Sample and call that found it too old -> tokens that it had."""
    failed: Mapping[int, int]
    """Sample -> call."""
    decisions: Mapping[int, Decision]
    endings: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Sample -> ending and reason."""

    def option(self, call: int, name: str) -> str | None:
        """An option of a call, in words; None if it was given none of this name."""
        record = self.record.get(call)
        return None if record is None else next((value for key, value in (*record.shown, *record.hidden) if key == name), None)

    def number(self, call: int, name: str) -> int | None:
        """The same, of a whole number."""
        value = self.option(call, name)
        return int(value) if value is not None and value.isdigit() else None

    def is_generation(self, call: int) -> bool:
        return self.option(call, "sampling") is not None

    def is_update(self, call: int) -> bool:
        return self.option(call, "optimizer") is not None and self.record[call].name.endswith(".update")

    def is_gated(self, call: int) -> bool:
        """Part of a generation that draws its own prompts: it works on candidates, as many as are needed."""
        return self.option(call, "refill") is not None

    def window(self, call: int) -> tuple[int, int] | None:
        """The oldest and the newest version of the weights that a generation may use."""
        record = self.record.get(call)
        for effect in record.effects if record is not None else ():
            found = _READS.match(effect)
            if found:
                return int(found[2]), int(found[3] or found[2])
        return None

    def writes(self, call: int) -> list[tuple[str, int]]:
        """Resources that a call writes, with the version."""
        record = self.record.get(call)
        found = [_WRITES.match(effect) for effect in (record.effects if record is not None else ())]
        return [(match[1], int(match[2])) for match in found if match]

    def inputs(self, call: int) -> dict[str, int]:
        record = self.record.get(call)
        return dict(record.inputs) if record is not None else {}

    @cached_property
    def counted(self) -> Mapping[int, list[int]]:
        """Generate call -> the samples of its result, as far as they have come in; who drew them does not matter."""
        found: dict[int, list[int]] = {}
        for packed, sample in self.samples.items():
            if packed not in self.dropped and sample.prompt <= self.discarded.get(sample.call, sample.prompt):
                decision = self.decisions.get(packed)
                found.setdefault(sample.call if decision is None else decision.call, []).append(packed)
        return found


def named(packed: int) -> str:
    """A sample as `m2flow samples` names it: call, prompt, index."""
    who = SampleId.unpack(packed)
    return f"{who.call}/{who.prompt}/{who.index}"


def read_facts(run_dir: Path) -> Facts:
    """What the ledger of a run says; also of a run that goes on, has failed or was killed.

    Raises:
        SpecError: the directory has no ledger, or one of another version of m2flow.
    """
    record = read_record(run_dir)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.db'}?mode=ro", uri=True)) as db:
            db.execute("BEGIN")  # All of it as of one moment.
            return _facts(run_dir, db, {call.ordinal: call for call in record.calls})
    except sqlite3.Error as error:
        raise SpecError(f"can't read {run_dir / 'ledger.db'}: {error}", now="It may be of another version of m2flow.") from None


def _facts(run_dir: Path, db: sqlite3.Connection, record: Mapping[int, CallRecord]) -> Facts:
    add_endings(db)
    rewards: dict[int, dict[int, tuple[str, float]]] = {}
    for sample, call, name, value in db.execute("SELECT sample, call, name, value FROM rewards"):
        rewards.setdefault(call, {})[sample] = (name, value)
    consumption: dict[int, dict[int, list[int]]] = {}
    for update, epoch, sample in db.execute("SELECT update_call, epoch, sample FROM consumption"):
        consumption.setdefault(update, {}).setdefault(epoch, []).append(sample)
    filtered: dict[int, list[int]] = {}
    for sample, call in db.execute("SELECT sample, call FROM filtered"):
        filtered.setdefault(sample, []).append(call)
    where = "SELECT id, call, prompt, member, num_tokens, num_generated, finish, segment, offset, size, checksum FROM samples"
    return Facts(
        run_dir=run_dir,
        is_over=any((run_dir / "checkpoints" / "final").glob("*")),
        calls={ordinal: CallFact(*rest) for ordinal, *rest in db.execute("SELECT ordinal, step, name, site, state, error FROM calls")},
        record=record,
        num_rows=dict(db.execute("SELECT call, num_rows FROM cursors")),
        samples={i: SampleFact(a, b, c, d, e, f, (g, h, j, k)) for i, a, b, c, d, e, f, g, h, j, k in db.execute(where)},
        rewards=rewards,
        consumption=consumption,
        dropped={sample: (call, reason) for sample, call, reason in db.execute("SELECT sample, call, reason FROM dropped")},
        discarded=dict(db.execute("SELECT call, last_prompt FROM discarded")),
        filtered=filtered,
        expired={(sample, call): tokens for sample, call, tokens in db.execute("SELECT sample, call, num_generated FROM expired")},
        failed=dict(db.execute("SELECT sample, call FROM failed")),
        decisions=read_decisions(run_dir),
        endings={packed: (ending, reason) for packed, ending, reason in db.execute("SELECT id, ending, reason FROM endings")},
    )


_KEPT = f"""
SELECT ending, sum(coalesce(p.num_generated, max(s.num_generated, coalesce(g.num_generated, 0)))) FROM samples s
JOIN endings ON endings.id = s.id LEFT JOIN prefixes p ON p.sample = s.id LEFT JOIN given_up g ON g.sample = s.id
WHERE {IS_CURRENT} GROUP BY ending
"""
_GIVEN_UP = """
SELECT CASE WHEN d.reason = 'unused' THEN 'unused' WHEN d.sample IS NOT NULL THEN 'dropped'
    WHEN EXISTS (SELECT 1 FROM discarded WHERE discarded.call = g.call) THEN 'unused' ELSE 'failed' END, sum(g.num_generated)
FROM given_up g LEFT JOIN dropped d ON d.sample = g.sample WHERE g.sample NOT IN (SELECT id FROM samples) GROUP BY 1
"""
_UNFINISHED = "SELECT sum(num_generated) FROM prefixes WHERE sample NOT IN (SELECT id FROM samples)"


@dataclass(frozen=True)
class TokenAccount:
    """Of one run, in generated tokens."""

    generated: int
    """By the engines, as they counted."""
    trained: int
    """Of samples that some update consumed; each once, however often it did."""
    wasted: Mapping[str, int]
    """Of samples that ended otherwise, by ending (`m2flow.micro.records.ledger`): dropped, filtered, expired, failed, unused."""
    lost: Mapping[str, int]
    """Of samples that were with a worker when it ended and had not been written down since, by what happened to it."""
    unfinished: int
    """Written down, of samples that have not finished: a resumed run can go on from them."""
    is_settled: bool = True
    """The run, or the last attempt at it, ended by itself: so all that its workers had is written down, or counted as lost."""

    @property
    def accounted(self) -> int:
        return self.trained + sum(self.wasted.values()) + sum(self.lost.values()) + self.unfinished

    @property
    def is_balanced(self) -> bool:
        """Whether every token that was generated is somewhere, and none twice; of a run that goes on or was killed, none twice."""
        return self.generated == self.accounted if self.is_settled else self.generated >= self.accounted

    def __str__(self) -> str:
        wasted = ", ".join(f"{count:,} {ending}" for ending, count in self.wasted.items())
        lost = sum(self.lost.values())
        parts = [f"{self.trained:,} trained", wasted, f"{lost:,} lost" if lost else "", f"{self.unfinished:,} unfinished"]
        return f"{self.generated:,} generated, of these {self.accounted:,} known: {', '.join(part for part in parts if part)}"


def read_token_account(run_dir: Path) -> TokenAccount:
    """Add up a run's tokens; whether it has ended well, has failed or was killed.

    Raises:
        SpecError: the directory has no ledger, or one of another version of m2flow.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.db'}?mode=ro", uri=True)) as db:
            add_endings(db)
            kept = dict(db.execute(_KEPT))
            wasted = {ending: count for ending, count in kept.items() if ending != "consumed"}
            for ending, count in db.execute(_GIVEN_UP):
                wasted[ending] = wasted.get(ending, 0) + count
            (expired,) = db.execute("SELECT coalesce(sum(num_generated), 0) FROM expired").fetchone()
            if expired:
                wasted["expired"] = wasted.get("expired", 0) + expired
            lost = dict(db.execute("SELECT reason, sum(num_tokens) FROM lost GROUP BY reason ORDER BY reason"))
            (unfinished,) = db.execute(_UNFINISHED).fetchone()
            going_on = db.execute("SELECT 1 FROM attempts WHERE ended IS NULL AND number = (SELECT max(number) FROM attempts)").fetchone()
    except sqlite3.Error as error:
        raise SpecError(
            f"can't read {run_dir / 'ledger.db'}: {error}", now="Give the directory of a run, as `m2flow run` names it."
        ) from None
    meters = sorted((run_dir / "segments").glob("*.meter"))
    account = TokenAccount(0, kept.get("consumed", 0), dict(sorted(wasted.items())), lost, unfinished or 0, going_on is None)
    generated = sum(read_meter(path).num_generated for path in meters) if meters else account.accounted
    return replace(account, generated=generated)


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
    if decision is not None and sample.finish != Finish.ABORT and decision.stretches != version_spans_of(row)[0]:
        yield f"sample {named(packed)} was decided to be {decision.stretches}, and is {version_spans_of(row)[0]}"


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


_SHOWN = 5
"""Breaches of a check that are printed; the others are counted."""


@dataclass(frozen=True)
class Checked:
    """One check of one run."""

    name: str
    num_looked_at: int
    """Calls, samples or updates; 0: there was nothing to look at."""
    breaches: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.breaches


@dataclass(frozen=True)
class Audit:
    """What was found."""

    run_dir: str
    checks: tuple[Checked, ...]
    endings: dict[str, int]
    """Samples by how they ended."""
    tokens: dict[str, int]
    """Generated tokens by what became of them."""

    @property
    def is_sound(self) -> bool:
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{'ok' if check.holds else 'BROKEN':6}  {check.name} ({check.num_looked_at:,} looked at)")
            lines += [f"        {breach}" for breach in check.breaches[:_SHOWN]]
            if len(check.breaches) > _SHOWN:
                lines.append(f"        and {len(check.breaches) - _SHOWN:,} more")
        lines.append("samples: " + (", ".join(f"{count:,} {ending}" for ending, count in self.endings.items()) or "none"))
        lines.append("generated tokens: " + (", ".join(f"{count:,} {what}" for what, count in self.tokens.items()) or "none"))
        return "\n".join(lines)


def audit(run_dir: Path) -> Audit:
    """Check a run.

    Raises:
        SpecError: the directory has no ledger, or one of another version of m2flow.
    """
    facts = read_facts(run_dir)
    back, tokens = read_back(facts), read_token_account(run_dir)
    num_calls, num_samples, num_updates = len(facts.calls), len(facts.samples), len(facts.consumption)

    def checked(name: str, num_looked_at: int, breaches: Iterable[str]) -> Checked:
        return Checked(name, num_looked_at, tuple(breaches))

    checks = (
        checked("the calls are those that the program made", num_calls, calls_are_those_of_the_program(facts)),
        checked("a call that is done comes after all that it needs", num_calls, calls_end_after_what_they_need(facts)),
        checked("versions of weights come one after the other", num_calls, versions_come_one_after_the_other(facts)),
        checked("an update trains on each sample once an epoch", num_updates, each_sample_is_trained_on_once_an_epoch(facts)),
        checked("each sample is who it says it is", num_samples, samples_are_who_they_say(facts)),
        checked("results have whole groups", len(facts.counted), groups_are_whole(facts)),
        checked("each sample ends once, with a reason", num_samples, samples_end_once(facts)),
        checked("each reward belongs to a sample", len(facts.rewards), rewards_belong_to_samples(facts)),
        checked("the segments hold the tokens of every sample", num_samples, back.breaches),
        checked("every token that was generated is accounted for", tokens.generated, [] if tokens.is_balanced else [str(tokens)]),
        checked("every token is of weights within the bound", num_samples, versions_are_within_the_bound(facts, back.versions)),
    )
    endings = Counter(ending for ending, _ in facts.endings.values())
    return Audit(str(run_dir), checks, {ending: endings[ending] for ending in ENDINGS if endings[ending]}, _told(tokens))


def _told(tokens: TokenAccount) -> dict[str, int]:
    """By what became of them: trained, for nothing by the ending of the sample, lost, or there to go on from."""
    found = {"trained": tokens.trained, **tokens.wasted, "lost": sum(tokens.lost.values()), "unfinished": tokens.unfinished}
    return {what: count for what, count in found.items() if count}
