"""What the tests of the algebra on handles share: responses with rewards, over fakes, and a run in both modes."""

from __future__ import annotations

from collections.abc import Callable

from m2flow import (
    Dataset,
    Flow,
    Number,
    Policy,
    Reference,
    Reward,
    Rows,
    Sample,
    flow,
    op,
)
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "level": i % 3, "kind": ["easy", "hard"][i % 2]} for i in range(12)]
SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=3),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=2, chunk=2),
)


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


@op(granularity="group")
def rank(samples: list[Sample]) -> list[int]:
    return [sorted(range(len(samples)), key=lambda i: (str(samples[i].text), i)).index(j) for j in range(len(samples))]


class Rollout:
    """Responses of a first step, and what was computed of them."""

    def __init__(self, n: int = 3, batch: int = 4) -> None:
        self.policy = Policy("fake")
        self.reference = Reference("fake")
        self.verifier = Reward(digit_share)
        self.responses = self.policy.generate(Dataset(ROWS).take(batch), n=n, max_new_tokens=10)
        self.rewards = self.verifier.score(self.responses)

    def leaf(self, name: str) -> Rows | Number:
        match name:
            case "rewards":
                return self.rewards
            case "ranks":
                return rank(self.responses)  # type: ignore[return-value]
            case "mean":
                return self.rewards.mean()
            case "kl":
                return self.responses.logprobs - self.reference.logprobs(self.responses)
            case _:
                return getattr(self.responses, name)  # type: ignore[no-any-return]


def eager(body: Callable[[], object]) -> Answer:
    answer = run_eager(flow(body), {}, SPEC)
    assert answer.error == "", answer.error
    return answer


def same(body: Flow, **options: object) -> Answer:
    """What a flow comes to, eager and planned alike."""
    answer = run_eager(body, options, SPEC)
    assert answer.error == "", answer.error
    for order_seed in (1, 2):
        assert run_planned(body, options, SPEC, order_seed=order_seed) == answer
    return answer


def logged(answer: Answer) -> dict[str, float]:
    return {name: value for _, name, value in answer.logs}
