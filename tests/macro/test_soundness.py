"""What is refused when traced: losses that take samples of other weights for their own; and what the plan says of staleness."""

import re

import pytest

from m2flow import AdamW, Dataset, Policy, Reference, Reward, Sample, flow, loss, nll, ppo_clip, reinforce, steps
from m2flow.errors import FlowLoadError, OptionError, TraceError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.spec import LAPTOP

ROWS = [{"prompt": f"{i}=", "target": str(i)} for i in range(8)]


def one(sample: Sample) -> float:
    return 1.0


@loss(needs=["logprobs", "advantages"])
def mine(logprobs: object, advantages: object) -> object:
    return logprobs


@loss(needs=["logprobs", "behaviour_logprobs", "advantages"])
def corrected(logprobs: object, behaviour_logprobs: object, advantages: object) -> object:
    return logprobs


def program(chosen: object, lag: int = 0, **passes: object) -> Flow:
    @flow(staleness=lag)
    def loop() -> None:
        policy, verifier = Policy("fake"), Reward(one)
        prompts = Dataset(ROWS)
        for _ in steps(3):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=3)
            policy.update(responses, verifier.score(responses), loss=chosen, **passes)  # type: ignore[arg-type]

    return loop


@pytest.mark.parametrize("chosen", [reinforce(), mine], ids=["reinforce", "mine"])
@pytest.mark.parametrize(
    ("lag", "passes", "reason", "way_out"),
    [
        (1, {}, "with staleness=1 the samples of .* may be of older weights", "generate them with staleness=0"),
        (0, {"epochs": 2}, "with epochs=2 all passes but the first", "take epochs=1"),
        (0, {"minibatch_size": 2}, "each of its mini-batches but the first", "leave out minibatch_size"),
    ],
    ids=["staleness", "epochs", "minibatches"],
)
def test_a_loss_without_behaviour_logprobs_is_refused_for_samples_of_other_weights(chosen, lag, passes, reason, way_out):
    with pytest.raises(TraceError) as caught:
        trace(program(chosen, lag, **passes), {})
    message = str(caught.value)
    assert re.search(f"policy.update with the loss {chosen.name} can't be right: {reason}", message)
    assert "does not need 'behaviour_logprobs'" in message
    assert re.search(rf"Take a loss that corrects for it \(.*\), or {way_out}", message)
    assert re.match(r"tests/macro/test_soundness.py:\d+  policy.update\(responses", message)
    trace(program(chosen, 0, minibatch_size=4), {})  # All of it is one mini-batch.
    trace(program(corrected, lag, **passes), {})
    trace(program(ppo_clip(), lag, **passes), {})


@pytest.mark.parametrize(("lag", "passes"), [(1, {}), (0, {"epochs": 2})])
def test_allow_unsound_overrides_and_the_plan_shows_it(lag, passes):
    graph, _, _ = trace(program(reinforce(), lag, allow_unsound=True, **passes), {})
    assert "allow_unsound=True)" in str(graph)


def test_samples_that_were_drawn_before_another_update_are_refused():
    @flow
    def twice() -> None:
        policy, verifier = Policy("fake"), Reward(one)
        responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=3)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, loss=reinforce())
        policy.update(responses, rewards, loss=reinforce())

    with pytest.raises(TraceError, match=r"updated once since the samples of \S+test_soundness.py:\d+"):
        trace(twice, {})


def test_demonstrations_and_samples_of_other_policies_are_of_no_weights_that_the_update_changes():
    @flow(staleness=1)
    def fine() -> None:
        policy, teacher = Policy("fake"), Policy("fake", name="teacher")
        demos, prompts = Dataset(ROWS, name="demos"), Dataset(ROWS)
        policy.update(demos.all(), loss=nll(), epochs=3, minibatch_size=2)
        for _ in steps(2):
            policy.update(teacher.generate(prompts.take(2), max_new_tokens=3), loss=nll(), epochs=2)

    trace(fine, {})


