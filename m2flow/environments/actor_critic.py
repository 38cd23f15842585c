"""Small actors and critics that learn in Gymnasium's environments: the roles `Simulator`, `Actor` and `ActorCritic` of a flow.

    simulator, learner = Simulator("CartPole-v1", count=8), ActorCritic("CartPole-v1")
    learned, played = learner.start(), simulator.start(lanes(2))  # two lanes of eight environments
    for step in steps(100):
        played = simulator.play(played, learned, horizon=64)      # a piece of each environment's episodes
        learned = learner.learn(learned, played)                  # PPO on it
        log(episode_return=episode_return(played))

A lane is a row: environments that are stepped one after the other, by an actor that sees them as one batch. The plan spreads the lanes over
the workers for functions, which play side by side. Seeds, random numbers and batches are the lane's, so the number of workers, and which
of them has a lane, changes no result.

`play` acts where the environments are, with the least to send: best for networks that take less time than a message. `Actor` is a role of
its own, so that the plan places it apart, and lanes are acted for while others are stepped. The piece is the same, bit by bit:

    for _ in range(64):
        played = simulator.step(played, actor.act(played, learned))
    played = simulator.collect(played)

What a call gives is text that holds everything that the next one needs: the state of the environments, the weights and the optimiser's.
So no call has an effect: it may run anywhere, be run again, and is answered from the ledger when a run resumes. Of a piece under way that
is what the environments were at its beginning, and the actions since. Lanes go to the worker that
played them before, as rows of a role's calls do (`m2flow.micro.scheduler.dispatch`), and it goes on with the environments that it has;
another acts their running episodes again, and compares what they show. Networks are an MLP for numbers and a small CNN for pictures, with
a categorical or a Gaussian head; losses and advantages are those of `m2flow.algorithms`.

Legend: T steps, E environments, F numbers of an observation, A actions.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.algorithms.gae import gae
from m2flow.environments.env import Array, Env, Spaces, Vector, VectorStep, made
from m2flow.errors import EngineError, OptionError
from m2flow.macro.datasets import Dataset
from m2flow.macro.handles import Rows
from m2flow.macro.ops import Role, call, op
from m2flow.recipe import AdamW, check_count, check_number
from m2flow.samples import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

_WORLD = "world"


def pack(arrays: Mapping[str, Array], **texts: str) -> str:
    """Arrays and texts as one text."""
    packed = {
        name: [str(each.dtype), list(each.shape), base64.b64encode(np.ascontiguousarray(each).tobytes()).decode()]
        for name, each in arrays.items()
    }
    return json.dumps({**packed, **texts})


def unpack(text: str, *, without: Collection[str] = ()) -> tuple[dict[str, Array], dict[str, str]]:
    """What `pack` was given, without the arrays of some names."""
    packed = json.loads(text)
    arrays = {
        name: np.frombuffer(base64.b64decode(each[2]), each[0]).reshape(each[1]).copy()
        for name, each in packed.items()
        if isinstance(each, list) and name not in without
    }
    return arrays, {name: each for name, each in packed.items() if isinstance(each, str)}


# ---- networks

_LEAST_PICTURE = 8
"""Pixels across and down that both layers of a picture's network need: 4 by 4 in steps of 2, then 3 by 3."""


def build(spaces: Spaces, hidden: tuple[int, ...], seed: int | None) -> nn.ModuleDict:
    """Make an actor and a critic. Their first weights are a function of the seed; None: any, since others will be loaded.

    Source:
        Orthogonal weights with gains sqrt(2), 0.01 for the actor's and 1 for the critic's head: Andrychowicz et al. 2021, "What matters in
        on-policy reinforcement learning?", arXiv:2006.05990; the code of Huang et al. 2022, "The 37 implementation details of PPO".
    """
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        outputs = spaces.num_actions or int(np.prod(spaces.action))
        gains = (None, None) if seed is None else (0.01, 1.0)
        heads = {"actor": _network(spaces, hidden, outputs, gains[0]), "critic": _network(spaces, hidden, 1, gains[1])}
        model = nn.ModuleDict(heads)
        if not spaces.num_actions:
            model["spread"] = nn.ParameterList([nn.Parameter(torch.zeros(outputs))])
    return model


