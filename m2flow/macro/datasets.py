"""Datasets: the source of prompts, with a cursor that the run records.

A dataset is a resource of the flow: each `take` reads it at the cursor and advances the cursor, in program order. Its result is a call
like any other (`data()` in the printed graph), so that a replay can answer it.

    FILES --read_jsonl, read_csv, read_parquet--> rows, each with its place, FILE:LINE --mapped--> columns by our names --> Dataset

What is drawn depends on the seed and the number of rows drawn before, and on nothing else, so that a resumed run goes on at the very row.
"""

from __future__ import annotations

import copy
import csv
import importlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, final

import numpy as np

from m2flow.errors import DatasetError, MissingExtra, OptionError, TraceError, did_you_mean
from m2flow.macro.columns import ReduceByKey
from m2flow.macro.draw_order import ROW, Curriculum, Epochs, Mix, Observed, Row, levels, order_of
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Rows, describe
from m2flow.macro.session import Session, current_session
from m2flow.recipe import check_choice, check_count, check_flag, check_number, check_text, check_whole, is_count
from m2flow.samples import Batch, Column, Ragged, check_prompt, column_of, keyed_bits, make_ids, prompt_positions, taken

if TYPE_CHECKING:
    from m2flow.macro.roles import Policy

TooLong = Literal["error", "drop", "truncate-left", "truncate-middle"]

_ON_SAMPLES = {
    "id",
    "messages",
    "prompt_text",
    "num_tokens",
    "finish",
    "seed",
    "temperature",
    "text",
    "reward",
    "value",
    "advantages",
    "reference_logprobs",
}
_ON_TOKENS = {"tokens", "loss_mask", "logprobs", "versions", "kv_stale", "routed_experts", "segment_kinds", "segment_lengths"}
TAKEN = frozenset(_ON_SAMPLES | _ON_TOKENS)
"""Names that samples have already: a column of such a name would be lost, or taken for what it is not."""


_CONVERSATIONS = ("messages", "conversations", "chosen")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
          "function_response": "tool", "observation": "tool", "function": "tool"}  # fmt: skip
"""ShareGPT's names of roles -> those of messages."""
_QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")


@final
class _RowsOfFiles(list[Row]):
    """Rows with their places, FILE:LINE each."""

    places: Sequence[str] = ()


def with_prompts(rows: Sequence[Row], place: Callable[[int], str]) -> list[Row]:
    """Rows with a `prompt` and, where there is one, a `target`, made of the usual columns of conversations. `place` says which row it is.

    Raises:
        DatasetError: a row has no conversation where the first one has, or is not like it.
    """
    if "prompt" in rows[0]:
        is_pair = "chosen" in rows[0] and "target" not in rows[0]
        rows = [{**row, "target": _said_last(row.get("chosen"))} for row in rows] if is_pair else list(rows)
        if all(isinstance(row.get("prompt"), str) for row in rows) or not any(isinstance(row.get("prompt"), list | tuple) for row in rows):
            return list(rows)
        return [{**row, "prompt": [{"role": "user", "content": p}]} if isinstance(p := row.get("prompt"), str) else row for row in rows]
    column = next((column for column in _CONVERSATIONS if isinstance(rows[0].get(column), list | tuple)), None)
    if column is None:
        return list(rows)
    made = [_taken_apart(row, column, f"{column!r} of {place(i)}") for i, row in enumerate(rows)]
    different = next((i for i, row in enumerate(made) if ("target" in row) != ("target" in made[0])), None)
    if different is not None:
        raise DatasetError(
            f"of the {column!r} of {place(0)} and {place(different)} one ends with the assistant, and the other does not",
            now="Give prompts and demonstrations as two datasets.",
        )
    return made


