"""Every rollout engine passes the conformance suite; the built-in one agrees with transformers' own code."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, RolloutEngine
from m2flow.engines.embedded_rollout import EmbeddedRollout
from m2flow.recipe import Model
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS, Factory


@functools.cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def embedded(settings: EngineSettings) -> RolloutEngine:
    return EmbeddedRollout(Model(save_config("Qwen2", Path(model_folder().name)), init="random"), settings)


def fake(settings: EngineSettings) -> RolloutEngine:
    return FakeRollout(Model("fake"), settings)


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", [embedded, fake])
def test_the_engine_keeps_the_contract(factory: Factory, check: Callable[[Factory], None]) -> None:
    check(factory)
