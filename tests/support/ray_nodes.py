"""Nodes that Ray's autoscaler starts and ends on this machine, by Ray's own interface for those who provide nodes (`type: external`).

Ray's wheel has such a provider, and not the file that its own cluster of such nodes (`ray.cluster_utils.AutoscalingCluster`) is made from.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import ray_start
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

_ONE_AT_A_TIME = threading.Lock()
"""The autoscaler has several threads, and patience is the process's."""


class PatientNodes(FakeMultiNodeProvider):  # type: ignore[misc]
    """Processes of this machine, each a node of the cluster, that may take long to come up."""

    def create_node_with_resources_and_labels(self, *arguments: Any, **more: Any) -> None:
        with _ONE_AT_A_TIME:
            ray_start.persistently(partial(super().create_node_with_resources_and_labels, *arguments, **more))


def config(address: str, *, cpus: int, most: int, idle_s: float) -> dict[str, object]:
    """What `ray start --autoscaling-config` reads.

    Args:
        cpus: of each node. most: nodes besides the head, which has no room.
        idle_s: after which a node is taken away.
    """
    nothing_to_do = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
    nothing_to_do += ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        **{name: [] for name in nothing_to_do},
        **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
        "file_mounts_sync_continuously": False,
        "cluster_name": "grows",
        "max_workers": most,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": most,
        "provider": {
            "type": "external",
            "module": "ray_nodes.PatientNodes",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "small": {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
    }
