"""The messages between the controller and its workers on the control link: msgpack, each kind tagged by name.

Samples never travel here; they go from worker to worker (`m2flow.channels`). Tasks name samples of a call, and a worker waits until it has
their inputs. What a call *is* (its sampling, loss or function) comes once, as `Define`, whose body is cloudpickle: a worker accepts it
because only the controller that started it can speak on this link.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2flow.channels.weights import Manifest
from m2flow.errors import DecodeError, ErrorRecord
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.observe.spans import SpanBlock


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all messages."""


# ---- from the controller to a worker


class Define(Message, frozen=True):
    """Tell a worker what a call is, before its first task."""

    call: int
    body: bytes
    """The `m2flow.macro.graph.Call`, encoded by `m2flow.micro.protocol.call_semantics`."""


class Peers(Message, frozen=True):
    """Tell a worker the addresses of the other workers' inboxes."""

    addresses: dict[str, str]


class Task(Message, frozen=True):
    """A numbered piece of work. A worker runs its tasks in the order of arrival, and generation concurrently with them."""

    number: int
    call: int


class Generate(Task, frozen=True):
    """Generate samples; finished ones are reported and forwarded as they come, a few together."""

    ids: list[int]
    prompts: list[int]
    """Row of each sample's prompt, in the `prompts` input of the call that drew them; empty if they continue from earlier tokens."""
    forward_to: list[str]
    drawn_by: int
    """The call that drew the samples: this one or, of samples carried over, an earlier one of its line."""
    aborted_by: int = -1
    """The call for which the tokens that they continue from were generated; -1: they begin."""
    had: list[int] = []
    """Generated tokens that each continues from, which identifies the row of its prefix."""
    spills: bool = False
    """Keep finished samples in the segment file only, since they may wait for long."""
    waited_us: int = 0
    """Time from the making of the call to the sending of this task; for the record."""
    waits_us: list[int] = []
    """How long each has waited elsewhere for its next turn, if they were moved; empty: they were not."""
    speakers: dict[str, list[str]] = {}
    """Role that speaks in episodes and whose rollout engine the worker lacks -> the processes that take its turns, each those of some
    samples (`m2flow.micro.protocol.worker_state.instance_of`)."""


class EmbedPrompts(Task, frozen=True):
    """Compute the embeddings of prompts of a generation, by which its samples' lengths are predicted (`RolloutEngine.embeddings`)."""

    samples: list[int]
    """A sample of each prompt."""
    prompts: list[int]
    """Row of each prompt, in the `prompts` input of the call."""


class RunFunction(Task, frozen=True):
    """Run a call's function, or compute its log-probabilities, on samples."""

    ids: list[int]
    forward_to: list[str]
    values: dict[str, dict[str, float] | float | str | None] = {}
    """The inputs that are whole values, by name."""
    parts: dict[int, list[int]] = {}
    """Input of a union -> rows to take from it."""
    is_suspect: bool = False
    """Whether a worker was lost while it ran this function, which then runs in child processes where that is allowed."""


class Accumulate(Task, frozen=True):
    """Accumulate the gradients of one micro-batch of an update."""

    ids: list[int]
    epoch: int
    minibatch: int


class Apply(Task, frozen=True):
    """End a mini-batch with an optimiser step. The last one of a call returns its metrics."""

    is_last: bool
    version: int
    """Version of the weights when the call is done."""


class CopyWeights(Task, frozen=True):
    """Copy one role's trained weights to another's, in this worker."""


class PublishWeights(Task, frozen=True):
    """Stage a role's trained weights for the engines of other workers, which fetch them over the plan's transports."""

    role: str
    version: int


class LoadWeights(Task, frozen=True):
    """Load a role's weights into the rollout engine: what a manifest names or, without one, those of this worker's trainer."""

    role: str
    version: int
    manifest: Manifest | None
    under_requests: bool = False
    """Running samples continue, with the KV cache that they have."""


class Switch(Task, frozen=True):
    """Move a lease: the engines of one turn offload, those of another onload."""

    to: str
    """`rollout`, `train`, or the turn of one trainer (`m2flow.micro.protocol.plan.EngineSlot.turn`)."""


class ShrinkKVCache(Task, frozen=True):
    """Shrink the KV cache to what running samples need, since the next turn's engines onload while these still run."""


class Save(Task, frozen=True):
    """Save a role's model to a directory, and report the digest of its weights."""

    role: str
    path: str
    seals: bool = False
    """Whether it is part of a checkpoint (`m2flow.micro.records.checkpoints`)."""
    step: int = -1
    """Step of the checkpoint, if its part may be written after the task (`PartWritten`); the task then has no result. -1: at once."""


