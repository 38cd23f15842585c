"""Sync weights from a process's trainers into its rollout engines, over the plan's transport, with checks of what arrived.

Checksums. After each load the checksum of every tensor that the engine then holds is compared with what the trainer published, before a
token is sampled. Tensors that an engine does not list under the published name, type and shape (fused, or converted by itself) are
compared on arrival instead. The first load compares everything on arrival as well: until then it is not known what an engine lists.

LoRA base (`LoraBaseCheck`). Where only adapters are sent, both sides load the base model from files. The sum is right only if the base is
the same, so its checksums are compared before the first adapters are added:

    trainer.base() --checksums, once--> Manifest.base --with every version--> rollout.base()

Log-probabilities (`LogprobCheck`). Checksums say that tensors arrived whole, under their names, not that both engines compute the same
function of them: that an engine with names, fusions or a process of its own (a server) put each where it belongs. The first weights that
an engine takes are probed, or all of them if the spec says so:

    samples of an update --trainer, after it--> Probe --with the weights--> `RolloutEngine.logprobs` --compared--> goes on, or stops the run

Only sequences of token ids can be compared: an update on texts brings no probe, the next one may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import msgspec
import numpy as np

from m2flow.channels.weights import TRANSPORTS, Manifest, Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.payload import (
    Probe,
    TensorChecksum,
    TensorEntry,
    array_checksums,
    compare_checksums,
    listed,
    tensor_checksums,
)
from m2flow.channels.weights.tensors import RawBits, Tied, Weight, from_wire, mark_tied, to_wire
from m2flow.channels.zeromq import Keys
from m2flow.engines.contract import RolloutEngine, TrainEngine, agreement_of
from m2flow.errors import ChannelError, EngineError
from m2flow.micro.protocol.plan import WeightSyncPlan
from m2flow.micro.worker.rank_group import RankGroupTrain
from m2flow.observe.spans import Recorder, SpanName
from m2flow.recipe import Model
from m2flow.samples import Batch, Ragged, first_sequences
from m2flow.spec import WeightsSpec


@final
class LoraBaseCheck:
    """Compare the base weights of trainers and rollout engines that exchange only adapters; one for each process."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[TensorEntry, ...]] = {}
        self._compared: set[str] = set()

    def with_base(self, role: str, manifest: Manifest, engine: TrainEngine) -> Manifest:
        """Add the checksums of the base weights to a publication of a role's adapters."""
        if role not in self._entries:
            found = tensor_checksums(engine.base())
            self._entries[role] = tuple(TensorEntry(one.name, one.dtype, one.shape, 0, one.checksum) for one in found)
        return msgspec.structs.replace(manifest, base=self._entries[role])

    def check(self, role: str, manifest: Manifest, engine: RolloutEngine) -> None:
        """Check an engine's base weights before the first adapters are added. Raises EngineError: they differ."""
        if role in self._compared:
            return
        wrong, missing = compare_checksums(manifest.base, tensor_checksums(engine.base()))
        if wrong or missing:
            raise EngineError(
                f"the weights beside the adapters of {role} differ between trainer and rollout: {listed(sorted({*wrong, *missing}))}",
                now="Do both hosts have the same files of the model? `weights: {adapters: added}` in the cluster spec sends whole weights.",
            )
        self._compared.add(role)


NUM_SEQUENCES = 4
MAX_TOKENS = 64
"""Tokens of each sequence, so that a probe costs an update less than a micro-batch does."""
TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}
"""Mean absolute difference of a token's log-probability, in nats, by the coarsest type that weights or passes have. Between PyTorch's own
kernels it is a hundredth of that in float32 and a tenth in bfloat16; of a model whose layers are exchanged, a nat or more."""


class Checks(msgspec.Struct, frozen=True):
    """What is checked of weights and log-probabilities, as the cluster spec says."""

    probe: str = "first"
    """`first`, `always` or `never`."""
    tolerance: float | None = None
    """Tolerance of a probe; None: by type (`TOLERANCE`)."""
    stop_above: float | None = None
    """Mean difference in an update above which the run ends."""


