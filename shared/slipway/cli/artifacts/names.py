"""Name artifacts for people, by the exports that made or used them, or by their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from slipway.formats.registry import runtimes_to_try
from slipway.texts import one_line
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.embedded.local_exports import LocalExport  # needs the coordinator's libraries

_CONTENTS = (("adapter_config.json", "adapter"), ("validation.json", "validation"))
"""Name by a characteristic file; files of formats are checked after these."""


def artifact_names(exports: Iterable[LocalExport]) -> dict[str, str]:
    """Return names by digest: ``h_half onnx-int8``, ``qwen3-base (base)``; the oldest export names a shared artifact."""
    found: dict[str, str] = {}
    for export in exports:
        if export.message is not None:
            found |= _names(export.message)
    return found


def content_name(files: Sequence[str], made_by: Sequence[str]) -> str:
    """Guess the name of an artifact that no export of this machine knows.

    Args:
        files: Paths in it.
        made_by: Names of the outputs under which stages recorded it.
    """
    if made_by:
        return ", ".join(made_by)
    known = next((name for file, name in _CONTENTS if file in files), "") or _model(files)
    return known or (f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else "".join(files))


def _model(files: Sequence[str]) -> str:
    """Return which format's model the files are; empty if they fit no format."""
    for each, runtime in runtimes_to_try():
        if any(fnmatch(file, pattern) for file in files for pattern in runtime.files):
            return "adapter" if runtime.on_base else "model" if each.is_model else f"{each.title} model"
    return ""


def _names(export: pb.Export) -> dict[str, str]:
    labels: Mapping[str, str] = {name: one_line(value) for name, value in export.labels.items()}
    model = labels.get("model_name", "")
    sources = {
        "base": f"{labels.get('base_model', '')} (base)".strip(),
        "adapter": f"{model} {labels.get('checkpoint', '')} (adapter)".strip(),
    }
    found = {digest: sources.get(name, f"{model} ({name})".strip()) for name, digest in export.sources.items()}
    for task in export.tasks:
        for name, digest in task.outputs.items():
            what = task.format or (task.id if len(task.outputs) == 1 else f"{task.id} {name}")
            found[digest] = f"{model} {what}".strip()
    return found
