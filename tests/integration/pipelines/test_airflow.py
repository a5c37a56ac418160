"""The operator of Airflow in the example's DAG, run by Airflow's own command at a real coordinator."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from support.commands.platforms import EXAMPLES, Platform, finish
from support.coordinators.harness import wait_for
from support.coordinators.pipeline_site import ONLY_PYTORCH, PROJECT, WAITS, PipelineSite

pytestmark = pytest.mark.slow


class Airflow:
    """An Airflow whose connection leads to a site."""

    def __init__(self, platform: Platform, site: PipelineSite) -> None:
        self.platform, self.site = platform, site
        host, _, port = site.http.rpartition(":")
        connection = {"conn_type": "http", "host": host, "port": int(port), "schema": "http", "password": site.token}
        self.variables = {
            "AIRFLOW_HOME": str(platform.folder / "home"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES / "airflow"),
            "AIRFLOW_CONN_SLIPWAY_DEFAULT": json.dumps({**connection, "extra": {"project": PROJECT}}),
        }

    def start(self, *, base: str = "", formats: dict[str, Any], **more: str) -> subprocess.Popen[str]:
        given = {"checkpoint": self.site.checkpoint, "base_model": base or self.site.base, "formats": formats}
        words = ("dags", "test", "slipway_export", "--conf", json.dumps(given))
        return self.platform.start("airflow", *words, **{**self.variables, **more})

    def query(self, text: str) -> list[Any]:
        """Return the first column of what the database of Airflow says."""
        with closing(sqlite3.connect(self.platform.folder / "home" / "airflow.db")) as database:
            return [row[0] for row in database.execute(text)]

    def states(self) -> list[str]:
        """Return the states of all tries of the task, in order."""
        return self.query("select state from task_instance order by start_date")


@pytest.fixture(scope="module")
def airflow(platforms: Callable[[str], Platform], site: PipelineSite) -> Airflow:
    airflow = Airflow(platforms("airflow"), site)
    code, output = airflow.platform.run("airflow", "db", "migrate", **airflow.variables)
    assert code == 0, output
    return airflow


def test_a_task_returns_digests_and_verdicts(airflow: Airflow, site: PipelineSite) -> None:
    before = site.names()
    code, output = finish(airflow.start(formats=ONLY_PYTORCH))
    assert code == 0, output + site.logs()
    assert airflow.states()[-1] == "success", output
    export = site.wait_for_export("SUCCEEDED", besides=before)
    value = airflow.query("select value from xcom where key = 'return_value'")[-1]
    found = json.loads(value)
    found = json.loads(found) if isinstance(found, str) else found
    assert set(found) == {"pytorch"}
    assert found["pytorch"]["digest"] == export["outputs"]["pytorch"]
    assert found["pytorch"]["verdict"] == "passed"
    assert found["pytorch"]["size_bytes"] > 100_000


def test_a_failing_export_fails_the_task_with_the_reason_and_without_another_try(
    airflow: Airflow, site: PipelineSite
) -> None:
    before = len(airflow.states())
    code, output = finish(airflow.start(base=site.other_base, formats=ONLY_PYTORCH))
    assert code != 0, output
    assert "ADAPTER_BASE_MISMATCH" in output
    assert airflow.states()[before:] == ["failed"]


def test_a_task_that_is_ended_cancels_its_export(airflow: Airflow, site: PipelineSite) -> None:
    before, tries = site.names(), len(airflow.states())
    running = airflow.start(formats=WAITS)
    export = site.wait_for_export("RUNNING", besides=before)
    running.send_signal(signal.SIGTERM)
    _, output = finish(running)
    assert site.wait_for_export("CANCELLED", besides=before)["name"] == export["name"]
    assert "CANCELLED: the export was cancelled" in output
    assert airflow.states()[tries:] == ["failed"]


def test_a_coordinator_that_is_away_is_a_reason_for_another_try(airflow: Airflow) -> None:
    tries = len(airflow.states())
    nobody = {"conn_type": "http", "host": "127.0.0.1", "port": 1, "extra": {"patience_seconds": 0}}
    running = airflow.start(formats=WAITS, AIRFLOW_CONN_SLIPWAY_DEFAULT=json.dumps(nobody))
    try:
        wait_for(lambda: airflow.states()[tries:] == ["up_for_retry"], seconds=240)
    finally:
        running.kill()
        output, _ = running.communicate()
    assert "COORDINATOR_UNAVAILABLE" in output
