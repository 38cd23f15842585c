"""A rollout engine that declares neither `probes` nor `weights_under_requests` keeps the contract, and is asked for neither; one that
raises is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.engines import registry
from m2flow.engines.contract import RolloutEngine
from m2flow.errors import EngineError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec
from m2flow.testing.fakes import FakeRollout, FakeTrain
from m2flow.testing.rollout_suite import (
    ROLLOUT_CHECKS,
    Factory,
    check_given_tokens_are_judged_without_a_trace,
    check_weights_change_under_running_requests_only_where_that_is_declared,
)
from m2flow.testing.world import run_eager, run_planned

UNABLE = {"probes": False, "weights_under_requests": False}


class Reduced(FakeRollout):  # type: ignore[misc]
    """The fake without what a rollout engine may lack: it raises where it is asked for it all the same."""

    capabilities = replace(FakeRollout.capabilities, **UNABLE)

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        if under_requests and self._running:
            raise EngineError("weights can't change under requests here")
        super().load_weights(tensors, version, under_requests=under_requests)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        return RolloutEngine.logprobs(self, sequences)


class Unsaid(FakeRollout):  # type: ignore[misc]
    """Can what it does not declare."""

    capabilities = replace(FakeRollout.capabilities, **UNABLE)


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_an_engine_with_neither_keeps_the_contract(check: Callable[[Factory], None]) -> None:
    check(lambda settings: Reduced(Model("fake"), settings))


@pytest.mark.parametrize(
    "check", [check_given_tokens_are_judged_without_a_trace, check_weights_change_under_running_requests_only_where_that_is_declared]
)
def test_an_engine_that_does_what_it_does_not_declare_breaks_the_contract(check: Callable[[Factory], None]) -> None:
    with pytest.raises(AssertionError):
        check(lambda settings: Unsaid(Model("fake"), settings))


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


@flow(staleness=2)
def keeps() -> None:
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset([{"prompt": f"{i * 7919 % 100000}="} for i in range(12)])
    for _ in steps(4):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=40, min_new_tokens=10, kv="keep")
        policy.update(responses, verifier.score(responses))


SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=6),
    train=TrainSpec(engine="fake", token_budget=60),
    weights=WeightsSpec(probe="always"),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count loads of weights under running requests, and probes, of every fake engine."""
    found = {"under requests": 0, "probes": 0}
    load_weights, logprobs = FakeRollout.load_weights, FakeRollout.logprobs

    def load(self: FakeRollout, tensors: Any, version: int, *, under_requests: bool = False) -> None:
        found["under requests"] += under_requests and bool(self._running)
        load_weights(self, tensors, version, under_requests=under_requests)

    def judge(self: FakeRollout, sequences: Any) -> Any:
        found["probes"] += 1
        return logprobs(self, sequences)

    monkeypatch.setattr(FakeRollout, "load_weights", load)
    monkeypatch.setattr(FakeRollout, "logprobs", judge)
    return found


def test_a_run_asks_an_engine_for_what_it_declares(asked: dict[str, int]) -> None:
    assert run_planned(keeps, {}, SPEC).error == ""
    assert asked["under requests"]
    assert asked["probes"]


def test_a_run_asks_an_engine_for_nothing_that_it_does_not_declare(asked: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    of_fake = registry.engine_named("fake", "rollout")
    reduced = replace(of_fake, capabilities=Reduced.capabilities, factory=f"{__name__}:Reduced")
    known = [reduced if info is of_fake else info for info in registry.engines()]
    monkeypatch.setattr(registry, "engines", lambda: known)
    graph, models, num_steps = trace(keeps, {}, steps=2, assume=0.0)
    assert any("kv='keep'" in note and "changes nothing here" in note for note in lower(graph, models, SPEC, num_steps=num_steps).notes)
    planned = run_planned(keeps, {}, SPEC)
    assert planned.error == ""
    assert asked == {"under requests": 0, "probes": 0}
    assert run_eager(keeps, {}, SPEC, decisions=planned.decisions) == planned


class Careless(FakeTrain):  # type: ignore[misc]
    """Raises in each of its methods that `raises` names."""

    raises = ""

    def start(self) -> None:
        self._may_raise("start")
        super().start()

    def accumulate(self, *given: Any) -> Any:
        self._may_raise("accumulate")
        return super().accumulate(*given)

    def save(self, path: str) -> None:
        self._may_raise("save")
        super().save(path)

    def _may_raise(self, method: str) -> None:
        if method == self.raises:
            raise ZeroDivisionError(method)


@pytest.mark.parametrize("method", ["start", "accumulate", "save"])
def test_an_engine_of_another_package_that_raises_is_named_by_the_run(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_fake = registry.engine_named("fake", "train")
    known = [replace(of_fake, factory=f"{__name__}:Careless") if info is of_fake else info for info in registry.engines()]
    monkeypatch.setattr(registry, "engines", lambda: known)
    monkeypatch.setattr(Careless, "raises", method)
    with pytest.raises(EngineError, match=rf"the engine 'fake' in Careless\.{method} \(.*{__file__}:\d+ .*raised ZeroDivisionError"):
        Run(keeps, {}, SPEC, RunSettings(runs_dir=str(tmp_path), eager=True)).execute()
