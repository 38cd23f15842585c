"""The lines of the programs that `test_scheduler_machine` makes: each is a place in a program, which calls of one line share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from m2flow import Dataset, Policy, Reference, Reward, Sample, concat, flow, nll, op, ppo_clip, reinforce
from m2flow.errors import FlowError
from m2flow.macro.handles import Handle, Rows
from m2flow.micro.protocol.plan import PREFILL
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.scheduler_model import Model

T = TypeVar("T")

_MOST_VARIABLES = 6
"""Results of each kind that a program can reach."""


def zero(sample: Sample) -> float:
    return 0.0


def keeps(sample: Sample) -> bool:
    return True


@op(granularity="sample")
def texts(sample: Sample) -> int:
    return 0


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@op(granularity="minibatch", size=2)
def places(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@op(granularity="batch")
def total(samples: list[Sample]) -> float:
    return 0.0


ROWS = [{"prompt": str(i)} for i in range(5)]


@flow
def roles() -> None:
    """Everything that a program of the machine may use: for the placement."""
    lines = ProgramLines()
    samples = lines.generate(0, count=2, n=2)
    rewards = lines.score(0, samples)
    lines.update(0, samples, rewards, epochs=1, minibatch=None, has_reference=True)
    lines.update(1, lines.generate(1, count=2, n=2), None, epochs=1, minibatch=None, has_reference=False)


class ProgramLines:
    """Two policies, a reference, datasets, two rewards; and what can be done with them."""

    def __init__(self) -> None:
        self.policies = [Policy("fake"), Policy("fake", name="other")]
        self.rewards = [Reward(zero), Reward(zero, name="second", timeout_s=1.0)]
        self.prompts = Dataset(ROWS)
        self.demos = Dataset([{"prompt": "a", "target": "b"}] * 3, name="demos")
        self.reference = Reference(self.policies[0])

    def generate(self, policy: int, *, count: int, n: int, kv: str = "recompute") -> Rows:
        return self.policies[policy].generate(self.prompts.take(count), n=n, max_new_tokens=9, kv=kv)  # type: ignore[arg-type]

    def again(self, policy: int, samples: Rows) -> Rows:
        return self.policies[policy].generate(samples, n=2, max_new_tokens=9)

    def drop(self, policy: int, *, count: int) -> Rows:
        prompts = self.prompts.take(count)
        if count == 4:
            return self.policies[policy].generate(prompts, n=2, max_new_tokens=9, late="drop", timeout_s=60.0)
        return self.policies[policy].generate(prompts, n=2, max_new_tokens=9, oversample=1.5, late="drop")

    def carry(self, policy: int, *, count: int) -> Rows:
        prompts = self.prompts.take(count)
        if policy:
            return self.policies[1].generate(prompts, n=2, max_new_tokens=9, oversample=1.5, late="carry", kv="keep")
        return self.policies[0].generate(prompts, n=2, max_new_tokens=9, oversample=1.5, late="carry")

    def refill(self, policy: int, *, count: int) -> Rows:
        return self.policies[policy].generate(
            self.prompts, n=2, max_new_tokens=9, count=count, score=self.rewards[1], keep=lambda rewards: True, max_draws=12
        )

    def score(self, which: int, samples: Rows) -> Handle:
        return self.rewards[which].score(samples)

    def apply(self, which: int, samples: Rows) -> Handle:
        return (texts, ranks, places, total)[which](samples)

    def filter(self, samples: Rows) -> Rows:
        return samples.filter(keeps)

    def union(self, first: Rows, second: Rows) -> Rows:
        return concat([first, second])

    def logprobs(self, samples: Rows) -> Handle:
        return self.reference.logprobs(samples)

    def update(
        self, policy: int, samples: Rows, rewards: Handle | None, *, epochs: int, minibatch: int | None, has_reference: bool
    ) -> Handle:
        loss = (ppo_clip(kl_coef=0.1) if has_reference else reinforce()) if rewards is not None else nll()
        reference = self.reference if has_reference and rewards is not None else None
        return self.policies[policy].update(
            samples, rewards, loss=loss, reference=reference, epochs=epochs, minibatch_size=minibatch, allow_unsound=True
        )

    def demonstrate(self, policy: int) -> Handle:
        return self.policies[policy].update(self.demos.all(), loss=nll(), minibatch_size=2)


@final
class Program:
    """A program that is made up move by move, on a model of the workers; whole numbers tell each move which of its things it takes."""

    def __init__(self, spec: ClusterSpec, *, staleness: int, seed: int, deterministic: bool, fails: bool, dies: bool = False) -> None:
        self.model = Model(roles, spec, staleness=staleness, seed=seed, deterministic=deterministic)
        self._lines = ProgramLines()
        self._staleness = staleness
        self._fails = fails
        self._dies = dies
        self._samples: list[tuple[Rows, int]] = []
        """With how many there are of a prompt."""
        self._scores: list[tuple[Handle, Rows, int]] = []
        self._others: list[Handle] = []
        self._num_steps = 0

    def do(self, move: str, a: int, b: int) -> None:
        """One move; one that is not possible now is none."""
        if self.model.is_ended:
            return
        getattr(self, f"_{move}")(a, b)

    def end(self) -> None:
        """The program is over: everything is done and forgotten."""
        self._samples.clear()
        self._scores.clear()
        self._others.clear()
        self.model.end()

    def close(self) -> None:
        self.model.close()

    # Moves of the program

    def _step(self, a: int, b: int) -> None:
        if self._num_steps < 12:
            self._num_steps += 1
            self.model.next_step()

    def _generate(self, a: int, b: int) -> None:
        kv = "keep" if self._staleness and self._num_steps and a % 3 == 0 else "recompute"
        n = 1 + b % 3
        self._made(lambda: self._lines.generate(a % 2, count=1 + a % 4, n=n, kv=kv), n)

    def _again(self, a: int, b: int) -> None:
        if self._samples:
            samples, _ = self._pick(self._samples, b)
            self._made(lambda: self._lines.again(a % 2, samples), 2)

    def _drop(self, a: int, b: int) -> None:
        self._made(lambda: self._lines.drop(b % 2, count=2 + a % 3), 2)

    def _carry(self, a: int, b: int) -> None:
        if self._staleness and self._num_steps:
            self._made(lambda: self._lines.carry(b % 2, count=2 + a % 3), 2)

    def _refill(self, a: int, b: int) -> None:
        self._made(lambda: self._lines.refill(b % 2, count=1 + a % 3), 2)

    def _filter(self, a: int, b: int) -> None:
        if self._samples:
            samples, n = self._pick(self._samples, a)
            self._made(lambda: self._lines.filter(samples), n)

    def _union(self, a: int, b: int) -> None:
        if self._samples:
            (first, n), (second, m) = self._pick(self._samples, a), self._pick(self._samples, b)
            if first is not second and n == m:
                self._made(lambda: self._lines.union(first, second), n)

    def _score(self, a: int, b: int) -> None:
        if self._samples:
            samples, n = self._pick(self._samples, a)
            with contextlib.suppress(FlowError):
                self._scores.append((self._lines.score(b % 2, samples), samples, n))

    def _apply(self, a: int, b: int) -> None:
        if self._samples:
            samples, _ = self._pick(self._samples, a)
            self._other(lambda: self._lines.apply(b % 4, samples))

    def _logprobs(self, a: int, b: int) -> None:
        if self._samples:
            samples, _ = self._pick(self._samples, a)
            self._other(lambda: self._lines.logprobs(samples))

    def _update(self, a: int, b: int) -> None:
        scored = [known for known in self._scores if known[2] > 1]
        if scored:
            rewards, samples, _ = self._pick(scored, a)
            size, epochs = (None, 1, 2)[b % 3], 1 + b % 2
            self._other(lambda: self._lines.update(b % 2, samples, rewards, epochs=epochs, minibatch=size, has_reference=a % 2 == 0))

    def _demonstrate(self, a: int, b: int) -> None:
        self._other(lambda: self._lines.demonstrate(a % 2))

    def _let_go(self, a: int, b: int) -> None:
        """The program forgets one of its variables."""
        kept = (self._samples, self._scores, self._others)[b % 3]
        if kept:
            del kept[a % len(kept)]

    def _look(self, a: int, b: int) -> None:
        if self._samples:
            self.model.submit()
            self.model.look(self._pick(self._samples, a)[0])

    def _submit(self, a: int, b: int) -> None:
        self.model.submit()

    # Moves of others

    def _turn(self, a: int, b: int) -> None:
        self.model.turn(a)

    def _hear(self, a: int, b: int) -> None:
        self.model.deliver(a)

    def _hear_again(self, a: int, b: int) -> None:
        self.model.deliver_again(a)

    def _run(self, a: int, b: int) -> None:
        self.model.run(1 + a % 40)

    def _fail(self, a: int, b: int) -> None:
        if self._fails:
            self.model.fail(a)

    def _die(self, a: int, b: int) -> None:
        if self._dies:
            self.model.kill(a)

    def _miss(self, a: int, b: int) -> None:
        self.model.detect_loss()

    def _come_back(self, a: int, b: int) -> None:
        self.model.restart()

    def _drain(self, a: int, b: int) -> None:
        self.model.drain()

    def _made(self, line: Callable[[], Rows], n: int) -> None:
        with contextlib.suppress(FlowError):  # The program may not do this; nothing was recorded.
            self._samples.append((line(), n))
        del self._samples[:-_MOST_VARIABLES]

    def _other(self, line: Callable[[], Handle]) -> None:
        with contextlib.suppress(FlowError):
            self._others.append(line())
        del self._others[:-_MOST_VARIABLES]

    def _pick(self, known: Sequence[T], number: int) -> T:
        return known[-1 - number % len(known)]


MOVES = (
    *(
        "generate",
        "drop",
        "carry",
        "carry",
        "refill",
        "again",
        "filter",
        "union",
        "score",
        "score",
        "apply",
        "logprobs",
        "update",
        "update",
    ),
    *("demonstrate", "step", "step", "let_go", "let_go", "look", "submit", "submit"),
    *("turn", "turn", "hear", "hear", "hear_again", "run", "run", "run", "fail", "drain"),
    *("die", "miss", "come_back"),
)
"""Each as often as it is drawn."""


def random_walk(seed: int, num_moves: int, *, dies: bool = False, policies: str = "", embeds: bool = False) -> int:
    """A program of so many moves that a seed decides, to its end; how many events the scheduler took. With `embeds` policies go by
    embeddings of prompts.
    """
    rng = random.Random(seed)
    spec = cluster(
        rng.choice(["split", "time-shared"]), rng.randint(1, 3), rng.choice([1, 3, 64]), rng.choice([1, 30, 4096]), rng.randint(1, 2)
    )
    if embeds:
        spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"difficulty": PREFILL, "predictor": "learned"})})
    program = Program(
        spec.with_policy(policies),
        staleness=rng.choice([0, 1, 1, 2]),
        seed=seed,
        deterministic=rng.random() < 0.2,
        fails=rng.random() < 0.2,
        dies=dies,
    )
    try:
        for _ in range(num_moves):
            program.do(rng.choice(MOVES), rng.randrange(1 << 16), rng.randrange(1 << 16))
        program.end()
    except AssertionError as broken:
        raise AssertionError(f"random_walk({seed}, {num_moves}): {broken}") from broken
    finally:
        program.close()
    return program.model.num_events


def cluster(placement: str, num_workers: int, max_running: int, token_budget: int, num_functions: int) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=num_workers, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=token_budget),
        functions=FunctionSpec(workers=num_functions, chunk=3),
    )
