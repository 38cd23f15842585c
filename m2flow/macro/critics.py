"""Models that judge responses: critics, reward models, and the advantages that generalised advantage estimation makes of a critic's values.

values = critic.values(responses)
estimate = gae(responses, rewards, values, lam=0.95)
policy.update(responses, rewards, advantages=estimate.advantages)
critic.update(responses, returns=estimate.returns, old_values=values)

A critic is a reward model, too: `critic.update(pairs, loss=bradley_terry())` trains it on preferences, `critic.score(responses)` judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from m2flow.errors import TraceError
from m2flow.macro.columns import ColumnFunction
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.handles import Handle, Metrics, Rows, Scores, describe
from m2flow.macro.loss_declarations import clipped_value
from m2flow.macro.roles import (
    NUMBERS,
    RESPONSES,
    REWARDS,
    ROWS,
    BuiltInRole,
    InputKind,
    Policy,
    UpdateSettings,
    check_columns,
)
from m2flow.macro.session import Session, current_session
from m2flow.recipe import AdamW, Loss, Model, Optimizer, check_number, check_optimizer, model_path
from m2flow.samples import Batch, Column


class RewardModel(BuiltInRole):
    """A model that scores a whole response: a Hugging Face sequence-classification model with one label.

    Args:
        model: its directory. It reads prompt and response as texts, by its own tokenizer.
        chat: put them through the tokenizer's chat template, as a user's message and the assistant's; otherwise an end-of-sequence
            token follows the response.
        init: `random` draws the weights instead of loading them.
        name, dtype, revision: as `Policy`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "reward_model",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
        revision: str | None = None,
    ) -> None:
        super().__init__(name, "RewardModel")
        self._session.add_model(
            name,
            Model(
                model_path(model), init, self._session.seed, dtype, chat, head="score", is_policy=False, is_frozen=True, revision=revision
            ),
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


class Critic(BuiltInRole):
    """A model with a value head: before each token it estimates the reward still to come.

    Args:
        model: a path as `Policy` takes, whose head starts at zero unless it has one; or a policy, whose body as it is at this line is
            copied.
        init: `random` draws the weights instead of loading them.
        optimizer: for `update` calls that bring none.
        name, dtype, chat, revision: as `Policy`.
    """

    def __init__(
        self,
        model: Policy | str | Path,
        *,
        name: str = "critic",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
        optimizer: Optimizer | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__(name, "Critic")
        self.optimizer = AdamW() if optimizer is None else optimizer
        check_optimizer(self.optimizer)
        if isinstance(model, Policy):
            self._copy(model.name, "value")
        else:
            self._session.add_model(
                name, Model(model_path(model), init, self._session.seed, dtype, chat, head="value", is_policy=False, revision=revision)
            )

    def values(self, responses: Handle) -> Rows:
        """The value estimate before each token: a ragged row for each response, in the unit of the reward, 0 for the prompt."""
        return self._of_tokens(responses, "values", "values")

    def score(self, responses: Handle) -> Scores:
        """One number for each response: the value of its last token, as `bradley_terry` trains it. Of a response without tokens 0."""
        samples, values = self._rows(responses, "score", RESPONSES), self.values(responses)
        call = self._session.record(
            role=self.name,
            method="score",
            engine="function",
            granularity=Granularity.SAMPLE,
            inputs={"samples": samples, "values": values.ref},
            options={
                "function": ColumnFunction(__name__, "_last_values", ()),
                "timeout_s": None,
                "column": "reward",
                "style": "columns",
                "columns": {"values": values.column or ""},
            },
            shown={},
        )
        return Scores(self._session, call)

    def update(
        self,
        responses: Handle,
        *,
        returns: Handle | None = None,
        old_values: Handle | None = None,
        clip: float = 0.2,
        loss: Loss | None = None,
        columns: Mapping[str, Handle] | None = None,
        optimizer: Optimizer | None = None,
        minibatch_size: int | None = None,
        epochs: int = 1,
    ) -> Metrics:
        """Move the values towards the returns; later lines see the new weights.

        Args:
            returns: what the values should have been: one number a token, or one a response. A loss on preferences needs none.
            old_values: the values that the returns were estimated with. With them, no value is rewarded for moving further than `clip`.
            loss: `clipped_value(clip=clip)` by default; or `bradley_terry()` on pairs, `process_reward()` on labelled steps, or another
                of `values`.
            columns: what else the loss needs, by name, as `Policy.update`.
            minibatch_size, epochs: as `Policy.update`.
        Returns:
            means over the call: `loss`, `grad_norm`, and what the loss reports; that is by default `value`, `value_error` and
            `value_clipped` (with old values).
        """
        check_number("clip", clip, low=0)
        loss = clipped_value(clip=clip if old_values is not None else 0.0) if loss is None else loss
        settings = UpdateSettings(loss, self.optimizer if optimizer is None else optimizer, minibatch_size, epochs)
        check_columns(columns)
        known = {"returns": returns, "old_values": old_values}
        for name, about in (("returns", "Pass what the values should have been."), ("old_values", "Pass the values of the returns.")):
            if name in loss.needs and known[name] is None:
                raise TraceError(f"the loss {loss.name} needs {name}", now=about)
        samples = self._rows(self._common(responses, returns, old_values, *(columns or {}).values()), "update", RESPONSES)
        given = {name: self._column(handle, "update", NUMBERS) for name, handle in known.items() if handle is not None}
        given |= self._further_columns(columns, *known)
        return self._train(samples, given, settings)


def gae(
    responses: Handle,
    rewards: Handle,
    values: Handle,
    *,
    kl: Handle | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    length_alpha: float = 0.0,
) -> Estimate:
    """Generalised advantage estimation: advantages and returns of every generated token, from rewards and a critic's values.

    Args:
        rewards: one number a response, which its last token gets, or one a token.
        values: what `critic.values(responses)` gave.
        kl: a penalty for each token, taken off its reward: `0.05 * (responses.logprobs - reference.logprobs(responses))`.
        gamma: discount of a token. lam: 0 trusts the values alone, 1 the rewards alone.
        critic_lam: the lam of the returns, where it is another than that of the advantages (decoupled GAE).
        length_alpha: with a number above 0, such as 0.05, lam is 1 - 1 / (length_alpha * length) for each response instead (VAPO).
    Source:
        Schulman et al. 2016, arXiv:1506.02438. The equations are at `m2flow.algorithms.gae.gae`; the penalty in the reward is that of
        Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    session = current_session("gae()")
    for name, value in (("gamma", gamma), ("lam", lam)):
        check_number(name, value, low=0, high=1)
    check_number("length_alpha", length_alpha, low=0)
    chosen: dict[str, float] = {"gamma": float(gamma), "lam": float(lam)} | ({"length_alpha": length_alpha} if length_alpha else {})
    if critic_lam is not None:
        check_number("critic_lam", critic_lam, low=0, high=1)
        chosen["critic_lam"] = float(critic_lam)
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
            "function": ColumnFunction("m2flow.algorithms.gae", "gae_rows", tuple(chosen.items())),
            "style": "columns",
            "gives": "rows",
            "columns": columns,
            "fields": frozenset({"advantages", "returns"}),
            "timeout_s": None,
        },
        shown={**chosen, "gamma": gamma, "lam": lam},
    )
    return Estimate(session, call, responses)


def _last_values(rows: Batch, whole: Mapping[str, object]) -> Column:
    """The value of each row's last token under the mask, of demonstrations the last of all; 0 of a row without one: float64 [N]."""
    values = rows.ragged("values")
    mask = rows.ragged("loss_mask").values.astype(bool) if "loss_mask" in rows else np.ones(len(values.values), bool)
    found = np.zeros(len(rows))
    for i in range(len(rows)):
        start, end = values.offsets[i], values.offsets[i + 1]
        masked = np.flatnonzero(mask[start:end])
        if len(masked):
            found[i] = values.values[start + masked[-1]]
    return found


class Estimate(Handle):
    """The result of `gae`: `advantages` and `returns`, each a ragged row for each response, aligned with its tokens."""

    def __init__(self, session: Session, call: Call, responses: Handle) -> None:
        super().__init__(session, call)
        self._responses = responses if isinstance(responses, Rows) else None

    @property
    def advantages(self) -> Rows:
        return Rows(self._session, self._call, "advantages", owner=self, tokens_of=self._responses)

    @property
    def returns(self) -> Rows:
        return Rows(self._session, self._call, "returns", owner=self, tokens_of=self._responses)


def _fitting(handle: object, name: str, wants: InputKind) -> Rows:
    if not isinstance(handle, Rows) or not wants.fit(handle):
        raise TraceError(f"gae needs {name}: {wants.what}; and got {describe(handle)}", now=wants.now)
    return handle


# ---- preferences


def best_and_worst(responses: Handle, rewards: Handle) -> Rows:
    """Keep two responses to each prompt as a pair: the best, whose column `chosen` is 1, and the worst, where it is 0.

    For losses on pairs, as online DPO trains: `policy.update(best_and_worst(responses, rewards), loss=dpo(), reference=reference)`. Of
    equal rewards the first response counts; a group whose rewards are all equal gives no pair.

    Args:
        rewards: one number a response.
    Source:
        Guo et al. 2024, "Direct language model alignment from online AI feedback", arXiv:2402.04792, for pairs made while training.
    """
    session = current_session("best_and_worst()")
    samples, _ = RESPONSES.checked(session, responses, "best_and_worst")
    scored, column = REWARDS.checked(session, rewards, "best_and_worst")
    assert isinstance(responses, Rows)
    call = session.record(
        role="best_and_worst",
        method="",
        engine="function",
        granularity=Granularity.GROUP,
        inputs={"samples": samples, "rewards": scored},
        options={
            "function": ColumnFunction(__name__, "_places", ()),
            "style": "columns",
            "column": "value",
            "columns": {"rewards": column},
            "timeout_s": None,
        },
        shown={},
    )
    places = Rows(session, call, "value")
    return responses.within(places).with_columns(chosen=places).select(places >= 0)


def _places(rows: Batch, values: Mapping[str, object]) -> Column:
    """1 for the best of each group, 0 for the worst, -1 for the others: float64 [N]."""
    rewards = np.asarray(rows.dense("rewards"), np.float64)
    found = np.full(len(rows), -1.0)
    for start, end in rows.group_bounds():
        of_group = rewards[start:end]
        best, worst = start + int(of_group.argmax()), start + int(of_group.argmin())
        if rewards[best] > rewards[worst]:
            found[best], found[worst] = 1.0, 0.0
    return found
