"""A chain of calls on functions goes on in its worker without a word from the controller in between, where nothing is lost by that.

The real scheduler and real workers in one thread, in many orders: what a worker is told before its rows are made, and that the answer is
eager's when calls fail or workers are lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from named_next import next_is_named, wait_until_next_is_named

from m2flow import Dataset, Policy, Reward, Sample, flow, log, op, steps
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import call_body
from m2flow.micro.protocol.events import CallAdded, Event, FromWorker, Send, Sourced, WorkerLost
from m2flow.micro.scheduler.ready_queues import MAX_QUEUED
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.function_tasks import BegunCall, Functions
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import make_worker, run_eager, run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")

ROWS = [{"prompt": f"{i} + {i} ="} for i in range(8)]


def spec_of(*, workers: int = 1, chunk: int = 64) -> ClusterSpec:
    functions = FunctionSpec(workers=workers, chunk=chunk)
    return ClusterSpec(
        cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=functions, placement="split"
    )


@op(granularity="sample")
def begin(sample: Sample) -> int:
    return len(str(sample["prompt"]))


@op(granularity="sample")
def further(value: int) -> int:
    return value + 1


@op(granularity="sample")
def breaks_at_nine(value: int) -> int:
    if value == 9:
        raise ValueError("nine")
    return value + 1


@op(granularity="batch", per_sample=True)
def ranked(values: list[int]) -> list[int]:
    return sorted(values)


@op(granularity="sample")
def other(value: int) -> int:
    return -value


@flow
def chained(num_steps: int = 2) -> None:
    rows = Dataset(ROWS)
    for _ in steps(num_steps):
        value = begin(rows.take(4))
        for _ in range(4):
            value = further(value)
        log(mean=(ranked(value) * 2 - 1).mean())


@flow
def by_sample() -> None:
    value = further(begin(Dataset(ROWS).take(4)))
    log(mean=(value * 2 - 1).mean())


@flow
def broken(num_steps: int = 2) -> None:
    rows = Dataset(ROWS)
    for _ in steps(num_steps):
        value = begin(rows.take(4))
        for _ in range(4):
            value = breaks_at_nine(value)
        log(mean=further(value).mean())


@flow
def branched() -> None:
    value = begin(Dataset(ROWS).take(1))
    log(one=further(value).mean(), other=other(value).mean())


@flow
def judged(num_steps: int = 2) -> None:
    """A chain on samples that were generated, before an update."""
    policy, reward, rows = Policy("fake"), Reward(lambda sample: float(len(str(sample.text)))), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(rows.take(4), n=2, max_new_tokens=6)
        rewards = reward.score(responses)
        policy.update(responses, (rewards - rewards.mean(over="group")) * 0.5)


def early(program: Callable[..., object], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch, **how: int) -> tuple[list[str], object]:
    """The calls that were handed out before their rows were made, and the run's answer."""
    found: list[str] = []
    handle = Scheduler.handle

    def watched(self: Scheduler, *events: object) -> list[object]:
        commands = handle(self, *events)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, m.RunFunction):
                state = self._state.calls[command.message.call]
                if any(not self._state.calls[source].is_done for source in state.aligned_inputs) and state.early is not None:
                    found.append(state.call.name)
        for worker in self._state.workers.values():
            assert worker.num_tasks["function"] <= MAX_QUEUED
        return commands  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "handle", watched)
        answer = run_planned(program, {}, spec, **how)  # type: ignore[arg-type]
    return found, answer


@pytest.mark.parametrize("program", [chained, judged])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_answer_is_that_of_eager_in_every_order(program, workers, monkeypatch):
    spec = spec_of(workers=workers)
    eager = run_eager(program, {}, spec)
    assert eager.error == ""
    for order_seed in range(4):
        found, answer = early(program, spec, monkeypatch, order_seed=order_seed)
        assert answer == eager
        assert found or program is judged  # Rewards come as samples are done, and what is made of them does so too.


def test_the_next_call_of_a_chain_waits_in_the_queue_of_the_worker_that_makes_its_rows(monkeypatch):
    found, _ = early(chained, spec_of(), monkeypatch, order_seed=0)
    assert found.count("further") >= 4


def test_with_several_workers_a_function_on_samples_is_left_to_who_is_free(monkeypatch):
    found, _ = early(chained, spec_of(workers=2), monkeypatch, order_seed=0)
    assert "further" not in found  # Rows of a slow task are known before its end, and another worker could begin.
    assert "multiply" in found or "subtract" in found


