"""Whatever befalls the job of `flows/grpo.py` with real engines, it ends with the weights of one that was left alone, bit by bit.

Each failure comes while the rewards of the second step wait: the first has been trained on, and the second has been sampled or is.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cramped import registered
from held_job import Job, check, end, ended, wait_until
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
LR = 2e-4
"""Of the job's updates by rewards."""


def process_of(process: subprocess.Popen[str], name: str) -> psutil.Process:
    (found,) = [child for child in psutil.Process(process.pid).children() if child.cmdline()[-1:] == [name]]
    return found


@pytest.mark.parametrize("name", ["rollout-0", "functions-0", "train-0"])
def test_a_worker_that_is_killed(tmp_path: Path, name: str) -> None:
    with Job(tmp_path).held() as process:
        process_of(process, name).kill()
    said = ended(process)
    check(said)
    assert [kind for kind, who, _ in said["incidents"] if who == name][:1] == ["lost"]


@pytest.mark.parametrize("name", ["rollout-0", "functions-0", "train-0"])
def test_a_worker_that_hangs(tmp_path: Path, name: str) -> None:
    with Job(tmp_path).held() as process:
        process_of(process, name).suspend()
    said = ended(process)
    check(said)
    (how,) = {what for kind, who, what in said["incidents"] if (kind, who) == ("lost", name)}
    assert how.startswith("was stopped by a signal and gave no sign of life for 1")


def test_workers_that_are_slow(tmp_path: Path) -> None:
    with Job(tmp_path).held() as process:
        workers = psutil.Process(process.pid).children()
        assert len(workers) >= 4
    for _ in range(40):
        for signalled in (signal.SIGSTOP, signal.SIGCONT):
            for one in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signalled)
            time.sleep(0.16 if signalled == signal.SIGSTOP else 0.04)
    said = ended(process)
    check(said)
    assert said["incidents"] == []


def test_a_controller_that_is_killed_and_its_node_lost_goes_on_from_the_storage_on_another(tmp_path: Path) -> None:
    job = Job(tmp_path, f"storage={json.dumps({'directory': str(tmp_path / 'storage'), 'every_s': 0.2})}")
    with job.held() as process:
        workers = psutil.Process(process.pid).children()
        wait_until(lambda: any(tmp_path.glob("storage/*/checkpoints/step-000001")), process)
        end(process)
    assert not psutil.wait_procs(workers, timeout=60)[1]
    shutil.rmtree(tmp_path / "runs")
    (left,) = (tmp_path / "storage").iterdir()
    check(job.run("elsewhere", f"resume={json.dumps(str(left))}"))


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a disk of a size of its own needs root, and may not be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_disk_that_is_full_ends_the_run_with_the_reason_and_it_goes_on_when_there_is_space(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with small_disk(tmp_path / "runs", "400m"):
        filler = tmp_path / "runs" / "filler"
        with job.held() as process, filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        broken = ended(process)
        assert "Free some space" in broken["error"], broken
        filler.unlink()
        check(job.run("runs", f"resume={json.dumps(broken['run_dir'])}"))


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.server.is_up else 503)  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(b"well")

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_reward_service_that_is_down_ends_the_run_with_the_reason_and_it_goes_on_when_the_service_is_up(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.is_up = True  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            job = Job(tmp_path, environment={"SERVICE": f"http://127.0.0.1:{server.server_port}"})
            with job.held() as process:
                server.is_up = False  # type: ignore[attr-defined]
            broken = ended(process)
            assert broken["error"].startswith("RewardError")
            assert "503" in broken["error"]
            server.is_up = True  # type: ignore[attr-defined]
            check(job.run("runs", f"resume={json.dumps(broken['run_dir'])}"))
        finally:
            server.shutdown()
            thread.join()


def test_rollout_engines_without_memory(tmp_path: Path) -> None:
    """Room for two batches of eight rows of 64 tokens each: two layers, keys and values, four heads of 32 numbers, four bytes."""
    num_bytes = 2 * (8 * 64) * 2 * 2 * 4 * 32 * 4
    said = Job(tmp_path, 'engine="cramped"', environment=registered(tmp_path, num_bytes)).run()
    check(said)
    logs = "".join(log.read_text() for log in tmp_path.glob("runs/*/logs/rollout-*.log"))
    assert "samples wait again, and fewer decode together" in logs


def test_a_trainer_without_memory(tmp_path: Path) -> None:
    """The bits of a sum go by how it is cut, so these weights are the others within a part of one step of AdamW."""
    whole = Job(tmp_path / "undisturbed").run()
    said = Job(tmp_path / "cramped", 'trainer="cramped-train"', environment=registered(tmp_path, 3)).run()
    assert (said.get("error"), said["count"], said["is_sound"]) == (None, whole["count"], True)
    assert "micro_batches_halved" in Path(said["run_dir"], "metrics.jsonl").read_text()
    assert "micro_batches_halved" not in Path(whole["run_dir"], "metrics.jsonl").read_text()
    expected, weights = (load_file(Path(one["run_dir"], "checkpoints/final/policy/model.safetensors")) for one in (whole, said))
    for name, tensor in expected.items():
        assert float((tensor - weights[name]).abs().mean()) < 0.02 * LR, name
