"""Check that the result loads and computes finite numbers; the validate stage judges how good they are."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipway.errors import QuantizationError
from slipway.machine.processes import session_options
from slipway.model.families import auto_model
from slipway.model.folder import ModelFolder
from slipway.model.graphs.pictures import EMBEDDING, TYPES
from slipway.model.model_facts import check_loadable
from slipway.model.pytorch.sample_inputs import compared_outputs, sample_inputs
from slipway.sizes import format_size
from slipway.stage import Context
from slipway.texts import counted, quoted
from slipway_quantize.report import weight_bytes

_TOKENS = 4
_MOST_SIZE = 1 << 24
"""Far more than any model has tokens, heads or values of a head."""
_MOST_AXES = 4
"""Numbers of a position: time, row and column."""
_SAMPLES = 4096
"""Samples of sound, of which a model makes more than ``_TOKENS`` frames."""
_VARYING = {
    "batch": 1,
    "past_sequence": 0,
    "encoder_sequence": _TOKENS,
    "samples": _SAMPLES,
    "frames": _TOKENS,
    "image_tokens": 0,
    None: 1,
}
"""Sizes of axes that vary."""
_TEXT = ("input_ids", "attention_mask", "encoder_attention_mask", "position_ids", *TYPES)
_KNOWN = ("past_key_values.", "input_features", "input_values", "image_features", "deepstack_features.")
"""Beginnings of the names of inputs of floats."""
_RESULTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
_PACKED = (".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_shape", ".input_scale")


class NotRunnableError(Exception):
    """The check does not know how to run a result; the message says why."""


def check_result(source_bytes: int, target: Path, *, run: Callable[[Path, Context], Any], ctx: Context) -> None:
    """Load ``target`` and run it once on a few tokens, if that fits into the attempt's memory.

    Args:
        source_bytes: Size of the weights before.
        target: The result.
        run: Runs a result.
        ctx: Context of the stage.

    Raises:
        QuantizationError: ``QUANTIZATION_FAILED`` if it does not load, ``NON_FINITE_OUTPUT`` if logits are NaN or infinite.
    """
    # Loaders hold the stored and the computed form of the weights at the same time.
    needed = source_bytes + weight_bytes(target)
    if needed > ctx.max_memory_bytes:
        ctx.log.info(
            f"not run: loading takes about {format_size(needed)}, the attempt may use {format_size(ctx.max_memory_bytes)}"
        )
        ctx.record(check="skipped: too large for the attempt's memory")
        return
    ctx.progress("check", done=0, total=1, unit="forward passes")
    try:
        logits = run(target, ctx)
    except NotRunnableError as why:
        ctx.log.info(f"not run: {why}")
        ctx.record(check=f"not run: {why}")
        return
    if not np.isfinite(logits).all():
        raise QuantizationError(
            f"the result's outputs hold {counted(int((~np.isfinite(logits)).sum()), 'NaN or infinite value')}",
            reason="NON_FINITE_OUTPUT",
            remedy="this model's activations exceed the level's range: use bf16 (PyTorch), int8 or int4",
        )
    ctx.record(check="passed")


def run_checkpoint(target: Path) -> Any:
    """Run a transformers folder on random inputs of its family; return its outputs.

    Raises:
        NotRunnableError: Its family is unknown.
        QuantizationError: ``QUANTIZATION_FAILED``.
    """
    made = ModelFolder.open(target)
    config, family = made.config, made.family
    if family is None:
        raise NotRunnableError(f"the inputs and outputs of a {config.description} are unknown")
    try:
        # Loading prints progress bars, which do not belong in the output of a stage.
        with contextlib.redirect_stderr(io.StringIO()):
            loader = auto_model(family, config)
            check_loadable(made, loader)
            model, loading = loader.from_pretrained(
                target, local_files_only=True, output_loading_info=True, trust_remote_code=False
            )
            # A copied tensor may be unused, as before; a tensor that was made for a layer must be used.
            loading["unexpected_keys"] = {name for name in loading["unexpected_keys"] if name.endswith(_PACKED)}
            loading["missing_keys"] = {name for name in loading["missing_keys"] if not name.startswith(family.unused)}
            lost = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
            outputs = None if lost else compared_outputs(model, family, sample_inputs(model, family)).numpy()
    except Exception as error:  # the model's own code may raise anything
        raise _load_error("transformers", str(error)) from error
    if lost:
        raise _load_error("transformers", f"weights do not fit the model: {lost}")
    return outputs


def run_graph(target: Path, ctx: Context) -> Any:
    """Run every graph of an ONNX folder on a few tokens with an empty cache; return their results, joined.

    Raises:
        NotRunnableError: A graph has inputs or outputs that no family has.
        QuantizationError: ``QUANTIZATION_FAILED``.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    from slipway_quantize.graphs.folder import graph_files

    failures = (
        *(states.Fail, states.InvalidArgument, states.InvalidGraph, states.InvalidProtobuf),
        *(states.NoSuchFile, states.NotImplemented, states.RuntimeException),
    )
    made: list[Any] = []
    embedded: dict[str, Any] = {}
    try:
        for name in graph_files(target):
            session = _session(target, name, ctx.threads)
            names = [output.name for output in session.get_outputs()]
            feeds = _prompt_inputs(session, embedded)
            if name == EMBEDDING:
                embedded = dict(zip(names, session.run(names, feeds), strict=True))
                continue
            given = [name for name in names if name in _RESULTS]
            if not given:
                raise NotRunnableError(f"{name} has none of the outputs {', '.join(_RESULTS)}")
            made += session.run(given, feeds)
    except failures as error:
        raise _load_error("ONNX Runtime", str(error)) from error
    return np.concatenate([one.astype(np.float32).ravel() for one in made])


