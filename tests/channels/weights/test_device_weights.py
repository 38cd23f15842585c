"""Weights lent where they lie on a device: files take the device's place here, so that all but the driver's part runs without a GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from device_files import file_memory

from m2flow.channels.weights import Manifest, device
from m2flow.channels.weights.device import CudaMemory, DeviceWeights, DeviceWeightsReader
from m2flow.channels.weights.tensors import Tied, checksum, mark_tied
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, PlanError
from m2flow.micro.lowering.passes import plan_syncs
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.spec import WeightsSpec


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(device, "BUFFER_BYTES", 1 << 12)


def model(seed: int) -> list[tuple[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    tensors = [(f"layers.{i}", torch.randn(7 * i + 1, 33, generator=made).to(torch.bfloat16)) for i in range(6)]
    return [*tensors, ("embed", torch.randn(50, 60, generator=made)), ("empty", torch.zeros(0, 4)), ("step", torch.tensor(3))]


def sent(manifest: Manifest) -> Manifest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)


def test_tensors_come_as_they_were_version_after_version_in_the_same_buffers(tmp_path):
    weights, reader = DeviceWeights(file_memory(tmp_path)), DeviceWeightsReader(file_memory(tmp_path))
    lent = []
    for version in range(3):
        tensors = model(version)
        manifest = sent(weights.write(tensors, version=version))
        lent.append(manifest.lent.buffers)
        got = dict(reader.read(manifest))
        assert got.keys() == dict(tensors).keys()
        assert all(got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in tensors)
    assert lent[0] == lent[1] == lent[2]
    assert len(lent[0]) > 2
    reader.close()
    weights.close()
    with pytest.raises(ChannelClosed):
        weights.write(model(0))


def test_tied_tensors_are_lent_once_and_named_twice(tmp_path):
    embed = torch.randn(5, 6)
    weights, reader = DeviceWeights(file_memory(tmp_path)), DeviceWeightsReader(file_memory(tmp_path))
    manifest = weights.write(mark_tied([("embed", embed), ("head", embed)]))
    assert [entry.name for entry in manifest.tensors] == ["embed"]
    assert {name: torch.equal(tensor, embed) for name, tensor in reader.read(manifest)} == {"embed": True, "head": True}
    with pytest.raises(ChannelError, match="comes twice"):
        weights.write([("a", embed), ("a", Tied("embed"))])


def test_what_was_written_over_is_named(tmp_path):
    weights, reader = DeviceWeights(file_memory(tmp_path)), DeviceWeightsReader(file_memory(tmp_path))
    old = weights.write(model(0))
    weights.write([(name, tensor + 1 if name == "layers.3" else tensor) for name, tensor in model(0)])
    with pytest.raises(ChannelError, match=r"1 of 9 tensors on cpu .*: layers\.3"):
        reader.read(old)
    assert len(list(reader.read(old, verify=False))) == 9


def test_a_manifest_that_does_not_fit_its_buffers_is_refused(tmp_path):
    weights, reader = DeviceWeights(file_memory(tmp_path)), DeviceWeightsReader(file_memory(tmp_path))
    manifest = weights.write(model(0))
    places = manifest.lent.places
    for wrong in (((9, 0), *places[1:]), ((0, 1 << 40), *places[1:]), ((0, 3), *places[1:]), ((-1, 0), *places[1:]), places[1:]):
        loan = msgspec.structs.replace(manifest.lent, places=wrong)
        with pytest.raises(DecodeError):
            reader.read(msgspec.structs.replace(manifest, lent=loan))
    with pytest.raises(DecodeError):
        reader.read(msgspec.structs.replace(manifest, lent=None))


def test_a_trainer_that_was_started_again_is_read_from_its_new_buffers(tmp_path):
    """Mappings of a device that was given up are dropped, of another device too."""
    reader = DeviceWeightsReader(file_memory(tmp_path))
    for seed in range(2):
        with contextlib.closing(DeviceWeights(file_memory(tmp_path))) as weights:
            manifest = weights.write(model(seed), version=1)
            for named in ("cpu", f"cuda:{seed}"):
                loan = msgspec.structs.replace(manifest.lent, device=named)
                got = dict(reader.read(msgspec.structs.replace(manifest, lent=loan)))
                assert all(torch.equal(got[name], tensor) for name, tensor in model(seed))


def test_another_process_reads_weights_through_handles_version_after_version(tmp_path):
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "device_files.py")]
    with (
        contextlib.closing(DeviceWeights(file_memory(tmp_path))) as weights,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        for version in (1, 2):
            manifest = weights.write(model(version), version=version)
            other.stdin.write(msgspec.msgpack.encode(manifest).hex() + "\n")
            other.stdin.flush()
            assert msgspec.json.decode(other.stdout.readline()) == {name: tensor.float().sum().item() for name, tensor in model(version)}
        other.stdin.close()
        assert other.wait() == 0


def test_a_plan_lends_weights_between_gpus_alone():
    slots = (EngineSlot("policy", "train", "embedded"),), (EngineSlot("policy", "rollout", "embedded"),)
    spec = WeightsSpec(transport="cuda ipc")

    def workers(*devices: str) -> tuple[WorkerPlan, ...]:
        return tuple(WorkerPlan(name, device, 1, slot) for name, device, slot in zip(("train-0", "rollout-0"), devices, slots, strict=True))

    (sync,) = plan_syncs(workers("cuda:0", "cuda:1"), spec)
    assert (sync.source, sync.target, sync.transport) == ("train-0", "rollout-0", "cuda ipc")
    with pytest.raises(PlanError, match=r"by cuda ipc, and rollout-0 .*cpu"):
        plan_syncs(workers("cuda:0", "cpu"), spec)
    assert plan_syncs(workers("cuda:0", "cuda:1"), WeightsSpec())[0].transport == "shared memory"


OTHER = """
import sys, msgspec, torch
from m2flow.channels.weights import Manifest
from m2flow.channels.weights.device import CudaMemory, DeviceWeightsReader
manifest = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Manifest)
reader = DeviceWeightsReader(CudaMemory)
got = {name: tensor.float().sum().item() for name, tensor in reader.read(manifest)}
reader.close()
print(msgspec.json.encode(got).decode())
"""


@pytest.mark.gpu
def test_another_process_reads_weights_from_the_gpu() -> None:
    tensors = [(name, tensor.cuda()) for name, tensor in model(0)]
    weights = DeviceWeights(CudaMemory)
    manifest = weights.write(tensors, version=1)
    for (name, tensor), entry in zip(tensors, manifest.tensors, strict=True):
        assert (name, checksum(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())) == (entry.name, entry.checksum)
    done = subprocess.run(
        [sys.executable, "-c", OTHER], input=msgspec.msgpack.encode(manifest).hex() + "\n", capture_output=True, text=True, check=True
    )
    assert msgspec.json.decode(done.stdout) == {name: tensor.float().sum().item() for name, tensor in tensors}
    weights.close()
