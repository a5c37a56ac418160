"""The format ``adapter``: the adapter unmerged, for servers that load several beside one base."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, field_validator

from slipway.errors import ConfigurationError
from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    FormatSettings,
    PlannedTask,
    Runtime,
    Usage,
    Variants,
    as_tuple,
    wrong_value,
)
from slipway_adapter.params import FactorType, Target

ONNX, GGUF = "onnx", "gguf"


class AdapterConfiguration(FormatSettings):
    """The adapter unmerged, for servers that load several beside one base.

    Attributes:
        targets: ``peft``, in ``adapter/``: a LoRA for peft, vLLM, SGLang and KServe. ``onnx``, in ``adapter-onnx/``: a graph of the base that
            takes the factors of any fine-tune as inputs, and this adapter's as a file. ``gguf``, in ``adapter-gguf/``: a file that llama.cpp and
            Ollama load beside the base's.
        dtype: Type of the LoRA's factors; ``auto`` keeps the stored one, or takes ``float32`` where a scaling would round it.
    """

    targets: Annotated[tuple[Target, ...], BeforeValidator(as_tuple)] = ("peft",)
    dtype: FactorType = "auto"

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: tuple[Target, ...]) -> tuple[Target, ...]:
        if not value:
            raise wrong_value([], "names no target", "use some of [peft, onnx, gguf]")
        return tuple(dict.fromkeys(value))


def plan(request: FormatRequest[AdapterConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan a folder for each target. The graph is an export of the base; the GGUF file is written from the pairs for llama.cpp.

    Raises:
        ConfigurationError: ``CONFIGURATION_INVALID``: the export has no adapter.
    """
    if not request.adapter:
        remedy = f"set checkpoint.path to a training run, or formats.{request.name}.enabled to false"
        raise ConfigurationError(
            f"the format {request.name} delivers an adapter, and this export has none: a model is exported as it is",
            reason="CONFIGURATION_INVALID",
            remedy=remedy,
            about={"key": f"formats.{request.name}.enabled"},
        )
    common = {"base": request.base, "adapter": request.adapter}
    tasks: list[PlannedTask] = []
    if "peft" in request.settings.targets:
        params = {"target": "peft", "dtype": request.settings.dtype}
        tasks.append(PlannedTask("adapter", "adapter", params, common, format=request.name, output="adapter"))
    if ONNX in request.settings.targets:
        graph = PlannedTask("onnx_export-adapter", "onnx_export", {}, {"pytorch": request.base}, output="onnx")
        name = f"{request.name}-{ONNX}"
        inputs = {**common, "onnx": graph.reference}
        tasks += [
            graph,
            PlannedTask("adapter-onnx", "adapter", {"target": ONNX}, inputs, format=name, output="adapter"),
        ]
    if GGUF in request.settings.targets:
        pairs = PlannedTask("adapter-pairs", "adapter", {"target": GGUF}, common, output="adapter")
        name = f"{request.name}-{GGUF}"
        names = {"name": request.file_name, "base_model": request.base_model}
        inputs = {"base": request.base, "adapter": pairs.reference}
        tasks += [pairs, PlannedTask("adapter-gguf", "gguf_adapter", names, inputs, format=name, output="adapter")]
    return tuple(tasks)


def variants(settings: AdapterConfiguration) -> Iterable[str]:
    """Return the targets that have a folder of their own."""
    return (target for target in settings.targets if target != "peft")


FORMAT = Format(
    name="adapter",
    title="Adapter",
    settings=AdapterConfiguration,
    plan=plan,
    variants=Variants(
        names=variants,
        plain=lambda settings: "peft" in settings.targets,
        runtimes={
            GGUF: Runtime(
                name="llama.cpp",
                files=("*-LoRA.gguf",),
                load="slipway_gguf.runtime.adapter:load",
                on_base=True,
                reads_text=True,
                rounds={"": "float16"},
                halves_encoder=True,
            )
        },
    ),
    rank=30,
    needs_tokenizer=lambda _: False,
    runtime=Runtime(
        name="peft",
        files=("adapter_config.json",),
        load="slipway_adapter.runtime:load",
        on_base=True,
        families=None,
    ),
    usage=Usage(
        template=("slipway_adapter", "usage.example.j2"),
        library="peft",
        packages="peft transformers torch",
        chat_packages="peft transformers torch jinja2",
        variant_packages={ONNX: "onnxruntime transformers numpy", GGUF: "xllamacpp"},
    ),
    fits=(
        Fit(
            "vllm",
            "several fine-tunes share one base in memory (--enable-lora); a request names its adapter",
            families=("decoder",),
            rank=20,
            source="https://docs.vllm.ai/en/latest/features/lora/",
        ),
        Fit(
            "llama.cpp",
            "several fine-tunes share one file of the base, which is not part of it (--lora, ADAPTER of a Modelfile)",
            variant=GGUF,
            families=("decoder",),
            rank=20,
            settings={"targets": [GGUF]},
            source="services/adapter/README.md",
        ),
    ),
    media_types={".onnx_adapter": "application/vnd.onnxruntime.adapter"},
)
