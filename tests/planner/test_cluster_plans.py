"""The example specs: each loads, says what it is for, and has room for the model that its comment plans with."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from m2flow import load_flow
from m2flow.cli.main import cli
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.pools import pools_of
from m2flow.planner.workload import extents_of, workload_of
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, WeightsSpec

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "clusters").glob("*.yaml"))
SIZES = {"h100-1": 1, "h100-8": 8, "h100-64": 64, "h100-256": 256, "h100-1024": 1024, "h20-h100": 64}


def test_there_are_examples_from_one_device_to_a_thousand() -> None:
    assert set(SIZES) <= {path.stem for path in SPECS}


@pytest.mark.parametrize("path", [*SPECS, ROOT / "clusters" / "kuberay" / "spec.yaml"], ids=lambda path: path.stem)
def test_an_example_tells_editors_its_schema(path: Path) -> None:
    line, _, schema = path.read_text().partition("\n")[0].partition("=")
    assert line == "# yaml-language-server: $schema"
    assert (path.parent / schema).resolve() == ROOT / "clusters" / "schema.json"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_an_example_has_a_name_a_comment_and_known_devices(path: Path) -> None:
    spec = load_cluster(path)
    assert spec.name == path.stem
    assert path.read_text().startswith("# ")
    assert f"--cluster clusters/{path.name}" in path.read_text()
    pools = pools_of(spec)
    if path.stem in SIZES:
        assert sum(pool.num_devices for pool in pools.values()) == SIZES[path.stem]


@pytest.mark.parametrize("name", SIZES)
def test_the_model_of_an_example_s_comment_fits_it(name: str) -> None:
    path = ROOT / "clusters" / f"{name}.yaml"
    found = re.search(r"--shape policy=(\S+)", path.read_text())
    assert found is not None
    spec = load_cluster(path).model_copy(update={"shapes": {"policy": found[1]}})
    graph, models, _ = trace(load_flow(f"{ROOT}/flows/grpo.py"), {}, steps=2, assume=0.5)
    work = workload_of(graph, spec)
    shapes = shapes_of(models, spec)
    costs = ModelledCosts(spec, work, shapes, extents_of(work, shapes))
    for engine in work.engines:
        units = {pool: costs.unit(engine, pool) for pool in costs.pools}
        assert all(units.values()), (engine, units)
        for pool, unit in units.items():
            assert costs.fits(engine, pool, unit)


SHORT = ("--num-steps", "1", "--warm-steps", "1")
PLANS = {
    "laptop": ("time-shared", {"cpu"}),
    "gpu-shared": ("time-shared", {"cpu", "cuda:0"}),
    "h100-8-split": ("split", {"main", "cpu"}),
    "h100-2x8": ("split", {"sampling", "training", "cpu"}),
    "h20-h100": ("", {"train", "decode", "cpu"}),
    "h100-1024": ("", {"main", "cpu"}),
    "ray": ("split", {"cpu"}),
}
"""What a user begins with, from a laptop to 128 nodes -> how rollout and training share it, if the spec says so, and what may be used."""


@pytest.mark.parametrize("name", PLANS)
def test_an_example_is_planned_without_its_machines(name: str) -> None:
    path = ROOT / "clusters" / f"{name}.yaml"
    shape = re.findall(r"--shape policy=\S+", path.read_text())[:1]
    said = CliRunner().invoke(cli, ["plan", f"{ROOT}/flows/grpo.py", "--cluster", str(path), *SHORT, "--json", *" ".join(shape).split()])
    assert said.exit_code == 0, said.output
    plan = json.loads(said.output)["plan"]
    mode, devices = PLANS[name]
    assert mode in ("", plan["mode"])
    assert {worker["device"].partition("[")[0] for worker in plan["workers"]} <= devices


def test_separate_nodes_keep_what_generates_from_what_trains() -> None:
    path = ROOT / "clusters" / "h100-2x8.yaml"
    said = CliRunner().invoke(
        cli, ["plan", f"{ROOT}/flows/grpo.py", "--cluster", str(path), *SHORT, "--json", "--shape", "policy=Qwen2.5-7B"]
    )
    at = {
        (slot["kind"], worker["device"].partition("[")[0])
        for worker in json.loads(said.output)["plan"]["workers"]
        for slot in worker["engines"]
    }
    assert at == {("rollout", "sampling"), ("train", "training"), ("function", "cpu")}
    plan = json.loads(said.output)["plan"]
    assert {route["transport"] for route in plan["routes"] if route["source"] != route["target"]} == {"zmq tcp"}
    assert {sync["transport"] for sync in plan["syncs"]} == {"tcp"}


def test_the_kuberay_example_has_the_nodes_that_its_spec_asks_for() -> None:
    spec = load_cluster(ROOT / "clusters" / "kuberay" / "spec.yaml")
    manifest = yaml.safe_load((ROOT / "clusters" / "kuberay" / "raycluster.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    groups = {group["groupName"]: group for group in manifest["spec"]["workerGroupSpecs"]}
    for group in groups.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"] in group["rayStartParams"]["resources"]
    assert set(spec.ray.resources.values()) <= groups.keys()
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    assert spec.rollout.threads is not None
    assert spec.rollout.threads <= int(limits["sampling"]["cpu"])
    assert int(limits["sampling"]["nvidia.com/gpu"]) == 1
    assert spec.rollout.workers <= groups["sampling"]["maxReplicas"]
    pods = [manifest["spec"]["headGroupSpec"], *groups.values()]
    for pod in pods:
        inside = pod["template"]["spec"]
        assert {mount["name"] for mount in inside["containers"][0]["volumeMounts"]} == {volume["name"] for volume in inside["volumes"]}


def test_on_several_hosts_nothing_listens_without_a_key_unless_the_spec_says_so() -> None:
    def syncs(spec: ClusterSpec) -> set[str]:
        graph, models, _ = trace(load_flow(f"{ROOT}/flows/grpo.py"), {"num_steps": 1, "warm_steps": 1}, steps=2, assume=0.5)
        return {sync.transport for sync in lower(graph, models, spec).syncs}

    ray = load_cluster(ROOT / "clusters" / "ray.yaml")
    assert syncs(ray) == {"tcp"}
    assert syncs(ray.model_copy(update={"weights": WeightsSpec(transport="broadcast")})) == {"broadcast"}
