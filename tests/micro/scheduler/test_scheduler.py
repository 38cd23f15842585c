"""The scheduler, driven by events alone: what it must never tell a worker, whatever comes first, twice or late.

`Rig` plays the workers: it checks each command against what the workers have, and answers in an order that a seed decides. Each
worker does its tasks in order, except that generation goes on beside them.
"""

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, nll, op, ppo_clip, steps
from m2flow.channels.weights import Manifest
from m2flow.errors import EngineError, RewardError, StateLost
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    CallAdded,
    Event,
    Forgotten,
    FromWorker,
    Reject,
    Released,
    Resolve,
    Send,
    Sourced,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Plan, Stage
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.samples import Batch, group_key
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

many = settings(max_examples=150, deadline=None)


def zero(sample: Sample) -> float:
    return 0.0


def one(sample: Sample) -> float:
    return 1.0


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@flow
def program(num_steps: int = 2, batch: int = 3, n: int = 2) -> None:
    policy, verifier, other = Policy("fake"), Reward(zero), Reward(one)
    prompts, demos = Dataset([{"prompt": "a"}] * 4), Dataset([{"prompt": "a", "target": "b"}] * 4, name="demos")
    policy.update(demos.all(), loss=nll())
    reference = Reference(policy)
    for _ in steps(num_steps):
        verifier.score(policy.generate(prompts.take(2), max_new_tokens=3, temperature=0)).mean()
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=5)
        ranks(responses)
        other.score(responses)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, minibatch_size=2, epochs=2)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    return ClusterSpec(
        placement=draw(st.sampled_from(["time-shared", "split"])),
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=draw(st.integers(1, 3)), max_running=draw(st.sampled_from([1, 3, 64]))),
        train=TrainSpec(engine="fake", token_budget=draw(st.sampled_from([1, 30, 4096]))),
        functions=FunctionSpec(workers=draw(st.integers(1, 2)), chunk=draw(st.sampled_from([1, 64]))),
    )


