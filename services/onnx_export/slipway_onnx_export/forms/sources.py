"""What the encoder of an encoder–decoder reads: tokens, frames of sound, or samples of sound, as inputs of its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import BaseModelOutput

from slipway.model.families import RAW_SPEECH, Family
from slipway_onnx_export.interface import SAMPLE_SIZES, Port, ids
from slipway_onnx_export.loading.weightless import integer_inputs
from slipway_onnx_export.names import BATCH, FEATURES, FRAMES, IDS, MASK, SAMPLES, SOURCE, SOURCE_MASK, VALUES

Tensors = dict[str, torch.Tensor]


class Source(Protocol):
    """What an encoder reads.

    Attributes:
        ports: The encoder's inputs.
        masks: The decoder's inputs beside its tokens.
        length: The axis of what the encoder computes; None for the size that it has.
    """

    ports: tuple[Port, ...]
    masks: tuple[Port, ...]
    length: str | None

    def example(self) -> Tensors:
        """Return inputs of a call that shows the sizes of results."""
        ...

    def encode(self, model: Any, tensors: Tensors) -> torch.Tensor:
        """Return what the encoder computes, (batch, length, width)."""
        ...

    def given(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        """Return arguments of the model that say what the encoder computed; ``mask`` is that of its input."""
        ...


def source_of(model: Any, family: Family) -> Source:
    """Return what the encoder of a model reads."""
    if family is RAW_SPEECH:
        return _Samples(model)
    return _Frames(model) if family.takes_sound else _Tokens()


class _Tokens:
    ports: tuple[Port, ...] = (ids(IDS, BATCH, SOURCE), ids(MASK, BATCH, SOURCE))
    masks: tuple[Port, ...] = (ids(SOURCE_MASK, BATCH, SOURCE),)
    length: str | None = SOURCE

    def example(self) -> Tensors:
        return {IDS: integer_inputs(1, 4), MASK: integer_inputs(1, 4)}

    def encode(self, model: Any, tensors: Tensors) -> torch.Tensor:
        return _states(model.get_encoder()(**{name: tensors[name] for name in (IDS, MASK)}))

    def given(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), MASK: mask}


class _Frames:
    """Frames of one length, without a mask."""

    masks: tuple[Port, ...] = ()
    length: str | None = None

    def __init__(self, model: Any) -> None:
        """Read the length: the encoder's positions times the strides of its convolutions."""
        frames = int(model.config.max_source_positions) * _stride(model)
        self.ports: tuple[Port, ...] = (Port(FEATURES, (BATCH, model.config.num_mel_bins, frames)),)

    def example(self) -> Tensors:
        return {FEATURES: torch.zeros(1, *self.ports[0].shape[1:])}  # type: ignore[arg-type]  # they are numbers

    def encode(self, model: Any, tensors: Tensors) -> torch.Tensor:
        return _states(model.get_encoder()(**{FEATURES: tensors[FEATURES]}))

    def given(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:  # noqa: ARG002 - as the others
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}


class _Samples:
    """Samples of any number, whose convolutions make fewer frames of them. The mask of a frame is that of its first sample."""

    ports: tuple[Port, ...] = (Port(VALUES, (BATCH, SAMPLES)), ids(MASK, BATCH, SAMPLES))
    masks: tuple[Port, ...] = (ids(SOURCE_MASK, BATCH, SAMPLES),)
    length: str | None = FRAMES

    def __init__(self, model: Any) -> None:
        self._stride = _stride(model)

    def example(self) -> Tensors:
        return {VALUES: torch.zeros(1, SAMPLE_SIZES[SAMPLES])}

    def encode(self, model: Any, tensors: Tensors) -> torch.Tensor:
        """Run the encoder without its own way from the mask of samples to that of frames, which computes the number of frames in Python."""
        encoder = model.get_encoder()
        with _masked_layers(encoder, partial(self._mask_of_frames, tensors[MASK])):
            return _states(encoder(**{VALUES: tensors[VALUES]}))

    def given(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        outputs = BaseModelOutput(last_hidden_state=encoded)
        outputs.attention_mask = None if mask is None else self._mask_of_frames(mask, encoded)
        return {"encoder_outputs": outputs}

    def _mask_of_frames(self, mask: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Return the mask of frames, (batch, frames), from that of samples. frames: (batch, frames, width)."""
        return mask.index_select(1, torch.arange(frames.shape[1]) * self._stride)


def _states(output: Any) -> torch.Tensor:
    states: torch.Tensor = output.last_hidden_state
    return states


def _stride(model: Any) -> int:
    """Return the places of an encoder's input for one of its results: the strides of its convolutions."""
    return prod(int(layer.stride[0]) for layer in model.get_encoder().children() if isinstance(layer, torch.nn.Conv1d))


@contextmanager
def _masked_layers(encoder: Any, mask_of: Any) -> Iterator[None]:
    """Give the layers of an encoder a mask, within the block.

    Args:
        encoder: The encoder, which is called without a mask.
        mask_of: Function from the states that go into the first layer, (batch, frames, width), to their mask, (batch, frames).
    """
    from transformers.masking_utils import (
        create_bidirectional_mask,
    )  # loads torch._dynamo: half a second that few models need

    made: list[Any] = []

    def put(_layer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not made:
            states = args[0]
            made.append(
                create_bidirectional_mask(
                    config=encoder.config,
                    inputs_embeds=states,
                    attention_mask=mask_of(states),
                    encoder_hidden_states=states,
                )
            )
        return args, {**named, "attention_mask": made[0]}

    with ExitStack() as stack:
        for layer in encoder.layers:
            stack.callback(layer.register_forward_pre_hook(put, with_kwargs=True).remove)
        yield
