"""The optimiser step of a trainer: divide, clip, schedule, step; on a trainer's own parameters, or inside a library that owns the step.

The equations are those of the recipes (`m2flow.recipe.AdamW`, `AdamW8bit`, `Muon`, `SGD`). Weight decay applies to every parameter.
Gradients are divided by the mini-batch's denominator here, once, so no number depends on how the mini-batch was cut.

    weights in half precision:  gradient --float32--> step on float32 masters --rounded--> weights

bfloat16 has 8 bits of precision: a step below 1/256 of a weight would be lost each time. So steps apply to a float32 copy of each such
weight (its master), of which the weight is the rounded value.

`Optimizers` is the trainer's own. `RecipeAdamW` is for DeepSpeed, which steps an optimiser on flat parts of all weights in place of the
parameters, once when it starts (with zeros, to allocate its state) and once for each step. It can't be told a denominator, a rate and
clipping that differ from step to step, or moments for each of several recipes; these are here.

    apply:  due(recipe, denominator)   then the library's own step --> RecipeAdamW.step on the parts that this rank holds

    matrices of layers, under Muon:  momentum --gathered--> orthogonal [rows, columns] --own part--> weights

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from m2flow.engines.contract import MOVED
from m2flow.engines.models.trainer_checkpoint import local, spread_like, whole
from m2flow.engines.registry import check_eight_bit
from m2flow.errors import EngineError, InternalError
from m2flow.recipe import OPTIMIZERS, SGD, AdamW, AdamW8bit, Muon, Optimizer, WeightGroup


@dataclass(frozen=True)
class Elsewhere:
    """What ranks that hold other weights of the same model have, where each steps its own."""

    names: Collection[str]
    """Names of all weights of the model."""
    repeated: Collection[str]
    """Names of weights that are here and counted by another rank: a head that is tied to embeddings elsewhere."""
    total: Callable[[Mapping[str, float]], dict[str, float]]
    """Norms by group of this rank's weights -> of all. Collective."""


