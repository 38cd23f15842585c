"""Write a simulated run as a run directory, with a trace in the format of real runs, so that the same tools show both.

    Outcome --write_run--> config.json, plan.txt, plan.json, report.json, trace/, trace.json.gz

Virtual time begins at 0, which viewers show as 1 January 1970.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from m2flow.errors import SpecError
from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.records.rundir import write_plan
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import SpanBlock, SpanName, plain_attributes
from m2flow.observe.store import TraceStore
from m2flow.simulator.scenario import Outcome, Scenario
from m2flow.simulator.simulation import Did
from m2flow.simulator.virtual_worker import Life

_Span = tuple[str, int, int, dict[str, object]]


def write_run(directory: Path, scenario: Scenario, outcome: Outcome, *, flow_file: str, options: Mapping[str, object]) -> None:
    """Write a directory that `m2flow view`, `trace`, `analyze` and `compare` open.

    Raises:
        SpecError: it is there and not empty, or can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SpecError(f"{directory} is not empty", now="Give --out a new directory.")
        _write(directory, scenario, outcome, flow_file, options)
    except OSError as error:
        raise SpecError(f"can't write the simulated run to {directory}: {error.strerror}") from error


def _write(directory: Path, scenario: Scenario, outcome: Outcome, flow_file: str, options: Mapping[str, object]) -> None:
    config = {
        "flow": flow_file,
        "options": {name: value if isinstance(value, int | float | str | bool | None) else repr(value) for name, value in options.items()},
        "simulated": {"lengths": scenario.lengths.name, "seed": scenario.seed, "staleness": scenario.program.staleness},
        "cluster": scenario.spec.model_dump(),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_plan(directory, outcome.plan)
    (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome.report)) + b"\n")
    with TraceStore(directory) as store:
        for block in blocks_of(outcome):
            store.append(block)
    write_trace(directory, directory / "trace.json.gz", devices=outcome.plan.device_names)


def blocks_of(outcome: Outcome) -> Iterable[SpanBlock]:
    """The spans that each worker would have recorded."""
    history = outcome.simulated.history
    tasks: dict[str, list[_Span]] = {}
    for did in history.dids:
        found = _of_task(did)
        if found is not None:
            tasks.setdefault(did.worker, []).append(found)
    for worker, lives in history.lives.items():
        spans = [*tasks.get(worker, []), *_turns(lives), *(_life(life, history.calls[life.call]) for life in lives if life.begun >= 0)]
        if spans:
            yield SpanBlock(worker, 0, [(name, start, end, plain_attributes(about)) for name, start, end, about in spans], [])


def _of_task(did: Did) -> _Span | None:
    about: dict[str, object] = _about(did.call) if did.call else {}
    match did.task:
        case m.RunFunction(ids=ids):
            name = SpanName.FUNCTION_CALL if did.call and did.call.engine == "function" else SpanName.TRAIN_LOGPROBS
            about |= {"num_samples": len(ids), "samples": ids}
        case m.Accumulate(ids=ids):
            name = SpanName.TRAIN_ACCUMULATE
            about |= {"num_samples": len(ids), "samples": ids}
        case m.Apply(version=version):
            name = SpanName.TRAIN_APPLY
            about |= {"version": version}
        case m.PublishWeights(role=role, version=version):
            name, about = SpanName.WEIGHTS_PUBLISH, {"version": version, "label": role}
        case m.LoadWeights(role=role, version=version):
            name, about = SpanName.WEIGHTS_LOAD, {"version": version, "label": role}
        case m.Switch(to=to):
            name, about = SpanName.SWITCH, {"label": f"to {to}"}
        case _:
            return None
    return name, _ns(did.start_s), _ns(did.end_s), about


def _turns(lives: Sequence[Life]) -> Iterable[_Span]:
    """A span for each stretch of time in which the number of decoding samples is constant."""
    changes: Counter[int] = Counter()
    for life in lives:
        if life.begun >= 0:
            changes[_ns(life.begun_s)] += 1
            changes[_ns(life.ended_s)] -= 1
    running = 0
    for start, end in itertools.pairwise(sorted(changes)):
        running += changes[start]
        if running > 0:
            yield SpanName.ROLLOUT_STEP, start, end, {"num_samples": running}


def _life(life: Life, call: Call) -> _Span:
    tokens = round(life.tokens_until(life.ended))
    about = {**_about(call), "sample": life.id, "num_tokens": tokens, "version": life.version}
    return SpanName.SAMPLE, _ns(life.begun_s), _ns(life.ended_s), about


def _about(call: Call) -> dict[str, object]:
    return {"call": call.ordinal, "step": call.step, "flow_line": str(call.site), "label": call.name}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
