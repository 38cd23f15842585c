"""Tools, calls and results in the chat templates of the families in use: the tokens are the template's, and the calls are read back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_codecs import BORDERS, num_merged_otherwise
from click.testing import CliRunner
from tiny_models import byte_tokenizer
from trained_tokenizers import Manner, trained_tokenizer

from m2flow.agents.conversation import Conversation, rewrites
from m2flow.agents.tools import ToolCall, before_calls, check_family, family_of, parsed
from m2flow.cli.main import cli
from m2flow.engines.models.model_files import TextCodec
from m2flow.errors import DatasetError
from m2flow.recipe import ChatTemplate

# What the published templates do with tools, calls, results, thinking and ends of turns, without the words of their instructions.

_TOOLS = "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
_RESULTS = (
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or said %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
)
QWEN25 = (
    f"{_TOOLS}"
    'Return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content %}<|im_start|>assistant\n{{ said }}" + _HERMES_CALLS + _RESULTS
)
SHIPPED = (Path(__file__).parents[2] / "flows" / "models" / "chatml-tools.jinja").read_text()
QWEN3 = (
    f"{_TOOLS}"
    'Return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}" + _HERMES_CALLS + _RESULTS
)
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}{% set f = t.function %}\n<function>\n<name>{{ f.name }}</name>"
    "\n<description>{{ f.description | trim }}</description>\n<parameters>{% for name, p in f.parameters.properties | items %}"
    "\n<parameter>\n<name>{{ name }}</name>\n<type>{{ p.type }}</type>\n</parameter>{% endfor %}\n</parameters>\n</function>{% endfor %}"
    "\n</tools>\n"
    "<tool_call>\n<function=example>\n<parameter=example_1>\nvalue_1\n</parameter>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.tool_calls %}"
    "{% if m.content | trim %}{{ '\n' + m.content | trim + '\n' }}{% endif %}{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}{% for name, value in c.function.arguments | items %}"
    "{{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{% else %}{{ '\n' + m.content }}{% endif %}<|im_end|>\n" + _RESULTS
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>"
    "{% set said = m.content.split('</think>')[-1].strip() %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "{{ '\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}{% if said %}{{ '\n' + said }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA32 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}' }}"
    "<|eot_id|>{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ {'output': m.content} | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set turns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% set turns.n = turns.n + 1 %}{% endif %}{% endfor %}"
    "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == WHERE %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    "{% if not c.id is defined or c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}, \"id\": \"{{ c.id }}\"}{{ ']</s>' if loop.last else ', ' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
MISTRAL, MISTRAL_SMALL = _MISTRAL.replace("WHERE", "users[0]"), _MISTRAL.replace("WHERE", "users[-1]")
DEEPSEEK_V31 = (
    "{% set ns = namespace(user=false, result=false, first=false) %}<bos>"
    "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}{% set ns.result = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% if ns.user %}<｜Assistant｜></think>{% endif %}"
    "{% set ns.user = false %}{% set ns.result = false %}{% set ns.first = true %}{% for c in m.tool_calls %}"
    "{% if ns.first %}{{ m.content + '<｜tool▁calls▁begin｜>' }}{% set ns.first = false %}{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜><eos>{% elif m.role == 'assistant' %}{% if ns.user %}<｜Assistant｜></think>{% endif %}{% set ns.user = false %}"
    "{{ m.content if ns.result else m.content.split('</think>', 1)[-1] }}<eos>{% set ns.result = false %}"
    "{% elif m.role == 'tool' %}{% set ns.user = false %}{% set ns.result = true %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.user and not ns.result %}<｜Assistant｜></think>{% endif %}"
)
DEEPSEEK_V3 = (
    DEEPSEEK_V31.replace("<｜Assistant｜></think>", "<｜Assistant｜>")
    .replace("c.function.name + '<｜tool▁sep｜>' + c.function.arguments +", "c.type + '<｜tool▁sep｜>' + c.function.name + FENCED +")
    .replace("FENCED", r"'\n```json\n' + c.function.arguments + '\n```'")
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
    "{% set name = m.get('name') or m.role %}{% if m.role == 'user' %}<|im_user|>{% elif m.role == 'assistant' %}<|im_assistant|>"
    "{% else %}<|im_system|>{% endif %}{{ name }}<|im_middle|>{% if m.role == 'assistant' and m.get('tool_calls') %}{{ m.content }}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GPT_OSS = (
    "{% set last = namespace(name=none) %}<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n{% for t in tools %}"
    "// {{ t.function.description }}\ntype {{ t.function.name }} = (_: {{ t.function.parameters.properties | tojson }}) => any;"
    "\n\n{% endfor %}"
    "} // namespace functions<|end|>{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}"
    "{% set later = namespace(found=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.found = true %}{% endif %}{% endfor %}"
    "{% set c = m.tool_calls[0].function %}{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
    "{% elif (m.content or m.thinking) and not later.found %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% set last.name = c.name %}{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}"
    "{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "<bos>{% if tools %}<start_of_turn>developer\n{% for t in tools %}<start_function_declaration>declaration:{{ t.function.name }}"
    "{{ t.function.parameters | tojson }}<end_function_declaration>{% endfor %}<end_of_turn>\n{% endif %}{% set ns = namespace(was='') %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<start_function_response>response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}"
    "<end_function_response>{% set ns.was = 'tool' %}{% else %}{% if m.role != 'assistant' or ns.was != 'tool' %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<start_function_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | items %}{{ ',' if not loop.first }}"
    "{{ k }}:{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}{% endfor %}{{ '}' }}<end_function_call>"
    "{% endfor %}{% if not m.tool_calls %}<end_of_turn>\n{% endif %}{% set ns.was = m.role %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.was != 'tool' %}<start_of_turn>model\n{% endif %}"
)


class Model(NamedTuple):
    """A family: its template, its special tokens with those that end a turn first, and what its model writes."""

    family: str
    template: str
    special: str
    num_ends: int
    turns: Sequence[str]
    """One call; two calls at once; an answer; a call after a further question."""
    ends: Sequence[str] = ()
    """Where they are not all the first of the special tokens."""
    rewrites: str = ""
    ids: Sequence[Sequence[str]] = ()
    """Ids of the calls that the model writes itself."""


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ONE, TWO, THREE = '{"a": 1, "t": "2"}', '{"a": 2, "t": "x y"}', '{"a": 3, "t": "z"}'
THOUGHT = "<think>\nI must add.\n</think>\n\n"


def named(arguments: str, key: str = "arguments", id: str = "") -> str:
    return f'{{"name": "add", "{key}": {arguments}' + (f', "id": "{id}"}}' if id else "}")


def coder(*values: tuple[int, str]) -> str:
    return "".join(
        f"\n<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=t>\n{t}\n</parameter>\n</function>\n</tool_call>"
        for a, t in values
    )


def glm(*values: tuple[int, str]) -> str:
    return "".join(
        f"\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>t</arg_key>\n<arg_value>{t}</arg_value>\n</tool_call>"
        for a, t in values
    )


def deepseek(*calls: str, before: str = "add<｜tool▁sep｜>", after: str = "") -> str:
    every = "".join(f"<｜tool▁call▁begin｜>{before}{call}{after}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{every}<｜tool▁calls▁end｜>"


def kimi(first: int, *calls: str) -> str:
    each = (
        f"<|tool_call_begin|>functions.add:{at}<|tool_call_argument_begin|>{call}<|tool_call_end|>" for at, call in enumerate(calls, first)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def fenced(*calls: str) -> str:
    return deepseek(*calls, before="function<｜tool▁sep｜>add\n```json\n", after="\n```")


def gemma(*values: tuple[int, str]) -> str:
    return "".join(f"<start_function_call>call:add{{a:{a},t:<escape>{t}<escape>}}<end_function_call>" for a, t in values)


def harmony(arguments: str) -> str:
    thought = "<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant"
    return f"{thought} to=functions.add<|channel|>commentary json<|message|>{arguments}"


_IM = "<|im_end|> <|im_start|>"
_MISTRAL_SPECIAL = "</s> <s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
_DEEPSEEK_SPECIAL = (
    "<eos> <bos> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_MISTRAL_TURNS = [
    f"[TOOL_CALLS] [{named(ONE, id='abcdefgh1')}]",
    f"[TOOL_CALLS] [{named(TWO, id='abcdefgh2')}, {named(THREE, id='abcdefgh3')}]",
    " It is 5.",
    f"[TOOL_CALLS] [{named(ONE, id='abcdefgh4')}]",
]
_MISTRAL_IDS = [["abcdefgh1"], ["abcdefgh2", "abcdefgh3"], [], ["abcdefgh4"]]

MODELS = {
    "Qwen2.5": Model(
        "hermes", QWEN25, _IM, 1, [f"So.\n{hermes(named(ONE))}", hermes(named(TWO), named(THREE)), "It is 5.", hermes(named(ONE))]
    ),
    "ours": Model(
        "hermes", SHIPPED, _IM, 1, [f"So.\n{hermes(named(ONE))}", hermes(named(TWO), named(THREE)), "It is 5.", hermes(named(ONE))]
    ),
    "Qwen3": Model(
        "hermes",
        QWEN3,
        _IM,
        1,
        [THOUGHT + hermes(named(ONE)), THOUGHT + hermes(named(TWO), named(THREE)), f"{THOUGHT}It is 5.", THOUGHT + hermes(named(ONE))],
        rewrites="drop the model's thinking",
    ),
    "Qwen3-Coder": Model(
        "qwen3_coder", QWEN3_CODER, _IM, 1, ["So.\n" + coder((1, "2")), coder((2, "x y"), (3, "z"))[1:], "It is 5.", coder((1, "2"))[1:]]
    ),
    "GLM-4.6": Model(
        "glm45",
        GLM,
        "<|user|> <|observation|> <|assistant|> <|system|> [gMASK] <sop>",
        2,
        [
            f"\n<think></think>\nSo.{glm((1, '2'))}",
            f"\n<think>Hm.</think>{glm((2, 'x y'), (3, 'z'))}",
            "\n<think></think>\nIt is 5.",
            f"\n<think></think>{glm((1, '2'))}",
        ],
        ["<|observation|>", "<|observation|>", "<|user|>", "<|observation|>"],
        rewrites="drop the model's thinking",
    ),
    "Llama 3.2": Model(
        "llama3",
        LLAMA32,
        "<|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
        1,
        [named(ONE, "parameters"), f"{named(TWO, 'parameters')}; {named(THREE, 'parameters')}", "It is 5.", named(ONE, "parameters")],
    ),
    "Mistral 7B": Model("mistral", MISTRAL, _MISTRAL_SPECIAL, 1, _MISTRAL_TURNS, ids=_MISTRAL_IDS),
    "Mistral Small": Model("mistral", MISTRAL_SMALL, _MISTRAL_SPECIAL, 1, _MISTRAL_TURNS, rewrites="move the tools", ids=_MISTRAL_IDS),
    "DeepSeek-V3": Model(
        "deepseek_v3",
        DEEPSEEK_V3,
        _DEEPSEEK_SPECIAL,
        1,
        [f"So.{fenced(ONE)}", fenced(TWO, THREE), "It is 5.", fenced(ONE)],
        rewrites="drop the model's thinking",
    ),
    "DeepSeek-V3.1": Model(
        "deepseek_v3",
        DEEPSEEK_V31,
        _DEEPSEEK_SPECIAL,
        1,
        [f"So.{deepseek(ONE)}", deepseek(TWO, THREE), "It is 5.", deepseek(ONE)],
        rewrites="drop the model's thinking",
    ),
    "Kimi K2": Model(
        "kimi_k2",
        KIMI_K2,
        "<|im_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|> "
        "<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        1,
        [f"So.{kimi(0, ONE)}", kimi(1, TWO, THREE), "It is 5.", kimi(3, ONE)],
        ids=[["functions.add:0"], ["functions.add:1", "functions.add:2"], [], ["functions.add:3"]],
    ),
    "gpt-oss": Model(
        "harmony",
        GPT_OSS,
        "<|return|> <|call|> <|end|> <|start|> <|channel|> <|message|> <|constrain|>",
        2,
        [harmony(ONE), harmony(TWO), "<|channel|>final<|message|>It is 5.", harmony(ONE)],
        ["<|call|>", "<|call|>", "<|return|>", "<|call|>"],
        rewrites="drop the model's thinking",
    ),
    "FunctionGemma": Model(
        "gemma",
        GEMMA,
        "<end_of_turn> <start_function_response> <bos> <start_of_turn> <start_function_call> <end_function_call> <escape>",
        2,
        [gemma((1, "2")), gemma((2, "x y"), (3, "z")), "It is 5.", gemma((1, "2"))],
        ["<start_function_response>", "<start_function_response>", "<end_of_turn>", "<start_function_response>"],
    ),
}
PUBLISHED = Path(__file__).parents[1] / "expected" / "templates"
"""Templates as their vendors publish them."""
MODELS |= {
    f"{name}, published": MODELS[name]._replace(template=(PUBLISHED / f"{file}.jinja").read_text())
    for name, file in {"Qwen2.5": "qwen2_5", "Qwen3": "qwen3", "GLM-4.6": "glm4moe", "gpt-oss": "gptoss"}.items()
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "t": {"type": "string"}}, "required": ["a", "t"]},
    },
}


def codec_of(folder: Path, name: str) -> TextCodec:
    model = MODELS[name]
    special = model.special.split(" ")
    tokenizer = byte_tokenizer(folder, special=special, chat_template=model.template)
    ends = frozenset(map(tokenizer.convert_tokens_to_ids, special[: model.num_ends]))
    return TextCodec(tokenizer, ends, chat=True, template=ChatTemplate())


def results(calls: Sequence[ToolCall]) -> list[Mapping[str, object]]:
    return [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": f"{call.arguments['a']}"} for call in calls]


def whole(codec: TextCodec, conversation: Conversation) -> str:
    """The conversation as the template writes it at once, with calls as it takes them; two in a turn as the text where it refuses those."""
    messages: list[Any] = json.loads(json.dumps(conversation.messages))
    try:
        return codec.conversation(messages, [ADD])
    except DatasetError as error:
        for at, one in enumerate(messages):
            if len(one.get("tool_calls", ())) > 1 and "single tool-calls" in error.what:
                messages[at] = {"role": "assistant", "content": f"{named(TWO, 'parameters')}; {named(THREE, 'parameters')}"}
            for call in one.get("tool_calls", ()) if "single" not in error.what else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return codec.conversation(messages, [ADD])


def heard(codec: TextCodec, conversation: Conversation, name: str, at: int) -> tuple[list[int], str, tuple[ToolCall, ...]]:
    model = MODELS[name]
    end = (model.ends or model.special.split(" ")[:1] * len(model.turns))[at]
    ids = codec.encode_target(model.turns[at] + end)
    text, calls = conversation.heard(ids, codec.decode(ids), is_whole=True, tools=lambda call: "")
    return ids, text, calls


@pytest.mark.parametrize("name", MODELS)
def test_tools_calls_and_results_are_the_tokens_that_the_template_would_write_at_once(name: str, tmp_path: Path) -> None:
    codec, model = codec_of(tmp_path, name), MODELS[name]
    assert family_of(codec.template) == model.family
    conversation = Conversation(codec)
    ids = conversation.begun("How much is it?", [ADD])
    assert "add" in codec.decode_all(ids), "the model sees the tool"
    parallel = 1 if model.family == "harmony" else 2  # Its call ends a turn.
    for at, expected in enumerate([[1], [2, 3][:parallel], [], [1]]):
        made, text, calls = heard(codec, conversation, name, at)
        ids += made
        assert [call.arguments["a"] for call in calls] == expected, "numbers are numbers"
        assert all(isinstance(call.arguments["t"], str) and not call.fault for call in calls), "and texts are texts"
        assert model.turns[at].strip() in conversation.raw.strip(), "the raw text is kept"
        if model.ids:
            assert [call.id for call in calls] == model.ids[at]
        if not calls:
            assert text.split("</think>")[-1].strip() == "It is 5."
        new = results(calls) or [{"role": "user", "content": "And now?"}]
        ids += conversation.followed(new)
        conversation.accepted(new)
        if at == 2 and model.rewrites:
            break
        assert codec.decode_all(ids) == whole(codec, conversation)
        assert ids == codec.encode_target(whole(codec, conversation))
    assert codec.decode_all(ids).count("Add two numbers") <= 1, "tools are shown once"


MANNERS: Mapping[str, Manner] = {
    "Llama 3.2": "llama3",
    "GLM-4.6": "llama3",
    "Mistral 7B": "llama2",
    "Mistral Small": "o200k",
    "DeepSeek-V3": "deepseek",
    "DeepSeek-V3.1": "deepseek",
    "gpt-oss": "o200k",
    "FunctionGemma": "gemma",
}
"""In whose manner a family has its tokenizer, where not in Qwen's."""


