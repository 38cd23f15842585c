"""Rewards off the shelf: small functions of a sample, to be given to `Reward`, alone or as a weighted sum.

    verifier = Reward(ExactMatch())
    verifier = Reward.sum({MathAnswer(): 1.0, Overlong(4096, buffer=512): 0.5, Repetition(): 0.1})

Each is a frozen dataclass whose call takes a `Sample` and returns a number, so that it has options, can be sent to workers, and can be
called by hand. Columns of the dataset's row are named by an option (`answer="solution"`).

Rewards that may hang or that run a model's text (`MathAnswer`, `UnitTests`) ask `Reward` for a process that can be killed alone
(`isolated`). `UnitTests` and `ReasoningGym` say what they contain and what not. `LlmJudge` and `Remote` talk over HTTP, with retries;
their answers are as repeatable as the server's, or as their cache.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import random
import re
import secrets
import signal
import tempfile
import time
import unicodedata
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, final

from m2flow.errors import MissingExtra, OpError, OptionError, described, did_you_mean
from m2flow.recipe import check_choice, check_count, check_number, check_text
from m2flow.samples import Sample
from m2flow.sandbox import run_program


class SampleReward(ABC):
    """Base of the rewards of this module: a callable on a sample, whose name in plans and records is that of its class."""

    @property
    def isolated(self) -> bool | None:
        """Whether `Reward` runs it in a process that can be killed alone, if the flow does not say; None: as `Reward` decides."""
        return None

    @abstractmethod
    def __call__(self, sample: Sample) -> object:
        """Judge one sample."""

    def __getattr__(self, name: str) -> str:
        if name in ("__name__", "__qualname__"):
            return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


# ---- answers


@final
@dataclass(frozen=True)
class ExactMatch(SampleReward):
    """1 if the response is the row's answer, but for white space around both.

    Args:
        answer: the column with the answer, a text or a number; or a list of answers, of which any counts.
        ignore_case: compare without case.

    >>> from types import SimpleNamespace as Row
    >>> ExactMatch()(Row(text=" Paris\\n", answer="Paris")), ExactMatch()(Row(text="Rome", answer=["Paris", "Lutetia"]))
    (1.0, 0.0)
    """

    answer: str = "answer"
    ignore_case: bool = False

    def __call__(self, sample: Sample) -> float:
        expected = getattr(sample, self.answer)
        accepted = [_plain(one, self.ignore_case) for one in (expected if isinstance(expected, list) else [expected])]
        return float(_plain(sample.text, self.ignore_case) in accepted)


@final
@dataclass(frozen=True)
class RegexMatch(SampleReward):
    r"""1 if what a regular expression finds last in the response is the row's answer; without `answer`, 1 if it finds anything.

    Args:
        pattern: its first group counts, or all that it matches if it has none. Search is over several lines (`.` matches no line's end).
        answer: the column to compare with. After `####` only what follows counts, as GSM8K writes its answers; commas in numbers
            do not.

    >>> from types import SimpleNamespace as Row
    >>> RegexMatch(r"-?[\d,]+")(Row(text="3 and 4 make 1,007", answer="1000 + 7 ... #### 1007"))
    1.0
    >>> RegexMatch(r"^ANSWER: ", answer=None)(Row(text="I guess\nANSWER: 4"))
    1.0
    """

    pattern: str
    answer: str | None = "answer"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise OptionError(
                f"RegexMatch: {self.pattern!r} is no regular expression: {error}",
                now="Mend the pattern; `re.compile` shows the same error.",
            ) from None

    def __call__(self, sample: Sample) -> float:
        expected = None if self.answer is None else _final(getattr(sample, self.answer))  # A row without it is an error, whatever the text.
        found = [match[1] if match.re.groups else match[0] for match in re.finditer(self.pattern, str(sample.text), re.MULTILINE)]
        return float(bool(found)) if expected is None or not found else float(_final(found[-1]) == expected)


@final
@dataclass(frozen=True)
class MathAnswer(SampleReward):
    r"""1 if the last boxed answer of the response, `\boxed{...}`, is the row's answer as mathematics.

    Args:
        answer: the column with the answer: LaTeX or plain, boxed or not, or after `####`.
        by: `math-verify` compares expressions by the package of that name (`pip install 'm2flow[rewards]'`), which also finds answers
            that are not boxed; it works on a main thread alone, so that samples are judged in processes of their own. `text` compares
            numbers, fractions and texts without white space, needs no package, and takes microseconds.
        timeout_s: what parsing and comparing may take, seconds; beyond it the answer counts as wrong. `math-verify` alone.

    >>> from types import SimpleNamespace as Row
    >>> same = MathAnswer(by="text")
    >>> same(Row(text=r"so it is \boxed{\frac{1}{2}}.", answer="0.5")), same(Row(text="1/2", answer="0.5"))
    (1.0, 0.0)
    """

    answer: str = "answer"
    by: Literal["math-verify", "text"] = "math-verify"
    timeout_s: int = 5

    def __post_init__(self) -> None:
        check_choice("by", self.by, ("math-verify", "text"), of="MathAnswer")
        check_count("timeout_s", self.timeout_s)
        if self.by == "math-verify" and importlib.util.find_spec("math_verify") is None:
            now = "Run: pip install 'm2flow[rewards]'; or compare numbers and texts without it: MathAnswer(by=\"text\")."
            raise MissingExtra("MathAnswer needs the package math-verify, which is not installed", now=now)

    @property
    def isolated(self) -> bool | None:
        return True if self.by == "math-verify" else None

    def __call__(self, sample: Sample) -> float:
        expected, text = _after_hashes(getattr(sample, self.answer)), str(sample.text)
        if self.by == "text":
            found = boxed(text)
            return float(found is not None and _number_or_text(found) == _number_or_text(boxed(expected) or expected))
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that its own time limit is off: ours rings again.
        try:
            with _at_most(self.timeout_s):
                gold = parse(expected if boxed(expected) else rf"\boxed{{{expected}}}", parsing_timeout=None)
                return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))
        except _TooLong:
            return 0.0


class _TooLong(BaseException):
    """The time of `_at_most` is over. An `except Exception` of a library does not keep it."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` on the main thread after `seconds`, and again each 0.1 s until the block has ended.

    Once is not enough: Python drops an exception that a signal raises in a callback of a weak reference or in `__del__`.
    """
    is_over = False

    def ring(_signal: int, _frame: object) -> None:
        if not is_over:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            is_over = True
    finally:  # Also if it rang between the end of the block and the line above.
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces are closed; None if there is none.

    >>> boxed(r"\boxed{1} or \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    found = None
    for match in re.finditer(r"\\(?:f?boxed)\s*\{", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found = text[match.end() : end - 1] if depth == 0 else found
    return found


def _plain(value: object, ignore_case: bool) -> str:
    text = str(value).strip()
    return text.casefold() if ignore_case else text


def _after_hashes(value: object) -> str:
    return str(value).rpartition("####")[2].strip()


def _final(value: object) -> str | Fraction:
    return _number_or_text(_after_hashes(value))


def _number_or_text(value: str) -> str | Fraction:
    """A number, however it is written, or the text without white space, dollars and a full stop."""
    text = re.sub(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"\1/\2", value)
    text = re.sub(r"\\[,;!% ]|[\s$]|(?<=\d),(?=\d{3})", "", text).rstrip(".")
    try:
        return Fraction(text) if len(text) < 100 and not re.search(r"[eE_]", text) else text
    except (ValueError, ZeroDivisionError):
        return text


# ---- form and length


@final
@dataclass(frozen=True)
class Format(SampleReward):
    """1 if the whole response has the form of `pattern`, a regular expression in which `.` matches line ends too.

    >>> from types import SimpleNamespace as Row
    >>> Format()(Row(text="<think>2 and 2</think>\\n<answer>4</answer>")), Format()(Row(text="4"))
    (1.0, 0.0)
    """

    pattern: str = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"

    def __call__(self, sample: Sample) -> float:
        return float(re.fullmatch(self.pattern, str(sample.text), re.DOTALL) is not None)


@final
@dataclass(frozen=True)
class JsonSchema(SampleReward):
    """1 if the response is JSON, alone or as its last fenced block, and fits a JSON schema.

    Args:
        schema: a JSON schema, checked by the package jsonschema (`pip install 'm2flow[rewards]'`); None: any JSON.

    >>> from types import SimpleNamespace as Row
    >>> JsonSchema()(Row(text='Here: ```json\\n{"a": 1}\\n```')), JsonSchema()(Row(text="{a: 1}"))
    (1.0, 0.0)
    """

    schema: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.schema is None:
            return
        if importlib.util.find_spec("jsonschema") is None:
            raise MissingExtra("JsonSchema with a schema needs the package jsonschema", now="Run: pip install 'm2flow[rewards]'.")
        from jsonschema import SchemaError, validators

        try:
            validators.validator_for(self.schema).check_schema(self.schema)
        except SchemaError as error:
            raise OptionError(
                f"JsonSchema: the schema is none: {error.message}",
                now="Mend the schema where it says; it follows JSON Schema draft 2020-12.",
            ) from None

    def __call__(self, sample: Sample) -> float:
        try:
            value = json.loads(fenced(str(sample.text), "json"))
        except (ValueError, RecursionError):
            return 0.0
        if self.schema is None:
            return 1.0
        from jsonschema import validators

        return float(validators.validator_for(self.schema)(self.schema).is_valid(value))


def fenced(text: str, *languages: str) -> str:
    """The last fenced block of a text, of one of these languages or of none; the text itself if it has no block.

    >>> fenced("So:\\n```python\\nx = 1\\n```\\nDone.", "python")
    'x = 1\\n'
    """
    named = "|".join(map(re.escape, languages))
    blocks = re.findall(rf"```(?:{named})?[ \t]*\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else text


@final
@dataclass(frozen=True)
class Length(SampleReward):
    """Minus one for each `per` generated tokens beyond `free`: a price of length.

    >>> from types import SimpleNamespace as Row
    >>> Length(per=100, free=50)(Row(num_tokens=75)), Length(per=100)(Row(num_tokens=0))
    (-0.25, 0.0)
    """

    per: float = 1000.0
    free: int = 0

    def __post_init__(self) -> None:
        check_number("per", self.per, above=0)
        check_count("free", self.free, least=0)

    def __call__(self, sample: Sample) -> float:
        return -max(0, sample.num_tokens - self.free) / self.per if sample.num_tokens > self.free else 0.0


@final
@dataclass(frozen=True)
class Overlong(SampleReward):
    """Soft punishment of overlong responses: 0 up to `max_tokens - buffer` generated tokens, then linear down to -1 at `max_tokens`.

    Source:
        Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13.

    >>> from types import SimpleNamespace as Row
    >>> [Overlong(100, buffer=20)(Row(num_tokens=length)) for length in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        check_count("buffer", self.buffer)

    def __call__(self, sample: Sample) -> float:
        over = sample.num_tokens - (self.max_tokens - self.buffer)
        return -min(1.0, over / self.buffer) if over > 0 else 0.0


@final
@dataclass(frozen=True)
class Repetition(SampleReward):
    """Minus the share of the response's n-grams of words that occurred in it before: 0 without repetition, towards -1 for a loop.

    >>> from types import SimpleNamespace as Row
    >>> Repetition(n=2)(Row(text="a b a b a")), Repetition()(Row(text="all is well"))
    (-0.5, 0.0)
    """

    n: int = 3

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def __call__(self, sample: Sample) -> float:
        words = str(sample.text).lower().split()
        grams = Counter(zip(*(words[i:] for i in range(self.n)), strict=False))
        total = grams.total()
        return (len(grams) - total) / total if total > len(grams) else 0.0


@final
@dataclass(frozen=True)
class Language(SampleReward):
    """The share of the response's letters that are of a script: 1 if no letter is of another, also where there are none.

    It keeps a model in the language of its prompts. Languages of one script are not told apart; that takes a package such as lingua in
    a function of your own.

    Args:
        script: as Unicode names it in its names of letters: `latin`, `cyrillic`, `cjk`, `hiragana`, `arabic`; several count as one.

    Source:
        DeepSeek-AI 2025, DeepSeek-R1, arXiv:2501.12948, section 2.3.2, whose reward is the share of words.

    >>> from types import SimpleNamespace as Row
    >>> Language()(Row(text="so 2 + 2 = 4")), Language()(Row(text="\u0434\u0430, yes"))
    (1.0, 0.6)
    >>> Language(("cjk", "hiragana", "katakana"))(Row(text="2\u3064\u306e\u6570"))
    1.0
    """

    script: str | tuple[str, ...] = "latin"

    def __post_init__(self) -> None:
        for script in self._scripts:
            check_text("script", script)
            if script.upper() not in _known_scripts():
                now = did_you_mean(script, [name.lower() for name in _known_scripts()], "Names are those of Unicode: latin, cyrillic, cjk.")
                raise OptionError(f"Language: no letter is of the script {script!r}", now=now)

    @property
    def _scripts(self) -> tuple[str, ...]:
        return self.script if isinstance(self.script, tuple) else (self.script,)

    def __call__(self, sample: Sample) -> float:
        # Letters as they are read: full-width and mathematical ones are those that they stand for.
        letters = Counter(letter for letter in unicodedata.normalize("NFKC", str(sample.text)) if letter.isalpha())
        wanted = {script.upper() for script in self._scripts}
        own = sum(count for letter, count in letters.items() if _script_of(letter) in wanted)
        return own / letters.total() if letters else 1.0


def _script_of(letter: str) -> str:
    """The first word of a letter's name, as in LATIN SMALL LETTER A; empty without a name."""
    return unicodedata.name(letter, "").partition(" ")[0]


@functools.cache
def _known_scripts() -> frozenset[str]:
    return frozenset(_script_of(chr(code)) for code in range(0x20000) if chr(code).isalpha()) - {""}


# ---- unit tests of code


@final
@dataclass(frozen=True)
class UnitTests(SampleReward):
    """The share of the row's tests that the response's Python code passes; each test runs in a process of its own.

    The code is the last fenced block of the response, or all of it. Forms of the column:

        "assert add(1, 2) == 3"                              statements, run after the code; or a list of them (MBPP)
        "def check(candidate): ..."                          with a column `entry_point` (HumanEval): check(add) is run
        {"inputs": ["1 2"], "outputs": ["3"]}                standard input and expected output (APPS, TACO), or the same as JSON

    Args:
        test: the column with the tests.
        all_or_nothing: 1 if all pass, else 0; the first that fails is the last to run.
        timeout_s: of one test, seconds; `Reward(..., timeout_s=)` bounds all tests of a sample.
        memory_mb: address space of each of its processes, MiB.
        packages: let the code import installed packages; by default the standard library alone.
        box: `required` refuses to run where the kernel does not allow the whole box; `limits` does with limits alone.

    Contained by limits: endless loops and sleeps (killed, with what they started), CPU seconds, memory of a process, sizes of files
    and of the output, core dumps, standard streams, environment variables (none are passed), and the working directory (a temporary one).
    Contained by the rest of the box (`m2flow.sandbox`), which is namespaces of Linux, a root of its own and a filter of system calls: the
    network; signals to, and the sight of, other processes; reading of files other than Python's own and the system's programs and
    libraries, and writing anywhere but in the working directory; the number of processes; and, where the host has control groups, the sum
    of their memory.

    Not contained: a fault of the kernel in calls that are not refused. Ending the process early passes no test. Outputs, and what an
    `assert` compares with a literal by `==`, are compared outside of the code's process, which is not told what is right. Where a test has
    other asserts (`assert isclose(f(2), 0.5)`, one in a loop), it runs in that process, where a solution that looks for it can cheat.

    >>> from types import SimpleNamespace as Row
    >>> right = "```python\\ndef add(a, b):\\n    return a + b\\n```"
    >>> UnitTests(box="limits")(Row(text=right, test=["assert add(1, 2) == 3", "assert add(1, 2) == 4"]))
    0.5
    """

    test: str = "test"
    all_or_nothing: bool = False
    timeout_s: float = 5.0
    memory_mb: int = 512
    packages: bool = False
    box: Literal["required", "limits"] = "required"

    def __post_init__(self) -> None:
        check_choice("box", self.box, ("required", "limits"), of="UnitTests")
        check_number("timeout_s", self.timeout_s, above=0)
        check_count("memory_mb", self.memory_mb, least=64)

    def __call__(self, sample: Sample) -> float:
        checks = self._checks(fenced(str(sample.text), "python", "py", "python3"), sample)
        if not checks:
            raise OpError(
                f"UnitTests: the column {self.test!r} has no test", now="Fill the column in, or leave such rows out of the dataset."
            )
        return float(all(check() for check in checks)) if self.all_or_nothing else sum(check() for check in checks) / len(checks)

    def _checks(self, code: str, sample: Sample) -> list[Callable[[], bool]]:
        """What is to be run of the code, one for each test of the row."""
        found = getattr(sample, self.test)
        if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                found = json.loads(found)
        if isinstance(found, Mapping):
            cases = zip(found["inputs"], found["outputs"], strict=True)
            return [functools.partial(self._prints, code, str(given), str(expected)) for given, expected in cases]
        tests = list(found) if isinstance(found, list) else [str(found)]
        entry = getattr(sample, "entry_point", None) if "def check(" in str(found) else None
        return [functools.partial(self._holds, code, f"{test}\ncheck({entry})" if entry else str(test)) for test in tests]

    def _holds(self, code: str, test: str) -> bool:
        program, passes = _tested(code, test)
        said = self._run(program, "")
        return said is not None and passes(said)

    def _prints(self, code: str, given: str, expected: str) -> bool:
        said = self._run(code, given)
        return said is not None and _lines(said) == _lines(expected)

    def _run(self, program: str, given: str) -> str | None:
        how = {"wall_s": self.timeout_s, "memory": self.memory_mb << 20, "box": self.box == "required", "packages": self.packages}
        return run_boxed(program, given, how)


@final
@dataclass(frozen=True)
class ReasoningGym(SampleReward):
    """What a task of reasoning-gym says of the response, 0 to 1; the rows are those of `Dataset.reasoning_gym(task)`.

    Several tasks evaluate the answer as Python, so that each is scored in the box of `UnitTests`, where the package is at hand.
    The verdict is made in the process that evaluates, where code of an answer's could forge it. So none runs: in every task a text that is
    to be evaluated is refused beforehand, unless it is a value: literals, collections, operators, and sympy's symbols, constants,
    functions and other classes of expressions, called with values. Attributes, subscripts, other names, and programs are refused. The
    task then scores the answer as one that it can't parse. What a task gives a value that is no solution, such as an integral that is
    left to sympy, stays the task's own word. An answer that makes the task fail or takes too long counts 0; a task that can't begin in
    the box, as it lacks a file, is an error.

    Args:
        pattern: finds the answer: the last match's first group; without a match the whole response is the answer.
        timeout_s, memory_mb, box: as `UnitTests`.

    >>> ReasoningGym("chain_sum").found("So <answer> 4 </answer>.")
    '4'
    """

    task: str
    pattern: str = r"(?s)<answer>(.*?)</answer>"
    timeout_s: float = 20.0
    memory_mb: int = 4096
    box: Literal["required", "limits"] = "required"

    def __post_init__(self) -> None:
        check_text("task", self.task)
        check_choice("box", self.box, ("required", "limits"), of="ReasoningGym")

    def __call__(self, sample: Sample) -> float:
        how = {"wall_s": self.timeout_s, "memory": self.memory_mb << 20, "box": self.box == "required", "packages": True}
        word = secrets.token_hex(16)
        program = (
            f"{inspect.getsource(_evaluate_values_alone)}\nimport ast, json, os, sys\nfrom reasoning_gym import get_score_answer_fn\n"
            "task, answer, entry = json.loads(sys.stdin.read())\n"
            "if (literal := entry.pop('literal', None)) is not None:\n    entry['metadata'] = ast.literal_eval(literal)\n"
            "try:\n    scorer = get_score_answer_fn(task)\n"
            f"except BaseException as error:\n    os.write(1, f'\\n{word} no {{error!r}}\\n'.encode())\n    sys.exit()\n"
            "_evaluate_values_alone()\n"
            f"os.write(1, f'\\n{word} {{float(scorer(answer, entry))}}\\n'.encode())\n"
        )
        given = json.dumps([self.task, self.found(str(sample.text)), sample.entry])
        try:
            said = run_boxed(program, given, {**how, "preload": ("reasoning_gym",)})
        except MissingExtra:
            raise MissingExtra("ReasoningGym needs the package reasoning-gym", now="Run: pip install 'm2flow[smollm]'.") from None
        if failed := re.search(rf"^{word} no (.*)$", said or "", re.MULTILINE):
            raise OpError(f"reasoning-gym can't score {self.task!r} in the box: {failed[1]}")
        scored = re.search(rf"^{word} (\S+)$", said or "", re.MULTILINE)
        return float(scored[1]) if scored else 0.0

    def found(self, text: str) -> str:
        """The answer in a response."""
        matches = re.findall(self.pattern, text)
        return str(matches[-1] if matches else text).strip()


def _evaluate_values_alone() -> None:
    """Refuse, from now on and before it runs, all code in this process but that of imported modules and of texts that are values.

    `eval` is replaced by one that reads the text first; what does not come from it, an audit hook of the interpreter refuses, which can't
    be taken out. It runs in the box from its source alone.
    """
    import ast
    import builtins
    import sys

    parts: tuple[Any, ...] = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.expr_context, ast.Call)
    parts += (ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop)
    evaluate, star = builtins.eval, compile("from sympy import *", "", "exec")  # sympy's parser runs the latter.
    passed: list[object] = []

    def is_value(found: Any) -> bool:
        sympy = sys.modules.get("sympy")
        basic = getattr(sympy, "Basic", ())
        known = [getattr(sympy, name, None) for name in ("S", "sqrt", "cbrt", "root", "real_root", "integrate", "diff", "expand", "factor")]
        known += [abs, pow, round, sum, min, max]
        return isinstance(found, basic) or (isinstance(found, type) and issubclass(found, basic)) or any(found is one for one in known)

    def read(source: Any, globals: Any = None, locals: Any = None) -> object:
        caller = sys._getframe(1)
        if locals is None:
            locals = caller.f_locals if globals is None else globals
        globals = caller.f_globals if globals is None else globals
        if isinstance(source, str):
            tree = ast.parse(source.lstrip(" \t"), mode="eval")
            for part in ast.walk(tree):
                scopes = [one for one in (locals, globals, vars(builtins)) if isinstance(part, ast.Name) and part.id in one]
                if not isinstance(part, parts) or (scopes and not is_value(scopes[0][part.id])):
                    raise SyntaxError(f"the text is no value: {ast.dump(part):.80}")
            source = compile(tree, "<answer>", "eval")
            passed.append(source)
        return evaluate(source, globals, locals)

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("exec", "function.__new__", "pickle.find_class") or args[0] == star or any(args[0] is one for one in passed):
            return
        frame: Any = sys._getframe(1)
        while frame is not None:  # A module's code runs as it is imported; sympy.polys.monomials makes functions of numbers alone.
            if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_globals.get("__name__") == "sympy.polys.monomials":
                return
            frame = frame.f_back
        raise SyntaxError("only values are evaluated here")

    builtins.eval = read
    sys.addaudithook(refuse)


def _canonical(value: Any) -> str:
    """A text that two plain values share exactly where they are equal in Python. It runs in the box, too, from its source alone.

    Raises:
        TypeError: it is no number, text, None, or collection of such.
    """
    from collections.abc import Mapping, Set
    from numbers import Number

    if value is None or isinstance(value, str | bytes):
        return ascii(value if value is None else str.__str__(value) if isinstance(value, str) else bytes(value))
    if isinstance(value, Number):
        kinds: tuple[Any, ...] = (int, float, complex)
        for kind in kinds:
            try:
                if (same := kind(value)) == value:
                    return hex(same) if isinstance(same, int) else repr(same)
            except (OverflowError, ValueError, TypeError):
                continue
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_canonical(key)}: {_canonical(one)}" for key, one in value.items())) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, list | tuple):
        return ("list(" if isinstance(value, list) else "tuple(") + ", ".join(map(_canonical, value)) + ")"
    if hasattr(value, "item"):  # A number of numpy's.
        return _canonical(value.item())
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _tested(code: str, test: str) -> tuple[str, Callable[[str], bool]]:
    """A program that runs a test's asserts after the code, and whether they held, by what it prints: what it computes, which is compared
    here, or else a word at its end."""
    word = secrets.token_hex(16)
    if (found := _compared(test, word)) is None:
        return f"{code}\n\n{test}\n\nimport os as _os\n_os.write(1, {f'{chr(10)}{word}'.encode()!r})\n", lambda said: word in said
    statements, expected = found
    notes = "".join(f"{one}\n" for one in (*expected, "end"))
    return f"{code}\n\n{statements}", lambda said: said.count(word) == 1 and said.partition(f"{word}\n")[2].startswith(notes)


