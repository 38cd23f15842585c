"""Run the workers of a plan on a Ray cluster: its nodes, placement groups and actors, and the launcher. Alone in importing Ray.

    Plan, ClusterSpec --bundles--> Bundles (a placement group has one for each)
    RayCluster.open -> reserve(bundles) -> agent(bundle) --call--> a reference --wait, result--> the method's result

A bundle is never split over hosts. Co-located workers that take turns on a device share one; so do all workers that the plan has put on
one node of a pool, such as a tensor-parallel group. A worker that spans nodes is refused: it is one process.

The launcher has an agent, a Ray actor, start each worker as a process on its node.

    Plan --bundles--> a placement group --> agents --spawn--> m2flow.micro.worker.worker_process
    workers --ZeroMQ--> controller, other workers        agents --Ray--> what workers print, how they ended

Ray finds the nodes, starts the actors and carries the calls of these; messages between workers, samples, weights and heartbeats never pass
through it. A thread here polls each agent without pause, so a node that is gone or cut off is noticed as soon as its agents do not answer,
which is sooner than Ray reports it. A worker is restarted with another actor in the same placement group, whose bundle Ray reschedules on
another node if its node is lost.

Limits: all nodes must see the run's directory (`m2flow cluster check` says whether they do). What passes through Ray itself (a fresh key,
if the spec names no file with one) is as safe as the cluster's own connections.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import msgspec

from m2flow.channels.zeromq import is_private, new_keys
from m2flow.errors import M2FlowError, PlanError, SpecError, WorkerError
from m2flow.micro.controller.launcher import Agent, Job, Launcher, Started, StartWorker
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
        self._head = ""
        """`HOST:PORT` at which the head node answers this process; empty for a client, to whom another process of Ray's answers."""
        self._is_lost = False
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
            self._head = self._ray.get_runtime_context().gcs_address or ""
            check_answer(self._head)
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
        if not self._spec.address.startswith("ray://"):
            self._head = self._ray.get_runtime_context().gcs_address

    def check_head(self) -> None:
        """Check that the head node answers. Without one, Ray's calls wait, and after a minute (its own setting) it ends this process.

        Raises:
            WorkerError: it has not answered for a third of that time, or once before; nothing more is asked of the cluster then.
        """
        try:
            if not self._is_lost:
                check_answer(self._head, float(os.environ.get(_RAYS_PATIENCE, "60")) / 3)
                return
        except SpecError:
            self._is_lost = True
        raise WorkerError(
            f"the head node of the Ray cluster at {self._head} answers no more",
            now="`ray start` makes a cluster again; then `m2flow run --resume` goes on with the run, with --cluster SPEC on another one.",
        )

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
            raise WorkerError(
                f"could not be started: {_first_line(cause)}",
                remote=str(error),
                now="See `ray status` and the node's log; m2flow must be installed there in the same version.",
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerError(
                f"is gone with its Ray actor ({type(error).__name__}: {_first_line(error)})",
                remote=str(error),
                now="Ray's log of that node says why (often its memory ran out, or it is gone). `m2flow run --resume` goes on.",
            ) from None

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
        if self._is_lost:
            self._ray = None
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


# ---- workers on it


_ANSWERS_S = 1.0
"""An agent answers a poll after so long even without news."""
_LOOKS_S = 0.25
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_ENDS_S = 5.0
"""How long agents get to end their workers."""


@dataclass
class _Hosted:
    """A worker's process and its agent."""

    worker: str
    agent: Any
    asked_s: float
    """When the agent was sent the call that it has not answered yet."""
    started: Started | None = None
    how: str = ""
    """How it ended; empty while it runs."""
    rank: int = 0
    """Rank that ended it, or that hangs."""
    stopped: tuple[int, ...] = ()
    """Ranks that a signal had stopped when its agent last answered."""
    pending: Any = None
    closing: list[Any] = field(default_factory=list)


@final
class RayLauncher(Launcher):
    """Start a plan's workers on a Ray cluster. `connect` must be called first."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        file = Path(job.flow_file.partition(":")[0])
        self._flow_directory = str(file.resolve().parent) if job.flow_file and file.is_file() else ""
        self._cluster = RayCluster(job.spec.ray, flow_directory=self._flow_directory)
        self._bundles: tuple[Bundle, ...] = ()
        self._holders: dict[str, str] = {}
        self._begins = tuple(worker for worker in job.plan.workers if not worker.is_spare)
        self._room: dict[str, tuple[Any, int]] = {}
        """Worker -> its placement group, and the index of its bundle."""
        self._given_back: set[str] = set()
        """Workers whose own placement group is released as soon as their agents have cleaned up."""
        self._host = ""
        self._lock = threading.Lock()
        self._hosted: dict[str, _Hosted] = {}
        self._failure: M2FlowError | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="m2flow-ray", daemon=True)
        self._began_s = 0.0

    def connect(self) -> None:
        """Connect to the cluster and check that it could hold the plan.

        Raises:
            SpecError: Ray is not installed, or there is no such cluster. PlanError: the plan does not fit its nodes.
        """
        self._cluster.open()
        try:
            from_start = msgspec.structs.replace(self._plan, workers=self._begins)
            self._bundles, self._holders = bundles(from_start, self._spec), holders(self._plan, self._spec)
            short = lacking(self._bundles, self._cluster.nodes())
            if short and not self._spec.ray.autoscales:
                raise PlanError(
                    f"the plan does not fit the Ray cluster at {self._spec.ray.address!r}: {short}",
                    now="`m2flow cluster check` shows what its nodes have. If nodes may be added, say so: ray: {autoscales: true}",
                )
            host = self._spec.channels.host
            self._host = self._cluster.own_address if is_private(f"tcp://{host}:0") else host
            if self.keys is None:  # Needed even on one host: workers listen at their nodes' addresses.
                self.keys = new_keys()
        except BaseException:
            self._cluster.close()
            raise

    @property
    def place(self) -> str:
        return f"tcp:{self._host}"

    def start(self, controller: str) -> None:
        self._controller = controller
        self._began_s = time.monotonic()
        group = self._cluster.reserve(self._bundles)
        self._room = {name: (group, index) for index, bundle in enumerate(self._bundles) for name in bundle.workers}
        for worker in self._begins:
            if self._holders[worker.name] == worker.name:
                self._begin(worker, 0)
        self._thread.start()

    def restart(self, worker: str, incarnation: int) -> None:
        self._cluster.check_head()
        with self._lock:
            self._given_back.discard(worker)
        if worker not in self._room:
            joining = msgspec.structs.replace(self._plan.worker(worker), is_spare=False)
            group = self._cluster.reserve(bundles(msgspec.structs.replace(self._plan, workers=(joining,)), self._spec))
            self._room[worker] = group, 0
        self._begin(self._plan.worker(worker), incarnation)

    def give_back(self, worker: str) -> None:
        # Workers that were there from the start share one placement group, which Ray does not release in parts.
        if self._plan.worker(worker).is_spare:
            with self._lock:
                self._given_back.add(worker)

    def kill(self, worker: str) -> None:
        hosted = self._hosted.get(worker)
        if hosted is not None:
            self._note_end(hosted, "was killed")
            hosted.closing.append(self._cluster.call(hosted.agent, "kill"))

    def ended(self) -> Mapping[str, str]:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return {name: hosted.how for name, hosted in self._hosted.items() if hosted.how}

    def pid(self, worker: str) -> int:
        hosted = self._hosted.get(worker)
        return hosted.started.pid if hosted is not None and hosted.started is not None else 0

    def stopped(self, worker: str) -> tuple[int, ...]:
        return self._hosted[worker].stopped

    def blame(self, worker: str, rank: int) -> None:
        self._hosted[worker].rank = rank

    def log_path(self, worker: str) -> Path:
        hosted = self._hosted.get(worker)
        return self.log_of(worker, hosted.rank if hosted is not None else 0)

    def stop(self, exiting: Iterable[str], *, patience_s: float = 5.0) -> None:
        deadline = time.monotonic() + patience_s
        waits_for = set(exiting)
        with contextlib.suppress(M2FlowError):
            while waits_for - self.ended().keys() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._cluster.check_head()
        except M2FlowError:  # Its nodes end their workers.
            self._cluster.close()
            return
        with self._lock:
            everybody = list(self._hosted.values())
        for hosted in everybody:
            hosted.closing.append(self._cluster.call(hosted.agent, "kill"))
        waited = [reference for hosted in everybody for reference in hosted.closing]
        deadline = time.monotonic() + _ENDS_S
        while waited and time.monotonic() < deadline:
            done = self._cluster.wait(waited, _LOOKS_S)
            waited = [reference for reference in waited if reference not in done]
        for hosted in everybody:
            self._cluster.end(hosted.agent)
        with self._lock:
            self._hosted = {}
        self._cluster.close()

    # Actors

    def _begin(self, worker: WorkerPlan, incarnation: int) -> None:
        """Create an actor and have it start the worker, without waiting for either."""
        holder = self._holders[worker.name]
        with self._lock:
            before, holding = self._hosted.get(worker.name), self._hosted.get(holder)
        if before is not None:
            self._cluster.end(before.agent)
        gpus = ""
        if holder != worker.name and holding is not None and holding.started is not None:
            gpus = part_of(holding.started.gpus, self._plan.worker(holder), worker)
        settings = self.settings_for(worker, self._controller, incarnation)
        keys_file = self._spec.channels.keys
        if keys_file:
            settings = msgspec.structs.replace(settings, keys=None)
        request = StartWorker(settings, self.token, keys_file, self._flow_directory, os.getcwd(), self._device_of(worker), gpus)
        for rank in range(worker.ranks):
            self.log_of(worker.name, rank).touch()
        group, index = self._room[worker.name]
        own_gpus = num_gpus([worker], self._spec) if holder == worker.name else 0
        agent = self._cluster.agent(group, index, f"{self.run_dir.name} {settings.tag} {self._prefix}", gpus=own_gpus)
        hosted = _Hosted(worker.name, agent, time.monotonic())
        hosted.pending = self._cluster.call(agent, "start", msgspec.json.encode(request))
        with self._lock:
            self._hosted[worker.name] = hosted

    def _device_of(self, worker: WorkerPlan) -> str:
        pool, _, stop = place_of(worker.device)
        if pool in self._spec.pools and stop:
            return "cpu" if self._spec.pools[pool].device == "cpu" else "cuda:0"
        return worker.device

    # The thread that follows the agents

    def _watch(self) -> None:
        last_s = asked_s = time.monotonic()
        try:
            while not self._is_stopping.is_set():
                if time.monotonic() - asked_s > self._spec.ray.silent_after_s:
                    self._cluster.check_head()
                    asked_s = time.monotonic()
                with self._lock:
                    pending = {hosted.pending: hosted for hosted in self._hosted.values() if hosted.pending is not None}
                if not pending:
                    self._is_stopping.wait(_LOOKS_S)
                    continue
                for reference in self._cluster.wait(list(pending), _LOOKS_S):
                    self._answered(pending[reference])
                self._release()
                now_s = time.monotonic()
                self._look_for_silence(now_s, late_s=max(0.0, now_s - last_s - 2 * _LOOKS_S))
                last_s = now_s
                self._look_for_room(now_s)
        except M2FlowError as error:
            self._failure = error
        except Exception as error:  # The cluster itself is gone; Ray has many errors for that.
            self._failure = WorkerError(
                f"the connection to the Ray cluster broke: {error!r}",
                now="Check with `ray status` that the cluster is up; then `m2flow run --resume` goes on with the run.",
            )

    def _answered(self, hosted: _Hosted) -> None:
        reference, hosted.pending = hosted.pending, None
        try:
            answer = self._cluster.result(reference)
        except M2FlowError as error:
            self._log(hosted.worker, 0, f"{error.what}\n{error.remote}\n".encode())
            self._note_end(hosted, error.what)
            return
        if isinstance(answer, Started):
            hosted.started = answer
            for worker in self._begins:
                if self._holders[worker.name] == hosted.worker != worker.name and worker.name not in self._hosted:
                    self._begin(worker, 0)
        else:
            for rank, printed in answer.printed.items():
                self._log(hosted.worker, rank, printed)
            hosted.stopped = answer.stopped
            if answer.how:
                hosted.rank = hosted.rank or answer.rank
                self._note_end(hosted, answer.how)
                return
        hosted.asked_s = time.monotonic()
        hosted.pending = self._cluster.call(hosted.agent, "follow", _ANSWERS_S)

    def _release(self) -> None:
        """Release the placement groups of workers that have left."""
        with self._lock:
            for worker in list(self._given_back):
                closing = self._hosted[worker].closing
                if len(self._cluster.wait(closing, 0.0)) == len(closing):
                    self._given_back.discard(worker)
                    self._cluster.end(self._hosted[worker].agent)
                    self._cluster.release(self._room.pop(worker)[0])

    def _look_for_silence(self, now_s: float, *, late_s: float) -> None:
        """Give up agents that have not answered for too long. `late_s`, the delay of this thread itself, is not counted."""
        limit_s = self._spec.ray.silent_after_s + _ANSWERS_S
        with self._lock:
            everybody = list(self._hosted.values())
        for hosted in everybody:
            hosted.asked_s += late_s
            if hosted.pending is None or hosted.started is None or hosted.how or now_s - hosted.asked_s <= limit_s:
                continue
            hosted.pending = None
            self._note_end(hosted, f"is on a node ({hosted.started.address}) that gave no answer for {now_s - hosted.asked_s:.0f} s")
            self._cluster.end(hosted.agent)

    def _look_for_room(self, now_s: float) -> None:
        patience_s = self._spec.ray.patience_s
        has_begun = any(hosted.started is not None for hosted in self._hosted.values())
        if not has_begun and now_s - self._began_s > patience_s and not self._cluster.has_room():
            over = too_much(self._bundles, self._cluster.nodes())
            now = (
                "Others use it, or each node has too little: `ray status` shows who has what. Wait for longer with ray: {patience_s: ...}."
            )
            raise PlanError(
                f"the Ray cluster has had no room for the plan's workers for {patience_s:.0f} s" + (f": they need {over}" if over else ""),
                now="Start more nodes, or let the spec ask for less: fewer `cores`, fewer workers." if over else now,
            )

    def _note_end(self, hosted: _Hosted, how: str) -> None:
        with self._lock:
            hosted.how = hosted.how or how

    def _log(self, worker: str, rank: int, printed: bytes) -> None:
        with self.log_of(worker, rank).open("ab") as log:
            log.write(printed)
