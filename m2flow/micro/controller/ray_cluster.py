"""Connect to a Ray cluster: list its nodes, reserve placement groups, and run agents as actors in them. The only module that imports Ray.

    Plan, ClusterSpec --bundles--> Bundles (a placement group has one for each)
    RayCluster.open -> reserve(bundles) -> agent(bundle) --call--> a reference --wait, result--> the method's result

A bundle is never split over hosts. Co-located workers that take turns on a device share one; so do all workers that the plan has put on one
node of a pool, such as a tensor-parallel group. A worker that spans nodes is refused: it is one process.

Ray finds the nodes, starts the actors and carries these calls. Messages between workers, samples and weights never pass through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import msgspec

from m2flow.errors import M2FlowError, PlanError, SpecError, WorkerError
from m2flow.micro.controller.host_agent import Agent
from m2flow.micro.protocol.plan import Plan, WorkerPlan
from m2flow.spec import ClusterSpec, RaySpec

_NOT_SHIPPED = ["runs", ".git", ".venv*", "__pycache__", "*.safetensors", "*.bin", "*.gguf", "*.pt"]
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable in which Ray gives the entry point of a submitted job its configuration."""
_RAYS_OWN_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Ray replaces these by the node's address."""
_CALLS_AT_ONCE = 4
_A_LITTLE = 0.001
"""Amount requested of a custom resource that only marks nodes."""


# ---- bundles: workers that must be on one host

_PLACE = re.compile(r"(.*)\[(\d+)(?::(\d+))?\]")


class Bundle(msgspec.Struct, frozen=True):
    """Workers that must be on one host, and the resources they need there."""

    workers: tuple[str, ...]
    cpus: int
    gpus: int
    resource: str = ""
    """Custom resource that only hosts of the wanted kind have; empty: any host."""


def bundles(plan: Plan, spec: ClusterSpec) -> tuple[Bundle, ...]:
    """Return one bundle for each group of workers that must be on one host, in the order of the plan.

    Raises:
        PlanError: a worker would span several nodes.
    """
    groups: dict[tuple[str, object], list[WorkerPlan]] = {}
    for worker in plan.workers:
        groups.setdefault(_group(worker, spec), []).append(worker)
    return tuple(
        Bundle(
            tuple(worker.name for worker in workers),
            sum(worker.threads * worker.ranks for worker in workers),
            num_gpus(workers, spec),
            _resource(workers[0], spec),
        )
        for workers in groups.values()
    )


def num_gpus(workers: list[WorkerPlan], spec: ClusterSpec) -> int:
    """Count the GPUs that these workers use together; one that several take turns on counts once."""
    devices: set[object] = set()
    for worker in workers:
        pool, first, stop = place_of(worker.device)
        if pool in spec.pools and spec.pools[pool].device != "cpu":
            devices.update((pool, device) for device in range(first, stop))
        elif worker.device.startswith("cuda"):
            devices.update((worker.lease or worker.name, rank) for rank in range(worker.ranks))
    return len(devices)


def holders(plan: Plan, spec: ClusterSpec) -> dict[str, str]:
    """Map each worker to the worker that reserves its GPUs: itself, or one on the same node that takes turns with it and has all of
    them."""
    found = {}
    for bundle in bundles(plan, spec):
        members = [plan.worker(name) for name in bundle.workers]
        for worker in members:
            around = [other for other in members if _has_all(other, worker)]
            found[worker.name] = max(around, key=_size).name if around else worker.name
    return found


def part_of(gpus: str, holder: WorkerPlan, worker: WorkerPlan) -> str:
    """Select the GPUs that a worker uses from those that its holder was given.

    >>> slots = ()
    >>> part_of("4,5,6,7", WorkerPlan("train-0", "main[4:8]", 1, slots), WorkerPlan("rollout-1", "main[6:8]", 1, slots))
    '6,7'
    """
    (_, start, _), (_, first, stop) = place_of(holder.device), place_of(worker.device)
    return ",".join(gpus.split(",")[first - start : stop - start]) if stop else gpus


def _has_all(holder: WorkerPlan, worker: WorkerPlan) -> bool:
    (pool, start, end), (own, first, stop) = place_of(holder.device), place_of(worker.device)
    return pool == own and start <= first and stop <= end and (stop > 0 or (pool.startswith("cuda") and holder.lease == worker.lease != ""))


def _size(worker: WorkerPlan) -> int:
    _, first, stop = place_of(worker.device)
    return stop - first


def place_of(device: str) -> tuple[str, int, int]:
    """Parse a worker's device into its pool, the first device and the one after the last.

    >>> place_of("main[0:4]"), place_of("main[7]"), place_of("cpu")
    (('main', 0, 4), ('main', 7, 8), ('cpu', 0, 0))
    """
    found = _PLACE.fullmatch(device)
    if found is None:
        return device, 0, 0
    first = int(found[2])
    return found[1], first, int(found[3]) if found[3] else first + 1


