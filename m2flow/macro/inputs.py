"""What a role is, and what the calls of roles may be given.

A `Wanted` says which handles fit an input. Whether the numbers behind a handle are of the right shape is seen where they are used
(`m2flow.micro.work.training`): a trace has no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Metrics, Rows, describe
from m2flow.macro.late import windows
from m2flow.macro.session import current_session
from m2flow.macro.sites import user_site
from m2flow.macro.soundness import check_update
from m2flow.recipe import COMPUTED, HEAD_OUTPUTS, AdamW, Loss, check_count, check_flag, check_text
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
        check_text("name", name)
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

    def _common(self, responses: Handle, *others: object) -> Handle:
        """The responses, less those that a filter of what goes with them has dropped."""
        for other in others:
            if isinstance(responses, Rows) and isinstance(other, Rows):
                responses = responses.within(other)
        return responses

    def _copy(self, source: str, head: Literal["lm", "value"]) -> None:
        """Take the weights that a policy has at this line, as far as a model with this head has them too. A reference may be made of the
        same policy again: the role has the newer weights then, and only the newer object stands for it."""
        session, site = self._session, user_site()
        before, model = session.copies.get(self.name), replace(session.models[source], head=head, is_policy=False)
        if before is None or before[1] != source or head != "lm" or session.models[self.name] != model:
            session.add_model(self.name, model, is_copy=True)
        session.copies[self.name] = (self, source, site)
        session.record(
            role=self.name,
            method="copy_of",
            engine="train",
            granularity=Granularity.BATCH,
            inputs={},
            options={"source": source},
            shown={"source": source},
            reads=(f"{source}.weights",) if before is None else (f"{source}.weights", self._weights),
            writes=(self._weights,),
            is_aligned=False,
        )

    def _check_is_newest(self) -> None:
        """Raises TraceError: another object has this role's name by now, and the role has its weights."""
        newest = self._session.copies.get(self.name)
        if newest is not None and newest[0] is not self:
            raise TraceError(
                f"the {self.name!r} that is used here was made anew at {newest[2]}, and its weights were replaced there",
                now=f"Use the new one. To keep both, give each a name: Reference(policy, name='{self.name}_2').",
            )

    def _of_tokens(self, responses: Handle, method: str, column: str) -> Rows:
        """What the role's model, with its weights as they are at this line, says of each token of the responses."""
        call = self._session.record(
            role=self.name,
            method=method,
            engine="train",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, method, RESPONSES)},
            options={},
            shown={},
            reads=(self._weights,),
        )
        return Rows(self._session, call, column, tokens_of=responses if isinstance(responses, Rows) else None)

    def _train(self, samples: Ref, given: Mapping[str, tuple[Ref, str]], passes: Passes, **options: object) -> Metrics:
        """Record an update on these samples, with the columns that come from other calls."""
        self._check_needs(samples, passes.loss, given)
        shown: dict[str, object] = {"loss": passes.loss.name}
        shown |= {"advantages": options["advantages"]} if options.get("advantages") else {}
        shown |= {"minibatch_size": passes.minibatch_size} if passes.minibatch_size is not None else {}
        shown |= {"epochs": passes.epochs} if passes.epochs != 1 else {}
        shown |= {"allow_unsound": True} if passes.allow_unsound else {}
        origins = [call for call in self._session.origins(samples.call) if call.engine == "rollout"]
        if not passes.allow_unsound:
            own = [call for call in origins if call.role == self.name]
            check_update(
                passes.loss,
                own,
                name=self.name,
                version=self._session.version(self._weights),
                epochs=passes.epochs,
                minibatch_size=passes.minibatch_size,
            )
        optimizer, position = self._scheduled(passes.optimizer)
        call = self._session.record(
            role=self.name,
            method="update",
            engine="train",
            granularity=Granularity.MINIBATCH if passes.minibatch_size else Granularity.BATCH,
            inputs={"samples": samples, **{name: ref for name, (ref, _) in given.items()}},
            options={
                "advantages": None,
                "columns": {name: column for name, (_, column) in given.items()},
                "loss": passes.loss,
                "optimizer": optimizer,
                "minibatch_size": passes.minibatch_size,
                "epochs": passes.epochs,
                "windows": windows(origins),
                **position,
                **options,
            },
            shown=shown,
            reads=(self._weights,),
            writes=(self._weights,),
            is_aligned=False,
        )
        return Metrics(self._session, call)

    def _scheduled(self, optimizer: AdamW) -> tuple[AdamW, dict[str, object]]:
        """The optimiser as it is in the flow's loop, and the option that says where in the loop the update is."""
        if not optimizer.counts_flow_steps:
            return optimizer, {}
        if self._session.loop is None:
            raise TraceError(
                f"the schedule of {self.name}.update goes by the flow's steps, and the update is in no loop over steps(...)",
                now="Give AdamW(...) total_steps, which then counts the optimiser's steps.",
            )
        step, num_steps = self._session.loop
        return optimizer.in_loop(num_steps), {"loop_step": step}

    def _check_needs(self, samples: Ref, loss: Loss, given: Mapping[str, tuple[Ref, str]]) -> None:
        """Refuse a loss that needs what neither the model, nor the samples, nor this update have, as far as that is known."""
        head = self._session.models[self.name].head
        foreign = HEAD_OUTPUTS["value" if head == "lm" else "lm"]
        fields = self._session.lineage.known(samples.call).fields
        for need in loss.needs:
            if need in foreign:
                whose = "a language model's, and this is a critic" if head == "value" else "a critic's: Critic(...).update"
                raise TraceError(f"the loss {loss.name} needs {need!r}, which are {whose}")
            is_given = need in given or need in COMPUTED or need in ("advantages", "reference_logprobs")
            if not is_given and fields is not None and need not in fields:
                raise TraceError(
                    f"the loss {loss.name} needs {need!r}, which neither the samples nor this {self.name}.update have; the samples have "
                    f"{', '.join(sorted(fields))}",
                    now=f"Pass it: update(..., columns={{{need!r}: ...}}), one number a sample or one a token.",
                )


def check_optimizer(optimizer: object) -> None:
    """Raises `OptionError`: it is none."""
    if not isinstance(optimizer, AdamW):
        raise OptionError(f"optimizer={optimizer!r:.60} is no optimizer", now="Pass AdamW(lr=...).")


@dataclass(frozen=True)
class Passes:
    """What an update minimises, and in how many steps over its samples. Raises `OptionError` for what is none."""

    loss: Loss
    optimizer: AdamW
    minibatch_size: int | None
    epochs: int
    allow_unsound: bool = False

    def __post_init__(self) -> None:
        if self.minibatch_size is not None:
            check_count("minibatch_size", self.minibatch_size)
        check_count("epochs", self.epochs)
        check_flag("allow_unsound", self.allow_unsound)
        if not isinstance(self.loss, Loss):
            raise OptionError(f"loss={self.loss!r:.60} is no loss", now="Pass ppo_clip(), nll(), or a function under @loss(...).")
        check_optimizer(self.optimizer)
