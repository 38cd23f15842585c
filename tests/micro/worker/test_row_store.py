"""The rows that a worker has."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.micro.protocol.worker_state import RowStore
from m2flow.samples import Batch, Ragged

relaxed = settings(deadline=None)


def rows(ids: list[int], mark: int = 0) -> Batch:
    return Batch(
        np.array(ids, np.int64),
        {"value": np.array([i * 10 + mark for i in ids]), "tokens": Ragged.of([[i] * (i % 3) for i in ids], np.int32)},
    )


@relaxed
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), min_size=1, max_size=6), st.randoms())
def test_rows_come_back_in_the_order_asked_for_and_the_last_put_counts(parts, random):
    store, latest = RowStore(), {}
    for mark, ids in enumerate(parts):
        store.put(1, rows(ids, mark))
        latest.update({i: i * 10 + mark for i in ids})
    wanted = random.sample(sorted(latest), random.randint(1, len(latest)))
    got = store.get(1, wanted)
    assert got.ids.tolist() == wanted
    assert got.dense("value").tolist() == [latest[i] for i in wanted]
    assert [got.ragged("tokens").row(k).tolist() for k in range(len(got))] == [[i] * (i % 3) for i in wanted]


def test_it_has_what_was_put_for_that_call_alone():
    store = RowStore()
    store.put(1, rows([1, 2]))
    assert store.has(1, [2, 1])
    assert not store.has(1, [1, 3])
    assert not store.has(2, [1])
    assert store.has(2, [])


def test_forgotten_rows_are_gone_and_forgetting_twice_is_nothing():
    store = RowStore()
    store.put(1, rows([1]))
    store.forget(1)
    store.forget(1)
    assert not store.has(1, [1])
    store.put(1, rows([2]))
    assert not store.has(1, [2])  # It came late, and nobody would forget it again.
