"""Load a cluster spec from YAML, and report what is wrong with it at its line and column.

Beyond the fields' types this checks what YAML itself lets pass (a key given twice, an unreadable date or number, nesting that is too
deep) and the names in a spec: engines, predictors, rollout policies, devices and model shapes. Names of the flow (`pin`, `shapes`,
`functions.latency_s`) can't be checked here; their places are kept in the spec for messages that come later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from m2flow.engines.registry import engine_named
from m2flow.errors import M2FlowError, SpecError, did_you_mean
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.pools import device_list
from m2flow.planner.profiles import read_profile
from m2flow.rollout_scheduling.policies import make_policy, make_predictor
from m2flow.spec import ClusterSpec

_MOST_SHOWN = 40
"""Characters shown of a value that can't be read."""


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read and check a YAML spec.

    Raises:
        SpecError: no such file, no YAML, or a field that does not exist, can't have its value, or names what is not there, with its line.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except OSError as error:
        raise SpecError(f"the cluster spec {path} can't be read: {error.strerror}", now="`ls clusters/` shows the examples.") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"not YAML: {error}", where=str(path), now="Mend that line; lists and mappings are indented by spaces.") from None
    try:
        root = yaml.compose(text)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"not YAML: {error}", where=str(path), now="Mend that line; lists and mappings are indented by spaces.") from None
    except RecursionError:
        raise SpecError("it is nested too deeply to be read", where=str(path), now="No field needs more than five levels.") from None
    except ValueError as error:  # A date or a number that does not exist.
        raise _unreadable(root, error, str(path)) from None
    if not isinstance(data, dict):
        raise SpecError(
            "a cluster spec is a mapping, like `placement: split`", where=str(path), now="`m2flow cluster init` writes one to begin with."
        )
    _refuse_duplicate_keys(root, str(path))
    try:
        spec = ClusterSpec.model_validate(data)
    except ValidationError as error:
        paths = (
            [str(part) for part in one.get("ctx", {}).get("at", _field_of(one["loc"]))] for one in error.errors()
        )  # Names from the outermost field inwards.
        wrong = [(_place_of(root, names), names, one) for names, one in zip(paths, error.errors(), strict=True)]
        place, names, first = min(wrong, key=lambda found: found[0])
        is_unknown = first["type"] == "extra_forbidden"
        what, now = ("no such field", _nearest(names)) if is_unknown else (first["msg"], _nearest_choice(first))
        raise _wrong(what, now, names, path, place) from None
    if spec.devices:
        spec = spec.model_copy(update={"devices": str(file.parent / spec.devices)})
    if spec.costs:
        spec = spec.model_copy(update={"costs": str(file.parent / spec.costs)})
    for names, look_up in _lookups(spec):
        try:
            look_up()
        except M2FlowError as error:
            raise _wrong(error.what, error.now, names, path, _place_of(root, names)) from None
    # Their keys are names of the flow, which is not known here.
    named = [("pin",), ("shapes",), ("functions", "latency_s"), ("functions", "roles")]
    given = ((*names, name) for names in named for name in _keys_of(data, names))
    return spec.placed({names: ":".join(map(str, (path, *_place_of(root, list(names))))) for names in given})


def _field_of(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The field of an error, of one that takes a number or a word without which of the two pydantic tried."""
    return loc[:-1] if loc and str(loc[-1]).startswith(("constrained-", "literal[")) else loc


def _keys_of(data: dict[str, object], names: tuple[str, ...]) -> list[str]:
    """Return the keys of a mapping inside a spec, given by its path; empty if it is not there."""
    inner: object = data
    for name in names:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return [str(key) for key in inner] if isinstance(inner, dict) else []


def _unreadable(root: yaml.Node | None, error: ValueError, path: str) -> SpecError:
    """Find the value that YAML takes for a date or a number and Python can't read; return an error at its place."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            try:
                yaml.SafeLoader("").construct_object(node)
            except ValueError as why:
                shown = node.value if len(node.value) <= _MOST_SHOWN else f"{node.value[:_MOST_SHOWN]}..."
                return SpecError(f"{shown} can't be read: {why}", where=f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}")
        elif node is not None:
            waiting += [inner for part in node.value for inner in (part if isinstance(part, tuple) else (part,))]
    return SpecError(f"not YAML: {error}", where=path, now="Mend that line; lists and mappings are indented by spaces.")


def _wrong(what: str, now: str, names: list[str], path: str | Path, place: tuple[int, int]) -> SpecError:
    line, column = place
    return SpecError(f"{'.'.join(names)}: {what}", where=f"{path}:{line}:{column}", now=now)


def _lookups(spec: ClusterSpec) -> Iterator[tuple[list[str], Callable[[], object]]]:
    """Yield the fields whose values name things outside the spec, each with the function that looks its name up."""
    yield ["rollout", "engine"], partial(engine_named, spec.rollout.engine, "rollout")
    yield ["train", "engine"], partial(engine_named, spec.train.engine, "train")
    yield ["rollout", "predictor"], partial(make_predictor, spec.rollout.predictor)
    for policy in spec.rollout.policy:
        if ".py:" not in policy:  # A user's own policy is imported where it is used.
            yield ["rollout", "policy"], partial(make_policy, policy, make_predictor(spec.rollout.predictor))
    if spec.pools:
        devices = device_list(spec.devices)
        for name, pool in spec.pools.items():
            yield ["pools", name, "device"], partial(devices.find, pool.device)
    if spec.costs:
        yield ["costs"], partial(read_profile, Path(spec.costs))
    for role, shape in spec.shapes.items():
        if "/" not in shape:  # A model's directory is read where it is used: it may be on another host.
            yield ["shapes", role], partial(shape_named, shape)


def _refuse_duplicate_keys(root: yaml.Node | None, path: str) -> None:
    """Refuse a key that is given twice: YAML would silently take the last value."""
    waiting, met = [root], set()
    while waiting:
        node = waiting.pop()
        if node in met:  # An alias.
            continue
        met.add(node)
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    where, now = f"{path}:{line}:{key.start_mark.column + 1}", "The last would count: leave one out."
                    raise SpecError(f"{name} is said twice, in line {lines[name]} too", where=where, now=now)
                lines[name] = line
                waiting.append(value)


def _place_of(node: yaml.Node | None, names: list[str]) -> tuple[int, int]:
    """Return line and column of a field, or of its innermost parent that is there."""
    line, column = 1, 1
    for name in names:
        if isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
            node = node.value[int(name)]
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == name:
                    line, column, node = key.start_mark.line + 1, key.start_mark.column + 1, value
                    break
            else:
                break
    return line, column


def _nearest(names: list[str]) -> str:
    model: type[BaseModel] = ClusterSpec
    for name in names[:-1]:
        inner = model.model_fields[name].annotation if name in model.model_fields else None  # Otherwise it is a key of a mapping of models.
        for part in (inner, *get_args(inner)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                model = part
    return did_you_mean(names[-1], model.model_fields)


def _nearest_choice(wrong: ErrorDetails) -> str:
    """Suggest the nearest value of a field with few choices; pydantic names them in quotes."""
    choices = re.findall(r"'([^']+)'", wrong.get("ctx", {}).get("expected", "")) if wrong["type"] == "literal_error" else []
    return did_you_mean(str(wrong["input"]), choices, "") if isinstance(wrong["input"], str | int | float) else ""
