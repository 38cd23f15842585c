"""Every error that m2flow raises on purpose, in a hierarchy by whose fault it is.

    M2FlowError
    ├── FlowError                the flow is at fault
    │   ├── FlowLoadError        no such file, a syntax error, no flow in it, or two
    │   ├── OptionError          an option that the flow does not have, or a value it can't take
    │   ├── TraceError           a call or a handle used in a way that can't be recorded
    │   │   └── FieldError       a column that the samples do not have
    │   ├── RowError             a row position out of range
    │   ├── DatasetError         a dataset without rows, or with rows of different shape
    │   ├── DivergenceError      a replay, or a step under --pin-plan, that makes other calls than it should
    │   ├── OpError              the user's function raised, or returned what it may not
    │   │   └── RewardError      the user's reward raised, or returned what it may not
    │   └── PromptTooLong        a prompt (and its answer) that the model's context can't hold
    ├── SpecError                the cluster spec or the run settings are at fault
    │   └── PortInUse            an address that the spec asks for is in use by another process
    ├── PlanError                no legal plan, or one that was edited into an illegal one
    │   └── DoesNotFit           the models do not fit the cluster, or not under the pins of its spec
    ├── ModelError               a model path that is missing or broken
    ├── EngineError              an engine can't start, or failed at work
    │   ├── MissingExtra         a package that is not installed, and how to get it
    │   ├── MissingTier          a machine that can't give the tier of a sandbox, and what it lacks
    │   ├── RecordLost           a file of the run's samples is damaged or missing
    │   ├── NoReward             an episode in an environment has ended, and no step of it had a reward
    │   ├── HostError            the machine refuses: a full or failing disk, no permission, no memory, files or threads left
    │   └── OutOfMemory          an engine's device or host memory is used up, and by what
    │       └── MicroBatchTooLarge  on one of several ranks: the run resumes from its last checkpoint with smaller micro-batches
    ├── ShapeError               a tensor handed to an algorithm with the wrong shape
    ├── ChannelError             a channel failed
    │   ├── ChannelClosed        this side closed it and used it afterwards
    │   ├── BrokenChannel        the peer went away
    │   ├── EndOfStream          the peer ended it in order
    │   └── DecodeError          bytes that are not a message
    ├── WorkerError              a process that died, hangs or never came up
    │   └── StateLost            a worker died with state that no other has (trained weights): the run resumes from its last checkpoint
    ├── RunInterrupted           the user pressed Ctrl-C
    └── InternalError            m2flow itself is at fault: please report

    UnusedResult                 a warning: a line of the flow whose result nothing uses
    LostState                    a warning: a function stores state in its copy of what it captures

An error says what happened, where, and what to do now. It survives pickling and the wire (`to_record`, `from_record`).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import linecache
import os
import re
import sqlite3
import sys
import traceback
from collections.abc import Iterable, Iterator

import msgspec


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error as it is sent between processes: the name of its class, and its four parts."""

    kind: str
    what: str
    where: str = ""
    now: str = ""
    remote: str = ""


class M2FlowError(Exception):
    """Base of all errors: `what` happened, `where` in the flow or the files, what to do `now`, and the `remote` traceback, if any."""

    row: int = -1
    """The packed identity of the first sample that the error is about, in the process that raised it; -1: none in particular."""

    def __init__(self, what: str, *, where: str = "", now: str = "", remote: str = "") -> None:
        self.what, self.where, self.now, self.remote = (_shown(text) for text in (what, where, now, remote))
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.where] if self.where else []
        lines += [self.what if not lines else f"  {self.what}"]
        if self.now:
            lines += [f"  {line}" for line in self.now.splitlines()]
        if self.remote:
            lines += ["  the worker's traceback:"] + [f"    {line}" for line in self.remote.rstrip().splitlines()]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self).__name__, self.what, self.where, self.now, self.remote))

    def located(self, where: str) -> M2FlowError:
        """Return the same error with a place, if it has none yet."""
        return self if self.where else _rebuild(type(self).__name__, self.what, where, self.now, self.remote).about(self.row)

    def about(self, row: int) -> M2FlowError:
        """Set the sample that this error is about. Returns the error."""
        self.row = row
        return self

    def to_record(self) -> ErrorRecord:
        return ErrorRecord(type(self).__name__, self.what, self.where, self.now, self.remote)


class FlowError(M2FlowError):
    """The flow asks for something that can't be done."""


class FlowLoadError(FlowError, ValueError):
    """The file of the flow can't be used."""


