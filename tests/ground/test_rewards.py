"""Rewards off the shelf: what they give, what the box of code holds back, and that planned and eager runs agree on sums of them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from fake_clusters import SPLIT

from m2flow import Dataset, Policy, Reward, Sample, flow, sandbox, steps
from m2flow.environments import box
from m2flow.errors import EngineError, M2FlowError, MissingExtra, OpError, OptionError
from m2flow.macro.tracing import trace
from m2flow.rewards import (
    ExactMatch,
    Format,
    JsonSchema,
    Language,
    Length,
    LlmJudge,
    MathAnswer,
    Overlong,
    RegexMatch,
    Remote,
    Repetition,
    UnitTests,
    WeightedSum,
    run_boxed,
)
from m2flow.testing.world import run_eager, run_planned

BOX = {"wall_s": 10.0, "memory": 512 << 20, "box": True, "packages": False}


def _row(**columns: object) -> Sample:
    return cast(Sample, SimpleNamespace(**columns))


def _can_box() -> bool:
    try:
        return run_boxed("print(1)", "", BOX) == "1\n"
    except EngineError:
        return False


in_a_box = pytest.mark.skipif("not _can_box()", reason="this machine can't make the whole box (user namespaces, Landlock)")


@pytest.mark.parametrize(
    "reward",
    [
        ExactMatch(),
        RegexMatch("a(b)"),
        MathAnswer(by="text"),
        Format(),
        JsonSchema(),
        Length(),
        Overlong(9, 3),
        Repetition(),
        Language(),
        UnitTests(),
    ],
    ids=lambda reward: str(reward.__name__),
)
def test_a_reward_goes_to_workers_as_it_is(reward: Any) -> None:
    copied = pickle.loads(pickle.dumps(reward))
    assert copied == reward
    assert copied.__name__ == reward.__name__


@pytest.mark.parametrize(
    ("said", "answer", "is_right"),
    [
        (r"\boxed{1,234}", "#### 1234", True),
        (r"\boxed{\dfrac{3}{4}}", "0.75", True),
        (r"first \boxed{2}, then \boxed{3}", "2", False),
        (r"\boxed{x^{2}}", r"\boxed{x^{2}}", True),
        (r"\boxed{1", "1", False),
        (r"\boxed{1/0}", "1/0", True),
    ],
)
def test_boxed_answers_are_compared_as_numbers_where_they_are(said: str, answer: str, is_right: bool) -> None:
    assert MathAnswer(by="text")(_row(text=said, answer=answer)) == float(is_right)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # The alarm may ring where Python drops its exception.
def test_math_verify_compares_expressions_and_ends_in_time() -> None:
    pytest.importorskip("math_verify")
    judge = MathAnswer(timeout_s=60)
    assert judge(_row(text=r"so \boxed{(x+1)^2}", answer="x^2+2x+1")) == 1
    assert judge(_row(text=r"\boxed{5}", answer="$4$")) == 0
    assert MathAnswer(timeout_s=1)(_row(text=r"\boxed{9^{9^{9^{9^{9}}}}}", answer="4")) == 0
    assert judge.isolated is True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_math_verify_ends_in_time_though_the_first_alarm_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify = pytest.importorskip("math_verify")
    lost = []

    class Waits:
        def __del__(self) -> None:  # Python drops what is raised here.
            lost.append(True)
            while True:
                pass

    def parse(text: str, parsing_timeout: object) -> list[str]:
        if not lost:
            Waits()
        while True:
            with contextlib.suppress(Exception):  # As libraries have it.
                while True:
                    pass

    monkeypatch.setattr(math_verify, "parse", parse)
    before = signal.getsignal(signal.SIGALRM)
    assert MathAnswer(timeout_s=1)(_row(text=r"\boxed{5}", answer="5")) == 0
    assert lost
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_package_that_is_missing_is_named_when_the_reward_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"math-verify[\s\S]*m2flow\[rewards\]"):
        MathAnswer()
    with pytest.raises(MissingExtra, match="jsonschema"):
        JsonSchema({"type": "object"})


def test_a_json_schema_is_checked_and_applied() -> None:
    pytest.importorskip("jsonschema")
    reward = JsonSchema({"type": "object", "required": ["a"]})
    assert [reward(_row(text=text)) for text in ('{"a": 1}', "{}", "[", "[" * 100_000)] == [1, 0, 0, 0]
    with pytest.raises(OptionError, match="the schema is none"):
        JsonSchema({"type": "no such"})


def test_what_no_regular_expression_is_is_refused() -> None:
    with pytest.raises(OptionError, match="no regular expression"):
        RegexMatch("(")


# ---- code


ADD = "def add(a, b):\n    return a + b\n"


@in_a_box
@pytest.mark.parametrize(
    ("columns", "value"),
    [
        ({"test": "assert add(1, 2) == 3"}, 1.0),
        ({"test": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, 0.5),
        ({"test": "def check(candidate):\n    assert candidate(2, 2) == 4", "entry_point": "add"}, 1.0),
        ({"test": '["assert add(0, 0) == 0"]'}, 1.0),
    ],
)
def test_tests_in_the_usual_forms_are_run(columns: dict[str, object], value: float) -> None:
    assert UnitTests()(_row(text=f"Here it is.\n```python\n{ADD}```", **columns)) == value


@in_a_box
def test_input_and_output_are_compared_line_by_line() -> None:
    cases = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3\n", "8"]})
    text = "print(sum(map(int, input().split())))  "
    assert UnitTests()(_row(text=text, test=cases)) == 0.5
    assert UnitTests(all_or_nothing=True)(_row(text=text, test=cases)) == 0


@in_a_box
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit", "while True: pass", "def add(a, b): return 0", "("])
def test_code_that_ends_early_hangs_or_fails_passes_no_test(code: str) -> None:
    assert UnitTests(timeout_s=0.5)(_row(text=code, test="assert add(1, 2) == 3")) == 0


FORGERIES = {
    "reads the test's own constants": """
