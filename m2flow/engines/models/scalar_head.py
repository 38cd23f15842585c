"""Models with a scalar head: a critic's value of each token, a reward model's score of a whole exchange.

    value   hidden state that predicts token t --score--> V before token t       token classification with one label
    score   hidden state of the last token     --score--> one number a sample    sequence classification with one label

Both are Hugging Face's own classes, saved and loaded in its format: any checkpoint of a causal language model has the body of a
critic, whose head then starts at zero, and a critic can start from a reward model, head included. The forward pass is the packed one
(`m2flow.engines.models.packing`), up to the last hidden state; a head's dropout is off, as all dropout is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from m2flow.errors import EngineError, ModelError
from m2flow.samples import Batch, Prompt, Ragged, SampleId

if TYPE_CHECKING:
    from m2flow.engines.models.hf_model import TextCodec
    from m2flow.engines.models.packing import Packed

# Shapes: T predicted tokens, N samples.

HEADS = {"lm": "AutoModelForCausalLM", "value": "AutoModelForTokenClassification", "score": "AutoModelForSequenceClassification"}
"""Head of a `m2flow.recipe.Model` -> the class of transformers that has it."""

_HEAD = "score."


def prepare(model: Any, head: str, missing: list[str], path: str) -> list[str]:
    """Check the head of a loaded model, and set a critic's to zero where the checkpoint has none.

    Args:
        missing: names that the checkpoint lacks; all of the head's for random weights.
    Returns:
        The names that are still missing.
    Raises:
        ModelError: the architecture has no linear head of one number.
    """
    if head == "lm":
        return missing
    layer = getattr(model, "score", None)
    if not isinstance(layer, torch.nn.Linear) or layer.out_features != 1:
        raise ModelError(f"a {model.config.model_type!r} model ({path}) has no head of one number here", now="Choose another architecture.")
    if head == "value":
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if _HEAD + name in missing:
                    parameter.zero_()
        return [name for name in missing if not name.startswith(_HEAD)]
    return missing


def forward_scalars(model: Any, packed: Packed) -> Tensor:
    """Compute the head's output where a masked token is predicted: float32 [T], with gradient."""
    return column_scalars(model, packed)[:, 0].float()


def column_scalars(model: Any, packed: Packed) -> Tensor:
    """Compute the head's output as the head returns it, [T, 1], in the model's dtype."""
    scalars: Tensor = model.score(hidden_states(model, packed))
    return scalars


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """Compute the hidden states where a masked token is predicted, [T, width]."""
    output: Tensor = model.base_model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed_layout=packed.layout
    ).last_hidden_state
    return output[0][packed.predictors]


def scored_tokens(codec: TextCodec, batch: Batch, max_tokens: int) -> tuple[Ragged, Ragged]:
    """Tokenise prompts and responses by the scoring model's own tokenizer, as tokens and loss mask for `packing.pack`.

    Each sample has one more token at its end, alone under the mask: what "predicts" it is the last token of the exchange.

    Raises:
        EngineError: a batch without texts, or an exchange that exceeds the model's context.
    """
    for name in ("prompt", "text"):
        if name not in batch:
            raise EngineError(f"a reward model scores `prompt` and `text`, and the batch has {', '.join(sorted(batch.columns))}")
    prompts, texts = batch.ragged("prompt"), batch.ragged("text")
    rows = [codec.encode_exchange(cast(Prompt, prompts.item(i)), str(texts.item(i))) for i in range(len(batch))]
    for packed, row in zip(batch.ids.tolist(), rows, strict=True):
        if len(row) > max_tokens:
            raise EngineError(
                f"sample {SampleId.unpack(packed)} has {len(row)} tokens for the reward model, whose context is {max_tokens}",
                now="Generate with a smaller max_new_tokens, or use a reward model with a longer context.",
            )
    tokens = Ragged.of([[*row, 0] for row in rows], np.int32)
    mask = np.zeros(len(tokens.values), np.bool_)
    mask[tokens.offsets[1:] - 1] = True
    return tokens, Ragged(mask, tokens.offsets)
