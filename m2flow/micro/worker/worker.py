"""Execute a worker's tasks turn by turn: receive messages and rows, decode one token, do one task, and report how far everything is.

    controller --tasks--> Worker --rows--> other workers
                          Worker --Finished, TaskDone--> controller

Since a turn decodes one token of all that generates and does at most one task, tasks and generation interleave, and an abort takes effect
between two tokens. Its links and channels are given to it: ZeroMQ's by `m2flow.micro.worker.worker_process`, in-memory ones by
`m2flow.testing.world`. What a message does to its tasks, and which one is next, is `m2flow.micro.worker.task_queue`'s.

Other workers (`Peers`): their addresses, which are dead, and what is sent to them.

    Peers.send --outbox--> another process        nothing is sent to a dead peer, and nothing of it is accepted

A process is named by its tag, which is new for each restart of a worker (`m2flow.micro.protocol.worker_state.tag_of`): rows meant for a
process that is gone do not reach its successor. Limit: a peer that lives and accepts nothing blocks its senders for five minutes, then it
is an error.

Reports (`Reports`). The next task of a chain of calls needs only the rows of the one before, while a segment, rows for other workers and
`Finished` take as long as a small function. So these wait until the next task has begun, or until none can begin at once. An error in
them fails the task that they are about.

Chains on one row. While a function runs on a row, the next task is named to the function engine (`_look_ahead`) if all that it needs is
here or comes of that row. The function's thread then goes on with it, and the worker finishes it as the next task of the queue.

Progress log (`ProgressLog`). What `m2flow.micro.controller.journal_records` reads after the process was killed:

    finished samples, stopped ones   -> <worker>.seg              kept with the run
    running samples, now and then    -> <worker>-running.seg      what the newest of each needs is kept, while it runs
    rows of functions, not rewards   -> <worker>-rows.seg         kept until their call is forgotten
    counts, after every decode step  -> <worker>.meter            kept with the run

A running sample is flushed when it has got so many tokens, or so many seconds have passed, since the last time: all of it, but of an
episode, which is written down at each turn, only what is new (`m2flow.micro.records.segments`).

Idle spans (`IdleSpans`). Many turns without work are one span. The time before a worker's first work and after its last is no wait of the
schedule, and is left out.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, final

import msgspec
import numpy as np

from m2flow.channels.channel import ControlLink, Inbox, Outbox, Parcel, Statistics
from m2flow.channels.zeromq import Keys
from m2flow.engines.contract import EngineSettings
from m2flow.errors import BrokenChannel, InternalError, M2FlowError, unexpected
from m2flow.macro.graph import Call
from m2flow.micro.protocol import call_semantics, update_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import Parts, call_of, without_parts
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.protocol.staleness import is_time_dependent, version_spans_of
from m2flow.micro.protocol.worker_state import TURNS_ANSWERED, TURNS_ASKED, RowStore, stopped_at, tag_of, worker_of
from m2flow.micro.records.accounting import TokenMeter
from m2flow.micro.records.segments import Kind, Place, Scratch, SegmentWriter, read_segment, scratch_name
from m2flow.micro.worker.engine_host import EngineHost, Gauges
from m2flow.micro.worker.function_tasks import BegunCall, Leave
from m2flow.micro.worker.rank_group import MakeTrain, RankGroupSettings, make_own_train
from m2flow.micro.worker.task_queue import Answer, TaskQueue, prompts_of
from m2flow.micro.worker.weight_sync import WeightSettings
from m2flow.observe.spans import Recorder, SpanName, now_ns
from m2flow.recipe import Model
from m2flow.samples import Batch

# ---- other workers


_MOST_S = 300.0


@final
class Peers:
    """Send rows to the processes that are alive. Used by workers and by the controller."""

    def __init__(self, outbox: Outbox, hear: Callable[[], None], *, knows_all: bool = True) -> None:
        """
        Args:
            hear: receives the controller's messages about peers; called while a peer accepts nothing.
            knows_all: whether this process was there when the run began and so was told of every peer. A restarted one does not know
                which peers died before.
        """
        self._outbox = outbox
        self._hear = hear
        self._knows_all = knows_all
        self._addresses: dict[str, str] = {}
        self._known: set[str] = set()
        """All tags that were ever announced."""
        self._dead: set[str] = set()

    def announce(self, addresses: Mapping[str, str], transports: Mapping[str, str]) -> None:
        """Replace the live peers by these. `transports`: worker -> the transport that the plan has chosen."""
        for tag in self._addresses.keys() - addresses.keys():
            self._drop(tag)
        self._known |= addresses.keys()
        self._addresses = {tag: address for tag, address in addresses.items() if tag not in self._dead}
        for tag, address in self._addresses.items():
            if worker_of(tag) in transports:
                self._outbox.prefer(address, transports[worker_of(tag)])

    def mark_dead(self, tag: str) -> None:
        """Mark a peer as dead."""
        self._dead.add(tag)
        if tag in self._addresses:
            self._drop(tag)

    def counts(self, parcel: Parcel) -> bool:
        """Whether a parcel that has arrived is to be accepted."""
        return parcel.sender not in self._dead

    def send(self, tag: str, parcel: Parcel) -> bool:
        """Send rows to a peer; False if it is dead and the rows are dropped.

        Raises:
            BrokenChannel: it lives, and accepted nothing for five minutes. InternalError: there was never such a peer.
        """
        if self._knows_all and tag not in self._known:
            raise InternalError(f"rows of call {parcel.call} are for {tag!r}, and nobody has told {parcel.sender} of such a process")
        start_s = time.monotonic()
        while (address := self._addresses.get(tag)) is not None:
            try:
                self._outbox.send(address, parcel)
            except BrokenChannel:
                self._hear()
                if tag in self._addresses and time.monotonic() - start_s > _MOST_S:
                    raise
            else:
                return True
        return False

    def statistics(self) -> dict[str, Statistics]:
        """Return tag -> statistics of what was sent there."""
        counted = self._outbox.statistics()
        return {tag: counted[address] for tag, address in self._addresses.items() if address in counted}

    def _drop(self, tag: str) -> None:
        self._outbox.forget(self._addresses.pop(tag))


# ---- the worker


_SHORTEST_NS = 500_000
"""A shorter wait is only a message under way, and is not recorded."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """All that a worker needs to start: sent by its launcher as JSON, or made by `m2flow.testing.world`."""

    name: str
    controller: str
    """The control link's address."""
    inbox: str
    """Where its inbox listens (`m2flow.channels.zeromq`)."""
    keys: Keys | None
    """The cluster's keys; None: its channels have none."""
    engines: tuple[EngineSlot, ...]
    models: dict[str, Model]
    device: str
    threads: int
    deterministic: bool
    run_seed: int
    run_dir: str
    shared_prefix: str
    rollout_options: dict[str, str | int | float | bool]
    train_options: dict[str, str | int | float | bool]
    function_concurrency: int
    function_patience_s: float
    max_running: int
    report_every: int
    """Decode steps between two reports of its engines' load, or of the episodes that wait for them; 0: no reports."""
    reports: Literal["loads", "queues"]
    gather_s: float
    """Seconds that finished samples may wait for others, to leave together."""
    flush_tokens: int
    """Tokens after which a running sample is flushed to its segment file."""
    flush_s: float
    """Seconds after which all running samples are flushed."""
    heartbeat_s: float
    parent: int
    """Process id of the process that started it."""
    transports: dict[str, str] = {}
    """Peer -> the transport to it that the plan has chosen (`m2flow.micro.protocol.plan.Route.transport`)."""
    takes_pairs: bool = False
    """Whether some peer sends to it over torch.distributed."""
    shared_bytes: int = 0
    """Size of its arena (`m2flow.channels.shared_memory`)."""
    attempt: int = 0
    """Number of the attempt at the run. Each has segment files of its own, since a worker may outlive its controller for a moment."""
    restore: dict[str, str] = {}
    """Role -> part of a checkpoint that its trainer starts from."""
    weights: WeightSettings = WeightSettings()
    record_every: int = 1
    """Record one in so many of repeated events (`m2flow.spec.RunSettings.record_every`)."""
    incarnation: int = 0
    """How many processes of this worker were started before."""
    rank_group: RankGroupSettings = RankGroupSettings()
    """Which rank of a trainer with several ranks this process is."""
    takes_turns: bool = False
    """Whether its engines are co-located: they take turns on their devices with others, of this process or of others."""
    claim: str = ""
    """File that lists the run's resources on this host (`m2flow.micro.worker.worker_process`)."""

    @property
    def tag(self) -> str:
        """Name of this process among its peers."""
        return tag_of(self.name, self.incarnation)

    def engine_settings(self) -> dict[str, EngineSettings]:
        common = {"device": self.device, "threads": self.threads, "deterministic": self.deterministic, "max_running": self.max_running}
        return {
            "rollout": EngineSettings(**common, options=self.rollout_options, into_server=self.weights.into_server),  # type: ignore[arg-type]
            "train": EngineSettings(
                **common,  # type: ignore[arg-type]
                options=self.train_options,
                rank=self.rank_group.rank,
                num_ranks=self.rank_group.num_ranks,
                rendezvous=self.rank_group.rendezvous,
                parts=self.rank_group.parts,
            ),
            "function": EngineSettings(options={"concurrency": self.function_concurrency, "patience_s": self.function_patience_s}),
        }


