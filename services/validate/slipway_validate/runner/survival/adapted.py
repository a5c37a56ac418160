"""The adapter's update of each weight, by peft's own merge of one layer at a time, and the weights as they should be.

The model is built without its values, and only the layer in hand gets them: memory is a few times that of the largest adapted matrix.

Axes: N output features, K input features, R some of the N.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from slipway.model.families import auto_model
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import configuration_of
from slipway.model.model_files import ADAPTER_WEIGHTS
from slipway.model.pytorch.conversions import conversions
from slipway.model.pytorch.head_updates import head_keys
from slipway.model.pytorch.placing import unwrap_module
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import read_safetensors
from slipway.model.trained import trained_model
from slipway.proof.stored_weights import Dense, Names, NotUnderstoodError
from slipway_validate.runner.runtime_reference import add_adapter
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.survival.experts import AdaptedMatrix, adapted_parameter, joined_matrices
from slipway_validate.runner.survival.sums import Both

_PREFIX = re.compile(r"^base_model\.model\.")
_WITHIN = re.compile(r"\.(?:base_layer|modules_to_save|original_module)(?=\.)")
"""Parts of names that peft inserts where it wraps a weight's layer in one of its own."""
_COMPARED = frozenset(
    {
        "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR",
        "LORA", "MISS", "OFT", "PEANUT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA",
        "VBLORA", "VERA", "WAVEFT",
    }
)  # fmt: skip
"""Methods of peft whose update of a weight follows from the weight and the adapter's own values (``tests/support/models/merge_forms.py``).
Others (OSF, PSOFT, FROD) take a part of the base when their layers are made, before it has its values here."""
_TOKENS = ".token_adapter"
"""What peft adds to an embedding's name for its trained tokens."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin an adapter that move a part of the base's weights into it."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module with an update.

    Attributes:
        name: Its name in the model.
        tied: Name of the weight with which it shares its own; empty if there is none.
        stored: Name of its weight in the base's files, if that is another; otherwise empty.
        turned: Whether its weight is stored (in, out).
    """

    name: str
    tied: str
    stored: str
    turned: bool
    layer: Any

    @property
    def weight(self) -> str:
        """Return the name of its weight."""
        return f"{self.name}.weight"

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return W + Δ in float32 for a base's weight W; both as PyTorch stores them.

        Raises:
            NotUnderstoodError: peft does not merge this layer alone.
        """
        layer, base = self.layer, self.layer.get_base_layer()
        kept = {name: getattr(base, name, None) for name in ("weight", "bias")}
        base.weight = torch.nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        if kept["bias"] is not None:
            base.bias = torch.nn.Parameter(torch.zeros(kept["bias"].shape), requires_grad=False)
        try:
            layer.merge()
            merged: Tensor = base.weight.data
        except (RuntimeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
            raise NotUnderstoodError(f"peft does not merge it alone ({type(error).__name__}: {error})") from error
        finally:
            layer.merged_adapters.clear()
            base.weight, base.bias = kept["weight"], kept["bias"]
        if merged.is_meta or merged.shape != weight.shape:
            raise NotUnderstoodError("the adapter has no values for it")
        return merged


Adapted = AdaptedModule | AdaptedMatrix
"""What an adapter updates, and is compared."""


def find_name(names: Names, module: Adapted) -> str | None:
    """Return the name of a module's weight among others: the model's, the base's files', or that of a weight it is tied to."""
    candidates = (module.weight, module.stored, module.tied)
    return next((name for one in candidates if one and (name := names.find(one))), None)


def adapted_modules(base: ModelFolder, adapter: Path) -> tuple[list[Adapted], dict[str, str]]:
    """Return the modules that the adapter updates, in the model's order, and those that are not compared, with the reason.

    Raises:
        Unusable: Base and adapter do not fit together.
        NotUnderstoodError: The adapter changes the model in a way that is not compared.
    """
    settings = read_adapter_config(adapter)
    if settings.get("layer_replication"):
        raise NotUnderstoodError("the adapter repeats layers of the base (layer_replication)")
    kind = settings.get("peft_type")
    if kind not in _COMPARED or settings.get("kasa_config") is not None:
        raise NotUnderstoodError(
            f"updates of the method {'KASA' if kind in _COMPARED else kind} are not computed layer by layer"
        )
    began = settings.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGE_THE_BASE):
        raise NotUnderstoodError(
            f"the training began with a change of the base's weights (init_lora_weights is {began})"
        )
    plain = _build_without_values(base, adapter)
    shapes = {name: info.shape for name, info in base.tensors.items()}
    loaded = conversions(plain, shapes)
    model, joined = add_adapter(plain, base, adapter)
    ties = dict(getattr(model.get_base_model(), "all_tied_weights_keys", None) or {})
    modules: list[Adapted] = [*(joined_matrices(joined) if joined else ())]
    trained = (place.partition(".lora_")[0] for place in head_keys(base, adapter).values())
    left_out = dict.fromkeys(trained, "it is in the multi-token head, which transformers does not load with the model")
    for path, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        name = _PREFIX.sub("", path)
        if hasattr(layer, "parameter_name"):
            name = f"{unwrap_module(name)}.{layer.parameter_name}"
            matrices = list(adapted_parameter(name, layer, loaded, shapes))
            modules += matrices
            why = "" if matrices else "the base stores the parameter in another form"
        elif not (why := _not_compared(name, layer)):
            tied, stored = ties.get(f"{name}.weight", ""), loaded.renamed.get(f"{name}.weight", "")
            modules.append(AdaptedModule(name, tied, stored, isinstance(layer.get_base_layer(), Conv1D), layer))
        if why:
            left_out[name.removesuffix(_TOKENS)] = why
    shared = {each.tied for each in modules if each.tied} & {each.weight for each in modules}
    for each in [each for each in modules if each.weight in shared or each.tied in shared]:
        left_out[each.name] = "it shares its weight with another adapted module"
        modules.remove(each)
    return modules, left_out


def _not_compared(name: str, layer: Any) -> str:
    """Return why the update of a layer is not compared; empty if it is."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    if not isinstance(weight, Tensor):
        return "the update is not of the weight of one layer"
    if name.endswith(_TOKENS):
        return "new tokens replace rows of it"
    return "" if weight.dim() == 2 else "its weight is no matrix"


