"""The work of the stage: load, trace, compare, convert, round, write the same bytes each time, and read back.

The traced program, which is converted next, is compared with the model and transformers' own attention. Weights are rounded by
coremltools' own passes.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import coremltools as ct
import torch
from coremltools.optimize import coreml as compression

from slipway.errors import CoreMLExportError
from slipway.model.families import DECODER
from slipway.model.pytorch.text_model import (
    TextModel,
    describe_program,
    file_digest,
    has_token_types,
    open_text_model,
    traceable,
    use_linear_layers,
)
from slipway.model.pytorch.traced_forms import KEYS, VALUES, StaticDecoder, use_transformers_attention
from slipway.proof.comparison import DIFFERENCE_LIMITS, difference
from slipway.stage import Context
from slipway_coreml.checks import Expected, check_package
from slipway_coreml.conversion import convert, trace, use_core_attention
from slipway_coreml.params import PRODUCT, CoremlParams, Level

PACKAGE, DESCRIPTION = "model.mlpackage", "coreml.json"
LIBRARIES = ("coremltools", "torch", "transformers")
_STEPS = ("loading", "tracing", "comparing", "converting", "writing", "checking")

MATRICES = ("linear", "matmul", "gather")
"""Operations whose constants are rounded: products and token lookups."""
SMALLEST = 2048
"""Weights with fewer values are not rounded."""

MANIFEST, SPEC = "Manifest.json", Path("Data", "com.apple.CoreML", "model.mlmodel")
_HANDLES = "executorch_debug_handle_mapping.json"
"""A debugging file that coremltools writes outside the manifest."""
_DATE = "com.github.apple.coremltools.conversion_date"

_LONGEST_COMPARED = 96
_SEED = 5


def export_model(folder: Path, target: Path, params: CoremlParams, ctx: Context) -> None:
    """Write ``model.mlpackage``, ``coreml.json`` and the model's other files into the empty folder ``target``.

    Raises:
        CoreMLExportError: With the reasons that the README lists.
    """
    torch.set_num_threads(ctx.threads)
    _progress(ctx, "loading")
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="Core ML", error=CoreMLExportError
    )
    use_core_attention(source.model)
    use_linear_layers(source.model)
    length = source.length(params.max_length, ctx)
    if source.family is not DECODER:
        source.model.config.use_cache = False  # a decoder with a head for classes would return one
    try:
        made = traceable(source, length=length, call_length=params.call_length, product="package", ctx=ctx)
        _progress(ctx, "tracing")
        traced = trace(made.module, made.sample, made.call_length)
        _progress(ctx, "comparing")
        off = check_program(traced, source, length=length, call_length=made.call_length)
        _progress(ctx, "converting")
        converted = convert(traced, made.outputs, params.precision)
        if params.level != "none":
            converted = round_weights(converted, params.level, params.group_size)
    except MemoryError:
        raise
    except Exception as error:  # torch.export and coremltools raise errors of any class
        raise source.step_error("cannot be converted for Core ML", "COREML_EXPORT_FAILED", error) from error
    _progress(ctx, "writing")
    package = target / PACKAGE
    write_package(converted, package)
    _progress(ctx, "checking")
    states = _states(made.module)
    expected = Expected(
        inputs=made.inputs,
        outputs=made.outputs,
        states={name: tuple(each.shape) for name, each in made.module.named_buffers() if name in states},
        call_length=made.call_length,
        precision=params.precision,
    )
    checked = check_package(package, traced, expected)
    files = sorted(path for path in package.rglob("*") if path.is_file())
    facts = {
        "precision": params.precision if params.level == "none" else params.level,
        "compute_precision": params.precision,
        **({"group_size": params.group_size} if params.level == "int4" else {}),
        "inputs": list(made.inputs),
        "outputs": list(made.outputs),
        "states": states,
        "max_length": length,
        "call_length": made.call_length,
        "traced_difference": off,
        **checked,
        "size_bytes": sum(path.stat().st_size for path in files),
        "sha256": {path.relative_to(package).as_posix(): file_digest(path, ctx) for path in files},
    }
    describe_program(source.folder, target, DESCRIPTION, facts, libraries=LIBRARIES, ctx=ctx)


def _progress(ctx: Context, step: str) -> None:
    ctx.check_cancelled()
    ctx.progress(step, done=_STEPS.index(step), total=len(_STEPS), unit="steps")


def _states(module: torch.nn.Module) -> list[str]:
    """Return the names of the keys and values that a program keeps."""
    if not isinstance(module, StaticDecoder):
        return []
    return [f"{kind}{layer}" for layer in range(module.layers) for kind in (KEYS, VALUES)]


def round_weights(model: Any, level: Level, group_size: int) -> Any:
    """Round a model's matrices to integers: 8 bits with a scale for each row, or 4 bits with a scale for each group in a row."""
    rows = compression.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int8", granularity="per_channel", weight_threshold=SMALLEST
    )
    groups = compression.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=group_size, weight_threshold=SMALLEST
    )
    return compression.linear_quantize_weights(
        model,
        compression.OptimizationConfig(op_type_configs=dict.fromkeys(MATRICES, rows if level == "int8" else groups)),
    )


