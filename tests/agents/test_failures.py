"""Whose fault an episode's failure is, and what becomes of it: never a silent 0."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from one_thread import SteppedRun
from played_episodes import SPEC, host, played, start_of
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, EpisodeFailed, Policy, Sample, Sandbox, ToolCall, agent, flow, log, sandbox, steps, tool
from m2flow.agents.episodes import EpisodeStart
from m2flow.agents.tools import EventLoop, Outcome, Tool
from m2flow.engines.contract import Generated, Sums
from m2flow.errors import EngineError, MissingExtra, MissingTier, OpError, OptionError, TraceError
from m2flow.micro.protocol.update_semantics import UpdateTally
from m2flow.observe.metrics import read_metrics
from m2flow.observe.spans import Recorder
from m2flow.recipe import AdamW
from m2flow.recipe import Episodes as Bounds
from m2flow.samples import Batch, Finish, Ragged, Segment
from m2flow.sandbox import Tier
from m2flow.spec import RunSettings
from m2flow.testing.random_programs import difference_of
from m2flow.testing.world import run_eager, run_planned
from m2flow.viewer.health import alerts_of

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


@tool(replay="pure", timeout_s=0.02)
async def sleepy() -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return ""


@tool(replay="pure", on_error="fail")
def fatal() -> str:
    """Raise."""
    raise ValueError("no")


@tool(replay="pure")
def gone() -> str:
    """Find that the sandbox is gone."""
    raise EngineError("the sandbox is gone")


@tool(replay="pure", timeout_s=0.05)
def blocks() -> str:
    """Block a thread."""
    time.sleep(0.4)
    return ""


def episode(loop: object, body: object, bounds: Bounds | None = None) -> Generated:
    """Play an agent of this body."""
    made = agent(body)  # type: ignore[call-overload]
    episodes = host(loop)  # type: ignore[arg-type]
    start = start_of(0, made)
    episodes.begin([EpisodeStart(start.request, start.agent, start.row, bounds or Bounds(8))])
    (found,) = played(episodes).values()
    return found


@tool(replay="pure")
def quits() -> str:
    """Do as code of a model that ends the program."""
    raise SystemExit("enough")


@tool(replay="pure", timeout_s=None)
def takes_the_first_of_none() -> str:
    """Raise what no future can give on."""
    return next(iter(()))


@tool(replay="pure")
async def gives_up() -> str:
    """Wait for what is cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(30))
    task.cancel()
    await task
    return ""


@tool(replay="pure")
def ends_as_a_generator_on_a_thread() -> str:
    """Raise what closes a generator."""
    raise GeneratorExit("enough")


@tool(replay="pure")
async def closes_itself() -> str:
    """The same, after a while."""
    await asyncio.sleep(0.001)
    raise GeneratorExit("enough")


@tool(replay="pure", on_error="fail")
async def interrupts() -> str:
    """Raise what is no `Exception` either."""

    class Interrupt(BaseException):
        pass

    raise Interrupt("enough")


class Speechless(Exception):
    """An error that can't say what it is, as some classes of libraries."""

    def __str__(self) -> str:
        raise ValueError("no words")


UNTOLD = {
    "a number too long to be written": lambda: 10**6000,
    "too deep": lambda: functools.reduce(lambda inner, _: [inner], range(100_000), 0),
    "an object without a text": Speechless,
    "half of a character": lambda: "a\ud800b",
}


@tool(replay="pure")
async def untold(what: str) -> object:
    """Give what can't be written."""
    return UNTOLD[what]()


@tool(replay="pure")
async def speechless() -> str:
    """Raise an error without a text."""
    raise Speechless


@tool(replay="pure")
async def quotes_half_a_character() -> str:
    """Raise an error whose text no tokenizer takes."""
    raise ValueError("a\ud800b")


