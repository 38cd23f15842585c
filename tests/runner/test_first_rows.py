"""`m2flow plan` tries the flow's first rows, and its functions on one stub sample, before anything starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from message_parts import lacks

from m2flow.cli.main import cli
from m2flow.runner import first_rows

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"

FLOW = """
import asyncio, os, tempfile, time
from m2flow import Dataset, Policy, Reference, Reward, Role, call, flow, log, op, rewards, steps

HERE = os.path.dirname(__file__)

{functions}

@flow
def tried(num_steps: int = 2):
    policy = Policy({model!r}, init="random", {policy})
    prompts = Dataset({rows}, name="sums", shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=3, max_new_tokens=4)
        {body}
"""
ROWS = '[{"prompt": "12=", "answer": "12"}, {"prompt": "21=", "answer": "12"}]'


def plan(folder: Path, body: str, functions: str = "", *options: str, rows: str = ROWS, policy: str = "", model: Path = DIGITS) -> Result:
    file = folder / "tried.py"
    file.write_text(FLOW.format(functions=functions, model=str(model), policy=policy, rows=rows, body=body.replace("\n", "\n        ")))
    return CliRunner().invoke(cli, ["plan", str(file), *options])


def said(result: Result) -> list[str]:
    """What was found, without places."""
    assert result.exit_code == 0, result.output
    lines = result.stdout.partition("tried on the first rows:\n")[2].splitlines()
    return [line.strip().partition("  ")[2] for line in lines]


def refused(result: Result) -> str:
    assert result.exit_code != 0
    return result.stderr


def test_a_reward_off_the_shelf_whose_column_is_missing_is_an_error_too_though_nothing_matches(tmp_path: Path) -> None:
    body, rows = (
        "policy.update(responses, Reward.sum({RegexMatch('[a-z]+'): 1.0}).score(responses))",
        '[{"prompt": "12="}, {"prompt": "21="}]',
    )
    error = refused(plan(tmp_path, body, "from m2flow.rewards import RegexMatch", rows=rows))
    assert "the sample has no 'answer'; it has prompt" in error


def test_responses_with_a_sampling_mask_are_tried_as_others_are(tmp_path: Path) -> None:
    function = "def length(sample):\n    return float(len(sample.text))"
    body = "more = policy.generate(prompts.take(2), n=2, max_new_tokens=4, top_k=3, sampling_mask=True)\nReward(length).score(more).mean()"
    assert any("length" in line or "gives 2.0" in line for line in said(plan(tmp_path, body, function)))


def test_a_reward_that_asks_for_a_column_that_the_dataset_lacks_is_an_error_at_the_flows_line(tmp_path: Path) -> None:
    wrong = "def is_right(sample):\n    return float(sample.text == sample.anwser)"
    error = refused(plan(tmp_path, "policy.update(responses, Reward(is_right).score(responses))", wrong))
    assert re.match(r"RewardError: .*tried\.py:16  policy\.update\(responses, Reward\(is_right\)", error)
    assert "is_right raised AttributeError" in error
    assert "the sample has no 'anwser'; it has answer" in error
    assert "It was given a stub sample (prompt='12=', text='12') with the columns answer." in error
    assert "--no-try" in error
    assert plan(tmp_path, "policy.update(responses, Reward(is_right).score(responses))", wrong, "--no-try").exit_code == 0


def test_a_reward_that_returns_a_tuple_is_an_error_and_one_that_may_fail_is_counted(tmp_path: Path) -> None:
    pair = "def pair(sample):\n    return 1.0, 'fine'"
    assert "the reward pair returned tuple: (1.0, 'fine')" in refused(plan(tmp_path, "Reward(pair).score(responses).mean()", pair))
    found = said(plan(tmp_path, "log(a=Reward(pair, on_error=0.0).score(responses).mean())", pair))
    assert found[1].startswith("pair.score: counts as 0.0 on the stub sample: the reward pair returned tuple")


def test_functions_get_what_those_before_them_gave_and_groups_have_all_their_samples(tmp_path: Path) -> None:
    functions = """
async def later(sample):
    await asyncio.sleep(0)
    return {"reward": float(sample.finish == 0) + sample.num_tokens, "part": 0.5}

@op(granularity="group")
def centred(group, rewards, by):
    return [len(group) * by + reward for reward in rewards]

@op(granularity="batch")
def total(values):
    return {"sum": sum(values)}
