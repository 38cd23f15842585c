"""Every error says what, where and what now, and survives pickling and the wire."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from m2flow import errors
from m2flow.engines.contract import FunctionEngine
from m2flow.errors import EngineError, ErrorRecord, HostError, InternalError, M2FlowError, RewardError, error_from_record, unexpected
from m2flow.samples import make_ids

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, M2FlowError)]
PARTS = {"what": "it broke", "where": "flows/grpo.py:23  rewards = verifier.score(responses)", "now": "mend it", "remote": "Traceback\n  x"}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_and_the_wire(kind):
    error = kind(PARTS["what"], where=PARTS["where"], now=PARTS["now"], remote=PARTS["remote"])
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_record()), type=ErrorRecord)
    for other in (pickle.loads(pickle.dumps(error)), error_from_record(wire)):
        assert type(other) is kind
        assert {name: getattr(other, name) for name in PARTS} == PARTS
        assert str(other) == str(error)


def test_an_error_about_half_a_surrogate_pair_says_the_same_here_and_over_the_wire_and_fits_into_a_file():
    error = RewardError("what: \ud800", where="where: \ud801", now="now: \ud802", remote="remote: \udfff")
    assert str(error).encode() == str(error_from_record(error.to_record())).encode()
    assert (error.what, error.remote) == ("what: \\ud800", "remote: \\udfff")


def test_the_middle_of_a_text_without_bounds_is_left_out_of_an_error_and_of_its_record():
    error = RewardError("it said " + "x" * 3_000_000 + " at last", remote="Traceback:\n" + "\ud800" * 1_000_000 + "\nboom")
    assert re.fullmatch(r"it said x+ \[... 2,980,116 characters ...\] x+ at last", error.what)
    assert re.fullmatch(r"Traceback:\n\S+ \[... 5,980,116 characters ...\] \S+\nboom", error.remote)
    assert max(len(error.what), len(error.remote)) <= 20_000
    assert str(error_from_record(error.to_record())) == str(error) == str(pickle.loads(pickle.dumps(error)))


def test_an_error_prints_where_then_what_then_what_now():
    assert str(RewardError("the reward raised", where="flows/grpo.py:23  x = y", now="one\ntwo", remote="Traceback:\n  boom\n")) == (
        "flows/grpo.py:23  x = y\n  the reward raised\n  one\n  two\n  the worker's traceback:\n    Traceback:\n      boom"
    )
    assert str(RewardError("the reward raised")) == "the reward raised"


def test_a_place_is_added_once():
    error = RewardError("it raised", now="mend it").located("here:1")
    assert (type(error), error.where, error.now) == (RewardError, "here:1", "mend it")
    assert error.located("there:2") is error


def test_an_unknown_kind_becomes_an_internal_error_that_names_it():
    for kind in ("NewError", "ErrorRecord", "_rebuild", "annotations"):
        error = error_from_record(ErrorRecord(kind, "it broke", where="here"))
        assert type(error) is InternalError
        assert (error.what, error.where) == (f"{kind}: it broke", "here")


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.FlowLoadError, ValueError),
        (errors.OptionError, ValueError),
        (errors.TraceError, TypeError),
        (errors.DatasetError, ValueError),
        (errors.OpError, RuntimeError),
        (errors.PromptTooLong, ValueError),
        (errors.PortInUse, OSError),
        (errors.MissingExtra, ImportError),
        (errors.BrokenChannel, ConnectionError),
        (errors.EndOfStream, EOFError),
        (errors.RunInterrupted, KeyboardInterrupt),
        (errors.InternalError, AssertionError),
    ],
)
def test_an_error_is_also_what_a_caller_of_python_expects(kind, also):
    assert issubclass(kind, also)


@pytest.mark.slow  # It loads every library afresh.
def test_what_the_machine_refuses_has_words_of_its_own_whatever_library_says_it(tmp_path):
    script = Path(__file__).parents[1] / "support" / "refused.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(said) == 13, done.stderr
    assert [name for name, found in said.items() if not found.startswith("HostError: ") or found.endswith("| ")] == []
    assert "the file is larger than may be" in said["in_safetensors"]
    assert "the disk is full (" in said["in_a_database_that_is_full"]
    assert "ulimit -n" in said["too_many_files"]
    assert "Exception in thread" not in done.stderr


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "it is not permitted"),
        (errno.EMFILE, "too many files open"),
        (errno.ENOMEM, "no memory left"),
        (errno.ENOENT, "is missing"),
    ],
)
def test_an_error_of_the_operating_system_is_the_hosts_and_so_is_what_was_raised_from_it(number, what):
    refused = OSError(number, os.strerror(number), "/runs/a")
    outer = RuntimeError("saving failed")
    outer.__cause__ = refused
    for error in (refused, outer):
        found = errors.unexpected("policy.update", error)
        assert type(found) is errors.HostError
        assert what in found.what
        assert "/runs/a" in found.what
        assert found.now


@pytest.mark.parametrize(
    "error", [KeyError("No space left on device"), OSError(errno.EINVAL, "Invalid argument"), FileNotFoundError(2, "x"), OSError("a model")]
)
def test_what_may_be_a_fault_of_ours_stays_one(error):
    assert type(errors.unexpected("policy.update", error)) is InternalError


class Careless(FunctionEngine):
    """An engine of somebody else's, each of whose methods fails in a way of its own."""

    name = "careless"

    def start(self) -> None:
        int("what")

    def stop(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def call(self, function, batch, **how):
        return function(batch)


def _failure_of(action, *given) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        action(*given)
    return raised.value


def test_what_an_engine_of_another_package_raises_is_its_fault_and_names_it_with_method_and_line():
    error = unexpected("worker rollout-0", _failure_of(Careless().start))
    where = rf"in Careless\.start \({re.escape(__file__)}:\d+  int\(\"what\"\)\)"
    assert type(error) is EngineError
    assert re.fullmatch(rf"worker rollout-0: the engine 'careless' {where} raised ValueError\(.*\)", error.what)
    assert "m2flow.testing" in error.now
    assert "Traceback" in error.remote
    full = unexpected("worker rollout-0", _failure_of(Careless().stop))
    assert type(full) is HostError
    assert re.search(r"the engine 'careless' in Careless\.stop \(.*\): the disk is full", full.what)


def test_what_code_of_ours_raises_below_an_engine_of_another_package_stays_ours():
    assert type(unexpected("op", _failure_of(Careless().call, lambda rows: make_ids(rows, 1), "three"))) is InternalError
    assert type(unexpected("op", _failure_of(int, "what"))) is InternalError


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    parents = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│ ├└─]*)([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    for warning in ("UnusedResult", "LostState"):
        assert parents.pop(warning) == "Exception"  # Drawn beside the tree.
    assert parents == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}
