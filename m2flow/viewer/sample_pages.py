"""Prepare samples for pages: all of them as columns (`samples_table`), and one with its tokens, rewards and events (`sample_page`).

    ledger.db, RunTrace --samples_table--> Columns [N]
    SampleQuery, its speakers' tokenizers --sample_page--> SamplePage
    SampleQuery --group_page--> GroupPage: all responses to one prompt
    Columns, Wanted --selected--> positions of the samples that meet all of its limits

The table reads no text, so that a hundred thousand samples are a few megabytes, which a page can sort and filter by itself. A simulated
run has no ledger; its table comes from the trace. A token's text is decoded with the tokenizer of the role that speaks in its conversation:
of the role's newest checkpoint in the run directory, or of the directory that its model is from. Without one, tokens are numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError, SpecError
from m2flow.micro.records.ledger import ENDINGS
from m2flow.micro.records.sample_query import Conversation, Entry, RunTokenizers, SampleQuery, role_of
from m2flow.observe.spans import OF_EPISODES, SpanName, shown_name, with_turns
from m2flow.samples import Batch, Finish, SampleId, Segment, expanded_experts, group_indices, prompt_positions, records_of
from m2flow.viewer.run_trace import FUNCTION, SAMPLE, TRAIN, TURN, RunTrace, evaluation_calls

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# ---- the table of all samples

MOST = 200_000
"""The most samples that a page gets; of more, the newest."""
FINISHES = [finish.name.lower() for finish in sorted(Finish)]
_CALL_SHIFT = 42
_ASKED = ("step", "prompt_tokens", "response_tokens", "finish", "reward", "num_updates", "ending")


@final
class Columns(msgspec.Struct):
    """The table of samples: one entry a sample, None where a value is not known. Times in microseconds since the run's first span."""

    call: list[int]
    prompt: list[int]
    member: list[int]
    step: list[int]
    prompt_tokens: list[int]
    tokens: list[int]
    finish: list[int]
    """Positions in `finishes`."""
    reward: list[float | None]
    updates: list[int]
    ending: list[int]
    """Positions in `endings`."""
    start: list[int | None]
    end: list[int | None]
    scored: list[int | None]
    """When its first reward or op ended."""
    trained: list[int | None]
    """When the first micro-batch with it began."""
    wait: list[int | None]
    """Microseconds from its last token to that."""
    worker: list[int]
    """Positions in `workers`; -1: not known."""
    version: list[int]
    """The weight version at its admission; -1: not known."""
    staleness: list[int | None]
    """How many versions the first update that trained on it was ahead of `version`."""
    advantage: list[float | None]
    """(reward - mean of its group) / standard deviation of its group, for groups of two or more."""
    evaluates: list[int]
    """1: of an evaluation, which trains nothing; 0 otherwise."""
    spans: dict[str, list[tuple[int, int, int, int]]]
    """Position of a sample that ran more than once (aborted, moved, resumed) -> start, end, worker and version of each time."""
    workers: list[str]
    finishes: list[str]
    endings: list[str]
    num_left_out: int


