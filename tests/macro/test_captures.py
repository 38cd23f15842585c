"""What a call takes is taken as it is then: functions with what they capture, containers, rows; in both modes."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, log, loss, op, steps
from m2flow.errors import TraceError
from m2flow.macro.capture import LARGE_BYTES, Captures, Snapshot
from m2flow.macro.eager import EagerBackend
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Site
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(8)]
SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=2, chunk=2),
)
HERE = Site("flow.py", 1, "a line")


def both(some: Flow) -> Answer:
    """The one answer of both modes."""
    eager = run_eager(some, {}, SPEC)
    assert run_planned(some, {}, SPEC, order_seed=5) == eager
    return eager


def scored(make: Callable[[], tuple[Callable[[Sample], object], Callable[[], object]]]) -> Flow:
    """Two calls of a reward in each of two steps, with something done between them; both made anew by each run."""

    @flow
    def scores() -> None:
        function, then = make()
        policy, judge, prompts = Policy("fake"), Reward(function, name="judge"), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=5)
            log(first=judge.score(responses).mean())
            then()
            log(second=judge.score(responses).mean())

    return scores


def logs(answer: Answer) -> list[float]:
    assert answer.error == ""
    return [value for *_, value in answer.logs]


def test_a_closure_value_that_changes_after_the_call_changes_later_calls_alone():
    def make() -> tuple[Callable[[Sample], object], Callable[[], object]]:
        limit = 1.0

        def double() -> None:
            nonlocal limit
            limit *= 2

        return lambda sample: limit, double

    assert logs(both(scored(make))) == [1.0, 2.0, 2.0, 4.0]


def test_an_array_and_a_list_in_a_closure_may_be_written_to_after_the_call():
    @flow
    def writes() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        weights, words = np.ones(3), ["a"]
        judge = Reward(lambda sample: float(weights.sum()) + len(words), name="judge")
        for _ in steps(2):
            log(mean=judge.score(policy.generate(prompts.take(2), max_new_tokens=4)).mean())
            weights[:] = 5.0
            words.append("b")

    assert logs(both(writes)) == [4.0, 17.0]


def test_a_reward_that_changes_what_it_captures_gives_the_same_in_both_modes_and_under_every_chunking():
    seen: list[str] = []

    def make() -> tuple[Callable[[Sample], object], Callable[[], object]]:
        count = 0

        def counts(sample: Sample) -> float:
            nonlocal count
            count += 1
            seen.append(str(sample.text))
            return float(count + len(seen))

        return counts, lambda: None

    assert set(both(scored(make)).rewards.values()) == {2.0}
    assert seen == []


def test_an_object_of_the_users_with_state_is_as_it_was_at_the_call():
    class Judge:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, sample: Sample) -> float:
            self.calls += 1
            return float(self.calls)

        def ask(self) -> None:
            self.calls += 10

    def make() -> tuple[Callable[[Sample], object], Callable[[], object]]:
        judge = Judge()
        return judge, judge.ask

    assert logs(both(scored(make))) == [1.0, 11.0, 11.0, 21.0]


def test_late_binding_in_a_loop_gives_what_each_turn_had_and_is_no_other_structure():
    @flow
    def binds() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), max_new_tokens=4)
            for limit in range(3):
                log(**{f"limit{limit}": Reward(lambda sample: float(limit), name=f"judge{limit}").score(responses).mean()})  # noqa: B023

    assert {(name, value) for _, name, value in both(binds).logs} == {("limit0", 0.0), ("limit1", 1.0), ("limit2", 2.0)}

    def one(limit: int) -> Flow:
        @flow
        def scores() -> None:
            Reward(lambda sample: sample.num_tokens > limit, name="judge").score(
                Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=2)
            )

        return scores

    assert trace(one(1), {})[0].structure_hash() == trace(one(2), {})[0].structure_hash()


def test_rows_of_a_dataset_may_be_changed_after_it_took_them():
    @flow
    def mutates() -> None:
        rows = [{"prompt": f"{i}=", "tags": [i]} for i in range(4)]
        prompts = Dataset(rows, shuffle=False)
        rows[0]["prompt"] = "other"
        rows[1]["tags"].append(99)  # type: ignore[attr-defined]
        rows.clear()
        judge = Reward(lambda sample: len(sample.tags) + len(str(sample.prompt)) / 10, name="judge")
        rewards = judge.score(Policy("fake").generate(prompts.take(4), max_new_tokens=3))
        log(sum=float(sum(rewards)))

    assert logs(both(mutates)) == [pytest.approx(4 * 1.2)]


def test_what_is_looked_at_can_not_be_written_to():
    @flow
    def looks() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        for array in (responses.batch().ragged("tokens").values, responses[0].tokens, responses.batch().ids):  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        rewards = Reward(lambda sample: 1.0, name="judge").score(responses)
        metrics = policy.update(responses, rewards)
        metrics.items()["reward"] = 7.0
        log(reward=metrics["reward"])

    assert logs(both(looks)) == [1.0]


def test_a_reward_that_writes_to_its_sample_is_refused_in_both_modes():
    def writes(sample: Sample) -> float:
        sample.tokens[:] = 0  # type: ignore[index]
        return 1.0

    some = scored(lambda: (writes, lambda: None))
    for answer in (run_eager(some, {}, SPEC), run_planned(some, {}, SPEC)):
        assert "assignment destination is read-only" in answer.error


def test_a_cache_and_a_by_product_of_what_can_not_change_are_kept():
    @functools.cache
    def table() -> object:
        return object()

    taken = Captures().take(lambda sample: table(), HERE)
    assert isinstance(taken, Snapshot)
    assert taken.is_fixed
    assert taken(0) is taken(1)


def test_the_users_own_loss_is_snapshot_too():
    scale = [1.0]

    @loss(needs=["logprobs"])
    def scaled(logprobs: object) -> object:
        return scale[0]

    taken = Captures().options({"loss": scaled}, HERE)["loss"]
    scale[0] = 2.0
    assert taken.function(logprobs=0) == 1.0  # type: ignore[attr-defined]


def test_containers_among_the_options_are_copied():
    options = {"rows": [1, [2]], "by": {"a": [1]}, "array": np.zeros(2)}
    taken = Captures().options(options, HERE)
    options["rows"][1].append(3)  # type: ignore[index]
    options["by"]["a"].append(2)  # type: ignore[index]
    options["array"][:] = 1.0  # type: ignore[index]
    assert taken["rows"] == [1, [2]]
    assert taken["by"] == {"a": [1]}
    assert not np.any(taken["array"])  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["cell", "default", "global", "inner"])
def test_a_snapshot_is_used_again_only_while_nothing_that_it_captures_has_changed(change):
    captures, limit, space = Captures(), 1000, {"scale": 1000}
    exec("def scaled(s): return scale", space)

    def inner() -> int:
        return limit

    def function(s: object, k: int = 1000) -> int:
        return limit + k + inner()

    function = {"global": space["scaled"]}.get(change, function)  # type: ignore[assignment]
    first = captures.take(function, HERE)
    assert captures.take(function, HERE) is first
    if change in ("cell", "inner"):
        limit += 1
    elif change == "default":
        function.__defaults__ = (2000,)
    else:
        space["scale"] += 1
    second = captures.take(function, HERE)
    assert second is not first
    assert second(0) != first(0)  # type: ignore[operator]
    assert captures.take(function, HERE) is second


def test_what_a_large_snapshot_holds_is_not_copied_for_each_unit():
    large = list(range(LARGE_BYTES))
    taken = Captures().take(lambda sample: large, HERE)
    assert isinstance(taken, Snapshot)
    assert taken(0) is taken(1)
    assert taken(0) is not large


class Client:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Asking:
    def __init__(self) -> None:
        self.client = Client()

    def __call__(self, sample: Sample) -> float:
        return 1.0

    def score(self, sample: Sample) -> float:
        return 1.0


def generator(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    numbers = (i for i in range(9))
    return lambda sample: next(numbers)


def open_file(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    log_file = closing.enter_context((place / "log").open("w+"))
    return lambda sample: log_file.write("x")


def file_to_read(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    (place / "answers").write_text("x")
    answers = closing.enter_context((place / "answers").open())
    return lambda sample: answers.read()


def lock_as_default(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    def judge(sample: Sample, lock: object = threading.RLock()) -> float:
        return 1.0

    return judge


def socket_in_a_dict(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    peers = {"judge": [closing.enter_context(socket.socket())]}
    return lambda sample: peers["judge"][0].fileno()


def thread_of_a_helper(place: Path, closing: contextlib.ExitStack) -> Callable[[Sample], object]:
    thread = threading.Thread()

    def helper() -> bool:
        return thread.is_alive()

    return lambda sample: helper()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (generator, r"captures `numbers`, a generator"),
        (open_file, r"captures `log_file`, an open file"),
        (file_to_read, r"captures `answers`, an open file"),
        (lock_as_default, r"`lock_as_default.judge` captures `lock`, a lock"),
        (socket_in_a_dict, r"captures `peers\['judge'\]\[0\]`, a socket"),
        (thread_of_a_helper, r"captures `thread`, a thread"),
        (lambda place, closing: Asking(), r"`Asking` captures `self\.client\.lock`, a lock"),
        (lambda place, closing: Asking().score, r"`Asking\.score` captures `self\.client\.lock`, a lock"),
    ],
)
def test_what_can_not_be_snapshot_is_refused_at_the_call_by_name_in_both_modes(make, message, tmp_path):
    reached = []
    with contextlib.ExitStack() as closing:
        function = make(tmp_path, closing)

        @flow
        def refused() -> None:
            responses = Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=3)
            judge = Reward(function, name="judge")
            reached.append(True)
            judge.score(responses)

        for run in (lambda: trace(refused, {}), lambda: refused.run(EagerBackend(Nothing(), Nothing()), {})):
            with pytest.raises(TraceError, match=message) as caught:
                run()
            assert "judge.score(responses)" in caught.value.where
            assert caught.value.now
    assert len(reached) == 2


class Nothing:
    """Performs and notes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_a_handle_in_a_closure_is_refused_with_what_to_write_instead():
    @flow
    def captures() -> None:
        responses = Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=3)
        rewards = Reward(lambda sample: 1.0, name="judge").score(responses)
        op()(lambda sample: rewards)(responses)

    with pytest.raises(TraceError, match=r"captures `rewards`, a Scores.*\n.*as an input"):
        trace(captures, {})