@pytest.mark.parametrize("name", MODELS)
def test_of_a_tokenizer_that_merges_too_tools_and_results_are_as_the_template_has_them(name: str) -> None:
    model, dice = MODELS[name], random.Random(name)
    special = model.special.split(" ")
    tokenizer = trained_tokenizer(MANNERS.get(name.removesuffix(", published"), "qwen"), special, model.template)
    ends = frozenset(map(tokenizer.convert_tokens_to_ids, special[: model.num_ends]))
    codec = TextCodec(tokenizer, ends, chat=True, template=ChatTemplate())
    for _ in range(12):
        conversation = Conversation(codec)
        ids = conversation.begun("How much is it?", [ADD])
        sampled = [False] * len(ids)
        for at in range(2 if model.rewrites else 4):
            made, _, calls = heard(codec, conversation, name, at)
            text = "".join(dice.choices(BORDERS, k=3))
            new = [{**one, "content": f"{text}{one['content']}"} for one in results(calls)] or [{"role": "user", "content": f"?{text}"}]
            bridge = conversation.followed(new)
            conversation.accepted(new)
            ids, sampled = [*ids, *made, *bridge], [*sampled, *[True] * len(made), *[False] * len(bridge)]
            num_merged_otherwise(codec, ids, sampled, codec.encode_target(whole(codec, conversation)))


