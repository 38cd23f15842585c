"""Lend weights on a GPU to other processes of the host by CUDA IPC, so that no byte goes through the host's memory.

    trainer.weights() --DeviceWeights.write--> buffers on the trainer's GPU --Manifest: handles, places--> DeviceWeightsReader.read

`CudaIpc` is the transport; the buffers are its stage, so it has no sender. They stay from one version to the next, and so do a reader's
mappings of them. Type conversion and checksums are computed on the GPU.
A reader must have finished before the next `write`, as with shared memory.

Buffers are allocated by the driver and not by torch, whose own IPC keeps a count for one borrower of each loan. A reader maps them on the
owner's GPU, as torch does, also where its engine has another one: a mapping elsewhere would be a copy that goes stale. Memory is
`CudaMemory` except in tests without a GPU, where files take its place. Limit: CUDA IPC needs processes that see the same GPUs under the
same names.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, final

from m2flow.channels.weights.payload import Changes, DeviceBuffer, DeviceLoan, Manifest, TensorEntry, listed, padded
from m2flow.channels.weights.tensors import Tied, checksum_on_device, num_bytes_of, on_device
from m2flow.channels.weights.transport import Bytes, Held, Receiver, Stage, Transport, WeightOptions
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, InternalError

BUFFER_BYTES = 256 << 20
"""Tensors share buffers of this size; a larger one has its own."""


class DeviceMemory(ABC):
    """Allocates memory that another process can map. Tensors are flat, of uint8."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> tuple[Any, bytes]:
        """Allocate a tensor; returns it and the handle by which others map it."""

    @abstractmethod
    def map(self, handle: bytes, num_bytes: int) -> Any:
        """Map another process's memory. Raises `ChannelError`: it is gone."""

    @abstractmethod
    def free(self, tensor: Any) -> None:
        """Free a tensor of `allocate`."""

    @abstractmethod
    def unmap(self, tensor: Any) -> None:
        """Unmap a tensor of `map`."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the device has finished everything that was submitted."""


OpenMemory = Callable[[str], DeviceMemory]
"""Opens a device's memory by the device's name."""


