"""What the tests of the viewer look at: runs made in this process, hostile words in them, and a server for a folder of runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from agent_run import play
from fake_clusters import FAKES
from observed_run import record_run, store_run

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.runner.run import Run
from m2flow.spec import RunSettings
from m2flow.viewer.serving import Folder, application, configured, open_socket

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script></script><!-- ' \" & \u2028 \x1b[2J"
_ENDS_IN_S = 240
"""What a page asked for as its test ended is answered, not cut off, which a page would say it has failed by."""


PART = "<img src=x onerror=\"document.title='taken'\">"


def length(sample: Sample) -> dict[str, float]:
    return {"reward": sample.num_tokens - 0.25, "tokens": sample.num_tokens, PART: -0.25}


@flow
def hostile(num_steps: int = 3) -> None:
    policy, judge = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": f"{i} {HOSTILE}"} for i in range(4 * num_steps)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=6)
        policy.update(responses, judge.score(responses))


def make_run(runs: Path, *, num_steps: int = 3, eager: bool = True) -> Path:
    """A run of fake engines whose prompts are hostile; eager ones have a ledger and no trace to speak of."""
    return Path(Run(hostile, {"num_steps": num_steps}, FAKES, RunSettings(runs_dir=str(runs), eager=eager)).execute().run_dir)


def make_episodes(runs: Path) -> Path:
    """A run of an agent with a tool, on fake engines."""
    return Path(Run(play, {"num_steps": 1}, FAKES, RunSettings(runs_dir=str(runs), eager=True)).execute().run_dir)


def make_traced(run_dir: Path, **options: int) -> Path:
    """A directory with a trace alone."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text('{"flow": "flows/grpo.py", "options": {}}')
    return store_run(run_dir, record_run(**options))


@contextlib.contextmanager
def served(path: Path, *, token: str = "", host: str = "127.0.0.1", is_awaited: bool = False) -> Iterator[str]:
    """The address of a viewer for a run or a folder of runs."""
    with open_socket(host, 0) as listener:
        config = configured(application(Folder(path, is_awaited=is_awaited), token=token))
        config.timeout_graceful_shutdown = _ENDS_IN_S
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
