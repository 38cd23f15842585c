"""Chat templates in the manner of known families, each with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tiny_models import byte_tokenizer
from trained_tokenizers import Manner, trained_tokenizer

from m2flow.engines.models.model_files import TextCodec
from m2flow.recipe import ChatTemplate

# The structure of the models' own templates: where turns end, which newlines there are, how a tool's result is written, what is dropped.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}"
    "Call by <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in c %}{% set c = "
    "c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|stop|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<sot>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}<sot>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>"
    "{% else %}<Assistant>{{ m.content }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}"
)
FAMILIES = {
    "Qwen2.5": (CHATML, ("<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "Qwen3": (THINKING, ("<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "Llama 3": (LLAMA3, ("<|eot|>", "<|begin|>", "<|start|>", "<|stop|>"), "<|eot|>"),
    "Mistral": (MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), "</s>"),
    "Gemma": (GEMMA, ("<eot>", "<bos>", "<sot>"), "<eot>"),
    "Phi": (PHI, ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"), "<|end|>"),
    "GLM": (GLM, ("<|user|>", "<|observation|>", "<|assistant|>", "[gMASK]", "<sop>"), "<|user|> <|observation|>"),
    "DeepSeek": (DEEPSEEK, ("<eos>", "<bos>", "<User>", "<Assistant>"), "<eos>"),
}

MANNERS: dict[str, tuple[Manner, ...]] = {
    "Qwen2.5": ("qwen",),
    "Qwen3": ("qwen",),
    "Llama 3": ("llama3",),
    "Mistral": ("llama2", "unigram", "o200k"),
    "Gemma": ("gemma",),
    "Phi": ("phi3", "o200k"),
    "GLM": ("llama3",),
    "DeepSeek": ("deepseek", "llama2"),
}
"""The tokenizers in whose manner models of a family have theirs."""


def trained_codec_of(name: str, manner: Manner) -> TextCodec:
    """Token ids and text of a family with a tokenizer that merges."""
    template, special, eos = FAMILIES[name]
    tokenizer = trained_tokenizer(manner, special, template)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, eos.split())), chat=True, template=ChatTemplate())


BORDERS = ("", " ", "\n", "\n\n", " a", "a ", "It's 4.\n\n", "  x", "\n\nSo", "12", "345", "é", "你", "<", "'s", "\t\t", "model\n")
"""What a tokenizer merges with what stands before it or behind it, if that is text."""


def num_merged_otherwise(codec: TextCodec, ids: Sequence[int], sampled: Sequence[bool], whole: Sequence[int]) -> int:
    """Count the sections, from one special token to the next, in which what the model said is other tokens than the template's.

    Raises:
        AssertionError: sections in which the model said nothing differ, or those in which it spoke in more than white space.
    """
    ours, theirs = ([0, *(at for at, id in enumerate(of) if id in codec.special_ids and at), len(of)] for of in (ids, whole))
    assert len(ours) == len(theirs)
    count = 0
    for (start, end), (first, last) in zip(pairwise(ours), pairwise(theirs), strict=True):
        mine, other = list(ids[start:end]), list(whole[first:last])
        count += mine != other
        if any(sampled[start:end]):
            assert "".join(codec.decode_all(mine).split()) == "".join(codec.decode_all(other).split())
        else:
            assert mine == other
    return count


def codec_of(folder: Path, name: str, *, merges: tuple[str, ...] = ()) -> TextCodec:
    template, special, eos = FAMILIES[name]
    tokenizer = byte_tokenizer(folder, special=special, merges=merges, chat_template=template)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, eos.split())), chat=True, template=ChatTemplate())
