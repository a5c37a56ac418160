"""Run a format's inspection in a process of its own, within limits."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slipway.cli.stages.running import check_file, run_call
from slipway.errors import ArtifactError
from slipway.files.paths import check_local
from slipway.formats.registry import formats
from slipway.machine.cgroup import ControlGroup, available_memory
from slipway.model.activations import Inspection
from slipway.progress.observer import ProgressForm
from slipway.stage_call import Limits, StageCall


def inspect_graphs(model: Path, *, timeout: float) -> Inspection:
    """Inspect a graph, or all graphs of a folder.

    Raises:
        ArtifactError: ``FILE_ERROR``: there is no such graph, or no installed format inspects it.
        ModelExportError: The failure of the inspection.
    """
    check_local(model, named_by="MODEL")
    folder, name = (model, "") if model.is_dir() else (model.parent, model.name)
    if name:
        check_file(model)
    stages = (
        each.runtime.inspect
        for each in formats().values()
        if each.runtime is not None and (model.suffix in each.media_types if name else each.runtime.recognises(folder))
    )
    stage = next(filter(None, stages), "")
    if not stage:
        raise ArtifactError(
            f"{model} is no graph that an installed format inspects",
            reason="FILE_ERROR",
            remedy="name the file of a graph, or the folder of an export",
            about={"file": model},
        )
    limits = Limits(timeout, available_memory(ControlGroup().memory()) // 2, 1)
    call = StageCall(stage, {"file": name}, {}, limits).on_folders({"model": folder.resolve()})
    with tempfile.TemporaryDirectory(prefix="slipway-inspect-") as scratch:
        outcome = run_call(call, Path(scratch), name="inspect", progress=ProgressForm.NONE, level="warning")
        return Inspection.read(Path(outcome.outputs["inspection"]))
