"""Dynamic sampling: the plain loop, the form that does not block, and every plan of it give the same samples, rewards and updates."""

import asyncio
import itertools
import random

import pytest
from fake_flows import ROWS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, log, ppo_clip, steps
from m2flow.macro.refill import Coming, Refill, informative
from m2flow.micro.protocol import messages as m
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.fakes import FAKE_CONTEXT
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def short_enough(sample: Sample) -> float:
    return float(sample.num_tokens <= 3)


def often_raises(sample: Sample) -> float:
    if sample.num_tokens % 5 == 4:
        raise ValueError("no verdict")
    return float(sample.num_tokens <= 3)


def longest_differs(group: list[Sample]) -> bool:
    return max(s.num_tokens for s in group) % 3 != 0


async def asks_before_it_keeps(group: list[Sample]) -> bool:
    await asyncio.sleep(0)
    return longest_differs(group)


class AlwaysUnsure:
    def __call__(self, group: list[Sample]) -> str:
        return "no"


REWARDS = {"short": short_enough, "raises": often_raises}
KEEPS = {
    "informative": informative,
    "longest": longest_differs,
    "none": lambda group: False,
    "async": asks_before_it_keeps,
    "unsure": AlwaysUnsure(),
}


@flow
def refilling(num_steps: int, count: int, n: int, reward: str, keep: str, max_draws: int) -> None:
    policy, verifier, prompts = Policy("fake"), Reward(REWARDS[reward], name="verifier"), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=n, max_new_tokens=9, count=count, score=verifier, keep=KEEPS[keep], max_draws=max_draws)
        rewards = verifier.score(responses)
        metrics = policy.update(responses, rewards)
        log(reward=rewards.mean(), sequences=metrics["num_sequences"])
    log(cursor=float(prompts.cursor))


@flow
def looping(num_steps: int, count: int, n: int, reward: str, keep: str, max_draws: int) -> None:
    """The same as plain Python. What it trains on is put together by hand, so its updates are compared sample by sample."""
    policy, verifier, prompts = Policy("fake"), Reward(REWARDS[reward], name="verifier"), Dataset(ROWS)
    for _ in steps(num_steps):
        num_kept = 0
        while num_kept < count:
            responses = policy.generate(prompts.take(1), n=n, max_new_tokens=9)
            rewards = list(verifier.score(responses))
            num_kept += len(set(rewards)) > 1
    log(cursor=float(prompts.cursor))


options = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 3),
        "count": st.integers(1, 4),
        "n": st.integers(2, 3),
        "reward": st.sampled_from(["short", "raises"]),
        "keep": st.sampled_from(["informative", "informative", "longest", "none"]),
        "max_draws": st.sampled_from([5, 40]),
    }
)


def said(answer: Answer) -> list[tuple[int, ...]]:
    return [answer.samples[packed][0] for packed in sorted(answer.samples)]


@few
@given(clusters(), options, st.integers(0, 2**30), st.booleans())
def test_a_refill_gives_the_same_under_every_plan(spec, options, order_seed, by_identity):
    eager = run_eager(refilling, options, spec)
    planned = run_planned(refilling, options, spec, order_seed=order_seed, deterministic=by_identity)
    if eager.error:  # What was logged before is then known at another time, and the update that fails may have begun.
        planned.logs = eager.logs = planned.consumed = eager.consumed = []
    assert planned == eager


@flow
def in_minibatches(num_steps: int, count: int, n: int, size: int, epochs: int) -> None:
    policy, verifier, prompts = Policy("fake"), Reward(short_enough), Dataset(ROWS)
    reference, again = Reference(policy), Reward(lambda sample: float(sample.num_tokens % 3), name="again")
    for _ in steps(num_steps):
        kept = policy.generate(prompts, n=n, max_new_tokens=9, count=count, score=verifier, max_draws=40)
        shaped = kept.reward + again.score(kept)
        shift = policy.logprobs(kept) - reference.logprobs(kept)
        loss = ppo_clip(kl_coef=0.1)
        policy.update(kept, shaped, loss=loss, reference=reference, minibatch_size=size or None, epochs=epochs)
        log(reward=kept.reward.mean(), again=shaped.mean(), shift=shift.mean())
    log(cursor=float(prompts.cursor))


