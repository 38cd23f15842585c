"""Random small steps with random costs, for the search and its oracle."""

from __future__ import annotations

import random

import numpy as np
from cost_tables import Entry, TableCosts

from m2flow.micro.protocol.cost_terms import DecodeCost, EngineId, Footprint, FunctionCost, Layout, PassCost, Switch, TrainCost
from m2flow.planner.dynamic_program import Solver, Tables
from m2flow.planner.problem import Problem
from m2flow.planner.workload import CallLoad, Workload
from m2flow.spec import ClusterSpec, PoolSpec

SIZES = (1, 2, 3, 4, 6, 8, 12, 15, 16)


class DrawnLengths:
    """Lognormal lengths in groups, each a function of (seed, step)."""

    def __init__(self, seed: int, longest: int = 400) -> None:
        self._seed, self._longest = seed, longest

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> np.ndarray:
        rng = np.random.default_rng([self._seed, step])
        return np.clip(rng.lognormal(4, 1, (num_groups, n)).astype(np.int64), 1, self._longest)

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> np.ndarray:
        return np.full(num_groups, 20)


def random_problem(seed: int, *, num_calls: int, num_ways: int = 3, num_pools: int = 1, staleness: int = 0) -> Problem:
    """A step whose engines each have a few layouts, and memory for not all of them at once."""
    rng = random.Random(seed)
    num_prompts, n = rng.choice([(2, 2), (4, 1), (4, 2)])
    graph: list[CallLoad] = []
    policy, trainer = EngineId("policy", "rollout"), EngineId("policy", "train")
    others = [EngineId(name, "train") for name in ("critic", "reference", "judge")]
    for i in range(num_calls):
        before = [call.name for call in graph]
        after = tuple(name for name in before if rng.random() < 0.6)
        kind = rng.random()
        if i == 0 or kind < 0.15:
            work, engine = "generate", policy
        elif kind < 0.5:
            work, engine = "update", rng.choice([trainer, trainer, others[0]])
        else:
            work, engine = "forward", rng.choice([trainer, *others])
        unit = rng.choice(["sample", "group", "group", "batch"])
        graph.append(
            CallLoad(
                f"{engine}.{work}{i}", work, engine, num_prompts, n, unit, rng.random() < 0.3, after,  # type: ignore[arg-type]
                num_epochs=rng.choice([1, 2]) if work == "update" else 1,
                num_optimizer_steps=2 * (work == "update"), token_budget=300,
            )
        )  # fmt: skip
        if rng.random() < 0.3:
            feeds = tuple(call.name for call in graph if rng.random() < 0.5)
            graph.append(CallLoad(f"op{i}", "function", None, num_prompts, n, "sample", rng.random() < 0.2, feeds))
    workload = Workload("random", tuple(graph), staleness)
    pools = {f"pool{i}": PoolSpec(device="any", devices_per_node=rng.choice([4, 9, 16])) for i in range(num_pools)}
    entries = {(e, p): _entries(rng, e, p, pools[p].num_devices, num_ways) for e in workload.engines for p in pools}
    sizes = {layout for table in entries.values() for layout in table}
    syncs = {
        (role, a, b): (rng.uniform(0, 0.5), rng.uniform(0, 2)) for role in ("policy",) for a in sorted(sizes) for b in sorted(sizes)
    }  # fmt: skip
    functions = {c.name: FunctionCost((0.0, rng.uniform(0, 1)), 2) for c in graph if c.engine is None}
    slow = {"rollout": 1 + rng.random() * rng.choice([0, 1]), "train": 1 + rng.random() * rng.choice([0, 1])}
    memory = rng.choice([60, 100, 160, 1000])
    costs = TableCosts(
        dict.fromkeys(pools, memory), entries, functions=functions, syncs_s=syncs, host_bytes=rng.choice([0, 50, 1000]), slowdowns=slow
    )
    spec = ClusterSpec(pools=pools, may_offload=rng.random() < 0.8)
    return Problem(workload, DrawnLengths(seed), costs, spec)


def _entries(rng: random.Random, engine: EngineId, pool: str, num_devices: int, num_ways: int) -> dict[Layout, Entry]:
    table = {}
    for size in rng.sample([s for s in SIZES if s <= num_devices], k=min(num_ways, sum(s <= num_devices for s in SIZES))):
        tp = rng.choice([t for t in (1, 2, 3, 4) if size % t == 0])
        fast = 4.0 / size * rng.uniform(0.7, 1.3)
        cost: DecodeCost | TrainCost
        if engine.kind == "rollout":
            cost = DecodeCost(0.01 / tp, 0.001 / tp, 1e-4 / tp, rng.choice([1, 2, 8]))
        else:
            forward, update = (PassCost(rng.uniform(0, 0.05), k * 2e-3 * fast, 1e-6 * fast) for k in (1, 3))
            cost = TrainCost(forward, update, rng.uniform(0, 0.3))
        room = Footprint(
            weights=rng.randint(5, 120) // size + 3, kv=rng.randint(0, 20), activations=rng.randint(0, 20), host=rng.choice([0, 0, 9])
        )
        switch = Switch(rng.uniform(0, 0.4), rng.uniform(0, 0.4))
        table[Layout(tp=tp, dp=size // tp)] = Entry(cost, room, switch)
    return table


def problem_of(seed: int, num_calls: int) -> Problem:
    return random_problem(
        seed,
        num_calls=num_calls,
        num_ways=2 if num_calls > 3 else 3,
        num_pools=2 if seed % 5 == 0 else 1,
        staleness=seed % 3 if seed % 4 == 0 else 0,
    )


def solved(problem: Problem) -> Tables | None:
    """None where something fits nowhere."""
    return Solver(problem).solve() if all(problem.options.of.values()) else None


def best_s(problem: Problem) -> float:
    """Of all plans; with staleness also of those that generate the batches of several steps at once."""
    staleness = problem.workload.staleness
    each = [solved(one) for one in (problem, *([problem.at_once(staleness)] if staleness > 1 else []))]
    return min(float(tables.steps_s.min(initial=np.inf)) if tables else np.inf for tables in each)
