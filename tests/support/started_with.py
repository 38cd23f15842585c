"""What an engine starts its server with: seen by an interpreter that is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import CONFIGS, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.servers.served_rollout import ServedRollout
from m2flow.errors import EngineError


def engine_with(
    kind: type[ServedRollout], needed: Mapping[str, tuple[str, ...]], place: Path, command: str, settings: EngineSettings
) -> ServedRollout:
    """An engine whose server is a command of a shell."""
    fake = place / "python"
    said = json.dumps({"version": "99", "words": [word for found in needed.values() for word in found], "saver": True})
    fake.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{said}'; else {command}; fi\n")
    fake.chmod(0o755)
    (place / "model").mkdir()
    return kind(write_model(place / "model", CONFIGS["qwen2"]()), replace(settings, options={**settings.options, "python": str(fake)}))


def started_with(
    kind: type[ServedRollout], needed: Mapping[str, tuple[str, ...]], place: Path, settings: EngineSettings
) -> tuple[list[str], str]:
    """The arguments, and the GPUs that it sees.

    Args:
        needed: what the engine looks for in its server's source.
    """
    written = place / "arguments"
    engine = engine_with(kind, needed, place, f'printf \'%s\\n\' "$CUDA_VISIBLE_DEVICES" "$@" > {written}; exit 3', settings)
    try:
        with pytest.raises(EngineError, match="ended with status 3"):
            engine.start()
    finally:
        engine.stop()
    gpus, *arguments = written.read_text().splitlines()
    return arguments, gpus
