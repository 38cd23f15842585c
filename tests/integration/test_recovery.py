"""Real workers that are killed or stopped in the middle of a run: it goes on, to the same samples and weights."""

from __future__ import annotations

import re

import pytest
from disturbing import disturbed, same, undisturbed

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("rollout-0", 1),
        *[pytest.param(name, num_bytes, marks=SLOW) for name in ("rollout-1", "functions-0", "functions-1") for num_bytes in (1, 20_000)],
    ],
)
def test_a_run_whose_worker_is_killed_gives_what_one_gives_that_was_left_alone(tmp_path, name, num_bytes):
    said, _ = disturbed(tmp_path / "runs", ["fake"], name, num_bytes, lambda process: process.kill())
    assert said.get("error") is None
    assert [incident[1:3] for incident in said["incidents"]] == [["lost", name], ["started again", name]]
    assert said["incidents"][0][3].startswith("was killed by signal 9 (pid ")
    assert same(said, undisturbed("fake"))


@SLOW
@pytest.mark.parametrize("transport", ["broadcast", "file", "tcp"])
def test_a_rollout_worker_that_is_started_again_gets_the_current_weights_over_any_transport(tmp_path, transport):
    arguments = ["fake", f'transport="{transport}"']
    said, _ = disturbed(tmp_path / "runs", arguments, "rollout-0", 20_000, lambda process: process.kill())
    assert said.get("error") is None
    assert same(said, undisturbed("fake"))


@pytest.mark.parametrize(
    ("name", "limit", "how"),
    [
        ("rollout-0", "stopped_after_s=2.0", "was stopped by a signal and gave no sign of life for"),
        pytest.param("functions-0", "hung_after_s=5.0", "gave no sign of life for", marks=SLOW),
    ],
)
def test_a_worker_that_is_stopped_is_missed_killed_and_replaced(tmp_path, name, limit, how):
    said, lost = disturbed(tmp_path / "runs", ["fake", limit], name, 20_000, lambda process: process.suspend())
    assert re.match(rf"{how} \d+ s", lost.what)
    assert same(said, undisturbed("fake"))


@pytest.mark.parametrize(("name", "num_bytes"), [("rollout-1", 1), *[pytest.param(f"rollout-{i}", 40_000, marks=SLOW) for i in (0, 1)]])
def test_a_run_goes_on_whose_speaker_on_devices_of_its_own_is_killed_or_whose_episodes_are(tmp_path, name, num_bytes):
    arguments = ["fake", 'flow="spoken"', "rollouts=1", 'pin={"rival.rollout": {"num_devices": 1}}']
    said, _ = disturbed(tmp_path / "runs", arguments, name, num_bytes, lambda process: process.kill())
    assert said.get("error") is None
    assert [incident[1:3] for incident in said["incidents"]] == [["lost", name], ["started again", name]]
    assert same(said, undisturbed(*arguments))
    assert same(said, undisturbed("fake", 'flow="spoken"', "rollouts=1")), "nor does it matter where who speaks is"
