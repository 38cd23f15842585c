"""`@flow`: its parameters, finding it in a file, what it is told when it can't be run; and what calls refuse at their line."""

from __future__ import annotations

import importlib.machinery
import os
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from message_parts import lacks

from m2flow import Dataset, Flow, Policy, Reference, Reward, Sample, flow, load_flow, op, ppo_clip, steps
from m2flow.errors import FlowError, FlowLoadError, OptionError, TraceError
from m2flow.macro.flow import randomness_kept, seed_everything
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}=", "target": str(i), "k": i} for i in range(8)]
SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=5),
    train=TrainSpec(engine="fake", token_budget=40),
    functions=FunctionSpec(workers=2, chunk=2),
)
ONE = "from m2flow import flow\n\n@flow\ndef one(k: int = 3):\n    'Does one thing.'\n"


def one(sample: Sample) -> float:
    return 1.0


def test_a_file_with_one_flow_gives_it_with_its_doc_and_parameters(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(ONE)
    found = load_flow(str(path))
    assert (found.name, found.doc) == ("one", "Does one thing.")
    assert [(p.name, p.type, p.default, p.is_required) for p in found.parameters] == [("k", int, 3, False)]


def test_of_several_flows_one_is_chosen_by_name_and_one_of_two_names_counts_once(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(ONE + "\nalias = one\n")
    assert load_flow(str(path)).name == "one"
    path.write_text(ONE + "\n@flow\ndef two(): pass\n")
    assert load_flow(f"{path}:two").name == "two"
    with pytest.raises(FlowLoadError) as caught:
        load_flow(str(path))
    assert not lacks(str(caught.value), f"{path} has 2 flows", "one, two", "\n", f"{path}:one")
    with pytest.raises(FlowLoadError) as caught:
        load_flow(f"{path}:three")
    assert not lacks(str(caught.value), str(path), "no flow 'three'", "one, two")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1\n", ["{path} has no flow", "\n", "@flow", "from m2flow import flow"]),
        ("def f(:\n", ["{path}:1  def f(:\n", "invalid syntax", "\n", "python FILE"]),
        (
            "import os\nos.nothing\n",
            ["{path}:2  os.nothing\n", "importing the flow raised AttributeError", "'nothing'"],
        ),
        ("from .beside import f\n", ["{path}:1  from .beside import f\n", "without the dot", "m2flow.run()"]),
        ("import sys\nsys.exit(3)\n", ["{path}:2  sys.exit(3)\n", "importing the flow raised SystemExit: 3"]),
        (
            "from m2flow import flow\n@flow\nasync def f(): pass\n",
            ["{path}:3  async def f(): pass\n", "flow f is async", "\n", "`def`"],
        ),
        ("from m2flow import flow\n@flow(\n    staleness=1)\ndef f():\n    yield\n", ["{path}:4  def f():\n", "has a yield"]),
    ],
)
def test_a_file_that_is_no_flow_is_told_what_where_and_what_now(tmp_path, text, parts):
    path = tmp_path / "some.py"
    path.write_text(text)
    with pytest.raises(FlowLoadError) as caught:
        load_flow(str(path))
    assert not lacks(str(caught.value), *(part.replace("{path}", str(path)) for part in parts))


def test_a_missing_file_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FlowLoadError, match=r"there is no file nowhere\.py"):
        load_flow("nowhere.py")
    (tmp_path / "some.txt").write_text(ONE)
    with pytest.raises(FlowLoadError, match=r"some\.txt is not a Python file"):
        load_flow(str(tmp_path / "some.txt"))


def test_a_syntax_error_in_what_a_flow_imports_names_that_file(tmp_path):
    (tmp_path / "beside_the_flow.py").write_text("\n\nx = (\n")
    (tmp_path / "some.py").write_text("import beside_the_flow\n" + ONE)
    with pytest.raises(FlowLoadError, match=r"beside_the_flow\.py:3"):
        load_flow(str(tmp_path / "some.py"))


def test_a_flow_that_another_file_defines_is_not_this_files_flow(tmp_path):
    (tmp_path / "other_flow_file.py").write_text(ONE)
    (tmp_path / "some.py").write_text("from other_flow_file import one\nfrom m2flow import flow\n@flow\ndef mine(): pass\n")
    assert load_flow(str(tmp_path / "some.py")).name == "mine"


def test_parameters_have_the_types_of_their_annotations_or_defaults():
    @flow
    def some(a: int, b=0.5, c: str | None = None, d=None, *, e: bool = True) -> None:  # type: ignore[no-untyped-def]
        pass

    assert [(p.name, p.type, p.is_required) for p in some.parameters] == [
        ("a", int, True),
        ("b", float, False),
        ("c", str | None, False),
        ("d", str, False),
        ("e", bool, False),
    ]


def test_parameters_that_can_not_be_options_are_refused():
    @flow
    def many(*rest: int) -> None:
        pass

    @flow
    def unread(x: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(FlowLoadError, match=r"the flow many has \*rest"):
        _ = many.parameters
    with pytest.raises(FlowLoadError, match=r"annotation of the flow unread .*'NoSuchType'"):
        _ = unread.parameters


def test_options_that_are_unknown_or_left_out_are_refused():
    @flow
    def some(a: int, b: int = 1) -> None:
        Policy("fake").generate(Dataset(ROWS).take(a), max_new_tokens=b)

    with pytest.raises(OptionError, match="the flow some has no option 'c'; it has a, b"):
        _check(some, {"a": 1, "c": 2})
    with pytest.raises(OptionError, match="the flow some needs a value for a"):
        _check(some, {"b": 2})


def _check(some: Flow, options: dict[str, object]) -> None:
    from m2flow.macro.tracing import TracingBackend

    some.run(TracingBackend(), options)


def test_a_flow_that_is_called_outside_a_run_says_how_to_start_it():
    @flow
    def some() -> None:
        Policy("fake")

    with pytest.raises(TraceError, match="was used outside a running flow") as caught:
        some()
    assert "m2flow.run(flow)" in caught.value.now
    assert "m2flow run FILE" in caught.value.now
    assert "test_flow.py:" in caught.value.where


def test_a_flow_that_another_flow_calls_is_part_of_it():
    @flow
    def inner(count: int) -> None:
        Policy("fake").generate(Dataset(ROWS).take(count), max_new_tokens=4)

    assert len(trace(flow(lambda: inner(3)), {})[0].calls) == 2


def test_the_runs_seed_decides_what_the_flow_draws():
    drawn = []

    @flow
    def draws() -> None:
        drawn.append((random.random(), float(np.random.rand())))
        Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=4)

    for seed in (3, 3, 4):
        trace(draws, {}, seed=seed)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


@flow
def helpers() -> None:
    policy, verifier, prompts = Policy("fake"), Reward(lambda s: s.k + s.num_tokens / 8), Dataset(ROWS)

    def roll() -> object:
        return policy.generate(prompts.take(2), n=2, max_new_tokens=8)

    for _ in steps(2):
        rolled = [roll() for _ in range(2)]
        for responses, rewards in zip(rolled, [verifier.score(r) for r in rolled], strict=True):  # type: ignore[arg-type]
            policy.update(responses, rewards)  # type: ignore[arg-type]


@flow
def two_policies() -> None:
    a, b, verifier, prompts = Policy("fake", name="a"), Policy("fake", name="b"), Reward(one), Dataset(ROWS)
    for step in steps(4):
        rows = prompts.take(2)
        from_a, from_b = a.generate(rows, n=2, max_new_tokens=8), b.generate(rows, n=3, max_new_tokens=8)
        a.update(from_b, verifier.score(from_b))
        b.update(from_a, verifier.score(from_a))
        a.update(prompts.all())
        if step == 1:
            break
    verifier.score(a.generate(prompts.all(), max_new_tokens=3))


@flow
def odd_prompts() -> None:
    texts = ["\"quoted\" 'single'", "line\nbreak\r\n\ttab", "\u2028 \U0001f600 é", "", " ", "\x00", "\ufeff\uffff"]
    policy, verifier = Policy("fake"), Reward(lambda s: float(len(s.prompt)))
    prompts = Dataset([{"prompt": text} for text in texts], shuffle=False)
    policy.update(prompts_of := policy.generate(prompts.take(7), n=2, max_new_tokens=5), verifier.score(prompts_of))


@flow
def late_binding() -> None:
    policy, prompts, bonus, extras = Policy("fake"), Dataset(ROWS), 1.0, [1.0]
    verifier = Reward(lambda s: bonus + sum(extras))
    first = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
    rewards = verifier.score(first)
    bonus = 10.0
    extras.append(5.0)
    policy.update(first, rewards)
    policy.update(first, verifier.score(first))


@flow
def mixed_values() -> None:
    @op()
    def mixed(sample: Sample) -> object:
        return (None, 1, 1.5, "text", [1, {"a": None}], True, np.int64(3), np.float32(0.5))[sample.id.prompt]

    @op()
    def kind(value: object) -> str:
        return type(value).__name__

    policy, prompts = Policy("fake"), Dataset(ROWS)
    kinds = list(kind(mixed(policy.generate(prompts.take(8), max_new_tokens=3))))  # type: ignore[call-overload]
    assert kinds == ["NoneType", "int", "float", "str", "list", "bool", "int", "float"]


@pytest.mark.parametrize("some", [helpers, two_policies, odd_prompts, late_binding, mixed_values], ids=lambda f: f.name)
def test_flows_as_people_write_them_have_one_answer(some):
    eager = run_eager(some, {}, SPEC)
    assert eager.error == ""
    for placement in ("split", "time-shared"):
        assert run_planned(some, {}, SPEC.model_copy(update={"placement": placement}), order_seed=3) == eager


def _other_rewards(policy: Policy, prompts: Dataset) -> None:
    responses, others = (policy.generate(prompts.take(2), n=2, max_new_tokens=4) for _ in range(2))
    policy.update(responses, Reward(one).score(others))


def _other_reference(policy: Policy, prompts: Dataset) -> None:
    reference = Reference(policy)
    responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
    others = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
    policy.update(responses, Reward(one).score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference.logprobs(others))


def _swapped(policy: Policy, prompts: Dataset) -> None:
    responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
    policy.update(Reward(one).score(responses), responses)


def _one_response(policy: Policy, prompts: Dataset) -> None:
    responses = policy.generate(prompts.take(2), max_new_tokens=4)
    policy.update(responses, Reward(one).score(responses))


def _metrics_scored(policy: Policy, prompts: Dataset) -> None:
    Reward(one).score(policy.update(prompts.take(2)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            _other_rewards,
            r"policy\.update got samples that policy\.generate made at .*, and rewards of others, which policy\.generate made",
        ),
        (_other_reference, r"policy\.update got samples that .*, and reference of others, which policy\.generate made"),
        (_swapped, r"policy\.update needs responses, or rows with a 'target', and got the rows of one\.score"),
        (_one_response, r"advantages='grpo' compares the responses to one prompt, and the rows of policy\.generate .* have one for each"),
        (_metrics_scored, r"one\.score needs responses, and got the value of policy\.update"),
        (lambda p, d: p.generate(d.take(1), n=4097, max_new_tokens=1), "n is 4097; a prompt has from 1 to 4096 responses"),
        (lambda p, d: p.generate(d.take(1), n=2.0, max_new_tokens=1), r"n is 2\.0; a prompt has from 1"),
        (lambda p, d: p.generate(d.take(1), max_new_tokens="3"), "max_new_tokens is '3'; it must be a whole number"),
        (lambda p, d: p.generate(d.take(1), max_new_tokens=3, temperature="hot"), "temperature is 'hot'; it must be a number"),
        (lambda p, d: p.update(d.take(1), loss=ppo_clip), "loss=<function ppo_clip at .* is no loss"),
        (lambda p, d: p.update(d.take(1), optimizer=1e-3), r"optimizer=0\.001 is no optimizer"),
        (lambda p, d: p.update(d.take(1), minibatch_size=1.5), r"minibatch_size is 1\.5; it must be a whole number, 1 or more"),
        (
            lambda p, d: p.update(Dataset([{"prompt": "x"}]).take(1)),
            r"needs responses, or rows with a 'target', and got the rows of dataset",
        ),
        (lambda p, d: list(steps(-1)), r"steps\(-1\): the number of steps is a whole number"),
        (lambda p, d: Policy("fake"), "this flow has two roles named 'policy'"),
        (lambda p, d: op(granularity="token"), r"@op\(granularity='token'\); known are sample, group, minibatch, batch"),
        (lambda p, d: op()(one)(3), "the op one got a int; it needs rows"),
    ],
)
def test_what_a_call_can_not_be_given_is_refused_at_the_flows_line(wrong, message):
    with pytest.raises(FlowError, match=message) as caught:
        trace(flow(lambda: wrong(Policy("fake"), Dataset(ROWS))), {}, assume=0.0)
    assert f"{Path(__file__).name}:" in caught.value.where
    assert "<string>" not in caught.value.where


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s: 10**400, "returned 1000"),
        (lambda s: 1j, "returned complex: 1j"),
        (lambda s: np.complex64(1j), "returned .*1j"),
        (lambda s: None, "returned NoneType: None"),
        (lambda s: np.nan, "returned nan"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused_in_both_modes(function, message):
    @flow
    def judged() -> None:
        Reward(function, name="judge").score(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=3))

    eager, planned = run_eager(judged, {}, SPEC), run_planned(judged, {}, SPEC, order_seed=1)
    assert eager.error == planned.error
    with pytest.raises(ValueError, match=f"RewardError: the reward judge {message}"):
        raise ValueError(eager.error)


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float32(1), np.int8(1), 1])
def test_a_reward_may_be_any_real_number(value):
    @flow
    def judged() -> None:
        Reward(lambda s: value, name="judge").score(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=3))

    answer = run_eager(judged, {}, SPEC)
    assert answer.error == ""
    assert list(answer.rewards.values()) == [1.0]


def test_a_torch_that_another_thread_is_about_to_load_is_nobodys_yet(monkeypatch):
    half = types.ModuleType("torch")
    half.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]  # As importlib says it.
    monkeypatch.setitem(sys.modules, "torch", half)
    seed_everything(1)
    with randomness_kept():
        pass


def test_a_file_that_was_edited_within_a_second_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, docs = tmp_path / "edited.py", []
    for text in ("one", "two"):
        file.write_text(f"from m2flow import flow\n\n@flow\ndef edited():\n    '{text}'\n")
        os.utime(file, (1e9, 1e9))
        docs.append(load_flow(str(file)).doc)
    assert docs == ["one", "two"]
