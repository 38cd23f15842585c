"""Datasets: the cursor, the order of each epoch, batches, and rows that are refused."""

from __future__ import annotations

import builtins
import decimal
import functools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow import Dataset, flow, steps
from m2flow.errors import DatasetError, OptionError, TraceError
from m2flow.macro import datasets
from m2flow.macro.capture import are_alike, is_same, pure_leaves
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.tracing import trace
from m2flow.samples import Batch

ROWS = [{"prompt": str(i)} for i in range(5)]


def taken(body: Callable[[], object], *, seed: int = 0, max_steps: int = 100) -> list[list[str]]:
    """The prompts of each call of a flow."""
    graph = trace(Flow(body), {}, steps=max_steps, seed=seed)[0]
    return [prompts(graph, i) for i in range(len(graph.calls))]


def prompts(graph: MacroGraph, i: int) -> list[str]:
    rows = graph.calls[i].options["rows"]
    return [str(sample.prompt) for sample in rows.rows()]


def all_rows(given: list[dict[str, object]]) -> Batch:
    """The rows that a dataset of these gives."""
    rows = trace(Flow(lambda: Dataset(given).all()), {}, steps=1, seed=0)[0].calls[0].options["rows"]
    assert isinstance(rows, Batch)
    return rows


def test_the_cursor_moves_on_and_wraps_around():
    def body() -> None:
        dataset = Dataset(ROWS, shuffle=False)
        dataset.take(2), dataset.take(2), dataset.take(2), dataset.take(12)
        assert dataset.cursor == 18

    assert taken(body) == [["0", "1"], ["2", "3"], ["4", "0"], [str(i % 5) for i in range(1, 13)]]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own_that_the_seed_decides():
    def body() -> None:
        dataset = Dataset(ROWS)
        for _ in range(3):
            dataset.take(5)

    epochs = taken(body)
    assert all(sorted(epoch) == list("01234") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert taken(body) == epochs
    assert taken(body, seed=1) != epochs


def test_two_datasets_are_shuffled_apart_and_global_randomness_has_no_say():
    def body(disturb: bool = False) -> None:
        if disturb:
            random.random()
        Dataset(ROWS).take(5), Dataset(ROWS).take(5)

    one, other = taken(body)
    assert one != other
    assert taken(lambda: body(True)) == [one, other]


def test_all_gives_every_row_in_order_and_leaves_the_cursor():
    def body() -> None:
        dataset = Dataset(ROWS)
        dataset.take(2)
        dataset.all()
        assert dataset.cursor == 2

    assert taken(body)[1] == list("01234")


def test_a_dataset_made_outside_starts_anew_in_each_flow():
    dataset = Dataset(ROWS)
    first = taken(lambda: dataset.take(3))
    assert taken(lambda: dataset.take(3)) == first


def test_batches_are_steps_and_the_last_smaller_one_is_left_out():
    def body() -> None:
        dataset = Dataset(ROWS, shuffle=False)
        for _ in dataset.batches(2):
            pass
        assert dataset.cursor == 4

    graph, _, num_steps = trace(Flow(body), {}, steps=100)
    assert [call.step for call in graph.calls] == [0, 1]
    assert num_steps == 2


def test_batches_over_epochs_go_on_over_the_end():
    def body() -> None:
        for _ in Dataset(ROWS, shuffle=False).batches(4, epochs=2):
            pass

    assert taken(body) == [["0", "1", "2", "3"], ["4", "0", "1", "2"]]


def test_batches_inside_steps_belong_to_the_outer_step():
    def body() -> None:
        dataset = Dataset(ROWS)
        for _ in steps(2):
            for _ in dataset.batches(2):
                pass

    graph, _, num_steps = trace(Flow(body), {}, steps=100)
    assert [call.step for call in graph.calls] == [0, 0, 1, 1]
    assert num_steps == 2


def test_a_generated_row_depends_on_the_seed_and_its_number_alone():
    def make(rng: random.Random) -> dict[str, str]:
        return {"prompt": str(rng.random())}

    def rows(size: int, seed: int = 1) -> list[str]:
        return taken(lambda: Dataset.generate(make, size, seed=seed).all())[0]

    assert rows(3) == rows(7)[:3]
    assert rows(3, seed=2) != rows(3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset 'mine' has no rows"),
        ([{"prompt": "a"}, {"prompt": "b", "k": 1}], "row 1 of the dataset 'mine' has the columns ['k', 'prompt'], row 0 has ['prompt']"),
        ([{"question": "a"}], "row 0 of the dataset 'mine' has no text under 'prompt': None"),
        (
            [{"prompt": "a"}, {"prompt": "b\ud800c"}],
            "the prompt of row 1 of the dataset 'mine' has half of a surrogate pair at character 1: 'b\\ud800c'",
        ),
        (
            [{"prompt": [{"role": "user", "content": "\ud800"}]}],
            "message 0 of the prompt of row 0 of the dataset 'mine' has half of a surrogate pair at character 0: '\\ud800'",
        ),
        ([{"prompt": "a"}, {"prompt": 3}], "row 1 of the dataset 'mine' has no text under 'prompt': 3"),
        (["a", "b"], "row 0 of the dataset 'mine' is no mapping of names to values: 'a'"),
        ([{"prompt": "a", 1: 2}], "row 0 of the dataset 'mine' is no mapping of names to values: {'prompt': 'a', 1: 2}"),
        ([{"prompt": "a", "tokens": 3}], "the dataset 'mine' has a column 'tokens', a name that samples have already"),
        (
            [{"prompt": "a", "k": b"x"}],
            "column 'k' has values that are neither numbers, texts nor JSON: Object of type bytes is not JSON serializable",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_number_and_name(rows, message):
    with pytest.raises(DatasetError) as caught:
        Dataset(rows, name="mine")
    assert caught.value.what == message


QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SHARED = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"prompt": [QUESTION], "k": 1}, {"prompt": [QUESTION], "k": 1}),
        ({"messages": [QUESTION, ANSWER], "k": 1}, {"prompt": [QUESTION], "target": "4", "k": 1}),
        ({"messages": [QUESTION, ANSWER, QUESTION]}, {"prompt": [QUESTION, ANSWER, QUESTION]}),
        ({"messages": [QUESTION, ANSWER], "target": "5"}, {"prompt": [QUESTION, ANSWER], "target": "5"}),
        ({"conversations": SHARED}, {"prompt": [{"role": "system", "content": "Be brief."}, QUESTION], "target": "4"}),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "2+2?", "chosen": "4", "rejected": "5", "target": "4"}),
        ({"prompt": [QUESTION], "chosen": [ANSWER]}, {"prompt": [QUESTION], "chosen": [ANSWER], "target": "4"}),
        (
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]},
            {"prompt": [QUESTION], "target": "4", "rejected": [QUESTION, ANSWER]},
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]},) * 2,
    ],
)
def test_conversations_in_the_usual_columns_are_prompts_and_targets(row, made):
    rows = all_rows([row])
    sample = next(rows.rows())
    assert {name: sample[name] for name in rows.columns if name != "seed"} == made
    assert sample.messages == (made["prompt"] if isinstance(made["prompt"], list) else [QUESTION])


