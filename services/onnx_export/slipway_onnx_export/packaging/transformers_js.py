"""A repository as transformers.js loads it from a hub or a folder, in browsers and in Node.js.

The repositories of several levels have the same configuration and tokenizer, and graphs of other names: copied over each other they are
one repository, from which ``dtype`` chooses.

transformers.js has sound and results in float32, so graphs of float16 take and give float32, except for the cache.
onnxruntime-web has ``GatherBlockQuantized`` on GPUs alone, so standard operators look up rows of a quantized embedding.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import onnx_ir as ir

from slipway.files.json_documents import read_object_or_empty
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, QUESTION_ANSWERING, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER
from slipway.model.graphs.calls import Promise
from slipway.model.model_files import CONFIG, TOKENIZER_SETTINGS, copy_companions
from slipway_onnx_export.ir_graphs import add_constant
from slipway_onnx_export.packaging.graphs import (
    DECODER_FILE,
    ENCODER_FILE,
    load_encoder_alone,
    load_graph,
    merge_decoder,
    rename_axes,
    save_copy,
)
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from slipway_onnx_export.packaging.states import name_states_for_javascript

FOLDER = "transformers_js"
DATA = ".data"

_DTYPES = {"": ("fp32", ""), "fp16": ("fp16", "_fp16"), "int8": ("q8", "_quantized"), "int4": ("q4", "_q4")}
"""transformers.js's name of a level, and the ending of its graphs' names."""

_AXES = {"batch": "batch_size"}
"""transformers.js makes an empty cache from the axes' names: it knows ``batch_size``, and takes 0 for all others."""

_PIPELINE = "example.mjs.txt"
_TASKS = {
    "text-generation": (_PIPELINE, "once upon a time", "{ max_new_tokens: 40, do_sample: false }"),
    "text-classification": (_PIPELINE, "this is a text", "{}"),
    "token-classification": (_PIPELINE, "this is a text", "{}"),
    "fill-mask": (_PIPELINE, "", "{}"),
    "feature-extraction": ("similarity.mjs.txt", "this is a text", "this is another one"),
    "text2text-generation": (_PIPELINE, "this is a text", "{ max_new_tokens: 40 }"),
    "automatic-speech-recognition": ("transcription.mjs.txt", "sound.wav", ""),
    "question-answering": (_PIPELINE, "who was it", "process.argv[3] ?? 'it was one of them'"),
}
"""Template of the example, its input, and a further argument, by task; without an input, a text with a mask."""

_HEADS = (SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING)

_CACHE = ("past_", "present")


def write_transformers_js(model: Packaged) -> str:
    """Write the folder ``transformers_js``: configuration, tokenizer, ``onnx/`` with the graphs, and an example; return its name.

    Raises:
        NotPackagedError: transformers.js has no such level, or expects other graphs for the family.
    """
    if model.level not in _DTYPES:
        raise NotPackagedError(f"transformers.js has no name for the level {model.level}")
    dtype, ending = _DTYPES[model.level]
    if not (model.folder / "tokenizer.json").is_file():
        raise NotPackagedError("transformers.js reads tokenizer.json, and the model has none")
    if model.family in _HEADS and ModelConfig({"model_type": model.config.get("model_type")}).family is DECODER:
        raise NotPackagedError(f"transformers.js has no class for a {model.family.name} on a decoder")
    graphs = _graphs(model)
    if any(Promise.of(graph.metadata_props).shared_buffer for graph, _ in graphs.values()):
        raise NotPackagedError(
            "transformers.js pads batches on the left, and a graph with past_present_share_buffer takes padding on the right only"
        )
    root = model.folder / FOLDER
    (root / "onnx").mkdir(parents=True)
    counts: dict[str, int] = {}
    layers: dict[str, Any] = {}
    for name, (graph, data) in graphs.items():
        rename_axes(graph, _AXES)
        layers |= name_states_for_javascript(graph.graph, model.config)
        expand_quantized_lookups(graph)
        use_float32_interface(graph)
        counts[name] = save_copy(graph, root / "onnx" / f"{name}{ending}.onnx", own=data)
    copy_companions(model.folder, root)
    _write_preprocessing(root)
    settings = {
        "use_external_data_format": {
            f"{name}{each}.onnx": count for name, count in sorted(counts.items()) for _, each in _DTYPES.values()
        },
        "kv_cache_dtype": {"fp16": "float16"},  # releases from 4 on ignore this and ask the graph
    }
    text = json.dumps({**model.config, **layers, "transformers.js_config": settings}, indent=2)
    (root / CONFIG).write_text(text + "\n", encoding="utf-8")
    (root / "example.mjs").write_text(_example(model, dtype), encoding="utf-8")
    return FOLDER


