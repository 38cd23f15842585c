"""Over-sampling: a generation that is given more prompts than it needs, and ends when it has enough whole groups.

    policy.generate(prompts.take(40), n=8, oversample=1.25, late="drop")     gives 32 groups, those that are whole first
    policy.generate(prompts.take(40), n=8, oversample=1.25, late="carry")    the same; the next turn of this line takes over the other 8

One rule for both: with P prompts of its own the call ends when at most P - ceil(P / oversample) of its candidate groups are not whole.
Its candidates are its own P groups and, with `carry`, those that the previous call of the same line left behind. So after the first
turn a line that carries gives P groups in each, and P - ceil(P / oversample) are always in the air.

What is late is aborted where it is. Dropped, it is given up, and counted. Carried, it goes on from its tokens so far: it keeps its
identity and with it its random numbers, each token has the version of the weights that made it, and finished members of a late group
are carried finished. Versions stay within the bound of the step that trains on them: a group that would be too old for the next turn
must be among the whole ones, however long that takes. (How far the next turn is, is known if the program is there already; else it is
taken to be as far as this one was from the last. If it comes later than that, what is too old begins anew.) What is still carried when the
loop ends is unused, and counted as such.

`kv="keep"` is another permission, for any generation with staleness above 0: an engine may take newer weights of the call's window
between two tokens of a sample, without reading its earlier tokens again. What comes after has the new version, and `kv_stale`, since it
attends to keys and values of older weights. By default (`recompute`) weights change between samples, and the tokens of a carried sample
are read again.

    policy.generate(prompts.take(32), n=8, late="drop", timeout_s=300)       gives the groups that are whole in time: 32, or fewer

    policy.generate(prompts, n=8, count=32, oversample=1.25, late="defer")   gives 32 groups in each turn; the late prompts get a long round

What is deferred begins anew, in a turn of its own (`m2flow.macro.tail_batching`).

`timeout_s` is late by the clock: a sample that is not done so many seconds after it was first handed to an engine is late, and its group
with it. It is stopped where it is; its siblings are given up too, those that are done included. The call ends when each of its groups
is whole or late, or with the first whole ones that `oversample` asks for. Eager has no clock: without a record every group is in time.

Which groups were whole, and which version made how many tokens of a sample, depends on time: the run records it, and eager repeats it.

Source:
    Zhou et al. 2025, APRIL, arXiv:2509.18521: active partial rollouts; we add the bound, and the record.
    Piché et al. 2025, PipelineRL, arXiv:2509.19128: in-flight weight updates; we add the bound, and the flag of each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from m2flow.errors import OptionError
from m2flow.recipe import check_choice, is_number

if TYPE_CHECKING:
    from m2flow.macro.graph import Call

_LATE = ("wait", "drop", "carry", "defer")
_CACHES = ("recompute", "keep")


def check_late(oversample: float, late: object, kv: object, staleness: int, timeout_s: float | None = None) -> None:
    """What a generate call is told about samples that are late, and about caches that are older than the weights.

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


def check_line(previous: Call | None, n: int, fields: tuple[frozenset[str] | None, frozenset[str] | None]) -> None:
    """A call that takes over the late groups of the previous one of its line makes rows of the same kind.

    Args:
        fields: the columns of the previous call's prompts, and of this one's; None: unknown.
    Raises:
        OptionError: another size of group, or other columns.
    """
    if previous is None:
        return
    if previous.options["n"] != n:
        raise OptionError(
            f"late='carry': this line had n={previous.options['n']} before and has n={n} now, so it would give groups of different sizes",
            now="Keep n, or give each size a line of its own.",
        )
    before, now = fields
    if before is not None and now is not None and before != now:
        raise OptionError(
            f"late='carry': the prompts of this line had the columns {', '.join(sorted(before))} before, now {', '.join(sorted(now))}; "
            "what is carried would not fit",
            now="Give each kind of prompts a line of its own.",
        )


CARRIED = -1
"""In `windows`: samples that an earlier call of a line drew."""


def windows(origins: Sequence[Call]) -> dict[int, tuple[int, int]]:
    """Call -> the oldest and the newest version that its samples may be of. What is carried counts for who gives it, not who drew it."""
    found = {call.ordinal: (call.reads[0].first, call.reads[0].version) for call in origins}
    carrying = [found[call.ordinal] for call in origins if call.carries_from is not None]
    return found | ({CARRIED: (min(a for a, _ in carrying), max(b for _, b in carrying))} if carrying else {})


def is_cut(options: Mapping[str, object]) -> bool:
    """Whether a generate call with these options ends before all of its samples do."""
    return options.get("late") in ("drop", "carry", "defer")


def carries(options: Mapping[str, object]) -> bool:
    """Whether what is late of a call with these options goes on in the next call of its line."""
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
    """How many groups of its own such a call gives, of this many prompts; fewer, if some are late by the clock.

    >>> num_wanted({"oversample": 1.25}, 40)
    32
    """
    oversample = options["oversample"]
    assert isinstance(oversample, int | float)
    return math.ceil(num_prompts / oversample - 1e-9)


def num_late(options: Mapping[str, object], num_prompts: int) -> int:
    """How many groups may be late when such a call of this many prompts ends.

    >>> num_late({"oversample": 1.25, "late": "carry"}, 40)
    8
    """
    return num_prompts - num_wanted(options, num_prompts)
