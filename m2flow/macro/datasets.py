"""Datasets: the source of prompts, with a cursor that the run records.

A dataset is a resource of the flow: each `take` reads it at the cursor and advances the cursor, in program order. Its result is a call
like any other (`data()` in the printed graph), so that a replay can answer it.

    Python's rows; files --row_files--> Dataset --draw_order--> the rows of a `take`

What is drawn depends on the seed and the number of rows drawn before, and on nothing else, so that a resumed run goes on at the very row.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import DatasetError, MissingExtra, OptionError, TraceError
from m2flow.macro.capture import are_alike, pure_leaves
from m2flow.macro.columns import ReduceByKey
from m2flow.macro.draw_order import ROW, Curriculum, Epochs, ListedRows, Mix, Observed, Order, Row, order_of
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Rows, describe
from m2flow.macro.row_files import (
    FORMATS,
    QUESTIONS,
    TAKEN,
    ChangedRows,
    Columns,
    Csv,
    HeldRows,
    JsonLines,
    MixedRows,
    Parquet,
    Paths,
    RowFile,
    RowsOnDisk,
    StoredRows,
    check_is_text,
    dataset_folder,
    existing,
    files_of_split,
    mapped,
    message_of,
    said_last,
    value_of,
    with_prompts,
)
from m2flow.macro.session import Session, current_session
from m2flow.recipe import check_choice, check_count, check_flag, check_number, check_text, is_count
from m2flow.samples import Batch, Column, Ragged, check_prompt, column_of, keyed_bits, make_ids, prompt_positions, taken

if TYPE_CHECKING:
    from m2flow.macro.roles import Policy

TooLong = Literal["error", "drop", "truncate-left", "truncate-middle"]


@final
class _RowsOfFiles(list[Row]):
    """Rows with their places, FILE:LINE each."""

    places: Sequence[str] = ()


def _answers(row: Row, what: str) -> tuple[str, str]:
    """The texts of the chosen and the rejected answer of a row.

    Raises:
        DatasetError: one is no text and no messages, or answers something else than the row's prompt.
    """
    prompt = row["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = []
    for name in ("chosen" if "chosen" in row else "target", "rejected"):
        said = row[name]
        messages = [message_of(one) for one in said] if isinstance(said, list | tuple) else said
        answer = said_last(messages)
        check_is_text(messages, f"the {name!r} of {what}")
        if messages in (None, [], ()) or not isinstance(answer, str):
            raise DatasetError(
                f"the {name!r} of {what} is neither a text nor messages: {said!r:.60}",
                now="Make it a text, or a list of messages: {'role': ..., 'content': ...}.",
            )
        if isinstance(messages, list) and messages[:-1] not in ([], before):
            now = "Both answers of a pair have one beginning."
            raise DatasetError(f"the {name!r} of {what} answers another conversation than its prompt", now=now)
        found.append(answer)
    return found[0], found[1]


_ANSWERS = ("chosen", "rejected", "target")
"""Columns of answers, of which a pair has `target` alone: both."""


def _as_pair(row: Row, what: str) -> Row:
    """A row with both answers as its target. Raises DatasetError as `_answers` does."""
    return {**{key: value for key, value in row.items() if key not in _ANSWERS}, "target": _answers(row, what)}


def _of_two(columns: Mapping[str, Column], count: int) -> dict[str, Column]:
    """Columns of the samples of `count` pairs, from those of the pairs: the chosen answer first."""
    answers = columns["target"]
    assert isinstance(answers, Ragged)
    texts = [str(text) for i in range(count) for text in cast("tuple[str, str]", answers.item(i))]
    labels = np.tile(np.array([1.0, 0.0]), count)
    return {**taken(columns, np.arange(count).repeat(2)), "target": Ragged.texts(texts), "chosen": labels}


_NAMED = 8
"""Rows that a plan names of those that were too long."""


@dataclass(frozen=True)
class _Fitting:
    """The prompts of a dataset that have no more tokens than a limit, or were shortened to it."""

    kept: list[int]
    num_shortened: int
    shortened: dict[int, object]
    """Row -> its prompt then; empty where prompts are shortened as they are drawn."""
    shown: dict[str, object]
    """What a plan shows of the others."""


@final
class _PromptLimit:
    """Bounds prompts to so many tokens, as a policy sees them."""

    def __init__(self, codec: Any, limit: int, too_long: TooLong, name: str, place: Callable[[int], str]) -> None:
        self._codec = codec
        self._limit = limit
        self._too_long = too_long
        self._name = name
        self._place = place

    @classmethod
    def of(cls, policy: Policy | None, limit: int, too_long: TooLong, name: str, place: Callable[[int], str]) -> _PromptLimit:
        """A limit of the dataset of this name; `place` says where a row is. Raises OptionError: there is no such policy in the flow."""
        session = current_session(f"the dataset {name!r}")
        if policy is None or getattr(policy, "name", None) not in session.models:
            raise OptionError(f"max_prompt_tokens={limit} counts the tokens of a policy, and got policy={policy!r:.60}", now=_POLICY)
        # Tokenizers are the engines', and are loaded only where a flow counts by them.
        codec = importlib.import_module("m2flow.engines.models.model_files").load_tokenizer(session.models[policy.name])
        return cls(codec, limit, too_long, name, place)

    def fitted(self, prompt: object, row: int) -> object:
        """A prompt, shortened if it is too long; None if its row is to be left out.

        Raises:
            DatasetError: it is too long and is to be an error, or can't be shortened.
        """
        count = len(self._codec.encode_prompt(prompt))
        if count <= self._limit:
            return prompt
        if self._too_long == "error":
            raise DatasetError(
                f"the prompt of {self._place(row)} has {count} tokens, and max_prompt_tokens is {self._limit}",
                now='Raise it, or say what becomes of such rows: too_long="drop", "truncate-left" or "truncate-middle".',
            )
        if self._too_long == "drop":
            return None
        shortened = self._codec.shortened(prompt, self._limit, in_middle=self._too_long == "truncate-middle")
        if shortened is None:
            raise DatasetError(f"the prompt of {self._place(row)} can't be shortened to {self._limit} tokens", now="Raise the limit.")
        return cast("object", shortened)

    def fitting(self, prompts: Iterable[object], *, keeps: bool) -> _Fitting:
        """Choose the rows whose prompts fit. With `keeps`, those that were shortened are returned with them.

        Raises:
            DatasetError: as `fitted`; or no row is left.
        """
        kept: list[int] = []
        shortened: dict[int, object] = {}
        found: list[int] = []
        num_rows = num_found = 0
        for i, prompt in enumerate(prompts):
            num_rows += 1
            fitted = self.fitted(prompt, i)
            if fitted is not None:
                kept.append(i)
            if fitted is prompt:
                continue
            num_found += 1
            if len(found) <= _NAMED:
                found.append(i)
            if keeps and fitted is not None:
                shortened[i] = fitted
        if not kept:
            now = "Raise max_prompt_tokens."
            raise DatasetError(f"all {num_rows} prompts of the dataset {self._name!r} have more than {self._limit} tokens", now=now)
        named = ", ".join(map(str, found[:_NAMED])) + (", ..." if num_found > _NAMED else "")
        is_drop = self._too_long == "drop"
        shown = {"dropped" if is_drop else "truncated": f"{num_found} of {num_rows} rows: {named}"} if num_found else {}
        return _Fitting(kept, 0 if is_drop else num_found, shortened, dict(shown))


_POLICY = "Write Dataset(rows, policy=policy, max_prompt_tokens=512)."


def _check_whole(name: str, value: object) -> None:
    """Check that a value is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} is {value!r:.60}; it must be a whole number")


