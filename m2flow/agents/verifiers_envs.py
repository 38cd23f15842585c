"""Play environments of the package `verifiers` (0.4): their tasks are rows, their harnesses speak with the policy, their rewards train it.

    rows = Dataset(verifiers_rows("gsm8k-v1"), name="gsm8k")
    plays = verifiers_agent("gsm8k-v1", runtime="subprocess")
    episodes = policy.rollout(plays, rows.take(32), n=8, max_tokens=4096, max_turns=8, timeout_s=600)
    policy.update(episodes, episodes.reward)

    a row's task --Env.run_episode--> a harness --requests--> verifiers' server --relays--> `SharedEndpoint`: turns of the episode

The environment runs as it does under `vf-eval`: its harness, its tool servers, its stops and its rewards. What the model says in it is
sampled here, so tokens, masks, log-probabilities and versions are those of any other episode. Sampling is the rollout's: what the
environment's configuration says of temperature is not looked at; its bounds of turns and tokens hold beside the rollout's.

A worker holds each environment once, with the tool servers that its episodes share, for as long as the worker's event loop runs.

Agents. Each agent of a multi-agent environment has a conversation of its name, with its own reward. One that the environment declares not
trainable needs a speaker of the rollout (`speakers=`), or an endpoint of its own in the environment's configuration.

Whatever breaks is a failure of the episode, never a reward of 0: an error that verifiers records, a stage that took too long, a reward
that was not computed. Where an episode is repeated, its environment and its tools run again, as those of any agent that speaks HTTP.

Source:
    The interface of verifiers 0.4.0 (github.com/PrimeIntellect-ai/verifiers), as its own server of environments uses it
    (`verifiers/v1/serve/server.py`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from m2flow.agents.chat import Agent, Chat
from m2flow.agents.http_dialects import MODEL
from m2flow.agents.http_sessions import SharedEndpoint, shared_endpoint
from m2flow.agents.tools import EpisodeFailed
from m2flow.errors import DatasetError, MissingExtra, OptionError, described
from m2flow.recipe import check_count
from m2flow.samples import MAIN

_TASK = "task"
"""Column of a row: its task, as JSON."""
_NO_KEY = "M2FLOW_HAS_NO_KEY"
"""Environment variable with the key of the endpoint, which takes any."""
_OF_INFRASTRUCTURE = ("HarnessError", "ToolsetError", "SandboxError", "InterceptionError", "TunnelError")


def verifiers_rows(environment: str | Mapping[str, object], *, limit: int | None = None) -> list[dict[str, object]]:
    """The tasks of an environment's taskset, as rows for `Dataset`: `prompt` is the task's as text, `task` all of it, as JSON.

    Args:
        environment: as of `verifiers_agent`.
        limit: the first so many; a taskset without an end needs one.
    Raises:
        MissingExtra: verifiers is not installed. OptionError: there is no such environment. DatasetError: a task can't be a row.
    """
    if limit is not None:
        check_count("limit", limit)
    env = _environment(_as_json(environment))
    taskset, kind, config = env.taskset, type(env.taskset).task_type(), env.config.taskset.task
    named = f"the taskset {env.config.taskset.id!r}"
    if limit is None and not taskset.bounded:
        raise DatasetError(f"{named} has no end", now="Say how many: verifiers_rows(..., limit=1000).")
    rows: list[dict[str, object]] = []
    for task in itertools.islice(iter(taskset), limit):
        text = task.data.model_dump_json()
        where = f"task {len(rows)} of {named}"
        if type(task) is not kind or task.config != config:
            raise DatasetError(
                f"{where} is made by a {type(task).__name__} with a configuration of its own, and workers make a {kind.__name__} with "
                "the taskset's",
                now="Put what differs between tasks into their data.",
            )
        if _read(kind, text) != task.data:
            raise DatasetError(f"{where} is another one once it was JSON", now="Let its fields be what JSON can say.")
        rows.append({"prompt": task.data.prompt_text, _TASK: text})
    if not rows:
        raise DatasetError(f"{named} has no tasks", now="Give another split or configuration of the environment.")
    return rows


def _read(kind: Any, text: str) -> Any:
    """The data of a task; None: it is none of this kind."""
    try:
        return kind.data_type().model_validate_json(text)
    except ValueError:
        return None


def verifiers_agent(
    environment: str | Mapping[str, object],
    *,
    runtime: str | Mapping[str, object] | None = None,
    speakers: Mapping[str, str] | None = None,
) -> Agent:
    """An agent that plays an environment of verifiers with the policy, for `policy.rollout` on rows of `verifiers_rows`.

    Args:
        environment: the id of a taskset, the name of its installed package; or a configuration, as the block `[env]` of verifiers has it:
            `{"taskset": {"id": "gsm8k-v1"}, "agent": {"harness": {"id": "null"}, "max_turns": 8}}`.
        runtime: where harnesses run, for agents whose configuration does not say: `subprocess`, `docker`, `prime` and so on, or a mapping
            with its options. Without it verifiers' default, which is a service with a login. In `subprocess` all that a harness lets the
            model run is run by the worker, with its files and network.
        speakers: agents of a multi-agent environment that others play: the agent's name -> the name of a speaker of the rollout.
    Raises:
        MissingExtra: verifiers is not installed. OptionError: there is no such environment, or its configuration is refused.
    """
    wanted = _Wanted(_as_json(environment, runtime), tuple(sorted((speakers or {}).items())))
    env = _environment(wanted.config)
    agents = _agents_of(env.config)
    if unknown := [name for name in wanted.by if name not in agents]:
        raise OptionError(f"speakers names {unknown[0]!r:.60}, and the agents of the environment are {', '.join(agents)}")
    retried = [name for name, one in (("env", env.config), *agents.items()) if one.retries.max_retries or one.retries.rules]
    if retried:
        raise OptionError(
            f"{retried[0]}.retries is set, and what the model said in an attempt that is given up can't be taken back",
            now="Set it to {'max_retries': 0}; rollout(..., failed=...) says what becomes of episodes that failed.",
        )

    async def plays(chat: Chat, row: Any) -> dict[str, float] | None:
        return await _played(wanted, chat, row)

    plays.__name__ = plays.__qualname__ = str(env.config.env_id)
    return Agent.of(plays)


@final
@dataclass(frozen=True)
class _Wanted:
    """An environment, as workers make it."""

    config: str
    """As JSON."""
    speakers: tuple[tuple[str, str], ...]

    @property
    def by(self) -> dict[str, str]:
        return dict(self.speakers)


# ---- what verifiers has


def _as_json(environment: object, runtime: object = None) -> str:
    """A configuration as JSON, which a worker reads again."""
    if isinstance(environment, str):
        environment = {"taskset": {"id": environment}}
    if not isinstance(environment, Mapping):
        now = 'Give the id of a taskset, or a configuration: {"taskset": {"id": "gsm8k-v1"}}.'
        raise OptionError(f"environment is {environment!r:.60}, which names no environment of verifiers", now=now)
    found = dict(environment)
    if runtime is not None:
        named = {"type": runtime} if isinstance(runtime, str) else runtime
        for agent in _agents_of(_resolved(found)):
            own = found.get(agent)
            found[agent] = {"runtime": named, **(own if isinstance(own, Mapping) else {})}
    try:
        return json.dumps(found, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the environment's configuration is no JSON: {error}", now="Let it have texts, numbers, lists, mappings."
        ) from None


def _library() -> Any:
    try:
        import verifiers.v1 as library
    except ImportError as error:
        what = f"environments of verifiers need the package verifiers 0.4 ({error})"
        raise MissingExtra(what, now="Run: pip install 'verifiers>=0.4,<0.5'.") from None
    return library


def _resolved(config: Mapping[str, object]) -> Any:
    library = _library()
    try:
        return library.resolve_env_config(dict(config))
    except ModuleNotFoundError as error:
        raise OptionError(f"verifiers has no such environment: {error}", now="Install its package in the workers' environment.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"verifiers refuses the environment's configuration: {error}",
            now="Mend the field that it names; the environment's README lists its fields.",
        ) from None


def _environment(config: str) -> Any:
    resolved = _resolved(json.loads(config))
    if not resolved.taskset.id:
        raise OptionError("the environment's configuration names no taskset", now='Say which: {"taskset": {"id": "gsm8k-v1"}}.')
    try:
        return _library().load_environment(resolved)
    except (ValueError, TypeError, AttributeError, ModuleNotFoundError) as error:
        raise OptionError(
            f"verifiers can't make the environment {resolved.env_id!r}: {error}",
            now="Install the environment's package, and try it alone with `vf-eval`.",
        ) from None


def _agents_of(config: Any) -> dict[str, Any]:
    """The agents of an environment: by name the configuration of each."""
    kind = _library().AgentConfig
    return {name: value for name, value in config if isinstance(value, kind)}


# ---- an environment of a worker


@final
class _World:
    """An environment that is served, until its event loop ends."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._found: asyncio.Future[tuple[Any, SharedEndpoint]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_usable(self) -> bool:
        return not self._task.done()

    async def _hold(self) -> None:
        try:
            env = await asyncio.to_thread(_environment, self._config)  # The import alone takes seconds.
            async with shared_endpoint() as address, env.serving():
                self._found.set_result((env, address))
                await asyncio.Event().wait()
        except BaseException as error:
            if not self._found.done():
                failed = EpisodeFailed("tool_failed", f"the environment can't begin: {described(error)}")
                failed.__cause__ = error
                self._found.set_exception(failed)
                self._found.exception()  # Nobody may be waiting any more.
            if not isinstance(error, Exception):
                raise

    def ended(self, call: Callable[[object], None]) -> None:
        """Have something called when it has ended."""
        self._task.add_done_callback(call)

    async def ready(self) -> tuple[Any, SharedEndpoint]:
        """The environment, and the address of its harnesses. Raises `EpisodeFailed` if it can't begin; the next episode tries again."""
        return await asyncio.shield(self._found)


