"""A model plays in worlds of texts: alone, by turns with others, in PettingZoo's environments, and in an OpenEnv server's."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_clusters import SPLIT

from m2flow import Chat, Dataset, Policy, Sample, agent, by_conversation, flow, steps
from m2flow.agents.tools import EventLoop
from m2flow.environments.env import Env, Step
from m2flow.environments.openenv import OpenEnv
from m2flow.environments.turns import PettingZoo, Turn, TurnEnv, play, play_by_turns
from m2flow.errors import EngineError, MissingExtra, NoReward, OptionError
from m2flow.testing.world import run_eager, run_planned


@dataclass
class Words:
    """A turn."""

    text: str
    is_cut: bool = False
    num_tokens: int = 1


@dataclass
class Voice:
    """A conversation in which a function answers."""

    answer: Callable[[str], str | Words]
    name: str = "main"
    heard: list[str] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.name)

    async def say(self, content: str, *, max_tokens: int | None = None) -> Words:
        self.heard.append(content)
        self.limits.append(max_tokens)
        await asyncio.sleep(0)
        said = self.answer(content)
        return said if isinstance(said, Words) else Words(said)


class Count(Env):
    """Count on from the seed, three times; 1 for each right number."""

    def __init__(self, meet: threading.Barrier | None = None) -> None:
        self._meet, self._next, self._left = meet, 0, 0

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> str:
        self._next, self._left = seed + int(str((row or {}).get("more", 0))) + 1, 3
        return f"{self._next - 1}="

    def step(self, action: Any) -> Step:
        if self._meet is not None:
            self._meet.wait(30)
        reward, self._next, self._left = float(action == str(self._next)), self._next + 1, self._left - 1
        return Step(f"{self._next - 1}=", reward, not self._left, False)


class Nim(TurnEnv):
    """Take one or two stones of some; who takes the last one wins."""

    players = ("first", "second")

    def __init__(self) -> None:
        self._stones, self._turn, self._rewards = 0, 0, dict.fromkeys(self.players, 0.0)

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> Turn | None:
        self._stones, self._turn, self._rewards = 3 + seed % 4, 0, dict.fromkeys(self.players, 0.0)
        return self._next()

    def _next(self) -> Turn:
        return Turn(self.players[self._turn % 2], f"{self._stones}=")

    def step(self, action: str) -> Turn | None:
        mover, other = self.players[self._turn % 2], self.players[(self._turn + 1) % 2]
        if action[:1] in ("1", "2") and int(action[0]) <= self._stones:
            self._stones -= int(action[0])
            winner, loser = mover, other
        else:
            self._stones, winner, loser = 0, other, mover
        self._turn += 1
        if self._stones:
            return self._next()
        self._rewards |= {winner: 1.0, loser: -1.0}
        return None

    def rewards(self) -> dict[str, float]:
        return dict(self._rewards)


class Sparse(Count):
    """Pays at its end alone, and only if told to."""

    def __init__(self, pays: bool) -> None:
        super().__init__()
        self._pays = pays

    def step(self, action: Any) -> Step:
        step = super().step(action)
        return step._replace(reward=0.5 if step.terminated and self._pays else None)


def ran(doing: Any) -> Any:
    return asyncio.run(doing)


def next_of(shown: str) -> str:
    return str(int(shown.rstrip("=")) + 1)


def test_a_model_acts_until_the_episode_ends_and_gets_the_sum_of_its_rewards() -> None:
    voice = Voice(next_of)
    assert ran(play(voice, Count(), seed=4, row={"more": 1})) == 3.0
    assert voice.heard == ["5=", "6=", "7="]
    assert ran(play(Voice(lambda shown: "6"), Count(), seed=4)) == 1.0
    assert ran(play(Voice(next_of), Count(), seed=4, max_steps=2)) == 2.0
    begun = [Voice(next_of, name) for name in ("one", "one", "other")]
    for each in begun:
        ran(play(each, Count()))
    assert begun[0].heard == begun[1].heard != begun[2].heard, "by default each episode has a seed of its own"


def test_what_a_limit_cut_off_is_an_action_only_where_the_limit_is_the_actions() -> None:
    voice = Voice(lambda shown: Words(next_of(shown), is_cut=True, num_tokens=2))
    assert ran(play(voice, Count(), seed=1)) == 0.0
    assert ran(play(voice, Count(), seed=1, max_tokens=2)) == 3.0
    assert voice.limits[-1] == 2
    assert ran(play(voice, Count(), seed=1, max_tokens=3)) == 0.0, "the conversation's limit was nearer"


def test_an_episode_that_was_left_before_any_step_had_a_reward_is_not_a_reward_of_0() -> None:
    assert ran(play(Voice(next_of), Sparse(pays=True), seed=1)) == 0.5
    for env, bound in ((Sparse(pays=False), None), (Sparse(pays=True), 2)):
        with pytest.raises(NoReward, match=f"Sparse gave no reward in the episode's {bound or 3} steps"):
            ran(play(Voice(next_of), env, seed=1, max_steps=bound))


@agent
async def unpaid(chat: Chat, row: Sample) -> float:
    return await play(chat, Sparse(pays=row.prompt == "0"), seed=row.id.index, max_tokens=2)


@flow
def some_unpaid() -> None:
    policy = Policy("fake", init="random")
    prompts = Dataset([{"prompt": str(i)} for i in range(4)], shuffle=False)
    for _ in steps(1):
        episodes = policy.rollout(unpaid, prompts.take(2), n=4, max_tokens=32, max_turns=8)
        policy.update(episodes, episodes.reward)


def test_episodes_without_a_reward_are_counted_by_their_cause_and_are_trained_by_nobody() -> None:
    found = run_eager(some_unpaid, {}, SPLIT)
    assert not found.error
    counted = {name: value for _, name, value in found.logs if name.startswith("episodes/")}
    assert counted["episodes/no_reward"] == counted["episodes/failed"] == 4
    assert run_planned(some_unpaid, {}, SPLIT, order_seed=1) == found


def test_a_slow_environment_delays_no_other_episode() -> None:
    """Each step ends only when the other episode is in one, too."""

    async def both() -> list[float]:
        meet = threading.Barrier(2)
        return await asyncio.gather(*(play(Voice(next_of), Count(meet), seed=seed) for seed in (1, 2)))

    assert ran(both()) == [3.0, 3.0]


def test_many_slow_environments_delay_no_other_episode() -> None:
    """More than asyncio has threads for."""
    loop, meet = EventLoop(), threading.Barrier(40)

    async def all_of_them() -> int:
        return len(await asyncio.gather(*(asyncio.to_thread(meet.wait, 30) for _ in range(40))))

    ends: Future[int] = Future()
    loop.call(lambda: asyncio.ensure_future(all_of_them()).add_done_callback(lambda task: ends.set_result(task.result())))
    try:
        assert ends.result(40) == 40
    finally:
        meet.abort()
        loop.close()


def test_players_act_in_turn_and_each_conversation_gets_what_its_players_earned() -> None:
    best = lambda shown: str(int(shown[0]) % 3 or 1)  # noqa: E731
    one, two = Voice(best, "black"), Voice(lambda shown: "1", "white")
    assert ran(play_by_turns({"first": one, "second": two}, Nim(), seed=1)) == {"black": 1.0, "white": -1.0}
    assert (one.heard, two.heard) == (["4=", "2="], ["3="])
    both = Voice(best)
    assert ran(play_by_turns({"first": both, "second": both}, Nim(), seed=1)) == {"main": 0.0}
    with pytest.raises(OptionError, match="nobody plays second of first, second"):
        ran(play_by_turns({"first": one}, Nim()))


def test_what_is_no_text_is_refused() -> None:
    class Numbers(Count):
        def reset(self, seed: int, row: Mapping[str, object] | None = None) -> Any:
            return np.zeros(3)

    with pytest.raises(EngineError, match="Numbers shows ndarray, and a model reads texts"):
        ran(play(Voice(next_of), Numbers(), seed=1))


@agent
async def duel(chat: Chat, row: Sample) -> dict[str, float]:
    players = {name: chat.conversation(name) for name in Nim.players}
    return await play_by_turns(players, Nim(), seed=row.id.index)


@agent
async def counting(chat: Chat, row: Sample) -> float:
    return await play(chat, Count(), seed=row.id.index, max_tokens=2)


@flow
def matches() -> None:
    policy = Policy("fake", init="random")
    prompts = Dataset([{"prompt": str(i)} for i in range(4)], shuffle=False)
    for _ in steps(2):
        games = policy.rollout(duel, prompts.take(2), n=3, max_tokens=32, max_turns=8, max_conversations=2)
        policy.update(games, games.reward, advantages=by_conversation())
        counted = policy.rollout(counting, prompts.take(2), n=3, max_tokens=32, max_turns=8)
        policy.update(counted, counted.reward)


@pytest.mark.parametrize("order_seed", range(4))
def test_what_is_played_is_the_same_under_every_schedule(order_seed: int) -> None:
    eager = run_eager(matches, {}, SPLIT)
    assert not eager.error
    assert run_planned(matches, {}, SPLIT, order_seed=order_seed, num_losses=order_seed % 2) == eager


# ---- PettingZoo


class Race:
    """An environment with PettingZoo's AEC interface: two agents walk 1 or 2 steps in turn; who is first at 4 gets 1, the other -1."""

    possible_agents = ("a", "b")

    def __init__(self, goal: int = 4) -> None:
        self._goal, self.closed = goal, False

    def reset(self, seed: int, options: Mapping[str, object] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self._at = {"a": seed % 2, "b": 0}
        self._earned = dict.fromkeys(self.agents, 0.0)
        self._over = False
        self.agent_selection = "a"

    def last(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        at = self._at[self.agent_selection]
        mask = np.array([0, 1, int(at < self._goal - 1)])
        seen = {"observation": np.array([[at, self._goal]]), "action_mask": mask}
        return seen, self._earned[self.agent_selection], self._over, False, {}

    def step(self, action: int | None) -> None:
        me = self.agent_selection
        if self._over:
            assert action is None, "who is out takes an empty turn"
            self.agents.remove(me)
        else:
            self._earned[me] = 0.0
            self._at[me] += action or 0
            if self._at[me] >= self._goal:
                self._over = True
                self._earned = {name: 1.0 if name == me else -1.0 for name in self.agents}
        self.agent_selection = next((name for name in self.agents if name != me), me)

    def close(self) -> None:
        self.closed = True


def test_the_agents_of_pettingzoo_see_numbers_and_legal_actions_and_are_paid_when_they_are_out() -> None:
    env = PettingZoo(Race, goal=3)
    fast, slow = Voice(lambda shown: "I take 2!" if "2" in shown.splitlines()[1] else "1", "a"), Voice(lambda shown: "1", "b")
    assert ran(play_by_turns({"a": fast, "b": slow}, env, seed=0)) == {"a": 1.0, "b": -1.0}
    assert fast.heard == ["0 3\nLegal actions: 1 2", "2 3\nLegal actions: 1"]
    assert slow.heard == ["0 3\nLegal actions: 1 2"]


@pytest.mark.parametrize("said", ["2", "none", "-1", "17"])
def test_an_action_that_is_none_or_not_legal_ends_the_episode_with_its_players_loss(said: str) -> None:
    env = PettingZoo(Race, goal=1, illegal_reward=-0.5)
    assert ran(play_by_turns({"a": Voice(lambda shown: said, "a"), "b": Voice(lambda shown: "1", "b")}, env, seed=0)) == {
        "a": -0.5,
        "b": 0.0,
    }


class Paying(Race):
    """Pays for each step at once, to be had at the next turn, as PettingZoo's own do."""

    def reset(self, seed: int, options: Mapping[str, object] | None = None) -> None:
        super().reset(seed, options)
        self._cumulative_rewards = self._earned

    def step(self, action: int | None) -> None:
        me = self.agent_selection
        super().step(action)
        self._earned[me] += float(action or 0)
        self._cumulative_rewards = self._earned


def test_what_a_player_earned_in_its_last_turn_counts_where_the_episode_is_left_before_its_next() -> None:
    voices = {name: Voice(lambda shown: "1", name) for name in ("a", "b")}
    for num_steps, expected in ((1, {"a": 1.0, "b": 0.0}), (2, {"a": 1.0, "b": 1.0}), (3, {"a": 2.0, "b": 1.0})):
        assert ran(play_by_turns(voices, PettingZoo(Paying, goal=9), seed=0, max_steps=num_steps)) == expected


def test_what_pettingzoo_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pettingzoo", None)
        with pytest.raises(MissingExtra, match=r"pettingzoo 1\.27"):
            PettingZoo("classic/tictactoe-v3")
    pytest.importorskip("pettingzoo")
    with pytest.raises(OptionError, match="no environment 'nothing_v1'"):
        PettingZoo("nothing_v1")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(MissingExtra, match="needs more than PettingZoo"):
        PettingZoo("classic/connect_four-v3")


def test_tictactoe_of_pettingzoo_is_played_to_its_end() -> None:
    pytest.importorskip("pettingzoo")
    env = PettingZoo("classic/tictactoe-v3")

    def lowest(shown: str) -> str:
        return shown.splitlines()[-1].split()[2]

    def highest(shown: str) -> str:
        return shown.split()[-1]

    found = ran(play_by_turns({"player_1": Voice(lowest, "x"), "player_2": Voice(highest, "o")}, env, seed=1))
    assert found == {"x": 1.0, "o": -1.0}, "fields 0, 1 and 2 are a line, and its last is taken before 6, 7 and 8 are one"
    env.close()


# ---- OpenEnv


class Server:
    """Speaks an OpenEnv server's protocol for `Count`, with so many sessions at once."""

    def __init__(self, websockets: ModuleType, num_sessions: int, breaks: str = "") -> None:
        self._websockets, self._num_sessions, self._breaks = websockets, num_sessions, breaks
        self.num_open = self.most_open = self.num_refused = 0

    async def __aenter__(self) -> Server:
        from websockets.asyncio.server import serve

        self._server = await serve(self._session, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _session(self, socket: Any) -> None:
        assert socket.request.path == "/ws"
        if self.num_open >= self._num_sessions:
            self.num_refused += 1
            await socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        env = Count()
        try:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "reset":
                    seen = {"observation": {"text": env.reset(message["data"].pop("seed"), message["data"])}, "reward": None, "done": False}
                elif self._breaks == "error":
                    await socket.send(json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "a fault"}}))
                    continue
                elif self._breaks == "away":
                    return
                elif self._breaks == "silent":
                    await socket.wait_closed()
                    return
                else:
                    step = env.step(message["data"]["number"])
                    pays = self._breaks != "pays nothing" and (self._breaks != "pays at the end" or step.terminated)
                    reward = step.reward if pays else None
                    seen = {"observation": {"text": step.observation}, "reward": reward, "done": step.terminated}
                await socket.send(json.dumps({"type": "observation", "data": seen}))
        finally:
            self.num_open -= 1


