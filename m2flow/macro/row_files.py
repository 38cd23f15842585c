"""Rows of files: of JSONL, CSV and Parquet, under our names of columns; held in memory, or read when they are drawn.

    FILES --JsonLines, Csv, Parquet--> rows, each with its place, FILE:LINE --mapped--> columns by our names --with_prompts--> prompts

Streams. `RowsOnDisk` reads every row once, checks it and notes where it lies (24 bytes); a drawn row is read there again. A column has
one kind over all rows, however few are drawn: of each kind of value that it has, one is kept as a witness (`StoredRows`). So a stream
gives the columns that its rows would have in memory. `ChangedRows` makes what is drawn of what is stored: shorter prompts, pairs.

Limits: files that change while a run reads them. A row of Parquet is read with its row group, of which the last one is kept.
"""

from __future__ import annotations

import copy
import csv
import itertools
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from m2flow.errors import DatasetError, MissingExtra, did_you_mean
from m2flow.macro.draw_order import Row, RowSource
from m2flow.samples import ENGINE_COLUMNS, Column, Ragged, check_prompt, column_of, taken

# ---- names and prompts

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
TAKEN = frozenset(_ON_SAMPLES | ENGINE_COLUMNS)
"""Names that samples have already: a column of such a name would be lost, or taken for what it is not."""


_CONVERSATIONS = ("messages", "conversations", "chosen")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
          "function_response": "tool", "observation": "tool", "function": "tool"}  # fmt: skip
"""ShareGPT's names of roles -> those of messages."""
QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")


def with_prompts(rows: Sequence[Row], place: Callable[[int], str]) -> list[Row]:
    """Rows with a `prompt` and, where there is one, a `target`, made of the usual columns of conversations. `place` says which row it is.

    Raises:
        DatasetError: a row has no conversation where the first one has, or is not like it.
    """
    if "prompt" in rows[0]:
        is_pair = "chosen" in rows[0] and "target" not in rows[0]
        rows = [{**row, "target": said_last(row.get("chosen"))} for row in rows] if is_pair else list(rows)
        if all(isinstance(row.get("prompt"), str) for row in rows) or not any(isinstance(row.get("prompt"), list | tuple) for row in rows):
            return list(rows)
        return [{**row, "prompt": _as_messages(row.get("prompt"))} for row in rows]
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


def _as_messages(prompt: object) -> object:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _taken_apart(row: Row, column: str, what: str) -> Row:
    """A row whose conversation is a prompt and, if the assistant speaks last, a target."""
    given = row.get(column)
    messages = check_prompt([message_of(one) for one in given] if isinstance(given, list | tuple) else given, what)
    rest = {key: value for key, value in row.items() if key != column}
    if isinstance(messages, str):
        raise DatasetError(f"{what} is a text, where row 0 has a list of messages", now="Make all prompts texts, or all lists of messages.")
    if messages[-1]["role"] != "assistant" or "target" in row:
        return {**rest, "prompt": list(messages)}
    if len(messages) == 1:
        raise DatasetError(
            f"{what} has only a message of the assistant, and nothing that it answers",
            now="Put the user's message before it, or leave the row out.",
        )
    check_is_text(messages, what)
    return {**rest, "prompt": list(messages[:-1]), "target": said_last(messages)}


def check_is_text(said: object, what: str) -> None:
    """Refuse an answer whose last message calls tools, since only its text would be learnt. Raises `DatasetError`."""
    if isinstance(said, list | tuple) and said and isinstance(said[-1], Mapping) and said[-1].get("tool_calls"):
        raise DatasetError(
            f"{what} ends with a message that has tool_calls, and what is learnt is its content alone",
            now="Write the call into the content as the model writes it, such as '<tool_call>...</tool_call>', and leave out tool_calls.",
        )


