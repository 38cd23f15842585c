"""Prompts that are too long by a policy's tokenizer: an error with the row, left out, or shortened; and the plan says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from m2flow import Dataset, Policy
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.errors import DatasetError, OptionError
from m2flow.macro.datasets import TooLong
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.tracing import trace
from m2flow.recipe import Model
from m2flow.samples import Batch

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<turn>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ROWS = [{"prompt": "a" * length} for length in (3, 9, 8, 20)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder, merges=["a b"], chat_template=TEMPLATE)
    return str(folder)


def graph_of(path: str, rows: list[dict[str, Any]], system: str | None = None, **options: Any) -> MacroGraph:
    def body() -> None:
        policy = Policy(path, init="random", system=system)
        Dataset(rows, policy=policy, max_prompt_tokens=8, **options).all()

    return trace(Flow(body), {}, steps=1, seed=0)[0]


def prompts(graph: MacroGraph) -> list[object]:
    rows = graph.calls[0].options["rows"]
    assert isinstance(rows, Batch)
    return [sample["prompt"] for sample in rows.rows()]


def test_a_prompt_that_is_too_long_is_an_error_with_its_row(path: str) -> None:
    with pytest.raises(DatasetError, match=r"row 1 .*'dataset' has 9 tokens.* is 8"):
        graph_of(path, ROWS)
    with pytest.raises(DatasetError, match=r"all 1 prompts .*'dataset'.* more than 8 tokens"):
        graph_of(path, ROWS[1:2], too_long="drop")
    with pytest.raises(OptionError, match="policy=policy"):
        trace(Flow(lambda: Dataset(ROWS, max_prompt_tokens=8).all()), {}, steps=1, seed=0)


def test_the_plan_says_which_rows_were_left_out_or_shortened(path: str) -> None:
    dropped, cut = graph_of(path, ROWS, too_long="drop"), graph_of(path, ROWS, too_long="truncate-left")
    assert prompts(dropped) == ["aaa", "aaaaaaaa"]
    assert "dropped='2 of 4 rows: 1, 3'" in str(dropped)
    assert prompts(cut) == ["aaa", "aaaaaaaa", "aaaaaaaa", "aaaaaaaa"]
    assert "truncated='2 of 4 rows: 1, 3'" in str(cut)
    assert "dropped" not in str(graph_of(path, ROWS[:1], too_long="drop"))


def test_what_the_template_writes_counts_and_stays(path: str) -> None:
    question = [{"role": "user", "content": "a" * 30}]
    with pytest.raises(DatasetError, match=r"row 0 .*'dataset' can't be shortened to 8 tokens"):
        graph_of(path, [{"prompt": question}], too_long="truncate-left")
    codec = load_tokenizer(Model(path))
    shorter = codec.shortened([{"role": "system", "content": "b"}, *question], 42, in_middle=False)
    assert shorter is not None
    assert codec.prompt_text(shorter) == f"<system>b<turn><user>{'a' * 14}<turn><assistant>"
    assert len(codec.encode_prompt(shorter)) == 42


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab é€\U0001f600", min_size=1, max_size=30), limit=st.integers(1, 20), in_middle=st.booleans())
def test_a_shortened_text_is_what_is_left_of_its_ends_and_fits(path: str, text: str, limit: int, in_middle: bool) -> None:
    codec = load_tokenizer(Model(path))
    if len(codec.encode_prompt(text)) <= limit:
        return
    shorter = codec.shortened(text, limit, in_middle=in_middle)
    if shorter is None:  # Its last character alone has more tokens.
        assert limit < 8
        return
    assert isinstance(shorter, str)
    assert 0 < len(codec.encode_prompt(shorter)) <= limit
    assert any(text.startswith(shorter[:at]) and text.endswith(shorter[at:]) for at in (range(len(shorter) + 1) if in_middle else [0]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_messages", [False, True])
def test_rows_of_any_loader_are_bounded_as_those_of_a_list(path: str, tmp_path: Path, stream: bool, as_messages: bool) -> None:
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in ROWS] if as_messages else ROWS
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limit = 8 + 18 * as_messages  # The template writes <user>, <assistant> and the token <turn>.

    def graph(loaded: bool, too_long: TooLong) -> MacroGraph:
        def body() -> None:
            policy = Policy(path, init="random")
            if loaded:
                read = Dataset.jsonl(tmp_path / "rows.jsonl", stream=stream, shuffle=False, name="dataset")
                read.within(policy, limit, too_long=too_long).take(3)
            else:
                Dataset(rows, policy=policy, max_prompt_tokens=limit, too_long=too_long, shuffle=False).take(3)

        return trace(Flow(body), {}, steps=1, seed=0)[0]

    assert str(graph(True, "drop")).partition("test_")[0] == str(graph(False, "drop")).partition("test_")[0]
    assert prompts(graph(True, "drop")) == prompts(graph(False, "drop"))
    with pytest.raises(DatasetError, match=r"the prompt of .*rows\.jsonl:2 has"):
        graph(True, "error")
    for too_long in ("truncate-left", "truncate-middle"):
        assert str(graph(True, too_long)).partition("test_")[0] == str(graph(False, too_long)).partition("test_")[0]
        assert prompts(graph(True, too_long)) == prompts(graph(False, too_long))
    limit = 1
    if as_messages:
        with pytest.raises(DatasetError, match=r"rows\.jsonl:1 can't be shortened"):
            graph(True, "truncate-left")
    else:
        assert prompts(graph(True, "truncate-left")) == ["a", "a", "a"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_of_a_file_that_is_too_long_is_named_by_its_line(path: str, stream: bool, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:1], {"prompt": "a"}, *ROWS[1:2]]))

    def body(skipped: int) -> None:
        policy = Policy(path)
        Dataset.jsonl(file, stream=stream, shuffle=False).shard(skipped, 2).within(policy, 8).take(1)

    for skipped in (0, 1):
        if skipped:
            file.write_text(file.read_text().replace('{"prompt": "a"}', json.dumps(ROWS[1])))
        line = 2 if skipped else 3
        with pytest.raises(DatasetError, match=rf"the prompt of .*q\.jsonl:{line} has 9 tokens, and max_prompt_tokens is 8"):
            trace(Flow(lambda skipped=skipped: body(skipped)), {}, steps=1, seed=0)
