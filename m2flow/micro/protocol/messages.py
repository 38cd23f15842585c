"""What the controller and its workers say to each other on the control link: msgpack, each kind tagged by name.

Samples never travel here; they go from worker to worker (`m2flow.channels`). Tasks say which samples of which call, and a worker
waits until it has their inputs. What a call *is* (its sampling, loss or function) comes once, as `Define`, whose body is
cloudpickle: a worker accepts it because only the controller that started it can speak on this link.
"""

from __future__ import annotations

import msgspec

from m2flow.channels.weights import Manifest
from m2flow.errors import DecodeError, ErrorRecord
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.observe.spans import SpanBlock


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The root of all of them."""


# From the controller to a worker.


class Define(Message, frozen=True):
    """What a call is, before its first task."""

    call: int
    body: bytes
    """cloudpickle of a `m2flow.macro.graph.Call`."""


class Peers(Message, frozen=True):
    """Where the other workers' inboxes are."""

    addresses: dict[str, str]


class Task(Message, frozen=True):
    """Some work, numbered. A worker does its tasks in the order in which they came, except that generation goes on beside them."""

    number: int
    call: int


class Generate(Task, frozen=True):
    """Generate these samples; finished ones are reported and forwarded one by one."""

    ids: list[int]
    prompts: list[int]
    """Identity of each sample's prompt, in the `prompts` input of the call that drew them; empty if they go on from earlier tokens."""
    forward_to: list[str]
    drawn_by: int
    """The call whose samples they are: this one, or, of carried ones, an earlier one of its line."""
    aborted_by: int = -1
    """The call that they were generated for when they got the tokens that they go on from; -1: they begin."""
    had: list[int] = []
    """Generated tokens of each that goes on: the row with so many is meant."""
    spills: bool = False
    """Finished ones may lie for long: keep them in the segment file alone."""
    waited_us: int = 0
    """From when its call was made to when this is sent; for the record."""


class RunFunction(Task, frozen=True):
    """Run the call's function, or its log-probabilities, on these samples."""

    ids: list[int]
    forward_to: list[str]
    values: dict[str, dict[str, float] | float | str | None] = {}
    """The inputs that are whole values, by name."""
    parts: dict[int, list[int]] = {}
    """Of a union: by input, the rows that are to be taken from it."""
    is_suspect: bool = False
    """A worker was lost while it ran this function, which may be at fault, and runs in processes of its own if it may."""


class Accumulate(Task, frozen=True):
    """One micro-batch of an update."""

    ids: list[int]
    epoch: int
    minibatch: int


class Apply(Task, frozen=True):
    """The end of a mini-batch: one optimiser step. The last one of a call gives its metrics."""

    is_last: bool
    version: int
    """Version of the weights when the call is done."""


class CopyWeights(Task, frozen=True):
    """Copy one role's trained weights to another's, in this worker."""


class PublishWeights(Task, frozen=True):
    """Lay a role's trained weights into shared memory."""

    role: str
    version: int


class LoadWeights(Task, frozen=True):
    """Take a role's weights into the rollout engine: from shared memory, or, without a manifest, from this worker's trainer."""

    role: str
    version: int
    manifest: Manifest | None
    under_requests: bool = False
    """What runs goes on, with the cache that it has."""


class Switch(Task, frozen=True):
    """A lease changes hands: the engines of one turn leave the device, those of another take it."""

    to: str
    """`rollout`, `train`, or the turn of one trainer (`m2flow.micro.protocol.plan.EngineSlot.turn`)."""


class ShrinkKVCache(Task, frozen=True):
    """What is next comes to the device while samples still run here: the rollout engines give back what cache these do not need."""


class Save(Task, frozen=True):
    """Write a role's model to a directory, and report the digest of its weights."""

    role: str
    path: str
    seals: bool = False
    """It is part of a checkpoint (`m2flow.micro.records.checkpoints`)."""


class Push(Message, frozen=True):
    """Send these samples' rows of a call's result to a peer."""

    call: int
    ids: list[int]
    to: str


class Abort(Message, frozen=True):
    """Give up what runs or waits for a call."""

    call: int
    keeps: bool = False
    """Keep the samples that have tokens, and say which they are: they will go on."""


class Preempt(Message, frozen=True):
    """Stop these samples of a call, if they run here, and give them back with their tokens so far: they go on elsewhere."""

    call: int
    ids: list[int]


class Reassign(Message, frozen=True):
    """These finished samples of one call are in another's result: keep them as rows of that, and send them on."""

    call: int
    drawn: int
    """The call that they were finished for."""
    ids: list[int]
    forward_to: list[str]


class PeerLost(Message, frozen=True):
    """A peer is dead: nothing that it sent counts but these rows, by call, and nothing of it that is still on its way."""

    peer: str
    """Its process (`m2flow.micro.protocol.worker_state.tag_of`)."""
    rows: dict[int, list[int]]
    """What is known to have been sent here."""


class Forget(Message, frozen=True):
    """Nobody needs this call's rows any more."""

    call: int


class Stop(Message, frozen=True):
    """Finish: flush, close, exit."""


# From a worker to the controller.


class Ready(Message, frozen=True):
    """The worker is up, its engines have loaded."""

    address: str
    pid: int


