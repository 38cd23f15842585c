"""Which launcher a run has, by its cluster spec. A run on this machine imports nothing of the others."""

from __future__ import annotations

from m2flow.micro.control.launcher import Job, Launcher, LocalLauncher


def launcher_for(job: Job) -> Launcher:
    """One that is ready to start the plan's workers.

    Raises:
        SpecError, PlanError: the cluster is not there, or too small.
    """
    if job.spec.launcher == "local":
        return LocalLauncher(job)
    from m2flow.micro.control.ray_launcher import RayLauncher

    launcher = RayLauncher(job)
    launcher.connect()
    return launcher
