"""The number of rollout workers follows what is measured: with patience, with hysteresis, and only where it pays."""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbing import run, same, undisturbed
from message_parts import lacks

from m2flow.micro.controller.supervisor import Autoscaler
from m2flow.spec import ClusterSpec, RolloutSpec


def changes(shares: list[float], *, num_workers: int = 2, num_spare: int = 4, start_s: float = 5.0) -> list[tuple[int, int]]:
    """Windows, and by how much the number changed after each, for shares of the time in which generation alone was under way."""
    replanning, now_s, found = Autoscaler(window_s=10.0), 0.0, []
    replanning.saw(now_s, generates=True, trains=False)
    for window, share in enumerate(shares):
        for second in range(10):
            now_s += 1.0
            replanning.saw(now_s, generates=second < 10 * share, trains=second >= 10 * share)
        change = replanning.decide(now_s, num_workers=num_workers, num_spare=num_spare, start_s=start_s)
        if change is not None:
            found.append((window, change.by))
            num_workers, num_spare = num_workers + change.by, num_spare - change.by
    return found


def test_a_worker_joins_after_three_windows_in_which_it_would_have_paid() -> None:
    assert changes([0.8, 0.8, 0.8, 0.8, 0.8, 0.8]) == [(2, 1), (5, 1)]


def test_one_window_that_says_otherwise_begins_the_wait_anew() -> None:
    assert changes([0.8, 0.8, 0.0, 0.8, 0.8, 0.0]) == []


def test_nobody_joins_where_nobody_is_spare_or_where_the_start_would_take_longer_than_it_saves() -> None:
    assert changes([0.8] * 6, num_spare=0) == []
    assert changes([0.8] * 6, start_s=3600.0) == []


def test_a_worker_that_does_not_pay_for_itself_leaves_and_the_last_one_stays() -> None:
    assert changes([0.0] * 9, num_workers=3) == [(2, -1), (5, -1)]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_between_the_two_thresholds_nothing_changes(share: float) -> None:
    """Nor does it go to and fro: what makes a worker join does not make it leave."""
    assert changes([share] * 30, num_workers=6) == []


def test_a_change_says_what_was_seen_and_what_is_expected() -> None:
    replanning = Autoscaler(window_s=1.0)
    replanning.saw(0.0, generates=True, trains=False)
    for second in range(1, 4):
        replanning.saw(float(second), generates=True, trains=False)
        change = replanning.decide(float(second), num_workers=1, num_spare=1, start_s=2.0)
    assert change is not None
    assert not lacks(change.why, "generation", "100% of the last 1 s", "2 rollout workers", "50% less time")


def test_who_asks_for_it_has_somebody_spare() -> None:
    with pytest.raises(ValueError, match="nobody is spare"):
        ClusterSpec(placement="split", rollout=RolloutSpec(scale="auto"))


@pytest.mark.long
def test_a_run_that_has_more_workers_than_it_needs_lets_one_go_and_gives_the_same_weights(tmp_path: Path) -> None:
    followed = run(tmp_path, "fake", "spare=1", 'scale="auto"', "replan_s=0.3", "num_steps=8")
    assert same(followed, undisturbed("fake", "num_steps=8"))
    (first, *_) = [what for _, kind, _, what in followed["incidents"] if kind == "re-planned"]
    assert "rollout workers the run is predicted to take" in first
