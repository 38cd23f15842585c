"""The scheduler's contract: the events it takes and the commands it gives."""

from __future__ import annotations

import msgspec

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Stage

CONTROLLER = "controller"
"""The controller as a place where rows are: it reads datasets, and collects what the program observes."""


LEDGER = "ledger"
"""The ledger as a place: the controller reads rows back from there, and sends them on, when they are nowhere else."""


class CallAdded(msgspec.Struct, frozen=True):
    """The program made a call."""

    call: Call
    stage: Stage


class Sourced(msgspec.Struct, frozen=True):
    """The controller has read a dataset call's rows."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    """Predicted from the texts."""


class Recalled(msgspec.Struct, frozen=True):
    """A generation of a line that was over before this scheduler began. The controller has the rows of its result."""

    call: Call
    stage: Stage
    ids: list[int]
    """Of its result."""
    num_tokens: list[int]
    left: list[int]
    """Samples that it left to the next one of its line."""


class TimedOut(msgspec.Struct, frozen=True):
    """These samples of a generation have had the time that its `timeout_s` allows. Those that are done by now are not late."""

    call: int
    ids: list[int]


class Wanted(msgspec.Struct, frozen=True):
    """The program observes a call's rows: bring them to the controller, now or when they are there."""

    call: int


class Released(msgspec.Struct, frozen=True):
    """The program can't reach a call's result any more."""

    call: int


class CheckpointDue(msgspec.Struct, frozen=True):
    """A checkpoint of the program so far: every role as the calls made by now leave it. Comes before the calls that are made later."""

    step: int
    """The step that has ended."""
    directory: str
    known: dict[str, int]
    """Role -> the version that an earlier checkpoint has."""
    versions: dict[str, int] | None = None
    """Of each role, if it is not of all calls made by now; the trainers hold them."""


class FromWorker(msgspec.Struct, frozen=True):
    """A worker said something about a task."""

    worker: str
    message: m.WorkerReport


class Restored(msgspec.Struct, frozen=True):
    """The ledger has rows of a call that an earlier process of the run left unfinished: they are not made again. Comes after `CallAdded`,
    and before a row of the call is handed out."""

    finished: tuple[m.Finished, ...] = ()
    """As the workers said it; their tasks count for nothing."""
    flushed: tuple[m.Flushed, ...] = ()
    """Samples that can go on."""


class Stopping(msgspec.Struct, frozen=True):
    """The run is to end: finish the updates that have begun, give up the rest."""


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker is gone, with all that it had. What it says from now on does not count."""

    worker: str
    returns: bool = False
    """It will be started again: what only it can do waits for that."""
    missing: dict[str, dict[int, list[int]]] = {}
    """Place -> call -> rows that it had sent there, as far as was known, and that have never come."""
    how: str = ""
    """What is known of its end."""
    last_words: str = ""
    """What it printed last."""
    unreported: tuple[m.Finished | m.Aborted | m.Flushed, ...] = ()
    """What it had written down, and could not say any more. It counts as if it had."""


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker that was lost is here again: a new process, as all were when the run began, that has nothing of what it had."""

    worker: str
    incarnation: int
    """How many processes it was before; some of them may never have come up."""


class BorrowThresholds(msgspec.Struct, frozen=True):
    """From now on devices that a trainer lends are given back at other shares of a generation's samples."""

    shares: dict[tuple[str, str], float]
    """By worker and role."""


Event = (
    CallAdded
    | Sourced
    | Recalled
    | Wanted
    | Released
    | TimedOut
    | CheckpointDue
    | FromWorker
    | Restored
    | Stopping
    | WorkerLost
    | WorkerJoined
    | BorrowThresholds
)


class Send(msgspec.Struct, frozen=True):
    """Tell a worker. For `CONTROLLER` the only message is a `Push` of dataset rows, for `LEDGER` one of rows that it has."""

    worker: str
    message: m.ToWorker


class Resolve(msgspec.Struct, frozen=True):
    """A call is done; `value` is None for one with rows."""

    call: int
    value: object
    chosen: tuple[int, ...] | None = None
    """The rows of its result, where they are not simply all that it was to make: of a cut generation, and of a refill."""


class Reject(msgspec.Struct, frozen=True):
    """A call failed, itself or through what it depends on. It may come again, with an earlier root."""

    call: int
    error: M2FlowError
    root: int
    """The call that failed by itself."""


class Forgotten(msgspec.Struct, frozen=True):
    """Neither the program nor another call can ask for this call any more; whoever has its rows was told."""

    call: int


class Discarded(msgspec.Struct, frozen=True):
    """Of the samples that a call made, those of prompts beyond this position were not needed, and do not count."""

    call: int
    last: int


class Dropped(msgspec.Struct, frozen=True):
    """These samples of a generation were late: whole or not, they are in no result, and do not count."""

    call: int
    ids: tuple[int, ...]


class Late(msgspec.Struct, frozen=True):
    """These samples of a generation were late, and go on in the next call of its line. If there is none, they were for nothing."""

    call: int
    ids: tuple[int, ...]


class Given(msgspec.Struct, frozen=True):
    """These samples that earlier calls of its line had left are in a call's result."""

    call: int
    ids: tuple[int, ...]


class Expired(msgspec.Struct, frozen=True):
    """These samples that an earlier call had left were too old for the one that takes them over: they begin anew."""

    call: int
    ids: tuple[int, ...]


class CheckpointBegun(msgspec.Struct, frozen=True):
    """What a checkpoint is of; the parts of versions that were not known will be saved."""

    step: int
    versions: dict[str, int]


class CheckpointSaved(msgspec.Struct, frozen=True):
    """A role's part of a checkpoint is written."""

    step: int
    role: str
    digest: str


Command = Send | Resolve | Reject | Forgotten | Discarded | Dropped | Late | Given | Expired | CheckpointBegun | CheckpointSaved
