"""Ray's side of `benchmarks/channels.py`: rollout samples to an actor, in its own interpreter if need be.

    python ray_calls.py SECONDS     prints one JSON object: samples a second, one sample a call and 64 samples a call

The actor looks at each array, as the receiver of a channel does. Calls are pipelined, up to 256 at a time, which is faster than waiting
for each; a sample is a dictionary of the arrays and texts that a parcel has as columns.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import ray

NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS = 256, 1024
_IN_FLIGHT = 256


@ray.remote(num_cpus=0)
class Receiver:
    """Where the samples go."""

    def take(self, columns: dict[str, object]) -> int:
        return sum(value.nbytes if isinstance(value, np.ndarray) else len(value) for value in columns.values())  # type: ignore[arg-type]


def columns_of(num_samples: int) -> dict[str, object]:
    """What `rollout_batch` of `benchmarks/channels.py` has."""
    rng = np.random.default_rng(0)
    num_tokens = NUM_PROMPT_TOKENS + NUM_RESPONSE_TOKENS
    mask = np.arange(num_tokens) >= NUM_PROMPT_TOKENS
    return {
        "tokens": np.tile(rng.integers(0, 49_152, num_tokens).astype(np.int32), num_samples),
        "loss_mask": np.tile(mask, num_samples),
        "logprobs": np.tile(np.where(mask, -rng.exponential(size=num_tokens), 0).astype(np.float32), num_samples),
        "versions": np.tile(np.where(mask, 3, -1).astype(np.int32), num_samples),
        "kv_stale": np.zeros(num_tokens * num_samples, bool),
        "segment_kinds": np.tile(np.array([0, 1], np.uint8), num_samples),
        "segment_lengths": np.tile(np.array([NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS], np.int32), num_samples),
        "seed": rng.integers(0, 1 << 63, num_samples, np.uint64),
        "finish": np.zeros(num_samples, np.uint8),
        "prompt": "p" * 4 * NUM_PROMPT_TOKENS * num_samples,
        "text": "t" * 4 * NUM_RESPONSE_TOKENS * num_samples,
    }


def samples_per_s(receiver: object, num_samples: int, seconds: float) -> float:
    """Of calls that each take so many samples."""
    columns = columns_of(num_samples)
    waiting = []
    num_done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        waiting.append(receiver.take.remote(columns))  # type: ignore[attr-defined]
        if len(waiting) >= _IN_FLIGHT:
            done, waiting = ray.wait(waiting, num_returns=_IN_FLIGHT // 2)
            ray.get(done)
            num_done += len(done)
    ray.get(waiting)
    num_done += len(waiting)
    return num_samples * num_done / (time.perf_counter() - start)


def main() -> None:
    seconds = float(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", object_store_memory=1 << 30)
    receiver = Receiver.remote()  # type: ignore[attr-defined]
    ray.get(receiver.take.remote(columns_of(1)))
    rates = {"one": [], "batch": []}  # type: dict[str, list[float]]
    for _ in range(3):
        rates["one"].append(samples_per_s(receiver, 1, seconds))
        rates["batch"].append(samples_per_s(receiver, 64, seconds))
    print(json.dumps({"ray": ray.__version__, **{name: sorted(found)[1] for name, found in rates.items()}, "best": max(rates["one"])}))
    ray.shutdown()


if __name__ == "__main__":
    main()
