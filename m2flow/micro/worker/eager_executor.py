"""Execute whole calls in this process for the eager interpreter, with the weights that the program or a run's record asks for.

The same engines and functions as in workers, but without plan, scheduler and channels: a call's samples are generated together, scored
together, and trained on in the order of their identity.

A run with staleness above 0 records which weight versions generated each sample. Given that record, each sample is generated here by its
versions (`replay_generation`), and old weights are kept as long as a later sample of the record has tokens of them (`WeightHistory`):

    version spans (4, v3) (2, v4)    ->    load v3, begin; stop after 4 tokens; load v4, resume

A sample of one span just runs to its end. Where the KV cache is older than the weights, these are loaded under the running sample, which
then is generated alone: other samples change weights elsewhere. An episode with several versions of one role is played alone, too, each
turn with the weights that it had. Limit: a sample with several spans costs a stop and a load of weights for each.

What the tools of episodes gave in that run is on record, too (`Told`).

Episodes under way are written down as in a worker (`RunningEpisodes`), each turn and tool call before it enters the context. A resumed run
makes its calls anew, and goes on with their episodes from there: no tool with effects runs twice.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np

from m2flow.agents.chat import Told
from m2flow.agents.episodes import TurnPlace
from m2flow.channels.weights import Weight
from m2flow.engines.contract import EngineSettings
from m2flow.errors import InternalError, SpecError
from m2flow.macro.eager import Deferred
from m2flow.macro.flow import randomness_kept
from m2flow.macro.graph import Call
from m2flow.macro.oversampling import carries, is_cut, num_late, num_wanted, timeout_of
from m2flow.macro.refill import source_exhausted
from m2flow.micro.lowering.passes import cut
from m2flow.micro.lowering.placement import check_place, places
from m2flow.micro.protocol import call_semantics, update_semantics
from m2flow.micro.protocol.call_semantics import without_parts
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.staleness import Decisions, VersionSpan, given_by, is_time_dependent, version_spans_of, window
from m2flow.micro.records.resume import EAGER
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.records.segments import Place, Scratch, SegmentReader, SegmentWriter, scan_segments, scratch_name
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.micro.worker.weight_sync import WeightSettings, checks_of
from m2flow.observe.spans import Recorder, SpanBlock, now_ns
from m2flow.recipe import Model
from m2flow.samples import Batch, SampleId, by_group, group_key, make_ids
from m2flow.spec import ClusterSpec, RunSettings


@dataclass(frozen=True, eq=False)
class Asked:
    """Samples to generate that one call drew."""

    drawn: Call
    ids: Sequence[int]
    prompts: Batch
    """Row i is the prompt of sample i."""


class Take(Protocol):
    """Load a version of the weights into the rollout engine of a role, by default the call's own.

    With `under_requests` it is loaded under what runs there; with `between_turns` an episode may be under way, but none of its turns there.
    """

    def __call__(self, version: int, *, role: str = "", under_requests: bool = False, between_turns: bool = False) -> None: ...


@final
class RunningEpisodes:
    """The records of episodes of an eager run, for a resume. They are kept until two checkpoints have come after their ends."""

    def __init__(self, directory: Path) -> None:
        self._scratch = Scratch(directory, scratch_name(EAGER, "running"))
        self._found: dict[int, tuple[tuple[int, int], Batch]] = {}
        """By sample: the best record that earlier attempts at the run have left, of one row, after what it has."""
        self._over: list[int] = []
        """Samples whose calls have ended since the last checkpoint."""
        self._before: list[int] = []
        """Those that had ended by then."""
        self._checkpoint = ""
        reader = SegmentReader(directory)
        for record in scan_segments(directory, scratch_name(EAGER, "running"), {}):
            rows = reader.read(record.place)
            for row, has in enumerate(zip(call_semantics.num_generated_of(rows), call_semantics.num_noted_of(rows), strict=True)):
                packed = int(rows.ids[row])
                if packed not in self._found or has >= self._found[packed][0]:
                    self._found[packed] = has, rows.take([row])

    def of(self, ids: Sequence[int], prompts: Batch) -> dict[int, Batch]:
        """The records of these samples, as far as they are of these prompts; each is given once."""
        found = {packed: self._found.pop(packed)[1] for packed in ids if packed in self._found}
        at = {packed: row for row, packed in enumerate(ids)}
        given = prompts.ragged("prompt")
        return {packed: rows for packed, rows in found.items() if rows.ragged("prompt").item(0) == given.item(at[packed])}

    def step(self, engine_host: EngineHost) -> list[Batch]:
        """Decode one token, and write down what waits for it; the rows that have finished."""
        engine_host.hear_agents()
        self._write(engine_host)
        finished = [rows for _, rows in engine_host.step()]
        self._write(engine_host)
        return finished

    def _write(self, engine_host: EngineHost) -> None:
        waiting = engine_host.episodes_to_write()
        for call, rows in engine_host.snapshot(waiting) if waiting else ():
            self._scratch.append_rows(rows, call.ordinal)
        engine_host.episodes_written(waiting)

    def ended(self, ids: Iterable[int]) -> None:
        """Note that the call that plays these is over."""
        self._over += ids

    def saved(self, checkpoint: str) -> None:
        """Note a checkpoint. A resume may begin at the one before it, whose records go with the next one."""
        if checkpoint != self._checkpoint:
            self._checkpoint = checkpoint
            self._scratch.release(self._before)
            self._before, self._over = self._over, []

    def close(self) -> None:
        self._scratch.close()


def replay_generation(
    engine_host: EngineHost,
    take: Take,
    call: Call,
    asked: Sequence[Asked],
    version_spans: Mapping[int, Sequence[VersionSpan]],
    running: RunningEpisodes | None = None,
) -> Batch:
    """Generate samples by the recorded weight versions; return their rows in the order of identity.

    Args:
        call: the call that returns them.
        version_spans: version spans of each sample. The last one extends to the sample's end.
        running: where episodes are written down, if the call's samples are some.
    """
    if "agent" in call.options:
        assert running is not None
        return _replay_episodes(engine_host, take, call, asked, version_spans, running)
    todo = {packed: list(version_spans[packed]) for part in asked for packed in part.ids}
    parts: list[Batch] = []
    for part in asked:
        for row, packed in enumerate(part.ids):
            if any(version_span.is_stale for version_span in todo[packed]):
                parts += _alone(engine_host, take, call, Asked(part.drawn, [packed], part.prompts.take([row])), todo.pop(packed))
    stopped: dict[int, Batch] = {}
    while todo:
        version = min(of[0].version for of in todo.values())
        now = {packed: of for packed, of in todo.items() if of[0].version == version}
        take(version)
        for part in asked:
            _begin(engine_host, call, part, now, stopped)
        ends = {packed: of[0].num_tokens + _length(stopped.get(packed)) for packed, of in now.items() if len(of) > 1}
        todo = {packed: of for packed, of in todo.items() if packed not in now}
        while engine_host.num_unfinished:
            parts += [rows for _, rows in engine_host.step()]
            progress = engine_host.progress() if ends else {}
            reached = [packed for packed, end in ends.items() if progress.get(packed, 0) >= end]
            for packed in reached:
                del ends[packed]
                stopped[packed] = engine_host.interrupt([packed])
                todo[packed] = now[packed][1:]
    return Batch.concat(parts).in_order()


def _alone(engine_host: EngineHost, take: Take, call: Call, one: Asked, version_spans: Sequence[VersionSpan]) -> list[Batch]:
    """Generate a sample whose KV cache was older than its weights: these change under it where they did in the record."""
    (packed,) = one.ids
    parts: list[Batch] = []
    stopped: dict[int, Batch] = {}
    end = 0
    for number, version_span in enumerate(version_spans):
        is_last = number == len(version_spans) - 1
        if number and not engine_host.num_unfinished:
            break  # Another machine's last bits: it has ended earlier than in the record.
        if version_span.is_stale:
            take(version_span.version, under_requests=True)
        else:
            if number:
                stopped[packed] = engine_host.interrupt([packed])
            take(version_span.version)
            _begin(engine_host, call, one, {packed: version_span}, stopped)
        end += version_span.num_tokens
        while engine_host.num_unfinished and (is_last or engine_host.progress().get(packed, 0) < end):
            parts += [rows for _, rows in engine_host.step()]
    return parts


def _replay_episodes(
    engine_host: EngineHost,
    take: Take,
    call: Call,
    asked: Sequence[Asked],
    version_spans: Mapping[int, Sequence[VersionSpan]],
    running: RunningEpisodes,
) -> Batch:
    """Play episodes by the recorded weight versions of each who speaks: together those of the same ones, alone those of several."""
    parts: list[Batch] = []
    for part in asked:
        together: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for row, packed in enumerate(part.ids):
            used = {(call.speaking[version_span.by], version_span.version) for version_span in version_spans[packed]}
            versions = {role: window(call, role)[1] for role in call.speakers} | dict(used)
            if len(used) > len(dict(used)):
                one = Asked(part.drawn, [packed], part.prompts.take([row]))
                parts += _by_turns(engine_host, take, call, one, version_spans[packed], running)
            else:
                together.setdefault(tuple(sorted(versions.items())), []).append(row)
        for key, rows in sorted(together.items()):
            for role, version in key:
                take(version, role=role)
            alike = Asked(part.drawn, [part.ids[row] for row in rows], part.prompts.take(rows))
            _begin(engine_host, call, alike, dict.fromkeys(alike.ids), running.of(alike.ids, alike.prompts))
            while engine_host.num_unfinished:
                parts += running.step(engine_host)
        running.ended(part.ids)
    return Batch.concat(parts).in_order()


def _by_turns(
    engine_host: EngineHost, take: Take, call: Call, one: Asked, version_spans: Sequence[VersionSpan], running: RunningEpisodes
) -> list[Batch]:
    """Play an episode alone that was stopped, and went on with other weights: each turn has those of the record.

    Within a turn they change where it was stopped then. Which conversation had its turn first does not matter.
    """
    (packed,) = one.ids
    spans: dict[tuple[str, int], list[VersionSpan]] = {}
    for version_span in version_spans:
        spans.setdefault(version_span.sequence, []).append(version_span)
    is_named = any(version_span.sequence[0] for version_span in version_spans)
    end: int | None = None
    """Tokens of the sequence after which other weights were loaded in the record; None: no more were."""

    def before(place: TurnPlace) -> None:
        nonlocal end
        of = spans.get(place.sequence if is_named else ("", 0), ())
        role, ends = call.speaking[place.by], list(itertools.accumulate(version_span.num_tokens for version_span in of))
        at = min(bisect.bisect_right(ends, place.num_sampled), len(of) - 1)
        end = ends[at] if 0 <= at < len(of) - 1 else None
        take(of[at].version if of else window(call, role)[1], role=role, between_turns=True)

    for role in call.speakers:
        take(
            next((version_span.version for version_span in version_spans if call.speaking[version_span.by] == role), window(call, role)[1]),
            role=role,
        )
    engine_host.before_turns(call.role, before)
    parts: list[Batch] = []
    engine_host.generate(call, one.ids, one.prompts, one.drawn)
    while engine_host.num_unfinished:
        parts += running.step(engine_host)
        place = engine_host.turn_of(call.role, packed)
        if place is not None and end is not None and place.num_sampled >= end:
            engine_host.resume(call, engine_host.interrupt(one.ids), one.drawn)
    engine_host.before_turns(call.role, None)
    return parts


def _begin(engine_host: EngineHost, call: Call, part: Asked, now: Mapping[int, object], stopped: Mapping[int, Batch]) -> None:
    fresh = [row for row, packed in enumerate(part.ids) if packed in now and packed not in stopped]
    if fresh:
        engine_host.generate(call, [part.ids[row] for row in fresh], part.prompts.take(fresh), part.drawn)
    goes_on = [stopped[packed] for packed in part.ids if packed in now and packed in stopped]
    if goes_on:
        engine_host.resume(call, Batch.concat(goes_on), part.drawn)


def _length(stopped: Batch | None) -> int:
    """Generated tokens of a sample so far."""
    return 0 if stopped is None else call_semantics.num_generated_of(stopped)[0]


_NOW = "The record must be of a run of this flow, with the same options and seed."


class WeightHistory:
    """What the rollout engines of one process hold, and what is kept for them.

    Args:
        trained: the roles that have a trainer here.
        decisions: None: every sample is of the version that its line reads.
        restored: role -> the version that its trainer begins with.
    """

    def __init__(self, engine_host: EngineHost, trained: set[str], decisions: Decisions | None, restored: Mapping[str, int]) -> None:
        self._engine_host = engine_host
        self._trained = trained
        self._decisions = decisions
        self._last_use: dict[int, int] = {}
        """Version -> the last call of the record with a sample of it, whoever's version that is."""
        for call, version_spans in (decisions or {}).values():
            for version_span in version_spans:
                self._last_use[version_span.version] = max(self._last_use.get(version_span.version, -1), call)
        self._held: dict[str, int] = {}
        self._newest = dict(restored)
        self._kept: dict[tuple[str, int], list[tuple[str, Weight]]] = {}

    def groups_of(self, call: Call, num_prompts: int) -> list[int]:
        """The positions of the groups that an over-sampled generation gives: those of the record; without one the first.

        Raises:
            SpecError: the record has not as many groups of this call as it must give.
        """
        wanted = num_wanted(call.options, num_prompts)
        if self._decisions is None:
            return list(range(wanted))
        found = sorted({who.prompt for who in map(SampleId.unpack, self._decisions) if who.call == call.ordinal})
        some = timeout_of(call.options) is not None
        if len(found) > wanted or (len(found) < wanted and not some) or found[-1:] >= [num_prompts]:
            raise SpecError(
                f"the record of decisions has {len(found)} groups of {call.name}, which gives {wanted} of {num_prompts}"
                + (" or fewer" if some else ""),
                where=call.site.describe(),
                now=_NOW,
            )
        return found

    def candidates_given(self, call: Call, candidates: Sequence[int], num_late: int) -> list[int]:
        """The groups, among these candidates (their keys), that a call gives which carries over what is late: those of the record.

        Without a record the first: what was carried comes first, and the last of its own are late.

        Raises:
            SpecError: the record has groups that are no candidates, or too few.
        """
        if self._decisions is None:
            return list(candidates[: len(candidates) - num_late])
        found = sorted({group_key(packed) for packed, decision in self._decisions.items() if decision.call == call.ordinal})
        if len(found) < len(candidates) - num_late or not set(found) <= set(candidates):
            raise SpecError(
                f"the record of decisions has {len(found)} groups of {call.name}, which gives at least {len(candidates) - num_late} of "
                f"{len(candidates)}, those that were carried included",
                where=call.site.describe(),
                now=_NOW,
            )
        return found

    def version_spans_of_samples(self, call: Call, ids: Sequence[int]) -> dict[int, tuple[VersionSpan, ...]]:
        """How each of a generate call's samples is to be made.

        Raises:
            SpecError: the record lacks a sample, or names a version that the call may not use.
        """
        windows = {name: window(call, role) for name, role in call.speaking.items()}
        if self._decisions is None or not is_time_dependent(call):
            return dict.fromkeys(ids, tuple(VersionSpan(0, newest, by=name) for name, (_, newest) in windows.items()))
        found: dict[int, tuple[VersionSpan, ...]] = {}
        for packed in ids:
            version_spans = self._decisions[packed].version_spans if packed in self._decisions else ()
            ranges = ((version_span.version, *windows.get(version_span.by, (0, -1))) for version_span in version_spans)
            wrong = next((one for one in ranges if not one[1] <= one[0] <= one[2]), None)
            is_silent = packed in self._decisions and "agent" in call.options
            if wrong is not None or not (version_spans or is_silent):
                said = "has no version for it" if wrong is None else "says version {}, where it may be {} to {}".format(*wrong)
                raise SpecError(
                    f"sample {SampleId.unpack(packed)} of {call.name}: the record of decisions {said}", where=call.site.describe(), now=_NOW
                )
            found[packed] = version_spans
        return found

    def take(self, role: str, version: int, *, under_requests: bool = False, between_turns: bool = False) -> None:
        """Have the role's rollout engine hold this version, perhaps from here on for what runs."""
        if role not in self._trained or version == self._held.get(role, 0):
            return
        if version == self._newest.get(role, 0):
            self._engine_host.load_weights(role, version, None, under_requests=under_requests, between_turns=between_turns)
        else:
            self._engine_host.load_kept(role, version, self._kept[role, version], under_requests=under_requests)
        self._held[role] = version

    def keep(self, update: Call) -> None:
        """The role's weights are about to change: keep them if the record needs them later, and drop what it does not need."""
        role = update.role
        version = update.writes[0].version - 1
        self._newest[role] = version + 1
        self._kept = {key: kept for key, kept in self._kept.items() if self._last_use[key[1]] > update.ordinal}
        if self._last_use.get(version, -1) > update.ordinal:
            self._kept[role, version] = self._engine_host.keep_weights(role)


