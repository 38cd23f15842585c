"""Record which experts the routers of a mixture choose, replay the choice of another pass, and keep experts evenly loaded.

    router(hidden) --scores--> topk(scores, k) --> experts, gates of these
                               ^ read here, or replaced by given experts: their gates are then gathered from the same scores

A rollout engine and a trainer round differently, and so do the weights before and after an optimiser step. Where two experts are almost
equal for a token, that chooses another one, and the token's log-probability jumps. Replaying the rollout's choice (R3), or that of the
trainer's pass before the update (R2), leaves a function of the weights that is smooth, and whose gradient goes through the gates.

The router's own code stays: what it does around its `topk` (softmax or sigmoid, groups of experts, a bias that counts for the choice alone,
normalised or scaled gates) is computed as ever. `Routers` finds them by class, and `check` proves that each makes one choice a token that
can be replaced; what it can't prove is refused by name. A token whose experts are unknown is routed by the model.

    experts of the tokens of a batch --`pack`--> `Packed.experts`, of its rows --`Routers.use`--> a pass
    `Routers.chosen` of a pass --`Packed.row_of_token`--> experts of the tokens of a batch

Losses of routers are `Balanced`. A mini-batch's balance is a product of two means over its tokens, which micro-batches can't add up; so the
means are over each sequence alone, whose tokens are always in one pass. A term of a sequence counts as much as its loss's terms do. Their
gradient joins that of the logits in the backward pass, so that neither shards, stages nor recomputed layers know of it.

Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers", arXiv:2510.11370 (R3); replay
of the trainer's own old pass: Zheng et al. 2025 (GSPO), arXiv:2507.18071, section 5.3. Of the losses, see `Balanced`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from m2flow.engines.models.packing import Packed, batched_logits, num_masked, pack
from m2flow.errors import EngineError
from m2flow.recipe import Balance, Model
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, compact_experts, expanded_experts

# Shapes: R rows of a pass, T tokens of a batch, L routers of the model, k experts of a token, E experts of a layer.


@dataclass(frozen=True)
class Mixture:
    """How many experts a model chooses from, and where."""

    num: int
    """Routers of the model, L."""
    num_of_token: int
    """Experts of a token at each router, k."""
    num_experts: int
    """Experts of a layer, E."""


@final
class Routers:
    """The routers of one model, in the order of its layers. Their `forward` is wrapped; classes, names and hooks stay as they are."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._kind = config.model_type
        found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
        if not found:
            raise not_a_mixture(self._kind)
        self.num_experts = max(int(getattr(module, "num_experts", 0) or module.weight.shape[0]) for _, module in found)
        self._layers = [next((int(part) for part in name.split(".") if part.isdigit()), -1) for name, _ in found]
        self._num_layers = int(config.num_hidden_layers)
        self.num_of_token = 0
        """Experts of a token; known after `check`."""
        self._given: Tensor | None = None
        self._again: list[Tensor | None] = []
        """While a pass is computed again: what routers chose in it."""
        self._made: list[Tensor | None] = [None] * len(found)
        self._own: list[Tensor | None] = [None] * len(found)
        """What the routers would have chosen."""
        self.loads = Loads()
        """Loads by predicted tokens since the last step."""
        self._balanced: Balanced | None = None
        """The losses of the next pass."""
        self._has_logits = [False] * len(found)
        """Whether a router's logits were seen since `use`."""
        self._modules: list[Any] = [module for _, module in found]
        """None: its layer is on another rank."""
        self.group: Any = None
        """The ranks that have a pass's rows among them. None: all are here."""
        self.gradient_scale = 1.0
        """What the gradient of a sum of terms is multiplied by on its way back."""
        for i, (_, module) in enumerate(found):
            module.forward = functools.partial(self._route, i, module.forward)

    @property
    def num(self) -> int:
        return len(self._made)

    def keep(self, model: Any) -> None:
        """Drop the routers that are no longer in the model: layers of other stages. Those that stay keep their numbers."""
        here = set(model.modules())
        self._modules = [module if module in here else None for module in self._modules]

    @property
    def mixture(self) -> Mixture:
        """After `check`."""
        return Mixture(self.num, self.num_of_token, self.num_experts)

    def use(self, experts: Tensor | None, balanced: Balanced | None = None) -> None:
        """Set the experts of the rows of the next pass and its recomputations, int64 [R, L, k], -1 where unknown. None: the model's own.

        Args:
            balanced: losses that the pass has. None: none.

        Raises:
            EngineError: they are of another number of layers.
        """
        if experts is not None and experts.shape[1] != self.num:
            experts = self.of_routers(experts)
        self._given, self._balanced = experts, balanced
        self._made, self._own = [None] * self.num, [None] * self.num
        self._has_logits = [False] * self.num

    def of_routers(self, experts: Tensor) -> Tensor:
        """The experts of rows, int64 [R, L, k], of those of all layers or of the layers with routers alone.

        Raises:
            EngineError: they are of another model.
        """
        if experts.shape[1] == self._num_layers:
            experts = experts[:, self._layers]  # A server reports layers without experts, too.
        check_layers(experts, self.mixture)
        return experts

    def remember(self) -> Callable[[], AbstractContextManager[None]]:
        """Keep what is set for the pass that goes through the model, and what it has chosen: to be entered while some of its layers are
        computed again, whatever pass goes through the model by then. Rows go where they went."""
        made, balanced = list(self._made), self._balanced

        @contextmanager
        def again() -> Iterator[None]:
            others = self._again, self._balanced, self._made, self._own
            self._again, self._balanced, self._made, self._own = made, balanced, [None] * self.num, [None] * self.num
            try:
                yield
            finally:
                self._again, self._balanced, self._made, self._own = others

        return again

    def balanced(self, packed: Packed, batch: Batch, denominator: object, balance: Balance | None) -> Packed:
        """A packed micro-batch with the losses of its routers, if it shall have some; `denominator` as of `Balanced.of`."""
        if balance is None:
            return packed
        found = Balanced.of(balance, packed, batch, denominator, self.mixture)
        if found is not None:
            found.scale = self.gradient_scale
        return replace(packed, balanced=found)

    def chosen(self, packed: Packed | None = None) -> Tensor:
        """The experts of the last pass, int64 [R, L, k]; of all its rows, where ranks have some each, if it is given.

        Raises:
            EngineError: a router made no choice.
        """
        made = [one for one in self._made if one is not None]
        if len(made) < self.num or len({one.shape for one in made}) > 1:
            raise EngineError(f"a router of a {self._kind!r} model makes no one choice of experts for each token", now=LEAVE_OUT)
        found = torch.stack(made, 1)
        return found if packed is None else self.of_all_rows(found, packed)

    def of_all_rows(self, own: Tensor, packed: Packed) -> Tensor:
        """The experts of all rows of a pass, from those of the rows that are here. Collective where ranks have some each."""
        if packed.place is None:
            return own
        here = packed.place >= 0
        found = own.new_zeros(len(here), *own.shape[1:])
        found[here] = own[packed.place[here]]
        dist.all_reduce(found, group=self.group)
        return found

    def put_chosen(self, found: Tensor) -> None:
        """Put the experts of the last pass into those of all routers, int64 [R, L, k]: of the routers that it went through here."""
        for i, one in enumerate(self._made):
            if one is not None:
                found[:, i] = one

    def counted(self, packed: Packed, *, counts: bool) -> dict[str, Tensor]:
        """For each predicted token of the last pass, the share of routers that would have chosen other experts than those given for the row
        that predicts it: float32 [T], as `REROUTED`, if any were given; and the losses of its sequence, if the pass has some. Where a pass
        goes through some of the routers here, others add their part. Where ranks have some of the rows each, the tokens of `REROUTED` are
        those that the rows here predict, and losses are parts of sums: `routed` has all. Collective then, if there are losses.

        Args:
            counts: take the pass into `loads`.
        """
        if self._balanced is not None and self.group is not None:
            self._balanced.add_up(self.group)
        if counts:
            num_tokens = torch.bincount(packed.predictors, minlength=packed.num_rows).float()
            for i, one in enumerate(self._made):
                if one is not None:
                    self.loads.add(i, one, num_tokens, self.mixture)
        losses = {} if self._balanced is None else self._balanced.metrics()
        if packed.experts is None:
            return losses
        made = [(one, own) for one, own in zip(self._made, self._own, strict=True) if one is not None and own is not None]
        others = sum((are_others(own, chosen).float() for chosen, own in made), torch.zeros(packed.num_rows, device=packed.targets.device))
        return {**losses, REROUTED: others[packed.predictors] / self.num}

    def routed(self, packed: Packed, *, counts: bool) -> dict[str, Tensor]:
        """As `counted`, of all rows of the pass on each rank that has some."""
        found = self.counted(packed, counts=counts)
        if packed.which is None:
            return found
        if (own := found.get(REROUTED)) is not None:
            found[REROUTED] = own.new_zeros(len(packed.which)).masked_scatter_(packed.which, own)
        for values in found.values():
            dist.all_reduce(values, group=self.group)
        return found

    def check(self, run: Callable[[], Tensor], balance: Balance | None = None) -> None:
        """Prove on a pass, called `run`, that choices are recorded, and that others take effect.

        Args:
            balance: what the routers must have a place for. None: nothing.
        Raises:
            EngineError: they are not, or have not.
        """
        with torch.no_grad():
            self.use(None)
            plain = run()
            own, has_logits = self.chosen(), all(self._has_logits)
            self.num_of_token = int(own.shape[-1])
            self.use((own + 1) % self.num_experts)
            other, replayed = run(), self.chosen()
            self.use(own)
            again = run()
            self.use(None)
        is_right = bool((replayed == (own + 1) % self.num_experts).all()) and torch.allclose(plain, again, atol=1e-4, rtol=1e-4)
        if not is_right or torch.equal(plain, other):
            raise EngineError(f"a {self._kind!r} model does not go by the experts that are chosen for its routers", now=LEAVE_OUT)
        if balance is not None and not has_logits:
            raise EngineError(f"a router of a {self._kind!r} model computes no one logit for each expert", now=LEAVE_OUT)
        if balance is not None and balance.bias_step and None in map(_bias_of, self._modules):
            raise without_bias(self._kind)

    def settled(self, counts: Tensor, balance: Balance | None) -> dict[str, float]:
        """What an optimiser step says of experts that had so many tokens since the last one, [L, E]; it moves biases."""
        if balance is not None and balance.bias_step:
            self.move_biases(counts, balance.bias_step)
        return load_metrics(counts)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def move_biases(self, counts: Tensor, step: float) -> None:
        """Make experts with fewer tokens than the mean likelier, and those with more less likely, each by `step`.

            bias[l, e] += step * sign(mean over e' of counts[l, e'] - counts[l, e])

        Args:
            counts: tokens of each expert since the last step, over all ranks, [L, E]; without any token nothing moves. Those of routers
                that are elsewhere move there.
        """
        if counts.any():
            for module, own in zip(self._modules, counts, strict=True):
                if module is None:
                    continue
                bias = _bias_of(module)  # Found anew: a trainer may have put another tensor in its place.
                assert bias is not None
                move_bias(bias, own, step)

    def _route(self, i: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with _Choice(self, i):
            return forward(*arguments, **options)

    def choice(self, i: int, scores: Tensor, found: Any) -> Any:
        """What router i gets of its top k: recorded, and with given experts in their place."""
        experts = self._own[i] = found.indices
        given = self._again[i] if self._again else None if self._given is None else self._given[:, i]
        if given is not None:
            given = given.to(experts.device)
            if given.shape != experts.shape:
                raise EngineError(f"experts of {list(given.shape)} rows came for a pass of {list(experts.shape)}", now=LEAVE_OUT)
            experts = given.where((given >= 0).all(-1, keepdim=True), experts)
            found = torch.return_types.topk((scores.gather(-1, experts), experts))
        self._made[i] = experts.detach()
        if self._balanced is not None and not self._again:  # Computed again, rows go where they went.
            self._balanced.choose(i, experts.detach())
        return found

    def logits(self, i: int, found: Tensor) -> Tensor:
        """What router i gets for its logits: with the gradient of the losses, where the pass has some."""
        self._has_logits[i] = True
        return found if self._balanced is None else self._balanced.taught(i, found)

    def is_sigmoid(self, i: int) -> None:
        """Router i scores each expert by itself."""
        if self._balanced is not None:
            self._balanced.is_sigmoid = True


_LOGITS = (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, torch.special.expit)


class _Choice(TorchFunctionMode):  # type: ignore[misc]
    """Watches the functions that a router calls for its choice: the first product with a number for each expert, and the `topk` over all
    experts of each row."""

    def __init__(self, routers: Routers, i: int) -> None:
        super().__init__()
        self._routers, self._i = routers, i
        self._has_logits = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in _LOGITS and not self._has_logits and found.ndim == 2 and found.shape[1] == self._routers.num_experts:
            self._has_logits = True
            return self._routers.logits(self._i, found)
        if function in _SIGMOIDS:
            self._routers.is_sigmoid(self._i)
        if function not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        # A choice of groups is over fewer, and over the experts of a group in three dimensions.
        return self._routers.choice(self._i, scores, found) if scores.ndim == 2 and scores.shape[1] == self._routers.num_experts else found


REROUTED = "rerouted"
"""Metric of an update that replays: the share of its tokens' layers in which the weights of now would have chosen other experts."""
BALANCE_LOSS, Z_LOSS = "balance_loss", "z_loss"
"""Metrics of an update with losses of routers: means over its tokens of those of their sequences, before they are weighted."""
OF_TOKENS = (REROUTED, BALANCE_LOSS, Z_LOSS)
"""Those of `Routers.counted`."""
LEAVE_OUT = "Leave replay_routing and balance out."


def not_a_mixture(kind: str) -> EngineError:
    return EngineError(f"a {kind!r} model is no mixture of experts whose routing can be replayed or balanced", now=LEAVE_OUT)


def without_bias(kind: str) -> EngineError:
    return EngineError(
        f"routers of a {kind!r} model have no bias that counts for the choice of experts alone, so balance has no bias_step there",
        now="Take Balance(loss=...), or a model as DeepSeek-V3.",
    )


def _bias_of(router: Any) -> Tensor | None:
    """What a router adds to its scores for the choice alone."""
    found = [one for name, one in router.named_buffers() if name.endswith("e_score_correction_bias")]
    return found[0] if len(found) == 1 else None


@torch.no_grad()  # type: ignore[untyped-decorator]
def move_bias(bias: Tensor, counts: Tensor, step: float) -> None:
    """Move the bias of one router as `Routers.move_biases` does; `counts` are its experts' tokens, [E]."""
    counts = counts.double()
    bias.add_((counts.mean() - counts).sign().view_as(bias).to(bias), alpha=step)


def check_layers(experts: Tensor, mixture: Mixture) -> None:
    """Check that experts, int [R, layers, k], are of such a model. Raises `EngineError`."""
    if experts.shape[1:] != (mixture.num, mixture.num_of_token):
        what = (
            f"{experts.shape[2]} experts in {experts.shape[1]} layers came for a model with {mixture.num_of_token} at {mixture.num} routers"
        )
        raise EngineError(what, now="Do trainer and rollout engine load the same model?")


class Loads:
    """How many tokens each expert had, by router, since somebody asked."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, router: int, chosen: Tensor, num_tokens: Tensor, mixture: Mixture) -> None:
        """Add the experts of rows, int [R, k], each of which predicts so many tokens, float32 [R]."""
        if self._counts is None:
            self._counts = torch.zeros(mixture.num, mixture.num_experts, device=chosen.device)
        self._counts[router].index_add_(0, chosen.flatten(), num_tokens.repeat_interleave(chosen.shape[1]))

    def taken(self) -> Tensor:
        """float32 [L, E], and begin anew; [0, 0] if there was nothing."""
        counts, self._counts = self._counts, None
        return torch.zeros(0, 0) if counts is None else counts


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Say how evenly the tokens of a step were spread over experts, the mean over layers of: the tokens of the expert with the most, and of
    that with the fewest, over their mean (both 1: all have equally many); and the share of experts without any.

    Args:
        counts: tokens of each expert, [L, E].

    >>> load_metrics(torch.tensor([[3.0, 1.0, 0.0, 0.0]]))
    {'expert_load/max': 3.0, 'expert_load/min': 0.0, 'expert_load/idle': 0.5}
    """
    if not counts.any():
        return {}
    relative = counts.double() / counts.double().mean(1, keepdim=True)
    found = {"max": relative.amax(1), "min": relative.amin(1), "idle": (counts == 0).double()}
    return {f"expert_load/{name}": float(values.mean()) for name, values in found.items()}


# ---- losses of routers


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which rows of a pass the tokens of each sequence have. Of S sequences; N counts a row that several share for each of them."""

    rows: Tensor
    """int64 [N]"""
    sequence: Tensor
    """int64 [N]"""
    lengths: Tensor
    """float32 [S]: rows of each, also where a rank has a part of them."""
    weights: Tensor
    """float32 [S]: what the predicted tokens of each weigh in the loss, together."""
    of_target: Tensor
    """int64 [T]: the sequence of each predicted token."""

    @classmethod
    def of(cls, packed: Packed, mask: npt.NDArray[np.bool_], weights: Tensor) -> Sequences:
        """Find the sequences of a packed micro-batch.

        Args:
            mask: of the tokens of all samples, those that are predicted. weights: of these in the loss, float32 [T].
        """
        device, has_row = packed.targets.device, packed.row_of_token >= 0
        sequence = torch.from_numpy(packed.sequence_of_token[has_row]).to(device)
        of_target = torch.from_numpy(packed.sequence_of_token[mask]).to(device)
        count = int(packed.sequence_of_token.max(initial=-1)) + 1
        total = torch.zeros(count, device=device).index_add_(0, of_target, weights)
        lengths = torch.bincount(sequence, minlength=count).clamp(min=1).float()
        return cls(torch.from_numpy(packed.row_of_token[has_row]).to(device), sequence, lengths, total, of_target)

    def part(self, place: Tensor) -> Sequences:
        """Return the sequences as a rank sees them that has some rows alone; `place` is as in `Packed.place`."""
        rows = place[self.rows]
        own = rows >= 0
        return replace(self, rows=rows[own], sequence=self.sequence[own])


class Balanced:
    """The losses of the routers of one pass: for each sequence and router, means over the sequence's tokens, the prompt's among them.

        balance = E sum_e f[e] P[e],    f[e] = tokens sent to e / tokens,    P[e] = mean over tokens of p[e]
        z       = mean over tokens of log(sum_e exp(logit[e]))^2

    p is the softmax of a router's logits, or their sigmoids over these's sum where the router takes sigmoids. Experts that are replayed are
    those that tokens are sent to. balance is k where all is even, and up to E. Both are means over routers, and a sequence weighs what its
    predicted tokens weigh in the loss: the total divided by the loss's denominator is a mean over these. A prompt that several samples
    share counts for each of them, as if it were not shared. f has no gradient.

    A pass may have its rows on several ranks; then f is summed over them, by each router at once (`groups`) or after the forward pass
    (`add_up`), and metrics are those of the rows here: parts of a sum.

    Source: balance: Fedus et al. 2021, arXiv:2101.03961, eq. 4, times k, as transformers' `load_balancing_loss_func` for one layer and one
    sequence; means over sequences, and sigmoids: DeepSeek-AI 2024, arXiv:2412.19437, eq. 17-20, times k; z: Zoph et al. 2022,
    arXiv:2202.08906, eq. 5; biases (`Routers.move_biases`): Wang et al. 2024, arXiv:2408.15664.

    Args:
        groups: process groups over which each router sums f.
    """

    def __init__(self, balance: Balance, sequences: Sequences, mixture: Mixture, groups: Sequence[Any] = ()) -> None:
        self._balance, self._sequences, self._mixture, self._groups = balance, sequences, mixture, groups
        self._logits: dict[int, Tensor] = {}
        """Router -> logits that its choice belongs to."""
        self._sent: dict[int, Tensor] = {}
        """Router -> how many tokens of a sequence it sent to each expert, float32 [S, E]."""
        self._fresh: list[int] = []
        """Routers whose tokens `add_up` has not summed."""
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        """Router -> sums over a sequence's rows here of p, [S, E], and of z, [S]."""
        self.is_sigmoid = False
        self.scale = 1.0
        """As `Routers.gradient_scale`."""

    @classmethod
    def of(cls, balance: Balance, packed: Packed, batch: Batch, denominator: object, mixture: Mixture) -> Balanced | None:
        """Make the losses of a packed micro-batch's routers. None: `balance` has no losses.

        Args:
            denominator: of the loss (`m2flow.recipe.Loss`), by which tokens weigh what they do in it. None: they weigh nothing.
        """
        if not (balance.loss or balance.z_loss):
            return None
        mask = batch.ragged("loss_mask")
        counts = num_masked(mask)
        weights = np.full(len(counts), 0.0 if denominator is None else 1.0)
        if denominator == "sequences":
            weights = 1 / np.maximum(counts, 1)
        elif denominator == "groups":
            weights = 1 / np.maximum(np.asarray(batch.dense("group_lengths"), np.float64), 1)
        of_token = torch.from_numpy(np.repeat(weights, counts).astype(np.float32)).to(packed.targets.device)
        sequences = Sequences.of(packed, mask.values.astype(bool), of_token)
        return cls(balance, sequences if packed.place is None else sequences.part(packed.place), mixture)

    def part(self, place: Tensor, groups: Sequence[Any]) -> Balanced:
        """Return the losses as a rank computes them that has some rows alone, and shares the others with these groups; `place` is as in
        `Packed.place`."""
        found = Balanced(self._balance, self._sequences.part(place), self._mixture, groups)
        found.is_sigmoid = self.is_sigmoid
        return found

    def taught(self, router: int, logits: Tensor) -> Tensor:
        """The logits [rows, E], with the gradient of the losses added to their own. `choose` must follow."""
        self._logits[router] = logits.detach()
        found: Tensor = _Taught.apply(logits, router, self)
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def choose(self, router: int, experts: Tensor) -> None:
        """Set the experts of rows, int64 [rows, k]. Collective in the groups."""
        rows, sequence, lengths = self._sequences.rows, self._sequences.sequence, self._sequences.lengths
        count, width = len(lengths), self._mixture.num_experts
        where = (sequence[:, None] * width + experts[rows]).flatten()
        sent = torch.bincount(where, minlength=count * width).float()
        for group in self._groups:
            dist.all_reduce(sent, group=group)
        self._sent[router] = sent.view(count, width)
        self._fresh.append(router)
        z, p = self._scores(self._logits[router])
        of_p = torch.zeros(count, width, device=z.device).index_add_(0, sequence, p[rows])
        self._sums[router] = of_p, torch.zeros(count, device=z.device).index_add_(0, sequence, z[rows].square())

    def add_up(self, group: Any) -> None:
        """Sum f of what went through the routers since the last call over ranks that have the other rows. After a forward pass, before its
        way back. Collective: a rank whose router failed brings zeros."""
        found = self._sequences.weights.new_zeros(self._mixture.num, len(self._sequences.lengths), self._mixture.num_experts)
        for router in self._fresh:
            found[router] = self._sent[router]
        dist.all_reduce(found, group=group)
        for router in self._fresh:
            self._sent[router] = found[router]
        self._fresh.clear()

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The square root of z, log(sum(exp(logits))), float32 [rows], and p, [rows, E]."""
        logits = logits.float()
        p = torch.nn.functional.normalize(logits.sigmoid(), 1.0, 1) if self.is_sigmoid else logits.softmax(1)
        return logits.logsumexp(1), p

    def _shares(self, router: int) -> Tensor:
        """f, float32 [S, E]."""
        return self._sent[router] / self._sequences.lengths[:, None]

    def metrics(self) -> dict[str, Tensor]:
        """For each predicted token the losses of its sequence, the mean over routers, each float32 [T]; of the rows and routers here."""
        lengths, width = self._sequences.lengths, self._mixture.num_experts
        total = self._sequences.weights.new_zeros(2, len(lengths))
        for router, (of_p, of_z) in self._sums.items():
            total += torch.stack((width * (self._shares(router) * of_p).sum(1), of_z)) / lengths
        total /= self._mixture.num
        return dict(zip((BALANCE_LOSS, Z_LOSS), total[:, self._sequences.of_target], strict=True))

    def sums(self) -> Mapping[str, float]:
        """The sums over predicted tokens of `metrics`; 0 of a rank without routers."""
        return {name: float(values.double().sum()) for name, values in self.metrics().items()}

    def gradient(self, router: int, logits: Tensor) -> Tensor:
        """Return the gradient of one router's weighted losses by its logits, float32 [rows, E]."""
        assert router in self._sent, "a router has logits, and chose no experts"
        rows, sequence, lengths = self._sequences.rows, self._sequences.sequence, self._sequences.lengths
        z, p = self._scores(logits)
        of_sequence = self._sequences.weights / lengths * (self.scale / self._mixture.num)
        by_p = (of_sequence * (self._balance.loss * self._mixture.num_experts))[:, None] * self._shares(router)
        by_p = torch.zeros_like(p).index_add_(0, rows, by_p[sequence])
        by_p = by_p - (by_p * p).sum(1, keepdim=True)
        if self.is_sigmoid:
            sigmoid = logits.float().sigmoid()
            found = by_p * sigmoid * (1 - sigmoid) / sigmoid.sum(1, keepdim=True)
        else:
            found = by_p * p
        if self._balance.z_loss:
            by_z = torch.zeros_like(z).index_add_(0, rows, of_sequence[sequence]) * (2 * self._balance.z_loss) * z
            found = found + by_z[:, None] * logits.float().softmax(1)
        return found


class _Taught(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, router: int, balanced: Balanced) -> Tensor:
        ctx.logits, ctx.router, ctx.balanced = logits.detach(), router, balanced
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad + ctx.balanced.gradient(ctx.router, ctx.logits).to(grad.dtype), None, None


def are_others(own: Tensor, chosen: Tensor) -> Tensor:
    """Whether rows go to other experts than their own, whatever the order: int [R, k] twice to bool [R]."""
    return (own.sort(-1).values != chosen.sort(-1).values).any(-1)


# ---- of a trainer: between the tokens of a batch and the rows of a pass


def checked_routers(model: Any, device: str, source: Model) -> Routers | None:
    """Find and check the routers of a model that passed `m2flow.engines.models.packing.check_model`, if they are to be replayed or
    balanced. Raises `EngineError`."""
    if source.routing is None and source.balance is None:
        return None
    routers = Routers(model)
    tokens = Ragged.of([np.arange(9) % model.config.get_text_config().vocab_size], np.int32)
    packed = pack(np.zeros(1, np.int64), tokens, Ragged(np.arange(9) > 0, tokens.offsets), device=device)
    routers.check(lambda: batched_logits(model, packed), source.balance)
    return routers


def experts_of(batch: Batch) -> Ragged | None:
    """The experts of a batch's tokens, int16 [T, L, k], -1 where unknown; None: nobody recorded them."""
    if ROUTED_EXPERTS not in batch:
        return None
    column = batch.ragged(ROUTED_EXPERTS)
    return Ragged(expanded_experts(column.values), column.offsets)


def beside_experts(
    numbers: npt.NDArray[np.float64], mask: Ragged, passed: tuple[Packed, Tensor] | None, mixture: Mixture
) -> npt.NDArray[np.float64]:
    """Put the numbers of masked tokens and the experts of a pass side by side: [tokens, 1 + L k], for each of a batch's tokens.

    Args:
        numbers: [T, 1], of the tokens under the mask.
        passed: what went through the model, and the experts of its rows, int [R, L, k]. None: nothing, so that no experts are known.
    """
    found = np.full((len(mask.values), 1 + mixture.num * mixture.num_of_token), -1.0)
    found[:, 0] = 0.0
    found[mask.values.astype(bool), 0] = numbers[:, 0]
    if passed is not None:
        packed, chosen = passed
        has_row = packed.row_of_token >= 0
        found[has_row, 1:] = chosen.flatten(1).cpu().numpy()[packed.row_of_token[has_row]]
    return found


def column_of(found: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64], mixture: Mixture) -> Ragged:
    """The column of experts that `beside_experts` found."""
    experts = found[:, 1:].astype(np.int16).reshape(len(found), mixture.num, mixture.num_of_token)
    return Ragged(compact_experts(experts, mixture.num_experts), offsets)