def _taken_apart(row: Row, column: str, what: str) -> Row:
    """A row whose conversation is a prompt and, if the assistant speaks last, a target."""
    given = row.get(column)
    messages = check_prompt([_message(one) for one in given] if isinstance(given, list | tuple) else given, what)
    rest = {key: value for key, value in row.items() if key != column}
    if isinstance(messages, str):
        raise DatasetError(f"{what} is a text, where row 0 has a list of messages")
    if messages[-1]["role"] != "assistant" or "target" in row:
        return {**rest, "prompt": list(messages)}
    if len(messages) == 1:
        raise DatasetError(f"{what} has only a message of the assistant, and nothing that it answers")
    return {**rest, "prompt": list(messages[:-1]), "target": _said_last(messages)}


def _message(one: object) -> object:
    """A message in ShareGPT's form, `from` and `value`, as role and content; anything else as it is."""
    if not isinstance(one, Mapping) or "from" not in one or "value" not in one:
        return one
    return {"role": _ROLES.get(str(one["from"]), str(one["from"])), "content": one["value"]}


def _said_last(said: object) -> object:
    """The text of the last of these messages; of a text itself."""
    content = said[-1].get("content") if isinstance(said, list | tuple) and said and isinstance(said[-1], Mapping) else said
    return "".join(str(part.get("text")) for part in content) if isinstance(content, list | tuple) else content or ""


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
        messages = [_message(one) for one in said] if isinstance(said, list | tuple) else said
        answer = _said_last(messages)
        if messages in (None, [], ()) or not isinstance(answer, str):
            raise DatasetError(f"the {name!r} of {what} is neither a text nor messages: {said!r:.60}")
        if isinstance(messages, list) and messages[:-1] not in ([], before):
            now = "Both answers of a pair have one beginning."
            raise DatasetError(f"the {name!r} of {what} answers another conversation than its prompt", now=now)
        found.append(answer)
    return found[0], found[1]


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
    shortened: dict[int, object]
    """Row -> its prompt then."""
    shown: dict[str, object]
    """What a plan shows of the others."""


def _fitting(prompts: Iterable[object], name: str, policy: Policy | None, limit: int, too_long: TooLong) -> _Fitting:
    """Choose the rows whose prompts have no more tokens than this, as the policy sees them.

    Raises:
        DatasetError: a prompt is too long and is to be an error, or can't be shortened; or no row is left.
    """
    session = current_session(f"the dataset {name!r}")
    if policy is None or getattr(policy, "name", None) not in session.models:
        raise OptionError(f"max_prompt_tokens={limit} counts the tokens of a policy, and got policy={policy!r:.60}", now=_POLICY)
    # Tokenizers are the engines', and are loaded only where a flow counts by them.
    codec = importlib.import_module("m2flow.engines.models.hf_model").load_tokenizer(session.models[policy.name])
    kept, found, shortened, num_rows = [], [], {}, 0
    for i, prompt in enumerate(prompts):
        num_rows += 1
        count = len(codec.encode_prompt(prompt))
        if count <= limit:
            kept.append(i)
            continue
        found.append(i)
        if too_long == "error":
            raise DatasetError(
                f"the prompt of row {i} of the dataset {name!r} has {count} tokens, and max_prompt_tokens is {limit}",
                now='Raise it, or say what becomes of such rows: too_long="drop", "truncate-left" or "truncate-middle".',
            )
        if too_long == "drop":
            continue
        shortened[i] = codec.shortened(prompt, limit, in_middle=too_long == "truncate-middle")
        if shortened[i] is None:
            raise DatasetError(
                f"the prompt of row {i} of the dataset {name!r} can't be shortened to {limit} tokens", now="Raise the limit."
            )
        kept.append(i)
    if not kept:
        raise DatasetError(f"all {num_rows} prompts of the dataset {name!r} have more than {limit} tokens", now="Raise max_prompt_tokens.")
    named = ", ".join(map(str, found[:_NAMED])) + (", ..." if len(found) > _NAMED else "")
    shown = {"dropped" if too_long == "drop" else "truncated": f"{len(found)} of {num_rows} rows: {named}"} if found else {}
    return _Fitting(kept, shortened, dict(shown))


