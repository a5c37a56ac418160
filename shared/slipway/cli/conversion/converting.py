"""Convert in a process of its own, within limits, and show what was done; the target appears only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from slipway.cli.stages.running import check_file, check_new_folder, run_call
from slipway.files.paths import check_local
from slipway.files.work_folders import publish, unfinished
from slipway.machine.cgroup import ControlGroup, available_memory, usable_cores
from slipway.model.weights.conversion import Conversion, ConvertedWeights
from slipway.progress.observer import ProgressForm
from slipway.registry import stage_of
from slipway.settings import Settings
from slipway.sizes import format_size
from slipway.stage import Role
from slipway.stage_call import Limits, StageCall
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.texts import counted


def convert_weights(source: Path, out: Path, *, key: str, timeout: float | None, progress: ProgressForm) -> Conversion:
    """Convert a file, or what lies below a folder, into the new folder ``out``.

    Raises:
        ArtifactError: ``FILE_ERROR``, ``OUTPUT_EXISTS``, ``LINK_OUTSIDE``.
        ModelExportError: The failure of the conversion.
    """
    check_local(source, named_by="SOURCE")
    check_local(out, named_by="--out")
    folder, file = (source, "") if source.is_dir() else (source.parent, source.name)
    if file:
        check_file(source)
    check_new_folder(out)
    group = ControlGroup()
    limits = Limits(timeout or 0.0, available_memory(group.memory()) // 2, usable_cores(group))
    name = stage_of(Role.CONVERSION).name
    call = StageCall(name, {"file": file, "key": key}, {}, limits).on_folders({"source": folder.resolve()})
    with unfinished(out) as scratch:
        workdir = scratch / "work"
        workdir.mkdir()
        level = Settings.from_environment(os.environ).log_level
        outcome = run_call(call, workdir, name=name, progress=progress, level=level)
        converted = Path(outcome.outputs["converted"])
        conversion = Conversion.read(converted)
        publish(converted, out)
    return conversion


def conversion_table(found: Conversion) -> Iterator[RenderableType]:
    """Yield one row per model or file of weights, and below them what was left as it is."""
    table = FittedTable(
        Column("source", style="bold"),
        Column("result", wrap=True),
        Column("tensors", rank=2, right=True),
        Column("size", rank=1, right=True),
        Column("left out", rank=3, wrap=True),
    )
    for one in found.weights:
        done = bool(one.target)
        table.add_row(
            one.source,
            _result(one) if done else Text(f"{one.reason}: {one.message}", style="red"),
            str(one.tensors) if done else "–",
            format_size(one.nbytes) if done else "–",
            ", ".join([*one.left_out, *(f"{name} (tied)" for name in one.ties)]),
        )
    yield table
    for skipped in found.skipped:
        yield Prose(f"{skipped.source}: ", "dim", skipped.why)


def _result(one: ConvertedWeights) -> str:
    return one.target if one.files == 1 else f"{one.target} and {counted(one.files - 1, 'more file')}"
