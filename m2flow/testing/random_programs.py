"""Strategies that draw programs, plans and orders of events (hypothesis), and the property that all of them must have.

@given(programs(), clusters(), st.integers(0, 2**30))
def test_my_scheduler(program, spec, order_seed):
    assert difference(program, spec, order_seed=order_seed) is None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import strategies as st

from m2flow.macro.flow import Flow
from m2flow.macro.session import Backend
from m2flow.micro.plan import Plan
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing import programs as p
from m2flow.testing.account import Account
from m2flow.testing.answers import Answer
from m2flow.testing.world import run_eager, run_planned

_small = st.integers(0, 2)
_roles = st.integers(0, 1)
_never = st.just(False)


def _generates(
    *,
    more: st.SearchStrategy[int],
    is_exact: st.SearchStrategy[bool],
    carries: st.SearchStrategy[bool] = _never,
    keeps: st.SearchStrategy[bool] = _never,
    defers: st.SearchStrategy[bool] = _never,
) -> st.SearchStrategy[p.Statement]:
    return st.builds(
        p.Generate,
        policy=_roles,
        source=st.sampled_from(["take", "take", "all", "samples"]),
        which=_small,
        count=st.integers(1, 3),
        n=st.sampled_from([2, 3, 1]),
        longest=st.sampled_from([2, 6, 14]),
        more=more,
        is_exact=is_exact,
        carries=carries,
        keeps=keeps,
        defers=defers,
    )


_generate = _generates(more=st.just(0), is_exact=_never)
_timed_generate = _generates(
    more=st.sampled_from([0, 1, 2]),
    is_exact=st.sampled_from([False, False, False, True]),
    carries=st.booleans(),
    keeps=st.sampled_from([False, False, True]),
    defers=st.sampled_from([False, False, True]),
)
_refill = st.builds(
    p.Refill,
    policy=_roles,
    dataset=_roles,
    n=st.integers(2, 3),
    count=st.sampled_from([2, 1, 3]),
    reward=st.sampled_from([5, 2, 0, 1]),
    keep=st.sampled_from([3, 0, 1, 2]),
    most=st.sampled_from([9, 9, 9, 3]),
)
_update = st.builds(
    p.Update,
    policy=_roles,
    samples=_small,
    numbers=_small,
    minibatch=_small,
    epochs=st.integers(1, 2),
    form=st.sampled_from(["rewards", "advantages", "reference"]),
)
_simple: Sequence[st.SearchStrategy[p.Statement]] = (
    _generate,
    _generate,
    _update,
    _update,
    st.builds(p.Score, reward=st.sampled_from([0, 3, 4, 1, 2]), samples=_small),
    st.builds(p.Score, reward=st.sampled_from([0, 3, 4, 1, 2]), samples=_small),
    st.builds(p.ApplyOp, unit=st.sampled_from(["minibatch", "group", "sample", "batch"]), samples=_small),
    st.builds(p.Logprobs, policy=_roles, samples=_small),
    st.builds(p.Values, samples=_small),
    st.builds(p.Mix, unit=st.sampled_from(["sample", "group", "batch"]), samples=_small, first=_small, second=_small, value=_small),
    st.builds(p.Ask, role=_roles, how=st.sampled_from(["note", "note", "digest", "compare", "forget", "plain"]), samples=_small),
    st.builds(p.Post, is_read=st.booleans(), samples=_small),
    st.builds(p.Combine, how=st.sampled_from(["weighted", "centred", "of group", "of key", "where"]), first=_small, second=_small),
    st.builds(p.Filter, how=st.sampled_from(["numbers", "lengths", "samples", "groups", "none"]), samples=_small),
    st.builds(p.Union, first=_small, second=_small),
    st.builds(p.Demonstrate, policy=_roles, minibatch=st.sampled_from([0, 2])),
    st.builds(p.Actor, policy=_roles, samples=_small, numbers=_small),
    st.builds(p.Log, which=st.integers(0, 5)),
    _refill,
    _refill,
)


@st.composite
def _one_of(draw: st.DrawFn, strategies: Sequence[st.SearchStrategy[p.Statement]]) -> p.Statement:
    """One of them, each as often as another. (`st.one_of` takes what is in a strategy that is itself one_of for so many more.)"""
    return draw(draw(st.sampled_from(strategies)))


_leaf = _one_of(_simple)
_timed_leaf = _one_of([_timed_generate, _timed_generate, *_simple[2:]])
_looked_at = st.sampled_from(["mean", "metric", "len", "value", "rows", "cursor"])


def _block(statements: st.SearchStrategy[p.Statement], most: int) -> st.SearchStrategy[tuple[p.Statement, ...]]:
    return st.lists(statements, max_size=most).map(tuple)


def _body(leaf: st.SearchStrategy[p.Statement], generate: st.SearchStrategy[p.Statement]) -> st.SearchStrategy[tuple[p.Statement, ...]]:
    """Most begin with something to work on, and train on it."""
    inner = _one_of([leaf] * 6 + [st.builds(p.Leave, how=st.sampled_from(["break", "continue"]))])
    block = _block(inner, 2)
    nested = _one_of(
        [leaf] * 8
        + [
            st.builds(p.Look, what=_looked_at, which=_small, then=block, otherwise=block),
            st.builds(p.Lag, metrics=_small, steps=_small, then=block, otherwise=block),
            st.builds(p.OnStep, body=block),
            st.builds(p.Repeat, times=st.integers(1, 2), body=block, until=st.booleans()),
        ]
    )
    return st.tuples(generate, _block(nested, 6), _block(_update, 1)).map(lambda parts: (parts[0], *parts[1], *parts[2]))


def programs(*, fails: bool | None = False) -> st.SearchStrategy[p.Program]:
    """Programs of a few statements each.

    Args:
        fails: whether a user's function in it may raise on some samples; None: in some.
    """
    return st.builds(
        p.Program,
        num_policies=st.integers(1, 2),
        num_steps=st.integers(1, 2),
        before=_block(_leaf, 2),
        body=_body(_leaf, _generate),
        after=_block(_leaf, 1),
        fails=st.booleans() if fails is None else st.just(fails),
    )


def timed_programs() -> st.SearchStrategy[p.Program]:
    """Programs in which time is part of the meaning: older weights, more prompts than are needed, and what becomes of the late ones."""
    return st.builds(
        p.Program,
        num_policies=st.integers(1, 2),
        num_steps=st.integers(2, 4),
        before=_block(_leaf, 1),
        body=_body(_timed_leaf, _timed_generate),
        after=_block(_leaf, 1),
        staleness=st.sampled_from([1, 1, 2, 3, 0]),
    )


_ADVERSARIES = Path(__file__).with_name("adversary.py")
_own_queues = ("round-robin", "group-round-robin", "least-loaded", "lpt", "split", "adaptive")
_others = (
    "longest-first",
    "shortest-first",
    "group-completing",
    "oldest-first",
    "probe",
    "balanced",
    "adaptive-concurrency:start=2",
    "admission:target=0.5",
    "repack",
    "gather:slack=0.5",
)


@st.composite
def policies(draw: st.DrawFn) -> tuple[str, ...]:
    """Rollout policies that go together, and some that nobody should want."""
    seed = draw(st.integers(0, 1000))
    hands_out = draw(st.sampled_from(["", f"{_ADVERSARIES}:Adversary:seed={seed}", *_own_queues]))
    also = draw(st.lists(st.sampled_from([*_others, f"{_ADVERSARIES}:Shuffled:seed={seed}"]), max_size=3, unique=True))
    return (*([hands_out] if hands_out else []), *also)


def scheduled(spec: ClusterSpec, names: tuple[str, ...], predictor: str = "siblings") -> ClusterSpec:
    """A cluster whose rollouts go by these policies."""
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"policy": names, "predictor": predictor})})


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Placements, worker counts, chunks and budgets that the planner might choose."""
    return ClusterSpec(
        placement=draw(st.sampled_from(["time-shared", "split"])),
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=draw(st.integers(1, 3)), max_running=draw(st.sampled_from([64, 5, 2, 1]))),
        train=TrainSpec(engine="fake", token_budget=draw(st.sampled_from([4096, 60, 20, 1]))),
        functions=FunctionSpec(workers=draw(st.integers(1, 2)), chunk=draw(st.sampled_from([64, 3, 1]))),
        channels=ChannelSpec(
            max_samples=draw(st.sampled_from([None, 1, 2, 5, 9, 30])), max_bytes=draw(st.sampled_from([2**32, 2**32, 100, 1000, 4000]))
        ),
    )


