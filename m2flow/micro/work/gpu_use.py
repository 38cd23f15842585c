"""How busy a worker's GPU is and how much of its memory is taken, by all who use it: NVIDIA's management library, by ctypes.

The library comes with the driver (`libnvidia-ml.so.1`), so no package is needed; without one, or for a device that does not tell
(a slice of a GPU does not say how busy it is), nothing is said.

Source: NVML API reference: nvmlDeviceGetUtilizationRates (the share of the last sampling period, at most a second, in which a kernel ran),
nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import final

LIBRARY = "libnvidia-ml.so.1"


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@final
class GpuUse:
    """Of one device."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> tuple[float | None, int | None]:
        """The share of time in which it was busy lately, 0 to 1; bytes of its memory that are taken. None where it does not say."""
        rates, memory = _Rates(), _Memory()
        has_rates = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)) == 0
        has_memory = self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0
        return rates.gpu / 100 if has_rates else None, int(memory.used) if has_memory else None


def find_gpu(device: str, visible: str | None = None, library: str = LIBRARY) -> GpuUse | None:
    """The GPU that this process calls `device`; None if it is none, or nothing can be asked of it.

    Args:
        visible: what CUDA_VISIBLE_DEVICES says: numbers or UUIDs.
    """
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if not found:
        return None
    position = int(found[1] or 0)
    named = [
        name.strip() for name in (os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible).split(",") if name.strip()
    ]
    name = named[position] if position < len(named) else str(position)
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0:
        return None
    if name.isdecimal():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return GpuUse(nvml, handle) if status == 0 else None
