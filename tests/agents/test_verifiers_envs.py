"""Environments of verifiers are played with the policy: with the package, where it is installed, and with a small one of its interface."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from played_episodes import SPEC
from scripted_model import CALL, Script, chat_of

from m2flow import Chat, Dataset, Policy, flow, steps
from m2flow.agents.chat import Asked, Reply, Resources, Table
from m2flow.agents.conversation import Conversation
from m2flow.agents.http_sessions import _Server
from m2flow.agents.tools import EpisodeFailed, EventLoop
from m2flow.agents.verifiers_envs import _world, _worlds, verifiers_agent, verifiers_rows
from m2flow.errors import DatasetError, MissingExtra, OptionError
from m2flow.recipe import AdamW
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
FAKE = Path(__file__).parent.parent / "support" / "fake_verifiers.py"

SUMS = '''
import asyncio, json
import httpx2
import verifiers.v1 as vf

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


class Sum(vf.TaskData):
    answer: str
    weight: float = 1.0


class SumsConfig(vf.TasksetConfig):
    num: int = 3
    kind: str = ""


class OwnConfig(vf.TaskConfig):
    level: int = 0


class OtherTask(vf.Task[Sum]):
    pass


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.answer == "a key":
            raise KeyError(self.data.answer)
        if self.data.answer == "late":
            await asyncio.sleep(60)
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def brief(self, trace) -> float:
        return 0.25

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        kind = self.config.kind
        for at in range(self.config.num):
            answer = kind if kind in ("a key", "late") else str(at + 2)
            data = Sum(prompt=f"{at} + 2?", system_prompt=None if kind == "plain" else "Be brief.", answer=answer)
            if kind == "not a number":
                data = data.model_copy(update={"weight": float("nan")})
            yield (OtherTask if kind == "other" else SumTask)(data, OwnConfig() if kind == "own" else self.config.task)


class LoopConfig(vf.HarnessConfig):
    does: str = ""


class Loop(vf.Harness[LoopConfig]):
    """Asks until there is no call any more."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if self.config.does == "exits":
            return vf.ProgramResult(exit_code=3, stdout="", stderr="no such tool")
        system, prompt = self.resolve_prompt(data)
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
        more = {"logprobs": True, "top_logprobs": 2} if self.config.does == "asks for others" else {}
        more |= {"max_tokens": 9} if self.config.does == "says little" else {"tools": [TOOL]}
        async with httpx2.AsyncClient(base_url=endpoint, headers={"authorization": f"Bearer {secret}"}, timeout=60) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, **more}
                answer = await client.post("/chat/completions", json=body)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                said = answer.json()["choices"][0]["message"]
                messages.append(said)
                if not said.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said["tool_calls"]:
                    given = json.loads(call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])})


__all__ = ["Sums", "Loop"]
'''

PAIR = """
import verifiers.v1 as vf
from verifiers_sums import Loop, LoopConfig, Sum, Sums, SumsConfig, SumTask


class PairTasks(Sums):
    pass


class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "verifiers-sums"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "verifiers-sums"})
    trains: bool = True
    starts: bool = True
    rewards: bool = True


class Quiet(vf.Task[Sum]):
    pass


class Pair(vf.Env[PairConfig]):
    async def start(self):
        if not self.config.starts:
            raise OSError("no disk")

    async def setup(self, agents):
        agents.second.trainable = self.config.trains

    async def run(self, task, agents):
        quiet = Quiet(task.data, task.config)
        await agents.first.run(quiet)
        await agents.second.run(quiet)
        await agents.second.run(quiet)

    async def finalize(self, task, episode):
        for trace in episode.traces if self.config.rewards else ():
            if trace.agent.trainable:
                trace.record_reward("won", float(trace.agent.name == "first"))


__all__ = ["PairTasks", "Pair"]
"""


SERVERS = '''
import verifiers.v1 as vf


class Counted(vf.State):
    num: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, Counted]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.num += 1
        return str(a + b)


class Library(vf.Toolset[vf.SharedToolsetConfig, Counted]):
    @vf.tool
    async def look(self) -> str:
        """Look a word up."""
        return "found"


if __name__ == "__main__":
    SERVER.run()
