"""Chat templates in the manner of known families, each with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

from tiny_models import byte_tokenizer

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


def codec_of(folder: Path, name: str, *, merges: tuple[str, ...] = ()) -> TextCodec:
    template, special, eos = FAMILIES[name]
    tokenizer = byte_tokenizer(folder, special=special, merges=merges, chat_template=template)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, eos.split())), chat=True, template=ChatTemplate())
