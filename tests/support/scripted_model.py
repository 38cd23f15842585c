"""A model that says what a test tells it to, for agents and endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from m2flow import Chat
from m2flow.agents.chat import Asked, Known, Reply, Resources, Table
from m2flow.agents.conversation import Conversation
from m2flow.agents.tools import Outcome, ToolCall
from m2flow.engines.contract import Language
from m2flow.samples import Finish

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Script:
    """A model that says what it is told, one text a turn and conversation, and notes what it was asked."""

    threads = ThreadPoolExecutor(1)
    lost_resources = False

    def __init__(self, language: Language, texts: Sequence[str], delay_s: float = 0.0) -> None:
        self.language, self.texts, self.delay_s = language, list(texts), delay_s
        self.asked: list[Asked] = []

    async def turn(self, asked: Asked) -> Reply:
        at = sum(one.name == asked.name for one in self.asked)
        self.asked.append(asked)
        await asyncio.sleep(self.delay_s)
        text = self.texts[min(at, len(self.texts) - 1)]
        ids = [*self.language.encode_target(text), min(self.language.eos_ids)]
        cut = len(ids) > asked.max_new_tokens
        ids = ids[: asked.max_new_tokens]
        return Reply(ids, text, Finish.LENGTH if cut else Finish.STOP, [-0.5 * at for at in range(len(ids))])

    def known(self, key: str) -> Known | None:
        return None

    async def began(self, key: str, call: ToolCall, *, has_effects: bool, opens: bool) -> None: ...

    async def returned(self, key: str, outcome: Outcome, *, has_effects: bool) -> None: ...

    def passed(self, name: str, start_ns: int, end_ns: int, about: Mapping[str, object]) -> None: ...

    def stuck_after(self, seconds: float, what: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, print, what)


def chat_of(script: Script, *, max_turns: int = 8, max_conversations: int = 8, max_tokens: int = 4000) -> Chat:
    resources = Resources(contextlib.AsyncExitStack())
    table = Table(script, resources, 7, max_tokens, max_turns, max_conversations, (), lambda by: Conversation(script.language))
    return Chat(table, table.make(""), "main")
