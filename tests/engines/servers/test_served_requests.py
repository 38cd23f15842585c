"""What a served engine has of samples: waiting, with the server, ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from m2flow.engines.contract import StopTexts
from m2flow.engines.models.requests import Job
from m2flow.engines.servers.inference_server import Requests, Running, TokenSpan, extended
from m2flow.errors import EngineError
from m2flow.recipe import Sampling
from m2flow.samples import Finish

STOP = 9


def job(number: int, *tokens: int) -> Job:
    """Of a sample with these tokens by version 0, of four at most."""
    ones = np.ones(len(tokens))
    return Job(
        id=number,
        seed=number,
        sampling=Sampling(4),
        prompt=np.array([1, 2], np.int32),
        stop_ids=np.array([STOP]),
        tokens=np.array(tokens, np.int32),
        logprobs=(-ones).astype(np.float32),
        versions=(0 * ones).astype(np.int32),
        kv_stale=np.zeros(len(tokens), np.bool_),
    )


def running(number: int, *tokens: int, is_mixed: bool = False) -> Running:
    return Running(job(number, 3), list(tokens), [-0.5] * len(tokens), is_mixed)


def test_what_is_whole_as_it_comes_has_ended() -> None:
    requests = Requests()
    requests.add([job(0), job(1, 3, STOP), job(2, 3, 3, 3, 3)])
    assert [one.id for one in requests.waiting] == [0]
    assert [(one.id, finish) for one, finish in requests.take_ended()] == [(1, Finish.STOP), (2, Finish.LENGTH)]
    assert len(requests) == 1


def test_those_that_were_put_back_go_first_in_their_order() -> None:
    requests = Requests()
    requests.add([job(5)])
    requests.put_back([job(0, 3), job(1, STOP), job(2, 3)])
    assert [one.id for one in requests.waiting] == [0, 2, 5]
    assert [one.id for one, _ in requests.ended] == [1]


def test_what_came_of_a_lost_server_goes_on_unless_nobody_knows_by_which_weights() -> None:
    requests = Requests()
    requests.running = {"a": running(0, 4, 5), "b": running(1, 4, is_mixed=True), "c": running(2, 4, STOP)}
    requests.aborting = {"a"}
    requests.put_back_running(7)
    assert (requests.running, requests.aborting) == ({}, set())
    assert [(one.id, one.tokens.tolist(), one.versions.tolist()) for one in requests.waiting] == [(0, [3, 4, 5], [0, 7, 7]), (1, [3], [0])]
    assert [(one.id, finish) for one, finish in requests.ended] == [(2, Finish.STOP)]


def test_only_those_that_are_asked_for_leave() -> None:
    requests = Requests()
    requests.add([job(0), job(1), job(2, STOP), job(3, STOP)])
    requests.running = {"a": running(4, 4)}
    assert requests.progress() == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    assert [one.id for one in requests.take({1, 2, 4})] == [2, 1]
    assert requests.progress() == {0: 0, 3: 1, 4: 2}


def test_tokens_without_a_version_are_refused() -> None:
    with pytest.raises(EngineError, match="of 2 tokens of sample"):
        extended(running(0, 4, 5), [TokenSpan("3", 0, 1)])


def spelled(number: int, stop: str, *tokens: int) -> Running:
    """A running request whose tokens are letters, with a stop text."""
    texts = StopTexts.of(Sampling(9, stop=(stop,)), lambda ids: "".join(chr(97 + token) for token in ids), frozenset())
    return Running(replace(job(number, *tokens), sampling=Sampling(9, stop=(stop,)), stop_texts=texts))


def test_what_a_server_makes_beyond_a_stop_text_is_dropped_with_its_versions() -> None:
    one = spelled(0, "de", 0, 3)  # It was stopped within the text: after "ad".
    one.take_in([4, 3, 4], [-1.0, -2.0, -3.0])
    one.take_in([7], [-4.0])
    assert (one.is_stopped, one.num_dropped) == (True, 3)
    whole = extended(one, [TokenSpan("5", 0, 1), TokenSpan("6", 1, 4)])
    assert (whole.tokens.tolist(), whole.versions.tolist(), whole.logprobs.tolist()) == ([0, 3, 4], [0, 0, 5], [-1.0, -1.0, -1.0])
    assert whole.stop_texts is not None
    assert whole.stop_texts.shorten(whole.tokens) == "a"


def test_a_stop_text_is_found_however_its_tokens_come() -> None:
    for sizes in ((1, 1, 1, 1), (2, 2), (1, 3), (4,)):
        one, tokens = spelled(0, "cd"), [0, 2, 3, 4]
        for size in sizes:
            one.take_in(tokens[:size], [-0.5] * size)
            del tokens[:size]
        assert one.is_stopped
        assert one.so_far(1).tokens.tolist() == [0, 2, 3]
