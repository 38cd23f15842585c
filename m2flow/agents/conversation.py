"""Keep one conversation with a model as tokens: what the model said stays as it was sampled, and only what is new is tokenised.

    say, reply --Conversation.begun, followed--> ids to append --the model--> ids that it sampled --heard--> text and tool calls

Between two turns of the model stands what a chat template writes there: the end of its turn, the messages that are new, and the begin of
its next turn. This *bridge* is cut out of the rendered conversation behind a marker that stands for the model's last turn:

    <user>2+2?<end>\\n<assistant>MARK<end>\\n<tool>4<end>\\n<assistant>
                                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  the bridge; its first token is left out where the model sampled it

Where that turn has calls, the marker stands in the arguments of the last one, and the bridge begins at the token that ends the turn: a
template may need a call's name and id to write its result. Some templates refuse two calls in one turn; such a turn stands in what is
rendered as the text that the model wrote.

So nothing that was sampled is tokenised again, whatever a tokenizer would make of its text, and no newline of the template is lost. The
tokens equal those of the whole conversation, rendered at once, wherever the template extends what was there and the model's text comes
back from the tokenizer as it went in. Some templates do not extend: they drop a model's thinking once a further user's message follows, or
move the tools to it. Then the tokens of before stay as they are with `history="append"`, and tools are not shown twice; with `"refuse"` the
episode ends with an error; and with `"fork"` the conversation goes on in a sequence of its own, whose prompt is the conversation as the
template writes it now (`rewritten`). What was said before stays, as it was sampled, in the sequence that it was said in, and is trained
there.

A text for a model without a chat template is *raw*: what is said is appended as it stands.

All conversations of an episode, with the record of its turns and tool calls, are its `Transcript`: from it comes the episode's row, and
from the row of one that was stopped what its agent is answered when it is called again (`Recorded`).

What a tool returns may have the text of a special token in it, which would end its turn and begin another in its name. Such a text gets a
space after its first character.

Source:
    The marker: verl's and slime's multi-turn loops render a dummy conversation for the same reason; that a newline was lost there at each
    turn is verl issue 6501.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import typing
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.agents.tools import (
    EpisodeFailed,
    Family,
    Parser,
    ToolCall,
    before_calls,
    check_family,
    family_of,
    harmony_parts,
    parsed,
    warn_of_no_tools,
)
from m2flow.engines.contract import Generated, Language, Request
from m2flow.errors import DatasetError
from m2flow.recipe import History
from m2flow.samples import MAIN, Batch, Finish, KeyedWords, Message, Segment, check_prompt

if TYPE_CHECKING:
    from m2flow.agents.chat import Asked

_MARK = "m2flow1marker2of3turn"
_THOUGHT = "m2flow1marker2of3thought"


_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": "m2flow_probe", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}},
}
_ENDS = {"<|return|>": "<|end|>"}
"""Tokens by which a model ends its last turn -> those that its template writes there (gpt-oss)."""


def rewrites(language: Language, role: str, *, has_tools: bool) -> str:
    """What the chat template does to what was said before when a message of this role follows; empty: nothing.

    Raises:
        DatasetError: it refuses such a message.
    """
    known = _habits(language).rewrites
    if (role, has_tools) not in known:
        known[role, has_tools] = _rewrites(language, role, has_tools)
    return known[role, has_tools]


def _rewrites(language: Language, role: str, has_tools: bool) -> str:
    is_harmony = family_of(language.template) == "harmony"

    def turn(said: str, **calls: object) -> Message:
        apart = {"role": "assistant", "content": "" if calls else said, "thinking": _THOUGHT}
        return {**(apart if is_harmony else {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{said}"}), **calls}

    asked, new = {"role": "user", "content": "a"}, {"role": role, "content": "b", "name": "m2flow_probe", "tool_call_id": "call00000"}
    habits, is_result = _habits(language), role == "tool"
    call = {"id": "call00000", "type": "function", "function": {"name": "m2flow_probe", "arguments": {_MARK: _MARK}}}
    before = [asked, habits.written(turn("", tool_calls=[call]))]
    if not is_result:
        before += [{**new, "role": "tool"}, turn(_MARK)]
    old = more = ""
    if has_tools:
        with contextlib.suppress(DatasetError):  # It takes no calls, or no results: the agent's model may have none.
            old, more = (language.conversation(messages, [_TOOL]) for messages in (before, [*before, new]))
            old = old[: old.rfind(_MARK) + len(_MARK)] if _MARK in old else ""
    # A result follows a turn with calls alone, if there are any.
    is_plain = not is_result or not (old or is_harmony)
    if is_plain and _THOUGHT not in language.conversation([asked, turn(_MARK), new], []):
        return "drop the model's thinking"
    if habits.moves_tools and has_tools and role == "user":
        return "move the tools"
    if more.startswith(old):
        return ""
    return "drop the model's thinking" if more.count(_THOUGHT) < old.count(_THOUGHT) else "write the model's calls anew"


class _Habits:
    """What a chat template does with tools."""

    def __init__(self, language: Language) -> None:
        self.rewrites: dict[tuple[str, bool], str] = {}
        asked: list[Message] = [{"role": "user", "content": f"a{_MARK}"}]
        more: list[Message] = [*asked, {"role": "assistant", "content": "c"}, {"role": "user", "content": "b"}]
        self.moves_tools = False
        """Once a further user's message follows, the tools stand at that."""
        with contextlib.suppress(DatasetError):
            first, then = (language.conversation(one, [_TOOL]).partition(_MARK)[0] for one in (asked, more))
            self.moves_tools = first != then
        self._wants_text = False
        """It takes the arguments of a call as a text alone."""
        if not self._writes_calls(language):
            self._wants_text = True
            self._wants_text = self._writes_calls(language)

    def _writes_calls(self, language: Language) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "m2flow_probe", "arguments": {_MARK: _THOUGHT}}}
        turn = self.written({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            written = language.conversation([{"role": "user", "content": "a"}, turn], [_TOOL])
        except DatasetError:
            return False
        return _MARK in written and f"'{_MARK}'" not in written  # That is how Python writes it.

    def written(self, message: Message) -> Message:
        """A message as the template takes it."""
        calls = typing.cast(Any, message.get("tool_calls"))
        if not calls or not self._wants_text:
            return message
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        as_text = [{**call, "function": {**call["function"], "arguments": text}} for call, text in zip(calls, texts, strict=True)]
        return {**message, "tool_calls": as_text}


_known_habits: weakref.WeakKeyDictionary[Language, _Habits] = weakref.WeakKeyDictionary()


def _habits(language: Language) -> _Habits:
    found = _known_habits.get(language)
    if found is None:
        found = _known_habits[language] = _Habits(language)
    return found


_puts_space: weakref.WeakKeyDictionary[Language, bool] = weakref.WeakKeyDictionary()
"""Whether the tokenizer puts a space before each text, as SentencePiece's do that Llama 2 and Mistral have."""


def _encoded_behind(language: Language, text: str) -> list[int]:
    """The tokens of a text that stands behind another one: without the space that some tokenizers put before a text's begin."""
    ids = list(language.encode_target(text))
    if language not in _puts_space:
        one = list(language.encode_target("a"))
        _puts_space[language] = language.decode_all([*one, *one]) != "aa"
    for before in ("\n", "|", "\0") if ids and _puts_space[language] else ():  # One that is no part of a token with the text's begin.
        known, whole = (list(language.encode_target(one)) for one in (before, before + text))
        if known and whole[: len(known)] == known:
            return whole[len(known) :]
    return ids


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
        self.raw = ""
        """The model's last turn as text, with the special tokens that its calls are written with."""
        self._language = language
        self._history = history
        self._form: Family | Parser | None = family or family_of(language.template)
        """None: the template presents tools in a form that is not known."""
        self._tools: list[Mapping[str, object]] = []
        self.offered: dict[str, Mapping[str, object]] = {}
        """Tool that the model may call -> the JSON Schema of its parameters."""
        self._raws: dict[int, str] = {}
        """Message -> the model's turn as it wrote it, of those with calls."""
        self._is_raw = False
        self._last = -1
        """Last token of the model's last turn."""
        self._text = ""
        """What stands in this sequence, without white space; kept where the template may write it anew."""
        self._next_text = ""
        """What will, once the new messages are accepted."""

    def copy(self) -> Conversation:
        """The same conversation so far, to go on in another way."""
        other = copy.copy(self)
        other.messages, other._tools = list(self.messages), list(self._tools)
        other.offered, other._raws = dict(self.offered), dict(self._raws)
        return other

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Take note of tools that the model may call from here on. Raises `DatasetError`: nobody knows how its calls are read."""
        if tools and self._form is None:
            check_family(self._language.template)
        self.offered |= {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    @property
    def has_begun(self) -> bool:
        return bool(self.messages)

    def begun(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation that begins with this. Raises `DatasetError`: the chat template refuses it."""
        check_prompt(content, "what the agent says")
        self.offer(tools)
        if not self._language.template and not isinstance(content, str) and [one["role"] for one in content] == ["user"]:
            content = str(content[0].get("content") or "")  # A model without a template reads the text as it stands.
        shows_tools = bool(tools) and bool(self._language.template)
        if shows_tools:
            warn_of_no_tools(self._language.template)
        self._is_raw = isinstance(content, str) and not shows_tools and self._language.prompt_text(content) is None
        self._tools = list(tools) if shows_tools else []
        messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self._is_raw or not self._tools:
            self.prompt_text = self._language.prompt_text(content)
            ids = list(self._language.encode_prompt(content))
        else:
            self.prompt_text = self._rendered(messages, self._tools)
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
            return _encoded_behind(self._language, "".join(str(one.get("content") or "") for one in new))
        role = str(new[0]["role"])
        if self._history == "refuse" and (how := rewrites(self._language, role, has_tools=bool(self._tools))):
            raise EpisodeFailed(
                "history_rewritten",
                f"the chat template rewrites what was said ({how}) once a message of the role {role!r} follows; history='refuse'",
            )
        ids = self._bridge(new)
        if self._last not in self._language.eos_ids or not ids:
            return ids
        end = _ENDS.get(self._language.decode_all([self._last]))
        return ids[1:] if ids[0] == self._last or (end and self._language.decode_all(ids[:1]) == end) else ids

    def _bridge(self, new: Sequence[Message]) -> list[int]:
        """What the template writes after the model's last turn, its end included."""
        # What moves to the new message stands before already.
        tools = [] if self._tools and _habits(self._language).moves_tools else self._tools
        if self.messages[-1].get("tool_calls") and (ids := self._after_calls(new, tools)):
            return ids
        rendered = self._rendered([*self.messages[:-1], {"role": "assistant", "content": _MARK}, *new], tools)
        _, mark, bridge = rendered.rpartition(_MARK)
        if not mark:
            raise DatasetError("the chat template does not write what the assistant said", now="Write the conversation as raw text.")
        return _encoded_behind(self._language, bridge)

    def _after_calls(self, new: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[int] | None:
        """The bridge behind a turn with calls; None where the template does not write them, or no end of the turn."""
        last = self.messages[-1]
        *others, call = typing.cast(Any, last["tool_calls"])
        marked = {**call, "function": {**call["function"], "arguments": {_MARK: _MARK}}}
        try:
            rendered = self._rendered([*self.messages[:-1], {**last, "tool_calls": [*others, marked]}, *new], tools)
        except DatasetError:
            return None
        _, mark, rest = rendered.rpartition(_MARK)
        ids = list(self._language.encode_target(rest)) if mark else []
        at = next((at for at, id in enumerate(ids) if id in self._language.eos_ids), None)
        if at is None:
            return None
        added, closing = str(new[0].get("content") or ""), self._language.decode_all(ids[:at])
        return None if added and (added in closing or json.dumps(added)[1:-1] in closing) else ids[at:]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
        """Messages as the template writes them. Raises `DatasetError`: it refuses them."""
        if not any(one.get("tool_calls") for one in messages):
            return self._language.conversation(messages, tools)
        written = [_habits(self._language).written(one) for one in messages]
        try:
            return self._language.conversation(written, tools)
        except DatasetError:
            several = {at for at, raw in self._raws.items() if at < len(messages) and len(typing.cast(Any, messages[at]["tool_calls"])) > 1}
            if not several:
                raise
        as_text: list[Message] = [
            {"role": "assistant", "content": self._raws[at]} if at in several else one for at, one in enumerate(written)
        ]
        return self._language.conversation(as_text, tools)

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
        rendered = self._rendered([*self.messages, *new], self._tools)
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
        raw = ""
        if self._form is not None:  # Otherwise what it wrote can have no part that is no text.
            raw = self._language.decode_all(list(tokens[:-1] if self._last in self._language.eos_ids else tokens))
        said, calls = self._read(raw) if is_whole else (text, [])
        thought = ""
        if has_channels := self._form == "harmony" and "<|message|>" in raw:
            thought, said, _ = harmony_parts(raw)
            said = said[: len(said) - len(self._language.decode(list(tokens))) + len(text)]  # Up to a stop text, as the text is.
        numbered = [replace(call, id=call.id or f"call{len(self.messages):03}{at:02}") for at, call in enumerate(calls)]
        checked = tuple(call if call.fault else replace(call, fault=tools(call)) for call in numbered)
        said = said if checked or has_channels else text
        message: dict[str, object] = {"role": "assistant", "content": said}
        if thought:
            message["thinking"] = thought
        if checked:
            message["tool_calls"] = [call.message() for call in checked]
            message["content"] = "" if thought else said  # Its template takes one of the two beside a call.
            self._raws[len(self.messages)] = raw
        self.messages.append(message)
        self._text += _dense(raw if checked or has_channels else text)
        is_written_specially = (checked or has_channels) and self._language.decode(list(tokens)) != raw
        self.raw = raw if is_written_specially else text
        return said, checked

    def surely_said(self, tokens: Sequence[int], text: str) -> str:
        """The beginning of what `heard` will give as said, of a turn that is under way and has these tokens and this text."""
        if self._form is None or not isinstance(self._form, str):
            return text if self._form is None else ""
        return before_calls(self._language.decode_all(list(tokens)), text, self._form)

    def _read(self, raw: str) -> tuple[str, list[ToolCall]]:
        if callable(self._form):
            return self._form(raw)
        return (raw, []) if self._form is None else parsed(raw, self._form, self.offered)

    def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self._language.decode_all([token]) for token in tokens]

    def defused(self, text: str) -> str:
        """A tool's text in which no special token of the model is written."""
        for special in self._language.special_texts:
            if special and special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text


# ---- what was said, as tokens


_GENERATED = Segment.GENERATED  # An enum's member costs as much as all else that a segment is looked up for.


_DTYPES = (np.int32, np.float32, np.int32, np.bool_)
"""Types of a strand's columns."""


@final
class Strand:
    """The tokens of one sequence: of a conversation, or of what one goes on in since its template wrote it anew."""

    def __init__(self, name: str, prompt_text: str | None = None, parent: str = "", by: str = "") -> None:
        self.name = name
        """The conversation's name."""
        self.prompt_text = prompt_text
        self.parent = parent
        """The conversation that its prompt is from; empty: none."""
        self.by = by
        """Who speaks, of the rollout's `speakers`; empty: the policy."""
        # Arrays, since all of them are copied whenever the episode is written down.
        self.tokens, self.logprobs, self.versions, self.kv_stale = array("i"), array("f"), array("i"), array("b")
        self.segments: list[tuple[Segment, int]] = []
        """The first is the prompt."""
        self.turns: list[dict[str, object]] = []
        """Finish and text of each generated segment."""
        self.num_sampled = 0
        """Tokens of its generated segments."""
        self._path, self._num_on_path = KeyedWords(() if name == MAIN else (name,)), 0
        """The tokens so far as the random numbers of turns are keyed by them, and how many that has."""

    def append(self, ids: Sequence[int]) -> None:
        """Add tokens that were not sampled; the first ones are the prompt."""
        count = len(ids)
        self.tokens.extend(ids)
        self.logprobs.frombytes(bytes(4 * count))
        self.versions.frombytes(b"\xff" * (4 * count))  # -1
        self.kv_stale.frombytes(bytes(count))
        self._add(Segment.TOOL if self.segments else Segment.PROMPT, count)

    def append_turn(self, turn: Generated, *, is_over: bool = True, kind: Segment = Segment.GENERATED) -> None:
        """Add what the model said in a turn, generated in this episode or shared with another."""
        for column, more, dtype in zip(self._columns, (turn.tokens, turn.logprobs, turn.versions, turn.kv_stale), _DTYPES, strict=True):
            column.frombytes(np.asarray(more, dtype).tobytes())
        self._add(kind, len(turn.tokens))
        if is_over:
            self.turns.append({"finish": int(turn.finish), "text": turn.text})

    def extend(
        self, kind: Segment, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], kv_stale: Sequence[bool]
    ) -> None:
        """Add a segment."""
        for column, more in zip(self._columns, (ids, logprobs, versions, kv_stale), strict=True):
            column.extend(more)
        self._add(kind, len(ids))

    def _add(self, kind: Segment, count: int) -> None:
        self.segments.append((kind, count))
        if kind == _GENERATED:
            self.num_sampled += count

    def path(self, ids: Sequence[int]) -> int:
        """What the random numbers of a turn are keyed by that these tokens lead to: the conversation, and all ids before the turn."""
        self._path.extend(self.tokens[self._num_on_path :])
        self._num_on_path = len(self.tokens)
        return self._path.bits(*ids)

    @property
    def _columns(self) -> Sequence[array[Any]]:
        return self.tokens, self.logprobs, self.versions, self.kv_stale

    def arrays(self) -> Sequence[npt.NDArray[Any]]:
        """Copies of its columns: tokens, log-probabilities, versions, staleness of the KV cache."""
        return [np.array(column, dtype) for column, dtype in zip(self._columns, _DTYPES, strict=True)]

    def with_turn(self, turn: Generated) -> Strand:
        """A copy that also has the tokens so far of a turn that is under way."""
        copy = Strand(self.name, self.prompt_text, self.parent, self.by)
        copy.tokens, copy.logprobs, copy.versions = self.tokens[:], self.logprobs[:], self.versions[:]
        copy.kv_stale, copy.segments, copy.turns = self.kv_stale[:], list(self.segments), list(self.turns)
        copy.num_sampled = self.num_sampled
        if len(turn.tokens):
            copy.append_turn(turn, is_over=False)
        return copy

    def shared(self, num_turns: int) -> Strand:
        """A copy up to the end of so many turns, or of the last one, as an episode has it that shares these."""
        copy, at = Strand(self.name, self.prompt_text, self.parent, self.by), 0
        num = min(num_turns, len(self.turns))
        for kind, count in self.segments:
            if len(copy.turns) == num:
                break
            is_turn = kind in (Segment.GENERATED, Segment.SHARED)
            copy.extend(Segment.SHARED if is_turn else kind, self.tokens[at : at + count], *not_sampled(count))
            at += count
            if is_turn:
                copy.turns.append(self.turns[len(copy.turns)])
        return copy

    @property
    def described(self) -> dict[str, object]:
        """What the record says of it beside its turns."""
        by = {"by": self.by} if self.by else {}
        return {"name": self.name, "num_turns": len(self.turns), "prompt": self.prompt_text, "parent": self.parent, **by}


def not_sampled(count: int) -> tuple[list[float], list[int], list[bool]]:
    """Log-probabilities, versions and staleness of tokens that an episode has not sampled."""
    return [0.0] * count, [-1] * count, [False] * count


# ---- what an episode has said and done


class BranchPoint(NamedTuple):
    """Where an episode left the one that it is a branch of."""

    turn: int
    """The first that is its own, from 1."""
    rng_seed: int
    """The seed of `chat.rng`, which goes on as in the parent: that of the episode that begins the line of parents."""


def _place(name: str) -> tuple[object, ...]:
    """The place of a conversation in the row: the first one is first, forks follow what they were forked from; never by time."""
    parts = [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in name.split("/")]
    return (parts[0] != (1, 0, MAIN), *parts)


@final
class Transcript:
    """The tokens of an episode, and its record. Worker's side only."""

    def __init__(self) -> None:
        self.conversations: dict[str, list[Strand]] = {}
        """By name: the sequences of each, of which the last goes on."""
        self.tools: dict[str, dict[str, object]] = {}
        """Key of a tool call -> what it was and what it gave."""
        self.kept_turns: int | None = None
        """Turns of a branch's record after which the episode goes another way, so what tools gave later is not known."""
        self.point: BranchPoint | None = None
        """Where a branch left its parent."""
        self.order: list[str] | None = []
        """The conversation of each whole turn, as they were taken. None: some were taken at the same time, or the record does not say."""
        self.row: int | None = None
        """Identity of the row that its agent is given, in branches and wherever it goes on too; None: its record does not say."""

    def branched(self, turn: int, seed: int) -> Transcript:
        """What a branch of an episode of this seed shares, which goes on from a turn. Raises `ValueError` as `before`.

        Of an episode in which the model never spoke the first turn is its beginning.
        """
        if turn == 1 and not any(strand.tokens for strand in self.strands):
            found = Transcript()
            found.tools, found.kept_turns, found.point, found.row = self.tools, 0, self.point, self.row
        else:
            found = self.before(turn)
        found.point = BranchPoint(turn, self.rng_seed(seed))
        return found

    def rng_seed(self, seed: int) -> int:
        """The seed of `chat.rng` in an episode of this transcript, whose own seed that is."""
        return seed if self.point is None else self.point.rng_seed

    def before(self, turn: int) -> Transcript:
        """The record up to the turn of this number, from 1, as the turns were taken: what an episode that branches there shares.

        Raises:
            ValueError: it has no such turn, or turns that were taken at the same time.
        """
        if self.order is None:
            raise ValueError(
                f"turns of {', '.join(sorted(self.conversations))} were taken at the same time, so none of them is turn {turn}"
            )
        if not 1 <= turn <= len(self.order):
            raise ValueError(f"it has turns 1 to {len(self.order)}")
        found, left = Transcript(), Counter(self.order[: turn - 1])
        found.tools, found.kept_turns, found.point, found.row = self.tools, turn - 1, self.point, self.row
        found.order = self.order[: turn - 1]
        for name in left:
            kept = found.conversations[name] = []
            for strand in self.conversations[name]:
                if left[name]:
                    kept.append(strand.shared(left[name]))
                    left[name] -= len(kept[-1].turns)
        return found

    @classmethod
    def of(cls, rows: Batch, row: int) -> Transcript:
        """The transcript of a row that was stopped."""
        found = cls()
        columns = [rows.ragged(name).row(row).tolist() for name in ("tokens", "logprobs", "versions", "kv_stale")]
        kinds, lengths = rows.ragged("segment_kinds").row(row).tolist(), rows.ragged("segment_lengths").row(row).tolist()
        record: Any = rows.ragged("episode").item(row)
        found.tools, found.row = record["tools"], record.get("row")
        if "branch" in record:
            found.point = BranchPoint(**record["branch"])
        named, turns, at = deque(record.get("conversations") or [_ALONE]), deque(record["turns"]), 0
        strand = Strand(MAIN)
        for kind, count in zip(kinds, lengths, strict=True):
            if kind == Segment.PROMPT:
                one = named.popleft()
                strand = Strand(one["name"], one["prompt"], one["parent"], one.get("by", ""))
                num_turns = len(turns) if one["num_turns"] is None else one["num_turns"]
                strand.turns = [turns.popleft() for _ in range(num_turns)]
                found.conversations.setdefault(strand.name, []).append(strand)
            strand.extend(Segment(kind), *(column[at : at + count] for column in columns))
            at += count
        is_one = set(found.conversations) <= {MAIN}
        found.order = record.get("order", [MAIN] * len(record["turns"]) if is_one else None)
        return found

    @property
    def strands(self) -> list[Strand]:
        """All sequences, in the order of the row."""
        if len(self.conversations) == 1:
            return list(next(iter(self.conversations.values())))
        return [strand for name in sorted(self.conversations, key=_place) for strand in self.conversations[name]]

    @property
    def num_sampled(self) -> int:
        return sum(strand.num_sampled for strand in self.strands)

    @property
    def end(self) -> tuple[Finish, str]:
        """Finish and text of the last turn: of the first conversation, or of the last one if nothing was said in that."""
        said = [strand.turns for strand in self.strands if strand.turns]
        of_first = [strand.turns for strand in self.conversations.get(MAIN, []) if strand.turns]
        last: Any = (of_first or said)[-1][-1] if said else {"finish": Finish.STOP, "text": ""}
        return Finish(last["finish"]), str(last["text"])

    def copy(self) -> Transcript:
        """One to which sequences and tool calls can be added without changing this one."""
        found = Transcript()
        found.tools, found.point, found.row, found.order = dict(self.tools), self.point, self.row, self.order
        found.conversations = {name: list(strands) for name, strands in self.conversations.items()}
        return found

    def admitted(self, asked: Asked) -> Strand:
        """Add what comes before a turn of a conversation; returns its sequence."""
        of = self.conversations.setdefault(asked.name, [])
        if asked.begins:
            of.append(Strand(asked.name, asked.prompt_text, asked.parent, asked.by))
        of[-1].append(asked.ids)
        return of[-1]

    def lose_order(self) -> None:
        """Note that something goes on in two conversations at the same time: the order of turns is not the agent's."""
        self.order = None

    def ended(self, strand: Strand, turn: Generated, kind: Segment = Segment.GENERATED) -> None:
        """Add what the model said in a turn that is over."""
        strand.append_turn(turn, kind=kind)
        if self.order is not None:
            self.order.append(strand.name)

    def generated(self, packed: int, finish: Finish, text: str, columns: Mapping[str, object]) -> Generated:
        """The sample that these tokens are."""
        strands = self.strands or [Strand(MAIN)]
        num_prompt = strands[0].segments[0][1] if strands[0].segments else 0
        tokens, logprobs, versions, kv_stale = (
            strands[0].arrays() if len(strands) == 1 else map(np.concatenate, zip(*(strand.arrays() for strand in strands), strict=True))
        )
        segments = [segment for strand in strands for segment in strand.segments]
        turns = [turn for strand in strands for turn in strand.turns]
        record: dict[str, object] = {"turns": turns, "tools": dict(sorted(self.tools.items()))}
        if len(strands) > 1 or strands[0].name != MAIN:
            record["conversations"] = [strand.described for strand in strands]
        if self.order is None or set(self.conversations) - {MAIN}:
            record["order"] = None if self.order is None else list(self.order)
        if self.point is not None:
            record["branch"] = self.point._asdict()
        if self.row is not None:
            record["row"] = self.row

        return Generated(
            id=packed,
            prompt_tokens=tokens[:num_prompt],
            tokens=tokens[num_prompt:],
            logprobs=logprobs[num_prompt:],
            versions=versions[num_prompt:],
            kv_stale=kv_stale[num_prompt:],
            finish=finish,
            text=text,
            prompt_text=strands[0].prompt_text,
            segments=tuple(segments[1:]) or ((Segment.GENERATED, 0),),
            columns={"reward": math.nan, "failure": "", "num_turns": len(turns), "episode": record} | dict(columns),
        )


_ALONE = {"name": MAIN, "num_turns": None, "prompt": None, "parent": ""}
"""What a record that names no conversations has: all turns are one conversation's."""


@final
class Recorded:
    """The part of a stopped conversation that has not been asked for yet."""

    def __init__(self, strands: Sequence[Strand]) -> None:
        self._strands = strands
        self._strand = 0
        self._at = 0
        """Segments of the strand that were asked for."""
        self._position = 0
        self._num_turns = 0

    @property
    def is_used_up(self) -> bool:
        return self._strand == len(self._strands) - 1 and self._at >= len(self._strands[-1].segments)

    def take(self, asked: Asked, request: Request) -> tuple[Generated, Segment] | None:
        """The turn that followed these tokens, or what there was of it, and its kind. None: the agent does something else than before."""
        if asked.begins and self._at:
            if self._at < len(self._strands[self._strand].segments):
                return None
            self._strand, self._at, self._position, self._num_turns = self._strand + 1, 0, 0, 0
        of, start, ids = self._strands[self._strand], self._position, asked.ids
        if of.by != asked.by:
            return None
        if (
            self._at >= len(of.segments)
            or of.segments[self._at][1] != len(ids)
            or of.tokens[start : start + len(ids)].tolist() != list(ids)
        ):
            return None
        self._at += 1
        self._position += len(ids)
        if self._at >= len(of.segments):  # It was stopped before the first token of the turn.
            return replace(_none_of(request), finish=Finish.ABORT), Segment.GENERATED
        kind, count = of.segments[self._at]
        end = self._position + count
        rows = [values[self._position : end] for values in (of.tokens, of.logprobs, of.versions, of.kv_stale)]
        self._at, self._position = self._at + 1, end
        is_whole = self._num_turns < len(of.turns)
        known: Any = of.turns[self._num_turns] if is_whole else {"finish": Finish.ABORT, "text": ""}
        self._num_turns += 1
        types: list[Any] = [np.int32, np.float32, np.int32, np.bool_]
        tokens, logprobs, versions, kv_stale = (np.array(values, kind) for values, kind in zip(rows, types, strict=True))
        made = replace(_none_of(request), tokens=tokens, logprobs=logprobs, versions=versions, kv_stale=kv_stale)
        return replace(made, finish=Finish(known["finish"]), text=str(known["text"])), kind


def _none_of(request: Request) -> Generated:
    none, logprobs, stale = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.bool_)
    return Generated(request.id, none, none, logprobs, none, stale, Finish.STOP, "")
