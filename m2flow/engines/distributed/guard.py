"""Keep the ranks of a trainer in step when a part of the model fails on one of them. R rows of a pass, H width of their hidden states.

    a rank:  part --raises--> noted by rank, layer and pass; zeros from then on --every collective as ever--> the end of the pass: all hear

A part computes in a graph of its own (`GuardedPart`), without collectives. Where a layer has some inside (`Exchange`: rows sent to
experts, sums over tensor ranks), what fails between its parts is answered with zeros too, and the exchanges that are still to come
are made with rows that count nothing.

Ranks that wait for each other between passes alone need none of this: a pass that raises ends there, and `Course` says where it was. It
says the same of a rank that hangs, whichever the trainer (`m2flow.engines.distributed.ranks.HangDetector`).
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from m2flow.engines import lines_of
from m2flow.errors import EngineError, M2FlowError, unexpected


def named(rank: int) -> str:
    """How an error begins that one rank tells the others."""
    return f"rank {rank} of this trainer: "


def failed(rank: int, part: str, way: str, error: Exception) -> M2FlowError:
    """What a part of the model raised on a rank, in the forward or the backward pass, with these in its words."""
    call = f"{named(rank)}{part}, {way} pass"
    return type(error)(f"{call}: {error.what}", now=error.now) if isinstance(error, M2FlowError) else unexpected(call, error)


class Place(NamedTuple):
    """Where a rank is in a call of its engine, and for how long."""

    work: str
    """The call, the pass or what else it has come to, and the layer that it went into last."""
    at: str
    """Python's function there, and its line."""
    for_s: float
    waits: bool
    """Whether it waits in a collective."""

    def words(self) -> str:
        """Describe it, but for whether it waits."""
        return f"{self.work}, for {self.for_s:.0f} s, in {self.at}"


_COLLECTIVES = (
    "/torch/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/distributed/param_and_grad_buffer.py",
    "/m2flow/engines/distributed/ranks.py",
)
"""Files with functions that wait for other ranks, in sends and receives too."""
_ALONE = ("/torch/distributed/checkpoint/",)
"""Files among them whose functions read and write by themselves: where they wait for others, the innermost function is of another."""
_BETWEEN = ("/torch/_ops.py", "/torch/autograd/function.py", "/torch/utils/_contextlib.py")
"""Files of functions through which collectives are called, and which compute nothing."""
_BROKEN = re.compile(r"gloo.*(timed out|closed by peer|reset by peer)|wait timeout|collective operation timeout", re.IGNORECASE | re.DOTALL)


def is_of_a_collective(error: BaseException | None) -> bool:
    """Whether a rank waited in a collective in vain: nothing more can be told to the others."""
    while error is not None and not _BROKEN.search(str(error)):
        error = error.__cause__
    return error is not None


def _is_of(parts: Collection[str], file: str) -> bool:
    return any(part in file for part in parts)


