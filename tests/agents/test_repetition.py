"""An episode that was stopped anywhere goes on to the same tokens, and no tool with effects runs twice."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from one_thread import Images, SteppedRun, commit_every, resumed
from played_episodes import host, played, row_of, same, shout, start_of, stopped_row, wanderer
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, flow, log, steps, tool
from m2flow.agents.conversation import Transcript
from m2flow.engines.contract import Generated, Request
from m2flow.errors import StateLost
from m2flow.macro.replay import CallRecord
from m2flow.micro.protocol import call_semantics
from m2flow.micro.records.ledger import Ledger
from m2flow.micro.records.resume import Resumption
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.segments import Kind, SegmentWriter, read_segment, scan_segments, worker_of
from m2flow.observe.metrics import read_metrics
from m2flow.recipe import AdamW
from m2flow.samples import SampleId, Segment
from m2flow.spec import RunSettings
from m2flow.testing.fakes import FakeLanguage, FakeRollout
from m2flow.testing.random_programs import ADVERSARIES, Dice, difference_of, make_cluster, scheduled
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


NUM = 12


def test_an_episode_that_is_stopped_after_any_step_and_goes_on_elsewhere_is_the_same(loop):
    whole = host(loop)
    whole.begin(start_of(index, wanderer) for index in range(NUM))
    expected = played(whole)
    assert len({len(made.segments) for made in expected.values()}) > 2, "the episodes differ in their turns"
    dice, how = random.Random(3), Counter()
    for index in range(NUM):
        stopped: Transcript | None = None
        for _ in range(200):
            episodes = host(loop)
            begun = start_of(index, wanderer, stopped)
            episodes.begin([begun])
            found: dict[int, Generated] = {}
            for _ in range(dice.randint(1, 8)):
                found.update({made.id: made for made in episodes.step()})
            if found:
                break
            (seen,), (gone,) = episodes.snapshot([begun.request.id]), episodes.abort([begun.request.id])
            assert same(seen, gone)
            assert not episodes.num_unfinished
            stopped = stopped_row(gone) if gone.num_sampled else None
            how["from its row" if stopped else "anew"] += 1
        assert same(found[begun.request.id], expected[begun.request.id]), index
    assert how["from its row"] > 20


def test_an_agent_that_does_something_else_when_it_is_repeated_has_failed_and_nothing_is_guessed(loop):
    @agent
    async def fickle(chat: Chat, row: Sample) -> float:
        await chat.say("first", max_tokens=4)
        await chat.say(f"{random.random()}", max_tokens=40)
        return 1.0

    first = host(loop)
    first.begin([start_of(0, fickle)])
    (packed,) = first.progress()
    while len(first.snapshot([packed])[0].segments) < 3 or first.snapshot([packed])[0].segments[-1][0] is not Segment.GENERATED:
        first.step()
    (gone,) = first.abort([packed])
    again = host(loop)
    again.begin([start_of(0, fickle, stopped_row(gone))])
    assert played(again)[packed].columns["failure"] == "diverged"


def test_a_turn_that_is_asked_for_twice_at_one_place_has_other_random_numbers_and_at_another_its_own(loop):
    texts: list[list[str]] = []

    @agent
    async def asks(chat: Chat, row: Sample) -> float:
        texts.append([(await chat.say(text, max_tokens=30)).text for text in ("a", "b", "b")])
        return 0.0

    for _ in range(2):
        episodes = host(loop)
        episodes.begin([start_of(0, asks)])
        played(episodes)
    assert texts[0] == texts[1], "a repeated episode says the same"
    assert len(set(texts[0])) == 3, "its turns are not one text three times"


PAID = "M2FLOW_TEST_PAID"
"""Environment variable with the file that the tool writes to: what a function captures is a copy."""


@tool(replay="recorded")
async def pay(to: str, number: int) -> str:
    """Pay."""
    with open(os.environ[PAID], "a") as file:
        file.write(f"{to} {number}\n")
    await asyncio.sleep(0.003)
    return "paid"


@agent
async def payer(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[pay, shout], max_tokens=9)
    for number in range(3):
        who = f"{row.prompt} {chat.rng.random()}"
        turn = await chat.reply([ToolCall("pay", {"to": who, "number": number}), ToolCall("shout", {"text": who})], max_tokens=9)
    return float(len(turn.text))


@flow
def paying() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset.generate(lambda rng: {"prompt": str(rng.randrange(10**6))}, 100, seed=1, name="rows")
    for _ in steps(2):
        episodes = policy.rollout(payer, rows.take(2), n=2, max_tokens=400)
        policy.update(episodes, episodes.reward)


@pytest.mark.timeout(0)
def test_a_tool_with_effects_never_runs_twice_whatever_dies(tmp_path, monkeypatch):
    whole = 0
    for number in range(25):
        paid = tmp_path / str(number)
        monkeypatch.setenv(PAID, str(paid))
        dice = Dice(f"paying, {number}")
        answer = run_planned(paying, {}, make_cluster(dice), seed=number, order_seed=number, num_losses=dice.integer(0, 3))
        assert not answer.error or answer.error.startswith(StateLost.__name__), answer.error
        lines = paid.read_text().splitlines()
        assert len(lines) == len(set(lines)), Counter(lines).most_common(1)
        whole += len(lines)
    assert whole > 200


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.0, marks=pytest.mark.slow, id="commits at once"), pytest.param(1e9, id="commits where it must")]
)
def test_a_tool_with_effects_never_runs_twice_whenever_a_run_is_killed_and_resumed(tmp_path, monkeypatch, seconds):
    commit_every(monkeypatch, seconds)
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"))
    images, paid = Images(tmp_path / "images", most=64), [tmp_path / "paid"]
    before: dict[Path, list[str]] = {}

    def take() -> None:
        lines = paid[0].read_text().splitlines() if paid[0].exists() else []  # What was paid by then is in the image.
        if image := images.take():
            before[image] = lines

    monkeypatch.setenv(PAID, str(paid[0]))
    images.run = SteppedRun(paying, {}, spec, settings, hook=take)
    images.run.execute()
    num_before = 0
    for number, image in enumerate(images.paths[:: max(len(images.paths) // 16, 1)]):
        known = before[image]
        paid[0] = tmp_path / f"paid by {number}"
        paid[0].touch()
        monkeypatch.setenv(PAID, str(paid[0]))
        resumed(paying, {}, spec, settings, image, order_seed=number)
        lines = known + paid[0].read_text().splitlines()
        assert len(lines) == len(set(lines)), (image, Counter(lines).most_common(1))
        num_before += len(known)
    assert num_before > 20


def test_a_tool_with_effects_never_runs_twice_whenever_an_eager_run_is_killed_and_resumed(tmp_path, monkeypatch):
    spec, settings = fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path / "runs"), eager=True)
    images, paid, stepped = Images(tmp_path / "images"), [tmp_path / "paid"], FakeRollout.step
    before: dict[Path, list[str]] = {}

    def step(self: FakeRollout) -> list[Generated]:
        lines = paid[0].read_text().splitlines() if paid[0].exists() else []
        if image := images.take():
            before[image] = lines
        return stepped(self)

    monkeypatch.setenv(PAID, str(paid[0]))
    monkeypatch.setattr(FakeRollout, "step", step)
    images.run = SteppedRun(paying, {}, spec, settings)
    whole = images.run.execute()
    assert not [*(images.run.run_dir / "segments").glob("*running*")], "they are needed no more"
    monkeypatch.setattr(FakeRollout, "step", stepped)
    num_before, num_same = 0, 0
    tried = images.paths[:: max(len(images.paths) // 16, 1)]
    for number, image in enumerate(tried):
        known = before[image]
        monkeypatch.setenv(PAID, str(tmp_path / f"paid by {number}"))
        (tmp_path / f"paid by {number}").touch()
        again = resumed(paying, {}, spec, settings, image)
        lines = known + (tmp_path / f"paid by {number}").read_text().splitlines()
        assert len(lines) == len(set(lines)), (image, Counter(lines).most_common(1))
        num_before += len(known)
        num_same += again.samples_sha256 == whole.samples_sha256
    assert num_before > 20
    assert num_same > len(tried) // 4, "where no tool ran when it was killed"


class Said:
    """What the records and the ledger of a run say by now, of each kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, set[str]] = {}
        self._known: dict[str, int] = {}
        self._returned: dict[str, bool] = {}
        """A tool's call that has begun -> whether what it gave is written, too."""

    @property
    def num_open(self) -> int:
        return sum(not has for has in self._returned.values())

    def more(self, run_dir: Path) -> set[str]:
        """Read on. Returns the kinds of what is new."""
        before = {kind: len(said) for kind, said in self.kinds.items()}
        folder = run_dir / "segments"
        for name in {worker_of(path.name) for path in folder.glob("*.seg")}:
            for found in scan_segments(folder, name, self._known):
                self._known[found.place[0]] = found.place[1] + found.place[2]
                self._add(f"segment {found.kind.name}", found.place)
                rows = read_segment(folder, found.place)
                for row, packed in enumerate(rows.ids.tolist() if "episode" in rows.columns else []):
                    self._add_episode(packed, rows.ragged("episode").item(row), is_over=found.kind is Kind.FINISHED)
        with reading_ledger(run_dir) as db:
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for row in db.execute(f"SELECT * FROM {table}"):
                    self._add(f"ledger {table}", row)
            for ordinal, name, state in db.execute("SELECT ordinal, name, state FROM calls"):
                self._add(f"{name} {state}", ordinal)
        for path in run_dir.glob("checkpoints/step-*"):
            self._add("checkpoint", path.name)
        return {kind for kind, said in self.kinds.items() if len(said) > before.get(kind, 0)}

    def _add(self, kind: str, *what: object) -> None:
        self.kinds.setdefault(kind, set()).add(str(what))

    def _add_episode(self, packed: int, record: Any, *, is_over: bool) -> None:
        for number in range(len(record["turns"])):
            self._add("turn", packed, number)
        for key, call in record["tools"].items():
            self._add("tool began", packed, key)
            self._returned[f"{packed} {key}"] = self._returned.get(f"{packed} {key}", False) or "result" in call
            if "result" in call:
                self._add("tool returned", packed, key)
        if is_over:
            self._add("episode ended", packed)


