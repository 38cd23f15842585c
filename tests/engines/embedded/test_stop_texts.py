"""A response ends with the token that completes a stop text: in bytes, whatever tokens it is made of, and however often it is stopped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, save_config, started_engines

from m2flow.engines.contract import Generated, Request, StopTexts
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.errors import EngineError
from m2flow.recipe import Model, Sampling
from m2flow.samples import Finish, SampleId
from m2flow.testing.rollout_suite import continued

ALPHABET = "a .\n\u00e9\u20ac\U0001f600"
"""Characters of one to four bytes."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = byte_tokenizer(folder, merges=["a a", "a .", "\u010a \u010a", ". \u010a", "\u00c3 \u00a9", "\u0120 a"])
    return save_config("Qwen2", folder, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, tokenizer=False, initializer_range=0.05)


@pytest.fixture(scope="module")
def engines(path: str) -> Iterator[dict[bool, EmbeddedRollout]]:
    with started_engines(path) as made:
        yield made


def bytes_of(path: str, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of each token; none of a special one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    back = byte_of_character()
    special = set(tokenizer.all_special_ids)
    return [b"" if token in special else bytes(back[c] for c in tokenizer.convert_ids_to_tokens(token)) for token in tokens]


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def ends_at(parts: Sequence[bytes], stops: Sequence[str], first: int) -> int | None:
    """How many tokens a response with these bytes has, by a search in the bytes alone."""
    whole, ends = b"".join(parts), list(itertools.accumulate(map(len, parts)))
    found = []
    for stop in stops:
        wanted = stop.encode()
        at = whole.find(wanted)
        while at >= 0:
            count = next(k for k, end in enumerate(ends, 1) if end >= at + len(wanted))
            found += [count] if count >= first else []
            at = whole.find(wanted, at + 1)
    return min(found, default=None)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_check_finds_what_a_search_in_the_bytes_finds(path: str, data: st.DataObject) -> None:
    codec = load_tokenizer(Model(path))
    text = data.draw(st.text(ALPHABET, max_size=12))
    tokens = codec.encode_target(text)
    for _ in range(data.draw(st.integers(0, 2))):  # Bytes that are no text, and tokens without any.
        tokens.insert(
            data.draw(st.integers(0, len(tokens))), data.draw(st.sampled_from([0, 1, *tokens, *codec.encode_target("\u20ac")[:2]]))
        )
    stops = tuple(data.draw(st.lists(st.text(ALPHABET, min_size=1, max_size=3), min_size=1, max_size=3)))
    first = data.draw(st.integers(0, 4))
    check = StopTexts.of(Sampling(20, stop=stops, min_new_tokens=first), codec.decode, codec.special_ids)
    assert check is not None
    ended = [k for k in range(1, len(tokens) + 1) if check.are_completed(np.array(tokens[:k], np.int32))]
    assert (ended[0] if ended else None) == ends_at(bytes_of(path, tokens), stops, first)


def run(engine: EmbeddedRollout, requests: list[Request], rng: random.Random | None = None) -> list[Generated]:
    """Samples of these requests, with `rng` stopped and resumed again and again."""
    by_id = {request.id: request for request in requests}
    engine.add(requests)
    done: list[Generated] = []
    num_stops = 0
    while engine.num_unfinished:
        done += engine.step()
        if rng is not None and rng.random() < 0.2 and num_stops < 8:  # A resumed sample may have its tokens read one by one.
            num_stops += 1
            picked = [request.id for request in requests if rng.random() < 0.5]
            stopped = engine.abort(picked)
            engine.add([continued(by_id[sample.id], sample, len(sample.tokens)) for sample in stopped])
            if rng.random() < 0.3:
                engine.offload()
                engine.onload()
    return sorted(done, key=lambda sample: sample.id)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["continuous", "deterministic"])
