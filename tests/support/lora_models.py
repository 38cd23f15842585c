"""A small policy with adapters: steps of the embedded trainer, and a flow that trains it."""

from __future__ import annotations

import torch

from m2flow import Dataset, Flow, Lora, Policy, Reward, Sample, flow, steps
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.recipe import AdamW, Model
from m2flow.testing.train_suite import PPO, samples

RECIPE = AdamW(lr=1e-2)


def started(model: Model) -> EmbeddedTrain:
    engine = EmbeddedTrain(model, EngineSettings(deterministic=True))
    engine.start()
    return engine


def trained(engine: EmbeddedTrain, num_steps: int = 3) -> EmbeddedTrain:
    for _ in range(num_steps):
        sums = engine.accumulate(samples(32), PPO)
        engine.apply(RECIPE, sums.num_tokens)
    return engine


def copied(engine: EmbeddedTrain) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def sorting(path: str) -> Flow:
    def judged(sample: Sample) -> float:
        return len(str(sample.text)) % 3 / 3

    @flow
    def adapters() -> None:
        policy = Policy(path, init="random", lora=Lora(rank=2))
        prompts = Dataset([{"prompt": f"{i}+{i}="} for i in range(6)])
        for _ in steps(2):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=5)
            policy.update(responses, Reward(judged).score(responses), optimizer=RECIPE)

    return adapters
