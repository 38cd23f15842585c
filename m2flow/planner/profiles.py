"""Profiles: constants of the cost model fitted to measured times, and costs from them, with how well each was measured.

sizes [N, K], seconds [N] --fit--> constants [K], and how well they say the seconds again

The variance of a time grows with the time, so squares are weighed by 1/seconds: short pieces of work count, and the sum over all is
right. Residuals beyond a few times the usual one are cut (Huber), and in the end what took more than twice as long as predicted: on a
machine that does other things too, some timings are far too long, and none is far too short. Terms of which nothing may be won back by
more work are held at zero or above.

m2flow profile FLOW --(probing, measuring)--> Profile, a JSON file --(m2flow.planner.profiles)--> Costs

Plain data. A constant belongs to an engine of a role on a number of devices; on a CPU a device is a core, and an engine has a thread for
each. What was measured in another version of this format, or is no profile, is refused.

Profile, ModelledCosts --ProfiledCosts--> search, simulator

A profile of `m2flow profile` speaks of this machine alone (the pool named ""); what a run has measured of itself, of the pools that its
engines are in. An engine on another number of its devices than was measured is modelled, and then corrected by how far the model is off
where both are known; so is a trainer in another number of ranks. Pools elsewhere, memory and legality are the model's.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError
from m2flow.micro.lowering.placement import device_of
from m2flow.micro.protocol.cost_terms import (
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    EngineKind,
    Footprint,
    FunctionCost,
    Layout,
    PassCost,
    Switch,
    TrainCost,
)
from m2flow.micro.protocol.plan import SyncTransport
from m2flow.planner.cost_model import ModelledCosts
from m2flow.recipe import Model
from m2flow.rollout_scheduling.lengths import Lengths, Measured
from m2flow.spec import ClusterSpec

FloatArray = npt.NDArray[np.float64]

_ROUNDS = 12
_HUBER = 1.345
"""Residuals beyond this many standard deviations count linearly. Source: Huber 1981; 95% efficient where the errors are normal."""
_MAD_TO_SIGMA = 1.4826
_MOST_TIMES = 2.0
"""What took longer than so many times the prediction was interrupted, and counts as this long."""
_MOST_TERMS = 6
_LEAST_SQUARES = 1e-12
"""Share of the squares that rounding leaves."""


class Quality(msgspec.Struct, frozen=True):
    """How well constants say the seconds that they were fitted to."""

    num: int
    """Timings."""
    r2: float
    """Share of the seconds' variance that the terms explain; 1 is all of it, 0 where there is none to explain."""
    error: float
    """Median of |predicted - measured| / measured."""

    def __str__(self) -> str:
        return f"{self.num} timings, R2 {self.r2:.3f}, median error {self.error:.1%}"


