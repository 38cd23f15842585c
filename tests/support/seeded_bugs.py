"""Bugs that break the promise of the same answer, each planted by a patch of m2flow: the tests must find every one."""

from __future__ import annotations

import itertools

import pytest

from m2flow.micro.protocol import call_semantics, update_semantics, worker_state
from m2flow.micro.protocol.worker_state import RowStore
from m2flow.micro.scheduler import call_lifecycle, call_state, state, weights
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle
from m2flow.micro.scheduler.call_state import CallState, MicroBatch, MinibatchEnd, UpdateProgress
from m2flow.micro.scheduler.dispatch import FunctionDispatch
from m2flow.micro.scheduler.ready_queues import Offer
from m2flow.micro.scheduler.weights import WeightSyncDispatch
from m2flow.micro.worker import engine_host
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.micro.worker.worker import Worker
from m2flow.samples import Batch

Patch = pytest.MonkeyPatch


def advantages_on_parts_of_groups(patch: Patch) -> None:
    """Every sample is a group of its own."""
    patch.setattr(call_lifecycle, "by_group", lambda ids: {row: [row] for row in ids})
    patch.setattr(call_state, "group_key", lambda row: row)


def a_chunk_cuts_a_group(patch: Patch) -> None:
    patch.setattr(FunctionDispatch, "_num_next", lambda self, worker, state: min(len(state.ready), state.stage.chunk))


def an_op_on_groups_runs_on_samples(patch: Patch) -> None:
    whole = CallState._unit_of
    patch.setattr(CallState, "_unit_of", lambda self, row: row if self.stage.unit == "group" else whole(self, row))
    patch.setattr(FunctionDispatch, "_num_next", lambda self, worker, state: min(len(state.ready), state.stage.chunk))


def minibatches_by_arrival(patch: Patch) -> None:
    """The groups that come first are the first mini-batch."""
    add = UpdateProgress.add

    def arrived(self: UpdateProgress, key: int, num_tokens: int) -> None:
        add(self, key, num_tokens)
        every = [group for part in self._minibatches for group in part]
        if len(self._tokens) < len(every) or self._epoch or self._minibatch or len(self._todo) < len(self._minibatches[0]):
            return
        size, come = len(self._minibatches[0]), list(self._tokens)
        every.sort(key=lambda group: come.index(group.key))
        self._lay_out([every[i : i + size] for i in range(0, len(every), size)])

    patch.setattr(UpdateProgress, "add", arrived)


def rewards_joined_by_position(patch: Patch) -> None:
    """Rows come as they were put, and rewards are taken as they come."""

    def get(self: RowStore, call: int, ids: list[int]) -> Batch:
        whole, wanted = Batch.concat(self._parts[call]), set(ids)
        return whole.take([row for row, packed in enumerate(whole.ids.tolist()) if packed in wanted])

    join = update_semantics.training_rows

    def joined(call: object, inputs: dict[str, Batch]) -> Batch:
        ids = inputs["samples"].in_order().ids
        return join(call, {name: rows if name == "samples" else Batch(ids, rows.columns) for name, rows in inputs.items()})

    patch.setattr(RowStore, "get", get)
    patch.setattr(update_semantics, "training_rows", joined)


def seeds_by_arrival(patch: Patch) -> None:
    counter = itertools.count(1)
    patch.setattr(call_semantics, "sample_seed", lambda *_: next(counter))


def an_epoch_is_left_out(patch: Patch) -> None:
    init = UpdateProgress.__init__
    patch.setattr(UpdateProgress, "__init__", lambda self, groups, **kw: init(self, groups, **(kw | {"epochs": 1})))


def an_optimiser_step_before_the_last_group(patch: Patch) -> None:
    following = UpdateProgress.next

    def early(self: UpdateProgress, *, is_idle: bool) -> MicroBatch | MinibatchEnd | None:
        if len(self._todo) == 1 and len(self._minibatches[self._minibatch]) > 1:
            self._todo = []
        return following(self, is_idle=is_idle)

    patch.setattr(UpdateProgress, "next", early)


