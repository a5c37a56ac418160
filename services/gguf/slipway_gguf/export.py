"""Write a model's folder as GGUF: plan, write, check, and add the files that belong beside it."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind

from slipway.distribution import installed_version, own_version
from slipway.errors import GGUFExportError
from slipway.model.model_files import copy_companions
from slipway.stage import Context
from slipway_gguf import modelfile, vocabulary
from slipway_gguf.architectures.settings import has_exact_gelu
from slipway_gguf.diagnosis import check_file
from slipway_gguf.metadata import Parameters
from slipway_gguf.params import LEVELS, GGUFParams, Level
from slipway_gguf.vision.export import Projector, plan_images, write_images
from slipway_gguf.weights.completeness import EMBEDDING
from slipway_gguf.weights.header import general_fields
from slipway_gguf.weights.mixture import read_importance, sizes_of, stored_kind
from slipway_gguf.weights.naming import names_in
from slipway_gguf.weights.planned import Planned
from slipway_gguf.weights.sentences import RANK, Sentences
from slipway_gguf.weights.tensors import PlannedFile, plan_file
from slipway_gguf.weights.writing import Written, write_file

DESCRIPTION = "gguf.json"
_FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
_BLOCK = 32
"""Number of weights in the smallest block of any quantized type."""
_MOST_KEPT = 0.1
"""Share of the weights that a level may leave in 16 bits without a warning."""
_LIBRARIES = ("gguf", "numpy", "xllamacpp")


def export_model(inputs: Mapping[str, Path], params: GGUFParams, ctx: Context) -> Path:
    """Write the model in ``inputs["pytorch"]`` to ``ctx.workdir / "gguf"`` and return that folder.

    Raises:
        GGUFExportError: With the reasons that the README lists.
    """
    started, model = time.monotonic(), inputs["pytorch"]
    level, planned = LEVELS[params.type], plan_file(model)
    parameters, tied, tensors = planned.parameters, planned.tied, planned.tensors
    architecture = parameters.architecture
    if parameters.window:
        ctx.warn(
            f"llama.cpp computes no sliding window for {architecture.class_name}: the file's context length is the window's, "
            f"{parameters.window} tokens, within which both are the same"
        )
    if parameters.differs:
        ctx.warn(f"llama.cpp computes {architecture.class_name} a little otherwise: {parameters.differs}")
    if planned.sentences:
        _warn_of_vectors(planned.sentences, ctx)
    projector = plan_images(model, planned)
    _warn_of_lost_tensors(planned, projector, ctx)
    rows = next(planned.shape[0] for planned in tensors if planned.name == EMBEDDING)
    sizes = sizes_of(parameters, tensors, tied=tied)
    given = "importance" in inputs and level.weighs
    importance = read_importance(inputs["importance"], tensors) if given else {}
    if given and not importance:
        ctx.warn(
            "the importance that was measured is of none of the file's tensors, so all columns of a weight count alike"
        )
    kinds = {each.name: stored_kind(each.name, each.shape, level, sizes, weighed=bool(importance)) for each in tensors}
    _require_rounded(tensors, kinds, level, ctx)
    lineage = ctx.input_digests.get("pytorch", "")
    reads = architecture.reading is not None
    scores = planned.sentences is not None and planned.sentences.pooling == RANK
    fields = (
        *general_fields(architecture.name, params, level, tensors, experts=parameters.experts, lineage=lineage),
        *parameters.fields,
        *vocabulary.read(model, rows=rows, reads=reads, scores=scores, warn=ctx.warn),
    )
    folder = ctx.workdir / "gguf"
    folder.mkdir()
    written = write_file(
        folder / f"{params.name}-{level.label}.gguf",
        fields,
        tensors,
        kinds,
        importance=importance,
        threads=max(1, ctx.threads),
        on_bytes=lambda done, total: ctx.progress("weights", done=done, total=total),
    )
    ctx.digest(written.path, written.sha256)
    checks = check_file(written, tensors)
    copy_companions(model, folder)
    images = write_images(folder, projector, params, lineage, ctx)
    _warn_of_wide_tensors((*written.widened, *images.get("stored_wider", ())), ctx)
    if not scores:  # Ollama has no rerankers
        modelfile.write(folder, written.path.name, model, projector=images.get("file", ""), chats=not reads)
    facts = _facts(written, level, parameters, lineage) | {"weighed_tensors": len(importance)} | checks
    facts |= {"left_out": list(planned.left_out)} if planned.left_out else {}
    facts |= _part_facts(planned, projector, images) | (_sentence_facts(planned.sentences) if planned.sentences else {})
    (folder / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    size = written.size + images.get("size", 0)
    ctx.record(**facts, size_after_bytes=size, seconds=round(time.monotonic() - started, 3))
    return folder


def _require_rounded(tensors: Sequence[Planned], kinds: Mapping[str, Kind], level: Level, ctx: Context) -> None:
    """Refuse a level that would round no weight; warn if many weights stay in 16 bits.

    A block of ggml lies within a row. So rows whose length is no multiple of 32 stay in 16 bits, as with llama.cpp's own quantizer.
    """
    if Kind[level.type] in _FLOATS:
        return
    matrices = {each.name: each.shape for each in tensors if len(each.shape) > 1}
    odd = {name for name, shape in matrices.items() if shape[-1] % _BLOCK and kinds[name] in _FLOATS}
    share = sum(math.prod(matrices[name]) for name in odd) / max(1, sum(map(math.prod, matrices.values())))
    if all(kinds[name] in _FLOATS for name in matrices):
        raise GGUFExportError(
            f"{level.label} would round none of this model's {len(matrices)} matrices: blocks of {_BLOCK} weights lie within a row, and no row's "
            f"length is a multiple of {_BLOCK}",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="leave the level out; the unquantized output has the same size",
            about={"level": level.name},
        )
    if share > _MOST_KEPT:
        ctx.warn(
            f"{share:.0%} of the weights stay in 16 bits at {level.label}, because their rows' lengths are no multiples of {_BLOCK}, first "
            f"{min(odd)!r}"
        )


def _sentence_facts(sentences: Sentences) -> dict[str, Any]:
    """Return what the file says of the vector or score of a text."""
    pooled = {"pooling": sentences.pooling, "normalized": sentences.normalized}
    return {**pooled, **({"gelu_approximation": True} if sentences.approximates else {})}


def _warn_of_vectors(sentences: Sentences, ctx: Context) -> None:
    if not sentences.pooling:
        ctx.warn(
            "no modules.json beside the model says how a text becomes one vector, so the file does not either: name it when you serve the file "
            "(llama-server --embedding --pooling mean)"
        )
    elif sentences.pooling != RANK and not sentences.normalized:
        ctx.warn(
            "llama-server gives vectors the length 1, and the model does not: serve the file with --embd-normalize -1 for the model's lengths"
        )


def _part_facts(planned: PlannedFile, projector: Projector, images: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the files have of a model of several parts; nothing for a model of text alone."""
    if not planned.others:
        return {}
    facts: dict[str, Any] = {"parts": ["text", *(["images"] if images else [])]}
    facts |= {"images": dict(images)} if images else {}
    return facts | ({"tensors_of_other_parts": len(projector.others)} if projector.others else {})


