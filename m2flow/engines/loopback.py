"""Keep torch.distributed's Gloo on this host. It neither authenticates nor encrypts, and by default it listens at the address that the
host's name stands for: on a network, everybody's.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping


def keep_gloo_here(environment: MutableMapping[str, str]) -> None:
    """Have Gloo of a process with this environment use the loopback interface, unless the user has named one."""
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
