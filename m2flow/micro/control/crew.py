"""The workers' processes: who is up, who is dead, who is started again; and what is said to whom.

    beats, exit codes --check--> Severed to the others --Missing--> WorkerLost --backoff--> a new process --Ready--> WorkerJoined

A worker that has ended is missed at once, one that hangs (`m2flow.micro.control.hanging`) is killed first. What only it had ends the
run, or takes it back to a checkpoint (`StateLost`); else it is started again, after a wait that doubles each time, and what its former
process says or sent does not count. One that does not come up again is gone for good. The controller's thread alone uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

from m2flow.channels.contract import Outbox, Parcel
from m2flow.channels.zeromq import LinkListener
from m2flow.errors import BrokenChannel, DecodeError, M2FlowError, SpecError, StateLost, WorkerError
from m2flow.micro import messages as m
from m2flow.micro.control.census import Census
from m2flow.micro.control.hanging import Watch
from m2flow.micro.control.launcher import Launcher
from m2flow.micro.control.vitals import Vitals
from m2flow.micro.plan import Plan
from m2flow.micro.record.journal import Journal
from m2flow.micro.scheduling.events import CONTROLLER, Event, WorkerJoined, WorkerLost
from m2flow.micro.scheduling.roster import rank_tag, split_rank, tag_of, worker_of
from m2flow.micro.scheduling.scheduler import Scheduler
from m2flow.micro.work.peers import Peers
from m2flow.spec import RunSettings

BEAT = ".beat"
_SETTLES_S = 30.0
"""A worker that dies is missed on its link first, and found to have ended a moment later, which is a long one on a busy machine; on another
host when its agent says so, or has said nothing for long."""
_LONGEST_WAIT_S = 30.0
_IS_WELL_S = 60.0
"""A process that has been up for so long does not count with the next one that dies."""
_LONGEST_TURN_S = 2.0
"""Of the controller's thread: what takes longer is no fault of the workers that were not heard."""


@dataclass(frozen=True)
class _End:
    """Of a process."""

    how: str
    last_words: str
    returns: bool


@dataclass(frozen=True)
class Rollouts:
    """Workers that do nothing but generate."""

    num_up: int
    num_away: int
    """May join."""
    start_s: float
    """That one took to come up, at most."""


