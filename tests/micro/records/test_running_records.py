"""What is written of samples in flight: of an episode each record has what is new in it, and is read as all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_thread import SteppedRun
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, flow, log, steps, tool
from m2flow.errors import EngineError
from m2flow.micro.records.segments import Kind, Place, Scratch, SegmentReader, SegmentWriter, read_segment, scan_segments, start_of
from m2flow.observe.metrics import read_metrics
from m2flow.samples import Batch, Ragged
from m2flow.spec import RunSettings

pytest_plugins = ["small_runs"]


def rows_of(ids: Sequence[int], episodes: Sequence[Any], **tokens: Sequence[Sequence[int]]) -> Batch:
    """Rows of episodes with these records; of each its segments' kinds and lengths, and its tokens."""
    number = {"segment_kinds": np.uint8, "segment_lengths": np.int32, "tokens": np.int32}
    columns: dict[str, Any] = {name: Ragged.of(tokens.get(name, [[]] * len(ids)), kind) for name, kind in number.items()}
    columns["logprobs"] = Ragged.of(
        [[math.nan if one % 3 else -one / 7 for one in of] for of in tokens.get("tokens", [[]] * len(ids))], np.float32
    )
    columns["loss_mask"] = Ragged.of([[one % 10 < 5 for one in of] for of in tokens.get("tokens", [[]] * len(ids))], np.bool_)
    columns |= {"text": Ragged.texts([str(one)[:9] for one in episodes]), "reward": np.full(len(ids), math.nan)}
    columns["num_turns"] = np.array([len(str(one)) for one in episodes])
    return Batch(np.array(ids, np.int64), {**columns, "episode": Ragged.json(episodes)})


def assert_same(one: Batch, other: Batch) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        same = other[name]
        if isinstance(column, Ragged):
            assert isinstance(same, Ragged)
            assert (column.kind, column.values.dtype, column.offsets.tolist()) == (same.kind, same.values.dtype, same.offsets.tolist())
            column, same = column.values, same.values
        assert column.tobytes() == same.tobytes(), name  # type: ignore[union-attr]


texts = st.text(st.characters(max_codepoint=0xD900), max_size=3)
values = st.recursive(
    st.none() | st.integers(-2, 2) | st.floats(allow_nan=True) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
lengths = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 3), values, lengths), min_size=1, max_size=3, unique_by=lambda one: one[0]), min_size=1))
def test_what_is_read_is_what_was_to_be_written_whatever_changed(tmp_path_factory, written):
    folder = tmp_path_factory.mktemp("segments")
    scratch = Scratch(folder, "rollout-0-running", rotates_at_bytes=3000)
    known: list[tuple[Batch, Place]] = []
    for number, pass_ in enumerate(written):
        kinds, of = [[kind for kind, _ in segments] for _, _, segments in pass_], [[num for _, num in segments] for _, _, segments in pass_]
        tokens = [[number % 2 * (at % 5) for at in range(sum(nums))] for nums in of]
        rows = rows_of(
            [packed for packed, _, _ in pass_], [value for _, value, _ in pass_], segment_kinds=kinds, segment_lengths=of, tokens=tokens
        )
        done = scratch.append_rows(rows, 7)
        assert sorted(packed for told, _ in done for packed in told.ids.tolist()) == sorted(rows.ids.tolist())
        known += done
        for told, place in done:
            assert_same(told, rows.select(told.ids))
            assert_same(read_segment(folder, place), told)
    scratch.close()
    there = {path.name for path in folder.glob("*.seg")}
    found = list(scan_segments(folder, "rollout-0-running", {}))
    assert [one.place for one in found] == [place for _, place in known if place[0] in there]
    assert {one.kind for one in found} == {Kind.RUNNING}
    reader, whole = SegmentReader(folder), {place: told for told, place in known}
    for one in found:
        assert_same(reader.read(one.place), whole[one.place])
    for one in reversed(found):
        last = whole[one.place].ids.tolist()[-1:]
        assert_same(reader.read(one.place, last), whole[one.place].select(np.array(last)))


