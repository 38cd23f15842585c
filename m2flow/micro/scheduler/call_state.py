"""The state of a call: which of its units have all their inputs, which rows are done, and which micro-batch of an update is next.

Flushed, Aborted (a worker) -> CallState.prefixes -> Generate(aborted_by=..., had=...), and the row, from who has it

A running sample is written down now and then, and one that is stopped always; what was written down last is its prefix here. A sample
that has one, and comes to be handed out (again), goes on from there, on whatever worker: the one that had it is gone, or its call is over
and the next of its line has taken it over. Its tokens are within its call's window of versions, and so are those that come, since it is
handed out only where a version of the window is held: an older one perhaps, if who had it is gone and others are behind. The rows of
prefixes go by the call that they were made for (`m2flow.micro.protocol.row_store.stopped_at`), and of each sample only the newest
counts. Pure
bookkeeping.

It stands where a call without a policy has a deque, and remembers what has changed since its reader last asked.

Membership of a mini-batch goes by identity and is fixed before the first sample is there. Within it, micro-batches are filled with
whole groups: those that have come in, or, where the order of summation must not depend on arrival, the next ones in identity
order, cut by the same rule as `m2flow.micro.lowering.passes.cut`. Pure: it is told what is ready and answers what to do.

A unit is the smallest set of rows that a task of the call may have: a sample, a group, or everything. It is ready when each of its
rows has come in from each aligned input. Pure bookkeeping; the decisions are the scheduler's.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call, Effect
from m2flow.macro.oversampling import is_cut
from m2flow.macro.refill import Refill
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.scheduler.partial_rollouts import Carry
from m2flow.samples import SampleId, by_group, group_key

if TYPE_CHECKING:
    from m2flow.micro.scheduler.policy_dispatch import PolicyDispatch


class Prefix(NamedTuple):
    """The tokens that a sample can go on from."""

    by: int
    """The call that it was generated for when it had got them."""
    oldest: int
    """Version among them."""
    num_generated: int

    def is_within(self, other: Prefix) -> bool:
        """Whether the other has all of its tokens."""
        return self.by == other.by and self.num_generated <= other.num_generated


class SampleBatch(NamedTuple):
    """Samples that can be handed out in one task."""

    drawn: int
    """The call that drew them."""
    stopped_by: int
    """The call that their prefixes go by; -1: they begin."""
    ids: list[int]
    had: list[int]


def prefixes_in(message: m.Flushed | m.Aborted) -> dict[int, Prefix]:
    """What a worker says of samples that it has written down."""
    told = zip(message.ids, message.stretches, message.num_generated, strict=True)
    return {packed: Prefix(message.call, min(stretch.version for stretch in of), count) for packed, of, count in told}


def task_batches(ordinal: int, prefixes: Mapping[int, Prefix], rows: Sequence[int], *, carries: bool) -> Iterator[SampleBatch]:
    """Samples of a call, by what a task must say of them."""
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
    """Rows, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()
        self._arrived: list[int] = []
        self.is_disturbed = False
        """Rows went by another way than `take`, or came back: whoever keeps a list of them must make it anew."""

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
        """One that a worker had; whoever keeps a list knows of it."""
        self._rows[row] = None

    def popleft(self) -> int:
        self.is_disturbed = True
        return self._rows.popitem(last=False)[0]

    def clear(self) -> None:
        self._rows.clear()
        self.is_disturbed = True

    def keep(self, rows: Iterable[int]) -> None:
        """These and no others."""
        self._rows = OrderedDict.fromkeys(rows)
        self.is_disturbed = True

    def take(self, row: int) -> None:
        """This one goes to a worker."""
        del self._rows[row]

    def arrived(self) -> list[int]:
        """Rows that came since this was last asked."""
        found, self._arrived = self._arrived, []
        return found