def _network(spaces: Spaces, hidden: tuple[int, ...], outputs: int, gain: float | None) -> nn.Sequential:
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    width = int(np.prod(spaces.observation))
    if spaces.is_picture:
        height, across, channels = spaces.observation
        if min(height, across) < _LEAST_PICTURE:
            raise OptionError(
                f"pictures of {height} x {across} with {channels} channels are too small for the network, which takes {_LEAST_PICTURE} x "
                f"{_LEAST_PICTURE} or more",
                now="Have it show [height, width, channels], or small ones as a vector (Gymnasium's FlattenObservation).",
            )
        layers += [nn.Conv2d(channels, 16, 4, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
        with torch.no_grad():
            width = int(nn.Sequential(*layers)(torch.zeros(1, channels, height, across)).shape[1])
    for size in hidden:
        layers += [nn.Linear(width, size), nn.Tanh()]
        width = size
    layers.append(nn.Linear(width, outputs))
    for layer in layers:
        if gain is not None and isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, 2**0.5 if layer is not layers[-1] else gain)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def as_input(observations: Array, spaces: Spaces) -> Tensor:
    """Observations [N, ...] as the networks take them: float32, pictures with their channels first and from 0 to 1."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(observations, np.float32))
    return tensor.permute(0, 3, 1, 2) / 255 if spaces.is_picture else tensor


def _logprobs(model: nn.ModuleDict, out: Tensor, actions: Tensor, spaces: Spaces) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of actions under what the actor made of observations, and the entropy [N] of what they were drawn from."""
    import torch

    if spaces.num_actions:
        every = torch.log_softmax(out, -1)
        return every.gather(1, actions.long()[:, None])[:, 0], -(every.exp() * every).sum(-1)
    drawn = torch.distributions.Normal(out, next(model["spread"].parameters()).exp().expand_as(out))
    return drawn.log_prob(actions).sum(-1), drawn.entropy().sum(-1)


class Acted(NamedTuple):
    """What an actor chose for the environments of a lane."""

    actions: Array
    logprobs: npt.NDArray[np.float32]


def _act(model: nn.ModuleDict, seen: Array, spaces: Spaces, rng: np.random.Generator) -> Acted:
    """Draw an action for each observation, with this generator's numbers."""
    import torch

    with torch.no_grad():
        out = model["actor"](as_input(seen, spaces))
        if spaces.num_actions:
            shares = out.double().softmax(-1).cumsum(-1).numpy()
            actions: Array = np.minimum((rng.random((len(shares), 1)) >= shares).sum(-1), spaces.num_actions - 1)
        else:
            spread = next(model["spread"].parameters()).exp().numpy()
            actions = (out.numpy() + spread * rng.standard_normal(out.shape)).astype(np.float32)
        return Acted(actions, _logprobs(model, out, torch.from_numpy(actions), spaces)[0].numpy())


def _load(model: nn.ModuleDict, arrays: Mapping[str, Array]) -> None:
    import torch

    weights = {name.removeprefix("w/"): torch.from_numpy(each) for name, each in arrays.items() if name.startswith("w/")}
    own, given = ({name: tuple(each.shape) for name, each in one.items()} for one in (model.state_dict(), weights))
    if own != given:
        raise OptionError(
            f"networks with weights of {', '.join(map(str, own.values()))} can't take those of {', '.join(map(str, given.values()))}",
            now="Give Simulator, Actor and ActorCritic the same task and the same `hidden`.",
        )
    model.load_state_dict(weights)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: these networks are too small for more, and sums then are the same in every process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- the roles


def lanes(num: int) -> Rows:
    """Rows for `Simulator.start`, one for each lane of environments. At most so many workers play at once."""
    check_count("num", num)
    return Dataset([{"prompt": "", "lane": number} for number in range(num)], name="lanes", shuffle=False).all()


class _Networks:
    """The networks with the weights of a learner's text, kept until others are asked for."""

    def __init__(self, hidden: tuple[int, ...]) -> None:
        self._hidden = hidden
        self._kept: tuple[str, nn.ModuleDict] | None = None

    def of(self, learned: str, spaces: Spaces) -> nn.ModuleDict:
        if self._kept is None or self._kept[0] != learned:
            model = build(spaces, self._hidden, None)
            _load(model, unpack(learned)[0])
            self._kept = learned, model
        return self._kept[1]


class _At(NamedTuple):
    """What each text of a lane has of where the lane is."""

    lane: int
    key: npt.NDArray[np.uint64]
    """[2], of the lane's random numbers."""
    num_steps: int
    """Steps of each environment before this piece."""
    num_acted: int
    """Steps of it so far."""

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> _At:
        if "key" not in arrays:
            raise EngineError(
                "a lane was played by an earlier version of m2flow, and its random numbers can't be gone on with",
                now="Begin the run anew, or resume it with the version that began it.",
            )
        num_acted = 0 if "seen" in arrays else len(arrays.get("actions", ()))
        return cls(int(arrays["lane"][0]), arrays["key"], int(arrays["num_steps"][0]), num_acted)

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the next step: each step has 2^64 blocks of its own of the lane's.

        Source:
            Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": a generator whose numbers are a function of key and place.
        """
        place = np.array([0, self.num_steps + self.num_acted, 0, 0], np.uint64)
        return np.random.Generator(np.random.Philox(key=self.key, counter=place))


@dataclass(eq=False)
class _Piece:
    """A piece of a lane's play under way."""

    vector: Vector
    seen: list[Array]
    steps: list[VectorStep] = field(default_factory=list)
    digest: str = ""
    """Of what a text says of where it is."""

    def act(self, actions: Array) -> None:
        self.steps.append(self.vector.step(actions))
        self.seen.append(self.vector.observations)


_OF_LANE = ("lane", "key", "num_steps", "running", "returns")
"""The arrays of a lane's texts that are not of single steps."""
_OF_STEPS = ("rewards", "terminated", "truncated", "is_real")


@final
class Simulator(Role):
    """Lanes of environments of one task. Those of a lane are stepped one after the other, by an actor that sees them as one batch.

    Args:
        task: the name of an environment of Gymnasium, or what makes an `Env` that has `spaces`.
        count: environments of each lane. seed: of their episodes.
        hidden: of the actor, as of the `ActorCritic` that learns; only `play` needs it.
    """

    def __init__(self, task: str | Callable[[], Env], count: int = 8, seed: int = 0, hidden: tuple[int, ...] = (64, 64)) -> None:
        check_count("count", count)
        self._task, self._count, self._seed = task, count, seed
        self._alive: dict[int, _Piece] = {}
        """Lane -> its environments."""
        self._networks = _Networks(tuple(hidden))

    def _fresh(self, lane: int) -> Vector:
        return Vector(lambda: made(self._task)[0], self._count, self._seed, first=lane * self._count)

    @call(granularity="sample")
    def start(self, lane: Sample, rng: np.random.Generator) -> str:
        """The environments of a lane at their first observations."""
        number = int(str(lane["lane"]))
        vector = self._fresh(number)
        record = vector.record()
        self._alive[number] = _Piece(vector, [vector.observations], digest=_digest(record))
        key = rng.integers(0, 2**64, 2, np.uint64)
        arrays = {"lane": np.array([number]), "key": key, "num_steps": np.zeros(1, np.int64), "now": vector.observations}
        return pack({**arrays, "running": np.zeros(self._count), "returns": np.zeros(0)}, world=record)

    def _going_on(self, at: _At, arrays: Mapping[str, Array], record: str) -> _Piece:
        """The environments where a text says: those that are at hand, or others that have acted the same."""
        actions = arrays["actions"] if at.num_acted else np.zeros(0)
        piece = self._alive.pop(at.lane, None)
        if piece is not None and piece.digest == _digest(record, actions):
            return piece
        if piece is not None:
            piece.vector.close()
        vector = self._fresh(at.lane)
        vector.restore(record)
        piece = _Piece(vector, [vector.observations])
        for each in range(at.num_acted):
            piece.act(actions[each])
        if at.num_acted:
            vector.check(arrays["now"])
        return piece

    def _collected(self, at: _At, before: Mapping[str, Array], piece: _Piece, acted: Sequence[Acted] | Acted) -> str:
        """A piece that ends here, as text."""
        running, returns = before["running"], before["returns"].tolist()
        for step in piece.steps:
            running = running + step.rewards
            ended = step.terminated | step.truncated
            returns += running[ended].tolist()
            running = np.where(ended, 0.0, running)
        actions, logprobs = acted if isinstance(acted, Acted) else map(np.stack, zip(*acted, strict=True))
        arrays = {"seen": np.stack(piece.seen), "actions": actions, "logprobs": logprobs}
        arrays |= {name: np.stack([getattr(step, name) for step in piece.steps]) for name in _OF_STEPS}
        own = {"lane": before["lane"], "key": at.key, "num_steps": np.array([at.num_steps + len(piece.steps)])}
        own |= {"running": running, "returns": np.array(returns[-self._count :])}
        record = piece.vector.record()
        self._alive[at.lane] = _Piece(piece.vector, [piece.vector.observations], digest=_digest(record))
        return pack({**own, **arrays}, world=record)

    @call(granularity="sample")
    @_one_thread()
    def play(self, past: str, learned: str, horizon: int) -> str:
        """Act `horizon` steps in each environment of a lane, from where `past` left them, with the actor of `learned`."""
        before, texts = unpack(past)
        at = _At.of(before)
        piece = self._going_on(at, before, texts[_WORLD])
        spaces = piece.vector.envs[0].spaces
        assert spaces is not None
        model, acted = self._networks.of(learned, spaces), _acted(before) if at.num_acted else []
        for _ in range(horizon):
            acted.append(_act(model, piece.vector.observations, spaces, at._replace(num_acted=len(acted)).rng))
            piece.act(acted[-1].actions)
        return self._collected(at, before, piece, acted)

    @call(granularity="sample")
    def step(self, seen: str, acted: str) -> str:
        """Step the environments of a lane by the actions that an `Actor` chose for what `seen` shows. The piece goes on."""
        before, texts = unpack(seen, without=_OF_STEPS)
        at = _At.of(before)
        piece = self._going_on(at, before, texts[_WORLD])
        chosen = Acted(**unpack(acted)[0])
        piece.act(chosen.actions)
        arrays = {name: np.stack([*(before[name] if at.num_acted else ()), now]) for name, now in chosen._asdict().items()}
        piece.digest = _digest(texts[_WORLD], arrays["actions"])
        self._alive[at.lane] = piece
        return pack({**{name: before[name] for name in _OF_LANE}, **arrays, "now": piece.vector.observations}, **texts)

    @call(granularity="sample")
    def collect(self, seen: str) -> str:
        """End the piece of a lane: what `play` gives, of the steps since the last one ended."""
        before, texts = unpack(seen)
        at = _At.of(before)
        if not at.num_acted:
            raise OptionError(f"lane {at.lane} has made no step since its last piece ended", now="Call step before collect.")
        return self._collected(at, before, self._going_on(at, before, texts[_WORLD]), Acted(before["actions"], before["logprobs"]))


@final
class Actor(Role):
    """Acts for lanes of environments that a `Simulator` steps, with the weights of an `ActorCritic`, whose `task` and `hidden` it has.

    Values are the learner's to say: it has the observations of a whole piece, and needs no message for each step.
    """

    def __init__(self, task: str | Callable[[], Env], hidden: tuple[int, ...] = (64, 64)) -> None:
        env, self._spaces = made(task)
        env.close()
        self._networks = _Networks(tuple(hidden))

    @call(granularity="sample")
    @_one_thread()
    def act(self, seen: str, learned: str) -> str:
        """Choose an action for each environment of a lane, as one batch. Returns actions and their log-probabilities."""
        arrays = unpack(seen, without=("logprobs", *_OF_STEPS))[0]
        now = arrays["seen"][-1] if "seen" in arrays else arrays["now"]
        return pack(_act(self._networks.of(learned, self._spaces), now, self._spaces, _At.of(arrays).rng)._asdict())


@final
class ActorCritic(Role):
    """An actor and a critic that learn by PPO from what a `Simulator` played.

    Args:
        task: the environment whose observations and actions they are for.
        hidden: sizes of the layers of both networks. seed: of their first weights.
        optimizer: by default AdamW(1e-3, max_grad_norm=0.5); its rate counts optimiser steps.
        epochs, minibatch_size: how often, and in what parts, a piece is learnt from; the size counts steps of environments.
        gamma, lam, clip, entropy_coef, value_coef: of PPO.
    Source:
        Schulman et al. 2017, arXiv:1707.06347. A piece that ends within an episode, and an episode that was cut off, are worth what the
        critic says of their last observation; one that terminated is worth nothing more: Pardo et al. 2018, arXiv:1712.00378.
    """

    def __init__(
        self,
        task: str | Callable[[], Env],
        hidden: tuple[int, ...] = (64, 64),
        seed: int = 0,
        optimizer: AdamW | None = None,
        epochs: int = 10,
        minibatch_size: int = 256,
        gamma: float = 0.99,
        lam: float = 0.95,
        clip: float = 0.2,
        entropy_coef: float = 0.0,
        value_coef: float = 0.5,
    ) -> None:
        check_count("epochs", epochs)
        check_count("minibatch_size", minibatch_size)
        check_number("gamma", gamma, above=0)
        env, self._spaces = made(task)
        self._hidden, self._seed = tuple(hidden), seed
        self._optimizer = optimizer or AdamW(1e-3, max_grad_norm=0.5)
        env.close()
        self._epochs, self._minibatch_size, self._gamma, self._lam = epochs, minibatch_size, gamma, lam
        self._clip, self._entropy_coef, self._value_coef = clip, entropy_coef, value_coef

    @call(granularity="batch")
    def start(self) -> str:
        """The first weights, and an optimiser that has made no step."""
        model = build(self._spaces, self._hidden, self._seed)
        arrays = {f"{kind}/{name}": np.zeros(each.shape, np.float32) for kind in "mv" for name, each in model.named_parameters()}
        return pack({**{f"w/{name}": each.numpy() for name, each in model.state_dict().items()}, **arrays, "steps": np.zeros(1, np.int64)})

    @call(granularity="batch")
    @_one_thread()
    def learn(self, learned: str, played: Sequence[str], rng: np.random.Generator) -> str:
        """Learn from what all lanes played. Returns the weights and the optimiser's state after it."""
        import torch

        before, rows = unpack(learned)[0], beside_each_other(played)
        model = build(self._spaces, self._hidden, None)
        _load(model, before)
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=self._optimizer.betas, eps=self._optimizer.eps, weight_decay=self._optimizer.weight_decay
        )
        for name, each in model.named_parameters():
            kept = {"exp_avg": torch.from_numpy(before[f"m/{name}"]), "exp_avg_sq": torch.from_numpy(before[f"v/{name}"])}
            optimizer.state[each] = {"step": torch.tensor(float(before["steps"][0])), **kept}
        batch = self._batch(model, rows)
        num_steps, size = int(before["steps"][0]), len(batch["advantages"])
        for _ in range(self._epochs):
            order = torch.from_numpy(rng.permutation(size))
            for part in order.split(self._minibatch_size):
                for group in optimizer.param_groups:
                    group["lr"] = self._optimizer.rate(num_steps)
                self._loss(model, {name: each[part] for name, each in batch.items()}).backward()
                if self._optimizer.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self._optimizer.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
        arrays = {f"w/{name}": each.numpy() for name, each in model.state_dict().items()}
        if not all(np.isfinite(each).all() for each in arrays.values()):
            raise EngineError(
                f"learning has diverged: after {num_steps} optimiser steps weights are no finite numbers",
                now="Lower the optimizer's rate, bound its max_grad_norm, or scale what the environment shows and pays.",
            )
        for name, each in model.named_parameters():
            arrays |= {f"m/{name}": optimizer.state[each]["exp_avg"].numpy(), f"v/{name}": optimizer.state[each]["exp_avg_sq"].numpy()}
        return pack({**arrays, "steps": np.array([num_steps])})

    def _batch(self, model: nn.ModuleDict, rows: Mapping[str, Array]) -> dict[str, Tensor]:
        """The real steps of a piece, environment after environment, with advantages and returns."""
        import torch

        horizon, count = rows["rewards"].shape
        with torch.no_grad():
            flat = as_input(rows["seen"].reshape(-1, *self._spaces.observation), self._spaces)
            values = model["critic"](flat)[:, 0].double().numpy().reshape(horizon + 1, count)
        advantages, returns = piece_advantages(rows, values, gamma=self._gamma, lam=self._lam)
        real = rows["is_real"].T.reshape(-1)
        observations = rows["seen"][:-1].swapaxes(0, 1).reshape(-1, *self._spaces.observation)[real]
        actions = rows["actions"].swapaxes(0, 1).reshape(horizon * count, *self._spaces.action)[real]
        return {
            "seen": as_input(observations, self._spaces),
            "actions": torch.from_numpy(actions),
            "behaviour_logprobs": torch.from_numpy(rows["logprobs"].T.reshape(-1)[real]),
            "advantages": torch.from_numpy((advantages - advantages.mean()) / (advantages.std() + 1e-8)).float(),
            "returns": torch.from_numpy(returns).float(),
        }

    def _loss(self, model: nn.ModuleDict, part: Mapping[str, Tensor]) -> Tensor:
        from m2flow.algorithms.losses import clipped_value, ppo_clip

        logprobs, entropy = _logprobs(model, model["actor"](part["seen"]), part["actions"], self._spaces)
        terms, _ = ppo_clip(
            logprobs=logprobs,
            behaviour_logprobs=part["behaviour_logprobs"],
            advantages=part["advantages"],
            eps_low=self._clip,
            eps_high=self._clip,
            entropy=entropy,
            entropy_coef=self._entropy_coef,
        )
        errors, _ = clipped_value(values=model["critic"](part["seen"])[:, 0], returns=part["returns"])
        return terms.mean() + self._value_coef * errors.mean()


