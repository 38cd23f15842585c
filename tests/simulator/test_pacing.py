"""What a simulated run knows of one machine: messages take time, and engines slow each other down."""

import pytest
from cost_tables import NOTHING, PlainCosts
from simulated import Given, cluster, plain, ran

from m2flow.micro.protocol.cost_terms import DecodeCost, PassCost, TrainCost
from m2flow.simulator.machines import Paces, undisturbed

DECODING = DecodeCost(1.0, 0.25, 0.0, 1000)
TRAINING = TrainCost(NOTHING, PassCost(0.0, 0.5, 0.0), 3.0)
TWO = {"batch": 2, "n": 2}


def makespan(placement: str = "split", **costs: object) -> float:
    spec = cluster(placement, token_budget=1)
    return ran(plain, PlainCosts(DECODING, TRAINING, **costs), Given([[2, 2], [10, 10]], prompt=1), spec, options=TWO).makespans[0]  # type: ignore[arg-type]


def test_each_message_on_the_way_takes_its_time() -> None:
    alone, some, more = (makespan(messaging_s=seconds) for seconds in (0.0, 0.001, 0.002))
    num_messages = round((some - alone) / 0.001)
    assert 2 <= num_messages <= 12  # A task and its answer, from worker to worker.
    assert more - alone == pytest.approx(2 * num_messages * 0.001)


def test_decoding_goes_on_at_half_the_pace_while_the_trainer_works_beside_it() -> None:
    first_s, second_s = 2 * (1 + 4 * 0.25), 8 * (1 + 2 * 0.25)  # All four; then the two long ones.
    train_a_s, train_b_s = 2 * 3 * 0.5, 2 * 11 * 0.5
    assert makespan() == first_s + second_s + train_b_s + 3.0
    assert makespan(slower={("rollout", "train"): 2.0}) == first_s + second_s + train_a_s / 2 + train_b_s + 3.0


def test_training_takes_longer_only_while_others_generate() -> None:
    # The first group is trained on while the second still generates, and is done before that: nothing is lost by its taking longer.
    assert makespan(slower={("train", "rollout"): 2.0}) == makespan()
    # Ten times as long it would take 30 s; of that the generation covers the first 12, and what is left goes on at full pace.
    left_s = 3.0 - 12.0 / 10
    assert makespan(slower={("train", "rollout"): 10.0}) == pytest.approx(2 * 2 + 8 * 1.5 + left_s + 11.0 + 3.0)


def test_those_that_take_turns_do_not_slow_each_other_down() -> None:
    assert makespan("time-shared", slower={("rollout", "train"): 5.0, ("train", "rollout"): 5.0}) == makespan("time-shared")


def test_nobody_is_slowed_down_by_its_own_kind_or_without_factors() -> None:
    paces = Paces(lambda kind, beside: 3.0 if kind == beside else 1.5, ["a", "b"])
    assert paces.change("a", "rollout", 1)
    assert paces.of("b", "rollout") == 1.0
    assert paces.of("b", "train") == 1.5
    assert not paces.change("a", "rollout", 1)  # One more of the same changes nothing.
    free = Paces(undisturbed, ["a", "b"])
    assert not free.change("a", "train", 1)
    assert free.of("b", "rollout") == 1.0
