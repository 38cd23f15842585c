"""Constrained decoding: every response matches, whatever the seed, alone or beside others, aborted or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from tiny_models import byte_tokenizer, save_config, started_engines

from m2flow import Dataset, Policy
from m2flow.engines.contract import Generated, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.errors import EngineError, OptionError, PlanError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.recipe import Sampling
from m2flow.samples import Finish, SampleId
from m2flow.spec import ClusterSpec, RolloutSpec
from m2flow.testing.rollout_suite import continued

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
LIST = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9] | "é"'


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, EmbeddedRollout]]:
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("constrained")
    tokenizer = byte_tokenizer(folder, merges=["a a", "1 2", "\u00c3 \u00a9", "t r"])
    path = save_config("Qwen2", folder, vocab_size=len(tokenizer) + 5, eos_token_id=0, pad_token_id=0, tokenizer=False)
    with started_engines(path) as made:
        yield made


def run(engine: EmbeddedRollout, requests: list[Request]) -> dict[int, Generated]:
    engine.add(requests)
    done: dict[int, Generated] = {}
    while engine.num_unfinished:
        done |= {one.id: one for one in engine.step()}
    return done


def asked(sampling: Sampling, count: int = 8) -> list[Request]:
    return [Request(SampleId(0, 0, i).pack(), "a", 100 + i, sampling) for i in range(count)]


@pytest.mark.parametrize("is_fixed", [False, True])
def test_what_is_generated_matches_an_expression_a_schema_or_a_grammar(engines: dict[bool, EmbeddedRollout], is_fixed: bool) -> None:
    for one in run(engines[is_fixed], asked(Sampling(40, regex=r"-?[1-9][0-9]{0,3}|a+é"))).values():
        assert one.finish is Finish.LENGTH or re.fullmatch(r"-?[1-9][0-9]{0,3}|a+é", one.text), one.text
    for one in run(engines[is_fixed], asked(Sampling(200, json_schema=json.dumps(SCHEMA)))).values():
        if one.finish is Finish.STOP:
            found = json.loads(one.text)
            assert set(found) == {"sum", "sure"}
            assert 0 <= found["sum"] <= 99
    for one in run(engines[is_fixed], asked(Sampling(60, grammar=LIST))).values():
        assert one.finish is Finish.LENGTH or re.fullmatch(r"\[[0-9é](,[0-9é])*\]", one.text), one.text


def test_a_constrained_sample_is_the_same_alone_beside_others_and_after_an_abort(engines: dict[bool, EmbeddedRollout]) -> None:
    sampling = Sampling(24, regex=r"(aa|12|é| true)+")
    together = run(engines[False], [*asked(sampling), *(Request(1000 + i, "a a", i, Sampling(30)) for i in range(3))])
    for request in asked(sampling):
        alone = run(engines[False], [request])[request.id]
        assert alone.tokens.tolist() == together[request.id].tokens.tolist()
        engines[False].add([request])
        for _ in range(5):
            engines[False].step()
        aborted = engines[False].abort([request.id])
        for part in aborted:
            resumed = run(engines[False], [continued(request, part, len(part.tokens))])[request.id]
            assert resumed.tokens.tolist() == alone.tokens.tolist()


def test_reported_log_probabilities_are_the_models_own(engines: dict[bool, EmbeddedRollout]) -> None:
    (one,) = run(engines[False], asked(Sampling(6, regex="a{6}"), 1)).values()
    sequence = [*one.prompt_tokens.tolist(), *one.tokens.tolist()]
    (whole,) = engines[False].logprobs([sequence])
    np.testing.assert_allclose(one.logprobs, whole[-len(one.tokens) :], atol=1e-5)
    assert (one.logprobs < -1).all(), "under the constraint alone they would be near 0"


def test_a_constraint_that_can_not_be_read_is_an_error_with_its_option(engines: dict[bool, EmbeddedRollout]) -> None:
    for sampling in (Sampling(8, regex="(a"), Sampling(8, grammar="root ::= nothing"), Sampling(8, json_schema='{"type": "no"}')):
        with pytest.raises(EngineError, match="can't be read"):
            engines[False].add(asked(sampling, 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "a", "grammar": "root ::= []"}, "regex and grammar are given"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos would not"),
        ({"json_schema": "["}, "must be a JSON Schema"),
        ({"json_schema": 5}, "must be a JSON Schema"),
        ({"regex": None}, "must be a text"),
    ],
)
def test_constraints_that_contradict_something_are_refused_where_they_are_written(options: dict[str, object], said: str) -> None:
    flow = Flow(lambda: Policy("fake").generate(Dataset([{"prompt": "a"}]).take(1), max_new_tokens=4, **options))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=said):
        trace(flow, {})


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_plan_refuses_a_constraint_for_a_server(engine: str) -> None:
    flow = Flow(lambda: Policy("fake").generate(Dataset([{"prompt": "a"}]).take(1), max_new_tokens=4, regex="a+"))
    graph, models, _ = trace(flow, {})
    assert "regex='a+'" in str(graph)
    with pytest.raises(PlanError, match=f"has regex, which the rollout engine '{engine}' can't honour"):
        lower(graph, models, ClusterSpec(device="cpu", cores=2, placement="split", rollout=RolloutSpec(engine=engine)))
