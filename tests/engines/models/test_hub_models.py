"""Models by names of the Hugging Face hub, from a cache that the tests lay out: nothing here goes over a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from m2flow.errors import ModelError
from m2flow.recipe import Model, hub_directory, is_of_hub, missing_files

ROOT = Path(__file__).resolve().parents[3]
DIGITS = ROOT / "flows" / "models" / "digits"
COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with config and tokenizer of `nobody/digits`, at its main branch."""
    home = tmp_path / "hub" / "models--nobody--digits"
    for commit in (COMMIT, OLDER):
        shutil.copytree(DIGITS, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "refs" / "v1").write_text(OLDER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("path", "is_name"),
    [("Qwen/Qwen2.5-0.5B-Instruct", True), ("fake", False), ("./a/b", False), ("/a/b", False), ("a/b/c", False), ("flows/models", False)],
)
def test_a_name_of_the_hub_is_an_owner_and_a_name_where_no_directory_is(path: str, is_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert is_of_hub(path) == is_name


def test_what_the_cache_has_is_used_at_the_revision_that_is_asked_for(cache: Path) -> None:
    model = Model("nobody/digits", "random")
    assert hub_directory(model, with_weights=True).name == COMMIT
    assert hub_directory(Model("nobody/digits", "random", revision="v1"), with_weights=True).name == OLDER


@pytest.mark.parametrize("with_weights", [False, True])
def test_offline_the_files_that_are_missing_are_named(cache: Path, with_weights: bool) -> None:
    said = r"name lacks model\.safetensors in the cache at .*hub[\s\S]*hf download nobody/digits\.[\s\S]*Policy\('/a/directory'\)"
    with pytest.raises(ModelError, match=said):
        hub_directory(Model("nobody/digits"), with_weights=with_weights)
    with pytest.raises(ModelError, match=r"name at v2 is not in the cache[\s\S]*hf download nobody/digits --revision v2"):
        hub_directory(Model("nobody/digits", "random", revision="v2"), with_weights=with_weights)


def test_shards_that_an_index_names_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    (tmp_path / "m-1.safetensors").touch()
    assert missing_files(tmp_path, with_weights=True) == ["config.json", "tokenizer.json", "m-2.safetensors"]
    assert missing_files(tmp_path, with_weights=False) == ["config.json", "tokenizer.json"]


FLOW = """
from m2flow import Dataset, Policy, Reward, flow


def length(sample) -> float:
    return float(len(sample.text))


@flow
def by_name(init: str = "random") -> None:
    policy, reward = Policy("nobody/digits", init=init), Reward(length)
    responses = policy.generate(Dataset([{"prompt": "12="}] * 2).take(2), n=2, max_new_tokens=2)
    policy.update(responses, reward.score(responses))
"""


@pytest.mark.slow
def test_a_flow_runs_by_a_models_name_and_a_plan_says_which_file_is_missing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "by_name.py").write_text(FLOW)
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}

    def m2flow(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "m2flow", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    ran = m2flow("run", "by_name.py", "--eager", "--quiet")
    assert ran.returncode == 0, ran.stderr
    planned = m2flow("plan", "by_name.py", "--init", "pretrained")
    assert planned.returncode != 0
    assert "lacks model.safetensors" in planned.stderr


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub that a download asks for: what is in a model's repository, and its files."""

    directory: Path
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        file = self.directory / path.rpartition("/")[2]
        headers, body, status = {"Content-Type": "application/json"}, b"{}", 404
        files = [{"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "0"} for one in sorted(self.directory.iterdir())]
        if path.startswith("/api/models/nobody/served/tree/"):
            body, status = json.dumps(files).encode(), 200
        elif path.startswith("/api/models/nobody/served"):
            siblings = [{"rfilename": one["path"]} for one in files]
            body, status = json.dumps({"id": "nobody/served", "sha": COMMIT, "siblings": siblings}).encode(), 200
        elif path.startswith("/nobody/served/resolve/") and file.is_file():
            body, status = file.read_bytes(), 200
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.asked += [file.name] * has_body
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[type[_Hub], dict[str, str]]]:
    """A hub on this machine with the model `nobody/served`, and the environment of a process that asks it."""
    served = tmp_path / "served"
    shutil.copytree(DIGITS, served)
    for name in ("model.safetensors", "pytorch_model.bin"):
        (served / name).write_bytes(b"weights")
    kind = type("_HubOfTest", (_Hub,), {"directory": served, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy") and name != "HF_HUB_OFFLINE"}
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        yield kind, {**kept, **here}
        server.shutdown()


ASK = """
import sys
from m2flow.errors import M2FlowError
from m2flow.recipe import Model, hub_directory
try:
    found = hub_directory(Model(sys.argv[1]), with_weights=sys.argv[2] == "weights")
except M2FlowError as error:
    sys.exit(str(error))
print(*sorted(path.name for path in found.iterdir()))
"""


def test_what_the_cache_lacks_is_downloaded_once_and_weights_only_where_they_are_needed(hub: tuple[type[_Hub], dict[str, str]]) -> None:
    kind, environment = hub

    def ask(name: str, what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ASK, name, what]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    planned = ask("nobody/served", "config")
    assert planned.returncode == 0, planned.stderr
    assert {"config.json", "tokenizer.json"} <= set(planned.stdout.split())
    assert "model.safetensors" not in kind.asked
    small = len(kind.asked)
    assert "model.safetensors" in ask("nobody/served", "weights").stdout.split()
    assert kind.asked[small:] == ["model.safetensors"], "what was there is not asked for again, nor weights in another form"
    assert ask("nobody/served", "weights").returncode == 0
    assert kind.asked[small:] == ["model.safetensors"]
    missing = ask("nobody/elsewhere", "weights")
    assert "nobody/elsewhere is no directory, and the hub's model of that name is not in the cache" in missing.stderr
    assert "the hub could not be asked: " in missing.stderr