class OptionError(FlowError, ValueError):
    """An option of the flow that does not exist, or a value that it can't take."""


class TraceError(FlowError, TypeError):
    """A call or handle used in a way that can't be recorded."""


class FieldError(TraceError, AttributeError):
    """A column that the samples do not have."""


class RowError(FlowError, IndexError):
    """A row position is out of range."""


class DatasetError(FlowError, ValueError):
    """A dataset without rows, or with rows that do not fit together."""


class DivergenceError(FlowError, RuntimeError):
    """A flow makes other calls than its record, or than the plan that it is pinned to, has."""


class OpError(FlowError, RuntimeError):
    """A user's function raised, hung, or returned what it may not."""


class RewardError(OpError):
    """A reward raised, hung, or returned what is not a finite number for each sample."""


class PromptTooLong(FlowError, ValueError):
    """The prompt and its answer do not fit the model's context."""


class SpecError(M2FlowError, ValueError):
    """The cluster spec or the run settings are wrong."""


class PortInUse(SpecError, OSError):
    """An address that the spec asks for is in use by another process."""


class PlanError(M2FlowError, ValueError):
    """There is no legal plan, or the one given is not legal."""


class DoesNotFit(PlanError):
    """The models do not fit the cluster, or not under the spec's pins."""


class ModelError(M2FlowError, ValueError):
    """A model path that is missing or broken."""


class EngineError(M2FlowError, RuntimeError):
    """An engine can't start, or failed at work."""


class MissingExtra(EngineError, ImportError):
    """A package is needed that is not installed."""


class MissingTier(EngineError):
    """This machine can't give a tier of `Sandbox`, to no program."""


class RecordLost(EngineError):
    """A file of the run's samples is damaged or missing: what needs them can't be resumed."""


class NoReward(EngineError):
    """An episode in an environment has ended, and no step of it had a reward."""


class HostError(EngineError):
    """The machine refuses: a disk is full, fails or can't be written, a file is missing, memory, files or threads are used up."""


class ShapeError(M2FlowError, ValueError):
    """A tensor has the wrong shape."""


class ChannelError(M2FlowError, RuntimeError):
    """A channel can't carry what it was given."""


class ChannelClosed(ChannelError):
    """This side closed the channel and used it afterwards."""


class BrokenChannel(ChannelError, ConnectionError):
    """The peer closed the connection or died before the end of the stream."""


class EndOfStream(ChannelError, EOFError):
    """The peer ended the stream in order."""


class DecodeError(ChannelError, ValueError):
    """Received bytes are not a valid message."""


class WorkerError(M2FlowError, RuntimeError):
    """A worker process died, hangs, or never came up."""


class StateLost(WorkerError):
    """A worker died with state that no other has; the run can only be resumed from its last checkpoint."""


class RunInterrupted(M2FlowError, KeyboardInterrupt):
    """The user asked the run to stop."""


class UnusedResult(UserWarning):
    """A line of the flow whose result nothing uses. A warning, not an error."""


class LostState(UserWarning):
    """A user's function changes what it captures; the change is lost when the call is over. A warning, not an error."""


class InternalError(M2FlowError, AssertionError):
    """A fault of m2flow's own; please report it with the run directory."""


class OutOfMemory(EngineError):
    """An engine is out of memory."""


class MicroBatchTooLarge(OutOfMemory):
    """One of several ranks is out of memory for its part of a micro-batch of more than one sample."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: Python's, torch's on a GPU, or torch's on a CPU."""
    return (
        isinstance(error, MemoryError | OutOfMemory)
        or type(error).__name__ == "OutOfMemoryError"
        or (type(error) is RuntimeError and "can't allocate memory" in str(error))
    )


