"""The cluster spec and the run settings: the machines and how a run uses them, never what the run computes (that is the flow's).

clusters/laptop.yaml --(m2flow.runs.cluster_file)--> ClusterSpec --(m2flow.micro.lowering.passes)--> Plan
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from m2flow.errors import did_you_mean

_MOST_PROCESSES = 4096
"""Processes of one kind, each planned for individually; and threads or cores of one host."""
_MOST_ROUTES = 2**16
"""Pairs of a rollout process and a function process."""
_MOST_DEVICES = 131_072
"""Devices of a pool. The largest clusters have some hundred thousand."""
_MOST_SAMPLES = 2**31 - 1
"""Samples, tokens, steps or times: counts of them are kept in 32 bits."""
_MOST_BYTES = 2**50
_MOST_GIB = 2.0**20
_MOST_GB_S = 1e6
_MOST_SECONDS = 1e9
_DETERMINISTIC_TOKENS = 2048
"""Most tokens of a micro-batch with `--deterministic`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, given: object, info: ValidationInfo) -> object:
        """Refuse booleans for numbers: YAML reads yes, no, on and off as booleans, which Python accepts as 1 and 0."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if kinds & {int, float} and bool not in kinds:
            for truth in _truths(given):
                raise PydanticCustomError("truth", "{given} is no number; YAML reads yes, no, on and off so", {"given": str(truth).lower()})
        return given


def _kinds(annotation: object) -> set[object]:
    """Return the types that a field's annotation is made of, those inside lists and mappings included."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))


def _truths(given: object) -> Iterator[bool]:
    """Yield the booleans in a value, and in the lists and mappings that it is made of."""
    if isinstance(given, bool):
        yield given
    elif isinstance(given, Mapping):
        for part in given.values():
            yield from _truths(part)
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _truths(part)


