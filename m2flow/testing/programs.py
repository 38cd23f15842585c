"""Define small programs as data, and the flow of each, for random tests that compare planned and eager runs.

    Program --program_calls.as_flow--> Flow --run_planned, run_eager--> two Answers --difference--> nothing, or where they differ
    Interpreter --generated, updated, lagged--> Account --wrong--> nothing, or what is not as the program says

A statement names its operands by counting back (`samples=0` are the newest samples, `1` those before), modulo their number, and does
nothing where there are none. So every program is legal, however it was drawn or shrunk. What can still go wrong is what goes wrong for
users: a reward that raises, a refill that finds too few groups. Strategies that draw programs are in `random_programs`.

`Account` is a check that planned and eager runs do not share: the session stamps calls with versions and finds the calls of earlier steps,
and if it counted wrongly, both kinds of run would agree. So a program counts the updates of each policy by step from its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.micro.protocol.staleness import Decision, Decisions
from m2flow.micro.records.segments import Place, read_segment
from m2flow.observe.spans import SpanBlock
from m2flow.samples import Batch, SampleId

# ---- answers


@dataclass
class Answer:
    """The result of a run: everything that must not depend on the plan."""

    samples: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Identity -> token ids, versions."""
    details: dict[int, tuple[object, ...]] = field(default_factory=dict)
    """Identity -> what else its row says: log-probabilities, loss mask, and of an episode its turns, rewards and cause of failure."""
    rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    """(call, sample) -> reward."""
    parts: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    """(call, sample) -> the parts of its reward, where the function returns them."""
    consumed: list[tuple[int, int, int]] = field(default_factory=list)
    """(update call, epoch, sample), sorted."""
    logs: list[tuple[int, str, float]] = field(default_factory=list)
    decisions: dict[int, Decision] = field(default_factory=dict)
    """Sample -> the call that gave it and the versions that made its tokens, where that depended on time."""
    weights: dict[str, str] = field(default_factory=dict)
    """Role -> digest of its trained weights."""
    error: str = ""
    """The error that the flow ended with."""
    where: str = ""
    """The line that the error names, and the calls that led to it."""

    def forget(self, failed: Collection[int]) -> None:
        """Drop the results of failed calls, whose number depends on the plan; keep the decisions, which the eager run needs."""
        self.samples = {packed: one for packed, one in self.samples.items() if SampleId.unpack(packed).call not in failed}
        self.details = {packed: one for packed, one in self.details.items() if packed in self.samples}
        self.rewards = {key: one for key, one in self.rewards.items() if key[0] not in failed}
        self.parts = {key: one for key, one in self.parts.items() if key[0] not in failed}

    def generated(self, rows: Batch) -> None:
        """Add samples."""
        self.samples |= samples_of(rows)
        self.details |= _details_of(rows)

    def rewarded(self, call: int, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]]) -> None:
        """Add the rewards that a call gave to samples; `parts` is empty where none of them has any."""
        self.rewards.update(((call, packed), value) for packed, value in zip(ids, values, strict=True))
        self.parts.update(((call, packed), of) for packed, of in zip(ids, parts, strict=False) if of)