class Optimizers:
    """Step one set of parameters, under any number of recipes; those of one `state_key` share a state.

    Args:
        matrices: those of the parameters that Muon makes orthogonal steps on.
        groups: a parameter's id -> the group of weights that it is reported with, for recipes with `log_layers`.
        names: a parameter's id -> its name, for recipes with groups of their own.
        has_masters: keep a float32 copy of each parameter below float32, from the first step on.
        elsewhere: of a part of a model, what the rest is; a step is then collective. None: the parameters are all of it.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        matrices: Iterable[torch.nn.Parameter] = (),
        groups: Mapping[int, str] = MappingProxyType({}),
        names: Mapping[int, str] = MappingProxyType({}),
        has_masters: bool = True,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        of_matrices = {id(parameter) for parameter in matrices}
        self._is_matrix = [id(parameter) in of_matrices for parameter in self._parameters]
        self._groups = [groups.get(id(parameter), "rest") for parameter in self._parameters]
        self._names = [names.get(id(parameter), "") for parameter in self._parameters]
        self._elsewhere = elsewhere or Elsewhere((), (), dict)
        self._counts = [name not in self._elsewhere.repeated for name in self._names]
        self._has_masters = has_masters
        self._masters: dict[int, torch.nn.Parameter] = {}
        """By the place of the parameter."""
        self._is_fused = len(_by_mesh(self._parameters)) < 2
        self._states: dict[Optimizer, tuple[torch.optim.Optimizer, int]] = {}

    def step(self, recipe: Optimizer, denominator: float) -> dict[str, float]:
        """Divide the gradients, clip, step and clear them.

        Returns:
            `grad_norm`, the 2-norm after the division and before the clipping, and `lr`; and by group of weights what `log_layers` says.
        Raises:
            EngineError: no gradient, a denominator that is not positive, or a gradient that is not finite. The weights are as
                they were, and the gradient is cleared.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        try:
            if not gradients:
                raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
            if not (math.isfinite(denominator) and denominator > 0):
                raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
            gradients = self._give_to_masters() or gradients
            norm = self._norm() / denominator
            if not math.isfinite(norm):
                raise EngineError(
                    f"the gradient is not finite (its norm is {norm}); the weights were left as they were",
                    now="Look for infinite losses or advantages, and for a learning rate that is too high.",
                )
            stepped = self._stepped if recipe.log_layers else []
            by_group = {f"{GRAD_NORM}/{group}": size / denominator for group, size in self._norms([held.grad for held in stepped]).items()}
            old = [held.detach().clone() for held in stepped]
            shrink = recipe.max_grad_norm / norm if 0 < recipe.max_grad_norm < norm else 1.0
            torch._foreach_mul_([local(gradient) for gradient in gradients], shrink / denominator)
            key = recipe.state_key
            optimizer, num_steps = self._states.get(key) or (self._fresh(recipe), 0)
            rate = recipe.rate(num_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            before = {i: local(held).detach().clone() for i, held in enumerate(self._parameters) if held.dtype != torch.float32}
            with contextlib.nullcontext() if isinstance(recipe, Muon | AdamW8bit) else _on_own_parts(optimizer):
                optimizer.step()
            self._states[key] = (optimizer, num_steps + 1)
            steps = self._norms([held.detach() - weight for held, weight in zip(stepped, old, strict=True)])
            by_group |= update_ratios(steps, self._norms(old))
            self._take_from_masters()
            return {GRAD_NORM: norm, "lr": rate, **by_group, **self._moved(before)}
        finally:
            self.clear_gradients()

    def _norms(self, tensors: Sequence[Tensor | None]) -> dict[str, float]:
        """Compute 2-norms by group of tensors that are one for each parameter. Collective where parameters are sharded."""
        found: dict[str, list[Tensor]] = {}
        for group, tensor, counts in zip(self._groups, tensors, self._counts, strict=False):
            if tensor is not None and counts:
                found.setdefault(group, []).append(tensor)
        return self._elsewhere.total({group: _norm(_by_mesh(alike)) for group, alike in found.items()}) if tensors else {}

    def _norm(self) -> float:
        """The 2-norm of all gradients, of which what is stepped has some. Collective as `_norms`."""
        counted = [held.grad for held, counts in zip(self._stepped, self._counts, strict=True) if held.grad is not None and counts]
        return self._elsewhere.total({"": _norm(_by_mesh(counted))})[""]

    def clear_gradients(self) -> None:
        for parameter in (*self._parameters, *self._masters.values()):
            parameter.grad = None

    # Masters

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _give_to_masters(self) -> list[Tensor]:
        """Move half-precision gradients to the master weights, which are created if need be, and return all gradients."""
        if not self._has_masters:
            return []
        for i, held in enumerate(self._parameters):
            if held.dtype == torch.float32:
                continue
            if i not in self._masters:
                self._masters[i] = torch.nn.Parameter(held.detach().float())
            master = self._masters[i]
            exact, rounded = local(master), local(held)
            # A weight that is not its master rounded was set by somebody else since: a checkpoint, a copy of another role's.
            exact.copy_(torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.float()))
            master.grad = None if held.grad is None else held.grad.float()
        return [parameter.grad for parameter in self._stepped if parameter.grad is not None] if self._masters else []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take_from_masters(self) -> None:
        for i, master in self._masters.items():
            local(self._parameters[i]).copy_(local(master))

    def _moved(self, before: Mapping[int, Tensor]) -> dict[str, float]:
        total = sum(tensor.numel() for tensor in before.values())
        moved = [(local(self._parameters[i]).detach() != tensor).sum() for i, tensor in before.items()]
        return {MOVED: float(torch.stack(moved).sum()) / total} if total else {}

    @property
    def _stepped(self) -> list[torch.nn.Parameter]:
        """Tensors that steps change: parameters, or their masters."""
        return [self._masters.get(i, parameter) for i, parameter in enumerate(self._parameters)]

    def masters(self) -> list[Tensor | None]:
        """Master weights by parameter; None: it has none."""
        return [self._masters[i].detach() if i in self._masters else None for i in range(len(self._parameters))]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_masters(self, saved: Sequence[Tensor | None]) -> None:
        """Restore what `masters` returned. Call it after the weights are loaded and before `load_state`."""
        self._masters = {}
        for i, value in enumerate(saved):
            held = self._parameters[i]
            if value is not None and self._has_masters and held.dtype != torch.float32:
                self._masters[i] = torch.nn.Parameter(spread_like(value.to(held.device, torch.float32), held))

    def state(self) -> list[dict[str, Any]]:
        """Everything that later steps depend on, in the order in which the recipes were first used."""
        return [
            {"kind": type(recipe).__name__, "recipe": asdict(recipe), "num_steps": num_steps, "state": optimizer.state_dict()}
            for recipe, (optimizer, num_steps) in self._states.items()
        ]

    def load_state(self, saved: list[dict[str, Any]]) -> None:
        """Restore what `state` returned."""
        states: dict[Optimizer, tuple[torch.optim.Optimizer, int]] = {}
        for entry in saved:
            recipe = _recipe_of(entry)
            optimizer = self._fresh(recipe)
            optimizer.load_state_dict(entry["state"])
            for group in optimizer.param_groups:
                if "fused" in group:
                    group["fused"] = self._is_fused and not isinstance(recipe, SGD)
            for parameter, state in optimizer.state.items():
                state.update({name: spread_like(value, parameter) for name, value in state.items() if isinstance(value, Tensor)})
            states[recipe] = (optimizer, int(entry["num_steps"]))
        self._states = states
        self.clear_gradients()

    def order(self, recipe: Optimizer) -> list[str]:
        """Names of the parameters as a recipe's state numbers them."""
        names = {id(held): name for held, name in zip(self._stepped, self._names, strict=True)}
        optimizer = self._states[recipe][0] if recipe in self._states else self._fresh(recipe)
        return [names[id(held)] for group in optimizer.param_groups for held in group["params"]]

    def renumbered(self, entry: Mapping[str, Any], of_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of `state` of another set of parameters as one of this, with what it has of each of these by name."""
        recipe = _recipe_of(entry)
        state = {i: of_parameters[name] for i, name in enumerate(self.order(recipe)) if name in of_parameters}
        return {**entry, "state": {**self._fresh(recipe).state_dict(), "state": state}}

    def by_name(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """What an entry of `state` of these parameters has of each, by name."""
        state = entry["state"]["state"]
        return {name: state[i] for i, name in enumerate(self.order(_recipe_of(entry))) if i in state}

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of `masters`."""
        return self._names

    def tensors(self) -> Iterator[Tensor]:
        """All masters and moments."""
        yield from self._masters.values()
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        yield from (value.codes, value.scale) if hasattr(value, "codes") else (value,)

    def to(self, device: torch.device | str) -> None:
        """Move the state to a device, for offload and onload."""
        for master in self._masters.values():
            master.data = master.data.to(device)
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(device)

    def _fresh(self, recipe: Optimizer) -> torch.optim.Optimizer:
        if isinstance(recipe, SGD):
            return torch.optim.SGD(self._grouped(recipe), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, foreach=False)
        if isinstance(recipe, Muon):
            if not any(self._is_matrix):
                raise EngineError("Muon steps on matrices of layers, and this model does not say what its layers are", now="Use AdamW.")
            chosen = list(zip(self._stepped, self._is_matrix, strict=True))
            matrices, others = ([held for held, is_matrix in chosen if is_matrix is wanted] for wanted in (True, False))
            return MuonSteps(matrices, others, recipe, is_fused=self._is_fused)
        if isinstance(recipe, AdamW8bit):
            steps = eight_bit_steps()(self._grouped(recipe), recipe.lr, recipe.betas, recipe.eps, recipe.weight_decay)
            kinds = zip(self._stepped, self._groups, strict=True)
            steps.exact = frozenset(id(held) for held, group in kinds if group in ("embeddings", "head"))
            return steps
        return torch.optim.AdamW(
            self._grouped(recipe),
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            fused=self._is_fused,
        )

    def _grouped(self, recipe: AdamW | SGD) -> list[Any]:
        """What is stepped, in groups as the recipe has them."""
        if not recipe.groups:
            return self._stepped
        of_weight = [next((i for i, one in enumerate(recipe.groups) if fnmatch.fnmatchcase(name, one.names)), -1) for name in self._names]
        of_others = {
            next((i for i, one in enumerate(recipe.groups) if fnmatch.fnmatchcase(name, one.names)), -1) for name in self._elsewhere.names
        }
        unused = [one.names for i, one in enumerate(recipe.groups) if i not in of_others.union(of_weight)]
        if unused:
            some = ", ".join(self._names[:3])
            raise EngineError(
                f"no trained weight belongs to the group {unused[0]!r}", now=f"Names are like {some}; the first group that fits counts."
            )
        found = []
        for i in sorted(set(of_weight)):
            held = [one for one, group in zip(self._stepped, of_weight, strict=True) if group == i]
            own = recipe.groups[i] if i >= 0 else WeightGroup("*")
            decay = recipe.weight_decay if own.weight_decay is None else own.weight_decay
            found.append({"params": held, "weight_decay": decay, "lr_scale": own.lr_scale})
        return found


@functools.cache
def eight_bit_steps() -> Any:
    """The class of optimisers with moments of 8 bits: torchao's, whose states go into checkpoints as plain tensors.

    A GPU's step is compiled when it is first taken; on a CPU it runs as it is, since compiling takes half a minute.

    A mean of squares that is small beside others of its block may be rounded to 0, and the step by it would have no bound. So a step is no
    longer than the longest that AdamW itself can make, by the Cauchy-Schwarz inequality (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) times
    the rate: 7.3 for betas of 0.9 and 0.999. Embeddings and head, whose gradients differ most within a block, keep float32.

    Raises:
        MissingExtra: torchao is not installed.
    """
    check_eight_bit()
    from torchao.optim import AdamW8bit as Steps
    from torchao.optim.subclass_8bit import OptimState8bit

    class EightBitSteps(Steps):  # type: ignore[misc]
        exact: frozenset[int] = frozenset()
        """Ids of parameters whose moments stay in float32."""

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self, closure: Any = None) -> None:
            groups = list(self.__dict__["param_groups"])
            try:
                for group in groups:
                    for held in group["params"]:
                        if held.grad is not None:
                            self._step_one(group, held)
            finally:
                self.param_groups = groups

        def _step_one(self, group: dict[str, Any], held: Tensor) -> None:
            rate, (first, second) = float(group["lr"]), group["betas"]
            decayed = held.detach() * (1 - rate * group["weight_decay"])
            self.param_groups = [{**group, "params": [held], "lr": torch.tensor(rate)}]
            with contextlib.nullcontext() if held.is_cuda else torch.compiler.set_stance("force_eager"):
                super().step()
            if isinstance(self.state[held]["exp_avg"], OptimState8bit):
                longest = rate * (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second)) if first**2 < second else math.inf
                made = held - decayed
                held.copy_(torch.where(made.abs() > longest, decayed + made.clamp(-longest, longest), held))

        def _new_buffer(self, p: Tensor, signed: bool) -> Any:
            return torch.zeros_like(p) if id(p) in self.exact else super()._new_buffer(p, signed)

        def state_dict(self) -> dict[str, Any]:
            def plain(value: Any) -> Any:
                return {"codes": value.codes, "scale": value.scale, "signed": value.signed} if isinstance(value, OptimState8bit) else value

            found: dict[str, Any] = super().state_dict()
            return {**found, "state": {i: {name: plain(value) for name, value in one.items()} for i, one in found["state"].items()}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            def packed(value: Any) -> Any:
                if not isinstance(value, dict):
                    return value
                like = OptimState8bit.zeros(value["codes"].shape, value["signed"], device=value["codes"].device, dtype=torch.float32)
                return OptimState8bit(value["codes"], value["scale"], like.qmap, value["signed"], dtype=torch.float32)

            saved = {i: {name: packed(value) for name, value in one.items()} for i, one in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": saved})

    return EightBitSteps


class MuonSteps(torch.optim.Optimizer):  # type: ignore[misc]
    """`m2flow.recipe.Muon` on float32 parameters, or on this rank's parts of them: then its step is collective."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor], recipe: Muon, *, is_fused: bool) -> None:
        super().__init__([{"params": matrices}, {"params": others}], {"lr": recipe.lr, "fused": is_fused})
        self._recipe = recipe

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        matrices, others = self.param_groups
        for matrix in matrices["params"]:
            if matrix.grad is not None:
                self._step_matrix(matrix, matrices["lr"])
        self._step_others([one for one in others["params"] if one.grad is not None], others["lr"], is_fused=others["fused"])

    def _step_matrix(self, matrix: Tensor, rate: float) -> None:
        state, beta = self.state[matrix], self._recipe.momentum
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum, own = state["momentum"], local(matrix)
        local(momentum).mul_(beta).add_(local(matrix.grad))
        step = orthogonal(whole(momentum * beta + matrix.grad))
        own.mul_(1 - rate * self._recipe.weight_decay)
        own.sub_(local(spread_like(step, matrix)), alpha=rate * _MUON_SIZE * math.sqrt(max(matrix.shape[-2:])))

    def _step_others(self, others: list[Tensor], rate: float, *, is_fused: bool) -> None:
        for one in others:
            if not self.state[one]:
                moments = {name: torch.zeros_like(one) for name in MOMENTS}
                self.state[one].update(step=torch.zeros((), device=local(one).device), **moments)
        states, recipe = [self.state[one] for one in others], self._recipe
        adamw(
            others,
            [one.grad for one in others],
            *([state[name] for state in states] for name in MOMENTS),
            [],
            [state["step"] for state in states],
            fused=is_fused,
            amsgrad=False,
            beta1=recipe.betas[0],
            beta2=recipe.betas[1],
            lr=rate,
            weight_decay=recipe.weight_decay,
            eps=recipe.eps,
            maximize=False,
        )


_MUON_SIZE = 0.2
"""Root mean square of the entries of AdamW's steps, in units of the rate, which Muon's have, too."""


def orthogonal(matrix: Tensor) -> Tensor:
    """Make the singular values of a matrix [..., rows, columns] near 1, from 0.7 to 1.2 or so; those next to 0 stay there.

    Source:
        Newton-Schulz iteration with the coefficients of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

    >>> values = torch.linalg.svdvals(orthogonal(torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0]])))
    >>> bool((values > 0.65).all() and (values < 1.25).all())
    True
    """
    smallest = torch.finfo(matrix.dtype).tiny
    found = matrix / matrix.abs().amax((-2, -1), keepdim=True).clamp(min=smallest)  # Squares of tiny gradients would be 0.
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=smallest)
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    found = found.mT if is_tall else found
    for _ in range(5):
        square = found @ found.mT
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.mT if is_tall else found


def _recipe_of(entry: Mapping[str, Any]) -> Optimizer:
    """The key of the recipes that a saved state is of."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry["recipe"].items()}
    if given.get("groups"):
        given["groups"] = tuple(WeightGroup(**one) for one in given["groups"])
    return OPTIMIZERS[entry.get("kind", "AdamW")](**given).state_key


