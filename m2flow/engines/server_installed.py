"""Which inference server an interpreter has, and what that release can do: by the words of its source, without importing it.

    python --a short script there--> version, source of its HTTP server --> Installed: abilities, and what is lacking of what is needed

Importing such a package takes half a minute and a device; its endpoints are decorators with their paths, which can be read.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from m2flow.errors import EngineError, MissingExtra


@dataclass(frozen=True)
class Product:
    """A kind of server, as its package can be looked at."""

    name: str
    """What users call it."""
    engine: str
    """The rollout engine that needs it, which the package is named after."""
    oldest: str
    """The first release with all of `needed`."""
    needed: Mapping[str, tuple[str, ...]]
    """What the rollout engine cannot do without -> words of the source that say it is there."""
    further: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]
    """Where in the package to look, as patterns."""
    distributions: tuple[str, ...] = ()
    """Under which names it is installed; empty: the engine's."""
    saver: str = ""
    """The module without which `RELEASES` does nothing, though its endpoints answer; empty: none."""


RELEASES = "release and resume of memory"
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys
asked = json.loads(sys.argv[1])
version = text = ""
for name in asked["distributions"]:
    try:
        version = version or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec(asked["package"]) if version else None
for place in (spec.submodule_search_locations or []) if spec else []:
    for pattern in asked["sources"]:
        for path in pathlib.Path(place).glob(pattern):
            text += path.read_text(errors="replace")
saver = not asked["saver"] or importlib.util.find_spec(asked["saver"]) is not None
print(json.dumps({"version": version, "words": [word for word in asked["words"] if word in text], "saver": saver}))
"""


class _Said(msgspec.Struct, frozen=True):
    version: str
    words: list[str]
    saver: bool


@dataclass(frozen=True)
class Installed:
    """What an interpreter has."""

    version: str
    """Empty: it has none."""
    abilities: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    """Of what is needed."""


def installed(product: Product, python: str) -> Installed:
    """What an interpreter (empty: this one) has.

    Raises:
        EngineError: there is no such interpreter, or it does not answer.
    """
    can = {**product.needed, **product.further}
    asked = {
        "package": product.engine,
        "distributions": product.distributions or (product.engine,),
        "sources": product.sources,
        "saver": product.saver,
        "words": [word for found in can.values() for word in found],
    }
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _PROBE, msgspec.json.encode(asked).decode()], capture_output=True, text=True, timeout=120
        )
        said = msgspec.json.decode(done.stdout, type=_Said)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"the interpreter {python} can't be run: {error}", now="Give the option `python` of the rollout engine."
        ) from None
    except msgspec.MsgspecError:
        raise EngineError(
            f"{python or sys.executable} did not say which {product.name} it has", now="Is it Python 3.10 or later?", remote=done.stderr
        ) from None
    if not said.version:
        return Installed("")
    has = set(said.words)
    abilities = [name for name, wanted in can.items() if has.issuperset(wanted) and (said.saver or name != RELEASES)]
    return Installed(said.version, tuple(abilities), tuple(name for name, wanted in product.needed.items() if not has.issuperset(wanted)))


def check_version(product: Product, python: str) -> str:
    """The version in an interpreter, if it has all that is needed.

    Raises:
        MissingExtra: there is none, or it lacks something; with the release that has it.
    """
    found = installed(product, python)
    where = python or sys.executable
    package = f"{product.engine}>={product.oldest}"
    if not found.version:
        raise MissingExtra(
            f"the rollout engine {product.engine} needs {product.engine}, which {where} does not have",
            now=f"pip install '{package}' there, or name an interpreter that has it: rollout.options.python in the cluster spec.",
        )
    if found.lacking:
        raise MissingExtra(
            f"{product.name} {found.version} in {where} lacks {', '.join(found.lacking)}, which the rollout engine needs; "
            f"{product.oldest} has it",
            now=f"pip install '{package}' there.",
        )
    return found.version


def check_options(product: Product, options: Mapping[str, object]) -> None:
    """Raises what `check_version` does, for the interpreter that an engine's options name; of a server that runs already, nothing."""
    if not options.get("url"):
        check_version(product, interpreter_of(options))


def interpreter_of(options: Mapping[str, object]) -> str:
    """The interpreter that a rollout engine's options name; empty: this one."""
    return str(Path(str(options["python"])).expanduser()) if options.get("python") else ""


def stand_ins(options: Mapping[str, object]) -> list[str]:
    """What an engine's options lay over the packages of its interpreter (`PYTHONPATH` in `env`): each package in its own words.

    >>> stand_ins({"env": "OMP_NUM_THREADS=1"})
    []
    """
    given = dict(assignment.partition("=")[::2] for assignment in shlex.split(str(options.get("env", ""))))
    places = [place for place in given.get("PYTHONPATH", "").split(os.pathsep) if place]
    found = sorted(importlib.metadata.distributions(path=places), key=lambda one: one.name) if places else []
    return [f"{one.name} {one.version}: {one.metadata.json.get('summary', 'it does not say what it does')}" for one in found]
