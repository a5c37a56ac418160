"""The reference stage: run base + adapter over the samples, once for all exports of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.sizes import ModelSize
from slipway.stage import Context, Effort, Forecast, Hardware, Role, Stage
from slipway_validate.params import BY_LAYERS, SampleParams

_SMALLEST_WIDTH = 64
"""Hidden size that small models exceed: the largest tensor divided by it bounds the vocabulary."""


def run(inputs: Mapping[str, Path], params: SampleParams, ctx: Context) -> dict[str, Path]:
    """Run base + adapter, or the base itself without an adapter, and write its results.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the model, the tokenizer or the held-out text cannot be used.
        StageError: ``CANCELLED``; ``DISK_FULL``.
    """
    from slipway_validate.reference.running import make_reference

    return {"reference": make_reference(inputs, params, ctx)}


def output_bytes(params: SampleParams, size: ModelSize) -> int:
    """Estimate the size of the logits with and without the adapter, and of those of long continuations."""
    per_token = 4 * (size.largest // _SMALLEST_WIDTH)
    windows = min(2 * params.windows * params.sequence_length * per_token, params.logit_bytes // 2)
    return windows + min(params.continuation_prompts * params.continuation_tokens * per_token, params.logit_bytes // 2)


STAGE = Stage(
    name="reference",
    version=3,
    inputs=("base",),
    optional_inputs=("adapter", "heldout", "own_text", "test_inputs"),
    outputs=("reference",),
    params=SampleParams,
    run=run,
    libraries=("torch", "transformers", "peft"),
    role=Role.REFERENCE,
    effort=Effort(seconds=15.0, seconds_per_gb=200.0, phases={"tokenize": (0.0, 0.1), "reference": (0.1, 0.9)}),
    forecast=Forecast(output_bytes=output_bytes, work_bytes=lambda _params, _made, size: size.weight_bytes),
    hardware=Hardware(memory=1.0, less_memory=BY_LAYERS),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
