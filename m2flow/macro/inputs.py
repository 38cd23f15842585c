"""What a role is, and what the calls of roles may be given.

A `Wanted` says which handles fit an input. Whether the numbers behind a handle are of the right shape is seen where they are used
(`m2flow.micro.training`): a trace has no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Rows, describe
from m2flow.macro.session import current_session
from m2flow.recipe import AdamW, is_count
from m2flow.samples import Batch


@dataclass(frozen=True)
class Wanted:
    """What an input of a call must be."""

    what: str
    fit: Callable[[Rows], bool]
    now: str


def _has_target(rows: Rows) -> bool:
    held = rows.call.options.get("rows")
    return isinstance(held, Batch) and "target" in held


def _has_samples(rows: Rows) -> bool:
    """Whether whole samples are there: generated ones, or what a filter, a union or new columns made of some."""
    return rows.column is None and (rows.call.engine == "rollout" or rows.call.options.get("gives") in ("kept", "concat", "rows"))


ROWS = Wanted("responses", lambda rows: True, "Responses come from policy.generate(...).")
PROMPTS = Wanted(
    "prompts",
    lambda rows: rows.column is None and rows.maker.engine in ("source", "rollout"),
    "Prompts come from a Dataset: prompts=dataset.take(32).",
)
RESPONSES = Wanted(
    "responses, or rows with a 'target'",
    lambda rows: _has_samples(rows) or _has_target(rows),
    "Responses come from policy.generate(...), demonstrations from a Dataset whose rows have a 'target'.",
)
REWARDS = Wanted(
    "rewards", lambda rows: rows.column is not None, "Rewards are one number a sample: Reward(function).score(responses), or made from it."
)
REFERENCE = Wanted(
    "a reference", lambda rows: rows.column is not None, "Pass a Reference, or log-probabilities such as its logprobs(responses)."
)
NUMBERS = Wanted(
    "numbers of each sample",
    lambda rows: rows.column is not None,
    "Pass what a call computed from the responses: one number a sample, or one a token.",
)


class Role:
    """What all roles share: a name in the flow, and the session that they belong to."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._session = current_session(f"{kind}({name!r})")

    @property
    def _weights(self) -> str:
        """The resource that calls of a role with a model read and write."""
        return f"{self.name}.weights"

    def _rows(self, handle: object, method: str, wants: Wanted) -> Ref:
        """A handle as an input of one of this role's calls, if it has the rows that the call wants."""
        return self._column(handle, method, wants)[0]

    def _column(self, handle: object, method: str, wants: Wanted) -> tuple[Ref, str]:
        """The same, with the column of its rows that counts; empty for whole samples."""
        if not isinstance(handle, Rows) or not wants.fit(handle):
            raise TraceError(f"{self.name}.{method} needs {wants.what}, and got {describe(handle)}", now=wants.now)
        return handle.check(self._session, f"{self.name}.{method}"), handle.column or ""


def token_logprobs(role: Role, responses: Handle) -> Rows:
    """The log-probabilities of the responses' tokens under a role's weights as they are now."""
    return _of_tokens(role, responses, "logprobs", "reference_logprobs")


def _of_tokens(role: Role, responses: Handle, method: str, column: str) -> Rows:
    call = role._session.record(
        role=role.name,
        method=method,
        engine="train",
        granularity=Granularity.SAMPLE,
        inputs={"samples": role._rows(responses, method, RESPONSES)},
        options={},
        shown={},
        reads=(role._weights,),
    )
    rows = Rows(role._session, call)
    rows.column = column
    return rows


def check_passes(minibatch_size: int | None, epochs: int, optimizer: AdamW | None) -> None:
    """What every update may be given. Raises `OptionError`."""
    if not (minibatch_size is None or is_count(minibatch_size)) or not is_count(epochs):
        raise OptionError(f"minibatch_size is {minibatch_size!r} and epochs is {epochs!r}; both are whole numbers, 1 or more")
    if not isinstance(optimizer, AdamW | None):
        raise OptionError(f"optimizer={optimizer!r:.60} is no optimizer", now="Pass AdamW(lr=...).")
