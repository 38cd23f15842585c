"""Settings that a worker is started with: sent by its launcher as JSON, or made by `m2flow.testing.world`."""

from __future__ import annotations

import msgspec

from m2flow.channels.endpoints import Keys
from m2flow.engines.contract import EngineSettings
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.protocol.worker_state import tag_of
from m2flow.micro.worker.rank_group import RankGroupSettings
from m2flow.micro.worker.weight_sync import WeightSettings
from m2flow.recipe import Model


class WorkerSettings(msgspec.Struct, frozen=True):
    """All that a worker needs to start; it reads them as JSON from standard input."""

    name: str
    controller: str
    """The control link's address."""
    inbox: str
    """Where its inbox listens (`m2flow.channels.endpoints`)."""
    keys: Keys | None
    """The cluster's keys; None: its channels have none."""
    engines: tuple[EngineSlot, ...]
    models: dict[str, Model]
    device: str
    threads: int
    deterministic: bool
    run_seed: int
    run_dir: str
    shared_prefix: str
    rollout_options: dict[str, str | int | float | bool]
    train_options: dict[str, str | int | float | bool]
    function_concurrency: int
    function_patience_s: float
    max_running: int
    report_every: int
    """Decode steps between two reports of its engines' load; 0: no reports."""
    gather_s: float
    """Seconds that finished samples may wait for others, to leave together."""
    flush_tokens: int
    """Tokens after which a running sample is flushed to its segment file."""
    flush_s: float
    """Seconds after which all running samples are flushed."""
    heartbeat_s: float
    parent: int
    """Process id of the process that started it."""
    transports: dict[str, str] = {}
    """Peer -> the transport to it that the plan has chosen (`m2flow.micro.protocol.plan.Route.transport`)."""
    takes_pairs: bool = False
    """Whether some peer sends to it over torch.distributed."""
    shared_bytes: int = 0
    """Size of its arena (`m2flow.channels.shared_memory`)."""
    attempt: int = 0
    """Number of the attempt at the run. Each has segment files of its own, since a worker may outlive its controller for a moment."""
    restore: dict[str, str] = {}
    """Role -> part of a checkpoint that its trainer starts from."""
    weights: WeightSettings = WeightSettings()
    record_every: int = 1
    """Record one in so many of repeated events (`m2flow.spec.RunSettings.record_every`)."""
    incarnation: int = 0
    """How many processes of this worker were started before."""
    rank_group: RankGroupSettings = RankGroupSettings()
    """Which rank of a trainer with several ranks this process is."""
    takes_turns: bool = False
    """Whether its engines are co-located: they take turns on their devices with others, of this process or of others."""
    claim: str = ""
    """File that lists the run's resources on this host (`m2flow.micro.worker.host_resources`)."""

    @property
    def tag(self) -> str:
        """Name of this process among its peers."""
        return tag_of(self.name, self.incarnation)

    def engine_settings(self) -> dict[str, EngineSettings]:
        common = {"device": self.device, "threads": self.threads, "deterministic": self.deterministic, "max_running": self.max_running}
        return {
            "rollout": EngineSettings(**common, options=self.rollout_options, into_server=self.weights.into_server),  # type: ignore[arg-type]
            "train": EngineSettings(
                **common,  # type: ignore[arg-type]
                options=self.train_options,
                rank=self.rank_group.rank,
                num_ranks=self.rank_group.num_ranks,
                rendezvous=self.rank_group.rendezvous,
                parts=self.rank_group.parts,
            ),
            "function": EngineSettings(options={"concurrency": self.function_concurrency, "patience_s": self.function_patience_s}),
        }