def grown(number: int, turns: int) -> Batch:
    """An episode of so many turns in two conversations."""
    said = [[{"finish": 0, "text": f"{name} {at} {'x' * 20}"} for at in range(turns)] for name in "ab"]
    tools = {f"{name}/{at:04}/0": {"name": "f", "arguments": {}, "result": "y" * 20} for name in "ab" for at in range(turns)}
    record = {"turns": said[0] + said[1], "tools": dict(sorted(tools.items()))}
    kinds, of = ([0] + [1, 2] * turns) * 2, ([20] + [5, 5] * turns) * 2
    tokens = [at % 97 for at in range(20 + 10 * turns)] * 2
    return rows_of([number], [record], segment_kinds=[kinds], segment_lengths=[of], tokens=[tokens])


def test_what_is_new_of_an_episode_takes_as_many_bytes_after_many_turns_as_after_few(tmp_path):
    scratch = Scratch(tmp_path, "rollout-0-running")
    sizes = [scratch.append_rows(grown(1, turns), 0)[0][1][2] for turns in range(1, 60)]
    assert max(sizes[1:]) < 1.2 * min(sizes[1:])
    scratch.close()


def test_of_more_episodes_than_a_file_holds_what_is_written_does_not_grow_with_the_square_of_their_turns(tmp_path):
    def num_bytes(turns: int) -> int:
        scratch = Scratch(tmp_path / str(turns), "rollout-0-running", rotates_at_bytes=20_000)
        total = 0
        for turn in range(1, turns):
            for number in range(20):
                total += sum(place[2] for _, place in scratch.append_rows(grown(number, turn), 0))
        scratch.release(range(20))
        assert len(list((tmp_path / str(turns)).glob("*.seg"))) <= 2
        scratch.close()
        return total

    assert num_bytes(40) < 2.5 * num_bytes(20)


def test_a_file_that_is_damaged_in_a_record_is_not_read_beyond_it(tmp_path):
    scratch = Scratch(tmp_path, "rollout-0-running")
    places = [scratch.append_rows(grown(1, turns), 0)[0][1] for turns in (1, 2, 3)]
    scratch.close()
    path = tmp_path / places[1][0]
    whole = path.read_bytes()
    at = places[1][1] + places[1][2] // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert read_segment(tmp_path, places[0]).ids.tolist() == [1]
    with pytest.raises(EngineError, match="damaged at byte"):
        read_segment(tmp_path, places[2])
    path.write_bytes(whole[: places[2][1] + 5])
    assert [one.place for one in scan_segments(tmp_path, "rollout-0-running", {})] == places[:2]
    assert_same(read_segment(tmp_path, places[1]), grown(1, 2))
    assert start_of(places[1]) == places[0][1] + places[0][2]


# ---- runs


@tool(replay="pure")
async def look_up(word: str) -> str:
    """Look something up."""
    return word


@agent
async def long_one(chat: Chat, row: Sample) -> float:
    turn = await chat.say("begin", tools=[look_up], max_tokens=8)
    for number in range(int(row.turns) - 1):
        turn = await chat.reply([ToolCall("look_up", {"word": f"w{number}"})], max_tokens=8)
    return float(len(turn.text))


@flow
def of_turns(turns: int) -> None:
    policy = Policy("fake")
    rows = Dataset([{"prompt": "?", "turns": turns}] * 2, name="rows")
    for _ in steps(1):
        log(num=policy.rollout(long_one, rows.take(2), n=1, max_tokens=100_000, max_turns=100).num_turns.mean())


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """The sizes of all records of samples in flight."""
    found: list[int] = []
    append = SegmentWriter.append

    def counted(self: SegmentWriter, *arguments: Any, **more: Any) -> Place:
        place = append(self, *arguments, **more)
        found.extend([place[2]] * ("running" in place[0]))
        return place

    monkeypatch.setattr(SegmentWriter, "append", counted)
    return found


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_eager", [False, True], ids=["planned", "eager"])
def test_an_episode_of_twice_as_many_turns_writes_twice_as_many_bytes(tmp_path: Path, written: list[int], is_eager: bool):
    totals = []
    for turns in (25, 50, 99):
        written.clear()
        run = SteppedRun(
            of_turns, {"turns": turns}, fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path / str(turns)), eager=is_eager)
        )
        run.execute()
        assert read_metrics(run.run_dir)["num"] == [(0, float(turns))]
        totals.append(sum(written))
    assert totals[1] < 2.2 * totals[0]
    assert totals[2] < 2.2 * totals[1]
