"""What nodes of a Ray cluster have, and what a submission asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SHARE = 2
"""Tasks that a node runs side by side if they say nothing of threads, as a worker that pulls."""
_TINY = 0.001
"""Amount of a custom resource that only says where a task may run."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a submission needs, as far as Ray knows such things.

    Attributes:
        threads: Threads; 0 for a share of a node.
        memory_bytes: Memory; 0 for what a share of a node has.
        gpu: Whether it needs a GPU.
        prefers_gpu: Whether it goes to a GPU if there is one.
        gpu_architectures: Architectures that fit, such as ``sm89``; empty for any.
        near: Names of nodes that have its inputs.
    """

    threads: int = 0
    memory_bytes: int = 0
    gpu: bool = False
    prefers_gpu: bool = False
    gpu_architectures: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A node that lives: its id, the address of its machine, and what it has in all."""

    id: str
    host: str
    resources: Mapping[str, float]


@dataclass
class Cluster:
    """The nodes at the last look."""

    nodes: list[Node] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Ask the cluster for its nodes. Those without CPUs run no tasks."""
        alive = [each for each in ray.nodes() if each["Alive"]]
        nodes = [Node(each["NodeID"], each["NodeManagerAddress"], dict(each["Resources"])) for each in alive]
        self._names |= {node.id: f"{node.host}/{node.id[:8]}" for node in nodes}
        self.nodes = [node for node in nodes if node.resources.get("CPU", 0) >= 1]

    def name(self, node: str) -> str:
        """Return the name of a node, which may be gone."""
        return self._names.get(node, node[:8])

    def options(self, asked: Asked, placed: Mapping[str, str], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of Ray for a submission.

        Args:
            asked: What it needs. Of CPUs and memory it gets what the largest node has at most: it then runs there alone.
            placed: Nodes of the submissions that run.
            chosen: Options of its stage, which come first.
        """
        cpus = max((node.resources["CPU"] for node in self.nodes), default=1.0)
        memory = max((node.resources.get("memory", 0.0) for node in self.nodes), default=0.0)
        options: dict[str, Any] = {"num_cpus": min(asked.threads or max(1, cpus // _SHARE), cpus)}
        if asked.memory_bytes and memory:
            options["memory"] = int(min(asked.memory_bytes, memory))
        if asked.gpu or (asked.prefers_gpu and self._has("GPU")):
            options["num_gpus"] = 1
            architecture = next((each for each in asked.gpu_architectures if self._has(each)), "")
            if architecture:
                options["resources"] = {architecture: _TINY}
        options |= chosen
        if near := self._free_node(asked.near, placed, options["num_cpus"]):
            # Its last argument is private to Ray: without it, a task would wait for this node while others are idle.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(near, soft=True, _spill_on_unavailable=True)
        return options

    def shares(self, options: Mapping[str, Any]) -> list[str]:
        """Return the arguments by which a worker keeps to its part of a node."""
        cpus = max(int(options["num_cpus"]), 1)
        memory = int(options.get("memory", 0)) or min(
            (
                int(node.resources["memory"] * min(cpus / node.resources["CPU"], 1))
                for node in self.nodes
                if node.resources.get("memory")
            ),
            default=0,
        )
        return ["--cores", str(cpus), *(["--memory-bytes", str(memory)] if memory else [])]

    def lack(self, options: Mapping[str, Any]) -> str:
        """Return what no node has of what a submission asks for; empty if one has it all."""
        wanted = {
            "CPU": options["num_cpus"],
            "GPU": options.get("num_gpus", 0),
            "memory": options.get("memory", 0),
            **options.get("resources", {}),
        }
        if any(all(node.resources.get(name, 0) >= amount for name, amount in wanted.items()) for node in self.nodes):
            return ""
        asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
        return f"none of the {len(self.nodes)} nodes has {asked}"

    def _has(self, resource: str) -> bool:
        return any(node.resources.get(resource) for node in self.nodes)

    def _free_node(self, near: tuple[str, ...], placed: Mapping[str, str], cpus: float) -> str:
        """Return the first of some nodes that has room beside this coordinator's own tasks; empty if none has."""
        by_name = {self.name(node.id): node for node in self.nodes}
        for name in near:
            node = by_name.get(name)
            if node is not None and node.resources["CPU"] >= cpus * (1 + sum(at == node.id for at in placed.values())):
                return node.id
        return ""
