"""What leaving out the gather saves a weight sync: each rank of an FSDP2 trainer writes what it holds, against gathering on rank 0.

    python benchmarks/resharding.py [--mb MB] [--ranks N] [--rounds R] [--transports "shared memory,broadcast,tcp"]

A trainer of N ranks (processes, Gloo) publishes a random Qwen2 of about MB million bytes of float32; a receiver's process loads it into
tensors of its own and says the digest of what it holds. Both ways take turns, over each transport:

    gathered      every tensor is gathered on all ranks, and rank 0 writes it to where receivers read or are sent from
    in pieces     each rank writes the pieces that it holds to the same place, at the same time

For each way: seconds of the publication and of the whole sync (medians), bytes that each rank sends (to other ranks, in a ring's
all-gather; and to the receivers' memory), and the most memory that each rank had beyond what it had before (`RssAnon`, sampled each
millisecond, so short peaks may be missed; the largest of the rounds). `equal` says whether digests are those of the gathered way.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2flow.channels.weights import Publisher, Subscriber, WeightOptions, digest
from m2flow.channels.weights.tensors import mark_tied
from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.micro.worker.rank_group import Here, RankGroup, RankGroupSettings, RankGroupTrain, say
from m2flow.micro.worker.worker_process import Rank
from m2flow.recipe import Model

DIGITS = Path(__file__).parents[1] / "flows" / "models" / "digits"
WIDTH = 1024
_M_MMAP_THRESHOLD = -3
WAYS = ("gathered", "in pieces")


def model(folder: Path, num_bytes: int) -> Model:
    """Layers of 1,024 channels, and an embedding of a quarter of the bytes, which is also the head."""
    shutil.copytree(DIGITS, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    of_layer = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * 3 * WIDTH)
    config |= {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": max(num_bytes // 16 // WIDTH, 14)}
    config["num_hidden_layers"] = max(num_bytes * 3 // 4 // of_layer, 1)
    (folder / "config.json").write_text(json.dumps(config))
    return Model(str(folder), init="random")


class Memory:
    """Samples how much memory of its own this process has."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # What is freed is given back, so that the next round grows again.
        self._least = self._most = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        self._least = self._most = self._now()

    def grown(self) -> int:
        self._most = max(self._most, self._now())
        return self._most - self._least

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._now())
            time.sleep(0.001)

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def serve_rank(rank: int, count: int, place: str, source: Model, orders: Connection) -> None:
    """The process of a rank after the first."""
    torch.set_num_threads(1)
    memory = Memory()

    def answer() -> None:
        with contextlib.suppress(EOFError):
            while (order := orders.recv()) is not None:
                orders.send(memory.reset() if order == "reset" else memory.grown())

    threading.Thread(target=answer, daemon=True).start()
    link = None
    while link is None:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            link = Client(f"{place}/meeting", "AF_UNIX", authkey=b"bench")
    say(link, Here(rank))
    Rank({"policy": FsdpTrain(source, settings(rank, count, place))}, link).serve(lambda error: None)


def settings(rank: int, count: int, place: str) -> EngineSettings:
    return EngineSettings(rank=rank, num_ranks=count, rendezvous=f"file://{place}/ranks")


def receive(orders: Connection, directory: str) -> None:
    """The process of the receiver: loads what it is told, and says when it had done so, and the digest."""
    torch.set_num_threads(1)
    subscribers: dict[str, Subscriber] = {}
    held: dict[str, np.ndarray[Any, Any]] = {}
    while (order := orders.recv()) is not None:
        key, transport, manifest = order
        subscriber = subscribers.setdefault(key, Subscriber(key, directory=directory))
        for name, weight in subscriber.tensors(manifest, transport):
            held.setdefault(name, np.empty_like(weight))[...] = weight
        loaded = time.monotonic()
        orders.send((loaded, digest(held.items())))
        for array in held.values():
            array.fill(0)
    for subscriber in subscribers.values():
        subscriber.close()


