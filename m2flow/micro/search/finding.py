"""Find the best plan: what `m2flow plan` asks.

    Workload, lengths, Costs, ClusterSpec --find_plan--> Choice

The best row of the search (dynamic.py) whose engines can be put on devices (seats.py).
"""

from __future__ import annotations

import time

import numpy as np

from m2flow.micro.costs.terms import Costs
from m2flow.micro.search.batches import Draws
from m2flow.micro.search.choice import Choice
from m2flow.micro.search.dynamic import Solver, Tables
from m2flow.micro.search.problem import Problem
from m2flow.micro.search.seats import Places, mode_of, places_of, seats_of
from m2flow.micro.search.trees import Node, parts_of, tree_of
from m2flow.micro.search.workload import Workload
from m2flow.spec import ClusterSpec


def find_plan(workload: Workload, lengths: Draws, costs: Costs, spec: ClusterSpec) -> Choice:
    """The plan with the least predicted time of a step.

    Args:
        workload: the calls of a step.
        lengths: of prompts and answers.
        costs: of this workload's engines on this cluster.
        spec: its pools, pins and whether engines may go to the host's memory.
    Raises:
        PlanError: nothing fits, or nothing does that the pins allow.
    """
    started = time.perf_counter()
    problem = Problem(workload, lengths, costs, spec)
    problem.check()
    tables = Solver(problem).solve()
    node, places, loss_s = best_of(tables)
    seats = seats_of(node, places)
    parts = parts_of(problem, node)
    return Choice(
        flow=workload.flow,
        cluster=spec.name,
        mode=mode_of(seats),
        seats=seats,
        predicted_step_s=sum(part.seconds for part in parts if part.on_critical_path),
        parts=parts,
        bounds=(),
        is_exact=not loss_s,
        gap_s=loss_s,
        advice="",
        losers=(),
        search_s=time.perf_counter() - started,
        constraints_cost_s={},
        constants=costs.constants(),
    )


def best_of(tables: Tables) -> tuple[Node, Places, float]:
    """The best plan that has places for all, and what it takes more than the best without asking for places."""
    for row in np.argsort(tables.steps_s, kind="stable"):
        node = tree_of(tables, int(row))
        places = places_of(tables.problem, node)
        if places is not None:
            return node, places, float(tables.steps_s[row] - tables.steps_s.min())
    raise tables.problem.no_room()
