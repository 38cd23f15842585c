"""A trainer of several ranks, one of which stays in a layer, in the gradient's reduction or in a step, and what the others must say."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed.ranks import RankedTrain
from m2flow.errors import StateLost
from m2flow.recipe import AdamW, Model
from m2flow.samples import Batch
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO

WAIT_S = 4.0
"""How long the ranks of these tests wait for each other."""
STAYS_S = 11.0
ENDS_S = WAIT_S + 5.0
"""When the step must have ended, on a busy machine: before the rank that stays has gone on."""


@dataclass(frozen=True)
class Stay:
    """Where rank 1 stays, once."""

    layer: str
    way: Literal["forward", "backward"] = "forward"
    says: str = ""
    """How the error names the layer, if otherwise."""


def sleeps_here(*_: object) -> None:
    time.sleep(STAYS_S)


def _hanging(
    of: Callable[[Model, EngineSettings], RankedTrain],
    stay: Stay,
    layer_of: Callable[[Any, str], torch.nn.Module],
    model: Model,
    settings: EngineSettings,
) -> RankedTrain:
    engine = of(model, settings)
    start, due = engine.start, [sleeps_here]

    def once(*_: object) -> None:
        if due:
            due.pop()()

    def on_the_way_back(_: object, __: object, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(once)

    def start_and_stay() -> None:
        start()
        if settings.rank == 1:
            layer = layer_of(engine, stay.layer)
            if stay.way == "forward":
                layer.register_forward_pre_hook(once)
            else:
                layer.register_forward_hook(on_the_way_back)

    engine.start = start_and_stay  # type: ignore[method-assign]
    return engine


def submodule(engine: Any, name: str) -> torch.nn.Module:
    found: torch.nn.Module = engine._model.get_submodule(name)
    return found


def check_who_hangs_is_named(
    of: Callable[[Model, EngineSettings], TrainEngine],
    stay: Stay,
    model: Model,
    options: dict[str, Any],
    followers: Followers,
    batch: Batch,
    layer_of: Callable[[Any, str], torch.nn.Module] = submodule,
) -> None:
    """Rank 0 ends the call in time, with the rank that stays, its call, pass, layer and line; a trainer that is started anew works."""
    settings = EngineSettings(options={**options, "collective_timeout_s": WAIT_S})
    engine = Mirrored(functools.partial(_hanging, of, stay, layer_of), model, settings, followers)
    engine.start()
    begin = time.monotonic()
    followers.tell(engine._number, "accumulate", batch, PPO)
    said = rf"rank 1 of this trainer hangs: accumulate, {stay.way} pass, {stay.says or stay.layer}, for \d+ s, in sleeps_here \(hanging.py:"
    with pytest.raises(StateLost, match=said) as caught:
        engine._own.accumulate(batch, PPO)
    assert time.monotonic() - begin < ENDS_S
    assert "rank 0 waited for it (accumulate" in caught.value.what
    assert all(followers.wait()), "who was waited for hears that the others are gone"
    engine.stop()
    again = Mirrored(of, model, settings, followers)
    again.start()
    try:
        again.accumulate(batch, PPO)
        again.apply(AdamW(1e-3), 3.0)
    finally:
        again.stop()
