"""A recorded flow run again: nothing is executed up to the point, and from there it goes on as it did."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from replayed import ROWS, Counting, Keeping, digits

from m2flow import AdamW, Dataset, Flow, Policy, Reference, Reward, Sample, flow, log, ppo_clip, steps
from m2flow.errors import DivergenceError, RewardError, SpecError
from m2flow.macro.graph import Call, Observation
from m2flow.macro.replay import BackendWrapper, MemoryRecord, Recorder, ReplayBackend, replay, stable_text, trains
from m2flow.macro.session import Backend
from m2flow.micro.records.flow_record import read_record
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

SPEC = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
OPTIONS: dict[str, object] = {"num_steps": 4}


@flow
def curriculum(num_steps: int = 4, seen: list[object] | None = None, cap: int = 12) -> None:
    """What comes next depends on what was seen, and on the flow's own dice."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference = Reference(policy)
    count = 2
    if seen is not None:
        seen.clear()  # The trace before a run has run this too.
    for step in steps(num_steps):
        n = random.choice([2, 3, 4, 5])
        responses = policy.generate(prompts.take(count), n=n, max_new_tokens=cap)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, optimizer=AdamW(1e-3))
        log(step=float(step), reward=metrics["reward"])
        texts = [str(sample.text) for sample in responses] if step == 1 else []
        count = 1 + int(float(metrics["num_tokens"]) + float(np.random.rand()) * 3 + len("".join(texts))) % 4
        lagged, drawn = metrics.lagged(1), random.random()
        print(f"step {step} of {num_steps}")
        if seen is not None:
            seen.append((step, n, count, prompts.cursor, texts, lagged, drawn))


class Refusing(Backend):
    """Executes nothing at all."""

    def submit(self, call: Call) -> None:
        raise AssertionError(f"{call.name} was executed")

    def value(self, ordinal: int) -> object:
        raise AssertionError("a value was asked for")

    def observed(self, observation: Observation) -> None:
        raise AssertionError("an observation came through")

    def log(self, step: int, values: object) -> None:
        raise AssertionError("a log came through")

    def release(self, ordinal: int) -> None:
        raise AssertionError("a release came through")

    def end_step(self, step: int) -> None:
        raise AssertionError("a step ended")

    def finish(self) -> None:
        raise AssertionError("it waited for the end")


def recorded(run: Callable[..., Answer] = run_eager, program: Flow = curriculum, **options: object) -> tuple[MemoryRecord, Answer]:
    record = MemoryRecord()
    answer = run(program, OPTIONS | options, SPEC, around=lambda backend: Keeping(backend, record))
    assert answer.error == ""
    return record, answer


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_a_replay_to_the_end_executes_nothing_and_the_flow_sees_what_it_saw(run):
    first: list[object] = []
    second: list[object] = []
    record, _ = recorded(run, seen=first)
    replay(curriculum, OPTIONS | {"seen": second}, record, Refusing())
    assert second == first
    assert len(record.looks) == 4 + 1 + 3
    assert len({n for _, n, *_ in first}) > 1  # type: ignore[misc]


def test_eager_and_planned_runs_remember_the_same():
    eager, planned = recorded(run_eager)[0], recorded(run_planned)[0]
    assert (eager.calls, eager.looks, eager.logs) == (planned.calls, planned.looks, planned.logs)


@pytest.mark.parametrize("run", [run_eager, run_planned])
@pytest.mark.parametrize("point", [{"until_step": 2}, {"until_step": 0}, {"until_call": 14}, {"until_call": 16}, {}], ids=str)
def test_after_the_point_the_flow_goes_on_with_the_same_calls_cursors_samples_and_weights(run, point):
    first: list[object] = []
    second: list[object] = []
    record, whole = recorded(run_eager, seen=first)
    again = MemoryRecord()
    watched: list[Counting] = []

    def around(backend: Backend) -> Backend:
        watched.append(Counting(backend))
        return Recorder(ReplayBackend(record, watched[0], redoes=trains, **point), again)

    answer = run(curriculum, OPTIONS | {"seen": second}, SPEC, around=around)
    assert answer.error == ""
    assert answer.weights == whole.weights
    assert answer.samples.items() <= whole.samples.items()
    assert second == first
    assert (again.calls, again.looks) == (record.calls, record.looks)
    from_step = point.get("until_step", 4)
    if "until_call" not in point:
        assert set(answer.samples) == {i for i in whole.samples if record.calls[i >> 42].step >= from_step}
        assert not [c.name for c in watched[0].calls if c.engine in ("rollout", "function") and c.step < from_step]


def test_a_trainer_that_was_restored_otherwise_is_not_trained_again():
    record, _ = recorded()
    live = Counting(_Answering(record))
    replay(curriculum, OPTIONS, record, live, until_step=3)
    assert {call.step for call in live.calls} == {3}


def test_a_look_back_past_the_point_is_answered_from_the_record():
    seen: list[object] = []
    record, _ = recorded()
    run_eager(curriculum, OPTIONS | {"seen": seen}, SPEC, around=lambda live: ReplayBackend(record, live, until_step=2, redoes=trains))
    assert seen[2][5] == record.value(record.looks[-3].call)  # type: ignore[index]


