"""Outcomes: what the flow's thread waits for, and what it is told."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from m2flow import Policy, flow, steps
from m2flow.errors import InternalError, RewardError, WorkerError
from m2flow.macro.datasets import Dataset
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.samples import Batch


@flow
def _one_generation() -> None:
    policy, prompts = Policy("fake"), Dataset([{"prompt": "a"}])
    for _ in steps(1):
        policy.generate(prompts.take(1), max_new_tokens=1)


def call(ordinal: int, step: int = 0) -> Call:
    return replace(trace(_one_generation, {})[0].calls[0], ordinal=ordinal, step=step)


def opened(*calls: Call) -> CallFutures:
    futures = CallFutures()
    for one in calls:
        futures.submitted(one)
    return futures


def waiting(target, *args: object) -> tuple[threading.Thread, list[object]]:  # type: ignore[no-untyped-def]
    """A thread that waits, and what it got."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(target(*args))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def test_a_value_wakes_who_waits_for_it():
    futures = opened(call(3))
    thread, got = waiting(futures.wait_value, 3)
    futures.resolve(call(3), {"loss": 1.0})
    thread.join()
    assert got == [{"loss": 1.0}]
    assert futures.number(3, "loss") == 1.0


def test_rows_wake_who_waits_for_them_and_may_be_looked_at_twice():
    futures = opened(call(3))
    thread, got = waiting(futures.wait_rows, 3)
    futures.deliver(3, Batch(np.array([7])))
    thread.join()
    assert got[0] is futures.wait_rows(3)


def test_a_failed_call_raises_its_own_error_and_no_other():
    futures = opened(call(1), call(2))
    futures.reject(call(1), RewardError("no"), 1)
    futures.resolve(call(2), None)
    assert futures.wait_value(2) is None
    with pytest.raises(RewardError, match="no"):
        futures.wait_value(1)


def test_a_step_is_over_when_its_calls_and_those_of_earlier_steps_are():
    futures = opened(call(0, -1), call(1, 0), call(2, 1))
    thread, got = waiting(futures.wait_step, 0)
    futures.resolve(call(1, 0), None)
    assert thread.is_alive()
    futures.resolve(call(0, -1), None)
    thread.join()
    assert got == [None]


def test_of_several_errors_the_earliest_in_program_order_is_raised():
    futures = opened(call(1), call(2))
    futures.reject(call(2), RewardError("second"), 2)
    futures.reject(call(1), RewardError("first"), 1)
    with pytest.raises(RewardError, match="first"):
        futures.wait_all()


def test_an_error_is_raised_only_when_no_earlier_call_can_fail_any_more():
    futures = opened(call(1), call(2), call(3))
    waits = [waiting(futures.wait_step, 0), waiting(futures.wait_value, 3)]
    futures.reject(call(3), RewardError("third"), 3)
    futures.resolve(call(2), None)
    assert all(thread.is_alive() for thread, _ in waits)
    futures.reject(call(1), RewardError("first"), 1)
    for (thread, got), expected in zip(waits, ["first", "third"], strict=True):
        thread.join()
        assert str(got[0]) == expected


def test_what_fails_anew_because_of_an_earlier_call_has_that_ones_error():
    futures = opened(call(1), call(2), call(3))
    futures.reject(call(2), RewardError("second"), 2)
    futures.reject(call(3), RewardError("second"), 2)
    thread, got = waiting(futures.wait_value, 3)
    futures.reject(call(3), RewardError("first"), 1)  # In this order, as the scheduler says it.
    futures.reject(call(1), RewardError("first"), 1)
    thread.join()
    assert str(got[0]) == "first"


def test_an_error_of_a_step_that_has_ended_comes_before_whatever_the_program_does_next():
    futures = opened(call(1), call(2))
    futures.step_ended()
    futures.submitted(call(3, 1))
    futures.reject(call(3, 1), RewardError("third"), 3)
    thread, got = waiting(futures.wait_due)
    futures.resolve(call(2), None)
    futures.reject(call(1), RewardError("first"), 1)
    thread.join()
    assert str(got[0]) == "first"


def test_what_the_program_raises_itself_stands_if_nothing_before_it_failed():
    futures = opened(call(1))
    futures.step_ended()
    futures.submitted(call(2, 1))
    futures.reject(call(2, 1), RewardError("second"), 2)
    thread, got = waiting(futures.wait_due)
    futures.resolve(call(1), None)
    thread.join()
    assert got == [None]


def test_the_end_of_the_run_answers_every_wait_with_its_first_reason():
    futures = opened(call(1))
    waits = [waiting(futures.wait_value, 1), waiting(futures.wait_step, 0), waiting(futures.wait_saved), waiting(futures.wait_rows, 1)]
    futures.end(WorkerError("it died"))
    futures.end(InternalError("a consequence"))
    for thread, got in waits:
        thread.join()
        assert isinstance(got[0], WorkerError)


def test_workers_that_do_not_come_up_in_time_are_an_error_that_says_how_long_it_waited():
    with pytest.raises(WorkerError, match="did not come up in 0 s"):
        CallFutures().wait_ready(0.0)


def test_the_digests_of_a_save_of_nothing_are_none():
    futures = CallFutures()
    futures.saved({})
    assert futures.wait_saved() == {}
