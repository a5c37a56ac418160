"""Find the linear layers of a transformers folder: by its tensors where they leave no doubt, otherwise by the model's own code."""

from __future__ import annotations

from collections.abc import Mapping

from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway_quantize.layers.plain_decoders import plain_structure
from slipway_quantize.layers.structure import Structure, require_family


def find_structure(
    model: ModelFolder, tensors: Mapping[str, TensorInfo], stacks: Mapping[str, TensorInfo]
) -> Structure:
    """Find the linear layers of a model whose weights are in ``tensors``, directly or through a tie.

    Imports torch and transformers unless the model is a decoder whose tensors tell (:mod:`slipway_quantize.layers.plain_decoders`):
    they take longer to import than a part of a large model takes to round.

    Args:
        model: The model.
        tensors: The tensors of the checkpoint, in which the experts of stacks may be tensors of their own.
        stacks: The stacks that these are parts of, by name.

    Raises:
        QuantizationError: ``FAMILY_UNSUPPORTED``, ``BASE_MODEL_INVALID``, ``QUANTIZATION_UNSUPPORTED``.
    """
    known = None if stacks else plain_structure(model.config, tensors)
    if known is not None:
        return known
    from slipway_quantize.layers.model_code import find_linear_layers, model_config

    config = model_config(model)
    return find_linear_layers(config, require_family(model.config), tensors, stacks=stacks)
