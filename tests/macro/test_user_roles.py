"""The user's own roles: state on one worker, calls in the order of their effects, planned as eager; each rule is needed."""

import asyncio
import random
import threading
from collections.abc import Callable

import pytest
from fake_flows import ROWS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Flow, Policy, Role, Sample, call, flow, log, op, steps
from m2flow.errors import OptionError, TraceError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering import passes, placement
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CallAdded, FromWorker, Send, Sourced
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.weights import Versions
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

Patch = pytest.MonkeyPatch
some = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
TWO = ClusterSpec(
    rollout=RolloutSpec(engine="fake", max_running=2), train=TrainSpec(engine="fake"), functions=FunctionSpec(workers=2, chunk=1)
)


class Judge(Role):
    """Likes what it has not seen; what it has seen decides, so the order of calls and of samples shows in each number."""

    def __init__(self, strictness: float, seen: list[int]) -> None:
        self.strictness = strictness
        self.memory = list(seen)
        self.num_calls = 0

    @call(granularity="sample", returns="reward", writes=["judge.memory"])
    def score(self, sample: Sample, bonus: float = 0.0) -> float:
        novelty = sum(abs(length - sample.num_tokens) for length in self.memory[-5:])
        self.memory.append(sample.num_tokens)
        self.num_calls += 1
        return self.scaled(novelty) + bonus

    @call(granularity="batch", reads=["judge.memory"])
    def digest(self) -> float:
        return float(sum(place * length for place, length in enumerate(self.memory)) + 1000 * self.num_calls)

    @call(granularity="group", reads=["judge.memory"], returns=["rank", "last"])
    async def compare(self, samples: list[Sample], rewards: list[float]) -> list[dict[str, float]]:
        await asyncio.sleep(0)
        return [{"rank": sorted(rewards).index(reward), "last": self.memory[-1]} for reward in rewards]

    @call(granularity="sample")
    def plain(self, sample: Sample, rng: random.Random) -> float:
        return round(self.strictness * sample.num_tokens + rng.random(), 6) + len(self.memory)

    @call(reads=["judge.memory"])
    def peek(self, sample: Sample) -> int:
        return sum(self.memory)

    @call(granularity="batch", writes=["judge.memory"])
    def forget(self, keep: int) -> None:
        self.memory = self.memory[-keep:]

    def scaled(self, number: float) -> float:
        return round(number * self.strictness, 6)


@flow
def judged(num_steps: int = 2, batch: int = 3, n: int = 2) -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS)
    seen = [7, 3]
    judge, other = Judge(0.5, seen), Judge(0.25, seen=seen, name="other")
    seen.append(10**9)  # The roles have the list as it was.
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards, others = judge.score(responses), other.score(responses, bonus=step)
        log(before=judge.digest())
        compared = judge.compare(responses, rewards)
        again = judge.score(responses)
        log(other=other.digest(), after=judge.digest(), rewards=rewards.mean(), again=again.mean(), others=others.mean())
        for name, rows in (("plain", judge.plain(responses)), ("rank", compared.rank), ("last", compared.last)):
            log(**{name: float(sum(place * value for place, value in enumerate(rows)))})
        judge.forget(3)
        policy.update(responses, rewards)


@some
@given(clusters(), st.integers(1, 4), st.integers(2, 3), st.integers(0, 2**30))
def test_roles_with_state_give_the_same_planned_and_eager(cluster, batch, n, order_seed):
    options = {"batch": batch, "n": n}
    eager = run_eager(judged, options, cluster)
    assert eager.error == ""
    assert len(eager.rewards) == 2 * 3 * batch * n
    assert run_planned(judged, options, cluster, order_seed=order_seed) == eager


def answers(program: Flow, seeds: range) -> tuple[Answer, list[Answer]]:
    return run_eager(program, {}, TWO), [run_planned(program, {}, TWO, order_seed=seed) for seed in seeds]


@flow
def states() -> None:
    """Writes and reads of one role that nothing but their effects puts in order."""
    policy, prompts = Policy("fake"), Dataset(ROWS)
    judge = Judge(1.0, [])
    responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12)
    ready = [prompts.take(3) for _ in range(2)]
    first = judge.score(policy.generate(ready[0], max_new_tokens=40, min_new_tokens=30))  # Comes late.
    log(early=judge.digest())
    peeked = judge.peek(policy.generate(ready[1], max_new_tokens=60, min_new_tokens=50))  # Comes later still.
    judge.forget(1)
    second = judge.score(responses)
    log(first=first.mean(), second=second.mean(), late=judge.digest())
    log(peeked=float(sum(peeked)))  # type: ignore[arg-type]


