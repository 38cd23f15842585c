"""Spans as columns, rows without overlap, and bars that a window can show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from observed_run import record_run, store_run

from m2flow.observe.store import TraceColumns, TraceStore, read_spans
from m2flow.viewer.schedule import IntervalRows, Window, bars_in, running_at

_Pairs = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=60)


def test_columns_say_of_every_span_what_the_trace_says(tmp_path: Path) -> None:
    store_run(tmp_path, record_run())
    columns = TraceColumns(tmp_path)
    assert columns.refresh()
    assert not columns.refresh()
    told = sorted(
        (columns.names.texts[name], start, end, columns.workers.texts[worker])
        for name, start, end, worker in zip(columns["name"], columns["start"], columns["end"], columns["worker"], strict=True)
    )
    assert told == sorted((span.name, span.start_ns, span.end_ns, span.lane[0]) for span in read_spans(tmp_path))
    for index in range(columns.num_spans):
        span = columns.span(index)
        assert (span.name, span.start_ns) == (columns.names.texts[columns["name"][index]], columns["start"][index])
        assert span.attributes.get("call", -1) == columns["call"][index]


def test_a_trace_that_grows_is_followed_and_one_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    blocks = record_run()
    store_run(tmp_path, blocks[:2])
    columns = TraceColumns(tmp_path)
    columns.refresh()
    before = columns.num_spans
    store_run(tmp_path, blocks[2:])
    assert columns.refresh()
    assert columns.num_spans == sum(len(block.spans) for block in blocks) > before
    (tmp_path / "trace" / "spans.msgpack").unlink()
    store_run(tmp_path, blocks[:1])
    assert columns.refresh()
    assert (columns.generation, columns.num_spans) == (1, len(blocks[0].spans))


def test_a_record_that_is_being_written_is_left_until_it_is_whole(tmp_path: Path) -> None:
    blocks = record_run()
    store_run(tmp_path, blocks)
    path = tmp_path / "trace" / "spans.msgpack"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    columns = TraceColumns(tmp_path)
    columns.refresh()
    assert columns.num_spans == sum(len(block.spans) for block in blocks[:-1])
    assert columns.num_unread_bytes > 0
    path.write_bytes(whole)
    columns.refresh()
    assert (columns.num_spans, columns.num_unread_bytes) == (sum(len(block.spans) for block in blocks), 0)


def test_reading_in_small_parts_gives_the_same(tmp_path: Path) -> None:
    with TraceStore(tmp_path) as store:
        for seed in range(4):
            for block in record_run(seed=seed):
                store.append(block)
    whole, parts = TraceColumns(tmp_path), TraceColumns(tmp_path)
    whole.refresh()
    while parts.refresh(100):
        pass
    assert np.array_equal(whole["start"], parts["start"])
    assert np.array_equal(whole.touches, parts.touches)


@given(_Pairs, st.integers(0, 60))
def test_rows_hold_every_interval_once_in_order_and_disjoint(pairs: list[tuple[int, int]], cut: int) -> None:
    start = np.array([a for a, _ in pairs], np.int64)
    end = start + np.array([d for _, d in pairs], np.int64)
    rows = IntervalRows()
    for part in (np.arange(len(pairs))[:cut], np.arange(len(pairs))[cut:]):
        rows.add(part, start[part], end[part])
    found = [rows.row(number) for number in range(len(rows))]
    assert sorted(i for row in found for i in row) == list(range(len(pairs)))
    for row in found:
        assert (start[row][1:] >= end[row][:-1]).all()


@example([(0, 4), (19, 60), (19, 60), (59, 0), (0, 1)], 1, 181, 1)
@example([(0, 29), (0, 2)], 1, 28, 2)
@given(_Pairs, st.integers(1, 40), st.integers(0, 400), st.integers(1, 400))
def test_a_window_covers_what_is_in_it_with_few_bars(pairs: list[tuple[int, int]], width: int, begin: int, wide: int) -> None:
    gaps = np.array([a % 20 for a, _ in pairs], np.int64)
    took = np.array([d for _, d in pairs], np.int64)
    end = np.cumsum(gaps + took)
    start = end - took
    kinds = np.arange(len(pairs)) % 3
    whole = bars_in(start, end, kinds, Window(begin, begin + wide))
    bars = bars_in(start, end, kinds, Window(begin, begin + wide, width))
    assert len(bars) <= 2 * width + 2
    assert bars.count.sum() == len(whole)
    assert (bars.start[1:] >= bars.end[:-1]).all()
    filled = ((bars.end - bars.start) * bars.filled).sum()
    assert np.isclose(filled, (whole.end - whole.start).sum())
    inside = (end > begin) & (start < begin + wide)
    assert len(whole) >= inside.sum()
    alone = bars.count == 1
    assert np.array_equal(kinds[bars.index[alone]], bars.kind[alone])


def test_running_counts_what_has_begun_and_not_ended() -> None:
    start, end = np.array([0, 5, 7]), np.array([6, 8, 9])
    assert running_at(start, end, np.array([0, 5, 6, 8, 9])).tolist() == [1, 2, 1, 1, 0]