class Rig:
    """Workers that do nothing but say that they did, and a judge of all that they are told."""

    def __init__(
        self,
        cluster: ClusterSpec,
        seed: int = 0,
        *,
        repeats: bool = False,
        fails: tuple[int, ...] = (),
        placed: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        graph, models, _ = trace(program, {}, steps=2)
        self.plan = placed(lower(graph, models, cluster))
        self.calls: dict[int, Call] = {call.ordinal: call for call in graph.calls}
        self.stages: dict[int, Stage] = dict(zip(self.calls, Lowering(self.plan, cluster).stages(graph), strict=True))
        self.scheduler = Scheduler(self.plan)
        self.random = random.Random(seed)
        self.repeats = repeats
        self.fails = fails
        """Calls whose every task fails."""
        self.resolved: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.forgotten: set[int] = set()
        self.aborted: dict[str, set[int]] = {w.name: set() for w in self.plan.workers}
        self.at: dict[str, set[tuple[int, int]]] = {w.name: set() for w in self.plan.workers} | {CONTROLLER: set()}
        """Rows that are at a place or on the way there."""
        self.queues: dict[str, deque[m.Task]] = {w.name: deque() for w in self.plan.workers}
        self.generating: dict[str, dict[int, tuple[m.Generate, list[int]]]] = {w.name: {} for w in self.plan.workers}
        self.held = {(w.name, s.role): 0 for w in self.plan.workers for s in w.engines if s.kind == "rollout"}
        self.trained = {s.role: 0 for w in self.plan.workers for s in w.engines if s.kind == "train"}
        self.published: dict[str, int] = {}
        self.owner = {w.name: "rollout" for w in self.plan.workers if w.lease}
        self.accumulated: list[tuple[int, int, int]] = []
        self.said: list[FromWorker] = []
        self.speeds = {w.name: self.random.choice([0.001, 1.0, 1.0]) for w in self.plan.workers}

    # What the program does.

    def add(self, ordinal: int) -> None:
        call = self.calls[ordinal]
        self.tell(CallAdded(call, self.stages[ordinal]))
        rows = call.options.get("rows")
        if isinstance(rows, Batch):
            self.at[CONTROLLER].update((ordinal, row) for row in rows.ids.tolist())
            self.tell(Sourced(ordinal, rows.ids.tolist(), [9] * len(rows)))

    def run(self) -> None:
        """Add the calls one by one, release each when no later call takes it, and let the workers do things in between."""
        released: set[int] = set()
        for ordinal in self.calls:
            self.add(ordinal)
            for _ in range(self.random.randrange(12)):
                self.act()
            needed = {ref.call for later, call in self.calls.items() if later > ordinal for _, ref in call.inputs}
            for done in [o for o in self.calls if o <= ordinal and o not in needed | released and self.random.random() < 0.5]:
                released.add(done)
                self.tell(Released(done))
        while self.act():
            pass
        for ordinal in set(self.calls) - released:
            self.tell(Released(ordinal))

    # What the workers do.

    def act(self) -> bool:
        """Something happens at some worker; False if nothing can."""
        names = [name for name in self.queues if self.queues[name] or self.generating[name]]
        if not names:
            return False
        (name,) = self.random.choices(names, [self.speeds[name] for name in names])
        if self.generating[name] and (not self.queues[name] or self.random.random() < 0.7):
            self.generate_one(name)
        else:
            self.do(name, self.queues[name].popleft())
        if self.repeats and self.random.random() < 0.5:
            self.tell(self.random.choice(self.said))
        return True

    def do(self, name: str, task: m.Task) -> None:
        if task.call in self.fails and task.call not in self.aborted[name]:
            self.say(name, m.TaskFailed(task.number, task.call, RewardError(f"call {task.call} failed").to_record()))
            return
        if isinstance(task, m.Generate) and task.call not in self.aborted[name]:
            self.generating[name][task.number] = (task, list(task.ids))
            return
        manifest = None
        if isinstance(task, m.RunFunction | m.Accumulate) and task.call not in self.aborted[name]:
            assert self.inputs_of(task) <= self.at[name], "a task waits for rows that nobody makes before it"
        if isinstance(task, m.RunFunction) and self.calls[task.call].is_aligned:
            self.finish(name, task.number, task.call, task.ids)
        if isinstance(task, m.Accumulate) and task.call not in self.aborted[name]:
            self.accumulated += [(task.call, task.epoch, row) for row in task.ids]
        if isinstance(task, m.Apply) and task.is_last:
            self.trained[self.calls[task.call].role] = task.version
        if isinstance(task, m.PublishWeights):
            assert self.trained[task.role] == task.version
            self.published[task.role] = task.version
            manifest = Manifest(f"{task.role}-{task.version}", 1, ())
        if isinstance(task, m.LoadWeights):
            assert (self.trained if task.manifest is None else self.published)[task.role] == task.version
            self.held[name, task.role] = task.version
        if isinstance(task, m.Switch):
            self.owner[name] = task.to
        self.say(name, m.TaskDone(task.number, 1.0, manifest))

    def generate_one(self, name: str) -> None:
        number = self.random.choice(list(self.generating[name]))
        task, left = self.generating[name][number]
        row = left.pop(self.random.randrange(len(left)))
        self.finish(name, number, task.call, [row])
        if number in self.generating[name] and not left:
            del self.generating[name][number]
            self.say(name, m.TaskDone(number))

    def finish(self, name: str, number: int, call: int, ids: list[int]) -> None:
        for place in {name, *self.stages[call].forward_to}:
            self.at[place].update((call, row) for row in ids)
        self.say(name, m.Finished(number, call, ids, [9] * len(ids), [0] * len(ids), [], [0] * len(ids), [], None))

    def say(self, name: str, message: m.Finished | m.TaskDone | m.TaskFailed) -> None:
        self.said.append(FromWorker(name, message))
        self.tell(self.said[-1])

    # What they are told.

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event):
            match command:
                case Send(worker, message):
                    self.told(worker, message)
                case Resolve(call, _):
                    assert call not in self.resolved
                    assert call not in self.rejected
                    self.resolved.add(call)
                case Reject(call, error):
                    assert call not in self.resolved
                    assert call not in self.rejected
                    self.rejected[call] = str(error)
                case Forgotten(call):
                    assert call not in self.forgotten
                    assert call in self.resolved or call in self.rejected
                    self.forgotten.add(call)
        self.check_that_all_were_asked()

    def check_that_all_were_asked(self) -> None:
        """Only those are asked who may have something new to do; nobody else has."""
        for worker in self.scheduler._state.workers.values():
            assert self.scheduler._offer(worker) is None, f"{worker.name} was not asked"
        for lease in self.scheduler._state.leases.values():
            assert not self.scheduler._turns.next_turn(lease), f"{lease.name} was not asked for"

    def told(self, worker: str, message: m.ToWorker) -> None:
        match message:
            case m.Push(call=call, ids=ids, to=to):
                assert {(call, row) for row in ids} <= self.at[worker], "rows are pushed from where they are not"
                assert not {(call, row) for row in ids} & self.at[to], "a row is sent to where it is already"
                self.at[to].update((call, row) for row in ids)
            case m.Forget(call=call):
                self.at[worker] = {(c, row) for c, row in self.at[worker] if c != call}
            case m.Abort(call=call):
                self.abort(worker, call)
            case m.Task():
                self.check(worker, message)
                self.queues[worker].append(message)

    def abort(self, worker: str, call: int) -> None:
        self.aborted[worker].add(call)
        given_up = [task for task in self.queues[worker] if task.call == call]
        given_up += [task for task, _ in self.generating[worker].values() if task.call == call]
        self.queues[worker] = deque(task for task in self.queues[worker] if task.call != call)
        self.generating[worker] = {n: g for n, g in self.generating[worker].items() if g[0].call != call}
        self.queues[worker].extendleft(given_up)  # They end as done, without having been done.

    def check(self, worker: str, task: m.Task) -> None:
        assert task.call not in self.forgotten
        if task.call >= 0:
            assert task.call not in self.rejected
            assert worker in self.stages[task.call].workers
        if isinstance(task, m.Generate):
            call = self.calls[task.call]
            assert self.held[worker, call.role] == call.reads[0].version, "generation with other weights than the call reads"
            assert not any(isinstance(t, m.LoadWeights) for t in self.queues[worker])
            assert self.num_out(worker) < self.stages[task.call].chunk, "more samples than decode together"
            assert {(call.inputs[0][1].call, prompt) for prompt in task.prompts} <= self.at[worker]
            assert [group_key(row) & 0xFF for row in task.ids] == [group_key(p) & 0xFF for p in task.prompts]
        if isinstance(task, m.RunFunction | m.Accumulate):
            assert task.ids or self.stages[task.call].is_barrier
            # A call may wait in a worker's queue for the rows that an earlier task there makes.
            coming = {(earlier.call, row) for earlier in self.queues[worker] if isinstance(earlier, m.RunFunction) for row in earlier.ids}
            assert self.inputs_of(task) <= self.at[worker] | coming
        if isinstance(task, m.LoadWeights):
            assert not self.generating[worker], "weights change under running samples"
            assert not any(isinstance(t, m.Generate) for t in self.queues[worker])
        if isinstance(task, m.Apply):
            self.check_apply(self.calls[task.call])
        if worker in self.owner:
            self.check_lease(worker, task)

    def inputs_of(self, task: m.RunFunction | m.Accumulate) -> set[tuple[int, int]]:
        return {(ref.call, row) for _, ref in self.calls[task.call].inputs for row in task.ids}

    def num_out(self, worker: str) -> int:
        """Samples that a worker has."""
        queued = sum(len(task.ids) for task in self.queues[worker] if isinstance(task, m.Generate))
        return queued + sum(len(left) for _, left in self.generating[worker].values())

    def check_apply(self, update: Call) -> None:
        """Earlier calls that read the weights which are replaced have had them."""
        old = update.writes[0].version - 1
        for call in self.calls.values():
            reads_old = any((e.resource, e.version) == (update.writes[0].resource, old) for e in call.reads)
            if reads_old and call.ordinal < update.ordinal and call.ordinal not in (*self.resolved, *self.rejected):
                assert call.engine == "rollout"
                assert all(v >= old for (_, role), v in self.held.items() if role == update.role), (
                    "weights are replaced before they were taken"
                )

    def check_lease(self, worker: str, task: m.Task) -> None:
        if isinstance(task, m.Switch):
            assert not self.queues[worker], "a lease changes hands with tasks under way"
            assert not self.generating[worker]
            assert task.to != self.owner[worker]
            return
        assert not any(isinstance(t, m.Switch) for t in self.queues[worker])
        kind = "rollout" if isinstance(task, m.Generate | m.LoadWeights) else "train"
        assert kind == self.owner[worker], f"a {kind} task while the other kind has the device"


