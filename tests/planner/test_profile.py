"""Profiles: constants come back out of the times that they made, and what is no profile is refused. No test measures time."""

import contextlib
import json
import math
import random
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from modelled_problems import simple
from profiled_runs import DECODE, PLAN, PROFILE, UPDATE, write_run
from tiny_models import DIGITS

from m2flow.cli.main import cli
from m2flow.errors import SpecError
from m2flow.macro.flow import load_flow
from m2flow.macro.graph import Call, Observation
from m2flow.macro.session import Backend
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.micro.records.ledger import Ledger, read_lengths
from m2flow.observe.spans import Recorder
from m2flow.observe.store import TraceStore
from m2flow.planner.measuring import Measurement, Observed, measured_so_far, profile_of
from m2flow.planner.planning import question_of
from m2flow.planner.profiles import (
    MeasuredSync,
    Profile,
    Quality,
    fit,
    model_description,
    read_profile,
    robust_mean,
)
from m2flow.recipe import Model, Sampling
from m2flow.runner.probing import ROUNDS, ProbeBackend, setup_rows
from m2flow.runs.cluster_file import load_cluster
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec

ROLLOUT, TRAIN, REFERENCE = EngineId("policy", "rollout"), EngineId("policy", "train"), EngineId("reference", "train")


# Fitting


