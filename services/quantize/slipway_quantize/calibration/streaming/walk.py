"""Go through a model block by block: the inputs of one block are in files, and only that block computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from slipway_quantize.calibration.streaming.layers import Layer, walk
from slipway_quantize.calibration.streaming.model import StreamedModel, unsupported
from slipway_quantize.calibration.windows import Batch


class _Reached(Exception):  # noqa: N818 - nothing is wrong
    """The wanted block has computed."""


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
    """

    def __init__(self, model: StreamedModel, batches: Sequence[Batch], folder: Path) -> None:
        self._model = model
        self.batches = batches
        self._folder = folder
        found = [
            (name, block)
            for name, block in walk(model.model, GradientCheckpointingLayer)
            if any(layer.startswith(f"{name}.") for layer in model.layers)
        ]
        self._blocks = [block for _, block in found]
        self.names = [*(name for name, _ in found), ""]
        self._require_chain()

    def _require_chain(self) -> None:
        """Make sure that each block runs once, in order, on the results of the one before."""
        called: list[int] = []

        def pass_on(index: int) -> Callable[..., Tensor]:
            def forward(*args: Any, **named: Any) -> Tensor:
                called.append(index)
                return _hidden(args, named)

            return forward

        with torch.no_grad(), self._replaced({index: pass_on(index) for index in range(len(self._blocks))}):
            try:
                self._model.outputs(self.batches[0])
            except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
                raise self._not_a_chain() from error
        if called != list(range(len(self._blocks))):
            raise self._not_a_chain()

    def _not_a_chain(self) -> Exception:
        return unsupported("its blocks do not simply follow each other", self._model.model.config.model_type)

    def layers(self, index: int) -> list[Layer]:
        """Return the layers to round in a block, in the model's order."""
        inside = tuple(f"{name}." for name in self.names[:-1])
        if index < len(self._blocks):
            inside = (f"{self.names[index]}.",)
            return [layer for name, layer in self._model.layers.items() if name.startswith(inside)]
        return [layer for name, layer in self._model.layers.items() if not name.startswith(inside)]

    @torch.no_grad()
    def compute(self, index: int, numbers: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the results of a block for some batches, from the inputs that the block before left."""
        for number in numbers:
            given = load_file(self.file(index, number))["hidden"] if index else None
            results: list[Tensor] = []
            with self._replaced(self._only(index, given, results)), suppress(_Reached):
                results.append(self._model.outputs(self.batches[number]))
            yield number, results[0]

    def keep(self, index: int, numbers: Iterable[int]) -> None:
        """Compute a block and leave its results as the inputs of the next one."""
        for number, result in self.compute(index, numbers):
            save_file({"hidden": result.contiguous()}, self.file(index + 1, number))

    def drop(self, index: int) -> None:
        """Remove the inputs of a block."""
        for number in range(len(self.batches)):
            self.file(index, number).unlink(missing_ok=True)

    def file(self, index: int, number: int) -> Path:
        """Return the file with a block's inputs of one batch."""
        return self._folder / f"inputs-{index}-{number}.safetensors"

    def _only(self, index: int, given: Tensor | None, results: list[Tensor]) -> dict[int, Callable[..., Any]]:
        """Let the blocks before one pass on its stored inputs, and stop after it."""
        original = self._blocks[index].forward if index < len(self._blocks) else None

        def stop(*args: Any, **named: Any) -> Any:
            assert original is not None
            if given is not None:
                args, named = _with_hidden(given, args, named)
            result = original(*args, **named)
            if not isinstance(result, Tensor):
                raise self._not_a_chain()
            results.append(result)
            raise _Reached

        passing: dict[int, Callable[..., Any]] = {
            place: lambda *_, **__: given for place in range(min(index, len(self._blocks)))
        }
        return passing | ({index: stop} if original is not None else {})

    @contextmanager
    def _replaced(self, forwards: dict[int, Callable[..., Any]]) -> Iterator[None]:
        try:
            for index, forward in forwards.items():
                self._blocks[index].forward = forward
            yield
        finally:
            for index in forwards:
                del self._blocks[index].forward


def _hidden(args: Any, named: dict[str, Any]) -> Any:
    return args[0] if args else named["hidden_states"]


def _with_hidden(hidden: Tensor, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return ((hidden, *args[1:]), named) if args else (args, {**named, "hidden_states": hidden})