@many
@given(clusters(), st.integers(0, 2**30), st.booleans())
def test_every_rule_holds_in_every_order_and_nothing_is_left_in_the_end(cluster, seed, repeats):
    rig = Rig(cluster, seed, repeats=repeats)
    rig.run()
    assert rig.scheduler.is_idle, rig.scheduler.waiting()
    assert rig.resolved == set(rig.calls)
    assert rig.forgotten == set(rig.calls)
    assert not any(rows for rows in rig.at.values()), "rows are kept that nobody can ask for"
    updates = [call for call in rig.calls.values() if call.method == "update"]
    expected = [len(rig.calls[c.inputs[0][1].call].options.get("rows", range(6))) * c.options["epochs"] for c in updates]
    assert len(rig.accumulated) == len(set(rig.accumulated)) == sum(expected)


def dependents(calls: dict[int, Call], failed: int) -> set[int]:
    """What fails with a call: by data, or because it reads what the call should have written."""
    found = {failed}
    for call in calls.values():
        written = {effect for other in found for effect in calls[other].writes}
        if any(ref.call in found for _, ref in call.inputs) or any(effect in written for effect in call.reads):
            found.add(call.ordinal)
    return found


@many
@given(clusters(), st.integers(0, 2**30), st.booleans(), st.data())
def test_a_failed_task_fails_its_call_and_exactly_what_depends_on_it(cluster, seed, repeats, data):
    failing = data.draw(st.sampled_from([o for o, c in Rig(cluster).calls.items() if c.engine != "source"]))
    rig = Rig(cluster, seed, repeats=repeats, fails=(failing,))
    rig.run()
    assert set(rig.rejected) == dependents(rig.calls, failing)
    assert rig.resolved == set(rig.calls) - set(rig.rejected)
    assert all(f"call {failing} failed" in error for error in rig.rejected.values())
    assert rig.scheduler.is_idle
    assert rig.forgotten == set(rig.calls) - set(rig.rejected)  # An earlier failure might still have reached those.


