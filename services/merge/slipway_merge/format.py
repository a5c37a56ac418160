"""The format ``pytorch``: the merged model as a transformers folder."""

from __future__ import annotations

from dataclasses import replace

from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    FormatSettings,
    LevelSettings,
    ModelSize,
    PlannedTask,
    Quantization,
    Runtime,
    SectionRules,
    Usage,
    quantized,
)

_CASTS = ("fp16", "bf16")
_COMPRESSED = ("int8", "w8a8", "fp8", "fp8_static", "int4", "nvfp4", "mxfp4", "int3")
"""Levels in formats of compressed-tensors."""


class PyTorchConfiguration(LevelSettings):
    """The merged model as a transformers folder.

    Attributes:
        save_tokenizer: Put the tokenizer and chat template beside the weights.
    """

    enabled: bool = True
    save_tokenizer: bool = True


def plan(request: FormatRequest[PyTorchConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan the levels; unquantized it is the merged model itself."""
    tasks = quantized(request, request.model)
    if not request.shard_bytes:
        return tasks
    return tuple(replace(task, params={**task.params, "max_shard_bytes": request.shard_bytes}) for task in tasks)


def output_bytes(_: FormatSettings, level: str, size: ModelSize) -> int:
    """Estimate an output's size."""
    if not level:
        return size.stored_bytes
    # transformers looks embeddings up in the weights' own type, beside a quantized head.
    return size.at_level(level) + (size.largest_bytes if level in _COMPRESSED else 0)


FORMAT = Format(
    name="pytorch",
    title="PyTorch (transformers)",
    settings=PyTorchConfiguration,
    plan=plan,
    levels=(*_CASTS, *_COMPRESSED),
    is_model=True,
    needs_tokenizer=lambda settings: settings.save_tokenizer,
    rank=0,
    quantization=Quantization(
        calibrated=True,
        zero_points=False,  # transformers 5.23 unpacks all layers of a model with zero points by one scheme
        quantizer="slipway_quantize.own_quantizers:CHECKPOINTS",
    ),
    rules=SectionRules(
        variables={"save_tokenizer": "EXPORT_SAVE_TOKENIZER"},
        sample='{enabled: true, save_tokenizer: true, quantization: "int4"}',
    ),
    output_bytes=output_bytes,
    runtime=Runtime(
        families=None,
        name="transformers",
        files=("*.safetensors",),
        load="slipway.proof.transformers_runtime:load",
        # compressed-tensors rounds inputs per token, or in ranges that lie in the output.
        rounds={"w8a8": "int8/row", "fp8": "float8/row", "fp8_static": "static"},
    ),
    usage=Usage(
        template=("slipway_merge", "usage.example.j2"),
        library="transformers",
        packages="torch transformers accelerate",
        sentence_packages="sentence-transformers",
        level_packages=dict.fromkeys(_COMPRESSED, "compressed-tensors"),
    ),
    fits=(
        Fit(
            "vllm",
            "loads the folder as it is, and compressed-tensors levels on GPUs that compute them: w8a8 from Ampere on, fp8 from Ada on",
            levels=("", "fp8", "w8a8", "int4"),
            families=("decoder",),
            rank=0,
            source="https://docs.vllm.ai/en/latest/features/quantization/",
        ),
        Fit(
            "nvidia", "transformers runs it as it is; a serving engine is faster", levels=("", "fp16", "bf16"), rank=40
        ),
        Fit("cpu-server", "transformers runs it as it is; graphs are faster", levels=("",), rank=60),
    ),
)