@final
class LogprobCheck:
    """Check that the engines of one process that loaded weights give the log-probabilities of the trainer that made them.

    Args:
        published: roles whose trained weights other processes load.
        compute_dtype: what a trainer here computes its passes in, if that is not its model's own type.
    """

    def __init__(
        self, models: Mapping[str, Model], checks: Checks, recorder: Recorder, *, published: frozenset[str], compute_dtype: str = ""
    ) -> None:
        self._models = models
        self._checks = checks
        self._recorder = recorder
        self._published = published
        self._compute_dtype = compute_dtype
        self._sequences: dict[str, Batch] = {}
        self._probes: dict[str, Probe] = {}
        self._checked: set[str] = set()

    def notice(self, role: str, rows: Batch, *, is_sampled_here: bool) -> None:
        """Note the first sequences of an update's rows, for a probe of the weights that the update makes, if one is due."""
        is_wanted = role in self._published or (is_sampled_here and self._is_due(role))
        if self._checks.probe == "never" or not is_wanted or "tokens" not in rows:
            return
        part = rows.take(np.flatnonzero(rows.ragged("tokens").lengths > 1)[:NUM_SEQUENCES])  # An episode without a turn has no token.
        if not len(part):
            return
        tokens = first_sequences(part, MAX_TOKENS)
        columns = {"tokens": Ragged.of(tokens, np.int32), "loss_mask": Ragged.of([np.arange(len(row)) > 0 for row in tokens], np.bool_)}
        self._sequences[role] = Batch(part.ids, columns)

    def updated(self, role: str, version: int, engine: TrainEngine) -> None:
        """Make the probe of a new version: the trainer's log-probabilities of the noted sequences. Its weights must be on the device."""
        self._probes.pop(role, None)
        batch = self._sequences.pop(role, None)
        if batch is None:
            return
        with self._recorder.span(SpanName.TRAIN_PROBE, version=version, label=role, num_samples=len(batch)):
            said = engine.logprobs(batch).ragged("reference_logprobs")
        tokens = batch.ragged("tokens")
        sequences = [tokens.row(row).tolist() for row in range(len(batch))]
        logprobs = [said.row(row)[1:].tolist() for row in range(len(batch))]
        self._probes[role] = Probe(version, sequences, logprobs, self._tolerance(role))

    def probe(self, role: str, version: int) -> Probe | None:
        """Return the probe that is sent with the weights of this version."""
        found = self._probes.get(role)
        return found if found is not None and found.version == version else None

    def check_probe(self, role: str, probe: Probe | None, engine: RolloutEngine) -> None:
        """Compare the log-probabilities of an engine that has loaded weights with those of their probe.

        Raises:
            EngineError: they differ by more than the tolerance; with the tokens that differ most.
        """
        if probe is None or not self._is_due(role) or not engine.capabilities.probes:
            return
        with self._recorder.span(SpanName.ROLLOUT_PROBE, version=probe.version, label=role, num_samples=len(probe.tokens)) as span:
            said = [row.tolist() for row in engine.logprobs(probe.tokens)]
            found = agreement_of(list(chain(*probe.logprobs)), list(chain(*said)))
            span.set(num_tokens=found.num_tokens, mean=round(found.mean, 9), largest=round(found.largest, 9))
        if not found.mean <= probe.tolerance:
            raise EngineError(
                f"trainer and rollout do not compute the same with the weights of {role}@{probe.version}: over {found.num_tokens} tokens "
                f"their log-probabilities differ by {found.mean:.3g} on average, {found.largest:.3g} at most; {probe.tolerance:g} is "
                f"allowed. {_worst(probe, said)}",
                now="The bytes came whole, by their checksums. Does the rollout engine have the model's architecture, layout and type? "
                "`weights: {probe_tolerance: ...}` in the cluster spec allows more, docs/internals/weights.md says what to look at.",
            )
        self._checked.add(role)

    def _is_due(self, role: str) -> bool:
        return self._checks.probe == "always" or (self._checks.probe == "first" and role not in self._checked)

    def _tolerance(self, role: str) -> float:
        if self._checks.tolerance is not None:
            return self._checks.tolerance
        model = self._models[role]
        types = (model.dtype, model.rollout_dtype or model.dtype, self._compute_dtype or model.dtype)
        return max(TOLERANCE.get(name, TOLERANCE["float32"]) for name in types)


