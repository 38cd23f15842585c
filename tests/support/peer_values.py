"""Print what TRL's and verl's own functions make of fixed random inputs, for tests/algorithms/test_against_peers.py to compare with.

    python tests/support/peer_values.py trl > tests/expected/values-trl.json
    python tests/support/peer_values.py verl > tests/expected/values-verl.json

Needs the package (TRL 1.16.0, verl 0.9.1) and torch; the test needs neither package. Four samples, two of each prompt, of 3, 1, 4 and 2
tokens: as matrices [4, 4] with a mask for the peers, flat [10] for us.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTHS = [3, 1, 4, 2]
MASK = np.arange(4) < np.array(LENGTHS)[:, None]
EQUAL = [[1.5, -0.5], [0.0, 0.0]]
"""Rewards of two groups of two: the samples of the group that differs are those whose reward is not 0, as verl's GPG counts them."""


def inputs() -> dict[str, np.ndarray]:
    """Random numbers of the four samples: of tokens float64 [4, 4], of samples float64 [4]."""
    rng = np.random.default_rng(11)
    old = -3 * rng.random((4, 4)) - 0.1
    likeliest = rng.normal(size=(2, 10, 6))
    return {
        "behaviour_logprobs": old,
        "logprobs": np.minimum(old + 0.3 * rng.normal(size=(4, 4)), -0.01),
        "reference_logprobs": np.minimum(old + 0.3 * rng.normal(size=(4, 4)), -0.01),
        "advantages": np.array([1.5, -1.0, -0.5, 2.0]),
        "rewards": np.array([0.7, -0.3, 1.1, 0.2]),
        "values": rng.normal(size=(4, 4)),
        "old_values": rng.normal(size=(4, 4)),
        "returns": rng.normal(size=(4, 4)),
        "top_logits": likeliest[0],
        "reference_top_logits": likeliest[1],
    }


def flat(matrix: np.ndarray) -> np.ndarray:
    """The numbers of the ten tokens, sample after sample."""
    return matrix[MASK] if matrix.ndim == 2 else np.repeat(matrix, LENGTHS)


def _tensors() -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs().items()}


def _loss_and_gradient(compute: Callable[[Tensor], Tensor], trained: Tensor) -> dict[str, Any]:
    trained = trained.clone().requires_grad_()
    loss = compute(trained)
    (gradient,) = torch.autograd.grad(loss, trained)
    found = flat(gradient.numpy()) if gradient.shape == (4, 4) else gradient.numpy()
    return {"loss": float(loss.detach()), "gradient": found.tolist()}


# ---- verl


