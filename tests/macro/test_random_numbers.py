"""Randomness belongs to a sample's identity: the draw of its prompt and its place in the group, not to how the program asked for it."""

from m2flow import Dataset, Policy, flow, log
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager

SPEC = ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(6)]


def tokens(flow, options=None, seed=0):  # type: ignore[no-untyped-def]
    """What the samples of a run say, by call, in order."""
    answer = run_eager(flow, options or {}, SPEC, seed=seed)
    assert answer.error == ""
    return [answer.samples[packed][0] for packed in sorted(answer.samples)]


@flow
def drawing(at_a_time: int) -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS)
    for _ in range(12 // at_a_time):
        policy.generate(prompts.take(at_a_time), n=2, max_new_tokens=9)


@flow
def with_evaluation(is_evaluated: bool) -> None:
    policy, prompts, heldout = Policy("fake"), Dataset(ROWS), Dataset(ROWS, name="heldout")
    for _ in range(2):
        if is_evaluated:
            policy.generate(heldout.all(), max_new_tokens=5)
        log(x=1.0)
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=30)
        assert responses is not None


@flow
def asking_again() -> None:
    policy, other, prompts = Policy("fake"), Policy("fake", name="other"), Dataset(ROWS, shuffle=False)
    some = prompts.take(6)
    policy.generate(some, max_new_tokens=20)
    policy.generate(some, max_new_tokens=20)
    other.generate(some, max_new_tokens=20)
    policy.generate(prompts.take(6), max_new_tokens=20)


def test_prompts_drawn_one_by_one_are_answered_as_those_drawn_together():
    together = tokens(drawing, {"at_a_time": 12})
    assert tokens(drawing, {"at_a_time": 1}) == tokens(drawing, {"at_a_time": 3}) == together
    assert tokens(drawing, {"at_a_time": 12}, seed=1) != together


def test_an_evaluation_changes_no_sample_of_the_training():
    alone = tokens(with_evaluation, {"is_evaluated": False})
    assert [sample for sample in tokens(with_evaluation, {"is_evaluated": True}) if sample in alone] == alone


def test_the_same_prompts_are_answered_anew_by_each_call_role_and_draw():
    said = tokens(asking_again)
    assert len(said) == 24
    calls = [said[i : i + 6] for i in range(0, 24, 6)]
    assert all(a != b for i, a in enumerate(calls) for b in calls[:i])
