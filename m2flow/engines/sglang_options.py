"""What the rollout engine sglang is told, in the words of the server that it starts.

EngineSettings (the plan's), their `options` (the cluster spec's), Model --> arguments of sglang.launch_server, ServerOptions
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from m2flow.engines.contract import EngineSettings
from m2flow.engines.sglang_server import ServerOptions
from m2flow.errors import EngineError
from m2flow.recipe import Model

_NAMES = (
    *("python", "args", "env", "start_timeout_s", "url", "deterministic_inference", "stream_interval", "weights_dir"),
    *("restarts", "hung_after_s", "keep_kv", "routed_experts"),
)


def check_names(options: Mapping[str, object]) -> None:
    """Raises `EngineError`: one is not of this engine."""
    if unknown := sorted(set(options) - set(_NAMES)):
        raise EngineError(f"the rollout engine sglang has no option {', '.join(unknown)}", now=f"It has {', '.join(_NAMES)}.")


def number(options: Mapping[str, object], name: str, default: float) -> float:
    value = options.get(name, default)
    if not isinstance(value, int | float) or value < 0:
        raise EngineError(f"the option {name} of the rollout engine sglang is {value!r}; it must be a number from 0 on")
    return float(value)


def server_options(options: Mapping[str, object]) -> ServerOptions:
    timeout = number(options, "start_timeout_s", ServerOptions.start_timeout_s)
    python, args, env = (str(options.get(name, "")) for name in ("python", "args", "env"))
    return ServerOptions(str(Path(python).expanduser()) if python else "", args, env, timeout)


def server_arguments(settings: EngineSettings, model: Model, version: int) -> list[str]:
    """Those before the user's own `args`, of which the last ones count.

    Args:
        version: of the weights that it begins with.
    """
    options = settings.options
    device, _, index = settings.device.partition(":")
    given = ["--device", device, "--dtype", model.rollout_dtype or model.dtype, "--weight-version", str(version)]
    given += ["--incremental-streaming-output", "--stream-interval", str(options.get("stream_interval", 8))]
    given += ["--max-running-requests", str(settings.max_running), "--skip-server-warmup"]
    given += ["--base-gpu-id", index] if index else []
    for name, degree in (("--tp-size", settings.tp), ("--pp-size", settings.pp), ("--ep-size", settings.ep)):
        given += [name, str(degree)] if degree > 1 else []
    given += ["--enable-deterministic-inference"] if options.get("deterministic_inference") else []
    given += ["--enable-return-routed-experts"] if options.get("routed_experts") else []
    return given if device == "cpu" else [*given, "--enable-memory-saver"]


def weights_place(options: Mapping[str, object]) -> str | None:
    """Where weights are written for the server; None: where temporary files are."""
    if given := str(options.get("weights_dir", "")):
        return given
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
