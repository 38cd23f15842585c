"""A flow whose environments note who makes, begins and steps them, one line a file in the directory NOTES.

    made <pid>          an environment was made
    began <pid> <seed>  an episode of it began

The first step in a process waits until as many processes as `TOGETHER` says are in one: so lanes that are not played side by side never
end. While the file HELD_BY exists, the program does not begin the step whose number is in it.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from m2flow import AdamW, flow, log, steps
from m2flow.environments.actor_critic import Actor, ActorCritic, Simulator, episode_return, lanes
from m2flow.environments.env import Env, Spaces, Step

_stepping: set[int] = set()


def note(what: str) -> None:
    with (Path(os.environ["NOTES"]) / str(os.getpid())).open("a") as file:
        print(what, file=file)


def wait_for_others() -> None:
    if os.getpid() in _stepping:
        return
    _stepping.add(os.getpid())
    directory = Path(os.environ["NOTES"]) / "stepping"
    directory.mkdir(exist_ok=True)
    (directory / str(os.getpid())).touch()
    deadline = time.monotonic() + 100
    while len(list(directory.iterdir())) < int(os.environ["TOGETHER"]):
        if time.monotonic() > deadline:
            raise TimeoutError("no other process came to a step while this one was in its first")
        time.sleep(0.01)


class Noted(Env):
    """Step right, or fall back to the start; an episode lasts 40 steps."""

    spaces = Spaces((2,), False, 2)

    def __init__(self) -> None:
        note("made")
        self._at, self._num_steps = 0, 0

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> np.ndarray:
        note(f"began {seed}")
        self._at, self._num_steps = seed % 5, 0
        return self._shows()

    def step(self, action: Any) -> Step:
        wait_for_others()
        self._at, self._num_steps = (self._at + 1) % 7 if int(action) else 0, self._num_steps + 1
        return Step(self._shows(), self._at / 7, False, self._num_steps >= 40)

    def _shows(self) -> np.ndarray:
        return np.array([self._at, self._num_steps / 40], np.float32)


def wait_if_held(step: int) -> None:
    held = Path(os.environ["NOTES"]) / "held"
    while held.exists() and held.read_text() == str(step):
        time.sleep(0.02)


@flow
def on_lanes(num_steps: int = 6, num_lanes: int = 4, by_roles: bool = False) -> None:
    learner = ActorCritic(Noted, optimizer=AdamW(1e-2), hidden=(8,), epochs=1)
    simulator, actor = Simulator(Noted, count=2, seed=1, hidden=(8,)), Actor(Noted, hidden=(8,))
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for step in steps(num_steps):
        wait_if_held(step)
        if by_roles:
            for _ in range(25):
                played = simulator.step(played, actor.act(played, learned))
            played = simulator.collect(played)
        else:
            played = simulator.play(played, learned, horizon=25)
        learned = learner.learn(learned, played)
        shown = episode_return(played)
        log(episode_return=shown)
        if step < num_steps - 1:
            print(float(shown))