def _compared(test: str, word: str) -> tuple[str, list[str]] | None:
    """A test whose asserts all compare with literals: statements that print the other sides after a word, and what they should be.

    None: it has other asserts, or none.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    checks = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "check"]
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "check"]
    is_called_once = len(checks) == len(calls) == 1 and not any(isinstance(one, ast.Return | ast.Yield) for one in ast.walk(checks[0]))
    expected: list[str] = []
    for at, body in enumerate([tree.body, *([checks[0].body] if is_called_once and not _has_asserts(tree.body) else [])]):
        for place, statement in enumerate(body):
            sides = _sides(statement.test) if isinstance(statement, ast.Assert) else None
            if sides is not None:
                body[place] = ast.parse(f"_note_{word}({ast.unparse(sides[0])})").body[0]
                expected.append(sides[1])
        if at == 0 and expected:
            break
    if not expected or any(isinstance(one, ast.Assert) for one in ast.walk(tree)):
        return None
    source = inspect.getsource(_canonical)
    begin = f"import builtins as _b_{word}\n_box_{word} = {{}}\n_b_{word}.exec({source!r}, _box_{word})\n_notes_{word} = []\n"
    begin += f"def _note_{word}(value):\n    _notes_{word}.append(_box_{word}['_canonical'](value))\n"
    end = f"import os as _os_{word}\n_os_{word}.write(1, '\\n'.join(['', '{word}', *_notes_{word}, 'end', '']).encode())\n"
    return f"{begin}\n{ast.unparse(tree)}\n{end}", expected


def _has_asserts(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(one, ast.Assert) for one in body)


def _sides(test: ast.expr) -> tuple[ast.expr, str] | None:
    """Find the sides of `computed == literal`, either way round: the first, and the second's text as `_canonical`. None: it is none."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    for computed, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return computed, _canonical(ast.literal_eval(literal))
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run_boxed(program: str, given: str, how: Mapping[str, Any]) -> str | None:
    """Run a Python program in the box of `UnitTests`. Returns what it printed; None if it failed or took too long.

    Args:
        how: `wall_s`, `memory` (bytes), `box` (whether limits alone will not do), `packages`, and `preload`, modules at hand.
    Raises:
        EngineError: this machine can't make the box.
    """
    result = run_program(
        program,
        given,
        tier="box" if how["box"] else "fork",
        wall_s=how["wall_s"],
        memory_mb=how["memory"] >> 20,
        packages=how["packages"],
        preload=how.get("preload", ()),
        output_bytes=16 << 20,
        shows_proc=False,
    )
    return result.text if result.is_ok else None


