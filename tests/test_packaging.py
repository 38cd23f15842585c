"""What is shipped: the wheel, the source distribution, the extras, the Dockerfiles."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from m2flow.cli.main import cli
from m2flow.engines.registry import engines
from m2flow.runs.cluster_file import load_cluster

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
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that pip has installed the wheel into. Its dependencies are those that are here; m2flow's own checkout is not."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    subprocess.run([*_pip(environment), "install", "--no-index", "--no-deps", "--quiet", wheel], env=_alone(), check=True)
    # Plain lines: what these directories' own .pth files add is left out, the checkout among it.
    (packages / "base.pth").write_text("".join(f"{path}\n" for path in sys.path if Path(path).name == "site-packages"))
    return environment


def _pip(environment: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]


def _alone() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}


def built(kind: str, source: Path, out: Path) -> Path:
    """Build a distribution as pip does, with the setuptools that is here."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(out)], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    return file


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "RECORD"}


@pytest.mark.slow
def test_what_pip_installs_has_all_that_the_demo_and_new_projects_need(installed: Path, tmp_path: Path) -> None:
    def m2flow(*words: str) -> str:
        ran = subprocess.run(
            [installed / "bin" / "m2flow", *words], cwd=tmp_path, env=_alone(), capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    m2flow("new", "mine")
    said = json.loads(m2flow("demo", "--num-steps", "1", "--warm-steps", "1", "--batch", "2", "--n", "2", "--json", "--quiet"))
    assert str(installed) in (tmp_path / said["run_dir"] / "config.json").read_text()
    assert str(ROOT / "m2flow") not in (tmp_path / said["run_dir"] / "config.json").read_text()
    plan = (tmp_path / said["run_dir"] / "plan.txt").read_text()
    assert re.search(rf"{re.escape(str(installed))}.*/m2flow/flows/grpo\.py", plan)
    assert "click" not in plan


def test_pip_finds_every_dependency_of_the_wheel_in_the_versions_that_are_locked(installed: Path) -> None:
    said = subprocess.run([*_pip(installed), "check"], env=_alone(), capture_output=True, text=True, check=False).stdout
    assert [line for line in said.splitlines() if line.startswith("m2flow ")] == []


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
    of_tests = {name for name in EXTRAS if name.endswith("-tests")}
    assert set(everything[7:-1].split(",")) == EXTRAS.keys() - of_tests - {"all", "dev", "vllm"}


LOCKS = {"sglang": "sglang-cpu", "vllm": "vllm-cpu", "megatron": "megatron-cpu"}
"""Extras with an environment of their own -> the lock file of it. Those of the others are installed together, over requirements.lock."""


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"all"}))
def test_the_locked_environments_have_a_version_of_each_package_that_an_extra_allows(extra: str) -> None:
    pinned: dict[str, str] = {}
    for name in ("requirements.lock", f"requirements-{LOCKS.get(extra, 'full')}.lock"):
        pins = re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text())
        pinned |= {canonicalize_name(package).removesuffix("-cpu"): version for package, version in pins}  # vLLM's build has another name.
    for requirement in map(Requirement, EXTRAS[extra]):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is in no lock file"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is locked at {version}"


DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PYTHONS = {"python:3.11-slim": "3.11", "nvidia/cuda:13.0.1-devel-ubuntu24.04": "3.12"}
"""Base image -> the Python that it has, or that its distribution installs."""


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)


@each_dockerfile
def test_what_a_dockerfile_copies_is_there_and_in_the_context(dockerfile: Path) -> None:
    context = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for kind, rest in instructions(dockerfile) if kind == "COPY" for name in rest.split()[:-1]}
    assert {"pyproject.toml", "setup.py", "m2flow", "flows", "requirements.lock"} <= copied <= context
    assert all((ROOT / name).exists() for name in copied)


@each_dockerfile
def test_python_extras_and_versions_of_a_dockerfile_are_those_of_the_project(dockerfile: Path) -> None:
    ((_, base),) = (each for each in instructions(dockerfile) if each[0] == "FROM")
    assert f"Programming Language :: Python :: {PYTHONS[base]}" in PROJECT["classifiers"]
    installs = " ".join(rest for kind, rest in instructions(dockerfile) if kind == "RUN")
    assert {name for names in re.findall(r"\.\[([^\]]*)\]", installs) for name in names.split(",")} <= EXTRAS.keys()
    assert "--constraint requirements.lock" in installs
    pinned = (ROOT / "requirements-sglang-cpu.lock").read_text().splitlines()
    assert [word for word in installs.split() if "==" in word and word not in pinned] == []


@each_dockerfile
def test_an_image_starts_a_command_of_m2flow_as_a_user_without_rights(dockerfile: Path) -> None:
    last = dict(instructions(dockerfile))
    assert json.loads(last["ENTRYPOINT"]) == ["m2flow"]
    assert json.loads(last["CMD"])[0] in cli.list_commands(click.Context(cli))
    assert last["USER"] == "m2flow"


def test_the_spec_of_the_cuda_image_names_an_interpreter_and_a_place_that_it_has() -> None:
    spec = load_cluster(ROOT / "docker" / "sglang.yaml")
    python = str(spec.rollout.options["python"])
    image = (ROOT / "docker" / "cuda.Dockerfile").read_text()
    assert f"python3 -m venv {python.removesuffix('/bin/python')} " in image
    assert "COPY docker/sglang.yaml /etc/m2flow/sglang.yaml\n" in image
