"""Environments: vectors against Gymnasium's own, going on from a record, advantages at the ends of episodes, and a flow that learns."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from fake_clusters import SPLIT

from m2flow import AdamW, flow, log, steps
from m2flow.environments.actor_critic import (
    Actor,
    ActorCritic,
    Simulator,
    as_input,
    beside_each_other,
    build,
    episode_return,
    lanes,
    pack,
    piece_advantages,
    unpack,
)
from m2flow.environments.env import Env, GymEnv, Spaces, Step, Vector
from m2flow.errors import EngineError, MissingExtra, OptionError
from m2flow.macro.flow import load_flow
from m2flow.spec import ClusterSpec, FunctionSpec
from m2flow.testing.world import run_eager, run_planned

ROOT = Path(__file__).resolve().parents[2]


class Corridor(Env):
    """Walk to the end of a corridor whose length is the seed's; `leaks` adds what no seed says."""

    def __init__(self, leaks: Any = None) -> None:
        self._leaks, self._at, self._end = leaks, 0, 0

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> np.ndarray:
        self._at, self._end = 0, 2 + seed % 3
        return self._shows()

    def step(self, action: Any) -> Step:
        self._at += int(action)
        return Step(self._shows(), 1.0, self._at >= self._end, False)

    def _shows(self) -> np.ndarray:
        return np.array([self._at, self._end, next(self._leaks) if self._leaks else 0], np.float32)


def test_the_step_after_an_end_begins_an_episode_and_is_marked() -> None:
    vector = Vector(Corridor, 3, seed=5)
    ends = vector.observations[:, 1].copy()
    seen = [vector.step([1, 1, 1]) for _ in range(6)]
    for i in range(3):
        last = int(ends[i]) - 1
        assert [bool(step.terminated[i]) for step in seen[: last + 2]] == [False] * last + [True, False]
        assert [bool(step.is_real[i]) for step in seen[: last + 2]] == [True] * (last + 1) + [False]
        assert seen[last].observations[i, 0] == ends[i], "the last observation of the episode, not the first of the next"
        assert (seen[last + 1].rewards[i], seen[last + 1].observations[i, 0]) == (0.0, 0.0)


def test_a_vector_goes_on_from_its_record_as_if_it_had_not_stopped() -> None:
    one, other = Vector(Corridor, 4, seed=1), Vector(Corridor, 4, seed=1)
    rng = np.random.default_rng(0)
    for _ in range(9):
        one.step(rng.integers(0, 2, 4))
    other.restore(one.record())
    for _ in range(9):
        actions = rng.integers(0, 2, 4)
        left, right = one.step(actions), other.step(actions)
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    assert one.record() == other.record()


def test_an_environment_that_is_no_function_of_its_seed_is_found_out() -> None:
    count = itertools.count()
    vector = Vector(lambda: Corridor(count), 2, seed=1)
    vector.step([1, 1])
    again = Vector(lambda: Corridor(count), 2, seed=1)
    with pytest.raises(EngineError, match="shows something else after the same 1 actions"):
        again.restore(vector.record())
    with pytest.raises(OptionError, match="record of 2 environments"):
        Vector(Corridor, 3, seed=1).restore(vector.record())


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_neither_0_nor_learnt_from(reward: float | None) -> None:
    class Unpaid(Corridor):
        def step(self, action: Any) -> Step:
            return super().step(action)._replace(reward=reward)

    with pytest.raises(EngineError, match=rf"environment 0 gave the reward {reward} for action 0 of its episode 0"):
        Vector(Unpaid, 2, seed=1).step([1, 1])


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), "one", {"paid": 1.0}])
def test_a_reward_that_is_no_number_is_named_with_its_environment(reward: Any) -> None:
    class Odd(Corridor):
        def step(self, action: Any) -> Step:
            return super().step(action)._replace(reward=reward)

    with pytest.raises(EngineError, match=r"environment 4 gave the reward .* for action 0 of its episode 0"):
        Vector(Odd, 1, seed=1, first=4).step([1])


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (np.zeros(3, np.float32), r"an array of shape \(3,\) in place of \(1,\)"),
        (np.array([np.nan], np.float32), "a number that is not finite"),
        ({"place": 1.0}, "which is no array of numbers"),
        ([[1.0], [1.0, 2.0]], "which is no array of numbers"),
        (None, "which is no array of numbers"),
    ],
)
def test_what_is_not_shown_as_the_environment_says_is_named_where_it_is_shown(shown: Any, words: str) -> None:
    class Said(Corridor):
        spaces = Spaces((1,), False, 2)

        def reset(self, seed: int, row: Any = None) -> Any:
            return super().reset(seed)[:1]

        def step(self, action: Any) -> Step:
            return super().step(action)._replace(observation=shown)

    class AtOnce(Said):
        def reset(self, seed: int, row: Any = None) -> Any:
            return shown

    with pytest.raises(EngineError, match=f"environment 1 shows .*{words}.* for action 0 of its episode 0"):
        Vector(Said, 1, seed=1, first=1).step([1])
    with pytest.raises(EngineError, match=f"environment 0 shows .*{words}.* at the beginning of its episode 0"):
        Vector(AtOnce, 1, seed=1)


