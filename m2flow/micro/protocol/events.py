"""The scheduler's contract: the events that it takes and the commands that it answers."""

from __future__ import annotations

import msgspec

from m2flow.errors import ErrorRecord, M2FlowError
from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Stage

CONTROLLER = "controller"
"""The controller as a place of rows: it reads datasets, and collects what the program observes."""


LEDGER = "ledger"
"""The ledger as a place of rows: the controller reads and sends them from there when no worker has them."""


class CallAdded(msgspec.Struct, frozen=True):
    """The program made a call."""

    call: Call
    stage: Stage


class Sourced(msgspec.Struct, frozen=True):
    """The controller has read a dataset call's rows."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    """Predicted from the texts (`m2flow.micro.protocol.call_semantics.num_tokens_of`)."""


class Recalled(msgspec.Struct, frozen=True):
    """A generation with partial rollouts that was over before the run was resumed. The controller has the rows of its result."""

    call: Call
    stage: Stage
    ids: list[int]
    """The rows of its result."""
    num_tokens: list[int]
    left: list[int]
    """Samples that it left to the next one of its line."""


class TimedOut(msgspec.Struct, frozen=True):
    """These samples of a generation have reached its `timeout_s`. Those that are done by now are not late."""

    call: int
    ids: list[int]


class Wanted(msgspec.Struct, frozen=True):
    """The program observes a call's rows: send them to the controller, now or when they are done."""

    call: int


class Released(msgspec.Struct, frozen=True):
    """The program can't reach a call's result any more."""

    call: int


class CheckpointDue(msgspec.Struct, frozen=True):
    """A checkpoint is due: every role as the calls added so far leave it. Comes before the calls that are made later."""

    step: int
    """The step that has ended."""
    directory: str
    known: dict[str, int]
    """Role -> version that an earlier checkpoint has."""
    versions: dict[str, int] | None = None
    """Role -> version to save, if these are not the versions after all calls added so far; the trainers hold them."""
    behind: bool = False
    """Whether parts may be written while training goes on."""


class FromWorker(msgspec.Struct, frozen=True):
    """A worker reported something about its tasks."""

    worker: str
    message: m.WorkerReport


class Restored(msgspec.Struct, frozen=True):
    """The ledger has rows of a call that an earlier process of the run left unfinished: they are not made again.

    Comes after `CallAdded`, and before a row of the call is handed out.
    """

    finished: tuple[m.Finished, ...] = ()
    """As the workers reported them; the task numbers are ignored."""
    flushed: tuple[m.Flushed, ...] = ()
    """Unfinished samples that can continue."""


class Stopping(msgspec.Struct, frozen=True):
    """The run was asked to stop: finish the updates that have begun, abort the rest."""


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker is lost, with all that it had. What it reports from now on is ignored."""

    worker: str
    returns: bool = False
    """Whether it will be restarted: calls that only it can run wait for that."""
    missing: dict[str, dict[int, list[int]]] = {}
    """Place -> call -> rows that it had sent there, as far as was known, and that never arrived."""
    how: str = ""
    """How it ended, as far as is known."""
    last_words: str = ""
    """The last of its output."""
    unreported: tuple[m.Finished | m.Aborted | m.Flushed, ...] = ()
    """What it had written to the ledger but not reported. It counts as if it had been reported."""


class WorkerJoined(msgspec.Struct, frozen=True):
    """A lost worker was restarted: a new process, in the state in which all workers begin a run."""

    worker: str
    incarnation: int
    """How often it was restarted; some of these processes may never have come up."""


class BorrowThresholds(msgspec.Struct, frozen=True):
    """From now on borrowed devices are given back at other shares of a generation's samples."""

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
    """Send a message to a worker. For `CONTROLLER` it is always a `Push` of dataset rows, for `LEDGER` one of rows that it has."""

    worker: str
    message: m.ToWorker


class Resolve(msgspec.Struct, frozen=True):
    """A call is done; `value` is None for a call with rows."""

    call: int
    value: object
    chosen: tuple[int, ...] | None = None
    """The rows of its result, where these are not all that it was to make: of an over-sampled generation, and of a refill."""


class Reject(msgspec.Struct, frozen=True):
    """A call failed, by itself or through what it depends on. This may be repeated with an earlier root."""

    call: int
    error: M2FlowError
    root: int
    """The call that caused the failure."""


class Forgotten(msgspec.Struct, frozen=True):
    """Neither the program nor another call can ask for this call any more; the workers with its rows were told."""

    call: int


class Discarded(msgspec.Struct, frozen=True):
    """The samples of a refill's prompts beyond this position were not needed, and are in no result."""

    call: int
    last: int


class Dropped(msgspec.Struct, frozen=True):
    """These samples of a generation were late, finished or not, and are in no result."""

    call: int
    ids: tuple[int, ...]


class Late(msgspec.Struct, frozen=True):
    """These samples of a generation were late, and continue in the next call of its line, if there is one."""

    call: int
    ids: tuple[int, ...]


class TakenOver(msgspec.Struct, frozen=True):
    """A call's result has these samples that earlier calls of its line had left."""

    call: int
    ids: tuple[int, ...]


class Expired(msgspec.Struct, frozen=True):
    """These carried-over samples were too old for the call that takes them over, and begin anew."""

    call: int
    ids: tuple[int, ...]


class Moved(msgspec.Struct, frozen=True):
    """Samples of a generation go on here, and not where the tokens before are in an engine's prefix cache."""

    call: int
    ids: tuple[int, ...]
    worker: str
    cause: str
    """One of `m2flow.micro.protocol.worker_state.CAUSES_OF_MOVES`."""


class CheckpointBegun(msgspec.Struct, frozen=True):
    """A checkpoint has begun, of these versions; parts that no earlier checkpoint has will be saved."""

    step: int
    versions: dict[str, int]


class CheckpointSaved(msgspec.Struct, frozen=True):
    """A role's part of a checkpoint was saved."""

    step: int
    role: str
    digest: str


class CheckpointFailed(msgspec.Struct, frozen=True):
    """A role's part of a checkpoint could not be written while training went on."""

    step: int
    role: str
    error: ErrorRecord


Command = Send | Resolve | Reject | Forgotten | Discarded | Dropped | Late | TakenOver | Expired | Moved | CheckpointBegun | CheckpointSaved
