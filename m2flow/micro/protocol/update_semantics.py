"""Give the meaning of an update in terms of a train engine: the rows of a micro-batch, the loss, its denominators and the metrics.

Workers and the eager executor train with the same functions, as with those of `m2flow.micro.protocol.call_semantics`. Everything that the
loss reads of other calls comes in here, joined by identity; so neither arrival nor cutting into micro-batches can change what belongs to a
sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import (
    BUCKET_SUM,
    PER_GROUP,
    RATIO_COUNT,
    Agreement,
    Objective,
    Sums,
    bucket_metrics,
    ratio_quantiles,
    with_effective_share,
)
from m2flow.errors import EngineError, OpError, RewardError
from m2flow.macro.graph import Call
from m2flow.micro.protocol.staleness import check_consumption
from m2flow.recipe import (
    PROXIMAL,
    REFERENCE_TOP_IDS,
    REFERENCE_TOP_LOGPROBS,
    TOP_LOGPROBS,
    VERSION_AGES,
    Advantage,
    Counts,
    Loss,
    Optimizer,
)
from m2flow.samples import ROUTED_EXPERTS, Batch, Column, IdArray, Ragged, SampleId, check_one_reward, group_keys

_TARGETS = {"rewards": "reward", "reference": "reference_logprobs"}
"""Input of an update -> column under which a loss or a metric reads it; any other input has the column's name."""
_ROUNDING = 1e-9
"""What rounding may leave of the difference of two equal rewards."""


def training_rows(call: Call, inputs: Mapping[str, Batch]) -> Batch:
    """Make the rows of a micro-batch for a train engine: whole groups, in the order of identity, with what the loss needs.

    Args:
        inputs: `samples`, and rows of the same samples by the name of the input; the call's `columns` say which column counts.
    Raises:
        OpError: a column is neither one number a sample nor numbers that fit the sample's tokens.
    """
    samples = inputs["samples"].in_order()
    check_consumption(call, samples)
    named = call.options["columns"]
    assert isinstance(named, Mapping)
    for name, rows in inputs.items():
        if name != "samples":
            rows = rows.select(samples.ids)
            column = _numbers(call, name, rows[named[name]], samples.ids)
            samples = samples.with_columns(**{_TARGETS.get(name, name): _aligned(call, name, column, samples)})
            if name == PROXIMAL and ROUTED_EXPERTS in rows:
                samples = samples.with_columns(**rows.only((ROUTED_EXPERTS,)).columns)  # Of the pass that the update replays.
            if name == "reference" and TOP_LOGPROBS in objective(call).loss.needs:
                samples = samples.with_columns(**rows.only((REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS)).columns)
    advantages = call.options["advantages"]
    if advantages is not None:
        reward = np.asarray(samples.dense("reward"), np.float64)
        chosen = advantages if isinstance(advantages, Advantage) else Advantage(str(advantages))
        samples = samples.with_columns(advantages=_advantages(chosen, reward, samples))
    return samples


def _num_trained(samples: Batch) -> npt.NDArray[np.int64]:
    """Count the tokens under the loss mask of each sample; rows of texts, which have no tokens yet, have none."""
    if "tokens" not in samples:
        return np.zeros(len(samples), np.int64)
    mask = samples.ragged("loss_mask").values.astype(bool)
    return np.diff(np.concatenate(([0], np.cumsum(mask)))[samples.ragged("tokens").offsets])


def with_same_weights(call: Call, rows: Batch) -> Batch:
    """Add the column `same_weights`: tokens sampled by the version that the update begins with, over a cache of that version alone.

    Not where other roles sampled: a version of theirs is of other weights.
    """
    if "versions" not in rows or "kv_stale" not in rows or call.options.get("sampled_by_others"):
        return rows
    versions, stale = rows.ragged("versions"), rows.ragged("kv_stale")
    same = (versions.values == call.writes[0].version - 1) & ~stale.values.astype(bool)
    return rows.with_columns(same_weights=Ragged(same, versions.offsets))


