"""Have turns of an episode played by an engine in another process: asked for by who plays the episode, answered by who has the engine.

    the process of the episodes                          the process of the speaker's engine
    Episodes -> RemoteSpeaker.add   ---- asked ------->  Guests.take -> engine.add
                                                         engine.step -> Guests.keep
    Episodes <- RemoteSpeaker.step  <--- answered -----  Guests.take_answers

To its episodes a `RemoteSpeaker` is an engine like any other; what it asks for and gives up leaves in batches (`take_asked`), a row for
each turn. To the engine a turn is a request like any other, under an id of its own: the process may have that sample itself by now. Random
numbers are in the request, so the tokens are those that an engine beside the agent would give.

Loss. A turn is asked for once and answered once, each by its number; an answer to a turn that was given up is ignored. Nothing here waits
for a process that is gone: who plays the episode stops it, and plays it again from the record, without this turn.

A turn that does not fit the model's context, or that the engine refuses, is answered by its fault. So is one that comes when it can't be
played: that was given up before the engine's weights or turn changed, and is ignored by who asked, or is a mistake of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import msgspec
import numpy as np

from m2flow.engines.contract import Generated, Language, Occupancy, Request, RolloutEngine
from m2flow.errors import EngineError, InternalError, M2FlowError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Batch, Finish, Ragged, SampleId


class Window(NamedTuple):
    """The oldest and the newest version of the speaker's weights that the episode may use."""

    oldest: int
    newest: int


class Fault(NamedTuple):
    """Why a turn was not played."""

    kind: str
    """`too_long`, `invalid`, or `gone`: the engine had other weights, or was off its devices."""
    what: str


_TOKENS: Mapping[str, type] = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "kv_stale": np.bool_}
"""Columns of generated tokens: of a turn that is asked for, those that it goes on from."""


_read_sampling = msgspec.json.Decoder(Sampling).decode


def _batch(ids: Sequence[int], tokens: Sequence[Sequence[Any]], texts: Sequence[str], records: Sequence[object], **more: Ragged) -> Batch:
    columns = {name: Ragged.of([row[at] for row in tokens], kind) for at, (name, kind) in enumerate(_TOKENS.items())}
    return Batch(np.array(ids, np.int64), {**columns, "text": Ragged.texts(texts), "turn": Ragged.json(records), **more})


# ---- who asks


@final
class RemoteSpeaker:
    """A role's rollout engine in other processes, for the episodes of this one."""

    def __init__(self, role: str, language: Language, place_of: Callable[[int], str], window_of: Callable[[int], Window]) -> None:
        """
        Args:
            place_of: the process that takes an episode's turns.
            window_of: the versions of the weights that it may use.
        """
        self._role = role
        self._language = language
        self._place_of, self._window_of = place_of, window_of
        self._asked: dict[int, tuple[int, Request]] = {}
        """Episode -> number of its turn, and the turn."""
        self._leaving: dict[str, list[tuple[Request, Mapping[str, object]]]] = {}
        """Process -> what to tell it: a turn, and what of it."""
        self._made: list[Generated] = []
        self._refused: list[tuple[int, M2FlowError]] = []
        self._num_asked = 0

    def language(self) -> Language:
        return self._language

    def add(self, requests: Sequence[Request]) -> None:
        """Ask for turns."""
        for request in requests:
            self._num_asked += 1
            self._asked[request.id] = self._num_asked, request
            how = {"seed": request.seed, "sampling": msgspec.json.encode(request.sampling).decode(), "window": self._window_of(request.id)}
            self._tell(self._num_asked, request, how)

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        """Give up turns; each as it was asked for, without the tokens that it has by now elsewhere. An answer that has come is dropped."""
        found, gone = [], set(ids)
        self._made = [one for one in self._made if one.id not in gone]
        self._refused = [one for one in self._refused if one[0] not in gone]
        for packed in sorted(gone):
            if packed in self._asked:
                number, request = self._asked.pop(packed)
                self._tell(number, request, {})
                found.append(_begun(request))
        return found

    def _tell(self, number: int, request: Request, what: Mapping[str, object]) -> None:
        record = {"role": self._role, "number": number, **what}
        self._leaving.setdefault(self._place_of(request.id), []).append((request, record))

    def take_asked(self) -> list[tuple[str, Batch]]:
        """What is to be sent: the process, and the turns to ask it for or to give up, in their order."""
        leaving, self._leaving = self._leaving, {}
        found = []
        for place, told in leaving.items():
            prefixes = [(r.prefix, r.prefix_logprobs, r.prefix_versions, r.prefix_kv_stale) for r, _ in told]
            contexts: list[Any] = [r.prompt for r, _ in told]
            more = {"context": Ragged.of(contexts, np.int32)}
            found.append((place, _batch([r.id for r, _ in told], prefixes, [""] * len(told), [record for _, record in told], **more)))
        return found

    def answered(self, rows: Batch, row: int, record: Mapping[str, Any]) -> None:
        """Take in what came of a turn. Raises `InternalError`: it should have been played, and could not be."""
        packed = int(rows.ids[row])
        number, request = self._asked.get(packed, (0, None))
        if request is None or number != record["number"]:
            return
        fault = record["fault"]
        if fault is not None and fault[0] == "gone":
            raise InternalError(f"a turn of {self._role} in {SampleId.unpack(packed)} could not be played: {fault[1]}")
        del self._asked[packed]
        if fault is not None:
            self._refused.append((packed, (PromptTooLong if fault[0] == "too_long" else EngineError)(fault[1])))
            return
        columns: Any = {name: np.array(rows.ragged(name).row(row), kind) for name, kind in _TOKENS.items()}
        self._made.append(replace(_begun(request), **columns, finish=Finish(record["finish"]), text=str(rows.ragged("text").item(row))))

    def refused(self) -> list[tuple[int, M2FlowError]]:
        """The turns that were not played, since they do not fit or can't be, by episode."""
        refused, self._refused = self._refused, []
        return refused

    def step(self) -> list[Generated]:
        made, self._made = self._made, []
        return made

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        return [_begun(self._asked[packed][1]) for packed in ids if packed in self._asked]

    def progress(self) -> dict[int, int]:
        return {packed: len(request.prefix) for packed, (_, request) in self._asked.items()}

    @property
    def num_unfinished(self) -> int:
        return len(self._asked) + len(self._made) + len(self._refused)

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._asked), 0, 0, 0)


