"""Training throughput of the embedded trainer against a plain padded Hugging Face forward and backward, in one run.

    python benchmarks/training.py                      256 sequences of 34 + 64 tokens, 32 groups of 8
    python benchmarks/training.py --lengths skewed     responses geometric with mean 24, cut at 128

Both do one PPO update: forward, backward and an AdamW step on the same samples, model and threads, in turn, at
several micro-batch sizes, of which the best counts. Prints one JSON object; times are the best of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

from m2flow.engines.contract import EngineSettings, Objective
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.recipe import AdamW, Loss, Model
from m2flow.samples import Batch, Ragged, make_ids

PPO = Objective(Loss("ppo_clip", "m2flow.algorithms.losses:ppo_clip", ("logprobs", "behaviour_logprobs", "advantages")))


def make_samples(a: argparse.Namespace) -> Batch:
    rng = np.random.default_rng(0)
    tokens, masks = [], []
    for _ in range(a.prompts):
        prompt = rng.integers(2, a.vocab, a.prompt_tokens)
        for _ in range(a.group_size):
            length = a.max_new if a.lengths == "full" else min(int(rng.geometric(1 / 24)), a.max_new)
            tokens.append(np.concatenate([prompt, rng.integers(2, a.vocab, length)]))
            masks.append(np.arange(len(tokens[-1])) >= a.prompt_tokens)
    mask = Ragged.of(masks, bool)
    behaviour = np.where(mask.values, np.float32(-np.log(a.vocab)), np.float32(0))
    columns = {"tokens": Ragged.of(tokens, np.int32), "loss_mask": mask, "logprobs": Ragged(behaviour, mask.offsets)}
    ids = make_ids(0, a.prompts, a.group_size)
    return Batch(ids, {**columns, "advantages": rng.normal(size=len(ids)).astype(np.float32)})


def write_model(directory: str, a: argparse.Namespace) -> None:
    config = transformers.Qwen2Config(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=4 * a.hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    config.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(directory)


def micro_batches(batch: Batch, budget: int) -> list[Batch]:
    """Whole groups, up to `budget` tokens each."""
    lengths, parts, start = batch.ragged("tokens").lengths, [], 0
    bounds = batch.group_bounds()
    for i, (_, end) in enumerate(bounds):
        if i + 1 == len(bounds) or lengths[start : bounds[i + 1][1]].sum() > budget:
            parts.append(batch.take(np.arange(start, end)))
            start = end
    return parts


def plain_update(model: Any, optimizer: Any, batch: Batch, size: int, prompt_tokens: int, device: str) -> None:
    """Right-padded micro-batches of `size` samples, the loss written out."""
    lengths = batch.ragged("tokens").lengths
    for first in range(0, len(batch), size):
        rows = range(first, min(first + size, len(batch)))
        length = int(lengths[rows].max())

        def padded(name: str, dtype: torch.dtype, rows: range = rows, length: int = length) -> torch.Tensor:
            column = batch.ragged(name)
            out = torch.zeros(len(rows), length, dtype=dtype)
            for i, row in enumerate(rows):
                out[i, : lengths[row]] = torch.from_numpy(np.asarray(column.row(row)))
            return out.to(device)

        ids, mask = padded("tokens", torch.long), padded("loss_mask", torch.bool)
        attended = torch.arange(length)[None] < torch.from_numpy(lengths[rows])[:, None]
        kept = length - prompt_tokens + 1
        logits = model(input_ids=ids, attention_mask=attended.long().to(device), logits_to_keep=kept, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, prompt_tokens:, None])[..., 0]
        ratio = (logprobs - padded("logprobs", torch.float32)[:, prompt_tokens:]).exp()
        advantages = torch.from_numpy(np.asarray(batch.dense("advantages"))[list(rows)]).to(device)[:, None]
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (terms * mask[:, prompt_tokens:]).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def interleaved_s(functions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Seconds of each, the best of `repeats` rounds: all run in every round, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: round(min(measured[1:]), 4) for name, measured in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=["full", "skewed"], default="full")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=34)
    parser.add_argument("--max-new", type=int, default=None, help="64 if full, 128 if skewed")
    parser.add_argument("--vocab", type=int, default=99)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens in a micro-batch")
    parser.add_argument("--plain-sizes", type=int, nargs="+", default=[16, 32, 64], help="samples in a plain micro-batch")
    a = parser.parse_args()
    a.max_new = a.max_new or (64 if a.lengths == "full" else 128)
    batch = make_samples(a)
    recipe = AdamW(lr=1e-6)
    num_tokens = float(np.count_nonzero(batch.ragged("loss_mask").values))
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, a)
        engine = EmbeddedTrain(Model(directory, init="random"), EngineSettings(threads=a.threads, device=a.device))
        engine.start()
        plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory)).to(a.device).eval()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6)

        def packed_update(budget: int) -> None:
            for part in micro_batches(batch, budget):
                engine.accumulate(part, PPO)
            engine.apply(recipe, num_tokens)

        functions: dict[str, Callable[[], object]] = {
            f"plain {size}": functools.partial(plain_update, plain, optimizer, batch, size, a.prompt_tokens, a.device)
            for size in a.plain_sizes
        }
        functions |= {f"packed {budget}": functools.partial(packed_update, budget) for budget in a.budgets}
        seconds = interleaved_s(functions, a.repeats, a.device)
        plain_s = min(value for name, value in seconds.items() if name.startswith("plain"))
        packed_s = min(value for name, value in seconds.items() if name.startswith("packed"))
        num_parameters = sum(tensor.numel() for _, tensor in engine.weights())
        engine.stop()
    print(
        json.dumps(
            {
                "lengths": a.lengths,
                "num_sequences": len(batch),
                "num_loss_tokens": int(num_tokens),
                "num_parameters": num_parameters,
                "seconds": seconds,
                "ratio": round(plain_s / packed_s, 2),
                "loss_tokens_per_s": round(num_tokens / packed_s),
                "hardware": {
                    "device": a.device if a.device == "cpu" else torch.cuda.get_device_name(),
                    "machine": platform.machine(),
                    "capability": torch.backends.cpu.get_cpu_capability(),
                    "threads": a.threads,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
