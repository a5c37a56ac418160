"""Run a delivered adapter on its base with peft, as users do."""

from __future__ import annotations

from pathlib import Path

import peft
import torch
from peft.utils import load_peft_weights, set_peft_model_state_dict

from slipway.errors import CheckpointValidationError
from slipway.model.model_files import ADAPTER_WEIGHTS
from slipway.model.safetensors_file import read_safetensors
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Unusable
from slipway.proof.transformers_runtime import TransformersModel, from_pretrained, known_pooling


def load(folder: Path, base: Path, *, threads: int, by_layers: bool = False) -> TransformersModel:
    """Load the base in its stored type, with the adapter on it; ``by_layers`` computes them layer by layer.

    Raises:
        NotRunnable: They are to be computed layer by layer, and the layers are not known.
        Unusable: Either cannot be loaded, or peft would leave a part of the adapter out.
    """
    torch.set_num_threads(threads)
    module, family = from_pretrained(base, dtype="auto", by_layers=by_layers)
    try:
        read_safetensors(folder / ADAPTER_WEIGHTS)  # peft would take a pickle too
        module = peft.PeftModel.from_pretrained(module, str(folder), is_trainable=False)
        ignored = set_peft_model_state_dict(module, load_peft_weights(str(folder), device="cpu")).unexpected_keys
    except (CheckpointValidationError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise Unusable(f"peft cannot load {folder.name!r} on the base model: {error}") from error
    if ignored:
        raise Unusable(f"peft leaves out {len(ignored)} tensors of {folder.name!r}, first {min(ignored)!r}")
    pooling = known_pooling(base)
    return TransformersModel(module, family, stored=stored_dtype(base), pooling=pooling, by_layers=by_layers)
