"""Dispatch a generation's samples as a scheduling policy says: the live side of `m2flow.rollout_scheduling.policy`.

    plan --Policies, PolicyDispatches--> a PolicyDispatch for each generate call, or none: first come, first served, whole groups together
    ready rows --PolicyDispatch--> policy --> queues: what each worker gets next, when it can take it

The policy is asked as in the study: the instance with the fewest samples first, one sample at a time, so that samples which start
together are spread evenly, whichever worker can begin first. A sample that is assigned to a worker waits in the worker's queue until the
worker holds the right weights and has room. Nothing else depends on the policy: which worker may run what is decided by
`RolloutDispatch`, and rows that leave `ready` (the call is cut, fails, has lost a worker) leave every queue. Nothing is assigned to a
worker that is lost, has given back its devices, or has newer weights than the call may use (`SchedulerState.is_away`). A policy that
holds back samples while no task is in flight is overruled (`force`).

With `difficulty: prefill`, no sample of a generation begins before its prompts are embedded (`Embeddings`). `auto` and `split` decide then.
To know a prompt from when its first sample is prefilled would do for `longest-first` alone, and only if it took groups apart, whose prompts
are then read by several engines. Instead prompts are read twice, which is little beside responses that are much longer.

Without a policy, episodes alone move (`EpisodeMoves`): from an instance where they wait to one that would have nothing to do.

A policy object serves one call at a time. One that is free serves the next call of its role, with what it has learned; calls of a role
that overlap have one each. Lengths of earlier answers are kept by the prompt's text, for later epochs.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from m2flow.errors import SpecError
from m2flow.macro.oversampling import is_cut, num_wanted
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import PREFILL, Pace
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler.call_state import CallState, Ready
from m2flow.recipe import Sampling, longest_response
from m2flow.rollout_scheduling.decode_model import DecodeModel
from m2flow.rollout_scheduling.policies import make_policies, of_scheduling
from m2flow.rollout_scheduling.policy import Load, MoveCost, SchedulingPolicy, Seen
from m2flow.samples import Batch, Ragged, SampleId, group_key

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.micro.scheduler.backpressure import Credits
    from m2flow.micro.scheduler.ready_queues import ReadyWorkers, Tasks
    from m2flow.micro.scheduler.weights import Versions

_LEAST_STEP_S = 1e-9
"""Least step time of a decode model; a measured one may be 0, which the model does not allow."""
_DEFAULT_PACE = Pace("", DecodeModel().t0_s, DecodeModel().t1_s, MoveCost().token_s, MoveCost().fixed_s, "given")
_MOST_MOVES = 60
"""Moves of an episode, of which each makes the next one twice as dear: more are as dear as so many."""
_FEW = 64
"""With more instances than this, those that a policy left out are not all asked again whenever a sample ends or begins."""


class _Move(NamedTuple):
    """Where an episode is to go on, and how long it has waited where it is."""

    to: str
    waited_us: int


class PolicyState(Protocol):
    """What this module needs of `SchedulerState`, which has a `Policies` and so is not imported here."""

    workers: dict[str, WorkerState]
    calls: dict[int, CallState]
    tasks: Tasks
    ready_workers: ReadyWorkers
    versions: Versions
    credits: Credits
    policies: Policies
    num_changes: int

    @property
    def known_lengths(self) -> Callable[[int], int] | None: ...

    def is_away(self, worker: WorkerState, call_state: CallState) -> bool: ...

    def can_begin(self, worker: WorkerState, call_state: CallState) -> bool: ...

    def send(self, worker: str, message: m.ToWorker) -> None: ...

    def samples_ended(self, number: int, num_rows: int) -> None: ...

    def requeue(self, call_state: CallState, rows: list[int], *, has_more: bool = False) -> None: ...


_MOST_EMBEDDED = 64
"""Prompts in a task: between two tasks an engine decodes what else runs there."""


@final
class Embeddings:
    """The embeddings of a generation's prompts, which its rollout engines compute before its first sample begins.

    Each worker that could begin samples gets an even share at most, one task at a time, and more when that is done. What a lost worker had
    goes to others. What comes back without embeddings, or is left where nobody can compute them, stays unknown.
    """

    def __init__(self, call_state: CallState) -> None:
        self._call_state = call_state
        self._left: deque[tuple[int, int]] | None = None
        """A sample and its prompt's row, of those that no worker has yet; None until somebody asks, when the rows are there."""
        self._share = _MOST_EMBEDDED
        self._asked: dict[str, list[tuple[int, int]]] = {}
        """Worker -> those that it has."""
        self.found: dict[int, str] = {}
        """Row of the prompts -> its embedding, as JSON."""

    @property
    def are_known(self) -> bool:
        """Whether no more are to come."""
        return not self._asked and not self._open()

    def has_some_for(self, worker: str) -> bool:
        """Whether a worker, which could begin samples now, should embed some prompts."""
        return worker not in self._asked and bool(self._open())

    def take(self, worker: str) -> tuple[list[int], list[int]]:
        """Take a worker's next prompts: a sample of each, and their rows."""
        left = self._open()
        taken = self._asked[worker] = [left.popleft() for _ in range(min(self._share, len(left)))]
        return [row for row, _ in taken], [prompt for _, prompt in taken]

    def came(self, worker: str, embeddings: Sequence[Sequence[float]]) -> None:
        """Record what a worker has computed; empty if it could not."""
        for (_, prompt), numbers in zip(self._asked.pop(worker, ()), embeddings, strict=False):
            self.found[prompt] = json.dumps([round(number, 6) for number in numbers])

    def lost(self, worker: str) -> None:
        """Take back what a lost worker had."""
        if worker in self._asked:
            self._open().extendleft(reversed(self._asked.pop(worker)))

    def give_up(self) -> None:
        """Go on with those that are known."""
        self._left = deque()
        self._asked.clear()

    def _open(self) -> deque[tuple[int, int]]:
        if self._left is None:
            call_state, first = self._call_state, dict[int, int]()
            for row in call_state.ready:
                if call_state.refill is None or SampleId.unpack(row).prompt < call_state.refill.num_allowed:
                    first.setdefault(call_state.prompt_of(row), row)
            first.pop(-1, None)  # What an earlier call drew.
            self._left = deque((row, prompt) for prompt, row in first.items())
            self._share = min(-(-len(first) // max(len(call_state.stage.workers), 1)), _MOST_EMBEDDED)
        return self._left


@final
class PolicyDispatch:
    """Assigns the samples of one call to workers, as one policy says."""

    def __init__(
        self,
        state: PolicyState,
        call_state: CallState,
        policy: SchedulingPolicy,
        earlier: Mapping[int, Sequence[int]],
        pace: Pace | None = None,
        difficulties: Mapping[int, str] = MappingProxyType({}),
        embeddings: Embeddings | None = None,
    ) -> None:
        """
        Args:
            earlier: row of the prompts -> lengths of answers to the same prompt in earlier epochs.
            pace: how fast its engines are; by default as fast as those of the default decode model.
            difficulties: row of the prompts -> how hard it is said to be.
            embeddings: says that instead, once they are known; until then nothing begins.
        """
        assert isinstance(call_state.ready, Ready)
        prompts = call_state.call.input("prompts")
        assert prompts is not None
        self._state = state
        self.call_state = call_state
        self.policy = policy
        self._ready = call_state.ready
        self._workers = [state.workers[name] for name in call_state.planned.workers]
        self._instances = {worker.name: j for j, worker in enumerate(self._workers)}
        self._prompt_tokens = state.calls[prompts.call].num_tokens
        self._earlier = earlier
        self._num_known = state.num_changes
        """`SchedulerState.num_changes` when it was last looked who is away."""
        self._pace = pace
        self._difficulties = difficulties if embeddings is None else embeddings.found
        self.embeddings = embeddings
        self._dealt: set[int] = set()
        self.lengths: dict[int, int] = {}
        """Finished row -> tokens generated."""
        self._tokens: dict[int, int] = {}
        """Row -> tokens so far, as its engine reported last."""
        self._reports: dict[int, Load] = {}
        self._at: dict[int, int] = {}
        """Row in flight -> instance that has it."""
        self._lost = self._away()
        self._moving: dict[int, int] = {}
        """Row that is being preempted -> instance where it is to continue."""
        self.num_moved = 0
        self.num_forced = 0
        """Samples that began against the policy, since no task was in flight."""
        self._is_forced = False
        self.is_begun = False
        self._freed: list[int] = []
        """Instances where samples have ended since the policy was last asked."""
        self._num_ended = 0
        """Samples that have ended since all instances were listed."""

    # ---- asked by `RolloutDispatch`

    def has_samples_for(self, worker: WorkerState) -> bool:
        """Ask the policy, and return whether this worker, which may have room now, has samples in its queue.

        Others may have got some too.
        """
        self._refresh()
        j = self._instances[worker.name]
        self._list(j)
        self._deal()
        return bool(self._hands[j])

    def deal(self) -> list[WorkerState]:
        """Assign what may begin now that samples have ended; return the workers that got some."""
        if self.embeddings is not None and not self.embeddings.are_known:
            return []
        self._refresh()
        self._deal()
        return self.dealt_to()

    def take(self, worker: WorkerState, most: int) -> list[int]:
        """Take a worker's next rows from its queue, with the siblings of the last one."""
        hand = self._hands[self._instances[worker.name]]
        rows: list[int] = []
        group = -1
        while hand and (len(rows) < most or self.seen.groups[hand[0]] == group):
            group = self.seen.groups[hand[0]]
            row = self._rows[hand.popleft()]
            self._ready.take(row)
            self._at[row] = self._instances[worker.name]
            rows.append(row)
        return rows

    def dealt_to(self) -> list[WorkerState]:
        """Return the workers that were assigned samples since this was last called."""
        found, self._dealt = self._dealt, set()
        return [self._workers[j] for j in sorted(found)]

    def force(self) -> bool:
        """Let one sample begin whatever the policy says; return whether one waits."""
        if self.embeddings is not None:
            self.embeddings.give_up()
        self._refresh()
        self._is_forced = bool(self.seen.waiting)
        if self._is_forced:
            self._list_all()
        return self._is_forced

    # ---- events

    def ended(self, row: int, length: int) -> None:
        """Record that a sample is done; a second report is ignored."""
        self.lengths[row] = length
        self._at.pop(row, None)
        self._moving.pop(row, None)
        if self.is_begun and row in self._index and self._index[row] not in self.seen.finished:
            sample = self._index[row]
            self.seen.finished[sample] = length
            here = self.seen.place.pop(sample, None)
            if here is not None:
                self.seen.loads[here] -= 1
                self._freed.append(here)
            self._num_ended += 1
            self.policy.ended(sample, length)

    def reported(self, worker: str, load: Load, tokens: Iterable[tuple[int, int]]) -> None:
        """Record an engine's load, and how far its samples are."""
        j = self._instances.get(worker)
        if j is None:
            return
        self._tokens.update(tokens)
        self._reports[j] = load
        if self.is_begun:
            self.policy.reported(j)

    def lost(self, worker: str) -> None:
        """Remove a lost worker, whose samples come back into `ready`."""
        if self.embeddings is not None:
            self.embeddings.lost(worker)
        j = self._instances.get(worker)
        if j is not None:
            self._at = {row: there for row, there in self._at.items() if there != j}
            self._moving = {row: to for row, to in self._moving.items() if row in self._at}
            self._ready.is_disturbed = True

    def gave_up(self, rows: Iterable[int]) -> None:
        """Drop late rows, which nobody waits for."""
        for row in rows:
            self._at.pop(row, None)
            self._moving.pop(row, None)
        self._ready.is_disturbed = True

    def moves(self) -> dict[str, list[int]]:
        """Ask the policy for moves: worker -> rows to preempt. Their targets are remembered until they have stopped."""
        found: dict[str, list[int]] = {}
        self._look()
        for move in self.policy.moves() if self.is_begun else ():
            row = self._rows[move.sample]
            here = self._at.get(row)
            if here is None or here == move.to or row in self._moving or move.to in self._lost or self._room(move.to) <= 0:
                continue
            self._moving[row] = move.to
            found.setdefault(self._workers[here].name, []).append(row)
        return found

    def preempted(self, row: int) -> WorkerState | None:
        """Queue a preempted sample at the worker to which it moves, and return that; None if it has no target any more."""
        self._look()
        to = self._moving.pop(row, None)
        self._at.pop(row, None)
        if to is None or to in self._lost or not self.is_begun or row not in self._index:
            return None
        sample = self._index[row]
        here = self.seen.place.pop(sample, None)
        if here is not None:
            self.seen.loads[here] -= 1
            self._freed.append(here)
        self._ready.come_back(row)
        self._hands[to].append(sample)
        self.seen.place[sample] = to
        self.seen.loads[to] += 1
        self.num_moved += 1
        return self._workers[to]

    def over(self) -> None:
        """End the call."""
        if self.is_begun:
            self.is_begun = False  # The policy serves another call from now on, and must not see this one's late samples.
            self.policy.end()

    # ---- the policy's view

    def _refresh(self) -> None:
        """Show the policy what has changed since it was last asked."""
        self._look()
        ready, call_state = self._ready, self.call_state
        if not self.is_begun or ready.is_disturbed or len(self._rows) != len(call_state.ids):
            self._begin()
            return
        while self._freed:
            self._list(self._freed.pop())
        if self._num_ended and self._num_ended * _FEW >= len(self._workers):
            self._num_ended = 0
            self._list_all()
        came = ready.arrived()
        if came or self._held_back:
            self._show([*self._held_back, *came])
        behind, rejected = self._behind(), self._num_rejected()
        if behind != self.seen.behind or rejected != self.seen.num_rejected:
            self.seen.behind, self.seen.num_rejected = behind, rejected
            self._list_all()

    def _look(self) -> None:
        """Find out which workers are away now."""
        if self._num_known == self._state.num_changes:
            return
        self._num_known = self._state.num_changes
        away = self._away()
        if away != self._lost:
            self._lost.clear()
            self._lost.update(away)  # The policy sees it.
            self._ready.is_disturbed = True

    def _away(self) -> set[int]:
        return {j for j, worker in enumerate(self._workers) if self._state.is_away(worker, self.call_state)}

    def _behind(self) -> int:
        """Count the versions that the trainer is behind the one of sequential execution."""
        return self._state.versions.behind(self.call_state.call)

    def _begin(self) -> None:
        """Build the policy's view from scratch."""
        call_state, ready = self.call_state, self._ready
        self._rows = list(call_state.ids)
        self._index = {row: sample for sample, row in enumerate(self._rows)}
        ready.arrived()
        ready.is_disturbed = False
        numbers: dict[int, int] = {}
        groups = [numbers.setdefault(group_key(row), len(numbers)) for row in self._rows]
        members: list[list[int]] = [[] for _ in numbers]
        for sample, group in enumerate(groups):
            members[group].append(sample)
        prompts = [call_state.prompt_of(self._rows[of[0]]) for of in members]
        options = call_state.call.options
        sampling = options.get("sampling")
        seen = Seen(
            self._decode_model(),
            len(self._workers),
            [self._prompt_tokens.get(prompt, 1) for prompt in prompts],
            groups,
            members,
            longest_response(options) if isinstance(sampling, Sampling) else None,
            [self._earlier.get(prompt, ()) for prompt in prompts],
            MoveCost() if self._pace is None else MoveCost(self._pace.move_s, self._pace.prefill_token_s),
            [self._difficulties.get(prompt, "") for prompt in prompts] if self._difficulties else (),
        )
        for row in call_state.done:
            if row in self._index:
                seen.finished[self._index[row]] = self.lengths.setdefault(row, call_state.num_tokens.get(row, 1))
        seen.loads = [0] * len(self._workers)
        for row, j in self._at.items():
            if row in self._index and row not in ready and row not in call_state.done:
                seen.place[self._index[row]] = j
                seen.loads[j] += 1
        if call_state.carry is not None:
            seen.oldest = {self._index[row]: version for row, version in call_state.carry.oldest.items() if row in self._index}
        seen.lost, seen.reports, seen.has_reports = self._lost, self._reports, self.policy.needs_reports
        lengths = self._state.known_lengths
        seen.known = None if lengths is None else [lengths(row) for row in self._rows]
        seen.tokens_so_far = lambda sample: self._tokens.get(self._rows[sample], 0)
        wanted = call_state.refill.count if call_state.refill is not None else len(members)
        seen.num_wanted = num_wanted(options, len(members)) if is_cut(options) else wanted
        seen.behind, seen.num_rejected = self._behind(), self._num_rejected()
        self.seen, self.is_begun = seen, True
        self._hands: list[deque[int]] = [deque() for _ in self._workers]
        self._open: list[tuple[int, int]] = []
        self._is_open = [False] * len(self._workers)
        self._held_back: list[int] = []
        shown = self._allowed(list(ready))
        seen.waiting = OrderedDict.fromkeys(self._index[row] for row in shown)
        self.policy.begin(seen)
        self._list_all()

    def _decode_model(self) -> DecodeModel:
        most, pace = max(self.call_state.stage.chunk, 1), self._pace
        if pace is not None and pace.max_running:
            most = min(most, pace.max_running)  # An instance holds more episodes than it decodes at once.
        return DecodeModel(max_batch=most) if pace is None else DecodeModel(max(pace.step_s, _LEAST_STEP_S), pace.sample_s, most)

    def _show(self, rows: Sequence[int]) -> None:
        shown = [self._index[row] for row in self._allowed(rows) if row in self._ready]
        if shown:
            self.seen.waiting.update(dict.fromkeys(shown))
            self.policy.added(shown)
            self._list_all()

    def _allowed(self, rows: Sequence[int]) -> Sequence[int]:
        """Filter rows to prompts that a refill has allowed so far and that channels have room for; keep the others for later."""
        refill = self.call_state.refill
        shown = rows if refill is None else [row for row in rows if SampleId.unpack(row).prompt < refill.num_allowed]
        if self._state.credits.is_limited(self.call_state):
            shown = self._state.credits.admit(self.call_state, shown)
        left = set(shown)
        self._held_back = [row for row in rows if row not in left] if len(shown) < len(rows) else []
        return shown

    def _num_rejected(self) -> int:
        return self.call_state.refill.num_rejected if self.call_state.refill is not None else 0

    # ---- assigning

    def _room(self, j: int) -> int:
        return self._workers[j].room_for(self.call_state.stage.chunk) - len(self._hands[j])

    def _list(self, j: int) -> None:
        """List an instance that may take more."""
        if not self._is_open[j] and j not in self._lost and self._room(j) > 0:
            self._is_open[j] = True
            heapq.heappush(self._open, (self.seen.loads[j], j))

    def _list_all(self) -> None:
        for j in range(len(self._workers)):
            self._list(j)

    def _give(self, sample: int, j: int) -> None:
        seen = self.seen
        del seen.waiting[sample]
        self._hands[j].append(sample)
        seen.place[sample] = j
        seen.loads[j] += 1
        self.policy.started(sample, j)

    def _keeps_together(self, sample: int) -> bool:
        """Whether a group that the policy hands out in one go stays on one instance, where its prompt is prefilled once.

        Only if there are groups for all.
        """
        seen = self.seen
        return len(seen.groups) >= seen.num_alive * len(seen.members[seen.groups[sample]])

    def _deal(self) -> None:
        """Assign samples until the policy assigns none: each assignment may change its mind about instances that it left out."""
        while self._deal_to_open() and self.seen.waiting and len(self._workers) <= _FEW:
            self._list_all()

    def _deal_to_open(self) -> bool:
        """Assign samples to the listed instances; return whether there were any."""
        seen = self.seen
        dealt: set[int] = set()
        while self._open and seen.waiting:
            load, j = heapq.heappop(self._open)
            if j in self._lost or self._room(j) <= 0:
                self._is_open[j] = False
                continue
            if load != seen.loads[j]:
                heapq.heappush(self._open, (seen.loads[j], j))
                continue
            sample = self.policy.next_sample(j)
            if sample is None and self._is_forced:
                sample = next(iter(seen.waiting))
                self.num_forced += 1
            if sample is None:
                self._is_open[j] = False
                continue
            if sample not in seen.waiting:
                raise SpecError(f"the policy {self.policy.name} starts sample {sample}, which does not wait")
            self._is_forced = False
            self._give(sample, j)
            dealt.add(j)
            while self._keeps_together(sample):  # Even beyond its room; they wait in the engine.
                following = self.policy.next_sample(j)
                if following is None or following not in seen.waiting or seen.groups[following] != seen.groups[sample]:
                    break
                self._give(following, j)
            heapq.heappush(self._open, (seen.loads[j], j))
        self._dealt |= dealt
        return bool(dealt)


_ANSWERS_KEPT = 16
"""Lengths kept for each prompt, for later epochs."""


@final
class Policies:
    """The scheduling policies of a run: which the plan names, which serve a generation or are free, and what answers they have seen."""

    def __init__(self, plan: Plan) -> None:
        """
        Raises:
            SpecError: there is no such policy or predictor.
        """
        self.names = of_scheduling(plan.policies)
        """None: first come, first served."""
        self.predictor = plan.predictor
        self.difficulty = plan.difficulty
        self.paces = {pace.role: pace for pace in plan.paces}
        self.of_call: dict[int, PolicyDispatch] = {}
        """Generate call -> its policy and queues, from when its rows are known until it is over."""
        self.free: dict[str, list[SchedulingPolicy]] = {}
        """Role -> policies that serve no call now, with what they have learned."""
        self.earlier: dict[tuple[str, str], list[int]] = {}
        """Role and prompt -> lengths of its answers."""
        self.moving: dict[str, dict[int, _Move]] = {}
        """Worker that was asked to stop episodes that wait there -> these, each with the worker where it is to go on."""
        if self.names:
            make_policies(self.names, plan.predictor)  # Refuses wrong names at the start.


@final
class PolicyDispatches:
    """Creates and ends the policy dispatches of generate calls, and tells them what has happened."""

    def __init__(self, state: PolicyState) -> None:
        self._state = state
        self._policies = state.policies

    def begin(self, call_state: CallState) -> None:
        """Create the policy dispatch of a generation whose rows are known now."""
        if not self._policies.names:
            return
        role = call_state.call.role
        free = self._policies.free.setdefault(role, [])
        policy = free.pop() if free else make_policies(self._policies.names, self._policies.predictor)
        call_state.ready = Ready()
        texts = self._said(call_state, "prompt") if self._policies.earlier else {}
        earlier = {row: self._policies.earlier.get((role, text), ()) for row, text in texts.items()}
        difficulty, embeddings = self._policies.difficulty, self._embeddings(call_state)
        difficulties = self._said(call_state, difficulty) if difficulty not in ("", PREFILL) else {}
        dispatch = PolicyDispatch(self._state, call_state, policy, earlier, self._policies.paces.get(role), difficulties, embeddings)
        self._policies.of_call[call_state.call.ordinal] = dispatch

    def _embeddings(self, call_state: CallState) -> Embeddings | None:
        """The embeddings of a generation's prompts, if it goes by them and its prompts are all there when it begins."""
        prompts = call_state.call.input("prompts")
        if self._policies.difficulty != PREFILL or "agent" in call_state.call.options or prompts is None:
            return None
        return Embeddings(call_state) if self._state.calls[prompts.call].call.engine == "source" else None

    def embedded(self, worker: str, task: m.EmbedPrompts, embeddings: Sequence[Sequence[float]]) -> None:
        """Record embeddings of prompts that a worker has computed; empty if it could not."""
        dispatch = self._policies.of_call.get(task.call)
        if dispatch is not None and dispatch.embeddings is not None:
            dispatch.embeddings.came(worker, embeddings)
            if dispatch.embeddings.are_known:
                self._state.ready_workers.wake_role(dispatch.call_state.call.role)

    def over(self, call_state: CallState) -> None:
        """End a generation that is done or failed, and remember the lengths of its answers."""
        dispatch = self._policies.of_call.pop(call_state.call.ordinal, None)
        if dispatch is None:
            return
        dispatch.over()
        self._policies.free[call_state.call.role].append(dispatch.policy)
        texts = self._said(call_state, "prompt")
        for row, length in dispatch.lengths.items():
            text = texts.get(call_state.prompt_of(row))
            if text is not None:
                known = self._policies.earlier.setdefault((call_state.call.role, text), [])
                known.append(length)
                del known[:-_ANSWERS_KEPT]

    def ended(self, call_state: CallState, ids: Iterable[int], lengths: Iterable[int]) -> None:
        """Record that samples of a call are done, and how many tokens each has generated."""
        dispatch = self._policies.of_call.get(call_state.call.ordinal)
        if dispatch is not None:
            for row, length in zip(ids, lengths, strict=True):
                dispatch.ended(row, length)

    def gave_up(self, call_state: CallState) -> None:
        """Drop a generation's late samples."""
        dispatch = self._policies.of_call.get(call_state.call.ordinal)
        if dispatch is not None:
            dispatch.gave_up(call_state.dropped)
            self._state.ready_workers.wake_role(call_state.call.role)  # What is left is dealt anew.

    def reported(self, worker: str, message: m.Load) -> None:
        """Record an engine's load, and preempt samples that policies want to move."""
        load = Load(message.num_running, message.num_queued, message.kv_used, message.kv_capacity)
        for dispatch in self._policies.of_call.values():
            if dispatch.call_state.call.role == message.role:
                dispatch.reported(worker, load, zip(message.ids, message.num_tokens, strict=True))
                for name, rows in dispatch.moves().items():
                    self._state.send(name, m.Preempt(dispatch.call_state.call.ordinal, rows))

    def preempted(self, message: m.Preempted) -> None:
        """Requeue preempted samples: at the worker where their policy wants them, if that is still there, else anywhere."""
        state = self._state
        call_state = state.calls.get(message.call)
        for row, number in zip(message.ids, message.tasks, strict=True):
            if not state.tasks.preempted(number, row):
                continue
            state.samples_ended(number, 1)
            if call_state is None or call_state.is_over or row in call_state.done or row in call_state.dropped:
                continue
            if call_state.carry is not None:
                call_state.carry.requeued([row], call_state.prefixes)
            dispatch = self._policies.of_call.get(message.call)
            to = dispatch.preempted(row) if dispatch is not None else None
            if to is None:
                state.requeue(call_state, [row])
            else:
                call_state.num_begun -= 1
                state.requeue(call_state, [], has_more=True)
                state.ready_workers.wake(to)

    def lost(self, worker: str) -> None:
        for dispatch in self._policies.of_call.values():
            dispatch.lost(worker)

    def trained(self, role: str) -> None:
        """Ask the role's workers again, since a policy may have waited for the new version of the weights."""
        if self._policies.names:
            self._state.ready_workers.wake_role(role)

    def deal(self, call_state: CallState) -> None:
        """Assign more samples of a generation of which some have ended or come, if its first ones were assigned before."""
        dispatch = self._policies.of_call.get(call_state.call.ordinal)
        if dispatch is not None and dispatch.is_begun and call_state.has_rows_to_begin:
            self._state.ready_workers.wake_all(dispatch.deal())

    def force(self) -> bool:
        """Overrule policies that hold samples back, since no task is in flight; return whether one did."""
        held = [p for p in self._policies.of_call.values() if p.call_state.has_rows_to_begin and p.force()]
        for dispatch in held:
            self._state.ready_workers.wake_role(dispatch.call_state.call.role)
        return bool(held)

    def _said(self, call_state: CallState, column: str) -> dict[int, str]:
        """Read a column of the datasets for each prompt row, as text."""
        found: dict[int, str] = {}
        batches: dict[int, Batch | None] = {}
        for row in call_state.prompt_rows:
            source = SampleId.unpack(row)
            if source.call not in batches:
                drawn = self._state.calls.get(source.call)
                rows = drawn.call.options.get("rows") if drawn is not None else None
                batches[source.call] = rows if isinstance(rows, Batch) and column in rows else None
            batch = batches[source.call]
            if batch is not None and source.prompt < len(batch):
                found[row] = _item(batch, column, source.prompt)
        return found


@final
class EpisodeMoves:
    """Moves episodes that wait for an engine to instances whose batch has room, where no policy places them.

    An episode stays where its context is, unless waiting there is expected to take longer than moving it and reading again what the cache
    there has of it. Of n that wait, the k-th waits until k turns have ended, of which `num_slots` are decoded at once:

        k / num_slots * turn_tokens * (step_s + num_slots sample_s)  >  (move_s + num_cached * prefill_token_s) * 2 ** num_moves

    Each move of an episode makes the next one twice as dear, so that none goes to and fro between instances in which it waits, since the
    contexts there are larger than its own. The last in the queue goes first. An instance gets no more episodes than it decodes at once, nor
    more than its cache has room for if all there have contexts alike; it may have none of its own begun. An instance is asked once at a
    time, and stops only what still waits. Where an episode goes on it stands in the queue as one that has waited there as long.
    """

    def __init__(self, state: PolicyState) -> None:
        self._state = state
        self._policies = state.policies

    def queued(self, name: str, message: m.Queued) -> None:
        """Stop episodes of a worker that should go on elsewhere."""
        if self._policies.names or name in self._policies.moving:
            return
        known = self._state.calls  # A call that is over may be forgotten while its samples are being stopped.
        of_call = {row: task.message.call for _, task in self._state.tasks.of(name) if task.message.call in known for row in task.rows}
        for ordinal in sorted({of_call[row] for row in message.ids if row in of_call}):
            call_state = known[ordinal]
            rows = [place for place, row in enumerate(message.ids) if of_call.get(row) == ordinal]
            if moving := self._chosen(call_state, name, message, rows):
                self._policies.moving[name] = moving
                self._state.send(name, m.Preempt(ordinal, list(moving), queued=True))
                return

    def _chosen(self, call_state: CallState, name: str, message: m.Queued, places: Iterable[int]) -> dict[int, _Move]:
        """Choose where episodes go on, of those at these places of the message."""
        free = {} if call_state.is_over or call_state.ready else self._free(call_state, name, message)
        pace = self._policies.paces.get(message.role, _DEFAULT_PACE)
        each_s = message.turn_tokens * (pace.step_s + message.num_slots * pace.sample_s) / message.num_slots
        moving: dict[int, _Move] = {}
        for place in places:
            wait_s = (len(message.ids) - place) * each_s
            num_moves = min(call_state.num_moves.get(message.ids[place], 0), _MOST_MOVES)
            cost_s = (pace.move_s + message.num_cached[place] * pace.prefill_token_s) * 2**num_moves
            if not free or wait_s <= cost_s:
                continue
            to = max(free, key=lambda one: free[one])
            moving[message.ids[place]] = _Move(to, message.waits_us[place])
            free[to] -= 1
            if not free[to]:
                del free[to]
        return moving

    def _free(self, call_state: CallState, name: str, message: m.Queued) -> dict[str, int]:
        """How many episodes of a call each instance could decode at once, beside those that it has or gets."""
        coming = Counter(one.to for of in self._policies.moving.values() for one in of.values())
        most = message.num_slots
        if message.kv_capacity:
            mean = sum(message.contexts) / len(message.contexts)
            most = min(most, int(message.kv_capacity / max(mean, 1.0)))
        found = {}
        for worker_name in call_state.stage.workers:
            worker = self._state.workers[worker_name]
            room = min(most - worker.num_running, worker.room_for(call_state.stage.chunk)) - coming[worker_name]
            if worker_name != name and room > 0 and self._state.can_begin(worker, call_state):
                found[worker_name] = room
        return found

    def preempted(self, name: str, message: m.Preempted) -> list[tuple[CallState, WorkerState, list[int]]]:
        """Note what a worker has stopped; the episodes that are to go on at once, by call and worker."""
        if message.ids and not self._policies.moving.get(name, {}).keys() & set(message.ids):
            return []  # They were stopped for another reason, and what was asked is to be answered yet.
        moving = self._policies.moving.pop(name, {})
        call_state = self._state.calls.get(message.call)
        if not moving or call_state is None:
            return []
        found: dict[str, list[int]] = {}
        for row in message.ids:
            if row in moving and row in call_state.ready:
                call_state.num_moves[row] = call_state.num_moves.get(row, 0) + 1
                call_state.waits_us[row] = moving[row].waited_us
                found.setdefault(moving[row].to, []).append(row)
        return [(call_state, self._state.workers[to], rows) for to, rows in found.items()]

    def lost(self, name: str) -> None:
        self._policies.moving.pop(name, None)


def _item(batch: Batch, name: str, row: int) -> str:
    """A cell as text; a list of numbers as JSON."""
    column = batch.columns[name]
    cell = column.item(row) if isinstance(column, Ragged) else column[row]
    return str(cell.tolist() if isinstance(cell, np.ndarray) else cell)
