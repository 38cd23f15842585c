"""The scheduler under programs and workers that hypothesis makes up: calls of every kind, messages late and twice, tasks that fail,
workers that die and come back.

The rules are those of `m2flow.testing.scheduler_model`; the moves are in `machine_lines`. Random walks make the same moves without
hypothesis, many times faster; `pytest --long` takes millions of events. That the rules see anything is tested too: each of a list of small
breakages of the scheduler, and of the queue by which workers read its messages, must be found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from machine_lines import MOVES, Program, ProgramLines, cluster, random_walk, roles

from m2flow.errors import RewardError
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import FromWorker
from m2flow.micro.protocol.plan import Pace
from m2flow.micro.protocol.worker_state import Lease, TaskState, WorkerState
from m2flow.micro.scheduler import scheduling_policy_dispatch, weights
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle
from m2flow.micro.scheduler.call_state import CallState, MicroBatch, UpdateProgress
from m2flow.micro.scheduler.dispatch import RolloutDispatch
from m2flow.micro.scheduler.partial_rollouts import PartialRollouts
from m2flow.micro.scheduler.ready_queues import ReadyWorkers, Tasks
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.state import RowLocations
from m2flow.micro.scheduler.weights import Versions
from m2flow.micro.worker.task_queue import TaskQueue
from m2flow.testing.scheduler_model import FakeWorker, Model

Patch = pytest.MonkeyPatch

_numbers = st.integers(0, 1 << 16)


class SchedulerMachine(RuleBasedStateMachine):
    """One program on one cluster; at its end everything must be done and forgotten."""

    program: Program | None = None

    @initialize(
        placement=st.sampled_from(["split", "time-shared"]),
        num_workers=st.integers(1, 3),
        max_running=st.sampled_from([1, 3, 64]),
        token_budget=st.sampled_from([1, 30, 4096]),
        num_functions=st.integers(1, 2),
        staleness=st.integers(0, 2),
        seed=st.integers(0, 1 << 30),
        deterministic=st.booleans(),
        fails=st.booleans(),
        dies=st.booleans(),
    )
    def begin(
        self,
        placement: str,
        num_workers: int,
        max_running: int,
        token_budget: int,
        num_functions: int,
        staleness: int,
        seed: int,
        deterministic: bool,
        fails: bool,
        dies: bool,
    ) -> None:
        spec = cluster(placement, num_workers, max_running, token_budget, num_functions)
        self.program = Program(spec, staleness=staleness, seed=seed, deterministic=deterministic, fails=fails, dies=dies)

    @rule(move=st.sampled_from(MOVES), a=_numbers, b=_numbers)
    def move(self, move: str, a: int, b: int) -> None:
        assert self.program is not None
        self.program.do(move, a, b)

    def teardown(self) -> None:
        if self.program is not None:
            try:
                self.program.end()
            finally:
                self.program.close()


def test_every_rule_holds_after_every_move(request):
    long = request.config.getoption("--long")
    several = settings(max_examples=1000 if long else 20, stateful_step_count=80 if long else 40, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=several)  # type: ignore[no-untyped-call]


def test_a_walk_ends_where_state_is_lost_that_nobody_else_has():
    random_walk(900018, 120, dies=True)  # It is found only when rows in transfer have been counted.


@pytest.mark.parametrize("dies", [False, True], ids=["all workers stay", "workers die and come back"])
def test_every_rule_holds_on_random_walks(request, dies):
    walks, wanted = 0, 1_500_000 if request.config.getoption("--long") else 4_000
    num_events = 0
    while num_events < wanted:
        num_events += random_walk(walks, 60 + walks % 3 * 60, dies=dies)
        walks += 1


@pytest.mark.parametrize("dies", [False, True], ids=["all workers stay", "workers die and come back"])
def test_every_rule_holds_where_what_waits_for_an_engine_moves(request, monkeypatch, dies):
    """Reports come late, too: of samples that have ended or moved, and of calls that are over and forgotten."""
    begun: list[int] = []
    turn, begin = FakeWorker.turn, RolloutDispatch.begin_at

    def reports(self: FakeWorker, rng: random.Random) -> None:
        turn(self, rng)
        of_role: dict[str, list[int]] = {}
        for packed, sample in self._inflight.items():
            of_role.setdefault(self._calls[sample.task.call].role, []).append(packed)
        for role, ids in of_role.items():
            counts = [rng.randint(1, 60) for _ in ids]
            self.said.append(
                m.Queued(role, rng.choice([1, 4, 64]), rng.choice([5.0, 500.0]), rng.choice([0, 20, 300]), ids, counts, counts, counts)
            )

    def noted(self: RolloutDispatch, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        before = len(call_state.ready)
        begin(self, worker, call_state, rows)
        begun.append(before - len(call_state.ready))

    monkeypatch.setattr(FakeWorker, "turn", reports)
    monkeypatch.setattr(RolloutDispatch, "begin_at", noted)
    monkeypatch.setattr(scheduling_policy_dispatch, "_DEFAULT_PACE", Pace("", 1.0, 0.0, 0.0, 0.0, "given"))
    walks = num_events = 0
    while num_events < (500_000 if request.config.getoption("--long") else 8_000):
        num_events += random_walk(walks, 60 + walks % 3 * 60, dies=dies)
        walks += 1
    assert sum(begun) > 9, "some have moved"


def test_a_dead_worker_that_should_take_over_finished_samples_and_send_them_on_has_not_sent_them():
    random_walk(5092, 90, dies=True)  # It was told so between its death and the others' answers.


def test_a_worker_is_lost_with_a_sample_whose_weights_the_others_are_about_to_replace():
    random_walk(1130, 180, dies=True)


def test_what_a_task_of_a_refill_that_fails_had_not_begun_is_offered_to_others_too():
    random_walk(1150, 120, dies=True)


def test_a_sample_that_was_said_to_be_stopped_is_said_so_again_when_another_has_been_sent_it():
    random_walk(1371, 60, dies=True)


def test_rows_that_never_came_to_a_worker_that_is_lost_too_do_not_make_it_known_there():
    random_walk(4991, 180, dies=True)


def test_a_call_that_had_stopped_a_sample_is_forgotten_when_another_has_stopped_it_again():
    random_walk(50, 180)


def test_a_lease_is_asked_again_when_more_rows_come_after_others_took_the_first_ones():
    random_walk(20581, 120)


def test_rows_of_a_call_that_fails_before_it_is_heard_where_they_were_sent_can_be_forgotten_there():
    random_walk(10213, 120, dies=True)


def test_a_sample_of_a_refill_that_fails_does_not_keep_those_before_it_from_being_tried():
    model = Model(roles, cluster("split", 1, 64, 4096, 1))
    try:
        lines = ProgramLines()
        answers = lines.refill(0, count=1)
        model.submit()
        fake = model.fakes["rollout-0"]
        task = next(message for message in fake.inbox if isinstance(message, m.Generate))
        fake.inbox.remove(task)
        model.tell(FromWorker(fake.name, m.TaskFailed(task.number, task.call, RewardError("no").to_record(), task.ids[1])))
        model.drain()
        assert answers.ref.call in model.rejected  # The second failed, when the first had been tried.
    finally:
        model.close()


# The rules see something: breakages of our own classes, each of which some walk must find.


def any_version_will_do(patch: Patch) -> None:
    patch.setattr(weights, "may_use", lambda state, version, role="": True)


def a_lease_is_everybodys(patch: Patch) -> None:
    patch.setattr(WorkerState, "roles_at", lambda self, turn, kind: self.roles[kind])


def a_lease_moves_while_somebody_works(patch: Patch) -> None:
    patch.setattr(Lease, "is_idle", property(lambda self: True))


def what_is_told_twice_counts_twice(patch: Patch) -> None:
    whole = CallLifecycle.rows_done

    def counted(
        self: CallLifecycle, state: CallState, worker: str, ids: Iterable[int], num_tokens: Iterable[int], *rest: Iterable[int]
    ) -> int:
        rows = list(ids)
        whole(self, state, worker, rows, num_tokens, *rest)
        return len(rows)

    patch.setattr(CallLifecycle, "rows_done", counted)


def a_task_ends_twice(patch: Patch) -> None:
    ended: dict[int, TaskState] = {}
    end = Tasks.end

    def twice(self: Tasks, number: int) -> TaskState | None:
        found = end(self, number)
        if found is None:
            return ended.get(number)
        ended[number] = found
        return found

    patch.setattr(Tasks, "end", twice)


def a_micro_batch_is_handed_out_again(patch: Patch) -> None:
    take = UpdateProgress._take
    again = [0]

    def sometimes(self: UpdateProgress, step: MicroBatch) -> None:
        again[0] += 1
        if again[0] % 3:
            take(self, step)

    patch.setattr(UpdateProgress, "_take", sometimes)


def an_epoch_less(patch: Patch) -> None:
    init = UpdateProgress.__init__
    patch.setattr(UpdateProgress, "__init__", lambda self, groups, **kw: init(self, groups, **(kw | {"epochs": 1})))


def an_optimiser_step_too_early(patch: Patch) -> None:
    begin = UpdateProgress._begin

    def early(self: UpdateProgress) -> None:
        begin(self)
        if self._epoch and len(self._todo) > 1:
            self._todo.pop()

    patch.setattr(UpdateProgress, "_begin", early)


def half_trained_weights_are_a_version(patch: Patch) -> None:
    patch.setattr(Versions, "step_dispatched", lambda self, role: None)


def nobody_is_woken_by_new_weights(patch: Patch) -> None:
    patch.setattr(ReadyWorkers, "wake_role", lambda self, *roles: None)


def nothing_is_forgotten(patch: Patch) -> None:
    patch.setattr(CallLifecycle, "forget_unreachable", lambda self: None)


def everything_released_is_forgotten(patch: Patch) -> None:
    patch.setattr(PartialRollouts, "needed", lambda self: set())


def rows_are_never_sent_on(patch: Patch) -> None:
    send = RowLocations.send
    patch.setattr(RowLocations, "send", lambda self, call, rows, to: {} if "functions" in to else send(self, call, rows, to))


def rows_are_taken_to_be_where_they_are_not(patch: Patch) -> None:
    made = RowLocations.made
    patch.setattr(RowLocations, "made", lambda self, call, rows, owner, sent: made(self, call, rows, owner, (*sent, "functions-0")))


def late_samples_go_on_before_they_have_stopped(patch: Patch) -> None:
    take_over = PartialRollouts._take_over

    def hasty(self: PartialRollouts, state: CallState) -> None:
        before = self._state.calls.get(state.carry.previous) if state.carry and state.carry.previous is not None else None
        tasks_at: dict[str, int] = {}
        if before is not None:
            tasks_at, before.tasks_at = before.tasks_at, {}
        take_over(self, state)
        if before is not None:
            before.tasks_at = tasks_at

    patch.setattr(PartialRollouts, "_take_over", hasty)


def whole_groups_are_miscounted(patch: Patch) -> None:
    turned_out = CallState.turned_out

    def counted(self: CallState, done: Iterable[int], dropped: Iterable[int]) -> None:
        before = self.num_whole if self.is_generation else 0
        turned_out(self, done, dropped)
        if self.is_generation and self.num_whole > before:
            self.num_whole = before + 1

    patch.setattr(CallState, "turned_out", counted)


def failures_do_not_spread(patch: Patch) -> None:
    fail = CallLifecycle.fail

    def alone(self: CallLifecycle, state: CallState, error: object, *, root: int | None = None) -> None:
        if root is None:
            fail(self, state, error)  # type: ignore[arg-type]

    patch.setattr(CallLifecycle, "fail", alone)


# Some that were real.


def what_drew_carried_samples_is_kept_for_ever(patch: Patch) -> None:
    ended = PartialRollouts.ended

    def as_it_was(self: PartialRollouts, state: CallState) -> CallState | None:
        patch_of_involved = PartialRollouts._involved
        PartialRollouts._involved = lambda self, state, rows: set()  # type: ignore[method-assign]
        try:
            return ended(self, state)
        finally:
            PartialRollouts._involved = patch_of_involved  # type: ignore[method-assign]

    patch.setattr(PartialRollouts, "ended", as_it_was)


def a_lost_message_stops_everything(patch: Patch) -> None:
    handle = Scheduler._from_worker
    heard = [0]

    def deaf(self: Scheduler, name: str, message: m.Finished | m.Aborted | m.TaskDone | m.TaskFailed) -> None:
        heard[0] += 1
        if heard[0] % 97:
            handle(self, name, message)

    patch.setattr(Scheduler, "_from_worker", deaf)


def a_task_overtakes_another(patch: Patch) -> None:
    patch.setattr(TaskQueue, "pop", lambda self: self._waiting.pop())


def a_task_starts_without_its_rows(patch: Patch) -> None:
    patch.setattr(TaskQueue, "rows_needed", lambda self: [])


def an_aborted_task_that_waited_is_not_answered(patch: Patch) -> None:
    whole = TaskQueue._abort

    def abort(self: TaskQueue, call: int, *, keeps: bool) -> None:
        self._waiting = deque(task for task in self._waiting if task.call != call)
        whole(self, call, keeps=keeps)

    patch.setattr(TaskQueue, "_abort", abort)


def a_generate_task_ends_before_its_last_sample(patch: Patch) -> None:
    leaves = TaskQueue._leaves
    patch.setattr(TaskQueue, "_leaves", lambda self, number, count: leaves(self, number, self._generations[number].num_left))


BUGS: list[Callable[[Patch], None]] = [
    any_version_will_do,
    a_lease_is_everybodys,
    a_lease_moves_while_somebody_works,
    what_is_told_twice_counts_twice,
    a_task_ends_twice,
    a_micro_batch_is_handed_out_again,
    an_epoch_less,
    an_optimiser_step_too_early,
    half_trained_weights_are_a_version,
    nobody_is_woken_by_new_weights,
    nothing_is_forgotten,
    everything_released_is_forgotten,
    rows_are_never_sent_on,
    rows_are_taken_to_be_where_they_are_not,
    late_samples_go_on_before_they_have_stopped,
    whole_groups_are_miscounted,
    failures_do_not_spread,
    what_drew_carried_samples_is_kept_for_ever,
    a_lost_message_stops_everything,
    a_task_overtakes_another,
    a_task_starts_without_its_rows,
    an_aborted_task_that_waited_is_not_answered,
    a_generate_task_ends_before_its_last_sample,
]
_MOST_WALKS = 400


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_broken_rule_is_found(monkeypatch, bug):
    bug(monkeypatch)
    for seed in range(_MOST_WALKS):
        try:
            random_walk(seed, 60)
        except Exception:  # A rule of the model, or one that the scheduler has itself.
            return
    pytest.fail(f"no rule was broken in {_MOST_WALKS} walks")
