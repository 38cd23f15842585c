"""One sample as a page shows it: its texts, its tokens one by one with what is known of each, its rewards and its life.

    SampleBook, the run's tokenizer --sample_page--> SamplePage

A token's text is found with the tokenizer of a checkpoint in the run directory; before there is one, tokens are shown as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError, SpecError
from m2flow.micro.record.sample_book import Entry, SampleBook
from m2flow.samples import Batch, SampleId, Segment

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IntArray = npt.NDArray[np.int64]

MOST_TOKENS = 20_000
"""That one answer has; a page says how many more there are."""
_BEFORE = 6
"""Tokens that a token's text is read beside."""


@final
class SamplePage(msgspec.Struct):
    """Lists of tokens have one entry a token."""

    call: int
    prompt: int
    member: int
    step: int
    name: str
    site: str
    prompt_text: str
    response_text: str
    finish: str
    ending: str
    reason: str
    life: list[str]
    rewards: dict[str, float]
    parts: dict[str, dict[str, float]]
    """What each of these is made of, where its function says so."""
    pieces: list[str]
    has_texts: bool
    """Pieces are texts; else they are the numbers of tokens."""
    kinds: list[int]
    """0 prompt, 1 generated, 2 from elsewhere."""
    logprobs: list[float | None]
    versions: list[int | None]
    advantages: list[float | None]
    """Per token, where the run's rows have them; else empty."""
    experts: list[str]
    """Likewise: of each layer, those that it went to, `3 5 | 0 1`; empty where it is not known."""
    num_left_out: int
    prompt_tokens: int
    response_tokens: int


def sample_page(run_dir: Path, call: int, prompt: int, member: int) -> SamplePage:
    """
    Raises:
        SpecError: there is no such sample. EngineError: its rows can't be read.
    """
    try:
        wanted = [SampleId(call, prompt, member).pack()]
    except InternalError:  # There can be no such number.
        wanted = []
    page = next(sample_pages(run_dir, wanted), None)
    if page is None:
        raise SpecError(f"there is no sample {call}/{prompt}/{member} in {run_dir.name}")
    return page


def sample_pages(run_dir: Path, wanted: Sequence[int]) -> Iterator[SamplePage]:
    """Some samples, by their packed identities, in that order; those that are not there are passed over.

    Raises:
        SpecError: the ledger can't be read. EngineError: rows can't be read.
    """
    tokenizer = _tokenizer(run_dir)
    with SampleBook(run_dir) as book:
        for entry in book.entries(f"id IN ({', '.join(map(str, map(int, wanted)))})"):
            call, prompt, member = map(int, entry.sample.split("/"))
            yield _page(entry, book.rows_of(SampleId(call, prompt, member).pack()), SampleId(call, prompt, member), tokenizer)


def _page(entry: Entry, row: Batch, who: SampleId, tokenizer: Tokenizer | None) -> SamplePage:
    tokens = [int(token) for token in row.ragged("tokens").values] if "tokens" in row else []
    shown = tokens[:MOST_TOKENS]
    pieces = pieces_of(tokenizer, shown) if tokenizer else [str(token) for token in shown]
    generated = _kinds(row, len(tokens)) == 1
    return SamplePage(
        call=who.call,
        prompt=who.prompt,
        member=who.index,
        step=entry.step,
        name=entry.call,
        site=entry.site,
        prompt_text=entry.prompt_text,
        response_text=entry.response_text,
        finish=entry.finish,
        ending=entry.ending,
        reason=entry.reason,
        life=entry.life,
        rewards=entry.rewards,
        parts=entry.parts,
        pieces=pieces,
        has_texts=tokenizer is not None,
        kinds=_kinds(row, len(tokens))[:MOST_TOKENS].tolist(),
        logprobs=_numbers(row, "logprobs", generated)[:MOST_TOKENS],
        versions=[None if value is None else int(value) for value in _numbers(row, "versions", generated)[:MOST_TOKENS]],
        advantages=_numbers(row, "advantages", generated)[:MOST_TOKENS],
        experts=_experts(row)[:MOST_TOKENS],
        num_left_out=max(len(tokens) - MOST_TOKENS, 0),
        prompt_tokens=entry.prompt_tokens,
        response_tokens=entry.response_tokens,
    )


def pieces_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text of each token, as it is read after those before it; a character that several tokens make is the last one's."""
    pieces, held = [], 0
    for at in range(len(tokens)):
        first = max(0, min(at - held, at) - _BEFORE)
        before = tokenizer.decode(tokens[first : at - held], skip_special_tokens=False)
        whole = tokenizer.decode(tokens[first : at + 1], skip_special_tokens=False)
        piece = whole[len(before) :] if whole.startswith(before) else whole
        if piece.endswith("\ufffd") and held < 3 and at + 1 < len(tokens):
            held += 1
            pieces.append("")
        else:
            held = 0
            pieces.append(piece)
    return pieces


def _tokenizer(run_dir: Path) -> Tokenizer | None:
    found = sorted((run_dir / "checkpoints").glob("**/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(found[-1]))
    except Exception:  # The library raises Exception itself for a file that it can't read.
        return None


def _kinds(row: Batch, num_tokens: int) -> IntArray:
    if "segment_kinds" not in row:
        return row.ragged("loss_mask").values.astype(np.int64) if "loss_mask" in row else np.zeros(num_tokens, np.int64)
    kinds = [{Segment.PROMPT: 0, Segment.GENERATED: 1}.get(Segment(int(kind)), 2) for kind in row.ragged("segment_kinds").values]
    return np.repeat(kinds, row.ragged("segment_lengths").values.astype(np.int64))


def _experts(row: Batch) -> list[str]:
    if "routed_experts" not in row:
        return []
    layers = row.ragged("routed_experts").values.tolist()
    return [" | ".join(" ".join(map(str, experts)) for experts in of_token if min(experts) >= 0) for of_token in layers]


def _numbers(row: Batch, name: str, generated: npt.NDArray[np.bool_]) -> list[float | None]:
    """A column's numbers for generated tokens; a number that is not finite is None, as are those of other tokens."""
    if name not in row:
        return []
    values = row.ragged(name).values
    if len(values) != len(generated):
        return []
    return [
        round(float(value), 5) if is_own and np.isfinite(value) else None
        for value, is_own in zip(values.tolist(), generated.tolist(), strict=True)
    ]
