"""The state of one call: which rows are ready, done or failed, where its samples continue from, and how far an update is.

A unit is the smallest set of rows that a task of the call may have: a sample, a group, a mini-batch or everything. A unit is ready when
each of its rows has come in from each aligned input (`CallState.arrived`).

Prefixes: running samples are written to the ledger now and then, and stopped ones always; what was written last is a sample's prefix.

    Flushed, Aborted (a worker) -> CallState.prefixes -> Generate(aborted_by=..., had=...), and the row, from who has it

A sample with a prefix that is handed out again continues from it, on any worker: its own was lost, or its call is over and the next one of
its line has taken it over. Its tokens are within its call's window of versions, and so are those to come, since it is handed out only where
a version of the window is held (perhaps an older one, if its worker was lost and others are behind). Rows of prefixes go by the call that
they were generated for (`m2flow.micro.protocol.worker_state.stopped_at`); of each sample only the newest counts.

Updates (`UpdateProgress`): membership of a mini-batch goes by identity and is fixed before the first sample is there; with `count=` or
`oversample=`, which decide what the samples are, when the generation ends. Within it, micro-batches are filled with whole groups: those
that have come in, or, where the order of summation must not depend on arrival, the next ones in the order of identity, cut by the same rule
as `m2flow.micro.lowering.passes.cut`.

`UpdateProgress` also chooses which groups make the next micro-batch. All other decisions are those of
`m2flow.micro.scheduler.call_lifecycle` and the dispatches.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.macro.oversampling import is_cut
from m2flow.macro.refill import Coming, Refill
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.staleness import ANY_VERSION
from m2flow.samples import SampleId, by_group, group_key


class Prefix(NamedTuple):
    """The tokens that a stopped sample can continue from."""

    by: int
    """The call that they were generated for."""
    oldest: int
    """The oldest version of the weights among them."""
    num_generated: int

    def is_within(self, other: Prefix) -> bool:
        """Whether the other prefix has all of its tokens."""
        return self.by == other.by and self.num_generated <= other.num_generated


class SampleBatch(NamedTuple):
    """Samples that can be handed out in one task, since the task says the same of all of them."""

    drawn: int
    """The call that drew them."""
    stopped_by: int
    """The call that their prefixes go by; -1: they have none and begin."""
    ids: list[int]
    had: list[int]
    """Tokens in the prefix of each."""


def prefixes_in(message: m.Flushed | m.Aborted) -> dict[int, Prefix]:
    """Read the prefixes from a worker's report of samples that it has written to the ledger."""
    told = zip(message.ids, message.version_spans, message.num_generated, strict=True)
    return {packed: Prefix(message.call, min((one.version for one in of), default=ANY_VERSION), count) for packed, of, count in told}


def task_batches(ordinal: int, prefixes: Mapping[int, Prefix], rows: Sequence[int], *, carries: bool) -> Iterator[SampleBatch]:
    """Split samples of a call into batches that can be one task each."""
    if not prefixes and not carries:
        yield SampleBatch(ordinal, -1, list(rows), [])
        return
    found: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        by = prefixes[row].by if row in prefixes else -1
        found.setdefault((SampleId.unpack(row).call, by), []).append(row)
    for (drawn, by), together in found.items():
        yield SampleBatch(drawn, by, together, [prefixes[row].num_generated for row in together] if by >= 0 else [])


