"""The scheduler among hands (`m2flow.testing.hands`), with a judge of everything that it says: for tests of it and of its policies.

    model = Model(roles, spec, staleness=1, seed=7)
    samples = policy.generate(...)
    model.submit(); model.turn(3); model.hear(3); model.drain()

From when it is made until `close`, a model is the running flow: calls are real ones, recorded by a session. What a hand says is heard in
its order, but when is for the caller, and so is what comes twice. An AssertionError says which rule was broken: a sample in two places,
weights out of a call's window, a device of two owners, rows trained on twice, counts that are not what one gets by counting, calls that
nobody does. Workers die, are missed and come back; trainers do not, since only a checkpoint could help.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import final

from m2flow.errors import StateLost
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.results import Handle
from m2flow.macro.session import Backend, Session, recording
from m2flow.macro.tracing import trace
from m2flow.micro import messages as m
from m2flow.micro.control.census import Census
from m2flow.micro.lowering.lower import Lowering, lower
from m2flow.micro.plan import Stage
from m2flow.micro.record.decisions import Stretch
from m2flow.micro.scheduling.events import (
    CONTROLLER,
    LEDGER,
    CallAdded,
    Dropped,
    Event,
    Forgotten,
    FromWorker,
    Given,
    Late,
    Reject,
    Released,
    Resolve,
    Send,
    Sourced,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.scheduling.roster import worker_of
from m2flow.micro.scheduling.scheduler import Scheduler
from m2flow.micro.scheduling.staleness import window
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec
from m2flow.testing.counting import recount
from m2flow.testing.hands import Hand, Parcel, Shelf
from m2flow.testing.impatience import Impatience

_RECOUNTED_EVERY = 25
"""Events."""


class _Calls(Backend):
    """Keeps what the session records."""

    is_rehearsal = True

    def __init__(self, wait: Callable[[int], None]) -> None:
        self.made: list[Call] = []
        self.released: list[int] = []
        self.calls: dict[int, Call] = {}
        self.wait = wait

    def submit(self, call: Call) -> None:
        self.made.append(call)
        self.calls[call.ordinal] = call

    def release(self, ordinal: int) -> None:
        self.released.append(ordinal)

    def value(self, ordinal: int) -> object:
        """How far a refill has moved a dataset's cursor: Python waits for that, and is told what a rehearsal would be."""
        call = self.calls[ordinal]
        if call.engine == "source":
            return call.options["rows"]
        self.wait(ordinal)
        return call.options["expected"]

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


