"""Both outcomes of a condition on a value that nobody has computed: which calls come under which, and where a value came from."""

from __future__ import annotations

import random

import pytest
from click.testing import CliRunner

from m2flow import Dataset, Flow, Policy, Reward, Sample, flow, load_flow, op, steps
from m2flow.cli.main import cli
from m2flow.errors import FlowError, OptionError
from m2flow.macro.graph_display import barriers_listing, bounds_listing, calls_listing
from m2flow.macro.number import Decider, ExploredFloat, PathFacts, Unknown
from m2flow.macro.replay import MemoryRecord, Recorder
from m2flow.macro.tracing import Assumption, Exploration, KnownValues, explore
from m2flow.runner.run import Run
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.world import run_eager

ROWS = [{"prompt": f"{i}="} for i in range(6)]
SPEC = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def share(sample: Sample) -> float:
    return float(sample.num_tokens > 3)


@op(granularity="batch")
def spread(samples: list[Sample]) -> float:
    return float(len(samples))


@flow
def early(num_steps: int = 4) -> None:
    policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        metrics = policy.update(responses, judge.score(responses))
        if float(metrics["reward"]) > 0.9:
            policy.generate(prompts.take(1), max_new_tokens=9)
            break
        policy.generate(prompts.take(1), max_new_tokens=5)
    policy.generate(prompts.take(1), max_new_tokens=3)


def listed(exploration: Exploration) -> list[str]:
    """The listing without columns: calls by their name and token limit, conditions by their question."""
    lines = []
    for line in calls_listing(exploration):
        indent = " " * (len(line) - len(line.lstrip()))
        called = line.partition(" = ")[2].split("  ")[0]
        if "generate" in called:
            lines.append(f"{indent}generate {called.rpartition('=')[2].rstrip(')')}")
        elif not called:
            lines.append(line.partition(":    ")[0])
    return lines


def test_both_outcomes_are_shown_with_the_calls_of_each():
    assert listed(explore(early, {})) == [
        "generate 4",
        "if %metrics['reward'] > 0.9",
        "    generate 9",
        "else:",
        "    generate 5",
        "generate 3",
    ]


def test_conditions_on_what_is_calculated_from_handles_are_followed_too():
    @flow
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards)
        if metrics["reward"] - 0.1 * metrics["loss"] > 0.9:
            policy.generate(prompts.take(1), max_new_tokens=5)
        if float(metrics["reward"] * 2) < 0.3:
            policy.generate(prompts.take(1), max_new_tokens=6)
        if (rewards.mean() > 0.5) & ~(rewards.std() > 0.1):
            policy.generate(prompts.take(1), max_new_tokens=7)

    assert listed(explore(body, {})) == [
        "generate 4",
        "if (%metrics['reward'] - (0.1 * %metrics['loss'])) > 0.9",
        "    generate 5",
        "if (%metrics['reward'] * 2) < 0.3",
        "    generate 6",
        "if %mean > 0.5",
        "    if %std > 0.1",
        "        no call here",
        "    else:",
        "        generate 7",
    ]


def test_an_outcome_is_the_same_wherever_it_is_asked_again():
    @flow
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        rows = prompts.take(2)
        responses = policy.generate(rows, n=2, max_new_tokens=4)
        reward = float(judge.score(responses).mean())
        for limit in (0.5, 0.7, 0.2):
            if reward > limit:
                policy.generate(rows, max_new_tokens=int(limit * 10))
        if reward == 0.6 and reward < 0.5:
            raise AssertionError("both can't be")

    paths = explore(body, {}).paths
    taken = {tuple(call.options["sampling"].max_new_tokens for call in path.graph.calls if call.method == "generate") for path in paths}  # type: ignore[attr-defined]
    assert taken == {(4,), (4, 2), (4, 5, 2), (4, 5, 7, 2)}
    assert all(path.end == "end" for path in paths)


