"""`m2flow cluster init`: a spec for what is here. It is written as a person would write it, and read back before it is said to be there."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from pathlib import Path

import click
import psutil

from m2flow.cli.cluster_file import load_cluster
from m2flow.errors import SpecError
from m2flow.spec import RaySpec

_HEAD = """\
# {what}. Written by `m2flow cluster init`; `m2flow cluster schema` has every field.
#
#     m2flow cluster check {file}
#     m2flow run flows/grpo.py --cluster {file}

name: {name}
"""
_LOCAL = """\
device: {device:<15} # {gpus}
cores: {cores:<16} # of {all_cores}; {memory} GiB of memory

placement: {placement:<12} # {why}

rollout:
  engine: embedded      # `m2flow engines` lists those that work here
  workers: 1

train:
  engine: embedded
  token_budget: 8192    # tokens of a micro-batch; lower it if training runs out of memory

functions:
  workers: 1            # processes for rewards and ops
"""
_RAY = """\
launcher: ray
ray:
  address: {address}

# The cluster has now:
{nodes}
placement: split
cores: {cores:<16} # of the cluster's {all_cores}, to share out among engines, each's from one node; function workers take one more each
device: {device}

rollout:
  engine: embedded
  workers: {workers:<12} # one a node, but for the trainer's

train:
  engine: embedded

functions:
  workers: 1

# channels:
#   keys: ~/.m2flow/cluster.key   # the same file on every node (`m2flow keys`); without it each run makes a key and sends it through Ray
"""


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("cluster.yaml"))
@click.option("--ray", "address", metavar="ADDRESS", help="Describe a Ray cluster: HOST:PORT, ray://HOST:10001 or auto.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def command(file: Path, address: str | None, *, force: bool) -> None:
    """Write a cluster spec to FILE (cluster.yaml), for this machine or for a Ray cluster.

    \b
    Examples:
      m2flow cluster init mine.yaml
      m2flow cluster init mine.yaml --ray auto
    """
    if file.exists() and not force:
        raise SpecError(f"{file} exists already", now="Name another file, or give --force to write over it.")
    name = re.sub(r"[^A-Za-z0-9-]+", "-", file.stem).strip("-") or "cluster"
    what, body = _of_ray(address) if address else _of_this_machine()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_HEAD.format(what=what, name=name, file=file) + body)
    load_cluster(file)
    click.echo(f"{file}: {what}\nNext: m2flow cluster check {file}")


def _of_this_machine() -> tuple[str, str]:
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    cores, all_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, os.cpu_count() or 1
    memory = psutil.virtual_memory().total >> 30
    found = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "no GPU"
    body = _LOCAL.format(
        device="cuda:0" if gpus else "cpu",
        gpus=f"{found}; workers here share the first" if len(gpus) > 1 else found,
        cores=cores,
        all_cores=all_cores,
        memory=memory,
        placement="time-shared" if gpus or cores < 4 else "split",
        why="rollout and training take turns"
        if gpus or cores < 4
        else "rollout and training work side by side, each on its share of the cores",
    )
    return f"{socket.gethostname()}: {cores} cores, {found}, {memory} GiB", body


def _of_ray(address: str) -> tuple[str, str]:
    from m2flow.micro.control.ray_cluster import RayCluster

    cluster = RayCluster(RaySpec(address=address))
    cluster.open()
    try:
        nodes = [(int(node.resources.get("CPU", 0)), int(node.resources.get("GPU", 0))) for node in cluster.nodes()]
    finally:
        cluster.close()
    kinds = Counter(node for node in nodes if any(node))
    listed = [f"#   {count} x {cores} cores, {gpus} GPUs" for (cores, gpus), count in sorted(kinds.items(), reverse=True)]
    all_cores, all_gpus = (sum(node[i] for node in nodes) for i in (0, 1))
    body = _RAY.format(
        address=address,
        nodes="\n".join(listed) + "\n",
        cores=max(1, all_cores - 1),
        all_cores=all_cores,
        device="cuda:0                # in each worker: Ray gives it a GPU of its own" if all_gpus else "cpu",
        workers=max(1, (all_gpus or sum(kinds.values())) - 1),
    )
    return f"Ray cluster of {len(nodes)} node{'s' * (len(nodes) != 1)}: {all_cores} cores, {all_gpus} GPUs", body
