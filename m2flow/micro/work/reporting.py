"""What a worker says of rows that it has made, and when: of a function's, while the next function already runs.

    task done -> its rows in the store -> next task begins -> segment, neighbours, `Finished`

A chain of calls on one worker waits for a task's rows alone. What else has to be done about them takes as long as a small function, so it
waits until the next one has begun, or until there is none that could begin at once. It fails as the task that it is about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.record.decisions import stretches_of
from m2flow.micro.scheduling.staleness import is_time_dependent
from m2flow.micro.work import performing
from m2flow.micro.work.reward_parts import Parts
from m2flow.samples import Batch


@final
class Reports:
    """Of tasks that are done, and of which nobody was told yet."""

    def __init__(self, attempt: Callable[[m.Task, Callable[[], None]], None]) -> None:
        """
        Args:
            attempt: does something about a task, and reports the task as failed if that fails.
        """
        self._attempt = attempt
        self._waiting: deque[tuple[m.Task, Callable[[], None]]] = deque()

    @property
    def are_due(self) -> bool:
        """Whether somebody waits to be told."""
        return bool(self._waiting)

    def later(self, task: m.Task, report: Callable[[], None]) -> None:
        """Have this done at the next `make`."""
        self._waiting.append((task, report))

    def make(self) -> None:
        """All that wait, in the order of their tasks."""
        while self._waiting:
            self._attempt(*self._waiting.popleft())


def finished(
    task: int,
    call: Call,
    rows: Batch,
    place: tuple[str, int, int, int] | None,
    dropped: Sequence[int],
    parts: Sequence[Parts] = (),
    *,
    ends: bool,
) -> m.Finished:
    """The message about rows of a task.

    Args:
        dropped: samples of the task that became no rows.
        parts: of each row's reward, if any has some.
        ends: it has no others.
    """
    has_texts = call.engine == "rollout" and len(rows) > 0
    texts = [_showable(str(rows.ragged(name).item(0))) for name in ("prompt", "text")] if has_texts else []
    return m.Finished(
        task,
        call.ordinal,
        rows.ids.tolist(),
        performing.num_tokens_of(rows),
        performing.num_generated_of(rows),
        [float(v) for v in rows.dense("reward")] if performing.gives_reward(call) else [],
        performing.finish_of(rows),
        texts,
        place,
        list(dropped),
        stretches_of(rows) if is_time_dependent(call) else [],
        ends,
        list(parts),
    )


def _showable(text: str) -> str:
    """The text without lone surrogates, which a message can't carry. Only what is shown is changed."""
    return text.encode("utf-8", "replace").decode()
