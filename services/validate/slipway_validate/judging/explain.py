"""Explain why an output failed, and say what to change."""

from __future__ import annotations

from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputValidation
from slipway.validation.verdicts import Answer, Verdict
from slipway_validate.judging import parts, pictures, survival, texts
from slipway_validate.judging.distances import distance_of

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
    "sentence_embedding": "it makes another vector of a text than the model: its pooling or normalization is another",
    **pictures.CAUSES,
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


def explain_checks(output: OutputValidation, *, where: str = "", base_limit: float | None = None) -> tuple[str, str]:
    """Return explanation and remedy for an output whose checks failed; both empty if none failed.

    Args:
        output: The output with its figures, checks and verdicts.
        where: Place of the first NaN or infinity.
        base_limit: Distance from the base within which it is the base; None if that is unknown.
    """
    failed = output.failed_checks
    if not failed:
        return "", ""
    broken = _explain_broken(output, tuple(each for each in failed if each.question == "faithful"), where, base_limit)
    coarse = _explain_coarse(output, tuple(each for each in failed if each.question == "fit"))
    # If something is broken, only that is told: rounding cannot be judged before.
    causes = list(filter(None, (broken[0], coarse[0] if not broken[0] else "")))
    remedy = next(filter(None, (broken[1], coarse[1])), "")
    shown = "; ".join(str(check) for check in failed[:SHOWN_CHECKS])
    more = f"; and {len(failed) - SHOWN_CHECKS} more" if len(failed) > SHOWN_CHECKS else ""
    return f"{'; '.join(causes)} ({shown}{more})", remedy


def faithful_verdict(
    output: OutputValidation, *, yardstick: str, unjudged: str, base_limit: float | None, where: str
) -> Verdict:
    """Judge by its checks whether an output computes what its own weights say.

    Args:
        output: The output.
        yardstick: What its results were compared with; empty for nothing.
        unjudged: Why they were compared with nothing.
        base_limit: As :func:`explain_checks`.
        where: As there.
    """
    checks = [each for each in output.checks if each.question == "faithful"]
    failed = tuple(each for each in checks if not each.passed)
    named = {"stored": "stored weights", "merged": "merged model", "reference": "reference"}.get(yardstick, "")
    if failed:
        said = _explain_broken(output, failed, where, base_limit)[0]
        return Verdict.model_validate({"answer": Answer.FAILED, "said": said, "yardstick": named})
    compared = next((each for each in checks if each.against == yardstick), None)
    if compared is None and not named:
        return Verdict(said=unjudged)
    if compared is None:
        return Verdict.model_validate({"answer": Answer.PASSED, "said": unjudged, "yardstick": named})
    of = {"stored": "PyTorch on its own weights", "merged": "the merged model", "reference": "base + adapter"}[
        yardstick
    ]
    said = (
        f"it is {compared.value or 0.0:.2g} {compared.unit} away from {of}, and rounding explains {compared.limit:.2g}"
    )
    return Verdict.model_validate({"answer": Answer.PASSED, "said": said, "yardstick": named})


def _explain_broken(
    output: OutputValidation, failed: tuple[Check, ...], where: str, base_limit: float | None
) -> tuple[str, str]:
    """Return what is broken and the remedy; both empty if nothing is."""
    if not failed:
        return "", ""
    names = {check.name for check in failed}
    # A weight that is not finite is known by name; results only show that there is one.
    if "non_finite_logits" in names and "non_finite_weights" not in names:
        return (
            f"broken: its results contain NaN or infinity, first in {where or 'its output'}",
            _remedy_non_finite(output),
        )
    said, remedies = [], []
    if any(check.name in texts.CHECKS for check in failed) and output.texts:
        of_texts, remedy = texts.explain(output.texts)
        said.append(of_texts)
        remedies.append(remedy)
    if parts.MISSING in names:
        of_parts, remedy = parts.explain(output.missing)
        said.append(of_parts)
        remedies.append(remedy)
    for each in (output.pictures, output.sound):
        if each is not None and each.failed:
            of_pictures, remedy = pictures.explain(each)
            said.append(of_pictures)
            remedies.append(remedy)
    named = (*survival.CHECKS, *texts.CHECKS, parts.MISSING, *pictures.UNREADABLE)
    others = [check for check in failed if check.name not in named]
    # Each weight in the wrong place is named; results would only allow a guess.
    exchanged = output.survival is not None and any(each.exchanged for each in output.survival.faulty)
    if others and not exchanged and "non_finite_weights" not in names:
        cause, remedy = _explain_results(output, others, base_limit)
        said.append(cause)
        remedies.append(remedy)
    if output.survival and any(check.name in survival.CHECKS for check in failed):
        of_modules, remedy = survival.explain(output.survival)
        said.append(of_modules)
        remedies.insert(0, remedy)  # stored weights show what results only suggest
    return f"broken: {'; '.join(filter(None, said))}", next(filter(None, remedies), "")


