"""Real processes with fake engines, and what goes wrong with them: rewards that misbehave, a full disk, a killed controller."""

import contextlib
import io
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import programs
import psutil
import pytest

from m2flow.channels.channel import Parcel
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.micro.records.ledger import read_incidents, read_samples
from m2flow.micro.worker.worker_process import BoundedPrint
from m2flow.samples import Batch

SCRIPT = Path(__file__).parents[1] / "support" / "fault_run.py"


def start(tmp_path: Path, *arguments: str, temporary: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), *arguments]
    variables = os.environ if temporary is None else os.environ | {"TMPDIR": temporary}
    return programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)


def output(tmp_path: Path, *arguments: str) -> str:
    process = start(tmp_path, *arguments)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("reward", ["prints_a_lot", "forks"])
def test_a_reward_that_is_noisy_or_forks_does_no_harm(tmp_path, reward):
    assert "ended well: 16 samples" in output(tmp_path, reward)


def test_a_reward_that_has_ended_its_worker_runs_alone_from_then_on_and_is_counted(tmp_path):
    said = output(tmp_path, "dies_and_counts")
    assert "ended well: 16 samples" in said
    (ledger,) = tmp_path.glob("runs/*/ledger.db")
    assert [one.kind for one in read_incidents(ledger.parent)].count("lost") == 1
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        found = db.execute("SELECT value, parts, count(*) FROM rewards GROUP BY value, parts").fetchall()
    assert found == [(-1.0, '{"died": 1.0}', 16)]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (
            "dies",
            r"the reward function dies did not come back on sample p\d/\d: its process ended with status 3",
        ),
        ("leaves", r"the reward function leaves raised SystemExit on sample p\d/\d: 4"),
        (
            "speaks_no_utf8",
            r"the reward function speaks_no_utf8 raised ValueError on sample p\d/\d: half a pair: \\ud800",
        ),
    ],
)
def test_a_reward_that_ends_its_process_or_raises_the_unspeakable_ends_the_run_with_the_reason(tmp_path, reward, expected):
    said = output(tmp_path, reward)
    assert re.search(expected, said), said
    (ledger,) = tmp_path.glob("runs/*/ledger.db")
    assert list(read_samples(ledger.parent))


def test_what_is_printed_beyond_a_bound_is_left_out_and_counted():
    stream = io.StringIO()
    bounded = BoundedPrint(stream, most=200_000)
    for _ in range(100):
        print("x" * 9_999, file=bounded)
    bounded.end()
    said = stream.getvalue()
    assert 200_000 <= len(said) < 300_000
    counts = re.findall(r"\[([\d,]+) characters that were printed here are left out", said)
    left_out = sum(int(count.replace(",", "")) for count in counts)
    assert left_out == 1_000_000 - said.count("x") - len(re.findall(r"x\n", said))
    assert left_out > 700_000


def test_what_a_log_cannot_hold_is_printed_escaped():
    written = io.BytesIO()
    bounded = BoundedPrint(io.TextIOWrapper(written, encoding="ascii"))
    print("caf\xe9, half a pair: \ud800", file=bounded)
    bounded.end()
    assert written.getvalue() == b"caf\\xe9, half a pair: \\ud800\n"


def test_what_is_none_of_the_runs_is_dropped_and_counted_on_every_socket_and_the_run_ends_well(tmp_path):
    said = output(tmp_path, "besieged")
    assert "ended well: 16 samples" in said
    assert re.search(r"the controller dropped \d messages that are none of this run's", said) or "the controller dropped a message" in said
    (run_dir,) = tmp_path.glob("runs/*")
    assert {(incident.kind, incident.worker) for incident in read_incidents(run_dir)} == {("dropped", "controller")}
    assert any("dropped" in log.read_text() for log in (run_dir / "logs").glob("*.log"))


