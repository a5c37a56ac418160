"""Explain that validation cannot run checkpoints: TensorRT-LLM builds engines from them, on the GPU that runs the engines."""

from __future__ import annotations

from pathlib import Path

from slipway.proof.runtime import LanguageModel, NotRunnable


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Refuse to run an output.

    Raises:
        NotRunnable: Always.
    """
    del threads
    raise NotRunnable(
        f"{folder.name} needs an engine that TensorRT-LLM 1.2 or earlier builds of it on an NVIDIA GPU; every value of every rank was compared with the model when it was made"
    )
