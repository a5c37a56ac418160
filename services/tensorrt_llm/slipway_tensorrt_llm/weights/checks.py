"""Check a written checkpoint: every value of every rank must be the model's, and the ranks together must hold the whole model.

Which part of the model a stored row is follows from the checkpoint's ``config.json`` alone: the way back from planning, by
other code. Heads are found one by one: those of queries by their number, those of keys and values by the queries that use them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipway.errors import CheckpointValidationError, TensorRTLLMExportError
from slipway.files.json_documents import read_json_object
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway.model.weights.reading import mapped
from slipway_tensorrt_llm.models.table import Architecture, architecture_of
from slipway_tensorrt_llm.weights.planning import HEAD, Part, Plan, Range, Source
from slipway_tensorrt_llm.weights.writing import pieces, rank_file

CONFIG = "config.json"
Seen = dict[tuple[str, bool], set[tuple[Range, Range]]]
"""Rectangles of each tensor of the model that the ranks hold, separately for the head, by the tensor's name and whether it is the head."""

_OF_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)\.(weight|bias)")


def check_checkpoint(folder: Path, plan: Plan, *, dtype: str, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """Read a checkpoint back, compare it with the model, and return facts for the report.

    Args:
        folder: The checkpoint.
        plan: Its plan.
        dtype: Type of all tensors, as safetensors names it.
        on_bytes: Called with the number of bytes of each compared piece.

    Raises:
        TensorRTLLMExportError: ``TENSORRT_LLM_INVALID``.
    """
    fields = _read_fields(folder)
    architecture = architecture_of(str(fields.get("architecture")))
    if architecture is None:
        raise _difference_error(CONFIG, f"architecture is {fields.get('architecture')!r}")
    ranks = Ranks(architecture, fields, plan.prefix, plan.head)
    seen: Seen = defaultdict(set)
    compared = 0
    for rank, planned in enumerate(plan.ranks):
        file = rank_file(rank)
        stored = _read_stored(folder / file)
        expected = {each.name: each.shape for each in planned}
        if missing := sorted(expected.keys() - stored.keys()):
            raise _difference_error(file, f"it lacks {missing[0]!r}", tensor=missing[0])
        if more := sorted(stored.keys() - expected.keys()):
            raise _difference_error(file, f"it has {more[0]!r}, which no graph takes", tensor=more[0])
        for name, tensor in stored.items():
            if (tensor.shape, tensor.dtype) != (expected[name], dtype):
                what = f"{name!r} is {tensor.dtype} {tensor.shape}, and {dtype} {expected[name]} was to be written"
                raise _difference_error(file, what, tensor=name)
            rows = 0
            for claim in ranks.claims(rank, name, tensor.shape):
                _compare(file, tensor, claim, plan.sources, dtype=dtype, on_bytes=on_bytes)
                rows += claim.rows
                if claim.part:
                    seen[claim.part.source, name == HEAD].add((claim.part.rows, claim.part.columns or (0, 1)))
            if rows != tensor.shape[0]:
                raise _difference_error(
                    file, f"{rows} of the {tensor.shape[0]} rows of {name!r} are known", tensor=name
                )
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
            raise _difference_error(
                file, f"rows {place} to {place + claim.rows} of {tensor.name!r} are not zero", tensor=tensor.name
            )
        return
    if claim.part.source not in sources:
        raise _difference_error(
            file, f"{tensor.name!r} has no part in the model named {claim.part.source!r}", tensor=tensor.name
        )
    for values in pieces(claim.part, sources[claim.part.source], dtype=dtype, offset=claim.offset):
        own = np.ascontiguousarray(whole[place : place + len(values)])
        if not np.array_equal(own.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)):
            what = f"rows {place} to {place + len(values)} of {tensor.name!r} are not those of {claim.part.source!r}"
            raise _difference_error(file, what, tensor=tensor.name)
        place += len(values)
        on_bytes(own.nbytes)


def _check_whole(sources: Mapping[str, Source], seen: Seen) -> None:
    """Check that the ranks together hold each tensor of the model whole; a tied embedding must be there twice."""
    for name, source in sources.items():
        rows, columns = (*source.shape, 1)[:2]
        places = [places for (one, _), places in seen.items() if one == name] or [set()]
        count = min(sum((a[1] - a[0]) * (b[1] - b[0]) for a, b in each) for each in places)
        if count != rows * columns:
            raise _difference_error(
                "the checkpoint", f"its ranks have {count} of the {rows * columns} values of {name!r}", tensor=name
            )


def _read_stored(path: Path) -> Mapping[str, TensorInfo]:
    try:
        return read_safetensors(path).tensors
    except CheckpointValidationError as error:
        raise _difference_error(path.name, error.message) from error


