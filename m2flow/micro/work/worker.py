"""A worker: it does the tasks that the controller gives it, on rows that other workers send it.

    controller --tasks--> Worker --rows--> other workers
                          Worker --Finished, TaskDone--> controller

It works in turns: read what has come, decode one token of what generates, do the next task if its rows are here. So tasks and
generation interleave, and an abort takes effect between two tokens. Its links and channels are given to it: ZeroMQ's by
`m2flow.micro.work.process`, in-memory ones by `m2flow.testing.world`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from m2flow.channels.contract import ControlLink, Inbox, Outbox, Parcel
from m2flow.errors import InternalError, M2FlowError, unexpected
from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.bodies import call_of
from m2flow.micro.record.decisions import stretches_of
from m2flow.micro.work import performing, training
from m2flow.micro.work.gang import MakeTrain, make_own_train
from m2flow.micro.work.gauges import Gauges
from m2flow.micro.work.growing import Generation
from m2flow.micro.work.idling import Idling
from m2flow.micro.work.notebook import Notebook
from m2flow.micro.work.peers import Peers
from m2flow.micro.work.reporting import Reports, finished
from m2flow.micro.work.reward_parts import without_parts
from m2flow.micro.work.settings import WorkerSettings
from m2flow.micro.work.store import RowStore, stopped_at
from m2flow.micro.work.workbench import Workbench
from m2flow.observe.recorder import Recorder, now_ns
from m2flow.observe.spans import SpanName
from m2flow.samples import Batch

_FLUSH_SPANS_NS = 250_000_000


class Worker:
    """What a worker does, on whatever links and channels it is given. `open`, then `turn` until `is_stopping`, then `close`."""

    def __init__(
        self, settings: WorkerSettings, link: ControlLink, inbox: Inbox, outbox: Outbox, make_train: MakeTrain = make_own_train
    ) -> None:
        self.settings = settings
        self.is_stopping = False
        self.recorder = Recorder(settings.name)
        self.bench = Workbench(
            settings.engines,
            settings.models,
            settings.engine_settings(),
            run_dir=settings.run_dir,
            run_seed=settings.run_seed,
            recorder=self.recorder,
            shared_prefix=settings.shared_prefix,
            gather_s=settings.gather_s,
            restore=settings.restore,
            worker=settings.name,
            weights=settings.weights.with_keys(settings.keys),
            make_train=make_train,
            takes_turns=settings.takes_turns,
            record_every=settings.record_every,
        )
        self._link = link
        self._inbox = inbox
        self._notebook = Notebook(
            f"{settings.run_dir}/segments", settings.name, every_tokens=settings.flush_tokens, every_s=settings.flush_s
        )
        self._store = RowStore()
        self._calls: dict[int, Call] = {}
        self._peers = Peers(outbox, self._hear, knows_all=not settings.incarnation)
        self._gauges, self._idling = Gauges(self.recorder, self.bench), Idling(self.recorder)
        self._heard: deque[m.ToWorker] = deque()
        """What the controller has said and is not done yet."""
        self.num_turns = 0
        self.is_in_users_code = False
        """A user's function has been called, and takes as long as it takes."""
        self._queue: deque[m.Task] = deque()
        self._reports = Reports(self._attempt)
        self._generations: dict[int, Generation] = {}
        self._task_of: dict[int, int] = {}
        self._flushed_ns = 0
        self._num_turns = 0

    def open(self) -> None:
        """Load the engines, then say that we are here."""
        self.bench.open()
        self._send(m.Ready(self._inbox.open(), os.getpid()))

    @property
    def has_work(self) -> bool:
        """Whether `turn` would do more than read what has come."""
        return self.bench.num_unfinished > 0 or self._reports.are_due or self._next_is_ready()

    def turn(self) -> None:
        """Read what has come, decode one token of everything that generates, do one task."""
        self.num_turns += 1
        if not self._reads_meanwhile():
            self._read()
            while self._heard:
                self._take(self._heard.popleft())
        if self.bench.num_unfinished:
            self._idling.works()
            self._decode()
        self._report_load()
        if self._next_is_ready():
            self._idling.works()
            self._do(self._queue.popleft())
        else:
            self._reports.make()
        if not self._reads_meanwhile():
            self.flush_spans(force=False)

    def _reads_meanwhile(self) -> bool:
        """Whether the next task can begin at once, and there is time for all else while it runs (`_meanwhile`)."""
        task = self._queue[0] if self._queue and not self._heard and not self.bench.num_unfinished else None
        return isinstance(task, m.Perform) and self._calls[task.call].engine == "function" and self._next_is_ready()

    def _read(self) -> None:
        """Rows that peers have sent are taken in; what the controller has said is only heard."""
        for parcel in self._inbox.take():
            if self._peers.counts(parcel):
                self._store.put(parcel.call, parcel.batch, parcel.sender)
        if news := self._inbox.dropped.news():
            print(f"{self.settings.name} {news}", flush=True)
            self.recorder.count("messages dropped", self._inbox.dropped.num, now_ns())
        self._heard += map(m.decode_to_worker, self._link.receive(0.0))

    def rest(self) -> None:
        """There is nothing to do now; to be called before somebody waits for that."""
        self._idling.waits(self._calls.get(self._queue[0].call) if self._queue else None)

    def _report_load(self) -> None:
        """Say how full the engines are, every so many turns of decoding."""
        if not self.settings.report_every or not self.bench.num_unfinished:
            return
        self._num_turns += 1
        if self._num_turns % self.settings.report_every == 0:
            for role, (load, tokens) in self.bench.occupancy().items():
                self._send(m.Load(role, *load[:4], list(tokens), list(tokens.values())))

    def close(self) -> None:
        """Free the engines; send the last spans and goodbye."""
        self._reports.make()
        self.bench.close()
        self._notebook.close()
        self.flush_spans(force=True)
        self._send(m.Goodbye())

    def killed(self) -> None:
        """Free the engines, and say no word: what a process that is killed would leave."""
        self.bench.close()
        self._notebook.close()

    def fail(self, error: M2FlowError) -> None:
        """Tell the controller that this worker can't go on."""
        self._send(m.Fatal(error.to_record()))

    def _hear(self) -> None:
        """A peer takes nothing: perhaps because it is dead. What is said of peers is taken in the order in which it was said, first what
        waits here already: who is up by now must not be forgotten again for an older word."""
        self._heard += map(m.decode_to_worker, self._link.receive(0.05))
        of_peers = [message for message in self._heard if isinstance(message, m.Peers | m.Severed)]
        self._heard = deque(message for message in self._heard if not isinstance(message, m.Peers | m.Severed))
        for message in of_peers:
            self._take(message)

    def _take(self, message: m.ToWorker) -> None:
        match message:
            case m.Define(call=ordinal, body=body):
                self._calls[ordinal] = call_of(body)
            case m.Peers(addresses=addresses):
                self._peers.announce(addresses, self.settings.transports)
            case m.Severed(peer=peer, rows=sent):
                self._peers.sever(peer)
                self._send(m.Missing(peer, self._store.sever(peer, sent)))
            case m.Push(call=ordinal, ids=ids, to=to):
                self._forward(ordinal, self._store.get(ordinal, ids), [to])
            case m.Abort(call=ordinal, keeps=keeps):
                self._reports.make()  # They may be about this call, which is forgotten next.
                if keeps:
                    self._stop(ordinal)
                self._abort(ordinal)
            case m.Yield(call=ordinal, ids=ids):
                self._yield(ordinal, ids)
            case m.Adopt(call=ordinal, drawn=drawn, ids=ids, forward_to=forward_to):
                rows = self._store.get(drawn, ids)
                self._store.put(ordinal, rows)
                self._forward(ordinal, rows, forward_to)
            case m.Forget(call=ordinal):
                self._notebook.forget(ordinal)
                self._store.forget(ordinal)
                self._store.forget(stopped_at(ordinal))
                self._calls.pop(ordinal, None)
            case m.Stop():
                self.is_stopping = True
            case m.Task():
                self._queue.append(message)

    def _next_is_ready(self) -> bool:
        """Whether the next task's rows are here. Tasks wait for each other: their order is the controller's decision."""
        if not self._queue:
            return False
        task = self._queue[0]
        if isinstance(task, m.Generate):
            if task.aborted_by >= 0:
                return self._store.has_prefixes(stopped_at(task.aborted_by), task.ids, task.had)
            return self._store.has(self._prompts(task), task.prompts)
        if isinstance(task, m.Perform | m.Accumulate):
            call = self._calls[task.call]
            if isinstance(task, m.Perform) and performing.gives(call) == "concat":
                return all(self._store.has(source, ids) for source, ids in task.parts.items())
            sources = [ref.call for name, ref in call.inputs if not (isinstance(task, m.Perform) and name in task.values)]
            return all(self._store.has(source, task.ids) for source in sources)
        return True

    def _prompts(self, task: m.Generate) -> int:
        ref = self._calls[task.drawn_by].input("prompts")
        if ref is None:
            raise InternalError(f"{self._calls[task.drawn_by].name} has no input 'prompts'")
        return ref.call

    def _do(self, task: m.Task) -> None:
        self.is_in_users_code = isinstance(task, m.Perform) and self._calls[task.call].engine == "function"
        if not self.is_in_users_code:
            self._reports.make()
        self._attempt(task, lambda: self._perform(task))
        self.is_in_users_code = False

    def _attempt(self, task: m.Task, action: Callable[[], m.TaskDone | None]) -> None:
        """Do something about a task; say that it is done, if that is what comes of it, or that it has failed."""
        try:
            done = action()
        except M2FlowError as error:
            self._failed(task, error)
        except Exception as error:
            self._failed(task, unexpected(self._calls[task.call].name if task.call >= 0 else type(task).__name__, error))
        else:
            if done is not None:
                self._send(done)

    def _failed(self, task: m.Task, error: M2FlowError) -> None:
        self._reports.make()
        where = f" (worker {self.settings.name}, pid {os.getpid()})"
        named = type(error)(error.what + where, where=error.where, now=error.now, remote=error.remote)
        self._send(m.TaskFailed(task.number, task.call, named.to_record(), error.row))

    def _perform(self, task: m.Task) -> m.TaskDone | None:
        """Do a task; what to say at its end, if its last samples do not say it. A generation only begins here."""
        bench = self.bench
        match task:
            case m.Generate():
                self._generate(task)
                return None
            case m.Perform(forward_to=forward_to):
                call = self._calls[task.call]
                left: set[int] = set()

                def leave(ids: list[int], rows: Batch) -> None:
                    left.update(ids)
                    self._deliver(task.number, call, rows, forward_to, dropped=sorted(set(ids) - set(rows.ids.tolist())), ends=False)

                result = bench.perform(call, self._inputs(task), task.values, leave, self._meanwhile, is_suspect=task.is_suspect)
                if isinstance(result, Batch):
                    if len(result):
                        self._store.put(call.ordinal, without_parts(result)[0])  # The next task may need them; all else can wait.
                    dropped = sorted(set(task.ids) - left - set(result.ids.tolist()))
                    self._reports.later(
                        task, lambda: self._deliver(task.number, call, result, forward_to, dropped=dropped, ends=True, keeps=False)
                    )
                    return None
                return m.TaskDone(task.number, performing.plain_value(call, result))
            case m.Accumulate(epoch=epoch):
                call = self._calls[task.call]
                bench.accumulate(call, training.training_rows(call, self._inputs(task)), epoch=epoch)
                return m.TaskDone(task.number)
            case m.Apply(is_last=is_last):
                return m.TaskDone(task.number, bench.apply(self._calls[task.call], is_last=is_last))
            case m.CopyWeights():
                bench.copy_weights(self._calls[task.call])
                return m.TaskDone(task.number)
            case m.PublishWeights(role=role, version=version):
                return m.TaskDone(task.number, manifest=bench.publish(role, version))
            case m.LoadWeights(role=role, version=version, manifest=manifest, under_requests=under_requests):
                bench.load_weights(role, version, manifest, under_requests=under_requests)
                return m.TaskDone(task.number)
            case m.Condense():
                bench.condense()
                return m.TaskDone(task.number)
            case m.Switch(to=to):
                bench.switch(to)
                return m.TaskDone(task.number)
            case m.Save(role=role, path=path, seals=seals):
                return m.TaskDone(task.number, bench.save(role, path, seals=seals))
        raise InternalError(f"unknown task {type(task).__name__}")

    def _meanwhile(self) -> None:
        """A function runs: report what was done before it, take in what will be done next, and send what was recorded."""
        self._reports.make()
        self._read()
        while self._heard and isinstance(self._heard[0], m.Define | m.Task | m.Forget):
            self._take(self._heard.popleft())
        self.flush_spans(force=False)

    def _inputs(self, task: m.Perform | m.Accumulate) -> Mapping[str, Batch]:
        call = self._calls[task.call]
        refs = {name: ref.call for name, ref in call.inputs if not (isinstance(task, m.Perform) and name in task.values)}
        if isinstance(task, m.Perform) and performing.gives(call) == "concat":
            return {name: self._store.get(source, task.parts[source]) for name, source in refs.items() if source in task.parts}
        return {name: self._store.get(source, task.ids) for name, source in refs.items()}

    def _generate(self, task: m.Generate) -> None:
        call, drawn = self._calls[task.call], self._calls[task.drawn_by]
        if task.aborted_by >= 0:
            self.bench.resume(call, self._store.get(stopped_at(task.aborted_by), task.ids), drawn, task.waited_us)
            self._notebook.began(task.ids, task.had)
        else:
            self.bench.generate(call, task.ids, self._store.get(self._prompts(task), task.prompts), drawn, task.waited_us)
        self._generations[task.number] = Generation(task, len(task.ids))
        self._task_of.update(dict.fromkeys(task.ids, task.number))

    def _decode(self) -> None:
        """One token of everything that generates; what has finished leaves, and what goes on is written down now and then."""
        left = self.bench.step()
        self._notebook.measure(self.bench, [rows for _, rows in left])
        for call, rows in left:
            self._generated(call, rows)
        if left:
            self._notebook.measure(self.bench)
        for call, rows, place in self._notebook.due(self.bench):
            self._send(m.Flushed(call.ordinal, rows.ids.tolist(), *performing.lengths_of(rows), stretches_of(rows), place))

    def _generated(self, call: Call, rows: Batch) -> None:
        """Samples are done: write them down, hand them on, and say so; end their tasks."""
        place = self._notebook.finished(call.ordinal, rows)
        by_task: dict[int, list[int]] = {}
        for row, packed in enumerate(rows.ids.tolist()):
            by_task.setdefault(self._task_of.pop(packed), []).append(row)
        for number, positions in by_task.items():
            generation = self._generations[number]
            generation.num_left -= len(positions)
            task = generation.task
            if task.spills:
                own = rows.ids[positions]
                self._store.spill(call.ordinal, own.tolist(), lambda own=own: self._notebook.read(place).select(own))  # type: ignore[misc]
            self._deliver(number, call, rows.take(positions), task.forward_to, place, ends=generation.num_left == 0, keeps=not task.spills)
            if generation.num_left == 0:
                del self._generations[number]

    def _deliver(
        self,
        task: int,
        call: Call,
        rows: Batch,
        forward_to: Iterable[str],
        place: tuple[str, int, int, int] | None = None,
        dropped: Sequence[int] = (),
        *,
        ends: bool,
        keeps: bool = True,
    ) -> None:
        """Keep rows of a call's result in memory, send them where they are needed, and report them."""
        rows, parts = without_parts(rows)
        if place is None and len(rows) and call.engine == "function" and not performing.gives_reward(call):
            place = self._notebook.result(call.ordinal, rows)
        if len(rows):
            if keeps:
                self._store.put(call.ordinal, rows)
            self._forward(call.ordinal, rows, forward_to)
        self._send(finished(task, call, rows, place, dropped, parts, ends=ends))

    def _forward(self, call: int, rows: Batch, to: Iterable[str]) -> None:
        for peer in to:
            start = now_ns()
            if peer != self.settings.tag and self._peers.send(peer, Parcel(call, rows, self.settings.tag)):
                self.recorder.add(SpanName.SEND, start, now_ns(), call=call, num_samples=len(rows), num_bytes=rows.num_bytes, label=peer)

    def _yield(self, ordinal: int, ids: list[int]) -> None:
        """Stop these samples of a call, those that have not finished; their tasks end without them."""
        here = [packed for packed in ids if packed in self._task_of and self.bench.is_growing(packed, ordinal)]
        self._kept(ordinal, self.bench.interrupt(here))
        tasks = [self._task_of.pop(packed) for packed in here]
        if here:
            self._send(m.Yielded(ordinal, here, tasks))
        for number in tasks:
            self._generations[number].num_left -= 1
            if self._generations[number].num_left == 0:
                del self._generations[number]
                self._send(m.TaskDone(number))

    def _stop(self, ordinal: int) -> None:
        """Stop what runs for a call; what has tokens is kept, and reported, as is what has finished by now."""
        finished, stopped = self.bench.stop(ordinal)
        if len(finished):
            self._generated(self._calls[ordinal], finished)
        self._kept(ordinal, stopped)

    def _kept(self, ordinal: int, stopped: Batch) -> None:
        """Samples of a call were stopped, and have tokens to go on from."""
        if len(stopped):
            self._store.put(stopped_at(ordinal), stopped)
            place = self._notebook.stopped(ordinal, stopped)
            self._notebook.measure(self.bench)
            self._send(m.Aborted(ordinal, stopped.ids.tolist(), *performing.lengths_of(stopped), stretches_of(stopped), place))

    def _abort(self, ordinal: int) -> None:
        """Give up what runs or waits for a call. Its tasks end as done: the controller knows that they were aborted."""
        given_up = self.bench.abort(ordinal)
        if given_up:
            self._notebook.given_up(ordinal, given_up)
            self._notebook.measure(self.bench)
            self._send(m.GivenUp(ordinal, list(given_up), list(given_up.values())))
        for number in [n for n, g in self._generations.items() if g.task.call == ordinal]:
            for packed in self._generations.pop(number).task.ids:
                self._task_of.pop(packed, None)
            self._send(m.TaskDone(number))
        for task in [task for task in self._queue if task.call == ordinal]:
            self._queue.remove(task)
            self._send(m.TaskDone(task.number))
        if ordinal in self._calls and self._calls[ordinal].method == "update":
            self.bench.give_up(self._calls[ordinal])

    def _send(self, message: m.ToController) -> None:
        self._link.send(m.encode(message))

    def flush_spans(self, *, force: bool) -> None:
        """Send what was recorded; not more often than a few times a second while there is work."""
        if len(self.recorder) and (force or now_ns() - self._flushed_ns > _FLUSH_SPANS_NS):
            self._gauges.record(self._peers.statistics())
            self._send(m.Spans(self.recorder.drain()))
            self._flushed_ns = now_ns()
