"""HTTP with an inference server: connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest
from answering import Answering

from m2flow.engines.servers.inference_server import ServerClient
from m2flow.engines.servers.sglang import SglangDialect


class SaysWhoAsks(Answering):
    """Answers with the port that a request comes from: each connection has its own."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> str:
        return str(self.client_address[1])


@pytest.fixture
def client() -> Iterator[ServerClient]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SaysWhoAsks)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = ServerClient(f"http://127.0.0.1:{server.server_port}", SglangDialect())
    made.open()
    yield made
    made.close()
    server.shutdown()
    server.server_close()


def test_a_connection_that_was_idle_is_not_used_again_before_the_server_may_close_it(client: ServerClient) -> None:
    before = client.call("/")
    time.sleep(1.5)  # A server closes one that was idle for five.
    assert client.call("/") != before