'''

TOOLS = """
import json
from mcp import Client
import verifiers.v1 as vf
from verifiers_adder import Adder, Counted
from verifiers_library import Library


class ToolTask(vf.Task[vf.TaskData, Counted]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def used(self, trace) -> float:
        return trace.state.num + 10.0 * (trace.last_reply == "3 found")


class ToolTasks(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="1 + 2?"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Library(vf.SharedToolsetConfig())]


class ToolLoop(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_MCP = True
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        import openai

        messages = [{"role": "user", "content": data.prompt}]
        tools, owners = [], {}
        for url in mcp_urls.values():
            async with Client(url) as client:
                for tool in (await client.list_tools()).tools:
                    owners[tool.name] = url
                    tools.append({"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}})
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as speaks:
            while True:
                stream = await speaks.chat.completions.create(
                    model=ctx.model, messages=messages, tools=sorted(tools, key=str), stream=True, stream_options={"include_usage": True}
                )
                text, calls = "", []
                async for chunk in stream:
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        calls += choice.delta.tool_calls or ()
                said = [{"id": one.id, "type": "function", "function": one.function.model_dump()} for one in calls]
                messages.append({"role": "assistant", "content": text or None, **({"tool_calls": said} if said else {})})
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    async with Client(owners[call.function.name]) as client:
                        result = await client.call_tool(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})


__all__ = ["ToolTasks", "ToolLoop"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environments as modules that can be imported."""
    made = tmp_path_factory.mktemp("environments")
    (made / "verifiers_sums.py").write_text(SUMS)
    (made / "verifiers_pair.py").write_text(PAIR)
    (made / "verifiers_tools.py").write_text(TOOLS)
    for name in ("Adder", "Library"):  # A server is the program of its module.
        (made / f"verifiers_{name.lower()}.py").write_text(SERVERS.replace("SERVER", name))
    return made


@contextlib.contextmanager
def importable(*paths: Path) -> Iterator[None]:
    """The modules of these folders, and none of the kind that was imported before."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0].startswith("verifiers")}
    sys.path[:0] = map(str, paths)
    importlib.invalidate_caches()  # Else folders that have just been made are not seen.
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(str(path))
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("verifiers")]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture(scope="module", params=["fake", "real"])
def library(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Both packages, one after the other: what holds for the small one holds for verifiers."""
    if request.param == "real" and importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed: pip install 'verifiers>=0.4,<0.5'")
    small = folder / "small" / "verifiers"
    small.mkdir(parents=True, exist_ok=True)
    (small / "__init__.py").touch()
    (small / "v1.py").write_text(FAKE.read_text())
    with importable(folder, *([small.parent] if request.param == "fake" else [])):
        yield request.param


class Row:
    def __init__(self, columns: Mapping[str, object]) -> None:
        vars(self).update(columns)


LOCAL = {"runtime": {"type": "subprocess"}}


def sums(kind: str = "", does: str = "", **agent: Any) -> dict[str, Any]:
    """The configuration of sums, in which one of the tasks' or the harness's ways is another."""
    harness = {"id": "verifiers-sums", "does": does}
    return {"taskset": {"id": "verifiers-sums", "kind": kind}, "agent": {**LOCAL, "harness": harness, **agent}}


def pair(**options: Any) -> dict[str, Any]:
    return {"taskset": {"id": "verifiers-pair"}, "first": LOCAL, "second": LOCAL, **options}


def played(agent: Any, rows: Sequence[Mapping[str, object]], chats: Sequence[Any]) -> list[Any]:
    """What episodes of these rows give, all at once: a reward, or the failure."""

    async def run() -> list[Any]:
        try:
            plays = (agent(chat, Row(row)) for chat, row in zip(chats, rows, strict=True))
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            held = [world._task for world in _worlds.pop(asyncio.get_running_loop(), {}).values()]
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.usefixtures("library")
def test_an_environments_tasks_are_rows_and_its_rewards_those_of_the_episodes(language: Any) -> None:
    rows = verifiers_rows(sums())
    assert [row["prompt"] for row in rows] == ["0 + 2?", "1 + 2?", "2 + 2?"]
    scripts = [Script(language, [CALL, "3"]) for _ in rows]
    found = played(verifiers_agent(sums()), rows, [chat_of(script) for script in scripts])
    right = {"right": 2.0, "brief": 0.25, "turns": 2.0}
    assert found == [{"reward": 0.25, **right, "right": 0.0}, {"reward": 2.25, **right}, {"reward": 0.25, **right, "right": 0.0}]
    for at, script in enumerate(scripts):
        assert [(one.name, one.begins) for one in script.asked] == [("main", True), ("main", False)]
        assert f"{at} + 2?" in (script.asked[0].prompt_text or "")
        assert "Be brief." in (script.asked[0].prompt_text or "")


def test_a_runtime_is_for_agents_whose_configuration_does_not_say_one(language: Any, library: str) -> None:
    (row,) = verifiers_rows("verifiers-sums", limit=1)
    found = played(verifiers_agent("verifiers-sums", runtime="subprocess"), [row], [chat_of(Script(language, ["2"]))])
    assert found == [{"reward": 2.25, "right": 2.0, "brief": 0.25, "turns": 1.0}]


def failed(environment: Any, script: Script, **bounds: int) -> EpisodeFailed:
    """The failure of an episode of its first task."""
    (found,) = played(verifiers_agent(environment), verifiers_rows(environment, limit=1), [chat_of(script, **bounds)])
    assert isinstance(found, EpisodeFailed), found
    return found


@pytest.mark.parametrize(
    ("environment", "how", "words"),
    [
        (sums(does="exits"), "tool_failed", "HarnessError: harness 'verifiers-sums' exited 3: no such tool"),
        (sums("a key"), "raised", "TaskError: task SumTask scoring: KeyError: 'a key'"),
        (sums(does="asks for others"), "raised", "top_logprobs is not supported"),
        (sums("late", timeout={"scoring": 0.3}), "timed_out", "(scoring_timeout)"),
    ],
    ids=["harness", "reward", "refused", "late"],
)
@pytest.mark.usefixtures("library")
def test_what_breaks_in_an_environment_is_a_failure_by_its_name_and_no_reward(
    environment: Any, how: str, words: str, language: Any
) -> None:
    failure = failed(environment, Script(language, ["2"]))
    assert failure.how == how
    assert words in str(failure)


@pytest.mark.usefixtures("library")
def test_a_harness_that_takes_too_long_is_a_failure_and_its_partial_work_no_reward(language: Any) -> None:
    failure = failed(sums(timeout={"rollout": 0.3}), Script(language, ["2"], delay_s=3600))
    assert (failure.how, "(agent_timeout)" in str(failure)) == ("timed_out", True)


@pytest.mark.usefixtures("library")
def test_a_failure_of_a_turn_is_the_episodes_whatever_the_environment_makes_of_it(language: Any) -> None:
    class Failing(Script):
        async def turn(self, asked: Asked) -> Reply:
            raise EpisodeFailed("turn_timed_out", "too slow")

    failure = failed(sums(), Failing(language, ["2"]))
    assert (failure.how, str(failure)) == ("turn_timed_out", "too slow")


@pytest.mark.usefixtures("library")
def test_each_agent_of_an_environment_has_a_conversation_and_the_reward_of_its_own_trace(language: Any) -> None:
    script = Script(language, ["2"])
    rows = verifiers_rows(pair(), limit=2)
    found = played(verifiers_agent(pair()), rows, [chat_of(script), chat_of(Script(language, ["2"]))])
    assert found == [{"first": 1.0, "second": 0.0, "second-2": 0.0}] * 2
    assert [one.name for one in script.asked] == ["first", "second", "second-2"]


@pytest.mark.usefixtures("library")
def test_an_environment_without_rewards_gives_none(language: Any) -> None:
    assert played(verifiers_agent(pair(rewards=False)), verifiers_rows(pair(), limit=1), [chat_of(Script(language, ["2"]))]) == [None]


def test_an_agent_that_is_not_trained_is_played_by_another_speaker_or_by_nobody(language: Any, library: str) -> None:
    script, rows = Script(language, ["2"]), verifiers_rows(pair(), limit=1)
    table = Table(
        script,
        Resources(contextlib.AsyncExitStack()),
        7,
        4000,
        8,
        8,
        (),
        lambda by: Conversation(language),
        speakers=("other",),
    )
    by_other = verifiers_agent(pair(trains=False), speakers={"second": "other"})
    assert played(by_other, rows, [Chat(table, table.make(""), "main")]) == [{"first": 1.0}]
    assert [(one.name, one.by) for one in script.asked] == [("first", ""), ("second", "other"), ("second-2", "other")]
    failure = failed(pair(trains=False), Script(language, ["2"]))
    assert failure.how == "unknown_speaker"
    assert "an agent 'second' that is not to be trained" in str(failure)
    (unnamed,) = played(by_other, rows, [chat_of(Script(language, ["2"]))])
    assert unnamed.how == "unknown_speaker"


@pytest.mark.usefixtures("library")
def test_an_environment_that_can_t_begin_fails_each_episode_by_name_and_leaves_no_server(language: Any) -> None:
    failure = failed(pair(starts=False), Script(language, ["2"]))
    assert (failure.how, "the environment can't begin: OSError: no disk" in str(failure)) == ("tool_failed", True)
    assert not _Server._running


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (3, "environment is 3"),
        ({}, "names no taskset"),
        ("verifiers-nowhere", "no such environment"),
        (sums() | {"agents": {}}, "refuses the environment's configuration"),
        (sums(retries={"max_retries": 1}), "agent.retries is set"),
        ({**sums(), "retries": {"max_retries": 1}}, "env.retries is set"),
        ({"taskset": {"id": "verifiers-sums", "kind": object()}}, "is no JSON"),
    ],
)
@pytest.mark.usefixtures("library")
def test_what_is_no_environment_is_refused_in_the_flow(environment: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        verifiers_agent(environment)


@pytest.mark.usefixtures("library")
def test_speakers_are_for_agents_that_there_are() -> None:
    with pytest.raises(OptionError, match="'third', and the agents of the environment are first, second"):
        verifiers_agent(pair(), speakers={"third": "other"})


@pytest.mark.parametrize(
    ("kind", "words"),
    [("own", "a configuration of its own"), ("other", "made by a OtherTask"), ("not a number", "another one once it was JSON")],
)
@pytest.mark.usefixtures("library")
def test_tasks_that_a_worker_would_make_otherwise_are_refused(kind: str, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        verifiers_rows(sums(kind))


def test_a_taskset_without_an_end_needs_a_limit(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("verifiers_sums").Sums, "INFINITE", True)
    with pytest.raises(DatasetError, match="has no end"):
        verifiers_rows(sums())
    assert len(verifiers_rows(sums(), limit=2)) == 2


@pytest.mark.usefixtures("library")
def test_rows_of_others_are_refused_by_name(language: Any) -> None:
    found = played(verifiers_agent(sums()), [{"prompt": "x"}, {"task": "{}"}], [chat_of(Script(language, ["2"])) for _ in range(2)])
    assert [one.how for one in found] == ["invalid", "invalid"]
    assert "the row has no task" in str(found[0])


def test_without_the_package_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingExtra, match="pip install 'verifiers"):
        verifiers_agent("verifiers-sums")


@flow
def trains() -> None:
    environment = sums("plain", "says little")
    policy = Policy("fake")
    rows = Dataset(verifiers_rows(environment), name="sums", shuffle=False)
    for _ in steps(2):
        episodes = policy.rollout(verifiers_agent(environment), rows.take(1), n=2, max_tokens=80, max_turns=4)
        policy.update(episodes, episodes.reward, optimizer=AdamW(0.1))


@pytest.mark.usefixtures("quick", "library")
def test_a_planned_run_of_an_environment_equals_the_eager_one() -> None:
    assert run_planned(trains, {}, SPEC, seed=3) == run_eager(trains, {}, SPEC, seed=3)


def test_servers_of_tools_that_a_task_has_and_that_all_share_are_those_of_the_episode(
    language: Any, library: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    if library == "fake":
        pytest.skip("the small package has no servers of tools")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    look = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    scripts = [Script(language, [f"{CALL}\n{look}", "3 found"]) for _ in range(2)]
    rows = verifiers_rows("verifiers-tools") * 2
    plays = verifiers_agent("verifiers-tools", runtime="subprocess")
    loop, found = EventLoop(), Future[list[Any]]()

    async def run() -> None:  # On the thread that episodes have in a worker.
        chats = [chat_of(script) for script in scripts]
        found.set_result(
            await asyncio.gather(*(plays(chat, Row(row)) for chat, row in zip(chats, rows, strict=True)), return_exceptions=True)
        )

    tasks = list[asyncio.Task[None]]()
    loop.call(lambda: tasks.append(asyncio.ensure_future(run())))
    try:
        assert found.result(120) == [{"reward": 11.0, "used": 11.0}] * 2
    finally:
        loop.close()
    for script in scripts:
        assert [one.begins for one in script.asked] == [True, False]
        assert "found" in language.decode_all(list(script.asked[1].ids))


def test_an_environment_ends_with_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Served:
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

    monkeypatch.setattr("m2flow.agents.verifiers_envs._environment", lambda config: Served())
    environments: list[weakref.ref[Any]] = []

    async def begins() -> None:
        env, _ = await _world("{}").ready()
        environments.append(weakref.ref(env))

    for _ in range(2):
        asyncio.run(begins())
    gc.collect()
    assert [one() for one in environments] == [None, None]
