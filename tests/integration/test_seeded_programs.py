"""Random programs are worth something: small breakages of the runtime, each of which they must see within a few dozen cases.

Those of `test_seeded_bugs`, which known flows see too, and others in what only some programs do: rows that are decided while a run is
under way, refills, unions, whole values, errors. Eager answers are of the code without the bug.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import seeded_bugs

from m2flow.engines.contract import Request
from m2flow.errors import M2FlowError
from m2flow.macro import datasets
from m2flow.macro.graph import Call
from m2flow.macro.refill import Refill, RefillEnd
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.scheduler import state
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle
from m2flow.micro.scheduler.call_state import CallState, UpdateProgress
from m2flow.micro.scheduler.weights import Versions
from m2flow.samples import Batch, group_key, prompt_positions
from m2flow.spec import ClusterSpec
from m2flow.testing.program_calls import as_flow
from m2flow.testing.programs import Answer, Program
from m2flow.testing.random_programs import Dice, difference_of, make_cluster, make_program
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("quick")]

Patch = pytest.MonkeyPatch
MOST_CASES = 7200
"""Among so many each bug must be seen: some bugs one program in a hundred shows."""


Case = tuple[Program, ClusterSpec, int, bool]


@functools.cache
def drawn(number: int, fails: bool) -> Case | None:
    """The same for every bug; programs that make next to nothing are left out."""
    dice = Dice(f"{number}, {fails}")
    program = make_program(dice, fails=fails)
    return (
        (program, make_cluster(dice), dice.integer(0, 2**30), dice.choice((False, True))) if len(list(program.statements())) > 4 else None
    )


@functools.cache
def eager_answer(number: int, fails: bool) -> Answer:
    case = drawn(number, fails)
    assert case is not None
    return run_eager(as_flow(case[0]), {}, case[1])


def is_red(bug: Callable[[Patch], None], number: int, fails: bool) -> bool:
    """Whether the planned run of a case, with the bug, does not give the eager answer of the code without it."""
    case = drawn(number, fails)
    if case is None:
        return False
    program, spec, order_seed, by_identity = case
    eager = eager_answer(number, fails)
    with Patch.context() as patch:
        bug(patch)
        try:
            planned = run_planned(as_flow(program), {}, spec, order_seed=order_seed, deterministic=by_identity)
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError):
            return True
    return difference_of(planned, eager) is not None


# Rows that are decided while a run is under way.


def rows_from_outside_count(patch: Patch) -> None:
    """A row that a call does not work on counts for its first unit."""
    whole = CallState.arrived

    def arrived(self: CallState, ids: list[int], num_tokens: Mapping[int, int]) -> bool:
        known = [row if row in self._unit_by_row else next(iter(self._unit_by_row)) for row in ids] if self._unit_by_row else ids
        return whole(self, known, num_tokens)

    patch.setattr(CallState, "arrived", arrived)


def a_filter_is_thought_to_keep_all(patch: Patch) -> None:
    patch.setattr(Call, "drops", property(lambda self: False))


def minibatches_after_a_filter_go_backwards(patch: Patch) -> None:
    """Membership of mini-batches goes by an order that is not that of identity, where a filter decides what there is."""
    init = UpdateProgress.__init__
    patch.setattr(UpdateProgress, "__init__", lambda self, groups, **kw: init(self, list(reversed(groups)), **kw))


def minibatches_of_ops_by_another_order(patch: Patch) -> None:
    def every_second(self: CallState, ids: list[int]) -> dict[int, int]:
        return {key: place % 2 for place, key in enumerate(sorted({group_key(row) for row in ids}))}

    patch.setattr(CallState, "_minibatches", every_second)


def a_filters_rows_are_known_too_early(patch: Patch) -> None:
    """What has been kept when half is judged is taken for all."""
    done = CallLifecycle.rows_done

    def early(self: CallLifecycle, state: CallState, *rest: object, **more: object) -> int:
        count = done(self, state, *rest, **more)  # type: ignore[arg-type]
        if state.call.drops and state.refill is None and not state.is_over and 2 * len(state.done | state.dropped) >= len(state.ids):
            self.complete(state, None)
        return count

    patch.setattr(CallLifecycle, "rows_done", early)


# Refills.


def a_refill_keeps_what_came_first(patch: Patch) -> None:
    def end(self: Refill) -> RefillEnd | None:
        kept = [position for position, verdict in self._verdicts.items() if verdict is True][: self._count]
        if len(kept) == self._count:
            return RefillEnd(max(self._verdicts), frozenset(kept))
        return ended(self)

    ended = Refill.end
    patch.setattr(Refill, "end", end)


def a_refill_gives_too_little_back(patch: Patch) -> None:
    def num_used(rows: Batch, values: Mapping[str, object]) -> int:
        return int(prompt_positions(rows.ids).max()) + 2

    patch.setattr(datasets, "_num_used", num_used)


def an_error_beyond_the_end_of_a_refill_counts(patch: Patch) -> None:
    ended = Refill.end

    def end(self: Refill) -> RefillEnd | None:
        error = next((verdict for verdict in self._verdicts.values() if isinstance(verdict, M2FlowError)), None)
        return RefillEnd(max(self._verdicts), frozenset(), error=error) if error is not None else ended(self)

    patch.setattr(Refill, "end", end)


def a_refill_gives_what_it_rejected(patch: Patch) -> None:
    ended = Refill.end

    def end(self: Refill) -> RefillEnd | None:
        found = ended(self)
        return replace(found, kept=frozenset(range(found.last + 1))) if found is not None and not found.is_dry else found

    patch.setattr(Refill, "end", end)


# Inputs of several kinds.


def the_whole_value_of_another_call(patch: Patch) -> None:
    """Of all values that are there, the latest."""

    def values_for(self: state.SchedulerState, state: CallState) -> dict[str, object]:
        held = [s.value for s in self.calls.values() if s.is_done and not s.call.is_aligned and isinstance(s.value, int | float)]
        names = [name for name, ref in state.call.inputs if ref.call not in state.aligned_inputs]
        return dict.fromkeys(names, held[-1])

    patch.setattr(state.SchedulerState, "values_for", values_for)


def a_union_has_its_first_part_twice(patch: Patch) -> None:
    """The parts are told apart by their place alone."""
    joined = call_semantics.function_input

    def twice(call: Call, inputs: Mapping[str, Batch]) -> Batch:
        rows = joined(call, inputs)
        if call_semantics.gives(call) != "concat" or len(rows) < 2:
            return rows
        return Batch(rows.ids, rows.take([0, *range(len(rows) - 1)]).columns)

    patch.setattr(call_semantics, "function_input", twice)


def numbers_of_a_filtered_call_are_joined_by_place(patch: Patch) -> None:
    """What has more rows than the base is cut to its length."""
    patch.setattr(Batch, "select", lambda self, ids: Batch(ids, self.in_order().take(range(len(ids))).columns))


def seeds_go_by_the_call(patch: Patch) -> None:
    whole = call_semantics.requests

    def keyed(call: Call, ids: list[int], prompts: Batch, run_seed: int) -> list[Request]:
        return [replace(request, seed=request.id ^ run_seed) for request in whole(call, ids, prompts, run_seed)]

    patch.setattr(call_semantics, "requests", keyed)


def a_second_answer_is_the_first(patch: Patch) -> None:
    """How often the prompts were answered before does not count."""
    seed = call_semantics.sample_seed
    patch.setattr(call_semantics, "sample_seed", lambda run, role, repeat, *rest: seed(run, role, 0, *rest))


# Effects, memory, errors.


def log_probabilities_of_later_weights(patch: Patch) -> None:
    """An update does not wait for those who read what it replaces."""
    patch.setattr(Versions, "reads_before", lambda self, call: iter(()))


def a_call_is_forgotten_while_it_is_needed(patch: Patch) -> None:
    release = CallLifecycle.release

    def at_once(self: CallLifecycle, ordinal: int) -> None:
        release(self, ordinal)
        for place in self._state.rows._places.get(ordinal, {}):
            self._state.send(place, m.Forget(ordinal))

    patch.setattr(CallLifecycle, "release", at_once)


def the_first_error_to_come_counts(patch: Patch) -> None:
    def failed_at(self: CallState, row: int, error: M2FlowError, passed: object) -> None:
        self.failure = self.failure or (row, error)

    patch.setattr(CallState, "failed_at", failed_at)
    patch.setattr(CallState, "has_settled", property(lambda self: self.failure is not None))


def an_error_stays_with_its_call(patch: Patch) -> None:
    """What depends on it waits for ever."""
    fail = CallLifecycle.fail

    def alone(self: CallLifecycle, state: CallState, error: M2FlowError, *, root: int | None = None) -> None:
        if root in (None, state.call.ordinal):
            fail(self, state, error, root=root)

    patch.setattr(CallLifecycle, "fail", alone)


BUGS = [
    rows_from_outside_count,
    a_filter_is_thought_to_keep_all,
    minibatches_after_a_filter_go_backwards,
    minibatches_of_ops_by_another_order,
    a_filters_rows_are_known_too_early,
    a_refill_keeps_what_came_first,
    a_refill_gives_too_little_back,
    an_error_beyond_the_end_of_a_refill_counts,
    a_refill_gives_what_it_rejected,
    the_whole_value_of_another_call,
    a_union_has_its_first_part_twice,
    numbers_of_a_filtered_call_are_joined_by_place,
    seeds_go_by_the_call,
    a_second_answer_is_the_first,
    log_probabilities_of_later_weights,
    a_call_is_forgotten_while_it_is_needed,
    the_first_error_to_come_counts,
    an_error_stays_with_its_call,
]


ON_ERRORS = [an_error_beyond_the_end_of_a_refill_counts, the_first_error_to_come_counts, an_error_stays_with_its_call]
"""Bugs that only programs whose functions raise can show."""


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_bug_every_case_is_green(fails):
    assert not any(is_red(lambda patch: None, number, fails) for number in range(60))  # `test_random_programs` draws more.


@pytest.mark.parametrize("bug", [*BUGS, *seeded_bugs.BUGS], ids=lambda bug: bug.__name__)
def test_random_programs_see(bug):
    fails = bug in ON_ERRORS
    assert any(is_red(bug, number, fails) for number in range(MOST_CASES))