def difference(
    program: p.Program,
    spec: ClusterSpec,
    *,
    order_seed: int,
    seed: int = 0,
    by_identity: bool = False,
    seated: Callable[[Plan], Plan] = lambda plan: plan,
) -> str | None:
    """Run a program in both ways; what differs, in words, or None. Eager is given what time decided in the planned run; `seated` may change
    who shares devices with whom there."""
    account = Account()
    flow = program.as_flow(account)
    planned = run_planned(flow, {}, spec, seed=seed, order_seed=order_seed, deterministic=by_identity, seated=seated)
    wrong, lags = account.wrong(planned), list(account.lags)
    if wrong is not None:
        return f"planned: {wrong}"
    eager, value = eager_of(flow, spec, planned, seed=seed)
    if not eager.error:
        wrong = account.wrong(eager, value)
        if wrong is not None or lags != account.lags:
            return f"eager: {wrong}" if wrong else f"lagged: planned {_brief(lags, account.lags)}, eager {_brief(account.lags, lags)}"
    return difference_of(planned, eager)


def eager_of(flow: Flow, spec: ClusterSpec, planned: Answer, *, seed: int = 0) -> tuple[Answer, Callable[[int], object]]:
    """The eager run of a flow, given what time decided in a planned one; and what each call of it came to that has one value."""
    backends: list[Backend] = []

    def around(backend: Backend) -> Backend:
        backends.append(backend)
        return backend

    answer = run_eager(flow, {}, spec, seed=seed, decisions=planned.decisions or None, around=around)
    return answer, backends[0].value


