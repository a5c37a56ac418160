"""Parameters of the onnx_export stage, and what is known from them and ``config.json`` alone: families, opsets, weights left out.

Opsets are known without loading an engine, so that a plan can announce the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipway.machine.onnx_runtime import ProviderChoice
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, SPEECH
from slipway.model.graphs.calls import Promise
from slipway.stage import StageParams

EngineName = Literal["auto", "mobius", "dynamo", "legacy"]
Runtime = Literal["onnxruntime", "tensorrt"]
ParityMode = Literal["auto", "always", "never"]
Shapes = Literal["dynamic", "batch", "static"]
Attention = Literal["auto", "sdpa", "eager"]
Optimization = Literal["none", "basic", "all"]
Stored = Literal["stored", "deferred"]
Parts = Literal["text", "all"]

LIBRARIES = ("mobius-onnx", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers")
"""Libraries that affect the output."""

PackageKind = Literal["genai", "transformers_js", "optimum", "triton", "kserve"]
"""``genai``: onnxruntime-genai; ``transformers_js``: browsers and Node.js; ``optimum``: optimum's classes; ``triton``: NVIDIA Triton; ``kserve``: KServe."""

PARITY_OVERHEAD = 1.2
"""Peak memory of the comparison divided by the float32 size of the weights, where PyTorch's are not mapped: measured 1.17 at 0.6B."""

ENGINE_OPSETS: Mapping[str, range] = {"mobius": range(14, 25), "dynamo": range(18, 24), "legacy": range(14, 18)}
"""Engines in the order in which an export tries them, with the opsets they write."""

BEST_OPSET = 23
"""Opset that mobius and dynamo write for ONNX Runtime by default: it gives the smallest graphs."""

_NEEDED: Mapping[str, Any] = {
    "runtime": "onnxruntime",
    "tracer_warnings": "refuse",
    "external_data": True,
    "layered": False,
    "optimization_times": False,
    "parts": "text",
}
"""Values of parameters with which nothing in this stage needs the weights."""


