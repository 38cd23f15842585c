"""Engines on a device with little room: the embedded ones, of which one may have so many bytes of keys and values and no more, and the
other train on so many samples at once.

They are registered as a third party's engines would be, by the entry points that `registered` writes. `M2FLOW_TEST_CRAMPED` says how many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from entry_points import write_entry_points
from tiny_models import DIGITS
from torch.utils._python_dispatch import TorchDispatchMode

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, loss, steps
from m2flow.engines.contract import Capabilities, Generated, Objective, Sums
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.registry import EngineInfo
from m2flow.samples import Batch


class Room(TorchDispatchMode):  # type: ignore[misc]
    """Refuses what is asked for beyond so many bytes of keys and values, in the words of PyTorch's allocator."""

    def __init__(self, num_bytes: int, held: Callable[[], int]) -> None:
        super().__init__()
        self._num_bytes, self._held = num_bytes, held
        self.num_refused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_zeros.default and self._held() + result.numel() * result.element_size() > self._num_bytes:
            self.num_refused += 1
            raise _no_room()
        return result


def _no_room() -> RuntimeError:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. Error code 12")


class CrampedRollout(EmbeddedRollout):
    """The embedded engine, in that room."""

    name = "cramped"
    capabilities = Capabilities("rollout", weights_under_requests=True, probes=True)

    def step(self) -> list[Generated]:
        with Room(int(os.environ["M2FLOW_TEST_CRAMPED"]), lambda: self.memory().kv):
            return super().step()


class CrampedTrain(EmbeddedTrain):  # type: ignore[misc]
    """The embedded trainer, which finds out in the middle of a micro-batch that there is no room for it."""

    name = "cramped-train"

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        sums = super().accumulate(batch, objective)
        if len(batch) > int(os.environ["M2FLOW_TEST_CRAMPED"]):
            raise _no_room()
        return sums


CRAMPED = EngineInfo(
    "cramped",
    "cramped:CrampedRollout",
    CrampedRollout.capabilities,
    "The embedded engine with little room for keys and values.",
)
CRAMPED_TRAIN = EngineInfo("cramped-train", "cramped:CrampedTrain", EmbeddedTrain.capabilities, "The embedded trainer with little room.")


def registered(directory: Path, room: int) -> dict[str, str]:
    """Environment of a process that knows these engines."""
    write_entry_points(directory, "cramped", {"cramped": "cramped:CRAMPED", "cramped-train": "cramped:CRAMPED_TRAIN"})
    path = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "M2FLOW_TEST_CRAMPED": str(room)}


LR = 1e-3
_ROOM = "M2FLOW_TEST_ROOM"
"""Tokens that fit, forward and backward."""


class Bounded(torch.autograd.Function):
    """Passes on what it is given; runs out of memory on the way back, if there is too much of it."""

    @staticmethod
    def forward(ctx, values):  # type: ignore[no-untyped-def]
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if len(gradient) > int(os.environ[_ROOM].split()[1]):
            raise MemoryError
        return gradient


@loss(needs=["logprobs", "behaviour_logprobs", "advantages"], denominator="tokens")
def bounded(logprobs, behaviour_logprobs, advantages):  # type: ignore[no-untyped-def]
    if len(logprobs) > int(os.environ[_ROOM].split()[0]):
        raise MemoryError
    return -advantages * (Bounded.apply(logprobs) - behaviour_logprobs).exp()


def odd(sample: Sample) -> float:
    return float(sum(sample.tokens) % 3)


@flow
def learns(num_steps: int = 1) -> None:
    policy, judge = Policy(str(DIGITS), init="random"), Reward(odd)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(16)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=4, max_new_tokens=6)
        policy.update(responses, advantages=judge.score(responses), loss=bounded, minibatch_size=2, optimizer=AdamW(lr=LR))
