"""Every kind of causal language model that transformers has: the embedded engines compute what it computes, or refuse it in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_zoo
import pytest
from model_zoo import Case, rollout_gap, train_gap

from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import Model

SERVED = [
    Case("llama"),
    Case("gpt2"),
    Case("phi3", (("sliding_window", 6),)),
    Case("mistral", (("sliding_window", 6),)),
    Case("qwen2", (("sliding_window", 6), ("use_sliding_window", True), ("max_window_layers", 1))),
    Case("qwen3_moe"),
    Case("phimoe", (("sliding_window", 6),)),
    Case("cohere2", (("sliding_window", 32),)),
    Case("gemma2", (("sliding_window", 6),)),
    Case("gemma3_text", (("sliding_window", 6),)),
    Case("gemma4_text", (("sliding_window", 32),)),
    Case("gpt_oss", (("sliding_window", 6),)),
    Case("llama4_text", (("attention_chunk_size", 6),)),
    Case("llama4_text", (("attention_chunk_size", 32),)),
    Case("deepseek_v3"),
]
REFUSED = [
    (Case("llama4_text", (("attn_temperature_tuning", True),)), "takes rows of a batch for positions"),
    (Case("whisper"), "rows of logits where"),
    (Case("camembert"), "its logits differ by"),
    (Case("data2vec-text"), "its logits differ by"),
    (Case("bloom"), "no exchangeable attention"),
    (Case("mamba"), "layers of type linear_attention"),
    (Case("lfm2"), "layers of type conv"),
    (Case("doge"), "an attention mask that is of its own making"),
    (Case("gemma4_unified"), "a matter of more than positions"),
    (Case("stablelm"), "does not hand keyword arguments on"),
]
NOT_BUILT = {
    "blt", "cohere_compass_text", "dots3_note", "dots3_note_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant",
    "mamba2", "mllama", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "reformer", "xlstm", "xmod", "zamba", "zamba2",
}  # fmt: skip
"""Families that transformers can't make at this size, or not alone as a causal language model."""


@pytest.mark.parametrize("gap", [train_gap, rollout_gap])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_packed_and_slotted_passes_give_what_transformers_gives_for_each_sequence_alone(case: Case, gap: Any, tmp_path: Path) -> None:
    model = model_zoo.saved(case, tmp_path)
    assert gap(model, tmp_path) <= model_zoo.TOLERANCE


@pytest.mark.parametrize("gap", [train_gap, rollout_gap])
@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_a_family_that_would_be_computed_wrongly_is_refused_in_words(case: Case, reason: str, gap: Any, tmp_path: Path) -> None:
    model = model_zoo.saved(case, tmp_path)
    with pytest.raises(EngineError, match=reason) as refusal:
        gap(model, tmp_path)
    assert type(model).__name__ in refusal.value.what
    assert refusal.value.now


@pytest.mark.parametrize("kind", [EmbeddedTrain, FsdpTrain])
@pytest.mark.parametrize(("case", "head"), [(Case("camembert"), "lm"), (Case("doge"), "score"), (Case("stablelm"), "value")], ids=str)
def test_the_trainers_critics_and_reward_models_pass_the_same_probe(
    case: Case, head: str, kind: type[EmbeddedTrain], tmp_path: Path
) -> None:
    model_zoo.saved(case, tmp_path)
    engine = kind(Model(str(tmp_path), "random", head=head), EngineSettings())  # type: ignore[arg-type]
    try:
        with pytest.raises(EngineError, match="the embedded trainer can't run"):
            engine.start()
    finally:
        engine.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_family_of_transformers_is_computed_wrongly_or_ends_in_a_crash(tmp_path: Path) -> None:
    outcomes: dict[str, str] = {}
    for case in model_zoo.cases():
        try:
            model = model_zoo.saved(case, tmp_path / "model")
            model_zoo.own_logprobs(model, model_zoo.samples()[0][0], 1)
        except Exception as error:
            outcomes[str(case)] = f"not built: {type(error).__name__}: {error}"
            assert case.family in NOT_BUILT, outcomes
            continue
        for gap in (train_gap, rollout_gap):
            outcomes[f"{gap.__name__} {case}"] = model_zoo.outcome(gap, model, tmp_path / "model")
    for line in model_zoo.summary(outcomes.values()):
        print(line)
    wrong = {what: said for what, said in outcomes.items() if said.startswith(("wrong", "crash"))}
    assert not wrong
    assert sum(said == "equal" for said in outcomes.values()) > 200