def message_of(one: object) -> object:
    """A message in ShareGPT's form, `from` and `value`, as role and content; anything else as it is."""
    if not isinstance(one, Mapping) or "from" not in one or "value" not in one:
        return one
    return {"role": _ROLES.get(str(one["from"]), str(one["from"])), "content": one["value"]}


def said_last(said: object) -> object:
    """The text of the last of these messages; of a text itself."""
    content = said[-1].get("content") if isinstance(said, list | tuple) and said and isinstance(said[-1], Mapping) else said
    return "".join(str(part.get("text")) for part in content) if isinstance(content, list | tuple) else content or ""


# ---- files

Paths = str | Path | Sequence[str | Path]
Columns = Mapping[str, str | Callable[[Row], object]]
"""Our name of a column -> the file's, or a function that makes it of the file's row."""


def existing(path: Paths) -> list[Path]:
    paths = [Path(one) for one in ([path] if isinstance(path, str | Path) else path)]
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None or not paths:
        raise DatasetError(f"there is no file {missing}" if paths else "no file was given", now="A path is relative to where m2flow runs.")
    return paths


class RowFile(ABC):
    """A file of rows: all of them in order, or some of them by where they lie."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """The rows, each with where it lies and its number, as `read` and `place` take them."""

    @abstractmethod
    def read(self, where: Sequence[tuple[int, int]]) -> list[Row]:
        """Rows by where they lie and their numbers, of a file that was scanned."""

    def place(self, number: int) -> str:
        """What errors call a row."""
        return f"{self.path}:{number}"

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows with their places."""
        return ((self.place(number), row) for _, number, row in self.scan())


@final
class JsonLines(RowFile):
    """A JSON object a line. A row lies at its first byte; its number is that of its line. Empty lines are passed over."""

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield at, number, _object(line, self.place(number))
                at += len(line)

    def read(self, where: Sequence[tuple[int, int]]) -> list[Row]:
        found = []
        with self.path.open("rb") as file:
            for at, number in where:
                file.seek(at)
                found.append(_object(file.readline(), self.place(number)))
        return found


def _object(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{place} is no JSON: {error}", now="Each line is a JSON object: one row.") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{place} is no JSON object, but {row!r:.60}", now="Each line is a JSON object: one row.")
    return row


