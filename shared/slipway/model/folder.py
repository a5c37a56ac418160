"""A model's folder, opened once: what stages ask of it is read once and passed on as one value. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway.model.safetensors_file import TensorInfo, read_weights


@dataclass(frozen=True)
class ModelFolder:
    """A model that is stored in a folder.

    Attributes:
        path: The folder.
        config: Its configuration.
    """

    path: Path
    config: ModelConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder.

        Raises:
            CheckpointValidationError: ``BASE_MODEL_INVALID``: it has no configuration of a model that a machine can build.
        """
        return cls(path, ModelConfig.read(path))

    @property
    def family(self) -> Family | None:
        """The model's family; None where it is not known."""
        return self.config.family

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The stored tensors by name, from their headers.

        Raises:
            CheckpointValidationError: As :func:`~slipway.model.safetensors_file.read_weights`.
        """
        return read_weights(self.path)
