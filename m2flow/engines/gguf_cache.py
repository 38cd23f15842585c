"""Turn a .gguf file into a Hugging Face directory, once, and keep it.

The original is quantised, so the weights are a degraded copy of the model it was made from. They are dequantised to float32,
exactly, and kept under `~/.cache/m2flow/gguf/<digest of path, size and modification time>` (or `$XDG_CACHE_HOME`).
Several processes that ask at once wait for the first.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from m2flow.errors import MissingExtra, ModelError


def converted_directory(file: Path) -> Path:
    """The Hugging Face directory of a .gguf file, made if it is not there yet.

    Raises:
        MissingExtra: the `gguf` package is not installed.
        ModelError: the file can't be read, or is of an architecture that transformers can't dequantise.
    """
    for package in ("gguf", "sentencepiece", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"reading {file} needs the package `{package}`", now="pip install 'm2flow[smollm]'")
    target = _cache_root() / _digest(file)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _convert(file, target)
    return target


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m2flow" / "gguf"


def _digest(file: Path) -> str:
    status = file.stat()
    return hashlib.sha256(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:32]


def _convert(file: Path, target: Path) -> None:
    folder, name = str(file.parent), file.name
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars can't be switched off
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
            quantised = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, local_files_only=True
            )
        # A model that remembers its quantisation refuses to be saved, so its weights move to one that does not.
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.random.fork_rng(devices=[]):
            plain = type(quantised)(config)
        plain.load_state_dict(quantised.state_dict())
        with contextlib.redirect_stderr(io.StringIO()):
            plain.save_pretrained(str(partial))
            tokenizer.save_pretrained(str(partial))
        partial.rename(target)
    except Exception as error:
        raise ModelError(f"{file} can't be dequantised: {type(error).__name__}: {error}", now="Is it a whole .gguf file?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
