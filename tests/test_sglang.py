"""The rollout engine sglang against a real server. Needs an interpreter that has SGLang: `make sglang-cpu` builds one."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers
import yaml
from sglang_here import NEEDS_SGLANG, OPTIONS, PYTHON, ROOT
from test_train_engines import SMALL, write_model

from m2flow.engines.contract import EngineSettings, Generated
from m2flow.engines.embedded_rollout import EmbeddedRollout
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.engines.hf_model import load_model
from m2flow.engines.sglang import SglangRollout
from m2flow.engines.sglang_client import SglangClient
from m2flow.engines.sglang_weights import Broadcast, open_way
from m2flow.errors import EngineError
from m2flow.micro.record.ledger import read_samples
from m2flow.micro.work.proving import Checks, Proving
from m2flow.observe.recorder import Recorder
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Ragged
from m2flow.testing.rollout_cases import Factory, drain, generate, make_request, started
from m2flow.testing.rollout_self_paced import LONG, check_weights_change_under_what_runs_if_it_is_allowed, run_until
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS

pytestmark = [
    pytest.mark.slow,
    NEEDS_SGLANG,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = {**SMALL, "hidden_size": 64, "max_position_embeddings": 2048}
    return write_model(tmp_path_factory.mktemp("qwen2"), transformers.Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def urls(model: Model) -> Iterator[list[str]]:
    """Two servers, since a check may have two engines at a time; a server takes half a minute to come up."""
    engines = [SglangRollout(model, EngineSettings(options=OPTIONS)) for _ in range(2)]
    try:
        for engine in engines:
            engine.start()
        yield [engine.url for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
def test_the_conformance_suite(check: Callable[[Factory], None], model: Model, urls: list[str]) -> None:
    turn = itertools.cycle(urls)
    options = {"url": "", "deterministic_inference": True}
    check(lambda settings: SglangRollout(model, replace(settings, options={**options, "url": next(turn)})))


def test_samples_and_logprobs_are_those_of_the_embedded_engines(model: Model, urls: list[str]) -> None:
    """Greedy samples part only where two tokens are nearly as likely; log-probabilities are the trainer's, at every temperature."""
    requests = [make_request(prompt, index, Sampling(40, temperature=t)) for prompt in range(4) for index, t in enumerate((0.0, 1.0, 0.7))]
    options = {"url": urls[0], "deterministic_inference": True}
    with started(lambda settings: SglangRollout(model, replace(settings, options=options))) as engine:
        done = generate(engine, requests)
    with started(lambda settings: EmbeddedRollout(model, settings)) as engine:
        expected = generate(engine, requests)
    samples = [done[request.id] for request in requests]
    tokens = Ragged.of([np.concatenate([s.prompt_tokens, s.tokens]) for s in samples], np.int32)
    mask = Ragged.of([np.arange(len(s.prompt_tokens) + len(s.tokens)) >= len(s.prompt_tokens) for s in samples], bool)
    temperature = np.array([request.sampling.temperature for request in requests], np.float32)
    ids = np.array([request.id for request in requests])
    trainer = EmbeddedTrain(model, EngineSettings())
    trainer.start()
    try:
        found = trainer.logprobs(Batch(ids, {"tokens": tokens, "loss_mask": mask, "temperature": temperature}))
    finally:
        trainer.stop()
    for row, sample in enumerate(samples):
        theirs = found.ragged("reference_logprobs").item(row)[len(sample.prompt_tokens) :]
        np.testing.assert_allclose(sample.logprobs, theirs, atol=1e-4)
        other = expected[sample.id]
        if requests[row].sampling.temperature == 0:
            parted = np.flatnonzero(sample.tokens[: len(other.tokens)] != other.tokens[: len(sample.tokens)])
            if len(parted):
                assert abs(sample.logprobs[parted[0]] - other.logprobs[parted[0]]) < 1e-4


def test_a_server_that_holds_other_weights_than_its_files_is_found_out(model: Model, urls: list[str], tmp_path: Path) -> None:
    """Checksums are of the files that the server is given; what it made of them only its own log-probabilities say."""
    trainer = EmbeddedTrain(model, EngineSettings())
    trainer.start()
    probe = Proving({"policy": model}, Checks(), Recorder("x"), published=frozenset({"policy"}))
    tokens = Ragged.of([np.arange(2, 14), np.arange(13, 3, -1)], np.int32)
    probe.notice("policy", Batch(np.array([0, 1]), {"tokens": tokens}), is_sampled_here=False)
    probe.updated("policy", 1, trainer)
    with started(lambda settings: SglangRollout(model, replace(settings, options={"url": urls[0]}))) as engine:
        assert isinstance(engine, SglangRollout)
        engine.load_weights(trainer.weights(), 1)
        said = probe.probe("policy", 1)
        probe.prove("policy", said, engine)
        again = Proving({"policy": model}, Checks(), Recorder("x"), published=frozenset())
        shutil.copytree(model.path, tmp_path / "other")
        other = load_model(Model(str(tmp_path / "other"), "random", seed=5), device="cpu", attention="eager")
        other.save_pretrained(str(tmp_path / "other"))
        answer = engine._call("/update_weights_from_disk", {"model_path": str(tmp_path / "other"), "weight_version": "1"})
        assert answer["success"]
        assert all(bool((tensor == dict(trainer.weights())[name]).all()) for name, tensor in engine.weights())
        with pytest.raises(EngineError, match="do not compute the same"):
            again.prove("policy", said, engine)
    trainer.stop()


