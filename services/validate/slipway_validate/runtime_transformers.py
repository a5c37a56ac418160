"""Runs a Hugging Face model folder, with or without an unmerged adapter, by transformers (and peft)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

from slipway.stage import installed_version
from slipway.validation import Engine
from slipway_validate.folders import stored_dtype
from slipway_validate.model import Bounds, Past, Step, Unusable
from slipway_validate.numerics import Logits


class TransformersModel:
    """A causal language model in PyTorch on the CPU; see :class:`slipway_validate.model.LanguageModel`."""

    device = "cpu"
    has_cache = True

    def __init__(self, module: Any, *, stored: str) -> None:
        self._module = module.eval()
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
        """As :meth:`slipway_validate.model.LanguageModel.forward`."""
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
        torch.nn.Module.float(self._module)

    def peak_device_bytes(self) -> int | None:
        """No GPU is used."""
        return None

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model alone, for as long as the context lasts."""
        with self._module.disable_adapter():
            yield


def load(folder: Path, *, threads: int) -> TransformersModel:
    """An output, in the data type it is stored in.

    Raises:
        Unusable: The folder holds no causal language model that transformers can load.
    """
    torch.set_num_threads(threads)
    return TransformersModel(_from_pretrained(folder, dtype="auto"), stored=stored_dtype(folder))


def load_reference(base: Path, adapter: Path, *, threads: int) -> TransformersModel:
    """Base + adapter, unmerged, all in float32.

    Raises:
        Unusable: Base or adapter cannot be loaded, or the adapter does not fit.
    """
    torch.set_num_threads(threads)
    module = _from_pretrained(base, dtype=torch.float32)
    try:
        module = PeftModel.from_pretrained(module, str(adapter), is_trainable=False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise Unusable(f"peft cannot put the adapter {adapter.name!r} on the base model: {error}") from error
    return TransformersModel(module.float(), stored=stored_dtype(base))


def adapter_in_words(model: TransformersModel) -> str:
    """Type, rank and alpha of the reference's adapter."""
    config = model._module.peft_config["default"]
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    return f"{kind} r={getattr(config, 'r', '?')} alpha={getattr(config, 'lora_alpha', '?')}, peft {_peft_version()}"


def _peft_version() -> str:
    return installed_version("peft")


def _from_pretrained(folder: Path, *, dtype: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise Unusable(f"transformers cannot load {folder.name!r}: {type(error).__name__}: {error}") from error
