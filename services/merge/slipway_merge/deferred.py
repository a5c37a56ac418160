"""Compute the weights of a merge that only described them (:mod:`slipway_merge.description`), when they are read.

The arithmetic is that of the written merge, in the same blocks of rows, so the weights have the same bits. Reading rows of a weight's
sample also checks them, as the written file would have been checked (``verify/spot_check.py``). NaN and infinity are found by whoever
reads all rows, so the merge itself computes samples alone.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import mapped
from slipway_merge.description import read_description
from slipway_merge.tensors.deltas import Change, LowRank, compute_type, merge_block, round_block
from slipway_merge.tensors.kernel import Block, kernel
from slipway_merge.tensors.outputs import OutputTensor, Update
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array, TensorReader, check_finite, row_blocks
from slipway_merge.verify.spot_check import UpdateSample
from slipway_merge.writing.portions import BLOCK_ELEMENTS, matrix_shape, read_rows

_RECENT = 4
"""Number of updates to keep in memory: readers take weights one after another, with a few threads."""
_AT_ONCE = 16
"""Weights whose samples a thread takes at once: each takes less than a millisecond."""


@dataclass(frozen=True, slots=True)
class _Made:
    """The update of a weight, and the weight's sample."""

    low_rank: LowRank
    sample: UpdateSample