@final
class Csv(RowFile):
    """A line of names, and rows of texts. A row lies at its first byte; its number is that of its last line."""

    _names: Sequence[str] = ()

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        num_bytes = 0

        def counted(file: BinaryIO) -> Iterator[str]:
            nonlocal num_bytes
            for line in _lines(file):
                num_bytes += len(line)
                yield line.removeprefix(_BYTE_ORDER_MARK).decode()

        with self.path.open("rb") as file:
            reader = csv.reader(counted(file), strict=True)
            try:
                self._names = next(reader, [])
                while True:
                    at, values = num_bytes, next(reader, None)
                    if values is None:
                        return
                    if values:
                        yield at, reader.line_num, self._row(values, self.place(reader.line_num))
            except (csv.Error, UnicodeDecodeError) as error:
                raise DatasetError(
                    f"{self.path}:{reader.line_num} is no CSV: {error}", now="Mend that line, or save the file as .jsonl."
                ) from None

    def read(self, where: Sequence[tuple[int, int]]) -> list[Row]:
        found = []
        with self.path.open("rb") as file:
            for at, number in where:
                file.seek(at)
                found.append(self._row(next(csv.reader(map(bytes.decode, _lines(file)), strict=True)), self.place(number)))
        return found

    def _row(self, values: list[str], place: str) -> Row:
        if len(values) != len(self._names):
            raise DatasetError(
                f"{place} has {'more' if len(values) > len(self._names) else 'fewer'} values than the first line has names",
                now="Mend that line; quote values that have commas in them.",
            )
        return dict(zip(self._names, values, strict=True))


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines that end as any system ends them; of a CSV file, which may have several kinds of ends."""
    for line in file:
        yield from line.splitlines(keepends=True)


@final
class Parquet(RowFile):
    """A Parquet file. A row lies in its row group; its number is its position in the file."""

    _starts: Sequence[int] = ()
    """Number of the first row of each row group."""
    _last: tuple[int, Any] | None = None
    """The row group that was read last, and its table."""

    def place(self, number: int) -> str:
        return f"{self.path}: row {number}"

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            now = "Run: pip install 'm2flow[parquet]'."
            raise MissingExtra(f"{self.path}: Parquet needs the package pyarrow, which is not installed", now=now) from None
        try:
            with parquet.ParquetFile(self.path) as file:
                yield file
        except ArrowException as error:
            raise DatasetError(
                f"{self.path} is no Parquet file: {error}",
                now="Check that the file is whole; other formats go by their ending (.jsonl, .csv).",
            ) from None

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        with self._opened() as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._starts = list(itertools.accumulate(sizes, initial=0))
            for group, start in enumerate(self._starts[:-1]):
                batches = file.iter_batches(row_groups=[group])
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                yield from ((group, number, row) for number, row in enumerate(rows, start))

    def read(self, where: Sequence[tuple[int, int]]) -> list[Row]:
        found: dict[int, Row] = {}
        for group, number in sorted(where):
            if self._last is None or self._last[0] != group:
                self._last = None  # Frees its table before the next one is read.
                with self._opened() as file:
                    self._last = group, file.read_row_group(group)
            found[number] = self._last[1].slice(number - self._starts[group], 1).to_pylist()[0]
        return [found[number] for _, number in where]


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
        if not keys & _HAS_PROMPT and not isinstance(row.get("chosen"), list | tuple):
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
            raise DatasetError(
                f"{place} has the columns {sorted(row)}, and {self.first} has {sorted(self.keys)}", now="Give all rows the same columns."
            )
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
            raise DatasetError(f"{place} has no prompt: {made['prompt']!r:.60}", now="Fill the prompt in, or leave the row out.")
        return made


def _free_name(column: str) -> str:
    return f"{column}_of_row" if column in TAKEN - _HAS_PROMPT else column


# ---- rows that are read when they are drawn


class StoredRows(RowSource, ABC):
    """Rows that are read when they are drawn, with columns of the kinds that all rows together have."""

    def __init__(self) -> None:
        self._witnesses: dict[str, dict[type, object]] = {}
        """Column -> a value of each kind that it has."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        """Read rows."""

    def rows(self) -> Iterator[Row]:
        """All rows in order, of which few are in memory at a time."""
        for start in range(0, len(self), _AT_ONCE):
            yield from self.rows_at(range(start, min(start + _AT_ONCE, len(self))))

    def place(self, position: int) -> str:
        """Where a row is, FILE:LINE; empty if it is of no file."""
        return ""

    def part(self, index: Sequence[int]) -> StoredRows:
        """Only these rows."""
        raise DatasetError("a mix has no parts", now="Divide the datasets before mixing them.")

    def columns_at(self, positions: Sequence[int]) -> dict[str, Column]:
        """Columns of these rows, each of the kind that it has over all rows."""
        rows = self.rows_at(positions)
        return {name: self._column([row[name] for row in rows], name) for name in sorted(self._witnesses)}

    def normal_witnesses(self) -> dict[str, list[object]]:
        """A value of each kind that a column has, as the column has it: whole numbers are floats beside floats."""
        columns = {name: column_of(list(each.values()), name) for name, each in self._witnesses.items()}
        return {name: [value_of(column, i) for i in range(len(column))] for name, column in columns.items()}

    def _column(self, values: list[object], name: str) -> Column:
        witnesses = self._witnesses[name]
        if len(witnesses) == 1:
            return column_of(values, name)
        column = column_of([*values, *witnesses.values()], name)
        return column.stretch(0, len(values)) if isinstance(column, Ragged) else column[: len(values)]

    def _note(self, row: Row) -> None:
        for name, value in row.items():
            self._witnesses.setdefault(name, {}).setdefault(type(value), value)

    def _speaking(self, row: Row) -> Row:
        """A row whose prompt is messages, where other rows have messages."""
        return row if len(self._witnesses.get("prompt", ())) < 2 else {**row, "prompt": _as_messages(row["prompt"])}


_AT_ONCE = 256


@final
class RowsOnDisk(StoredRows):
    """Rows of files: in memory is where each one lies."""

    def __init__(self, files: Sequence[RowFile], columns: Columns | None) -> None:
        """Raises DatasetError: a row is wrong. All are read once."""
        super().__init__()
        self._files = files
        self._mapping: _Mapping | None = None
        found = array("q")
        for of, file in enumerate(files):
            for at, number, row in file.scan():
                found.extend((of, at, number))
                place = file.place(number)
                self._mapping = self._mapping or _Mapping.of(row, columns, place)
                self._check(self._made(row, place), place)
        if not found:
            raise DatasetError(f"{files[0].path} has no rows", now="A flow needs at least one prompt.")
        self._where = np.frombuffer(found, np.int64).reshape(-1, 3)
        """File, where it lies there, and number of each row."""
        self.normal_witnesses()

    def _check(self, row: Row, place: str) -> None:
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise DatasetError(
                f"{place} has no text or messages as its prompt: {prompt!r:.60}",
                now="Make it a text, or a list of messages, or leave the row out.",
            )
        check_prompt(prompt, f"the prompt of {place}")
        if self._witnesses and row.keys() != self._witnesses.keys():
            now = "Give prompts and demonstrations as two datasets."
            raise DatasetError(f"{place} makes the columns {sorted(row)}, and the rows before it {sorted(self._witnesses)}", now=now)
        self._note(row)

    def _made(self, row: Row, place: str) -> Row:
        assert self._mapping is not None
        return with_prompts([self._mapping.apply(row, place)], lambda _: place)[0]

    def __len__(self) -> int:
        return len(self._where)

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        where = self._where[positions].tolist()
        found: dict[tuple[int, int], Row] = {}
        for of in sorted({one[0] for one in where}):
            mine = [(at, number) for file, at, number in where if file == of]
            found.update(zip([(of, number) for _, number in mine], self._files[of].read(mine), strict=True))
        return [self._speaking(self._made(found[of, number], self._files[of].place(number))) for of, _, number in where]

    def place(self, position: int) -> str:
        of, _, number = self._where[position].tolist()
        return str(self._files[of].place(number))

    def part(self, index: Sequence[int]) -> RowsOnDisk:
        made = copy.copy(self)
        made._where = self._where[index]
        return made


@final
class HeldRows(StoredRows):
    """Rows in memory, beside others that are read when they are drawn."""

    def __init__(self, columns: Mapping[str, Column], num_rows: int) -> None:
        super().__init__()
        self._columns = columns
        self._num_rows = num_rows
        for name, column in columns.items():
            is_mixed = isinstance(column, Ragged) and column.kind == "json"
            for i in range(num_rows if is_mixed else 1):
                self._note({name: value_of(column, i)})

    def __len__(self) -> int:
        return self._num_rows

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        columns = taken(self._columns, np.array(positions, np.int64))
        return [{name: value_of(column, i) for name, column in columns.items()} for i in range(len(positions))]


@final
class MixedRows(StoredRows):
    """Rows of several datasets, one after the other, each with its dataset's name as `source` where it has none."""

    def __init__(self, sources: Sequence[tuple[str, StoredRows]]) -> None:
        super().__init__()
        self._sources = sources
        self._starts = list(itertools.accumulate((len(rows) for _, rows in sources), initial=0))
        for name, rows in sources:
            witnesses: dict[str, list[object]] = {"source": [name], **rows.normal_witnesses()}
            for column, values in witnesses.items():
                for value in values:
                    self._note({column: value})

    def __len__(self) -> int:
        return self._starts[-1]

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        found: dict[int, Row] = {}
        for (name, rows), start, end in zip(self._sources, self._starts, self._starts[1:], strict=False):
            mine = [position for position in positions if start <= position < end]
            columns = rows.columns_at([position - start for position in mine]) if mine else {}
            for i, position in enumerate(mine):
                found[position] = {"source": name, **{column: value_of(values, i) for column, values in columns.items()}}
        return [self._speaking(found[position]) for position in positions]