def test_what_a_tool_gives_or_raises_that_is_no_text_is_its_error_and_not_the_agents(loop):
    said: list[Outcome] = []

    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[untold, speechless, quotes_half_a_character], max_tokens=3)
        calls = [ToolCall("untold", {"what": what}) for what in UNTOLD]
        said.extend(await chat.run([*calls, ToolCall("speechless", {}), ToolCall("quotes_half_a_character", {})]))
        return 1.0

    found = episode(loop, body)
    assert found.columns["failure"] == ""
    assert all(outcome.is_error and outcome.text.startswith("Error: ") for outcome in said)
    assert [outcome.text.split(":")[1].strip() for outcome in said] == [
        "ValueError",
        "RecursionError",
        "ValueError",
        "ValueError",
        "Speechless",
        "ValueError",
    ]
    assert said[-1].text == "Error: ValueError: a\\ud800b"


def test_a_tools_result_is_a_text_of_its_value_alone_or_an_error(loop):
    plain = {"a set": {"kinds": {"b", "a"}}, "a frozen set": frozenset(["b", None]), "bytes": b"x", "an enum": Outcome("x")}
    placed = {"an object": object(), "a part": [object()], "a generator": (one for one in ()), "a function": lambda: None}
    placed["an error"] = KeyError(object())

    @tool(replay="pure")
    def gives(what: str) -> object:
        """Give it, or raise it."""
        result = {**plain, **placed}[what]
        if isinstance(result, Exception):
            raise result
        return result

    said: dict[str, Outcome] = {}

    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[gives], max_tokens=3)
        calls = [ToolCall("gives", {"what": what}) for what in (*plain, *placed)]
        said.update(zip((*plain, *placed), await chat.run(calls), strict=True))
        return 1.0

    assert episode(loop, body).columns["failure"] == ""
    assert [said[what].text for what in plain] == ['{"kinds": ["a", "b"]}', '["b", null]', "b'x'", '["x", false]']
    assert all(said[what].is_error and ("return a text" in said[what].text) == (what != "an error") for what in placed)
    assert all("0x" not in said[what].text for what in placed), "the model would read something else in each process"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("ends_as_a_generator_on_a_thread", ""),
        ("closes_itself", ""),
        ("interrupts", "tool_failed"),
        ("sleepy", ""),
        ("fatal", "tool_failed"),
        ("gone", "tool_failed"),
        ("blocks", ""),
        ("nothing", ""),
        ("quits", ""),
        ("gives_up", ""),
        ("takes_the_first_of_none", ""),
    ],
)
def test_a_tools_error_is_a_text_for_the_model_or_the_end_of_the_episode_as_declared(loop, name, how):
    said: list[str] = []

    async def body(chat: Chat, row: Sample) -> float:
        tools = [sleepy, fatal, gone, blocks, quits, gives_up, takes_the_first_of_none]
        await chat.say("?", tools=[*tools, ends_as_a_generator_on_a_thread, closes_itself, interrupts], max_tokens=3)
        said.extend(one.text for one in await chat.run([ToolCall(name, {})]))
        return 1.0

    found = episode(loop, body)
    assert found.columns["failure"] == how
    assert math.isnan(found.columns["reward"]) if how else found.columns["reward"] == 1.0
    assert all(text.startswith("Error: ") for text in said)
    assert bool(said) is not bool(how)


def test_a_tool_s_call_that_is_closed_where_it_waits_is_no_error_of_the_tool():
    async def closes() -> None:
        call = sleepy.run({"text": ""}, {}, ThreadPoolExecutor(1))  # type: ignore[attr-defined]
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.001)
        call.close()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(closes())


@tool(replay="pure", timeout_s=0.02)
def stuck(seconds: float) -> str:
    """Come to no end in time."""
    time.sleep(seconds)
    return ""


@tool(replay="pure", timeout_s=2)
def quick() -> str:
    """Answer at once."""
    return "here"


