"""Planning from the command line: where the spec leaves placement open, the search chooses, and says what it chose by."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import transformers
from click.testing import CliRunner, Result
from profiled_runs import PROFILE

from m2flow import load_flow
from m2flow.cli.main import cli
from m2flow.errors import SpecError
from m2flow.macro.tracing import trace
from m2flow.micro.records.plan_file import read_plan
from m2flow.observe.metrics import read_metrics
from m2flow.planner.planning import question_of, with_shapes
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.runner.run import Run
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RunSettings

ROOT = Path(__file__).resolve().parents[2]
GRPO = str(ROOT / "flows" / "grpo.py")
ONE = str(ROOT / "clusters" / "h100-1.yaml")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", GRPO, *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def document() -> dict:
    lengths = ("--lengths", "dapo-qwen2.5-32b", "--max-new-tokens", "10112")
    result = plan("--cluster", ONE, "--shape", "policy=Qwen2.5-1.5B", *lengths, "--batch", "16", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_on_pools_says_where_each_call_runs_and_for_how_long(document):
    assert set(document["placement"]) >= {"policy.generate", "policy.update"}
    for place in document["placement"].values():
        assert set(place) == {"devices", "layout", "micro_batches", "mode", "schedule", "vpp"}
    assert document["placement"]["policy.generate"]["devices"] == ["main:0"]
    assert document["predicted_step_s"] > 0
    assert sum(document["parts_s"].values()) >= document["predicted_step_s"] * 0.999
    assert set(document["chunks"]) == set(document["placement"])
    assert {"lower_bound_s", "efficiency", "memory_gib", "switches", "search_s", "constraints_cost_s"} <= set(document)


def test_engines_on_one_device_take_turns_and_fit_it(document):
    assert {place["mode"] for place in document["placement"].values()} == {"time-shared"}
    assert all(0 < gib < 80 for gib in document["memory_gib"].values())


def tiny_phi(folder: Path) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "pad_token_id": 0}
    transformers.Phi3Config(vocab_size=64, **sizes).save_pretrained(folder)
    return str(folder)


def cluster_of(tmp_path: Path, text: str) -> str:
    (tmp_path / "cluster.yaml").write_text(text)
    return str(tmp_path / "cluster.yaml")


def test_a_model_that_the_trainer_has_no_place_for_is_refused_by_name_where_a_search_would_find_no_layout(tmp_path: Path) -> None:
    spec = cluster_of(tmp_path, "pools: {main: {device: h100}}\ntrain: {engine: megatron}\nrollout: {engine: sglang}\n")
    result = plan("--cluster", spec, "--shape", f"policy={tiny_phi(tmp_path / 'phi')}", "--no-try")
    assert result.exit_code != 0
    assert "the train engine 'megatron' can't have the model of policy: a 'phi3' model; it has deepseek_v2, " in result.output


def test_a_plan_says_what_a_run_would_refuse_of_a_model_that_is_here(tmp_path: Path) -> None:
    spec = cluster_of(tmp_path, "placement: split\nrollout: {engine: embedded}\ntrain: {engine: fsdp, ranks: 3, options: {tp: 3}}\n")
    result = plan("--cluster", spec, "--no-try")
    assert result.exit_code != 0
    assert "tp is 3, which does not divide the model's num_attention_heads" in result.output


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
    graph, models, _ = trace(load_flow(GRPO), {"max_new_tokens": 4096}, steps=2)
    assert not question_of(graph, models, spec).lengths_are_known
    known = question_of(graph, models, spec, lengths="lognormal:median=3000,sigma=1,cap=4096")
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


@pytest.mark.slow
def test_auto_places_replicas_on_cores_and_the_run_learns_as_in_one_process(tmp_path):
    layout = LayoutSpec(tp=1, dp=2)
    pins = {kind: PinSpec(num_devices=2, layout=layout) for kind in ("rollout", "train")}
    settings = RunSettings(runs_dir=str(tmp_path), deterministic=True)
    clusters = [ClusterSpec(device="cpu", cores=2, placement="auto", pin=pins), ClusterSpec(device="cpu", cores=2)]
    accuracies = []
    for spec in clusters:
        run = Run(load_flow(GRPO), {"num_steps": 1, "warm_steps": 12}, spec, settings)
        run.execute()
        accuracies.append([value for _, value in read_metrics(run.run_dir)["accuracy"]])
        if spec.pin:
            plan = read_plan(run.run_dir / "plan.json")
            assert sorted((worker.name, worker.ranks) for worker in plan.workers) == [
                ("functions-0", 1),
                ("rollout-0", 1),
                ("rollout-1", 1),
                ("train-0", 2),
            ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.1)


@pytest.mark.parametrize(
    ("pins", "place", "now"),
    [
        ("pin:\n  polcy.rollout: {num_devices: 1}\n", ":5:3", "Did you mean 'policy.rollout'?"),
        ("pin: {policy.rolout: {num_devices: 1}}\n", ":4:7", "Did you mean 'policy.rollout'?"),
        ("pin: {verifier: {num_devices: 1}}\n", ":4:7", "It has policy"),
        ("shapes: {polcy: Qwen2.5-0.5B}\n", ":4:10", "Did you mean 'policy'?"),
        ("functions: {latency_s: {is_sortd.score: 1.0}}\n", ":4:25", "Did you mean 'is_sorted.score'?"),
    ],
)
def test_a_name_that_the_flow_does_not_have_is_refused_at_its_place_with_the_nearest(pins: str, place: str, now: str, tmp_path: Path):
    file = tmp_path / "one.yaml"
    file.write_text("name: one\nplacement: auto\npools: {main: {device: h100, devices_per_node: 1}}\n" + pins)
    result = plan("--cluster", str(file), "--shape", "policy=Qwen2.5-0.5B")
    assert result.exit_code == 2, result.output
    assert f"{file}{place}\n" in result.output
    assert now in result.output


def test_a_misspelt_pin_is_refused_where_placement_goes_by_rule_too(tmp_path: Path):
    file = tmp_path / "split.yaml"
    file.write_text("placement: split\npin: {polcy.rollout: {layout: {tp: 1}}}\n")
    result = plan("--cluster", str(file))
    assert result.exit_code == 2
    assert f"{file}:2:7" in result.output


def limited(lengths: str, *more: str) -> Result:
    return plan("--cluster", ONE, "--shape", "policy=Qwen2.5-0.5B", "--batch", "16", "--lengths", lengths, *more)


def test_lengths_beyond_max_new_tokens_are_refused_with_both_numbers_and_what_to_give():
    result = limited("dapo-qwen2.5-32b")
    assert result.exit_code == 2
    assert "up to 10,112 tokens, and policy.generate stops at 8" in result.output
    assert "--max-new-tokens" in result.output
    assert "--lengths dapo-qwen2.5-32b,cap=8" in result.output
    assert limited("lognormal:median=400,sigma=0.5,cap=9").exit_code == 2
    assert "answers of which 100% are longer than 8 tokens" in limited("lognormal:median=400,sigma=0.5").output


def test_lengths_that_agree_with_max_new_tokens_are_planned_and_a_formula_is_cut_there_with_a_note():
    assert limited("dapo-qwen2.5-32b,cap=8").exit_code == 0
    assert "16 prompts x n=8, each up to 10240 new tokens" in limited("dapo-qwen2.5-32b", "--max-new-tokens", "10240").output
    result = limited("lognormal:median=400,sigma=0.5", "--max-new-tokens", "900")
    assert result.exit_code == 0
    assert "note: 5.2% of the answers" in result.stderr


def test_answers_that_the_context_does_not_hold_are_refused():
    result = limited("dapo-qwen2.5-32b", "--max-new-tokens", "32500")
    assert result.exit_code == 2
    assert "the context of policy's model, 32,768 tokens" in result.output


def test_lengths_that_a_run_had_are_cut_where_a_call_stops_now():
    spec = with_shapes(load_cluster(ONE), ("policy=Qwen2.5-0.5B",))
    graph, models, _ = trace(load_flow(GRPO), {"max_new_tokens": 100}, steps=2)
    question = question_of(graph, models, spec, lengths=parse_lengths("dapo-qwen2.5-32b"))
    assert question.lengths.longest == 100
    assert "are cut at 100 tokens" in question.doubts[0]


def test_a_plan_may_have_other_policies_than_the_cluster_s():
    result = plan("--policy", "longest-first+repack", "--json")
    assert json.loads(result.stdout)["plan"]["policies"] == ["longest-first", "repack"]
    assert plan("--policy", "longest-frist").exit_code == 2


def test_with_a_profile_a_plan_by_rule_has_a_predicted_step(tmp_path: Path):
    profile = msgspec.structs.replace(PROFILE, models={"policy": "digits (lm, float32)"})
    profile.save(tmp_path / "profile.json")
    (tmp_path / "laptop.yaml").write_text("cores: 2\ndevice: cpu\n")
    given = ("--cluster", str(tmp_path / "laptop.yaml"), "--profile", str(tmp_path / "profile.json"))
    assert re.search(r"^step: .* predicted.*; no schedule takes less than", plan(*given).output, re.M)
    assert json.loads(plan(*given, "--json").stdout)["predicted_step_s"] > 0


FLOW_WITHOUT_MODELS = """
from m2flow import Dataset, Reward, flow, log, steps


def length(sample) -> float:
    return float(len(sample.prompt))


@flow
def measured(num_steps: int = 2) -> None:
    rows, reward = Dataset([{"prompt": "a" * k} for k in range(8)]), Reward(length)
    for _ in steps(num_steps):
        log(reward=reward.score(rows.take(2)).mean())
"""


@pytest.mark.parametrize("spec", ["auto.yaml", ONE])
def test_a_flow_without_models_has_nothing_to_place_wherever_the_search_would_choose(tmp_path, spec):
    (tmp_path / "measured.py").write_text(FLOW_WITHOUT_MODELS)
    (tmp_path / "auto.yaml").write_text("name: auto\nplacement: auto\n")
    arguments = ["plan", str(tmp_path / "measured.py"), "--cluster", str(tmp_path / spec)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "functions-0  cpu" in result.output
