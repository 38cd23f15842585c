"""What a random program does: its statements in the order in which Python would come to them.

Control flow is here; the calls that statements make are in `program_calls`, and what a program counts for itself in `account`.
"""

from __future__ import annotations

from m2flow.macro.ops import steps
from m2flow.testing.account import Account
from m2flow.testing.program_calls import Calls
from m2flow.testing.programs import Lag, Leave, Look, OnStep, Program, Repeat, Statement


class _Leave(Exception):
    def __init__(self, how: str) -> None:
        self.how = how


class Interpreter:
    """Makes the calls of a program, inside a flow."""

    def __init__(self, program: Program, account: Account) -> None:
        self._program = program
        self._account = account

    def run(self) -> None:
        program = self._program
        self._account.begin()
        self._calls = Calls(program, self._account)
        self._do_all(program.before, guarded=True)
        self._account.loop_begins()
        for step in steps(program.num_steps):
            self._calls.step = step
            try:
                self._do_all(program.body)
            except _Leave as left:
                if left.how == "break":
                    break
        self._calls.step = -1
        self._do_all(program.after, guarded=True)
        self._calls.log_values()

    def _do_all(self, statements: tuple[Statement, ...], *, guarded: bool = False) -> None:
        try:
            for statement in statements:
                self._do(statement)
        except _Leave:
            if not guarded:
                raise

    def _do(self, statement: Statement) -> None:
        calls = self._calls
        match statement:
            case Look(what=what, which=which, then=then, otherwise=otherwise):
                self._do_all(then if calls.is_odd(what, which) else otherwise)
            case Lag(metrics=which, steps=ago, then=then, otherwise=otherwise):
                self._do_all(then if calls.is_none_or_odd(which, ago) else otherwise)
            case OnStep(body=body):
                if calls.step % 2:
                    self._do_all(body)
            case Repeat(times=times, body=body, until=until):
                for turn in range(times):
                    self._do_all(body)
                    if until and calls.is_odd("metric" if turn % 2 else "mean", 0):
                        break
            case Leave(how=how):
                raise _Leave(how)
            case _:
                calls.make(statement)
