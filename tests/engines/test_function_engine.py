"""Users' functions: units by granularity, errors that name the sample, and time limits that abandon what hangs."""

from __future__ import annotations

import asyncio
import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from longer_limits import with_longer_limits

from m2flow.engines.contract import Ahead, EngineSettings
from m2flow.engines.functions import PythonFunctions
from m2flow.errors import EngineError, OpError, error_from_record
from m2flow.samples import Batch, Ragged, Sample, make_ids

SHORT_S = 0.05


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging functions wait for; opened at the end, so that no test leaves a thread behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def threads_before() -> set[threading.Thread]:
    """Threads that were there before the test."""
    return set(threading.enumerate())


def batch(num_prompts: int = 3, n: int = 2) -> Batch:
    ids = make_ids(1, num_prompts, n)
    return Batch(ids, {"text": Ragged.texts([f"t{i}" for i in range(len(ids))])})


def call(
    function: Callable[..., object],
    samples: Batch,
    granularity: str = "sample",
    timeout_s: float | None = None,
    concurrency: int = 1,
    patience_s: float = 60.0,
    **more: object,
) -> list[object]:
    engine = PythonFunctions(EngineSettings(options={"concurrency": concurrency, "patience_s": patience_s}))
    engine.start()
    try:
        return list(engine.call(function, samples, granularity=granularity, timeout_s=timeout_s, **more))
    finally:
        engine.stop()


async def text_later(sample: Sample) -> object:
    await asyncio.sleep(0)
    return sample.text


def test_one_thread_runs_all_units_each_under_its_own_name():
    seen = call(lambda sample: (threading.get_ident(), threading.current_thread().name), batch(50, 2))
    assert len({thread for thread, _ in seen}) == 1
    assert len({name for _, name in seen}) == 100


def test_units_go_on_after_one_that_failed_if_that_is_said_to_be_no_failure():
    def raises(sample: Sample) -> str:
        if sample.text in ("t1", "t4"):
            raise ValueError(sample.text)
        return sample.text

    failed: list[str] = []
    results = call(raises, batch(), on_failure=lambda sample, how, error: failed.append(f"{sample.text} {how}"))
    assert results == ["t0", None, "t2", "t3", None, "t5"]
    assert failed == ["t1 raised", "t4 raised"]


def test_a_thread_that_was_abandoned_begins_nothing_when_it_comes_back(gate: threading.Event) -> None:
    begun: list[str] = []
    came_back = threading.Event()

    def hangs(sample: Sample) -> str:
        begun.append(sample.text)
        if sample.text == "t1":
            gate.wait()
            came_back.set()
        elif sample.text == "t5":
            gate.set()
            came_back.wait()
        return sample.text

    results = call(hangs, batch(5), timeout_s=SHORT_S, on_failure=lambda sample, how, error: how)
    assert results == ["t0", "timed_out", *(f"t{i}" for i in range(2, 10))]
    assert sorted(begun) == sorted(f"t{i}" for i in range(10))


def test_a_unit_that_hangs_is_given_up_while_others_end_faster_than_their_results_are_taken(gate: threading.Event) -> None:
    told: list[object] = []

    def tell(position: int, result: object) -> None:
        told.append(result)
        time.sleep(0.002)  # Others have ended meanwhile: there is always a result to take.

    def first_hangs(sample: Sample) -> str:
        if sample.id.prompt == 0:
            gate.wait()
        return "done"

    call(
        first_hangs,
        batch(1000, 1),
        timeout_s=SHORT_S,
        patience_s=0.001,
        concurrency=2,
        on_done=tell,
        on_failure=lambda sample, how, error: how,
    )
    assert told.count("timed_out") == 1
    assert told.index("timed_out") < 900


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("function", [lambda sample: sample.text, text_later])
def test_results_are_in_the_order_of_identity(function: Callable[[Sample], object], concurrency: int) -> None:
    shuffled = batch().take(np.array([3, 0, 5, 2, 1, 4]))
    assert call(function, shuffled, concurrency=concurrency) == ["t0", "t1", "t2", "t3", "t4", "t5"]


