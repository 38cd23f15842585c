"""How close thousands of episodes with waiting tools come to a bound that no schedule can beat, and to the same loop in plain asyncio.

    python benchmarks/agents.py [--episodes 2000] [--slots 256] [--step-ms 40] [--cache TOKENS] [--wait-s 1] [--rounds 1]
    python benchmarks/agents.py --sglang .venv-sglang/bin/python --episodes 128 --slots 16 --cache 20000 --rounds 3

Each episode has two to six turns of 8 to 128 tokens (geometric, mean 32), and between two turns a tool that waits for an exponential time.
The engine takes a given time, as an inference server does (`sides/paced.py`), and computes nothing: what a run takes beyond it is the
runtime's. The bound is the longest of

    decode   tokens / slots * step + tokens of messages * prefill, of an engine whose batch is always full and whose cache holds everything
    chain    the longest episode, alone on the engine
    tools    seconds of tools / slots of tools

To reach it one must know how long each episode will be. `orders` has what runs without any cost of their own would take: with turns in the
order in which they come (`first come`), those of episodes with the fewest turns so far first (`fewest turns`), and, which nobody can know,
those of episodes with the longest rest first (`longest rest`). The plain loop has the same engine on a thread, the same messages, lengths
and waits, and keeps no record of anything. One after the other in one run, each round; the time is from the first request to the last
answer. `cpu_ms_a_turn` is processor time, little changed by other load: of the worker's process, of its thread that decodes and writes
(the rest is the event loop of the agents and the engine), of the controller with its start, and of the plain loop. Prints JSON.

With `--sglang` both have one SGLang server with a tiny random model on this machine's CPU (`sides/sglang_server.py`), in turns, and no
bound is known. Its cache is emptied before each. The plain loop plays twice: with as many requests at once as the server decodes
(`--slots`), and with each as it comes (`unlimited`). All must generate and read the same numbers of tokens. `cached_share` is the share of
the prompts' tokens that the server had in its prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import os
import platform
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sides.paced import PacedRollout, registered
from sides.sglang_server import END_OF_TURN, Played, Server, Turn, play, tiny_model

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, flow, log, tool
from m2flow.engines.contract import EngineSettings, Generated, Language, Request
from m2flow.observe.store import read_spans
from m2flow.recipe import Model, Sampling
from m2flow.runner.run import Run
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings
from m2flow.testing.fakes import FAKE_EOS, FakeLanguage

_MEAN, _LEAST, _MOST = 32, 8, 128
_RESULT = "the result of the tool, a line of some length"
_NUM_TOOL_SLOTS = 1000
_tool_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


class Step(NamedTuple):
    """A turn, and the wait after it."""

    num_tokens: int
    wait_s: float


def turns_of(number: int, wait_s: float) -> list[Step]:
    """What an episode does, by its number alone."""
    rng = random.Random(number)
    num_turns = rng.randint(2, 6)
    lengths = [min(max(round(rng.expovariate(1 / _MEAN)), _LEAST), _MOST) for _ in range(num_turns)]
    return [Step(length, rng.expovariate(1 / wait_s) if at < num_turns - 1 else 0.0) for at, length in enumerate(lengths)]


def question_of(number: int) -> str:
    return f"question {number}: " + "what is to be done about it, and in which order? " * 3


@tool(replay="pure", timeout_s=600)
async def wait(seconds: float) -> str:
    """Wait."""
    async with _tool_slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_NUM_TOOL_SLOTS)):
        await asyncio.sleep(seconds)
    return _RESULT


@agent
async def player(chat: Chat, row: Sample) -> float:
    number, wait_s = (float(part) for part in str(row.work).split())
    turns = turns_of(int(number), wait_s)
    for at, (num_tokens, _) in enumerate(turns):
        if at == 0:
            await chat.say(str(row.prompt), tools=[wait], max_tokens=num_tokens)
        else:
            await chat.reply([ToolCall("wait", {"seconds": turns[at - 1].wait_s})], max_tokens=num_tokens)
    return float(len(turns))


@flow
def episodes(num: int = 2000, wait_s: float = 1.5, model: str = "fake") -> None:
    policy = Policy(model)
    rows = Dataset([{"prompt": question_of(i), "work": f"{i} {wait_s}"} for i in range(num)])
    played = policy.rollout(player, rows.take(num), max_tokens=3000, max_turns=8)
    log(turns=played.num_turns.mean(), episodes=played.reward.sum() / played.reward.mean())


# ---- the same loop in plain asyncio


class Driver:
    """An engine on a thread of its own."""

    def __init__(self, engine: PacedRollout, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: dict[int, asyncio.Future[Generated]] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def ask(self, request: Request) -> Generated:
        answer = self._answers[request.id] = self._loop.create_future()
        self._asked.put(request)
        return await answer

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()
        self._engine.stop()

    def _run(self) -> None:
        while True:
            asked = [self._asked.get()] if not self._engine.num_unfinished else []
            while not self._asked.empty():
                asked.append(self._asked.get())
            if None in asked:
                return
            self._engine.add([request for request in asked if request is not None])
            if done := self._engine.step():
                self._loop.call_soon_threadsafe(self._answer, done)

    def _answer(self, done: list[Generated]) -> None:
        for made in done:
            self._answers.pop(made.id).set_result(made)


async def plain(engine: PacedRollout, num: int, wait_s: float) -> float:
    """Seconds of the episodes in plain asyncio."""
    driver, language = Driver(engine, asyncio.get_running_loop()), FakeLanguage()

    async def play(number: int) -> float:
        turns, packed = turns_of(number, wait_s), SampleId(0, number, 0).pack()
        messages = [{"role": "user", "content": question_of(number)}]
        context = language.encode_target(language.conversation(messages, [wait.description]))
        for at, (num_tokens, _) in enumerate(turns):
            if at:
                said = await wait.function(turns[at - 1].wait_s)
                bridge = language.conversation([{"role": "tool", "content": said}], ())
                context = [*context, FAKE_EOS, *language.encode_target(bridge)]
            made = await driver.ask(Request(packed, tuple(context), number * 8 + at, Sampling(num_tokens)))
            context += made.tokens.tolist()
        return float(len(turns))

    began = time.perf_counter()
    await asyncio.gather(*(play(number) for number in range(num)))
    took_s = time.perf_counter() - began
    driver.close()
    _tool_slots.clear()  # The next run pickles this module's agent, and an event loop is not for others.
    return took_s


# ---- through a run


class Ran(NamedTuple):
    """What a run took."""

    episodes_s: float
    """From the first episode's begin to the last one's end."""
    engine: dict[str, float]
    most_at_once: int
    controller_cpu_s: float
    """Processor seconds of this process, from the run's begin to its end."""


