"""The executorch stage: lower a merged PyTorch model to a program for ExecuTorch's runtime with XNNPACK."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.models.families import (
    DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    described,
    family_of,
    keeps_states,
    takes_more_than_text,
)
from slipway.stage import Context, Effort, Stage
from slipway_executorch.params import ExecutorchParams

TAKEN = (
    DECODER,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)
"""Families that are exported."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with the number of experts of a mixture."""


def run(inputs: Mapping[str, Path], params: ExecutorchParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pte``; the README describes the output folder.

    Raises:
        slipway.errors.ExecutorchExportError: With the reasons that the README lists.
    """
    from slipway_executorch.export import export_model

    target = ctx.workdir / "executorch"
    target.mkdir()
    export_model(inputs["pytorch"], target, params, ctx)
    return {"executorch": target}


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no program is made of a model with this ``config.json``; empty if one is."""
    what = f"the model is of the kind {described(config)}"
    if family_of(config) not in TAKEN or takes_more_than_text(config):
        return f"{what}, and ExecuTorch programs are made of text decoders and encoders only"
    if keeps_states(config):
        return f"{what} with layers that keep a state, of which no ExecuTorch program is made"
    if any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERTS):
        return f"{what} with a mixture of experts, of which no ExecuTorch program is made"
    return ""


STAGE = Stage(
    name="executorch",
    version=1,
    inputs=("pytorch",),
    outputs=("executorch",),
    params=ExecutorchParams,
    run=run,
    libraries=("executorch", "torch", "torchao", "transformers"),
    effort=Effort(seconds=20.0, seconds_per_gb=40.0),
    output_bytes=lambda params, size: size.at_level(str(params.get("level", "none"))) + 4 * size.largest,
    model_memory=8.0,
    refuses=lambda _, config: refusal_reason(config),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
