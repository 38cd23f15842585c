"""What a run's ledger says, as plain data: for those who look at a run as a whole.

    ledger.db --read_facts--> Facts --(m2flow.micro.record.audit)--> what is wrong with it

Holds everything but tokens in memory: some hundred bytes a sample.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from m2flow.errors import SpecError
from m2flow.macro.recording import CallRecord
from m2flow.micro.record.decisions import Decision
from m2flow.micro.record.endings import add_endings
from m2flow.micro.record.flow_record import read_record
from m2flow.micro.record.ledger import read_decisions
from m2flow.micro.record.segments import Place
from m2flow.samples import SampleId

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
