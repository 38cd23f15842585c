"""Describe what a step of a flow demands: its calls with their sizes, and rollout times under the length distribution.

    MacroGraph, lengths --workload_of--> Workload --> search
    Lengths --draw--> Batch --(DecodeCost, instances)--> time of the rollout and its release of groups
    Workload, Lengths or sampling limits --extents_of--> Extent of each role --> decode cost at the mean context, bytes of a sample's cache

A call on handles alone (`rewards - beta * kl`) costs next to nothing and is contracted away: its dependents depend on its inputs.

A rollout of W tokens, longest sample L, on n instances with B slots each takes

    T = max( t0 Z + t1 W/n,  k-longest bound ) + prefill/n + entering and leaving

with work spread evenly and the longest sample anywhere, in the Z decode steps in which samples end that begin in order (`InOrder`): L where
there are slots for all. Groups of a refill begin as verdicts allow it. A group is released when its last member has ended, of a refill when
verdicts have made it certain (`Refill`). The search adds up times as straight lines, so a release is given by the line from (0, l) to
(last chunk, T) that no chunk is later than: a plan can keep what it promises, and for a convex release (a long tail, all samples running
from the start) nothing is lost. Given lengths are those of the models that the step trains; a judge uses all that it is allowed to.

Turns of a speaker that is pinned apart (`m2flow.micro.lowering.placement.is_apart`) are a generation beside the rollout: what needs the
episodes waits for both. Where recorded episodes say how much others speak (`Away`), each of the two decodes its share s of the tokens, and

    T >= s (t0 L + t1 W/n) + what the longest episode waits for others + prefill/n + entering and leaving

since an episode is in one batch at a time. Without any, each decodes all tokens, and no wait is counted. What it waits for tools and for
its agent is counted likewise, by a line through what recorded episodes of other lengths waited.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError, TraceError, did_you_mean
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.refill import Coming, Refill
from m2flow.micro.lowering.passes import accumulation_unit, legal_stages
from m2flow.micro.lowering.placement import is_apart
from m2flow.micro.protocol.cost_terms import DRAWS_PER_GROUP, EngineId, FunctionCost
from m2flow.planner.model_shapes import ModelShape
from m2flow.recipe import Sampling
from m2flow.rollout_scheduling.decode_model import InOrder, judged_steps
from m2flow.rollout_scheduling.lengths import Lengths
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec

Work = Literal["generate", "forward", "update", "function"]


class Away(msgspec.Struct, frozen=True):
    """What others, on devices of their own, do in a rollout's episodes, and what these wait for it, and for tools."""

    share: float = 0.0
    """Of an episode's tokens, those that others speak."""
    token_s: float = 0.0
    """Seconds that an episode waits for others and for tools, for each of all its tokens."""
    episode_s: float = 0.0
    """Seconds that it waits besides: for prefill there, for the ways there and back, and for tools whether it is long or short."""

    @property
    def own(self) -> float:
        """The share of the tokens that is decoded here."""
        return 1.0 - self.share