def a_denominator_of_the_last_micro_batch(patch: Patch) -> None:
    whole = update_semantics.UpdateTally.denominator

    def last(self: update_semantics.UpdateTally, loss: object) -> float:
        self._minibatch = self._minibatch[-1:]
        return whole(self, loss)

    patch.setattr(update_semantics.UpdateTally, "denominator", last)


def a_micro_batch_is_trained_on_twice(patch: Patch) -> None:
    accumulate = EngineHost.accumulate
    seen = itertools.count(1)

    def twice(self: EngineHost, call: object, rows: Batch, *, epoch: int) -> None:
        accumulate(self, call, rows, epoch=epoch)
        if next(seen) % 3 == 0:
            accumulate(self, call, rows, epoch=epoch)

    patch.setattr(EngineHost, "accumulate", twice)


def a_sample_that_comes_twice_counts_twice(patch: Patch) -> None:
    """Each report is told twice, and the state does not know its rows."""
    deliver = Worker._deliver

    def twice(self: Worker, task: int, call: object, rows: Batch, *rest: object, **how: object) -> None:
        deliver(self, task, call, rows, *rest, **how)
        deliver(self, task, call, rows, *rest, **how)

    patch.setattr(Worker, "_deliver", twice)
    patch.setattr(state, "set", lambda *_: _Empty(), raising=False)
    patch.setattr(CallState, "done", property(lambda self: _Empty(), lambda self, value: None), raising=False)


class _Empty(set[int]):
    """A set that never has what was put into it, though it counts it."""

    def __contains__(self, item: object) -> bool:
        return False


def a_group_is_lost(patch: Patch) -> None:
    init = UpdateProgress.__init__
    patch.setattr(UpdateProgress, "__init__", lambda self, groups, **kw: init(self, groups[:-1] or groups, **kw))


def a_sync_brings_no_weights(patch: Patch) -> None:
    def only_the_number(self: EngineHost, role: str, version: int, manifest: object) -> None:
        self._rollout[role]._version = version

    patch.setattr(EngineHost, "load_weights", only_the_number)


def a_sync_before_the_engine_is_drained(patch: Patch) -> None:
    offer = WeightSyncDispatch.load_offer

    def at_once(self: WeightSyncDispatch, worker: worker_state.WorkerState, role: str, first: CallState) -> Offer | None:
        if "LoadWeights" in worker.doing:
            return None
        num_tasks, worker.num_tasks["rollout"] = worker.num_tasks["rollout"], 0
        found = offer(self, worker, role, first)
        worker.num_tasks["rollout"] = num_tasks
        return found

    patch.setattr(WeightSyncDispatch, "load_offer", at_once)


def stale_weights_are_good_enough(patch: Patch) -> None:
    patch.setattr(weights, "window", lambda call, role="": (max(call.reads[0].version - 1, 0), call.reads[0].version))
    patch.setattr(engine_host, "check_admission", lambda call, version, role="": None)
    patch.setattr(update_semantics, "check_consumption", lambda call, samples: None)


def a_call_does_not_wait_for_what_it_reads(patch: Patch) -> None:
    add = CallLifecycle.add_call

    def at_once(self: CallLifecycle, call: object, stage: object) -> CallState:
        state = add(self, call, stage)
        if state.call.engine != "function":
            state.waits_for.clear()
            self._state.versions._trained.update((state.call.role, effect.version) for effect in state.call.writes)
            self._start_if_ready(state)
        return state

    patch.setattr(CallLifecycle, "add_call", at_once)


def a_lease_moves_while_its_owner_works(patch: Patch) -> None:
    patch.setattr(worker_state.Lease, "is_idle", property(lambda self: True))


BUGS = [
    advantages_on_parts_of_groups,
    a_chunk_cuts_a_group,
    an_op_on_groups_runs_on_samples,
    minibatches_by_arrival,
    rewards_joined_by_position,
    seeds_by_arrival,
    an_epoch_is_left_out,
    an_optimiser_step_before_the_last_group,
    a_denominator_of_the_last_micro_batch,
    a_micro_batch_is_trained_on_twice,
    a_sample_that_comes_twice_counts_twice,
    a_group_is_lost,
    a_sync_brings_no_weights,
    a_sync_before_the_engine_is_drained,
    stale_weights_are_good_enough,
    a_call_does_not_wait_for_what_it_reads,
    a_lease_moves_while_its_owner_works,
]
