"""What a turn costs beside the engine's work: nothing is done for each that need be done once."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pydantic
import pytest

from m2flow import tool
from m2flow.agents.conversation import Strand
from m2flow.micro.protocol.staleness import VersionSpan, version_spans_of
from m2flow.samples import MAIN, Batch, KeyedWords, Ragged, Segment, keyed_bits


def test_the_schema_of_a_type_is_made_once_however_often_a_tool_is_made_anew(monkeypatch):
    made: list[object] = []
    of_adapter = pydantic.TypeAdapter.json_schema

    def counted(self: pydantic.TypeAdapter[Any], *args: Any, **more: Any) -> dict[str, Any]:
        made.append(self)
        return of_adapter(self, *args, **more)

    monkeypatch.setattr(pydantic.TypeAdapter, "json_schema", counted)
    kind = list[frozenset[int]]  # No other test has it.
    shown = []
    for _ in range(3):

        def pick(of: kind) -> str:  # type: ignore[valid-type]
            """Pick."""
            return str(of)

        pick.__annotations__["of"] = kind
        shown.append(tool(pick).description)
        shown[-1]["function"]["parameters"]["properties"]["of"]["changed"] = True  # type: ignore[index]
    assert shown[0] == shown[1] == shown[2], "each is its own"
    assert len(made) == 1


def rows(seed: int, *, named: bool) -> tuple[Batch, list[tuple[VersionSpan, ...]]]:
    """Random episodes, and the spans of their versions."""
    rng = random.Random(seed)
    kinds, lengths, versions, stale, records, spans = ([[] for _ in range(5)] for _ in range(6))  # type: ignore[var-annotated]
    for row in range(5):
        conversations = []
        found: list[VersionSpan] = []
        for number in range(rng.randint(1, 3) if named else 1):
            name, begin = f"c{number}", len(versions[row])
            conversations.append({"name": name, "num_turns": 1, "prompt": None, "parent": ""})
            for kind in (Segment.PROMPT, *rng.choices([Segment.GENERATED, Segment.TOOL], k=rng.randint(0, 4))):
                kinds[row].append(int(kind))
                lengths[row].append(rng.randint(0, 3))
                is_made = kind is Segment.GENERATED
                versions[row] += [rng.randint(1, 2) if is_made else -1 for _ in range(lengths[row][-1])]
                stale[row] += [is_made and rng.random() < 0.2 for _ in range(lengths[row][-1])]
            made = [(v, s) for v, s in zip(versions[row][begin:], stale[row][begin:], strict=True) if v >= 0]
            for (version, is_stale), of in itertools.groupby(made):
                found.append(VersionSpan(len(list(of)), version, is_stale, *([(name, 0)] if named else [])))
        records[row] = {"tools": {}, "turns": []} | ({"conversations": conversations} if named else {})  # type: ignore[call-overload]
        spans[row] = tuple(found)  # type: ignore[call-overload]
    columns = {
        "segment_kinds": Ragged.of(kinds, np.uint8),
        "segment_lengths": Ragged.of(lengths, np.int32),
        "versions": Ragged.of(versions, np.int32),
        "kv_stale": Ragged.of(stale, np.bool_),
        "episode": Ragged.json(records),
    }
    return Batch(np.arange(5), columns), spans  # type: ignore[return-value]


@pytest.mark.parametrize("named", [False, True], ids=["one conversation", "several"])
def test_spans_of_versions_are_those_of_each_sequence_and_no_record_is_read_where_none_names_conversations(monkeypatch, named):
    read: list[object] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or loads(text))
    for seed in range(200):
        batch, expected = rows(seed, named=named)
        assert version_spans_of(batch) == expected, seed
    assert bool(read) == named


def test_a_turn_is_keyed_by_all_ids_before_it_each_of_which_is_hashed_once(monkeypatch):
    hashed: list[int] = []
    extend = KeyedWords.extend
    monkeypatch.setattr(KeyedWords, "extend", lambda self, words: (hashed.append(len(words)), extend(self, words))[1])
    for name in (MAIN, "verdict"):
        strand, words = Strand(name), () if name == MAIN else (name,)
        hashed.clear()
        for number in range(6):
            ids = [number * 7 + at for at in range(5)]
            assert strand.path(ids) == keyed_bits(*words, *strand.tokens, *ids)
            strand.append(ids)
        assert sum(hashed) == 25
