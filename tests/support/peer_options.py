"""Print the names of the options of TRL's, verl's or OpenRLHF's trainer, from an installed or unpacked package; none of it is imported.

    python tests/support/peer_options.py trl FOLDER > tests/expected/options-trl.txt

FOLDER is where the package's own folder lies, for example `site-packages`. The pages docs/guide/from-*.md have a row for each of them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def options(peer: str, folder: Path) -> list[str]:
    """The options of `trl.GRPOConfig`'s own, of verl's generated PPO configuration, or of OpenRLHF's `train_ppo_ray`, in their order."""
    return {"trl": _trl, "verl": _verl, "openrlhf": _openrlhf}[peer](folder / peer)


def _trl(package: Path) -> list[str]:
    body = ast.parse((package / "trainer" / "grpo_config.py").read_text()).body
    (config,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig")
    return [node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def _verl(package: Path) -> list[str]:
    text = (package / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text()
    return [name for name in _leaves(yaml.safe_load(text)) if not name.endswith("_target_")]


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield above + name


def _openrlhf(package: Path) -> list[str]:
    return re.findall(r'add_argument\(\s*"--([\w.]+)"', (package / "cli" / "train_ppo_ray.py").read_text())


if __name__ == "__main__":
    print("\n".join(options(sys.argv[1], Path(sys.argv[2]))))
