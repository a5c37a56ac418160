"""Build one or a few modules with peft's adapter on them, in bounded memory, to merge every form that peft can merge.

A holder is a tree of empty modules with only the real layers, at their places in the model. peft treats it like any model, so ranks,
patterns and options have the same meaning as in training. peft trusts the numbers of ``adapter_config.json``, so the memory that it may
take to build a form is limited.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from slipway.errors import ModelExportError, ModelMergeError
from slipway.model.dtypes import FLOATS, torch_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights import reading
from slipway.sizes import format_size
from slipway.texts import counted
from slipway_merge.tensors.tensor_io import COMPUTING_UNITS, DEVIATIONS, UNIT_ROUNDOFF

#: Bytes that any form may take.
_ALLOWED_BYTES = 64 << 20
#: Multiples of the square of a layer's inputs, or of its size: BOFT has some permutations of the inputs for each of its factors.
_TIMES_LARGEST = 16
#: Multiples of the sizes of all layers together: FRoD takes two.
_TIMES_ALL = 3
_FLOAT_BYTES = 4

#: Types of weights, then of positions of entries, and of masks.
_STORED_TYPES = torch_dtypes(*FLOATS, "I64", "I32", "U8", "BOOL")
#: torch's types for computing, by numpy's.
TORCH_TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
#: One module is computed at a time, whatever the number of threads, to limit memory and because peft expects one thread.
_ONE_AT_A_TIME = threading.RLock()
#: Options that choose modules or save additional weights; they are resolved before a holder is built.
_SELECTING: Mapping[str, Any] = {
    "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None, "modules_to_save": None,
    "trainable_token_indices": None, "layer_replication": None, "target_parameters": None, "task_type": None,
    "bias": "none", "ensure_weight_tying": False,
}  # fmt: skip


def most_bytes(layers: Iterable[nn.Module]) -> int:
    """Return the most bytes of float32 tensors that a form may make on these layers: in proportion to them, and more than any form needs."""
    shapes = [[parameter.shape for parameter in layer.parameters()] for layer in layers]
    sizes = [sum(shape.numel() for shape in each) for each in shapes]
    inputs = [shape[1:].numel() for each in shapes for shape in each]
    largest = max(*sizes, *(count * count for count in inputs), 0, 0)
    return _ALLOWED_BYTES + _FLOAT_BYTES * (_TIMES_LARGEST * largest + _TIMES_ALL * sum(sizes))


class BoundedMemory(TorchDispatchMode):
    """Limit the total bytes of the tensors made in a block. Tensors on ``meta`` take none.

    Only tensors made from numbers count: the sizes of all others follow from these, the base and the adapter's own tensors.

    Raises:
        ModelMergeError: ``ADAPTER_CONFIG_INVALID``, before the tensor is made.
    """

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._taken = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, unless it would exceed the limit."""
        options = dict(kwargs or {})
        if self._taken <= self._most:
            self._taken += _new_bytes(function, args, options)
        if self._taken > self._most:
            raise ModelMergeError(
                f"adapter_config.json asks for more than {format_size(self._most)} of memory to build the adapter, which is more "
                "than any adapter takes on layers of this base",
                reason="ADAPTER_CONFIG_INVALID",
                remedy="use the adapter_config.json that was saved with these weights",
                about={"memory_bytes": self._taken},
            )
        return function(*args, **options)


