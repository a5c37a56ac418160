"""Plan the tensors of each rank: the place in the model of every row.

Sources: "TensorRT-LLM Checkpoint" for names and for the shape (out, in) of matrices; for the content of a rank ``convert.py`` of
TensorRT-LLM 1.2 in ``tensorrt_llm/models/{llama,qwen,gemma,phi3,gpt}``, ``tensorrt_llm/mapping.py`` (ranks) and
``layers/{attention,linear,mlp}.py``:

- ``attention.qkv`` has the rank's queries, then its keys, then its values. If there are fewer heads of keys and values than ranks, several
  ranks have the same head.
- The activation applies to ``mlp.fc``, so it is the gate of transformers, and ``mlp.gate`` is ``up``. Phi-3 has both in ``mlp.fc``, ``up``
  first, because ``swiglu`` applies the activation to the second half of each rank's result.
- ``attention.dense`` and ``mlp.proj`` are divided by columns, and every rank has their biases.
- ``lm_head`` is divided by rows; rows of zeros fill it up, so that all ranks have the same number. Every rank has the embedding, unless the
  graph divides it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slipway.errors import TensorRTLLMExportError
from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import TensorInfo
from slipway_tensorrt_llm.models.model import Model

Range = tuple[int, int]
"""First place, and the place behind the last."""
HEAD = "lm_head.weight"
EMBEDDING = "transformer.vocab_embedding.weight"
_GATE_AND_UP = ("mlp.gate_up_proj",)
_NO_WEIGHTS = re.compile(r"(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")
"""Constants that older versions of transformers stored as tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of one tensor of the model, as (out, in).

    Attributes:
        source: Name of the tensor.
        rows: Its rows.
        columns: Its columns; None for a vector.
    """

    source: str
    rows: Range
    columns: Range | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of a rank: parts below each other, then rows of zeros.

    Attributes:
        name: TensorRT-LLM's name.
        shape: Its shape.
        parts: Its parts.
        offset: Number to add to every value.
        padding: Rows of zeros at the end.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    offset: float = 0.0
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model that a checkpoint holds.

    Attributes:
        info: Where it is stored.
        shape: Its shape as (out, in).
        transposed: Whether it is stored as (in, out).
    """

    info: TensorInfo
    shape: tuple[int, ...]
    transposed: bool = False


