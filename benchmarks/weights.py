"""What a weight sync costs over a flat Gloo broadcast of the same bytes, from one process to another of this machine.

    python benchmarks/weights.py [--mb MB] [--rounds R]

A trainer's process publishes 500 MB of float32 tensors; another loads them into tensors of its own, as a rollout engine does, and compares
the checksum of each one that it then holds. The time is from the first byte read to the last tensor compared. The transports and the flat
broadcast (one tensor, no checksums, nothing copied elsewhere) take turns, and a ratio is between neighbours, so that other load on the
machine hits both. `changes` is bfloat16 of as many bytes, of which a hundredth of the values changed, over the transport named.

Target: shared memory at no less than 70% of the flat broadcast's GB/s. `shares` says where the time goes.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from m2flow.channels.process_groups import Group, open_store
from m2flow.channels.weights import Manifest, Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.payload import compare_checksums, tensor_checksums
from m2flow.channels.weights.tensors import Tied, checksum, copy_with_checksum, from_wire, mark_tied, to_wire

TARGET = 0.7
_WAYS = ("shared memory", "broadcast", "file", "changes by file", "changes by broadcast")
_TIMEOUT_S = 60.0


def model(num_bytes: int, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """An eighth in one embedding, the rest in matrices of 4 MB and vectors between them."""
    torch.manual_seed(0)
    size = torch.empty(0, dtype=dtype).element_size()
    tensors = [("embed.weight", torch.randn(num_bytes // 8 // size // 1024, 1024, dtype=dtype))]
    left = num_bytes - tensors[0][1].nbytes
    for layer in range(left // ((4 << 20) + 4096)):
        tensors.append((f"layers.{layer}.weight", torch.randn((4 << 20) // size // 1024, 1024, dtype=dtype)))
        tensors.append((f"layers.{layer}.norm", torch.randn(4096 // size, dtype=dtype)))
    return tensors


def receive(orders: Connection, wanted_bytes: int, num_bytes: int, directory: str, port: int) -> None:
    """The other process: it does as it is told, and answers with the seconds of each part."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, is_server=False, timeout_s=_TIMEOUT_S)
    group = Group(store, "flat", 1, 2, host="127.0.0.1", device="cpu", timeout_s=_TIMEOUT_S)
    flat = torch.zeros(num_bytes, dtype=torch.uint8).numpy()
    subscribers = {way: Subscriber(way, directory=directory) for way in _WAYS}
    full = {name: torch.zeros_like(tensor) for name, tensor in model(wanted_bytes, torch.float32)}
    half = model(wanted_bytes, torch.bfloat16)
    # What changed is applied to what is held, so each way that sends it has an engine of its own.
    held = {way: {name: torch.zeros_like(tensor) for name, tensor in half} if "changes" in way else full for way in _WAYS}
    versions: dict[str, int] = {}
    orders.send("ready")
    while (order := orders.recv()) is not None:
        if order == "flat":
            group.broadcast(flat)
            orders.send(None)
            continue
        way, manifest = order
        orders.send(take(subscribers[way], way, manifest, held[way], versions))
    for subscriber in subscribers.values():
        subscriber.close()