def held_by_the_server(engine: SglangRollout) -> object:
    """Hashes of the tensors that it computes with, fused as they are there."""
    return engine._call("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def test_every_way_into_a_server_leaves_it_with_the_same_weights(model: Model, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.engines.sglang_weights._BUCKET_BYTES", 20_000)  # Several buckets, and a tensor larger than one.
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
    client = SglangClient(urls[0])
    client.open()
    way = open_way("group", client, "cpu", 1)
    assert isinstance(way, Broadcast)
    try:
        way._meet()
        body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1 << 22]], "group_name": way._name, "load_format": "flattened_bucket"}
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            way._send(torch.zeros(1 << 24, dtype=torch.uint8), client.begin("/update_weights_from_distributed", body, 60.0), 1)
    finally:
        way.close()
        client.close()


def servers() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if "sglang.launch_server" in " ".join(child.cmdline())}


@pytest.mark.timeout(600)
def test_a_lost_server_comes_back_with_the_weights_that_it_held_and_the_last_one_is_an_error_with_its_words(model: Model) -> None:
    others, requests = servers(), [make_request(prompt, 0, LONG) for prompt in range(2)]
    with started(lambda settings: SglangRollout(model, replace(settings, options={**OPTIONS, "restarts": 1}))) as engine:
        assert isinstance(engine, SglangRollout)
        engine.load_weights([(name, tensor * 2) for name, tensor in engine.weights()], 7)
        whole = generate(engine, requests)
        engine.add(requests[:1])
        done: dict[int, Generated] = {}
        while not done and engine.progress()[requests[0].id] < 4:
            done |= {sample.id: sample for sample in engine.step()}
        (server,) = servers() - others
        for process in [server, *server.children(recursive=True)]:
            process.suspend()
        engine.add(requests[1:])  # The first may have ended by now.
        patience, engine._hung_after_s = engine._hung_after_s, 1.0  # Only while it hangs: one that is slow is not lost.
        while engine.num_restarts == 0:
            done |= {sample.id: sample for sample in engine.step()}
        engine._hung_after_s = patience
        assert not server.is_running()
        done |= drain(engine)
        for request in requests:
            assert (done[request.id].versions == 7).all()
            found, expected = done[request.id], whole[request.id]
            same = int(np.argmin(np.append(found.tokens == expected.tokens, False)))  # Until a near-tie, if there is one.
            assert same > 8
            np.testing.assert_allclose(found.logprobs[:same], expected.logprobs[:same], atol=1e-4)
            np.testing.assert_allclose(found.logprobs[same : same + 1], expected.logprobs[same : same + 1], atol=1e-3)

        (server,) = servers() - others
        children = server.children(recursive=True)
        server.kill()
        engine.add(requests)
        with pytest.raises(EngineError, match=r"the SGLang server ended with status -9"):
            drain(engine)
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive


def test_caches_may_stay_when_weights_change(model: Model, urls: list[str]) -> None:
    request = make_request(0, 0, LONG)
    options = {"url": urls[0], "deterministic_inference": True, "keep_kv": True}

    def make(settings: EngineSettings) -> SglangRollout:
        return SglangRollout(model, replace(settings, options=options))

    check_weights_change_under_what_runs_if_it_is_allowed(make)
    with started(make) as engine:
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add([request])
        run_until(engine, [request.id], 4)
        engine.load_weights(changed, 1, under_requests=True)
        done = drain(engine)[request.id]
    assert set(done.versions.tolist()) == {0, 1}
    np.testing.assert_array_equal(done.kv_stale, done.versions == 1)


@pytest.mark.timeout(900)
def test_the_main_job_learns_with_sglang(tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "clusters" / "sglang-cpu.yaml").read_text())
    spec["rollout"]["options"] |= {"python": PYTHON, "env": OPTIONS["env"]}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "m2flow", "run", "flows/grpo.py", "--cluster", str(tmp_path / "spec.yaml"), "--num-steps", "15"]
    done = subprocess.run([*command, "--runs-dir", str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = tmp_path.glob("grpo-*")
    logged = [json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [values["accuracy"] for values in logged if "accuracy" in values][-1] > 0.9
    for sample, _ in read_samples(run_dir):
        assert len(set(sample.ragged("versions").values[sample.ragged("loss_mask").values.astype(bool)].tolist())) == 1
