"""The embedded rollout engine on rounded weights: a mismatch between rollout and trainer made on purpose.

Each matrix that arrives is rounded to `bits` bits, with a scale for each row, and held in float32: what an engine on int8 or int4
weights computes, at the speed of float32. `registered` writes the entry point by which m2flow finds it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from m2flow.engines.contract import Capabilities, EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.registry import EngineInfo
from m2flow.recipe import Model


class RoundedRollout(EmbeddedRollout):  # type: ignore[misc]
    """Samples with rounded matrices. The option `bits`, by default 8, is their precision."""

    name = "rounded"
    capabilities = Capabilities("rollout")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        options = dict(settings.options)
        self._bits = int(str(options.pop("bits", 8)))
        super().__init__(model, dataclasses.replace(settings, options=options))

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        given = ((name, rounded(tensor, self._bits) if tensor.dim() > 1 else tensor) for name, tensor in tensors)
        super().load_weights(given, version, under_requests=under_requests)

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Only what is not rounded: the rest is not what the trainer sent."""
        return ((name, tensor) for name, tensor in super().weights() if tensor.dim() == 1)


def rounded(matrix: Tensor, bits: int) -> Tensor:
    """Round to 2^bits - 1 values between the largest entry of each row and its negative."""
    scale = matrix.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (matrix / scale).round() * scale


INFO = EngineInfo("rounded", "rounded:RoundedRollout", RoundedRollout.capabilities, "The embedded engine on rounded weights.")


def registered(directory: Path) -> dict[str, str]:
    """The environment of a process that knows the engine."""
    metadata = directory / "rounded-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rounded\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[m2flow.engines]\nrounded = rounded:INFO\n")
    path = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
