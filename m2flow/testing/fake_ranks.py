"""The fake trainer over several ranks: each adds up its share of a micro-batch, in exact integers, and a sum over all ranks makes it whole.

    rank 1, 2, ... --own sums--> rank 0 --the whole--> every rank        at each accumulate, apply, save, load, and list of weights

Weights and results are bitwise those of `m2flow.testing.fake_train.FakeTrain`, on any number of ranks. Like a real one it waits for ever
for a rank that does not come, and fails when one is gone. Options: `fails: "1@3"`: rank 1 raises at its third micro-batch, and the others
do not; `dies: "1@3"`: it is killed there; `all_fail: 3`: every rank raises; `room: "1@8"`: rank 1 has no memory for micro-batches of
more than 8 samples. Torch-free.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, final

from m2flow.engines.contract import Capabilities, EngineSettings, Objective, ParallelLayouts, Sums
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Model
from m2flow.samples import Batch
from m2flow.testing.fake_train import PRIME, FakeTrain

_POLL_S = 0.01


@final
class FakeRanks(FakeTrain):
    """One rank of it."""

    name = "fake-ranks"
    capabilities = Capabilities(kind="train", heads=("lm", "value", "score"), parallel_layouts=ParallelLayouts(dp=None))

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._rank, self._num_ranks = settings.rank, settings.num_ranks
        self._links: list[Connection] = []
        """Of rank 0, to each of the others; of another, to rank 0."""
        self._num_micro_batches = 0

    def start(self) -> None:
        super().start()
        if self._num_ranks > 1:
            self._meet(f"{self._settings.rendezvous.removeprefix('file://')}.{self._model.seed}")
        self._together()

    def stop(self) -> None:
        super().stop()
        for link in self._links:
            link.close()
        self._links = []

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        self._num_micro_batches += 1
        if self._settings.options.get("fails") == f"{self._rank}@{self._num_micro_batches}":
            raise EngineError(f"this rank was told to fail at micro-batch {self._num_micro_batches}")
        if self._settings.options.get("dies") == f"{self._rank}@{self._num_micro_batches}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._settings.options.get("all_fail") == self._num_micro_batches:
            raise EngineError(f"every rank was told to fail at micro-batch {self._num_micro_batches}")
        rank, _, room = str(self._settings.options.get("room", "")).partition("@")
        if rank == str(self._rank) and len(batch) > int(room):
            raise MemoryError
        gradient, num_accumulated = self._gradient, self._num_accumulated
        own = super().accumulate(batch.take(range(self._rank, len(batch), self._num_ranks)), objective)
        grown, loss, num_sequences, num_tokens, num_context_tokens = self._together(
            (self._gradient - gradient) % PRIME, int(own.metrics["loss"]), own.num_sequences, own.num_tokens, own.num_context_tokens
        )
        self._gradient, self._num_accumulated = (gradient + grown) % PRIME, num_accumulated + num_tokens
        return Sums(num_sequences, num_tokens, num_context_tokens, {"loss": float(loss)})

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        self._together()
        return super().apply(optimizer, denominator)

    def weights(self) -> Iterator[tuple[str, Any]]:
        self._together()
        yield from super().weights()

    def save(self, path: str) -> None:
        if self._rank == 0:
            super().save(path)
        self._together()

    def load(self, path: str) -> None:
        super().load(path)
        self._together()

    def _together(self, *own: int) -> Sequence[int]:
        """Numbers below 2^61, each summed over all ranks; all come to this place before any goes on."""
        try:
            if self._rank:
                self._links[0].send_bytes(struct.pack(f"<{len(own)}Q", *own))
                return struct.unpack(f"<{len(own)}Q", self._links[0].recv_bytes())
            parts = [own, *(struct.unpack(f"<{len(own)}Q", link.recv_bytes()) for link in self._links)]
            whole = [sum(column) % PRIME for column in zip(*parts, strict=True)]
            for link in self._links:
                link.send_bytes(struct.pack(f"<{len(own)}Q", *whole))
            return whole
        except (EOFError, OSError, struct.error) as error:
            raise EngineError(f"a rank is gone, or is somewhere else: {error!r}") from error

    def _meet(self, place: str) -> None:
        if self._rank == 0:
            with Listener(place, "AF_UNIX", self._num_ranks) as listener:
                self._links = [listener.accept() for _ in range(1, self._num_ranks)]
            return
        while not self._links:
            try:
                self._links = [Client(place, "AF_UNIX")]
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(_POLL_S)
