"""A trainer of several ranks, parts of whose model fail on one of them, and what it must do then."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from tiny_models import VOCABULARY

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import ReplicatedTrain
from m2flow.errors import EngineError, M2FlowError
from m2flow.recipe import AdamW, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, copied, distance, samples, started


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one call of an engine."""

    rank: int
    part: str
    """The module, by its name; for the forward pass it fails before it computes."""
    way: Literal["forward", "backward", "shape"] = "forward"
    error: type[Exception] = IndexError
    said: str = ""
    """The module that the error names, if another: the one around it."""


def _broken(of: type[FsdpTrain | ReplicatedTrain], faults: Sequence[Fault], model: Model, settings: EngineSettings) -> TrainEngine:
    """An engine that has each fault once, in its turn: the first in the first call of `accumulate` or `logprobs`, and so on."""
    engine = of(model, settings)
    turns = iter(range(1000))
    turn = [-1]
    start = engine.start

    def counted(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            turn[0] = next(turns)
            return method(*args)

        return call

    def start_and_break() -> None:
        start()
        for i, fault in enumerate(faults):
            if fault.rank == settings.rank:
                _break(engine._model.get_submodule(fault.part), fault, iter([i]), turn)

    engine.start = start_and_break  # type: ignore[method-assign]
    for name in ("accumulate", "logprobs"):
        setattr(engine, name, counted(getattr(engine, name)))
    return engine


def _break(module: torch.nn.Module, fault: Fault, when: Iterator[int], turn: list[int]) -> None:
    due = [next(when)]

    def fail(*_: object) -> None:
        if due and due[0] == turn[0]:
            due.clear()
            raise fault.error("no such row")

    def fail_later(_: object, __: object, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if found.requires_grad:
            found.register_hook(fail)

    def cut(_: object, __: object, output: Any) -> Any:
        if due and due[0] == turn[0]:
            due.clear()
            return output[:, :2]
        return output

    if fault.way == "forward":
        module.register_forward_pre_hook(fail)
    else:
        module.register_forward_hook(fail_later if fault.way == "backward" else cut)


def check_each_fault_is_an_error_on_all_and_all_go_on(
    model: Model,
    options: dict[str, Any],
    followers: Followers,
    faults: Sequence[Fault],
    of: type[FsdpTrain | ReplicatedTrain] = FsdpTrain,
) -> None:
    """Also the first of these, in passes without gradient, at the end."""
    settings, batch, step = EngineSettings(options=options), samples(VOCABULARY), AdamW(lr=1e-3, eps=1e-3)
    of_forward = next(fault for fault in faults if fault.way == "forward")
    with started(Mirrored(functools.partial(_broken, of, [*faults, of_forward]), model, settings, followers)) as engine:
        before = copied(engine)
        for fault in faults:
            with pytest.raises(M2FlowError, match=_said(fault)) as caught:
                engine.accumulate(batch, PPO)
            assert (fault.error is MemoryError) == (type(caught.value).__name__ == "OutOfMemory")
            engine.discard()
        with pytest.raises(M2FlowError, match=_said(of_forward)):
            engine.logprobs(batch)
        assert distance(copied(engine), before) == 0
        assert engine.accumulate(batch, PPO).num_tokens
        engine.apply(step, 1.0)
        found = copied(engine)
    with started(Mirrored(of, model, settings, followers)) as engine:
        engine.accumulate(batch, PPO)
        engine.apply(step, 1.0)
        assert distance(copied(engine), found) == 0


def _said(fault: Fault) -> str:
    raised = "" if fault.error is MemoryError else "no such row"
    words = "(must match the size|hidden states of shape .*, not )" if fault.way == "shape" else raised
    return rf"rank {fault.rank} of this trainer: {fault.said or fault.part}, {fault.way.replace('shape', 'forward')} pass: .*{words}"


def check_a_gradient_that_lacks_a_pass_is_not_applied(
    model: Model, options: dict[str, Any], followers: Followers, fault: Fault, of: type[FsdpTrain | ReplicatedTrain] = FsdpTrain
) -> None:
    batch = samples(VOCABULARY)
    with started(Mirrored(functools.partial(_broken, of, [fault]), model, EngineSettings(options=options), followers)) as engine:
        before = copied(engine)
        with pytest.raises(M2FlowError, match=_said(fault)):
            engine.accumulate(batch, PPO)
        with pytest.raises(EngineError, match="the gradient lacks a micro-batch that failed"):
            engine.apply(AdamW(lr=1e-3), 1.0)
        assert distance(copied(engine), before) == 0
