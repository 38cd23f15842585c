"""Keep profiles: cost-model constants fitted to measured times, their file format, and costs that prefer them to modelled ones.

    m2flow profile FLOW --(measuring)--> Profile, a JSON file
    sizes [N, K], seconds [N] --fit--> constants [K], and the quality of the fit
    Profile, ModelledCosts --ProfiledCosts--> search, simulator

Fitting. The variance of a time grows with the time, so squares are weighted by 1/seconds: short pieces of work count, and the sum over all
is right. Residuals beyond a few times the usual one are clipped (Huber), and finally times of more than twice the prediction: on a shared
machine some timings are far too long, and none is far too short. Constants of terms that can't be negative are held at zero or above.

Format. A profile is plain data. A constant belongs to an engine of a role on a number of devices; on a CPU a device is a core, and an
engine has a thread for each. Files of another version, and files that are no profile, are refused. Written by hand, it is YAML with the
fields that are known, and `degrees` for the whole layout; a cluster spec names such a file in `costs:`:

    engines:
      - {role: policy, kind: rollout, pool: h100, degrees: {tp: 4}, decode: {step_s: 0.021, sample_s: 0.00004}}
      - {role: policy, kind: train, pool: h100, degrees: {tp: 4, pp: 4, dp: 4, zero: 1}, update: {token_s: 2.6e-5}, optimizer_s: 0.4}
    syncs: [{role: policy, pools: [h100, h100], load_s: 12}]
    attained: {rollout: {vllm: {wake_s: {value: 2, low: 1, high: 4, source: our cluster}}}}      # see `pools.Attained`

Use. A profile of `m2flow profile` describes this machine alone (the pool named ""); what a run measures of itself, the pools that its
engines are in. An engine on a number of devices that was not measured is modelled and corrected by the ratio of measured to modelled
constants where both are known; so is a trainer with another number of ranks. Other pools, memory and legality are modelled.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt
import yaml

from m2flow.errors import ModelError, SpecError
from m2flow.micro.lowering.placement import device_of
from m2flow.micro.protocol.cost_terms import (
    Arithmetic,
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    EngineKind,
    EpisodeCosts,
    Footprint,
    FunctionCost,
    HeldPart,
    Layout,
    PassCost,
    StageOrder,
    Switch,
    TrainCost,
)
from m2flow.micro.protocol.plan import SyncTransport
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.pools import Overrides
from m2flow.recipe import Model
from m2flow.rollout_scheduling.lengths import Lengths, Measured
from m2flow.spec import ClusterSpec

FloatArray = npt.NDArray[np.float64]

# ---- fitting

_ROUNDS = 12
_HUBER = 1.345
"""Residuals beyond this many standard deviations count linearly. Source: Huber 1981; 95% efficient where the errors are normal."""
_MAD_TO_SIGMA = 1.4826
_MOST_TIMES = 2.0
"""Multiple of the prediction beyond which work was interrupted, and counts as this long."""
_MOST_TERMS = 6
_LEAST_SQUARES = 1e-12
"""Share of the squares that rounding errors leave."""


class Quality(msgspec.Struct, frozen=True):
    """The quality of a fit."""

    num: int
    """The number of timings."""
    r2: float
    """Share of the seconds' variance that the terms explain; 0 where there is no variance."""
    error: float
    """Median of |predicted - measured| / measured."""

    def __str__(self) -> str:
        return f"{self.num} timings, R2 {self.r2:.3f}, median error {self.error:.1%}"