def test_a_condition_that_changes_no_call_is_not_shown():
    @flow
    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        best = max(0.0, float(spread(responses)) if False else float(Reward(share).score(responses).mean()))
        print("better" if best > 0.3 else "worse")
        policy.generate(prompts.take(2), max_new_tokens=6)

    assert listed(explore(body, {})) == ["generate 4", "generate 6"]


def test_a_loop_until_a_value_is_right_is_followed_to_the_bound_and_it_says_so():
    @flow
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        while True:
            responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
            if float(judge.score(responses).mean()) > 0.5:
                break
        policy.generate(prompts.take(1), max_new_tokens=6)

    exploration = explore(body, {})
    assert [path.end for path in exploration.paths] == ["bound", "end", "end", "end"]
    assert any("goes on; it is followed no further" in line for line in calls_listing(exploration))
    assert "for a few turns only" in bounds_listing(exploration)[0]


def test_paths_are_bounded_and_what_is_left_is_counted():
    @flow
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        for step in steps(5):
            responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
            if float(judge.score(responses).mean()) > 0.5:
                policy.generate(prompts.take(1), max_new_tokens=5 + step)

    exploration = explore(body, {}, steps=5)
    assert len(exploration.paths) == 16
    assert exploration.num_left > 0
    assert f"{exploration.num_left} more outcomes were not" in bounds_listing(exploration)[-1]


def test_the_flows_own_dice_fall_the_same_on_every_path():
    @flow
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=random.randint(1, 1000))
        if float(judge.score(responses).mean()) > 0.5:
            policy.generate(prompts.take(1), max_new_tokens=5)

    first, second = explore(body, {}).paths
    assert first.graph.calls[1].shown == second.graph.calls[1].shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.5", [["generate 4", "generate 5", "generate 3"]]),
        ("reward=1", [["generate 4", "generate 9", "generate 3"]]),
        ("metrics=0", [["generate 4", "generate 5", "generate 3"]]),
        ("test_exploring.py:{line}=1", [["generate 4", "generate 9", "generate 3"]]),
        ("loss=1", None),
        ("other.py:3=1", None),
    ],
)
def test_an_assumed_value_follows_its_outcome_alone(text, shown):
    line = explore(early, {}).paths[0].looks[0].observation.site.line
    exploration = explore(early, {}, known=KnownValues((Assumption.parse(text.format(line=line)),)))
    assert len(exploration.paths) == (1 if shown else 2)
    if shown:
        assert listed(exploration) == shown[0]
        assert f"by --assume {text.format(line=line)}" in "\n".join(barriers_listing(exploration)) or text == "0.5"


def test_what_is_no_number_can_not_be_assumed():
    with pytest.raises(OptionError, match="'much' is no number"):
        Assumption.parse("reward=much")


def test_values_are_taken_from_an_earlier_run():
    record = MemoryRecord()
    assert run_eager(early, {}, SPEC, around=lambda live: Recorder(live, record)).error == ""
    exploration = explore(early, {}, steps=4, known=KnownValues(record=record, record_name="runs/early"))
    (path,) = exploration.paths
    assert [call.name for call in path.graph.calls] == [call.name for call in record.calls]
    assert " in runs/early" in "\n".join(barriers_listing(exploration))


def test_the_number_of_rows_is_known_and_the_rows_are_not():
    @flow
    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=3, max_new_tokens=4)
        policy.generate(prompts.take(len(responses)), max_new_tokens=5)
        for _ in responses:
            policy.generate(prompts.take(1), max_new_tokens=6)

    exploration = explore(body, {})
    assert [call.shown for call in exploration.paths[0].graph.calls if call.engine == "source"] == [{"count": 2}, {"count": 6}]
    assert exploration.paths[0].end == "unknown rows"
    said = "\n".join(barriers_listing(exploration))
    assert "it has 6 rows, whatever they are" in said
    assert "the trace ends here" in said


