"""Load a Hugging Face language model from the local disk, with errors that say what is wrong with it.

    Model(path, init, seed, dtype) --load_model--> PreTrainedModel in eval mode

Never a network look-up, never unpickled weights, never code from the model's directory. Random weights come from a generator of their own,
seeded by `model.seed`: every process draws the same ones, and no other random state changes.

A critic and a reward model have a scalar head, `score`, of Hugging Face's own classes: any checkpoint of a causal language model has the
body of a critic, whose head then starts at zero, and a critic can start from a reward model, head included.

    module's tensor --checkpoint_tensors--> (checkpoint's name, view of it), ...

Rollout engines and files use checkpoints' names. Transformers (5) uses the same for most architectures; for mixtures of experts it stacks
all experts of a layer: `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I], where checkpoints have one tensor for each
expert. `checkpoint_tensors` returns views, so weights are loaded by the same names: a copy into a view is a copy into the stack. Fused
tensors of a serving engine (QKV, gate and up) are that engine's concern: it takes checkpoints' names as well.

Limit: the architectures in `EXPERTS`, each compared with what transformers itself saves (`tests/engines/models/test_checkpoint_names.py`).
Other mixtures keep the module's own names.

Shapes: E experts, I their width, H hidden.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from m2flow.engines.contract import LOADING
from m2flow.engines.models.model_files import brief, config_in, model_directory, silence_transformers
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = {"lm": "AutoModelForCausalLM", "value": "AutoModelForTokenClassification", "score": "AutoModelForSequenceClassification"}
"""Head of a `m2flow.recipe.Model` -> the class of transformers that has it."""

_HEAD = "score."


@dataclass(frozen=True)
class ExpertNames:
    """How checkpoints of an architecture name stacked experts."""

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
    """Yield a checkpoint's tensors for one of the module's, by their names there, as views.

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


_KINDS = {"lm": "causal language model", "value": "model with a value head", "score": "reward model"}


def _prepare_head(model: Any, head: str, missing: list[str], path: str) -> list[str]:
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


def load_model(model: Model, *, device: str, attention: str) -> PreTrainedModel:
    """Load the model with its head (`HEADS`), in eval mode on `device`.

    Args:
        attention: the name of an attention function that transformers knows, or that was registered with it.
    Raises:
        ModelError: the directory is missing, broken, incomplete, or of an architecture that transformers does not know.
        EngineError: there is no such device.
    """
    silence_transformers()
    _check_device(device)
    directory = model_directory(model)
    config = config_in(directory)
    dtype = getattr(torch, model.dtype)
    kind = getattr(transformers, HEADS[model.head])
    if model.head != "lm":
        config.num_labels = 1
    try:
        if model.init == "random":
            with torch.random.fork_rng(devices=[]):
                # Not torch.manual_seed: it would also reseed every accelerator, which fork_rng does not bring back here.
                torch.default_generator.manual_seed(model.seed)
                loaded = kind.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
            _keep_exact(loaded)
            _prepare_head(loaded, model.head, list(loaded.state_dict()), model.path)
        else:
            loaded = _load_weights(directory, model, kind, config, dtype, attention)
    except ModelError:
        raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the weights in {directory} can't be read: {brief(error)}",
            now="Copy *.safetensors again, or pass init='random' to draw new ones.",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"{directory} is not a {_KINDS[model.head]} that this installation can build: {brief(error)}",
            now=f"Check config.json; transformers here is {transformers.__version__}.",
        ) from error
    return loaded.to(device).eval()


def _keep_exact(drawn: Any) -> None:
    """Have the buffers of new weights in float32 that weights which are read have in it: biases of routers, whose steps are small."""
    exact = getattr(drawn, "_keep_in_fp32_modules_strict", None) or ()
    for module in drawn.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and any(part in name for part in exact):
                module._buffers[name] = buffer.float()