# ---- over HTTP


@final
@dataclass(frozen=True)
class LlmJudge(SampleReward):
    """What a language model behind an OpenAI-compatible URL says of the response: a number, scaled to 0..1.

    Args:
        url: up to `/v1`. model: its name there.
        prompt: what is asked, with `{prompt}`, `{text}` and other columns of the sample in braces.
        pattern: finds the verdict in the reply: the last match's first group, a number. best: the verdict that counts 1.
        temperature, max_tokens: of the judge.
        key: the environment variable that holds the API key, on the host of the worker; without one, no key is sent.
        retries: further tries after a refusal for load or a fault of the server or the network, after a growing pause.
        timeout_s: of one try, seconds.
        cache: a directory for replies, by what was asked. A resumed or repeated run then has the same verdicts. Each host has its own.
    Raises:
        OpError: no reply, or none with a verdict. `Reward(..., on_error=0.0)` counts such samples instead.

    >>> judge = LlmJudge("http://localhost:8000/v1", "judge", prompt="Rate 0 to 10: {text}")
    >>> from types import SimpleNamespace as Row
    >>> judge.asked(Row(text="Well."))["messages"]
    [{'role': 'user', 'content': 'Rate 0 to 10: Well.'}]
    >>> judge.verdict("Clear, but short. Rating: 7")
    0.7
    """

    url: str
    model: str
    prompt: str = "Question:\n{prompt}\n\nAnswer:\n{text}\n\nRate the answer from 0 (wrong) to 10 (perfect). End with the rating alone."
    pattern: str = r"(\d+(?:\.\d+)?)"
    best: float = 10.0
    temperature: float = 0.0
    max_tokens: int = 512
    key: str = "OPENAI_API_KEY"
    retries: int = 4
    timeout_s: float = 60.0
    cache: str | None = None

    def __post_init__(self) -> None:
        _check_http(self.url, self.retries, self.timeout_s)
        check_number("best", self.best, above=0)

    def __call__(self, sample: Sample) -> float:
        asked = self.asked(sample)
        headers = {"Authorization": f"Bearer {os.environ[self.key]}"} if os.environ.get(self.key) else {}
        url = f"{self.url.rstrip('/')}/chat/completions"
        reply = _cached(self.cache, {"url": url, **asked}, lambda: _post(url, asked, headers, self.retries, self.timeout_s))
        try:
            said = str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise OpError(
                f"the judge at {url} gave no message: {reply!r:.200}",
                now="Check the judge's address and model: it must speak OpenAI's chat API.",
            ) from None
        return self.verdict(said)

    def asked(self, sample: Sample) -> dict[str, Any]:
        """The request's body."""
        content = re.sub(r"\{(\w+)\}", lambda match: str(getattr(sample, match[1])), self.prompt)
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "temperature": self.temperature, "max_tokens": self.max_tokens}

    def verdict(self, said: str) -> float:
        """The number in a reply, scaled."""
        found = re.findall(self.pattern, said)
        try:
            return min(1.0, max(0.0, float(found[-1]) / self.best))
        except (IndexError, ValueError, TypeError):
            raise OpError(f"the judge's reply has no verdict: {said!r:.200}", now="Change prompt= or pattern=.") from None


