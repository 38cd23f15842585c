"""The sandbox under attack, its tiers, sessions, files and snapshots. Every attack is bounded in count and time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from m2flow import sandbox
from m2flow.environments import box as program
from m2flow.errors import EngineError, MissingExtra, OptionError
from m2flow.sandbox import BlockingSandbox, Sandbox, Tier, run_program

in_a_box = pytest.mark.skipif("not sandbox.Sandbox.probe('box').works", reason="this machine can't make the whole box")
X86 = platform.machine() == "x86_64"


@pytest.fixture(scope="module")
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("host") / "secret.txt"
    path.write_text("s3cret")
    return str(path)


C = "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
ENTERED = "print('ESCAPED' if {call} >= 0 else ctypes.get_errno())"

HELD_BACK = {
    "memory of one process": "x = bytearray(2 << 30); print('ESCAPED')",
    "a file of the host": "print('ESCAPED', open({secret!r}).read())",
    "the variables of other processes": """import os
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try:
        if b'k3y' in open(f'/proc/{pid}/environ', 'rb').read(): print('ESCAPED')
    except OSError: pass
if any('k3y' in v for v in os.environ.values()): print('ESCAPED')
print('looked')""",
    "secrets in the interpreter's memory": """import gc
def found():
    needle = 'k' + '3y-of-the-host'
    return [1 for o in gc.get_objects() if isinstance(o, dict) for v in list(o.values()) if isinstance(v, str) and needle in v]
if found(): print('ESCAPED')
data = b''
for line in open('/proc/self/maps'):
    if ' rw-p ' in line:
        low, high = (int(x, 16) for x in line.split()[0].split('-'))
        try:
            with open('/proc/self/mem', 'rb') as f:
                f.seek(low)
                data += f.read(min(high - low, 4 << 20))
        except (OSError, ValueError): pass
if (b'k3' + b'y-of-the-host') in data: print('ESCAPED in memory')
print('looked')""",
    "a connection to the host": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')",
    "a socket by system call": C + ENTERED.format(call="c.socket(2, 1, 0)"),
    "a raw socket": C + ENTERED.format(call="c.socket(17, 3, 0x300)"),
    "a socket to the kernel": C + ENTERED.format(call="c.socket(16, 3, 0)"),
    "writing outside": "open('/usr/x', 'w'); print('ESCAPED')",
    "writing to the root": "open('/x', 'w'); print('ESCAPED')",
    "settings of the kernel": """import os
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches', '/proc/self/oom_score_adj'):
    try: os.open(path, os.O_WRONLY); print('ESCAPED', path)
    except OSError: print('refused')""",
    "signals to the host": "import os\nos.kill({pid}, 9); print('ESCAPED')",
    "trace of the first process": C + ENTERED.format(call="c.ptrace(16, 1, 0, 0)"),
    "memory of the first process": "open('/proc/1/mem', 'rb').read(1); print('ESCAPED')",
    "root of the first process": "import os\nprint('ESCAPED' if 'home' in os.listdir('/proc/1/root') else 'same root')",
    "a nested user namespace": C + ENTERED.format(call="c.unshare(0x10000000)"),
    "a mount": C + ENTERED.format(call="c.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)"),
    "unmounting what hides": C + ENTERED.format(call="c.umount2(b'/proc', 2)"),
    "a new root": C + ENTERED.format(call="c.chroot(b'/tmp')"),
    "another namespace": C + "fd = os.open('/proc/1/ns/net', os.O_RDONLY)\n" + ENTERED.format(call="c.setns(fd, 0)"),
    "becoming another user": C + ENTERED.format(call="c.setresuid(0, 0, 0)"),
    "taking a right back": C + "print('ESCAPED' if c.prctl(47, 2, 21, 0, 0) >= 0 else 'no')",
    "dropping the filter": C + "c.prctl(22, 0, 0, 0, 0)\n" + ENTERED.format(call="c.socket(2, 1, 0)"),
    "a device": "import os\nos.mknod('/tmp/sda', 0o060600, os.makedev(8, 0)); open('/tmp/sda', 'rb'); print('ESCAPED')",
    "a link out": "import os\nos.symlink({secret!r}, '/tmp/link'); print('ESCAPED', open('/tmp/link').read())",
    "files by handle": C + ENTERED.format(call="c.open_by_handle_at(-100, ctypes.create_string_buffer(64), 0)"),
    "the host's messages": C + ENTERED.format(call="c.klogctl(3, ctypes.create_string_buffer(64), 64)"),
    "anonymous files": C + ENTERED.format(call="c.memfd_create(b'x', 0)"),
    "shared memory": C + ENTERED.format(call="c.shmget(0, 1 << 30, 0o1600)"),
    "locked memory": C + "b = ctypes.create_string_buffer(1 << 20)\n" + ENTERED.format(call="c.mlock(b, 1 << 20)"),
    "inherited descriptors": "import os\nfound = [f for f in os.listdir('/proc/self/fd') if int(f) > 3]\nprint('ESCAPED' if found else 0)",
    "a core dump": "import os, signal\nos.kill(os.getpid(), signal.SIGABRT)",
    "a stack without end": "import sys\nsys.setrecursionlimit(10**8)\ndef f(n): return f(n + 1)\nf(0)",
    "the host's name": C + ENTERED.format(call="c.sethostname(b'x', 1)"),
    "the clock": C + "t = (ctypes.c_long * 2)(1, 1)\n" + ENTERED.format(call="c.clock_settime(0, t)"),
    "priority": C + ENTERED.format(call="c.setpriority(0, 0, -5)"),
}
"""Attack -> a program, in which `{secret}`, `{port}` and `{pid}` are the host's; it prints ESCAPED where it succeeds."""

