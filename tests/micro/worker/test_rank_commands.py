"""What rank 0 and the other ranks of a trainer say to each other; here the other rank is a thread of this process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.channels.weights import Manifest, Publisher, SharedWeightsReader, WeightOptions
from m2flow.engines.contract import EngineSettings, Objective, TrainEngine, WeightForm, WeightPiece
from m2flow.errors import EngineError, M2FlowError, OpError
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker import rank_group as gangs
from m2flow.micro.worker.rank_group import Here, RankGroup, RankGroupSettings, RankGroupTrain, say
from m2flow.micro.worker.worker_process import Rank
from m2flow.recipe import AdamW, Loss, Model
from m2flow.samples import Batch
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.train_suite import samples

LOSS = Loss("mine", lambda logprobs: -logprobs, ("logprobs",))
MODEL = Model("fake")
PATIENCE_S = 240.0


class Watched(FakeTrain):
    """Remembers what it was asked, and fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__(MODEL, EngineSettings())
        self.asked: list[str] = []
        self.fails_at = fails_at

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails_at:
            raise OpError(f"{what} failed", now="Mend it.")

    def start(self) -> None:
        self._note("start")
        super().start()

    def accumulate(self, batch: Batch, objective: Objective) -> Any:
        self._note(f"accumulate {batch.ids.tolist()}, {objective.loss.name}")
        return super().accumulate(batch, objective)

    def apply(self, optimizer: AdamW, denominator: float) -> Any:
        self._note(f"apply {optimizer.lr} {denominator}")
        return super().apply(optimizer, denominator)

    def weights(self) -> Iterator[tuple[str, Any]]:
        for part in ("a", "b", "c"):
            self._note(f"weight {part}")
            yield part, np.zeros(1)

    def save(self, path: str) -> None:
        self._note(f"save {path}")


class Ranks:
    """Two ranks: `train` calls both engines."""

    def __init__(self, own: TrainEngine, other: TrainEngine, rank_group: RankGroup) -> None:
        self.own, self.other, self.rank_group = own, other, rank_group
        self.train = RankGroupTrain("policy", own, rank_group)
        self.unheard: list[M2FlowError] = []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is slow to answer is not taken for one that does not come."""
    for module in ("rank_group", "worker_process"):
        monkeypatch.setattr(f"m2flow.micro.worker.{module}.GRACE_S", PATIENCE_S)


@contextmanager
def two_ranks(folder: Path, own: TrainEngine, other: TrainEngine) -> Iterator[Ranks]:
    rank_group = RankGroup(RankGroupSettings(0, 2, str(folder / "meeting")), "secret")
    found = Ranks(own, other, rank_group)

    def follow() -> None:
        link = None
        while link is None:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                link = Client(str(folder / "meeting"), "AF_UNIX", authkey=b"secret")
        say(link, Here(1))
        rank = Rank({"policy": other}, link)
        rank.serve(found.unheard.append)
        link.close()

    thread = threading.Thread(target=follow)
    thread.start()
    rank_group.open()
    try:
        yield found
    finally:
        rank_group.close()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Halves(Watched):
    """Has one half of the rows of a matrix."""

    def __init__(self, half: int, fails_at: str = "") -> None:
        super().__init__(fails_at)
        self.half = half

    def weight_forms(self) -> list[WeightForm]:
        return [WeightForm("a", "float32", (4096, 8))]

    def weight_pieces(self) -> Iterator[WeightPiece]:
        self._note("pieces")
        yield WeightPiece("a", (2048 * self.half, 0), torch.full((2048, 8), float(self.half)))


def test_each_rank_writes_what_it_holds_of_a_version_and_none_is_gathered(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Halves(0), Halves(1)) as ranks, published(ranks.train) as publish:
        for version in range(2):
            publisher, manifest = publish(version)
            assert publisher.last.written == (2048 * 8 * 4, 2048 * 8 * 4)
            with closing(SharedWeightsReader()) as reader:
                ((name, held),) = reader.read(manifest)
            assert name == "a"
            assert held.tolist() == [[0.0] * 8] * 2048 + [[1.0] * 8] * 2048
        assert (ranks.own.asked, ranks.other.asked) == (["pieces"] * 2, ["pieces"] * 2)


def test_a_rank_that_can_t_write_its_pieces_is_named(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Halves(0), Halves(1, fails_at="pieces")) as ranks, published(ranks.train) as publish:
        with pytest.raises(OpError, match="rank 1 of this trainer: pieces failed"):
            publish(0)
        assert ranks.rank_group.is_broken


@contextmanager
def published(train: RankGroupTrain) -> Iterator[Callable[[int], tuple[Publisher, Manifest]]]:
    """Publishes a trainer's weights, as its ranks hold them."""
    publisher = Publisher(f"m2flow-test-{secrets.token_hex(4)}", WeightOptions())
    with closing(publisher):
        yield lambda version: (publisher, publisher.publish(train.weights(), version, spread=train.spread(1 << 16)))


