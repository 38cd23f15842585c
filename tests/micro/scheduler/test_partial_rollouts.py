"""`late="carry"`: what is late in one turn of a line goes on in the next, and eager, given the run's record, does the same.

Real scheduler, real workers, fake engines in exact integers; the interleaving is drawn by a seed.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Flow, Policy, Reward, Sample, flow, log, nll, steps
from m2flow.engines.contract import Request
from m2flow.errors import InternalError, OptionError, TraceError
from m2flow.macro.handles import Metrics
from m2flow.macro.oversampling import num_late
from m2flow.macro.replay import MemoryRecord, Recorder, ReplayBackend
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol.events import Command, Expired
from m2flow.micro.records.ledger import read_decisions, read_left_out
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.scheduler import partial_rollouts
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.partial_rollouts import PartialRollouts, chosen
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.runner.run import Run
from m2flow.samples import SampleId, by_group, group_key
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing import world
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]
Options = dict[str, int | float | str]


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def observe(metrics: Metrics, look: int) -> None:
    """Look at an update: not at all, at once, or at the one before."""
    if look == 1:
        float(metrics["loss"])
    elif look == 2:
        metrics.lagged(1)


def one_line(
    lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, over: float = 1.5, look: int = 0, times: int = 1, kv: str = "recompute"
) -> None:
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=40, oversample=over, late="carry", kv=kv)
        rewards = verifier.score(responses)
        for _ in range(times):
            metrics = policy.update(responses, rewards)
        log(tokens=metrics["num_tokens"], reward=rewards.mean())
        observe(metrics, look)


def everything(
    lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, over: float = 1.5, look: int = 0, times: int = 1, kv: str = "recompute"
) -> None:
    """A warm start, two roles on one line, a line with several turns in a step, options and numbers of prompts that change, mini-batches
    and epochs, evaluations, what others make of carried samples."""
    policy, other, verifier = Policy("fake"), Policy("fake", name="other"), Reward(digit_share)
    prompts, heldout, demos = Dataset(ROWS), Dataset(ROWS[:5], name="heldout"), Dataset(ROWS, name="demos", shuffle=False)
    policy.update(demos.all(), loss=nll(), minibatch_size=5)
    for step in steps(num_steps):
        asked = prompts.take(batch).filter(lambda row: "7" not in str(row.prompt)) if step % 2 else prompts.take(batch)
        for model in (policy, other):
            responses = model.generate(
                asked, n=n, max_new_tokens=20 + 5 * step, temperature=0.5 + step, oversample=over, late="carry", kv=kv
            )
            metrics = model.update(responses, verifier.score(responses), minibatch_size=2, epochs=2)
        for _ in range(times):
            more = policy.generate(heldout.take(3), n=2, max_new_tokens=30, oversample=1.4, late="carry")
            log(later=verifier.score(policy.generate(more, max_new_tokens=4)).mean())
        metrics = policy.update(more, verifier.score(more))
        log(exact=verifier.score(policy.generate(heldout.all(), max_new_tokens=12, staleness=0)).mean())
        observe(metrics, look)


LINE, EVERYTHING = (flow(staleness="lag")(program) for program in (one_line, everything))
sizes = st.fixed_dictionaries(
    {
        "lag": st.integers(1, 3),
        "num_steps": st.integers(1, 5),
        "batch": st.integers(1, 6),
        "n": st.integers(2, 3),
        "over": st.sampled_from([1.25, 1.5, 2.0, 4.0]),
        "look": st.integers(0, 2),
        "times": st.integers(1, 2),
        "kv": st.sampled_from(["recompute", "keep"]),
    }
)
some = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
SPLIT = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=6),
    train=TrainSpec(engine="fake", token_budget=60),
)
TIME_SHARED = SPLIT.model_copy(update={"placement": "time-shared"})
SYNCHRONOUS: Options = {"lag": 2, "num_steps": 5, "batch": 6, "look": 1}
"""The next turn begins with new weights, so that what goes on has tokens of several."""


def check(program: Flow, options: Options, answer: Answer) -> None:
    """Each sample is given once, with its whole group, of versions in the window of the call that gives it; few enough are left."""
    graph, _, _ = trace(program, options, steps=int(options["num_steps"]), assume=0.0)
    calls = {call.ordinal: call for call in graph.calls}
    assert set(answer.samples) >= set(answer.decisions)
    given_by: dict[int, set[int]] = {}
    for packed, decision in answer.decisions.items():
        drawn, giver = calls[SampleId.unpack(packed).call], calls[decision.call]
        assert (giver.role, giver.site) == (drawn.role, drawn.site)
        assert giver.ordinal >= drawn.ordinal
        _, versions = answer.samples[packed]
        used = [version for version in versions if version >= 0]
        assert sum(version_span.num_tokens for version_span in decision.version_spans) == len(used)
        assert giver.reads[0].first <= min(used) <= max(used) <= giver.reads[0].version
        assert giver.reads[0].version - min(used) <= options["lag"]
        assert options.get("kv") == "keep" or not any(version_span.is_stale for version_span in decision.version_spans)
        given_by.setdefault(group_key(packed), set()).add(decision.call)
    assert all(len(givers) == 1 for givers in given_by.values())
    assert len(answer.consumed) == len(set(answer.consumed))
    trained = {(call.input("samples").call, call.ordinal): call.options["epochs"] for call in graph.calls if call.method == "update"}
    expected = [
        (update, epoch, packed)
        for (made, update), epochs in trained.items()
        if calls[made].engine == "rollout"
        for epoch in range(epochs)
        for packed, decision in answer.decisions.items()
        if decision.call == made
    ]
    assert sorted(expected) == [row for row in answer.consumed if calls[row[2] >> 42].engine == "rollout"]


def num_given(answer: Answer, n: int = 2) -> list[int]:
    """Groups that each call gives."""
    return [count // n for _, count in sorted(Counter(decision.call for decision in answer.decisions.values()).items())]


@pytest.mark.parametrize("program", [LINE, EVERYTHING], ids=["one line", "everything"])
@some
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30), by_identity=st.booleans())
def test_carried_samples_stay_in_their_bound_and_eager_given_the_record_is_the_same(program, spec, options, order_seed, by_identity):
    planned = run_planned(program, options, spec, order_seed=order_seed, deterministic=by_identity)
    assert planned.error == ""
    check(program, options, planned)
    assert run_eager(program, options, spec, decisions=planned.decisions) == planned


@pytest.mark.parametrize("spec", [SPLIT, TIME_SHARED], ids=["split", "time-shared"])
def test_the_pool_is_stationary_and_what_goes_on_has_tokens_of_several_versions(spec):
    """6 prompts a turn, 4 of them needed: the first turn gives 4 groups, later ones 6, and 2 are in the air. A group that ends in the same
    decode step as the last one needed is given with it, and its turn's successor gives one less.
    """
    mixed, given = [], []
    for order_seed in range(4):
        answer = run_planned(LINE, SYNCHRONOUS | {"n": 3}, spec, order_seed=order_seed)
        check(LINE, SYNCHRONOUS, answer)
        given.append(num_given(answer, 3))
        first, *later = given[-1]
        assert (first, sum(later)) == (4, 24)
        assert all(0 <= total - 6 * turn <= 1 for turn, total in enumerate(itertools.accumulate(later), start=1))
        carried = [one for packed, one in answer.decisions.items() if one.call != SampleId.unpack(packed).call]
        assert len(carried) >= 4 * 2
        mixed += [one.version_spans for one in carried if len(one.version_spans) > 1]
    assert given.count([4, 6, 6, 6, 6]) >= 3
    assert any(version_spans[0].version < version_spans[-1].version for version_spans in mixed)


def test_eager_alone_carries_the_last_groups_and_repeats_itself_from_its_record():
    eager = run_eager(LINE, SYNCHRONOUS, SPLIT)
    assert num_given(eager) == [4, 6, 6, 6, 6]
    late = {SampleId.unpack(packed).prompt for packed, one in eager.decisions.items() if one.call != SampleId.unpack(packed).call}
    assert late == {4, 5}
    assert run_eager(LINE, SYNCHRONOUS, SPLIT, decisions=eager.decisions) == eager


def test_a_group_that_would_be_too_old_for_the_next_turn_is_waited_for():
    """With staleness 1 and the next step under way before the update, all is of the older weights: none of it may wait a turn longer."""
    options = SYNCHRONOUS | {"lag": 1, "look": 0}
    for order_seed in range(3):
        answer = run_planned(LINE, options, SPLIT, order_seed=order_seed)
        check(LINE, options, answer)
        given = num_given(answer)
        assert max(given) > 6 or given[1:] == [6] * 4
        assert sum(given) + 2 >= 5 * 6


@flow(staleness=2)
def hurries(lag: int = 2, num_steps: int = 5) -> None:
    """The next turn is sometimes further away than the last one was, and Python is not there in time to say so."""
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=40, oversample=1.5, late="carry")
        rewards = verifier.score(responses)
        for _ in range(1 + 2 * (step % 2)):
            metrics = policy.update(responses, rewards)
        float(metrics["loss"])


def test_what_is_too_old_after_all_begins_anew(monkeypatch):
    expired = []
    adopt = PartialRollouts._reassign

    def watched(self: PartialRollouts, *arguments: object) -> None:
        expired.extend(command for command in self._state.commands if isinstance(command, Expired))
        adopt(self, *arguments)

    monkeypatch.setattr(PartialRollouts, "_reassign", watched)
    for order_seed in range(3):
        answer = run_planned(hurries, {}, SPLIT, order_seed=order_seed)
        check(hurries, {"lag": 2, "num_steps": 5}, answer)
        assert run_eager(hurries, {}, SPLIT, decisions=answer.decisions) == answer
    assert expired


@pytest.mark.parametrize(
    ("done", "oldest", "next_oldest", "given"),
    [
        ("ab", {}, 0, None),
        ("abc", {}, 0, "abc"),
        ("abcd", {}, 0, "abc"),
        ("abd", {"c": 1}, 2, None),
        ("abcd", {"d": 1}, 2, "abd"),
        ("abcd", {"a": 1, "b": 1, "c": 0, "d": 1}, 2, "abcd"),
        ("bcd", {"a": 2}, 2, "bcd"),
    ],
    ids=["too few", "enough", "no more than needed", "one is due", "what is due first", "all are due", "young enough"],
)
def test_what_a_call_gives(done, oldest, next_oldest, given):
    rows = {name: (10 * place, 10 * place + 1) for place, name in enumerate("abcd")}
    result = chosen(
        {place: rows[name] for place, name in enumerate("abcd")},
        {row for name in done for row in rows[name]},
        {rows[name][1]: version for name, version in oldest.items()},
        most_late=1,
        next_oldest=next_oldest,
    )
    assert result == (None if given is None else [row for name in given for row in rows[name]])


def test_a_record_that_does_not_fit_is_refused():
    record = run_planned(LINE, SYNCHRONOUS, SPLIT).decisions
    last = max(decision.call for decision in record.values())
    few = {packed: one for packed, one in record.items() if one.call != last}
    assert "0 groups of policy.generate, which gives at least 6" in run_eager(LINE, SYNCHRONOUS, SPLIT, decisions=few).error
    early = {packed: one._replace(call=1) if one.call == last else one for packed, one in record.items()}
    assert "groups of policy.generate, which gives at least 4 of 6" in run_eager(LINE, SYNCHRONOUS, SPLIT, decisions=early).error


@pytest.mark.parametrize(
    ("change", "message"),
    [("n", "this line had n=2 before and has n=3 now"), ("columns", "the prompts of this line had the columns")],
)
def test_a_line_that_carries_makes_rows_of_one_kind(change, message):
    @flow(staleness=1)
    def changes() -> None:
        policy = Policy("fake")
        sources = [Dataset(ROWS), Dataset([row | {"hint": "x"} for row in ROWS], name="other")]
        for step in steps(2):
            source = sources[step if change == "columns" else 0]
            policy.generate(source.take(4), n=2 + step * (change == "n"), max_new_tokens=4, oversample=2, late="carry")

    with pytest.raises(OptionError, match=message):
        trace(changes, {}, steps=2)


def test_a_refill_does_not_carry_and_carried_samples_are_not_brought_back():
    @flow(staleness=1)
    def refills() -> None:
        policy, verifier = Policy("fake"), Reward(digit_share)
        for _ in steps(1):
            policy.generate(Dataset(ROWS), n=2, max_new_tokens=4, count=2, score=verifier, oversample=2, late="carry")

    @flow(staleness=1)
    def judges() -> None:
        policy, verifier = Policy("fake"), Reward(digit_share)
        for _ in steps(1):
            asked = Dataset(ROWS).take(4)
            verifier.score(policy.generate(asked, n=2, max_new_tokens=4, oversample=2, late="carry")).back_to(asked)

    with pytest.raises(OptionError, match="late='carry' go with prompts"):
        trace(refills, {})
    with pytest.raises(TraceError, match="some were carried over"):
        trace(judges, {})


def test_what_carried_samples_need_is_forgotten_when_they_are_given(monkeypatch):
    known: list[int] = []
    handle = Scheduler.handle

    def watched(self: Scheduler, *events: object) -> list[Command]:
        commands = handle(self, *events)
        known.append(len(self._state.calls))
        return commands

    monkeypatch.setattr(Scheduler, "handle", watched)
    assert run_planned(LINE, SYNCHRONOUS | {"num_steps": 20}, SPLIT).error == ""
    assert max(known) <= 20  # Of a hundred calls. How many are open at once depends on who is how fast.


def test_a_replay_does_not_go_on_in_the_middle_of_a_loop_that_carries():
    record = MemoryRecord()
    run_eager(LINE, SYNCHRONOUS, SPLIT, around=lambda live: Recorder(live, record))
    whole = run_eager(LINE, SYNCHRONOUS, SPLIT, around=lambda live: ReplayBackend(record, live))
    assert (whole.error, whole.samples) == ("", {})
    part = run_eager(LINE, SYNCHRONOUS, SPLIT, around=lambda live: ReplayBackend(record, live, until_step=2))
    assert "takes over samples that an earlier turn of its line" in part.error


def test_the_graph_and_the_plan_say_what_is_carried():
    graph, models, num_steps = trace(LINE, SYNCHRONOUS, steps=2, assume=0.0)
    assert "oversample=1.5, late='carry', carried=%responses)" in str(graph)
    assert [call.most_rows for call in graph.calls if call.method == "generate"] == [4 * 2, 6 * 2]
    notes = "\n".join(lower(graph, models, SPLIT, num_steps=num_steps).notes)
    assert "and carries those that are late into its next turn" in notes


def test_worker_processes_carry_and_the_ledger_counts_what_is_never_given(tmp_path):
    program = flow(staleness="lag")(one_line)
    runs = RunSettings(runs_dir=str(tmp_path))
    planned = Run(program, SYNCHRONOUS, SPLIT, runs).execute()
    decisions = read_decisions(Path(planned.run_dir))
    unused = read_left_out(Path(planned.run_dir))
    assert planned.left_out == unused
    assert set(unused) <= {"unused"}
    assert len(decisions) + sum(unused.values()) == 6 * 5 * 2
    assert len(decisions) >= (4 + 6 * 4) * 2, "more where a group ends in the same decode step as the last one needed"
    eager = Run(program, SYNCHRONOUS, SPLIT, runs.model_copy(update={"eager": True}), decisions=decisions).execute()
    assert (eager.samples_sha256, eager.weights_sha256) == (planned.samples_sha256, planned.weights_sha256)
    assert read_decisions(Path(eager.run_dir)) == decisions
    assert read_left_out(Path(eager.run_dir)) == unused
    with SampleQuery(Path(planned.run_dir)) as book:
        lives = ["; ".join(entry.life) for entry in book.entries()]
        assert sum("carried: it was late, and given in step" in life for life in lives) > 0
        assert book.count("num_updates = 1") == len(decisions)


# The property is worth something: small breakages of the planned run alone, each of which it must see.


def a_finished_member_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    adopt = PartialRollouts._reassign
    patch.setattr(PartialRollouts, "_reassign", lambda self, state, before, finished: adopt(self, state, before, finished[1:]))


def the_prefix_loses_its_logprobs(patch: pytest.MonkeyPatch) -> None:
    made = call_semantics.continuations
    patch.setattr(
        call_semantics,
        "continuations",
        lambda call, stopped: [replace(one, prefix_logprobs=(0.0,) * len(one.prefix)) for one in made(call, stopped)],
    )


def the_resumed_part_has_the_version_of_the_first(patch: pytest.MonkeyPatch) -> None:
    extend = FakeRollout._extend

    def older(self: FakeRollout, sequence: object) -> None:
        extend(self, sequence)
        sequence.versions[-1] = sequence.versions[0]

    patch.setattr(FakeRollout, "_extend", older)


def the_prefix_has_the_version_of_the_rest(patch: pytest.MonkeyPatch) -> None:
    made = call_semantics.continuations

    def newer(call: object, stopped: object) -> list[Request]:
        return [replace(one, prefix_versions=tuple(version + 1 for version in one.prefix_versions)) for one in made(call, stopped)]

    patch.setattr(call_semantics, "continuations", newer)


def a_resumed_sample_has_another_seed(patch: pytest.MonkeyPatch) -> None:
    made = call_semantics.continuations
    patch.setattr(call_semantics, "continuations", lambda call, stopped: [replace(one, seed=one.seed ^ 1) for one in made(call, stopped)])


def a_carried_sample_has_the_options_of_the_call_that_gives_it(patch: pytest.MonkeyPatch) -> None:
    begin, resume = EngineHost.generate, EngineHost.resume
    patch.setattr(EngineHost, "generate", lambda self, call, ids, prompts, drawn=None: begin(self, call, ids, prompts))
    patch.setattr(EngineHost, "resume", lambda self, call, stopped, drawn: resume(self, call, stopped, call))


def a_sample_goes_on_from_the_tokens_of_another(patch: pytest.MonkeyPatch) -> None:
    made = call_semantics.continuations

    def swapped(call: object, stopped: object) -> list[Request]:
        names = ("prefix", "prefix_logprobs", "prefix_versions", "prefix_kv_stale")
        requests = made(call, stopped)
        others = [*requests[1:], *requests[:1]]
        return [replace(one, **{name: getattr(other, name) for name in names}) for one, other in zip(requests, others, strict=True)]

    patch.setattr(call_semantics, "continuations", swapped)


def one_group_too_many_is_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partial_rollouts, "num_late", lambda options, num_prompts: num_late(options, num_prompts) + 1)


def no_group_is_ever_due(patch: pytest.MonkeyPatch) -> None:
    """Nor is anything too old when it is taken over."""
    patch.setattr(PartialRollouts, "_next_oldest", lambda self, call: 0)
    patch.setattr(partial_rollouts, "window", lambda call: (0, call.reads[0].version))


def a_group_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    cut = PartialRollouts.cut

    def also_late(self: PartialRollouts, state: CallState) -> list[int] | None:
        result = cut(self, state)
        if result is not None and state.carry is not None:
            whole = [rows for rows in by_group(result).values() if state.done.issuperset(rows)]
            state.carry.late = tuple(sorted((*state.carry.late, *whole[-1])))
        return result

    patch.setattr(PartialRollouts, "cut", also_late)


BUGS = (
    a_finished_member_is_forgotten,
    the_prefix_loses_its_logprobs,
    the_resumed_part_has_the_version_of_the_first,
    the_prefix_has_the_version_of_the_rest,
    a_resumed_sample_has_another_seed,
    a_carried_sample_has_the_options_of_the_call_that_gives_it,
    a_sample_goes_on_from_the_tokens_of_another,
    one_group_too_many_is_late,
    no_group_is_ever_due,
    a_group_is_given_twice,
)
CASES = [
    (program, SYNCHRONOUS | {"lag": lag, "num_steps": 3}, spec, order_seed)
    for order_seed, (program, lag, spec) in enumerate(
        [(LINE, 2, SPLIT), (EVERYTHING, 2, TIME_SHARED), (LINE, 1, SPLIT), (EVERYTHING, 1, SPLIT), (LINE, 3, TIME_SHARED)]
    )
]


def is_red(patch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None] | None) -> bool:
    """Whether some planned run, with a bug in it alone, breaks the property."""
    patch.setattr(world, "MAX_TURNS", 20_000)
    for program, options, spec, order_seed in CASES:
        try:
            with patch.context() as buggy:
                if bug is not None:
                    bug(buggy)
                planned = run_planned(program, options, spec, order_seed=order_seed)
            assert planned.error == ""
            check(program, options, planned)
            assert run_eager(program, options, spec, decisions=planned.decisions) == planned
        except (AssertionError, LookupError, InternalError):
            return True
    return False


def test_without_a_bug_the_cases_are_green(monkeypatch):
    assert not is_red(monkeypatch, None)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_found(bug, monkeypatch):
    assert is_red(monkeypatch, bug)
