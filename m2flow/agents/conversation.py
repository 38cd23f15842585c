"""Keep one conversation with a model as tokens: what the model said stays as it was sampled, and only what is new is tokenised.

    say, reply --Conversation.begun, followed--> ids to append --the model--> ids that it sampled --heard--> text and tool calls

Between two turns of the model stands what a chat template writes there: the end of its turn, the messages that are new, and the begin of
its next turn. This *bridge* is cut out of the rendered conversation behind a marker that stands for the model's last turn:

    <user>2+2?<end>\\n<assistant>MARK<end>\\n<tool>4<end>\\n<assistant>
                                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  the bridge; its first token is left out where the model sampled it

So nothing that was sampled is tokenised again, whatever a tokenizer would make of its text, and no newline of the template is lost. The
tokens equal those of the whole conversation, rendered at once, wherever the template extends what was there and the model's text comes
back from the tokenizer as it went in. Some templates do not extend: they drop a model's thinking once a further user's message follows.
Then the tokens of the model's turn stay as they are with `history="append"`; with `"refuse"` the episode ends with an error; and with
`"fork"` the conversation goes on in a sequence of its own, whose prompt is the conversation as the template writes it now (`rewritten`).
What was said before stays, as it was sampled, in the sequence that it was said in, and is trained there.

A text for a model without a chat template is *raw*: what is said is appended as it stands.

What a tool returns may have the text of a special token in it, which would end its turn and begin another in its name. Such a text gets a
space after its first character.

Source:
    The marker: verl's and slime's multi-turn loops render a dummy conversation for the same reason; that a newline was lost there at each
    turn is verl issue 6501.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from m2flow.agents.tools import EpisodeFailed, Family, Parser, ToolCall, family_of, parsed
from m2flow.engines.contract import Language
from m2flow.errors import DatasetError
from m2flow.recipe import History
from m2flow.samples import Message, check_prompt

_MARK = "m2flow1marker2of3turn"
_THOUGHT = "m2flow1marker2of3thought"


def rewrites(language: Language, role: str) -> bool:
    """Whether the chat template drops a model's thinking when a message of this role follows. Raises `DatasetError`: it refuses that."""
    said = f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}, {"role": role, "content": "b"}]
    return _THOUGHT not in language.conversation(probe, [])


class Rewritten(NamedTuple):
    """A conversation as its template writes it now, other than it did before."""

    ids: list[int]
    num_added: int
    """Tokens of the new messages' texts, by which the conversation has grown."""


def _dense(text: str) -> str:
    return "".join(text.split())


