"""A small stand-in for the package `verifiers`: what `m2flow.agents.verifiers_envs` and its tests use of the interface of 0.4.0.

Configurations, tasks, harnesses, episodes, and the server that relays requests, in one process. The tests run on this one, as a module
`verifiers.v1`, and, where it is installed, on the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import typing
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx2
import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

T, C = TypeVar("T"), TypeVar("C")


class BaseConfig(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class TaskConfig(BaseConfig): ...


class TasksetConfig(BaseConfig):
    id: str = ""
    task: TaskConfig = TaskConfig()


class HarnessConfig(BaseConfig):
    id: str = "bash"


class RetryConfig(BaseConfig):
    max_retries: int = 0
    rules: list[Any] = []


class StageTimeouts(BaseConfig):
    rollout: float | None = None
    scoring: float | None = None


class AgentConfig(BaseConfig):
    harness: Any = None
    runtime: dict[str, Any] = {"type": "prime"}
    client: Any = None
    timeout: StageTimeouts = StageTimeouts()
    retries: RetryConfig = RetryConfig()


class EvalClientConfig(BaseConfig):
    base_url: str
    api_key_var: str


class EnvConfig(BaseConfig):
    id: str = ""
    taskset: pydantic.SerializeAsAny[TasksetConfig] = TasksetConfig()
    retries: RetryConfig = RetryConfig()

    @property
    def env_id(self) -> str:
        return self.taskset.id or self.id


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


# ---- errors


class RolloutError(Exception): ...


class ProviderError(RolloutError): ...


class HarnessError(RolloutError): ...


class TaskError(RolloutError): ...


class EnvError(RolloutError): ...


@contextlib.contextmanager
def boundary(kind: type[RolloutError], what: str) -> Iterator[None]:
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


@dataclass
class Error:
    type: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Error:
        return cls(type(error).__name__, str(error))


# ---- tasks


class TaskData(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    idx: int | None = None
    prompt: str | None = None
    system_prompt: str | None = None

    @property
    def prompt_text(self) -> str:
        return self.prompt or ""


def reward(function: Any = None, weight: float = 1.0) -> Any:
    def mark(one: Any) -> Any:
        one.reward, one.weight = True, weight
        return one

    return mark if function is None else mark(function)


def metric(function: Any) -> Any:
    function.metric = True
    return function


def concrete(cls: type, kind: type) -> Any:
    """The type argument of this kind that a class gave to a generic base."""
    for one in cls.__mro__:
        for base in getattr(one, "__orig_bases__", ()):
            for given in typing.get_args(base):
                if isinstance(given, type) and issubclass(given, kind):
                    return given
    return kind


class Task(Generic[T]):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, TaskConfig() if config is None else config

    @classmethod
    def data_type(cls) -> Any:
        return concrete(cls, TaskData)

    def hooks(self, kind: str) -> list[Any]:
        return [getattr(self, name) for name in sorted(dir(type(self))) if hasattr(getattr(type(self), name), kind)]

    async def score(self, trace: Trace) -> None:
        trace.rewards = dict.fromkeys(one.__name__ for one in self.hooks("reward"))
        trace.metrics = dict.fromkeys(one.__name__ for one in self.hooks("metric"))
        with boundary(TaskError, f"task {type(self).__name__} scoring"):
            for one in self.hooks("metric"):
                trace.metrics[one.__name__] = float(await one(trace=trace))
            for one in self.hooks("reward"):
                trace.record_reward(one.__name__, await one(trace=trace), one.weight)


class Taskset(Generic[T, C]):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def bounded(self) -> bool:
        return not self.INFINITE

    @classmethod
    def task_type(cls) -> Any:
        return concrete(cls, Task)

    def __iter__(self) -> Iterator[Any]:
        for idx, task in enumerate(self.load()):  # type: ignore[attr-defined]
            task.data = task.data.model_copy(update={"idx": idx})
            yield task


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


class Harness(Generic[C]):
    def __init__(self, config: Any) -> None:
        self.config = config

    def resolve_prompt(self, data: TaskData) -> tuple[str | None, str | None]:
        return data.system_prompt, data.prompt


# ---- what happened


@dataclass
class Reward:
    score: float
    weight: float

    @property
    def value(self) -> float:
        return self.score * self.weight


@dataclass
class AgentInfo:
    name: str
    trainable: bool


@dataclass
class Trace:
    agent: AgentInfo
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    replies: list[str] = field(default_factory=list)
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    errors: list[Error] = field(default_factory=list)
    failure: Exception | None = None
    stop_condition: str | None = None
    is_timeout: bool = False
    ok: bool = False

    @property
    def num_turns(self) -> int:
        return len(self.replies)

    @property
    def last_reply(self) -> str:
        return self.replies[-1] if self.replies else ""

    @property
    def reward(self) -> float:
        return sum(one.value for one in self.rewards.values() if one is not None)

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = Reward(float(value), weight)

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.errors.append(Error.of(error))

    def late(self, stage: str) -> None:
        self.is_timeout, self.stop_condition = True, f"{stage}_timeout"


@dataclass
class Episode:
    traces: list[Trace] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    is_timeout: bool = False
    ok: bool = False


# ---- environments


class Agent:
    """One agent of an episode."""

    def __init__(self, name: str, config: AgentConfig, env: Any, ctx: ModelContext, completed: list[Trace], on_trace: Any) -> None:
        self._name, self._config, self._env, self._ctx = name, config, env, ctx
        self._completed, self._on_trace = completed, on_trace
        self.trainable = True

    async def run(self, task: Any) -> Trace:
        trace = Trace(AgentInfo(self._name, self.trainable))
        self._on_trace(trace)
        harness, error = self._env.harnesses[self._name], None
        try:
            async with asyncio.timeout(self._config.timeout.rollout):
                with boundary(HarnessError, f"harness {harness.config.id!r}"):
                    self._env.sessions[trace.id] = trace, self._ctx
                    result = await harness.launch(self._ctx, trace, None, self._env.url, trace.id, {}, task.data)
                    error = self._env.sessions[trace.id][0].failure
                    if result.exit_code:
                        raise error or HarnessError(f"harness {harness.config.id!r} exited {result.exit_code}: {result.stderr}")
                    trace.failure = None
        except TimeoutError:
            trace.late("agent")
        except Exception as failure:
            trace.fail(failure)
        if trace.failure is None:
            try:
                async with asyncio.timeout(self._config.timeout.scoring):
                    await task.score(trace)
            except TimeoutError:
                trace.late("scoring")
            except Exception as failure:
                trace.fail(failure)
        trace.ok = trace.failure is None
        self._completed.append(trace)
        return trace


class Agents:
    def __init__(self, found: dict[str, Agent]) -> None:
        vars(self).update(found)


class Env(Generic[C]):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.taskset = plugin(config.taskset.id, Taskset)(config.taskset)
        self.sessions: dict[str, tuple[Trace, ModelContext]] = {}
        self.url = ""
        agents = {name: one for name, one in config if isinstance(one, AgentConfig)}
        configs = {name: one.harness or harness_config({"id": config.taskset.id}) for name, one in agents.items()}
        self.harnesses = {name: plugin(one.id, Harness)(one) for name, one in configs.items()}

    async def setup(self, agents: Any) -> None: ...

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)

    async def finalize(self, task: Any, episode: Episode) -> None: ...

    async def start(self) -> None: ...

    def complete(self, episode: Episode) -> bool:
        return episode.ok

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        listener = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/v1/chat/completions", self._relay, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with contextlib.closing(listener):  # A server that is cancelled with its loop leaves it open.
            async with httpx2.AsyncClient(timeout=60, verify=False) as self._client:
                try:
                    await self.start()
                    yield
                finally:
                    server.should_exit = True
                    await task

    async def _relay(self, request: Request) -> Response:
        trace, ctx = self.sessions[request.headers["authorization"].removeprefix("Bearer ")]
        body = {**await request.json(), "model": ctx.model}
        answer = await self._client.post(f"{ctx.client.base_url}/chat/completions", json=body, headers={"x-session-id": trace.id})
        if answer.status_code != 200:
            trace.failure = ProviderError(f"upstream {answer.status_code}: {answer.text}")
            return JSONResponse({"error": answer.text}, answer.status_code)
        trace.replies.append((answer.json()["choices"][0]["message"]["content"] or "").strip())
        return JSONResponse(answer.json())

    async def run_episode(self, task: Any, ctx: ModelContext, *, on_trace: Any) -> Episode:
        episode = Episode()
        made = {name: Agent(name, one, self, ctx, episode.traces, on_trace) for name, one in self.config if isinstance(one, AgentConfig)}
        try:
            agents, name = Agents(made), type(self).__name__
            with boundary(EnvError, f"{name}.setup()"):
                await self.setup(agents)
            with boundary(EnvError, f"{name}.run()"):
                await self.run(task, agents)
            with boundary(EnvError, f"{name}.finalize()"):
                await self.finalize(task, episode)
        except Exception as error:
            episode.errors.append(Error.of(error))
            return episode
        episode.ok = all(trace.ok for trace in episode.traces)
        return episode


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SingleAgentEnv(Env[SingleAgentEnvConfig]): ...


# ---- plugins


def plugin(name: str, kind: type) -> Any:
    module = importlib.import_module(name.replace("-", "_"))
    found = [one for given in module.__all__ if issubclass(one := getattr(module, given), kind)]
    if not found:
        raise TypeError(f"{name!r} exports no {kind.__name__}")
    return found[0]


def environment_class(config: Any) -> Any:
    try:
        return plugin(config["taskset"]["id"], Env)
    except (ModuleNotFoundError, TypeError):
        return SingleAgentEnv


def harness_config(given: dict[str, Any]) -> Any:
    return concrete(plugin(given["id"], Harness), HarnessConfig).model_validate(given)


def resolve_env_config(data: dict[str, Any]) -> Any:
    found = dict(data)
    if not found.get("taskset"):
        return SingleAgentEnvConfig.model_validate(found)
    taskset = concrete(plugin(found["taskset"]["id"], Taskset), TasksetConfig).model_validate(found["taskset"])
    kind = concrete(environment_class(found), EnvConfig)
    kind = SingleAgentEnvConfig if kind is EnvConfig else kind
    for name, one in kind.model_fields.items():
        if isinstance(one.default, AgentConfig):
            merged = {**one.default.model_dump(exclude_unset=True), **found.get(name, {})}
            merged["harness"] = harness_config(merged["harness"]) if merged.get("harness") else None
            found[name] = merged
    return kind.model_validate(found | {"taskset": taskset})


def load_environment(config: Any) -> Any:
    return environment_class({"taskset": {"id": config.taskset.id}})(config)