def no_write_waits_for_readers(patch: Patch) -> None:
    patch.setattr(Versions, "reads_before", lambda self, call: iter(()))


def no_call_waits_for_writers(patch: Patch) -> None:
    patch.setattr(Versions, "written_for", lambda self, call: ([], []))


def units_of_a_write_as_they_come(patch: Patch) -> None:
    stage_of = passes._stage

    def unbarred(call):  # type: ignore[no-untyped-def]
        stage = stage_of(call)
        return stage if stage.unit == "batch" else passes.Stage(stage.call, stage.engine, stage.unit, is_barrier=False, state=stage.state)

    patch.setattr(passes, "_stage", unbarred)


def state_on_every_worker(patch: Patch) -> None:
    patch.setattr(placement, "_home", lambda role, hosts: hosts)


@pytest.mark.parametrize(
    "rule", [no_write_waits_for_readers, no_call_waits_for_writers, units_of_a_write_as_they_come, state_on_every_worker]
)
def test_without_a_rule_about_effects_the_answer_is_wrong(rule: Callable[[Patch], None], monkeypatch: Patch):
    eager, planned = answers(states, range(4))
    assert eager.error == ""
    assert planned == [eager] * 4
    rule(monkeypatch)
    assert any(answer != eager for answer in answers(states, range(8))[1])


@op(writes=["a"])
def writes_a(sample: Sample) -> int:
    return 0


@op(writes=["b"])
def writes_b(sample: Sample) -> int:
    return 0


@op(reads=["a"])
def reads_a(sample: Sample) -> int:
    return 0


@flow
def touches() -> None:
    rows = Dataset(ROWS).take(3)
    writes_a(rows)
    writes_b(rows)
    reads_a(rows)
    reads_a(rows)
    writes_a(rows)


def test_calls_that_touch_the_same_resource_are_in_turn_and_others_run_at_once():
    graph, models, _ = trace(touches, {})
    many = TWO.model_copy(update={"functions": FunctionSpec(workers=8)})
    plan = lower(graph, models, many)
    scheduler = Scheduler(plan)
    running: dict[int, tuple[str, m.RunFunction]] = {}
    started: list[set[str]] = []

    def tell(event) -> None:  # type: ignore[no-untyped-def]
        for command in scheduler.handle(event):
            if isinstance(command, Send) and isinstance(command.message, m.RunFunction):
                running[command.message.number] = (command.worker, command.message)

    for made, stage in zip(graph.calls, plan.stages, strict=True):
        tell(CallAdded(made, stage))
        rows = made.options.get("rows")
        if isinstance(rows, Batch):
            tell(Sourced(made.ordinal, rows.ids.tolist(), [1] * len(rows)))
    while running:
        started.append({f"{graph.calls[task.call].name} {task.call}" for _, task in running.values()})
        now, running = running, {}
        for number, (worker, task) in now.items():
            ones, zeros = [1] * len(task.ids), [0] * len(task.ids)
            tell(FromWorker(worker, m.Finished(number, task.call, task.ids, ones, zeros, [], zeros, [], None)))
            tell(FromWorker(worker, m.TaskDone(number)))
    assert started == [{"writes_a 1", "writes_b 2"}, {"reads_a 3", "reads_a 4"}, {"writes_a 5"}]


def test_state_has_one_home_and_calls_without_effects_run_anywhere():
    graph, models, _ = trace(judged, {})
    stages = {stage.call: stage for stage in lower(graph, models, TWO.model_copy(update={"functions": FunctionSpec(workers=5)})).stages}
    home = stages["judge.score"].workers
    assert len(home) == 1
    assert home == stages["judge.digest"].workers == stages["judge.compare"].workers
    assert len(stages["judge.plain"].workers) == 5
    assert stages["judge.score"].is_barrier
    assert not stages["judge.compare"].is_barrier


LINES: list[str] = []


@op(granularity="sample", writes=["lines"])
def written(sample: Sample, mark: str) -> None:
    import test_user_roles

    test_user_roles.LINES.append(f"{mark}{sample.id}")


@flow
def writes_lines() -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS)
    written(policy.generate(prompts.take(3), n=2, max_new_tokens=40, min_new_tokens=20), "a")
    written(policy.generate(prompts.take(3), n=2, max_new_tokens=6), "b")


def test_an_op_that_writes_outside_does_it_in_the_order_of_program_and_identity():
    expected = [f"{mark}p{prompt}/{index}" for mark in "ab" for prompt in range(3) for index in range(2)]
    for run in (run_eager, lambda *a: run_planned(*a, order_seed=1), lambda *a: run_planned(*a, order_seed=2)):
        LINES.clear()
        assert run(writes_lines, {}, TWO).error == ""
        assert expected == LINES