def _read_fields(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise _difference_error(CONFIG, f"it cannot be read ({error})") from error


def _difference_error(file: str, what: str, **about: object) -> TensorRTLLMExportError:
    return TensorRTLLMExportError(
        f"{file} is not what was to be written: {what}",
        remedy="check the disk, and report it if that is sound: what Slipway wrote is not the model",
        about={"file": file, **about},
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows of a stored tensor, and the part of the model that they must equal.

    Attributes:
        first: First row.
        part: The part of the model, which has as many rows; None for zeros.
        rows: Number of rows.
        offset: Number that was added to the part.
    """

    first: int
    part: Part | None
    rows: int
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Derives the expected content of each rank from the checkpoint's own ``config.json``.

    Attributes:
        found: The architecture that its ``config.json`` names.
        fields: Its ``config.json``.
        prefix: Beginning of the names of the model's tensors.
        head: The model's tensor of the head.
    """

    found: Architecture
    fields: Mapping[str, Any]
    prefix: str
    head: str

    def claims(self, rank: int, name: str, shape: tuple[int, ...]) -> Iterator[Claim]:
        """Yield the claims for the rows of a rank's tensor; nothing for a name that no checkpoint has."""
        tp, pp = self.fields["mapping"]["tp_size"], self.fields["mapping"]["pp_size"]
        group, part = divmod(rank, tp)
        names, offset = self.found.names, self.found.kind.norm_offset
        if of_layer := _OF_LAYER.fullmatch(name):
            layer = group * (self.fields["num_hidden_layers"] // pp) + int(of_layer[1])
            source = f"{self.prefix}{names.layers}.{layer}."
            yield from self._layer_claims(source, of_layer[2], of_layer[3], shape, part)
        elif name == "lm_head.weight":
            there = max(0, min(shape[0], self.fields["vocab_size"] - part * shape[0]))
            yield self._row_claim(self.head, shape, part * shape[0], there)
            yield Claim(there, None, shape[0] - there)
        elif name == "transformer.vocab_embedding.weight":
            first = part * shape[0] if self.fields["use_parallel_embedding"] else 0
            yield self._row_claim(f"{self.prefix}{names.embedding}.weight", shape, first, shape[0])
        elif name == "transformer.position_embedding.weight":
            yield self._row_claim(f"{self.prefix}{names.positions}.weight", shape, 0, shape[0])
        elif name.startswith("transformer.ln_f."):
            ending = name.rpartition(".")[2]
            yield self._row_claim(f"{self.prefix}{names.final}.{ending}", shape, 0, shape[0], offset=offset)

    def _layer_claims(self, source: str, what: str, ending: str, shape: tuple[int, ...], part: int) -> Iterator[Claim]:
        names, rows = self.found.names, shape[0]
        if what == "attention.qkv":
            yield from self._head_claims(source, ending, shape, part)
        elif what in ("attention.dense", "mlp.proj"):
            own = f"{source}{names.dense if what == 'attention.dense' else names.down}.{ending}"
            columns = (part * shape[1], (part + 1) * shape[1]) if len(shape) > 1 else None
            yield Claim(0, Part(own, (0, rows), columns), rows)
        elif what == "mlp.fc" and "gate_up" in names.inner[0]:
            inner, half = self.fields["intermediate_size"], rows // 2
            own = f"{source}{names.inner[0]}.{ending}"
            yield self._row_claim(own, shape, inner + part * half, half)
            yield self._row_claim(own, shape, part * half, half, at=half)
        elif what in ("mlp.fc", "mlp.gate"):
            for name, own in zip(("mlp.fc", "mlp.gate"), names.inner, strict=False):
                if name == what:
                    yield self._row_claim(f"{source}{own}.{ending}", shape, part * rows, rows)
        elif what in ("attention.q_layernorm", "attention.k_layernorm"):
            own = f"{source}self_attn.{what[10]}_norm.{ending}"
            yield self._row_claim(own, shape, 0, rows, offset=self.found.kind.norm_offset)
        elif what in names.norms:
            offset = self.found.kind.norm_offset if ending == "weight" else 0.0
            yield self._row_claim(f"{source}{names.norms[what]}.{ending}", shape, 0, rows, offset=offset)

    def _head_claims(self, source: str, ending: str, shape: tuple[int, ...], part: int) -> Iterator[Claim]:
        heads, kv_heads, width = (
            self.fields[key] for key in ("num_attention_heads", "num_key_value_heads", "head_size")
        )
        here = heads // self.fields["mapping"]["tp_size"]
        queries = [part * here + each for each in range(here)]
        keys = sorted({query // (heads // kv_heads) for query in queries})
        names = self.found.names.attention
        before = (0, heads, heads + kv_heads) if len(names) == 1 else (0, 0, 0)
        place = 0
        for kind, numbers in enumerate((queries, keys, keys)):
            own = f"{source}{names[min(kind, len(names) - 1)]}.{ending}"
            for head in numbers:
                yield self._row_claim(own, shape, (before[kind] + head) * width, width, at=place)
                place += width

    @staticmethod
    def _row_claim(
        source: str, shape: tuple[int, ...], first: int, rows: int, *, at: int = 0, offset: float = 0.0
    ) -> Claim:
        columns = (0, shape[1]) if len(shape) > 1 else None
        return Claim(at, Part(source, (first, first + rows), columns), rows, offset)
