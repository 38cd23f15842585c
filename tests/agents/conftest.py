"""Fixtures of the tests of agents: an event loop, and the language of a small tokenizer with a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from m2flow.agents.tools import EventLoop
from m2flow.micro.protocol.events import Command, Event, Moved
from m2flow.micro.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from m2flow.engines.contract import Language


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    """Token ids and text of a model with Qwen2.5's manner of chat."""
    from chat_codecs import codec_of

    return codec_of(tmp_path_factory.mktemp("chatml"), "Qwen2.5")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Moved]:
    """What schedulers say of samples that go on away from their context."""
    handle, told = Scheduler.handle, list[Moved]()

    def noted(self: Scheduler, *events: Event) -> list[Command]:
        commands = handle(self, *events)
        told.extend(command for command in commands if isinstance(command, Moved))
        return commands

    monkeypatch.setattr(Scheduler, "handle", noted)
    return told
