"""What the search found: where each call runs, for how long, and how far that is from the best that any schedule could do.

    Workload, Costs --search--> Choice --(m2flow.micro.lowering.placement)--> the workers and leases of a Plan

Data only; it is saved beside the run, printed by `m2flow plan` and read by the simulator.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from m2flow.micro.costs.terms import Constant, EngineId, Footprint, Layout

Mode = Literal["time-shared", "split", "hybrid"]


class Seat(msgspec.Struct, frozen=True):
    """Where an engine is, for some calls of the step: it has `num_devices` of a pool from `first_device` on."""

    engine: EngineId
    calls: tuple[str, ...]
    pool: str
    first_device: int
    num_devices: int
    layout: Layout
    chunk: int
    """Samples that it hands on at a time."""
    footprint: Footprint
    lease: str = ""
    """Seats with the same lease take turns with their devices; empty if no other has any of them."""
    mode: Literal["time-shared", "split"] = "split"
    is_swapped: bool = False
    """Between its calls all that it keeps is in the host's memory, and its devices are free for others."""

    lent_until: float = 0.0
    """Of a rollout engine some of whose devices a trainer lends: the share of its samples that have ended when it gives those back."""

    comes_at: float = 0.0
    """Of a trainer that is swapped: the share of the samples before it that have ended when it comes, beside those that run. 0: all."""

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_devices)


class Part(msgspec.Struct, frozen=True):
    """One summand of the predicted time."""

    what: str
    """`policy.generate`, `switch to train`, `weight sync`."""
    seconds: float
    on_critical_path: bool = True


class Bound(msgspec.Struct, frozen=True):
    """A time that no schedule of this workload on this cluster can beat."""

    name: str
    """`longest sample`, `work`, `k-longest`, `critical path`."""
    seconds: float


class Loser(msgspec.Struct, frozen=True):
    """The best of the plans of another shape, and why it lost."""

    what: str
    predicted_step_s: float
    why: str


class Choice(msgspec.Struct, frozen=True):
    """The best plan that was found."""

    flow: str
    cluster: str
    mode: Mode
    seats: tuple[Seat, ...]
    predicted_step_s: float
    parts: tuple[Part, ...]
    bounds: tuple[Bound, ...]
    is_exact: bool
    """No plan of the cost model is better; otherwise `gap_s` says by how much one might be."""
    gap_s: float
    advice: str
    """What limits it, and what would help."""
    losers: tuple[Loser, ...]
    search_s: float
    constraints_cost_s: dict[str, float]
    """Each constraint of the spec -> seconds a step that it costs against the plan without it."""
    constants: dict[str, Constant]
    not_tried: tuple[str, ...] = ()
    """What the search left out, and faster plans that can't be run."""

    @property
    def lower_bound_s(self) -> float:
        return max((bound.seconds for bound in self.bounds), default=0.0)

    @property
    def efficiency(self) -> float:
        return self.lower_bound_s / self.predicted_step_s if self.predicted_step_s else 1.0
