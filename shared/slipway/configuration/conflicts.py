"""Settings that are possible one by one, but not together; and those that are possible but worth a word."""

from __future__ import annotations

from slipway.configuration.problems import Problem
from slipway.configuration.sections import Sections
from slipway.counts import counted


def conflicts(configuration: Sections) -> tuple[Problem, ...]:
    """Settings that contradict each other, each with one that works."""
    return (
        *_no_format(configuration),
        *_nf4_without_4bit(configuration),
        *_levels_without_format(configuration),
        *_targets_without_builder(configuration),
        *_weights_of_others(configuration),
    )


def cautions(configuration: Sections) -> tuple[str, ...]:
    """What the user should know about settings that are kept."""
    found = []
    formats = configuration.formats
    if configuration.base_model.load_in_4bit and configuration.base_model.merge_onto == "original":
        found.append(
            "base_model.load_in_4bit: the adapter is merged into the 16-bit weights, not into the 4-bit ones it saw in training; "
            "base_model.merge_onto: nf4 merges onto those"
        )
    if configuration.optimization.quantization and not (formats.pytorch.enabled or formats.onnx.enabled):
        found.append(
            "optimization.quantization is not applied: only the pytorch and onnx formats are quantized, and neither is enabled"
        )
    if configuration.validation.limits and not (
        configuration.validation.enabled and configuration.validation.compare_outputs
    ):
        found.append(
            "validation.limits is not applied: outputs are compared only with validation.enabled and compare_outputs"
        )
    if not configuration.validation.enabled:
        found.append("validation.enabled is false: nothing shows that the outputs behave like the fine-tuned model")
    return tuple(found)


def _nf4_without_4bit(configuration: Sections) -> list[Problem]:
    base = configuration.base_model
    if base.merge_onto == "original" or base.load_in_4bit:
        return []
    return [
        Problem(
            "base_model.merge_onto",
            "nf4 is the base of adapters that were trained with load_in_4bit, which is false",
            remedy="set base_model.load_in_4bit to true if it was, otherwise merge_onto to original",
        )
    ]


def _no_format(configuration: Sections) -> list[Problem]:
    formats = configuration.formats
    if formats.pytorch.enabled or formats.onnx.enabled or formats.tensorrt.enabled:
        return []
    return [
        Problem("formats", "no format is enabled, so there is nothing to deliver", "set formats.pytorch.enabled: true")
    ]


def _levels_without_format(configuration: Sections) -> list[Problem]:
    if not configuration.formats.onnx.enabled or "bf16" not in configuration.levels("onnx"):
        return []
    own = configuration.formats.onnx.quantization is not None
    key = "formats.onnx.quantization" if own else "optimization.quantization"
    kept = [level for level in configuration.levels("onnx") if level not in {"bf16", "fp16"}]
    works = ", ".join(["fp16", *kept])
    remedy = f"set formats.onnx.quantization: [{works}]" + ("" if own else " and the others keep bf16")
    return [Problem(key, "bf16 is not delivered as onnx: ONNX Runtime has no bf16 kernels on CPU", remedy)]


def _targets_without_builder(configuration: Sections) -> list[Problem]:
    tensorrt = configuration.formats.tensorrt
    if not (tensorrt.enabled and tensorrt.targets and tensorrt.builder == "tensorrt"):
        return []
    message = f"{', '.join(tensorrt.targets)} cannot be built by builder tensorrt, which builds for the GPU it runs on"
    return [
        Problem(
            "formats.tensorrt.targets", message, "set formats.tensorrt.builder: tensorrt_rtx, or remove the targets"
        )
    ]


def _weights_of_others(configuration: Sections) -> list[Problem]:
    combination = configuration.combination
    count = len(combination.adapters) + 1 if combination.adapters else 0
    if not combination.weights or len(combination.weights) == count:
        return []
    given, ones = len(combination.weights), ", ".join(["1.0"] * count)
    return [
        Problem(
            "combination.weights",
            f"there {'is' if given == 1 else 'are'} {counted(given, 'weight')} "
            f"for {counted(count, 'adapter') if count else 'no adapters'} to combine, "
            "the checkpoint's included",
            f"set combination.weights: [{ones}]" if count else "name the other adapters in combination.adapters",
        )
    ]
