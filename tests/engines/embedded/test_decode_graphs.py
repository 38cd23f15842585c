"""Decode passes of fixed shapes, which CUDA graphs hold: on a CPU they compute what others do, and each number of rows has its graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_rollouts import KINDS, generated
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Request
from m2flow.engines.embedded.decoding import cumulated_by_products
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.slot_model import DecodeGraphs, SlotCache, SlotModel, as_rows, rounded_rows
from m2flow.recipe import Model, Sampling
from m2flow.samples import make_ids


class Again:
    """What a graph does, without one: it runs the pass again, on what its inputs hold then."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.logits = run()

    def replay(self) -> None:
        with torch.inference_mode():
            self.logits.copy_(self._run())


def graphs_of(model: SlotModel) -> DecodeGraphs:
    return DecodeGraphs("cpu", model._run_on_device, lambda: Again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_of_fixed_shapes_computes_what_a_pass_of_changing_ones_does(kind: str, tmp_path: Path) -> None:
    model = SlotModel.load(Model(save_config(kind, tmp_path, **KINDS[kind]), init="random"), "cpu", 64)
    graphs, rng = graphs_of(model), np.random.default_rng(0)
    prompts = [rng.integers(2, 14, length).astype(np.int32) for length in (3, 11, 7, 20, 2)]
    caches = [SlotCache(), SlotCache()]
    for cache in caches:
        cache.reserve(8, 40)
        model.prefill(cache, prompts, 0, range(5))
    positions = np.array([len(prompt) for prompt in prompts])
    for step in range(12):
        num_rows = 5 if step < 8 else 3
        tokens = rng.integers(2, 14, num_rows)
        expected = model.decode(caches[0], tokens, positions[:num_rows].copy())
        found = graphs.decode(caches[1], tokens, positions[:num_rows].copy())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        positions += 1
    assert graphs.sizes == [8]


def test_graphs_are_made_when_they_are_worth_it_and_forgotten_when_the_cache_moves(tmp_path: Path) -> None:
    model = SlotModel.load(Model(save_config("Qwen2", tmp_path), init="random"), "cpu", 64)
    graphs, cache = graphs_of(model), SlotCache()
    cache.reserve(16, 64)
    model.prefill(cache, [np.array([2, 3, 4], np.int32)], 0, [0] * 16)

    def decode(num_rows: int, times: int) -> list[int]:
        for _ in range(times):
            graphs.decode(cache, np.full(num_rows, 3), np.full(num_rows, 3))
        return graphs.sizes

    assert decode(10, 4) == []
    assert decode(10, 1) == [16]
    assert decode(8, 32) == [16]  # The larger graph does it, ...
    assert decode(8, 1) == [8, 16]  # ... until a smaller one is worth it.
    assert decode(1, 5) == [1, 8, 16]  # One eight times as large does not.
    cache.reserve(16, 65)
    assert decode(8, 1) == []
    graphs.clear()
    assert decode(16, 5) == [16]


def test_rows_are_rounded_up_to_what_graphs_are_made_for() -> None:
    rounded = [rounded_rows(n) for n in range(1, 700)]
    assert all(n <= size <= max(1.5 * n + 8, 2 * n - 1) for n, size in enumerate(rounded, 1))
    assert len(set(rounded)) < 35
    assert all(rounded_rows(size) == size for size in rounded)


def test_a_slots_keys_lie_where_flash_attention_reads_them() -> None:
    cached = torch.arange(3 * 2 * 5 * 4).view(3, 2, 5, 4)
    rows = as_rows(cached)
    for slot in range(3):
        for token in range(5):
            assert torch.equal(rows[slot * 2 * 5 + token], cached[slot, :, token])


def test_sums_by_products_are_those_along_rows() -> None:
    values = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cumulated_by_products(values), values.cumsum(-1, dtype=torch.float64), atol=1e-9, rtol=0)


