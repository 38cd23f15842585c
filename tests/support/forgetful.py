"""A chat template that writes anew what the model said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m2flow.engines.contract import Language
from m2flow.samples import Message


class Forgetful:
    """A language whose template drops what is no small letter or digit of the model's text, once a further user's message follows."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def __getattr__(self, name: str) -> object:
        return getattr(self._language, name)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
        last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=0)
        kept = [one if one["role"] != "assistant" or at > last else {**one, "content": kept_of(one)} for at, one in enumerate(messages)]
        return self._language.conversation(kept, tools)


def kept_of(message: Message) -> str:
    return "".join(char for char in str(message["content"]) if char.islower() or char.isdecimal())