def session(url: str, **options: Any) -> OpenEnv:
    return OpenEnv(url, act=lambda text: {"number": text}, show=lambda seen: str(seen["text"]), **options)


async def _counted(url: str, seed: int, **options: Any) -> float:
    async with session(url, **options) as env:
        return await play(Voice(next_of), env, seed=seed, row={"more": 2})


def test_episodes_wait_for_a_session_of_an_openenv_server_and_leave_none() -> None:
    websockets = pytest.importorskip("websockets")

    async def many() -> tuple[list[float], Server]:
        async with Server(websockets, 2) as server:
            found = await asyncio.gather(*(_counted(server.url, seed) for seed in range(7)))
            while server.num_open:
                await asyncio.sleep(0.01)
            return found, server

    found, server = ran(many())
    assert found == [3.0] * 7
    assert server.most_open == 2
    assert server.num_refused > 0


@pytest.mark.parametrize(
    ("breaks", "message"),
    [("error", "to step with an error, EXECUTION_ERROR: a fault"), ("away", "went away"), ("silent", "took longer than 0.2 s")],
)
def test_a_server_that_breaks_fails_the_episode_and_is_no_reward(breaks: str, message: str) -> None:
    websockets = pytest.importorskip("websockets")

    async def one() -> float:
        async with Server(websockets, 1, breaks) as server:
            return await _counted(server.url, 1, **({"timeout_s": 0.2} if breaks == "silent" else {}))

    with pytest.raises(EngineError, match=message):
        ran(one())