def take(subscriber: Subscriber, way: str, manifest: Manifest, mine: dict[str, torch.Tensor], versions: dict[str, int]) -> dict[str, float]:
    start = time.perf_counter()
    arriving = subscriber.tensors(
        manifest,
        way.removeprefix("changes by "),
        held_version=versions.get(way, -1),
        held=lambda: ((name, weight) for name, weight in to_wire(mine.items()) if not isinstance(weight, Tied)),
        verify=(),
    )
    for name, tensor in from_wire(arriving, mine["embed.weight"]):
        mine[name].copy_(tensor)
    loaded = time.perf_counter()
    wrong, missing = compare_checksums(manifest.tensors, tensor_checksums(mine.items()))
    assert not wrong, wrong
    assert not missing, missing
    versions[way] = manifest.version
    return {"load_s": loaded - start, "compare_s": time.perf_counter() - loaded, "num_bytes": subscriber.num_bytes}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def measure(wanted_bytes: int, num_rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    full, half = model(wanted_bytes, torch.float32), model(wanted_bytes, torch.bfloat16)
    num_bytes = sum(tensor.nbytes for _, tensor in full)
    flat = torch.zeros(num_bytes, dtype=torch.uint8).numpy()
    store = open_store("127.0.0.1", 0, is_server=True, timeout_s=_TIMEOUT_S)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    name = f"m2flow-bench-{secrets.token_hex(4)}"
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ("flat", *_WAYS)}
    with tempfile.TemporaryDirectory() as directory:
        other = spawn.Process(target=receive, args=(theirs, wanted_bytes, num_bytes, directory, store.port), daemon=True)
        other.start()
        theirs.close()
        group = Group(store, "flat", 0, 2, host="127.0.0.1", device="cpu", timeout_s=_TIMEOUT_S)
        ours.recv()
        publishers = {}
        for number, way in enumerate(_WAYS):
            options = WeightOptions((way.removeprefix("changes by "),), directory, changes="always" if "changes" in way else "never")
            publishers[way] = Publisher(f"{name}-{number}", options)

        def one_flat() -> None:
            ours.send("flat")
            group.broadcast(flat)
            ours.recv()

        def sync(way: str, version: int) -> dict[str, float]:
            tensors = full
            if "changes" in way:
                tensors = half
                for _, tensor in tensors:
                    flat_values = tensor.view(-1).view(torch.int16)
                    at = torch.randint(0, len(flat_values), (max(len(flat_values) // 100, 1),))
                    flat_values[at] ^= 1
            start = time.perf_counter()
            manifest = publishers[way].publish(to_wire(mark_tied(tensors)), version)
            published = time.perf_counter()
            ours.send((way, manifest))
            parts = ours.recv()
            return {"total_s": time.perf_counter() - start, "publish_s": published - start, **parts}

        for version in range(num_rounds + 1):
            for way in _WAYS:
                flat_s, _ = timed(one_flat)
                parts = sync(way, version)
                if version:  # The first allocates.
                    rounds["flat"].append({"total_s": flat_s})
                    rounds[way].append(parts | {"speed_over_flat": flat_s / parts["total_s"]})
        ours.send(None)
        other.join(20)
        for publisher in publishers.values():
            publisher.close()
    report = {way: summed_up(found, num_bytes) for way, found in rounds.items()}
    return {"num_bytes": num_bytes, "ways": report, "parts_s": single_parts(full)}


def summed_up(rounds: list[dict[str, float]], num_bytes: int) -> dict[str, float]:
    found = {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}
    totals = [each["total_s"] for each in rounds]
    found |= {"gb_per_s": round(num_bytes / statistics.median(totals) / 1e9, 2), "best_gb_per_s": round(num_bytes / min(totals) / 1e9, 2)}
    if "speed_over_flat" in found:
        best_flat = [each["speed_over_flat"] for each in rounds]
        found |= {"least_over_flat": round(min(best_flat), 2), "most_over_flat": round(max(best_flat), 2)}
    return found


def single_parts(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """What the parts of a sync cost alone, in this process."""
    arrays = [tensor.numpy().reshape(-1).view("u1") for _, tensor in tensors]
    targets = [array.copy() for array in arrays]

    def copy() -> None:
        for array, target in zip(arrays, targets, strict=True):
            target[:] = array

    actions: dict[str, Callable[[], object]] = {
        "copy": copy,
        "checksum": lambda: [checksum(array) for array in arrays],
        "copy_with_checksum": lambda: [copy_with_checksum(array, target) for array, target in zip(arrays, targets, strict=True)],
    }
    return {name: round(statistics.median(timed(action)[0] for _ in range(5)), 4) for name, action in actions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A weight sync over a flat Gloo broadcast of the same bytes.")
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    report = measure(arguments.mb * 1_000_000, arguments.rounds)
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    report["hardware"] = {
        "cpu": models[0] if models else platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_1min": [round(before, 2), round(os.getloadavg()[0], 2)],
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
    }
    shared = report["ways"]["shared memory"]
    report["target"] = {
        "shared_memory_over_flat": TARGET,
        "reached": shared["speed_over_flat"] >= TARGET,
        "shares": {name: round(shared[f"{name}_s"] / shared["total_s"], 2) for name in ("publish", "load", "compare")},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