def _new_bytes(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor that an operation is about to make from numbers; 0 for every other operation."""
    device = options.get("device")
    if device is None or device.type == "meta" or any(isinstance(value, torch.Tensor) for value in args):
        return 0
    elsewhere = {"device": torch.device("meta"), "pin_memory": False}
    planned = function(*args, **{**options, **elsewhere, **({"generator": None} if "generator" in options else {})})
    return planned.nbytes if isinstance(planned, torch.Tensor) else 0


@contextmanager
def run_peft(what: str) -> Iterator[None]:
    """Run a block of peft's code silently, in one thread at a time; translate its errors.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED``.
    """
    with _ONE_AT_A_TIME, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except ModelExportError:
            raise
        except Exception as error:  # a library's code on a user's settings may raise anything
            raise ModelMergeError(
                f"{what}: peft refuses with {type(error).__name__}: {error}",
                reason="ADAPTER_UNSUPPORTED",
                remedy="check whether peft's merge_and_unload accepts this adapter on this base; if so, export its result",
                about={"error": type(error).__name__},
            ) from error


def map_tensor(info: TensorInfo) -> torch.Tensor:
    """Return a stored tensor in its own type, mapped copy-on-write from its file.

    Raises:
        ModelMergeError: ``DTYPE_UNSUPPORTED`` for a type that no adapter form computes with.
    """
    dtype = _STORED_TYPES.get(info.dtype)
    if dtype is None:
        raise ModelMergeError(
            f"tensor {info.name!r} is stored as {info.dtype}, which is not supported for computing",
            reason="DTYPE_UNSUPPORTED",
            remedy="use a 16-bit or 32-bit version",
            about={"tensor": info.name, "dtype": info.dtype},
        )
    raw = torch.from_numpy(reading.mapped(info).reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(info.shape)


def read_finite(info: TensorInfo, where: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return :func:`map_tensor`, or a part of it, after checking that every value is finite.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS`` or ``DTYPE_UNSUPPORTED``.
    """
    tensor = map_tensor(info)[part]
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ModelMergeError(
            f"tensor {info.name!r} of {where} holds NaN or infinity",
            reason="NON_FINITE_WEIGHTS",
            remedy="use another checkpoint or download the base model again",
            about={"tensor": info.name},
        )
    return tensor


def read_widened(info: TensorInfo, dtype: np.dtype[np.floating], part: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return a copy of a base weight, or of a part, in the type of a computation (float32 or float64); raise as :func:`read_finite`."""
    return read_finite(info, "the base model", part).to(TORCH_TYPES[np.dtype(dtype)], copy=True)


def fill_layer(layer: nn.Module, fill: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a layer with other values: ``fill`` gets each parameter's name and its (meta) tensor."""
    layer = copy.deepcopy(layer)
    for path, parameter in list(layer.named_parameters()):
        owner, _, name = path.rpartition(".")
        value = nn.Parameter(fill(path, parameter), requires_grad=False)
        layer.get_submodule(owner)._parameters[name] = value
    for path, buffer in list(layer.named_buffers()):
        owner, _, name = path.rpartition(".")
        layer.get_submodule(owner)._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return layer


class Holder:
    """Layers with their adapter, ready to be merged one by one.

    Args:
        config: The adapter's configuration; it is copied and restricted to these layers.
        layers: Layers by their names in the model, in the model's order.
    """

    def __init__(self, config: Any, layers: Mapping[str, nn.Module]) -> None:
        root = nn.Module()
        for name, layer in layers.items():
            parent = root
            *parents, last = name.split(".")
            for part in parents:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, layer)
        config = copy.deepcopy(config)
        for key, value in _SELECTING.items():
            if hasattr(config, key):
                setattr(config, key, value)
        if config.peft_type == peft.PeftType.ADALORA and config.rank_pattern:  # the remaining ranks by module
            ranks = config.rank_pattern.items()
            config.rank_pattern = {k: v for k, v in ranks if any(f".{name}." in f".{k}" for name in layers)}
        if sampler := getattr(config, "monteclora_config", None):
            sampler.buffer_size = 1  # noise drawn ahead for the training, hundreds of times the adapter's size
        config.target_modules = set(layers)
        config.inference_mode = True
        self._most = most_bytes(layers.values())
        with BoundedMemory(self._most):
            self.model = peft.PeftModel(root, config)

    @property
    def tuner(self) -> BaseTuner:
        """The part of peft that holds the layers."""
        return self.model.base_model

    @property
    def shares_state(self) -> bool:
        """Whether the adapter has state outside the layers, which may depend on all layers together."""
        own = [name for name, _ in self.tuner.named_children() if name != "model"]
        own += [name for name, _ in self.tuner.named_parameters(recurse=False)]
        return bool(own) or self.tuner.uses_shared_state

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the adapter tensors that these layers need, by checkpoint name, with their shapes."""
        state = peft.get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {key: tuple(tensor.shape) for key, tensor in state.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the adapter its trained values.

        Raises:
            ModelMergeError: ``ADAPTER_TENSOR_UNUSED`` if peft leaves one unused.
        """
        if any(tensor.dtype == torch.float32 for tensor in tensors.values()):
            self._widen()  # on a 16-bit base peft may have created 16-bit parameters
        with BoundedMemory(self._most):
            result = peft.set_peft_model_state_dict(self.model, dict(tensors))
        if result.unexpected_keys:
            raise ModelMergeError(
                f"the adapter has {counted(len(result.unexpected_keys), 'tensor')} that its configuration has no place for, "
                f"first {result.unexpected_keys[0]!r}",
                reason="ADAPTER_TENSOR_UNUSED",
                remedy="use the adapter_config.json that was saved with these weights",
                about={"tensor": result.unexpected_keys[0]},
            )

    def _widen(self) -> None:
        """Convert the adapter's own parameters and buffers to float32."""
        narrow = (torch.float16, torch.bfloat16)
        for path, module in self.tuner.named_modules():
            if "base_layer" not in path.split("."):
                for name, value in module._buffers.items():
                    module._buffers[name] = value.float() if value is not None and value.dtype in narrow else value
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float() if parameter.dtype in narrow else parameter.data

    def base_layer(self, name: str) -> nn.Module:
        """Return the base layer; the adapter's initialisation may have changed it."""
        base: nn.Module = self.tuner.model.get_submodule(name).get_base_layer()
        return base

    def departure(self, name: str, merged: Mapping[str, torch.Tensor], layer: nn.Module) -> float | None:
        """Return how far a merged layer's output is from the unmerged layer's, on random input and relative to its norm.

        Args:
            name: Name of the layer, which is not merged yet.
            merged: Its parameters after the merge.
            layer: The model's layer without adapter.

        Returns:
            None if only the model can make the layer's input.
        """
        inputs = _tokens(layer) if isinstance(layer, nn.Embedding) else _inputs(layer)  # scaled embeddings, too
        if inputs is None:
            return None
        trained = copy.deepcopy(self.tuner.model.get_submodule(name)).to(torch.float32).eval()
        plain = fill_layer(layer, lambda path, _: merged[path].to(torch.float32)).eval()
        wanted, got = trained(inputs), plain(inputs)
        return float((wanted - got).norm() / wanted.norm().clamp_min(1e-30))

    def share_of_rounding(
        self, name: str, layer: nn.Module, parameter: str, written: TensorInfo, *, keep: bool
    ) -> float:
        """Return the error of a layer's output with a written parameter, against the unmerged layer with its adapter.

        It is the largest difference on random input, as a share of what rounding the parameter explains. The merge code is not used.

        Args:
            name: Name of the layer.
            layer: The model's layer without adapter; one that takes known inputs.
            parameter: Name of the parameter, whose contribution to the output is compared alone.
            written: The written parameter.
            keep: Whether the holder is needed afterwards.
        """
        trained = self.tuner.model.get_submodule(name)
        trained = (copy.deepcopy(trained) if keep else trained).to(torch.float32).eval()
        inputs = _inputs(layer)
        assert inputs is not None
        wanted = trained(inputs)
        unit, size = UNIT_ROUNDOFF[written.dtype], wanted.abs().max()
        if parameter == "bias" or hasattr(layer, "bias"):
            nothing = trained(torch.zeros_like(inputs))
            wanted = nothing if parameter == "bias" else wanted - nothing
        del trained

        def output(values: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
            """Return the output of a layer with only this parameter; it is linear in its values and in its input."""
            alone = fill_layer(layer, lambda path, other: values if path == parameter else torch.zeros(other.shape))
            return alone.eval()(layer_input if layer_input.is_floating_point() else inputs)

        values = read_finite(written, "the merged model").to(torch.float32)
        error = (wanted - output(values, inputs)).abs()
        variance = output(values.mul(unit).square_().div_(3), inputs.square())
        computing = output(values.abs(), inputs.abs()) + size
        tolerance = DEVIATIONS * variance.sqrt() + COMPUTING_UNITS * UNIT_ROUNDOFF["F32"] * computing + 1e-30
        return float((error / tolerance).max())

    def merge(self, name: str, dtype: torch.dtype, *, keep: bool, disturbed: bool = False) -> dict[str, torch.Tensor]:
        """Return one layer's parameters after peft's merge, computed in ``dtype``; with ``keep`` the holder can merge again.

        With ``disturbed`` (and ``keep``) add noise to the adapter's values, so that the merge changes everything it can change.
        """
        layer = self.tuner.model.get_submodule(name)
        layer = (copy.deepcopy(layer) if keep else layer).to(dtype)
        if disturbed:
            generator = torch.Generator().manual_seed(0)
            for key, value in layer.named_parameters():
                if not key.startswith("base_layer.") and value.is_floating_point():
                    value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=dtype))
        if hasattr(layer, "unload_and_optionally_merge_module"):
            layer = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False)
            layer = layer.get_base_layer()
        return {key.replace("base_layer.", ""): value.detach() for key, value in layer.named_parameters()}


def takes_known_inputs(layer: nn.Module) -> bool:
    """Return whether a layer's input can be made without its model."""
    return _inputs(layer) is not None


def _inputs(layer: nn.Module) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(0)
    if type(layer) is nn.Embedding:
        return _tokens(layer)
    if isinstance(layer, nn.Linear):
        return torch.randn(8, layer.in_features, generator=generator)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return torch.randn(2, layer.in_channels, *(8 * length for length in layer.kernel_size), generator=generator)
    if isinstance(layer, Conv1D):
        return torch.randn(8, layer.nx, generator=generator)
    return None


def _tokens(layer: nn.Embedding) -> torch.Tensor:
    return torch.randint(0, layer.num_embeddings, (64,), generator=torch.Generator().manual_seed(0))