@final
@dataclass(frozen=True)
class Remote(SampleReward):
    """What a server of your own says of the response.

    It gets `POST url` with the JSON `{"text": ..., "prompt": ..., further columns}`, and answers with a number, or with `{"reward": ...}`
    and parts of it.

    Args:
        columns: of the sample, what is sent.
        retries, timeout_s, cache: as `LlmJudge`.

    >>> from types import SimpleNamespace as Row
    >>> Remote("http://localhost:9000/score", columns=("text", "answer")).asked(Row(text="4", answer="4"))
    {'text': '4', 'answer': '4'}
    """

    url: str
    columns: tuple[str, ...] = ("prompt", "text")
    retries: int = 4
    timeout_s: float = 60.0
    cache: str | None = None

    def __post_init__(self) -> None:
        _check_http(self.url, self.retries, self.timeout_s)

    def __call__(self, sample: Sample) -> object:
        asked = self.asked(sample)
        return _cached(self.cache, {"url": self.url, **asked}, lambda: _post(self.url, asked, {}, self.retries, self.timeout_s))

    def asked(self, sample: Sample) -> dict[str, Any]:
        """The request's body."""
        return {name: getattr(sample, name) for name in self.columns}


_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


def _check_http(url: str, retries: int, timeout_s: float) -> None:
    check_text("url", url)
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"url is {url!r}; it begins with http:// or https://")
    check_count("retries", retries, least=0)
    check_number("timeout_s", timeout_s, above=0)


