"""The gguf stage: write a merged model as one GGUF file, at one level; a model that takes images has a second file for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.sizes import ModelSize
from slipway.stage import Context, Effort, Forecast, Stage
from slipway_gguf.params import LEVELS, GGUFParams

if TYPE_CHECKING:
    from slipway.model.configuration import ModelConfig

_SHARE_OF_FLOAT32 = 1.02
"""Factor for tensors such as norms, which stay in float32."""
_SLOW = 10
"""How much longer a GB of types takes whose scales are searched: 9.4 s for 109 MB of q4_k_m, 3.9 s for 274 MB of bf16 (SmolLM2-135M, two cores)."""


def run(inputs: Mapping[str, Path], params: GGUFParams, ctx: Context) -> dict[str, Path]:
    """Write the model in ``inputs["pytorch"]``, weighted by ``inputs["importance"]`` if present; the README describes the output folder.

    Raises:
        GGUFExportError: With the reasons that the README lists.
    """
    from slipway_gguf.export import export_model

    return {"gguf": export_model(inputs, params, ctx)}


def output_bytes(params: GGUFParams, size: ModelSize) -> int:
    """Return an upper estimate of a folder's size: the file with the vocabulary, and the tokenizer's own files."""
    each = LEVELS[params.type].bytes_per_weight
    return int(size.weights * each * _SHARE_OF_FLOAT32) + 3 * size.companion_bytes


def refuse(_: GGUFParams, config: ModelConfig) -> str:
    """Say why a model cannot be written; empty if it can."""
    from slipway_gguf.architectures import refusal_reason

    return refusal_reason(config)


STAGE = Stage(
    name="gguf",
    version=4,
    inputs=("pytorch",),
    optional_inputs=("importance",),
    outputs=("gguf",),
    params=GGUFParams,
    run=run,
    libraries=("gguf", "jinja2", "numpy", "xllamacpp"),
    effort=Effort(seconds=2.0, seconds_per_gb=6.0, phases={"weights": (0.05, 0.95), "images": (0.95, 0.99)}),
    forecast=Forecast(
        output_bytes=output_bytes,
        refuses=refuse,
        work_bytes=lambda params, made, _: made * (_SLOW if LEVELS[params.type].weighs else 1),
    ),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