def test_an_error_on_one_path_is_its_end_and_on_every_path_is_raised():
    @flow
    def body(always: bool = False) -> None:
        policy, judge, prompts = Policy("fake"), Reward(share), Dataset(ROWS)
        reward = float(judge.score(policy.generate(prompts.take(1), n=2, max_new_tokens=4)).mean())
        if always or reward > 0.5:
            prompts.take(-1)

    exploration = explore(body, {})
    assert [path.end for path in exploration.paths] == ["end", "error"]
    assert "ends with DatasetError" in "\n".join(calls_listing(exploration))
    with pytest.raises(FlowError, match="take\\(-1\\)"):
        explore(body, {"always": True})


def test_a_barrier_says_which_line_waits_for_what_and_what_that_costs():
    site = explore(early, {}).paths[0].looks[0].observation.site
    said = barriers_listing(explore(early, {}, steps=2))
    assert said[0] == f'  {site}  if float(metrics["reward"]) > 0.9:'
    assert said[1].startswith("    waits for %metrics, of policy.update (")
    assert said[1].endswith("), in steps 0 to 1: float()")
    assert "is known before policy.update ends" in said[2]
    assert said[3] == "    value: metrics['reward'] is not known; both outcomes of what is asked about it are followed above"
    assert len(said) == 4


def test_the_plan_of_a_stale_flow_still_says_what_makes_it_synchronous(tmp_path):
    source = """
from m2flow import Dataset, Policy, Reward, flow, steps
def judged(sample):
    return 1.0
@flow(staleness=2)
def stale():
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": "a"}])
    for _ in steps(9):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
        metrics = policy.update(responses, judge.score(responses))
        if metrics["reward"] > 0.9 or (metrics.lagged(2) or {"reward": 0.0})["reward"] > 0.8:
            break
"""
    (tmp_path / "stale.py").write_text(source)
    shown = CliRunner().invoke(cli, ["plan", str(tmp_path / "stale.py"), "--steps", "4", "--no-try"]).stdout
    assert shown.count("makes this flow synchronous, whatever its staleness") == 1
    assert shown.count("note: Python waits for metrics") == 2
    assert ".lagged(2) looks at an earlier step instead" in shown
    assert "policy.update made 2 steps ago" in shown


