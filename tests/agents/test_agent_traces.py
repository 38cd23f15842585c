"""The turns and tool calls of episodes in a run's trace, and what they tell: life of a sample, export, idle time, bounds, suggestions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_clusters import FAKES
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from tiny_models import byte_tokenizer, save_config

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, flow, steps, tool
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.cli.main import cli
from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.macro.flow import Flow
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol.cost_terms import Costs, EpisodeCosts, EpisodeTurn, ToolCost
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.observe.otel import OtelSpans
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import FOR_AGENTS, Span
from m2flow.observe.store import read_spans
from m2flow.planner.planning import UNKNOWN_TOOLS
from m2flow.planner.profiles import read_profile
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Model, Sampling
from m2flow.runner.probing import measured_run
from m2flow.runner.run import Run
from m2flow.samples import Batch, Ragged, SampleId
from m2flow.simulator.ablation import AblatedCosts
from m2flow.simulator.scenario import prepare
from m2flow.simulator.virtual_worker import SampleRun
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.testing.fakes import FakeRollout
from m2flow.viewer.analysis import Analysis, analysis_of
from m2flow.viewer.run_trace import TOOLS, RunTrace, idle_of
from m2flow.viewer.sample_pages import sample_page, with_stays
from m2flow.viewer.suggestions import Suggestions, suggestions_of

WAIT_S = 0.5


@tool(replay="pure")
async def look(text: str) -> str:
    """Look something up, which takes a while."""
    await asyncio.sleep(WAIT_S)
    return text[::-1]


@tool(replay="pure")
def count(text: str) -> str:
    """Count, on a thread."""
    if not text:
        raise ValueError("nothing to count")
    time.sleep(0.01)
    return str(len(text))


@agent
async def looker(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[look, count], max_tokens=6)
    turn = await chat.reply([ToolCall("look", {"text": "abc"}), ToolCall("look", {"text": "abcd"})], max_tokens=6)
    turn = await chat.reply([ToolCall("count", {"text": "" if int(str(row.prompt)[:-1]) % 2 else "ab"})], max_tokens=6)
    return float(len(turn.text))


@flow
def looking(num_steps: int = 5) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(32)])
    for _ in steps(num_steps):
        episodes = policy.rollout(looker, rows.take(4), n=2, max_tokens=200)
        policy.update(episodes, episodes.reward)


GATE_S = 0.1


@tool(replay="pure", slots=1)
async def gate(text: str) -> str:
    """Something of which there is one."""
    await asyncio.sleep(GATE_S)
    return text


@agent
async def passer(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[gate], max_tokens=6)
    turn = await chat.reply([ToolCall("gate", {"text": "abc"})], max_tokens=6)
    return float(len(turn.text))


@flow
def passing(num_steps: int = 3) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(32)])
    for _ in steps(num_steps):
        episodes = policy.rollout(passer, rows.take(4), n=2, max_tokens=200)
        policy.update(episodes, episodes.reward)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    """Fake engines with the size of a small model, which the planner asks for."""
    config = json.loads((Path(__file__).parents[2] / "flows" / "models" / "digits" / "config.json").read_text())
    place = tmp_path_factory.mktemp("shape") / "config.json"
    place.write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return FAKES.model_copy(update={"shapes": {"policy": str(place.parent)}})


@pytest.fixture(scope="module")
def slotted_dir(spec: ClusterSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    return Path(Run(passing, {}, spec, RunSettings(runs_dir=str(place))).execute().run_dir)


@pytest.fixture(scope="module")
def run_dir(spec: ClusterSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    return Path(Run(looking, {}, spec, RunSettings(runs_dir=str(place))).execute().run_dir)


def packets_in(path: Path) -> Iterator[Any]:
    for outer in perfetto_trace_pb2.Trace.FromString(path.read_bytes()).packet:
        if outer.compressed_packets:
            yield from perfetto_trace_pb2.Trace.FromString(zlib.decompress(outer.compressed_packets)).packet


def parts_of(run_dir: Path, sample: int) -> list[Span]:
    return [span for span in read_spans(run_dir) if span.name in ("turn", "tool") and span.attributes["sample"] == sample]


def one_of(run_dir: Path) -> int:
    """The last episode whose last tool call is an error."""
    return [int(str(span.attributes["sample"])) for span in read_spans(run_dir) if span.attributes.get("outcome") == "error"][-1]


def test_each_turn_and_each_tool_call_of_an_episode_is_a_span(run_dir: Path) -> None:
    spans = parts_of(run_dir, one_of(run_dir))
    assert sorted(span.name for span in spans) == ["tool"] * 3 + ["turn"] * 3
    turns = [span for span in spans if span.name == "turn"]
    assert [span.attributes["turn"] for span in turns] == [1, 2, 3]
    with SampleQuery(run_dir) as query:
        (entry,) = query.entries(f"id = {one_of(run_dir)}")
    assert sum(int(str(span.attributes["num_tokens"])) for span in turns) == entry.response_tokens
    prompts = [int(str(span.attributes["num_prompt_tokens"])) for span in turns]
    new = [int(str(span.attributes["num_new_tokens"])) for span in turns]
    made = [int(str(span.attributes["num_tokens"])) for span in turns]
    assert prompts[1:] == [before + said + more for before, said, more in zip(prompts, made, new[1:], strict=False)]
    assert prompts[0] == new[0]
    assert sum(new) == entry.prompt_tokens, "all that the model did not say"
    tools = [span for span in spans if span.name == "tool"]
    assert [(span.attributes["label"], span.attributes["outcome"]) for span in tools] == [
        ("look", "ok"),
        ("look", "ok"),
        ("count", "error"),
    ]
    assert all(WAIT_S <= span.duration_s < WAIT_S + 1 for span in tools[:2])
    assert tools[0].end_ns > tools[1].start_ns, "calls of one turn run at once"
    assert turns[0].end_ns <= tools[0].start_ns <= tools[0].end_ns <= turns[1].start_ns
    assert "slots" not in tools[0].attributes, "an async function waits for no thread"
    assert tools[2].attributes["slots"] == 64
    assert int(str(tools[2].attributes["waited_us"])) < 2_000_000
    (stay,) = [span for span in read_spans(run_dir) if span.name == "sample" and span.attributes["sample"] == one_of(run_dir)]
    assert stay.start_ns <= min(span.start_ns for span in spans)
    assert max(span.end_ns for span in spans) <= stay.end_ns
    assert all(span.lane == stay.lane and span.attributes["call"] == stay.attributes["call"] and not span.is_work for span in spans)


def test_the_exported_trace_has_them_in_their_sample_s_lane(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    who = SampleId.unpack(one_of(run_dir))
    stays = [one for one in events if one["ph"] == "b" and one["name"] == "sample"]
    (stay,) = [one for one in stays if (one["args"]["call"], one["args"]["sample"]) == (who.call, str(who))]
    mine = [one for one in events if one["ph"] == "b" and one["id"].split(".")[0] == stay["id"] and one is not stay]
    assert [one["name"] for one in mine] == ["turn 1", "tool look", "tool look", "turn 2", "tool count", "turn 3"]
    assert [one["id"] == stay["id"] for one in mine] == [True, True, False, True, True, True], "what overlaps has a row of its own"
    for number in {one["id"] for one in mine}:
        open_at, depth = [one for one in events if one.get("id") == number and one["ph"] in "be"], 0
        for one in open_at:
            depth += 1 if one["ph"] == "b" else -1
            assert 0 <= depth <= 2
        assert depth == 0
        assert [one["ts"] for one in open_at] == sorted(one["ts"] for one in open_at)
    assert not any(one["ph"] == "X" and one["name"] in ("turn", "tool") for one in events)


def test_perfetto_s_packets_have_them_on_the_track_of_their_sample(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "trace.pftrace")
    names: dict[int, str] = {}
    depth: dict[int, int] = {}
    seen: dict[str, set[int]] = {}
    for packet in packets_in(tmp_path / "trace.pftrace"):
        names |= {one.iid: one.name for one in packet.interned_data.event_names}
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            depth[event.track_uuid] = depth.get(event.track_uuid, 0) + 1
            seen.setdefault(names[event.name_iid], set()).add(depth[event.track_uuid])
        elif event.type == event.TYPE_SLICE_END:
            depth[event.track_uuid] -= 1
    assert seen["turn 2"] == seen["tool count"] == {2}
    assert seen["tool look"] == {1, 2}, "of two at once one is beside"
    assert not any(depth.values())


def test_the_life_of_a_sample_names_its_turns_and_tool_calls(run_dir: Path) -> None:
    with SampleQuery(run_dir) as query:
        (entry,) = query.entries(f"id = {one_of(run_dir)}")
    shown = CliRunner().invoke(cli, ["samples", str(run_dir), "--where", f"sample = '{entry.sample}'", "--life"]).output
    lines = [line.strip().removeprefix("- ") for line in shown.splitlines() if line.strip().startswith("- ")]
    heads = [line.partition(":")[0] for line in lines]
    assert heads[1:8] == ["turn 1", "tool look", "tool look", "turn 2", "tool count", "turn 3", "generated"], shown
    assert "tokens after" in lines[1]
    assert lines[2].startswith("tool look: ok, 0.")
    assert lines[5].startswith("tool count: error")


def test_the_page_of_an_episode_has_its_time_line(run_dir: Path) -> None:
    trace = RunTrace(run_dir)
    trace.refresh()
    who = SampleId.unpack(one_of(run_dir))
    page = with_stays(sample_page(run_dir, who.call, who.prompt, who.index), trace)
    assert [one.name for one in page.passed] == ["turn 1", "tool look", "tool look", "turn 2", "tool count", "turn 3"]
    assert all(one.start >= 0 and one.start + one.duration <= page.took for one in page.passed)
    assert page.took >= WAIT_S * 1e6
    assert [event.partition(":")[0] for event in page.life].count("turn 2") == 1


def analysed(run_dir: Path) -> Analysis:
    trace = RunTrace(run_dir)
    trace.refresh()
    return analysis_of(trace, idle_of(trace))


def test_time_without_a_turn_to_decode_is_idle_for_tools_and_so_is_the_critical_path(run_dir: Path) -> None:
    found = analysed(run_dir)
    (device,) = [one for one in found.devices if "rollout" in one.kinds]
    assert device.idle_s["tool"] > 0.8 * WAIT_S * len(found.steps)
    assert device.idle_s.get("host", 0.0) < 0.2 * device.idle_s["tool"] + 0.1 * len(found.steps)
    share = {one.label: one.seconds for one in found.path}
    assert share[TOOLS] > 0.8 * WAIT_S * len(found.steps)
    assert "tool" in [cause.name for cause in found.verdict.causes]
    (said,) = [cause.says for cause in found.verdict.causes if cause.name == "tool"]
    assert said.startswith("waiting for tools and agents: the tool look, 0.5")


def test_a_step_with_episodes_is_bounded_by_its_longest_chain_of_turns(run_dir: Path) -> None:
    for step in analysed(run_dir).steps:
        assert WAIT_S < step.bounds_s["longest_chain"] <= step.makespan_s
        assert step.efficiency is not None
        assert step.efficiency >= step.bounds_s["longest_chain"] / step.makespan_s


def test_a_step_is_bounded_by_tools_whose_slots_are_limited(slotted_dir: Path) -> None:
    for step in analysed(slotted_dir).steps:
        assert 8 * GATE_S <= step.bounds_s["tool_slots"] <= step.makespan_s
        assert step.bounds_s["longest_chain"] < 6 * GATE_S, "what it waits for a slot is no work"
    waited = [int(str(span.attributes["waited_us"])) for span in read_spans(slotted_dir) if span.name == "tool"]
    assert max(waited) > 6 * GATE_S * 1e6
    spans = sorted((span.start_ns, span.end_ns) for span in read_spans(slotted_dir) if span.name == "tool")
    assert all(before[1] <= after[0] + 5_000_000 for before, after in itertools.pairwise(spans)), "one at a time"


def suggested(run_dir: Path, of: Flow) -> Suggestions:
    return suggestions_of(run_dir, of, {}, analysed(run_dir))


def test_a_run_with_slow_tools_is_simulated_as_it_was_and_a_faster_tool_is_suggested(run_dir: Path) -> None:
    found = suggested(run_dir, looking)
    assert found.measured_step_s is not None
    assert found.error is not None
    assert abs(found.error) < 0.3, found  # Of one that knows no tools it is -0.9.
    simulated = {stage.label: stage.seconds for stage in found.stages}
    assert simulated[TOOLS] > 0.8 * WAIT_S
    (faster,) = [one for one in found.found if "make the tool look faster" in one.what]
    assert 0.7 * WAIT_S / 2 < found.measured_step_s - faster.step_s < 1.3 * WAIT_S / 2
    assert faster.is_simulated
    assert not faster.changes_mathematics
    assert any("twice as many episodes" in one.what and one.changes_mathematics for one in found.found)


def test_more_slots_are_suggested_where_these_bind(slotted_dir: Path, run_dir: Path) -> None:
    found = suggested(slotted_dir, passing)
    assert found.error is not None
    assert abs(found.error) < 0.3, found  # Of one that knows no tools it is -0.9.
    (more,) = [one for one in found.found if "@tool(slots=4)" in one.what]
    assert more.gain > 0.4, "of eight calls one after the other, four are at once"
    assert not any("slots" in one.what or "async functions" in one.what for one in suggested(run_dir, looking).found)


def test_a_profile_measures_turns_and_tools_and_survives_its_file(run_dir: Path, tmp_path: Path) -> None:
    measured_run(run_dir, looking, {}).save(tmp_path / "profile.json")
    known = read_profile(tmp_path / "profile.json").episodes
    tools = {one.name: one for one in known.tools}
    assert sorted(tools) == ["count", "look"]
    assert tools["look"].num == 2 * len(known.episodes)
    assert WAIT_S <= tools["look"].quantiles_s[0] <= tools["look"].quantiles_s[-1] < WAIT_S + 1
    assert (tools["count"].slots, tools["look"].slots) == (64, 0)
    for one in known.episodes:
        assert [turn.num_tokens > 0 for turn in one] == [False, True, True, True]
        assert [[[name for name, _ in once] for once in turn.calls] for turn in one] == [[], [["look", "look"]], [["count"]], []]
        assert np.median([turn.rest_s for turn in one]) < WAIT_S
    constants = read_profile(tmp_path / "profile.json").constants()
    assert constants["episode.turns"].value == 3
    assert WAIT_S <= constants["look.tool_s"].value < WAIT_S + 0.1


def test_a_simulation_says_that_it_does_not_know_the_tools(run_dir: Path, spec: ClusterSpec, tmp_path: Path) -> None:
    measured_run(run_dir, looking, {}).save(tmp_path / "profile.json")
    blind = prepare(looking, {}, spec, lengths=str(run_dir), steps=2, seed=0)
    knowing = prepare(looking, {}, spec, lengths=str(run_dir), steps=2, seed=0, profile=tmp_path / "profile.json")
    assert UNKNOWN_TOOLS in blind.question.doubts
    assert UNKNOWN_TOOLS not in knowing.question.doubts
    outcomes = [one.run(one.plan()) for one in (blind, knowing)]
    assert outcomes[1].totals.makespan_s - outcomes[0].totals.makespan_s > 2 * 0.8 * WAIT_S
    assert [outcome.totals.idle_s.get("tool", 0.0) > 2 * 0.8 * WAIT_S for outcome in outcomes] == [False, True]
    runs = [run for of in outcomes[1].simulated.history.sample_runs.values() for run in of]
    assert all(round(run.tokens_until(run.ended)) == sum(run.spoken) == run.num_tokens for run in runs)
    assert sum(step.trained_tokens for step in outcomes[1].report.steps) == sum(run.num_tokens for run in runs)
    for step in outcomes[1].report.steps:
        assert WAIT_S < step.lower_bounds_s["longest_chain"] <= step.makespan_s


class Told(AblatedCosts):
    """Costs with episodes that are told here."""

    def __init__(self, costs: Costs, told: EpisodeCosts) -> None:
        super().__init__(costs)
        self._told = told

    def episodes(self) -> EpisodeCosts:
        return self._told


def test_a_simulated_episode_leaves_the_batch_for_what_its_agent_waits_for(run_dir: Path, spec: ClusterSpec, tmp_path: Path) -> None:
    measured_run(run_dir, looking, {}).save(tmp_path / "profile.json")
    scenario = prepare(looking, {}, spec, lengths=str(run_dir), steps=1, seed=0, profile=tmp_path / "profile.json")
    played = (
        EpisodeTurn(0, rest_s=2.0),
        EpisodeTurn(1, calls=((("one", 3.0), ("two", 5.0)), (("one", 1.0),)), rest_s=0.5),
        EpisodeTurn(99, calls=((("one", 4.0),),)),
    )

    def stays(**one: Any) -> list[SampleRun]:
        told = EpisodeCosts((played,), (ToolCost("one", (1.0,), 1, **one), ToolCost("two", (5.0,), 1)))
        history = scenario.run(scenario.plan(), Told(scenario.costs, told)).simulated.history
        return [run for runs in history.sample_runs.values() for run in runs]

    runs = stays()
    for run in runs:
        (first, second), short = run.stays, 0.2
        assert 2.0 <= first[0] < 2.0 + short
        assert second[0] - first[1] == pytest.approx(5.0 + 1.0 + 0.5), "the slower of two at once, one after them, and the agent"
        assert run.ended_s - second[1] == pytest.approx(4.0), "what a tool does after the last turn is part of it"
        assert run.spoken == [1, run.num_tokens - 1]
    assert [run.stays[1][0] - run.stays[0][1] for run in stays(factor=0.0)] == pytest.approx([5.5] * len(runs))
    gaps = sorted(run.stays[1][0] - run.stays[0][1] for run in stays(slots=1, shares_slots=False))
    assert gaps[-1] > 3.0 * len(runs), "one call of it at a time"


def test_a_counter_has_the_time_in_which_all_episodes_waited_for_tools(run_dir: Path) -> None:
    trace = RunTrace(run_dir)
    trace.refresh()
    counted = {name: counter.values for (_, name), counter in trace.columns.counters.items() if name.startswith("idle seconds, ")}
    waits = [span.duration_s for span in read_spans(run_dir) if span.name == "wait" and span.attributes["label"] == FOR_AGENTS]
    assert counted["idle seconds, tool"][-1] == pytest.approx(sum(waits), abs=1e-4)
    assert counted["idle seconds, tool"][-1] > 0.8 * WAIT_S * 5
    assert sorted(counted["idle seconds, tool"]) == list(counted["idle seconds, tool"])
    assert "idle seconds, task" in counted
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [line["idle_s"].get("tool", 0.0) for line in lines if "idle_s" in line]
    assert 0.8 * WAIT_S * 4 < sum(told) <= counted["idle seconds, tool"][-1], "what was told by the last update"


def test_what_a_repeated_episode_has_on_record_is_no_turn_and_what_an_engine_had_cached_is_said() -> None:
    class Caching(FakeRollout):
        def step(self) -> list[Generated]:
            return [replace(made, num_cached=3) for made in super().step()]

    engine = Caching(Model("fake"), EngineSettings())
    engine.start()
    seen: list[tuple[str, Mapping[str, object]]] = []

    def play(stopped: Transcript | None) -> Generated:
        with contextlib.closing(EventLoop()) as loop:
            episodes = Episodes(engine, loop)
            episodes.record = lambda packed, name, start_ns, end_ns, about: seen.append((name, about))
            row = Batch(np.array([7], np.int64), {"prompt": Ragged.texts(["7?"])})
            request = Request(SampleId(0, 0, 7).pack(), "", 1007, Sampling(200))
            episodes.begin([EpisodeStart(request, lambda: passer, next(row.rows()), Bounds(8), stopped)])
            while True:
                if made := episodes.step():
                    return made[0]

    whole = play(None)
    assert [name for name, _ in seen] == ["turn", "tool", "turn"]
    assert [about["num_cached"] for name, about in seen if name == "turn"] == [3, 3]
    call = type("Call", (), {"options": {"sampling": Sampling(200)}})()
    prompts = Batch(np.array([whole.id], np.int64), {"prompt": Ragged.texts(["7?"])})
    record = Transcript.of(call_semantics.responses([call], [whole], prompts, {whole.id: 1}), 0)
    seen.clear()
    again = play(record)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert not [name for name, _ in seen if name == "turn"], "nothing was generated"


def test_opentelemetry_has_turns_and_tools_in_the_trace_of_their_sample() -> None:
    sample = SampleId(1, 2, 3).pack()
    spans = [
        Span("rollout-0", "sample", 0, 9_000, {"call": 1, "sample": sample, "num_tokens": 7}),
        Span("rollout-0", "turn", 1_000, 3_000, {"call": 1, "sample": sample, "turn": 1, "num_tokens": 4, "num_prompt_tokens": 9}),
        Span("rollout-0", "tool", 3_000, 8_000, {"call": 1, "sample": sample, "label": "look", "outcome": "ok"}),
    ]
    otel = OtelSpans("run", has_samples=True)
    stay, turn, called = (next(iter(otel.of(span, str(at)))) for at, span in enumerate(spans))
    assert [one.name for one in (turn, called)] == ["turn 1", "tool look"]
    for one in (turn, called):
        assert one.parent is not None
        assert (one.parent.trace_id, one.parent.span_id) == (stay.context.trace_id, stay.context.span_id)
    assert turn.attributes is not None
    assert called.attributes is not None
    assert (turn.attributes["gen_ai.usage.output_tokens"], turn.attributes["gen_ai.usage.input_tokens"]) == (4, 9)
    assert (called.attributes["gen_ai.operation.name"], called.attributes["gen_ai.tool.name"]) == ("execute_tool", "look")


_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<turn>{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@agent
async def forking(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), max_tokens=6)
    fork = chat.fork()
    await chat.say("and", max_tokens=6)
    await fork.say("or", max_tokens=6)
    return 1.0


def test_the_embedded_engine_has_what_an_episode_has_read_cached_at_its_later_turns_and_in_its_forks(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "model", chat_template=_TEMPLATE)
    path = save_config("Qwen2", tmp_path / "model", tokenizer=False, vocab_size=258, max_position_embeddings=256)
    engine = EmbeddedRollout(Model(path, init="random", chat=True), EngineSettings())
    engine.start()
    seen: list[Mapping[str, object]] = []
    with contextlib.closing(EventLoop()) as loop:
        episodes = Episodes(engine, loop)
        episodes.record = lambda packed, name, start_ns, end_ns, about: seen.append(about)
        row = Batch(np.array([7], np.int64), {"prompt": Ragged.texts(["what is to be done about it?"])})
        request = Request(SampleId(0, 0, 7).pack(), "", 1007, Sampling(200, ignore_eos=True))
        episodes.begin([EpisodeStart(request, lambda: forking, next(row.rows()), Bounds(8, max_conversations=2))])
        while not episodes.step():
            pass
    first, second, forked = seen
    assert "num_cached" not in first
    known = int(str(first["num_prompt_tokens"])) + int(str(first["num_tokens"])) - 1
    assert second["num_cached"] == known, "all but the last token that the model said first"
    assert forked["num_cached"] == known + 3, "that one, the end of the turn and the next one's role were read for the second"
    assert episodes.occupancy().num_cached == 2 * known + 3