if X86:
    HELD_BACK |= {
        "io_uring": C + ENTERED.format(call="c.syscall(425, 8, ctypes.create_string_buffer(256))"),
        "programs in the kernel": C + ENTERED.format(call="c.syscall(321, 0, ctypes.create_string_buffer(128), 128)"),
        "keys of the kernel": C + ENTERED.format(call="c.syscall(250, 0, -3, 1)"),
        "namespaces by clone": C + ENTERED.format(call="c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
        "namespaces by clone3": C + ENTERED.format(call="c.syscall(435, ctypes.create_string_buffer(88), 88)"),
        "calls of another width": C + "print(c.syscall(0x40000000 + 39)); print('ESCAPED')",
        "faults handled by the program": C + ENTERED.format(call="c.syscall(323, 0)"),
        "another personality": C + ENTERED.format(call="c.syscall(135, 0x0400000)"),
        "a detached mount": C + ENTERED.format(call="c.syscall(428, -100, b'/', 1)"),
    }


@in_a_box
@pytest.mark.parametrize("attack", HELD_BACK)
def test_the_box_holds_back(attack: str, secret: str, listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FLOW_TEST_KEY", "k3y-of-the-host")
    code = HELD_BACK[attack]
    for name, value in (("{secret!r}", repr(secret)), ("{port}", str(listening)), ("{pid}", str(os.getpid()))):
        code = code.replace(name, value)
    is_endless = attack == "a stack without end"
    result = run_program(code, merged=True, wall_s=2.0 if is_endless else 10.0)
    assert not re.search("^ESCAPED", result.text, re.MULTILINE)
    assert not result.over or is_endless, result
    assert result.text or result.status, "the attack said nothing: was it made?"
    assert Path(secret).read_text() == "s3cret"


@in_a_box
@pytest.mark.parametrize(
    ("code", "over"),
    [
        ("while True: pass", "wall"),
        ("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)", "wall"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "output"),
        ("import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", "wall"),
        ("x = 10 ** (10 ** 9); print(len(str(x)))", "wall"),
        ("import os, time\nos.close(1); os.close(2); time.sleep(60)", "wall"),
        ("import os\nos.setsid() if os.getpid() != os.getsid(0) else None\nwhile True: pass", "wall"),
    ],
)
def test_what_does_not_end_is_ended_and_the_verdict_says_by_which_limit(code: str, over: str) -> None:
    began = time.monotonic()
    result = run_program(code, wall_s=1.0, cpu_s=60.0)
    assert (result.over, result.is_ok) == (over, False)
    assert len(result.text) <= 1 << 20
    assert time.monotonic() - began < 8


@in_a_box
def test_a_limit_on_processor_time_is_one_of_its_own() -> None:
    result = run_program("while True: pass", wall_s=30.0, cpu_s=1.0)
    assert result.over == "cpu"
    assert result.wall_s < 25


FORKS = """import os, time
n = 0
for i in range(300):
    try:
        if os.fork() == 0: time.sleep(3); os._exit(0)
        n += 1
    except OSError: print('stopped at', n); break
else: print('ESCAPED', n)"""

THREADS = """import threading, time
try:
    for i in range(300): threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    print('ESCAPED')
except RuntimeError: print('stopped at', i, flush=True)
import os; os._exit(0)"""


@in_a_box
@pytest.mark.parametrize("code", [FORKS, THREADS])
def test_a_bomb_of_forks_or_threads_stops_at_the_limit(code: str) -> None:
    result = run_program(code, merged=True, wall_s=10.0, memory_mb=2048)
    assert result.text.startswith("stopped at")
    assert int(result.text.split()[2]) <= 64


MEMORY_OF_MANY = """import os, time
for i in range(4):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        time.sleep(4); os._exit(0)
dead = sum(os.waitstatus_to_exitcode(os.wait()[1]) == -9 for _ in range(4))
print('ESCAPED' if not dead else 'ended')"""


@in_a_box
def test_memory_is_bounded_in_sum_where_there_are_control_groups() -> None:
    if not Sandbox.probe().memory_group:
        pytest.skip("no control groups for memory")
    result = run_program(MEMORY_OF_MANY, merged=True, wall_s=15.0, memory_mb=150)
    assert "ESCAPED" not in result.text
    assert result.over == "memory"


@in_a_box
@pytest.mark.parametrize(
    "code",
    [
        "n = 0\ntry:\n  for i in range(64): open(f'/tmp/{i}', 'wb').write(bytes(2 << 20)); n += 2\nexcept OSError: print('stopped at', n)",
        "n = 0\ntry:\n  for i in range(100000): open(f'/tmp/{i}', 'w').close(); n += 1\nexcept OSError: print('stopped at', n)",
        "n = 0\ntry:\n  f = open('/tmp/x', 'wb')\n  while True: f.write(bytes(1 << 20)); n += 1\nexcept OSError: print('stopped at', n)",
    ],
)
def test_files_stop_at_the_limit(code: str) -> None:
    result = run_program(code, merged=True, wall_s=15.0)
    assert "stopped at" in result.text
    assert int(result.text.split()[2]) <= 4096


@in_a_box
@pytest.mark.parametrize("code", ["import os; os.kill(-1, 9); print('alive')", "import os; os.killpg(0, 9)", "import os; os.kill(1, 9)"])
def test_killing_everything_reaches_nothing_outside(code: str) -> None:
    run_program(code)
    assert run_program("print(1)").text == "1\n"


@in_a_box
def test_a_program_for_root_gives_no_rights() -> None:
    result = run_program(
        "import subprocess\nfor p in ('su', 'mount', 'passwd'):\n  print(subprocess.run([p, '-c', 'id'], capture_output=True))", merged=True
    )
    assert "uid=0" not in result.text


@in_a_box
def test_the_verdict_of_a_program_is_the_kernels() -> None:
    assert run_program("import os; os._exit(0)").status == 0
    assert run_program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").status == -9
    assert run_program("raise SystemExit(7)").status == 7
    forged = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'{\"status\": 0}')\n  except OSError: pass\nraise SystemExit(3)"
    assert run_program(forged).status == 3


@in_a_box
def test_what_is_printed_is_what_comes_byte_for_byte_and_input_is_large() -> None:
    assert run_program("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000).text == "3000000\n"
    with BlockingSandbox() as box:
        box.write("in.bin", bytes(range(256)) * 100)
        assert box.shell("cat in.bin > out.bin; exit 4").status == 4
        assert box.read("out.bin") == bytes(range(256)) * 100


@in_a_box
def test_nothing_is_left_when_the_host_is_done() -> None:
    def ours() -> set[int]:
        return {each.pid for each in psutil.Process().children(recursive=True)}

    run_program("print(1)")
    before = ours()
    for code in ("import os\nif os.fork() == 0:\n  os.setsid()\n  while True: pass", "while True: pass"):
        run_program(code, wall_s=0.5)
    with BlockingSandbox() as box:
        box.shell("sleep 100 & setsid sleep 100 & sleep 0.1")
        names = box.shell("cat /proc/[0-9]*/comm").text
        assert "sleep" not in names
    deadline = time.monotonic() + 5
    while ours() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours() - before
    strays = [each for each in psutil.process_iter(["ppid", "uids"]) if each.info["uids"].real == program.UNUSED and each.info["ppid"] == 1]
    assert not strays


NOT_ROOT = """
import _posixsubprocess, ctypes, hashlib, json, os, random, shutil, socket, struct, subprocess, sys, tempfile, threading
from m2flow import sandbox
os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
sys.executable, sandbox.PROGRAM, sandbox._binds = "/usr/bin/python3", sys.argv[1], lambda packages: []
with sandbox.BlockingSandbox(wall_s=20.0) as box:
    print(box.run("x = 1").state, box.shell("id -u").text.strip(), box.run("print(x)").text.strip())
"""


@in_a_box
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="needs root, to become somebody else, and a Python for all"
)
def test_a_host_that_is_not_root_makes_the_same_box() -> None:
    version = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True)
    if version.stdout != "True\n":
        pytest.skip("the system's Python is older than 3.11")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(sandbox.PROGRAM, f"{folder}/box.py")
        done = subprocess.run([sys.executable, "-c", NOT_ROOT, f"{folder}/box.py"], capture_output=True, text=True, check=False)
    assert done.stdout == "kept 65534 1\n", done.stderr


