"""Drawing tokens: the right distribution, from random numbers that belong to the sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from m2flow.engines.embedded.decoding import SamplingColumns, draw, draw_recorded, uniforms

V = 8


def columns(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingColumns:
    return SamplingColumns(
        np.full(num_rows, temperature, np.float32), np.full(num_rows, top_k), np.full(num_rows, top_p), np.full(num_rows, min_p)
    )


def logits(num_rows: int) -> torch.Tensor:
    return (torch.arange(V) * 0.4)[None].expand(num_rows, V)


def frequencies(tokens: torch.Tensor) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=V) / len(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    N = 40_000
    tokens, logprobs = draw(logits(N), columns(N, temperature), uniforms(np.arange(N).astype(np.uint64), np.zeros(N, np.int64)), None)
    expected = (logits(1)[0] / temperature).softmax(0)
    np.testing.assert_allclose(frequencies(tokens), expected, atol=4 * np.sqrt(0.25 / N))
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_k_keeps_the_likeliest_and_of_equal_ones_the_first() -> None:
    N = 4000
    uniform = uniforms(np.arange(N).astype(np.uint64), np.zeros(N, np.int64))
    tokens, _ = draw(logits(N), columns(N, top_k=3), uniform, None)
    assert set(tokens.tolist()) == {5, 6, 7}
    tokens, _ = draw(torch.zeros(N, V), columns(N, top_k=2), uniform, None)
    assert set(tokens.tolist()) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_p_of_what_top_k_left() -> None:
    N = 4000
    uniform = uniforms(np.arange(N).astype(np.uint64), np.zeros(N, np.int64))
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0])
    rows = probabilities.log().expand(N, V)
    for top_k, top_p, kept in ((0, 0.65, {0, 1}), (0, 0.75, {0, 1, 2}), (2, 0.5, {0}), (0, 1e-6, {0}), (3, 1.0, {0, 1, 2})):
        tokens, _ = draw(rows, columns(N, top_k=top_k, top_p=top_p), uniform, None)
        assert set(tokens.tolist()) == kept
    kept_two, _ = draw(rows, columns(N, top_p=0.65), uniform, None)
    np.testing.assert_allclose(frequencies(kept_two)[:2], [4 / 7, 3 / 7], atol=0.04)


def test_min_p_keeps_what_is_at_least_that_share_as_likely_as_the_likeliest_after_the_others() -> None:
    N = 4000
    uniform = uniforms(np.arange(N).astype(np.uint64), np.zeros(N, np.int64))
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0])
    rows = probabilities.log().expand(N, V)
    for top_p, min_p, kept in (
        (1.0, 0.45, {0, 1, 2}),
        (1.0, 0.3, {0, 1, 2}),
        (1.0, 0.2, {0, 1, 2, 3}),
        (0.65, 0.2, {0, 1}),
        (1.0, 1.0, {0}),
    ):
        tokens, logprobs = draw(rows, columns(N, top_p=top_p, min_p=min_p), uniform, None)
        assert set(tokens.tolist()) == kept
        torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_forbidden_tokens_are_not_drawn_and_do_not_change_logprobs() -> None:
    N = 2000
    forbidden = torch.zeros(N, V, dtype=torch.bool)
    forbidden[:, 6:] = True
    uniform = uniforms(np.arange(N).astype(np.uint64), np.zeros(N, np.int64))
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw(logits(N), columns(N, temperature), uniform, forbidden)
        assert int(tokens.max()) == 5
        torch.testing.assert_close(logprobs, logits(N).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_what_rows_that_ask_were_drawn_from_is_recorded_and_their_log_probability_is_among_that() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0])
    rows = torch.cat([probabilities.log().clamp(min=-90).expand(4, V), logits(1)])
    sampling = SamplingColumns(
        np.array([1, 1, 0, 1, 1], np.float32), np.array([2, 2, 2, 0, 0]), np.array([1, 1, 1, 0.75, 1.0]), np.zeros(5)
    )
    forbidden = torch.zeros(5, V, dtype=torch.bool)
    forbidden[3, 1] = True
    uniform = np.array([0.1, 0.9, 0.9, 0.9, 0.5])
    plain = draw(rows, sampling, uniform, forbidden)
    tokens, logprobs, masks = draw_recorded(rows, sampling, uniform, forbidden, None, [1, 2, 3, 4])
    assert torch.equal(tokens, plain[0])
    assert tokens.tolist() == [0, 1, 0, 2, 6]
    assert [one.tolist() for one in masks] == [[0, 1], [], [0, 2], []]
    expected = torch.tensor([0.4, 3 / 7, 0.4, 2 / 6, logits(1).softmax(-1)[0, 6]]).log()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(plain[1][[0, 1, 3]], torch.tensor([0.4, 0.3, 0.2]).log())


def test_the_ends_of_the_unit_interval_give_tokens_that_are_possible() -> None:
    rows = torch.full((2, V), float("-inf"))
    rows[:, 3:5] = 0.0
    tokens, _ = draw(rows, columns(2), np.array([0.0, 1 - 2.0**-53]), None)
    assert tokens.tolist() == [3, 4]


def test_a_random_number_depends_on_its_seed_and_position_alone() -> None:
    seeds, positions = np.arange(1000).astype(np.uint64), np.arange(1000)
    together = uniforms(seeds, positions)
    assert [float(uniforms(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(0, 1000, 100)] == together[::100].tolist()
    assert len(set(together.tolist())) == 1000
    assert float(uniforms(np.array([2**64 - 1], np.uint64), np.array([0]))[0]) < 1


def test_random_numbers_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(300).astype(np.uint64), np.arange(300), indexing="ij")
    grid = uniforms(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert abs(grid.mean() - 0.5) < 0.005
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015
