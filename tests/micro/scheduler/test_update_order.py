"""Micro-batches of an update: membership by identity, whatever came first, and no way to get stuck."""

from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.micro.lowering.passes import cut
from m2flow.micro.scheduler.call_state import Group, MicroBatch, MinibatchEnd, UpdateProgress

relaxed = settings(deadline=None)


@st.composite
def updates(draw: st.DrawFn) -> dict[str, object]:
    """Groups with their tokens, the order in which they come, and how busy the trainer is at each question."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=9))
    groups = [Group(key, tuple(range(key * 10, key * 10 + size))) for key, size in enumerate(sizes)]
    return {
        "groups": groups,
        "tokens": {group.key: draw(st.integers(0, 60)) for group in groups},
        "arrival": draw(st.permutations([group.key for group in groups])),
        "minibatch_size": draw(st.none() | st.integers(1, 10)),
        "epochs": draw(st.integers(1, 3)),
        "token_budget": draw(st.sampled_from([1, 30, 100, 10_000])),
        "idle": draw(st.lists(st.booleans(), max_size=30)),
    }


def run(case: dict[str, object], *, by_identity: bool) -> list[MicroBatch | MinibatchEnd]:
    """Let the groups come one by one, ask after each, and answer all that was done. An idle trainer may ask at any time."""
    names = ("minibatch_size", "epochs", "token_budget")
    progress = UpdateProgress(case["groups"], by_identity=by_identity, **{name: case[name] for name in names})
    coming, idle, steps = list(case["arrival"]), list(case["idle"]), []
    while not progress.is_finished:
        step = progress.next(is_idle=idle.pop() if idle else True)
        if step is not None:
            progress.take(step)
            steps.append(step)
        elif coming:
            progress.add(coming[0], case["tokens"][coming.pop(0)])
        else:
            assert idle, "every group is there, the trainer is idle, and there is nothing to do"
    return steps


@relaxed
@given(updates(), st.booleans())
def test_each_group_is_taken_whole_and_once_an_epoch_in_the_minibatch_of_its_identity(case, by_identity):
    groups, size = case["groups"], case["minibatch_size"] or max(len(case["groups"]), 1)
    member = {row: number for number in range(0, len(groups), size) for group in groups[number : number + size] for row in group.ids}
    taken = []
    for step in run(case, by_identity=by_identity):
        if isinstance(step, MicroBatch):
            assert {member[row] for row in step.ids} == {step.minibatch * size}
            whole = {row for group in groups for row in group.ids if set(group.ids) & set(step.ids)}
            assert sorted(step.ids) == sorted(whole)
            taken += [(step.epoch, row) for row in step.ids]
    assert sorted(taken) == [(epoch, row) for epoch in range(case["epochs"]) for group in groups for row in group.ids]


@relaxed
@given(updates(), st.booleans())
def test_a_minibatch_ends_after_all_of_its_groups_and_the_last_end_says_so(case, by_identity):
    groups, size = case["groups"], case["minibatch_size"] or max(len(case["groups"]), 1)
    parts = [groups[start : start + size] for start in range(0, len(groups), size)] * case["epochs"]
    steps, seen, ends = run(case, by_identity=by_identity), [], []
    for step in steps:
        if isinstance(step, MicroBatch):
            seen += step.ids
        else:
            assert sorted(seen) == sorted(row for group in parts[len(ends)] for row in group.ids)
            seen = []
            ends.append(step.is_last)
    assert ends == [False] * (len(parts) - 1) + [True] * bool(parts)


@relaxed
@given(updates(), st.booleans())
def test_a_micro_batch_keeps_to_the_budget_unless_one_group_alone_is_above_it(case, by_identity):
    for step in run(case, by_identity=by_identity):
        if isinstance(step, MicroBatch):
            of = {row: group.key for group in case["groups"] for row in group.ids}
            keys = {of[row] for row in step.ids}
            assert len(keys) == 1 or sum(case["tokens"][key] for key in keys) <= case["token_budget"]


@relaxed
@given(updates())
def test_by_identity_the_micro_batches_are_those_of_the_cut_and_do_not_depend_on_arrival(case):
    groups, size = case["groups"], case["minibatch_size"] or max(len(case["groups"]), 1)
    expected = []
    for start in range(0, len(groups), size):
        part, taken = groups[start : start + size], 0
        for count in cut([case["tokens"][group.key] for group in part], case["token_budget"]):
            expected.append(tuple(row for group in part[taken : taken + count] for row in group.ids))
            taken += count
    steps = run(case, by_identity=True)
    assert [step.ids for step in steps if isinstance(step, MicroBatch)] == expected * case["epochs"]


def test_an_idle_trainer_starts_with_a_quarter_of_the_budget_and_a_busy_one_waits_for_more():
    progress = UpdateProgress([Group(k, (k,)) for k in range(4)], minibatch_size=None, epochs=1, token_budget=100, by_identity=False)
    progress.add(2, 24)
    assert progress.next(is_idle=True) is None
    progress.add(0, 1)
    assert progress.next(is_idle=False) is None
    assert progress.next(is_idle=True) == MicroBatch(0, 0, (0, 2))


def test_an_update_of_no_groups_is_finished_at_once():
    assert UpdateProgress([], minibatch_size=None, epochs=2, token_budget=1, by_identity=False).is_finished
