"""A Ray cluster of several raylets on this machine, in a process of its own; nodes can be killed, and the head as well."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.servers.free_ports import free_port

NODE_CPUS = 2
_STARTS = 3
_END_SECONDS = 10.0
_PORTS = ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent")


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        address: Address for ``ray.init``.
        nodes: Ids of the nodes beside the head, which runs no tasks.
    """

    process: subprocess.Popen[str]
    address: str = ""
    nodes: list[str] = field(default_factory=list)

    def add_node(self) -> str:
        """Start another node and return its id."""
        self.nodes.append(self._ask("add"))
        return self.nodes[-1]

    def kill_node(self, node: str) -> None:
        """End a node's raylet, as the death of its machine would."""
        self._ask("kill", node)
        self.nodes.remove(node)

    def kill_head(self) -> None:
        """End the head."""
        self._ask("kill-head")

    def named_actors(self) -> list[str]:
        """Return the names of actors that keep a place or wait for one."""
        return list(self._ask("actors"))

    def _ask(self, *words: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the cluster has ended")


@contextmanager
def ray_cluster(folder: Path, *, nodes: int, port: int = 0, **environment: str) -> Iterator[RayCluster]:
    """Run a cluster until the block ends.

    Args:
        folder: Where its log goes.
        nodes: Nodes beside the head.
        port: Port of the head; 0 for a free one.
        environment: Variables of the nodes, and so of the workers on them.
    """
    more = {"RAY_raylet_start_wait_time_s": "60", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "ray.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            env={**os.environ, **more, **environment},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    cluster = RayCluster(process)
    try:
        cluster.address = cluster._ask("head", port or free_port())
        for _ in range(nodes):
            cluster.add_node()
        yield cluster
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ports() -> dict[str, int]:
    """Name the ports of a node's agents: a raylet waits only fifteen seconds for agents that choose theirs."""
    return {f"{agent}_port": free_port() for agent in _PORTS}


def add_node(cluster: Any, **options: Any) -> Any:
    """Start a node; on a busy machine its raylet may give its agents up."""
    for attempt in range(_STARTS):
        try:
            return cluster.add_node(**options, **ports())
        except Exception:
            if attempt == _STARTS - 1:
                raise
            if cluster.head_node is None:  # its store of names goes on, and would refuse the next head
                end_processes()
    return None


def end_processes() -> None:
    """End what this process has started."""
    started = psutil.Process().children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=_END_SECONDS)


def named_actors(address: str) -> list[str]:
    import ray
    from ray.util import list_named_actors

    ray.init(address, log_to_driver=False, logging_level="ERROR")
    try:
        return [each["name"] for each in list_named_actors(all_namespaces=True)]
    finally:
        ray.shutdown()


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), {}
    for line in sys.stdin:
        answer: Any = None
        match json.loads(line):
            case ["head", port]:
                # Not the dashboard: it takes longer than all else.
                add_node(cluster, num_cpus=0, include_dashboard=False, gcs_server_port=port)
                answer = cluster.address
            case ["add"]:
                node = add_node(cluster, num_cpus=NODE_CPUS)
                nodes[node.node_id] = node
                answer = node.node_id
            case ["kill", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["actors"]:
                answer = named_actors(cluster.address)
            case ["kill-head"]:
                cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        print("answer", json.dumps(answer), flush=True)
    started = psutil.Process().children(recursive=True)
    for node in [*nodes.values(), cluster.head_node]:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    _, alive = psutil.wait_procs(started, timeout=_END_SECONDS)  # workers end when they notice that their raylet has
    for process in alive:
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
