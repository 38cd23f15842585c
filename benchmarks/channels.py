"""What the channels cost over what they stand on, on this machine.

    python benchmarks/channels.py [--seconds S] [--rounds R] [--ray-python PYTHON] [--only PART ...]

stream  Rollout samples (256 prompt and 1,024 response tokens, with all token columns and texts) go to another process in parcels of 16 and
        64, through codec, `ZmqOutbox` and `ZmqInbox`, over ipc, tcp, and with large columns in shared memory or over Gloo; and as the same
        bytes, encoded once and in one frame, through the bare library: pyzmq's PUSH and PULL; for Gloo, torch.distributed's send and
        recv, into one buffer. All processes keep freed memory, as workers do (`m2flow.channels.shared_memory`).
cost    Processor time of a parcel, both ends in one process, against bare sockets with as many frames and with one.
sizes   The same with one column of 1 KB, 64 KB, 1 MB and 64 MB.
shared  The way from the producer's array to a read-only view in the consumer, one parcel at a time with warm buffers, by one clock; against
        one memcpy of the same bytes between warm buffers.
ray     Samples to another process one at a time, and 64 at a time; against the same as calls of a Ray actor.

The two sides take turns, and the ratio of a round is between neighbours, so that other load on the machine hits both. Prints one JSON
object; each target says whether it was met.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zmq

from m2flow.channels import codec
from m2flow.channels.channel import Parcel
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PairReceiver, PairSender
from m2flow.channels.shared_memory import Arena, keep_freed_memory
from m2flow.samples import Batch, Column, Ragged, Segment, make_ids

NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS = 256, 1024
SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 1 << 26}
TARGETS = {"stream": 0.8, "shared": 1.3, "ray": 10.0}
_PARTS = ("stream", "cost", "sizes", "shared", "ray")
_HIGH_WATER = 1000
_SPAWN = multiprocessing.get_context("spawn")


def rollout_batch(num_samples: int) -> Batch:
    """The columns of `m2flow.samples`, as a rollout engine fills them."""
    rng = np.random.default_rng(0)
    num_tokens = NUM_PROMPT_TOKENS + NUM_RESPONSE_TOKENS
    mask = np.arange(num_tokens) >= NUM_PROMPT_TOKENS

    def ragged(row: np.ndarray, dtype: type) -> Ragged:
        return Ragged.of([row] * num_samples, dtype)

    columns: dict[str, Column] = {
        "tokens": ragged(rng.integers(0, 49_152, num_tokens), np.int32),
        "loss_mask": ragged(mask, np.bool_),
        "logprobs": ragged(np.where(mask, -rng.exponential(size=num_tokens), 0), np.float32),
        "versions": ragged(np.where(mask, 3, -1), np.int32),
        "kv_stale": ragged(np.zeros(num_tokens), np.bool_),
        "segment_kinds": ragged(np.array([Segment.PROMPT, Segment.GENERATED]), np.uint8),
        "segment_lengths": ragged(np.array([NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS]), np.int32),
        "seed": rng.integers(0, 1 << 63, num_samples, np.uint64),
        "finish": np.zeros(num_samples, np.uint8),
        "prompt": Ragged.texts(["p" * 4 * NUM_PROMPT_TOKENS] * num_samples),
        "text": Ragged.texts(["t" * 4 * NUM_RESPONSE_TOKENS] * num_samples),
    }
    return Batch(make_ids(0, num_samples), columns)


def batch_of(what: int) -> Batch:
    """So many rollout samples; or, below 0, one row of so many bytes."""
    return rollout_batch(what) if what > 0 else Batch(make_ids(0, 1), {"payload": np.ones((1, -what), np.uint8)})


def send_ours(address: str, orders: Connection, transport: str) -> None:
    """Sends what it is told, as often as it is told."""
    keep_freed_memory()
    arena = Arena(f"m2flow-bench-{secrets.token_hex(4)}", max_bytes=2 << 30) if transport == "shared memory" else None
    outbox = ZmqOutbox(arena=arena, pairs=PairSender())
    outbox.prefer(address, transport)
    while order := orders.recv():
        what, num_parcels = order
        batch = batch_of(what)
        outbox.send(address, Parcel(0, batch, "rollout-0"))  # To connect.
        orders.send(None)
        orders.recv()
        for _ in range(num_parcels):
            outbox.send(address, Parcel(0, batch, "rollout-0"))
    outbox.close(drain_s=10.0)


def send_bare(address: str, orders: Connection) -> None:
    """The same bytes in one frame, encoded once."""
    keep_freed_memory()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.sndhwm = _HIGH_WATER
        socket.connect(address)
        while order := orders.recv():
            what, num_parcels = order
            frame = b"".join(codec.encode(Parcel(0, batch_of(what), "rollout-0")))
            socket.send(frame, copy=False)
            orders.send(None)
            orders.recv()
            for _ in range(num_parcels):
                socket.send(frame, copy=False)


def send_gloo(meeting: str, orders: Connection) -> None:
    """The same bytes in one tensor, from one process to the other of a group."""
    import torch
    from torch import distributed

    keep_freed_memory()
    distributed.init_process_group("gloo", init_method=meeting, rank=1, world_size=2)
    while order := orders.recv():
        what, num_parcels = order
        tensor = torch.frombuffer(bytearray(b"".join(codec.encode(Parcel(0, batch_of(what), "rollout-0")))), dtype=torch.uint8)
        distributed.send(tensor, 0)
        orders.send(None)
        orders.recv()
        for _ in range(num_parcels):
            distributed.send(tensor, 0)
    distributed.destroy_process_group()


@contextmanager
def bare_zeromq(place: str, address: str) -> Iterator[tuple[Connection, Callable[[int], int]]]:
    """Orders for a sender through bare pyzmq, and what takes one of its parcels."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = _HIGH_WATER
        pull.bind(f"{address}-bare" if place == "ipc:" else "tcp://127.0.0.1:*")
        endpoint = pull.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)

        def take(what: int) -> int:
            pull.recv(copy=False)
            return 1

        with sender(send_bare, endpoint.rstrip(b"\0").decode()) as orders:
            yield orders, take