@dataclass(frozen=True)
class Group:
    """The samples that an update must have together."""

    key: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Groups to add up next."""

    epoch: int
    minibatch: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MinibatchEnd:
    """Every group of the mini-batch was handed out: step the optimiser."""

    is_last: bool


class UpdateProgress:
    """One update call from its first micro-batch to its last optimiser step."""

    def __init__(self, groups: Sequence[Group], *, minibatch_size: int | None, epochs: int, token_budget: int, by_identity: bool) -> None:
        size = minibatch_size or max(len(groups), 1)
        self._epochs = epochs
        self._budget = token_budget
        self._by_identity = by_identity
        self._tokens: dict[int, int] = {}
        self._epoch = 0
        self._minibatch = 0
        self._is_failing = False
        self.has_begun = False
        """Something of it was handed out."""
        self._lay_out([list(groups[i : i + size]) for i in range(0, len(groups), size)])

    def _lay_out(self, minibatches: list[list[Group]]) -> None:
        """These are the mini-batches, and the first is to be done."""
        self._minibatches = minibatches
        self._place = {group.key: (number, place) for number, part in enumerate(minibatches) for place, group in enumerate(part)}
        self._begin()

    def _begin(self) -> None:
        """Nothing of the mini-batch is handed out."""
        self._todo = [] if self.is_finished else list(self._minibatches[self._minibatch])
        self._come = [group for group in self._todo if group.key in self._tokens]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)

    @property
    def is_finished(self) -> bool:
        return self._epoch >= self._epochs or not self._minibatches

    def add(self, key: int, num_tokens: int) -> None:
        """A group is complete, with its inputs; it has this many tokens."""
        self._tokens[key] = num_tokens
        minibatch, place = self._place.get(key, (-1, 0))
        if minibatch != self._minibatch or self.is_finished:
            return
        group = self._minibatches[minibatch][place]
        if _find(self._todo, group, self._place) is not None:
            bisect.insort(self._come, group, key=lambda group: self._place[group.key])
            self._num_tokens += num_tokens

    def next(self, *, is_idle: bool) -> MicroBatch | MinibatchEnd | None:
        """What to do now; None: wait for more groups. `is_idle` says that the trainer has nothing else to do."""
        if self.is_finished:
            return None
        if self.has_tried_all:
            return None
        if not self._todo:
            is_last = self._epoch == self._epochs - 1 and self._minibatch == len(self._minibatches) - 1
            return MinibatchEnd(is_last)
        chosen = self._choose(is_idle)
        return MicroBatch(self._epoch, self._minibatch, tuple(i for group in chosen for i in group.ids)) if chosen else None

    def fail_at(self, row: int) -> None:
        """A sample of the mini-batch fails: of the groups that were not handed out only those before it are still tried."""
        self._todo = [group for group in self._todo if group.ids[0] < row]
        self._come = [group for group in self._come if group.ids[0] < row]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)
        self._is_failing = True

    @property
    def has_tried_all(self) -> bool:
        """It fails, and no group is left that might do so earlier."""
        return self._is_failing and not self._todo

    def take(self, step: MicroBatch | MinibatchEnd) -> None:
        """What `next` answered is being done."""
        self.has_begun = True
        if isinstance(step, MicroBatch):
            self._take(step)
            return
        self._minibatch += 1
        if self._minibatch == len(self._minibatches):
            self._minibatch, self._epoch = 0, self._epoch + 1
        self._begin()

    def _take(self, step: MicroBatch) -> None:
        """What is handed out are the first that have come; by identity, the first at all."""
        taken = set(step.ids)
        count = 0
        while count < len(self._come) and self._come[count].ids[0] in taken:
            group = self._come[count]
            place = _find(self._todo, group, self._place)
            assert place is not None
            del self._todo[place]
            self._num_tokens -= self._tokens[group.key]
            count += 1
        del self._come[:count]

    def _choose(self, is_idle: bool) -> list[Group]:
        """Groups up to the budget, the first that have come; fewer only if they are the rest, or the trainer is idle."""
        is_worthwhile = is_idle and not self._by_identity and self._num_tokens * 4 >= self._budget
        if self._num_tokens <= self._budget and len(self._come) < len(self._todo) and not is_worthwhile:
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
        return chosen if len(chosen) == len(self._todo) or is_worthwhile else []


def _find(groups: Sequence[Group], group: Group, place: Mapping[int, tuple[int, int]]) -> int | None:
    """Where a group is in a list that is in order of place."""
    found = bisect.bisect_left(groups, place[group.key], key=lambda group: place[group.key])
    return found if found < len(groups) and groups[found] is group else None


def progress_of(call: Call, stage: Stage, ids: Iterable[int], *, by_identity: bool, is_ungrouped: bool = False) -> UpdateProgress:
    """That of an update on these samples; ungrouped, each of them is a group."""
    size, epochs = call.options["minibatch_size"], call.options["epochs"]
    assert size is None or isinstance(size, int)
    assert isinstance(epochs, int)
    groups = [Group(key, tuple(rows)) for key, rows in by_group(ids).items()]
    if is_ungrouped:
        most = max((len(group.ids) for group in groups), default=1)
        size = None if size is None else size * most
        groups = [Group(row, (row,)) for group in groups for row in group.ids]
    return UpdateProgress(groups, minibatch_size=size, epochs=epochs, token_budget=stage.token_budget, by_identity=by_identity)


_EVERYTHING = -1


@dataclass(eq=False)
class CallState:
    """One call under way."""

    call: Call
    stage: Stage
    """Without the workers that are lost."""
    ids: list[int]
    """Every row that it works on, in the order of identity. Empty until they are known."""
    waits_for: set[int]
    """Calls that must be done before it may start: whole values, and effects."""
    aligned_inputs: tuple[int, ...]
    """Calls whose rows it takes as they come."""
    fails_with: frozenset[int] = frozenset()
    """Calls that write a version which it may do without, though sequential execution has it: it starts without them."""
    is_ungrouped: bool = False
    """The members of a group do not wait for each other (`m2flow.micro.scheduler.state`)."""
    update: UpdateProgress | None = None
    refill: Refill | None = None
    """Shared by the calls of a refill; they work on all candidates, and give what it keeps."""
    part_of: dict[int, int] = field(default_factory=dict)
    """Of a union: by row, the input that gives it. Another one may have it too: a late sample that it left to the next of its line."""
    ready: deque[int] | Ready = field(default_factory=deque)
    """Rows of complete units that no task has yet, in the order in which they came."""
    num_begun: int = 0
    """Rows that a task has or had."""
    tasks_at: dict[str, int] = field(default_factory=dict)
    """Worker -> tasks of the call that it has."""
    users: dict[int, CallState] = field(default_factory=dict)
    """Calls, not over, that take its result, in program order."""
    done: set[int] = field(default_factory=set)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each row, of this call's result or, for a call without tokens, of its input's."""
    result: list[int] | None = None
    """The rows of its result, in the order of identity; None until it is known which. They are `ids`, unless the call drops some."""
    dropped: set[int] = field(default_factory=set)
    value: object = None
    """Of a call that gives one value, once it is done."""
    is_prepared: bool = False
    """Whether `ids` are known: those of an input that drops rows are, when it is done."""
    failure: tuple[int, M2FlowError] | None = None
    """The earliest row that is known to fail. The call fails with it when all rows before it have turned out well."""
    passed: frozenset[int] = frozenset()
    """Rows that turned out well in a task that failed at a later one."""
    is_done: bool = False
    is_failed: bool = False
    is_over: bool = False
    """Done or failed."""
    is_released: bool = False
    policy_dispatch: PolicyDispatch | None = None
    """Of a generation that goes by a policy."""
    has_restored: bool = False
    """Some of its rows were made by an earlier process of the run."""
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    """Of a generation: the tokens that its samples could go on from last."""
    carry: Carry | None = None
    """Of a generation whose late samples go on in the next call of its line."""
    _unsettled: set[int] | None = None
    """Rows before the earliest failure that may still fail."""
    whole_at: str = ""
    """Of a call on functions: the worker that was given all its rows as one task, and will have all that comes of them."""
    early: list[int] | None = None
    """Of one that was handed out before its rows came, all of it: those that have come since."""
    follows: frozenset[int] = frozenset()
    """Calls that must be over, well or not, before it may start: they read what it overwrites."""
    _unit_by_row: dict[int, int] = field(default_factory=dict)

    # Of a generation alone.
    out_at: dict[str, int] = field(init=False)
    """Worker -> samples that it has."""
    unsaturated: list[int] = field(init=False)
    """Places of workers that may still want rows: a heap."""
    saturated: set[int] = field(init=False)
    """Places of those that want none, as they are now."""
    num_passing: int = 0
    """Workers that get no more of it (`m2flow.micro.scheduler.gpu_borrowing`)."""
    num_whole: int = field(init=False)
    """If it is cut: groups of which all samples are done."""

    def __post_init__(self) -> None:
        self.planned = self.stage
        """With the workers that are lost."""
        self.suspects: set[int] = set()
        """Rows that were with a worker when it was lost: they are handed out by themselves."""
        self.is_generation = self.call.engine == "rollout"
        self.is_update = self.call.engine == "train" and self.call.method == "update"
        self.is_union = self.call.options.get("gives") == "concat"
        """Its rows are those of all its inputs; else they are those of the first, and the others have these too."""
        if self.is_generation:
            self.out_at, self.unsaturated, self.saturated, self.num_whole = {}, [], set(), 0
            self._left_of_group: dict[int, int] = {}
            self._by_prompt: dict[int, tuple[int, ...]] = {}
            self._prompt_of: dict[int, int] = {}

    @property
    def bases(self) -> tuple[int, ...]:
        """The inputs that say which rows it works on."""
        return self.aligned_inputs if self.is_union else self.aligned_inputs[:1]

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The rows of its result, where time or a refill decided which of those that it was to make they are."""
        return tuple(self.result or ()) if self.call.is_gated or (self.is_generation and is_cut(self.call.options)) else None

    def failed_at(self, row: int, error: M2FlowError, passed: Iterable[int]) -> None:
        """A task failed at this row, after others that were well. What comes after the row need not be tried any more."""
        self.passed = self.passed.union(passed)
        if self.failure is None or row < self.failure[0]:
            self.failure = (row, error)
            self._keep([ready for ready in self.ready if ready < row])
            self._unsettled = {before for before in self.ids if before < row} - self.done - self.dropped
        if self._unsettled is not None:
            self._unsettled -= self.passed

    def turned_out(self, done: Iterable[int], dropped: Iterable[int]) -> None:
        """These rows are done, and these the call dropped."""
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

    @property
    def has_settled(self) -> bool:
        """Whether nothing that is still under way can fail before the earliest failure."""
        return self.failure is not None and not self._unsettled

    @property
    def num_may_begin(self) -> int:
        """Of the rows of a generation that are ready, those that may be handed out: of a refill as many as it allows by now."""
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
        """Of a generation that is cut."""
        return len(self._left_of_group)

    @property
    def share(self) -> int:
        """Samples of a generation that a worker has at most: its even part of those that are not done."""
        allowed = len(self.ids) if self.refill is None else self.refill.num_allowed * self.num_per_prompt
        return math.ceil((allowed - len(self.done)) / max(len(self.stage.workers) - self.num_passing, 1))

    @property
    def has_rows_to_begin(self) -> bool:
        """Whether rows of a generation can be handed out now."""
        return bool(self.ready) and not self.waits_for and not self.is_over and self.num_may_begin > 0

    @property
    def has_all_but_rows(self) -> bool:
        """Whether a call on functions that nobody has begun needs nothing more than its rows, of which none has come."""
        is_free = not (self.waits_for or self.follows or self.is_over or self.failure)
        return is_free and self.is_prepared and len(self.ids) > 0 and not (self.ready or self.done or self.num_begun)

    @property
    def has_function_work(self) -> bool:
        """Whether something of a call on functions can be handed out now."""
        if self.waits_for or self.follows:
            return False
        if not self.ids and not self.call.is_aligned:  # Nothing to work on is worked on too, once.
            return self.is_prepared and not self.tasks_at
        return len(self.ready) == len(self.ids) > 0 if self.stage.is_barrier else bool(self.ready)

    @property
    def is_all_begun(self) -> bool:
        """Whether no worker will get more samples of a generation. Of a refill that is known at its end."""
        may_grow = self.refill is not None or (self.carry is not None and self.carry.previous is not None)
        return self.is_prepared and not may_grow and self.num_begun >= len(self.ids)

    def take(self, count: int) -> list[int]:
        """The next rows, for a task."""
        rows = [self.ready.popleft() for _ in range(min(count, len(self.ready)))]
        self.num_begun += len(rows)
        return rows

    def take_early(self) -> list[int]:
        """All rows, for a task that waits for them."""
        self.early, self.num_begun = [], len(self.ids)
        return list(self.ids)

    def have_come(self, rows: list[int]) -> list[int]:
        """Of rows that a task had and will not do, those that can be handed out by now."""
        if self.early is None:
            return rows
        came, self.early = set(self.early), None
        found = [row for row in rows if row in came]
        self.num_begun -= len(rows) - len(found)
        return found

    def requeue(self, rows: Sequence[int]) -> None:
        """Rows that a task had, and did not begin with."""
        self.ready.extendleft(reversed(rows))
        self.num_begun -= len(rows)

    def arrived(self, source: int, ids: Iterable[int], num_tokens: Mapping[int, int]) -> bool:
        """These rows of one aligned input are there; whether a task may have more now. Rows that it does not work on don't matter."""
        if not self.is_prepared:
            return False
        if self.is_union:
            self._offer([row for row in ids if self.part_of.get(row) == source])
            return bool(self.ready)
        if self.is_generation:
            for row in ids:
                # A refill's last call has judged some groups that it does not give; an over-sampled generation has made some.
                self._offer(self._by_prompt.get(row, ()))
            return bool(self.ready)
        units, tokens, missing = self._unit_by_row, self.num_tokens, self.missing
        if not missing:
            self._offer([row for row in ids if row in units])
            return bool(self.ready)
        has_more = False
        for row in ids:
            unit = units.get(row)
            if unit is None:
                continue
            if self.call.engine == "train":  # The packing goes by them; of a function's rows its worker says how many there are.
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
        """These rows will not be handed out: the ledger has them."""
        there = set(rows)
        self.has_restored = True
        self._keep([row for row in self.ready if row not in there])
        self.num_begun += len(there)

    def gave_up(self, rows: Iterable[int]) -> None:
        """These samples are late, and will not be handed out."""
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

    def _unit_of(self, row: int) -> int:
        if self.is_update or self.stage.unit == "group":
            return row if self.is_ungrouped else group_key(row)
        if self.stage.unit == "minibatch":
            return self._minibatch_of[group_key(row)]
        return row if self.stage.unit == "sample" else _EVERYTHING

    def _minibatches(self, ids: Sequence[int]) -> dict[int, int]:
        """Group -> its mini-batch, by identity: the first `minibatch_size` groups are the first one."""
        size = self.call.options["minibatch_size"]
        assert isinstance(size, int)
        return {key: place // size for place, key in enumerate(sorted(by_group(ids)))}

    def unit_of(self, row: int) -> int:
        """The unit that one of its rows belongs to."""
        return self._unit_by_row[row]

    def prepare(self, ids: list[int], prompts: Sequence[int]) -> None:
        """The rows are known: set up the units, and for a generation which rows come from which prompt."""
        self.ids, self.is_prepared = ids, True
        if not self.call.drops and self.refill is None and not (self.is_generation and is_cut(self.call.options)):
            self.result = ids
        if self.is_generation:
            n = len(self.ids) // max(len(prompts), 1)
            self._by_prompt = {p: tuple(self.ids[k * n : k * n + n]) for k, p in enumerate(prompts)}
            self._prompt_of = {row: p for p, rows in self._by_prompt.items() for row in rows}
            if is_cut(self.call.options):
                self._count_groups()
            return
        num_inputs = 1 if self.is_union else len(self.aligned_inputs)
        if self.stage.unit == "sample" and not self.is_update:
            self._unit_by_row = dict(zip(ids, ids, strict=True))
            self.missing: dict[int, int] = {}
            if num_inputs > 1 or self.call.engine == "train":  # Else each row is ready when it comes.
                self.units: dict[int, tuple[int, ...]] = {row: (row,) for row in ids}
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

    def take_over(self, late: Iterable[int], waiting: Sequence[int], finished: Sequence[int]) -> None:
        """Samples that an earlier generation left are this one's: those that wait for a task come first, others have finished."""
        self.ids = sorted((*late, *self.ids))
        self.ready.extendleft(reversed(waiting))
        self.done.update(finished)
        self.num_begun += len(finished)
        self._count_groups()

    def _count_groups(self) -> None:
        """Of a generation that is cut: what each group still lacks."""
        groups = by_group(self.ids)
        self._left_of_group = {key: len(rows) - len(self.done.intersection(rows)) for key, rows in groups.items()}
        self.num_whole = sum(1 for left in self._left_of_group.values() if not left)

    # A worker is lost (`m2flow.micro.scheduler.worker_failure`)

    def _keep(self, rows: Sequence[int]) -> None:
        """Of the rows that are ready, these."""
        if isinstance(self.ready, Ready):
            self.ready.keep(rows)
        else:
            self.ready = deque(rows)

    @property
    def prompt_rows(self) -> Iterable[int]:
        """Of a generation's own samples."""
        return self._by_prompt

    def prompt_of(self, row: int) -> int:
        """The row of the prompts that a sample answers; -1 for one that an earlier call drew."""
        return self._prompt_of.get(row, -1)

    def prompts_of(self, rows: Iterable[int]) -> list[int]:
        return [self._prompt_of[row] for row in rows]


@final
class Versions:
    """Calls are added in program order."""

    def __init__(self, restored: Mapping[str, int]) -> None:
        self._writers: dict[str, dict[int, int]] = {}
        """Resource -> version, in order -> the call that writes it, unless that is done and a newer one is known."""
        self._readers: dict[str, dict[int, CallState]] = {}
        """Resource -> calls, not over, that read it, in program order."""
        self._trained = dict(restored)
        """Role -> the newest version that is there; at first what its trainer was restored to."""
        self._known = dict(restored)
        """Role -> the version that the calls added so far come to."""
        self._replacing: set[str] = set()

    def written_for(self, call: Call) -> tuple[list[int], list[int]]:
        """Who writes what a call reads: the oldest versions that will do, and newer ones that it may do without.

        Whoever writes a version has read the one before, so it does not end, or fails, without those who wrote the older ones.
        """
        needed: list[int] = []
        newer: list[int] = []
        for effect in call.reads:
            writers = self._writers.get(effect.resource)
            if writers:
                first = effect.first
                if first in writers:
                    needed.append(writers[first])
                newer += [writers[version] for version in range(first + 1, effect.version + 1) if version in writers]
        return needed, newer

    def add(self, state: CallState, is_done: Callable[[int], bool]) -> None:
        """Take in what a call reads and writes."""
        for effect in state.call.reads:
            self._readers.setdefault(effect.resource, {})[state.call.ordinal] = state
        for effect in state.call.writes:
            if state.call.engine == "train":
                self._known[state.call.role] = effect.version
            known = self._writers.setdefault(effect.resource, {})
            while known and is_done(known[oldest := next(iter(known))]):
                del known[oldest]
            known[effect.version] = state.call.ordinal

    def over(self, state: CallState) -> None:
        """A call is over, well or not: nobody has to wait for its reads."""
        for effect in state.call.reads:
            self._readers[effect.resource].pop(state.call.ordinal, None)

    def done(self, call: Call) -> None:
        """A call is done: what it trained is the newest version."""
        if call.engine == "train":
            for effect in call.writes:
                self._trained[call.role] = effect.version
            self._replacing.discard(call.role)

    def known(self) -> dict[str, int]:
        """What the calls added so far come to, of each role that is trained or copied to."""
        return dict(self._known)

    def newest(self, role: str) -> int:
        """The role's newest version that is there."""
        return self._trained.get(role, 0)

    def behind(self, call: Call) -> int:
        """How many versions a generation's newest one is ahead of those that are there."""
        return max(call.reads[0].version - self.newest(call.role), 0) if call.reads else 0

    def trained(self, role: str) -> int | None:
        """The version that the role's trainer holds; None between the first optimiser step of an update and its last."""
        return None if role in self._replacing else self.newest(role)

    def replace_weights(self, role: str) -> None:
        """An optimiser step was given out: the trainer's weights are no version until the update is done."""
        self._replacing.add(role)

    def reads_before(self, call: Call) -> Iterator[CallState]:
        """Earlier calls, not over, that read a version which this call replaces."""
        for effect in call.writes:
            for state in self._readers.get(effect.resource, {}).values():
                if state.call.ordinal >= call.ordinal:
                    break
                if Effect(effect.resource, effect.version - 1) in state.call.reads:
                    yield state
