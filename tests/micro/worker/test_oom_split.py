"""Micro-batches that do not fit into memory are trained on in halves, and nothing is trained on twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cramped import _ROOM, LR, learns
from safetensors.torch import load_file

from m2flow.errors import EngineError, FlowError
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    os.environ.pop(_ROOM, None)


def trained(tmp_path: Path, forward: int, backward: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights after an update of two steps, and its metrics."""
    os.environ[_ROOM] = f"{forward} {backward}"
    spec = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(max_running=64), train=TrainSpec(token_budget=10_000))
    settings = RunSettings(runs_dir=str(tmp_path / f"{forward}-{backward}"), eager=True, deterministic=True)
    run_dir = Path(Run(learns, {}, spec, settings).execute().run_dir)
    (first, *_) = (run_dir / "metrics.jsonl").read_text().splitlines()
    return load_file(run_dir / "checkpoints" / "final" / "policy" / "model.safetensors"), json.loads(first)["values"]


@pytest.mark.slow
def test_what_does_not_fit_is_trained_on_in_halves_to_the_same_weights(tmp_path: Path) -> None:
    whole, whole_said = trained(tmp_path, 10_000, 10_000)
    assert "micro_batches_halved" not in whole_said
    for forward, backward in ((20, 10_000), (10_000, 20)):
        halves, said = trained(tmp_path, forward, backward)
        assert said.pop("micro_batches_halved") >= 2
        assert said == pytest.approx(whole_said, rel=1e-3, abs=1e-6)
        for name, tensor in whole.items():
            # AdamW's step has the size of its learning rate where a gradient is next to nothing, whatever its sign.
            assert float((tensor - halves[name]).abs().mean()) < 0.02 * LR, name


def test_one_sample_that_does_not_fit_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises((EngineError, FlowError), match=r"out of memory .* 1 samples; one sample .*not fit"):
        trained(tmp_path, 1, 1)
