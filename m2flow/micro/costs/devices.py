"""The devices that plans can be made for: what each can do, and where every number is from.

    devices.yaml, the user's own files --device_list--> DeviceList --find--> Device

A user's file has the same form. Files are read in this order, a later one adding to and replacing what an earlier one has: the one that
comes with m2flow, `~/.config/m2flow/devices.yaml` (or under `$XDG_CONFIG_HOME`), the one that the cluster spec names (`devices`).
Attainable fractions are no data sheet's: they are what makes the model wrong, and what `m2flow profile` measures.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from m2flow.errors import SpecError, did_you_mean
from m2flow.micro.costs.terms import Constant

BUILT_IN = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class Device:
    """One device, with its share of what its node has. SI units; `sources` says of each number where it is from."""

    name: str
    title: str
    bf16_tflops: float
    """Dense, 10^12 operations a second; also of float16."""
    fp32_tflops: float
    memory_gib: float
    memory_gb_s: float
    host_link_gb_s: float
    """Between the device and pinned memory of its host, in each direction."""
    link_gb_s: float
    """Between the devices of a node, of each, in each direction."""
    network_gb_s: float
    """Of a whole node to the others, in each direction."""
    host_memory_gib: float
    """Of a node."""
    host_memory_gb_s: float
    """Of a node: what an optimiser that is stepped on the host streams through."""
    pageable: float
    """A copy to memory of the host that is not pinned, as a fraction of one that is."""
    attained_link: float
    attained_sync: float
    """What a broadcast of weights attains of the slowest link on its way."""
    train_mfu: float
    prefill_mfu: float
    decode_mfu: float
    """Model operations a second as a fraction of the peak: in training, in forward passes, in decoding."""
    decode_mbu: float
    step_mbu: float
    """Bytes a second as a fraction of the memory's bandwidth: in decoding, in an optimiser step."""
    usable_memory: float
    usable_host_memory: float
    launch_s: float
    """Of a decode step, whatever its size."""
    layer_s: float
    """Of each layer of a decode step, whatever its size."""
    microbatch_s: float
    collective_s: float
    """A small all-reduce inside a node."""
    network_collective_s: float
    hop_s: float
    """From one worker to another, whatever the size."""
    channel_gb_s: float
    """Of samples on their way between processes; no more than the network has."""
    sync_s: float
    """A weight sync, whatever the size."""
    switch_s: float
    """Leaving or taking a device, besides its bytes."""
    expert_imbalance: float
    hidden: float
    shares_host_memory: bool = False
    """Its memory is the host's: nothing is offloaded."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def flops(self, num_bytes: int) -> float:
        """Dense operations a second on numbers of this size."""
        return 1e12 * (self.fp32_tflops if num_bytes >= 4 else self.bf16_tflops)

    def imbalance(self, share: float) -> float:
        """How much longer the busiest device works than the mean, where this share of the work is dealt out by expert."""
        return 1 + (self.expert_imbalance - 1) * share

    def constants(self) -> dict[str, Constant]:
        """Every number, by its field's name."""
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
    return "1" if name in _FRACTIONS or name == "expert_imbalance" else "s"


class DeviceList:
    """Devices by name."""

    def __init__(self, devices: dict[str, Device]) -> None:
        self._devices = devices

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def find(self, name: str, *, where: str = "") -> Device:
        """Raises `SpecError` if there is none, with the nearest name."""
        found = self._devices.get(name.lower())
        if found is None:
            near = did_you_mean(name.lower(), self._devices, cutoff=0.5)
            raise SpecError(f"there is no device {name!r}", where=where, now=f"{near} A file of yours adds one: `devices: mine.yaml`.")
        return found


def device_list(own: str | Path | None = None) -> DeviceList:
    """The devices of m2flow, of the user's configuration and of this file, which the cluster spec names.

    Raises:
        SpecError: a file that is not there or no YAML, an unknown field, a value of the wrong kind, each with its line.
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
"""Of any number of a device."""


def _sections(file: Path) -> list[tuple[str, str, dict[str, _Value]]]:
    """(`defaults` or `devices`, name, entry) of a file, in its order."""
    try:
        root = yaml.compose(file.read_text(), yaml.SafeLoader)
    except OSError as error:
        raise SpecError(f"the device list {file} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"not YAML: {error}", where=str(file)) from None
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
        raise SpecError(f"{name}: {value!r:.40} is no number", where=where)
    lowest_ok = value >= 0 if (name.endswith("_s") and not name.endswith("gb_s")) or name == "hidden" else value > 0
    if not lowest_ok or (name in _FRACTIONS and value > 1):
        raise SpecError(f"{name} is {value}; it must be {'a fraction of 1' if name in _FRACTIONS else 'positive'}", where=where)
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