def _post(url: str, body: Mapping[str, object], headers: Mapping[str, str], retries: int, timeout_s: float) -> Any:
    """Post JSON and return the JSON that comes back, after up to so many retries."""
    data = json.dumps(body).encode()
    for attempt in range(retries + 1):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why, asked_s = f"status {error.code}: {error.read(200).decode(errors='replace')}", error.headers.get("Retry-After", "")
            if error.code not in _RETRIED:
                raise OpError(f"{url} refused: {why}", now="Check the request's model and key, and the server's limits.") from None
            pause_s = min(float(asked_s), _LONGEST_PAUSE_S) if re.fullmatch(r"\d+(\.\d+)?", asked_s) else pause_s
        except (OSError, ValueError) as error:
            why = described(error)
        if attempt < retries:
            time.sleep(pause_s)
    raise OpError(f"{url} gave no answer in {retries + 1} tries; the last was {why}", now="Is the server up? See retries= and timeout_s=.")


def _cached(folder: str | None, asked: Mapping[str, object], ask: Callable[[], Any]) -> Any:
    """The answer in the cache, or a new one, which is put there whole or not at all."""
    if folder is None:
        return ask()
    place = Path(folder) / (hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest() + ".json")
    with contextlib.suppress(OSError, ValueError):
        return json.loads(place.read_text())
    answer = ask()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
        json.dump(answer, file)
    os.replace(file.name, place)
    return answer