def test_fine_tuning_on_the_best_samples_of_the_policy_itself_may_take_several_passes():
    @flow(staleness=1)
    def rejection_sampling() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for _ in steps(2):
            best = policy.generate(prompts.take(2), n=2, max_new_tokens=3).filter(lambda sample: sample.num_tokens > 1)
            policy.update(best, loss=nll(), epochs=2)

    trace(rejection_sampling, {})


def waits(lag: int, look: int | None) -> str:
    """The notes of the plan of a flow that looks at the metrics of `look` steps ago."""

    @flow(staleness=lag)
    def loop() -> None:
        policy, verifier = Policy("fake"), Reward(one)
        prompts = Dataset(ROWS)
        for _ in steps(4):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            metrics = policy.update(responses, verifier.score(responses))
            if look is None:
                float(metrics["loss"])
            else:
                metrics.lagged(look)

    graph, models, num_steps = trace(loop, {}, steps=4, assume=0.0)
    return "\n".join(lower(graph, models, LAPTOP, num_steps=num_steps).notes)


def test_the_plan_names_the_wait_that_makes_a_flow_synchronous_and_its_replacement():
    note = waits(2, None)
    assert "staleness=2: responses may come from weights" in note
    assert "(float()) makes this flow synchronous, whatever its staleness; metrics.lagged(2)" in note
    assert "lets no more than 1 step run ahead; metrics.lagged(2)" in waits(2, 1)
    assert "lagged(2), the value" not in waits(2, 2)
    assert "staleness" not in waits(0, None)


def test_the_graph_shows_which_versions_a_generation_may_use():
    graph, _, _ = trace(program(ppo_clip(), 2), {}, steps=3)
    reads = [str(call.reads[0]) for call in graph.calls if call.method == "generate"]
    assert reads == ["policy.weights@0", "policy.weights@0..1", "policy.weights@0..2"]
    edges = {(a, b) for a, b, about in graph.digraph().edges(data=True) if about["kind"] == "effect"}
    generations = [call.ordinal for call in graph.calls if call.method == "generate"]
    updates = [call.ordinal for call in graph.calls if call.method == "update"]
    assert (updates[0], generations[1]) not in edges


def test_staleness_does_not_reach_back_before_the_loop_nor_after_it():
    @flow(staleness=3)
    def warm() -> None:
        policy, prompts, verifier = Policy("fake"), Dataset(ROWS), Reward(one)
        policy.update(Dataset(ROWS, name="demos").all(), loss=nll())
        policy.update(Dataset(ROWS, name="more").all(), loss=nll())
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            policy.update(responses, verifier.score(responses))
        policy.generate(prompts.take(2), max_new_tokens=3)

    graph, _, _ = trace(warm, {}, steps=2)
    assert [str(call.reads[0]) for call in graph.calls if call.method == "generate"] == [
        "policy.weights@2",
        "policy.weights@2..3",
        "policy.weights@4",
    ]


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_staleness_is_a_whole_number_of_versions(value):
    with pytest.raises(OptionError, match="a staleness is a whole number of versions, 0 or more"):
        flow(staleness=value)(lambda: None)


def test_a_staleness_may_be_a_parameter_of_the_flow():
    with pytest.raises(FlowLoadError, match="has no parameter 'behind'"):
        flow(staleness="behind")(lambda lag=1: None)
    made = flow(staleness="lag")(lambda lag=1: None)
    assert (made.staleness_for({}), made.staleness_for({"lag": 3})) == (1, 3)
    with pytest.raises(OptionError, match="the parameter 'lag' of the flow <lambda> is -2"):
        made.staleness_for({"lag": -2})


def test_a_generate_may_ask_for_less_staleness_than_the_flow_and_not_for_more():
    @flow(staleness=1)
    def asks(much: int) -> None:
        policy = Policy("fake")
        for _ in steps(1):
            policy.generate(Dataset(ROWS).take(2), max_new_tokens=3, staleness=much)

    trace(asks, {"much": 0})
    with pytest.raises(OptionError, match=r"generate\(staleness=2\): .* 0 up to .* is 1"):
        trace(asks, {"much": 2})


@pytest.mark.parametrize(
    ("lag", "options", "message"),
    [
        (0, {"late": "carry", "oversample": 1.5}, "late='carry' with staleness=0 would train on old tokens"),
        (1, {"late": "carry"}, "oversample=1.0 with late='carry'"),
        (1, {"late": "carry", "oversample": 1.5, "staleness": 0}, "late='carry' with staleness=0 would train on old tokens"),
        (0, {"late": "later"}, "late='later'; known are wait, drop, carry"),
        (0, {"oversample": 1.25}, "oversample=1.25 with late='wait'"),
        (0, {"late": "drop"}, "oversample=1.0 with late='drop'"),
        (0, {"late": "drop", "oversample": 0.5}, "it is a number, 1.0 or more"),
        (0, {"late": "drop", "oversample": float("nan")}, "it is a number, 1.0 or more"),
        (0, {"kv": "keep"}, "kv='keep' with staleness=0"),
        (1, {"kv": "keep", "staleness": 0}, "kv='keep' with staleness=0"),
        (1, {"kv": "drop"}, "kv='drop'; known are recompute, keep"),
    ],
)
def test_what_can_not_be_right_or_is_not_there_is_refused_and_never_passed_over(lag, options, message):
    @flow(staleness=lag)
    def asks() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for _ in steps(1):
            policy.generate(prompts.take(4), n=2, max_new_tokens=3, **options)

    with pytest.raises(OptionError, match=re.escape(message)):
        trace(asks, {})


def test_the_plan_says_which_generation_drops_what_is_late():
    @flow
    def drops() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for _ in steps(1):
            policy.generate(prompts.take(5), n=2, max_new_tokens=3, oversample=1.25, late="drop", kv="recompute")

    graph, models, num_steps = trace(drops, {})
    assert "oversample=1.25, late='drop'" in str(graph)
    assert graph.calls[-1].most_rows == 4 * 2
    (note,) = lower(graph, models, LAPTOP, num_steps=num_steps).notes
    assert re.fullmatch(r"policy.generate at \S+ gives the groups that are whole first, and drops those that are late; .*", note)


def notes_of(body: Flow) -> list[str]:
    graph, models, num_steps = trace(body, {}, steps=100)
    return [note for note in lower(graph, models, LAPTOP, num_steps=num_steps).notes if note.startswith("policy.update at ")]


def test_the_plan_names_what_an_update_is_given_and_its_loss_does_not_use():
    @loss(needs=["logprobs", "weight"])
    def weighted(logprobs: object, weight: object) -> object:
        return logprobs

    @flow
    def told() -> None:
        policy, verifier = Policy("fake"), Reward(one)
        reference, prompts = Reference(policy), Dataset(ROWS)
        for _ in steps(3):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=3)
            rewards = verifier.score(responses)
            policy.update(responses, rewards, loss=nll())
            policy.update(responses, rewards, loss=ppo_clip(), reference=reference)
            policy.update(responses, loss=weighted, columns={"weight": rewards, "width": rewards}, allow_unsound=True)
            policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference)

    unused, penalty, column = notes_of(told)
    assert re.fullmatch(r"policy.update at tests/macro/test_soundness.py:\d+ is given rewards, and its loss nll uses .*metric.*", unused)
    assert "is given a reference, and its loss ppo_clip uses none (kl_coef is 0?)" in penalty
    assert "is given 'width', and its loss weighted does not need it" in column


def test_the_plan_names_a_line_whose_optimiser_begins_anew_at_each_step():
    def learning(**settings: object) -> Flow:
        @flow
        def loop() -> None:
            policy, verifier, prompts = Policy("fake"), Reward(one), Dataset(ROWS)
            for step in steps(4):
                responses = policy.generate(prompts.take(4), n=2, max_new_tokens=3)
                policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3 / (step + 1), **settings))  # type: ignore[arg-type]

        return loop

    (anew,) = notes_of(learning(warmup_steps=2))
    assert "has another optimiser at each step" in anew
    assert "schedule" in anew
    assert notes_of(learning()) == notes_of(learning(schedule="linear")) == []
