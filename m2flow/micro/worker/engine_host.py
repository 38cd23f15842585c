"""Host the engines of one process and do tasks on them chunk by chunk: generate, run functions, accumulate gradients, sync weights, take
turns.

A worker does its tasks here; the eager executor does whole calls here. Inputs come as batches and results leave as batches: where they
come from and where they go is the caller's business.

Shared trainers (`shared_trainer_of`, `lender_of`), only where the engines have the same turn, since offloading frees the memory of both:

    Reference(path), Reference(path)                      one engine, loaded once
    Policy(path, lora=...), Reference(path)               the reference computes from the policy's weights, without its adapters
    Policy(path, lora=...), Reference(policy)             likewise, with the adapters that the policy had

Onload and offload are recorded with the bytes that moved, the difference of `engine.memory()`. On a CPU the device is the host and little
moves: a rollout engine's cache is freed, weights stay where they are. `Draining` records how long a rollout engine was running out of
samples before its turn ended. `Gauges` records counters:

    engines, Outbox.statistics --Gauges.record--> "running, policy", "kv tokens, policy", "tokens/s", "channel to NAME: samples", ...
    the process                                   "peak memory bytes", "peak gpu memory bytes"
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec
import numpy as np

from m2flow.agents.chat import Told
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart, TurnPlace
from m2flow.agents.tools import EventLoop
from m2flow.agents.turn_requests import Guests, RemoteSpeaker, Window, is_limited
from m2flow.channels.channel import Statistics
from m2flow.channels.weights import Manifest, Tied, Weight, digest
from m2flow.channels.weights.tensors import to_wire
from m2flow.engines.contract import Engine, EngineSettings, Generated, Memory, Occupancy, Request, RolloutEngine, Tensor, TrainEngine
from m2flow.engines.registry import StepCheck, make_function, make_rollout, vocabulary_of
from m2flow.errors import InternalError, M2FlowError, OpError, PromptTooLong
from m2flow.macro.capture import Snapshot, forget_copies
from m2flow.macro.graph import GENERATED, Call, is_of_user
from m2flow.micro.protocol import call_semantics, update_semantics
from m2flow.micro.protocol.messages import Queued
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.protocol.staleness import ANY_VERSION, check_admission, check_given, version_spans_of, window
from m2flow.micro.protocol.worker_state import ROLLOUT, instance_of, worker_of
from m2flow.micro.records.checkpoints import PartWriter, seal
from m2flow.micro.worker.function_tasks import BegunCall, Functions, Leave
from m2flow.micro.worker.out_of_memory import MiniBatches, accounted, peak_bytes
from m2flow.micro.worker.rank_group import MakeTrain, make_own_train
from m2flow.micro.worker.telemetry import ChannelCounts, Draining, SampleSpans
from m2flow.micro.worker.weight_sync import LogprobCheck, WeightSettings, WeightSyncs
from m2flow.observe.spans import FOR_AGENTS, FOR_SPEAKERS, Recorder, SpanName, now_ns
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Model, Sampling
from m2flow.samples import BRANCH_TURN, ENGINE_COLUMNS, EPISODE, Batch, Sample


def add(engine: RolloutEngine, requests: Sequence[Request]) -> None:
    """Queue requests in an engine. If one does not fit, none is queued, and the error names it."""
    try:
        engine.add(requests)
    except PromptTooLong as error:
        for position, request in enumerate(requests):
            try:
                engine.add([request])
            except PromptTooLong as of_this:
                engine.abort([r.id for r in requests[:position]])
                raise of_this.about(request.id) from None
        raise error


def offload(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """Offload an engine, or only its working memory if it stays on its devices, and record what moved."""
    _moved(recorder, SpanName.OFFLOAD, slot, engine, engine.rest if slot.stays else engine.offload)


def onload(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """Onload an engine and record what moved."""
    _moved(recorder, SpanName.ONLOAD, slot, engine, engine.onload)


def shrink_kv_cache(recorder: Recorder, slot: EngineSlot, engine: RolloutEngine) -> None:
    """Shrink a rollout engine's KV cache to what runs, because others come to its devices meanwhile."""
    _moved(recorder, SpanName.OFFLOAD, slot, engine, engine.shrink_kv_cache, " unused cache")


def _moved(recorder: Recorder, name: SpanName, slot: EngineSlot, engine: Engine, move: Callable[[], None], what: str = "") -> None:
    before = engine.memory().total
    with recorder.span(name, label=f"{slot.role} {slot.kind}{what}") as span:
        start = time.monotonic()
        move()
        took_s = time.monotonic() - start
        num_bytes = abs(engine.memory().total - before)
        span.set(num_bytes=num_bytes, gb_per_s=round(num_bytes / max(took_s, 1e-9) / 1e9, 4))