_FREE_SPACE = "Free some space, or give another place with --runs-dir, then go on."
_REFUSALS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EFBIG: ("the file is larger than may be", "Look at `ulimit -f`, and free some space, or give another place with --runs-dir."),
    errno.EROFS: (
        "the file system is read-only",
        "Mount it writable; an error of the disk may have made it so: `dmesg` says.",
    ),
    errno.EIO: ("the disk is full, or fails", "Free some space; if there is some, look at `dmesg` for errors of the disk."),
    errno.ENXIO: ("the device is gone", "Look at `dmesg` for errors of the disk."),
    errno.ENODEV: ("the device is gone", "Look at `dmesg` for errors of the disk."),
    errno.ESTALE: ("the file system was lost", "Is the network storage there? Mount it again, then go on."),
    errno.ENOTCONN: ("the file system was lost", "Is the network storage there? Mount it again, then go on."),
    errno.EACCES: ("it is not permitted", "Give this user the right to it (`ls -ld` shows who has it), or another place."),
    errno.EPERM: ("it is not permitted", "Give this user the right to it (`ls -ld` shows who has it), or another place."),
    errno.EMFILE: ("this process has too many files open", "Raise the limit: ulimit -n 65536."),
    errno.ENFILE: ("this host has too many files open", "Close what else runs here, or raise the limit: sysctl fs.file-max."),
    errno.ENOMEM: ("this host has no memory left", "Close what else runs here, or have fewer or smaller workers."),
    errno.EAGAIN: ("this host starts no more processes or threads", "Close what else runs here, or raise the limit: ulimit -u."),
    errno.ENOENT: (
        "a file or directory is missing, or can't be opened",
        "Was it removed while in use? `ls -ld` shows who may open it.",
    ),
    errno.ENOTDIR: ("a directory is missing", "Something else has its name: move that away."),
    errno.ENAMETOOLONG: ("its name is too long", "Give a place with a shorter path."),
    errno.ETXTBSY: ("it is in use", "Wait for who uses it."),
    errno.EBUSY: ("it is in use, or locked", "Wait for who uses it, or end that process."),
}
"""Error number -> what it means, what to do now. Others, such as those of sockets, need not be the host's fault."""
_NAMELESS = {errno.EAGAIN, errno.ENOENT, errno.ENOTDIR, errno.EBUSY}
"""Numbers that may also come from a fault of m2flow: they count as the host's only with a file name, or in a library's words."""
_SQLITE = {5: errno.EBUSY, 6: errno.EBUSY, 7: errno.ENOMEM, 8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC, 14: errno.ENOENT}
"""SQLite's result codes: BUSY, LOCKED, NOMEM, READONLY, IOERR, FULL, CANTOPEN (sqlite.org/rescode.html)."""
_IN_WORDS = [
    *((re.escape(os.strerror(number)), number) for number in _REFUSALS if number not in _NAMELESS),
    (r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos", errno.EIO),  # Torch's archive could not be written on.
    (r"\d+ requested and \d+ written", errno.EIO),  # NumPy.
    (r"Parent directory .* does not exist", errno.ENOENT),
    (r"can't start new thread", errno.EAGAIN),
]
"""Regular expression -> error number, for messages of libraries that drop the number."""


def host_error(doing: str, error: BaseException) -> HostError | None:
    """Recognise what the machine refused, whichever library reports it; None if the error is something else.

    Python's own errors, SQLite's, those of libraries in Rust ("os error 28": safetensors, tokenizers) and in C++ (torch) are told apart
    from faults of a program's by number or words. The errors that one was raised from count too.

    Args:
        doing: what could not be done, as the error begins: "the checkpoint runs/a/checkpoints can't be written".
    """
    seen: BaseException | None = error
    while seen is not None:
        number = _refusal(seen)
        if number is not None:
            what, now = _REFUSALS[number]
            said = (str(seen).strip().splitlines() or [""])[0][:300]
            return HostError(f"{doing}: {what} ({type(seen).__name__}: {said})", now=now)
        seen = seen.__cause__
    return None


def _refusal(error: BaseException) -> int | None:
    """The operating system's error number, if the error is the host's."""
    if isinstance(error, M2FlowError):
        return None
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get(sqlite_code(error))
    if isinstance(error, OSError) and error.errno is not None:
        is_told = error.errno in _REFUSALS and (error.errno not in _NAMELESS or error.filename is not None)
        return error.errno if is_told else None
    if isinstance(error, KeyError | IndexError | TypeError | AttributeError | AssertionError):
        return None
    said = str(error)
    found = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", said)
    number = int(found[1] or found[2]) if found else None
    if number is None:
        number = next((number for words, number in _IN_WORDS if re.search(words, said)), None)
    return number if number in _REFUSALS else None


@contextlib.contextmanager
def naming_host_errors(doing: str) -> Iterator[None]:
    """Turn what the machine refuses while reading or writing into a `HostError` that says what could not be done.

    Raises:
        HostError: that. Anything else as it is.
    """
    try:
        yield
    except Exception as error:
        found = host_error(doing, error)
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def naming_engine_errors(doing: str) -> Iterator[None]:
    """Turn what an engine of another package raises into what `unexpected` makes of it. Anything else stays as it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, M2FlowError) or not engine_that_raised(error):
            raise
        raise unexpected(doing, error) from error


def unexpected(call: str, error: Exception) -> M2FlowError:
    """Wrap an error that no code raises on purpose: by whose it is, the machine's, that of an engine of another package, or m2flow's."""
    engine = engine_that_raised(error)
    call = f"{call}: the engine {engine}" if engine else call
    if is_out_of_memory(error):
        return OutOfMemory(f"{call}: out of memory", now="Lower train.token_budget or rollout.max_running in the cluster spec.")
    refused = host_error(call, error)
    if refused is not None:
        return refused
    remote = "".join(traceback.format_exception(error))
    if engine:
        now = "Mend it there. The suites of `m2flow.testing` check an engine against its contract (docs/guide/writing-engines.md)."
        return EngineError(f"{call} raised {error!r}", now=now, remote=remote)
    return InternalError(f"{call}: {error!r}", remote=remote)


def sqlite_code(error: BaseException) -> int:
    """The primary result code of an error of SQLite's (`sqlite3.SQLITE_FULL` and others); 0: it has none."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def is_compiled(filename: str) -> bool:
    """Whether a frame's file is the source of a compiled library, by the name that it had where that was built: it isn't here."""
    if filename.startswith("<") or os.path.exists(filename):
        return False
    package = sys.modules.get(filename.partition("/")[0])  # As `zmq/backend/cython/_zmq.py`; a relative name alone may be the user's.
    return filename.endswith((".pyx", ".pxd", ".pxi")) or f"-packages{os.sep}" in (getattr(package, "__file__", None) or "")


_CONTRACT = "m2flow.engines.contract"


def engine_that_raised(error: BaseException) -> str:
    """Name the engine of another package from which an error came, its method, and the line there; "" if it came from none, or m2flow's
    code raised it where the engine had called that."""
    found, line = None, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        engine = frame.f_locals.get("self")
        if package == "m2flow":
            found = None
        elif found is None and any(base.__module__ == _CONTRACT for base in type(engine).__mro__):
            found = engine, frame.f_code.co_name, package
        if found is not None and package == found[2]:
            line = f"{frame.f_code.co_filename}:{number}  {linecache.getline(frame.f_code.co_filename, number).strip()}"
    if found is None:
        return ""
    engine, method, _ = found
    return f"{getattr(engine, 'name', type(engine).__name__)!r} in {type(engine).__name__}.{method} ({line})"


def lone_surrogate(text: str) -> int:
    """Find half of a surrogate pair in a text, which neither UTF-8 nor a tokenizer accepts. Returns its position, or -1.

    >>> lone_surrogate("a\\ud800"), lone_surrogate("é")
    (1, -1)
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def described(error: BaseException) -> str:
    """Say what an exception of anybody's code is: its class, and what it says, if it says something. Its `__str__` may raise.

    >>> described(ValueError("no digits")), described(MemoryError())
    ('ValueError: no digits', 'MemoryError')
    """
    try:
        said = str(error)
    except Exception:
        said = ""
    return _shown(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _shown(text: str) -> str:
    """Replace lone surrogates, which a user's error may quote from a text and which UTF-8 can't encode, and leave out the middle of
    what has more than `_MOST_CHARACTERS`: errors of samples are recorded one by one."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _MOST_CHARACTERS:
        return text
    num_kept = _MOST_CHARACTERS // 2 - 50
    return f"{text[:num_kept]} [... {len(text) - 2 * num_kept:,} characters ...] {text[-num_kept:]}"


_MOST_CHARACTERS = 20_000


def error_from_record(record: ErrorRecord) -> M2FlowError:
    """Rebuild the error that `to_record` wrote; an unknown kind becomes an `InternalError` that names it."""
    return _rebuild(record.kind, record.what, record.where, record.now, record.remote)


def _rebuild(kind: str, what: str, where: str, now: str, remote: str) -> M2FlowError:
    found = globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, M2FlowError)):
        found, what = InternalError, f"{kind}: {what}"
    return found(what, where=where, now=now, remote=remote)


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """Suggest what to do about an unknown name: the nearest known one, if it is as near as `cutoff` of 1; else `otherwise`, by
    default a list of all.

    >>> did_you_mean("plicy", ["policy", "reward"])
    "Did you mean 'policy'?"
    >>> did_you_mean("xyz", ["policy", "reward"])
    'There are policy, reward.'
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, 1, cutoff)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"There are {', '.join(names)}." if otherwise is None else otherwise