@final
class Conversation:
    """One conversation, as messages and as the tokens that are to be appended."""

    def __init__(self, language: Language, history: History = "append", family: Family | Parser | None = None) -> None:
        self.messages: list[Message] = []
        self.prompt_text: str | None = None
        self._language = language
        self._history = history
        self._parser: Parser = family if callable(family) else self._of_family(family)
        self._tools: list[Mapping[str, object]] = []
        self._is_raw = False
        self._last = -1
        """Last token of the model's last turn."""
        self._text = ""
        """What stands in this sequence, without white space; kept where the template may write it anew."""
        self._next_text = ""
        """What will, once the new messages are accepted."""

    def copy(self) -> Conversation:
        """The same conversation so far, to go on in another way."""
        other = Conversation(self._language, self._history)
        other.messages, other.prompt_text, other._parser = list(self.messages), self.prompt_text, self._parser
        other._tools, other._is_raw, other._last, other._text = list(self._tools), self._is_raw, self._last, self._text
        return other

    def _of_family(self, family: Family | None) -> Parser:
        chosen = family or family_of(self._language.template)
        return lambda text: parsed(text, chosen)

    @property
    def has_begun(self) -> bool:
        return bool(self.messages)

    def begun(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation that begins with this. Raises `DatasetError`: the chat template refuses it."""
        check_prompt(content, "what the agent says")
        if not self._language.template and not isinstance(content, str) and [one["role"] for one in content] == ["user"]:
            content = str(content[0].get("content") or "")  # A model without a template reads the text as it stands.
        shows_tools = bool(tools) and bool(self._language.template)
        self._is_raw = isinstance(content, str) and not shows_tools and self._language.prompt_text(content) is None
        self._tools = list(tools) if shows_tools else []
        messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self._is_raw or not self._tools:
            self.prompt_text = self._language.prompt_text(content)
            ids = list(self._language.encode_prompt(content))
        else:
            self.prompt_text = self._language.conversation(messages, self._tools)
            ids = list(self._language.encode_target(self.prompt_text))
        self.messages = messages  # Not before: a conversation that was refused has not begun.
        self._text = _dense(self.prompt_text or "")
        return ids

    def followed(self, new: Sequence[Message]) -> list[int]:
        """The tokens between the model's last turn and its next, with these messages; `accepted` takes them in.

        Raises:
            DatasetError: the chat template refuses the messages.
            EpisodeFailed: it would write the model's turns anew, and the history is not to change.
        """
        check_prompt(list(new), "what the agent says")
        if self._is_raw:
            return list(self._language.encode_target("".join(str(one.get("content") or "") for one in new)))
        if self._history == "refuse" and rewrites(self._language, str(new[0]["role"])):
            raise EpisodeFailed(
                "history_rewritten",
                f"the chat template rewrites what the model said once a message of the role {new[0]['role']!r} follows; history='refuse'",
            )
        rendered = self._language.conversation([*self.messages[:-1], {"role": "assistant", "content": _MARK}, *new], self._tools)
        _, mark, bridge = rendered.rpartition(_MARK)
        if not mark:
            raise DatasetError("the chat template does not write what the assistant said", now="Write the conversation as raw text.")
        ids = list(self._language.encode_target(bridge))
        return ids[1:] if self._last in self._language.eos_ids and ids[:1] == [self._last] else ids

    def rewritten(self, new: Sequence[Message]) -> Rewritten | None:
        """The conversation with these messages, where the template writes what stands before them in another way.

        White space does not count. A call of a tool that the model wrote in another form than the template's does.

        Returns:
            None: the template extends what is there, or `history` is not "fork".
        Raises:
            DatasetError: the chat template refuses the messages.
        """
        if self._history != "fork" or self._is_raw:
            return None
        check_prompt(list(new), "what the agent says")
        rendered = self._language.conversation([*self.messages, *new], self._tools)
        self._next_text = _dense(rendered)
        if self._next_text.startswith(self._text):
            return None
        added = "".join(str(one.get("content") or "") for one in new)
        return Rewritten(list(self._language.encode_target(rendered)), len(self._language.encode_target(added)))

    def accepted(self, new: Sequence[Message]) -> None:
        """Take in messages whose tokens were appended, or with which the conversation was written anew."""
        self.messages += new
        self._text = self._next_text

    def heard(
        self, tokens: Sequence[int], text: str, *, is_whole: bool, tools: Callable[[ToolCall], str]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Take in a turn of the model: what it said without its calls, and these.

        Args:
            text: of its tokens, up to a stop text.
            is_whole: the model ended it; of a turn that was cut off no call is read.
            tools: says what is wrong with a call; empty if nothing is.
        """
        self._last = tokens[-1] if tokens else -1
        raw = self._language.decode_all(list(tokens[:-1] if self._last in self._language.eos_ids else tokens))
        said, calls = self._parser(raw) if is_whole else (text, [])
        numbered = [replace(call, id=call.id or f"call{len(self.messages):03}{at:02}") for at, call in enumerate(calls)]
        checked = tuple(call if call.fault else replace(call, fault=tools(call)) for call in numbered)
        message: dict[str, object] = {"role": "assistant", "content": said if checked else text}
        if checked:
            message["tool_calls"] = [call.message() for call in checked]
        self.messages.append(message)
        self._text += _dense(raw if checked else text)
        return (said if checked else text), checked

    def defused(self, text: str) -> str:
        """A tool's text in which no special token of the model is written."""
        for special in self._language.special_texts:
            if special and special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text
