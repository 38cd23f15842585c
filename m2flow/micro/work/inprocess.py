"""Whole calls in this process: what the eager interpreter does its calls with.

The same engines and the same functions as in the workers, but no plan, no scheduler and no channels: a call's samples are generated
together, scored together, and trained on in the order of their identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from m2flow.engines.contract import EngineSettings
from m2flow.errors import InternalError
from m2flow.macro.eager import Deferred
from m2flow.macro.graph import Call
from m2flow.macro.late import carries, is_cut, num_late
from m2flow.macro.randomness import randomness_kept
from m2flow.micro.lowering.packing import cut
from m2flow.micro.lowering.placement import check_place, places
from m2flow.micro.plan import Plan
from m2flow.micro.record.decisions import Decisions, given_by, stretches_of
from m2flow.micro.record.segments import Place, SegmentWriter
from m2flow.micro.scheduling.refilling import ran_dry
from m2flow.micro.scheduling.staleness import is_time_dependent
from m2flow.micro.work import performing, training
from m2flow.micro.work.held_weights import HeldWeights
from m2flow.micro.work.regrowing import Asked, regrow
from m2flow.micro.work.reward_parts import without_parts
from m2flow.micro.work.weight_syncing import WeightSettings, checks_of
from m2flow.micro.work.workbench import Workbench
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanBlock
from m2flow.recipe import Model
from m2flow.samples import Batch, SampleId, by_group, group_key, make_ids
from m2flow.spec import ClusterSpec, RunSettings


class Notes(Protocol):
    """Is told what was done, to write it down (`m2flow.micro.record.journal`)."""

    def call_added(self, call: Call) -> None: ...

    def samples_done(
        self,
        call: Call,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        finish: Sequence[int],
        place: Place,
        example: Sequence[str],
    ) -> None: ...

    def rewarded(self, call: Call, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]] = ()) -> None: ...

    def filtered(self, call: Call, ids: Sequence[int]) -> None: ...

    def decided(self, call: Call, decisions: Decisions) -> None: ...

    def late(self, call: Call, ids: Sequence[int]) -> None: ...

    def given(self, call: Call, ids: Sequence[int]) -> None: ...

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None: ...

    def spans(self, block: SpanBlock) -> None: ...


class Restored(Protocol):
    """Where the trainers begin (`m2flow.micro.record.past`)."""

    @property
    def attempt(self) -> int: ...

    @property
    def versions(self) -> Mapping[str, int]: ...

    @property
    def parts(self) -> Mapping[str, str]: ...


class InProcess:
    """A `m2flow.macro.eager.Performer` on engines of this process."""

    def __init__(
        self,
        plan: Plan,
        spec: ClusterSpec,
        settings: RunSettings,
        models: Mapping[str, Model],
        run_dir: Path,
        notes: Notes,
        decisions: Decisions | None = None,
        restored: Restored | None = None,
    ) -> None:
        slots = tuple(dict.fromkeys(slot for worker in plan.workers for slot in worker.engines))
        threads = 1 if settings.deterministic else spec.num_cores
        device = next((w.device for w in plan.workers if any(s.kind != "function" for s in w.engines)), "cpu")
        common = {
            "device": device,
            "threads": threads,
            "deterministic": settings.deterministic,
            "max_running": spec.rollout.max_running,
        }
        self._recorder = Recorder("eager")
        self._bench = Workbench(
            slots,
            models,
            {
                "rollout": EngineSettings(**common, options=spec.rollout.options, into_server=spec.weights.into_server),  # type: ignore[arg-type]
                "train": EngineSettings(**common, options=spec.train.options),  # type: ignore[arg-type]
                "function": EngineSettings(options={"concurrency": spec.functions.concurrency, "patience_s": spec.functions.patience_s}),
            },
            run_dir=str(run_dir),
            run_seed=settings.seed,
            recorder=self._recorder,
            shared_prefix="",
            gather_s=math.inf,
            restore=restored.parts if restored else None,
            weights=WeightSettings(checks=checks_of(spec.weights)),
            record_every=settings.record_every,
        )
        self._hosted = places(plan.workers)
        self._trained = {slot.role for slot in slots if slot.kind == "train"}
        self._roles = {slot.role for slot in slots if slot.kind != "function"}
        self._versions = dict(restored.versions) if restored else {}
        self._weights = HeldWeights(self._bench, self._trained, decisions, self._versions)
        self._late: dict[int, dict[int, Asked]] = {}
        """Call -> what it has left to the next of its line: group -> its samples."""
        self._recalled: dict[int, tuple[Call, Batch]] = {}
        """Generations that were over before, with their prompts."""
        self._token_budget = spec.train.token_budget
        self._segments = SegmentWriter(run_dir / "segments", "eager")
        self._notes = notes

    def open(self) -> None:
        self._bench.open()

    def close(self) -> None:
        self._notes.spans(self._recorder.drain())
        self._segments.close()
        self._bench.close()

    def check(self, call: Call) -> None:
        check_place(call, self._hosted)

    def perform(self, call: Call, inputs: Mapping[str, object]) -> object:
        """Do one whole call."""
        with randomness_kept():
            return self._perform(call, inputs)

    def _perform(self, call: Call, inputs: Mapping[str, object]) -> object:
        result = self._result(call, inputs)
        if call.engine == "train":
            self._versions.update((call.role, effect.version) for effect in call.writes)
        return result

    def _result(self, call: Call, inputs: Mapping[str, object]) -> object:
        self._notes.call_added(call)
        given = [value for value in inputs.values() if isinstance(value, Batch)]
        takes_over = call.carries_from is not None and bool(self._late.get(call.carries_from))
        if call.is_aligned and given and not takes_over and not any(map(len, given[: None if performing.gives(call) == "concat" else 1])):
            return Batch(np.zeros(0, np.int64))
        match call.engine:
            case "source":
                return call.options["rows"]
            case "rollout":
                return self._generate(call, _batch(inputs["prompts"]).in_order())
            case "function" if call.is_gated:
                return self._refill(call, inputs)
            case "function":
                return self._function(call, inputs)
            case "train" if call.method == "update":
                return self._update(call, {name: _batch(value) for name, value in inputs.items()})
            case "train" if call.method == "copy_of":
                self._bench.copy_weights(call)
                return None
            case "train":
                return self._noted(call, self._bench.perform(call, {"samples": _batch(inputs["samples"])}, {}))
        raise InternalError(f"no engine for {call.name}")

    def recall(self, call: Call, inputs: Mapping[str, object], left: Sequence[int]) -> None:
        self._recalled[call.ordinal] = call, _batch(inputs["prompts"]).in_order()
        groups = self._late[call.ordinal] = {}
        for key, ids in by_group(left).items():
            who = SampleId.unpack(ids[0])
            drawn, prompts = self._recalled[who.call]
            groups[key] = Asked(drawn, ids, prompts.take([who.prompt] * len(ids)))

    def save_part(self, role: str, path: Path) -> str:
        """Write a trained role as a part of a checkpoint; the digest of its weights."""
        return self._bench.save(role, str(path), seals=True)

    @property
    def versions(self) -> dict[str, int]:
        """Of the weights of each role that was trained or copied to."""
        return dict(self._versions)

    def save(self, path: Path) -> dict[str, str]:
        """Write every role's model; the digest of its weights by role."""
        return {role: self._bench.save(role, str(path / role)) for role in sorted(self._roles)}

    def _refill(self, call: Call, inputs: Mapping[str, object]) -> Batch:
        """Draw a prompt, answer it, score the group, keep it or not; until there are enough."""
        generate, score = inputs["samples"], inputs["reward"]
        assert isinstance(generate, Deferred)
        assert isinstance(score, Deferred)
        self._notes.call_added(generate.call)
        self._notes.call_added(score.call)
        prompts, kept = _batch(generate.inputs["prompts"]), []
        for position in range(len(prompts)):
            samples = self._generate(generate.call, prompts.take([position]), first=position)
            rewards = self._function(score.call, {"samples": samples})
            rows = self._function(call, {"samples": samples, "reward": rewards})
            if len(_batch(rows)):
                kept.append(_batch(rows))
            if len(kept) == call.options["refill"]:
                return Batch.concat(kept)
        raise ran_dry(call, len(kept), len(prompts))

    def _generate(self, call: Call, prompts: Batch, first: int = 0) -> Batch:
        """Responses to prompts, of which the first has this position in its call."""
        n = call.options["n"]
        assert isinstance(n, int)
        ids = make_ids(call.ordinal, first + len(prompts), n)[first * n :].tolist()
        if carries(call.options):
            asked = self._carried(call, ids, prompts, n)
        else:
            if is_cut(call.options):
                whole = self._weights.groups_of(call, len(prompts))
                prompts, ids = prompts.take(whole), [packed for group in whole for packed in ids[group * n : group * n + n]]
            asked = [Asked(call, ids, prompts.take(np.arange(len(ids)) // n))] if ids else []
        stretches = self._weights.stretches_of(call, [packed for part in asked for packed in part.ids])
        result = regrow(self._bench, functools.partial(self._weights.take, call.role), call, asked, stretches)
        if not len(result):
            return result  # It has no columns.
        example = [str(result.ragged(name).item(0)) for name in ("prompt", "text")]
        numbers = (performing.num_tokens_of(result), performing.num_generated_of(result), performing.finish_of(result))
        self._notes.samples_done(call, result.ids.tolist(), *numbers, self._segments.append(result), example)
        if is_time_dependent(call):
            self._notes.decided(call, given_by(call.ordinal, result.ids.tolist(), stretches_of(result)))
        return result

    def _carried(self, call: Call, ids: Sequence[int], prompts: Batch, n: int) -> list[Asked]:
        """What a call gives of its own groups and of those that the one before left; the rest is left to the next."""
        groups = dict(self._late.pop(call.carries_from, {})) if call.carries_from is not None else {}
        for position, first in enumerate(range(0, len(ids), n)):
            groups[group_key(ids[first])] = Asked(call, ids[first : first + n], prompts.take([position] * n))
        given = self._weights.candidates_given(call, sorted(groups), num_late(call.options, len(prompts)))
        asked = [groups.pop(key) for key in given]
        self._late[call.ordinal] = groups
        self._notes.late(call, [packed for part in groups.values() for packed in part.ids])
        self._notes.given(call, [packed for part in asked if part.drawn is not call for packed in part.ids])
        return asked

    def _function(self, call: Call, inputs: Mapping[str, object]) -> object:
        rows = {name: value for name, value in inputs.items() if isinstance(value, Batch)}
        result = self._bench.perform(call, rows, {name: value for name, value in inputs.items() if name not in rows})
        if call.drops and isinstance(result, Batch):
            self._notes.filtered(
                call, sorted({packed for value in rows.values() for packed in value.ids.tolist()} - set(result.ids.tolist()))
            )
        return self._noted(call, result) if isinstance(result, Batch) else performing.plain_value(call, result)

    def _noted(self, call: Call, result: object) -> object:
        if isinstance(result, Batch) and performing.gives_reward(call):
            result, parts = without_parts(result)
            self._notes.rewarded(call, result.ids.tolist(), [float(v) for v in result.dense("reward")], parts)
        return result

    def _update(self, call: Call, inputs: Mapping[str, Batch]) -> dict[str, float]:
        """Mini-batches of whole groups in the order of identity, each cut into micro-batches by the token budget."""
        self._weights.keep(call)
        samples = inputs["samples"].in_order()
        size, epochs = call.options["minibatch_size"], call.options["epochs"]
        assert isinstance(epochs, int)
        bounds = samples.group_bounds()
        size = size if isinstance(size, int) else max(len(bounds), 1)
        num_tokens = performing.num_tokens_of(samples)
        metrics = training.UpdateTally().metrics()
        for epoch in range(epochs):
            for start in range(0, len(bounds), size):
                minibatch = bounds[start : start + size]
                taken = 0
                for count in cut([sum(num_tokens[a:b]) for a, b in minibatch], self._token_budget):
                    rows = samples.take(range(minibatch[taken][0], minibatch[taken + count - 1][1]))
                    taken += count
                    prepared = training.training_rows(call, {**inputs, "samples": rows})
                    self._bench.accumulate(call, prepared, epoch=epoch)
                    self._notes.consumed(call, epoch, rows.ids.tolist())
                is_last = epoch == epochs - 1 and start + size >= len(bounds)
                metrics = self._bench.apply(call, is_last=is_last)
        return metrics


def _batch(value: object) -> Batch:
    assert isinstance(value, Batch)
    return value
