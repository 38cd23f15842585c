"""Small programs as data, and the flow that each of them is: what random tests of schedules run, planned and eager.

    Program --as_flow--> Flow --run_planned, run_eager--> two Answers --difference--> nothing, or where they differ

A statement names what it works on by counting back (`samples=0` are the newest samples, `1` those before), modulo what there is, and
does nothing where there is nothing. So every program is legal, however it was drawn or shrunk. What a program may still get wrong is
what users get wrong: a reward that raises, a refill that finds too few groups. Strategies that draw programs: `random_programs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from m2flow.macro.flow import Flow
from m2flow.testing.account import Account

# Statements. Whole numbers that name a role, a dataset or a result are taken modulo what there is.


@dataclass(frozen=True)
class Generate:
    """Responses to rows of a dataset, or to samples that are there already."""

    policy: int
    source: Literal["take", "all", "samples"]
    which: int
    """The dataset, or the samples."""
    count: int
    n: int
    longest: int
    more: int = 0
    """Of prompts that are taken: so many beyond those that are needed. The late ones are dropped."""
    carries: bool = False
    """What is late goes on in the next such call of the policy instead, where older weights are allowed."""
    defers: bool = False
    """The late prompts wait for a long round instead, and the dataset itself is drawn from."""
    keeps: bool = False
    """Weights may change under running samples, where older ones are allowed."""
    is_exact: bool = False
    """It asks for the weights of its line, whatever the staleness of the flow."""


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling."""

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
    """The mean of what a policy, with its weights as they are here, says of each token."""

    policy: int
    samples: int


@dataclass(frozen=True)
class Values:
    """The mean of what the critic, with its weights as they are here, says of each token."""

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
    """A call of a role of the user's own, whose state lives on a worker."""

    role: int
    how: Literal["note", "digest", "compare", "forget", "plain"]
    samples: int


@dataclass(frozen=True)
class Post:
    """An op that writes to a place outside of which both a later one and a digest read, or that digest."""

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
    """A policy on samples, with rewards or with advantages that were computed."""

    policy: int
    samples: int
    numbers: int
    minibatch: int
    """0: all."""
    epochs: int
    form: Literal["rewards", "advantages", "reference"]


@dataclass(frozen=True)
class Demonstrate:
    """A policy on demonstrations."""

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
    """Look at the metrics of some steps ago, and branch on them: the first body if there are none, or they are odd."""

    metrics: int
    steps: int
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class OnStep:
    """Every second step."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Repeat:
    """A loop inside a step. With `until` it ends when a value that it looks at is odd."""

    times: int
    body: tuple[Statement, ...]
    until: bool


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
    | Leave
)


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
    """One of its rewards, ops and keeps raises on some samples."""
    staleness: int = 0

    def as_flow(self, account: Account | None = None) -> Flow:
        """The flow; what it counts for itself while it runs goes into the account."""
        from m2flow.testing.interpreter import Interpreter  # it knows programs, which need not know it

        def program() -> None:
            Interpreter(self, account or Account()).run()

        return Flow(program, self.staleness)

    def statements(self) -> Iterator[Statement]:
        """All of them, those in bodies too."""
        todo = [*self.before, *self.body, *self.after]
        while todo:
            statement = todo.pop()
            yield statement
            for body in ("body", "then", "otherwise"):
                todo += getattr(statement, body, ())
