"""Over-sampling: a generation that is given more prompts than it needs, and ends when it has enough whole groups.

    policy.generate(prompts.take(40), n=8, oversample=1.25, late="drop")    gives 32 groups, those that are whole first

Which groups those are depends on time, so the run records it, and eager repeats it from the record. Late samples are dropped: given up
where they are, and counted. Limit: carrying them over to the next step, and weights that change under a sample, are refused for now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from m2flow.errors import OptionError

_LATE = ("wait", "drop", "carry")
_CACHES = ("recompute", "keep")


def check_late(oversample: object, late: object, kv: object, staleness: int) -> None:
    """What a generate call is told about samples that are late, and about caches that are older than the weights.

    Raises:
        OptionError: a value that does not exist, a combination that can't be right, or one that is not there yet.
    """
    if late not in _LATE or kv not in _CACHES:
        raise OptionError(f"late={late!r:.40} and kv={kv!r:.40}: late is one of {', '.join(_LATE)}, kv one of {', '.join(_CACHES)}")
    if isinstance(oversample, bool) or not isinstance(oversample, int | float) or not 1 <= oversample < math.inf:
        raise OptionError(f"oversample={oversample!r:.40}; it is a number, 1.0 or more: prompts for each group that is needed")
    if late == "carry":
        if staleness == 0:
            raise OptionError(
                "late='carry' with staleness=0 would train on old tokens: a carried sample is of weights before the step that trains on it",
                now="Take late='drop'.",
            )
        raise OptionError("late='carry' is not there yet", now="Take late='drop', or late='wait'.")
    if (oversample > 1) != (late == "drop"):
        raise OptionError(
            f"oversample={oversample} with late={late!r}: over-sampling is for dropping what is late, and only what is over can be dropped",
            now="Say oversample=1.25, late='drop', or neither.",
        )
    if kv == "keep":
        if staleness == 0:
            raise OptionError(
                "kv='keep' with staleness=0: no sample outlives the weights that began it, so there is no older cache to keep",
                now="Leave kv out.",
            )
        raise OptionError("kv='keep' is not there yet: weights change between samples, never under one", now="Leave kv out.")


def is_cut(options: Mapping[str, object]) -> bool:
    """Whether a generate call with these options ends before all of its samples do."""
    return options.get("late") == "drop"


def num_wanted(options: Mapping[str, object], num_prompts: int) -> int:
    """How many groups such a call gives, of this many prompts.

    >>> num_wanted({"oversample": 1.25}, 40)
    32
    """
    oversample = options["oversample"]
    assert isinstance(oversample, int | float)
    return math.ceil(num_prompts / oversample - 1e-9)
