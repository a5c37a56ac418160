"""Run an archive with transformers, for validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipway.proof.precision import stored_dtype
from slipway.proof.transformers_runtime import TransformersModel


def load(folder: Path, *, threads: int) -> TransformersModel:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with np.load(folder / "weights.npz") as archive:
        weights = {name: torch.from_numpy(archive[name].astype(np.float32)) for name in archive.files}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    found = TransformersModel(model, stored=stored_dtype(folder))
    found.engine = found.engine.model_copy(update={"runtime": "npz"})
    return found
