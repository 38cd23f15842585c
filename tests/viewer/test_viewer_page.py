"""The viewer's page in a real browser: each view, live, exported, with hostile text, with a million spans, and without a mouse."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from agent_run import PAID
from large_trace import make_large
from observed_run import record_run, store_run
from viewed import HOSTILE, PART, make_episodes, make_run, make_traced, served

from m2flow.observe.metrics import MetricsWriter
from m2flow.observe.spans import Recorder
from m2flow.viewer.serving import write_page

pytest_plugins = ["browsing"]  # The fixture `browser`.
pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZE = {"width": 1280, "height": 800}
LARGE = {"width": 2560, "height": 1440}
WAIT_MS = 240_000
EXPECTED = re.compile("404|net::ERR_CONNECTION")
"""Said of what a test asks for that is not there, and of a page that asks once more when its server has ended already."""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not fail: what it throws ends the test."""
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on(
        "console", lambda message: failures.append(message.text) if message.type == "error" and not EXPECTED.search(message.text) else None
    )
    yield page
    assert page.evaluate("document.documentElement.dataset.failed ?? ''") == ""
    context.close()
    assert not failures


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, num_steps=4)
    make_traced(folder / "traced")
    return folder


def made(runs: Path) -> str:
    return next(path.name for path in runs.iterdir() if path.name != "traced")


def painted(page: Page) -> None:
    until(page, "Number(document.querySelector('.scroll canvas')?.dataset.painted) > 0")


def settled(page: Page) -> None:
    """The view is there, and looks for nothing any more."""
    until(page, "document.querySelector('main').children.length > 0 && !document.querySelector('main .state[role=status]')")


def shown_s(page: Page) -> str:
    return page.locator("#range").inner_text()


