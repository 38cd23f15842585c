"""Messages between controller and workers: what goes in comes out, and hostile bytes are a clean error."""

import contextlib
import functools
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import DecodeError, ErrorRecord, RewardError, error_from_record
from m2flow.micro.protocol import messages as m
from m2flow.observe.spans import Recorder, SpanName

relaxed = settings(deadline=None, max_examples=200)

TO_WORKER = typing.get_args(m.ToWorker)
TO_CONTROLLER = typing.get_args(m.ToController)
_int64 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(max_size=8)


@functools.cache
def of(kind: object) -> st.SearchStrategy[object]:
    """Values of a message's field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    simple = {
        int: _int64,
        float: st.floats(allow_nan=False),
        str: _text,
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        type(None): st.none(),
    }
    if kind in simple:
        return simple[kind]  # type: ignore[index]
    if origin is list:
        return st.lists(of(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=3)
    if origin is tuple:
        return st.lists(of(arguments[0]), max_size=3).map(tuple) if arguments[-1] is ... else st.tuples(*map(of, arguments))
    if arguments:
        return st.one_of(*map(of, arguments))
    hints = typing.get_type_hints(kind)
    names = getattr(kind, "_fields", None) or [field.name for field in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
    return st.builds(kind, **{name: of(hints[name]) for name in names})  # type: ignore[arg-type, type-var]


def decoder(kind: type) -> typing.Callable[[bytes], object]:
    return m.decode_to_worker if kind in TO_WORKER else m.decode_to_controller


@pytest.mark.parametrize("kind", [k for k in (*TO_WORKER, *TO_CONTROLLER) if k is not m.Spans], ids=lambda k: k.__name__)
@relaxed
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(kind, data):
    message = data.draw(of(kind))
    assert decoder(kind)(m.encode(message)) == message


def test_spans_come_out_as_they_went_in():
    recorder = Recorder("w")
    with recorder.span(SpanName.SWITCH, label="to train"):
        pass
    message = m.Spans(recorder.drain())
    assert m.encode(m.decode_to_controller(m.encode(message))) == m.encode(message)


def test_an_error_keeps_its_class_and_its_parts():
    error = RewardError("it raised", where="f.py:3", now="Mend it.", remote="Traceback")
    failed = m.decode_to_controller(m.encode(m.TaskFailed(1, 2, error.to_record())))
    assert isinstance(failed, m.TaskFailed)
    assert str(error_from_record(failed.error)) == str(error)
    assert "Nonsense" in str(error_from_record(ErrorRecord("Nonsense", "x")))


@relaxed
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.booleans() | _int64 | _text, lambda x: st.lists(x) | st.dictionaries(_text, x)).map(
        msgspec.msgpack.encode
    )
)
def test_bytes_that_are_no_message_are_a_clean_error(data):
    for decode in (m.decode_to_worker, m.decode_to_controller):
        with pytest.raises(DecodeError):
            decode(data)


@relaxed
@given(st.sampled_from(TO_WORKER), st.data())
def test_a_message_with_a_byte_changed_or_cut_is_a_message_or_a_clean_error(kind, data):
    whole = bytearray(m.encode(data.draw(of(kind))))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(DecodeError):
        assert isinstance(m.decode_to_worker(damaged), m.Message)


def test_a_worker_does_not_take_what_only_a_controller_is_told_and_the_other_way_round():
    with pytest.raises(DecodeError):
        m.decode_to_worker(m.encode(m.Goodbye()))
    with pytest.raises(DecodeError):
        m.decode_to_controller(m.encode(m.Stop()))
