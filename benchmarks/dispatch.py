"""How much longer a step becomes by being traced and dispatched: what a user feels, with real worker processes.

    python benchmarks/dispatch.py [--calls 10 100 1000] [--seconds 1] [--steps 6]

A step is so many calls of `seconds / calls` each, of work that keeps no core busy (as a GPU's would not), on one row. In a `chain` each
call takes what the one before gave, also from step to step; `independent` ones all take the same row. There is one worker for functions.
Python runs ahead as in any flow, so steps overlap, and a step's time is what a run of more steps takes longer than one of two, divided by
their number.

`bare` is the same work in a plain loop in one process, before and after the runs. `longer` is how much of a bare step the step takes more.
Beside it, of CPU time a call, in the same way: the program's process (the flow's thread and the controller's), and the worker's (with
its start and end, so only with many calls is it to be trusted). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
import warnings

from m2flow import Dataset, Sample, flow, op, steps
from m2flow.macro.flow import Flow
from m2flow.macro.replay import BackendWrapper
from m2flow.macro.session import Backend
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

_FEW = 2
"""Steps of the shorter run, of which the first has what others reuse."""


def work(seconds: float) -> int:
    time.sleep(seconds)
    return 1


@op(granularity="sample")
def first(sample: Sample, seconds: float) -> int:
    return work(seconds)


@op(granularity="sample")
def following(value: int, seconds: float) -> int:
    return value + work(seconds)


@flow
def chain(num_steps: int = 6, num_calls: int = 10, seconds: float = 1.0) -> None:
    value = first(Dataset([{"prompt": "1 + 1 ="}]).take(1), 0.0)
    for _ in steps(num_steps):
        for _ in range(num_calls):
            value = following(value, seconds / num_calls)


@flow
def independent(num_steps: int = 6, num_calls: int = 10, seconds: float = 1.0) -> None:
    prompts = Dataset([{"prompt": "1 + 1 ="}])
    for _ in steps(num_steps):
        rows = prompts.take(1)
        for _ in range(num_calls):
            first(rows, seconds / num_calls)


class Span(BackendWrapper):
    """From a flow's first call to the end of its last one."""

    def __init__(self, live: Backend) -> None:
        super().__init__(live)
        self.start_s, self.start_cpu_s = time.perf_counter(), time.process_time()
        self.wall_s = self.cpu_s = 0.0

    def finish(self) -> None:
        super().finish()
        self.wall_s, self.cpu_s = time.perf_counter() - self.start_s, time.process_time() - self.start_cpu_s


def bare_s(num_calls: int, seconds: float) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        work(seconds / num_calls)
    return time.perf_counter() - start


def workers_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(program: Flow, num_steps: int, num_calls: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of the flow, of the processor in this process meanwhile, and of its worker's from its start to its end."""
    spec = ClusterSpec(
        cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=FunctionSpec(workers=1)
    )
    seen: list[Span] = []

    def around(live: Backend) -> Backend:
        seen.append(Span(live))
        return seen[-1]

    before_s = workers_cpu_s()
    options = {"num_steps": num_steps, "num_calls": num_calls, "seconds": seconds}
    with tempfile.TemporaryDirectory() as directory:
        Run(program, options, spec, RunSettings(runs_dir=directory), around=around).execute()
    return seen[-1].wall_s, seen[-1].cpu_s, workers_cpu_s() - before_s


def measure(program: Flow, num_calls: int, num_steps: int, seconds: float) -> dict[str, float]:
    before_s = bare_s(num_calls, seconds)
    few, many = (run(program, count, num_calls, seconds) for count in (_FEW, _FEW + num_steps))
    bare = statistics.mean([before_s, bare_s(num_calls, seconds)])
    step_s, program_s, worker_s = ((more - less) / num_steps for less, more in zip(few, many, strict=True))
    return {
        "bare_s": round(bare, 4),
        "step_s": round(step_s, 4),
        "longer": round(step_s / bare - 1, 4),
        "longer_us_a_call": round((step_s - bare) / num_calls * 1e6, 1),
        "program_cpu_us_a_call": round(program_s / num_calls * 1e6, 1),
        "worker_cpu_us_a_call": round(worker_s / num_calls * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[10, 100, 1000], help="calls a step")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step's work")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Nothing uses what most of these calls give.
    load = [round(os.getloadavg()[0], 2)]
    run(chain, 1, 1, 0.0)  # What is imported late is no step's.
    found: dict[str, dict[str, dict[str, float]]] = {}
    for program in (chain, independent):
        for num_calls in options.calls:
            row = measure(program, num_calls, options.steps, options.seconds)
            found.setdefault(program.name, {})[str(num_calls)] = row
            print(
                f"{program.name:12} {num_calls:5} calls  bare {row['bare_s']:.3f} s  step {row['step_s']:.3f} s"
                f"  longer {row['longer']:7.2%}  {row['longer_us_a_call']:6.0f} us a call;"
                f" CPU a call: program {row['program_cpu_us_a_call']:.0f} us, worker {row['worker_cpu_us_a_call']:.0f} us",
                flush=True,
            )
    load.append(round(os.getloadavg()[0], 2))
    hardware = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}
    print(json.dumps({"hardware": hardware, **found}))


if __name__ == "__main__":
    main()