def test_two_calls_that_wait_for_the_same_rows_may_go_to_two_workers(monkeypatch):
    for order_seed in range(4):
        found, _ = early(branched, spec_of(workers=2), monkeypatch, order_seed=order_seed)
        assert not {"further", "other"} <= set(found)  # One may be known before the other.


def test_a_call_in_several_tasks_is_not_waited_for(monkeypatch):
    assert early(by_sample, spec_of(chunk=2), monkeypatch, order_seed=0)[0] == []
    assert early(by_sample, spec_of(workers=2), monkeypatch, order_seed=0)[0] == []  # Each of the two has some of the rows.


def test_a_failure_reaches_what_waits_behind_it_and_the_worker_goes_on(monkeypatch):
    spec = spec_of()
    eager = run_eager(broken, {}, spec)
    assert "nine" in eager.error
    for order_seed in range(6):
        found, answer = early(broken, spec, monkeypatch, order_seed=order_seed)
        assert found
        assert (answer.error, answer.where) == (eager.error, eager.where)


@flow
def pair() -> None:
    log(value=further(begin(Dataset(ROWS).take(1))).mean())


def test_a_call_that_waits_behind_another_at_a_worker_that_is_lost_waits_for_its_rows_again():
    spec = spec_of(workers=2)
    graph, models, _ = trace(pair, {})
    plan = lower(graph, models, spec)
    scheduler = Scheduler(plan)
    calls = {call.name: call for call in graph.calls}
    rows = calls["dataset.take"].options["rows"].ids.tolist()
    said: list[tuple[str, str]] = []

    def tell(*events: Event) -> None:
        for command in scheduler.handle(*events):
            if isinstance(command, Send) and isinstance(command.message, m.RunFunction):
                task = command.message
                numbers[command.worker, graph.calls[task.call].name] = task.number
                said.append((command.worker, graph.calls[task.call].name))

    numbers: dict[tuple[str, str], int] = {}
    stages = Lowering(plan, spec).stages(graph)
    tell(*[CallAdded(call, stage) for call, stage in zip(graph.calls, stages, strict=True)], Sourced(0, rows, [9]))
    assert said[:2] == [("functions-0", "begin"), ("functions-0", "further")]
    said.clear()
    tell(WorkerLost("functions-0"))
    assert said == [("functions-1", "begin")]
    number = numbers["functions-1", "begin"]
    done = m.Finished(number, calls["begin"].ordinal, rows, [0], [0], [], [0], [], None, ends=True)
    tell(FromWorker("functions-1", done))
    assert said[1:] == [("functions-1", "further")]


@flow
def three_times() -> None:
    for _ in steps(3):
        begin(Dataset(ROWS).take(8))


@pytest.mark.parametrize(("took_us", "then"), [(0, [4, 4]), (40, [8]), (4000, [4, 4])])
def test_rows_are_shared_out_unless_a_task_of_the_function_was_quick(took_us, then):
    spec = spec_of(workers=2)
    graph, models, _ = trace(three_times, {}, steps=2)
    plan = lower(graph, models, spec)
    scheduler = Scheduler(plan)
    sizes: list[int] = []
    said: list[FromWorker] = []
    for call, stage in zip(graph.calls, Lowering(plan, spec).stages(graph), strict=True):
        events: list[Event] = [CallAdded(call, stage)]
        if call.engine == "source":
            rows = call.options["rows"].ids.tolist()
            events.append(Sourced(call.ordinal, rows, [9] * 8))
        for command in scheduler.handle(*events):
            if isinstance(command, Send) and isinstance(command.message, m.RunFunction):
                task, zeros = command.message, [0] * len(command.message.ids)
                sizes.append(len(task.ids))
                done = m.Finished(task.number, task.call, task.ids, zeros, zeros, [], zeros, [], None, ends=True, took_us=took_us)
                said.append(FromWorker(command.worker, done))
        scheduler.handle(*said)
        said.clear()
    assert sizes == [4, 4, *then]


def test_what_waits_at_a_worker_that_is_lost_is_done_elsewhere(monkeypatch):
    for program in (chained, judged):
        for workers in (1, 2):
            eager, seen = run_eager(program, {}, spec_of(workers=workers)), 0
            for order_seed in range(8):
                found, answer = early(program, spec_of(workers=workers), monkeypatch, order_seed=order_seed, num_losses=2)
                assert answer == eager
                seen += len(found)
            assert seen or program is judged


