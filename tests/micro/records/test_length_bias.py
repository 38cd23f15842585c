"""Each step says how the lengths and rewards of what it trained on compare with those of all that it sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from one_thread import commit_every, imaged, resumed
from resumed_runs import fake_cluster

from m2flow import Dataset, Policy, Reward, flow, nll, steps
from m2flow.cli.main import cli
from m2flow.errors import SpecError
from m2flow.macro.graph import Call, Granularity, Site
from m2flow.micro.records.accounting import MetricNames, bias_of_run
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.observe.metrics import read_metrics
from m2flow.samples import Finish
from m2flow.spec import RunSettings

FLOW = """
from m2flow import Dataset, Policy, Reward, flow, steps

ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(12)]


def num_digits(sample):
    return float(sum(c.isdigit() for c in str(sample.text)))


@flow(staleness=STALENESS)
def late(num_steps: int = 4):
    policy, verifier = Policy("fake"), Reward(num_digits)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=24, oversample=1.5, late="LATE")
        policy.update(responses, verifier.score(responses))
"""
CLUSTER = "placement: split\\ndevice: cpu\\ncores: 2\\nrollout: {engine: fake, max_running: 3}\\ntrain: {engine: fake}\\n"


def run(directory: Path, late: str, staleness: int, text: str = FLOW) -> Path:
    (directory / "late.py").write_text(text.replace("STALENESS", str(staleness)).replace("LATE", late))
    (directory / "cluster.yaml").write_text(CLUSTER.replace("\\n", "\n"))
    arguments = ["run", str(directory / "late.py"), "--cluster", str(directory / "cluster.yaml"), "--runs-dir", str(directory), "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--quiet"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Path(json.loads(result.stdout.splitlines()[-1])["run_dir"])


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["step"], {}).update(record["values"])
    return found


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("dropped"), "drop", 0)


def test_each_step_says_what_was_trained_and_what_was_dropped_beside_all_that_was_sampled(dropped: Path) -> None:
    metrics = metrics_of(dropped)
    assert sorted(metrics) == [0, 1, 2, 3]
    with SampleQuery(dropped) as book:
        for step, values in metrics.items():
            trained = list(book.entries(f"step = {step} and ending = 'consumed'", limit=100))
            everything = list(book.entries(f"step = {step}", limit=100))
            assert values["lengths/trained_num"] == len(trained) == 8
            assert values["lengths/trained_mean"] == pytest.approx(sum(e.response_tokens for e in trained) / len(trained))
            assert values["lengths/trained_reward"] == pytest.approx(sum(e.reward or 0.0 for e in trained) / len(trained))
            assert values["lengths/sampled_num"] == len(everything)
            assert values["lengths/dropped_num"] == 4
            ratio = values["lengths/trained_mean"] / values["lengths/sampled_mean"]
            assert values["lengths/trained_ratio"] == pytest.approx(ratio)
            cut = [e for e in everything if e.finish == Finish.LENGTH.name.lower()]
            assert values.get("lengths/truncated_num", 0) == len(cut)


def test_the_whole_run_adds_up_and_is_shown(dropped: Path) -> None:
    bias = bias_of_run(dropped)
    assert (bias["trained"].num, bias["dropped"].num) == (32, 16)
    assert "stale" not in bias
    shown = CliRunner().invoke(cli, ["samples", str(dropped), "--lengths"], catch_exceptions=False).stdout
    assert shown.splitlines()[0].split() == ["samples", "mean", "tokens", "of", "all", "mean", "reward"]
    assert any(line.split()[:2] == ["dropped", "16"] for line in shown.splitlines())
    as_json = CliRunner().invoke(cli, ["samples", str(dropped), "--lengths", "--json"], catch_exceptions=False).stdout
    assert json.loads(as_json)["trained"]["num"] == 32


def test_carried_and_stale_samples_are_counted_apart(tmp_path: Path) -> None:
    run_dir = run(tmp_path, "carry", 2)
    bias = bias_of_run(run_dir)
    assert bias["carried"].num > 0
    assert bias["stale"].num > 0
    steps = metrics_of(run_dir)
    assert (steps[0]["lengths/trained_num"], steps[0]["lengths/carried_num"]) == (8, 4)
    # What the last step may leave, a third, it must not leave if it is too old for another step: how fast updates were decides it.
    left = steps[3].get("lengths/carried_num", 0)
    assert left <= 4
    assert bias["trained"].num == 4 * 12 - left
    with SampleQuery(run_dir) as book:
        behind = [e for e in book.entries("ending = 'consumed'", limit=100) if e.versions]
    assert len(behind) == bias["trained"].num


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can't read the samples"):
        bias_of_run(tmp_path)


def test_the_reward_is_the_one_that_the_update_was_given_and_not_a_part_of_it(tmp_path: Path) -> None:
    summed = FLOW.replace("Reward(num_digits)", "Reward.sum({num_digits: 1.0, long: 0.5})").replace(
        "@flow", "def long(sample):\n    return float(sample.num_tokens)\n\n\n@flow"
    )
    lines = ["rewards = verifier.score(responses)", "Reward(long, name='watched').score(responses).mean()", "log(given=rewards.mean())"]
    judged = "\n        ".join(lines)
    text = summed.replace("policy.update(responses, verifier.score(responses))", judged + "\n        policy.update(responses, rewards)")
    run_dir = run(tmp_path, "drop", 0, text.replace("flow, steps", "flow, log, steps"))
    given = []
    for values in metrics_of(run_dir).values():
        assert values["lengths/trained_reward"] == pytest.approx(values["given"])
        given.append(values["given"])
    assert bias_of_run(run_dir)["trained"].reward == pytest.approx(sum(given) / len(given))


def test_what_another_update_trained_on_is_not_dropped(tmp_path: Path) -> None:
    """The filter is of a second update, of a line of its own, whose numbers are told apart from the first one's."""
    last = "        policy.update(responses, verifier.score(responses))\n"
    more = "        policy.update(responses.filter(lambda sample: sample.id.index == 0), loss=nll())\n"
    text = FLOW.replace(', oversample=1.5, late="LATE"', "").replace("import Dataset", "import nll, Dataset").replace(last, last + more)
    for values in metrics_of(run(tmp_path, "", 0, text)).values():
        assert [values[f"{line}lengths/trained_num"] for line in ("", "update_2/")] == [12, 6]
        assert "lengths/dropped_num" not in values
        assert values["update_2/lengths/dropped_num"] == 6
        assert values["num_sequences"] == 12
        assert values["update_2/num_sequences"] == 6
        assert values["loss"] != values["update_2/loss"]


