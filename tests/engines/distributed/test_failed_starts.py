"""A trainer of several ranks whose start fails after they have met: it leaves them at once, and its process can start others."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from followed import num_group_threads
from tiny_models import CONFIGS, VOCABULARY, write_model

from m2flow.channels.weights import Publisher, WeightOptions
from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import ranks
from m2flow.engines.distributed.deepspeed import DeepSpeedTrain
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import ReplicatedTrain
from m2flow.errors import EngineError, InternalError, M2FlowError
from m2flow.recipe import Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, samples, started

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
KINDS = [
    pytest.param(ReplicatedTrain, {}, id="replicas"),
    pytest.param(FsdpTrain, {}, id="fsdp"),
    pytest.param(DeepSpeedTrain, {"zero": 1}, marks=[NEEDS_DEEPSPEED, pytest.mark.slow], id="deepspeed"),
]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return write_model(tmp_path, CONFIGS["qwen2"]())


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_trainer_whose_start_fails_has_left_its_ranks_and_may_start_again(
    kind: Callable[[Model, EngineSettings], TrainEngine], options: dict[str, Any], model: Model
) -> None:
    before, tokenizer = sys.excepthook, Path(model.path, "tokenizer.json")
    engine = kind(model, EngineSettings(options=options))
    tokenizer.rename(away := tokenizer.with_suffix(".away"))
    with pytest.raises(M2FlowError, match="tokenizer"):
        engine.start()
    assert not dist.is_initialized()
    assert sys.excepthook is before
    away.rename(tokenizer)
    with started(engine):
        assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens
    engine.stop()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_ranks_whose_start_fails_leave_no_group_and_no_thread_to_those_that_start_later(
    kind: Callable[[Model, EngineSettings], TrainEngine], options: dict[str, Any], model: Model, followers: Followers
) -> None:
    def make() -> TrainEngine:
        return Mirrored(kind, model, EngineSettings(options=options), followers)

    tokenizer = Path(model.path, "tokenizer.json")
    with started(make()):  # The first one starts torch's own threads.
        pass
    num_threads = len(os.listdir("/proc/self/task"))
    tokenizer.rename(away := tokenizer.with_suffix(".away"))
    with pytest.raises(M2FlowError, match="tokenizer"):
        make().start()
    assert not dist.is_initialized()
    assert len(os.listdir("/proc/self/task")) <= num_threads
    away.rename(tokenizer)
    with started(make()) as engine:
        assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens
    assert not dist.is_initialized()


def test_who_does_not_come_to_the_start_is_named_in_the_time_that_ranks_wait(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_WAIT", datetime.timedelta(seconds=2))
    with pytest.raises(EngineError, match="rank 1 of this trainer did not come to the start within 2 s; rank 0 of 2 did not meet"):
        FsdpTrain(model, EngineSettings(num_ranks=2, rank=0, rendezvous=f"file://{tmp_path}/meet")).start()
    assert not dist.is_initialized()


def failing_on_rank_1(error: Exception, model: Model, settings: EngineSettings) -> TrainEngine:
    engine = FsdpTrain(model, settings)
    meet = engine._ranks.open

    def meet_and_fail(leave: Callable[[], object] | None = None) -> None:
        meet(leave)
        raise error

    if settings.rank == 1:
        engine._ranks.open = meet_and_fail  # type: ignore[method-assign]
    return engine


def missing_on_rank_1(model: Model, settings: EngineSettings) -> TrainEngine:
    if settings.rank == 1:
        raise EngineError("it has no such package")
    return FsdpTrain(model, settings)


def test_an_engine_that_can_not_be_made_on_a_rank_raises_that_ranks_error_where_it_is_made(model: Model, followers: Followers) -> None:
    with pytest.raises(EngineError, match="rank 1 of this trainer can't be made: it has no such package"):
        Mirrored(missing_on_rank_1, model, EngineSettings(), followers)
    with started(Mirrored(FsdpTrain, model, EngineSettings(), followers)) as engine:
        assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens


@pytest.mark.parametrize("error", [EngineError("its disk is gone"), ValueError("its disk is gone")], ids=["ours", "another"])
def test_a_start_that_fails_on_one_rank_after_they_met_fails_on_all_with_its_error(
    error: Exception, model: Model, followers: Followers
) -> None:
    engine = Mirrored(partial(failing_on_rank_1, error), model, EngineSettings(), followers)
    with pytest.raises(EngineError, match=r"rank 1 of this trainer: .*its disk is gone"):
        engine.start()
    with started(Mirrored(FsdpTrain, model, EngineSettings(), followers)) as again:
        assert again.accumulate(samples(VOCABULARY), PPO).num_tokens


def renaming_on_rank_1(model: Model, settings: EngineSettings) -> TrainEngine:
    engine = FsdpTrain(model, settings)
    pieces = engine.weight_pieces
    if settings.rank == 1:
        engine.weight_pieces = lambda: (piece._replace(name="no tensor") for piece in pieces())  # type: ignore[method-assign]
    return engine


def test_pieces_of_weights_that_one_rank_can_not_write_are_an_error_of_all_and_the_ranks_go_on(model: Model, followers: Followers) -> None:
    with started(Mirrored(renaming_on_rank_1, model, EngineSettings(), followers)) as engine:
        assert isinstance(engine, Mirrored)
        with (
            closing(Publisher("m2flow-test-pieces", WeightOptions(changes="never"))) as publisher,
            pytest.raises(EngineError, match="rank 1 of this trainer: a piece of 'no tensor' came"),
        ):
            publisher.publish(iter(()), 1, spread=engine.spread(1 << 12))
        assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens


def test_ranks_that_did_not_meet_leave_the_hook_for_errors_as_it_was_and_meet_others_later(
    model: Model, tmp_path: Path, followers: Followers
) -> None:
    before = sys.excepthook
    with pytest.raises(EngineError, match="did not meet the others"):
        FsdpTrain(model, EngineSettings(num_ranks=2, rank=1, rendezvous=f"nowhere://{tmp_path}")).start()
    assert sys.excepthook is before
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world.group_count == 0, "else the next start hangs"
    with started(Mirrored(FsdpTrain, model, EngineSettings(), followers)) as engine:
        assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens


class DiesInAPass(ReplicatedTrain):
    def _backward(self, loss: Any) -> None:
        if self._ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        super()._backward(loss)


def test_a_follower_whose_process_ends_in_a_pass_is_named_with_how_and_where_and_the_next_engine_has_another(model: Model) -> None:
    with closing(Followers(1)) as followers:
        settings = EngineSettings(options={"collective_timeout_s": 4})
        engine = Mirrored(DiesInAPass, model, settings, followers)
        engine.start()
        with pytest.raises(InternalError, match=r"rank 1 was killed by SIGSEGV, here:\n(.*\n)*.*in _backward"):
            engine.accumulate(samples(VOCABULARY), PPO)
        with pytest.raises(InternalError, match="rank 1 was killed by SIGSEGV"):
            engine.stop()
        with started(Mirrored(ReplicatedTrain, model, settings, followers)) as engine:
            assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens


def test_the_groups_of_a_process_share_a_device_which_ends_with_the_last_trainer(model: Model) -> None:
    gc.collect()
    before = num_group_threads("gloo_tcp")  # Of an earlier test whose engine may still be referred to.
    with closing(Followers(1)) as followers:
        for _ in range(2):
            with started(Mirrored(ReplicatedTrain, model, EngineSettings(), followers)) as engine:
                with started(Mirrored(ReplicatedTrain, model, EngineSettings(), followers)):
                    assert num_group_threads("gloo_tcp") == before + 1
                assert engine.accumulate(samples(VOCABULARY), PPO).num_tokens
            assert num_group_threads("gloo_tcp") == before
