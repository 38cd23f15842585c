"""What is shipped: the wheel, the source distribution, the extras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from m2flow.engines.registry import engines

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TRACKERS = {"wandb", "mlflow"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a checkout has that goes into distributions; they are built in a copy, for setuptools writes beside its sources."""
    copy = tmp_path_factory.mktemp("source")
    for folder in ("m2flow", "flows"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout, as pip would install it."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built("wheel", source, tmp_path_factory.mktemp("wheel"))) as archive:
        archive.extractall(target)
    return target


def built(kind: str, source: Path, out: Path) -> Path:
    """Build a distribution as pip does, with the setuptools that is here."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(out)], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    return file


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "RECORD"}


def test_a_wheel_has_all_that_the_demo_and_new_projects_need(unpacked: Path, tmp_path: Path) -> None:
    def m2flow(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-m", "m2flow", *words]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    m2flow("new", "mine")
    said = json.loads(m2flow("demo", "--num-steps", "1", "--warm-steps", "1", "--batch", "2", "--n", "2", "--json", "--quiet"))
    assert str(unpacked / "m2flow" / "flows") in (tmp_path / said["run_dir"] / "config.json").read_text()


def test_a_wheel_has_every_file_of_the_package_and_of_the_flows(source: Path, unpacked: Path) -> None:
    package, flows = files_of(source / "m2flow"), files_of(source / "flows")
    assert package | {f"flows/{name}": body for name, body in flows.items()} == files_of(unpacked / "m2flow")


def test_a_wheel_of_the_source_distribution_has_the_files_of_a_wheel_of_the_checkout(source: Path, unpacked: Path, tmp_path: Path) -> None:
    for folder in ("sdist", "wheel", "unpacked"):
        (tmp_path / folder).mkdir()
    with tarfile.open(built("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "from", filter="data")
    (inner,) = (tmp_path / "from").iterdir()
    with zipfile.ZipFile(built("wheel", inner, tmp_path / "wheel")) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert files_of(tmp_path / "unpacked") == files_of(unpacked)


def _extras_named() -> dict[str, str]:
    """Each extra that the package, the docs or a set-up file tells users to install -> a file that does."""
    found: dict[str, str] = {}
    texts = [*(ROOT / "m2flow").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "flows").rglob("*.py"), ROOT / "README.md"]
    for file in texts:
        for names in re.findall(r"m2flow\[([^\]]*)\]'", file.read_text()):
            found |= dict.fromkeys((name for name in names.split(",") if "{" not in name), str(file))
    return found | {info.extra: "an engine" for info in engines() if info.extra} | dict.fromkeys(TRACKERS, "trackers.py")


def test_every_extra_that_a_message_or_a_page_names_is_there() -> None:
    named = _extras_named()
    assert {"smollm", "ray", "deepspeed", "lora", "parquet", "grammar", "rewards", "otlp"} <= named.keys()
    assert {name: where for name, where in named.items() if name not in EXTRAS} == {}


def test_all_has_every_extra_for_users_but_vllm() -> None:
    (everything,) = EXTRAS["all"]
    assert everything.startswith("m2flow[")
    assert set(everything[7:-1].split(",")) == EXTRAS.keys() - {"all", "dev", "viewer-tests", "vllm"}
