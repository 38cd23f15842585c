"""Which launcher a run has, by its cluster spec. A run on this machine imports nothing of the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from m2flow.micro.control.launcher import Launcher, LocalLauncher
from m2flow.micro.plan import Plan
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, RunSettings


def launcher_for(
    plan: Plan,
    spec: ClusterSpec,
    settings: RunSettings,
    models: Mapping[str, Model],
    run_dir: Path,
    *,
    attempt: int = 0,
    restore: Mapping[str, str] | None = None,
    flow_file: str = "",
) -> Launcher:
    """One that is ready to start the plan's workers.

    Raises:
        SpecError, PlanError: the cluster is not there, or too small.
    """
    if spec.launcher == "local":
        return LocalLauncher(plan, spec, settings, models, run_dir, attempt=attempt, restore=restore)
    from m2flow.micro.control.ray_launcher import RayLauncher

    file = Path(flow_file.partition(":")[0])
    directory = str(file.resolve().parent) if flow_file and file.is_file() else ""
    launcher = RayLauncher(plan, spec, settings, models, run_dir, attempt=attempt, restore=restore, flow_directory=directory)
    launcher.connect()
    return launcher
