"""Restore the initial weights of peft forms that extract a part of the base's weights at their start (PiSSA, OLoRA, FRoD)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from slipway.model.adapters.adapter_config import REPEATED_INITS
from slipway.model.adapters.refusals import UNMERGED_REMEDY, unsupported
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.naming import Naming

if TYPE_CHECKING:
    from slipway_merge.plan.peft_forms import PeftForms

#: Forms that extract a part of the base's weights; LoRA does so with the repeatable initialisations.
_EXTRACTING_FORMS = frozenset({"frod", "osf"})
_SIXTEEN_BITS = frozenset({"F16", "BF16"})


def initial_precision_warning(forms: PeftForms) -> str | None:
    """Return a warning if the result depends on the unknown precision in which training split the weights; else None."""
    init = str(forms.raw.get("init_lora_weights")).lower()
    narrow = {info.dtype for sources in forms.sources.values() for info in sources.values()} & _SIXTEEN_BITS
    if not narrow or (forms.form not in _EXTRACTING_FORMS and init not in REPEATED_INITS):
        return None
    name = init if init in REPEATED_INITS else forms.form
    return (
        f"{name} splits the base's weights when training starts, and the checkpoint does not name their type at that time: it is "
        f"merged as if in {min(narrow)}, their stored type; if it was trained in another type, the merged model differs"
    )


def restore_initial_weights(
    forms: PeftForms, base: Mapping[str, TensorInfo], naming: Naming, *, tied: Collection[str]
) -> None:
    """Use the base's weight: the checkpoint's copy already lacks the extracted part.

    Args:
        forms: The modules left to peft; their sources are corrected.
        base: Tensors of the base model by stored name.
        naming: Translates names.
        tied: Weights that share a storage with others, which lost that part too.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` if other weights changed too, or the base's does not fit.
    """
    for module in forms.layers:
        for path, source in forms.sources[module].items():
            name = naming.output(f"{module}.{path}")
            first = base.get(name)
            if (source is first and name not in tied) or not forms.alters(module, path):
                continue
            if first is None or name in tied or first.shape != source.shape:
                key = "init_lora_weights" if "init_lora_weights" in forms.raw else "peft_type"
                why = f"it changed {name!r} when the training began, which was resized or shares its values with another weight"
                raise unsupported(key, forms.raw[key], why, remedy=UNMERGED_REMEDY)
            forms.sources[module][path] = first
