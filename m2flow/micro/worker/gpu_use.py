"""Read how busy a GPU is and how much of its memory is in use, by all processes, from NVIDIA's management library by ctypes.

The driver brings the library (`libnvidia-ml.so.1`), so no package is needed. Without it, or for a device that does not tell (a MIG slice
has no utilisation), nothing is read.

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
    """Read utilisation and memory of one GPU by NVML."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> tuple[float | None, int | None]:
        """Return the share of recent time in which it was busy, 0 to 1, and bytes of memory in use; None where it does not tell."""
        rates, memory = _Rates(), _Memory()
        has_rates = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)) == 0
        has_memory = self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0
        return rates.gpu / 100 if has_rates else None, int(memory.used) if has_memory else None


def find_gpu(device: str, visible: str | None = None, library: str = LIBRARY) -> GpuUse | None:
    """Find the GPU that this process calls `device`; None if it is no GPU, or NVML can't be asked.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None: this process's.
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
