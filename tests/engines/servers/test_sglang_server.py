"""An interpreter for the SGLang server is looked at before it is used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from started_with import engine_with, started_with
from tiny_models import CONFIGS, write_model

from m2flow import Dataset, Policy, Reward, Sample, flow
from m2flow.engines.contract import EngineSettings
from m2flow.engines.installed import SGLANG_NEEDED, check_sglang, sglang_installed
from m2flow.engines.servers.served_rollout import ServedRollout
from m2flow.engines.servers.sglang import SglangDialect, SglangRollout, choose_transfer
from m2flow.errors import EngineError, MissingExtra
from m2flow.recipe import Sampling
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings
from m2flow.testing.rollout_suite import generate, make_request

DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"


def length(sample: Sample) -> float:
    return float(len(str(sample.text)))


@flow
def plain() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(length)
    responses = policy.generate(Dataset([{"prompt": "1="}]).take(1), n=2, max_new_tokens=2)
    policy.update(responses, verifier.score(responses))


def test_an_interpreter_without_sglang_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=f"sglang, which {sys.executable} does not have") as raised:
        check_sglang(sys.executable)
    assert "rollout.options.python" in str(raised.value)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere/python can't be run"):
        check_sglang(str(tmp_path / "nowhere" / "python"))


def test_an_sglang_that_is_too_old_is_refused_with_the_version_that_will_do(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    words = [word for name, found in SGLANG_NEEDED.items() if name != "weight versions by token" for word in found]
    said = {"version": "0.4.9.post2", "words": words, "saver": True}
    fake.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    fake.chmod(0o755)
    with pytest.raises(MissingExtra, match=r"SGLang 0.4.9.post2 .* weight versions by token.* 0\.5\.20"):
        check_sglang(str(fake))


def test_a_run_that_would_need_it_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    spec = ClusterSpec(rollout=RolloutSpec(engine="sglang", options={"python": sys.executable}), device="cpu")
    run = Run(plain, {}, spec, RunSettings(runs_dir=str(tmp_path / "runs")))
    with pytest.raises(MissingExtra, match="sglang, which"):
        run.execute()
    assert not (tmp_path / "runs").exists()


def test_memory_counts_as_released_only_with_what_frees_it(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    for saver in (True, False):
        said = {"version": "0.5.23", "words": ["/release_memory_occupation", "/resume_memory_occupation"], "saver": saver}
        fake.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
        fake.chmod(0o755)
        assert ("release and resume of memory" in sglang_installed(str(fake)).abilities) == saver


def test_a_server_is_laid_over_the_devices_that_the_plan_says(tmp_path: Path) -> None:
    given, _ = started_with(SglangRollout, SGLANG_NEEDED, tmp_path, EngineSettings(device="cuda:2", tp=4, pp=2, ep=4))
    found = {name: given[given.index(name) + 1] for name in ("--device", "--base-gpu-id", "--tp-size", "--pp-size", "--ep-size")}
    assert found == {"--device": "cuda", "--base-gpu-id": "2", "--tp-size": "4", "--pp-size": "2", "--ep-size": "4"}
    assert "--enable-memory-saver" in given


def test_a_server_on_one_device_is_told_of_no_layout(tmp_path: Path) -> None:
    given, _ = started_with(SglangRollout, SGLANG_NEEDED, tmp_path, EngineSettings())
    assert not {"--base-gpu-id", "--tp-size", "--pp-size", "--ep-size", "--enable-memory-saver"} & set(given)


def test_what_a_server_found_in_its_cache_and_put_back_is_said_at_the_end() -> None:
    said = b'{"output_ids":[5],"meta_info":{"finish_reason":null,"output_token_logprobs":[[-1.0,5,null]],"cached_tokens":7}}'
    heard = SglangDialect().heard("a", said)
    assert (heard.num_cached, heard.num_put_back) == (0, 0)
    end = b'{"type":"length"},"num_retractions":2,"weight_versions":[{"version":"0","start":0,"end":1}]'
    heard = SglangDialect().heard("a", said.replace(b"null,", end + b",", 1))
    assert (heard.tokens, heard.num_cached, heard.num_put_back) == ([5], 7, 2)


@pytest.mark.parametrize("how", ["breaks", "aborts"])
def test_a_server_that_breaks_or_aborts_its_requests_before_it_dies_is_started_again(tmp_path: Path, how: str) -> None:
    engine = dying(tmp_path, 1.0, how, restarts=1)
    try:
        engine.start()
        found = generate(engine, [make_request(0, 0, Sampling(4, temperature=0.0))])
        assert engine.num_restarts == 1
        assert [sample.tokens.tolist() for sample in found.values()] == [[5, 5, 5, 5]]
    finally:
        engine.stop()


def test_the_error_of_one_that_is_not_started_again_has_its_last_words(tmp_path: Path) -> None:
    engine = dying(tmp_path, 1.0, restarts=0)
    try:
        engine.start()
        with pytest.raises(EngineError, match="Received sigquit"):
            generate(engine, [make_request(0, 0, Sampling(4, temperature=0.0))])
    finally:
        engine.stop()


@pytest.mark.parametrize(("given", "found"), [("", "lo0" if sys.platform == "darwin" else "lo"), ("GLOO_SOCKET_IFNAME=eth7", "eth7")])
def test_the_processes_of_a_server_talk_among_themselves_on_loopback_unless_told_otherwise(tmp_path: Path, given: str, found: str) -> None:
    engine = dying(tmp_path, 1.0, restarts=0, env=given)
    try:
        engine.start()
        assert (tmp_path / "interface").read_text() == f"{found}\n"
    finally:
        engine.stop()


def dying(place: Path, wait_s: float, how: str = "breaks", *, restarts: int, env: str = "") -> ServedRollout:
    """An engine whose server says where Gloo would listen, and dies so many seconds after it broke or aborted a request."""
    server = f'{sys.executable} {Path(__file__).parents[2] / "support" / "dying_server.py"} {wait_s} {place / "died"} {how} "$@"'
    command = f"echo $GLOO_SOCKET_IFNAME > {place / 'interface'}; exec {server}"
    settings = EngineSettings(options={"restarts": restarts, "weights_dir": str(place), "env": env})
    return engine_with(SglangRollout, SGLANG_NEEDED, place, command, settings)


def test_experts_of_a_model_without_any_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, CONFIGS["qwen2"]())
    engine = SglangRollout(model, EngineSettings(options={"routed_experts": True}))
    with pytest.raises(EngineError, match=r"mixtures of experts.* qwen2"):
        engine.start()
    engine.stop()


@pytest.mark.parametrize(
    ("wanted", "url", "stages", "found"),
    [
        ("auto", "http://127.0.0.1:1", 1, "files"),
        ("auto", "http://10.0.0.7:1", 1, "group"),
        ("auto", "http://10.0.0.7:1", 2, "files"),
        ("tensors", "http://localhost:1", 1, "tensors"),
        ("files", "http://10.0.0.7:1", 1, "files"),
    ],
)
def test_weights_go_into_a_server_by_what_it_can_reach(wanted: str, url: str, stages: int, found: str) -> None:
    assert choose_transfer(wanted, url, stages) == found


def test_a_way_that_a_server_can_not_take_is_refused() -> None:
    with pytest.raises(EngineError, match="is not on this host"):
        choose_transfer("tensors", "http://10.0.0.7:1", 1)
    with pytest.raises(EngineError, match=r"pipeline parallelism.* 2 stages"):
        choose_transfer("group", "http://127.0.0.1:1", 2)