_DEEPSEEK = "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
SPECIAL = {
    "qwen2_5": _IM,
    "qwen3": _IM,
    "deepseekv3": _DEEPSEEK,
    "deepseek_r1_distill": _DEEPSEEK,
    "glm4moe": MODELS["GLM-4.6"].special,
    "gptoss": MODELS["gpt-oss"].special,
    "phi3": "<|end|> <|user|> <|assistant|> <|system|>",
    "phi3_5": "<|end|> <|user|> <|assistant|> <|system|>",
}
"""Special tokens of the published templates, that which ends a turn first."""
BEFORE = {"gptoss": "<|channel|>final<|message|>", "glm4moe": "\n<think></think>\n"}
"""What a model writes before what it says."""
REWRITING = ("deepseekv3", "deepseek_r1_distill", "gptoss")
"""These write `<think>` for the model, or the end of its turn, otherwise once it has spoken; what was sampled stays."""


@pytest.mark.parametrize("name", SPECIAL)
def test_a_conversation_has_the_tokens_that_the_published_template_writes_at_once(name: str, tmp_path: Path) -> None:
    special = SPECIAL[name].split(" ")
    tokenizer = byte_tokenizer(tmp_path, special=special, chat_template=(PUBLISHED / f"{name}.jinja").read_text())
    codec = TextCodec(tokenizer, frozenset([tokenizer.convert_tokens_to_ids(special[0])]), chat=True, template=ChatTemplate())
    conversation = Conversation(codec)
    ids = conversation.begun("How much is it?", [])
    for at in range(3):
        made = codec.encode_target(f"{BEFORE.get(name, '')}It is {at}.\n Is it?{special[0]}")
        conversation.heard(made, codec.decode(made), is_whole=True, tools=lambda call: "")
        new = [{"role": "user", "content": f"And {at}?"}]
        ids += made + conversation.followed(new)
        conversation.accepted(new)
        anew = codec.conversation(conversation.messages, [])
        if name in REWRITING:
            assert codec.decode_all(ids) != anew
            assert rewrites(codec, "user", has_tools=False), "and a plan says so"
        else:
            assert codec.decode_all(ids) == anew
            assert ids == codec.encode_target(anew)