def test_plain_tools_that_hang_take_no_place_from_others_and_too_many_are_a_failure(monkeypatch):
    monkeypatch.setattr("m2flow.agents.tools._MOST_THREADS", 2)
    monkeypatch.setattr("m2flow.agents.tools._MOST_GIVEN_UP", 4, raising=False)
    said: list[list[str]] = []

    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[stuck, quick], max_tokens=3)
        calls = [ToolCall("stuck", {"seconds": 8.0})] * 3
        said.append([one.text for one in [*await chat.run(calls), *await chat.run([ToolCall("quick", {})])]])
        return 1.0

    with contextlib.closing(EventLoop()) as made:
        failures = [episode(made, body).columns["failure"] for _ in range(2)]
    assert failures == ["", "tool_failed"]
    assert said == [["Error: timed out after 0.02 s"] * 3 + ["here"]]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("tool")), "a program would not end before them"


def test_the_time_limit_of_a_plain_tool_begins_when_it_does(monkeypatch):
    monkeypatch.setattr("m2flow.agents.tools._MOST_THREADS", 1)
    said: list[str] = []

    @tool(replay="pure", timeout_s=0.5)
    def slow() -> str:
        """Take a while."""
        time.sleep(0.2)
        return "done"

    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[slow], max_tokens=3)
        said.extend(one.text for one in await chat.run([ToolCall("slow", {})] * 5))
        return 1.0

    with contextlib.closing(EventLoop()) as made:
        episode(made, body)
    assert said == ["done"] * 5


def test_parallel_calls_of_which_one_fails_leave_none_running(loop):
    ended: list[str] = []

    @tool(replay="pure")
    async def long() -> str:
        """Take long."""
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("cancelled")
        return ""

    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[long, fatal], max_tokens=3)
        await chat.run([ToolCall("long", {}), ToolCall("fatal", {})])
        return 1.0

    assert episode(loop, body).columns["failure"] == "tool_failed"
    assert ended == ["cancelled"]


def test_an_agent_that_blocks_the_event_loop_for_long_ends_the_run_and_its_line_is_named(loop, monkeypatch):
    monkeypatch.setattr("m2flow.agents.tools._MOST_BLOCKED_S", 0.3)

    async def waits(chat: Chat, row: Sample) -> float:
        await asyncio.sleep(0.6)  # That takes as long, and blocks nobody.
        return 1.0

    async def blocks(chat: Chat, row: Sample) -> float:
        time.sleep(1.5)
        return 1.0

    assert episode(loop, waits).columns["reward"] == 1.0
    line = blocks.__code__.co_firstlineno + 1
    with pytest.raises(OpError, match=rf"blocked the event loop of all episodes for 0.3 s: .*test_failures.py:{line}"):
        episode(loop, blocks)