_POLICY = "Write Dataset(rows, policy=policy, max_prompt_tokens=512)."


def _now(row: Row) -> str:
    """What to write for rows without a prompt."""
    column = next((column for column in _QUESTIONS if column in row), None)
    if column is None or "prompt" in row:
        return 'A row has a text or messages under "prompt", or a conversation under "messages" or "conversations".'
    return f'Write Dataset([{{**row, "prompt": row["{column}"]}} for row in rows]).'


class Dataset:
    """Rows with a `prompt`, any other columns being metadata (a `target` makes a row a demonstration).

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
        places = rows.places if isinstance(rows, _RowsOfFiles) else None
        place = (lambda i: f"row {i} of the dataset {name!r}") if places is None else places.__getitem__
        rows = list(rows)
        if not rows:
            raise DatasetError(f"the dataset {name!r} has no rows", now="A flow needs at least one prompt; check its path or its filter.")
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise DatasetError(f"{place(i)} is no mapping of names to values: {row!r:.60}")
        rows = with_prompts(rows, place)
        keys = set(rows[0])
        if keys & TAKEN:
            column = min(keys & TAKEN)
            now = f"Rename the column, to {column}_of_row for example."
            raise DatasetError(f"the dataset {name!r} has a column {column!r}, a name that samples have already", now=now)
        for i, row in enumerate(rows):
            if set(row) != keys:
                raise DatasetError(
                    f"{place(i)} has the columns {sorted(row)}, {'row 0' if places is None else place(0)} has {sorted(keys)}"
                )
            prompt = row.get("prompt")
            if not isinstance(prompt, str | list | tuple):
                raise DatasetError(f"{place(i)} has no text under 'prompt': {prompt!r:.60}", now=_now(row))
            check_prompt(prompt, f"the prompt of {place(i)}")
        check_text("name", name)
        check_flag("shuffle", shuffle)
        check_choice("too_long", too_long, TooLong)
        self._cut: dict[str, object] = {}
        if max_prompt_tokens is not None:
            check_count("max_prompt_tokens", max_prompt_tokens)
            fitting = _fitting((row["prompt"] for row in rows), name, policy, max_prompt_tokens, too_long)
            rows = [{**rows[i], "prompt": fitting.shortened.get(i, rows[i]["prompt"])} for i in fitting.kept]
            self._cut = fitting.shown
        elif policy is not None:
            raise OptionError("policy= goes with max_prompt_tokens=", now="Leave it out, or say how many tokens a prompt may have.")
        self.name = name
        self._columns: dict[str, Column] = {key: column_of([row[key] for row in rows], key) for key in sorted(keys)}
        self._num_rows = len(rows)
        self._lines: LinesOnDisk | None = None
        """Rows that are read when they are drawn; `_columns` has the first one then."""
        self._num_each = 1
        """Samples of a row: 2 are the answers of a pair."""
        self._order = order_of(rows, curriculum, name, shuffle=shuffle)
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
        check_whole("seed", seed)
        return cls([make(random.Random(f"{seed}/{i}")) for i in range(size)], name=name, shuffle=shuffle, curriculum=curriculum)

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
            stream: keep in memory where each line is (24 bytes), and read rows when they are drawn: for files that do not fit. All lines
                are checked once at the start. All prompts are texts, or all are messages.
            name: by default the file's.
        Raises:
            DatasetError: FILE:LINE is no JSON object, lacks a column, or has no prompt.
        """
        check_flag("stream", stream)
        if not stream:
            return cls._read(read_jsonl, path, columns, name, shuffle, curriculum)
        lines = LinesOnDisk(_paths(path), columns)
        made = cls([lines.row(0)], name=name or _paths(path)[0].stem, shuffle=shuffle)
        made._lines, made._num_rows = lines, len(lines)
        made._order = Epochs(len(lines), levels(map(lines.row, range(len(lines))), curriculum, made.name), shuffle=shuffle)
        return made

    @classmethod
    def csv(
        cls,
        path: Paths,
        *,
        columns: Columns | None = None,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read rows from CSV files with a line of names; every value is a text. The arguments are those of `jsonl`, without `stream`."""
        return cls._read(read_csv, path, columns, name, shuffle, curriculum)

    @classmethod
    def parquet(
        cls,
        path: Paths,
        *,
        columns: Columns | None = None,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read rows from Parquet files (`pip install 'm2flow[parquet]'`). The arguments are those of `jsonl`, without `stream`: write
        rows that do not fit in memory as JSONL.
        """
        return cls._read(read_parquet, path, columns, name, shuffle, curriculum)

    @classmethod
    def hf(
        cls,
        repo: str,
        *,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        columns: Columns | None = None,
        name: str = "",
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> Dataset:
        """Read a split of a dataset of the Hugging Face hub, or of a directory laid out like one: Parquet, JSONL or CSV files.

        Args:
            repo: `openai/gsm8k`, or a directory. What is in huggingface_hub's cache is not downloaded again.
            split: a word of the files' names (`train-00000-of-00001.parquet`) or folders. config: the folder they are in, if several
                have that split. revision: a branch, tag or commit; by default the newest.
        """
        check_text("repo", repo)
        check_text("split", split)
        files = _files_of_split(_dataset_folder(repo, revision), repo, split, config)
        read = {".parquet": read_parquet, ".csv": read_csv}.get(files[0].suffix, read_jsonl)
        return cls._read(read, files, columns, name or f"{repo.rstrip('/').rpartition('/')[2]}-{split}", shuffle, curriculum)

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

        Args:
            size: rows. seed: of the task's own generator.
            options: the task's own, such as `min_terms=2` of `chain_sum`.
        """
        check_count("size", size)
        check_whole("seed", seed)
        try:
            import reasoning_gym
        except ImportError:
            now = "Run: pip install 'm2flow[smollm]'."
            raise MissingExtra("Dataset.reasoning_gym needs the package reasoning-gym, which is not installed", now=now) from None
        try:
            entries = list(reasoning_gym.create_dataset(task, size=size, seed=seed, **options))
        except (AssertionError, TypeError, ValueError) as error:
            raise DatasetError(f"reasoning-gym makes no {task!r} with {options}: {error}") from None
        rows = [{"prompt": entry["question"], "answer": str(entry["answer"]), "entry": entry} for entry in entries]
        return cls(rows, name=name or task, shuffle=shuffle, curriculum=curriculum)

    @classmethod
    def _read(
        cls,
        read: Callable[[Path], Iterator[tuple[str, Row]]],
        path: Paths,
        columns: Columns | None,
        name: str,
        shuffle: bool,
        curriculum: Curriculum | None,
    ) -> Dataset:
        paths = _paths(path)
        places: list[str] = []
        rows = _RowsOfFiles(mapped(itertools.chain.from_iterable(map(read, paths)), columns, places))
        rows.places = places
        if not rows:
            raise DatasetError(f"{paths[0]} has no rows", now="A flow needs at least one prompt.")
        return cls(rows, name=name or paths[0].stem, shuffle=shuffle, curriculum=curriculum)

    def split(self, heldout: int | float, *, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Divide the rows at random, but by this seed alone: into most of them, and so many held out (a count, or a share below 1)."""
        check_number("heldout", heldout, above=0)
        if heldout >= 1:
            check_whole("heldout", heldout)
        check_whole("seed", seed)
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

    def within(self, policy: Policy, max_prompt_tokens: int, *, too_long: TooLong = "error") -> Dataset:
        """Bound the prompts' tokens, as `Dataset(rows, policy=, max_prompt_tokens=, too_long=)` does, of rows from wherever they are.

            prompts = Dataset.jsonl("train.jsonl").within(policy, max_prompt_tokens=512, too_long="drop")

        A stream (`jsonl(stream=True)`) is read once for it; its prompts can be dropped, and not be shortened.
        """
        check_count("max_prompt_tokens", max_prompt_tokens)
        check_choice("too_long", too_long, TooLong)
        if isinstance(self._order, Mix):
            raise DatasetError("a mix has the prompts of its datasets", now="Bound those before mixing them.")
        if self._lines is not None and too_long.startswith("truncate"):
            now = 'Leave stream=True out, or say too_long="drop".'
            raise DatasetError(f"rows of the dataset {self.name!r} are read when they are drawn, and can't be shortened", now=now)
        fitting = _fitting(map(self._prompt, range(self._num_rows)), self.name, policy, max_prompt_tokens, too_long)
        made = self._part(fitting.kept, self.name)
        made._cut = fitting.shown
        if fitting.shortened:
            prompts = [fitting.shortened[i] if i in fitting.shortened else self._prompt(i) for i in fitting.kept]
            made._columns = {**made._columns, "prompt": column_of(prompts, "prompt")}
        return made

    def _prompt(self, row: int) -> object:
        return _value(self._columns["prompt"], row) if self._lines is None else self._lines.row(row)["prompt"]

    def _part(self, index: list[int], name: str) -> Dataset:
        """These rows as a dataset of their own."""
        made = copy.copy(self)
        made.name, made._num_rows, made._session, made._order = name, len(index), None, self._order.part(index)
        if self._lines is not None:
            made._lines = self._lines.part(index)
        else:
            made._columns = taken(self._columns, np.array(index, np.int64))
        return made

    def pairs(self) -> Dataset:
        """The rows as preferences: each is drawn as a group of two samples, the chosen answer and the rejected one.

        Both have the row's prompt and other columns, their own answer as `target`, and the column `chosen`, 1 and 0, for losses on pairs
        such as `dpo`. `take(32)` gives 32 groups. Rows have `prompt`, `chosen` and `rejected`, each a text or messages, of which the last
        is the answer; or `chosen` and `rejected` as whole conversations with the same beginning.

        Raises:
            DatasetError: a row has no two answers to its prompt; or the rows are read from a stream, or pairs already.
        """
        if self._num_each != 1 or self._lines is not None or not {"target", "rejected"} <= set(self._columns):
            why = "has pairs already" if self._num_each != 1 else "is a stream" if self._lines is not None else "has other columns"
            raise DatasetError(f"the dataset {self.name!r} gives no pairs: it {why}", now="Give rows with prompt, chosen and rejected.")
        made = copy.copy(self)
        made._session, made._order, made._num_each = None, self._order.fresh(), 2
        answers = Ragged.json([_answers(row, f"row {i} of the dataset {self.name!r}") for i, row in enumerate(self._rows())])
        kept = {key: column for key, column in self._columns.items() if key not in ("chosen", "rejected", "target")}
        made._columns = {**kept, "target": answers}
        return made

    @classmethod
    def mix(cls, datasets: Sequence[Dataset], *, weights: Sequence[float] | None = None, name: str = "mix") -> Dataset:
        """Draw from several datasets with the same columns in fixed proportions; where they have no column `source`, it names each row's.

        Each is drawn in its own order, with epochs of its own, and after any number of rows no dataset is more than a row behind or ahead
        of its share by much: the next row comes from the one furthest behind.

        Args:
            weights: of each; by default their numbers of rows.
        """
        datasets = list(datasets) if isinstance(datasets, list | tuple) else []
        if not datasets or not all(
            isinstance(one, Dataset) and isinstance(one._order, Epochs) and (one._lines, one._num_each) == (None, 1) for one in datasets
        ):
            what = "datasets in memory that are no mixes themselves, no pairs, and have no curriculum of what was seen"
            raise DatasetError(f"Dataset.mix takes a list of {what}")
        if not isinstance(weights, list | tuple | None):
            raise DatasetError(f"Dataset.mix got weights={weights!r:.60}; it takes a list of numbers")
        weights = [float(len(one)) for one in datasets] if weights is None else list(weights)
        for weight in weights:
            check_number("each of weights", weight, above=0)
        if len(weights) != len(datasets):
            raise DatasetError(f"Dataset.mix got {len(datasets)} datasets and {len(weights)} weights")
        first = set(datasets[0]._columns)
        for one in datasets:
            if set(one._columns) != first:
                raise DatasetError(
                    f"{datasets[0].name!r} and {one.name!r} have different columns: {sorted(first)} and {sorted(one._columns)}",
                    now="Name those to keep: Dataset.jsonl(path, columns={...}).",
                )
        rows = [{"source": one.name, **row} for one in datasets for row in one._rows()]
        made = cls(rows, name=name)
        made._order = Mix([one._order for one in datasets], list(map(len, datasets)), [weight / sum(weights) for weight in weights])
        return made

    def _rows(self) -> Iterator[Row]:
        """The rows as Python values."""
        for i in range(self._num_rows):
            yield {name: _value(column, i) for name, column in self._columns.items()}

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
        seeds = [keyed_bits(self._key, f"all {self._num_alls}", i) for i in range(self._num_rows)]
        return self._record(session, "all", list(range(self._num_rows)), seeds, {}, moves_by=0)

    def batches(self, size: int, *, epochs: int = 1) -> Iterator[Rows]:
        """Batches of `size` rows, a step each, for so many `epochs`; a last smaller one is left out, as `m2flow plan` says."""
        if not is_count(size) or not is_count(epochs):
            raise DatasetError(f"batches({size!r}, epochs={epochs!r}) of the dataset {self.name!r}: both are whole numbers, 1 or more")
        if size > self._num_rows:
            raise DatasetError(f"a batch of {size} rows from the dataset {self.name!r}, which has {self._num_rows}")
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
            raise TraceError(f"{what} needs responses to rows of this dataset, and got {describe(responses)}")
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
        return taken(self._columns, np.array(positions, np.int64)) if self._lines is None else self._lines.columns_at(positions)

    def _record(
        self, session: Session, method: str, positions: list[int], seeds: list[int], shown: dict[str, object], *, moves_by: int
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


def _num_used(rows: Batch, values: Mapping[str, object]) -> int:
    """Rows of the source up to the last one whose group was kept."""
    return int(prompt_positions(rows.ids).max()) + 1


# ---- files

Paths = str | Path | Sequence[str | Path]
Columns = Mapping[str, str | Callable[[Row], object]]
"""Our name of a column -> the file's, or a function that makes it of the file's row."""


def _paths(path: Paths) -> list[Path]:
    paths = [Path(one) for one in ([path] if isinstance(path, str | Path) else path)]
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None or not paths:
        raise DatasetError(f"there is no file {missing}" if paths else "no file was given", now="A path is relative to where m2flow runs.")
    return paths


def read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL file, each with its place, FILE:LINE. Empty lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield (place := f"{path}:{number}"), _object(line, place)


def _object(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{place} is no JSON: {error}", now="Each line is a JSON object: one row.") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{place} is no JSON object, but {row!r:.60}", now="Each line is a JSON object: one row.")
    return row


def read_csv(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a CSV file with a line of names, each with its place, FILE:LINE (its last one, if it has several)."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DatasetError(f"{place} has {'more' if None in row else 'fewer'} values than the first line has names")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}:{reader.line_num} is no CSV: {error}") from None


def read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a Parquet file, each with its place."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        now = "Run: pip install 'm2flow[parquet]'."
        raise MissingExtra(f"{path}: Parquet needs the package pyarrow, which is not installed", now=now) from None
    try:
        with parquet.ParquetFile(path) as file:
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows))
    except ArrowException as error:
        raise DatasetError(f"{path} is no Parquet file: {error}") from None


_USUAL = (
    ({"question", "input_output"}, {"prompt": "question", "test": "input_output"}),
    ({"text", "test_list"}, {"prompt": "text", "test": "test_list"}),
    ({"question"}, {"prompt": "question"}),
    ({"problem"}, {"prompt": "problem"}),
)
"""Columns that a set has -> ours -> its; the first that fits counts, where there is no `prompt`."""
_HAS_PROMPT = frozenset({"prompt", "messages", "conversations"})


def mapped(rows: Iterable[tuple[str, Row]], columns: Columns | None, places: list[str]) -> Iterator[Row]:
    """Rows with our names of columns, all of the same ones; their places are added to `places`.

    Raises:
        DatasetError: with the place of a row that lacks a column, or has another, or whose prompt is empty.
    """
    mapping: _Mapping | None = None
    for place, row in rows:
        mapping = _Mapping.of(row, columns, place) if mapping is None else mapping
        places.append(place)
        yield mapping.apply(row, place)


@dataclass(frozen=True)
class _Mapping:
    """Our names of a file's columns, decided by its first row."""

    columns: Columns
    first: str
    keys: frozenset[str]
    """The first row's place, and its columns."""
    is_given: bool

    @classmethod
    def of(cls, row: Row, columns: Columns | None, place: str) -> _Mapping:
        """Raises DatasetError: the row has no prompt, and none of the usual columns."""
        keys = frozenset(row)
        if columns is not None:
            if not isinstance(columns, Mapping) or "prompt" not in columns:
                raise DatasetError(f"columns={columns!r:.80} says nothing of the prompt", now='Write columns={"prompt": "question"}.')
            return cls(columns, place, keys, is_given=True)
        usual: Mapping[str, str] = {}
        if not keys & _HAS_PROMPT:
            found = next((ours for has, ours in _USUAL if has <= keys), None)
            if found is None:
                now = f'Say which it is: columns={{"prompt": {min(keys, default="question")!r}, ...}}.'
                raise DatasetError(f"{place} has no column 'prompt'; it has {', '.join(sorted(keys))}", now=now)
            usual = found
        rest = sorted(keys - set(usual.values()))
        kept = {_free_name(key): key for key in rest if key not in usual}
        return cls({**kept, **usual}, place, keys, is_given=False)

    def apply(self, row: Row, place: str) -> Row:
        """A row under our names. Raises DatasetError, with its place."""
        if not self.is_given and row.keys() != self.keys:
            raise DatasetError(f"{place} has the columns {sorted(row)}, and {self.first} has {sorted(self.keys)}")
        made: dict[str, object] = {}
        for ours, theirs in self.columns.items():
            if callable(theirs):
                made[ours] = theirs(row)
            elif theirs in row:
                made[ours] = row[theirs]
            else:
                raise DatasetError(
                    f"{place} has no column {theirs!r}; it has {', '.join(sorted(row))}", now=did_you_mean(theirs, list(row), "")
                )
        if "prompt" in made and not (isinstance(made["prompt"], str | list) and made["prompt"]):
            raise DatasetError(f"{place} has no prompt: {made['prompt']!r:.60}")
        return made


def _free_name(column: str) -> str:
    return f"{column}_of_row" if column in TAKEN - _HAS_PROMPT else column


@final
class LinesOnDisk:
    """Rows of JSONL files that are read when they are drawn: in memory is where each line is, and the kind of each column."""

    def __init__(self, paths: Sequence[Path], columns: Columns | None) -> None:
        """Raises DatasetError: a line is wrong. All are read once."""
        self._paths = paths
        self._mapping: _Mapping | None = None
        places: list[tuple[int, int, int]] = []
        self._kinds: dict[str, set[type]] = {}
        for number, path in enumerate(paths):
            at = 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, 1):
                    if line.strip():
                        places.append((number, at, line_number))
                        self._note(self._mapped(line, f"{path}:{line_number}", columns), f"{path}:{line_number}")
                    at += len(line)
        if not places:
            raise DatasetError(f"{paths[0]} has no rows", now="A flow needs at least one prompt.")
        self._places = np.array(places, np.int64)

    def _note(self, row: Row, place: str) -> None:
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise DatasetError(f"{place} has no text or messages as its prompt: {prompt!r:.60}")
        check_prompt(prompt, f"the prompt of {place}")
        if self._kinds and row.keys() != self._kinds.keys():
            now = "Give prompts and demonstrations as two datasets."
            raise DatasetError(f"{place} makes the columns {sorted(row)}, and the rows before it {sorted(self._kinds)}", now=now)
        for name, value in row.items():
            self._kinds.setdefault(name, set()).add(type(value))
        if len(self._kinds["prompt"]) > 1:
            raise DatasetError(f"{place}: the prompt is of another kind than those before it: texts, or messages", now="Leave stream= out.")

    def _mapped(self, line: bytes, place: str, columns: Columns | None = None) -> Row:
        row = _object(line, place)
        self._mapping = self._mapping or _Mapping.of(row, columns, place)
        return with_prompts([self._mapping.apply(row, place)], lambda _: place)[0]

    def __len__(self) -> int:
        return len(self._places)

    def row(self, position: int) -> Row:
        """Read a row."""
        number, at, line_number = self._places[position].tolist()
        with self._paths[number].open("rb") as file:
            file.seek(at)
            return self._mapped(file.readline(), f"{self._paths[number]}:{line_number}")

    def part(self, index: list[int]) -> LinesOnDisk:
        """Only these rows."""
        made = copy.copy(self)
        made._places = self._places[index]
        return made

    def columns_at(self, positions: list[int]) -> dict[str, Column]:
        """Columns of these rows, each of the kind that it has over all rows."""
        rows = [self.row(position) for position in positions]
        return {name: self._column([row[name] for row in rows], name) for name in sorted(rows[0])}

    def _column(self, values: list[object], name: str) -> Column:
        kinds = self._kinds[name]
        if kinds == {str} or kinds == {bool} or kinds == {int}:
            return column_of(values, name)
        if kinds <= {int, float}:
            return np.asarray([float(str(value)) for value in values], np.float64)
        return Ragged.json(values)


