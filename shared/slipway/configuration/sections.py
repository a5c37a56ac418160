"""The sections of an export's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from slipway.configuration.formats import FormatsConfiguration
from slipway.configuration.naming import pattern_fault
from slipway.configuration.values import GROUP_SIZES, Levels, by_level, by_stage, is_none
from slipway.files.local_folders import is_address
from slipway.formats.settings import LevelSettings
from slipway.settings.sections import (
    LARGEST_BYTES,
    LARGEST_SEED,
    Level,
    Seconds,
    Section,
    Text,
    Texts,
    as_tuple,
    lower_case,
)
from slipway.texts import quoted
from slipway.validation.limits import LimitOverrides


def without_none(path: str) -> str:
    """Return the path of a checkpoint, empty for ``none``: a folder of that name is ``./none``."""
    return "" if is_none(path) else path


class CheckpointConfiguration(Section):
    """Where the fine-tuned adapter is.

    Attributes:
        path: Folder of a training run or of one checkpoint, here or at ``s3://bucket/prefix``, or an artifact's digest. Empty or
            ``none`` exports the model of ``base_model.name`` as it is, unless a request brings an adapter.
        auto_detect_latest: Take the newest healthy ``checkpoint-N`` of a training run.
        select: Which one of a run: its ``latest``, or the ``best`` by its own record (``best_model_checkpoint``).
    """

    path: Annotated[Text, AfterValidator(without_none)] = ""
    auto_detect_latest: bool = True
    select: Literal["latest", "best"] = "latest"


class CombinationConfiguration(Section):
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

    adapters: Texts = ()
    weights: Annotated[tuple[float, ...], BeforeValidator(as_tuple)] = ()
    type: Literal["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] = "cat"
    density: float = Field(default=0.5, gt=0, le=1)
    majority_sign: Literal["total", "frequency"] = "total"
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)


class BaseModelConfiguration(Section):
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


class OptimizationConfiguration(Section):
    """What is done to every format with quantization levels that does not say otherwise.

    Attributes:
        quantization: Levels delivered beside the unquantized format.
        group_size: Weights that share one scale, counted along a row: a power of two from 16 to 256.
        remove_artifacts: Leave training leftovers (optimizer, scheduler, RNG state) behind. They never travel: only true.
        compress_weights: Store integer weights packed, where the format can; false keeps them dense, rounded to the same grid.
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


class ValidationConfiguration(Section):
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
            ``perplexity_ratio``, ``case_mean_kl``, ``adapter_strength_error``, ``cosine_distance`` and ``relative_error``.
    """

    enabled: bool = True
    test_samples: int = Field(default=10, ge=1, le=10_000)
    compare_outputs: bool = True
    benchmark_performance: bool = True
    heldout: Text = ""
    limits: Annotated[Mapping[str, LimitOverrides], BeforeValidator(by_level)] = Field(default_factory=dict)


class OutputConfiguration(Section):
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


class RecoveryConfiguration(Section):
    """What happens after a stage fails.

    Attributes:
        profile: How cautious attempts are: ``conservative``, ``balanced`` or ``aggressive``; ``auto`` chooses from the model's
            size and history.
        max_attempts: Attempts of one task before its failure is final, 1 to 20.
    """

    profile: Literal["auto", "conservative", "balanced", "aggressive"] = "auto"
    max_attempts: int = Field(default=5, ge=1, le=20)


class ResourcesConfiguration(Section):
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


class LogConfiguration(Section):
    """How much is logged.

    Attributes:
        level: Least severe messages that are logged: ``debug``, ``info``, ``warning`` or ``error``, in any case.
    """

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower_case)] = "info"


class Sections(Section):
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

    def levels(self, format_name: str) -> tuple[Level, ...]:
        """Quantization levels of a format: its own, otherwise the common ones; none for one that has none."""
        section = self.formats[format_name]
        if not isinstance(section, LevelSettings):
            return ()
        return self.optimization.quantization if section.quantization is None else section.quantization