def fit(
    sizes: npt.ArrayLike, seconds: npt.ArrayLike, *, free: Sequence[int] = (), doubted: Sequence[int] = (0,)
) -> tuple[FloatArray, Quality]:
    """Fit constants c >= 0 such that sizes @ c is close to seconds.

    Args:
        sizes: [N, K], at most six terms. The first is the fixed cost, a column of ones.
        seconds: [N], positive.
        free: columns whose constant may be negative.
        doubted: columns that must explain twice as much as others to count: by default the fixed cost.
    Returns:
        The constants [K], in seconds per unit of the size; 0 for terms that explain nothing.

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
    # Scale the columns alike, so that the smallest constant is solved for as exactly as the largest.
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
    return constants * total_ratio(y, predicted) / scale, quality


def total_ratio(seconds: FloatArray, predicted: FloatArray) -> float:
    """The factor by which predictions give the sum of the seconds: small delays are part of the work. Interrupted work counts in part.

    >>> total_ratio(np.array([1.5, 1.5, 60.0, 3.0]), np.array([1.0, 1.0, 1.0, 2.0]))
    1.6
    """
    whole = float(predicted.sum())
    return float(np.minimum(seconds, _MOST_TIMES * predicted).sum()) / whole if whole > 0 else 1.0


def robust_mean(values: npt.ArrayLike) -> float:
    """Mean without outliers; 0 if there are no values.

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
    """Solve least squares for every set of terms, and choose the set by Schwarz's criterion, n ln(squares) + k ln(n).

    So a term must explain enough to be used, and a doubted one twice as much: for work that was always of one size, the time is assumed
    to be proportional to the size.

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


# ---- the profile

VERSION = 1
OtherWork = Literal["rollout", "train", "function"]
"""Kinds of work that slow an engine down while they run on other devices of the host."""


_GIVEN = Quality(0, 0.0, 0.0)


class MeasuredDecode(msgspec.Struct, frozen=True):
    """The measured decode step: `step_s + sample_s * samples + context_s * cached tokens`, and times of entering and leaving samples."""

    step_s: float = 0.0
    sample_s: float = 0.0
    context_s: float = 0.0
    prefill_token_s: float = 0.0
    """Seconds for a prompt token, prefilled once for its group."""
    enter_s: float = 0.0
    leave_s: float = 0.0
    handover_s: float = 0.0
    most_running: int = 0
    """The largest batch measured."""
    context: float = 0.0
    """Mean tokens in a sample's KV cache during the measurement."""
    quality: Quality = _GIVEN

    @property
    def saturation(self) -> float:
        """The batch whose variable time equals the fixed time; beyond a few times this, larger batches do not make tokens cheaper."""
        each = self.sample_s + self.context_s * self.context
        return self.step_s / each if each else float("inf")


class MeasuredPass(msgspec.Struct, frozen=True):
    """The measured micro-batch: `fixed_s + sum over samples of s tokens of (sample_s + token_s * s + token2_s * s**2)`."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    token_s: float = 0.0
    token2_s: float = 0.0
    longest: float = 0.0
    """The largest root mean square of a sample's tokens over the micro-batches."""
    quality: Quality = _GIVEN


