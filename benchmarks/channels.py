"""What the channels cost over what they stand on, on this machine.

    python benchmarks/channels.py [--seconds S] [--rounds R]

Samples: rollout samples (256 prompt and 1,024 response tokens, with all token columns and texts) go to another process in parcels of 16
and 64, through codec, `ZmqOutbox` and `ZmqInbox`; and as the same bytes, encoded once and in one frame, through bare pyzmq PUSH and
PULL. The two take turns, and the ratio of a round is between neighbours, so that other load on the machine hits both.

Weights: 500 MB are written to `SharedWeights` and read (verified) and copied out, against one `memcpy` of the same bytes.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np
import zmq

from m2flow.channels import codec
from m2flow.channels.contract import Parcel
from m2flow.channels.weights import SharedWeights, SharedWeightsReader, Weight
from m2flow.channels.zeromq_parcels import ZmqInbox, ZmqOutbox
from m2flow.samples import Batch, Column, Ragged, Segment, make_ids

NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS = 256, 1024
_HIGH_WATER = 1000


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


def send_ours(address: str, orders: Connection) -> None:
    outbox = ZmqOutbox()
    while order := orders.recv():
        num_samples, num_parcels = order
        batch = rollout_batch(num_samples)
        outbox.send(address, Parcel(0, batch, "rollout-0"))  # To connect.
        orders.send(None)
        orders.recv()
        for _ in range(num_parcels):
            outbox.send(address, Parcel(0, batch, "rollout-0"))
    outbox.close(drain_s=10.0)


def send_bare(address: str, orders: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.sndhwm = _HIGH_WATER
        socket.connect(address)
        while order := orders.recv():
            num_samples, num_parcels = order
            frame = b"".join(codec.encode(Parcel(0, rollout_batch(num_samples), "rollout-0")))
            socket.send(frame, copy=False)
            orders.send(None)
            orders.recv()
            for _ in range(num_parcels):
                socket.send(frame, copy=False)


def stream_s(orders: Connection, take: Callable[[], int], num_samples: int, num_parcels: int) -> float:
    """Seconds from the word to go until the last parcel is here."""
    orders.send((num_samples, num_parcels))
    while not take():
        pass
    orders.recv()
    start = time.perf_counter()
    orders.send("go")
    num_left = num_parcels
    while num_left:
        num_left -= take()
    return time.perf_counter() - start


def measure_stream(place: str, seconds: float, num_rounds: int) -> list[dict[str, object]]:
    spawn = multiprocessing.get_context("spawn")
    results: list[dict[str, object]] = []
    inbox = ZmqInbox(place)
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, closing(inbox):
        address = inbox.open()
        bare_address = f"{address}-bare" if place.startswith("ipc") else "tcp://127.0.0.1:*"
        pull.rcvhwm = _HIGH_WATER
        pull.bind(bare_address)
        endpoint = pull.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        orders: list[Connection] = []
        senders = []
        for send, where in ((send_ours, address), (send_bare, endpoint.rstrip(b"\0").decode())):
            ours, theirs = spawn.Pipe()
            senders.append(spawn.Process(target=send, args=(where, theirs), daemon=True))
            senders[-1].start()
            orders.append(ours)

        def take_bare() -> int:
            pull.recv(copy=False)
            return 1

        def take_ours() -> int:
            return len(inbox.receive(30.0))

        for num_samples in (16, 64):
            num_parcels, bare_s = 32, 0.0
            while (bare_s := stream_s(orders[1], take_bare, num_samples, num_parcels)) < seconds / 2:
                num_parcels = int(num_parcels * min(max(seconds / bare_s, 1.5), 8))
            stream_s(orders[0], take_ours, num_samples, num_parcels)
            pairs = [
                (stream_s(orders[0], take_ours, num_samples, num_parcels), stream_s(orders[1], take_bare, num_samples, num_parcels))
                for _ in range(num_rounds)
            ]
            frames = codec.encode(Parcel(0, rollout_batch(num_samples), "rollout-0"))
            total = num_samples * num_parcels
            ratios = [bare / ours for ours, bare in pairs]
            results.append(
                {
                    "transport": place.partition(":")[0],
                    "samples_per_parcel": num_samples,
                    "bytes_per_parcel": codec.num_frame_bytes(frames),
                    "num_frames": len(frames),
                    "num_parcels": num_parcels,
                    "m2flow_samples_per_s": round(total / statistics.median(ours for ours, _ in pairs)),
                    "pyzmq_samples_per_s": round(total / statistics.median(bare for _, bare in pairs)),
                    "speed_over_pyzmq": round(statistics.median(ratios), 3),
                    "speed_over_pyzmq_range": [round(min(ratios), 3), round(max(ratios), 3)],
                }
            )
        for pipe, sender in zip(orders, senders, strict=True):
            pipe.send(None)
            sender.join(10.0)
    return results


def median_s(action: Callable[[], object], num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_codec(num_samples: int) -> dict[str, object]:
    parcel = Parcel(0, rollout_batch(num_samples), "rollout-0")
    frames = codec.encode(parcel)
    return {
        "samples_per_parcel": num_samples,
        "encode_us": round(median_s(lambda: codec.encode(parcel), 300) * 1e6, 1),
        "decode_us": round(median_s(lambda: codec.decode(frames), 300) * 1e6, 1),
    }


def measure_weights(num_rounds: int) -> dict[str, object]:
    """500 MB in 125 tensors, both sides in this process: the memory traffic is the same, and no clock but ours counts."""
    tensors = [(f"layers.{i}.weight", np.full(1_000_000, i, np.float32)) for i in range(125)]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    copies = {name: np.zeros_like(tensor) for name, tensor in tensors}

    def copy_all(source: Iterable[tuple[str, Weight]]) -> None:
        for name, tensor in source:
            assert isinstance(tensor, np.ndarray)
            copies[name][...] = tensor

    with closing(SharedWeights(f"m2flow-bench-{secrets.token_hex(4)}")) as shared, closing(SharedWeightsReader()) as reader:
        start = time.perf_counter()
        manifest = shared.write(tensors)
        first_write_s = time.perf_counter() - start
        list(reader.read(manifest))
        rounds: dict[str, list[float]] = {"memcpy_s": [], "write_s": [], "read_s": [], "read_and_copy_out_s": [], "checksum_s": []}
        for _ in range(num_rounds):
            rounds["memcpy_s"].append(median_s(lambda: copy_all(tensors), 1))
            rounds["checksum_s"].append(median_s(lambda: [zlib.crc32(tensor.data) for _, tensor in tensors], 1))
            rounds["write_s"].append(median_s(lambda: shared.write(tensors), 1))
            rounds["read_s"].append(median_s(lambda: reader.read(manifest), 1))
            rounds["read_and_copy_out_s"].append(median_s(lambda: copy_all(reader.read(manifest)), 1))
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    sync_s = medians["write_s"] + medians["read_and_copy_out_s"]
    return {
        "num_bytes": num_bytes,
        "first_write_s": round(first_write_s, 4),
        **{name: round(value, 4) for name, value in medians.items()},
        "checksum_gb_per_s": round(num_bytes / medians["checksum_s"] / 1e9, 2),
        "write_and_read_over_memcpy": round((medians["write_s"] + medians["read_s"]) / medians["memcpy_s"], 2),
        "whole_sync_over_memcpy": round(sync_s / medians["memcpy_s"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the channels over what they stand on.")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one stream")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    report = {
        "hardware": {
            "cpu": models[0] if models else platform.machine(),
            "num_cpus": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "pyzmq": zmq.pyzmq_version(),
            "libzmq": zmq.zmq_version(),
            "zlib": zlib.ZLIB_RUNTIME_VERSION,
        },
        "codec": [measure_codec(num_samples) for num_samples in (1, 16, 64)],
        "stream": [result for place in ("ipc:", "tcp") for result in measure_stream(place, arguments.seconds, arguments.rounds)],
        "weights": measure_weights(arguments.rounds),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
