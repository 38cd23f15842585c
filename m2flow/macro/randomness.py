"""The generators of random numbers that a flow's own Python uses: Python's, numpy's, and torch's if the program has loaded it."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator


def loaded_torch() -> types.ModuleType | None:
    """Torch, if the program has loaded it. Another thread may be about to (TensorBoard's writer does); then it is no one's yet."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def seed_everything(seed: int) -> None:
    """Seed the generators that a flow's Python may use. Torch only if the flow has loaded it."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = loaded_torch()
    if torch is None:
        return
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)  # `manual_seed` would write down the stack for each kind of device that is not here.
    else:
        torch.manual_seed(seed)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    """Work in the flow's own process, by engines and users' functions, that leaves the flow's generators as they were."""
    import numpy as np

    states, torch = (random.getstate(), np.random.get_state()), loaded_torch()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(torch_state)