def test_a_step_as_gymnasium_gives_it_is_told_from_one() -> None:
    class Five(Corridor):
        def step(self, action: Any) -> Any:
            return (*super().step(action), {})

    with pytest.raises(EngineError, match="which is no Step") as raised:
        Vector(Five, 1, seed=1).step([1])
    assert "Step(observation, reward, terminated, truncated)" in str(raised.value)


def _advantages_by_hand(rows: dict[str, np.ndarray], values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """A[t] = delta[t] + gamma lam A[t + 1], one step after the other."""
    found = []
    horizon, count = rows["rewards"].shape
    for e in range(count):
        after, of_env = 0.0, []
        for t in reversed(range(horizon)):
            if not rows["is_real"][t, e]:
                after = 0.0
                continue
            goes_on = 0.0 if rows["terminated"][t, e] else values[t + 1, e]
            delta = rows["rewards"][t, e] + gamma * goes_on - values[t, e]
            is_end = rows["terminated"][t, e] or rows["truncated"][t, e]
            after = delta + gamma * lam * (0.0 if is_end else after)
            of_env.append(after)
        found += of_env[::-1]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_only_a_terminated_episode_is_worth_nothing_afterwards(seed: int) -> None:
    rng = np.random.default_rng(seed)
    horizon, count = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    ends = rng.random((horizon, count)) < 0.3
    ends[1:] &= ~ends[:-1]
    terminated = ends & (rng.random(ends.shape) < 0.5)
    real = np.ones_like(ends)
    real[1:] = ~ends[:-1]
    rewards = np.where(real, rng.random(ends.shape), 0.0)
    rows = {"rewards": rewards, "terminated": terminated, "truncated": ends & ~terminated, "is_real": real}
    values = rng.random((horizon + 1, count))
    advantages, returns = piece_advantages(rows, values, gamma=0.9, lam=0.8)
    assert advantages == pytest.approx(_advantages_by_hand(rows, values, 0.9, 0.8))
    assert returns == pytest.approx(advantages + values[:-1].T[real.T])


def test_arrays_go_through_text_unchanged() -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4)), "c": np.array([True, False])}
    found, texts = unpack(pack(arrays, world="[]"))
    assert texts == {"world": "[]"}
    assert all(np.array_equal(found[name], each) and found[name].dtype == each.dtype for name, each in arrays.items())


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match=r"m2flow\[gym\]"):
        GymEnv("CartPole-v1")


# ---- with Gymnasium


def test_a_vector_steps_as_gymnasiums_own_does() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    vector = Vector(lambda: GymEnv("CartPole-v1"), 3, seed=0)
    own = vector._seed_of

    class Seeded(gymnasium.Wrapper):
        def __init__(self, position: int) -> None:
            super().__init__(gymnasium.make("CartPole-v1"))
            self._position, self._number = position, itertools.count()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.env.reset(seed=own(self._position, next(self._number)))

    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    theirs = gymnasium.vector.SyncVectorEnv([lambda i=i: Seeded(i) for i in range(3)], autoreset_mode=mode)
    first, _ = theirs.reset()
    assert np.array_equal(first, vector.observations)
    rng, ended, num_begun = np.random.default_rng(1), np.zeros(3, bool), 0
    for _ in range(200):
        actions = rng.integers(0, 2, 3)
        seen, rewards, terminated, truncated, _ = theirs.step(actions)
        step = vector.step(actions)
        assert np.array_equal(step.observations, seen)
        assert np.array_equal(step.rewards, rewards)
        assert np.array_equal(step.terminated | step.truncated, terminated | truncated)
        assert np.array_equal(step.is_real, ~ended)
        num_begun += int(ended.sum())
        ended = terminated | truncated
    assert num_begun > 10
    theirs.close()


