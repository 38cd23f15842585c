"""What the rollout engine sglang needs of SGLang, and what else a release may have."""

from __future__ import annotations

from m2flow.engines import server_installed
from m2flow.engines.server_installed import RELEASES, Installed, Product

SGLANG = Product(
    name="SGLang",
    engine="sglang",
    oldest="0.5.20",
    needed={
        "generation by token ids": ("/generate",),
        "streaming of new tokens alone": ("incremental_streaming_output",),
        "abort of one request": ("/abort_request",),
        "pause and continue": ("/pause_generation", "/continue_generation"),
        "weights from files": ("/update_weights_from_disk",),
        "weight versions by token": ("weight_versions",),
    },
    further={
        RELEASES: ("/release_memory_occupation", "/resume_memory_occupation"),
        "weights from tensors": ("/update_weights_from_tensor",),
        "weights from a group": ("/update_weights_from_distributed",),
        "checksums of the weights held": ("/weights_checker",),
        "routed experts": ("return_routed_experts",),
        "seeds by token": ("sampling_seed",),
    },
    sources=("srt/entrypoints/http_server.py", "srt/managers/*.py", "srt/sampling/*.py"),
    saver="torch_memory_saver",
)
NEEDED = SGLANG.needed


def installed(python: str) -> Installed:
    """What an interpreter (empty: this one) has. See `m2flow.engines.server_installed`."""
    return server_installed.installed(SGLANG, python)


def check_version(python: str) -> str:
    """The version in an interpreter, if it has all that is needed. See `m2flow.engines.server_installed`."""
    return server_installed.check_version(SGLANG, python)
