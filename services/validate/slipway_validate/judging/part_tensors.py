"""Name tensors of an output's part for images that are not the base's, where the adapter leaves them alone: their bytes are equal, or they are wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.parts import ModelPart
from slipway.texts import counted, printable
from slipway.validation.survival import AdapterSurvival

_PIECE = 1 << 22


def name_other_tensors(base: ModelFolder, output: Path, held: AdapterSurvival | None, *, adapter: bool) -> str:
    """Return which tensors of an output's parts for images and sound are not the base's; empty if all are, or if they cannot be compared.

    Args:
        base: The base.
        output: Folder of an output in transformers' form.
        held: What the output's stored weights hold of the adapter.
        adapter: Whether there is an adapter: then nothing is known without ``held``.
    """
    if adapter and (held is None or held.not_run):
        return ""
    adapted = [] if held is None else [*(each.module for each in held.modules), *held.left_out]
    try:
        before, after = (_tensors_of(each) for each in (base, ModelFolder.open(output)))
        pairs = [(place, before[place], after[place]) for place in sorted(before.keys() & after.keys())]
        other = [
            (place, own)
            for place, theirs, own in pairs
            if theirs.dtype == own.dtype and not _is_adapted(place, adapted) and _digest(theirs) != _digest(own)
        ]
        if not other:
            return ""
        digests = {_digest(info): place for place, info in before.items()}
        place, first = other[0]
        holder = digests.get(_digest(first), "")
    except (CheckpointValidationError, OSError):
        return ""
    holds = f" (it holds {printable(holder)})" if holder else ""
    count = counted(len(other), "tensor")
    return f"{count} that the adapter does not change {'is' if len(other) == 1 else 'are'} not the base's, first {printable(place)}{holds}"


def _tensors_of(model: ModelFolder) -> dict[str, TensorInfo]:
    """Return the tensors of the parts for images and sound by their place."""
    if model.config.quantization.get("quant_method") not in (None, "compressed-tensors"):
        return {}
    return {each.place: model.tensors[each.name] for each in model.parts[ModelPart.IMAGES_AND_SOUND]}


def _is_adapted(place: str, adapted: Collection[str]) -> bool:
    module = place.rpartition(".")[0]
    return any(each == module or each.endswith(f".{module}") for each in adapted)


def _digest(info: TensorInfo) -> bytes:
    """Return a digest of a tensor's shape and bytes."""
    digest = sha256(repr(info.shape).encode())
    for piece in _pieces(info):
        digest.update(piece)
    return digest.digest()


def _pieces(info: TensorInfo) -> Iterator[bytes]:
    with info.file.open("rb") as file:
        file.seek(info.start)
        left = info.nbytes
        while left and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece
