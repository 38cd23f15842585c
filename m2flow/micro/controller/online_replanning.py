"""Search for a better plan while a run is under way, with the response lengths and task times that it has measured so far.

    ledger, spans --(m2flow.planner)--> predicted time of this plan, and the best one --Hysteresis--> another borrow threshold, or advice

Every `_WINDOWS` times `replan_s` a thread searches twice: with the run's placement pinned, and without. An answer counts when it was the
same twice in a row:

- GPUs of a trainer that are lent to rollouts until another share of the samples has ended: changed at once, since it concerns time alone;
- another placement with which a step is predicted to take `_PAYS` less time: that needs other processes. The cluster spec that pins it is
  written into the run's directory, and an incident says what it would save and how to resume with it.

Only for placements that were searched for. Task times are measured where the engines are; on other devices, or in other layouts, they are
the cost model's, corrected by the model's error where the engines are. Limits: memory and transfers between hosts are the model's alone.
"""

from __future__ import annotations

import queue
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml

from m2flow.errors import M2FlowError
from m2flow.micro.protocol.cost_terms import StageOrder
from m2flow.micro.protocol.events import BorrowThresholds, Event
from m2flow.micro.protocol.plan import Choice, Placement, Plan
from m2flow.micro.records.journal import Journal
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec

_PAYS = 0.1
"""Predicted saving, as a share of a step, from which a restart with another placement is advised."""
_IN_A_ROW = 2
_WINDOWS = 6
"""Searches are so many `replan_s` apart."""
BETTER = "better-plan.yaml"
"""File in the run's directory with the advised cluster spec."""

Choose = Callable[[ClusterSpec], Choice]
"""Find the best placement on a cluster."""
SearchAnew = Callable[[], Choose]
"""Return a search that uses the response lengths and times that the run has measured so far."""


@dataclass(frozen=True)
class Comparison:
    """Result of one search: the run's own placement against the best one."""

    here: Choice
    """The placement of the run, with its predicted times."""
    best: Choice

    @property
    def gain(self) -> float:
        """Predicted saving, as a share of the time of a step."""
        return 1 - self.best.predicted_step_s / self.here.predicted_step_s if self.here.predicted_step_s else 0.0


@final
class Hysteresis:
    """Act on comparisons only when `_IN_A_ROW` of them agree. Pure."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """`shares`: role -> share of a generation's samples after which lent GPUs are given back now; empty where none are lent."""
        self.shares = dict(shares)
        self._seen_shares: list[dict[str, float]] = []
        self._num_better = 0
        self._has_told = False

    def other_shares(self, comparison: Comparison) -> dict[str, float]:
        """Return the shares that apply from now on, if they have changed; else nothing."""
        placements = {placement.engine.role: placement for placement in comparison.here.placements if placement.engine.kind == "rollout"}
        found = {role: placements[role].lent_until or 1.0 for role in self.shares if role in placements}
        self._seen_shares = [*self._seen_shares, found][-_IN_A_ROW:]
        is_sure = len(self._seen_shares) == _IN_A_ROW and all(seen == found for seen in self._seen_shares)
        if not is_sure or not found or all(self.shares[role] == share for role, share in found.items()):
            return {}
        self.shares.update(found)
        return found

    def is_better(self, comparison: Comparison) -> bool:
        """Whether another placement should be advised; True at most once."""
        self._num_better = self._num_better + 1 if comparison.gain >= _PAYS else 0
        if self._has_told or self._num_better < _IN_A_ROW:
            return False
        self._has_told = True
        return True


