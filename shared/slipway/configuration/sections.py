"""The sections of an export's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slipway.configuration.naming import pattern_fault
from slipway.configuration.values import (
    GROUP_SIZES,
    LARGEST,
    LARGEST_BYTES,
    LARGEST_SEED,
    Level,
    Levels,
    Seconds,
    Text,
    as_tuple,
    by_level,
    by_stage,
    lower_case,
)
from slipway.files.local_folders import is_address
from slipway.texts import quoted
from slipway.validation.limits import LimitOverrides


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class CheckpointConfiguration(_Section):
    """Where the fine-tuned adapter is.

    Attributes:
        path: Folder of a training run or of one checkpoint, here or at ``s3://bucket/prefix``, or an artifact's digest. Needed
            unless a request brings the adapter.
        auto_detect_latest: Take the newest healthy ``checkpoint-N`` of a training run.
        select: Which one of a run: its ``latest``, or the ``best`` by its own record (``best_model_checkpoint``).
    """

    path: Text = ""
    auto_detect_latest: bool = True
    select: Literal["latest", "best"] = "latest"


class CombinationConfiguration(_Section):
    """Several adapters as one, as peft's ``add_weighted_adapter`` combines them.

    Attributes:
        adapters: Checkpoints or runs whose adapters join that of ``checkpoint.path``; empty combines nothing.
        weights: One factor per adapter, the checkpoint's first; empty gives each 1.
        type: ``cat`` is the exact sum; ``linear``, ``ties``, ``dare_linear``, ``dare_ties`` and ``magnitude_prune`` mix the
            factors of adapters of the same rank.
        density: Share of the values that types with pruning keep, above 0 and at most 1.
        majority_sign: How the types with ties elect a sign: ``total`` or ``frequency``.
        seed: Of the types with dare, which prune at random.
    """

    adapters: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = ()
    weights: Annotated[tuple[float, ...], BeforeValidator(as_tuple)] = ()
    type: Literal["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] = "cat"
    density: float = Field(default=0.5, gt=0, le=1)
    majority_sign: Literal["total", "frequency"] = "total"
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)


class BaseModelConfiguration(_Section):
    """The model the adapter was trained on.

    Attributes:
        name: Folder, here or at ``s3://bucket/prefix``, repository id in the local Hugging Face cache,
            ``hf://owner/name@revision``, or an artifact's digest; empty takes the one the adapter names.
        load_in_4bit: The adapter was trained on the 4-bit (NF4) base.
        merge_onto: ``original``: the base's weights as they are; ``nf4``, with ``load_in_4bit``: what quantization to NF4 and back
            leaves of them, which the adapter saw in training.
        trust: Use the base even if files show that it is not the one the adapter was trained on; the verdict is amber then.
    """

    name: Text = ""
    load_in_4bit: bool = False
    merge_onto: Literal["original", "nf4"] = "original"
    trust: bool = False


class OptimizationConfiguration(_Section):
    """What is done to every format that does not say otherwise (the pytorch and onnx formats).

    Attributes:
        quantization: Levels delivered beside the unquantized format.
        group_size: Weights that share one scale, counted along a row: a power of two from 16 to 256.
        remove_artifacts: Leave training leftovers (optimizer, scheduler, RNG state) behind. They never travel: only true.
        compress_weights: Store integer PyTorch weights packed; false keeps them dense, rounded to the same grid.
    """

    quantization: Levels = ()
    group_size: int = Field(default=32, examples=list(GROUP_SIZES))
    remove_artifacts: bool = True
    compress_weights: bool = True

    @field_validator("group_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in GROUP_SIZES:
            nearest = min(GROUP_SIZES, key=lambda size: abs(size - value))
            raise PydanticCustomError(
                "group_size",
                "{found} is not a power of two from 16 to 256",
                {"found": quoted(value), "remedy": f"the nearest that works is {nearest}"},
            )
        return value

    @field_validator("remove_artifacts")
    @classmethod
    def _leftovers_stay(cls, value: bool) -> bool:
        if not value:
            raise PydanticCustomError(
                "remove_artifacts",
                "false is not possible: optimizer, scheduler and RNG state never travel with a model",
                {"remedy": "set it to true and keep the checkpoint itself to resume training"},
            )
        return value


class PyTorchConfiguration(_Section):
    """The merged model as a transformers folder.

    Attributes:
        enabled: Whether it is delivered.
        save_tokenizer: Put the tokenizer and chat template beside the weights.
        quantization: Levels of this format; when not set, those of ``optimization.quantization``.
    """

    enabled: bool = True
    save_tokenizer: bool = True
    quantization: Levels | None = None


class OnnxConfiguration(_Section):
    """The model as an ONNX graph with KV cache.

    Attributes:
        enabled: Whether it is delivered.
        opset_version: Operator set to write, 7 to 26; 0 lets the engine choose its best.
        dynamic_axes: Dynamic batch, sequence and past length.
        optimize_graph: Fuse for ONNX Runtime; false writes standard operators only.
        quantization: Levels of this format; when not set, those of ``optimization.quantization``.
    """

    enabled: bool = True
    opset_version: int = Field(default=0, examples=[0, *range(14, 25)])
    dynamic_axes: bool = True
    optimize_graph: bool = True
    quantization: Levels | None = None

    @field_validator("opset_version")
    @classmethod
    def _known_opset(cls, value: int) -> int:
        if value != 0 and not 7 <= value <= 26:
            raise PydanticCustomError(
                "opset",
                "{found} is no opset an engine writes",
                {"found": quoted(value), "remedy": "use 7 to 26, or 0 for the engine's best"},
            )
        return value


class DimensionRange(_Section):
    """Smallest, typical and largest value of one dynamic axis; ``[min, opt, max]`` is taken too."""

    min: int = Field(le=LARGEST)
    opt: int = Field(le=LARGEST)
    max: int = Field(le=LARGEST)

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == 3:
            return dict(zip(("min", "opt", "max"), value, strict=True))
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not 0 <= self.min <= self.opt <= self.max or self.max < 1:
            raise PydanticCustomError(
                "range",
                "{found} is not a range",
                {
                    "found": quoted([self.min, self.opt, self.max]),
                    "remedy": "use 0 <= min <= opt <= max, for example [1, 1, 8]",
                },
            )
        return self


class TensorRTConfiguration(_Section):
    """A TensorRT engine.

    Attributes:
        enabled: Whether it is delivered.
        builder: ``tensorrt`` (for the GPU of the machine it runs on), ``tensorrt_rtx`` (ahead of time for named targets).
        targets: GPU architectures to build for ahead of time, such as ``sm89``.
        batch: Shapes the engine is optimized for, smallest, typical and largest: rows.
        sequence: The same for new tokens per row and call.
        past: The same for tokens already in the KV cache.
    """

    enabled: bool = False
    builder: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    targets: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    batch: DimensionRange = DimensionRange(min=1, opt=1, max=8)
    sequence: DimensionRange = DimensionRange(min=1, opt=128, max=1024)
    past: DimensionRange = DimensionRange(min=0, opt=256, max=2048)

    @field_validator("targets")
    @classmethod
    def _architectures(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            if not re.fullmatch(r"sm[0-9]{2,3}", target):
                raise PydanticCustomError(
                    "target",
                    "{found} is not a GPU architecture",
                    {"found": quoted(target), "remedy": "write it like sm89"},
                )
        return tuple(dict.fromkeys(value))

    @field_validator("batch", "sequence")
    @classmethod
    def _at_least_one(cls, value: DimensionRange) -> DimensionRange:
        if value.min < 1:
            raise PydanticCustomError("range", "min is 0", {"remedy": "only past may start at 0: use 1 or more"})
        return value


class FormatsConfiguration(_Section):
    """The formats to deliver."""

    pytorch: PyTorchConfiguration = PyTorchConfiguration()
    onnx: OnnxConfiguration = OnnxConfiguration()
    tensorrt: TensorRTConfiguration = TensorRTConfiguration()


class ValidationConfiguration(_Section):
    """How outputs are compared with base + adapter.

    Attributes:
        enabled: Compare and report; without it nothing vouches for an output.
        test_samples: Samples of held-out text, 1 to 10000.
        compare_outputs: Compare logits, continuations and perplexity.
        benchmark_performance: Measure speed and memory.
        heldout: Folder of .txt files with text the model was not trained on; empty uses the built-in text.
        limits: Limits of the comparison that replace the table's (``services/validate/slipway_validate/judging/limits.py``), by the type that
            weights are stored in (float32, float16, bfloat16, int8, int4): ``{int4: {mean_kl: 0.03}}``, or
            ``int4.mean_kl=0.03,int8.top1_agreement=0.97`` as text. They are ``max_abs_diff``, ``mean_kl``, ``top1_agreement``,
            ``perplexity_ratio``, ``case_mean_kl`` and ``adapter_strength_error``.
    """

    enabled: bool = True
    test_samples: int = Field(default=10, ge=1, le=10_000)
    compare_outputs: bool = True
    benchmark_performance: bool = True
    heldout: Text = ""
    limits: Annotated[Mapping[str, LimitOverrides], BeforeValidator(by_level)] = Field(default_factory=dict)


class OutputConfiguration(_Section):
    """Where the result goes.

    Attributes:
        directory: Folder that holds the exports.
        naming_pattern: Name of this export's folder: ``{model_name}``, ``{timestamp}``, ``{checkpoint}``, ``{export_id}``.
    """

    directory: Text = Field(default="exported_models", min_length=1)
    naming_pattern: Text = "{model_name}_{timestamp}"

    @field_validator("directory")
    @classmethod
    def _local(cls, value: str) -> str:
        if is_address(value):
            details = {
                "found": quoted(value),
                "remedy": "name a folder here, and copy what it holds then to where it is to be",
            }
            raise PydanticCustomError("folder", "{found} is no folder of this machine", details)
        return value

    @field_validator("naming_pattern")
    @classmethod
    def _placeholders(cls, value: str) -> str:
        fault = pattern_fault(value)
        if fault:
            message, _, remedy = fault.partition("; ")
            raise PydanticCustomError("pattern", "{message}", {"message": message, "remedy": remedy})
        return value


class RecoveryConfiguration(_Section):
    """What happens after a stage fails.

    Attributes:
        profile: How cautious attempts are: ``conservative``, ``balanced`` or ``aggressive``; ``auto`` chooses from the model's
            size and history.
        max_attempts: Attempts of one task before its failure is final, 1 to 20.
    """

    profile: Literal["auto", "conservative", "balanced", "aggressive"] = "auto"
    max_attempts: int = Field(default=5, ge=1, le=20)


class ResourcesConfiguration(_Section):
    """What one stage may use.

    Attributes:
        max_memory_bytes: Anonymous memory a stage should stay below; 0 takes a share of what is free.
        threads: Threads of a stage's numeric libraries; 0 takes all cores.
        stage_timeout_seconds: Longest time one attempt of a stage may take.
        stage_timeouts: The same for single stages, by name: ``{validate: 7200}``, or ``validate=7200,merge=3600`` as text.
    """

    max_memory_bytes: int = Field(default=0, ge=0, le=LARGEST_BYTES)
    threads: int = Field(default=0, ge=0, le=1024)
    stage_timeout_seconds: Seconds = 86_400
    stage_timeouts: Annotated[Mapping[str, Seconds], BeforeValidator(by_stage)] = Field(default_factory=dict)


class LogConfiguration(_Section):
    """How much is logged.

    Attributes:
        level: Least severe messages that are logged: ``debug``, ``info``, ``warning`` or ``error``, in any case.
    """

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower_case)] = "info"


class Sections(_Section):
    """All settings of an export, each of them checked on its own."""

    checkpoint: CheckpointConfiguration = CheckpointConfiguration()
    combination: CombinationConfiguration = CombinationConfiguration()
    base_model: BaseModelConfiguration = BaseModelConfiguration()
    optimization: OptimizationConfiguration = OptimizationConfiguration()
    formats: FormatsConfiguration = FormatsConfiguration()
    validation: ValidationConfiguration = ValidationConfiguration()
    output: OutputConfiguration = OutputConfiguration()
    recovery: RecoveryConfiguration = RecoveryConfiguration()
    resources: ResourcesConfiguration = ResourcesConfiguration()
    log: LogConfiguration = LogConfiguration()

    def levels(self, format_name: Literal["pytorch", "onnx"]) -> tuple[Level, ...]:
        """Quantization levels delivered beside an enabled format: its own, otherwise the common ones."""
        own = self.formats.pytorch.quantization if format_name == "pytorch" else self.formats.onnx.quantization
        return self.optimization.quantization if own is None else own
