"""Send passes through the stages of a pipeline, and their gradients back: 1F1B, interleaved, and without most of the bubble.

    stage 0:  rows --embeddings, layers--> hidden states --sent--> stage 1: layers --> ... --> the last: norm, head, loss
              its gradient  <--------------- sent back ----------  1F1B: a stage has a pass in flight for itself and for each stage after it

`Line` is the order of sends, on one rank; `PutOff` the gradients of weights that are computed where a stage would wait.

Source: 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), with the order of its interleaved schedule; zero bubble: Qi et al.
2023, arXiv:2401.10241, ZB-H1, with the weights' gradients put off layer by layer. PyTorch's own schedules
(torch.distributed.pipelining) want passes of one shape.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from m2flow.engines.distributed.guard import Guard, is_of_a_collective
from m2flow.engines.distributed.model_parallel import own_weights
from m2flow.engines.distributed.ranks import Ranks
from m2flow.engines.distributed.sequence_parallel import reduce_scatter
from m2flow.engines.models.trainer_checkpoint import local

_P = TypeVar("_P")


def turns(num_passes: int, count: int, chunks: int) -> list[tuple[int, int]]:
    """The order in which each stage computes passes: as many as there are stages through each of its chunks, then the next ones.

    Returns:
        The number of the pass and that of the chunk.

    >>> turns(4, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    """
    groups = [range(first, min(first + count, num_passes)) for first in range(0, num_passes, count)]
    return [(i, chunk) for group in groups for chunk in range(chunks) for i in group]


class Line(Generic[_P]):
    """This rank's place in a pipeline: the ranks that see the same samples, one of each stage.

    Args:
        stages: the group of those ranks, in the order of stages.
        chunks: parts of the model that each of them has; a pass goes through the first of all, then through the second of all.
        spreads: whether a pass has collectives within the stage. What fails outside the parts that `Guard` keeps leaves the others of the
            stage waiting then, so it ends the rank; otherwise the others go on with zeros in its place, until all hear of it.
    """

    def __init__(self, ranks: Ranks, stages: Any, device: str, *, chunks: int = 1, spreads: bool) -> None:
        self.group, self._device, self._spreads, self._ranks = stages, device, spreads, ranks
        self.members = dist.get_process_group_ranks(stages)
        self.stage, self.count, self.chunks = int(dist.get_rank(stages)), len(self.members), chunks
        self.chunk = 0
        """The one that is being computed."""
        self._down = self._up = self._down_again = self._up_again = stages
        size = ranks.count // self.count
        lines = [list(range(first, ranks.count, size)) for first in range(size)]
        if chunks > 1 or torch.device(device).type == "cuda":
            # Sends that cross wait for each other in one communicator, and two from one rank to another must be told apart.
            self._down, self._up = ranks.among(lines), ranks.among(lines)
        if chunks > 1:  # From the last stage to the first one's next chunk, and back.
            self._down_again, self._up_again = ranks.among(lines), ranks.among(lines)
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}
        self.failure: Exception | None = None
        """What a pass raised, on the rank where it did."""

    @property
    def has_first(self) -> bool:
        """Whether passes begin here."""
        return self.stage == 0

    @property
    def has_last(self) -> bool:
        """Whether passes end here."""
        return self.stage == self.count - 1

    @property
    def is_first(self) -> bool:
        """Whether the chunk that is being computed is the model's first."""
        return self.has_first and self.chunk == 0

    @property
    def is_last(self) -> bool:
        return self.has_last and self.chunk == self.chunks - 1

    def run(
        self,
        passes: Sequence[_P],
        compute: Callable[[_P, Tensor | None], Tensor | None],
        like: Callable[[_P], Tensor],
        *,
        trains: bool,
        left: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        """Send passes through the stages, and their gradients back. Collective; afterwards look at `failure`.

        Args:
            compute: a pass and the hidden states that come in (None on the first stage) -> those that go out; on the last stage, the
                loss.
            like: a pass -> what its hidden states look like, a tensor without memory.
            left: after the way back of a pass through a chunk -> what is left to do of it, which is done so many ways back later as there
                are stages before this one. None: nothing is.
        """
        self.failure = None
        put_off = deque[Callable[[], None]]()

        def go_back(which: tuple[int, int]) -> None:
            self._back(which[1], *held.pop(which), like(passes[which[0]]))
            if left is not None:
                put_off.append(left())
                if len(put_off) > self.stage:
                    put_off.popleft()()

        held: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}
        order = turns(len(passes), self.count, self.chunks)
        back = iter([(i, self.chunks - 1 - chunk) for i, chunk in order])
        num_first = self.count - 1 - self.stage
        if self.chunks > 1:
            num_first = 2 * num_first + (self.chunks - 1) * self.count
        for number, (i, self.chunk) in enumerate(order):
            one = passes[i]
            hidden = None if self.is_first else self._receive(*self._before(self._down, self._down_again), like(one))
            if hidden is not None and trains:
                hidden.requires_grad_()
            output = self._guarded(functools.partial(compute, one, hidden))
            if not self.is_last:
                self._send(*self._after(self._down, self._down_again), self._zeros(like(one)) if output is None else output.detach())
            if trains:
                held[i, self.chunk] = hidden, output
                if number >= num_first:
                    go_back(next(back))
        if trains:
            for which in back:
                go_back(which)
        for one_more in put_off:
            one_more()
        for sent in self._sent.values():
            while sent:
                self._ranks.finished(sent.popleft()[0])

    def _back(self, chunk: int, hidden: Tensor | None, output: Tensor | None, like: Tensor) -> None:
        self.chunk = chunk
        gradient = None if self.is_last else self._receive(*self._after(self._up, self._up_again), like)
        if output is not None and output.requires_grad:  # Nothing is trained before the first adapter.
            self._guarded(functools.partial(torch.autograd.backward, output, gradient))
        if hidden is not None:
            self._send(*self._before(self._up, self._up_again), self._zeros(like) if hidden.grad is None else hidden.grad)

    def _before(self, near: Any, again: Any) -> tuple[Any, int]:
        """The group and stage of the chunk before the one that is computed here; `again`: that between the first stage and the last."""
        return (again if self.has_first else near), (self.stage - 1) % self.count

    def _after(self, near: Any, again: Any) -> tuple[Any, int]:
        """The group and stage of the chunk after the one that is computed here; `again`: that between the last stage and the first."""
        return (again if self.has_last else near), (self.stage + 1) % self.count

    def _guarded(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        try:
            return work()
        except Exception as error:
            if self._spreads or is_of_a_collective(error):
                raise
            self.failure = self.failure or error
            return None

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, device=self._device)

    def _receive(self, group: Any, stage: int, like: Tensor) -> Tensor:
        found = torch.empty_like(like, device=self._device)
        self._ranks.finished(dist.irecv(found, self.members[stage], group=group))
        return found

    def _send(self, group: Any, stage: int, tensor: Tensor) -> None:
        """Begin to send; wait only for what the other stage has long been able to take."""
        tensor = tensor.contiguous()
        sent = self._sent.setdefault(stage, deque())
        sent.append((dist.isend(tensor, self.members[stage], group=group), tensor))
        if len(sent) > 2 * self.count * self.chunks:
            self._ranks.finished(sent.popleft()[0])

    def of_stage(self, stage: int, own: Tensor | None, like: Tensor) -> Tensor:
        """A tensor that one of the stages has, on all of them. Collective."""
        found = torch.empty_like(like, device=self._device) if own is None else own.to(self._device).contiguous()
        dist.broadcast(found, self.members[stage], group=self.group)
        return found

    def total(self, own: Tensor) -> None:
        """Add up whole numbers of all stages, in place. Collective."""
        dist.all_reduce(own, group=self.group)

    def words_of_stages(self, words: str) -> list[str]:
        """What the rank of each stage says, in the order of stages. Collective."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, words, group=self.group)
        return found

    def summed_with(self, stage: int, own: Tensor) -> None:
        """Add up a tensor of this stage and of the other one, in place, in the order of stages. Both call it."""
        is_lower, other = self.stage < stage, torch.empty_like(own)
        if not own.numel():
            return
        if is_lower:
            self._ranks.finished(dist.irecv(other, self.members[stage], group=self._up))
            own.add_(other)
            dist.send(own, self.members[stage], group=self._down)
        else:
            dist.send(own, self.members[stage], group=self._up)
            self._ranks.finished(dist.irecv(own, self.members[stage], group=self._down))


# ---- gradients of weights that are computed later. I inputs and O outputs of a linear layer


class PutOff:
    """Gradients of the weights of linear layers, computed after those of what came in, when they are asked for.

    The layers are called as ever, and their weights have no gradient on the way back: neither autograd nor FSDP2 sees one. It is summed
    over the ranks that share a weight here, those of a chunk together. Of a weight that is split over tensor ranks each has its part.

    Args:
        chunks: the layers of each chunk, already sharded.
        data: the mesh of the ranks that share them.
        guard: hears of a failure; zeros take the place of the gradients then.
        reduced: the type in which gradients are summed; None: their own.
    """

    def __init__(
        self, chunks: Sequence[Sequence[torch.nn.Module]], data: DeviceMesh, guard: Guard, device: str, reduced: torch.dtype | None = None
    ) -> None:
        self._group, self._size, self._guard, self._reduced, self._device = data.get_group(), data.size(), guard, reduced, device
        self._weights: list[dict[torch.nn.Linear, torch.nn.Parameter]] = [
            {one: one.weight for layer in layers for one in layer.modules() if type(one) is torch.nn.Linear and one.weight.requires_grad}
            for layers in chunks
        ]
        self._found: dict[torch.nn.Linear, tuple[Tensor, Tensor]] = {}
        for own in self._weights:
            for one in own:
                one.forward = functools.partial(self._forward, one)

    def _forward(self, layer: torch.nn.Linear, given: Tensor) -> Tensor:
        found: Tensor = _WithoutWeights.apply(given, *own_weights(layer), functools.partial(self._found.__setitem__, layer))
        return found

    def forget(self) -> None:
        """Drop what a failed pass has left."""
        self._found.clear()

    def taken(self, chunk: int) -> Callable[[], None]:
        """Take what the way back through a chunk has left. What is returned adds it to the gradients of the weights. Collective."""
        found = dict(self._found)
        self._found.clear()
        return functools.partial(self._add, chunk, found)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _add(self, chunk: int, found: Mapping[torch.nn.Linear, tuple[Tensor, Tensor]]) -> None:
        weights, rows = self._weights[chunk], list[Tensor]()
        if not weights:
            return
        for layer, weight in weights.items():
            grad = self._gradient(found.get(layer), weight)
            more = -len(grad) % self._size
            rows.append(torch.nn.functional.pad(grad, (0, 0, 0, more)).reshape(self._size, -1))
        own = torch.cat(rows, 1)
        if self._size > 1:
            whole, own = own, own.new_empty(own.shape[1])
            reduce_scatter(own, whole.flatten(), group=self._group)
        for weight, part in zip(weights.values(), own.flatten().split([one.shape[1] for one in rows]), strict=True):
            held = local(weight)
            grad = part[: held.numel()].view(held.shape).to(held)
            if weight.grad is None:
                spread = weight.device_mesh, weight.placements
                weight.grad = DTensor.from_local(grad, *spread, run_check=False, shape=weight.shape, stride=weight.stride())
            else:
                local(weight.grad).add_(grad)

    def _gradient(self, found: tuple[Tensor, Tensor] | None, weight: Tensor) -> Tensor:
        """The gradient of this rank's part of a weight, [outputs, inputs], from its rows; zeros if the backward pass gave none."""
        if found is not None and self._guard.error is None:
            try:
                given, grad = (one.flatten(0, -2) for one in found)
                product = grad.T @ given
                return product if self._reduced is None else product.to(self._reduced)
            except Exception as error:
                self._guard.note(f"a weight of {list(weight.shape)}", "backward", error)
        return torch.zeros(_shape_here(weight), dtype=self._reduced or weight.dtype, device=self._device)


def _shape_here(weight: Tensor) -> list[int]:
    """The shape of a tensor rank's part of a weight that is split over them evenly, before it is sharded."""
    shape, mesh = list(weight.shape), weight.device_mesh
    if "tensor" in (mesh.mesh_dim_names or ()):
        number = mesh.mesh_dim_names.index("tensor")
        if weight.placements[number].is_shard():
            shape[weight.placements[number].dim] //= mesh.size(number)
    return shape


class _WithoutWeights(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer. On the way back it hands on what the gradient of its weights is computed from: rows in [.., I], gradients [.., O]."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, hand: Callable[[tuple[Tensor, Tensor]], None]) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.hand = hand
        return torch.nn.functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        ctx.hand((given, grad))
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, None, of_bias, None
