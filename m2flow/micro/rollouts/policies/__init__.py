"""Ways to schedule a rollout whose lengths are not known, one a file, by name.

A user's own is a subclass of `m2flow.micro.rollouts.cluster.Policy`, given to `m2flow simulate rollout --policy FILE.py:CLASS`.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.micro.rollouts.cluster import Policy
from m2flow.micro.rollouts.policies.adaptive import Adaptive
from m2flow.micro.rollouts.policies.group_round_robin import GroupRoundRobin
from m2flow.micro.rollouts.policies.least_loaded import LeastLoaded
from m2flow.micro.rollouts.policies.longest_first import LongestFirst
from m2flow.micro.rollouts.policies.lpt import LongestProcessingTime
from m2flow.micro.rollouts.policies.probe import Probe
from m2flow.micro.rollouts.policies.repack import Repack
from m2flow.micro.rollouts.policies.round_robin import RoundRobin
from m2flow.micro.rollouts.policies.shortest_first import ShortestFirst
from m2flow.micro.rollouts.policies.split import Split
from m2flow.micro.rollouts.predictors import EarlierSteps, Oracle, Predictor, PromptBuckets
from m2flow.micro.rollouts.siblings import Siblings

POLICIES: Mapping[str, Callable[[Predictor], Policy]] = {
    "round-robin": lambda predictor: RoundRobin(),
    "group-round-robin": lambda predictor: GroupRoundRobin(),
    "least-loaded": lambda predictor: LeastLoaded(),
    "lpt": LongestProcessingTime,
    "longest-first": LongestFirst,
    "shortest-first": ShortestFirst,
    "probe": lambda predictor: Probe(),
    "repack": Repack,
    "split": Split,
    "adaptive": Adaptive,
}
"""Name -> how to make it with a predictor; a policy lasts for all steps of a study, and its predictor learns."""

PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "siblings": Siblings,
    "earlier-steps": EarlierSteps,
    "prompt-buckets": PromptBuckets,
    "oracle": Oracle,
}
"""Name -> how to make it."""


def make_predictor(name: str) -> Predictor:
    """By name.

    Raises:
        SpecError: there is none.
    """
    if name not in PREDICTORS:
        raise SpecError(f"there is no predictor {name!r}", now=f"There are {', '.join(PREDICTORS)}.")
    return PREDICTORS[name]()


def make_policy(name: str, predictor: Predictor) -> Policy:
    """By name, or the user's own class from `FILE.py:CLASS`, made without arguments.

    Raises:
        SpecError: there is none, or the file can't be used.
    """
    if name in POLICIES:
        return POLICIES[name](predictor)
    file, colon, wanted = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        close = difflib.get_close_matches(name, POLICIES, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(POLICIES)}; a class of your own is FILE.py:CLASS."
        raise SpecError(f"there is no policy {name!r}", now=hint)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SpecError(f"can't read {file}", now="Give the file that defines the policy.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, wanted, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise SpecError(f"{wanted} in {file} is not a Policy", now="Give a subclass of m2flow.micro.rollouts.cluster.Policy.")
    return found()
