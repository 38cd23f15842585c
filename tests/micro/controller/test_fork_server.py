"""The fork server: what a forked worker is, who learns of its end, and what happens when the server or its owner ends."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

import m2flow
from m2flow.cli import main
from m2flow.micro.controller import launcher
from m2flow.micro.controller.launcher import Job, LocalLauncher, Processes, spawn, warm_up
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.micro.worker import fork_server as forking
from m2flow.micro.worker.fork_server import Forked, ForkServer, fork_server
from m2flow.micro.worker.worker import WorkerSettings
from m2flow.spec import ClusterSpec, RunSettings

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.support.forked_main"
FUNCTIONS = WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))
FLOW = """
import os
from m2flow import Dataset, Policy, Reward, flow, steps

@flow
def small(num_steps: int = 2):
    policy, reward = Policy(DIGITS, init="random"), Reward(score)
    prompts = Dataset.generate(lambda rng: {"prompt": "1="}, 8, seed=1, name="prompts")
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
        policy.update(responses, reward.score(responses))

def score(sample):
    return VALUE
"""


def launcher_in(place: Path, settings: RunSettings | None = None) -> LocalLauncher:
    plan = Plan("f", "c", "split", "", (FUNCTIONS,), (), (), (), (), ())
    (place / "logs").mkdir(exist_ok=True)
    return LocalLauncher(Job(plan, ClusterSpec(), settings or RunSettings(), {}, place))


def settings_named(place: Path, name: str) -> WorkerSettings:
    found = launcher_in(place)
    settings = found.settings_for(FUNCTIONS, "tcp://127.0.0.1:1")
    found.stop(())
    return msgspec.structs.replace(settings, name=name)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def environment(path: str = str(ROOT), threads: int = 1) -> dict[str, str]:
    return forking.worker_environment(threads, "secret", path, deterministic=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(environment())
    yield made
    made.close()


def fork(server: ForkServer, place: Path, name: str, variables: dict[str, str] | None = None) -> tuple[Forked | None, Path]:
    printed = place / "printed"
    with printed.open("ab") as output:
        return server.fork(settings_named(place, name), MODULE, f"{name}-0", output, variables or environment()), printed


def told(server: ForkServer, place: Path, variables: dict[str, str] | None = None) -> dict[str, object]:
    forked, printed = fork(server, place, "tells", variables)
    assert forked is not None
    assert forked.wait() == 0, printed.read_text()
    return json.loads(printed.read_text().splitlines()[-1])


def test_a_forked_worker_is_what_a_process_of_its_own_would_be(server, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(forking, "_umask", lambda: 0o031)
    monkeypatch.setattr(os, "getpriority", lambda *which: 19)
    state = told(server, tmp_path, environment(os.pathsep.join([str(tmp_path / "modules"), str(ROOT)]), threads=2))
    assert state["cwd"] == os.getcwd()
    assert state["path"][:3] == [os.getcwd(), str(tmp_path / "modules"), str(ROOT)]
    assert state["environment"] == environment(os.pathsep.join([str(tmp_path / "modules"), str(ROOT)]), threads=2)
    assert state["leads"] == [True, True]
    assert state["threads"] == [1, min(2, os.cpu_count() or 1)]  # One in Python; NumPy's matrix library has as many as it was told.
    assert state["files"] == sorted([os.devnull, *[str(tmp_path / "printed")] * 2])
    assert state["cores"] == sorted(os.sched_getaffinity(0))
    assert (state["command"][0], state["command"][-1]) == (sys.executable, "tells-0")
    assert state["command"][2] == MODULE
    assert state["input"] == ""
    assert (state["umask"], state["niceness"]) == (0o031, 19)
    assert state["loaded"] == []
    again = told(server, tmp_path)
    assert again["threads"] == [1, 1]
    assert again["drawn"] != state["drawn"]


def test_it_is_a_child_whose_end_is_seen_and_that_a_kill_ends(server, tmp_path):
    waits, _ = fork(server, tmp_path, "waits")
    assert waits is not None
    assert psutil.Process(waits.pid).ppid() == os.getpid()
    running = Processes([waits])
    assert (running.pids, running.how_ended()) == ([waits.pid], "")
    running.kill()
    assert not psutil.pid_exists(waits.pid)
    for name, how in (("kills-itself", "was killed by signal 9"), ("raises", "ended with status 1"), ("tells", "ended with status 0")):
        forked, printed = fork(server, tmp_path, name)
        assert forked is not None
        assert Processes([forked]).wait() == how
        assert "ValueError: as it was told" in printed.read_text() or name != "raises"


def test_what_an_environment_decides_when_a_library_is_loaded_is_decided_for_one_server(server, tmp_path):
    assert server.fits(environment("elsewhere", threads=7) | {"NOTED_BY_A_TRACKER": "1"})
    other = environment() | {"GOMP_SPINCOUNT": "1"}
    assert not server.fits(other)
    assert fork(server, tmp_path, "tells", other)[0] is None
    assert told(server, tmp_path)


def test_a_server_that_is_killed_takes_no_worker_with_it_and_the_next_worker_is_a_process_of_its_own(tmp_path):
    server = ForkServer(environment())
    waits, _ = fork(server, tmp_path, "waits")
    assert waits is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    running = Processes([waits])
    settings = settings_named(tmp_path, "functions-0")
    with (tmp_path / "log").open("ab") as output:
        plain = spawn(settings, "secret", output, path=str(ROOT), server=server)
    assert isinstance(plain, subprocess.Popen)
    assert b"there is no fork server any more" in (tmp_path / "log").read_bytes()
    assert running.how_ended() == ""
    assert not server.fits(environment())
    for one in (running, Processes([plain])):
        one.kill()


def test_a_server_that_can_load_no_engine_or_never_answers_is_given_up(tmp_path, monkeypatch):
    server = ForkServer(environment())
    monkeypatch.setattr(forking, "has_model", lambda slots: True)
    monkeypatch.setattr(forking, "_ENGINES", ("m2flow.there_is_no_such_module",))
    assert fork(server, tmp_path, "tells")[0] is None
    server = ForkServer(environment())
    monkeypatch.setattr(forking, "has_model", lambda slots: False)
    assert told(server, tmp_path)
    monkeypatch.setattr(forking, "_ANSWERS_WITHIN_S", 0.1)
    os.kill(server._process.pid, signal.SIGSTOP)
    assert fork(server, tmp_path, "tells")[0] is None
    assert server._process.returncode == -signal.SIGKILL


def test_the_umask_is_read_and_stays_as_it_is():
    before = os.umask(0o027)
    try:
        assert forking._umask() == 0o027
        assert os.umask(0o022) == 0o027
    finally:
        os.umask(before)


def test_a_run_that_is_over_waits_for_no_library(tmp_path, monkeypatch):
    """As after a Ctrl-C while torch is loaded, which may take a minute."""
    (tmp_path / "takes_long.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forking, "_SERVER", None)
    monkeypatch.setattr(forking, "_ENGINES", ("takes_long",))
    monkeypatch.setattr(forking, "has_model", lambda slots: True)
    own = launcher_in(tmp_path)
    starts = threading.Thread(target=own.start, args=("tcp://127.0.0.1:1",), daemon=True)
    starts.start()
    until(lambda: forking._SERVER is not None and len(psutil.Process(forking._SERVER._process.pid).children()) == 1)
    assert starts.is_alive()
    own.give_up()
    starts.join(60)
    assert not starts.is_alive()
    assert not own._processes
    assert forking._SERVER._process.poll() is None, "it goes on loading, for the next run"
    own.stop(())
    forking._SERVER.close()


def test_a_module_that_starts_a_thread_is_not_loaded_before_a_fork(tmp_path, monkeypatch):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forking, "has_model", lambda slots: True)
    monkeypatch.setattr(forking, "_ENGINES", ("starts_a_thread",))
    assert fork(ForkServer(environment()), tmp_path, "tells")[0] is None


def test_the_server_ends_with_its_owner_even_if_that_is_killed(tmp_path):
    program = (
        "import sys, time\n"
        "from m2flow.micro.worker.fork_server import fork_server, worker_environment\n"
        f"server = fork_server(worker_environment(1, '', {str(ROOT)!r}, deterministic=False))\n"
        "server._link(('json',))\n"
        "print(server._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert owner.stdout is not None
    first = psutil.Process(int(owner.stdout.readline()))
    until(first.children)
    servers = [first, *first.children()]
    owner.kill()
    owner.communicate()
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in servers))


def test_a_fork_of_the_owner_leaves_the_server_alone(tmp_path):
    server = fork_server(environment())
    assert server is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if forking._SERVER is None and not server._links else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fork_server(environment()) is server
    assert told(server, tmp_path)


def test_there_is_none_where_a_run_or_the_system_says_so(tmp_path, monkeypatch):
    assert warm_up(RunSettings(fork_workers=False), has_models=True) is None
    monkeypatch.delattr(os, "pidfd_open")
    assert fork_server(environment()) is None
    monkeypatch.undo()
    monkeypatch.setattr(launcher, "fork_server", lambda environment: pytest.fail("for a run that forks nothing"))
    own = launcher_in(tmp_path, RunSettings(fork_workers=False))
    own.start("tcp://127.0.0.1:1")
    (processes,) = own._processes.values()
    assert isinstance(processes._ranks[0], subprocess.Popen)
    own.stop(())


def test_runs_of_one_process_see_an_edited_reward_and_leave_nothing_but_the_server(tmp_path, monkeypatch):
    """Also where the server is killed before a run, or during one."""
    spec = ClusterSpec.model_validate({"rollout": {"engine": "fake"}, "train": {"engine": "fake"}})
    flow, before = tmp_path / "small_flow.py", {one.pid for one in psutil.Process().children()}

    def rewards(value: str, **options: object) -> set[float]:
        flow.write_text(FLOW.replace("VALUE", value).replace("DIGITS", repr(str(ROOT / "flows" / "models" / "digits"))))
        done = m2flow.run(flow, cluster=spec, runs_dir=tmp_path / "runs", quiet=True, **options)
        assert {one.pid for one in psutil.Process().children()} <= before | {forking._SERVER._process.pid}
        with contextlib.closing(sqlite3.connect(done.path / "ledger.db")) as ledger:
            return {value for (value,) in ledger.execute("SELECT value FROM rewards")}

    assert rewards("1.0") == {1.0}
    first = forking._SERVER
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("NOTED_BY_A_TRACKER", "1")
    assert rewards("2.0") == {2.0}
    assert forking._SERVER is first
    assert len(os.listdir("/proc/self/fd")) == files
    first._process.kill()
    assert rewards("3.0") == {3.0}
    assert rewards("4.0") == {4.0}
    assert forking._SERVER is not first
    server = forking._SERVER._process.pid
    assert rewards(f"(os.path.exists('/proc/{server}/exe') and os.kill({server}, 9), 5.0)[1]") == {5.0}
    assert forking._SERVER._process.poll() == -signal.SIGKILL
    assert rewards("6.0") == {6.0}


def test_what_was_loaded_ahead_is_what_a_run_uses_or_ends(monkeypatch):
    monkeypatch.setattr(forking, "_SERVER", None)
    monkeypatch.setattr(forking, "_ENGINES", ("json",))
    forking.load_ahead(deterministic=False)
    ahead = forking._SERVER
    assert ahead is not None
    assert warm_up(RunSettings(), has_models=True) is ahead
    forking.end_unneeded()
    assert ahead._process.poll() is None, "a run uses it"
    ahead.close()
    forking.load_ahead(deterministic=False)
    unneeded = forking._SERVER
    assert warm_up(RunSettings(fork_workers=False), has_models=True) is None
    assert forking._SERVER is None
    assert unneeded._process.returncode == -signal.SIGKILL


def test_the_command_line_loads_ahead_what_a_run_on_this_machine_will_need(tmp_path, monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(forking, "load_ahead", lambda *, deterministic: asked.append(deterministic))
    here, elsewhere = tmp_path / "here.yaml", tmp_path / "elsewhere.yaml"
    here.write_text("placement: split\n")
    elsewhere.write_text("launcher: ray\n")
    for line in ("run f.py", "run f.py --deterministic", "demo", f"run f.py --cluster {here}", f"run --cluster={here} f.py"):
        main._load_ahead(line.split())
    assert asked == [False, True, False, False, False]
    others = f"plan f.py|run|run f.py --help|run f.py --eager|run --resume r|run f.py --cluster {elsewhere}|run f.py --cluster={elsewhere}"
    for line in ("", *others.split("|"), "run f.py --setting fork_workers=false"):
        main._load_ahead(line.split())
    assert len(asked) == 5


def test_a_cluster_spec_that_comes_through_a_pipe_is_left_to_the_command(monkeypatch):
    monkeypatch.setattr(forking, "load_ahead", lambda *, deterministic: pytest.fail("it is not known which machines these are"))
    source, sink = os.pipe()
    with open(source) as spec:
        os.write(sink, b"placement: split\n")
        os.close(sink)
        main._load_ahead(["run", "f.py", "--cluster", f"/dev/fd/{source}"])
        assert spec.read() == "placement: split\n"


def test_names_are_read_again_when_a_module_has_changed_or_what_was_kept_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models, utils = tmp_path / "library" / "models", tmp_path / "library" / "utils"
    (models / "llama").mkdir(parents=True)
    utils.mkdir()
    module, reader = models / "llama" / "modeling.py", utils / "reader.py"
    for file in (module, reader):
        file.write_text("1\n")
    names = {frozenset({"torch", "vision"}): {"models.llama.modeling": {"A", "B"}}, frozenset(): {}}
    times: list[int] = []

    def again() -> int:
        assert forking.kept_names(models, lambda: times.append(0) or names) == names
        return len(times)

    assert [again(), again()] == [1, 1]
    for number, file in enumerate((module, reader, models / "llama" / "new.py")):
        file.write_text(f"{number} and more\n")
        assert [again(), again()] == [number + 2] * 2
    (kept,) = (tmp_path / "cache" / "m2flow" / "transformers").iterdir()
    kept.write_bytes(kept.read_bytes()[:-20])
    assert [again(), again()] == [5, 5]
    monkeypatch.setenv("XDG_CACHE_HOME", str(module / "no folder"))
    assert [again(), again()] == [6, 7]


@pytest.mark.slow
def test_a_second_server_loads_transformers_without_reading_its_models_and_it_lists_the_same(tmp_path):
    program = (
        "from pathlib import Path\n"
        "from m2flow.micro.worker import fork_server\n"
        "fork_server._load(('m2flow.engines.models.model_files',))\n"
        "import transformers\n"
        "from transformers.utils import import_utils as utils\n"
        "from m2flow.engines.models.model_files import modules_of_models\n"
        "print(utils.create_import_structure_from_path.cache_info().misses)\n"
        "folder = Path(transformers.__file__).parent / 'models'\n"
        "assert modules_of_models() == utils.define_import_structure(str(folder / '__init__.py'))\n"
        "assert transformers.AutoConfig and transformers.LlamaConfig\n"
    )

    def folders_read() -> int:
        variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        return int(subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, check=True).stdout)

    assert folders_read() > 100
    assert folders_read() < 10  # Of the packages of models that are loaded.


def test_while_modules_are_loaded_a_frame_is_described_without_its_source():
    frame = inspect.currentframe()
    before = inspect.getframeinfo(frame)
    with forking._brief_frames():
        brief = inspect.getframeinfo(frame)
        assert (brief.filename, brief.function, brief.code_context) == (before.filename, before.function, None)
        assert inspect.getmodule(frame) is inspect.getmodule(inspect.unwrap(environment)) is sys.modules[__name__]
    assert inspect.getframeinfo(frame).code_context


LEAVING = """
import atexit, gzip, sys, threading, time
from m2flow.micro.worker.fork_server import leave

class Held:
    def __del__(self):
        print("taken apart", flush=True)

def late():
    time.sleep(0.2)
    print("the thread ended")

held, text, packed = Held(), open("text", "w"), gzip.open("packed", "wb")
text.write("not closed")
packed.write(b"not closed")
atexit.register(print, "registered")
threading.Thread(target=late).start()
sys.stderr.write("said")
leave(3)
"""


def test_a_worker_that_ends_waits_for_threads_and_writes_out_files_and_takes_nothing_apart(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "said")
    assert done.stdout.split("\n") == ["the thread ended", "registered", ""]
    assert (tmp_path / "text").read_text() == "not closed"
    assert zlib.decompressobj(31).decompress((tmp_path / "packed").read_bytes()) == b"not closed"
