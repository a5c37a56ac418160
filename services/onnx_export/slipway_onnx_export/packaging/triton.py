"""A model repository of NVIDIA Triton, and the KServe service that runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import yaml

from slipway_onnx_export.packaging.graphs import Interface, Shape, load_graph, read_interface, save_copy
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged

FOLDER = "triton"
SERVICE = "kserve.yaml"

_LARGEST_BATCH = 32
_QUEUE_MICROSECONDS = 500
_TYPES = {
    ir.DataType.INT64: "TYPE_INT64",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.FLOAT16: "TYPE_FP16",
}


def write_triton(model: Packaged) -> str:
    """Write the folder ``triton`` with one model for each graph; return its name.

    Raises:
        NotPackagedError: A graph has a type that Triton has no name for here.
    """
    root = model.folder / FOLDER
    for graph in sorted(model.folder.glob("*.onnx")):
        name = "_".join(filter(None, (graph.stem, model.level)))
        configuration = triton_config(name, read_interface(model.folder, graph.name))
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(configuration, encoding="utf-8")
        save_copy(load_graph(model.folder, graph.name), root / name / "1" / "model.onnx", own=f"{graph.name}.data")
    return FOLDER


def write_kserve(model: Packaged) -> str:
    """Write the manifest of an ``InferenceService`` that runs the folder ``triton``, which is written too; return its name."""
    if not (model.folder / FOLDER).is_dir():
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
                    "storageUri": f"pvc://models/{name}/{FOLDER}",
                }
            }
        },
    }
    head = (
        f"# Copy the folder {FOLDER} to this storageUri, or name the place where it is (s3://, gs://, hf://, pvc://).\n"
    )
    (model.folder / SERVICE).write_text(head + yaml.safe_dump(service, sort_keys=False), encoding="utf-8")
    return SERVICE


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
    lines += _tensors("input", graph.inputs, graph.dtypes, joined=joined)
    lines += _tensors("output", graph.outputs, graph.dtypes, joined=joined)
    if joined:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_MICROSECONDS} }}")
    return "\n".join(lines) + "\n"


def _tensors(
    kind: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, ir.DataType], *, joined: bool
) -> Iterator[str]:
    for name, shape in shapes.items():
        if dtypes.get(name) not in _TYPES or not shape:
            raise NotPackagedError(f"its {kind} {name} has a type or shape that this package does not describe")
        sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in shape[joined:])
        yield f"{kind} {{ name: {json.dumps(name)} data_type: {_TYPES[dtypes[name]]} dims: [ {sizes} ] }}"
