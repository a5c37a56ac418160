"""Explain why an output failed, and say what to change."""

from __future__ import annotations

from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputValidation
from slipway_validate.judging import survival, texts
from slipway_validate.judging.measures import distance_of

SHAPE_CAUSES = {
    "left_padded": (
        "it gives other logits if the batch is padded on the left: it ignores attention_mask or position_ids, "
        "or is specialised to the batch size of its export"
    ),
    "single_token": "it gives other logits for one token alone: it is specialised to the length of its export",
    "decode": "tokens decoded one at a time get other logits than in one pass: its KV cache or its positions are wrong",
    "decode_left_padded": "decoding a padded batch gives other logits: mask, positions or KV cache are wrong together",
    "right_padded": (
        "it gives other results if the batch is padded on the right: it ignores attention_mask, has another pad_token_id, or is "
        "specialised to the batch size of its export"
    ),
    "batch": "it gives other results for several inputs at once: it is specialised to the batch size of its export",
    "decode_right_padded": "decoding a padded batch gives other logits: mask, positions or KV cache are wrong together",
    "decode_batch": "decoding several inputs at once gives other logits: its KV cache or its positions are wrong",
    "chunked": "several tokens at once after a KV cache get other logits: its causal mask ignores the cached tokens",
    "continuation": "long texts go wrong where short ones are right: its KV cache or its positions fail after the first tokens",
    "answers": "its answers to the test inputs are worse than the reference's",
    "native_dtype": "the data type in which it is served has too little range or precision for it",
}
SHOWN_CHECKS = 4
LIKELY_CRASH = {
    "STAGE_KILLED": "give the stage more memory, or validate fewer formats on this machine",
    "OUT_OF_MEMORY": "give the stage more memory, or validate fewer formats on this machine",
    "STAGE_TIMEOUT": "raise output_timeout_seconds, or lower test_samples and sequence_length",
    "STAGE_CRASHED": "check that the runtime supports this processor, and update it; then export the format again",
}


def explain_failure(reason: str, message: str) -> tuple[str, str]:
    """Return explanation and remedy for an output that could not be loaded or run."""
    remedy = LIKELY_CRASH.get(
        reason, "export this format again; if it fails again, try another engine or leave the format out"
    )
    return f"it could not be loaded or run: {message}", remedy


def explain_checks(output: OutputValidation, *, merged: OutputValidation | None, where: str = "") -> tuple[str, str]:
    """Return explanation and remedy for an output whose checks failed; both empty if none failed.

    Args:
        output: The output with its figures and checks.
        merged: The merged model's result, if it is an output too.
        where: Place of the first NaN or infinity.
    """
    failed = output.failed_checks
    if not failed:
        return "", ""
    of_modules, remedy = survival.explain(output.survival) if output.survival else ("", "")
    causes, remedies = [of_modules], [remedy]
    if any(check.name in texts.CHECKS for check in failed) and output.texts:
        of_texts, remedy = texts.explain(output.texts)
        causes, remedies = [of_texts, *causes], [remedy, *remedies]
    others = tuple(check for check in failed if check.name not in (*survival.CHECKS, *texts.CHECKS))
    # Of weights in the wrong place each is named; results would only allow a guess.
    exchanged = output.survival is not None and any(each.exchanged for each in output.survival.faulty)
    if others and not exchanged:
        cause, remedy = _cause(output, others, merged=merged, where=where)
        causes, remedies = [cause, *causes], [remedy, *remedies]
    cause, remedy = "; ".join(filter(None, causes)), next(filter(None, remedies), "")
    shown = "; ".join(str(check) for check in failed[:SHOWN_CHECKS])
    more = f"; and {len(failed) - SHOWN_CHECKS} more" if len(failed) > SHOWN_CHECKS else ""
    return f"{cause} ({shown}{more})", remedy


def _cause(
    output: OutputValidation, failed: tuple[Check, ...], *, merged: OutputValidation | None, where: str
) -> tuple[str, str]:
    names = {check.name for check in failed}
    if "non_finite_logits" in names:
        return (
            f"its results contain NaN or infinity, first in {where or 'its output'}",
            _remedy_non_finite(output),
        )
    if _is_base(output):
        return (
            "it behaves like the base model: the adapter is missing from it",
            "merge again, and export from the merged model; check that base model and checkpoint are those of the training",
        )
    shape = next((name for check in failed for name in [check.name.partition(".")[0]] if name in SHAPE_CAUSES), "")
    if shape and all("." in check.name for check in failed):
        return SHAPE_CAUSES[shape], _remedy_shape(output, shape)
    if merged is not None and merged.failed_checks and _agrees_with_merged(output):
        return (
            "it agrees with the merged model, which itself differs from base + adapter",
            "the merge is wrong, not this format: see the explanation of pytorch",
        )
    if "adapter_strength_error" in names and _strength_explains(output):
        strength = f"{output.adapter_strength:.3g} times the adapter's effect instead of 1"
        return (
            f"it has {strength}: the scale is wrong (lora_alpha, r, rsLoRA), or some of the adapter's tensors are missing",
            "merge again; check lora_alpha, r and the patterns in adapter_config.json",
        )
    return _distance_cause(output)


