"""A lease that several workers share: it moves as a whole, first those that offload, and changes no answer."""

from collections.abc import Callable

import msgspec
import pytest
from fake_flows import duet, everything, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol import worker_state
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.worker_state import Lease
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KIND_OF = {"rollout": (m.Generate, m.LoadWeights), "train": (m.RunFunction, m.Accumulate, m.Apply, m.CopyWeights, m.PublishWeights)}


def placements(*leases_of_rollout: str, train: str = "a") -> Callable[[Plan], Plan]:
    """The workers of a split plan under leases: one for each rollout worker, and one for the trainer; empty is none."""

    def placed(plan: Plan) -> Plan:
        names = {f"rollout-{i}": lease for i, lease in enumerate(leases_of_rollout)} | {"train-0": train}
        return msgspec.structs.replace(
            plan, workers=tuple(msgspec.structs.replace(w, lease=names.get(w.name, "")) for w in plan.workers)
        ).verify()

    return placed


def split(num_rollout: int, max_running: int = 3, token_budget: int = 30) -> ClusterSpec:
    return ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=num_rollout, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=token_budget),
        functions=FunctionSpec(workers=1, chunk=4),
    )


SHARINGS = {
    "two instances and the trainer": placements("a", "a"),
    "three instances and the trainer": placements("a", "a", "a"),
    "one instance has devices of its own": placements("a", "", "a"),
    "all instances have": placements("", "", train=""),
    "a second set of devices has no trainer": placements("a", "b"),
}


class LeaseRig(Rig):
    """Holds every task against the turns of the whole lease, and not of one worker."""

    def __init__(self, cluster: ClusterSpec, seed: int, placed: Callable[[Plan], Plan]) -> None:
        super().__init__(cluster, seed, placed=placed)
        self.lease_of = {w.name: w.lease for w in self.plan.workers if w.lease}
        self.kinds = {w.name: {slot.kind for slot in w.engines} for w in self.plan.workers}
        self.resident = {name: {"rollout"} & self.kinds[name] for name in self.lease_of}
        """Kinds of engines that are on the device now, by worker."""
        self.num_moves = 0

    def check_lease(self, worker: str, task: m.Task) -> None:
        sharing = [name for name, lease in self.lease_of.items() if lease == self.lease_of[worker]]
        if isinstance(task, m.Switch):
            assert not any(self.generating[name] for name in sharing), "a lease moves under running samples"
            assert not [t for name in sharing for t in self.queues[name] if not isinstance(t, m.Switch)]
            if self.kinds[worker] & {task.to}:
                assert not any(self.resident[name] - {task.to} for name in sharing if name != worker), "two kinds on one device"
            return
        if len(sharing) > 1:
            assert not any(isinstance(t, m.Switch) for name in sharing for t in self.queues[name]), "work in the middle of a switch"
            self.check_turn(worker, task)
        else:
            assert self.kind_of(task) == self.next_owner(worker)

    def kind_of(self, task: m.Task) -> str:
        return next(kind for kind, tasks in KIND_OF.items() if isinstance(task, tasks))

    def check_turn(self, worker: str, task: m.Task) -> None:
        if not isinstance(task, m.Switch):
            is_here = self.kind_of(task) in self.resident[worker]
            assert is_here, f"{type(task).__name__} on {worker}, whose engine is not on the device"

    def do(self, name: str, task: m.Task) -> None:
        if isinstance(task, m.Switch):
            self.resident[name] = {task.to} & self.kinds[name]
            self.num_moves += 1
        super().do(name, task)


@few
@given(st.sampled_from(list(SHARINGS)), st.integers(0, 2**30), st.sampled_from([1, 3, 64]), st.sampled_from([1, 30, 4096]))
def test_engines_work_only_while_their_kind_has_the_devices_in_every_order(sharing, seed, max_running, token_budget):
    placed = SHARINGS[sharing]
    rig = LeaseRig(split(3, max_running, token_budget), seed, placed)
    rig.run()
    assert rig.scheduler.is_idle, rig.scheduler.waiting()
    assert rig.resolved == set(rig.calls)
    assert bool(rig.num_moves) == ("trainer" in sharing or "own" in sharing)


def test_one_lease_of_one_worker_with_both_kinds_moves_in_one_turn():
    lease = Lease("a")
    lease.join("device-0", ("rollout", "train"))
    assert lease.move("train") == ("device-0",)
    assert (lease.owner, lease.is_moving, lease.is_switching("device-0")) == ("train", False, True)
    assert lease.switched("device-0") == ()
    assert (lease.owner, lease.is_moving, lease.is_switching("device-0")) == ("train", False, False)


def test_those_that_leave_have_left_before_anything_comes():
    lease = Lease("a")
    for name, turns in (("rollout-0", ["rollout"]), ("both", ["rollout", "train"]), ("rollout-1", ["rollout"]), ("train-0", ["train"])):
        lease.join(name, turns)
    assert lease.move("train") == ("rollout-0", "rollout-1")
    assert lease.switched("rollout-1") == ()
    assert lease.switched("rollout-0") == ("both", "train-0")
    assert lease.switched("both") == ()
    assert lease.is_moving
    assert lease.switched("train-0") == ()
    assert (lease.owner, lease.next_turns) == ("train", ["rollout"])
    assert lease.move("rollout") == ("train-0",)
    assert lease.switched("train-0") == ("rollout-0", "both", "rollout-1")


@pytest.mark.parametrize("sharing", list(SHARINGS))
@pytest.mark.parametrize("flow", [plain, everything, duet], ids=lambda flow: flow.name)
def test_workers_that_share_a_lease_give_the_eager_answer(flow, sharing):
    spec = split(3)
    assert run_planned(flow, {}, spec, order_seed=5, placed=SHARINGS[sharing]) == run_eager(flow, {}, spec)


# Seeded bugs.


def moves_while_others_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "is_idle", property(lambda self: True))


def all_switch_at_once(patch: pytest.MonkeyPatch) -> None:
    move = Lease.move

    def at_once(self: Lease, to: str) -> tuple[str, ...]:
        told = (*move(self, to), *self._switching_next)
        self._switching, self._switching_next = set(told), ()
        return told

    patch.setattr(worker_state.Lease, "move", at_once)


def has_moved_at_the_first_answer(patch: pytest.MonkeyPatch) -> None:
    answered = Lease.switched

    def first(self: Lease, worker: str) -> object:
        self._switching.clear()
        return answered(self, worker)

    patch.setattr(worker_state.Lease, "switched", first)


@pytest.mark.parametrize("bug", [moves_while_others_work, all_switch_at_once, has_moved_at_the_first_answer])
def test_a_lease_that_moves_wrongly_is_seen(bug, monkeypatch):
    bug(monkeypatch)

    def run_some() -> None:
        for seed in range(20):
            LeaseRig(split(3), seed, SHARINGS["three instances and the trainer"]).run()

    with pytest.raises(AssertionError):
        run_some()
