"""Check an adapter against its base: every module has its tensors, every tensor its place, every shape fits.

A tensor without a place tells by its name where it comes from; each kind has a remedy of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import AdapterConfig, incomplete, misfit
from slipway.model.adapters.saved import Pair
from slipway.model.families import TRAINED_FAMILIES
from slipway.model.module_patterns import check_patterns
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter, WholeTensor
from slipway_merge.adapter.naming import NameMap
from slipway_merge.tensors.outputs import Factor, Update, Value

_REASON = "ADAPTER_TENSOR_UNUSED"
_AROUND = ".base_layer."
_SET_TASK = (
    "set task_type in adapter_config.json to what was trained: SEQ_CLS for a classifier, cross-encoder or reward model, TOKEN_CLS for labels of "
    "tokens, QUESTION_ANS for answers in a text"
)
_MERGE_INNER = (
    "merge the inner adapter into the base first (PeftModel.from_pretrained(base, inner).merge_and_unload()), name the result as the base, and "
    "export the outer adapter alone"
)
_SAVE_WITHOUT = (
    "save the base again without the adapter (model.unload(), or model.merge_and_unload() if its update belongs to it), or name the model that "
    "this one was loaded from"
)
_OWN_EXPERTS = re.compile(r"\.experts\.(?P<kind>gate_up_projs|down_projs)\.\d+\.")
_VALUE_HEAD = re.compile(r"(?:^|\.)(?:v_head|value_head)\.")


def check_replacement(
    name: str,
    whole: WholeTensor,
    shape: tuple[int, ...],
    *,
    vocab_size: int | None,
    same: Callable[[TensorInfo, TensorInfo], bool],
) -> TensorInfo:
    """Return the tensor that replaces a base weight; check that it has the weight's shape, or only another number of vocabulary rows.

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
        raise _mismatch_error(f"replaces {name!r}", whole.info, shape)
    return whole.info


def fit_update(
    pair: Pair, name: str, shape: tuple[int, ...], *, may_be_transposed: bool, is_transposed: Callable[[], bool]
) -> Update:
    """Return the product of a pair in the orientation of its weight.

    Args:
        pair: The pair.
        name: Name of the weight.
        shape: Shape of the weight.
        may_be_transposed: Whether some of the model's weights may be stored as (in, out).
        is_transposed: Asks the model whether this weight is; called only if the shapes do not tell.

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
        raise _mismatch_error(what, pair.a, shape)
    return update


def has_transposed(base: Mapping[str, TensorInfo]) -> bool:
    """Return whether the bias of any weight shows that it is stored as (in, out); for a square weight only the model can tell.

    The adapter's ``fan_in_fan_out`` is not reliable: peft leaves it at the value of the last layer it met, which may be a linear
    head among ``Conv1D``.
    """
    for name, info in base.items():
        bias = base.get(f"{name.removesuffix('weight')}bias") if name.endswith(".weight") else None
        if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1] and bias.shape == info.shape[1:]:
            return True
    return False


def new_vocab_size(values: Mapping[str, Value], base: Mapping[str, TensorInfo]) -> int | None:
    """Return the number of rows of the embeddings after a resize; None without one.

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


def _mismatch_error(what: str, info: TensorInfo, base: tuple[int, ...]) -> ModelMergeError:
    message = f"adapter tensor {info.name!r} {info.shape} {what} does not fit the base's shape {base}"
    return misfit(message, tensor=info.name, shape=info.shape, base_shape=base)


def check_complete(
    base: Mapping[str, TensorInfo], adapter: Adapter, names: NameMap, is_in_model: Callable[[str], bool]
) -> None:
    """Check that the checkpoint has a tensor for everything that ``adapter_config.json`` names.

    :meth:`PeftForms.check` does so for the modules that peft merges.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``.
    """
    config = adapter.config
    _check_tokens(adapter)
    modules = [*adapter.pairs, *adapter.rows, *adapter.formed_modules()]
    taken = {names.stored_name(name) for name in [*(f"{module}.weight" for module in modules), *adapter.whole]}
    modelled = {name: names.model_name(name).rpartition(".") for name in base}
    check_patterns(config.raw, (module for module, _, _ in modelled.values()))
    for name, info in base.items():
        module, _, parameter = modelled[name]
        if name in taken or not names.is_trained(name):
            continue
        bias = parameter == "bias" and config.bias == "all"
        saved = any(f".{entry}." in f".{module}." for entry in config.modules_to_save)
        matrix = parameter == "weight" and len(info.shape) > 1 and (bool(adapter.rows) or not config.through_peft)
        targeted = bias or (saved and parameter == "weight") or (matrix and config.targets(module))
        if targeted and is_in_model(info.name):
            what = (
                f"adapter_config.json names module {module!r}, but the checkpoint holds no tensor for its {parameter}"
            )
            raise incomplete(what, tensor=name)


