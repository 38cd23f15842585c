"""Which experts of a mixture each token went to: from what a server says to the sample's column, its parcels and its page."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.engines.servers.served_rollout import Routing
from m2flow.engines.servers.sglang import SglangDialect
from m2flow.engines.servers.vllm import VllmDialect
from m2flow.errors import EngineError
from m2flow.samples import Batch, Ragged
from m2flow.viewer.sample_pages import _experts

ROUTING = Routing(num_layers=3, num_of_token=2)
SAID = np.arange(24, dtype=np.int32).reshape(4, 3, 2) % 8


NONE = SAID[:0]


def said_by_sglang(experts: np.ndarray) -> str:
    return base64.b64encode(experts.tobytes()).decode()


def said_by_vllm(experts: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, experts.astype(np.uint8))
        return base64.b64encode(file.getbuffer()).decode()


@pytest.mark.parametrize(("dialect", "said"), [(SglangDialect(), said_by_sglang), (VllmDialect(), said_by_vllm)], ids=["sglang", "vllm"])
def test_what_a_server_says_is_one_row_a_token_and_the_last_token_has_none(dialect, said) -> None:  # type: ignore[no-untyped-def]
    found = ROUTING.rows(dialect.experts(said(SAID)), 5)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found[:4], SAID)
    assert (found[4] == -1).all()
    assert (ROUTING.rows(dialect.experts(""), 2) == -1).all()


def test_more_than_the_tokens_have_or_less_than_a_row_is_refused() -> None:
    for experts, num_tokens in ((SAID, 3), (SAID.reshape(-1)[:5], 5)):
        with pytest.raises(EngineError, match=r"experts of \d tokens in 3 layers"):
            ROUTING.rows(experts, num_tokens)


def test_a_model_says_how_many_experts_it_has_for_a_token() -> None:
    assert Routing.of(SimpleNamespace(model_type="qwen3_moe", num_hidden_layers=3, num_experts_per_tok=2)) == ROUTING


def test_the_column_travels_and_its_page_has_the_experts_of_each_layer() -> None:
    rows = [ROUTING.rows(SAID, 5), ROUTING.rows(NONE, 2)]
    batch = decode_batch(encode_batch(Batch(np.arange(2), {"routed_experts": Ragged.of(rows, np.int16)})))
    for row, expected in enumerate(rows):
        np.testing.assert_array_equal(batch.ragged("routed_experts").row(row), expected)
    assert _experts(batch.take(np.array([0]))) == ["0 1 | 2 3 | 4 5", "6 7 | 0 1 | 2 3", "4 5 | 6 7 | 0 1", "2 3 | 4 5 | 6 7", ""]
    assert _experts(Batch(np.arange(1), {})) == []
