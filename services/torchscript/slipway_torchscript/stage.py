"""The stages torchscript and torch_export: write a merged PyTorch model as a graph that runs without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.estimates import ModelSize
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
from slipway_torchscript.params import TorchExportParams, TorchScriptParams

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
_LIBRARIES = ("torch", "transformers")


def write_torchscript(inputs: Mapping[str, Path], params: TorchScriptParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pt``; the README describes the output folder.

    Raises:
        slipway.errors.TorchGraphError: With the reasons that the README lists.
    """
    from slipway_torchscript.export import export_torchscript

    target = ctx.workdir / "torchscript"
    target.mkdir()
    export_torchscript(inputs["pytorch"], target, params, ctx)
    return {"torchscript": target}


def write_torch_export(inputs: Mapping[str, Path], params: TorchExportParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pt2``; the README describes the output folder.

    Raises:
        slipway.errors.TorchGraphError: With the reasons that the README lists.
    """
    from slipway_torchscript.export import export_program

    target = ctx.workdir / "torch_export"
    target.mkdir()
    export_program(inputs["pytorch"], target, params, ctx)
    return {"torch_export": target}


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no graph is made of a model with this ``config.json``; empty if one is."""
    what = f"the model is of the kind {described(config)}"
    if family_of(config) not in TAKEN or takes_more_than_text(config) or config.get("is_encoder_decoder"):
        return f"{what}, and graphs of PyTorch are made of text decoders and encoders only"
    if keeps_states(config):
        return f"{what} with layers that keep a state, of which no graph of PyTorch is made"
    if any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERTS):
        return (
            f"{what} with a mixture of experts, of which a graph of PyTorch would run only those that its sample chose"
        )
    return ""


def _output_bytes(params: Mapping[str, Any], size: ModelSize) -> int:
    return size.at_level(str(params.get("level", "none")))


TORCHSCRIPT = Stage(
    name="torchscript",
    version=1,
    inputs=("pytorch",),
    outputs=("torchscript",),
    params=TorchScriptParams,
    run=write_torchscript,
    libraries=_LIBRARIES,
    effort=Effort(seconds=15.0, seconds_per_gb=20.0),
    output_bytes=_output_bytes,
    model_memory=3.0,
    refuses=lambda _, config: refusal_reason(config),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
TORCH_EXPORT = Stage(
    name="torch_export",
    version=1,
    inputs=("pytorch",),
    outputs=("torch_export",),
    params=TorchExportParams,
    run=write_torch_export,
    libraries=_LIBRARIES,
    effort=Effort(seconds=30.0, seconds_per_gb=30.0),
    output_bytes=_output_bytes,
    model_memory=3.0,
    refuses=lambda _, config: refusal_reason(config),
    recovery=Path(__file__).with_name("recovery_of_programs.yaml"),
)
