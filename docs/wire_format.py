"""The wire format as a page: parcels between workers, messages on the control link, records of a trace, each field in its position.

    channels/codec.py, micro/protocol/messages.py, observe/spans.py --page--> docs/reference/wire-format.md

Everything is MessagePack, so that a program in any language can read it. `write_reference.py` writes the page from the declarations;
`tests/docs/test_wire_format.py` reads what m2flow encodes with the `msgpack` package, by this page.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from m2flow.channels import codec
from m2flow.channels.weights import Manifest
from m2flow.cli.help import documentation, first_line
from m2flow.errors import ErrorRecord
from m2flow.micro.protocol import messages
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.micro.protocol.worker_state import TURNS_ANSWERED, TURNS_ASKED
from m2flow.observe.spans import SpanBlock

LINKS = {
    "To a worker": typing.get_args(messages.ToWorker),
    "To the controller": typing.get_args(messages.ToController),
    "The answer to a heartbeat": (messages.Echo,),
}
"""Direction -> the messages that travel in it."""
_SCALARS = {int: "int", float: "float", str: "str", bool: "bool", bytes: "bin", type(None): "nil"}

_PARCELS = f"""# Wire format

All that processes of m2flow say to each other, and what they write of a trace, is [MessagePack](https://msgpack.org) and raw arrays.
Nothing is a pickle but the body of `Define`, which only a worker's own controller can send (decision 5). Every field is sent, also one
that has its default. Numbers outside MessagePack are little-endian.

## Parcels

Rows of one call's result, from worker to worker: a ZeroMQ message of frames. A parcel whose `call` is {TURNS_ASKED} asks for turns
of episodes, a row each, and one of {TURNS_ANSWERED} has what came of them (`m2flow.agents.turn_requests`).

| bytes of the first frame | |
|---|---|
| 0 to 2 | `m2f` |
| 3 | the format, {codec.FORMAT} |
| 4 to 7 | length of the header, u32 |
| from 8 | the header, MessagePack: `[call int, sender str, num_rows int, inline_bytes int, columns]` |
| from the next multiple of 8 | the arrays of at most `inline_bytes` bytes, each padded to a multiple of 8 |

`columns` is an array of `[name str, kind str, dtype str, shape array of int]`; the shape is that of the values. The arrays are, in
this order: the identities (`int64`, a row each); of each column its offsets (`int64`, `num_rows + 1` of them, rising from 0 to the number
of values) unless its kind is `dense`, then its values. An array of more than `inline_bytes` bytes is not in the first frame but
follows as frames of its own, of {codec.FRAME_BYTES:,} bytes and a shorter last one.

| kind | a row is |
|---|---|
| `dense` | `values[row]` |
| `numbers` | `values[offsets[row]:offsets[row + 1]]` |
| `text` | these bytes as UTF-8 |
| `json` | these bytes as JSON |

Types that travel: {", ".join(f"`{name}`" for name in codec.DTYPES)}.
"""
_MESSAGES = """## Messages

Between the controller and a worker, on the control link. A message is an array: its name, then its fields in this order.
"""
_TRACES = """## Traces

`trace/spans.msgpack` of a run directory is a sequence of records: length u32, CRC-32 u32, and a `SpanBlock` of that length. A
reader stops at the first record that is cut or whose sum is wrong.
"""


def page() -> str:
    """The whole page, Markdown."""
    lines = [_PARCELS, _MESSAGES]
    for title, kinds in LINKS.items():
        lines += [f"### {title}", ""]
        for kind in kinds:
            lines += [f"**{kind.__name__}**: {first_line(kind)}", "", *_table(kind)]
    lines += ["### Structures in messages", ""]
    for kind in structures():
        form = "An array." if is_array(kind) else "A map by field name."
        lines += [f"**{kind.__name__}**: {first_line(kind)} {form}", "", *_table(kind)]
    return "\n".join([*lines, _TRACES])


def structures() -> list[type]:
    """The types of fields that are structures themselves, each before those that it contains."""
    found: dict[type, None] = {}
    todo: list[type] = [SpanBlock, ErrorRecord, VersionSpan, Manifest]
    while todo:
        kind = todo.pop(0)
        found[kind] = None
        todo += [part for hint in field_types(kind).values() for part in _structures_in(hint) if part not in found]
    return list(found)


def is_array(kind: type) -> bool:
    """Whether a structure is encoded by position; otherwise it is a map."""
    return not issubclass(kind, msgspec.Struct) or bool(kind.__struct_config__.array_like)


def field_types(kind: type) -> dict[str, Any]:
    """Field -> its type, in the order of the wire."""
    hints = typing.get_type_hints(kind)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields  # type: ignore[attr-defined]
    return {name: hints[name] for name in names}


def spelled(hint: Any) -> str:
    """A type in words of MessagePack.

    >>> spelled(dict[int, list[float]]), spelled(tuple[str, int] | None), spelled(tuple[int, ...])
    ('map of int to array of float', '[str, int] or nil', 'array of int')
    """
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list or (origin is tuple and arguments[-1] is ...):
        return f"array of {spelled(arguments[0])}"
    if origin is dict:
        return f"map of {spelled(arguments[0])} to {_grouped(arguments[1])}"
    if origin is tuple:
        return f"[{', '.join(map(spelled, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(spelled, arguments))
    return str(hint.__name__)


def _grouped(hint: Any) -> str:
    return f"({spelled(hint)})" if typing.get_origin(hint) in (typing.Union, types.UnionType) else spelled(hint)


def _structures_in(hint: Any) -> list[type]:
    arguments = [one for one in typing.get_args(hint) if one is not ...]
    if arguments:
        return [part for one in arguments for part in _structures_in(one)]
    return [] if hint in _SCALARS else [hint]


def _table(kind: type) -> list[str]:
    """A table of the fields of a message or a structure; nothing where there are none."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("m2flow."):
            said |= documentation(base)
    starts_at = 1 if issubclass(kind, messages.Message) else 0
    rows = [
        f"| {position if is_array(kind) else ''} | `{name}` | {spelled(hint)} | {said.get(name, '').replace('|', chr(92) + '|')} |"
        for position, (name, hint) in enumerate(field_types(kind).items(), starts_at)
    ]
    return ["| place | field | type | |", "|---|---|---|---|", *rows, ""] if rows else []