class Course:
    """Where a rank is in a call of its engine: the pass, and the layer that it went into last, as hooks of layers note it."""

    def __init__(self, rank: int) -> None:
        self._rank, self._work, self._part = rank, "", "the model"
        self._call, self._thread, self._since_s = "", 0, 0.0

    def follow(self, model: torch.nn.Module, layers: Collection[torch.nn.Module]) -> None:
        """Follow passes through these layers, and through what has weights beside them."""
        inside = {module for layer in layers for module in layer.modules()} - set(layers)
        for name, module in model.named_modules():
            if module in layers or (module not in inside and any(True for _ in module.parameters(recurse=False))):
                self.pass_through(module, name)

    def pass_through(self, module: torch.nn.Module, name: str) -> None:
        """Follow passes through a module, forward and back."""
        module.register_forward_pre_hook(functools.partial(self._into, name))
        module.register_forward_hook(functools.partial(self._out_of, name))

    def _into(self, name: str, *_: object) -> None:
        way = "forward pass" if torch._C._current_graph_task_id() < 0 else "backward pass"
        self._part, self._work, self._since_s = name, f"{way}, {name}", time.monotonic()

    def _out_of(self, name: str, module: object, given: object, output: Any) -> None:
        for found in output if isinstance(output, tuple) else (output,):
            if isinstance(found, Tensor) and found.requires_grad:
                found.register_hook(functools.partial(self._into, name))

    @contextmanager
    def within(self, way: str) -> Iterator[None]:
        """Name what a pass raises by where it was. Raises `M2FlowError`."""
        self._part = "the model" if way == "forward" else "the loss"
        try:
            yield
        except Exception as error:
            raise failed(self._rank, self._part, way, error) from error

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """This thread makes a call of the engine, perhaps within another."""
        before = self._call, self._thread
        if not self._call:
            self.at("")
            self._call, self._thread = call, threading.get_ident()
        try:
            yield
        finally:
            self._call, self._thread = before

    def at(self, work: str) -> None:
        """The call has come to work that is no pass."""
        self._work, self._since_s = work, time.monotonic()

    def words(self) -> str:
        """Describe the place; empty: in no call. For any thread."""
        place = self.place()
        return "" if place is None else f"{place.words()}{', where it waits for others' * place.waits}"

    @property
    def for_s(self) -> float:
        """Seconds that the rank has been where it is; 0: it is in no call. For any thread."""
        return time.monotonic() - self._since_s if self._call else 0.0

    def place(self) -> Place | None:
        """Where the rank is at this moment; None: in no call. For any thread."""
        call, work, for_s = self._call, self._work, self.for_s
        if not call:
            return None
        work = ", ".join(filter(None, (call, work)))
        line = next((line for line in lines_of(self._thread) if not line.file.endswith(_BETWEEN)), None)
        if line is None:
            return Place(work, "?", for_s, True)  # Not known, so nobody is told that it hangs.
        at = f"{line.function} ({os.path.basename(line.file)}:{line.number})"
        return Place(work, at, for_s, _is_of(_COLLECTIVES, line.file) and not _is_of(_ALONE, line.file))


