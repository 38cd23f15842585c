"""Run a flow's calls on the workers of a plan: the backend that lowers them segment by segment and hands them to the controller.

Calls gather until Python waits for a result or the step ends; then they are lowered as one segment. Python may run some steps ahead of the
workers (`Lookahead`), so that the next calls are known before they can start: with staleness k the next k steps can generate while a step
trains, and the calls of the step after those should be known by the time it can start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.session import Backend
from m2flow.macro.sites import user_site
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.controller import Controller
from m2flow.micro.controller.controller_core import Post, SaveAll, Submitted
from m2flow.micro.lowering.passes import Lowering
from m2flow.micro.protocol.call_semantics import call_body, num_tokens_of
from m2flow.micro.protocol.events import CheckpointDue, Released, Wanted
from m2flow.micro.records.flow_record import Logged
from m2flow.micro.records.journal import Journal
from m2flow.recipe import Sampling, longest_response
from m2flow.samples import Batch

_BYTES_PER_TOKEN = 16
"""Bytes of a sample's columns per token: id, log-probability and version 4 each, two masks, and about 2 of text."""

_BETWEEN = "between calls"
"""What the program's time counts for that came before no call: before it waited for a value, or at the end of a step."""


class Lookahead:
    """Limit how many steps Python may run ahead, by staleness and by the memory of samples under way.

    Samples are counted at their longest, since their lengths are not known yet. Above staleness 0 their bytes are kept below
    `budget_bytes`.
    """

    def __init__(self, staleness: int, budget_bytes: int) -> None:
        self._num_ahead = staleness + 1
        self._budget = budget_bytes if staleness else None
        self._bytes: dict[int, int] = {}
        self._longest: dict[int, dict[int, int]] = {}
        """Step -> call -> tokens of its longest row."""

    def add(self, call: Call) -> None:
        """Count a call of the program."""
        rows, sampling = call.options.get("rows"), call.options.get("sampling")
        known = self._longest.setdefault(call.step, {})
        if isinstance(rows, Batch):
            known[call.ordinal] = max(num_tokens_of(rows), default=0)
            return
        known[call.ordinal] = max((step.get(ref.call, 0) for _, ref in call.inputs for step in self._longest.values()), default=0)
        if isinstance(sampling, Sampling):
            known[call.ordinal] += longest_response(call.options)
            size = call.most_rows * known[call.ordinal] * _BYTES_PER_TOKEN
            self._bytes[call.step] = self._bytes.get(call.step, 0) + size

    def due(self, step: int) -> int:
        """Return the step that must be over, with all before it, before Python goes on after submitting `step`; below 0: none."""
        due = step - self._num_ahead
        while self._budget is not None and due < step and sum(self._bytes.get(s, 0) for s in range(due + 1, step + 1)) > self._budget:
            due += 1
        self._bytes = {s: size for s, size in self._bytes.items() if s > due}
        self._longest = {s: known for s, known in self._longest.items() if s > due or s < 0}
        return due


