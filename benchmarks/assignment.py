"""How near the assignment of known lengths comes to its bound, how long planning takes, and what not knowing lengths costs.

    python benchmarks/assignment.py [--quick] [--policies]

Ratios are makespan over max(fractional bound, (t0 + t1) x longest sample), under t0 = 8 ms, t1 = 80 us, at most 128 samples an
instance: on each step of the two traces that come along, and on lognormals (median 4,000, cap 32,768) of sigma 0.8 to 1.2 and 128 to
16,384 samples, on 1 to 1,024 instances, with and without pauses. Other t1 and batches are reported apart. `--policies` adds the regret
of every policy: makespan over that of the assignment; what whoever can't tell samples apart is expected to have at least (`unknown`); and
how far each predictor tells lengths apart, each step predicted from those before it: the share of the pinball loss that it saves. All
numbers but `plan_s` (wall seconds, one core) are the same on every machine.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator

from m2flow.rollout_scheduling.decode_model import DecodeModel, assign
from m2flow.rollout_scheduling.lengths import TRACES, Lengths, parse_lengths
from m2flow.rollout_scheduling.policies import POLICIES, PREDICTORS, make_policy, make_predictor
from m2flow.rollout_scheduling.predictors import Oracle
from m2flow.rollout_scheduling.study import StudyStep, skill_of, steps_of, study_known, study_policy, total

INSTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
SIGMAS = (0.8, 1.0, 1.2)
GROUPS = (16, 64, 128, 512, 1024, 2048)
OTHER_MODELS = (
    DecodeModel(0.008, 0.0008, 128),
    DecodeModel(0.008, 0.00008, 16),
    DecodeModel(0.008, 0.00008, 512),
    DecodeModel(0.002, 0.0001, 64),
)


def lognormal(sigma: float, icc: float = 0.0) -> Lengths:
    return parse_lengths(f"lognormal:median=4000,sigma={sigma},cap=32768,icc={icc}")


def cases(*, quick: bool) -> Iterator[tuple[str, list[StudyStep]]]:
    for path in sorted(TRACES.glob("*.jsonl")):
        yield path.stem, list(steps_of(parse_lengths(path.stem), None, num_groups=0, n=0, seed=0))
    for sigma in SIGMAS:
        for num_groups in GROUPS[: 3 if quick else None]:
            drawn = list(steps_of(lognormal(sigma), 1 if num_groups > 512 else 3, num_groups=num_groups, n=8, seed=0))
            yield f"lognormal sigma={sigma} x{8 * num_groups}", drawn


def ratios(model: DecodeModel, instances: tuple[int, ...], *, quick: bool) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, steps in cases(quick=quick):
        for num_instances in instances:
            plans, whole, spent = [], [], []
            for given in steps:
                began_s = time.perf_counter()
                plans.append(assign(given.samples.responses, model, num_instances))
                spent.append(time.perf_counter() - began_s)
                whole.append(assign(given.samples.responses, model, num_instances, may_pause=False).ratio if plans[-1].num_pauses else 0.0)
            worst = max(plan.ratio for plan in plans)
            found[f"{name} on {num_instances}"] = {
                "worst_ratio": round(worst, 5),
                "total_ratio": round(sum(plan.makespan_s for plan in plans) / sum(plan.bound_s for plan in plans), 5),
                "worst_ratio_of_whole_samples": round(
                    max(worst if not plan.num_pauses else alone for plan, alone in zip(plans, whole, strict=True)), 5
                ),
                "pauses": sum(plan.num_pauses for plan in plans),
                "samples": sum(len(given.samples) for given in steps),
                "plan_s": round(statistics.median(spent), 4),
            }
    return found


PREDICTED = ("longest-first", "split", "auto")


def studied(*, quick: bool) -> list[tuple[str, Lengths, list[StudyStep]]]:
    """Name, lengths and steps of each setting with unknown lengths."""
    given: list[tuple[str, Lengths, list[StudyStep]]] = []
    for path in sorted(TRACES.glob("*.jsonl")):
        lengths = parse_lengths(path.stem)
        given.append((path.stem, lengths, list(steps_of(lengths, None, num_groups=0, n=0, seed=0))))
    for sigma in SIGMAS[:: 2 if quick else 1]:
        for icc, num_earlier, levels in ((0.0, 0, 0), (0.5, 0, 0), (0.5, 0, 5), (0.5, 8, 0), (0.9, 0, 0), (0.9, 0, 5), (0.9, 8, 0)):
            name = f"lognormal sigma={sigma} icc={icc} x1024" + (f", {num_earlier} earlier answers" if num_earlier else "")
            name += f", {levels} levels of difficulty" if levels else ""
            lengths = lognormal(sigma, icc)
            given.append(
                (name, lengths, list(steps_of(lengths, 4, num_groups=128, n=8, seed=0, num_earlier=num_earlier, num_levels=levels)))
            )
    return given


def skills(*, quick: bool) -> dict[str, dict[str, float]]:
    """Setting -> predictor -> the share of the pinball loss that it saves, on steps that it has not seen."""
    found: dict[str, dict[str, float]] = {}
    for name, lengths, steps in studied(quick=quick):
        made = {predictor: make_predictor(predictor) for predictor in PREDICTORS if predictor != "oracle"}
        found[name] = {predictor: round(skill_of(one, steps, cap=lengths.cap).gain, 4) for predictor, one in made.items()}
        print(f"{name}: " + ", ".join(f"{predictor} {gain:+.1%}" for predictor, gain in found[name].items()), flush=True)
    return found


def regrets(*, quick: bool) -> dict[str, dict[str, float]]:
    """Setting -> policy -> regret, with the predictor `siblings`; with `learned` and with an oracle too for those that predict."""
    found: dict[str, dict[str, float]] = {}
    for name, lengths, steps in studied(quick=quick):
        for num_instances in (4, 16):
            known = study_known(steps, DecodeModel(), num_instances)
            row = found[f"{name} on {num_instances}"] = {"unknown": round(total(known).unknown_s / total(known).known_s, 4)}
            others = [
                (policy, predictor)
                for predictor in ("learned", "oracle")
                for policy in PREDICTED
                if (policy, predictor) != ("auto", "oracle")
            ]
            for policy, predictor in [*((policy, "siblings") for policy in POLICIES), *others]:
                made = make_predictor(predictor)
                oracle = made if isinstance(made, Oracle) else None
                scheduler = make_policy(policy, made)
                results = study_policy(scheduler, steps, known, DecodeModel(), num_instances=num_instances, cap=lengths.cap, oracle=oracle)
                row[policy + (f" ({predictor})" if predictor != "siblings" else "")] = round(total(results).regret, 4)
            print(f"{name} on {num_instances}: " + ", ".join(f"{policy} {regret:.3f}" for policy, regret in row.items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller lognormals")
    parser.add_argument("--policies", action="store_true", help="also the regret of every policy")
    options = parser.parse_args()

    by_default = ratios(DecodeModel(), INSTANCES, quick=options.quick)
    for name, row in by_default.items():
        if row["worst_ratio_of_whole_samples"] > 1.005 or row["plan_s"] > 0.3:
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    worst = max(row["worst_ratio"] for row in by_default.values())
    print(f"worst ratio of {len(by_default)} settings at the default model: {worst}", flush=True)

    others = {}
    for model in OTHER_MODELS:
        name = f"t0={model.t0_s:g} t1={model.t1_s:g} B={model.max_batch}"
        rows = ratios(model, (1, 4, 16, 64), quick=True)
        where = max(rows, key=lambda setting, rows=rows: rows[setting]["worst_ratio"])
        others[name] = {"worst_ratio": rows[where]["worst_ratio"], "where": where}
        print(f"{name}: worst ratio {rows[where]['worst_ratio']} for {where}", flush=True)
    document = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "worst_ratio": worst,
        "ratios": by_default,
        "other_models": others,
        **({"regrets": regrets(quick=options.quick), "skills": skills(quick=options.quick)} if options.policies else {}),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
