"""What a model sees of a conversation: what its tokenizer's chat template writes, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer
from transformers import AutoTokenizer

from m2flow.engines.models.model_files import TextCodec, load_tokenizer
from m2flow.errors import DatasetError, OptionError
from m2flow.recipe import ChatTemplate, Model

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "qwen3": "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "llama3": "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}"
    " {{ m.content }}{{ eos_token }}{% else %}[SYS]{{ m.content }}[/SYS]{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<User>{{ m.content }}"
    "{% else %}<Assistant>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}",
    "smollm": "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}
"""Small templates with what those of eight families do to a conversation, and one that reads parts."""
VENDORS = {path.stem: path.read_text() for path in (Path(__file__).resolve().parents[2] / "expected" / "templates").glob("*.jinja")}
"""The templates of eight models as their vendors publish them."""

QUESTION = {"role": "user", "content": " What is 2 + 2? \u00e9\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And <|im_end|> 3 + 3?"}],
    [QUESTION, {"role": "assistant", "content": "The sum is"}],
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": PARAMETERS}}]


def codec_of(folder: Path, template: str, **options: Any) -> tuple[TextCodec, Any]:
    byte_tokenizer(
        folder,
        special=("<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<turn>", "[INST]", "<|eot|>"),
        merges=["a s", "Ġ 2"],
        adds="<bos>",
        bos_token="<bos>",
        chat_template=template,
    )
    return load_tokenizer(Model(str(folder), **options)), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("family", sorted(TEMPLATES | {f"{name}, whole": text for name, text in VENDORS.items()}))
def test_messages_are_the_tokens_of_apply_chat_template(family: str, tmp_path: Path) -> None:
    template = TEMPLATES.get(family) or VENDORS[family.removesuffix(", whole")]
    codec, tokenizer = codec_of(tmp_path, template)
    with_tools = load_tokenizer(Model(str(tmp_path), template=ChatTemplate.of("Be brief.", None, {"enable_thinking": False}, TOOLS)))
    for messages in CONVERSATIONS:
        is_begun = messages[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun, "return_dict": False}
        expected = tokenizer.apply_chat_template(messages, **how)
        assert codec.encode_prompt(messages) == expected
        assert tokenizer.decode(expected) == codec.prompt_text(messages)
        assert expected.count(tokenizer.bos_token_id) == ("bos_token" in template)
        if family == "gemma":
            with pytest.raises(DatasetError, match=r"chat template .*TemplateError: System role"):
                with_tools.encode_prompt(messages)
            continue
        theirs = [{"role": "system", "content": "Be brief."}, *messages]
        assert with_tools.encode_prompt(messages) == tokenizer.apply_chat_template(theirs, tools=TOOLS, enable_thinking=False, **how)
        own = [{"role": "system", "content": "Be long."}, *messages]
        assert with_tools.encode_prompt(own) == tokenizer.apply_chat_template(own, tools=TOOLS, enable_thinking=False, **how)


def test_a_text_is_raw_or_a_users_message_and_begins_once(tmp_path: Path) -> None:
    raw, tokenizer = codec_of(tmp_path, TEMPLATES["mistral"])
    chat = load_tokenizer(Model(str(tmp_path), chat=True))
    assert tokenizer.decode(raw.encode_prompt("2+2")) == "<bos>2+2"
    assert raw.encode_prompt("<bos>2+2") == raw.encode_prompt("2+2")
    assert (raw.prompt_text("2+2"), chat.prompt_text("2+2")) == (None, "<bos>[INST] 2+2[/INST]")
    assert chat.encode_prompt("2+2") == raw.encode_prompt([{"role": "user", "content": "2+2"}])
    assert tokenizer.decode(raw.encode_exchange([QUESTION], "4")).endswith("[/INST] 4<eos>")


@pytest.mark.parametrize(("family", "text"), [("parts", "<user>one two<assistant>"), ("chatml", "<|im_start|>user\none\n two<|im_end|>")])
def test_parts_are_given_to_a_template_that_reads_them_and_joined_for_others(family: str, text: str, tmp_path: Path) -> None:
    codec, _ = codec_of(tmp_path, TEMPLATES[family])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    assert str(codec.prompt_text([{"role": "user", "content": parts}])).startswith(text)


def test_a_template_of_the_flow_replaces_the_tokenizers_and_is_saved_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}")
    codec_of(tmp_path / "model", TEMPLATES["chatml"])
    mine = load_tokenizer(Model(str(tmp_path / "model"), template=ChatTemplate.of(None, str(tmp_path / "mine.jinja"), None, None)))
    assert mine.prompt_text([{"role": "user", "content": "2+2"}]) == "Q: 2+2\nA:"
    mine.save(str(tmp_path / "saved"))
    assert load_tokenizer(Model(str(tmp_path / "saved"), chat=True)).prompt_text("2+2") == "Q: 2+2\nA:"
    with pytest.raises(OptionError, match=r"chat_template='no\.jinja' can't be read"):
        ChatTemplate.of(None, "no.jinja", None, None)


def test_messages_without_a_template_and_messages_that_are_none_are_refused(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    codec = load_tokenizer(Model(str(tmp_path)))
    with pytest.raises(DatasetError, match="the tokenizer has no chat template"):
        codec.encode_prompt([QUESTION])
    with pytest.raises(DatasetError, match="message 0 of the prompt has no role"):
        codec.encode_prompt([{"content": "a"}])
    with pytest.raises(DatasetError, match="message 0 of the prompt has the content 3"):
        codec.encode_prompt([{"role": "user", "content": 3}])
    shown = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(DatasetError, match=r"message 0 .*'image_url'.* texts alone"):
        codec.encode_prompt([{"role": "user", "content": shown}])