class Push(Message, frozen=True):
    """Send rows of a call's result to a peer."""

    call: int
    ids: list[int]
    to: str


class Abort(Message, frozen=True):
    """Abort what runs or waits for a call."""

    call: int
    keeps: bool = False
    """Keep and report the samples that have tokens: they will continue."""


class Preempt(Message, frozen=True):
    """Stop these samples of a call, if they run here, and report their tokens so far: they continue elsewhere."""

    call: int
    ids: list[int]
    waits: bool = False
    """Those that have not begun, or can't be stopped now, are stopped as soon as they can be."""
    queued: bool = False
    """Only episodes that still wait for the engine (`Queued`). This is answered even if there is none any more."""


class Reassign(Message, frozen=True):
    """Keep finished samples of one call as rows of another, whose result they are in, and forward them."""

    call: int
    drawn: int
    """The call that they were finished for."""
    ids: list[int]
    forward_to: list[str]


class PeerLost(Message, frozen=True):
    """A peer was lost: drop all that it has sent except these rows, and all of it that is still in transfer."""

    peer: str
    """Its process (`m2flow.micro.protocol.worker_state.tag_of`)."""
    rows: dict[int, list[int]]
    """Call -> rows that are known to have been sent here."""


class Forget(Message, frozen=True):
    """Drop a call's rows, which nobody needs any more."""

    call: int


class Stop(Message, frozen=True):
    """Flush, close and exit."""


# ---- from a worker to the controller


class Ready(Message, frozen=True):
    """The worker is up and its engines are loaded."""

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
    """Texts of the first sample only, for the display."""
    segment: tuple[str, int, int, int] | None
    """File, offset, size and CRC-32 of the record that holds them."""
    dropped: list[int] = []
    """Samples of the task that the call left out of its result."""
    version_spans: list[tuple[VersionSpan, ...]] = []
    """The version spans of each sample, where it depends on timing which weights generated it; else empty."""
    ends: bool = False
    """The task is done with these: no `TaskDone` follows."""
    parts: list[dict[str, float]] = []
    """The parts of each reward (`m2flow.micro.protocol.call_semantics`); empty where no function gave any."""
    took_us: int = 0
    """Time that a function took for all samples of the task, if these end it; 0: not known, or not to be gone by."""


class Missing(Message, frozen=True):
    """Answers `PeerLost`: rows that the lost peer sent here and that have not arrived. They will not be accepted any more."""

    peer: str
    rows: dict[int, list[int]]


class Aborted(Message, frozen=True):
    """Samples were stopped before their end, and can continue from here."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    num_generated: list[int]
    version_spans: list[tuple[VersionSpan, ...]]
    segment: tuple[str, int, int, int]


class Preempted(Message, frozen=True):
    """Samples were preempted, and do not run here any more. Those with tokens were reported as `Aborted` before."""

    call: int
    ids: list[int]
    tasks: list[int]
    """The task of each sample."""


class Load(Message, frozen=True):
    """The load of a rollout engine, reported every few decode turns (`m2flow.rollout_scheduling.policy.Load`)."""

    role: str
    num_running: int
    num_queued: int
    kv_used: int
    kv_capacity: int
    ids: list[int]
    """Samples on the engine."""
    num_tokens: list[int]
    """Tokens that each has generated so far."""


class Queued(Message, frozen=True):
    """The episodes that wait for a rollout engine, reported every few decode turns while some do, those to move first at the front."""

    role: str
    num_slots: int
    """Turns that the engine decodes at once."""
    turn_tokens: float
    """Mean number of tokens that a turn generates; 0: none has ended."""
    kv_capacity: int
    """Tokens that its cache holds; 0: not known."""
    ids: list[int]
    contexts: list[int]
    """Tokens of the context of each."""
    num_cached: list[int]
    """Those of them that are in the cache here, and would be read again elsewhere."""
    waits_us: list[int]
    """How long each has waited for the turn that it asks for, here and where it was before."""


class Flushed(Message, frozen=True):
    """Running samples were written to the worker's file with their tokens so far; another continues from there if this one is lost."""

    call: int
    ids: list[int]
    num_tokens: list[int]
    num_generated: list[int]
    version_spans: list[tuple[VersionSpan, ...]]
    segment: tuple[str, int, int, int]


