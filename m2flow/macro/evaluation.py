"""Evaluate a policy on a dataset: pass@k, maj@k and mean rewards with confidence intervals, the best weights kept, and early stops.

    evaluate: dataset.all --> policy.generate (of this line's weights) --> reward --> metrics of the whole, logged
    Best:     metric --better--> a copy of the policy's weights, a role of its own      --not for so long--> stop

Evaluated samples train nothing, move no cursor and take no random numbers from training: a run's training is the same without them.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import OptionError, TraceError
from m2flow.macro.datasets import Dataset
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Metrics, describe
from m2flow.macro.number import ExploredFloat, Number, Unknown
from m2flow.macro.ops import log
from m2flow.macro.roles import Policy, Reference, Reward
from m2flow.macro.session import instead_of
from m2flow.recipe import check_count, check_flag, check_names, check_number, check_text
from m2flow.samples import Batch, Ragged, Sample

Floats = npt.NDArray[np.float64]

_METRIC = re.compile(r"(pass|maj)@([1-9]\d*)|avg")
_LEVEL = 0.95


def evaluate(
    policy: Policy,
    dataset: Dataset,
    *,
    score: Reward,
    max_new_tokens: int,
    n: int = 1,
    metrics: Sequence[str] = ("pass@1", "avg"),
    right: float = 1.0,
    answer: Callable[[Sample], object] | None = None,
    name: str = "eval",
    **sampling: Any,
) -> Metrics:
    """Measure the policy's weights of this line on every row of a dataset, and log the result.

        pass@k   1 - C(n - c, k) / C(n, k) where c of the n responses are right, mean over the prompts
        maj@k    the reward of the first response with the commonest answer, of k responses; mean over the floor(n / k) such lots
        avg      the mean reward

    Args:
        score: judges each response. Nothing of it is logged.
        n: responses to each prompt; at least the largest k.
        right: the reward from which on a response is right.
        answer: what a response's answer is, for `maj@k`; by default what is boxed, or else the whole text.
        name: what stands before the metrics' names in the log: `eval/pass@1`.
        max_new_tokens: of a response at most.
        sampling: further options of `Policy.generate`: `temperature=0.6`, `top_p=0.95`.
    Returns:
        numbers by name: of each metric M its value `M`, and `M low` and `M high`, the bounds of its 95 % confidence interval: the normal
        one over the prompts, each with its n responses being one observation (of pass@k within 0 and 1). It is nan with a single
        prompt, and too narrow with few.
    Source:
        Chen et al. 2021, arXiv:2107.03374, eq. 1 (pass@k); Wang et al. 2022, arXiv:2203.11171 (majority of answers); Miller 2024,
        arXiv:2411.00640, section 2 (errors clustered by prompt).

    `evaluate` before the loop measures what training begins with; `if step % 10 == 0: evaluate(...)` in it every ten steps.
    """
    _check(policy, dataset, score, n, metrics)
    check_number("right", right)
    if answer is not None and not callable(answer):
        raise OptionError(f"answer={answer!r:.60} is no function of a sample", now="Give a function such as lambda sample: sample.text.")
    check_text("name", name)
    unknown = next((key for key in sampling if key not in inspect.signature(Policy.generate).parameters), None)
    if unknown is not None:
        raise OptionError(f"evaluate and Policy.generate have no option {unknown!r}", now=instead_of(unknown, Policy.generate, "evaluate"))
    session = policy._session
    responses = policy.generate(dataset.all(), n=n, max_new_tokens=max_new_tokens, **{"staleness": 0, **sampling})
    rewards = score.judge(responses)  # A handle that nobody holds is released.
    inputs, columns = {"samples": responses.ref, "rewards": rewards.ref}, {"rewards": "reward"}
    if any(metric.startswith("maj") for metric in metrics):
        answers = responses.map(final_answer if answer is None else answer)
        inputs, columns = {**inputs, "answers": answers.ref}, {**columns, "answers": answers.column or ""}
    call = session.record(
        role=name,
        method="",
        engine="function",
        granularity=Granularity.BATCH,
        inputs=inputs,
        options={
            "function": Measures(tuple(metrics), float(right)),
            "timeout_s": None,
            "column": "value",
            "style": "columns",
            "gives": "table",
            "columns": columns,
        },
        shown={"metrics": ", ".join(metrics)},
        is_aligned=False,
    )
    keys = [key for metric in metrics for key in (metric, f"{metric} low", f"{metric} high")]
    measured = Metrics(session, call, keys)
    log(**{f"{name}/{key}": measured[key] for key in keys})
    return measured


def _check(policy: object, dataset: object, score: object, n: int, metrics: Sequence[str]) -> None:
    for value, kind, now in (
        (policy, Policy, "evaluate(policy, heldout, score=verifier, ...)"),
        (dataset, Dataset, "evaluate(policy, heldout, score=verifier, ...)"),
        (score, Reward, "score=Reward(function)"),
    ):
        if not isinstance(value, kind):
            raise TraceError(f"evaluate needs a {kind.__name__}, and got {describe(value)}", now=f"Write {now}.")
    check_count("n", n)
    for metric in check_names("metrics", metrics, example=("pass@1", "avg")):
        found = _METRIC.fullmatch(metric)
        if found is None:
            raise OptionError(f"metrics: {metric!r} is none; known are avg, pass@K and maj@K, such as pass@8")
        if found[2] and int(found[2]) > n:
            raise OptionError(
                f"metrics: {metric} needs n={found[2]} responses to a prompt, and n is {n}",
                now="Give evaluate(n=...) at least that many, or a smaller K.",
            )


def final_answer(sample: Sample) -> str:
    r"""The last `\boxed{...}` of a response, or all of it."""
    from m2flow.rewards import boxed  # On the worker, where it runs.

    text = str(sample.text)
    return (boxed(text) or text).strip()


@final
@dataclass(frozen=True)
class Measures:
    """The metrics of evaluated samples: a function of the columns `rewards` and, for maj@k, `answers`."""

    metrics: tuple[str, ...]
    right: float

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        rows = rows.in_order()
        found: dict[str, float] = {}
        for metric in self.metrics:
            kind, _, k = metric.partition("@")
            each = [self._of_prompt(kind, int(k or 0), rows, start, end) for start, end in rows.group_bounds()]
            found |= with_interval(metric, np.array(each, np.float64))
        return found

    def _of_prompt(self, kind: str, k: int, rows: Batch, start: int, end: int) -> float:
        rewards = rows.dense("rewards")[start:end].astype(np.float64)
        if kind == "avg":
            return float(rewards.mean())
        if kind == "pass":
            return pass_at(k, len(rewards), int((rewards >= self.right).sum()))
        column = rows["answers"]
        answers = [column.item(i) if isinstance(column, Ragged) else column[i] for i in range(start, end)]
        return majority_at(k, rewards.tolist(), [str(one) for one in answers])


def pass_at(k: int, n: int, num_right: int) -> float:
    """The chance that one of k responses is right, drawn without return from n of which so many are; nan if there are fewer than k.

    >>> [pass_at(k, 4, 2) for k in (1, 2, 3)]
    [0.5, 0.8333333333333334, 1.0]
    """
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k) if n >= k else math.nan


def majority_at(k: int, rewards: Sequence[float], answers: Sequence[str]) -> float:
    """The mean reward of the commonest answer among each k responses; of equally common ones that which came first.

    >>> majority_at(3, [0.0, 1.0, 1.0, 0.0], ["5", "4", "4", "7"])
    1.0
    """
    won = []
    for start in range(0, len(rewards) - k + 1, k):
        commonest = Counter(answers[start : start + k]).most_common(1)[0][0]
        won.append(rewards[answers.index(commonest, start)])
    return sum(won) / len(won) if won else math.nan


def with_interval(metric: str, each: Floats) -> dict[str, float]:
    """The mean over prompts, and the bounds of its confidence interval.

    >>> {name: round(value, 3) for name, value in with_interval("avg", np.array([0.0, 1.0, 1.0, 0.0])).items()}
    {'avg': 0.5, 'avg low': -0.066, 'avg high': 1.066}
    """
    mean = float(each.mean()) if len(each) else math.nan
    error = float(each.std(ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    half = NormalDist().inv_cdf((1 + _LEVEL) / 2) * error
    low, high = (0.0, 1.0) if metric.startswith("pass") else (-math.inf, math.inf)  # A chance.
    return {metric: mean, f"{metric} low": max(mean - half, low), f"{metric} high": min(mean + half, high)}


@final
class Best:
    """Keep a policy's best weights, and say when they have not become better for too long.

        best = Best(policy, patience=3)
        for step in steps(200):
            if step % 10 == 0 and best.stop(evaluate(policy, heldout, score=verifier, max_new_tokens=512)["pass@1"]):
                break
            ...

    Args:
        patience: how many evaluations in a row may bring nothing better; None: any number.
        keep: whether the best weights are kept, as a role `NAME_best`: it is in the run's checkpoints, and `m2flow export --role
            policy_best` writes it as a model. It takes as much memory on the trainer as a reference.
        least: by how much a value must exceed the best one to count as better.
    """

    def __init__(self, policy: Policy, *, patience: int | None = None, keep: bool = True, least: float = 0.0) -> None:
        if not isinstance(policy, Policy):
            raise TraceError(f"Best needs a Policy, and got {describe(policy)}")
        if patience is not None:
            check_count("patience", patience)
        check_flag("keep", keep)
        check_number("least", least, low=0)
        self._policy = policy
        self._patience = patience
        self._keep = keep
        self._least = least
        self._num_worse = 0
        self.value = -math.inf
        """The best value so far."""
        self.reference = self._copied()  # Before the loop too, so that the plan has a place for it.
        """The weights of that value, for log-probabilities or as they are; before the first those of the start. None without `keep`."""

    def stop(self, value: Number | float) -> bool:
        """Note an evaluation of the policy's weights of this line; whether patience is at its end. Python waits for the value.

        A plan takes a value that it does not know for a better one: it has room for the copy, and for the steps that follow.
        """
        if not isinstance(value, Number):
            check_number("value", value)
        now = ExploredFloat(value)
        if isinstance(now, Unknown) or now > self.value + self._least or self.value == -math.inf:
            self.value, self._num_worse = float(now), 0
            self.reference = self._copied()
        else:
            self._num_worse += 1
        log(**{f"{self._policy.name}_best": self.value})
        is_over = self._patience is not None and self._num_worse >= self._patience
        if is_over:
            session, most = self._policy._session, self._patience
            why = f"Best(patience={most}): the last {self._num_worse} evaluations of {self._policy.name} brought nothing better than"
            session.patience_end = session.step, f"{why} {self.value:.4g}"
        return is_over

    def _copied(self) -> Reference | None:
        return Reference(self._policy, name=f"{self._policy.name}_best") if self._keep else None