def _is_base(output: OutputValidation) -> bool:
    """Return whether the output is closer to the base without adapter than to the reference."""
    to_reference, to_base = distance_of(output.to_reference), distance_of(output.to_base)
    return to_reference is not None and to_base is not None and to_base < to_reference


def _strength_explains(output: OutputValidation) -> bool:
    """Return whether the adapter's wrong strength, rather than noise, explains the distance to the reference.

    A scale wrong by s moves the strength by about s / 2, and the distance by about s² of the adapter's effect.
    """
    strength, to_base, to_reference = output.adapter_strength, output.to_base, output.to_reference
    if strength is None or to_base is None or to_reference is None:
        return False
    expected = (2 * (strength - 1)) ** 2 * (distance_of(to_base) or 0.0)
    return (distance_of(to_reference) or 0.0) < 4 * expected


def _agrees_with_merged(output: OutputValidation) -> bool:
    against = [check for check in output.checks if check.against == "merged"]
    return bool(against) and all(check.passed for check in against)


_HALF = (
    "it is further from the reference than 16-bit rounding explains",
    "use the other 16-bit type or none; if the unquantized format fails too, examine that first",
)
_FLOATS_OF_4_BITS = "rounding to floats of 4 bits moves this model too far"
_BOTH_IN_8_BITS = "rounding weights and activations to 8 bits moves this model too far"
_OUTLIERS = "its activations have outliers, beside which the integers of one range are too coarse"
_ROUNDING = {
    "fp16": _HALF,
    "bf16": _HALF,
    "int8": (
        "it is further from the reference than rounding to 8 bits explains, or the model has outliers",
        "use fp16 or bf16; if those pass, give int8 a smaller group_size",
    ),
    "w8a8": (_BOTH_IN_8_BITS, "use int8, which rounds weights alone"),
    "fp8": (_BOTH_IN_8_BITS, "use int8, which rounds weights alone"),
    "fp8_static": (
        _BOTH_IN_8_BITS,
        "use fp8, which finds the ranges of activations while it runs, or text closer to what it is used for",
    ),
    "int8_dynamic": (_OUTLIERS, "use int8, which rounds weights alone, or int8_static, which chooses ranges on text"),
    "int8_static": (_OUTLIERS, "use int8, which rounds weights alone, or text closer to what it is used for"),
    "int4": (
        "rounding to 4 bits moves this model too far",
        "use int8, or a smaller group_size (16 instead of 32) for int4",
    ),
    "8da4w": (
        "rounding weights to 4 bits and activations to 8 bits moves this model too far",
        "use none, or the smallest group_size (32)",
    ),
    "nvfp4": (_FLOATS_OF_4_BITS, "use int4, which text can calibrate (optimization.method), or int8"),
    "mxfp4": (_FLOATS_OF_4_BITS, "use nvfp4 or int4, which are closer at nearly the same size"),
    "int3": ("rounding to 3 bits moves this model too far", "calibrate it (optimization.method: auto), or use int4"),
}
"""Cause and remedy of a distance that is too large, by level."""


def _distance_cause(output: OutputValidation) -> tuple[str, str]:
    if output.level in _ROUNDING:
        return _ROUNDING[output.level]
    if output.format == "pytorch" and output.to_base is None:
        return (
            "its weights are not those of the base model from which it was made",
            "export it again; check that the base model was not changed meanwhile",
        )
    if output.format == "pytorch":
        return (
            "the merged weights are not base + adapter: wrong scale (lora_alpha, r, rsLoRA), a missing tensor, or another base",
            "merge again from the checkpoint's own base model; check lora_alpha, r and the patterns in adapter_config.json",
        )
    return (
        f"the {output.format} graph computes something else than the model",
        "export with another engine (mobius, dynamo, legacy) or opset, or with optimize_graph off",
    )


def _remedy_non_finite(output: OutputValidation) -> str:
    if output.level == "fp16":
        return "values leave the range of float16: use bf16 or none"
    return "check the weights of base and adapter for NaN, then export this format again; with fp16 use bf16 instead"


def _remedy_shape(output: OutputValidation, shape: str) -> str:
    if shape == "native_dtype":
        return "serve it in bfloat16 or float32"
    if shape == "answers":
        return "use a wider level or smaller groups; if the loss is acceptable, raise quality_loss in validation.limits"
    if output.format == "pytorch":
        return "check the model's code, its attention implementation and its config.json; the weights agree"
    return (
        "export with another engine (mobius, dynamo, legacy) and dynamic_axes on; do not serve it with padded batches"
    )
