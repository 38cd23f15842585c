"""Check the calls of a flow against the capabilities of the engines that a plan gives them.

An engine that lacks what a call must have is an error; where a lack only makes an option useless, the plan gets a note that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType

from m2flow.engines.contract import Capabilities
from m2flow.engines.registry import capabilities_of, check_adapters, check_eight_bit, engines
from m2flow.errors import PlanError
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.oversampling import carries, keeps_cache
from m2flow.micro.protocol.plan import PREFILL, WorkerPlan
from m2flow.recipe import OPTIMIZERS, AdamW8bit, Episodes, Model, Sampling
from m2flow.rollout_scheduling.policies import Auto
from m2flow.rollout_scheduling.predictors import Learned, Siblings
from m2flow.samples import Batch
from m2flow.spec import RolloutSpec


def rollout_capabilities(engine: str, options: Mapping[str, object] = MappingProxyType({})) -> Capabilities | None:
    """Capabilities of a rollout engine; None if no engine of this name is registered.

    Args:
        options: the engine's own. Of what it can do they decide `keyed_seeds` alone; who asks for anything else needs none.
    """
    return capabilities_of(engine, "rollout", options)


def can_stay_resident(engine: str) -> bool:
    """Whether a rollout engine's weights may stay resident on devices while other engines work there; its KV cache never may."""
    can = rollout_capabilities(engine)
    return can is not None and can.rests


def can_shrink_kv_cache(engine: str) -> bool:
    """Whether a rollout engine can shrink its KV cache while samples run."""
    can = rollout_capabilities(engine)
    return can is not None and can.shrinks_kv_cache


def is_self_paced(engine: str) -> bool:
    """Whether a rollout engine decodes in processes of its own, and not while the worker steps it."""
    can = rollout_capabilities(engine)
    return can is not None and can.self_paced


def readable_offloaded(engine: str) -> bool:
    """Whether a trainer's weights can be read while it is offloaded."""
    can = capabilities_of(engine, "train", {})
    return can is not None and can.readable_offloaded


def sends_pieces(engine: str) -> bool:
    """Whether each rank of a trainer knows its pieces of the weights."""
    can = capabilities_of(engine, "train", {})
    return can is not None and can.weight_pieces


def keeps_caches(worker: WorkerPlan) -> frozenset[str]:
    """Roles whose rollout engine on this worker can load new weights under running requests, and so keeps their KV cache."""
    slots = [slot for slot in worker.engines if slot.kind == "rollout"]
    return frozenset(slot.role for slot in slots if (can := rollout_capabilities(slot.engine)) is not None and can.weights_under_requests)


def roles_syncing_adapters_only(models: Mapping[str, Model], workers: Iterable[WorkerPlan]) -> frozenset[str]:
    """Roles whose LoRA adapters can be synced without the base weights: each of their rollout engines applies adapters, in the trainer's
    dtype.
    """
    engines_of: dict[str, list[Capabilities | None]] = {}
    for worker in workers:
        for slot in worker.engines:
            if slot.kind == "rollout":
                engines_of.setdefault(slot.role, []).append(rollout_capabilities(slot.engine))
    return frozenset(
        role
        for role, all_can in engines_of.items()
        if role in models
        and models[role].lora is not None
        and models[role].rollout_dtype in (None, models[role].dtype)
        and all(can is not None and can.lora for can in all_can)
    )


def _takes_turns(worker: WorkerPlan, role: str) -> bool:
    """Whether a role is trained and sampled by turns on this worker."""
    return bool(worker.lease) and any(slot.kind == "train" and slot.role == role for slot in worker.engines)


def check_lora(models: Mapping[str, Model], workers: Iterable[WorkerPlan]) -> None:
    """Check that every role with adapters has a train engine that can train them.

    Raises:
        PlanError: a role's adapters can't be trained by its engine. MissingExtra: what adapters need is not installed.
    """
    for worker in workers:
        for slot in worker.engines:
            if slot.kind == "train" and slot.role in models and models[slot.role].lora is not None:
                if not ((trainer := capabilities_of(slot.engine, "train", {})) is not None and trainer.lora):
                    can = [info.name for info in engines() if info.kind == "train" and info.capabilities.lora]
                    raise PlanError(
                        f"{slot.role} has lora=..., and the train engine {slot.engine!r} can't train adapters",
                        now=f"Leave `lora=` out, or take one of {', '.join(can)} as `train: {{engine: ...}}` in the cluster spec.",
                    )
                check_adapters()


