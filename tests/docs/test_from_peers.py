"""The tables for those who come from TRL, verl and OpenRLHF: no option of theirs is left out, and every name of ours exists."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import re
from pathlib import Path
from typing import get_args

import click
import pytest

import m2flow
from m2flow import rewards
from m2flow.cli.help import help_of
from m2flow.cli.main import cli
from m2flow.macro.loss_declarations import LOSSES
from m2flow.recipe import AdvantageName

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("trl", "verl", "openrlhf")

peers = pytest.mark.parametrize("peer", PEERS)


def _rows(peer: str, below: str = "") -> list[tuple[list[str], list[str]]]:
    """What stands in code in both columns of the page's tables; with `below`, of those below this text."""
    text = (ROOT / "docs" / "guide" / f"from-{peer}.md").read_text().partition(below or "\n")[2]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in rows]


def _known(peer: str) -> list[str]:
    """The options of the release that the page names, as tests/support/peer_options.py found them in the package."""
    return (ROOT / "tests" / "expected" / f"options-{peer}.txt").read_text().split()


@peers
def test_every_option_has_a_row_and_every_row_an_option(peer: str) -> None:
    patterns = [pattern.replace("arr.", "actor_rollout_ref.", 1) for theirs, _ in _rows(peer) for pattern in theirs]
    known = _known(peer)
    assert [name for name in known if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == []
    if peer != "trl":  # Its page has a second table, of the options that TRL inherits.
        heads = {peer, "arr", "train_ppo_ray"}
        assert [one for one in patterns if one not in heads and not fnmatch.filter(known, one)] == []


def test_every_option_that_trl_inherits_has_a_row_and_every_row_an_option() -> None:
    from transformers import TrainingArguments

    patterns = [pattern for theirs, _ in _rows("trl", below="| `TrainingArguments` |") for pattern in theirs]
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    has_row = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    inherited = set(known) - set(_known("trl"))  # Those that GRPOConfig declares anew have their rows in the first table.
    assert inherited - set(has_row) == set()
    assert [pattern for pattern in patterns if not fnmatch.filter(known, pattern)] == []


def _row_of(peer: str, option: str) -> str:
    """Our side of the first row that has an option of theirs: a pattern counts for what no row above it has."""
    for line in (ROOT / "docs" / "guide" / f"from-{peer}.md").read_text().splitlines():
        theirs, _, ours = line.strip("|").partition(" | ")
        patterns = [pattern.replace("arr.", "actor_rollout_ref.", 1) for pattern in re.findall(r"`([^`]+)`", theirs)]
        if line.startswith("| ") and any(fnmatch.fnmatchcase(option, pattern) for pattern in patterns):
            return ours
    raise AssertionError(option)


@peers
def test_an_option_that_is_named_after_a_loss_that_is_here_has_the_row_of_that_loss(peer: str) -> None:
    named = [(option, loss) for option in _known(peer) for loss in LOSSES if re.search(rf"(^|[._]){loss}([._]|$)", option)]
    assert [(option, loss) for option, loss in named if f"`{loss}(" not in _row_of(peer, option)] == []


@pytest.mark.parametrize(
    ("peer", "option", "what"),
    [
        ("openrlhf", "ds.load_in_4bit", "4 bits"),
        ("openrlhf", "ds.lora.dropout", "dropout"),
        ("openrlhf", "algo.kl.unbiased_gradient", "write the loss"),
        ("trl", "use_bias_correction_kl", "write the loss"),
        ("verl", "actor_rollout_ref.actor.fsdp_config.qat.enable", "quantised"),
        ("verl", "actor_rollout_ref.actor.policy_loss.dro_beta", "write the loss"),
        ("verl", "actor_rollout_ref.model.lora.adapter_path", "adapters"),
        ("verl", "actor_rollout_ref.model.lora.dropout", "dropout"),
        ("verl", "actor_rollout_ref.model.lora_adapter_path", "adapters"),
        ("verl", "critic.fsdp.qat.enable", "quantised"),
    ],
)
def test_what_no_engine_and_no_loss_has_is_said_not_to_be_there(peer: str, option: str, what: str) -> None:
    assert what in _row_of(peer, option).partition("not there: ")[2]


def test_each_way_of_verl_to_average_a_loss_is_named() -> None:
    ours = _row_of("verl", "actor_rollout_ref.actor.loss_agg_mode")
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    assert [mode for mode in modes if f"`{mode}`" not in ours] == []


@peers
def test_what_is_not_there_has_a_reason_and_nothing_that_is_there_is_denied(peer: str) -> None:
    text = (ROOT / "docs" / "guide" / f"from-{peer}.md").read_text()
    assert re.findall(r".*not there(?!: |, because ).*", text) == []


@peers
def test_every_name_of_ours_exists(peer: str) -> None:
    wrong = [name for _, ours in _rows(peer) for name in ours if not _is_ours(name)]
    assert wrong == []


_VALUES = {"grpo", "none", "batch", "group", "dapo", "bnpo", "dr_grpo", "luspo", "vespo", "sequence", "sum_then_normalize", "colocate"}
_VALUES |= {
    "server",
    "split",
    "time-shared",
    "added",
    "auto",
    "entropy",
    "entropy_coef",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "gae",
    "binary_kl",
    "tv",
}
_VALUES |= {"seq-mean-token-sum-norm", "rloo", "reinforce_plus_plus", "grpo_passk", "reinforce", "reinforce_baseline", "group_norm"}
_VALUES |= {"rewards - 0.05 * kl", "placement: auto", "m2flow help rewards"}
"""What stands in code on our side and is a value of an option, mostly of theirs."""


def _is_ours(name: str) -> bool:
    """Whether it is a name that `m2flow help` knows, with its options; a command with its options; or a value."""
    if name in _VALUES or name.strip('"') in (*get_args(AdvantageName), "sequences", "tokens"):
        return True
    if name.startswith("m2flow "):
        _, command, *words = name.split()
        found = cli.get_command(click.Context(cli), command)
        assert found is not None, name
        known = {option for param in found.params for option in param.opts}
        return all(word in known for word in words if word.startswith("-"))
    call = re.fullmatch(r"([\w.]+)\((.*)\)", name)
    help_of(call[1] if call else name)
    if call is None:
        return True
    value: object = getattr(m2flow, call[1].partition(".")[0], None) or getattr(rewards, call[1])
    for part in call[1].split(".")[1:]:
        value = getattr(value, part)
    known = set(inspect.signature(value).parameters)  # type: ignore[arg-type]
    given = re.findall(r"(\w+)=", call[2])
    return set(given) <= known and bool(given or not call[2] or known)
