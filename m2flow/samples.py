"""Samples, their identities, and the columnar batch that all parts of m2flow exchange.

A sample is a sequence of segments (prompt, generated, text of a tool or an environment, shared) with per-token columns. A batch holds
N samples as columns: dense arrays of N rows, and ragged ones, which are one flat array and N + 1 offsets. Batches are cheap to
slice by identity, to concatenate, and to serialise (`m2flow.channels.codec`). NumPy only: torch stays in the engines.

Token columns of a generated batch (all ragged, T_i tokens in sample i, prompt included):

    tokens      int32    ids, as sampled; never re-tokenised
    loss_mask   bool     True where a loss may look: generated tokens, or the answer of a demonstration
    logprobs    float32  log-probability under the weights that sampled the token; 0 where the token was not sampled
    versions    int32    version of those weights; -1 where the token was not sampled
    kv_stale    bool     the KV cache it attended to was older than `versions`
    routed_experts  [T_i, layers, k]  of a mixture whose rollout engine says it: the experts that each token went to (`compact_experts`)

Of `generate(sampling_mask=True)`, `sampling_mask` (int32) says what each token was drawn from (`packed_masks`).

An episode of an agent (`m2flow.agents`) has several segments of each kind, and the columns of `EPISODE`. Each prompt among them begins a
sequence of its own, which a model reads by itself (`sequences_of`): another conversation of the episode, or one that goes on otherwise.

with `segment_kinds` (uint8, a `Segment`) and `segment_lengths` (int32) ragged over segments, and the dense `seed` (uint64),
`finish` (uint8, a `Finish`), and the texts `prompt` and `text`. Any other column is metadata of the dataset's row.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import DatasetError, InternalError, OpError, lone_surrogate

IdArray = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)

_INDEX_BITS, _PROMPT_BITS, _CALL_BITS = 12, 30, 21

_FEW = 32
"""Rows that are faster taken one by one than by an index of all their values."""

MAX_GROUP = 1 << _INDEX_BITS
"""Most samples of one prompt in a call."""


EPISODE = frozenset({"reward", "failure", "num_turns", "episode"})
"""Columns that an episode adds to its row: reward (nan: none), how it failed (empty: it did not), turns of the model, and its record."""


BRANCH_TURN = "branch_turn"
"""Column of a branch, and of the row that it is made from: the first turn that is not its parent's, from 1."""


MAIN = "main"
"""The conversation that an agent is given; all of an episode, unless it begins others."""


class Segment(enum.IntEnum):
    """The origin of a run of tokens."""

    PROMPT = 0
    GENERATED = 1
    TOOL = 2
    SHARED = 3
    """What the model said in another sample, which this branch of an episode goes on from. That one has its log-probabilities."""