def with_version_ages(call: Call, rows: Batch) -> Batch:
    """Add the column `version_ages` for a loss that needs it, and for a correction, whose metrics are told apart by it."""
    loss = call.options["loss"]
    if not isinstance(loss, Loss) or "versions" not in rows or (loss.correction is None and VERSION_AGES not in loss.needs):
        return rows
    versions = rows.ragged("versions")
    return rows.with_columns(**{VERSION_AGES: Ragged(call.writes[0].version - 1 - versions.values.astype(np.int64), versions.offsets)})


def _numbers(call: Call, name: str, column: Column, ids: IdArray) -> Column:
    """Convert a column to numbers: dense float64 [N], or ragged. Results of user functions come as JSON."""
    if not isinstance(column, Ragged):
        return np.asarray(column, np.float64)
    if column.kind == "numbers":
        return column
    rows = [column.item(i) for i in range(len(column))]
    is_dense = all(_is_number(row) for row in rows)
    for packed, row in zip(ids.tolist(), rows, strict=True):
        if not (is_dense or (isinstance(row, list) and all(_is_number(value) for value in row))):
            raise OpError(
                f"{call.name} got {name} with {row!r:.80} for sample {SampleId.unpack(packed)}",
                now="It must be one number for every sample, or for every sample a list with a number for each of its tokens.",
            ).about(packed)
    return np.array(rows, np.float64) if is_dense else Ragged.of(rows, np.float64)  # type: ignore[arg-type]


def _aligned(call: Call, name: str, column: Column, samples: Batch) -> Column:
    """Align per-token numbers to all tokens; those given for generated tokens only get zeros between them."""
    if name == "rewards":
        _check_rewards(call, column, samples.ids)
    if not isinstance(column, Ragged) or "tokens" not in samples:
        return column
    tokens, mask = samples.ragged("tokens"), samples.ragged("loss_mask").values.astype(bool)
    if np.array_equal(column.offsets, tokens.offsets):
        return column
    num_generated = np.diff(np.concatenate(([0], np.cumsum(mask)))[tokens.offsets])
    if not np.array_equal(column.lengths, num_generated):
        wrong = int(np.argmax((column.lengths != tokens.lengths) & (column.lengths != num_generated)))
        raise OpError(
            f"{call.name} got {name} with {column.lengths[wrong]} numbers for sample {SampleId.unpack(int(samples.ids[wrong]))}, which has "
            f"{tokens.lengths[wrong]} tokens, {num_generated[wrong]} of them generated",
            now="It must be one number for every sample, or for every sample one for each generated token, or one for each token.",
        ).about(int(samples.ids[wrong]))
    values = np.zeros(len(mask), column.values.dtype)
    values[mask] = column.values
    return Ragged(values, tokens.offsets)


def _check_rewards(call: Call, column: Column, ids: IdArray) -> None:
    if isinstance(column, Ragged):
        raise RewardError(
            f"{call.name} got rewards of tokens", now="A reward is one number a response; pass numbers of tokens as advantages."
        )
    bad = np.flatnonzero(~np.isfinite(np.asarray(column, np.float64)))
    if len(bad):
        row = int(ids[bad[0]])
        said = f"{call.name} got the reward {column[bad[0]]} for sample {SampleId.unpack(row)}; rewards must be finite"
        raise RewardError(said).about(row)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _advantages(chosen: Advantage, reward: npt.NDArray[np.float64], samples: Batch) -> Column:
    """Compute advantages group by group in float64, so that they don't depend on other groups. Only trainers import torch, here."""
    from m2flow.algorithms import advantages

    if chosen.by_conversation:
        return advantages.of_conversations(chosen.name, reward, samples, **dict(chosen.options))
    check_one_reward(samples, str(chosen))
    if chosen.name == advantages.gigpo.__name__:
        return advantages.of_turns(reward, samples, **dict(chosen.options))
    return advantages.on_arrays(chosen.name, reward, samples.group_bounds(), lengths=_num_trained(samples), **dict(chosen.options))


