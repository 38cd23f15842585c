"""A run's directory with a trace of a million spans and a hundred thousand samples, written in seconds."""

from __future__ import annotations

from pathlib import Path

from m2flow.observe.spans import SpanBlock
from m2flow.observe.store import TraceStore
from m2flow.samples import SampleId

US = 1_000
GENERATE = {"flow_line": "flows/grpo.py:31", "label": "policy.generate"}
UPDATE = {"flow_line": "flows/grpo.py:33", "label": "policy.update"}


def make_large(run_dir: Path, *, num_spans: int = 1_000_000, num_samples: int = 100_000, num_steps: int = 50, num_workers: int = 8) -> Path:
    """Rollout workers decode in small steps, with a gap after every hundredth; a trainer works at each step's end."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text('{"flow": "flows/grpo.py", "options": {}}')
    decodes = (num_spans - num_samples) // (num_steps * num_workers)
    lives = num_samples // (num_steps * num_workers)
    width = decodes * 1000 * US
    with TraceStore(run_dir) as store:
        for step in range(num_steps):
            begin = 10**15 + step * (width + width // 4)
            about = {**GENERATE, "call": 2 * step, "step": step, "version": step}
            for worker in range(num_workers):
                spans = [
                    ("rollout.step", begin + i * 1000 * US, begin + i * 1000 * US + (400 if i % 100 else 900) * US, about)
                    for i in range(decodes)
                ]
                for i in range(lives):
                    at = begin + (i % 64) * 500 * US + i // 64 * (width * 64 // lives)
                    end = min(at + width * 50 // lives, begin + width)
                    sample = SampleId(2 * step, worker * lives + i, 0).pack()
                    spans.append(("sample", min(at, end), end, {**about, "sample": sample, "num_tokens": 40 + i % 300}))
                store.append(SpanBlock(f"rollout-{worker}/rollout", 0, spans, []))
            done = begin + width
            train = [
                (
                    "train.accumulate",
                    done + i * width // 64,
                    done + (i + 1) * width // 64 - 300 * US,
                    {**UPDATE, "call": 2 * step + 1, "step": step},
                )
                for i in range(12)
            ]
            train.append(("weights.publish", done + width // 5, done + width // 5 + 9000 * US, {"version": step + 1, "label": "policy"}))
            store.append(SpanBlock("trainer-0/train", 0, train, []))
    return run_dir
