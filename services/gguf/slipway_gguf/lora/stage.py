"""The gguf_adapter stage: write an adapter as a GGUF file that llama.cpp loads beside one of its base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.sizes import ModelSize
from slipway.stage import Context, Effort, Forecast, Stage
from slipway_gguf.architectures import adapter_refusal
from slipway_gguf.params import AdapterParams

_SHARE = 4
"""The adapter is estimated to have at most one weight for this many of the base."""


def run(inputs: Mapping[str, Path], params: AdapterParams, ctx: Context) -> dict[str, Path]:
    """Write the adapter in ``inputs["adapter"]``, whose modules are named as in ``inputs["base"]``; the README describes the folder.

    Raises:
        AdapterExportError, GGUFExportError: With the reasons that the README lists.
    """
    from slipway_gguf.lora.export import export_adapter

    return {"adapter": export_adapter(inputs, params, ctx)}


def output_bytes(_: AdapterParams, size: ModelSize) -> int:
    """Estimate the output's size: an adapter is small beside its base."""
    return size.weight_bytes // _SHARE + size.companion_bytes


STAGE = Stage(
    name="gguf_adapter",
    version=1,
    inputs=("base", "adapter"),
    outputs=("adapter",),
    params=AdapterParams,
    run=run,
    libraries=("gguf", "jinja2", "numpy", "xllamacpp"),
    effort=Effort(seconds=1.0),
    forecast=Forecast(output_bytes=output_bytes, refuses=lambda _, config: adapter_refusal(config)),
)
