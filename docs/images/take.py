"""Take the pictures of docs/images/viewer: every view, at two sizes and in both themes, as small files.

python docs/images/take.py RUNS_DIR RUN OTHER      of a folder of runs; OTHER is laid beside RUN

Needs playwright and Debian's chromium, as the tests of the viewer's page do.
"""

import io
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PLACE = Path(__file__).parent / "viewer"
SIZES = {"1280x800": (1280, 800), "1920x1080": (1920, 1080)}
COLOURS = 256
SETTLE_MS = 900
BUSY = "!!document.querySelector('main .state[role=status]') || !document.querySelector('main').children.length"
WAITS = "[...document.querySelectorAll('aside > p.quiet')].some((one) => one.textContent.startsWith('Looking'))"


def shown(page: Page, address: str, view: str, run: str, other: str) -> None:
    """Open a view, and in it what shows most of it."""
    places = {"runs": "", "beside": f"{quote(run)}/schedule/beside/{quote(other)}", "compared": f"{quote(run)}/training"}
    page.goto("about:blank")
    page.goto(f"{address}#{places.get(view, f'{quote(run)}/{view}')}")
    while page.evaluate(BUSY):
        page.wait_for_timeout(100)
    if view == "samples":
        page.locator(".row").nth(3).click()
        page.get_by_role("heading", name="Life").wait_for()
    if view == "compared":
        page.get_by_label("Compare with a run").select_option(other)
        page.get_by_role("heading", name="What differs").wait_for()
    page.wait_for_timeout(SETTLE_MS)
    while page.evaluate(WAITS):
        page.wait_for_timeout(100)


def main(runs_dir: str, run: str, other: str) -> None:
    PLACE.mkdir(exist_ok=True)
    server = subprocess.Popen([sys.executable, "-m", "m2flow", "view", runs_dir, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
            for theme in ("light", "dark"):
                for size, (width, height) in SIZES.items():
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
                    page.set_default_timeout(120_000)
                    for view in ("runs", "schedule", "beside", "samples", "graph", "training", "compared", "health"):
                        shown(page, address, view, run, other)
                        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                        picture = picture.quantize(
                            COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
                        )  # Large areas keep theirs.
                        picture.save(PLACE / f"{view}-{size}-{theme}.png", optimize=True)
                    page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
