"""Parameters of the onnx_export stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from slipway.stage import StageParams

EngineName = Literal["auto", "mobius", "dynamo", "legacy"]


Runtime = Literal["onnxruntime", "tensorrt"]


ParityMode = Literal["auto", "always", "never"]


class OnnxExportParams(StageParams):
    """Parameters of the onnx_export stage.

    Attributes:
        engine: The engine that makes the graph: ``mobius`` builds it, ``dynamo`` and ``legacy`` trace it with torch. ``auto``
            is mobius for a text decoder, otherwise the tracer that writes the opset.
        opset: ONNX opset of the file; ``None`` uses the engine's best for the runtime.
        dynamic_axes: Whether the batch may vary. ``False`` fixes it to 1; sequence and past always vary, because a KV cache
            needs that.
        optimize_graph: Whether ONNX Runtime's own fused operators may be used (``runtime`` onnxruntime only).
        runtime: The runtime of the file. ``tensorrt`` means standard operators only, opset 20 at most.
        activations: Activations to return beside the results, as ``layers`` (numbers, ``last`` or ``all``) and ``kinds``
            (:data:`slipway.models.activations.request.KINDS`); empty for none. Only engines that trace return them.
        parity: Comparison with PyTorch: ``auto`` skips it, with a warning, for models whose fp32 weights exceed the
            attempt's memory.
        parity_tolerance: Largest allowed difference of logits, relative to the largest reference logit above 1.
    """

    engine: EngineName = "auto"
    opset: int | None = Field(default=None, ge=7, le=30)
    dynamic_axes: bool = True
    optimize_graph: bool = True
    runtime: Runtime = "onnxruntime"
    activations: Mapping[Literal["layers", "kinds"], tuple[str, ...]] = Field(default_factory=dict)
    parity: ParityMode = "auto"
    parity_tolerance: float = Field(default=1e-4, gt=0, le=0.1)
