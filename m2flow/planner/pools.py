"""Describe the devices that plans are made for: data sheets, pools with their transfer rates, and the legal layouts of an engine on them.

    devices.yaml, the user's own files --device_list--> DeviceList --find--> Device
    efficiencies.yaml, a spec's `costs:` file --attained_by--> Attained, what an engine makes of them
    ClusterSpec, devices.yaml --pools_of--> Pool --> seconds of a copy, an all-gather, an optimiser step
    ParallelLayouts of the engine, ModelShape, Pool --legal_layouts--> Layouts, those that its options allow: accepted
    Layout, options of the engine --orders_of, fastest_order--> StageOrder --passes_of--> Passes, how its stages work

Device files have one format. They are read in this order, a later one adding to and replacing entries of an earlier one: the built-in
list, `~/.config/m2flow/devices.yaml` (or under `$XDG_CONFIG_HOME`), the file that the cluster spec names (`devices`). Attainable fractions
are in no data sheet: they are what makes the model inaccurate, and what `m2flow profile` measures.

Collectives are modelled by their bytes on the slowest link, inside a node and then across nodes, plus one latency. Limits: contention
between engines, and networks that are not flat, are not modelled.

All legal layouts are listed, good or not; memory and pins are the search's concern. Degrees of tensor and sequence parallelism are divisors
of a node's devices, so that their groups lie inside one node (where there is one alone, of the engine's devices); a pin may ask for tensor
parallelism over several nodes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from m2flow.engines.contract import ParallelLayouts
from m2flow.engines.registry import ONE_F_ONE_B, ZERO_BUBBLE, capabilities_of, engines
from m2flow.errors import EngineError, SpecError, did_you_mean
from m2flow.micro.protocol.cost_terms import Constant, EngineKind, Layout, StageOrder, StageSchedule, TrainCost
from m2flow.planner.model_shapes import ModelShape
from m2flow.recipe import is_count
from m2flow.spec import ClusterSpec, PoolSpec

BUILT_IN = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class Device:
    """A device with its share of its node's resources. SI units; `sources` has the source of each number."""

    name: str
    title: str
    bf16_tflops: float
    """Dense peak in 10^12 operations a second; the same for float16."""
    fp32_tflops: float
    memory_gib: float
    memory_gb_s: float
    host_link_gb_s: float
    """Between the device and pinned memory of its host, in each direction."""
    link_gb_s: float
    """Between the devices of a node, for each device, in each direction."""
    node_devices: float
    """Devices of the node that the next three are of."""
    network_gb_s: float
    """Between a whole node and the others, in each direction."""
    host_memory_gib: float
    """Memory of a node."""
    host_memory_gb_s: float
    """Memory bandwidth of a node, which limits an optimiser step on the host."""
    pageable: float
    """Rate of a copy to pageable host memory, as a fraction of one to pinned memory."""
    attained_link: float
    attained_sync: float
    """Attained fraction of the slowest link in a weight broadcast."""
    train_mfu: float
    prefill_mfu: float
    decode_mfu: float
    """Model FLOPs utilisation: in training, in forward passes, in decoding."""
    decode_mbu: float
    step_mbu: float
    """Memory bandwidth utilisation: in decoding, in an optimiser step."""
    usable_memory: float
    usable_host_memory: float
    launch_s: float
    """Fixed time of a decode step."""
    layer_s: float
    """Fixed time of each layer of a decode step."""
    microbatch_s: float
    collective_s: float
    """Latency of a small all-reduce inside a node."""
    network_collective_s: float
    hop_s: float
    """Latency of a hop between workers."""
    channel_gb_s: float
    """Rate at which samples move between processes; at most the network's."""
    sync_s: float
    """Fixed time of a weight sync."""
    switch_s: float
    """Fixed time to offload or onload an engine."""
    expert_imbalance: float
    hidden: float
    shares_host_memory: bool = False
    """Whether its memory is the host's, so that nothing is offloaded."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def flops(self, num_bytes: int) -> float:
        """Peak dense operations a second on numbers of this many bytes."""
        return 1e12 * (self.fp32_tflops if num_bytes >= 4 else self.bf16_tflops)

    def each_of_node(self, num_devices: int) -> float:
        """The part of a node's network and host memory that each of so many devices gets: those of a smaller node have no more."""
        return 1 / max(self.node_devices, num_devices)

    def imbalance(self, share: float) -> float:
        """Ratio of the busiest device's work to the mean, if this share of the work is distributed by expert."""
        return 1 + (self.expert_imbalance - 1) * share

    def constants(self) -> dict[str, Constant]:
        """All numbers by field name, with their sources."""
        return {
            name: Constant(getattr(self, name), _unit(name), self.sources.get(name, ""))
            for name in _NUMBERS
            if name != "shares_host_memory"
        }


_NUMBERS = tuple(f.name for f in fields(Device) if f.name not in ("name", "title", "sources"))
_FRACTIONS = tuple(n for n in _NUMBERS if n.startswith(("attained", "usable")) or n.endswith(("mfu", "mbu")) or n in ("pageable", "hidden"))
_ENTRY = {*_NUMBERS, "title", "source", "like"}


def _unit(name: str) -> str:
    for suffix, unit in (("tflops", "10^12 FLOP/s"), ("gib", "GiB"), ("gb_s", "10^9 B/s")):
        if name.endswith(suffix):
            return unit
    return "1" if name in _FRACTIONS or name in ("expert_imbalance", "node_devices") else "s"