class GivenUp(Message, frozen=True):
    """Samples were aborted, and nobody continues them."""

    call: int
    ids: list[int]
    num_generated: list[int]
    """Tokens that each had generated."""


class TaskDone(Message, frozen=True):
    """A task is done. Its samples were reported before; a `Finished` with `ends` replaces this message."""

    task: int
    result: dict[str, float] | float | str | None = None
    manifest: Manifest | None = None
    embeddings: list[list[float]] = []
    """Of `EmbedPrompts`: that of each prompt, in their order. Empty: the engine could compute none, or the task was aborted."""


class TaskFailed(Message, frozen=True):
    """A task raised an error."""

    task: int
    call: int
    error: ErrorRecord
    row: int = -1
    """The first sample that the error is about; -1: none in particular."""


class PartWritten(Message, frozen=True):
    """A role's part of a checkpoint was written after its `Save`, or could not be."""

    step: int
    role: str
    digest: str = ""
    """Digest of its weights."""
    error: ErrorRecord | None = None


class Spans(Message, frozen=True):
    """The spans that the worker recorded since the last report."""

    block: SpanBlock


class Heartbeat(Message, frozen=True):
    """A heartbeat, sent by a thread of its own (`m2flow.micro.controller.supervisor`)."""

    num_turns: int
    """Turns of the main loop so far."""
    cpu_s: float
    """CPU time of all threads so far."""
    is_in_users_code: bool
    """Whether a user's function is running."""
    sent_ns: int = 0
    """When it was sent, by the worker's clock (Unix ns); it is answered with an `Echo`. 0: no answer is asked for."""
    exchange: tuple[int, int, int, int] | None = None
    """The times of the previous heartbeat and its echo (`m2flow.micro.controller.supervisor.Exchange`)."""
    memory_bytes: int | None = None
    """Memory of the process."""
    gpu_use: float | None = None
    """Share of recent time in which its GPU was busy, with any process."""
    gpu_memory_bytes: int | None = None
    """Memory in use on its GPU, by all processes."""
    loading: str = ""
    """How far the model that it loads is, in words; empty when it loads none, or its engine does not tell."""
    place: str = ""
    """Where its engine is in a call, in words (a trainer of several ranks says so); empty: in none, or it does not tell."""


class Echo(Message, frozen=True):
    """The controller's answer to a `Heartbeat`, on the same link. Times are Unix ns, the first by the worker's clock."""

    asked_ns: int
    heard_ns: int
    answered_ns: int


class Fatal(Message, frozen=True):
    """The worker can't continue."""

    error: ErrorRecord


class Goodbye(Message, frozen=True):
    """The worker's last message before it exits."""


def forwarded_to(task: Task | None) -> Sequence[str]:
    """Return the tags of the processes that a task sends its rows to; none, where there is no task any more."""
    return task.forward_to if type(task) is Generate or type(task) is RunFunction else ()


ToWorker = (
    Define
    | Peers
    | Generate
    | EmbedPrompts
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
WorkerReport = Finished | Aborted | Flushed | Preempted | Load | Queued | TaskDone | TaskFailed
"""The messages that are passed on to the scheduler."""
ToController = (
    Ready
    | Finished
    | Missing
    | Aborted
    | Preempted
    | Flushed
    | GivenUp
    | Load
    | Queued
    | TaskDone
    | TaskFailed
    | PartWritten
    | Spans
    | Heartbeat
    | Fatal
    | Goodbye
)


def calls_of(task: Task) -> tuple[int, ...]:
    """List the calls that a worker must know to run a task."""
    return tuple(sorted({task.call, task.drawn_by})) if isinstance(task, Generate) else (task.call,) if task.call >= 0 else ()


encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_echo: msgspec.msgpack.Decoder[Echo] = msgspec.msgpack.Decoder(Echo)
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)


def decode_to_worker(body: bytes) -> ToWorker:
    """Decode a message to a worker. Raises `DecodeError` for bytes that are none."""
    try:
        return _to_worker.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


def decode_to_controller(body: bytes) -> ToController:
    """Decode a message to the controller. Raises `DecodeError` for bytes that are none."""
    try:
        return _to_controller.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


def decode_echo(body: bytes) -> Echo:
    """Decode an answer to a heartbeat. Raises `DecodeError` for bytes that are none."""
    try:
        return _echo.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from None


_NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # msgspec lets a tag that is no UTF-8 through as the second


def _no_message(body: bytes, error: Exception) -> DecodeError:
    return DecodeError(f"{len(body)} bytes on the control link are no message: {error}")