def samples_of(rows: Batch) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Map sample identities to token ids and versions."""
    tokens, versions = rows.ragged("tokens"), rows.ragged("versions")
    return {packed: (tuple(tokens.row(i).tolist()), tuple(versions.row(i).tolist())) for i, packed in enumerate(rows.ids.tolist())}


def _details_of(rows: Batch) -> dict[int, tuple[object, ...]]:
    logprobs, masks = rows.ragged("logprobs"), rows.ragged("loss_mask")
    found: dict[int, tuple[object, ...]] = {
        packed: (logprobs.row(i).tobytes(), masks.row(i).tobytes()) for i, packed in enumerate(rows.ids.tolist())
    }
    if "episode" in rows.columns:
        failures, records = rows.ragged("failure"), rows.ragged("episode")
        for i, packed in enumerate(found):
            record: Any = records.item(i)
            rewarded = [record.get(name) for name in ("rewards", "rewarded", "parts")]
            found[packed] += (failures.item(i), repr(rows.dense("reward")[i]), repr(record["turns"]), repr(rewarded))
    return found


class AnswerJournal:
    """Collect the records of an eager run as an `Answer`: an `EagerJournal` of `m2flow.micro.worker.eager_executor`."""

    def __init__(self, run_dir: Path) -> None:
        self.answer = Answer()
        self.failed: set[int] = set()
        """Failed calls, and the calls of failed refills."""
        self._run_dir = run_dir

    def call_added(self, call: Call) -> None:
        pass

    def samples_done(
        self,
        call: Call,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        finish: Sequence[int],
        place: Place,
        example: Sequence[str],
    ) -> None:
        self.answer.generated(read_segment(self._run_dir / "segments", place))

    def rewarded(self, call: Call, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]] = ()) -> None:
        self.answer.rewarded(call.ordinal, ids, values, parts)

    def decided(self, call: Call, decisions: Decisions) -> None:
        self.answer.decisions.update(decisions)

    def late(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def given(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None:
        self.answer.consumed += [(call.ordinal, epoch, packed) for packed in ids]

    def filtered(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def call_done(self, call: Call, value: object) -> None:
        pass

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        self.failed.update((*call.under_refill, call.ordinal))

    def logged(self, step: int, name: str, value: float) -> None:
        self.answer.logs.append((step, name, value))

    def step_done(self, step: int) -> None:
        pass

    def spans(self, block: SpanBlock) -> None:
        pass


# ---- the program's own account of versions


@dataclass
class Account:
    """Versions and updates of one run, counted from the program's text; each run begins anew."""

    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Generate call -> the oldest and the newest version that it may use."""
    lags: list[tuple[int | None, object]] = field(default_factory=list)
    """Looks at an earlier step's metrics, in program order: the update that they should be of (None: none), and their value."""
    caught: list[str] = field(default_factory=list)
    """Errors that the program caught, in program order."""
    _updates: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(policy, step) -> its updates there."""
    _place_of: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Update -> policy, step, number of that policy's updates before it in the step."""
    _num_updates: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _lines: dict[int, str] = field(default_factory=dict)
    """Generate call that carries late samples over -> the policy, whose next such call continues them."""

    def begin(self) -> None:
        """Reset for a run of the program."""
        for kept in (self.windows, self.lags, self.caught, self._updates, self._place_of, self._num_updates, self._before, self._lines):
            kept.clear()

    def loop_begins(self) -> None:
        """Record the updates before the loop: calls in the loop use no version from before them."""
        self._before = dict(self._num_updates)

    def generated(self, policy: str, call: int, staleness: int, *, carries: bool = False, speakers: Sequence[str] = ()) -> None:
        if carries:
            self._lines[call] = policy
        windows = []
        for name in (policy, *speakers):
            newest = self._num_updates.get(name, 0)
            windows.append((max(newest - staleness, min(self._before.get(name, 0), newest)), newest))
        self.windows[call] = min(oldest for oldest, _ in windows), max(newest for _, newest in windows)

    def updated(self, policy: str, call: int, step: int) -> None:
        self._num_updates[policy] = self._num_updates.get(policy, 0) + 1
        there = self._updates.setdefault((policy, step), [])
        self._place_of[call] = policy, step, len(there)
        there.append(call)

    def lagged(self, call: int, steps: int, seen: object) -> None:
        """Record what the program saw of the metrics of the update `steps` steps before this one."""
        policy, step, place = self._place_of[call]
        there = self._updates.get((policy, step - steps), []) if step >= steps else []
        self.lags.append((there[place] if step >= 0 and place < len(there) else None, seen))

    def wrong(self, answer: Answer, value: Callable[[int], object] | None = None) -> str | None:
        """Describe what in an answer contradicts the program's text, or return None.

        With `value`, the results of calls, looks at earlier steps are checked too.
        """
        for packed, (_, versions) in answer.samples.items():
            decision = answer.decisions.get(packed)
            drawn = SampleId.unpack(packed).call
            giver = drawn if decision is None else decision.call
            if giver != drawn and (giver < drawn or self._lines.get(giver) is None or self._lines.get(giver) != self._lines.get(drawn)):
                return f"a sample of call {drawn} was given by call {giver}, which does not carry its line on"
            oldest, newest = self.windows[giver]
            used = {version for version in versions if version >= 0}
            if used and not (oldest <= min(used) and max(used) <= newest):
                return f"a sample of call {giver} has tokens of versions {used}, and may have {oldest} to {newest}"
        for expected, seen in self.lags:
            if (expected is None) != (seen is None) or (value is not None and expected is not None and seen != value(expected)):
                return f"lagged gave {seen}, which is not what call {expected} came to"
        return None