@final
class ChangedRows(StoredRows):
    """Rows made of others as they are read: with a shorter prompt, with both answers of a pair.

    Args:
        change: makes a row of the other and its position, which errors name; the same one each time. It may leave columns out.
        made: columns that have another kind of values then. With any, all rows are made once, which finds those that can't be.
    """

    def __init__(self, others: StoredRows, change: Callable[[Row, int], Row], *, made: Collection[str] = ()) -> None:
        super().__init__()
        self._others = others
        self._change = change
        kept = self.rows_at([0])[0].keys() - set(made)
        self._witnesses = {name: kinds for name, kinds in others._witnesses.items() if name in kept}
        for row in self.rows() if made else ():
            self._note({name: row[name] for name in made})

    def __len__(self) -> int:
        return len(self._others)

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        return [self._change(row, position) for row, position in zip(self._others.rows_at(positions), positions, strict=True)]

    def place(self, position: int) -> str:
        return self._others.place(position)

    def part(self, index: Sequence[int]) -> ChangedRows:
        made = copy.copy(self)
        made._others = self._others.part(index)
        return made


def value_of(column: Column, row: int) -> object:
    """A row's value of a column, as Python has it."""
    if isinstance(column, Ragged):
        return column.item(row)
    return np.asarray(column)[row].item()