def test_an_engine_generates_the_same_with_graphs_and_frees_them_with_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, results = save_config("Qwen2", tmp_path), []
    for has_graphs in (False, True):
        engine = EmbeddedRollout(Model(path, init="random"), EngineSettings(max_running=9))
        engine.start()
        model = engine._model
        assert model is not None
        assert not model.has_graphs  # A CPU has none.
        if has_graphs:
            model._graphs = graphs_of(model)
            monkeypatch.setattr(SlotModel, "decode", lambda model, *given: model._graphs.decode(*given))
        results.append(generated(engine))
        if has_graphs:
            assert model._graphs is not None
            assert model._graphs.sizes
            model.drop_graphs()
            assert not model._graphs.sizes
        engine.stop()
    without, with_graphs = results
    assert without.keys() == with_graphs.keys()
    for i, sample in without.items():
        np.testing.assert_array_equal(sample.tokens, with_graphs[i].tokens)
        np.testing.assert_allclose(sample.logprobs, with_graphs[i].logprobs, atol=1e-5)


def test_a_pass_that_no_graph_can_hold_is_told_and_runs_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = SlotModel.load(Model(save_config("Qwen2", tmp_path), init="random"), "cpu", 64)
    cache = SlotCache()
    cache.reserve(8, 64)
    model.prefill(cache, [np.array([2, 3, 4], np.int32)], 0, [0] * 8)
    tokens, positions = np.full(8, 3), np.full(8, 3)
    expected = model.decode(cache, tokens, positions)

    def refused(run: Callable[[], torch.Tensor]) -> Again:
        raise RuntimeError("operation not permitted when stream is capturing")

    model._graphs = DecodeGraphs("cpu", model._run_on_device, lambda: refused)
    monkeypatch.setattr(model, "is_on_cpu", False)
    for _ in range(6):
        torch.testing.assert_close(model.decode(cache, tokens, positions), expected, atol=1e-5, rtol=1e-5)
    assert not model.has_graphs
    assert "without CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_cache_of_many_short_rows_keeps_to_its_budget_when_a_few_long_ones_come(
    has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, per_token, num_tokens = save_config("Qwen2", tmp_path, max_position_embeddings=256), 2 * 2 * 2 * 8 * 4, 8 * 64
    engine = EmbeddedRollout(Model(path, init="random"), EngineSettings(max_running=8, options={"kv_budget_bytes": num_tokens * per_token}))
    engine.start()
    model, decoder = engine._model, engine._decoder
    assert model is not None
    assert decoder is not None
    if has_graphs:
        model._graphs = graphs_of(model)
        monkeypatch.setattr(SlotModel, "decode", lambda model, *given: model._graphs.decode(*given))

    def most_of(count: int, sampling: Sampling) -> float:
        engine.add([Request(int(i), (2, 3, 4), k, sampling) for k, i in enumerate(make_ids(count, count, 1))])
        most = 0
        while engine.num_unfinished:
            found = engine.step()
            assert all(len(sample.tokens) == sampling.max_new_tokens for sample in found)
            most = max(most, decoder.kv_bytes)
        return most / per_token

    assert most_of(8, Sampling(58, ignore_eos=True)) == num_tokens
    assert most_of(2, Sampling(200, ignore_eos=True)) <= num_tokens
    engine.stop()


def test_graphs_are_gone_after_memory_has_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedRollout(Model(save_config("Qwen2", tmp_path), init="random"), EngineSettings(max_running=8))
    engine.start()
    model = engine._model
    assert model is not None
    graphs = model._graphs = graphs_of(model)
    sizes: list[list[int]] = []

    def decode(model: SlotModel, *given: Any) -> torch.Tensor:
        if len(sizes) == 1:
            sizes.append([])
            raise torch.OutOfMemoryError("out of memory")
        return graphs.decode(*given)

    def prefill(model: SlotModel, *given: Any, usual: Any = SlotModel.prefill) -> torch.Tensor:
        sizes.append(graphs.sizes)
        return usual(model, *given)

    engine.add([Request(int(i), (2, 3, 4), k, Sampling(12, ignore_eos=True)) for k, i in enumerate(make_ids(0, 4, 1))])
    monkeypatch.setattr(SlotModel, "decode", lambda model, *given: graphs.decode(*given))
    for _ in range(8):
        engine.step()
    assert graphs.sizes == [4]
    sizes.append([4])
    monkeypatch.setattr(SlotModel, "decode", decode)
    monkeypatch.setattr(SlotModel, "prefill", prefill)
    found = []
    while engine.num_unfinished:
        found += engine.step()
    assert len(found) == 4
    assert sizes[2] == []
    engine.stop()
