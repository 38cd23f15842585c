"""Each ingredient of random programs is worth something: a bug that only programs with it can show, and that they do show.

Older weights, late samples that are dropped or carried, `lagged`, roles of the user's own, effects outside, ops of several inputs,
critics. The bugs that programs without them see are in `test_seeded_programs`. Eager answers are of the code without the bug, given
what time decided in the planned run with it.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import pytest

from m2flow.macro.graph import Call, Effect
from m2flow.macro.session import Session
from m2flow.micro.lowering import passes, placement
from m2flow.micro.protocol import call_semantics, update_semantics
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.staleness import VersionSpan, version_spans_of
from m2flow.micro.scheduler import call_lifecycle, state, weights
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.weights import Versions
from m2flow.micro.worker import engine_host, worker
from m2flow.micro.worker.function_tasks import Arguments
from m2flow.samples import Batch, Sample
from m2flow.spec import ClusterSpec
from m2flow.testing import programs as p
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.program_calls import as_flow
from m2flow.testing.programs import Account
from m2flow.testing.random_programs import Dice, difference_of, eager_of, make_cluster, make_program, make_timed_program
from m2flow.testing.world import run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("quick")]

Patch = pytest.MonkeyPatch
Case = tuple[p.Program, ClusterSpec, int]
MOST_CASES = 7200
"""Among so many each bug must be seen: some bugs one program in a hundred shows."""


@functools.cache
def drawn(number: int, is_timed: bool) -> Case:
    """The same for every bug."""
    dice = Dice(f"{number}, {is_timed}")
    return (make_timed_program if is_timed else make_program)(dice), make_cluster(dice), dice.integer(0, 2**30)


def is_red(case: Case, bug: Callable[[Patch], None]) -> bool:
    """Whether a planned run with the bug is seen to be wrong."""
    program, spec, order_seed = case
    account = Account()
    flow = as_flow(program, account)
    with Patch.context() as patch:
        bug(patch)
        try:
            planned = run_planned(flow, {}, spec, order_seed=order_seed)
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError):
            return True
        windows, lags = account.wrong(planned), list(account.lags)
    if windows is not None:
        return True
    eager, _ = eager_of(flow, spec, planned)
    return difference_of(planned, eager) is not None or (not eager.error and lags != account.lags)


# Time as part of the meaning.


def versions_one_older_than_allowed(patch: Patch) -> None:
    """The session stamps a window that is one too wide; whoever checks later takes it from there."""
    read = Session._read

    def wider(self: Session, resource: str, staleness: int) -> Effect:
        return read(self, resource, staleness + (1 if staleness else 0))

    patch.setattr(Session, "_read", wider)


def an_engine_samples_with_what_it_holds(patch: Patch) -> None:
    """The window is right, and nobody looks at it."""
    whole = weights.window

    def wider(call: Call, role: str = "") -> tuple[int, int]:
        oldest, newest = whole(call, role)
        return max(oldest - 1, 0) if oldest < newest else oldest, newest

    patch.setattr(weights, "window", wider)
    patch.setattr(engine_host, "check_admission", lambda call, version, role="": None)
    patch.setattr(update_semantics, "check_consumption", lambda call, samples: None)


def a_version_is_noted_one_too_new(patch: Patch) -> None:
    def newer(rows: Batch) -> list[tuple[VersionSpan, ...]]:
        return [
            tuple(version_span._replace(version=version_span.version + 1) for version_span in sample) for sample in version_spans_of(rows)
        ]

    patch.setattr(worker, "version_spans_of", newer)


def a_dropped_group_counts_too(patch: Patch) -> None:
    """A generation that has enough groups gives one more, if that is whole as well."""
    wanted = call_lifecycle.num_wanted
    patch.setattr(call_lifecycle, "num_wanted", lambda options, number: min(wanted(options, number) + 1, number))


def a_late_group_takes_the_place_of_one_in_time(patch: Patch) -> None:
    """What the generation gives is said before its last groups are there."""

    def cut(self: CallLifecycle, state: CallState) -> None:
        whole(self, state)
        if state.is_done and state.result is not None:
            others = [row for row in state.ids if row not in set(state.result)]
            state.result = sorted([*state.result[: -len(others)], *others]) if others else state.result

    whole = CallLifecycle.cut
    patch.setattr(CallLifecycle, "cut", cut)


def a_carried_sample_goes_on_with_other_random_numbers(patch: Patch) -> None:
    made = call_semantics.continuations
    patch.setattr(call_semantics, "continuations", lambda call, stopped: [replace(one, seed=one.seed ^ 1) for one in made(call, stopped)])


def a_union_takes_a_late_sample_from_both_turns(patch: Patch) -> None:
    arrived = CallState.arrived

    def from_all(self: CallState, source: int, ids: Iterable[int], num_tokens: Mapping[int, int]) -> bool:
        if not self.is_union or not self.is_prepared:
            return arrived(self, source, ids, num_tokens)
        self._offer([row for row in ids if row in self.part_of])
        return bool(self.ready)

    patch.setattr(CallState, "arrived", from_all)


def lagged_looks_one_step_too_far(patch: Patch) -> None:
    recall = Session.recall
    patch.setattr(Session, "recall", lambda self, call, ago: recall(self, call, ago + 1 if ago else ago))


def lagged_takes_the_last_of_its_step(patch: Patch) -> None:
    """Of several updates at one place, the last one of the earlier step."""

    def last(self: Session, call: Call, ago: int) -> int | None:
        found = recall(self, call, ago)
        there = [number for number in range(self.next_ordinal) if number in _updates(self, call) and found is not None]
        same_step = [number for number in there if self.lineage.known(number).call.step == call.step - ago]
        return same_step[-1] if same_step and ago else found

    recall = Session.recall
    patch.setattr(Session, "recall", last)


def _updates(session: Session, like: Call) -> set[int]:
    calls = (session.lineage.known(number).call for number in range(session.next_ordinal))
    return {call.ordinal for call in calls if call.name == like.name}


# Effects of the user's own.


def a_write_takes_its_samples_as_they_come(patch: Patch) -> None:
    stage_of = passes._stage

    def unbarred(call: Call) -> Stage:
        stage = stage_of(call)
        return stage if stage.unit == "batch" else Stage(stage.call, stage.engine, stage.unit, is_barrier=False, state=stage.state)

    patch.setattr(passes, "_stage", unbarred)


def state_is_on_every_worker(patch: Patch) -> None:
    patch.setattr(placement, "_home", lambda role, hosts: hosts)


def only_weights_are_ordered(patch: Patch) -> None:
    """An effect outside of the models orders nothing."""
    written = Versions.written_for

    def weights_alone(self: Versions, call: Call) -> tuple[list[int], list[int]]:
        return written(self, replace(call, reads=tuple(effect for effect in call.reads if effect.resource.endswith(".weights"))))

    patch.setattr(Versions, "written_for", weights_alone)


# Several inputs, critics.


def an_argument_is_joined_by_place(patch: Patch) -> None:
    """What an argument is of a unit's samples is found by their place in the unit."""

    def of(self: Arguments, unit: Sample | list[Sample], get: Callable[[int], object]) -> object:
        return [get(place) for place in range(len(unit))] if isinstance(unit, list) else get(0)

    patch.setattr(Arguments, "_of", of)


