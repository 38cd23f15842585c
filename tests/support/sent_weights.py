"""Weights that the ranks of a trainer send from where they hold them, and what a rollout engine then has."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from safetensors.torch import load_file

from m2flow.channels.weights import Publisher, WeightOptions
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.model_export import export_model
from m2flow.micro.worker.weight_sync import Checks, LogprobCheck, WeightSettings, WeightSyncs
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model
from m2flow.samples import Batch
from m2flow.testing.mirrored import Mirrored
from m2flow.testing.train_suite import started

TRANSPORTS = ("shared memory", "tcp", "file", "broadcast")
"""Those that take what each rank holds, on a host without GPUs."""


def check_what_ranks_send_arrives_exactly(
    model: Model, engine: Mirrored, batch: Batch, train: Callable[[Mirrored, Batch], object], place: Path
) -> None:
    """Train a step and send the weights, over each transport in turn; the embedded rollout engine then has those of the trainer's export,
    bit by bit, and gives its log-probabilities. Nothing is gathered to be sent."""
    versions: list[dict[str, bytes]] = []
    rollout = EmbeddedRollout(model, EngineSettings())
    recorder = Recorder("rollout-0")
    check = LogprobCheck({"policy": model}, Checks("always"), recorder, published=frozenset({"policy"}))
    rollout.start()
    try:
        with started(engine):
            for version, transport in enumerate(TRANSPORTS, 1):
                check.notice("policy", batch, is_sampled_here=False)
                train(engine, batch)
                check.updated("policy", version, engine)
                loads = WeightSettings(loads={"policy": transport}, directory=str(place))
                prefix = f"m2flow-test-{secrets.token_hex(4)}"
                with (
                    closing(Publisher(prefix, WeightOptions((transport,), str(place), changes="never"))) as publisher,
                    closing(WeightSyncs("rollout-0", prefix, {"policy": model}, loads, recorder)) as theirs,
                ):
                    pieces = engine.spread(1 << 12)
                    assert pieces is not None
                    manifest = publisher.publish(iter(()), version, spread=pieces)
                    of_ranks = publisher.last.written
                    assert sum(of_ranks) == sum(entry.num_bytes for entry in manifest.tensors)
                    assert min(of_ranks) > 0.2 * max(of_ranks)
                    theirs.load("policy", version, manifest, rollout)
                probe = check.probe("policy", version)
                assert probe is not None
                check.check_probe("policy", probe, rollout)
                engine.save(str(place / f"{version}"))
                export_model(place / f"{version}", place / f"exported-{version}")
                exported = load_file(place / f"exported-{version}" / "model.safetensors")
                held = {name: tensor.detach().numpy().tobytes() for name, tensor in rollout.weights()}
                assert held == {name: tensor.numpy().tobytes() for name, tensor in exported.items()}, transport
                versions.append(held)
    finally:
        rollout.stop()
    for first, second in itertools.pairwise(versions):
        assert sum(first[name] != second[name] for name in first) > 0.9 * len(first), "each version is another"
