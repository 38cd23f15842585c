"""Models that say a number: a Critic for each token, a RewardModel for a whole response; and what a critic is for, `gae`.

values = critic.values(responses)
estimate = gae(rewards, values, lam=0.95)
policy.update(responses, rewards, advantages=estimate.advantages)
critic.update(responses, returns=estimate.returns, old_values=values)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.handles import Handle, Metrics, Rows, Scores, describe
from m2flow.macro.inputs import NUMBERS, RESPONSES, REWARDS, ROWS, Passes, Role, Wanted, check_optimizer
from m2flow.macro.losses import clipped_value
from m2flow.macro.roles import Policy
from m2flow.macro.session import Session, current_session
from m2flow.recipe import AdamW, Loss, Model, check_number, model_path
from m2flow.samples import Batch


class Critic(Role):
    """A model with a value head: what it expects, before each token, of the reward that is still to come.

    Args:
        model: a path as `Policy` takes, whose head starts at zero unless it has one; or a policy, whose body as it is at this line is
            copied.
        init: `random` draws the weights instead of loading them.
        optimizer: for `update` calls that bring none.
    """

    def __init__(
        self,
        model: Policy | str | Path,
        *,
        name: str = "critic",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
        optimizer: AdamW | None = None,
    ) -> None:
        super().__init__(name, "Critic")
        self.optimizer = AdamW() if optimizer is None else optimizer
        check_optimizer(self.optimizer)
        if isinstance(model, Policy):
            self._copy(model.name, "value")
        else:
            self._session.add_model(name, Model(model_path(model), init, self._session.seed, dtype, chat, head="value", is_policy=False))

    def values(self, responses: Handle) -> Rows:
        """What is expected before each token of the responses: a ragged row a response, in the unit of the reward, 0 for the prompt."""
        return self._of_tokens(responses, "values", "values")

    def update(
        self,
        responses: Handle,
        *,
        returns: Handle,
        old_values: Handle | None = None,
        clip: float = 0.2,
        loss: Loss | None = None,
        optimizer: AdamW | None = None,
        minibatch_size: int | None = None,
        epochs: int = 1,
    ) -> Metrics:
        """Move the values towards the returns; later lines see the new weights.

        Args:
            returns: what the values should have been: one number a token, or one a response.
            old_values: the values that the returns were estimated with. With them, no value is rewarded for moving further than `clip`.
            loss: `clipped_value(clip=clip)` by default; it may need `values`, `returns` and `old_values`.
            minibatch_size, epochs: as `Policy.update`.
        Returns:
            means over the call: `loss`, `value`, `value_error`, `value_clipped` (with old values), `grad_norm`.
        """
        check_number("clip", clip, low=0)
        loss = clipped_value(clip=clip if old_values is not None else 0.0) if loss is None else loss
        passes = Passes(loss, self.optimizer if optimizer is None else optimizer, minibatch_size, epochs)
        if "old_values" in loss.needs and old_values is None:
            raise TraceError(f"the loss {loss.name} needs old_values", now="Pass the values that the returns were estimated with.")
        samples = self._rows(self._common(responses, returns, old_values), "update", RESPONSES)
        given = {"returns": self._column(returns, "update", NUMBERS)}
        if old_values is not None:
            given["old_values"] = self._column(old_values, "update", NUMBERS)
        return self._train(samples, given, passes)


class RewardModel(Role):
    """A model that scores a whole response: a Hugging Face sequence-classification model with one label.

    Args:
        model: its directory. It reads prompt and response as texts, by its own tokenizer.
        chat: put them through the tokenizer's chat template, as a user's message and the assistant's; otherwise an end-of-sequence
            token follows the response.
        init: `random` draws the weights instead of loading them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "reward_model",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
    ) -> None:
        super().__init__(name, "RewardModel")
        self._session.add_model(
            name, Model(model_path(model), init, self._session.seed, dtype, chat, head="score", is_policy=False, is_frozen=True)
        )

    def score(self, responses: Handle) -> Scores:
        """One number for each response."""
        call = self._session.record(
            role=self.name,
            method="score",
            engine="train",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, "score", ROWS)},
            options={},
            shown={},
            reads=(self._weights,),
        )
        return Scores(self._session, call)


def gae(responses: Handle, rewards: Handle, values: Handle, *, kl: Handle | None = None, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """Advantages and returns of every generated token, from rewards and a critic's values.

    Args:
        rewards: one number a response, which its last token gets, or one a token.
        values: what `critic.values(responses)` gave.
        kl: a penalty for each token, taken off its reward: `0.05 * (responses.logprobs - reference.logprobs(responses))`.
        gamma: discount of a token. lam: 0 trusts the values alone, 1 the rewards alone.
    Source:
        Schulman et al. 2016, arXiv:1506.02438. The equations are at `m2flow.algorithms.gae.gae`; the penalty in the reward is that of
        Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    session = current_session("gae()")
    for name, value in (("gamma", gamma), ("lam", lam)):
        check_number(name, value, low=0, high=1)
    given = {"rewards": (rewards, REWARDS), "values": (values, NUMBERS)} | ({"penalties": (kl, NUMBERS)} if kl is not None else {})
    inputs, columns = {"samples": _fitting(responses, "responses", RESPONSES).check(session, "gae")}, {}
    for name, (handle, wants) in given.items():
        rows = _fitting(handle, "kl" if name == "penalties" else name, wants)
        inputs[name], columns[name] = rows.check(session, "gae"), rows.column or ""
    call = session.record(
        role="gae",
        method="",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs=inputs,
        options={
            "function": _Columns("m2flow.algorithms.gae", "gae_rows", (("gamma", float(gamma)), ("lam", float(lam)))),
            "style": "columns",
            "gives": "rows",
            "columns": columns,
            "fields": frozenset({"advantages", "returns"}),
            "timeout_s": None,
        },
        shown={"gamma": gamma, "lam": lam},
    )
    return Estimate(session, call, responses)


class Estimate(Handle):
    """What `gae` gives: `advantages` and `returns`, each a ragged row a response, aligned with its tokens."""

    def __init__(self, session: Session, call: Call, responses: Handle) -> None:
        super().__init__(session, call)
        self._responses = responses if isinstance(responses, Rows) else None

    @property
    def advantages(self) -> Rows:
        return Rows(self._session, self._call, "advantages", owner=self, tokens_of=self._responses)

    @property
    def returns(self) -> Rows:
        return Rows(self._session, self._call, "returns", owner=self, tokens_of=self._responses)


@dataclass(frozen=True)
class _Columns:
    """A function on columns by its name: what it computes with is loaded by the worker that runs it."""

    module: str
    name: str
    options: tuple[tuple[str, float], ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> object:
        return getattr(importlib.import_module(self.module), self.name)(rows, values, **dict(self.options))


def _fitting(handle: object, name: str, wants: Wanted) -> Rows:
    if not isinstance(handle, Rows) or not wants.fit(handle):
        raise TraceError(f"gae needs {name}: {wants.what}; and got {describe(handle)}", now=wants.now)
    return handle
