"""Play in worlds of texts: one player in an `Env`, several by turns in a `TurnEnv`, of which PettingZoo's environments are some.

    @agent
    async def game(chat: Chat, row: Sample) -> dict[str, float]:
        players = {name: chat.conversation(name) for name in ("player_1", "player_2")}
        return await play_by_turns(players, PettingZoo("classic/tictactoe-v3"), seed=row.number)

What a player is shown is the next message of its conversation, and what the model says is its action. An environment's calls run on
threads, so one that is slow delays no other episode; async ones are awaited. One that raises fails the episode, which then has no reward.

An episode that is repeated acts in its environment again from the seed. Where that shows something else than it did, the conversation
differs from its record, and the episode has failed (`diverged`).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from m2flow.environments.env import Env
from m2flow.errors import EngineError, MissingExtra, NoReward, OptionError


class Said(Protocol):
    """A model's turn: `m2flow.Turn`."""

    @property
    def text(self) -> str: ...
    @property
    def is_cut(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...


class Speaker(Protocol):
    """What plays: a `m2flow.Chat`."""

    name: str
    rng: Any

    async def say(self, content: str, *, max_tokens: int | None = None) -> Said: ...


class Turn(NamedTuple):
    """A player that is to act."""

    player: str
    observation: str
    """What it is shown."""


class TurnEnv(ABC):
    """A world of texts in which players act one after the other."""

    players: tuple[str, ...]
    """Their names."""

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> Turn | None:
        """Begin an episode. Returns who acts first; None: it is over.

        Args:
            seed: what happens by chance is a function of it alone.
            row: of a dataset, what the episode is about.
        """

    @abstractmethod
    def step(self, action: str) -> Turn | None:
        """Act for the player whose turn it is. Returns who is next; None: the episode is over."""

    @abstractmethod
    def rewards(self) -> dict[str, float]:
        """The sum of each player's rewards in this episode so far."""

    def close(self) -> None:
        """Free what it holds."""


# ---- PettingZoo


def shown_as_text(observation: Any, legal: list[int] | None) -> str:
    """An observation of numbers as text: its rows, and the actions that are legal.

    >>> print(shown_as_text({"observation": np.array([[0, 1], [1, 0]]), "action_mask": np.array([1, 0])}, [0]))
    0 1
    1 0
    Legal actions: 0
    """
    found = observation["observation"] if isinstance(observation, Mapping) and "observation" in observation else observation
    numbers = np.asarray(found)
    rows = numbers.reshape(-1, numbers.shape[-1]) if numbers.ndim else numbers.reshape(1, 1)
    lines = [" ".join(f"{value:g}" for value in row.tolist()) for row in rows.astype(float)]
    return "\n".join([*lines, *([f"Legal actions: {' '.join(map(str, legal))}"] if legal is not None else [])])


def first_number(text: str) -> int | None:
    """The first whole number of a text; None: it has none.

    >>> first_number("I take 4, since 2 is taken.")
    4
    """
    found = re.search(r"-?\d+", text)
    return int(found[0]) if found else None


@final
class PettingZoo(TurnEnv):
    """An environment of PettingZoo in which agents act in turn (its AEC interface).

    Args:
        make: the name that it is registered under, such as `classic/tictactoe-v3`, or what makes an environment.
        show: the text for an observation and the legal actions (None: it names none); by default the numbers, row by row.
        act: the action that a text says, None if it says none; by default its first whole number.
        illegal_reward: an action that is none, or not legal, ends the episode with this reward for its player and 0 for the others.
        **options: of the environment.
    Raises:
        MissingExtra: the package, or something that the environment needs, is not installed. OptionError: there is no such environment.
    """

    def __init__(
        self,
        make: str | Callable[..., Any],
        *,
        show: Callable[[Any, list[int] | None], str] = shown_as_text,
        act: Callable[[str], Any] = first_number,
        illegal_reward: float = -1.0,
        **options: Any,
    ) -> None:
        self._env = _made(make, options)
        self._show, self._act, self._illegal_reward = show, act, illegal_reward
        self.players = tuple(map(str, self._env.possible_agents))
        self._totals: dict[str, float] = {}

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> Turn | None:
        self._env.reset(seed=seed, options=dict(row) if row else None)
        self._totals = dict.fromkeys(self.players, 0.0)
        return self._next()

    def step(self, action: str) -> Turn | None:
        player = str(self._env.agent_selection)
        taken = self._act(action)
        if taken is None or not self._is_legal(taken):
            self._totals[player] += self._illegal_reward
            return None
        self._env.step(taken)
        return self._next()

    def rewards(self) -> dict[str, float]:
        # Of an episode that is left, those whose turn it is not have yet to be given what they earned since their last one.
        due = dict[Any, float](getattr(self._env, "_cumulative_rewards", {})) if self._totals else {}
        waiting = [agent for agent in due if agent in self._env.agents and agent != self._env.agent_selection]
        return self._totals | {str(agent): self._totals[str(agent)] + float(due[agent]) for agent in waiting}

    def close(self) -> None:
        self._env.close()

    def _next(self) -> Turn | None:
        """Whose turn it is. Who has lost or won takes a last, empty turn, in which it gets what it has earned since the one before."""
        while self._env.agents:
            player = str(self._env.agent_selection)
            observation, reward, terminated, truncated, _ = self._env.last()
            self._totals[player] += float(reward)
            if not (terminated or truncated):
                return Turn(player, self._show(observation, self._legal()))
            self._env.step(None)
        return None

    def _legal(self) -> list[int] | None:
        """The legal actions of the player whose turn it is; None: the environment names none."""
        observation, _, _, _, info = self._env.last()
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = info.get("action_mask") if mask is None else mask
        return None if mask is None else np.flatnonzero(mask).tolist()

    def _is_legal(self, action: Any) -> bool:
        legal = self._legal()
        if legal is not None:
            return action in legal
        return bool(self._env.action_space(self._env.agent_selection).contains(action))


def _made(make: str | Callable[..., Any], options: Mapping[str, Any]) -> Any:
    if not isinstance(make, str):
        return make(**options)
    try:
        import pettingzoo
        from pettingzoo.env_registry.exceptions import FailedToImport, PettingZooRegistryError
    except ImportError:
        raise MissingExtra("environments of PettingZoo need pettingzoo 1.27", now="Run: pip install 'm2flow[pettingzoo]'.") from None
    try:
        return pettingzoo.make("aec", make, **options)
    except FailedToImport as error:
        raise MissingExtra(f"the environment {make!r} needs more than PettingZoo: {error.__cause__}", now=str(error)) from None
    except PettingZooRegistryError as error:
        raise OptionError(
            f"PettingZoo has no environment {make!r}: {error}",
            now="Give the module and version as PettingZoo writes them, such as 'classic/tictactoe_v3'.",
        ) from None


# ---- playing


async def play(
    chat: Speaker,
    env: Env | Any,
    *,
    seed: int | None = None,
    row: Mapping[str, object] | None = None,
    max_steps: int | None = None,
    max_tokens: int | None = None,
) -> float:
    """Have the model act in a world of texts until that ends. Returns the sum of the rewards.

    Args:
        chat: the conversation.
        env: has `reset(seed, row)` and `step(action)` as `m2flow.environments.env.Env`, plain or async, and shows texts. It is not closed.
        seed: of the episode; give one of the row where all episodes of a group are to begin alike. By default each has its own.
        row: passed on to `reset`.
        max_steps: at which the episode is left; by default the bounds of the conversation end it.
        max_tokens: of an action, which is whatever is said until then. Without it, a turn that a limit of tokens cut off is no action,
            and the episode ends there.
    Raises:
        EngineError: it shows something else than texts. NoReward: it was acted in, and no step had a reward (those of some may be None).
    """
    rewards, num_steps = list[float](), 0
    shown = await _called(env.reset, chat.rng.getrandbits(31) if seed is None else seed, row)
    while max_steps is None or num_steps < max_steps:
        said = await chat.say(_text(shown, env), max_tokens=max_tokens)
        if not _is_action(said, max_tokens):
            break
        step = await _called(env.step, said.text)
        shown, num_steps = step.observation, num_steps + 1
        if step.reward is not None:
            rewards.append(step.reward)
        if step.terminated or step.truncated:
            break
    if num_steps and not rewards:
        now = "An environment that pays at its end alone needs to come to it: look at max_steps, and at the rollout's bounds."
        raise NoReward(f"{type(env).__name__} gave no reward in the episode's {num_steps} steps", now=now)
    return sum(rewards)


async def play_by_turns(
    players: Mapping[str, Speaker],
    env: TurnEnv,
    *,
    seed: int | None = None,
    row: Mapping[str, object] | None = None,
    max_steps: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Have models play against each other, or with each other. Returns the reward of each conversation, by its name.

    Args:
        players: player -> the conversation of which it is one; several may be of one.
        env, seed, row, max_steps, max_tokens: as in `play`; steps are those of all players.
    Raises:
        OptionError: a player has no conversation.
    """
    if missing := [name for name in env.players if name not in players]:
        raise OptionError(f"nobody plays {', '.join(missing)} of {', '.join(env.players)}", now="Give each player a conversation.")
    num_steps = 0
    turn = await _called(env.reset, players[env.players[0]].rng.getrandbits(31) if seed is None else seed, row)
    while turn is not None and (max_steps is None or num_steps < max_steps):
        said = await players[turn.player].say(_text(turn.observation, env), max_tokens=max_tokens)
        if not _is_action(said, max_tokens):
            break
        turn, num_steps = await _called(env.step, said.text), num_steps + 1
    found: dict[str, float] = {}
    for player, reward in env.rewards().items():
        found[players[player].name] = found.get(players[player].name, 0.0) + reward
    return found


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _text(shown: object, env: object) -> str:
    if not isinstance(shown, str):
        raise EngineError(f"{type(env).__name__} shows {type(shown).__name__}, and a model reads texts", now="Have it return a text.")
    return shown


def _is_action(said: Said, max_tokens: int | None) -> bool:
    return not said.is_cut or (max_tokens is not None and said.num_tokens >= max_tokens)
