"""How many programs a minute run in boxes, and what one costs: `print(1)` in a box of its own, and turns of one session.

    python benchmarks/sandbox.py [--count 1000] [--threads 4] [--tier box]

Processor time is that of all processes of the box, the warm interpreter's included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from m2flow.sandbox import BlockingSandbox, run_program


def _cpu_s() -> float:
    """Processor seconds of this process, and of those below it that have ended or run."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    """Measure, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--tier", choices=("box", "fork"), default="box")
    args = parser.parse_args()

    def one(_: int) -> str:
        return run_program("print(1)", tier=args.tier, wall_s=60.0).text

    one(0)
    cpu_s, began = _cpu_s(), time.monotonic()
    with ThreadPoolExecutor(args.threads) as threads:
        assert set(threads.map(one, range(args.count))) == {"1\n"}
    wall_s, cpu_s = time.monotonic() - began, _cpu_s() - cpu_s
    with BlockingSandbox(args.tier, wall_s=60.0) as box:
        box.run("x = 0")
        started = time.monotonic()
        for _ in range(args.count // 10):
            box.run("x += 1")
        turn_ms = (time.monotonic() - started) / (args.count // 10) * 1e3
        assert box.run("print(x)").text == f"{args.count // 10}\n"
    load = os.getloadavg()[0]
    print(f"{args.tier}: {args.count / wall_s * 60:,.0f} programs a minute, {cpu_s / args.count * 1e3:.1f} ms of processor time each")
    print(f"a turn of a session takes {turn_ms:.1f} ms; load {load:.0f}")
    print(json.dumps({"per_minute": args.count / wall_s * 60, "cpu_ms": cpu_s / args.count * 1e3, "turn_ms": turn_ms, "load": load}))


if __name__ == "__main__":
    main()
