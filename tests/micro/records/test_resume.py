"""A run that is killed after any event, and resumed, ends as one that was not: weights, samples, rewards, what was consumed, logs."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_flows import ppo
from one_thread import commit_every, imaged, resumed
from replayed import ROWS, digits
from resumed_runs import _chosen, account, check_images, fake_cluster, loop

from m2flow import AdamW, Dataset, Flow, Policy, Reference, Reward, Role, Sample, call, flow, informative, log, ppo_clip, steps
from m2flow.errors import RewardError
from m2flow.macro.replay import CallRecord
from m2flow.micro.records.audit import audit
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.ledger import read_decisions
from m2flow.micro.records.segments import Kind, SegmentReader, scan_segments, worker_of
from m2flow.runner.run import Run
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, RunSettings


@flow
def dynamic(num_steps: int = 3) -> None:
    """A generation that draws its own prompts until enough groups are kept, and a role with state."""
    policy, judge, prompts, memory = Policy("fake"), Reward(digits), Dataset(ROWS), Memory()
    for _ in steps(num_steps):
        kept = policy.generate(prompts, n=2, count=2, max_new_tokens=4, score=judge, keep=informative, max_draws=12)
        seen = memory.seen(kept)
        metrics = policy.update(kept, kept.reward, optimizer=AdamW(1e-3))
        log(seen=seen, tokens=metrics["num_tokens"])
        prompts.take(int(float(seen)) % 2 + 1)


class Memory(Role):
    """How many tokens it was ever shown."""

    def __init__(self) -> None:
        self.total = 0

    @call(granularity="batch", reads=["memory.total"], writes=["memory.total"])
    def seen(self, samples: list[Sample]) -> float:
        self.total += sum(sample.num_tokens for sample in samples)
        return float(self.total)


@flow(staleness=1)
def takes_over(num_steps: int = 4) -> None:
    """Late samples go on in the next step, and generation is ahead of training."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=7, oversample=1.5, late="carry")
        metrics = policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3))
        log(tokens=metrics["num_tokens"])


@flow(staleness=1)
def ahead(num_steps: int = 4) -> None:
    """What is generated while an update runs depends on time; what is late is dropped."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=7, oversample=1.5, late="drop")
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3))


@flow
def defers(num_steps: int = 4) -> None:
    """Which rows come again in a later step depends on time, before anything is trained."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=2, max_new_tokens=3, count=3, oversample=2.0, late="defer")
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3))


