"""A repository as transformers.js loads it from a hub or a folder, in browsers and in Node.js.

The repositories of several levels have the same configuration and tokenizer, and graphs of other names: copied over each other they are
one repository, from which ``dtype`` chooses.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template

import onnx_ir as ir

from slipway.files.json_documents import read_json_object
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, QUESTION_ANSWERING, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER
from slipway.model.graphs.promise import Promise
from slipway.model.model_files import CONFIG, copy_companions
from slipway_onnx_export.packaging.graphs import load_graph, rename_axes, save_copy
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from slipway_onnx_export.packaging.lookup import expand_quantized_lookups
from slipway_onnx_export.packaging.merged import ENCODER, PAST, encoder_alone, merge_decoder
from slipway_onnx_export.packaging.precision import use_float32_interface

FOLDER = "transformers_js"
DATA = ".data"

_DTYPES = {"": ("fp32", ""), "fp16": ("fp16", "_fp16"), "int8": ("q8", "_quantized"), "int4": ("q4", "_q4")}
"""What transformers.js calls a level, and the ending of its graphs' names."""

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
    counts = {}
    for name, (graph, data) in graphs.items():
        rename_axes(graph, _AXES)
        expand_quantized_lookups(graph)
        use_float32_interface(graph)
        counts[name] = save_copy(graph, root / "onnx" / f"{name}{ending}.onnx", own=data)
    copy_companions(model.folder, root)
    _write_preprocessing(root)
    settings = {
        "use_external_data_format": {
            f"{name}{each}.onnx": count for name, count in sorted(counts.items()) for _, each in _DTYPES.values()
        },
        "kv_cache_dtype": {"fp16": "float16"},  # of no use to releases from 4 on, which ask the graph
    }
    text = json.dumps({**model.config, "transformers.js_config": settings}, indent=2)
    (root / CONFIG).write_text(text + "\n", encoding="utf-8")
    (root / "example.mjs").write_text(_example(model, dtype), encoding="utf-8")
    return FOLDER


def _graphs(model: Packaged) -> dict[str, tuple[ir.Model, str]]:
    """Return the graphs by the name that transformers.js gives them, each with the name of its data file."""
    folder = model.folder
    if model.family.generates and model.family is not DECODER:
        return {
            "encoder_model": (encoder_alone(folder), f"{ENCODER}{DATA}"),
            "decoder_model_merged": (merge_decoder(folder), f"{PAST}{DATA}"),
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
    """Write how sound is prepared where transformers.js looks for it: transformers 5 keeps that within another file."""
    try:
        found = read_json_object(root / "processor_config.json", lenient=True).get("feature_extractor")
    except (OSError, ValueError):
        return
    path = root / "preprocessor_config.json"
    if isinstance(found, dict) and not path.exists():
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _mask(folder: Path) -> str:
    """Return the token that the model fills in, if it is a plain one."""
    try:
        token = read_json_object(folder / "tokenizer_config.json", lenient=True).get("mask_token")
    except (OSError, ValueError):
        token = None
    return token if isinstance(token, str) and re.fullmatch(r"[\w<>\[\]|]+", token) else "[MASK]"