def test_everything_that_changes_is_in_the_state_and_deciders_have_nothing_besides():
    graph, models, _ = trace(program, {})
    scheduler = Scheduler(lower(graph, models, ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"))))
    state = scheduler._state
    parts = [state, *vars(state).values()]
    todo: list[object] = [value for name, value in vars(scheduler).items() if not name.startswith("_dispatches")]
    seen = 0
    while todo:
        found = todo.pop()
        if any(found is part for part in parts) or callable(found):
            continue
        assert type(found).__module__.startswith("m2flow.micro.scheduler."), f"a decider has {found!r}"
        todo += vars(found).values()
        seen += 1
    assert seen >= 10, "the deciders, and those that they ask"


def first(rig: Rig, method: str, role: str = "") -> int:
    return next(o for o, c in rig.calls.items() if c.method == method and role in c.role)


SPLIT = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def test_a_call_added_after_what_it_depends_on_has_failed_fails_at_once_with_the_place_of_that():
    rig = Rig(SPLIT, fails=(1,))
    rig.add(0)
    rig.add(1)
    while rig.act():
        pass
    rig.add(2)
    assert set(rig.rejected) == {1, 2}
    assert "policy.update(demos.all()" in rig.rejected[2]


def test_what_fails_is_given_up_wherever_it_runs():
    cluster = SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", workers=2)})
    rig = Rig(cluster, seed=3)
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    while any(rig.queues.values()):
        name = next(name for name, queue in rig.queues.items() if queue)
        rig.do(name, rig.queues[name].popleft())
    (number,) = rig.generating["rollout-0"]
    rig.say("rollout-0", m.TaskFailed(number, generate, RewardError("no").to_record()))
    assert generate in rig.aborted["rollout-1"]
    rig.do("rollout-1", rig.queues["rollout-1"].popleft())  # The end of what was given up.
    assert rig.rejected.keys() == {generate}
    assert rig.scheduler.is_idle


def test_wanted_rows_come_to_the_controller_once_they_are_there_and_only_once():
    rig = Rig(SPLIT)
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    rig.tell(Wanted(generate))
    assert not any(call == generate for call, _ in rig.at[CONTROLLER])
    while rig.act():
        pass
    assert sum(call == generate for call, _ in rig.at[CONTROLLER]) == rig.scheduler.num_rows(generate)
    rig.tell(Wanted(generate))  # The judge in `told` refuses a second push.


def test_a_released_call_is_kept_until_who_reads_it_is_done():
    rig = Rig(SPLIT)
    generate, score = first(rig, "generate"), first(rig, "score")
    for ordinal in range(score + 1):
        rig.add(ordinal)
    rig.tell(Released(generate))
    while score not in rig.resolved:
        assert generate not in rig.forgotten
        rig.act()
    assert generate in rig.forgotten


def test_what_waits_is_said_in_words():
    rig = Rig(SPLIT)
    for ordinal in range(3):
        rig.add(ordinal)
    assert any("reference.copy_of" in line and "after policy.update" in line for line in rig.scheduler.waiting())
    assert rig.scheduler.running() == {"train-0": "policy.update"}


@pytest.mark.parametrize("kind", [m.TaskDone(77), m.TaskFailed(77, 0, RewardError("late").to_record())], ids=["done", "failed"])
def test_the_end_of_a_task_that_nobody_has_changes_nothing(kind):
    assert Rig(SPLIT).scheduler.handle(FromWorker("train-0", kind)) == []


def test_a_failure_that_belongs_to_no_call_ends_the_run():
    rig = Rig(SPLIT)
    for ordinal in range(first(rig, "generate") + 1):
        rig.add(ordinal)
    while not any(isinstance(task, m.LoadWeights) for task in rig.queues["rollout-0"]):
        rig.act()
    load = rig.queues["rollout-0"].popleft()
    with pytest.raises(EngineError, match="the weights differ"):
        rig.say("rollout-0", m.TaskFailed(load.number, -1, EngineError("the weights differ").to_record()))


@pytest.mark.parametrize("returns", [False, True], ids=["for good", "until it is restarted"])
def test_a_worker_that_is_lost_with_samples_of_weights_that_the_others_have_replaced_ends_the_run(returns):
    rig = Rig(SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", workers=2)}))
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    while not rig.generating["rollout-0"]:
        rig.act()
    rig.generating["rollout-0"].clear()  # It never ends these.
    for ordinal in range(generate + 1, len(rig.calls)):
        rig.add(ordinal)
    while rig.act():
        pass
    assert [rig.held[name, "policy"] for name in ("rollout-0", "rollout-1")] == [1, 2]
    with pytest.raises(StateLost, match=r"no other has the weights that policy\.generate began with"):
        rig.tell(WorkerLost("rollout-0", returns=returns))


@op(writes=["notes"])
def noted(sample: Sample) -> float:
    return 1.0


@flow
def notes() -> None:
    noted(Dataset([{"prompt": "a"}] * 3).take(3)).mean()


def test_what_a_call_that_writes_had_not_reported_when_its_worker_was_lost_is_run_in_one_piece_when_it_is_back():
    graph, models, _ = trace(notes, {}, steps=1)
    spec = ClusterSpec(device="cpu", cores=2)
    plan = lower(graph, models, spec)
    scheduler, worker = Scheduler(plan), "functions-0"
    calls = {call.role: call for call in graph.calls}
    stages = Lowering(plan, spec).stages(graph)
    rows = calls["dataset"].options["rows"].ids.tolist()

    def tasks(*events: Event) -> list[list[int]]:
        sent = [command for event in events for command in scheduler.handle(event) if isinstance(command, Send)]
        return [to.message.ids for to in sent if isinstance(to.message, m.RunFunction) and to.message.call == calls["noted"].ordinal]

    added = [CallAdded(call, stage) for call, stage in zip(graph.calls, stages, strict=True)]
    assert tasks(*added, Sourced(calls["dataset"].ordinal, rows, [1] * 3)) == [rows]
    assert tasks(FromWorker(worker, m.Finished(1, calls["noted"].ordinal, rows[:1], [1], [0], [], [0], [], None))) == []
    assert tasks(WorkerLost(worker, returns=True), WorkerJoined(worker, 1)) == [rows[1:]]
