"""The environment of an engine's process: the GPUs that it sees, and Gloo kept on this host.

"cuda:1", 2 of "4,5,7" --> 5, 7
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

from m2flow.errors import EngineError


def keep_gloo_here(environment: MutableMapping[str, str]) -> None:
    """Have Gloo of a process with this environment use the loopback interface, unless the user has named one."""
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def gpus_from(device: str, count: int, seen: str, *, whose: str) -> list[str]:
    """The names of so many GPUs: the device's own and those after it, as in `CUDA_VISIBLE_DEVICES`.

    Args:
        seen: GPUs that there are, as in `CUDA_VISIBLE_DEVICES`; empty: all of the machine.
        whose: for the error: `train-0 has 2 ranks`.
    Raises:
        EngineError: there are not so many.

    >>> gpus_from("cuda:1", 2, "4,5,7", whose="train-0 has 2 ranks")
    ['5', '7']
    """
    first = int(device.partition(":")[2] or 0)
    names = [name.strip() for name in seen.split(",")] if seen else [str(number) for number in range(first + count)]
    if first + count > len(names):
        raise EngineError(f"{whose} from {device} on, and of GPUs there are {len(names)} (CUDA_VISIBLE_DEVICES={seen})")
    return names[first : first + count]
