"""The picture of a macro graph: a row a call, lanes by role, lines that meet no box but their ends; and the same for Graphviz."""

from __future__ import annotations

import re
import shutil
import stat
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, load_flow, op, ppo_clip, steps
from m2flow.cli.main import cli
from m2flow.macro.graph_display import Drawing, _Layout, _not_implied, as_dot, place, write_picture, write_with_graphviz
from m2flow.macro.tracing import explore

ROOT = Path(__file__).parents[2]
GRPO = str(ROOT / "flows" / "grpo.py")


def judged(sample: Sample) -> float:
    return 1.0


@op(granularity="batch")
def spread(samples: list[Sample]) -> float:
    return 0.0


@flow
def winding() -> None:
    left, right, judge, prompts = Policy("fake", name="left"), Policy("fake", name="right"), Reward(judged), Dataset([{"prompt": "a"}] * 9)
    reference = Reference(left)
    for _ in steps(3):
        asked = prompts.take(2)
        for policy in (left, right):
            responses = policy.generate(asked, n=2, max_new_tokens=4)
            rewards = judge.score(responses)
            metrics = policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference)
            spread(responses)
            if float(metrics["reward"]) > 2:
                return


def drawing(steps: int = 2) -> Drawing:
    path = explore(winding, {}, steps=steps).longest
    return place(path.graph, [(look.num_calls, look.observation) for look in path.looks])


def test_calls_have_rows_of_their_own_in_the_order_of_the_program_and_lanes_by_role():
    drawn = drawing()
    assert [box.row for box in drawn.boxes] == list(range(len(drawn.boxes)))
    assert [box.call.ordinal for box in drawn.boxes] == list(range(len(drawn.boxes)))
    assert drawn.lanes == ("datasets", "reference", "left", "judged", "right", "ops")
    assert [(frame.step, frame.first, frame.last) for frame in drawn.frames] == [(0, 1, 11), (1, 12, 22)]


def test_every_data_edge_is_drawn_and_effects_that_follow_from_others_are_not():
    path = explore(winding, {}, steps=2).longest
    edges = path.graph.digraph().edges(data=True)
    links = {(link.start, link.end): link.kind for link in drawing().links}
    assert {(a, b) for a, b, data in edges if data["kind"] == "data"} <= set(links)
    assert set(links.values()) == {"data", "effect"}
    assert len(links) < len(edges)


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])))
def test_an_effect_follows_from_others_where_networkx_says_so(edges: set[tuple[int, int]]) -> None:
    links = {start: [end for first, end in edges if first == start] for start in range(10)}
    assert _not_implied(links) == set(nx.transitive_reduction(nx.DiGraph(links)).edges)


def test_lines_on_one_track_of_a_gutter_overlap_only_if_they_come_from_one_call():
    links = drawing(3).links
    assert len(links) > 40
    for one in links:
        for other in links:
            if (one.gutter, one.track) == (other.gutter, other.track) and (one.start, one.kind) != (other.start, other.kind):
                assert one.end <= other.start or other.end <= one.start


def test_gutters_are_beside_the_lanes_that_their_lines_end_in():
    drawn = drawing(3)
    layout = _Layout(drawn)
    for link in drawn.links:
        lane = drawn.boxes[link.end].lane
        assert link.gutter in (lane, lane + 1)
        assert layout.gutters[link.gutter] <= layout.track(link) < layout.lefts[link.gutter]


def test_a_line_across_stands_where_python_waits():
    drawn = drawing()
    assert [wait.row for wait in drawn.waits] == [6, 11, 17, 22]
    assert "Python waits for %metrics: float()    test_drawing.py:" in drawn.waits[1].text
    assert drawn.waits[1].text.endswith('if float(metrics["reward"]) > 2:')


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture_is_the_same_each_time_and_holds_every_call(tmp_path, suffix):
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        write_picture(drawing(), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == ".svg":
        texts = [element.text for element in ET.parse(files[0]).iter() if element.tag.endswith("text")]
        for name in ("left.generate", "right.update", "judged.score", "reference.logprobs", "spread", "step 0", "step 1"):
            assert name in texts
    else:
        assert files[0].read_bytes()[:4] == b"\x89PNG"


def test_dot_has_a_node_a_call_a_cluster_a_step_and_dashed_effects():
    graph = explore(load_flow(GRPO), {}, steps=2).longest.graph
    text = as_dot(graph)
    assert len(re.findall(r"^ *c\d+ \[label=", text, re.M)) == len(graph.calls)
    assert text.count("subgraph cluster_") == 2
    assert text.count("->") == graph.digraph().number_of_edges()
    assert text.count("style=dashed") == sum(data["kind"] == "effect" for _, _, data in graph.digraph().edges(data=True))
    assert text.count("{") == text.count("}")


DOT = """#!/bin/sh
[ "$1" = -Tsvg ] || { echo "no such format" >&2; exit 3; }
cat > "$3"
"""


def test_where_graphviz_is_installed_it_lays_the_graph_out_and_what_it_refuses_is_said(tmp_path, monkeypatch):
    """A program that hands its input on stands in for `dot`."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dot"
    program.write_text(DOT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    shown = CliRunner().invoke(cli, ["plan", GRPO, "--svg", str(tmp_path / "new" / "a.svg"), "--dot"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "new" / "a.svg").read_text() == shown.stdout.rstrip("\n")
    refused = CliRunner().invoke(cli, ["plan", GRPO, "--png", str(tmp_path / "a.png")])
    assert refused.exit_code != 0
    assert "no such format" in refused.stderr


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_draws_every_call(tmp_path):
    assert write_with_graphviz(explore(winding, {}, steps=2).longest.graph, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in ("left.generate", "right.update", "judged.score", "reference.logprobs", "spread", "step 0", "step 1", "Python waits"):
        assert name in text


def test_the_command_writes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = CliRunner().invoke(cli, ["plan", GRPO, "--svg", str(tmp_path / "a.svg"), "--png", str(tmp_path / "a.png"), "--dot"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith('digraph "grpo" {')
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    assert (tmp_path / "a.png").stat().st_size > 10_000
    wrong = CliRunner().invoke(cli, ["plan", GRPO, "--svg", str(tmp_path / "a.pdf")])
    assert "the file's name must end in .svg" in wrong.stderr