class Plan:
    """The tensors of every rank of a model.

    Args:
        model: The model.
        tensors: Its stored tensors.
        tp: GPUs that share each layer.
        pp: Groups of layers.

    Attributes:
        prefix: Beginning of the names of the model's tensors.
        sources: The tensors that the checkpoint uses, by name.
        ranks: The tensors of each rank.

    Raises:
        TensorRTLLMExportError: ``TENSORRT_LLM_INVALID`` for a tensor without a place in a checkpoint, or a place without a tensor;
            ``DTYPE_UNSUPPORTED``.
    """

    def __init__(self, model: Model, tensors: Mapping[str, TensorInfo], *, tp: int, pp: int) -> None:
        self._model, self._names, self.tp, self.pp = model, model.architecture.names, tp, pp
        self._tensors = {name: info for name, info in tensors.items() if not _NO_WEIGHTS.search(name)}
        # The first checkpoints of GPT-2 have no prefix.
        prefix = self._names.prefix
        self.prefix = prefix if f"{prefix}{self._names.embedding}.weight" in self._tensors else ""
        self.sources: dict[str, Source] = {}
        self.ranks = tuple(tuple(self._rank(rank)) for rank in range(tp * pp))
        lost = sorted(self._tensors.keys() - self.sources.keys() - ({HEAD} if self.head != HEAD else set()))
        if lost:
            raise misplaced_error(
                f"tensor {lost[0][:200]!r} has no place in a TensorRT-LLM checkpoint of this model", lost[0]
            )

    def _rank(self, rank: int) -> Iterator[Planned]:
        group, part = divmod(rank, self.tp)
        each = self._model.decoder.layers // self.pp
        if group == 0:
            yield from self._embeddings(part)
        for local in range(each):
            yield from self._layer(group * each + local, f"transformer.layers.{local}.", part)
        if group == self.pp - 1:
            yield from self._norm("transformer.ln_f", f"{self.prefix}{self._names.final}", self._model.decoder.hidden)
            yield self._head_of(part)

    def _embeddings(self, part: int) -> Iterator[Planned]:
        model, names = self._model, self._names
        rows = (0, model.decoder.vocabulary)
        if model.architecture.splits_embedding:
            rows = _share(model.decoder.vocabulary, part, self.tp)
        yield self._matrix(
            EMBEDDING, [(self._embedding(), model.decoder.vocabulary, rows)], model.decoder.hidden, stored_as_is=True
        )
        if names.positions:
            everything = (
                f"{self.prefix}{names.positions}.weight",
                model.decoder.positions,
                (0, model.decoder.positions),
            )
            yield self._matrix(
                "transformer.position_embedding.weight", [everything], model.decoder.hidden, stored_as_is=True
            )

    def _layer(self, layer: int, target: str, part: int) -> Iterator[Planned]:
        model, names, tp = self._model, self._names, self.tp
        source = f"{self.prefix}{names.layers}.{layer}."
        for name, own in names.norms.items():
            yield from self._norm(f"{target}{name}", f"{source}{own}", model.decoder.hidden)
        if model.architecture.qk_norms:
            for one in "qk":
                yield from self._norm(
                    f"{target}attention.{one}_layernorm", f"{source}self_attn.{one}_norm", model.decoder.width
                )
        width = model.decoder.width
        queries = _share(model.decoder.heads * width, part, tp)
        first = part * model.decoder.kv_heads // tp * width
        keys = (first, first + max(1, model.decoder.kv_heads // tp) * width)
        total = (model.decoder.heads + 2 * model.decoder.kv_heads) * width
        if len(names.attention) == 1:
            before, also = model.decoder.heads * width, (model.decoder.heads + model.decoder.kv_heads) * width
            places = [(names.attention[0], total, rows) for rows in (queries, _shift(keys, before), _shift(keys, also))]
        else:
            sizes = (model.decoder.heads * width, model.decoder.kv_heads * width, model.decoder.kv_heads * width)
            places = list(zip(names.attention, sizes, (queries, keys, keys), strict=True))
        yield from self._plan_by_rows(
            f"{target}attention.qkv", source, places, model.decoder.hidden, bias=model.qkv_bias
        )
        yield from self._plan_by_columns(
            f"{target}attention.dense",
            f"{source}{names.dense}",
            model.decoder.heads * width,
            part,
            bias=model.dense_bias,
        )
        inner = _share(model.decoder.inner, part, tp)
        if names.inner == _GATE_AND_UP:
            places = [
                (names.inner[0], 2 * model.decoder.inner, _shift(inner, model.decoder.inner)),
                (names.inner[0], 2 * model.decoder.inner, inner),
            ]
            yield from self._plan_by_rows(f"{target}mlp.fc", source, places, model.decoder.hidden, bias=model.mlp_bias)
        else:
            for name, own in zip(("mlp.fc", "mlp.gate"), names.inner, strict=False):
                yield from self._plan_by_rows(
                    f"{target}{name}",
                    source,
                    [(own, model.decoder.inner, inner)],
                    model.decoder.hidden,
                    bias=model.mlp_bias,
                )
        yield from self._plan_by_columns(
            f"{target}mlp.proj", f"{source}{names.down}", model.decoder.inner, part, bias=model.mlp_bias
        )

    def _head_of(self, part: int) -> Planned:
        model = self._model
        rows = math.ceil(model.decoder.vocabulary / self.tp)
        own = (min(part * rows, model.decoder.vocabulary), min((part + 1) * rows, model.decoder.vocabulary))
        return self._matrix(
            HEAD, [(self.head, model.decoder.vocabulary, own)], model.decoder.hidden, rows=rows, stored_as_is=True
        )

    def _embedding(self) -> str:
        return f"{self.prefix}{self._names.embedding}.weight"

    @property
    def head(self) -> str:
        """The name of the head's tensor: its own if one is stored, as in transformers, otherwise the embedding."""
        return HEAD if HEAD in self._tensors or not self._model.decoder.tied else self._embedding()

    def _plan_by_rows(
        self, target: str, source: str, places: list[tuple[str, int, Range]], columns: int, *, bias: bool
    ) -> Iterator[Planned]:
        """Plan a matrix divided by rows, and its bias. places: name, number of all rows, and rows of this rank."""
        yield self._matrix(
            f"{target}.weight", [(f"{source}{name}.weight", whole, own) for name, whole, own in places], columns
        )
        if bias:
            yield self._vector(f"{target}.bias", [(f"{source}{name}.bias", whole, own) for name, whole, own in places])

    def _plan_by_columns(self, target: str, source: str, columns: int, part: int, *, bias: bool) -> Iterator[Planned]:
        """Plan a matrix divided by columns, and its undivided bias."""
        rows = (0, self._model.decoder.hidden)
        self._need(
            f"{source}.weight", (self._model.decoder.hidden, columns), transposed=self._model.decoder.kind.transposed
        )
        own = _share(columns, part, self.tp)
        yield Planned(f"{target}.weight", (rows[1], own[1] - own[0]), (Part(f"{source}.weight", rows, own),))
        if bias:
            yield self._vector(f"{target}.bias", [(f"{source}.bias", rows[1], rows)])

    def _norm(self, target: str, source: str, size: int) -> Iterator[Planned]:
        offset = self._model.decoder.kind.norm_offset
        yield self._vector(f"{target}.weight", [(f"{source}.weight", size, (0, size))], offset=offset)
        if self._model.norm_bias:
            yield self._vector(f"{target}.bias", [(f"{source}.bias", size, (0, size))])

    def _matrix(
        self,
        target: str,
        places: list[tuple[str, int, Range]],
        columns: int,
        *,
        rows: int = 0,
        stored_as_is: bool = False,
    ) -> Planned:
        for source, whole, _ in places:
            self._need(source, (whole, columns), transposed=self._model.decoder.kind.transposed and not stored_as_is)
        parts = tuple(Part(source, own, (0, columns)) for source, _, own in places)
        total = sum(last - first for _, _, (first, last) in places)
        return Planned(target, (rows or total, columns), parts, padding=max(0, rows - total))

    def _vector(self, target: str, places: list[tuple[str, int, Range]], *, offset: float = 0.0) -> Planned:
        for source, whole, _ in places:
            self._need(source, (whole,))
        size = sum(last - first for _, _, (first, last) in places)
        return Planned(target, (size,), tuple(Part(source, own) for source, _, own in places), offset)

    def _need(self, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> None:
        """Check a tensor of the model, and note that the checkpoint uses it.

        Raises:
            TensorRTLLMExportError: It is missing, or has another shape or a type that is not converted.
        """
        if name in self.sources:
            return
        info = self._tensors.get(name)
        if info is None:
            raise misplaced_error(f"the model has no tensor {name!r}, which TensorRT-LLM's graph needs", name)
        stored = info.shape[::-1] if transposed else info.shape
        if stored != shape:
            raise misplaced_error(
                f"tensor {name!r} has the shape {info.shape}, and config.json gives {shape[::-1] if transposed else shape}",
                name,
            )
        if info.dtype not in FLOATS:
            raise misplaced_error(f"tensor {name!r} is stored as {info.dtype}", name, reason="DTYPE_UNSUPPORTED")
        self.sources[name] = Source(info, shape, transposed)


def _share(size: int, part: int, parts: int) -> Range:
    each = size // parts
    return part * each, (part + 1) * each


def _shift(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def misplaced_error(what: str, tensor: str, *, reason: str = "TENSORRT_LLM_INVALID") -> TensorRTLLMExportError:
    """Return the error for a tensor of the model that does not fit into a checkpoint."""
    return TensorRTLLMExportError(
        what,
        reason=reason,
        remedy="leave the format out for this model: current releases of TensorRT-LLM load the pytorch folder",
        about={"tensor": tensor[:200]},
    )