@contextmanager
def bare_gloo() -> Iterator[tuple[Connection, Callable[[int], int]]]:
    """The same through torch.distributed."""
    import torch
    from torch import distributed

    buffers: dict[int, torch.Tensor] = {}

    def take(what: int) -> int:
        if what not in buffers:
            size = codec.num_frame_bytes(codec.encode(Parcel(0, batch_of(what), "rollout-0")))
            buffers[what] = torch.zeros(size, dtype=torch.uint8)
        distributed.recv(buffers[what], 1)
        return 1

    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        with sender(send_gloo, meeting) as orders:
            distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=2)
            yield orders, take
        distributed.destroy_process_group()


@contextmanager
def sender(send: Callable[..., None], *arguments: str) -> Iterator[Connection]:
    """A process that sends what it is told by way of this connection."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=send, args=(arguments[0], theirs, *arguments[1:]), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(10.0)


def stream_s(orders: Connection, take: Callable[[], int], what: int, num_parcels: int) -> float:
    """Seconds from the word to go until the last parcel is here."""
    orders.send((what, num_parcels))
    while not take():
        pass
    orders.recv()
    start = time.perf_counter()
    orders.send("go")
    num_left = num_parcels
    while num_left:
        num_left -= take()
    return time.perf_counter() - start


def measure_streams(transport: str, whats: dict[str, int], seconds: float, num_rounds: int) -> list[dict[str, object]]:
    """Of each kind of parcel, ours over one transport against bare sockets of the same kind."""
    place = "tcp" if transport == "tcp" else "ipc:"
    is_gloo = transport == "torch gloo"
    results: list[dict[str, object]] = []
    inbox = ZmqInbox(place, pairs=PairReceiver())

    def take_ours() -> int:
        return len(inbox.receive(30.0))

    with ExitStack() as stack:
        stack.enter_context(closing(inbox))
        address = inbox.open()
        ours = stack.enter_context(sender(send_ours, address, transport))
        bare, take_bare = stack.enter_context(bare_gloo() if is_gloo else bare_zeromq(place, address))
        for name, what in whats.items():
            take = partial(take_bare, what)
            num_parcels, bare_s = 4, 0.0
            while (bare_s := stream_s(bare, take, what, num_parcels)) < seconds / 2:
                num_parcels = int(num_parcels * min(max(seconds / bare_s, 1.5), 8))
            stream_s(ours, take_ours, what, num_parcels)
            pairs = [(stream_s(ours, take_ours, what, num_parcels), stream_s(bare, take, what, num_parcels)) for _ in range(num_rounds)]
            num_bytes = codec.num_frame_bytes(codec.encode(Parcel(0, batch_of(what), "rollout-0")))
            ratios = [bare_s / ours_s for ours_s, bare_s in pairs]
            ours_s, bare_s = (statistics.median(times) for times in zip(*pairs, strict=True))
            results.append(
                {
                    "transport": transport,
                    "bare": "torch.distributed" if is_gloo else "pyzmq",
                    "parcel": name,
                    "bytes_per_parcel": num_bytes,
                    "num_parcels": num_parcels,
                    "m2flow_parcels_per_s": round(num_parcels / ours_s, 1),
                    "m2flow_gb_per_s": round(num_bytes * num_parcels / ours_s / 1e9, 3),
                    "bare_parcels_per_s": round(num_parcels / bare_s, 1),
                    "speed_over_bare": round(statistics.median(ratios), 3),
                    "speed_over_bare_range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "us_per_parcel": {"whole": round(ours_s / num_parcels * 1e6, 1), **(_parts(what) if what > 0 else {})},
                }
            )
    return results


def lend_and_copy(address: str, orders: Connection) -> None:
    """Lends an array when it is told, its time of leaving in the parcel; and copies the same array, and says how long that took."""
    outbox = ZmqOutbox(arena=Arena(f"m2flow-bench-{secrets.token_hex(4)}", max_bytes=1 << 30))
    outbox.prefer(address, "shared memory")
    batches: dict[int, Batch] = {}
    targets: dict[int, np.ndarray] = {}
    while order := orders.recv():
        how, size = order
        if size not in batches:
            batches[size], targets[size] = batch_of(-size), np.zeros((1, size), np.uint8)
        if how == "lend":
            outbox.send(address, Parcel(time.perf_counter_ns(), batches[size], "rollout-0"))
        else:
            start = time.perf_counter_ns()
            np.copyto(targets[size], batches[size].dense("payload"))
            orders.send(time.perf_counter_ns() - start)
    outbox.close()


def measure_shared(num_rounds: int) -> list[dict[str, object]]:
    """One parcel at a time. The clock is the system's, the same in both processes."""
    inbox = ZmqInbox("ipc:")
    results: list[dict[str, object]] = []
    with closing(inbox):
        orders, theirs = _SPAWN.Pipe()
        sender = _SPAWN.Process(target=lend_and_copy, args=(inbox.open(), theirs), daemon=True)
        sender.start()
        for name, size in SIZES.items():
            lent: list[int] = []
            copied: list[int] = []
            for turn in range(max(num_rounds * 6, 60)):
                orders.send(("lend", size))
                (parcel,) = inbox.receive(30.0)
                took = time.perf_counter_ns() - parcel.call
                assert not parcel.batch.dense("payload").flags.writeable
                del parcel
                orders.send(("copy", size))
                memcpy = orders.recv()
                if turn >= 10:
                    lent.append(took)
                    copied.append(memcpy)
            ratios = [ours / bare for ours, bare in zip(lent, copied, strict=True)]
            results.append(
                {
                    "size": name,
                    "way_us": {"min": round(min(lent) / 1e3, 1), "median": round(statistics.median(lent) / 1e3, 1)},
                    "memcpy_us": {"min": round(min(copied) / 1e3, 1), "median": round(statistics.median(copied) / 1e3, 1)},
                    "over_memcpy_of_minima": round(min(lent) / min(copied), 3),
                    "over_memcpy_median": round(statistics.median(ratios), 3),
                    "over_memcpy_range": [round(min(ratios), 3), round(max(ratios), 3)],
                }
            )
        orders.send(None)
        sender.join(10.0)
    return results


