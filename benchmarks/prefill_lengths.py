"""How well the policy's own prefill tells response lengths, on a small model whose lengths depend on what prompts say.

    python benchmarks/prefill_lengths.py [--seeds 3] [--steps 6] [--prompts 96] [--threads 1]

A Qwen2 of 0.5M parameters (`flows/models/digits`) learns to answer four to six digits, `abc...=`, with the last one repeated: about
2 + ab/2 times, of which no two demonstrations of a prompt have the same, and two more for each digit beyond four. So the length of a prompt
says a little, and its first two digits most. From then on each step draws new prompts, samples four responses to each, and trains a little
more on demonstrations, so that the hidden states drift as those of a policy do.

Prints one JSON object, means over the seeds:
- `between`: the share of the squared error between prompts that the regression takes away, held out by cross-validation, in the last step;
- `skill`: the share of the pinball loss of the quantiles that the predictor saves, each step predicted from those before it;
- `regret` of policies on four instances of eight slots: `late` is longest-first that knows a prompt once its first sample is prefilled,
  and begins one sample of each prompt before others;
- `cost`: seconds for the embeddings of a step's prompts, as a share of those for its responses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from m2flow import AdamW, nll
from m2flow.engines.contract import EngineSettings, Objective, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout, embeddings_of
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.recipe import Model, Sampling
from m2flow.rollout_scheduling.decode_model import DecodeModel
from m2flow.rollout_scheduling.lengths import StepLengths
from m2flow.rollout_scheduling.policies import Auto, FirstCome, LongestFirst, Split
from m2flow.rollout_scheduling.policy import SchedulingPolicy, Seen
from m2flow.rollout_scheduling.predictors import Learned, Oracle
from m2flow.rollout_scheduling.study import StudyStep, skill_of, study_known, study_policy, total
from m2flow.samples import Batch, Ragged, make_ids

DIGITS = Path(__file__).parent.parent / "flows" / "models" / "digits"
CAP, NUM_SAMPLES, NUM_INSTANCES = 56, 4, 4
SIZES = (8, 16, 32, 64, 128)
OPTIMIZER = AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30)


class Late(LongestFirst):
    """Longest first, by what is known of a prompt once its first sample has begun; so one of each prompt begins first."""

    name = "late"

    def begin(self, seen: Seen) -> None:
        self._firsts = {members[0] for members in seen.members}
        super().begin(seen)

    def rank(self, sample: int) -> tuple[float, ...]:
        return (0.0, 0.0, float(sample)) if sample in self._firsts else (1.0, *super().rank(sample))


def prompt_of(dice: random.Random) -> str:
    return "".join(dice.choices("0123456789", k=dice.randint(4, 6)))


def demonstrations(dice: random.Random, first: int, num: int = 128) -> Batch:
    prompts = [prompt_of(dice) for _ in range(num)]
    medians = [2 + int(prompt[0]) * int(prompt[1]) / 2 + 2 * (len(prompt) - 4) for prompt in prompts]
    lengths = [max(1, min(round(median * dice.lognormvariate(0.0, 0.25)), CAP - 2)) for median in medians]
    answers = [prompt[-1] * length for prompt, length in zip(prompts, lengths, strict=True)]
    columns = {"prompt": Ragged.texts([f"{prompt}=" for prompt in prompts]), "target": Ragged.texts(answers)}
    return Batch(make_ids(first, num), columns)


def train(engine: EmbeddedTrain, dice: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        sums = engine.accumulate(demonstrations(dice, 0), Objective(nll()))
        engine.apply(OPTIMIZER, sums.num_tokens)


def generate(engine: EmbeddedRollout, requests: list[Request]) -> np.ndarray:
    engine.add(requests)
    lengths = {}
    while engine.num_unfinished:
        lengths |= {sample.id: len(sample.tokens) for sample in engine.step()}
    return np.array([lengths[request.id] for request in requests])


def recorded(seed: int, num_steps: int, num_prompts: int, threads: int) -> tuple[list[StepLengths], list[np.ndarray], float]:
    """The lengths of each step, the last hidden states of its prompts, and what the embeddings cost."""
    dice, model = random.Random(seed), Model(str(DIGITS), init="random", seed=seed)
    trainer, engine = EmbeddedTrain(model, EngineSettings(threads=threads)), EmbeddedRollout(model, EngineSettings(threads=threads))
    trainer.start()
    engine.start()
    train(trainer, dice, 500)
    steps, states, costs = [], [], []
    for step in range(num_steps):
        engine.load_weights(trainer.weights(), step + 1)
        prompts = [f"{prompt_of(dice)}=" for _ in range(num_prompts)]
        ids = make_ids(step, num_prompts, NUM_SAMPLES).tolist()
        requests = [Request(packed, prompts[k // NUM_SAMPLES], seed * 2**32 + packed, Sampling(CAP)) for k, packed in enumerate(ids)]
        began_s = time.perf_counter()
        engine.embeddings(requests[::NUM_SAMPLES])
        embedded_s = time.perf_counter()
        lengths = generate(engine, requests)
        costs.append((embedded_s - began_s) / (time.perf_counter() - embedded_s))
        codec = engine.language()
        encoded = [np.array(codec.encode_prompt(prompt), np.int32) for prompt in prompts]
        states.append(engine._model.last_hidden(encoded).numpy())  # type: ignore[union-attr]
        steps.append(StepLengths.of([len(prompt) for prompt in encoded], lengths.reshape(num_prompts, NUM_SAMPLES), step=step))
        train(trainer, dice, 5)
    return steps, states, fmean(costs[1:])


def judged(steps: list[StudyStep]) -> dict[str, float]:
    """How far lengths are told apart, and the regret of the policies that go by that."""
    predictor, model = Learned(), DecodeModel(max_batch=8)
    found = {"skill": skill_of(predictor, steps, cap=CAP).gain, "between": predictor.gain}
    known = study_known(steps, model, NUM_INSTANCES)
    policies: list[SchedulingPolicy] = [FirstCome(), *(make(Learned()) for make in (LongestFirst, Late, Split, Auto))]
    for policy in policies:
        results = study_policy(policy, steps, known, model, num_instances=NUM_INSTANCES, cap=CAP)
        found[policy.name] = total(results[1:]).regret
    oracle = Oracle()
    results = study_policy(LongestFirst(oracle), steps, known, model, num_instances=NUM_INSTANCES, cap=CAP, oracle=oracle)
    return found | {"longest-first (oracle)": total(results[1:]).regret}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    costs, spreads = [], []
    for seed in range(options.seeds):
        steps, states, cost = recorded(seed, options.steps, options.prompts, options.threads)
        costs.append(cost)
        spreads.append([float(np.quantile(step.responses, share)) for step in steps for share in (0.1, 0.5, 0.9)])
        found["prompt length alone"].append(judged([StudyStep(step) for step in steps]))
        for num in SIZES:
            told = [[json.dumps(row.round(6).tolist()) for row in embeddings_of(of_step, num)] for of_step in states]
            found[f"prefill, {num} numbers"].append(
                judged([StudyStep(step, difficulties=said) for step, said in zip(steps, told, strict=True)])
            )
    result = {
        "hardware": {"num_cpus": os.cpu_count(), "threads": options.threads, "load": os.getloadavg()[0], "torch": torch.__version__},
        "lengths": [round(float(one), 1) for one in np.array(spreads).reshape(-1, 3).mean(axis=0)],
        "cost": round(fmean(costs), 4),
        "found": {name: {key: round(fmean(one[key] for one in of), 4) for key in of[0]} for name, of in found.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