def test_all_ranks_are_asked_the_same_in_the_same_order_with_the_same_rows(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched(), Watched()) as ranks:
        ranks.train.start()
        batch = samples(14)
        for rows in (batch.take(np.arange(4)), batch.take(np.arange(4, 8))):
            ranks.train.accumulate(rows, Objective(LOSS))
        ranks.train.apply(AdamW(0.5), 3.0)
        ranks.train.save("there")
        list(ranks.train.weights())
    assert isinstance(ranks.own, Watched)
    assert isinstance(ranks.other, Watched)
    assert ranks.own.asked == ranks.other.asked
    assert [what.split()[0] for what in ranks.own.asked] == ["start", "accumulate", "accumulate", "apply", "save", *["weight"] * 3]
    np.testing.assert_array_equal(ranks.own._weights, ranks.other._weights)


def test_who_stops_in_the_middle_of_the_weights_leaves_no_rank_behind(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched(), Watched()) as ranks:
        ranks.train.start()
        passing = ranks.train.weights()
        assert next(passing)[0] == "a"
        passing.close()
        ranks.train.save("there")
    assert ranks.own.asked == ranks.other.asked == ["start", "weight a", "weight b", "weight c", "save there"]


def test_an_error_of_every_rank_is_the_call_s_and_the_ranks_go_on(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched("save here"), Watched("save here")) as ranks:
        ranks.train.start()
        with pytest.raises(OpError, match=r"^save here failed"):
            ranks.train.save("here")
        ranks.train.save("there")
        assert not ranks.unheard
    assert ranks.own.asked == ranks.other.asked


def test_an_error_of_another_rank_alone_is_the_call_s_with_its_number_and_the_trainer_is_of_no_use_any_more(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched(), Watched("save here")) as ranks:
        ranks.train.start()
        with pytest.raises(OpError, match="rank 1 of this trainer: save here failed") as caught:
            ranks.train.save("here")
        assert caught.value.now == "Mend it."
        with pytest.raises(EngineError, match="any more: rank 1: save here failed"):
            ranks.train.save("there")
        ranks.train.stop()
    assert ranks.other.asked == ["start", "save here"]


def test_an_error_of_the_first_rank_alone_is_the_call_s_and_the_trainer_is_of_no_use_any_more(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched("save here"), Watched()) as ranks:
        ranks.train.start()
        with pytest.raises(OpError, match=r"^save here failed"):
            ranks.train.save("here")
        with pytest.raises(EngineError, match="any more: rank 0: save here failed"):
            ranks.train.save("there")


def test_an_error_that_rank_0_does_not_come_to_hear_is_told_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Watched):
        """In a collective that the other does not come to."""

        def save(self, path: str) -> None:
            while not ranks.unheard:
                pass

    monkeypatch.setattr("m2flow.micro.worker.worker_process.GRACE_S", 0.01)
    with two_ranks(tmp_path, Waits(), Watched("save here")) as ranks:
        ranks.train.start()
        with pytest.raises(OpError, match="rank 1 of this trainer: save here failed"):
            ranks.train.save("here")
    assert [error.what for error in ranks.unheard] == ["save here failed"]


def test_a_fault_that_nobody_raises_on_purpose_comes_with_its_traceback(tmp_path: Path) -> None:
    class Faulty(Watched):
        def save(self, path: str) -> None:
            raise ZeroDivisionError

    with two_ranks(tmp_path, Watched(), Faulty()) as ranks:
        ranks.train.start()
        with pytest.raises(
            EngineError, match=r"rank 1 of this trainer: save: the engine 'fake' in Faulty.save .* raised ZeroDivision"
        ) as caught:
            ranks.train.save("here")
    assert "test_rank_commands.py" in caught.value.remote


def test_who_does_not_know_the_secret_is_no_rank(tmp_path: Path) -> None:
    with two_ranks(tmp_path, Watched(), Watched()) as ranks:
        ranks.train.start()
    rank_group = RankGroup(RankGroupSettings(0, 2, str(tmp_path / "another")), "secret")
    thread = threading.Thread(target=rank_group.open, daemon=True)
    thread.start()
    refused = 0
    while not refused:
        try:
            Client(str(tmp_path / "another"), "AF_UNIX", authkey=b"guess")
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        except Exception:
            refused += 1
    link = Client(str(tmp_path / "another"), "AF_UNIX", authkey=b"secret")
    say(link, Here(1))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    rank_group.close()
    assert isinstance(gangs.heard(link), gangs.End)
    link.close()


def test_one_rank_has_no_rank_group() -> None:
    rank_group = RankGroup(RankGroupSettings(), "secret")
    rank_group.open()
    assert isinstance(rank_group.make_train(EngineSlot("policy", "train", "fake"), MODEL, EngineSettings()), FakeTrain)
