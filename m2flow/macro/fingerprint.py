"""Values in words that are the same in every process: what a recorded call was given, to be compared when the flow runs again.

Numbers of equal value are equal words. Rows are known by a checksum, functions by their bytecode: neither by an address, nor by
the lines where they stand. Limits: what a function calls may change unseen, and so may an object's inside;
of a function with large captures only the name is known.
"""

from __future__ import annotations

import functools
import hashlib
import types
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from m2flow.macro.capture import LARGE_BYTES, Snapshot
from m2flow.samples import Batch, Ragged


def told(value: object) -> str:
    """A value in words that are the same in every process: no addresses, functions by their code, rows by a checksum."""
    if isinstance(value, str | bytes | None):
        return repr(value)
    if isinstance(value, bool | int | float | np.generic):
        return format(value, ".17g") if not isinstance(value, int) or abs(value) < 1 << 53 else str(value)
    if isinstance(value, Batch):
        return f"{len(value)} rows, checksum {_checksum(value):08x}"
    if isinstance(value, type):
        return value.__qualname__
    try:
        return _told_hashable(value)
    except TypeError:
        return _told_compound(value)


@functools.lru_cache(maxsize=256)
def _told_hashable(value: object) -> str:
    return _told_compound(value)


def _told_compound(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{told(key)}: {told(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [told(item) for item in value]
        return f"[{', '.join(items if isinstance(value, list | tuple) else sorted(items))}]"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(f'{f.name}={told(getattr(value, f.name))}' for f in fields(value))})"
    if isinstance(value, functools.partial):
        return f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
    if isinstance(value, Snapshot):
        return told(value.fresh()) if len(value.body) <= LARGE_BYTES else value.__qualname__
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{getattr(value, '__name__', 'function')} (code {_code_digest(code)})"
    call = getattr(type(value).__call__, "__code__", None) if callable(value) else None
    return type(value).__qualname__ + (f" (code {_code_digest(call)})" if isinstance(call, types.CodeType) else "")


@functools.lru_cache(maxsize=1024)
def _code_digest(code: types.CodeType) -> str:
    """Of what a function does: neither its file nor its lines."""
    total = hashlib.sha256(code.co_code)
    total.update(repr((code.co_names, code.co_varnames, code.co_argcount)).encode())
    for constant in code.co_consts:
        total.update((_code_digest(constant) if isinstance(constant, types.CodeType) else told(constant)).encode())
    return total.hexdigest()[:12]


def _checksum(batch: Batch) -> int:
    """CRC-32 over identities and columns."""
    total = zlib.crc32(np.ascontiguousarray(batch.ids).data)
    for name, column in batch.columns.items():
        total = zlib.crc32(name.encode(), total)
        for array in (column.offsets, column.values) if isinstance(column, Ragged) else (column,):
            total = zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"", total)
    return total
