"""Whether a run's record is sound: what must hold of its calls, samples, tokens and updates, check by check.

    ledger.db, segments/ --audit--> Audit: each check, and what breaks it

`m2flow doctor RUN` prints it; tests hold every kind of run to it. Reads only. A run may have ended well, have failed or have been
killed at any moment, or still go on: what had not been written yet is not missed, what was written must hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from m2flow.micro.record import audit_calls as calls
from m2flow.micro.record import audit_samples as samples
from m2flow.micro.record.account import TokenAccount, read_token_account
from m2flow.micro.record.endings import ENDINGS
from m2flow.micro.record.facts import read_facts

_SHOWN = 5
"""Breaches of a check that are printed; the others are counted."""


@dataclass(frozen=True)
class Checked:
    """One check of one run."""

    name: str
    num_looked_at: int
    """Calls, samples or updates; 0: there was nothing to look at."""
    breaches: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.breaches


@dataclass(frozen=True)
class Audit:
    """What was found."""

    run_dir: str
    checks: tuple[Checked, ...]
    endings: dict[str, int]
    """Samples by how they ended."""
    tokens: dict[str, int]
    """Generated tokens by what became of them."""

    @property
    def is_sound(self) -> bool:
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{'ok' if check.holds else 'BROKEN':6}  {check.name} ({check.num_looked_at:,} looked at)")
            lines += [f"        {breach}" for breach in check.breaches[:_SHOWN]]
            if len(check.breaches) > _SHOWN:
                lines.append(f"        and {len(check.breaches) - _SHOWN:,} more")
        lines.append("samples: " + (", ".join(f"{count:,} {ending}" for ending, count in self.endings.items()) or "none"))
        lines.append("generated tokens: " + (", ".join(f"{count:,} {what}" for what, count in self.tokens.items()) or "none"))
        return "\n".join(lines)


def audit(run_dir: Path) -> Audit:
    """Check a run.

    Raises:
        SpecError: the directory has no ledger, or one of another version of m2flow.
    """
    facts = read_facts(run_dir)
    back, tokens = samples.read_back(facts), read_token_account(run_dir)
    num_calls, num_samples, num_updates = len(facts.calls), len(facts.samples), len(facts.consumption)

    def checked(name: str, num_looked_at: int, breaches: Iterable[str]) -> Checked:
        return Checked(name, num_looked_at, tuple(breaches))

    checks = (
        checked("the calls are those that the program made", num_calls, calls.calls_are_those_of_the_program(facts)),
        checked("a call that is done comes after all that it needs", num_calls, calls.calls_end_after_what_they_need(facts)),
        checked("versions of weights come one after the other", num_calls, calls.versions_come_one_after_the_other(facts)),
        checked("an update trains on each sample once an epoch", num_updates, calls.each_sample_is_trained_on_once_an_epoch(facts)),
        checked("each sample is who it says it is", num_samples, samples.samples_are_who_they_say(facts)),
        checked("results have whole groups", len(facts.counted), samples.groups_are_whole(facts)),
        checked("each sample ends once, with a reason", num_samples, samples.samples_end_once(facts)),
        checked("each reward belongs to a sample", len(facts.rewards), samples.rewards_belong_to_samples(facts)),
        checked("the segments hold the tokens of every sample", num_samples, back.breaches),
        checked("every token that was generated is accounted for", tokens.generated, [] if tokens.is_balanced else [str(tokens)]),
        checked("every token is of weights within the bound", num_samples, samples.versions_are_within_the_bound(facts, back.versions)),
    )
    endings = Counter(ending for ending, _ in facts.endings.values())
    return Audit(str(run_dir), checks, {ending: endings[ending] for ending in ENDINGS if endings[ending]}, _told(tokens))


def _told(tokens: TokenAccount) -> dict[str, int]:
    """By what became of them: trained, for nothing by the ending of the sample, lost, or there to go on from."""
    found = {"trained": tokens.trained, **tokens.wasted, "lost": sum(tokens.lost.values()), "unfinished": tokens.unfinished}
    return {what: count for what, count in found.items() if count}