class CallLoad(msgspec.Struct, frozen=True):
    """A call of the step with its sizes."""

    name: str
    """Unique in the step: `policy.generate`, or `policy.generate@31` (the line) where there are several."""
    work: Work
    engine: EngineId | None
    """The engine; None for functions, which need no device."""
    num_prompts: int
    num_per_prompt: int
    unit: Literal["sample", "group", "minibatch", "batch"]
    """The smallest set of samples that it may run on; an update accumulates groups."""
    is_barrier: bool
    """Whether it starts only when all of its input is there."""
    after: tuple[str, ...]
    """Calls of this step that it depends on, by data or effect."""
    num_epochs: int = 1
    num_optimizer_steps: int = 0
    """Optimiser steps of an update: mini-batches times epochs."""
    token_budget: int = 0
    """Tokens of a micro-batch."""
    max_new_tokens: int = 0
    """The token limit of a generate call."""
    num_kept: int = 0
    """Groups that a refill keeps of its prompts; 0: it is none."""
    prompt_bytes: float = 0.0
    """Mean size of the prompts' texts, of a generate call on a dataset."""
    is_played: bool = False
    """Whether its samples are episodes of an agent."""
    beside: str = ""
    """The call in whose episodes these turns are, of a speaker on devices of its own: it takes no turns on devices with that call."""
    away: Away = Away()
    """Of a rollout with such speakers, or of the turns of one: what is done elsewhere."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_per_prompt


def legal_chunks(call: CallLoad) -> tuple[int, ...]:
    """The chunk sizes that a call may have, in samples."""
    unit = _unit(call)
    sizes = [unit]
    while sizes[-1] * 2 < call.num_samples:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([min(size, call.num_samples) for size in sizes] + [call.num_samples]))


def _unit(call: CallLoad) -> int:
    if call.unit == "batch":
        return call.num_samples
    if call.unit == "minibatch":
        return max(1, call.num_samples // num_minibatches(call))
    return 1 if call.unit == "sample" else call.num_per_prompt


def outside_call(engine: EngineId) -> str:
    """The name of the placeholder call of an engine that only other steps need."""
    return f"{engine} in other steps"


def num_minibatches(call: CallLoad) -> int:
    return max(1, call.num_optimizer_steps // max(1, call.num_epochs))


class Workload(msgspec.Struct, frozen=True):
    """The calls of a step in program order, which is a topological order."""

    flow: str
    calls: tuple[CallLoad, ...]
    staleness: int = 0
    outside: tuple[EngineId, ...] = ()
    """Engines that are used only outside of this step: they need a place, but no time in the step."""
    step: int = 0
    """The number of the traced step: the first of the most frequent kind."""
    num_alike: int = 1
    num_traced: int = 1
    """Steps that were traced, and how many of them have the same calls."""

    def call(self, name: str) -> CallLoad:
        return next(call for call in self.calls if call.name == name)

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """The engines in the order of their first call."""
        return tuple(dict.fromkeys(call.engine for call in self.calls if call.engine is not None))


def workload_of(graph: MacroGraph, spec: ClusterSpec, *, draws_per_group: float = DRAWS_PER_GROUP) -> Workload:
    """Extract the typical step of a traced flow; an evaluation in every tenth step is not part of it.

    Args:
        graph: some steps of the flow, with what comes before and after them. Without an outermost iterator, all calls are one step.
        draws_per_group: how many prompts a refill draws for each group that it keeps.
    Raises:
        TraceError: the step makes no call that takes time.
        SpecError: `functions.latency_s` names a call that the flow does not make.
    """
    _check_latencies(spec, {call.name for call in graph.calls if call.engine == "function" and not _is_free(call)})
    steps = _by_step(graph)
    kept = {number: [call for call in calls if not _is_free(call)] for number, calls in steps.items()}
    shapes = {number: tuple((call.name, str(call.site), call.most_rows) for call in calls) for number, calls in kept.items()}
    alike = Counter(shapes.values())
    step = max(steps, key=lambda number: (bool(kept[number]), alike[shapes[number]], len(kept[number]), -number))
    if not kept[step]:
        raise TraceError(
            f"a step of {graph.flow} has nothing to plan: it neither generates, nor updates, nor calls a function",
            now="Plan a flow that calls policy.generate, update or a function in its loop.",
        )
    loads = _Step(graph, steps[step], spec, draws_per_group).loads()
    inside = {load.engine for load in loads}
    timed = [call for call in graph.calls if not _is_free(call)]
    every = [engine for call in timed for engine in (_engine(call), *_engines_apart(call, spec))]
    others = [engine for engine in every if engine is not None and engine not in inside]
    return Workload(graph.flow, loads, graph.staleness, tuple(dict.fromkeys(others)), max(step, 0), alike[shapes[step]], len(steps))


def _check_latencies(spec: ClusterSpec, names: set[str]) -> None:
    for name in spec.functions.latency_s:
        if name not in names:
            now = did_you_mean(name, sorted(names), f"It has {', '.join(sorted(names)) or 'none'}.")
            where = spec.where("functions", "latency_s", name)
            raise SpecError(f"functions.latency_s.{name}: the flow has no such call on a function", where=where, now=now)


def _by_step(graph: MacroGraph) -> dict[int, list[Call]]:
    """Group the calls by step; a flow without steps is one step."""
    steps: dict[int, list[Call]] = {}
    for call in graph.calls:
        steps.setdefault(call.step, []).append(call)
    return {number: calls for number, calls in steps.items() if number >= 0} or steps


def _is_free(call: Call) -> bool:
    """Whether a call takes next to no time: a dataset read, arithmetic on columns, an in-place copy of weights."""
    return call.engine == "source" or call.options.get("style") == "columns" or call.method == "copy_of"


def _engine(call: Call) -> EngineId | None:
    return EngineId(call.role, call.engine) if call.engine in ("rollout", "train") else None


def _engines_apart(call: Call, spec: ClusterSpec) -> list[EngineId]:
    """The engines of those who speak in a call's episodes from devices of their own."""
    speakers = call.speakers[1:] if call.engine == "rollout" else ()
    return [EngineId(role, "rollout") for role in speakers if is_apart(call.role, role, spec)]