def test_a_text_among_prompts_of_messages_is_a_users_message():
    rows = all_rows([{"prompt": "2+2?"}, {"prompt": [QUESTION]}])
    assert [sample["prompt"] for sample in rows.rows()] == [[QUESTION]] * 2


@pytest.mark.parametrize(
    ("rows", "what", "now"),
    [
        ([{"question": "a"}], "row 0 of the dataset 'mine' has no text under 'prompt'", '"prompt": row["question"]'),
        (
            [{"messages": [QUESTION]}, {"messages": [QUESTION, ANSWER]}],
            "row 0 of the dataset 'mine' and row 1 of the dataset 'mine' one ends",
            "two datasets",
        ),
        ([{"messages": [QUESTION]}, {"messages": "a"}], "'messages' of row 1 of the dataset 'mine' is a text", ""),
        (
            [{"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]}],
            "'messages' of row 0 of the dataset 'mine' ends with a message that has tool_calls",
            "<tool_call>",
        ),
        ([{"messages": [ANSWER]}], "'messages' of row 0 of the dataset 'mine' has only a message of the assistant", ""),
        ([{"messages": [{"content": "a"}]}], "message 0 of 'messages' of row 0 of the dataset 'mine' has no role", '"role": "user"'),
        ([{"prompt": [QUESTION, {"role": "user", "content": 3}]}], "message 1 of the prompt of row 0 of the dataset 'mine'", "role"),
        ([{"prompt": []}], "the prompt of row 0 of the dataset 'mine' is []; it must be a text or a list of messages", "role"),
        ([{"prompt": "a", "messages": [QUESTION]}], "has a column 'messages', a name that samples have already", "messages_of_row"),
    ],
)
def test_conversations_that_are_none_are_refused_with_what_to_write(rows, what, now):
    with pytest.raises(DatasetError) as caught:
        Dataset(rows, name="mine")
    assert what in caught.value.what
    assert now in caught.value.now


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda d: d.take(0), "take(0) of the dataset 'dataset': it takes a whole number of rows, 1 or more"),
        (lambda d: d.take(2.0), "take(2.0) of the dataset 'dataset': it takes a whole number of rows, 1 or more"),
        (lambda d: next(d.batches(0)), "batches(0, epochs=1) of the dataset 'dataset': both are whole numbers, 1 or more"),
        (lambda d: next(d.batches(6)), "a batch of 6 rows from the dataset 'dataset', which has 5"),
    ],
)
def test_counts_that_make_no_sense_are_refused_at_the_flows_line(use, message):
    with pytest.raises(DatasetError) as caught:
        taken(lambda: use(Dataset(ROWS)))
    assert caught.value.what == message
    assert "test_datasets.py:" in caught.value.where