def metrics_named(*updates: tuple[int, int, str]) -> list[str]:
    """The names of what updates report, each given with its step, its line and its numbers' names."""
    names = MetricNames()
    made = [
        (Call(i, "policy", "update", "train", Granularity.BATCH, (), {}, (), (), Site("a.py", line, ""), step, False), told)
        for i, (step, line, told) in enumerate(updates)
    ]
    return [" ".join(names.of(call, dict.fromkeys(told.split(), 0.0))) for call, told in made]


def test_lines_that_share_no_step_share_their_names() -> None:
    assert metrics_named((-1, 1, "loss"), (0, 2, "loss"), (0, 2, "loss"), (1, 3, "loss reward")) == [
        "setup/loss",
        "loss",
        "loss",
        "loss reward",
    ]


def test_of_lines_that_share_a_step_the_one_that_reported_a_name_first_in_the_run_keeps_it() -> None:
    named = metrics_named(
        (0, 2, "loss reward"), (1, 1, "loss"), (1, 2, "loss reward"), (2, 1, "loss"), (3, 1, "loss kl"), (3, 2, "loss kl")
    )
    assert named == ["loss reward", "loss", "loss reward", "update_2/loss", "update_2/loss kl", "loss update_1/kl"]


@flow
def _trained_on_all_and_on_half() -> None:
    policy, judge, prompts = Policy("fake"), Reward(lambda sample: 1.0), Dataset([{"prompt": "a"}] * 12)
    for _ in steps(3):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=4)
        policy.update(responses, judge.score(responses))
        policy.update(responses.filter(lambda sample: sample.id.index == 0), loss=nll())


def test_lines_keep_the_names_of_their_length_bias_in_a_run_that_is_resumed_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_every(monkeypatch, 0.0)
    spec, settings = fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path / "runs"), checkpoint_steps=1)
    _, images = imaged(_trained_on_all_and_on_half, {}, spec, settings, tmp_path / "images", most=64)
    for image in images.paths[::3]:
        resumed(_trained_on_all_and_on_half, {}, spec, settings, image)
        found = read_metrics(image)
        assert not [name for name in found if name.startswith("update_1/")], image
        assert [num for _, num in found["lengths/trained_num"]] == [6.0] * 3, image
        assert [num for _, num in found["update_2/lengths/trained_num"]] == [3.0] * 3, image


def test_the_length_bias_of_an_update_that_ended_just_before_its_run_was_killed_is_written_by_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_every(monkeypatch, 0.0)
    spec, settings = fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path / "runs"), checkpoint_steps=100)
    with monkeypatch.context() as killed:
        killed.setattr(Journal, "_compare_lengths", lambda journal: None)
        _, images = imaged(_trained_on_all_and_on_half, {}, spec, settings, tmp_path / "images", most=64)
    for image in images.paths[3::8]:
        resumed(_trained_on_all_and_on_half, {}, spec, settings, image)
        found = read_metrics(image)
        assert [num for _, num in found["lengths/trained_num"]] == [6.0] * 3, image
        assert [num for _, num in found["update_2/lengths/trained_num"]] == [3.0] * 3, image
