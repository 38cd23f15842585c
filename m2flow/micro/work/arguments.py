"""The user's function of several arguments, called unit by unit with what each argument is of that unit.

    rows of each input, whole values, constants --Arguments--> function(Sample, value, constant, rng)

What belongs to a unit is found by identity, and a random generator is keyed by it, so neither chunking nor arrival shows. What a
unit's call does to its arguments, the next one does not see.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import final

import numpy as np

from m2flow.errors import InternalError, OpError
from m2flow.macro.arguments import Argument
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call
from m2flow.samples import Batch, Column, Ragged, Sample, keyed_bits

_ATOMS = (str, int, float, bool, bytes, type(None), Snapshot)


@final
class Arguments:
    """Called as an engine calls a function: with a `Sample`, or a list of them."""

    def __init__(
        self, call: Call, function: Callable[..., object], inputs: Mapping[str, Batch], values: Mapping[str, object], run_seed: int
    ) -> None:
        self.__name__ = getattr(function, "__name__", call.name)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self._call = call
        self._function = function
        self._values = values
        self._run_seed = run_seed
        first = next(iter(inputs.values()), Batch(np.zeros(0, np.int64)))
        base = first.in_order().frozen()
        self.rows = base
        """Of the input that says which samples the call works on, in the order of identity."""
        self._inputs = {
            name: other.select(base.ids).frozen() if len(base) and other is not first else base for name, other in inputs.items()
        }
        self._place = {packed: row for row, packed in enumerate(base.ids.tolist())}
        found = call.options["arguments"]
        assert isinstance(found, tuple)
        self._arguments: tuple[Argument, ...] = found

    def __call__(self, unit: Sample | list[Sample]) -> object:
        args = [self._argument(argument, unit) for argument in self._arguments if not argument.is_keyword]
        kwargs = {argument.parameter: self._argument(argument, unit) for argument in self._arguments if argument.is_keyword}
        return self._function(*args, **kwargs)

    def of(self, rows: Batch) -> dict[str, Batch]:
        """Of each input what belongs to these rows: what these arguments can be made of elsewhere."""
        places = [self._place[packed] for packed in rows.ids.tolist()]
        return {name: batch.take(places) for name, batch in self._inputs.items()}

    def _argument(self, argument: Argument, unit: Sample | list[Sample]) -> object:
        match argument.kind:
            case "rows":
                batch = self._inputs[argument.parameter]
                return self._of(unit, lambda row: Sample(batch, row))
            case "column":
                name = self._named("columns")[argument.parameter]
                if isinstance(unit, list) and not unit:
                    return []
                column = self._inputs[argument.parameter].columns[str(name)]
                return self._of(unit, lambda row: _item(column, row))
            case "value":
                value = self._values[argument.parameter]
                if argument.field is not None:
                    if not isinstance(value, Mapping) or argument.field not in value:
                        has = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else repr(value)
                        raise OpError(f"there is no {argument.field!r} for {argument.parameter}; there is {has}")
                    value = value[argument.field]
                return dict(value) if isinstance(value, dict) else value
            case "constant":
                return _own(self._named("constants")[argument.parameter])
            case "random":
                return random.Random(self._seed(unit))
            case "numpy":
                return np.random.default_rng(self._seed(unit))

    def _of(self, unit: Sample | list[Sample], get: Callable[[int], object]) -> object:
        if isinstance(unit, list):
            return [get(self._place[sample.id.pack()]) for sample in unit]
        return get(self._place[unit.id.pack()])

    def _named(self, option: str) -> Mapping[str, object]:
        found = self._call.options[option]
        if not isinstance(found, Mapping):
            raise InternalError(f"{self._call.name} has no {option}")
        return found

    def _seed(self, unit: Sample | list[Sample]) -> int:
        """Of the run, the op, how often it had these samples before, and who the unit's samples are: by the draw that they came from."""
        samples = unit if isinstance(unit, list) else [unit]
        who = [str(s["seed"] if "seed" in self.rows else s.id.pack()) + f".{s.id.index}" for s in samples]
        return keyed_bits(self._run_seed, self._call.name, self._call.options["repeat"], ",".join(who))


def _item(column: Column, row: int) -> object:
    if isinstance(column, Ragged):
        return column.item(row)
    value = column[row]
    return value.item() if isinstance(value, np.generic) else value


def _own(constant: object) -> object:
    """A unit's own copy; arrays are large, and can't be written instead."""
    if isinstance(constant, _ATOMS):
        return constant
    if isinstance(constant, np.ndarray):
        view = constant.view()
        view.flags.writeable = False
        return view
    return copy.deepcopy(constant)
