"""The trainer `megatron` without a GPU, as an engine `megatron-cpu` of a third party, by the entry point that `registered` writes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import cpu_as_cuda
from entry_points import write_entry_points

cpu_as_cuda.pretend()

from m2flow.engines.distributed.ranks import stopping_if_it_fails  # noqa: E402
from m2flow.engines.megatron import library  # noqa: E402
from m2flow.engines.megatron.parts import Parts  # noqa: E402
from m2flow.engines.megatron.trainer import MegatronTrain  # noqa: E402
from m2flow.engines.registry import EngineInfo  # noqa: E402
from m2flow.recipe import Optimizer  # noqa: E402


class MegatronOnCpu(MegatronTrain):  # type: ignore[misc]
    """Megatron-core where the CPU passes for a GPU."""

    name = "megatron-cpu"
    capabilities = replace(MegatronTrain.capabilities, devices=("cpu",))


class Joined(MegatronOnCpu):
    """Has joined the ranks of its layout, and has no model. Trainers that start beside it, as those of a worker, share its groups."""

    @stopping_if_it_fails
    def start(self) -> None:
        self._ranks.open(leave=library.Groups.leave)
        self._groups = library.Groups.join(self._options)


INFO = EngineInfo("megatron-cpu", "megatron_on_cpu:MegatronOnCpu", MegatronOnCpu.capabilities, "Megatron-core on a CPU, for tests.")


def registered(directory: Path) -> dict[str, str]:
    """Environment of a process that knows this engine."""
    write_entry_points(directory, "megatron_on_cpu", {"megatron-cpu": "megatron_on_cpu:INFO"})
    path = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


class WritesAsMegatron(MegatronOnCpu):
    """Saves its weights as a training script of Megatron's own does: by `dist_checkpointing`, in the format torch_dist."""

    forms: ClassVar[dict[str, bool]] = {}
    """What it asks for beyond that: `non_homogeneous_layers`, `singleton_local_shards`."""

    def save(self, directory: str) -> None:
        from megatron.core import dist_checkpointing

        Path(directory).mkdir(exist_ok=True)
        multiprocessing.current_process()._config["daemon"] = False  # It writes in processes, which a daemon may not start.
        chunks = {f"model{i}": chunk.module for i, chunk in enumerate(self._built.chunks)}
        dist_checkpointing.save({name: part.sharded_state_dict(metadata=dict(self.forms)) for name, part in chunks.items()}, directory)


class WritesEachLayer(WritesAsMegatron):
    """Its layers and experts are tensors of their own, and so are gates."""

    forms: ClassVar[dict[str, bool]] = {"non_homogeneous_layers": True, "singleton_local_shards": True}


class CountsEverywhere(MegatronOnCpu):
    """Takes each weight into the norm on every rank that has it, as if all were split."""

    def _stepped(self) -> Parts:
        found = super()._stepped()
        found._counts = dict.fromkeys(found._counts, True)
        return found


class BatchedSends(MegatronOnCpu):
    """Sends between interleaved stages in batches."""

    def start(self) -> None:
        kept = library._sends
        library._sends = lambda is_interleaved: kept(False)
        try:
            super().start()
        finally:
            library._sends = kept


class SteppedOnHost(MegatronOnCpu):
    """Says, at each step, that nothing which the optimiser keeps or changes is memory of the weights, of gradients, or of what leaves the
    device: on a GPU it is then the host's."""

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        found = super().apply(optimizer, denominator)
        assert self._built is not None
        buffers = [one for buffer in self._built.buffers for one in (buffer.param_data, buffer.grad_data) if one is not None]
        of_device = {one.untyped_storage().data_ptr() for one in (*buffers, *self._built.parameters.values())}
        kept = [*self._parts.tensors(), *self._parts._staged.values(), *self._parts.client.parts]
        assert len(kept) == 5 * len(self._parts.parts)  # A copy, its gradient, two moments; and what is stepped: the copy again.
        assert not of_device & {one.untyped_storage().data_ptr() for one in kept}
        return found

    def offload_states(self) -> None:
        super().offload_states()
        assert all(one.untyped_storage().nbytes() for one in self._parts.tensors())
