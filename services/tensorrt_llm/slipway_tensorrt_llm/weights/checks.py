"""Check a checkpoint that was written: every value of every rank is the model's, and the ranks together hold all of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway.errors import CheckpointValidationError, TensorRTLLMExportError
from slipway.files.json_documents import read_json_object
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway.model.weights.reading import mapped
from slipway_tensorrt_llm.models.table import architecture_of
from slipway_tensorrt_llm.weights.claims import Claim, Ranks
from slipway_tensorrt_llm.weights.planning import HEAD, Plan, Range, Source
from slipway_tensorrt_llm.weights.values import pieces
from slipway_tensorrt_llm.weights.writing import rank_file

CONFIG = "config.json"
Seen = dict[tuple[str, bool], set[tuple[Range, Range]]]
"""Rectangles of each tensor of the model that were found in ranks, those of the head apart from others."""


def check_checkpoint(folder: Path, plan: Plan, *, dtype: str, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """Read a checkpoint back, and return facts about what was found.

    Args:
        folder: The checkpoint.
        plan: What was to be written.
        dtype: Type of all tensors, as safetensors names it.
        on_bytes: Gets the number of bytes of each piece that was compared.

    Raises:
        TensorRTLLMExportError: ``TENSORRT_LLM_INVALID``.
    """
    fields = _fields(folder)
    found = architecture_of(str(fields.get("architecture")))
    if found is None:
        raise _differs(CONFIG, f"architecture is {fields.get('architecture')!r}")
    ranks = Ranks(found, fields, plan.prefix, plan.head)
    seen: Seen = defaultdict(set)
    compared = 0
    for rank, planned in enumerate(plan.ranks):
        file = rank_file(rank)
        stored = _stored(folder / file)
        expected = {each.name: each.shape for each in planned}
        if missing := sorted(expected.keys() - stored.keys()):
            raise _differs(file, f"it lacks {missing[0]!r}", tensor=missing[0])
        if more := sorted(stored.keys() - expected.keys()):
            raise _differs(file, f"it has {more[0]!r}, which no graph takes", tensor=more[0])
        for name, tensor in stored.items():
            if (tensor.shape, tensor.dtype) != (expected[name], dtype):
                what = f"{name!r} is {tensor.dtype} {tensor.shape}, and {dtype} {expected[name]} was to be written"
                raise _differs(file, what, tensor=name)
            rows = 0
            for claim in ranks.claims(rank, name, tensor.shape):
                _compare(file, tensor, claim, plan.sources, dtype=dtype, on_bytes=on_bytes)
                rows += claim.rows
                if claim.part:
                    seen[claim.part.source, name == HEAD].add((claim.part.rows, claim.part.columns or (0, 1)))
            if rows != tensor.shape[0]:
                raise _differs(file, f"{rows} of the {tensor.shape[0]} rows of {name!r} are known", tensor=name)
            compared += 1
    _check_whole(plan.sources, seen)
    return {"tensors_compared": compared, "model_tensors_found": len(plan.sources)}


def _compare(
    file: str,
    tensor: TensorInfo,
    claim: Claim,
    sources: Mapping[str, Source],
    *,
    dtype: str,
    on_bytes: Callable[[int], None],
) -> None:
    whole, place = mapped(tensor), claim.first
    if claim.part is None:
        if claim.rows and whole[place : place + claim.rows].view(np.uint8).any():
            raise _differs(
                file, f"rows {place} to {place + claim.rows} of {tensor.name!r} are not zero", tensor=tensor.name
            )
        return
    if claim.part.source not in sources:
        raise _differs(
            file, f"{tensor.name!r} has no part in the model named {claim.part.source!r}", tensor=tensor.name
        )
    for values in pieces(claim.part, sources[claim.part.source], dtype=dtype, offset=claim.offset):
        own = np.ascontiguousarray(whole[place : place + len(values)])
        if not np.array_equal(own.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)):
            what = f"rows {place} to {place + len(values)} of {tensor.name!r} are not those of {claim.part.source!r}"
            raise _differs(file, what, tensor=tensor.name)
        place += len(values)
        on_bytes(own.nbytes)


def _check_whole(sources: Mapping[str, Source], seen: Seen) -> None:
    """Refuse a model of which no rank has some part; a tied embedding must be whole twice."""
    for name, source in sources.items():
        rows, columns = (*source.shape, 1)[:2]
        places = [places for (one, _), places in seen.items() if one == name] or [set()]
        found = min(sum((a[1] - a[0]) * (b[1] - b[0]) for a, b in each) for each in places)
        if found != rows * columns:
            raise _differs(
                "the checkpoint", f"its ranks have {found} of the {rows * columns} values of {name!r}", tensor=name
            )


def _stored(path: Path) -> Mapping[str, TensorInfo]:
    try:
        return read_safetensors(path).tensors
    except CheckpointValidationError as error:
        raise _differs(path.name, error.message) from error


def _fields(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise _differs(CONFIG, f"it cannot be read ({error})") from error


def _differs(file: str, what: str, **about: object) -> TensorRTLLMExportError:
    return TensorRTLLMExportError(
        f"{file} is not what was to be written: {what}",
        remedy="check the disk, and report it if that is sound: what Slipway wrote is not the model",
        about={"file": file, **about},
    )
