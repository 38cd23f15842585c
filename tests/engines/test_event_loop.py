"""Async rewards and ops: one event loop serves call after call, so clients that belong to a loop live as long as the run."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator

import pytest

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, nll, steps
from m2flow.engines.contract import EngineSettings
from m2flow.engines.functions import PythonFunctions
from m2flow.errors import OpError
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

FAKES = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake"),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=1, chunk=2, concurrency=4),
)
ROWS = [{"prompt": f"{i}="} for i in range(6)]
MODES = pytest.mark.parametrize("run", [run_eager, run_planned], ids=["eager", "planned"])


class Client:
    """A connection as HTTP clients keep it: a task of the loop that it was opened on answers what is put into a queue."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[int, asyncio.Future[float]]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.task = self.loop.create_task(self.serve())

    async def serve(self) -> None:
        while True:
            number, answer = await self.asked.get()
            answer.set_result(number / 2)

    async def ask(self, number: int) -> float:
        assert asyncio.get_running_loop() is self.loop
        answer: asyncio.Future[float] = self.loop.create_future()
        await self.asked.put((number, answer))
        return await answer


@functools.cache
def client() -> Client:
    return Client()


async def asks(sample: Sample) -> float:
    return await client().ask(sample.num_tokens)


class Asking(Role):
    def __init__(self) -> None:
        self.client: Client | None = None

    @call(returns="reward", writes=["asking.client"])
    async def score(self, sample: Sample) -> float:
        if self.client is None:
            self.client = Client()
        return await self.client.ask(sample.num_tokens)


@flow
def asked(held_by: str, isolated: bool = False) -> None:
    policy = Policy("fake")
    judge = Asking() if held_by == "role" else Reward(asks, isolated=isolated)
    for _ in steps(3):
        responses = policy.generate(Dataset(ROWS).take(3), n=2, max_new_tokens=6)
        judge.score(responses)
        policy.update(responses, loss=nll())


@MODES
@pytest.mark.parametrize(("held_by", "isolated"), [("role", False), ("cache", False), ("cache", True)])
def test_a_client_that_belongs_to_a_loop_serves_call_after_call(run: Callable[..., Answer], held_by: str, isolated: bool) -> None:
    answer = run(asked, {"held_by": held_by, "isolated": isolated}, FAKES)
    assert answer.error == ""
    assert len(answer.rewards) == 18
    # The tokens of a sample are its own in both modes, so the rewards are.
    assert answer.rewards == run_eager(asked, {"held_by": "cache"}, FAKES).rewards


# The engine


@pytest.fixture
def engine() -> Iterator[PythonFunctions]:
    made = PythonFunctions(EngineSettings(options={"concurrency": 3}))
    made.start()
    yield made
    made.stop()


def batch(count: int = 3) -> Batch:
    return Batch(make_ids(1, count), {"text": Ragged.texts([f"t{i}" for i in range(count)])})


def call_it(engine: PythonFunctions, function: Callable[..., object], *, timeout_s: float | None = None, count: int = 3) -> list[object]:
    return list(engine.call(function, batch(count), granularity="sample", timeout_s=timeout_s))


def test_units_wait_beside_each_other_on_one_loop(engine: PythonFunctions) -> None:
    inside: list[asyncio.AbstractEventLoop] = []
    together = asyncio.Event()

    async def meet(sample: Sample) -> int:
        inside.append(asyncio.get_running_loop())
        if len(inside) == 3:
            together.set()
        await together.wait()
        return len(set(inside))

    assert call_it(engine, meet) == [1, 1, 1]


def test_a_unit_that_takes_too_long_is_cancelled_where_it_waits(engine: PythonFunctions) -> None:
    cancelled = threading.Event()

    async def hangs(sample: Sample) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(OpError, match=r"longer than 0.05 s on sample p0/0[\s\S]*It was cancelled"):
        call_it(engine, hangs, timeout_s=0.05, count=1)
    assert cancelled.wait(60)


def test_a_function_that_blocks_the_loop_is_left_behind_and_the_next_has_a_loop(engine: PythonFunctions) -> None:
    gate = threading.Event()

    async def blocks(sample: Sample) -> None:
        gate.wait()

    async def answers(sample: Sample) -> str:
        await asyncio.sleep(0)
        return str(sample.text)

    with pytest.raises(OpError, match=r"longer than 0.05 s"):
        call_it(engine, blocks, timeout_s=0.05, count=1)
    try:
        assert call_it(engine, answers) == ["t0", "t1", "t2"]
    finally:
        gate.set()


def test_what_was_given_up_before_it_came_to_the_loop_does_not_come_to_it(engine: PythonFunctions) -> None:
    made, gate = threading.Event(), threading.Event()
    began: list[threading.Thread] = []

    async def blocks() -> None:
        gate.wait()

    def makes(sample: Sample) -> Awaitable[None]:
        began.append(threading.current_thread())
        made.wait()
        return blocks()

    with pytest.raises(OpError, match=r"longer than 0.05 s"):
        call_it(engine, makes, timeout_s=0.05, count=1)
    try:
        made.set()
        began[0].join(0.5)
        assert call_it(engine, lambda sample: asyncio.sleep(0, sample.text), timeout_s=5.0) == ["t0", "t1", "t2"]
        assert not began[0].is_alive()
    finally:
        gate.set()


def test_an_exit_on_the_loop_is_an_error_like_others(engine: PythonFunctions) -> None:
    async def leaves(sample: Sample) -> None:
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(OpError, match="SystemExit on sample p0/0"):
            call_it(engine, leaves, count=1)


def test_what_a_unit_sets_in_its_context_is_not_there_for_the_next(engine: PythonFunctions) -> None:
    seen = contextvars.ContextVar("seen", default="nothing")

    async def sets(sample: Sample) -> str:
        before = seen.get()
        seen.set(str(sample.text))
        await asyncio.sleep(0)
        return before + seen.get()

    assert call_it(engine, sets) == ["nothingt0", "nothingt1", "nothingt2"]


def test_at_its_end_an_engine_cancels_what_is_left_on_the_loop_and_closes_it() -> None:
    ended: list[str] = []

    async def leaves_a_task(sample: Sample) -> None:
        async def goes_on() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(str(sample.text))

        loop = asyncio.get_running_loop()
        kept.append(loop)
        tasks.append(loop.create_task(goes_on()))
        await asyncio.sleep(0)

    kept: list[asyncio.AbstractEventLoop] = []
    tasks: list[asyncio.Task[None]] = []
    engine = PythonFunctions(EngineSettings())
    engine.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_it(engine, leaves_a_task)
        engine.stop()
        assert sorted(ended) == ["t0", "t1", "t2"]
        assert all(loop.is_closed() for loop in kept)
        tasks.clear()
        gc.collect()
