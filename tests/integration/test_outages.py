"""A reward service that goes down in the middle of a run: the run ends with the reason, and goes on when the service is back."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import programs
import pytest
from answering import Answering
from disturbing import PATIENCE_S, run, undisturbed


class Service(ThreadingHTTPServer):
    """Judges; after so many answers it takes connections and says nothing, until it is brought back."""

    daemon_threads = True

    def __init__(self, num_answers: int) -> None:
        super().__init__(("127.0.0.1", 0), Judge)
        self.num_answers = num_answers
        self.lock = threading.Lock()

    def answers(self) -> bool:
        with self.lock:
            self.num_answers -= 1
            return self.num_answers >= 0


class Judge(Answering):
    def answer(self) -> str | None:
        assert isinstance(self.server, Service)
        return str(int(self.path.strip("/")) % 3) if self.server.answers() else None


@contextlib.contextmanager
def served(num_answers: int) -> Iterator[tuple[Service, dict[str, str]]]:
    service = Service(num_answers)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    try:
        yield service, {**os.environ, "SERVICE": f"http://127.0.0.1:{service.server_port}"}
    finally:
        service.shutdown()
        thread.join()
        service.server_close()


@pytest.mark.slow
def test_a_run_whose_reward_service_is_down_ends_with_the_reason_and_is_resumed_to_the_same_weights(tmp_path: Path) -> None:
    with served(50) as (service, environment):
        failed = run(tmp_path / "runs", "fake", environment=environment)
        assert "RewardError" in failed["error"]
        assert "RemoteDisconnected" in failed["error"]
        service.num_answers = 10_000
        (run_dir,) = (tmp_path / "runs").iterdir()
        command = [sys.executable, "-m", "m2flow", "run", "--resume", str(run_dir), "--json", "--quiet"]
        done = programs.run(command, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    resumed, plain = json.loads(done.stdout.splitlines()[-1]), undisturbed("fake")
    assert (resumed["samples_sha256"], resumed["weights_sha256"], resumed["samples"]) == (
        plain["samples"],
        plain["weights"],
        plain["count"],
    )
