"""Environments: `Env` with `reset` and `step`, Gymnasium's as one, and `Vector`, which steps many side by side.

    env.reset(seed, row) -> observation        env.step(action) -> Step(observation, reward, terminated, truncated)

An observation is a text or an array. `Vector` follows Gymnasium's NEXT_STEP: the step after an episode's end ignores its action, gives
reward 0 and the first observation of the next episode; such steps are marked, so that nothing is learnt from them. The seed of an episode
is a function of the vector's seed, the environment's position and the episode's number, so a vector's state is what its current episodes
were given: it is recorded as text and gone on with by stepping again, and the observations' hashes are compared. Limit: an environment
that is no function of its seed and actions is found out then, not before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import EngineError, MissingExtra, OptionError
from m2flow.recipe import check_count

Array = npt.NDArray[Any]


class Step(NamedTuple):
    """What an action led to."""

    observation: str | Array
    reward: float | None
    """None: the environment gave none. Only what plays in texts (`m2flow.environments.turns.play`) takes that."""
    terminated: bool
    """The episode is over, and nothing comes after it."""
    truncated: bool
    """The episode was cut off: it would have gone on, so what it was worth is estimated."""


@dataclass(frozen=True)
class Spaces:
    """What an environment shows and takes."""

    observation: tuple[int, ...]
    """Shape: [F] of numbers, or [H, W, C] of a picture."""
    is_picture: bool
    num_actions: int
    """Number of discrete actions; 0: they are continuous."""
    action: tuple[int, ...] = ()
    """Shape of continuous actions: (A,)."""


class Env(ABC):
    """A world that is acted in, one episode after the other."""

    spaces: Spaces | None = None
    """What it shows and takes, where that is arrays. `Simulator` and `ActorCritic` ask for it."""

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> str | Array:
        """Begin an episode. Returns its first observation.

        Args:
            seed: what happens by chance is a function of it alone.
            row: of a dataset, what the episode is about.
        """

    @abstractmethod
    def step(self, action: Any) -> Step:
        """Act."""

    def close(self) -> None:
        """Free what it holds."""


def made(task: str | Callable[[], Env]) -> tuple[Env, Spaces]:
    """Make an environment: one of Gymnasium by its name, or what a function or a class gives.

    Raises:
        MissingExtra, OptionError: as `GymEnv`. OptionError: it does not say what it shows and takes.
    """
    env: Env = GymEnv(task) if isinstance(task, str) else task()
    if not isinstance(env, Env) or env.spaces is None:
        raise OptionError(
            f"{task!r} made {env!r:.60}, which does not say what it shows and takes",
            now="Subclass m2flow.environments.env.Env and set `spaces`, such as Spaces((4,), False, 2).",
        )
    return env, env.spaces


@final
class GymEnv(Env):
    """An environment of Gymnasium, by the name that it is registered under.

    Raises:
        MissingExtra: gymnasium is not installed. OptionError: it has no such environment, or one whose spaces are neither numbers nor
            pictures, or whose actions are neither one number of several nor real numbers.
    """

    def __init__(self, task: str, **options: Any) -> None:
        try:
            import gymnasium
        except ImportError:
            raise MissingExtra("environments of Gymnasium need the package gymnasium", now="Run: pip install 'm2flow[gym]'.") from None
        try:
            self._env: Any = gymnasium.make(task, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtra(
                f"the environment {task!r} needs more than Gymnasium: {error}",
                now="Install what it names (often an extra of Gymnasium's: pip install 'gymnasium[...]').",
            ) from None
        except ImportError as error:
            raise MissingExtra(f"the environment {task!r} needs the package {error.name}", now=f"Run: pip install {error.name}.") from None
        except gymnasium.error.Error as error:
            raise OptionError(
                f"Gymnasium has no environment {task!r}: {error}",
                now="`gymnasium.pprint_registry()` lists those that are installed. One that you registered is known where its module is "
                "imported, and workers do not import the flow's file: write 'module:Name-v0'.",
            ) from None
        seen, taken = self._env.observation_space, self._env.action_space
        boxes = gymnasium.spaces.Box
        is_discrete = isinstance(taken, gymnasium.spaces.Discrete)
        is_known = isinstance(seen, boxes) and len(seen.shape) in (1, 3) and math.prod(seen.shape) > 0
        if not is_known or not (is_discrete or (isinstance(taken, boxes) and taken.dtype.kind == "f" and math.prod(taken.shape) > 0)):
            raise OptionError(
                f"{task!r} has observations {seen} and actions {taken}; known are vectors and pictures, and actions of one of several or "
                "of real numbers",
                now="Wrap it in Gymnasium's wrappers (FlattenObservation, for one) so that it has these.",
            )
        self._first = int(taken.start) if is_discrete else 0
        action = () if is_discrete else (math.prod(taken.shape),)
        self.spaces = Spaces(tuple(seen.shape), len(seen.shape) == 3, int(taken.n) if is_discrete else 0, action)
        self._bounds: tuple[Array, Array] | None = None if is_discrete else (taken.low, taken.high)

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> Array:
        observation: Array = self._env.reset(seed=seed, options=dict(row) if row else None)[0]  # `Vector` looks at what it is.
        return observation

    def step(self, action: Any) -> Step:
        if self._bounds is None:
            taken: Any = self._first + int(action)
        else:
            taken = np.clip(np.asarray(action, np.float32).reshape(self._bounds[0].shape), *self._bounds)
        observation, reward, terminated, truncated, _ = self._env.step(taken)
        return Step(observation, reward, bool(terminated), bool(truncated))

    def close(self) -> None:
        self._env.close()


@dataclass
class _Episode:
    """What a running episode was given."""

    number: int
    actions: list[Any] = field(default_factory=list)
    has_ended: bool = False


class VectorStep(NamedTuple):
    """What a vector's actions led to; E environments."""

    observations: Array
    """[E, ...]; of an episode that ended, its last."""
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    is_real: npt.NDArray[np.bool_]
    """False where the step began an episode instead of acting."""