async def hangs(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    await asyncio.sleep(30)
    return 1.0


async def raises(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    raise KeyError("x")


async def returns_nan(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    return math.nan


async def asks_on(chat: Chat, row: Sample) -> float:
    for _ in range(9):
        await chat.say("?", max_tokens=3)
    return 1.0


async def exits(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    raise SystemExit(2)


async def exits_beside(chat: Chat, row: Sample) -> float:
    async def other() -> None:
        raise SystemExit(2)

    await chat.say("?", max_tokens=3)
    await asyncio.gather(other(), asyncio.sleep(0.01))
    return 1.0


async def awaits_what_is_cancelled(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    task = asyncio.ensure_future(asyncio.sleep(30))
    task.cancel()
    await task
    return 1.0


async def cancels_itself(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(30)
    return 1.0


async def ends_as_a_generator(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    raise GeneratorExit


async def says_nothing(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    raise Speechless


@pytest.mark.parametrize(
    ("body", "bounds", "how"),
    [
        (says_nothing, Bounds(8), "raised"),
        (exits, Bounds(8), "raised"),
        (exits_beside, Bounds(8), "raised"),
        (awaits_what_is_cancelled, Bounds(8), "raised"),
        (cancels_itself, Bounds(8), "raised"),
        (ends_as_a_generator, Bounds(8), "raised"),
        (hangs, Bounds(8, timeout_s=0.05), "timed_out"),
        (raises, Bounds(8), "raised"),
        (returns_nan, Bounds(8), "invalid"),
        (asks_on, Bounds(3), "too_many_turns"),
    ],
)
def test_a_failed_episode_says_how_and_has_no_reward(loop, body, bounds, how):
    found = episode(loop, body, bounds)
    assert found.columns["failure"] == how
    assert math.isnan(found.columns["reward"])
    assert found.num_sampled > 0, "its tokens are kept for the record"
    assert found.columns["episode"]["error"]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (10**400, "the agent returned 1000"),
        ({"reward": 1.0, "style": None}, "the agent returned None for 'style'"),
        ({"reward": 1.0, "style": "0.5"}, "the agent returned '0.5' for 'style'"),
        ({"reward": 1.0, "style": math.inf}, "the agent returned inf for 'style'"),
        ({"main": "1.0"}, "the agent returned '1.0' for 'main'"),
        (b"1.0", "the agent returned b'1.0'"),
        ({}, "the agent returned {}"),
    ],
    ids=["too large", "part None", "part text", "part inf", "conversation", "bytes", "nothing"],
)
def test_a_reward_or_a_part_of_one_that_is_no_finite_number_is_named(loop, returned, says):
    async def body(chat: Chat, row: Sample) -> object:
        await chat.say("?", max_tokens=3)
        return returned

    found = episode(loop, body)
    assert found.columns["failure"] == "invalid"
    assert says in found.columns["episode"]["error"]
    assert "finite number" in found.columns["episode"]["error"]


def named_look(what: str) -> Tool:
    @tool(name="look")
    def look() -> str:
        """Look."""
        return what

    return look


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (None, {}, "chat.say(None): it takes a text, or a list of messages"),
        (12, {}, "chat.say(12): it takes a text, or a list of messages"),
        (["Hello?"], {}, "chat.say(['Hello?']): it takes a text, or a list of messages"),
        ({"role": "user", "content": "Hello?"}, {}, "it takes a text, or a list of messages"),
        ([{"content": "Hello?"}], {}, "has no role: {'content': 'Hello?'}. Messages are like"),
        ("?", {"tools": [named_look("near"), named_look("far")]}, "two of the tools are named look, and a call has no more than the name"),
        ("?", {"max_tokens": "8"}, "max_tokens is '8'; it must be a whole number"),
        ("?", {"max_tokens": 0}, "max_tokens=0 leaves no room for a response to the first prompt"),
        ("?", {"max_tokens": -1}, "max_tokens=-1 leaves no room for a response to the first prompt"),
    ],
)
def test_what_can_t_be_said_fails_the_episode_with_what_it_takes_instead(loop, content, options, says):
    async def body(chat: Chat, row: Sample) -> float:
        await chat.say(content, **options)
        return 1.0

    found = episode(loop, body)
    assert says in found.columns["episode"]["error"]


async def goes_on_when_its_time_is_over(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return 1.0


def test_what_an_agent_returns_when_its_time_is_over_is_no_reward(loop):
    found = episode(loop, goes_on_when_its_time_is_over, Bounds(8, timeout_s=0.02))
    assert found.columns["failure"] == "timed_out"
    assert math.isnan(found.columns["reward"])


RELEASED = threading.Event()


async def retries() -> None:
    """Try again, whatever comes, until the test is over."""
    while not RELEASED.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@tool(replay="pure", timeout_s=0.02)
async def stubborn() -> str:
    """Come to no end."""
    await retries()
    return ""


async def does_not_end(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    await retries()
    return 1.0


async def waits_for_what_does_not_end(chat: Chat, row: Sample) -> float:
    await chat.say("?", tools=[stubborn], max_tokens=3)
    await chat.run([ToolCall("stubborn", {})])
    return 1.0


@pytest.mark.parametrize(
    ("body", "bounds", "how", "says"),
    [
        (does_not_end, Bounds(8, timeout_s=0.02), "timed_out", "it took longer than 0.02 s, and did not end"),
        (waits_for_what_does_not_end, Bounds(8), "tool_failed", "the tool stubborn took longer than 0.02 s, and did not end"),
    ],
)
def test_what_does_not_end_when_its_time_is_over_is_given_up(loop, body, bounds, how, says, monkeypatch):
    monkeypatch.setattr("m2flow.agents.episodes._STUCK_S", 0.02)
    RELEASED.clear()
    try:
        found = episode(loop, body, bounds)
    finally:
        RELEASED.set()
    assert found.columns["failure"] == how
    assert says in found.columns["episode"]["error"]


def test_the_last_turn_has_no_calls_so_a_loop_over_them_ends(loop):
    def always(text: str) -> tuple[str, list[ToolCall]]:
        return text, [ToolCall("blocks", {"x": 1})]

    @agent(tool_calls=always)
    async def looping(chat: Chat, row: Sample) -> float:
        turn = await chat.say("?", tools=[blocks], max_tokens=90)
        while turn.calls:
            turn = await chat.reply(turn.calls)
        return float(chat.num_turns)

    episodes = host(loop)
    start = start_of(4, looping)
    episodes.begin([EpisodeStart(start.request, start.agent, start.row, Bounds(3))])
    (found,) = played(episodes).values()
    assert found.columns["failure"] == ""
    assert found.columns["reward"] <= 3


def test_what_does_not_fit_is_not_appended_and_the_turn_is_cut(loop):
    turns = []

    async def body(chat: Chat, row: Sample) -> float:
        turns.append(await chat.say("?", max_tokens=20))
        turns.append(await chat.say("x" * 500))
        turns.append(await chat.say("ok", max_tokens=2))
        return 1.0

    found = episode(loop, body)
    assert [turn.num_tokens > 0 for turn in turns] == [True, False, True]
    assert turns[1].is_cut
    assert len(found.tokens) <= 120
    assert b"xxx" not in bytes(max(token - 3, 0) for token in found.tokens)


def test_the_mask_of_an_episode_is_what_the_model_said_to_the_token(loop):
    texts = []

    async def body(chat: Chat, row: Sample) -> float:
        for text in ("one", "two", "three"):
            texts.append((await chat.say(text, max_tokens=7)).num_tokens)
        return 1.0

    found = episode(loop, body)
    said = [count for kind, count in found.segments if kind is Segment.GENERATED]
    assert said == texts
    mask = np.concatenate([np.full(count, kind is Segment.GENERATED) for kind, count in found.segments])
    assert np.array_equal(mask, found.versions >= 0)
    assert np.array_equal(mask, found.logprobs < 0) or (found.logprobs[~mask] == 0).all()
    assert len(mask) == len(found.tokens)
    assert found.finish in (Finish.STOP, Finish.LENGTH)


def test_a_resource_of_the_episode_is_opened_once_shared_by_its_tools_and_closed(loop):
    events: list[str] = []

    class Box:
        async def __aenter__(self) -> Box:
            events.append("opened")
            self.held = 0
            return self

        async def __aexit__(self, *error: object) -> None:
            events.append("closed")

    @tool(replay="pure")
    async def count(box: Box, by: int = 1) -> int:
        """Count."""
        box.held += by
        return box.held

    assert list(count.description["function"]["parameters"]["properties"]) == ["by"]

    async def body(chat: Chat, row: Sample, box: Box) -> float:
        await chat.say("?", tools=[count], max_tokens=3)
        await chat.run([ToolCall("count", {}), ToolCall("count", {"by": 2})])
        return float(box.held)

    assert episode(loop, body).columns["reward"] == 3.0
    assert events == ["opened", "closed"]


class Process:
    """A sandbox without containment."""

    tier: Tier = "fork"

    async def __aenter__(self) -> Sandbox:
        self._box = Sandbox(self.tier)
        return await self._box.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._box.__aexit__(*error)


class Calculator(Process):
    """One of a tier that needs a package."""

    tier = "monty"


@tool(replay="pure")
async def calculate(box: Calculator) -> str:
    """Compute."""
    return "3"


@tool(replay="pure")
async def compute() -> str:
    """Compute in a sandbox of its own."""
    async with Sandbox("monty"):
        return "3"


@tool(replay="pure")
async def boxed(box: Sandbox) -> str:
    """Compute in a box."""
    return "3"


async def is_given_a_calculator(chat: Chat, row: Sample, box: Calculator) -> float:
    return 1.0


async def opens_a_calculator(chat: Chat, row: Sample) -> float:
    async with Sandbox("monty"):
        return 1.0


async def has_a_process(chat: Chat, row: Sample, box: Process) -> float:
    return 1.0


async def has_a_box(chat: Chat, row: Sample, box: Sandbox) -> float:
    return 1.0


def calls(one: Tool) -> object:
    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[one], max_tokens=3)
        with contextlib.suppress(EpisodeFailed):
            await chat.run([ToolCall(one.name, {})])
        return 0.0

    return body


@pytest.mark.parametrize("body", [calls(calculate), calls(compute), is_given_a_calculator, opens_a_calculator])
def test_a_package_that_a_sandbox_needs_and_is_not_there_ends_the_run_whoever_opens_it(body, loop, monkeypatch):
    monkeypatch.setattr(sandbox, "_monty_made", None)
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(MissingExtra, match=r"pydantic-monty[\s\S]*pip install 'm2flow\[monty\]'"):
        episode(loop, body)


def refusing(path: Path, line: str, why: str) -> Path:
    """A program for the interpreter of sandboxes that fails in this line."""
    text = Path(sandbox.PROGRAM).read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, f"raise OSError(errno.{why}, 'a place')"))
    return path


@pytest.mark.parametrize("body", [calls(boxed), has_a_box])
def test_a_machine_that_can_t_give_a_tier_ends_the_run(body, loop, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "PROGRAM", str(refusing(tmp_path / "box.py", '_build_root(how["binds"])', "EPERM")))
    with pytest.raises(MissingTier, match=r"can't box the code.*a place: Operation not permitted"):
        episode(loop, body)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (has_a_box, '_build_root(how["binds"])'),
        (has_a_process, 'group = groups.make(wanted["memory"], wanted["processes"]) if groups else None'),
    ],
)
def test_a_sandbox_that_can_t_begin_just_now_is_the_failure_of_its_episode(body, line, loop, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "PROGRAM", str(refusing(tmp_path / "box.py", line, "ENOMEM")))
    found = episode(loop, body)
    assert found.columns["failure"] == "tool_failed"
    assert "Cannot allocate memory" in found.columns["episode"]["error"]


@agent
async def sometimes(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), max_tokens=5)
    if row.prompt == "1?" and chat.rng.random() < 0.6:
        raise EpisodeFailed("tool_failed", "the machine is gone")
    return float(len(turn.text)) + 1.0