def verl_values() -> dict[str, Any]:
    """Values of `verl.trainer.ppo.core_algos`."""
    from verl.trainer.ppo import core_algos as core
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    given, mask = _tensors(), torch.from_numpy(MASK).double()
    advantages = given["advantages"][:, None].expand(4, 4)

    def policy(name: str, aggregation: str = "token-mean", weights: Tensor | None = None, **options: Any) -> dict[str, Any]:
        of_loss = {key: options.pop(key) for key in tuple(options) if key.startswith(("clip_cov", "kl_cov", "ppo_kl"))}
        config = ActorConfig(
            strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(loss_mode=name, **of_loss), **options
        )

        def compute(logprobs: Tensor) -> Tensor:
            return core.get_policy_loss_fn(name)(
                given["behaviour_logprobs"], logprobs, advantages, mask, aggregation, config, rollout_is_weights=weights
            )[0]

        return _loss_and_gradient(compute, given["logprobs"])

    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    by_sample = "seq-mean-token-mean"
    found = {
        "ppo_clip, tokens": policy("vanilla", **bounds, clip_ratio_c=1.5),
        "ppo_clip, sequences": policy("vanilla", by_sample, **bounds, clip_ratio_c=1e6),
        "ppo_clip, constant": policy(
            "vanilla", "seq-mean-token-sum-norm", **bounds, clip_ratio_c=1e6, global_batch_info={"loss_scale_factor": 8}
        ),
        "gspo": policy("gspo", by_sample, clip_ratio_low=0.1, clip_ratio_high=0.15),
        "sapo": policy("sapo", by_sample),
        "cispo": policy("cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
        "dppo, tv": policy("dppo_tv", clip_ratio_low=0.05, clip_ratio_high=0.05),
        "dppo, kl": policy("dppo_kl", clip_ratio_low=0.01, clip_ratio_high=0.01),
        "gmpo": policy("geo_mean", clip_ratio_low=0.2, clip_ratio_high=0.2),
        "reinforce": policy("gpg"),
        "clip_cov": policy("clip_cov", **bounds, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0),
        "kl_cov": policy("kl_cov", kl_cov_ratio=0.25, ppo_kl_coef=0.5),
    }
    found["clipped_value"] = _loss_and_gradient(
        lambda values: core.compute_value_loss(values, given["returns"], given["old_values"], mask, 0.2)[0], given["values"]
    )
    for kl in ("k1", "k2", "k3"):
        found[kl] = _loss_and_gradient(
            lambda logprobs, kl=kl: (core.kl_penalty(logprobs, given["reference_logprobs"], kl) * mask).sum(), given["logprobs"]
        )
    return {**found, **_verl_corrections(policy, given, mask), **_verl_advantages(core, given, mask)}


def _verl_corrections(policy: Callable[..., dict[str, Any]], given: dict[str, Tensor], mask: Tensor) -> dict[str, Any]:
    """Truncated importance sampling: PPO's loss with weights, where the reference stands in for the rollout."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    found = {}
    for level in ("token", "sequence"):
        log_ratio = given["behaviour_logprobs"] - given["reference_logprobs"]
        weights, _ = compute_rollout_correction_weights(log_ratio, mask, level, 1.2)
        found[f"correction, {level}"] = policy("vanilla", weights=weights, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6)
    return found


def _verl_advantages(core: Any, given: dict[str, Tensor], mask: Tensor) -> dict[str, Any]:
    index, config = np.array([0, 0, 1, 1]), SimpleNamespace(gamma=1.0)
    at_end = torch.zeros(4, 4, dtype=torch.float64)
    at_end[range(4), [length - 1 for length in LENGTHS]] = given["rewards"]
    first = mask * 0
    first[:, 0] = 1

    def of_samples(name: str, rewards: Tensor = at_end, of: Tensor = mask, **options: Any) -> list[float]:
        return core.get_adv_estimator_fn(name)(rewards.clone(), of, index=index, **options)[0][:, 0].tolist()

    one_token = first * given["rewards"][:, None]
    return {
        "grpo": of_samples("grpo"),
        "dr_grpo": of_samples("grpo", norm_adv_by_std_in_grpo=False),
        "rloo": of_samples("rloo"),
        "opo": of_samples("opo"),
        "gpg": of_samples("gpg", first * torch.tensor(EQUAL, dtype=torch.float64).reshape(4, 1)),
        "reinforce_pp": core.get_adv_estimator_fn("reinforce_plus_plus")(one_token, first, config=config)[0][:, 0].tolist(),
        "reinforce_pp_baseline": of_samples("reinforce_plus_plus_baseline", one_token, first),
        "remax": core.get_adv_estimator_fn("remax")(at_end, given["rewards"].flip(0), mask)[0][:, 0].tolist(),
        "gae": flat(core.compute_gae_advantage_return(at_end, given["values"], mask, 0.9, 0.8)[1].numpy()).tolist(),
    }


# ---- TRL


def trl_values() -> dict[str, Any]:
    """Values of `GRPOTrainer._compute_loss` on given log-probabilities, and of the divergences that its distillation takes."""
    from trl import GRPOTrainer
    from trl.experimental.server_distillation import server_distillation_trainer as distillation

    given, mask = _tensors(), torch.from_numpy(MASK).double()

    def policy(loss_type: str, level: str = "token", beta: float = 0.0, delta: float | None = None, high: float = 0.28) -> dict[str, Any]:
        def compute(logprobs: Tensor) -> Tensor:
            return GRPOTrainer._compute_loss(_trl_trainer(logprobs, loss_type, level, beta, delta, high), None, batch)

        batch = {
            "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": torch.zeros(4, 4, dtype=torch.long),
            "completion_mask": mask,
            "advantages": given["advantages"],
            "old_per_token_logps": given["behaviour_logprobs"],
            "ref_per_token_logps": given["reference_logprobs"],
            "num_items_in_batch": mask.sum(),
        }
        return _loss_and_gradient(compute, given["logprobs"])

    def divergence(beta: float, *, with_tail: bool) -> dict[str, Any]:
        teacher = given["reference_top_logits"].log_softmax(-1)

        def compute(logits: Tensor) -> Tensor:
            one, other = logits.log_softmax(-1), teacher
            support = torch.ones_like(one, dtype=torch.bool)
            if with_tail:
                one, mine = distillation._add_tail_bucket(one[:, :3], support[:, :3])
                other, _ = distillation._add_tail_bucket(other[:, :3], support[:, :3])
                support = mine
            return distillation._jsd_divergence(one, other, beta, support).sum()

        return _loss_and_gradient(compute, given["top_logits"])

    return {
        "ppo_clip, dapo": policy("dapo"),
        "ppo_clip, bnpo": policy("bnpo", delta=1.5),
        "ppo_clip, grpo": policy("grpo", beta=0.1),
        "ppo_clip, dr_grpo": policy("dr_grpo"),
        "gspo": policy("grpo", "sequence"),
        "cispo": policy("cispo", high=1.28),
        "sapo": policy("sapo"),
        **{f"{name}, tail": divergence(beta, with_tail=True) for name, beta in (("forward", 0.0), ("reverse", 1.0), ("js", 0.5))},
        **{f"{name}, whole": divergence(beta, with_tail=False) for name, beta in (("forward", 0.0), ("reverse", 1.0), ("js", 0.5))},
    }


def _trl_trainer(logprobs: Tensor, loss_type: str, level: str, beta: float, delta: float | None, high: float) -> Any:
    """What `_compute_loss` reads of a trainer."""
    aux = torch.zeros(())
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), aux),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=8,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, *_, **__: value),
        args=SimpleNamespace(
            delta=delta,
            steps_per_generation=1,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
    )


if __name__ == "__main__":
    print(json.dumps({"trl": trl_values, "verl": verl_values}[sys.argv[1]](), indent=1))