def measure_ray(python: str, seconds: float, num_rounds: int) -> dict[str, object]:
    """Ours one sample a parcel and 64 a parcel, in turns with Ray's calls; a line that says so if there is no Ray."""
    side = str(Path(__file__).parent / "sides" / "ray_calls.py")
    ours: dict[str, list[float]] = {"one": [], "batch": []}
    theirs: dict[str, list[float]] = {"one": [], "batch": []}
    version = ""
    for _ in range(num_rounds):
        done = subprocess.run([python, side, str(seconds)], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"missing": f"no Ray in {python}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}"}
        found = json.loads(done.stdout.strip().splitlines()[-1])
        version = found["ray"]
        for result, name, num in zip(
            measure_streams("ipc", {"1 sample": 1, "64 samples": 64}, seconds, 3), ("one", "batch"), (1, 64), strict=True
        ):
            rate = result["m2flow_parcels_per_s"]
            assert isinstance(rate, float)
            ours[name].append(rate * num)
            theirs[name].append(found[name])
    ratios = {name: [mine / other for mine, other in zip(ours[name], theirs[name], strict=True)] for name in ours}
    return {
        "ray": version,
        **{f"m2flow_samples_per_s_{name}": round(statistics.median(found)) for name, found in ours.items()},
        **{f"ray_samples_per_s_{name}": round(statistics.median(found)) for name, found in theirs.items()},
        **{f"over_ray_{name}": round(statistics.median(found), 1) for name, found in ratios.items()},
        "parts_us_one_sample": {**_parts(1), "whole": round(1e6 / statistics.median(ours["one"]), 1)},
        **{f"over_ray_{name}_range": [round(min(found), 1), round(max(found), 1)] for name, found in ratios.items()},
    }


