"""How long a checkpoint holds up a trainer: written at once, and held in memory and written while training goes on.

    python benchmarks/checkpointing.py [--hidden 512] [--layers 8] [--saves 5] [--tokens 2048]

One process and a random Qwen2. A step is a micro-batch of so many tokens and AdamW. At once, a step is followed by `save` and the seal of
the run's part; behind, by `held_checkpoint`, whose writing overlaps the steps after it (`step_beside`). Seconds are medians; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import Qwen2Config

from m2flow.engines.contract import EngineSettings, Objective
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.micro.records.checkpoints import PartWriter, seal
from m2flow.recipe import AdamW, Loss, Model
from m2flow.samples import Batch, Ragged, SampleId

DIGITS = Path(__file__).parents[1] / "flows" / "models" / "digits"
NLL = Objective(Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",)))


def model_at(folder: Path, hidden: int, layers: int) -> Model:
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 8192}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "architectures": ["Qwen2ForCausalLM"]}
    Qwen2Config(**sizes, **heads).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DIGITS / name).read_bytes())
    return Model(str(folder), "random")


def batch_of(num_tokens: int, length: int = 128) -> Batch:
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 14, length).tolist() for _ in range(num_tokens // length)]
    mask = [[i >= length // 4 for i in range(length)] for _ in rows]
    ids = np.array([SampleId(0, i, 0).pack() for i in range(len(rows))], np.int64)
    return Batch(ids, {"tokens": Ragged.of(rows, np.int32), "loss_mask": Ragged.of(mask, np.bool_)})


class Times:
    """Seconds by name, of the clock and of this thread's processor, which other work on the machine does not lengthen."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def take(self, name: str, action: Callable[[], object]) -> None:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        action()
        self.found.setdefault(f"{name}_s", []).append(time.perf_counter() - start_s)
        self.found.setdefault(f"{name}_cpu_s", []).append(time.thread_time() - start_cpu_s)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 3) for name, values in self.found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 8), ("saves", 5), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), given.hidden, given.layers, given.saves, given.tokens)))


def measured(folder: Path, hidden: int, layers: int, num_saves: int, num_tokens: int) -> dict[str, float]:
    engine = EmbeddedTrain(model_at(folder, hidden, layers), EngineSettings())
    engine.start()
    batch, recipe, part = batch_of(num_tokens), AdamW(1e-4), folder / "part"

    def step() -> None:
        engine.accumulate(batch, NLL)
        engine.apply(recipe, float(num_tokens))

    def save() -> None:
        engine.save(str(part))
        seal(part)

    def hold() -> None:
        held = engine.held_checkpoint(str(part))
        assert held is not None

        def write() -> str:
            held.write()
            return ""

        writer.begin(0, "policy", str(part), write)

    step()
    writer, times = PartWriter(), Times()
    for _ in range(num_saves):
        times.take("step", step)
        times.take("save", save)
        times.take("hold", hold)
        while not (parts := writer.written()):
            times.take("step_beside", step)
        assert parts[0].error is None
    size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
    engine.stop()
    return {**times.medians(), "checkpoint_mib": round(size / 2**20), "saves": num_saves}


if __name__ == "__main__":
    main()