def test_tasks_that_are_none_or_of_unknown_spaces_are_refused() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(OptionError, match="no environment 'NoSuch-v1'") as raised:
        GymEnv("NoSuch-v1")
    assert "'module:Name-v0'" in str(raised.value)
    with pytest.raises(OptionError, match="known are vectors"):
        GymEnv("FrozenLake-v1")


@pytest.mark.parametrize("shape", [(), (2, 2), (3,)])
def test_real_actions_of_any_shape_are_taken_and_whole_ones_refused(shape: tuple[int, ...]) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    taken: list[Any] = []

    class Levers(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Box(-1, 1, shape)

        def __init__(self, is_whole: bool = False) -> None:
            if is_whole:
                self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.int64)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            taken.append(action)
            return np.zeros(2, np.float32), 1.0, False, False, {}

    gymnasium.register("Levers-v0", entry_point=Levers)
    try:
        env = GymEnv("Levers-v0")
        assert env.spaces is not None
        assert env.spaces.action == (int(np.prod(shape)),)
        env.reset(0)
        env.step(np.full(env.spaces.action, 3.0, np.float32))
        with pytest.raises(OptionError, match="real numbers"):
            GymEnv("Levers-v0", is_whole=True)
    finally:
        del gymnasium.registry["Levers-v0"]
    assert taken[0].shape == shape
    assert (taken[0] == 1).all()


class Track(Env):
    """Step right, or fall back to the start; the episode ends at the end of the track, or after 12 steps."""

    spaces = Spaces((2,), False, 2)

    def __init__(self, length: int = 3) -> None:
        self._length, self._at, self._num_steps = length, 0, 0

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> np.ndarray:
        self._at, self._num_steps = seed % 2, 0
        return self._shows()

    def step(self, action: Any) -> Step:
        self._at, self._num_steps = self._at + 1 if int(action) else 0, self._num_steps + 1
        is_there = self._at >= self._length
        return Step(self._shows(), float(is_there), is_there, self._num_steps >= 12 and not is_there)

    def _shows(self) -> np.ndarray:
        return np.array([self._at / self._length, 1.0], np.float32)


@flow
def on_track(num_steps: int = 12, num_lanes: int = 4, horizon: int = 16) -> None:
    learner = ActorCritic(Track, optimizer=AdamW(1e-2), hidden=(16,), epochs=4)
    simulator = Simulator(Track, count=2, seed=1, hidden=(16,))
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for _ in steps(num_steps):
        played = simulator.play(played, learned, horizon=horizon)
        learned = learner.learn(learned, played)
        log(episode_return=episode_return(played))


def _with_workers(num: int) -> ClusterSpec:
    return SPLIT.model_copy(update={"functions": FunctionSpec(workers=num)})


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_lanes_are_played_in_as_many_workers_as_there_are_with_the_same_result(num_workers: int) -> None:
    eager = run_eager(on_track, {}, SPLIT)
    assert eager.error == "", eager.error
    assert run_planned(on_track, {}, _with_workers(num_workers), order_seed=num_workers) == eager
    returns = [value for _, name, value in eager.logs if name == "episode_return"]
    assert returns[-1] > 0.95 > returns[0]


@flow
def on_track_by_roles(num_steps: int = 12, num_lanes: int = 4, horizon: int = 16) -> None:
    learner = ActorCritic(Track, optimizer=AdamW(1e-2), hidden=(16,), epochs=4)
    simulator, actor = Simulator(Track, count=2, seed=1), Actor(Track, hidden=(16,))
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for _ in steps(num_steps):
        for _ in range(horizon):
            played = simulator.step(played, actor.act(played, learned))
        played = simulator.collect(played)
        learned = learner.learn(learned, played)
        log(episode_return=episode_return(played))


