"""Ranks of a trainer in the spec and in the plan; and what its processes see of the machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from m2flow import load_flow
from m2flow.engines.contract import ParallelLayouts
from m2flow.errors import EngineError, PlanError
from m2flow.macro.tracing import trace
from m2flow.micro.controller.launcher import gpus_of_ranks
from m2flow.micro.lowering.passes import check_ranks, lower, most_ranks
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec

ROOT = Path(__file__).parents[3]

NAMED_AS_ANOTHER = ["unshare", "--uts", "sh", "-c", 'hostname 127.0.0.2 && exec "$@"', "sh"]
"""Runs a command where the host's name stands for an address that is not 127.0.0.1, as one of a network stands for the network's."""

WHERE_A_RANK_LISTENS = """
import sys
from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed.ranks import Ranks

ranks = Ranks(EngineSettings(rendezvous=f"file://{sys.argv[1]}"))
ranks.open()
LISTENS = "0A"
sockets = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
print([at for _, at, _, state, *_ in sockets if state == LISTENS and at.startswith(sys.argv[2])])
ranks.close()
"""


def can_be_named_otherwise() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMED_AS_ANOTHER, "true"], capture_output=True, check=False).returncode == 0
    )


def plan_of(spec: ClusterSpec) -> Plan:
    graph, models, num_steps = trace(load_flow(f"{ROOT}/flows/grpo.py"), {}, steps=1)
    return lower(graph, models, spec, num_steps=num_steps)


def spec_of(placement: str, engine: str = "fsdp", ranks: int = 2, rollouts: int = 1) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        device="cpu",
        cores=8,
        rollout=RolloutSpec(workers=rollouts),
        train=TrainSpec(engine=engine, ranks=ranks),
    )


def test_the_ranks_of_a_trainer_are_one_worker_of_the_plan_and_share_the_cores_with_the_others() -> None:
    plan = plan_of(spec_of("split", ranks=3))
    train = plan.worker("train-0")
    assert (train.ranks, train.threads, plan.worker("rollout-0").threads) == (3, 2, 2)
    assert [worker.name for worker in plan.workers] == ["rollout-0", "train-0", "functions-0"]
    assert "train-0      3 ranks: cpu, 2 threads each" in str(plan)
    assert "micro-batches a step, each over 3 ranks" in str(plan)


def test_time_shared_the_first_rank_takes_turns_with_rollout() -> None:
    plan = plan_of(spec_of("time-shared", ranks=2, rollouts=2))
    device = plan.worker("device-0")
    assert (device.ranks, device.lease) == (2, "device-0")
    assert plan.worker("rollout-1").ranks == 1
    assert device.threads == 8 // 3


def test_a_plan_of_several_ranks_survives_its_file() -> None:
    plan = plan_of(load_cluster(ROOT / "clusters" / "fsdp-2-ranks-cpu.yaml"))
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan


def test_an_engine_gets_no_more_ranks_than_it_offers() -> None:
    with pytest.raises(PlanError, match=r"at most 1 rank, and train-0 .* 2") as caught:
        plan_of(spec_of("split", "fake"))
    assert "fsdp" in caught.value.now


def test_only_trainers_have_several_ranks() -> None:
    slots = (EngineSlot("policy", "rollout", "embedded"),)
    with pytest.raises(PlanError, match="trains nothing"):
        check_ranks([WorkerPlan("rollout-0", "cpu", 1, slots, ranks=2)])
    with pytest.raises(PlanError, match="has 0 ranks"):
        check_ranks([WorkerPlan("rollout-0", "cpu", 1, slots, ranks=0)])


def test_ranks_are_what_all_degrees_come_to() -> None:
    assert most_ranks(ParallelLayouts()) == 1
    assert most_ranks(ParallelLayouts(tp=2, dp=4)) == 8
    assert most_ranks(ParallelLayouts(dp=None)) is None


def test_a_rank_sees_its_own_gpu_and_no_other() -> None:
    assert gpus_of_ranks("train-0", "cuda:1", 2, "") == ("cuda:0", ["1", "2"])
    assert gpus_of_ranks("train-0", "cuda:0", 2, "4,5,7") == ("cuda:0", ["4", "5"])
    assert gpus_of_ranks("train-0", "cpu", 2, "4") == ("cpu", ["", ""])
    with pytest.raises(EngineError, match=r"2 ranks from cuda:1 on.* 2"):
        gpus_of_ranks("train-0", "cuda:1", 2, "4,5")


@pytest.mark.skipif(not can_be_named_otherwise(), reason="another host name for one process needs root and `unshare`")
def test_ranks_listen_to_nobody_beyond_their_host(tmp_path: Path) -> None:
    script = [sys.executable, "-c", WHERE_A_RANK_LISTENS, str(tmp_path / "meeting"), "0200007F"]
    done = subprocess.run([*NAMED_AS_ANOTHER, *script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr
