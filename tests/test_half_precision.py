"""bfloat16 has no NumPy type; its weights must travel all the same."""

from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, flow, steps
from m2flow.spec import ClusterSpec
from m2flow.testing.world import run_planned

DIGITS = Path(__file__).resolve().parents[1] / "flows" / "models" / "digits"


@flow
def half() -> None:
    policy, verifier = Policy(DIGITS, init="random", dtype="bfloat16"), Reward(lambda sample: float(len(str(sample.text))))
    prompts = Dataset([{"prompt": "12="}, {"prompt": "345="}])
    for _ in steps(2):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


def test_bfloat16_weights_reach_a_rollout_engine_in_another_process_unchanged():
    split, shared = (run_planned(half, {}, ClusterSpec(placement=mode, cores=1, device="cpu")) for mode in ("split", "time-shared"))
    assert split.error == shared.error == ""
    assert [versions[-1] for _, versions in split.samples.values()] == [0] * 4 + [1] * 4