@contextlib.contextmanager
def trainer(source: Model, count: int, place: str) -> Iterator[tuple[RankGroupTrain, Callable[[], None], Callable[[], list[int]]]]:
    """A started trainer; with how all ranks begin to watch their memory, and say by how much it grew."""
    spawn = multiprocessing.get_context("spawn")
    links = []
    for rank in range(1, count):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve_rank, args=(rank, count, place, source, theirs), daemon=True).start()
        links.append(ours)
    group, memory = RankGroup(RankGroupSettings(0, count, f"{place}/meeting"), "bench"), Memory()
    group.open()

    def ask(order: str) -> list[Any]:
        for link in links:
            link.send(order)
        return [link.recv() for link in links]

    def reset() -> None:
        ask("reset")
        memory.reset()

    engine = RankGroupTrain("policy", FsdpTrain(source, settings(0, count, place)), group)
    engine.start()
    try:
        yield engine, reset, lambda: [memory.grown(), *ask("grown")]
    finally:
        engine.stop()
        group.close()


def measure(wanted_bytes: int, count: int, num_rounds: int, transports: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    name = f"m2flow-bench-{secrets.token_hex(4)}"
    found: dict[str, dict[str, list[dict[str, Any]]]] = {transport: {way: [] for way in WAYS} for transport in transports}
    digests: dict[str, set[str]] = {way: set() for way in WAYS}
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as place:
        receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, place), daemon=True)
        receiver.start()
        with trainer(model(Path(place, "model"), wanted_bytes), count, place) as (engine, reset, grown), contextlib.ExitStack() as stack:
            publishers = {}
            for number, key in enumerate(f"{way} {transport}" for transport in transports for way in WAYS):
                options = WeightOptions(
                    (key.partition(" ")[2] if key.startswith("gathered") else key[len("in pieces ") :],), place, changes="never"
                )
                publishers[key] = stack.enter_context(contextlib.closing(Publisher(f"{name}-{number}", options)))
            for version in range(num_rounds + 1):
                for transport in transports:
                    for way in WAYS:
                        key = f"{way} {transport}"
                        publisher = publishers[key]
                        reset()
                        start = time.monotonic()
                        spread = engine.spread(WeightOptions().bucket_bytes) if way == "in pieces" else None
                        manifest = publisher.publish(mark_tied(engine.weights()), version, None, spread)
                        published = time.monotonic()
                        ours.send((key, transport, manifest))
                        loaded, said = ours.recv()
                        digests[way].add(said)
                        if not version:  # The first allocates.
                            continue
                        num_bytes = sum(entry.num_bytes for entry in manifest.tensors)
                        assert bool(publisher.last.written) is (way == "in pieces")
                        to_receivers = list(publisher.last.written) or [num_bytes, *[0] * (count - 1)]
                        to_ranks = [0 if publisher.last.written else num_bytes * (count - 1) // count] * count
                        one = {"publish_s": published - start, "sync_s": loaded - start, "grown_bytes": grown()}
                        found[transport][way].append(one | {"to_receivers": to_receivers, "to_ranks": to_ranks})
            ours.send(None)
            receiver.join(20)
    report = {transport: {way: summed_up(rounds) for way, rounds in of_ways.items()} for transport, of_ways in found.items()}
    is_equal = len(digests["gathered"] | digests["in pieces"]) == 1
    return {"num_bytes": num_bytes, "ranks": count, "bucket_bytes": WeightOptions().bucket_bytes, "equal": is_equal, "transports": report}


def summed_up(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: round(statistics.median(each[name] for each in rounds), 4) for name in ("publish_s", "sync_s")}
    grown = [max(of_rank) for of_rank in zip(*(each["grown_bytes"] for each in rounds), strict=True)]
    last = rounds[-1]
    return seconds | {"bytes_to_ranks": last["to_ranks"], "bytes_to_receivers": last["to_receivers"], "most_grown_bytes": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight syncs of a sharded trainer, gathered on one rank and in pieces from all.")
    parser.add_argument("--mb", type=int, default=250)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", default="shared memory,broadcast")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    report = measure(arguments.mb * 1_000_000, arguments.ranks, arguments.rounds, arguments.transports.split(","))
    report["hardware"] = {
        "num_cpus": os.cpu_count(),
        "load_1min": [round(before, 2), round(os.getloadavg()[0], 2)],
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
