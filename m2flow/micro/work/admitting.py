"""Requests into a rollout engine: all of them, or an error that knows which one it is about."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engines.contract import Request, RolloutEngine
from m2flow.errors import PromptTooLong


def add(engine: RolloutEngine, requests: Sequence[Request]) -> None:
    """Queue requests. If one does not fit, none is queued, and the error knows which it was."""
    try:
        engine.add(requests)
    except PromptTooLong as error:
        for position, request in enumerate(requests):
            try:
                engine.add([request])
            except PromptTooLong as of_this:
                engine.abort([r.id for r in requests[:position]])
                raise of_this.about(request.id) from None
        raise error