@final
class Ready:
    """Ready rows of a generation under a policy: each once, in the order of arrival; remembers changes since its reader last asked.

    It stands where a call without a policy has a deque.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()
        self._arrived: list[int] = []
        self.is_disturbed = False
        """Rows left by another way than `take`, or came back: a reader that keeps a list of them must rebuild it."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def extend(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row not in self._rows:
                self._rows[row] = None
                self._arrived.append(row)

    def extendleft(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows[row] = None
            self._rows.move_to_end(row, last=False)
            self.is_disturbed = True

    def come_back(self, row: int) -> None:
        """Put a preempted row back; its reader knows of it."""
        self._rows[row] = None

    def popleft(self) -> int:
        self.is_disturbed = True
        return self._rows.popitem(last=False)[0]

    def clear(self) -> None:
        self._rows.clear()
        self.is_disturbed = True

    def keep(self, rows: Iterable[int]) -> None:
        """Keep these rows and no others."""
        self._rows = OrderedDict.fromkeys(rows)
        self.is_disturbed = True

    def take(self, row: int) -> None:
        """Remove a row that goes to a worker."""
        del self._rows[row]

    def arrived(self) -> list[int]:
        """Return the rows that came since this was last called."""
        found, self._arrived = self._arrived, []
        return found


@dataclass(frozen=True)
class Group:
    """The samples that an update must take together."""

    key: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Groups whose gradients are to be accumulated next."""

    epoch: int
    minibatch: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MinibatchEnd:
    """Every group of the mini-batch was handed out: step the optimiser next."""

    is_last: bool


class UpdateProgress:
    """Tracks one update call from its first micro-batch to its last optimiser step."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        minibatch_size: int | None,
        epochs: int,
        token_budget: int,
        by_identity: bool,
        num_to_come: int = 0,
    ) -> None:
        """
        Args:
            num_to_come: groups that are not known yet; then none is, and each comes with the number of its mini-batch (`grow`).
        """
        num_groups = len(groups) + num_to_come
        size = minibatch_size or max(num_groups, 1)
        self._num_to_come = [min(size, num_to_come - i) for i in range(0, num_to_come, size)]
        """Groups that each mini-batch still gets; empty if all were known from the first."""
        self._epochs = epochs
        self._budget = token_budget
        self._by_identity = by_identity
        self._tokens: dict[int, int] = {}
        self._epoch = 0
        self._minibatch = 0
        self._fails_at: int | None = None
        self.has_begun = False
        """Whether a micro-batch or a step was handed out."""
        self.num_stepped = 0
        """Optimiser steps that are over."""
        self.loss = math.nan
        """Loss of the last one."""
        self._lay_out([list(groups[i : i + size]) for i in range(0, num_groups, size)])

    def _lay_out(self, minibatches: list[list[Group]]) -> None:
        """Set the mini-batches, and begin the first."""
        self._minibatches = minibatches
        self._place = {group.key: (number, group) for number, part in enumerate(minibatches) for group in part}
        self._begin()

    def _begin(self) -> None:
        """Begin the current mini-batch."""
        self._todo = [] if self.is_finished else list(self._minibatches[self._minibatch])
        self._come = [group for group in self._todo if group.key in self._tokens]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)

    def grow(self, group: Group, number: int) -> None:
        """Add a group to a mini-batch of which not all were known."""
        bisect.insort(self._minibatches[number], group, key=_first_of)
        self._num_to_come[number] -= 1
        self._place[group.key] = number, group
        if number == self._minibatch and (self._fails_at is None or group.ids[0] < self._fails_at):
            bisect.insort(self._todo, group, key=_first_of)

    @property
    def _is_short(self) -> bool:
        """Whether the current mini-batch still gets groups that are not known."""
        return bool(self._num_to_come) and self._num_to_come[self._minibatch] > 0

    @property
    def num_steps(self) -> int:
        """Optimiser steps in all."""
        return self._epochs * len(self._minibatches)

    @property
    def is_finished(self) -> bool:
        return self._epoch >= self._epochs or not self._minibatches

    def add(self, key: int, num_tokens: int) -> None:
        """Add a group whose samples and inputs are complete, with its number of tokens."""
        self._tokens[key] = num_tokens
        minibatch, group = self._place.get(key, (-1, None))
        if group is None or minibatch != self._minibatch or self.is_finished:
            return
        if _find(self._todo, group) is not None:
            bisect.insort(self._come, group, key=_first_of)
            self._num_tokens += num_tokens

    def next(self, *, is_idle: bool) -> MicroBatch | MinibatchEnd | None:
        """Choose the next micro-batch or optimiser step; None: wait for more groups.

        Args:
            is_idle: the trainer has nothing else to do.
        """
        if self.is_finished or (not self._todo and (self._fails_at is not None or self._is_short)):
            return None
        if not self._todo:
            is_last = self._epoch == self._epochs - 1 and self._minibatch == len(self._minibatches) - 1
            return MinibatchEnd(is_last)
        chosen = self._choose(is_idle)
        return MicroBatch(self._epoch, self._minibatch, tuple(i for group in chosen for i in group.ids)) if chosen else None

    def fail_at(self, row: int) -> None:
        """Record a failing sample: of the groups that were not handed out only those before it are still tried."""
        self._todo = [group for group in self._todo if group.ids[0] < row]
        self._come = [group for group in self._come if group.ids[0] < row]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)
        self._fails_at = row

    @property
    def has_tried_all(self) -> bool:
        """Whether the update fails, and no group is left or to come that might fail earlier."""
        return self._fails_at is not None and not self._todo and not sum(self._num_to_come)

    def take(self, step: MicroBatch | MinibatchEnd) -> None:
        """Record that the step that `next` chose was handed out."""
        self.has_begun = True
        if isinstance(step, MicroBatch):
            self._take(step)
            return
        self._minibatch += 1
        if self._minibatch == len(self._minibatches):
            self._minibatch, self._epoch = 0, self._epoch + 1
        self._begin()

    def _take(self, step: MicroBatch) -> None:
        """Remove the groups of a micro-batch: the first that have arrived or, by identity, the first of the mini-batch."""
        taken = set(step.ids)
        count = 0
        while count < len(self._come) and self._come[count].ids[0] in taken:
            group = self._come[count]
            place = _find(self._todo, group)
            assert place is not None
            del self._todo[place]
            self._num_tokens -= self._tokens[group.key]
            count += 1
        del self._come[:count]

    def _choose(self, is_idle: bool) -> list[Group]:
        """Choose the first groups that have arrived, up to the token budget; fewer only for the rest, or if the trainer is idle."""
        is_worthwhile = is_idle and not self._by_identity and self._num_tokens * 4 >= self._budget
        is_all = len(self._come) == len(self._todo) and not self._is_short
        if self._num_tokens <= self._budget and not is_all and not is_worthwhile:
            return []
        chosen: list[Group] = []
        filled = 0
        for group, first in zip(self._come, self._todo, strict=False):
            if self._by_identity and group is not first:
                return []
            tokens = self._tokens[group.key]
            if chosen and filled + tokens > self._budget:
                return chosen
            chosen.append(group)
            filled += tokens
        return chosen if (len(chosen) == len(self._todo) and not self._is_short) or is_worthwhile else []