class EagerJournal(Protocol):
    """Is told what was done, to write it down (`m2flow.micro.records.journal`)."""

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
    """Where the trainers begin (`m2flow.micro.records.resume`)."""

    @property
    def attempt(self) -> int: ...

    @property
    def versions(self) -> Mapping[str, int]: ...

    @property
    def parts(self) -> Mapping[str, str]: ...


class EagerExecutor:
    """A `m2flow.macro.eager.Executor` on engines of this process."""

    def __init__(
        self,
        plan: Plan,
        spec: ClusterSpec,
        settings: RunSettings,
        models: Mapping[str, Model],
        run_dir: Path,
        journal: EagerJournal,
        decisions: Decisions | None = None,
        restored: Restored | None = None,
        repeats: Path | None = None,
    ) -> None:
        """
        Args:
            repeats: the directory of the run whose decisions these are: what its tools gave is not asked of them again.
        """
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
        self._engine_host = EngineHost(
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
        self._weights = WeightHistory(self._engine_host, self._trained, decisions, self._versions)
        self._late: dict[int, dict[int, Asked]] = {}
        """Call -> what it has left to the next of its line: group -> its samples."""
        self._recalled: dict[int, tuple[Call, Batch]] = {}
        """Generations that were over before, with their prompts."""
        self._token_budget = spec.train.token_budget
        self.updating: update_semantics.UpdateSteps | None = None
        """How far the running update is, if it takes several optimiser steps; for displays."""
        self._engine_host.writes_episodes = True
        self._repeated = SampleQuery(repeats) if repeats is not None else None
        if self._repeated is not None:
            self._engine_host.told = self._told
        self._running = RunningEpisodes(run_dir / "segments")
        self._segments = SegmentWriter(run_dir / "segments", EAGER)
        self._journal = journal

    @property
    def unix_ns(self) -> int:
        """The time by the clock of the trace."""
        return now_ns() + self._recorder.anchor_ns

    def open(self) -> None:
        if self._repeated is not None:
            self._repeated.__enter__()
        self._engine_host.open()

    def _told(self, packed: int) -> Told:
        assert self._repeated is not None
        record, failure = self._repeated.episode(packed)
        return Told(str(SampleId.unpack(packed)), record.get("tools", {}), failure, str(record.get("error", "")))

    def close(self) -> None:
        if self._repeated is not None:
            self._repeated.__exit__()
        self._journal.spans(self._recorder.drain())
        self._segments.close()
        self._running.close()
        self._engine_host.close()

    def check(self, call: Call) -> None:
        check_place(call, self._hosted)

    def execute(self, call: Call, inputs: Mapping[str, object]) -> object:
        """Do one whole call."""
        with randomness_kept():
            return self._execute(call, inputs)

    def _execute(self, call: Call, inputs: Mapping[str, object]) -> object:
        result = self._result(call, inputs)
        if call.engine == "train":
            self._versions.update((call.role, effect.version) for effect in call.writes)
        return result

    def _result(self, call: Call, inputs: Mapping[str, object]) -> object:
        self._journal.call_added(call)
        given = [value for value in inputs.values() if isinstance(value, Batch)]
        takes_over = call.carries_from is not None and bool(self._late.get(call.carries_from))
        if (
            call.is_aligned
            and given
            and not takes_over
            and not any(map(len, given[: None if call_semantics.gives(call) == "concat" else 1]))
        ):
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
                self._engine_host.copy_weights(call)
                return None
            case "train":
                return self._noted(call, self._engine_host.run_call(call, {"samples": _batch(inputs["samples"])}, {}))
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
        self._running.saved(str(path.parent))
        return self._engine_host.save(role, str(path), seals=True)

    @property
    def versions(self) -> dict[str, int]:
        """The weight version of each role that was trained or copied to."""
        return dict(self._versions)

    def save(self, path: Path) -> dict[str, str]:
        """Write every role's model; the digest of its weights by role."""
        return {role: self._engine_host.save(role, str(path / role)) for role in sorted(self._roles)}

    def _refill(self, call: Call, inputs: Mapping[str, object]) -> Batch:
        """Draw a prompt, answer it, score the group, keep it or not; until there are enough."""
        generate, score = inputs["samples"], inputs["reward"]
        assert isinstance(generate, Deferred)
        assert isinstance(score, Deferred)
        self._journal.call_added(generate.call)
        self._journal.call_added(score.call)
        prompts, kept = _batch(generate.inputs["prompts"]), []
        for position in range(len(prompts)):
            samples = self._generate(generate.call, prompts.take([position]), first=position)
            rewards = self._function(score.call, {"samples": samples})
            rows = self._function(call, {"samples": samples, "reward": rewards})
            if len(_batch(rows)):
                kept.append(_batch(rows))
            if len(kept) == call.options["refill"]:
                return Batch.concat(kept)
        raise source_exhausted(call, len(kept), len(prompts))

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
        version_spans = self._weights.version_spans_of_samples(call, [packed for part in asked for packed in part.ids])

        def take(version: int, *, role: str = "", under_requests: bool = False, between_turns: bool = False) -> None:
            self._weights.take(role or call.role, version, under_requests=under_requests, between_turns=between_turns)

        result = replay_generation(self._engine_host, take, call, asked, version_spans, self._running)
        if not len(result):
            return result  # It has no columns.
        sample = next(result.rows())
        example = [sample.prompt_text, str(sample["text"])]
        numbers = (call_semantics.num_tokens_of(result), call_semantics.num_generated_of(result), call_semantics.finish_of(result))
        self._journal.samples_done(call, result.ids.tolist(), *numbers, self._segments.append(result), example)
        if is_time_dependent(call):
            self._journal.decided(call, given_by(call.ordinal, result.ids.tolist(), version_spans_of(result)))
        return result

    def _carried(self, call: Call, ids: Sequence[int], prompts: Batch, n: int) -> list[Asked]:
        """What a call gives of its own groups and of those that the one before left; the rest is left to the next."""
        groups = dict(self._late.pop(call.carries_from, {})) if call.carries_from is not None else {}
        for position, first in enumerate(range(0, len(ids), n)):
            groups[group_key(ids[first])] = Asked(call, ids[first : first + n], prompts.take([position] * n))
        given = self._weights.candidates_given(call, sorted(groups), num_late(call.options, len(prompts)))
        asked = [groups.pop(key) for key in given]
        self._late[call.ordinal] = groups
        self._journal.late(call, [packed for part in groups.values() for packed in part.ids])
        self._journal.given(call, [packed for part in asked if part.drawn is not call for packed in part.ids])
        return asked

    def _function(self, call: Call, inputs: Mapping[str, object]) -> object:
        rows = {name: value for name, value in inputs.items() if isinstance(value, Batch)}
        result = self._engine_host.run_call(call, rows, {name: value for name, value in inputs.items() if name not in rows})
        if call.drops and isinstance(result, Batch):
            self._journal.filtered(
                call, sorted({packed for value in rows.values() for packed in value.ids.tolist()} - set(result.ids.tolist()))
            )
        return self._noted(call, result) if isinstance(result, Batch) else call_semantics.plain_value(call, result)

    def _noted(self, call: Call, result: object) -> object:
        if isinstance(result, Batch) and call_semantics.gives_reward(call):
            result, parts = without_parts(result)
            self._journal.rewarded(call, result.ids.tolist(), [float(v) for v in result.dense("reward")], parts)
        return result

    def _update(self, call: Call, inputs: Mapping[str, Batch]) -> dict[str, float]:
        """Mini-batches of whole groups in the order of identity, each cut into micro-batches by the token budget."""
        self._weights.keep(call)
        samples = inputs["samples"].in_order()
        size, epochs = call.options["minibatch_size"], call.options["epochs"]
        assert isinstance(epochs, int)
        bounds = samples.group_bounds()
        size = size if isinstance(size, int) else max(len(bounds), 1)
        num_tokens = call_semantics.num_tokens_of(samples)
        metrics = update_semantics.UpdateTally().metrics()
        num_steps, num_done = epochs * math.ceil(len(bounds) / size), 0
        for epoch in range(epochs):
            for start in range(0, len(bounds), size):
                minibatch = bounds[start : start + size]
                taken = 0
                for count in cut([sum(num_tokens[a:b]) for a, b in minibatch], self._token_budget):
                    rows = samples.take(range(minibatch[taken][0], minibatch[taken + count - 1][1]))
                    taken += count
                    prepared = update_semantics.training_rows(call, {**inputs, "samples": rows})
                    self._engine_host.accumulate(call, prepared, epoch=epoch)
                    self._journal.consumed(call, epoch, rows.ids.tolist())
                num_done += 1
                is_last = num_done == num_steps
                metrics = self._engine_host.apply(call, is_last=is_last)
                self.updating = (
                    None if is_last else update_semantics.UpdateSteps(call.name, num_done, num_steps, metrics.get("loss", math.nan))
                )
        return metrics


def _batch(value: object) -> Batch:
    assert isinstance(value, Batch)
    return value
