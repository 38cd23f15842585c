"""Over-sampling: a generation that gets more prompts than it needs and ends when it has enough whole groups.

    policy.generate(prompts.take(40), n=8, oversample=1.25, late="drop")     gives 32 groups, those that are whole first
    policy.generate(prompts.take(40), n=8, oversample=1.25, late="carry")    the same; the next call of this line takes over the other 8
    policy.generate(prompts, n=8, count=32, oversample=1.25, late="defer")   the same; the late prompts get a long round
    policy.generate(prompts.take(32), n=8, late="drop", timeout_s=300)       gives the groups that are whole in time: 32, or fewer

One rule: with P prompts of its own the call ends when at most P - ceil(P / oversample) of its candidate groups are not whole. Its
candidates are its own P groups and, with `carry`, those that the previous call of the same line left. So after the first iteration a
line that carries gives P groups in each, and P - ceil(P / oversample) are always in flight.

Late samples are aborted where they are.
- `drop`: they are discarded, and counted.
- `carry` (partial rollouts): they continue from their tokens so far. A sample keeps its identity and with it its random numbers, each
  token has the version of the weights that made it, and finished members of a late group are carried finished. Versions stay within the
  bound of the step that trains on them: a group that would be too old for the next call must be among the whole ones, however long that
  takes. (How far away the next call is, is known if the program has made it already; else it is assumed to be as far as this one was from
  the previous. If it comes later than that, what is too old starts over.) What is still carried when the loop ends is unused, and
  counted as such.
- `defer`: they start over in a round of their own (`m2flow.macro.tail_batching`).

`timeout_s` makes samples late by the clock: a sample that is not done so many seconds after it was first handed to an engine is late,
and its group with it. It is stopped where it is; its siblings are discarded too, including those that are done. The call ends when each
of its groups is whole or late, or with the first whole ones that `oversample` asks for. Eager has no clock: without a record every group
is in time.

`kv="keep"` is another permission, for any generation with staleness above 0: an engine may load newer weights of the call's window
between two tokens of a sample, without recomputing the KV cache of its earlier tokens. Later tokens have the new version and `kv_stale`,
since they attend to keys and values of older weights. By default (`recompute`) weights change between samples, and the cache of a carried
sample is recomputed.

Which groups were whole, and which version made how many tokens of a sample, depends on time: the run records it, and eager repeats it.

Sources:
    Zhou et al. 2025, APRIL, arXiv:2509.18521: active partial rollouts; we add the bound, and the record.
    Piché et al. 2025, PipelineRL, arXiv:2509.19128: in-flight weight updates; we add the bound, and the flag of each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from m2flow.errors import OptionError
from m2flow.recipe import Sampling, check_choice, is_number

if TYPE_CHECKING:
    from m2flow.macro.graph import Call

_LATE = ("wait", "drop", "carry", "defer")
_CACHES = ("recompute", "keep")


def check_late(oversample: float, late: object, kv: object, staleness: int, timeout_s: float | None = None) -> None:
    """Check a generate call's options for late samples, and for KV caches that are older than the weights.

    Raises:
        OptionError: a value that does not exist, or a combination that can't be right.
    """
    check_choice("late", late, _LATE)
    check_choice("kv", kv, _CACHES)
    if not is_number(oversample) or not oversample >= 1:
        raise OptionError(f"oversample={oversample!r:.40}; it is a number, 1.0 or more: prompts for each group that is needed")
    if late == "carry" and staleness == 0:
        raise OptionError(
            "late='carry' with staleness=0 would train on old tokens: a carried sample is of weights before the step that trains on it",
            now="Take late='drop', or @flow(staleness=k); a call outside the flow's loop has staleness 0.",
        )
    _check_timeout(timeout_s, late)
    if (oversample > 1 or timeout_s is not None) != (late != "wait"):
        raise OptionError(
            f"oversample={oversample} with late={late!r}: over-sampling is for what comes late, and only what is over can be late",
            now="Say oversample=1.25, late='drop', late='carry' or late='defer', or neither.",
        )
    if kv == "keep" and staleness == 0:
        raise OptionError(
            "kv='keep' with staleness=0: no sample outlives the weights that began it, so there is no older cache to keep",
            now="Leave kv out, or say @flow(staleness=k); a call outside the flow's loop has staleness 0.",
        )


def _check_timeout(timeout_s: float | None, late: object) -> None:
    if timeout_s is None:
        return
    if not is_number(timeout_s) or not timeout_s > 0:
        raise OptionError(f"timeout_s={timeout_s!r:.40}; it is a number of seconds, above 0: what a sample may take")
    if late != "drop":
        raise OptionError(
            f"timeout_s={timeout_s} with late={late!r}: who is late by the clock can only be dropped",
            now="Say late='drop', or leave timeout_s out. late='carry' is bounded by its versions; a long round waits for all.",
        )


def check_line(previous: Call | None, options: Mapping[str, object], fields: tuple[frozenset[str] | None, frozenset[str] | None]) -> None:
    """Check that a call which takes over the late groups of the previous one of its line makes rows of the same kind.

    Args:
        fields: the columns of the previous call's prompts, and of this one's; None: unknown.
    Raises:
        OptionError: another size of group, or other columns.
    """
    if previous is None:
        return
    n, before, now = options["n"], previous.options["sampling"], options["sampling"]
    assert isinstance(before, Sampling)
    assert isinstance(now, Sampling)
    if before.sampling_mask != now.sampling_mask:
        raise OptionError(
            "late='carry': what this line carries has a sampling mask in one call, and none in the other",
            now="Give sampling_mask= to all calls of the line, or to none.",
        )
    if previous.options["n"] != n:
        raise OptionError(
            f"late='carry': this line had n={previous.options['n']} before and has n={n} now, so it would give groups of different sizes",
            now="Keep n, or give each size a line of its own.",
        )
    had, has = fields
    if had is not None and has is not None and had != has:
        raise OptionError(
            f"late='carry': the prompts of this line had the columns {', '.join(sorted(had))} before, now {', '.join(sorted(has))}; "
            "what is carried would not fit",
            now="Give each kind of prompts a line of its own.",
        )


CARRIED = -1
"""In `windows`: samples that an earlier call of a line drew."""


def windows(origins: Sequence[Call]) -> dict[int, tuple[int, int]]:
    """Call -> the oldest and the newest version of its samples, whoever of its speakers is meant. Carried samples count for the call that
    returns them."""
    found = {call.ordinal: (min(e.first for e in call.reads), max(e.version for e in call.reads)) for call in origins}
    of_carriers = [found[call.ordinal] for call in origins if call.carries_from is not None]
    return found | ({CARRIED: (min(a for a, _ in of_carriers), max(b for _, b in of_carriers))} if of_carriers else {})


def is_cut(options: Mapping[str, object]) -> bool:
    """Whether a generate call with these options ends before all of its samples do."""
    return options.get("late") in ("drop", "carry", "defer")


def carries(options: Mapping[str, object]) -> bool:
    """Whether late samples of a call with these options continue in the next call of its line."""
    return options.get("late") == "carry"


def keeps_cache(options: Mapping[str, object]) -> bool:
    """Whether weights may change under the samples of a call with these options."""
    return options.get("kv") == "keep"


def timeout_of(options: Mapping[str, object]) -> float | None:
    """Seconds that a sample of a generate call with these options may take; None: as long as it needs."""
    timeout_s = options.get("timeout_s")
    assert timeout_s is None or isinstance(timeout_s, int | float)
    return timeout_s


def num_wanted(options: Mapping[str, object], num_prompts: int) -> int:
    """The number of whole groups that such a call returns of so many prompts; fewer, if some are late by the clock.

    >>> num_wanted({"oversample": 1.25}, 40)
    32
    """
    oversample = options["oversample"]
    assert isinstance(oversample, int | float)
    return math.ceil(num_prompts / oversample - 1e-9)


def num_late(options: Mapping[str, object], num_prompts: int) -> int:
    """The number of groups that may be late when such a call of so many prompts ends.

    >>> num_late({"oversample": 1.25, "late": "carry"}, 40)
    8
    """
    return num_prompts - num_wanted(options, num_prompts)