def _first_of(group: Group) -> int:
    return group.ids[0]


def _find(groups: Sequence[Group], group: Group) -> int | None:
    """Find a group's index in a list in the order of identity; None if it is not there."""
    found = bisect.bisect_left(groups, group.ids[0], key=_first_of)
    return found if found < len(groups) and groups[found] is group else None


def progress_of(
    call: Call, stage: Stage, ids: Iterable[int], *, by_identity: bool, is_ungrouped: bool = False, num_to_come: int = 0
) -> UpdateProgress:
    """Create the progress of an update on these samples, or on so many groups to come; ungrouped, each sample is a group."""
    size, epochs = call.options["minibatch_size"], call.options["epochs"]
    assert size is None or isinstance(size, int)
    assert isinstance(epochs, int)
    groups = [Group(key, tuple(rows)) for key, rows in by_group(ids).items()]
    if is_ungrouped:
        most = max((len(group.ids) for group in groups), default=1)
        size = None if size is None else size * most
        groups = [Group(row, (row,)) for group in groups for row in group.ids]
    return UpdateProgress(
        groups, minibatch_size=size, epochs=epochs, token_budget=stage.token_budget, by_identity=by_identity, num_to_come=num_to_come
    )


@dataclass(eq=False)
class Carry:
    """What a call with partial rollouts has taken over, and what it leaves."""

    previous: int | None
    """The call that it has yet to take over from; None if it has done so or there is none."""
    num_late: int = 0
    """Groups that may be late when it ends."""
    oldest: dict[int, int] = field(default_factory=dict)
    """Sample -> oldest version among its tokens, including those being generated."""
    late: tuple[int, ...] = ()
    """Samples that it left unfinished, until they are taken over."""

    def begun(self, rows: Iterable[int], version: int) -> None:
        """Record the version of the weights that are about to generate these samples."""
        for row in rows:
            self.oldest[row] = min(version, self.oldest.get(row, version))

    def finished(self, message: m.Finished) -> None:
        """Record the oldest version of samples that have finished, before or after the call's end."""
        for row, version_spans in zip(message.ids, message.version_spans, strict=True):
            self.oldest[row] = min(version_span.version for version_span in version_spans)

    def requeued(self, rows: Iterable[int], prefixes: Mapping[int, Prefix]) -> None:
        """Reset the versions of samples that no worker has any more: they continue from their prefixes, or begin anew."""
        for row in rows:
            self.oldest.pop(row, None)
            if row in prefixes:
                self.oldest[row] = prefixes[row].oldest


