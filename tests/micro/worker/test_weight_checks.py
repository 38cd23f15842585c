"""Trainer and rollout engine are compared where they hold the same weights: in every update, and by a probe after a sync."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import save_config

from m2flow import AdamW, Correction, Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.channels.weights.payload import Probe
from m2flow.engines.contract import NO_AGREEMENT, Agreement, EngineSettings, Request, agreement_of
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.micro.protocol.update_semantics import UpdateTally, with_same_weights, with_version_ages
from m2flow.micro.records.accounting import Alarm, Divergence, Tally
from m2flow.micro.worker.weight_sync import Checks, LogprobCheck
from m2flow.observe.metrics import read_metrics
from m2flow.observe.spans import Recorder
from m2flow.observe.store import read_spans
from m2flow.recipe import Loss, Model, Sampling
from m2flow.runner.run import Run
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec
from m2flow.testing.fakes import FakeRollout, FakeTrain
from m2flow.testing.world import run_eager, run_planned

DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"


def num_nines(sample: Sample) -> float:
    return float(str(sample.text).count("9"))


def cluster(placement: str, engine: str = "embedded", **weights: object) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine=engine, workers=2 if placement == "split" else 1, max_running=3),
        train=TrainSpec(engine=engine, token_budget=30),
        weights=WeightsSpec.model_validate(weights),
    )


@flow
def digits(rollout_dtype: str = "", epochs: int = 1) -> None:
    policy = Policy(DIGITS, init="random", rollout_dtype=rollout_dtype or None)  # type: ignore[arg-type]
    verifier = Reward(num_nines)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(6)], shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
        metrics = policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-2), epochs=epochs)
        log(
            mean=metrics["rollout_diff/mean"],
            largest=metrics["rollout_diff/max"],
            k3=metrics["rollout_diff/k3"],
            compared=metrics["rollout_diff/tokens"],
            tokens=metrics["num_tokens"],
        )


def test_the_difference_is_none_of_equal_numbers_and_does_not_go_by_how_tokens_were_cut() -> None:
    trained, sampled = np.array([-1.0, -2.0, -0.5, -3.0]), np.array([-1.0, -2.5, -0.25, -3.0])
    whole = agreement_of(trained, sampled)
    assert whole == Agreement.of_all([agreement_of(trained[3:], sampled[3:]), agreement_of(trained[:3], sampled[:3])])
    assert (whole.num_tokens, whole.mean, whole.largest) == (4, 0.1875, 0.5)
    assert whole.metrics()["rollout_diff/k3"] == pytest.approx((np.exp(0.5) - 1.5 + np.exp(-0.25) - 0.75) / 4)
    assert agreement_of(sampled, sampled).metrics()["rollout_diff/max"] == 0
    assert NO_AGREEMENT.metrics() == {}


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_every_update_says_how_far_trainer_and_rollout_are_apart_with_the_same_weights(placement: str) -> None:
    answer = run_planned(digits, {"epochs": 3}, cluster(placement), deterministic=True)
    assert answer.error == ""
    said: dict[str, list[float]] = {}
    for _, name, value in answer.logs:
        said.setdefault(name, []).append(value)
    # Later epochs have other weights; what is between them and the sampled tokens is training.
    assert [3 * count for count in said["compared"]] == said["tokens"]
    assert len(said["mean"]) == 2
    assert all(0 <= value < 1e-5 for name in ("mean", "largest", "k3") for value in said[name])
    assert answer.logs == run_eager(digits, {"epochs": 3}, cluster(placement), deterministic=True).logs


def test_a_rollout_engine_that_computes_in_another_type_is_seen_to() -> None:
    answer = run_planned(digits, {"rollout_dtype": "bfloat16"}, cluster("time-shared"), deterministic=True)
    assert answer.error == ""
    assert all(1e-5 < value < 0.15 for _, name, value in answer.logs if name == "mean")


def test_tokens_of_other_weights_or_with_an_older_cache_are_not_compared() -> None:
    call: Any = SimpleNamespace(options={}, writes=(SimpleNamespace(version=4),))
    columns = {"versions": [[-1, 3, 3, 2], [-1, 3]], "kv_stale": [[False, False, True, False], [False, False]]}
    batch = Batch(make_ids(0, 2, 1), {name: Ragged.of([np.array(row) for row in rows], np.int32) for name, rows in columns.items()})
    same = with_same_weights(call, batch).ragged("same_weights")
    assert [same.row(row).tolist() for row in range(2)] == [[False, True, False, False], [False, True]]
    demonstrations = batch.without(["versions"])
    assert with_same_weights(call, demonstrations) is demonstrations


def test_a_run_ends_before_it_trains_on_what_is_further_apart_than_the_spec_allows() -> None:
    spec = cluster("time-shared", stop_above=1e-7)
    answer = run_planned(digits, {"rollout_dtype": "bfloat16"}, spec, deterministic=True)
    assert "the log-probabilities of trainer and rollout differ by" in answer.error
    assert "policy@0, which both hold; 1e-07 is allowed" in answer.error
    assert "test_weight_checks.py" in answer.where
    assert answer.weights == run_planned(digits, {"rollout_dtype": "bfloat16"}, spec, deterministic=True).weights
    eager = run_eager(digits, {"rollout_dtype": "bfloat16"}, spec, deterministic=True)
    assert (eager.error, eager.weights) == (answer.error, answer.weights)


@pytest.mark.slow
def test_an_alarm_warns_once_and_is_counted(tmp_path: Path) -> None:
    said: list[str] = []
    spec = cluster("time-shared", warn_above=1e-7)
    run = Run(digits, {"rollout_dtype": "bfloat16"}, spec, RunSettings(runs_dir=str(tmp_path), eager=True), warn=said.append)
    run.execute()
    means = dict(read_metrics(run.run_dir)["rollout_diff/mean"])
    assert len([text for text in said if "step 0: the log-probabilities of trainer and rollout differ" in text]) == 1
    assert len(said) == 1
    worst = max(means, key=lambda step: means[step])
    assert run.tally.apart == Divergence(2, worst, means[worst])
    (probe,) = [span for span in read_spans(run.run_dir) if span.name == "rollout.probe"]
    assert probe.attributes["version"] == 1
    assert 1e-7 < float(str(probe.attributes["mean"])) < 0.15


def test_no_alarm_is_heard_below_the_threshold_or_where_nothing_was_compared() -> None:
    said: list[str] = []
    tally = Tally()
    call: Any = None
    Alarm(0.1, said.append).hear(call, {"rollout_diff/mean": 0.1}, tally)
    Alarm(0.1, said.append).hear(call, {"loss": 3.0}, tally)
    Alarm(None, said.append).hear(call, {"rollout_diff/mean": 9.0}, tally)
    assert (said, tally.apart) == ([], None)


def test_updates_without_anything_to_train_on_give_a_warning_once_and_are_counted() -> None:
    said: list[str] = []
    call: Any = SimpleNamespace(step=3, name="policy.update", role="policy", site="f.py:7")
    alarm, tally = Alarm(None, said.append), Tally()
    alarm.hear(call, {"num_steps": 2.0, "num_skipped_steps": 0.0}, tally)
    assert (said, tally.num_skipped) == ([], 0)
    alarm.hear(call, {"num_steps": 0.0, "num_skipped_steps": 2.0}, tally)
    alarm.hear(call, UpdateTally().metrics(), tally)
    assert tally.num_skipped == 3
    (text,) = said
    assert text.startswith("step 3: policy.update (f.py:7) skipped an optimiser step, since no token of its episodes was sampled")


def test_a_metric_beyond_its_bound_gives_a_warning_once() -> None:
    said: list[str] = []
    call: Any = SimpleNamespace(step=3, name="policy.update", role="policy")
    alarm = Alarm(None, said.append, WeightsSpec().alarms | {"loss": "> 1e2"})
    alarm.hear(call, {"rollout_kl": 0.1, "effective_sample_share": 0.3, "loss": 100.0}, Tally())
    assert said == []
    for kl in (0.2, 0.3):
        alarm.hear(call, {"rollout_kl": kl, "effective_sample_share": 0.25}, Tally())
    assert [text.split(" (")[0] for text in said] == [
        "step 3: rollout_kl of policy.update is 0.2, above 0.1",
        "step 3: effective_sample_share of policy.update is 0.25, below 0.3",
    ]
    with pytest.raises(ValueError, match="alarms"):
        WeightsSpec(alarms={"rollout_kl": "0.1"})


def test_updates_with_a_correction_know_how_old_the_weights_of_each_token_were() -> None:
    versions = Ragged.of([[3, 3], [4, 2, 1]], np.int32)
    rows = Batch(make_ids(0, 2), {"versions": versions})
    loss = Loss("mine", "m2flow.algorithms.losses:reinforce", ("logprobs", "advantages"))
    for correction, expected in ((None, None), (Correction(), [1, 1, 0, 2, 3])):
        call: Any = SimpleNamespace(options={"loss": replace(loss, correction=correction)}, writes=[SimpleNamespace(version=5)])
        found = with_version_ages(call, rows)
        assert ("version_ages" in found) == (expected is not None)
        if expected is not None:
            assert found.ragged("version_ages").values.tolist() == expected


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_the_probe_goes_with_the_weights_and_a_failed_one_ends_the_run(placement: str) -> None:
    tight = run_planned(digits, {}, cluster(placement, probe_tolerance=1e-12), deterministic=True)
    assert "with the weights of policy@1" in tight.error
    assert run_planned(digits, {}, cluster(placement, probe_tolerance=1e-12, probe="never"), deterministic=True).error == ""
    eager = run_eager(digits, {}, cluster(placement, probe_tolerance=1e-12), deterministic=True)
    assert eager.error == tight.error


@pytest.mark.parametrize(("probe", "versions"), [("first", [1]), ("always", [1, 2]), ("never", [])])
def test_the_first_sync_is_proved_or_each_or_none(probe: str, versions: list[int]) -> None:
    model, recorder = Model("fake"), Recorder("x")
    trainer, engine = FakeTrain(model, EngineSettings()), FakeRollout(model, EngineSettings())
    trainer.start()
    engine.start()
    prover = LogprobCheck({"policy": model}, Checks(probe), recorder, published=frozenset())
    for version in (1, 2):
        prover.notice("policy", rows(), is_sampled_here=True)
        prover.updated("policy", version, trainer)
        prover.check_probe("policy", prover.probe("policy", version), engine)
    assert [about["version"] for name, _, _, about in recorder.drain().spans if name == "rollout.probe"] == versions
    assert prover.probe("policy", 1) is None  # That was another version's.


def test_a_probe_is_of_samples_that_have_tokens_to_compare() -> None:
    """An episode whose model never spoke has none."""
    prover = LogprobCheck({"policy": Model("fake")}, Checks(), Recorder("x"), published=frozenset())
    engine = FakeTrain(Model("fake"), EngineSettings())
    engine.start()
    for version, texts, probed in ((1, [[], [], []], None), (2, [[], [5, 6, 7], [5]], [[5, 6, 7]])):
        prover.notice("policy", Batch(make_ids(0, 3, 1), {"tokens": Ragged.of(texts, np.int32)}), is_sampled_here=True)
        prover.updated("policy", version, engine)
        found = prover.probe("policy", version)
        assert (found and found.tokens) == probed


def test_an_update_on_texts_brings_no_probe() -> None:
    prover = LogprobCheck({"policy": Model("fake")}, Checks(), Recorder("x"), published=frozenset({"policy"}))
    prover.notice("policy", Batch(make_ids(0, 2, 1), {"prompt": Ragged.texts(["a", "b"])}), is_sampled_here=False)
    prover.updated("policy", 1, FakeTrain(Model("fake"), EngineSettings()))
    assert prover.probe("policy", 1) is None


@contextlib.contextmanager
def engines(trained: Model, sampled: Model) -> Iterator[tuple[EmbeddedTrain, EmbeddedRollout]]:
    trainer, engine = EmbeddedTrain(trained, EngineSettings()), EmbeddedRollout(sampled, EngineSettings())
    try:
        trainer.start()
        engine.start()
        yield trainer, engine
    finally:
        trainer.stop()
        engine.stop()


def proving(model: Model, **checks: Any) -> LogprobCheck:
    return LogprobCheck({"policy": model}, Checks(**checks), Recorder("x"), published=frozenset({"policy"}))


def rows(num_tokens: int = 12) -> Batch:
    tokens = np.random.default_rng(0).integers(2, 14, (6, num_tokens))
    return Batch(make_ids(0, 6, 1), {"tokens": Ragged.of(list(tokens), np.int32)})


def probed(prover: LogprobCheck, trainer: EmbeddedTrain) -> Probe | None:
    prover.notice("policy", rows(), is_sampled_here=False)
    prover.updated("policy", 1, trainer)
    return prover.probe("policy", 1)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_an_engine_that_holds_all_bytes_and_computes_something_else_is_stopped_with_the_tokens(kind: str, tmp_path: Path) -> None:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if kind == "Qwen3Moe" else {}
    path = save_config(kind, tmp_path / "model", **more)
    other = save_config(kind, tmp_path / "other", **more)
    config = json.loads((Path(other) / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 7.0
    (Path(other) / "config.json").write_text(json.dumps(config))
    with engines(Model(path, "random"), Model(other, "random", 1)) as (trainer, engine):
        engine.load_weights(trainer.weights(), 1)
        held = dict(engine.weights())
        assert all(bool((tensor == held[name]).all()) for name, tensor in trainer.weights())
        prover = proving(Model(path))
        with pytest.raises(EngineError, match=r"policy@1: over 44 tokens .* token \d+ .* sequence \d: trainer -"):
            prover.check_probe("policy", probed(prover, trainer), engine)
    with engines(Model(path, "random"), Model(path, "random", 1)) as (trainer, engine):
        prover = proving(Model(path))
        probe = probed(prover, trainer)
        with pytest.raises(EngineError, match="do not compute the same"):
            prover.check_probe("policy", probe, engine)  # It has not got the weights.
        engine.load_weights(trainer.weights(), 1)
        prover.check_probe("policy", probe, engine)


@pytest.mark.parametrize("deterministic", [False, True])
def test_given_tokens_have_the_log_probabilities_that_they_were_sampled_with(deterministic: bool, tmp_path: Path) -> None:
    model = Model(save_config("Llama", tmp_path / "model"), "random")
    engine = EmbeddedRollout(model, EngineSettings(deterministic=deterministic))
    engine.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(engine.stop)
        ids = make_ids(0, 3, 1).tolist()
        engine.add([Request(packed, (3, 4, 5 + row), 7 * row, Sampling(20)) for row, packed in enumerate(ids)])
        done: list[Any] = []
        while engine.num_unfinished:
            done += engine.step()
        said = engine.logprobs([[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()] for sample in done])
        for sample, row in zip(done, said, strict=True):
            np.testing.assert_allclose(row[len(sample.prompt_tokens) - 1 :], sample.logprobs, atol=1e-5)


def test_a_coarser_type_of_weights_or_passes_may_differ_more() -> None:
    trained = EmbeddedTrain(Model(DIGITS.as_posix(), "random"), EngineSettings())
    trained.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(trained.stop)
        for model, compute, tolerance in (
            (Model("x"), "", 1e-3),
            (Model("x", rollout_dtype="bfloat16"), "", 0.15),
            (Model("x"), "float16", 0.03),
        ):
            prover = LogprobCheck({"policy": model}, Checks(), Recorder("x"), published=frozenset({"policy"}), compute_dtype=compute)
            found = probed(prover, trained)
            assert found is not None
            assert found.tolerance == tolerance