_worlds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _World]] = weakref.WeakKeyDictionary()
"""The environments of this worker, by event loop."""


def _world(config: str) -> _World:
    of_loop = _worlds.setdefault(asyncio.get_running_loop(), {})
    if config not in of_loop or not of_loop[config].is_usable:
        of_loop[config] = world = _World(config)
        world.ended(functools.partial(_forget, of_loop, config, world))
    return of_loop[config]


def _forget(of_loop: dict[str, _World], config: str, world: _World, _: object) -> None:
    """Drop an environment that has ended: it knows its event loop, which would stay with it."""
    if of_loop.get(config) is world:
        del of_loop[config]


# ---- an episode


async def _played(wanted: _Wanted, chat: Chat, row: Any) -> dict[str, float] | None:
    """Play one episode. Returns its reward, as an agent does."""
    env, address = await _world(wanted.config).ready()
    task = _task_of(env, row)
    library = _library()
    client = library.EvalClientConfig(base_url=address.base_url, api_key_var=_NO_KEY)
    async with address.episode() as serve:
        agents = _AgentConversations(chat, wanted.by, env.config, serve)
        episode = await env.run_episode(task, library.ModelContext(model=MODEL, client=client), on_trace=agents.take)
        if agents.failure is not None:
            raise agents.failure
        _check(env, episode)  # In here: what fails waits for no turn that is under way.
    return agents.rewards(episode.traces)