_EVERYTHING = -1


@dataclass(eq=False, slots=True)
class CallState:
    """The rows of one call and what has become of them."""

    call: Call
    stage: Stage
    """How the call is run, without workers that are lost."""
    ids: list[int]
    """Every row that it works on, in the order of identity. Empty until they are known."""
    waits_for: set[int]
    """Calls that must be done before it may start: whole values, and effects."""
    aligned_inputs: tuple[int, ...]
    """Calls whose rows it takes as they come."""
    fails_with: frozenset[int] = frozenset()
    """Calls that write newer versions which it may use but need not wait for: it fails if they fail."""
    is_ungrouped: bool = False
    """The members of a group do not wait for each other (`m2flow.micro.scheduler.state`)."""
    update: UpdateProgress | None = None
    refill: Refill | None = None
    """Shared by the calls of a refill: they work on all candidates, and their result is what it keeps."""
    coming: Coming | None = None
    """Of a call on what an unfinished refill gives: `ids` has what is certain so far."""
    part_of: dict[int, int] = field(default_factory=dict)
    """Row of a union -> the input that gives it.

    Another input may have it too: a late sample that it left to the next call of its line.
    """
    ready: deque[int] | Ready = field(default_factory=deque)
    """Rows of complete units that no task has yet, in the order in which they came."""
    num_begun: int = 0
    """Rows that were handed out."""
    tasks_at: dict[str, int] = field(default_factory=dict)
    """Worker -> number of the call's tasks that it has."""
    num_kept: dict[str, int] = field(default_factory=dict)
    """Worker -> number of rows that it was given since an earlier call of the role made these there."""
    num_moves: dict[int, int] = field(default_factory=dict)
    """Episode -> how often it was stopped where it waited, to go on elsewhere."""
    waits_us: dict[int, int] = field(default_factory=dict)
    """Episode that was stopped so, and is to go on -> how long it had waited for its turn."""
    users: dict[int, CallState] = field(default_factory=dict)
    """Unfinished calls that take its result, in program order."""
    done: set[int] = field(default_factory=set)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each row, of this call's result or, for a call without tokens, of its input's."""
    result: list[int] | None = None
    """The rows of its result, in the order of identity; None until it is known which. They are `ids`, unless the call drops some."""
    dropped: set[int] = field(default_factory=set)
    value: object = None
    """The result of a call that gives one value, once it is done."""
    is_prepared: bool = False
    """Whether `ids` are known; where an input drops rows, that is when the input is done."""
    failure: tuple[int, M2FlowError] | None = None
    """The earliest row that is known to fail, and its error. The call fails with it when all rows before it are done."""
    passed: frozenset[int] = frozenset()
    """Rows that succeeded in a task that failed at a later one."""
    is_done: bool = False
    is_failed: bool = False
    is_over: bool = False
    """Done or failed."""
    is_released: bool = False
    has_restored: bool = False
    """Some of its rows were made by an earlier process of the run."""
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    """Sample of a generation -> the newest tokens that it can continue from."""
    at: dict[tuple[int, str], str] = field(default_factory=dict)
    """(sample of a generation, role that speaks in it) -> the process that was chosen for that last, which may have the context cached."""
    carry: Carry | None = None
    """The carry of a generation with partial rollouts: its late samples continue in the next call of its line."""
    _unsettled: set[int] | None = None
    """Rows before the earliest failure that may still fail."""
    whole_at: str = ""
    """Worker that was given all rows of a call on functions as one task, and so will have the whole result."""
    early: list[int] | None = None
    """Rows that have come since to a call that was handed out whole before its rows came."""
    follows: frozenset[int] = frozenset()
    """Calls that must be over, done or failed, before it may start: they read what it overwrites."""
    planned: Stage = field(init=False)
    """How the call is run, with workers that are lost."""
    suspects: set[int] = field(default_factory=set)
    """Rows that were in flight on a worker when it was lost, or of several groups whose task failed: each is handed out alone."""

    # Of the call, which does not change.
    name: str = field(init=False)
    is_generation: bool = field(init=False)
    is_update: bool = field(init=False)
    is_union: bool = field(init=False)
    """Whether its rows are those of all its inputs; otherwise they are those of the first, which the others have too."""
    drops: bool = field(init=False)
    """Whether it decides itself which of its rows stay."""
    is_cut: bool = field(init=False)
    """Whether it ends before all of its samples do."""

    # Of a generation alone.
    out_at: dict[str, int] = field(init=False)
    """Worker -> number of samples that it has."""
    unsaturated: list[int] = field(init=False)
    """Heap of the places (in the plan) of workers that may take more rows."""
    saturated: set[int] = field(init=False)
    """Places of workers that take no more rows until something of their own changes."""
    given_back: set[str] = field(init=False)
    """Workers that get no more of its samples, since they gave back their devices (`m2flow.micro.scheduler.leases`)."""
    num_whole: int = field(init=False)
    """Groups of an over-sampled generation whose samples are all done."""
    _left_of_group: dict[int, int] = field(init=False)
    _by_prompt: dict[int, tuple[int, ...]] = field(init=False)
    _prompt_of: dict[int, int] = field(init=False)

    # Of other calls, once their rows are known.
    missing: dict[int, int] = field(init=False)
    """Unit -> number of its rows that have yet to come, of all inputs; empty where each row is ready when it comes."""
    units: dict[int, tuple[int, ...]] = field(init=False)
    _unit_by_row: dict[int, int] = field(default_factory=dict)
    _minibatch_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        call = self.call
        self.planned = self.stage
        self.name = call.name
        self.is_generation = call.engine == "rollout"
        self.is_update = call.engine == "train" and call.method == "update"
        gives = call.options.get("gives")
        self.is_union, self.drops = gives == "concat", gives == "kept"
        self.is_cut = self.is_generation and is_cut(call.options)
        if self.is_generation:
            self.out_at, self.unsaturated, self.saturated, self.given_back, self.num_whole = {}, [], set(), set(), 0
            self._left_of_group, self._by_prompt, self._prompt_of = {}, {}, {}

    @property
    def bases(self) -> tuple[int, ...]:
        """The inputs that determine which rows it works on."""
        return self.aligned_inputs if self.is_union else self.aligned_inputs[:1]

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The rows of its result, where timing or a refill decided which of all its rows these are; else None."""
        return tuple(self.result or ()) if self.is_cut or self.call.is_gated else None

    def failed_at(self, row: int, error: M2FlowError, passed: Iterable[int]) -> None:
        """Record that a task failed at this row, after rows that succeeded. Rows after it need not be tried any more."""
        self.passed = self.passed.union(passed)
        if self.failure is None or row < self.failure[0]:
            self.failure = (row, error)
            self._keep([ready for ready in self.ready if ready < row])
            self._unsettled = {before for before in self.ids if before < row} - self.done - self.dropped
        if self._unsettled is not None:
            self._unsettled -= self.passed

    def turned_out(self, done: Iterable[int], dropped: Iterable[int]) -> None:
        """Record rows that are done, and rows that the call dropped."""
        self.done.update(done)
        self.dropped.update(dropped)
        if self.is_generation and self._left_of_group:
            for row in done:
                key = group_key(row)
                self._left_of_group[key] -= 1
                self.num_whole += not self._left_of_group[key]
        if self._unsettled:
            self._unsettled.difference_update(done)
            self._unsettled.difference_update(dropped)

    def unfinished(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows that are neither done nor dropped."""
        return [row for row in rows if row not in self.done and row not in self.dropped]

    @property
    def has_settled(self) -> bool:
        """Whether no row in flight can fail before the earliest failure."""
        return self.failure is not None and not self._unsettled and self.coming is None

    @property
    def has_all_rows(self) -> bool:
        """Whether a call that gives rows has them all."""
        return self.call.is_aligned and self.coming is None and len(self.done) + len(self.dropped) == len(self.ids)

    @property
    def gives_refill(self) -> bool:
        """Whether its result is that of a refill, and its candidates are known."""
        return self.refill is not None and self.drops and self.is_prepared

    @property
    def takes_groups(self) -> bool:
        """Whether it takes samples or groups as they come, and needs not know how many it gets."""
        if self.is_update:
            return not self.is_ungrouped
        is_plain = self.call.is_aligned and not (self.call.writes or self.call.is_gated or self.is_union or self.is_generation)
        return is_plain and not self.stage.is_barrier and self.stage.unit in ("sample", "group")

    @property
    def is_under_policy(self) -> bool:
        """Whether a scheduling policy decides where its samples run, and when."""
        return isinstance(self.ready, Ready)

    @property
    def num_may_begin(self) -> int:
        """Number of ready samples that may be handed out; in a refill no more than it allows by now."""
        if self.refill is None:
            return len(self.ready)
        return self.refill.num_allowed * self.num_per_prompt - (len(self.ids) - len(self.ready))

    @property
    def num_per_prompt(self) -> int:
        n = self.call.options.get("n", 1)
        assert isinstance(n, int)
        return n

    @property
    def num_groups(self) -> int:
        """Number of groups of an over-sampled generation."""
        return len(self._left_of_group)

    @property
    def share(self) -> int:
        """Most samples of a generation on one worker: its even share of those that are not done."""
        allowed = len(self.ids) if self.refill is None else self.refill.num_allowed * self.num_per_prompt
        return math.ceil((allowed - len(self.done)) / max(len(self.stage.workers) - len(self.given_back), 1))

    @property
    def has_rows_to_begin(self) -> bool:
        """Whether samples of a generation can be handed out now."""
        return bool(self.ready) and not self.waits_for and not self.is_over and self.num_may_begin > 0

    @property
    def has_all_but_rows(self) -> bool:
        """Whether a call on functions, of which no row has come or begun, waits for nothing but its rows."""
        is_free = not (self.waits_for or self.follows or self.is_over or self.failure)
        return (
            is_free and self.is_prepared and self.coming is None and len(self.ids) > 0 and not (self.ready or self.done or self.num_begun)
        )

    @property
    def has_function_work(self) -> bool:
        """Whether rows of a call on functions can be handed out now."""
        if self.waits_for or self.follows:
            return False
        if not self.ids and not self.call.is_aligned:  # A call on no rows is run too, once.
            return self.is_prepared and not self.tasks_at
        # What a barrier's task reported of its rows before its worker was lost stays; the rest go together again.
        num_left = len(self.ids) - len(self.done) - len(self.dropped) if self.stage.is_barrier else 1
        return len(self.ready) >= num_left > 0

    @property
    def is_all_begun(self) -> bool:
        """Whether every sample of a generation was handed out; of a refill that is known only at its end."""
        may_grow = self.refill is not None or (self.carry is not None and self.carry.previous is not None)
        return self.is_prepared and not may_grow and self.num_begun >= len(self.ids)

    def take(self, count: int) -> list[int]:
        """Take the next ready rows, for a task."""
        if count < len(self.ready):
            rows = [self.ready.popleft() for _ in range(count)]
        else:
            rows = list(self.ready)
            self.ready.clear()
        self.num_begun += len(rows)
        return rows

    def take_these(self, rows: Sequence[int]) -> list[int]:
        """Take some of the ready rows, for a task."""
        for row in rows:
            self.ready.take(row) if isinstance(self.ready, Ready) else self.ready.remove(row)
        self.num_begun += len(rows)
        return list(rows)

    def take_early(self) -> list[int]:
        """Take all rows before they have come, for a task that waits for them."""
        self.early, self.num_begun = [], len(self.ids)
        return list(self.ids)

    def have_come(self, rows: list[int]) -> list[int]:
        """Filter the rows of a lost task to those that have come, and can be handed out again."""
        if self.early is None:
            return rows
        came, self.early = set(self.early), None
        found = [row for row in rows if row in came]
        self.num_begun -= len(rows) - len(found)
        return found

    def requeue(self, rows: Sequence[int]) -> None:
        """Put rows that a task had back to the front."""
        self.ready.extendleft(reversed(rows))
        self.num_begun -= len(rows)

    def arrived(self, source: int, ids: Iterable[int], num_tokens: Mapping[int, int]) -> bool:
        """Record rows of one aligned input; return whether a task may take some now. Rows that the call does not work on are ignored."""
        if not self.is_prepared:
            return False
        if self.is_union:
            self._offer([row for row in ids if self.part_of.get(row) == source])
            return bool(self.ready)
        if self.is_generation:
            for row in ids:
                # A refill judges groups, and an over-sampled generation makes groups, that are not in its result.
                self._offer(self._by_prompt.get(row, ()))
            return bool(self.ready)
        units, tokens, missing = self._unit_by_row, self.num_tokens, self.missing
        if not missing:
            self._offer([row for row in ids if row in units])
            return bool(self.ready)
        has_more, is_packed = False, self.call.engine == "train"
        for row in ids:
            unit = units.get(row)
            if unit is None:
                continue
            if is_packed:  # Packing needs them; a function's rows are counted by its worker.
                tokens[row] = max(num_tokens.get(row, 0), tokens.get(row, 0))
            missing[unit] -= 1
            if missing[unit] == 0:
                self._complete(unit)
                has_more = True
        return has_more

    def _complete(self, unit: int) -> None:
        rows = self.units[unit]
        if self.update is not None:
            self.update.add(unit, sum(self.num_tokens[row] for row in rows))
        else:
            self._offer(rows)

    def restored(self, rows: Iterable[int]) -> None:
        """Mark rows that the ledger has: they are not handed out."""
        there = set(rows)
        self.has_restored = True
        self._keep([row for row in self.ready if row not in there])
        self.num_begun += len(there)

    def gave_up(self, rows: Iterable[int]) -> None:
        """Drop late samples: they are not handed out."""
        late = set(rows)
        left = [row for row in self.ready if row not in late]
        self.num_begun += len(self.ready) - len(left)
        self._keep(left)
        self.turned_out((), late)

    def _offer(self, rows: Iterable[int]) -> None:
        if self.has_restored or (self.dropped and self.is_generation):
            rows = [row for row in rows if row not in self.done and row not in self.dropped]
        if self.early is not None:
            self.early += rows
            return
        self.ready.extend(rows if self.failure is None else [row for row in rows if row < self.failure[0]])

    @property
    def _waits_in_units(self) -> bool:
        """Whether rows wait until all of their unit have come, of all inputs, or to be packed; else each is ready when it comes."""
        is_by_sample = self.stage.unit == "sample" and not self.is_update
        has_one_input = self.is_union or len(self.aligned_inputs) == 1
        return not (is_by_sample and has_one_input) or self.call.engine == "train"

    def _unit_of(self, row: int) -> int:
        if self.is_update or self.stage.unit == "group":
            return row if self.is_ungrouped else group_key(row)
        if self.stage.unit == "minibatch":
            return self._minibatch_of[group_key(row)]
        return row if self.stage.unit == "sample" else _EVERYTHING

    def _minibatches(self, ids: Sequence[int]) -> dict[int, int]:
        """Assign groups to mini-batches by identity: the first `minibatch_size` groups are the first one."""
        size = self.call.options["minibatch_size"]
        assert isinstance(size, int)
        return {key: place // size for place, key in enumerate(sorted(by_group(ids)))}

    def unit_of(self, row: int) -> int:
        """Return the unit that a row belongs to."""
        return self._unit_by_row[row]

    def prepare(self, ids: list[int], prompts: Sequence[int]) -> None:
        """Set the rows of the call: build its units or, for a generation, map rows to prompts."""
        self.ids, self.is_prepared = ids, True
        if not self.drops and self.refill is None and not self.is_cut and self.coming is None:
            self.result = ids
        if self.is_generation:
            n = len(self.ids) // max(len(prompts), 1)
            self._by_prompt = {p: tuple(self.ids[k * n : k * n + n]) for k, p in enumerate(prompts)}
            self._prompt_of = {row: p for p, rows in self._by_prompt.items() for row in rows}
            if self.is_cut:
                self._count_groups()
            return
        num_inputs = 1 if self.is_union else len(self.aligned_inputs)
        if self.stage.unit == "sample" and not self.is_update:
            self._unit_by_row = dict(zip(ids, ids, strict=True))
            self.missing = {}
            if self._waits_in_units:
                self.units = {row: (row,) for row in ids}
                self.missing = dict.fromkeys(ids, num_inputs)
            return
        if self.stage.unit == "minibatch" and not self.is_update:
            self._minibatch_of = self._minibatches(ids)
        if self.stage.unit == "batch" and not self.is_update:
            self._unit_by_row, self.units = dict.fromkeys(ids, _EVERYTHING), {_EVERYTHING: tuple(ids)} if ids else {}
        else:
            self._unit_by_row = {row: self._unit_of(row) for row in ids}
            units: dict[int, list[int]] = {}
            for row, unit in self._unit_by_row.items():
                units.setdefault(unit, []).append(row)
            self.units = {unit: tuple(rows) for unit, rows in units.items()}
        self.missing = {unit: len(rows) * num_inputs for unit, rows in self.units.items()}

    def grow(self, rows: Sequence[int]) -> None:
        """Add rows that have become certain, whole groups of a call that takes samples or groups (`Coming`)."""
        for row in rows:
            bisect.insort(self.ids, row)
            unit = self._unit_by_row[row] = self._unit_of(row)
            if self._waits_in_units:
                self.units[unit] = (*self.units.get(unit, ()), row)
                self.missing[unit] = self.missing.get(unit, 0) + len(self.aligned_inputs)
        if self.failure is not None and self._unsettled is not None:
            self._unsettled.update(row for row in rows if row < self.failure[0])

    def close(self) -> None:
        """Note that no more rows come."""
        self.coming = None
        if not self.drops:
            self.result = self.ids

    def take_over(self, late: Iterable[int], waiting: Sequence[int], finished: Sequence[int]) -> None:
        """Add samples that an earlier generation left: those still to be generated go first, the others have finished."""
        self.ids = sorted((*late, *self.ids))
        self.ready.extendleft(reversed(waiting))
        self.done.update(finished)
        self.num_begun += len(finished)
        self._count_groups()

    def _count_groups(self) -> None:
        """Count what each group of an over-sampled generation still lacks."""
        groups = by_group(self.ids)
        self._left_of_group = {key: len(rows) - len(self.done.intersection(rows)) for key, rows in groups.items()}
        self.num_whole = sum(1 for left in self._left_of_group.values() if not left)

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep only these of the ready rows."""
        if isinstance(self.ready, Ready):
            self.ready.keep(rows)
        else:
            self.ready = deque(rows)

    @property
    def prompt_rows(self) -> Iterable[int]:
        """Rows of the prompts of a generation's own samples."""
        return self._by_prompt

    def prompt_of(self, row: int) -> int:
        """Return the prompt row of a sample; -1 for a sample that an earlier call drew."""
        return self._prompt_of.get(row, -1)

    def prompts_of(self, rows: Iterable[int]) -> list[int]:
        return [self._prompt_of[row] for row in rows]
