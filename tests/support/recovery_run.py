"""A run to which something is done, in a process of its own (see `disturbing`): recovery_run.py RUNS_DIR MODEL [SETTING=VALUE ...].

While the file that HELD_BY names exists, the program does not begin the step whose number is in it: so the run can't end, and whatever
happens to its workers, they have time to come back. (A reward that waited would keep its worker from answering who has what of a lost
one's rows, and so from being missed.)
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

from m2flow import Chat, Dataset, Policy, Reward, Sample, agent, by_conversation, flow, op, steps
from m2flow.errors import M2FlowError
from m2flow.macro.session import Backend
from m2flow.micro.records.ledger import read_incidents
from m2flow.runner.run import Run
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RaySpec, RolloutSpec, RunSettings, StorageSpec, TrainSpec, WeightsSpec


def unhurried(sample: Sample) -> float:
    """Long enough for something to happen to it."""
    time.sleep(0.02)
    print("judged", flush=True)
    if service := os.environ.get("SERVICE"):
        with urllib.request.urlopen(f"{service}/{len(sample.tokens)}", timeout=60.0) as answer:
            return float(answer.read())
    return float(len(sample.tokens) % 3)


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


is_up = threading.Event()
"""The program runs, and is not only looked at."""


def up(backend: Backend) -> Backend:
    is_up.set()
    return backend


def wait_if_held(step: int) -> None:
    held_by = os.environ.get("HELD_BY")
    with contextlib.suppress(FileNotFoundError):
        while held_by and is_up.is_set() and step == int(Path(held_by).read_text()):
            time.sleep(0.01)


@flow
def scored(model: str = "fake", num_steps: int = 4) -> None:
    policy, judge = Policy(model) if model == "fake" else Policy(model, init="random"), Reward(unhurried)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(32)])
    for step in steps(num_steps):
        wait_if_held(step)
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=12)
        policy.update(responses, advantages=judge.score(responses) + ranks(responses), minibatch_size=4)


@agent
async def debate(chat: Chat, row: Sample) -> dict[str, float]:
    rival = chat.conversation("other", by="rival")
    said = str(row.prompt)
    for _ in range(3):
        said = (await rival.say((await chat.say(said, max_tokens=6)).text, max_tokens=6)).text
        await asyncio.sleep(0.01)
    return {"main": float(len(said)), "other": -float(len(said))}


@flow
def spoken(model: str = "fake", num_steps: int = 4) -> None:
    """Two policies learn, of which one speaks from a process of its own."""
    policy, rival = Policy(model), Policy(model, name="rival")
    prompts = Dataset([{"prompt": f"{i}="} for i in range(32)])
    for step in steps(num_steps):
        wait_if_held(step)
        games = policy.rollout(debate, prompts.take(8), n=4, max_tokens=80, speakers={"rival": rival})
        policy.update(games, games.reward, advantages=by_conversation())
        theirs = games.of("rival")
        rival.update(theirs, theirs.reward, advantages=by_conversation())


def main(runs_dir: str, model: str, *arguments: str) -> None:
    engine = "fake" if model == "fake" else "embedded"
    given = {name: json.loads(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    ray = given.pop("ray", None)
    ranks = given.pop("ranks", 0)
    train = engine if not ranks else "fake-ranks" if model == "fake" else "fsdp"
    spec = ClusterSpec(
        launcher="ray" if ray else "local",
        ray=RaySpec.model_validate(ray or {}),
        placement=given.pop("placement", "split"),
        device="cpu",
        cores=4,
        rollout=RolloutSpec(
            engine=engine,
            workers=given.pop("rollouts", 2),
            spare=given.pop("spare", 0),
            scale=given.pop("scale", "asked"),
            replan_s=given.pop("replan_s", 20.0),
            max_running=8,
            threads=1,
        ),
        train=TrainSpec(engine=train, ranks=max(ranks, 1), token_budget=200, threads=1, options=given.pop("train_options", {})),
        functions=FunctionSpec(workers=2, chunk=4),
        channels=ChannelSpec(host=given.pop("host", "127.0.0.1")),
        storage=StorageSpec.model_validate(given.pop("storage", {})),
        weights=WeightsSpec(transport=given.pop("transport", "auto"), changes="always"),
        pin=given.pop("pin", {}),
    )
    options = {name: given.pop(name) for name in ("num_steps",) if name in given}
    played = {"scored": scored, "spoken": spoken}[given.pop("flow", "scored")]
    settings = RunSettings(runs_dir=runs_dir, heartbeat_s=0.1, restart_wait_s=0.05, deterministic=engine != "fake", **given)
    run = Run(played, {"model": model, **options}, spec, settings, flow_file=f"{__file__}:{played.name}", around=up)
    said: dict[str, object] = {}
    try:
        summary = run.execute()
        said |= {"run_dir": summary.run_dir, "samples": summary.samples_sha256, "weights": summary.weights_sha256, "count": summary.samples}
    except M2FlowError as error:
        said |= {"error": f"{type(error).__name__}: {error}"}
    said["incidents"] = [[one.at_s, one.kind, one.worker, one.what] for one in read_incidents(run.run_dir)]
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
