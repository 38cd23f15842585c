"""Which SGLang an interpreter has, and what that release can do: by the endpoints and fields that its source has, without importing it.

    python --a short script there--> version, source of its HTTP server --> Installed: abilities, and what is lacking of what is needed

Importing SGLang takes half a minute and a device; its endpoints are decorators with their paths, which can be read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from m2flow.errors import EngineError, MissingExtra

OLDEST = "0.5.20"
"""The first release with all of `NEEDED`."""
NEEDED = {
    "generation by token ids": ("/generate",),
    "streaming of new tokens alone": ("incremental_streaming_output",),
    "abort of one request": ("/abort_request",),
    "pause and continue": ("/pause_generation", "/continue_generation"),
    "weights from files": ("/update_weights_from_disk",),
    "weight versions by token": ("weight_versions",),
}
"""What the rollout engine cannot do without -> words of the source that say it is there."""
FURTHER = {
    "release and resume of memory": ("/release_memory_occupation", "/resume_memory_occupation"),
    "weights from tensors": ("/update_weights_from_tensor",),
    "weights from a group": ("/update_weights_from_distributed",),
    "checksums of the weights held": ("/weights_checker",),
    "routed experts": ("return_routed_experts",),
    "seeds by token": ("sampling_seed",),
}
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys
words = json.loads(sys.argv[1])
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    print(json.dumps({"version": "", "words": [], "saver": False}))
    raise SystemExit
spec = importlib.util.find_spec("sglang")
text = ""
for place in (spec.submodule_search_locations or []) if spec else []:
    root = pathlib.Path(place) / "srt"
    for path in [root / "entrypoints" / "http_server.py", *(root / "managers").glob("*.py"), *(root / "sampling").glob("*.py")]:
        if path.is_file():
            text += path.read_text(errors="replace")
saver = importlib.util.find_spec("torch_memory_saver") is not None
print(json.dumps({"version": version, "words": [word for word in words if word in text], "saver": saver}))
"""


class _Said(msgspec.Struct, frozen=True):
    version: str
    words: list[str]
    saver: bool


@dataclass(frozen=True)
class Installed:
    """What an interpreter has."""

    version: str
    """Empty: no SGLang."""
    abilities: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    """Of what is needed."""


def installed(python: str) -> Installed:
    """What an interpreter (empty: this one) has.

    Raises:
        EngineError: there is no such interpreter, or it does not answer.
    """
    words = [word for found in (NEEDED | FURTHER).values() for word in found]
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _PROBE, msgspec.json.encode(words).decode()], capture_output=True, text=True, timeout=120
        )
        said = msgspec.json.decode(done.stdout, type=_Said)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"the interpreter {python} can't be run: {error}", now="Give the option `python` of the rollout engine."
        ) from None
    except msgspec.MsgspecError:
        raise EngineError(
            f"{python or sys.executable} did not say which SGLang it has", now="Is it Python 3.10 or later?", remote=done.stderr
        ) from None
    if not said.version:
        return Installed("")
    has = set(said.words)
    abilities = [name for name, wanted in (NEEDED | FURTHER).items() if has.issuperset(wanted)]
    if not said.saver:  # The endpoints answer without it, and nothing is freed.
        abilities = [name for name in abilities if name != "release and resume of memory"]
    return Installed(said.version, tuple(abilities), tuple(name for name, wanted in NEEDED.items() if not has.issuperset(wanted)))


def check_version(python: str) -> str:
    """The version of SGLang in an interpreter, if it has all that is needed.

    Raises:
        MissingExtra: there is none, or it lacks something; with the release that has it.
    """
    found = installed(python)
    where = python or sys.executable
    if not found.version:
        raise MissingExtra(
            f"the rollout engine sglang needs sglang, which {where} does not have",
            now=f"pip install 'sglang>={OLDEST}' there, or name an interpreter that has it: rollout.options.python in the cluster spec.",
        )
    if found.lacking:
        raise MissingExtra(
            f"SGLang {found.version} in {where} lacks {', '.join(found.lacking)}, which the rollout engine needs; {OLDEST} has it",
            now=f"pip install 'sglang>={OLDEST}' there.",
        )
    return found.version


def check_options(options: Mapping[str, object]) -> None:
    """Raises what `check_version` does, for the interpreter that an engine's options name; of a server that runs already, nothing."""
    if not options.get("url"):
        check_version(str(Path(str(options.get("python", ""))).expanduser()) if options.get("python") else "")