# ---- tiers


def test_a_box_that_can_not_be_made_is_refused_and_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "box.py"
    without.write_text(Path(sandbox.PROGRAM).read_text().replace("libc.unshare(NAMESPACES)", "libc.unshare(-1)"))
    monkeypatch.setattr(sandbox, "PROGRAM", str(without))
    probe = Sandbox.probe("box")
    assert not probe.works
    assert "namespaces" in probe.missing
    with pytest.raises(EngineError, match="can't box"), BlockingSandbox("box"):
        pass


@in_a_box
@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("            _give_up_rights()\n", "CapEff"),
        ("NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000", "the network is seen"),
        ("    _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)", "Seccomp is 0"),
    ],
)
def test_a_weaker_box_is_found_out_by_the_first_program(without: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"NAMESPACES = 0x1": without.replace(" | 0x40000000", ""), "            _g": "            pass\n"}
    text = Path(sandbox.PROGRAM).read_text()
    assert without in text
    weaker = tmp_path / "box.py"
    weaker.write_text(text.replace(without, changed.get(without[:16] if without.startswith("N") else without[:14], "    _check(0")))
    monkeypatch.setattr(sandbox, "PROGRAM", str(weaker))
    probe = Sandbox.probe("box")
    assert not probe.works
    assert said in probe.missing