def test_a_dataset_outside_a_flow_is_refused():
    with pytest.raises(TraceError, match="the dataset 'dataset' was used outside a running flow"):
        Dataset(ROWS).take(1)


def test_columns_come_back_as_they_were():
    row = {"prompt": "a", "k": 3, "x": 0.5, "is_hard": True, "note": "é", "parts": [1, {"a": None}]}

    @flow
    def looks() -> None:
        (sample,) = Dataset([row]).take(1)
        assert {name: sample[name] for name in row} == row

    trace(looks, {})


def test_advice_for_rows_of_instructions_keeps_their_input() -> None:
    with pytest.raises(DatasetError) as caught:
        Dataset([{"instruction": "Translate", "input": "oui", "output": "yes"}])
    advised = re.search(r"Dataset\((\[.*\])\)", str(caught.value))
    assert advised
    rows = [{"instruction": "Translate", "input": "oui"}]
    assert [row["prompt"] for row in eval(advised[1], {"rows": rows})] == ["Translate\n\noui"]


WORD = "a"
WORDS = ["a"]


def test_rows_that_a_pure_function_made_are_made_once_and_anew_where_what_it_reads_has_changed(monkeypatch):
    def make(rng: random.Random) -> dict[str, str]:
        return {"prompt": f"{WORD}{rng.random()}"}

    def drawn(size: int, *, seed: int = 7, shuffle: bool = False) -> tuple[int, list[str]]:
        """How many rows were made, and all rows."""
        seeded, made = random.Random.seed, []
        with monkeypatch.context() as patch:
            patch.setattr(random.Random, "seed", lambda rng, seed: made.append(seed) or seeded(rng, seed))  # For each row.
            dataset = Dataset.generate(make, size, seed=seed, shuffle=shuffle)
        return len(made) - made.count(0), taken(dataset.all)[0]

    _, rows = first = drawn(3)
    assert first[0] == 3
    assert drawn(3) == (0, rows)
    assert drawn(3, shuffle=True) == (0, rows)
    assert drawn(2) == (2, rows[:2])
    assert drawn(3, seed=8)[0] == 3
    monkeypatch.setitem(globals(), "WORD", "b")
    assert drawn(3) == (3, ["b" + text[1:] for text in rows])


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: {"prompt": WORDS[0]},
        lambda rng: {"prompt": open("/dev/null").read()},  # noqa: SIM115
        lambda rng: {"prompt": str(random.random())},
        lambda rng: {"prompt": str(__import__("time").time())},
        lambda rng: {"prompt": Path("/dev/null").read_text()},
        lambda rng: {"prompt": builtins.open("/dev/null").read()},  # noqa: SIM115
        lambda rng: {"prompt": json.codecs.open("/dev/null").read()},
        lambda rng: {"prompt": str(re.enum.sys.argv)},
        lambda rng: {"prompt": str(decimal.Decimal(1) / 3)},  # As precise as the context.
        lambda rng: {"prompt": str(rng.__dict__.setdefault("rows", []))},
        lambda rng: {"prompt": taken(lambda: Dataset([{"prompt": "a"}]).all())[0][0]},
    ],
)
def test_a_function_that_reaches_what_can_change_is_asked_each_time(make):
    assert pure_leaves(make) is None
    assert pure_leaves(lambda rng: {"prompt": str(rng.randint(1, 9) + math.pi)}) is not None