@pytest.mark.parametrize(("granularity", "sizes"), [("group", [2, 2, 2]), ("batch", [6])])
def test_a_function_of_a_unit_gets_all_its_samples(granularity: str, sizes: list[int]) -> None:
    assert call(len, batch(), granularity) == sizes


def test_an_empty_batch_has_no_units() -> None:
    assert call(len, batch().take([]), "sample") == []
    assert call(len, batch().take([]), "group") == []


def test_up_to_concurrency_units_run_at_once() -> None:
    barrier = threading.Barrier(3)

    def meet(sample: Sample) -> int:
        # Passes only if three units are inside together.
        return barrier.wait(timeout=240) >= 0

    assert call(meet, batch(), concurrency=3) == [True] * 6


def test_by_default_units_run_one_after_the_other() -> None:
    inside = threading.Semaphore(1)

    def alone(sample: Sample) -> bool:
        entered = inside.acquire(blocking=False)
        inside.release()
        return entered

    assert call(alone, batch()) == [True] * 6


def fragile(sample: Sample) -> float:
    return 1 / (sample.id.prompt - 1)


async def fragile_later(sample: Sample) -> float:
    await asyncio.sleep(0)
    return fragile(sample)


@pytest.mark.parametrize("function", [fragile, fragile_later])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_an_error_names_the_earliest_sample_and_shows_the_users_frames(function: Callable[..., object], concurrency: int) -> None:
    with pytest.raises(OpError, match=rf"{function.__name__} raised ZeroDivisionError on sample p1/0") as caught:
        call(function, batch(), concurrency=concurrency)
    remote = caught.value.remote
    assert "return 1 / (sample.id.prompt - 1)" in remote
    assert "functions.py" not in remote
    assert str(error_from_record(caught.value.to_record())) == str(caught.value)


def test_an_error_of_a_group_names_its_samples() -> None:
    with pytest.raises(OpError, match="on group p0/0 to p0/1"):
        call(lambda samples: samples[0].nothing, batch(), "group")


def test_exit_in_a_function_is_an_error_like_others() -> None:
    with pytest.raises(OpError, match="SystemExit on sample p0/0"):
        call(lambda sample: sys.exit(3), batch())


def test_no_unit_starts_after_an_error() -> None:
    started: list[str] = []

    def count(sample: Sample) -> None:
        started.append(str(sample.id))
        raise ValueError

    with pytest.raises(OpError):
        call(count, batch())
    assert started == ["p0/0"]


@with_longer_limits
def test_a_function_that_hangs_is_abandoned_and_named(gate: threading.Event, limit_s: float) -> None:
    with pytest.raises(OpError, match=rf"longer than {limit_s:g} s on sample p0/1"):
        call(lambda sample: sample.id.index and gate.wait(), batch(), timeout_s=limit_s)


def test_a_slow_unit_keeps_no_other_from_beginning_beside_it(gate: threading.Event) -> None:
    told: list[int] = []

    def tell(position: int, result: object) -> None:
        told.append(position)
        if len(told) == 5:
            gate.set()

    def first_waits_for_the_others(sample: Sample) -> bool:
        return gate.wait() if sample.id.prompt == sample.id.index == 0 else False

    # One after the other the first would never end.
    found = call(first_waits_for_the_others, batch(), patience_s=SHORT_S, on_done=tell)
    assert found == [True, False, False, False, False, False]
    assert sorted(told) == list(range(6))
    assert told[-1] == 0


def test_units_that_go_in_turn_wait_for_the_slow_one(gate: threading.Event) -> None:
    with pytest.raises(OpError, match=r"longer than 0.5 s on sample p0/0"):
        call(lambda sample: gate.wait() if sample.id.index == 0 else gate.set(), batch(), patience_s=SHORT_S, timeout_s=0.5, in_turn=True)


