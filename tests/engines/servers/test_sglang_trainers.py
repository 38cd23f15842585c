"""Runs whose samples are a real SGLang server's and whose trainer has stages: `fsdp` here, `megatron` in a process of the interpreter that
has it, where the CPU passes for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from sglang_here import NEEDS_SGLANG, OPTIONS, ROOT

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.engines import registry
from m2flow.engines.contract import EngineSettings
from m2flow.engines.servers.sglang import SglangRollout
from m2flow.micro.records.ledger import read_samples
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec

ENGINE = os.environ.get("M2FLOW_TEST_ENGINE", "fsdp")
LAYOUTS: dict[str, dict[str, int]] = {"fsdp": {"pp": 2}, "megatron-cpu": {"tp": 2, "pp": 2}}
"""Of four ranks: two stages of two shards, and two of two halves of each layer."""
MEGATRON = os.environ.get("M2FLOW_MEGATRON_PYTHON", str(ROOT / ".venv-megatron" / "bin" / "python"))
DIGITS = ROOT / "flows" / "models" / "digits"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), NEEDS_SGLANG]
Found = tuple[dict[str, list[float]], list[str]]


def small_digits(sample: Sample) -> float:
    return sum(digit in "01234" for digit in str(sample.text)) / 8


@flow
def prefers_small_digits(num_steps: int = 5) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(small_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=8)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, optimizer=AdamW(1e-2, eps=1e-3))
        log(reward=rewards.mean())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that runs take one after the other; each sends it the weights that it begins with."""
    engine = SglangRollout(Model(str(DIGITS), init="random"), EngineSettings(options=OPTIONS))
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


def found_by(
    url: str, train: TrainSpec, runs_dir: Path, placement: Literal["split", "time-shared"] = "split", *, eager: bool = False
) -> Found:
    """What was logged, and what updates said, by name, in order; and the texts of all samples."""
    options = {"url": url, "deterministic_inference": True}
    spec = ClusterSpec(
        placement=placement,
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="sglang", options=options),
        train=train,
        weights=WeightsSpec(probe="always"),
    )
    run_dir = Path(Run(prefers_small_digits, {}, spec, RunSettings(runs_dir=str(runs_dir), eager=eager)).execute().run_dir)
    said: dict[str, list[float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line)["values"].items():
            said.setdefault(name, []).append(value)
    samples = sorted((str(sample.ids[0]), str(sample.ragged("text").row(0).tobytes())) for sample, _ in read_samples(run_dir))
    return said, [text for _, text in samples]


@pytest.fixture(scope="module")
def eager(url: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of one process, with the embedded trainer."""
    return found_by(url, TrainSpec(token_budget=400), tmp_path_factory.mktemp("eager"), eager=True)


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_a_trainer_on_stages_learns_from_a_servers_samples_as_the_eager_run(
    placement: Literal["split", "time-shared"], url: str, eager: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ENGINE == "megatron-cpu":
        from megatron_on_cpu import registered

        (tmp_path / "site").mkdir()
        for name, value in registered(tmp_path / "site").items():
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        registry._registered.cache_clear()
    options: dict[str, Any] = LAYOUTS[ENGINE]
    said, texts = found_by(url, TrainSpec(engine=ENGINE, ranks=4, threads=1, options=options, token_budget=400), tmp_path, placement)
    assert len(said["loss"]) == 5
    for name in ("reward", "loss", "grad_norm"):
        np.testing.assert_allclose(said[name], eager[0][name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert len(texts) == 160
    assert texts == eager[1]
    assert max(said["rollout_diff/max"]) < 1e-3
    assert np.mean(said["reward"][-2:]) > np.mean(said["reward"][:2]) + 0.3


@pytest.mark.skipif(ENGINE != "fsdp", reason="in the interpreter that has megatron-core")
@pytest.mark.skipif(not Path(MEGATRON).exists(), reason="megatron: needs .venv-megatron: make megatron-cpu")
def test_megatron_on_stages_of_tensor_ranks_learns_from_a_servers_samples_as_the_eager_run() -> None:
    given = {"M2FLOW_TEST_ENGINE": "megatron-cpu", "OMP_NUM_THREADS": "1"}
    command = [MEGATRON, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout
