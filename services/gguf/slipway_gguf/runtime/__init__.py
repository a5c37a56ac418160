"""Run a GGUF file with llama.cpp on the CPU, for validation."""

from __future__ import annotations

from pathlib import Path

from slipway.model.configuration import ModelConfig
from slipway.model.model_files import CONFIG
from slipway_gguf.runtime import embedders, model

__all__ = ["load"]


def load(folder: Path, *, threads: int) -> model.GGUFModel:
    """Load the GGUF file in a folder: of a model that predicts tokens, or of one that makes vectors or a score of a text.

    Raises:
        NotRunnable: llama.cpp is missing here, or of another version.
        Unusable: The folder has no single GGUF file, or llama.cpp cannot load it.
        CheckpointValidationError: ``config.json`` cannot be read.
    """
    family = ModelConfig.read(folder).family if (folder / CONFIG).is_file() else None
    return (embedders if family in embedders.FAMILIES else model).load(folder, threads=threads)
