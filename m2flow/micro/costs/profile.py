"""A profile: the constants of the cost model as they were measured on real engines, with how well each was.

    m2flow profile FLOW --(probing, measuring)--> Profile, a JSON file --(m2flow.micro.costs.profiled)--> Costs

Plain data. A constant belongs to an engine of a role on a number of devices; on a CPU a device is a core, and an engine has a thread for
each. What was measured in another version of this format, or is no profile, is refused.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from m2flow.errors import SpecError
from m2flow.micro.costs.fitting import Quality
from m2flow.micro.costs.terms import Constant, EngineKind, Layout
from m2flow.micro.lowering.placement import device_of
from m2flow.micro.plan import SyncTransport
from m2flow.micro.rollouts.lengths import Lengths
from m2flow.micro.rollouts.measured import Measured
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

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
