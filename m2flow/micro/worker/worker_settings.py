"""What a worker is told when it is started: by its launcher, as JSON, and by `m2flow.testing.world`."""

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
    """All that a worker must know to start; it reads them as JSON from its standard input."""

    name: str
    controller: str
    """The control link's address."""
    inbox: str
    """A place (`m2flow.channels.endpoints`)."""
    keys: Keys | None
    """Of the cluster, if its channels have some."""
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
    """Turns of decoding after which it says how full its engines are; 0: never."""
    gather_s: float
    """Seconds that finished samples may wait for others, to leave together."""
    flush_tokens: int
    """Tokens after which a running sample is written down."""
    flush_s: float
    """Seconds after which all running samples are."""
    heartbeat_s: float
    parent: int
    """Process id of who started it."""
    transports: dict[str, str] = {}
    """Peer -> the way to it that the plan has chosen (`m2flow.micro.protocol.plan.Route.transport`)."""
    takes_pairs: bool = False
    """Some send to it over torch.distributed."""
    shared_bytes: int = 0
    """Of its arena (`m2flow.channels.shared_memory`)."""
    attempt: int = 0
    """At the run: another one writes segments of its own, since a worker may outlive its controller for a moment."""
    restore: dict[str, str] = {}
    """Role -> the part of a checkpoint that its trainer begins with."""
    weights: WeightSettings = WeightSettings()
    record_every: int = 1
    """Of what repeats itself (`m2flow.spec.RunSettings.record_every`)."""
    incarnation: int = 0
    """How many processes this worker was before."""
    gang: RankGroupSettings = RankGroupSettings()
    """Of a trainer with several ranks: which of them this process is."""
    takes_turns: bool = False
    """Its engines share their devices with others, of this process or of others."""
    claim: str = ""
    """The file that says what the run has on this host (`m2flow.micro.worker.host_resources`)."""

    @property
    def tag(self) -> str:
        """What this process goes by among the others."""
        return tag_of(self.name, self.incarnation)

    def engine_settings(self) -> dict[str, EngineSettings]:
        common = {"device": self.device, "threads": self.threads, "deterministic": self.deterministic, "max_running": self.max_running}
        return {
            "rollout": EngineSettings(**common, options=self.rollout_options, into_server=self.weights.into_server),  # type: ignore[arg-type]
            "train": EngineSettings(
                **common,  # type: ignore[arg-type]
                options=self.train_options,
                rank=self.gang.rank,
                num_ranks=self.gang.num_ranks,
                rendezvous=self.gang.rendezvous,
                parts=self.gang.parts,
            ),
            "function": EngineSettings(options={"concurrency": self.function_concurrency, "patience_s": self.function_patience_s}),
        }