def test_the_users_modules_get_their_float_back():
    explore(early, {})
    assert "float" not in globals()
    with pytest.raises(FlowError):
        explore(Flow(lambda: 1 // 0), {})
    assert "float" not in globals()
    assert float is not ExploredFloat


class _Saying(Decider):
    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def decide(self, question: str) -> bool:
        self.asked.append(question)
        return self.answers.pop(0)


def test_an_unknown_number_remembers_what_was_decided_of_it():
    decider = _Saying(True, False, True)
    x = Unknown(0.5, "x", PathFacts(decider))
    assert x > 0.25
    assert x > 0.1
    assert not x <= 0.25
    assert x != 0.2
    assert not x > 0.75
    assert x != 0.8
    assert x <= 0.75
    assert bool(x)
    assert x == 0.5
    assert x < 0.6
    assert not x < 0.5
    assert decider.asked == ["x > 0.25", "x > 0.75", "x == 0.5"]


def test_an_unknown_number_calculates_and_keeps_its_words():
    decider = _Saying(True, False)
    x = Unknown(0.5, "x", PathFacts(decider))
    assert (1 - x * 2).text == "(1 - (x * 2))"
    assert float.__add__(2 * x + 1, 0.0) == 2.0
    assert (x / 0).text == "(x / 0)"
    assert max(x, 3) == 3
    assert min(-x, abs(x)).text == "-x"
    assert decider.asked == ["x < 3", "abs(x) < -x"]
    assert x == x
    assert isinstance(x, float)


def test_the_command_takes_the_values_of_a_run_from_its_directory(tmp_path):
    source = """
from m2flow import Dataset, Policy, Reward, flow, steps
def judged(sample):
    return float(sample.num_tokens > 3)
@flow
def early():
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": "a"}])
    for _ in steps(2):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
        metrics = policy.update(responses, judge.score(responses))
        if metrics["reward"] > 2.5:
            break
        texts = [sample.text for sample in responses]
"""
    (tmp_path / "early.py").write_text(source)
    run = Run(load_flow(str(tmp_path / "early.py")), {}, SPEC, RunSettings(eager=True, runs_dir=str(tmp_path / "runs")))
    run.execute()
    shown = CliRunner().invoke(cli, ["plan", str(tmp_path / "early.py"), "--steps", "2", "--from", str(run.run_dir), "--no-try"]).stdout
    assert "the trace ends here" not in shown
    assert f" in {run.run_dir}" in shown
    assert f"value: its 2 rows are those of {run.run_dir}" in shown
    assert "is not known" not in shown
    assert shown.count("= policy.update(") == 2


WAITS_FIRST = """\
from m2flow import Dataset, Policy, Reward, flow, log

def share(sample):
    return float(sample.num_tokens > 3)

@flow
def waits_first():
    policy, teacher = Policy("fake", name="policy"), Policy("fake", name="teacher")
    responses = policy.generate(Dataset([{"prompt": "1="}]).take(1), n=2, max_new_tokens=4)
    if BRANCHES and Reward(share).score(responses).mean() > 0.5:
        log(more=1.0)
    CUT
    log(said=teacher.logprobs(responses).mean())
"""


@pytest.mark.parametrize("branches", [True, False])
def test_by_search_a_run_has_placements_for_what_comes_after_a_wait(tmp_path, branches):
    said = plan_of_waits_first(tmp_path, branches, "auto")
    assert "policy: rollout (fake) stays, teacher: train (fake) stays" in said
    assert "note: m2flow run" not in said
    waits_first, spec = load_flow(str(tmp_path / "waits_first.py")), load_cluster(tmp_path / "fake.yaml")
    run = Run(waits_first, {}, spec, RunSettings(runs_dir=str(tmp_path / "runs")))
    assert {slot.role for worker in run.prepare().workers for slot in worker.engines if slot.kind == "train"} == {"teacher"}
    assert run.execute().samples == 2


def test_the_plan_says_where_a_run_that_is_told_less_begins_with_other_workers(tmp_path):
    cut = "if not Reward(share).score(responses).mean() > 0.5: return"
    said = plan_of_waits_first(tmp_path, True, "auto", cut=cut, options=("--assume", "0"))
    assert "teacher: train" not in said
    note = said[said.index("note: m2flow run, which is told no values") :]
    assert "train of teacher" in note


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_by_rule_a_run_that_knows_less_begins_with_the_workers_of_its_plan(tmp_path, placement):
    said = plan_of_waits_first(tmp_path, True, placement)
    for engine in ("policy: rollout", "teacher: rollout", "policy: train", "teacher: train"):
        assert engine in said
    assert "note: Python waits for" in said
    assert "note: m2flow run" not in said


def test_by_search_a_run_that_knows_as_much_begins_with_the_workers_of_its_plan(tmp_path):
    """Python waits, but for the last call of all."""
    said = plan_of_waits_first(tmp_path, False, "auto", more="    float(teacher.logprobs(responses).mean())\n")
    assert "note: Python waits for" in said
    assert "note: m2flow run" not in said


def plan_of_waits_first(directory, branches, placement, more="", cut="", options=()):
    path = directory / "waits_first.py"
    path.write_text(WAITS_FIRST.replace("BRANCHES", str(branches)).replace("CUT", cut or "pass") + more)
    (directory / "fake.yaml").write_text(
        f"placement: {placement}\ncores: 2\ndevice: cpu\nrollout: {{engine: fake}}\ntrain: {{engine: fake}}\n"
        "shapes: {policy: Qwen2.5-0.5B, teacher: Qwen2.5-0.5B}\n"
    )
    return CliRunner().invoke(cli, ["plan", str(path), "--cluster", str(directory / "fake.yaml"), *options], catch_exceptions=False).output