def _begun(request: Request) -> Generated:
    """A turn with the tokens that it was asked to go on from."""
    given = [request.prefix, request.prefix_logprobs, request.prefix_versions, request.prefix_kv_stale]
    columns: Any = {name: np.array(values, kind) for (name, kind), values in zip(_TOKENS.items(), given, strict=True)}
    return Generated(request.id, np.array(request.prompt, np.int32), **columns, finish=Finish.ABORT, text="")


# ---- who answers


@dataclass(frozen=True)
class _Guest:
    """A turn of another process's episode."""

    sender: str
    role: str
    number: int
    episode: int


@final
class Guests:
    """The turns that this process's engines play for episodes of others."""

    def __init__(self, engine_of: Callable[[str], RolloutEngine], fault_of: Callable[[str, Window], str]) -> None:
        """
        Args:
            fault_of: why a role's engine can't play a turn now, with weights of that window; empty: it can.
        """
        self._engine_of, self._fault_of = engine_of, fault_of
        self._here: dict[int, _Guest] = {}
        """By the request's id in its engine."""
        self._id_of: dict[tuple[str, str, int], int] = {}
        self._answers: dict[str, list[tuple[_Guest, Generated | Fault]]] = {}
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, request: int) -> bool:
        return request in self._here

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take(self, sender: str, rows: Batch) -> None:
        """Begin the turns that a process asks for, and give up those that it does not want any more."""
        for row in range(len(rows)):
            record: Any = rows.ragged("turn").item(row)
            guest = _Guest(sender, record["role"], record["number"], int(rows.ids[row]))
            if "seed" in record:
                self._begin(guest, rows, row, record)
            elif (own := self._id_of.get((sender, guest.role, guest.number))) is not None:
                self._leaves(own)
                self._engine_of(guest.role).abort([own])

    def _begin(self, guest: _Guest, rows: Batch, row: int, record: Mapping[str, Any]) -> None:
        if fault := self._fault_of(guest.role, Window(*record["window"])):
            self._answer(guest, Fault("gone", fault))
            return
        prefix: Any = [tuple(rows.ragged(name).row(row).tolist()) for name in _TOKENS]
        # An id that no sample has here: samples of this process, and of another that went on with the episode, may be in the engine.
        self._num_ids += 1
        own = -self._num_ids
        context = tuple(rows.ragged("context").row(row).tolist())
        request = replace(Request(own, context, record["seed"], _read_sampling(record["sampling"]), *prefix), keeps_kv=True)
        try:
            self._engine_of(guest.role).add([request])
        except M2FlowError as error:
            kind = "too_long" if isinstance(error, PromptTooLong) else "invalid"
            self._answer(guest, Fault(kind, error.what.replace(str(SampleId.unpack(own)), str(SampleId.unpack(guest.episode)))))
        else:
            self._here[own] = guest
            self._id_of[guest.sender, guest.role, guest.number] = own

    def keep(self, made: Iterable[Generated]) -> list[Generated]:
        """Keep the turns of others among what an engine has finished, to be answered; returns the rest."""
        rest = []
        for one in made:
            if one.id in self._here:
                self._answer(self._leaves(one.id), one)
            else:
                rest.append(one)
        return rest

    def send_away(self, what: str, role: str | None = None) -> None:
        """Give up all turns, of a role or of all: its engine gets other weights, or leaves its devices. Who asked has given them up too."""
        for own, guest in list(self._here.items()):
            if role in (None, guest.role):
                self._leaves(own)
                self._engine_of(guest.role).abort([own])
                self._answer(guest, Fault("gone", what))

    def lost(self, sender: str) -> None:
        """Give up the turns of a process that is gone."""
        self._answers.pop(sender, None)
        for own in [own for own, guest in self._here.items() if guest.sender == sender]:
            self._engine_of(self._leaves(own).role).abort([own])

    def take_answers(self) -> list[tuple[str, Batch]]:
        """What is to be sent: the process that asked, and what came of its turns."""
        answers, self._answers = self._answers, {}
        return [(sender, _answer_of(told)) for sender, told in answers.items()]

    def _leaves(self, own: int) -> _Guest:
        guest = self._here.pop(own)
        del self._id_of[guest.sender, guest.role, guest.number]
        return guest

    def _answer(self, guest: _Guest, what: Generated | Fault) -> None:
        self._answers.setdefault(guest.sender, []).append((guest, what))


def _answer_of(told: Sequence[tuple[_Guest, Generated | Fault]]) -> Batch:
    tokens: list[Sequence[Any]] = []
    texts: list[str] = []
    records: list[object] = []
    for guest, what in told:
        record: dict[str, object] = {"role": guest.role, "number": guest.number}
        if isinstance(what, Fault):
            tokens.append([()] * len(_TOKENS))
        else:
            tokens.append([what.tokens, what.logprobs, what.versions, what.kv_stale])
            record["finish"] = int(what.finish)
        texts.append("" if isinstance(what, Fault) else what.text)
        records.append({**record, "fault": what if isinstance(what, Fault) else None})
    return _batch([guest.episode for guest, _ in told], tokens, texts, records)