def _build_without_values(base: ModelFolder, adapter: Path) -> Any:
    """Build the base's model with one zero for all values of a weight, except for the weights that the adapter brings whole.

    On ``meta``, peft would move the adapter there too, and lose it.
    """
    trained = trained_model(base, adapter)
    config = trained.config if trained else base.config
    family = config.family
    if family is None:
        raise NotUnderstoodError("the model's family is unknown")
    known = configuration_of(config) if trained else AutoConfig.from_pretrained(base.path, trust_remote_code=False)
    with torch.device("meta"):
        model = auto_model(family, config).from_config(known, dtype=torch.float32, trust_remote_code=False)
    brought = brought_names(adapter)
    made: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" in brought
            if id(parameter) not in made:
                values = torch.zeros(parameter.shape) if whole else torch.zeros(()).expand(parameter.shape)
                made[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[id(parameter)])
    return model


def brought_names(adapter: Path) -> frozenset[str]:
    """Return the names of an adapter's tensors in the model; those of weights that it brings whole are the model's own."""
    return frozenset(
        _WITHIN.sub("", _PREFIX.sub("", name)) for name in read_safetensors(adapter / ADAPTER_WEIGHTS).tensors
    )


@dataclass(frozen=True, slots=True)
class Original:
    """A module's whole weight in the base, and with its update.

    Attributes:
        before: W, in the type in which it is stored. (N, K)
        after: W + Δ. float32 (N, K)
    """

    before: Tensor
    after: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return tuple(self.before.shape)

    @property
    def rounds(self) -> bool:
        """Return whether the type of W cannot hold W + Δ."""
        return self.before.dtype not in (torch.float32, torch.float64)

    def round_to_type(self, both: Both) -> Tensor:
        """Round W + Δ to the type of W, float32 (R, K)."""
        return both.after.to(self.before.dtype).float()

    def rows(self, rows: slice) -> Both:
        """Return some rows."""
        return Both(self.before[rows].float().contiguous(), self.after[rows].contiguous())


class BaseWeights:
    """The base's weights, by the names that the model gives them."""

    def __init__(self, base: ModelFolder) -> None:
        self._stored = Checkpoint(base.tensors)
        self._names = Names(self._stored.names)

    def weight(self, module: Adapted) -> Tensor:
        """Return W as (N, K), in its stored type.

        Raises:
            NotUnderstoodError: The base stores it under another name or in another form.
        """
        name = find_name(self._names, module)
        if name is None:
            raise NotUnderstoodError("the base has no weight of this name")
        weight = self._stored.weight(name, turned=module.turned)
        return weight.values if isinstance(weight, Dense) else weight.take(slice(None)).stored

    def original(self, module: Adapted) -> Original:
        """Return a module's weight without and with its update.

        Raises:
            NotUnderstoodError: As :meth:`weight`.
        """
        before = self.weight(module)
        merged = module.merge(before.T if module.turned else before)
        return Original(before, merged.T if module.turned else merged)

    def non_finite(self) -> dict[str, int]:
        """Return the base's tensors that hold NaN or infinity, with how many."""
        return self._stored.non_finite()

    def rows(self, weight: str) -> int:
        """Return the number of output features of a linear layer's weight; 0 if the base has none of this name."""
        name = self._names.find(weight)
        return self._stored.weight(name, turned=False).shape[0] if name else 0
