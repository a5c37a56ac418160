"""A coordinator with a port for HTTP and a worker that imports sources, for the examples of pipelines; a run in a bucket, its base on a hub."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.security.access.principals import new_token, token_hash
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.coordinators.http_places import Answer, call
from support.models import tiny_models
from support.servers.free_ports import free_port
from support.servers.hub_server import HubServer
from support.servers.s3_server import BUCKET, S3Server

PROJECT = "research"
STAGES = "import,merge,reference,validate"
"""Stages of the worker: an export to another format waits for a worker until it is cancelled."""
QUICK = {"effort": "quick", "benchmarkPerformance": False}
ONLY_PYTORCH = {"pytorch": {"enabled": True}, "onnx": {"enabled": False}}
WAITS = {"pytorch": {"enabled": False}, "gguf": {"enabled": True}, "onnx": {"enabled": False}}


@dataclass
class PipelineSite:
    """Where pipelines make exports.

    Attributes:
        folder: With the logs.
        grpc: Address of the coordinator for the command.
        http: Its address for HTTP.
        token_file: Token of a submitter.
        checkpoint: Address of a training run.
        base: Address of its base model.
        other_base: Address of a model that it was not trained on.
    """

    folder: Path
    grpc: str
    http: str
    token_file: Path
    checkpoint: str
    base: str
    other_base: str

    @property
    def token(self) -> str:
        return self.token_file.read_text()

    def configuration(self, *, base: str = "", **formats: Any) -> dict[str, Any]:
        """Return settings of an export of the run, by default to PyTorch."""
        return {
            "checkpoint": {"path": self.checkpoint},
            "baseModel": {"name": base or self.base},
            "formats": formats or ONLY_PYTORCH,
            "validation": QUICK,
        }

    def environment(self) -> dict[str, str]:
        """Return the variables of a step that runs the command; its settings let an export take seconds."""
        return {
            "SLIPWAY_COORDINATOR": self.grpc,
            "SLIPWAY_PROJECT": PROJECT,
            "SLIPWAY_TOKEN_FILE": str(self.token_file),
            "EXPORT_VALIDATION_EFFORT": "quick",
            "EXPORT_VALIDATION_BENCHMARK_PERFORMANCE": "false",
        }

    def call(self, verb: str, path: str, body: Any = None) -> Answer:
        return call(self.http, verb, f"/v1/{path}", body, token=self.token)

    def exports(self) -> list[dict[str, Any]]:
        """Return all exports, newest first."""
        return list(self.call("GET", f"projects/{PROJECT}/exports?pageSize=100").json.get("exports", ()))

    def wait_for_export(self, state: str, *, besides: list[str]) -> dict[str, Any]:
        """Wait until an export that was not there before has a state, and return it."""

        def found() -> dict[str, Any] | None:
            new = [each for each in self.exports() if each["name"] not in besides]
            return next((each for each in new if each["state"] == f"EXPORT_STATE_{state}"), None)

        waited: dict[str, Any] = wait_for(found, seconds=480)
        return waited

    def names(self) -> list[str]:
        return [export["name"] for export in self.exports()]

    def logs(self) -> str:
        """Return the ends of the logs, for a test that fails."""
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def answers(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self.call("GET", f"projects/{PROJECT}/exports").status == 200
        return False


@contextmanager
def pipeline_site(folder: Path, s3: S3Server) -> Iterator[PipelineSite]:
    """Run a coordinator and a worker until the block ends."""
    prefix, grpc, http = uuid.uuid4().hex, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    for name, text in _access(folder).items():
        (folder / name).write_text(text)
    with ExitStack() as stack:
        hub = stack.enter_context(HubServer())
        _upload(folder / "models", hub, s3, prefix)
        site = PipelineSite(
            *(folder, grpc, http, folder / "ci.token"),
            checkpoint=f"s3://{BUCKET}/{prefix}/run-17",
            base="hf://org/tiny",
            other_base="hf://org/other",
        )
        server = {
            **s3.environment(),
            "SLIPWAY_STORE": f"s3://{BUCKET}/{prefix}-store",
            "SLIPWAY_IMPORT_FROM": f"s3://{BUCKET}/{prefix} hf://org",
            "SLIPWAY_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
        }
        coordinator = ["coordinator", "--listen", grpc, "--http", http, "--state", str(folder / "state.db")]
        coordinator += ["--access-file", str(folder / "access.yaml")]
        worker = ["worker", "--coordinator", grpc, "--stage", STAGES, "--slots", "1", "--drain-seconds", "0"]
        worker += ["--token-file", str(folder / "worker.token")]
        for name, words in (("coordinator", coordinator), ("worker", worker)):
            stack.enter_context(process([SLIPWAY, *words], folder / f"{name}.log", **server))
        wait_for(site.answers, seconds=120)
        yield site


def _access(folder: Path) -> dict[str, str]:
    """Return an access file with a submitter and a worker, and their tokens, by the names of the files."""
    tokens = {"ci": new_token(), "worker": new_token()}
    roles = {"ci": f"role: submitter, projects: [{PROJECT}]", "worker": "role: worker"}
    lines = [
        f"  - {{name: {name}, {roles[name]}, token_sha256: {token_hash(token)}}}" for name, token in tokens.items()
    ]
    return {"access.yaml": "\n".join(["principals:", *lines]), **{f"{name}.token": t for name, t in tokens.items()}}


def _upload(models: Path, hub: HubServer, s3: S3Server, prefix: str) -> None:
    """Put a run into the bucket, and its base and another model onto the hub."""
    models.mkdir()
    hub.push("org/tiny", tiny_models.make_base(models / "base"))
    hub.push("org/other", tiny_models.make_base(models / "other", hidden=32))
    checkpoint = tiny_models.make_checkpoint(models / "base", models / "run")
    config = checkpoint / "adapter_config.json"
    config.write_text(config.read_text().replace(str(models / "base"), "org/tiny"))
    for path in sorted(checkpoint.iterdir()):
        s3.client().fput_object(BUCKET, f"{prefix}/run-17/{checkpoint.name}/{path.name}", str(path))