def _worst(probe: Probe, said: list[list[float]]) -> str:
    """Describe the tokens that differ most."""
    gaps = [
        (abs(ours - theirs), row, position, ours, theirs)
        for row, pair in enumerate(zip(probe.logprobs, said, strict=True))
        for position, (ours, theirs) in enumerate(zip(*pair, strict=True), start=1)
    ]
    worst = sorted(gaps, key=lambda gap: (-gap[0], gap[1:3]))[:3]
    named = (
        f"token {probe.tokens[row][position]} at position {position} of sequence {row}: trainer {ours:.4f}, rollout {theirs:.4f}"
        for _, row, position, ours, theirs in worst
    )
    return "Most: " + "; ".join(named)


SHARED_MEMORY = "shared memory"


class WeightSettings(msgspec.Struct, frozen=True):
    """What a worker needs to know of the plan's weight syncs."""

    loads: dict[str, str] = {}
    """Role -> the transport that its rollout engine here loads by."""
    publishes: dict[str, tuple[str, ...]] = {}
    """Role -> the transports that others load its trained weights by."""
    num_receivers: dict[str, int] = {}
    """Role -> number of engines of other workers that load its trained weights."""
    adapters_only: frozenset[str] = frozenset()
    """Roles of which only the adapters are published, without the base weights."""
    directory: str = ""
    host: str = "127.0.0.1"
    keys: Keys | None = None
    changes: str = "auto"
    bucket_bytes: int = 16 << 20
    checks: Checks = Checks()
    into_server: str = "auto"
    """How weights are passed on to an engine's server process."""

    def with_keys(self, keys: Keys | None) -> WeightSettings:
        """Return the same settings with the cluster's key."""
        return msgspec.structs.replace(self, keys=keys)


def weight_settings(worker: str, syncs: Sequence[WeightSyncPlan], spec: WeightsSpec, directory: str) -> WeightSettings:
    """Make the settings of one worker of a plan."""
    publishes: dict[str, tuple[str, ...]] = {}
    for sync in syncs:
        if sync.source == worker and sync.target != worker:
            publishes[sync.role] = tuple(dict.fromkeys((*publishes.get(sync.role, ()), sync.transport)))
    return WeightSettings(
        loads={sync.role: sync.transport for sync in syncs if sync.target == worker},
        publishes=publishes,
        num_receivers={role: sum(s.source == worker != s.target and s.role == role for s in syncs) for role in publishes},
        adapters_only=frozenset(s.role for s in syncs if s.source == worker and s.sends == "adapters"),
        directory=directory,
        host=spec.host,
        changes=spec.changes,
        bucket_bytes=spec.bucket_mib << 20,
        checks=checks_of(spec),
        into_server=spec.into_server,
    )


def checks_of(spec: WeightsSpec) -> Checks:
    return Checks(spec.probe, spec.probe_tolerance, spec.stop_above)


class _Loading(NamedTuple):
    """What a publication replaces in a rollout engine, whole weights or adapters: how to load it, and how to list what is held."""

    what: str
    load: Callable[..., None]
    held: Callable[[], Iterator[tuple[str, Any]]]


