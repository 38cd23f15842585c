"""The chat flow with a tiny chat model: planned as eager, and what the model saw is stored and shown."""

from __future__ import annotations

import sys
from pathlib import Path

import programs
import pytest
import transformers
from tiny_models import byte_tokenizer, save_config

from m2flow import load_flow
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.runner.run import Run, RunSettings
from m2flow.spec import ClusterSpec
from m2flow.viewer.sample_pages import sample_page

ROOT = Path(__file__).parents[2]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEEN = (
    "<|im_start|>system\nAnswer with one number.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nWhat is "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer(folder, special=("<|im_end|>", "<|im_start|>"), chat_template=CHATML)
    save_config("Qwen2", folder, tokenizer=False, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, max_position_embeddings=512)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_a_chat_flow_is_the_same_planned_and_eager_and_shows_what_the_model_saw(model: str, tmp_path: Path) -> None:
    options = {"model": model, "num_steps": 2, "batch": 2, "n": 2, "max_new_tokens": 6}
    said = []
    for eager in (False, True):
        settings = RunSettings(runs_dir=str(tmp_path / f"runs-{eager}"), deterministic=True, eager=eager)
        said.append(Run(load_flow(str(ROOT / "flows" / "chat.py")), options, ClusterSpec(device="cpu", cores=2), settings).execute())
    assert said[0].weights_sha256 == said[1].weights_sha256
    assert said[0].samples_sha256 == said[1].samples_sha256
    (run_dir,) = (path for path in (tmp_path / "runs-False").iterdir() if path.is_dir())
    with SampleQuery(run_dir) as book:
        entry = next(iter(book.entries("1")))
    call, prompt, member = map(int, entry.sample.split("/"))
    assert sample_page(run_dir, call, prompt, member).prompt_text.startswith(SEEN)
    shown = programs.run([sys.executable, "-m", "m2flow", "samples", str(run_dir)], check=True)
    assert SEEN.replace("\n", "\\n") in shown.stdout