@pytest.mark.parametrize("name", MODELS)
def test_templates_that_rewrite_what_was_said_with_tools_are_known(name: str, tmp_path: Path) -> None:
    codec = codec_of(tmp_path, name)
    assert rewrites(codec, "user", has_tools=True) == MODELS[name].rewrites
    assert rewrites(codec, "tool", has_tools=True) == ""


def test_tools_that_a_template_moves_to_the_last_question_are_shown_once_or_refused(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "Mistral Small")
    conversation = Conversation(codec)
    ids = conversation.begun("How much is it?", [ADD])
    ids += heard(codec, conversation, "Mistral Small", 2)[0]
    new = [{"role": "user", "content": "And now?"}]
    assert codec.conversation([*conversation.messages, *new], [ADD]).index("AVAILABLE_TOOLS") > 30, "the template moves them"
    ids += conversation.followed(new)
    assert codec.decode_all(ids).count("[AVAILABLE_TOOLS]") == 1
    assert codec.decode_all(ids).endswith("It is 5.</s>[INST] And now?[/INST]")
    refusing = Conversation(codec, "refuse")
    refusing.begun("How much is it?", [ADD])
    heard(codec, refusing, "Mistral Small", 2)
    with pytest.raises(Exception, match="move the tools"):
        refusing.followed(new)
    without = Conversation(codec, "refuse")
    without.begun("How much is it?", [])
    heard(codec, without, "Mistral Small", 2)
    assert without.followed(new), "an agent without tools loses nothing"


