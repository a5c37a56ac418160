"""Open the merged model's folder: its configuration, and its weights as views of the mapped safetensors files."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open

from slipway.errors import CheckpointValidationError, ONNXExportError
from slipway.model.configuration import ModelConfig, first_token, token_of
from slipway.model.dtypes import DTYPES, torch_dtypes
from slipway.model.families import DECODER, Family, auto_model
from slipway.model.folder import ModelFolder
from slipway.model.limits import window_of
from slipway.model.safetensors_file import TensorInfo, read_index
from slipway.model.weights.reading import Weights, has_weights, open_weights
from slipway_onnx_export.params import Parts, refusal_reason

WINDOW_LIMIT = 512
"""Longest attention window, in tokens, beyond which the parity check runs a text; see ``parity/lengths.py`` for longer ones."""

SMALL_BYTES = 64 << 10
"""Largest tensor that is read at once from a folder that leaves its weights out."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face model folder opened for export.

    Attributes:
        model: The model as it is stored.
        config: Its transformers configuration.
        weights: Tensors by name. They are views of mapped files: reading one uses page cache and no other memory.
        family: Its family.
        inputs: Inputs of the task; the weights are made from them if the folder leaves them out.
        stand_ins: Names of the tensors that the folder leaves out. They have addresses only: their values must not be read here.
    """

    model: ModelFolder
    config: Any
    weights: Mapping[str, torch.Tensor]
    family: Family
    inputs: Mapping[str, Path] = field(default_factory=dict)
    stand_ins: frozenset[str] = frozenset()

    @property
    def folder(self) -> Path:
        """Return the path of the folder."""
        return self.model.path

    @property
    def architecture(self) -> str:
        """Return the class name in the configuration, otherwise its model type."""
        names = getattr(self.config, "architectures", None)
        return names[0] if names else str(self.config.model_type)

    @property
    def text_config(self) -> Any:
        """Return the configuration of the text decoder, which is the configuration itself unless the model is multimodal."""
        return self.config.get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return int(self.text_config.num_hidden_layers)

    @property
    def loader(self) -> Any:
        """Return the class of transformers that loads the model: whole, if it takes images or sound too."""
        return auto_model(self.family, self.config.to_dict())

    @property
    def takes_more_than_text(self) -> bool:
        """Return whether the model takes images or sound too."""
        return self.family is DECODER and ModelConfig(self.config.to_dict()).takes_more_than_text

    @property
    def keeps_states(self) -> bool:
        """Return whether layers keep a state beside, or instead of, keys and values of attention."""
        return ModelConfig(self.config.to_dict()).keeps_states

    @property
    def sliding_window(self) -> int:
        """Return the attention window of local layers in tokens, 0 if all layers have full attention.

        A window does not count if the model has no more positions than it (Phi-3).
        """
        window = window_of(self.text_config)
        most = getattr(self.text_config, "max_position_embeddings", None)
        return window if most is None or window < most else 0

    @property
    def end(self) -> int | None:
        """Return the token that ends a text; none if the configuration names none, several, or one beyond the vocabulary."""
        end = token_of(self.config, "eos_token_id")
        known = end is not None and 0 <= end < getattr(self.text_config, "vocab_size", 0)
        return end if known else None

    @property
    def start(self) -> int:
        """Return the token that a decoder's text begins with; 0 if no file names one."""
        return first_token(self.model.generation_settings(self.config)) or 0

    @contextmanager
    def open(self) -> Iterator[Weights]:
        """Open the weights for reading by rows; weights that the folder leaves out are made while they are read."""
        with closing(open_weights(self.folder, self.inputs)) as weights:
            yield weights

    def value(self, name: str) -> torch.Tensor:
        """Return a tensor with its values."""
        if name not in self.stand_ins:
            return self.weights[name]
        with self.open() as weights:
            return read_tensor(weights, name)

    @property
    def fp32_bytes(self) -> int:
        """Return the size of all weights as float32, in bytes."""
        return sum(4 * tensor.numel() for tensor in self.weights.values())