class MeasuredEngine(msgspec.Struct, frozen=True):
    """The measured constants of a role's engine on a number of devices."""

    role: str
    kind: EngineKind
    engine: str = ""
    device: str = ""
    num_devices: int = 0
    """Devices of all ranks together."""
    decode: MeasuredDecode | None = None
    update: MeasuredPass | None = None
    forward: MeasuredPass | None = None
    optimizer_s: float = 0.0
    come_s: float = 0.0
    """Seconds to onload, including the offload of the engine before it."""
    slowdown: dict[OtherWork, float] = {}
    """Slowdown factor while an engine of that kind works on other devices of the host."""
    ranks: int = 1
    """Processes that shard one model, each with its share of the devices."""
    pool: str = ""
    """The pool of the devices."""
    degrees: Layout | None = None
    """The whole layout, where devices and ranks do not say it; of a rollout engine, that of one instance."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.kind}"

    @property
    def place(self) -> tuple[str, EngineKind, int, int, str, Layout | None]:
        """The key of the engine in a profile."""
        return self.role, self.kind, self.num_devices, self.ranks, self.pool, self.degrees

    @property
    def layout(self) -> Layout:
        return self.degrees or Layout(tp=self.num_devices // max(self.ranks, 1), dp=self.ranks)


class MeasuredFunction(msgspec.Struct, frozen=True):
    """The measured latency of a reward or an op."""

    call: str
    quantiles_s: tuple[float, ...]
    """Quantiles of one unit's latency at evenly spaced probabilities, ends included, with the engine's overhead."""
    concurrency: int = 1
    task_s: float = 0.0
    """Fixed seconds of each task."""
    num: int = 0


class MeasuredSync(msgspec.Struct, frozen=True):
    """The measured weight sync from a trainer to a rollout engine, checksums included."""

    role: str
    transport: SyncTransport = "broadcast"
    num_bytes: int = 0
    publish_s: float = 0.0
    """Seconds on the trainer."""
    load_s: float = 0.0
    """Seconds on the rollout engine."""
    num: int = 0
    pools: tuple[str, str] | None = None
    """The trainer's and the rollout engine's; None: this machine."""


class Machine(msgspec.Struct, frozen=True):
    """The machine of a measurement."""

    processor: str
    cores: int
    device: str
    versions: dict[str, str]

    @classmethod
    def here(cls, device: str) -> Machine:
        """Describe this machine."""
        import importlib.metadata

        versions = {"python": platform.python_version()}
        for package in ("m2flow", "torch", "transformers", "numpy"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(_processor(), cores, device, versions)


_NO_MACHINE = Machine("", 0, "", {})


class Profile(msgspec.Struct, frozen=True):
    """The measured constants of one flow."""

    flow: str = ""
    made: str = ""
    """Time of the measurement, in ISO 8601."""
    machine: Machine = _NO_MACHINE
    models: dict[str, str] = {}
    """Role -> description of its model (`model_description`)."""
    engines: tuple[MeasuredEngine, ...] = ()
    functions: tuple[MeasuredFunction, ...] = ()
    syncs: tuple[MeasuredSync, ...] = ()
    hop_s: float = 0.0
    """Seconds from the end of a task to the start of the next one on another worker, through the controller."""
    byte_s: float = 0.0
    """Seconds for a byte of samples between workers."""
    turn_s: float = 0.0
    """Seconds from the last task of a step to the first of the next, beyond a hop: the program's time to make its calls."""
    gather_s: float = 0.0
    """Seconds that finished samples wait to be sent with others."""
    startup_s: float = 0.0
    """Seconds until all workers have loaded their engines; 0 if not measured."""
    prompts: tuple[int, ...] = ()
    """Tokens of the recorded prompts."""
    responses: tuple[tuple[int, ...], ...] = ()
    """Tokens of the responses to each of them."""
    icc: float = 0.0
    """Intraclass correlation of the log lengths of responses to one prompt."""
    draws_per_group: float = 0.0
    """Prompts that the flow's refills (`generate(count=..., keep=...)`) drew for each group that they kept; 0: there was none."""
    load: float = 0.0
    """Load average of the machine when the measurement began."""
    version: int = VERSION
    episodes: EpisodeCosts = EpisodeCosts()
    """Episodes of agents: their turns, and what their tools take."""
    attained: Overrides = {}
    """What engines attain (`m2flow.planner.pools.Attained`), where a file by hand says so."""

    def engine(self, role: str, kind: EngineKind, num_devices: int, ranks: int = 1, pool: str = "") -> MeasuredEngine | None:
        """Find the constants of an engine on exactly so many devices and ranks."""
        wanted = role, kind, num_devices, ranks, pool, None
        return next((found for found in self.engines if found.place == wanted), None)

    def engine_in(self, engine: EngineId, pool: str, layout: Layout) -> MeasuredEngine | None:
        """Find the constants of an engine in exactly this layout; of a rollout engine, with any number of instances."""
        dp = {"dp": 1} if engine.kind == "rollout" else {}
        wanted = msgspec.structs.replace(layout, **dp)
        of_pool = (one for one in self.engines if (one.role, one.kind, one.pool) == (engine.role, engine.kind, pool))
        return next((one for one in of_pool if one.degrees and msgspec.structs.replace(one.degrees, **dp) == wanted), None)

    def updated(self, newer: Profile) -> Profile:
        """Merge with a newer profile, which takes precedence wherever it has values."""
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
            draws_per_group=newer.draws_per_group or self.draws_per_group,
            episodes=newer.episodes if newer.episodes.episodes else self.episodes,
        )

    def function(self, call: str) -> MeasuredFunction | None:
        return next((found for found in self.functions if found.call == call), None)

    def lengths(self) -> Lengths:
        """The recorded response lengths as a distribution.

        Raises:
            SpecError: there are none.
        """
        if not self.responses:
            raise SpecError("the profile saw no answer of the flow's own length", now="Give lengths: a trace, a run, or a distribution.")
        groups = [np.array(answers, np.int64) for answers in self.responses]
        cap = max(int(group.max()) for group in groups)
        cut = [group >= cap for group in groups]
        return Measured(f"profile of {self.flow}", [0] * len(groups), self.prompts, groups, cut=cut, cap=cap)

    def save(self, path: Path) -> None:
        """Write the profile as JSON. Raises SpecError if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise SpecError(f"can't write the profile {path}: {error.strerror}", now="Give another place with --out.") from None

    def machine_changes(self, device: str) -> list[str]:
        """List how this machine differs from the measured one, as reasons to doubt predictions."""
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

    def doubts(self, spec: ClusterSpec, flow: str) -> list[str]:
        """List why the profile may not apply to this flow on this cluster."""
        what = f"the profile is of {self.flow}: {flow} is planned with its lengths and its times, and what it has none of is modelled"
        return [what] * (self.flow not in ("", flow)) + self._doubts_of(spec)

    def _doubts_of(self, spec: ClusterSpec) -> list[str]:
        if spec.pools:
            missing = [pool for pool in spec.pools if not any(engine.pool == pool for engine in self.engines)]
            what = f"the profile is of {self.machine.processor or 'other engines'}, and says nothing about {', '.join(missing)}"
            return [f"{what}: these are modelled"] if missing and (self.engines or self.machine.processor) else []
        changes = self.machine_changes(device_of(spec)) if self.machine.processor else []  # A file by hand is of no machine.
        return [f"the profile may not hold here: {line}" for line in changes]

    def check(self, models: Mapping[str, Model], spec: ClusterSpec) -> None:
        """Refuse a profile of other models or engines.

        Raises:
            SpecError: the profile was measured with another model than the flow's or the spec's (`shapes`), or another engine.
        """
        now = "Measure again: m2flow profile FLOW --cluster SPEC."
        for role, model in models.items():
            told = model_description(model)
            if role in self.models and self.models[role] != told:
                raise SpecError(f"the profile was made with another model for {role}: {self.models[role]}, not {told}", now=now)
        for role in self._in_other_sizes(models, spec):
            what = f"the profile was made with another model for {role} than `shapes` says: {self.models[role]}"
            raise SpecError(what, now="Leave out the shape or the profile: its times are those of its model.")
        engines = {"rollout": spec.rollout.engine, "train": spec.train.engine}
        for found in self.engines:
            if found.engine and found.engine != engines[found.kind]:
                raise SpecError(f"the profile measured the {found.kind} engine {found.engine!r}, not {engines[found.kind]!r}", now=now)

    def _in_other_sizes(self, models: Mapping[str, Model], spec: ClusterSpec) -> list[str]:
        """Roles of which the spec says another size than their own model has, where the profile has times of that."""
        timed = {one.role for one in self.engines if one.pool in spec.planned_pools} & models.keys() & self.models.keys()
        planned = shapes_of(models, spec) if spec.shapes and timed else {}
        plain = spec.model_copy(update={"shapes": {}})
        found = []
        for role in sorted(timed & planned.keys()):
            with contextlib.suppress(ModelError):  # Where its own model is not here, nothing can be compared.
                if shapes_of({role: models[role]}, plain)[role].num_parameters != planned[role].num_parameters:
                    found.append(role)
        return found

    def constants(self) -> dict[str, Constant]:
        """All constants by dotted name, with their sources."""
        found: dict[str, Constant] = {}
        for engine in self.engines:
            devices = f"{engine.num_devices}{f', {engine.ranks} ranks' if engine.ranks > 1 else ''}"
            where = f"{engine.name}[{engine.degrees or devices}]"
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
        for tool in self.episodes.tools:
            found[f"{tool.name}.tool_s"] = Constant(FunctionCost(tool.quantiles_s).mean_s, "s", f"measured: {tool.num} calls in episodes")
        if self.episodes.episodes:
            turns = [sum(turn.num_tokens > 0 for turn in one) for one in self.episodes.episodes]
            source = f"measured: {len(turns)} episodes"
            found["episode.turns"] = Constant(sum(turns) / len(turns), "", source)
            tokens = sum(turn.num_tokens for one in self.episodes.episodes for turn in one)
            found["episode.turn_tokens"] = Constant(tokens / max(sum(turns), 1), "tokens", source)
        found["hop_s"] = Constant(self.hop_s, "s", "measured: median pause between a task's end and the start of what waited for it")
        found["turn_s"] = Constant(self.turn_s, "s", "measured: mean pause between steps, beyond hop_s")
        found["byte_s"] = Constant(self.byte_s, "s/byte", "measured: parcels of samples, by size")
        if self.draws_per_group:
            found["draws_per_group"] = Constant(self.draws_per_group, "", "measured: groups judged for each that a refill kept")
        found["startup_s"] = Constant(self.startup_s, "s", "measured: until the workers were ready")
        return found


_read_profile = msgspec.json.Decoder(Profile).decode


def read_profile(path: Path) -> Profile:
    """Read a profile from its file or from the run directory that contains it.

    Raises:
        SpecError: the file is missing, not a profile, or of another version.
    """
    file = path / "profile.json" if path.is_dir() else path
    if file.suffix in (".yaml", ".yml"):
        return _by_hand(file)
    now = "Make one: m2flow profile FLOW --cluster SPEC --out FILE."
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SpecError(f"the profile {file} can't be read: {error.strerror}", now=now) from None
    try:
        head = _read_head(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SpecError(f"{file} is no profile: {error}", now=now) from None
    if head.version != VERSION:
        raise SpecError(f"the profile {file} has the format {head.version}; this m2flow reads {VERSION}", now="Measure again.")
    missing = (
        set(Profile.__struct_fields__)
        - {"load", "version", "attained", "episodes"}
        - msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys()
    )
    if missing:
        raise SpecError(f"{file} is a damaged profile: it has no {', '.join(sorted(missing))}", now="Measure again.")
    try:
        return _read_profile(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SpecError(f"{file} is a damaged profile: {error}", now="Measure again.") from None


def _by_hand(file: Path) -> Profile:
    try:
        given = yaml.safe_load(file.read_text()) or {}
        found = msgspec.convert(given, Profile)
    except OSError as error:
        raise SpecError(
            f"the costs file {file} can't be read: {error.strerror}", now="Check the path, or measure anew with m2flow profile."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{file} is no file of costs: {error}", now="m2flow/planner/profiles.py shows its form.") from None
    unknown = list(_unknown(given, msgspec.to_builtins(found), ""))
    if unknown:
        raise SpecError(f"{file}: {unknown[0]}: no such field", now="m2flow/planner/profiles.py shows its form.")
    for one in found.engines:
        degrees = one.layout.tp, one.layout.pp, one.layout.sp, one.layout.dp, one.layout.ep
        if min(degrees) < 1:
            now = "Say its whole layout, as `degrees: {tp: 4}`; of a rollout engine, that of one instance."
            raise SpecError(f"{file}: the times of {one.name} are of no layout", now=now)
    return found


def _unknown(given: object, made: object, where: str) -> Iterator[str]:
    """Yield the fields of a file that its reader has ignored."""
    if isinstance(given, dict) and isinstance(made, dict):
        for name, value in given.items():
            here = f"{where}.{name}" if where else str(name)
            if name in made:
                yield from _unknown(value, made[name], here)
            else:
                yield here
    elif isinstance(given, list) and isinstance(made, list | tuple):
        for i, pair in enumerate(zip(given, made, strict=False)):
            yield from _unknown(*pair, f"{where}[{i}]")


def model_description(model: Model) -> str:
    """Describe what determines a model's speed: its folder's name, head, dtype and rank of adapters."""
    adapters = f", adapters of rank {model.lora.rank}" if model.lora is not None else ""
    return f"{Path(model.path).name} ({model.head}, {model.dtype}{adapters})"


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _Head(msgspec.Struct):
    version: int
    engines: list[msgspec.Raw]


_read_head = msgspec.json.Decoder(_Head).decode


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


# ---- costs from a profile

HERE = ""
"""The name of the pool that is this machine."""

C = TypeVar("C", bound=msgspec.Struct)


@final
class ProfiledCosts(Costs):
    """Measured costs of one flow, and those of `modelled` where nothing was measured."""

    def __init__(self, profile: Profile, modelled: ModelledCosts) -> None:
        self.profile = profile
        self.modelled = modelled

    def for_spec(self, spec: ClusterSpec) -> ProfiledCosts:
        return ProfiledCosts(self.profile, self.modelled.for_spec(spec))

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self.modelled.layouts(engine, pool, num_devices)

    def layouts_like(self, engine: EngineId, pool: str, num_devices: int, like: Layout) -> Sequence[Layout]:
        return self.modelled.layouts_like(engine, pool, num_devices, like)

    def unit(self, engine: EngineId, pool: str) -> int:
        return self.modelled.unit(engine, pool)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        modelled = self.modelled.decode(engine, pool, layout)
        measured = self.profile.engine_in(engine, pool, layout) or self._measured(engine, pool, layout.num_replica_devices)
        if measured is not None and measured.decode is not None:
            return self._decode_cost(engine, measured, modelled)
        known = self._other(engine, pool, lambda one: one.decode is not None)
        if known is None:
            return modelled
        there = self.modelled.decode(engine, pool, known.layout)
        return _scaled(modelled, self._decode_cost(engine, known, there), there)

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        modelled = self.modelled.train(engine, pool, layout)
        if layout.recompute and self.profile.engine_in(engine, pool, layout) is None:
            plain = msgspec.structs.replace(layout, recompute=False)
            return _scaled_train(modelled, self.train(engine, pool, plain), self.modelled.train(engine, pool, plain))
        measured = self.profile.engine_in(engine, pool, layout) or self._measured(engine, pool, layout.num_devices, layout.dp)
        known = measured or self._other(engine, pool, lambda one: one.update is not None or one.forward is not None)
        if known is None:
            return modelled
        there = modelled if measured else self.modelled.train(engine, pool, known.layout)
        update = _pass_cost(known.update) if known.update else there.update
        # For a trainer that never ran a forward pass alone: a third of forward and backward.
        forward = _pass_cost(known.forward) if known.forward else _times(update, 1 / 3) if known.update else there.forward
        optimizer_s = known.optimizer_s or there.optimizer_s
        found = TrainCost(forward, update, optimizer_s)
        return found if measured else _scaled_train(modelled, found, there)

    def function(self, call: str) -> FunctionCost:
        found = self.profile.function(call.partition("@")[0])
        return self.modelled.function(call) if found is None else FunctionCost(found.quantiles_s, found.concurrency, found.task_s)

    def episodes(self) -> EpisodeCosts:
        return self.profile.episodes

    def draws_per_group(self) -> float:
        return self.profile.draws_per_group or self.modelled.draws_per_group()

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self.modelled.footprint(engine, pool, layout)

    def device_bytes(self, pool: str) -> int:
        return self.modelled.device_bytes(pool)

    def host_bytes(self, pool: str) -> int:
        return self.modelled.host_bytes(pool)

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        modelled = self.modelled.switch(engine, pool, footprint)
        known = self._other(engine, pool, lambda one: one.come_s > 0)
        return modelled if known is None else Switch(0.0, known.come_s, modelled.is_resident, modelled.kept_bytes, modelled.rebuild_s)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        ends = source[0], target[0]
        given = next((sync for sync in self.profile.syncs if sync.role == role and sync.pools == ends), None)
        if given is not None:
            return given.publish_s + given.load_s
        transport = "same process" if is_same_devices else "shared memory"
        found = next((sync for sync in self.profile.syncs if (sync.role, sync.transport) == (role, transport)), None)
        if found is None or (source[0], target[0]) != (HERE, HERE):
            return self.modelled.sync_s(role, source, target, is_same_devices=is_same_devices)
        return found.publish_s + found.load_s + self.profile.turn_s  # A sync comes once a step, as the program's turn does.

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        if (source, target) == (HERE, HERE) and self.profile.hop_s:
            return self.message_s() + num_bytes * self.profile.byte_s
        return self.modelled.hop_s(num_bytes, source, target)

    def smaller_caches(self, engine: EngineId, pool: str, layout: Layout) -> Sequence[tuple[Footprint, int]]:
        return self.modelled.smaller_caches(engine, pool, layout)

    def arithmetic(self, engine: EngineId, pool: str, layout: Layout) -> Arithmetic | None:
        return self.modelled.arithmetic(engine, pool, layout)

    def stage_order(self, engine: EngineId, pool: str, layout: Layout) -> StageOrder:
        return self.modelled.stage_order(engine, pool, layout)

    def held_parts(self, engine: EngineId, pool: str, layout: Layout) -> tuple[HeldPart, ...]:
        return self.modelled.held_parts(engine, pool, layout)

    def rest_s(self) -> float:
        return 0.0 if self.profile.turn_s else self.modelled.rest_s()

    def spread(self, work: str) -> tuple[float, float]:
        """Return the spread of a time: 10% either way of what was measured, and the model's of what is modelled."""
        is_measured = {
            "generate": any(one.decode for one in self.profile.engines),
            "forward": any(one.forward for one in self.profile.engines),
            "update": any(one.update for one in self.profile.engines),
            "sync": bool(self.profile.syncs),
        }
        return (1 / 1.1, 1.1) if is_measured.get(work) else self.modelled.spread(work)

    def message_s(self) -> float:
        return self.profile.hop_s / 2  # To the controller, and from it.

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return max((one.slowdown.get(beside, 1.0) for one in self.profile.engines if one.kind == engine), default=1.0)

    def constants(self) -> dict[str, Constant]:
        """The measured constants, and the modelled ones still in use."""
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
        """The largest measured layout of the engine for which `has` holds."""
        wanted = engine.role, engine.kind, pool
        known = [one for one in self.profile.engines if (one.role, one.kind, one.pool) == wanted and has(one)]
        return max(known, key=lambda one: one.layout.num_devices, default=None)

    def _decode_cost(self, engine: EngineId, measured: MeasuredEngine, modelled: DecodeCost) -> DecodeCost:
        decode = measured.decode
        assert decode is not None
        context = self.modelled.extent(engine.role).context
        return DecodeCost(
            step_s=decode.step_s,
            sample_s=decode.sample_s + decode.context_s * context,
            prefill_token_s=decode.prefill_token_s or modelled.prefill_token_s,
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


def _scaled_train(modelled: TrainCost, known: TrainCost, there: TrainCost) -> TrainCost:
    """Scale a trainer's modelled cost by measured and modelled ones of another layout."""
    ratio = modelled.optimizer_s / there.optimizer_s if there.optimizer_s else 1.0
    return TrainCost(
        _scaled(modelled.forward, known.forward, there.forward),
        _scaled(modelled.update, known.update, there.update),
        known.optimizer_s * ratio,
    )


def _scaled(modelled: C, known: C, known_modelled: C) -> C:
    """Scale modelled constants by the ratio of measured to modelled ones elsewhere; where the model has 0, take the measured one.

    What a pass through stages waits for is the layout's: it stays as modelled.
    """
    changes = {}
    for name in modelled.__struct_fields__:
        if name in ("waits", "run_tokens"):
            continue
        here, measured, there = (getattr(one, name) for one in (modelled, known, known_modelled))
        if isinstance(measured, float):
            changes[name] = here * measured / there if there else measured
    return msgspec.structs.replace(modelled, **changes)