def test_what_gpt_oss_thinks_is_no_part_of_what_it_says(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "gpt-oss")
    conversation = Conversation(codec)
    conversation.begun("?", [ADD])
    text = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>4"
    ids = codec.encode_target(f"{text}<|return|>")
    assert conversation.heard(ids, codec.decode(ids), is_whole=True, tools=lambda call: "") == ("4", ())
    assert conversation.messages[-1] == {"role": "assistant", "content": "4", "thinking": "Two and two."}
    assert conversation.raw == text
    bridge = codec.decode_all(conversation.followed([{"role": "user", "content": "And now?"}]))
    assert bridge == "<|start|>user<|message|>And now?<|end|><|start|>assistant", "the turn has ended once"


def test_a_stop_text_ends_what_gpt_oss_says_too(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "gpt-oss")
    conversation = Conversation(codec)
    conversation.begun("?", [ADD])
    ids = codec.encode_target("<|channel|>final<|message|>4 STOP")
    assert conversation.heard(ids, codec.decode(ids).removesuffix(" STOP"), is_whole=True, tools=lambda call: "")[0] == "4"


def test_a_parser_of_ones_own_reads_calls_and_the_template_still_gets_them(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "gpt-oss")
    conversation = Conversation(codec, family=lambda text: ("", [ToolCall("add", {"a": 1})]))
    conversation.begun("?", [ADD])
    heard(codec, conversation, "gpt-oss", 0)
    bridge = codec.decode_all(conversation.followed([{"role": "tool", "content": "1"}]))
    assert bridge == '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"1"<|end|><|start|>assistant'


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("before", ["", "Let me see. ", "1 < 2, so [a] {b}\n\n", " I"])
def test_what_is_sure_before_a_turn_has_ended_is_the_beginning_of_what_it_says(name: str, before: str) -> None:
    family: Any = MODELS[name].family
    for raw in (before + MODELS[name].turns[0].removeprefix(THOUGHT), before + "That is all.", *MODELS[name].turns):
        said, calls = parsed(raw, family)
        for end in range(len(raw) + 1):
            assert (said if calls else raw).startswith(before_calls(raw[:end], raw[:end], family))
    plain = before + "That is all."
    assert before_calls(plain, plain, family) == ("" if family == "harmony" or before == " I" else plain)


