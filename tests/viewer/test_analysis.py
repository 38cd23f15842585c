"""Why devices were idle and what steps waited for: held against the simulator's own account, and against traces made by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from fake_clusters import generate_call
from observed_run import record_run, store_run

from m2flow.cli.main import cli
from m2flow.macro.graph import Call
from m2flow.micro.records.ledger import Ledger
from m2flow.observe.metrics import MetricsWriter
from m2flow.observe.spans import Recorder, SpanBlock
from m2flow.runs.display import send_alert
from m2flow.runs.planning import OTHER_WAITS
from m2flow.samples import SampleId
from m2flow.viewer.analysis import OVERHEAD, CriticalPath, analysis_of
from m2flow.viewer.health import RULES, Alert, alerts_of
from m2flow.viewer.run_trace import CAUSES, KnownCall, RunTrace, devices_of, evaluation_calls, idle_of

ROOT = Path(__file__).parents[2]
MS = 1_000_000


def traced(run_dir: Path) -> RunTrace:
    trace = RunTrace(run_dir)
    assert trace.refresh()
    return trace


def aligned() -> list[SpanBlock]:
    return [msgspec.structs.replace(block, anchor_ns=0) for block in record_run()]


def drained(recorder: Recorder) -> SpanBlock:
    """With times as they were given: recorders read the clock apart from each other."""
    recorder.anchor_ns = 0
    return recorder.drain()


def resumed_run(run_dir: Path, blocks: list[SpanBlock], began_s: list[int], *calls: Call) -> Path:
    """A run of these calls whose attempts began at these times."""
    ledger = Ledger(store_run(run_dir, blocks) / "ledger.db")
    ledger.open()
    for call in calls:
        ledger.call_added(call)
    for number, at_s in enumerate(began_s):
        ledger.attempt_began(number, "", 0)
        ledger.change("UPDATE attempts SET began=? WHERE number=?", (at_s, number))
    ledger.close()
    return run_dir


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("simulated") / "run"
    asked = "--cluster clusters/h100-8.yaml --shape policy=Qwen2.5-32B --lengths lognormal:median=60,sigma=0.6,cap=200,icc=0.3 --steps 2"
    asked += " --batch 4 --n 2 --warm-steps 1 --max-new-tokens 200"
    flow = str(ROOT / "flows" / "grpo.py")
    asked = asked.replace("clusters/", f"{ROOT}/clusters/")
    done = CliRunner().invoke(
        cli,
        ["simulate", flow, *asked.split(), "--out", str(place)],
    )
    assert done.exit_code == 0, done.output
    return place


def test_the_trace_of_a_simulated_run_gives_the_simulators_own_account_of_idle_time(simulated: Path) -> None:
    trace = traced(simulated)
    analysis = analysis_of(trace, idle_of(trace))
    told = json.loads((simulated / "report.json").read_text())["steps"]
    # The first step is told from its first work on, not from when the program asked for it.
    (step,) = (one for one in analysis.steps if one.step == 1)
    assert step.makespan_s == pytest.approx(told[1]["makespan_s"], rel=1e-6)
    assert step.efficiency == pytest.approx(told[1]["efficiency"], rel=1e-6)
    for cause in CAUSES:
        assert step.idle_s.get(cause, 0.0) == pytest.approx(told[1]["idle_s"].get(cause, 0.0), rel=1e-5, abs=1e-6), cause
    assert {"switch", "sync"} <= set(step.idle_s)
    assert step.staleness == told[1]["staleness"]


def test_of_a_simulated_run_it_is_said_what_simulates_it_otherwise(simulated: Path) -> None:
    done = CliRunner().invoke(cli, ["analyze", str(simulated)])
    assert done.exit_code == 0, done.output
    assert "nothing is suggested: it is a simulation" in done.stderr
    assert "--compare" in done.stderr


def test_busy_and_idle_fill_the_run_and_idle_stretches_do_not_overlap(tmp_path: Path) -> None:
    trace = traced(store_run(tmp_path, aligned()))
    for idle in idle_of(trace):
        assert (idle.start[1:] >= idle.end[:-1]).all()
        whole = idle.busy_seconds(trace.start, trace.end) + sum(idle.seconds(trace.start, trace.end).values())
        assert whole == pytest.approx((trace.end - trace.start) / 1e9)


def test_while_others_generate_an_instance_without_samples_is_in_the_tail_and_training_waits_for_rollout(tmp_path: Path) -> None:
    recorders = [Recorder("rollout-0"), Recorder("rollout-1"), Recorder("train-0")]
    about = {"call": 0, "step": 0, "label": "policy.generate", "flow_line": "f.py:1"}
    for recorder, end in zip(recorders, (10, 4), strict=False):
        recorder.add("sample", 0, end * MS, **about, sample=SampleId(0, end, 0), num_tokens=end)
        recorder.add("rollout.step", 0, end * MS, **about, num_samples=1)
    recorders[2].add("train.accumulate", 10 * MS, 12 * MS, call=1, step=0, label="policy.update", flow_line="f.py:2")
    trace = traced(store_run(tmp_path, [drained(recorder) for recorder in recorders]))
    found = {idle.device.name: idle.seconds(trace.start, trace.end) for idle in idle_of(trace)}
    assert found["rollout-1"] == pytest.approx({"tail": 0.006, "staleness": 0.002})
    assert found["rollout-0"] == pytest.approx({"staleness": 0.002})
    assert found["train-0"] == pytest.approx({"rollout": 0.004, "tail": 0.006})


def test_what_waits_for_python_is_idle_for_a_barrier_which_is_told_as_the_plan_tells_it(tmp_path: Path) -> None:
    rollout, trainer = Recorder("rollout-0"), Recorder("train-0")
    for step, start in enumerate((0, 10)):
        about = {"call": 2 * step, "step": step, "label": "policy.generate", "flow_line": "f.py:1"}
        rollout.add("rollout.step", start * MS, (start + 4) * MS, **about, num_samples=1)
        update = {"call": 2 * step + 1, "step": step, "label": "policy.update", "flow_line": "f.py:2"}
        trainer.add("train.apply", (start + 4) * MS, (start + 6) * MS, **update)
    (tmp_path / "config.json").write_text("{}")
    store_run(tmp_path, [drained(rollout), drained(trainer)])
    told = CliRunner().invoke(cli, ["analyze", str(tmp_path), "--no-suggest"]).stdout
    assert re.search(r"rollout-0 .*barrier 25.0%", told)
    assert f"barrier: for Python where it waits for a value (m2flow plan lists these barriers), for {OTHER_WAITS}\n" in told


def test_while_a_last_checkpoint_is_written_nobody_is_idle_for_a_cause(tmp_path: Path) -> None:
    rollout, trainer = Recorder("rollout-0"), Recorder("train-0")
    about = {"call": 0, "step": 0, "label": "policy.generate", "flow_line": "f.py:1"}
    rollout.add("rollout.step", 0, 4 * MS, **about, num_samples=1)
    update = {"call": 1, "step": 0, "label": "policy.update", "flow_line": "f.py:2"}
    trainer.add("train.save", 1 * MS, 3 * MS, step=0)  # One that something comes after is as it was.
    trainer.add("train.apply", 4 * MS, 6 * MS, **update)
    trainer.add("train.save", 6 * MS, 90 * MS)
    rollout.add("wait", 4 * MS, 90 * MS)
    trace = traced(store_run(tmp_path, [drained(rollout), drained(trainer)]))
    assert (trace.worked_until, trace.end) == (6 * MS, 90 * MS)
    found = {device.name: (device.busy_s, device.idle_s) for device in analysis_of(trace, idle_of(trace)).devices}
    assert found["rollout-0"] == (pytest.approx(0.004), pytest.approx({"staleness": 0.002}))
    assert found["train-0"] == (pytest.approx(0.004), pytest.approx({"rollout": 0.002}))
    assert [kind.group for kind in trace.kinds if kind.label == "train.save"] == ["machinery"]


def test_while_a_run_had_stopped_nobody_was_idle_and_its_step_took_no_time(tmp_path: Path) -> None:
    hour = 3600 * 1000 * MS
    rollout, trainer = Recorder("rollout-0"), Recorder("train-0")
    about = {"call": 0, "step": 0, "label": "policy.generate", "flow_line": "f.py:1"}
    for begin, end in ((0, 4 * MS), (hour + 2001 * MS, hour + 2005 * MS)):
        rollout.add("rollout.step", begin, end, **about, num_samples=1)
    trainer.add("train.accumulate", hour + 2005 * MS, hour + 2006 * MS, call=1, step=0, label="policy.update", flow_line="f.py:2")
    trace = traced(resumed_run(tmp_path, [drained(recorder) for recorder in (rollout, trainer)], [0, 3600]))
    assert [(ends.tolist(), begins.tolist()) for ends, begins in [trace.stops]] == [
        ([4 * MS], [hour + 2001 * MS])
    ]  # It took two seconds to start.
    (step,) = analysis_of(trace, idle_of(trace)).steps
    assert step.makespan_s == pytest.approx(0.009)
    for idle in idle_of(trace):
        whole = idle.busy_seconds(trace.start, trace.end) + sum(idle.seconds(trace.start, trace.end).values())
        assert whole == pytest.approx(0.009)


def test_attempts_that_ended_before_their_workers_were_up_are_one_stop(tmp_path: Path) -> None:
    second = 1000 * MS
    rollout = Recorder("rollout-0")
    for begin in (0, 1000 * second):
        rollout.add("rollout.step", begin, begin + second, call=0, step=0, label="policy.generate", flow_line="f.py:1", num_samples=1)
    trace = traced(resumed_run(tmp_path, [drained(rollout)], [0, 300, 600, 999]))
    assert [moments.tolist() for moments in trace.stops] == [[second], [1000 * second]]
    assert trace.seconds(trace.start, trace.end) == 2


def test_a_run_that_was_resumed_before_anything_had_begun_has_no_stop(tmp_path: Path) -> None:
    trace = traced(resumed_run(tmp_path, [], [1, 2], generate_call(0)))
    assert [moments.tolist() for moments in trace.stops] == [[], []]


def test_what_leads_to_no_update_is_an_evaluation_and_the_newest_step_goes_by_its_lines() -> None:
    def call(ordinal: int, step: int, name: str, site: str, *sources: int) -> KnownCall:
        effects = ("reads policy.weights@1", "writes policy.weights@2") if name.endswith("update") else ()
        return KnownCall(ordinal, step, name, site, inputs=tuple(("of", source) for source in sources), effects=effects)

    calls = [
        call(0, 0, "policy.generate", "f.py:9"), call(1, 0, "judge.score", "f.py:9", 0),
        call(2, 0, "policy.generate", "f.py:5"), call(3, 0, "judge.score", "f.py:6", 2), call(4, 0, "policy.update", "f.py:7", 2, 3),
        call(5, 1, "policy.generate", "f.py:9"), call(6, 1, "policy.generate", "f.py:5"),
    ]  # fmt: skip
    known = {one.ordinal: one for one in calls}
    assert evaluation_calls(known) == {0, 1, 5}
    assert evaluation_calls({at: one for at, one in known.items() if at != 4}) == set()  # Nothing is trained: it is no evaluation.


def test_evaluations_and_what_comes_before_the_loop_are_accounted_apart(tmp_path: Path) -> None:
    recorders = [Recorder("rollout-0"), Recorder("train-0")]
    recorders[1].add("train.accumulate", 0, 50 * MS, call=0, step=-1, label="policy.update", flow_line="f.py:1")
    for first, call, line in ((50, 1, "f.py:9"), (60, 3, "f.py:5")):
        about = {"call": call, "step": 0, "label": "policy.generate", "flow_line": line}
        recorders[0].add("sample", first * MS, (first + 10) * MS, **about, sample=SampleId(call, 0, 0).pack(), num_tokens=10)
        recorders[0].add("rollout.step", first * MS, (first + 10) * MS, **about, num_samples=1)
    trained = {"samples": [SampleId(3, 0, 0).pack()]}
    recorders[1].add("train.accumulate", 70 * MS, 75 * MS, call=4, step=0, label="policy.update", flow_line="f.py:6", **trained)
    run_dir = store_run(tmp_path, [drained(recorder) for recorder in recorders])
    trace = RunTrace(run_dir)
    trace.refresh()
    trace.evaluates = trace.call == 1
    analysis = analysis_of(trace, idle_of(trace))
    assert (analysis.setup_s, analysis.evaluation_s) == pytest.approx((0.05, 0.01))
    assert [(one.label, one.line) for one in analysis.setup] == [("policy.update", "f.py:1")]
    (step,) = analysis.steps
    assert step.evaluation_s == pytest.approx(0.01)
    idle = {one.name: one.idle_s for one in analysis.devices}
    assert idle["train-0"] == pytest.approx({"evaluation": 0.01, "rollout": 0.01})
    assert analysis.verdict.step_s == pytest.approx(0.015)
    assert analysis.verdict.sentence.startswith("A step without its evaluations takes 0.015 s, ")
    assert {cause.name: round(cause.share, 3) for cause in analysis.verdict.causes} == {"generation": 0.667, "training": 0.333}


def test_a_slow_weight_sync_is_named(tmp_path: Path) -> None:
    rollout, trainer = Recorder("rollout-0"), Recorder("train-0")
    for step in range(3):
        first = 100 * step * MS
        sample = SampleId(3 * step, 0, 0).pack()
        about = {"call": 3 * step, "step": step, "label": "policy.generate", "flow_line": "f.py:1"}
        rollout.add("sample", first, first + 10 * MS, **about, sample=sample, num_tokens=10, version=step)
        rollout.add("rollout.step", first, first + 10 * MS, **about, num_samples=1)
        update = {"call": 3 * step + 1, "step": step, "label": "policy.update", "flow_line": "f.py:2"}
        trainer.add("train.accumulate", first + 10 * MS, first + 20 * MS, **update, samples=[sample])
        trainer.add("weights.publish", first + 20 * MS, first + 60 * MS, version=step + 1, label="policy")
        rollout.add("weights.load", first + 60 * MS, first + 100 * MS, version=step + 1, label="policy")
    trace = traced(store_run(tmp_path, [drained(recorder) for recorder in (rollout, trainer)]))
    verdict = analysis_of(trace, idle_of(trace)).verdict
    assert verdict.causes[0].name == "sync"
    assert verdict.causes[0].share == pytest.approx(0.8)
    assert "weight sync" in verdict.sentence


def test_rules_hold_for_metrics_out_of_bounds_and_not_for_those_within(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for place in (good, bad):
        is_bad = place == bad
        with MetricsWriter(place, tensorboard=False) as writer:
            for step in range(8):
                late = is_bad and step >= 5
                writer.write(
                    step,
                    {
                        "grad_norm": 40.0 if late else 1.0 + 0.1 * step,
                        "entropy": 0.01 if late else 1.0,
                        "loss": math.nan if is_bad and step == 6 else 0.5,
                        "rollout_diff/mean": 0.3 if late else 1e-6,
                        "response_length": 90.0 if late else 30.0,
                        "reward": 0.1 * step,
                    },
                )
    assert alerts_of(good, None) == []
    found = alerts_of(bad, None)
    assert {alert.rule for alert in found} == {"not finite", "gradient", "entropy", "mismatch", "length drift"}
    assert [alert.level for alert in found] == sorted((alert.level for alert in found), key=lambda level: level != "bad")
    assert "loss in step 6" in next(alert.says for alert in found if alert.rule == "not finite")
    root = Path(__file__).parents[2]
    for rule in RULES.values():
        page, _, section = rule.page.partition("#")
        titles = [re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in (root / page).read_text().splitlines()]
        assert not section or section in titles, rule.page


def test_an_update_that_trained_nothing_is_an_alert_of_its_own(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, (num_steps, loss) in enumerate([(1.0, 0.5), (0.0, math.nan), (1.0, 0.4)]):
            writer.write(step, {"loss": loss, "num_steps": num_steps})
    (found,) = alerts_of(tmp_path, None)
    assert (found.rule, found.level, found.says) == ("nothing trained", "warn", "an update of policy in step 1")


def test_the_rules_hold_for_each_line_that_trains_the_policy(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(8):
            apart = {
                "update_2/rollout_diff/mean": 0.3,
                "update_2/grad_norm": 40.0 if step >= 5 else 1.0,
                "update_2/num_steps": float(step > 0),
                "update_2/groups_without_advantage": 0.9,
            }
            writer.write(step, {"rollout_diff/mean": 1e-6, "grad_norm": 1.0, "num_steps": 1.0, "groups_without_advantage": 0.6, **apart})
    assert {alert.rule: alert.says for alert in alerts_of(tmp_path, None)} == {
        "mismatch": "update_2/rollout_diff/mean 0.3 nats",
        "gradient": "update_2/grad_norm 40, 40 times its median of 1",
        "no advantage": "update_2/groups_without_advantage 0.9",
        "nothing trained": "an update of policy (update_2) in step 0",
    }


def test_the_rules_hold_for_each_role_that_is_trained(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(8):
            apart = {"rollout_diff/mean": 0.3, "grad_norm": 40.0 if step >= 5 else 1.0, "groups_without_advantage": 0.9, "num_steps": 1.0}
            writer.write(step, {f"actor/{name}": value for name, value in apart.items()})
    assert {alert.rule: alert.says for alert in alerts_of(tmp_path, None)} == {
        "mismatch": "actor/rollout_diff/mean 0.3 nats",
        "gradient": "actor/grad_norm 40, 40 times its median of 1",
        "no advantage": "actor/groups_without_advantage 0.9",
    }


@pytest.mark.parametrize(("last", "says"), [(3, ["3 of policy on rollout-0; rollout(..., timeout_s=...) ends such"]), (0, [])])
def test_episodes_of_which_nothing_is_known_for_long_are_an_alert_as_long_as_there_are(last: int, says: list[str], tmp_path: Path) -> None:
    recorder = Recorder("rollout-0")
    recorder.add("sample", 0, 10 * MS, call=0, step=0, label="policy.rollout", sample=SampleId(0, 0, 0).pack(), num_tokens=10)
    for at, value in enumerate((5, last)):
        recorder.count("silent episodes, policy", value, (20 + at) * MS)
    trace = RunTrace(store_run(tmp_path, [drained(recorder)]))
    trace.refresh()
    assert [alert.says for alert in alerts_of(trace.run_dir, trace) if alert.rule == "silent"] == says


def test_new_alerts_go_to_a_webhook(tmp_path: Path) -> None:
    taken: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    alert = Alert("gradient", "bad", "the gradient explodes", "grad_norm 40", "ten times", "docs/guide/schedule.md", "training")
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        send_alert(f"http://127.0.0.1:{server.server_port}/", "run", alert)
        thread.join()
    assert (taken[0]["run"], taken[0]["rule"], taken[0]["text"]) == ("run", "gradient", "run: the gradient explodes: grad_norm 40")


def test_a_slow_reward_is_the_cause_and_leads_the_critical_path(tmp_path: Path) -> None:
    rollout, judge, trainer = Recorder("rollout-0"), Recorder("functions-0"), Recorder("train-0")
    sample = SampleId(0, 0, 0).pack()
    generate = {"call": 0, "step": 0, "label": "policy.generate", "flow_line": "f.py:1"}
    rollout.add("sample", 0, 2 * MS, **generate, sample=sample, num_tokens=4)
    rollout.add("rollout.step", 0, 2 * MS, **generate, num_samples=1)
    score = {"call": 1, "step": 0, "label": "judge.score", "flow_line": "f.py:2", "num_samples": 1, "samples": [sample]}
    judge.add("function.call", 2 * MS, 9 * MS, **score)
    trainer.add("train.accumulate", 9 * MS, 10 * MS, call=2, step=0, label="policy.update", flow_line="f.py:3", samples=[sample])
    trace = traced(store_run(tmp_path, [drained(recorder) for recorder in (rollout, judge, trainer)]))
    analysis = analysis_of(trace, idle_of(trace))
    shares = {share.label: share.share for share in analysis.path}
    assert shares == pytest.approx({"judge.score": 0.7, "policy.generate": 0.2, "policy.update": 0.1})
    assert analysis.path[0].line == "f.py:2"
    assert max(analysis.steps[0].idle_s, key=lambda cause: analysis.steps[0].idle_s[cause]) == "reward"


def test_the_links_of_a_critical_path_follow_each_other_to_the_steps_end(tmp_path: Path) -> None:
    trace = traced(store_run(tmp_path, aligned()))
    path = CriticalPath(trace, devices_of(trace))
    for step in trace.steps:
        links = path.of(step)
        assert links[-1].end == step.end
        assert all(before.end <= after.start for before, after in itertools.pairwise(links))
        assert links[0].start >= step.start
    shares = analysis_of(trace, idle_of(trace)).path
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert {"policy.generate", "policy.update"} <= {share.label for share in shares} | {OVERHEAD}


def test_analyze_names_lines_and_shares_and_says_why_it_suggests_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    store_run(tmp_path / "run", record_run())
    done = CliRunner().invoke(cli, ["analyze", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "flows/grpo.py:33" in done.stdout
    assert "nothing is suggested" in done.stderr
    told = json.loads(CliRunner().invoke(cli, ["analyze", str(tmp_path / "run"), "--json", "--no-suggest"]).stdout)
    assert len(told["analysis"]["steps"]) == 3
    assert told["suggestions"] is None


@pytest.mark.slow
def test_what_is_suggested_was_simulated_with_what_the_run_measured(tmp_path: Path) -> None:
    asked = [
        "--num-steps",
        "4",
        "--warm-steps",
        "4",
        "--cluster",
        str(ROOT / "clusters" / "laptop-split.yaml"),
        "--runs-dir",
        str(tmp_path),
    ]
    ran = CliRunner().invoke(cli, ["run", str(ROOT / "flows" / "grpo.py"), *asked])
    assert ran.exit_code == 0, ran.output
    done = CliRunner().invoke(cli, ["analyze", "--runs-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["suggestions"]["simulated_step_s"] > 0
    for one in told["suggestions"]["found"]:
        assert one["step_s"] == pytest.approx(told["suggestions"]["measured_step_s"] * (1 - one["gain"]))
        assert one["changes_mathematics"] == ("staleness" in one["what"])
    found, (_, *steps) = told["suggestions"], told["analysis"]["steps"]
    assert found["measured_step_s"] == pytest.approx(statistics.fmean(step["makespan_s"] - step["evaluation_s"] for step in steps))
    assert found["error"] == pytest.approx(found["simulated_step_s"] / found["measured_step_s"] - 1)
    text = CliRunner().invoke(cli, ["analyze", "--runs-dir", str(tmp_path)]).stdout
    assert f"the simulation is off by {found['error']:+.0%}" in text
    assert ("does not reproduce this run well" in text) == found["is_doubtful"] == (abs(found["error"]) > 0.2)
    assert "is on the critical path for" in text
    stages = {(stage["label"], stage["line"]): stage for stage in found["stages"]}
    planned = told["analysis"]["stages"]
    assert told["analysis"]["predicted_step_s"] == pytest.approx(sum(stage["predicted_s"] or 0 for stage in planned))
    (update,) = (stage for stage in planned if stage["label"] == "policy.update")
    simulated = stages["policy.update", update["line"]]["seconds"]
    assert stages["weight sync of policy", ""]["seconds"] > 0
    row = ["policy.update", update["line"], f"{update['predicted_s']:,.3f}", f"{simulated:,.3f}"]
    assert any(line.split()[:4] == row for line in text.splitlines()), "planned, simulated with its costs, and measured, stage by stage"
