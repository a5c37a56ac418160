"""List the architectures that can be written, as llama.cpp computes them. This package is light: a client uses it before anything runs.

The facts are those of llama.cpp's converter (``conversion/``) and graphs (``src/models/``). A graph assumes some settings for which the
file has no key. A model must have these values, because llama.cpp would compute another value wrong without a message.

An entry says all of an architecture, with the defaults of its class, and stands in the module for the layers of the class. Recurrent or
convolutional layers: a module of ``recurrent``. Attention in all layers: ``latent`` with latent keys and values; with experts ``routed`` if
the router adds a bias to its scores, otherwise ``mixtures``; without experts ``layer_norm`` if norms subtract the mean, otherwise ``dense``.
Three modules are by family or task: ``gemma``, ``vision`` (text parts without a class of their own) and ``encoders`` (models that read
whole texts).
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import settings_of
from slipway.texts import quoted
from slipway_gguf.architectures.dense import DENSE
from slipway_gguf.architectures.encoders import ENCODERS
from slipway_gguf.architectures.entry import Architecture
from slipway_gguf.architectures.gemma import GEMMA
from slipway_gguf.architectures.latent import LATENT
from slipway_gguf.architectures.layer_norm import LAYER_NORM
from slipway_gguf.architectures.mixtures import MIXTURES
from slipway_gguf.architectures.recurrent.convolution import CONVOLUTION
from slipway_gguf.architectures.recurrent.delta_net import DELTA_NET
from slipway_gguf.architectures.recurrent.mamba import MAMBA
from slipway_gguf.architectures.recurrent.mamba_2 import MAMBA_2
from slipway_gguf.architectures.recurrent.nemotron_h import NEMOTRON_H
from slipway_gguf.architectures.refusals import describe_assumption
from slipway_gguf.architectures.routed import ROUTED_MIXTURES
from slipway_gguf.architectures.vision import VISION

ARCHITECTURES: tuple[Architecture, ...] = (
    *DENSE,
    *GEMMA,
    *LAYER_NORM,
    *MIXTURES,
    *ROUTED_MIXTURES,
    *LATENT,
    *DELTA_NET,
    *CONVOLUTION,
    *MAMBA_2,
    *NEMOTRON_H,
    *MAMBA,
    *VISION,
    *ENCODERS,
)
"""In the order in which they are named to users."""

KNOWN = ", ".join(dict.fromkeys(each.class_name for each in ARCHITECTURES))


COMPUTED_OTHERWISE: Mapping[str, str] = {
    "BitNetForCausalLM": "llama.cpp computes it with SiLU, where the released models have the square of ReLU and round their weights to three "
    "values: log probabilities of a tiny model differ by 1.5",
    "PhimoeForCausalLM": "llama.cpp takes no mean off in its norms, and shares a weight of 1 between the two experts of a token, which both have "
    "nearly 1 in the model: log probabilities of a tiny model differ by 1.4",
}
"""Why no file is written of classes for which llama.cpp has a graph, with what was measured."""


def architecture_of(config: ModelConfig) -> Architecture | None:
    """Return the architecture for a model's ``config.json``; None if no GGUF file can be written for it."""
    of_class = (each for each in ARCHITECTURES if each.class_name == config.class_name)
    return next((each for each in of_class if each.when is None or each.when(settings_of(config, each.kind))), None)


def text_part(config: ModelConfig) -> ModelConfig | None:
    """Return the configuration of a model's text part, of which a file is written; None if the model takes text alone."""
    types = ("", str(config.text.get("model_type")))
    found = next((each for each in ARCHITECTURES if each.wholes.get(config.class_name) in types), None)
    if found is None:
        return None
    # The whole model's setting decides whether its head is tied.
    shared = {key: config[key] for key in ("tie_word_embeddings", "vision_config") if config.get(key) is not None}
    return ModelConfig({**config.text, **shared, "architectures": [found.class_name]})


def refusal_reason(config: ModelConfig) -> str:
    """Return why no GGUF file can be written for a model's ``config.json``; an empty text if one can."""
    part = text_part(config) or config
    architecture = architecture_of(part)
    if architecture is None and part.class_name in COMPUTED_OTHERWISE:
        return f"the model is {config.description}, and {COMPUTED_OTHERWISE[part.class_name]}"
    if architecture is None:
        return f"the model is {config.description}, and GGUF files are written of {KNOWN}"
    settings = settings_of(part, architecture.kind)
    for key, values in architecture.assumes.items():
        value = settings.get(key)
        if value is not None and value not in values:
            return describe_assumption(architecture, key, value, " or ".join(map(quoted, values)) or "no such setting")
    return architecture.refuses(architecture, settings) if architecture.refuses else ""


def adapter_refusal(config: ModelConfig) -> str:
    """Return why no adapter's file can be written for a base with this ``config.json``; an empty text if one can."""
    reason, architecture = refusal_reason(config), architecture_of(text_part(config) or config)
    if reason or architecture is None or architecture.reading is None:
        return reason
    return f"the model is {config.description}, and adapters are written as GGUF for models that predict tokens only"
