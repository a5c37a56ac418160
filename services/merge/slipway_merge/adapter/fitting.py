"""Whether what the adapter brings fits the base weight it is for: their shapes are compared here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from slipway.errors import ModelMergeError
from slipway.models.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Pair, WholeTensor
from slipway_merge.tensors.values import Factor, Update, Value


def checked_replacement(
    name: str,
    whole: WholeTensor,
    shape: tuple[int, ...],
    *,
    vocab_size: int | None,
    same: Callable[[TensorInfo, TensorInfo], bool],
) -> TensorInfo:
    """Return the tensor that replaces a base weight: of its shape, or with another number of vocabulary rows.

    Args:
        name: The base weight.
        whole: What the adapter has for it.
        shape: The base weight's.
        vocab_size: Rows of the base's embedding.
        same: Whether two stored tensors hold the same values.

    Raises:
        ModelMergeError: ``ADAPTER_CONFIG_INVALID`` or ``ADAPTER_BASE_MISMATCH``.
    """
    for copy in whole.copies:
        if not same(whole.info, copy):
            raise ModelMergeError(
                f"adapter tensors {whole.info.name!r} and {copy.name!r} both replace {name!r} but differ",
                reason="ADAPTER_CONFIG_INVALID",
                remedy="save the adapter again",
                about={"tensor": copy.name},
            )
    resized = len(shape) > 0 and shape[0] == vocab_size and whole.info.shape[1:] == shape[1:]
    if whole.info.shape != shape and not (resized and len(whole.info.shape) == len(shape)):
        raise _mismatch(f"replaces {name!r}", whole.info, whole.info.shape, shape)
    return whole.info


def fitted_update(
    pair: Pair, name: str, shape: tuple[int, ...], *, may_be_transposed: bool, is_transposed: Callable[[], bool]
) -> Update:
    """Return the product of a pair as it is added to the weight.

    Args:
        pair: The pair.
        name: The weight.
        shape: The weight's.
        may_be_transposed: Whether some of the model's weights may be stored as (in, out).
        is_transposed: Asks the model whether this one is; called only when that cannot be seen by the shapes.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH``.
    """
    direct = Update(pair.module, Factor(pair.b, False), Factor(pair.a, False), pair.rank, pair.scaling)
    square = may_be_transposed and direct.shape == direct.shape[::-1]
    suspicious = direct.shape != shape and direct.shape[::-1] == shape
    update = direct
    if pair.embedding or ((suspicious or square) and is_transposed()):
        update = replace(direct, left=Factor(pair.a, True), right=Factor(pair.b, True))
    if update.shape != shape:
        what = f"together with {pair.b.name!r} {pair.b.shape} updates {name!r} by a matrix of shape {update.shape} that"
        raise _mismatch(what, pair.a, pair.a.shape, shape)
    return update


def has_transposed(base: Mapping[str, TensorInfo]) -> bool:
    """Return whether any weight is stored as (in, out), by its bias; a square one does not show it, and the model has to be asked.

    The adapter's ``fan_in_fan_out`` does not tell: peft leaves it at what the last layer it met was, be that a linear head among
    ``Conv1D``.
    """
    for name, info in base.items():
        bias = base.get(f"{name.removesuffix('weight')}bias") if name.endswith(".weight") else None
        if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1] and bias.shape == info.shape[1:]:
            return True
    return False


def new_vocab_size(values: Mapping[str, Value], base: Mapping[str, TensorInfo]) -> int | None:
    """Return the rows of the embeddings after a resize; None without one.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` when they differ.
    """
    sizes = {
        value.source.shape[0]
        for name, value in values.items()
        if name in base and value.source.shape != base[name].shape
    }
    if len(sizes) > 1:
        raise ModelMergeError(
            f"the adapter resizes the vocabulary to different sizes: {sorted(sizes)}",
            reason="ADAPTER_BASE_MISMATCH",
            remedy="save the adapter again with all embeddings (save_embedding_layers=True)",
            about={"sizes": sorted(sizes)},
        )
    return sizes.pop() if sizes else None


def _mismatch(what: str, info: TensorInfo, shape: tuple[int, ...], base: tuple[int, ...]) -> ModelMergeError:
    return ModelMergeError(
        f"adapter tensor {info.name!r} {shape} {what} does not fit the base's shape {base}",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="the adapter was trained on another base model: take the one that its adapter_config.json names",
        about={"tensor": info.name, "shape": shape, "base_shape": base},
    )