@contextlib.contextmanager
def _on_own_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have an optimiser whose steps are elementwise step on this rank's parts of sharded parameters, which comes to the same.

    DTensor works out where the result of an operation lies when it first sees its shapes and placements, for each of some ten operations
    of each shape of parameter: the first step of a mixture of two layers on four ranks took 0.9 s with it and takes 0.15 s, later ones
    two thirds of the time.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    parts = {held: _own_part(held) for of in groups for held in of if hasattr(held, "to_local")}
    if not parts:
        yield
        return
    known = dict(optimizer.state)

    def take(state: Mapping[Tensor, dict[str, Any]]) -> None:
        optimizer.state.clear()
        optimizer.state.update(state)

    def of_part(held: Tensor, value: Any) -> Any:
        return local(value) if held in parts and isinstance(value, Tensor) else value

    for group, of in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parts.get(held, held) for held in of]
    take({parts.get(held, held): {name: of_part(held, value) for name, value in state.items()} for held, state in known.items()})
    try:
        yield
    finally:
        made = dict(optimizer.state)
        whole_of = {part: held for held, part in parts.items()}
        for group, of in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = of
        found: dict[Tensor, dict[str, Any]] = {}
        for part, state in made.items():
            held = whole_of.get(part, part)
            before = known.get(held, {})
            found[held] = {name: _as_spread(value, held, before.get(name)) for name, value in state.items()}
        take(found)


