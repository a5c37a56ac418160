"""Say of an adapter's tensor that no weight of the base takes where it comes from, if its name tells: each kind has a remedy of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipway.errors import ModelMergeError
from slipway.model.adapters.refusals import misfit
from slipway.model.families import TRAINED_FAMILIES
from slipway.model.safetensors_file import TensorInfo

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


def no_place(
    what: str, info: TensorInfo, *, settings: Mapping[str, Any], base: Mapping[str, TensorInfo]
) -> ModelMergeError:
    """Return the refusal of a tensor without a place.

    Args:
        what: How many such tensors there are, and which is the first.
        info: The first.
        settings: Content of ``adapter_config.json``.
        base: The base's tensors by stored name.
    """
    why, remedy = _explained(info, settings, base)
    if not why:
        return misfit(what, reason=_REASON, tensor=info.name)
    return ModelMergeError(f"{what}: {why}", reason=_REASON, remedy=remedy, about={"tensor": info.name})


def _explained(info: TensorInfo, settings: Mapping[str, Any], base: Mapping[str, TensorInfo]) -> tuple[str, str]:
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
        said = f"its task_type is {task}, whose models have none" if task else "it names no task_type"
        return (
            f"the adapter has a head of its own, {head!r}, and {said}",
            _SET_TASK,
        )
    return "", ""