"""
    body = (
        "rewards_ = Reward(later).score(responses)\nhigh = centred(responses, rewards_, 100.0)\ntotals = total(high)\nlog(a=totals['sum'])"
    )
    assert said(plan(tmp_path, body, functions)) == [
        "policy.generate: the first 2 rows of sums have 3 tokens each",
        "later.score: gives 3.0 on the stub sample",
        "centred: gives 303.0 on the stub sample",
        "total: gives {'sum': 909.0} on the stub sample",
    ]


def test_rows_of_an_agent_are_what_it_is_given_and_not_what_it_says(tmp_path: Path) -> None:
    functions = """
from m2flow import agent
@agent
async def solver(chat, row):
    return float(len((await chat.say(row.prompt)).text))
"""
    body = "episodes = policy.rollout(solver, prompts.take(2), n=2, max_tokens=8)"
    lines = said(plan(tmp_path, body, functions, model=DIGITS.parent / "chat"))
    (line,) = [line for line in lines if line.startswith("policy.rollout")]
    assert not lacks(line, "in `prompt`", "agent")
    assert not lacks(lines[1], "policy.generate", "raw texts")


def test_raw_texts_for_a_model_with_a_chat_template_are_called_so(tmp_path: Path) -> None:
    body, chat = "policy.update(responses, responses.length * 1.0)", DIGITS.parent / "chat"
    messages = '[{"prompt": [{"role": "user", "content": "12="}]}] * 2'
    raw = said(plan(tmp_path, body, model=chat))
    assert not lacks(raw[1], "policy.generate", "raw texts", "chat=True", "chat template")
    assert len(raw) == 2
    assert len(said(plan(tmp_path, body, model=chat, policy="chat=True"))) == 1
    assert len(said(plan(tmp_path, body, model=chat, rows=messages))) == 1


def test_what_is_filtered_out_is_tried_all_the_same(tmp_path: Path) -> None:
    functions = "def zero(sample):\n    return 0.0\n\n@op()\ndef after(sample):\n    return sample.text"
    body = "scores = Reward(zero).score(responses)\nlog(n=after(responses.select(scores > 0)).mean())"
    assert said(plan(tmp_path, body, functions))[-1] == "after: gives '12' on the stub sample"


def test_of_what_keeps_samples_or_groups_the_plan_says_whether_it_keeps_the_stub_sample(tmp_path: Path) -> None:
    functions = "def short(sample):\n    return len(sample.text) < 9\n\nasync def better(group):\n    return group[0].reward > 5"
    body = """one = Reward(lambda sample: 1.0, name="one")
few = policy.generate(prompts, n=2, max_new_tokens=4, count=1, score=one, keep=better)
log(n=responses.filter(short).count(), m=responses.filter_groups(lambda group: False).count(), k=few.count())"""
    found = [line for line in said(plan(tmp_path, body, functions)) if "stub" in line]
    assert found == [
        "one.score: gives 1.0 on the stub sample",
        "keep: leaves out the stub sample",
        "short: keeps the stub sample",
        "filter_groups: leaves out the stub sample",
    ]


def test_a_function_that_connects_or_writes_is_stopped_and_roles_are_not_called(tmp_path: Path) -> None:
    functions = """
def writes(sample):
    try:
        with open(HERE + "/left", "w") as file:
            file.write("x")
    except Exception:
        pass
    return 1.0

def keeps(sample):
    with tempfile.TemporaryFile() as file:
        return float(file.write(b"xy"))

class Judge(Role):
    @call(returns="reward")
    def score(self, sample):
        return 1.0
"""
    body = """judge = Judge(name=f"judge_{_}")
