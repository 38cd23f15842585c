"""Connections to an inference server that break, while the server lives."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from answering import Answering
from tiny_models import CONFIGS, write_model

from m2flow.engines.contract import EngineSettings, RolloutEngine
from m2flow.engines.servers.sglang import SglangRollout
from m2flow.errors import EngineError
from m2flow.recipe import Sampling
from m2flow.samples import Finish
from m2flow.testing.rollout_suite import generate, make_request, run_until, started

REQUEST = make_request(0, 0, Sampling(6, temperature=0.0))
FIRST = 2
"""Tokens that come before a connection breaks."""


@dataclass
class Breaking:
    """Speaks as SGLang does: the token 5, as often as is asked for. Of some requests it says a little, and breaks the connection."""

    num_breaks: int | None
    """Of the first requests that come; None: of each sample's first."""
    says_first: int = FIRST
    goes: threading.Event = field(default_factory=threading.Event)
    """Connections are not broken before."""
    is_well: bool = True
    heard: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of requests."""
    ended: list[str] = field(default_factory=list)
    """Names that were to be ended."""
    last_piece: bytes = b""
    """What is still sent as a connection breaks."""
    num_asked: int = 0
    """How often somebody wanted to know if it is well."""
    can_end: bool = True

    def __post_init__(self) -> None:
        self.goes.set()


def handler_of(breaking: Breaking) -> type[Answering]:
    class Handler(Answering):
        def answer(self) -> str | None:
            breaking.num_asked += self.path == "/health"
            return '{"success": true}' if breaking.is_well else None

        def posted(self, body: dict[str, Any]) -> None:
            if self.path != "/generate":
                if self.path == "/abort_request":
                    breaking.ended.append(body["rid"])
                    breaking.goes.set()
                    if not breaking.can_end:
                        return None
                return self.do_GET()
            breaking.heard.append(body)
            self.send_response(200)
            self.end_headers()
            count = body["sampling_params"]["max_new_tokens"]
            is_first = count == REQUEST.sampling.max_new_tokens
            if not (is_first if breaking.num_breaks is None else len(breaking.heard) <= breaking.num_breaks):
                return self.say(count, is_whole=True)
            if breaking.says_first:
                self.say(breaking.says_first, is_whole=False)
            breaking.goes.wait(60.0)
            self.wfile.write(breaking.last_piece)
            return None

        def say(self, count: int, *, is_whole: bool) -> None:
            meta: dict[str, Any] = {"output_token_logprobs": [[-1.0, 5, None]] * count}
            if is_whole:
                meta |= {"finish_reason": {"type": "length"}, "weight_versions": [{"version": "0", "start": 0, "end": count}]}
            self.wfile.write(f"data: {json.dumps({'output_ids': [5] * count, 'meta_info': meta})}\n\n".encode())

    return Handler


@pytest.fixture
def engine_of(tmp_path: Path) -> Callable[[Breaking], contextlib.AbstractContextManager[RolloutEngine]]:
    model = write_model(tmp_path, CONFIGS["qwen2"]())

    @contextlib.contextmanager
    def made(breaking: Breaking) -> Iterator[RolloutEngine]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(breaking))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"url": f"http://127.0.0.1:{server.server_port}", "weights_dir": str(tmp_path)}
        with started(lambda settings: SglangRollout(model, EngineSettings(options=options))) as engine:
            yield engine
        server.shutdown()
        server.server_close()

    return made


Made = Callable[[Breaking], contextlib.AbstractContextManager[RolloutEngine]]


@pytest.mark.parametrize("last_piece", [b"", b'data: {"output_ids": [5'])
def test_a_request_goes_on_from_its_tokens(engine_of: Made, last_piece: bytes) -> None:
    breaking = Breaking(num_breaks=2, last_piece=last_piece)
    with engine_of(breaking) as engine:
        (done,) = generate(engine, [REQUEST]).values()
        assert done.finish is Finish.LENGTH
        assert (done.tokens.tolist(), done.logprobs.tolist(), done.versions.tolist()) == ([5] * 6, [-1.0] * 6, [0] * 6)
        first, second, third = breaking.heard
        assert second["input_ids"] == [*first["input_ids"], 5, 5]
        assert third["input_ids"] == [*second["input_ids"], 5, 5]
        assert [one["sampling_params"]["max_new_tokens"] for one in breaking.heard] == [6, 4, 2]


def test_the_server_is_told_to_end_what_it_may_not_have_noticed(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=1)
    with engine_of(breaking) as engine:
        generate(engine, [REQUEST])
        assert breaking.ended == [breaking.heard[0]["rid"]]
        assert breaking.heard[1]["rid"] not in breaking.ended


def test_it_goes_on_too_if_that_can_not_be_told(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=1, can_end=False)
    with engine_of(breaking) as engine:
        (done,) = generate(engine, [REQUEST]).values()
        assert done.tokens.tolist() == [5] * 6


def test_many_that_break_together_go_on_without_a_question_for_each(engine_of: Made) -> None:
    """A server may take a second to say that it is well."""
    requests = [make_request(prompt, index, Sampling(6, temperature=0.0)) for prompt in range(4) for index in range(8)]
    breaking = Breaking(num_breaks=None)
    with engine_of(breaking) as engine:
        before = breaking.num_asked
        done = generate(engine, requests)
        assert all(sample.tokens.tolist() == [5] * 6 for sample in done.values())
        assert len(done) == len(requests)
        assert len(breaking.heard) == 2 * len(requests)
        assert 1 <= breaking.num_asked - before < len(requests)


def test_no_name_begins_with_another(engine_of: Made) -> None:
    """SGLang ends every request whose name begins with the one that it is told."""
    breaking = Breaking(num_breaks=0)
    with engine_of(breaking) as engine:
        generate(engine, [make_request(0, index, Sampling(6, temperature=0.0)) for index in range(12)])
        names = [body["rid"] for body in breaking.heard]
        assert len(set(names)) == 12
        assert not [(one, other) for one in names for other in names if one != other and other.startswith(one)]


def test_one_that_breaks_after_its_last_token_is_whole(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=1, says_first=6)
    with engine_of(breaking) as engine:
        (done,) = generate(engine, [REQUEST]).values()
        assert (done.finish, done.tokens.tolist()) == (Finish.LENGTH, [5] * 6)
        assert len(breaking.heard) == 1


def test_a_server_that_breaks_every_connection_is_given_up(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=99, says_first=0)
    with engine_of(breaking) as engine:
        with pytest.raises(EngineError, match=r"gave up sample .*: the server closed the connection"):
            generate(engine, [REQUEST])
        assert len(breaking.heard) == 3


def test_one_that_is_not_well_is_given_up_at_once(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=99)
    with engine_of(breaking) as engine:
        breaking.is_well = False
        with pytest.raises(EngineError, match="gave up sample"):
            generate(engine, [REQUEST])
        assert len(breaking.heard) == 1


@contextlib.contextmanager
def generating(engine_of: Made, breaking: Breaking) -> Iterator[RolloutEngine]:
    """The first tokens of the request have come, and its connection is not broken before `goes`."""
    breaking.goes.clear()
    with engine_of(breaking) as engine:
        engine.add([REQUEST])
        assert run_until(engine, [REQUEST.id], FIRST)
        yield engine


def test_a_connection_that_breaks_as_its_request_is_aborted_gives_its_tokens_back(engine_of: Made) -> None:
    breaking = Breaking(num_breaks=1)
    with generating(engine_of, breaking) as engine:
        (stopped,) = engine.abort([REQUEST.id])
        assert (stopped.finish, stopped.tokens.tolist(), stopped.versions.tolist()) == (Finish.ABORT, [5, 5], [0, 0])
        assert engine.num_unfinished == 0
        assert len(breaking.heard) == 1


def test_one_under_which_weights_have_changed_begins_anew(engine_of: Made) -> None:
    """Which of them made its tokens would have been said at its end."""
    breaking = Breaking(num_breaks=1)
    with generating(engine_of, breaking) as engine:
        engine.load_weights([(name, tensor * 2) for name, tensor in engine.weights()], 1, under_requests=True)
        breaking.goes.set()
        while len(breaking.heard) < 2:
            engine.step()
        assert breaking.heard[1]["input_ids"] == breaking.heard[0]["input_ids"]