# ---- statements; integers that name a role, a dataset or a result are taken modulo their number


@dataclass(frozen=True)
class Generate:
    """Generate responses to rows of a dataset, or to existing samples."""

    policy: int
    source: Literal["take", "all", "samples"]
    which: int
    """Which dataset, or which samples."""
    count: int
    n: int
    longest: int
    more: int = 0
    """Oversampling: this many prompts more than are needed. The late ones are dropped."""
    carries: bool = False
    """Partial rollouts: late samples continue in the policy's next such call instead, where older weights are allowed."""
    defers: bool = False
    """Tail batching: late prompts wait for a long round instead, and the dataset itself is drawn from."""
    keeps: bool = False
    """Weights may change under running samples, where older weights are allowed."""
    is_exact: bool = False
    """Uses the weights of its line exactly, whatever the staleness of the flow."""


@dataclass(frozen=True)
class Refill:
    """Generate until enough groups pass a filter (dynamic sampling)."""

    policy: int
    dataset: int
    n: int
    count: int
    reward: int
    keep: int
    most: int


@dataclass(frozen=True)
class Score:
    reward: int
    samples: int


@dataclass(frozen=True)
class ApplyOp:
    unit: Literal["sample", "group", "minibatch", "batch"]
    samples: int


@dataclass(frozen=True)
class Logprobs:
    """Mean of the log-probabilities of tokens under a policy's weights at this line."""

    policy: int
    samples: int


@dataclass(frozen=True)
class Values:
    """Mean of the critic's values of tokens under its weights at this line."""

    samples: int


@dataclass(frozen=True)
class Mix:
    """An op of several inputs: samples, numbers of theirs, one whole value, a constant."""

    unit: Literal["sample", "group", "batch"]
    samples: int
    first: int
    second: int
    value: int


@dataclass(frozen=True)
class Ask:
    """A call of a user's role, whose state lives on a worker."""

    role: int
    how: Literal["note", "digest", "compare", "forget", "plain"]
    samples: int


@dataclass(frozen=True)
class Post:
    """An op that writes to state outside of the program, or the digest that reads it."""

    is_read: bool
    samples: int


@dataclass(frozen=True)
class Combine:
    """Numbers of two calls, on samples of which one may be filtered from the other's; or of numbers and one value."""

    how: Literal["weighted", "centred", "of group", "of key", "where"]
    first: int
    second: int


@dataclass(frozen=True)
class Filter:
    how: Literal["numbers", "lengths", "samples", "groups", "none"]
    samples: int


@dataclass(frozen=True)
class Union:
    first: int
    second: int


@dataclass(frozen=True)
class Update:
    """An update of a policy on samples, with rewards or with computed advantages."""

    policy: int
    samples: int
    numbers: int
    minibatch: int
    """0: all samples."""
    epochs: int
    form: Literal["rewards", "advantages", "reference"]


@dataclass(frozen=True)
class Demonstrate:
    """An update of a policy on demonstrations."""

    policy: int
    minibatch: int


@dataclass(frozen=True)
class Actor:
    """A critic's values, GAE, and an update of both."""

    policy: int
    samples: int
    numbers: int


@dataclass(frozen=True)
class Log:
    which: int


@dataclass(frozen=True)
class Look:
    """Wait for a value, and branch on it."""

    what: Literal["mean", "metric", "len", "value", "rows", "cursor"]
    which: int
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class Lag:
    """Wait for the metrics of some steps ago and branch on them: the first body if there are none, or they are odd."""

    metrics: int
    steps: int
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class OnStep:
    """A body that runs in every second step."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Repeat:
    """A loop inside a step. With `until` it ends when a value that it waits for is odd."""

    times: int
    body: tuple[Statement, ...]
    until: bool


@dataclass(frozen=True)
class Try:
    """`try` around a body and a look at a value: an error of a user's function or of a dataset is caught, and the flow goes on."""

    body: tuple[Statement, ...]
    what: Literal["mean", "metric", "len", "value", "rows", "cursor"]
    which: int
    otherwise: tuple[Statement, ...]
    """The body of the `except`."""
    drops: bool = False
    """Whether the program forgets what the body made when it catches an error, so that no later call needs what failed."""