@final
class DeviceWeights(Stage):
    """Stages versions on the device of the first tensor that is written, and lends them. One thread."""

    def __init__(self, open_memory: OpenMemory) -> None:
        self._open_memory = open_memory
        self._memory: DeviceMemory | None = None
        self._device = ""
        self._buffers: list[tuple[Any, bytes]] = []
        self._is_closed = False

    def write(
        self, tensors: Iterable[tuple[str, Any]], *, version: int = -1, dtype: str | None = None, changes: Changes | None = None
    ) -> Manifest:
        """Copy torch tensors in, over the last version. Of a `Tied` only the name is kept; nothing is compared."""
        if self._is_closed:
            raise ChannelClosed("the weights on the device are closed")
        entries: dict[str, TensorEntry] = {}
        tied: dict[str, str] = {}
        places: list[tuple[int, int]] = []
        buffer, offset, total = -1, 0, 0
        for name, tensor in on_device(tensors, dtype):
            if name in entries or name in tied:
                raise ChannelError(f"tensor {name!r} comes twice")
            if isinstance(tensor, Tied):
                tied[name] = tensor.to
                continue
            if self._memory is None:
                self._device = str(tensor.device)
                self._memory = self._open_memory(self._device)
            source = tensor.contiguous().reshape(-1)
            size = source.numel() * source.element_size()
            while buffer < 0 or offset + padded(size) > len(self._buffers[buffer][0]):
                buffer, offset = buffer + 1, 0
                if buffer == len(self._buffers):
                    self._buffers.append(self._memory.allocate(max(BUFFER_BYTES, padded(size))))
            target = self._buffers[buffer][0][offset : offset + size]
            if size:
                target.view(source.dtype).copy_(source)
            kind = str(tensor.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(name, kind, tuple(tensor.shape), total, checksum_on_device(target))
            places.append((buffer, offset))
            offset, total = offset + padded(size), total + padded(size)
        if self._memory is not None:
            self._memory.finish()
        lent = tuple(DeviceBuffer(handle, len(memory)) for memory, handle in self._buffers)
        return Manifest(
            "", total, tuple(entries.values()), version, tuple(tied.items()), lent=DeviceLoan(self._device, lent, tuple(places))
        )

    def body(self, num_bytes: int) -> Bytes:
        raise InternalError("weights on a device were to be sent from the host's memory")

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        self._is_closed = True
        for tensor, _ in self._buffers:
            assert self._memory is not None
            self._memory.free(tensor)
        self._buffers.clear()


@final
class DeviceWeightsReader(Receiver):
    """Maps and reads lent weights; keeps its mappings from one `read` to the next. One thread."""

    def __init__(self, open_memory: OpenMemory) -> None:
        self._open_memory = open_memory
        self._memory: DeviceMemory | None = None
        self._device = ""
        self._mapped: dict[bytes, Any] = {}

    def receive(self, manifest: Manifest, held: Held | None, verify: Collection[str] | None) -> Iterator[tuple[str, Any]]:
        self.num_bytes = manifest.num_bytes
        return self.read(manifest, verify=verify is None or len(verify) > 0)

    def read(self, manifest: Manifest, *, verify: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield the tensors under all of their names, as views of the owner's buffers: read-only, valid until its next `write`.

        Args:
            verify: all are verified before the first is given.
        Raises:
            ChannelError: the buffers are gone, or tensors differ from what was written; they are named.
            DecodeError: a manifest that does not fit its buffers.
        """
        loan = manifest.lent
        if loan is None or len(loan.places) != len(manifest.tensors):
            raise DecodeError("a manifest that does not say where on a device its tensors lie")
        memory = self._memory_of(loan)
        for handle in self._mapped.keys() - {buffer.handle for buffer in loan.buffers}:
            memory.unmap(self._mapped.pop(handle))
        parts = [(entry, self._part(memory, entry, loan, *place)) for entry, place in zip(manifest.tensors, loan.places, strict=True)]
        wrong = [entry.name for entry, raw in parts if checksum_on_device(raw) != entry.checksum] if verify else []
        if wrong:
            raise ChannelError(
                f"{len(wrong)} of {len(parts)} tensors on {loan.device} are not what was written: {listed(wrong)}",
                now="Either they were written over while they were read, or memory is faulty. Please report this run.",
            )
        return _named(manifest, parts, memory)

    def close(self) -> None:
        """Unmap the buffers, which invalidates views that were given out. May be called twice."""
        for tensor in self._mapped.values():
            assert self._memory is not None
            self._memory.unmap(tensor)
        self._mapped.clear()

    def _memory_of(self, loan: DeviceLoan) -> DeviceMemory:
        if self._memory is None or self._device != loan.device:
            self.close()
            self._memory, self._device = self._open_memory(loan.device), loan.device
        return self._memory

    def _part(self, memory: DeviceMemory, entry: TensorEntry, loan: DeviceLoan, number: int, offset: int) -> Any:
        if not 0 <= number < len(loan.buffers) or offset < 0 or offset % 64 or offset + entry.num_bytes > loan.buffers[number].num_bytes:
            raise DecodeError(f"tensor {entry.name!r} of shape {entry.shape} at {offset:,} does not fit buffer {number}")
        buffer = loan.buffers[number]
        if buffer.handle not in self._mapped:
            self._mapped[buffer.handle] = memory.map(buffer.handle, buffer.num_bytes)
        return self._mapped[buffer.handle][offset : offset + entry.num_bytes]


def _named(manifest: Manifest, parts: Iterable[tuple[TensorEntry, Any]], memory: DeviceMemory) -> Iterator[tuple[str, Any]]:
    import torch

    others: dict[str, list[str]] = {}
    for name, to in manifest.tied:
        others.setdefault(to, []).append(name)
    for entry, raw in parts:
        num_bytes_of(entry.name, entry.dtype, entry.shape)
        tensor = raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)
        for name in (entry.name, *others.get(entry.name, ())):
            yield name, tensor
    memory.finish()  # Copies out of the buffers must have ended before their owner hears that it may write again.


class _Handle(ctypes.Structure):
    """`CUipcMemHandle` of cuda.h, which goes by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _OnDevice:
    """Device memory in the form that torch adopts without a copy (`__cuda_array_interface__`)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@final
class CudaMemory(DeviceMemory):
    """A GPU's memory, lent by CUDA IPC.

    Source: CUDA driver API, cuMemAlloc, cuIpcGetMemHandle, cuIpcOpenMemHandle.
    """

    _LAZY_PEER_ACCESS = 1

    def __init__(self, device: str) -> None:
        self._device = device
        self._driver: ctypes.CDLL | None = None

    def allocate(self, num_bytes: int) -> tuple[Any, bytes]:
        address, handle = ctypes.c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return self._tensor(address.value, num_bytes), ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle))

    def map(self, handle: bytes, num_bytes: int) -> Any:
        if len(handle) != ctypes.sizeof(_Handle):
            raise DecodeError(f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(self._LAZY_PEER_ACCESS))
        return self._tensor(address.value, num_bytes)

    def free(self, tensor: Any) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(tensor.data_ptr()))

    def unmap(self, tensor: Any) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(tensor.data_ptr()))

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def _tensor(self, address: int, num_bytes: int) -> Any:
        import torch

        tensor = torch.as_tensor(_OnDevice(address, num_bytes), device=self._device)
        if tensor.data_ptr() != address:
            raise ChannelError(
                f"memory lent by another process is not on {self._device} here, where its owner has it",
                now="Let all workers of a host see the same GPUs, or leave `transport: cuda ipc` out of the cluster spec.",
            )
        return tensor

    def _call(self, name: str, *arguments: object) -> None:
        import torch

        with torch.cuda.device(self._device):
            torch.zeros(1, device=self._device)  # torch makes the context that the driver then works in, current in this thread.
            self._driver = self._driver or ctypes.CDLL("libcuda.so.1")
            code = int(getattr(self._driver, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise ChannelError(f"{name} on {self._device}: {(text.value or b'error').decode()} ({code})")


@final
class CudaIpc(Transport):
    """Receivers on the same host map the trainer's buffers on its GPU.

    Args:
        open_memory: opens a device's memory.
    """

    stage_class = DeviceWeights
    is_in_place = True
    needs_gpu = True
    takes_adapters = False

    def __init__(self, open_memory: OpenMemory = CudaMemory) -> None:
        self._open_memory = open_memory

    def stage(self, name: str) -> DeviceWeights:
        return DeviceWeights(self._open_memory)

    def sender(self, name: str, options: WeightOptions) -> None:
        return None

    def receiver(self, worker: str, options: WeightOptions) -> DeviceWeightsReader:
        return DeviceWeightsReader(self._open_memory)