@final
class IdleSpans:
    """Record the time in which one worker waits for rows or tasks, as spans."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_worked = False
        self._since_ns = 0
        self._call: Call | None = None

    def waits(self, call: Call | None) -> None:
        """Note that it has nothing to do: its next task, of this call, needs rows that are not here; None: it has no task."""
        if not self._has_worked:
            return
        if not self._since_ns:
            self._since_ns = now_ns()
        if call is not None:
            self._call = call

    def works(self) -> None:
        """Note that it has something to do; a wait ends."""
        self._has_worked = True
        if not self._since_ns:
            return
        since_ns, at_ns, self._since_ns = self._since_ns, now_ns(), 0
        call, self._call = self._call, None
        if at_ns - since_ns < _SHORTEST_NS:
            return
        if call is None:
            self._recorder.waited("task", since_ns, at_ns, label="for a task")
        else:
            self._recorder.waited("rows", since_ns, at_ns, call=call.ordinal, label=call.name)


@final
class Reports:
    """Queue the reports of finished tasks until the next task has begun."""

    def __init__(self, attempt: Callable[[m.Task, Callable[[], None]], None]) -> None:
        """
        Args:
            attempt: runs a report of a task, and reports the task as failed if that raises.
        """
        self._attempt = attempt
        self._waiting: deque[tuple[m.Task, Callable[[], None]]] = deque()

    @property
    def are_due(self) -> bool:
        """Whether a report waits."""
        return bool(self._waiting)

    def later(self, task: m.Task, report: Callable[[], None]) -> None:
        """Queue a report for the next `make`."""
        self._waiting.append((task, report))

    def make(self) -> None:
        """Make all queued reports, in the order of their tasks."""
        while self._waiting:
            self._attempt(*self._waiting.popleft())


def finished(
    task: int,
    call: Call,
    rows: Batch,
    place: tuple[str, int, int, int] | None,
    dropped: Sequence[int],
    parts: Sequence[Parts] = (),
    took_us: int = 0,
    *,
    ends: bool,
) -> m.Finished:
    """Build the message about finished rows of a task.

    Args:
        dropped: samples of the task that became no rows.
        parts: parts of each row's reward, if any has some.
        took_us: time that the task's function took.
        ends: whether the task has no further rows.
    """
    has_texts = call.engine == "rollout" and len(rows) > 0
    first = next(rows.rows(), None) if has_texts else None
    texts = [_showable(first.prompt_text), _showable(str(first["text"]))] if first is not None else []
    return m.Finished(
        task,
        call.ordinal,
        rows.ids.tolist(),
        call_semantics.num_tokens_of(rows),
        call_semantics.num_generated_of(rows),
        [float(v) for v in rows.dense("reward")] if call_semantics.gives_reward(call) else [],
        call_semantics.finish_of(rows),
        texts,
        place,
        list(dropped),
        version_spans_of(rows) if is_time_dependent(call) else [],
        ends,
        list(parts),
        took_us,
    )


def _showable(text: str) -> str:
    """Replace lone surrogates, which a message can't carry. Only the text that is shown is changed."""
    return text.encode("utf-8", "replace").decode()


