"""Query the samples of a run: select by a condition, show texts and history, export to JSON lines or Parquet.

    ledger.db, segments/ --SampleQuery--> Entry ... --export--> JSON lines or Parquet
    segments/ --TextIndex--> prompt, response and dataset columns of each sample;  words --search--> samples, best first

It only reads, also while the run goes on. A condition is an SQL expression over the columns of `COLUMNS`; SQLite evaluates it on a
read-only connection. `matches('words')` in it is a full-text search, by SQLite's FTS5 in memory: the texts of the run are read for it once,
about 20,000 samples a second. Its syntax is FTS5's: words that all must be there, "phrases", prefix*, OR, NOT, `response : word`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import numpy as np

from m2flow.errors import EngineError, OptionError, SpecError, sqlite_code
from m2flow.micro.records.accounting import moves
from m2flow.micro.records.ledger import add_endings
from m2flow.micro.records.rundir import open_ledger
from m2flow.micro.records.segments import Place, read_segment, worker_of
from m2flow.recipe import check_count
from m2flow.samples import ENGINE_COLUMNS, EPISODE, MAIN, Batch, Finish, Sample, SampleId, Segment, records_of, sequences_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNREADABLE = "It may be damaged, or of another version of m2flow."
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
COLUMNS = {
    "sample": "its identity: the call that drew it, the prompt's position there, its index in the group, as 3/17/2",
    "step": "the step of the flow in which it was generated; -1 before the loop, whose numbers are logged under step 0",
    "call": "the name of the generate call",
    "site": "the call's line",
    "prompt": "the prompt's position in the call",
    "member": "its index in the group",
    "prompt_tokens": "tokens",
    "response_tokens": "tokens generated",
    "turns": "turns of the model, if it is an episode; else 1",
    "finish": "stop, length or abort",
    "reward": "what the last call that rewarded it gave; null if none did",
    "parts": "what that reward is made of, as JSON: parts ->> 'brevity' < 0; null if its function does not say",
    "num_rewards": "calls that rewarded it",
    "num_updates": "times that it was trained on: update calls times epochs",
    "ending": "consumed, dropped, filtered, expired, failed, or unused so far",
    "reason": "why it ended so",
}
"""The columns that a condition may name."""

_OF_LEDGER = tuple(name for name in COLUMNS if name != "turns")
"""Those that need no segment file to be read; an episode's row has its turns."""

_FINISH = "CASE finish " + " ".join(f"WHEN {finish.value} THEN '{finish.name.lower()}'" for finish in Finish) + " END"
_VIEW = f"""
CREATE TEMP VIEW listed AS SELECT samples.id AS id,
    samples.call || '/' || samples.prompt || '/' || samples.member AS sample,
    samples.step AS step, calls.name AS call, calls.site AS site, samples.prompt AS prompt, samples.member AS member,
    samples.num_tokens - samples.num_generated AS prompt_tokens, samples.num_generated AS response_tokens, turns_of(samples.id) AS turns,
    {_FINISH} AS finish,
    rewarded.value AS reward, rewarded.parts AS parts, coalesce(rewarded.number, 0) AS num_rewards,
    coalesce(trained.number, 0) AS num_updates, endings.ending AS ending, endings.reason AS reason
FROM samples JOIN calls ON calls.ordinal = samples.call JOIN endings ON endings.id = samples.id
    LEFT JOIN (SELECT sample, value, parts, max(call), count(*) AS number FROM rewards GROUP BY sample) AS rewarded
        ON rewarded.sample = samples.id
    LEFT JOIN (SELECT sample, count(*) AS number FROM consumption GROUP BY sample) AS trained ON trained.sample = samples.id
"""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


@dataclass(frozen=True)
class Conversation:
    """One conversation of an episode that has several, or several turns, or what it went on in since its template wrote it anew."""

    name: str
    start: int
    """The place of its first token in the row."""
    prompt: str | None
    """Its first prompt; None where that is what another one had said so far, or what the template made of its own."""
    turns: list[str]
    """What the model said."""
    told: list[str]
    """What it was told before each of these turns beside the prompt, by tools, users or the environment, as the template wrote it. One more
    where something was told after the last turn. Empty where the run's tokenizer can't be read."""
    reward: float | None
    """Its own, where the agent returned one."""
    by: str = ""
    """Who spoke, where it was another speaker of the rollout than the policy."""