class DeviceList:
    """The known devices by name."""

    def __init__(self, devices: dict[str, Device]) -> None:
        self._devices = devices

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def find(self, name: str, *, where: str = "") -> Device:
        """Find a device by name. Raises `SpecError` with the nearest name if there is none."""
        found = self._devices.get(name.lower())
        if found is None:
            near = did_you_mean(name.lower(), self._devices, cutoff=0.5)
            raise SpecError(f"there is no device {name!r}", where=where, now=f"{near} A file of yours adds one: `devices: mine.yaml`.")
        return found


def device_list(own: str | Path | None = None) -> DeviceList:
    """Read the built-in devices, those of the user's configuration, and those of the file that the cluster spec names.

    Raises:
        SpecError: a missing file or invalid YAML, an unknown field, a value of the wrong type, each with its line.
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "m2flow" / "devices.yaml"
    files = [config] if config.is_file() else []
    files += [Path(own).expanduser()] if own else []
    return DeviceList(_resolved([BUILT_IN, *files])) if files else _built_in()


@functools.cache
def _built_in() -> DeviceList:
    return DeviceList(_resolved([BUILT_IN]))


@dataclass(frozen=True)
class _Value:
    value: float | str | bool
    source: str
    where: str


def _resolved(files: list[Path]) -> dict[str, Device]:
    defaults: dict[str, _Value] = {}
    entries: dict[str, dict[str, _Value]] = {}
    for file in files:
        for section, name, entry in _sections(file):
            if section == "defaults":
                defaults |= entry
            elif "like" in entry or name not in entries:
                entries[name] = entry
            else:
                entries[name] = entries[name] | entry
    return {name: _device(name, entries, defaults) for name in entries}


def _device(name: str, entries: dict[str, dict[str, _Value]], defaults: dict[str, _Value]) -> Device:
    values, chain = dict(entries[name]), [name]
    while "like" in values:
        like = values.pop("like")
        base = str(like.value)
        if base not in entries or base in chain:
            now = "It is like itself." if base in chain else did_you_mean(base, entries)
            raise SpecError(f"{name}: like {base!r}, which is no other device", where=like.where, now=now)
        chain.append(base)
        values = entries[base] | values
    values = defaults | values
    missing = [number for number in _NUMBERS if number not in values and number != "shares_host_memory"]
    if missing:
        where = next(iter(entries[name].values())).where if entries[name] else ""
        raise SpecError(
            f"the device {name} has no {', '.join(missing)}", where=where, now="Add them, or `like: h100` to take the rest from there."
        )
    numbers = {number: values[number].value for number in _NUMBERS if number in values}
    title = values.get("title")
    sources = {number: values[number].source for number in numbers}
    return Device(name=name, title=str(title.value) if title else name, sources=sources, **numbers)  # type: ignore[arg-type]


_MOST = 1e30
"""The largest value of any number of a device."""


def _sections(file: Path) -> list[tuple[str, str, dict[str, _Value]]]:
    """List (`defaults` or `devices`, name, entry) of a file, in its order."""
    try:
        root = yaml.compose(file.read_text(), yaml.SafeLoader)
    except OSError as error:
        raise SpecError(
            f"the device list {file} can't be read: {error.strerror}", now="Check the path and the rights of the file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"not YAML: {error}", where=str(file), now="Mend that line; lists and mappings are indented by spaces.") from None
    found = []
    for section, node, line in _items(root, file, "a device list is a mapping, with `devices:`"):
        _known(section, {"defaults", "devices"}, f"{file}:{line}")
        if section == "defaults":
            found.append((section, "", _entry(node, file)))
        else:
            inside = _items(node, file, "`devices` are entries by name")
            found += [(section, name.lower(), _entry(entry, file)) for name, entry, _ in inside]
    return found


def _entry(node: yaml.Node, file: Path) -> dict[str, _Value]:
    items = _items(node, file, "an entry is a mapping, like `memory_gib: 80`")
    own = next((str(_plain(value)) for name, value, _ in items if name == "source"), str(file))
    entry = {}
    for name, value, line in items:
        where = f"{file}:{line}"
        _known(name, _ENTRY, where)
        if name != "source":
            entry[name] = _checked(name, value, own, where, file)
    return entry


def _checked(name: str, node: yaml.Node, source: str, where: str, file: Path) -> _Value:
    if isinstance(node, yaml.MappingNode):
        parts = {key: _plain(value) for key, value, _ in _items(node, file, "")}
        for key in parts:
            _known(key, {"value", "source"}, where)
        value, source = parts.get("value"), str(parts.get("source", source))
    else:
        value = _plain(node)
    if name in ("title", "like") or (name == "shares_host_memory" and isinstance(value, bool)):
        return _Value(str(value).lower() if name == "like" else value if isinstance(value, bool) else str(value), source, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise SpecError(
            f"{name}: {value!r:.40} is no number", where=where, now="Check the number and the unit of that line against the data sheet."
        )
    lowest_ok = value >= 0 if (name.endswith("_s") and not name.endswith("gb_s")) or name == "hidden" else value > 0
    if not lowest_ok or (name in _FRACTIONS and value > 1):
        raise SpecError(
            f"{name} is {value}; it must be {'a fraction of 1' if name in _FRACTIONS else 'positive'}",
            where=where,
            now="Check the number and the unit of that line against the data sheet.",
        )
    return _Value(float(value), source, where)


def _items(node: yaml.Node | None, file: Path, what: str) -> list[tuple[str, yaml.Node, int]]:
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(what, where=f"{file}:{node.start_mark.line + 1 if node else 1}")
    return [(str(key.value), value, key.start_mark.line + 1) for key, value in node.value]


def _plain(node: yaml.Node) -> object:
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except ValueError as error:  # A date that there is not, a number of thousands of digits.
        raise SpecError(f"{node.value!s:.40} can't be read: {error}", where=f"line {node.start_mark.line + 1} of the device list") from None


def _known(name: str, names: set[str], where: str) -> None:
    if name not in names:
        raise SpecError(f"{name}: no such field", where=where, now=did_you_mean(name, sorted(names)))


# ---- what engines attain


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with the interval that it is believed to lie in, and its source."""

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high <= _MOST:
            raise ValueError(f"{self.value} lies outside of its interval from {self.low} to {self.high}, or is negative")


