"""The WorkflowTemplate of Argo Workflows: what hera renders, and its step, run here as its pod would run it, at a real coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands.cli import SLIPWAY
from support.commands.platforms import EXAMPLES, Platform, finish
from support.coordinators.pipeline_site import PipelineSite

pytestmark = pytest.mark.slow
FOLDER = EXAMPLES / "argo"


def template() -> dict[str, Any]:
    (made,) = yaml.safe_load((FOLDER / "export.yaml").read_text())["spec"]["templates"]
    return dict(made)


class Pod:
    """The step's pod: its command with the parameters of a workflow, this machine's folder for ``/tmp``, and the variables of a site."""

    def __init__(self, site: PipelineSite, folder: Path, *, uid: str, **parameters: str) -> None:
        self.folder = folder
        made = template()
        values = {f"{{{{workflow.parameters.{name}}}}}": value for name, value in parameters.items()}
        values["{{workflow.uid}}"] = uid
        inputs = {each["name"]: values[each["value"]] for each in made["inputs"]["parameters"]}
        words = "\0".join(made["container"]["args"]).replace("/tmp/", f"{folder}/tmp/")
        for name, value in inputs.items():
            words = words.replace(f"{{{{inputs.parameters.{name}}}}}", value)
        self.command = [*made["container"]["command"], *words.split("\0")]
        names = {variable["name"] for variable in made["container"]["env"]}
        assert {"SLIPWAY_COORDINATOR", "SLIPWAY_PROJECT", "SLIPWAY_HOME"} <= names
        self.environment = {
            **os.environ,
            **site.environment(),
            "SLIPWAY_HOME": str(folder / "home"),
            "PATH": os.pathsep.join([str(Path(SLIPWAY).parent), os.environ["PATH"]]),
        }

    def start(self) -> subprocess.Popen[str]:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self.command, env=self.environment, cwd=self.folder, text=True, **output)

    def output(self, name: str) -> str:
        (path,) = [p["valueFrom"]["path"] for p in template()["outputs"]["parameters"] if p["name"] == name]
        return (self.folder / path.lstrip("/")).read_text()


def pod(site: PipelineSite, folder: Path, *, uid: str, formats: str = "pytorch", base: str = "") -> Pod:
    parameters = {"checkpoint": site.checkpoint, "base-model": base or site.base, "formats": formats}
    return Pod(site, folder, uid=uid, **parameters)


def test_the_yaml_is_what_hera_renders(platforms: Callable[[str], Platform]) -> None:
    code, rendered = platforms("argo").run(FOLDER / "workflow_template.py")
    assert code == 0, rendered
    assert rendered == (FOLDER / "export.yaml").read_text(), "python workflow_template.py > export.yaml"


def test_a_step_exports_and_hands_the_digests_on(site: PipelineSite, tmp_path: Path) -> None:
    made = pod(site, tmp_path, uid="argo-1")
    code, log = finish(made.start())
    assert code == 0, log + site.logs()
    export = site.call("GET", made.output("export")).json
    assert export["state"] == "EXPORT_STATE_SUCCEEDED"
    assert json.loads(made.output("digests")) == {"pytorch": export["outputs"]["pytorch"]}
    code, log = finish(made.start())  # a pod that is run again finds the export
    assert code == 0, log
    assert made.output("export") == export["name"]


@pytest.mark.parametrize("formats", ["pytorch", "onnx:int5"])
def test_a_step_fails_with_the_reason(site: PipelineSite, tmp_path: Path, formats: str) -> None:
    before = site.names()
    code, log = finish(pod(site, tmp_path, uid=f"bad-{formats}", formats=formats, base=site.other_base).start())
    if formats == "pytorch":
        assert (code, "ADAPTER_BASE_MISMATCH" in log) == (3, True), log
        assert len(site.names()) == len(before) + 1
    else:
        assert (code, "int5" in log) == (3, True), log
        assert site.names() == before
    assert "Traceback" not in log


def test_a_step_that_is_ended_cancels_its_export_and_continues_it_in_the_next_try(
    site: PipelineSite, tmp_path: Path
) -> None:
    before = site.names()
    made = pod(site, tmp_path, uid="ended", formats="gguf")
    for _ in range(2):
        running = made.start()
        export = site.wait_for_export("RUNNING", besides=before)
        running.send_signal(signal.SIGTERM)
        code, log = finish(running)
        assert code == 143, log
        assert site.wait_for_export("CANCELLED", besides=before)["name"] == export["name"]
    retried = json.loads(template()["retryStrategy"]["expression"].rpartition(" in ")[2])
    assert 143 in retried