@flow
def replies(num_steps: int = 4) -> None:
    """Which answers are replied to depends on time, before anything is trained."""
    first, second, judge, prompts = Policy("fake"), Policy("fake", name="second"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        said = first.generate(prompts.take(4), n=1, max_new_tokens=7, oversample=1.5, late="drop")
        replied = second.generate(said.with_columns(first=said.text), n=2, max_new_tokens=5)
        second.update(replied, judge.score(replied), optimizer=AdamW(1e-3))


@flow
def catching(num_steps: int = 3) -> None:
    """Errors that the flow catches, and goes on from by another way; and a reference that is made anew in every second step."""
    policy, judge, strict, prompts = Policy("fake"), Reward(digits), Reward(refuses), Dataset(ROWS)
    reference = Reference(policy)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
        refused = strict.score(responses)
        mean = refused.mean()
        try:
            float(mean)
        except RewardError:
            log(refused=float(step))
            prompts.take(1)
        if step % 2:
            reference = Reference(policy)
        log(mean=mean, kl=reference.logprobs(responses).mean())
        policy.update(responses, judge.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference, optimizer=AdamW(1e-3))


def refuses(sample: Sample) -> float:
    raise ValueError("no")


def settings_of(how: str, where: Path) -> RunSettings:
    return RunSettings(runs_dir=str(where / "runs"), eager=how == "eager", checkpoint_steps=1, flush_tokens=2)


@pytest.mark.parametrize(
    ("program", "how"),
    [(loop, "eager"), (loop, "time-shared"), (ppo, "split"), (dynamic, "split"), (catching, "eager"), (catching, "split")],
    ids=["loop-eager", "loop-time-shared", "ppo-split", "dynamic-split", "catching-eager", "catching-split"],
)
def test_a_run_that_is_killed_after_some_event_ends_as_one_that_was_not(tmp_path, monkeypatch, program, how):
    commit_every(monkeypatch, 0.0)
    check_images(program, {}, fake_cluster("split" if how == "eager" else how), settings_of(how, tmp_path), tmp_path)


@pytest.mark.parametrize("how", ["eager", "split"])
@pytest.mark.parametrize("program", [takes_over, ahead], ids=lambda program: program.name)
def test_where_time_decides_a_resumed_run_keeps_every_rule_and_trains_on_each_sample_once(tmp_path, monkeypatch, program, how):
    commit_every(monkeypatch, 0.0)
    check_lawful(program, fake_cluster("split"), settings_of(how, tmp_path), tmp_path)


@pytest.mark.parametrize("program", [ahead, takes_over, defers, replies], ids=lambda program: program.name)
def test_a_resumed_run_goes_on_with_no_tokens_but_those_of_its_own_weights_and_prompts(tmp_path, monkeypatch, program):
    """The calls are in the ledger, and nothing more is committed but what must be. What time had decided is lost with the process, unless
    weights or prompts were made from it: the tokens that were generated by them are in the segments at once, and are gone on with.
    """
    commit_every(monkeypatch, 1e9)
    added = Journal.call_added
    monkeypatch.setattr(Journal, "call_added", lambda journal, call: (added(journal, call), journal.make_certain()))
    split, spec = settings_of("split", tmp_path).model_copy(update={"checkpoint_steps": 100}), fake_cluster("split", workers=2)
    _, images = imaged(program, {}, spec, split, tmp_path / "images", most=64)
    assert sum(map(check_made_of_what_is_known, images.paths)) > 20
    for number, image in enumerate(_chosen(images.paths, 4)):
        went_on = resumed(program, {}, spec, split, image, order_seed=number + 1)
        eager = settings_of("eager", tmp_path)
        repeated = Run(program, {}, spec, eager, decisions=read_decisions(image), repeats=image).execute()
        assert (repeated.samples_sha256, repeated.weights_sha256) == (went_on.samples_sha256, went_on.weights_sha256), image


@pytest.mark.parametrize("program", [takes_over, ahead], ids=lambda program: program.name)
def test_segments_that_are_newer_than_the_ledger_add_no_tokens_of_weights_that_are_made_again(tmp_path, monkeypatch, program):
    """As in a copy of a run in its storage, whose ledger was copied first."""
    commit_every(monkeypatch, 0.0)
    settings, spec = settings_of("split", tmp_path).model_copy(update={"checkpoint_steps": 100}), fake_cluster("split", workers=2)
    _, images = imaged(program, {}, spec, settings, tmp_path / "images", most=64)
    num_later, num = 0, len(images.paths)
    for number in range(num // 4, num // 2, 4):
        image, newer = images.paths[number], images.paths[number + num // 3]
        shutil.rmtree(image / "segments")
        shutil.copytree(newer / "segments", image / "segments")
        went_on = resumed(program, {}, spec, settings, image, order_seed=number)
        num_later += len(_table(image, "SELECT 1 FROM lost WHERE reason LIKE 'the record does not have%'"))
        eager = settings_of("eager", tmp_path)
        repeated = Run(program, {}, spec, eager, decisions=read_decisions(image), repeats=image).execute()
        assert (repeated.samples_sha256, repeated.weights_sha256) == (went_on.samples_sha256, went_on.weights_sha256), image
    assert num_later > 0


def check_made_of_what_is_known(image: Path) -> int:
    """The ledger knows that the calls are over which made the weights and prompts of what is in the segments; how many records that is."""
    if not (image / "segments").exists():
        return 0
    calls = read_record(image).calls
    done = {ordinal for (ordinal,) in _table(image, "SELECT ordinal FROM calls WHERE state='done'")}
    updates = [record.ordinal for record in calls if record.name.endswith(".update")]
    reader, num_records = SegmentReader(image / "segments"), 0
    for worker in {worker_of(path.name) for path in (image / "segments").glob("rollout*.seg")}:
        for found in scan_segments(image / "segments", worker, {}):
            if found.kind is Kind.GIVEN_UP:
                continue
            newest = int(reader.read(found.place).ragged("versions").values.max())
            asked = _generations_before(calls, found.call) if found.call < len(calls) else set()
            assert {*updates[:newest], *asked} <= done, (image, found)
            num_records += bool(newest or asked)
    return num_records


def _generations_before(calls: Sequence[CallRecord], call: int) -> set[int]:
    """The generations that a call's prompts were made of."""
    refs = [ref for _, ref in calls[call].inputs]
    return {ref for ref in refs if calls[ref].name.endswith(".generate")}.union(*(_generations_before(calls, ref) for ref in refs))


def check_lawful(program: Flow, spec: ClusterSpec, settings: RunSettings, where: Path, *, most: int | None = 5) -> None:
    """What was done before the kill stays; every update trains on what its generation gives; versions are within the bound."""
    summary, images = imaged(program, {}, spec, settings, where / "images", most=min(8 * most, 128) if most else None)
    calls = account(summary)["calls"]
    for number, image in enumerate(_chosen(images.paths, most)):
        known = read_record(image)
        ended = {ordinal for (ordinal,) in _table(image, "SELECT ordinal FROM calls WHERE state='done'")}
        tokens = {o: _tokens(known.value(o)) for o in ended if known.calls[o].name == "policy.generate"}
        went_on = resumed(program, {}, spec, settings, image, order_seed=number)
        assert account(went_on)["calls"] == calls
        assert (audited := audit(image)).is_sound, str(audited)
        record = read_record(image)
        for ordinal, rows in tokens.items():
            assert _tokens(record.value(ordinal)) == rows
        given = {o: set(_tokens(record.value(o))) for o, name, _ in calls if name == "policy.generate"}
        trained: dict[int, list[int]] = {}
        for update, sample in _table(image, "SELECT update_call, sample FROM consumption"):
            trained.setdefault(update, []).append(sample)
        for update, samples in trained.items():
            assert sorted(samples) == sorted(given[dict(record.calls[update].inputs)["samples"]])
        assert len({sample for samples in trained.values() for sample in samples}) == sum(map(len, trained.values()))
        after = dict(_table(image, "SELECT sample, call FROM decisions"))
        for ordinal, rows in tokens.items():
            assert {after[sample] for sample in rows} == {ordinal}
        shutil.rmtree(image)


def _table(run_dir: Path, query: str) -> list[tuple[int, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
        return db.execute(query).fetchall()


def _tokens(rows: object) -> dict[int, list[int]]:
    assert isinstance(rows, Batch)
    return {packed: rows.ragged("tokens").row(i).tolist() for i, packed in enumerate(rows.ids.tolist())}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["commits at once", "commits at checkpoints"])
@pytest.mark.parametrize("how", ["eager", "time-shared", "split"])
@pytest.mark.parametrize("program", [loop, ppo, dynamic], ids=lambda program: program.name)
def test_a_run_that_is_killed_after_any_event_ends_as_one_that_was_not(tmp_path, monkeypatch, program, how, seconds):
    commit_every(monkeypatch, seconds)
    check_images(program, {}, fake_cluster("split" if how == "eager" else how), settings_of(how, tmp_path), tmp_path, most=None)
