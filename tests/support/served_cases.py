"""What a rollout engine with a real server must do besides the conformance suite, for the tests of each kind of server."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import transformers
import yaml
from tiny_models import SMALL, write_model

from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.servers.served_rollout import ServedRollout
from m2flow.errors import EngineError
from m2flow.micro.records.ledger import read_samples
from m2flow.micro.worker.weight_sync import Checks, LogprobCheck
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Ragged
from m2flow.testing.rollout_suite import (
    LONG,
    Factory,
    check_weights_change_under_what_runs_if_it_is_allowed,
    drain,
    generate,
    in_the_middle,
    make_request,
    started,
)

ROOT = Path(__file__).parents[2]


def small_qwen2(place: Path, **sizes: int) -> Model:
    """Random weights, a context of 2,048 tokens."""
    sizes = {**SMALL, "max_position_embeddings": 2048, "num_key_value_heads": 2, **sizes}
    return write_model(place, transformers.Qwen2Config(**sizes, tie_word_embeddings=True))


@contextlib.contextmanager
def two_servers(make: Callable[[], ServedRollout]) -> Iterator[list[str]]:
    """Where they are. Two, since a check may have two engines at a time; a server takes half a minute to come up."""
    engines = [make() for _ in range(2)]
    try:
        for engine in engines:
            engine.start()
        yield [engine.url for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


def assert_same_as_embedded(model: Model, make: Factory, requests: Sequence[Request]) -> None:
    """Greedy samples part only where two tokens are nearly as likely; log-probabilities are the trainer's, at every temperature."""
    with started(make) as engine:
        done = generate(engine, list(requests))
    with started(lambda settings: EmbeddedRollout(model, settings)) as engine:
        expected = generate(engine, list(requests))
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


def assert_computes_what_one_device_does(model: Model, make: Callable[[str], Factory], ways: Sequence[str]) -> None:
    """A server over several devices: its samples, and what it says of given tokens after weights came in each of these ways.

    Args:
        make: an engine whose weights go into the server that way.
    """
    assert_same_as_embedded(model, make(ways[0]), [make_request(prompt, 0, Sampling(40, temperature=0.0)) for prompt in range(4)])
    tokens = [list(range(2, 13)), [12, 5, 5, 5, 9, 2, 7]]
    for version, way in enumerate(ways, 1):
        with started(make(way)) as engine, started(lambda settings: EmbeddedRollout(model, settings)) as embedded:
            changed = [(name, tensor * (1 + version / 4)) for name, tensor in engine.weights()]
            for one in (engine, embedded):
                one.load_weights(changed, version)
            for found, expected in zip(engine.logprobs(tokens), embedded.logprobs(tokens), strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-4)


def assert_other_weights_are_found_out(model: Model, make: Factory, place: Path) -> None:
    """Checksums are of the files that the server is given; what it made of them only its own log-probabilities say."""
    trainer = EmbeddedTrain(model, EngineSettings())
    trainer.start()
    probe = LogprobCheck({"policy": model}, Checks(), Recorder("x"), published=frozenset({"policy"}))
    tokens = Ragged.of([np.arange(2, 14), np.arange(13, 3, -1)], np.int32)
    probe.notice("policy", Batch(np.array([0, 1]), {"tokens": tokens}), is_sampled_here=False)
    probe.updated("policy", 1, trainer)
    with started(make) as engine:
        assert isinstance(engine, ServedRollout)
        engine.load_weights(trainer.weights(), 1)
        said = probe.probe("policy", 1)
        probe.check_probe("policy", said, engine)
        again = LogprobCheck({"policy": model}, Checks(), Recorder("x"), published=frozenset())
        shutil.copytree(model.path, place / "other")
        other = load_model(Model(str(place / "other"), "random", seed=5), device="cpu", attention="eager")
        other.save_pretrained(str(place / "other"))
        engine._read_weights(place / "other", 1)
        assert all(bool((tensor == dict(trainer.weights())[name]).all()) for name, tensor in engine.weights())
        with pytest.raises(EngineError, match="do not compute the same"):
            again.check_probe("policy", said, engine)
    trainer.stop()


def assert_caches_may_stay(make: Factory) -> None:
    """When weights change under what runs: what comes after is marked.

    Args:
        make: an engine with `keep_kv`.
    """
    request = make_request(0, 0, LONG)
    check_weights_change_under_what_runs_if_it_is_allowed(make)
    with started(make) as engine:
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        for _ in in_the_middle(engine, [request], 4):
            before = engine.version
            engine.load_weights(changed, before + 1, under_requests=True)
            done = drain(engine)[request.id]
            if done.versions[-1] == engine.version:
                break
    assert set(done.versions.tolist()) == {before, before + 1}
    np.testing.assert_array_equal(done.kv_stale, done.versions > before)


def assert_a_server_left_in_the_middle_goes_on(make: Factory, leave: Callable[[ServedRollout], object]) -> None:
    """One that others started, whose client was killed while weights changed.

    Args:
        make: an engine with the `url` of a server.
        leave: what else the client had done by then, besides the pause.
    """
    request = make_request(0, 0, Sampling(8, temperature=0.0))
    with started(make) as engine:
        expected = generate(engine, [request])[request.id]
        assert isinstance(engine, ServedRollout)
        engine._pause(keeps=False)
        leave(engine)
        with started(make) as other:
            found = generate(other, [request])[request.id]
            np.testing.assert_array_equal(found.tokens, expected.tokens)
            other.load_weights([(name, tensor * 2) for name, tensor in other.weights()], 1)
            assert (generate(other, [request])[request.id].versions == 1).all()


def assert_a_lost_server_comes_back_once(make: Callable[[EngineSettings], ServedRollout], words: str) -> None:
    """With the weights that it held, and what ran goes on; the second time it is an error with the server's words.

    Args:
        make: an engine that starts its server, with `restarts: 1`.
        words: in the command line of a server.
    """

    def servers() -> set[psutil.Process]:
        found = set()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # It may have ended meanwhile.
                if words in " ".join(child.cmdline()):
                    found.add(child)
        return found

    others, requests = servers(), [make_request(prompt, 0, LONG) for prompt in range(2)]
    with started(make) as engine:
        assert isinstance(engine, ServedRollout)
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
        with pytest.raises(EngineError, match=rf"the {engine.product} server ended with status -9"):
            drain(engine)
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive


def assert_the_main_job_learns(spec_file: Path, options: dict[str, object], place: Path) -> None:
    """`flows/grpo.py` for 15 steps with this spec: it gets the held-out sums right, and every sample is of one version."""
    spec = yaml.safe_load(spec_file.read_text())
    spec["rollout"]["options"] |= options
    (place / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "m2flow", "run", "flows/grpo.py", "--cluster", str(place / "spec.yaml"), "--num-steps", "15"]
    done = subprocess.run([*command, "--runs-dir", str(place)], capture_output=True, text=True, cwd=ROOT, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = place.glob("grpo-*")
    logged = [json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [values["accuracy"] for values in logged if "accuracy" in values][-1] > 0.9
    for sample, _ in read_samples(run_dir):
        assert len(set(sample.ragged("versions").values[sample.ragged("loss_mask").values.astype(bool)].tolist())) == 1
