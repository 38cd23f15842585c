"""Planning from the command line: where the spec leaves placement open, the search chooses, and says what it chose by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from m2flow import load_flow
from m2flow.cli.cluster_file import load_cluster
from m2flow.cli.main import cli
from m2flow.errors import SpecError
from m2flow.macro.tracing import trace
from m2flow.micro.plan_file import read_plan
from m2flow.micro.planning import question_of, with_shapes
from m2flow.micro.run import Run
from m2flow.spec import ClusterSpec, PoolSpec, RunSettings

ROOT = Path(__file__).resolve().parent.parent
GRPO = str(ROOT / "flows" / "grpo.py")
ONE = str(ROOT / "clusters" / "h100-1.yaml")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", GRPO, *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def document() -> dict:
    result = plan("--cluster", ONE, "--shape", "policy=Qwen2.5-1.5B", "--lengths", "dapo-qwen2.5-32b", "--batch", "16", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_on_pools_says_where_each_call_runs_and_for_how_long(document):
    assert set(document["placement"]) >= {"policy.generate", "policy.update"}
    for place in document["placement"].values():
        assert set(place) == {"devices", "layout", "mode"}
    assert document["placement"]["policy.generate"]["devices"] == ["main:0"]
    assert document["predicted_step_s"] > 0
    assert sum(document["parts_s"].values()) >= document["predicted_step_s"] * 0.999
    assert set(document["chunks"]) == set(document["placement"])
    assert {"lower_bound_s", "efficiency", "memory_gib", "switches", "search_s", "constraints_cost_s"} <= set(document)


def test_engines_on_one_device_take_turns_and_fit_it(document):
    assert {place["mode"] for place in document["placement"].values()} == {"time-shared"}
    assert all(0 < gib < 80 for gib in document["memory_gib"].values())


def test_the_plan_in_words_names_every_engine_and_its_terms():
    result = plan("--cluster", ONE, "--shape", "policy=Qwen2.5-1.5B", "--batch", "16", "--terms")
    assert result.exit_code == 0, result.output
    assert "policy.generate  main[0:1]" in result.output
    assert "predicted" in result.output
    assert "terms\n" in result.output


def test_a_shape_that_is_none_or_of_no_role_is_refused():
    for text, said in (("policy", "it must be ROLE=MODEL"), ("police=Qwen2.5-7B", "Did you mean 'policy'"), ("policy=Qwen2.5-8B", "Qwen")):
        result = plan("--cluster", ONE, "--shape", text)
        assert result.exit_code != 0
        assert said in result.output


def test_what_does_not_fit_is_refused_with_what_is_short():
    result = plan("--cluster", ONE, "--shape", "policy=Llama-3.1-405B", "--batch", "16")
    assert result.exit_code == 1
    assert "GiB" in result.output


def test_a_pool_can_be_planned_for_and_not_run_on(tmp_path):
    spec = ClusterSpec(pools={"main": PoolSpec(device="h100")}, shapes={"policy": "Qwen2.5-0.5B"})
    with pytest.raises(SpecError, match="the local launcher runs on this machine only"):
        Run(load_flow(GRPO), {}, spec, RunSettings(runs_dir=str(tmp_path))).prepare()


def test_lengths_are_assumed_only_if_nobody_gives_them():
    spec = with_shapes(load_cluster(ONE), ("policy=Qwen2.5-0.5B",))
    graph, models, _ = trace(load_flow(GRPO), {}, steps=2)
    assert not question_of(graph, models, spec).lengths_are_known
    known = question_of(graph, models, spec, lengths="lognormal:median=400,sigma=1,cap=4096")
    assert known.lengths_are_known
    assert known.lengths.mean() > question_of(graph, models, spec).lengths.mean()


def test_auto_places_a_run_on_this_machine_and_the_run_goes_as_planned(tmp_path):
    spec = ClusterSpec(device="cpu", cores=2, placement="auto")
    run = Run(load_flow(GRPO), {"num_steps": 1, "warm_steps": 2, "batch": 4}, spec, RunSettings(runs_dir=str(tmp_path)))
    summary = run.execute()
    written = read_plan(run.run_dir / "plan.json")
    assert written.choice is not None
    assert written.mode == written.choice.mode
    assert summary.steps == 1
