"""Refuse options of adapters that cannot be merged."""

from __future__ import annotations

from slipway.errors import ModelMergeError

PEFT_REMEDY = "merge it with peft (merge_and_unload) and export the result as a base model"
#: Remedy for an adapter that cannot be merged at all.
UNMERGED_REMEDY = "serve the base model with the adapter beside it, through peft"


def unsupported(key: str, value: object, why: str, *, remedy: str = PEFT_REMEDY) -> ModelMergeError:
    """Return the refusal of an option, with its name and value."""
    shown = repr(value)
    return ModelMergeError(
        f"the adapter's {key} is {shown if len(shown) <= 120 else shown[:117] + '…'}: {why}",
        reason="ADAPTER_UNSUPPORTED",
        remedy=remedy,
        about={"key": key, "value": shown[:200]},
    )