@dataclass(frozen=True)
class Refer:
    """A reference made of a policy as it is at this line, anew if there is one of that name."""

    policy: int
    place: int
    """Which of the references to the policy."""


@dataclass(frozen=True)
class Compare:
    """Mean of the log-probabilities of tokens under the latest reference."""

    samples: int


@dataclass(frozen=True)
class Rollout:
    """Episodes of an agent that does these acts."""

    policy: int
    dataset: int
    count: int
    n: int
    agent: tuple[Act, ...]
    longest: int = 90
    """Tokens of a conversation."""
    max_turns: int = 8
    failed: Literal["mask", "zero", "raise"] = "mask"
    returns: Literal["number", "parts", "named", "broken"] = "number"
    """What the agent returns: its reward, with parts, one for each conversation, or on some rows no number."""
    speaks: bool = False
    """Whether another policy of the program may speak, if there is one."""
    reads: bool = False
    """Whether calls are read from what the model says, by a parser of the agent's own."""


@dataclass(frozen=True)
class Leave:
    """`break` or `continue` of the loop over steps."""

    how: Literal["break", "continue"]


Statement = (
    Generate
    | Refill
    | Score
    | ApplyOp
    | Logprobs
    | Values
    | Mix
    | Ask
    | Post
    | Combine
    | Filter
    | Union
    | Update
    | Demonstrate
    | Actor
    | Log
    | Look
    | Lag
    | OnStep
    | Repeat
    | Try
    | Refer
    | Compare
    | Rollout
    | Leave
)


# ---- what agents do; a conversation is taken modulo the number of those that the act may use


@dataclass(frozen=True)
class Say:
    """Say something, and have the model answer."""

    chat: int
    what: Literal["row", "random", "heard", "messages"]
    longest: int
    stops: bool = False
    offers: bool = False
    """Whether the model is given the tools."""


@dataclass(frozen=True)
class Use:
    """A call of a tool."""

    tool: int
    wait: int = 0
    """Milliseconds that it takes, if it does not fail."""
    fits: bool = True
    """Whether its arguments are those that the tool takes."""


@dataclass(frozen=True)
class Work:
    """Call tools at once, and have the model go on with what they gave, or keep it from the model."""

    chat: int
    uses: tuple[Use, ...]
    longest: int
    is_told: bool = True


@dataclass(frozen=True)
class Follow:
    """Run the calls of the model's turns, as long as it makes any."""

    chat: int
    longest: int


@dataclass(frozen=True)
class Branch:
    """Go on by what was heard, or by a random number."""

    on: Literal["text", "tokens", "cut", "result", "random"]
    then: tuple[Act, ...]
    otherwise: tuple[Act, ...]


@dataclass(frozen=True)
class Times:
    times: int
    body: tuple[Act, ...]


@dataclass(frozen=True)
class Gather:
    """Do two things at once, each in a conversation of its own."""

    chat: int
    apart: Literal["forked", "begun", "spoken"]
    """Both go on from one conversation, begin a new one, or the second begins one in which another policy speaks."""
    first: tuple[Act, ...]
    second: tuple[Act, ...]


@dataclass(frozen=True)
class Attempt:
    """Catch what goes wrong, and do something else."""

    body: tuple[Act, ...]
    otherwise: tuple[Act, ...]


@dataclass(frozen=True)
class Fail:
    how: Literal["raises", "fails", "times out", "is cancelled", "exits"]


@dataclass(frozen=True)
class Pause:
    wait: int
    """Milliseconds."""


Act = Say | Work | Follow | Branch | Times | Gather | Attempt | Fail | Pause


@dataclass(frozen=True)
class Program:
    """A whole program."""

    num_policies: int
    num_steps: int
    """0: no loop over steps."""
    before: tuple[Statement, ...]
    body: tuple[Statement, ...]
    after: tuple[Statement, ...] = ()
    fails: bool = False
    """Whether one of its rewards, ops or keeps raises on some samples."""
    staleness: int = 0

    def statements(self) -> Iterator[Statement]:
        """Return all statements, including those in bodies."""
        todo = [*self.before, *self.body, *self.after]
        while todo:
            statement = todo.pop()
            yield statement
            for body in ("body", "then", "otherwise"):
                todo += getattr(statement, body, ())
