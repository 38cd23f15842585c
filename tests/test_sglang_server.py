"""An interpreter for the SGLang server is looked at before it is used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow
from m2flow.engines.sglang_installed import NEEDED, check_version, installed
from m2flow.errors import EngineError, MissingExtra
from m2flow.micro.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings

DIGITS = Path(__file__).parents[1] / "flows" / "models" / "digits"


def length(sample: Sample) -> float:
    return float(len(str(sample.text)))


@flow
def plain() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(length)
    responses = policy.generate(Dataset([{"prompt": "1="}]).take(1), n=2, max_new_tokens=2)
    policy.update(responses, verifier.score(responses))


def test_an_interpreter_without_sglang_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=f"sglang, which {sys.executable} does not have") as raised:
        check_version(sys.executable)
    assert "rollout.options.python" in str(raised.value)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere/python can't be run"):
        check_version(str(tmp_path / "nowhere" / "python"))


def test_an_sglang_that_is_too_old_is_refused_with_the_version_that_will_do(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    words = [word for name, found in NEEDED.items() if name != "weight versions by token" for word in found]
    said = {"version": "0.4.9.post2", "words": words, "saver": True}
    fake.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    fake.chmod(0o755)
    with pytest.raises(MissingExtra, match=r"SGLang 0.4.9.post2 .* lacks weight versions by token, which .* 0\.5\.20 has it"):
        check_version(str(fake))


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
        assert ("release and resume of memory" in installed(str(fake)).abilities) == saver
