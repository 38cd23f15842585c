"""Rollout policies in the live scheduler: they choose order, place and time, so every answer is the eager one.

Real scheduler, real workers, fake engines in exact integers; programs, clusters, policies and orders of events are drawn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from machine_lines import random_walk

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.engines.contract import Request
from m2flow.errors import EngineError, SpecError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import PREFILL
from m2flow.micro.scheduler.scheduling_policy_dispatch import PolicyDispatch
from m2flow.rollout_scheduling.decode_model import DecodeModel
from m2flow.rollout_scheduling.lengths import StepLengths
from m2flow.rollout_scheduling.policies import POLICIES, make_policy
from m2flow.rollout_scheduling.policy import Seen
from m2flow.rollout_scheduling.predictors import EarlierSteps, Learned, Siblings
from m2flow.rollout_scheduling.study import play
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing import fakes
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.random_programs import clusters, difference, policies, programs, scheduled, timed_programs
from m2flow.testing.scheduler_model import Model
from m2flow.testing.world import run_eager, run_planned

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(5)]
ADVERSARY = f"{Path(fakes.__file__)}:Adversary:seed={{seed}}"
NUM_CASES = 12
TIMES_LONG = 20
predictors = st.sampled_from(["siblings", "earlier-steps", "prompt-buckets"])


def num_digits(sample: Sample) -> float:
    return float(sum(c.isdigit() for c in str(sample.text)))


def many(config: pytest.Config) -> settings:
    """How many cases a property is tried on."""
    num_cases = NUM_CASES * (TIMES_LONG if config.getoption("--long") else 1)
    return settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])


pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


@flow
def several_epochs(num_steps: int = 3, batch: int = 4, n: int = 3) -> None:
    """Prompts come again: policies learn from their earlier answers."""
    policy, verifier = Policy("fake"), Reward(num_digits)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=16)
        policy.update(responses, verifier.score(responses))


@pytest.mark.timeout(0)
def test_a_run_under_any_policies_equals_the_eager_one(request):
    @many(request.config)
    @given(clusters(), policies(), predictors, st.integers(0, 2**30))
    def holds(spec, names, predictor, order_seed):
        eager = run_eager(several_epochs, {}, spec)
        assert eager.error == ""
        assert run_planned(several_epochs, {}, scheduled(spec, names, predictor), order_seed=order_seed) == eager

    holds()


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_alone_gives_the_eager_answer(name):
    spec = ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=3, max_running=2),
        train=TrainSpec(engine="fake"),
    )
    eager = run_eager(several_epochs, {}, spec)
    assert run_planned(several_epochs, {}, scheduled(spec, (name,)), order_seed=1) == eager


def test_policies_are_told_how_hard_the_dataset_says_that_prompts_are(monkeypatch):
    told = []
    begin = Siblings.begin

    def listen(self: Siblings, seen: Seen) -> None:
        told.append(list(seen.difficulties))
        begin(self, seen)

    monkeypatch.setattr(Siblings, "begin", listen)

    @flow
    def graded(num_steps: int = 2) -> None:
        policy, verifier = Policy("fake"), Reward(num_digits)
        prompts = Dataset([row | {"level": i % 2} for i, row in enumerate(ROWS)], shuffle=False)
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
            policy.update(responses, verifier.score(responses))

    spec = ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", policy=("longest-first",), difficulty="level"),
        train=TrainSpec(engine="fake"),
    )
    assert run_planned(graded, {}, spec, order_seed=1) == run_eager(graded, {}, spec)
    assert told == [["0", "1", "0"], ["1", "0", "0"]]


def prefilled(spec: ClusterSpec, names: tuple[str, ...]) -> ClusterSpec:
    """The cluster with these policies, by lengths that are predicted from embeddings."""
    spec = scheduled(spec, names, "learned")
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"difficulty": PREFILL})})


THREE = ClusterSpec(
    placement="split", cores=2, device="cpu", rollout=RolloutSpec(engine="fake", workers=3, max_running=2), train=TrainSpec(engine="fake")
)


def test_policies_are_told_the_embeddings_of_all_prompts_before_the_first_sample_begins(monkeypatch):
    """They are by the weights that the step has, and each prompt is embedded once."""
    told, asked = [], Counter()
    begin, embed, add = Learned.begin, FakeRollout.embeddings, FakeRollout.add

    def listen(self: Learned, seen: Seen) -> None:
        told.append([json.loads(text) for text in seen.difficulties])
        begin(self, seen)

    def count(self: FakeRollout, requests: Sequence[Request]) -> object:
        asked.update([(self.version, str(request.prompt)) for request in requests])
        return embed(self, requests)

    def check(self: FakeRollout, requests: Sequence[Request]) -> None:
        assert len(told) == self.version + 1, "a sample begins before the policy knows the prompts"
        add(self, requests)

    monkeypatch.setattr(Learned, "begin", listen)
    monkeypatch.setattr(FakeRollout, "embeddings", count)
    monkeypatch.setattr(FakeRollout, "add", check)
    planned = run_planned(several_epochs, {"num_steps": 3}, prefilled(THREE, ("longest-first",)), order_seed=1)
    monkeypatch.undo()
    assert planned == run_eager(several_epochs, {"num_steps": 3}, THREE)
    assert [len(of_step) for of_step in told] == [4, 4, 4]
    lengths = [sorted(len(prompt) for version, prompt in asked.elements() if version == step) for step in range(3)]
    assert [sorted(num_tokens for num_tokens, _ in of_step) for of_step in told] == lengths


@flow
def digits(num_steps: int = 3) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(num_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 100000}="} for i in range(72)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(24), n=2, max_new_tokens=8)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_whose_prompts_are_embedded_gives_the_same_samples(monkeypatch, deterministic):
    """Bit by bit with `--deterministic`; otherwise what runs together differs with the order, and with it the last bits."""
    told = []
    begin = Learned.begin

    def listen(self: Learned, seen: Seen) -> None:
        told.append([json.loads(text) for text in seen.difficulties])
        begin(self, seen)

    spec = scheduled(
        THREE.model_copy(update={"rollout": RolloutSpec(workers=2, max_running=16), "train": TrainSpec()}), ("longest-first",), "learned"
    )
    without = run_planned(digits, {}, spec, order_seed=4, deterministic=deterministic)
    monkeypatch.setattr(Learned, "begin", listen)
    embedded = run_planned(digits, {}, prefilled(spec, ("longest-first",)), order_seed=4, deterministic=deterministic)
    assert not without.error
    assert embedded.samples == without.samples
    if deterministic:
        assert embedded == without
    assert [np.array(of_step).shape for of_step in told] == [(24, 32)] * 3
    assert np.abs(np.array(told[1])).max() > 0.1


def test_an_engine_that_fails_to_embed_prompts_costs_the_prediction_and_no_sample(monkeypatch, capsys):
    def refuse(self: FakeRollout, requests: Sequence[Request]) -> object:
        raise EngineError("no head")

    monkeypatch.setattr(FakeRollout, "embeddings", refuse)
    planned = run_planned(several_epochs, {}, prefilled(THREE, ("longest-first",)), order_seed=2)
    assert planned == run_eager(several_epochs, {}, THREE)
    assert "without embeddings of 2 prompts: no head" in capsys.readouterr().out


@pytest.mark.timeout(0)
def test_any_program_whose_prompts_are_embedded_equals_eager(request):
    @many(request.config)
    @given(st.one_of(programs(), timed_programs(), programs(fails=True)), clusters(), policies(), st.integers(0, 2**30))
    def holds(program, spec, names, order_seed):
        assert difference(program, prefilled(spec, names or ("longest-first",)), order_seed=order_seed) is None

    holds()


@pytest.mark.timeout(0)
def test_any_program_under_any_policies_equals_eager(request):
    @many(request.config)
    @given(programs(), clusters(), policies(), st.integers(0, 2**30))
    def holds(program, spec, names, order_seed):
        assert difference(program, scheduled(spec, names), order_seed=order_seed) is None

    holds()


@pytest.mark.timeout(0)
def test_with_older_weights_and_late_samples_too_and_versions_stay_within_their_bound(request):
    @many(request.config)
    @given(timed_programs(), clusters(), policies(), st.integers(0, 2**30))
    def holds(program, spec, names, order_seed):
        assert difference(program, scheduled(spec, names), order_seed=order_seed) is None

    holds()


@pytest.mark.timeout(0)
def test_a_program_that_fails_does_so_as_eager_does(request):
    @many(request.config)
    @given(programs(fails=True), clusters(), policies(), st.integers(0, 2**30))
    def holds(program, spec, names, order_seed):
        assert difference(program, scheduled(spec, names), order_seed=order_seed) is None

    holds()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("longest-frist",), "Did you mean 'longest-first'"),
        (("split", "lpt"), "split and lpt each hand out"),
        (("admission:goal=1",), "It has target"),
        (("admission:target=much",), "no number"),
    ],
)
def test_policies_that_do_not_exist_or_do_not_go_together_are_refused_before_the_run(names, said):
    graph, models, _ = trace(several_epochs, {}, seed=0, assume=0.0)
    with pytest.raises(SpecError) as caught:
        lower(graph, models, ClusterSpec(rollout=RolloutSpec(engine="fake", policy=names), train=TrainSpec(engine="fake")))
    assert said in str(caught.value)


def test_the_plan_says_which_policies_a_rollout_goes_by():
    graph, models, _ = trace(several_epochs, {}, seed=0, assume=0.0)
    spec = ClusterSpec(rollout=RolloutSpec(engine="fake", policy=("oldest-first", "longest-first")), train=TrainSpec(engine="fake"))
    assert "rollout policy: oldest-first, longest-first; lengths by siblings" in str(lower(graph, models, spec))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"policy": ("longest-first",), "difficulty": "lvel"}, "no prompts have such a column; there are prompt"),
        ({"difficulty": "prompt"}, ""),
        ({"difficulty": "lvel"}, "no prompts have such a column; there are prompt"),
        ({"policy": ("longest-first",), "predictor": "earlier-steps", "difficulty": "prompt"}, "'earlier-steps' does not go by it"),
        ({"policy": ("longest-first",), "difficulty": "prompt"}, ""),
        ({"difficulty": PREFILL, "predictor": "learned"}, ""),
        ({"difficulty": PREFILL}, "the predictor 'siblings' does not go by it, 'learned' does"),
        ({"difficulty": PREFILL, "predictor": "learned", "engine": "sglang"}, "'sglang' computes no embeddings of prompts, embedded does"),
        ({"difficulty": PREFILL, "predictor": "learned", "engine": "vllm"}, "'vllm' computes no embeddings of prompts, embedded does"),
    ],
)
def test_the_plan_says_if_the_column_for_difficulty_changes_nothing(said, why):
    graph, models, _ = trace(several_epochs, {}, seed=0, assume=0.0)
    spec = ClusterSpec(rollout=RolloutSpec(**{"engine": "fake"} | said), train=TrainSpec(engine="fake"))
    plan = lower(graph, models, spec)
    noted = [note for note in plan.notes if "rollout.difficulty" in note]
    assert [why in note for note in noted] == [True] * bool(why)
    assert plan.difficulty == ("" if why and said["difficulty"] == PREFILL else said["difficulty"])


@flow
def says_prefill() -> None:
    """A column has the name of what is none."""
    policy, verifier = Policy("fake"), Reward(num_digits)
    responses = policy.generate(Dataset([row | {"prefill": "hard"} for row in ROWS]).take(3), n=2, max_new_tokens=8)
    policy.update(responses, verifier.score(responses))


def test_a_column_named_prefill_is_not_read_and_the_plan_says_so():
    graph, models, _ = trace(says_prefill, {}, seed=0, assume=0.0)
    spec = ClusterSpec(rollout=RolloutSpec(engine="fake", predictor="learned", difficulty=PREFILL), train=TrainSpec(engine="fake"))
    (note,) = [note for note in lower(graph, models, spec).notes if "rollout.difficulty" in note]
    assert "their column of that name is not read" in note


def test_the_policies_of_the_document_run_in_the_study_and_live(tmp_path):
    text = Path("docs/guide/rollout-scheduling.md").read_text()
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "(SchedulingPolicy)" in block]
    names = []
    for number, block in enumerate(blocks):
        (name,) = re.findall(r"class (\w+)", block)
        (tmp_path / f"own{number}.py").write_text(block)
        names.append(f"{tmp_path}/own{number}.py:{name}")
    assert [name.rpartition(":")[2] for name in names] == ["ShortPromptsFirst", "NewestFirst"]
    spec = ClusterSpec(placement="split", cores=2, device="cpu", rollout=RolloutSpec(engine="fake", workers=2, max_running=2))
    spec = spec.model_copy(update={"train": TrainSpec(engine="fake")})
    eager = run_eager(several_epochs, {}, spec)
    for name in names:
        played = play(
            StepLengths.of([30, 10, 20], [[3, 4], [5, 6], [7, 8]]), make_policy(name, EarlierSteps()), DecodeModel(1.0, 0.1, 1), 1
        )
        first, second = ([2, 3], [0, 1]) if "Short" in name else ([4, 5], [0, 1])
        assert max(played.finish_s[first]) < min(played.finish_s[second])
        assert run_planned(several_epochs, {}, scheduled(spec, (name, "admission"))) == eager


@pytest.mark.parametrize("dies", [False, True], ids=["all workers stay", "workers die and come back"])
@pytest.mark.parametrize(
    "name", ["longest-first", "oldest-first+adaptive-concurrency:start=1", "split+repack", "probe+admission", ADVERSARY]
)
def test_every_rule_of_the_scheduler_holds_under_a_policy_with_messages_late_and_twice(request, monkeypatch, name, dies):
    if name == ADVERSARY:  # It says another thing whenever it is asked.
        monkeypatch.setattr(Model, "_check_that_all_were_asked", lambda self: None)
    num_events, walks = 0, 0
    while num_events < (100_000 if request.config.getoption("--long") else 400):
        num_events += random_walk(walks, 60, dies=dies, policies=name.format(seed=walks))
        walks += 1


@pytest.mark.parametrize("dies", [False, True], ids=["all workers stay", "workers die and come back"])
def test_every_rule_of_the_scheduler_holds_where_prompts_are_embedded_first(request, dies):
    num_events, walks = 0, 0
    while num_events < (100_000 if request.config.getoption("--long") else 400):
        num_events += random_walk(walks, 60, dies=dies, policies="longest-first+admission", embeds=True)
        walks += 1


@pytest.mark.parametrize(("policies", "seed"), [("auto", 5212), ("lpt", 5623)])
def test_rows_that_come_one_by_one_are_dealt_also_to_a_worker_that_took_all_it_had(policies, seed):
    random_walk(seed, 180, policies=policies)


def test_workers_are_asked_again_when_late_samples_are_dropped_and_the_others_are_dealt_anew():
    random_walk(1116, 60, policies="auto", embeds=True)  # One of two instances had the rest in its queue, and could not take it yet.


def test_samples_move_while_they_run_and_are_what_they_would_have_been(monkeypatch):
    moved: list[bool] = []
    preempted = PolicyDispatch.preempted

    def counted(self: PolicyDispatch, row: int) -> object:
        to = preempted(self, row)
        moved.append(to is not None)
        return to

    monkeypatch.setattr(PolicyDispatch, "preempted", counted)
    spec = ClusterSpec(placement="split", cores=2, device="cpu", rollout=RolloutSpec(engine="fake", workers=3, max_running=4))
    spec = spec.model_copy(update={"train": TrainSpec(engine="fake")})
    eager = run_eager(several_epochs, {}, spec)
    for seed in range(3):
        assert run_planned(several_epochs, {}, scheduled(spec, (ADVERSARY.format(seed=seed),)), order_seed=seed) == eager
    assert sum(moved) > 10