@dataclass(frozen=True)
class InflightSample:
    """A sample that is in a rollout engine."""

    call: Call
    """The call that it is generated for."""
    drawn: Call
    """The call that drew it; an earlier one for partial rollouts."""
    prompts: Batch
    row: int
    """Row of its prompt in `prompts`."""
    seed: int
    start_ns: int
    had: int
    """Tokens that it had when it was queued."""
    waited_us: int
    """Queueing time before it was sent here, in microseconds."""
    speakers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Role that speaks in an episode from other processes -> these."""


def _has_own_tools(generated: Generated) -> bool:
    """Whether an episode has asked tools for something, other than in the record of one that it is a branch of."""
    record: Any = generated.columns.get("episode", {})
    return bool(record.get("tools")) and "branch" not in record


def rows_of(generated: Sequence[Generated], inflight: Sequence[InflightSample]) -> Batch:
    """Make the rows of samples, finished or not."""
    alike = [list(of) for _, of in itertools.groupby(inflight, key=lambda sample: id(sample.prompts))]
    prompts = Batch.concat([of[0].prompts.take([sample.row for sample in of]) for of in alike])
    seeds = {g.id: s.seed for g, s in zip(generated, inflight, strict=True)}
    return call_semantics.responses([g.drawn for g in inflight], generated, prompts, seeds)


_MADE_ANEW = GENERATED | ENGINE_COLUMNS | {"prompt_text"}
"""What a prompt has of these, being a response itself, is replaced by what its own sample has."""


def episodes_of(drawn: Call, requests: Sequence[Request], prompts: Batch, *, is_stopped: bool) -> Iterator[EpisodeStart]:
    """The episodes of a call that are to begin; or, with the rows of stopped ones, to go on. Branches begin with their parents' rows."""
    agent: Any = drawn.options["agent"]
    bounds = drawn.options["episodes"]
    assert isinstance(bounds, Bounds)

    def make() -> Callable[..., object]:
        return agent.fresh() if isinstance(agent, Snapshot) else agent

    branches = bool(drawn.options.get("branches"))
    known = [Transcript.of(prompts, row) if is_stopped or branches else None for row in range(len(requests))]
    # An agent that says the identity of its row, or passes it to a tool, does the same again.
    given = [packed if one is None or one.row is None else one.row for packed, one in zip(prompts.ids.tolist(), known, strict=True)]
    rows = prompts.without(_MADE_ANEW | EPISODE | ({BRANCH_TURN} if branches else frozenset()))
    rows = Batch(np.array(given, np.int64), rows.columns).frozen()
    for row, (request, stopped) in enumerate(zip(requests, known, strict=True)):
        if branches and not is_stopped:
            assert stopped is not None
            stopped = stopped.branched(int(prompts.dense(BRANCH_TURN)[row]), int(prompts.dense("seed")[row]))
        word = str(stopped.point.turn) if branches and stopped is not None and stopped.point is not None else ""
        yield EpisodeStart(request, make, Sample(rows, row), bounds, stopped, word)


def shared_trainer_of(slot: EngineSlot, slots: Sequence[EngineSlot], models: Mapping[str, Model]) -> str | None:
    """Return the first role before this one whose frozen trainer is identical and can be shared; None if there is none."""
    before = _alike(slot, slots[: slots.index(slot)])
    return next((one.role for one in before if models[one.role] == models[slot.role] and models[slot.role].is_frozen), None)


def lender_of(slot: EngineSlot, slots: Sequence[EngineSlot], models: Mapping[str, Model]) -> str | None:
    """Return the role of a LoRA policy from whose weights this role's model can be computed; None if there is none."""
    own = models.get(slot.role)
    if slot.kind != "train" or own is None or own.is_policy:
        return None
    for one in _alike(slot, slots):
        policy = models[one.role]
        if policy.lora is None or not policy.is_policy:
            continue
        if own in (replace(policy, is_policy=False), replace(policy, lora=None, rollout_dtype=None, is_policy=False, is_frozen=True)):
            return one.role
    return None


def _alike(slot: EngineSlot, slots: Sequence[EngineSlot]) -> list[EngineSlot]:
    """Return the trainers of other roles with the same engine and the same turn."""
    same = (slot.kind, slot.engine, slot.takes_turn, slot.stays)
    return [one for one in slots if one.role != slot.role and (one.kind, one.engine, one.takes_turn, one.stays) == same]


E = TypeVar("E")
_Speakers = Mapping[str, Sequence[str]]
_NONE: _Speakers = {}