@flow
def training(failed: str = "mask") -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(4)])
    episodes = policy.rollout(sometimes, rows.take(4), n=4, max_tokens=20, failed=failed)
    policy.update(episodes, episodes.reward)


def logs_of(answer: object) -> dict[str, float]:
    return {name: value for _, name, value in answer.logs}  # type: ignore[attr-defined]


def test_a_failed_episode_is_masked_raised_or_zero_and_counted_by_its_cause():
    masked, zero = run_eager(training, {}, SPEC), run_eager(training, {"failed": "zero"}, SPEC)
    num_failed = logs_of(masked)["episodes/failed"]
    assert num_failed == logs_of(masked)["episodes/tool_failed"] > 0
    assert len({packed for _, _, packed in masked.consumed}) == 16 - num_failed
    assert all(reward > 0 for reward in masked.rewards.values())
    assert len({packed for _, _, packed in zero.consumed}) == 16
    assert sum(reward == 0 for reward in zero.rewards.values()) == num_failed
    eager, planned = run_eager(training, {"failed": "raise"}, SPEC), run_planned(training, {"failed": "raise"}, SPEC)
    assert eager.error == planned.error
    assert "failed (tool_failed): the machine is gone" in eager.error


@agent
async def bold(chat: Chat, row: Sample) -> float:
    return float((await chat.say(f"{row.prompt} {chat.rng.random()}", max_tokens=4)).text == chat.messages())  # type: ignore[operator]