def _group(worker: WorkerPlan, spec: ClusterSpec) -> tuple[str, object]:
    pool, first, stop = place_of(worker.device)
    if pool in spec.pools and stop:
        size = spec.pools[pool].devices_per_node
        if first // size != (stop - 1) // size:
            num_nodes = (stop - 1) // size - first // size + 1
            raise PlanError(
                f"{worker.name} has the devices {first} to {stop - 1} of {pool}, which are on {num_nodes} nodes",
                now=f"A worker is on one node, with its ranks. Pin it to at most {size} devices: pin: {{NAME: {{num_devices: {size}}}}}",
            )
        return pool, first // size
    return ("lease", worker.lease) if worker.lease else ("worker", worker.name)


def _resource(worker: WorkerPlan, spec: ClusterSpec) -> str:
    pool, _, stop = place_of(worker.device)
    if pool in spec.pools and stop:
        return spec.ray.resources.get(pool, "")
    kinds = {slot.kind for slot in worker.engines}
    for kind in ("train", "rollout", "function"):
        if kind in kinds:
            return spec.ray.resources.get("functions" if kind == "function" else kind, "")
    return ""


# ---- the cluster


class Node(msgspec.Struct, frozen=True):
    """One host of the cluster."""

    name: str
    """Ray's node id."""
    address: str
    resources: dict[str, float]


def require_ray() -> Any:
    """Import Ray and return the module.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise SpecError(
            "the cluster spec says `launcher: ray`, and Ray is not installed here",
            now="Install it with `pip install 'm2flow[ray]'`, the same version as on the cluster's nodes, or leave `launcher` out.",
        ) from None
    return ray


def check_answer(address: str, wait_s: float = 10.0) -> None:
    """Check that something listens at the `HOST:PORT` of a head node. Ray itself would retry for minutes before it fails.

    `auto`, `ray://` and loopback addresses are not checked: Ray replaces them by an address of its own.

    Raises:
        SpecError: nothing has listened for `wait_s`.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal() or host in _RAYS_OWN_LOOPBACK:
        return
    end_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=wait_s).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() < end_s:
                time.sleep(min(0.2, wait_s))
                continue
            raise _no_cluster(address, str(error)) from None
        return


def _no_cluster(address: str, why: str) -> SpecError:
    return SpecError(
        f"there is no Ray cluster at {address!r}: {why}",
        now="`ray start --head` starts one; ray: {address: ...} names another. For one with a token, set RAY_AUTH_MODE=token.",
    )


