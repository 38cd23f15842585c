"""The sample record: identities, ragged columns, batches, and a sample as a user's function sees it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_parts import lacks

from m2flow.errors import DatasetError, InternalError
from m2flow.samples import MAX_GROUP, Batch, Finish, Ragged, Sample, SampleId, column_of, group_keys, make_ids

identities = st.builds(SampleId, st.integers(0, 2**21 - 1), st.integers(0, 2**30 - 1), st.integers(0, 2**12 - 1))
texts = st.text(st.characters(), max_size=5)
rows_of_numbers = st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=6)


def batch_of(call: int = 0, prompts: int = 3, n: int = 2) -> Batch:
    ids = make_ids(call, prompts, n)
    numbers = np.arange(len(ids))
    return Batch(ids, {"number": numbers, "tokens": Ragged.of([[i] * (i % 3) for i in numbers.tolist()], np.int32)})


@given(identities, identities)
def test_packed_identities_are_ordered_as_tuples_and_come_back(one, other):
    assert SampleId.unpack(one.pack()) == one
    assert (one < other) == (one.pack() < other.pack())
    assert one.pack() < 2**63


@pytest.mark.parametrize("outside", [SampleId(2**21, 0, 0), SampleId(0, 2**30, 0), SampleId(0, 0, 2**12), SampleId(0, -1, 0)])
def test_an_identity_out_of_range_is_refused_instead_of_becoming_another(outside):
    with pytest.raises(InternalError, match="out of range"):
        outside.pack()


def test_the_samples_of_a_call_are_numbered_prompt_by_prompt():
    ids = make_ids(7, 2, 3)
    assert [SampleId.unpack(i) for i in ids] == [SampleId(7, p, g) for p in range(2) for g in range(3)]
    assert len(set(group_keys(ids).tolist())) == 2
    assert len(make_ids(7, 0, 3)) == 0


def test_a_group_too_large_for_its_bits_is_refused():
    assert len(np.unique(make_ids(0, 2, MAX_GROUP))) == 2 * MAX_GROUP
    with pytest.raises(InternalError, match="out of range"):
        make_ids(0, 2, MAX_GROUP + 1)


@given(st.lists(texts, max_size=6))
def test_texts_survive_their_column_lone_surrogates_included(rows):
    column = Ragged.texts([*rows, "\ud800", ""])
    assert [column.item(i) for i in range(len(column))] == [*rows, "\ud800", ""]


def test_json_rows_come_back_as_they_were():
    rows = [{"a": [1, 2.5, None]}, [], "text", None, True, {"é": "\U0001f600"}]
    column = Ragged.json(rows)
    assert [column.item(i) for i in range(len(rows))] == rows


@given(rows_of_numbers, st.data())
def test_taking_rows_of_a_ragged_column_gives_those_rows_in_that_order(rows, data):
    column = Ragged.of(rows, np.int64)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = column.take(np.array(wanted, np.int64))
    assert [taken.row(i).tolist() for i in range(len(taken))] == [rows[i] for i in wanted]
    assert taken.lengths.tolist() == [len(rows[i]) for i in wanted]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(["a", ""], "text"), ([True, False], "bool"), ([1, 2], "int64"), ([1, 2.5], "float64"), ([[1], [2, 3]], "json"), ([None, 1], "json")],
)
def test_a_column_has_the_kind_of_its_values(rows, kind):
    column = column_of(rows)
    assert (column.kind if isinstance(column, Ragged) else column.dtype.name) == kind


@pytest.mark.parametrize("rows", [[b"bytes"], [{1, 2}], [object()], [10**30], [1, 1j]])
def test_values_that_are_no_column_are_refused_by_the_columns_name(rows):
    with pytest.raises(DatasetError, match=r"column 'k' .*neither numbers, texts nor JSON"):
        column_of(rows, "k")


def test_a_batch_refuses_a_column_of_another_length():
    with pytest.raises(InternalError, match="column 'x' has 3 rows in a batch of 2"):
        Batch(make_ids(0, 2), {"x": np.zeros(3)})


@given(st.permutations(range(6)))
def test_selecting_by_identity_does_not_depend_on_the_order_of_the_batch(order):
    batch = batch_of()
    mixed = batch.take(order)
    assert mixed.in_order().ids.tolist() == batch.ids.tolist()
    wanted = batch.ids[[4, 0, 5]]
    found = mixed.select(wanted)
    assert found.ids.tolist() == wanted.tolist()
    assert found.dense("number").tolist() == [4, 0, 5]
    assert found.ragged("tokens").item(0).tolist() == [4]


def test_selecting_a_sample_that_is_not_there_names_it():
    with pytest.raises(InternalError, match="samples p3/0 are not in this batch of 6"):
        batch_of().select(make_ids(0, 4, 1)[3:])
    with pytest.raises(InternalError, match="not in this batch of 0"):
        Batch(np.zeros(0, np.int64)).select(make_ids(0, 1))
    assert len(Batch(np.zeros(0, np.int64)).select(make_ids(0, 0))) == 0


def test_a_join_goes_by_identity_and_the_other_wins():
    batch = batch_of()
    other = Batch(batch.ids[::-1].copy(), {"number": np.arange(6) * 10, "extra": np.arange(6)})
    joined = batch.join(other)
    assert joined.ids.tolist() == batch.ids.tolist()
    assert joined.dense("extra").tolist() == [5, 4, 3, 2, 1, 0]
    assert joined.dense("number").tolist() == [50, 40, 30, 20, 10, 0]


def test_concat_undoes_slicing_and_refuses_other_columns():
    batch = batch_of()
    whole = Batch.concat([batch.take([0, 1]), batch.take([2]), batch.take([3, 4, 5])])
    assert whole.ids.tolist() == batch.ids.tolist()
    assert whole.ragged("tokens").values.tolist() == batch.ragged("tokens").values.tolist()
    assert whole.ragged("tokens").offsets.tolist() == batch.ragged("tokens").offsets.tolist()
    assert len(Batch.concat([])) == 0
    with pytest.raises(InternalError, match="different columns"):
        Batch.concat([batch, batch.without(["tokens"])])


def test_group_bounds_are_the_row_ranges_of_the_prompts():
    assert batch_of(prompts=3, n=2).group_bounds() == [(0, 2), (2, 4), (4, 6)]
    assert batch_of(prompts=3, n=2).take([0, 2, 3, 5]).group_bounds() == [(0, 1), (1, 3), (3, 4)]
    assert Batch(np.zeros(0, np.int64)).group_bounds() == []
    two_calls = Batch.concat([batch_of(0, 1, 2), batch_of(1, 1, 2)])
    assert two_calls.group_bounds() == [(0, 2), (2, 4)]


def test_a_sample_gives_its_columns_as_plain_python():
    ids = make_ids(0, 1)
    mask = Ragged.of([[False, True, True]], np.bool_)
    columns = {"prompt": Ragged.texts(["2+2="]), "k": np.array([4]), "loss_mask": mask, "finish": np.array([1], np.uint8)}
    sample = Sample(Batch(ids, {**columns, "more": Ragged.json([{"a": 1}])}), 0)
    assert (sample.prompt, sample.k, sample["more"]) == ("2+2=", 4, {"a": 1})
    assert type(sample.k) is int
    assert (sample.id, sample.num_tokens, sample.finish) == (SampleId(0, 0, 0), 2, Finish.LENGTH)
    assert repr(sample) == "Sample(p0/0)"


def test_a_misspelt_attribute_of_a_sample_is_told_what_there_is():
    sample = Sample(Batch(make_ids(0, 1), {"prompt": Ragged.texts(["a"]), "answer": np.array([1])}), 0)
    with pytest.raises(AttributeError) as caught:
        _ = sample.anwser
    assert not lacks(str(caught.value), "no 'anwser'", "answer, prompt, id, num_tokens, finish, messages, prompt_text")
    assert not hasattr(sample, "__deepcopy__")
    assert not hasattr(Sample(Batch(make_ids(0, 1)), 0), "prompt_text")