def fit(
    sizes: npt.ArrayLike, seconds: npt.ArrayLike, *, free: Sequence[int] = (), doubted: Sequence[int] = (0,)
) -> tuple[FloatArray, Quality]:
    """The constants c >= 0 that make sizes @ c close to seconds.

    Args:
        sizes: [N, K], at most six terms. The first is the fixed cost, a column of ones.
        seconds: [N], positive.
        free: columns whose constant may be below zero.
        doubted: columns that must explain twice as much as others to count: by default the fixed cost.
    Returns:
        The constants [K], in seconds per unit of the size; 0 for terms that say nothing.

    >>> constants, quality = fit([[1, 1], [1, 2], [1, 10]], [0.3, 0.4, 1.2])
    >>> constants.round(6).tolist(), round(quality.r2, 6)
    ([0.2, 0.1], 1.0)
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    num, num_terms = x.shape
    assert num_terms <= _MOST_TERMS
    assert len(y) == num
    if not num:
        return np.zeros(num_terms), Quality(0, 0.0, 0.0)
    # Columns of about the same size, so that the smallest constant is solved for as exactly as the largest.
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    x = x / scale
    base = 1.0 / np.maximum(y, 1e-9)
    weights = base
    constants = np.zeros(num_terms)
    for _ in range(_ROUNDS):
        constants = _least_squares(x, y, weights, frozenset(free), frozenset(doubted))
        residuals = np.abs(y - x @ constants) * np.sqrt(base)
        sigma = _MAD_TO_SIGMA * float(np.median(residuals))
        if sigma <= 1e-12 * float(np.sqrt(y.max())):
            break
        weights = base * np.minimum(1.0, _HUBER * sigma / np.maximum(residuals, 1e-300))
    quality = _quality(y, x @ constants, weights)
    predicted = np.maximum(x @ constants, 0.0)
    if float(predicted.sum()) > 0:
        # Small delays are part of what work takes: the sum over all is kept, but for what was interrupted.
        constants = constants * (float(np.minimum(y, _MOST_TIMES * predicted).sum()) / float(predicted.sum()))
    return constants / scale, quality


def robust_mean(values: npt.ArrayLike) -> float:
    """The mean of values of which some are far too large; 0 of none.

    >>> round(robust_mean([1.0, 1.1, 0.9, 1.0, 50.0]), 1)
    1.0
    """
    numbers = np.asarray(values, np.float64)
    if not len(numbers):
        return 0.0
    middle = float(np.median(numbers))
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(numbers - middle)))
    return float(numbers[np.abs(numbers - middle) <= 3 * sigma + 1e-12].mean())


def _least_squares(x: FloatArray, y: FloatArray, weights: FloatArray, free: frozenset[int], doubted: frozenset[int]) -> FloatArray:
    """Of each set of terms the least squares, exactly; and of the sets the best by Schwarz's criterion, n ln(squares) + k ln(n).

    So a term must earn its place, and one that is doubted twice: of work that was always of one size, the time is taken to grow with the
    work, and in proportion to it.

    Source:
        Schwarz 1978, doi:10.1214/aos/1176344136.
    """
    root = np.sqrt(weights)
    a, b = x * root[:, None], y * root
    gram, right, whole = a.T @ a, a.T @ b, float(b @ b)
    num, num_terms = x.shape
    best, least = np.zeros(num_terms), np.inf
    for size in range(1, num_terms + 1):
        for chosen in itertools.combinations(range(num_terms), size):
            index = np.array(chosen)
            found = np.linalg.lstsq(gram[np.ix_(index, index)], right[index], rcond=1e-12)[0]
            if any(value < 0 and term not in free for value, term in zip(found, chosen, strict=True)):
                continue
            squares = whole + float(found @ gram[np.ix_(index, index)] @ found - 2 * found @ right[index])
            told = num * math.log(max(squares / whole, _LEAST_SQUARES)) + (size + len(doubted.intersection(chosen))) * math.log(num)
            if told < least:
                best, least = np.zeros(num_terms), told
                best[index] = found
    return best


def _quality(y: FloatArray, predicted: FloatArray, weights: FloatArray) -> Quality:
    mean = float((weights * y).sum() / weights.sum())
    whole = float((weights * (y - mean) ** 2).sum())
    left = float((weights * (y - predicted) ** 2).sum())
    is_flat = whole <= 1e-9 * float((weights * y**2).sum())
    return Quality(len(y), 0.0 if is_flat else max(0.0, 1.0 - left / whole), float(np.median(np.abs(predicted - y) / np.maximum(y, 1e-12))))


VERSION = 1
Beside = Literal["rollout", "train", "function"]


class MeasuredDecode(msgspec.Struct, frozen=True):
    """A decode step: `step_s + sample_s * samples + context_s * tokens in their caches`, and what samples take that come and go."""

    step_s: float
    sample_s: float
    context_s: float
    prefill_token_s: float
    """A token of a prompt, read once for its group."""
    enter_s: float
    leave_s: float
    handover_s: float
    most_running: int
    """Largest batch that was measured."""
    context: float
    """Mean tokens in a sample's cache, where it was measured."""
    quality: Quality

    @property
    def saturation(self) -> float:
        """Samples whose own share of a step is as long as the fixed one: beyond a few times this, more do not make tokens cheaper."""
        each = self.sample_s + self.context_s * self.context
        return self.step_s / each if each else float("inf")


class MeasuredPass(msgspec.Struct, frozen=True):
    """A micro-batch: `fixed_s + sum over samples of s tokens of (sample_s + token_s * s + token2_s * s**2)`."""

    fixed_s: float
    sample_s: float
    token_s: float
    token2_s: float
    longest: float
    """Root mean square of a sample's tokens in the micro-batch where that was largest."""
    quality: Quality


