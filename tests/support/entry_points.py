"""Engines of a third party, as an installed package would register them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_entry_points(directory: Path, package: str, engines: Mapping[str, str]) -> None:
    """Make a directory, once it is on the path, register engines: name -> `module:INFO`."""
    metadata = directory / f"{package}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[m2flow.engines]\n" + "".join(f"{name} = {at}\n" for name, at in engines.items()))
