"""What it takes to move tensors: to leave a device and come back to it, to bring new weights to rollout engines, to hand samples on.

A switch goes by class of tensor. Caches and activations are dropped and rebuilt. A rollout engine of a trained model drops its weights too:
the next sync brings new ones; otherwise they come back from the host's copy. A trainer puts away all that it keeps. Memory of the host is
pinned as long as half of it is enough, for copies to pinned memory are several times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.micro.costs.pools import Pool
from m2flow.micro.costs.terms import EngineId, Footprint, Layout, Switch

_MAY_PIN = 0.5
"""Of the host's memory: what is pinned can't be swapped out, and the rest of the machine needs some."""


def switch(engine: EngineId, pool: Pool, footprint: Footprint, *, is_trained: bool) -> Switch:
    """Of one engine, by what it has on each device."""
    if pool.device.shares_host_memory:
        return Switch(0.0, pool.device.switch_s, is_resident=True)
    kept = footprint.kept_bytes
    rate = pool.host_link_bytes_s(is_pinned=kept + footprint.host <= _MAY_PIN * pool.host_bytes)
    if engine.kind == "rollout":
        return Switch(0.0, pool.device.switch_s + (0.0 if is_trained else kept / rate))
    if not is_trained:
        return Switch(0.0, pool.device.switch_s + kept / rate)
    return Switch(kept / rate, pool.device.switch_s + kept / rate)


def sync_s(num_bytes: float, source: tuple[Pool, Layout], target: tuple[Pool, Layout], *, is_same_devices: bool) -> float:
    """New weights, so many bytes in all, from a trainer to all rollout instances, and their checksums.

    On the same devices each takes what it lacks of its part from its neighbours (CUDA IPC inside a node); one device alone copies. Else
    they are broadcast in buckets, of which every device sees all: inside a node over its links, else over the network.

    Source:
        The broadcast attains what was published of one (`attained_sync`): far less than the links, since receivers wait for loading.
    """
    (giver, given), (taker, taken) = source, target
    part = num_bytes / (taken.tp * taken.pp)
    fixed = max(giver.device.sync_s, taker.device.sync_s) + part / taker.step_bytes_s
    if is_same_devices:
        held = given.num_replica_devices * (given.dp if given.zero >= 3 else 1)
        if taken.num_replica_devices == held == 1:
            return fixed + 2 * part / taker.step_bytes_s
        return fixed + part / taker.between_bytes_s(max(held, taken.num_replica_devices))
    is_one_node = giver.name == taker.name and giver.is_in_node(given.num_devices + taken.num_devices)
    rate = min(giver.link_bytes_s, taker.link_bytes_s)
    if not is_one_node:
        rate = min(rate, giver.network_bytes_s, taker.network_bytes_s)
    attained = min(giver.device.attained_sync / giver.device.attained_link, taker.device.attained_sync / taker.device.attained_link, 1.0)
    return fixed + num_bytes / (attained * rate)


def adding_s(num_bytes: float, target: tuple[Pool, Layout]) -> float:
    """What rollout instances take to add adapters to weights of so many bytes, which come from the host's pinned memory."""
    taker, taken = target
    rate = taker.step_bytes_s if taker.device.shares_host_memory else taker.host_link_bytes_s(is_pinned=True)
    return num_bytes / (taken.tp * taken.pp) / rate


def hop_s(num_bytes: float, pools: Sequence[Pool], *, is_same_pool: bool) -> float:
    """Samples from one process to another: on one host, or over the network between pools and inside one of several nodes."""
    latency = max((pool.device.hop_s for pool in pools), default=0.0)
    rate = min((pool.device.channel_gb_s * 1e9 for pool in pools), default=float("inf"))
    if not is_same_pool or any(pool.num_nodes > 1 for pool in pools):
        rate = min([rate, *(pool.network_bytes_s * pool.per_node for pool in pools)])
    return latency + num_bytes / rate
