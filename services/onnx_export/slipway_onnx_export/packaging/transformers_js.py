"""A repository as transformers.js loads it from a hub or a folder, in browsers and in Node.js.

The repositories of several levels have the same configuration and tokenizer, and graphs of other names: copied over each other they are
one repository, from which ``dtype`` chooses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

import onnx_ir as ir

from slipway.files.json_documents import read_json_object
from slipway.models.families import (
    DECODER,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    SPEECH,
    TOKEN_CLASSIFIER,
    family_of,
)
from slipway.models.model_files import CONFIG, copy_companions
from slipway.models.sentences.pooling import SENTENCE_EMBEDDING
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

_TASKS = {
    "text-generation": ("once upon a time", "{ max_new_tokens: 40, do_sample: false }"),
    "text-classification": ("this is a text", "{}"),
    "token-classification": ("this is a text", "{}"),
    "fill-mask": ("", "{}"),
    "feature-extraction": ("this is a text", "{ pooling: 'mean', normalize: true }"),
    "text2text-generation": ("this is a text", "{ max_new_tokens: 40 }"),
    "automatic-speech-recognition": ("sound.wav", "{}"),
    "question-answering": ("who was it", "process.argv[3] ?? 'it was one of them'"),
}
"""Input and further argument of the pipeline in the example, by task; without an input, a text with a mask."""


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
    if model.family in _HEADS and family_of({"model_type": model.config.get("model_type")}) is DECODER:
        raise NotPackagedError(f"transformers.js has no class for a {model.family.name} on a decoder")
    graphs = _graphs(model)
    root = model.folder / FOLDER
    (root / "onnx").mkdir(parents=True)
    counts = {}
    for name, (graph, data) in graphs.items():
        rename_axes(graph, _AXES)
        expand_quantized_lookups(graph)
        use_float32_interface(graph)
        counts[name] = save_copy(graph, root / "onnx" / f"{name}{ending}.onnx", own=data)
    copy_companions(model.folder, root)
    _copy_feature_extractor(root)
    settings = {
        "use_external_data_format": {
            f"{name}{each}.onnx": count for name, count in sorted(counts.items()) for _, each in _DTYPES.values()
        },
        "kv_cache_dtype": {"fp16": "float16"},  # of no use to releases from 4 on, which ask the graph
    }
    text = json.dumps({**model.config, "transformers.js_config": settings}, indent=2)
    (root / CONFIG).write_text(text + "\n", encoding="utf-8")
    (root / "example.mjs").write_text(_example(model, graphs, dtype), encoding="utf-8")
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


def _copy_feature_extractor(root: Path) -> None:
    """Write ``preprocessor_config.json``, which transformers.js reads; transformers 5 saves a processor's parts in one file."""
    whole, own = root / "processor_config.json", root / "preprocessor_config.json"
    if own.exists() or not whole.is_file():
        return
    try:
        part = read_json_object(whole, lenient=True).get("feature_extractor")
    except ValueError:
        part = None
    if isinstance(part, dict):
        own.write_text(json.dumps(part, indent=2) + "\n", encoding="utf-8")


def _example(model: Packaged, graphs: Mapping[str, tuple[ir.Model, str]], dtype: str) -> str:
    """Return a program that runs the model: by a pipeline, except for a sentence encoder, whose pooling no pipeline looks up."""
    task = model.family.task
    text, argument = _TASKS[task]
    if not text:
        text = f"this is a {_mask(model.folder)}"
    outputs = {value.name for graph, _ in graphs.values() for value in graph.graph.outputs}
    name = "speech" if model.family is SPEECH else "sentence" if SENTENCE_EMBEDDING in outputs else "example"
    template = Template((Path(__file__).parent / f"{name}.mjs.txt").read_text(encoding="utf-8"))
    return template.substitute(task=task, dtype=dtype, text=text, argument=argument)


def _mask(folder: Path) -> str:
    """Return the token that the model fills in, if it is a plain one."""
    try:
        token = read_json_object(folder / "tokenizer_config.json", lenient=True).get("mask_token")
    except (OSError, ValueError):
        token = None
    return token if isinstance(token, str) and re.fullmatch(r"[\w<>\[\]|]+", token) else "[MASK]"