def objective(call: Call) -> Objective:
    """Return the objective of an update call."""
    loss = call.options["loss"]
    assert isinstance(loss, Loss)
    return Objective(loss)


def optimizer(call: Call) -> Optimizer:
    """Return the optimiser of an update call, at the call's step of the loop."""
    found = call.options["optimizer"]
    assert isinstance(found, Optimizer)
    step = call.options.get("loop_step")
    return replace(found, at=step) if isinstance(step, int) else found


def check_agreement(call: Call, tally: UpdateTally, stop_above: float | None) -> None:
    """Check, before the first step, that log-probabilities of rollout and trainer agree.

    Raises:
        EngineError: they differ more than the cluster spec allows.
    """
    found = tally.agreement
    if stop_above is None or tally.is_stepped or not found.mean > stop_above:
        return
    raise EngineError(
        f"{call.name}: the log-probabilities of trainer and rollout differ by {found.mean:.3g} on average ({found.largest:.3g} at most) "
        f"over {found.num_tokens} tokens that were sampled with the weights of {call.role}@{call.writes[0].version - 1}, which both hold; "
        f"{stop_above:g} is allowed",
        where=call.site.describe(),
        now="`weights: {stop_above: ...}` in the cluster spec is the limit; docs/internals/weights.md says what to look at.",
    )


class UpdateSteps(NamedTuple):
    """How far an update is, for displays."""

    call: str
    done: int
    """Optimiser steps that are over, of so many in all."""
    of: int
    loss: float
    """Loss of the last one; nan before the first."""


