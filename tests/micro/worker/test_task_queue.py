"""A worker's task queue: what starts when, what is aborted, and what is answered. Its executor here has samples, and no engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m2flow.macro.graph import Call, Granularity, Ref, Site
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import stopped_at
from m2flow.micro.worker.task_queue import Answer, RowsNeeded, TaskQueue

NO_PLACE = ("", 0, 0, 0)


def call(ordinal: int, engine: str = "function", gives: str = "column", **inputs: int) -> Call:
    refs = tuple((name, Ref(source)) for name, source in inputs.items())
    made = engine, Granularity.SAMPLE, refs, {"gives": gives}, (), (), Site("flow.py", ordinal, ""), 0, True
    return Call(ordinal, "role", "method", *made)  # type: ignore[arg-type]


CALLS = {
    0: call(0, "source"),
    1: call(1, "rollout", prompts=0),
    2: call(2, samples=1, value=9),
    3: call(3, gives="concat", a=1, b=2),
    4: call(4, "train", samples=1, rewards=2),
}


class Samples:
    """An executor whose samples run until a test says that they have finished."""

    def __init__(self) -> None:
        self.queue = TaskQueue(self)
        self.running: dict[int, int] = {}
        """Sample -> its call."""
        self.with_tokens: set[int] = set()
        self.in_engine: set[int] = set()
        self.done_by_now: list[int] = []
        """Samples that finish when their call is stopped."""
        self.said: list[object] = []
        self.did: list[tuple[object, ...]] = []

    def tell(self, *messages: m.ToWorker) -> None:
        self.queue.hear(messages)
        self.queue.read()

    def start(self) -> m.Task:
        task = self.queue.pop()
        if isinstance(task, m.Generate):
            self.running |= dict.fromkeys(task.ids, task.call)
            self.queue.began(task)
        return task

    def finish(self, *ids: int) -> None:
        for packed in ids:
            del self.running[packed]
        self.said += [("finished", part.task.number, [ids[p] for p in part.positions], part.ends) for part in self.queue.finished(ids)]

    def call(self, ordinal: int) -> Call:
        return CALLS[ordinal]

    def say(self, message: Answer) -> None:
        self.said.append(message)

    def define(self, message: m.Define) -> None:
        self.did.append(("define", message.call))

    def forget(self, call: int) -> None:
        self.did.append(("forget", call))

    def connect(self, peers: m.Peers) -> None:
        self.did.append(("connect", *peers.addresses))

    def disconnect(self, lost: m.PeerLost) -> Mapping[int, list[int]]:
        self.did.append(("disconnect", lost.peer))
        return {call: ids[1:] for call, ids in lost.rows.items()}

    def push(self, call: int, ids: list[int], to: Sequence[str]) -> None:
        self.did.append(("push", call, ids, *to))

    def reassign(self, call: int, drawn: int, ids: list[int]) -> None:
        self.did.append(("adopt", call, drawn, ids))

    def is_running(self, packed: int, call: int, *, queued: bool = False) -> bool:
        return self.running.get(packed) == call and not (queued and packed in self.in_engine)

    def preempt(self, call: int, ids: list[int]) -> m.Aborted | None:
        kept = [packed for packed in ids if packed in self.with_tokens]
        for packed in ids:
            del self.running[packed]
        return aborted(call, kept) if kept else None

    def stop(self, call: int) -> m.Aborted | None:
        self.finish(*self.done_by_now)
        self.done_by_now = []
        kept = [packed for packed in self.running if packed in self.with_tokens and self.running[packed] == call]
        for packed in kept:
            del self.running[packed]
        return aborted(call, kept) if kept else None

    def give_up(self, call: int) -> None:
        self.said.append(("given up", [packed for packed, of in self.running.items() if of == call]))
        self.running = {packed: of for packed, of in self.running.items() if of != call}

    def end(self) -> None:
        self.did.append(("end",))


def aborted(call: int, ids: list[int]) -> m.Aborted:
    return m.Aborted(call, ids, [2] * len(ids), [1] * len(ids), [()] * len(ids), NO_PLACE)


def generate(number: int, ids: list[int], call: int = 1) -> m.Generate:
    return m.Generate(number, call, ids, [0] * len(ids), [], call)


def test_tasks_start_in_the_order_in_which_they_came():
    worker = Samples()
    publish, load = m.PublishWeights(1, -1, "policy", 3), m.LoadWeights(2, -1, "policy", 3, None)
    worker.tell(publish, load, generate(3, [10]), m.RunFunction(4, 2, [5], []))
    assert [worker.start().number for _ in range(4)] == [1, 2, 3, 4]
    assert worker.queue.first is None
    assert worker.queue.rows_needed() == []


def test_each_kind_of_task_names_the_rows_without_which_it_may_not_start():
    worker = Samples()
    worker.tell(
        generate(1, [10, 11]),
        m.Generate(2, 1, [12], [], [], 1, aborted_by=1, had=[7]),
        m.RunFunction(3, 2, [10], [], values={"value": 1.0}),
        m.RunFunction(4, 3, [10, 20], [], parts={1: [10], 2: [20]}),
        m.Accumulate(5, 4, [10, 11], 0, 0),
        m.Apply(6, 4, True, 1),
    )
    needed = [worker.queue.rows_needed() for _ in range(6) if worker.start()]
    assert needed == [
        [RowsNeeded(stopped_at(1), [12], [7])],
        [RowsNeeded(1, [10])],
        [RowsNeeded(1, [10]), RowsNeeded(2, [20])],
        [RowsNeeded(1, [10, 11]), RowsNeeded(2, [10, 11])],
        [],
        [],
    ]


def test_a_generate_task_ends_with_its_last_sample_and_others_go_on_beside_it():
    worker = Samples()
    worker.tell(generate(1, [10, 11]), generate(2, [12]))
    worker.start(), worker.start()
    worker.finish(11, 12)
    worker.finish(10)
    assert worker.said == [("finished", 1, [11], False), ("finished", 2, [12], True), ("finished", 1, [10], True)]


def test_preempted_samples_leave_their_task_and_finished_ones_and_those_of_other_calls_are_left_out():
    worker = Samples()
    worker.tell(generate(1, [10, 11]), generate(2, [12]), generate(3, [13], call=5))
    worker.start(), worker.start(), worker.start()
    worker.with_tokens = {12}
    worker.finish(10)
    worker.tell(m.Preempt(1, [12, 10, 13, 11, 99]))
    assert worker.said[1:] == [aborted(1, [12]), m.Preempted(1, [12, 11], [2, 1]), m.TaskDone(2), m.TaskDone(1)]
    worker.tell(m.Preempt(1, [12, 11]))
    assert len(worker.said) == 5
    assert worker.running == {13: 5}


def test_a_preemption_of_what_waits_for_the_engine_takes_nothing_else_and_is_answered_in_any_case():
    worker = Samples()
    worker.tell(generate(1, [10, 11, 12]))
    worker.start()
    worker.in_engine = {11}
    worker.tell(m.Preempt(1, [11, 12, 99], queued=True))
    assert worker.said == [m.Preempted(1, [12], [1])]
    worker.tell(m.Preempt(1, [11, 12], queued=True))
    assert worker.said[1:] == [m.Preempted(1, [], [])]
    assert set(worker.running) == {10, 11}


def test_a_preemption_that_waits_takes_samples_when_they_have_begun_or_can_be_stopped_and_no_later_task_of_them():
    worker = Samples()
    worker.tell(generate(1, [10, 11]), generate(2, [12, 13]))
    worker.start()
    held = worker.running.pop(10), worker.running.pop(11)  # Neither can be stopped now, and 11 ends before it can be.
    worker.tell(m.Preempt(1, [10, 11, 12], waits=True))
    assert worker.said == []
    worker.start()
    worker.running |= {10: held[0]}
    worker.tell()
    assert worker.said == [m.Preempted(1, [10, 12], [1, 2])]
    worker.running |= {11: held[1]}
    worker.finish(11)
    worker.tell(generate(3, [10, 12]))
    worker.start()
    worker.tell()
    assert worker.said[1:] == [("finished", 1, [11], True)]
    assert worker.running == {13: 1, 10: 1, 12: 1}


def test_an_abort_reports_what_has_finished_then_what_is_kept_then_ends_each_task_once():
    worker = Samples()
    worker.tell(generate(1, [10, 11, 12]), generate(2, [13]), generate(3, [14], call=5))
    for _ in range(3):
        worker.start()
    worker.tell(generate(4, [15]), m.RunFunction(5, 2, [13], []))
    worker.with_tokens, worker.done_by_now = {11}, [13]
    worker.tell(m.Abort(1, keeps=True))
    assert worker.said == [("finished", 2, [13], True), aborted(1, [11]), ("given up", [10, 12]), m.TaskDone(1), m.TaskDone(4)]
    assert worker.start().number == 5
    worker.tell(m.Abort(1, keeps=True), m.Abort(5))
    assert worker.said[5:] == [("given up", []), ("given up", [14]), m.TaskDone(3)]


def test_only_calls_and_tasks_and_what_is_forgotten_are_read_while_a_function_runs():
    worker = Samples()
    worker.queue.hear([m.Define(7, b""), m.Apply(1, 4, False, 1), m.Forget(3), m.Abort(4), m.Define(8, b"")])
    worker.queue.read_during_function()
    assert worker.did == [("define", 7), ("forget", 3)]
    assert worker.queue.has_heard
    worker.queue.read()
    assert worker.did[2:] == [("define", 8)]
    assert worker.said == [("given up", []), m.TaskDone(1)]


def test_news_of_other_processes_is_read_before_what_was_heard_earlier():
    worker = Samples()
    worker.queue.hear([m.Push(1, [10], "a"), m.PeerLost("b", {1: [10, 11]})])
    worker.queue.hear([m.Peers({"b~1": ""}), m.Stop()])
    worker.queue.read_of_peers()
    assert worker.did == [("disconnect", "b"), ("connect", "b~1")]
    assert worker.said == [m.Missing("b", {1: [11]})]
    worker.queue.read()
    assert worker.did[2:] == [("push", 1, [10], "a"), ("end",)]


def test_adopted_rows_are_sent_on_as_rows_of_the_call_that_adopts_them():
    worker = Samples()
    worker.tell(m.Reassign(6, 1, [10], ["a", "b"]))
    assert worker.did == [("adopt", 6, 1, [10]), ("push", 6, [10], "a", "b")]