@with_longer_limits
def test_no_more_than_some_units_are_slow_at_once(gate: threading.Event, limit_s: float) -> None:
    started: list[int] = []

    def hang(sample: Sample) -> None:
        started.append(sample.id.prompt)
        gate.wait()

    with pytest.raises(OpError, match="longer than"):
        call(hang, batch(100, 1), patience_s=0.001, timeout_s=10 * limit_s)
    assert sorted(started) == list(range(17))


def test_an_async_function_that_hangs_is_abandoned_too(gate: threading.Event) -> None:
    async def forever(sample: Sample) -> None:
        await asyncio.get_running_loop().run_in_executor(None, gate.wait)

    with pytest.raises(OpError, match="longer than"):
        call(forever, batch(), timeout_s=SHORT_S)


@with_longer_limits
def test_the_limit_is_for_each_unit_and_not_for_all(limit_s: float) -> None:
    pause = threading.Event()

    def slow(sample: Sample) -> bool:
        return pause.wait(limit_s / 4)

    # One and a half times the limit in all, a quarter of it each.
    assert call(slow, batch(), timeout_s=limit_s) == [False] * 6


def test_the_engine_works_on_after_a_hang(gate: threading.Event) -> None:
    engine = PythonFunctions(EngineSettings())
    engine.start()
    with pytest.raises(OpError):
        engine.call(lambda sample: gate.wait(), batch(), granularity="sample", timeout_s=SHORT_S)
    assert list(engine.call(lambda sample: sample.id.index, batch(), granularity="sample", timeout_s=None)) == [0, 1] * 3


