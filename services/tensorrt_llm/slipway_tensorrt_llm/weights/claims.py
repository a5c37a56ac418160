"""Say of which part of the model each stored row is, from a checkpoint's ``config.json`` alone: the way back from planning, by other code.

Heads are found one by one: those of queries by their number, those of keys and values by the queries that use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipway_tensorrt_llm.models.table import Architecture
from slipway_tensorrt_llm.weights.planning import Part

_OF_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows of a stored tensor, and what they must be.

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
    """A checkpoint's own numbers.

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
        """Yield what the rows of a rank's tensor must be; nothing for a name that no checkpoint has."""
        tp, pp = self.fields["mapping"]["tp_size"], self.fields["mapping"]["pp_size"]
        group, part = divmod(rank, tp)
        names, offset = self.found.names, self.found.kind.norm_offset
        if of_layer := _OF_LAYER.fullmatch(name):
            layer = group * (self.fields["num_hidden_layers"] // pp) + int(of_layer[1])
            source = f"{self.prefix}{names.layers}.{layer}."
            yield from self._of_layer(source, of_layer[2], of_layer[3], shape, part)
        elif name == "lm_head.weight":
            there = max(0, min(shape[0], self.fields["vocab_size"] - part * shape[0]))
            yield self._rows(self.head, shape, part * shape[0], there)
            yield Claim(there, None, shape[0] - there)
        elif name == "transformer.vocab_embedding.weight":
            first = part * shape[0] if self.fields["use_parallel_embedding"] else 0
            yield self._rows(f"{self.prefix}{names.embedding}.weight", shape, first, shape[0])
        elif name == "transformer.position_embedding.weight":
            yield self._rows(f"{self.prefix}{names.positions}.weight", shape, 0, shape[0])
        elif name.startswith("transformer.ln_f."):
            ending = name.rpartition(".")[2]
            yield self._rows(f"{self.prefix}{names.final}.{ending}", shape, 0, shape[0], offset=offset)

    def _of_layer(self, source: str, what: str, ending: str, shape: tuple[int, ...], part: int) -> Iterator[Claim]:
        names, rows = self.found.names, shape[0]
        if what == "attention.qkv":
            yield from self._heads(source, ending, shape, part)
        elif what in ("attention.dense", "mlp.proj"):
            own = f"{source}{names.dense if what == 'attention.dense' else names.down}.{ending}"
            columns = (part * shape[1], (part + 1) * shape[1]) if len(shape) > 1 else None
            yield Claim(0, Part(own, (0, rows), columns), rows)
        elif what == "mlp.fc" and "gate_up" in names.inner[0]:
            inner, half = self.fields["intermediate_size"], rows // 2
            own = f"{source}{names.inner[0]}.{ending}"
            yield self._rows(own, shape, inner + part * half, half)
            yield self._rows(own, shape, part * half, half, at=half)
        elif what in ("mlp.fc", "mlp.gate"):
            for name, own in zip(("mlp.fc", "mlp.gate"), names.inner, strict=False):
                if name == what:
                    yield self._rows(f"{source}{own}.{ending}", shape, part * rows, rows)
        elif what in ("attention.q_layernorm", "attention.k_layernorm"):
            own = f"{source}self_attn.{what[10]}_norm.{ending}"
            yield self._rows(own, shape, 0, rows, offset=self.found.kind.norm_offset)
        elif what in names.norms:
            offset = self.found.kind.norm_offset if ending == "weight" else 0.0
            yield self._rows(f"{source}{names.norms[what]}.{ending}", shape, 0, rows, offset=offset)

    def _heads(self, source: str, ending: str, shape: tuple[int, ...], part: int) -> Iterator[Claim]:
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
                yield self._rows(own, shape, (before[kind] + head) * width, width, at=place)
                place += width

    @staticmethod
    def _rows(source: str, shape: tuple[int, ...], first: int, rows: int, *, at: int = 0, offset: float = 0.0) -> Claim:
        columns = (0, shape[1]) if len(shape) > 1 else None
        return Claim(at, Part(source, (first, first + rows), columns), rows, offset)