def _session(target: Path, name: str, threads: int) -> Any:
    """Load a graph in ONNX Runtime; load bf16, for which CPUs have no kernels, as float32, and fp8 without optimization."""
    import onnx_ir as ir
    import onnxruntime as ort

    from slipway_quantize.graphs.folder import load_graph
    from slipway_quantize.graphs.precision import has_type, widen

    options, model = session_options(threads), load_graph(target, name)
    if not has_type(model, ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN):
        return ort.InferenceSession(target / name, options, providers=["CPUExecutionProvider"])
    widen(model)
    # ONNX Runtime's optimizations give MatMul fp8 inputs, which it then refuses, and may drop the casts that round.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(target.resolve()))
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def _prompt_inputs(session: Any, embedded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph's inputs for a prompt with an empty cache. If its shapes are fixed, use them and mask the cache.

    Args:
        session: The graph.
        embedded: What the graph of embeddings has made of the prompt.

    Raises:
        NotRunnableError: The graph has an input of another kind.
    """
    inputs = session.get_inputs()
    texts = [wanted for wanted in inputs if wanted.name in _TEXT and len(wanted.shape) in {2, 3}]
    new = next((_text_sizes(wanted.shape)[1] for wanted in texts if wanted.name == "input_ids"), _TOKENS)
    feeds = {}
    for wanted in inputs:
        if wanted.name in embedded:
            feeds[wanted.name] = embedded[wanted.name]
            continue
        if wanted in texts:
            rows, columns = _text_sizes(wanted.shape[-2:])
            row = np.arange(columns, dtype=np.int64)
            # Every vocabulary has these tokens.
            made = {"input_ids": row % _TOKENS, "position_ids": row, **dict.fromkeys(TYPES, 0 * row)}
            cached = wanted.name == "attention_mask" and wanted.shape[-1] != "samples"
            mask = (row >= columns - new).astype(np.int64) if cached else np.ones_like(row)
            several = [size for size in wanted.shape[:-2] if isinstance(size, int) and 0 < size <= _MOST_AXES]
            feeds[wanted.name] = np.tile(made.get(wanted.name, mask), (*several, rows, 1))
            continue
        # A cache (batch, heads, past, head width), empty, or as long as the source for cross-attention; or features of sound, or zero
        # rows of features of pictures.
        shape = [_VARYING.get(size, size) for size in wanted.shape]
        sizes = all(_is_size(size) or size == 0 for size in shape)
        if not wanted.name.startswith(_KNOWN) or not sizes or math.prod(shape) > _MOST_SIZE:
            raise NotRunnableError(
                f"the graph's input {quoted(wanted.name)} of shape {quoted(wanted.shape)} is unknown"
            )
        feeds[wanted.name] = np.zeros(shape, np.float16 if wanted.type == "tensor(float16)" else np.float32)
    return feeds


def _text_sizes(shape: Sequence[Any]) -> tuple[int, int]:
    """Return the rows and columns of a text input: the fixed sizes, otherwise one row of a few tokens.

    Raises:
        NotRunnableError: The sizes are absurd.
    """
    usual = (1, _SAMPLES if shape[1] == "samples" else _TOKENS)
    rows, columns = (size if isinstance(size, int) else other for size, other in zip(shape, usual, strict=True))
    if not (_is_size(rows) and _is_size(columns) and rows * columns <= _MOST_SIZE):
        raise NotRunnableError(f"the graph has an input of shape {quoted(shape)}")
    return rows, columns


def _is_size(length: object) -> bool:
    return isinstance(length, int) and 0 < length <= _MOST_SIZE


def _load_error(loader: str, problem: str) -> QuantizationError:
    return QuantizationError(
        f"{loader} cannot run the result: {' '.join(problem.split())[:500]}",
        reason="QUANTIZATION_FAILED",
        remedy="report this with the model's config.json; level fp16 or bf16 may work meanwhile",
        about={"loader": loader},
    )
