"""The KubeRay example against the schema of its custom resource: every field that it has is one that the operator knows, of its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

MANIFEST = Path(__file__).parents[3] / "clusters" / "kuberay" / "raycluster.yaml"
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
"""Kubernetes' numbers with a unit."""


class Fields(NamedTuple):
    """A mapping with these fields and no others; those in `required` must be there."""

    known: dict[str, Any]
    required: tuple[str, ...] = ()


class Each(NamedTuple):
    """A list, or a mapping with any names, of such values."""

    kind: type
    of: Any


def is_quantity(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and QUANTITY.fullmatch(value) is not None)


CONTAINER = Fields(
    {
        "name": str,
        "image": str,
        "ports": Each(list, Fields({"containerPort": int, "name": str}, ("containerPort",))),
        "resources": Fields({"limits": Each(dict, is_quantity), "requests": Each(dict, is_quantity)}),
        "volumeMounts": Each(list, Fields({"name": str, "mountPath": str}, ("name", "mountPath"))),
    },
    ("name",),
)
VOLUME = Fields(
    {
        "name": str,
        "persistentVolumeClaim": Fields({"claimName": str}, ("claimName",)),
        "emptyDir": Fields({"medium": str, "sizeLimit": is_quantity}),
    },
    ("name",),
)
TEMPLATE = Fields(
    {
        "spec": Fields(
            {
                "containers": Each(list, CONTAINER),
                "volumes": Each(list, VOLUME),
                "tolerations": Each(list, Fields({"key": str, "operator": str, "effect": str})),
            },
            ("containers",),
        )
    }
)
WORKERS = Fields(
    {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "rayStartParams": Each(dict, str), "template": TEMPLATE},
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
)
RAY_CLUSTER = Fields(
    {
        "apiVersion": str,
        "kind": str,
        "metadata": Fields({"name": str}, ("name",)),
        "spec": Fields(
            {
                "rayVersion": str,
                "enableInTreeAutoscaling": bool,
                "headGroupSpec": Fields({"rayStartParams": Each(dict, str), "template": TEMPLATE}, ("rayStartParams", "template")),
                "workerGroupSpecs": Each(list, WORKERS),
            },
            ("headGroupSpec",),
        ),
    },
    ("apiVersion", "kind", "spec"),
)
"""Of ray.io/v1, as far as the example goes.

Source:
    KubeRay's CustomResourceDefinition rayclusters.ray.io, version v1 (helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml, commit
    017710c), and RayClusterSpec in ray-operator/apis/ray/v1/raycluster_types.go, which up to 1.5 asks for rayStartParams too. A pod's
    fields are Kubernetes' own (core/v1).
"""


def wrong(value: Any, shape: Any, at: str = "") -> Iterator[str]:
    """What does not fit, and where."""
    match shape:
        case Fields(known, required):
            if not isinstance(value, dict):
                yield f"{at}: no mapping"
                return
            yield from (f"{at}.{name}: missing" for name in required if name not in value)
            for name, inner in value.items():
                yield from wrong(inner, known[name], f"{at}.{name}") if name in known else [f"{at}.{name}: no such field"]
        case Each(kind, of):
            if not isinstance(value, kind):
                yield f"{at}: no {kind.__name__}"
                return
            for place, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from wrong(inner, of, f"{at}.{place}")
        case type():
            if not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
                yield f"{at}: {value!r} is no {shape.__name__}"
        case _:
            if not shape(value):
                yield f"{at}: {value!r}"


def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text())


def test_the_example_fits_the_resource() -> None:
    assert list(wrong(manifest(), RAY_CLUSTER)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda spec: spec.update(workerGroupSpec=[]), ".spec.workerGroupSpec: no such field"),
        (
            lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            ".spec.headGroupSpec.rayStartParams.num-cpus: 0 is no str",
        ),
        (lambda spec: spec["workerGroupSpecs"][1].update(maxReplicas="8"), ".spec.workerGroupSpecs.1.maxReplicas: '8' is no int"),
        (lambda spec: spec["workerGroupSpecs"][0].pop("template"), ".spec.workerGroupSpecs.0.template: missing"),
    ],
)
def test_what_the_operator_would_refuse_is_found(change: Callable[[Any], object], found: str) -> None:
    changed = manifest()
    change(changed["spec"])
    assert list(wrong(changed, RAY_CLUSTER)) == [found]
