"""A trainer of several ranks, one of which stays in a layer, in the gradient's reduction or in a step, and what the others must say."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import ranks
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


Call = Literal["start", "weights", "weight_pieces", "save"]


def _staying(
    of: Callable[[Model, EngineSettings], RankedTrain], call: Call, wait_s: float, model: Model, settings: EngineSettings
) -> RankedTrain:
    engine = of(model, settings)
    ranks._WAIT = datetime.timedelta(seconds=wait_s)
    if settings.rank != 1:
        return engine
    if call == "start":
        meet = engine._ranks.open

        def meet_and_stay(leave: Callable[[], object] | None = None) -> None:
            meet(leave)
            sleeps_here()

        engine._ranks.open = meet_and_stay  # type: ignore[method-assign]
    elif call == "save":
        FileSystemWriter.write_data = stays_on_its_disk
    else:
        tensors = getattr(engine, call)

        def tensors_and_stay() -> Iterator[Any]:
            for number, item in enumerate(tensors()):
                yield item
                if number == 2:
                    sleeps_here()

        setattr(engine, call, tensors_and_stay)
    return engine


_OF_TORCH: dict[str, Any] = {"time": time, "STAYS_S": STAYS_S}
exec(compile("def write_data(*_): time.sleep(STAYS_S)", "/lib/torch/distributed/checkpoint/filesystem.py", "exec"), _OF_TORCH)
stays_on_its_disk = _OF_TORCH["write_data"]
"""As a function of PyTorch whose disk does not answer."""


_HANGING_CALLS: list[tuple[Call, dict[str, Any], str]] = [
    ("start", {}, r"start, loading, for \d+ s, in sleeps_here \(hanging.py:"),
    ("weights", {}, r"weights, at \S+, for \d+ s, in sleeps_here \(hanging.py:"),
    ("weight_pieces", {}, r"weight_pieces, at \S+, for \d+ s, in sleeps_here \(hanging.py:"),
    ("save", {"spread_checkpoints": True}, r"save, writing parts of a checkpoint, for \d+ s, in write_data \(filesystem.py:"),
]
of_hanging_calls = pytest.mark.parametrize(("call", "options", "said"), _HANGING_CALLS, ids=[call for call, _, _ in _HANGING_CALLS])
"""A call, the options with which it hangs, and what is to be said of it."""


def check_a_call_is_named_that_hangs(
    of: Callable[[Model, EngineSettings], TrainEngine],
    call: Call,
    said: str,
    model: Model,
    options: dict[str, Any],
    followers: Followers,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 ends the call in time, with the rank that stays, and its place."""
    start_s = WAIT_S if call == "start" else 60.0
    monkeypatch.setattr(ranks, "_WAIT", ranks._WAIT)
    settings = EngineSettings(options={**options, "collective_timeout_s": WAIT_S})
    engine = Mirrored(functools.partial(_staying, of, call, start_s), model, settings, followers)
    arguments = (str(folder / "checkpoint"),) if call == "save" else ()
    if call != "start":
        engine.start()
    begin = time.monotonic()
    followers.tell(engine._number, call, *arguments)
    with pytest.raises(StateLost, match=rf"rank 1 of this trainer hangs: {said}") as caught:
        for _ in getattr(engine._own, call)(*arguments) or ():
            pass
    assert time.monotonic() - begin < ENDS_S + (10.0 if call == "start" else 0.0)
    assert f"rank 0 waited for it ({call}" in caught.value.what
    followers.wait()  # Who was waited for goes on, and may hear that the others are gone.
    engine.stop()


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