# What is refused


class Wrong(Role):
    def __init__(self, how: str = "") -> None:
        if how == "raises":
            raise ValueError("no table")
        self.table = [1.0]

    @call()
    def sets(self, sample: Sample) -> float:
        self.table = []
        return 0.0

    @call(returns=["a", "b"])
    def misses(self, sample: Sample) -> dict[str, float]:
        return {"a": 1.0}

    @call(returns="reward")
    def none(self, sample: Sample) -> None:
        return None

    @call(timeout_s=0.05)
    async def hangs(self, sample: Sample) -> float:
        await asyncio.Event().wait()
        return 0.0

    @call(granularity="group", writes=["wrong.table"])
    def too_few(self, samples: list[Sample]) -> list[float]:
        return [0.0]

    def helper(self) -> None: ...


def asked(method: str, *args: object) -> Flow:
    @flow
    def asks() -> None:
        getattr(Wrong(*args), method)(Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4))

    return asks


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (asked("sets"), "Wrong sets 'table' in a call that declares no write"),
        (asked("misses"), "wrong.misses returned {'a': 1.0} on sample"),
        (asked("none"), "the reward wrong.none returned NoneType: None on sample"),
        (asked("hangs"), "wrong.hangs took longer than 0.05 s on sample"),
        (asked("too_few"), "wrong.too_few returned [0.0] for the group of prompt 0, which has 2 samples"),
        (asked("sets", "raises"), "the role wrong can't be made: ValueError: no table"),
    ],
)
def test_what_a_role_does_wrong_is_said_in_both_modes(program, message):
    for answer in (run_eager(program, {}, TWO), run_planned(program, {}, TWO)):
        assert message in answer.error


def test_after_a_failed_write_what_reads_the_state_fails_and_other_state_does_not():
    @flow
    def fails() -> None:
        wrong, judge = Wrong(), Judge(1.0, [])
        responses = Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        log(fine=judge.score(responses).mean())
        wrong.too_few(responses)
        wrong.too_few(responses)

    eager, planned = answers(fails, range(4))
    assert "for the group of prompt 0" in eager.error
    assert all(answer.error == eager.error for answer in planned)
    assert all(answer.rewards == eager.rewards for answer in planned)


def traced(body: Callable[[], object]) -> None:
    @flow
    def program() -> None:
        body()
        Dataset(ROWS).take(1)

    trace(program, {})


def _set() -> None:
    Wrong().table = []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: Wrong().helper(), r"Wrong.helper is no call; its calls are hangs, misses, none, sets, too_few"),
        (lambda: Wrong().nothing, r"Wrong has no 'nothing'; its calls are"),
        (lambda: Wrong("a", "b"), r"Wrong\(...\) can't be made like this: too many positional arguments"),
        (lambda: (Wrong(), Wrong()), "two roles named 'wrong'"),
        (_set, "'table' of the role wrong was set in the flow, and its state is on a worker"),
        (lambda: Wrong(threading.Lock()), "a lock"),
        (lambda: Wrong().sets(), r"sets\(sample\) can't be called like this: missing a required argument: 'sample'"),
        (lambda: Wrong().sets("text"), "wrong.sets runs on each sample, and got a str; it needs rows"),
    ],
)
def test_a_role_that_is_used_wrongly_is_refused_at_the_flows_line(body, message):
    with pytest.raises(TraceError, match=message) as refused:
        traced(body)
    assert "test_user_roles.py" in refused.value.where


def test_a_role_outside_a_flow_is_refused():
    with pytest.raises(TraceError, match="the role Wrong was used outside a running flow"):
        Wrong()


def test_a_declaration_that_can_not_be_is_refused_where_the_class_is():
    with pytest.raises(OptionError, match=r"Editor.look reads 'editor.tabel', .* write editor.table"):

        class Editor(Role):
            @call(writes=["editor.table"])
            def put(self, sample: Sample) -> None: ...

            @call(reads=["editor.tabel"])
            def look(self, sample: Sample) -> None: ...

    for keywords, message in (
        ({"granularity": "token"}, r"@call\(granularity='token'\)"),
        ({"returns": "nothing"}, "known are value, reward, or a list"),
        ({"returns": "reward", "granularity": "batch"}, "a reward is one number for each sample"),
        ({"writes": ["policy.weights"]}, "only m2flow's own roles"),
    ):
        with pytest.raises(OptionError, match=message):
            call(**keywords)