import os, sys
found = [one for one in sys._getframe().f_code.co_consts if isinstance(one, bytes)]
os.write(1, b"".join(found) or b"?")
os._exit(0)
""",
    "equals everything": """
class Same(int):
    __eq__ = __ne__ = lambda self, other: True
def add(a, b):
    return Same(7)
""",
    "says every number": """
import os, sys
word = next(one[6:] for one in sys._getframe().f_code.co_names if one.startswith("_note_"))
for number in range(64):
    os.write(1, f"\\n{word}\\n{hex(number)}\\nend\\n".encode())
os._exit(0)
""",
}


@in_a_box
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize(
    "columns",
    [
        {"test": "assert add(1, 2) == 3"},
        {"test": "import math\nassert 3 == add(1, 2), 'a sum'"},
        {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4", "entry_point": "add"},
    ],
    ids=["assert", "after an import", "check"],
)
def test_code_in_the_process_of_an_assert_can_not_forge_its_verdict(code: str, columns: dict[str, object]) -> None:
    assert UnitTests()(_row(text=code, **columns)) == 0
    assert UnitTests()(_row(text=ADD, **columns)) == 1


@in_a_box
@pytest.mark.parametrize(
    ("value", "literal", "is_equal"),
    [
        ("True", "1", True),
        ("2.0", "2", True),
        ("0.1 + 0.2", "0.3", False),
        ("10 ** 5000", "10", False),
        ("float('nan')", "0", False),
        ("{'b': [1, (2,)], 'a': None}", "{'a': None, 'b': [1.0, (2,)]}", True),
        ("(1, 2)", "[1, 2]", False),
        ("{3, 1, 2}", "{1, 2, 3}", True),
        ("frozenset({'x'})", "{'x'}", True),
        ("{1: 'a', 2: 'b'}.keys()", "{2, 1}", True),
        ("type('Text', (str,), {})('x')", "'x'", True),
        ("''", "''", True),
        ("None", "None", True),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}", True),
        ("__import__('fractions').Fraction(1, 2)", "0.5", True),
        ("__import__('decimal').Decimal('0.1')", "0.1", False),
        ("'a\\nb\\u2028'", "'a\\nb\\u2028'", True),
        ("b'1'", "'1'", False),
        ("-1", "-1", True),
        ("object()", "1", False),
    ],
)
def test_what_an_assert_compares_outside_is_equal_where_python_says_so(value: str, literal: str, is_equal: bool) -> None:
    assert UnitTests()(_row(text=f"def f():\n    return {value}", test=f"assert f() == {literal}")) == is_equal


@in_a_box
@pytest.mark.parametrize(
    "attack",
    [
        "open({secret!r}).read()",
        "open({secret!r}, 'w').write('gone')",
        "import os; assert os.listdir('/proc')",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "import os; assert os.environ.get('M2FLOW_TEST_SECRET')",
        "import os; os.kill({pid}, 0)",
        "bytearray(2 << 30)",
        "open('large', 'wb').write(bytes(64 << 20))",
        "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    ],
)
def test_the_box_holds_back(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: Answers) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    monkeypatch.setenv("M2FLOW_TEST_SECRET", "s")
    program = attack.format(secret=str(secret), port=answering.port, pid=os.getpid())
    assert run_boxed(program, "", BOX) is None
    assert secret.read_text() == "s"


@in_a_box
def test_what_a_program_started_ends_with_it() -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\nprint('left')"
    assert run_boxed("print(1)", "", BOX) == "1\n"
    ours = psutil.Process()
    before = {each.pid for each in ours.children(recursive=True)}
    assert run_boxed(daemon, "", BOX) == "left\n"
    deadline = time.monotonic() + 5
    while (left := {each.pid for each in ours.children(recursive=True)} - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert not [each for each in psutil.process_iter(["ppid", "uids"]) if each.info["ppid"] == 1 and each.info["uids"].real == box.UNUSED]


def test_a_box_that_can_not_be_made_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "box.py"
    without.write_text(Path(sandbox.PROGRAM).read_text().replace("libc.unshare(", "libc.unshare(-1 | "))
    monkeypatch.setattr(sandbox, "PROGRAM", str(without))
    with pytest.raises(EngineError, match=r"can't box[\s\S]*box=\"limits\""):
        run_boxed("print(1)", "", BOX)
    assert run_boxed("print(1)", "", {**BOX, "box": False}) == "1\n"


# ---- over HTTP


class Answers:
    """A server's answers in turn, and what it was asked."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def answering() -> Iterator[Answers]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            status, answer = answers.answers.pop(0)
            said = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        answers.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield answers
        finally:
            server.shutdown()
            thread.join()


