"""Complete the folder of a level: describe its own graphs, and write the packages that its ``onnx_export.json`` asks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import onnx_ir as ir

from slipway.files.json_documents import read_json_object
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import CONFIG, GENERATION_CONFIG
from slipway.model.sentences import drop_language_head
from slipway.stage import Context
from slipway_onnx_export.checks.packaged import check_package
from slipway_onnx_export.checks.written import FaultError
from slipway_onnx_export.packaging.genai import write_genai
from slipway_onnx_export.packaging.kinds import ENTRIES, NotPackagedError, Packaged
from slipway_onnx_export.packaging.optimum import write_optimum
from slipway_onnx_export.packaging.transformers_js import write_transformers_js
from slipway_onnx_export.packaging.triton import write_kserve, write_triton
from slipway_onnx_export.params import PackageKind
from slipway_onnx_export.statistics import Statistics

RECORD = "onnx_export.json"
CHECKS = "package_checks"

_WRITERS: Mapping[PackageKind, Callable[[Packaged], str]] = {
    "genai": write_genai,
    "transformers_js": write_transformers_js,
    "optimum": write_optimum,
    "triton": write_triton,
    "kserve": write_kserve,
}


_OF_THE_GRAPH = ("checks", "data_bytes", "graph_bytes", "nodes", "operators", "statistics")
"""Fields of a record about the graphs beside it; a level has other graphs."""
_OF_THE_EXPORT = ("parity", "proven_harmless")
"""Prefixes of its fields about the comparison with PyTorch, which was made with the unquantized graphs."""


def complete_level(folder: Path, *, level: str, ctx: Context) -> None:
    """Make the record of a level describe its own graphs, and write the level's packages.

    The record is a copy of the unquantized output's. Its fields about the unquantized graphs move to ``unquantized``.

    Args:
        folder: A complete folder of graphs at the level.
        level: The level.
        ctx: As in :func:`write_packages`.
    """
    record = _read(folder / RECORD)
    files = sorted(folder.glob("*.onnx"))
    if record and files:
        of_others = {
            name: value for name, value in record.items() if name in _OF_THE_GRAPH or name.startswith(_OF_THE_EXPORT)
        }
        statistics = Statistics.of(map(ir.load, files))
        data = [path for path in folder.iterdir() if path.name.startswith(tuple(f"{each.name}." for each in files))]
        own = {
            "nodes": statistics.nodes,
            "operators": dict(statistics.operators),
            "graph_bytes": sum(path.stat().st_size for path in files),
            "data_bytes": sum(path.stat().st_size for path in data),
        }
        kept = {name: value for name, value in record.items() if name not in of_others}
        _write(folder, {**kept, **own, "unquantized": of_others})
    write_packages(folder, level=level, ctx=ctx)


def write_packages(folder: Path, *, level: str, ctx: Context) -> None:
    """Write a folder's packages, and note in its record what was written or why not.

    Args:
        folder: A complete folder of graphs; the list ``packaging`` of its ``onnx_export.json`` names the packages.
        level: Quantization level of the graphs; empty if unquantized.
        ctx: Context of the stage; it gets a warning for each package that the model cannot have.
    """
    record = _read(folder / RECORD)
    asked = record.get("packaging")
    kinds = [kind for kind in get_args(PackageKind) if isinstance(asked, list) and kind in asked]
    if not kinds:
        return
    _remove(folder, get_args(PackageKind))  # packages of the level that this one is made from
    config = ModelConfig(drop_language_head(_read(folder / CONFIG), folder))
    family = config.family
    told = record.get("packages")  # results for the unquantized output, whose record was copied
    told = told if level and isinstance(told, dict) else {}
    results: dict[str, str] = {}
    checks: dict[str, dict[str, str]] = {}
    for kind in kinds:
        try:
            if family is None:
                raise NotPackagedError("its family is unknown")  # noqa: TRY301 - told like the reasons of a writer
            model = Packaged(folder, family, level, config, _read(folder / GENERATION_CONFIG))
            results[kind] = _WRITERS[kind](model)
            checks |= _check(kind, model, ctx)
        except (NotPackagedError, FaultError) as reason:
            _remove(folder, [kind])
            results[kind] = f"not packaged: {reason}"
            if results[kind] != told.get(kind) or isinstance(reason, FaultError):
                ctx.warn(f"the ONNX model has no {kind} package{level and f' at {level}'}: {reason}")
    record.pop(CHECKS, None)  # checks of the level that this one is made from
    described = {**record, "packages": results} | ({CHECKS: checks} if checks else {})
    _write(folder, described)
    ctx.record(packages=results)


def _check(kind: PackageKind, model: Packaged, ctx: Context) -> dict[str, dict[str, str]]:
    """Check a package's own graphs; return the results by the package's name, or an empty dict if it has no graphs.

    Raises:
        FaultError: A check fails.
    """
    files = sorted(path for name in ENTRIES[kind] for path in (model.folder / name).rglob("*.onnx"))
    if not files:
        return {}
    end = model.config.text.get("eos_token_id")
    one = end if isinstance(end, int) else None
    return {kind: check_package(files, model.folder, end=one, max_memory_bytes=ctx.max_memory_bytes)}


def _remove(folder: Path, kinds: Iterable[PackageKind]) -> None:
    for entry in (folder / name for kind in kinds for name in ENTRIES[kind]):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, lenient=True)
    except (OSError, ValueError):
        return {}
