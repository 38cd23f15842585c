"""How SGLang is spoken to over HTTP.

Source: the endpoints of SGLang 0.5 (sglang/srt/entrypoints/http_server.py, managers/io_struct.py), by their public names alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import msgspec

from m2flow.engines.accounting import Memory
from m2flow.engines.server_client import Dialect, FinishReason, Heard, Span, words_of


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[Span] = []
    routed_experts: str | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


@final
class SglangDialect(Dialect):
    """A piece has the new tokens alone, if the server was started so; the last one says which weights made which."""

    product = "SGLang"
    generate_path = "/generate"
    abort_path = "/abort_request"

    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        return {**body, "rid": rid, "stream": True}

    def heard(self, rid: str, text: bytes) -> Heard:
        chunk = _decode(text)
        if chunk.error:
            return Heard(rid, [], [], error=words_of(text))
        meta = chunk.meta_info
        logprobs = [0.0 if value is None else value for value, *_ in meta.output_token_logprobs]
        if meta.finish_reason is None:
            return Heard(rid, chunk.output_ids, logprobs)
        said = (chunk.output_ids, logprobs, meta.finish_reason, tuple(meta.weight_versions), meta.routed_experts or "")
        return Heard(rid, *said, num_cached=meta.cached_tokens or 0, num_put_back=meta.num_retractions or 0)

    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        return [{"rid": rid} for rid in rids]


def memory_said(info: Mapping[str, Any]) -> Memory:
    """What a server holds of its first device, by `/server_info`, which counts in GiB, to the thousandth. Nothing, if it does not say.

    >>> memory_said({"internal_states": [{"memory_usage": {"weight": 2.5, "kvcache": 40.0}}]}).words()
    'kv 40.00 GiB, weights 2.50 GiB'
    >>> memory_said({}).words()
    'nothing'
    """
    states = info.get("internal_states") or [{}]
    usage = states[0].get("memory_usage") or {}
    weights, kv = (round(max(float(usage.get(name) or 0.0), 0.0) * 2**30) for name in ("weight", "kvcache"))
    return Memory(weights=weights, kv=kv)
