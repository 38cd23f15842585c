"""A profile with round constants, and a run whose times it made: what fits must find the constants again."""

from __future__ import annotations

import random
from pathlib import Path

from m2flow.micro.protocol.plan import EngineSlot, Plan, WeightSyncPlan, WorkerPlan
from m2flow.micro.records.ledger import Ledger
from m2flow.observe.spans import Recorder
from m2flow.observe.store import TraceStore
from m2flow.planner.profiles import (
    Machine,
    MeasuredDecode,
    MeasuredEngine,
    MeasuredPass,
    MeasuredSync,
    Profile,
    Quality,
)
from m2flow.samples import Finish, SampleId

FITTED = Quality(100, 0.99, 0.02)
DECODE = MeasuredDecode(0.002, 5e-5, 1e-7, 2e-5, 1e-4, 4e-5, 8e-4, 128, 50.0, FITTED)
UPDATE = MeasuredPass(0.01, -1e-5, 1e-4, 2e-8, 60.0, FITTED)
PROFILE = Profile(
    flow="grpo",
    made="2026-01-02T03:04:05+00:00",
    machine=Machine.here("cpu"),
    models={"policy": "small (lm, float32)"},
    engines=(
        MeasuredEngine("policy", "rollout", "embedded", "cpu", 2, decode=DECODE, come_s=0.001),
        MeasuredEngine("policy", "train", "embedded", "cpu", 2, update=UPDATE, optimizer_s=0.002, slowdown={"rollout": 1.25}),
    ),
    functions=(),
    syncs=(MeasuredSync("policy", "same process", 4_000_000, 0.0, 0.006, 8),),
    hop_s=0.0015,
    byte_s=1e-9,
    turn_s=0.003,
    gather_s=0.02,
    startup_s=3.0,
    prompts=(8, 8),
    responses=((5, 6), (4, 7)),
    icc=0.0,
)
BETWEEN_S = 5e-5
"""From a decode step's end to the next one's start; a step's fixed cost has it."""
PLAN = Plan(
    flow="grpo",
    cluster="laptop",
    mode="time-shared",
    structure="",
    workers=(
        WorkerPlan("device-0", "cpu", 2, (EngineSlot("policy", "rollout", "embedded"), EngineSlot("policy", "train", "embedded")), "lease"),
        WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),)),
    ),
    stages=(),
    routes=(),
    syncs=(WeightSyncPlan("policy", "device-0", "device-0", "same process"),),
    switches=(),
    arithmetic=(),
)


def write_run(folder: Path, *, num_steps: int = 6, seed: int = 0) -> None:
    """A time-shared run that took exactly as long as DECODE and UPDATE say. Its step 0 was ten times as slow."""
    rng = random.Random(seed)
    worker, functions = Recorder("device-0"), Recorder("functions-0")
    functions.anchor_ns = worker.anchor_ns
    (folder / "trace").mkdir(parents=True)
    ledger = Ledger(folder / "ledger.db")
    ledger.open()
    now = 10**9

    def ns(seconds: float, step: int) -> int:
        return round(seconds * 1e9) * (10 if step == 0 else 1)

    for step in range(num_steps):
        call = 3 * step
        groups = [rng.randint(4, 12) for _ in range(rng.choice([2, 4, 8]))]
        tokens = {SampleId(call, p, i).pack(): (groups[p], rng.randint(1, 30)) for p in range(len(groups)) for i in range(4)}
        for packed, (num_prompt, num_generated) in tokens.items():
            ledger.samples_done(step, [packed], [num_prompt + num_generated], [num_generated], [Finish.STOP], ("x", 0, 0, 0))
        longest = max(num for _, num in tokens.values())
        begin = now
        for turn in range(longest):
            running = [packed for packed, (_, num) in tokens.items() if num > turn]
            if turn == 0:
                took = DECODE.step_s + (DECODE.sample_s + DECODE.enter_s) * len(running) + DECODE.prefill_token_s * sum(groups)
            else:
                context = sum(tokens[packed][0] + turn for packed in running)
                took = DECODE.step_s + DECODE.sample_s * len(running) + DECODE.context_s * context
            end = now + ns(took - BETWEEN_S, step)
            worker.add("rollout.step", now, end, num_samples=len(running), label="policy")
            left = [packed for packed in running if tokens[packed][1] == turn + 1]
            for packed in left:
                worker.add("sample", begin, end, call=call, sample=packed, num_tokens=turn + 1)
            now = end + ns(BETWEEN_S, step)
            if left:
                start, now = now, now + ns(DECODE.handover_s + DECODE.leave_s * len(left), step)
                worker.add("send", start, now, call=call, num_samples=len(left), num_bytes=1000 * len(left), label="functions-0")
        now += ns(PROFILE.hop_s, step)
        functions.add("function.call", now, now + 10**6, label="good.score", step=step, num_samples=len(tokens), unit_us=[100.0] * 9)
        now += 10**6 + ns(PROFILE.hop_s, step)
        worker.add("switch", now, now + ns(0.001, step), label="to train")
        now += ns(0.001, step)
        for ids in (list(tokens)[: len(tokens) // 2], list(tokens)[len(tokens) // 2 :]):
            lengths = [sum(tokens[packed]) for packed in ids]
            shared = sum(groups[SampleId.unpack(packed).prompt] for packed in ids) * 3 // 4
            took = UPDATE.fixed_s + UPDATE.token_s * (sum(lengths) - shared) + UPDATE.token2_s * sum(s * s for s in lengths)
            worker.add("train.accumulate", now, now + ns(took, step), call=call + 2, step=step, label="policy.update", samples=ids,
                       num_samples=len(ids), num_tokens=sum(lengths))  # fmt: skip
            now += ns(took, step)
        worker.add("train.apply", now, now + ns(0.002, step), call=call + 2, step=step, label="policy.update")
        now += ns(0.002, step) + ns(PROFILE.hop_s + PROFILE.turn_s, step)
        worker.add("weights.load", now, now + ns(0.006, step), label="policy", num_bytes=4_000_000)
        now += ns(0.006, step)
    ledger.close()
    with TraceStore(folder) as store:
        store.append(worker.drain())
        store.append(functions.drain())