def write_package(model: Any, package: Path) -> None:
    """Write a converted model so that its bytes are reproducible: without its date, and with names of files that do not vary."""
    metadata = model.user_defined_metadata
    if _DATE in metadata:
        del metadata[_DATE]
    model.save(str(package))
    (package / _HANDLES).unlink(missing_ok=True)
    spec = package / SPEC
    # coremltools writes maps in an order that differs between processes.
    spec.write_bytes(ct.utils.load_spec(str(package)).SerializeToString(deterministic=True))
    manifest = package / MANIFEST
    read = json.loads(manifest.read_text(encoding="utf-8"))
    entries = read["itemInfoEntries"]
    names = {key: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])).upper() for key, entry in entries.items()}
    read["itemInfoEntries"] = {
        names[key]: entry for key, entry in sorted(entries.items(), key=lambda pair: names[pair[0]])
    }
    read["rootModelIdentifier"] = names[read["rootModelIdentifier"]]
    manifest.write_text(json.dumps(read, indent=4) + "\n", encoding="utf-8")


def check_program(traced: Any, source: TextModel, *, length: int, call_length: int) -> float:
    """Return the largest difference between the program's and the model's results, relative to the largest result.

    A decoder gets texts of several lengths, in calls of several sizes; each text reuses the cache of the one before. Other models get several
    lengths, with and without padding.

    Raises:
        ValueError: The difference is more than float32 arithmetic explains.
    """
    program = traced.module()
    use_transformers_attention(source.model)
    draw = torch.Generator().manual_seed(_SEED)
    size = int(source.model.config.get_text_config().vocab_size)
    with torch.no_grad():
        worst = max(
            _compare_decoder(program, source.model, tokens, call_length)
            if source.family is DECODER
            else _compare_texts(program, source, tokens)
            for tokens in (
                torch.randint(0, size, (1, many), generator=draw)
                for many in dict.fromkeys(min(many, length) for many in (_LONGEST_COMPARED, 7, 1))
            )
        )
    if worst > DIFFERENCE_LIMITS["float32"]:
        raise ValueError(f"the traced program's results are off by {worst:.1e} of the largest one")
    return worst


def _compare_decoder(program: Any, model: Any, tokens: torch.Tensor, most: int) -> float:
    wanted = model(input_ids=tokens, use_cache=False).logits
    parts, place, many = [], 0, most
    while place < tokens.shape[1]:
        ids = tokens[:, place : place + many]
        parts.append(program(ids, torch.arange(place, place + ids.shape[1])))
        place, many = place + ids.shape[1], 1 if many > 1 else max(1, most // 2)
    return _share(torch.cat(parts, dim=1), wanted)


def _compare_texts(program: Any, source: TextModel, tokens: torch.Tensor) -> float:
    mask = torch.ones_like(tokens)
    mask[:, tokens.shape[1] - tokens.shape[1] // 3 :] = 0
    worst = 0.0
    for each in (torch.ones_like(tokens), mask):
        wanted = source.model(input_ids=tokens, attention_mask=each)
        types = (torch.zeros_like(tokens),) if has_token_types(source.model.config) else ()
        results = program(tokens, each, *types)
        for name, value in zip(source.family.outputs, results, strict=False):
            whole = getattr(wanted, name)
            real = each[0].bool()
            by_token = whole.dim() > 1 and whole.shape[1] == tokens.shape[1]
            worst = max(worst, _share(value[:, real], whole[:, real]) if by_token else _share(value, whole))
    return worst


def _share(results: torch.Tensor, wanted: torch.Tensor) -> float:
    return difference(results.numpy(), wanted.numpy()).share