def _now(row: Row) -> str:
    """What to write for rows without a prompt."""
    column = next((column for column in QUESTIONS if column in row), None)
    if column is None or "prompt" in row:
        return 'A row has a text or messages under "prompt", or a conversation under "messages" or "conversations".'
    prompt = f'row["{column}"]' + (r' + "\n\n" + row["input"]' if column == "instruction" and "input" in row else "")
    return f'Write Dataset([{{**row, "prompt": {prompt}}} for row in rows]).'


_MOST_KEPT = 200_000
"""Rows that are kept of those that functions made, over all datasets."""
_MOST_BYTES = 128 << 20
"""Bytes of these rows: they outlive the flow whose they are."""
_keeping = threading.Lock()
_kept: list[tuple[list[object], int, int, Dataset]] = []
"""What a function captures, size and seed -> the rows that it made, those used last at the end. A flow is followed several times before
it runs, and makes its datasets each time: in most of the flows here that took longer than all else of planning."""


def _seeded(rng: random.Random, seed: str) -> random.Random:
    """The generator, as if it had been made with this seed: that takes twice as long."""
    rng.seed(seed)
    return rng


@functools.lru_cache(maxsize=32)
def _seeds_of_all(key: str, number: int, count: int) -> npt.NDArray[np.uint64]:
    """The seeds of `count` rows that are drawn all at once for the so manieth time: uint64 [count]."""
    return np.array([keyed_bits(key, f"all {number}", i) for i in range(count)], np.uint64)


def _kept_rows(leaves: list[object], size: int, seed: int) -> Dataset | None:
    """A dataset of the same rows that was made before."""
    with _keeping:
        for i, (others, *of, made) in enumerate(_kept):
            if of == [size, seed] and are_alike(leaves, others):
                _kept.append(_kept.pop(i))
                return made
    return None


def _keep_rows(leaves: list[object], size: int, seed: int, made: Dataset) -> None:
    with _keeping:
        _kept.append((leaves, size, seed, made))
        while sum(size for _, size, _, _ in _kept) > _MOST_KEPT or sum(_bytes_of(one) for *_, one in _kept) > _MOST_BYTES:
            del _kept[0]


def _bytes_of(made: Dataset) -> int:
    columns = made._columns.values()
    return sum(one.offsets.nbytes + one.values.nbytes if isinstance(one, Ragged) else one.nbytes for one in columns)


class Dataset:
    """Rows with a `prompt`, any other columns being metadata (a `target` makes a row a demonstration, which the end token follows).

    Args:
        rows: mappings of the same keys, each with a text or a list of messages under `prompt`. Rows with `messages`, or `conversations`
            as ShareGPT has them, are taken apart: a last message of the assistant is the `target`, those before it are the prompt. So
            is `chosen`, if it is a conversation; beside a `prompt` its text is the target. `pairs()` sets `rejected` beside it.
        max_prompt_tokens: most tokens of a prompt, counted as `policy` sees it: by its tokenizer, in its chat template.
        too_long: what becomes of longer ones: an error that names the row; `drop` leaves the row out; `truncate-left` and
            `truncate-middle` take tokens out of the prompt, of messages out of the longest. The plan says how many and which.
        shuffle: draw in an order of its own in each epoch, decided by the run's seed.
        name: for plans and errors.
        curriculum: each epoch goes from the lowest to the highest value of this column of numbers, or of this function of a row; rows of
            one value are shuffled. A function of a row and of what was seen of it (the means that `observe` was given, oldest first) is
            asked again as these come; None passes the row over for now. It adds a column `row`, the row's position.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        name: str = "dataset",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        policy: Policy | None = None,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
    ) -> None:
        if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
            raise DatasetError(f"Dataset got a {type(rows).__name__}", now="Give a list of rows: mappings that have a `prompt`.")
        self.name = name
        self._stored: StoredRows | None = None
        """Rows that are read when they are drawn; `_columns` has the first one then."""
        self._places = rows.places if isinstance(rows, _RowsOfFiles) else None
        """Where each row is, if they are from files and in memory."""
        places, place = self._places, self._place
        rows = list(rows)
        if not rows:
            raise DatasetError(f"the dataset {name!r} has no rows", now="A flow needs at least one prompt; check its path or its filter.")
        usual = rows[0].keys() if type(rows[0]) is dict and all(isinstance(key, str) for key in rows[0]) else None
        for i, row in enumerate(rows):
            if type(row) is dict and row.keys() == usual:
                continue
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise DatasetError(
                    f"{place(i)} is no mapping of names to values: {row!r:.60}",
                    now="Make each row a mapping, such as {'prompt': 'What is 2 + 2?', 'answer': '4'}.",
                )
        rows = with_prompts(rows, place)
        keys = set(rows[0])
        if keys & TAKEN:
            column = min(keys & TAKEN)
            now = f"Rename the column, to {column}_of_row for example."
            raise DatasetError(f"the dataset {name!r} has a column {column!r}, a name that samples have already", now=now)
        for i, row in enumerate(rows):
            if (row.keys() if type(row) is dict else set(row)) != keys:
                raise DatasetError(
                    f"{place(i)} has the columns {sorted(row)}, {'row 0' if places is None else place(0)} has {sorted(keys)}",
                    now="Give all rows the same columns; where a value is missing, say None.",
                )
            prompt = row.get("prompt")
            if not isinstance(prompt, str | list | tuple):
                raise DatasetError(f"{place(i)} has no text under 'prompt': {prompt!r:.60}", now=_now(row))
            if type(prompt) is not str or not prompt.isascii():
                check_prompt(prompt, f"the prompt of {place(i)}")
        check_text("name", name)
        check_flag("shuffle", shuffle)
        check_choice("too_long", too_long, TooLong)
        self._cut: dict[str, object] = {}
        if max_prompt_tokens is not None:
            check_count("max_prompt_tokens", max_prompt_tokens)
            limit = _PromptLimit.of(policy, max_prompt_tokens, too_long, name, place)
            fitting = limit.fitting((row["prompt"] for row in rows), keeps=True)
            rows = [{**rows[i], "prompt": fitting.shortened.get(i, rows[i]["prompt"])} for i in fitting.kept]
            self._cut = fitting.shown
            assert places is None, "rows of files are bounded by `within`"
        elif policy is not None:
            raise OptionError("policy= goes with max_prompt_tokens=", now="Leave it out, or say how many tokens a prompt may have.")
        self._columns: dict[str, Column] = {key: column_of([row[key] for row in rows], key) for key in sorted(keys)}
        self._num_rows = len(rows)
        self._num_each = 1
        """Samples of a row: 2 are the answers of a pair."""
        self._order = order_of(ListedRows(rows), curriculum, name, shuffle=shuffle)
        self._cursor = 0
        self._num_alls = 0
        self._first_unsure = 0
        self._refilled: Rows | None = None
        """Rows that a refill kept from `_first_unsure` on: the last sample tells how many were used, and so where the cursor is."""
        self._session: Session | None = None
        self._key = ""
        self._unread: list[Handle] = []
        """What `observe` has recorded, and no draw has read yet."""
        self._lag = 0

    @classmethod
    def generate(
        cls,
        make: Callable[[random.Random], Row],
        size: int,
        *,
        seed: int = 0,
        name: str = "dataset",
        shuffle: bool = False,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Make `size` rows by a function of a random generator; row i depends on (seed, i) alone."""
        if not callable(make):
            raise DatasetError(f"Dataset.generate got make={make!r:.60}; it takes a function of a random generator that gives a row")
        check_count("size", size)
        _check_whole("seed", seed)

        leaves = pure_leaves(make) if cls is Dataset and curriculum is None and size <= _MOST_KEPT else None
        if leaves is None:
            return cls([make(random.Random(f"{seed}/{i}")) for i in range(size)], name=name, shuffle=shuffle, curriculum=curriculum)
        known = _kept_rows(leaves, size, seed)
        if known is None:
            rng = random.Random(0)
            known = cls([make(_seeded(rng, f"{seed}/{i}")) for i in range(size)], name=name)
            _keep_rows(leaves, size, seed, known)
        check_text("name", name)
        check_flag("shuffle", shuffle)
        made = copy.copy(known)
        made.name, made._order, made._unread = name, Epochs(size, None, shuffle=shuffle), []
        return made

    @classmethod
    def jsonl(
        cls,
        path: Paths,
        *,
        columns: Columns | None = None,
        stream: bool = False,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read rows from a file of a JSON object a line, or from several files of the same columns.

        Args:
            columns: our name -> the file's, or a function of the row: `{"prompt": "question", "answer": "final"}`; no others are kept.
                By default all are, under their own names, and the usual ones of math and code sets are recognised: `question` (with
                `answer`) and `problem` (with `solution` or `answer`) are the prompt, as is MBPP's `text`; `input_output` (APPS) and
                `test_list` (MBPP) are the `test`. A name that samples have already gets `_of_row` after it: `id_of_row`.
            stream: keep in memory where each row lies (24 bytes), and read rows when they are drawn: for files that do not fit. The draws
                are the same. All rows are checked once at the start.
            name: by default the file's.
        Raises:
            DatasetError: FILE:LINE is no JSON object, lacks a column, or has no prompt.
        """
        return cls._read(JsonLines, path, columns, stream, name, shuffle, curriculum)

    @classmethod
    def csv(
        cls,
        path: Paths,
        *,
        columns: Columns | None = None,
        stream: bool = False,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read rows from CSV files with a line of names; every value is a text. `stream` and the other arguments are those of `jsonl`."""
        return cls._read(Csv, path, columns, stream, name, shuffle, curriculum)

    @classmethod
    def parquet(
        cls,
        path: Paths,
        *,
        columns: Columns | None = None,
        stream: bool = False,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read rows from Parquet files (`pip install 'm2flow[parquet]'`). The arguments are those of `jsonl`.

        With `stream`, a row is read with its row group, of which the last one is kept: a shuffled batch reads as many groups as it has
        rows in, and `shuffle=False` each group once.
        """
        return cls._read(Parquet, path, columns, stream, name, shuffle, curriculum)

    @classmethod
    def hf(
        cls,
        repo: str,
        *,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        columns: Columns | None = None,
        stream: bool = False,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read a split of a dataset of the Hugging Face hub, or of a directory laid out like one: Parquet, JSONL or CSV files.

        Args:
            repo: `openai/gsm8k`, or a directory. What is in huggingface_hub's cache is not downloaded again.
            split: a word of the files' names (`train-00000-of-00001.parquet`) or folders. config: the folder they are in, if several
                have that split. revision: a branch, tag or commit; by default the newest. `stream` and the others are those of `jsonl`.
        """
        check_text("repo", repo)
        check_text("split", split)
        files = files_of_split(dataset_folder(repo, revision), repo, split, config)
        name = name or f"{repo.rstrip('/').rpartition('/')[2]}-{split}"
        return cls._read(FORMATS[files[0].suffix], files, columns, stream, name, shuffle, curriculum)

    @classmethod
    def reasoning_gym(
        cls,
        task: str,
        *,
        size: int,
        seed: int = 0,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        **options: object,
    ) -> Dataset:
        """Make rows of a task of reasoning-gym: `prompt`, `answer`, and the whole `entry`, for `m2flow.rewards.ReasoningGym(task)`.

        Rows are JSON, in which a tuple is a list, and some tasks tell the two apart; `entry["literal"]` is its metadata as Python.

        Args:
            size: rows. seed: of the task's own generator.
            options: the task's own, such as `min_terms=2` of `chain_sum`.
        """
        check_count("size", size)
        _check_whole("seed", seed)
        try:
            import reasoning_gym
        except ImportError:
            now = "Run: pip install 'm2flow[smollm]'."
            raise MissingExtra("Dataset.reasoning_gym needs the package reasoning-gym, which is not installed", now=now) from None
        try:
            entries = list(reasoning_gym.create_dataset(task, size=size, seed=seed, **options))
        except (AssertionError, TypeError, ValueError) as error:
            raise DatasetError(
                f"reasoning-gym makes no {task!r} with {options}: {error}",
                now="`reasoning_gym.factory.DATASETS` lists its tasks; options are those of the task's configuration.",
            ) from None
        rows = [{"prompt": entry["question"], "answer": str(entry["answer"]), "entry": _with_types(entry)} for entry in entries]
        return cls(rows, name=name or task, shuffle=shuffle, curriculum=curriculum)

    @classmethod
    def _read(
        cls,
        kind: type[RowFile],
        path: Paths,
        columns: Columns | None,
        stream: bool,
        name: str,
        shuffle: bool,
        curriculum: Curriculum | None,
    ) -> Dataset:
        check_flag("stream", stream)
        check_flag("shuffle", shuffle)
        files = [kind(one) for one in existing(path)]
        name = name or files[0].path.stem
        if stream:
            stored = RowsOnDisk(files, columns)
            return cls._of_stored(stored, name, order_of(stored, curriculum, name, shuffle=shuffle))
        places: list[str] = []
        rows = _RowsOfFiles(mapped(itertools.chain.from_iterable(file.rows() for file in files), columns, places))
        rows.places = places
        if not rows:
            raise DatasetError(f"{files[0].path} has no rows", now="A flow needs at least one prompt.")
        return cls(rows, name=name, shuffle=shuffle, curriculum=curriculum)

    @classmethod
    def _of_stored(cls, stored: StoredRows, name: str, order: Order) -> Dataset:
        made = cls(stored.rows_at([0]), name=name)
        made._stored, made._num_rows, made._order = stored, len(stored), order
        return made

    def split(self, heldout: int | float, *, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Divide the rows at random, but by this seed alone: into most of them, and `heldout` ones (a count, or a share below 1)."""
        check_number("heldout", heldout, above=0)
        if heldout >= 1:
            _check_whole("heldout", heldout)
        _check_whole("seed", seed)
        size = round(heldout * len(self)) if heldout < 1 else int(heldout)
        if isinstance(self._order, Mix) or not 0 < size < len(self):
            raise DatasetError(
                f"the dataset {self.name!r} has {len(self)} rows, of which {size} can't be held out"
                if not isinstance(self._order, Mix)
                else "a mix can't be split",
                now="Hold out fewer rows, or more; split the datasets before mixing them.",
            )
        order = list(range(len(self)))
        random.Random(f"{seed}/split").shuffle(order)
        chosen = sorted(order[:size])
        return self._part(sorted(order[size:]), self.name), self._part(chosen, f"{self.name}-heldout")

    def shard(self, index: int, count: int) -> Dataset:
        """Every `count`-th row, beginning with the one at `index`: one of `count` parts that have each row once between them.

        mine = Dataset.jsonl("train.jsonl", stream=True).shard(2, 8)
        """
        check_count("count", count)
        check_count("index", index, least=0)
        if isinstance(self._order, Mix):
            raise DatasetError("a mix has no shards", now="Mix the shards of its datasets.")
        if index >= count:
            raise OptionError(f"the dataset {self.name!r} has no shard {index} of {count}", now=f"Count shards from 0 to {count - 1}.")
        if index >= len(self):
            raise DatasetError(
                f"the dataset {self.name!r} has {len(self)} rows, and none in shard {index} of {count}",
                now="Take fewer shards than there are rows.",
            )
        return self._part(range(index, len(self), count), f"{self.name}-{index}of{count}")

    def within(self, policy: Policy, max_prompt_tokens: int, *, too_long: TooLong = "error") -> Dataset:
        """Bound the prompts' tokens, as `Dataset(rows, policy=, max_prompt_tokens=, too_long=)` does, of rows from wherever they are.

            prompts = Dataset.jsonl("train.jsonl").within(policy, max_prompt_tokens=512, too_long="drop")

        A stream (`stream=True`) is read once for it, and its prompts are shortened as they are drawn.
        """
        check_count("max_prompt_tokens", max_prompt_tokens)
        check_choice("too_long", too_long, TooLong)
        if isinstance(self._order, Mix):
            raise DatasetError("a mix has the prompts of its datasets", now="Bound those before mixing them.")
        limit = _PromptLimit.of(policy, max_prompt_tokens, too_long, self.name, self._place)
        fitting = limit.fitting((row["prompt"] for row in self._rows("prompt")), keeps=self._stored is None)
        made = self._part(fitting.kept, self.name)
        made._cut = fitting.shown
        if not fitting.num_shortened:
            return made
        if made._stored is not None:
            made._stored = ChangedRows(made._stored, lambda row, i: {**row, "prompt": limit.fitted(row["prompt"], i)})
        else:
            prompts = [fitting.shortened[i] if i in fitting.shortened else value_of(self._columns["prompt"], i) for i in fitting.kept]
            made._columns = {**made._columns, "prompt": column_of(prompts, "prompt")}
        return made

    def _part(self, index: Sequence[int], name: str) -> Dataset:
        """These rows as a dataset of their own."""
        made = copy.copy(self)
        made.name, made._num_rows, made._session, made._order = name, len(index), None, self._order.part(index)
        if self._stored is not None:
            made._stored = self._stored.part(index)
        else:
            made._columns = taken(self._columns, np.array(index, np.int64))
        made._places = None if self._places is None else [self._places[i] for i in index]
        return made

    def _place(self, row: int) -> str:
        """Where a row is, for errors: FILE:LINE if it is from a file."""
        place = self._stored.place(row) if self._stored is not None else "" if self._places is None else self._places[row]
        return place or f"row {row} of the dataset {self.name!r}"

    def pairs(self) -> Dataset:
        """The rows as preferences: each is drawn as a group of two samples, the chosen answer and the rejected one.

        Both have the row's prompt and other columns, their own answer as `target`, and the column `chosen`, 1 and 0, for losses on pairs
        such as `dpo`. `take(32)` gives 32 groups. Rows have `prompt`, `chosen` and `rejected`, each a text or messages, of which the last
        is the answer; or `chosen` and `rejected` as whole conversations with the same beginning.

        Raises:
            DatasetError: a row has no two answers to its prompt; or the rows are pairs already.
        """
        if self._num_each != 1 or not {"target", "rejected"} <= set(self._columns):
            why = "has pairs already" if self._num_each != 1 else "has other columns"
            raise DatasetError(f"the dataset {self.name!r} gives no pairs: it {why}", now="Give rows with prompt, chosen and rejected.")
        made = copy.copy(self)
        made._session, made._order, made._num_each = None, self._order.fresh(), 2
        place = self._place  # Errors name the rows of this dataset, also where they are read in a part of it.
        if self._stored is not None:
            made._stored = ChangedRows(self._stored, lambda row, i: _as_pair(row, place(i)), made=["target"])
            made._columns = made._stored.columns_at([0])
            return made
        answers = Ragged.json([_answers(row, place(i)) for i, row in enumerate(self._rows())])
        kept = {key: column for key, column in self._columns.items() if key not in _ANSWERS}
        made._columns = {**kept, "target": answers}
        return made

    @classmethod
    def mix(cls, datasets: Sequence[Dataset], *, weights: Sequence[float] | None = None, name: str = "mix") -> Dataset:
        """Draw from several datasets with the same columns in fixed proportions; where they have no column `source`, it names each row's.

        Each is drawn in its own order, with epochs of its own, and after any number of rows no dataset is more than a row behind or ahead
        of its share by much: the next row comes from the one furthest behind. Streams stay streams.

        Args:
            weights: of each; by default their numbers of rows.
        """
        datasets = list(datasets) if isinstance(datasets, list | tuple) else []
        if not datasets or not all(isinstance(one, Dataset) and isinstance(one._order, Epochs) and one._num_each == 1 for one in datasets):
            what = "datasets that are no mixes themselves, no pairs, and have no curriculum of what was seen"
            raise DatasetError(f"Dataset.mix takes a list of {what}")
        if not isinstance(weights, list | tuple | None):
            raise DatasetError(f"Dataset.mix got weights={weights!r:.60}; it takes a list of numbers")
        weights = [float(len(one)) for one in datasets] if weights is None else list(weights)
        for weight in weights:
            check_number("each of weights", weight, above=0)
        if len(weights) != len(datasets):
            raise DatasetError(
                f"Dataset.mix got {len(datasets)} datasets and {len(weights)} weights", now="Give one weight for each dataset."
            )
        first = set(datasets[0]._columns)
        for one in datasets:
            if set(one._columns) != first:
                raise DatasetError(
                    f"{datasets[0].name!r} and {one.name!r} have different columns: {sorted(first)} and {sorted(one._columns)}",
                    now="Name those to keep: Dataset.jsonl(path, columns={...}).",
                )
        order = Mix([one._order for one in datasets], list(map(len, datasets)), [weight / sum(weights) for weight in weights])
        if any(one._stored is not None for one in datasets):
            stored = [(one.name, one._stored or HeldRows(one._columns, len(one))) for one in datasets]
            return cls._of_stored(MixedRows(stored), name, order)
        made = cls([{"source": one.name, **row} for one in datasets for row in one._rows()], name=name)
        made._order = order
        return made

    def _rows(self, *names: str) -> Iterator[Row]:
        """The rows as Python values, or these columns of them."""
        if self._stored is not None:
            yield from self._stored.rows()
            return
        columns = {name: self._columns[name] for name in names or self._columns}
        for i in range(self._num_rows):
            yield {name: value_of(column, i) for name, column in columns.items()}

    def __len__(self) -> int:
        return self._num_rows

    @property
    def cursor(self) -> int:
        """Rows drawn so far, over all epochs."""
        self._settle()
        return self._cursor

    def take(self, count: int) -> Rows:
        """Draw the next `count` rows; past the end it starts over."""
        if not is_count(count):
            raise DatasetError(f"take({count!r}) of the dataset {self.name!r}: it takes a whole number of rows, 1 or more")
        session = self._join()
        self._settle()
        if self._unread:
            self._read_observed()
        positions = [self._order.at(self._cursor + i, session.seed, self._key) for i in range(count)]
        # The seed depends on the dataset and the draw, however many rows are drawn at a time.
        seeds = [keyed_bits(self._key, "take", self._cursor + i) for i in range(count)]
        return self._record(session, "take", positions, seeds, {"count": count}, moves_by=count)

    def upto(self, count: int) -> Rows:
        """Draw the next `count` rows, of which some may be returned (`return_rest`): a refill does not know yet how many it needs."""
        self._join()
        self._settle()
        self._first_unsure = self._cursor
        return self.take(count)

    def return_rest(self, kept: Rows) -> None:
        """Return the rows of the last `upto` that come after the last prompt of these samples."""
        self._refilled = kept

    def all(self) -> Rows:
        """Every row, in the dataset's order; the cursor stays."""
        session = self._join()
        self._num_alls += 1
        seeds = (_seeds_of_all if self._num_rows <= _MOST_KEPT else _seeds_of_all.__wrapped__)(self._key, self._num_alls, self._num_rows)
        return self._record(session, "all", list(range(self._num_rows)), seeds, {}, moves_by=0)

    def batches(self, size: int, *, epochs: int = 1) -> Iterator[Rows]:
        """Batches of `size` rows, a step each, for so many `epochs`; a last smaller one is left out, as `m2flow plan` says."""
        if not is_count(size) or not is_count(epochs):
            raise DatasetError(f"batches({size!r}, epochs={epochs!r}) of the dataset {self.name!r}: both are whole numbers, 1 or more")
        if size > self._num_rows:
            raise DatasetError(
                f"a batch of {size} rows from the dataset {self.name!r}, which has {self._num_rows}",
                now="Take a smaller batch, or add rows.",
            )
        session = self._join()
        for _ in session.iterate(epochs * self._num_rows // size):
            yield self.take(size)

    def _join(self) -> Session:
        session = current_session(f"the dataset {self.name!r}")
        if self._session is not session:
            self._session, self._key, self._cursor, self._order = session, session.key_dataset(self.name), 0, self._order.fresh()
            self._num_alls, self._refilled, self._unread = 0, None, []
        return session

    def observe(self, responses: Rows, values: Rows, *, lag: int = 0) -> None:
        """Tell a curriculum of what was seen: of each row of the dataset the mean of these values over its responses.

        The next draw waits for them, as for any value that Python reads; so what is drawn follows the program's order.

        Args:
            responses: generated from rows of this dataset. values: one number for each: their rewards.
            lag: of how many calls of this method, the newest, draws do not know yet, and so do not wait: 1 where steps overlap.
        Raises:
            TraceError: the curriculum is no function of a row and what was seen, or these are not its rows.
        """
        what = f"{self.name}.observe"
        session = self._join()
        if not isinstance(self._order, Observed):
            raise TraceError(
                f"{what}: the dataset has no curriculum of what was seen", now="Write Dataset(rows, curriculum=function_of_row_and_seen)."
            )
        if not isinstance(responses, Rows) or responses.column is not None or ROW not in (responses.fields or {ROW}):
            raise TraceError(
                f"{what} needs responses to rows of this dataset, and got {describe(responses)}",
                now="Pass what policy.generate(...) gave for rows of this dataset.",
            )
        if not isinstance(values, Rows) or values.column is None:
            raise TraceError(f"{what} needs one number for each response, and got {describe(values)}", now="Pass rewards.")
        check_count("lag", lag, least=0)
        call = session.record(
            role=self.name,
            method="observe",
            engine="function",
            granularity=Granularity.BATCH,
            inputs={"samples": responses.check(session, what), "seen": values.check(session, what)},
            options={
                "function": ReduceByKey("mean", "seen", ROW),
                "timeout_s": None,
                "column": "value",
                "style": "columns",
                "gives": "table",
                "columns": {"seen": values.column},
                "expected": {},
            },
            shown={},
            is_aligned=False,
        )
        self._lag = lag
        self._unread.append(Handle(session, call))

    def _read_observed(self) -> None:
        """Wait for what a draw is to know of earlier rows."""
        while len(self._unread) > self._lag:
            handle = self._unread.pop(0)
            assert isinstance(self._order, Observed)
            assert self._session is not None
            if handle.call.ordinal not in self._session.raised:
                seen = handle.observe(f"what was seen of {self.name}, which decides the next rows")
                assert isinstance(seen, Mapping)
                self._order.saw(seen)

    def _settle(self) -> None:
        """Wait until it is known how many rows the last refill used."""
        kept, self._refilled = self._refilled, None
        if kept is None or self._session is None or kept.call.ordinal in self._session.raised:
            return  # Of a refill that failed, and whose error the flow has caught, all rows are used.
        call = self._session.record(
            role=self.name,
            method="num_used",
            engine="function",
            granularity=Granularity.BATCH,
            inputs={"samples": kept.ref},
            options={
                "function": _num_used,
                "timeout_s": None,
                "column": "value",
                "style": "columns",
                "expected": kept.call.options["refill"],
            },
            shown={},
            is_aligned=False,
        )
        used = Handle(self._session, call).observe(f"the cursor of {self.name}, which a refill moves")
        assert isinstance(used, int | float)
        self._cursor = self._first_unsure + int(used)
        if isinstance(self._order, Observed):
            self._order.go_back(self._cursor)

    def _columns_at(self, positions: list[int]) -> dict[str, Column]:
        return taken(self._columns, np.array(positions, np.int64)) if self._stored is None else self._stored.columns_at(positions)

    def _record(
        self,
        session: Session,
        method: str,
        positions: list[int],
        seeds: list[int] | npt.NDArray[np.uint64],
        shown: dict[str, object],
        *,
        moves_by: int,
    ) -> Rows:
        ids = make_ids(session.next_ordinal, len(positions), self._num_each)
        columns = self._columns_at(positions) if self._num_each == 1 else _of_two(self._columns_at(positions), len(positions))
        if isinstance(self._order, Observed):
            columns[ROW] = np.array(positions, np.int64).repeat(self._num_each)
        drawn = np.array(seeds, np.uint64)
        rows = Batch(ids, {**columns, "seed": drawn if self._num_each == 1 else drawn.repeat(self._num_each)})
        resource = f"{self._key}.cursor"
        call = session.record(
            role=self.name,
            method=method,
            engine="source",
            granularity=Granularity.SAMPLE,
            inputs={},
            options={"rows": rows, "cursor": self._cursor} | ({"n": self._num_each} if self._num_each > 1 else {}),
            shown={**shown, **self._cut} if self._cut else shown,
            reads=(resource,),
            writes=(resource,) if moves_by else (),
        )
        self._cursor += moves_by
        return Rows(session, call)


def _with_types(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of reasoning-gym with its metadata as a Python literal, if that is one and JSON makes something else of it."""
    metadata = entry["metadata"]
    try:
        literal = repr(metadata)
        is_whole = ast.literal_eval(literal) == metadata != json.loads(json.dumps(metadata))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return entry
    return {**entry, "literal": literal} if is_whole else entry


def _num_used(rows: Batch, values: Mapping[str, object]) -> int:
    """Rows of the source up to the last one whose group was kept."""
    return int(prompt_positions(rows.ids).max()) + 1