@pytest.mark.parametrize(
    ("family", "text", "fault"),
    [
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", "not well formed"),
        ("qwen3_coder", '<tool_call>\n{"name": "add"}\n</tool_call>', "names no function"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>", "not well formed"),
        ("glm45", '<tool_call>{"name": "add"}<arg_key></tool_call>', "not well formed"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>", "no valid JSON"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>add", "not well formed"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_end|>x", ""),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>", "no name"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{'a': 1}", "no valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "no valid JSON"),
        ("llama3", "[add(1)]", "have names and are literals"),
        ("llama3", "[add(a=__import__('os'))]", "have names and are literals"),
        ("llama3", "[add(a={1, 2})]", "have names and are literals"),
        ("phi4_mini", "<|tool_call|>[{<|/tool_call|>", "no valid JSON"),
        ("gemma", "<start_function_call>call:add{a:}<end_function_call>", "no valid JSON"),
    ],
)
def test_a_call_that_is_not_well_formed_is_a_call_with_a_fault(family: Any, text: str, fault: str) -> None:
    _, (call,) = parsed(text, family)
    assert fault in call.fault
    assert bool(call.fault) == bool(fault)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        (
            "mistral",
            '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]b[ARGS]{}',
            [("add", {"a": 1}, "abcdefghi"), ("b", {}, "")],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "short"}]', [("add", {}, "")]),
        ("llama3", '[add(a=-1, t="x"), b()]', [("add", {"a": -1, "t": "x"}, ""), ("b", {}, "")]),
        ("llama3", "[1, 2]", []),
        ("phi4_mini", 'functools[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1}, "")]),
        ("phi4_mini", '<|tool_call|>[{"name": "add", "arguments": {}}, {"name": "b"}]<|/tool_call|>', [("add", {}, ""), ("b", {}, "")]),
        ("gemma", 'So.<|tool_call>call:add{a:[1,2],t:<|"|>x:{y:1}<|"|>}<tool_call|>', [("add", {"a": [1, 2], "t": "x:{y:1}"}, "")]),
        ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', [("add", {"a": 1}, "")]),
        ("glm45", "<tool_call>add</tool_call>", [("add", {}, "")]),
        ("qwen3_coder", "<function=add>\n<parameter=a>\nnone such\n</parameter>\n</function>", [("add", {"a": "none such"}, "")]),
    ],
)
def test_other_forms_of_a_family_are_read_too(family: Any, text: str, calls: list[tuple[str, object, str]]) -> None:
    assert [(one.name, dict(one.arguments), one.id) for one in parsed(text, family)[1]] == calls


