"""A run whose secrets are known words: nothing that is written, printed or shown by ps holds one of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.security.access.principals import token_hash
from slipway.settings.security import Security
from support import TINY_STAGES
from support.commands.cli import SLIPWAY
from support.coordinators.harness import CONFIGURATION, process, wait_for
from support.servers.certificates import Authority

CANARY = "canary-{}-0123456789abcdef"


@pytest.mark.slow
def test_no_secret_is_found_anywhere_after_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with ExitStack() as stack:
        for started in run.servers(stack):
            words = " ".join(psutil.Process(started.pid).cmdline())
            assert not run.secrets_in(words.encode())
        export = run.export()
        assert export.tasks
        run.wrong_token_is_refused()
        refused = run.token_in_place_of_its_file()
        shown = run.command("get", export.name, "--json") + run.command("list") + run.command("list", "--debug")
    assert export.name.rpartition("/")[2] in shown
    assert not run.secrets_in((shown + refused).encode())
    found = {path for path in run.written() if run.secrets_in(path.read_bytes())}
    assert found == set()
    logs = (run.home / "coordinator.log").read_text() + (run.home / "worker.log").read_text()
    assert '"name": "stage' in logs  # spans were written, and searched
    assert "the token is not known" in logs


class Run:
    """A coordinator and a worker with TLS, tokens in files, and one in the environment."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.private = folder / "private"
        for made in (self.home, self.private):
            made.mkdir()
        self.tokens = {name: CANARY.format(name) for name in ("worker", "ci", "wrong")}
        self.authority = Authority(self.private / "tls")
        self.authority.files("server", "localhost")
        keys = [path.read_text().splitlines()[1] for path in self._keys()]
        self.around = {
            name: CANARY.format(name.lower()) for name in ("GH_PAT", "PRIVATE_KEY", "SENTRY_DSN", "MYSQL_PWD")
        }
        self.around["DATABASE_URL"] = f"postgresql://slipway:{CANARY.format('url')}@db/slipway"
        self.secrets = [*self.tokens.values(), *keys, *self.around.values(), CANARY.format("url")]
        (self.private / "access.yaml").write_text(
            f"principals:\n  - {{name: ci, role: submitter, projects: [red], token_sha256: {token_hash(self.tokens['ci'])}}}\n"
            f"  - {{name: worker, role: worker, token_sha256: {token_hash(self.tokens['worker'])}}}\n"
        )
        (self.private / "worker.token").write_text(self.tokens["worker"])

    def _keys(self) -> list[Path]:
        return sorted((self.private / "tls").glob("*.key"))

    def secrets_in(self, data: bytes) -> list[str]:
        return [secret for secret in self.secrets if secret.encode() in data]

    def written(self) -> Iterator[Path]:
        """Every file of the run outside the folder of secrets."""
        found = [path for path in sorted(self.home.rglob("*")) if path.is_file()]
        assert len(found) > 5
        yield from found

    def environment(self) -> dict[str, str]:
        tls = self.private / "tls"
        return {
            **self.around,
            "SLIPWAY_HOME": str(self.home),
            "SLIPWAY_TRACING": "console",
            "SLIPWAY_TLS_CA_FILE": str(self.authority.ca),
            "SLIPWAY_TLS_CERT_FILE": str(tls / "server.pem"),
            "SLIPWAY_TLS_KEY_FILE": str(tls / "server.key"),
        }

    def servers(self, stack: ExitStack) -> list[subprocess.Popen[bytes]]:
        access = {"SLIPWAY_ACCESS_FILE": str(self.private / "access.yaml")}
        command = [SLIPWAY, "coordinator", "--listen", "localhost:0", "--state"]
        command += [str(self.home / "state.db"), "--log-level", "DEBUG"]
        coordinator = stack.enter_context(
            process(command, self.home / "coordinator.log", **self.environment(), **access)
        )
        self.address = f"localhost:{wait_for(lambda: port_of(coordinator))}"
        wait_for(self.answers)
        command = [SLIPWAY, "worker", "--stage", "merge,quantize,reference,validate,onnx_export"]
        command += [
            "--coordinator",
            self.address,
            "--token-file",
            str(self.private / "worker.token"),
            "--log-level",
            "DEBUG",
        ]
        more = {
            "PYTHONPATH": os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]]),
            "SLIPWAY_TEST_STAGES": str(self.home),
        }
        worker = stack.enter_context(process(command, self.home / "worker.log", **self.environment(), **more))
        return [coordinator, worker]

    def client(self, token: str) -> Client:
        security = Security.from_environment(self.environment() | {"SLIPWAY_TOKEN": token})
        return Client(self.address, security=security, project="red")

    def answers(self) -> bool:
        try:
            with self.client(self.tokens["ci"]) as client:
                list(client.list_exports())
        except ModelExportError as error:
            assert error.reason == "COORDINATOR_UNAVAILABLE"
            return False
        return True

    def export(self):  # type: ignore[no-untyped-def]
        source = self.home / "base.txt"
        source.write_text("base")
        with self.client(self.tokens["ci"]) as client:
            digest = client.push_artifact({"base": source})
            made = client.create_export(CONFIGURATION, sources={"base": digest, "adapter": digest}, export_id="x")
            return [event.export for event in client.watch_export(made.name) if event.HasField("export")][-1]

    def wrong_token_is_refused(self) -> None:
        with self.client(self.tokens["wrong"]) as client, pytest.raises(ModelExportError) as caught:
            client.get_export("x")
        assert not self.secrets_in(str(caught.value).encode())

    def token_in_place_of_its_file(self) -> str:
        """What commands and a worker say of a token that was typed where its file belongs, with traces on the console."""
        said = ""
        typed = ["--coordinator", self.address, "--token-file", self.tokens["ci"]]
        for words in (["list", "--debug"], ["push", ".", "--debug"], ["worker", "--stage", "merge"]):
            done = subprocess.run(
                [SLIPWAY, *words, *typed],
                env=os.environ | self.environment(),
                cwd=self.home,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 3, done.stderr
            assert "--token-file" in done.stderr
            said += done.stdout + done.stderr
        return said

    def command(self, *words: str) -> str:
        """What a command prints, with the token in its environment."""
        environment = os.environ | self.environment() | {"SLIPWAY_TOKEN": self.tokens["ci"], "SLIPWAY_PROJECT": "red"}
        done = subprocess.run(
            [SLIPWAY, *words, "--coordinator", self.address],
            env=environment,
            cwd=self.home,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def port_of(started: subprocess.Popen[bytes]) -> int:
    """The port a process listens on."""
    connections = psutil.Process(started.pid).net_connections("tcp")
    return next((found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN), 0)