class RolloutSpec(_Strict):
    """How responses are generated."""

    engine: str = "embedded"
    """A rollout engine's name; `m2flow engines` lists them."""
    workers: int = Field(default=1, ge=1, le=_MOST_PROCESSES)
    """Instances, each a process with the whole model. Time-shared, there is one for each trainer: 1."""
    spare: int = Field(default=0, ge=0, le=_MOST_PROCESSES)
    """Further ones, which are not there when a run begins and may join while it goes on (`m2flow cluster scale`). Not with a placement that
    is searched for."""
    scale: Literal["asked", "auto"] = "asked"
    """Who decides whether spare ones join, and others leave: `m2flow cluster scale` alone, or also the run itself, by what it measures."""
    replan_s: float = Field(default=20.0, gt=0, le=_MOST_SECONDS)
    """With `scale: auto`: seconds of a window; three must say the same. A placement that was searched for is looked at every six."""
    threads: int | None = Field(default=None, ge=1, le=_MOST_PROCESSES)
    """CPU threads of an instance; by default its share of the machine."""
    max_running: int = Field(default=256, ge=1, le=_MOST_SAMPLES)
    """Most samples that an instance decodes in one batch."""
    chunk: int | None = Field(default=None, ge=1, le=_MOST_SAMPLES)
    """Most samples that an instance holds at once; by default `max_running`, and eight times as many episodes, so that it decodes some
    while others wait for tools."""
    policy: tuple[str, ...] = ()
    """Scheduling policies: which sample goes first, to which engine, and how many at once. Names of docs/guide/rollout-scheduling.md, or
    FILE.py:CLASS of your own. Several go together. By default first come, first served, whole groups side by side; with `difficulty`,
    `auto`."""
    predictor: str = "siblings"
    """How policies predict response lengths: `siblings`, `learned`, `earlier-steps` or `prompt-buckets`."""
    difficulty: str = ""
    """A column of the dataset that says how hard its prompts are: until a prompt's own answers are known, `siblings` predicts from the
    answers to others of the same value. `learned` also takes a number, or a list of numbers such as an embedding of the prompt. `prefill`
    is no column: `learned` gets what the policy makes of each prompt, its last hidden state at the end, reduced to 32 numbers, which the
    rollout engine (`embedded` can) computes for all prompts before the first sample begins."""
    options: dict[str, str | int | float | bool] = {}
    """Options of the engine itself."""

    @field_validator("policy", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _as_several(cls, given: object) -> object:
        """Accept a single name in place of a list."""
        return (given,) if isinstance(given, str) else given


class TrainSpec(_Strict):
    """How weights are trained."""

    engine: str = "embedded"
    """A train engine's name; `m2flow engines` lists them."""
    ranks: int | None = Field(default=None, ge=1, le=_MOST_PROCESSES)
    """Processes (ranks) that train one model together, each on a GPU or with threads of its own: `embedded` has a replica on each, other
    engines shard the model. By default 1; on CPU cores, `placement: auto` looks for the number of replicas."""
    threads: int | None = Field(default=None, ge=1, le=_MOST_PROCESSES)
    """CPU threads of a rank; by default its share of the machine."""
    token_budget: int = Field(default=8192, ge=1, le=_MOST_SAMPLES)
    """Tokens up to which a micro-batch is filled."""
    parts: int = Field(default=1, ge=1, le=_MOST_SAMPLES)
    """Passes that a micro-batch goes through a model of several ranks in, at most one for each of its samples. A run whose ranks are out of
    memory goes on with twice as many."""
    options: dict[str, str | int | float | bool] = {}
    """Options of the engine itself."""


class FunctionSpec(_Strict):
    """Where rewards and ops run."""

    workers: Annotated[int, Field(ge=1, le=_MOST_PROCESSES)] | Literal["auto"] = 1
    """Processes. `auto`: as many as the search of `placement: auto` (or of pools) predicts to be fastest, at most one for each core."""
    roles: dict[str, Annotated[int, Field(ge=1, le=_MOST_PROCESSES)] | Literal["auto"]] = {}
    """Processes of its own for a role, a reward or an op, by its name: `{actor: 1, simulator: 4}`; all others share `workers`. A task of
    theirs has at most half of a process's share of the rows, so that some are stepped while others are inferred. `auto`: searched. In a
    flow without models `workers: auto` alone also tries processes of their own for all roles."""
    chunk: int = Field(default=64, ge=1, le=_MOST_SAMPLES)
    """Most samples in one task."""
    concurrency: int = Field(default=1, ge=1, le=_MOST_PROCESSES)
    """Samples that a process works on concurrently; for functions that wait (for a service, say) rather than compute."""
    patience_s: float = Field(default=1.0, gt=0, le=_MOST_SECONDS)
    """Seconds after which a sample that is still being judged (a straggler) no longer keeps others from being judged concurrently."""
    latency_s: dict[str, float | tuple[float, ...]] = {}
    """What a plan without a profile takes a call to last, by its name (`reward.score`), for one unit: a number, or several at evenly
    spaced probabilities from 0 to 1, the shortest first and the longest last."""

    @property
    def num_workers(self) -> int:
        """Processes that all share, as far as no search has chosen their number."""
        return 1 if self.workers == "auto" else self.workers

    @property
    def num_own(self) -> dict[str, int]:
        """Processes by the role whose own they are, as far as no search has chosen their number."""
        return {role: 1 if num == "auto" else num for role, num in self.roles.items()}

    @property
    def is_searched(self) -> bool:
        """Whether a search chooses some number of processes."""
        return "auto" in (self.workers, *self.roles.values())

    def num_for(self, call: str) -> int:
        """Processes that run a call, by its name."""
        return self.num_own.get(base_of(call), self.num_workers)


def base_of(call: str) -> str:
    """The role, reward or op of a call on functions, by its name.

    >>> base_of("actor.act@13#2")
    'actor'
    """
    return call.partition("@")[0].partition(".")[0]


class ChannelSpec(_Strict):
    """How workers talk on one host."""

    transport: Literal["ipc", "tcp", "distributed"] | None = None
    """Unix sockets in a private directory, with large columns in shared memory; TCP; or Unix sockets, with large columns over
    torch.distributed: Gloo, or NCCL between workers that have a GPU each. By default `ipc` on one host, `tcp` on several."""
    host: str = "127.0.0.1"
    """With `tcp`: the IPv4 address of this host that sockets listen at. Any but loopback needs `keys`."""
    port: int | None = Field(default=None, ge=1024, le=65535)
    """The controller's port with `tcp`; by default one that is free."""
    keys: str = ""
    """With `tcp`: the file of the cluster's key (`m2flow keys FILE`). All that passes is then encrypted, and only its holders are heard."""
    max_samples: int | None = Field(default=None, ge=1, le=_MOST_SAMPLES)
    """Backpressure: most samples of one call's name in flight to one worker, begun but not taken there; by default as many as the steps
    that may run at once have. A group counts whole, and one may be over."""
    max_bytes: int = Field(default=2**36, ge=1, le=_MOST_BYTES)
    """The same in bytes, each sample at its longest. What must be there at once and does not fit goes to segment files (see the plan)."""
    shared_bytes: int = Field(default=2**30, ge=0, le=_MOST_BYTES)
    """With `ipc`: shared memory that each worker may take to lend large columns to others. 0: they go through the sockets. Where it is
    full, they do too, and are counted."""


WeightTransport = Literal["shared memory", "cuda ipc", "broadcast", "tcp", "file"]
"""The ways of weights between processes: the names of `m2flow.channels.weights.TRANSPORTS`, which says what each can do."""


class WeightsSpec(_Strict):
    """How new weights reach the engines that sample."""

    transport: Literal["auto", WeightTransport] = "auto"
    """Between processes; inside one it is a copy. `auto`: what the plan finds cheapest on one host, and between hosts `tcp`, m2flow's own
    connections, encrypted with the cluster's key. `broadcast` is faster and neither encrypted nor authenticated; `file` goes over storage;
    `cuda ipc` lends them on the trainer's GPU. These three only where they are asked for."""
    directory: str = ""
    """Where `file` writes: a directory that all workers reach; by default in the run's directory."""
    host: str = "127.0.0.1"
    """IPv4 address that trainers listen at, for `broadcast` and `tcp`; on Ray, each node's own."""
    changes: Literal["auto", "never", "always"] = "auto"
    """Send only values that changed, over `broadcast`, `tcp` and `file`: where it is measured to take less time, never, or always."""
    adapters: Literal["alone", "added"] = "alone"
    """What is sent of a policy with `lora=`: the adapters alone, to rollout engines of other processes that can add them (not by
    `cuda ipc`); or whole weights, with them added, which saves those engines the host's memory for a copy of the adapted layers."""
    bucket_mib: int = Field(default=16, ge=1, le=1024)
    """Size of each of the two buffers that either side has, for `broadcast`, `tcp` and `file`."""
    into_server: Literal["auto", "files", "tensors", "group"] = "auto"
    """From a worker into the server that it samples with (SGLang): `files` in memory, which the server reads; `tensors` in shared memory or
    on the GPU, which it maps; a `group` of processes, by Gloo or NCCL. `auto`: files on this host, a group elsewhere."""
    probe: Literal["first", "always", "never"] = "first"
    """Which weights a rollout engine verifies, by comparing the log-probabilities of a few sequences with the trainer's."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Mean absolute difference of a token allowed in a probe, in nats; by default 0.001 in float32, 0.03 in float16, 0.15 in bfloat16."""
    warn_above: float | None = Field(default=0.1, gt=0)
    """A warning where an update's tokens, sampled with the very weights that it begins with, have log-probabilities of trainer and rollout
    that differ by more than this on average, in nats (`rollout_diff/mean` of the metrics). None: no warning."""
    stop_above: float | None = Field(default=None, gt=0)
    """The same, and the run ends before the weights are changed."""
    alarms: dict[str, Annotated[str, Field(pattern=r"^[<>] *-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?$")]] = {
        "rollout_kl": "> 0.1",
        "effective_sample_share": "< 0.3",
    }
    """Metric of an update -> bound beyond which it gives a warning, once: `{rollout_kl: "> 0.05", "rollout_kl/age_2": "> 0.2"}`. Those of
    the default are of updates with a `Correction`."""


class RaySpec(_Strict):
    """With `launcher: ray`: the cluster, and what goes to its nodes."""

    address: str = "auto"
    """`HOST:PORT` of its head, `ray://HOST:10001` from outside of it, or `auto`: the one that this machine is a node of, or that
    `RAY_ADDRESS` names."""
    resources: dict[str, str] = {}
    """Workers of a kind (`rollout`, `train`, `functions`) or of a pool -> a resource that only the nodes meant for them have, like
    `accelerator_type:H100`, or a name given to `ray start --resources`."""
    working_dir: str = ""
    """Copied to every node, for what the flow imports; by default the directory of the flow's file. At most 500 MiB."""
    env: dict[str, str] = {}
    """Environment variables of the workers."""
    autoscales: bool = False
    """Nodes may be added: a plan that does not fit those of now waits for them."""
    patience_s: float = Field(default=60.0, gt=0, le=_MOST_SECONDS)
    """Seconds to wait for room in the cluster, and for what its nodes say of themselves (`m2flow cluster check`)."""
    silent_after_s: float = Field(default=5.0, gt=0, le=_MOST_SECONDS)
    """Seconds without an answer after which a node counts as lost, with the workers on it."""


class StorageSpec(_Strict):
    """Where a run's record outlives the controller's host."""

    directory: str = ""
    """One that all hosts see, at the same path; each run gets a directory there. Samples and checkpoints are written there by those who
    make them, the ledger is copied there. By default all of it is in the run's directory alone."""
    every_s: float = Field(default=5.0, gt=0, le=_MOST_SECONDS)
    """Seconds from one copy of the ledger to the next; before a checkpoint is complete it is copied in any case."""


class PoolSpec(_Strict):
    """Devices of one kind."""

    device: str
    """A name of the device list, like `h100`; `m2flow engines` says where it is and how to add one."""
    nodes: int = Field(default=1, ge=1, le=_MOST_DEVICES)
    """Hosts."""
    devices_per_node: int = Field(default=8, ge=1, le=_MOST_DEVICES)
    """Devices of one host; an engine whose parallel layout needs fast links stays within it."""
    memory_gib: float | None = Field(default=None, gt=0, le=_MOST_GIB)
    """Memory of each device; by default what the device list says."""
    host_memory_gib: float | None = Field(default=None, gt=0, le=_MOST_GIB)
    """Host memory of each node, for what engines offload; by default what the device list says."""
    host_link_gb_s: float | None = Field(default=None, gt=0, le=_MOST_GB_S)
    """Between each device and its node's memory (PCIe), in each direction, 10^9 bytes a second; by default what the device list says."""
    link_gb_s: float | None = Field(default=None, gt=0, le=_MOST_GB_S)
    """Between the devices of a node (NVLink, or PCIe without it), in each direction, 10^9 bytes a second; by default the device list's."""
    network_gb_s: float | None = Field(default=None, gt=0, le=_MOST_GB_S)
    """Bandwidth of a node to the others, in each direction, 10^9 bytes a second; by default what the device list says."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


class LayoutSpec(_Strict):
    """The parts of a parallel layout that are fixed; the planner chooses the rest."""

    tp: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """Tensor parallel: devices that share each layer."""
    pp: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """Pipeline parallel: stages of layers."""
    sp: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """Sequence parallel: devices that share each sequence."""
    dp: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """Data parallel: replicas, each with its own samples."""
    ep: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """Expert parallel: devices that share the experts of a layer."""
    zero: Literal[0, 1, 2, 3] | None = None
    """Stage of ZeRO: what data-parallel trainers share out (1 the optimiser, 2 gradients too, 3 weights too)."""
    micro_batches: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """With stages, parts in which a micro-batch passes through them."""
    vpp: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """With stages, chunks of layers that each has, in turns (interleaved 1F1B)."""
    schedule: Literal["1f1b", "zero-bubble"] | None = None
    """With stages, the order in which they compute; `zero-bubble` puts gradients of weights off to where a stage would wait."""


class PinSpec(_Strict):
    """The parts of one engine's placement that are fixed; the planner chooses the rest."""

    pool: str | None = None
    """One of `pools`."""
    devices: tuple[int, int] | None = None
    """The first device of the pool and the one after the last: [0, 8] are the first eight."""
    num_devices: int | None = Field(default=None, ge=1, le=_MOST_DEVICES)
    """How many it has; which ones is open. Without a search: of a role that speaks in others' episodes, processes of its own."""
    layout: LayoutSpec = LayoutSpec()
    """Its parallel layout."""
    offload: bool | None = None
    """Whether its optimiser state is offloaded to the host's memory."""
    recompute: bool | None = None
    """Whether it keeps only the input of each layer, and computes the rest again in the backward pass."""

    @field_validator("devices")
    @classmethod
    def _has_devices(cls, given: tuple[int, int] | None) -> tuple[int, int] | None:
        if given is not None and not 0 <= given[0] < given[1] <= _MOST_DEVICES:
            what = f"[{given[0]}, {given[1]}] are no devices; give the first, from 0, and the one after the last"
            raise PydanticCustomError("devices", "{what}", {"what": what})
        return given

    @field_validator("num_devices")
    @classmethod
    def _has_as_many_as_devices(cls, given: int | None, info: ValidationInfo) -> int | None:
        devices = info.data.get("devices")
        if given is not None and devices is not None and given != devices[1] - devices[0]:
            what = f"{given} are not as many as `devices` are, which says {devices[1] - devices[0]}; leave one of the two out"
            raise PydanticCustomError("num_devices", "{what}", {"what": what})
        return given


class Places(dict[tuple[str, ...], str]):
    """Field -> its position in a file, FILE:LINE:COLUMN. Not part of a spec's meaning, so all instances compare equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    __hash__ = None


class ClusterSpec(_Strict):
    """The machines, and what runs on them."""

    name: str = "cluster"
    """Shown with plans and runs."""
    launcher: Literal["local", "ray"] = "local"
    """What starts the workers. `local`: child processes of the controller. `ray`: a Ray cluster; they talk to each other by TCP."""
    ray: RaySpec = RaySpec()
    """Which cluster `launcher: ray` uses, and what goes to it."""
    device: str = "auto"
    """`cpu`, `cuda:0`, or `auto`: the first GPU if there is one."""
    cores: int | None = Field(default=None, ge=1, le=_MOST_PROCESSES)
    """CPU cores to share out; by default those that this process may use."""
    placement: Literal["time-shared", "split", "auto"] = "time-shared"
    """Rollout and training take turns on the same device, or each has its own. `auto`: what the search predicts to be fastest."""
    pools: dict[str, PoolSpec] = {}
    """The devices to plan for and to simulate, by kind. Empty: this machine, as `device` and `cores` say."""
    devices: str | None = None
    """A device list of yours, for pools of what m2flow's own does not have; from where this file is. See m2flow/planner/pools.py."""
    costs: str | None = None
    """Times of yours, by engine and layout, that the planner uses instead of its model's: a file of `m2flow profile`, or YAML of the same
    form; from where this file is. See m2flow/planner/profiles.py."""
    shapes: dict[str, str] = {}
    """A model to plan for instead of the flow's own, by role: a name like `Qwen2.5-7B`, or a directory with a config.json."""
    pin: dict[str, PinSpec] = {}
    """What is fixed for an engine, by role and kind: `policy.rollout`, `policy.train`, or for both: `policy`; or for all engines of a kind:
    `rollout`, `train`. The narrower one counts, field by field."""
    may_offload: bool = True
    """Whether time-shared engines may offload their state to the host's memory; otherwise all of it must fit on the device at once."""
    lend: Literal["auto", "never"] = "auto"
    """In a searched placement: whether rollout borrows a trainer's devices until training is due; `auto`: where that saves 2%."""
    rollout: RolloutSpec = RolloutSpec()
    """How responses are generated."""
    train: TrainSpec = TrainSpec()
    """How weights are trained."""
    functions: FunctionSpec = FunctionSpec()
    """Where rewards and ops run."""
    channels: ChannelSpec = ChannelSpec()
    """How workers talk."""
    weights: WeightsSpec = WeightsSpec()
    """How new weights reach the engines that sample."""
    storage: StorageSpec = StorageSpec()
    """Where a run's record outlives the controller's host."""
    run_ahead_bytes: int = Field(default=2**30, ge=1, le=_MOST_BYTES)
    """Memory for samples of the steps in flight, each counted at its longest. Only a flow with staleness has several such steps."""
    _places: Places = PrivateAttr(default_factory=Places)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ClusterSpec:
        """Check that no field contradicts another one that was given."""
        if self.launcher == "ray":
            if self.channels.transport not in (None, "tcp"):
                what = f"'{self.channels.transport}' is for one host, and the launcher is 'ray'; leave it out"
                _contradiction(("channels", "transport"), what)
            if self.weights.transport == "shared memory":
                _contradiction(
                    ("weights", "transport"),
                    "'shared memory' is for one host, and the launcher is 'ray'; give 'tcp', 'broadcast' or 'file'",
                )
            known = ["rollout", "train", "functions", *self.pools]
            for name in self.ray.resources:
                if name not in known:
                    _contradiction(("ray", "resources", name), f"no kind of worker and no pool; {_guess(name, known)}")
        elif self.ray != RaySpec():
            _contradiction(("ray",), "the launcher is 'local'; say `launcher: ray`, or leave this out")
        elif self.transport == "ipc":
            for field in ("host", "port"):
                if getattr(self.channels, field) != ChannelSpec.model_fields[field].default:
                    _contradiction(("channels", field), "it is of 'tcp', and the transport is 'ipc'; say `transport: tcp`, or leave it out")
        if self.rollout.spare and (self.pools or self.placement == "auto"):
            _contradiction(
                ("rollout", "spare"), "nobody can join where the placement is searched for; say `placement: split`, without pools"
            )
        if self.rollout.scale == "auto" and not self.rollout.spare:
            _contradiction(("rollout", "scale"), "nobody is spare, so nobody can join; say `spare: 2`, or leave it out")
        if self.functions.is_searched and not (self.pools or self.placement == "auto"):
            _contradiction(("functions", "workers"), "a search chooses their number; say `placement: auto` too, or give a number")
        num_functions = self.functions.num_workers + sum(self.functions.num_own.values())
        num_rollouts = self.rollout.workers + self.rollout.spare
        if num_rollouts * num_functions > _MOST_ROUTES:
            what = f"{num_functions} with {num_rollouts} rollout workers make more than {_MOST_ROUTES:,} channels, one for each pair"
            _contradiction(("functions", "workers"), what)
        for name, pool in self.pools.items():
            if pool.num_devices > _MOST_DEVICES:
                what = f"{pool.nodes} x {pool.devices_per_node} devices are more than {_MOST_DEVICES:,}"
                _contradiction(("pools", name, "nodes"), what)
        for name, pin in self.pin.items():
            largest = max((pool.num_devices for one, pool in self.pools.items() if pin.pool in (None, one)), default=None)
            last = pin.devices[1] if pin.devices else pin.num_devices
            if largest is not None and last is not None and last > largest:
                field = "devices" if pin.devices else "num_devices"
                _contradiction(("pin", name, field), f"{last} devices are more than there are in {pin.pool or 'any pool'}: {largest}")
            if pin.pool is not None and pin.pool not in self.pools:
                _contradiction(("pin", name, "pool"), f"there is no pool {pin.pool!r}; {_guess(pin.pool, list(self.pools))}")
        return self

    def placed(self, places: dict[tuple[str, ...], str]) -> ClusterSpec:
        """Return the same spec with the file positions of its fields."""
        found = self.model_copy()
        found._places = Places(places)
        return found

    def where(self, *field: str) -> str:
        """The file position of a field; empty if it is not known."""
        return self._places.get(field, "")

    def pin_of(self, role: str, kind: str) -> PinSpec:
        """The pin of an engine: `policy.rollout` before `policy` before `rollout`, field by field."""
        layout, fixed = dict[str, object](), dict[str, object]()
        for pin in (self.pin[name] for name in (kind, role, f"{role}.{kind}") if name in self.pin):
            layout |= pin.layout.model_dump(exclude_none=True)
            fixed |= {name: value for name, value in pin.model_dump(exclude={"layout"}).items() if value is not None}
        return PinSpec.model_validate({**fixed, "layout": layout})

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on one host. Otherwise it is not known before a run which workers share a host."""
        return self.launcher == "local" and sum(pool.nodes for pool in self.pools.values()) <= 1

    @property
    def transport(self) -> Literal["ipc", "tcp", "distributed"]:
        """The transport of channels: TCP on several hosts, whatever `channels` says for one host."""
        return self.channels.transport or "ipc" if self.is_one_host else "tcp"

    def with_policy(self, names: str) -> ClusterSpec:
        """Return the spec with these rollout policies (names joined by plus signs), or unchanged if none are named."""
        policies = tuple(name.strip() for name in names.split("+") if name.strip())
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"policy": policies})}) if policies else self

    def with_equal_micro_batches(self) -> ClusterSpec:
        """This spec with micro-batches of at most 2,048 tokens, for `--deterministic`: the bits of a gradient depend on which samples it
        was added up from together, and specs differ in how many these are.
        """
        tokens = min(self.train.token_budget, _DETERMINISTIC_TOKENS)
        return self.model_copy(update={"train": self.train.model_copy(update={"token_budget": tokens})})

    @property
    def without_spare(self) -> ClusterSpec:
        """Return the spec without spare workers."""
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"spare": 0})}) if self.rollout.spare else self

    @property
    def planned_pools(self) -> dict[str, PoolSpec]:
        """What the planner places on: `pools`, or this machine as a pool named "". On a CPU its cores are the devices, and an engine on
        k of them has k threads, which its layout counts as `tp=k`; a GPU is one device."""
        if self.pools:
            return self.pools
        is_cpu = self.device == "cpu" or (self.device == "auto" and not os.path.exists("/dev/nvidia0"))
        return {"": PoolSpec(device="cpu", devices_per_node=self.num_cores) if is_cpu else PoolSpec(device="gpu", devices_per_node=1)}

    @property
    def num_cores(self) -> int:
        return self.cores or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else self.cores or os.cpu_count() or 1


def _contradiction(field: tuple[str, ...], what: str) -> NoReturn:
    raise PydanticCustomError("contradiction", "{what}", {"what": what, "at": field})


def _guess(name: str, known: list[str]) -> str:
    said = did_you_mean(name, known, f"There are {', '.join(known) or 'none'}")
    return said[0].lower() + said[1:]


class RunSettings(_Strict):
    """How one run is made."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides every random number of the run."""
    eager: bool = False
    """Run the flow call by call in this process: the reference that plans are compared with."""
    deterministic: bool = False
    """Results are a function of identity, bit by bit, on a CPU; at a cost in speed. Micro-batches have at most 2,048 tokens."""
    runs_dir: str = "runs"
    """Where run directories go."""
    checkpoint_steps: int | None = Field(default=None, ge=1, le=_MOST_SAMPLES)
    """Steps from one checkpoint to the next; by default it goes by time alone."""
    checkpoint_s: float | None = Field(default=600.0, ge=0, le=_MOST_SECONDS)
    """Seconds from one checkpoint to the next, at the ends of steps; None: it goes by steps alone, or there are none but the final one."""
    checkpoint_behind: bool = False
    """Write checkpoints while training goes on: a step is held up only while the trainer copies weights and moments into its host's memory
    (one copy, until it is written; with `spread_checkpoints` each rank its part), and not while files are written. The one where a run is
    stopped, and eager runs', are written at once, as are those of `deepspeed`, which can't copy. What can't be written is named in a
    warning, and the next step ends with another try."""
    checkpoints_kept: int = Field(default=2, ge=1, le=_MOST_SAMPLES)
    """The newest ones stay."""
    attempts: int = Field(default=3, ge=1, le=_MOST_SAMPLES)
    """Times that a run whose trainer died is resumed without making progress, before it ends."""
    retry_wait_s: float = Field(default=1.0, ge=0, le=_MOST_SECONDS)
    """Seconds before the first of these; twice as many before each further one."""
    heartbeat_s: float = Field(default=0.5, gt=0, le=_MOST_SECONDS)
    """Seconds between a worker's heartbeats."""
    flush_tokens: int = Field(default=512, ge=1, le=_MOST_SAMPLES)
    """Tokens that a running sample gets at most before it is written down again: a worker's death loses no more of it."""
    flush_s: float = Field(default=10.0, gt=0, le=_MOST_SECONDS)
    """Seconds after which it is written down, if it has not got so many."""
    hung_after_s: float = Field(default=60.0, gt=0, le=_MOST_SECONDS)
    """Seconds without a heartbeat, or without a turn of its main loop and without using the processor, after which a worker counts as hung.
    It is killed, and started again. A user's function may take as long as it takes: its own time limit counts."""
    stopped_after_s: float = Field(default=10.0, gt=0, le=_MOST_SECONDS)
    """The same for a worker without heartbeats whose host reports that a signal (SIGSTOP) has stopped it: no load makes it look so."""
    turn_limit_s: float | None = Field(default=None, gt=0, le=_MOST_SECONDS)
    """Seconds that an engine may be at one thing (a micro-batch, a decode step), even if it uses the processor. By default any time."""
    fork_workers: bool = True
    """Start workers on this machine as forks of a process that has loaded torch and transformers, which later runs of a program or notebook
    use too. False: each is an interpreter of its own and loads them itself, as it is with GPUs, with Ray, and where Linux (5.3 or newer) is
    not the system."""
    restarts: int = Field(default=5, ge=0, le=_MOST_SAMPLES)
    """Times in a row that a worker is started again, when it dies within a minute each time, before it is gone for good."""
    restart_wait_s: float = Field(default=0.5, ge=0, le=_MOST_SECONDS)
    """Seconds before the first of these; twice as many before each further one, up to 30."""
    sample_attempts: int = Field(default=3, ge=1, le=_MOST_SAMPLES)
    """Workers that may die while they have a sample, before that is taken for its fault, and the run ends."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=_MOST_SECONDS)
    """Seconds that a worker may take to come up, a server of its own and a library that compiles itself included."""
    record_every: int = Field(default=1, ge=1, le=_MOST_SAMPLES)
    """How much of what repeats itself is recorded. 1: everything. N: N decode steps as one span, and one group in N sample by sample."""
    otlp: str = ""
    """URL of an OpenTelemetry collector, `http://HOST:4318`, for spans and metrics. Empty: OTEL_EXPORTER_OTLP_ENDPOINT's, if set."""
    metrics_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    """Where metrics go besides the run's directory. By default to TensorBoard's files, and to Weights & Biases and MLflow if they are
    installed and the environment configures them (WANDB_PROJECT, WANDB_API_KEY or WANDB_MODE; MLFLOW_TRACKING_URI). Trackers also get
    samples and pictures of the schedule; TensorBoard if it is named here."""
    drain_s: float = Field(default=5.0, ge=0, le=_MOST_SECONDS)
    """Seconds at the end of a run for what collectors and trackers have not taken yet."""

    @model_validator(mode="after")
    def _waits_for_beats(self) -> RunSettings:
        """Check that no worker counts as hung between two of its heartbeats."""
        for name in ("hung_after_s", "stopped_after_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                _contradiction((name,), f"{getattr(self, name):g} is less than two beats of heartbeat_s, {self.heartbeat_s:g}")
        return self


LAPTOP = ClusterSpec(name="laptop")
"""What runs when no spec is given: `clusters/laptop.yaml` says the same."""
