"""Why idle devices are idle: for all of a kind the same cause, by what goes on elsewhere at that moment.

    what goes on --causes_of--> the cause of idle devices that generate, and of those that train

The one rule for simulated runs and for the traces of real ones. What the causes mean is in `m2flow.micro.simulation.usage`.
"""

from __future__ import annotations

from typing import NamedTuple


class Doing(NamedTuple):
    """What goes on at a moment, anywhere in a run."""

    num_generating: int
    """Rollout instances that have a sample."""
    num_instances: int
    syncs: bool
    """Weights are on their way."""
    trains: bool
    judges: bool
    """A reward or an op is computed."""
    switches: bool
    """A device is changing hands."""
    lacks_memory: bool = False
    """The program may make no further step before there is room for its samples."""


def causes_of(doing: Doing) -> dict[str, str]:
    """The cause by the kind of engine, `rollout` and `train`."""
    if doing.syncs:
        return {"rollout": "sync", "train": "sync"}
    if doing.num_generating:
        return {"rollout": "tail", "train": "rollout" if doing.num_generating == doing.num_instances else "tail"}
    if doing.trains:
        return {"rollout": "staleness", "train": "barrier"}
    if doing.judges:
        return {"rollout": "reward", "train": "reward"}
    if doing.switches:
        return {"rollout": "switch", "train": "switch"}
    waits = "credits" if doing.lacks_memory else "barrier"
    return {"rollout": waits, "train": waits}
