"""A plan is printed on a screen, however many workers it has."""

from fake_flows import everything

from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec


def printed(num_workers: int) -> list[str]:
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=num_workers),
        train=TrainSpec(engine="fake"),
        functions=FunctionSpec(workers=num_workers),
    )
    graph, models, _ = trace(everything, {}, steps=1)
    return str(lower(graph, models, spec)).splitlines()


def test_workers_that_are_alike_are_one_line_and_so_are_the_routes_between_them() -> None:
    few, many = printed(3), printed(40)
    assert len(few) == len(many) < 60
    assert any(line.startswith("  rollout-0 to rollout-39  ") for line in many)
    assert any("rollout-0 to rollout-39 -> functions-0 to functions-39" in line for line in many)
    assert any("functions-0 to functions-39 -> each the same" in line for line in many)


def test_two_are_told_one_by_one() -> None:
    assert any(line.startswith("  rollout-1 ") for line in printed(2))