class EngineHost:
    """The engines of one process, by role and kind. Shared-memory segments of weights for other processes are named by `shared_prefix`.

    Finished samples gather up to `gather_s` before they leave together: with a small model, making a batch of each one, writing it
    down and sending it on would cost as much as decoding.
    """

    def __init__(
        self,
        slots: Sequence[EngineSlot],
        models: Mapping[str, Model],
        settings: Mapping[str, EngineSettings],
        *,
        run_dir: str = "",
        run_seed: int,
        recorder: Recorder,
        shared_prefix: str,
        gather_s: float = 0.0,
        restore: Mapping[str, str] | None = None,
        worker: str = "",
        weights: WeightSettings = WeightSettings(),  # noqa: B008
        make_train: MakeTrain = make_own_train,
        takes_turns: bool = False,
        record_every: int = 1,
    ) -> None:
        """
        Args:
            run_dir: directory whose name its traces are labelled with.
            takes_turns: whether the engines are co-located: they share their devices with others, of this process or of others. The
                first turn is rollout's; all others begin offloaded.
        """
        self._slots = tuple(slots)
        self._takes_turns = takes_turns
        self._turn = ROLLOUT
        self._models = models
        self._settings = settings
        self._make_train = make_train
        self._run, self._run_seed = Path(run_dir).resolve().name, run_seed
        self._recorder, self._sample_spans = recorder, SampleSpans(recorder, every=record_every)
        self._draining = Draining(recorder)
        self._gather_ns = gather_s * 1e9
        self._restore = restore or {}
        """Role -> part of a checkpoint that its trainer starts from."""
        self._is_closed = False
        self._rollout: dict[str, RolloutEngine] = {}
        self._checks: dict[str, StepCheck] = {}
        self._episodes: dict[str, Episodes] = {}
        """Role -> its rollout engine with its episodes, if it has had any or has spoken in others'."""
        self._agents: EventLoop | None = None
        self._elsewhere: dict[str, RemoteSpeaker] = {}
        """Role that speaks here and has its rollout engines in other processes."""
        self._guests = Guests(self._speaking, self._why_it_can_not_speak)
        self.parts = PartWriter()
        """Writer of checkpoints' parts, while the engines go on."""
        self.told: Callable[[int], Told] | None = None
        """What there is of an episode in the run whose decisions are repeated; None: none are."""
        self.writes_episodes = False
        """Whether `episodes_to_write` is asked, so that episodes wait for it."""
        self._tool_wait_ns = 0
        """Since when the engines have had nothing to do but to wait for agents; 0: they have."""
        self._waits_for = ""
        self._train: dict[str, TrainEngine] = {}
        self._functions: Functions | None = None
        self._inflight: dict[int, InflightSample] = {}
        self._finished: list[tuple[Generated, int]] = []
        """Finished samples that wait to leave, and when they finished."""
        self._left_ns = 0
        self._had = 0
        """Tokens that all in-flight samples had when they were queued."""
        self._num_left = 0
        """Tokens generated here of samples that have left."""
        self._tallies: dict[int, update_semantics.UpdateTally] = {}
        self._minibatches = MiniBatches()
        self._num_shared = 0
        """Tokens that were trained on and did not go through the model again, since samples begin alike."""
        self._weight_syncs = WeightSyncs(worker, shared_prefix, models, weights, recorder)
        self._stop_above = weights.checks.stop_above
        of_train = settings["train"].options if "train" in settings else {}
        self._logprob_check = LogprobCheck(
            models, weights.checks, recorder, published=frozenset(weights.publishes), compute_dtype=str(of_train.get("compute_dtype", ""))
        )

    def open(self) -> None:
        """Load every engine. Of those that take turns, the ones that are offloaded again are loaded first."""
        lenders = {slot.role: lender_of(slot, self._slots, self._models) for slot in self._slots if slot.kind == "train"}

        def at(slot: EngineSlot) -> tuple[bool, bool]:
            return self._takes_turns and slot.takes_turn == ROLLOUT, slot.kind == "train" and lenders[slot.role] is not None

        for slot in sorted(self._slots, key=at):
            if slot.kind == "function":
                engine = make_function(slot.engine, self._settings["function"])
                engine.start()
                self._functions = Functions(engine, run=self._run, run_seed=self._run_seed, recorder=self._recorder)
            elif slot.kind == "rollout":
                settings = replace(self._settings["rollout"], tp=slot.tp, pp=slot.pp, ep=slot.ep)
                model = self._models[slot.role]
                self._rollout[slot.role] = rollout = make_rollout(slot.engine, model, settings)
                rollout.start()
                window_of = functools.partial(self._window_of, slot.role)
                self._checks[slot.role] = StepCheck(rollout, slot.role, vocabulary_of(rollout, model), window_of)
            else:
                shared = shared_trainer_of(slot, self._slots, self._models)
                if shared in self._train:
                    self._train[slot.role] = self._train[shared]
                    continue
                lender, model = lenders[slot.role], self._models[slot.role]
                reference = None if lender is None else self._train[lender].adapter_reference(slot.role, model)
                self._train[slot.role] = reference or self._make_train(slot, model, self._settings["train"])
                self._train[slot.role].start()
                if slot.role in self._restore:
                    self._train[slot.role].load(self._restore[slot.role])
            if self._takes_turns and slot.kind != "function" and slot.takes_turn != ROLLOUT:
                offload(self._recorder, slot, self._rollout[slot.role] if slot.kind == "rollout" else self._train[slot.role])

    def close(self) -> None:
        """Free every engine and every shared segment."""
        self._sample_spans.flush()
        self.parts.drain()
        if self._agents is not None:
            self._agents.close()
        for engine in self._engines():
            engine.stop()
        if self._functions is not None:
            forget_copies()
        self._is_closed = True
        self._weight_syncs.close()

    # Generation

    @property
    def num_unfinished(self) -> int:
        return len(self._inflight)

    @property
    def is_generating(self) -> bool:
        """Whether there is something to do in `step` or to send (`take_turns`): samples, or turns of others' episodes."""
        return bool(self._inflight) or len(self._guests) > 0 or self._guests.has_answers

    def generate(
        self,
        call: Call,
        ids: Sequence[int],
        prompts: Batch,
        drawn: Call | None = None,
        waited_us: int = 0,
        speakers: _Speakers = _NONE,
        waits_us: Sequence[int] = (),
    ) -> None:
        """Queue samples; row i of `prompts` is the prompt of sample i. An earlier call may have drawn them, and left them to this one.

        Args:
            speakers: of episodes: role that speaks from other processes -> these.
            waits_us: of episodes that were moved here: how long each has waited elsewhere.
        """
        requests = call_semantics.requests(drawn or call, ids, prompts, self._run_seed)
        self._begin(call, drawn or call, requests, prompts, waited_us, speakers, waits_us, is_stopped=False)

    def embeddings(self, role: str, requests: Sequence[Request]) -> list[list[float]]:
        """Embed the prompts of requests by a role's rollout engine (`RolloutEngine.embeddings`)."""
        return [list(map(float, row)) for row in self._engine(self._rollout, role).embeddings(requests)]

    def resume(
        self, call: Call, stopped: Batch, drawn: Call, waited_us: int = 0, speakers: _Speakers = _NONE, waits_us: Sequence[int] = ()
    ) -> None:
        """Queue samples that resume from the tokens in these rows; the rest as in `generate`."""
        for packed, version_spans in zip(stopped.ids.tolist(), version_spans_of(stopped), strict=True):
            check_given(call, packed, version_spans)
        self._begin(call, drawn, call_semantics.continuations(drawn, stopped), stopped, waited_us, speakers, waits_us, is_stopped=True)

    def _begin(
        self,
        call: Call,
        drawn: Call,
        requests: Sequence[Request],
        prompts: Batch,
        waited_us: int,
        speakers: _Speakers,
        waits_us: Sequence[int],
        *,
        is_stopped: bool,
    ) -> None:
        engine = self._engine(self._rollout, call.role)
        check_admission(call, engine.version)
        for role in call.speakers[1:]:
            if role not in speakers:
                check_admission(call, self._engine(self._rollout, role).version, role)
        had = [len(r.prefix) for r in requests]
        if "agent" in drawn.options:
            is_stopped = is_stopped and (any(had) or not drawn.options.get("branches"))  # Their parents' rows look alike.
            starts = list(episodes_of(drawn, requests, prompts, is_stopped=is_stopped))
            if waits_us:
                starts = [replace(start, waited_s=us / 1e6) for start, us in zip(starts, waits_us, strict=True)]
            if (told := self.told) is not None:
                starts = [replace(start, told=told(start.request.id)) for start in starts]
            had = [start.stopped.num_sampled if start.stopped is not None else 0 for start in starts]
            for role in call.speakers[1:]:
                self._speaking(role)
            start = now_ns()  # From now on the agents' threads are at work.
            self._speaking(call.role).begin(starts)
            prompts = prompts.without(EPISODE)
        else:
            add(engine, requests)
            start = now_ns()
        prompts = prompts.without(_MADE_ANEW)
        for row, r in enumerate(requests):
            self._inflight[r.id] = InflightSample(call, drawn, prompts, row, r.seed, start, had[row], waited_us, speakers)
        self._sample_spans.began({r.id: count for r, count in zip(requests, had, strict=True)})
        self._draining.given(call.role)
        self._had += sum(had)

    def _speaking(self, role: str) -> Episodes:
        """A role's rollout engine with its episodes."""
        if role not in self._episodes:
            self._agents = self._agents or EventLoop()
            engine = self._rollout[role] if role in self._rollout else self._speaker_elsewhere(role)
            self._episodes[role] = Episodes(
                engine, self._agents, self._episodes, self._settings["rollout"].max_running, check=self._checks.get(role)
            )
            self._episodes[role].record, self._episodes[role].is_recorded = self._passed, self.writes_episodes
        return self._episodes[role]

    def _passed(self, packed: int, name: str, start_ns: int, end_ns: int, about: Mapping[str, object]) -> None:
        """Record a turn or a tool call of an episode, on the thread of agents."""
        inflight = self._inflight.get(packed)
        if inflight is not None:
            if "speaker" in about:
                bounds: Any = inflight.drawn.options["episodes"]
                role = dict(bounds.speakers)[about["speaker"]]
                about = {**about, "role": role}
                if role in inflight.speakers:
                    about["worker"] = worker_of(instance_of(packed, inflight.speakers[role]))
            self._sample_spans.part(inflight.call.ordinal, packed, name, start_ns, end_ns, about)

    # Speakers in other processes, and turns of others' episodes

    def _speaker_elsewhere(self, role: str) -> RemoteSpeaker:
        name = next(slot.engine for slot in self._slots if slot.kind == "rollout")
        language = make_rollout(name, self._models[role], self._settings["rollout"]).language()

        def place_of(packed: int) -> str:
            return instance_of(packed, self._inflight[packed].speakers[role])

        def has_limit(packed: int) -> bool:
            bounds: Any = self._inflight[packed].drawn.options["episodes"]
            return is_limited(bounds)

        window_of = lambda packed: Window(*window(self._inflight[packed].call, role))  # noqa: E731
        self._elsewhere[role] = RemoteSpeaker(role, language, place_of, window_of, has_limit)
        return self._elsewhere[role]

    def _why_it_can_not_speak(self, role: str, may_use: Window) -> str:
        engine, slot = self._engine(self._rollout, role), self._slot("rollout", role)
        if self._takes_turns and slot.takes_turn != self._turn:
            return f"its engine is not on its devices, which are {self._turn}'s"
        version = engine.version
        may_speak = may_use.oldest <= version <= may_use.newest
        return "" if may_speak else f"its engine has version {version}, not {may_use.oldest} to {may_use.newest}"

    def turns_asked(self, sender: str, rows: Batch) -> None:
        """Take in turns that another process asks for, and those that it gives up."""
        self._guests.take(sender, rows)

    def turns_answered(self, rows: Batch) -> None:
        """Take in what came of turns that were asked for."""
        for row in range(len(rows)):
            record: Any = rows.ragged("turn").item(row)
            if record["role"] in self._elsewhere:
                self._elsewhere[record["role"]].answered(rows, row, record)

    def take_turns(self) -> tuple[list[tuple[str, Batch]], list[tuple[str, Batch]]]:
        """The turns to ask other processes for, or to give up there; and those to answer: each with the process."""
        asked = [one for speaker in self._elsewhere.values() for one in speaker.take_asked()]
        return asked, self._guests.take_answers() if self._guests.has_answers else []

    def peer_lost(self, sender: str) -> None:
        """Give up what another process had asked for."""
        self._guests.lost(sender)

    def before_turns(self, role: str, told: Callable[[TurnPlace], None] | None) -> None:
        """Have each turn of a role's episodes told before its engine is given it, from here on."""
        self._speaking(role).before_turn = told

    def turn_of(self, role: str, packed: int) -> TurnPlace | None:
        """The turn of an episode that an engine works on; None: none does."""
        return self._speaking(role).turn_of(packed)

    @property
    def _generators(self) -> Mapping[str, RolloutEngine | Episodes]:
        """By role: what generates its samples, its agents included."""
        return {**self._rollout, **self._episodes} if self._episodes else self._rollout

    def hear_agents(self) -> None:
        """Take in what agents have asked for and noted, so that it can be written down before the next step."""
        for episodes in self._episodes.values():
            episodes.hear()

    def episodes_to_write(self) -> list[int]:
        """The episodes that wait until their record is written down (`episodes_written`)."""
        return [packed for episodes in self._episodes.values() for packed in episodes.take_urgent()]

    def episodes_written(self, ids: Sequence[int]) -> None:
        for episodes in self._episodes.values():
            episodes.written(ids)

    @accounted("rollout")
    def step(self) -> list[tuple[Call, Batch]]:
        """Decode one token of everything that runs; the rows that leave now, by call."""
        for role, generator in self._generators.items():
            if role not in self._rollout:
                generator.step()
            elif generator.num_unfinished:
                engine = self._rollout[role]
                start, num_running = now_ns(), engine.num_unfinished
                stepped = generator.step()
                end = now_ns()
                if generator is engine:
                    self._checks[role].made(stepped, self._most_tokens)
                finished = self._guests.keep(stepped)
                self._check_left(role, generator, finished)
                if isinstance(generator, Episodes):
                    start, num_running = generator.stepped
                if num_running:
                    self._sample_spans.stepped(role, start, end, num_running, engine.version)
                is_waiting = not (finished or any(one.num_unfinished for one in self._rollout.values()))
                self._waits_for_agents(end if is_waiting and num_running else start, is_waiting=is_waiting)
                self._finished += [(generated, end) for generated in finished]
                self._draining.left(role, generator, end, num_ended=len(finished))
        is_last = len(self._finished) == len(self._inflight) and not len(self._guests)
        if is_last:
            self._sample_spans.flush()
        if not self._finished or not (is_last or now_ns() - self._left_ns >= self._gather_ns):
            return []
        self._left_ns = now_ns()
        by_call: dict[int, list[tuple[Generated, int]]] = {}
        for generated, end in self._finished:
            by_call.setdefault(self._inflight[generated.id].call.ordinal, []).append((generated, end))
        self._finished = []
        return [self._rows(finished) for finished in by_call.values()]

    def _window_of(self, role: str, packed: int) -> tuple[int, int]:
        """The versions of a role's weights that a sample's tokens may be of; who asks for a turn from elsewhere knows that itself."""
        inflight = self._inflight.get(packed)
        return (0, ANY_VERSION) if inflight is None else window(inflight.call, role)

    def _most_tokens(self, packed: int) -> int:
        """Tokens that a sample may be given; who asks for a turn from elsewhere knows that itself."""
        sampling = inflight.drawn.options["sampling"] if (inflight := self._inflight.get(packed)) else None
        return sampling.max_new_tokens if isinstance(sampling, Sampling) else sys.maxsize

    def _check_left(self, role: str, generator: RolloutEngine | Episodes, finished: Sequence[Generated]) -> None:
        is_idle = not generator.num_unfinished
        if finished or is_idle:
            done = {generated.id for generated, _ in self._finished}
            ids = self._inflight if is_idle else [generated.id for generated in finished]
            running = {one for one in ids if one in self._inflight and self._inflight[one].call.role == role and one not in done}
            self._checks[role].ids([generated.id for generated in finished], running, is_idle=is_idle)

    def _waits_for_agents(self, at_ns: int, *, is_waiting: bool) -> None:
        """Record the time in which an engine had nothing to do but to wait for agents and their tools, as few spans."""
        if is_waiting:
            if not self._tool_wait_ns:
                is_away = any(speaker.num_unfinished for speaker in self._elsewhere.values())
                self._tool_wait_ns, self._waits_for = at_ns, FOR_SPEAKERS if is_away else FOR_AGENTS
        elif self._tool_wait_ns:
            cause = "tool" if self._waits_for == FOR_AGENTS else "speakers"
            self._recorder.waited(cause, self._tool_wait_ns, at_ns, label=self._waits_for)
            self._tool_wait_ns = 0

    def abort(self, call: int) -> dict[int, int]:
        """Give up what generates for a call; how many tokens each sample had by then, of those that had some."""
        ids = self._inflight_for(call)
        gone = self._stopped(ids)
        had = {generated.id: generated.num_sampled for generated in gone}
        had |= {generated.id: generated.num_sampled for generated, _ in self._finished if self._inflight[generated.id].call.ordinal == call}
        for packed in ids:
            gone_now = self._leave(packed, num := had.get(packed, 0))
            version = self._engine(self._rollout, gone_now.call.role).version
            self._sample_spans.given_up(call, packed, gone_now.start_ns, num, version, had=gone_now.had, waited_us=gone_now.waited_us)
        self._finished = [(generated, end) for generated, end in self._finished if generated.id in self._inflight]
        return {packed: count for packed, count in had.items() if count}

    def _stopped(self, ids: Sequence[int]) -> list[Generated]:
        """Abort these samples in their engines and return what they have."""
        found = []
        for role, generator in self._generators.items():
            gone = generator.abort(ids)
            if role in self._rollout:
                self._draining.left(role, generator, now_ns(), num_stopped=len(gone))
            found += gone
        return found

    def _leave(self, packed: int, num_tokens: int) -> InflightSample:
        """Remove a sample that has left its engine with `num_tokens` tokens."""
        inflight = self._inflight.pop(packed)
        self._had -= inflight.had
        self._num_left += num_tokens - inflight.had
        return inflight

    def is_inflight(self, packed: int, call: int) -> bool:
        """Whether a sample is generated here for this call, has not finished, and can be stopped."""
        inflight = self._inflight.get(packed)
        is_here = inflight is not None and inflight.call.ordinal == call
        if any(episodes.is_held(packed) for episodes in self._episodes.values()):
            return False
        return is_here and all(generated.id != packed for generated, _ in self._finished)

    def is_queued(self, packed: int) -> bool:
        """Whether an episode waits for the engine: it has not begun, or has asked for a turn that the engine has not been given."""
        return any(episodes.is_queued(packed) for episodes in self._episodes.values())

    def queued(self) -> Iterator[Queued]:
        """The episodes that wait for each engine here, where some do."""
        for role, episodes in self._episodes.items():
            if role in self._rollout and (waiting := episodes.queued()):
                columns = [list(column) for column in zip(*waiting, strict=True)]
                columns.append([episodes.waited_us(one.episode) for one in waiting])
                yield Queued(role, self._settings["rollout"].max_running, episodes.turn_tokens, episodes.kv_capacity, *columns)

    def interrupt(self, ids: Iterable[int]) -> Batch:
        """Stop these samples, if they have not finished; the rows of those that have tokens, to `resume` from. All have prompts alike."""
        is_done = {generated.id for generated, _ in self._finished}
        wanted = [packed for packed in ids if packed in self._inflight and packed not in is_done]
        stopped = self._stopped(wanted)
        for generated in stopped:
            if not generated.num_sampled:
                self._leave(generated.id, 0)
        begun = [(generated, now_ns()) for generated in stopped if generated.num_sampled]
        return self._rows(begun)[1] if begun else Batch.concat([])

    def finished_for(self, call: int) -> Batch:
        """The samples of a call that have finished and not left; they leave now."""
        left = [(generated, end) for generated, end in self._finished if self._inflight[generated.id].call.ordinal == call]
        self._finished = [(generated, end) for generated, end in self._finished if self._inflight[generated.id].call.ordinal != call]
        return self._rows(left)[1] if left else Batch.concat([])

    def _inflight_for(self, call: int) -> list[int]:
        return [packed for packed, inflight in self._inflight.items() if inflight.call.ordinal == call]

    def stop(self, call: int) -> tuple[Batch, Batch]:
        """Stop what generates for a call: the rows of samples that have finished by now, and of those that can go on."""
        return self.finished_for(call), self.interrupt(self._inflight_for(call))

    def progress(self) -> dict[int, int]:
        """Tokens so far of each sample that generates."""
        of_roles = [dict(engine.progress()) for engine in self._generators.values()]
        found = of_roles[0] if len(of_roles) == 1 else {packed: count for of in of_roles for packed, count in of.items()}
        return {packed: count for packed, count in found.items() if packed not in self._guests} if len(self._guests) else found

    def gauges(self) -> Iterator[tuple[str, Occupancy, int]]:
        """Each role that can generate, how full its engine is, and the version of its weights; after the end, none."""
        engines = {} if self._is_closed else self._rollout
        for role, engine in engines.items():
            found = engine.occupancy()
            if role in self._episodes:  # Most of its turns wait before the engine.
                found = found._replace(num_queued=self._episodes[role].occupancy().num_queued)
            yield role, found, engine.version

    def num_silent(self) -> dict[str, int]:
        """For each role that has episodes, of how many nothing has been known for long."""
        return {role: episodes.num_silent for role, episodes in self._episodes.items()}

    def occupancy(self) -> dict[str, tuple[Occupancy, dict[int, int]]]:
        """Return, for each role that generates, how full its engine is, and the tokens so far of each sample there."""
        return {
            role: (engine.occupancy(), {packed: count for packed, count in engine.progress().items() if packed not in self._guests})
            for role, engine in self._generators.items()
            if engine.num_unfinished and role in self._rollout
        }

    def snapshot(self, ids: Iterable[int]) -> list[tuple[Call, Batch]]:
        """The rows of these samples as they are by now, by call. They go on; what has finished is passed over."""
        by_call: dict[int, list[Generated]] = {}
        ids = list(ids)
        for generated in [generated for engine in self._generators.values() for generated in engine.snapshot(ids)]:
            if generated.segments and not (generated.num_sampled or _has_own_tools(generated)):
                continue  # An episode before its first word is begun anew.
            by_call.setdefault(self._inflight[generated.id].call.ordinal, []).append(generated)
        inflight = {generated.id: self._inflight[generated.id] for of in by_call.values() for generated in of}
        return [(inflight[of[0].id].call, rows_of(of, [inflight[generated.id] for generated in of])) for of in by_call.values()]

    def tokens(self) -> tuple[int, dict[int, int]]:
        """Tokens generated here in all; and how many each sample has that grows here or waits to leave."""
        counts = self.progress()
        self._sample_spans.seen(counts)
        if self._finished:
            counts |= {generated.id: generated.num_sampled for generated, _ in self._finished}
        return self._num_left + sum(counts.values()) - self._had, counts

    def _rows(self, finished: list[tuple[Generated, int]]) -> tuple[Call, Batch]:
        generated = [g for g, _ in finished]
        inflight = [self._leave(g.id, g.num_sampled) for g in generated]
        call = inflight[0].call
        rows = rows_of(generated, inflight)
        for (g, end), s in zip(finished, inflight, strict=True):
            self._sample_spans.ended(call.ordinal, s.start_ns, end, g, had=s.had, waited_us=s.waited_us)
        return call, rows

    # Functions

    @accounted("train")
    def run_call(
        self,
        call: Call,
        inputs: Mapping[str, Batch],
        values: Mapping[str, object],
        leave: Leave | None = None,
        meanwhile: Callable[[], None] | None = None,
        *,
        is_suspect: bool = False,
        begun: BegunCall | None = None,
        may_follow: bool = False,
    ) -> Batch | object:
        """A function's rows, or its value if it gives one for all; a model's log-probabilities.

        Args:
            inputs: rows by the input's name, in the call's order.
            values: the inputs that are whole values.
            leave: is given rows before the end, if that takes long: the samples that they came from, and they. They are not among
                those that are returned.
            meanwhile: is called when a user's function has begun, and runs on a thread of its own; of others before they begin.
            is_suspect: a worker was lost while it ran this function, which runs in processes of its own now, if it may.
            begun: the call itself, if its function runs already (`Functions.begun_ahead`).
            may_follow: whether `meanwhile` may name a call that follows at once (`Functions.look_ahead`).
        """
        if call.engine == "train":
            samples = inputs["samples"].in_order()
            ids = samples.ids.tolist()
            with self._recorder.span(SpanName.TRAIN_LOGPROBS, **call_semantics.span_attributes(call), num_samples=len(ids), samples=ids):
                engine = self._engine(self._train, call.role)
                if isinstance(top_k := call.options.get("top_k"), int):
                    return engine.top_logprobs(samples, top_k)
                return {"logprobs": engine.logprobs, "values": engine.values, "score": engine.scores}[call.method](samples)
        if self._functions is None:
            raise InternalError(f"{call.name} came to a process without a function engine")
        return self._functions.run_call(call, inputs, values, leave, meanwhile, is_suspect=is_suspect, begun=begun, may_follow=may_follow)

    @property
    def functions(self) -> Functions | None:
        """What runs users' functions here; None: nothing does."""
        return self._functions

    # Training

    def num_training_tokens(self, call: Call, samples: Batch) -> list[int]:
        return [int(n) for n in self._engine(self._train, call.role).num_training_tokens(samples)]

    @accounted("train")
    def accumulate(self, call: Call, rows: Batch, *, epoch: int) -> None:
        """Add up the gradient of one micro-batch (`update_semantics.training_rows`)."""
        tally = self._tallies.setdefault(call.ordinal, update_semantics.UpdateTally())
        rows = update_semantics.with_version_ages(call, rows)
        rows = rows if tally.is_stepped else update_semantics.with_same_weights(call, rows)
        self._logprob_check.notice(call.role, rows, is_sampled_here=call.role in self._rollout)
        ids = rows.ids.tolist()
        with self._recorder.span(
            SpanName.TRAIN_ACCUMULATE, **call_semantics.span_attributes(call), num_samples=len(ids), samples=ids
        ) as span:
            objective = update_semantics.objective(call)
            try:
                engine = self._engine(self._train, call.role)
                sums = self._minibatches.of(call.ordinal, engine, self._settings["train"]).accumulate(rows, objective)
            except M2FlowError:
                raise
            except Exception as error:
                if not is_of_user(error):
                    raise
                raise OpError(f"the loss {objective.loss.name} raised {error!r}", remote=traceback.format_exc()) from error
            span.set(num_tokens=sums.num_context_tokens)
            if sums.num_shared_tokens:
                self._num_shared += sums.num_shared_tokens
                self._recorder.count(SHARED_TOKENS, self._num_shared)
        tally.add(sums, rows, epoch=epoch)

    @accounted("train")
    def apply(self, call: Call, *, is_last: bool) -> dict[str, float]:
        """One optimiser step, unless a mini-batch of episodes has no token to train on: its version then has the weights of the one before.
        Returns its loss; after the last of a call the call's metrics."""
        tally = self._tallies.setdefault(call.ordinal, update_semantics.UpdateTally())
        update_semantics.check_agreement(call, tally, self._stop_above)
        with self._recorder.span(SpanName.TRAIN_APPLY, **call_semantics.span_attributes(call), version=call.writes[0].version):
            engine = self._engine(self._train, call.role)
            if tally.is_to_skip:
                engine.discard()
                tally.skipped()
            else:
                denominator = tally.denominator(update_semantics.objective(call).loss)
                tally.stepped(engine.apply(update_semantics.optimizer(call), denominator), denominator)
        self._recorder.count(f"loss, {call.role}", float(tally.last_loss))
        halved = self._minibatches.stepped(call.ordinal, is_last=is_last)
        if not is_last:
            return {"loss": tally.last_loss}
        self._logprob_check.updated(call.role, call.writes[0].version, self._engine(self._train, call.role))
        return self._tallies.pop(call.ordinal).metrics() | halved

    def give_up(self, call: Call) -> None:
        """Drop an update's gradient."""
        self._minibatches.stepped(call.ordinal, is_last=True)
        if self._tallies.pop(call.ordinal, None) is not None:
            self._engine(self._train, call.role).discard()

    # Weights

    def copy_weights(self, call: Call) -> None:
        """A reference takes the weights that its policy has now, or a share of them; a critic its body, and keeps a head of its own. A
        policy that has left the device for their turn comes back for as long, if its engine can't give them from where they are."""
        source = str(call.options["source"])
        taking, giving = self._engine(self._train, call.role), self._engine(self._train, source)
        slot = self._slot("train", source)
        is_away = self._takes_turns and slot.takes_turn != self._turn and not slot.stays
        comes_back = is_away and not giving.capabilities.readable_offloaded
        if comes_back:
            onload(self._recorder, slot, giving)
        match call.options.get("share"):
            case float(share):
                taking.copy_from(giving, share)
            case _:
                taking.copy_from(giving)
        if comes_back:
            offload(self._recorder, slot, giving)

    def publish(self, role: str, version: int) -> Manifest:
        """Publish a role's trained weights."""
        manifest = self._weight_syncs.publish(role, version, self._engine(self._train, role))
        return msgspec.structs.replace(manifest, probe=self._logprob_check.probe(role, version))

    @accounted("switch")
    def load_weights(
        self, role: str, version: int, manifest: Manifest | None, *, under_requests: bool = False, between_turns: bool = False
    ) -> None:
        """Take a role's weights into its rollout engine, and check that they are the same, tensor by tensor, and compute the same.

        Args:
            manifest: of those that were published; None: from the trainer of this process.
            under_requests: what runs goes on with them, if its call may use them.
            between_turns: whether an episode may run, of which the engine has no turn now.
        """
        engine = self._engine(self._rollout, role)
        if not under_requests:
            self._guests.send_away("its engine gets other weights", role)
        is_spoken_to = role in self._episodes and self._episodes[role].num_unfinished > 0
        is_heard = is_spoken_to or any(episodes.lets_speak(role) for episodes in self._episodes.values())
        if is_heard and not under_requests and not between_turns:
            raise InternalError(f"weights of {role} were to change between two turns of an episode")
        for call in {
            inflight.call.ordinal: inflight.call for inflight in self._inflight.values() if role in inflight.call.speakers
        }.values():
            check_admission(call, version, role)
        if manifest is None:
            self._weight_syncs.copy(role, version, self._engine(self._train, role), engine, under_requests=under_requests)
        else:
            self._weight_syncs.load(role, version, manifest, engine, under_requests=under_requests)
        self._cache_lost(role)
        self._logprob_check.check_probe(role, self._logprob_check.probe(role, version) if manifest is None else manifest.probe, engine)

    def keep_weights(self, role: str) -> list[tuple[str, Weight]]:
        """A copy of a role's trained weights as they are now, in the type that its rollout engines hold."""
        return self._weight_syncs.kept(role, self._engine(self._train, role))

    def load_kept(self, role: str, version: int, kept: Iterable[tuple[str, Weight]], *, under_requests: bool = False) -> None:
        """Take weights that `keep_weights` gave into the role's rollout engine."""
        self._weight_syncs.take(role, version, kept, self._engine(self._rollout, role), under_requests=under_requests)
        self._cache_lost(role)

    def _cache_lost(self, role: str) -> None:
        if role in self._episodes:
            self._episodes[role].cache_lost()

    @accounted("switch")
    def switch(self, to: str) -> None:
        """Switch turns: offload the engines of this turn, onload those of the other."""
        for slot, _ in self._of_turn(self._turn):
            if slot.kind == "rollout":
                self._draining.over(slot.role)
                self._guests.send_away("its engine leaves its devices", slot.role)
                self._cache_lost(slot.role)
        with self._recorder.span(SpanName.SWITCH, label=f"to {to}"):
            for slot, engine in self._of_turn(self._turn):
                offload(self._recorder, slot, engine)
            for slot, engine in self._of_turn(to):
                onload(self._recorder, slot, engine)
        self._turn = to

    def shrink_kv_cache(self) -> None:
        """Give back what the rollout engines' caches have beyond what runs: what is next comes to the devices."""
        for slot in self._slots:
            if slot.kind == "rollout":
                shrink_kv_cache(self._recorder, slot, self._rollout[slot.role])
                self._cache_lost(slot.role)

    def _of_turn(self, turn: str) -> Iterator[tuple[EngineSlot, Engine]]:
        for slot in self._slots:
            if slot.kind != "function" and slot.takes_turn == turn:
                yield slot, self._engine(self._rollout, slot.role) if slot.kind == "rollout" else self._engine(self._train, slot.role)

    def _slot(self, kind: str, role: str) -> EngineSlot:
        return next(slot for slot in self._slots if (slot.kind, slot.role) == (kind, role))

    def save_behind(self, role: str, path: str, step: int) -> str | None:
        """Copy a role's model, and write it as a part of the checkpoint of a step while the engines go on (`parts`). Of a trainer that
        can't copy it is written at once: the digest of its weights."""
        with self._recorder.span(SpanName.TRAIN_SAVE, label=role):
            held = self._train[role].held_checkpoint(path)
        if held is None:
            return self.save(role, path, seals=True)

        def write() -> str:
            held.write()
            return _digest(held.weights())

        self.parts.begin(step, role, path, write)
        return None

    def save(self, role: str, path: str, *, seals: bool = False) -> str:
        """Write a role's model, and give the digest of its weights. With `seals`, as a part of a checkpoint."""
        self.parts.drain()
        if role in self._train:
            with self._recorder.span(SpanName.TRAIN_SAVE, label=role):
                self._train[role].save(path)
                if seals:
                    seal(path)
            return _digest(self._train[role].weights())
        return _digest(self._engine(self._rollout, role).weights())

    def _engines(self) -> Iterator[Engine]:
        yield from self._rollout.values()
        yield from dict.fromkeys(self._train.values())
        if self._functions is not None:
            yield self._functions.engine

    def held(self) -> dict[str, Memory]:
        """Return what each engine holds of its device."""
        found = {f"{role} rollout": engine.memory() for role, engine in self._rollout.items()}
        roles: dict[TrainEngine, list[str]] = {}
        for role, engine in self._train.items():
            roles.setdefault(engine, []).append(role)
        return found | {f"{' and '.join(names)} train": engine.memory() for engine, names in roles.items()}

    def _engine(self, engines: Mapping[str, E], role: str) -> E:
        if role not in engines:
            raise InternalError(f"no engine of {role} is in this process; it has {', '.join(engines) or 'none'}")
        return engines[role]


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    return digest((name, weight) for name, weight in to_wire(tensors) if not isinstance(weight, Tied))


