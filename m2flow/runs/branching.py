"""Play a stored episode on from one of its turns, several times: `m2flow branch`.

    ledger.db, segments/ --row of the episode--> Transcript.before(turn) --> EpisodeStart x n
    checkpoint --export--> an embedded rollout engine for each role that speaks --Episodes--> Branched

The flow is traced for the agent and its bounds. The turns before are answered from the record, token by token, and so is what tools gave in
them; `chat.rng` goes on as in the episode. From the turn on the models are asked, with random numbers of the branch. A role that the run
never updates speaks with the model that the flow gives it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.engines.contract import EngineSettings, Generated, RolloutEngine
from m2flow.engines.registry import make_rollout
from m2flow.errors import OptionError
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.protocol import call_semantics
from m2flow.micro.records.checkpoints import export_part, find_part, trained_roles
from m2flow.micro.records.rundir import read_config
from m2flow.micro.records.sample_query import Entry, SampleQuery
from m2flow.micro.worker.engine_host import episodes_of
from m2flow.recipe import Model
from m2flow.runs.entrance import flow_of, resumed_options
from m2flow.samples import Batch, SampleId


@dataclass(frozen=True)
class Branch:
    """One way that the episode went on."""

    reward: float | None
    """None: the agent gave none, or the episode failed."""
    turns: tuple[str, ...]
    """What the models said, with the turns before; as the turns were taken, if one by one."""
    failure: str
    """How it failed; empty if it did not."""
    error: str
    speakers: tuple[str, ...] = ()
    """Who took each turn, of the rollout's `speakers`; empty: the policy."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of each conversation, where the agent returned such."""


@dataclass(frozen=True)
class Branched:
    """Several ways that an episode went on from one of its turns."""

    reward: float | None
    """The episode's reward."""
    num_turns: int
    """Turns of the episode."""
    weights: str
    """Which the branches were made with."""
    branches: tuple[Branch, ...]


def branch(
    run_dir: Path, sample: str, turn: int, num: int, *, step: int | None = None, device: str = "cpu", threads: int | None = None
) -> Branched:
    """Play an episode on from a turn.

    Args:
        sample: its identity as `m2flow samples` prints it: `3/17/2`.
        turn: the first that is taken anew, from 1.
        num: how many times.
        step: with the weights after so many steps; None: the final ones, or the newest.
    Raises:
        OptionError: there is no such episode or turn, or its turns have no order.
        SpecError: there is no such run or checkpoint. FlowLoadError: the run's flow can't be loaded any more.
    """
    entry, row = _stored(run_dir, sample)
    config = read_config(run_dir)
    flow = flow_of(config.flow)
    graph, models, _ = trace(flow, resumed_options(flow, config.options), steps=TRACED_STEPS, seed=config.settings.seed)
    call = _call_of(entry, graph.calls)
    starts = _starts(call, row, sample, turn, num)
    settings = EngineSettings(device=device, threads=threads or os.cpu_count() or 1, max_running=num)
    written = {effect.resource for one in graph.calls for effect in one.writes}
    updated = trained_roles(run_dir) | {role for role in call.speakers if f"{role}.weights" in written}
    with tempfile.TemporaryDirectory(prefix="m2flow-branch-") as directory:
        of_roles = {role: models[role] for role in call.speakers}
        for role in updated.intersection(of_roles):
            export_part(find_part(run_dir, step, role), Path(directory) / role)
            of_roles[role] = replace(models[role], path=str(Path(directory) / role), init="pretrained", lora=None, revision=None)
        with _engines(of_roles, settings) as (own, *others):
            found = play_on(own, starts, others)
    weights = "of the end of the run" if step is None else f"after step {step}"
    return Branched(_own_reward(row), len(_record(row)["turns"]), weights, found)


def _own_reward(row: Batch) -> float | None:
    """What the episode's agent gave the policy, as of a branch. The ledger has what was rewarded last: with speakers, perhaps a rival's."""
    reward = float(row.dense("reward")[0])
    return None if math.isnan(reward) else reward


def _stored(run_dir: Path, sample: str) -> tuple[Entry, Batch]:
    parts = sample.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise OptionError(f"{sample!r:.60} is no identity of a sample", now="See them: m2flow samples RUN")
    with SampleQuery(run_dir) as query:
        entry = next(query.entries(f"sample = '{sample}'", limit=1), None)
        if entry is None:
            raise OptionError(f"{run_dir} has no sample {sample}", now="See them: m2flow samples RUN")
        row = query.rows_of(SampleId(*map(int, parts)).pack())
    if "episode" not in row:
        raise OptionError(f"{sample} is no episode of an agent: {entry.call} made it", now="Name a sample of a call of `rollout`.")
    return entry, row