@flow
def alone(num_steps: int = 2) -> None:
    rows = Dataset(ROWS)
    for _ in steps(num_steps):
        log(mean=(further(patient(rows.take(1))) * 2).mean())


@flow
def alone_and_broken() -> None:
    log(mean=further(breaks_at_nine(patient(Dataset(ROWS).take(1)))).mean())


@op(granularity="sample")
def patient(sample: Sample) -> int:
    wait_until_next_is_named()
    return 9


def followed_by(program: Callable[..., object], monkeypatch: pytest.MonkeyPatch, **how: int) -> tuple[list[str], object]:
    """The calls that began on the thread of the one before, and the run's answer."""
    found: list[str] = []
    look_ahead, begun_ahead = Functions.look_ahead, Functions.begun_ahead

    def looked(self: Functions, *next_call: object) -> None:
        look_ahead(self, *next_call)  # type: ignore[arg-type]
        next_is_named.set()

    def begun(self: Functions) -> BegunCall | None:
        following = begun_ahead(self)
        if following is not None:
            found.append(following.call.call.name)
        return following

    with monkeypatch.context() as patch:
        patch.setattr(Functions, "look_ahead", looked)
        patch.setattr(Functions, "begun_ahead", begun)
        answer = run_planned(program, {}, spec_of(), **how)  # type: ignore[arg-type]
    return found, answer


def test_a_chain_of_one_row_goes_on_in_the_functions_own_thread(monkeypatch):
    eager, seen = run_eager(alone, {}, spec_of()), 0
    assert eager.error == ""
    for order_seed in range(4):
        found, answer = followed_by(alone, monkeypatch, order_seed=order_seed)
        assert answer == eager
        seen += found.count("further")
    assert seen >= 2


def test_a_failure_in_the_functions_own_thread_is_that_of_the_call_that_failed(monkeypatch):
    eager = run_eager(alone_and_broken, {}, spec_of())
    assert "nine" in eager.error
    found, answer = followed_by(alone_and_broken, monkeypatch, order_seed=0)
    assert found[:1] == ["breaks_at_nine"]
    assert (answer.error, answer.where) == (eager.error, eager.where)


def test_a_chain_in_the_functions_own_thread_goes_on_elsewhere_when_its_worker_is_lost(monkeypatch):
    eager, seen = run_eager(alone, {}, spec_of()), 0
    for order_seed in range(4):
        found, answer = followed_by(alone, monkeypatch, order_seed=order_seed, num_losses=2)
        assert answer == eager
        seen += len(found)
    assert seen


def test_a_call_that_is_aborted_when_it_runs_already_is_left_alone_and_the_worker_goes_on(tmp_path, monkeypatch):
    spec = spec_of()
    graph, models, _ = trace(alone_and_broken, {})
    plan = lower(graph, models, spec)
    worker, link, _ = make_worker(
        plan, plan.worker("functions-0"), models, spec, 0, str(tmp_path), 0, deterministic=False, flush_tokens=1000
    )
    worker.open()
    calls = {call.name: call for call in graph.calls}
    first, second = calls["patient"], calls["breaks_at_nine"]
    rows = calls["dataset.take"].options["rows"]
    worker._store.put(calls["dataset.take"].ordinal, rows)
    for call in (first, second):
        link.to_worker.append(m.encode(m.Define(call.ordinal, call_body(call))))
    for number, call in enumerate((first, second)):
        link.to_worker.append(m.encode(m.RunFunction(number, call.ordinal, rows.ids.tolist(), [])))
    begun_ahead, found = Functions.begun_ahead, []

    def begun(self: Functions) -> BegunCall | None:
        found.append(begun_ahead(self))
        worker._tasks.hear([m.Abort(second.ordinal)])  # It comes when the first function ends.
        return found[-1]

    monkeypatch.setattr(Functions, "begun_ahead", begun)
    worker.turn()
    assert found[0] is not None
    monkeypatch.undo()
    again = m.RunFunction(2, first.ordinal, rows.ids.tolist(), [])
    link.to_worker.append(m.encode(again))
    worker.turn()
    worker.close()
    said = [m.decode_to_controller(body) for body in link.to_controller]
    assert [one.task for one in said if isinstance(one, m.TaskDone)] == [1]
    assert [one.task for one in said if isinstance(one, m.Finished)] == [0, 2]
    assert not any(isinstance(one, m.TaskFailed) for one in said)