@pytest.mark.parametrize(
    ("num_workers", "roles", "num_losses"),
    [(1, {}, 0), (3, {}, 2), (1, {"actor": 1, "simulator": 2}, 0), (1, {"actor": 2, "simulator": 2, "actorcritic": 1}, 2)],
)
def test_an_actor_and_a_simulator_as_two_roles_play_what_the_simulator_plays_alone(
    num_workers: int, roles: dict[str, int], num_losses: int
) -> None:
    options = {"num_steps": 3, "num_lanes": 3, "horizon": 5}
    alone, eager = run_eager(on_track, options, SPLIT), run_eager(on_track_by_roles, options, SPLIT)
    assert eager.error == "", eager.error
    assert eager.logs == alone.logs
    assert not math.isnan(float(str(eager.logs[-1][2])))
    spec = SPLIT.model_copy(update={"functions": FunctionSpec(workers=num_workers, roles=roles)})
    assert run_planned(on_track_by_roles, options, spec, order_seed=num_workers, num_losses=num_losses) == eager


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_a_piece_is_the_same_text_by_steps_also_where_each_is_in_another_worker(task: str) -> None:
    pytest.importorskip("gymnasium")

    def simulators() -> Any:
        return _made(Simulator, task, count=3, hidden=(8,))

    learned, actor, warm = _made(ActorCritic, task, hidden=(8,)).start(), _made(Actor, task, hidden=(8,)), simulators()
    whole = by_steps = by_strangers = warm.start({"lane": 1}, _rng())
    for _ in range(3):
        whole = simulators().play(whole, learned, 12)
        for step in range(12):
            by_steps = warm.step(by_steps, actor.act(by_steps, learned))
            if step == 5:
                assert simulators().play(by_steps, learned, 6) == whole, "play goes on where steps have led"
            by_strangers = simulators().step(by_strangers, _made(Actor, task, hidden=(8,)).act(by_strangers, learned))
            assert by_steps == by_strangers
        by_steps, by_strangers = warm.collect(by_steps), simulators().collect(by_strangers)
        assert whole == by_steps == by_strangers
    with pytest.raises(OptionError, match="lane 1 has made no step"):
        warm.collect(whole)


def test_no_two_steps_and_no_two_lanes_have_the_same_random_numbers() -> None:
    simulator, learned = _made(Simulator, Track, count=4, hidden=(16,)), _made(ActorCritic, Track, hidden=(16,)).start()
    actor, chosen = _made(Actor, Track, hidden=(16,)), []
    for lane in range(2):
        played = simulator.start({"lane": lane}, np.random.default_rng(lane))
        for _ in range(2):
            for _ in range(12):
                acted = actor.act(played, learned)
                chosen.append(tuple(unpack(acted)[0]["actions"].tolist()))
                played = simulator.step(played, acted)
            played = simulator.collect(played)
    assert len({tuple(chosen[at : at + 12]) for at in range(0, 48, 12)}) == 4
    assert len(set(chosen)) > 8, "of the 16 that four environments may have"


def test_a_lane_of_an_earlier_version_is_refused() -> None:
    played = _made(Simulator, Track).start({"lane": 0}, _rng())
    arrays, texts = unpack(played, without=("key",))
    with pytest.raises(EngineError, match="played by an earlier version"):
        _made(Simulator, Track).play(pack(arrays, **texts), "", 1)


def test_an_environment_that_leaks_is_found_out_in_the_middle_of_a_piece() -> None:
    class Leaking(Track):
        count = itertools.count()

        def step(self, action: Any) -> Step:
            step = super().step(action)
            return step._replace(observation=np.append(step.observation[:1], next(self.count)).astype(np.float32))

    learned, actor = _made(ActorCritic, Leaking).start(), _made(Actor, Leaking)
    played = _made(Simulator, Leaking, count=2).start({"lane": 0}, _rng())
    played = _made(Simulator, Leaking, count=2).step(played, actor.act(played, learned))
    with pytest.raises(EngineError, match="environment 0 shows something else after the same 1 actions"):
        _made(Simulator, Leaking, count=2).step(played, actor.act(played, learned))


