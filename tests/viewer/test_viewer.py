"""The viewer's server: what it answers, to whom, and what it does not give away. The page in a browser is in `test_viewer_page.py`."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import programs
import pytest
from click.testing import CliRunner
from observed_run import MS, record_run, store_run
from starlette.routing import Route
from viewed import HOSTILE, make_run, make_traced, served

from m2flow.cli.main import cli
from m2flow.observe.spans import Recorder
from m2flow.samples import SampleId
from m2flow.simulator.simulation import Doing, causes_of
from m2flow.viewer.analysis import StepAnalysis
from m2flow.viewer.comparison import series_of_steps
from m2flow.viewer.run_trace import CAUSES
from m2flow.viewer.serving import ASSETS, Folder, application, write_page


def get(address: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    link = http.client.HTTPConnection(address.removeprefix("http://"), timeout=240)
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer, body


def ask(address: str, path: str) -> Any:
    while True:
        answer, body = get(address, path)
        assert answer.status == 200, body
        found = json.loads(body)
        if not isinstance(found, dict) or set(found) != {"loading"}:
            return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder)
    make_traced(folder / "traced")
    return folder


def test_the_runs_of_a_folder_are_listed_with_their_state(runs: Path) -> None:
    with served(runs) as address:
        found = {run["name"]: run for run in ask(address, "/api/runs")}
    (made,) = set(found) - {"traced"}
    assert found[made]["state"]["name"] == "done"
    assert found["traced"]["state"]["name"] == "unknown"


def test_a_window_has_the_bars_of_the_lanes_that_were_asked_for(runs: Path) -> None:
    with served(runs / "traced") as address:
        summary = ask(address, "/api/runs/traced/summary")
        names = [lane["name"] for lane in summary["lanes"]]
        assert names == ["rollout-0", "rollout-1", "reward-0", "trainer-0"]
        assert [version for version, _, _ in summary["marks"]["versions"]] == [1, 2, 3]
        assert [step for step, _, _ in summary["marks"]["steps"]] == [0, 1, 2]
        window = f"/api/runs/traced/schedule?from=0&to={summary['total']}&width=1000"
        (lane,) = ask(address, window + "&lanes=0&expanded=0")
        assert lane["lane"] == 0
        assert sum(len(row["s"]) for row in lane["life"]) == 3 * 8
        assert max(lane["running"]) == 8
        assert ask(address, window + "&lanes=3")[0]["life"] == []
        whole = ask(address, f"/api/runs/traced/span/{lane['work'][0]['i'][0]}")
        assert (whole["name"], whole["line"], whole["label"]) == ("rollout.prefill", "flows/grpo.py:31", "policy.generate")


def test_what_is_not_there_is_named(runs: Path) -> None:
    with served(runs) as address:
        ask(address, "/api/runs/traced/summary")
        for path, says in (("span/99999999", "there is no span 99999999"), ("log/nobody", "there is no log of 'nobody'")):
            assert get(address, f"/api/runs/traced/{path}")[1].decode().endswith(f'{says}"}}')


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/traced/schedule?from=0&to=1&width=0&lanes=0", 400),
        ("/api/runs/traced/schedule?from=0&to=x&width=9&lanes=0", 400),
        (f"/api/runs/traced/schedule?from=-{10**30}&to={10**30}&width=9&lanes=0", 400),
        ("/api/runs/traced/span/99999999", 404),
        (f"/api/runs/traced/span/{10**30}", 404),
        (f"/api/runs/traced/samples/0/0/{10**30}", 404),
        ("/api/runs/traced/log/nobody", 404),
        ("/api/runs/traced/samples/0/0/0", 404),
        ("/api/runs/none/summary", 404),
        ("/nowhere", 404),
    ],
)
def test_what_can_not_be_answered_is_said_so_and_nothing_breaks(runs: Path, path: str, status: int) -> None:
    with served(runs) as address:
        ask(address, "/api/runs/traced/summary")
        answer, body = get(address, path)
        assert answer.status == status
        assert json.loads(body)["error"]


NUMBERS = ["9" * 5000, "9" * 19, "1" * 20, str(2**31), str(2**63), str(2**64), "-1", f"-{2**63}", "nan", "inf", "1e5", "0x10", "1_0", ""]
WORDS = ["../..", "../" * 40 + "etc/passwd", "\x00", "\udc80", "\U0001f600", "\u0661", "a" * 3000, "%zz", "'; DROP TABLE samples; --"]
WINDOWS = [
    "from={query}&to=9&width=9&lanes=0",
    "from=0&to={query}&width=9&lanes=0&expanded=0",
    "from=0&to=9&width={query}",
    "from=0&to=9&width=9&lanes={query}",
    "from=0&to=9&width=9&lanes=0&expanded={query}",
]
ASKED = [
    "texts?of={query}",
    "search?q={query}",
    "export?as={query}",
    "export?step={query}&set={query}&ending={query}&q={query}",
    "suggestions?ask={query}",
]


@pytest.mark.parametrize("run", ["traced", "hostile"])
def test_no_value_of_any_parameter_of_any_route_is_more_than_refused(runs: Path, run: str) -> None:
    (name,) = [path.name for path in runs.iterdir() if path.name.startswith(run)]
    drawn = random.Random(0)
    words = [*NUMBERS, *WORDS, *("".join(map(chr, drawn.choices(range(0x3000), k=drawn.randint(1, 9)))) for _ in range(5))]
    routes = [re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", route.path) for route in application(Folder(runs)).routes if isinstance(route, Route)]
    assert len(routes) == 20
    with served(runs) as address:
        ask(address, f"/api/runs/{name}/summary")
        asks = [(route, field) for route in routes for field in re.findall(r"\{(\w+)\}", route)]
        asks += [(f"/api/runs/{{run}}/schedule?{window}", "query") for window in WINDOWS]
        asks += [(f"/api/runs/{{run}}/{asked}", "query") for asked in ASKED]
        for template, hostile in asks:
            for word in words:
                known = dict.fromkeys(re.findall(r"\{(\w+)\}", template), "0") | {"run": name} | {hostile: word}
                quoted = {field: quote(value, safe="", errors="surrogatepass") for field, value in known.items()}
                answer, body = get(address, template.format_map(quoted))
                is_refused = 400 <= answer.status < 500 and bool(json.loads(body)["error"])
                assert answer.status == 200 or is_refused, (template, word[:40], body)


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../summary", "/api/runs/%2e%2e/summary", "/api/runs/..%2f..%2fetc/summary", "/api/runs/outside/summary",
        "/api/runs/traced/log/..%2f..%2fsecret", "/api/runs/traced/log/%2e%2e%2fsecret", "/page/..%2fpage.py", "/page/../../serving.py",
        "/page/%2e%2e%2findex.html",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    make_traced(tmp_path / "runs" / "traced")
    make_traced(tmp_path / "elsewhere")
    (tmp_path / "secret.log").write_text("tell no one")
    (tmp_path / "runs" / "outside").symlink_to(tmp_path / "elsewhere")
    with served(tmp_path / "runs") as address:
        assert [run["name"] for run in ask(address, "/api/runs")] == ["traced"]
        answer, body = get(address, path)
        assert answer.status == 404
        assert b"tell no one" not in body


def test_a_link_in_a_run_does_not_lead_out_of_it_either(tmp_path: Path) -> None:
    make_traced(tmp_path / "runs" / "traced")
    (tmp_path / "secret.txt").write_text("tell no one")
    logs = tmp_path / "runs" / "traced" / "logs"
    logs.mkdir()
    (logs / "own.log").write_text("hello")
    (logs / "linked.log").symlink_to(tmp_path / "secret.txt")
    with served(tmp_path / "runs") as address:
        assert ask(address, "/api/runs/traced/health")["logs"] == ["own"]
        answer, body = get(address, "/api/runs/traced/log/linked")
        assert (answer.status, b"tell no one" in body) == (404, False)


def test_loopback_is_answered_only_under_its_own_names(runs: Path) -> None:
    with served(runs) as address:
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80", "0.0.0.0", "user@localhost"):
            assert get(address, "/api/runs", Host=host)[0].status == 403, host
        for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8265"):
            assert get(address, "/api/runs", Host=host)[0].status == 200, host


def test_elsewhere_a_token_is_asked_for_once_and_kept_in_a_cookie(runs: Path) -> None:
    with served(runs, token="open-sesame") as address:
        assert get(address, "/api/runs")[0].status == 401
        assert get(address, "/?token=guess")[0].status == 401
        answer, _ = get(address, "/?token=open-sesame")
        assert (answer.status, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        assert get(address, "/api/runs", Cookie=cookie.partition(";")[0])[0].status == 200


def test_the_page_may_run_its_own_scripts_only(runs: Path) -> None:
    with served(runs) as address:
        answer, body = get(address, "/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        for place in re.findall(r'(?:src|href)="(/[^"]+)"', body.decode()):
            assert get(address, place)[0].status == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        link = http.client.HTTPConnection(address.removeprefix("http://"), timeout=240)
        link.request("POST", "/api/runs")
        assert link.getresponse().status == 405
        link.close()


def test_no_part_of_the_page_takes_text_for_markup() -> None:
    for name, path in ASSETS.items():
        if name.endswith(".js") and name != "uPlot.js":
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", path.read_text()
            ), name


def test_samples_are_columns_and_one_of_them_has_its_text_as_it_is(runs: Path) -> None:
    with served(runs) as address:
        run = next(one["name"] for one in ask(address, "/api/runs") if one["name"] != "traced")
        table = ask(address, f"/api/runs/{run}/samples")
        assert {len(table[key]) for key in ("call", "reward", "tokens", "wait", "advantage")} == {24}
        assert {table["endings"][ending] for ending in table["ending"]} == {"consumed"}
        page = ask(address, f"/api/runs/{run}/samples/{table['call'][5]}/{table['prompt'][5]}/{table['member'][5]}")
        assert page["prompt_text"].endswith(f" {HOSTILE}")
        assert len(page["pieces"]) == len(page["kinds"]) == len(page["logprobs"])
        assert ask(address, f"/api/runs/{run}/training")["series"]
        assert {node["name"] for node in ask(address, f"/api/runs/{run}/graph")["nodes"]} >= {"policy.generate", "policy.update"}


def test_a_group_has_all_of_its_responses_and_texts_are_searched_and_exported(runs: Path) -> None:
    with served(runs) as address:
        run = next(one["name"] for one in ask(address, "/api/runs") if one["name"] != "traced")
        table = ask(address, f"/api/runs/{run}/samples")
        call, prompt = table["call"][5], table["prompt"][5]
        group = ask(address, f"/api/runs/{run}/groups/{call}/{prompt}")
        assert [one["member"] for one in group["members"]] == [0, 1]
        assert group["prompt_text"].endswith(HOSTILE)
        assert [one["parts"]["tokens"] for one in group["members"]] == [one["tokens"] for one in group["members"]]
        assert get(address, f"/api/runs/{run}/groups/{call}/{10**9}")[0].status == 404
        names = ",".join(f"{call}-{prompt}-{member}" for member in (0, 1))
        texts = ask(address, f"/api/runs/{run}/texts?of={names}")
        assert texts == {f"{call}/{prompt}/{one['member']}": [group["prompt_text"], one["response"]] for one in group["members"]}
        found = ask(address, f"/api/runs/{run}/search?q={quote('prompt : onerror')}")
        assert len(found) == len(table["call"])
        number = group["prompt_text"].split()[0]
        found = ask(address, f"/api/runs/{run}/search?q={quote(f'prompt : {number}')}")
        assert {tuple(one[:2]) for one in found} == {(call, prompt)}
        answer, body = get(address, f"/api/runs/{run}/export?as=jsonl&step=1..1&q={quote('onerror')}")
        assert answer.headers["content-disposition"] == f'attachment; filename="{run}.jsonl"'
        lines = [json.loads(line) for line in body.splitlines()]
        assert [line["step"] for line in lines] == [1] * table["step"].count(1)
        assert get(address, f"/api/runs/{run}/search?q={quote('(')}")[0].status == 400


def test_runs_are_listed_with_what_they_came_to(runs: Path) -> None:
    with served(runs) as address:
        made = next(one for one in ask(address, "/api/runs") if one["name"] != "traced")
    assert made["num_steps"] == 3
    assert made["seed"] == 0
    assert made["reward"] is not None
    assert made["options"] == {"num_steps": 3}


def test_nothing_is_simulated_of_a_run_without_a_plan_or_whose_flow_lies_among_the_runs(runs: Path, tmp_path: Path) -> None:
    with served(runs) as address:
        found = ask(address, "/api/runs/traced/suggestions?ask=1")
    assert (found["state"], found["suggestions"]) == ("done", None)
    assert "no plan" in found["why_not"]


def test_training_has_what_the_schedule_made_of_each_step_beside_the_metrics(runs: Path) -> None:
    with served(runs) as address:
        steps = msgspec.convert(ask(address, "/api/runs/traced/analysis")["steps"], list[StepAnalysis])
        series = ask(address, "/api/runs/traced/training")["series"]
    assert set(series) == {"schedule/efficiency", "schedule/tokens_per_s"}  # The trace does not say which version its updates wrote.
    assert all(of["steps"] == [step.step for step in steps] for of in series.values())
    assert series["schedule/efficiency"]["values"] == [step.efficiency for step in steps]
    assert series["schedule/tokens_per_s"]["values"] == [pytest.approx(step.tokens / step.makespan_s) for step in steps]
    behind = series_of_steps([msgspec.structs.replace(step, staleness={"0": 3, "2": 1}) for step in steps])["schedule/staleness"]
    assert behind.values == [0.5] * len(steps)


def test_two_runs_are_compared_and_a_third_is_not_there(runs: Path) -> None:
    with served(runs) as address:
        made = next(one["name"] for one in ask(address, "/api/runs") if one["name"] != "traced")
        for one, other in (("traced", "traced"), ("traced", made), (made, "traced")):
            found = ask(address, f"/api/runs/{one}/against/{other}")
            assert (found["one"]["name"], found["other"]["name"]) == (one, other)
            assert found["explained"]
        for name in ("nothing", "..%2ftraced", "%2e%2e"):
            answer, body = get(address, f"/api/runs/traced/against/{name}")
            assert answer.status == 404, body


def test_the_page_and_the_guide_explain_each_cause_of_idle_time_by_its_name() -> None:
    lacking = causes_of(Doing(0, 1, False, False, False, False, lacks_memory=True))
    assert set(lacking.values()) == {"backpressure"}
    drawn = ASSETS["palette.js"].read_text().partition("const CAUSES = {")[2].partition("\n};")[0]
    assert set(re.findall(r"^  (\w+): \{ colour", drawn, re.MULTILINE)) == set(CAUSES)
    table = (Path(__file__).parents[2] / "docs" / "guide" / "schedule.md").read_text().partition("## Causes of idle time")[2]
    said = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert said == set(CAUSES) - {"unused", "failed"}


def test_a_sample_that_ran_twice_has_both_of_its_spans(tmp_path: Path) -> None:
    recorders = [Recorder("rollout-0"), Recorder("rollout-1")]
    moved, stayed = SampleId(0, 0, 0).pack(), SampleId(0, 0, 1).pack()
    for at, (recorder, start) in enumerate(zip(recorders, (0, 5), strict=True)):
        recorder.anchor_ns = 0
        about = {"call": 0, "step": 0, "label": "policy.generate", "flow_line": "f.py:1", "num_tokens": 4}
        recorder.add("sample", start * MS, (start + 4) * MS, **about, sample=moved, version=at)
        recorder.add("sample", 0, 9 * MS, **about, sample=stayed + at, version=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    store_run(tmp_path / "run", [recorder.drain() for recorder in recorders])
    with served(tmp_path) as address:
        table = ask(address, "/api/runs/run/samples")
        at = next(i for i, member in enumerate(table["member"]) if member == 0)
        assert table["spans"] == {str(at): [[0, 4000, 0, 0], [5000, 9000, 1, 1]]}


def test_health_shows_the_room_of_channels_and_the_course_of_counters(tmp_path: Path) -> None:
    recorder = Recorder("controller")
    recorder.add("wait", 0, 900 * MS)
    recorder.anchor_ns = 0
    for at in range(500):
        recorder.count("channel samples, policy.generate to train-0", at % 7, at * MS)
        recorder.count("memory bytes", at if at != 3 else float("nan"), at * MS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    store_run(tmp_path / "run", [recorder.drain()])
    with served(tmp_path) as address:
        health = ask(address, "/api/runs/run/health")
    (room,) = health["rooms"]
    assert (room["producer"], room["target"], room["samples"], room["most_samples"]) == ("policy.generate", "train-0", 499 % 7, 6)
    (counter,) = health["counters"]
    assert (counter["worker"], counter["name"], counter["least"], counter["most"], counter["last"]) == (
        "controller",
        "memory bytes",
        0,
        499,
        499,
    )
    assert len(counter["at"]) == len(counter["values"]) <= 120
    assert counter["values"][-1] == 499


def test_a_run_that_goes_on_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.viewer.run_view._EVERY_S", 0.0)
    monkeypatch.setattr("m2flow.viewer.run_view._REST", 0.0)
    make_traced(tmp_path / "live", num_steps=1)
    with served(tmp_path) as address:
        first = ask(address, "/api/runs/live/summary")
        store_run(tmp_path / "live", record_run(num_steps=2, start_ns=2 * 10**12))
        second = ask(address, "/api/runs/live/summary")
        assert second["revision"] > first["revision"]
        assert second["num_spans"] > first["num_spans"]


def test_a_run_that_has_recorded_nothing_yet_has_answers(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    with served(tmp_path) as address:
        assert ask(address, "/api/runs/begun/summary")["num_spans"] == 0
        for what in ("samples", "graph", "training", "health", "analysis"):
            ask(address, f"/api/runs/begun/{what}")


def test_the_exported_page_holds_its_data_and_its_scripts_and_asks_nobody(runs: Path, tmp_path: Path) -> None:
    write_page(runs / "traced", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    packed = re.search(r'id="data">([^<]+)<', page)
    assert packed is not None
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert sum(len(row["s"]) for lane in data["schedule"]["lanes"] for row in lane["work"]) > 0
    assert data["summary"]["name"] == "traced"


def test_view_writes_a_file_and_names_a_missing_run(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["view", str(runs / "traced"), "--html", str(tmp_path / "a" / "page.html")])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "a" / "page.html"))
    missing = CliRunner().invoke(cli, ["view", "nothing", "--runs-dir", str(runs)])
    assert missing.exit_code == 2


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c_and_ends_well(runs: Path) -> None:
    command = [sys.executable, "-m", "m2flow", "view", str(runs), "--port", "0"]
    with programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0].rstrip("/")
        assert len(ask(address, "/api/runs")) == 2
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=240)[1]
    assert (process.returncode, said) == (0, "")
