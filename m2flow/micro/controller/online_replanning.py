"""Whether the plan of a run is still the one to have, by how long its answers turn out to be, and its work to take.

    ledger, spans --(m2flow.planner.planning)--> what this plan takes, and the best one --SecondLook--> another share lent, or advice

Every six `replan_s` a thread searches again, for the seats that the run has and without them. Twice the same answer is one:

- devices lent until another share of the samples: at once, since that is a matter of time alone;
- other seats with which a step is predicted to take `_PAYS` less time: they need other processes. The cluster spec that pins them is
  written into the run's directory, and an incident says what it would save and how the run goes on with it.

Only of placements that were searched for. What engines take is measured where they are; on other devices, or in other layouts, it is the
model's, corrected by what that is off by where they are. Limits: memory is the model's, and so is what links take between hosts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import yaml

from m2flow.errors import M2FlowError
from m2flow.micro.protocol.events import BorrowThresholds, Event
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.records.journal import Journal
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec

_PAYS = 0.1
"""Of a step that would be so much shorter, stopping a run and going on with other processes is worth the mention."""
_IN_A_ROW = 2
_WINDOWS = 6
"""Of `replan_s`, from one look to the next."""
BETTER = "better-plan.yaml"
"""In the run's directory."""

Choose = Callable[[ClusterSpec], Choice]
"""The best plan on a cluster."""
SearchAnew = Callable[[], Choose]
"""With the lengths of the run so far, and what it has measured."""


@dataclass(frozen=True)
class Opinion:
    """Of one look."""

    here: Choice
    """What the seats of the run are predicted to take."""
    best: Choice

    @property
    def gain(self) -> float:
        """Of the time of a step."""
        return 1 - self.best.predicted_step_s / self.here.predicted_step_s if self.here.predicted_step_s else 0.0


@final
class Patience:
    """Opinions, until they have been the same for long enough. Pure."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """`shares`: of a generation, at which lent devices are given back now, by role; empty where nothing is lent."""
        self.shares = dict(shares)
        self._seen_shares: list[dict[str, float]] = []
        self._num_better = 0
        self._has_told = False

    def other_shares(self, opinion: Opinion) -> dict[str, float]:
        """What is to be lent until when from now on, where that has changed."""
        seats = {seat.engine.role: seat for seat in opinion.here.seats if seat.engine.kind == "rollout"}
        found = {role: seats[role].lent_until or 1.0 for role in self.shares if role in seats}
        self._seen_shares = [*self._seen_shares, found][-_IN_A_ROW:]
        is_sure = len(self._seen_shares) == _IN_A_ROW and all(seen == found for seen in self._seen_shares)
        if not is_sure or not found or all(self.shares[role] == share for role, share in found.items()):
            return {}
        self.shares.update(found)
        return found

    def is_better(self, opinion: Opinion) -> bool:
        """Whether another plan is worth the mention; once."""
        self._num_better = self._num_better + 1 if opinion.gain >= _PAYS else 0
        if self._has_told or self._num_better < _IN_A_ROW:
            return False
        self._has_told = True
        return True


@final
class OnlineReplanning:
    """Of one run. The controller's thread asks it about once a second.

    Args:
        search_anew: None: the placement was not searched for, and there is nothing to look at.
    """

    def __init__(self, plan: Plan, spec: ClusterSpec, run_dir: Path, journal: Journal, search_anew: SearchAnew | None) -> None:
        lent = {(w.name, slot.role): slot.lent_until for w in plan.workers for slot in w.engines if slot.lent_until}
        self._lent = tuple(lent)
        self._patience = Patience({role: share for (_, role), share in lent.items()})
        self._choice, self._spec, self._run_dir, self._journal = plan.choice, spec, run_dir, journal
        self._search_anew = search_anew if plan.choice is not None else None
        self._every_s = _WINDOWS * spec.rollout.replan_s
        self._next_s: float | None = None
        self._opinions: queue.SimpleQueue[Opinion] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, now_s: float) -> list[Event]:
        """What the scheduler should know; begins a search when it is time."""
        if self._search_anew is None:
            return []
        self._next_s = now_s + self._every_s if self._next_s is None else self._next_s
        if now_s >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = now_s + self._every_s
            self._thread = threading.Thread(target=self._search, name="second look", daemon=True)
            self._thread.start()
        return [event for _ in range(self._opinions.qsize()) for event in self._heed(self._opinions.get())]

    def _search(self) -> None:
        assert self._search_anew is not None
        assert self._choice is not None
        try:
            choose = self._search_anew()
            self._opinions.put(Opinion(choose(pinned_to(self._choice, self._spec)), choose(self._spec)))
        except (M2FlowError, OSError):
            return  # Nothing has been generated yet that says how long answers are, or nobody knows what things take.

    def _heed(self, opinion: Opinion) -> list[Event]:
        if self._patience.is_better(opinion):
            path = self._run_dir / BETTER
            path.write_text(yaml.safe_dump(pinned_to(opinion.best, self._spec).model_dump(mode="json", exclude_defaults=True)))
            self._journal.incident(
                "better plan",
                "controller",
                f"by what the run has measured, a {opinion.best.mode} placement is predicted to take {opinion.gain:.0%} less time "
                f"a step than this one ({opinion.best.predicted_step_s:.3g} s, not {opinion.here.predicted_step_s:.3g} s); to have it, "
                f"stop the run: m2flow run --resume {self._run_dir} --cluster {path}",
            )
        before = dict(self._patience.shares)
        shares = self._patience.other_shares(opinion)
        if not shares:
            return []
        for role, share in shares.items():
            what = f"devices of its trainer are lent until {share:.1%} of {role}'s samples have ended, not {before[role]:.1%}"
            seconds = f"a step is predicted to take {opinion.here.predicted_step_s:.3g} s"
            self._journal.incident("re-planned", "controller", f"by what the run has measured, {what}: {seconds}")
        return [BorrowThresholds({key: shares[key[1]] for key in self._lent if key[1] in shares})]


def pinned_to(choice: Choice, spec: ClusterSpec) -> ClusterSpec:
    """The cluster with the seats of a choice, and nothing left open but chunks and what is lent."""
    pins = {}
    for seat in choice.seats:
        degrees = {name: getattr(seat.layout, name) for name in ("tp", "pp", "sp", "dp", "ep", "zero")}
        devices = (seat.first_device, seat.devices.stop)
        pins[str(seat.engine)] = PinSpec(pool=seat.pool or None, devices=devices, layout=LayoutSpec(**degrees), offload=seat.layout.offload)
    return spec.model_copy(update={"pin": pins})