KINDS = {
    *("turn", "tool began", "tool returned", "episode ended", "checkpoint"),
    *("segment RUNNING", "segment FINISHED", "segment RESULT"),
    *("policy.rollout done", "policy.episodes.counted done", "policy.episodes.whole done", "policy.update done"),
    *(f"ledger {name}" for name in ("calls", "samples", "prefixes", "rewards", "consumption", "made", "seen", "known", "marks", "logs")),
}
"""What a run of this agent writes at least. Kinds that it writes besides are tried, too."""


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_run_with_effects_that_is_killed_right_after_any_kind_of_record_pays_once_and_comes_to_the_same(tmp_path, monkeypatch):
    commit_every(monkeypatch, 0.0)
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"), checkpoint_steps=1)
    images, said, paid = Images(tmp_path / "images", most=None), Said(), tmp_path / "paid"
    after: dict[str, list[Path]] = {}
    known: dict[Path, list[str]] = {}
    is_open: dict[Path, bool] = {}

    def take() -> None:
        if image := images.take():
            for kind in said.more(images.run.run_dir):
                after.setdefault(kind, []).append(image)
            known[image] = paid.read_text().splitlines() if paid.exists() else []
            is_open[image] = said.num_open > 0

    monkeypatch.setenv(PAID, str(paid))
    images.run = SteppedRun(paying, {}, spec, settings, hook=take)
    whole = images.run.execute()
    expected = sorted(paid.read_text().splitlines())
    assert len(expected) == len(set(expected)) == 2 * 2 * 2 * 3
    assert not KINDS - set(after), "kinds of which the run wrote none"

    def resume(image: Path) -> tuple[list[str], Any]:
        more = tmp_path / f"paid after {image.name}"
        more.touch()
        monkeypatch.setenv(PAID, str(more))
        again = resumed(paying, {}, spec, settings, image, order_seed=len(known[image]))
        return sorted(known[image] + more.read_text().splitlines()), again

    tried: dict[Path, set[str]] = {}
    for kind, found in sorted(after.items(), key=lambda one: len(one[1])):
        clean = [image for image in found if not is_open[image]]
        assert clean or kind == "tool began", kind
        if clean and not any(image in tried for image in clean):
            tried[clean[len(clean) // 2]] = set()
    for image in tried:
        lines, again = resume(image)
        kinds = {kind for kind, found in after.items() if image in found}
        assert lines == expected, kinds
        assert (again.samples_sha256, again.weights_sha256) == (whole.samples_sha256, whole.weights_sha256), kinds
        tried[image] = kinds
    # A tool that had begun may have paid or not, so its episode is lost: the run does not come to the same.
    cut = [image for image in after["tool began"] if is_open[image]]
    assert cut
    assert set().union({"tool began"}, *tried.values()) == set(after)
    for image in cut[:: max(len(cut) // 3, 1)]:
        lines, _ = resume(image)
        assert len(lines) == len(set(lines)), Counter(lines).most_common(1)


RUN = "M2FLOW_TEST_RUN"
"""Environment variable with the directory of the run that writes its episodes down."""


def on_disk(prompt: int) -> dict[str, Any]:
    """What a process that is killed now leaves of the episode of this prompt."""
    folder, found = Path(os.environ[RUN]) / "segments", {"turns": [], "tools": {}}
    for name in {worker_of(path.name) for path in folder.glob("*-running*.seg")}:
        for record in scan_segments(folder, name, {}):
            rows = read_segment(folder, record.place)
            prompts = [SampleId.unpack(packed).prompt for packed in rows.ids.tolist()]
            if prompt in prompts:
                found = rows.ragged("episode").item(prompts.index(prompt))  # type: ignore[assignment]
    return found


@agent
async def checking(chat: Chat, row: Sample) -> float:
    heard, num_missing = [(await chat.say(str(row.prompt), tools=[shout], max_tokens=9)).text], 0
    for number in range(4):
        num_missing += heard != [turn["text"] for turn in on_disk(row.id.prompt)["turns"]]
        calls = [ToolCall("shout", {"text": f"<w{row.id.prompt} {number} {at}>", "wait": 0.004 * at}) for at in range(2)]
        heard.append((await chat.reply(calls, max_tokens=5)).text)
    return float(num_missing)


@flow
def checked() -> None:
    policy = Policy("fake")
    rows = Dataset.generate(lambda rng: {"prompt": str(rng.randrange(10**6))}, 100, seed=1, name="rows")
    for _ in steps(1):
        episodes = policy.rollout(checking, rows.take(3), n=1, max_tokens=800)
        log(missing=episodes.reward.mean(), turns=episodes.num_turns.mean())


def test_each_turn_is_on_disk_before_its_agent_hears_it_and_each_pure_tools_result_before_an_engine_reads_it(tmp_path, monkeypatch):
    def begun() -> None:
        monkeypatch.setenv(RUN, str(run.run_dir))

    run = SteppedRun(checked, {}, fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path)), hook=begun)
    read, added = [], FakeRollout.add

    def add(self: FakeRollout, requests: Sequence[Request]) -> None:
        for request in requests:
            results = re.findall(r"<W\d+ \d \d>", FakeLanguage().decode(list(request.prompt)))
            known = [one.get("result") for one in on_disk(SampleId.unpack(request.id).prompt)["tools"].values()] if results else []
            read.extend((result, result in known) for result in results)
        added(self, requests)

    monkeypatch.setattr(FakeRollout, "add", add)
    run.execute()
    assert not [result for result, is_known in read if not is_known]
    assert len(set(read)) == 3 * 4 * 2
    logged = {name: value for name, [(_, value)] in read_metrics(run.run_dir).items()}
    assert (logged["missing"], logged["turns"]) == (0.0, 5.0)


LOOKED = "M2FLOW_TEST_LOOKED"
"""Environment variable with the file that the tool writes to."""


@tool(replay="pure")
async def look_up(word: str) -> str:
    """Look something up."""
    with open(os.environ[LOOKED], "a") as file:
        file.write(f"{word}\n")
    return f"<{word}>"


@agent
async def informed(chat: Chat, row: Sample) -> float:
    chat._tools = {"look_up": look_up}  # By `say` alone a tool can only be had when the first turn has been asked for.
    known = [(await chat.run([ToolCall("look_up", {"word": f"w{row.id.prompt} {number}"})]))[0].text for number in range(12)]
    return float(len((await chat.say(f"{known[11]} {row.prompt}", tools=[look_up], max_tokens=9)).text))


@flow
def looked_up() -> None:
    policy = Policy("fake")
    rows = Dataset.generate(lambda rng: {"prompt": str(rng.randrange(10**6))}, 100, seed=1, name="rows")
    for _ in steps(1):
        log(length=policy.rollout(informed, rows.take(3), n=1, max_tokens=400).reward.mean())


def test_what_a_pure_tool_gave_before_the_models_first_turn_is_on_disk_before_an_engine_reads_it_and_is_not_asked_for_again(
    tmp_path, monkeypatch
):
    images, read, added = Images(tmp_path / "images", most=None), [], FakeRollout.add
    at: dict[int, Path] = {}

    def begun() -> None:
        monkeypatch.setenv(RUN, str(images.run.run_dir))

    def add(self: FakeRollout, requests: Sequence[Request]) -> None:
        for request in requests:
            known = on_disk(SampleId.unpack(request.id).prompt)["tools"].values()
            read.append(sum(f"<w{SampleId.unpack(request.id).prompt} {at}>" == one.get("result") for one in known for at in range(12)))
        if image := images.take():
            at[len(read)] = image
        added(self, requests)

    looked = tmp_path / "looked"
    monkeypatch.setenv(LOOKED, str(looked))
    monkeypatch.setattr(FakeRollout, "add", add)
    spec, settings = fake_cluster("split", workers=1), RunSettings(runs_dir=str(tmp_path / "runs"))
    images.run = SteppedRun(looked_up, {}, spec, settings, hook=begun)
    whole = images.run.execute()
    assert read == [12, 12, 12]
    assert len(looked.read_text().splitlines()) == 36
    monkeypatch.setattr(FakeRollout, "add", added)
    assert at
    for num_asked, image in at.items():
        monkeypatch.setenv(LOOKED, str(tmp_path / str(num_asked)))
        (tmp_path / str(num_asked)).touch()
        assert resumed(looked_up, {}, spec, settings, image).samples_sha256 == whole.samples_sha256
        assert len((tmp_path / str(num_asked)).read_text().splitlines()) <= 36 - 12 * num_asked


def test_of_two_records_with_the_same_tokens_a_resume_goes_on_from_the_one_that_has_the_tools_result(loop, tmp_path, monkeypatch):
    monkeypatch.setenv(PAID, str(tmp_path / "paid"))
    episodes = host(loop)
    episodes.is_recorded = True
    start = start_of(0, payer)
    episodes.begin([start])
    writer = SegmentWriter(tmp_path / "segments", "rollout-0-running")
    places, had = [], []
    while len(places) < 2:
        episodes.step()
        for packed in episodes.take_urgent():
            rows = row_of(episodes.snapshot([packed])[0])
            if any(call_semantics.num_noted_of(rows)):  # Before it comes the turn that calls the tools.
                places.append(writer.append(rows, Kind.RUNNING, 0))
                had.append((call_semantics.num_generated_of(rows), call_semantics.num_noted_of(rows)))
            episodes.written([packed])
    writer.close()
    (begun, tokens), (returned, more) = [(noted[0], made[0]) for made, noted in had]
    assert tokens == more
    assert begun < returned
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.open()
    packed, call = start.request.id, CallRecord(0, 0, "policy.rollout", "flow.py:1", "", (), (), (), ())
    ledger.flushed(0, [packed], [tokens], [tokens], [[]], places[0])
    ledger.knows({places[0][0]: places[0][1] + places[0][2]})
    Resumption(ledger, tmp_path / "segments", [call], frozenset(), {}, 0).begin(keeps=True)
    assert ledger.select("SELECT segment, offset, size, checksum FROM prefixes WHERE sample=?", (packed,)) == [places[1]]
    ledger.close()


def test_an_episode_whose_tool_with_effects_had_begun_is_lost_where_it_goes_on_and_the_tool_does_not_run_again(loop, tmp_path, monkeypatch):
    monkeypatch.setenv(PAID, str(tmp_path / "paid"))
    first = host(loop)
    first.is_recorded = True
    start = start_of(0, payer)
    first.begin([start])
    packed = start.request.id

    def record() -> dict[str, dict[str, object]]:
        return first.snapshot([packed])[0].columns["episode"]["tools"]  # type: ignore[index]

    while not any(one["name"] == "pay" for one in record().values()):
        first.written(first.take_urgent())
        first.step()
    assert not (tmp_path / "paid").exists(), "it waits until it is written down that it begins"
    assert first.is_held(packed)
    first.written(first.take_urgent())
    while not (tmp_path / "paid").exists():
        time.sleep(0.001)
    (gone,) = first.abort([packed])
    again = host(loop)
    again.begin([start_of(0, payer, stopped_row(gone))])
    assert played(again)[packed].columns["failure"] == "lost"
    assert len((tmp_path / "paid").read_text().splitlines()) == 1


def test_an_episode_is_not_preempted_while_a_tool_with_effects_runs(tmp_path, monkeypatch):
    for number in range(8):
        monkeypatch.setenv(PAID, str(tmp_path / str(number)))
        dice = Dice(f"preempted, {number}")
        spec = scheduled(make_cluster(dice), (f"{ADVERSARIES}:Adversary:seed={number}",))
        planned = run_planned(paying, {}, spec, seed=number, order_seed=number, is_recorded=True)
        eager = run_eager(paying, {}, spec, seed=number)
        assert not [value for _, name, value in planned.logs if name == "episodes/failed" and value]
        assert difference_of(planned, eager) is None


def test_a_tool_with_effects_is_not_run_before_the_model_has_said_anything(loop):
    @agent
    async def hasty(chat: Chat, row: Sample) -> float:
        chat._tools = {"pay": pay}
        await chat.run([ToolCall("pay", {"to": "a", "number": 1})])
        return 0.0

    episodes = host(loop)
    episodes.begin([start_of(0, hasty)])
    (made,) = played(episodes).values()
    assert made.columns["failure"] == "invalid"


def test_the_loop_does_all_that_it_is_asked_for_in_order_also_after_what_raises(loop):
    loop._loop.set_exception_handler(lambda *_: None)
    found: list[int] = []
    done = threading.Event()
    for number in range(2000):
        loop.call(found.append, number)
        if not number % 100:
            loop.call(int, "no number")
    loop.call(done.set)
    assert done.wait(60)
    assert found == list(range(2000))
