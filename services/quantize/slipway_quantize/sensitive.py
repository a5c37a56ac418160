"""Linear layers that keep their type at every level below 16 bits unless ``keep`` says otherwise, with the reason and its source.

Short convolutions and the recurrences' own parameters (``conv1d``, ``A_log``, ``dt_bias``, ``D``) are no products, so no level rounds them.
Mamba's ``in_proj`` is rounded whole: its last rows make the time step, but it is one matrix, vLLM has one scheme for it, and llm-compressor's
recipes for Granite 4 and Nemotron-H round it too. Name ``mamba.in_proj`` in ``keep`` for a model that suffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slipway.model.weights.routers import ROUTERS
from slipway_quantize.levels import is_named

ALLOWED = "!"
"""Before a name in ``keep``: the layer is rounded, although this table keeps it."""


@dataclass(frozen=True, slots=True)
class Sensitive:
    """Layers that are kept, by the ends of their names.

    Attributes:
        ends: Ends of names, of whole parts.
        why: Why they keep their type, for ``quantization.json``.
        source: Who found so.
    """

    ends: tuple[str, ...]
    why: str
    source: str


SENSITIVE = (
    Sensitive(
        ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"),
        "it sets how a recurrent state decays and is written, whose errors add up over the text",
        "AutoRound keeps these at 16 bits in its Qwen3.5 checkpoints (extra_config); llm-compressor's recipes ignore re:.*linear_attn.*; "
        "onnxruntime-genai (pull request 2100) gives linear attention 8 bits where the rest has 4",
    ),
    Sensitive(
        ("shared_expert_gate",),
        "it is one row that scales what the shared expert gives to each token",
        "llm-compressor's recipes for Qwen ignore re:.*shared_expert_gate$; vLLM makes it without a scheme",
    ),
    Sensitive(
        ROUTERS,
        "it chooses the experts of each token",
        "llm-compressor's recipes ignore re:.*mlp.gate$, re:.*router and their like; vLLM's routers take no packed weights",
    ),
)


_OTHER_PARTS = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "audio_model", "image_newline"),
        *("multi_modal_projector", "embed_vision", "embed_audio", "connector", "aligner"),
    }
)
"""Parts of names of what turns images and sound into tokens. Source: llm-compressor's recipes for such models ignore re:.*visual.*, re:.*vision_tower.* and
re:.*multi_modal_projector.*; AutoRound rounds language models alone unless it is told otherwise."""
_NO_TEXT = "it reads images or sound, and only the text part of such a model is rounded"


def sensitive_reason(module: str, keep: Collection[str] = ()) -> str:
    """Return why a linear layer keeps its type by default; empty if it does not, or if ``keep`` has its name behind ``!``.

    Args:
        module: The layer's name, whole or without the prefix of the model's class.
        keep: The parameter of the stage.
    """
    named = f".{module}"
    why = next((each.why for each in SENSITIVE if any(named.endswith(f".{end}") for end in each.ends)), "")
    why = why or (_NO_TEXT if _OTHER_PARTS & set(module.split(".")) else "")
    return "" if is_named(module, allowed_names(keep)) else why


def kept_names(keep: Iterable[str]) -> tuple[str, ...]:
    """Return the names of layers in ``keep`` that keep their type."""
    return tuple(name for name in keep if not name.startswith(ALLOWED))


def allowed_names(keep: Iterable[str]) -> tuple[str, ...]:
    """Return the names of layers in ``keep`` that are rounded, although they are kept by default."""
    return tuple(name.removeprefix(ALLOWED) for name in keep if name.startswith(ALLOWED))