@dataclass(slots=True)
class _Recent:
    """An update in memory, or being made by a thread that holds the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: _Made | None = None


class MergedWeights:
    """Compute the weights of a described merge when they are read; a :class:`slipway.model.weights.reading.Weights`.

    Args:
        folder: The merge's output.
        inputs: The folders ``base`` and ``adapter`` of the merge; other inputs are ignored.

    Attributes:
        worst: Largest error of the samples read so far, as a share of what rounding explains.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the description does not fit base and adapter.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Path]) -> None:
        described = read_description(folder, inputs)
        self._planned = {tensor.name: tensor for tensor, _ in described}
        self.tensors: Mapping[str, TensorInfo] = {
            one.name: TensorInfo(one.name, one.dtype, one.shape, Path(file), one.start, one.start + one.nbytes)
            for one, file in described
        }
        self.worst = 0.0
        self._reader = TensorReader()
        self._memory = threading.local()
        self._updates: OrderedDict[str, _Recent] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files."""
        self._reader.__exit__(None, None, None)

    def rows(self, name: str, first: int, count: int) -> Array:
        """As :meth:`slipway.model.weights.reading.Weights.rows`; rows of the sample are checked.

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS``, ``DTYPE_UNSUPPORTED`` or ``MERGE_NOT_VERIFIED``.
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` if an input became shorter.
        """
        tensor = self._planned[name]
        if tensor.untouched:
            source = tensor.value.source
            stored = mapped(source)[first : first + count]
            check_finite(stored, source.dtype, name=source.name, where=source.file.name)
            return stored
        update = self._update(tensor)
        made = self._merge(tensor, update, first, count, Change("", tensor.name))
        return made.reshape(len(made), *tensor.shape[1:])

    def check_samples(
        self, on_tensor: Callable[[int, int], None], *, names: Collection[str], threads: int
    ) -> tuple[list[Change], dict[str, Any]]:
        """Compute the sample of every weight with an update; return the statistics of each change, and figures for the report.

        A change is measured on the sample. If nothing changed there, it is measured on the whole weight: a change that rounding removes
        is never guessed.

        Args:
            on_tensor: Called with the numbers of checked and of all tensors; an exception from it ends the check.
            names: The weights to check.
            threads: Number of threads.

        Raises:
            ModelMergeError: As :meth:`rows`.
        """
        updated = [one for name, one in self._planned.items() if name in names and one.value.update is not None]
        changes: list[Change] = []
        pool = ThreadPoolExecutor(threads, "merge")
        try:
            shares = (updated[start : start + _AT_ONCE] for start in range(0, len(updated), _AT_ONCE))
            for measured in pool.map(self._measure, shares):
                changes += measured
                on_tensor(len(changes), len(updated))
        finally:
            pool.shutdown(cancel_futures=True)
        figures = {
            "tensors": len(names),
            "modules_computed": len(changes),
            "largest_error_of_tolerance": round(self.worst, 4),
        }
        return sorted(changes, key=lambda change: change.tensor), figures

    def _measure(self, tensors: Sequence[OutputTensor]) -> list[Change]:
        """Check the samples of weights with updates; return the statistics of their changes."""
        return [self._measure_one(tensor, tensor.value.update) for tensor in tensors if tensor.value.update is not None]

    def _measure_one(self, tensor: OutputTensor, update: Update) -> Change:
        made = self._make_update(tensor)
        change = Change(update.module, tensor.name, rank=update.rank, scaling=update.scaling)
        self._merge(tensor, made, made.sample.first, made.sample.count, change)
        if not change.changed:
            change = Change(update.module, tensor.name, rank=update.rank, scaling=update.scaling)
            for first, count in row_blocks(matrix_shape(tensor), BLOCK_ELEMENTS):
                self._merge(tensor, made, first, count, change)
        change.extend(math.prod(tensor.shape))
        change.change_sum = made.low_rank.square()
        return change

    def _merge(self, tensor: OutputTensor, update: _Made | None, first: int, count: int, change: Change) -> Array:
        """Return rows of the result as a matrix; check those of the sample, and count what changed in ``change``."""
        rows, columns = matrix_shape(tensor)
        low_rank = update.low_rank if update else None
        made = np.empty((min(count, rows - first), columns), FLOAT_TYPES[tensor.dtype])
        if not self._merge_in_place(tensor, low_rank, first, made, change):
            # The merge's own blocks, because numpy's products depend on them.
            step = _block_rows(columns)
            for begin in range(first - first % step, first + len(made), step):
                block = self._block(tensor, begin, min(step, rows - begin), low_rank, change)
                start, end = max(begin, first), min(begin + len(block), first + len(made))
                made[start - first : end - first] = block[start - begin : end - begin]
        if update is not None:
            self._check(update.sample, made, first)
        return made

    def _check(self, sample: UpdateSample, made: Array, first: int) -> None:
        """Check those of some rows that are the sample's."""
        start, end = max(sample.first, first), min(sample.first + sample.count, first + len(made))
        if start < end:
            share = sample.error(made[start - first : end - first].astype(np.float64), start)
            with self._lock:
                self.worst = max(self.worst, share)

    def _merge_in_place(
        self, tensor: OutputTensor, low_rank: LowRank | None, first: int, made: Array, change: Change
    ) -> bool:
        """Fill rows with the compiled kernel, whose results do not depend on blocks; return False for what numpy must compute or refuse."""
        source, compiled = tensor.value.source, kernel()
        if low_rank is None or compiled is None or not source.dtype == tensor.dtype == "BF16":
            return False
        left, panels = low_rank.factors()[0][first : first + len(made)], low_rank.panels(compiled)
        step, row_bytes = _block_rows(made.shape[1]), made.shape[1] * made.itemsize
        found = change.blank()
        for start in range(0, len(made), step):
            part = made[start : start + step]
            self._reader.fill(part.reshape(-1).view(np.uint8), source, (first + start) * row_bytes)
            counts = compiled.merge(part, left[start : start + step], panels, out=part)
            if not counts.finite:
                return False
            found.weight_sum += counts.weight_sum
            found.changed += counts.changed
            found.total += part.size
        change.add(found)
        return True

    def _block(self, tensor: OutputTensor, first: int, count: int, low_rank: LowRank | None, change: Change) -> Array:
        """Return rows of the result, valid until the thread's next call."""
        memory: Block | None = getattr(self._memory, "block", None)
        if memory is None:
            memory = self._memory.block = Block()
        base = read_rows(tensor, self._reader, first, count, memory)
        source, output = tensor.value.source.dtype, tensor.dtype
        if low_rank is None:
            return round_block(base, source=source, output=output, block=memory, change=change, add=None)
        return merge_block(base, low_rank, first_row=first, source=source, output=output, block=memory, change=change)

    def _update(self, tensor: OutputTensor) -> _Made | None:
        """Return the update of a weight and its sample, or None; keep those of the last weights."""
        if tensor.value.update is None:
            return None
        with self._lock:
            recent = self._updates.setdefault(tensor.name, _Recent())
            if len(self._updates) > _RECENT:
                self._updates.popitem(last=False)
        with recent.lock:  # other weights are read meanwhile
            if recent.made is None:
                recent.made = self._make_update(tensor)
            return recent.made

    def _make_update(self, tensor: OutputTensor) -> _Made:
        update = tensor.value.update
        assert update is not None
        wide = compute_type(tensor.dtype, tensor.value.source.dtype)
        return _Made(LowRank(update, self._reader, wide), UpdateSample(tensor, self._reader))


def _block_rows(columns: int) -> int:
    """Return the number of rows that are worked on at once."""
    return max(1, BLOCK_ELEMENTS // max(columns, 1))
