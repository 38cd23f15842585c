"""The property of `test_same_answer` is worth something: small breakages of the runtime, each of which it must see.

Each bug is put into our own classes, and a few dozen planned runs are compared with eager ones that ran without it. One bug stays
green here, since what was published is still there: weights that are replaced before all have taken them. The rules of
`test_scheduler` see that one.
"""

import functools
import random

import numpy as np
import pytest
from fake_flows import duet, everything, plain
from seeded_bugs import BUGS, Patch

from m2flow.macro.flow import Flow
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing import world
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

Case = tuple[Flow, dict[str, int], ClusterSpec, int]


def cases() -> list[Case]:
    """The same few dozen for every bug: every flow, both placements, few and many workers, small and large chunks and budgets."""
    draw = random.Random(7)
    made = []
    for number in range(24):
        spec = ClusterSpec(
            placement=("time-shared", "split")[number % 2],
            cores=2,
            device="cpu",
            rollout=RolloutSpec(engine="fake", workers=draw.randint(1, 3), max_running=draw.choice([2, 5, 64])),
            train=TrainSpec(engine="fake", token_budget=draw.choice([20, 60, 4096])),
            functions=FunctionSpec(workers=draw.randint(1, 2), chunk=draw.choice([1, 3, 64])),
        )
        options = {"num_steps": 2, "batch": draw.randint(2, 5), "n": draw.randint(2, 4), "minibatch": draw.choice([0, 1, 2]), "epochs": 2}
        made.append(((everything, plain, duet)[number % 3], options, spec, draw.randrange(2**30)))
    return made


@functools.cache
def eager_answers() -> list[Answer]:
    return [run_eager(flow, options, spec) for flow, options, spec, _ in cases()]


def first_red(patch: Patch) -> int | None:
    """The first case whose planned run does not give the eager answer."""
    patch.setattr(world, "MAX_TURNS", 20_000)
    for number, ((flow, options, spec, order_seed), eager) in enumerate(zip(cases(), eager_answers(), strict=True)):
        try:
            if run_planned(flow, options, spec, order_seed=order_seed) != eager:
                return number
        except (AssertionError, LookupError, TypeError, ValueError):
            return number
    return None


# Membership and order.


# Counting.


# Versions.


# The lease.


def test_without_a_bug_every_case_is_green(monkeypatch):
    assert all(answer.error == "" and np.isfinite([value for *_, value in answer.logs]).all() for answer in eager_answers())
    assert first_red(monkeypatch) is None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_property_sees(bug, monkeypatch):
    eager_answers()  # Without the bug.
    bug(monkeypatch)
    assert first_red(monkeypatch) is not None
