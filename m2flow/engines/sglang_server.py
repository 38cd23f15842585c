"""An SGLang server as a child of this process.

model directory, arguments --Launch--> python -m sglang.launch_server ... on a free port of the loopback interface
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from m2flow.engines.server_process import Launch, ServerOptions, ServerProcess
from m2flow.engines.sglang_installed import SGLANG

__all__ = ["ServerOptions", "SglangServer"]


@final
class SglangServer(ServerProcess):
    """One server. `start`, then `url`; `check` now and then; `stop` at the end."""

    def __init__(self, directory: Path, arguments: Sequence[str], options: ServerOptions, log: Path) -> None:
        super().__init__(Launch(SGLANG, ("-m", "sglang.launch_server", "--model-path", str(directory), *arguments)), options, log)
