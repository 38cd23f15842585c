"""Distributions of lengths: draws that belong to identity, survival under cuts, likeness in a group, and traces with bad lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import SpecError
from m2flow.micro.records.ledger import Ledger, lengths_of_run
from m2flow.rollout_scheduling.lengths import (
    TRACES,
    Lengths,
    Measured,
    Mixture,
    kaplan_meier,
    log_length_icc,
    lognormal,
    parse_lengths,
    read_trace,
)
from m2flow.samples import Finish, SampleId

DAPO, VIDEO = "dapo-qwen2.5-32b", "video-qwen2.5-vl-7b"
ALL = (
    DAPO,
    VIDEO,
    "lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3",
    "mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=16000,icc=0.5",
)


@pytest.fixture(params=ALL)
def lengths(request: pytest.FixtureRequest) -> Lengths:
    return parse_lengths(request.param)


def test_more_groups_or_members_leave_the_first_ones_as_they_were(lengths: Lengths) -> None:
    small, large = lengths.draw(20, 4, seed=3, step=2), lengths.draw(50, 7, seed=3, step=2)
    assert (large[:20, :4] == small).all()
    assert (lengths.draw_prompts(50, seed=3, step=2)[:20] == lengths.draw_prompts(20, seed=3, step=2)).all()
    assert small.dtype == np.int64
    assert small.min() >= 1


def test_seed_and_step_change_a_draw(lengths: Lengths) -> None:
    first = lengths.draw(50, 8, seed=0)
    assert (first == lengths.draw(50, 8, seed=0)).all()
    assert (first != lengths.draw(50, 8, seed=1)).any()
    assert (first != lengths.draw(50, 8, seed=0, step=1)).any()


def test_draws_have_the_distribution_that_is_claimed(lengths: Lengths) -> None:
    drawn = lengths.draw(4000, 4, seed=1).ravel()
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.04)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, q) == pytest.approx(lengths.quantile(q), rel=0.06)
        below_cap = lengths.quantile(q)
        assert (drawn > below_cap).mean() == pytest.approx(lengths.survival(below_cap), abs=0.02)
    middle = lengths.quantile(0.5)
    assert drawn[drawn > middle].mean() == pytest.approx(lengths.beyond(middle), rel=0.05)
    if lengths.cap is not None:
        assert drawn.max() <= lengths.cap


@pytest.mark.parametrize("name", [DAPO, VIDEO])
def test_a_trace_that_comes_along_is_the_run_that_its_source_describes(name: str) -> None:
    trace = parse_lengths(name)
    assert isinstance(trace, Measured)
    shape = {DAPO: (6, 768, 581, 2711, 10112), VIDEO: (21, 512, 177, 315, 16000)}[name]
    longest = max(int(trace.step(k).responses.max()) for k in range(trace.num_steps()))
    assert (trace.num_steps(), len(trace.step(0)), int(trace.mean()), longest) == (shape[0], shape[1], shape[2], shape[4])
    assert trace.quantile(0.99) == pytest.approx(shape[3], rel=0.01)
    assert (trace.cap, trace.num_cut > 1) == ((None, False) if name == DAPO else (16000, True))


def test_a_recorded_step_is_given_as_it_was() -> None:
    step = parse_lengths(DAPO).step(0, num_groups=1, n=1, seed=9)
    assert step.responses[:8].tolist() == [450, 453, 396, 274, 26, 393, 1842, 681]
    assert (step.prompts[0], step.groups[7], step.groups[8]) == (112, 0, 1)
    with pytest.raises(SpecError, match="has 6 steps, not 7"):
        parse_lengths(DAPO).step(6, num_groups=1, n=1, seed=0)


def test_drawing_from_a_trace_keeps_groups_together(tmp_path: Path) -> None:
    path = tmp_path / "alike.jsonl"
    path.write_text(
        "".join(json.dumps({"step": 0, "prompt_tokens": k, "response_tokens": [10**k + m for m in range(3)]}) + "\n" for k in (1, 2, 3))
    )
    trace = read_trace(path)
    drawn, prompts = trace.draw(200, 3, seed=0), trace.draw_prompts(200, seed=0)
    assert all(sorted(row - 10**k) == [0, 1, 2] for row, k in zip(drawn, prompts, strict=True))
    assert sorted(set(prompts.tolist())) == [1, 2, 3]
    assert {len(set(row.tolist())) for row in trace.draw(50, 5, seed=0)} == {3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "list missing or unknown"),
        ('{"step": 0, "prompt_tokens": 3}', "response_tokens missing"),
        ('{"step": 0, "prompt_tokens": 3, "response_tokens": [1], "x": 1}', "x missing or unknown"),
        ('{"step": -1, "prompt_tokens": 3, "response_tokens": [1]}', "step is -1"),
        ('{"step": 0, "prompt_tokens": "a", "response_tokens": [1]}', "prompt_tokens is 'a'"),
        ('{"step": 0, "prompt_tokens": 3, "response_tokens": []}', "one or more positive"),
        ('{"step": 0, "prompt_tokens": 3, "response_tokens": [1, 0]}', "one or more positive"),
        ('{"step": 0, "prompt_tokens": 3, "response_tokens": [true]}', "one or more positive"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"step": 0, "prompt_tokens": 3, "response_tokens": [1]}\n\n' + line + "\n")
    with pytest.raises(SpecError, match=message) as caught:
        parse_lengths(str(path))
    assert caught.value.where == f"{path}:3"


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(SpecError, match="no line"):
        parse_lengths(str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no lengths 'nothing'"),
        ("lognormal:sigma=1", "either median= or mean="),
        ("lognormal:median=3,mean=4,sigma=1", "either median= or mean="),
        ("lognormal:median=3", "sigma= is missing"),
        ("lognormal:median=3,sigm=1", "no option 'sigm'"),
        ("lognormal:median=x,sigma=1", "median=x is not a number"),
        ("lognormal:median=inf,sigma=1", "not finite"),
        ("lognormal:median=3,sigma=-1", "above 0"),
        ("lognormal:median=3,sigma=1,cap=0", "leaves no answer"),
        ("lognormal:median=3,sigma=1,icc=2", "no correlation"),
        ("mixture:weights=1,median=3/4,sigma=1/1", "do not fit"),
    ],
)
def test_a_distribution_that_is_wrong_says_what(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_lengths(text)


def test_a_lognormal_has_its_closed_form_mean() -> None:
    assert lognormal(mean=5000, sigma=0.9).mean() == pytest.approx(5000)
    assert lognormal(median=1000, sigma=0.5).mean() == pytest.approx(1000 * math.exp(0.125))
    assert lognormal(median=1000, sigma=0.5, cap=1).mean() == pytest.approx(1.0, abs=1e-6)


def test_a_mixture_of_one_is_a_lognormal() -> None:
    assert (Mixture([1, 1], [500, 500], [0.7, 0.7]).draw(40, 4, 5) == lognormal(median=500, sigma=0.7).draw(40, 4, 5)).all()


@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
def test_the_measured_correlation_covers_the_true_one_nineteen_times_in_twenty(icc: float) -> None:
    inside = 0
    for seed in range(200):
        found = log_length_icc(list(lognormal(median=4000, sigma=0.8, icc=icc).draw(48, 8, seed)))
        inside += found.low <= icc <= found.high
    assert 182 <= inside <= 199


def test_the_traces_have_the_correlation_that_their_source_reports() -> None:
    dapo, video = (parse_lengths(name).correlation() for name in (DAPO, VIDEO))
    assert 0.02 <= dapo.icc <= 0.07
    assert dapo.low < dapo.icc < dapo.high
    assert 0.02 <= video.icc <= 0.19


def test_correlation_goes_to_its_ends() -> None:
    assert log_length_icc([[5, 5], [50, 50], [500, 500]]).icc == 1.0
    assert log_length_icc([[5, 500], [5, 500], [5, 500], [5, 500]]).icc < 0
    assert (log_length_icc([[5, 6]]).low, log_length_icc([[5, 6]]).high) == (-1.0, 1.0)
    assert log_length_icc([[7, 7], [7, 7], [7, 7]]).icc == 0.0


def test_unequal_groups_are_weighed() -> None:
    full = lognormal(median=4000, sigma=0.8, icc=0.6).draw(400, 8, 1)
    ragged = [row[: 2 + k % 7] for k, row in enumerate(full)]
    assert log_length_icc(ragged).icc == pytest.approx(0.6, abs=0.08)


def test_without_cuts_the_survival_curve_is_the_empirical_one() -> None:
    seen = [3, 1, 4, 1, 5, 9, 2, 6]
    curve = kaplan_meier(seen, [False] * 8)
    for x in range(11):
        assert curve.survival(x) == pytest.approx(sum(length > x for length in seen) / 8)
        if longer := [length for length in seen if length > x]:
            assert curve.beyond(x) == pytest.approx(sum(longer) / len(longer))
    assert curve.beyond(9) == 9


def test_cut_lengths_do_not_bias_the_curve_short() -> None:
    whole = lognormal(median=1000, sigma=0.8).draw(3000, 1, 4).ravel()
    limits = lognormal(median=1500, sigma=0.6).draw(3000, 1, 5).ravel()
    curve = kaplan_meier(np.minimum(whole, limits), limits < whole)
    for x in (500, 1000, 2000, 3000):
        assert curve.survival(x) == pytest.approx((whole > x).mean(), abs=0.03)
    assert (np.minimum(whole, limits)[limits >= whole] > 2000).mean() < (whole > 2000).mean() - 0.05


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30), st.integers(0, 50))
@settings(deadline=None)
def test_a_survival_curve_falls_and_the_expected_rest_is_never_negative(seen: list[tuple[int, bool]], x: int) -> None:
    curve = kaplan_meier([length for length, _ in seen], [cut for _, cut in seen])
    values = [curve.survival(k) for k in range(45)]
    assert values == sorted(values, reverse=True)
    assert all(-1e-12 <= value <= 1 for value in values)
    assert curve.beyond(x) >= x


def test_lengths_of_a_run_are_those_of_its_ledger_and_what_was_cut_counts_as_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.open()
    for step, generated, finish in ((0, [5, 9], [Finish.STOP, Finish.LENGTH]), (1, [7, 3], [Finish.STOP, Finish.ABORT])):
        ids = [SampleId(4 * step, 2, index).pack() for index in range(2)]
        ledger.samples_done(step, ids, [10 + tokens for tokens in generated], generated, finish, ("a", 0, 0, 0))
    ledger.close()
    found = parse_lengths(str(tmp_path), lengths_of_run)
    assert isinstance(found, Measured)
    assert (found.num_steps(), found.num_cut, found.cap) == (2, 2, 9)
    assert (found.step(0).responses.tolist(), found.step(1).prompts.tolist()) == ([5, 9], [10])
    assert found.survival(3) == 1.0


def test_a_run_that_generated_nothing_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.open()
    ledger.close()
    with pytest.raises(SpecError, match="generated nothing"):
        parse_lengths(str(tmp_path), lengths_of_run)


def test_the_traces_that_come_along_are_packaged() -> None:
    assert sorted(path.stem for path in TRACES.glob("*.jsonl")) == [DAPO, VIDEO]
