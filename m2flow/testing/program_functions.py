"""The users' functions that random programs run on workers: rewards, ops, keeps, filters, roles; some raise on some samples."""

from __future__ import annotations

import asyncio
import math
import random

from m2flow.macro.ops import op
from m2flow.macro.refill import Keep, informative
from m2flow.macro.user_roles import Role, call
from m2flow.samples import Finish, Sample
from m2flow.testing.fakes import fake_hash


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def length_penalty(sample: Sample) -> float | dict[str, float]:
    """Of some samples it says what it is made of."""
    penalty = -sample.num_tokens / 64
    return {"reward": penalty, "tokens": sample.num_tokens, "cut": sample.finish is Finish.LENGTH} if _hash(sample) % 3 else penalty


def at_random(sample: Sample) -> float:
    return float(_hash(sample) % 2)


def raises_on_some(sample: Sample) -> float:
    if _hash(sample) % 3 == 0:
        raise ValueError("no verdict")
    return float(_hash(sample) % 2)


def raises_on_few(sample: Sample) -> float:
    if _hash(sample) % 11 == 0:
        raise ValueError("no verdict")
    return at_random(sample)


def no_number_on_some(sample: Sample) -> object:
    return "none" if _hash(sample) % 3 == 0 else 0.5


def _hash(sample: Sample) -> int:
    return fake_hash(*(ord(c) for c in str(sample.text)))


@op()
def doubled_length(sample: Sample) -> float:
    return 2.0 * sample.num_tokens


@op(granularity="group")
def rank_in_group(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


@op(granularity="minibatch", size=2)
def place_in_minibatch(samples: list[Sample]) -> list[float]:
    return [place + len(samples) / 16 for place in range(len(samples))]


@op(granularity="batch")
def digest_of_all(samples: list[Sample]) -> float:
    return float(fake_hash(len(samples), *(_hash(sample) & 0xFFFF for sample in samples)) % 997)


@op()
def raising_op(sample: Sample) -> float:
    return raises_on_some(sample)


@op(granularity="group")
def raising_on_groups(samples: list[Sample]) -> list[int]:
    if _hash(samples[0]) % 4 == 0:
        raise KeyError(samples[0].text)
    return [len(samples)] * len(samples)


@op()
def weighed(sample: Sample, number: float, whole: float, factor: float, rng: random.Random) -> float:
    return round(number * factor + _finite(whole) / (1 + sample.num_tokens) + rng.random(), 6)


@op(granularity="group")
def against(numbers: list[float], samples: list[Sample], others: list[float], *, whole: float) -> list[float]:
    return [round(a - place * b + _finite(whole) % 1, 6) for place, (a, b) in enumerate(zip(numbers, others, strict=True))]


@op(granularity="batch")
def tied(samples: list[Sample], numbers: list[float], others: list[float], whole: float) -> float:
    ranks = sorted(range(len(samples)), key=lambda i: (numbers[i], others[i], i))
    return float(fake_hash(*ranks) % 997) + round(_finite(whole), 3)


def _finite(number: float) -> float:
    """The mean of no samples is no number."""
    return number if math.isfinite(number) else 0.0


BOARD: list[int] = []
"""A place outside. Those who run a program in this process clear it first."""


@op(writes=["board"])
def posted(sample: Sample) -> float:
    last = BOARD[-1:] or [0]
    BOARD.append(sample.num_tokens + 3 * last[0] % 101)
    return float(last[0])


@op(granularity="batch", reads=["board"])
def board_digest() -> float:
    return float(fake_hash(*BOARD) % 997)


class Keeper(Role):
    """Remembers what it has seen, so that the order of its calls and of their samples shows in each of its numbers."""

    def __init__(self, first: int, *, fails: bool) -> None:
        self.seen = [first]
        self.fails = fails

    @call(returns="reward", writes=["keeper.seen"])
    def note(self, sample: Sample) -> float:
        novelty = sum(abs(length - sample.num_tokens) for length in self.seen[-3:])
        self.seen.append(sample.num_tokens)
        return raises_on_few(sample) if self.fails else float(novelty)

    @call(granularity="batch", reads=["keeper.seen"])
    def digest(self) -> float:
        return float(fake_hash(*self.seen) % 997)

    @call(granularity="group", reads=["keeper.seen"], returns=["rank", "last"])
    async def compare(self, samples: list[Sample], numbers: list[float]) -> list[dict[str, float]]:
        await asyncio.sleep(0)
        return [{"rank": sorted(numbers).index(number), "last": self.seen[-1]} for number in numbers]

    @call(granularity="batch", writes=["keeper.seen"])
    def forget(self, keep: int) -> None:
        self.seen = self.seen[-keep:]

    @call(granularity="sample")
    def plain(self, sample: Sample, rng: random.Random) -> float:
        return round(rng.random() * sample.num_tokens + len(self.seen), 6)


def longest_differs(group: list[Sample]) -> bool:
    return max(sample.num_tokens for sample in group) % 3 != 0


def every_second(group: list[Sample]) -> bool:
    return bool(_hash(group[0]) % 2)


def keep_raises(group: list[Sample]) -> bool:
    if _hash(group[0]) % 6 == 0:
        raise RuntimeError("can't say")
    return bool(_hash(group[0]) % 2)


def is_odd_text(sample: Sample) -> bool:
    return bool(_hash(sample) % 2)


def lengths_differ(samples: list[Sample]) -> bool:
    return len({s.num_tokens for s in samples}) > 1


REWARDS = (digit_share, length_penalty, at_random, raises_on_some, no_number_on_some, raises_on_few)
KEEPS: tuple[Keep, ...] = (informative, longest_differs, every_second, keep_raises)
NUM_SAFE = 3
"""The first rewards and the first keeps raise nothing."""
