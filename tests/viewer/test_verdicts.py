"""A planted bottleneck is named by the verdict, and what is suggested first can be applied. `benchmarks/verdicts.py` times it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import planted
import pytest
from cost_tables import PlainCosts
from planted import CASES, Planted

from m2flow import SGD, Dataset, Policy, Reward, evaluate, flow, ppo_clip, steps
from m2flow.cli.analyze import _suggestions
from m2flow.micro.protocol.cost_terms import DecodeCost, EngineId, Layout, PassCost, TrainCost
from m2flow.recipe import Lora, Model
from m2flow.simulator.scenario import prepare
from m2flow.simulator.simulation import Made
from m2flow.spec import ClusterSpec
from m2flow.viewer import suggestions
from m2flow.viewer.analysis import Cause, Verdict
from m2flow.viewer.suggestions import MoreCores, Suggestion, Suggestions, Took, _accounted, suggestions_of, without_evaluations


def test_what_the_simulation_does_not_explain_of_a_step_stays() -> None:
    short = Took(simulated_s=1.0, measured_s=4.0)
    assert (short.gain(0.5), short.less(short.gain(0.5))) == (0.125, 3.5)
    long = Took(simulated_s=4.0, measured_s=1.0)
    assert (long.gain(2.0), long.less(long.gain(2.0))) == (0.5, 0.5)


class Shared(PlainCosts):
    """Twice the cores take half the time."""

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return DecodeCost(8.0 / layout.tp, 0.0, 0.0, 1)

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return TrainCost(PassCost(0.0, 0.0, 0.0), PassCost(8.0 / layout.tp, 0.0, 0.0), 0.0)


def test_more_cores_than_an_engine_had_make_it_no_faster_and_fewer_slower() -> None:
    rollout, train = EngineId("policy", "rollout"), EngineId("policy", "train")
    costs = MoreCores(Shared(), {rollout: 2, train: 4})
    assert [costs.decode(rollout, "", Layout(tp=n)).step_s for n in (1, 2, 4)] == [8.0, 4.0, 4.0]
    assert [costs.train(train, "", Layout(tp=n)).update.fixed_s for n in (1, 4, 8)] == [8.0, 2.0, 2.0]
    assert costs.train(EngineId("critic", "train"), "", Layout(tp=8)).update.fixed_s == 1.0  # The run had none.


def test_what_changes_nothing_is_simulated_to_take_what_the_run_as_it_was_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run had one thread for its engines; on this spec there would be two by now, which alternatives alone must not gain from."""
    run_dir, analysis = planted.ran({"num_steps": 2, "batch": 4}, {"placement": "time-shared"}, tmp_path)
    written = json.loads((run_dir / "plan.json").read_text())
    for worker in written["workers"]:
        worker["threads"] = 1
    (run_dir / "plan.json").write_text(json.dumps(written))
    simulated: list[float] = []
    step_s = suggestions._step_s
    monkeypatch.setattr(suggestions, "_step_s", lambda outcome: simulated.append(step_s(outcome)) or simulated[-1])
    monkeypatch.setattr(suggestions, "_MORE_AT_ONCE", ())
    monkeypatch.setattr(suggestions, "_MORE_PROCESSES", ())
    analysis.verdict = Verdict("", [Cause("generation", 1.0, 0.5, "")], 2.0, 2)
    found = suggestions_of(run_dir, planted.planted, {"num_steps": 2, "batch": 4}, analysis)
    larger_batches, *_ = simulated  # Sixteen samples a step never fill the batches of the run.
    assert larger_batches == pytest.approx(found.simulated_step_s)
    assert found.measured_step_s == analysis.steps[1].makespan_s, "in the first step memory is allocated, and code loaded"


@flow
def evaluated() -> None:
    policy, reward = Policy(planted.DIGITS, init="random"), Reward(planted.quick)
    rows = [{"prompt": f"{number}="} for number in range(24)]
    prompts, heldout = Dataset(rows), Dataset(rows[:4], name="heldout")
    for step in steps(3):
        if step == 0:
            evaluate(policy, heldout, score=reward, max_new_tokens=4)
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
        policy.update(responses, reward.score(responses), loss=ppo_clip(), optimizer=SGD(1e-6))


def test_steps_are_simulated_without_evaluations_of_which_the_first_have_more_than_others() -> None:
    whole = prepare(evaluated, {}, ClusterSpec(device="cpu", cores=2), steps=3)
    scenario = without_evaluations(whole)
    made = Counter((item.call.step, item.call.name) for item in scenario.program.items if isinstance(item, Made))
    rounds = ("dataset.take", "policy.generate", "quick.score", "policy.update")
    assert made - Counter([(0, "heldout.all")]) == {(step, name): 1 for step in range(3) for name in rounds}
    assert len(scenario.program.graph.calls) < len(whole.program.graph.calls)
    mine, as_it_was = (one.run(one.plan()).report.steps for one in (scenario, whole))
    assert mine[0].makespan_s < as_it_was[0].makespan_s
    assert without_evaluations(scenario).program.items == scenario.program.items


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planted_bottleneck_is_named_and_what_is_suggested_first_can_be_applied(case: Planted, tmp_path: Path) -> None:
    if case.extra:
        pytest.importorskip(case.extra)
    run_dir, before = planted.ran(dict(case.options), case.cluster, tmp_path)
    assert before.verdict.causes[0].name in case.causes, before.verdict
    assert before.verdict.causes[0].says in before.verdict.sentence
    first = planted.first_suggestion(case, run_dir, before)
    assert re.search(case.suggested, first.what), first
    after = planted.applied(case, first, tmp_path)
    assert len(after.steps) == len(before.steps)


@pytest.mark.parametrize(("adapters", "lora", "is_suggested"), [("added", Lora(), True), ("alone", Lora(), False), ("added", None, False)])
def test_adapters_alone_are_suggested_where_whole_weights_of_adapters_are_what_steps_wait_for(
    adapters: str, lora: Lora | None, is_suggested: bool
) -> None:
    spec = ClusterSpec.model_validate({"weights": {"adapters": adapters}})
    scenario = SimpleNamespace(spec=spec, models={"policy": Model("org/model", lora=lora)})
    verdict = Verdict("", [Cause("sync", 1.0, 0.5, "")], 2.0, 3)
    found = list(_accounted(scenario, verdict, Took(simulated_s=2.0, measured_s=2.0)))  # type: ignore[arg-type]
    assert [one.cluster for one in found] == [{"weights": {"adapters": "alone"}}] * is_suggested


def test_a_suggestion_says_of_which_time_its_gain_is_a_share() -> None:
    """The time of a step in the verdict leaves evaluations out, and is of other steps."""
    found = [Suggestion("call more at once", False, 0.75, 0.25), Suggestion("wait for nothing", False, 0.0, 1.0)]
    lines = _suggestions(Suggestions(0.9, 1.0, -0.1, False, found, []))
    assert lines[0].endswith("0.750 s a step instead of 1.000, 25% less, simulated")
    assert lines[1].endswith("0.000 s a step, 100% less, simulated")