class Finish(enum.IntEnum):
    """Why a sample stopped growing."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


@dataclass(frozen=True, order=True, slots=True)
class SampleId:
    """A sample's identity: the call that made it (in program order), its prompt's position there, its index in the group."""

    call: int
    prompt: int
    index: int

    def pack(self) -> int:
        """Pack the identity into one int64, ordered as the tuple is.

        >>> SampleId.unpack(SampleId(3, 17, 2).pack())
        SampleId(call=3, prompt=17, index=2)
        """
        if not (0 <= self.call < 1 << _CALL_BITS and 0 <= self.prompt < 1 << _PROMPT_BITS and 0 <= self.index < 1 << _INDEX_BITS):
            raise InternalError(f"sample identity out of range: {self!r}")
        return (self.call << _PROMPT_BITS | self.prompt) << _INDEX_BITS | self.index

    @classmethod
    def unpack(cls, packed: int) -> SampleId:
        """The identity that `pack` made this number of."""
        packed = int(packed)
        prompt = packed >> _INDEX_BITS & (1 << _PROMPT_BITS) - 1
        return cls(packed >> _INDEX_BITS + _PROMPT_BITS, prompt, packed & (1 << _INDEX_BITS) - 1)

    def __str__(self) -> str:
        return f"p{self.prompt}/{self.index}"

    def __repr__(self) -> str:
        return f"SampleId(call={self.call}, prompt={self.prompt}, index={self.index})"


ROUTED_EXPERTS = "routed_experts"
SAMPLING_MASK = "sampling_mask"
TOKEN_COLUMNS = frozenset({"tokens", "loss_mask", "logprobs", "versions", "kv_stale", "segment_kinds", "segment_lengths"})
"""Columns of every generated batch that say something of its tokens."""
ENGINE_COLUMNS = TOKEN_COLUMNS | {ROUTED_EXPERTS, SAMPLING_MASK}
"""Those, and the ones that some engines or options add."""

Masks = list[npt.NDArray[np.int32]]
"""For each sampled token of a sample, the ids that it was drawn from, in order; none: the whole vocabulary."""


def packed_masks(masks: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """A sample's masks as one row: how many ids each token's has, then all ids.

    >>> packed_masks([np.array([3, 5]), np.array([], int), np.array([4])]).tolist()
    [2, 0, 1, 3, 5, 4]
    """
    return np.concatenate([np.array([len(one) for one in masks], np.int32), *masks]).astype(np.int32)


def unpacked_masks(row: npt.NDArray[np.int32], num_tokens: int) -> Masks:
    """Undo `packed_masks` of so many tokens.

    >>> [one.tolist() for one in unpacked_masks(np.array([2, 0, 1, 3, 5, 4], np.int32), 3)]
    [[3, 5], [], [4]]
    """
    counts, ids = row[:num_tokens], row[num_tokens:]
    if len(counts) != num_tokens or counts.sum() != len(ids):
        raise InternalError(f"a sampling mask of {len(row)} numbers does not belong to {num_tokens} tokens")
    return np.split(ids, np.cumsum(counts)[:-1]) if num_tokens else []


def compact_experts(experts: npt.NDArray[np.int16], num_experts: int) -> npt.NDArray[np.int16] | npt.NDArray[np.uint8]:
    """The experts of tokens, [T, layers, k], in the fewest bytes that all of a model's fit: one each for up to 256 experts.

    A token's experts differ, so in bytes a token whose experts are all 0 stands for one whose experts are unknown; where a token has only
    one expert, or there are more than 256, the numbers stay int16, with -1 for unknown.

    >>> compact_experts(np.array([[[7, 0]], [[-1, -1]]], np.int16), 8).tolist()
    [[[7, 0]], [[0, 0]]]
    """
    if not 1 < num_experts <= 256 or experts.shape[-1] < 2:
        return experts
    return experts.clip(0).astype(np.uint8)


def expanded_experts(experts: npt.NDArray[np.generic]) -> npt.NDArray[np.int16]:
    """Undo `compact_experts`: int16, all -1 where a token's are unknown.

    >>> expanded_experts(np.array([[[7, 0]], [[0, 0]]], np.uint8)).tolist()
    [[[7, 0]], [[-1, -1]]]
    """
    found = experts.astype(np.int16)
    if experts.dtype == np.uint8:
        found[~(experts != 0).any((1, 2))] = -1
    return found


def make_ids(call: int, num_prompts: int, num_per_prompt: int = 1) -> IdArray:
    """The identities of a call's samples, in order: int64 [num_prompts * num_per_prompt]."""
    # Refuses what would run into the next group's identities.
    SampleId(call, max(num_prompts - 1, 0), max(num_per_prompt - 1, 0)).pack()
    first = call << _PROMPT_BITS + _INDEX_BITS
    prompts = np.arange(first, first + (num_prompts << _INDEX_BITS), 1 << _INDEX_BITS, dtype=np.int64)
    return prompts if num_per_prompt == 1 else (prompts[:, None] + np.arange(num_per_prompt, dtype=np.int64)).reshape(-1)


def group_keys(ids: IdArray) -> IdArray:
    """The group of each sample: its identity without the index, int64 [N]."""
    return ids >> _INDEX_BITS


def group_key(packed: int) -> int:
    """`group_keys` of one identity."""
    return packed >> _INDEX_BITS


def by_group(ids: Iterable[int]) -> dict[int, list[int]]:
    """Split identities by group key, in the order in which they come."""
    groups: dict[int, list[int]] = {}
    for packed in ids:
        groups.setdefault(group_key(packed), []).append(packed)
    return groups


def keyed_bits(*words: object) -> int:
    """Hash these words to 64 bits, the seed of a random stream: a function of the words and of nothing else."""
    text = "/".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@final