def check_sampling(graph: MacroGraph, workers: Iterable[WorkerPlan]) -> None:
    """Check that the rollout engines of each generation can honour its sampling parameters.

    Raises:
        PlanError: an engine can't.
    """
    engines_of = {(slot.role, slot.engine) for worker in workers for slot in worker.engines if slot.kind == "rollout"}
    for call in graph.calls:
        sampling = call.options.get("sampling")
        if not isinstance(sampling, Sampling):
            continue
        bounds = call.options.get("episodes")
        drawn = [sampling, *(own for _, own in bounds.drawn_by)] if isinstance(bounds, Episodes) else [sampling]
        given = {field.name for one in drawn for field in fields(one) if getattr(one, field.name) != field.default}
        for engine in sorted({engine for role, engine in engines_of if role in call.speakers}):
            can = rollout_capabilities(engine)
            refused = sorted(given.intersection(can.refused_sampling)) if can is not None else []
            if refused:
                able = [info.name for info in engines() if info.kind == "rollout" and given.isdisjoint(info.capabilities.refused_sampling)]
                raise PlanError(
                    f"{call.name} at {call.site} has {', '.join(refused)}, which the rollout engine {engine!r} can't honour",
                    now=f"Leave it out, or take one of {', '.join(able)} as `rollout: {{engine: ...}}` in the cluster spec.",
                )


def check_routing(models: Mapping[str, Model], workers: Iterable[WorkerPlan]) -> None:
    """Check that engines can record and replay the routing of each role that asks for it, and that trainers can balance it.

    Raises:
        PlanError: a rollout engine can't record it, or a trainer can't replay or balance it.
    """
    for slot in (slot for worker in workers for slot in worker.engines):
        if slot.kind == "train" and slot.role in models and models[slot.role].balance is not None:
            trainers = {info.name: info.capabilities.balances_experts for info in engines() if info.kind == "train"}
            if not trainers.get(slot.engine, True):
                able = [name for name, can in trainers.items() if can]
                raise PlanError(
                    f"{slot.role} has balance=, and the train engine {slot.engine!r} can't balance experts",
                    now=f"Leave it out, or take one of {', '.join(able)} as `train: {{engine: ...}}` in the cluster spec.",
                )
        routing = models[slot.role].routing if slot.role in models else None
        if routing is None or slot.kind not in ("rollout", "train") or (slot.kind, routing) == ("rollout", "trainer"):
            continue
        able = [info.name for info in engines() if info.kind == slot.kind and info.capabilities.routed_experts]
        if slot.engine not in able and any(info.kind == slot.kind and info.name == slot.engine for info in engines()):
            what = "record" if slot.kind == "rollout" else "replay"
            raise PlanError(
                f"{slot.role} has replay_routing={routing!r}, and the {slot.kind} engine {slot.engine!r} can't {what} routing",
                now=f"Leave it out, or take one of {', '.join(able)} as `{slot.kind}: {{engine: ...}}` in the cluster spec.",
            )


def check_sequences(graph: MacroGraph, workers: Iterable[WorkerPlan]) -> None:
    """Check that what is trained or computed on episodes with several sequences is done by engines that read each by itself.

    Raises:
        PlanError: an engine does not.
    """
    engines_of = {(slot.role, slot.engine) for worker in workers for slot in worker.engines if slot.kind == "train"}
    trainers = {info.name: info.capabilities for info in engines() if info.kind == "train"}
    made_by: dict[int, Call] = {}
    for call in graph.calls:
        origins = [made_by[ref.call] for _, ref in call.inputs if ref.call in made_by]
        bounds = call.options.get("episodes")
        if isinstance(bounds, Episodes) and bounds.has_sequences:
            made_by[call.ordinal] = call
        elif origins and call.engine != "rollout":
            made_by[call.ordinal] = origins[0]
        for engine in sorted(engine for role, engine in engines_of if role == call.role and call.engine == "train" and origins):
            if engine in trainers and not trainers[engine].sequences:
                able = [other for other, can in trainers.items() if can.sequences and not other.startswith("fake")]
                raise PlanError(
                    f"{call.name} at {call.site} is on episodes of several conversations, or with history='fork', made at "
                    f"{origins[0].site}, and the train engine {engine!r} reads a sample as one sequence",
                    now=f"Take one of {', '.join(able)} as `train: {{engine: ...}}` in the cluster spec.",
                )


def check_optimizers(graph: MacroGraph, workers: Iterable[WorkerPlan]) -> None:
    """Check that the train engine of each update has its optimiser.

    Raises:
        PlanError: an engine has not. MissingExtra: what it needs is not installed.
    """
    engines_of = {(slot.role, slot.engine) for worker in workers for slot in worker.engines if slot.kind == "train"}
    trainers = {info.name: info.capabilities for info in engines() if info.kind == "train"}
    if any(isinstance(call.options.get("optimizer"), AdamW8bit) for call in graph.calls):
        check_eight_bit()
    for call in graph.calls:
        name = type(call.options.get("optimizer")).__name__
        is_grouped = bool(getattr(call.options.get("optimizer"), "groups", ()))
        for engine in sorted(engine for role, engine in engines_of if role == call.role and name in OPTIMIZERS):
            if engine in trainers and is_grouped and not trainers[engine].weight_groups:
                able = [other for other, can in trainers.items() if can.weight_groups and not other.startswith("fake")]
                raise PlanError(
                    f"{call.name} at {call.site} has groups of weights, which the train engine {engine!r} has not",
                    now=f"Leave `groups=` out, or take one of {', '.join(able)} as `train: {{engine: ...}}` in the cluster spec.",
                )
            if engine in trainers and name not in trainers[engine].optimizers:
                able = [other for other, can in trainers.items() if name in can.optimizers and not other.startswith("fake")]
                raise PlanError(
                    f"{call.name} at {call.site} has the optimiser {name}, which the train engine {engine!r} has not",
                    now=f"Use AdamW, or take one of {', '.join(able)} as `train: {{engine: ...}}` in the cluster spec.",
                )