@final
class Crew:
    """Of one plan. It is told what comes on the link, and asked now and then (`check`) what the scheduler should know."""

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        launcher: Launcher,
        listener: LinkListener,
        outbox: Outbox,
        scheduler: Scheduler,
        journal: Journal,
        sever: Callable[[str, Mapping[int, Iterable[int]]], Mapping[int, list[int]]],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            sever: drops what the program waits for and a dead process has sent, but these rows; those of these that have not come.
            warn: says something to the user.
        """
        self._warn = warn
        self._settings = settings
        self._launcher = launcher
        self._listener = listener
        self._scheduler = scheduler
        self._journal = journal
        self._sever = sever
        self._num_started = dict.fromkeys([worker.name for worker in plan.workers], 0)
        self._num_ranks = {worker.name: worker.ranks for worker in plan.workers}
        self._addresses: dict[str, str] = {}
        self._peers = Peers(outbox, self._note_dead)
        self._knows: dict[str, set[int]] = {}
        """Who is up -> the calls that were defined there."""
        self._watches: dict[str, Watch] = {}
        self._up_s: dict[str, float] = {}
        self._ends: dict[str, _End] = {}
        """Dead -> how it ended; until it is up again."""
        self._due_s: dict[str, float] = {}
        """Lost -> when it is to be started again."""
        self._starting_s: dict[str, float] = {}
        self._num_deaths: Counter[str] = Counter()
        """In a row, none of them after a long life."""
        self._census = Census()
        self._gone: set[str] = set()
        self._away = {worker.name for worker in plan.workers if worker.is_spare}
        """May join, and run no process."""
        self._leaving: set[str] = set()
        """Were told to, and are not known to be lost yet."""
        self._rollouts = [worker.name for worker in plan.workers if {slot.kind for slot in worker.engines} == {"rollout"}]
        self._samples_elsewhere = any(
            slot.kind == "rollout" for worker in plan.workers if worker.name not in self._rollouts for slot in worker.engines
        )
        self._was_ready = False
        self._began_s = time.monotonic()
        self._start_s = 0.0
        self._checked_s = time.monotonic()
        self.vitals = Vitals(journal.spans, listener.send)

    # The link

    def set_own_address(self, address: str) -> None:
        """Where the controller's inbox is."""
        self._addresses[CONTROLLER] = address

    def heard(self, peer: str, body: bytes) -> tuple[str, m.ToController] | None:
        """Something has come: from whom, and what, if it counts. What is no message, or of none of the workers, is dropped and counted."""
        try:
            return self._heard(peer, body)
        except DecodeError as error:
            self._listener.dropped.add(f"from {peer[:100]!r}: {error.what}")
            return None

    def _heard(self, peer: str, body: bytes) -> tuple[str, m.ToController] | None:
        try:
            tag, rank = split_rank(peer.removesuffix(BEAT))
        except ValueError:
            raise DecodeError("no worker has such a name") from None
        worker = worker_of(tag)
        if worker not in self._num_started:
            raise DecodeError("no worker has that name")
        if tag != self._tag(worker) or (worker in self._ends and worker not in self._starting_s):
            return None
        now_s, watch = time.monotonic(), self._watches.get(worker)
        if watch is not None and not rank:
            watch.seen(now_s)
        if not body:
            return None
        message = m.decode_to_controller(body)
        if not isinstance(message, m.Pulse):
            return worker, message
        self.vitals.heard(worker, peer, message)
        if watch is not None and rank:
            watch.rank_beat(now_s, rank, message.cpu_s)
        elif watch is not None:
            watch.beat(now_s, message.num_turns, message.cpu_s, is_in_users_code=message.is_in_users_code)
        return None

    def tell(self, worker: str, message: m.ToWorker, body_of: Callable[[int], bytes] = lambda call: b"") -> None:
        """Say something to a worker; before its first task on a call, what that is. What is said to a dead one is void.

        Raises:
            BrokenChannel: it lives, and takes nothing.
        """
        self._census.told(worker, message)
        if worker not in self._knows:
            return
        new = [call for call in m.calls_of(message) if call not in self._knows[worker]] if isinstance(message, m.Task) else []
        self._knows[worker].update(new)
        self._say(worker, *[m.Define(call, body_of(call)) for call in new], message)

    def _say(self, worker: str, *messages: m.ToWorker) -> None:
        try:
            self._listener.send(self._tag(worker), *map(m.encode, messages))
        except BrokenChannel:
            deadline = time.monotonic() + _SETTLES_S
            while worker not in self._launcher.ended():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def forget_call(self, ordinal: int) -> None:
        for known in self._knows.values():
            known.discard(ordinal)

    def send(self, tag: str, parcel: Parcel) -> None:
        """Rows from the controller to a process."""
        self._peers.send(tag, parcel)

    def counts(self, parcel: Parcel) -> bool:
        return self._peers.counts(parcel)

    def _note_dead(self) -> None:
        for worker in self._launcher.ended():
            self._peers.sever(self._tag(worker))

    # Up and down

    def came_up(self, worker: str, ready: m.Ready) -> list[Event]:
        """A worker's engines have loaded."""
        self._knows[worker] = set()
        self._up_s[worker] = now_s = time.monotonic()
        self._start_s = max(self._start_s, now_s - self._starting_s.get(worker, self._began_s))
        limits = self._settings
        self._watches[worker] = Watch(
            now_s, hung_after_s=limits.hung_after_s, turn_limit_s=limits.turn_limit_s, num_ranks=self._num_ranks[worker]
        )
        self._addresses[self._tag(worker)] = ready.address
        if not self._was_ready:
            self._was_ready = self._knows.keys() == self._num_started.keys() - self._away
            if not self._was_ready:
                return []
            self._announce()
            return [WorkerLost(spare, how="has not joined") for spare in sorted(self._away)]
        joins = not self._num_deaths[worker]
        del self._ends[worker], self._starting_s[worker]
        self._announce()
        kind = "joined" if joins else "started again"
        self._journal.incident(kind, worker, f"process {self._num_started[worker] + 1}, pid {ready.pid}")
        return [WorkerJoined(worker, self._num_started[worker])]

    @property
    def is_ready(self) -> bool:
        """Whether all have come up once."""
        return self._was_ready

    def check(self) -> list[Event]:
        """What has become of the workers since the last time.

        Raises:
            WorkerError: one died before the run began.
        """
        now_s = time.monotonic()
        pause_s, self._checked_s = now_s - self._checked_s - _LONGEST_TURN_S, now_s
        events: list[Event] = []
        for watch in self._watches.values() if pause_s > 0 else ():
            watch.excuse(pause_s)
        for worker, how in self._launcher.ended().items():
            if worker not in self._gone and (worker not in self._ends or worker in self._starting_s):
                events += self._died(worker, how)
        for worker, watch in list(self._watches.items()):
            how = watch.why_hung(now_s)
            if how:
                self._launcher.blame(worker, watch.silent_rank(now_s))
                events += self._died(worker, how, is_hung=True)
            elif stopped := self._stopped(worker, watch, now_s):
                rank, silent_s = stopped
                self._launcher.blame(worker, rank)
                whose = f"has a rank {rank} that was stopped by a signal" if rank else "was stopped by a signal"
                events += self._died(worker, f"{whose} and gave no sign of life for {silent_s:.0f} s", is_hung=True)
        for worker, since_s in list(self._starting_s.items()):
            if now_s - since_s > self._settings.start_timeout_s:
                events += self._died(worker, f"did not come up in {self._settings.start_timeout_s:.0f} s", is_hung=True)
        for worker, missing in itertools.islice(self._census.done(), 1):  # What the scheduler says of it may still count on the next.
            end = self._ends[worker]
            self._plan_restart(worker, now_s)
            if worker in self._leaving:
                self._leaving.discard(worker)
                self._away.add(worker)
            events.append(WorkerLost(worker, end.returns, missing, end.how, end.last_words))
        for worker in [worker for worker, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[worker]
            self._num_started[worker] += 1
            self._starting_s[worker] = now_s
            self._launcher.restart(worker, self._num_started[worker])
        return events

    def _stopped(self, worker: str, watch: Watch, now_s: float) -> tuple[int, float] | None:
        """A rank of a worker that stands still, and for how long."""
        limit_s = self._settings.stopped_after_s
        silent = [rank for rank in range(self._num_ranks[worker]) if watch.silence_s(now_s, rank) > limit_s]
        found = [rank for rank in self._launcher.stopped(worker) if rank in silent] if silent else []
        return (found[0], watch.silence_s(now_s, found[0])) if found else None

    def said_goodbye(self, worker: str) -> list[Event]:
        """A worker leaves, and nobody has told it to: it failed, and could not say why."""
        return self._died(worker, "ended", is_hung=True)

    @property
    def rollouts(self) -> Rollouts:
        """Who generates, and who could."""
        return Rollouts(sum(worker in self._knows for worker in self._rollouts), len(self._away), self._start_s)

    def scale(self, change: int) -> tuple[list[Event], str]:
        """Have so many rollout workers join, or leave; what the scheduler should know, and what to say to who asked for it.

        Raises:
            SpecError: there are not so many.
        """
        if change >= 0:
            joining = sorted(self._away)[:change]
            if len(joining) < change:
                raise SpecError(
                    f"{len(joining)} more rollout workers can join this run, not {change}",
                    now=f"How many may is in its cluster spec: rollout: {{spare: {change}}}",
                )
            now_s = time.monotonic()
            for worker in joining:
                self._away.discard(worker)
                self._ends[worker], self._num_deaths[worker], self._due_s[worker] = _End("has not joined", "", returns=True), 0, now_s
            return [], f"{', '.join(joining)} will join" if joining else "nothing is to change"
        there = [worker for worker in self._rollouts if worker in self._knows and not self._scheduler.is_vital(worker)]
        most = len(there) if self._samples_elsewhere else max(0, len(there) - 1)
        if -change > most:
            raise SpecError(f"{most} rollout workers can leave this run, not {-change}", now="Somebody must be left to generate.")
        leaving = there[change:]
        events: list[Event] = []
        for worker in leaving:
            self._leaving.add(worker)
            events += self._died(worker, "was told to leave", is_hung=True, may_return=False)
            self._launcher.give_back(worker)
        return events, f"{', '.join(leaving)} left; what they were at goes on elsewhere"

    def answered(self, worker: str, message: m.Missing) -> None:
        self._census.answered(worker, message)

    def why(self, error: M2FlowError) -> M2FlowError:
        """A link is broken: which worker has died, if that is why."""
        ended = [worker for worker in self._launcher.ended() if worker not in self._ends]
        return self._error(ended[0], "ended") if ended else error

    def _died(self, worker: str, how: str, *, is_hung: bool = False, may_return: bool = True) -> list[Event]:
        tag, was_up = self._tag(worker), worker in self._knows
        named = f"{how} (pid {self._launcher.pid(worker)})"
        doing = self._scheduler.running().get(worker)
        if doing and was_up:
            named += f", in the middle of {doing}"
        if is_hung:
            self._launcher.kill(worker)
        self._journal.incident("lost", worker, named)
        if not self._was_ready:
            raise self._error(worker, how)
        self._num_deaths[worker] = 1 + (0 if self._lived_long(worker) else self._num_deaths[worker])
        end = _End(named, self._launcher.log_tail(worker), returns=may_return and self._num_deaths[worker] <= self._settings.restarts)
        self._ends[worker] = end
        for name in (rank_tag(tag, rank) for rank in range(self._num_ranks[worker])):
            for peer in (name, name + BEAT):
                self._listener.forget(peer)
        self._peers.sever(tag)
        if may_return and not self._scheduler.is_vital(worker):
            self._warn(f"the worker {worker} {named}; " + ("it is started again" if end.returns else "it is given up"))
        for known in (self._watches, self._knows, self._starting_s):
            known.pop(worker, None)
        self._addresses.pop(tag, None)
        self.vitals.forget(worker)
        if not was_up:
            self._plan_restart(worker, time.monotonic())
            return [] if end.returns else [WorkerLost(worker, how=named, last_words=end.last_words)]
        if self._scheduler.is_vital(worker):
            return [WorkerLost(worker, how=named, last_words=end.last_words)]
        self._ask_for(worker, tag)
        return []

    def _ask_for(self, worker: str, tag: str) -> None:
        """Ask the others what they have of a dead worker's rows."""
        sent = self._scheduler.sent_by(worker)
        missing = self._sever(tag, sent.get(CONTROLLER, {}))
        for other, message in self._census.begin(worker, tag, sent, list(self._knows)).items():
            self._say(other, message)
        for call, rows in missing.items():
            self._census.not_sent(worker, CONTROLLER, call, rows)
        self._announce()

    def _plan_restart(self, worker: str, now_s: float) -> None:
        if self._ends[worker].returns:
            wait_s = self._settings.restart_wait_s * 2.0 ** (self._num_deaths[worker] - 1)
            self._due_s[worker] = now_s + min(wait_s, _LONGEST_WAIT_S)

    def _lived_long(self, worker: str) -> bool:
        return worker in self._knows and time.monotonic() - self._up_s[worker] > _IS_WELL_S

    def _announce(self) -> None:
        self._peers.announce(self._addresses, {})
        for worker in self._knows:
            self._say(worker, m.Peers(self._addresses))

    def _tag(self, worker: str) -> str:
        return tag_of(worker, self._num_started.get(worker, 0))

    def _error(self, worker: str, how: str) -> WorkerError:
        log = self._launcher.log_path(worker)
        return (StateLost if self._was_ready and self._launcher.has_trainer(worker) else WorkerError)(
            f"the worker {worker} (pid {self._launcher.pid(worker)}) {how}",
            now=f"Samples and rewards up to here are in {log.parent.parent}. Its last words are in {log}.",
            remote=self._launcher.log_tail(worker),
        )

    # The end

    def tell_all_to_stop(self) -> None:
        for worker in self._knows:
            with contextlib.suppress(M2FlowError):  # It is dead already.
                self._listener.send(self._tag(worker), m.encode(m.Stop()))

    def has_left(self, worker: str) -> None:
        """Its last word, as it was told to."""
        self._gone.add(worker)

    @property
    def are_leaving(self) -> bool:
        """Whether somebody who is up has yet to say goodbye, or to die."""
        return bool(self._knows.keys() - self._gone - self._launcher.ended().keys())

    @property
    def leaving(self) -> set[str]:
        """Who has said goodbye, and ends by itself; the others are to be killed."""
        return self._gone
