"""How far the cost model is from runs that others have published: predicted over measured, row by row and part by part.

    python benchmarks/calibration.py [--rows benchmarks/published_runs.yaml] [--costs mine.yaml] [--json]

    published_runs.yaml --> layouts, lengths --ModelledCosts--> seconds of each part / measured seconds

Layouts are those of the run, and no search takes part. A step is the sum of its parts (`async`: of the longer half), the weight sync with
the time in which a colocated server wakes up, and the rest of a step. Lengths are lognormal with the published mean; the longest sample
reaches the limit. `rankings` compares runs of the same step co-located and split: by which factor the latter is faster, as measured and as
predicted; of PPO, whose batch and lengths are not published, it searches both for a range of these. The last lines are the median of
|log(predicted / measured)| and the worst row of whole steps: of those that constants are fitted to, and of `validation`, to which none is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import yaml
from search import ppo

from m2flow.micro.protocol.cost_terms import EngineId, Layout, PassCost
from m2flow.planner.cost_model import ModelledCosts, decode_cost, most_running, sync_s, train_cost
from m2flow.planner.dynamic_program import SPLIT, TURNS
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.pools import Pool, pools_of, through_stages
from m2flow.planner.problem import Problem
from m2flow.planner.search import best_plan
from m2flow.planner.workload import BatchTimes, CallLoad, Draws, Extent, Workload, extents_of
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec, TrainSpec

ROWS = Path(__file__).with_name("published_runs.yaml")
_MOST_RUNNING = 256
_A_NODE = {"gb200": 64}
"""Devices that a run's links connect, other than 8."""
_NEMO_WAKES = ("generate", "forward", "update", "sync")


@dataclass(frozen=True)
class Reaching(Draws):
    """Lengths of which one reaches the cap."""

    inner: Draws
    cap: int

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> npt.NDArray[np.int64]:
        found = self.inner.draw(num_groups, n, seed, step=step).copy()
        found[0, 0] = self.cap
        return found

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> npt.NDArray[np.int64]:
        return self.inner.draw_prompts(num_groups, seed, step=step, n=n)


