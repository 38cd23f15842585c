"""GRPO on a model of a given directory: what the GPU kit runs to set a real step beside the planned one."""

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, ppo_clip, steps


def task(rng):
    return {"prompt": " ".join(rng.choices("abcdefgh", k=64))}


def has_an_even_token(sample: Sample) -> float:
    return float(int(sample.tokens[0]) % 2 == 0)


@flow
def sized(model: str, dtype: str = "bfloat16", num_steps: int = 4, batch: int = 16, n: int = 8, max_new_tokens: int = 256) -> None:
    policy = Policy(model, dtype=dtype)
    reward = Reward(has_an_even_token)
    prompts = Dataset.generate(task, num_steps * batch, seed=1)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens)
        policy.update(responses, reward.score(responses), loss=ppo_clip(), advantages="grpo", optimizer=AdamW(1e-6))