class MeasuredEngine(msgspec.Struct, frozen=True):
    """An engine of a role, on so many devices."""

    role: str
    kind: EngineKind
    engine: str
    device: str
    num_devices: int
    """Of all ranks."""
    decode: MeasuredDecode | None = None
    update: MeasuredPass | None = None
    forward: MeasuredPass | None = None
    optimizer_s: float = 0.0
    come_s: float = 0.0
    """To take its device: what the engine before it takes to leave is in this."""
    slowdown: dict[Beside, float] = {}
    """How many times as long it takes while an engine of that kind works on other devices of the host."""
    ranks: int = 1
    """Processes that hold one model together, each with its share of the devices."""
    pool: str = ""
    """Whose devices they are."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.kind}"

    @property
    def place(self) -> tuple[str, EngineKind, int, int, str]:
        """What tells it from others of a profile."""
        return self.role, self.kind, self.num_devices, self.ranks, self.pool

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.num_devices // self.ranks, dp=self.ranks)


class MeasuredFunction(msgspec.Struct, frozen=True):
    """A reward or an op."""

    call: str
    quantiles_s: tuple[float, ...]
    """Latency of one unit at evenly spaced probabilities, ends included, with the engine's share of it."""
    concurrency: int
    task_s: float
    """Added by each task, however many units it has."""
    num: int


class MeasuredSync(msgspec.Struct, frozen=True):
    """New weights from a trainer to a rollout engine, checksums included."""

    role: str
    transport: SyncTransport
    num_bytes: int
    publish_s: float
    """On the trainer."""
    load_s: float
    """On the rollout engine."""
    num: int


