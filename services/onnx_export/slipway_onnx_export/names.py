"""Names of the inputs, outputs and axes of graphs, and the size up to which constants stay in a graph's file."""

from __future__ import annotations

BATCH, SEQUENCE, PAST, TOTAL, SOURCE = (
    "batch",
    "sequence",
    "past_sequence",
    "total_sequence",
    "encoder_sequence",
)
"""Names of the axes that vary. total_sequence is past_sequence + sequence."""

IDS, MASK, POSITIONS, TYPES = "input_ids", "attention_mask", "position_ids", "token_type_ids"
FEATURES, SOURCE_MASK, LOGITS = "input_features", "encoder_attention_mask", "logits"
ENCODED = "encoder_hidden_states"
HIDDEN, BRANCH = "last_hidden_state", "use_cache_branch"
CACHE, PRESENT = "past_key_values.", "present."
"""Prefixes of the cache's inputs and of its outputs."""
INLINE_BYTES = 1024
"""Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small."""
