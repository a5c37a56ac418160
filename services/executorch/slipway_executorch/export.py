"""The work of the stage: load, round, trace, lower, and write the program with its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipway.files.json_documents import read_json_object
from slipway.model.families import DECODER
from slipway.model.model_files import GENERATION_CONFIG
from slipway.model.pytorch.text_model import TextModel, Traceable, describe_program, file_digest, traceable
from slipway.stage import Context
from slipway_executorch.lowering import Lowered, lower, open_source, round_weights, trace
from slipway_executorch.params import DESCRIPTION, LEVEL, PROGRAM, ExecutorchParams

LIBRARIES = ("executorch", "torch", "torchao", "transformers")
_STEPS = 4


def export_model(folder: Path, target: Path, params: ExecutorchParams, ctx: Context) -> None:
    """Write ``model.pte``, ``executorch.json`` and the model's other files into the empty folder ``target``.

    Raises:
        ExecutorchExportError: With the reasons that the README lists.
    """
    torch.set_num_threads(ctx.threads)
    ctx.progress("loading", done=0, total=_STEPS, unit="steps")
    source = open_source(folder)
    length = source.length(params.max_length, ctx)
    try:
        kept = round_weights(source.model, params.group_size) if params.level == LEVEL else ()
        made = traceable(source, length=length, call_length=params.call_length, product="program", ctx=ctx)
        ctx.progress("tracing", done=1, total=_STEPS, unit="steps")
        traced = trace(made.module, made.sample, made.call_length)
        ctx.progress("lowering", done=2, total=_STEPS, unit="steps")
        lowered = lower(traced, _constants(source, made), rounded=params.level == LEVEL)
    except MemoryError:
        raise
    except Exception as error:  # torch.export, XNNPACK and torchao raise errors of any class
        raise source.step_error("cannot be lowered for ExecuTorch", "EXECUTORCH_EXPORT_FAILED", error) from error
    ctx.progress("writing", done=3, total=_STEPS, unit="steps")
    program = target / PROGRAM
    with program.open("wb") as file:
        lowered.program.write_to_file(file)
    facts = {
        "precision": "float32" if params.level == "none" else params.level,
        **({} if params.level == "none" else {"group_size": params.group_size, "float32_layers": list(kept)}),
        "inputs": list(made.inputs),
        "outputs": list(made.outputs),
        "max_length": length,
        "call_length": made.call_length,
        **_statistics(lowered),
        "size_bytes": program.stat().st_size,
        "sha256": file_digest(program, ctx),
    }
    describe_program(source.folder, target, DESCRIPTION, facts, libraries=LIBRARIES, ctx=ctx)


def _constants(source: TextModel, made: Traceable) -> dict[str, Any]:
    if source.family is DECODER:
        return decoder_constants(source.model.config, source.folder.path, made.max_length, made.call_length)
    return {"get_max_seq_len": made.max_length}


def decoder_constants(config: Any, folder: Path, length: int, call_length: int) -> dict[str, Any]:
    """Return the constants that ExecuTorch's language model runners read from a program."""
    settings = {**config.to_dict()}
    if (folder / GENERATION_CONFIG).is_file():
        settings |= read_json_object(folder / GENERATION_CONFIG, lenient=True)
    stops, start = settings.get("eos_token_id"), settings.get("bos_token_id")
    ends = [token for token in (stops if isinstance(stops, list) else [stops]) if isinstance(token, int)]
    return {
        "get_max_seq_len": call_length,  # runners split a prompt into calls of this many tokens
        "get_max_context_len": length,
        "get_vocab_size": int(config.get_text_config().vocab_size),
        "get_n_layers": int(config.get_text_config().num_hidden_layers),
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
        **({"get_bos_id": start} if isinstance(start, int) else {}),
        **({"get_eos_ids": ends} if ends else {}),
    }


def _statistics(lowered: Lowered) -> dict[str, Any]:
    outside = sum(lowered.operators.values())
    return {
        "delegated_share": round(lowered.delegated / max(1, lowered.delegated + outside), 4),
        "delegated_nodes": lowered.delegated,
        "delegated_parts": lowered.subgraphs,
        "other_operators": dict(lowered.operators),
        "planned_bytes": lowered.planned_bytes,
    }
