"""What engines hold of their device is counted; who runs out of it says so; changing places says how much moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_config

from m2flow import AdamW
from m2flow.engines.contract import EngineSettings, Memory, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError, OpError, OutOfMemory
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.engine_host import offload, onload
from m2flow.micro.worker.out_of_memory import accounted
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model, Sampling
from m2flow.samples import make_ids

MIB = 1 << 20


class OutOfMemoryError(RuntimeError):
    """Named as torch's own of a GPU."""


class Bench:
    """Has two engines, and one thing to do."""

    def held(self) -> dict[str, Memory]:
        return {
            "policy rollout": Memory(weights=2 * MIB, kv=MIB),
            "policy train": Memory(weights=2 * MIB, gradients=2 * MIB, optimizer=4 * MIB),
        }

    @accounted("train")
    def accumulate(self, error: Exception) -> None:
        raise error

    @accounted("switch")
    def switch(self) -> None:
        raise MemoryError


def test_an_allocators_error_is_said_with_what_each_engine_holds_and_what_to_change() -> None:
    cuda = OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB")
    with pytest.raises(EngineError, match=r"out of memory while training, .*20.00 MiB") as raised:
        Bench().accumulate(cuda)
    said = str(raised.value)
    assert "policy rollout: weights 2.00 MiB, kv 1.00 MiB" in said
    assert "policy train: optimizer 4.00 MiB, weights 2.00 MiB, gradients 2.00 MiB" in said
    assert "train: {token_budget}" in said
    with pytest.raises(EngineError, match="placement: split"):
        Bench().switch()


def test_other_errors_are_as_they_were() -> None:
    for error in (RuntimeError("shape mismatch"), OpError("the loss raised MemoryError"), ValueError("out of memory")):
        with pytest.raises(type(error)) as raised:
            Bench().accumulate(error)
        assert raised.value is error
    halved = OutOfMemory("out of memory in a micro-batch of 1 samples; one sample of it does not fit")
    with pytest.raises(OutOfMemory, match=r"one sample .*not fit\. .*policy rollout: weights"):
        Bench().accumulate(halved)


def test_engines_count_what_they_hold(tmp_path: Path) -> None:
    model = Model(save_config("Llama", tmp_path / "model"), "random")
    trainer, engine = EmbeddedTrain(model, EngineSettings()), EmbeddedRollout(model, EngineSettings())
    trainer.start()
    engine.start()
    assert trainer.memory().weights == engine.memory().weights > 4 * 14 * 32
    assert (trainer.memory().gradients, trainer.memory().optimizer, engine.memory().kv) == (0, 0, 0)
    for parameter in trainer._model.parameters():
        parameter.grad = parameter.detach().clone()
    held = trainer.memory()
    num_bytes = sum(parameter.numel() * 4 for parameter in trainer._model.parameters())
    assert held.gradients == num_bytes
    trainer.apply(AdamW(1e-3), 1.0)
    moments = trainer.memory()
    assert moments.gradients == 0
    assert 2 * num_bytes <= moments.optimizer < 2.2 * num_bytes
    engine.add([Request(packed, (3, 4, 5), 0, Sampling(4)) for packed in make_ids(0, 3, 1).tolist()])
    engine.step()
    running = engine.memory().kv
    assert running > 0
    recorder = Recorder("x")
    offload(recorder, EngineSlot("policy", "rollout", "embedded"), engine)
    assert engine.memory().kv == 0
    onload(recorder, EngineSlot("policy", "rollout", "embedded"), engine)
    (_, _, _, left), (_, _, _, came) = recorder.drain().spans
    assert left["label"] == "policy rollout"
    assert left["num_bytes"] == running
    assert came["num_bytes"] == 0  # The cache is made when it is needed.
    assert isinstance(left["gb_per_s"], float)
    trainer.stop()
    engine.stop()
    assert trainer.memory() == engine.memory() == Memory()


STARVED = """
import resource, sys
from pathlib import Path
from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, op
from m2flow.errors import M2FlowError
from m2flow.spec import ClusterSpec, TrainSpec
from m2flow.testing.world import run_eager

def reward(sample: Sample) -> float:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), resource.RLIM_INFINITY))
    return float(len(sample.text))

@flow
def hungry() -> None:
    policy, verifier = Policy(sys.argv[1], init="random"), Reward(reward)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(2)])
    responses = policy.generate(prompts.take(2), n=2, max_new_tokens=40, min_new_tokens=40)
    policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))

print(run_eager(hungry, {}, ClusterSpec(device="cpu", cores=1, train=TrainSpec(token_budget=1 << 20))).error)
"""


@pytest.mark.long
def test_a_trainer_that_is_really_out_of_memory_says_so(tmp_path: Path) -> None:
    path = save_config("Llama", tmp_path / "model", vocab_size=400_000)
    (tmp_path / "starved.py").write_text(STARVED)
    said = subprocess.run([sys.executable, str(tmp_path / "starved.py"), path], capture_output=True, text=True, timeout=250)
    assert "OutOfMemory: out of memory in a micro-batch of 1 samples" in said.stdout, said.stdout + said.stderr
    assert "policy train: weights" in said.stdout
