"""A model's folder, opened once: what stages ask of it is read once and passed on as one value. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from slipway.files.json_documents import read_object_or_empty
from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway.model.model_files import GENERATION_CONFIG
from slipway.model.safetensors_file import TensorInfo, read_weights
from slipway.model.weights.parts import ModelPart, PartTensor, find_parts, number_of_layers


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

    @cached_property
    def parts(self) -> Mapping[ModelPart, tuple[PartTensor, ...]]:
        """The tensors of each part beside the text, by name; empty for a part that the model does not have.

        Raises:
            CheckpointValidationError: As :attr:`tensors`.
        """
        found = find_parts(self.tensors, layers=number_of_layers(self.config))
        return {part: tuple(each for each in found if each.part is part) for part in ModelPart}

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """The content of ``generation_config.json``. A file that cannot be read counts as absent, as it does for transformers."""
        return read_object_or_empty(self.path / GENERATION_CONFIG)

    def generation_settings(self, config: Any = None) -> dict[str, Any]:
        """Return the settings by name: those of ``generation_config.json``, otherwise of ``config.json``, otherwise of the model's class.

        Args:
            config: The model's configuration as transformers' object, for what its class sets itself.
        """
        sources = (config.to_dict() if config is not None else {}, self.config, self.generation)
        return {name: value for settings in sources for name, value in settings.items() if value is not None}