def one_text(rng: random.Random) -> str:
    return "one"


def other_text(rng: random.Random) -> str:
    return "other"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"A": 1, "B": (7,)}, {"A": (1,), "B": 7}),
        ({"A": (1, 2), "B": 0}, {"A": frozenset({1, 2}), "B": 0}),
        ({"A": (one_text, one_text), "B": other_text}, {"A": (one_text, other_text), "B": one_text}),
        ({"A": functools.partial(one_text, 1), "B": (2,)}, {"A": functools.partial(one_text), "B": (1, 2)}),
    ],
)
def test_a_function_whose_captures_are_put_together_otherwise_is_another(before, after):
    def made(scope: dict[str, object]) -> list[object] | None:
        exec(compile("def make(rng): return {'prompt': f'{A} {B}'}", "flow.py", "exec"), scope)
        return pure_leaves(scope["make"])

    first, again, other = made(dict(before)), made(dict(before)), made(dict(after))
    assert first is not None
    assert other is not None
    assert are_alike(first, again)
    assert is_same(first[1:], again[1:])
    assert not are_alike(first, other)


def test_rows_of_many_bytes_are_not_kept(monkeypatch):
    def made(length: int) -> int:
        Dataset.generate(lambda rng: {"prompt": "a" * length}, 4)
        return sum(len(one) for *_, one in datasets._kept)

    monkeypatch.setattr(datasets, "_kept", [])
    monkeypatch.setattr(datasets, "_MOST_BYTES", 1000)
    assert [made(50), made(100), made(300), made(50)] == [4, 8, 0, 4]


def test_rows_of_a_subclass_are_of_that_class():
    class Tasks(Dataset):
        pass

    def make(rng: random.Random) -> dict[str, str]:
        return {"prompt": str(rng.random())}

    assert [type(one.generate(make, 2)) for one in (Dataset, Tasks, Dataset)] == [Dataset, Tasks, Dataset]


def test_a_function_of_a_file_that_is_loaded_again_is_the_same_as_long_as_its_text_is(tmp_path):
    def loaded(text: str) -> list[object] | None:
        scope: dict[str, object] = {}
        exec(compile(text, str(tmp_path / "flow.py"), "exec"), scope)
        return pure_leaves(scope["make"])

    text = "LEAST = 1\ndef other(rng): return rng.randint(LEAST, 9)\ndef make(rng): return {'prompt': str(other(rng))}\n"
    first = loaded(text)
    assert first is not None
    assert are_alike(first, loaded(text))
    assert not are_alike(first, loaded(text.replace("LEAST = 1", "LEAST = 2")))
    assert not are_alike(first, loaded(text.replace("9", "8")))
    assert not are_alike(first, loaded(text.replace("str(other(rng))", "str(other(rng)) + 'x'")))


def test_datasets_of_the_same_made_rows_have_cursors_and_orders_of_their_own():
    def make(rng: random.Random) -> dict[str, str]:
        return {"prompt": str(rng.random())}

    def body() -> None:
        one, other = (Dataset.generate(make, 8, seed=3, name=name, shuffle=True) for name in ("one", "other"))
        one.take(5)
        assert (one.cursor, other.cursor) == (5, 0)
        assert (one.name, other.name) == ("one", "other")

    trace(Flow(body), {})
    with pytest.raises(OptionError, match="shuffle"):
        Dataset.generate(make, 8, seed=3, shuffle="yes")  # type: ignore[arg-type]