def _warn_of_lost_tensors(planned: PlannedFile, projector: Projector, ctx: Context) -> None:
    if projector.differs:
        ctx.warn(f"llama.cpp computes images otherwise than the model: {projector.differs}")
    if projector.others and projector.planned:
        ctx.warn(
            f"the files have the model's parts for text and images: {len(projector.others)} tensors of its other parts are left out "
            f"({names_in(projector.others)})"
        )
    elif projector.others:
        why = f": {projector.why_not}" if projector.why_not else ""
        ctx.warn(
            f"the file has the model's text part alone: {len(planned.others)} tensors of its other parts are left out ({names_in(planned.others)}), "
            f"and no file for images or sound (mmproj) is made{why}"
        )
    elif projector.why_not:
        ctx.warn(f"the file takes text alone, and no file for images (mmproj) is made: {projector.why_not}")
    if planned.left_out:
        ctx.warn(
            f"llama.cpp has no place for {len(planned.left_out)} tensors of the model, which predict further tokens, and answers with one token at a "
            f"time: {names_in(planned.left_out)}"
        )


def _warn_of_wide_tensors(widened: Sequence[str], ctx: Context) -> None:
    if widened:
        ctx.warn(
            f"{len(widened)} tensors have values beyond float16 (65504), first {widened[0]!r}; they are stored as "
            "they are in the model, and not in the type of the level"
        )


def _facts(written: Written, level: Level, parameters: Parameters, lineage: str) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for entry in written.entries:
        sizes[entry.kind.name] += entry.nbytes
    return {
        "file": written.path.name,
        "sha256": written.sha256,
        "type": level.label,
        "precision": level.precision,
        "architecture": parameters.architecture.name,
        "tensors": len(written.entries),
        "bytes_by_type": dict(sorted(sizes.items())),
        "stored_wider": list(written.widened),
        "lineage": lineage,
        "tools": {"slipway": own_version(), **{name: installed_version(name) for name in _LIBRARIES}},
        **({"gelu_approximation": True} if _approximates_gelu(parameters) else {}),
    }


def _approximates_gelu(parameters: Parameters) -> bool:
    """Return whether llama.cpp approximates a decoder's GELU; of models that read texts the table says more."""
    architecture = parameters.architecture
    decodes = architecture.reading is None
    return decodes and (architecture.exact_gelu or has_exact_gelu(parameters.decoder.settings))
