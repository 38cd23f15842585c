"""Weights out of a process's trainers and into its rollout engines, over the transport that the plan names, and checked.

After each load the checksum of every tensor that the engine then holds is compared with what the trainer published, before a token is
sampled. Tensors that an engine does not list under the published name, type and shape (fused, or converted by itself) are compared on
arrival instead. The first load compares everything on arrival as well: until then nobody knows what an engine lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec

from m2flow.channels.keys import Keys
from m2flow.channels.weights import Manifest, Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.device import CudaMemory, DeviceWeights, DeviceWeightsReader
from m2flow.channels.weights.manifest import Seen, TensorEntry, differing, listed, seen
from m2flow.channels.weights.tensors import RawBits, Tied, Weight, once
from m2flow.channels.weights.torch_tensors import given, on_device, seen_tensors, travelling
from m2flow.engines.contract import RolloutEngine, TrainEngine
from m2flow.errors import ChannelError, EngineError
from m2flow.micro.plan import WeightSync
from m2flow.micro.work.proving import Checks
from m2flow.micro.work.same_base import SameBase
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanName
from m2flow.recipe import Model
from m2flow.spec import WeightsSpec

SHARED_MEMORY = "shared memory"
CUDA_IPC = "cuda ipc"


class WeightSettings(msgspec.Struct, frozen=True):
    """What a worker must know of the plan's weight syncs."""

    loads: dict[str, str] = {}
    """Role -> the transport that its rollout engine here loads by."""
    publishes: dict[str, tuple[str, ...]] = {}
    """Role -> the transports that others load its trained weights by."""
    num_receivers: dict[str, int] = {}
    alone: frozenset[str] = frozenset()
    """Roles whose adapters others get by themselves."""
    directory: str = ""
    host: str = "127.0.0.1"
    keys: Keys | None = None
    changes: str = "auto"
    bucket_bytes: int = 16 << 20
    checks: Checks = Checks()
    into_server: str = "auto"
    """How they go on into an engine's server."""

    def with_keys(self, keys: Keys | None) -> WeightSettings:
        """The same, of a cluster with this key."""
        return msgspec.structs.replace(self, keys=keys)


def weight_settings(worker: str, syncs: Sequence[WeightSync], spec: WeightsSpec, directory: str) -> WeightSettings:
    """What one worker of a plan must know."""
    publishes: dict[str, tuple[str, ...]] = {}
    for sync in syncs:
        if sync.source == worker and sync.target != worker:
            publishes[sync.role] = tuple(dict.fromkeys((*publishes.get(sync.role, ()), sync.transport)))
    return WeightSettings(
        loads={sync.role: sync.transport for sync in syncs if sync.target == worker},
        publishes=publishes,
        num_receivers={role: sum(s.source == worker != s.target and s.role == role for s in syncs) for role in publishes},
        alone=frozenset(s.role for s in syncs if s.source == worker and s.sends == "adapters"),
        directory=directory,
        host=spec.host,
        changes=spec.changes,
        bucket_bytes=spec.bucket_mib << 20,
        checks=checks_of(spec),
        into_server=spec.into_server,
    )


def checks_of(spec: WeightsSpec) -> Checks:
    return Checks(spec.probe, spec.probe_tolerance, spec.stop_above)


class _Taking(NamedTuple):
    """A way into a rollout engine."""

    what: str
    load: Callable[..., None]
    held: Callable[[], Iterator[tuple[str, Any]]]