class KeyedWords:
    """`keyed_bits` of a sequence of words that grows: each is hashed once.

    >>> known = KeyedWords(["a", 1])
    >>> known.extend([2, 3])
    >>> known.bits(4) == keyed_bits("a", 1, 2, 3, 4)
    True
    """

    def __init__(self, words: Sequence[object] = ()) -> None:
        self._hash, self._separator = hashlib.blake2b(digest_size=8), ""
        self.extend(words)

    def extend(self, words: Sequence[object]) -> None:
        if len(words):
            self._hash.update((self._separator + "/".join(map(str, words))).encode())
            self._separator = "/"

    def bits(self, *more: object) -> int:
        """The bits of all words and of these after them."""
        found = self._hash.copy()
        if more:
            found.update((self._separator + "/".join(map(str, more))).encode())
        return int.from_bytes(found.digest(), "little")


def prompt_positions(ids: IdArray) -> IdArray:
    """The position of each sample's prompt in its call, int64 [N]."""
    return ids >> _INDEX_BITS & (1 << _PROMPT_BITS) - 1


def group_indices(ids: IdArray) -> IdArray:
    """The index of each sample in its group, int64 [N]."""
    return ids & (1 << _INDEX_BITS) - 1


class Ragged(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A column of N rows of different length, stored as one flat array.

    `values` is [total, ...] and `offsets` int64 [N + 1]; row i is values[offsets[i]:offsets[i + 1]].
    """

    values: npt.NDArray[np.generic]
    offsets: IdArray
    kind: Literal["numbers", "text", "json"] = "numbers"
    """`text` and `json` rows are UTF-8 bytes (uint8)."""

    @classmethod
    def of(cls, rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Ragged:
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        return cls(values, offsets_of([len(row) for row in arrays]))

    @classmethod
    def texts(cls, rows: Sequence[str]) -> Ragged:
        return cls._bytes([row.encode("utf-8", "surrogatepass") for row in rows], "text")

    @classmethod
    def json(cls, rows: Sequence[object]) -> Ragged:
        return cls._bytes([b"%d" % row if type(row) is int else json.dumps(row).encode() for row in rows], "json")

    @classmethod
    def _bytes(cls, rows: list[bytes], kind: Literal["text", "json"]) -> Ragged:
        offsets = offsets_of([len(row) for row in rows])
        offsets.flags.writeable = False  # As the bytes are: a batch of these alone is frozen already.
        return cls(np.frombuffer(b"".join(rows), np.uint8), offsets, kind)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IdArray:
        return self.offsets[1:] - self.offsets[:-1]

    def row(self, i: int) -> npt.NDArray[np.generic]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def item(self, i: int) -> object:
        """Row i as a Python value: an array, a `str`, or the decoded JSON."""
        if self.kind == "numbers":
            return self.row(i)
        text = self.row(i).tobytes().decode("utf-8", "surrogatepass")
        return text if self.kind == "text" else json.loads(text)

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        if 0 < len(rows) <= _FEW:
            parts = [
                self.values[start:end] for start, end in zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True)
            ]
            ends = list(itertools.accumulate(map(len, parts), initial=0))
            return Ragged(np.concatenate(parts), np.array(ends, np.int64), self.kind)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = offsets_of(lengths)
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets, self.kind)

    def stretch(self, start: int, end: int) -> Ragged:
        """Rows from `start` up to `end`, exclusive."""
        if start == 0 and end == len(self):
            return self
        offsets = self.offsets[start : end + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0], self.kind)


Column = npt.NDArray[np.generic] | Ragged


def taken(columns: Mapping[str, Column], index: IdArray) -> dict[str, Column]:
    """Take rows of each column by position, in this order."""
    if len(index) == 1 or (len(index) and index[-1] - index[0] == len(index) - 1 and bool((index[1:] > index[:-1]).all())):
        start, end = int(index[0]), int(index[-1]) + 1  # Of a stretch ragged columns share the memory.
        return {
            name: column.stretch(start, end) if isinstance(column, Ragged) else column[start:end].copy() for name, column in columns.items()
        }
    return {name: column.take(index) if isinstance(column, Ragged) else column[index] for name, column in columns.items()}


def column_of(rows: Sequence[object], name: str = "") -> Column:
    """Make a column of Python values: numbers dense, texts as text, the rest as JSON."""
    if all(isinstance(row, str) for row in rows):
        return Ragged.texts([str(row) for row in rows])
    if all(isinstance(row, bool | np.bool_) for row in rows):
        return np.asarray(rows, bool)
    try:
        if all(isinstance(row, int | np.integer) for row in rows):
            return np.asarray(rows, np.int64)
        if all(isinstance(row, int | float | np.integer | np.floating) for row in rows):
            return np.asarray(rows, np.float64)
        return Ragged.json(rows)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DatasetError(
            f"column {name!r} has values that are neither numbers, texts nor JSON: {error}",
            now="Turn them into one of these before they go into the dataset.",
        ) from None


class Batch(msgspec.Struct, frozen=True, eq=False):
    """N samples as columns, with their identities. Immutable by convention: methods return new batches, which share memory if they can."""

    ids: IdArray
    columns: Mapping[str, Column] = {}

    def __post_init__(self) -> None:
        num_rows = len(self.ids)
        for name, column in self.columns.items():
            if (len(column.offsets) - 1 if type(column) is Ragged else len(column)) != num_rows:
                raise InternalError(f"column {name!r} has {len(column)} rows in a batch of {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def dense(self, name: str) -> npt.NDArray[np.generic]:
        """A column with one value a sample."""
        column = self.columns[name]
        if isinstance(column, Ragged):
            raise InternalError(f"column {name!r} is ragged")
        return column

    def ragged(self, name: str) -> Ragged:
        """A column with a row of values a sample."""
        column = self.columns[name]
        if not isinstance(column, Ragged):
            raise InternalError(f"column {name!r} is dense")
        return column

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def take(self, rows: npt.ArrayLike) -> Batch:
        """Take rows by position, in this order."""
        index = np.asarray(rows, np.int64)
        return Batch(self.ids[index], taken(self.columns, index))

    def select(self, ids: IdArray) -> Batch:
        """Take samples by identity, in this order. A missing one is an `InternalError`."""
        if np.array_equal(self.ids, ids):
            return self
        order = np.argsort(self.ids, kind="stable")
        rows = order[np.minimum(np.searchsorted(self.ids, ids, sorter=order), max(len(order) - 1, 0))] if len(order) else order
        if len(ids) and (not len(order) or not np.array_equal(self.ids[rows], ids)):
            missing = [str(SampleId.unpack(i)) for i in np.setdiff1d(ids, self.ids)[:5]]
            raise InternalError(f"samples {', '.join(missing)} are not in this batch of {len(self)}")
        return self.take(rows)

    def in_order(self) -> Batch:
        """The same samples, sorted by identity."""
        return self if len(self.ids) < 2 or bool((self.ids[1:] > self.ids[:-1]).all()) else self.take(np.argsort(self.ids, kind="stable"))

    def frozen(self) -> Batch:
        """The same rows as read-only views, without a copy."""
        if not any(array.flags.writeable for array in self._arrays()):
            return self
        columns = {
            name: Ragged(_read_only(c.values), _read_only(c.offsets), c.kind) if isinstance(c, Ragged) else _read_only(c)
            for name, c in self.columns.items()
        }
        return Batch(_read_only(self.ids), columns)

    def _arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        yield self.ids
        for column in self.columns.values():
            if isinstance(column, Ragged):
                yield column.values
                yield column.offsets
            else:
                yield column

    def only(self, names: Iterable[str]) -> Batch:
        """The batch with these columns alone."""
        return Batch(self.ids, {name: self.columns[name] for name in names})

    def without(self, names: Iterable[str]) -> Batch:
        """The batch without these columns."""
        dropped = set(names)
        return Batch(self.ids, {name: column for name, column in self.columns.items() if name not in dropped})

    def with_columns(self, **columns: Column) -> Batch:
        """The batch with these columns, new or in place of its own."""
        return Batch(self.ids, {**self.columns, **columns})

    def join(self, other: Batch) -> Batch:
        """Add the other batch's columns for the same samples; they replace columns of the same name."""
        return Batch(self.ids, {**self.columns, **other.select(self.ids).columns})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenate batches, which must all have the same columns."""
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return Batch(np.zeros(0, np.int64))
        names = set(batches[0].columns)
        if any(set(batch.columns) != names for batch in batches):
            raise InternalError(f"batches of different columns: {[sorted(batch.columns) for batch in batches]}")
        ids = np.concatenate([batch.ids for batch in batches])
        return Batch(ids, {name: _concat([batch.columns[name] for batch in batches]) for name in batches[0].columns})

    def group_bounds(self) -> list[tuple[int, int]]:
        """Row ranges [start, end) of the groups. The batch must be in order."""
        cuts = np.flatnonzero(np.diff(group_keys(self.ids))) + 1
        edges = [0, *cuts.tolist(), len(self)]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]

    def rows(self) -> Iterator[Sample]:
        """Iterate over the samples as a user's function sees them."""
        return (Sample(self, row) for row in range(len(self)))


def sequences_of(batch: Batch) -> tuple[IdArray, IdArray] | None:
    """Find the sequences that a model reads by themselves, where rows have several.

    Returns:
        Where each begins in the flat token columns, and the end of the last, int64 [S + 1]; and the row of each, int64 [S]. None: every
        row is one sequence.

    >>> rows = Batch(np.array([0, 1]), {
    ...     "segment_kinds": Ragged.of([[0, 1, 0, 1], [0, 1]], np.uint8), "segment_lengths": Ragged.of([[2, 1, 3, 1], [2, 2]], np.int32)
    ... })
    >>> [found.tolist() for found in sequences_of(rows)]
    [[0, 3, 7, 11], [0, 0, 1]]
    """
    if "segment_kinds" not in batch:
        return None
    kinds, counts = batch.ragged("segment_kinds"), batch.ragged("segment_lengths").values.astype(np.int64)
    begins = kinds.values == Segment.PROMPT
    if np.count_nonzero(begins) <= len(batch):
        return None
    begins[kinds.offsets[:-1][kinds.lengths > 0]] = True
    starts = (np.cumsum(counts) - counts)[begins]
    return np.concatenate((starts, [counts.sum()])), np.repeat(np.arange(len(batch)), kinds.lengths)[begins]


def records_of(batch: Batch) -> list[Mapping[str, Any]]:
    """The record of each row's episode (`m2flow.agents.episodes`); empty of a row that is none."""
    if "episode" not in batch:
        return [{}] * len(batch)
    column = batch.ragged("episode")
    return [cast("Mapping[str, Any]", column.item(row)) for row in range(len(batch))]


def check_one_reward(batch: Batch, what: str) -> None:
    """Check that the conversations of each episode go by one reward. Raises `OpError`: they do not; `what` would take their mean."""
    if sequences_of(batch) is None:
        return
    for packed, record in zip(batch.ids.tolist(), records_of(batch), strict=True):
        used = {record["rewards"][name] for name in record.get("rewarded", {}).values()}
        if len(used) > 1:
            said = f"the conversations of sample {SampleId.unpack(packed)} have rewards of their own, and {what} takes one for an episode"
            raise OpError(said, now="update(..., advantages=by_conversation()) compares each with its like.").about(packed)


def first_sequences(batch: Batch, most: int) -> list[npt.NDArray[np.generic]]:
    """The first tokens of each row, at most so many, and none of a second sequence."""
    tokens, found = batch.ragged("tokens"), sequences_of(batch)
    ends = tokens.offsets[1:] if found is None else found[0][1:][np.unique(found[1], return_index=True)[1]]
    return [tokens.values[start : min(end, start + most)] for start, end in zip(tokens.offsets[:-1].tolist(), ends.tolist(), strict=True)]


Message = Mapping[str, object]
"""A message of a conversation: a `role`, a `content` (a text, or a list of parts) and whatever else the chat template reads."""
Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


def check_prompt(prompt: object, what: str) -> Prompt:
    """Check that a value is a text, or a list of messages. Returns it.

    Raises:
        DatasetError: it is neither, or a text has half of a surrogate pair; `what` names it.
    """
    if isinstance(prompt, str):
        _check_whole(prompt, what)
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt:
        raise DatasetError(f"{what} is {prompt!r:.60}; it must be a text or a list of messages", now=_MESSAGES_LIKE)
    for at, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(f"message {at} of {what} has no role: {message!r:.60}", now=_MESSAGES_LIKE)
        content = message.get("content")
        is_parts = isinstance(content, list | tuple) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content)
        if not isinstance(content, str) and not is_parts and not (content is None and "tool_calls" in message):
            others = [p for p in content if isinstance(p, Mapping) and "text" not in p] if isinstance(content, list | tuple) else []
            if others and isinstance(kind := others[0].get("type"), str):
                now = "Leave the part out, or say in a text what it shows."
                raise DatasetError(f"message {at} of {what} has a part of the type {kind!r}; models here read texts alone", now=now)
            raise DatasetError(
                f"message {at} of {what} has the content {content!r:.60}; it must be a text, or a list of parts with texts",
                now=_MESSAGES_LIKE,
            )
        for text in [content] if isinstance(content, str) else [part["text"] for part in content or ()]:
            _check_whole(text, f"message {at} of {what}")
    return prompt


