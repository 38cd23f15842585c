"""What the engine has read of an episode it keeps between turns: a later turn reads only what is new, and says how much it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cramped import Room
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.engines.embedded.decoding import ContinuousDecoder, Known, PrefixCache
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.hf_model import load_model
from m2flow.recipe import Model, Sampling
from m2flow.samples import SampleId

KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Mistral": {"sliding_window": 8},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "Gemma2": {"initializer_range": 0.1, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 8, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV3": {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_key_value_heads": 4,
    },
}  # fmt: skip
SAMPLING = Sampling(10, temperature=0.7, ignore_eos=True)


def started(path: str, model: Mapping[str, Any] | None = None, **settings: Any) -> EmbeddedRollout:
    engine = EmbeddedRollout(Model(path, init="random", **(model or {})), EngineSettings(**settings))
    engine.start()
    return engine


def generate(engine: EmbeddedRollout, *requests: Request) -> list[Generated]:
    engine.add(requests)
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda sample: sample.id)


def turn(number: int, *context: Any, sampling: Sampling = SAMPLING, keeps_kv: bool = True) -> Request:
    """A turn of an episode after these tokens."""
    tokens = tuple(int(token) for part in context for token in part)
    return Request(SampleId(0, number, 0).pack(), tokens, 1000 + number, sampling, keeps_kv=keeps_kv)


def prompt_of(number: int, length: int = 18) -> list[int]:
    return np.random.default_rng(number).integers(2, 14, length).tolist()


def assert_same(found: Generated, expected: Generated) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_finds_what_the_turns_before_it_have_read_and_says_what_a_fresh_engine_says(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path, max_position_embeddings=256, **KINDS[kind])
    engine = started(path)
    contexts = [prompt_of(number) for number in range(3)]
    for at in range(4):
        requests = [turn(number, context) for number, context in enumerate(contexts)]
        known = [len(context) - 4 - number for number, context in enumerate(contexts)] if at else [0, 0, 0]
        found = generate(engine, *requests)
        for one, expected in zip(found, generate(started(path), *requests), strict=True):
            assert_same(one, expected)
        # All but the last generated token, which no layer has seen, and what was said since.
        assert [one.num_cached for one in found] == known
        contexts = [
            [*context, *one.tokens, *prompt_of(90 + at, 3 + n)] for n, (context, one) in enumerate(zip(contexts, found, strict=True))
        ]
    model = load_model(Model(path, init="random"), device="cpu", attention="eager")
    tokens = torch.tensor([[*found[0].prompt_tokens.tolist(), *found[0].tokens.tolist()]])
    with torch.no_grad():
        own = (model(tokens).logits[0, len(found[0].prompt_tokens) - 1 : -1] / 0.7).log_softmax(-1)
    np.testing.assert_allclose(found[0].logprobs, own.gather(1, tokens[0, len(found[0].prompt_tokens) :, None])[:, 0].numpy(), atol=1e-4)


def test_forks_and_samples_of_a_group_find_what_another_has_read(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine, prompt = started(path), prompt_of(0, 30)
    (first,) = generate(engine, turn(0, prompt))
    forks = [turn(number, prompt, first.tokens, prompt_of(number, 4 + number)) for number in (1, 2, 3)]
    sibling, other = turn(4, prompt), turn(5, prompt_of(5, 40))
    found = generate(engine, *forks, sibling, other, turn(6, prompt_of(5, 40)))
    assert [one.num_cached for one in found] == [39, 39, 39, 29, 0, 0], "of a prompt one token is read again: it has the logits"
    assert engine.occupancy().num_cached == 39 * 3 + 29
    for one, request in zip(found[:5], [*forks, sibling, other], strict=True):
        assert_same(one, *generate(started(path), request))


def test_a_sample_finds_the_prompt_of_one_that_runs_and_nothing_of_what_nobody_asked_to_keep(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine, prompt = started(path), prompt_of(0, 30)
    long, short = (turn(n, prompt, sampling=Sampling(length, ignore_eos=True), keeps_kv=False) for n, length in ((0, 20), (1, 4)))
    engine.add([long, short])
    for _ in range(6):
        engine.step()
    assert engine.occupancy().num_running == 1
    engine.add([replace(short, id=SampleId(0, 2, 0).pack())])
    done = []
    while engine.num_unfinished:
        done += engine.step()
    assert {SampleId.unpack(one.id).prompt: one.num_cached for one in done} == {0: 0, 2: 29}
    assert_same(next(one for one in done if one.num_cached), *generate(started(path), short))
    (after,) = generate(engine, replace(short, id=SampleId(0, 3, 0).pack()))
    assert after.num_cached == 0


def test_what_older_weights_have_read_is_not_found(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine, fresh = started(path), started(path)
    (first,) = generate(engine, turn(0, prompt_of(0)))
    engine.add([turn(1, prompt_of(1, 30), sampling=Sampling(20, ignore_eos=True))])
    engine.step()
    weights = [(name, tensor * 1.25) for name, tensor in engine.weights()]
    for one in (engine, fresh):
        one.load_weights(weights, 1, under_requests=True)
    second, sibling = turn(0, prompt_of(0), first.tokens, [5, 6]), turn(2, prompt_of(1, 30))
    engine.add([second, sibling])
    found = {}
    while engine.num_unfinished:
        found |= {one.id: one for one in engine.step()}
    for request in (second, sibling):
        assert found[request.id].num_cached == 0
        assert_same(found[request.id], *generate(fresh, request))
    # Nor is what runs on with keys of both kept: only what stands after the change was read by one version.
    went_on = found[SampleId(0, 1, 0).pack()]
    (after,) = generate(engine, turn(1, prompt_of(1, 30), went_on.tokens, [5, 6]))
    assert after.num_cached == 30, "the sibling's prompt"
    assert_same(after, *generate(fresh, turn(1, prompt_of(1, 30), went_on.tokens, [5, 6])))


def test_what_is_kept_stays_within_the_budget_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    budget = 64 * 2 + 120
    token_bytes = 2 * 2 * 2 * 8 * 4
    engine = started(path, options={"kv_budget_bytes": budget * token_bytes})
    firsts = [generate(engine, turn(number, prompt_of(number, 30)))[0] for number in range(5)]
    assert engine.memory().kv <= budget * token_bytes
    found = [generate(engine, turn(n, prompt_of(n, 30), firsts[n].tokens, [5, 6]))[0].num_cached for n in (4, 0)]
    assert found == [39, 0]
    # Two that run at once leave room for less, and take it.
    long = Sampling(30, ignore_eos=True)
    engine.add([turn(number, prompt_of(number, 30), sampling=long) for number in (7, 8)])
    engine.step()
    assert engine.memory().kv <= budget * token_bytes


def test_slots_that_stand_empty_give_way_to_what_is_kept(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    token_bytes = 2 * 2 * 2 * 8 * 4
    engine = started(path, options={"kv_budget_bytes": 64 * 4 * token_bytes})
    firsts = generate(engine, *(turn(number, prompt_of(number, 30)) for number in range(4)))
    assert engine.memory().kv <= 64 * 4 * token_bytes
    (alone,) = generate(engine, turn(0, prompt_of(0, 30), firsts[0].tokens, [5]))
    (again,) = generate(engine, turn(0, prompt_of(0, 30), firsts[0].tokens, [5], alone.tokens, [7]))
    assert again.num_cached == 50
    assert engine.memory().kv <= 64 * 4 * token_bytes


@pytest.mark.parametrize("frees", ["offload", "rest", "shrink_kv_cache"])
def test_an_engine_that_makes_room_keeps_nothing(frees: str, tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path, max_position_embeddings=256))
    (first,) = generate(engine, turn(0, prompt_of(0)))
    getattr(engine, frees)()
    assert engine.memory().kv == 0
    engine.onload()
    (second,) = generate(engine, turn(0, prompt_of(0), first.tokens, [5]))
    assert second.num_cached == 0


def test_what_is_kept_gives_way_to_a_sample_for_which_memory_runs_out(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine, prompt = started(path), prompt_of(9, 100)
    for number in range(6):
        generate(engine, turn(number, prompt_of(number, 40)))
    with Room(128 * 2 * 2 * 2 * 8 * 4 + 1000, lambda: engine.memory().kv) as room:
        (found,) = generate(engine, turn(9, prompt))
    assert room.num_refused
    assert_same(found, *generate(started(path), turn(9, prompt)))


def test_deterministic_engines_keep_nothing_and_their_bits_do_not_depend_on_what_was_read(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine = started(path, deterministic=True)
    (first,) = generate(engine, turn(0, prompt_of(0)))
    later = turn(0, prompt_of(0), first.tokens, [5, 6])
    (found,), (expected,) = generate(engine, later), generate(started(path, deterministic=True), later)
    assert found.num_cached == engine.occupancy().num_cached == 0
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_experts_of_what_was_found_are_those_that_were_recorded(tmp_path: Path) -> None:
    path = save_config("Qwen3Moe", tmp_path, max_position_embeddings=256, **KINDS["Qwen3Moe"])
    engine = started(path, {"routing": "rollout"})
    (first,) = generate(engine, turn(0, prompt_of(0, 30)))
    requests = [turn(0, prompt_of(0, 30), first.tokens, [5, 6, 7]), turn(1, prompt_of(0, 30)), turn(2, prompt_of(2, 30))]
    found = generate(engine, *requests)
    assert [one.num_cached for one in found] == [39, 29, 0]
    for one, request in zip(found, requests, strict=True):
        (expected,) = generate(started(path, {"routing": "rollout"}), request)
        assert_same(one, expected)
        assert one.routed_experts is not None
        np.testing.assert_array_equal(one.routed_experts, expected.routed_experts)


def test_a_turn_that_is_interrupted_finds_its_context_again(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine = started(path)
    (first,) = generate(engine, turn(0, prompt_of(0)))
    later = turn(0, prompt_of(0), first.tokens, [5, 6])
    engine.add([later])
    for _ in range(3):
        engine.step()
    (so_far,) = engine.abort([later.id])
    assert so_far.num_cached == 27
    columns: Any = [tuple(column.tolist()) for column in (so_far.tokens, so_far.logprobs, so_far.versions, so_far.kv_stale)]
    resumed = replace(later, prefix=columns[0], prefix_logprobs=columns[1], prefix_versions=columns[2], prefix_kv_stale=columns[3])
    (found,) = generate(engine, resumed)
    assert found.num_cached == 27
    assert_same(found, *generate(started(path), later))


def test_passes_behind_the_cache_are_as_large_as_their_mask_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=256)
    engine = started(path)
    firsts = generate(engine, *(turn(n, prompt_of(n, 20 + n)) for n in range(6)))
    requests = [turn(n, prompt_of(n, 20 + n), one.tokens, prompt_of(50 + n, 1 + n % 3)) for n, one in enumerate(firsts)]
    passes: list[int] = []
    read = ContinuousDecoder._read
    monkeypatch.setattr("m2flow.engines.embedded.decoding._MOST_SEEN", 260)
    monkeypatch.setattr(ContinuousDecoder, "_read", lambda self, rows: passes.append(len(rows)) or read(self, rows))  # type: ignore[func-returns-value]
    found = generate(engine, *requests, turn(9, prompt_of(9)))
    assert passes[0] == 1
    assert sum(passes) == 7
    assert max(passes) in (2, 3)
    assert len(passes) > 3
    for one, expected in zip(found, generate(started(path), *requests, turn(9, prompt_of(9))), strict=True):
        assert_same(one, expected)


SEQUENCES = st.lists(st.integers(0, 2), min_size=17, max_size=24).map(lambda rest: [7] * 14 + rest)


@given(st.lists(st.tuples(SEQUENCES, st.booleans(), st.integers(0, 400)), max_size=12), SEQUENCES)
def test_the_longest_beginning_is_found_whatever_was_added_and_forgotten(
    added: list[tuple[list[int], bool, int]], wanted: list[int]
) -> None:
    cache, there = PrefixCache(), list[Known]()
    for number, (tokens, is_left, limit) in enumerate(added):
        known = Known(np.array(tokens, np.int32), number, {} if is_left else None)
        cache.add(known)
        cache.limit(limit)
        if number % 3 == 2:
            cache.end(number - 1)
        assert cache.num_tokens <= limit
    there = list(cache._entries.values())
    assert [number for _, number in cache._ordered] == [
        number for number, _ in sorted(cache._entries.items(), key=lambda item: (item[1].tokens.tolist(), item[0]))
    ]
    common = [
        next((at for at, (one, other) in enumerate(zip(known.tokens.tolist(), wanted, strict=False)) if one != other), len(wanted))
        for known in there
    ]
    best = min(max((min(of, len(known.tokens)) for of, known in zip(common, there, strict=True)), default=0), len(wanted) - 1)
    num, found = cache.find(np.array(wanted, np.int32))
    assert num == (best if best >= 16 else 0)
    if found is not None:
        assert found.tokens[:num].tolist() == wanted[:num]