def pool_of(row: dict[str, Any], num_devices: int, costs: Path | None) -> Pool:
    most = _A_NODE.get(row["device"], 8)
    shape = {"nodes": max(1, num_devices // most), "devices_per_node": min(most, num_devices)}
    engines = {"rollout": RolloutSpec(engine="vllm"), "train": TrainSpec(engine="deepspeed")}
    spec = ClusterSpec(pools={"main": PoolSpec(device=row["device"], **shape)}, **engines)  # type: ignore[arg-type]
    from m2flow.planner import pools

    own = pools.read_overrides(costs) if costs else None
    (pool,) = pools_of(spec, own).values()
    attained = pools.attained_by("vllm", row.get("engine", "megatron"), own)
    device = pool.device
    if "memory_gb_s" in row:
        from dataclasses import replace

        device = replace(device, memory_gb_s=row["memory_gb_s"])
        pool = replace(pool, device=device)
    from dataclasses import replace as changed

    return changed(pool, attained=attained)


def pass_s(cost: PassCost, layout: Layout, tokens: float, squares: float, budget: int) -> float:
    """Seconds of a pass over samples with so many tokens, and squares of tokens, in all."""
    microbatches = max(layout.dp, tokens / budget)
    return microbatches * cost.fixed_s + tokens * cost.token_s + squares * cost.token2_s


def lengths_of(row: dict[str, Any]) -> Reaching:
    """The lognormal whose mean below the cap is the published one."""
    low, high = row["answer"] * 0.2, row["answer"] * 5.0
    for _ in range(40):
        median = math.sqrt(low * high)
        inner = lognormal(median=median, sigma=row["sigma"], cap=row["cap"] - row["prompt"], prompt_tokens=row["prompt"])
        mean = float(inner.draw(row["prompts"], row["n"], 0).mean())
        low, high = (median, high) if mean < row["answer"] else (low, median)
    return Reaching(inner, row["cap"] - row["prompt"])


def step_of(row: dict[str, Any], costs: Path | None) -> dict[str, float]:
    """Predicted seconds of the parts of a step."""
    shape, is_async = shape_named(row["model"]), bool(row.get("async"))
    pool = pool_of(row, row["gpus"], costs)
    layout = Layout(**row["layout"])
    own = row.get("rollout_gpus", row["gpus"] // 2) if is_async else row["gpus"]
    rollout = Layout(tp=row["tp"], dp=own // row["tp"])
    lengths = lengths_of(row)
    call = CallLoad("policy.generate", "generate", EngineId("policy", "rollout"), row["prompts"], row["n"], "sample", False, ())
    batch = BatchTimes(call, lengths)
    extent = Extent.of(batch.draws[0].responses.ravel(), prompt=row["prompt"], longest=row["cap"])
    limit = min(_MOST_RUNNING, -(-call.num_samples // rollout.dp))
    running = most_running(shape, rollout, extent, pool.memory_bytes, limit)
    ways = instances_of(decode_cost(shape, pool, rollout, extent, running), rollout)
    tokens, squares = call.num_samples * batch.mean_tokens, call.num_samples * batch.mean_square
    alone = train_cost(shape, pool, layout, microbatch_tokens=row["budget"], is_trained=True, recomputes=row.get("recomputes", False))
    cost = through_stages(*alone, layout, None)
    update = pass_s(cost.update, layout, tokens, squares, row["budget"]) + row["updates"] * cost.optimizer_s
    found = {
        "generate": float(batch.rollout_s(ways)[0]),
        "forward": row["passes"] * pass_s(cost.forward, layout, tokens, squares, row["budget"]),
        "update": update,
        "sync": sync_s(shape.weight_bytes, shape.num_matrices, (pool, layout), (pool, rollout), is_same_devices=not is_async)
        + (0 if is_async else pool.attained.rollout.wake_s.value),
    }
    trained = found["forward"] + found["update"]
    work = max(found["generate"], trained) if is_async else found["generate"] + trained
    return found | {"step": work + found["sync"] + pool.attained.train.rest_s.value}


def inferred(row: dict[str, Any], costs: Path | None) -> dict[str, Any]:
    """A row with the mean answer and the number of prompts with which generation and training take what was measured."""
    measured, found = row["measured"], dict(row)
    for _ in range(6):
        low, high = 20.0, row["cap"] * 0.95
        for _ in range(14):
            found["answer"] = math.sqrt(low * high)
            parts = step_of(found, costs)
            low, high = (found["answer"], high) if parts["generate"] < measured["generate"] else (low, found["answer"])
        trained = (measured["forward"] + measured["update"]) / (parts["forward"] + parts["update"])
        found["prompts"] = max(8, int(found["prompts"] * trained))
    return found


def ppo_ranking_of(row: dict[str, Any], costs: Path | None) -> dict[str, Any]:
    """Of PPO: the best plan in turns over the best split, both searched, for each number of samples and median of the answers."""
    found = []
    for num, median in itertools.product(row["samples"], row["medians"]):
        calls = (
            msgspec.structs.replace(call, num_optimizer_steps=row["updates"] * (call.work == "update"), max_new_tokens=most)
            for call in ppo(num, 1).calls
            for most in [row["cap"] * (call.work == "generate")]
        )
        workload, lengths = Workload("ppo", tuple(calls)), lognormal(median=median, sigma=row["sigma"], cap=row["cap"], prompt_tokens=300)
        pools = {"main": PoolSpec(device=row["device"], nodes=row["gpus"] // 8, devices_per_node=8)}
        train = TrainSpec(engine="deepspeed", token_budget=row["budget"])
        spec = ClusterSpec(pools=pools, rollout=RolloutSpec(engine="sglang"), train=train, costs=str(costs) if costs else None)
        shapes = dict.fromkeys((engine.role for engine in workload.engines), shape_named(row["model"]))
        modelled = ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, lengths))
        turns, split = (best_plan(Problem(workload, lengths, modelled, spec), (how,)).step_s for how in (TURNS, SPLIT))
        found.append(turns / split)
    return {"measured": row["ratio"], "predicted": [min(found), max(found)]}


def ranking_of(row: dict[str, Any], steps: dict[str, Any], costs: Path | None) -> dict[str, Any]:
    """Times of a step co-located over those split: measured, predicted, and predicted with the switching that the run itself had."""
    if "samples" in row:
        return ppo_ranking_of(row, costs)
    if "why" in row:
        return {"measured": row["ratio"], "why": row["why"]}
    if "colocated" in row:
        ours, theirs = steps[row["colocated"]], steps[row["split"]]
    else:
        ours = inferred(row, costs)
        theirs = {**ours, "async": 1, **row["split"]}
    turns_s, split_s = step_of(ours, costs)["step"], step_of(theirs, costs)["step"]
    found = {"measured": ours["measured"]["step"] / theirs["measured"]["step"], "predicted": turns_s / split_s}
    return {**found, "with_its_switching": (turns_s + row["switch"]) / split_s} if "switch" in row else found


def instances_of(cost: Any, layout: Layout) -> Any:
    from m2flow.planner.workload import Instances

    numbers = cost.step_s, cost.sample_s, cost.prefill_token_s, cost.max_running, layout.dp, 0.0, 0.0, 0.0
    return Instances(*(np.array([number], np.float64) for number in numbers))


def training_of(row: dict[str, Any], costs: Path | None) -> float:
    """Predicted seconds over measured ones of training alone."""
    shape, layout = shape_named(row["model"]), Layout(**row["layout"])
    pool = pool_of(row, layout.num_devices, costs)
    alone = train_cost(shape, pool, layout, microbatch_tokens=row["budget"], is_trained=True, recomputes=row.get("recomputes", False))
    cost = through_stages(*alone, layout, None)
    num = layout.dp * 64
    tokens = num * row["tokens"]
    seconds = pass_s(cost.update, layout, tokens, tokens * row["tokens"], row["budget"]) + 4 * cost.optimizer_s
    flops = 3 * (shape.token_flops * tokens + shape.attention_flops * tokens * row["tokens"])
    return seconds / (flops / (row["mfu"] * layout.num_devices * pool.device.flops(2)))


def decoding_of(row: dict[str, Any], costs: Path | None) -> float:
    shape, layout = shape_named(row["model"]), Layout(tp=row["tp"])
    cost = decode_cost(shape, pool_of(row, max(1, row["tp"]), costs), layout, Extent(500, 500, 250, 1000), 1)
    return cost.seconds(1) / float(row["seconds"])


def sync_of(row: dict[str, Any], costs: Path | None) -> float:
    shape, pool = shape_named(row["model"]), pool_of(row, row["gpus"], costs)
    ends = (pool, Layout(**row["layout"])), (pool, Layout(tp=row["tp"], dp=row["dp"]))
    seconds = sync_s(shape.weight_bytes, shape.num_matrices, *ends, is_same_devices=row["is_same_devices"])
    return (seconds + row["is_same_devices"] * pool.attained.rollout.wake_s.value) / float(row["seconds"])


def steps_compared(rows: dict[str, Any], costs: Path | None = None) -> dict[str, dict[str, float]]:
    """Predicted over measured of whole steps: row -> part -> ratio."""
    found = {}
    for name, row in rows.items():
        predicted, measured = step_of(row, costs), row["measured"]
        found[name] = {part: predicted[part] / measured[part] for part in predicted if part in measured}
    return found


def compared(rows: dict[str, Any], costs: Path | None = None) -> dict[str, dict[str, float]]:
    """Predicted over measured: row -> part -> ratio."""
    found = steps_compared(rows["steps"], costs)
    for kind, of in (("training", training_of), ("decoding", decoding_of), ("syncs", sync_of)):
        found |= {name: {kind: of(row, costs)} for name, row in rows[kind].items()}
    return found


def summary(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    steps = {name: parts["step"] for name, parts in found.items() if "step" in parts}
    every = [ratio for parts in found.values() for part, ratio in parts.items() if part != "step"]
    worst = max(steps, key=lambda name: abs(math.log(steps[name])))

    def median(ratios: list[float]) -> float:
        return math.expm1(statistics.median(abs(math.log(ratio)) for ratio in ratios))

    of_parts = {"median_error_of_parts": median(every)} if every else {}
    return {"median_error_of_steps": median(list(steps.values())), "worst_step": worst, "worst_ratio": steps[worst]} | of_parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--costs", type=Path, help="a costs file of yours")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    rows = yaml.safe_load(arguments.rows.read_text())
    found, held_out = compared(rows, arguments.costs), steps_compared(rows.get("validation", {}), arguments.costs)
    of_held_out = {"validation": summary(held_out)} if held_out else {}
    ranked = {name: ranking_of(row, rows["steps"], arguments.costs) for name, row in rows.get("rankings", {}).items()}
    if arguments.json:
        print(json.dumps({"ratios": found | held_out, "rankings": ranked, **summary(found), **of_held_out}))
        return
    print("predicted / measured")
    for name, parts in (found | held_out).items():
        print(f"  {name:30} " + "  ".join(f"{part} {ratio:5.2f}" for part, ratio in parts.items()))
    print("co-located / split")
    for name, ranking in ranked.items():
        each = (
            f"{what} {ratio:.2f}"
            if isinstance(ratio, float)
            else f"{what} " + (" to " if len(ratio) == 2 else ", ").join(f"{one:.2f}" for one in ratio)
            for what, ratio in ranking.items()
            if what != "why"
        )
        print(f"  {name:40} " + "  ".join(each) + (f"  not predicted: {ranking['why']}" if "why" in ranking else ""))
    for name, why in rows.get("left_out", {}).items():
        print(f"  {name:18} left out: {why}")
    print(msgspec.json.encode(summary(found) | of_held_out).decode())


if __name__ == "__main__":
    main()
