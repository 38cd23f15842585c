"""The names that Hugging Face checkpoints have, for models that transformers holds otherwise.

    module's tensor --checkpoint_tensors--> (checkpoint's name, view of it), ...

Rollout engines and files know the names of checkpoints. Transformers (5) holds the same for most architectures, and for mixtures of experts
stacks of all experts of a layer: `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I]; checkpoints have one tensor for
each expert. All that comes out is a view, so weights go in by the same names: a copy into a view is a copy into the stack.

Fused tensors of a serving engine (QKV, gate and up) are that engine's affair: it takes checkpoints' names as well.

Limit: the architectures in `EXPERTS`, each held against what transformers itself saves (`tests/test_hf_names.py`). Of other mixtures the
module's own names come out.

Shapes: E experts, I their width, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ExpertNames:
    """How checkpoints of an architecture name what is stacked."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


EXPERTS: dict[str, ExpertNames] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "glm4_moe"), ExpertNames()),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}
"""By `model_type`."""


def checkpoint_tensors(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has for one of the module's tensors, under the names there; views of it.

    Args:
        model: the transformers model; its config says which architecture it is.
        tensor: whole, also where ranks share it.
    """
    experts = EXPERTS.get(getattr(model.config.get_text_config(), "model_type", ""))
    if experts is None:
        yield name, tensor
        return
    name = name.replace(".mlp.", f".{experts.block}.") if experts.block != "mlp" else name
    stem, _, last = name.rpartition(".")
    if tensor.ndim != 3 or not stem.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for number, of_one in enumerate(tensor.unbind(0)):
        if last == "down_proj":
            yield f"{stem}.{number}.{experts.down}.weight", of_one
        else:
            gate, up = of_one.chunk(2, 0)
            yield f"{stem}.{number}.{experts.gate}.weight", gate
            yield f"{stem}.{number}.{experts.up}.weight", up
