"""The tutorial's programs run, eager and planned alike, and its outputs are the real ones.

A Python block that begins with the name of a file, as a comment, is that file; later blocks without a name go on in it. A `console`
block is commands and what they print, where `...` stands for anything. A file whose name begins with `wrong_` is there for its error.
"""

from __future__ import annotations

import doctest
import importlib
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from click.testing import CliRunner
from entry_points import write_entry_points
from fake_clusters import FAKES, SPLIT

from m2flow.cli.main import cli
from m2flow.engines import registry
from m2flow.macro.flow import Flow, load_flow
from m2flow.recipe import Loss, Model
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS
from m2flow.testing.world import run_eager, run_planned

ROOT = Path(__file__).resolve().parents[2]
PAGES = "".join((ROOT / "docs" / "guide" / f"{page}.md").read_text() for page in ("flows", "flows-algorithms", "flows-order", "recipes"))

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\w+\.py)\n")
_FLOW = re.compile(r"^@flow.*\ndef (\w+)", re.MULTILINE)

CLUSTERS = {
    "time-shared": FAKES,
    "split": SPLIT,
}


def _files() -> dict[str, str]:
    """The files of the tutorial, in its order."""
    found: dict[str, str] = {}
    last = ""
    for language, body in _FENCE.findall(PAGES):
        if language != "python":
            continue
        named = _NAME.match(body)
        if named:
            last = named[1]
            assert last not in found, f"{last} begins twice"
            found[last] = body
        else:
            found[last] += "\n\n" + body
    return found


def _sessions() -> Iterator[tuple[str, str]]:
    """Commands of the tutorial, each with what it prints."""
    for language, body in _FENCE.findall(PAGES):
        if language == "console":
            yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)


FILES = _files()
RIGHT = [f"{name}:{flow}" for name, text in FILES.items() if not name.startswith("wrong_") for flow in _FLOW.findall(text)]
ON_REAL_ENGINES = ["own_loss.py", "ppo_digits.py", "recipes.py:adapted"]
"""Flows that train a real model here too; the last one in place of fakes, which train no adapters."""
SESSIONS = list(_sessions())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's files where it says to put them: beside `flows`."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "flows").symlink_to(ROOT / "flows")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _small(flow: Flow) -> dict[str, object]:
    """Options for a short run."""
    return {parameter.name: 2 for parameter in flow.parameters if parameter.name == "num_steps"}


@pytest.mark.parametrize("target", [target for target in RIGHT if target != "recipes.py:adapted"])
def test_a_flow_of_the_tutorial_gives_the_same_planned_and_eager(target: str, folder: Path) -> None:
    flow = load_flow(target)
    options = _small(flow)
    eager = run_eager(flow, options, CLUSTERS["time-shared"])
    assert eager.error == ""
    assert eager.samples
    for order_seed, spec in enumerate(CLUSTERS.values()):
        planned = run_planned(flow, options, spec, order_seed=order_seed)
        if flow.staleness:  # Then time decides something, and eager repeats it.
            eager = run_eager(flow, options, spec, decisions=planned.decisions)
        assert planned == eager


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_command_of_the_tutorial_prints_what_the_tutorial_shows(command: str, output: str, folder: Path) -> None:
    tool, *words = shlex.split(command)
    assert tool == "m2flow"
    if words[0] == "run":  # In a process of its own, since it prepares that for its engines; here they are fakes, which load faster.
        (folder / "fakes.yaml").write_text("rollout: {engine: fake}\ntrain: {engine: fake}\n")
        words += ["--cluster", "fakes.yaml"]
        done = programs.run([sys.executable, "-m", "m2flow", *words])
        got = done.stdout + done.stderr
    else:
        got = CliRunner().invoke(cli, words, prog_name="m2flow", terminal_width=120).output
    got, wanted = ("\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n" for text in (got, output))
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    if not checker.check_output(wanted, got, flags):
        pytest.fail(checker.output_difference(doctest.Example("", wanted), got, flags), pytrace=False)


def test_every_wrong_flow_of_the_tutorial_is_shown_with_its_error() -> None:
    shown = {word for command, _ in SESSIONS for word in shlex.split(command)}
    assert {name for name in FILES if name.startswith("wrong_")} <= shown
    assert all(_FLOW.search(text) for name, text in FILES.items() if name != "loop_breaker.py")


