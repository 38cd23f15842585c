"""What SGLang itself must be told on a CPU (entry point `sglang.srt.plugins`): seeded sampling on the plain attention backend."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in each of its processes."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda *_, **__: None, HookType.REPLACE)
    # Routed experts are returned through a buffer that would be pinned for CUDA.
    pinning = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(pinning, lambda buffer, registration_granularity_bytes=None: None, HookType.REPLACE)