def _check_tokens(adapter: Adapter) -> None:
    """Check that the named modules have rows; tied modules may share one tensor of rows."""
    tokens = adapter.config.tokens
    named = dict(tokens) if isinstance(tokens, Mapping) else {"its input embedding": tokens} if tokens else {}
    if len(adapter.rows) >= len(named) or (adapter.rows and len(set(named.values())) == 1):
        return
    names_with_rows = [name for name in named if any(f".{module}".endswith(f".{name}") for module in adapter.rows)]
    what = f"adapter_config.json names token ids for {', '.join(named)}, but the checkpoint has rows for "
    raise incomplete(what + (", ".join(names_with_rows) or "none"), key="trainable_token_indices")


def check_rows(config: AdapterConfig, module: str, info: TensorInfo) -> tuple[int, ...]:
    """Return the numbers of the rows that a module's row tensor replaces.

    Raises:
        ModelMergeError: ``ADAPTER_CONFIG_INVALID`` if the configuration names another number of rows, or none.
    """
    if isinstance(config.tokens, Mapping):
        matches = [rows for name, rows in config.tokens.items() if f".{module}".endswith(f".{name}")]
        rows = matches[0] if matches else ()
    else:
        rows = config.tokens
    if len(info.shape) != 2 or len(rows) != info.shape[0]:
        raise ModelMergeError(
            f"adapter tensor {info.name!r} {info.shape} brings rows of an embedding, but adapter_config.json names "
            f"{len(rows)} token ids for it",
            reason="ADAPTER_CONFIG_INVALID",
            remedy="use the adapter_config.json that was saved with these weights",
            about={"tensor": info.name},
        )
    return rows


def no_place_error(
    what: str, info: TensorInfo, *, settings: Mapping[str, Any], base: Mapping[str, TensorInfo]
) -> ModelMergeError:
    """Return the error for adapter tensors that no base weight takes.

    Args:
        what: Their number, and the name of the first.
        info: The first.
        settings: Content of ``adapter_config.json``.
        base: The base's tensors by stored name.
    """
    why, remedy = _explain(info, settings, base)
    if not why:
        return misfit(what, reason=_REASON, tensor=info.name)
    return ModelMergeError(f"{what}: {why}", reason=_REASON, remedy=remedy, about={"tensor": info.name})


def _explain(info: TensorInfo, settings: Mapping[str, Any], base: Mapping[str, TensorInfo]) -> tuple[str, str]:
    wrapped = next((name for name in base if _AROUND in name), None)
    if wrapped:
        return (
            f"the base was saved while an adapter was around its layers ({wrapped!r})",
            _SAVE_WITHOUT,
        )
    if _AROUND in info.name:
        return (
            "the model was trained with two adapters around each other, and this file holds the inner one's",
            _MERGE_INNER,
        )
    if match := _OWN_EXPERTS.search(info.name):
        joined = match["kind"].removesuffix("s")
        return (
            f"it has a layer of its own for each expert, as Unsloth trains gpt-oss, and the base holds all experts in one {joined!r}",
            "merge it where it was trained (Unsloth: model.save_pretrained_merged(FOLDER, tokenizer)), and export FOLDER as --base-model",
        )
    if _VALUE_HEAD.search(info.name):
        return (
            "it is the value head of a reinforcement learning, which no model of transformers has and no output computes",
            "save the adapter of the policy alone (take the head out of modules_to_save); a reward model is trained with task_type SEQ_CLS",
        )
    task = settings.get("task_type")
    if ".lora_" not in info.name and settings.get("modules_to_save") and task not in TRAINED_FAMILIES:
        head = info.name.rpartition(".")[0].rpartition(".")[2]
        task_text = f"its task_type is {task}, whose models have none" if task else "it names no task_type"
        return (
            f"the adapter has a head of its own, {head!r}, and {task_text}",
            _SET_TASK,
        )
    return "", ""
