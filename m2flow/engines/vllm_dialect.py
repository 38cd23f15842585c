"""How vLLM is spoken to over HTTP.

Source: the endpoints of vLLM 0.32 (vllm/entrypoints/scale_out/token_in_token_out, vllm/entrypoints/rl/online), by their public names alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import msgspec

from m2flow.engines.server_client import Dialect, FinishReason, Heard, Span, words_of

_PREFIX = "generate-tokens-"
"""What the server puts before the name of a request, and wants to hear when it is to end it."""


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


@final
class VllmDialect(Dialect):
    """A piece has the new tokens alone; the last one says which weights made which."""

    product = "vLLM"
    generate_path = "/inference/v1/generate"
    abort_path = "/abort_requests"

    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        return {**body, "request_id": rid, "stream": True}

    def heard(self, rid: str, text: bytes) -> Heard:
        chunk = _decode(text)
        if chunk.error:
            return Heard(rid, [], [], error=words_of(text))
        if not chunk.choices:
            return Heard(rid, [], [])
        (choice,) = chunk.choices
        logprobs = [one.logprob for one in (choice.logprobs.content or [] if choice.logprobs else [])]
        finish = FinishReason(choice.finish_reason) if choice.finish_reason else None
        return Heard(rid, choice.token_ids or [], logprobs, finish, tuple(choice.weight_versions or ()))

    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        return [{"request_ids": [_PREFIX + rid for rid in rids]}]
