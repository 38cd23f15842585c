"""How long the search takes, from 8 to 16,384 devices, and how far its plans are from the bound and from the best of all plans.

    python benchmarks/search.py [--devices 8 64 1024 16384] [--steps ppo debate] [--repeat 3] [--plot search.png]

The step `ppo` has six calls: generate, a reward, a reference's log-probabilities, a critic's values, and two updates, of a 7B model each.
`debate` has twelve: a solver and a verifier that are both trained, a judge that generates, a reward model, a critic, references. Costs are
modelled (H100, SGLang, DeepSpeed); working them out is part of `search_s`, which is the fastest of a few searches on one core. `known`
has steps of two to four calls with a few written layouts, for which every plan is tried (tests/support/every_plan.py): the ratio of
what the
search predicts to the best of all. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.problem import Problem
from m2flow.planner.search import best_plan
from m2flow.planner.workload import CallLoad, Workload, extents_of
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec, TrainSpec

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


def ppo(num_prompts: int = 512, n: int = 8) -> Workload:
    def load(name: str, work: str, engine: EngineId | None, unit: str, *after: str, **more: int) -> CallLoad:
        return CallLoad(name, work, engine, num_prompts, n, unit, False, after, token_budget=16_384, **more)  # type: ignore[arg-type]

    before = ("policy.generate", "rule.score", "reference.logprobs", "critic.values")
    return Workload(
        "ppo",
        (
            load("policy.generate", "generate", EngineId("policy", "rollout"), "sample", max_new_tokens=16_384),
            load("rule.score", "function", None, "sample", "policy.generate"),
            load("reference.logprobs", "forward", EngineId("reference", "train"), "sample", "policy.generate"),
            load("critic.values", "forward", EngineId("critic", "train"), "sample", "policy.generate"),
            load("policy.update", "update", EngineId("policy", "train"), "group", *before, num_optimizer_steps=4),
            load("critic.update", "update", EngineId("critic", "train"), "group", *before, num_optimizer_steps=4),
        ),
    )


def debate(num_prompts: int = 512, n: int = 8) -> Workload:
    def load(role: str, method: str, work: str, *after: str, **more: int) -> CallLoad:
        engine = None if work == "function" else EngineId(role, "rollout" if work == "generate" else "train")
        unit = "group" if work == "update" else "sample"
        steps = 4 if work == "update" else 0
        return CallLoad(
            f"{role}.{method}", work, engine, num_prompts, n, unit, False, after,  # type: ignore[arg-type]
            num_optimizer_steps=steps, token_budget=16_384, **more,
        )  # fmt: skip

    answer, check, scores = "solver.generate", "verifier.generate", ("rule.score", "reward.score")
    return Workload(
        "debate",
        (
            load("solver", "generate", "generate", max_new_tokens=16_384),
            load("verifier", "generate", "generate", answer, max_new_tokens=4096),
            load("judge", "generate", "generate", check, max_new_tokens=1024),
            load("rule", "score", "function", "judge.generate"),
            load("reward", "score", "forward", answer),
            load("solver", "logprobs", "forward", answer),
            load("reference", "logprobs", "forward", answer),
            load("other", "logprobs", "forward", check),
            load("critic", "values", "forward", answer),
            load("solver", "update", "update", answer, *scores, "solver.logprobs", "reference.logprobs", "critic.values"),
            load("verifier", "update", "update", check, *scores, "other.logprobs"),
            load("critic", "update", "update", answer, *scores, "critic.values"),
        ),
    )


STEPS = {"ppo": ppo, "debate": debate}


def problem(num_devices: int, step: str = "ppo") -> Problem:
    """A fresh one: nothing is known of any layout."""
    pools = {"main": PoolSpec(device="h100", nodes=max(1, num_devices // 8), devices_per_node=min(8, num_devices))}
    spec = ClusterSpec(
        name="h100", pools=pools, rollout=RolloutSpec(engine="sglang"), train=TrainSpec(engine="deepspeed", token_budget=16_384)
    )
    lengths = lognormal(median=3000, sigma=0.9, cap=16_384, prompt_tokens=300)
    workload = STEPS[step]()
    shapes = dict.fromkeys((engine.role for engine in workload.engines), shape_named("Qwen2.5-7B"))
    return Problem(workload, lengths, ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, lengths)), spec)


def measured(step: str, num_devices: int, repeat: int) -> dict[str, object]:
    walls, cpus = [], []
    for _ in range(repeat):
        asked = problem(num_devices, step)
        wall, cpu = time.perf_counter(), time.process_time()
        found = best_plan(asked)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    bound_s = max(bound.seconds for bound in found.bounds)
    return {
        "step": step,
        "devices": num_devices,
        "search_s": min(walls),
        "cpu_s": min(cpus),
        "mode": found.mode,
        "predicted_step_s": found.step_s,
        "over_bound": found.step_s / bound_s,
        "is_exact": found.is_exact,
    }


def known(num_seeds: int) -> dict[str, object]:
    """Against every plan of small steps."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    from every_plan import Oracle
    from random_steps import random_problem

    ratios, exact = [], 0
    for seed in range(num_seeds):
        step = random_problem(seed, num_calls=2 + seed % 3, num_ways=2)
        best_s = Oracle(step).best_s() if all(step.options.of.values()) else float("inf")
        if best_s < float("inf"):
            found = best_plan(step)
            ratios.append(found.step_s / best_s)
            exact += found.is_exact
    return {"steps": len(ratios), "worst_ratio": max(ratios, default=1.0), "called_exact": exact}


def draw(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        axes.loglog([row["devices"] for row in mine], [row["search_s"] for row in mine], "o-", label=f"{step}: search")
        axes.loglog([row["devices"] for row in mine], [row["cpu_s"] for row in mine], "x--", label=f"{step}: of the processor")
    axes.set(xlabel="devices", ylabel="seconds", title="PPO of six calls, a debate of twelve, H100")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=tuple(STEPS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--known", type=int, default=30, help="small steps to try every plan of")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    best_plan(problem(8))  # What is imported late is not the search's.
    rows = [measured(step, num_devices, arguments.repeat) for step in arguments.steps for num_devices in arguments.devices]
    for row in rows:
        print(
            f"{row['step']:6} {row['devices']:6} devices  {row['search_s']:7.3f} s, {row['cpu_s']:7.3f} s of the processor  "
            f"{row['mode']:12} step {row['predicted_step_s']:8.1f} s, "
            f"{row['over_bound']:.2f} of the bound"
        )
    if arguments.plot:
        draw(rows, arguments.plot)
    print(json.dumps({"runs": rows, "known": known(arguments.known)}))


if __name__ == "__main__":
    main()
