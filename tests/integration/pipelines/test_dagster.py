"""The asset of Dagster, materialized by Dagster's own command at a real coordinator."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands.platforms import DRIVERS, EXAMPLES, Platform, finish
from support.coordinators.pipeline_site import PROJECT, QUICK, WAITS, PipelineSite

pytestmark = pytest.mark.slow
ASSET = EXAMPLES / "dagster" / "slipway_asset.py"


class Dagster:
    """An instance of Dagster in a folder, whose asset is exported at a site."""

    def __init__(self, platform: Platform, site: PipelineSite, folder: Path) -> None:
        self.platform, self.site = platform, site
        (folder / "home").mkdir()
        self.variables = {
            "DAGSTER_HOME": str(folder / "home"),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            "SLIPWAY_URL": f"http://{site.http}",
            "SLIPWAY_TOKEN": site.token,
        }

    def start(self, **config: Any) -> Any:
        given = {
            "checkpoint": self.site.checkpoint,
            "base_model": self.site.base,
            "more": {"validation": QUICK},
            **config,
        }
        run = {
            "ops": {"exported_model": {"config": given}},
            "resources": {
                "slipway": {
                    "config": {"url": {"env": "SLIPWAY_URL"}, "token": {"env": "SLIPWAY_TOKEN"}, "project": PROJECT}
                }
            },
        }
        words = ("asset", "materialize", "-f", ASSET, "--select", "exported_model", "--config-json", json.dumps(run))
        return self.platform.start("dagster", *words, **self.variables)

    def read(self) -> dict[str, Any]:
        code, output = self.platform.run(DRIVERS / "read_dagster.py", **self.variables)
        assert code == 0, output
        return dict(json.loads(re.findall(r"^read (.*)$", output, re.MULTILINE)[0]))


@pytest.fixture
def dagster(platforms: Callable[[str], Platform], site: PipelineSite, tmp_path: Path) -> Dagster:
    return Dagster(platforms("dagster"), site, tmp_path)


def test_a_materialization_shows_verdicts_distances_and_sizes(dagster: Dagster, site: PipelineSite) -> None:
    before = site.names()
    code, output = finish(dagster.start(formats={"pytorch": {}, "onnx": {"enabled": False}}))
    assert code == 0, output + site.logs()
    export = site.wait_for_export("SUCCEEDED", besides=before)
    found = dagster.read()
    assert found["runs"] == ["SUCCESS"]
    (row,) = found["rows"]
    assert (row["format"], row["verdict"], row["digest"]) == ("pytorch", "passed", export["outputs"]["pytorch"])
    assert 0 <= float(row["KL"]) < 0.01
    assert found["values"]["pytorch/bytes"] == row["bytes"] > 100_000
    assert found["values"]["pytorch/KL"] == pytest.approx(float(row["KL"]), rel=0.1)
    assert re.fullmatch("[0-9a-f]{64}", found["version"])
    assert "merge succeeded" in output


def test_a_failing_export_fails_the_run_with_the_reason(dagster: Dagster, site: PipelineSite) -> None:
    code, output = finish(
        dagster.start(base_model=site.other_base, formats={"pytorch": {}, "onnx": {"enabled": False}})
    )
    assert code == 1, output
    assert "ADAPTER_BASE_MISMATCH" in output
    assert dagster.read()["runs"] == ["FAILURE"]


def test_a_run_that_is_ended_cancels_its_export(dagster: Dagster, site: PipelineSite) -> None:
    before = site.names()
    running = dagster.start(formats=WAITS)
    export = site.wait_for_export("RUNNING", besides=before)
    running.send_signal(signal.SIGINT)
    code, output = finish(running)
    assert code != 0, output
    assert site.wait_for_export("CANCELLED", besides=before)["name"] == export["name"]
