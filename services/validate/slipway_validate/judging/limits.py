"""Limit the distance of an output from the reference, by the precision of its stored weights.

Origin of the figures: rounding a weight to n levels adds noise of relative size about 2^-24 (float32), 2^-12 (float16), 2^-9
(bfloat16), 1/127 of a row's or group's largest weight (int8) and 1/7 of it (int4); KL grows with the square of the noise.
Measured on a small trained Qwen3 whose adapter moves the base by 0.32 nats per token: bfloat16 mean KL 1.2e-6 and an error of
the adapter strength of 2e-4, float16 2e-8 and 5e-7, int8 6e-6 and 2e-4, int4 1.4e-3 and 4e-3 (round to nearest, group 32).
Each limit leaves room for deeper models and is far below the figures of a lost adapter (0.32), of a scale wrong by a tenth
(3.2e-3, strength wrong by 5e-2) and of an ignored mask. Top-1 agreement also falls if the model itself is undecided:
Qwen3-0.6B's shape with random weights, whose distributions are nearly flat, keeps 97.7 % in bfloat16; so KL and strength judge
16-bit weights. All logits are compared in float32 if the runtime allows it, so that the limits judge the stored weights and
the graph, and not the arithmetic of this machine.

Other families were measured on small models with random weights (``tests/support/models/judged_families.py``: Marian, BART, T5, Whisper, BERT
with each head, RoBERTa, Qwen3 with classes; 6 windows of 48 tokens, adapters that move the base by 2e-3 to 0.3 nats), merged by peft,
with linear weights rounded to nearest in groups of 32: mean KL at most 4e-7 in float16, 4e-5 in bfloat16 and 1.6e-4 in int8; relative
error of embeddings and scores 6e-4, 5e-3 and 1e-2, cosine distance of embeddings 9e-8, 5e-6 and 5e-5. What the stages themselves merge
and quantize (``tests/support/models/family_models.py``, 18 models) lies below that. The same rows apply. A lost
adapter has a relative error of 0.5, and one a tenth too weak 0.04. With few values noise averages out less: the strength of an
adapter was wrong by up to 2e-3 in float16, 9e-3 in bfloat16 and 2e-2 in int8, and of two equally likely tokens or classes either
may come first; see ``ALONG_EFFECT`` and ``slipway_validate.numerics.NEAR_TIE``.

Levels of compressed-tensors were measured on the trained sample, 64 held-out windows, against the merged model: mean KL of w8a8 (int8 weights per
channel, int8 activations per token) 1e-4, fp8 (E4M3 has 4 bits of precision, 2^-4 between two numbers, for weights and activations) 9.0e-4 and
with static ranges of activations 9.2e-4, nvfp4 4.0e-3, mxfp4 8.0e-3 (its scales are powers of two), int3 1.6e-2; the strength of the adapter was
wrong by 4e-4, 1e-3, 1e-3, 2e-3, 1.4e-2 and 4.8e-2. The limits are 4 to 20 times the KL: int4's own ratio is 6. Text that is unlike the calibration text
clips static ranges, so fp8_static may be further off than fp8. At 3 bits the scales, fitted by least squares, shrink weights so much that a scale
of the adapter wrong by a tenth is no longer seen in int3 alone; every other output of the same merge shows it.

ONNX's levels with integers for activations, measured likewise on 32 windows: mean KL of int8_static 1.7e-4 and of int8_dynamic 3.5e-4, of a
trained classifier (BERT, 2 layers, 6 classes) 2.3e-5 and 2.7e-5; the strength of the adapter was wrong by 2e-4. One range serves all values
that a product reads, and outliers grow with the depth of a model, so the limits are 24 and 14 times the KL of the sample.

ExecuTorch's 8da4w (4-bit weights in groups of 32, 8-bit activations per token, 8-bit embeddings), on the sample's 10 held-out windows: mean KL 3.8e-3,
top-1 agreement 0.93. Its limits are hardly wider than int4's: 6 times the KL.

The last two columns judge each adapted module (``slipway.validation.survival``), beyond four standard errors of the rounding. Measured on
the trained sample (float32, 28 modules), worst module: strength wrong by 1e-5 in float16, 2e-4 in int8, 8e-3 in int4 (its scales, fitted by
least squares, are a little small); weights off by 2e-4, 5e-3 and 8e-2. A lost update has a strength of 0, another layer's weight an error
of 1.4. 16-bit types lose updates that are smaller than their steps: of an update of 0.3 % of the weights bfloat16 holds 92 %, of 0.1 % 52 %;
what the base's own type cannot hold is not held against an output.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway.validation.limit_overrides import LimitOverrides, Limits
from slipway.validation.speed import Engine

# fmt: off
_ROWS: tuple[tuple[str, float | None, float, float, float, float, float, float, float, float, float], ...] = (
    # level,       max_abs_diff, mean_kl, top1, perplexity, case_mean_kl, adapter_strength_error, cosine, relative, module_strength, module_weight
    ("float32",    1e-4,         1e-6,    0.998, 1.0005,    1e-6,         1e-3,                   1e-8,   1e-4,     1e-2,            1e-5),
    ("float16",    None,         5e-5,    0.98,  1.002,     2e-4,         2e-3,                   1e-5,   5e-3,     1e-1,            2e-3),
    ("bfloat16",   None,         2e-4,    0.97,  1.005,     8e-4,         5e-3,                   2e-4,   2e-2,     2e-1,            1e-2),
    ("int8",       None,         1e-3,    0.98,  1.01,      4e-3,         1e-2,                   1e-3,   5e-2,     1e-1,            5e-2),
    ("w8a8",       None,         2e-3,    0.97,  1.015,     8e-3,         1e-2,                   2e-3,   7e-2,     1e-1,            7e-2),
    ("int8_static", None,        4e-3,    0.96,  1.018,     1.4e-2,       2e-2,                   4e-3,   1e-1,     1e-1,            7e-2),
    ("int8_dynamic", None,       5e-3,    0.95,  1.02,      1.7e-2,       2e-2,                   5e-3,   1e-1,     1e-1,            7e-2),
    ("fp8",        None,         6e-3,    0.94,  1.03,      2e-2,         2e-2,                   1e-2,   1.5e-1,   1.5e-1,          2.5e-1),
    ("fp8_static", None,         8e-3,    0.93,  1.035,     3e-2,         2e-2,                   1e-2,   1.5e-1,   1.5e-1,          2.5e-1),
    ("int4",       None,         2e-2,    0.90,  1.05,      6e-2,         3e-2,                   2e-2,   2e-1,     2e-1,            8e-1),
    ("8da4w",      None,         2.2e-2,  0.89,  1.055,     7e-2,         3e-2,                   2e-2,   2e-1,     2e-1,            8e-1),
    ("nvfp4",      None,         2.5e-2,  0.88,  1.06,      8e-2,         3e-2,                   2.5e-2, 2.2e-1,   2e-1,            8e-1),
    ("mxfp4",      None,         4e-2,    0.86,  1.08,      1.2e-1,       4e-2,                   4e-2,   2.8e-1,   2e-1,            8e-1),
    ("int3",       None,         6e-2,    0.83,  1.12,      1.8e-1,       7e-2,                   7e-2,   4e-1,     2.5e-1,          8e-1),
)
# fmt: on
QUALITY_LOSS = {
    "float32": 0.0,
    "float16": 0.005,
    "bfloat16": 0.01,
    "int8": 0.02,
    "w8a8": 0.02,
    "fp8": 0.03,
    "fp8_static": 0.03,
    "int8_dynamic": 0.02,
    "int8_static": 0.02,
    "int4": 0.05,
    "8da4w": 0.05,
    "nvfp4": 0.05,
    "mxfp4": 0.07,
    "int3": 0.1,
}
"""Loss of a score of answers, as a share; one answer more may always change."""
LIMITS: Mapping[str, Limits] = {
    level: Limits(
        level=level,
        max_abs_diff=max_abs_diff,
        mean_kl=mean_kl,
        top1_agreement=top1,
        perplexity_ratio=perplexity,
        case_mean_kl=case_kl,
        adapter_strength_error=strength,
        cosine_distance=cosine,
        relative_error=relative,
        module_strength_error=module_strength,
        module_weight_error=module_weight,
        quality_loss=QUALITY_LOSS[level],
    )
    for level, max_abs_diff, mean_kl, top1, perplexity, case_kl, strength, cosine, relative, module_strength, module_weight in _ROWS
}
"""Limits from tightest to loosest; ``max_abs_diff`` is a share of the reference's logit scale."""