@flow
def failing(who: str = "bold") -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(4)])
    for _ in steps(1):
        episodes = policy.rollout({"bold": bold, "sometimes": sometimes}[who], rows.take(4), n=4, max_tokens=20)
        policy.update(episodes, episodes.reward)


@pytest.mark.filterwarnings("ignore:step 0.* skipped an optimiser step")
@pytest.mark.parametrize(
    ("who", "says"), [("bold", "16 of the last 16; raised: TypeError: 'list' object"), ("sometimes", "; tool_failed: the ")]
)
def test_a_run_whose_episodes_fail_says_how_they_do(who, says, tmp_path):
    run = SteppedRun(failing, {"who": who}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    (found,) = [alert for alert in alerts_of(run.run_dir, None) if alert.rule == "failed"]
    assert says in found.says


@agent
async def waits_until_it_is_counted(chat: Chat, row: Sample) -> float:
    await chat.say("?", max_tokens=3)
    for _ in range(300):
        if 2 in sys.modules["m2flow.observe.spans"].counted:  # type: ignore[attr-defined]
            return 1.0
        await asyncio.sleep(0.01)
    return 0.0


@flow
def waiting() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    log(found=policy.rollout(waits_until_it_is_counted, Dataset([{"prompt": "?"}]).take(1), n=2, max_tokens=20).reward.mean())


def test_episodes_without_a_turn_or_a_tool_under_way_are_counted_while_they_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("m2flow.agents.episodes._SILENT_S", 0.1)
    monkeypatch.setattr("m2flow.micro.worker.worker._COUNT_NS", 50_000_000)
    counted: list[float] = []
    count = Recorder.count

    def noted(self: Recorder, name: str, value: float, at_ns: int | None = None) -> None:
        counted.extend([value] * (name == "silent episodes, policy"))
        count(self, name, value, at_ns)

    monkeypatch.setattr(Recorder, "count", noted)
    monkeypatch.setattr("m2flow.observe.spans.counted", counted, raising=False)
    run = SteppedRun(waiting, {}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    assert read_metrics(run.run_dir)["found"][0][1] == 1.0


def test_an_episode_whose_turn_or_tool_is_under_way_is_not_silent(loop, monkeypatch):
    monkeypatch.setattr("m2flow.agents.episodes._SILENT_S", 0.0)
    seen = dict[str, int]()

    @tool(replay="pure")
    async def looks() -> str:
        """Look from within a tool."""
        seen["a tool"] = episodes.num_silent
        return ""

    @agent
    async def body(chat: Chat, row: Sample) -> float:
        await chat.say("?", tools=[looks], max_tokens=3)
        await chat.run([ToolCall("looks", {})])
        seen["the agent"] = episodes.num_silent
        return 1.0

    episodes = host(loop)
    start = start_of(0, body)
    episodes.begin([EpisodeStart(start.request, start.agent, start.row, Bounds(8))])
    played(episodes)
    assert seen == {"a tool": 0, "the agent": 1}
    assert episodes.num_silent == 0


@flow
def weighing() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(4)])
    episodes = policy.rollout(sometimes, rows.take(4), n=4, max_tokens=20, failed="zero")
    log(expected=episodes.reward.mean(), found=policy.update(episodes, advantages=episodes.reward - 1)["reward"])


