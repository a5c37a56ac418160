"""The validate stage: every output of an export against base + adapter, with proof, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from slipway.stage import Context, Provider, Stage, StageParams, library_provider
from slipway.validation import LimitOverrides


class ValidateParams(StageParams):
    """Parameters of the validate stage."""

    test_samples: int = Field(default=10, ge=1, le=10_000, description="windows of held-out text")
    sequence_length: int = Field(default=128, ge=8, le=32_768, description="tokens per window")
    compare_outputs: bool = Field(default=True, description="otherwise outputs are only loaded and run")
    benchmark_performance: bool = Field(
        default=True, description="measure prefill and decode speed, in turn with the reference's"
    )
    greedy_prompts: int = Field(default=4, ge=0, le=100, description="prompts continued greedily")
    max_new_tokens: int = Field(default=16, ge=1, le=1024, description="tokens each of them is continued with")
    benchmark_repeats: int = Field(
        default=7, ge=1, le=1000, description="rounds of timing, each of an output and then of the reference"
    )
    benchmark_decode_steps: int = Field(default=16, ge=1, le=4096, description="timed decode steps of a round")
    benchmark_seconds: float = Field(
        default=12.0, gt=0, le=3600, description="no round of an output is begun later; one is always taken"
    )
    seed: int = Field(default=0, ge=0, description="places the windows in the text")
    max_logit_bytes: int = Field(
        default=2 << 30, ge=1 << 20, description="disk for logits; fewer samples are used if short"
    )
    output_timeout_seconds: float = Field(default=3600.0, gt=0, description="longest time one output may take")
    limits: dict[str, LimitOverrides] = Field(
        default_factory=dict, description="limits to replace, by level: float32, float16, bfloat16, int8, int4"
    )


def run(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context) -> dict[str, Path]:
    """Validate every input beside ``base``, ``adapter`` and ``heldout``.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference, the tokenizer or the held-out text is not usable.
        StageError: ``CANCELLED``; ``DISK_FULL``.
    """
    from slipway_validate.validation import validate

    return {"validation": validate(inputs, params, ctx)}


def probe() -> tuple[Provider, ...]:
    """Runtimes that outputs can be run with here."""
    return tuple(library_provider(name) for name in ("transformers", "peft", "onnxruntime"))


STAGE = Stage(
    name="validate",
    version=5,
    inputs=("base", "adapter"),
    outputs=("validation",),
    params=ValidateParams,
    run=run,
    libraries=("torch", "transformers", "peft", "onnxruntime", "compressed-tensors", "tensorrt", "tensorrt-rtx"),
    more_inputs=True,
    device_bound=True,  # an engine runs only on the GPU it was built for, and speed is measured
    probe=probe,
)