class UpdateTally:
    """Sums over the micro-batches of an update: denominators for its steps, means for its metrics."""

    def __init__(self) -> None:
        self._minibatch: list[Sums] = []
        self._is_of_episodes = True
        """Whether all rows of the mini-batch are of episodes."""
        self._groups: set[int] = set()
        self._num_groups = 0
        """In all mini-batches that ended, over all epochs."""
        self._sums: list[Sums] = []
        self._rewards: list[np.ndarray] = []
        self._has_advantage: dict[int, bool] = {}
        """By group, whether an advantage of its samples is not 0."""
        self._steps: list[Mapping[str, float]] = []
        self._num_skipped = 0
        self._losses: list[float] = []

    def add(self, sums: Sums, batch: Batch, *, epoch: int) -> None:
        self._minibatch.append(sums)
        self._is_of_episodes = self._is_of_episodes and "episode" in batch
        groups = group_keys(batch.ids)
        self._groups.update(groups.tolist())
        self._sums.append(sums)
        if "advantages" in batch and epoch == 0:
            for group, has in zip(groups.tolist(), _not_zero(batch["advantages"]), strict=True):
                self._has_advantage[group] = has or self._has_advantage.get(group, False)
        if "reward" in batch and epoch == 0:
            rewards = np.array(batch.dense("reward"), np.float64)
            for row in np.flatnonzero(np.isnan(rewards)).tolist() if "failure" in batch else ():
                if batch.ragged("failure").item(row):  # An episode that failed and counts.
                    rewards[row] = 0.0
            self._rewards.append(rewards)

    @property
    def is_stepped(self) -> bool:
        """Whether the weights have changed since the update began."""
        return bool(self._steps)

    @property
    def is_to_skip(self) -> bool:
        """Whether the mini-batch that ends now has no token to train on, as chance may have it: its episodes ended before the model had a
        turn. Of rows that are no episodes none can be such: the engine refuses the step."""
        return bool(self._minibatch) and self._is_of_episodes and not any(s.num_tokens for s in self._minibatch)

    @property
    def last_loss(self) -> float:
        """The loss of the last optimiser step; nan before the first."""
        return self._losses[-1] if self._losses else math.nan

    @property
    def agreement(self) -> Agreement:
        """Agreement over all micro-batches so far."""
        return Agreement.of_all([s.agreement for s in self._sums])

    def denominator(self, loss: Loss) -> float:
        """Compute the denominator of the mini-batch that ends now, from counts over all of it, however it was cut.

        Raises:
            OpError: the user's function of the counts raised, or gave no positive number.
        """
        num_tokens = sum(s.num_tokens for s in self._minibatch)
        num_sequences = sum(s.num_sequences for s in self._minibatch)
        counts = Counts(num_tokens, num_sequences, len(self._groups))
        if not callable(loss.denominator):
            named = {"tokens": num_tokens, "sequences": num_sequences, "groups": counts.num_groups}
            return float(max(named[loss.denominator], 1))
        try:
            value = float(loss.denominator(counts))
        except Exception as error:
            raise OpError(
                f"the denominator of the loss {loss.name} raised {type(error).__name__} on {counts}: {error}",
                now="Mend the loss's denominator, which gets the counts of a mini-batch.",
            ) from error
        if not (math.isfinite(value) and value > 0):
            raise OpError(f"the denominator of the loss {loss.name} is {value} for {counts}", now="It must be a positive number.")
        return value

    def stepped(self, applied: Mapping[str, float], denominator: float) -> None:
        """Record the optimiser step that ends a mini-batch."""
        self._losses.append(math.fsum(s.metrics.get("loss", 0.0) for s in self._minibatch) / denominator)
        self._steps.append(applied)
        self._end_minibatch()

    def skipped(self) -> None:
        """Record that a mini-batch ends without an optimiser step (`is_to_skip`)."""
        self._num_skipped += 1
        self._end_minibatch()

    def _end_minibatch(self) -> None:
        self._num_groups += len(self._groups)
        self._minibatch = []
        self._is_of_episodes = True
        self._groups = set()

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of the call: means over tokens, or over groups of what a loss on groups reports, and over optimiser steps
        for the loss, `grad_norm` and `lr`.

        Without an optimiser step the loss is nan, as is any other metric that is asked for (`m2flow.macro.columns.metric`).
        """
        num_tokens = sum(s.num_tokens for s in self._sums)
        num_sequences = sum(s.num_sequences for s in self._sums)
        names = dict.fromkeys(name for s in self._sums for name in s.metrics)
        counts = {name: self._num_groups if name.startswith(PER_GROUP) else num_tokens for name in names}
        sums = {name: math.fsum(s.metrics.get(name, 0.0) for s in self._sums) for name in names}
        result = {
            name.removeprefix(PER_GROUP): sums[name] / max(counts[name], 1)
            for name in names
            if not name.startswith((RATIO_COUNT, BUCKET_SUM))
        }
        result |= {name: float(np.mean([step[name] for step in self._steps])) for name in (self._steps[0] if self._steps else {})}
        result |= {"loss": float(np.mean(self._losses)) if self._losses else math.nan}
        result |= {"num_tokens": float(num_tokens), "num_sequences": float(num_sequences), "num_steps": float(len(self._steps))}
        result |= {"num_skipped_steps": float(self._num_skipped)}
        result = with_effective_share(result) | ratio_quantiles(sums) | bucket_metrics(sums)
        result |= self.agreement.metrics()
        result["response_length"] = num_tokens / num_sequences if num_sequences else math.nan
        if self._rewards:
            rewards = np.sort(np.concatenate(self._rewards))  # Sorted, since the last bit depends on the order of summation.
            result |= {"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
        if self._has_advantage:
            result["groups_without_advantage"] = 1 - sum(self._has_advantage.values()) / len(self._has_advantage)
        return result


def _not_zero(column: Column) -> list[bool]:
    """Of each row, whether its number is not 0, or one of them; what rounding leaves of equal rewards counts as 0."""
    values = column.values if isinstance(column, Ragged) else column
    found = np.abs(np.asarray(values, np.float64)) > _ROUNDING
    if isinstance(column, Ragged):
        before = np.append(0, np.cumsum(found))
        found = before[column.offsets[1:]] > before[column.offsets[:-1]]
    return [bool(one) for one in found]
