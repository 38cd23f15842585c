"""What runs leave on a host when they are killed is removed by the next one: theirs alone, and only if they are dead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from m2flow.micro.worker import worker_process
from m2flow.micro.worker.worker_process import ResourceClaim, read, remove, remove_leftovers

OWNER = """
import sys, tempfile
from m2flow.micro.worker import worker_process
worker_process._directory = lambda: sys.argv[2]
sockets = tempfile.mkdtemp(prefix="m2flow-")
worker_process.ResourceClaim(sys.argv[1], sockets, "nowhere").open()
print(sockets, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm."""
    monkeypatch.setattr(worker_process, "_directory", lambda: str(tmp_path))
    return tmp_path


def claim_of(shared: Path, prefix: str, sockets: str) -> Path:
    made = ResourceClaim(prefix, sockets, "nowhere")
    made.open()
    assert made._file is not None
    os.close(made._file)  # As its owner's end does it.
    return shared / f"{prefix}.owner"


def test_what_a_dead_run_left_is_removed_and_what_a_live_one_has_stays(shared):
    sockets = [tempfile.mkdtemp(prefix="m2flow-") for _ in range(2)]
    dead = claim_of(shared, "m2flow-00000001", sockets[0])
    alive = ResourceClaim("m2flow-00000002", sockets[1], "nowhere")
    alive.open()
    try:
        assert remove_leftovers() == ["m2flow-00000001"]
        assert not dead.exists()
        assert [Path(path).exists() for path in sockets] == [False, True]
        assert Path(alive.path).exists()
    finally:
        alive.close()
    assert not Path(sockets[1]).exists()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("name", ["m2flow-0000001.owner", "m2flow-00000001-x.owner", "other-00000001.owner"])
def test_what_is_not_named_as_ours_is_left_alone(shared, name):
    (shared / name).write_text("{}")
    assert remove_leftovers() == []
    assert (shared / name).exists()


def test_a_claim_can_not_name_what_is_not_ours_to_remove(shared, tmp_path):
    kept = tmp_path / "precious"
    kept.mkdir()
    link = Path(tempfile.mkdtemp(prefix="m2flow-"))
    link.rmdir()
    link.symlink_to(kept)
    try:
        for sockets in (str(kept), str(link)):
            claim_of(shared, "m2flow-00000003", sockets)
            remove_leftovers()
            assert kept.exists()
    finally:
        link.unlink()


def test_a_claim_that_says_nothing_is_removed_without_harm(shared):
    (shared / "m2flow-00000004.owner").write_text("{half")
    assert remove_leftovers() == ["m2flow-00000004"]
    remove(str(shared / "m2flow-00000004.owner"))


def test_an_owner_that_is_killed_frees_its_claim(shared):
    prefix = "m2flow-0badc1a1"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, prefix, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    sockets = Path(owner.stdout.readline().strip())
    assert prefix not in remove_leftovers()
    assert sockets.exists()
    owner.kill()
    owner.communicate()
    assert prefix in remove_leftovers()
    assert not sockets.exists()


def test_what_was_made_after_a_claim_went_is_removed_by_who_has_read_it(shared):
    sockets = shared / "m2flow-late"
    sockets.mkdir()
    claim = ResourceClaim("m2flow-00000005", str(sockets), "")
    claim.open()
    resources = read(claim.path)
    assert resources is not None
    claim.close()
    assert read(claim.path) is None
    sockets.mkdir()
    (sockets / "socket").touch()
    resources.remove()
    assert not sockets.exists()
