"""Find scheduling policies and length predictors by name, and combine those that a cluster spec asks for.

    rollout: {policy: [oldest-first, longest-first, "adaptive-concurrency:high=0.85"]}       in a cluster spec

A user's policy is a subclass of `m2flow.rollout_scheduling.policy.SchedulingPolicy`; FILE.py:CLASS names it wherever a name is expected.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from m2flow.errors import SpecError, did_you_mean
from m2flow.rollout_scheduling.length_policies import Gather, LongestFirst, LongestProcessingTime, Probe, Repack, ShortestFirst, Split
from m2flow.rollout_scheduling.policy import SchedulingPolicy, composed
from m2flow.rollout_scheduling.predictors import EarlierSteps, Oracle, Predictor, PromptBuckets, Siblings
from m2flow.rollout_scheduling.queue_policies import (
    AdaptiveConcurrency,
    Admission,
    FirstCome,
    GroupRoundRobin,
    LeastLoaded,
    OldestFirst,
    RoundRobin,
)

FIRST_COME = FirstCome.name
"""The default policy."""

POLICIES: Mapping[str, type[SchedulingPolicy]] = {
    of.name: of
    for of in (
        FirstCome,
        RoundRobin,
        GroupRoundRobin,
        LeastLoaded,
        LongestProcessingTime,
        LongestFirst,
        ShortestFirst,
        OldestFirst,
        Probe,
        AdaptiveConcurrency,
        Admission,
        Repack,
        Gather,
        Split,
    )
}
"""Name -> class."""

_REMOVED = {"adaptive": "split+repack", "balanced": "least-loaded", "group-completing": FIRST_COME}
"""Policies of earlier versions, and what has the same makespans: none of them won on a trace beyond noise, nor was published."""

PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "siblings": Siblings,
    "earlier-steps": EarlierSteps,
    "prompt-buckets": PromptBuckets,
    "oracle": Oracle,
}
"""Name -> factory."""


def make_predictor(name: str) -> Predictor:
    """Make the predictor of this name.

    Raises:
        SpecError: there is none.
    """
    if name not in PREDICTORS:
        raise SpecError(f"there is no predictor {name!r}", now=did_you_mean(name, PREDICTORS))
    return PREDICTORS[name]()


def make_policy(text: str, predictor: Predictor) -> SchedulingPolicy:
    """Make a policy from its name, with options after a colon (`admission:target=0.5`), or from a user's class, FILE.py:CLASS.

    Raises:
        SpecError: there is none, it has no such option, or the file can't be used.
    """
    name, numbers = _parsed(text)
    made = POLICIES[name] if name in POLICIES else _own(name)
    takes = inspect.signature(made).parameters
    for number in numbers:
        if number not in takes or number == "predictor":
            known = [known for known in takes if known != "predictor"]
            raise SpecError(f"the policy {name} has no {number!r}", now=f"It has {', '.join(known)}." if known else "It takes no numbers.")
    return made(predictor, **numbers) if "predictor" in takes else made(**numbers)  # type: ignore[call-arg]


def make_policies(names: Sequence[str], predictor: str) -> SchedulingPolicy:
    """Make several policies, which share a predictor, and combine them into one.

    Raises:
        SpecError: there is no such policy or predictor, or two of the policies dispatch samples themselves.
    """
    learned = make_predictor(predictor)
    made = [make_policy(name, learned) for name in names]
    own = [policy.name for policy in made if type(policy).next_sample is not SchedulingPolicy.next_sample]
    if len(own) > 1:
        raise SpecError(
            f"the policies {' and '.join(own)} each hand out samples by themselves, so they can't go together",
            now="Take one of them, with policies that rank, hold back or move.",
        )
    return composed(made)


REPORT_EVERY = 32
"""Decode turns between two load reports: a fraction of a second with most models."""


def report_every(names: Sequence[str], predictor: str, *, turns: int = REPORT_EVERY) -> int:
    """Decode turns between two load reports of an engine; 0 if no policy reads them."""
    return turns if names and make_policies(names, predictor).needs_reports else 0


def _parsed(text: str) -> tuple[str, dict[str, float]]:
    """Split a policy's text into its name and its options."""
    name, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        return text, {}
    numbers = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        try:
            numbers[key.strip()] = float(value)
        except ValueError:
            raise SpecError(f"{text!r}: {part.strip()!r} is no number with a name", now="Example: admission:target=0.5") from None
    return name, numbers


def _own(name: str) -> type[SchedulingPolicy]:
    """Load a user's policy class from FILE.py:CLASS."""
    if name in _REMOVED:
        raise SpecError(f"the policy {name!r} was removed", now=f"Take {_REMOVED[name]}, which is as fast in every study.")
    file, colon, wanted = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        hint = did_you_mean(name, POLICIES, f"There are {', '.join(POLICIES)}; a class of your own is FILE.py:CLASS.")
        raise SpecError(f"there is no policy {name!r}", now=hint)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SpecError(f"can't read {file}", now="Give the file that defines the policy.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(
            f"{file} can't be imported: {type(error).__name__}: {error}", now="Give the file that defines the policy."
        ) from error
    found = getattr(module, wanted, None)
    if not (isinstance(found, type) and issubclass(found, SchedulingPolicy)):
        raise SpecError(
            f"{wanted} in {file} is not a SchedulingPolicy", now="Give a subclass of m2flow.rollout_scheduling.policy.SchedulingPolicy."
        )
    if not hasattr(found, "name"):
        found.name = wanted
    return found