@final
class Vector:
    """Environments side by side, whose observations are arrays.

    Args:
        make: makes one of them.
        count: how many. seed: of all their episodes.
        first: the position of the first one among all of the seed, where these are a part of them.
    """

    def __init__(self, make: Callable[[], Env], count: int, seed: int, *, first: int = 0) -> None:
        check_count("count", count)
        self.envs = [make() for _ in range(count)]
        self._seed, self._first = seed, first
        self._episodes = [_Episode(0) for _ in self.envs]
        self.observations = np.stack([self._begun(i, 0) for i in range(count)])

    def _seed_of(self, position: int, number: int) -> int:
        text = f"{self._seed}/{self._first + position}/{number}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1

    def _begun(self, position: int, number: int) -> Array:
        """What an environment shows at the beginning of an episode."""
        return self._seen(position, self.envs[position].reset(self._seed_of(position, number)), f"at the beginning of its episode {number}")

    def _acted(self, position: int, action: Any) -> tuple[Array, float, bool, bool]:
        """What an action leads to. Raises `EngineError`: it is no `Step`, its reward no finite number, or what is shown not as said."""
        episode = self._episodes[position]
        when = f"for action {len(episode.actions)} of its episode {episode.number}"
        step: Any = self.envs[position].step(action)
        if not isinstance(step, tuple) or len(step) != len(Step._fields):
            raise EngineError(
                f"environment {self._first + position} gave {step!r:.100} {when}, which is no Step",
                now="Return Step(observation, reward, terminated, truncated) from step.",
            )
        seen, reward, terminated, truncated = step
        try:
            number = float("nan" if reward is None or isinstance(reward, str) else reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise EngineError(
                f"environment {self._first + position} gave the reward {reward!r:.60} {when}",
                now="Have it give a finite number at each step, 0 where nothing was earned.",
            )
        return self._seen(position, seen, when), number, terminated, truncated

    def _seen(self, position: int, seen: Any, when: str) -> Array:
        """What an environment shows, as an array. Raises `EngineError`: it is not what the environment says that it shows."""
        spaces, found = self.envs[position].spaces, np.zeros(0, object)
        with contextlib.suppress(TypeError, ValueError):  # Arrays of unequal lengths.
            found = np.asarray(seen)
        wrong = ""
        if found.dtype.kind not in "biuf":
            wrong = f"{seen!r:.60}, which is no array of numbers,"
        elif spaces is not None and found.shape != tuple(spaces.observation):
            wrong = f"an array of shape {found.shape} in place of {tuple(spaces.observation)}"
        elif not np.isfinite(found).all():
            wrong = "a number that is not finite"
        if wrong:
            now = "Have reset and step show arrays of finite numbers, of the shape that it says it has."
            raise EngineError(f"environment {self._first + position} shows {wrong} {when}", now=now)
        return found

    def step(self, actions: Sequence[Any] | Array) -> VectorStep:
        """Act in each; begin an episode where the one before has ended. Raises `EngineError`: an environment gives what is of no use."""
        count = len(self.envs)
        rewards, flags = np.zeros(count), np.zeros((3, count), bool)
        observations = []
        for i, (episode, action) in enumerate(zip(self._episodes, actions, strict=True)):
            if episode.has_ended:
                self._episodes[i] = _Episode(episode.number + 1)
                observations.append(self._begun(i, episode.number + 1))
                continue
            seen, reward, terminated, truncated = self._acted(i, action)
            rewards[i] = reward
            episode.actions.append(np.asarray(action).tolist())
            episode.has_ended = terminated or truncated
            flags[:, i] = terminated, truncated and not terminated, True
            observations.append(seen)
        self.observations = np.stack(observations)
        return VectorStep(self.observations, rewards, flags[0], flags[1], flags[2])

    def record(self) -> str:
        """The state as text: of each environment the episode's number and actions, and a hash of what it shows."""
        episodes = [
            {"number": each.number, "actions": each.actions, "has_ended": each.has_ended, "shows": _hash(seen)}
            for each, seen in zip(self._episodes, self.observations, strict=True)
        ]
        return json.dumps(episodes)

    def restore(self, record: str) -> None:
        """Go on from a record, by acting again from the beginnings of its episodes.

        Raises:
            EngineError: an environment shows something else than it did, so it is no function of its seed and actions.
        """
        episodes = json.loads(record)
        if len(episodes) != len(self.envs):
            raise OptionError(
                f"a record of {len(episodes)} environments can't be gone on with by {len(self.envs)}",
                now="Make as many environments as the record has.",
            )
        observations = []
        for i, (env, past) in enumerate(zip(self.envs, episodes, strict=True)):
            seen = np.asarray(env.reset(self._seed_of(i, past["number"])))
            for action in past["actions"]:
                seen = np.asarray(env.step(action).observation)
            self._check(i, seen, past["shows"], past["number"], len(past["actions"]))
            self._episodes[i] = _Episode(past["number"], list(past["actions"]), past["has_ended"])
            observations.append(seen)
        self.observations = np.stack(observations)

    def check(self, observations: Array) -> None:
        """Compare what is shown with what was shown before after the same actions. Raises `EngineError`, as `restore`."""
        for i, (seen, past, episode) in enumerate(zip(self.observations, observations, self._episodes, strict=True)):
            self._check(i, seen, _hash(past), episode.number, len(episode.actions))

    def _check(self, position: int, seen: Array, shows: str, number: int, num_actions: int) -> None:
        if _hash(seen) != shows:
            raise EngineError(
                f"environment {self._first + position} shows something else after the same {num_actions} actions of its episode {number}",
                now="It must be a function of its seed and actions: look for a clock, a random generator of its own, another version.",
            )

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _hash(observation: Array) -> str:
    data = np.ascontiguousarray(observation)
    return hashlib.sha256(f"{data.dtype}{data.shape}".encode() + data.tobytes()).hexdigest()[:16]
