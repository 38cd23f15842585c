"""A reward that is slow, or hangs, keeps no other sample: neither those of its task nor those that come later."""

from __future__ import annotations

import threading

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.micro.worker import function_tasks
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

CLUSTER = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake"),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=1, patience_s=0.02),
)
ROWS = [{"prompt": f"{i}="} for i in range(6)]


class Met:
    """Opens when all samples but the first have been judged."""

    def __init__(self) -> None:
        self.left = 11
        self.lock = threading.Lock()
        self.all = threading.Event()

    def one(self) -> None:
        with self.lock:
            self.left -= 1
        if not self.left:
            self.all.set()


_met = Met()


def waits_for_the_others(sample: Sample) -> float:
    """The first sample is judged when all others have been; one after the other that is never."""
    if sample.id.prompt == 0 and sample.id.index == 0:
        return float(_met.all.wait(240))
    _met.one()
    return 0.5


@flow
def judged(num_steps: int = 1) -> None:
    policy, verifier = Policy("fake"), Reward(waits_for_the_others)
    for _ in steps(num_steps):
        responses = policy.generate(Dataset(ROWS).take(6), n=2, max_new_tokens=6)
        policy.update(responses, verifier.score(responses))


def _judged_in(run) -> dict[tuple[int, int], float]:  # type: ignore[no-untyped-def]
    global _met
    _met = Met()
    answer = run(judged, {}, CLUSTER)
    assert answer.error == ""
    return dict(answer.rewards)


@pytest.mark.parametrize("every_ns", [0, 500_000_000], ids=["one by one", "at the end"])
def test_a_reward_that_waits_for_all_the_others_gets_them_in_both_modes(monkeypatch: pytest.MonkeyPatch, every_ns: int) -> None:
    monkeypatch.setattr(function_tasks, "_EVERY_NS", every_ns)
    planned, eager = _judged_in(run_planned), _judged_in(run_eager)
    assert planned == eager
    assert sorted(planned.values()) == [0.5] * 11 + [1.0]


def test_what_is_done_leaves_before_the_task_ends_and_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_tasks, "_EVERY_NS", 0)
    samples = Batch(make_ids(1, 3, 2), {"text": Ragged.texts(list("abcdef"))})
    left: list[tuple[list[int], list[int]]] = []
    # Of this call only results above 1 stay.
    rows_of = lambda part, results: part.take([i for i, result in enumerate(results) if result > 1])  # noqa: E731
    task = function_tasks.StreamedResults(rows_of, samples, lambda ids, rows: left.append((ids, rows.ids.tolist())))
    ids = samples.ids.tolist()
    for position, result in ((3, 5), (1, 0), (2, 7)):
        task.done(position, result)
    assert left == [([ids[3]], [ids[3]]), ([ids[1]], []), ([ids[2]], [ids[2]])]
    assert task.rest([9, 0, 7, 5, 1, 8]).ids.tolist() == [ids[0], ids[5]]


def test_a_quick_task_is_reported_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_tasks, "_EVERY_NS", 3600 * 10**9)
    samples = Batch(make_ids(1, 2, 1), {"text": Ragged.texts(["a", "b"])})
    task = function_tasks.StreamedResults(lambda part, results: part, samples, lambda ids, rows: pytest.fail("nothing is slow here"))
    task.done(0, 1.0)
    assert not task.has_left
