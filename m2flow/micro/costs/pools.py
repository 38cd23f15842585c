"""The devices of a cluster spec as the cost model sees them: what one has, and how fast bytes move among several.

    ClusterSpec, devices.yaml --pools_of--> Pool --> seconds of a copy, an all-gather, a step of an optimiser

Collectives are modelled by their bytes on the slowest link, inside a node and then across nodes, plus one latency. Contention between
engines, and a network that is not flat, are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.micro.costs.devices import Device, device_list
from m2flow.spec import ClusterSpec, PoolSpec

GIB = 2**30


@dataclass(frozen=True)
class Pool:
    """Devices of one kind. Bytes and seconds; rates are of one device, attained rather than peak where the name does not say otherwise."""

    name: str
    device: Device
    num_nodes: int
    per_node: int
    memory_bytes: int
    """What engines may have of a device's memory."""
    host_bytes: int
    """What they may have of the host's, for each device."""
    link_bytes_s: float
    """To the others of its node."""
    network_bytes_s: float
    """To other nodes: its share of its node's network."""
    pinned_bytes_s: float
    """To and from pinned memory of its host."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def decode_bytes_s(self) -> float:
        return self.device.memory_gb_s * 1e9 * self.device.decode_mbu

    @property
    def step_bytes_s(self) -> float:
        return self.device.memory_gb_s * 1e9 * self.device.step_mbu

    @property
    def host_step_bytes_s(self) -> float:
        """Of an optimiser that is stepped on the host: this device's share."""
        return self.device.host_memory_gb_s * 1e9 * self.device.step_mbu / self.per_node

    def host_link_bytes_s(self, *, is_pinned: bool) -> float:
        return self.pinned_bytes_s * (1.0 if is_pinned else self.device.pageable)

    def is_in_node(self, num_devices: int) -> bool:
        return num_devices <= self.per_node

    def between_bytes_s(self, num_devices: int) -> float:
        """Among so many neighbours: the node's links, or the network."""
        return self.link_bytes_s if self.is_in_node(num_devices) else min(self.link_bytes_s, self.network_bytes_s)

    def latency_s(self, num_devices: int) -> float:
        """Of a small all-reduce."""
        if num_devices <= 1:
            return 0.0
        return self.device.collective_s if self.is_in_node(num_devices) else self.device.network_collective_s

    def gather_s(self, num_bytes: float, group: int, stride: int = 1) -> float:
        """An all-gather after which each of the group has so many bytes, or a reduce-scatter before which each has. An all-reduce is both.

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


def pools_of(spec: ClusterSpec) -> dict[str, Pool]:
    """The pools of a spec by name; this machine, as a pool named "", if it names none.

    Raises:
        SpecError: a device that no list has, with the nearest name; or this machine's GPU is none of them.
    """
    devices = device_list(spec.devices)
    found = {}
    for name, pool in spec.planned_pools.items():
        if not name:
            pool = _this_machine(pool)
        found[name] = _pool(name, pool, devices.find(pool.device, where=f"pools.{name}.device"))
    return found


def _pool(name: str, spec: PoolSpec, device: Device) -> Pool:
    memory = (spec.memory_gib or device.memory_gib) * GIB
    host = (spec.host_memory_gib or device.host_memory_gib) * GIB
    return Pool(
        name=name,
        device=device,
        num_nodes=spec.nodes,
        per_node=spec.devices_per_node,
        memory_bytes=int(memory * device.usable_memory),
        host_bytes=0 if device.shares_host_memory else int(host * device.usable_host_memory / spec.devices_per_node),
        link_bytes_s=(spec.link_gb_s or device.link_gb_s) * 1e9 * device.attained_link,
        network_bytes_s=(spec.network_gb_s or device.network_gb_s) * 1e9 * device.attained_link / spec.devices_per_node,
        pinned_bytes_s=(spec.host_link_gb_s or device.host_link_gb_s) * 1e9 * device.attained_link,
    )


def _this_machine(pool: PoolSpec) -> PoolSpec:
    """What the spec leaves open: the memory of each core, or what GPU it is."""
    if pool.device == "cpu":
        memory = None if pool.memory_gib else _memory_gib()
        return pool.model_copy(update={"memory_gib": memory / pool.devices_per_node}) if memory else pool
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = next((line.partition(":")[2] for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        return pool.model_copy(update={"device": _device_of(model)})
    now = "Say which, as `pools: {gpus: {device: h100, devices_per_node: 1}}`."
    raise SpecError("what GPU this machine has can't be seen: its driver says nothing", now=now)


def _device_of(model: str) -> str:
    """The name in the device list of what the driver calls `NVIDIA H100 80GB HBM3`."""
    words = model.lower().replace("-", " ").split()
    name = next((word for word in words if word in ("h100", "h800", "h200", "h20", "b200", "l40s", "a100")), "")
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