def notes_on_capabilities(graph: MacroGraph, workers: Iterable[WorkerPlan], options: Mapping[str, object]) -> tuple[str, ...]:
    """Notes for the plan: options of calls that have no effect with these engines, and what preemption costs with them.

    Args:
        options: of the rollout engines.
    """
    notes = []
    for call in {str(call.site): call for call in graph.calls if call.engine == "rollout"}.values():
        hosts = [worker for worker in workers if any(slot.kind == "rollout" and slot.role == call.role for slot in worker.engines)]
        keepers = [worker for worker in hosts if call.role in keeps_caches(worker) and not _takes_turns(worker, call.role)]
        if keeps_cache(call.options) and not keepers:
            notes.append(
                f"kv='keep' at {call.site} changes nothing here: the engines of {call.role} can't take weights under running samples, or "
                "generate and train by turns"
            )
        engines_of = {slot.engine for worker in hosts for slot in worker.engines if slot.kind == "rollout" and slot.role == call.role}
        unkeyed = sorted(name for name in engines_of if (can := rollout_capabilities(name, options)) is not None and not can.keyed_seeds)
        if carries(call.options) and unkeyed:
            notes.append(f"what is carried at {call.site} gets other random numbers: {', '.join(unkeyed)} does not key them by sample")
        if unkeyed and any(slot.lent_until for worker in hosts for slot in worker.engines):
            notes.append(
                f"what leaves lent devices at {call.site} gets other random numbers: {', '.join(unkeyed)} does not key them by sample; "
                "`lend: never` in the cluster spec keeps each where it began"
            )
    return tuple(notes)


def policies_of(rollout: RolloutSpec) -> tuple[str, ...]:
    """The scheduling policies; if none is named, the one that chooses by predicted gain where prompts say something of their lengths."""
    return rollout.policy or ((Auto.name,) if rollout.difficulty else ())


def difficulty_of(graph: MacroGraph, rollout: RolloutSpec) -> str:
    """The difficulty that the plan has: the spec's; empty for `prefill` where it has no effect, so that no prompt is embedded in vain."""
    return "" if rollout.difficulty == PREFILL and _why_not_embedded(graph, rollout) else rollout.difficulty


def notes_on_difficulty(graph: MacroGraph, rollout: RolloutSpec) -> tuple[str, ...]:
    """A note if the spec's difficulty of prompts has no effect, which says why; or if `prefill` hides a column of that name."""
    if not rollout.difficulty:
        return ()
    columns = {name: 0 for call in graph.calls if isinstance(rows := call.options.get("rows"), Batch) for name in rows.columns}
    notes = []
    if rollout.difficulty == PREFILL:
        why = _why_not_embedded(graph, rollout)
        if PREFILL in columns:
            notes.append(f"rollout.difficulty, {PREFILL!r}, is what the policy makes of prompts: their column of that name is not read")
    elif rollout.predictor not in (Siblings.name, Learned.name):
        why = f"the predictor {rollout.predictor!r} does not go by it"
    else:
        why = "" if rollout.difficulty in columns else f"no prompts have such a column; there are {', '.join(columns) or 'none'}"
    return (*([f"rollout.difficulty, {rollout.difficulty!r}, changes nothing here: {why}"] if why else []), *notes)


def _why_not_embedded(graph: MacroGraph, rollout: RolloutSpec) -> str:
    """Why no prompts are embedded for `difficulty: prefill`; empty if some are."""
    if rollout.predictor != Learned.name:
        return f"the predictor {rollout.predictor!r} does not go by it, {Learned.name!r} does"
    can = rollout_capabilities(rollout.engine)
    if can is None or not can.embeds:
        able = [info.name for info in engines() if info.kind == "rollout" and info.capabilities.embeds and not info.name.startswith("fake")]
        return f"the rollout engine {rollout.engine!r} computes no embeddings of prompts, {', '.join(able)} does"
    sources = {call.ordinal for call in graph.calls if call.engine == "source"}
    drawn = [call for call in graph.calls if call.engine == "rollout" and "agent" not in call.options]
    if not any(ref.call in sources for call in drawn if (ref := call.input("prompts")) is not None):
        return "no samples are generated from prompts of a dataset as they stand"
    return ""