def until(page: Page, expression: str, was: object = None) -> Any:
    """What an expression in `was` gives as soon as that is true. The page's content policy keeps Playwright's own waiting from evaluating
    anything there, so it is asked from here."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not (found := page.evaluate(f"(was) => {expression}", was)):
        assert time.monotonic() < deadline, f"this did not come true: {expression}"
        page.wait_for_timeout(30)
    return found


def test_the_runs_are_listed_and_one_leads_to_its_schedule(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(address)
        page.get_by_role("link", name="traced", exact=True).click()
        painted(page)
        page.get_by_role("heading", name="Where the time went").wait_for()
        page.get_by_role("button", name=re.compile("policy.update")).first.wait_for()
        table = page.locator("table.unseen").first
        assert "trainer-0" in (table.text_content() or "")


def test_the_schedule_is_zoomed_panned_and_pointed_at(page: Page, runs: Path) -> None:
    with served(runs / "traced") as address:
        page.goto(address)
        painted(page)
        whole = shown_s(page)
        canvas = page.locator(".scroll canvas")
        canvas.focus()
        page.keyboard.press("w")
        until(page, "document.querySelector('#range').textContent !== was", whole)
        closer = shown_s(page)
        page.keyboard.press("d")
        page.keyboard.press("f")
        until(page, "document.querySelector('#range').textContent === was", whole)
        assert closer != whole
        page.get_by_role("button", name="1", exact=True).click()  # Step 1, in the table of steps.
        until(page, "document.querySelector('#range').textContent !== was", whole)
        box = canvas.bounding_box()
        assert box is not None
        while page.locator("#tip").is_hidden():  # What is there now may come a moment after the range.
            page.mouse.move(box["x"] + 559, box["y"] + 75)
            page.mouse.move(box["x"] + 560, box["y"] + 75)
            page.wait_for_timeout(30)
        page.mouse.click(box["x"] + 560, box["y"] + 75)
        page.get_by_role("button", name="Zoom to it").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("heading", name="Where the time went").wait_for()


def test_a_line_of_the_flow_is_shown_alone_and_found_again_from_its_span(page: Page, runs: Path) -> None:
    with served(runs / "traced") as address:
        page.goto(address)
        painted(page)
        line = page.locator(".legend").get_by_role("button", name=re.compile("policy.update"))
        line.click()
        until(page, "document.querySelector('.legend [aria-pressed=true]')")
        assert line.get_attribute("aria-pressed") == "true"
        page.locator(".scroll canvas").focus()
        page.keyboard.press("Escape")
        until(page, "!document.querySelector('.legend [aria-pressed=true]')")


def test_samples_are_sorted_filtered_grouped_and_read_and_their_text_is_only_text(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(f"{address}#{made(runs)}/samples")
        assert until(page, "document.querySelector('.table .body')?.dataset.rows") == "32"
        page.get_by_role("columnheader", name=re.compile("^tokens")).click()
        until(page, "document.querySelector('.table .body').dataset.sorted === 'tokens true'")
        values = page.locator(".row").evaluate_all("(rows) => rows.map((row) => Number(row.children[5].textContent))")
        assert values == sorted(values, reverse=True)
        page.get_by_label("step, at least").fill("3")
        assert until(page, "document.querySelector('.table .body').dataset.rows === '8' && 8") == 8
        page.get_by_label("step, at least").fill("9")
        page.get_by_text("No sample meets all of these").wait_for()
        page.get_by_label("step, at least").fill("")
        page.get_by_role("button", name="By group").click()
        assert until(page, "document.querySelector('.table .body').dataset.rows === '16' && 16") == 16
        page.locator(".row").first.click()
        page.get_by_role("heading", name="Life").wait_for()
        told = page.locator("aside").inner_text()
        assert "onerror=" in told
        assert "<script>" in told
        for mode in ("version", "log-probability", "advantage"):
            page.get_by_role("button", name=mode).click()
        assert page.locator("aside tr.part th").all_inner_texts() == ["tokens", PART]
        assert page.locator("aside tr.part td").last.inner_text() == "-0.25"
        assert page.locator("aside img, aside script, main script").count() == 0
        assert "taken" not in page.title()


def test_the_schedule_begins_with_the_verdict_and_opens_on_the_last_steps(page: Page, tmp_path: Path) -> None:
    make_traced(tmp_path / "long", num_steps=9)
    with served(tmp_path) as address:
        page.goto(address)
        painted(page)
        assert until(page, "document.querySelector('.verdict .lead')?.textContent").startswith("A step takes ")
        page.get_by_text("Nothing is suggested").wait_for()
        last = shown_s(page)
        page.keyboard.press("f")  # Nothing has the focus.
        until(page, "document.querySelector('#range').textContent !== was", last)
        page.keyboard.press("l")
        until(page, "document.querySelector('#range').textContent === was", last)
        cause = page.locator("aside .facts button.link").first
        cause.click()
        until(page, "document.querySelector('.legend [aria-pressed=true]')")
        page.keyboard.press("Escape")
        page.locator("aside .rows button.link").first.click()
        page.get_by_role("button", name="First span").wait_for()


def test_samples_are_searched_linked_and_laid_side_by_side(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(f"{address}#{made(runs)}/samples")
        assert until(page, "document.querySelector('.table .body')?.dataset.rows") == "32"
        until(page, "document.querySelector('.row .text bdi')")  # The texts of the rows on the screen come by themselves.
        page.get_by_label("Search the texts").fill("prompt : 7")
        assert until(page, "document.querySelector('.table .body').dataset.rows === '2' && 2") == 2
        page.get_by_label("reward, at most").fill("100")
        link = until(page, "location.hash.includes('reward') && location.href")
        page.goto("about:blank")
        page.goto(link)
        assert until(page, "document.querySelector('.table .body')?.dataset.rows === '2' && 2") == 2
        href = page.get_by_role("link", name="Export JSONL").get_attribute("href")
        assert href is not None
        assert "q=prompt" in href
        page.locator(".row").first.click()
        page.get_by_role("link", name="All responses to its prompt").click()
        page.get_by_role("heading", name=re.compile("^Group")).wait_for()
        assert page.locator(".response").count() == 2
        page.get_by_role("button", name="compare with it").click()
        page.get_by_role("link", name="Next →").click()
        until(page, "document.querySelectorAll('.response').length === 2")
        assert page.locator("main img, main script").count() == 0


def test_an_episode_of_several_turns_reads_as_a_conversation(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAID, str(tmp_path / "paid"))
    run = make_episodes(tmp_path / "runs")
    with served(tmp_path / "runs") as address:
        page.goto(f"{address}#{run.name}/samples")
        assert until(page, "document.querySelector('.table .body')?.dataset.rows") == "16"
        page.locator(".row").first.click()
        page.get_by_role("heading", name="Tokens", exact=True).wait_for()
        heads = page.locator("aside .turn h3").evaluate_all("(heads) => heads.map((head) => head.firstChild.textContent)")
        between = "Tools, users, the environment"
        assert heads == [
            "Prompt",
            "Turn 1 of the model",
            *(said for turn in range(2, 6) for said in (between, f"Turn {turn} of the model")),
        ]
        passed = page.locator("aside .passed li > span:first-child").all_inner_texts()
        assert [name for name in passed if name.startswith("turn")] == [f"turn {turn}" for turn in range(1, 6)]
        assert passed.count("tool look") == 8
        counts = [int(text.split()[0]) for text in page.locator("aside .turn h3 .quiet").all_inner_texts()]
        assert counts == page.locator("aside .turn").evaluate_all(
            "(turns) => turns.map((turn) => turn.querySelectorAll('[data-i]').length)"
        )
        assert counts[1::2] == page.locator("aside .turn.generated").evaluate_all(
            "(turns) => turns.map((turn) => turn.children.length - 1)"
        )


def test_metrics_are_drawn_over_time_or_tokens_smoothed_and_with_bands(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(f"{address}#{made(runs)}/training")
        page.locator('.card[data-metric="reward quantiles"] canvas').wait_for()
        for name in ("time", "tokens trained on", "steps"):
            page.get_by_role("button", name=name, exact=True).click()
            page.locator(".card[data-metric=reward] canvas").wait_for()
        page.get_by_label("log scale").check()
        page.get_by_label("Smooth over steps").select_option("3")
        page.locator(".card[data-metric=reward] canvas").wait_for()
        assert "Healthy" in page.locator(".card[data-metric=reward]").inner_text()
        until(page, "location.hash.includes('smooth')")


def test_runs_are_a_table_to_search_and_group_by_seed_and_the_first_one_appears(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with served(folder, is_awaited=True) as address:
        page.goto(address)
        page.get_by_text("No runs here yet").wait_for()
        for name, seed, lr in (("one", 0, 1.0), ("two", 1, 1.0), ("three", 0, 2.0)):
            (folder / name).mkdir(parents=True)
            asked = {"flow": "f.py", "options": {"lr": lr}, "settings": {"seed": seed}}
            (folder / name / "config.json").write_text(json.dumps(asked))
        page.get_by_role("link", name="three", exact=True).wait_for()
        assert "lr=2" in page.locator("tr", has_text="three").inner_text()
        page.get_by_role("button", name="Group seeds").click()
        page.get_by_text("2 seeds").wait_for()
        page.get_by_label("Search runs").fill("lr=2")
        until(page, "document.querySelectorAll('.sortable tbody tr').length === 1")


def test_the_graph_training_and_health_show_what_the_run_did(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(f"{address}#{made(runs)}/graph")
        page.get_by_role("button", name=re.compile("policy.generate")).first.wait_for()
        assert page.locator(".graph path.effect").count() >= 1
        page.get_by_role("link", name="Training").click()
        page.locator(".card[data-metric=reward] canvas").wait_for()
        page.get_by_label("Compare with a run").select_option("traced")
        page.get_by_role("button", name=re.compile("traced")).wait_for()
        page.locator(".card[data-compared=traced]").get_by_role("heading", name="What differs").wait_for()
        page.get_by_role("link", name="Health").click()
        page.get_by_role("heading", name="What happened").wait_for()
        assert "attempt 1" in page.locator(".page").inner_text()


def test_a_run_that_failed_after_its_first_step_says_why_in_the_room_that_there_is(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", num_steps=1)
    why = "RewardError: the reward function judge raised ZeroDivisionError on sample p2/2: float division by zero"
    with contextlib.closing(sqlite3.connect(run / "ledger.db")) as db:
        db.execute("UPDATE attempts SET reason=?", (why,))
        db.execute("UPDATE calls SET error=?", (f"{why}\n  the worker's traceback:\n    File",))
        db.commit()
    with served(tmp_path / "runs") as address:
        page.goto(f"{address}#{run.name}/health")
        page.get_by_role("heading", name="Calls that failed").wait_for()
        assert why in page.locator(".badge.stopped").first.inner_text()
        assert page.evaluate("document.querySelector('#bar').scrollWidth <= innerWidth")
        assert page.locator("table.grid pre").count() == 1
        assert page.get_by_role("cell", name="the same").count() >= 2
        page.get_by_role("link", name="Training").click()
        page.locator(".card canvas").first.wait_for()
        page.get_by_role("button", name="Light or dark").click()


def test_two_schedules_are_laid_beneath_each_other_and_move_together(page: Page, runs: Path) -> None:
    make_traced(runs / "shorter", num_steps=2)
    try:
        with served(runs) as address:
            page.goto(f"{address}#traced/schedule")
            painted(page)
            page.get_by_label("Lay another run's schedule beneath").select_option("shorter")
            page.get_by_role("heading", name="What differs").wait_for()
            until(page, "[...document.querySelectorAll('.scroll canvas')].filter((one) => Number(one.dataset.painted) > 0).length === 2")
            both = "[...document.querySelectorAll('#range')].map((one) => one.textContent).join()"
            whole = until(page, both)
            page.locator(".scroll canvas").first.focus()
            page.keyboard.press("w")
            closer = until(page, f"{both} !== was && {both}", whole)
            until(page, f"new Set({both}.split(',')).size === 1")  # As much of the one as of the other.
            page.get_by_label("Where both begin").select_option("1")
            until(page, f"{both} !== was", closer)
            page.get_by_role("link", name="Close").click()
            page.get_by_role("heading", name="Where the time went").wait_for()
    finally:
        shutil.rmtree(runs / "shorter")


def test_a_line_leads_to_its_spans_and_the_graph_to_its_line(page: Page, runs: Path) -> None:
    with served(runs) as address:
        page.goto(f"{address}#traced/graph")
        page.get_by_role("button", name=re.compile("policy.update")).first.click()
        painted(page)
        page.get_by_text("On the critical path for").wait_for()
        assert page.locator(".legend [aria-pressed=true]").inner_text().startswith("policy.update")
        page.get_by_role("button", name="First span").click()
        page.get_by_role("button", name="Zoom to it").wait_for()
        assert "trainer-0" in page.locator("aside").inner_text()


def test_no_name_line_log_or_metric_of_a_run_is_taken_for_markup(page: Page, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    for name in (f"{evil.replace('/', '')}", "other"):
        run = tmp_path / name
        (run / "logs").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"flow": evil, "options": {evil: evil if name == "other" else 1}}))
        recorder = Recorder(f"w-{evil.replace('/', '')}")
        recorder.add("sample", 0, 9_000_000, call=0, step=0, label=evil, flow_line=evil, sample=0, num_tokens=4, odd=evil)
        recorder.add("rollout.step", 0, 9_000_000, call=0, step=0, label=evil, flow_line=evil, num_samples=1, odd=evil)
        recorder.count(evil, 1.0, 5)
        store_run(run, [recorder.drain()])
        (run / "logs" / "w.log").write_text(evil)
        with MetricsWriter(run, tensorboard=False) as writer:
            writer.write(0, {evil: 1.0})
    with served(tmp_path) as address:
        first = quote(next(path.name for path in tmp_path.iterdir() if path.name != "other"), safe="")
        for view in ("schedule", "samples", "graph", "training", "health", "schedule/beside/other"):
            page.goto("about:blank")
            page.goto(f"{address}#{first}/{view}")
            settled(page)
            if view == "schedule":
                box = page.locator(".scroll canvas").bounding_box()
                assert box is not None
                page.mouse.click(box["x"] + 560, box["y"] + 75)
            if view == "training":
                page.get_by_label("Compare with a run").select_option("other")
            if view in ("training", "schedule/beside/other"):
                page.get_by_role("heading", name="What differs").wait_for()
            if view == "training":  # Before anybody points at a chart its legend names the runs, and no value.
                assert "--" not in page.locator(".u-legend").first.inner_text()
            assert page.locator("img, main script, #bar script").count() == 0, view
        page.goto(f"{address}#")
        page.get_by_role("heading", name="Runs").first.wait_for()
        assert page.locator("img").count() == 0
        assert "taken" not in page.title()


def test_a_run_that_goes_on_moves_by_itself(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.viewer.health.is_held", lambda _: True)
    run = make_run(tmp_path, num_steps=1)
    with sqlite3.connect(run / "ledger.db") as db:
        db.execute("UPDATE attempts SET ended=NULL, reason=NULL")
    db.close()
    (run / "trace" / "spans.msgpack").unlink(missing_ok=True)
    with served(tmp_path) as address:
        page.goto(address)
        page.get_by_text("No spans yet").wait_for()
        store_run(run, record_run(num_steps=1))
        painted(page)
        assert until(page, "document.querySelector('.figures dd').textContent") == "1"
        store_run(run, record_run(num_steps=3, start_ns=2 * 10**12))
        until(page, "document.querySelector('.figures dd').textContent === '3'")
        until(page, "document.querySelector('#range').textContent.startsWith('16 min')")  # All of it is still in sight.
        page.locator(".scroll canvas").focus()
        for key in "wwwwdddddddddddddddd":
            page.keyboard.press(key)
        until(page, "document.querySelector('#range').textContent.startsWith('4 min')")
        was = page.locator(".scroll canvas").get_attribute("data-painted")
        store_run(run, record_run(num_steps=4, start_ns=3 * 10**12))
        until(page, "document.querySelector('.figures dd').textContent === '4'")
        until(page, "document.querySelector('.scroll canvas').dataset.painted !== was", was)
        until(page, "document.querySelector('#range').textContent.startsWith('4 min')")  # As near as it was looked at.


def test_the_exported_file_opens_from_the_disk_and_asks_no_network(page: Page, runs: Path, tmp_path: Path) -> None:
    write_page(runs / made(runs), tmp_path / "page.html")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_role("link", name="Samples").click()
    page.locator(".row").first.click()
    page.get_by_role("heading", name="Life").wait_for()
    assert HOSTILE[:30] in page.locator("aside").inner_text()
    for view in ("Graph", "Training", "Health", "Schedule"):
        page.get_by_role("link", name=view).click()
        settled(page)
    assert asked == []
    assert "taken" not in page.title()


def test_a_million_spans_and_a_hundred_thousand_samples_leave_the_page_at_ease(page: Page, tmp_path: Path) -> None:
    make_large(tmp_path / "large")
    with served(tmp_path) as address:
        page.goto(address)
        painted(page)
        page.evaluate(
            "() => { window.longest = 0; new PerformanceObserver((list) => { for (const entry of list.getEntries())"
            " window.longest = Math.max(window.longest, entry.duration); }).observe({ type: 'longtask' }); }"
        )
        page.locator(".scroll canvas").focus()
        for _ in range(5):  # A machine that stands still for a moment makes the page seem to, though not each time.
            page.evaluate("window.longest = 0")
            for key in "wwwdwwaassff":
                before = page.locator(".scroll canvas").get_attribute("data-painted")
                page.keyboard.press(key)
                until(page, "document.querySelector('.scroll canvas').dataset.painted !== was", before)
            if page.evaluate("window.longest") < 5000:
                break
        else:
            pytest.fail("the page froze")
        page.get_by_role("link", name="Samples").click()
        assert int(until(page, "document.querySelector('.table .body')?.dataset.rows")) > 90_000
        assert page.locator(".row").count() < 100
        page.get_by_role("columnheader", name=re.compile("^tokens")).click()
        until(page, "document.querySelector('.table .body').dataset.sorted === 'tokens true'")
        page.evaluate("document.querySelector('.table').scrollTop = 1e6")
        until(page, "Number(document.querySelector('.row').getAttribute('aria-rowindex')) > 30000")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_can_be_used_by_everyone(browser: Browser, runs: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(viewport=SIZE if theme == "light" else LARGE, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    found: list[str] = []
    with served(runs) as address:
        for view in (
            "traced/schedule",
            f"{made(runs)}/schedule",
            f"traced/schedule/beside/{made(runs)}",
            f"{made(runs)}/samples",
            f"{made(runs)}/graph",
            f"{made(runs)}/training",
            f"{made(runs)}/health",
            "",
        ):
            page.goto("about:blank")
            page.goto(f"{address}#{view}")
            settled(page)
            if view.endswith("samples"):
                page.locator(".row").first.click()
                page.get_by_role("heading", name="Life").wait_for()
            if view.endswith("training"):
                page.get_by_label("Compare with a run").select_option("traced")
            if view.endswith("training") or "beside" in view:
                page.get_by_role("heading", name="What differs").wait_for()
            assert page.evaluate("[...document.querySelectorAll('aside')].every((one) => one.scrollWidth <= one.clientWidth)"), view
            whole = "(bar) => Math.abs([...bar.children].reduce((sum, part) => sum + part.offsetWidth, 0) - bar.offsetWidth)"
            assert page.evaluate(f"Math.max(0, ...[...document.querySelectorAll('.stack')].map({whole}))") < 12, view
            for violation in axe.run(page, context="html").response["violations"]:
                found += [f"{view} {theme}: {violation['id']}: {node['html'][:160]}" for node in violation["nodes"][:3]]
    context.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 820, 390])
def test_every_view_fits_a_desk_a_tablet_and_a_phone(browser: Browser, runs: Path, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    found: list[str] = []
    with served(runs) as address:
        run = made(runs)
        for view in (
            "traced/schedule",
            f"{run}/samples",
            f"{run}/samples/group/1-0",
            f"{run}/graph",
            f"{run}/training",
            f"{run}/health",
            "",
        ):
            page.goto("about:blank")
            page.goto(f"{address}#{view}")
            settled(page)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{view} is wider than the window")
            for violation in axe.run(page, context="html").response["violations"]:
                found += [f"{view}: {violation['id']}: {node['html'][:160]}" for node in violation["nodes"][:3]]
    context.close()
    assert not found, "\n".join(found)


def test_what_is_missing_is_said_on_the_page(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    with served(tmp_path) as address:
        page.goto(address)
        page.get_by_text("No runs here yet").wait_for()
        page.goto(f"{address}#gone/schedule")
        page.get_by_text("This run can't be shown").wait_for()
        assert not page.get_by_role("link", name="All runs", exact=True).count()
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text('{"flow": "flows/grpo.py", "options": {}}')
        page.goto("about:blank")
        page.goto(f"{address}#gone/schedule")
        page.get_by_text("This run can't be shown").wait_for()
        page.get_by_role("heading", name="gone", exact=True).wait_for()  # Not the name of a run that is there.
        page.goto(f"{address}#one/schedule/beside/gone")
        page.get_by_role("link", name="The schedule alone").click()
        page.get_by_text("No spans yet").wait_for()
        assert not page.locator(".figures").count()
        page.goto(f"{address}#gone/schedule")
        page.get_by_role("link", name="All runs", exact=True).click()
        page.get_by_role("link", name="other", exact=True).wait_for()
    context.close()