def planned(options: dict[str, float | int | str | bool], slots: int, num: int, wait_s: float, chunk: int | None, folder: Path) -> Ran:
    """A run of the flow."""
    told = folder / f"told-{time.time_ns()}.json"
    spec = ClusterSpec(
        placement="split", rollout=RolloutSpec(engine="paced", max_running=slots, chunk=chunk, options={**options, "told": str(told)})
    )
    run = Run(episodes, {"num": num, "wait_s": wait_s}, spec, RunSettings(runs_dir=str(folder)))
    began_s = time.process_time()
    run.execute()
    controller_cpu_s = time.process_time() - began_s
    spans = [span for span in read_spans(run.run_dir) if span.name == "sample"]
    if len(spans) != num:
        raise SystemExit(f"{len(spans)} episodes of {num} ended")
    edges = sorted([(span.start_ns, 1) for span in spans] + [(span.end_ns, -1) for span in spans])
    at_once = most = 0
    for _, by in edges:
        at_once += by
        most = max(most, at_once)
    took_s = (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
    return Ran(took_s, json.loads(told.read_text()), most, controller_cpu_s)


# ---- the same server for both


def on_server(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Rounds of a run and of the plain loops in turns, on one server."""
    model = tiny_model(folder / "model")
    with Server(model, args.sglang, args.slots, args.cache) as server:
        language = server.language
        played = [turns_on_server(language, number, args.wait_s) for number in range(args.episodes)]

        def plainly(slots: int | None) -> Played:
            found = asyncio.run(play(server.url, slots, played))
            _tool_slots.clear()
            return found

        sides = {
            "episodes": lambda: planned_on_server(server.url, model.path, args, folder),
            "plain": lambda: plainly(args.slots),
            "unlimited": lambda: plainly(None),
        }
        asyncio.run(play(server.url, args.slots, played[: args.slots]))  # The first requests to a server take longer.
        _tool_slots.clear()
        rounds = [round_on_server(sides, at) for at in range(args.rounds)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in ("plain_over_ours", "unlimited_over_ours")}
    return {**medians, "rounds": rounds}


def round_on_server(sides: Mapping[str, Callable[[], Played]], at: int) -> dict[str, Any]:
    """Each side once, another one first in each round."""
    load, names = os.getloadavg()[0], list(sides)
    order = names[at % len(names) :] + names[: at % len(names)]
    played = {name: sides[name]() for name in order}
    if len(sizes := {(one.num_tokens, one.num_prompt_tokens) for one in played.values()}) > 1:
        raise SystemExit(f"the sides did not generate and read the same numbers of tokens: {sizes}")
    ours = played["episodes"]
    told: dict[str, Any] = {"order": order, "num_tokens": ours.num_tokens, "num_prompt_tokens": ours.num_prompt_tokens}
    for name, one in played.items():
        told[f"{name}_s"] = round(one.seconds, 2)
        told[f"{name}_cached_share"] = round(one.num_cached / one.num_prompt_tokens, 3)
    ratios = {f"{name}_over_ours": round(played[name].seconds / ours.seconds, 3) for name in names if name != "episodes"}
    return {**told, **ratios, "load": round(load, 1)}


def turns_on_server(language: Language, number: int, wait_s: float) -> list[Turn]:
    """The turns of an episode, each with what the template puts before it."""
    turns = turns_of(number, wait_s)
    first = language.conversation([{"role": "user", "content": question_of(number)}], [wait.description])
    bridge = language.conversation([{"role": "tool", "content": _RESULT}], ())
    waits = [partial(asyncio.sleep, 0), *(partial(wait.function, turn.wait_s) for turn in turns[:-1])]
    texts = [first, *[END_OF_TURN + bridge] * (len(turns) - 1)]
    return [Turn(language.encode_target(text), turn.num_tokens, before) for text, turn, before in zip(texts, turns, waits, strict=True)]


def planned_on_server(url: str, model: str, args: argparse.Namespace, folder: Path) -> Played:
    """A run of the flow on a server that is there."""
    rollout = RolloutSpec(engine="sglang", max_running=args.slots, chunk=args.chunk, options={"url": url})
    options = {"num": args.episodes, "wait_s": args.wait_s, "model": model}
    run = Run(episodes, options, ClusterSpec(placement="split", device="cpu", rollout=rollout), RunSettings(runs_dir=str(folder)))
    run.execute()
    spans = read_spans(run.run_dir)
    samples = [span for span in spans if span.name == "sample"]
    if len(samples) != args.episodes:
        raise SystemExit(f"{len(samples)} episodes of {args.episodes} ended")
    turns = [span.attributes for span in spans if span.name == "turn"]
    num_tokens, num_prompt, num_cached = (
        sum(int(str(turn.get(name, 0))) for turn in turns) for name in ("num_tokens", "num_prompt_tokens", "num_cached")
    )
    seconds = (max(span.end_ns for span in samples) - min(span.start_ns for span in samples)) / 1e9
    return Played(seconds, num_tokens, num_prompt, num_cached)


def new_tokens() -> tuple[Callable[[int], int], int]:
    """Tokens of an episode's first prompt, by its number, and of what each tool's result adds."""
    language = FakeLanguage()

    def first(number: int) -> int:
        return len(language.encode_target(language.conversation([{"role": "user", "content": question_of(number)}], [wait.description])))

    return first, 1 + len(language.encode_target(language.conversation([{"role": "tool", "content": _RESULT}], ())))


def bound_of(num: int, wait_s: float, slots: int, options: dict[str, float | int | str | bool]) -> dict[str, float]:
    """The times that no schedule can beat."""
    step_s, prefill_s = float(options["step_ms"]) / 1e3, float(options["prefill_us"]) / 1e6
    first, bridge = new_tokens()
    tokens, new, num_turns, longest, waits = 0, 0, 0, 0.0, 0.0
    for number in range(num):
        turns = turns_of(number, wait_s)
        own_new = first(number) + (len(turns) - 1) * bridge
        own, own_wait_s = sum(turn.num_tokens for turn in turns), sum(turn.wait_s for turn in turns)
        tokens, new, num_turns, waits = tokens + own, new + own_new, num_turns + len(turns), waits + own_wait_s
        longest = max(longest, own * step_s + own_new * prefill_s + own_wait_s)
    decode_s = tokens / slots * step_s + new * prefill_s
    return {"tokens": tokens, "turns": num_turns, "decode_s": decode_s, "chain_s": longest, "tools_s": waits / _NUM_TOOL_SLOTS}


def orders(num: int, wait_s: float, slots: int, options: dict[str, float | int | str | bool]) -> dict[str, float]:
    """Seconds of the episodes by the order in which their turns enter the batch, where nothing but the engine takes time."""
    step_s, prefill_s, room = float(options["step_ms"]) / 1e3, float(options["prefill_us"]) / 1e6, int(options["cache"])
    played = [turns_of(number, wait_s) for number in range(num)]
    rest_s = [[sum(turn.num_tokens * step_s + turn.wait_s for turn in turns[at:]) for at in range(len(turns))] for turns in played]
    first, bridge = new_tokens()
    firsts = [first(number) for number in range(num)]

    def takes_s(rank: Callable[[int, int], float]) -> float:
        arrivals = itertools.count()
        waiting = [(rank(number, 0), next(arrivals), number, 0) for number in range(num)]
        heapq.heapify(waiting)
        running: list[tuple[int, int, int]] = []  # The step after which a turn is over, its episode, and which turn it is.
        away: list[tuple[float, int, int]] = []  # When a turn comes.
        now_s, num_steps, num_left = 0.0, 0, num
        contexts, num_kept = [0] * num, 0
        cache: OrderedDict[int, int] = OrderedDict()
        while num_left:
            while away and away[0][0] <= now_s:
                _, number, at = heapq.heappop(away)
                heapq.heappush(waiting, (rank(number, at), next(arrivals), number, at))
            num_new = 0
            while waiting and len(running) < slots:
                _, _, number, at = heapq.heappop(waiting)
                heapq.heappush(running, (num_steps + played[number][at].num_tokens, number, at))
                new, kept = bridge if at else firsts[number], cache.pop(number, 0)
                num_new += new + contexts[number] - kept
                contexts[number] += new
                num_kept += contexts[number] - kept
            if not running:
                now_s = away[0][0]
                continue
            now_s, num_steps = now_s + step_s + num_new * prefill_s, num_steps + 1
            while running and running[0][0] <= num_steps:
                _, number, at = heapq.heappop(running)
                contexts[number] += played[number][at].num_tokens
                num_kept += played[number][at].num_tokens
                cache[number] = contexts[number]
                if at + 1 == len(played[number]):
                    num_left -= 1
                else:
                    heapq.heappush(away, (now_s + played[number][at].wait_s, number, at + 1))
            while num_kept > room and cache:
                num_kept -= cache.popitem(last=False)[1]
        return now_s

    ranks: dict[str, Callable[[int, int], float]] = {
        "first come": lambda number, at: 0.0,
        "fewest turns": lambda number, at: at,
        "longest rest": lambda number, at: -rest_s[number][at],
    }
    return {name: round(takes_s(rank), 2) for name, rank in ranks.items()}


def main() -> None:
    """Measure, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--prefill-us", type=float, default=5.0)
    parser.add_argument("--cache", type=int, default=2_000_000, help="tokens; in the SGLang server each takes 4 KiB")
    parser.add_argument("--wait-s", type=float, default=1.0, help="mean wait in a tool")
    parser.add_argument("--chunk", type=int, help="of the cluster spec: most episodes at once in the instance")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sglang", metavar="PYTHON", help="an interpreter with SGLang: both have a server of it")
    args = parser.parse_args()
    hardware = {"cpu": platform.processor() or platform.machine(), "num_cpus": os.cpu_count(), "python": platform.python_version()}
    if args.sglang:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"hardware": hardware, "options": vars(args), **on_server(args, Path(folder))}, indent=2))
        return
    options: dict[str, float | int | str | bool] = {
        "step_ms": args.step_ms, "prefill_us": args.prefill_us, "cache": args.cache,
    }  # fmt: skip
    bound = bound_of(args.episodes, args.wait_s, args.slots, options)
    bound_s = max(bound["decode_s"], bound["chain_s"], bound["tools_s"])
    by_order = orders(args.episodes, args.wait_s, args.slots, options)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = registered(Path(folder))
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        for _ in range(args.rounds):
            load = os.getloadavg()[0]
            ran = planned(options, args.slots, args.episodes, args.wait_s, args.chunk, Path(folder))
            engine = PacedRollout(Model("fake"), EngineSettings(options=options, max_running=args.slots))
            plain_s = asyncio.run(plain(engine, args.episodes, args.wait_s))
            rounds.append({
                "episodes_s": round(ran.episodes_s, 2),
                "share_of_bound": round(bound_s / ran.episodes_s, 3),
                "share_of_first_come": round(by_order["first come"] / ran.episodes_s, 3),
                "plain_s": round(plain_s, 2),
                "plain_share_of_bound": round(bound_s / plain_s, 3),
                "plain_over_ours": round(plain_s / ran.episodes_s, 3),
                "cpu_ms_a_turn": {
                    name: round(1e3 * cpu_s / bound["turns"], 3)
                    for name, cpu_s in (
                        ("worker", ran.engine["process_cpu_s"]),
                        ("worker_decodes_and_writes", ran.engine["thread_cpu_s"]),
                        ("controller", ran.controller_cpu_s),
                        ("plain", engine.told()["process_cpu_s"]),
                    )
                },
                "most_at_once": ran.most_at_once,
                "engine": ran.engine,
                "plain_engine": engine.told(),
                "load": round(load, 1),
            })  # fmt: skip
    print(json.dumps({
        "hardware": hardware,
        "options": vars(args),
        "bound_s": round(bound_s, 2),
        "bounds": {name: round(value, 2) for name, value in bound.items()},
        "orders": by_order,
        "share_of_bound": statistics.median(one["share_of_bound"] for one in rounds),
        "share_of_first_come": statistics.median(one["share_of_first_come"] for one in rounds),
        "plain_over_ours": statistics.median(one["plain_over_ours"] for one in rounds),
        "rounds": rounds,
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