def _own_part(held: Tensor) -> torch.nn.Parameter:
    part = torch.nn.Parameter(local(held.detach()))
    if held.grad is not None:
        is_alike = getattr(held.grad, "placements", None) == held.placements
        part.grad = local(held.grad if is_alike else held.grad.redistribute(placements=held.placements))
    return part


def _as_spread(value: Any, held: Tensor, before: Any) -> Any:
    """What an optimiser keeps of this rank's part of a parameter, as part of what all ranks keep; `before` is that, if it was there."""
    if not hasattr(held, "to_local") or not isinstance(value, Tensor) or value.shape != local(held).shape:
        return value
    if hasattr(before, "to_local") and local(before).data_ptr() == value.data_ptr():
        return before
    kind: Any = type(held.data)
    return kind.from_local(value, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride())


def _by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors that are sharded over the same ranks: torch's foreach functions require it."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


GRAD_NORM = "grad_norm"
"""The metric of an optimiser step; with `/GROUP` appended, that of a group of weights."""


def update_ratios(steps: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide norms of what a step added by norms of the weights before it; weights that are all 0 have none.

    >>> update_ratios({"layers.0": 0.5, "head": 1.0}, {"layers.0": 2.0, "head": 0.0})
    {'update_ratio/layers.0': 0.25}
    """
    return {f"update_ratio/{group}": steps[group] / size for group, size in weights.items() if size}


def _norm(by_mesh: list[list[Tensor]]) -> float:
    norms = [float(whole(torch.nn.utils.get_total_norm(alike))) for alike in by_mesh]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)


# ---- inside DeepSpeed

MOMENTS = ("exp_avg", "exp_avg_sq")


class RecipeAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW on the parameters it is given, under any number of recipes, of which those of one `state_key` share moments."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.norm_over: Callable[[Tensor], Tensor] = lambda square: square
        """The squared norm of this rank's part -> that of all ranks' parts."""
        self.square: Callable[[Tensor, Tensor], Tensor] = squared_norm
        """A part and its gradient -> what they add to this rank's squared norm, float64."""
        self.kept: Callable[[Tensor], Tensor] = lambda moment: moment
        """A moment -> the same where it is to be kept."""
        self.places: Mapping[Tensor, Sequence[tuple[str, int, int]]] = {}
        """By part: where in it the groups of weights lie, each with start and end; for recipes with `log_layers`."""
        self.groups: Sequence[str] = ()
        """Groups of weights, in the same order on all ranks."""
        self.by_group: dict[str, float] = {}
        """What `log_layers` asks for, of the last step."""
        self.moments: dict[AdamW, dict[Tensor, tuple[Tensor, Tensor]]] = {}
        """By `state_key` of recipes, then by part: float32, of the part's shape."""
        self.num_steps: dict[AdamW, int] = {}
        self._parts: list[Tensor] = []
        self._due: tuple[AdamW, float] | None = None
        self._norm: float | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that it steps on. Between steps the library may take them out of the parameter groups."""
        return [part for group in self.param_groups for part in group["params"]] or self._parts

    def due(self, recipe: AdamW, denominator: float) -> None:
        """Set the recipe and denominator of the next step."""
        self._due, self._norm = (recipe, denominator), None

    def taken(self) -> float | None:
        """Return the gradient's norm in the step that was due, after division and before clipping. None: the library did not step.

        Not finite: the library stepped, and nothing was changed."""
        self._due = None
        return self._norm

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self._parts = self.parts
        if self._due is None:
            return
        if self._norm is not None:
            raise InternalError("the library steps twice on what should be one group of parameters")
        recipe, denominator = self._due
        parts = [part for part in self._parts if part.grad is not None]
        gradients = [part.grad for part in parts]
        square = torch.stack([self.square(part, gradient) for part, gradient in zip(parts, gradients, strict=True)]).sum()
        self._norm = math.sqrt(float(self.norm_over(square))) / denominator
        if not math.isfinite(self._norm):
            return
        old = [part.clone() for part in parts] if recipe.log_layers else []
        norms = self._norms(parts, gradients) if recipe.log_layers else {}
        self.by_group = {f"{GRAD_NORM}/{group}": size / denominator for group, size in norms.items()}
        shrink = recipe.max_grad_norm / self._norm if 0 < recipe.max_grad_norm < self._norm else 1.0
        torch._foreach_mul_(gradients, shrink / denominator)
        key = recipe.state_key
        num_steps = self.num_steps.get(key, 0)
        moments = self.moments.setdefault(key, {})
        for part in parts:
            if part not in moments:
                moments[part] = (self.kept(torch.zeros_like(part)), self.kept(torch.zeros_like(part)))
        adamw(
            parts,
            gradients,
            [moments[part][0] for part in parts],
            [moments[part][1] for part in parts],
            [],
            [torch.tensor(float(num_steps), device=part.device) for part in parts],
            fused=True,
            amsgrad=False,
            beta1=recipe.betas[0],
            beta2=recipe.betas[1],
            lr=recipe.rate(num_steps),
            weight_decay=recipe.weight_decay,
            eps=recipe.eps,
            maximize=False,
        )
        self.num_steps[key] = num_steps + 1
        if recipe.log_layers:
            steps = self._norms(parts, [part - before for part, before in zip(parts, old, strict=True)])
            self.by_group |= update_ratios(steps, self._norms(parts, old))

    def _norms(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> dict[str, float]:
        """Compute 2-norms by group of tensors that are one for each part. Collective where parts are those of a rank."""
        squares = torch.zeros(len(self.groups), dtype=torch.float64)
        for part, tensor in zip(parts, tensors, strict=True):
            for group, start, end in self.places[part]:
                alone = torch.zeros_like(tensor)  # In its place, since `square` knows what other ranks repeat by place.
                alone.view(-1)[start:end] = tensor.view(-1)[start:end]
                squares[self.groups.index(group)] += self.square(part, alone).cpu()
        return dict(zip(self.groups, self.norm_over(squares).sqrt().tolist(), strict=True))

    def to(self, device: torch.device | str, *, with_parts: bool) -> None:
        """Move the moments, and on request the parts themselves, to a device."""
        for of_parts in self.moments.values():
            for part, (first, second) in of_parts.items():
                of_parts[part] = (first.to(device), second.to(device))
        if with_parts:
            for part in self.parts:
                part.data = part.data.to(device)


def squared_norm(part: Tensor, gradient: Tensor) -> Tensor:
    """Squared norm of a gradient; the default where no rank repeats values of another."""
    found: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    return found


def packed_state(recipe: AdamW, num_steps: int, moments: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Pack both moments of each parameter, whole or what stands for them, in the form of `Optimizers.state` for a recipe."""
    places = [torch.nn.Parameter(torch.empty(0)) for _ in moments]
    template = torch.optim.AdamW(
        places, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay, fused=True
    ).state_dict()
    step = torch.tensor(float(num_steps))
    of_parameters = {i: {"step": step.clone(), **dict(zip(MOMENTS, both, strict=True))} for i, both in enumerate(moments)}
    return {"kind": "AdamW", "recipe": asdict(recipe), "num_steps": num_steps, "state": {**template, "state": of_parameters}}


def unpacked_state(saved: dict[str, Any], num_parameters: int) -> tuple[AdamW, int, list[tuple[Tensor, Tensor] | None]]:
    """Unpack `packed_state`, or another trainer's state; None for a parameter that was never stepped.

    Raises:
        EngineError: the state of another optimiser than AdamW.
    """
    recipe = _recipe_of(saved)
    if type(recipe) is not AdamW or recipe.groups:
        what = f"the checkpoint has the state of {recipe}, and this trainer has AdamW alone, without groups of weights"
        raise EngineError(what, now="Take one of the train engines `embedded` and `fsdp`.")
    states = saved["state"]["state"]
    found = [states.get(i) for i in range(num_parameters)]
    return recipe, int(saved["num_steps"]), [None if one is None else (one[MOMENTS[0]], one[MOMENTS[1]]) for one in found]
