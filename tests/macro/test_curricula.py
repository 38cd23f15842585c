"""A curriculum of what was seen: which rows come next is decided by what the flow observed of them, in the order of the program alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_clusters import SPLIT
from replayed import Keeping

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import DatasetError, TraceError
from m2flow.macro.draw_order import ListedRows, Observed
from m2flow.macro.replay import MemoryRecord, ReplayBackend, trains
from m2flow.macro.tracing import trace
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * i}=", "number": i} for i in range(9)]


def hardest_first(row: Any, seen: Sequence[float]) -> float | None:
    """New rows, then those with the lowest reward; what was solved twice is left out."""
    return -1.0 if not seen else None if min(seen[-2:]) > 0.6 and len(seen) > 1 else seen[-1]


def judged(sample: Sample) -> float:
    return len(str(sample.text)) % 7 / 6


@flow
def climbs(num_steps: int = 8, lag: int = 0, drawn: list[object] | None = None, refills: bool = False, stream: str = "") -> None:
    """Observes rewards of rows in memory, or of those that are read from a file as they are drawn."""
    policy, judge = Policy("fake"), Reward(judged)
    prompts = Dataset(ROWS, curriculum=hardest_first)
    if stream:
        prompts = Dataset.jsonl(stream, stream=True, name="dataset", curriculum=hardest_first)
    drawn = drawn if drawn is not None else []
    drawn.clear()
    for _ in steps(num_steps):
        if refills:
            responses = policy.generate(prompts, n=2, count=2, score=judge, max_draws=6, max_new_tokens=6, keep=lambda group: True)
        else:
            asked = prompts.take(3)
            drawn.append([sample.row for sample in asked])
            responses = policy.generate(asked, n=2, max_new_tokens=6)
        rewards = judge.score(responses)
        prompts.observe(responses, rewards, lag=lag)
        policy.update(responses, rewards)
    drawn.append(prompts.cursor)


def test_the_lowest_level_comes_first_each_row_once_an_epoch_and_none_passes_a_row_over() -> None:
    order = Observed(ListedRows(ROWS[:4]), lambda row, seen: seen[-1] if seen else float(row["number"]), "rows", shuffle=False)  # type: ignore[arg-type]
    assert [order.at(i, 0, "") for i in range(3)] == [0, 1, 2]
    order.saw({"0": 5.0, "1": -1.0})
    assert [order.at(i, 0, "") for i in range(8)] == [0, 1, 2, 3, 1, 2, 3, 0]
    order.go_back(5)
    order.saw({"2": 9.0})
    assert [order.at(i, 0, "") for i in range(5, 9)] == [3, 0, 2, 1]
    few = Observed(ListedRows(ROWS[:4]), lambda row, seen: None if row["number"] == 1 or seen else 0.0, "rows", shuffle=True)
    assert sorted(few.at(i, 0, "") for i in range(3)) == [0, 2, 3]
    few.saw({"0": 1.0, "2": 1.0})
    assert [few.at(i, 0, "") for i in range(3, 5)] == [3, 3]
    few.saw({"3": 1.0})
    with pytest.raises(DatasetError, match="passes over all of its 4 rows"):
        few.at(5, 0, "")


@pytest.mark.parametrize("options", [{}, {"lag": 1}, {"refills": True}], ids=str)
def test_the_same_rows_are_drawn_in_every_schedule(options: dict[str, Any]) -> None:
    first: list[object] = []
    alone = run_eager(climbs, {"drawn": first, **options}, SPLIT)
    assert alone.error == "", alone.error
    for order_seed in (1, 2):
        again: list[object] = []
        assert run_planned(climbs, {"drawn": again, **options}, SPLIT, order_seed=order_seed) == alone
        assert again == first


def test_what_was_seen_decides_and_a_lag_leaves_the_newest_out() -> None:
    drawn: dict[int, list[Any]] = {0: [], 1: []}
    for lag, rows in drawn.items():
        run_eager(climbs, {"drawn": rows, "lag": lag}, SPLIT)
    for rows in drawn.values():
        assert sorted(row for step in rows[:3] for row in step) == list(range(9))  # The first epoch: what is new comes first.
        assert rows[-1] == 24
    assert drawn[0] != drawn[1]
    assert drawn[0][3:6] != drawn[0][:3]


@pytest.fixture
def on_disk(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("options", [{}, {"lag": 1}, {"refills": True}], ids=str)
def test_a_stream_draws_the_rows_that_would_be_drawn_in_memory(options: dict[str, Any], on_disk: str) -> None:
    kept: list[object] = []
    alone = run_eager(climbs, {"drawn": kept, **options}, SPLIT)
    streamed: list[object] = []
    assert run_planned(climbs, {"drawn": streamed, "stream": on_disk, **options}, SPLIT, order_seed=3).weights == alone.weights
    assert streamed == kept


def test_parts_of_a_stream_are_drawn_by_what_was_seen_of_them(on_disk: str) -> None:
    def levels(stream: bool) -> list[list[int]]:
        def highest_first(row: Any, seen: Sequence[float]) -> float:
            return -row["number"] - 20 * len(seen)

        whole = Dataset.jsonl(on_disk, stream=stream, shuffle=False, curriculum=highest_first)
        found = []
        for part in (whole, whole.shard(1, 2), whole.split(3)[0]):
            part._order.saw({"1": 0.0})  # type: ignore[attr-defined]
            found.append([part._order.at(i, 0, "") for i in range(len(part))])
        return found

    assert levels(stream=True) == levels(stream=False)
    assert levels(stream=True)[:2] == [[1, 8, 7, 6, 5, 4, 3, 2, 0], [1, 3, 2, 0]]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("until_step", [1, 4, 7])
def test_a_resumed_run_draws_the_rows_of_the_run_that_was_not_interrupted(until_step: int, is_stream: bool, on_disk: str) -> None:
    first: list[object] = []
    record = MemoryRecord()
    options = {"stream": on_disk} if is_stream else {}
    whole = run_eager(climbs, {"drawn": first, **options}, SPLIT, around=lambda backend: Keeping(backend, record))
    again: list[object] = []
    answer = run_planned(
        climbs, {"drawn": again, **options}, SPLIT, around=lambda live: ReplayBackend(record, live, until_step=until_step, redoes=trains)
    )
    assert answer.error == "", answer.error
    assert (again, answer.weights) == (first, whole.weights)


def test_what_was_seen_is_a_barrier_of_the_plan_and_each_row_says_which_it_is() -> None:
    graph, _, _ = trace(climbs, {"num_steps": 2}, steps=2, assume=None)
    assert "what was seen of dataset, which decides the next rows" in [seen.why for seen in graph.observations]
    rows = graph.calls[0].options["rows"]
    assert [(sample.row, sample.number) for sample in rows.rows()] == [(i, i) for i in rows["row"].tolist()]  # type: ignore[attr-defined,index]


def test_what_can_not_be_seen_is_refused(tmp_path: Path) -> None:
    def observes(dataset: Any, given: Any = None) -> Any:
        def body() -> None:
            policy = Policy("fake")
            responses = policy.generate(dataset.take(1), max_new_tokens=1)
            dataset.observe(responses, given or Reward(judged).score(responses))

        return lambda: trace(flow(body), {})

    with pytest.raises(TraceError, match="has no curriculum of what was seen"):
        observes(Dataset(ROWS, curriculum="number"))()
    with pytest.raises(TraceError, match="needs one number for each response, and got a int"):
        observes(Dataset(ROWS, curriculum=hardest_first), 3)()
    with pytest.raises(DatasetError, match=r"curriculum .*'dataset' .*numbers.* row 0 has 'x'"):
        Dataset(ROWS, curriculum=lambda row, seen: "x")  # type: ignore[arg-type,return-value]
    with pytest.raises(DatasetError, match="has a column 'row'"):
        Dataset([{"prompt": "a", "row": 1}], curriculum=hardest_first)
    with pytest.raises(DatasetError, match="no curriculum of what was seen"):
        Dataset.mix([Dataset(ROWS, curriculum=hardest_first)])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "row": 1}\n')
    with pytest.raises(DatasetError, match="has a column 'row'"):
        Dataset.jsonl(path, stream=True, curriculum=hardest_first)
