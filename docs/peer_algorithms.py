"""Which algorithms other systems have: the data of the table in `docs/reference/algorithms.md`, a row for each function of the registry.

`write_reference.py` writes the table; `tests/docs/test_reference.py` checks that every function has a row and that what we lack is in no
three of the systems.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS = {
    "TRL": "f2cd577, 2026-07",
    "verl": "1dda039, 2026-08",
    "OpenRLHF": "3c3be62, 2026-08; preferences and reward models: releases up to 0.8",
    "ROLL": "8eb27cc, 2026-08",
    "slime": "624b824, 2026-08",
    "AReaL": "4aef98d, 2026-05",
}
"""System -> the commit whose source was read."""

_ALL = "TRL verl OpenRLHF ROLL slime AReaL"
_HAVE = {
    "grpo": _ALL,
    "grpo_population": "",
    "dr_grpo": "TRL verl OpenRLHF slime AReaL",
    "rloo": "TRL verl OpenRLHF AReaL",
    "maxrl": "",
    "opo": "verl",
    "pass_at_k": "verl",
    "gigpo": "ROLL",
    "remax": "verl",
    "reinforce_pp": "verl OpenRLHF slime AReaL",
    "reinforce_pp_baseline": "verl OpenRLHF slime",
    "gpg": "verl",
    "gae": _ALL,
    "length_adaptive_lam": "",
    "vtrace": "",
    "overlong_penalty": "TRL verl AReaL",
    "length_reward": "",
    "adaptive_kl_coef": "verl OpenRLHF ROLL",
    "adaptive_entropy_coef": "",
    "Moments": "AReaL",
    "ppo_clip": _ALL,
    "reinforce": "ROLL",
    "nll": _ALL,
    "distill": _ALL,
    "distill_top_k": "TRL verl",
    "clipped_value": _ALL,
    "gspo": _ALL,
    "gspo_token": "",
    "gmpo": "verl",
    "cispo": "TRL verl ROLL slime",
    "importance_reinforce": "",
    "sapo": "TRL verl AReaL",
    "topr": "ROLL",
    "dppo": "verl",
    "decoupled_ppo": "AReaL",
    "opmd": "ROLL",
    "clip_cov": "verl",
    "kl_cov": "verl",
    "dpo": "TRL OpenRLHF ROLL AReaL",
    "ipo": "TRL OpenRLHF",
    "simpo": "TRL",
    "kto": "TRL OpenRLHF",
    "bradley_terry": "TRL OpenRLHF AReaL",
    "process_reward": "TRL OpenRLHF",
    "kl_estimate": _ALL,
    "top_k_divergence": "TRL verl ROLL",
    "correction_weights": _ALL,
    "informative": "verl OpenRLHF ROLL slime AReaL",
    "pass_rate_between": "verl OpenRLHF",
}
HAVE: Mapping[str, frozenset[str]] = {name: frozenset(systems.split()) for name, systems in _HAVE.items()}
"""Function -> the systems that have the same algorithm, under whatever name."""

LACKING: Mapping[str, frozenset[str]] = {
    name: frozenset(systems.split())
    for name, systems in {
        "GDPO": "verl",
        "OTB (optimal token baseline)": "verl",
        "DRO": "verl",
        "LitePPO": "ROLL AReaL",
        "RAFT++": "ROLL",
        "M2PO": "AReaL",
        "OPSM (masks whole responses by their divergence and sign)": "slime",
        "LUSPO, VESPO, BNPO": "TRL",
    }.items()
}
"""What has no function of its own here -> the systems that have it."""


def table(functions: Mapping[str, str]) -> list[str]:
    """The table as lines of Markdown; `functions` maps each name to its link."""
    lines = [f"| ours | {' | '.join(VERSIONS)} |", f"|---|{'---|' * len(VERSIONS)}"]
    for name, link in functions.items():
        lines.append(f"| {link} | {' | '.join('yes' if one in HAVE[name] else '' for one in VERSIONS)} |")
    for name, systems in LACKING.items():
        lines.append(f"| none: {name} | {' | '.join('yes' if one in systems else '' for one in VERSIONS)} |")
    return lines
