"""Plans as files: edited, checked against the flow, pinned to a run, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from fake_clusters import FAKES

from m2flow import load_flow
from m2flow.cli.main import cli
from m2flow.errors import PlanError, SpecError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.plan_file import check_edited, read_plan, write_plan_file
from m2flow.planner.explaining import differences
from m2flow.runner.run import Run
from m2flow.spec import RunSettings

SOURCE = """
from m2flow import Dataset, Policy, Reward, flow, steps

def judged(sample):
    return float(sample.num_tokens)

@flow
def tiny(extra: bool = False):
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": str(i)} for i in range(9)])
    for step in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=4)
        rewards = judge.score(responses)
        if extra:
            rewards = rewards + judge.score(responses)
        policy.update(responses, rewards)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(SOURCE)
    return path


def plan_of(program: Path, pinned: Plan | None = None, **options: object) -> Plan:
    graph, models, num_steps = trace(load_flow(str(program)), options)
    return lower(graph, models, FAKES, num_steps=num_steps, pinned=pinned)


def edited(plan: Plan, change: Callable[[dict], None]) -> Plan:
    document = json.loads(plan.to_json())
    change(document)
    return msgspec.convert(document, Plan)


def stage(document: dict, call: str) -> dict:
    return next(s for s in document["stages"] if s["call"] == call)


def test_a_written_plan_reads_back_as_itself(tmp_path, program):
    plan = plan_of(program)
    write_plan_file(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    assert differences(plan, read_plan(tmp_path / "plan.json")) == []


def test_the_document_of_plan_json_is_a_plan_file_too(tmp_path, program):
    (tmp_path / "doc.json").write_text(CliRunner().invoke(cli, ["plan", str(program), "--json", "--no-try"]).stdout)
    assert read_plan(tmp_path / "doc.json").flow == "tiny"


def test_an_edited_chunk_holds_for_every_call_of_the_name(program):
    def smaller(document: dict) -> None:
        stage(document, "judged.score")["chunk"] = 2

    pinned = edited(plan_of(program), smaller)
    fresh = plan_of(program, pinned)
    check_edited(pinned, fresh, FAKES)
    assert {s.call: s.chunk for s in fresh.stages}["judged.score"] == 2
    assert differences(plan_of(program), fresh) == [
        "call judged.score: @sample on functions-0, chunk 64 -> @sample on functions-0, chunk 2"
    ]


def test_a_run_pinned_to_an_edited_plan_has_its_workers_and_gives_the_same_samples(tmp_path, program):
    def second_judge(document: dict) -> None:
        functions = next(w for w in document["workers"] if w["name"] == "functions-0")
        document["workers"].append({**functions, "name": "functions-1"})
        stage(document, "judged.score")["chunk"] = 1

    pinned = edited(plan_of(program), second_judge)
    settings = RunSettings(runs_dir=str(tmp_path / "runs"))
    run = Run(load_flow(str(program)), {}, FAKES, settings, pinned=pinned)
    summary = run.execute()
    assert [w.name for w in read_plan(run.run_dir / "plan.json").workers] == ["device-0", "functions-0", "functions-1"]
    plain = Run(load_flow(str(program)), {}, FAKES, settings).execute()
    assert (summary.samples_sha256, summary.weights_sha256) == (plain.samples_sha256, plain.weights_sha256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: stage(d, "policy.update").update(unit="sample"), r"policy.update: unit is 'sample' in the plan, and '\w+' follows"),
        (lambda d: stage(d, "judged.score").update(chunk=0), "judged.score: chunk 0"),
        (lambda d: d["workers"][0].update(threads=99), "device-0 has 99 threads, and the machine 2 cores"),
        (lambda d: d["workers"][0].update(lease=""), "device-0 generates and trains and has no lease"),
        (lambda d: d.update(flow="other"), "the plan is of the flow other, and this is tiny"),
    ],
)
def test_what_can_not_be_edited_is_refused_by_name(program, change, said):
    pinned = edited(plan_of(program), change)
    with pytest.raises(PlanError, match=said):
        check_edited(pinned, plan_of(program, pinned), FAKES)


def test_a_plan_without_an_engine_that_a_call_needs_is_refused(program):
    def no_functions(document: dict) -> None:
        document["workers"] = [w for w in document["workers"] if not w["name"].startswith("functions")]

    with pytest.raises(PlanError, match=r"no worker runs judged.score"):
        plan_of(program, edited(plan_of(program), no_functions))


def test_a_plan_of_other_calls_is_refused_with_what_differs(program):
    pinned = plan_of(program, extra=True)
    with pytest.raises(PlanError, match=r"the plan is of other calls"):
        check_edited(pinned, plan_of(program, pinned), FAKES)


def test_files_that_are_no_plan_are_refused_with_the_field(tmp_path):
    with pytest.raises(SpecError, match=r"can't be read: No such file"):
        read_plan(tmp_path / "none.json")
    for body in (b"", b"[1]", b"{}", b'{"plan": {}}', b"\xff\xfe", b'{"flow": 3}'):
        (tmp_path / "bad.json").write_bytes(body)
        with pytest.raises(SpecError, match=r"bad.json is no plan"):
            read_plan(tmp_path / "bad.json")


def test_the_commands_write_check_and_compare_plans(tmp_path, program):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    command = CliRunner()
    assert command.invoke(cli, ["plan", str(program), "--out", str(one), "--no-try"]).exit_code == 0
    document = json.loads(one.read_text())
    stage(document, "judged.score")["chunk"] = 7
    other.write_text(json.dumps(document))
    checked = command.invoke(cli, ["plan", str(program), "--check", str(other), "--no-try"])
    assert checked.exit_code == 0
    assert f"{other} is a plan of this flow" in checked.output
    compared = command.invoke(cli, ["diff", str(one), str(other)])
    assert compared.stdout == "call judged.score: @sample on functions-0, chunk 64 -> @sample on functions-0, chunk 7\n"
    document["workers"][0]["lease"] = ""
    other.write_text(json.dumps(document))
    refused = command.invoke(cli, ["plan", str(program), "--check", str(other), "--no-try"])
    assert refused.exit_code == 1
    assert "PlanError" in refused.output
    assert "no lease" in refused.output