@dataclass(frozen=True)
class Entry:
    """One sample of a query's result. The fields up to `reason` are those of `COLUMNS`, without `parts`."""

    sample: str
    step: int
    call: str
    site: str
    prompt: int
    member: int
    prompt_tokens: int
    response_tokens: int
    turns: int
    finish: str
    reward: float | None
    num_rewards: int
    num_updates: int
    ending: str
    reason: str
    prompt_text: str
    response_text: str
    columns: dict[str, object]
    """The columns of its dataset beside the prompt: a reference answer, say."""
    rewards: dict[str, float]
    """Reward by the role that gave it and the line of the call: `verifier flows/grpo.py:44`."""
    parts: dict[str, dict[str, float]]
    """Terms of each of these rewards, where the reward function returns them."""
    versions: list[int]
    """Weight versions of its tokens, oldest first."""
    mean_logprob: float | None
    """Mean log-probability of its generated tokens."""
    life: list[str]
    """The history of the sample, in order."""
    conversations: list[Conversation]
    """Conversations of an episode with several; otherwise empty."""


@dataclass(frozen=True)
class Text:
    """The texts of one sample."""

    prompt: str
    response: str
    columns: dict[str, object]
    """The columns of its dataset beside the prompt: a reference answer, say; and `failure` of an episode that failed."""


_OF_ENGINES = ENGINE_COLUMNS | {
    "prompt", "prompt_text", "text", "seed", "finish", "temperature", "advantages", "version_ages", "values", "returns",
    "proximal_logprobs",
}  # fmt: skip
_LONGEST_COLUMN = 20_000


def text_of(row: Batch) -> Text:
    """Return the texts of a batch of one sample."""
    sample = next(row.rows())
    columns = _columns_of(sample, row)
    prompt = sample.prompt_text if "prompt" in row else ""
    return Text(prompt, str(row.ragged("text").item(0)) if "text" in row else "", columns)


def _columns_of(sample: Sample, rows: Batch) -> dict[str, object]:
    """What `Text.columns` has of one of these rows."""
    columns: dict[str, object] = {}
    hidden = _OF_ENGINES | EPISODE if "episode" in rows else _OF_ENGINES
    for name in rows.columns:
        value = sample[name] if name not in hidden else None
        if isinstance(value, str):
            columns[name] = value[:_LONGEST_COLUMN]
        elif isinstance(value, int | float | bool | list | dict) and len(str(value)) <= _LONGEST_COLUMN:
            columns[name] = value
    if "episode" in rows and sample["failure"]:
        columns["failure"] = ": ".join(filter(None, (sample["failure"], sample["episode"].get("error"))))[:_LONGEST_COLUMN]
    return columns


def conversations_of(row: Batch, tokenizer_of: Callable[[str], Tokenizer | None] = lambda by: None) -> list[Conversation]:
    """Return the conversations of a batch of one episode, in the order of its row; empty where it has one alone, of one turn.

    Args:
        tokenizer_of: the tokenizer of a speaker, by its name in the rollout; "" is the policy.
    """
    record, found = records_of(row)[0], sequences_of(row)
    described = record.get("conversations", ())
    if not described and len(record.get("turns", ())) > 1:
        described = [{"name": MAIN, "num_turns": len(record["turns"]), "prompt": next(row.rows()).prompt_text}]
    starts = [0] if found is None else found[0][:-1].tolist()
    if len(described) != len(starts):
        return []
    turns, conversations = list(record["turns"]), list[Conversation]()
    segments = _segments(row)
    for one, start, end in zip(described, starts, [*starts[1:], math.inf], strict=True):
        own, turns = turns[: one["num_turns"]], turns[one["num_turns"] :]
        reward = record.get("rewards", {}).get(record.get("rewarded", {}).get(one["name"]))
        texts, by = [str(turn["text"]) for turn in own], one.get("by", "")
        told = _told([segment for segment in segments if start <= segment[1] < end], tokenizer_of(by))
        conversations.append(Conversation(one["name"], start, one["prompt"], texts, told, reward, by))
    return conversations


