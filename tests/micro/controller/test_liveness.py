"""What tells a worker that hangs from one that has much to do, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from message_parts import lacks

from m2flow.micro.controller.supervisor import LivenessWatch


def watched(
    turns: Callable[[float], int], cpu_s: Callable[[float], float], *, users: bool = False, turn_limit_s: float | None = None
) -> str:
    """What is said of a process after a hundred seconds of beats."""
    watch = LivenessWatch(0.0, hung_after_s=10.0, turn_limit_s=turn_limit_s)
    for tenth in range(1, 1001):
        now_s = tenth / 10
        watch.beat(now_s, turns(now_s), cpu_s(now_s), is_in_users_code=users)
        if why := watch.why_hung(now_s):
            return why
    return ""


def idle(now_s: float) -> float:
    """What the beats alone take."""
    return 0.0004 * now_s


def test_a_worker_that_turns_does_not_hang_however_little_it_does():
    assert not watched(int, idle)


def test_a_long_micro_batch_is_no_hang():
    assert not watched(lambda now_s: 1, lambda now_s: 0.9 * now_s)


def test_a_long_load_from_a_slow_disk_is_no_hang():
    assert not watched(lambda now_s: 1, lambda now_s: 0.01 * now_s)


def test_a_slow_reward_is_no_hang_though_it_only_waits():
    assert not watched(lambda now_s: 1, idle, users=True)


def test_a_worker_that_waits_in_the_middle_of_a_turn_hangs():
    assert not lacks(watched(lambda now_s: min(int(now_s), 30), idle), "no turn for 10 s", "did nothing")


def of_two_ranks(cpu_s: Callable[[float], float], *, last_beat_s: float = 100.0) -> str:
    """What is said of a process that is at one turn and waits, while the other rank of its trainer beats so long."""
    watch = LivenessWatch(0.0, hung_after_s=10.0, turn_limit_s=None, num_ranks=2)
    for tenth in range(1, 1001):
        now_s = tenth / 10
        if now_s <= last_beat_s:
            watch.rank_beat(now_s, 1, cpu_s(now_s))
        watch.beat(now_s, 1, idle(now_s), is_in_users_code=False)
        if why := watch.why_hung(now_s):
            return f"{why}; rank {watch.silent_rank(now_s)}"
    return ""


def test_a_rank_that_waits_for_one_that_works_does_not_hang():
    assert not of_two_ranks(lambda now_s: 0.9 * now_s)


def test_ranks_that_wait_for_each_other_hang():
    assert not lacks(of_two_ranks(idle), "no turn for 10 s", "did nothing", "; rank 0")


def test_where_the_ranks_of_a_trainer_are_is_said_of_one_that_hangs():
    watch = LivenessWatch(0.0, hung_after_s=10.0, turn_limit_s=None, num_ranks=3)
    for second in range(1, 13):
        watch.rank_beat(second, 1, 0.0, "accumulate, backward pass, layers.3, for 8 s, in slow (loss.py:3)")
        watch.rank_beat(second, 2, 0.0)
        watch.beat(second, 1, 0.0, is_in_users_code=False, place="accumulate, for 9 s, in wait (p2p.py:1), where it waits for others")
    places = (
        "(rank 0 is at accumulate, for 9 s, in wait (p2p.py:1), where it waits for others; rank 1 is at accumulate, backward pass, layers.3"
    )
    assert not lacks(watch.why_hung(12.0), "did nothing", places)


def test_a_silent_rank_is_named_and_not_the_one_that_waits_for_it():
    assert not lacks(of_two_ranks(lambda now_s: 0.9 * now_s, last_beat_s=30.0), "rank 1", "no sign of life for 10 s", "; rank 1")


def test_a_worker_that_stops_after_much_work_hangs():
    assert not lacks(watched(lambda now_s: 1, lambda now_s: min(now_s, 50.0)), "no turn for 60 s", "did nothing")


def test_a_turn_may_be_limited():
    assert watched(lambda now_s: 1, lambda now_s: now_s, turn_limit_s=40.0) == "was at one turn for 40 s"
    assert not watched(lambda now_s: 1, lambda now_s: now_s, users=True, turn_limit_s=40.0)


@pytest.mark.parametrize("pause_s", [0.0, 300.0])
def test_silence_is_a_hang_unless_nobody_listened(pause_s):
    watch = LivenessWatch(0.0, hung_after_s=10.0, turn_limit_s=None)
    watch.beat(1.0, 5, 1.0, is_in_users_code=False)
    watch.excuse(pause_s)
    assert watch.why_hung(10.9 + pause_s) == ""
    assert watch.why_hung(11.2 + pause_s) == "gave no sign of life for 10 s"
    watch.seen(11.2 + pause_s)
    assert watch.why_hung(20.0 + pause_s) == ""