SHARED_TOKENS = "tokens shared in training"
"""Counter of the tokens in training that went through a model once for several samples, since these begin alike; but for the first."""
PEAKS = {"host": "peak memory bytes", "GPU": "peak gpu memory bytes"}
"""Counters of the most that a process has taken so far, by where."""
_STEP_BYTES = 1 << 20
"""They are recorded in steps, so that a growing process does not fill the trace with them."""


@final
class Gauges:
    """Record counters of one worker's engines, channels and memory, when they change."""

    def __init__(self, recorder: Recorder, engine_host: EngineHost) -> None:
        self._recorder = recorder
        self._engine_host = engine_host
        self._channels = ChannelCounts(recorder)
        self._said: dict[str, float] = {}
        """Counter -> its last value."""
        self._num_tokens = 0
        self._at_ns = now_ns()

    def record(self, channels: Mapping[str, Statistics]) -> None:
        """Record the counters that have changed since the last call."""
        self._channels.record(channels)
        at_ns = now_ns()
        has_engines = False
        for role, occupancy, version in self._engine_host.gauges():
            has_engines = True
            self._say(f"running, {role}", occupancy.num_running, at_ns)
            self._say(f"waiting, {role}", occupancy.num_queued, at_ns)
            if occupancy.kv_capacity:
                self._say(f"kv tokens, {role}", occupancy.kv_used, at_ns)
                self._say(f"kv capacity, {role}", occupancy.kv_capacity, at_ns)
            if occupancy.num_put_back:
                self._say(f"put back for want of memory, {role}", occupancy.num_put_back, at_ns)
            if occupancy.num_cached:
                self._say(f"tokens found in the cache, {role}", occupancy.num_cached, at_ns)
            self._say(f"version, {role}", version, at_ns)
        for role, num_silent in self._engine_host.num_silent().items():
            if num_silent or f"silent episodes, {role}" in self._said:
                self._say(f"silent episodes, {role}", num_silent, at_ns)
        peak, of = peak_bytes()
        self._say(PEAKS[of], -(-peak // _STEP_BYTES) * _STEP_BYTES, at_ns)
        if has_engines:
            num_tokens, _ = self._engine_host.tokens()
            passed_s = max(at_ns - self._at_ns, 1) / 1e9
            self._say("tokens/s", round((num_tokens - self._num_tokens) / passed_s, 1), at_ns)
            self._say("generated tokens", num_tokens, at_ns)
            self._num_tokens, self._at_ns = num_tokens, at_ns

    def _say(self, name: str, value: float, at_ns: int) -> None:
        if self._said.get(name) != value:
            self._said[name] = value
            self._recorder.count(name, value, at_ns)
