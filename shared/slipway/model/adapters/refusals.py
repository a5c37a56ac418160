"""Refuse adapters that cannot be merged: unsupported options, another base model, missing weights."""

from __future__ import annotations

from slipway.errors import ModelMergeError
from slipway.texts import quoted

PEFT_REMEDY = "merge it with peft (merge_and_unload) and export the result as a base model"
#: Remedy for an adapter that cannot be merged at all.
UNMERGED_REMEDY = "serve the base model with the adapter beside it, through peft"


def unsupported(key: str, value: object, why: str, *, remedy: str = PEFT_REMEDY) -> ModelMergeError:
    """Return the refusal of an option, with its name and value."""
    return ModelMergeError(
        f"the adapter's {key} is {quoted(value)}: {why}",
        reason="ADAPTER_UNSUPPORTED",
        remedy=remedy,
        about={"key": key, "value": quoted(value)},
    )


def misfit(message: str, *, reason: str = "ADAPTER_BASE_MISMATCH", **about: object) -> ModelMergeError:
    """Return the refusal of an adapter that was trained on another base model."""
    return ModelMergeError(
        message,
        reason=reason,
        remedy="the adapter was trained on another base model or with other settings: use the one that its "
        "adapter_config.json names",
        about=about,
    )


def incomplete(message: str, **about: object) -> ModelMergeError:
    """Return the refusal of a checkpoint that lacks weights which its configuration names."""
    return ModelMergeError(
        message,
        reason="CHECKPOINT_INCOMPLETE",
        remedy="copy the checkpoint again: some of its weights are missing",
        about=about,
    )
