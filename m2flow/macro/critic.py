"""The critic of a flow, and the advantages that generalised advantage estimation makes of its values.

values = critic.values(responses)
estimate = gae(responses, rewards, values, lam=0.95)
policy.update(responses, rewards, advantages=estimate.advantages)
critic.update(responses, returns=estimate.returns, old_values=values)
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.handles import Handle, Metrics, Rows, describe
from m2flow.macro.loss_declarations import clipped_value
from m2flow.macro.roles import NUMBERS, RESPONSES, REWARDS, ColumnFunction, InputKind, Policy, Role, UpdateSettings, check_optimizer
from m2flow.macro.session import Session, current_session
from m2flow.recipe import AdamW, Loss, Model, check_number, model_path


class Critic(Role):
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
        optimizer: AdamW | None = None,
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
        settings = UpdateSettings(loss, self.optimizer if optimizer is None else optimizer, minibatch_size, epochs)
        if "old_values" in loss.needs and old_values is None:
            raise TraceError(f"the loss {loss.name} needs old_values", now="Pass the values that the returns were estimated with.")
        samples = self._rows(self._common(responses, returns, old_values), "update", RESPONSES)
        given = {"returns": self._column(returns, "update", NUMBERS)}
        if old_values is not None:
            given["old_values"] = self._column(old_values, "update", NUMBERS)
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