def _explain_results(output: OutputValidation, failed: list[Check], base_limit: float | None) -> tuple[str, str]:
    to_base = distance_of(output.to_base)
    if to_base is not None and base_limit is not None and to_base <= base_limit:
        return (
            "it behaves like the base model: the adapter is missing from it",
            "export it from the merged model; check that base model and checkpoint are those of the training",
        )
    shapes = [name for check in failed for name in [check.name.partition(".")[0]] if name in SHAPE_CAUSES]
    if shapes and all("." in check.name for check in failed):
        # Each sense has a part of its own; of shapes of text, the first explains the others.
        told = [
            shape for shape in dict.fromkeys(shapes) if shape == shapes[0] or {shape, shapes[0]} <= {*pictures.CAUSES}
        ]
        behind = {"pictures": output.pictures, "sound": output.sound}
        blamed = {shape: each.blamed for shape, each in behind.items() if each}
        causes = [": ".join(filter(None, (SHAPE_CAUSES[shape], blamed.get(shape, "")))) for shape in told]
        return "; ".join(causes), _remedy_shape(output, shapes[0])
    if any(check.against == "stored" for check in failed):
        return "it computes something else than its own weights", _REMEDY_GRAPH
    if output.format == "pytorch":
        return (
            "it is further from the model than rounding its weights to their type explains",
            "export it again; if it fails again, check that base model and checkpoint are those of the training",
        )
    beside = any(check.against == "reference" for check in failed)
    model = "base + adapter" if beside else "the merged model"
    return f"it computes something else than {model}, beyond what rounding its weights explains", _REMEDY_GRAPH


_REMEDY_GRAPH = (
    "export with another engine (mobius, dynamo, legacy) or opset, or with optimize_graph off; or leave this format out"
)


def _explain_coarse(output: OutputValidation, failed: tuple[Check, ...]) -> tuple[str, str]:
    """Return what is lost and what keeps more; both empty if enough is kept."""
    if not failed:
        return "", ""
    if all(check.name.startswith(("native_dtype.", "continuation.", "answers.")) for check in failed):
        shape = failed[0].name.partition(".")[0]
        return SHAPE_CAUSES[shape], _remedy_shape(output, shape)
    said = output.fit.said or "it is further from the model than its limits allow"
    level = "" if output.level == "none" else f"{output.level} "
    return f"too coarse: {level}{said.removeprefix('it ')}", _WIDER.get(output.level, _WIDER_OTHERS)


_WIDER = {
    "int4": "calibrate it (optimization.method: auto), give the layers that matter most 8 bits (optimization.size_budget), or use int8",
    "int3": "calibrate it (optimization.method: auto), or use int4",
    "nvfp4": "use int4, which text can calibrate (optimization.method), or int8",
    "mxfp4": "use nvfp4 or int4, which are closer at nearly the same size",
    "int8_dynamic": "use int8, which rounds weights alone, or int8_static, which chooses ranges on text",
    "int8_static": "use int8, which rounds weights alone, or text closer to what it is used for",
    "fp8_static": "use fp8, which finds the ranges of activations while it runs, or int8",
    "w8a8": "use int8, which rounds weights alone",
    "fp8": "use int8, which rounds weights alone",
    "q4_0": "use q4_k_m, q5_k_m or q8_0",
    "iq4_xs": "use q4_k_m, q5_k_m or q8_0",
    "q4_k_m": "use q5_k_m, q6_k or q8_0, or give text like the training data (optimization.calibration), which weighs the rounding",
    "q5_k_m": "use q6_k or q8_0",
}
_WIDER_OTHERS = "use a wider level, or the unquantized format"


def _remedy_non_finite(output: OutputValidation) -> str:
    if output.level == "fp16":
        return "values leave the range of float16: use bf16 or none"
    return "check the weights of base and adapter for NaN, then export this format again; with fp16 use bf16 instead"


def _remedy_shape(output: OutputValidation, shape: str) -> str:
    if shape == "native_dtype":
        return "serve it in bfloat16 or float32"
    if shape in pictures.CAUSES:
        return pictures.REMEDY
    if shape == "answers":
        return "use a wider level or smaller groups; if the loss is acceptable, raise quality_loss in validation.limits"
    if output.format == "pytorch":
        return "check the model's code, its attention implementation and its config.json; the weights agree"
    return (
        "export with another engine (mobius, dynamo, legacy) and shapes: dynamic; do not serve it with padded batches"
    )
