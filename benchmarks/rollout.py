"""Tokens a second of the embedded rollout engine, against transformers' `generate` with a static cache, in turn in one run.

    python benchmarks/rollout.py [--threads 2] [--rounds 3] [--device cpu]

32 prompts of 34 tokens, 8 samples each, a Qwen2 of 1.06M parameters with random weights. Two workloads: all samples have 64
tokens; and lengths are skewed (geometric, mean 12, at most 64), where a static batch waits for its longest row and continuous batching
does not. Prints one JSON object; its ratios are generate's time over the engine's, from medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from m2flow.engines.contract import EngineSettings, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.hf_model import load_model, use_threads
from m2flow.recipe import Model, Sampling
from m2flow.samples import make_ids

NUM_PROMPTS, NUM_PER_PROMPT, PROMPT_LENGTH, MAX_NEW = 32, 8, 34, 64
VOCABULARY = 99
DIGITS = Path(__file__).parent.parent / "flows" / "models" / "digits"


def save_model(folder: str) -> Model:
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DIGITS / name, folder)
    return Model(folder, init="random")


def engine_seconds(engine: EmbeddedRollout, prompts: np.ndarray, lengths: np.ndarray) -> float:
    ids = make_ids(0, NUM_PROMPTS, NUM_PER_PROMPT)
    rows = [tuple(prompt.tolist()) for prompt in prompts]
    requests = [
        Request(int(i), rows[k // NUM_PER_PROMPT], k, Sampling(int(lengths[k]), min_new_tokens=int(lengths[k]))) for k, i in enumerate(ids)
    ]
    started = time.perf_counter()
    engine.add(requests)
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(sample.tokens) for sample in engine.step())
    if num_tokens != lengths.sum():
        raise SystemExit(f"the engine made {num_tokens} tokens of {lengths.sum()}")
    return time.perf_counter() - started


def generate_seconds(model: torch.nn.Module, prompts: np.ndarray, lengths: np.ndarray, device: str) -> float:
    """As a trainer calls it: one batch, as long as its longest row, with the scores that log-probabilities need left out."""
    tokens = torch.from_numpy(np.repeat(prompts, NUM_PER_PROMPT, 0)).to(device)
    longest = int(lengths.max())
    started = time.perf_counter()
    with torch.no_grad():
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest,
            cache_implementation="static", disable_compile=True, pad_token_id=0,
        )  # fmt: skip
    made.cpu()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    prompts = generator.integers(3, VOCABULARY, (NUM_PROMPTS, PROMPT_LENGTH))
    num_samples = NUM_PROMPTS * NUM_PER_PROMPT
    skewed = np.minimum(generator.geometric(1 / 12, num_samples), MAX_NEW)
    skewed[0] = MAX_NEW
    workloads = {"full_length": np.full(num_samples, MAX_NEW), "skewed": skewed}
    with tempfile.TemporaryDirectory() as folder:
        source = save_model(folder)
        use_threads(options.threads, deterministic=False)
        model = load_model(source, device=options.device, attention="sdpa")
        engine = EmbeddedRollout(source, EngineSettings(device=options.device, threads=options.threads, max_running=num_samples))
        engine.start()
    results = {}
    for name, lengths in workloads.items():
        ours, theirs = [], []
        for _ in range(options.rounds + 1):
            ours.append(engine_seconds(engine, prompts, lengths))
            theirs.append(generate_seconds(model, prompts, lengths, options.device))
        ours_s, theirs_s = statistics.median(ours[1:]), statistics.median(theirs[1:])
        results[name] = {
            "num_tokens": int(lengths.sum()),
            "engine_s": round(ours_s, 4),
            "engine_best_s": round(min(ours[1:]), 4),
            "engine_tokens_per_s": round(float(lengths.sum()) / ours_s),
            "generate_s": round(theirs_s, 4),
            "generate_best_s": round(min(theirs[1:]), 4),
            "generate_tokens_per_s": round(float(lengths.sum()) / theirs_s),
            "ratio": round(theirs_s / ours_s, 2),
        }
    hardware = {
        "cpu": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"hardware": hardware, "num_parameters": sum(p.numel() for p in model.parameters()), **results}, indent=2))


if __name__ == "__main__":
    main()
