"""An interpreter for the vLLM server is looked at before it is used; what a server says is understood."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answering_as_vllm import experts_of, vllm_server
from started_with import started_with
from tiny_models import CONFIGS, mixture_config, write_model

from m2flow.cli.doctor import other_interpreter
from m2flow.engines.contract import EngineSettings
from m2flow.engines.installed import VLLM, installed
from m2flow.engines.registry import check_engine
from m2flow.engines.servers.vllm import VllmDialect, VllmRollout
from m2flow.errors import EngineError, MissingExtra
from m2flow.recipe import Sampling
from m2flow.spec import ClusterSpec, RolloutSpec
from m2flow.testing.rollout_suite import generate, make_request, started

FIRST = (
    b'{"request_id":"generate-tokens-a","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"stop_reason":null,'
    b'"token_ids":[28],"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":28,"logprob":'
    b'-3.948568344116211,"rank":32,"top_logprobs":[{"token_id":28,"logprob":-3.948568344116211,"rank":32}]}]}}]}'
)
LAST = FIRST.replace(b'"finish_reason":null', b'"finish_reason":"length"').replace(
    b'"weight_versions":null', b'"weight_versions":[{"version":"7","start":0,"end":4}]'
)


def python_that_says(place: Path, version: str, words: list[str]) -> str:
    fake = place / "python"
    fake.write_text(f"#!/bin/sh\necho '{json.dumps({'version': version, 'words': words, 'saver': True})}'\n")
    fake.chmod(0o755)
    return str(fake)


def test_a_run_on_an_interpreter_without_vllm_is_refused_with_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=f"needs vllm, which {sys.executable} does not have") as raised:
        check_engine("vllm", "rollout", "cpu", {"python": sys.executable})
    assert "pip install 'vllm>=0.32.0'" in str(raised.value)
    check_engine("vllm", "rollout", "cpu", {"url": "http://127.0.0.1:1"})


def test_a_vllm_that_is_too_old_is_refused_with_the_version_that_will_do(tmp_path: Path) -> None:
    words = [word for found in VLLM.needed.values() for word in found if word != "/update_weight_version"]
    python = python_that_says(tmp_path, "0.21.0", words)
    with pytest.raises(MissingExtra, match=r"vLLM 0.21.0 .* weight versions by token.* 0\.32\.0"):
        check_engine("vllm", "rollout", "cpu", {"python": python})
    said = other_interpreter(ClusterSpec(rollout=RolloutSpec(engine="vllm", options={"python": python})))
    assert said.startswith(f"{python} has vllm 0.21.0: generation by token ids, abort of one request")
    assert said.endswith("; it lacks weight versions by token, which 0.32.0 has")


def test_abilities_are_those_whose_words_are_all_there(tmp_path: Path) -> None:
    found = installed(VLLM, python_that_says(tmp_path, "0.40", ["/pause", "/weight_checker"]))
    assert found.abilities == ("checksums of the weights held",)
    assert "pause and continue" in found.lacking


def test_an_option_that_there_is_not_and_a_value_that_is_none_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, CONFIGS["qwen2"]())
    for options, words in (({"deterministic_inference": True}, "has no option"), ({"restarts": "often"}, "restarts .* must be a number")):
        engine = VllmRollout(model, EngineSettings(options=options))
        with pytest.raises(EngineError, match=words):
            engine.start()
        engine.stop()


def test_what_a_server_says_is_tokens_and_at_last_which_weights_made_them() -> None:
    dialect = VllmDialect()
    first, last = dialect.heard("a", FIRST), dialect.heard("a", LAST)
    assert (first.tokens, first.logprobs, first.finish, first.spans) == ([28], [-3.948568344116211], None, ())
    assert last.finish is not None
    assert last.finish.type == "length"
    assert [(span.version, span.start, span.end) for span in last.spans] == [("7", 0, 4)]
    assert dialect.heard("a", b'{"request_id":"generate-tokens-a","choices":[],"usage":null}').finish is None
    assert dialect.heard("a", b'{"error":{"message":"too long","code":400}}').error == "too long"


def test_a_request_is_ended_by_the_name_that_the_server_gave_it() -> None:
    assert VllmDialect().named("a", {"token_ids": [1]}) == {"token_ids": [1], "request_id": "a", "stream": True}
    assert VllmDialect().abort_bodies(["a", "b"]) == [{"request_ids": ["generate-tokens-a", "generate-tokens-b"]}]


@pytest.mark.parametrize(("seen", "shown"), [("", "2,3"), ("4,5,6,7", "6,7")])
def test_a_server_is_laid_over_the_devices_that_the_plan_says(
    seen: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    given, gpus = started_with(VllmRollout, VLLM.needed, tmp_path, EngineSettings(device="cuda:2", tp=2))
    assert gpus == shown
    assert given[given.index("--tensor-parallel-size") + 1] == "2"
    assert "--enable-sleep-mode" in given


def test_a_server_on_one_device_is_told_of_no_layout(tmp_path: Path) -> None:
    given, _ = started_with(VllmRollout, VLLM.needed, tmp_path, EngineSettings())
    assert not {"--tensor-parallel-size", "--enable-sleep-mode"} & set(given)


def test_a_server_is_told_to_return_experts_where_training_replays_them(tmp_path: Path) -> None:
    for number, (routing, is_told) in enumerate((("rollout", True), (None, False))):
        (tmp_path / str(number)).mkdir()
        model = replace(write_model(tmp_path / str(number), mixture_config()), routing=routing)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("started_with.write_model", lambda *_, model=model: model)
            given, _ = started_with(VllmRollout, VLLM.needed, tmp_path / str(number), EngineSettings())
        assert ("--enable-return-routed-experts" in given) == is_told


def test_samples_have_the_experts_that_a_server_says_and_none_of_the_last_token(tmp_path: Path) -> None:
    model = write_model(tmp_path, mixture_config())
    with vllm_server() as url:
        engine = VllmRollout(model, EngineSettings(options={"url": url, "routed_experts": True}))
        with started(lambda _: engine):
            requests = [make_request(prompt, 0, Sampling(5, temperature=0.0)) for prompt in range(3)]
            for sample in generate(engine, requests).values():
                tokens = [*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]
                assert sample.routed_experts is not None
                np.testing.assert_array_equal(sample.routed_experts[:-1], experts_of(tokens)[:-1])
                assert len(sample.routed_experts) == len(tokens)
    with vllm_server(returns_experts=False) as url:
        engine = VllmRollout(model, EngineSettings(options={"url": url, "routed_experts": True}))
        with pytest.raises(EngineError, match="does not return routed experts"):
            engine.start()
        engine.stop()


def test_a_server_is_asked_for_no_cache_of_other_weights_nor_of_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[object] = []
    salted = VllmRollout._salted

    def noted(engine: VllmRollout, tokens: list[int], parameters: Mapping[str, object]) -> dict[str, object]:
        body = salted(engine, tokens, parameters)
        salts.append(body["cache_salt"])
        return body

    monkeypatch.setattr(VllmRollout, "_salted", noted)
    model = write_model(tmp_path, mixture_config())
    of_weights: list[set[object]] = []
    with vllm_server() as url:
        for _ in range(2):
            engine = VllmRollout(model, EngineSettings(options={"url": url, "routed_experts": True}))
            with started(lambda _, engine=engine: engine):
                for version in (0, 1):
                    if version:
                        engine.load_weights(list(engine.weights()), version)
                    salts.clear()
                    generate(engine, [make_request(prompt, version, Sampling(5, temperature=0.0)) for prompt in range(2)])
                    of_weights.append(set(salts))
    assert [len(one) for one in of_weights] == [1] * 4, "requests of the same weights share what they have read"
    assert len(set.union(*of_weights)) == 4
