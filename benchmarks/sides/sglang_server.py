"""An SGLang server with a tiny random model, without a GPU, and a plain client of it.

`Server` starts one in the interpreter that has SGLang (`make sglang-cpu`) and stops it. Its model never ends a turn by itself, so that a
turn has as many tokens as it asks for. `play` plays episodes on plain asyncio: a coroutine for each, its turns as requests with token ids
to the server's own endpoint, and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx2
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from m2flow.engines.contract import EngineSettings, Language
from m2flow.engines.servers.sglang import SglangRollout
from m2flow.recipe import Model

_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}"
    "Call by <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|im_end|>", "<|im_start|>")
END_OF_TURN = f"{_SPECIAL[0]}\n"
"""What the template puts behind a message."""
_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 900.0


def tiny_model(place: Path) -> Model:
    """Write a Qwen2 of four layers with random weights, and a tokenizer of bytes.

    Its width is such that reading a prompt anew takes a noticeable part of the time. (SGLang's attention on a CPU computes the queries of a
    whole prompt, cached or not: less is saved here than on a GPU.)
    The first feature of each embedding is a constant that the special tokens' rows of the head make a large negative logit.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*_SPECIAL, *alphabet])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_SPECIAL[0], chat_template=_TEMPLATE)
    tokenizer.save_pretrained(place)
    config = transformers.Qwen2Config(
        vocab_size=len(_SPECIAL) + len(alphabet), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[: len(_SPECIAL), 0] = -10.0
    model.save_pretrained(place)
    return Model(str(place))


class Server:
    """A server of a model.

    Args:
        slots: requests that it decodes at once.
        cache: tokens that its KV cache holds.
    """

    def __init__(self, model: Model, python: str, slots: int, cache: int) -> None:
        options: dict[str, str | int | float | bool] = {
            "python": python,
            "args": f"--attention-backend torch_native --sampling-backend pytorch --max-total-tokens {cache} --sleep-on-idle"
            " --mem-fraction-static 0.1",
            "env": f"PYTHONPATH={_ROOT / 'tests' / 'sglang_cpu'} SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1",
            "start_timeout_s": _START_TIMEOUT_S,
        }
        self._engine = SglangRollout(model, EngineSettings(options=options, max_running=slots))

    def __enter__(self) -> Server:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def language(self) -> Language:
        return self._engine.language()


class Turn(NamedTuple):
    """A turn of an episode."""

    new: Sequence[int]
    """Ids of the messages before it."""
    num_tokens: int
    wait: Callable[[], Awaitable[object]]
    """What the episode waits for before it."""


class Played(NamedTuple):
    """What episodes took."""

    seconds: float
    num_tokens: int
    """Generated."""
    num_prompt_tokens: int
    num_cached: int
    """Those of them that the server had in its prefix cache."""


async def play(url: str, slots: int | None, episodes: Sequence[Sequence[Turn]]) -> Played:
    """Play episodes on plain asyncio, all at once, with so many requests at once (None: as they come)."""
    at_once, seeds = asyncio.Semaphore(slots or len(episodes)), itertools.count()
    made, prompts, cached = list[int](), list[int](), list[int]()

    async def turn(client: httpx2.AsyncClient, context: list[int], num_tokens: int) -> list[int]:
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "skip_special_tokens": False, "sampling_seed": next(seeds)}
        async with at_once:
            answer = await client.post("/generate", json={"input_ids": context, "sampling_params": sampling, "return_logprob": True})
        found = answer.raise_for_status().json()
        prompts.append(len(context))
        cached.append(found["meta_info"]["cached_tokens"])
        made.append(len(found["output_ids"]))
        return list(found["output_ids"])

    async def episode(client: httpx2.AsyncClient, turns: Sequence[Turn]) -> None:
        context: list[int] = []
        for one in turns:
            await one.wait()
            context += one.new
            context += await turn(client, context, one.num_tokens)

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=slots)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        (await client.post("/flush_cache")).raise_for_status()
        began = time.perf_counter()
        await asyncio.gather(*(episode(client, turns) for turns in episodes))
        return Played(time.perf_counter() - began, sum(made), sum(prompts), sum(cached))