def open_source(
    folder: Path, inputs: Mapping[str, Path] = MappingProxyType({}), *, parts: Parts = "text"
) -> ModelSource:
    """Open a merged model's folder.

    Args:
        folder: The folder.
        inputs: Inputs of the task; those of the task that made the folder are among them if it leaves its weights out.
        parts: The parts of a model that takes images which shall be exported.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED``, ``BASE_MODEL_INVALID`` (no configuration, no weights, a shard missing, an unknown model type),
            ``SAFETENSORS_CORRUPT``, ``UNSAFE_PICKLE``, ``DTYPE_UNSUPPORTED`` (the weights are quantized).
    """
    model, config, family = _read_config(folder, parts)
    if getattr(config, "quantization_config", None):
        raise ONNXExportError(
            f"the model in {folder.name} is already quantized",
            reason="DTYPE_UNSUPPORTED",
            remedy="export the unquantized model, then quantize the ONNX model",
            about={"file": "config.json", "key": "quantization_config"},
        )
    weights: dict[str, torch.Tensor] = {}
    stand_ins = frozenset[str]()
    if has_weights(folder):
        for path in _weight_files(folder):
            weights.update(_open_weights(path))
    else:
        weights, stand_ins = _open_deferred(folder, inputs)
    for name in sorted(weights):
        if weights[name].dtype not in FLOAT_DTYPES and weights[name].is_floating_point():
            raise _type_error(name, weights[name].dtype)
    return ModelSource(model=model, config=config, weights=weights, family=family, inputs=inputs, stand_ins=stand_ins)


def _open_deferred(folder: Path, inputs: Mapping[str, Path]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return the small tensors of a folder that leaves its weights out, stand-ins for the others, and their names."""
    with closing(open_weights(folder, inputs)) as weights:
        strange = [info for info in weights.tensors.values() if not DTYPES[info.dtype].torch]
        if strange:
            raise _type_error(strange[0].name, strange[0].dtype)
        large = frozenset(name for name, info in weights.tensors.items() if info.nbytes > SMALL_BYTES)
        tensors = {
            name: make_stand_in(info) if name in large else read_tensor(weights, name)
            for name, info in sorted(weights.tensors.items())
        }
    return tensors, large


def read_tensor(weights: Weights, name: str) -> torch.Tensor:
    """Return a whole tensor."""
    info = weights.tensors[name]
    values = np.array(weights.rows(name, 0, info.shape[0] if info.shape else 1))
    return (
        torch.from_numpy(values.reshape(-1).view(np.uint8))
        .view(torch_dtypes(info.dtype)[info.dtype])
        .reshape(info.shape)
    )


def _read_config(folder: Path, parts: Parts) -> tuple[ModelFolder, Any, Family]:
    try:
        opened = ModelFolder.open(folder)
    except CheckpointValidationError as error:
        raise _invalid_error(error.message, file="config.json") from error
    model, family, model_type = opened.config, opened.family, opened.config.get("model_type")
    why = refusal_reason(model, parts=parts)
    if why or family is None:
        text = parts == "all" and not refusal_reason(model)
        raise ONNXExportError(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy="export the text part alone" if text else "leave the ONNX format out for this model",
            about={"family": model.description, "model_type": model_type},
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # configuration classes may raise anything
        raise _invalid_error(
            f"transformers {transformers.__version__} cannot read the configuration of model type {model_type!r}: {error}",
            file="config.json",
            model_type=model_type,
        ) from error
    config.architectures = model.get("architectures")  # for a sentence encoder, the class that is used
    return opened, config, family


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (single := folder / "model.safetensors").is_file():
            return [single]
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ONNXExportError(
                f"the weights in {folder.name} are a pickle, {pickles[0]!r}",
                reason="UNSAFE_PICKLE",
                remedy="convert them to safetensors",
                about={"file": pickles[0]},
            )
        raise _invalid_error(f"{folder.name} has no model.safetensors", file="model.safetensors")
    return [folder / name for name in sorted(set(read_index(index).values()))]


def _open_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ONNXExportError(
            f"{path.name} is not a valid safetensors file: {error}",
            reason="SAFETENSORS_CORRUPT",
            remedy="merge the model again",
            about={"file": path.name},
        ) from error


def _type_error(name: str, dtype: object) -> ONNXExportError:
    return ONNXExportError(
        f"tensor {name!r} is {dtype}, which cannot be exported",
        reason="DTYPE_UNSUPPORTED",
        remedy="merge to float32, bfloat16 or float16",
        about={"tensor": name, "dtype": dtype},
    )


def _invalid_error(message: str, **about: object) -> ONNXExportError:
    return ONNXExportError(
        message, reason="BASE_MODEL_INVALID", remedy="give a complete transformers model folder", about=about
    )


def make_stand_in(info: TensorInfo) -> torch.Tensor:
    """Make a tensor of this type and shape that has its own addresses and takes no memory. Its values must not be read."""
    memory = mmap.mmap(-1, max(info.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
        values = torch.from_numpy(np.frombuffer(memory, np.uint8, count=info.nbytes))
    return values.view(torch_dtypes(info.dtype)[info.dtype]).reshape(info.shape)