def _reply(text: str) -> tuple[int, object]:
    return 200, {"choices": [{"message": {"content": text}}]}


def test_a_judge_is_asked_again_after_a_refusal_and_once_for_each_question(
    answering: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    answering.answers = [(429, {}), (503, {}), _reply("Between 3 and 10, say: 8")]
    judge = LlmJudge(f"{answering.url}/v1", "judge", prompt="{prompt}? {text}", key="JUDGE_KEY", cache=str(tmp_path / "cache"))
    sample = _row(prompt="Why {text}", text="Because.")
    assert [judge(sample), judge(sample)] == [0.8, 0.8]
    assert [one["path"] for one in answering.asked] == ["/v1/chat/completions"] * 3
    assert answering.asked[0]["messages"] == [{"role": "user", "content": "Why {text}? Because."}]
    assert answering.asked[0]["key"] == "Bearer k"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(401, {"error": "no key"})], "refused: status 401"),
        ([(500, {}), (500, {})], "no answer in 2 tries; the last was status 500"),
        ([_reply("fine")], "no verdict: 'fine'"),
        ([(200, {"choices": []})], "gave no message"),
    ],
)
def test_a_judge_without_a_verdict_is_an_error(answering: Answers, answers: list[tuple[int, object]], said: str) -> None:
    answering.answers = answers
    with pytest.raises(OpError, match=said):
        LlmJudge(answering.url, "judge", retries=1)(_row(prompt="p", text="t"))