def test_a_failed_episode_that_is_zero_is_that_in_the_metrics_of_an_update_with_advantages_too():
    logged = logs_of(run_eager(weighing, {}, SPEC))
    assert logged["episodes/failed"] > 0
    assert logged["found"] == pytest.approx(logged["expected"])


@agent
async def silent_at_first(chat: Chat, row: Sample) -> float:
    if row.prompt == "fails":
        raise EpisodeFailed("tool_failed", "the machine is gone")
    if row.prompt == "silent":
        return 1.0
    return float(len((await chat.say(str(row.prompt), max_tokens=5)).text))


@flow
def silences(each: int = 0, num_steps: int = 3, first: str = "silent") -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    for prompts in ([first] * 4, ["?"] * 4, ["?", "silent", "silent", "?"])[:num_steps]:
        rows = Dataset([{"prompt": prompt} for prompt in prompts])
        episodes = policy.rollout(silent_at_first, rows.take(4), n=2, max_tokens=20)
        metrics = policy.update(episodes, episodes.reward, minibatch_size=each or None)
        log(**{name: metrics[name] for name in ("loss", "grad_norm", "num_steps", "num_skipped_steps", "num_sequences")})


@pytest.mark.parametrize(("each", "steps", "skipped"), [(0, [0, 1, 1], [1, 0, 0]), (1, [0, 4, 2], [4, 0, 2])])
def test_a_step_in_which_no_episode_had_a_turn_trains_nothing_and_the_run_goes_on(each, steps, skipped):
    eager, planned = run_eager(silences, {"each": each}, SPEC), run_planned(silences, {"each": each}, SPEC)
    assert not eager.error
    assert not planned.error
    assert difference_of(planned, eager) is None

    def logged(name: str) -> list[float]:
        return [value for _, key, value in planned.logs if key == name]

    assert logged("num_steps") == steps
    assert logged("num_skipped_steps") == skipped
    assert [math.isnan(value) for value in logged("loss")] == [not count for count in steps]
    assert [math.isnan(value) for value in logged("grad_norm")] == [not count for count in steps]
    assert logged("num_sequences") == [8, 8, 8]
    masked, silent, trained = (
        run_planned(silences, {"each": each, "num_steps": n, "first": first}, SPEC).weights["policy"]
        for n, first in ((1, "fails"), (1, "silent"), (2, "silent"))
    )
    assert masked == silent != trained


def test_rows_without_tokens_to_train_on_that_are_no_episodes_are_refused():
    ids = np.arange(2, dtype=np.int64)
    for columns, skips in (({"episode": Ragged.json([{}, {}])}, True), ({}, False)):
        tally = UpdateTally()
        tally.add(Sums(2, 0, 6, {}), Batch(ids, columns), epoch=0)
        assert tally.is_to_skip is skips
    tally.add(Sums(2, 1, 6, {}), Batch(ids, {"episode": Ragged.json([{}, {}])}), epoch=0)
    assert not tally.is_to_skip


def test_what_is_no_agent_is_refused_by_line():
    with pytest.raises(OptionError, match="is no async function"):

        @agent
        def plain(chat: Chat, row: Sample) -> float:
            return 1.0

    with pytest.raises(OptionError, match="nothing gives it the parameter 'other'"):

        @agent
        async def more(chat: Chat, row: Sample, other: int) -> float:
            return 1.0

    @flow
    def wrong() -> None:
        policy = Policy("fake")
        policy.rollout(len, Dataset([{"prompt": "?"}]).take(1), max_tokens=4)

    with pytest.raises(TraceError, match="is no agent"):
        run_eager(wrong, {}, SPEC)
