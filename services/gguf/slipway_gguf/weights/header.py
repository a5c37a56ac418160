"""Build the beginning of a GGUF file, version 3: metadata, the file's origin in it, and the index of tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind

from slipway.distribution import own_version
from slipway.errors import GGUFExportError
from slipway_gguf.metadata import Field
from slipway_gguf.params import GGUFParams, Level, NamedParams
from slipway_gguf.weights.ggml import row_bytes
from slipway_gguf.weights.planned import Planned

_HUB = "https://huggingface.co/"

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_LONGEST_NAME = 63
"""Longest name of a tensor in bytes (``GGML_MAX_NAME`` includes the NUL behind it)."""
_KIND = gguf.GGUFValueType
_FORMATS = {
    _KIND.UINT8: "<B",
    _KIND.INT8: "<b",
    _KIND.UINT16: "<H",
    _KIND.INT16: "<h",
    _KIND.UINT32: "<I",
    _KIND.INT32: "<i",
    _KIND.FLOAT32: "<f",
    _KIND.UINT64: "<Q",
    _KIND.INT64: "<q",
    _KIND.FLOAT64: "<d",
    _KIND.BOOL: "<?",
}


def general_fields(
    architecture: str,
    params: GGUFParams,
    level: Level,
    tensors: list[Planned],
    *,
    experts: int,
    lineage: str,
    kind: str = gguf.GGUFType.MODEL,
) -> tuple[Field, ...]:
    """Return the keys.

    Args:
        architecture: GGUF's name of the architecture.
        params: Parameters of the stage.
        level: The level.
        tensors: The file's tensors.
        experts: Number of experts; 0 for none.
        lineage: Digest of the model's artifact; empty if it is not known.
        kind: What the file holds.
    """
    size = _size_label(tensors, experts=experts)
    texts = _general_texts(architecture, kind, params, lineage, size=size)
    numbers = {
        "general.file_type": int(gguf.LlamaFileType[level.file_type]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    return _fields(texts, numbers, params)


def adapter_fields(architecture: str, params: NamedParams, *, alpha: float, lineage: str) -> tuple[Field, ...]:
    """Return the keys of an adapter's file.

    Args:
        architecture: GGUF's name of the base's architecture, which llama.cpp compares with that of the base's file.
        params: Parameters of the stage.
        alpha: Alpha of all factors.
        lineage: Digest of the adapter's artifact; empty if it is not known.
    """
    texts = {**_general_texts(architecture, gguf.GGUFType.ADAPTER, params, lineage), "adapter.type": "lora"}
    return (*_fields(texts, {}, params), Field("adapter.lora.alpha", alpha, _KIND.FLOAT32))


def _general_texts(
    architecture: str, kind: str, params: NamedParams, lineage: str, *, size: str = ""
) -> dict[str, str]:
    texts = {
        "general.architecture": architecture,
        "general.type": kind,
        "general.name": params.name,
        "general.size_label": size,
        "general.quantized_by": f"slipway {own_version()}".strip(),
        "slipway.lineage": lineage,
    }
    if params.base_model:
        organization, _, name = params.base_model.partition("/")
        texts |= {
            "general.base_model.0.name": name,
            "general.base_model.0.organization": organization,
            "general.base_model.0.repo_url": f"{_HUB}{params.base_model}",
        }
    return texts


def _fields(texts: dict[str, str], numbers: dict[str, int], params: NamedParams) -> tuple[Field, ...]:
    numbers = {**numbers, **({"general.base_model.count": 1} if params.base_model else {})}
    return (
        *(Field(key, str(value), _KIND.STRING) for key, value in texts.items() if value),
        *(Field(key, value, _KIND.UINT32) for key, value in numbers.items()),
    )


def _size_label(tensors: list[Planned], *, experts: int) -> str:
    """Return the size as it appears in names of models: ``0.6B``, or ``128x0.2B`` with experts."""
    each = sum(math.prod(planned.shape) for planned in tensors if "_exps." in planned.name)
    total = sum(math.prod(planned.shape) for planned in tensors)
    return gguf.size_label(total, total - each, each // max(1, experts), experts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the index.

    Attributes:
        name: GGUF's name.
        shape: Its shape, columns last.
        kind: Its type.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Return the size of its values."""
        return math.prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])


def padding(size: int) -> int:
    """Return the number of bytes up to the next aligned place."""
    return -size % ALIGNMENT


def header(fields: Sequence[Field], entries: Sequence[Entry]) -> bytes:
    """Return the bytes before the first tensor.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a key that occurs twice, or a value that its type cannot hold; ``BASE_MODEL_INVALID`` for a number
            of the model that is too large.
    """
    keys = [each.key for each in fields]
    if len(set(keys)) != len(keys):
        raise _metadata_error(next(key for key in keys if keys.count(key) > 1), "occurs twice in the metadata")
    made = bytearray(struct.pack("<IIQQ", gguf.GGUF_MAGIC, gguf.GGUF_VERSION, len(entries), len(fields)))
    for each in fields:
        try:
            made += _text(each.key) + struct.pack("<I", each.kind) + _value(each.value, each.kind, each.item)
        except (struct.error, OverflowError, TypeError, AttributeError, UnicodeError) as error:
            large = _find_large(each.value)
            if large is not None:  # it comes from config.json
                raise GGUFExportError(
                    f"{each.key} would be {large}, and {(each.item or each.kind).name} of a GGUF file does not hold it",
                    reason="BASE_MODEL_INVALID",
                    remedy="look at the numbers in config.json",
                    about={"key": each.key},
                ) from error
            raise _metadata_error(each.key, f"cannot be stored as {each.kind.name} ({error})") from error
    offset = 0
    for entry in entries:
        if len(entry.name.encode()) > _LONGEST_NAME:
            raise _metadata_error(entry.name, f"is longer than the {_LONGEST_NAME} bytes that llama.cpp reads")
        sizes = tuple(reversed(entry.shape))
        made += _text(entry.name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.kind, offset)
        offset += entry.nbytes + padding(entry.nbytes)
    return bytes(made) + bytes(padding(len(made)))


def _find_large(value: Any) -> int | float | None:
    """Return the number of a value that is farthest from 0, if a type of 32 bits may not hold it."""
    numbers = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, int | float)]
    largest = max(numbers, key=abs, default=0)
    return largest if abs(largest) >= 1 << 31 else None


def _value(value: Any, kind: gguf.GGUFValueType, item: gguf.GGUFValueType | None) -> bytes:
    if kind is _KIND.STRING:
        return _text(value)
    if kind is _KIND.ARRAY:
        if item is None:
            raise TypeError("an array without the type of its elements")
        return struct.pack("<IQ", item, len(value)) + _elements(value, item)
    return struct.pack(_FORMATS[kind], value)


def _elements(values: Iterable[Any], item: gguf.GGUFValueType) -> bytes:
    if item is _KIND.STRING:
        return b"".join(map(_text, values))
    each = list(values)
    return struct.pack(f"<{len(each)}{_FORMATS[item][1:]}", *each)


def _text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _metadata_error(key: str, what: str) -> GGUFExportError:
    return GGUFExportError(f"{key!r} {what}", remedy="report it: Slipway made it", about={"key": key})