def test_a_remote_reward_sends_the_columns_that_it_names(answering: Answers) -> None:
    answering.answers = [(200, {"reward": 0.5, "style": 1.0}), (200, 0.25)]
    remote = Remote(answering.url, columns=("text", "answer"))
    assert [remote(_row(text="t", answer=3)) for _ in range(2)] == [{"reward": 0.5, "style": 1.0}, 0.25]
    assert answering.asked[0] == {"path": "/", "key": None, "text": "t", "answer": 3}


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match="http"):
        Remote("localhost:9000")


# ---- sums, in runs


def even(sample: Sample) -> float:
    return float(sample.num_tokens % 2 == 0)


async def awaited(sample: Sample) -> dict[str, float]:
    return {"reward": 0.25, "further": 1.0}


@flow
def summed(num_steps: int = 2) -> None:
    policy = Policy("fake")
    reward = Reward.sum({even: 1.0, Length(per=10): 0.5, Length(per=5, free=2): 0.1, awaited: 2.0})
    prompts = Dataset([{"prompt": f"{i} + {i}"} for i in range(8)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=9)
        policy.update(responses, reward.score(responses))
    kept = policy.generate(prompts, n=2, count=2, score=reward, max_new_tokens=9)
    policy.update(kept, reward.score(kept))


def test_a_weighted_sum_is_the_same_in_both_modes_and_logs_each_part() -> None:
    alone = run_eager(summed, {}, SPLIT)
    assert alone.error == "", alone.error
    assert run_planned(summed, {}, SPLIT, order_seed=3) == alone
    logged: dict[str, list[float]] = {}
    for _, name, value in alone.logs:
        logged.setdefault(name, []).append(value)
    parts = {"reward/even", "reward/length", "reward/length_2", "reward/awaited"}
    assert parts <= set(logged)
    assert all(len(logged[name]) == 2 for name in parts)
    assert logged["reward/awaited"] == [0.25, 0.25]
    weights = {"even": 1.0, "length": 0.5, "length_2": 0.1, "awaited": 2.0}
    expected = [sum(weight * logged[f"reward/{part}"][step] for part, weight in weights.items()) for step in range(2)]
    rewards = [value for name, values in logged.items() if name.endswith("policy/reward") for value in values]
    assert rewards[:2] == pytest.approx(expected) or not rewards


def test_a_part_that_gives_no_number_is_named() -> None:
    with pytest.raises(OpError, match="part wordy of a sum gave 'much'"):
        WeightedSum((("wordy", lambda sample: "much", 1.0),))(_row())


@pytest.mark.parametrize("parts", [{}, [even], {"even": 1.0}, {even: float("nan")}])
def test_a_sum_of_what_is_no_function_or_weight_is_refused(parts: Any) -> None:
    @flow
    def wrong() -> None:
        Reward.sum(parts)

    with pytest.raises(M2FlowError, match=r"Reward\.sum needs functions|the weight of even"):
        trace(wrong, {})


def test_a_reward_that_may_hang_has_a_process_of_its_own_unless_the_flow_says_otherwise() -> None:
    found = []

    class Hanging:
        isolated = True
        __name__ = "hanging"

        def __call__(self, sample: Sample) -> float:
            return 0.0

    @flow
    def asked() -> None:
        found.extend([Reward(Hanging()).is_isolated, Reward(Hanging(), name="b", isolated=False).is_isolated, Reward(even).is_isolated])
        Policy("fake").generate(Dataset([{"prompt": "1"}]).take(1), max_new_tokens=1)

    trace(asked, {})
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("said", "script", "share"),
    [
        ("\uff41\U0001d44e1", "latin", 1.0),  # Full-width and mathematical letters are those that they stand for.
        ("\u0431\u0433 ab", ("latin", "cyrillic"), 1.0),
        ("\u0431\u0433 ab", "greek", 0.0),
        ("1 + 1 = \u2460", "latin", 1.0),
    ],
)
def test_letters_of_other_scripts_lower_a_language_reward(said: str, script: Any, share: float) -> None:
    assert Language(script)(SimpleNamespace(text=said)) == share  # type: ignore[arg-type]


def test_a_script_that_no_letter_is_of_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no letter is of the script 'lattin'[\s\S]*latin"):
        Language("lattin")
    with pytest.raises(OptionError, match="script"):
        Language(("latin", 3))  # type: ignore[arg-type]
