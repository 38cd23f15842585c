"""Build the package; pyproject.toml says all else. The flows go into it, so that `m2flow demo` and `m2flow new` work from a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copy the modules, and the flows with their model."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "m2flow" / "flows"
            shutil.copytree("flows", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildPy})
