"""Complete the folder of a level: describe its own graphs, and write the packages that are asked for.

The folder's ``onnx_export.json`` names them. That of NVIDIA Triton, a model repository, is written here, with the KServe
service that runs it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import onnx_ir as ir
import yaml

from slipway.files.json_documents import read_object_or_empty
from slipway.model.configuration import ModelConfig
from slipway.model.families import RAW_SPEECH
from slipway.model.model_files import CONFIG, GENERATION_CONFIG
from slipway.model.sentences import drop_language_head
from slipway.stage import Context
from slipway_onnx_export.checks.packaged import check_package
from slipway_onnx_export.checks.written import FaultError
from slipway_onnx_export.ir_graphs import Statistics
from slipway_onnx_export.packaging.genai import write_genai
from slipway_onnx_export.packaging.graphs import Interface, Shape, load_graph, read_interface, save_copy
from slipway_onnx_export.packaging.kinds import ENTRIES, OTHER_GRAPHS, RAW_SOUND, NotPackagedError, Packaged
from slipway_onnx_export.packaging.optimum import write_optimum
from slipway_onnx_export.packaging.transformers_js import write_transformers_js
from slipway_onnx_export.params import PackageKind

TRITON_FOLDER = "triton"
KSERVE_FILE = "kserve.yaml"

_LARGEST_BATCH = 32
_QUEUE_MICROSECONDS = 500
_TRITON_TYPES = {
    ir.DataType.INT64: "TYPE_INT64",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.FLOAT16: "TYPE_FP16",
}

RECORD = "onnx_export.json"
CHECKS = "package_checks"

_OF_THE_GRAPH = ("checks", "data_bytes", "graph_bytes", "nodes", "operators", "statistics")
"""Fields of a record about the graphs beside it; a level has other graphs."""
_OF_THE_EXPORT = ("parity", "proven_harmless")
"""Prefixes of its fields about the comparison with PyTorch, which was made with the unquantized graphs."""


def write_triton(model: Packaged) -> str:
    """Write the folder ``triton`` with one model for each graph; return its name.

    Raises:
        NotPackagedError: A graph has a type that Triton has no name for here.
    """
    root = model.folder / TRITON_FOLDER
    for graph in sorted(model.folder.glob("*.onnx")):
        name = "_".join(filter(None, (graph.stem, model.level)))
        configuration = triton_config(name, read_interface(model.folder, graph.name))
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(configuration, encoding="utf-8")
        save_copy(load_graph(model.folder, graph.name), root / name / "1" / "model.onnx", own=f"{graph.name}.data")
    return TRITON_FOLDER


def write_kserve(model: Packaged) -> str:
    """Write the manifest of an ``InferenceService`` that runs the folder ``triton``, which is written too; return its name."""
    if not (model.folder / TRITON_FOLDER).is_dir():
        write_triton(model)
    name = "-".join(filter(None, ("slipway", model.level)))
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "triton"},
                    "protocolVersion": "v2",
                    "storageUri": f"pvc://models/{name}/{TRITON_FOLDER}",
                }
            }
        },
    }
    head = f"# Copy the folder {TRITON_FOLDER} to this storageUri, or name the place where it is (s3://, gs://, hf://, pvc://).\n"
    (model.folder / KSERVE_FILE).write_text(head + yaml.safe_dump(service, sort_keys=False), encoding="utf-8")
    return KSERVE_FILE


def triton_config(name: str, graph: Interface) -> str:
    """Return the text of ``config.pbtxt``.

    Requests of the same lengths are joined in one call if the number of rows may vary: it is the first axis of every input and output,
    and Triton does not list it.
    """
    rows = {shape[:1] for shape in (*graph.inputs.values(), *graph.outputs.values())}
    alone = graph.promise.shared_buffer  # joined requests may have several tokens after a past
    joined = not alone and len(rows) == 1 and all(isinstance(axis, str) for axis in next(iter(rows)))
    lines = [
        f"name: {json.dumps(name)}",
        'platform: "onnxruntime_onnx"',
        f"max_batch_size: {_LARGEST_BATCH if joined else 0}",
    ]
    lines += _triton_tensors("input", graph.inputs, graph.dtypes, joined=joined)
    lines += _triton_tensors("output", graph.outputs, graph.dtypes, joined=joined)
    if joined:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_MICROSECONDS} }}")
    return "\n".join(lines) + "\n"


def _triton_tensors(
    kind: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, ir.DataType], *, joined: bool
) -> Iterator[str]:
    for name, shape in shapes.items():
        if dtypes.get(name) not in _TRITON_TYPES or not shape:
            raise NotPackagedError(f"its {kind} {name} has a type or shape that this package does not describe")
        sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in shape[joined:])
        yield f"{kind} {{ name: {json.dumps(name)} data_type: {_TRITON_TYPES[dtypes[name]]} dims: [ {sizes} ] }}"


_WRITERS: Mapping[PackageKind, Callable[[Packaged], str]] = {
    "genai": write_genai,
    "transformers_js": write_transformers_js,
    "optimum": write_optimum,
    "triton": write_triton,
    "kserve": write_kserve,
}


def complete_level(folder: Path, *, level: str, ctx: Context) -> None:
    """Make the record of a level describe its own graphs, and write the level's packages.

    The record is a copy of the unquantized output's. Its fields about the unquantized graphs move to ``unquantized``.

    Args:
        folder: A complete folder of graphs at the level.
        level: The level.
        ctx: As in :func:`write_packages`.
    """
    record = read_object_or_empty(folder / RECORD)
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
    record = read_object_or_empty(folder / RECORD)
    asked = record.get("packaging")
    kinds = [kind for kind in get_args(PackageKind) if isinstance(asked, list) and kind in asked]
    if not kinds:
        return
    _remove(folder, get_args(PackageKind))  # packages of the level that this one is made from
    config = ModelConfig(drop_language_head(read_object_or_empty(folder / CONFIG), folder))
    family = config.family
    told = record.get("packages")  # results for the unquantized output, whose record was copied
    told = told if level and isinstance(told, dict) else {}
    results: dict[str, str] = {}
    checks: dict[str, dict[str, str]] = {}
    for kind in kinds:
        try:
            if family is None:
                raise NotPackagedError("its family is unknown")  # noqa: TRY301 - told like the reasons of a writer
            model = Packaged(folder, family, level, config, read_object_or_empty(folder / GENERATION_CONFIG))
            if model.reads_pictures and kind in OTHER_GRAPHS:
                raise NotPackagedError(OTHER_GRAPHS[kind])  # noqa: TRY301 - so is this
            if family is RAW_SPEECH and kind in RAW_SOUND:
                raise NotPackagedError(RAW_SOUND[kind])  # noqa: TRY301 - and this
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
