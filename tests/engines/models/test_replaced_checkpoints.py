"""A trainer's checkpoint that takes the place of another: whoever is killed at any step of that leaves a whole one that a trainer loads."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import CONFIGS, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models import trainer_checkpoint
from m2flow.testing.train_suite import LINEAR, PPO, copied, distance, samples, started

_CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
"""Audit events, each raised before the change that it names."""


def _killed_before(number: int, folder: Path, write: Callable[[], None]) -> int:
    """Write in a process that is killed before this change in a folder; its status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # There are threads, none of which it needs.
        child = os.fork()
    if not child:
        left = [number]

        def seen(event: str, arguments: tuple[object, ...]) -> None:
            if event in _CHANGES and str(folder) in str(arguments[0]):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(seen)
        try:
            write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("can_exchange", [True, False])
def test_who_is_killed_at_any_step_of_replacing_a_checkpoint_leaves_a_whole_one(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(trainer_checkpoint, "_exchange", lambda *_: False)
    model, folder = write_model(tmp_path / "model", CONFIGS["qwen2"]()), tmp_path / "checkpoints"
    path, backup, found = str(folder / "last"), tmp_path / "backup", list[str]()
    with started(EmbeddedTrain(model, EngineSettings())) as engine, started(EmbeddedTrain(model, EngineSettings())) as other:
        engine.save(str(backup / "last"))
        weights = {"old": copied(engine)}
        engine.accumulate(samples(VOCABULARY), PPO)
        engine.apply(LINEAR, 3.0)
        weights["new"] = copied(engine)
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(backup, folder)
            status = _killed_before(len(found), folder, lambda: engine.save(path))
            other.load(path)
            found.append(next(name for name, expected in weights.items() if distance(copied(other), expected) == 0))
    assert status == 0
    assert found == sorted(found, reverse=True)  # At first the old one, then the new one.
    assert found.count("old") >= 3
    assert found.count("new") >= 3
    assert os.listdir(folder) == ["last"]