class OnnxExportParams(StageParams):
    """Parameters of the onnx_export stage.

    Attributes:
        engine: The engine that makes the graph: ``mobius`` builds it, ``dynamo`` and ``legacy`` trace it with torch. ``auto``
            is mobius for a text decoder, otherwise the tracer that writes the opset.
        opset: ONNX opset of the file; ``None`` uses the engine's best for the runtime.
        shapes: ``dynamic``: batch, sequence and past vary. ``batch``: the batch is fixed. ``static``: every axis is fixed.
        batch: Rows, where the batch is fixed.
        sequence: Tokens per call, where they are fixed; ``None`` is 1 with a cache, otherwise 256 or what the model has room for.
        past: Tokens in the cache, where they are fixed; ``None`` fills up to 256 in all or what the model has room for.
        attention: transformers' attention that is traced; ``auto`` takes sdpa for dynamo if the model has it, otherwise eager.
        cache: Whether a model that generates takes and returns a KV cache. Without, each call reads the whole text again.
        optimization: ``all`` also uses ONNX Runtime's own fused operators (``runtime`` onnxruntime only), ``basic`` folds constants
            and fuses standard operators only, ``none`` leaves the traced graph as it is.
        optimization_times: Whether prefill and decode are measured without and with the optimization, for which each graph is made again.
        gelu_approximation: Whether exact GELUs are replaced by ONNX Runtime's faster approximation, after the comparison with PyTorch.
        external_data: Whether weights lie in a data file beside the graph; within the graph, they may have 2 GB at most.
        past_present_share_buffer: Whether past and present keys and values may be one buffer, for the fastest serving. Rows are then
            padded on the right, and only a single row takes several tokens after a past. Only mobius makes such a graph, with ONNX
            Runtime's ``GroupQueryAttention``.
        logits_to_keep: 1 computes logits of the last token of each row only, 0 of all tokens.
        runtime: The runtime of the file. ``tensorrt`` means standard operators only, opset 20 at most.
        tracer_warnings: Branches of the traced code on values: ``refuse`` the trace, or ``prove`` by the comparison with PyTorch at
            other shapes that they do no harm.
        activations: Activations to return beside the results, as ``layers`` (numbers, ``last`` or ``all``) and ``kinds``
            (:data:`slipway.model.activations.KINDS`); empty for none. Only engines that trace return them.
        parity: Comparison with PyTorch: ``auto`` skips it, with a warning, for models whose fp32 weights exceed the
            attempt's memory.
        parity_tolerance: Largest allowed difference of logits, relative to the largest reference logit above 1.
        layered: Whether a text decoder becomes one graph per block, in ``onnx-layered``, with a program that runs them in turn.
        provider: ONNX Runtime's execution provider for the comparison, here and in the validation: ``cuda``, ``cpu``, or ``auto`` for
            the GPU if there is one and the installed build can use it.
        packaging: Runtimes for which files are added; each level of the graphs gets them too.
        parts: Of a model that takes images: its ``text`` part alone, or ``all``, which adds graphs that make features of pictures and put
            them among the embeddings of text. Other models are the same with both.
        weights: ``deferred`` leaves matrices out where nothing else needs them: the quantize stage reads them from the model. Such
            graphs are not compared with PyTorch.
    """

    engine: EngineName = "auto"
    opset: int | None = Field(default=None, ge=7, le=30)
    shapes: Shapes = "dynamic"
    batch: int = Field(default=1, ge=1, le=1024)
    sequence: int | None = Field(default=None, ge=1, le=1 << 20)
    past: int | None = Field(default=None, ge=1, le=1 << 20)
    attention: Attention = "auto"
    cache: bool = True
    optimization: Optimization = "all"
    optimization_times: bool = False
    gelu_approximation: bool = False
    external_data: bool = True
    past_present_share_buffer: bool = False
    logits_to_keep: int = Field(default=0, ge=0, le=1)
    runtime: Runtime = "onnxruntime"
    tracer_warnings: Literal["refuse", "prove"] = "refuse"
    activations: Mapping[Literal["layers", "kinds"], tuple[str, ...]] = Field(default_factory=dict)
    parity: ParityMode = "auto"
    parity_tolerance: float = Field(default=1e-4, gt=0, le=0.1)
    provider: ProviderChoice = "auto"
    packaging: tuple[PackageKind, ...] = ()
    layered: bool = False
    # Left out where it changes nothing, so that graphs of text keep the action key that they had without it.
    parts: Parts = Field(default="text", exclude_if=lambda value: value == "text")
    weights: Stored = "stored"

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Refuse parameters that have no effect together."""
        if self.engine == "mobius" and self.attention != "auto":
            raise ValueError(
                f"attention {self.attention} needs engine dynamo or legacy: mobius does not trace the model"
            )
        if not self.cache and (self.engine == "mobius" or self.runtime == "tensorrt"):
            who = "engine mobius" if self.engine == "mobius" else "runtime tensorrt"
            raise ValueError(f"{who} makes graphs with a cache only: set cache to true, or engine to dynamo or legacy")
        if self.past_present_share_buffer and self._unmet_requirement:
            raise ValueError(f"past_present_share_buffer needs {self._unmet_requirement}")
        if self.logits_to_keep and self.shapes == "static":
            raise ValueError(
                "logits_to_keep needs shapes that vary: set shapes to dynamic or batch, or logits_to_keep to 0"
            )
        if self.layered and (self.engine == "mobius" or self.runtime == "tensorrt"):
            who = "engine mobius" if self.engine == "mobius" else "runtime tensorrt"
            raise ValueError(f"{who} makes whole graphs only: set layered to false")
        if self.layered and (not self.cache or self.activations or self.logits_to_keep):
            raise ValueError(
                "layered graphs have a cache, logits of all tokens and no activations: set layered to false"
            )
        if self.parts == "all" and self._unmet_by_parts:
            raise ValueError(f"parts all needs {self._unmet_by_parts}")
        if self.gelu_approximation and self.runtime == "tensorrt":
            raise ValueError("gelu_approximation is an operator of runtime onnxruntime: set it to false")
        if self.tracer_warnings == "prove" and self.parity == "never":
            raise ValueError("tracer_warnings prove needs the comparison with PyTorch: set parity to auto or always")
        return self

    @property
    def promise(self) -> Promise:
        """Return what the graph shall promise."""
        return Promise(shared_buffer=self.past_present_share_buffer, last_logits=self.logits_to_keep == 1)

    @property
    def _unmet_requirement(self) -> str:
        """Return the first requirement of a shared buffer that is not met; empty if all are."""
        needed = {
            "engine mobius or auto": self.engine in ("auto", "mobius"),
            "attention auto": self.attention == "auto",
            "a cache": self.cache,
            "shapes dynamic or batch": self.shapes != "static",
            "optimization all": self.optimization == "all",
            "runtime onnxruntime": self.runtime == "onnxruntime",
            "no activations": not self.activations,
            "whole graphs": not self.layered,
        }
        return next((what for what, met in needed.items() if not met), "")

    @property
    def _unmet_by_parts(self) -> str:
        """Return the first requirement of graphs for images that is not met; empty if all are."""
        needed = {
            "engine auto, dynamo or legacy": self.engine != "mobius",
            "a cache": self.cache,
            "shapes dynamic": self.shapes == "dynamic",
            "runtime onnxruntime": self.runtime == "onnxruntime",
            "logits of all tokens": not self.logits_to_keep,
            "buffers of their own for past and present": not self.past_present_share_buffer,
            "no activations": not self.activations,
            "whole graphs": not self.layered,
        }
        return next((what for what, met in needed.items() if not met), "")


STATEFUL_TYPES = (
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2"),
    *("nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Types of decoders with states whose recurrence the export knows: gated delta rule, Mamba 2, short convolution."""