def _task_of(env: Any, row: Any) -> Any:
    kind, text = type(env.taskset).task_type(), getattr(row, _TASK, None)
    if not isinstance(text, str):
        raise EpisodeFailed("invalid", f"the row has no {_TASK}, a text of JSON; rows are those of verifiers_rows(...)")
    if (data := _read(kind, text)) is None:
        raise EpisodeFailed("invalid", f"the row's {_TASK} is none of {env.config.taskset.id}: {text:.200}")
    return kind(data, env.config.taskset.task)


@final
class _AgentConversations:
    """The conversations of an episode's agents. Those that the policy plays are trained, each by the reward of its own trace."""

    def __init__(self, chat: Chat, by: Mapping[str, str], config: Any, serve: Callable[[str, Chat], None]) -> None:
        self._chat = chat
        self._by = by
        self._configs = _agents_of(config)
        self._serve = serve
        self._names: dict[str, str] = {}
        """Trace id -> its conversation."""
        self._num: dict[str, int] = {}
        self.failure: EpisodeFailed | None = None

    def take(self, trace: Any) -> None:
        """Give a trace that begins its conversation."""
        agent, config = trace.agent.name, self._configs.get(trace.agent.name)
        if config is not None and config.client is not None:
            return  # It speaks with another endpoint.
        if not trace.agent.trainable and agent not in self._by:
            self.failure = EpisodeFailed(
                "unknown_speaker",
                f"the environment has an agent {agent!r} that is not to be trained; let another policy play it: verifiers_agent(..., "
                f"speakers={{{agent!r}: 'other'}}), and rollout(..., speakers={{'other': its_policy}})",
            )
            raise self.failure
        try:
            made = self._conversation(agent)
        except EpisodeFailed as failure:
            self.failure = failure
            raise
        self._names[trace.id] = made.name
        self._serve(trace.id, made)

    def _conversation(self, agent: str) -> Chat:
        number = self._num[agent] = self._num.get(agent, 0) + 1
        if len(self._configs) == 1 and number == 1 and agent not in self._by:
            return self._chat
        name = f"agent-{agent}" if agent in (MAIN, "reward") else agent
        return self._chat.conversation(name if number == 1 else f"{name}-{number}", by=self._by.get(agent, ""))

    def rewards(self, traces: Sequence[Any]) -> dict[str, float] | None:
        """What the agent returns: the reward with its parts, or one for each conversation; None: the environment gives none."""
        found = {self._names[trace.id]: trace for trace in traces if trace.id in self._names}
        for trace in found.values():
            if left := [name for name, one in trace.rewards.items() if one is None]:
                raise EpisodeFailed("raised", f"the environment computed no {left[0]!r}, a reward of its agent {trace.agent.name!r}")
        if not any(trace.rewards for trace in found.values()):
            return None
        if list(found) == [MAIN]:
            return {"reward": float(found[MAIN].reward), **_parts(found[MAIN])}
        return {name: float(trace.reward) for name, trace in found.items() if trace.rewards}


def _parts(trace: Any) -> dict[str, float]:
    """The rewards and metrics that a trace has, by name; one whose name is taken has a number."""
    found: dict[str, float] = {}
    given = [*((name, one.value) for name, one in trace.rewards.items()), *trace.metrics.items()]
    for name, value in given:
        if value is None or not math.isfinite(value):
            continue  # A metric that is no number is none.
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        found[next(one for one in names if one not in found and one != "reward")] = float(value)
    return found


def _check(env: Any, episode: Any) -> None:
    """Raise `EpisodeFailed` for an episode that has no valid result."""
    late = [trace for trace in episode.traces if trace.is_timeout]
    if episode.is_timeout or late:
        stage = next((str(trace.stop_condition) for trace in late), "the episode")
        raise EpisodeFailed("timed_out", f"the environment's own time-out ended it ({stage})")
    if env.complete(episode):
        return
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if not errors:
        raise EpisodeFailed("raised", "the environment says that it is not complete")
    last = errors[-1]
    how: Any = "tool_failed" if last.type in _OF_INFRASTRUCTURE else "raised"
    raise EpisodeFailed(how, f"{last.type}: {last.message[:2000]}")
