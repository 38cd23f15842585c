"""Tools of an MCP server: called as tools of one's own, in a session of the worker's or the episode's, over streams and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_clusters import SPLIT

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, flow, mcp_tools, steps
from m2flow.agents.chat import Resources
from m2flow.agents.tools import EpisodeFailed, EventLoop, Outcome, Tool
from m2flow.errors import MissingExtra, OptionError
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"
COMMAND = [sys.executable, "-W", "ignore", str(SERVER)]
NEEDS_MCP = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")


@contextlib.contextmanager
def served() -> Iterator[str]:
    """An address at which the server is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def worked(body: Callable[[Callable[..., Awaitable[Outcome]]], Awaitable[Any]], tools: list[Tool]) -> Any:
    """What a coroutine gives that calls tools by name, as an episode does."""

    async def work() -> Any:
        with ThreadPoolExecutor(4) as threads:
            async with contextlib.AsyncExitStack() as stack:
                resources, by_name = Resources(stack), {one.name: one for one in tools}

                async def call(name: str, /, **given: object) -> Outcome:
                    arguments, fault = by_name[name].checked(ToolCall(name, given))
                    if fault:
                        return Outcome(fault, is_error=True)
                    opened = {one: await resources.get(kind) for one, kind in by_name[name].resources}
                    return await by_name[name].run(arguments, opened, threads)

                return await body(call)

    return asyncio.run(work())


@NEEDS_MCP
@pytest.mark.parametrize("per", ["worker", "episode"])
@pytest.mark.parametrize("over", ["streams", "HTTP"])
def test_a_servers_tools_are_described_checked_and_called_as_ones_own(over: str, per: Any) -> None:
    with served() if over == "HTTP" else contextlib.nullcontext(COMMAND) as where:
        tools = mcp_tools(where, per=per, max_chars=60)

        async def body(call: Any) -> list[Outcome]:
            return [
                await call("add", a=2, b=40),
                await call("add", a=2),
                await call("move", place={"row": 1, "column": 5}, way="down"),
                await call("picture"),
                await call("move", place={"row": "one", "column": 5}, way="down"),
                await call("move", place={"row": 1, "column": 5}, way="left"),
                await call("add", b=1),
                await call("broken"),
            ]

        said = worked(body, tools)
    assert [one.name for one in tools] == ["add", "move", "counted", "broken", "slow", "picture", "variable", "die"]
    function: Any = tools[1].description["function"]
    assert function["description"] == "Move a place by a row."
    assert function["parameters"]["required"] == ["place", "way"]
    assert function["parameters"]["properties"]["place"]["properties"]["row"]["type"] == "integer"  # Nothing is left to look up.
    assert [one.text for one in said[:2]] == ["42", "3"]
    assert said[2].text.split() == ["{", '"row":', "2,", '"column":', "5", "}"]
    assert said[3].text == "[image/png, 3 bytes]"
    assert "wrong argument place of move: " in said[4].text
    assert "'one' is not of type 'integer'" in said[4].text
    assert "'left' is not one of" in said[5].text
    assert "missing: a" in said[6].text
    assert said[7].text.startswith("Error: McpToolError: ")
    assert [one.is_error for one in said] == [False] * 4 + [True] * 4


@NEEDS_MCP
def test_a_session_is_the_workers_or_each_episodes_own() -> None:
    (shared,) = mcp_tools(COMMAND, names=["counted"])
    (own,) = mcp_tools(COMMAND, names=["counted"], per="episode")

    async def episodes(call: Any) -> list[str]:
        found = []
        with ThreadPoolExecutor(1) as threads:
            for tool in (shared, own):
                for _ in range(2):
                    async with contextlib.AsyncExitStack() as stack:
                        resources = Resources(stack)
                        for _ in range(2):
                            opened = {one: await resources.get(kind) for one, kind in tool.resources}
                            found.append((await tool.run({}, opened, threads)).text)
        return found

    assert worked(episodes, []) == ["1", "2", "3", "4", "1", "2", "1", "2"]


@NEEDS_MCP
def test_a_server_that_dies_fails_the_episode_and_the_next_gets_another() -> None:
    tools = mcp_tools(COMMAND)

    async def body(call: Any) -> tuple[str, str]:
        with pytest.raises(EpisodeFailed, match="went away") as caught:
            await call("die")
        assert caught.value.how == "tool_failed"
        return caught.value.how, (await call("add", a=1)).text

    assert worked(body, tools) == ("tool_failed", "2")


@NEEDS_MCP
def test_what_takes_too_long_is_told_and_the_session_goes_on() -> None:
    (patient,) = mcp_tools(COMMAND, names=["counted"])
    tools = [patient, *mcp_tools(COMMAND, names=["slow"], timeout_s=1.0)]

    async def body(call: Any) -> list[str]:
        await call("counted")
        return [(await call("slow", seconds=30)).text, (await call("counted")).text]

    assert worked(body, tools) == ["Error: timed out after 1 s", "2"]