def empty_cache(device: str) -> None:
    """Give freed memory of a device back to it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def num_experts(config: Any) -> int:
    """How many experts a layer of the model has by its config; 0: it is no mixture."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def layers(model: Any) -> list[torch.nn.Module]:
    """Find the layers of a model: the blocks that its architecture says must not be split. Empty: it says none."""
    kinds = set(model._no_split_modules or ())
    # FSDP2 gives modules a class of their own, which inherits.
    return [module for module in model.modules() if any(kind.__name__ in kinds for kind in type(module).__mro__)]


def matrices_of_layers(model: Any) -> list[torch.nn.Parameter]:
    """Find the weights of layers that are matrices, or stacks of them: neither embeddings nor heads, norms or biases."""
    return [parameter for layer in layers(model) for parameter in layer.parameters() if parameter.dim() > 1]


def groups_of_weights(model: Any) -> dict[int, str]:
    """Name the group of each parameter, by its id: `layers.0` and so on, `embeddings` (a tied head too), `head`, or `rest`."""
    heads = [model.get_output_embeddings(), getattr(model, "score", None)]
    named = [(f"layers.{i}", layer) for i, layer in enumerate(layers(model))]
    named += [("embeddings", model.get_input_embeddings()), *(("head", head) for head in heads), ("rest", model)]
    found: dict[int, str] = {}
    for name, module in named:
        for parameter in () if module is None else module.parameters():
            found.setdefault(id(parameter), name)
    return found


def use_threads(threads: int, deterministic: bool) -> None:
    """Set this process's number of torch threads and, with `deterministic`, refuse operations whose result may vary from run to run."""
    torch.set_num_threads(max(1, threads))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc allows on 64-bit systems (HEAP_MAX_SIZE / 2); larger blocks still come from mmap and go back when freed."""


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process, whose heap then stays at its peak. False where the C library is another.

    A training step frees and allocates the same few megabytes again and again, and glibc returns large freed blocks at once, whose pages
    the kernel then maps and clears anew. A forward and backward pass of 256 sequences in one micro-batch took 14 % (skewed lengths) to 27 %
    (full length) longer without this, on two cores; in eight micro-batches, nothing.

    Source: mallopt(3).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1),
            mallopt(_M_TOP_PAD, 64 << 20),
        ]
    )


def hold_in(model: Any, dtype: str) -> None:
    """Round the model's weights to another type, as a weight sync does. Tables computed at loading (rotary) are not rounded.

    So weights that are drawn at random are the same numbers as the trainer's, rounded, and not other draws.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)


def _load_weights(directory: Path, model: Model, kind: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    if not list(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} has no weights: no *.safetensors in it",
            now="Copy them there, convert with `model.save_pretrained(path)`, or pass init='random'.",
        )
    with _counting_tensors():
        loaded, info = kind.from_pretrained(
            str(directory),
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    # transformers draws what a checkpoint lacks at random and only warns.
    missing = _prepare_head(loaded, model.head, sorted(info["missing_keys"]), model.path)
    if missing:
        raise ModelError(
            f"the weights in {directory} lack {len(missing)} tensors of the model: {', '.join(missing[:4])}",
            now="The checkpoint is incomplete, or belongs to another config.json.",
        )
    return loaded


@contextlib.contextmanager
def _counting_tensors() -> Iterator[None]:
    """Count what transformers loads (`LOADING`): it passes over the tensors under a progress bar, which others may replace."""

    def bar(make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == "Loading weights" and arguments and hasattr(arguments[0], "__len__"):
            return LOADING.counted(arguments[0])
        return make(*arguments, **options) if before is None else before(make, arguments, options)

    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", None)  # Early versions of transformers 5 have none.
    before = None if set_hook is None else set_hook(bar)
    try:
        yield
    finally:
        if set_hook is not None:
            set_hook(before)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {device!r} can't be used: {brief(error)}", now="Change the device in the cluster spec.") from error