for scores in [Reward(writes).score(responses), Reward(keeps).score(responses), judge.score(responses),
               Reward(rewards.LlmJudge("http://localhost:9", "m"), name="asked").score(responses)]:
    log(mean=scores.mean())"""
    found = said(plan(tmp_path, body, functions))
    assert found[1:] == [
        f"writes.score: not tried, since it writes {os.path.realpath(tmp_path)}/left",
        "keeps.score: gives 2.0 on the stub sample",
        "judge_0.score: not called, since it is a role",
        "asked.score: not tried, since it connects to localhost",
    ]
    assert not (tmp_path / "left").exists()


def test_a_function_that_does_not_come_back_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "_EACH_S", 0.5)
    functions = "def hangs(sample):\n    while True:\n        pass"
    found = said(plan(tmp_path, "log(a=Reward(hangs).score(responses).mean())", functions))
    assert not lacks(found[-1], "hangs.score", "0.5 s", "not tried")


def test_a_row_that_the_template_refuses_or_that_is_too_long_is_named(tmp_path: Path) -> None:
    refusing = "chat=True, chat_template=\"{% if '9' in messages[0]['content'] %}{{ raise_exception('no nines') }}{% endif %}1=\""
    rows = '[{"prompt": "12="}, {"prompt": "19="}]'
    error = refused(plan(tmp_path, "pass", rows=rows, policy=refusing))
    assert "row 1 that sums.take gives to policy.generate: the chat template refuses the messages" in error
    assert "no nines" in error
    long = '[{"prompt": "12="}, {"prompt": "1" * 5000}]'
    error = refused(plan(tmp_path, "pass", rows=long))
    assert "row 1 that sums.take gives to policy.generate: its prompt has 5,000 tokens, and the model's context is" in error


@pytest.mark.parametrize(("template", "shows"), [("{% if tools %}tools{% endif %}1=", True), ("1=", False)])
def test_tools_that_the_template_does_not_write_are_named(template: str, shows: bool, tmp_path: Path) -> None:
    options = f"chat=True, chat_template={template!r}, tools=[{{'type': 'function', 'function': {{'name': 'add'}}}}]"
    assert any("the chat template writes no tools" in line for line in said(plan(tmp_path, "pass", policy=options))) != shows


@pytest.mark.parametrize("shows", [True, False])
def test_tools_of_an_agent_that_the_template_does_not_present_are_named(shows: bool, tmp_path: Path) -> None:
    functions = """
from m2flow import agent, tool

@tool(replay="pure")
def add(a: int, b: int) -> int:
    return a + b

@agent
async def asks(chat, row):
    return float((await chat.say(row.prompt, tools=[add])).text == "3")
"""
    template = "{% for one in tools or [] %}<tool_call>{% endfor %}1=" if shows else "1="
    body = "policy.rollout(asks, prompts.take(2), n=2, max_tokens=4)"
    found = said(plan(tmp_path, body, functions, policy=f"chat=True, chat_template={template!r}"))
    assert any("presents no tools" in line and "chat_template=" in line for line in found) != shows


def test_a_model_without_weights_is_named_before_a_run_finds_it(tmp_path: Path) -> None:
    body = f"other = Reference({str(DIGITS)!r})\nlog(a=(responses.logprobs - other.logprobs(responses)).sum(over='sample').mean())"
    error = refused(plan(tmp_path, body))
    assert re.search(r"the model of \w+, .*digits, has no weights", error), error
    assert "init='random'" in error
    assert plan(tmp_path, body, "", "--no-try").exit_code == 0


def test_the_plan_is_the_same_with_and_without_the_try(tmp_path: Path) -> None:
    functions = "SEEN = []\n\ndef remembers(sample):\n    return float(len(SEEN))"
    body = "log(a=Reward(remembers).score(responses).mean())"
    documents = [json.loads(plan(tmp_path, body, functions, "--json", *extra).stdout) for extra in ((), ("--no-try",))]
    assert documents[0] == documents[1]


def test_a_function_of_episodes_sees_one_turn_in_the_stub_as_in_every_episode_that_spoke(tmp_path: Path) -> None:
    functions = (
        "from m2flow import agent\n\n"
        "@agent\nasync def asks(chat, row):\n    return float(len((await chat.say(row.prompt)).text))\n\n"
        "def opening(sample):\n    return float(len(sample.episode['turns'][0]['text']))"
    )
    body = "played = policy.rollout(asks, prompts.take(2), n=2, max_tokens=4)\nlog(opening=played.map(opening).mean())"
    assert "opening: gives 2.0 on the stub sample" in " ".join(said(plan(tmp_path, body, functions)))


def test_tokenizers_are_loaded_without_torch_and_a_function_gets_all_of_it(tmp_path: Path) -> None:
    functions = """
def tools(sample):
    import sys
    before = [name for name in ("torch", "transformers") if name in sys.modules]
    import torch
    from transformers import AutoModelForCausalLM
    return f"{before} {torch.ones(2).sum().item():g} {AutoModelForCausalLM.__module__}"
"""
    file = tmp_path / "tried.py"
    body = "responses.map(tools).batch()"
    file.write_text(FLOW.format(functions=functions, model=str(DIGITS), policy="", rows=ROWS, body=body))
    # Another process, since torch is loaded in this one.
    result = subprocess.run([sys.executable, "-m", "m2flow", "plan", str(file)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "gives '[] 2 transformers.models.auto.modeling_auto' on" in result.stdout
    assert "rows of sums have 3 tokens each" in result.stdout