@final
class Model:
    """One scheduler with its workers."""

    def __init__(self, roles: Flow, spec: ClusterSpec, *, staleness: int = 0, seed: int = 0, deterministic: bool = False) -> None:
        graph, models, _ = trace(roles, {}, steps=1)
        plan = lower(graph, models, spec, deterministic=deterministic)
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(plan, deterministic=deterministic, max_attempts=1 << 30)
        self.calls: dict[int, Call] = {}
        self.stages: dict[int, Stage] = {}
        self.hands = {worker.name: Hand(worker, self.calls) for worker in plan.workers}
        self.resolved: set[int] = set()
        self.rejected: dict[int, int] = {}
        """Failed call -> the one that failed by itself."""
        self.forgotten: set[int] = set()
        self.released: set[int] = set()
        self.num_events = 0
        self._roles = roles.name
        self._leases = {worker.name: worker.lease for worker in plan.workers if worker.lease}
        self._come_ahead = {worker.name for worker in plan.workers for slot in worker.engines if slot.comes_at}
        self._lowering = Lowering(plan, spec)
        self._backend = _Calls(self._wait)
        self._open = contextlib.ExitStack()
        self._session = Session(self._backend, flow=roles.name, staleness=staleness)
        self._open.enter_context(recording(self._session))
        self._steps = self._session.iterate(1 << 30)
        self._impatience = Impatience(random.Random(seed))
        self._shelf = Shelf()
        """What the controller has."""
        self._census = Census()
        self._dead: set[str] = set()
        """Processes."""
        self._dying: list[str] = []
        """Dead, and not missed yet."""
        self._away: list[str] = []
        """Known to be lost, and not back yet."""
        self.is_ended = False
        """What a worker took with it nobody can make again: the run would go on from a checkpoint."""
        self._said: deque[FromWorker] = deque(maxlen=200)
        self._stopped: dict[int, tuple[Stretch, ...]] = {}
        """The tokens of samples that were stopped, as the ledger has them."""
        self._left_out: set[int] = set()
        """Samples that are in no result."""

    def close(self) -> None:
        """End the session."""
        self._steps.close()  # type: ignore[attr-defined]
        self._open.close()

    # What the program does

    def next_step(self) -> None:
        """The program's loop begins, or goes on."""
        self.submit()
        next(self._steps)

    def submit(self) -> None:
        """What the program has made since the last time is lowered as one segment and handed over; then what it let go."""
        calls, self._backend.made[:] = list(self._backend.made), []
        for call, stage in zip(calls, self._lowering.stages(MacroGraph(self._roles, tuple(calls))) if calls else (), strict=True):
            self.calls[call.ordinal], self.stages[call.ordinal] = call, stage
            self.tell(CallAdded(call, stage))
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                ids = rows.ids.tolist()
                self._shelf.put([(call.ordinal, row) for row in ids], CONTROLLER)
                self.tell(Sourced(call.ordinal, ids, [9] * len(ids)))
        released, self._backend.released[:] = list(self._backend.released), []
        self.released.update(released)
        for ordinal in released:
            self.tell(Released(ordinal))

    def look(self, handle: Handle) -> bool:
        """The program waits for a call's rows, which are done; False if they are not."""
        ordinal = handle.ref.call
        is_there = ordinal in self.resolved and self.calls[ordinal].is_aligned
        if is_there:
            self.tell(Wanted(ordinal))
        return is_there

    # What happens elsewhere

    def turn(self, pick: int) -> None:
        """A worker that could do something takes a turn."""
        able = [hand for hand in self.hands.values() if hand.has_something]
        if able:
            hand = able[pick % len(able)]
            hand.turn(self.rng)
            self._put_on_their_way(hand)

    def hear(self, pick: int) -> None:
        """The controller hears what a worker said, the earliest first."""
        speaking = [hand for hand in self.hands.values() if hand.said]
        if speaking:
            hand = speaking[pick % len(speaking)]
            said = hand.said.popleft()
            if isinstance(said, m.Missing):
                self._census.answered(hand.name, said)
                self._lose_those_known()
            else:
                if isinstance(said, m.Aborted):
                    self._stopped.update(zip(said.ids, said.stretches, strict=True))
                self._said.append(FromWorker(hand.name, said))
                self.tell(self._said[-1])

    def die(self, pick: int) -> None:
        """A worker that others can stand in for dies: of what it has said and sent some is lost."""
        able = [hand for hand in self.hands.values() if not hand.is_dead and not self.scheduler.is_vital(hand.name)]
        if not able or self.is_ended:
            return
        hand = able[pick % len(able)]
        hand.is_dead = True
        self._dying.append(hand.name)
        while hand.said and self.rng.random() < 0.5:
            hand.said.pop()
        for other in self.hands.values():
            sent = [parcel for parcel in other.coming if parcel.sender == hand.tag]
            for parcel in sent[self.rng.randint(0, len(sent)) :]:
                other.coming.remove(parcel)

    def miss(self) -> None:
        """The controller misses one that has died."""
        if self._dying and not self.is_ended:
            name = self._dying.pop(0)
            hand, sent = self.hands[name], self.scheduler.sent_by(name)
            hand.said.clear()
            said = [event for event in self._said if event.worker != name]  # What a dead process says does not come, and not again.
            self._said.clear()
            self._said.extend(said)
            self._dead.add(hand.tag)
            missing = self._shelf.sever(hand.tag, sent.get(CONTROLLER, {}))
            others = [other.name for other in self.hands.values() if other.tag not in self._dead]
            for other, message in self._census.begin(name, hand.tag, sent, others).items():
                self.hands[other].inbox.append(message)
            for call, rows in missing.items():
                self._census.not_sent(name, CONTROLLER, call, rows)
            self._lose_those_known()

    def come_back(self) -> None:
        """One that was lost is there again, as a new process."""
        if self._away and not self.is_ended:
            hand = self.hands[self._away.pop(0)]
            incarnation = hand.incarnation + self.rng.choice([1, 1, 2])  # One that died on its way up nobody has known.
            self.hands[hand.name] = Hand(hand.plan, self.calls, incarnation)
            self.tell(WorkerJoined(hand.name, incarnation))

    def _lose_those_known(self) -> None:
        for name, missing in self._census.done():
            self._away.append(name)
            self.tell(WorkerLost(name, returns=True, missing=missing))

    def hear_again(self, pick: int) -> None:
        """Something that was heard is heard once more."""
        if self._said:
            self.tell(self._said[pick % len(self._said)])

    def fail(self, pick: int) -> None:
        """A task on a call that some worker has will fail."""
        tasks = [(hand, number) for hand in self.hands.values() for number in hand.waiting_tasks()]
        if tasks:
            hand, number = tasks[pick % len(tasks)]
            hand.fails.add(number)

    def run(self, num_moves: int) -> None:
        """Turns and hearing, in an order that the seed decides."""
        for _ in range(num_moves):
            if self.is_ended:
                return
            if (late := self._impatience.due()) is not None:
                self.tell(late)
            which = self.rng.random()
            if which < 0.05:
                self.hear_again(self.rng.randrange(1 << 16))
            elif which < 0.1:
                self.come_back() if which < 0.07 else self.miss()
            elif which < 0.5:
                self.turn(self.rng.randrange(1 << 16))
            else:
                self.hear(self.rng.randrange(1 << 16))

    def _wait(self, ordinal: int) -> None:
        self.submit()
        while ordinal not in self.resolved and ordinal not in self.rejected and not self.is_ended:
            assert self._is_moving, f"Python waits for call {ordinal}, and nothing moves any more: " + "; ".join(self.scheduler.waiting())
            self.run(1)

    @property
    def _is_moving(self) -> bool:
        return any(hand.has_something or hand.said for hand in self.hands.values()) or bool(self._dying or self._away)

    def drain(self) -> None:
        """Until nothing moves any more: then nothing may be left to do."""
        self.submit()
        while self._is_moving and not self.is_ended:
            self.run(8)
        if self.is_ended:
            return
        assert self.scheduler.is_idle, "nothing moves any more: " + "; ".join(self.scheduler.waiting())
        left = self.calls.keys() - self.resolved - self.rejected.keys()
        assert not left, f"the calls {sorted(left)} are neither done nor failed, and the scheduler has nothing to do"
        self._check_training()
        recount(self.scheduler, self.hands, self._shelf.rows())

    def end(self) -> None:
        """The program is over and holds nothing that it made: nothing may be kept."""
        self.drain()
        if self.is_ended:
            return
        kept = (
            (self.released & self.resolved) - self.forgotten - self.scheduler._board.lines.needed()
        )  # A later call might take those over.
        assert not kept or self.rejected, f"the calls {sorted(kept)} can't be asked for, and are kept"  # A failure may reach those.
        for hand in self.hands.values():
            rows = {call for call, _ in hand.held_rows()} - self.calls.keys() | {c for c, _ in hand.held_rows() if c in self.forgotten}
            assert not {call for call in rows if call >= 0}, f"{hand.name} keeps rows of {rows}, which nobody can ask for"

    # What the scheduler says

    def tell(self, event: Event) -> None:
        """Have the scheduler handle an event, and carry out what it says."""
        if self.is_ended:
            return
        self.num_events += 1
        try:
            commands = self.scheduler.handle(event)
        except StateLost:
            self.is_ended = True
            return
        for command in commands:
            match command:
                case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == CONTROLLER:
                    assert self._shelf.has(call, ids), "the controller has not these rows"
                    self._send(Parcel(to, CONTROLLER, tuple((call, row) for row in ids)))
                case Send(worker, m.Forget(call=call)) if worker == CONTROLLER:
                    self._shelf.forget(call)
                case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == LEDGER:
                    stopped = {packed: self._stopped[packed] for packed in ids} if call < 0 else {}
                    self._send(Parcel(to, CONTROLLER, tuple((call, row) for row in ids), stopped))
                case Send(worker, message):
                    self._census.told(worker, message)
                    self._impatience.began(message, self.calls.get(getattr(message, "call", -1)))
                    self._told(worker, message)
                case Resolve(call, _):
                    assert call not in self.resolved, f"call {call} is done twice"
                    assert call not in self.rejected, f"call {call} is done after it failed"
                    self.resolved.add(call)
                    self._note_empty_update(self.calls[call])
                case Reject(call, _, root):
                    assert call not in self.resolved, f"call {call} failed after it was done"
                    assert root < self.rejected.get(call, call + 1), f"call {call} fails again, with no earlier reason"
                    self.rejected[call] = root
                case Forgotten(call):
                    assert call not in self.forgotten, f"call {call} is forgotten twice"
                    assert call in self.resolved, f"call {call} is forgotten before it is done"
                    self.forgotten.add(call)
                case Dropped(_, ids) | Late(_, ids):
                    self._left_out.update(ids)
                case Given(_, ids):
                    self._left_out.difference_update(ids)
                case _:
                    pass
        self._check_that_all_were_asked()
        if self.num_events % _RECOUNTED_EVERY == 0:
            recount(self.scheduler, self.hands, self._shelf.rows())

    def _note_empty_update(self, call: Call) -> None:
        """Where there was nothing to train on, the weights are those of the new version without any task."""
        for hand in self.hands.values() if call.engine == "train" and call.writes else ():
            if hand.trained.get(call.role) == call.writes[0].version - 1:
                hand.trained[call.role] = call.writes[0].version
                hand.same.add((call.role, call.writes[0].version))

    def _told(self, name: str, message: m.ToWorker) -> None:
        hand = self.hands[name]
        assert not self.scheduler._board.workers[name].is_lost, f"{name} is lost, and is told {message}"
        if isinstance(message, m.Task):
            if message.call >= 0:
                assert message.call not in self.forgotten, f"a task on call {message.call}, which is forgotten"
                assert message.call not in self.rejected, f"a task on call {message.call}, which failed"
                assert message.call not in self.resolved, f"a task on call {message.call}, which is done"
                assert name in self.stages[message.call].workers, f"call {message.call} has no place on {name}"
            self._check_lease(name, message)
        if isinstance(message, m.Generate):
            self._check_generation(hand, message)
        hand.inbox.append(message)

    def _check_generation(self, hand: Hand, task: m.Generate) -> None:
        assert task.ids, "a task without samples"
        late = self.scheduler._board.calls[task.call].dropped.intersection(task.ids)
        assert not late, f"samples {late} are late, and handed out again"
        for other in (other for other in self.hands.values() if not other.is_dead):
            twice = other.generating().keys() & set(task.ids)
            assert not twice, f"samples {twice} are on {other.name} and go to {hand.name}"
        call = self.calls[task.call]
        n = call.options["n"]
        assert isinstance(n, int)
        most = self.stages[task.call].chunk + n - 1  # The rest of a group goes with its first.
        after = len(hand.generating()) + len(task.ids)
        assert after <= most, f"{hand.name} has {after} samples, and may have {most}"
        oldest, newest = window(call)
        held = next((msg.version for msg in reversed(hand.inbox) if isinstance(msg, m.LoadWeights) and msg.role == call.role), None)
        held = hand.held[call.role] if held is None else held
        assert oldest <= held <= newest, f"call {task.call} may use versions {oldest} to {newest}, and {hand.name} has {held}"

    def _check_lease(self, name: str, task: m.Task) -> None:
        """Of the workers that share devices only one kind works; a switch finds nobody at work."""
        lease = self._leases.get(name)
        if lease is None or (isinstance(task, m.Perform) and self.calls[task.call].engine == "function"):
            return
        kind = "switch" if isinstance(task, m.Switch) else self._kind(task)
        for other in (hand for hand in self.hands.values() if self._leases.get(hand.name) == lease and not hand.is_dead):
            for under_way in other.under_way():
                at_work = "switch" if isinstance(under_way, m.Switch) else self._kind(under_way)
                if {kind, at_work} == {"switch", "rollout"} and self._come_ahead & {name, other.name}:
                    continue  # A trainer that comes ahead, beside samples that were there before.
                assert at_work == kind, f"{kind} work for {name} while {other.name} has {at_work} work"

    def _kind(self, task: m.Task) -> str:
        if isinstance(task, m.Generate | m.LoadWeights | m.Condense):
            return "rollout"
        return "function" if task.call >= 0 and self.calls[task.call].engine == "function" else "train"

    def _check_that_all_were_asked(self) -> None:
        """Only those are asked who may have something new to do; nobody else has."""
        for worker in self.scheduler._board.workers.values():
            assert self.scheduler._offer(worker) is None, f"{worker.name} was not asked"
        for lease in self.scheduler._board.leases.values():
            assert not self.scheduler._next_turn(lease), f"{lease.name} was not asked for"

    def _check_training(self) -> None:
        """Updates that are done have trained on each of their rows once an epoch, in no other epoch, and on nothing else."""
        trained = Counter(row for hand in self.hands.values() for row in hand.accumulated)
        twice = [row for row, count in trained.items() if count > 1]
        assert not twice, f"trained on twice in an epoch: {twice[:3]}"
        by_call: dict[int, dict[int, set[int]]] = {}
        for call, epoch, row in trained:
            by_call.setdefault(call, {}).setdefault(epoch, set()).add(row)
        for call, epochs in by_call.items():
            wanted = self.calls[call].options["epochs"]
            assert all(row not in self._left_out for rows in epochs.values() for row in rows), (
                f"call {call} trained on what is in no result"
            )
            if call in self.resolved:
                assert sorted(epochs) == list(range(int(str(wanted)))), f"call {call} trained in the epochs {sorted(epochs)} of {wanted}"
                assert all(rows == epochs[0] for rows in epochs.values()), f"call {call} trained on other rows in another epoch"

    # Rows

    def _put_on_their_way(self, hand: Hand) -> None:
        parcels, hand.parcels[:] = list(hand.parcels), []
        for parcel in parcels:
            self._send(parcel)

    def _send(self, parcel: Parcel) -> None:
        if parcel.to == CONTROLLER:
            self._shelf.put(parcel.rows, parcel.sender)
        elif self.hands[worker_of(parcel.to)].tag == parcel.to:
            self.hands[worker_of(parcel.to)].coming.append(parcel)