def _segments(row: Batch) -> list[tuple[Segment, int, list[int]]]:
    """The segments of a batch of one sample: kind, place of the first token, tokens."""
    if "segment_kinds" not in row:
        return []
    ends = np.cumsum(row.ragged("segment_lengths").values).tolist()
    tokens, kinds = row.ragged("tokens").values, row.ragged("segment_kinds").values.tolist()
    return [(Segment(kind), start, tokens[start:end].tolist()) for kind, start, end in zip(kinds, [0, *ends], ends, strict=False)]


def _told(segments: Sequence[tuple[Segment, int, list[int]]], tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return []
    told, held = list[str](), ""
    for kind, _, tokens in segments:
        if kind in (Segment.GENERATED, Segment.SHARED):
            told, held = [*told, held], ""
        elif kind is not Segment.PROMPT:
            held += tokenizer.decode(tokens, skip_special_tokens=False)
    return [*told, held] if held else told


@final
class RunTokenizers:
    """The tokenizers of a run's roles, each read when it is first asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, Tokenizer | None] = {}

    def of(self, role: str) -> Tokenizer | None:
        """A role's tokenizer; None: the run has none that can be read."""
        if role not in self._known:
            self._known[role] = self._read(role)
        return self._known[role]

    def _read(self, role: str) -> Tokenizer | None:
        found = sorted((self._run_dir / "checkpoints").glob(f"**/{role}/tokenizer.json"), key=lambda path: path.stat().st_mtime)
        file = found[-1] if found else self._at_source(role)
        if file is None or not file.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception:  # The library raises a bare Exception for a file that it can't read.
            return None

    def _at_source(self, role: str) -> Path | None:
        """Where the directory that a role's model is from has its tokenizer."""
        try:
            config = json.loads((self._run_dir / "config.json").read_text())
            return Path(config["directory"], Path(config["models"][role]["path"]).expanduser(), "tokenizer.json")
        except (OSError, ValueError, KeyError, TypeError):
            return None


@final
class TextIndex:
    """The texts of a run's samples, and a full-text index over them; filled as the run goes on. Several threads may use it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute("CREATE VIRTUAL TABLE texts USING fts5(prompt, response, columns)")
        self._known: set[int] = set()

    def refresh(self) -> None:
        """Read the samples that are new.

        Raises:
            SpecError: the ledger can't be read. EngineError: a segment file is damaged or missing.
        """
        with self._lock, SampleQuery(self._run_dir) as query:
            places: dict[Place, list[int]] = {}
            for packed, segment, offset, size, checksum in query.places():
                if packed not in self._known:
                    places.setdefault((segment, offset, size, checksum), []).append(packed)
            for place, ids in places.items():
                batch = query.record(place)
                for packed in ids:
                    told = text_of(batch.select(np.array([packed], np.int64)))
                    words = json.dumps(told.columns, ensure_ascii=False) if told.columns else ""
                    self._db.execute("INSERT INTO texts (rowid, prompt, response, columns) VALUES (?, ?, ?, ?)",
                                     (packed, told.prompt, told.response, words))  # fmt: skip
                    self._known.add(packed)

    def search(self, words: str, *, most: int | None = None) -> list[int]:
        """Return the packed identities of the samples that match, the best first.

        Raises:
            OptionError: the words are no query of FTS5.
        """
        cut = "" if most is None else f" LIMIT {int(most)}"
        with self._lock:
            try:
                found = self._db.execute(f"SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rank{cut}", (words,)).fetchall()
            except sqlite3.Error as error:
                now = 'Words that all must be there; "a phrase"; begin*; one OR other; response : word. Quote what has other signs.'
                raise OptionError(f"the search for {words!r:.80} can't be made: {error}", now=now) from None
        return [packed for (packed,) in found]

    def texts(self, ids: Sequence[int]) -> dict[int, Text]:
        """Return the texts of these samples, of those that there are."""
        with self._lock:
            marks = ", ".join("?" * len(ids))
            found = self._db.execute(f"SELECT rowid, prompt, response, columns FROM texts WHERE rowid IN ({marks})", list(ids)).fetchall()
        return {packed: Text(prompt, response, json.loads(columns) if columns else {}) for packed, prompt, response, columns in found}


_MATCHES = re.compile(r"\bmatches\(\s*'((?:[^']|'')*)'\s*\)", re.IGNORECASE)


def _at_most(limit: int | None) -> str:
    if limit is None:
        return ""
    check_count("limit", limit, least=0)
    return f" LIMIT {limit}"


class SampleQuery:
    """A query over the samples of one run. A context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._records: dict[Place, Batch] = {}
        self._turns: dict[int, int | None] | None = None
        """By packed identity, once a condition or an order has named them."""
        self._index: TextIndex | None = None
        self.tokenizers = RunTokenizers(run_dir)

    def __enter__(self) -> SampleQuery:
        path = self._run_dir / "ledger.db"
        if not path.is_file():
            raise SpecError(f"there is no ledger in {self._run_dir}", now="Give a run's directory, as `m2flow run` prints it.")
        try:
            self._db = open_ledger(self._run_dir)
            add_endings(self._db)
            self._db.create_function("turns_of", 1, self._turns_of)
            self._db.execute(_VIEW)
            self._db.execute("EXPLAIN SELECT * FROM listed")  # Of an empty file, tables are missing.
        except sqlite3.Error as error:
            raise SpecError(f"can't read {path}: {error}", now=_UNREADABLE) from None
        self._db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def count(self, where: str = "") -> int:
        """Count the samples that meet a condition.

        Raises:
            OptionError: the condition is no expression over the columns.
        """
        return int(self._rows(f"SELECT count(*) FROM listed {self._condition(where)}")[0][0])

    def entries(self, where: str = "", *, order: str = "", limit: int | None = None) -> Iterator[Entry]:
        """The samples that meet a condition, in the order of identity or of an expression.

        Raises:
            OptionError: the condition or the order is no expression over the columns.
            EngineError: a segment file is damaged or missing.
        """
        names = ", ".join(_OF_LEDGER)
        by = f"{order}, id" if order else "id"
        cut = _at_most(limit)
        for packed, *values in self._rows(f"SELECT id, {names} FROM listed {self._condition(where)} ORDER BY {by}{cut}"):
            yield self._entry(packed, values)

    def table(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """The packed identity and some of `COLUMNS` of every sample, in the order of identity. Reads no texts."""
        return self._rows(f"SELECT id, {', '.join(column for column in columns if column in COLUMNS)} FROM listed ORDER BY id")

    def places(self) -> list[tuple[Any, ...]]:
        """The packed identity of every sample, and where its row is: segment, offset, size, checksum."""
        return self._rows("SELECT id, segment, offset, size, checksum FROM samples ORDER BY segment, offset, id")

    def places_of(self, ids: Sequence[int]) -> list[tuple[int, Place]]:
        """The packed identity of these samples, of those that there are, and where their rows are."""
        marks = ", ".join("?" * len(ids))
        found = self._rows(f"SELECT id, segment, offset, size, checksum FROM samples WHERE id IN ({marks}) ORDER BY segment, offset", ids)
        return [(packed, (segment, *place)) for packed, segment, *place in found]

    def record(self, place: Place) -> Batch:
        """All samples that one worker wrote at once. Raises EngineError: the segment file is damaged or missing."""
        return self._read(place)

    def _condition(self, where: str) -> str:
        """Check a condition, and search for what it matches."""

        def found(match: re.Match[str]) -> str:
            if self._index is None:
                self._index = TextIndex(self._run_dir)
                self._index.refresh()
            return f"id IN ({', '.join(map(str, self._index.search(match[1].replace(chr(39) * 2, chr(39)))))})"

        return _condition(where, lambda text: _MATCHES.sub(found, text))

    def columns(self, where: str = "", *, order: str = "", limit: int | None = None) -> dict[str, list[Any]]:
        """`COLUMNS` of the samples that meet a condition, with `prompt_text`, `response_text`, `mean_logprob` and what `Text.columns` has,
        each as a list. One of the dataset by the name of another is `column/NAME`.

        Reads each record of the segment files once, so it takes microseconds a sample where `entries` takes a millisecond.

        Raises:
            OptionError: the condition or the order is no expression over the columns.
            EngineError: a segment file is damaged or missing.
        """
        names = list(_OF_LEDGER)
        cut = _at_most(limit)
        by = f"{order}, listed.id" if order else "listed.id"
        chosen = self._rows(f"SELECT id, {', '.join(names)} FROM listed {self._condition(where)} ORDER BY {by}{cut}")
        found: dict[str, list[Any]] = {name: [row[at] for row in chosen] for at, name in enumerate(names, start=1)}
        of_place: dict[Place, list[int]] = {}
        places = {packed: tuple(place) for packed, *place in self._rows("SELECT id, segment, offset, size, checksum FROM samples")}
        for packed, *_ in chosen:
            of_place.setdefault(places[packed], []).append(packed)
        texts: dict[int, tuple[str, str, float | None, int, dict[str, object]]] = {}
        for place, ids in of_place.items():
            texts.update(zip(ids, _texts(self._read(place).select(np.array(ids, np.int64))), strict=True))
        for at, name in enumerate(("prompt_text", "response_text", "mean_logprob", "turns")):
            found[name] = [texts[packed][at] for packed, *_ in chosen]
        of_dataset = [texts[packed][-1] for packed, *_ in chosen]
        for name in dict.fromkeys(itertools.chain.from_iterable(of_dataset)):
            found[f"column/{name}" if name in found else name] = [columns.get(name) for columns in of_dataset]
        return found

    def batches(
        self, where: str = "", *, limit: int | None = None, size: int = 256
    ) -> Iterator[tuple[Batch, list[tuple[str, int, float | None]]]]:
        """Rows of the samples that meet a condition, in the order of identity; beside each row its sample, step and last reward.

        Args:
            size: most rows at once. Rows with other columns than those before begin a batch.
        Raises:
            OptionError: the condition is no expression over the columns.
            EngineError: a segment file is damaged or missing.
        """
        cut = _at_most(limit)
        rows, known = list[Batch](), list[tuple[str, int, float | None]]()
        for packed, sample, step, reward in self._rows(
            f"SELECT id, sample, step, reward FROM listed {self._condition(where)} ORDER BY id{cut}"
        ):
            row = self.rows_of(packed)
            if rows and (len(rows) == size or set(rows[0].columns) != set(row.columns)):
                yield Batch.concat(rows), known
                rows, known = [], []
            rows.append(row)
            known.append((sample, step, reward))
        if rows:
            yield Batch.concat(rows), known

    def rows_of(self, packed: int) -> Batch:
        """A sample's row as its worker wrote it.

        Raises:
            EngineError: a segment file is damaged or missing.
        """
        segment, *place = self._rows("SELECT segment, offset, size, checksum FROM samples WHERE id = ?", (packed,))[0]
        return self._row((segment, *place), packed)

    def newest(self, limit: int) -> list[int]:
        """Samples of the last steps, the newest first."""
        return [packed for (packed,) in self._rows("SELECT id FROM samples ORDER BY step DESC, id DESC LIMIT ?", (limit,))]

    def episode(self, packed: int) -> tuple[Mapping[str, Any], str]:
        """The record of an episode, and how it failed, if it did. Of a sample that there is not, the record is empty.

        Raises:
            EngineError: a segment file is damaged or missing.
        """
        for _, place in self.places_of([packed]):
            row = self._row(place, packed)
            return records_of(row)[0], str(row.ragged("failure").item(0)) if "failure" in row else ""
        return {}, ""

    def updates_on(self, packed: int) -> list[str]:
        """The names of the calls that trained on a sample, each once: `rival.update`."""
        asked = "SELECT DISTINCT calls.name FROM consumption JOIN calls ON calls.ordinal = update_call WHERE sample = ? ORDER BY calls.name"
        return [name for (name,) in self._rows(asked, (packed,))]

    def moves_of(self, packed: int) -> list[str]:
        """Why a sample went on elsewhere than where its context was, each time."""
        return [cause for _, cause in moves(self._db, packed)]

    def _entry(self, packed: int, values: Sequence[Any]) -> Entry:
        known = dict(zip(_OF_LEDGER, values, strict=True))
        del known["parts"]  # Terms of the last reward alone.
        segment, *place = self._rows("SELECT segment, offset, size, checksum FROM samples WHERE id = ?", (packed,))[0]
        row = self._row((segment, *place), packed)
        versions = sorted(set(row.ragged("versions").values.tolist()) - {-1}) if "versions" in row else []
        mask = row.ragged("loss_mask").values
        logprobs = row.ragged("logprobs").values[mask] if "logprobs" in row else np.empty(0)
        rewards = self._rows(
            "SELECT rewards.name, calls.site, value, parts FROM rewards JOIN calls ON calls.ordinal = call WHERE sample = ? ORDER BY call",
            (packed,),
        )
        told = text_of(row)
        return Entry(
            **known,
            turns=_turns(row)[0],
            prompt_text=told.prompt,
            response_text=told.response,
            columns=told.columns,
            rewards={f"{name} {site}": value for name, site, value, _ in rewards},
            parts={f"{name} {site}": json.loads(parts) for name, site, _, parts in rewards if parts},
            versions=versions,
            mean_logprob=float(logprobs.mean()) if len(logprobs) else None,
            life=self._life(packed, known, str(segment), versions, rewards),
            conversations=conversations_of(row, lambda by: self.tokenizers.of(role_of(row, known["call"], by))),
        )

    def _life(self, packed: int, known: dict[str, Any], segment: str, versions: list[int], rewards: list[tuple[Any, ...]]) -> list[str]:
        weights = f", weights of version {', '.join(map(str, versions))}" if versions else ""
        ((drawn_in,),) = self._rows("SELECT calls.step FROM samples JOIN calls ON calls.ordinal = samples.call WHERE id = ?", (packed,))
        life = [f"asked for by {known['call']}, {known['site']}, in step {drawn_in}"]
        expired = self._rows(
            "SELECT num_generated, step FROM expired JOIN calls ON calls.ordinal = call WHERE sample = ? ORDER BY call", (packed,)
        )
        life += [f"begun anew: {tokens} tokens were too old for step {step}" for tokens, step in expired]
        lost = self._rows("SELECT num_tokens, reason FROM lost WHERE sample = ? ORDER BY rowid", (packed,))
        life += [f"lost: {tokens} tokens, {reason}" for tokens, reason in lost]
        for had, worker in self._rows("SELECT had, worker FROM went_on WHERE sample = ? ORDER BY rowid", (packed,)):
            life.append(f"went on: from its first {had} tokens, on {worker}")
        for worker, cause in moves(self._db, packed):
            life.append(f"moved: to {worker}, away from its context ({cause})")
        life += [
            f"generated: {known['response_tokens']} tokens on {worker_of(segment)}{weights}; ended by {known['finish']}",
        ]
        given = "SELECT calls.step FROM decisions JOIN calls ON calls.ordinal = call WHERE sample = ? AND call != ?"
        for (step,) in self._rows(given, (packed, SampleId.unpack(packed).call)):
            life.append(f"carried: it was late, and given in step {step}")
        life += [f"rewarded: {value:g} by {name}, {site}" for name, site, value, _ in rewards]
        updates = self._rows(
            "SELECT calls.name, calls.site, calls.step, epoch FROM consumption JOIN calls ON calls.ordinal = update_call "
            "WHERE sample = ? ORDER BY update_call, epoch",
            (packed,),
        )
        life += [f"trained on: {name}, {site}, in step {step}, epoch {epoch}" for name, site, step, epoch in updates]
        return life if known["ending"] == "consumed" else [*life, f"{known['ending']}: {known['reason']}"]

    def _turns_of(self, packed: int) -> int | None:
        """Turns of a sample, for SQL; None where its segment can't be read. Reads each record once."""
        if self._turns is None:
            self._turns = {}
            for place, ids in itertools.groupby(self.places(), key=lambda row: row[1:]):
                chosen = [one[0] for one in ids]
                self._turns.update(dict.fromkeys(chosen))
                with contextlib.suppress(EngineError):
                    turns = _turns(self._read(place).select(np.array(chosen, np.int64)))
                    self._turns.update(zip(chosen, turns, strict=True))
        return self._turns.get(packed)

    def _row(self, place: Place, packed: int) -> Batch:
        if place not in self._records:
            self._records = {place: self._read(place)}  # Consecutive samples are often of one record, so one is cached.
        batch = self._records[place]
        return batch.select(np.array([packed], np.int64))

    def _read(self, place: Place) -> Batch:
        try:
            return read_segment(self._run_dir / "segments", place)
        except OSError as error:
            raise EngineError(
                f"the segment {place[0]} of {self._run_dir} can't be read: {error.strerror}",
                now="Check the run's directory: the file was moved, or its rights do not let you read it.",
            ) from None

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if sqlite_code(error) in _DAMAGED:
                raise SpecError(f"can't read {self._run_dir / 'ledger.db'}: {error}", now=_UNREADABLE) from None
            raise OptionError(
                f"the condition can't be used: {error}",
                now=f"It is an SQL expression over {', '.join(COLUMNS)}, and may search: matches('words').",
            ) from None


def role_of(row: Batch, call: str, by: str) -> str:
    """The role of a speaker of an episode; "" is the policy, whose call it is."""
    roles: Mapping[str, str] = records_of(row)[0].get("speakers", {})
    return roles.get(by, by) if by else call.partition(".")[0]


def _texts(rows: Batch) -> Iterator[tuple[str, str, float | None, int, dict[str, object]]]:
    """Prompt, response, mean log-probability of the generated tokens, turns, and columns of its dataset of each row."""
    logprobs = rows.ragged("logprobs") if "logprobs" in rows else None
    masks, texts = rows.ragged("loss_mask") if "loss_mask" in rows else None, rows.ragged("text") if "text" in rows else None
    turns = _turns(rows)
    for at, sample in enumerate(rows.rows()):
        own = np.empty(0) if logprobs is None or masks is None else logprobs.row(at)[masks.row(at)]
        prompt = sample.prompt_text if "prompt" in rows else ""
        response = "" if texts is None else str(texts.item(at))
        yield prompt, response, float(own.mean()) if len(own) else None, turns[at], _columns_of(sample, rows)


def _turns(rows: Batch) -> list[int]:
    """Turns of the model in each row; 1 where it is no episode."""
    return [int(one) for one in rows.dense("num_turns").tolist()] if "num_turns" in rows else [1] * len(rows)


def _condition(where: str, filled: Callable[[str], str]) -> str:
    """Check that a condition is one SQL expression, and return it with its searches filled in.

    Raises:
        OptionError: it is more than one expression.
    """
    if ";" in where or "--" in where:
        raise OptionError(f"the condition {where!r:.80} is more than an expression", now="Example: reward < 0.5 and step = 3")
    return f"WHERE ({filled(where)})" if where.strip() else ""


def export(entries: Iterator[Entry], path: Path) -> int:
    """Write entries as JSON lines, or as Parquet if the name ends in .parquet, and return how many.

    Raises:
        OptionError: Parquet was asked for, and pyarrow is not installed.
        SpecError: the file can't be written.
    """
    try:
        if path.suffix == ".parquet":
            return _as_parquet(entries, path)
        number = 0
        with path.open("wb") as file:
            for entry in entries:
                file.write(msgspec.json.encode(asdict(entry)) + b"\n")
                number += 1
        return number
    except OSError as error:
        raise SpecError(
            f"can't write {path}: {error.strerror or error}", now="Give another file, in a directory that you may write to."
        ) from None


def _as_lists(entry: Entry) -> dict[str, object]:
    """An entry whose mappings are lists of pairs: in a table, each key of a mapping would become a column of all rows."""
    return {
        "columns": [{"name": name, "value": json.dumps(value, ensure_ascii=False)} for name, value in entry.columns.items()],
        "rewards": [{"by": by, "value": value} for by, value in entry.rewards.items()],
        "parts": [{"by": by, "name": name, "value": value} for by, of in entry.parts.items() for name, value in of.items()],
    }


def _as_parquet(entries: Iterator[Entry], path: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise OptionError(
            f"{path} needs pyarrow, which is not installed", now="pip install 'm2flow[parquet]', or name a .jsonl file."
        ) from None
    rows = [asdict(entry) | _as_lists(entry) for entry in entries]
    with contextlib.closing(pa.OSFile(str(path), "wb")) as sink:
        pq.write_table(pa.Table.from_pylist(rows), sink)
    return len(rows)


# ---- for trackers

SHOWN_COLUMNS = ("step", "sample", "prompt", "response", "reward", "response_tokens", "finish")
_MOST_SHOWN = 2000
"""Characters of a text."""


def shown_samples(run_dir: Path, step: int, most: int) -> tuple[Sequence[str], list[list[object]]]:
    """The first samples of a step as the columns and rows of a table.

    Raises:
        SpecError: the ledger can't be read. EngineError: rows can't be read.
    """
    with SampleQuery(run_dir) as query:
        found: list[list[object]] = [
            [one.step, one.sample, _shown(one.prompt_text), _shown(one.response_text), one.reward, one.response_tokens, one.finish]
            for one in query.entries(f"step = {int(step)}", limit=most)
        ]
    return SHOWN_COLUMNS, found


def _shown(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


SHOWN_BY = f"{__name__}:{shown_samples.__name__}"
"""What the forwarding process reads samples by."""
