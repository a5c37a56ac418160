"""Compile the example's pipeline, and run it as kfp runs pipelines on a machine: ``run_kubeflow.py FOLDER PARAMETERS``.

kfp runs containers by Docker. Here their commands are processes of this machine: what they are, in which order they run, what
replaces their placeholders and what becomes of their outputs is kfp's own work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeline
from kfp import compiler, local
from kfp.local import docker_task_handler


class NoDocker:
    """The client that kfp opens before it runs a container."""

    def info(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def run_here(client: object, image: str, command: list[str], volumes: object, **more: Any) -> int:
    """Stand in for kfp's call of Docker, which has the same arguments."""
    print("variables", json.dumps(sorted(more.get("environment", {}))))
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH_OF_STEPS"]}
    return subprocess.run(command, env=environment, check=False).returncode


def main(folder: Path, parameters: dict[str, str]) -> None:
    compiler.Compiler().compile(pipeline.export_pipeline, package_path=str(folder / "compiled.yaml"))
    if not parameters:
        return
    docker_task_handler.run_docker_container = run_here
    docker_task_handler.docker.from_env = NoDocker
    local.init(runner=local.DockerRunner(), pipeline_root=str(folder / "outputs"), raise_on_error=True)

    print("digests", json.dumps(pipeline.export_pipeline(**parameters).output))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
