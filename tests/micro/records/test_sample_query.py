"""`m2flow samples`: which samples a condition chooses, what is told of each, and the files that they go to."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_clusters import FAKES

from m2flow import Chat, Dataset, Policy, Reward, Sample, agent, flow, steps
from m2flow.cli.main import cli
from m2flow.errors import EngineError, OptionError, SpecError
from m2flow.micro.records.sample_query import COLUMNS, SHOWN_BY, SampleQuery, export, shown_samples
from m2flow.runner.run import Run
from m2flow.spec import RunSettings
from m2flow.viewer.health import alerts_of


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@dataclass(frozen=True)
class Oddity:
    reward: float
    tokens: int
    is_odd: bool


def odd(sample: Sample) -> Oddity:
    rest = sample.num_tokens % 2
    return Oddity(reward=rest - 0.5, tokens=sample.num_tokens, is_odd=rest == 1)


@flow
def twice() -> None:
    policy, first, second = Policy("fake"), Reward(length), Reward(odd)
    prompts = Dataset([{"prompt": f"{i} \x1b[2J", "answer": f"it's sum{i}"} for i in range(9)])
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        first.score(responses)
        policy.update(responses, second.score(responses), epochs=2)
    first.score(policy.generate(prompts.take(1), n=2, max_new_tokens=6))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return Path(Run(twice, {}, FAKES, RunSettings(runs_dir=str(runs), eager=True)).execute().run_dir)


def test_every_sample_is_there_in_the_order_of_identity(run_dir):
    with SampleQuery(run_dir) as book:
        entries = list(book.entries())
        assert len(entries) == book.count() == 14
        keys = [tuple(map(int, entry.sample.split("/"))) for entry in entries]
        assert keys == sorted(keys)


def test_trackers_are_shown_the_first_samples_of_a_step_with_their_texts_and_rewards(run_dir):
    module, _, name = SHOWN_BY.partition(":")
    assert getattr(sys.modules[module], name) is shown_samples
    columns, rows = shown_samples(run_dir, 1, 4)
    with SampleQuery(run_dir) as book:
        expected = list(book.entries("step = 1", limit=4))
    assert len(rows) == 4
    for row, entry in zip(rows, expected, strict=True):
        told = dict(zip(columns, row, strict=True))
        assert (told["step"], told["sample"], told["reward"]) == (1, entry.sample, entry.reward)
        assert (told["prompt"], told["response"]) == (entry.prompt_text, entry.response_text)
    assert shown_samples(run_dir, 99, 4)[1] == []


def test_a_sample_tells_its_rewards_in_the_order_of_the_calls_and_how_often_it_was_trained_on(run_dir):
    with SampleQuery(run_dir) as book:
        entry = next(book.entries("step = 1"))
        assert [by.split()[0] for by in entry.rewards] == ["length", "odd"]
        assert entry.reward == list(entry.rewards.values())[1]
        assert (entry.num_rewards, entry.num_updates, entry.ending, entry.versions) == (2, 2, "consumed", [1])
        assert [event.split(":")[0] for event in entry.life[1:]] == ["generated", "rewarded", "rewarded", "trained on", "trained on"]
        assert entry.prompt_text.endswith("\x1b[2J")


def test_a_reward_has_its_parts_and_samples_are_found_by_them(run_dir):
    with SampleQuery(run_dir) as book:
        (entry,) = book.entries("parts ->> 'is_odd' = 1", limit=1)
        ((by, parts),) = entry.parts.items()
        assert by == list(entry.rewards)[1]
        assert parts == {"tokens": entry.response_tokens, "is_odd": 1.0}
        assert all(not entry.parts for entry in book.entries("step = -1"))
    shown = CliRunner().invoke(cli, ["samples", str(run_dir), "--where", f"sample = '{entry.sample}'"]).output
    assert f"  {by}: 0.5, of tokens {entry.response_tokens}, is_odd 1\n" in shown


def test_texts_and_columns_of_the_dataset_are_searched(run_dir):
    with SampleQuery(run_dir) as book:
        number = next(book.entries("step = 1")).prompt_text.split()[0]
        found = list(book.entries(f"matches('sum{number}')"))
        assert [entry.columns for entry in found] == [{"answer": f"it's sum{number}"}] * 2
        assert {entry.prompt_text.split()[0] for entry in found} == {number}
        assert book.count("matches('sum*') and step = 1") == 6
        assert book.count(f"matches('columns : \"it''s sum{number}\"')") == 2
        assert book.count(f"matches('response : sum{number}')") == 0
        with pytest.raises(OptionError, match="can't be made"):
            book.count("matches('(')")


def test_a_table_has_the_columns_of_the_dataset_and_calls_one_of_a_taken_name_otherwise(run_dir, tmp_path):
    with SampleQuery(run_dir) as book:
        table = book.columns("step = 1", order="reward desc")
        assert [f"it's sum{text.split()[0]}" for text in table["prompt_text"]] == table["answer"]

    @flow
    def counted() -> None:
        policy = Policy("fake")
        policy.generate(Dataset([{"prompt": "a", "step": 7}, {"prompt": "b", "step": 8}]).take(2), max_new_tokens=2)

    run = Run(counted, {}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=True)).execute()
    with SampleQuery(Path(run.run_dir)) as book:
        table = book.columns()
    assert (table["step"], table["column/step"]) == ([-1, -1], [7, 8])


def test_samples_that_nothing_trained_on_are_unused(run_dir):
    with SampleQuery(run_dir) as book:
        assert {entry.step for entry in book.entries("ending = 'unused'")} == {-1}


@pytest.mark.parametrize("name", COLUMNS)
def test_each_column_may_be_named_in_a_condition_and_in_an_order(run_dir, name):
    with SampleQuery(run_dir) as book:
        assert book.count(f"{name} IS NOT NULL") == (12 if name == "parts" else 14)  # Those that `odd` has judged have parts.
        assert len(list(book.entries(order=f"{name} desc", limit=3))) == 3


def test_conditions_choose_and_orders_sort(run_dir):
    with SampleQuery(run_dir) as book:
        lengths = [entry.response_tokens for entry in book.entries(order="response_tokens desc")]
        assert lengths == sorted(lengths, reverse=True)
        assert {entry.reward for entry in book.entries("reward = 0.5 and num_rewards = 2")} == {0.5}


@pytest.mark.parametrize(
    "condition", ["no_such_column = 1", "step =", "load_extension('x')", "1); DELETE FROM samples; --", "1 -- all", "writefile('x', 'y')"]
)
def test_a_condition_that_is_none_is_refused_and_changes_nothing(run_dir, condition):
    with SampleQuery(run_dir) as book:
        with pytest.raises(OptionError, match="condition"):
            list(book.entries(condition))
        assert book.count() == 14


def test_a_directory_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(SpecError, match="there is no ledger"), SampleQuery(tmp_path):
        pass
    (tmp_path / "ledger.db").write_bytes(b"not a database, by far not one" * 100)
    with pytest.raises(SpecError, match="can't read"), SampleQuery(tmp_path):
        pass


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_ledger_that_is_cut_off_is_named_and_not_the_condition(run_dir, tmp_path, share):
    whole = (run_dir / "ledger.db").read_bytes()
    (tmp_path / "ledger.db").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(SpecError, match=r"can't read .*ledger\.db"), SampleQuery(tmp_path) as book:
        list(book.entries())


def test_turns_of_episodes_choose_and_sort(tmp_path):
    @agent
    async def talkative(chat: Chat, row: Sample) -> float:
        for _ in range(int(row["turns"])):
            await chat.say("more", max_tokens=3)
        return 1.0

    @flow
    def talks() -> None:
        policy = Policy("fake")
        rows = Dataset([{"prompt": f"{turns}", "turns": turns} for turns in (1, 3, 2)])
        policy.update(played := policy.rollout(talkative, rows.take(3), n=2, max_tokens=100), played.reward)

    done = Run(talks, {}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=True)).execute()
    with SampleQuery(Path(done.run_dir)) as book:
        assert [entry.turns for entry in book.entries("turns > 1", order="turns desc")] == [3, 3, 2, 2]
        assert book.columns(order="turns")["turns"] == [1, 1, 2, 2, 3, 3]


def test_a_segment_that_is_gone_is_named(run_dir, tmp_path):
    (tmp_path / "ledger.db").write_bytes((run_dir / "ledger.db").read_bytes())
    with SampleQuery(tmp_path) as book, pytest.raises(EngineError, match=r"the segment .*\.seg.* is missing"):
        list(book.entries(limit=1))


def test_a_file_of_json_lines_has_all_that_was_chosen(run_dir, tmp_path):
    with SampleQuery(run_dir) as book:
        assert export(book.entries("step = 0"), tmp_path / "some.jsonl") == 6
    lines = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 6
    assert set(COLUMNS) <= set(lines[0])


def test_parquet_without_pyarrow_says_what_to_install(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with SampleQuery(run_dir) as book, pytest.raises(OptionError, match=r"pip install 'm2flow\[parquet\]'"):
        export(book.entries(), tmp_path / "all.parquet")


def test_a_parquet_file_has_the_same_samples(run_dir, tmp_path):
    pytest.importorskip("pyarrow", reason="parquet: the extra parquet is not installed")
    import pyarrow.parquet as pq

    with SampleQuery(run_dir) as book:
        assert export(book.entries(), tmp_path / "all.parquet") == 14
        rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
        assert [(row["sample"], row["reward"]) for row in rows] == [(entry.sample, entry.reward) for entry in book.entries()]


def test_the_command_shows_texts_on_a_line_and_never_sends_control_characters(run_dir):
    shown = CliRunner().invoke(cli, ["samples", str(run_dir), "--life", "--limit", "2"])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert "\\x1b[2J" in shown.output
    assert "2 of 14 samples" in shown.output


def test_the_command_writes_json_and_refuses_other_files(run_dir):
    lines = CliRunner().invoke(cli, ["samples", str(run_dir), "--json", "--limit", "3"]).output.splitlines()
    assert [json.loads(line)["member"] for line in lines] == [0, 1, 0]
    refused = CliRunner().invoke(cli, ["samples", str(run_dir), "--out", "all.csv"])
    assert refused.exit_code == 2
    assert "must end in .jsonl or .parquet" in refused.output


def one(sample: Sample) -> float:
    return 1.0


@flow
def summed() -> None:
    policy, verifier = Policy("fake"), Reward.sum({length: 0.5, one: -2.0})
    prompts = Dataset([{"prompt": f"{i}"} for i in range(9)])
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=2)
        policy.update(responses, verifier.score(responses))


def test_the_reward_of_a_sample_is_the_sum_that_was_trained_on_and_it_counts_once(tmp_path: Path) -> None:
    run_dir = Path(Run(summed, {}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=True)).execute().run_dir)
    with SampleQuery(run_dir) as book:
        for entry in book.entries():
            *parts, total = entry.rewards.values()
            assert parts == [float(entry.response_tokens), 1.0]
            assert entry.reward == total == 0.5 * entry.response_tokens - 2.0
    (cut,) = [alert for alert in alerts_of(run_dir, None) if alert.rule == "truncated"]
    assert "of the last 18 responses" in cut.says


@agent
async def picky(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), max_tokens=4)
    if row["answer"] == "none":
        raise ValueError("no answer to compare with")
    return float(len(turn.text))


@flow
def episodes() -> None:
    policy = Policy("fake")
    rows = Dataset([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1/0=", "answer": "none"}])
    played = policy.rollout(picky, rows.take(2), n=2, max_tokens=100)
    policy.update(played, played.reward)


def test_an_episode_has_the_columns_of_its_row_and_why_it_failed(tmp_path: Path) -> None:
    run = Run(episodes, {}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=True)).execute()
    with SampleQuery(Path(run.run_dir)) as query:
        columns = [entry.columns for entry in query.entries()]
    failed = {"answer": "none", "failure": "raised: ValueError: no answer to compare with"}
    assert columns == [{"answer": "2"}, {"answer": "2"}, failed, failed]