def measure_cost(transport: str, num_samples: int, num_rounds: int) -> dict[str, object]:
    """Processor time of a parcel from end to end, ZeroMQ's threads and the system included, both ends in this process, where other load
    hardly counts: ours, without the codec, and bare sockets with the same frames, or the same bytes in one. The best of the rounds."""
    place = "tcp" if transport == "tcp" else "ipc:"
    parcel = Parcel(0, rollout_batch(num_samples), "rollout-0")
    frames = codec.cut(codec.encode(parcel))
    num_parcels = 20
    inbox, outbox = ZmqInbox(place), ZmqOutbox()
    with closing(inbox), closing(outbox), zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        address = inbox.open()
        pull.bind(f"{address}-bare" if place == "ipc:" else "tcp://127.0.0.1:*")
        endpoint = pull.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        push.connect(endpoint.rstrip(b"\0").decode())

        def ours() -> None:
            for _ in range(num_parcels):
                outbox.send(address, parcel)
            num_left = num_parcels
            while num_left:
                num_left -= len(inbox.receive(30.0))

        def bare(sent: Sequence[bytes | memoryview]) -> None:
            for _ in range(num_parcels):
                push.send_multipart(sent, copy=False)
            for _ in range(num_parcels):
                pull.recv_multipart(copy=False)

        whole = [b"".join(frames)]
        found: dict[str, float] = {}
        for name, action in (("m2flow", ours), ("pyzmq, same frames", lambda: bare(frames)), ("pyzmq, one frame", lambda: bare(whole))):
            times = []
            for _ in range(num_rounds * 3 + 3):
                start = time.process_time()
                action()
                times.append((time.process_time() - start) / num_parcels)
            found[name] = round(min(times) * 1e6, 1)
    return {"transport": transport, "samples_per_parcel": num_samples, "num_frames": len(frames), "us": found | _parts(num_samples)}


def _parts(num_samples: int) -> dict[str, object]:
    """Of a parcel's time, what goes into the codec; the rest is the sockets' and Python's around them. Both processes work at a time."""
    return {name.removesuffix("_us"): value for name, value in measure_codec(num_samples).items() if name.endswith("_us")}


def measure_codec(num_samples: int) -> dict[str, object]:
    """The parts of a parcel that are ours."""
    parcel = Parcel(0, rollout_batch(num_samples), "rollout-0")
    frames = codec.encode(parcel)
    found: dict[str, object] = {"samples_per_parcel": num_samples}
    for name, action in (("encode_us", lambda: codec.encode(parcel)), ("decode_us", lambda: codec.decode(frames))):
        times = []
        for _ in range(300):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        found[name] = round(statistics.median(times) * 1e6, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the channels over what they stand on.")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one stream")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has ray")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=_PARTS)
    arguments = parser.parse_args()
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    report: dict[str, object] = {
        "hardware": {
            "cpu": models[0] if models else platform.machine(),
            "num_cpus": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), "pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()},
        "codec": [measure_codec(num_samples) for num_samples in (1, 16, 64)],
    }
    keep_freed_memory()
    transports = ("ipc", "tcp", "shared memory", "torch gloo")
    met: dict[str, bool | None] = {}
    if "stream" in arguments.only:
        whats = {"16 samples": 16, "64 samples": 64}
        streams = [found for t in transports for found in measure_streams(t, whats, arguments.seconds, arguments.rounds)]
        report["stream"] = streams
        for found in streams:
            if found["parcel"] == "64 samples":
                speed = float(str(found["speed_over_bare"]))
                met[f"at least {TARGETS['stream']} of {found['bare']}, 64 samples a parcel, {found['transport']}"] = (
                    speed >= TARGETS["stream"]
                )
    if "cost" in arguments.only:
        report["cost"] = [measure_cost(t, num, arguments.rounds) for t in ("ipc", "tcp") for num in (1, 16, 64)]
    if "sizes" in arguments.only:
        whats = {name: -size for name, size in SIZES.items()}
        report["sizes"] = [found for t in transports for found in measure_streams(t, whats, arguments.seconds, arguments.rounds)]
    if "shared" in arguments.only:
        shared = measure_shared(arguments.rounds)
        report["shared"] = shared
        met[f"shared memory within {TARGETS['shared']} of a memcpy, 64 MB"] = (
            float(str(shared[-1]["over_memcpy_median"])) <= TARGETS["shared"]
        )
    if "ray" in arguments.only:
        ray = measure_ray(arguments.ray_python, arguments.seconds * 2, max(arguments.rounds // 2, 1))
        report["ray"] = ray
        met[f"at least {TARGETS['ray']} times Ray, one sample a message"] = (
            None if "missing" in ray else float(str(ray["over_ray_one"])) >= TARGETS["ray"]
        )
    report["targets"] = met
    report["load_1min_at_the_end"] = round(os.getloadavg()[0], 2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