@NEEDS_MCP
def test_a_command_gets_the_usual_variables_and_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key")
    tools = mcp_tools(COMMAND, names=["variable"], env={"GIVEN": "yes"})

    async def body(call: Any) -> list[str]:
        return [(await call("variable", name=name)).text for name in ("GIVEN", "SECRET", "HOME")]

    assert worked(body, tools) == ["yes", "none", os.environ["HOME"]]


def test_what_is_no_server_or_can_not_be_reached_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("localhost:8000", [], ["python", 3], 4):
        with pytest.raises(OptionError):
            mcp_tools(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="per='flow'"):
        mcp_tools(COMMAND, per="flow")  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="mcp") as caught:
        mcp_tools(COMMAND)
    assert "m2flow[mcp]" in caught.value.now


@NEEDS_MCP
def test_a_server_that_is_not_there_is_named_with_what_to_look_at() -> None:
    for where, what in (
        ("http://127.0.0.1:9/mcp", "Is it running"),
        (["no-such-command-of-mine"], "run in a terminal"),
        (["true"], "run in a"),
    ):
        with pytest.raises(OptionError, match="can't be reached") as caught:
            mcp_tools(where)
        assert what in caught.value.now
    with pytest.raises(OptionError, match="has no tool 'ad'; it has add, move") as caught:
        mcp_tools(COMMAND, names=["ad"])
    assert "add" in caught.value.now


def raw(folder: Path, **given: object) -> list[str]:
    """The command of a server that says what it is given, right or wrong."""
    (folder / "given.json").write_text(json.dumps(given))
    return [sys.executable, str(SERVER.with_name("raw_mcp_server.py")), str(folder / "given.json")]


@NEEDS_MCP
@pytest.mark.parametrize(
    "wrong",
    [
        {"result": {"content": [{"type": "text", "text": "hi"}], "structuredContent": {"n": "text"}}},
        {"result": {"content": [{"type": "video", "data": "x"}]}},
        {"error": {"code": -32000, "message": "the shop is closed on Sundays"}},
    ],
    ids=["against its schema", "of no kind", "an error"],
)
def test_an_answer_that_is_wrong_is_told_to_the_model_and_other_calls_go_on(wrong: object, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    offered = [
        {"name": "shop", "inputSchema": {"type": "object"}, "outputSchema": schema},
        {"name": "other", "inputSchema": {"type": "object"}},
    ]
    tools = mcp_tools(raw(tmp_path, tools=offered, answers={"shop": wrong, "other": {"sleep": 1.0}}))

    async def body(call: Any) -> list[Outcome]:
        other = asyncio.create_task(call("other"))
        await asyncio.sleep(0.3)
        return [await call("shop"), await other]

    shop, other = worked(body, tools)
    assert shop.is_error
    assert shop.text.startswith("Error: McpToolError: ")
    assert other == Outcome("late")


ODD_SCHEMAS: dict[str, tuple[Any, dict[str, object]]] = {
    "null": ({"type": "object", "properties": None, "required": None}, {}),
    "bool": ({"properties": {"x": True}}, {"x": 1}),
    "a draft of its own": ({"properties": {"x": {"items": [{"type": "integer"}], "minimum": 1, "exclusiveMinimum": True}}}, {"x": [1]}),
    "a wrong expression": ({"properties": {"x": {"type": "string", "pattern": "(?<a>b)"}}}, {"x": "b"}),
    "of nowhere": ({"properties": {"x": {"$ref": "#/$defs/none"}}}, {"x": 1}),
    "to true": ({"$defs": {"any": True}, "properties": {"x": {"$ref": "#/$defs/any"}}}, {"x": 1}),
    "inside itself": (
        {"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}}}, "properties": {"x": {"$ref": "#/$defs/tree"}}},
        {"x": {"left": {"left": {}}}},
    ),
    "at the top": ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}}, {"x": 1}),
    "alternatives": ({"anyOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"y": {}}}]}, {"x": 1, "y": 2}),
    "names": ({"properties": {"self": {}, "name": {}, "arguments": {}, "server": {}}}, {"self": 1, "name": 2, "arguments": 3, "server": 4}),
}


@NEEDS_MCP
@pytest.mark.parametrize("per", ["worker", "episode"])
def test_schemas_of_any_kind_are_described_and_called(per: Any, tmp_path: Path) -> None:
    folded: dict[str, Any] = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(24)
    }
    schemas = {**ODD_SCHEMAS, "folded": ({"$defs": folded, "properties": {"x": {"$ref": "#/$defs/d0"}}}, {"x": {}})}
    tools = mcp_tools(
        raw(tmp_path, tools=[{"name": name, "inputSchema": {"type": "object", **schema}} for name, (schema, _) in schemas.items()]), per=per
    )

    async def body(call: Any) -> list[str]:
        return [(await call(name, **given)).text for name, (_, given) in schemas.items()]

    assert worked(body, tools) == ["fine"] * len(schemas)
    assert all(len(json.dumps(one.description)) < 200_000 for one in tools)
    assert next(one for one in tools if one.name == "at the top").checked(ToolCall("at the top", {"x": "one"}))[1]


