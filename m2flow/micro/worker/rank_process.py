"""Process of a trainer's rank above 0: calls its engines as rank 0 commands (`m2flow.micro.worker.rank_group`).

    python -m m2flow.micro.worker.rank_process    settings on standard input, the run's secret in the environment

It has no tasks and sends no results. Its heartbeat goes to the controller, and so does an error that rank 0 does not listen for, because
it is in a collective that this rank never enters. It exits when rank 0 says so, when rank 0 is gone, and when the process that started it
is.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection

import msgspec

from m2flow.channels.codec import decode_batch
from m2flow.channels.weights import PieceWriter, Written
from m2flow.channels.zeromq import HeartbeatSender, LinkDialer
from m2flow.engines.contract import EngineSettings, Objective, TrainEngine
from m2flow.engines.registry import make_train
from m2flow.errors import InternalError, M2FlowError, unexpected
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.protocol.worker_state import rank_tag
from m2flow.micro.worker.engine_host import lender_of
from m2flow.micro.worker.fork_server import TOKEN_VARIABLE
from m2flow.micro.worker.rank_group import (
    GRACE_S,
    Accumulate,
    Answer,
    Apply,
    Compute,
    CopyFrom,
    Do,
    End,
    File,
    Heard,
    Here,
    Said,
    WritePieces,
    accumulate_share,
    heard,
    say,
)
from m2flow.micro.worker.worker import WorkerSettings
from m2flow.micro.worker.worker_process import LAST_WORDS_S, watch_parent
from m2flow.recipe import Loss, Model
from m2flow.samples import Batch

_read_worker_settings = msgspec.json.Decoder(WorkerSettings).decode

_POLL_S = 0.02


class Rank:
    """The engines of one rank."""

    def __init__(self, engines: Mapping[str, TrainEngine], link: Connection) -> None:
        self._engines = engines
        self._link = link
        self._losses: dict[str, Loss] = {}
        self._writers: dict[str, PieceWriter] = {}

    def serve(self, when_unheard: Callable[[M2FlowError], None]) -> None:
        """Carry out rank 0's commands until `End`.

        Args:
            when_unheard: takes an error that rank 0 does not listen for.
        Raises:
            EOFError: rank 0 is gone.
        """
        while not isinstance(word := heard(self._link), End):
            rows = decode_batch(self._link.recv_bytes()) if isinstance(word, Accumulate | Compute) else None
            try:
                written = self._do(word, rows)
            except Exception as error:
                known = error if isinstance(error, M2FlowError) else unexpected(getattr(word, "method", type(word).__name__), error)
                say(self._link, Answer(known.to_record()))
                if not self._link.poll(GRACE_S):
                    when_unheard(known)
                if not isinstance(heard(self._link), Heard):
                    raise InternalError("rank 0 goes on after an error that it has not heard") from error
            else:
                say(self._link, Answer(written=written))

    def _do(self, word: Said, rows: Batch | None) -> Written | None:
        assert not isinstance(word, Heard | End)
        engine = self._engines[word.role]
        match word:
            case Do(method="weights" | "adapters" | "base" as method):
                for _ in getattr(engine, method)():
                    pass
            case Do(method=method):
                getattr(engine, method)()
            case Accumulate(role=role, loss=loss):
                assert rows is not None
                if loss:
                    self._losses[role] = pickle.loads(loss)
                accumulate_share(engine, rows, Objective(self._losses[role]))
            case Apply(optimizer=optimizer, denominator=denominator):
                engine.apply(pickle.loads(optimizer), denominator)
            case Compute(method=computed, top_k=top_k):
                assert rows is not None
                getattr(engine, computed)(rows, *([top_k] if top_k else []))
            case CopyFrom(source=source, share=share):
                engine.copy_from(self._engines[source], share)
            case File(method=way, path=path):
                getattr(engine, way)(path)
            case WritePieces(role=role, manifest=manifest, bucket_bytes=bucket_bytes):
                return self._writers.setdefault(role, PieceWriter()).write(engine.weight_pieces(), manifest, bucket_bytes)
        return None


def _meet(settings: WorkerSettings, secret: str) -> Connection:
    """Connect to rank 0, which may not listen yet."""
    while True:
        try:
            link = Client(settings.rank_group.meeting, "AF_UNIX", authkey=secret.encode())
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(_POLL_S)
        else:
            say(link, Here(settings.rank_group.rank))
            return link


def _engines(slots: Sequence[EngineSlot], models: Mapping[str, Model], settings: EngineSettings) -> dict[str, TrainEngine]:
    """By role; none of them is started."""
    made: dict[str, TrainEngine] = {}
    for slot in sorted(slots, key=lambda slot: lender_of(slot, slots, models) is not None):
        lender = lender_of(slot, slots, models)
        beside = None if lender is None else made[lender].adapter_reference(slot.role, models[slot.role])
        made[slot.role] = beside or make_train(slot.engine, models[slot.role], settings)
    return made


def main(given: bytes = b"") -> None:
    """The entry point: settings on standard input, or given."""
    settings = _read_worker_settings(given or sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent(settings)
    secret, tag = os.environ.pop(TOKEN_VARIABLE, ""), rank_tag(settings.tag, settings.rank_group.rank)

    def report(error: M2FlowError) -> None:
        where = f" (worker {settings.name}, rank {settings.rank_group.rank}, pid {os.getpid()})"
        named = type(error)(error.what + where, where=error.where, now=error.now, remote=error.remote)
        dialer = LinkDialer(keys=settings.keys)
        dialer.open(settings.controller, tag, secret)
        dialer.send(m.encode(m.Fatal(named.to_record())))
        dialer.close(drain_s=LAST_WORDS_S)

    def heartbeat() -> bytes:
        return m.encode(m.Heartbeat(0, time.process_time(), True))

    sender = HeartbeatSender(settings.controller, tag, secret, period_s=settings.heartbeat_s, payload=heartbeat, keys=settings.keys)
    sender.open()
    link = _meet(settings, secret)
    train, slots = settings.engine_settings()["train"], [slot for slot in settings.engines if slot.kind == "train"]
    try:
        Rank(_engines(slots, settings.models, train), link).serve(report)
    except EOFError:
        sys.exit("rank 0 is gone")
    finally:
        link.close()
        sender.close()


if __name__ == "__main__":
    main()
