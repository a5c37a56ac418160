"""Names of the inputs, outputs and axes of graphs, and the size up to which constants stay in a graph's file."""

from __future__ import annotations

import re

BATCH, SEQUENCE, PAST, TOTAL, SOURCE = (
    "batch",
    "sequence",
    "past_sequence",
    "total_sequence",
    "encoder_sequence",
)
"""Names of the axes that vary. total_sequence is past_sequence + sequence."""
SAMPLES, FRAMES = "samples", "frames"
"""Names of axes of raw sound, and of what an encoder makes of it."""

IDS, MASK, POSITIONS, TYPES = "input_ids", "attention_mask", "position_ids", "token_type_ids"
FEATURES, SOURCE_MASK, LOGITS = "input_features", "encoder_attention_mask", "logits"
VALUES = "input_values"
"""Samples of sound."""
ENCODED = "encoder_hidden_states"
HIDDEN, BRANCH = "last_hidden_state", "use_cache_branch"
CACHE, PRESENT = "past_key_values.", "present."
"""Prefixes of the cache's inputs and of its outputs."""
VISION_ENCODER, EMBEDDING = "vision_encoder", "embedding"
"""Names of the graphs that a model which takes images has beside its decoder."""
EMBEDS, IMAGE_FEATURES, PER_LAYER = "inputs_embeds", "image_features", "per_layer_inputs"
DEEPSTACK, DEEPSTACK_EMBEDS = "deepstack_features.{}", "deepstack_embeds.{}"
"""What single layers add to the tokens of a picture: as the encoder makes it, and in the places of those tokens."""
IMAGES, IMAGE_TOKENS = "images", "image_tokens"
"""Names of axes: pictures, and the tokens of all of them."""
INLINE_BYTES = 1024
"""Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small."""

_NAMED_FOR_JAVASCRIPT = re.compile(r"(past|present)_(conv|recurrent|ssm)\.(\d+)")
"""Matches transformers.js's names of states."""


def usual_name(name: str) -> str:
    """Return the name that an input or output has in Slipway's own graphs; most have it already."""
    part = _NAMED_FOR_JAVASCRIPT.fullmatch(name)
    if part is None:
        return name
    prefix = {"past": "past_key_values", "present": "present"}[part[1]]
    return f"{prefix}.{part[3]}.{'conv' if part[2] == 'conv' else 'recurrent'}_state"