@final
class WeightSyncing:
    """Every role's weights, of one process. Segments and files are named by `prefix`."""

    def __init__(self, worker: str, prefix: str, models: Mapping[str, Model], settings: WeightSettings, recorder: Recorder) -> None:
        self._worker = worker
        self._prefix = prefix
        self._models = models
        self._settings = settings
        self._recorder = recorder
        self._publishers: dict[str, Publisher] = {}
        self._lenders: dict[str, DeviceWeights] = {}
        self._borrowers: dict[str, DeviceWeightsReader] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._unlisted: dict[str, frozenset[str]] = {}
        """Role -> tensors that its engine does not list as they are published; absent before its first load."""
        self._base = SameBase()
        self._held: dict[str, int] = {}
        """Role -> the published version that its engine was found to hold."""

    def publish(self, role: str, version: int, engine: TrainEngine) -> Manifest:
        """Hand out a role's trained weights."""
        with self._recorder.span(SpanName.WEIGHTS_PUBLISH, version=version, label=role) as span:
            start = time.monotonic()
            if self._settings.publishes.get(role) == (CUDA_IPC,):
                manifest = self._lent(role, version, engine)
                span.set(num_bytes=manifest.num_bytes, transport=CUDA_IPC, gb_per_s=_rate(manifest.num_bytes, start))
                return manifest
            publisher = self._publishers.get(role)
            if publisher is None:
                publisher = self._publishers[role] = Publisher(f"{self._prefix}-{role}", self._options(role))
            is_alone = role in self._settings.alone
            sent = travelling(engine.adapters()) if is_alone else self.travelling(role, engine)
            manifest = publisher.publish(sent, version)
            span.set(sends="adapters" if is_alone else "weights")
            last = publisher.last
            span.set(num_bytes=last.num_bytes, transport=", ".join(last.sent), gb_per_s=_rate(last.num_bytes, start))
            if last.why:
                span.set(how=last.why)
            if last.share_changed >= 0:
                span.set(share_changed=round(last.share_changed, 6))
            return self._base.told(role, manifest, engine) if is_alone else manifest

    def load(self, role: str, version: int, manifest: Manifest, engine: RolloutEngine, *, under_requests: bool = False) -> None:
        """Take published weights in.

        Raises:
            ChannelError: they were damaged on their way. EngineError: the engine holds something else than was published.
        """
        if self._settings.loads.get(role) == CUDA_IPC:
            self._borrow(role, version, manifest, engine, under_requests=under_requests)
            return
        subscriber = self._subscribers.get(role)
        if subscriber is None:
            known = self._settings
            subscriber = Subscriber(self._worker, directory=known.directory, bucket_bytes=known.bucket_bytes, keys=known.keys)
            self._subscribers[role] = subscriber
        unlisted, transport = self._unlisted.get(role), self._settings.loads.get(role, SHARED_MEMORY)
        is_listed = unlisted is not None and not unlisted
        with self._recorder.span(SpanName.WEIGHTS_LOAD, version=version, label=role) as span:
            start = time.monotonic()
            taking = self._taking(role, manifest, engine)
            arriving = subscriber.tensors(
                manifest,
                transport,
                held_version=self._held.pop(role, -1),
                held=(lambda: _plain(travelling(taking.held()))) if is_listed else None,
                verify=unlisted,
            )
            taking.load(given(arriving, _first(engine)), version, under_requests=under_requests)
            wrong, self._unlisted[role] = _compared(manifest.tensors, taking.held())
            if wrong:
                self._say(role, wrong, transport, lambda: subscriber.tensors(manifest, transport))
            self._held[role] = manifest.version
            span.set(sends=taking.what, num_bytes=subscriber.num_bytes, transport=transport, gb_per_s=_rate(subscriber.num_bytes, start))

    def _lent(self, role: str, version: int, engine: TrainEngine) -> Manifest:
        """A version, lent on the GPU that it is on."""
        lender = self._lenders.get(role)
        if lender is None:
            device = _device_of(engine)
            lender = self._lenders[role] = DeviceWeights(CudaMemory(device), device)
        return lender.write(on_device(once(engine.weights()), self._rollout_dtype(role)), version=version)

    def _borrow(self, role: str, version: int, manifest: Manifest, engine: RolloutEngine, *, under_requests: bool) -> None:
        reader = self._borrowers.get(role)
        if reader is None:
            reader = self._borrowers[role] = DeviceWeightsReader(CudaMemory(_device_of(engine)))
        unlisted = self._unlisted.get(role)
        with self._recorder.span(SpanName.WEIGHTS_LOAD, version=version, label=role) as span:
            start = time.monotonic()
            arriving = reader.read(manifest, verify=unlisted is None or len(unlisted) > 0)
            engine.load_weights(arriving, version, under_requests=under_requests)
            wrong, self._unlisted[role] = _compared(manifest.tensors, engine.weights())
            if wrong:
                self._say(role, wrong, CUDA_IPC, None)
            span.set(num_bytes=manifest.num_bytes, transport=CUDA_IPC, gb_per_s=_rate(manifest.num_bytes, start))

    def _taking(self, role: str, manifest: Manifest, engine: RolloutEngine) -> _Taking:
        """How an engine takes what was published in. Raises EngineError: adapters, of which it has another base."""
        if not manifest.base:
            return _Taking("weights", engine.load_weights, engine.weights)
        self._base.check(role, manifest, engine)
        return _Taking("adapters", engine.load_adapters, engine.adapters)

    def copy(self, role: str, version: int, trainer: TrainEngine, engine: RolloutEngine, *, under_requests: bool = False) -> None:
        """Take the weights of a trainer of this process in, tensor by tensor."""
        self.take(role, version, self.travelling(role, trainer), engine, under_requests=under_requests)

    def take(
        self, role: str, version: int, tensors: Iterable[tuple[str, Weight | Tied]], engine: RolloutEngine, *, under_requests: bool = False
    ) -> None:
        """Take weights of this process in.

        Raises:
            EngineError: the engine then holds something else.
        """
        with self._recorder.span(SpanName.WEIGHTS_LOAD, version=version, label=role) as span:
            start = time.monotonic()
            entries: list[TensorEntry] = []
            sizes: list[int] = []
            passing = _noted(_plain(tensors), entries, sizes)
            engine.load_weights(given(passing, _first(engine)), version, under_requests=under_requests)
            wrong, _ = _compared(entries, engine.weights())
            if wrong:
                self._say(role, wrong, "same process", None)
            self._held.pop(role, None)
            span.set(num_bytes=sum(sizes), transport="same process", gb_per_s=_rate(sum(sizes), start))

    def travelling(self, role: str, engine: TrainEngine) -> Iterator[tuple[str, Weight | Tied]]:
        """A trainer's weights in the type that the role's rollout engines hold, one at a time."""
        return travelling(once(engine.weights()), self._rollout_dtype(role))

    def kept(self, role: str, engine: TrainEngine) -> list[tuple[str, Weight]]:
        """A copy of them."""
        return [(name, _copied(weight)) for name, weight in self.travelling(role, engine) if not isinstance(weight, Tied)]

    def _rollout_dtype(self, role: str) -> str | None:
        model = self._models.get(role)
        return model.rollout_dtype if model is not None else None

    def close(self) -> None:
        """Take back what was published. May be called twice."""
        for publisher in self._publishers.values():
            publisher.close()
        for subscriber in self._subscribers.values():
            subscriber.close()
        for reader in self._borrowers.values():
            reader.close()
        for lender in self._lenders.values():
            lender.close()

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

    def _say(self, role: str, wrong: list[str], transport: str, again: Callable[[], Iterable[object]] | None) -> None:
        """Raises for tensors that the engine holds wrongly; shared memory can be looked at again, to tell whose fault it is."""
        what = f"the weights of {role} differ between trainer and rollout after a sync ({transport}): {listed(wrong)}"
        if transport == SHARED_MEMORY and again is not None:
            try:
                for _ in again():
                    pass
            except ChannelError as damaged:
                raise ChannelError(f"{what}; {damaged.what}", now=damaged.now) from None
            raise EngineError(f"{what}; they came whole, so the engine changed them", now="Does it load each tensor under its own name?")
        raise EngineError(what, now="They were damaged on their way, or the engine does not hold what it is given. Please report this run.")


