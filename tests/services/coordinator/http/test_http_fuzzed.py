"""Requests that schemathesis makes of the OpenAPI document find no fault of the server: 2,000 of them, valid and not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.coordinators.http_places import call
from support.servers.free_ports import free_port

# It pins what others need, so it is a program of its own: SCHEMATHESIS, or the one that is found.
SCHEMATHESIS = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
CASES = 2000
# UPLOAD_LOST is a 503: whoever goes on with an upload that is not there asks again where it ended.
CONFIGURATION = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]\n'


@pytest.mark.slow
@pytest.mark.skipif(not SCHEMATHESIS, reason="schemathesis is not installed")
@pytest.mark.timeout(3600)
def test_no_request_is_a_fault_of_the_server(tmp_path: Path) -> None:
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    command = [SLIPWAY, "coordinator", "--listen", f"127.0.0.1:{free_port()}", "--state", str(tmp_path / "state.db")]
    with process([*command, "--http", address], log, SLIPWAY_HOME=str(tmp_path)) as running:

        def serves() -> bool:
            try:
                return call(address, "GET", "/healthz").status == 200
            except OSError:
                return running.poll() is not None

        wait_for(serves, seconds=600)
        described = tmp_path / "openapi.json"
        document = call(address, "GET", "/openapi.json").json
        described.write_text(json.dumps(document))
        (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
        each = 2 * CASES // sum(len(calls) for calls in document["paths"].values())  # some have few different requests
        done = subprocess.run(
            [
                str(SCHEMATHESIS),
                "run",
                str(described),
                f"--url=http://{address}",
                "--checks=not_a_server_error",
                "--phases=fuzzing",
                "--mode=all",
                f"--max-examples={each}",
                "--generation-database=none",
                "--exclude-operation-id=WatchExport",  # streams have tests of their own
                "--exclude-operation-id=WatchExports",
                "--request-timeout=60",
                "--suppress-health-check=too_slow",  # a busy machine generates slowly
                "--continue-on-failure",
                "--seed=1",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        (made,) = re.findall(r"(\d+) generated", done.stdout)
        assert int(made) >= CASES
        assert call(address, "GET", "/v1/projects/default/exports").status == 200
    assert "Traceback" not in log.read_text()