def _call_of(entry: Entry, calls: Sequence[Call]) -> Call:
    """The call of the flow that played an episode: of another step it may be, but of the same line."""
    known = [call for call in calls if call.name == entry.call and "agent" in call.options]
    found = [call for call in known if call.site.describe() == entry.site] or known
    if not found:
        raise OptionError(
            f"the first steps of the flow have no {entry.call}, which made the episode", now="Is the flow another one by now?"
        )
    return found[0]


def _starts(call: Call, row: Batch, sample: str, turn: int, num: int) -> list[EpisodeStart]:
    (request,) = call_semantics.continuations(call, row)
    (start,) = episodes_of(call, [request], row, is_stopped=True)
    assert start.stopped is not None
    try:
        kept = [start.stopped.before(turn) for _ in range(num)]
    except ValueError as error:
        raise OptionError(
            f"episode {sample} has no branch at turn {turn}: {error}", now="Give a turn of the episode, as `m2flow samples` shows them."
        ) from None
    of = SampleId.unpack(request.id)
    fresh = replace(request, prefix=(), prefix_logprobs=(), prefix_versions=(), prefix_kv_stale=(), prefix_masks=())
    return [
        replace(start, request=replace(fresh, id=replace(of, index=at).pack()), stopped=each, branch=f"{turn}.{at}")
        for at, each in enumerate(kept)
    ]


@contextlib.contextmanager
def _engines(models: Mapping[str, Model], settings: EngineSettings) -> Iterator[list[Episodes]]:
    """An engine for each role, made one after the other; in this order."""
    engines, roles = dict[str, RolloutEngine](), dict[str, Episodes]()
    with contextlib.ExitStack() as stack:
        for role, model in models.items():
            engines[role] = make_rollout("embedded", model, settings)
            engines[role].start()
            stack.callback(engines[role].stop)
        loop = EventLoop()
        stack.callback(loop.close)
        for role, engine in engines.items():
            roles[role] = Episodes(engine, loop, roles)
        yield list(roles.values())


def play_on(episodes: Episodes, starts: Sequence[EpisodeStart], others: Iterable[Episodes] = ()) -> tuple[Branch, ...]:
    """Play episodes to their ends; in the order in which they are given. The others are those of the roles that speak in them, too."""
    episodes.begin(starts)
    found: dict[int, Branch] = {}
    others = tuple(others)
    while len(found) < len(starts):
        for made in episodes.step():
            found[made.id] = _branch_of(made)
        for one in others:
            if one.num_unfinished:
                one.step()  # It has turns of these episodes alone, which end in its step and are heard of in that of `episodes`.
    return tuple(found[start.request.id] for start in starts)


def _branch_of(made: Generated) -> Branch:
    record: Any = made.columns["episode"]
    reward, failure = float(made.columns["reward"]), str(made.columns["failure"])  # type: ignore[arg-type]
    said = _as_taken(record)
    return Branch(
        reward=None if failure or math.isnan(reward) else reward,
        turns=tuple(text for text, _ in said),
        failure=failure,
        error=str(record.get("error", "")),
        speakers=tuple(by for _, by in said) if record.get("speakers") else (),
        rewards=dict(record.get("rewards") or {}),
    )


def _as_taken(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The text of each turn and who said it; in the order in which they were taken, or by conversation where there was none."""
    texts = [str(turn["text"]) for turn in record["turns"]]
    named: Sequence[Mapping[str, Any]] = record.get("conversations") or ()
    if not named:
        return [(text, "") for text in texts]
    of: dict[str, deque[tuple[str, str]]] = {one["name"]: deque() for one in named}
    left = iter(texts)
    for one in named:
        of[one["name"]] += [(text, one.get("by", "")) for text in itertools.islice(left, one["num_turns"])]
    order = record.get("order") or [one["name"] for one in named for _ in range(one["num_turns"])]
    return [of[name].popleft() for name in order]


def _record(row: Batch) -> dict[str, Any]:
    found: Any = row.ragged("episode").item(0)
    return dict(found)
