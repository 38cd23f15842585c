"""GRPO steps by TRL's GRPOTrainer, timed. `benchmarks/vs_trl.py` runs it, with an interpreter that has TRL; it imports nothing of m2flow.

    python trl_grpo.py '{"model": "DIRECTORY", "prompts": "FILE", ...}'

The settings are the fields of `Workload` there, besides `model`, `prompts` (a file, one a line) and `threads`. One on-policy update
a rollout, no KL term, float32. Generation is transformers' `generate` with a static cache. Prints one JSON line: seconds of
each counted step, of its generation, and tokens generated in it.
"""

import json
import os
import sys
import tempfile
import time

A = json.loads(sys.argv[1])
os.environ.update(OMP_NUM_THREADS=str(A["threads"]), TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]


class StepClock(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


class TimedTrainer(GRPOTrainer):
    generation_s: list[float]
    num_tokens: list[int]

    def _generate_single_turn(self, *args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generation_s.append(time.perf_counter() - start)
        self.num_tokens.append(sum(len(completion) for completion in result[0]))
        return result


def main() -> None:
    torch.set_num_threads(A["threads"])
    num_samples = A["num_prompts"] * A["n"]
    num_steps = A["steps"] + A["warmup"]
    with open(A["prompts"]) as file:
        dataset = Dataset.from_list([{"prompt": line.rstrip("\n")} for line in file])
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=A["trl_micro"],
        gradient_accumulation_steps=num_samples // A["trl_micro"],
        num_generations=A["n"],
        max_completion_length=A["max_new"],
        max_steps=num_steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
        cache_implementation="static",
        generation_kwargs={"min_new_tokens": A["max_new"]} if A["is_full"] else None,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(A["model"], attn_implementation=A["trl_attention"])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(A["model"], padding_side="left")
    clock = StepClock()
    trainer = TimedTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=dataset, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.generation_s, trainer.num_tokens = [], []
    trainer.train()
    counted = slice(A["warmup"], None)
    print(
        json.dumps(
            {
                "step_s": [b - a for a, b in zip(clock.ends[A["warmup"] - 1 :], clock.ends[A["warmup"] :], strict=False)],
                "generation_s": trainer.generation_s[counted],
                "num_tokens": trainer.num_tokens[counted],
                "num_parameters": sum(p.numel() for p in model.parameters()),
                "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
