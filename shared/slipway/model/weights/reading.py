"""Read the weights of a model's folder by name, whether they are stored there or made on the way.

A stage may leave the weights out of its output (``weights: deferred``). The folder then has a description (:data:`DEFERRED`) that names
the stage, and the stage's own reader makes the weights from the inputs that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.dtypes import numpy_dtypes
from slipway.model.safetensors_file import TensorInfo, read_weights
from slipway.model.safetensors_layout import TensorSpec, index_file, plan_files
from slipway.registry import known_stage
from slipway.texts import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFERRED = "deferred_weights.json"
"""File of a folder without its weights; its key ``stage`` names the stage whose reader makes them."""
_PIECE = 1 << 20
_SHARD_BYTES = 5_000_000_000


class Weights(Protocol):
    """The weights of a model.

    Attributes:
        tensors: Every tensor by its name. Tensors that are computed have the places that they would have if they were stored.
    """

    tensors: Mapping[str, TensorInfo]

    def rows(self, name: str, first: int, count: int) -> NDArray[Any]:
        """Return rows of a tensor in its own type, not to be changed; several threads may ask at once. A scalar has one row. (count, …)."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


Reader = Callable[[Path, Mapping[str, Path]], Weights]
"""Opens the weights of a folder that its stage left out, with the inputs that the stage had: its folder, and the inputs by name."""


def has_weights(folder: Path) -> bool:
    """Return whether a folder's weights were not left out."""
    return not (folder / DEFERRED).is_file()


def open_weights(folder: Path, inputs: Mapping[str, Path]) -> Weights:
    """Open the weights of a model's folder.

    Args:
        folder: The folder.
        inputs: Inputs of the task that reads it. If the weights were left out, those of the task that made the folder are among them.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, and the reasons of :func:`read_weights` and of the stage's reader.
    """
    if has_weights(folder):
        return StoredWeights(folder)
    try:
        name = read_json_object(folder / DEFERRED, largest=LARGEST_LIST).get("stage")
    except (OSError, ValueError) as error:
        raise description_error(f"it cannot be read ({error})") from error
    stage = known_stage(name) if isinstance(name, str) and ":" not in name else None
    module, _, attribute = stage.deferral.reader.partition(":") if stage else ("", "", "")
    if not module:
        raise description_error(f"it names the stage {quoted(name)}, which reads no weights here")
    reader: Reader = getattr(import_module(module), attribute)
    return reader(folder, inputs)


class StoredWeights:
    """The weights of a folder that stores them as safetensors. Their files are mapped.

    Args:
        folder: The folder.

    Raises:
        CheckpointValidationError: As :func:`read_weights`.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: Mapping[str, TensorInfo] = read_weights(folder)

    def rows(self, name: str, first: int, count: int) -> NDArray[Any]:
        """As :meth:`Weights.rows`."""
        return mapped(self.tensors[name])[first : first + count]

    def close(self) -> None:
        """Close nothing: a mapping ends with its last view."""


def mapped(tensor: TensorInfo) -> NDArray[Any]:
    """Return a stored tensor as a view of its mapped file; a scalar as one row."""
    import numpy as np

    dtype, shape = numpy_dtypes(tensor.dtype)[tensor.dtype], tensor.shape or (1,)
    if not tensor.nbytes:
        return np.empty(shape, dtype)
    raw = np.memmap(tensor.file, mode="c", dtype=np.uint8, offset=tensor.start, shape=(tensor.nbytes,))
    return np.asarray(raw).view(dtype).reshape(shape)


def row_pieces(tensor: TensorInfo, most: int = _PIECE) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of pieces with at most ``most`` values, and at least one row."""
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, most // max(1, tensor.numel // max(1, rows)))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def store_weights(weights: Weights, folder: Path, *, on_bytes: Callable[[int, int], None]) -> None:
    """Write weights that were left out as safetensors, for a library that reads only files.

    Args:
        weights: The weights.
        folder: An existing folder.
        on_bytes: Gets the number of bytes written and of all.

    Raises:
        OSError: For example ENOSPC.
    """
    import numpy as np

    groups = [[TensorSpec(name, info.dtype, info.shape)] for name, info in weights.tensors.items()]
    total = sum(spec.nbytes for [spec] in groups)
    files, done = plan_files(groups, max_shard_bytes=_SHARD_BYTES), 0

    def values(tensor: TensorInfo) -> Iterator[memoryview]:
        for first, count in row_pieces(tensor):
            rows = np.ascontiguousarray(weights.rows(tensor.name, first, count))
            yield rows.reshape(-1).view(np.uint8).data

    for file in files:
        done -= len(file.header)
        for piece in file.write(folder / file.filename, values):
            done += len(piece)
            on_bytes(done, total)
    if index := index_file({t.name: file.filename for file in files for t in file.tensors}, total_bytes=total):
        (folder / index[0]).write_text(index[1], encoding="utf-8")


def description_error(what: str) -> CheckpointValidationError:
    """Return the error for a description of weights that cannot be used."""
    return CheckpointValidationError(
        f"{DEFERRED} does not describe the model's weights: {what}",
        reason="BASE_MODEL_INVALID",
        remedy="run the stage that made the folder again, and give this stage the inputs that it had",
        about={"file": DEFERRED},
    )
