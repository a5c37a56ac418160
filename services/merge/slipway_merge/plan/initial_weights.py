"""The weights that a form of peft began with, where it takes them apart (PiSSA, OLoRA, FRoD)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from slipway.models.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter_config import REPEATED_INITS
from slipway_merge.adapter.naming import Naming
from slipway_merge.unsupported import UNMERGED_REMEDY, unsupported

if TYPE_CHECKING:
    from slipway_merge.plan.peft_forms import PeftForms

#: Forms that take the base's weights apart; LoRA does with the initialisations that are repeated.
_TAKING_APART = frozenset({"frod", "osf"})
_SIXTEEN_BITS = frozenset({"F16", "BF16"})


def unknown_start(forms: PeftForms) -> str | None:
    """Return a warning where the result depends on how precise the weights were that training took apart; None elsewhere."""
    init = str(forms.raw.get("init_lora_weights")).lower()
    narrow = {info.dtype for sources in forms.sources.values() for info in sources.values()} & _SIXTEEN_BITS
    if not narrow or (forms.form not in _TAKING_APART and init not in REPEATED_INITS):
        return None
    name = init if init in REPEATED_INITS else forms.form
    return (
        f"{name} takes the base's weights apart when training starts, and the checkpoint does not tell in which type they were "
        f"then: it is merged as if in {min(narrow)}, in which they are stored; trained in another one, the model is not the same"
    )


def start_where_the_training_did(
    forms: PeftForms, base: Mapping[str, TensorInfo], naming: Naming, *, tied: Collection[str]
) -> None:
    """Give such a form the base's weight where the adapter was saved with one: of that the part is gone already.

    Args:
        forms: What is left to peft; its sources are corrected.
        base: Tensors of the base model by stored name.
        naming: Translates names.
        tied: Weights that share a storage with others, which lost that part too.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` where other weights changed, too, or the base's does not fit.
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