MERGED_FLOAT32_MAX_ABS_DIFF = 1e-5
"""Limit of the merged model in float32: PyTorch computes both, only the order of additions differs."""
NATIVE_MEAN_KL = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Mean KL that computing in the native data type instead of float32 may add to the level's own limit."""
NATIVE_RELATIVE_ERROR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative error that it may add for values that are not logits."""
CASE_FACTOR = 2.0
"""Factor for the relative error of a case, because it has few positions; its KL may be larger by the square of this."""
ALONG_EFFECT = 0.25
"""If few values are compared, the share of the largest allowed noise that may lie along the adapter's effect (measured: up to 0.2)."""
LIKELY = 2.0
"""Of noise in n values, about the share 1 / sqrt(n) lies along any direction; this many times it is still likely."""
NOISE_FACTOR = 8.0
"""Deep models round more: a float32 limit is never below this many times the reference's own arithmetic noise …"""
MAX_NOISE_SHARE = 1e-3
"""… as long as that stays below this share of the logit scale, beyond which noise is no excuse."""


def limits_by_level(overrides: Mapping[str, LimitOverrides]) -> dict[str, Limits]:
    """Return the limits by level with the overrides applied."""
    return {
        level: limits.model_copy(update=overrides[level].model_dump(exclude_none=True))
        if level in overrides
        else limits
        for level, limits in LIMITS.items()
    }


def level_of(stored_dtype: str) -> str:
    """Return the row of the table for a stored data type; an unknown one is judged as float32, the tightest."""
    return stored_dtype if stored_dtype in LIMITS else "float32"


def own_level(engine: Engine | None) -> str:
    """Return the row of the table for an output's own weights and engine.

    TensorRT multiplies float32 in TF32, whose mantissa has 10 bits as in float16.
    """
    level = level_of(engine.stored_dtype if engine else "")
    return coarser(level, "float16") if engine is not None and engine.runtime == "tensorrt" else level


def coarser(first: str, second: str) -> str:
    """Return the level that rounds more."""
    order = list(LIMITS)
    return max(first, second, key=order.index)


def absolute_limit(limits: Limits, *, logit_scale: float, noise: float | None) -> float | None:
    """Return the largest allowed difference of a logit; None if the level does not limit it."""
    if limits.max_abs_diff is None:
        return None
    floor = min(NOISE_FACTOR * (noise or 0.0), MAX_NOISE_SHARE * logit_scale)
    return max(limits.max_abs_diff * logit_scale, floor)