class Guard:
    """Keep a rank in step with the others when a part of its model fails: zeros take the place of what it was to compute.

    Ranks that share the weights of a layer wait for each other to gather them, pass by pass and on the way back. One that raised would
    leave them waiting until they give up. So it notes its first error, with the module and whether it was in the forward or the backward
    pass, answers zeros from then on without computing, and takes part in every collective up to the next place where all hear of it.

    Limit: modules without collectives of their own, apart from those of `exchanges`, that take hidden states and give as many.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.error: M2FlowError | None = None
        """The first since `check`."""
        self.last: Tensor | None = None
        """What the last module before the head gave in this pass."""

    def over(
        self,
        module: torch.nn.Module,
        name: str,
        weights: Callable[[], Iterable[torch.nn.Parameter]] | None = None,
        *,
        is_pair: bool = False,
        width: int = 0,
        is_last: bool = False,
    ) -> None:
        """Guard a module in both directions.

        Args:
            weights: those of its parameters that have a gradient after the way back; None: all.
            is_last: only the head comes after it.
            is_pair: it gives hidden states and something that is None here, as attentions do.
            width: of an embedding, H: it takes numbers of tokens.
        """
        compute, weights = module.forward, weights or module.parameters
        part = GuardedPart(self, compute, weights, name, is_pair=is_pair, width=width, is_last=is_last)
        module.forward = functools.wraps(compute)(part)

    def around(
        self, layer: torch.nn.Module, name: str, weights: Callable[[], Iterable[torch.nn.Parameter]], exchanges: Sequence[Exchange] = ()
    ) -> None:
        """Guard what a layer computes between the guarded parts of it, in the forward pass.

        Args:
            weights: those of its parameters that take no part in an exchange.
            exchanges: those of the layer between ranks, in their order. One that fails before some of them makes them with rows that
                count nothing.
        """
        compute = layer.forward
        part = GuardedPart(self, compute, weights, name)

        @functools.wraps(compute)
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            before = [one.num_begun for one in exchanges]
            try:
                return compute(hidden, *args, **kwargs)
            except Exception as error:
                if any(one.num_begun > one.num_ended for one in exchanges):
                    raise
                self.note(name, "forward", error)
                for one, begun in zip(exchanges, before, strict=True):
                    if one.num_begun == begun:
                        one.without_rows(hidden)
                found = part.stand_in(hidden)
                for one in exchanges:  # The others make them on the way back too.
                    if one.output is not None:
                        found = found + one.output.sum() * 0.0
                return found
            finally:
                for one in exchanges:
                    one.output = None

        layer.forward = forward

    def note(self, name: str, way: str, error: Exception) -> None:
        """Keep the first error. Raises it where it is of a collective: the others are not there any more."""
        if is_of_a_collective(error):
            raise error
        if self.error is None:
            self.error = failed(self._rank, name, way, error)

    def begin(self) -> None:
        """A pass begins."""
        self.last = None

    def check(self) -> None:
        """Raise what was noted, and forget it."""
        error, self.error, self.last = self.error, None, None
        if error is not None:
            raise error


class Exchange(Protocol):
    """What ranks do together within a layer: rows sent to others and back, or a sum over them."""

    num_begun: int
    num_ended: int
    """In forward passes."""
    output: Tensor | None
    """Output of the last one."""

    def guard(self, guard: Guard, name: str, weights: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        """Guard what this rank computes between its collectives. Arguments as of `Guard.over`."""

    def without_rows(self, hidden: Tensor) -> None:
        """Take part with rows that count nothing, which look like these hidden states, [1, R, H]."""


class Owed(Protocol):
    """A collective in the midst of one call of a part, and one on the way back, which the other ranks make too."""

    def settle(self, hidden: Tensor) -> None:
        """Make the first, with zeros, unless it was made. The call was with these hidden states, [1, R, H]."""

    def settle_back(self) -> None:
        """Make that of the way back, with zeros, unless it was made."""


class Midway(Protocol):
    """What a part does together with other ranks in its midst."""

    def begin(self) -> Owed:
        """A call of the part begins."""


class GuardedPart:
    """What a guarded module computes. Its graph is its own, so that an error on the way back ends here.

    Args:
        weights: its parameters, as they are when it is called.
        midway: its collective; None: it has none.
    """

    def __init__(
        self,
        guard: Guard,
        compute: Callable[..., Any],
        weights: Callable[[], Iterable[torch.nn.Parameter]],
        name: str,
        *,
        is_pair: bool = False,
        width: int = 0,
        is_last: bool = False,
        midway: Midway | None = None,
    ) -> None:
        self._guard, self._compute, self._weights, self._name = guard, compute, weights, name
        self._is_pair, self._width, self._is_last, self._midway = is_pair, width, is_last, midway

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(kwargs) if args else {name: value for name, value in kwargs.items() if name != "hidden_states"}
        hidden = args[0] if args else kwargs["hidden_states"]
        own, trains = hidden, torch.is_grad_enabled()
        if trains and hidden.is_floating_point():
            own = hidden.detach().requires_grad_(hidden.requires_grad)
        owed = None if self._midway is None else self._midway.begin()
        found = self._found(own, args[1:], given, hidden)
        if owed is not None:
            owed.settle(hidden)
        if trains and (hidden.requires_grad or any(one.requires_grad for one in self._weights())):
            found = self._hung(hidden, own, found, owed)
        elif found is None:
            found = self._zeros(hidden)
        if self._is_last:
            self._guard.last = found
        return (found, None) if self._is_pair else found

    def _found(self, own: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor) -> Tensor | None:
        if self._guard.error is not None:
            return None
        try:
            found = self._compute(own, *args, **kwargs)
            output: Tensor = found[0] if self._is_pair else found
            expected = self._shape(hidden)
            if output.shape != expected:
                raise EngineError(f"a part returned hidden states of shape {list(output.shape)}, not {list(expected)}")
            return output
        except Exception as error:
            self._guard.note(self._name, "forward", error)
            return None

    def _shape(self, hidden: Tensor) -> torch.Size:
        return torch.Size((*hidden.shape, self._width)) if self._width else hidden.shape

    def _zeros(self, hidden: Tensor) -> Tensor:
        if not self._width:
            return torch.zeros_like(hidden)
        return torch.zeros(self._shape(hidden), dtype=next(iter(self._weights())).dtype, device=hidden.device)

    def stand_in(self, hidden: Tensor) -> Tensor:
        """Zeros that hang on the hidden states and on the module's weights."""
        return self._hung(hidden, hidden, None)

    def _hung(self, hidden: Tensor, own: Tensor, output: Tensor | None, owed: Owed | None = None) -> Tensor:
        given = self._zeros(hidden) if output is None else output.detach()
        # In a tuple, autograd does not see them.
        found: Tensor = _Back.apply(hidden, torch.zeros((), requires_grad=True), self, (own, output, owed, given))
        return found

    def back(self, own: Tensor, output: Tensor | None, owed: Owed | None, grad: Tensor) -> Tensor | None:
        """The gradient of what came in. Weights have theirs, if only of zeros: others wait to add it to their own."""
        if output is not None and self._guard.error is None and output.requires_grad:
            try:
                torch.autograd.backward(output, grad)
            except Exception as error:
                self._guard.note(self._name, "backward", error)
        if owed is not None:
            owed.settle_back()
        if self._guard.error is not None:
            for one in self._weights():
                if one.requires_grad and one.grad is None:
                    one.grad = torch.zeros_like(one)
        if not own.is_floating_point():
            return None
        return torch.zeros_like(own) if output is None or own.grad is None else own.grad


class _Back(torch.autograd.Function):  # type: ignore[misc]
    """What a part gave, with the way back through its own graph. Takes a scalar too, which has a gradient where hidden states have none."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, part: GuardedPart, held: tuple[Tensor, Tensor | None, Owed | None, Tensor]
    ) -> Tensor:
        ctx.part, ctx.held = part, held[:3]
        return held[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.held = ctx.held, None
        return ctx.part.back(*held, grad), None, None, None


class Recomputed:
    """A layer that keeps what comes in alone, and is computed again on the way back, with what ranks do together in it.

    Args:
        compute: takes hidden states first, and gives as many, or a tuple that begins with them.
        remember: called after each forward pass -> what is entered while this pass is computed again.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174.
    """

    def __init__(self, compute: Callable[..., Any], remember: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
        self._compute, self._remember = compute, remember

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, *more = args or (kwargs.pop("hidden_states"),)
        if not torch.is_grad_enabled():
            return self._compute(hidden, *more, **kwargs)
        with torch.no_grad():
            found = self._compute(hidden, *more, **kwargs)
        output, *beside = found if isinstance(found, tuple) else (found,)
        again = functools.partial(self._again, self._remember(), more, kwargs)
        output = _Again.apply(hidden, torch.zeros((), requires_grad=True), (again, output))  # In a tuple, autograd does not see it.
        return (output, *beside) if isinstance(found, tuple) else output

    def _again(
        self, enter: Callable[[], AbstractContextManager[None]], more: Sequence[Any], kwargs: Mapping[str, Any], hidden: Tensor
    ) -> Tensor:
        with torch.enable_grad(), enter():
            found = self._compute(hidden, *more, **kwargs)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output


class _Again(torch.autograd.Function):  # type: ignore[misc]
    """What a layer gave, and its way back through a second computation. The scalar is as in `_Back`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, held: tuple[Callable[[Tensor], Tensor], Tensor]) -> Tensor:
        ctx.again, output = held
        ctx.save_for_backward(hidden)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        own = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        output = ctx.again(own)
        if output.requires_grad:
            torch.autograd.backward(output, grad)
        return own.grad, None, None


def weights_of_pass(part: torch.nn.Module, beside: Collection[torch.nn.Module] = (), *, are_put_off: bool) -> list[torch.nn.Parameter]:
    """The parameters of a part of a layer that have a gradient as soon as the way back has gone through it.

    Args:
        beside: parts of it that are not meant.
    """
    found, left_out = list[torch.nn.Parameter](), {module for one in beside for module in one.modules()}
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if module not in left_out and not (are_put_off and name == "weight" and type(module) is torch.nn.Linear):
                found.append(parameter)
    return found