def test_networks_that_differ_pictures_that_are_too_small_and_learning_that_diverges_are_said() -> None:
    learner = _made(ActorCritic, Track, hidden=(8,), optimizer=AdamW(1e30))
    played = _made(Simulator, Track, hidden=(4,)).start({"lane": 0}, _rng())
    with pytest.raises(OptionError, match=r"\(8, 2\).* can't take|can't take those of \(8, 2\)") as differing:
        _made(Simulator, Track, hidden=(4,)).play(played, learner.start(), 4)
    assert "the same `hidden`" in differing.value.now
    with pytest.raises(OptionError, match="of 3 x 64 with 64 channels are too small") as small:
        build(Spaces((3, 64, 64), True, 2), (4,), None)
    assert "[height, width, channels]" in small.value.now
    played = _made(Simulator, Track, hidden=(8,)).play(played, learner.start(), 4)
    with pytest.raises(EngineError, match="learning has diverged"):
        learner.learn(learner.start(), [played], _rng())


def test_what_lanes_played_is_one_piece_with_the_environments_of_all() -> None:
    simulator, learned = _made(Simulator, Track, count=2), _made(ActorCritic, Track).start()
    begun = [simulator.start({"lane": lane}, _rng()) for lane in range(3)]
    pieces = [simulator.play(each, learned, 5) for each in begun]
    both, alone = beside_each_other(pieces), [unpack(piece)[0] for piece in pieces]
    assert both["rewards"].shape == (5, 6)
    assert both["seen"].shape == (6, 6, 2)
    np.testing.assert_array_equal(both["actions"], np.concatenate([piece["actions"] for piece in alone], axis=1))
    whole = unpack(_made(Simulator, Track, count=6).start({"lane": 0}, _rng()))[1]["world"]
    parts = [unpack(_made(Simulator, Track, count=2).start({"lane": lane}, _rng()))[1]["world"] for lane in range(3)]
    assert json.loads(whole) == [each for part in parts for each in json.loads(part)], "an environment's seed is its own, in any lanes"


def test_an_environment_that_does_not_say_what_it_shows_is_refused() -> None:
    with pytest.raises(OptionError, match="does not say what it shows") as refused:
        _made(ActorCritic, Corridor)
    assert "spaces" in refused.value.now


def test_planned_and_eager_runs_of_the_flow_agree_to_the_bit() -> None:
    pytest.importorskip("gymnasium")
    flow = load_flow(str(ROOT / "flows" / "gym_ppo.py"))
    for behind in (False, True):
        options = {"num_steps": 3, "num_lanes": 2, "count": 2, "horizon": 48, "behind": behind}
        eager = run_eager(flow, options, SPLIT)
        assert eager.error == "", eager.error
        assert [name for _, name, _ in eager.logs] == ["episode_return"] * 3
        assert run_planned(flow, options, _with_workers(2), order_seed=2) == eager


def test_the_pipelined_flow_logs_what_the_other_one_does() -> None:
    pytest.importorskip("gymnasium")
    options = {"num_steps": 2, "num_lanes": 2, "count": 2, "horizon": 24}
    whole, by_roles = (run_eager(load_flow(str(ROOT / "flows" / name)), options, SPLIT) for name in ("gym_ppo.py", "gym_pipelined.py"))
    assert by_roles.error == "", by_roles.error
    assert by_roles.logs == whole.logs
    assert not math.isnan(float(str(whole.logs[-1][2])))


def test_play_goes_on_the_same_in_a_worker_that_has_the_environments_and_in_one_that_has_not() -> None:
    pytest.importorskip("gymnasium")
    learner = _made(ActorCritic, "CartPole-v1", hidden=(8,))
    warm = _made(Simulator, "CartPole-v1", count=3, hidden=(8,))
    learned, played = learner.start(), warm.start({"lane": 1}, _rng())
    for step in range(4):
        cold = _made(Simulator, "CartPole-v1", count=3, hidden=(8,))
        both = [each.play(played, learned, 20) for each in (warm, cold)]
        assert both[0] == both[1]
        played = both[0]
        learned = learner.learn(learned, [played], np.random.default_rng(step))