def _exactly(value: float) -> Estimate:
    return Estimate(value, value, value, "not modelled for this engine")


class RolloutAttained(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rollout engine attains. The values here are neutral: those of a device whose list says it all."""

    weights: Estimate = _exactly(1.0)
    """Factor of `decode_mbu` at which weights and caches are read."""
    expert_layer_s: Estimate = _exactly(0.0)
    """Time of a layer of experts in a decode step beyond reading and computing: routing, many small matrices."""
    host_step_s: Estimate = _exactly(0.0)
    """Host time of a decode step beyond the device's `launch_s`."""
    host_sample_s: Estimate = _exactly(0.0)
    """Host time of a decode step for each running sample: its slot, its sampling, its text."""
    wake_s: Estimate = _exactly(0.0)
    """Fixed time until a server that released its memory decodes again: allocations, caches, graphs."""
    kept_gib: Estimate = _exactly(0.0)
    """Device memory that a sleeping server keeps."""
    error: Estimate = Estimate(1.0, 0.67, 1.5, "estimate")
    """Predicted to measured times of generation."""


class TrainAttained(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a trainer attains; as in `RolloutAttained`."""

    update: Estimate = _exactly(1.0)
    """Factor of `train_mfu`, counting the passes that are recomputed."""
    forward: Estimate = _exactly(1.0)
    """Factor of `prefill_mfu` in log-probabilities and values."""
    tensor: Estimate = _exactly(1.0)
    """Factor of both where layers are shared out over devices (tensor parallelism)."""
    traffic: Estimate = _exactly(0.0)
    """Vectors of the hidden size that a layer moves through memory for a token in one pass, beside its matrices' arithmetic."""
    expert_layer_s: Estimate = _exactly(0.0)
    """Time of a layer of experts in one pass over one micro-batch beyond its operations: routing, many small matrices."""
    swap: Estimate = _exactly(1.0)
    """Factor of the host link's rate at which a trainer is offloaded and onloaded."""
    context_gib: Estimate = _exactly(0.0)
    """Device memory that an offloaded trainer keeps."""
    sync_gb_s: Estimate = _exactly(0.0)
    """Rate at which a weight sync gathers, converts and packs weights, whatever the links carry; 0: no limit."""
    matrix_s: Estimate = _exactly(0.0)
    """Time of a weight sync for each matrix of the model, whatever its size: its name, its slices, its copy."""
    rest_s: Estimate = _exactly(0.0)
    """Time of a step that belongs to none of its calls."""
    error: Estimate = Estimate(1.0, 0.67, 1.5, "estimate")
    """Predicted to measured times of training."""


class Attained(msgspec.Struct, frozen=True):
    """What the two engines of a cluster attain."""

    rollout: RolloutAttained = RolloutAttained()
    train: TrainAttained = TrainAttained()

    def constants(self) -> dict[str, Constant]:
        """All numbers by dotted name, with their intervals and sources."""
        parts = {"rollout": self.rollout, "train": self.train}
        return {
            f"attained.{kind}.{name}": Constant(
                each.value, _unit(name) if name.endswith(("_s", "_gib")) else "1", f"{each.low:g} to {each.high:g}: {each.source}"
            )
            for kind, part in parts.items()
            for name in part.__struct_fields__
            if isinstance(each := getattr(part, name), Estimate)
        }


_EFFICIENCIES = Path(__file__).with_name("efficiencies.yaml")
_SERVERS = ("sglang", "vllm")
_TRAINERS = ("deepspeed", "fsdp", "megatron")
"""Engines that have entries, and the `default` where these lack something. The embedded ones have their own alone; others are measured."""

Overrides = dict[str, dict[str, dict[str, Estimate]]]
"""`rollout` or `train` -> an engine or `default` -> field -> number."""
msgspec.json.Decoder(Overrides)  # Prepares the type for `convert`: two threads at once must not.


def attained_by(rollout: str, train: str, own: Overrides | None = None) -> Attained:
    """What the engines of these names attain on accelerators, with a user's own numbers in place of the built-in ones.

    Raises:
        SpecError: an unknown field.
    """
    return Attained(_replaced("rollout", rollout, RolloutAttained(), own or {}), _replaced("train", train, TrainAttained(), own or {}))


_A = TypeVar("_A", RolloutAttained, TrainAttained)


def _replaced(kind: str, name: str, neutral: _A, own: Overrides) -> _A:
    fields: dict[str, Estimate] = {}
    for table, has_default in ((_built_in_efficiencies(), name in (*_SERVERS, *_TRAINERS)), (own, True)):
        of_kind = table.get(kind, {})
        fields |= {**(of_kind.get("default", {}) if has_default else {}), **of_kind.get(name, {})}
    for unknown in fields.keys() - set(neutral.__struct_fields__):
        now = did_you_mean(unknown, neutral.__struct_fields__)
        raise SpecError(f"attained.{kind}.{name}.{unknown}: no such number", now=now)
    return msgspec.structs.replace(neutral, **fields)


def read_overrides(file: Path) -> Overrides:
    """Read the `attained:` of a costs file; empty if it has none.

    Raises:
        SpecError: it can't be read, or an entry is no number with its interval and source.
    """
    try:
        found = yaml.safe_load(file.read_text())
        return msgspec.convert((found or {}).get("attained", {}), Overrides)
    except OSError as error:
        raise SpecError(
            f"the costs file {file} can't be read: {error.strerror}", now="Check the path and the rights of the file."
        ) from None
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise SpecError(f"{file}: {error}", now="An entry is like `wake_s: {value: 2, low: 1, high: 4, source: measured}`.") from None


@functools.cache
def _built_in_efficiencies() -> Overrides:
    return msgspec.convert(yaml.safe_load(_EFFICIENCIES.read_text()), Overrides)


GIB = 2**30


@dataclass(frozen=True)
class Pool:
    """Devices of one kind. Bytes and seconds; rates are those of one device, attained ones unless the name says peak."""

    name: str
    device: Device
    num_nodes: int
    per_node: int
    memory_bytes: int
    """A device's memory that engines may use."""
    host_bytes: int
    """Host memory that engines may use, for each device."""
    link_bytes_s: float
    """Rate to other devices of the node."""
    network_bytes_s: float
    """Rate to other nodes: the device's share of the node's network."""
    pinned_bytes_s: float
    """Rate to and from pinned host memory."""
    attained: Attained = field(default_factory=Attained)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def decode_bytes_s(self) -> float:
        return self.device.memory_gb_s * 1e9 * self.device.decode_mbu * self.attained.rollout.weights.value

    @property
    def step_bytes_s(self) -> float:
        return self.device.memory_gb_s * 1e9 * self.device.step_mbu

    @property
    def host_step_bytes_s(self) -> float:
        """Rate of an optimiser step on the host: this device's share."""
        return self.device.host_memory_gb_s * 1e9 * self.device.step_mbu * self.device.each_of_node(self.per_node)

    def host_link_bytes_s(self, *, is_pinned: bool) -> float:
        return self.pinned_bytes_s * (1.0 if is_pinned else self.device.pageable)

    def is_in_node(self, num_devices: int) -> bool:
        return num_devices <= self.per_node

    def within(self, num_devices: int) -> int:
        """Devices of which degrees are divisors, so that groups lie inside one node: a node's, or where there is one all that are asked."""
        return self.per_node if self.num_nodes > 1 else num_devices

    def between_bytes_s(self, num_devices: int) -> float:
        """Rate among so many neighbouring devices: the node's links, or the network."""
        return self.link_bytes_s if self.is_in_node(num_devices) else min(self.link_bytes_s, self.network_bytes_s)

    def latency_s(self, num_devices: int) -> float:
        """Latency of a small all-reduce."""
        if num_devices <= 1:
            return 0.0
        return self.device.collective_s if self.is_in_node(num_devices) else self.device.network_collective_s

    def gather_s(self, num_bytes: float, group: int, stride: int = 1) -> float:
        """Seconds of an all-gather after which each rank has so many bytes, or of the reverse reduce-scatter. An all-reduce is both.

        Args:
            stride: the group is every `stride`-th device.
        Source:
            Hierarchical rings: (m - 1)/m of the bytes over the link of a node with m members, then (k - 1)/k of each member's m-th part
            over its share of the network, for k nodes.
        """
        if group <= 1:
            return 0.0
        members = max(1, min(group, self.per_node // stride))
        nodes = -(-group // members)
        inside = (members - 1) / members * num_bytes / self.link_bytes_s
        across = (nodes - 1) / nodes * num_bytes / members / self.network_bytes_s
        return inside + across + self.latency_s(group * stride)


def pools_of(spec: ClusterSpec, own: Overrides | None = None) -> dict[str, Pool]:
    """Make the pools of a spec by name; this machine, as a pool named "", if it names none.

    Args:
        own: what engines attain by a user's own file; by default the one that the spec names (`costs:`).
    Raises:
        SpecError: a device that no list has, with the nearest name; or this machine's GPU is none of them.
    """
    devices = device_list(spec.devices)
    own = own or (read_overrides(Path(spec.costs)) if spec.costs else None)
    found = {}
    for name, pool in spec.planned_pools.items():
        if not name:
            pool = _this_machine(pool)
        device = devices.find(pool.device, where=f"pools.{name}.device")
        is_modelled = not device.shares_host_memory
        found[name] = _pool(name, pool, device, attained_by(spec.rollout.engine, spec.train.engine, own) if is_modelled else Attained())
    return found


def _pool(name: str, spec: PoolSpec, device: Device, attained: Attained) -> Pool:
    memory = (spec.memory_gib or device.memory_gib) * GIB
    network = (
        spec.network_gb_s / spec.devices_per_node if spec.network_gb_s else device.network_gb_s * device.each_of_node(spec.devices_per_node)
    )
    return Pool(
        name=name,
        device=device,
        num_nodes=spec.nodes,
        per_node=spec.devices_per_node,
        memory_bytes=int(memory * device.usable_memory),
        host_bytes=0
        if device.shares_host_memory
        else int(host_memory_gib(spec, device) * GIB * device.usable_host_memory / spec.devices_per_node),
        link_bytes_s=(spec.link_gb_s or device.link_gb_s) * 1e9 * device.attained_link,
        network_bytes_s=network * 1e9 * device.attained_link,
        pinned_bytes_s=(spec.host_link_gb_s or device.host_link_gb_s) * 1e9 * device.attained_link,
        attained=attained,
    )


def host_memory_gib(spec: PoolSpec, device: Device) -> float:
    """Host memory of a node of a pool."""
    return spec.host_memory_gib or device.host_memory_gib * spec.devices_per_node * device.each_of_node(spec.devices_per_node)


def _this_machine(pool: PoolSpec) -> PoolSpec:
    """Fill in what the spec leaves open: the memory of each core, or the GPU's name and the host's memory."""
    if pool.device == "cpu":
        memory = None if pool.memory_gib else _memory_gib()
        return pool.model_copy(update={"memory_gib": memory / pool.devices_per_node}) if memory else pool
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = next((line.partition(":")[2] for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        return pool.model_copy(update={"device": _device_of(model)})
    now = "Say which, as `pools: {gpus: {device: h100, devices_per_node: 1}}`."
    raise SpecError("what GPU this machine has can't be seen: its driver says nothing", now=now)


def _device_of(model: str) -> str:
    """Map the driver's name (`NVIDIA H100 80GB HBM3`) to the name in the device list."""
    words = model.lower().replace("-", " ").split()
    name = next((word for word in words if word in ("h100", "h800", "h200", "h20", "gb200", "b200", "l40s", "a100")), "")
    if not name:
        now = "Say what it can do in a device list of yours, and plan with `pools:`."
        raise SpecError(f"this machine's GPU is a {model.strip() or 'device without a name'}, which the device list does not have", now=now)
    return f"{name}-{'80' if '80gb' in model.lower() else '40'}" if name == "a100" else name


def _memory_gib() -> float | None:
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) / 2**20


def offered(name: str, kind: EngineKind) -> ParallelLayouts:
    """The layouts that an engine offers, whether or not its dependencies are installed here.

    Raises:
        EngineError: there is no such engine.
    """
    known = {(info.name, info.kind): info.capabilities.parallel_layouts for info in engines() if info.kind == kind}
    found = known.get((name, kind))
    if found is None:
        names = sorted({one for one, of in known if of == kind})
        raise EngineError(f"there is no {kind} engine {name!r} to plan for", now=f"There are {', '.join(names)}; see `m2flow engines`.")
    return found


def spreading(kind: EngineKind) -> list[str]:
    """Engines by which a model that one device can't hold is spread over several."""
    real = [info for info in engines() if info.kind == kind and not info.factory.startswith("m2flow.testing.")]
    layouts = {info.name: info.capabilities.parallel_layouts for info in real}
    return sorted(name for name, can in layouts.items() if (can.tp, can.pp) != (1, 1) or max(can.zero) == 3)


def accepted(shape: ModelShape, layouts: Iterable[Layout], offers: ParallelLayouts, options: Mapping[str, object]) -> list[Layout]:
    """Those of some layouts of a model that a trainer accepts.

    Args:
        options: its own, from the cluster spec.

    >>> from m2flow.planner.model_shapes import shape_named
    >>> layouts = [Layout(tp=2, sp=sp) for sp in (1, 2)]
    >>> [layout.sp for layout in accepted(shape_named("Qwen2.5-7B"), layouts, offered("deepspeed", "train"), {})]
    [1]
    """
    if refused_in_all(shape, offers):
        return []
    always = _traits_of_all(shape, options)
    excludes = [left for those in offers.excludes if (left := set(those) - always) <= _OF_LAYOUTS]
    degrees = [degree for degree, families in offers.families if shape.family not in ("", *families)]
    spread = int(str(given)) if is_count(given := options.get("etp")) else 0

    def is_accepted(layout: Layout) -> bool:
        traits = _traits(layout, options)
        if any(those <= traits for those in excludes) or any(getattr(layout, degree, 1) > 1 for degree in degrees):
            return False
        is_even = not spread or layout.ep == 1 or layout.tp * layout.num_sharing % (spread * layout.ep) == 0
        return is_even and _can_order(shape, layout, offers, options)

    return list(filter(is_accepted, layouts))


def refused_in_all(shape: ModelShape, offers: ParallelLayouts) -> str:
    """What of a model a trainer refuses in every layout; empty: nothing that a shape shows.

    >>> from dataclasses import replace
    >>> from m2flow.planner.model_shapes import shape_named
    >>> refused_in_all(replace(shape_named("Qwen2.5-7B"), family="phi3"), offered("megatron", "train"))
    "a 'phi3' model; it has deepseek_v2, deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"
    """
    known = dict(offers.families).get("any", (shape.family,))
    if shape.family not in ("", *known):
        return f"a {shape.family!r} model; it has {', '.join(known)}"
    return "a model with sliding windows" if shape.has_windows and ("windows",) in offers.excludes else ""


_OF_LAYOUTS = {"tp", "pp", "sp", "ep", "offload", "recompute", "zero 0"}
"""The words of `ParallelLayouts.excludes` that are true of some layouts."""


def _traits(layout: Layout, options: Mapping[str, object]) -> set[str]:
    """Those of `_OF_LAYOUTS` that are true of a layout."""
    is_so = {
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
        "sp": layout.sp > 1,
        "ep": layout.ep > 1,
        "offload": layout.offload,
        "recompute": layout.recompute,
        "zero 0": layout.zero == 0 and (layout.num_sharing > 1 or "zero" in options),
    }
    return {name for name, so in is_so.items() if so}


def _traits_of_all(shape: ModelShape, options: Mapping[str, object]) -> set[str]:
    """The other words of `ParallelLayouts.excludes`, as far as they are true: of a model and of what a spec says."""
    is_so = {
        "experts": shape.num_experts > 0,
        "latent": shape.latent > 0,
        "adapters": shape.adapter_parameters > 0,
        "windows": shape.has_windows,
        "half": options.get("compute_dtype", shape.dtype) != "float32",
        "rounded": options.get("compute_dtype", shape.dtype) != shape.dtype,
    }
    return {f"{name}: {value}" for name, value in options.items()} | {name for name, so in is_so.items() if so}


def _can_order(shape: ModelShape, layout: Layout, offers: ParallelLayouts, options: Mapping[str, object]) -> bool:
    """Whether a layout's stages can compute in the order that the options say: each chunk has its layers, each turn its passes."""
    count = layout.pp * (chunks := chunks_of(options))
    if layout.pp == 1 or chunks == 1:
        return layout.pp == 1 or count <= shape.num_layers
    passes = options.get("micro_batches", layout.pp)
    is_whole = not is_count(passes) or int(str(passes)) % layout.pp == 0
    return is_whole and count <= shape.num_layers


def chunks_of(options: Mapping[str, object]) -> int:
    """Chunks of layers of a stage. What is no number the engine refuses."""
    return int(str(given)) if is_count(given := options.get("vpp", 1)) else 1


def adds_adapters(engine: str) -> bool:
    """Whether a rollout engine can receive adapters alone in a weight sync."""
    can = capabilities_of(engine, "rollout", {})
    return can is not None and can.lora


# ---- stages

_MOST_DOUBLED = 7
"""How often the parts of a micro-batch that are tried are doubled, from as many as stages on."""
CHUNK_START = 0.05
"""Share of a micro-batch's fixed time for which a part waits for the host in each further chunk, forth and back alike: an estimate."""
_WORTH_ORDER = 0.01
"""Share of a micro-batch's time that another order of stages must save."""
_LITTLE_ROOM = 0.05
"""Share of a device's memory that it may take more: others on the device have theirs."""


@dataclass(frozen=True)
class Passes:
    """How a micro-batch goes through the stages of a pipeline: in `count` parts, of which a stage holds up to `held` at once."""

    count: int = 1
    held: float = 1.0
    bubble: float = 1.0
    """As of `bubble_share`."""
    longest: float = 0.0
    """The share of a micro-batch that its longest sample is, which is not cut."""
    chunks: int = 1
    """Of layers, in each stage. A forward pass waits for a chunk of a stage."""
    chunk: float = 1.0
    """As of `ModelShape.chunk_share`."""
    put_off: float = 0.0
    """Parts whose gradients of weights are put off at once, at most."""

    @functools.cached_property
    def part(self) -> float:
        """The share of a micro-batch that its largest part is."""
        return max(1 / self.count, self.longest)

    @functools.cached_property
    def share(self) -> float:
        """The share of a micro-batch whose activations a stage keeps."""
        return max(min(self.held, self.count) / self.count, self.longest)

    @functools.cached_property
    def put_off_share(self) -> float:
        """The share of a micro-batch of which a stage keeps what gradients of weights are computed from."""
        return max(min(self.put_off, self.count) / self.count, self.longest) if self.put_off else 0.0


def passes_of(
    pp: int, order: StageOrder, chunk: float | None = None, *, recomputes: bool, longest: float = 0.0, weights: float = 1.0
) -> Passes:
    """The passes of a pipeline of so many stages.

    Args:
        chunk: as of `ModelShape.chunk_share`; by default chunks are equal.
        weights: as of `bubble_share`.

    Source:
        In flight at the first stage: as many passes as stages (1F1B); interleaved, 2 (pp - 1) + (v - 1) pp + 1 of a v-th of its layers
        (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Put off at the last: those of as many ways back as there are stages.

    >>> passes_of(4, StageOrder(8, vpp=2), recomputes=False)
    Passes(count=8, held=5.5, bubble=0.5, longest=0.0, chunks=2, chunk=0.5, put_off=0.0)
    """
    chunks, chunk = order.vpp, 1 / order.vpp if chunk is None else chunk
    held = (2 * (pp - 1) + (chunks - 1) * pp + 1) * chunk if chunks > 1 else pp
    put_off = pp * chunk if order.schedule == ZERO_BUBBLE else 0.0
    bubble = bubble_share(order, chunk, recomputes=recomputes, weights=weights)
    return Passes(order.micro_batches, float(held), bubble, longest, chunks, chunk, put_off)


class Activations(msgspec.Struct, frozen=True):
    """Bytes of a whole micro-batch's activations on a device of a trainer."""

    kept: float
    """For the way back."""
    put_off: float
    """What gradients of weights need that are put off, where that is more: layers that are computed again keep little else."""
    at_work: float
    """Of the layer or the head that is being computed."""
    gathered: float
    """Weights, of whatever part."""
    sums: float = 0.0
    """Gradients of the stage's weights before they are shared out, where they are put off: a chunk's at once."""

    def num_bytes(self, passes: Passes) -> float:
        sums = self.sums * passes.chunk if passes.put_off else 0.0
        return max(self.kept * passes.share, self.put_off * passes.put_off_share) + self.at_work * passes.part + self.gathered + sums


class StageWork(msgspec.Struct, frozen=True):
    """Seconds of a replica's stage for a whole micro-batch, forward and backward, and those that passes and chunks add."""

    work_s: float = 0.0
    """Of its tokens."""
    read_s: float = 0.0
    """Its weights read from memory in a pass: small matrix products take as long."""
    pass_s: float = 0.0
    """Launches, and what ZeRO moves in a pass."""
    sums_s: float = 0.0
    """More of a pass whose gradients of weights are put off: nothing hides their sums over ranks."""
    sent_s: float = 0.0
    """Hidden states sent on by a chunk; those of one chunk are hidden, or a part of what stages attain."""
    chunk_s: float = 0.0
    """More of a part in each further chunk: its start, and the weights of its first layer, which are gathered while nothing computes."""


def passes_excess_s(pp: int, passes: Passes, work: StageWork) -> float:
    """Seconds that a micro-batch takes a replica beyond the work of its tokens.

        (k + bubble (pp - 1)) (max(S / k, R) + c) - S + 2 (v - 1) (h + k l)

    k passes, and those that each stage waits for; S, R and c are `work_s`, `read_s`, and `pass_s` with `sums_s` where they are not hidden;
    through v chunks passes are sent v times as often, forth and back: h and l are `sent_s` and `chunk_s`.
    """
    if pp == 1:
        return work.pass_s
    turns = passes.count + passes.bubble * (pp - 1)
    each_s = max(work.work_s / passes.count, work.read_s) + work.pass_s + (work.sums_s if passes.put_off else 0.0)
    return turns * each_s - work.work_s + 2 * (passes.chunks - 1) * (work.sent_s + passes.count * work.chunk_s)


def through_stages(cost: TrainCost, work: StageWork, layout: Layout, passes: Passes | None) -> TrainCost:
    """A trainer's cost with what its stages wait for.

    Args:
        passes: how each micro-batch passes through stages, which are empty after it (`fsdp`, `megatron`). None: micro-batches of a step
            follow each other (1F1B), so that stages wait once a step, as in published runs of other systems.
    """
    if layout.pp == 1:
        return cost
    if passes is None:
        return msgspec.structs.replace(cost, optimizer_s=cost.optimizer_s + (layout.pp - 1) * work.work_s)
    sent_s = (passes.chunks - 1) * (work.sent_s + work.chunk_s) / layout.dp
    waits = (layout.pp - 1) * passes.chunk
    forward = msgspec.structs.replace(cost.forward, fixed_s=cost.forward.fixed_s + sent_s, waits=waits)
    if not work.work_s:
        return TrainCost(forward, forward, 0.0)
    update = msgspec.structs.replace(cost.update, fixed_s=passes_excess_s(layout.pp, passes, work) / layout.dp)
    return TrainCost(forward, update, cost.optimizer_s)


def bubble_share(order: StageOrder, chunk: float | None = None, *, recomputes: bool = False, weights: float = 1.0) -> float:
    """How much of the wait of 1F1B, (pp - 1) (F + B + W), a pipeline has in another order.

    Interleaved (`vpp`), a stage waits for a chunk in place of all its layers. With `schedule: zero-bubble` it computes gradients of weights
    meanwhile, (pp - 1) (F + B - W); forward, gradients of what came in and those of weights count as equally long.

    Args:
        chunk: as of `ModelShape.chunk_share`; by default chunks are equal.
        weights: the share of W that can be put off: not that of stacked experts, and nothing of weights that are frozen.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, arXiv:2401.10241, table 1 (ZB-H1).

    >>> [round(bubble_share(order), 3) for order in (StageOrder(4), StageOrder(4, vpp=2), StageOrder(4, schedule="zero-bubble"))]
    [1.0, 0.5, 0.333]
    """
    passes = 4 if recomputes else 3
    left = (passes - 2 * weights) / passes if order.schedule == ZERO_BUBBLE else 1.0
    return left * (1 / order.vpp if chunk is None else chunk)


def orders_of(shape: ModelShape, pp: int, offers: ParallelLayouts, told: Mapping[str, object], most: float) -> list[list[StageOrder]]:
    """List the orders of a trainer's stages, the simplest first, those together that differ in the number of parts alone.

    A micro-batch has as many parts as stages, or twice as many, and so on. Chunks divide the layers of the fullest stage, or are a power of
    two: some then have a layer more than others.

    Args:
        told: what a spec says of `micro_batches`, `vpp` and `schedule`.
        most: parts of a micro-batch.

    >>> from m2flow.planner.model_shapes import shape_named
    >>> groups = orders_of(shape_named("Qwen2.5-7B"), 4, offered("megatron", "train"), {}, 8)
    >>> [[(order.micro_batches, order.vpp) for order in group] for group in groups]
    [[(4, 1), (8, 1)], [(4, 2), (8, 2)], [(4, 4), (8, 4)], [(4, 7), (8, 7)]]
    """
    has = dict(offers.options)
    counts = [pp << i for i in range(_MOST_DOUBLED) if pp << i <= max(most, pp)] if "micro_batches" in has else [pp]
    if is_count(given := told.get("micro_batches")):
        counts = [int(str(given))]
    layers, most_chunks = -(-shape.num_layers // pp), 1 if any(count % pp for count in counts) else shape.num_layers // pp
    chunks = [v for v in range(1, most_chunks + 1) if layers % v == 0 or v & (v - 1) == 0] if "vpp" in has else [1]
    schedules: list[StageSchedule] = [ONE_F_ONE_B, ZERO_BUBBLE] if "schedule" in has else [ONE_F_ONE_B]
    if "vpp" in told:
        chunks = [chunks_of(told)]
    if "schedule" in told:
        schedules = [ZERO_BUBBLE if told["schedule"] == ZERO_BUBBLE else ONE_F_ONE_B]
    return [[StageOrder(count, v, schedule) for count in counts] for schedule in schedules for v in chunks]


def fastest_order(
    groups: Sequence[Sequence[tuple[StageOrder, Passes]]],
    seconds: Callable[[Passes], float],
    num_bytes: Callable[[Passes], float],
    room: float,
) -> tuple[StageOrder, Passes]:
    """The fastest of some orders, those of each group differing in the number of parts alone; a simpler one unless another saves enough.

    The number of parts takes least of those that fit; in the simplest order the largest number if none does, and no other order then. The
    others may take little more memory than that one; with less to wait for they need no more parts, so those many and half are tried.

    Args:
        seconds: of a micro-batch. num_bytes: of a device, of `room`.
    """

    def cost(pair: tuple[StageOrder, Passes]) -> tuple[bool, float]:
        is_short = num_bytes(pair[1]) > room
        return is_short, -pair[0].micro_batches if is_short else seconds(pair[1])

    best = min(groups[0], key=cost)
    if len(groups) == 1 or (needed := num_bytes(best[1])) > room:
        return best
    at, best_s, most = groups[0].index(best), seconds(best[1]), min(room, needed + _LITTLE_ROOM * room)
    for group in groups[1:]:
        some = [(seconds(pair[1]), pair) for pair in group[max(0, at - 1) : at + 1] if num_bytes(pair[1]) <= most]
        least_s, pair = min(some, key=lambda found: found[0], default=(best_s, best))
        if least_s < best_s * (1 - _WORTH_ORDER):
            best_s, best = least_s, pair
    return best


# ---- layouts


def legal_layouts(
    shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, num_devices: int, per_node: int, like: Layout | None = None
) -> tuple[Layout, ...]:
    """List the legal layouts on exactly this many devices; with `like`, those with its degrees within a replica."""
    return tuple(_layouts(shape, offers, kind, num_devices, per_node, like))


def thread_layouts(
    kind: EngineKind, num_devices: int, per_node: int, offers: ParallelLayouts, num_ranks: int | None = None
) -> tuple[Layout, ...]:
    """List the layouts on CPU cores, which processes share evenly. `tp` counts the threads of a process.

    Args:
        num_ranks: processes of a trainer; None: one, or as many replicas as it offers. Sharding over cores is not searched for: they have
            one memory, so nothing is gained by it.
    """
    if kind == "train":
        most = min(offers.dp or num_devices, num_devices) if offers.has_replicas_alone else 1
        counts = range(1, most + 1) if num_ranks is None else (num_ranks,)
        return tuple(Layout(tp=num_devices // k, dp=k) for k in counts if num_devices <= per_node and num_devices % k == 0)
    return tuple(Layout(tp=k, dp=num_devices // k) for k in range(1, min(per_node, num_devices) + 1) if num_devices % k == 0)


def _layouts(
    shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, num_devices: int, per_node: int, like: Layout | None
) -> Iterator[Layout]:
    for tp in _degrees(offers.tp, per_node, num_devices):
        if (like is not None and tp != like.tp) or not shape.is_tp_legal(tp):
            continue
        for sp in _degrees(offers.sp, per_node // tp, num_devices // tp):
            of_heads = tp if offers.gathers_keys else tp * sp
            if (like is not None and sp != like.sp) or per_node % (tp * sp) or not shape.is_sp_legal(of_heads):
                continue
            if offers.divides_heads and shape.num_split_heads % of_heads:
                continue
            for pp in _powers(offers.pp, min(shape.num_layers, num_devices // (tp * sp))):
                replica = tp * sp * pp
                if (like is not None and pp != like.pp) or num_devices % replica:
                    continue
                dp = num_devices // replica
                if kind == "train" and offers.dp is not None and dp > offers.dp:
                    continue
                for ep in _experts(shape, offers, kind, tp, dp * sp):
                    if not offers.keeps_experts_whole or shape.can_spread_experts(tp * ep, dp * sp // ep):
                        yield from _stages(Layout(tp=tp, pp=pp, sp=sp, dp=dp, ep=ep), offers)


def _stages(layout: Layout, offers: ParallelLayouts) -> Iterator[Layout]:
    """List the layout at each ZeRO stage, with and without offloading. A trainer with one replica has nothing to shard."""
    stages = [stage for stage in offers.zero if stage == 0 or layout.dp * layout.sp > 1] or [0]
    for stage in stages:
        for offload in (False, True) if offers.offload else (False,):
            yield Layout(layout.tp, layout.pp, layout.sp, layout.dp, layout.ep, stage, offload)


def _experts(shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, tp: int, num_replicas: int) -> list[int]:
    """Degrees of expert parallelism: 1 and the largest possible; of a trainer powers of two too, of which some stay inside a node."""
    over = tp if kind == "rollout" else num_replicas
    most = over if offers.ep is None else min(over, offers.ep)
    each = tp if offers.keeps_experts_whole else 1
    legal = [ep for ep in range(2, min(most, shape.num_experts) + 1) if over % ep == 0 and shape.is_ep_legal(each * ep)]
    return [1, *(ep for ep in legal if ep == legal[-1] or (kind == "train" and ep & (ep - 1) == 0))]


def _degrees(most: int | None, within: int, num_devices: int) -> list[int]:
    limit = within if most is None else min(most, within)
    return [degree for degree in range(1, limit + 1) if within % degree == 0 and num_devices % degree == 0]


def _powers(most: int | None, limit: int) -> list[int]:
    limit = limit if most is None else min(most, limit)
    return [1 << i for i in range(max(limit, 1).bit_length()) if 1 << i <= max(limit, 1)]
