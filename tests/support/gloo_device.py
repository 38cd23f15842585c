"""One device of Gloo's for all groups of a process.

Each has its own otherwise: a thread that wakes a hundred times a second, and that is waited for when the group ends. Tests make groups, and
end them, by the dozen.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _OnOneDevice(type):
    """Stands where `torch.distributed` looks for Gloo's class: makes a group of that class, on the device, and knows one."""

    made: Any = dist.ProcessGroupGloo
    devices: list[Any] = []  # noqa: RUF012 - one for the process

    def __call__(cls, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        if not cls.devices:
            cls.devices.append(cls.made.create_default_device())
        options = cls.made._Options()
        options._devices, options._timeout = cls.devices, timeout
        return cls.made(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.made)


class _Gloo(metaclass=_OnOneDevice):
    pass


def share_a_device() -> None:
    """From now on, in this process."""
    distributed_c10d.ProcessGroupGloo = _Gloo
