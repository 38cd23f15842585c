"""Cluster specs as users write them: YAML, and what is wrong with one, at its line and column."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError

from m2flow.errors import SpecError
from m2flow.spec import ClusterSpec


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read and check a YAML spec.

    Raises:
        SpecError: no such file, no YAML, or a field that does not exist or can't have its value, with its line.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except OSError as error:
        raise SpecError(f"the cluster spec {path} can't be read: {error.strerror}", now="`ls clusters/` shows the examples.") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"not YAML: {error}", where=str(path)) from None
    try:
        data = yaml.safe_load(text)
        root = yaml.compose(text)
    except yaml.YAMLError as error:
        raise SpecError(f"not YAML: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise SpecError("a cluster spec is a mapping, like `placement: split`", where=str(path))
    _refuse_twins(root, str(path))
    try:
        spec = ClusterSpec.model_validate(data)
        return spec.model_copy(update={"devices": str(file.parent / spec.devices)}) if spec.devices else spec
    except ValidationError as error:
        paths = ([str(part) for part in one.get("ctx", {}).get("at", one["loc"])] for one in error.errors())  # From the outermost field.
        wrong = [(_place_of(root, names), names, one) for names, one in zip(paths, error.errors(), strict=True)]
        (line, column), names, first = min(wrong, key=lambda found: found[0])
        is_unknown = first["type"] == "extra_forbidden"
        what = f"{'.'.join(names)}: {'no such field' if is_unknown else first['msg']}"
        raise SpecError(what, where=f"{path}:{line}:{column}", now=_nearest(names) if is_unknown else "") from None


def _refuse_twins(root: yaml.Node | None, path: str) -> None:
    """YAML takes the last of two values of one field, and nobody would know."""
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
    """Line and column of a field, or of the innermost that it is in and that is there."""
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
        inner = model.model_fields[name].annotation if name in model.model_fields else None  # Else it is a key of a mapping of models.
        for part in (inner, *get_args(inner)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                model = part
    close = difflib.get_close_matches(names[-1], model.model_fields, 1)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(model.model_fields)}."