class _Step:
    """Converts the calls of one step, contracting free ones."""

    def __init__(self, graph: MacroGraph, calls: Sequence[Call], spec: ClusterSpec, draws_per_group: float) -> None:
        self._graph = graph
        self._calls = {call.ordinal: call for call in graph.calls}
        self._step = tuple(calls)
        self._spec = spec
        self._draws = draws_per_group
        own = MacroGraph(graph.flow, self._step)
        self._stages = dict(zip([call.ordinal for call in calls], legal_stages(own), strict=True))
        links = own.links()
        self._needs: dict[int, list[int]] = {call.ordinal: [] for call in calls}
        for before in sorted(self._needs):
            for ordinal in links[before]:
                self._needs[ordinal].append(before)

    def loads(self) -> tuple[CallLoad, ...]:
        timed = [call for call in self._step if not _is_free(call)]
        names = self._names(timed)
        loads = [load for call in timed for load in self._with_speakers(call, self._load(call, names))]
        beside = {load.name: [one.name for one in loads if one.beside == load.name] for load in loads}
        return tuple(
            msgspec.structs.replace(load, after=(*load.after, *(name for before in load.after for name in beside[before])))
            for load in loads
        )

    def _with_speakers(self, call: Call, load: CallLoad) -> list[CallLoad]:
        """A call, and the turns in its episodes of those who have devices of their own."""
        apart = _engines_apart(call, self._spec)
        return [
            load,
            *(msgspec.structs.replace(load, name=f"{load.name} by {e.role}", engine=e, is_played=False, beside=load.name) for e in apart),
        ]

    def _load(self, call: Call, names: dict[int, str]) -> CallLoad:
        stage = self._stages[call.ordinal]
        after, waits = self._before(call)
        prompts, n = self._size(call)
        load = CallLoad(
            name=names[call.ordinal],
            work=self._work(call),
            engine=_engine(call),
            num_prompts=prompts,
            num_per_prompt=n,
            unit=stage.unit,
            is_barrier=stage.is_barrier or waits,
            after=tuple(names[ordinal] for ordinal in sorted(after)),
            is_played="agent" in call.options,
            num_kept=cast(int, call.options["refill"]) if call.is_gated else 0,
        )
        if call.method == "update":
            size, epochs = call.options["minibatch_size"], cast(int, call.options["epochs"])
            minibatches = math.ceil(prompts / size) if isinstance(size, int) else 1
            unit = cast(Literal["sample", "group"], accumulation_unit(call).value)
            load = msgspec.structs.replace(load, unit=unit, num_epochs=epochs, num_optimizer_steps=epochs * max(minibatches, 1))
        if call.engine == "train":
            load = msgspec.structs.replace(load, token_budget=self._spec.train.token_budget)
        sampling = call.options.get("sampling")
        if isinstance(sampling, Sampling):
            load = msgspec.structs.replace(load, max_new_tokens=sampling.max_new_tokens, prompt_bytes=self._prompt_bytes(call))
        return load

    def _work(self, call: Call) -> Work:
        if call.engine == "rollout":
            return "generate"
        if call.engine == "train":
            return "update" if call.method == "update" else "forward"
        return "function"

    def _before(self, call: Call) -> tuple[set[int], bool]:
        """The timed calls that a call depends on, directly or through free ones, and whether one of the free ones is a barrier."""
        found: set[int] = set()
        waits = False
        todo = [(before, False) for before in self._needs[call.ordinal]]
        seen = set(todo)
        while todo:
            ordinal, through_barrier = todo.pop()
            before = self._calls[ordinal]
            if not _is_free(before):
                found.add(ordinal)
                waits = waits or through_barrier
                continue
            is_barrier = through_barrier or (before.engine == "function" and self._stages[ordinal].is_barrier)
            further = {(one, is_barrier) for one in self._needs[ordinal]} - seen
            seen |= further
            todo += further
        return found, waits

    def _size(self, call: Call) -> tuple[int, int]:
        """(prompts, samples for each): for a refill the expected candidates, for over-sampling all that begin."""
        n = cast(int, self._origin(call).options.get("n", 1))
        if call.is_gated:
            count = cast(int, call.options["refill"])
            return min(math.ceil(count * self._draws), max(call.most_candidates // n, count)), n
        rows = call.most_candidates if call.engine == "rollout" else call.most_rows
        return math.ceil(rows / n), n

    def _origin(self, call: Call) -> Call:
        """The generate call whose samples a call works on; a generation, or a call on a dataset's rows, is its own."""
        while call.engine != "rollout":
            ref = call.input("samples") or call.input("prompts") or next((ref for _, ref in call.inputs), None)
            if ref is None or ref.call not in self._calls:
                break
            call = self._calls[ref.call]
        return call

    def _prompt_bytes(self, call: Call) -> float:
        while call.engine != "source":
            ref = call.input("prompts") or call.input("samples") or next((ref for _, ref in call.inputs), None)
            if ref is None or ref.call not in self._calls:
                return 0.0
            call = self._calls[ref.call]
        rows = call.options.get("rows")
        known = rows.ragged("prompt").lengths if isinstance(rows, Batch) and "prompt" in rows else ()
        return float(np.mean(known)) if len(known) else 0.0

    def _names(self, timed: Sequence[Call]) -> dict[int, str]:
        """A unique name: with the line where there are several calls of this name, and a number where a line has several."""
        count = Counter(call.name for call in timed)
        names, turns = dict[int, str](), Counter[str]()
        for call in timed:
            turns[name := call.name if count[call.name] == 1 else f"{call.name}@{call.site.line}"] += 1
            names[call.ordinal] = name if turns[name] == 1 else f"{name}#{turns[name]}"
        return names


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ENOUGH_SAMPLES = 512
"""Least number of samples drawn; smaller batches are drawn several times, since their longest sample varies."""
_MOST_DRAWS = 8
_REFILLS = 3
"""Random choices of the groups that a refill keeps, over which its time is averaged; up to twice the prompts expected may be drawn."""
_MOST_POINTS = 96
"""Points of a release, and values of k in the k-longest bound."""


class Draws(Protocol):
    """The part of `m2flow.rollout_scheduling.lengths.Lengths` that a batch uses."""

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> npt.NDArray[np.int64]: ...

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, eq=False)
class Instances:
    """Ways to run a rollout; arrays with an entry for each way."""

    step_s: FloatArray
    sample_s: FloatArray
    prefill_token_s: FloatArray
    max_running: FloatArray
    num: FloatArray
    """Instances."""
    enter_leave_s: FloatArray
    """Seconds for each sample that enters or leaves."""
    handover_s: FloatArray
    gather_s: FloatArray

    @property
    def slots(self) -> FloatArray:
        return self.num * self.max_running


@dataclass(frozen=True, eq=False)
class Draw:
    """The lengths of one step."""

    responses: IntArray
    """[P, G]."""
    prompts: IntArray
    """[P]."""
    away: Away = Away()  # noqa: RUF009
    num_kept: int = 0
    """As of `CallLoad`."""

    _known: dict[int, tuple[Instances, FloatArray]] = field(default_factory=dict, repr=False)
    """Cache of `seconds` by the id of the ways, which are kept alive; used by itself and for releases."""

    @cached_property
    def _ascending(self) -> IntArray:
        return np.sort(self.responses.ravel())

    @cached_property
    def _longest_tokens(self) -> FloatArray:
        """Cumulative lengths: of the longest sample, of the two longest, and so on."""
        return np.cumsum(self._ascending[::-1], dtype=np.float64)

    def longest_alone_s(self, ways: Instances) -> FloatArray:
        """Lower bound of the longest sample, whose tokens are sequential: (t0 + t1) L."""
        return (ways.step_s + ways.sample_s) * int(self.responses.max(initial=0)) * self.away.own

    def k_longest_s(self, ways: Instances) -> FloatArray:
        """The k-longest bound, max_k (L1 + ... + Lk) / R_k: the k longest samples at the best rate for k samples, with free migration.

        Source: as in `m2flow.rollout_scheduling.decode_model.k_longest_s`, at some of the k.
        """
        k = _spread(len(self._ascending))
        tokens = self._longest_tokens[k]
        active = np.minimum(k[None, :] + 1.0, ways.slots[:, None])
        whole = np.floor(active / ways.num[:, None])
        rest = active - whole * ways.num[:, None]
        t0, t1 = ways.step_s[:, None], ways.sample_s[:, None]
        rates = rest * (whole + 1) / (t0 + t1 * (whole + 1)) + (ways.num[:, None] - rest) * whole / (t0 + t1 * whole)
        return np.asarray((tokens[None, :] / rates).max(axis=1)) * self.away.own

    def seconds(self, ways: Instances) -> FloatArray:
        """Seconds of the rollout for each way."""
        if id(ways) in self._known:
            return self._known[id(ways)][1]
        tokens, longest = float(self.responses.sum()), float(self.responses.max(initial=0))
        even = (ways.step_s * self._decode_steps(ways.slots) + ways.sample_s * tokens / ways.num) * self.away.own
        decode = np.maximum(even, self.k_longest_s(ways))
        if waits_s := longest * self.away.token_s + self.away.episode_s:
            each = np.minimum(tokens / ways.num, longest * ways.max_running)
            decode = np.maximum(decode, (ways.step_s * longest + ways.sample_s * each) * self.away.own + waits_s)
        each = self.responses.size / ways.num
        handovers = np.minimum(each, np.divide(decode, ways.gather_s, out=np.full_like(decode, np.inf), where=ways.gather_s > 0))
        seconds = np.asarray(decode + self.prefill_s(ways) + each * ways.enter_leave_s + handovers * ways.handover_s)
        self._known.clear()
        self._known[id(ways)] = ways, seconds
        return seconds

    @cached_property
    def _in_order(self) -> InOrder:
        return InOrder(self._ascending)

    @cached_property
    def _refill(self) -> tuple[float, FloatArray]:
        """Decode steps of a refill, and the shares of them at which its groups are certain to be kept, ascending, [groups]."""
        longest, rng = np.tile(self.responses.max(axis=1), 2), np.random.default_rng(len(self.prompts))

        def judge(position: int, steps: float) -> int:
            refill.judge(position, bool(is_kept[position]))
            given.extend([steps] * len(coming.more()))
            return 0 if refill.end() else refill.num_allowed

        found, shares = 0.0, np.zeros(self.num_kept)
        for _ in range(_REFILLS):
            refill, is_kept = Refill(len(longest), self.num_kept), rng.random(len(longest)) < self.num_kept / len(self.prompts)
            coming, given = Coming(refill), list[float]()
            steps = judged_steps(longest, refill.num_allowed, judge)
            found += steps / _REFILLS
            shares += np.array(given + [steps] * (self.num_kept - len(given))) / max(steps, 1.0) / _REFILLS
        return found, shares

    def _decode_steps(self, slots: FloatArray) -> FloatArray:
        """Decode steps until the last sample ends, where samples begin in the order of their prompts."""
        found = self._in_order.steps(slots)
        return np.maximum(found, self._refill[0]) if self.num_kept else found

    def prefill_s(self, ways: Instances) -> FloatArray:
        """Seconds of prefill; a group's prompt is prefilled once."""
        return np.asarray(float(self.prompts.sum()) / ways.num * ways.prefill_token_s)

    @cached_property
    def _together(self) -> tuple[FloatArray, FloatArray]:
        """Tokens of each group's longest response, and of all responses so far where all are decoded together, [P] each."""
        groups, lengths = self.responses.max(axis=1).astype(np.float64), self._ascending.astype(np.float64)
        below = np.searchsorted(lengths, groups, side="right")
        return groups, np.concatenate([[0.0], np.cumsum(lengths)])[below] + groups * (len(lengths) - below)

    def releases_s(self, ways: Instances) -> FloatArray:
        """Release times of the first, second, ... group, of a refill those that it keeps, [ways, P], ascending; the last at `seconds`."""
        if self.num_kept:
            return np.asarray(self.seconds(ways)[:, None] * self._refill[1])
        groups, done_together = self._together
        tokens, num = float(self._ascending.sum()), len(self._ascending)
        queued = np.maximum(0.0, np.arange(len(groups))[None, :] / len(groups) - ways.slots[:, None] / num)
        ends = queued * tokens / ways.slots[:, None] + groups[None, :]
        done_in_waves = np.minimum(ends * ways.slots[:, None], tokens)
        done = np.where((ways.slots >= num)[:, None], done_together[None, :], done_in_waves)
        seconds = np.sort(ways.step_s[:, None] * ends + ways.sample_s[:, None] * done / ways.num[:, None], axis=1)
        return np.asarray(seconds * (self.seconds(ways) / seconds[:, -1])[:, None])


class BatchTimes:
    """Rollout times of the samples that a call works on, averaged over draws."""

    def __init__(self, call: CallLoad, lengths: Draws, *, limit: int = 0, seed: int = 0) -> None:
        """`limit`: tokens at which responses are truncated; 0: only at the cap of the lengths."""
        num_draws = max(1, min(_MOST_DRAWS, _ENOUGH_SAMPLES // max(1, call.num_samples)))
        shape = call.num_prompts, call.num_per_prompt

        def draw(step: int) -> Draw:
            responses = _cut(lengths.draw(*shape, seed, step=step), limit)
            return Draw(responses, lengths.draw_prompts(call.num_prompts, seed, step=step, n=shape[1]), call.away, call.num_kept)

        self._draw = functools.cache(draw)
        self._together: tuple[Draw, ...] = ()
        """Of several batches at once, each of them one draw."""
        self.draws = tuple(draw(step) for step in range(num_draws))
        self.num_samples = call.num_samples
        whole = np.concatenate([(draw.responses + draw.prompts[:, None]).ravel() for draw in self.draws]).astype(np.float64)
        self.mean_tokens = float(whole.mean()) if len(whole) else 0.0
        """Mean tokens of a sample with its prompt."""
        self._ascending = np.sort(whole)
        self.mean_square = float((whole * whole).mean()) if len(whole) else 0.0

    def longest_of(self, nums: FloatArray) -> FloatArray:
        """Tokens of the longest of so many samples with their prompts: the quantile num/(num + 1) of all."""
        last = len(self._ascending) - 1
        at = np.minimum(last, (nums / (nums + 1) * (last + 1)).astype(np.int64))
        return self._ascending[at] if last >= 0 else np.zeros(len(nums))

    def several(self, num: int) -> tuple[Draw, ...]:
        """At least so many draws, the batch's own first, for choices that must suit different steps."""
        return self.draws + tuple(self._draw(step) for step in range(len(self.draws), num))

    def at_once(self, num: int) -> BatchTimes:
        """The rollout of so many batches together, which all leave at its end."""
        every, found = self.several(max(num, len(self.draws) // num * num)), copy.copy(self)
        found._together = ()
        for first in range(0, len(every) // num * num, num):
            some = every[first : first + num]
            responses, prompts = (np.concatenate([getattr(one, name) for one in some]) for name in ("responses", "prompts"))
            found._together += (Draw(responses, prompts, some[0].away, num * some[0].num_kept),)
        return found

    def rollout_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.seconds(ways) for draw in self._together or self.draws], axis=0))

    def longest_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.longest_alone_s(ways) for draw in self.draws], axis=0))

    def k_longest_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.k_longest_s(ways) for draw in self.draws], axis=0))

    def last_sample_s(self, ways: Instances) -> FloatArray:
        """Seconds of the longest sample in a full batch: from the last prompt in to the last sample out."""
        share = np.minimum(ways.max_running, np.ceil(self.draws[0].responses.size / ways.num))
        longest = float(np.mean([draw.responses.max(initial=0) for draw in self.draws]))
        away = self.draws[0].away
        waits_s = longest * away.token_s + away.episode_s
        alone = np.asarray((ways.step_s + ways.sample_s * share) * longest * away.own + waits_s)
        return alone if not self._together else self.rollout_s(ways)

    def first_chunks_s(self, ways: Instances, groups_in_chunk: Sequence[int]) -> FloatArray:
        """Start of the linear release that is nowhere earlier than the true one, in chunks of whole groups, [ways, chunks]."""
        if self._together:
            return np.repeat(self.rollout_s(ways)[:, None], len(groups_in_chunk), axis=1)
        found = []
        for draw in self.draws:
            releases_s = draw.releases_s(ways)
            found.append(np.stack([_chord(releases_s, groups) for groups in groups_in_chunk], axis=1))
        return np.asarray(np.mean(found, axis=0))