@final
class RayCluster:
    """A connection to a Ray cluster. Call `open` first and `close` last; the other methods may be called from any thread."""

    def __init__(self, spec: RaySpec, *, flow_directory: str = "") -> None:
        """
        Args:
            flow_directory: is shipped to every node, so that modules next to the flow can be imported there.
        """
        self._spec = spec
        self._flow_directory = flow_directory
        self._ray: Any = None
        self._was_open = False
        self._groups: list[Any] = []
        self._ready: Any = None

    def open(self) -> None:
        """Connect to the cluster.

        Raises:
            SpecError: Ray is not installed, or there is no such cluster.
        """
        # Without it Ray warns at each start that it will one day not clear CUDA_VISIBLE_DEVICES for actors without GPUs.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._ray = require_ray()
        if self._ray.is_initialized():
            self._was_open = True
            return
        check_answer(self._spec.address)
        handler = _sigterm()
        try:
            self._ray.init(
                address=self._spec.address,
                runtime_env=self._environment(),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise _no_cluster(self._spec.address, _first_line(error)) from None
        finally:
            handler()

    def _environment(self) -> dict[str, object]:
        """Return the runtime environment for each node. Ray merges it with a submitted job's and refuses duplicates: there the job's
        counts."""
        of_job = json.loads(os.environ.get(_OF_A_JOB, "{}")).get("runtime_env", {})
        found: dict[str, object] = {
            "py_modules": [str(Path(__file__).resolve().parents[2])],
            "excludes": _NOT_SHIPPED,
            "env_vars": {name: value for name, value in self._spec.env.items() if name not in of_job.get("env_vars", {})},
        }
        directory = self._spec.working_dir or self._flow_directory
        found |= {"working_dir": directory} if directory else {}
        return {name: value for name, value in found.items() if name not in of_job or name == "env_vars"}

    @property
    def own_address(self) -> str:
        """IPv4 address at which the cluster's nodes reach this process."""
        if self._spec.address.startswith("ray://"):  # The host in the address may be the end of a tunnel; nodes' own addresses are real.
            return _address_towards(next(node.address for node in self.nodes()))
        return _node_address()

    def nodes(self) -> list[Node]:
        """List the nodes that are alive."""
        return [Node(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"])) for n in self._ray.nodes() if n["Alive"]]

    def reserve(self, wanted: Sequence[Bundle]) -> Any:
        """Request a placement group without waiting for it."""
        from ray.util.placement_group import placement_group

        group = placement_group([_resources(bundle) for bundle in wanted], strategy="PACK")
        self._groups.append(group)
        self._ready = self._ready or group.ready()
        return group

    def release(self, group: Any) -> None:
        """Remove a placement group; actors that are still in it end."""
        self._groups.remove(group)
        with contextlib.suppress(Exception):  # The cluster is gone.
            self._ray.util.remove_placement_group(group)

    def has_room(self) -> bool:
        """Whether the first placement group that was requested is ready."""
        return bool(self._ray.wait([self._ready], timeout=0.0)[0])

    def agent(self, group: Any, index: int, name: str, *, gpus: int) -> Any:
        """Create an actor with an `Agent` in a bundle of a placement group; it starts when the group is ready."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True)
        kind = self._ray.remote(Agent)
        # The bundle's processor cores are for the worker's process, which Ray does not know of.
        options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS_AT_ONCE}
        return kind.options(name=name, scheduling_strategy=place, **options).remote(_node_address)

    def call(self, agent: Any, method: str, *args: object) -> Any:
        """Call a method of an agent without waiting; return a reference to its result."""
        return getattr(agent, method).remote(*args)

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait for the first reference or the timeout; return all that are ready."""
        found, _ = self._ray.wait(list(references), num_returns=1, timeout=timeout_s)
        if found:
            found, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0.0)
        return list(found)

    def result(self, reference: Any) -> Any:
        """Return the result of a reference that is ready.

        Raises:
            M2FlowError: the method raised it. WorkerError: the agent's process is gone, or could not be started.
        """
        try:
            return self._ray.get(reference, timeout=5.0)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, M2FlowError):
                raise cause from None
            raise WorkerError(f"could not be started: {_first_line(cause)}", remote=str(error)) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"is gone with its Ray actor ({type(error).__name__}: {_first_line(error)})", remote=str(error)) from None

    def end(self, agent: Any) -> None:
        """Kill an actor, whatever it is doing."""
        with contextlib.suppress(Exception):  # The actor or the cluster is gone already.
            self._ray.kill(agent, no_restart=True)

    def on_each_node(self, function: Callable[[], Any], *, timeout_s: float) -> list[tuple[Node, Any]]:
        """Run a function on every node; return for each its result, or in words why there is none."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def ask() -> Any:  # Ray accepts plain functions, not other callables.
            return function()

        task = self._ray.remote(ask)
        asked = {
            node.name: (node, task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)).remote())
            for node in self.nodes()
        }
        self._ray.wait([reference for _, reference in asked.values()], num_returns=len(asked), timeout=timeout_s)
        found: list[tuple[Node, Any]] = []
        for node, reference in asked.values():
            try:
                found.append((node, self._ray.get(reference, timeout=0.0)))
            except self._ray.exceptions.GetTimeoutError:
                found.append((node, f"none in {timeout_s:.0f} s"))
            except self._ray.exceptions.RayError as error:
                found.append((node, f"none: {_first_line(error)}"))
        return found

    def close(self) -> None:
        """Remove all placement groups and disconnect. May be called twice."""
        if self._ray is None:
            return
        for group in list(self._groups):
            self.release(group)
        self._ready = None
        if not self._was_open:
            self._ray.shutdown()
        self._ray = None


def _node_address() -> str:
    """Return the address of the node on which this runs."""
    return str(require_ray().util.get_node_ip_address())


def _resources(bundle: Bundle) -> dict[str, float]:
    wanted = {"CPU": float(bundle.cpus), "GPU": float(bundle.gpus), bundle.resource: _A_LITTLE}
    return {name: amount for name, amount in wanted.items() if name and amount}


def lacking(wanted: Iterable[Bundle], nodes: Sequence[Node]) -> str:
    """Describe a bundle that no node could ever hold; empty if there is none."""
    for bundle in wanted:
        needs = _resources(bundle)
        if not any(all(node.resources.get(name, 0.0) >= amount for name, amount in needs.items()) for node in nodes):
            amounts = ", ".join(f"{amount:g} {name}" if amount >= 1 else name for name, amount in needs.items())
            return f"no node has {amounts}, which {', '.join(bundle.workers)} need" + ("" if len(bundle.workers) > 1 else "s")
    return ""


def too_much(wanted: Iterable[Bundle], nodes: Sequence[Node]) -> str:
    """Describe resources of which all bundles together need more than all nodes have; empty if the nodes would do when unused by others."""
    together: Counter[str] = Counter()
    for bundle in wanted:
        together.update(_resources(bundle))
    there = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in together}
    return ", ".join(f"{amount:g} {name} of its {there[name]:g}" for name, amount in together.items() if amount > there[name])


def _sigterm() -> Callable[[], object]:
    """Return a function that restores the SIGTERM handler, which Ray replaces."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        return lambda: signal.signal(signal.SIGTERM, before)
    except ValueError:
        return lambda: None


def _address_towards(host: str) -> str:
    """Return this host's address on the route to another one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