def piece_advantages(
    rows: Mapping[str, Array], values: npt.NDArray[np.float64], *, gamma: float, lam: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Advantages and returns of the real steps of a piece of play, environment after environment.

        r'[t] = r[t] + gamma V[t + 1]        at the last step of an episode that was cut off, and of the piece; then `m2flow.algorithms.gae`

    Args:
        rows: `rewards`, `terminated`, `truncated`, `is_real`, each [T, E].
        values: float64 [T + 1, E], of the observation before each step and of the last one.
    Returns:
        Two of float64 [N], N the real steps.

    >>> one = {"rewards": np.ones((2, 1)), "is_real": np.ones((2, 1), bool)}
    >>> ends = {"terminated": np.array([[False], [True]]), "truncated": np.zeros((2, 1), bool)}
    >>> piece_advantages({**one, **ends}, np.full((3, 1), 5.0), gamma=1.0, lam=1.0)[1].tolist()
    [2.0, 1.0]
    """
    real, terminated, truncated = (rows[name].T.astype(bool) for name in ("is_real", "terminated", "truncated"))
    last = np.zeros_like(real)
    last[:, -1] = True
    # The step after an end is not real: where a piece's last step is such, the one before has ended already.
    ends = (terminated | truncated | last) & real
    worth = np.where(ends & ~terminated, gamma * values.T[:, 1:], 0.0)
    lengths = np.diff(np.flatnonzero(ends[real]), prepend=-1)
    return gae((rows["rewards"].T + worth)[real], values.T[:, :-1][real], lengths, gamma=gamma, lam=lam)


def beside_each_other(played: Sequence[str]) -> dict[str, Array]:
    """What lanes played, as one piece with the environments of all."""
    pieces = [unpack(one)[0] for one in played]
    return {name: np.concatenate([piece[name] for piece in pieces], axis=0 if name in _OF_LANE else 1) for name in pieces[0]}


@op(granularity="batch")
def episode_return(played: Sequence[str]) -> float:
    """The mean return of the last episodes that ended in each lane, as many as it has environments; nan before the first."""
    returns = np.concatenate([unpack(one)[0]["returns"] for one in played])
    return float(returns.mean()) if len(returns) else float("nan")


def _acted(arrays: Mapping[str, Array]) -> list[Acted]:
    """What was chosen in a piece so far, step by step."""
    return [Acted(*each) for each in zip(arrays["actions"], arrays["logprobs"], strict=True)]


def _digest(record: str, actions: Array | None = None) -> str:
    found = hashlib.sha256(record.encode())
    if actions is not None and len(actions):
        found.update(np.ascontiguousarray(actions).tobytes())
    return found.hexdigest()
