"""A run's trace as workers would record it, with made-up times: what the tests of `m2flow.observe` look at."""

from __future__ import annotations

import random
from pathlib import Path

from m2flow.observe.spans import Recorder, SpanBlock
from m2flow.observe.store import TraceStore
from m2flow.samples import Finish, SampleId

MS = 1_000_000
LINES = {0: "flows/grpo.py:31", 1: "flows/grpo.py:32", 2: "flows/grpo.py:33"}
LABELS = {0: "policy.generate", 1: "verifier.score", 2: "policy.update"}


def record_run(
    *, num_steps: int = 3, num_rollouts: int = 2, num_prompts: int = 4, n: int = 4, start_ns: int = 10**12, seed: int = 0
) -> list[SpanBlock]:
    """Blocks of a split run: rollout workers generate with skewed lengths, a function worker scores groups as they finish, a
    trainer accumulates scored groups, and publishes the weights at the end of each step."""
    dice = random.Random(seed)
    rollouts = [Recorder(f"rollout-{i}/rollout") for i in range(num_rollouts)]
    reward, trainer = Recorder("reward-0"), Recorder("trainer-0")
    now = start_ns
    for step in range(num_steps):
        generate, score, update = ({"step": step, "call": 3 * step + i, "flow_line": LINES[i], "label": LABELS[i]} for i in range(3))
        groups: list[tuple[int, range]] = []
        for prompt in range(num_prompts):
            recorder = rollouts[prompt % num_rollouts]
            first = SampleId(3 * step, prompt, 0).pack()
            lengths = [min(64, 6 + int(dice.expovariate(0.06))) for _ in range(n)]
            for index, length in enumerate(lengths):
                recorder.add(
                    "sample", now + 2 * MS, now + (2 + length) * MS, **generate, sample=SampleId(0, prompt, index).__str__(),
                    length=length, version=step, finish=Finish.LENGTH if length == 64 else Finish.STOP,
                )  # fmt: skip
            groups.append((now + (2 + max(lengths)) * MS, range(first, first + n)))
        for i, recorder in enumerate(rollouts):
            mine = [end for position, (end, _) in enumerate(groups) if position % num_rollouts == i]
            last = max(mine, default=now)
            recorder.add("rollout.prefill", now, now + 2 * MS, **generate, num_samples=len(mine) * n, version=step)
            for at in range(now + 2 * MS, last, 4 * MS):
                recorder.add("rollout.step", at, min(at + 4 * MS, last), **generate, num_tokens=4 * n, version=step)
                recorder.count("running", sum(end > at for end in mine) * n, at)
        scored = trained = now
        for end, samples in sorted(groups, key=lambda group: group[0]):
            began, scored = max(end, scored), max(end, scored) + 3 * MS
            reward.add("function.call", began, scored, **score, samples=samples, num_samples=n)
            trainer.add("wait", trained, max(trained, scored), **update)
            began, trained = max(trained, scored), max(trained, scored) + 9 * MS
            trainer.add("train.accumulate", began, trained, **update, samples=list(samples), num_tokens=40 * n)
        trainer.add("train.apply", trained, trained + 4 * MS, **update)
        trainer.add("weights.publish", trained + 4 * MS, trained + 6 * MS, version=step + 1, step=step, label="policy")
        for recorder in rollouts:
            recorder.add("weights.load", trained + 6 * MS, trained + 8 * MS, version=step + 1, step=step, label="policy")
        now = trained + 8 * MS
    recorders = (*rollouts, reward, trainer)
    for recorder in recorders:
        recorder.anchor_ns = reward.anchor_ns  # As if nothing had come between two looks at the clock.
    return [recorder.drain() for recorder in recorders]


def store_run(run_dir: Path, blocks: list[SpanBlock]) -> Path:
    with TraceStore(run_dir) as store:
        for block in blocks:
            store.append(block)
    return run_dir