@pytest.mark.parametrize(
    "inner", ["(", "[f(a=", "-", "a.", "{", "```", "<parameter=x>", "<arg_key>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", ":1"]
)
@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<function=f>"),
        ("glm45", "<tool_call>f<arg_key>"),
        ("llama3", "[f(a="),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
        ("phi4_mini", "<|tool_call|>"),
        ("gemma", "<start_function_call>call:f{"),
    ],
)
def test_nonsense_of_any_length_is_a_fault_that_says_the_same_each_time(family: Any, before: str, inner: str) -> None:
    said, calls = parsed(before + inner * 5000, family)
    assert calls
    assert all(call.fault for call in calls)
    assert all("0x" not in call.fault for call in calls)
    assert parsed(before + inner * 5000, family) == (said, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"type": ["string", "null"]}, "{}", "{}"),
        ({"$ref": "#/$defs/E", "$defs": {"E": {"enum": ["1", "2"], "type": "string"}}}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "3", 3),
        ({}, '"3"', '"3"'),
        ({"type": "integer"}, "three", "three"),
    ],
)
def test_a_value_without_quotation_marks_is_read_by_the_tools_schema(schema: Mapping[str, object], text: str, value: object) -> None:
    schemas = {"add": {"properties": {"a": schema}}}
    written = f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert parsed(written, "glm45", schemas)[1][0].arguments == {"a": value}


UNKNOWN = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}{{ m.content }}<eos>{% endfor %}"