@few
@given(clusters(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.integers(1, 2), st.integers(0, 2**30), st.booleans())
def test_calls_on_what_an_unfinished_refill_gives_are_the_same_under_every_plan(spec, num_steps, count, size, epochs, order_seed, in_order):
    options = {"num_steps": num_steps, "count": count, "n": 2, "size": size, "epochs": epochs}
    eager = run_eager(in_minibatches, options, spec)
    assert eager.error == ""
    assert run_planned(in_minibatches, options, spec, order_seed=order_seed, deterministic=in_order) == eager


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_an_update_begins_while_its_refill_still_draws_unless_they_share_devices(placement, monkeypatch):
    early: list[int] = []
    start = SchedulerState.start

    def noted(state, worker, engine, task, rows=0):
        if isinstance(task, m.Accumulate) and state.calls[task.call].coming is not None:
            early.append(task.call)
        return start(state, worker, engine, task, rows)

    monkeypatch.setattr(SchedulerState, "start", noted)
    spec = ClusterSpec(placement=placement, device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    options = {"num_steps": 3, "count": 5, "n": 2, "size": 1, "epochs": 1}
    for order_seed in range(4):
        assert run_planned(in_minibatches, options, spec, order_seed=order_seed).error == ""
    assert bool(early) == (placement == "split")


def test_a_group_is_given_as_soon_as_no_verdict_to_come_can_change_its_minibatch():
    rng = random.Random(5)
    for _ in range(60):
        num, count, size = rng.randint(2, 8), rng.randint(1, 4), rng.randint(1, 3)
        verdicts = [rng.random() < 0.6 for _ in range(num)]
        refill, found, known, given = Refill(num, count), set[tuple[int, int]](), dict[int, bool](), set[tuple[int, int]]()
        coming = Coming(refill, size)
        for position in rng.sample(range(num), num):
            refill.judge(position, verdicts[position])
            known[position] = verdicts[position]
            found |= set(coming.more())
            ends = list[set[tuple[int, int]]]()
            missing = [other for other in range(num) if other not in known]
            for said in itertools.product((True, False), repeat=len(missing)):
                every = known | dict(zip(missing, said, strict=True))
                kept = [other for other in range(num) if every[other]][:count]
                ends.append({(other, place // size) for place, other in enumerate(kept)})
            given = {(other, part) for other, part in set.intersection(*ends) if other in known}
            assert found == given
        assert {other for other, _ in found} == set([other for other in range(num) if verdicts[other]][:count])


def raises_on_the_first_and_on_later_ones(sample: Sample) -> float:
    if sample.id.prompt in (0, 1, 4):
        raise ValueError("no verdict")
    return float(sample.num_tokens)


@flow
def judging_what_is_kept(count: int) -> None:
    policy, prompts, judge = Policy("fake"), Dataset(ROWS), Reward(raises_on_the_first_and_on_later_ones, name="judge")
    kept = policy.generate(prompts, n=2, max_new_tokens=14, count=count, score=Reward(short_enough), keep=lambda group: True)
    policy.update(kept, judge.score(kept), minibatch_size=1)


@pytest.mark.parametrize("count", [2, 6])
def test_a_call_on_what_an_unfinished_refill_gives_fails_with_its_earliest_sample_whichever_came_first(count):
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=3, max_running=2),
        train=TrainSpec(engine="fake"),
        functions=FunctionSpec(workers=2, chunk=1),
    )
    eager = run_eager(judging_what_is_kept, {"count": count}, spec)
    assert "on sample p0/0" in eager.error
    for order_seed in range(30):
        assert run_planned(judging_what_is_kept, {"count": count}, spec, order_seed=order_seed).error == eager.error


@pytest.mark.parametrize(("size", "in_order"), [(None, False), (16, False), (16, True)])
def test_a_refill_of_thousands_is_looked_through_some_hundreds_of_times_and_gives_all(size, in_order, monkeypatch):
    looks: list[int] = []
    sure = Coming._sure

    def noted(coming: Coming):
        looks.append(coming._start)
        return sure(coming)

    monkeypatch.setattr(Coming, "_sure", noted)
    refill = Refill(num_candidates=6000, count=2000)
    coming, given = Coming(refill, size, in_order=in_order), list[tuple[int, int]]()
    for position in [*range(1, 4001), 0]:
        refill.judge(position, position % 2 == 0)
        given += coming.more(is_all=refill.end() is not None)
    assert sorted(position for position, _ in given) == list(range(0, 4000, 2))
    assert all(minibatch == position // 2 // (size or 2000) for position, minibatch in given)
    assert len(looks) < 1200


@few
@given(clusters(), st.integers(1, 3), st.integers(1, 4))
def test_a_refill_draws_what_the_plain_loop_draws(spec, num_steps, count):
    same = {"num_steps": 1, "count": count, "n": 3, "reward": "short", "keep": "informative", "max_draws": 100}
    refilled, looped = run_eager(refilling, same, spec), run_eager(looping, same, spec)
    assert refilled.error == looped.error == ""
    assert said(refilled) == said(looped)
    assert [log for log in refilled.logs if log[1] == "cursor"] == looped.logs


@pytest.mark.parametrize("reward", ["short", "raises"])
def test_quick_functions_are_given_all_groups_that_are_needed_for_certain_at_once(reward, monkeypatch):
    tasks: list[set[int]] = []
    start = SchedulerState.start

    def noted(state, worker, engine, task, rows=0):
        if isinstance(task, m.RunFunction) and state.calls[task.call].refill is not None:
            refill, prompts = state.calls[task.call].refill, {SampleId.unpack(row).prompt for row in task.ids}
            assert len(prompts) == 1 or all(map(refill.is_certain, prompts))
            tasks.append(prompts)
        return start(state, worker, engine, task, rows)

    monkeypatch.setattr(SchedulerState, "start", noted)
    spec = ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    failed = 0
    for count in range(2, 6):
        same = {"num_steps": 3, "count": count, "n": 2, "reward": reward, "keep": "longest", "max_draws": 40}
        eager = run_eager(refilling, same, spec)
        failed += bool(eager.error)
        for order_seed in range(4):
            planned = run_planned(refilling, same, spec, order_seed=order_seed)
            assert (planned.error, planned.samples, planned.rewards) == (eager.error, eager.samples, eager.rewards)
    assert bool(failed) == (reward == "raises")
    assert max(map(len, tasks)) > 2


def test_a_group_has_to_be_judged_unless_those_before_it_might_suffice():
    rng = random.Random(3)
    for _ in range(200):
        num, count = rng.randint(1, 12), rng.randint(1, 5)
        refill, rejected = Refill(num, count), set[int]()
        for position in rng.sample(range(num), num):
            for other in range(num):
                assert refill.is_certain(other) == (other - sum(gone < other for gone in rejected) < count)
            verdict = rng.random() < 0.5
            refill.judge(position, verdict)
            refill.judge(position, not verdict)  # A repeated verdict changes nothing.
            rejected |= set() if verdict else {position}


def test_what_was_rejected_is_drawn_and_scored_but_not_trained_on():
    same = {"num_steps": 2, "count": 3, "n": 3, "reward": "short", "keep": "informative", "max_draws": 100}
    answer = run_eager(refilling, same, ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")))
    trained = {packed for _, _, packed in answer.consumed}
    assert len(trained) == 2 * 3 * 3 < len(answer.samples) == len(answer.rewards)


def test_a_refill_that_finds_too_few_groups_says_how_many_and_where():
    same = {"num_steps": 1, "count": 3, "n": 2, "reward": "short", "keep": "none", "max_draws": 5}
    answer = run_planned(refilling, same, ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")))
    assert "were kept among 5 prompts" in answer.error


def test_a_keep_that_is_async_keeps_what_a_plain_one_does():
    spec = ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    same = {"num_steps": 2, "count": 3, "n": 2, "reward": "short", "max_draws": 40}
    plain = run_eager(refilling, {**same, "keep": "longest"}, spec)
    assert plain.error == ""
    for order_seed in range(4):
        assert run_planned(refilling, {**same, "keep": "async"}, spec, order_seed=order_seed) == plain
    assert run_eager(refilling, {**same, "keep": "async"}, spec) == plain


def test_a_keep_that_says_neither_names_the_group():
    same = {"num_steps": 1, "count": 3, "n": 2, "reward": "short", "keep": "unsure", "max_draws": 40}
    answer = run_eager(refilling, same, ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")))
    assert answer.error == "OpError: keep returned 'no' on the group of prompt 0, which is neither True nor False"


@flow
def with_long_prompts(longs: list[int], count: int, n: int) -> None:
    """Some prompts do not fit the model's context: those that the refill needs are an error, others are not seen."""
    policy, verifier = Policy("fake"), Reward(short_enough)
    prompts = Dataset([{"prompt": "x" * FAKE_CONTEXT if i in longs else f"{i * 7919}="} for i in range(12)], shuffle=False)
    kept = policy.generate(prompts, n=n, max_new_tokens=9, count=count, score=verifier, max_draws=12)
    log(reward=verifier.score(kept).mean())
    log(cursor=float(prompts.cursor))


@few
@given(clusters(), st.sets(st.integers(0, 11), max_size=4), st.integers(1, 3), st.integers(2, 3), st.integers(0, 2**30))
def test_a_prompt_that_is_too_long_counts_only_if_the_refill_needs_it(cluster, longs, count, n, order_seed):
    options = {"longs": sorted(longs), "count": count, "n": n}
    eager = run_eager(with_long_prompts, options, cluster)
    planned = run_planned(with_long_prompts, options, cluster, order_seed=order_seed)
    assert planned.error == eager.error
    if not eager.error:
        assert planned == eager


def test_a_prompt_beyond_the_last_one_needed_is_started_and_does_not_fail_the_refill():
    spec = ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    needed = int(run_eager(with_long_prompts, {"longs": [], "count": 2, "n": 2}, spec).logs[-1][2])
    for long in range(needed, 12):
        for order_seed in range(4):
            answer = run_planned(with_long_prompts, {"longs": [long], "count": 2, "n": 2}, spec, order_seed=order_seed)
            assert answer.error == ""
    assert "p0/0: a prompt of 4096 tokens" in run_planned(with_long_prompts, {"longs": [0], "count": 2, "n": 2}, spec).error