# ---- the hub's files

FORMATS: Mapping[str, type[RowFile]] = {".parquet": Parquet, ".jsonl": JsonLines, ".csv": Csv}
"""Suffix of a file -> what reads it; the first of these that a split has is read."""


def dataset_folder(repo: str, revision: str | None) -> Path:
    """The directory of a dataset: the one given, or the hub's, in huggingface_hub's cache."""
    if Path(repo).is_dir():
        return Path(repo)
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in FORMATS]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # The package's own kinds of errors, and those of what it downloads with.
        now = "Give a directory with its files, or run where the hub can be reached; HF_HOME is where its cache lies."
        at = f" at {revision}" if revision else ""
        raise DatasetError(f"the dataset {repo!r}{at} is neither a directory nor to be had from the hub: {error}", now=now) from None


def files_of_split(folder: Path, repo: str, split: str, config: str | None) -> list[Path]:
    """The files of a split, of one kind: the first of Parquet, JSONL and CSV that it has."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS)
    found = [path for path in files if _is_of_split(path.relative_to(folder), split) and config in (None, path.parent.name)]
    kinds = [[path for path in found if path.suffix == suffix] for suffix in FORMATS]
    chosen = next((kind for kind in kinds if kind), [])
    if not chosen:
        listed = ", ".join(str(path.relative_to(folder)) for path in files[:20]) or "no file of rows"
        raise DatasetError(
            f"the dataset {repo!r} has no split {split!r}" + (f" of {config!r}" if config else "") + f"; it has {listed}",
            now="Give split= one of these.",
        )
    folders = sorted({path.parent.name for path in chosen})
    if len(folders) > 1:
        raise DatasetError(
            f"several folders of the dataset {repo!r} have a split {split!r}", now=f"Say config= one of {', '.join(folders)}."
        )
    return chosen


def _is_of_split(path: Path, split: str) -> bool:
    words = path.stem.replace("_", "-").replace(".", "-").split("-")
    return split in words or path.stem == split or split in path.parts[:-1]
