"""The tables of engines say what the planner goes by."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from entry_points import write_entry_points

from m2flow.cli.doctor import other_interpreter, usable
from m2flow.engines import registry
from m2flow.engines.contract import Capabilities, EngineSettings, FunctionEngine
from m2flow.engines.installed import overlaid_packages
from m2flow.engines.models.hf_model import HEADS
from m2flow.engines.registry import EngineInfo, capabilities_of, capability_tables, engines, find_engine, make_function, make_train
from m2flow.engines.servers.inference_server import OPTIONS
from m2flow.errors import EngineError
from m2flow.recipe import Head, Model
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, RolloutSpec
from m2flow.testing.fakes import FakeTrain

ROOT = Path(__file__).parents[2]


BUILT_IN = [info for info in engines() if info.factory.startswith("m2flow.")]


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: f"{info.kind}-{info.name}")
def test_the_class_of_an_engine_can_do_what_the_registry_says(info: EngineInfo) -> None:
    module, _, name = info.factory.partition(":")
    engine = getattr(importlib.import_module(module), name)
    assert (engine.name, engine.capabilities) == (info.name, info.capabilities)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: f"{info.kind}-{info.name}")
def test_an_engine_can_do_what_the_registry_says_of_it_with_its_options_and_over_its_ranks(info: EngineInfo, num_ranks: int) -> None:
    where = info.ranked if num_ranks > 1 and info.ranked else info.factory
    module, _, name = where.partition(":")
    kind = getattr(importlib.import_module(module), name)
    of_server = [{name: True} for name in (*kind.own_options, *OPTIONS)] if info.server else []
    of_ranks = [{degree: 2} for degree in ("tp", "pp") if getattr(info.capabilities.parallel_layouts, degree) != 1]
    for options in ({}, *of_server, *(of_ranks if num_ranks > 1 and info.kind == "train" else [])):
        device = "cpu" if "cpu" in info.capabilities.devices else info.capabilities.devices[0]
        settings = EngineSettings(device=device, options=options, num_ranks=num_ranks if info.kind == "train" else 1)
        engine = kind(settings) if info.kind == "function" else kind(Model("fake"), settings)
        assert engine.capabilities == capabilities_of(info.name, info.kind, options, settings.num_ranks), options


class Half(FunctionEngine):
    """An engine without what the contract asks for."""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere:Engine", "No module named 'nowhere'"),
        (f"{__name__}:Nothing", "no attribute 'Nothing'"),
        (f"{__name__}:Half", "takes no arguments"),
    ],
)
def test_an_engine_of_another_package_that_can_not_be_made_is_named(place: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half = EngineInfo("half", place, Capabilities("function"), "Half of an engine.")
    monkeypatch.setattr(registry, "engines", lambda: [half])
    with pytest.raises(EngineError, match=rf"the function engine 'half' \({place}\) can't be loaded: .*{said}"):
        make_function("half", EngineSettings())


def test_a_package_whose_engines_can_not_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry_points(tmp_path, "broken", {"half": "broken:INFO"})
    (tmp_path / "broken.py").write_text("def INFO(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match="the entry point broken:INFO of the package broken can't be loaded: SyntaxError") as raised:
        registry._registered.__wrapped__()
    assert "uninstall broken" in raised.value.now


def test_options_and_ranks_change_what_an_engine_can_do() -> None:
    seeds = {"deterministic_inference": True}
    assert not capabilities_of("sglang", "rollout", {}).keyed_seeds
    assert capabilities_of("sglang", "rollout", seeds).keyed_seeds
    assert not capabilities_of("vllm", "rollout", seeds).keyed_seeds
    assert [capabilities_of("embedded", "train", {}, num).retries_smaller for num in (1, 2)] == [True, False]
    assert capabilities_of("embeded", "train", {}) is None


def test_an_engine_that_differs_from_its_registration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTrain, "capabilities", replace(FakeTrain.capabilities, retries_smaller=True))
    with pytest.raises(EngineError, match=r"'fake' and its registration differ in retries_smaller"):
        make_train("fake", Model("fake"), EngineSettings())
    make_train("fake", Model("fake"), EngineSettings(num_ranks=2))  # There nobody retries.


def test_the_heads_of_models_are_those_that_can_be_loaded() -> None:
    assert tuple(HEADS) == get_args(Head)


def test_every_engine_but_those_for_tests_has_a_column() -> None:
    head = [line for line in capability_tables(engines()).splitlines() if line.startswith(("| rollout |", "| train |"))]
    named = {(cell.split()[0].strip("`")) for line in head for cell in line.strip("| ").split(" | ")[1:]}
    real = {info.name for info in engines() if info.kind != "function" and not info.factory.startswith("m2flow.testing.")}
    assert named == real


def test_a_spec_without_an_interpreter_of_its_own_is_said_to_have_none(tmp_path: Path) -> None:
    assert "no interpreter of its own" in other_interpreter(ClusterSpec())
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"version": "0.5.99", "words": ["/generate", "sampling_seed"], "saver": false}\'\n')
    fake.chmod(0o755)
    said = other_interpreter(ClusterSpec(rollout=RolloutSpec(engine="sglang", options={"python": str(fake)})))
    assert said.startswith(f"{fake} has sglang 0.5.99: generation by token ids, seeds by token; it lacks streaming of new tokens alone")


def test_of_an_inference_server_it_is_said_whether_this_interpreter_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    info = find_engine("sglang", "rollout")
    monkeypatch.setattr("m2flow.cli.doctor.version_of", lambda name: "")
    assert usable(info).startswith("where an interpreter has SGLang: --cluster looks there; untested on cuda")
    monkeypatch.setattr("m2flow.cli.doctor.version_of", lambda name: "0.5.99" if name == "sglang" else "")
    assert usable(info).startswith("yes (sglang 0.5.99); untested on cuda")


@pytest.mark.parametrize("cluster", ["sglang-cpu", "sglang-deepspeed-cpu", "sglang-deepspeed-cpu-split"])
def test_all_that_stands_in_for_compiled_code_without_a_gpu_is_listed(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    options = load_cluster(ROOT / "clusters" / f"{cluster}.yaml").rollout.options
    (said,) = overlaid_packages(options)
    shim = ROOT / "tests" / "sglang_cpu"
    replaced = set(re.findall(r"^def ([a-z]\w+)|define\(\"(\w+)\(", (shim / "sgl_kernel" / "__init__.py").read_text(), re.MULTILINE))
    names = {name for found in replaced for name in found if name}
    plugin = (shim / "sgl_cpu_plugin.py").read_text()
    names |= set(re.findall(r"\"sglang\.[\w.]*\.(\w+)\"", plugin)) | set(re.findall(r"choices\(\[\"(\w+)\"\]\)", plugin))
    names |= set(re.findall(r"\"(\w+)\"", re.findall(r"for name in \((.*)\):", (shim / "sitecustomize.py").read_text())[0]))
    assert names >= {"assign_req_to_token_pool_cpu", "murmur_hash32_cpu", "_cuda_host_register", "torch_native", "qnms"}
    assert names <= set(re.findall(r"\w+", said))
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"version": "0.5.99", "words": [], "saver": false}\'\n')
    fake.chmod(0o755)
    there = RolloutSpec(engine="sglang", options={**options, "python": str(fake)})
    assert f"its PYTHONPATH has {said}" in other_interpreter(ClusterSpec(rollout=there))
