"""What each library raises when the machine refuses: `refused.py DIRECTORY` prints a line for each, for `test_errors`."""

import resource
import sqlite3
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure
import numpy as np
import safetensors.torch
import torch

from m2flow.errors import M2FlowError, unexpected
from m2flow.observe.metrics import TensorBoardWriter

LARGE = 1 << 20


def in_sqlite(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.execute("INSERT INTO t VALUES (zeroblob(?))", (LARGE,))
    db.commit()


def in_a_missing_database(path: Path) -> None:
    sqlite3.connect(path / "none" / "ledger.db").execute("CREATE TABLE t (x)")


def in_a_database_that_is_full(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA max_page_count=2")
    in_full = "CREATE TABLE t (x)", "CREATE TABLE u (x)", "CREATE TABLE v (x)"
    for statement in in_full:
        db.execute(statement)


def in_torch(path: Path) -> None:
    torch.save({"x": torch.zeros(LARGE)}, path)


def in_a_directory_that_torch_misses(path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, path / "none" / "state.pt")


def in_safetensors(path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(LARGE)}, path)


def in_zipfile(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", bytes(LARGE))


def in_numpy(path: Path) -> None:
    np.save(path, np.zeros(LARGE))


def in_matplotlib(path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(20, 20), dpi=300)
    figure.figimage(np.random.default_rng(0).random((3000, 3000)))
    figure.savefig(path, format="png")


def in_tensorboard(path: Path) -> None:
    board = TensorBoardWriter(path)
    for step in range(20_000):
        board.add("loss", 0.5, step, 0.0)
    board.close()


def in_python(path: Path) -> None:
    path.write_bytes(bytes(LARGE))


def too_many_files(path: Path) -> None:
    path.write_text("")
    files = []
    while len(files) < 1000:
        files.append(path.open())


def too_many_threads(path: Path) -> None:
    threading.stack_size(1 << 46)
    threading.Thread(target=print).start()


WRITERS: list[Callable[[Path], None]] = [
    in_sqlite,
    in_a_missing_database,
    in_a_database_that_is_full,
    in_torch,
    in_a_directory_that_torch_misses,
    in_safetensors,
    in_zipfile,
    in_numpy,
    in_matplotlib,
    in_tensorboard,
    in_python,
    too_many_threads,
    too_many_files,
]


def main(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for write in WRITERS:
        try:
            write(Path(directory) / write.__name__)
        except Exception as error:
            found = error if isinstance(error, M2FlowError) else unexpected("policy.update", error)
            print(f"{write.__name__}: {type(found).__name__}: {found.what} | {found.now}".replace("\n", " "), flush=True)
        else:
            print(f"{write.__name__}: nothing was refused", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
