"""The rollout engine sglang against a real server. Needs an interpreter that has SGLang: `make sglang-cpu` builds one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import served_cases
import torch
from sglang_here import NEEDS_SGLANG, OPTIONS, PYTHON, ROOT

from m2flow.engines.contract import EngineSettings
from m2flow.engines.servers.inference_server import ServerClient
from m2flow.engines.servers.sglang import BroadcastTransfer, SglangDialect, SglangRollout, open_transfer
from m2flow.errors import EngineError
from m2flow.recipe import Model, Sampling
from m2flow.testing.rollout_suite import LONG, ROLLOUT_CHECKS, Factory, generate, make_request, started

pytestmark = [
    pytest.mark.slow,
    NEEDS_SGLANG,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return served_cases.small_qwen2(tmp_path_factory.mktemp("qwen2"), hidden_size=64)


@pytest.fixture(scope="module")
def urls(model: Model) -> Iterator[list[str]]:
    with served_cases.two_servers(lambda: SglangRollout(model, EngineSettings(options=OPTIONS))) as urls:
        yield urls


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
def test_the_conformance_suite(check: Callable[[Factory], None], model: Model, urls: list[str]) -> None:
    turn = itertools.cycle(urls)
    options = {"url": "", "deterministic_inference": True}
    check(lambda settings: SglangRollout(model, replace(settings, options={**options, "url": next(turn)})))


def test_samples_and_logprobs_are_those_of_the_embedded_engines(model: Model, urls: list[str]) -> None:
    requests = [make_request(prompt, index, Sampling(40, temperature=t)) for prompt in range(4) for index, t in enumerate((0.0, 1.0, 0.7))]
    options = {"url": urls[0], "deterministic_inference": True}
    served_cases.assert_same_as_embedded(model, lambda settings: SglangRollout(model, replace(settings, options=options)), requests)


def test_what_the_server_found_in_its_cache_is_counted(model: Model, urls: list[str]) -> None:
    with started(lambda settings: SglangRollout(model, replace(settings, options={"url": urls[0]}))) as engine:
        (first,) = generate(engine, [make_request(1, 0, Sampling(4))]).values()
        assert engine.occupancy().num_cached == 0
        generate(engine, [make_request(1, 1, Sampling(4))])
        assert (
            0 < engine.occupancy().num_cached < len(first.prompt_tokens)
        )  # One token has to be computed, or there is nothing to go on from.


def test_a_server_that_holds_other_weights_than_its_files_is_found_out(model: Model, urls: list[str], tmp_path: Path) -> None:
    served_cases.assert_other_weights_are_found_out(
        model, lambda settings: SglangRollout(model, replace(settings, options={"url": urls[0]})), tmp_path
    )


def held_by_the_server(engine: SglangRollout) -> object:
    """Hashes of the tensors that it computes with, fused as they are there."""
    return engine._call("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def test_every_way_into_a_server_leaves_it_with_the_same_weights(model: Model, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.engines.servers.sglang._BUCKET_BYTES", 20_000)  # Several buckets, and a tensor larger than one.
    found: dict[str, list[object]] = {}
    for way in ("files", "tensors", "group"):
        settings = EngineSettings(options={"url": urls[0]}, into_server=way)
        with started(lambda _, settings=settings: SglangRollout(model, settings)) as engine:
            assert isinstance(engine, SglangRollout)
            said = found[way] = [held_by_the_server(engine)]
            own = [(name, tensor.clone()) for name, tensor in engine.weights()]
            for version, factor in ((1, 2.0), (2, 0.5)):
                engine.load_weights([(name, tensor * factor) for name, tensor in own], version)
                said += [held_by_the_server(engine), engine.logprobs([list(range(2, 14))])[0].tolist()]
            assert (generate(engine, [make_request(0, 0, Sampling(4))])[make_request(0, 0, LONG).id].versions == 2).all()
    assert found["tensors"] == found["files"] == found["group"]
    assert len({json.dumps(one) for one in found["files"]}) == len(found["files"])


def test_a_broadcast_that_the_server_refuses_ends(model: Model, urls: list[str]) -> None:
    client = ServerClient(urls[0], SglangDialect())
    client.open()
    way = open_transfer("group", client, "cpu", 1)
    assert isinstance(way, BroadcastTransfer)
    try:
        way._join_group()
        body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1 << 22]], "group_name": way._name, "load_format": "flattened_bucket"}
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            way._send(torch.zeros(1 << 24, dtype=torch.uint8), client.begin("/update_weights_from_distributed", body, 60.0), 1)
    finally:
        way.close()
        client.close()


@pytest.mark.timeout(600)
def test_a_lost_server_comes_back_with_the_weights_that_it_held_and_the_last_one_is_an_error_with_its_words(model: Model) -> None:
    def make(settings: EngineSettings) -> SglangRollout:
        return SglangRollout(model, replace(settings, options={**OPTIONS, "restarts": 1}))

    served_cases.assert_a_lost_server_comes_back_once(make, "sglang.launch_server")


def test_caches_may_stay_when_weights_change(model: Model, urls: list[str]) -> None:
    options = {"url": urls[0], "deterministic_inference": True, "keep_kv": True}
    served_cases.assert_caches_may_stay(lambda settings: SglangRollout(model, replace(settings, options=options)))


@pytest.mark.parametrize("way", ["files", "tensors"])
def test_a_server_whose_client_was_killed_while_weights_changed_goes_on_for_others(model: Model, urls: list[str], way: str) -> None:
    def make(settings: EngineSettings) -> SglangRollout:
        return SglangRollout(model, replace(settings, options={"url": urls[0]}, into_server=way))

    served_cases.assert_a_server_left_in_the_middle_goes_on(make, lambda engine: engine._call("/begin_weight_update", {}))


@pytest.mark.timeout(900)
def test_the_main_job_learns_with_sglang(tmp_path: Path) -> None:
    served_cases.assert_the_main_job_learns(ROOT / "clusters" / "sglang-cpu.yaml", {"python": PYTHON, "env": OPTIONS["env"]}, tmp_path)


def test_what_a_server_has_of_its_device_is_known_and_leaves_it_only_with_a_memory_saver(model: Model, urls: list[str]) -> None:
    """On a CPU it has none."""
    engine = SglangRollout(model, EngineSettings(options={"url": urls[0]}))
    with started(lambda settings: engine):
        kv = engine.memory().kv
        assert kv > 0
        engine.offload()
        assert engine.memory().kv == kv
        engine._frees = True
        assert engine.memory().kv == 0
        engine.onload()
        assert engine.memory().kv == kv
