"""A virtual worker: it is told what a real one is told, and says what a real one says, when a real one would.

Its tasks go one after the other, each when its rows are here; a generation only begins in turn, and then goes on beside the others. It
mirrors `m2flow.micro.work.worker`, message by message, and knows nothing that the scheduler does not tell it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, final

from m2flow.channels.weights import Manifest
from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.costs.terms import FunctionCost, TrainCost
from m2flow.micro.record.decisions import Stretch
from m2flow.micro.scheduling.leases import ROLLOUT
from m2flow.micro.scheduling.roster import worker_of
from m2flow.micro.scheduling.staleness import is_time_dependent
from m2flow.micro.simulation.clock import Clock
from m2flow.micro.simulation.decoding import Decoding, Life, report_of
from m2flow.micro.simulation.drawn import Drawn
from m2flow.micro.simulation.machines import Machine
from m2flow.micro.simulation.pacing import Kind
from m2flow.micro.simulation.rows import Rows
from m2flow.micro.work.store import stopped_at
from m2flow.samples import group_key
from m2flow.spec import RunSettings


class Surroundings(Protocol):
    """What a worker has around it."""

    clock: Clock
    rows: Rows
    drawn: Drawn

    def call(self, ordinal: int) -> Call: ...

    def num_tokens(self, packed: int) -> int:
        """Of a row that is there: a sample's prompt and response, a dataset's texts."""

    def function_cost(self, call: Call) -> FunctionCost | None:
        """None: it takes no time that counts."""

    def say(self, worker: str, message: m.Heard) -> None:
        """The controller hears it when the worker has done what it does now."""

    def started(self, worker: str, task: m.Task, seconds: float) -> None:
        """A task that is no generation begins, and will take so long."""

    def ended(self, worker: str, task: m.Task) -> None: ...

    def stopped(self, packed: int) -> tuple[Stretch, ...]:
        """The tokens of a sample that was stopped, when it was."""

    def is_lost(self, process: str) -> bool:
        """Whether this process of a worker is gone; another one may have taken its place."""

    def keep(self, ids: Iterable[int], stretches: Iterable[tuple[Stretch, ...]]) -> None:
        """Samples were stopped and may go on."""

    def generating(self, worker: str, num_lives: int) -> None:
        """How many samples the worker has, waiting ones too, has changed by so many."""

    def pace(self, worker: str, kind: Kind) -> float:
        """How many times as long as alone this kind of work takes there now."""


@final
class VirtualWorker:
    """One of the plan's."""

    def __init__(self, machine: Machine, around: Surroundings, *, report_every: int = 0) -> None:
        """
        Args:
            report_every: turns of decoding after which it says how full its engines are; 0: never.
        """
        self.machine = machine
        self._report_every = report_every
        self._is_reporting = False
        self.name = machine.worker
        self.decoding = Decoding(machine.decode)
        self.lives: list[Life] = []
        """All samples that it ever had, for the report."""
        self.is_lost = False
        self._around = around
        self._queue: deque[m.Task] = deque()
        self._current: m.Task | None = None
        self._left_to_do_s = 0.0
        """Of the task in hand, alone, from `_since_s` on, when its pace last changed."""
        self._since_s = 0.0
        self._pace = 1.0
        self._num_begun = 0
        self._generations: dict[int, tuple[m.Generate, dict[int, Life]]] = {}
        self._alarm = 0
        self._turn = ROLLOUT
        """Of its lease, that has the devices here."""
        self._held: dict[str, int] = {}
        self._finished: list[Life] = []
        """Samples that wait for others, to leave together."""
        self._left_s = float("-inf")
        self._handlers: Mapping[type, Callable[[m.Task], float]] = {
            m.Perform: self._perform_s,
            m.Accumulate: self._accumulate_s,
            m.Apply: lambda task: self._trainer(task).optimizer_s,
            m.CopyWeights: lambda task: machine.copy_s(str(around.call(task.call).options["source"]), self._turn),
            m.PublishWeights: lambda task: 0.0,
            m.LoadWeights: lambda task: machine.sync_s.get(task.role, 0.0),  # type: ignore[attr-defined]
            m.Save: lambda task: 0.0,
            m.Condense: lambda task: 0.0,
            m.Switch: lambda task: machine.switch_s(self._turn, task.to),  # type: ignore[attr-defined]
        }

    def told(self, message: m.ToWorker) -> None:
        """A message of the controller."""
        if self.is_lost:
            return
        around = self._around
        match message:
            case m.Push(call=call, ids=ids, to=to):
                around.rows.send(call, ids, self.name, worker_of(to), around.clock.now_s, around.num_tokens)
            case m.Abort(call=call, keeps=keeps):
                if keeps:
                    self._stop(call)
                self._abort(call)
            case m.Yield(call=call, ids=ids):
                self._yield(call, ids)
            case m.Adopt(call=call, drawn=drawn, ids=ids, forward_to=forward_to):
                around.rows.adopted(call, drawn, ids, self.name)
                for place in forward_to:
                    around.rows.send(call, ids, self.name, worker_of(place), around.clock.now_s, around.num_tokens)
            case m.Forget(call=call):
                around.rows.forget(call, self.name)
                around.rows.forget(stopped_at(call), self.name)
            case m.Task():
                self._queue.append(message)
                self._wake()

    def flushed(self, every_tokens: int = RunSettings().flush_tokens) -> list[m.Flushed]:
        """What it has written down of its running samples, each time that one had got so many tokens more."""
        around, found = self._around, dict[int, list[tuple[int, tuple[Stretch, ...]]]]()
        turns = self.decoding.turns_at(around.clock.now_s) if self.machine.decode else 0.0
        for task, left in self._generations.values():
            for life in left.values():
                life.num_kept = int(life.tokens_until(turns)) // every_tokens * every_tokens
                if life.num_kept:
                    found.setdefault(task.call, []).append((life.id, life.stretches(life.num_kept)))
        return [m.Flushed(call, *self._kept(call, samples), ("", 0, 0, 0)) for call, samples in found.items()]

    def lose(self) -> None:
        """The machine fails: nothing that it does is heard of any more."""
        self.is_lost = True
        self._queue.clear()
        lives = [life for _, left in self._generations.values() for life in left.values()]
        for life in lives:
            life.is_wasted = True
        self.decoding.give_up(lives, self._around.clock.now_s)
        self._around.generating(self.name, -len(lives))
        self._generations.clear()
        self._alarm += 1
        if self._current is not None:
            task, self._current = self._current, None
            self._around.ended(self.name, task)

    def come_back(self) -> None:
        """A new process, which has nothing."""
        self.is_lost = False
        self._turn = ROLLOUT
        self._held.clear()
        self._finished.clear()

    # Tasks

    def _wake(self) -> None:
        """Begin what can begin."""
        around, clock = self._around, self._around.clock
        while self._queue and self._current is None and not self.is_lost:
            task = self._queue[0]
            ready_s = self._ready_s(task)
            if ready_s > clock.now_s:
                clock.at(ready_s, self._wake)
                return
            self._queue.popleft()
            if isinstance(task, m.Generate):
                self._generate(task)
                continue
            seconds = self._handlers[type(task)](task)
            self._current = task
            around.started(self.name, task, seconds)
            self.decoding.hold(seconds, clock.now_s)
            self._set_alarm()
            self._left_to_do_s, self._since_s, self._pace = seconds, clock.now_s, around.pace(self.name, self._kind(task))
            self._set_end()

    def paced(self) -> None:
        """What others do may have changed how fast this worker is."""
        around, now_s = self._around, self._around.clock.now_s
        if self.machine.decode:
            self.decoding.set_pace(around.pace(self.name, "rollout"), now_s)
            self._set_alarm()
        if self._current is not None and (pace := around.pace(self.name, self._kind(self._current))) != self._pace:
            self._left_to_do_s = max(self._left_to_do_s - (now_s - self._since_s) / self._pace, 0.0)
            self._since_s, self._pace = now_s, pace
            self._set_end()

    def _kind(self, task: m.Task) -> Kind:
        if task.call >= 0 and self._around.call(task.call).engine == "function":
            return "function"
        return "rollout" if isinstance(task, m.LoadWeights) else "train"

    def _set_end(self) -> None:
        self._num_begun += 1
        number = self._num_begun
        self._around.clock.at(self._since_s + self._left_to_do_s * self._pace, lambda: self._done(number))

    def _done(self, number: int) -> None:
        task = self._current
        if self.is_lost or task is None or number != self._num_begun:
            return
        around = self._around
        result: dict[str, float] | float | None = None
        manifest = None
        if isinstance(task, m.Perform):
            result = self._deliver(task)
        if isinstance(task, m.Apply) and task.is_last:
            result = {}
        if isinstance(task, m.LoadWeights):
            self._held[task.role] = task.version
        if isinstance(task, m.Switch):
            self._turn = task.to
        if isinstance(task, m.PublishWeights):
            manifest = Manifest(f"{task.role}-{task.version}", 0, ())
        around.ended(self.name, task)
        around.say(self.name, m.TaskDone(task.number, result, manifest))
        self._current = None
        self._wake()

    def _ready_s(self, task: m.Task) -> float:
        """When its rows are here."""
        rows = self._around.rows
        if isinstance(task, m.Generate):
            if task.aborted_by >= 0:
                return rows.ready_s(stopped_at(task.aborted_by), task.ids, self.name)
            (prompts,) = (ref.call for name, ref in self._around.call(task.drawn_by).inputs if name == "prompts")
            return rows.ready_s(prompts, task.prompts, self.name)
        if isinstance(task, m.Perform | m.Accumulate):
            call = self._around.call(task.call)
            if isinstance(task, m.Perform) and task.parts:
                return max(rows.ready_s(source, ids, self.name) for source, ids in task.parts.items())
            sources = [ref.call for name, ref in call.inputs if not (isinstance(task, m.Perform) and name in task.values)]
            return max((rows.ready_s(source, task.ids, self.name) for source in sources), default=0.0)
        return 0.0

    def _trainer(self, task: m.Task) -> TrainCost:
        return self.machine.train[self._around.call(task.call).role]

    def _lengths(self, ids: Iterable[int]) -> list[int]:
        return [self._around.num_tokens(row) for row in ids]

    def _accumulate_s(self, task: m.Task) -> float:
        assert isinstance(task, m.Accumulate)
        return self._trainer(task).update.seconds(self._lengths(task.ids))

    def _perform_s(self, task: m.Task) -> float:
        """A forward pass; or the units of a function, shared out over as many hands as the process has."""
        assert isinstance(task, m.Perform)
        call = self._around.call(task.call)
        if call.engine == "train":
            return self._trainer(task).forward.seconds(self._lengths(task.ids))
        cost = self._around.function_cost(call)
        if cost is None:
            return 0.0
        hands = [cost.task_s] * (1 if call.writes else cost.concurrency)
        for unit in self._units(call, task.ids):
            took_s = cost.at(self._around.drawn.uniform("latency", call.role, call.method, min(unit, default=0)))
            heapq.heapreplace(hands, hands[0] + took_s)
        return max(hands)

    def _units(self, call: Call, ids: Sequence[int]) -> list[tuple[int, ...]]:
        if call.granularity.value == "sample":
            return [(row,) for row in ids]
        if call.granularity.value == "group":
            groups: dict[int, list[int]] = {}
            for row in ids:
                groups.setdefault(group_key(row), []).append(row)
            return [tuple(rows) for rows in groups.values()]
        return [tuple(ids)]

    def _deliver(self, task: m.Perform) -> float | None:
        """A call's rows are made; or its one value."""
        around = self._around
        call = around.call(task.call)
        if not call.is_aligned:
            around.drawn.came_to(call, task.ids)
            return 0.0
        ids = around.drawn.left(call, self._units(call, task.ids)) if call.drops else task.ids
        dropped = sorted(set(task.ids) - set(ids))
        has_tokens = call.options.get("gives") in ("rows", "kept", "concat")
        self._report(task.number, task.call, ids, task.forward_to, [around.num_tokens(row) if has_tokens else 1 for row in ids], dropped)
        return None

    def _report(
        self,
        number: int,
        call: int,
        ids: list[int],
        forward_to: Iterable[str],
        num_tokens: list[int],
        dropped: Sequence[int] = (),
        stretches: Sequence[tuple[Stretch, ...]] = (),
        num_generated: Sequence[int] = (),
    ) -> None:
        around = self._around
        now_s = around.clock.now_s
        around.rows.made(call, ids, self.name, now_s)
        has_tokens = dict(zip(ids, num_tokens, strict=True))
        for place in forward_to:
            if not around.is_lost(place):
                around.rows.send(call, ids, self.name, worker_of(place), now_s, lambda row: has_tokens[row])
        blank = [0] * len(ids)
        generated = list(num_generated) or blank
        around.say(self.name, m.Finished(number, call, ids, num_tokens, generated, [], blank, [], None, list(dropped), list(stretches)))

    # Generation

    def _generate(self, task: m.Generate) -> None:
        around = self._around
        role = around.call(task.call).role
        lives: dict[int, Life] = {}
        last_group = -1
        for row in task.ids:
            prefill = around.drawn.prompt_tokens(row) if group_key(row) != last_group else 0  # Siblings share their prompt's cache.
            last_group = group_key(row)
            before = around.stopped(row) if task.aborted_by >= 0 else ()
            had = sum(stretch.num_tokens for stretch in before)
            left = max(around.drawn.response_tokens(row) - had, 1)
            life = Life(row, role, task.call, task.number, left, prefill + had, around.clock.now_s)
            life.version, life.before = self._held.get(role, 0), before
            lives[row] = life
        self.lives += lives.values()
        self._generations[task.number] = (task, lives)
        self._report_later()
        around.generating(self.name, len(lives))
        self.decoding.add(lives.values(), around.clock.now_s)
        self._set_alarm()

    def _report_later(self) -> None:
        """Say how full the engines are after so many turns, as they are now."""
        turn_s = sum(cost.seconds(1) for cost in self.machine.decode.values())
        if self._report_every and not self._is_reporting and self._generations and turn_s:
            self._is_reporting = True
            clock = self._around.clock
            clock.at(clock.now_s + self._report_every * max(self.decoding.turn_s, turn_s), self._report_load)

    def _report_load(self) -> None:
        self._is_reporting = False
        if self.is_lost:
            return
        turns = self.decoding.turns_at(self._around.clock.now_s)
        for role, cost in self.machine.decode.items():
            lives = [life for _, left in self._generations.values() for life in left.values() if life.role == role]
            if lives:
                said = report_of(role, lives, turns, int(cost.max_running * self._around.drawn.mean_tokens))
                self._around.say(self.name, said)
        self._report_later()

    def _set_alarm(self) -> None:
        """Be woken when the next sample ends, unless something changes before."""
        self._alarm += 1
        number, when_s = self._alarm, self.decoding.next_s()
        if when_s is not None:
            self._around.clock.at(when_s, lambda: self._finish(number))

    def _finish(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        clock = self._around.clock
        self._finished += self.decoding.finished(clock.now_s)
        gather_s = max((self.machine.decode[life.role].gather_s for life in self._finished), default=0.0)
        if self.decoding.is_empty or clock.now_s - self._left_s >= gather_s:
            self._hand_over()
        else:
            clock.at(self._left_s + gather_s, self._hand_over)
        self._set_alarm()

    def _hand_over(self) -> None:
        """What has finished leaves, which takes the process some time."""
        leaving, self._finished = [life for life in self._finished if life.task in self._generations], []
        if not leaving or self.is_lost:
            return
        clock, costs = self._around.clock, [self.machine.decode[life.role] for life in leaving]
        self._left_s = clock.now_s
        takes_s = max(cost.handover_s for cost in costs) + sum(cost.leave_s for cost in costs)
        if not takes_s:
            self._leave(leaving)
            return
        self.decoding.hold(takes_s, clock.now_s)
        self._set_alarm()
        clock.at(clock.now_s + takes_s, lambda: self._leave(leaving))

    def _leave(self, leaving: Iterable[Life]) -> None:
        around = self._around
        by_task: dict[int, list[Life]] = {}
        for life in leaving:
            by_task.setdefault(life.task, []).append(life)
        for number, lives in by_task.items():
            if number not in self._generations:
                continue  # They were given up in the meantime.
            task, left = self._generations[number]
            ids = [life.id for life in lives]
            for row in ids:
                del left[row]
            around.generating(self.name, -len(ids))
            stretches = [life.stretches(life.num_tokens) for life in lives] if is_time_dependent(around.call(task.call)) else []
            num_tokens, generated = [around.num_tokens(row) for row in ids], [around.drawn.response_tokens(row) for row in ids]
            self._report(number, task.call, ids, task.forward_to, num_tokens, stretches=stretches, num_generated=generated)
            if not left:
                del self._generations[number]
                around.say(self.name, m.TaskDone(number))

    def _yield(self, call: int, ids: Sequence[int]) -> None:
        """Stop these samples, those that have not finished; what has tokens goes on from them elsewhere."""
        around, turns = self._around, self.decoding.turns_at(self._around.clock.now_s)
        gone = {
            row: (number, left.pop(row))
            for number, (task, left) in self._generations.items()
            for row in (ids if task.call == call else ())
            if row in left and not left[row].is_over
        }
        lives = [life for _, life in gone.values()]
        found = [(life.id, life.stretches(int(life.tokens_until(turns)))) for life in lives if life.tokens_until(turns) >= 1 or life.before]
        self.decoding.give_up(lives, around.clock.now_s)
        around.generating(self.name, -len(lives))
        if found:
            around.say(self.name, m.Aborted(call, *self._kept(call, found), ("", 0, 0, 0)))
        if gone:
            around.say(self.name, m.Yielded(call, list(gone), [number for number, _ in gone.values()]))
        for number in {number for number, _ in gone.values() if not self._generations[number][1]}:
            del self._generations[number]
            around.say(self.name, m.TaskDone(number))
        self._set_alarm()

    def _stop(self, call: int) -> None:
        """Stop what runs for a call; what has tokens is kept, and reported, as is what has finished by now."""
        around, now_s = self._around, self._around.clock.now_s
        done, self._finished = [f for f in self._finished if f.call == call], [f for f in self._finished if f.call != call]
        if done:
            self._leave(done)
        turns = self.decoding.turns_at(now_s)
        found: list[tuple[int, tuple[Stretch, ...]]] = []
        for number in [number for number, (task, _) in self._generations.items() if task.call == call]:
            _, left = self._generations[number]
            kept = [life for life in left.values() if life.tokens_until(turns) >= 1 or life.before]
            for life in kept:
                del left[life.id]
                found.append((life.id, life.stretches(int(life.tokens_until(turns)))))
            self.decoding.give_up(kept, now_s)
            around.generating(self.name, -len(kept))
        if found:
            around.say(self.name, m.Aborted(call, *self._kept(call, found), ("", 0, 0, 0)))

    def _kept(
        self, call: int, samples: Sequence[tuple[int, tuple[Stretch, ...]]]
    ) -> tuple[list[int], list[int], list[int], list[tuple[Stretch, ...]]]:
        """Samples that may go on from here: who they are, all tokens and those generated, and stretches."""
        around = self._around
        ids, stretches = [row for row, _ in samples], [of for _, of in samples]
        around.keep(ids, stretches)
        around.rows.made(stopped_at(call), ids, self.name, around.clock.now_s)
        generated = [sum(stretch.num_tokens for stretch in of) for of in stretches]
        return ids, [around.drawn.prompt_tokens(row) + count for row, count in zip(ids, generated, strict=True)], generated, stretches

    def _abort(self, call: int) -> None:
        """Give up what runs or waits for a call. Its tasks end as done."""
        around = self._around
        for number in [number for number, (task, _) in self._generations.items() if task.call == call]:
            _, left = self._generations.pop(number)
            for life in left.values():
                life.is_wasted = True
            self.decoding.give_up(left.values(), around.clock.now_s)
            around.generating(self.name, -len(left))
            around.say(self.name, m.TaskDone(number))
        for task in [task for task in self._queue if task.call == call]:
            self._queue.remove(task)
            around.say(self.name, m.TaskDone(task.number))
        self._set_alarm()
        self._wake()