def test_an_engine_ends_samples_where_the_bytes_do_however_they_were_stopped(
    path: str, engines: dict[bool, EmbeddedRollout], is_fixed: bool
) -> None:
    engine, rng, codec = engines[is_fixed], random.Random(5), load_tokenizer(Model(path))
    requests = [Request(SampleId(0, k // 4, k % 4).pack(), f"{k // 4}a", 100 + k, Sampling(24, ignore_eos=True)) for k in range(16)]
    free = run(engine, requests)
    for _ in range(4):
        pieces = [codec.decode(sample.tokens.tolist()).replace("\ufffd", "") for sample in free]
        stops = tuple(
            {piece[at : at + rng.randint(1, 2)] for piece in rng.sample(pieces, 4) if len(piece) > 4 for at in [rng.randrange(4)]}
        )
        first = rng.choice([0, 6])
        asked = [replace(request, sampling=replace(request.sampling, stop=stops, min_new_tokens=first)) for request in requests]
        assert any(stop for stop in stops)
        for sample, whole in zip(run(engine, asked, rng), free, strict=True):
            count = ends_at(bytes_of(path, whole.tokens.tolist()), stops, first)
            assert sample.tokens.tolist() == whole.tokens[:count].tolist()
            assert sample.finish is (Finish.LENGTH if count is None else Finish.STOP)
            assert count is None or not any(sample.text.endswith(stop) for stop in stops) or first
            assert codec.decode(sample.tokens.tolist()).startswith(sample.text)


def test_the_text_of_a_special_token_means_the_token(path: str, engines: dict[bool, EmbeddedRollout]) -> None:
    (free,) = run(engines[False], [Request(0, "a", 1, Sampling(8, ignore_eos=True, logit_bias=((1, 7.0),)))])
    assert 1 in free.tokens
    (done,) = run(engines[False], [Request(0, "a", 1, Sampling(8, ignore_eos=True, logit_bias=((1, 7.0),), stop=("<turn>",)))])
    assert done.tokens.tolist() == free.tokens[: free.tokens.tolist().index(1) + 1].tolist()
    assert done.finish is Finish.STOP
    assert "<turn>" not in done.text


def test_without_its_end_a_sample_goes_on_to_its_length(engines: dict[bool, EmbeddedRollout]) -> None:
    (done,) = run(engines[False], [Request(0, "a", 1, Sampling(8, ignore_eos=True, logit_bias=((0, 1e9),)))])
    assert done.tokens.tolist() == [0] * 8
    assert done.finish is Finish.LENGTH
    (done,) = run(engines[False], [Request(0, "a", 1, Sampling(8, logit_bias=((0, 1e9),), min_new_tokens=3))])
    assert len(done.tokens) == 4
    assert done.finish is Finish.STOP


@pytest.mark.parametrize("is_fixed", [False, True], ids=["continuous", "deterministic"])
def test_a_penalty_is_that_of_transformers_and_logprobs_are_the_models_own(
    path: str, engines: dict[bool, EmbeddedRollout], is_fixed: bool
) -> None:
    import torch

    from m2flow.engines.models.hf_model import load_model

    sampling = Sampling(16, temperature=0.0, repetition_penalty=1.4, logit_bias=((9, 0.3), (7, -0.2)), ignore_eos=True)
    (done,) = run(engines[is_fixed], [Request(0, "aaaa a", 1, sampling)], random.Random(2))
    model = load_model(Model(path, "random"), device="cpu", attention="eager")
    prompt = torch.tensor(done.prompt_tokens[None].astype(np.int64))
    theirs = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        repetition_penalty=1.4,
        sequence_bias=[[[9], 0.3], [[7], -0.2]],
    )
    assert theirs[0, prompt.shape[1] :].tolist() == done.tokens.tolist()
    whole = torch.tensor(np.concatenate([done.prompt_tokens, done.tokens])[None].astype(np.int64))
    with torch.no_grad():
        logprobs = model(whole).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    np.testing.assert_allclose(done.logprobs, logprobs.gather(1, whole[0, prompt.shape[1] :, None])[:, 0].numpy(), atol=1e-4)


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(engines: dict[bool, EmbeddedRollout]) -> None:
    with pytest.raises(EngineError, match="sample p0/0: logit_bias has a token outside of"):
        engines[False].add([Request(0, "a", 1, Sampling(8, logit_bias=((10**6, 1.0),)))])