def test_a_hanging_function_does_not_keep_the_process_alive() -> None:
    program = """
import threading
import numpy as np
from m2flow.engines.contract import Ahead, EngineSettings
from m2flow.engines.functions import PythonFunctions
from m2flow.errors import OpError
from m2flow.samples import Batch, make_ids
engine = PythonFunctions(EngineSettings())
engine.start()
try:
    engine.call(lambda s: threading.Event().wait(), Batch(make_ids(0, 1)), granularity="sample", timeout_s=0.05)
except OpError:
    print("abandoned")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "abandoned\n"


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, "two"])
def test_a_concurrency_that_is_no_count_is_refused(concurrency: object) -> None:
    with pytest.raises(EngineError, match="concurrency"):
        PythonFunctions(EngineSettings(options={"concurrency": concurrency})).start()


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(EngineError, match="minibatch"):
        call(len, batch(), "minibatch")


def test_no_unit_starts_after_one_that_took_too_long(gate: threading.Event) -> None:
    begun: list[str] = []

    def hangs(sample: Sample) -> str:
        begun.append(sample.text)
        # The others go on until the first has been given up.
        gate.wait() if sample.text == "t0" else time.sleep(SHORT_S / 4)
        return sample.text

    with pytest.raises(OpError, match="took longer than"):
        call(hangs, batch(100), timeout_s=SHORT_S, concurrency=2)
    assert len(begun) < 100


def test_no_unit_starts_after_the_caller_has_left(threads_before: set[threading.Thread]) -> None:
    begun: list[str] = []

    def slow(sample: Sample) -> str:
        begun.append(sample.text)
        time.sleep(0.005)
        return sample.text

    def leaves(position: int, result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(slow, batch(100), on_done=leaves)
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(10.0)
        assert not thread.is_alive(), "its thread does not end"
    assert len(begun) < 100


def test_an_engine_that_waits_for_its_next_call_holds_nothing_of_the_last() -> None:
    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def make(sample: Sample) -> Result:
        result = Result()
        made.append(weakref.ref(result))
        return result

    engine = PythonFunctions(EngineSettings())
    engine.start()
    try:
        results = engine.call(make, batch(), granularity="sample", timeout_s=None)
        assert [one() for one in made] == list(results)
        del results
        # Its thread lets go as soon as it has come round to waiting.
        for _ in range(200):
            gc.collect()
            if not any(one() for one in made):
                break
            time.sleep(0.01)
        assert not any(one() for one in made)
    finally:
        engine.stop()


class Chain:
    """A call of one unit, and a second one that its thread goes on with."""

    def __init__(self, first: Callable[[Sample], object], second: Callable[[Sample], object], num: int = 1, **limits: object) -> None:
        self.engine = PythonFunctions(EngineSettings())
        self.engine.start()
        self.ahead = Ahead()
        self.named = threading.Event()
        self.of_first: list[object] = []

        def prepare(result: object) -> Mapping[str, object]:
            self.of_first.append(result)
            return {"function": second, "batch": batch(1, num), "granularity": "sample", "timeout_s": None, **limits}

        def name_next() -> None:
            self.ahead.prepare = prepare
            self.named.set()

        def first_of_all(sample: Sample) -> object:
            assert self.named.wait(60)
            return first(sample)

        self.call = functools.partial(
            self.engine.call, first_of_all, granularity="sample", timeout_s=None, meanwhile=name_next, ahead=self.ahead
        )

    def finish(self, on_failure: Callable[..., object] | None = None) -> list[object]:
        assert self.ahead.finish is not None
        return list(self.ahead.finish(None, None, on_failure, None))


def test_the_thread_of_a_calls_only_unit_goes_on_with_the_next_call_before_its_caller_does():
    began = threading.Event()

    def second(sample: Sample) -> int:
        began.set()
        return threading.get_ident()

    chain = Chain(lambda sample: threading.get_ident(), second)
    (thread,) = chain.call(batch(1, 1))
    assert began.wait(60)
    assert chain.of_first == [thread]
    assert chain.finish() == [thread]
    assert chain.engine.call(lambda sample: threading.get_ident(), batch(1, 1), granularity="sample", timeout_s=None) == [thread]
    chain.engine.stop()


def test_the_error_of_a_call_that_followed_is_its_own():
    chain = Chain(lambda sample: "well", lambda sample: 1 // 0)
    assert list(chain.call(batch(1, 1))) == ["well"]
    with pytest.raises(OpError, match="ZeroDivisionError on sample p0/0"):
        chain.finish()
    chain = Chain(lambda sample: "well", lambda sample: 1 // 0)
    chain.call(batch(1, 1))
    assert chain.finish(lambda sample, how, error: how) == ["raised"]


def test_a_call_that_followed_has_its_own_time_limit(gate: threading.Event) -> None:
    chain = Chain(lambda sample: time.sleep(2 * SHORT_S), lambda sample: gate.wait(), timeout_s=SHORT_S)
    chain.call(batch(1, 1))
    with pytest.raises(OpError, match=r"took longer than 0\.05 s"):
        chain.finish()


def test_nothing_follows_a_unit_that_failed_nor_one_of_several():
    chain = Chain(lambda sample: 1 // 0, lambda sample: None)
    with pytest.raises(OpError):
        chain.call(batch(1, 1))
    assert (chain.of_first, chain.ahead.finish) == ([], None)
    chain = Chain(lambda sample: None, lambda sample: None)
    chain.call(batch(1, 2))
    assert (chain.of_first, chain.ahead.finish) == ([], None)
    chain = Chain(lambda sample: None, lambda sample: None, num=2)
    assert list(chain.call(batch(1, 1))) == [None]
    assert (chain.of_first, chain.ahead.finish) == ([None], None)


def test_a_next_call_that_can_not_be_made_is_left_to_the_caller():
    chain = Chain(lambda sample: "well", lambda sample: None, granularity="none such")
    assert list(chain.call(batch(1, 1))) == ["well"]
    assert (chain.of_first, chain.ahead.finish) == (["well"], None)


def test_the_thread_of_a_call_that_followed_and_was_dropped_ends(threads_before: set[threading.Thread], gate: threading.Event) -> None:
    chain = Chain(lambda sample: threading.current_thread(), lambda sample: gate.wait())
    (thread,) = chain.call(batch(1, 1))
    assert isinstance(thread, threading.Thread)
    assert chain.ahead.drop is not None
    chain.ahead.drop()
    assert chain.engine.call(lambda sample: sample.text, batch(1, 1), granularity="sample", timeout_s=None) == ["t0"]
    gate.set()
    thread.join(60)
    assert not thread.is_alive()
    chain.engine.stop()
