"""Whether trainer and rollout engine have the same weights beside a role's adapters, where these alone are sent.

    trainer.base() --checksums, once--> Manifest.base --with every version--> rollout.base(), compared before the first are added

Both load them from the same place, so nobody sends them. A sum is right only if what is added to is, and that checksums of adapters do
not say.
"""

from __future__ import annotations

from typing import final

import msgspec

from m2flow.channels.weights import Manifest
from m2flow.channels.weights.manifest import TensorEntry, differing, listed
from m2flow.channels.weights.torch_tensors import seen_tensors
from m2flow.engines.contract import RolloutEngine, TrainEngine
from m2flow.errors import EngineError


@final
class SameBase:
    """Of one process, by role."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[TensorEntry, ...]] = {}
        self._compared: set[str] = set()

    def told(self, role: str, manifest: Manifest, engine: TrainEngine) -> Manifest:
        """A publication of a role's adapters, which now says what they are beside."""
        if role not in self._entries:
            found = seen_tensors(engine.base())
            self._entries[role] = tuple(TensorEntry(one.name, one.dtype, one.shape, 0, one.checksum) for one in found)
        return msgspec.structs.replace(manifest, base=self._entries[role])

    def check(self, role: str, manifest: Manifest, engine: RolloutEngine) -> None:
        """Before adapters are added to what an engine holds, the first time. Raises EngineError: it is something else."""
        if role in self._compared:
            return
        wrong, missing = differing(manifest.base, seen_tensors(engine.base()))
        if wrong or missing:
            raise EngineError(
                f"the weights beside the adapters of {role} differ between trainer and rollout: {listed(sorted({*wrong, *missing}))}",
                now="Do both hosts have the same files of the model? `weights: {adapters: added}` in the cluster spec sends whole weights.",
            )
        self._compared.add(role)
