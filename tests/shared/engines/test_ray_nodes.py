"""What a submission asks of a Ray cluster, given what its nodes have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'slipway-ml[ray]'")

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipway.engines.ray.nodes import Asked, Cluster, Node

GIB = 1 << 30


def cluster(*resources: dict[str, float]) -> Cluster:
    nodes = [Node(f"{number + 1}" * 56, "10.0.0.1", each) for number, each in enumerate(resources)]
    return Cluster(nodes, {node.id: f"{node.host}/{node.id[:8]}" for node in nodes})


SMALL, LARGE = {"CPU": 4.0, "memory": 8.0 * GIB}, {"CPU": 16.0, "memory": 64.0 * GIB, "GPU": 1.0, "sm89": 1.0}


@pytest.mark.parametrize(
    ("asked", "chosen", "options"),
    [
        (Asked(), {}, {"num_cpus": 8.0}),  # half of the largest node
        (Asked(threads=3), {}, {"num_cpus": 3}),
        (Asked(threads=40), {}, {"num_cpus": 16.0}),  # what is there
        (Asked(threads=1, memory_bytes=10 * GIB), {}, {"num_cpus": 1, "memory": 10 * GIB}),
        (Asked(threads=1, memory_bytes=100 * GIB), {}, {"num_cpus": 1, "memory": 64 * GIB}),
        (Asked(threads=1, prefers_gpu=True), {}, {"num_cpus": 1, "num_gpus": 1}),
        (
            Asked(threads=1, gpu=True, gpu_architectures=("sm80", "sm89")),
            {},
            {"num_cpus": 1, "num_gpus": 1, "resources": {"sm89": 0.001}},
        ),
        (Asked(threads=1), {"num_cpus": 2, "resources": {"disk": 1}}, {"num_cpus": 2, "resources": {"disk": 1}}),
    ],
)
def test_a_submission_asks_for_what_it_needs_and_never_for_more_than_a_node_has(
    asked: Asked, chosen: dict[str, Any], options: dict[str, Any]
) -> None:
    assert cluster(SMALL, LARGE).options(asked, {}, chosen) == options


def test_a_gpu_is_preferred_only_where_there_is_one_and_needed_where_there_is_none() -> None:
    without = cluster(SMALL)
    assert "num_gpus" not in without.options(Asked(prefers_gpu=True), {}, {})
    needed = without.options(Asked(threads=1, gpu=True), {}, {})
    assert "none of the 1 nodes has CPU 1, GPU 1" in without.lack(needed)
    assert cluster(SMALL, LARGE).lack(needed) == ""


def test_a_task_goes_near_its_inputs_while_there_is_room() -> None:
    both, asked = cluster(SMALL, SMALL), Asked(threads=2, near=("10.0.0.1/22222222", "10.0.0.1/11111111"))

    def place(*placed: str) -> str:
        running = {f"task-{number}": node * 56 for number, node in enumerate(placed)}
        strategy = both.options(asked, running, {}).get("scheduling_strategy")
        assert strategy is None or isinstance(strategy, NodeAffinitySchedulingStrategy)
        return "" if strategy is None else str(strategy.node_id[0])

    assert place() == "2"
    assert place("2") == "2"
    assert place("2", "2") == "1"
    assert place("2", "2", "1", "1") == ""


def test_a_worker_keeps_to_its_part_of_a_node() -> None:
    both = cluster(SMALL, LARGE)
    assert both.shares({"num_cpus": 2}) == [
        "--cores",
        "2",
        "--memory-bytes",
        str(4 * GIB),
    ]  # of the node that has least
    assert both.shares({"num_cpus": 2, "memory": GIB}) == ["--cores", "2", "--memory-bytes", str(GIB)]