def _value(column: Column, row: int) -> object:
    if isinstance(column, Ragged):
        return column.item(row)
    return np.asarray(column)[row].item()


_SUFFIXES = (".parquet", ".jsonl", ".csv")


def _dataset_folder(repo: str, revision: str | None) -> Path:
    """The directory of a dataset: the one given, or the hub's, in huggingface_hub's cache."""
    if Path(repo).is_dir():
        return Path(repo)
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in _SUFFIXES]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # The package's own kinds of errors, and those of what it downloads with.
        now = "Give a directory with its files, or run where the hub can be reached; HF_HOME is where its cache lies."
        at = f" at {revision}" if revision else ""
        raise DatasetError(f"the dataset {repo!r}{at} is neither a directory nor to be had from the hub: {error}", now=now) from None


def _files_of_split(folder: Path, repo: str, split: str, config: str | None) -> list[Path]:
    """The files of a split, of one kind: the first of Parquet, JSONL and CSV that it has."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    found = [path for path in files if _is_of_split(path.relative_to(folder), split) and config in (None, path.parent.name)]
    kinds = [[path for path in found if path.suffix == suffix] for suffix in _SUFFIXES]
    chosen = next((kind for kind in kinds if kind), [])
    if not chosen:
        listed = ", ".join(str(path.relative_to(folder)) for path in files[:20]) or "no file of rows"
        raise DatasetError(f"the dataset {repo!r} has no split {split!r}" + (f" of {config!r}" if config else "") + f"; it has {listed}")
    folders = sorted({path.parent.name for path in chosen})
    if len(folders) > 1:
        raise DatasetError(
            f"several folders of the dataset {repo!r} have a split {split!r}", now=f"Say config= one of {', '.join(folders)}."
        )
    return chosen


def _is_of_split(path: Path, split: str) -> bool:
    words = path.stem.replace("_", "-").replace(".", "-").split("-")
    return split in words or path.stem == split or split in path.parts[:-1]