@final
class OnlineReplanning:
    """Replan one run in the background. The controller's thread calls `look` about once a second.

    Args:
        search_anew: None if the placement was not searched for; nothing is replanned then.
    """

    def __init__(self, plan: Plan, spec: ClusterSpec, run_dir: Path, journal: Journal, search_anew: SearchAnew | None) -> None:
        lent = {(w.name, slot.role): slot.lent_until for w in plan.workers for slot in w.engines if slot.lent_until}
        self._lent = tuple(lent)
        self._hysteresis = Hysteresis({role: share for (_, role), share in lent.items()})
        self._choice, self._spec, self._run_dir, self._journal = plan.choice, spec, run_dir, journal
        self._search_anew = search_anew if plan.choice is not None else None
        self._every_s = _WINDOWS * spec.rollout.replan_s
        self._next_s: float | None = None
        self._comparisons: queue.SimpleQueue[Comparison] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, now_s: float) -> list[Event]:
        """Begin a search when it is time; return events for the scheduler from searches that have ended."""
        if self._search_anew is None:
            return []
        self._next_s = now_s + self._every_s if self._next_s is None else self._next_s
        if now_s >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = now_s + self._every_s
            self._thread = threading.Thread(target=self._search, name="m2flow-replanning", daemon=True)
            self._thread.start()
        return [event for _ in range(self._comparisons.qsize()) for event in self._act_on(self._comparisons.get())]

    def _search(self) -> None:
        assert self._search_anew is not None
        assert self._choice is not None
        try:
            choose = self._search_anew()
            self._comparisons.put(Comparison(choose(pinned_to(self._choice, self._spec)), choose(self._spec)))
        except (M2FlowError, OSError):
            return  # No response lengths or task times have been measured yet.

    def _act_on(self, comparison: Comparison) -> list[Event]:
        if self._hysteresis.is_better(comparison):
            path = self._run_dir / BETTER
            path.write_text(yaml.safe_dump(pinned_to(comparison.best, self._spec).model_dump(mode="json", exclude_defaults=True)))
            self._journal.incident(
                "better plan",
                "controller",
                f"by what the run has measured, a {comparison.best.mode} placement is predicted to take {comparison.gain:.0%} less time "
                f"a step than this one ({comparison.best.predicted_step_s:.3g} s, not {comparison.here.predicted_step_s:.3g} s); "
                f"to have it, stop the run: m2flow run --resume {shlex.quote(str(self._run_dir))} --cluster {shlex.quote(str(path))}",
            )
        before = dict(self._hysteresis.shares)
        shares = self._hysteresis.other_shares(comparison)
        if not shares:
            return []
        for role, share in shares.items():
            what = f"devices of its trainer are lent until {share:.1%} of {role}'s samples have ended, not {before[role]:.1%}"
            seconds = f"a step is predicted to take {comparison.here.predicted_step_s:.3g} s"
            self._journal.incident("re-planned", "controller", f"by what the run has measured, {what}: {seconds}")
        return [BorrowThresholds({key: shares[key[1]] for key in self._lent if key[1] in shares})]


def _degrees(placement: Placement, names: Iterable[str]) -> dict[str, Any]:
    """These degrees of a placement's layout, and where a trainer has stages, how micro-batches pass through them."""
    degrees = {name: getattr(placement.layout, name) for name in names}
    if placement.layout.pp > 1 and placement.engine.kind == "train":
        degrees |= {name: getattr(placement, name) for name in StageOrder.__struct_fields__}
    return degrees


def pinned_to(choice: Choice, spec: ClusterSpec) -> ClusterSpec:
    """Pin a cluster spec to the placement of a choice, with only chunk sizes and borrow thresholds left open."""
    pins = {}
    for placement in choice.placements:
        degrees = _degrees(placement, ("tp", "pp", "sp", "dp", "ep", "zero"))
        devices = (placement.first_device, placement.devices.stop)
        pins[str(placement.engine)] = PinSpec(
            pool=placement.pool or None,
            devices=devices,
            layout=LayoutSpec(**degrees),
            offload=placement.layout.offload,
            recompute=placement.layout.recompute,
        )
    return spec.model_copy(update={"pin": pins})


def bits_kept(choice: Choice, spec: ClusterSpec, device: str) -> ClusterSpec:
    """Pin what decides the order of sums, so that a deterministic run goes on with equal bits in any placement that is left.

    That is how a model is split, and over how many ranks gradients are summed. On cores `tp` counts threads, of which a deterministic
    engine has one.
    """
    pins = dict(spec.pin)
    for placement in choice.placements:
        names = ("pp", "sp", "ep", *(("tp",) if device != "cpu" else ()), *(("dp", "zero") if placement.engine.kind == "train" else ()))
        degrees = _degrees(placement, names)
        given = pins.get(str(placement.engine), PinSpec())
        pins[str(placement.engine)] = given.model_copy(update={"layout": given.layout.model_copy(update=degrees)})
    return spec.model_copy(update={"pin": pins})