_FORGETFUL = ("falcon_mamba", "jamba", "mamba", "zamba")
_FORGOTTEN = "transformers 5.23 forgets Mamba's state where several tokens follow a past, so nothing could be compared"
"""Types with layers of Mamba 1, and why they are refused: their scan takes no state to begin with."""

PICTURE_TYPES = (
    *("gemma3", "gemma4", "idefics3", "internvl", "lfm2_vl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
"""Types of models whose pictures the export knows; the table in ``forms/pictures/kinds.py`` has each."""
_SQUARE_TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Encoders of LLaVA that take pictures of one size."""


def refusal_reason(config: ModelConfig, *, parts: Parts = "text") -> str:
    """Return why a model is not exported with these parts; empty if it is."""
    what = config.description
    if config.family is None or (config.takes_more_than_text and config.family not in (SPEECH, DECODER)):
        return f"the model is {_article(what)} {what}, which the ONNX export does not support"
    if config.keeps_states and config.text.get("model_type") not in STATEFUL_TYPES:
        why = f": {_FORGOTTEN}" if config.text.get("model_type") in _FORGETFUL else ""
        return f"the model is {_article(what)} {what} with layers that keep a state, which the ONNX export does not support{why}"
    return _unknown_pictures(config) if parts == "all" and config.family is DECODER else ""


def _unknown_pictures(config: ModelConfig) -> str:
    """Return why a model's pictures are not exported; empty if they are, or if it takes none."""
    if not config.takes_more_than_text:
        return ""
    model_type, tower = config.get("model_type"), config.get("vision_config")
    instead = "set formats.onnx.parts to text for its text part"
    if tower is None and config.get("audio_config") is not None and model_type in PICTURE_TYPES:
        return f"the model takes sound and no images, and the ONNX export does not support its sound: {instead}"
    if model_type not in PICTURE_TYPES:
        return f"the model is of type {model_type}, whose images and sound the ONNX export does not support: {instead}"
    kind = tower.get("model_type") if isinstance(tower, dict) else None
    if model_type == "llava" and kind not in _SQUARE_TOWERS:
        return f"its encoder of images is {kind}, which the ONNX export does not support in {model_type}: {instead}"
    return ""


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def describe_replaced_opset(opset: int) -> str:
    """Describe the opset that is written instead if no engine writes the requested one; empty if one does, or for 0.

    The recovery table decides this: an older opset is raised to the oldest that engines write, a later one becomes the engine's best.
    """
    if opset == 0 or any(opset in opsets for opsets in ENGINE_OPSETS.values()):
        return ""
    lowest = min(opsets.start for opsets in ENGINE_OPSETS.values())
    highest = max(opsets.stop for opsets in ENGINE_OPSETS.values()) - 1
    instead = f"opset {lowest}" if opset < lowest else f"opset {BEST_OPSET}, the preferred engine's best,"
    return (
        f"formats.onnx.opset_version is {opset}, and engines write opsets {lowest} to {highest} only: "
        f"the ONNX model will have {instead} instead"
    )


def opset_advice(params: OnnxExportParams) -> tuple[str, str, str] | None:
    """Return the parameter, message and remedy if a task's opset will be replaced by another; None otherwise."""
    message = describe_replaced_opset(params.opset or 0)
    return ("opset", message, "set formats.onnx.opset_version to 0 for the engine's best") if message else None


def can_leave_out(params: OnnxExportParams) -> bool:
    """Return whether weights may be left out with these parameters: nothing of this stage needs them."""
    unusual = any(getattr(params, name) != value for name, value in _NEEDED.items())
    return not (unusual or params.parity == "always" or params.packaging or params.activations)