_CHECKS = 8
"""Checks for samples to flush, in the time in which one gets `every_tokens` tokens."""


@final
class ProgressLog:
    """Write samples and token counts of one process to files from which a resume or a recovery can go on."""

    def __init__(self, directory: str | Path, name: str, *, every_tokens: int, every_s: float) -> None:
        self._segments = SegmentWriter(directory, name)
        self._running = Scratch(directory, scratch_name(name, "running"))
        self._rows = Scratch(directory, scratch_name(name, "rows"))
        self._meter: TokenMeter | None = None
        self._every_tokens = every_tokens
        self._every_ns = every_s * 1e9
        self._check_after = max(1, every_tokens // _CHECKS)
        self._num_steps = 0
        """Decode steps since the last check."""
        self._looked_ns = now_ns()
        self._counts: Mapping[int, int] = {}
        self._written: dict[int, int] = {}
        """Running sample -> tokens of it that are written."""

    def began(self, ids: Iterable[int], had: Iterable[int]) -> None:
        """Note samples that resume from `had` tokens, which are written elsewhere."""
        self._written.update(zip(ids, had, strict=True))

    def finished(self, call: int, rows: Batch) -> Place:
        return self._ended(self._segments.append(rows, Kind.FINISHED, call), rows.ids.tolist())

    def read(self, place: Place) -> Batch:
        """Read a record back."""
        return read_segment(self._segments.directory, place)

    def stopped(self, call: int, rows: Batch) -> Place:
        return self._ended(self._segments.append(rows, Kind.STOPPED, call), rows.ids.tolist())

    def given_up(self, call: int, counts: Mapping[int, int]) -> None:
        """Write that samples were given up, with their token counts."""
        ids = list(counts)
        columns = {"num_generated": np.array(list(counts.values()), np.int64)}
        self._ended(self._segments.append(Batch(np.array(ids, np.int64), columns), Kind.GIVEN_UP, call), ids)

    def result(self, call: int, rows: Batch) -> Place:
        """Write the rows of a function."""
        return self._rows.append(rows, [call], Kind.RESULT, call)

    def forget(self, call: int) -> None:
        """Release a call's rows."""
        self._rows.release([call])

    def measure(self, engine_host: EngineHost, finished: Iterable[Batch] = ()) -> None:
        """Write all token counts to the meter, with those of samples that leave and are not written yet. Called after each decode step, and
        when samples have left."""
        if self._meter is None:
            self._meter = TokenMeter(self._segments.path.with_suffix(".meter"))
        total, counts = engine_host.tokens()
        self._counts = dict(counts)
        for rows in finished:
            counts.update(zip(rows.ids.tolist(), call_semantics.num_generated_of(rows), strict=True))
        self._meter.write(total, counts)

    def due(self, engine_host: EngineHost) -> list[tuple[Call, Batch, Place]]:
        """Flush the running samples that are due after a decode step, and episodes that wait for it; return call, rows and place of each
        record."""
        self._num_steps += 1
        is_time = now_ns() - self._looked_ns >= self._every_ns
        wanted: list[int] = []
        if self._counts and (is_time or self._num_steps >= self._check_after):
            most = 0 if is_time else max(self._every_tokens - self._check_after, 0)
            wanted = [packed for packed, count in self._counts.items() if count - self._written.get(packed, 0) > most]
            self._num_steps = 0
            if is_time:
                self._looked_ns = now_ns()
        return self.flush_waiting(engine_host, wanted)

    def flush_waiting(self, engine_host: EngineHost, also: Iterable[int] = ()) -> list[tuple[Call, Batch, Place]]:
        """Flush the episodes that wait for it, and these samples, in one record of each call; then they go on. Returns as `due`."""
        waiting = engine_host.episodes_to_write()
        wanted, done = [*waiting, *also], []
        for call, rows in engine_host.snapshot(dict.fromkeys(wanted)) if wanted else ():
            done += [(call, told, place) for told, place in self._running.append_rows(rows, call.ordinal)]
            self._written.update(zip(rows.ids.tolist(), call_semantics.num_generated_of(rows), strict=True))
        engine_host.episodes_written(waiting)
        return done

    def close(self) -> None:
        self._segments.close()
        self._running.close()
        self._rows.close()
        if self._meter is not None:
            self._meter.close()

    def _ended(self, place: Place, ids: list[int]) -> Place:
        """Release the running records of samples that have ended."""
        if self._written:
            for packed in ids:
                self._written.pop(packed, None)
        self._running.release(ids)
        return place


_FLUSH_SPANS_NS = 250_000_000
_COUNT_NS = 5_000_000_000
"""After so long the counters are looked at, too, where nothing has passed: all that there is may be waiting."""


class Worker:
    """Do a worker's tasks on the links and channels that it is given. Call `open`, then `turn` until `is_stopping`, then `close`.

    The methods after `killed` are those of an `Executor`, for its task queue.
    """

    def __init__(
        self, settings: WorkerSettings, link: ControlLink, inbox: Inbox, outbox: Outbox, make_train: MakeTrain = make_own_train
    ) -> None:
        self.settings = settings
        self.is_stopping = False
        self.recorder = Recorder(settings.name)
        self.engine_host = EngineHost(
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
        self.engine_host.writes_episodes = True
        self._link = link
        self._inbox = inbox
        self._progress_log = ProgressLog(
            f"{settings.run_dir}/segments", settings.name, every_tokens=settings.flush_tokens, every_s=settings.flush_s
        )
        self._store = RowStore()
        self._calls: dict[int, Call] = {}
        self._peers = Peers(outbox, self._hear, knows_all=not settings.incarnation)
        self._gauges, self._idle_spans = Gauges(self.recorder, self.engine_host), IdleSpans(self.recorder)
        self._tasks = TaskQueue(self)
        self.num_turns = 0
        self.is_in_users_code = False
        """Whether a user's function is being called, whose duration is not the worker's fault."""
        self._reports = Reports(self._attempt)
        self._runs: m.RunFunction | None = None
        """The task whose function runs."""
        self._next_named: int | None = None
        """The task that the function engine was told of as the next."""
        self._begun: tuple[int, BegunCall] | None = None
        """A task that is next in the queue, and whose function runs already."""
        self._is_broken = False
        """Whether weights or devices are not what they should be. That ends the run, and nothing is made with them until it hears so."""
        self._may_go_on = False
        """`_reads_meanwhile` at the end of the last turn: nothing that it depends on changes between two turns."""
        self._flushed_ns = 0
        self._num_turns = 0

    def open(self) -> None:
        """Load the engines, then report `Ready`."""
        self.engine_host.open()
        self._send(m.Ready(self._inbox.open(), os.getpid()))

    @property
    def has_work(self) -> bool:
        """Whether `turn` would do more than receive."""
        return self._may_go_on or self._is_decoding or self._reports.are_due or self._next_is_ready()

    @property
    def _is_decoding(self) -> bool:
        return self.engine_host.is_generating and not self._is_broken

    def turn(self) -> None:
        """Receive what has arrived, decode one token of everything that generates, and do one task."""
        self.num_turns += 1
        if not self._may_go_on:
            self._receive()
            self._tasks.read()
            self._drop_begun_unless_next()
        if self._is_decoding:
            self._idle_spans.works()
            self._decode()
        has_sent = self._send_turns()
        self._report_load()
        self._report_parts()
        if (self._may_go_on and not has_sent) or self._next_is_ready():
            self._idle_spans.works()
            self._do(self._tasks.pop())
        else:
            self._reports.make()
        self._may_go_on = self._reads_meanwhile()
        if not self._may_go_on:
            self.flush_spans(force=False)

    def _reads_meanwhile(self) -> bool:
        """Whether the next task can begin at once, and there is time for all else while it runs (`_meanwhile`)."""
        task = None if self._tasks.has_heard or self.engine_host.is_generating else self._tasks.first
        return isinstance(task, m.RunFunction) and self._calls[task.call].engine == "function" and self._next_is_ready()

    def _next_is_ready(self) -> bool:
        """Whether there is a next task, and its rows are here."""
        has, has_prefixes = self._store.has, self._store.has_prefixes
        return (
            not self._is_broken
            and self._tasks.first is not None
            and all(
                has(call, ids) if num_generated is None else has_prefixes(call, ids, num_generated)
                for call, ids, num_generated in self._tasks.rows_needed()
            )
        )

    def _receive(self) -> None:
        """Take in rows that peers have sent, and queue the controller's messages."""
        for parcel in self._inbox.take():
            if not self._peers.counts(parcel):
                continue
            if parcel.call == TURNS_ASKED:
                self.engine_host.turns_asked(parcel.sender, parcel.batch)
            elif parcel.call == TURNS_ANSWERED:
                self.engine_host.turns_answered(parcel.batch)
            else:
                self._store.put(parcel.call, parcel.batch, parcel.sender)
        if news := self._inbox.dropped.news():
            print(f"{self.settings.name} {news}", flush=True)
            self.recorder.count("messages dropped", self._inbox.dropped.num, now_ns())
        self._tasks.hear(map(m.decode_to_worker, self._link.receive(0.0)))

    def rest(self) -> None:
        """There is nothing to do now; to be called before somebody waits for that."""
        task = self._tasks.first
        self._idle_spans.waits(self._calls.get(task.call) if task is not None else None)

    def _report_load(self) -> None:
        """Say how full the engines are, or which episodes wait for them, every so many turns of decoding."""
        if not self.settings.report_every or not self._is_decoding:
            return
        self._num_turns += 1
        if self._num_turns % self.settings.report_every:
            return
        if self.settings.reports == "queues":
            for queued in self.engine_host.queued():
                self._send(queued)
        else:
            for role, (load, tokens) in self.engine_host.occupancy().items():
                self._send(m.Load(role, *load[:4], list(tokens), list(tokens.values())))

    def _report_parts(self) -> None:
        """Say which parts of checkpoints were written meanwhile, or why not."""
        for step, role, digest, error in self.engine_host.parts.written():
            self._send(m.PartWritten(step, role, digest, None if error is None else error.to_record()))

    def close(self) -> None:
        """Free the engines; send the last spans and goodbye."""
        self._reports.make()
        self.engine_host.close()
        self._progress_log.close()
        self.flush_spans(force=True)
        self._send(m.Goodbye())

    def killed(self) -> None:
        """Free the engines, and say no word: what a process that is killed would leave."""
        self.engine_host.close()
        self._progress_log.close()

    def fail(self, error: M2FlowError) -> None:
        """Tell the controller that this worker can't go on."""
        self._send(m.Fatal(error.to_record()))

    def _hear(self) -> None:
        """A peer accepts no rows, perhaps since it is dead: hear what the controller says of it."""
        self._tasks.hear(map(m.decode_to_worker, self._link.receive(0.05)))
        self._tasks.read_of_peers()

    # What the task queue has it do

    def call(self, ordinal: int) -> Call:
        return self._calls[ordinal]

    def say(self, message: Answer) -> None:
        self._send(message)

    def define(self, message: m.Define) -> None:
        self._calls[message.call] = call_of(message.body)

    def forget(self, call: int) -> None:
        self._progress_log.forget(call)
        self._store.forget(call)
        self._store.forget(stopped_at(call))
        self._calls.pop(call, None)

    def connect(self, peers: m.Peers) -> None:
        self._peers.announce(peers.addresses, self.settings.transports)

    def disconnect(self, lost: m.PeerLost) -> Mapping[int, list[int]]:
        self._peers.mark_dead(lost.peer)
        self.engine_host.peer_lost(lost.peer)
        return self._store.drop_sent_by(lost.peer, lost.rows)

    def push(self, call: int, ids: list[int], to: Sequence[str]) -> None:
        self._forward(call, self._store.get(call, ids), to)

    def reassign(self, call: int, drawn: int, ids: list[int]) -> None:
        self._store.put(call, self._store.get(drawn, ids))

    def is_running(self, packed: int, call: int, *, queued: bool = False) -> bool:
        return self.engine_host.is_inflight(packed, call) and not (queued and not self.engine_host.is_queued(packed))

    def preempt(self, call: int, ids: list[int]) -> m.Aborted | None:
        return self._kept(call, self.engine_host.interrupt(ids))

    def stop(self, call: int) -> m.Aborted | None:
        self._reports.make()  # They may be about this call, which is forgotten next.
        finished, stopped = self.engine_host.stop(call)
        if len(finished):
            self._generated(self._calls[call], finished)
        return self._kept(call, stopped)

    def _kept(self, call: int, stopped: Batch) -> m.Aborted | None:
        """Keep samples of a call that were stopped and have tokens to go on from."""
        if not len(stopped):
            return None
        self._store.put(stopped_at(call), stopped)
        place = self._progress_log.stopped(call, stopped)
        self._progress_log.measure(self.engine_host)
        return m.Aborted(call, stopped.ids.tolist(), *call_semantics.lengths_of(stopped), version_spans_of(stopped), place)

    def give_up(self, call: int) -> None:
        self._reports.make()
        given_up = self.engine_host.abort(call)
        if given_up:
            self._progress_log.given_up(call, given_up)
            self._progress_log.measure(self.engine_host)
            self._send(m.GivenUp(call, list(given_up), list(given_up.values())))
        if call in self._calls and self._calls[call].method == "update":
            self.engine_host.give_up(self._calls[call])

    def end(self) -> None:
        self.is_stopping = True

    # Tasks

    def _do(self, task: m.Task) -> None:
        self.is_in_users_code = isinstance(task, m.RunFunction) and self._calls[task.call].engine == "function"
        if not self.is_in_users_code:
            self._reports.make()
        self._attempt(task, lambda: self._run_task(task))
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
        self._is_broken = self._is_broken or task.call < 0
        self._reports.make()
        where = f" (worker {self.settings.name}, pid {os.getpid()})"
        named = type(error)(error.what + where, where=error.where, now=error.now, remote=error.remote)
        self._send(m.TaskFailed(task.number, task.call, named.to_record(), error.row))

    def _run_task(self, task: m.Task) -> m.TaskDone | None:
        """Do a task; what to say at its end, if its last samples do not say it. A generation only begins here."""
        engine_host = self.engine_host
        match task:
            case m.Generate():
                self._generate(task)
                return None
            case m.EmbedPrompts():
                return m.TaskDone(task.number, embeddings=self._embed(task))
            case m.RunFunction(forward_to=forward_to):
                call = self._calls[task.call]
                left: set[int] = set()

                def leave(ids: list[int], rows: Batch) -> None:
                    left.update(ids)
                    self._deliver(task.number, call, rows, forward_to, dropped=sorted(set(ids) - set(rows.ids.tolist())), ends=False)

                start_ns = now_ns()
                result = self._run_function(task, call, leave)
                # A deterministic run has the same tasks whatever the time.
                took_us = 0 if self.settings.deterministic else (now_ns() - start_ns) // 1000
                if isinstance(result, Batch):
                    if len(result):
                        self._store.put(call.ordinal, without_parts(result)[0])  # The next task may need them; all else can wait.
                    dropped = sorted(set(task.ids) - left - set(result.ids.tolist()))
                    self._reports.later(
                        task, lambda: self._deliver(task.number, call, result, forward_to, None, dropped, took_us, ends=True, keeps=False)
                    )
                    return None
                return m.TaskDone(task.number, call_semantics.plain_value(call, result))
            case m.Accumulate(epoch=epoch):
                call = self._calls[task.call]
                engine_host.accumulate(call, update_semantics.training_rows(call, self._inputs(task)), epoch=epoch)
                return m.TaskDone(task.number)
            case m.Apply(is_last=is_last):
                return m.TaskDone(task.number, engine_host.apply(self._calls[task.call], is_last=is_last))
            case m.CopyWeights():
                engine_host.copy_weights(self._calls[task.call])
                return m.TaskDone(task.number)
            case m.PublishWeights(role=role, version=version):
                return m.TaskDone(task.number, manifest=engine_host.publish(role, version))
            case m.LoadWeights(role=role, version=version, manifest=manifest, under_requests=under_requests):
                engine_host.load_weights(role, version, manifest, under_requests=under_requests)
                return m.TaskDone(task.number)
            case m.ShrinkKVCache():
                engine_host.shrink_kv_cache()
                return m.TaskDone(task.number)
            case m.Switch(to=to):
                engine_host.switch(to)
                return m.TaskDone(task.number)
            case m.Save(role=role, path=path, step=step) if step >= 0:
                return m.TaskDone(task.number, engine_host.save_behind(role, path, step))
            case m.Save(role=role, path=path, seals=seals):
                digest = engine_host.save(role, path, seals=seals)
                self._report_parts()
                return m.TaskDone(task.number, digest)
        raise InternalError(f"unknown task {type(task).__name__}")

    def _run_function(self, task: m.RunFunction, call: Call, leave: Leave) -> Batch | object:
        """Run a call on rows. If it has one row, its thread may go on with the next task."""
        begun, self._begun = self._begun, None
        assert begun is None or begun[0] == task.number
        self._runs, self._next_named = task, None
        try:
            return self.engine_host.run_call(
                call,
                self._inputs(task),
                task.values,
                leave,
                self._meanwhile,
                is_suspect=task.is_suspect,
                begun=begun[1] if begun is not None else None,
                may_follow=len(task.ids) == 1,
            )
        finally:
            self._runs = None
            self._take_begun()

    def _take_begun(self) -> None:
        """Remember the next task, if the function's thread has gone on with it."""
        functions = self.engine_host.functions
        following = functions.begun_ahead() if functions is not None else None
        if following is not None and self._next_named is not None:
            self._begun = self._next_named, following

    def _look_ahead(self) -> None:
        """While a function runs on one row, tell the engine what its thread can go on with: the next task, if all else that it needs is
        here. A message that is to be read before that task withdraws this."""
        functions, runs, task = self.engine_host.functions, self._runs, self._tasks.first
        if functions is None or runs is None:
            return
        if self._tasks.has_heard or self.engine_host.is_generating:
            functions.look_away()
            self._next_named = None
        elif self._next_named is None and isinstance(task, m.RunFunction) and len(task.ids) == 1 and not (task.is_suspect or task.parts):
            call = self._calls[task.call]
            inputs = {name: self._row_ahead(task, ref.call, runs) for name, ref in call.inputs if name not in task.values}
            if call.engine == "function" and all(found is not False for found in inputs.values()):
                functions.look_ahead(
                    call, {name: found if isinstance(found, Batch) else None for name, found in inputs.items()}, task.values
                )
                self._next_named = task.number

    def _row_ahead(self, task: m.RunFunction, source: int, runs: m.RunFunction) -> Batch | Literal[False] | None:
        """The row of a call that a task needs; None if what runs gives it; False if it is not here."""
        if source == runs.call:
            return None if task.ids == runs.ids else False
        return self._store.get(source, task.ids) if self._store.has(source, task.ids) else False

    def _drop_begun_unless_next(self) -> None:
        """Leave a function alone that runs for a task which was aborted."""
        if self._begun is not None and (self._tasks.first is None or self._tasks.first.number != self._begun[0]):
            self._begun[1].drop()
            self._begun = None

    def _meanwhile(self) -> None:
        """A function runs: report what was done before it, take in what will be done next, and send what was recorded."""
        self._reports.make()
        self._receive()
        self._tasks.read_during_function()
        self._look_ahead()
        self.flush_spans(force=False)

    def _inputs(self, task: m.RunFunction | m.Accumulate) -> Mapping[str, Batch]:
        call = self._calls[task.call]
        refs = {name: ref.call for name, ref in call.inputs if not (isinstance(task, m.RunFunction) and name in task.values)}
        if isinstance(task, m.RunFunction) and call_semantics.gives(call) == "concat":
            return {name: self._store.get(source, task.parts[source]) for name, source in refs.items() if source in task.parts}
        return {name: self._store.get(source, task.ids) for name, source in refs.items()}

    def _generate(self, task: m.Generate) -> None:
        call, drawn = self._calls[task.call], self._calls[task.drawn_by]
        if task.aborted_by >= 0:
            stopped = self._store.get(stopped_at(task.aborted_by), task.ids)
            self.engine_host.resume(call, stopped, drawn, task.waited_us, task.speakers, task.waits_us)
            self._progress_log.began(task.ids, task.had)
        else:
            prompts = self._store.get(prompts_of(drawn), task.prompts)
            self.engine_host.generate(call, task.ids, prompts, drawn, task.waited_us, task.speakers, task.waits_us)
        self._tasks.began(task)

    def _embed(self, task: m.EmbedPrompts) -> list[list[float]]:
        """The embeddings of prompts; none if the engine can't, or if it refuses a prompt, as it will again when it is to generate."""
        call = self._calls[task.call]
        prompts = self._store.get(prompts_of(call), task.prompts)
        requests = call_semantics.requests(call, task.samples, prompts, self.settings.run_seed)
        with self.recorder.span(SpanName.ROLLOUT_PREFILL, label=f"{call.role} embeddings", num_samples=len(requests)):
            try:
                return self.engine_host.embeddings(call.role, requests)
            except M2FlowError as error:
                print(f"{call.name} is scheduled without embeddings of {len(requests)} prompts: {error}", flush=True)
                return []

    def _decode(self) -> None:
        """One token of everything that generates; what has finished leaves, and what goes on is written down now and then."""
        self.engine_host.hear_agents()
        self._flushed(self._progress_log.flush_waiting(self.engine_host))
        left = self.engine_host.step()
        self._progress_log.measure(self.engine_host, [rows for _, rows in left])
        for call, rows in left:
            self._generated(call, rows)
        if left:
            self._progress_log.measure(self.engine_host)
        self._flushed(self._progress_log.due(self.engine_host))

    def _flushed(self, records: Iterable[tuple[Call, Batch, Place]]) -> None:
        """Say what was written of samples that run."""
        for call, rows, place in records:
            self._send(m.Flushed(call.ordinal, rows.ids.tolist(), *call_semantics.lengths_of(rows), version_spans_of(rows), place))

    def _send_turns(self) -> bool:
        """Ask other workers for turns of episodes here, and answer what they have asked for; returns whether there was any. A dead one gets
        nothing: its samples are preempted here, or were lost with it."""
        asked, answered = self.engine_host.take_turns()
        for key, parts in ((TURNS_ASKED, asked), (TURNS_ANSWERED, answered)):
            for peer, rows in parts:
                start = now_ns()
                if self._peers.send(peer, Parcel(key, rows, self.settings.tag)):
                    self.recorder.add(SpanName.SEND, start, now_ns(), num_samples=len(rows), num_bytes=rows.num_bytes, label=peer)
        return bool(asked or answered)

    def _generated(self, call: Call, rows: Batch) -> None:
        """Samples are done: write them down, hand them on, and say so; end their tasks."""
        place = self._progress_log.finished(call.ordinal, rows)
        for task, positions, ends in self._tasks.finished(rows.ids.tolist()):
            if task.spills:
                own = rows.ids[positions]
                self._store.spill(call.ordinal, own.tolist(), lambda own=own: self._progress_log.read(place).select(own))  # type: ignore[misc]
            self._deliver(task.number, call, rows.take(positions), task.forward_to, place, ends=ends, keeps=not task.spills)

    def _deliver(
        self,
        task: int,
        call: Call,
        rows: Batch,
        forward_to: Iterable[str],
        place: tuple[str, int, int, int] | None = None,
        dropped: Sequence[int] = (),
        took_us: int = 0,
        *,
        ends: bool,
        keeps: bool = True,
    ) -> None:
        """Keep rows of a call's result in memory, send them where they are needed, and report them."""
        rows, parts = without_parts(rows)
        if place is None and len(rows) and call.engine == "function" and not call_semantics.gives_reward(call):
            place = self._progress_log.result(call.ordinal, rows)
        if len(rows):
            if keeps:
                self._store.put(call.ordinal, rows)
            self._forward(call.ordinal, rows, forward_to)
        self._send(finished(task, call, rows, place, dropped, parts, took_us, ends=ends))

    def _forward(self, call: int, rows: Batch, to: Iterable[str]) -> None:
        for peer in to:
            start = now_ns()
            if peer != self.settings.tag and self._peers.send(peer, Parcel(call, rows, self.settings.tag)):
                self.recorder.add(SpanName.SEND, start, now_ns(), call=call, num_samples=len(rows), num_bytes=rows.num_bytes, label=peer)

    def _send(self, message: m.ToController) -> None:
        self._link.send(m.encode(message))

    def flush_spans(self, *, force: bool) -> None:
        """Send what was recorded; not more often than a few times a second while there is work."""
        passed_ns = now_ns() - self._flushed_ns
        if (self._flushed_ns and passed_ns > _COUNT_NS) or (len(self.recorder) and (force or passed_ns > _FLUSH_SPANS_NS)):
            self._gauges.record(self._peers.statistics())
            self._flushed_ns = now_ns()
            if len(self.recorder):
                self._send(m.Spans(self.recorder.drain()))