def _cut(responses: IntArray, limit: int) -> IntArray:
    return np.minimum(responses, limit) if limit else responses


def _chord(releases_s: FloatArray, step: int) -> FloatArray:
    """The least l with l + (T - l) k/K >= r_k for all chunks k = 1 .. K."""
    num = releases_s.shape[1]
    last = releases_s[:, -1]
    if step >= num:
        return np.zeros_like(last)
    at, share = _chord_points(num, step)
    return np.asarray(((releases_s[:, at] - last[:, None] * share) / (1 - share)).max(axis=1).clip(0.0, last))


@functools.lru_cache(maxsize=256)
def _chord_points(num: int, step: int) -> tuple[IntArray, FloatArray]:
    """Indices of the groups that complete chunks of `step` groups, at most `_MOST_POINTS`, and their shares of the batch; not the last."""
    at = np.append(np.arange(step - 1, num - 1, step), num - 1)
    at = at[_spread(len(at))][:-1]
    return at, (at + 1) / num


@functools.lru_cache(maxsize=256)
def _spread(num: int) -> IntArray:
    """Indices from the first to the last; if there are many, a geometric and an even selection."""
    if num <= _MOST_POINTS:
        return np.arange(num)
    few = np.unique(np.geomspace(1, num, _MOST_POINTS // 2).astype(np.int64) - 1)
    even = np.linspace(0, num - 1, _MOST_POINTS // 2).astype(np.int64)
    return np.union1d(few, even)


# ---- how times add up


@dataclass(frozen=True, eq=False)
class Times:
    """The times of parts, with the pace at which they work; arrays of one shape."""

    first: FloatArray
    total: FloatArray
    last: FloatArray
    busy: FloatArray
    grain: FloatArray
    """The share of the batch that is needed to begin, and that is handed on at a time."""
    rigid: FloatArray
    """`FREE`, `MOVES` or `DRAINS`."""

    def at(self, rows: IntArray) -> Times:
        return Times(*(time[rows] for time in self.all))

    @property
    def all(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        return self.first, self.total, self.last, self.busy, self.grain, self.rigid

    def later(self, seconds: FloatArray | float) -> Times:
        """The same with something that comes after all, once."""
        return Times(self.first, self.total + seconds, self.last + seconds, self.busy + seconds, self.grain, self.rigid)


FREE, MOVES, DRAINS = 0.0, 1.0, 2.0
"""How a part may share its devices with another: trainers that stay on them can alternate with other trainers, chunk by chunk; all else
works to its end before another begins. Of a part that drains some begins only when some other has ended, so it hands on nothing before."""


def chunks_of(calls: Sequence[CallLoad]) -> tuple[int, ...]:
    """The chunk sizes that are legal for all of some calls, ascending."""
    if not any(call.num_samples for call in calls):
        return (1,)
    return tuple(sorted(set.intersection(*(set(legal_chunks(call)) for call in calls)))) or (max(c.num_samples for c in calls),)


@functools.lru_cache(maxsize=256)
def chunks_and_grains(calls: tuple[CallLoad, ...]) -> tuple[tuple[int, ...], FloatArray]:
    """The chunk sizes of calls, and what share of the batch each is."""
    some, chunks = [call for call in calls if call.num_samples], chunks_of(calls)
    each = [[min(1.0, chunk / call.num_samples, 1 / num_minibatches(call)) for chunk in chunks] for call in some]
    return chunks, np.max(each, axis=0)


def drains(calls: Sequence[CallLoad]) -> bool:
    """Whether of calls on one engine some begin only when others have ended."""
    return len(calls) > 1 and (any(call.work == "generate" for call in calls) or any(call.is_barrier for call in calls[1:]))


def rigid_of(calls: Sequence[CallLoad], is_swapped: FloatArray) -> FloatArray:
    """How a leaf may share its devices with others, in options that are swapped (1) or stay (0)."""
    if drains(calls):
        return np.full_like(is_swapped, DRAINS)
    return np.full_like(is_swapped, MOVES) if any(call.work == "generate" for call in calls) else np.where(is_swapped > 0, MOVES, FREE)


def zero_times() -> Times:
    nothing = np.zeros(())
    return Times(*[nothing] * 6)


Factor = float | FloatArray


def start_of(fed: Times, grain: FloatArray) -> FloatArray:
    """When a share of the input is there."""
    return np.asarray(fed.first + (fed.total - fed.first) * grain)


def end_of(b: Times, grain: FloatArray) -> FloatArray:
    """Last sample in -> last chunk out, of input that comes in shares of this size, at least B's own."""
    return np.asarray(np.minimum(b.total, b.last + grain * b.total))


def more_last(grain: FloatArray) -> FloatArray:
    """G (1 - g): of the shorter one of two linked parts, what a last share takes beside the share of both together, T >= TA + g TB.

    From a half on it stays that of a half, so that it does not fall; a part that hands on all at once has all to do after its last input.
    """
    part = np.minimum(grain, 0.5)
    return np.asarray(part * (1 - part))


def side_by_side(a: Times, fed: Times, b: Times, *, is_linked: bool, waits: bool, slowdowns: tuple[Factor, Factor] = (1.0, 1.0)) -> Times:
    """Times of A and B on disjoint devices. `fed` are the times of B's input: A with the functions after it.

    `slowdowns`: the factors by which A and B are slower while the other works, which is as long as the shorter one lasts.
    """
    rigid = np.maximum(np.maximum(a.rigid, b.rigid), MOVES)
    if waits:
        times = fed.total + b.first, fed.total + b.total, fed.last + b.total, np.maximum(fed.busy, b.busy)
        return Times(*times, np.maximum(fed.grain, b.grain), np.full_like(rigid, DRAINS))
    both = np.minimum(a.total, b.total)
    more_a, more_b = ((factor - 1) * both for factor in slowdowns)
    total = total_side_by_side(a, fed, b, is_linked=is_linked, waits=waits, more=(more_a, more_b))
    busy = np.maximum(fed.busy + more_a, b.busy + more_b)
    grain = np.maximum(fed.grain, b.grain)
    if not is_linked:
        return Times(np.maximum(a.first, b.first), total, np.maximum(a.last, b.last), busy, grain, rigid)
    start, end = start_of(fed, grain), end_of(b, grain)
    drained = np.minimum(fed.total + b.first, total)
    first = np.where(b.rigid == DRAINS, drained, np.minimum(start, fed.first + end) + b.first)
    return Times(first, total, fed.last + b.last + more_last(grain) * np.minimum(a.total, b.total), busy, grain, rigid)


def total_side_by_side(
    a: Times, fed: Times, b: Times, *, is_linked: bool, waits: bool, more: tuple[Factor, Factor] = (0.0, 0.0)
) -> FloatArray:
    """The total of `side_by_side`; reads `total` and, of linked parts that do not wait, `first`, `last` and `grain`.

    `more`: seconds by which A and B are slower.
    """
    if waits:
        return fed.total + b.total
    if not is_linked:
        return np.asarray(np.maximum(a.total + more[0], b.total + more[1]))
    grain = np.maximum(fed.grain, b.grain)
    return np.asarray(np.maximum(start_of(fed, grain) + b.total + more[1], fed.total + more[0] + end_of(b, grain)))


def in_turns(a: Times, fed: Times, b: Times, *, is_linked: bool, waits: bool) -> Times:
    """Times of A and B on the same devices: all of A and then B or, where both are free to alternate, chunk by chunk with A first."""
    grain = np.maximum(fed.grain, b.grain)
    if waits:
        total = fed.total + b.total
        return Times(fed.total + b.first, total, fed.last + b.total, total, grain, np.full_like(total, DRAINS))
    alternates = np.maximum(a.rigid, b.rigid) == FREE
    rigid = np.where(alternates, FREE, DRAINS)
    if is_linked:
        start = np.maximum(a.total, start_of(fed, grain))
        total = np.maximum(start + b.total, fed.total + end_of(b, grain))
        last = np.maximum(a.last + b.total, fed.last + np.minimum(b.total, b.last + b.grain * b.total))
    else:
        start, total, last = a.total, a.total + b.total, a.last + b.total
    if np.any(alternates):
        last = np.where(alternates, np.minimum((fed if is_linked else a).last + b.last, last), last)
    return Times(start + b.first, total, last, total, grain, rigid)


@dataclass(frozen=True)
class FunctionTimes:
    """Times of a function call over all of its units."""

    first: float
    total: float
    last: float

    def after(self, t: Times, *, waits: bool) -> Times:
        """Times of the output for input with times `t`."""
        if waits:
            times = t.total + self.first, t.total + self.total, t.last + self.total, np.maximum(t.busy, self.total)
            return Times(*times, t.grain, np.full_like(t.rigid, DRAINS))
        total = np.maximum(t.first + self.total, t.total + self.last)
        return Times(t.first + self.first, total, t.last + self.last, np.maximum(t.busy, self.total), t.grain, t.rigid)


def num_units(call: CallLoad) -> int:
    """The units of a call on functions: samples, groups, or the whole batch."""
    return {"sample": call.num_samples, "group": call.num_prompts, "minibatch": call.num_prompts, "batch": 1}[call.unit]


def function_times(call: CallLoad, cost: FunctionCost, num_processes: int, chunk: int) -> FunctionTimes:
    """Times of a call whose units are taken in order by `num_processes` with `concurrency` units each, in tasks of at most `chunk`.

    The last unit in is out when the slowest of the c units in flight with it is: the quantile c/(c + 1) of the latency.
    """
    units = num_units(call)
    under_way = min(units, num_processes * cost.concurrency)
    at = np.linspace(0, 1, len(cost.quantiles_s)) if len(cost.quantiles_s) > 1 else np.zeros(1)
    last = float(np.interp(under_way / (under_way + 1), at, cost.quantiles_s)) if under_way else 0.0
    tasks_s = cost.task_s * -(-units // max(1, min(chunk, -(-units // num_processes)))) / max(1, min(num_processes, units))
    total = max(last + cost.task_s * bool(units), units * cost.mean_s / max(1, under_way) + tasks_s)
    return FunctionTimes(cost.mean_s + cost.task_s, total, last + cost.task_s)


def through_functions(a: Times, names: Iterable[str], calls: Mapping[str, CallLoad], times: Mapping[str, FunctionTimes]) -> Times:
    """Times of a cut's output after the functions `names` on it (in program order); each reads `a` or other functions of the cut."""
    made: dict[str, Times] = {}
    for name in names:
        inputs = [made[need] for need in calls[name].after if need in made] or [a]
        made[name] = times[name].after(_latest(inputs), waits=calls[name].is_barrier)
    return _latest([a, *made.values()])


def _latest(times: list[Times]) -> Times:
    found = times[0]
    for t in times[1:]:
        found = Times(*map(np.maximum, found.all, t.all))
    return found


# ---- lengths

_BYTES_PER_TOKEN = 4.0
"""Mean bytes of text for each token, as byte-pair encodings of ten thousands of tokens have on English."""
_SMALL_VOCABULARY = 1000
"""Vocabulary size below which a token is a byte."""
_NUM_DRAWN = 4096
"""Least number of samples for a distribution's means."""


@dataclass(frozen=True)
class Extent:
    """Lengths of the samples of a role, in tokens."""

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    position: float
    """Mean over generated tokens of how many the response had before: half of the mean length where all are equally long, and more
    where they are not, since long responses have more of the tokens."""
    longest: int
    """The longest sample, prompt and response together."""

    @property
    def context(self) -> float:
        """Mean tokens in a sample's KV cache over its generated tokens."""
        return self.prompt + self.position

    @property
    def sample(self) -> float:
        """Mean tokens of a whole sample."""
        return self.prompt + self.response

    @classmethod
    def of(cls, responses: Sequence[int] | npt.NDArray[np.int64], *, prompt: float = 0.0, longest: int = 0) -> Extent:
        """Measure lengths of recorded responses.

        >>> Extent.of([1, 3])
        Extent(prompt=0.0, response=2.0, position=0.75, longest=3)
        """
        lengths = np.asarray(responses, dtype=np.float64)
        total = float(lengths.sum())
        position = float((lengths * (lengths - 1) / 2).sum()) / total if total else 0.0
        return cls(prompt, total / max(len(lengths), 1), position, max(longest, int(prompt + lengths.max(initial=0.0))))

    @classmethod
    def up_to(cls, max_new_tokens: int, *, prompt: float = 0.0) -> Extent:
        """Assume lengths from the limit alone: uniform up to it, so half of it on average."""
        return cls(prompt, max_new_tokens / 2, max_new_tokens / 3, int(prompt) + max_new_tokens)


def extents_of(workload: Workload, shapes: Mapping[str, ModelShape], lengths: Lengths | None = None, *, seed: int = 0) -> dict[str, Extent]:
    """Derive the lengths of each role's samples: those that it generates, or else those that it processes.

    Args:
        lengths: of the responses of models that the step trains; None: uniform up to each call's limit.
    """
    trained = {call.engine.role for call in workload.calls if call.work == "update" and call.engine is not None}
    by_call: dict[str, Extent] = {}
    of_role: dict[str, Extent] = {}
    for call in workload.calls:
        if call.engine is None:
            continue
        role = call.engine.role
        if call.work == "generate":
            has_lengths = lengths is not None and (role in trained or not trained)
            found = _drawn(call, lengths, seed) if has_lengths and lengths is not None else _allowed(call, shapes.get(role))
            by_call[call.name] = found
            if role not in of_role or of_role[role].longest < found.longest:
                of_role[role] = found
        elif role not in of_role:
            origin = _origin(call, workload, by_call)
            if origin is not None:
                of_role[role] = origin
    longest = max(of_role.values(), key=lambda extent: extent.longest, default=Extent.up_to(1))
    return {"": longest, **of_role}


def _allowed(call: CallLoad, shape: ModelShape | None) -> Extent:
    each = 1.0 if shape is not None and shape.vocab < _SMALL_VOCABULARY else _BYTES_PER_TOKEN
    return Extent.up_to(call.max_new_tokens, prompt=call.prompt_bytes / each)


def _drawn(call: CallLoad, lengths: Lengths, seed: int) -> Extent:
    groups = max(call.num_prompts, -(-_NUM_DRAWN // call.num_per_prompt))
    limit = call.max_new_tokens or np.iinfo(np.int64).max
    responses = np.minimum(lengths.draw(groups, call.num_per_prompt, seed).ravel(), limit)
    prompts = lengths.draw_prompts(groups, seed, n=call.num_per_prompt)
    longest = int(prompts.max(initial=0)) + min(lengths.cap or int(responses.max(initial=1)), limit)
    return Extent.of(responses, prompt=float(prompts.mean()), longest=longest)


def _origin(call: CallLoad, workload: Workload, by_call: Mapping[str, Extent]) -> Extent | None:
    """The longest samples that a call depends on, directly or through others."""
    todo, seen = list(call.after), set(call.after)
    found: list[Extent] = []
    while todo:
        name = todo.pop()
        if name in by_call:
            found.append(by_call[name])
            continue
        further = [one for one in workload.call(name).after if one not in seen]
        seen.update(further)
        todo += further
    return max(found, key=lambda extent: extent.longest, default=None)


# ---- rollouts on devices that a trainer lends

_SHARES = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 1.0])
"""Candidate shares of a step's samples that have ended when the devices are given back."""
_MOST_SAMPLES = 1024
"""Samples of a step that are considered."""


@dataclass(frozen=True, eq=False)
class LentRollout:
    """One step of a rollout that gives devices back after a share of its samples; arrays over the candidate shares."""

    draw: Draw
    ways: Instances
    given_back_s: FloatArray
    """Seconds from the start of the rollout until the devices are given back, if none of its instances were away before."""
    left_steps: FloatArray
    """Decode steps of the longest sample that remain, and tokens of all samples."""
    left_tokens: FloatArray
    moves: FloatArray
    """Samples that are running then, and the tokens that these have generated."""
    moved_tokens: FloatArray
    _lending: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict, repr=False)
    """Cache of `lending`."""

    @classmethod
    def of(cls, draw: Draw, ways: Instances) -> LentRollout:
        """Simulate one step without lending."""
        num, slots = float(ways.num[0]), float(ways.slots[0])
        lengths = draw.responses.ravel().astype(np.float64)
        tokens, count = float(lengths.sum()), len(lengths)
        begins = np.maximum(0.0, np.arange(count) / count - slots / count) * tokens / slots  # As in `Draw.releases_s`.
        ends = begins + lengths
        at = np.concatenate([[0.0], np.sort(ends)])[np.ceil(_SHARES * count).astype(np.int64)]
        every = max(1, count // _MOST_SAMPLES)
        lengths, begins, ends = lengths[::every], begins[::every], ends[::every]
        made = np.clip(at[:, None] - begins, 0.0, lengths)
        done = made.sum(axis=1) * tokens / max(float(lengths.sum()), 1.0)
        is_left = ends > at[:, None]
        given_back = float(ways.step_s[0]) * at + float(ways.sample_s[0]) * done / num
        moves = ((begins < at[:, None]) & is_left).sum(axis=1) * every
        return cls(draw, ways, given_back, at[-1] - at, tokens - done, moves, np.where(is_left, made, 0.0).sum(axis=1) * every)

    @cached_property
    def _whole_s(self) -> float:
        return float(self.draw.seconds(self.ways)[0])

    def lending(self, num_lent: int) -> tuple[FloatArray, FloatArray]:
        """When so many instances are given back after each share of the samples, and when the rollout then ends, [shares] each."""
        if num_lent not in self._lending:
            self._lending[num_lent] = self._computed_lending(num_lent)
        return self._lending[num_lent]

    def _computed_lending(self, num_lent: int) -> tuple[FloatArray, FloatArray]:
        ways = self.ways
        num, slots, step_s, sample_s = (float(array[0]) for array in (ways.num, ways.slots, ways.step_s, ways.sample_s))
        own = num - num_lent
        left = np.maximum(self.left_steps, self.left_tokens / (slots * own / num))
        moves = self.moves * num_lent / num
        prefix = float(self.draw.prompts.mean()) + self.moved_tokens * num_lent / num / np.maximum(moves, 1.0)
        moving = moves / own * (prefix * float(ways.prefill_token_s[0]) + float(ways.enter_leave_s[0]))
        whole, alone = self._whole_s, float(self.given_back_s[-1])
        scale = whole / alone if alone else 1.0
        total = scale * (self.given_back_s + step_s * left + sample_s * self.left_tokens / own) + moving
        return self.given_back_s * scale, np.maximum(whole, total)


def best_lending(
    each: Sequence[tuple[FloatArray, FloatArray]],
    num_own: int,
    a: FloatArray,
    fed: tuple[FloatArray, FloatArray],
    b: tuple[FloatArray, FloatArray],
    slower: tuple[float, float],
) -> tuple[FloatArray, FloatArray]:
    """Seconds until training is done, and the share of samples, chosen for all of some steps; arrays of one shape, [rows].

    Args:
        each: when devices are given back and when the rollout ends, as of `LentRollout.lending`, for each step.
        num_own: the number of leading steps that the rest of the search uses.
        a: seconds of the rollout if nothing is given back. fed: l' and T' of training's input. b: T and d of training.
        slower: slowdown factors of rollout and of training while both work.
    """
    given_back_s, total_s = (np.stack(some) for some in zip(*each, strict=True))  # [steps, shares]
    a, *fed_b = (time[:, None, None] for time in (a, *fed, *b))
    first, total, b_total, b_last = fed_b
    both = np.clip(total_s - given_back_s, 0.0, b_total)
    trained = np.maximum(given_back_s, first * total_s / np.maximum(a, 1e-12)) + b_total + (slower[1] - 1) * both
    ends = np.maximum(trained, total_s + (slower[0] - 1) * both + total - a + b_last)
    best = np.argmin(ends.mean(axis=1), axis=1)
    return ends[np.arange(len(best)), :num_own, best].mean(axis=1), _SHARES[best]
