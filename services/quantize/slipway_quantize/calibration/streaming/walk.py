"""Go through a model block by block: the inputs of one block are in files, and only that block computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from slipway_quantize.calibration.streaming.layers import Layer, walk
from slipway_quantize.calibration.streaming.model import StreamedModel, unsupported_error
from slipway_quantize.calibration.streaming.moments import Reached
from slipway_quantize.calibration.windows import Batch

_LENGTH = "length"


class BlockWalk:
    """Computes the blocks of a model one after another.

    Args:
        model: The model.
        batches: Windows to compute.
        folder: Receives the inputs of the next block.

    Attributes:
        names: Names of the blocks; the last one is empty and stands for all that comes after the blocks.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: the blocks do not follow each other.

    An encoder-decoder is two chains: the decoder's first block begins anew, and each of them reads the encoder's results, which stay.
    """

    def __init__(self, model: StreamedModel, batches: Sequence[Batch], folder: Path) -> None:
        self._model = model
        self.batches = batches
        self._folder = folder
        self._chain = "inputs"
        blocks = [
            (name, block)
            for name, block in walk(model.model, GradientCheckpointingLayer)
            if any(layer.place.startswith(f"{name}.") for layer in model.layers.values())
        ]
        self._blocks = [block for _, block in blocks]
        self.names = [*(name for name, _ in blocks), ""]
        self._require_chain()

    def with_batches(self, batches: Sequence[Batch], chain: str) -> BlockWalk:
        """Return a walk through the same blocks with other batches; the names of its files begin with ``chain``."""
        other = copy(self)
        other.batches, other._chain = batches, chain
        return other

    @torch.no_grad()
    def _require_chain(self) -> None:
        """Run one window: each block must run once, in order, and give hidden states first; an encoder's blocks come before a decoder's.

        A block that reads keys and values of an earlier one (Gemma 3n, Gemma 4) has none where that one is only passed through.
        """
        if getattr(self._model.model.config.get_text_config(), "num_kv_shared_layers", 0):
            raise self._chain_error()
        called: list[int] = []

        def record_calls(index: int) -> Callable[..., Any]:
            original = self._blocks[index].forward

            def forward(*args: Any, **named: Any) -> Any:
                called.append(index)
                result = original(*args, **named)
                _tensors(_require_known(result, self._chain_error))
                return result

            return forward

        with self._replace_forwards({index: record_calls(index) for index in range(len(self._blocks))}):
            self._model.outputs(self.batches[0].first())
        inside = [index for index, block in enumerate(self._blocks) if block in self._model.encoder_blocks]
        if called != list(range(len(self._blocks))) or inside != list(range(len(inside))):
            raise self._chain_error()
        self._encoder = len(inside)

    def _chain_error(self) -> Exception:
        return unsupported_error("its blocks do not simply follow each other", self._model.model.config.model_type)

    def layers(self, index: int) -> list[Layer]:
        """Return the layers to round in a block, in the model's order."""
        inside = tuple(f"{name}." for name in self.names[:-1])
        if index < len(self._blocks):
            inside = (f"{self.names[index]}.",)
            return [layer for layer in self._model.layers.values() if layer.place.startswith(inside)]
        return [layer for layer in self._model.layers.values() if not layer.place.startswith(inside)]

    @torch.no_grad()
    def compute(self, index: int, numbers: Iterable[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the results of a block for some batches, from the files of the block before; ``0`` has the hidden states. None if an observer ends it."""
        for number in numbers:
            results: list[dict[str, Tensor]] = []
            with self._replace_forwards(self._isolate(index, number, results)), suppress(Reached):
                results.append({"0": self._model.outputs(self.batches[number])})
            yield number, results[0] if results else {}

    def keep(self, index: int, numbers: Iterable[int]) -> None:
        """Compute a block and leave its results as the inputs of the next one."""
        for number, result in self.compute(index, numbers):
            save_file({name: tensor.contiguous() for name, tensor in result.items()}, self.file(index + 1, number))

    def input_files(self, index: int) -> list[Path]:
        """Return the files that a block is computed from."""
        return [self.file(place, number) for place in self._inputs_read(index) for number in range(len(self.batches))]

    def _inputs_read(self, index: int) -> set[int]:
        """Return the numbers of the files that a block needs: its own inputs, and in a decoder also the results of the encoder."""
        first = {0, self._encoder}
        return ({index} - first) | ({self._encoder} - {0} if index >= self._encoder else set())

    def drop(self, index: int) -> None:
        """Remove the files that no block after this one reads."""
        done = {index, self._encoder} if index == len(self._blocks) else {index} - {self._encoder}
        for place in done:
            for number in range(len(self.batches)):
                self.file(place, number).unlink(missing_ok=True)

    def drop_before(self, index: int) -> None:
        """Remove the files of an interrupted attempt that no block from this one on reads."""
        wanted = set(self.input_files(index)) if index < len(self.names) else set()
        for path in set(self._folder.glob(f"{self._chain}-*.safetensors")) - wanted:
            path.unlink()

    def file(self, index: int, number: int) -> Path:
        """Return the file with a block's inputs of one batch."""
        return self._folder / f"{self._chain}-{index}-{number}.safetensors"

    def _isolate(self, index: int, number: int, results: list[dict[str, Tensor]]) -> dict[int, Callable[..., Any]]:
        """Return functions that make the blocks before one pass on stored results, and stop after that block."""
        stored = {place: load_file(self.file(place, number)) for place in self._inputs_read(index)}
        given = stored.get(index) if index != self._encoder else None
        original = self._blocks[index].forward if index < len(self._blocks) else None

        def stop(*args: Any, **named: Any) -> Any:
            assert original is not None
            if given is not None:
                args, named = _replace_hidden(given["0"], args, named)
            results.append(_tensors(original(*args, **named)))
            raise Reached

        passing: dict[int, Callable[..., Any]] = {}
        for place in range(min(index, len(self._blocks))):
            known = stored[self._encoder] if place < self._encoder <= index else given
            passing[place] = partial(_pass_on, known)
        return passing | ({index: stop} if original is not None else {})

    @contextmanager
    def _replace_forwards(self, forwards: dict[int, Callable[..., Any]]) -> Iterator[None]:
        try:
            for index, forward in forwards.items():
                self._blocks[index].forward = forward
            yield
        finally:
            for index in forwards:
                del self._blocks[index].forward


def _replace_hidden(hidden: Tensor, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return ((hidden, *args[1:]), named) if args else (args, {**named, "hidden_states": hidden})


def _require_known(result: Any, error: Callable[[], Exception]) -> Any:
    parts = result if isinstance(result, tuple) else (result,)
    if not isinstance(parts[0], Tensor) or not all(part is None or isinstance(part, Tensor) for part in parts):
        raise error()
    return result


def _tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a block's result by their place in it, and the length of a tuple."""
    if isinstance(result, Tensor):
        return {"0": result}
    parts = {str(place): part for place, part in enumerate(result) if part is not None}
    return {**parts, _LENGTH: torch.tensor(len(result))}


def _pass_on(known: dict[str, Tensor] | None, *_: Any, **__: Any) -> Any:
    """Return the result that :func:`_tensors` made ``known`` of."""
    assert known is not None
    if _LENGTH not in known:
        return known["0"]
    return tuple(known.get(str(place)) for place in range(int(known[_LENGTH])))