class PlannedBackend(Backend):
    """Execute a program's calls on the workers of a plan. The flow's thread alone uses it."""

    def __init__(
        self, flow: str, lowering: Lowering, controller: Controller, futures: CallFutures, journal: Journal, ahead: Lookahead
    ) -> None:
        self._flow = flow
        self._lowering = lowering
        self._controller = controller
        self._futures = futures
        self._journal = journal
        self._ahead = ahead
        self._segment: list[Call] = []
        self._bodies: dict[int, bytes] = {}
        self._recalled: dict[int, tuple[Batch, Sequence[int]]] = {}
        """Generate calls that an earlier attempt completed: their results, and samples left to later calls (partial rollouts)."""
        self._lost: dict[int | str, tuple[int, M2FlowError]] = {}
        """Calls that failed in an earlier attempt, calls that need them, and resources that they should have written -> the call that
        failed by itself, and its error. The scheduler never hears of these calls."""
        self._later: list[Post] = []
        self._aligned: set[int] = set()
        """Calls with rows that the program can still reach."""
        self._num_steps = 0
        """Steps whose calls are all submitted."""
        self._ends: list[tuple[int, int]] = []
        """Steps that may be under way, with the number of calls that the program had made at the end of each."""
        self._logged: list[tuple[int, int]] = []
        """Calls whose numbers are logged, and calls with an effect before a log, with the number of calls of the steps that had ended
        before."""
        self._resumed_s: float | None = None
        """When the program last went on: it had been given a value, or had made a call. None: it has made no call yet."""

    def submit(self, call: Call) -> None:
        self._count_program(f"{call.name} {call.site}")
        self._lowering.check(call)
        lost = self._inherited(call) if self._lost else None
        if lost is not None:
            self.fail(call, *lost)
            self._journal.call_added(call)
            self._journal.call_failed(call, lost[1])
            return
        self._futures.submitted(call)
        self._bodies[call.ordinal] = call_body(call)
        if call.is_aligned:
            self._aligned.add(call.ordinal)
        self._segment.append(call)
        self._ahead.add(call)

    def _count_program(self, what: str) -> None:
        """Count the time since the program went on as its own."""
        now_s = time.monotonic()
        seconds = self._controller.program_s
        if self._resumed_s is not None:
            seconds[what] = seconds.get(what, 0.0) + now_s - self._resumed_s
        self._resumed_s = now_s

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """The program waits in the block; what it did before that counts as its own time."""
        self._count_program(_BETWEEN)
        try:
            yield
        finally:
            self._resumed_s = time.monotonic()

    def recall(self, call: Call, rows: Batch, left: Sequence[int]) -> None:
        self._recalled[call.ordinal] = rows, left
        self.submit(call)

    def fail(self, call: Call, root: int, error: M2FlowError) -> None:
        lost_with: list[int | str] = [call.ordinal, *(effect.resource for effect in call.writes)]
        for lost in lost_with:
            self._lost[lost] = root, error
        self._futures.submitted(call)
        self._futures.reject(call, error, root)

    def _inherited(self, call: Call) -> tuple[int, M2FlowError] | None:
        """Return the error of an input or resource of this call that an earlier attempt lost; of several the earliest."""
        needed = [*(ref.call for _, ref in call.inputs), *(effect.resource for effect in call.reads)]
        return min((self._lost[one] for one in needed if one in self._lost), key=lambda found: found[0], default=None)

    def begin_checkpoint(self, due: CheckpointDue) -> None:
        """Begin a checkpoint after the calls so far."""
        self._flush()
        self._controller.post(due)

    def value(self, ordinal: int) -> object:
        self._flush()
        with self._waiting():
            value = self._futures.wait_value(ordinal)
            if ordinal not in self._aligned:
                return value
            self._controller.post(Wanted(ordinal))
            return self._futures.wait_rows(ordinal)

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        before, num_calls, where = self._futures.num_ended, self._futures.num_added, user_site().describe()
        self._later += [Logged(step, name, source, before, num_calls, where) for name, source in values.items()]
        awaited = [*(source[0] for source in values.values() if not isinstance(source, float)), *self._futures.open_effects]
        self._logged += [(ordinal, before) for ordinal in awaited if (ordinal, before) not in self._logged]

    def release(self, ordinal: int) -> None:
        self._aligned.discard(ordinal)
        self._later.append(Released(ordinal))

    def end_step(self, step: int) -> None:
        self._flush()
        self._futures.step_ended()
        self._ends.append((step, self._futures.num_ended))
        self._logged = [(ordinal, before) for ordinal, before in self._logged if not self._futures.has_ended(ordinal)]
        due = self._ahead.due(step)
        with self._waiting():
            self._futures.wait_step(due)
        self._num_steps = step + 1
        self._journal.tally.steps_done(due + 1)
        self._ends = [(ended, num_calls) for ended, num_calls in self._ends if ended > due]

    def raise_due(self) -> None:
        if any(isinstance(post, Logged) for post in self._later):
            self._flush()
        with self._waiting():
            self._futures.wait_ended(self._logged)  # Sequential execution has written them by now.
        for step, num_calls in self._ends:
            if self._futures.are_well(num_calls):
                self._journal.tally.steps_done(step + 1)
        self._futures.wait_due()

    def finish(self) -> None:
        self._flush()
        with self._waiting():
            self._futures.wait_all()
        self._journal.tally.steps_done(self._num_steps)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write every role's model; return role -> digest of its weights."""
        self._controller.post(SaveAll(path))
        return self._futures.wait_saved()

    def _flush(self) -> None:
        """Lower the gathered calls and post them to the controller, followed by what may only come after them."""
        calls, self._segment = self._segment, []
        posts: list[Post] = []
        if calls:
            stages = self._lowering.stages(MacroGraph(self._flow, tuple(calls)))
            for call, stage in zip(calls, stages, strict=True):
                posts.append(Submitted(call, stage, self._bodies.pop(call.ordinal), *self._recalled.pop(call.ordinal, (None, ()))))
        later, self._later = self._later, []
        self._controller.post(*posts, *later)