@NEEDS_MCP
def test_an_episode_that_ends_while_its_server_starts_leaves_no_process(tmp_path: Path) -> None:
    command = raw(tmp_path, tools=[{"name": "one", "inputSchema": {"type": "object"}}])
    (tool,) = mcp_tools(command, per="episode")
    (tmp_path / "given.json").write_text(json.dumps({"tools": [], "starts_after": 60}))

    def running() -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive=True) if str(tmp_path) in " ".join(one.cmdline())]

    async def episode() -> None:
        async with contextlib.AsyncExitStack() as stack:
            resources = Resources(stack)
            ((_, kind),) = tool.resources
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await resources.get(kind)
            assert running()

    asyncio.run(episode())
    assert not running()


@NEEDS_MCP
@pytest.mark.parametrize("per", ["worker", "episode"])
def test_a_server_that_hears_nothing_more_is_ended_though_the_worker_ends_at_the_same_time(per: Any, tmp_path: Path) -> None:
    (tool,) = mcp_tools(raw(tmp_path, tools=[{"name": "one", "inputSchema": {"type": "object"}}], answers={"one": {"deaf": True}}), per=per)
    loop, failed, ended = EventLoop(), threading.Event(), list[BaseException | None]()

    async def episode() -> None:
        async with contextlib.AsyncExitStack() as stack:
            opened = {name: await Resources(stack).get(kind) for name, kind in tool.resources}
            try:
                await tool.run({}, opened, loop.threads)
            except EpisodeFailed as error:
                ended.append(error)
                for _ in range(10):
                    await asyncio.sleep(0)  # The worker's session begins to close.
            failed.set()

    held = list[asyncio.Task[None]]()
    loop.call(lambda: held.append(asyncio.get_event_loop().create_task(episode())))
    assert failed.wait(60)
    assert ended
    servers = [one for one in psutil.Process().children(recursive=True) if str(tmp_path) in " ".join(one.cmdline())]
    loop.close()  # While the session with it is being closed, which takes seconds.
    assert not [one for one in servers if one.is_running()]


@NEEDS_MCP
def test_a_server_without_tools_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no tools"):
        mcp_tools(raw(tmp_path, tools=[]))


def solver_of(tools: list[Tool]) -> Any:
    @agent
    async def solver(chat: Chat, row: Sample) -> float:
        turn = await chat.say(str(row.prompt), tools=tools)
        numbers = {"a": len(turn.text), "b": len(str(row.prompt))}
        one, other = await chat.run([ToolCall("add", numbers), ToolCall("move", {"place": {"row": 1, "column": 2}, "way": "up"})])
        await chat.say(one.text + other.text, max_tokens=20)
        return float(one.text) / 100

    return solver


@NEEDS_MCP
@pytest.mark.parametrize("per", ["worker", "episode"])
def test_episodes_with_such_tools_are_the_same_planned_and_eager(per: Any) -> None:
    solver = solver_of(mcp_tools(COMMAND, per=per))

    @flow
    def learning() -> None:
        policy, prompts = Policy("fake", init="random"), Dataset([{"prompt": f"{i * 37}?"} for i in range(4)])
        for _ in steps(2):
            episodes = policy.rollout(solver, prompts.take(2), n=2, max_tokens=80, max_turns=4)
            policy.update(episodes, episodes.reward)

    eager = run_eager(learning, {}, SPLIT)
    assert eager.error == ""
    assert len(eager.samples) == 8
    assert run_planned(learning, {}, SPLIT, order_seed=1) == eager


@NEEDS_MCP
def test_an_episode_whose_server_dies_has_no_reward_and_says_why() -> None:
    tools = mcp_tools(COMMAND, names=["die"])

    @agent
    async def dying(chat: Chat, row: Sample) -> float:
        await chat.say(str(row.prompt), tools=tools)
        await chat.run([ToolCall("die", {})])
        return 1.0

    @flow
    def learning() -> None:
        policy, prompts = Policy("fake", init="random"), Dataset([{"prompt": f"{i * 37}?"} for i in range(4)])
        episodes = policy.rollout(dying, prompts.take(2), n=2, max_tokens=80, max_turns=4, failed="raise")
        policy.update(episodes, episodes.reward)

    assert "went away" in run_eager(learning, {}, SPLIT).error