EMBEDDED = ClusterSpec(placement="split", device="cpu", cores=2, train=TrainSpec(token_budget=200), functions=FunctionSpec(chunk=3))


@pytest.mark.parametrize("target", ON_REAL_ENGINES)
def test_flows_of_the_tutorial_train_a_real_model_and_give_the_same_bits(target: str, folder: Path) -> None:
    if target == "recipes.py:adapted":
        pytest.importorskip("peft")
    flow = load_flow(target)
    eager = run_eager(flow, {"num_steps": 1}, EMBEDDED, deterministic=True)
    assert eager.error == ""
    assert run_planned(flow, {"num_steps": 1}, EMBEDDED, deterministic=True) == eager


def test_the_loop_and_the_refill_of_the_tutorial_are_one_program(folder: Path) -> None:
    loop, refill = (
        run_eager(load_flow(name), {"num_steps": 2}, EMBEDDED, deterministic=True) for name in ("dapo.py:dapo_loop", "dapo.py:dapo")
    )
    assert loop.error == refill.error == ""
    said = [[tokens for _, (tokens, _) in sorted(answer.samples.items())] for answer in (loop, refill)]
    assert said[0] == said[1]
    assert len(said[0]) > 2 * 4 * 2, "no group was rejected, so nothing was tested"
    assert loop.logs == refill.logs
    assert loop.weights == refill.weights


def test_the_losses_of_the_tutorial_and_their_gradients_are_finite_at_extreme_inputs(folder: Path) -> None:
    losses = {found.name: found for name in FILES for found in vars_of(name).values() if isinstance(found, Loss)}
    assert losses
    for found in losses.values():
        assert callable(found.function)
        extremes = (0.0, 1e4, -1e4, 90.0, -90.0)
        needs = [need for need in found.needs if not need.startswith("sequence_")]
        columns = torch.tensor(list(itertools.product(extremes, repeat=len(needs)))).T
        inputs = {name: column.clone() for name, column in zip(needs, columns, strict=True)}
        num_tokens = columns.shape[1]
        shape = {"sequence_ids": torch.arange(num_tokens), "sequence_lengths": torch.ones(num_tokens)}
        inputs |= {name: shape[name] for name in found.needs if name in shape}
        trained = inputs["logprobs"].requires_grad_()
        terms, metrics = found.function(**inputs)
        (gradient,) = torch.autograd.grad(terms.sum(), trained)
        assert all(tensor.isfinite().all() for tensor in (terms, gradient, *metrics.values()))


def vars_of(name: str) -> dict[str, object]:
    first = _FLOW.search(FILES[name])
    return {} if name.startswith("wrong_") or first is None else load_flow(f"{name}:{first[1]}").function.__globals__


# ---- an engine


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the recipes' engine, registered by the entry point that they show."""
    (shown,) = (body for language, body in _FENCE.findall(PAGES) if language == "toml")
    write_entry_points(folder, "loops", tomllib.loads(shown)["project"]["entry-points"]["m2flow.engines"])
    monkeypatch.syspath_prepend(str(folder))
    registry._registered.cache_clear()
    yield importlib.import_module("loop_breaker")
    registry._registered.cache_clear()


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: str(check.__name__))
def test_the_engine_of_the_recipes_keeps_the_contract(check: Any, engine: Any) -> None:
    check(lambda settings: registry.make_rollout("loop-breaker", Model(str(ROOT / "flows" / "models" / "digits"), "random"), settings))


def test_the_engine_of_the_recipes_ends_loops_at_the_same_token_whatever_the_schedule(engine: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "PERIOD", 1)  # A digit four times in a row.
    flow = load_flow("recipes.py:by_sequence")
    spec = EMBEDDED.model_copy(update={"rollout": RolloutSpec(engine="loop-breaker")})
    eager = run_eager(flow, {"num_steps": 2}, spec, deterministic=True)
    assert eager.error == ""
    assert run_planned(flow, {"num_steps": 2}, spec, deterministic=True) == eager
    ended = [tokens for tokens, _ in eager.samples.values() if engine.is_loop(np.array(tokens)[-4:])]
    assert ended, "nothing was repeated, so nothing was tested"