def an_op_gets_the_latest_value(patch: Patch) -> None:
    def values_for(self: state.SchedulerState, state: CallState) -> dict[str, object]:
        held = [s.value for s in self.calls.values() if s.is_done and not s.call.is_aligned and isinstance(s.value, int | float)]
        whole = real(self, state)
        return dict.fromkeys(whole, held[-1]) if "arguments" in state.call.options and held else whole

    real = state.SchedulerState.values_for
    patch.setattr(state.SchedulerState, "values_for", values_for)


def a_critic_says_what_it_said_at_first(patch: Patch) -> None:
    def values(self: FakeTrain, batch: Batch) -> Batch:
        fresh = FakeTrain(self._model, self._settings)
        fresh.start()
        return real(fresh, batch)

    real = FakeTrain.values
    patch.setattr(FakeTrain, "values", values)


@dataclass(frozen=True)
class Seeded:
    bug: Callable[[Patch], None]
    ingredient: Callable[[p.Program], bool]
    is_timed: bool = False


def has(*kinds: type) -> Callable[[p.Program], bool]:
    return lambda program: any(isinstance(statement, kinds) for statement in program.statements())


def is_stale(program: p.Program) -> bool:
    return program.staleness > 0


def drops_late(program: p.Program) -> bool:
    return any(isinstance(s, p.Generate) and s.source == "take" and s.more for s in program.statements())


def carries_late(program: p.Program) -> bool:
    return program.staleness > 0 and any(
        isinstance(s, p.Generate) and s.source == "take" and s.more and s.carries and not s.is_exact for s in program.statements()
    )


SEEDED = [
    Seeded(versions_one_older_than_allowed, is_stale, is_timed=True),
    Seeded(an_engine_samples_with_what_it_holds, is_stale, is_timed=True),
    Seeded(a_version_is_noted_one_too_new, lambda program: is_stale(program) or drops_late(program), is_timed=True),
    Seeded(a_dropped_group_counts_too, drops_late, is_timed=True),
    Seeded(a_late_group_takes_the_place_of_one_in_time, drops_late, is_timed=True),
    Seeded(a_carried_sample_goes_on_with_other_random_numbers, carries_late, is_timed=True),
    Seeded(a_union_takes_a_late_sample_from_both_turns, carries_late, is_timed=True),
    Seeded(lagged_looks_one_step_too_far, has(p.Lag), is_timed=True),
    Seeded(lagged_takes_the_last_of_its_step, has(p.Lag), is_timed=True),
    Seeded(a_write_takes_its_samples_as_they_come, has(p.Ask, p.Post)),
    Seeded(state_is_on_every_worker, has(p.Ask)),
    Seeded(only_weights_are_ordered, has(p.Ask, p.Post)),
    Seeded(an_argument_is_joined_by_place, has(p.Mix, p.Ask)),
    Seeded(an_op_gets_the_latest_value, has(p.Mix)),
    Seeded(a_critic_says_what_it_said_at_first, has(p.Values, p.Actor)),
]


@pytest.mark.parametrize("seeded", SEEDED, ids=lambda seeded: seeded.bug.__name__)
def test_an_ingredient_shows_its_bug_and_programs_without_it_do_not(seeded):
    cases = (drawn(number, seeded.is_timed) for number in range(MOST_CASES))
    assert any(is_red(case, seeded.bug) for case in cases if seeded.ingredient(case[0]))
    lacking = (drawn(number, seeded.is_timed) for number in range(MOST_CASES) if not seeded.ingredient(drawn(number, seeded.is_timed)[0]))
    assert not any(is_red(case, seeded.bug) for case in itertools.islice(lacking, 8))