def difference_of(planned: Answer, eager: Answer) -> str | None:
    """What differs between two answers, in words, or None.

    A run that ends with an error has done what it had to before it was raised; how much else it has done is a matter of time.
    """
    for name, answer in (("planned", planned), ("eager", eager)):
        if len(answer.consumed) != len(set(answer.consumed)):
            return f"{name}: a sample was trained on twice in an epoch"
    if planned.error != eager.error:
        return f"planned ended with {planned.error or 'no error'!r}, eager with {eager.error or 'no error'!r}"
    fields = ("samples", "rewards", "parts", "logs") if eager.error else ("samples", "rewards", "parts", "consumed", "logs", "weights")
    for field in fields:
        ours, theirs = getattr(planned, field), getattr(eager, field)
        if eager.error and field != "logs":
            shared = ours.keys() & theirs.keys()
            ours, theirs = ({key: held[key] for key in shared} for held in (ours, theirs))
        if repr(ours) != repr(theirs) if field == "logs" else ours != theirs:  # A NaN in a log is no equal of itself.
            return f"{field}: planned {_brief(ours, theirs)}, eager {_brief(theirs, ours)}"
    return None


def _brief(mine: object, other: object) -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        return f"{len(mine)} with {dict([(k, v) for k, v in mine.items() if other.get(k) != v][:2])}"
    if isinstance(mine, list) and isinstance(other, list):
        return f"{len(mine)} with {[item for item in mine if item not in other][:2]}"
    return repr(mine)
