"""What each engine can do, as tables in Markdown: those of docs/guide/engines.md, written from what the planner goes by.

registry --capability_tables--> one table for rollout engines, one for trainers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from m2flow.engines.contract import Capabilities, ParallelLayouts
from m2flow.engines.registry import EngineInfo

_Row = tuple[str, Callable[[Capabilities], str]]


def _truth(name: str) -> Callable[[Capabilities], str]:
    return lambda can: "yes" if getattr(can, name) else "no"


def _degree(name: str) -> Callable[[Capabilities], str]:
    def words(can: Capabilities) -> str:
        most = getattr(can.parallel_layouts, name)
        return "any number" if most is None else "no" if most == 1 else f"up to {most}"

    return words


def _layout(words: Callable[[ParallelLayouts], str]) -> Callable[[Capabilities], str]:
    return lambda can: words(can.parallel_layouts)


_ROLLOUT: tuple[_Row, ...] = (
    ("samples leave one by one", _truth("streaming")),
    ("a sample can be taken out, with its tokens", _truth("abort")),
    ("goes on from tokens made elsewhere", _truth("resume_with_prefix")),
    ("random numbers by sample and position", _truth("keyed_seeds")),
    ("bitwise with `--deterministic`", _truth("deterministic")),
    ('new weights under running samples (`kv="keep"`)', _truth("weights_under_requests")),
    ("takes adapters alone (`lora=`)", _truth("lora")),
    ("weights proved by a probe", _truth("probes")),
    ("weights can stay on the device while others work there", _truth("rests")),
    ("cache that running samples do not need can be given back", _truth("condenses")),
    ("decodes in processes of its own", _truth("self_paced")),
    ("weights into its server (`into_server`)", lambda can: ", ".join(can.into_server) or "has none"),
    ("says which experts a token went to", _truth("routed_experts")),
    ("tensor parallel", _degree("tp")),
    ("pipeline parallel", _degree("pp")),
    ("expert parallel", _degree("ep")),
)
_TRAIN: tuple[_Row, ...] = (
    ("heads", lambda can: ", ".join(f"`{head}`" for head in can.heads)),
    ("adapters (`lora=`)", _truth("lora")),
    ("bitwise with `--deterministic`", _truth("deterministic")),
    ("weights can be copied while it is off its device", _truth("gives_away")),
    ("data parallel", _degree("dp")),
    ("ZeRO stages", _layout(lambda layouts: ", ".join(map(str, layouts.zero)))),
    ("optimiser in the host's memory, as the plan says", _layout(lambda layouts: "yes" if layouts.offload else "no")),
    ("layers recomputed, as the plan says", _layout(lambda layouts: "yes" if layouts.recomputes else "no")),
    ("tensor parallel", _degree("tp")),
    ("sequence parallel", _degree("sp")),
    ("pipeline parallel", _degree("pp")),
    ("expert parallel", _degree("ep")),
)


def capability_tables(infos: Sequence[EngineInfo]) -> str:
    """Of these engines, those for tests left out."""
    real = [info for info in infos if not info.factory.startswith("m2flow.testing.")]
    parts = []
    for kind, rows in (("rollout", _ROLLOUT), ("train", _TRAIN)):
        of_kind = [info for info in real if info.kind == kind]
        lines = [_line([kind, *(f"`{info.name}`" for info in of_kind)]), _line(["---"] * (len(of_kind) + 1))]
        lines += [_line([name, *(words(info.capabilities) for info in of_kind)]) for name, words in rows]
        lines.append(_line(["devices", *(", ".join(info.capabilities.devices) for info in of_kind)]))
        lines.append(_line(["of these untested", *(info.untested or "none" for info in of_kind)]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