class Machine(msgspec.Struct, frozen=True):
    """What it was measured on."""

    processor: str
    cores: int
    device: str
    versions: dict[str, str]

    @classmethod
    def here(cls, device: str) -> Machine:
        """This machine."""
        import importlib.metadata

        versions = {"python": platform.python_version()}
        for package in ("m2flow", "torch", "transformers", "numpy"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(_processor(), cores, device, versions)


class Profile(msgspec.Struct, frozen=True):
    """All that was measured for one flow."""

    flow: str
    made: str
    """When, in ISO 8601."""
    machine: Machine
    models: dict[str, str]
    """Role -> its model, as `told_model` says it."""
    engines: tuple[MeasuredEngine, ...]
    functions: tuple[MeasuredFunction, ...]
    syncs: tuple[MeasuredSync, ...]
    hop_s: float
    """From the end of a task to the start of the next one on another worker, the controller in between."""
    byte_s: float
    """A byte of samples, from one worker to another."""
    turn_s: float
    """From the last task of a step to the first of the next, beyond a hop: what the program takes to make its calls."""
    gather_s: float
    """How long finished samples wait for others to leave with."""
    startup_s: float
    """Until all workers have loaded their engines; 0: not measured."""
    prompts: tuple[int, ...]
    """Tokens of the prompts that were seen."""
    responses: tuple[tuple[int, ...], ...]
    """Tokens of the answers to each of them."""
    icc: float
    """Intraclass correlation of the log lengths of answers to one prompt."""
    load: float = 0.0
    """Processes that the machine had to run besides, on average, when the measurement began."""
    version: int = VERSION

    def engine(self, role: str, kind: EngineKind, num_devices: int, ranks: int = 1, pool: str = "") -> MeasuredEngine | None:
        """What was measured of an engine on exactly so many devices, and in so many ranks."""
        wanted = role, kind, num_devices, ranks, pool
        return next((found for found in self.engines if found.place == wanted), None)

    def updated(self, newer: Profile) -> Profile:
        """With what a newer one says instead, wherever that says something."""
        engines = {found.place: found for found in (*self.engines, *newer.engines)}
        functions = {found.call: found for found in (*self.functions, *newer.functions)}
        syncs = {(sync.role, sync.transport): sync for sync in (*self.syncs, *newer.syncs)}
        return msgspec.structs.replace(
            newer,
            engines=tuple(engines.values()),
            functions=tuple(functions.values()),
            syncs=tuple(syncs.values()),
            hop_s=newer.hop_s or self.hop_s,
            byte_s=newer.byte_s or self.byte_s,
            turn_s=newer.turn_s or self.turn_s,
            startup_s=newer.startup_s or self.startup_s,
        )

    def function(self, call: str) -> MeasuredFunction | None:
        return next((found for found in self.functions if found.call == call), None)

    def lengths(self) -> Lengths:
        """Of the answers that were seen.

        Raises:
            SpecError: none was.
        """
        if not self.responses:
            raise SpecError("the profile saw no answer of the flow's own length", now="Give lengths: a trace, a run, or a distribution.")
        groups = [np.array(answers, np.int64) for answers in self.responses]
        cap = max(int(group.max()) for group in groups)
        cut = [group >= cap for group in groups]
        return Measured(f"profile of {self.flow}", [0] * len(groups), self.prompts, groups, cut=cut, cap=cap)

    def save(self, path: Path) -> None:
        """Raises SpecError: it can't be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise SpecError(f"can't write the profile {path}: {error.strerror}", now="Give another place with --out.") from None

    def strangeness(self, device: str) -> list[str]:
        """How this machine differs from the one that was measured: reasons to doubt what the profile predicts here."""
        then, now = self.machine, Machine.here(device)
        found = [
            f"{what} was {before} and is {after}"
            for what, before, after in (
                ("the processor", then.processor, now.processor),
                ("the number of cores", str(then.cores), str(now.cores)),
                ("the device", then.device, now.device),
            )
            if before != after
        ]
        changed = [name for name in then.versions if now.versions.get(name) != then.versions[name]]
        return found + [f"{name} was {then.versions[name]} and is {now.versions.get(name, 'not there')}" for name in changed]

    def doubts(self, spec: ClusterSpec) -> list[str]:
        """Why the profile may say little about this cluster, a line each."""
        if spec.pools:
            return [f"the profile is of {self.machine.processor}, and says nothing about {', '.join(spec.pools)}: these are modelled"]
        return [f"the profile may not hold here: {line}" for line in self.strangeness(device_of(spec))]

    def check(self, models: Mapping[str, Model], spec: ClusterSpec) -> None:
        """Refuse a profile of other models or other engines: its numbers would say nothing.

        Raises:
            SpecError: which role, and what it was measured with.
        """
        now = "Measure again: m2flow profile FLOW --cluster SPEC."
        for role, model in models.items():
            told = told_model(model)
            if role in self.models and self.models[role] != told:
                raise SpecError(f"the profile was made with another model for {role}: {self.models[role]}, not {told}", now=now)
        engines = {"rollout": spec.rollout.engine, "train": spec.train.engine}
        for found in self.engines:
            if found.engine != engines[found.kind]:
                raise SpecError(f"the profile measured the {found.kind} engine {found.engine!r}, not {engines[found.kind]!r}", now=now)

    def constants(self) -> dict[str, Constant]:
        """Every number, by a dotted name, with its source."""
        found: dict[str, Constant] = {}
        for engine in self.engines:
            where = f"{engine.name}[{engine.num_devices}{f', {engine.ranks} ranks' if engine.ranks > 1 else ''}]"
            for part, measured in (("", engine.decode), ("update.", engine.update), ("forward.", engine.forward)):
                if measured is not None:
                    found |= {f"{where}.{part}{name}": constant for name, constant in _constants_of(measured).items()}
            if engine.kind == "train":
                found[f"{where}.optimizer_s"] = Constant(engine.optimizer_s, "s", "measured: mean of the steps")
            found[f"{where}.come_s"] = Constant(engine.come_s, "s", "measured: mean of the switches")
            for beside, factor in engine.slowdown.items():
                found[f"{where}.beside_{beside}"] = Constant(factor, "times", "measured: steps beside it over steps without")
        for function in self.functions:
            mean = sum(function.quantiles_s) / len(function.quantiles_s)
            found[f"{function.call}.mean_s"] = Constant(mean, "s", f"measured: {function.num} units")
            found[f"{function.call}.longest_s"] = Constant(function.quantiles_s[-1], "s", f"measured: {function.num} units")
            found[f"{function.call}.task_s"] = Constant(function.task_s, "s", "measured: tasks beyond their units")
        for sync in self.syncs:
            seconds, means = sync.publish_s + sync.load_s, f"measured: mean of {sync.num}, {sync.num_bytes:,} bytes, with checksums"
            found[f"{sync.role}.sync_s ({sync.transport})"] = Constant(seconds, "s", means)
        found["hop_s"] = Constant(self.hop_s, "s", "measured: median pause between a task's end and the start of what waited for it")
        found["turn_s"] = Constant(self.turn_s, "s", "measured: mean pause between steps, beyond hop_s")
        found["byte_s"] = Constant(self.byte_s, "s/byte", "measured: parcels of samples, by size")
        found["startup_s"] = Constant(self.startup_s, "s", "measured: until the workers were ready")
        return found


def read_profile(path: Path) -> Profile:
    """A profile, from its file or from the run directory that it lies in.

    Raises:
        SpecError: no such file, no profile, or one of another version.
    """
    file = path / "profile.json" if path.is_dir() else path
    now = "Make one: m2flow profile FLOW --cluster SPEC --out FILE."
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SpecError(f"the profile {file} can't be read: {error.strerror}", now=now) from None
    try:
        head = msgspec.json.decode(text, type=_Head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SpecError(f"{file} is no profile: {error}", now=now) from None
    if head.version != VERSION:
        raise SpecError(f"the profile {file} has the format {head.version}; this m2flow reads {VERSION}", now="Measure again.")
    try:
        return msgspec.json.decode(text, type=Profile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SpecError(f"{file} is a damaged profile: {error}", now="Measure again.") from None


def told_model(model: Model) -> str:
    """A model as far as its speed goes: its folder's name, its head, its type of numbers, and the rank of its adapters."""
    adapters = f", adapters of rank {model.lora.rank}" if model.lora is not None else ""
    return f"{Path(model.path).name} ({model.head}, {model.dtype}{adapters})"


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _Head(msgspec.Struct):
    version: int
    engines: list[msgspec.Raw]


_UNITS = {
    "step_s": "s", "sample_s": "s/sample", "context_s": "s/token", "prefill_token_s": "s/token", "enter_s": "s/sample",
    "leave_s": "s/sample", "handover_s": "s", "fixed_s": "s", "token_s": "s/token", "token2_s": "s/token^2",
}  # fmt: skip


def _constants_of(measured: MeasuredDecode | MeasuredPass) -> dict[str, Constant]:
    source = f"measured: {measured.quality}"
    return {name: Constant(getattr(measured, name), unit, source) for name, unit in _UNITS.items() if hasattr(measured, name)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


HERE = ""
"""The pool that is this machine."""

C = TypeVar("C", bound=msgspec.Struct)


@final
class ProfiledCosts(Costs):
    """Measured costs of one flow on this machine, before those of the model that `modelled` is."""

    def __init__(self, profile: Profile, modelled: ModelledCosts) -> None:
        self.profile = profile
        self.modelled = modelled

    def for_spec(self, spec: ClusterSpec) -> ProfiledCosts:
        return ProfiledCosts(self.profile, self.modelled.for_spec(spec))

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self.modelled.layouts(engine, pool, num_devices)

    def unit(self, engine: EngineId, pool: str) -> int:
        return self.modelled.unit(engine, pool)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        modelled = self.modelled.decode(engine, pool, layout)
        measured = self._measured(engine, pool, layout.num_replica_devices)
        if measured is not None and measured.decode is not None:
            return self._decode_cost(engine, measured, modelled)
        known = self._other(engine, pool, lambda one: one.decode is not None)
        if known is None:
            return modelled
        there = known.layout
        return _scaled(modelled, self.decode(engine, pool, there), self.modelled.decode(engine, pool, there))

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        modelled = self.modelled.train(engine, pool, layout)
        measured = self._measured(engine, pool, layout.num_devices, layout.dp)
        known = measured or self._other(engine, pool, lambda one: one.update is not None or one.forward is not None)
        if known is None:
            return modelled
        there = modelled if measured else self.modelled.train(engine, pool, known.layout)
        update = _pass_cost(known.update) if known.update else there.update
        # Of a trainer that never looked at log-probabilities alone: a third of forward and backward.
        forward = _pass_cost(known.forward) if known.forward else _times(update, 1 / 3) if known.update else there.forward
        optimizer_s = known.optimizer_s or there.optimizer_s
        if measured:
            return TrainCost(forward, update, optimizer_s)
        ratio = modelled.optimizer_s / there.optimizer_s if there.optimizer_s else 1.0
        return TrainCost(
            _scaled(modelled.forward, forward, there.forward), _scaled(modelled.update, update, there.update), optimizer_s * ratio
        )

    def function(self, call: str) -> FunctionCost:
        found = self.profile.function(call.partition("@")[0])
        return self.modelled.function(call) if found is None else FunctionCost(found.quantiles_s, found.concurrency, found.task_s)

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self.modelled.footprint(engine, pool, layout)

    def device_bytes(self, pool: str) -> int:
        return self.modelled.device_bytes(pool)

    def host_bytes(self, pool: str) -> int:
        return self.modelled.host_bytes(pool)

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        modelled = self.modelled.switch(engine, pool, footprint)
        known = self._other(engine, pool, lambda one: one.come_s > 0)
        return modelled if known is None else Switch(0.0, known.come_s, modelled.is_resident)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        transport = "same process" if is_same_devices else "shared memory"
        found = next((sync for sync in self.profile.syncs if (sync.role, sync.transport) == (role, transport)), None)
        if found is None or (source[0], target[0]) != (HERE, HERE):
            return self.modelled.sync_s(role, source, target, is_same_devices=is_same_devices)
        return found.publish_s + found.load_s + self.profile.turn_s  # New weights come once a step, as the program's turn does.

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        if (source, target) == (HERE, HERE) and self.profile.hop_s:
            return self.message_s() + num_bytes * self.profile.byte_s
        return self.modelled.hop_s(num_bytes, source, target)

    def message_s(self) -> float:
        return self.profile.hop_s / 2  # To the controller, and from it.

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return max((one.slowdown.get(beside, 1.0) for one in self.profile.engines if one.kind == engine), default=1.0)

    def constants(self) -> dict[str, Constant]:
        """What was measured, and of the model what is still in use."""
        measured = self.profile.constants()
        engines = {f"{one.name}.{one.pool}." for one in self.profile.engines}
        functions = {f"{one.call}." for one in self.profile.functions}
        rest = {
            name: constant
            for name, constant in self.modelled.constants().items()
            if not any(name.startswith(one) for one in engines | functions)
        }
        return measured | rest

    def _measured(self, engine: EngineId, pool: str, num_devices: int, ranks: int = 1) -> MeasuredEngine | None:
        return self.profile.engine(engine.role, engine.kind, num_devices, ranks, pool)

    def _other(self, engine: EngineId, pool: str, has: Callable[[MeasuredEngine], bool]) -> MeasuredEngine | None:
        """The largest layout of the engine that was measured in this respect."""
        wanted = engine.role, engine.kind, pool
        known = [one for one in self.profile.engines if (one.role, one.kind, one.pool) == wanted and has(one)]
        return max(known, key=lambda one: one.num_devices, default=None)

    def _decode_cost(self, engine: EngineId, measured: MeasuredEngine, modelled: DecodeCost) -> DecodeCost:
        decode = measured.decode
        assert decode is not None
        context = self.modelled.extent(engine.role).context
        return DecodeCost(
            step_s=decode.step_s,
            sample_s=decode.sample_s + decode.context_s * context,
            prefill_token_s=decode.prefill_token_s,
            max_running=modelled.max_running,
            enter_s=decode.enter_s,
            leave_s=decode.leave_s,
            handover_s=decode.handover_s,
            gather_s=self.profile.gather_s,
        )


def _pass_cost(measured: MeasuredPass) -> PassCost:
    return PassCost(measured.fixed_s, measured.token_s, measured.token2_s, measured.sample_s)


def _times(cost: PassCost, factor: float) -> PassCost:
    return PassCost(cost.fixed_s * factor, cost.token_s * factor, cost.token2_s * factor, cost.sample_s * factor)


def _scaled(modelled: C, known: C, known_modelled: C) -> C:
    """The model's numbers, each corrected by what it is off by where it was measured; what it does not have is as it was measured."""
    changes = {}
    for name in modelled.__struct_fields__:
        here, measured, there = (getattr(one, name) for one in (modelled, known, known_modelled))
        if isinstance(measured, float):
            changes[name] = here * measured / there if there else measured
    return msgspec.structs.replace(modelled, **changes)
