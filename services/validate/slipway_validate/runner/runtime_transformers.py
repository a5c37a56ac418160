"""Runs a Hugging Face model folder by transformers on the CPU."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from slipway.errors import CheckpointValidationError
from slipway.models.model_facts import CannotBuildError, check_loadable
from slipway.validation.findings import Engine
from slipway_validate.folders import stored_dtype
from slipway_validate.numerics import Logits
from slipway_validate.runner.model import Bounds, Past, Step, Unusable


class TransformersModel:
    """A causal language model in PyTorch on the CPU; see :class:`slipway_validate.runner.model.LanguageModel`."""

    device = "cpu"
    has_cache = True

    def __init__(self, module: Any, *, stored: str) -> None:
        self._module = module.eval()
        self._served_as: dict[str, torch.dtype] = {}
        causal = module.get_base_model() if hasattr(module, "get_base_model") else module
        self._takes_positions = "position_ids" in inspect.signature(causal.forward).parameters
        self.architecture = type(causal).__name__
        self.native_dtype = str(causal.dtype).removeprefix("torch.")
        limit = getattr(causal.config, "max_position_embeddings", None) or 1 << 30
        self.bounds = Bounds(sequence=limit, past=limit)
        self.engine = Engine(
            runtime="transformers",
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            stored_dtype=stored,
            compute_dtype="float32",
            native_dtype=self.native_dtype,
        )

    @torch.no_grad()  # not inference_mode: compressed-tensors decompresses in the first call and converts later
    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(step.input_ids)),
            "attention_mask": torch.from_numpy(np.ascontiguousarray(step.attention_mask)),
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.from_numpy(np.ascontiguousarray(step.position_ids))
        output = self._module(**inputs, past_key_values=step.past, use_cache=True)
        return output.logits.float().numpy(), output.past_key_values

    def prepare_comparison(self) -> None:
        """Compute in float32 from here on. The weights keep their stored values: widening a float is exact."""
        # transformers forbids its own .float() to quantized models, for other formats' sake; compressed-tensors keeps
        # its codes in integers, which this leaves alone, and computes in the data type of its scales.
        self._served_as = {name: tensor.dtype for name, tensor in self._tensors()}
        torch.nn.Module.float(self._module)

    def leave_comparison(self) -> None:
        """Compute as it is served again; what was widened is narrowed to the values it had."""
        for name, tensor in self._tensors():
            dtype = self._served_as.get(name, tensor.dtype)
            if dtype != tensor.dtype:
                tensor.data = tensor.data.to(dtype)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def peak_device_bytes(self) -> int | None:
        """No GPU is used."""
        return None


def load(folder: Path, *, threads: int) -> TransformersModel:
    """An output, in the data type it is stored in.

    Raises:
        Unusable: The folder holds no causal language model that transformers can load.
    """
    torch.set_num_threads(threads)
    return TransformersModel(from_pretrained(folder, dtype="auto"), stored=stored_dtype(folder))


def from_pretrained(folder: Path, *, dtype: Any) -> Any:
    """The causal language model in a folder; no code and no pickle of it is run.

    Raises:
        Unusable: It cannot be loaded.
    """
    try:
        check_loadable(folder, AutoModelForCausalLM)
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (
        CannotBuildError, CheckpointValidationError, OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError
    ) as error:  # fmt: skip
        raise Unusable(f"transformers cannot load {folder.name!r}: {type(error).__name__}: {error}") from error
