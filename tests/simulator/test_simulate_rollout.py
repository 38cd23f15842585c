"""`m2flow simulate rollout`: its document, its table, and what it says of wrong input."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from m2flow.cli.main import cli
from m2flow.rollout_scheduling.policies import POLICIES


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", "rollout", *arguments])


def test_known_lengths_on_a_trace_give_each_step_and_the_total(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"step": 4, "prompt_tokens": 3, "response_tokens": [100, 10]}\n{"step": 7, "prompt_tokens": 3, "response_tokens": [50, 50]}\n'
    )
    told = run("--lengths", str(trace), "--instances", "2", "--t0", "1", "--t1", "0.5", "--max-batch", "4", "--known-lengths", "--json")
    assert told.exit_code == 0, told.output
    document = json.loads(told.output)
    assert [(step["step"], step["makespan_s"]) for step in document["steps"]] == [(4, 150.0), (7, 75.0)]
    assert document["total"]["makespan_s"] == 225.0
    assert document["total"]["ratio"] == pytest.approx(1.0)
    assert all(step["ratio"] >= 1.0 for step in document["steps"])


def test_the_table_shows_the_same_numbers() -> None:
    told = run("--lengths", "dapo-qwen2.5-32b", "--instances", "4", "--known-lengths", "--steps", "2")
    assert told.exit_code == 0
    lines = [line.split() for line in told.output.splitlines() if line.strip()]
    assert lines[1] == ["step", "samples", "tokens", "makespan", "s", "bound", "s", "ratio", "pauses"]
    assert lines[2] == ["0", "768", "466930", "72.300", "72.300", "1.0000", "0"]
    assert lines[4][:3] == ["total", "1536", "915138"]


def test_a_formula_is_drawn_as_often_as_asked_and_the_seed_decides() -> None:
    def ratios(*more: str) -> object:
        formula = "lognormal:median=400,sigma=1,cap=4000"
        told = run("--lengths", formula, "--instances", "4", "--known-lengths", "--groups", "16", "--samples", "4", "--json", *more)
        return [step["makespan_s"] for step in json.loads(told.output)["steps"]]

    assert ratios("--steps", "3") == ratios("--steps", "3")
    assert ratios("--steps", "2") != ratios("--steps", "2", "--seed", "1")
    assert ratios() == ratios("--steps", "1")


def test_a_policy_gives_each_step_and_its_regret() -> None:
    told = run("--lengths", "dapo-qwen2.5-32b", "--instances", "4", "--policy", "round-robin", "--steps", "2", "--json")
    assert told.exit_code == 0, told.output
    document = json.loads(told.output)
    for result in [*document["steps"], document["total"]]:
        assert result["ratio"] == pytest.approx(result["makespan_s"] / result["bound_s"])
        assert result["regret"] == pytest.approx(result["makespan_s"] / result["known_s"])
        assert result["makespan_s"] > 1.05 * result["bound_s"]
    assert [step["step"] for step in document["steps"]] == [0, 1]


def test_where_nothing_tells_lengths_apart_the_study_says_so_with_what_can_be_expected() -> None:
    told = run("--lengths", "dapo-qwen2.5-32b", "--steps", "3", "--instances", "4", "--policy", "auto", "--predictor", "learned")
    assert told.exit_code == 0, told.output
    assert "Nothing tells lengths apart before a step, as far as learned can learn" in told.output
    assert "2 steps, each held out" in told.output
    assert "Who can't tell the samples apart is expected to need" in told.output
    assert "(regret 1.0" in told.output


def test_all_policies_stand_in_one_table_beside_the_known_lengths() -> None:
    told = run(
        "--lengths", "lognormal:median=400,sigma=1,icc=0.9", "--groups", "16", "--instances", "3", "--policy", "all", "--earlier", "4"
    )
    assert told.exit_code == 0, told.output
    names = [line.split()[0] for line in itertools.takewhile(str.strip, told.output.splitlines()[2:])]
    assert names == ["policy", "known", *POLICIES]
    assert "siblings tells lengths apart before a step: " in told.output
    told = run("--lengths", "dapo-qwen2.5-32b", "--steps", "1", "--instances", "3", "--policy", "all", "--predictor", "oracle", "--json")
    policies = json.loads(told.output)["policies"]
    assert policies["known lengths"]["total"]["unknown_s"] > 0
    assert policies["known lengths"]["total"]["regret"] == 1.0
    assert policies["split"]["total"]["regret"] < policies["least-loaded"]["total"]["regret"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "nope", "--known-lengths"], "no lengths 'nope'"),
        (["--lengths", "dapo-qwen2.5-32b", "--known-lengths", "--steps", "9"], "has 6 steps"),
        (["--lengths", "dapo-qwen2.5-32b", "--known-lengths", "--t0", "0"], "can't take t0=0"),
        (["--lengths", "dapo-qwen2.5-32b"], "either --known-lengths or --policy"),
        (["--lengths", "dapo-qwen2.5-32b", "--known-lengths", "--policy", "all"], "either --known-lengths or --policy"),
        (["--lengths", "dapo-qwen2.5-32b", "--policy", "nope"], "there is no policy 'nope'"),
        (["--lengths", "dapo-qwen2.5-32b", "--policy", "split", "--predictor", "nope"], "there is no predictor 'nope'"),
        (["--lengths", "dapo-qwen2.5-32b", "--policy", "split", "--predictor", "sibling"], "Did you mean 'siblings'?"),
        (["--lengths", "dapo-qwen2.5-32b", "--policy", "split", "--earlier", "8"], "does not say which prompts"),
    ],
)
def test_wrong_input_is_said_and_ends_with_status_2(arguments: list[str], message: str) -> None:
    told = run("--instances", "2", *arguments)
    assert told.exit_code == 2
    assert message in told.output


def test_help_of_the_group_names_the_command_without_loading_it() -> None:
    probe = (
        "import sys\nfrom click.testing import CliRunner\nfrom m2flow.cli.main import cli\n"
        "told = CliRunner().invoke(cli, ['simulate', '--help'])\nassert 'rollout' in told.output, told.output\n"
        "assert not [name for name in sys.modules if name.startswith('m2flow.micro')]\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
