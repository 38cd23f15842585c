"""Ports for servers that take long until they listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from m2flow.engines.servers import inference_server
from m2flow.errors import EngineError


def test_ports_are_of_those_that_the_kernel_gives_to_nobody() -> None:
    found = inference_server.free_ports(3)
    assert len(set(found)) == 3
    assert 20_000 <= min(found) <= max(found) <= inference_server._last()


def test_a_port_on_which_somebody_listens_at_loopback_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = inference_server.free_ports(1)
    monkeypatch.setattr(inference_server, "_FIRST", port)
    monkeypatch.setattr(inference_server, "_last", lambda: port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(EngineError, match="only 0 are free, and a server needs 1"):
        inference_server.free_ports(1)


@pytest.mark.parametrize(("given", "last"), [("32768\t60999\n", 32_767), ("30000 40000", 29_999), ("1024 65535", 32_767), ("", 32_767)])
def test_a_host_says_which_it_gives_away(given: str, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(inference_server, "_GIVEN", tmp_path / "range")
    assert inference_server._last() == last
