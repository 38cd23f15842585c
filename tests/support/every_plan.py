"""Every plan of a small step, one by one: the oracle of the search, which shares no code with it but the times of a leaf.

All trees are written down, and for each all ways to fill its leaves are priced at once. Nothing is dropped on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from m2flow.planner.problem import Option, Problem, leaf_times

Names = frozenset[str]
Tree = tuple  # ("leaf", names) or ("turns" | "split", tree, tree)


def shapes(names: Names, problem: Problem, needs: dict[str, Names]) -> Iterator[Tree]:
    """All trees on these calls."""
    calls = problem.calls
    if len({calls[name].engine for name in names}) == 1:
        yield ("leaf", names)
    for size in range(1, len(names)):
        for picked in combinations(sorted(names), size):
            first = frozenset(picked)
            second = names - first
            if any(needs[name] & second for name in first):
                continue
            for how in ("turns", "split"):
                if how == "split" and {calls[n].engine for n in first} & {calls[n].engine for n in second}:
                    continue
                for a in shapes(first, problem, needs):
                    for b in shapes(second, problem, needs):
                        yield (how, a, b)


def leaves_of(tree: Tree) -> list[Names]:
    return [tree[1]] if tree[0] == "leaf" else leaves_of(tree[1]) + leaves_of(tree[2])


@dataclass
class Price:
    """Arrays, a number for each way to fill the leaves."""

    l: np.ndarray  # noqa: E741  # the letters of the formulas
    T: np.ndarray
    e: np.ndarray
    busy: np.ndarray
    g: np.ndarray
    rigid: np.ndarray
    """0: may alternate with others of the kind. 1: may not. 2: and hands on nothing before it has all of its input."""
    need: dict[str, np.ndarray]
    memory: dict[str, dict[str, list[np.ndarray]]]
    """Set of devices ("" or an engine) -> pool -> kept, most, host."""
    apart: dict[tuple[str, str], bool]
    names: Names
    ok: np.ndarray


class Oracle:
    """Tries every plan of a problem, as it is; `best_s` also with the batches of several steps at once, where staleness allows it."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        calls = problem.workload.calls
        device = {call.name for call in calls if call.engine is not None}
        self.above: dict[str, Names] = {}
        for call in calls:
            self.above[call.name] = frozenset(call.after).union(*(self.above[n] for n in call.after))
        self.needs = {name: above & device for name, above in self.above.items()}
        self.device = frozenset(device)
        self.by_engine = {e: frozenset(c.name for c in calls if c.engine == e) for e in problem.workload.engines}

    def _feeders(self, name: str) -> set[str]:
        """The calls on devices whose output a call gets, directly or through functions; of a function: none, since it runs beside them."""
        if name not in self.device:
            return set()
        found, left = set(), list(self.p.calls[name].after)
        while left:
            one = left.pop()
            found |= {one} & self.device
            left += self.p.calls[one].after if one not in self.device else ()
        return found

    def best_s(self) -> float:
        staleness = self.p.workload.staleness
        several = Oracle(self.p.at_once(staleness)).best_s() if staleness > 1 and self.p.num_batches == 1 else np.inf
        best = several
        for tree in shapes(self.device, self.p, self.needs):
            best = min(best, self.tree_s(tree))
        return best

    def tree_s(self, tree: Tree) -> float:
        leaves = leaves_of(tree)
        tables, ways = [], []
        for names in leaves:
            members = [call for call in self.p.workload.calls if call.name in names]
            options = self.p.options.of[members[0].engine]
            outside = {name for call in self.p.workload.calls if call.name not in names for name in self._feeders(call.name)}
            shown = max((i for i, call in enumerate(members) if call.name in outside), default=-1)
            leaf = leaf_times(members, options, self.p.costs, self.p.batches, shown)
            rows = list(product(range(len(options)), range(len(leaf.chunks))))
            tables.append((options, (leaf.times, leaf.grains), np.array(rows)))
            ways.append(np.arange(len(rows)))
        if any(len(way) == 0 for way in ways):
            return np.inf
        grid = np.stack(np.meshgrid(*ways, indexing="ij"), -1).reshape(-1, len(leaves))
        chosen = {names: table[2][grid[:, i]][:, 0] for i, (names, table) in enumerate(zip(leaves, tables, strict=True))}
        keep = np.ones(len(grid), bool)
        for one, other in combinations(leaves, 2):
            if self._engine(one) == self._engine(other):
                keep &= chosen[one] == chosen[other]
        if not keep.any():
            return np.inf
        grid = grid[keep]
        self.chosen = {names: picked[keep] for names, picked in chosen.items()}
        self.prices = {
            names: self._leaf(names, table[0], table[1], table[2][grid[:, i]])
            for i, (names, table) in enumerate(zip(leaves, tables, strict=True))
        }
        whole = self._price(tree)
        steps = np.where(whole.ok, self._step(whole), np.inf)
        return float(steps.min())

    def _engine(self, names: Names) -> object:
        return self.p.calls[next(iter(names))].engine

    def _column(self, names: Names, of: object) -> np.ndarray:
        options: list[Option] = self.p.options.of[self._engine(names)]
        return np.array([of(option) for option in options])[self.chosen[names]]

    def _share(self, names: Names) -> float:
        generates = any(call.work == "generate" for call in self.p.workload.calls if call.name in names)
        return 1 / self.p.num_batches if generates else 1.0

    def _rigid(self, names: Names) -> np.ndarray:
        calls = [call for call in self.p.workload.calls if call.name in names]
        generates = any(call.work == "generate" for call in calls)
        if len(calls) > 1 and (generates or any(call.is_barrier for call in calls[1:])):
            return np.full(len(self.chosen[names]), 2.0)
        return np.ones(len(self.chosen[names])) if generates else 1.0 * self._column(names, lambda o: o.is_swapped)

    def _leaf(self, names: Names, options: list[Option], leaf: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> Price:
        times, grains = leaf
        t = times[rows[:, 0], rows[:, 1]]
        engine = self._engine(names)
        where = self._column(names, lambda o: o.pool)
        size = self._column(names, lambda o: o.layout.num_devices)
        facts = [
            self._column(names, lambda o: 0 if o.is_swapped else o.footprint.kept_bytes),
            self._column(names, lambda o: o.footprint.device_bytes),
            self._column(names, lambda o: o.footprint.host + o.footprint.kept_bytes * o.is_swapped),
        ]
        place = str(engine) if self.by_engine[engine] - names else ""
        return Price(
            t[:, 0], t[:, 1], t[:, 2], t[:, 1] * self._share(names), grains[rows[:, 1]], self._rigid(names),
            {pool: size * (where == pool) for pool in self.p.pools},
            {place: {pool: [fact * (where == pool) for fact in facts] for pool in self.p.pools}},
            {}, names, np.ones(len(rows), bool),
        )  # fmt: skip

    def _price(self, tree: Tree) -> Price:
        if tree[0] == "leaf":
            return self.prices[tree[1]]
        a, b = self._price(tree[1]), self._price(tree[2])
        turns = tree[0] == "turns"
        names = a.names | b.names
        found = Price(*self._times(a, b, turns), self._need(a, b, turns), {}, {}, names, a.ok & b.ok)
        found.apart, legal = self._apart(a, b, turns)
        self._sync(found, a, b, turns)
        found.memory = self._memory(a, b, turns)
        found.ok = found.ok & legal
        for pool, size in self.p.spec.pools.items():
            found.ok &= found.need[pool] <= size.num_devices
            for facts in found.memory.values():
                found.ok &= (facts[pool][1] <= self.p.costs.device_bytes(pool)) & (facts[pool][2] <= self.p.costs.host_bytes(pool))
        return found

    def _need(self, a: Price, b: Price, turns: bool) -> dict[str, np.ndarray]:
        return {pool: np.maximum(a.need[pool], b.need[pool]) if turns else a.need[pool] + b.need[pool] for pool in self.p.pools}

    def _between(self, a: Names, b: Names) -> list[str]:
        found = []
        for call in self.p.workload.calls:
            if call.engine is not None:
                continue
            feeds = {n for n in self.above[call.name] if n in self.device and self._only_functions(n, call.name)}
            fed = {n for n in self.device if call.name in self.above[n] and self._only_functions(call.name, n)}
            if feeds & a and not feeds & b and fed & b and not fed & a:
                found.append(call.name)
        return found

    def _only_functions(self, low: str, high: str) -> bool:
        """Whether a path from low to high passes no call on devices."""
        return any(n == low or (n not in self.device and self._only_functions(low, n)) for n in self.p.calls[high].after)

    def _through(self, t: tuple, names: list[str]) -> tuple:
        made, result = {}, t
        for name in names:
            call, f = self.p.calls[name], self.p.functions[name]
            sources = [made[n] for n in call.after if n in made] or [t]
            l, T, e, busy, g, rigid = (np.max([s[i] for s in sources], axis=0) for i in range(6))  # noqa: E741
            if call.is_barrier:
                made[name] = (T + f.first, T + f.total, e + f.total, np.maximum(busy, f.total), g, np.full_like(rigid, 2.0))
            else:
                made[name] = (l + f.first, np.maximum(l + f.total, T + f.last), e + f.last, np.maximum(busy, f.total), g, rigid)
            result = tuple(np.maximum(x, y) for x, y in zip(result, made[name], strict=True))
        return result

    def _times(self, a: Price, b: Price, turns: bool) -> tuple:
        pairs = [(x, y) for x in a.names for y in b.names if self._linked(x, y)]
        free = np.maximum(a.rigid, b.rigid) == 0
        if not pairs:
            g = np.maximum(a.g, b.g)
            if turns:
                return (a.T + b.l, a.T + b.T, a.e + np.where(free, b.e, b.T), a.T + b.T, g, 2.0 * ~free)
            slow_a, slow_b = self._slower(a, b)
            total, busy = np.maximum(a.T + slow_a, b.T + slow_b), np.maximum(a.busy + slow_a, b.busy + slow_b)
            return np.maximum(a.l, b.l), total, np.maximum(a.e, b.e), busy, g, np.maximum(np.maximum(a.rigid, b.rigid), 1)
        entries = {y for _, y in pairs if not any(self._linked(z, y) for z in b.names)}
        l, T, e, busy, g, _ = self._through((a.l, a.T, a.e, a.busy, a.g, a.rigid), self._between(a.names, b.names))  # noqa: E741
        g = np.maximum(g, b.g)
        if any(self.p.calls[y].is_barrier for y in entries):
            whole = T + b.T
            return T + b.l, whole, e + b.T, whole if turns else np.maximum(busy, b.busy), g, np.full_like(a.rigid, 2.0)
        begin, end = l + (T - l) * g, np.minimum(b.T, b.e + g * b.T)
        if turns:
            begin = np.maximum(a.T, begin)
            whole = np.maximum(begin + b.T, T + end)
            late = np.maximum(a.e + b.T, e + np.minimum(b.T, b.e + b.g * b.T))
            return (begin + b.l, whole, np.where(free, np.minimum(e + b.e, late), late), whole, g, 2.0 * ~free)
        slow_a, slow_b = self._slower(a, b)
        whole = np.maximum(begin + b.T + slow_b, T + slow_a + end)
        first = np.where(b.rigid == 2, np.minimum(T + b.l, whole), np.minimum(begin, l + end) + b.l)
        last = e + b.e + np.where(g < 0.5, g - g * g, 0.25) * np.minimum(a.T, b.T)
        return first, whole, last, np.maximum(busy + slow_a, b.busy + slow_b), g, np.maximum(np.maximum(a.rigid, b.rigid), 1)

    def _slower(self, a: Price, b: Price) -> tuple[np.ndarray, np.ndarray]:
        kinds = [{self.p.calls[n].engine.kind for n in x.names} for x in (a, b)]
        factors = [
            max([self.p.costs.slowdown(k, o) for k in own for o in other if k != o], default=1.0) for own, other in (kinds, kinds[::-1])
        ]
        both = np.minimum(a.T, b.T) * (len(self.p.pools) == 1)
        return (factors[0] - 1) * both, (factors[1] - 1) * both

    def _linked(self, low: str, high: str) -> bool:
        return low in self.above[high] and self._only_functions(low, high)

    def _apart(self, a: Price, b: Price, turns: bool) -> tuple[dict[tuple[str, str], bool], bool]:
        found, legal = {}, True
        placed = [e for e, names in self.by_engine.items() if len(names) > 1]
        for e, f in combinations(placed, 2):
            key = (str(e), str(f))
            has = lambda x: bool(self.by_engine[e] & x.names and self.by_engine[f] & x.names)  # noqa: B023, E731
            if has(a) and has(b):
                legal &= a.apart[key] == b.apart[key]
                found[key] = a.apart[key]
            elif has(a) or has(b):
                found[key] = (a if has(a) else b).apart[key]
            elif self.by_engine[e] & (a.names | b.names) and self.by_engine[f] & (a.names | b.names):
                found[key] = not turns
        return found, legal

    def _sync(self, found: Price, a: Price, b: Price, turns: bool) -> None:
        for role in {e.role for e in self.p.workload.engines}:
            acts = [c for c in self.p.workload.calls if c.engine and c.engine.role == role and c.work in ("generate", "update")]
            names = frozenset(c.name for c in acts)
            times = sum(x.work == "update" and y.work == "generate" for x, y in zip(acts, acts[1:] + acts[:1], strict=True))
            if not times or not names <= found.names or names <= a.names or names <= b.names:
                continue
            rollout, trainer = (next(n for n in self.chosen for m in n if self.p.calls[m].work == w and self.p.calls[m].engine.role == role)
                                for w in ("generate", "update"))  # fmt: skip
            froms, tos = self._column(trainer, lambda o: o), self._column(rollout, lambda o: o)
            seconds = []
            for source, target in zip(froms, tos, strict=True):
                same = turns and source.pool == target.pool
                seconds.append(
                    times * self.p.costs.sync_s(role, (source.pool, source.layout), (target.pool, target.layout), is_same_devices=same)
                )
            found.T, found.e, found.busy = found.T + seconds, found.e + seconds, found.busy + seconds

    def _memory(self, a: Price, b: Price, turns: bool) -> dict[str, dict[str, list[np.ndarray]]]:
        zero = np.zeros(len(a.T))
        nothing = {pool: [zero, zero, zero] for pool in self.p.pools}
        found: dict[str, dict[str, list[np.ndarray]]] = {}

        def side(x: Price, place: str) -> dict[str, list[np.ndarray]]:
            if place in x.memory or place == "":
                return x.memory.get(place, nothing)
            return {pool: [np.max([facts[pool][i] for facts in x.memory.values()], axis=0) for i in range(3)] for pool in self.p.pools}

        for place in {"", *a.memory, *b.memory}:
            found[place] = {}
            for pool in self.p.pools:
                if not turns:
                    of_a, of_b = a.memory.get(place, nothing)[pool], b.memory.get(place, nothing)[pool]
                    found[place][pool] = [np.maximum(x, y) for x, y in zip(of_a, of_b, strict=True)]
                    continue
                (ka, ma, ha), (kb, mb, hb) = side(a, place)[pool], side(b, place)[pool]
                kept = host = zero
                if place and place in a.memory and place in b.memory:
                    leaf = next(n for n in self.chosen if str(self._engine(n)) == place)
                    here = self._column(leaf, lambda o: o.pool) == pool
                    kept = self._column(leaf, lambda o: o.kept_bytes) * here
                    host = self._column(leaf, lambda o: o.host_bytes) * here
                found[place][pool] = [ka + kb - kept, np.maximum(ma + kb, mb + ka) - kept, ha + hb - host]
        names = a.names | b.names
        for engine, mine in self.by_engine.items():
            if str(engine) in found and mine <= names:
                closed = found.pop(str(engine))
                rest = found[""]
                found[""] = {pool: [np.maximum(x, y) for x, y in zip(rest[pool], closed[pool], strict=True)] for pool in self.p.pools}
        return found

    def _step(self, whole: Price) -> np.ndarray:
        leading, trailing = [], []
        for call in self.p.workload.calls:
            if call.engine is None:
                if not any(call.name in self.above[n] for n in self.device):
                    trailing.append(call.name)
                elif not self.above[call.name] & self.device:
                    leading.append(call.name)
        zero = np.zeros(1)
        l, T, _, busy, _, _ = self._through((zero,) * 6, leading)  # noqa: E741
        end = np.minimum(whole.T, whole.e + whole.g * whole.T)
        t = (whole.l, np.maximum(l + whole.T, T + end), whole.e, np.maximum(whole.busy, busy), whole.g, whole.rigid)
        _, T, _, busy, _, _ = self._through(t, trailing)
        k = self.p.workload.staleness
        return np.maximum(busy, T / (self.p.num_batches if self.p.num_batches > 1 else k + 1)) if k else T