def _compared(entries: Iterable[TensorEntry], held: Iterable[tuple[str, Any]]) -> tuple[list[str], frozenset[str]]:
    wrong, missing = differing(tuple(entries), seen_tensors(held))
    return wrong, frozenset(missing)


def _noted(weights: Iterable[tuple[str, Weight]], entries: list[TensorEntry], sizes: list[int]) -> Iterator[tuple[str, Weight]]:
    """The same weights; what passes is written down."""
    for name, weight in weights:
        found: Seen = next(iter(seen([(name, weight)])))
        entries.append(TensorEntry(name, found.dtype, found.shape, 0, found.checksum))
        sizes.append(entries[-1].num_bytes)
        yield name, weight


def _plain(tensors: Iterable[tuple[str, Weight | Tied]]) -> Iterator[tuple[str, Weight]]:
    """Without names of tensors that came before: engines that tie them take one."""
    for name, weight in tensors:
        if not isinstance(weight, Tied):
            yield name, weight


def _copied(weight: Weight) -> Weight:
    return RawBits(weight.bits.copy(), weight.dtype) if isinstance(weight, RawBits) else weight.copy()


def _first(engine: RolloutEngine) -> Any:
    """One of the engine's own tensors."""
    return next((tensor for _, tensor in engine.weights()), None)


def _device_of(engine: TrainEngine | RolloutEngine) -> str:
    """Where its weights are."""
    return str(next(tensor.device for _, tensor in engine.weights()))


def _rate(num_bytes: int, start: float) -> float:
    return round(num_bytes / max(time.monotonic() - start, 1e-9) / 1e9, 4)
