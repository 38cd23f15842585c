"""The clock of another host: how far off it is, and that what is recorded by it is stored in the controller's time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import DecodeError
from m2flow.micro.controller.supervisor import ClockOffset, Exchange, HeartbeatMetrics
from m2flow.micro.protocol import messages as m
from m2flow.observe.spans import SpanBlock, counts_of, spans_of

SECOND = 10**9
_DELAYS = st.integers(0, 5 * SECOND)


def exchange(at_ns: int, offset_ns: int, there_ns: int, thinking_ns: int, back_ns: int) -> Exchange:
    """As it goes, in the controller's time, with an asker whose clock is behind by `offset_ns`."""
    heard, answered = at_ns + there_ns, at_ns + there_ns + thinking_ns
    return Exchange(at_ns - offset_ns, heard, answered, answered + back_ns - offset_ns)


@given(
    offset_ns=st.integers(-(10**18), 10**18),
    ways=st.lists(st.tuples(_DELAYS, st.integers(0, SECOND), _DELAYS), min_size=1, max_size=80),
)
def test_the_offset_is_never_further_off_than_its_error_says(offset_ns: int, ways: list[tuple[int, int, int]]) -> None:
    clock, at_ns = ClockOffset(), 10**18
    for there_ns, thinking_ns, back_ns in ways:
        clock.add(exchange(at_ns, offset_ns, there_ns, thinking_ns, back_ns))
        assert clock.error_ns is not None
        assert abs(clock.offset_ns - offset_ns) <= clock.error_ns
        at_ns += 20 * SECOND


@given(drift=st.floats(-15e-6, 15e-6), ways=st.lists(st.tuples(_DELAYS, _DELAYS), min_size=1, max_size=80))
def test_nor_while_the_clocks_drift_apart(drift: float, ways: list[tuple[int, int]]) -> None:
    clock = ClockOffset()
    for number, (there_ns, back_ns) in enumerate(ways):
        sent_ns = number * 60 * SECOND
        came_ns = sent_ns + there_ns + back_ns

        def theirs(ours_ns: int) -> int:
            return ours_ns + round(ours_ns * drift)

        clock.add(Exchange(theirs(sent_ns), sent_ns + there_ns, sent_ns + there_ns, theirs(came_ns)))
        assert clock.error_ns is not None
        true_ns = came_ns - theirs(came_ns)
        assert abs(clock.offset_ns - true_ns) <= clock.error_ns * 1.001 + 2


@given(st.lists(st.tuples(_DELAYS, _DELAYS), min_size=1, max_size=20))
def test_processes_that_share_a_clock_are_never_moved(ways: list[tuple[int, int]]) -> None:
    clock = ClockOffset()
    for number, (there_ns, back_ns) in enumerate(ways):
        clock.add(exchange(number * SECOND, 0, there_ns, 0, back_ns))
        assert clock.correction_ns == 0


def test_the_exchange_that_was_quickest_counts() -> None:
    clock = ClockOffset()
    clock.add(exchange(0, 3 * SECOND, 500_000, 0, 500_000))
    clock.add(exchange(SECOND, 3 * SECOND, 80_000_000, 0, 0))
    assert clock.offset_ns == 3 * SECOND
    assert clock.error_ns is not None
    assert clock.error_ns < 600_000


def pulse(sent_ns: int, exchanged: Exchange | None = None, cpu_s: float = 0.0) -> m.Heartbeat:
    return m.Heartbeat(1, cpu_s, False, sent_ns, None if exchanged is None else tuple(exchanged), 1 << 20)


def test_what_a_worker_with_another_clock_recorded_is_stored_in_our_time_and_the_error_is_written_down() -> None:
    stored: list[SpanBlock] = []
    answers: list[m.Echo] = []
    vitals = HeartbeatMetrics(stored.append, lambda peer, body: answers.append(m.decode_echo(body)))
    recorded = SpanBlock("rollout-0", 100, [("switch", 5, 9, {})], [("running", 3.0, 7)])
    vitals.heard("rollout-0", "rollout-0.beat", pulse(12345))
    assert answers[0].asked_ns == 12345
    assert answers[0].heard_ns <= answers[0].answered_ns
    vitals.recorded("rollout-0", recorded)
    assert not any(block.spans for block in stored)
    behind = 7 * SECOND
    vitals.heard("rollout-0", "rollout-0.beat", pulse(1, Exchange(1000, behind + 1500, behind + 1600, 2100)))
    (moved,) = [block for block in stored if block.spans]
    assert abs(spans_of(moved)[0].start_ns - (105 + behind)) <= 501
    assert abs(counts_of(moved)[0].at_ns - (107 + behind)) <= 501
    told = {count.name: count.value for block in stored for count in counts_of(block)}
    assert told["clock offset s"] == pytest.approx(7.0, abs=1e-6)
    assert 0 < told["clock error s"] < 1e-6
    assert told["memory bytes"] == 1 << 20
    vitals.forget("rollout-0")
    vitals.recorded("rollout-0", recorded)
    vitals.close()
    assert stored[-1] == recorded


def test_bytes_that_are_no_answer_are_refused() -> None:
    with pytest.raises(DecodeError):
        m.decode_echo(b"\x93\xa4Echo\x01")
