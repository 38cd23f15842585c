"""The example specs: each loads, says what it is for, and has room for the model that its comment plans with."""

import re
from pathlib import Path

import pytest

from m2flow import load_flow
from m2flow.macro.tracing import trace
from m2flow.micro.costs.extents import extents_of
from m2flow.micro.costs.modelled import ModelledCosts, shapes_of
from m2flow.micro.costs.pools import pools_of
from m2flow.micro.search.workload import workload_of
from m2flow.spec import load_cluster

ROOT = Path(__file__).parents[1]
SPECS = sorted((ROOT / "clusters").glob("*.yaml"))
SIZES = {"h100-1": 1, "h100-8": 8, "h100-64": 64, "h100-256": 256, "h100-1024": 1024, "h20-h100": 64}


def test_there_are_examples_from_one_device_to_a_thousand() -> None:
    assert set(SIZES) <= {path.stem for path in SPECS}


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
