"""What an SGLang server is started with.

EngineSettings (the plan's), ServedOptions (the cluster spec's), Model --> arguments of sglang.launch_server
"""

from __future__ import annotations

from m2flow.engines.contract import EngineSettings
from m2flow.engines.served_options import ServedOptions
from m2flow.recipe import Model

OWN_OPTIONS = ("deterministic_inference", "routed_experts")
"""Beyond those that all rollout engines with a server have."""


def server_arguments(settings: EngineSettings, options: ServedOptions, model: Model, version: int) -> list[str]:
    """Those before the user's own `args`, of which the last ones count.

    Args:
        version: of the weights that it begins with.
    """
    device, _, index = settings.device.partition(":")
    given = ["--device", device, "--dtype", model.rollout_dtype or model.dtype, "--weight-version", str(version)]
    given += ["--incremental-streaming-output", "--stream-interval", str(options.stream_interval)]
    given += ["--max-running-requests", str(settings.max_running), "--skip-server-warmup"]
    given += ["--base-gpu-id", index] if index else []
    for name, degree in (("--tp-size", settings.tp), ("--pp-size", settings.pp), ("--ep-size", settings.ep)):
        given += [name, str(degree)] if degree > 1 else []
    given += ["--enable-deterministic-inference"] if options.is_set("deterministic_inference") else []
    given += ["--enable-return-routed-experts"] if options.is_set("routed_experts") else []
    return given if device == "cpu" else [*given, "--enable-memory-saver"]
