"""What is known of the linear layers of a transformers folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import FAMILIES, Family
from slipway_quantize.levels import is_named
from slipway_quantize.params import unknown_family_reason


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear layer's weight.

    Attributes:
        module: Name of the module in the loaded model.
        source: Tensor of the checkpoint that holds the weight; that of another module if the two are tied.
        tied: Whether it is that of another module.
    """

    module: str
    source: str
    tied: bool = False

    @property
    def stored(self) -> str:
        """Return the module's name in the checkpoint, which transformers may change while it loads."""
        return self.module if self.tied else self.source.removesuffix(".weight")

    def is_among(self, names: Collection[str]) -> bool:
        """Return whether it is among names of layers, which may be transformers' or the checkpoint's."""
        return is_named(self.module, names) or is_named(self.stored, names)


@dataclass(frozen=True, slots=True)
class Structure:
    """How a model uses its tensors.

    Attributes:
        model_type: Its type in transformers.
        linear: Linear layers to quantize whose weight is in the checkpoint, in the model's order.
        kept: Linear layers that are not quantized: heads, and in most families those tied to an embedding.
        head: The layer that makes a language model's results, of the shape of its embedding; empty if there is none.
        unpacked: Whether transformers must unpack the weights while it loads them: compressed-tensors unpacks at the model's first
            run and supports only ``Linear``; T5 reads the type of a weight before that; generating runs an encoder by itself; and
            sentence-transformers calls ``forward``, which is no run that compressed-tensors sees.
        dtype: Data type in which the model is loaded, by its name in a safetensors header; None if that is not known.
        layers: Number of layers of its text part; None if that is not known.
        experts: The matrices of a mixture's experts that are tensors of their own; transformers stacks them while it loads.
        routers: Modules of the checkpoint that choose experts and are no ``Linear`` in transformers, though they are in vLLM.
        stacked: Whether experts are stored as stacks, which no level here reads.
        renamed: Stored names of tensors that transformers gives other names, by these.
    """

    model_type: str
    linear: tuple[LinearWeight, ...]
    kept: tuple[str, ...]
    head: str
    unpacked: bool
    dtype: str | None
    layers: int | None
    experts: tuple[LinearWeight, ...] = ()
    routers: tuple[str, ...] = ()
    stacked: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


def require_family(config: ModelConfig) -> Family:
    """Return the family of a model.

    Raises:
        QuantizationError: ``FAMILY_UNSUPPORTED`` if the family is unknown.
    """
    if config.family is None:
        raise QuantizationError(
            unknown_family_reason(config),
            reason="FAMILY_UNSUPPORTED",
            remedy=f"use level fp16 or bf16; integer levels support: {', '.join(one.name for one in FAMILIES)}",
            about={"model_type": config.get("model_type"), "architectures": config.get("architectures")},
        )
    return config.family