@final
class WeightSyncs:
    """Publish and load every role's weights in one process. Segments and files are named by `prefix`."""

    def __init__(self, worker: str, prefix: str, models: Mapping[str, Model], settings: WeightSettings, recorder: Recorder) -> None:
        self._worker = worker
        self._prefix = prefix
        self._models = models
        self._settings = settings
        self._recorder = recorder
        self._publishers: dict[str, Publisher] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._unlisted: dict[str, frozenset[str]] = {}
        """Role -> tensors that its engine does not list as they are published; absent before its first load."""
        self._base = LoraBaseCheck()
        self._held: dict[str, int] = {}
        """Role -> the published version that its engine was found to hold."""

    def publish(self, role: str, version: int, engine: TrainEngine) -> Manifest:
        """Publish a role's trained weights."""
        with self._recorder.span(SpanName.WEIGHTS_PUBLISH, version=version, label=role) as span:
            start = time.monotonic()
            publisher = self._publishers.get(role)
            if publisher is None:
                publisher = self._publishers[role] = Publisher(f"{self._prefix}-{role}", self._options(role))
            is_adapters_only = role in self._settings.adapters_only
            if is_adapters_only:
                manifest = publisher.publish(engine.adapters(), version)
            else:
                spread = engine.spread(self._settings.bucket_bytes) if isinstance(engine, RankGroupTrain) else None
                manifest = publisher.publish(mark_tied(engine.weights()), version, self._rollout_dtype(role), spread)
            span.set(sends="adapters" if is_adapters_only else "weights")
            last = publisher.last
            span.set(num_bytes=last.num_bytes, transport=", ".join(last.sent), gb_per_s=_rate(last.num_bytes, start))
            if last.why:
                span.set(how=last.why)
            if last.written:
                span.set(rank_bytes=list(last.written))
            if last.share_changed >= 0:
                span.set(share_changed=round(last.share_changed, 6))
            return self._base.with_base(role, manifest, engine) if is_adapters_only else manifest

    def load(self, role: str, version: int, manifest: Manifest, engine: RolloutEngine, *, under_requests: bool = False) -> None:
        """Load published weights into a rollout engine, and compare what it then holds.

        Raises:
            ChannelError: they were damaged on their way. EngineError: the engine holds something else than was published.
        """
        subscriber = self._subscribers.get(role)
        if subscriber is None:
            known = self._settings
            subscriber = Subscriber(self._worker, directory=known.directory, bucket_bytes=known.bucket_bytes, keys=known.keys)
            self._subscribers[role] = subscriber
        unlisted, transport = self._unlisted.get(role), self._settings.loads.get(role, SHARED_MEMORY)
        is_listed = unlisted is not None and not unlisted
        with self._recorder.span(SpanName.WEIGHTS_LOAD, version=version, label=role) as span:
            start = time.monotonic()
            loading = self._loading(role, manifest, engine)
            arriving = subscriber.tensors(
                manifest,
                transport,
                held_version=self._held.pop(role, -1),
                held=(lambda: _plain(to_wire(loading.held()))) if is_listed else None,
                verify=unlisted,
            )
            loading.load(from_wire(arriving, _first(engine)), version, under_requests=under_requests)
            wrong, self._unlisted[role] = _compared(manifest.tensors, loading.held())
            if wrong:
                is_in_place = TRANSPORTS[transport].is_in_place
                self._raise_for(role, wrong, transport, (lambda: subscriber.tensors(manifest, transport)) if is_in_place else None)
            self._held[role] = manifest.version
            span.set(sends=loading.what, num_bytes=subscriber.num_bytes, transport=transport, gb_per_s=_rate(subscriber.num_bytes, start))

    def _loading(self, role: str, manifest: Manifest, engine: RolloutEngine) -> _Loading:
        """Choose how an engine loads what was published. Raises EngineError: adapters of another base than the engine has."""
        if not manifest.base:
            return _Loading("weights", engine.load_weights, engine.weights)
        self._base.check(role, manifest, engine)
        return _Loading("adapters", engine.load_adapters, engine.adapters)

    def copy(self, role: str, version: int, trainer: TrainEngine, engine: RolloutEngine, *, under_requests: bool = False) -> None:
        """Load the weights of a trainer of this process into a rollout engine, tensor by tensor."""
        self.take(role, version, self.to_wire(role, trainer), engine, under_requests=under_requests)

    def take(
        self, role: str, version: int, tensors: Iterable[tuple[str, Weight | Tied]], engine: RolloutEngine, *, under_requests: bool = False
    ) -> None:
        """Load tensors of this process into a rollout engine, without a transport.

        Raises:
            EngineError: the engine then holds something else.
        """
        with self._recorder.span(SpanName.WEIGHTS_LOAD, version=version, label=role) as span:
            start = time.monotonic()
            entries: list[TensorEntry] = []
            sizes: list[int] = []
            passing = _noted(_plain(tensors), entries, sizes)
            engine.load_weights(from_wire(passing, _first(engine)), version, under_requests=under_requests)
            wrong, _ = _compared(entries, engine.weights())
            if wrong:
                self._raise_for(role, wrong, "same process", None)
            self._held.pop(role, None)
            span.set(num_bytes=sum(sizes), transport="same process", gb_per_s=_rate(sum(sizes), start))

    def to_wire(self, role: str, engine: TrainEngine) -> Iterator[tuple[str, Weight | Tied]]:
        """A trainer's weights in the type that the role's rollout engines hold, one at a time."""
        return to_wire(mark_tied(engine.weights()), self._rollout_dtype(role))

    def kept(self, role: str, engine: TrainEngine) -> list[tuple[str, Weight]]:
        """Copy a trainer's weights, in the type that the role's rollout engines hold; of tied tensors one."""
        return [(name, _copied(weight)) for name, weight in self.to_wire(role, engine) if not isinstance(weight, Tied)]

    def _rollout_dtype(self, role: str) -> str | None:
        model = self._models.get(role)
        return model.rollout_dtype if model is not None else None

    def close(self) -> None:
        """Withdraw what was published. May be called twice."""
        for publisher in self._publishers.values():
            publisher.close()
        for subscriber in self._subscribers.values():
            subscriber.close()

    def _options(self, role: str) -> WeightOptions:
        settings = self._settings
        return WeightOptions(
            transports=settings.publishes.get(role, (SHARED_MEMORY,)),
            directory=settings.directory,
            host=settings.host,
            keys=settings.keys,
            num_receivers=settings.num_receivers.get(role, 1),
            changes=settings.changes,  # type: ignore[arg-type]
            bucket_bytes=settings.bucket_bytes,
        )

    def _raise_for(self, role: str, wrong: list[str], transport: str, again: Callable[[], Iterable[object]] | None) -> None:
        """Raise for tensors that the engine holds wrongly; what is read in place can be read again, to tell whose fault it is."""
        what = f"the weights of {role} differ between trainer and rollout after a sync ({transport}): {listed(wrong)}"
        if again is not None:
            try:
                for _ in again():
                    pass
            except ChannelError as damaged:
                raise ChannelError(f"{what}; {damaged.what}", now=damaged.now) from None
            raise EngineError(f"{what}; they came whole, so the engine changed them", now="Does it load each tensor under its own name?")
        raise EngineError(what, now="They were damaged on their way, or the engine does not hold what it is given. Please report this run.")