class Finished(Message, frozen=True):
    """Samples of a call are done, and were forwarded."""

    task: int
    call: int
    ids: list[int]
    num_tokens: list[int]
    """All tokens of each sample; 0 where a call has none."""
    num_generated: list[int]
    values: list[float]
    """The reward of each sample; empty where a call gives none."""
    finish: list[int]
    texts: list[str]
    """Of the first sample only, for the display."""
    segment: tuple[str, int, int, int] | None
    """File, offset, size and CRC-32 of the record that holds them."""
    dropped: list[int] = []
    """Samples of the task that the call left out of its result."""
    stretches: list[tuple[VersionSpan, ...]] = []
    """Of each sample, where it depends on time which weights generated it; else empty."""
    ends: bool = False
    """The task is done with these: no `TaskDone` follows."""
    parts: list[dict[str, float]] = []
    """What each reward is made of (`m2flow.micro.protocol.execute`); empty where no function said so."""


class Missing(Message, frozen=True):
    """The answer to `Severed`: rows that the dead peer sent here, and that have not come. They will not be taken in any more."""

    peer: str
    rows: dict[int, list[int]]


class Aborted(Message, frozen=True):
    """Samples were stopped before their end, and can go on from here."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    num_generated: list[int]
    stretches: list[tuple[VersionSpan, ...]]
    segment: tuple[str, int, int, int]


class Preempted(Message, frozen=True):
    """Samples were stopped as was asked, and do not run here any more. Those with tokens were said to be `Aborted` before."""

    call: int
    ids: list[int]
    tasks: list[int]
    """The task that each was of."""


class Load(Message, frozen=True):
    """How full a rollout engine is, after so many turns in which it has decoded (`m2flow.rollout_scheduling.policy.Load`)."""

    role: str
    num_running: int
    num_queued: int
    kv_used: int
    kv_capacity: int
    ids: list[int]
    """Samples that it has."""
    num_tokens: list[int]
    """Of each, generated so far."""


class Flushed(Message, frozen=True):
    """Running samples were written down as they are by now. They go on; if their worker is lost, another can go on from here."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    num_generated: list[int]
    stretches: list[tuple[VersionSpan, ...]]
    segment: tuple[str, int, int, int]


class GivenUp(Message, frozen=True):
    """Samples were given up, and nobody goes on with them."""

    call: int
    ids: list[int]
    num_generated: list[int]
    """Tokens that each had."""


class TaskDone(Message, frozen=True):
    """A task is done. Its samples were reported before; a `Finished` that ends the task says this too."""

    task: int
    result: dict[str, float] | float | str | None = None
    manifest: Manifest | None = None


class TaskFailed(Message, frozen=True):
    """A task raised."""

    task: int
    call: int
    error: ErrorRecord
    row: int = -1
    """The first sample that the error is about; -1: not of one in particular."""


class Spans(Message, frozen=True):
    """What the worker recorded since the last time."""

    block: SpanBlock


class Heartbeat(Message, frozen=True):
    """A heartbeat, from a thread of its own (`m2flow.micro.controller.supervisor`)."""

    num_turns: int
    """Of the main loop, so far."""
    cpu_s: float
    """Processor time of all threads, so far."""
    is_in_users_code: bool
    """A user's function has been called."""
    sent_ns: int = 0
    """When, by the worker's clock (Unix ns); it is answered with an `Echo`. 0: nothing is asked."""
    exchange: tuple[int, int, int, int] | None = None
    """How that went with the one before (`m2flow.micro.controller.supervisor.Exchange`)."""
    memory_bytes: int | None = None
    """Of the process."""
    gpu_use: float | None = None
    """Share of the time in which its GPU was busy lately, by whomever."""
    gpu_memory_bytes: int | None = None
    """Taken there, by whomever."""


class Echo(Message, frozen=True):
    """The controller's answer to a `Pulse`, on the same link. Times are Unix ns, the first by the worker's clock."""

    asked_ns: int
    heard_ns: int
    answered_ns: int


class Fatal(Message, frozen=True):
    """The worker can't go on."""

    error: ErrorRecord


class Goodbye(Message, frozen=True):
    """The worker's last word."""


ToWorker = (
    Define
    | Peers
    | Generate
    | RunFunction
    | Accumulate
    | Apply
    | CopyWeights
    | PublishWeights
    | LoadWeights
    | Switch
    | ShrinkKVCache
    | Save
    | Push
    | Abort
    | Preempt
    | Reassign
    | PeerLost
    | Forget
    | Stop
)
WorkerReport = Finished | Aborted | Flushed | Preempted | Load | TaskDone | TaskFailed
"""What the scheduler is told."""
ToController = (
    Ready
    | Finished
    | Missing
    | Aborted
    | Preempted
    | Flushed
    | GivenUp
    | Load
    | TaskDone
    | TaskFailed
    | Spans
    | Heartbeat
    | Fatal
    | Goodbye
)


def calls_of(task: Task) -> tuple[int, ...]:
    """The calls that a worker must know for a task."""
    return tuple(sorted({task.call, task.drawn_by})) if isinstance(task, Generate) else (task.call,) if task.call >= 0 else ()


encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_echo: msgspec.msgpack.Decoder[Echo] = msgspec.msgpack.Decoder(Echo)
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)


def decode_to_worker(body: bytes) -> ToWorker:
    """A message to a worker. Raises `DecodeError` for bytes that are none."""
    try:
        return _to_worker.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


def decode_to_controller(body: bytes) -> ToController:
    """A message to the controller. Raises `DecodeError` for bytes that are none."""
    try:
        return _to_controller.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


def decode_echo(body: bytes) -> Echo:
    """An answer to a heartbeat. Raises `DecodeError` for bytes that are none."""
    try:
        return _echo.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


_NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # msgspec lets a tag that is no UTF-8 through as the second


def _no_message(body: bytes, error: Exception) -> DecodeError:
    return DecodeError(f"{len(body)} bytes on the control link are no message: {error}")