def samples_table(run_dir: Path, trace: RunTrace) -> Columns:
    """Make the table of a run's samples.

    Raises:
        SpecError: the ledger can't be read.
    """
    rows = _from_ledger(run_dir) if trace.calls.has_ledger else _from_trace(trace)
    num_left_out = max(len(rows) - MOST, 0)
    rows = rows[num_left_out:]
    ids = np.array([row[0] for row in rows], np.int64)
    life, scored, trained = _life_of(trace, ids), _first_task_of(trace, ids, FUNCTION), _first_task_of(trace, ids, TRAIN)
    start, end = trace.columns["start"], trace.columns["end"]
    has_life, has_trained = life >= 0, trained >= 0
    origin = trace.start

    def micros(times: IntArray, spans: IntArray) -> list[int | None]:
        return [None if span < 0 else int(times[span] - origin) // 1000 for span in spans.tolist()]

    if trace.columns.num_spans:
        version = np.where(has_life, trace.columns["version"][life], -1)
        worker = np.where(has_life, trace.columns["worker"][life], -1)
        update = np.where(has_trained, trace.call[trained], -1)
    else:
        version = worker = update = life
    written = _written_by(trace)
    behind = [
        max(written[call] - 1 - at, 0) if call in written and at >= 0 else None
        for call, at in zip(update.tolist(), version.tolist(), strict=True)
    ]
    reward = [row[5] for row in rows]
    return Columns(
        call=(ids >> _CALL_SHIFT).tolist(),
        prompt=prompt_positions(ids).tolist(),
        member=group_indices(ids).tolist(),
        step=[row[1] for row in rows],
        prompt_tokens=[row[2] for row in rows],
        tokens=[row[3] for row in rows],
        finish=[FINISHES.index(row[4]) if row[4] in FINISHES else -1 for row in rows],
        reward=reward,
        updates=[row[6] for row in rows],
        ending=[ENDINGS.index(row[7]) if row[7] in ENDINGS else -1 for row in rows],
        start=micros(start, life),
        end=micros(end, life),
        scored=micros(end, scored),
        trained=micros(start, trained),
        wait=[
            max(int(start[last] - end[first]) // 1000, 0) if first >= 0 and last >= 0 else None
            for first, last in zip(life.tolist(), trained.tolist(), strict=True)
        ],
        worker=worker.tolist(),
        version=version.tolist(),
        staleness=behind,
        advantage=_advantages(ids, reward),
        evaluates=np.isin(ids >> _CALL_SHIFT, sorted(evaluation_calls(trace.calls.by_ordinal))).astype(np.int64).tolist(),
        spans=_repeated_spans(trace, ids),
        workers=list(trace.columns.workers.texts),
        finishes=FINISHES,
        endings=list(ENDINGS),
        num_left_out=num_left_out,
    )


def _from_ledger(run_dir: Path) -> list[tuple]:  # type: ignore[type-arg]
    with SampleQuery(run_dir) as query:
        return query.table(_ASKED)


def _from_trace(trace: RunTrace) -> list[tuple]:  # type: ignore[type-arg]
    columns = trace.columns
    sample_spans = np.flatnonzero((trace.group == SAMPLE) & (columns["sample"] >= 0)) if columns.num_spans else np.zeros(0, np.int64)
    sample_spans = sample_spans[np.lexsort((columns["end"][sample_spans], columns["sample"][sample_spans]))]
    sample_spans = (
        sample_spans[np.append(np.diff(columns["sample"][sample_spans]) != 0, True)] if len(sample_spans) else sample_spans
    )  # The last span of a sample has all of its tokens.
    used = (
        set(trace.columns.touches[trace.group[trace.columns.touches[:, 1]] == TRAIN, 0].tolist()) if len(trace.columns.touches) else set()
    )
    return [
        (sample, step, 0, tokens, "stop", None, int(sample in used), "consumed" if sample in used else "unused")
        for sample, step, tokens in zip(
            columns["sample"][sample_spans].tolist(),
            trace.step[sample_spans].tolist(),
            columns["num_tokens"][sample_spans].tolist(),
            strict=True,
        )
    ]


def _life_of(trace: RunTrace, ids: IntArray) -> IntArray:
    """Find the last span in which each sample ran, as its position; -1: none."""
    if not trace.columns.num_spans or not len(ids):
        return np.full(len(ids), -1, np.int64)
    sample_spans = np.flatnonzero((trace.group == SAMPLE) & (trace.columns["sample"] >= 0))
    sample_spans = sample_spans[np.lexsort((trace.columns["end"][sample_spans], trace.columns["sample"][sample_spans]))]
    return _last_of(trace.columns["sample"][sample_spans], sample_spans, ids)


def _repeated_spans(trace: RunTrace, ids: IntArray) -> dict[str, list[tuple[int, int, int, int]]]:
    if not trace.columns.num_spans or not len(ids):
        return {}
    columns = trace.columns
    sample_spans = np.flatnonzero((trace.group == SAMPLE) & (columns["sample"] >= 0))
    who, number = np.unique(columns["sample"][sample_spans], return_counts=True)
    sample_spans = sample_spans[np.isin(columns["sample"][sample_spans], who[number > 1])]
    place = {sample: at for at, sample in enumerate(ids.tolist())} if len(sample_spans) else {}
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for span in sample_spans[np.argsort(columns["start"][sample_spans], kind="stable")].tolist():
        at = place.get(int(columns["sample"][span]))
        if at is not None:
            start, end = ((int(columns[edge][span]) - trace.start) // 1000 for edge in ("start", "end"))
            found.setdefault(str(at), []).append((start, end, int(columns["worker"][span]), int(columns["version"][span])))
    return found


def _first_task_of(trace: RunTrace, ids: IntArray, group: int) -> IntArray:
    """Find the first task of a group on each sample, as a span's position; -1: none."""
    touches = trace.columns.touches
    if not len(touches) or not len(ids):
        return np.full(len(ids), -1, np.int64)
    mine = touches[trace.group[touches[:, 1]] == group]
    order = np.lexsort((-trace.columns["start"][mine[:, 1]], mine[:, 0]))
    return _last_of(mine[order, 0], mine[order, 1], ids)


def _last_of(keys: IntArray, values: IntArray, wanted: IntArray) -> IntArray:
    """Return for each wanted key the last value among sorted keys; -1: there is none."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    at = np.searchsorted(keys, wanted, side="right") - 1
    return np.where((at >= 0) & (keys[np.maximum(at, 0)] == wanted), values[np.maximum(at, 0)], -1)


def _written_by(trace: RunTrace) -> dict[int, int]:
    """Map update calls to the versions that they write."""
    columns = trace.columns
    if SpanName.TRAIN_APPLY not in columns.names.texts:
        return {}
    mine = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.TRAIN_APPLY)) & (columns["version"] >= 0))
    return dict(zip(columns["call"][mine].tolist(), columns["version"][mine].tolist(), strict=True))


def _advantages(ids: IntArray, rewards: list[float | None]) -> list[float | None]:
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if not len(values):
        return []
    _, group = np.unique(ids >> 12, return_inverse=True)
    known = ~np.isnan(values)
    number = np.bincount(group, weights=known)
    clean = np.where(known, values, 0.0)
    mean = np.bincount(group, weights=clean) / np.maximum(number, 1)
    spread = np.sqrt(np.bincount(group, weights=np.where(known, (clean - mean[group]) ** 2, 0.0)) / np.maximum(number, 1))
    advantage = (clean - mean[group]) / (spread[group] + 1e-6)
    is_told = known & (number[group] >= 2)
    return [round(value, 4) if told else None for value, told in zip(advantage.tolist(), is_told.tolist(), strict=True)]


# ---- a selection of samples

_RANGES = ("step", "reward", "tokens", "prompt_tokens", "staleness", "wait")


@final
class Wanted(msgspec.Struct):
    """Limits that samples must meet. A sample without a value does not meet a limit on it."""

    ranges: dict[str, tuple[float | None, float | None]] = {}
    """Least and most, both included, by one of `_RANGES`; `wait` in microseconds."""
    finish: str = ""
    ending: str = ""
    evaluates: bool | None = None
    words: str = ""
    """A full-text search."""

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> Wanted:
        """Read them from a query: `step=3..5`, `reward=..0.5`, `finish=length`, `set=evaluation`, `q=carry`.

        Raises:
            ValueError: a range that is none.
        """
        ranges: dict[str, tuple[float | None, float | None]] = {}
        for name in _RANGES:
            if text := asked.get(name, ""):
                least, dots, most = text.partition("..")
                if not dots:
                    raise ValueError(f"{name} is to be a range like 3..5, 3.. or ..5, and is {text!r:.40}")
                ranges[name] = float(least) if least else None, float(most) if most else None
        evaluates = {"training": False, "evaluation": True}.get(asked.get("set", ""))
        return cls(ranges, asked.get("finish", ""), asked.get("ending", ""), evaluates, asked.get("q", ""))


def selected(columns: Columns, wanted: Wanted, matches: Collection[int] | None = None) -> list[int]:
    """Return the positions of the samples that meet all limits, in their order.

    Args:
        matches: packed identities that the search found; None: there was no search.
    """
    keep = np.ones(len(columns.call), np.bool_)
    for name, (least, most) in wanted.ranges.items():
        values = np.array([np.nan if value is None else value for value in getattr(columns, name)], np.float64)
        keep &= ~np.isnan(values)
        keep &= values >= least if least is not None else True
        keep &= values <= most if most is not None else True
    for text, names, held in ((wanted.finish, columns.finishes, columns.finish), (wanted.ending, columns.endings, columns.ending)):
        if text:
            keep &= np.array(held, np.int64) == (names.index(text) if text in names else -2)
    if wanted.evaluates is not None:
        keep &= np.array(columns.evaluates, np.bool_) == wanted.evaluates
    if matches is not None:
        found = set(matches)
        keep &= np.array([packed in found for packed in packed_ids(columns)], np.bool_)
    return np.flatnonzero(keep).tolist()


def packed_ids(columns: Columns) -> list[int]:
    return [SampleId(*who).pack() for who in zip(columns.call, columns.prompt, columns.member, strict=True)]


# ---- the page of a group


@final
class Member(msgspec.Struct):
    """One response of a group."""

    member: int
    response: str
    reward: float | None
    advantage: float | None
    parts: dict[str, float]
    """The parts of its rewards, where their functions return them, and the rewards where there are several."""
    tokens: int
    finish: str
    ending: str
    mean_logprob: float | None
    versions: list[int]


@final
class GroupPage(msgspec.Struct):
    """All responses to one prompt of a call."""

    call: int
    prompt: int
    step: int
    name: str
    site: str
    prompt_text: str
    columns: dict[str, object]
    members: list[Member]
    evaluates: bool


def group_page(run_dir: Path, call: int, prompt: int, *, evaluates: bool = False) -> GroupPage:
    """Read a group for its page.

    Raises:
        SpecError: there is no such group. EngineError: its rows can't be read.
    """
    try:
        first, last = SampleId(call, prompt, 0).pack(), SampleId(call, prompt + 1, 0).pack()
    except InternalError:  # No group can have such a number.
        first = last = 0
    with SampleQuery(run_dir) as query:
        entries = list(query.entries(f"id >= {first} AND id < {last}", limit=MOST_MEMBERS))
    if not entries:
        raise SpecError(f"there is no group {call}/{prompt} in {run_dir.name}", now="`m2flow samples RUN` lists those that there are.")
    ids = np.array([SampleId(call, prompt, entry.member).pack() for entry in entries], np.int64)
    advantages = _advantages(ids, [entry.reward for entry in entries])
    members = []
    for entry, advantage in zip(entries, advantages, strict=True):
        parts = dict(entry.rewards) if len(entry.rewards) > 1 else {}
        for of in entry.parts.values():
            parts |= of
        members.append(
            Member(
                entry.member,
                entry.response_text,
                entry.reward,
                advantage,
                parts,
                entry.response_tokens,
                entry.finish,
                entry.ending,
                entry.mean_logprob,
                entry.versions,
            )
        )
    one = entries[0]
    return GroupPage(call, prompt, one.step, one.call, one.site, one.prompt_text, one.columns, members, evaluates)


MOST_MEMBERS = 256
"""The most responses of a group that its page shows."""


# ---- the page of one sample

MOST_TOKENS = 20_000
"""The most tokens in one answer; a page says how many more there are."""
_BEFORE = 6
"""Tokens before a token with which its text is decoded."""


@final
class Block(msgspec.Struct):
    """A run of an episode's tokens of one origin: a turn, or what stands before or between turns."""

    start: int
    """Place of its first token in the row."""
    end: int
    is_turn: bool
    """Whether it was sampled in this episode."""
    title: str
    trained: str
    """By which update, or why by none; empty: nobody trains such tokens, or nobody has yet."""


@final
class Passed(msgspec.Struct):
    """A turn or a tool call of an episode, on its time line."""

    name: str
    is_tool: bool
    start: int
    """Microseconds since the episode began."""
    duration: int
    about: dict[str, object]
    """Attributes of its span."""


@final
class SamplePage(msgspec.Struct):
    """One sample with its texts, tokens, rewards and events. Lists of tokens have one entry a token."""

    call: int
    prompt: int
    member: int
    step: int
    name: str
    site: str
    prompt_text: str
    response_text: str
    columns: dict[str, object]
    """The columns of its dataset beside the prompt."""
    finish: str
    ending: str
    reason: str
    life: list[str]
    rewards: dict[str, float]
    parts: dict[str, dict[str, float]]
    """The parts of each reward, where its function returns them."""
    pieces: list[str]
    has_texts: bool
    """Whether pieces are texts; otherwise they are token numbers."""
    kinds: list[int]
    """0 prompt, 1 generated, 2 from elsewhere."""
    logprobs: list[float | None]
    versions: list[int | None]
    advantages: list[float | None]
    """One value a token, where the run's rows have them; otherwise empty."""
    experts: list[str]
    """One text a token: the experts that each layer routed it to, `3 5 | 0 1`; empty where not known."""
    num_left_out: int
    prompt_tokens: int
    response_tokens: int
    conversations: list[Conversation]
    """Conversations of an episode with several; otherwise empty."""
    blocks: list[Block]
    """Blocks of an episode with several turns or conversations; otherwise empty."""
    passed: list[Passed] = []
    """Turns and tool calls of an episode in order of their beginnings, as far as they are recorded."""
    took: int = 0
    """Microseconds from its beginning to its end."""
    moved: list[str] = []
    """Each time that it went on elsewhere than where its context was in a prefix cache: the cause."""


def sample_page(run_dir: Path, call: int, prompt: int, member: int) -> SamplePage:
    """Read one sample for its page.

    Raises:
        SpecError: there is no such sample. EngineError: its rows can't be read.
    """
    try:
        wanted = [SampleId(call, prompt, member).pack()]
    except InternalError:  # No sample can have such a number.
        wanted = []
    page = next(sample_pages(run_dir, wanted), None)
    if page is None:
        raise SpecError(
            f"there is no sample {call}/{prompt}/{member} in {run_dir.name}", now="`m2flow samples RUN` lists those that there are."
        )
    return page


def with_stays(page: SamplePage, trace: RunTrace) -> SamplePage:
    """Add the turns and tool calls of an episode from the trace."""
    columns, packed = trace.columns, SampleId(page.call, page.prompt, page.member).pack()
    mine = np.flatnonzero((columns["sample"] == packed) & np.isin(trace.group, (SAMPLE, TURN))).tolist() if columns.num_spans else []
    stays = sorted((columns.span(at) for at in mine), key=lambda span: (span.start_ns, -span.end_ns))
    if not any(span.name in OF_EPISODES for span in stays):
        return page
    begin, end = stays[0].start_ns, max(span.end_ns for span in stays)
    page.passed = [
        Passed(
            shown_name(span),
            span.name == SpanName.TOOL,
            (span.start_ns - begin) // 1000,
            (span.end_ns - span.start_ns) // 1000,
            {name: value for name, value in span.attributes.items() if name not in ("sample", "call", "label", "turn")},
        )
        for span in stays
        if span.name in OF_EPISODES
    ]
    page.took, page.life = (end - begin) // 1000, with_turns(page.life, stays)
    return page


def sample_pages(run_dir: Path, wanted: Sequence[int]) -> Iterator[SamplePage]:
    """Read samples by their packed identities, in that order; those that don't exist are skipped.

    Raises:
        SpecError: the ledger can't be read. EngineError: rows can't be read.
    """
    with SampleQuery(run_dir) as query:
        for entry in query.entries(f"id IN ({', '.join(map(str, map(int, wanted)))})"):
            call, prompt, member = map(int, entry.sample.split("/"))
            who = SampleId(call, prompt, member)
            page = _page(entry, query.rows_of(who.pack()), who, query.tokenizers, query.updates_on(who.pack()))
            page.moved = query.moves_of(who.pack())
            yield page


def _page(entry: Entry, row: Batch, who: SampleId, tokenizers: RunTokenizers, updates: Sequence[str]) -> SamplePage:
    tokens = [int(token) for token in row.ragged("tokens").values] if "tokens" in row else []
    shown = tokens[:MOST_TOKENS]
    spoken = [(start, end, tokenizers.of(role)) for start, end, role in _spoken(row, entry, len(tokens))]
    has_texts = any(tokenizer is not None for _, _, tokenizer in spoken)
    pieces = [piece for start, end, tokenizer in spoken for piece in pieces_of(tokenizer, shown[start:end], are_texts=has_texts)]
    generated = _kinds(row, len(tokens)) == 1
    return SamplePage(
        call=who.call,
        prompt=who.prompt,
        member=who.index,
        step=entry.step,
        name=entry.call,
        site=entry.site,
        prompt_text=entry.prompt_text,
        response_text=entry.response_text,
        columns=entry.columns,
        finish=entry.finish,
        ending=entry.ending,
        reason=entry.reason,
        life=entry.life,
        rewards=entry.rewards,
        parts=entry.parts,
        pieces=pieces,
        has_texts=has_texts,
        kinds=_kinds(row, len(tokens))[:MOST_TOKENS].tolist(),
        logprobs=_numbers(row, "logprobs", generated)[:MOST_TOKENS],
        versions=[None if value is None else int(value) for value in _numbers(row, "versions", generated)[:MOST_TOKENS]],
        advantages=_numbers(row, "advantages", generated)[:MOST_TOKENS],
        experts=_experts(row)[:MOST_TOKENS],
        num_left_out=max(len(tokens) - MOST_TOKENS, 0),
        prompt_tokens=entry.prompt_tokens,
        response_tokens=entry.response_tokens,
        conversations=entry.conversations,
        blocks=blocks_of(row, entry, updates),
    )


def blocks_of(row: Batch, entry: Entry, updates: Sequence[str]) -> list[Block]:
    """Divide an episode's row by who said what, with which of these updates trained it; empty where it is one prompt and turn."""
    if "segment_kinds" not in row:
        return []
    kinds = [Segment(int(kind)) for kind in row.ragged("segment_kinds").values]
    if len(entry.conversations) < 2 and not {Segment.TOOL, Segment.SHARED} & set(kinds):
        return []
    tokens, record = row.ragged("tokens").values, records_of(row)[0]
    named = iter(record.get("conversations", ()))
    begun: dict[str, list[int]] = {}
    """Conversation -> where its sequences begin."""
    blocks, ends = list[Block](), np.cumsum(row.ragged("segment_lengths").values).tolist()
    reward_of = {one.name: one.reward for one in entry.conversations}
    whose, role, turn = "the model", role_of(row, entry.call, ""), 0
    for kind, start, end in zip(kinds, [0, *ends], ends, strict=False):
        title, trained, common = "Tools, users, the environment", "", 0
        match kind:
            case Segment.PROMPT:
                title, one = "Prompt", next(named, None)
                if one is not None:
                    by, before, turn = one.get("by", ""), begun.get(one["name"]) or begun.get(one["parent"], []), 0
                    whose, role = (f"{one['name']}, by {by}" if by else one["name"]), role_of(row, entry.call, by)
                    reward = reward_of.get(one["name"])
                    title = f"Prompt of {whose}" + ("" if reward is None else f", reward {reward:.5g}")
                    common = max((_num_alike(tokens, at, start, end) for at in before), default=0)
                    begun.setdefault(one["name"], []).append(start)
                    if common:
                        said = one["name"] if begun[one["name"]][1:] else one["parent"]
                        blocks.append(Block(start, start + common, False, f"What was said in {said} before", "trained there"))
            case Segment.GENERATED | Segment.SHARED:
                turn += 1
                title = f"Turn {turn} of {whose}"
                update = next((name for name in updates if name.startswith(f"{role}.")), "")
                trained = f"trained by {update}" if update else "trained by nobody" if updates else ""
                if kind is Segment.SHARED:
                    title, trained = f"{title}, of the episode that this is a branch of", "trained there"
        if end > start + common:
            blocks.append(Block(start + common, end, kind is Segment.GENERATED, title, trained))
    return blocks


def _num_alike(tokens: npt.NDArray[Any], one: int, start: int, end: int) -> int:
    """How many tokens from `start` to `end` are those from another place on."""
    ours = tokens[start:end]
    differs = ours != tokens[one : one + len(ours)]
    return int(differs.argmax()) if differs.any() else len(ours)


def _spoken(row: Batch, entry: Entry, num_tokens: int) -> list[tuple[int, int, str]]:
    """The parts of a row by the role whose tokens they are: first token, last token + 1, role."""
    named = records_of(row)[0].get("conversations", ())
    if not named or "segment_kinds" not in row:
        return [(0, num_tokens, role_of(row, entry.call, ""))]
    ends = np.cumsum(row.ragged("segment_lengths").values).tolist()
    begins = [at for at, kind in zip([0, *ends], row.ragged("segment_kinds").values.tolist(), strict=False) if kind == Segment.PROMPT]
    by = [str(one.get("by", "")) for one in named]
    return [(start, end, role_of(row, entry.call, who)) for start, end, who in zip(begins, [*begins[1:], num_tokens], by, strict=True)]


def pieces_of(tokenizer: Tokenizer | None, tokens: list[int], *, are_texts: bool = True) -> list[str]:
    """Decode each token after those before it; a character made of several tokens belongs to the last one.

    Args:
        tokenizer: None: of no known one; the pieces are numbers.
        are_texts: other pieces beside them are texts, from which numbers are told by brackets.
    """
    if tokenizer is None:
        return [f"[{token}]" if are_texts else str(token) for token in tokens]
    pieces, held = [], 0
    for at in range(len(tokens)):
        first = max(0, min(at - held, at) - _BEFORE)
        before = tokenizer.decode(tokens[first : at - held], skip_special_tokens=False)
        whole = tokenizer.decode(tokens[first : at + 1], skip_special_tokens=False)
        piece = whole[len(before) :] if whole.startswith(before) else whole
        if piece.endswith("\ufffd") and held < 3 and at + 1 < len(tokens):
            held += 1
            pieces.append("")
        else:
            held = 0
            pieces.append(piece)
    return pieces


def _kinds(row: Batch, num_tokens: int) -> IntArray:
    if "segment_kinds" not in row:
        return row.ragged("loss_mask").values.astype(np.int64) if "loss_mask" in row else np.zeros(num_tokens, np.int64)
    kinds = [{Segment.PROMPT: 0, Segment.GENERATED: 1}.get(Segment(int(kind)), 2) for kind in row.ragged("segment_kinds").values]
    return np.repeat(kinds, row.ragged("segment_lengths").values.astype(np.int64))


def _experts(row: Batch) -> list[str]:
    if "routed_experts" not in row:
        return []
    layers = expanded_experts(row.ragged("routed_experts").values).tolist()
    return [" | ".join(" ".join(map(str, experts)) for experts in of_token if min(experts) >= 0) for of_token in layers]


def _numbers(row: Batch, name: str, generated: npt.NDArray[np.bool_]) -> list[float | None]:
    """Return a column's values for generated tokens; None for other tokens and for values that are not finite."""
    if name not in row:
        return []
    values = row.ragged(name).values
    if len(values) != len(generated):
        return []
    return [
        round(float(value), 5) if is_own and np.isfinite(value) else None
        for value, is_own in zip(values.tolist(), generated.tolist(), strict=True)
    ]