def test_a_tier_that_there_is_not_and_a_limit_that_is_none_are_refused() -> None:
    with pytest.raises(OptionError, match="known are box, fork, monty"):
        Sandbox("docker")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="wall_s=0"):
        Sandbox(wall_s=0)
    with pytest.raises(MissingExtra, match="no_such_package"), BlockingSandbox("fork", preload=("no_such_package",)):
        pass
    with pytest.raises(OptionError, match="closed"):
        BlockingSandbox("fork").run("1")


# ---- sessions

TIERS = [pytest.param("box", marks=in_a_box), "fork"]


@pytest.mark.parametrize("tier", TIERS)
def test_variables_and_files_stay_and_a_turn_that_is_ended_leaves_the_ones_before_it(tier: Tier) -> None:
    with BlockingSandbox(tier, wall_s=6) as box:
        assert box.run("x = [1]\nopen('f', 'w').write('a')").is_ok
        raised = box.run("x.append(2)\n1 / 0")
        assert (raised.status, raised.state) == (1, "kept")
        assert "ZeroDivisionError" in raised.text
        assert "<turn 2>" in raised.text
        hung = box.run("import time\nx.append(3)\ntime.sleep(60)")
        assert (hung.over, hung.state) == ("wall", "rolled back")
        left = box.run("import os\nx.append(4)\nos._exit(0)")
        assert (left.status, left.state) == (0, "rolled back")
        assert box.run("print(x, open('f').read())").text == "[1, 2] a\n"
        assert box.run("print('x' in dir())", fresh=True).text == "False\n"
        threads = box.run("import threading, time\nthreading.Thread(target=time.sleep, args=(50,)).start()\nx = 5")
        assert (threads.state, box.run("print(x, threading.active_count())").text) == ("kept", "5 1\n")


@in_a_box
def test_a_turn_that_fills_the_box_with_processes_is_not_kept_and_says_so() -> None:
    with BlockingSandbox() as box:
        box.run("x = 1")
        filled = box.run(f"x = 2\n{FORKS.replace('time.sleep(3)', 'time.sleep(20)')}")
        assert (filled.status, filled.state) == (1, "rolled back")
        assert "not kept" in filled.text
        assert box.run("print(x)").text == "1\n"


@pytest.mark.parametrize(
    "written", ["{}", "[1]", '{"pid": "one"}', '{"pid": 1e999}', '{"pid": -1}', '{"status": "x", "cpu_s": []}', "[" * 50_000]
)
@pytest.mark.parametrize("tier", TIERS)
def test_what_a_turn_writes_where_its_session_answers_is_its_own_loss(tier: Tier, written: str) -> None:
    with BlockingSandbox(tier, wall_s=20) as box:
        code = f"""import os
for fd in range(3, 20):
    try: os.write(fd, {written.encode()!r})
    except OSError: pass"""
        box.run(code)
        assert box.run("print(1 + 1)").text == "2\n"


@in_a_box
def test_a_turn_that_ends_its_own_session_loses_it_and_the_box_goes_on() -> None:
    with BlockingSandbox() as box:
        box.run("x = 1")
        assert box.run("import os\nos.kill(-1, 9)").state == "lost"
        assert "NameError" in box.run("x").text


@pytest.mark.parametrize("tier", TIERS)
def test_a_snapshot_brings_variables_and_files_back_any_number_of_times(tier: Tier) -> None:
    with BlockingSandbox(tier) as box, BlockingSandbox(tier) as other:
        box.run("x = {'n': 1}")
        box.write("d/f", b"1")
        snapshot = box.snapshot()
        for n in (2, 3):
            box.run(f"x['n'] += {n}\nopen('d/f', 'w').write('{n}')\nopen('g', 'w').close()")
            assert box.run("print(x['n'])").text == f"{1 + n}\n"
            box.restore(snapshot)
            assert box.run("import os\nprint(x, open('d/f').read(), os.listdir())").text == "{'n': 1} 1 ['d']\n"
        with pytest.raises(OptionError, match="another box"):
            other.restore(snapshot)


@pytest.mark.parametrize("tier", TIERS)
def test_a_file_is_written_from_bytes_or_from_text_and_from_nothing_else(tier: Tier) -> None:
    with BlockingSandbox(tier) as box:
        box.write("a", b"\xff")
        box.write("b", "h\u00e9")
        assert (box.read("a"), box.read("b")) == (b"\xff", "h\u00e9".encode())
        with pytest.raises(OptionError, match="data=7 is neither text nor bytes"):
            box.write("a", 7)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="stdin=None is neither text nor bytes"):
            box.shell("cat", None)  # type: ignore[arg-type]
        assert box.shell("cat a b", "").status == 0


@pytest.mark.parametrize("tier", TIERS)
def test_files_that_are_none_are_errors(tier: Tier) -> None:
    with BlockingSandbox(tier) as box:
        for path in ("none", ".", "/dev/full/x"):
            with pytest.raises(OSError, match="in a sandbox"):
                box.read(path)
        box.shell("mkfifo pipe")
        with pytest.raises(OSError, match="no regular file"):
            box.read("pipe")


@in_a_box
def test_boxes_run_side_by_side_and_a_call_that_is_cancelled_closes_its_box() -> None:
    async def one(i: int) -> str:
        async with Sandbox(wall_s=30.0) as box:
            await box.run(f"x = {i}\nimport time; time.sleep(0.05)")
            return (await box.run("print(x * 2)")).text

    async def cancelled() -> None:
        async with Sandbox(wall_s=30.0) as box:
            task = asyncio.ensure_future(box.run("import time; time.sleep(20)"))
            await asyncio.sleep(0.3)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            with pytest.raises(OptionError, match="closed"):
                await box.run("1")

    async def both() -> list[str]:
        return await asyncio.gather(*(one(i) for i in range(24)))

    assert asyncio.run(both()) == [f"{2 * i}\n" for i in range(24)]
    began = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - began < 10


@in_a_box
def test_threads_share_the_warm_interpreter() -> None:
    said: list[str] = []
    threads = [threading.Thread(target=lambda i=i: said.append(run_program(f"print({i})", wall_s=30.0).text)) for i in range(16)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == sorted(f"{i}\n" for i in range(16))


@in_a_box
def test_an_interpreter_that_was_killed_is_an_error_once_and_started_again() -> None:
    run_program("print(1)")
    with BlockingSandbox() as box:
        for zygote in list(sandbox._zygotes.values()):
            zygote.process.kill()
            zygote.process.wait()
        with pytest.raises(EngineError):
            box.run("print(1)")
    assert run_program("print(1)").text == "1\n"


def test_monty_computes_without_a_process_and_its_snapshots_are_bytes() -> None:
    pytest.importorskip("pydantic_monty")
    with BlockingSandbox("monty", wall_s=1.0) as box, BlockingSandbox("monty") as other:
        assert box.run("x = 20\nprint(x)\nx + 1").text == "20\n21\n"
        assert "ZeroDivisionError" in box.run("1 / 0").text
        snapshot = box.snapshot()
        hung = box.run("x = 1\nwhile True: pass")
        assert (hung.over, hung.state) == ("wall", "rolled back")
        assert box.run("x").text == "20\n"
        other.restore(snapshot)
        assert other.run("x * 2").text == "40\n"
        assert not box.run("open('/etc/passwd').read()").is_ok
        with pytest.raises(OptionError, match="no shell"):
            box.shell("ls")