def test_prints_and_logs_come_from_the_point_on(capsys):
    record, _ = recorded()
    capsys.readouterr()
    logged: list[int] = []

    class Listening(BackendWrapper):
        def log(self, step: int, values: Mapping[str, object]) -> None:
            logged.append(step)

    replay(curriculum, OPTIONS, record, Listening(_Answering(record)), until_step=2)
    assert capsys.readouterr().out.splitlines() == ["step 2 of 4", "step 3 of 4"]
    assert logged == [2, 3]


class _Answering(Refusing):
    """A live backend that knows the answers already."""

    def __init__(self, record: MemoryRecord) -> None:
        self._record = record

    def submit(self, call: Call) -> None:
        pass

    def value(self, ordinal: int) -> object:
        return self._record.value(ordinal)

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: object) -> None:
        pass

    def release(self, ordinal: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def edited(source: str, tmp_path: Path, name: str) -> Flow:
    """A flow from a file, which can be edited."""
    path = tmp_path / "edited.py"
    path.write_text(source)
    module: dict[str, object] = {"__name__": name}
    exec(compile(source, str(path), "exec"), module)
    linecache.checkcache(str(path))
    found = module["loop"]
    assert isinstance(found, Flow)
    return found


PROGRAM = """\
from m2flow import Dataset, Policy, Reward, flow, steps
N = 2
LIMIT = 0
def judged(sample):
    return float(sample.num_tokens)
@flow
def loop():
    policy, judge = Policy("fake"), Reward(judged)
    prompts = Dataset([{"prompt": str(i)} for i in range(9)])
    for step in steps(2):
        responses = policy.generate(prompts.take(2), n=N, top_k=LIMIT, max_new_tokens=8)
        metrics = policy.update(responses, judge.score(responses))
        if float(metrics["reward"]) > 1e9:
            break
    policy.generate(prompts.take(1), max_new_tokens=3)
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("n=N", "n=3", r"edited\.py:11  .*n=3.*\n  call 0: the line has another text; .*n=N.*\n  recorded: dataset\.take\(.*\n  now:  "),
        ("max_new_tokens=8)", "max_new_tokens=8, top_p=0.5)", r"edited\.py:11  .*top_p=0.5\)\n  call 0: the line has another text"),
        (
            "N = 2",
            "N = 3",
            r"edited\.py:11  .*\n  call 1: n is 3; recorded was 2\n  recorded: policy\.generate\(prompts=%0, n=2, .*\n  now:  ",
        ),
        ("LIMIT = 0", "LIMIT = 5", r"edited\.py:11  .*\n  call 1: top_k is 5; recorded was not given"),
        ("range(9)", "range(7)", r"edited\.py:11  .*\n  call 0: rows is 2 rows, checksum"),
        ("num_tokens", "num_tokens + 1", r"edited\.py:12  .*\n  call 2: function is judged \(code "),
        ("judge.score(responses))", "judge.score(responses), epochs=2)", r"edited\.py:12  .*\n  call 2: the line has another text"),
        (
            "        metrics = ",
            "        judge.score(responses)\n        metrics = ",
            r"edited\.py:12  .*\n  call 2: the line has another text",
        ),
        (
            "if float(metrics",
            "if step and float(metrics",
            r"edited\.py:11  .*\n  .*\n  recorded: Python waited here for %3, float\(\), at .*:13",
        ),
        ("        if float(", "        len(responses)\n        if float(", r"edited\.py:13  len.*\n  .*\n  recorded: .* for %3, float\(\)"),
        ("steps(2)", "steps(1)", r"edited\.py:15  .*\n  call 4: it is dataset\.take in no step; recorded was dataset\.take in step 1"),
        (
            "    policy.generate(prompts.take(1), max_new_tokens=3)\n",
            "",
            r"edited\.py:15 .*\n  .*\n  .*\n  now:      the flow ends before it",
        ),
        ("take(1)", "take(2)", r"edited\.py:15  .*\n  call 8: count is 2; recorded was 1"),
    ],
)
def test_a_flow_that_was_edited_stops_at_the_first_line_that_differs(tmp_path, before, after, said):
    record = MemoryRecord()
    assert run_eager(edited(PROGRAM, tmp_path, "a"), {}, SPEC, around=lambda live: Keeping(live, record)).error == ""
    assert before in PROGRAM
    changed = edited(PROGRAM.replace(before, after), tmp_path, "b")
    with pytest.raises(DivergenceError, match=said):
        replay(changed, {}, record, Refusing())


def test_a_comment_above_and_another_print_change_nothing(tmp_path):
    record = MemoryRecord()
    run_eager(edited(PROGRAM, tmp_path, "a"), {}, SPEC, around=lambda live: Keeping(live, record))
    source = "# a comment\n" + PROGRAM.replace("    for step", "    print('more')\n    for step")
    replay(edited(source, tmp_path, "b"), {}, record, Refusing())


def test_an_error_that_the_flow_caught_is_raised_again():
    seen: list[str] = []

    def odd(sample: Sample) -> float:
        raise ValueError("odd")

    @flow
    def careful() -> None:
        responses = Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        try:
            list(Reward(odd).score(responses))
        except RewardError as error:
            seen.append(error.what)

    record = MemoryRecord()
    run_eager(careful, {}, SPEC, around=lambda live: Recorder(live, record))
    with pytest.raises(DivergenceError):
        replay(curriculum, OPTIONS, record, Refusing())
    before = seen[-1]
    replay(careful, {}, record, Refusing())
    assert len(seen) == 2
    assert seen[-1] == before


def test_a_generation_whose_rows_are_lost_is_named_and_not_made_anew():
    record, _ = recorded()
    number = next(c.ordinal for c in record.calls if c.name == "policy.generate" and c.step == 0)
    del record.values[number]
    answer = run_eager(curriculum, OPTIONS, SPEC, around=lambda live: ReplayBackend(record, live, until_call=number + 1, redoes=trains))
    assert "the record has no rows of policy.generate" in answer.error


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "planned"])
def test_a_run_leaves_a_record_on_disk_that_replays_and_goes_on(tmp_path, eager):
    seen: list[object] = []
    again: list[object] = []
    run = Run(curriculum, OPTIONS | {"seen": seen}, SPEC, RunSettings(eager=eager, runs_dir=str(tmp_path)))
    summary = run.execute()
    record = read_record(Path(summary.run_dir))
    replay(curriculum, OPTIONS | {"seen": again}, record, Refusing(), seed=record.seed)
    assert again == seen
    assert list(record.calls) == recorded()[0].calls
    assert len(record.logs) == 8
    answer = run_eager(
        curriculum, OPTIONS | {"seen": again}, SPEC, around=lambda live: ReplayBackend(record, live, until_step=2, redoes=trains)
    )
    assert answer.error == ""
    assert again == seen
    assert answer.weights["policy"] == run_eager(curriculum, OPTIONS, SPEC).weights["policy"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SpecError, match="there is no run in"):
        read_record(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"junk" * 2000, b"SQLite format 3\0" + b"\1" * 8000], ids=["empty", "junk", "damaged"])
def test_a_run_whose_ledger_is_damaged_is_named_and_nobody_else_is_blamed(tmp_path, content):
    (tmp_path / "ledger.db").write_bytes(content)
    with pytest.raises(SpecError, match="has no record of its flow") as caught:
        read_record(tmp_path)
    assert str(tmp_path) in caught.value.what


def test_what_a_record_says_of_a_value_is_the_same_in_every_process():
    assert stable_text(partial(digits, 1)).startswith("partial(digits (code ")
    assert stable_text([1.0, 1, True, None, "a", {"b": np.float32(0.5)}]) == "[1, 1, 1, None, 'a', {'b': 0.5}]"
    assert " at 0x" not in stable_text(ppo_clip()) + stable_text(object()) + stable_text(lambda: 0) + stable_text(Path)
    assert stable_text(lambda x: x + 1) != stable_text(lambda x: x + 2)


@flow(staleness=1)
def refilling(num_steps: int = 4, seen: list[object] | None = None) -> None:
    """Draws until enough groups are kept, while the update before still runs; calculates with what it got."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    if seen is not None:
        seen.clear()
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=3, max_new_tokens=9, count=2, score=judge)
        rewards = judge.score(responses)
        policy.update(responses, rewards)
        best = rewards.max() - rewards.min()
        if seen is not None:
            seen.append((prompts.cursor, float(best)))


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_a_replay_of_refills_and_calculations_executes_nothing(run):
    first: list[object] = []
    second: list[object] = []
    record, _ = recorded(run, refilling, seen=first)
    replay(refilling, OPTIONS | {"seen": second}, record, Refusing())
    assert second == first
    assert len(first) == 4


def test_a_run_that_failed_replays_up_to_where_it_failed_and_fails_there_again(tmp_path):
    def odd(sample: Sample) -> float:
        if sample.day == 2:
            raise ValueError("it is Tuesday")
        return float(len(str(sample.text)) % 3)

    @flow
    def daily() -> None:
        policy, judge = Policy("fake"), Reward(odd)
        for day in steps(4):
            prompts = Dataset([{"prompt": f"{i}", "day": day} for i in range(2)], name=f"day{day}")
            metrics = policy.update(responses := policy.generate(prompts.all(), n=2, max_new_tokens=8), judge.score(responses))
            print("reward", float(metrics["reward"]))

    run = Run(daily, {}, SPEC, RunSettings(eager=True, runs_dir=str(tmp_path)))
    with pytest.raises(RewardError):
        run.execute()
    record = read_record(run.run_dir)
    assert len(record.calls) == 3 * 4
    assert [look.num_calls for look in record.looks] == [4, 8, 12]
    with pytest.raises(RewardError, match="it is Tuesday"):
        replay(daily, {}, record, Refusing())
    error = run_eager(daily, {}, SPEC, around=lambda live: ReplayBackend(record, live, until_step=2, redoes=trains)).error
    assert error.startswith("RewardError")