@given(
    fixed=st.floats(1e-4, 1e-2),
    each=st.floats(1e-5, 1e-3),
    token=st.floats(1e-8, 1e-6),
    seed=st.integers(0, 2**32 - 1),
)
def test_constants_come_back_from_noisy_and_interrupted_times(fixed: float, each: float, token: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.integers(1, 257, 500)
    sizes = np.stack([np.ones(500), samples, samples * rng.integers(10, 200, 500)], 1)
    seconds = sizes @ [fixed, each, token] * (1 + rng.normal(0, 0.03, 500).clip(-0.1, 0.1))
    seconds[rng.random(500) < 0.08] *= 20  # Something else had the processor.
    constants, quality = fit(sizes, seconds)
    for row in ([1, 16, 1600], [1, 64, 3000], [1, 256, 40_000]):
        assert np.dot(row, constants) == pytest.approx(np.dot(row, [fixed, each, token]), rel=0.2)
    assert quality.num == 500
    assert quality.error < 0.1


def test_a_term_that_says_nothing_is_zero_and_none_is_negative() -> None:
    rng = np.random.default_rng(0)
    sizes = np.stack([np.ones(50), np.arange(50), rng.integers(0, 50, 50)], 1).astype(float)
    constants, _ = fit(sizes, (1.0 + 0.1 * np.arange(50)) * (1 + rng.normal(0, 0.01, 50)))
    assert constants.tolist() == [pytest.approx(1.0, rel=0.05), pytest.approx(0.1, rel=0.05), 0.0]
    falling, _ = fit(sizes[:, :2], 10.0 - 0.1 * np.arange(50))
    assert (falling >= 0).all()


def test_of_work_that_was_always_of_one_size_the_time_grows_with_the_work() -> None:
    rng = np.random.default_rng(0)
    sizes = np.stack([np.ones(20), np.full(20, 8000.0)], 1)
    constants, _ = fit(sizes, 2.0 + rng.normal(0, 0.2, 20))
    assert constants[0] == 0.0
    assert constants[1] * 8000 == pytest.approx(2.0, rel=0.1)


def test_nothing_measured_gives_zeros_and_a_quality_that_says_so() -> None:
    constants, quality = fit(np.zeros((0, 2)), [])
    assert constants.tolist() == [0.0, 0.0]
    assert quality == Quality(0, 0.0, 0.0)
    assert robust_mean([]) == 0.0


# From a trace


def test_a_trace_gives_back_the_constants_that_made_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    profile = profile_of("grpo", {}, [Measurement(PLAN, ClusterSpec(), Observed.of_run(tmp_path))], gather_s=0.02, load=0.0)
    rollout, train = profile.engine("policy", "rollout", 2), profile.engine("policy", "train", 2)
    assert rollout is not None
    assert rollout.decode is not None
    for name in ("step_s", "sample_s", "context_s", "prefill_token_s", "enter_s", "leave_s", "handover_s"):
        assert getattr(rollout.decode, name) == pytest.approx(getattr(DECODE, name), rel=0.02), name
    assert rollout.decode.quality.r2 > 0.999
    assert rollout.decode.most_running <= 32
    assert train is not None
    assert train.update is not None
    for name in ("fixed_s", "token_s", "token2_s"):
        assert getattr(train.update, name) == pytest.approx(getattr(UPDATE, name), rel=0.05), name
    assert train.update.sample_s < 0  # Of a prompt that four share, each has but a quarter.
    assert (train.optimizer_s, train.come_s) == (pytest.approx(0.002), pytest.approx(0.001))
    assert profile.hop_s == pytest.approx(PROFILE.hop_s, rel=0.01)
    assert profile.turn_s == pytest.approx(PROFILE.turn_s, rel=0.01)
    assert profile.syncs == (MeasuredSync("policy", "same process", 4_000_000, 0.0, pytest.approx(0.006), 6),)
    score = profile.function("good.score")
    assert score is not None
    assert score.num == 45
    assert score.quantiles_s[0] >= 1e-4


def test_a_run_that_goes_on_is_measured_in_the_pools_of_its_plan_once_its_engines_have_worked(tmp_path: Path) -> None:
    choice = simple()
    plan, pool = msgspec.structs.replace(PLAN, choice=choice), choice.placements[0].pool
    (tmp_path / "begun").mkdir()
    begun = Ledger(tmp_path / "begun" / "ledger.db")
    begun.open()
    begun.close()
    assert measured_so_far("grpo", {}, plan, ClusterSpec(), tmp_path / "begun", gather_s=0.02) is None
    write_run(tmp_path)
    found = measured_so_far("grpo", {}, plan, ClusterSpec(), tmp_path, gather_s=0.02)
    assert found is not None
    assert found.engine("policy", "rollout", 2) is None
    assert found.engine("policy", "rollout", 2, pool=pool) is not None
    both = PROFILE.updated(found)
    assert {(engine.name, engine.pool) for engine in both.engines} == {
        (name, there) for name in ("policy.rollout", "policy.train") for there in ("", pool)
    }
    assert both.function("good.score") == found.function("good.score")
    assert both.hop_s == found.hop_s
    assert both.startup_s == PROFILE.startup_s


def test_only_steps_of_the_flow_s_own_lengths_say_how_long_answers_are(tmp_path: Path) -> None:
    write_run(tmp_path)
    every, some = Observed.of_run(tmp_path), Observed.of_run(tmp_path, natural_steps=[2])
    assert 0 < len(some.groups) < len(every.groups)
    assert all(len(answers) == 4 for _, answers in every.groups)


def test_work_beside_another_engine_is_told_from_work_alone(tmp_path: Path) -> None:
    rollout, train = Recorder("rollout-0"), Recorder("train-0")
    rollout.anchor_ns = train.anchor_ns
    (tmp_path / "trace").mkdir()
    Ledger(tmp_path / "ledger.db").open()
    rng, now = random.Random(1), 10**9
    for number in range(60):
        tokens, is_beside = rng.randint(10, 400), number % 3 == 0
        took = round((0.01 + 1e-4 * tokens) * (1.5 if is_beside else 1.0) * 1e9)
        train.add("train.accumulate", now, now + took, call=2, step=number // 30, label="policy.update", num_samples=1, num_tokens=tokens)
        if is_beside:
            rollout.add("rollout.step", now - 10**5, now + took + 10**5, num_samples=1, label="policy")
        now += took + 10**7
    with TraceStore(tmp_path) as store:
        store.append(rollout.drain())
        store.append(train.drain())
    plan = msgspec.structs.replace(
        PLAN, workers=(WorkerPlan("train-0", "cpu", 1, (EngineSlot("policy", "train", "embedded"),)),), syncs=()
    )  # fmt: skip
    profile = profile_of("grpo", {}, [Measurement(plan, ClusterSpec(), Observed.of_run(tmp_path))], gather_s=0.0, load=0.0)
    engine = profile.engine("policy", "train", 1)
    assert engine is not None
    assert engine.slowdown["rollout"] == pytest.approx(1.5, rel=0.05)


def measured(run_dir: Path, recorders: list[Recorder], worker: WorkerPlan, natural_steps: list[int] | None = None) -> Profile:
    (run_dir / "trace").mkdir()
    Ledger(run_dir / "ledger.db").open()
    with TraceStore(run_dir) as store:
        for recorder in recorders:
            store.append(recorder.drain())
    observed = Observed.of_run(run_dir, natural_steps=natural_steps)
    plan = msgspec.structs.replace(PLAN, workers=(worker,), syncs=())
    return profile_of("grpo", {}, [Measurement(plan, ClusterSpec(), observed)], gather_s=0.0, load=0.0)


TRAINER = WorkerPlan("train-0", "cpu", 1, (EngineSlot("policy", "train", "embedded"),))


def test_constants_give_the_time_of_the_flow_s_own_work_where_work_of_set_sizes_is_slower(tmp_path: Path) -> None:
    train, rng, now = Recorder("train-0"), random.Random(1), 10**9
    for number in range(60):
        step, tokens = number // 5, rng.randint(10, 400)
        took = round((0.01 + 1e-4 * tokens) * (1.0 if step % 4 == 1 else 1.2) * 1e9)
        train.add("train.accumulate", now, now + took, call=step, step=step, label="policy.update", num_samples=1, num_tokens=tokens)
        now += took + 10**8
    update = measured(tmp_path, [train], TRAINER, [0, 1, 4, 5, 8, 9]).engines[0].update
    assert update is not None
    for tokens in (50, 200, 400):
        assert update.fixed_s + tokens * (update.sample_s / tokens + update.token_s) == pytest.approx(0.01 + 1e-4 * tokens, rel=0.03)


def test_what_a_trainer_prepares_after_a_function_has_sent_it_its_rows_is_measured(tmp_path: Path) -> None:
    train, functions, now = Recorder("train-0"), Recorder("functions-0"), 10**9
    functions.anchor_ns = train.anchor_ns
    for step in range(20):
        functions.add("function.call", now, now + 10**6, call=1, step=step, label="score", num_samples=4)
        functions.add("send", now + 10**6, now + 11 * 10**5, num_samples=4, num_bytes=100, label="train-0")
        now += 10**6 + (3 + step % 2) * 10**6
        took = (10 + 10 * (step % 2)) * 10**6
        tokens = 100 + 100 * (step % 2)
        train.add("train.accumulate", now, now + took, call=2, step=step, label="policy.update", num_samples=4, num_tokens=tokens)
        now += took + 10**8
    profile = measured(tmp_path, [train, functions], TRAINER)
    update = profile.engines[0].update
    assert update is not None
    assert update.fixed_s + 4 * update.sample_s == pytest.approx(0.0035 - profile.hop_s, rel=0.1)


def test_what_passes_between_tasks_of_a_function_that_wait_is_a_task_s_cost_and_what_it_waits_for_is_not(tmp_path: Path) -> None:
    functions, now = Recorder("functions-0"), 10**9
    for number in range(40):
        functions.add("function.call", now, now + 10**5, call=1, step=number // 20, label="score", num_samples=1, unit_us=[100])
        pause = 3 * 10**5 if number % 4 else 9 * 10**6
        if not number % 4:
            functions.add("wait", now + 2 * 10**5, now + pause, label="for a task")
        now += 10**5 + pause
    (score,) = measured(tmp_path, [functions], TRAINER).functions
    assert score.task_s == pytest.approx(3e-4, rel=0.1)


# The file


def test_a_profile_survives_its_file_and_is_found_in_its_run_directory(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE
    assert read_profile(tmp_path) == PROFILE


def test_what_is_no_profile_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(SpecError, match="can't be read: No such file"):
        read_profile(file)
    for text, said in (
        ("", "no profile"),
        ("[]", "no profile"),
        ('{"version": 1}', "no profile"),
        ('{"engines": 1, "version": 1}', "no profile"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=said):
            read_profile(file)
    record = json.loads(msgspec.json.encode(PROFILE))
    file.write_text(json.dumps(record | {"version": 99}))
    with pytest.raises(SpecError, match="format 99"):
        read_profile(file)
    del record["hop_s"]
    file.write_text(json.dumps(record))
    with pytest.raises(SpecError, match="damaged") as refusal:
        read_profile(file)
    assert "Measure again" in refusal.value.now


def test_a_profile_of_another_model_or_engine_is_refused() -> None:
    same = Model("models/small")
    PROFILE.check({"policy": same}, ClusterSpec())
    with pytest.raises(SpecError, match=r"for policy: small \(lm, float32\), not large"):
        PROFILE.check({"policy": Model("models/large")}, ClusterSpec())
    with pytest.raises(SpecError, match="rollout engine 'embedded', not 'fake'"):
        PROFILE.check({"policy": same}, ClusterSpec(rollout=RolloutSpec(engine="fake")))


def test_a_profile_of_another_machine_says_how_it_differs() -> None:
    assert PROFILE.machine_changes("cpu") == []
    machine = msgspec.structs.replace(PROFILE.machine, cores=99, versions={**PROFILE.machine.versions, "torch": "0.1"})
    told = msgspec.structs.replace(PROFILE, machine=machine).machine_changes("cuda:0")
    assert any("99" in line for line in told)
    assert any(line.startswith("torch was 0.1") for line in told)
    assert any(line == "the device was cpu and is cuda:0" for line in told)


def test_a_profile_of_another_flow_is_doubted_and_one_by_hand_is_not() -> None:
    (doubt,) = PROFILE.doubts(ClusterSpec(device="cpu"), "another")
    assert PROFILE.flow in doubt
    assert "another" in doubt
    assert Profile().doubts(ClusterSpec(device="cpu"), "another") == []


def test_a_profile_of_another_model_than_the_shapes_say_is_refused() -> None:
    """Its times would be those of a model that is a thousand times as small."""
    digits = Model(str(DIGITS), init="random")
    found = msgspec.structs.replace(PROFILE, models={"policy": model_description(digits)})
    found.check({"policy": digits}, ClusterSpec())
    larger = ClusterSpec(shapes={"policy": "Qwen2.5-7B"})
    with pytest.raises(SpecError, match="another model for policy than `shapes` says: digits"):
        found.check({"policy": digits}, larger)
    elsewhere = larger.model_copy(update={"pools": {"h100s": PoolSpec(device="h100")}})
    found.check({"policy": digits}, elsewhere)  # Nothing there is timed by it.


def test_a_profile_says_nothing_about_pools_elsewhere() -> None:
    assert PROFILE.doubts(ClusterSpec(device="cpu"), PROFILE.flow) == []
    (doubt,) = PROFILE.doubts(ClusterSpec(pools={"h100s": PoolSpec(device="h100")}), PROFILE.flow)
    assert "says nothing about h100s" in doubt


# The command

FLOW = """
from m2flow import Dataset, Policy, Reward, flow, steps

def good(sample):
    return float(len(sample.text))

@flow
def tiny(num_steps: int = 13):
    policy = Policy("models/tiny")
    reward = Reward(good)
    prompts = Dataset([{"prompt": str(i)} for i in range(500)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=16)
        policy.update(responses, reward.score(responses))
"""


def test_profile_measures_a_flow_on_fakes_in_both_placements_and_writes_it_down(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(FLOW)
    spec = tmp_path / "spec.yaml"
    spec.write_text("device: cpu\ncores: 2\nrollout: {engine: fake}\ntrain: {engine: fake, token_budget: 128}\n")
    out = tmp_path / "tiny.json"
    arguments = ["profile", str(tmp_path / "tiny.py"), "--cluster", str(spec), "--runs-dir", str(tmp_path / "runs"), "--out", str(out)]
    arguments += ["--seconds", "1000"]  # However busy the machine is.
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert "policy.rollout[2].step_s" in done.output
    assert "measured: " in done.output
    profile = read_profile(out)
    assert {(e.name, e.num_devices) for e in profile.engines} == {(f"policy.{k}", n) for k in ("rollout", "train") for n in (1, 2)}
    assert {sync.transport for sync in profile.syncs} == {"same process", "shared memory"}
    assert [found.call for found in profile.functions] == ["good.score"]
    assert profile.startup_s > 0
    assert profile.models == {"policy": model_description(Model("models/tiny"))}
    assert {len(answers) for answers in profile.responses} == {4}
    (first, *_) = sorted((tmp_path / "runs").iterdir())
    samples: dict[int, list[int]] = {}
    for _, _, step, _, num_generated, _ in read_lengths(first):
        samples.setdefault(step, []).append(num_generated)
    assert json.loads((first / "probe.json").read_text()) == {"natural_steps": [n for n, r in enumerate(ROUNDS) if r.is_natural]}
    for step, planned in enumerate(ROUNDS):
        assert len(samples[step]) == 4 * max(1, round(8 * planned.share))
        assert planned.length is None or set(samples[step]) == {round(16 * planned.length)}
    again = CliRunner().invoke(cli, ["profile", str(tmp_path / "tiny.py"), "--from", str(first), "--json"])
    assert again.exit_code == 0, again.output
    (tmp_path / "other.py").write_text(FLOW.replace("def tiny", "def other"))
    refused = CliRunner().invoke(cli, ["profile", str(tmp_path / "other.py"), "--from", str(first)])
    assert refused.exit_code == 2
    assert f"{first} is a run of tiny, not of other" in refused.output
    refitted = read_profile(first)
    measured, before = refitted.engine("policy", "rollout", 2), profile.engine("policy", "rollout", 2)
    assert measured is not None
    assert before is not None
    assert measured.decode is not None
    assert before.decode is not None
    assert (measured.decode.sample_s, measured.decode.quality) == (before.decode.sample_s, before.decode.quality)


def test_a_flow_that_keeps_groups_by_their_answers_is_measured_too(tmp_path: Path) -> None:
    kept = """
def differ(group):
    return int(group[0].prompt) % 2 == 0 and len({len(sample.text) for sample in group}) > 1

@flow"""
    generate = "responses = policy.generate(prompts, n=4, max_new_tokens=16, count=8, score=reward, keep=differ)"
    text = FLOW.replace("\n@flow", kept).replace("responses = policy.generate(prompts.take(8), n=4, max_new_tokens=16)", generate)
    text = text.replace("reward.score(responses)", "responses.reward").replace("range(500)]", "range(5000)], shuffle=False")
    (tmp_path / "tiny.py").write_text(text)
    spec = tmp_path / "spec.yaml"
    spec.write_text("device: cpu\ncores: 2\nrollout: {engine: fake}\ntrain: {engine: fake, token_budget: 128}\n")
    out = tmp_path / "tiny.json"
    arguments = ["profile", str(tmp_path / "tiny.py"), "--cluster", str(spec), "--runs-dir", str(tmp_path / "runs"), "--out", str(out)]
    done = CliRunner().invoke(cli, [*arguments, "--seconds", "1000"])
    assert done.exit_code == 0, done.output
    draws = read_profile(out).draws_per_group
    assert 47 / 24 <= draws <= 60 / 24  # Each other prompt, and seldom four answers of one length, before the first step of set lengths.
    graph, models, _ = trace(load_flow(str(tmp_path / "tiny.py")), {}, steps=3)
    question = question_of(graph, models, load_cluster(spec).model_copy(update={"shapes": {"policy": "Qwen2.5-0.5B"}}), profile=out)
    assert question.workload.call("policy.generate").num_prompts == math.ceil(8 * draws)
    assert question.costs.draws_per_group() == draws
    for run in sorted((tmp_path / "runs").iterdir()):
        with contextlib.closing(sqlite3.connect(run / "ledger.db")) as ledger:
            trained = ledger.execute("SELECT COUNT(*) FROM consumption GROUP BY update_call ORDER BY update_call").fetchall()
        assert [count for (count,) in trained] == [4 * max(1, round(8 * planned.share)) for planned in ROUNDS]


def test_a_probe_of_fewer_rows_keeps_pairs_together(tmp_path: Path) -> None:
    pairs = "Dataset([{'prompt': 'a', 'target': 'b', 'rejected': 'c'}] * 500).pairs()"
    text = (
        FLOW.replace('Dataset([{"prompt": str(i)} for i in range(500)])', pairs)
        .replace("Policy,", "Policy, Reference,")
        .replace("flow, steps", "dpo, flow, steps")
    )
    text = text.replace("responses = policy.generate(prompts.take(8), n=4, max_new_tokens=16)", "pass")
    text = text.replace("reward = Reward(good)", "reference = Reference(policy)")
    text = text.replace(
        "policy.update(responses, reward.score(responses))", "policy.update(prompts.take(8), loss=dpo(), reference=reference)"
    )
    (tmp_path / "tiny.py").write_text(text)
    graph, _, _ = trace(load_flow(str(tmp_path / "tiny.py")), {}, steps=len(ROUNDS))
    taking = Taking()
    probe = ProbeBackend(taking, ROUNDS, {}, budget_s=1e9)
    for call in graph.calls:
        probe.submit(call)
    counts = [len(rows) for call in taking.calls if isinstance(rows := call.options.get("rows"), Batch)]
    assert counts == [2 * max(1, round(8 * planned.share)) for planned in ROUNDS]


def test_a_flow_with_agents_is_measured_at_the_lengths_of_their_turns(tmp_path: Path) -> None:
    kept = """
@agent
async def shy(chat, row):
    said = [(await chat.say(row.prompt, max_tokens=limit)).text for limit in (1, 2)]
    return float(len(said[1]))

@flow"""
    text = FLOW.replace("\n@flow", kept).replace("flow, steps", "agent, flow, steps")
    text = text.replace(
        "policy.generate(prompts.take(8), n=4, max_new_tokens=16)", "policy.rollout(shy, prompts.take(8), n=4, max_tokens=16)"
    )
    (tmp_path / "tiny.py").write_text(text.replace("reward.score(responses)", "responses.reward"))
    spec, out = tmp_path / "spec.yaml", tmp_path / "tiny.json"
    spec.write_text("device: cpu\ncores: 2\nrollout: {engine: fake}\ntrain: {engine: fake, token_budget: 128}\n")
    arguments = ["profile", str(tmp_path / "tiny.py"), "--cluster", str(spec), "--runs-dir", str(tmp_path / "runs"), "--out", str(out)]
    done = CliRunner().invoke(cli, [*arguments, "--seconds", "1000", "--only-this-placement"])
    assert done.exit_code == 0, done.output
    assert {count for answers in read_profile(out).responses for count in answers} <= {2, 3}


def test_profile_says_what_is_wrong_with_a_run_that_it_can_t_use(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(FLOW)
    done = CliRunner().invoke(cli, ["profile", str(tmp_path / "tiny.py"), "--from", str(tmp_path)])
    assert done.exit_code != 0
    assert "is no run" in done.output


def test_profile_says_that_an_engine_can_t_start(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(FLOW.replace("models/tiny", str(DIGITS)))
    spec = tmp_path / "spec.yaml"
    spec.write_text("device: cpu\nrollout: {engine: sglang, options: {python: nowhere/python}}\ntrain: {engine: fake}\n")
    arguments = ["profile", str(tmp_path / "tiny.py"), "--cluster", str(spec), "--runs-dir", str(tmp_path / "runs")]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code != 0
    assert "nowhere/python can't be run" in done.output


class Taking(Backend):
    """Takes calls, and does nothing with them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def submit(self, call: Call) -> None:
        self.calls.append(call)

    def value(self, ordinal: int) -> object:
        return None

    def observed(self, observation: Observation) -> None: ...

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None: ...

    def release(self, ordinal: int) -> None: ...

    def end_step(self, step: int) -> None: ...

    def finish(self) -> None: ...


@pytest.mark.parametrize("budget_s", [1e9, 0.0])
def test_a_probe_sets_sizes_and_cuts_what_comes_before_the_loop_or_too_late(tmp_path: Path, budget_s: float) -> None:
    warm = "policy.update(Dataset([{'prompt': 'a', 'target': 'b'}] * 99).all(), loss=nll(), minibatch_size=2)"
    text = FLOW.replace("flow, steps", "flow, nll, steps").replace("for _ in", f"{warm}\n    for _ in")
    (tmp_path / "tiny.py").write_text(text)
    graph, _, _ = trace(load_flow(str(tmp_path / "tiny.py")), {}, steps=len(ROUNDS) + 1)
    taking = Taking()
    probe = ProbeBackend(taking, ROUNDS, setup_rows(graph), budget_s=budget_s)
    for call in graph.calls:
        probe.submit(call)
    rows = [len(found) for call in taking.calls if isinstance(found := call.options.get("rows"), Batch)]
    limits = [found.max_new_tokens for call in taking.calls if isinstance(found := call.options.get("sampling"), Sampling)]
    assert rows[0] == 8  # Four mini-batches of two.
    if budget_s:
        assert rows[1:-1] == [max(1, round(8 * planned.share)) for planned in ROUNDS]
        assert limits[:-1] == [16 if planned.length is None else round(16 * planned.length) for planned in ROUNDS]
        assert (rows[-1], limits[-1]) == (1, 1)  # There is no round for it.
    else:
        assert set(rows[5:]) == set(limits[4:]) == {1}
        assert probe.natural_steps == [0, 1, 2]
