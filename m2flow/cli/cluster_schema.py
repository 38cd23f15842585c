"""`m2flow cluster schema`: the JSON Schema of cluster specs, with what is said of each field where it is declared."""

from __future__ import annotations

import ast
import inspect
import json

import click

from m2flow import spec


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of cluster specs.

    An editor that knows it completes and checks a spec while it is written: name it in the spec's first line, as the examples do.

    \b
    Example:
      m2flow cluster schema > schema.json
      and in a spec:   # yaml-language-server: $schema=schema.json
    """
    click.echo(as_text(), nl=False)


def as_text() -> str:
    """As it is published in `clusters/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, object]:
    """JSON Schema, with each field's description."""
    found = spec.ClusterSpec.model_json_schema()
    documented = documentation()
    for name, model in {**found["$defs"], "ClusterSpec": found}.items():
        for field, shape in model["properties"].items():
            shape["description"] = documented[name, field]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def documentation() -> dict[tuple[str, str], str]:
    """What stands under each field of each section. A field under which nothing stands is not there."""
    found = {}
    for part in ast.parse(inspect.getsource(spec)).body:
        if isinstance(part, ast.ClassDef):
            for field, below in zip(part.body, part.body[1:], strict=False):
                text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                    found[part.name, field.target.id] = " ".join(text.split())
    return found
