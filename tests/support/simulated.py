"""Simulated runs for tests: a small GRPO flow, plain costs, lengths given group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from cost_tables import PlainCosts

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.macro.flow import Flow
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.cost_terms import Costs, DecodeCost
from m2flow.micro.protocol.plan import Plan
from m2flow.rollout_scheduling.lengths import Correlation, IntArray, Lengths
from m2flow.simulator.machines import Machine, machines_of
from m2flow.simulator.simulation import Failure, History, follow_program
from m2flow.simulator.simulation_report import Report, RunTotals, report_of, simulate, totals_of
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec


def zero(sample: Sample) -> float:
    return 0.0


@flow
def plain(num_steps: int = 1, batch: int = 2, n: int = 2) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=5)
        rewards = reward.score(responses)
        policy.update(responses, advantages=rewards)


@flow(staleness="lag")
def stale(num_steps: int = 3, batch: int = 2, n: int = 2, lag: int = 1, max_new_tokens: int = 5) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        policy.update(responses, advantages=reward.score(responses))


@flow
def evaluated(num_steps: int = 1, batch: int = 2, n: int = 2) -> None:
    """Each step begins with an evaluation."""
    policy, reward = Policy("fake"), Reward(zero)
    prompts, heldout = Dataset([{"prompt": "a"}] * batch), Dataset([{"prompt": "b"}] * 7, name="heldout")
    for _ in steps(num_steps):
        log(accuracy=reward.score(policy.generate(heldout.all(), max_new_tokens=5)).mean())
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=5)
        policy.update(responses, advantages=reward.score(responses))


@dataclass
class Given(Lengths):
    """These lengths in each step; the first groups and members of them."""

    groups: Sequence[Sequence[int]]
    prompt: int = 0
    name: str = "given"
    cap: int | None = None

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        return np.array([[group[i % len(group)] for i in range(n)] for group in (list(self.groups) * num_groups)[:num_groups]], np.int64)

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        return np.full(num_groups, self.prompt, np.int64)

    def cut_at(self, tokens: int) -> Given:
        return Given([[min(length, tokens) for length in group] for group in self.groups], self.prompt, self.name, tokens)

    def mean(self) -> float:
        return float(np.mean(self.groups))

    def survival(self, tokens: float) -> float:
        return 0.0

    def beyond(self, tokens: float) -> float:
        return tokens

    def quantile(self, q: float) -> float:
        return 0.0

    def correlation(self) -> Correlation:
        return Correlation(0.0, 0.0, 0.0, 0)


def cluster(
    placement: str = "split",
    *,
    instances: int = 1,
    max_running: int = 1000,
    token_budget: int = 1 << 30,
    functions: int = 1,
    chunk: int = 64,
) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,
        device="cpu",
        cores=1,
        rollout=RolloutSpec(engine="fake", workers=instances, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=token_budget),
        functions=FunctionSpec(workers=functions, chunk=chunk),
    )


@dataclass
class Ran:
    """A simulated run, and what is said of it."""

    history: History
    machines: Mapping[str, Machine]
    report: Report
    totals: RunTotals
    plan: Plan

    @property
    def makespans(self) -> list[float]:
        return [round(step.makespan_s, 6) for step in self.report.steps]


def ran(
    of: Flow,
    costs: Costs,
    lengths: Lengths,
    spec: ClusterSpec,
    *,
    options: Mapping[str, object] | None = None,
    num_steps: int = 1,
    seed: int = 0,
    placed: Callable[[Plan], Plan] = lambda plan: plan,
    kept: Mapping[str, float] | None = None,
    failures: Sequence[Failure] = (),
    without_groups: bool = False,
) -> Ran:
    options = dict(options or {})
    program = follow_program(of, options, steps=num_steps, seed=seed)
    plan = placed(lower(program.graph, program.models, spec))
    machines = machines_of(plan, spec, costs)
    simulated = simulate(program, plan, spec, costs, lengths, seed=seed, kept=kept, failures=failures, without_groups=without_groups)
    overlaps = program.staleness > 0
    report = report_of(simulated, machines, overlaps=overlaps)
    return Ran(simulated.history, machines, report, totals_of(report, simulated.history, machines, overlaps=overlaps), plan)


def leased(plan: Plan) -> Plan:
    """All instances and the trainer take turns."""
    workers = tuple(msgspec.structs.replace(w, lease="" if w.name.startswith("functions") else "all") for w in plan.workers)
    return msgspec.structs.replace(plan, workers=workers).verify()


T0, T1 = 1.0, 0.25


def decodes(max_running: int = 1000, prefill_s: float = 0.0) -> DecodeCost:
    return DecodeCost(T0, T1, prefill_s, max_running)


@flow
def long_answers(num_steps: int = 1, batch: int = 2) -> None:
    policy, reward, prompts = Policy("fake"), Reward(zero), Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=4, max_new_tokens=4000)
        policy.update(responses, advantages=reward.score(responses))


def costs_of(prefill_s: float, sample_s: float) -> PlainCosts:
    return PlainCosts(DecodeCost(8e-3, sample_s, prefill_s, 1_000_000, enter_s=2e-3, leave_s=1e-3))