def _compared(entries: Iterable[TensorEntry], held: Iterable[tuple[str, Any]]) -> tuple[list[str], frozenset[str]]:
    wrong, missing = compare_checksums(tuple(entries), tensor_checksums(held))
    return wrong, frozenset(missing)


def _noted(weights: Iterable[tuple[str, Weight]], entries: list[TensorEntry], sizes: list[int]) -> Iterator[tuple[str, Weight]]:
    """Pass weights on; append the checksum and the bytes of each."""
    for name, weight in weights:
        found: TensorChecksum = next(iter(array_checksums([(name, weight)])))
        entries.append(TensorEntry(name, found.dtype, found.shape, 0, found.checksum))
        sizes.append(entries[-1].num_bytes)
        yield name, weight


def _plain(tensors: Iterable[tuple[str, Weight | Tied]]) -> Iterator[tuple[str, Weight]]:
    """Leave out the further names of tied tensors: an engine that ties them takes one."""
    for name, weight in tensors:
        if not isinstance(weight, Tied):
            yield name, weight


def _copied(weight: Weight) -> Weight:
    return RawBits(weight.bits.copy(), weight.dtype) if isinstance(weight, RawBits) else weight.copy()


def _first(engine: RolloutEngine) -> Any:
    """One of the engine's own tensors."""
    return next((tensor for _, tensor in engine.weights()), None)


def _rate(num_bytes: int, start: float) -> float:
    return round(num_bytes / max(time.monotonic() - start, 1e-9) / 1e9, 4)