def _graphs(model: Packaged) -> dict[str, tuple[ir.Model, str]]:
    """Return the graphs by the name that transformers.js gives them, each with the name of its data file."""
    folder = model.folder
    if model.family.generates and model.family is not DECODER:
        return {
            "encoder_model": (load_encoder_alone(folder), f"{ENCODER_FILE}{DATA}"),
            "decoder_model_merged": (merge_decoder(folder), f"{DECODER_FILE}{DATA}"),
        }
    return {"model": (load_graph(folder, "model.onnx"), f"model.onnx{DATA}")}


def _example(model: Packaged, dtype: str) -> str:
    """Return a program that runs the model: by a pipeline, except for sound, which Node.js cannot decode, and for vectors of texts."""
    task = model.family.task
    name, text, argument = _TASKS[task]
    if not text:
        text = f"this is a {_mask(model.folder)}"
    template = Template((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return template.substitute(task=task, dtype=dtype, text=text, argument=argument)


def _write_preprocessing(root: Path) -> None:
    """Write the settings for sound to the file that transformers.js reads: transformers 5 keeps them within another."""
    settings = read_object_or_empty(root / "processor_config.json").get("feature_extractor")
    path = root / "preprocessor_config.json"
    if isinstance(settings, dict) and not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _mask(folder: Path) -> str:
    """Return the token that the model fills in, if it is a plain one."""
    token = read_object_or_empty(folder / TOKENIZER_SETTINGS).get("mask_token")
    return token if isinstance(token, str) and re.fullmatch(r"[\w<>\[\]|]+", token) else "[MASK]"


def use_float32_interface(model: ir.Model) -> None:
    """Make inputs and results of float16 float32, by casts within the graph. The cache stays as it is: it goes from call to call unread."""
    graph = model.graph
    for value in filter(_is_half, graph.inputs):
        uses = list(value.uses())
        cast = _cast(value, ir.DataType.FLOAT16, name=f"{value.name}.fp16")
        graph.insert_before(graph[0], cast)
        for use in uses:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        value.type = ir.TensorType(ir.DataType.FLOAT)
    for place, value in enumerate(graph.outputs):
        if _is_half(value):
            cast = _cast(value, ir.DataType.FLOAT, name=str(value.name))
            value.name = f"{value.name}.fp16"
            graph.append(cast)
            graph.outputs[place] = cast.outputs[0]


def _is_half(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT16 and not str(value.name).startswith(_CACHE)


def _cast(value: ir.Value, dtype: ir.DataType, *, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{name}/Cast")
    made = node.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(dtype), value.shape
    return node


def expand_quantized_lookups(model: ir.Model) -> None:
    """Replace each ``GatherBlockQuantized`` of a graph by a Gather of integers and scales, and their product. Values stay the same.

    Raises:
        NotPackagedError: A node has another form than the one that Slipway writes.
    """
    for node in [node for node in model.graph if node.op_type == "GatherBlockQuantized"]:
        _expand(model.graph, node)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    """Replace one node. Axes: ids (…), data (tokens, groups, bytes), scales (tokens, groups, 1), result (…, groups, weights of a group)."""
    data, ids, scales = node.inputs
    bits, axis = node.attributes.get_int("bits", 4), node.attributes.get_int("gather_axis", 0)
    assert data is not None
    assert ids is not None
    assert scales is not None
    known = ids.shape is not None and data.dtype == ir.DataType.UINT8 and scales.dtype in (None, ir.DataType.FLOAT)
    if not known or bits not in (4, 8) or axis:
        raise NotPackagedError("its embedding is quantized in a form that cannot be expressed by standard operators")
    assert ids.shape is not None
    rank = len(ids.shape)
    made: list[ir.Node] = []

    def add(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(ir.node(kind, list(inputs), attributes, name=f"{node.name}/{len(made)}"))
        made[-1].outputs[0].name = f"{node.name}/value_{len(made)}"
        return made[-1].outputs[0]

    def constant(name: str, value: list[int] | float) -> ir.Value:
        array = np.array(value, np.int64 if isinstance(value, list) else np.float32)
        return add_constant(graph, f"{node.name}/{name}", array)

    codes = add("Cast", add("Gather", data, ids, axis=0), to=int(ir.DataType.FLOAT))
    if bits == 4:  # two in a byte, the lower one first; in float32, because not every runtime has shifts of bytes
        sixteen, last = constant("sixteen", 16.0), constant("last", [-1])
        high = add("Floor", add("Div", codes, sixteen))
        low = add("Sub", codes, add("Mul", high, sixteen))
        pairs = add("Concat", add("Unsqueeze", low, last), add("Unsqueeze", high, last), axis=-1)
        codes = add("Reshape", pairs, constant("shape", [0] * (rank + 1) + [-1]))
    centred = add("Sub", codes, constant("zero_point", float(1 << (bits - 1))))
    result = add("Mul", centred, add("Gather", scales, ids, axis=0))
    old = node.outputs[0]
    result.shape, result.type = old.shape, old.type
    graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(old, result)
    graph.remove(node, safe=True)