def test_an_inbox_without_a_limit_takes_what_comes_while_its_owner_is_busy():
    inbox, outbox = ZmqInbox(max_parcels=0), ZmqOutbox("sender", timeout_s=240.0)
    address = inbox.open()
    try:
        for packed in range(5000):
            outbox.send(address, Parcel(0, Batch(np.array([packed])), "sender"))
        received = 0
        while received < 5000:
            received += len(inbox.receive(240.0))
    finally:
        outbox.close()
        inbox.close()


def test_a_full_disk_is_named_and_what_was_written_can_be_read(tmp_path):
    said = output(tmp_path, "one", "500000")
    assert "HostError: can't write" in said
    assert "Free some space" in said
    (run_dir,) = tmp_path.glob("runs/*")
    assert str(run_dir) in said
    assert list(read_samples(run_dir))


def test_when_the_controller_is_killed_its_workers_end_and_leave_nothing_behind(tmp_path):
    process = start(tmp_path, "forever")
    try:
        workers = begun(tmp_path, process)
        left = held_by(workers)
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=240)
    assert not alive
    assert not [path for path in left if path.exists()]


def begun(tmp_path: Path, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers of a run that generates."""
    while not list(tmp_path.glob("runs/*/segments/*.seg")) or len(workers_of(process)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return workers_of(process)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that are interpreters of their own by now: a child that is not yet has its parent's standard output, and may keep it open."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "m2flow.micro.worker.worker_process" in child.cmdline():
                found.append(child)
    return found


def test_a_worker_that_is_stopped_when_its_controller_is_killed_ends_when_it_is_continued(tmp_path):
    process = start(tmp_path, "forever")
    try:
        workers = begun(tmp_path, process)
        workers[0].suspend()
        left = held_by(workers)
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(workers[1:], timeout=240)
    assert not alive
    assert not [path for path in left if path.exists()]
    workers[0].resume()
    _, alive = psutil.wait_procs(workers[:1], timeout=240)
    assert not alive
    assert not [path for path in left if path.exists()]


def test_a_worker_that_was_stopped_before_it_had_a_socket_leaves_none_behind(tmp_path):
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:
        process = start(tmp_path, "forever", temporary=temporary)
        try:
            while len(workers := workers_of(process)) < 3:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.01)
            workers[-1].suspend()
        finally:
            process.kill()
            process.communicate()
        _, alive = psutil.wait_procs(workers[:-1], timeout=240)
        assert not alive
        workers[-1].resume()
        _, alive = psutil.wait_procs(workers[-1:], timeout=240)
        assert not alive
        assert os.listdir(temporary) == []


@pytest.mark.slow
def test_what_is_left_when_all_processes_of_a_run_are_killed_the_next_run_removes(tmp_path):
    process = start(tmp_path, "forever")
    try:
        workers = begun(tmp_path, process)
        left = held_by(workers)
    finally:
        for killed in (*workers, psutil.Process(process.pid)):
            killed.suspend()  # So that nobody has the time to do anything about the others' end.
        for killed in (*workers, psutil.Process(process.pid)):
            killed.kill()
        process.communicate()
    psutil.wait_procs(workers, timeout=240)
    assert left  # Another run of this user may have removed it by now.
    assert "ended well" in output(tmp_path / "next", "one")
    assert not [path for path in left if path.exists()]


def places() -> list[Path]:
    """What runs of this machine have outside their run directories."""
    return [*Path(tempfile.gettempdir()).glob("m2flow-*"), *Path("/dev/shm").glob("m2flow-*")]


def held_by(workers: list[psutil.Process]) -> list[Path]:
    """The places of a run that generates. Asked again until there are some: the kernel's list of sockets is no snapshot, and may lack some
    while others come and go."""
    deadline = time.monotonic() + 60
    while not (found := [path for path in places() if owner(path, workers)]):
        assert time.monotonic() < deadline, "a run has sockets"
        time.sleep(0.05)
    return found


def owner(path: Path, workers: list[psutil.Process]) -> bool:
    """Whether a worker has a socket or a segment there."""
    for worker in workers:
        unix = [connection.laddr for connection in worker.net_connections("unix")]
        if any(str(address).startswith(str(path)) for address in unix) or str(path) in [file.path for file in worker.memory_maps()]:
            return True
    return False
