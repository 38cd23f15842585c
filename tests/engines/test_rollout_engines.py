"""Every rollout engine passes the conformance suite; the built-in one agrees with transformers' own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from embedded_rollouts import embedded, model_folder
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Request, RolloutEngine
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.recipe import Model, Sampling
from m2flow.samples import SampleId
from m2flow.testing import fakes
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS, Factory, check_stop_tokens_end_a_sample_but_not_before_its_minimum


def fake(settings: EngineSettings) -> RolloutEngine:
    return FakeRollout(Model("fake"), settings)


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("factory", [embedded, fake])
def test_the_engine_keeps_the_contract(factory: Factory, check: Callable[[Factory], None]) -> None:
    check(factory)


def test_a_decode_step_of_the_fake_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fakes.time, "sleep", slept.append)
    engine = fake(EngineSettings(options={"step_ms": 20}))
    engine.start()
    engine.step()
    assert not slept, "there is nothing to decode"
    engine.add([Request(SampleId(0, 0, 0).pack(), "a", 1, Sampling(3, ignore_eos=True))])
    while engine.num_unfinished:
        engine.step()
    assert slept == [0.02] * 3


class Unkeyed(EmbeddedRollout):  # type: ignore[misc]
    """Draws anew each time, as a server does whose random numbers go by its own steps."""

    capabilities = replace(EmbeddedRollout.capabilities, keyed_seeds=False, deterministic=False)

    def add(self, requests: Sequence[Request]) -> None:
        self._added = getattr(self, "_added", 0) + 1
        super().add([replace(request, seed=(request.seed * 31 + self._added * 0x9E3779B97F4A7C15) % 2**64) for request in requests])


class Deaf(EmbeddedRollout):  # type: ignore[misc]
    """Goes on after a stop token."""

    def add(self, requests: Sequence[Request]) -> None:
        super().add([replace(request, sampling=replace(request.sampling, stop_token_ids=())) for request in requests])


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_an_engine_that_draws_anew_each_time_keeps_the_contract(check: Callable[[Factory], None]) -> None:
    path = save_config("Qwen2", Path(model_folder().name))
    check(lambda settings: Unkeyed(Model(path, init="random"), settings))


@pytest.mark.parametrize("kind", [EmbeddedRollout, Unkeyed])
@pytest.mark.parametrize("vocab_size", [14, 200])
def test_an_engine_whose_tokens_are_all_as_likely_keeps_the_contract_of_stop_tokens(
    kind: type[EmbeddedRollout], vocab_size: int, tmp_path: Path
) -> None:
    path = save_config("Qwen2", tmp_path, initializer_range=1e-3, vocab_size=vocab_size)
    check_stop_tokens_end_a_sample_but_not_before_its_minimum(lambda given: kind(Model(path, init="random"), given))


def test_an_engine_that_goes_on_after_a_stop_token_breaks_the_contract(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, initializer_range=1e-3)
    with pytest.raises(AssertionError):
        check_stop_tokens_end_a_sample_but_not_before_its_minimum(lambda given: Deaf(Model(path, init="random"), given))
