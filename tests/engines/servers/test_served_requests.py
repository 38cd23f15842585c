"""What a served engine has of samples: waiting, with the server, ended."""

from __future__ import annotations

import numpy as np
import pytest

from m2flow.engines.models.requests import Job
from m2flow.engines.servers.server_client import Requests, Running, Span, extended
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
        extended(running(0, 4, 5), [Span("3", 0, 1)])