def test_a_step_without_a_reward_counts_as_nothing_and_an_episode_without_any_fails_by_its_own_cause() -> None:
    websockets = pytest.importorskip("websockets")

    async def one(breaks: str) -> float:
        async with Server(websockets, 1, breaks) as server:
            return await _counted(server.url, 1)

    assert ran(one("pays at the end")) == 1.0
    with pytest.raises(NoReward, match="OpenEnv gave no reward in the episode's 3 steps"):
        ran(one("pays nothing"))


def test_a_session_that_went_away_is_begun_anew_by_the_next_reset() -> None:
    websockets = pytest.importorskip("websockets")

    async def twice() -> str:
        async with Server(websockets, 1, "away") as server, session(server.url) as env:
            await env.reset(1)
            with pytest.raises(EngineError, match="went away"):
                await env.step("2")
            with pytest.raises(EngineError, match="no episode was begun"):
                await env.step("2")
            return await env.reset(4)

    assert ran(twice()) == "4="


def test_a_server_that_is_full_or_not_there_is_said() -> None:
    websockets = pytest.importorskip("websockets")

    async def full() -> float:
        async with Server(websockets, 0) as server:
            return await _counted(server.url, 1, patience_s=0.2)

    with pytest.raises(EngineError, match=r"no session free for 0\.2 s"):
        ran(full())
    with pytest.raises(EngineError, match="can't be reached"):
        ran(_counted("http://127.0.0.1:1", 1))
    with pytest.raises(OptionError, match="no address"):
        session("localhost:8000")
