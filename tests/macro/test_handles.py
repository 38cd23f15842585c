"""Handles: what waits and what does not, and what a handle is good for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from m2flow import Dataset, Metrics, Policy, Reward, Rows, Sample, flow, log, op, steps
from m2flow.errors import M2FlowError, TraceError
from m2flow.macro.graph import Call, Observation
from m2flow.macro.session import Backend
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}=", "target": str(i)} for i in range(6)]
SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=1, chunk=2),
)


class Watching(Backend):
    """Gives a source's rows and says what was waited for; anything else it does not know."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.waits: list[str] = []
        self.logged: dict[str, tuple[int, str | None] | float] = {}

    def submit(self, call: Call) -> None:
        self.calls[call.ordinal] = call

    def value(self, ordinal: int) -> object:
        call = self.calls[ordinal]
        rows = call.options.get("rows")
        return rows if isinstance(rows, Batch) else {"reward": 0.25} if call.method == "update" else 0.5

    def observed(self, observation: Observation) -> None:
        self.waits.append(f"{self.calls[observation.call].name} {observation.why}")

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        self.logged |= values

    def release(self, ordinal: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def watched(body: Callable[[], object]) -> Watching:
    backend = Watching()
    flow(body).run(backend, {})
    return backend


def one(sample: Sample) -> float:
    return 1.0


def trained() -> tuple[Rows, Rows, Metrics]:
    policy = Policy("fake")
    responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
    rewards = Reward(one).score(responses)
    return responses, rewards, policy.update(responses, rewards)


def test_looking_at_a_handles_text_waits_for_nothing():
    def body() -> None:
        responses, rewards, metrics = trained()
        for handle in (responses, rewards, metrics):
            assert f"{handle!r} {handle}".count("not computed by looking at it like this") == 2
        assert repr(metrics).startswith("<policy.update: one value, numbers by name, from ")
        assert repr(metrics["reward"]).startswith("<reward of <policy.update")
        assert "one row a sample" in repr(responses)
        log(reward=metrics["reward"])
        assert metrics.lagged(1) is None

    assert watched(body).waits == []


def test_float_len_iteration_index_bool_and_formatting_wait_and_say_why():
    def body() -> None:
        rows = Dataset(ROWS, shuffle=False).take(2)
        metrics = trained()[2]
        assert len(rows) == 2
        assert [sample.prompt for sample in rows] == ["0=", "1="]
        assert rows[-1].prompt == "1="
        assert float(metrics["reward"]) == 0.25
        assert f"{metrics['reward']:.1f}" == "0.2"
        assert bool(metrics)
        assert metrics.items() == {"reward": 0.25}

    update, rows = "policy.update", "dataset.take"
    whys = [
        *(f"{rows} {why}" for why in ("len()", "a loop", "an index")),
        *(f"{update} {why}" for why in ("float()", "formatting", "bool()", "items()")),
    ]
    assert watched(body).waits == whys


def test_what_has_no_single_answer_is_refused_with_what_to_write_instead():
    def body() -> None:
        responses, _, metrics = trained()
        for ask, message in [
            (lambda: bool(responses), "has many rows; its truth is not defined"),
            (lambda: bool(metrics["reward"]), "can't decide a branch by itself"),
            (lambda: float(metrics["rewrd"]), "there is no metric 'rewrd'; there are reward"),
            (lambda: metrics.lagged(-1), r"lagged\(-1\): the number of steps is a whole number"),
            (lambda: log(x=responses), r"log\(x=...\) got the rows of policy.generate"),
            (lambda: log(x=metrics), r"log\(x=...\) got the value of policy.update"),
            (lambda: log(x="high"), r"log\(x=...\) got 'high', which is not a number"),
            (lambda: log(**{"na\ud800me": 1.0}), r"the name 'na\\ud800me' has half of a surrogate pair"),
        ]:
            with pytest.raises(TraceError, match=message):
                ask()

    watched(body)


def test_log_takes_numbers_handles_of_one_value_and_plain_floats():
    @op(granularity="batch")
    def count(samples: list[Sample]) -> float:
        return float(len(samples))

    def body() -> None:
        responses, rewards, metrics = trained()
        log(a=metrics["reward"], b=rewards.mean(), c=count(responses), d=3)

    backend = watched(body)
    ordinals = {call.name: ordinal for ordinal, call in backend.calls.items()}
    assert backend.logged == {
        "a": (ordinals["policy.update"], "reward"),
        "b": (ordinals["mean"], None),
        "c": (ordinals["count"], None),
        "d": 3.0,
    }


def test_a_handle_of_another_flow_or_of_an_ended_one_is_refused():
    kept = []
    watched(lambda: kept.extend(trained()))
    responses, _, metrics = kept
    for use in (lambda: float(metrics["reward"]), lambda: list(responses)):
        with pytest.raises(TraceError, match="a handle was used after its flow had ended") as caught:
            use()
        assert "test_handles.py:" in caught.value.where

    def other() -> None:
        for use in (
            lambda: Policy("fake").generate(responses, max_new_tokens=4),
            lambda: Reward(one).score(responses),
            lambda: log(x=metrics["reward"]),
        ):
            with pytest.raises(TraceError, match="got a handle of another flow"):
                use()

    watched(other)


@flow
def lagging(k: int = 1) -> None:
    policies, verifier, prompts = (Policy("fake", name="a"), Policy("fake", name="b")), Reward(one), Dataset(ROWS)

    def train(index: int, count: int) -> float:
        policy = policies[index]
        responses = policy.generate(prompts.take(count), n=2, max_new_tokens=6)
        metrics = policy.update(responses, verifier.score(responses))
        log(**{f"now{index}": metrics["num_tokens"]})
        before = metrics.lagged(k)
        return -1.0 if before is None else before["num_tokens"]

    for _ in steps(4):
        for index in range(2):
            log(**{f"before{index}": train(index, index + 1)})


def by_name(answer: Answer) -> dict[str, list[float]]:
    assert answer.error == ""
    return {name: [value for _, n, value in sorted(answer.logs) if n == name] for name in ("now0", "before0", "now1", "before1")}


@pytest.mark.parametrize("k", [0, 1, 2])
def test_lagged_gives_none_first_and_then_the_value_of_k_steps_ago_in_both_modes(k):
    eager = by_name(run_eager(lagging, {"k": k}, SPEC))
    for index in "01":
        assert eager[f"before{index}"] == [-1.0] * k + eager[f"now{index}"][: 4 - k]
    assert eager["now0"] != eager["now1"]
    assert by_name(run_planned(lagging, {"k": k}, SPEC, order_seed=1)) == eager


def test_observing_rows_gives_the_same_in_both_modes():
    @flow
    def looks() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(lambda s: s.num_tokens / 2), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=3, max_new_tokens=9)
            rewards = verifier.score(responses)
            log(tokens=sum(sample.num_tokens for sample in responses), best=max(rewards), first=rewards[0], rows=len(rewards))
            policy.update(responses, rewards)

    eager = run_eager(looks, {}, SPEC)
    assert eager.error == ""
    assert {name: value for step, name, value in eager.logs if step == 0}["rows"] == 6
    planned = run_planned(looks, {}, SPEC, order_seed=2)
    assert sorted(planned.logs) == sorted(eager.logs)
    assert planned == eager


