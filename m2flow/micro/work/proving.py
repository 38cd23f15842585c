"""The proof of a weight sync: of a few sequences, trainer and rollout engine must say the same log-probabilities.

    samples of an update --trainer, after it--> Probe --with the weights--> `RolloutEngine.logprobs` --compared--> goes on, or stops the run

Checksums say that tensors came whole, under their names. They do not say that both engines compute the same function of them: that an
engine with names, fusions or a process of its own (a server) put each where it belongs. The first weights that an engine takes are proved,
or all of them, if the spec says so. Only sequences of token ids can be compared: an update on texts brings no probe, the next one may.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import final

import msgspec
import numpy as np

from m2flow.channels.weights.manifest import Probe
from m2flow.engines.agreement import agreement_of
from m2flow.engines.contract import RolloutEngine, TrainEngine
from m2flow.errors import EngineError
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanName
from m2flow.recipe import Model
from m2flow.samples import Batch, Ragged

NUM_SEQUENCES = 4
MAX_TOKENS = 64
"""Of each sequence. So a probe costs an update less than a micro-batch does."""
TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}
"""Mean absolute difference of a token's log-probability, in nats, by the coarsest type that weights or passes have. Between PyTorch's own
kernels it is a hundredth of that in float32 and a tenth in bfloat16; of a model whose layers are exchanged, a nat or more."""


class Checks(msgspec.Struct, frozen=True):
    """What is checked of weights and log-probabilities, as the cluster spec says."""

    probe: str = "first"
    """`first`, `always` or `never`."""
    tolerance: float | None = None
    """Of a probe; None: by type."""
    stop_above: float | None = None
    """A mean difference in an update above this one ends the run."""


@final
class Proving:
    """Of one process.

    Args:
        published: roles whose trained weights other processes load.
        compute_dtype: what a trainer here computes its passes in, if that is not its model's own type.
    """

    def __init__(
        self, models: Mapping[str, Model], checks: Checks, recorder: Recorder, *, published: frozenset[str], compute_dtype: str = ""
    ) -> None:
        self._models = models
        self._checks = checks
        self._recorder = recorder
        self._published = published
        self._compute_dtype = compute_dtype
        self._sequences: dict[str, Batch] = {}
        self._probes: dict[str, Probe] = {}
        self._proved: set[str] = set()

    def notice(self, role: str, rows: Batch, *, is_sampled_here: bool) -> None:
        """An update is made on these rows: what the weights after it are probed with, if they are."""
        is_wanted = role in self._published or (is_sampled_here and self._is_due(role))
        if self._checks.probe == "never" or not is_wanted or "tokens" not in rows or not len(rows):
            return
        part = rows.take(np.arange(min(NUM_SEQUENCES, len(rows))))
        tokens = [part.ragged("tokens").row(row)[:MAX_TOKENS] for row in range(len(part))]
        columns = {"tokens": Ragged.of(tokens, np.int32), "loss_mask": Ragged.of([np.arange(len(row)) > 0 for row in tokens], np.bool_)}
        self._sequences[role] = Batch(part.ids, columns)

    def updated(self, role: str, version: int, engine: TrainEngine) -> None:
        """The weights are of this version now, and on their device: have the trainer say what it makes of the sequences."""
        self._probes.pop(role, None)
        batch = self._sequences.pop(role, None)
        if batch is None:
            return
        with self._recorder.span(SpanName.TRAIN_PROBE, version=version, label=role, num_samples=len(batch)):
            said = engine.logprobs(batch).ragged("reference_logprobs")
        tokens = batch.ragged("tokens")
        sequences = [tokens.row(row).tolist() for row in range(len(batch))]
        logprobs = [said.row(row)[1:].tolist() for row in range(len(batch))]
        self._probes[role] = Probe(version, sequences, logprobs, self._tolerance(role))

    def probe(self, role: str, version: int) -> Probe | None:
        """What goes with the weights of this version."""
        found = self._probes.get(role)
        return found if found is not None and found.version == version else None

    def prove(self, role: str, probe: Probe | None, engine: RolloutEngine) -> None:
        """The rollout engine has taken weights.

        Raises:
            EngineError: it makes something else of the sequences than their trainer does; with the tokens.
        """
        if probe is None or not self._is_due(role) or not engine.capabilities.probes:
            return
        with self._recorder.span(SpanName.ROLLOUT_PROBE, version=probe.version, label=role, num_samples=len(probe.tokens)) as span:
            said = [row.tolist() for row in engine.logprobs(probe.tokens)]
            found = agreement_of(list(chain(*probe.logprobs)), list(chain(*said)))
            span.set(num_tokens=found.num_tokens, mean=round(found.mean, 9), largest=round(found.largest, 9))
        if not found.mean <= probe.tolerance:
            raise EngineError(
                f"trainer and rollout do not compute the same with the weights of {role}@{probe.version}: over {found.num_tokens} tokens "
                f"their log-probabilities differ by {found.mean:.3g} on average, {found.largest:.3g} at most; {probe.tolerance:g} is "
                f"allowed. {_worst(probe, said)}",
                now="The bytes came whole, by their checksums. Does the rollout engine have the model's architecture, layout and type? "
                "`weights: {probe_tolerance: ...}` in the cluster spec allows more, docs/internals/weights.md says what to look at.",
            )
        self._proved.add(role)

    def _is_due(self, role: str) -> bool:
        return self._checks.probe == "always" or (self._checks.probe == "first" and role not in self._proved)

    def _tolerance(self, role: str) -> float:
        if self._checks.tolerance is not None:
            return self._checks.tolerance
        model = self._models[role]
        types = (model.dtype, model.rollout_dtype or model.dtype, self._compute_dtype or model.dtype)
        return max(TOLERANCE.get(name, TOLERANCE["float32"]) for name in types)


def _worst(probe: Probe, said: list[list[float]]) -> str:
    """The tokens that differ most, in words."""
    gaps = [
        (abs(ours - theirs), row, position, ours, theirs)
        for row, pair in enumerate(zip(probe.logprobs, said, strict=True))
        for position, (ours, theirs) in enumerate(zip(*pair, strict=True), start=1)
    ]
    worst = sorted(gaps, key=lambda gap: (-gap[0], gap[1:3]))[:3]
    named = (
        f"token {probe.tokens[row][position]} at position {position} of sequence {row}: trainer {ours:.4f}, rollout {theirs:.4f}"
        for _, row, position, ours, theirs in worst
    )
    return "Most: " + "; ".join(named)
