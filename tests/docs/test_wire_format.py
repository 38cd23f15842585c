"""The page of the wire format, read against what m2flow encodes, by another implementation of MessagePack."""

from __future__ import annotations

import io
import re
import struct
import sys
import typing
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from m2flow.channels import codec
from m2flow.channels.channel import Parcel
from m2flow.micro.protocol import messages
from m2flow.observe.spans import Recorder, SpanName
from m2flow.observe.store import TraceStore
from m2flow.samples import Batch, Ragged

msgpack = pytest.importorskip("msgpack")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import wire_format  # noqa: E402 (a script of docs/, which is no package)

PAGE = wire_format.page()
KINDS = [kind for kinds in wire_format.LINKS.values() for kind in kinds]


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Name of a message or a structure -> field -> its place and type, as the page has them."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    name = ""
    for line in PAGE.partition("## Messages")[2].splitlines():
        if begun := re.match(r"\*\*(\w+)\*\*: ", line):
            name = begun[1]
            found[name] = {}
        elif row := re.match(r"\| (\d*) \| `(\w+)` \| (.*?) \| ", line):
            found[name][row[2]] = (row[1], row[3])
    return found


TABLES = tables()


def example(hint: Any) -> Any:
    """A value of a type: nothing is empty, and where something may be nil it is not."""
    simple = {int: 2**40 + 1, float: 0.5, str: "é", bool: True, bytes: b"\x00\xff"}
    if hint in simple:
        return simple[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [example(arguments[0])]
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin is tuple:
        return (example(arguments[0]),) if arguments[-1] is ... else tuple(map(example, arguments))
    if arguments:
        return example(arguments[0])
    return hint(**{name: example(kind) for name, kind in wire_format.field_types(hint).items()})


def check(value: Any, said: str, where: str) -> None:
    """Check a value that `msgpack` has read against the words of the page."""
    simple = {"int": int, "float": float, "str": str, "bool": bool, "bin": bytes, "nil": type(None)}
    alternatives = [one.strip("()") for one in re.split(r" or (?![^\[(]*[\])])", said)]
    if len(alternatives) > 1:
        failures = []
        for one in alternatives:
            try:
                return check(value, one, where)
            except AssertionError as error:
                failures.append(str(error))
        raise AssertionError(f"{where}: {value!r} is none of {said}: {failures}")
    if said in simple:
        assert type(value) is simple[said], f"{where}: {value!r} is no {said}"
    elif said.startswith("array of "):
        assert type(value) is list, f"{where}: {value!r} is no array"
        for one in value:
            check(one, said.removeprefix("array of "), where)
    elif said.startswith("map of "):
        key_kind, _, value_kind = said.removeprefix("map of ").partition(" to ")
        assert type(value) is dict, f"{where}: {value!r} is no map"
        for key, one in value.items():
            check(key, key_kind, where)
            check(one, value_kind.strip("()"), where)
    elif said.startswith("["):
        kinds = re.split(r", (?![^(]*\))", said[1:-1])
        assert type(value) is list, f"{where}: {value!r} is no array"
        assert len(value) == len(kinds), where
        for one, kind in zip(value, kinds, strict=True):
            check(one, kind, where)
    else:
        check_structure(value, said, f"{where}, {said}")


def check_structure(value: Any, name: str, where: str) -> None:
    table = TABLES[name]
    if any(place for place, _ in table.values()):
        assert type(value) is list, f"{where}: {value!r} is no array"
        value = dict(zip(table, value, strict=True))
    assert list(value) == list(table), where
    for field, (_, said) in table.items():
        check(value[field], said, f"{where}.{field}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_is_read_by_another_implementation_as_the_page_says(kind: type[messages.Message]) -> None:
    message = example(kind)
    read = msgpack.unpackb(messages.encode(message), strict_map_key=False)
    assert read[0] == kind.__name__
    table = TABLES[kind.__name__]
    assert [place for place, _ in table.values()] == [str(place) for place in range(1, len(read))]
    for value, (field, (_, said)) in zip(read[1:], table.items(), strict=True):
        check(value, said, f"{kind.__name__}.{field}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_another_implementation_writes_is_the_same_message(kind: type[messages.Message]) -> None:
    message = example(kind)
    read = msgpack.unpackb(messages.encode(message), strict_map_key=False)
    assert msgspec.msgpack.decode(msgpack.packb(read), type=kind) == message


def test_every_message_and_structure_is_on_the_page_with_what_it_is() -> None:
    assert set(TABLES) == {kind.__name__ for kind in (*KINDS, *wire_format.structures())}
    assert set(KINDS) == {
        kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, messages.Message) and not _is_base(kind)
    }


def _is_base(kind: type) -> bool:
    return kind in (messages.Message, messages.Task)


def test_a_parcel_is_read_by_the_page(tmp_path: Path) -> None:
    hidden = np.arange(2 * codec.INLINE_BYTES, dtype=np.uint8).reshape(2, -1)
    columns = {"reward": np.array([0.5, 1.0]), "text": Ragged.texts(["é", "b"]), "hidden": hidden}
    head, *large = codec.encode(Parcel(5, Batch(np.array([7, 9]), columns), "worker-0"))
    assert head[:3] == b"m2f"
    version, size = struct.unpack("<BI", head[3:8])
    assert f"| 3 | the format, {version} |" in PAGE
    call, sender, num_rows, inline_bytes, described = msgpack.unpackb(head[8 : 8 + size])
    assert (call, sender, num_rows) == (5, "worker-0", 2)
    at = 8 + size

    def take(dtype: str, num: int) -> np.ndarray[Any, np.dtype[Any]]:
        nonlocal at
        num_bytes = num * np.dtype(dtype).itemsize
        if num_bytes > inline_bytes:
            return np.frombuffer(large.pop(0), dtype)
        at += -at % 8
        at += num_bytes
        return np.frombuffer(head[at - num_bytes : at], dtype)

    assert take("int64", num_rows).tolist() == [7, 9]
    rows: dict[str, list[Any]] = {}
    for name, kind, dtype, shape in described:
        assert f"| `{kind}` |" in PAGE
        offsets = None if kind == "dense" else take("int64", num_rows + 1)
        values = take(dtype, int(np.prod(shape))).reshape(shape)
        rows[name] = [values[row] if offsets is None else values[offsets[row] : offsets[row + 1]] for row in range(num_rows)]
    assert [float(one) for one in rows["reward"]] == [0.5, 1.0]
    assert [bytes(one).decode() for one in rows["text"]] == ["é", "b"]
    assert np.array_equal(np.stack(rows["hidden"]), hidden)
    assert not large


def test_a_trace_is_read_by_the_page(tmp_path: Path) -> None:
    recorder = Recorder("trainer-0/train")
    with recorder.span(SpanName.SWITCH, label="to train", call=3):
        pass
    recorder.count("kv_used", 4.0)
    with TraceStore(tmp_path) as store:
        store.append(recorder.drain())
    file = io.BytesIO((tmp_path / "trace" / "spans.msgpack").read_bytes())
    length, checksum = struct.unpack("<II", file.read(8))
    body = file.read(length)
    assert zlib.crc32(body) == checksum
    assert not file.read()
    block = msgpack.unpackb(body)
    check_structure(block, "SpanBlock", "trace")
    ((name, start_ns, end_ns, attributes),) = block["spans"]
    assert (name, attributes) == (SpanName.SWITCH.value, {"label": "to train", "call": 3})
    assert end_ns >= start_ns