def test_a_template_that_presents_tools_in_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not known") as caught:
        check_family(UNKNOWN)
    assert "@agent(tool_calls=...)" in caught.value.now
    codec = TextCodec(byte_tokenizer(tmp_path, chat_template=UNKNOWN), frozenset([0]), chat=True, template=ChatTemplate())
    with pytest.raises(DatasetError, match="not known"):
        Conversation(codec).begun("?", [ADD])
    assert Conversation(codec).begun("?", [])
    later = Conversation(codec)
    later.begun("?", [])
    with pytest.raises(DatasetError, match="not known"):
        later.offer([ADD])
    assert Conversation(codec, family="hermes").begun("?", [ADD])


@pytest.mark.parametrize(
    "form",
    ["<tool_call>\n<invoke name=", "<|python_tag|> or <function=example>{}</function>", "<tool_call>[...] or <tool_calls>[", "<action>"],
)
def test_forms_that_look_like_a_familys_are_not_taken_for_it(form: str) -> None:
    assert family_of("{% for t in tools %}{{ t | tojson }}{% endfor %}" + form) is None


def test_a_template_of_its_own_for_tools_says_the_form_of_calls(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}{{ m.content }}<eos>{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path, chat_template={"default": plain, "tool_use": UNKNOWN})
    with pytest.raises(DatasetError, match="not known"):
        Conversation(TextCodec(tokenizer, frozenset([0]), chat=True, template=ChatTemplate())).begun("?", [ADD])


def test_a_branch_and_a_rewritten_conversation_keep_calls_that_the_template_takes_one_at_a_time(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "Llama 3.2")
    conversation = Conversation(codec, "fork")
    ids = conversation.begun("How much is it?", [ADD])
    ids, calls = ids + (made := heard(codec, conversation, "Llama 3.2", 1))[0], made[2]
    branch = conversation.copy()
    for one in (conversation, branch):
        new = results(calls)
        assert one.rewritten(new) is None, "it extends what is there"
        whole_ids = ids + one.followed(new)
        one.accepted(new)
        assert codec.decode_all(whole_ids).endswith(
            '{"output": "3"}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        )
        heard(codec, one, "Llama 3.2", 2)
        assert one.rewritten([{"role": "user", "content": "And now?"}]) is None


FLOW = """
from m2flow import Chat, Dataset, Policy, Sample, agent, flow, steps, tool

@tool
async def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

async def talked(chat: Chat, prompt: str) -> None:
    turn = await chat.say(prompt{tools})

@agent{how}
async def solver(chat: Chat, row: Sample) -> float:
    await talked(chat, str(row.prompt))
    return 1.0

@flow
def talks(num_steps: int = 2):
    policy = Policy({model!r}, init="random", chat_template={template!r})
    rows = Dataset([{{"prompt": "1="}}], name="rows", shuffle=False)
    for _ in steps(num_steps):
        episodes = policy.rollout(solver, rows.take(1), n=2, max_tokens=8, history={history!r})
        policy.update(episodes, episodes.reward)
"""


@pytest.mark.parametrize(
    ("template", "tools", "how", "history", "refused"),
    [
        (UNKNOWN, ", tools=[add]", "", "append", "in which form its model writes calls is not known"),
        (UNKNOWN, ", tools=[add]", '(tool_calls="hermes")', "append", ""),
        (UNKNOWN, "", "", "append", ""),
        (MISTRAL_SMALL, ", tools=[add]", "", "refuse", "would move the tools once a further user's message follows"),
        (MISTRAL_SMALL, ", tools=[add]", "", "append", ""),
        (MISTRAL_SMALL, "", "", "refuse", ""),
        (MISTRAL, ", tools=[add]", "", "refuse", ""),
    ],
)
def test_what_a_template_does_with_tools_is_found_when_the_flow_is_planned(
    template: str, tools: str, how: str, history: str, refused: str, tmp_path: Path
) -> None:
    file, digits = tmp_path / "talks.py", str(Path(__file__).parents[2] / "flows" / "models" / "digits")
    file.write_text(FLOW.format(model=digits, template=template, tools=tools, how=how, history=history))
    planned = CliRunner().invoke(cli, ["plan", str(file)])
    if refused:
        assert planned.exit_code != 0
        assert refused in planned.stderr
        assert "talks.py:22" in planned.stderr
    else:
        assert planned.exit_code == 0, planned.output
