"""A run's plan is looked at again with the answers that came: what is lent changes at once, other placements are advised, both with
hysteresis."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import yaml
from fake_flows import plain
from leased_plans import lent, split
from modelled_problems import choice_of, modelled, simple

from m2flow.macro.tracing import trace
from m2flow.micro.controller.online_replanning import BETTER, Comparison, Hysteresis, OnlineReplanning, bits_kept, pinned_to
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.events import BorrowThresholds, Event
from m2flow.micro.protocol.plan import Choice
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, RolloutSpec
from m2flow.testing.world import run_eager, run_planned


class Noted:
    """Stands where the journal does."""

    def __init__(self) -> None:
        self.incidents: list[tuple[str, str]] = []

    def incident(self, kind: str, worker: str, what: str) -> None:
        self.incidents.append((kind, what))


def lending(share: float, step_s: float = 10.0) -> Choice:
    choice = simple()
    placements = tuple(msgspec.structs.replace(s, lent_until=share if s.lent_until else 0.0) for s in choice.placements)
    return msgspec.structs.replace(choice, placements=placements, predicted_step_s=step_s)


def test_a_share_changes_when_two_looks_in_a_row_say_the_same() -> None:
    hysteresis = Hysteresis({"policy": 0.9})
    said = [hysteresis.other_shares(Comparison(lending(share), lending(share))) for share in (0.8, 0.9, 0.8, 0.7, 0.7, 0.7, 0.9)]
    assert said == [{}, {}, {}, {}, {"policy": 0.7}, {}, {}]


def test_another_plan_is_told_of_once_and_only_where_it_saves_a_tenth_twice_in_a_row() -> None:
    hysteresis = Hysteresis({})
    steps_s = (9.5, 8.5, 9.5, 8.5, 8.5, 8.0, 8.0)
    told = [hysteresis.is_better(Comparison(lending(0.9), lending(0.9, step_s))) for step_s in steps_s]
    assert told == [False, False, False, False, True, False, False]


def test_the_placements_of_a_choice_pinned_are_found_again() -> None:
    problem = modelled(8)
    choice = choice_of(problem)
    spec = pinned_to(choice, problem.spec)
    again = choice_of(type(problem)(problem.workload, problem.lengths, problem.costs, spec))
    assert {(placement.engine, placement.devices, placement.layout) for placement in again.placements} == {
        (s.engine, s.devices, s.layout) for s in choice.placements
    }
    assert again.predicted_step_s == pytest.approx(choice.predicted_step_s)


def test_a_deterministic_run_is_offered_only_plans_that_sum_in_its_order() -> None:
    """How many devices each has, and which, stays open; so does what the user pinned."""
    problem = modelled(8)

    def best(spec: ClusterSpec) -> Choice:
        return choice_of(type(problem)(problem.workload, problem.lengths, problem.costs, spec))

    def sums(choice: Choice) -> set[tuple[str, int, int, int]]:
        return {(str(s.engine), s.layout.tp, s.layout.pp, s.layout.dp) for s in choice.placements if s.engine.kind == "train"}

    here = best(problem.spec.model_copy(update={"pin": {"policy.train": PinSpec(layout=LayoutSpec(tp=2, dp=1, pp=1))}}))
    assert sums(here) != sums(best(problem.spec))
    kept = bits_kept(here, problem.spec, "cuda")
    assert sums(best(kept)) == sums(here)
    assert all(pin.devices is None for pin in kept.pin.values())
    assert kept.pin["policy.rollout"].layout.dp is None
    of_two = problem.spec.model_copy(update={"pin": {"policy.train": PinSpec(num_devices=2)}})
    assert bits_kept(here, of_two, "cuda").pin["policy.train"].num_devices == 2
    assert bits_kept(here, problem.spec, "cpu").pin["policy.train"].layout.tp is None  # Threads.


def looked(here: Choice, best: Choice, spec: ClusterSpec, run_dir: Path) -> tuple[list[Event], list[tuple[str, str]]]:
    """What three looks of a run whose plan lends one of two instances come to."""
    graph, models, _ = trace(plain, {}, steps=1)
    plan = msgspec.structs.replace(lent(0.9, "rollout-0")(lower(graph, models, split())), choice=here)
    noted, events = Noted(), []
    look = OnlineReplanning(plan, spec, run_dir, noted, lambda: lambda on: here if on.pin else best)  # type: ignore[arg-type]
    for now_s in range(0, 7 * 60, 60):
        events += look.look(float(now_s))
        for thread in threading.enumerate():
            if thread.name == "m2flow-replanning":
                thread.join()
    return events, noted.incidents


def test_a_run_is_told_of_both_with_the_command_that_goes_on_with_the_better_plan(tmp_path: Path) -> None:
    spec = ClusterSpec(placement="auto", rollout=RolloutSpec(replan_s=10.0))
    events, incidents = looked(lending(0.7), lending(0.7, 6.0), spec, tmp_path)
    assert events == [BorrowThresholds({("rollout-0", "policy"): 0.7})]
    (better, told), (replanned, why) = incidents
    assert (better, replanned) == ("better plan", "re-planned")
    assert "40% less time a step" in told
    assert f"m2flow run --resume {tmp_path} --cluster {tmp_path / BETTER}" in told
    assert "lent until 70.0% of policy's samples have ended, not 90.0%" in why
    assert yaml.safe_load((tmp_path / BETTER).read_text())["pin"]["policy.train"]["devices"]


def test_the_cluster_that_is_written_can_be_read(tmp_path: Path) -> None:
    problem = modelled(8)
    spec = pinned_to(choice_of(problem), problem.spec)
    (tmp_path / BETTER).write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
    assert load_cluster(tmp_path / BETTER) == spec


@pytest.mark.parametrize("order_seed", [0, 1, 2])
def test_shares_that_change_in_a_run_change_no_answer(order_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from m2flow.micro.scheduler.scheduler import Scheduler

    handle, shares = Scheduler.handle, iter([0.2, 0.6, 1.0, 0.01] * 1000)

    def relent(self: Scheduler, *events: Event) -> list[object]:
        return handle(self, *events, BorrowThresholds({("rollout-0", "policy"): next(shares)}))  # type: ignore[return-value]

    eager = run_eager(plain, {"batch": 4}, split())
    monkeypatch.setattr(Scheduler, "handle", relent)
    assert run_planned(plain, {"batch": 4}, split(), order_seed=order_seed, placed=lent(0.5, "rollout-0")) == eager