def test_a_number_of_a_value_that_is_no_number_says_so():
    @op(granularity="batch")
    def first(samples: list[Sample]) -> str:
        return str(samples[0].prompt)

    @flow
    def reads() -> None:
        from m2flow import Number

        Policy("fake")
        float(Number(first(Dataset(ROWS, shuffle=False).take(2))))

    with pytest.raises(M2FlowError, match="is '0=', which is not a number"):
        _raise(run_eager(reads, {}, SPEC))


def _raise(answer: Answer) -> None:
    raise M2FlowError(answer.error)


def test_lagged_tells_the_lines_apart_that_a_helper_is_called_from():
    @flow
    def sometimes() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(one), Dataset(ROWS)

        def train(count: int) -> float:
            responses = policy.generate(prompts.take(count), n=2, max_new_tokens=6)
            before = policy.update(responses, verifier.score(responses)).lagged(1)
            return -1.0 if before is None else before["num_sequences"]

        for step in steps(3):
            if step != 1:
                log(rarely=train(1))
            log(always=train(2))

    answer = run_eager(sometimes, {}, SPEC)
    assert answer.error == ""
    assert [value for _, name, value in answer.logs if name == "always"] == [-1.0, 4.0, 4.0]
    assert [value for _, name, value in answer.logs if name == "rarely"] == [-1.0, -1.0]
