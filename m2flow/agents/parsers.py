"""Read the tool calls that a model wrote, in the form of its family. The raw text stays with the turn.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>            Qwen2.5, Qwen3, Hermes
    llama3   {"name": ..., "parameters": {...}}, after <|python_tag|> or alone   Llama 3
    mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]         Mistral

A call that is not valid JSON, or names no tool, is a call with a fault, which the model is told; nothing is guessed. Of a turn that was cut
off no call is read at all: half of one may be valid by accident.

Source:
    The forms are those of the models' chat templates; the names, those of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from m2flow.agents.tools import ToolCall

Family = Literal["hermes", "llama3", "mistral"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""A model's raw text -> the text without calls, and the calls."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


def family_of(template: str) -> Family:
    """The form of tool calls that a chat template asks for; Hermes' where it asks for none.

    >>> family_of("{{ '[TOOL_CALLS]' }}"), family_of("<tool_call>")
    ('mistral', 'hermes')
    """
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if _PYTHON_TAG in template or ('"parameters"' in template and "<tool_call>" not in template) else "hermes"


def parsed(text: str, family: Family) -> tuple[str, list[ToolCall]]:
    """Split a model's text into what is said and the calls.

    >>> parsed('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1}, id='', fault='')])
    """
    return {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}[family](text)


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    if "<tool_call>" not in text:
        return text, []
    return _HERMES.sub("", text).strip(), [_call(part) for part in _HERMES.findall(text)]


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, rest = text.partition(_PYTHON_TAG)
    body = (rest if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return text, []
    # Several calls are separated by semicolons; a JSON text may have these too, so what is whole is read one after the other.
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            found, at = decoder.raw_decode(body, at)
        except ValueError:
            calls.append(_call(body[at:]))
            break
        calls.append(_made(found, body))
        while at < len(body) and body[at] in "; \n":
            at += 1
    return (said.strip() if tag else ""), calls


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, body = text.partition(_MISTRAL)
    if not tag:
        return text, []
    try:
        found, _ = json.JSONDecoder().raw_decode(body.strip())
    except ValueError:
        return said.strip(), [_call(body)]
    return said.strip(), [_made(one, body) for one in (found if isinstance(found, list) else [found])]


def _call(body: str) -> ToolCall:
    try:
        return _made(json.loads(body), body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, fault=f"the tool call is no valid JSON: {error}")


def _made(found: object, body: str) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, fault=f"the tool call has no name: {body.strip():.80}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # Some write the arguments as a text, as OpenAI's API has them.
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(str(found["name"]), {}, fault=f"the arguments are no valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(str(found["name"]), {}, fault="the arguments are no JSON object")
    return ToolCall(str(found["name"]), {str(name): value for name, value in arguments.items()}, str(found.get("id") or ""))