class Bright(Env):
    """Walk until the one bright pixel of what is seen lies in the middle; 1 for a step towards it, -1 for one away from it."""

    spaces = Spaces((8, 8, 1), True, 4)

    def __init__(self) -> None:
        self._at, self._num_steps = (0, 0), 0

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> np.ndarray:
        self._at, self._num_steps = divmod(seed % 64, 8), 0
        return self._shows()

    def step(self, action: Any) -> Step:
        before, moves = self._far(), ((1, 0), (-1, 0), (0, 1), (0, -1))
        down, right = (min(max(at + by, 0), 7) for at, by in zip(self._at, moves[int(action)], strict=True))
        self._at, self._num_steps = (down, right), self._num_steps + 1
        return Step(self._shows(), float(before - self._far()), not self._far(), self._num_steps >= 16 and bool(self._far()))

    def _far(self) -> int:
        return sum(abs(at - 4) for at in self._at)

    def _shows(self) -> np.ndarray:
        picture = np.zeros((8, 8, 1), np.uint8)
        picture[self._at] = 255
        return picture


def test_an_actor_learns_from_pictures_where_to_go() -> None:
    """Of its steps, those towards the pixel less those away from it: about 0 at first, nearly all at the end."""
    learner = _made(ActorCritic, Bright, hidden=(64,), optimizer=AdamW(3e-3, max_grad_norm=0.5), epochs=4, minibatch_size=128)
    simulator = _made(Simulator, Bright, count=16, hidden=(64,))
    learned, played, gains = learner.start(), simulator.start({"lane": 0}, _rng()), []
    for step in range(14):
        played = simulator.play(played, learned, 32)
        rows = unpack(played)[0]
        gains.append(float(rows["rewards"][rows["is_real"]].mean()))
        learned = learner.learn(learned, [played], np.random.default_rng(step))
    assert gains[0] < 0.15
    assert np.mean(gains[-3:]) > 0.8, gains


def test_actors_of_continuous_actions_and_of_pictures_make_finite_steps() -> None:
    pytest.importorskip("gymnasium")
    import torch

    learner = _made(ActorCritic, "Pendulum-v1", hidden=(8,))
    simulator = _made(Simulator, "Pendulum-v1", count=2, hidden=(8,))
    first = learner.start()
    played = simulator.play(simulator.start({"lane": 0}, _rng()), first, 30)
    learned = unpack(learner.learn(first, [played], np.random.default_rng(0)))[0]
    assert any(not np.array_equal(each, learned[name]) for name, each in unpack(first)[0].items() if name.startswith("w/"))
    assert np.isfinite(learned["w/actor.0.weight"]).all()
    spaces = Spaces((24, 20, 3), True, 4)
    model = build(spaces, (16,), 0)
    seen = as_input(np.zeros((5, 24, 20, 3), np.uint8), spaces)
    assert model["actor"](seen).shape == (5, 4)
    assert torch.equal(model["actor"](seen), build(spaces, (16,), 0)["actor"](seen))


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _made(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """A role's real object, as a worker makes it."""
    return type.__call__(kind, *args, **kwargs)


def _run(runs: Path, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "m2flow", "run", *args, "--runs-dir", str(runs)]
    return programs.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _returns(runs: Path) -> list[float]:
    lines = [line for path in runs.glob("*/metrics.jsonl") for line in path.read_text().splitlines() if line.endswith("}")]
    values = {one["step"]: one["values"]["episode_return"] for one in map(json.loads, lines) if "episode_return" in one["values"]}
    return [values[step] for step in sorted(values)]


@pytest.mark.slow
def test_a_pendulum_of_mujoco_is_balanced(tmp_path: Path) -> None:
    """1,000 steps are the most that an episode has."""
    pytest.importorskip("mujoco")
    run = _run(tmp_path, "flows/gym_ppo.py", "--task", "InvertedPendulum-v5", "--num-steps", "90")
    assert run.wait(500) == 0
    assert max(_returns(tmp_path)) >= 950


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_to_the_same_returns_and_cartpole_is_learnt(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    whole = _run(tmp_path / "whole", "flows/gym_ppo.py", "--num-steps", "60")
    assert whole.wait(500) == 0
    returns = _returns(tmp_path / "whole")
    assert len(returns) == 60
    assert max(returns) >= 450
    cut = _run(tmp_path / "cut", "flows/gym_ppo.py", "--num-steps", "8")
    deadline = time.monotonic() + 200
    while len(_returns(tmp_path / "cut")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    run_dir = next((tmp_path / "cut").iterdir())
    assert len(_returns(tmp_path / "cut")) < 8
    command = [sys.executable, "-m", "m2flow", "run", "--resume", str(run_dir)]
    done = programs.run(command, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert _returns(tmp_path / "cut") == returns[:8]