# ---- weighted sums


@final
@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum of rewards, with each of them as a part: what `Reward.sum` makes, as one function of a sample.

    >>> from types import SimpleNamespace as Row
    >>> half_price = WeightedSum((("right", ExactMatch(), 1.0), ("length", Length(per=10), 0.5)))
    >>> half_price(Row(text="4", answer="4", num_tokens=2))
    {'reward': 0.9, 'right': 1.0, 'length': -0.2}
    """

    parts: tuple[tuple[str, Callable[[Sample], object], float], ...]

    def __call__(self, sample: Sample) -> object:
        found = [function(sample) for _, function, _ in self.parts]
        return self._later(found) if any(inspect.isawaitable(one) for one in found) else self._total(found)

    async def _later(self, found: Sequence[object]) -> dict[str, float]:
        return self._total([await one if isinstance(one, Awaitable) else one for one in found])

    def _total(self, found: Sequence[object]) -> dict[str, float]:
        values = [_number(name, one) for (name, _, _), one in zip(self.parts, found, strict=True)]
        total = sum(weight * value for (_, _, weight), value in zip(self.parts, values, strict=True))
        return {"reward": total, **{name: value for (name, _, _), value in zip(self.parts, values, strict=True)}}


def _number(name: str, found: object) -> float:
    value = found.get("reward") if isinstance(found, Mapping) else getattr(found, "reward", found)
    if not isinstance(value, int | float):
        raise OpError(f"the part {name} of a sum gave {found!r:.60}, which is no number", now="Have each part return a number.")
    return float(value)