def _check_whole(text: str, what: str) -> None:
    if (at := lone_surrogate(text)) >= 0:
        raise DatasetError(
            f"{what} has half of a surrogate pair at character {at}: {text!r:.60}",
            now="Mend the text: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').",
        )


_MESSAGES_LIKE = 'Messages are like [{"role": "user", "content": "What is 2 + 2?"}].'


class Sample:
    """One row of a batch, as a user's function sees it: each of its columns by name, `sample.answer` or `sample["answer"]`.

    The dataset's columns, `prompt` among them, and `text`, the response. `tokens` has the tokens of both, `logprobs` and `loss_mask` a
    value for each; the mask is true where it was generated. Rows that a refill gave have a `reward`. Those of an agent have the
    `reward` that it returned, `num_turns`, `failure` (empty if there was none) and `episode`, a mapping with `turns`, `tools` and
    `rewards`.
    """

    __slots__ = ("_batch", "_row")

    if TYPE_CHECKING:
        text: str
        """The response."""

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch = batch
        self._row = row

    @property
    def id(self) -> SampleId:
        """Its identity: the call, its prompt's position there, and its index in the group."""
        return SampleId.unpack(int(self._batch.ids[self._row]))

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return int(np.count_nonzero(self._batch.ragged("loss_mask").row(self._row)))

    @property
    def finish(self) -> Finish:
        """How the response ended: `Finish.STOP`, `LENGTH` or another."""
        return Finish(int(self._batch.dense("finish")[self._row]))

    @property
    def messages(self) -> list[Message]:
        """The messages of the prompt; of a text, one of the user. The response is in `text`."""
        prompt = self.__getattr__("prompt")
        return list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]

    @property
    def prompt_text(self) -> str:
        """What the model saw: the prompt as the chat template made it, special tokens included; of a raw prompt its text."""
        return str(self["prompt_text"] if "prompt_text" in self._batch else self.__getattr__("prompt"))

    def __getitem__(self, name: str) -> Any:
        column = self._batch.columns[name]
        if isinstance(column, Ragged):
            return column.item(self._row)
        value = column[self._row]
        return value.item() if isinstance(value, np.generic) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            own = sorted(set(self._batch.columns) - ENGINE_COLUMNS - {"seed", "finish", "prompt_text"})
            raise AttributeError(
                f"the sample has no {name!r}; it has {', '.join(own)}, id, num_tokens, finish, messages, prompt_text"
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        if name not in Sample.__slots__:
            raise AttributeError(
                f"a sample can't be changed: {name!r} was set; return what is computed, and an op's result may be a column"
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Sample({self.id}, prompt={self['prompt']!r}, text={self['text']!r})" if "text" in self._batch else f"Sample({self.id})"


def rows_of(samples: Sequence[Sample]) -> Batch:
    """Collect samples of one batch into a batch, in this order."""
    return samples[0]._batch.take([sample._row for sample in samples]) if samples else Batch(np.zeros(0, np.int64))


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


def offsets_of(lengths: npt.ArrayLike) -> IdArray:
    """Where rows of these lengths begin in a ragged column, and where the last one ends, int64 [N + 1]."""
    if isinstance(lengths, list) and len(lengths) <= _FEW:
        return np.array([0, *itertools.accumulate(lengths)], np.int64)
    offsets = np.zeros(len(np.asarray(lengths)) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _concat(columns: list[Column]) -> Column:
    first = columns[0]
    if isinstance(first, Ragged):
        ragged = [column for column in columns if isinstance(column, Ragged)]
        if len({column.kind for column in ragged}) > 1:  # Texts and messages.
            return Ragged.json([column.item(i) for column in ragged for i in range(len(column))])
        lengths = np.concatenate([column.lengths for column in ragged])
        return Ragged(np.concatenate([column.values for column in ragged]), offsets_of(lengths), first.kind)
    return np.concatenate([column for column in columns if not isinstance(column, Ragged)])
