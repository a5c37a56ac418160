"""Stages with the real names that do almost nothing; Python finds them first if this folder is first on its path.

The folder ``SLIPWAY_TEST_STAGES`` records and controls them: each run is one line of ``runs``, a stage waits while a file
``hold-{stage}`` exists, and fails if ``fail-{stage}`` exists (a quantization level in it limits this to that level). Each takes ``SLIPWAY_TEST_SECONDS``.
The validation finds that the outputs named in a file ``reject`` fail.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import ConfigDict

from slipway.errors import ModelExportError
from slipway.stage import Context, Role, Stage, StageParams


class AnyParams(StageParams):
    model_config = ConfigDict(extra="allow")


def _stage(name: str, output: str, *, role: Role | None = None) -> Stage[AnyParams]:
    def run(inputs: Mapping[str, Path], params: AnyParams, ctx: Context) -> dict[str, Path]:
        folder = Path(os.environ["SLIPWAY_TEST_STAGES"])
        with (folder / "runs").open("a") as file:
            file.write(f"{name}\n")
        until = time.monotonic() + float(os.environ.get("SLIPWAY_TEST_SECONDS", "0"))
        while time.monotonic() < until or (folder / f"hold-{name}").exists():
            ctx.progress("holding", done=0)
            time.sleep(0.05)
        failing = folder / f"fail-{name}"
        if failing.exists() and failing.read_text() in {"", (params.model_extra or {}).get("level")}:
            raise ModelExportError(f"{name} fails because the test says so", reason="UNSUPPORTED")
        rejected = folder / "reject"
        if name == "validate" and rejected.exists():
            found = [output for output in rejected.read_text().split() if output in inputs]
            verdict = {"explanation": "the test says so", "worst_modules": ["layers.0.q_proj"]}
            ctx.record(failed_outputs=found, outputs=dict.fromkeys(found, verdict))
        (ctx.workdir / output).mkdir()
        (ctx.workdir / output / "made").write_text(
            f"{name} {sorted(inputs)} {sorted((params.model_extra or {}).items())}"
        )
        (ctx.workdir / output / "from").write_text(_digest(inputs))
        return {output: ctx.workdir / output}

    return Stage(name, version=1, inputs=(), outputs=(output,), params=AnyParams, run=run, more_inputs=True, role=role)


def _digest(inputs: Mapping[str, Path]) -> str:
    """Return a digest of all input files."""
    digest = hashlib.sha256()
    for name, folder in sorted(inputs.items()):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(f"{name}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


MERGE = _stage("merge", "pytorch", role=Role.MERGE)
CALIBRATION_DATA = _stage("calibration_data", "data", role=Role.CALIBRATION_DATA)
CALIBRATE = _stage("calibrate", "calibration", role=Role.CALIBRATION)
QUANTIZE = _stage("quantize", "model", role=Role.QUANTIZATION)
ONNX_EXPORT = _stage("onnx_export", "onnx")
REFERENCE = _stage("reference", "reference", role=Role.REFERENCE)
VALIDATE = _stage("validate", "validation", role=Role.VALIDATION)
