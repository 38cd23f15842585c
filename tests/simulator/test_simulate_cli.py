"""`m2flow simulate FLOW` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli
from m2flow.observe.store import read_spans
from m2flow.simulator.ablation import NUM_STEPS

FLOW = """
from m2flow import Dataset, Policy, Reward, flow, steps

def zero(sample):
    return 0.0

@flow
def small(num_steps: int = 3, batch: int = 4, max_new_tokens: int = 60) -> None:
    policy, reward = Policy("{model}", init="random"), Reward(zero)
    prompts = Dataset([{{"prompt": "a"}}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=max_new_tokens)
        policy.update(responses, reward.score(responses))
"""
MODEL = Path(__file__).parents[2] / "flows" / "models" / "digits"


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(FLOW.format(model=MODEL))
    return path


def run(*words: object) -> str:
    result = CliRunner().invoke(cli, ["simulate", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_json_has_the_steps_and_nothing_else(flow_file):
    document = json.loads(run(flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--steps", "2", "--json"))
    assert set(document) == {"steps", "num_events", "wall_s"}
    assert len(document["steps"]) == 2
    for step in document["steps"]:
        assert set(step) == {
            "makespan_s",
            "lower_bounds_s",
            "efficiency",
            "idle_s",
            "staleness",
            "trained_tokens",
            "wasted_tokens",
            "peak_memory_gib",
        }
        assert step["makespan_s"] >= max(step["lower_bounds_s"].values()) * (1 - 1e-7)
        assert step["efficiency"] == pytest.approx(max(step["lower_bounds_s"].values()) / step["makespan_s"])
        assert step["staleness"] == {"0": 8}
        assert step["peak_memory_gib"] > 0


def test_two_simulations_say_the_same_but_for_the_time_they_took(flow_file):
    words = (flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--steps", "2", "--seed", "3", "--json")
    first, second = (json.loads(run(*words)) for _ in range(2))
    assert first["steps"] == second["steps"]
    assert first["num_events"] == second["num_events"]


def test_the_text_names_the_bound_and_why_devices_were_idle(flow_file):
    text = run(flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--ladder")
    rungs = ("with lengths known", "without weight syncs", "without waiting for whole groups", "the bound")
    for said in ("efficiency", "idle for", "simulated in", *rungs):
        assert said in text


def test_it_says_that_simulated_prompts_are_not_embedded(flow_file, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    said = "rollout.difficulty, 'prefill', changes nothing here: simulated prompts are not embedded"
    for predictor, is_said in (("learned", True), ("siblings", False)):  # The plan has said before why the other has no use for them.
        cluster.write_text(f"rollout: {{difficulty: prefill, predictor: {predictor}}}")
        text = run(flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--steps", "2", "--cluster", cluster)
        assert (said in text) is is_said


def test_the_comparison_has_each_placement_with_each_staleness(flow_file):
    rows = json.loads(run("flow", flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--steps", "2", "--compare", "--json"))
    assert {(row["placement"], row["staleness"]) for row in rows} == {
        (placement, staleness) for placement in ("time-shared", "split", "as planned") for staleness in (0, 1, 2)
    }


def test_a_comparison_has_steps_enough_to_overlap_and_says_what_there_is_no_plan_of(flow_file):
    given = (flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--compare")
    assert run(*given) == run(*given, "--steps", NUM_STEPS)
    assert run(*given) != run(*given, "--steps", 1)
    assert "no plan that fits is hybrid" in run(*given)


def test_a_comparison_says_what_it_is_at(flow_file):
    result = CliRunner().invoke(cli, ["simulate", str(flow_file), "--steps", "1", "--compare", "--json"])
    assert result.stderr.splitlines()[:2] == [
        "staleness 0: looking for plans of each placement ...",
        "staleness 0: simulating time-shared ...",
    ]
    assert "staleness 2: simulating split ..." in result.stderr
    assert json.loads(result.stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "nowhere.jsonl"], "neither a file, nor a run, nor a distribution"),
        (["--lengths", "dapo-qwen2.5-32b", "--shape", "policy"], "--shape policy: it must be ROLE=MODEL"),
        (["--sweep", "gpus=8"], "that is no range of GPUs"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(flow_file, words, said):
    result = CliRunner().invoke(cli, ["simulate", str(flow_file), *words])
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)


def test_the_directory_is_a_run_that_others_open(flow_file, tmp_path):
    out = tmp_path / "simulated"
    run(flow_file, "--lengths", "lognormal:median=40,sigma=0.7", "--steps", "2", "--out", out)
    spans = read_spans(out)
    generated = [span for span in spans if span.name == "sample"]
    assert len(generated) == 16
    engines = {("device-0", engine) for engine in ("rollout", "train", "worker")}
    assert {span.lane for span in spans} == engines | {("functions-0", "function")}
    result = CliRunner().invoke(cli, ["trace", str(out), "-o", str(tmp_path / "trace.json")])
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(cli, ["simulate", str(flow_file), "--lengths", "lognormal:median=40,sigma=0.7", "--out", str(out)])
    assert "is not empty" in again.output + str(again.exception)


def test_on_devices_of_a_pool_a_comparison_has_both_turns_and_a_split_and_a_sweep_a_picture(flow_file, tmp_path):
    spec = Path(__file__).parents[2] / "clusters" / "h100-8.yaml"
    given = (
        flow_file,
        "--cluster",
        spec,
        "--shape",
        "policy=Qwen2.5-7B",
        "--lengths",
        "lognormal:median=400,sigma=0.7",
        "--max-new-tokens",
        8192,
    )
    rows = json.loads(run(*given, "--compare", "--json"))
    assert {"time-shared", "split", "as planned"} <= {row["placement"] for row in rows if row["staleness"] == 0}
    points = json.loads(run(*given, "--sweep", "gpus=8..16", "--png", tmp_path / "sweep.png", "--json"))
    assert [point["gpus"] for point in points] == [8, 16]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_many_samples_on_a_thousand_devices_keep_to_the_bounds(flow_file):
    spec = Path(__file__).parents[2] / "clusters" / "h100-1024.yaml"
    document = json.loads(
        run(
            *(flow_file, "--batch", "1024", "--steps", "1", "--max-new-tokens", "32768", "--json"),
            *("--cluster", spec, "--shape", "policy=Qwen2.5-7B", "--lengths", "lognormal:median=16000,sigma=0.8,cap=32768"),
        )
    )
    (step,) = document["steps"]
    assert step["staleness"] == {"0": 2048}
    assert step["makespan_s"] >= max(step["lower_bounds_s"].values()) * (1 - 1e-7)
