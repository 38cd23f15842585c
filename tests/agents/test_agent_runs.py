"""Agents in real processes: the same digests under every plan, and after `kill -9` of all of them at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from tiny_models import byte_tokenizer, save_config

from m2flow.micro.records.sample_query import SampleQuery
from m2flow.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
FAKES = "rollout: {engine: fake, workers: 2}\ntrain: {engine: fake}\ndevice: cpu\ncores: 2\nplacement: split\n"


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "spec.yaml").write_text(FAKES)
    flow = [] if "--resume" in arguments else [str(ROOT / "tests" / "support" / "agent_run.py"), "--cluster", str(folder / "spec.yaml")]
    where = [] if "--resume" in arguments else ["--runs-dir", str(folder / "runs")]
    return [sys.executable, "-m", "m2flow", "run", *flow, "--json", "--quiet", *where, *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "M2FLOW_TEST_PAID": str(folder / "paid"), "OMP_NUM_THREADS": "1"}


def summary_of(folder: Path, *arguments: str) -> dict[str, object]:
    done = programs.run(command(folder, *arguments), timeout=300, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def kill_midway(folder: Path, num_calls: int, *arguments: str) -> Path:
    """Kill a run and all of its workers once tools have been called so often; return its directory."""
    process = programs.Popen(
        command(folder, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(folder), start_new_session=True
    )
    paid, deadline = folder / "paid", time.monotonic() + 200
    while not (paid.exists() and len(paid.read_text().splitlines()) >= num_calls):
        assert process.poll() is None, "it ended before it was to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (run,) = (folder / "runs").iterdir()
    return run


def digests(summary: dict[str, object]) -> tuple[object, object]:
    return summary["samples_sha256"], summary["weights_sha256"]


@pytest.mark.slow
def test_an_agents_run_in_real_processes_equals_the_eager_one_and_so_does_one_that_was_killed_and_resumed(tmp_path):
    folders = [tmp_path / name for name in ("eager", "planned", "killed")]
    for folder in folders:
        folder.mkdir()
    expected = digests(summary_of(folders[0], "--eager"))
    assert digests(summary_of(folders[1])) == expected
    run = kill_midway(folders[2], 150)
    assert digests(summary_of(folders[2], "--resume", str(run))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_calls", [30, 200])
def test_a_tool_with_effects_runs_once_in_a_run_that_is_killed_and_resumed(tmp_path, num_calls):
    run = kill_midway(tmp_path, num_calls, "--effects")
    summary_of(tmp_path, "--resume", str(run))
    lines = (tmp_path / "paid").read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert len(lines) > 400, "the resumed run went on with most of the episodes"


def tool_use(folder: Path, *arguments: str) -> dict[str, Any]:
    return run_of(ROOT / "flows" / "tool_use.py", folder, *arguments)


def run_of(file: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    flow = [str(file), "--json", "--quiet", "--runs-dir", str(folder)]
    done = programs.run([sys.executable, "-m", "m2flow", "run", *flow, *arguments], timeout=550)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_agent_that_speaks_http_learns_and_has_the_same_digests_under_two_plans(tmp_path):
    file = ROOT / "flows" / "external_agent.py"
    small = ["--deterministic", "--num-steps", "2", "--warm-steps", "4", "--batch", "3"]
    split = ["--cluster", str(ROOT / "clusters" / "laptop-split.yaml")]
    assert digests(run_of(file, tmp_path, *small, "--eager")) == digests(run_of(file, tmp_path, *small, *split))
    summary = run_of(file, tmp_path, "--num-steps", "15", "--seed", "0")
    assert summary["reward_last"] > summary["reward_first"] + 0.2


@pytest.mark.slow
def test_the_embedded_engine_gives_an_agent_the_same_digests_under_two_plans(tmp_path):
    small = ["--deterministic", "--num-steps", "2", "--warm-steps", "4", "--batch", "3"]
    split = ["--cluster", str(ROOT / "clusters" / "laptop-split.yaml")]
    assert digests(tool_use(tmp_path, *small, "--eager")) == digests(tool_use(tmp_path, *small, *split))


FORGETTING = """
from m2flow import Chat, Dataset, Policy, Sample, agent, by_conversation, flow, steps

TEMPLATE = (
    "{{% set ns = namespace(last=0) %}}"
    "{{% for m in messages %}}{{% if m.role == 'user' %}}{{% set ns.last = loop.index0 %}}{{% endif %}}{{% endfor %}}"
    "{{% for m in messages %}}"
    "{{{{ m.role[0] }}}}{{{{ m.content[2:] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}}}<turn>"
    "{{% endfor %}}{{% if add_generation_prompt %}}a{{% endif %}}"
)


@agent
async def talks(chat: Chat, row: Sample) -> dict[str, float]:
    other = chat.conversation("other")
    for _ in range(2):
        heard = await chat.say(str(row.prompt), max_tokens=4)
        said = await other.say(heard.text or "-", max_tokens=4)
    branch = await chat.fork().say("last", max_tokens=4)
    return {{"main": len(branch.text) / 4, "other": -len(said.text) / 4}}


@flow
def forgets(num_steps: int = 2):
    policy = Policy({model!r}, init="random", chat=True, chat_template=TEMPLATE)
    rows = Dataset([{{"prompt": "one"}}, {{"prompt": "two"}}], name="rows")
    for _ in steps(num_steps):
        episodes = policy.rollout(talks, rows.take(2), n=3, max_tokens=40, history="fork", max_conversations=3)
        policy.update(episodes, episodes.reward, advantages=by_conversation())
"""


@pytest.mark.slow
def test_conversations_that_the_template_writes_anew_give_the_same_digests_under_two_plans_of_the_embedded_engine(tmp_path):
    byte_tokenizer(tmp_path / "model")
    model = save_config("Qwen2", tmp_path / "model", tokenizer=False, vocab_size=258, max_position_embeddings=256)
    file = tmp_path / "forgets.py"
    file.write_text(FORGETTING.format(model=model))
    split = ["--cluster", str(ROOT / "clusters" / "laptop-split.yaml")]
    eager = run_of(file, tmp_path, "--deterministic", "--eager")
    assert digests(eager) == digests(run_of(file, tmp_path, "--deterministic", *split))
    with SampleQuery(Path(eager["run_dir"])) as query:
        found = [[one.name for one in entry.conversations] for entry in query.entries("")]
    assert len(found) == 12
    assert all(names[:1] == ["main"] and {"main/1", "other"} < set(names) for names in found)
    assert sum(names.count("main") > 1 for names in found) > 6, "most were written anew"
    lines = (Path(eager["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    differences = [found for line in lines if (found := json.loads(line)["values"].get("rollout_diff/mean")) is not None]
    assert differences
    assert max(differences) < 1e-4, "trainer and rollout agree on the tokens of every sequence"


@pytest.mark.slow
def test_a_tiny_model_that_plays_against_itself_learns_the_openings_that_win(tmp_path):
    summary = run_of(ROOT / "flows" / "nim.py", tmp_path, "--seed", "0")
    lines = (Path(summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    opens = [found for line in lines if (found := json.loads(line)["values"].get("opens_well")) is not None]
    assert sum(opens[-5:]) / 5 > sum(opens[:5]) / 5 + 0.25


@pytest.mark.slow
def test_two_tiny_models_that_play_against_each_other_both_learn_from_the_episodes_they_share(tmp_path):
    """Of seeds 0 and 3 to 5 the first player rises by 0.27 or more, and the second from 0.48 or less to 0.81 or more."""
    summary = run_of(ROOT / "flows" / "duel.py", tmp_path, "--seed", "0", "--num-steps", "20")
    lines = (Path(summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["values"] for line in lines]
    opens, chances, used = ([values[name] for values in found if name in values] for name in ("opens_well", "chances", "answers_well"))
    assert len(opens) == len(chances) == len(used) == 20
    assert sum(opens[-5:]) / 5 > sum(opens[:5]) / 5 + 0.1
    assert sum(used[-5:]) / sum(chances[-5:]) > sum(used[:5]) / sum(chances[:5]) + 0.08


@pytest.mark.slow
def test_trees_of_episodes_have_the_same_digests_under_two_plans(tmp_path):
    file = ROOT / "flows" / "tree_rollout.py"
    small = ["--deterministic", "--num-steps", "2", "--warm-steps", "4", "--batch", "2", "--branches", "2"]
    split = ["--cluster", str(ROOT / "clusters" / "laptop-split.yaml")]
    assert digests(run_of(file, tmp_path, *small, "--eager")) == digests(run_of(file, tmp_path, *small, *split))


@pytest.mark.slow
def test_a_tiny_model_begins_to_learn_from_few_trees_of_episodes(tmp_path):
    """Of seeds 0 and 3 to 5 it rises by 0.18 to 0.4."""
    small = ["--num-steps", "16", "--seed", "0"]
    summary = run_of(ROOT / "flows" / "tree_rollout.py", tmp_path, *small)
    rewards = [value for _, value in read_metrics(summary["run_dir"])["reward"]]
    assert len(rewards) == 16
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


@pytest.mark.long
def test_a_tiny_model_learns_from_trees_of_episodes(tmp_path):
    summary = run_of(ROOT / "flows" / "tree_rollout.py", tmp_path, "--seed", "0")
    assert summary["reward_last"] > summary["reward_first"] + 0.15


@pytest.mark.slow
def test_a_tiny_model_learns_what_to_search_for(tmp_path):
    summary = run_of(ROOT / "flows" / "search.py", tmp_path, "--num-steps", "12", "--seed", "0")
    assert summary["reward_last"] > summary["reward_first"] + 0.2


@pytest.mark.slow
def test_a_tiny_model_learns_to_write_code_that_passes_tests_which_it_does_not_see(tmp_path):
    summary = run_of(ROOT / "flows" / "unit_tests.py", tmp_path, "--num-steps", "12", "--seed", "0")
    assert summary["reward_last"] > summary["reward_first"] + 0.2


@pytest.mark.slow
def test_a_tiny_model_learns_to_use_a_calculator_and_python_and_is_trained_on_what_it_said(tmp_path):
    summary = tool_use(tmp_path, "--num-steps", "15", "--seed", "0")
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    lines = (Path(summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    differences = [
        values["rollout_diff/mean"] for values in (json.loads(line)["values"] for line in lines) if "rollout_diff/mean" in values
    ]
    assert len(differences) >= 15
    assert max(differences) < 1e-4, "trainer and rollout agree on each masked token, so the mask is at the right tokens"
