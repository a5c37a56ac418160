"""Check that the adapter's tensors fit their base weights by comparing shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from slipway.errors import ModelMergeError
from slipway.model.adapters.pairs import Pair
from slipway.model.adapters.refusals import misfit
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import WholeTensor
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
        name: Name of the base weight.
        whole: The adapter's tensor for it.
        shape: Shape of the base weight.
        vocab_size: Rows of the base's embedding.
        same: Returns whether two stored tensors hold the same values.

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
        raise _mismatch(f"replaces {name!r}", whole.info, shape)
    return whole.info


def fitted_update(
    pair: Pair, name: str, shape: tuple[int, ...], *, may_be_transposed: bool, is_transposed: Callable[[], bool]
) -> Update:
    """Return the product of a pair in the orientation of its weight.

    Args:
        pair: The pair.
        name: Name of the weight.
        shape: Shape of the weight.
        may_be_transposed: Whether some of the model's weights may be stored as (in, out).
        is_transposed: Asks the model whether this one is; called only if the shapes do not tell.

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
        raise _mismatch(what, pair.a, shape)
    return update


def has_transposed(base: Mapping[str, TensorInfo]) -> bool:
    """Return whether any weight is stored as (in, out), judged by its bias; for a square weight only the model can tell.

    The adapter's ``fan_in_fan_out`` is not reliable: peft leaves it at the value of the last layer it met, which may be a linear
    head among ``Conv1D``.
    """
    for name, info in base.items():
        bias = base.get(f"{name.removesuffix('weight')}bias") if name.endswith(".weight") else None
        if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1] and bias.shape == info.shape[1:]:
            return True
    return False


def new_vocab_size(values: Mapping[str, Value], base: Mapping[str, TensorInfo]) -> int | None:
    """Return the rows of the embeddings after a resize; None without one.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if embeddings differ in their number of rows.
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


def _mismatch(what: str, info: TensorInfo, base: tuple[int, ...]) -> ModelMergeError:
    message = f"adapter tensor {info.name!r} {info.shape} {what} does not fit the base's shape {base}"
    return misfit(message, tensor=info.name, shape=info.shape, base_shape=base)
