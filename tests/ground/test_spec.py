"""Cluster specs: the files that come with m2flow, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from message_parts import lacks
from pydantic import ValidationError

from m2flow.cli.main import cli
from m2flow.errors import SpecError
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import LAPTOP, ClusterSpec, RunSettings

CLUSTERS = Path(__file__).resolve().parents[2] / "clusters"


def _refused(tmp_path: Path, text: str) -> SpecError:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_cluster(file)
    return caught.value


def test_the_laptop_file_says_what_runs_when_no_spec_is_given() -> None:
    assert load_cluster(CLUSTERS / "laptop.yaml") == LAPTOP


def test_the_split_file_splits_and_is_otherwise_a_laptop() -> None:
    spec = load_cluster(CLUSTERS / "laptop-split.yaml")
    assert spec.placement == "split"
    assert spec.rollout == LAPTOP.rollout
    assert (spec.functions, spec.channels, spec.device) == (LAPTOP.functions, LAPTOP.channels, LAPTOP.device)


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_spec_that_comes_with_m2flow_is_valid_and_bears_its_file_name(file: Path) -> None:
    assert load_cluster(file).name == file.stem


def test_an_unknown_field_is_refused_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    error = _refused(tmp_path, "name: mine\nplacment: split\n")
    assert error.where.endswith("cluster.yaml:2:1")
    assert error.what == "placment: no such field"
    assert error.now == "Did you mean 'placement'?"


def test_an_unknown_field_further_in_is_found_among_its_neighbours(tmp_path: Path) -> None:
    error = _refused(tmp_path, "train:\n  engine: embedded\n  token_buget: 4\n")
    assert error.where.endswith(":3:3")
    assert error.what == "train.token_buget: no such field"
    assert error.now == "Did you mean 'token_budget'?"


def test_a_field_that_is_there_twice_is_refused_where_it_is_for_the_second_time(tmp_path: Path) -> None:
    error = _refused(tmp_path, "name: mine\nrollout:\n  workers: 1\n  threads: 1\n  workers: 2\n")
    assert error.where.endswith(":5:3")
    assert error.what == "workers is said twice, in line 3 too"


def test_of_several_mistakes_the_first_in_the_file_is_told(tmp_path: Path) -> None:
    error = _refused(tmp_path, "train:\n  token_buget: 4\nrollout:\n  workers: -1\n")
    assert error.where.endswith(":2:3")


def test_a_field_like_no_other_is_answered_with_all_of_them(tmp_path: Path) -> None:
    error = _refused(tmp_path, "functions:\n  zzz: 1\n")
    assert not lacks(error.now, "workers, roles, chunk, concurrency, patience_s, latency_s")


def test_a_value_of_the_wrong_type_is_refused_with_its_line_and_reason(tmp_path: Path) -> None:
    error = _refused(tmp_path, "name: mine\nrollout:\n  workers: many\n")
    assert error.where.endswith(":3:3")
    assert error.what.startswith("rollout.workers: ")
    assert "integer" in error.what


def test_a_value_out_of_range_says_the_range(tmp_path: Path) -> None:
    error = _refused(tmp_path, "rollout:\n  workers: 0\n")
    assert "greater than or equal to 1" in error.what


def test_a_word_that_is_no_choice_is_answered_with_the_choices(tmp_path: Path) -> None:
    error = _refused(tmp_path, "placement: hybrid\n")
    assert "time-shared" in error.what
    assert "split" in error.what


@pytest.mark.parametrize(
    ("text", "line", "what", "near"),
    [
        ("name: mine\nlauncher: loca\n", 2, "launcher: Input should be 'local' or 'ray'", "local"),
        ("train:\n  engine: deepsped\n", 2, "train.engine: there is no train engine 'deepsped'", "deepspeed"),
        ("rollout:\n  workers: 1\n  engine: sglng\n", 3, "rollout.engine: there is no rollout engine 'sglng'", "sglang"),
        ("rollout:\n  policy: [longst-first]\n", 2, "rollout.policy: there is no policy 'longst-first'", "longest-first"),
        ("rollout: {predictor: sibling}\n", 1, "rollout.predictor: there is no predictor 'sibling'", "siblings"),
        ("pools:\n  main:\n    device: h10\n", 3, "pools.main.device: there is no device 'h10'", "h100"),
        ("shapes:\n  policy: Qwen2.5-7\n", 2, "shapes.policy: there is no model shape named 'Qwen2.5-7', nor", "Qwen2.5-7B"),
    ],
)
def test_a_name_of_nothing_is_refused_with_its_line_and_the_nearest(tmp_path: Path, text: str, line: int, what: str, near: str) -> None:
    error = _refused(tmp_path, text)
    assert f"cluster.yaml:{line}:" in error.where
    assert error.what.startswith(what)
    assert near in error.now


def test_a_models_directory_is_looked_at_where_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("shapes: {policy: /models/mine}\n")
    assert load_cluster(file).shapes == {"policy": "/models/mine"}


def test_a_policy_of_the_users_own_is_looked_at_where_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("rollout: {policy: mine.py:Mine}\n")
    assert load_cluster(file).rollout.policy == ("mine.py:Mine",)


def test_a_mapping_where_a_section_is_expected_is_refused_with_its_line(tmp_path: Path) -> None:
    error = _refused(tmp_path, "name: mine\ntrain: fast\n")
    assert error.where.endswith(":2:1")
    assert error.what.startswith("train: ")


def test_what_is_not_yaml_is_refused_with_the_parsers_reason(tmp_path: Path) -> None:
    error = _refused(tmp_path, "name: [laptop\n")
    assert error.where.endswith("cluster.yaml")
    assert error.what.startswith("not YAML: ")
    assert "line" in error.what


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "split\n"], ids=["empty", "list", "word"])
def test_what_is_no_mapping_is_refused_with_an_example(tmp_path: Path, text: str) -> None:
    assert "`placement: split`" in _refused(tmp_path, text).what


def test_a_missing_file_is_named_and_the_examples_are_pointed_to(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml can't be read: No such file") as caught:
        load_cluster(tmp_path / "nowhere.yaml")
    assert "clusters/" in caught.value.now


def test_a_directory_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can't be read"):
        load_cluster(tmp_path)


def test_bytes_that_are_no_text_are_refused_as_no_yaml(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(SpecError):
        load_cluster(file)


def test_a_spec_can_not_be_changed_once_it_is_there() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LAPTOP.name = "other"  # type: ignore[misc]


def test_the_number_of_cores_can_be_given_and_is_else_what_this_process_may_use() -> None:
    assert ClusterSpec(cores=7).num_cores == 7
    assert ClusterSpec().num_cores >= 1


def test_an_unknown_field_of_a_pool_is_found_among_a_pool_s(tmp_path: Path) -> None:
    error = _refused(tmp_path, "pools:\n  main: {device: h100, nods: 2}\n")
    assert error.where.endswith(":2:24")
    assert (error.what, error.now) == ("pools.main.nods: no such field", "Did you mean 'nodes'?")


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("launcher: ray\nchannels: {transport: ipc}\n", ":2:12", "channels.transport: 'ipc' is for one host, and the launcher is 'ray'"),
        ("launcher: ray\nweights:\n  transport: shared memory\n", ":3:3", "weights.transport: 'shared memory' is for one host"),
        ("ray: {address: auto, patience_s: 5}\n", ":1:1", "ray: the launcher is 'local'"),
        (
            "launcher: ray\nray:\n  resources: {rolout: spot}\n",
            ":3:15",
            "ray.resources.rolout: no kind of worker and no pool; did you mean 'rollout'?",
        ),
        ("channels: {port: 5555}\n", ":1:12", "channels.port: it is of 'tcp', and the transport is 'ipc'"),
        (
            "pools: {main: {device: h100}}\npin:\n  policy: {pool: mian}\n",
            ":3:12",
            "pin.policy.pool: there is no pool 'mian'; did you mean 'main'?",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_at_one_of_them(tmp_path: Path, text: str, place: str, what: str) -> None:
    error = _refused(tmp_path, text)
    assert error.where.endswith(place)
    assert error.what.startswith(what)


@pytest.mark.parametrize("text", ["launcher: ray\n", "channels: {transport: tcp, port: 5555}\n"])
def test_a_spec_that_was_written_down_in_full_is_read_back(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    spec = load_cluster(file)
    assert ClusterSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert spec.transport == "tcp"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("rollout: {workers: 999999999999}\n", ":1:11", "rollout.workers: Input should be less than or equal to 4096"),
        ("functions: {workers: 1000000}\n", ":1:13", "functions.workers: Input should be less than or equal to 4096"),
        ("rollout: {workers: 4096}\nfunctions: {workers: 4096}\n", ":2:13", "functions.workers: 4096 with 4096 rollout workers make more"),
        ("rollout: {workers: yes}\n", ":1:11", "rollout.workers: true is no number; YAML reads yes, no, on and off so"),
        ("pools: {main: {device: h100}}\npin: {policy: {devices: [no, yes]}}\n", ":2:16", "pin.policy.devices: false is no number"),
        ("functions: {latency_s: {judge: yes}}\n", ":1:13", "functions.latency_s: true is no number; YAML reads"),
        ("functions: {latency_s: {judge: [0.5, on]}}\n", ":1:13", "functions.latency_s: true is no number; YAML reads"),
        ("rollout: {replan_s: on}\n", ":1:11", "rollout.replan_s: true is no number"),
        ("rollout: {replan_s: .inf}\n", ":1:11", "rollout.replan_s: Input should be a finite number"),
        ("ray: {patience_s: .nan}\nlauncher: ray\n", ":1:7", "ray.patience_s: Input should be"),
        ("pools: {main: {device: h100, nodes: 99999, devices_per_node: 99999}}\n", ":1:30", "pools.main.nodes: 99999 x 99999 devices"),
        ("pools: {main: {device: h100, memory_gib: 1.0e+300}}\n", ":1:30", "pools.main.memory_gib: Input should be less than"),
        ("pools: {main: {device: h100}}\npin: {policy: {devices: [8, 4]}}\n", ":2:16", "pin.policy.devices: [8, 4] are no devices"),
        (
            "pools: {main: {device: h100}}\npin: {policy: {devices: [0, 4], num_devices: 8}}\n",
            ":2:33",
            "pin.policy.num_devices: 8 are not as many as `devices` are, which says 4",
        ),
        ("pools: {main: {device: h100}}\npin: {policy: {num_devices: 9}}\n", ":2:16", "pin.policy.num_devices: 9 devices are more"),
        ("train: {token_budget: " + "9" * 5000 + "}\n", ":1:23", "9" * 40 + "... can't be read: Exceeds the limit"),
        ("channels: {max_bytes: 2026-99-99}\n", ":1:23", "2026-99-99 can't be read: month must be in 1..12"),
        ("name: " + "[" * 5000 + "]" * 5000 + "\n", "cluster.yaml", "it is nested too deeply to be read"),
        ("name: &a [*a]\n", ":1:1", "name: Input should be a valid string"),
    ],
)
def test_numbers_beyond_any_machine_and_what_python_can_not_read_are_refused_at_their_place(
    tmp_path: Path, text: str, place: str, what: str
) -> None:
    error = _refused(tmp_path, text)
    assert error.what.startswith(what)
    assert error.where.endswith(place)


@pytest.mark.parametrize("name", [name for name, field in RunSettings.model_fields.items() if field.annotation in (int, float)])
def test_no_setting_of_a_run_takes_a_number_that_is_none(name: str) -> None:
    for wrong in (True, 10**30, float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            RunSettings.model_validate({name: wrong})


_DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("plan.json", _DEEP, ["plan", "--check", "plan.json"]),
        ("plan.json", _DEEP, ["plan", "FLOW", "--check", "plan.json"]),
        ("plan.json", _DEEP, ["simulate", "FLOW", "--plan", "plan.json"]),
        ("profile.json", '{"a":' * 50_000 + "1" + "}" * 50_000, ["plan", "FLOW", "--profile", "profile.json"]),
        ("trace.jsonl", _DEEP, ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "trace.jsonl"]),
        (
            "trace.jsonl",
            '{"step": 0, "prompt_tokens": 1, "response_tokens": [' + "9" * 5000 + "]}",
            ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "trace.jsonl"],
        ),
        (
            "trace.jsonl",
            '{"step": 0, "prompt_tokens": 1, "response_tokens": [' + "9" * 30 + "]}",
            ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "trace.jsonl"],
        ),
        ("none", "", ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "lognormal:median=9,sigma=1,prompt=1e300"]),
        ("none", "", ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "lognormal:median=9,sigma=1,cap=1e30"]),
        ("none", "", ["plan", "FLOW", "--cluster", "CLUSTER", "--lengths", "lognormal:median=1e300,sigma=300"]),
        ("mine.yaml", "devices:" + " [" * 5000 + "]" * 5000, ["plan", "FLOW", "--cluster", "with.yaml"]),
        ("mine.yaml", "devices: {h100x: {like: h100, memory_gib: " + "9" * 5000 + "}}", ["plan", "FLOW", "--cluster", "with.yaml"]),
        ("mine.yaml", "devices: {h100x: {like: h100, memory_gib: .inf}}", ["plan", "FLOW", "--cluster", "with.yaml"]),
    ],
)
def test_no_file_that_the_command_line_reads_is_a_fault_of_ours(
    name: str, text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    (tmp_path / "with.yaml").write_text("devices: mine.yaml\npools: {main: {device: h100x}}\n")
    known = {"FLOW": str(CLUSTERS.parent / "flows" / "grpo.py"), "CLUSTER": str(CLUSTERS / "h100-1.yaml")}
    result = CliRunner().invoke(cli, [known.get(word, word) for word in words])
    assert result.exit_code == 2, result.output
    assert "SpecError: " in result.output
