"""The sections of an export's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from slipway.configuration.formats import FormatsConfiguration
from slipway.configuration.values import (
    GROUP_SIZES,
    LICENCE,
    Levels,
    check_destinations,
    check_limit_names,
    check_pattern,
    check_size_budget,
    check_stage_names,
    check_test_inputs,
    is_none,
)
from slipway.files.paths import is_address
from slipway.formats.registry import formats
from slipway.formats.settings import LevelSettings
from slipway.formats.targets import ALIASES, TARGETS, Target, target_name
from slipway.settings.problems import near_names
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
    wrong_value,
)
from slipway.sizes import parse_size_or_share
from slipway.validation.inputs import Effort
from slipway.validation.verdicts import LimitOverrides

_MOST_TIME = 7 * 24 * 3600
"""A week, in seconds."""


def without_none(path: str) -> str:
    """Return the path of a checkpoint, empty for ``none``: a folder of that name is ``./none``."""
    return "" if is_none(path) else path


def check_target(value: Any) -> Any:
    """Return the name of a target; refuse an unknown one with the near ones."""
    if not isinstance(value, str) or not value.strip():
        return value
    name = target_name(value)
    if name not in TARGETS:
        raise wrong_value(value, "is not a target", near_names(value, (*TARGETS, *ALIASES)))
    return name


class CheckpointConfiguration(Section):
    """The place of the fine-tuned adapter.

    Attributes:
        path: Folder of a training run or of one checkpoint, local or at ``s3://bucket/prefix``, or an artifact's digest. Empty or
            ``none`` exports the model of ``base_model.name`` as it is, unless a request brings an adapter.
        auto_detect_latest: Take the newest healthy ``checkpoint-N`` of a training run.
        select: The checkpoint to take from a run: the ``latest``, or the ``best`` by the run's own record (``best_model_checkpoint``).
    """

    path: Annotated[Text, AfterValidator(without_none)] = ""
    auto_detect_latest: bool = True
    select: Literal["latest", "best"] = "latest"


class CombinationConfiguration(Section):
    """The combination of several adapters into one, as peft's ``add_weighted_adapter`` does it.

    Attributes:
        adapters: Checkpoints or runs whose adapters are combined with that of ``checkpoint.path``; empty combines nothing.
        weights: One factor per adapter, the checkpoint's first; empty gives each 1.
        type: ``cat`` is the exact sum; ``linear``, ``ties``, ``dare_linear``, ``dare_ties`` and ``magnitude_prune`` mix the
            factors of adapters of the same rank.
        density: Share of the values that the pruning types keep, above 0 and at most 1.
        majority_sign: How the ``ties`` types elect a sign: ``total`` or ``frequency``.
        seed: Seed of the ``dare`` types, which prune at random.
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
        name: Folder, local or at ``s3://bucket/prefix``, repository id in the local Hugging Face cache,
            ``hf://owner/name@revision``, or an artifact's digest; empty takes the base that the adapter names.
        load_in_4bit: The adapter was trained on the 4-bit (NF4) base.
        merge_onto: ``original`` merges onto the base's own weights; ``nf4``, with ``load_in_4bit``, merges onto the weights after
            quantization to NF4 and back, as the adapter saw them in training.
        trust: Use the base even if files show that the adapter was trained on another one; the verdict is then amber.
        model_type: Kind of the base, in transformers' words (``bert``, ``llama`` …), if its ``config.json`` does not name it.
    """

    name: Text = ""
    load_in_4bit: bool = False
    merge_onto: Literal["original", "nf4"] = "original"
    trust: bool = False
    model_type: Text = ""


HEAD_BITS = (4, 8)
"""Widths of a head and of a table of token embeddings."""


class OptimizationConfiguration(Section):
    """Quantization of every format that has levels and no settings of its own for it.

    Attributes:
        quantization: Levels to deliver beside the unquantized format.
        group_size: Number of weights in a row that share one scale: a power of two from 16 to 256.
        method: How the integers of weights are chosen. ``rtn`` rounds to the nearest, without data and in seconds. ``awq``, ``gptq``
            and ``autoround`` choose them by their effect on text, for every integer level; ``auto`` takes the best of those that round layer by
            layer, for levels of 4 bits. If not set, it is ``auto`` where ``calibration`` is named or a ``calibration.jsonl`` lies beside the
            run, and ``rtn`` elsewhere.
        symmetric: Integers stand for multiples of the scale; false adds a zero point to each group of 4 bits whose integers are chosen by
            text. Their bytes are worth as much in wider layers (``docs/adr/0050-wide-layers.md``).
        wide_share: Share of the layers' weights that ``int4`` stores in 8 bits: those whose rounding costs the model's results the most, by
            their effect on text, or by the weights alone without it. ``size_budget`` takes its place.
        head_bits: Fewest bits of the head and of the table of token embeddings.
        time_budget: Work to spend on one level, in seconds of two usual cores; measured time would make the result depend on the
            machine's load.
        size_budget: Largest size of the weights of int4: a size such as ``400MiB``, or a share of the size that all weights have in 16
            bits, such as ``0.3`` or ``30%``. Within it, weights get 8 bits instead of 4 where that lowers the error most: by the
            divergence that each weight adds on held-out text if ``method`` calibrates, otherwise by an estimate from the
            weights alone. If empty, ``wide_share`` says how many do.
        calibration: Text for the methods other than ``rtn``: a file or folder of .txt, .jsonl, .json or .parquet files, with plain texts
            (``text``) or conversations (``messages``); also ``s3://bucket/prefix`` or an artifact's digest. If empty,
            ``calibration.jsonl`` in the folder of the checkpoint or of its run is used, unless a worker imports the checkpoint from
            an address; without it, a built-in text.
        remove_artifacts: Leave out training state (optimizer, scheduler, RNG). It is never exported, so only true is possible.
        compress_weights: Store integer weights packed if the format can; false stores them dense, rounded to the same grid.
    """

    quantization: Levels = ()
    group_size: int = Field(default=32, examples=list(GROUP_SIZES))
    method: Literal["auto", "rtn", "awq", "gptq", "autoround"] | None = None
    symmetric: bool = True
    wide_share: float = Field(default=0.22, ge=0, le=1)
    head_bits: int = Field(default=8, examples=[4, 8])
    time_budget: Annotated[Seconds, Field(le=_MOST_TIME)] = 600
    size_budget: Annotated[Text, BeforeValidator(check_size_budget)] = ""
    calibration: Text = ""
    remove_artifacts: bool = True
    compress_weights: bool = True

    @property
    def width_params(self) -> dict[str, int | float]:
        """Return which weights get more bits, as parameters of the quantization stage."""
        budget = parse_size_or_share(self.size_budget) if self.size_budget else 0
        if isinstance(budget, float):
            return {"size_budget_share": budget, "head_bits": self.head_bits}
        wide = {"size_budget_bytes": budget} if budget else {"wide_share": self.wide_share}
        return {**wide, "head_bits": self.head_bits}

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, value: int) -> int:
        if value not in GROUP_SIZES:
            nearest = min(GROUP_SIZES, key=lambda size: abs(size - value))
            raise wrong_value(value, "is not a power of two from 16 to 256", f"the nearest that works is {nearest}")
        return value

    @field_validator("head_bits")
    @classmethod
    def _check_head_bits(cls, value: int) -> int:
        if value not in HEAD_BITS:
            raise wrong_value(value, "is no width of stored integers", "use 8, or 4")
        return value

    @field_validator("remove_artifacts")
    @classmethod
    def _check_remove_artifacts(cls, value: bool) -> bool:
        if not value:
            fault = "is not possible: optimizer, scheduler and RNG state are never exported with a model"
            raise wrong_value(value, fault, "set it to true, and keep the checkpoint itself to resume training")
        return value


class ValidationConfiguration(Section):
    """How outputs are compared with base + adapter.

    Attributes:
        enabled: Compare and report; without it, outputs are delivered without proof.
        test_samples: Number of samples of held-out text, 1 to 10000.
        compare_outputs: Compare logits, continuations and perplexity.
        benchmark_performance: Measure speed and memory.
        effort: How much evidence is gathered. ``standard`` is the full evidence for a verdict; ``quick`` compares at most four samples and leaves out most
            shapes of the same inputs, continuations and timing beside the reference; ``thorough`` compares four times the samples,
            computes every shape, takes every round of timing, and continues texts by 256 tokens.
        continuation_tokens: Length of a long greedy continuation through the KV cache, where faults that begin late show; 0 leaves it out. If not
            set, ``thorough`` takes 256, and others leave it out.
        heldout: File or folder with text that the model was not trained on, in the same files as ``optimization.calibration``, conversations
            among them; empty uses the built-in text.
        test_input_samples: Inputs of your own with the expected answers: a .jsonl, .json or .txt file, a folder with one, or a list. What an input holds
            depends on the kind of model (``services/validate/README.md``): ``{prompt: "…", expected: "…"}`` for a decoder, ``{text: "…", label: "…"}``
            for a classifier, ``{audio: "clip.wav", text: "…"}`` for a speech model, in a file beside the sounds. Each output is judged by how much worse it answers than the fine-tuned model. The first 100 are answered.
        limits: Absolute limits beside those that follow from what is measured (``docs/verdicts.md``), by the stored type of the weights (float32,
            float16, bfloat16, int8, int4 and others): ``{int4: {mean_kl: 0.03}}``, or as text ``int4.mean_kl=0.03,int8.top1_agreement=0.97``. The limits are
            ``max_abs_diff``, ``mean_kl``, ``top1_agreement``, ``perplexity_ratio``, ``case_mean_kl``, ``adapter_strength_error``, ``cosine_distance``,
            ``relative_error``, ``module_strength_error``, ``module_weight_error`` and ``quality_loss``.
        on_failure: What follows if a quantized output fails. ``fallback`` makes it again by rule (integers chosen by a calibration, or smaller groups,
            the worst layers kept wider, the next wider level), validates it again, and fails if no rule is left; an ``int4`` output that passes
            with a warning is calibrated too, unless ``optimization.method`` says how it is rounded. ``fail`` fails the
            export, and still delivers the output for examination. ``keep`` delivers it with a warning, and the export succeeds.
            Whatever else fails validation (the merged model, an output that crashes) fails the export.
    """

    enabled: bool = True
    test_samples: int = Field(default=10, ge=1, le=10_000)
    compare_outputs: bool = True
    benchmark_performance: bool = True
    effort: Effort = "standard"
    continuation_tokens: int | None = Field(default=None, ge=0, le=4096, examples=[256])
    heldout: Text = ""
    test_input_samples: Annotated[Text | tuple[dict[str, Any], ...], BeforeValidator(check_test_inputs)] = ""
    limits: Annotated[Mapping[str, LimitOverrides], BeforeValidator(check_limit_names)] = Field(default_factory=dict)
    on_failure: Literal["fail", "fallback", "keep"] = "fallback"

    @property
    def continued_tokens(self) -> int:
        """Return the length of a long continuation; 0 for none."""
        if self.continuation_tokens is not None:
            return self.continuation_tokens
        return 256 if self.effort == "thorough" else 0


class OutputConfiguration(Section):
    """The place of the result.

    Attributes:
        directory: Folder that holds the exports.
        naming_pattern: Name of this export's folder: ``{model_name}``, ``{timestamp}``, ``{checkpoint}``, ``{export_id}``.
        target: Where the outputs shall run, in any case; ``ollama`` is another name of ``llama.cpp``. Where no format is named, the format and
            level that ``slipway recommend`` puts first for it are made; otherwise a warning names what is unfit for it.
        destinations: Addresses at which a successful export is published once it is delivered, as ``slipway publish`` takes them; they
            may have the placeholders of ``naming_pattern``.
        license: The model's licence for what is published, as an SPDX expression: ``Apache-2.0``.
    """

    directory: Text = Field(default="exported_models", min_length=1)
    naming_pattern: Text = "{model_name}_{timestamp}"
    target: Annotated[Target, BeforeValidator(check_target)] = ""
    destinations: Annotated[Texts, AfterValidator(check_destinations)] = Field(
        default=(), examples=["oci://registry.example.com/models/{model_name}:v1"]
    )
    license: Text = Field(default="", examples=["Apache-2.0"])

    @field_validator("license")
    @classmethod
    def _check_licence(cls, value: str) -> str:
        if value and LICENCE.fullmatch(value) is None:
            raise wrong_value(
                value, "is not an SPDX licence expression", "write one such as Apache-2.0, or 'MIT OR Apache-2.0'"
            )
        return value

    @field_validator("directory")
    @classmethod
    def _check_directory(cls, value: str) -> str:
        if is_address(value):
            remedy = "name a local folder, and copy its contents to the address after the export"
            raise wrong_value(value, "is not a folder of this machine", remedy)
        return value

    @field_validator("naming_pattern")
    @classmethod
    def _check_naming_pattern(cls, value: str) -> str:
        check_pattern(value)
        return value


class RecoveryConfiguration(Section):
    """The recovery of failed stages.

    Attributes:
        profile: Caution of the attempts: ``conservative``, ``balanced`` or ``aggressive``; ``auto`` begins with the most capable, and
            chooses by the model's size and history after a failure. A profile that is set also shapes the first attempt of
            formats with a choice (ONNX), as far as their own settings leave it open.
        max_attempts: Number of attempts of one task before its failure is final, 1 to 20.
    """

    profile: Literal["auto", "conservative", "balanced", "aggressive"] = "auto"
    max_attempts: int = Field(default=6, ge=1, le=20)


class ResourcesConfiguration(Section):
    """The resources that one stage may use.

    Attributes:
        max_memory_bytes: Anonymous memory that a stage should stay below; 0 takes a share of the free memory.
        threads: Threads of a stage's numeric libraries; 0 takes all cores.
        stage_timeout_seconds: Longest time that one attempt of a stage may take.
        stage_timeouts: The same for single stages, by name: ``{validate: 7200}``, or as text ``validate=7200,merge=3600``.
    """

    max_memory_bytes: int = Field(default=0, ge=0, le=LARGEST_BYTES)
    threads: int = Field(default=0, ge=0, le=1024)
    stage_timeout_seconds: Seconds = 86_400
    stage_timeouts: Annotated[Mapping[str, Seconds], BeforeValidator(check_stage_names)] = Field(default_factory=dict)


class ExecutionConfiguration(Section):
    """The division of large work into tasks that several workers can run, and that are made again alone after a failure.

    Attributes:
        split_bytes: Size of a model's weights above which merging and rounding it is divided, into parts of about this size; 0 divides nothing.
        shard_bytes: Largest weights file of a merged or rounded model, at least 1 MiB; 0 leaves it to the stages, which take 5 GB. A part has
            whole files, so smaller files allow more parts.
    """

    split_bytes: int = Field(default=0, ge=0, le=LARGEST_BYTES)
    shard_bytes: int = Field(default=0, ge=0, le=LARGEST_BYTES)

    @field_validator("shard_bytes")
    @classmethod
    def _check_shard_bytes(cls, value: int) -> int:
        if 0 < value < 1 << 20:
            raise ValueError("files of less than 1 MiB would be too many: set at least 1048576, or 0")
        return value


class LogConfiguration(Section):
    """The amount of logging.

    Attributes:
        level: Least severe level that is logged: ``debug``, ``info``, ``warning`` or ``error``, in upper or lower case.
    """

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower_case)] = "info"


class Sections(Section):
    """All settings of an export, each checked on its own."""

    checkpoint: CheckpointConfiguration = CheckpointConfiguration()
    combination: CombinationConfiguration = CombinationConfiguration()
    base_model: BaseModelConfiguration = BaseModelConfiguration()
    optimization: OptimizationConfiguration = OptimizationConfiguration()
    formats: FormatsConfiguration = FormatsConfiguration()
    validation: ValidationConfiguration = ValidationConfiguration()
    output: OutputConfiguration = OutputConfiguration()
    recovery: RecoveryConfiguration = RecoveryConfiguration()
    resources: ResourcesConfiguration = ResourcesConfiguration()
    execution: ExecutionConfiguration = ExecutionConfiguration()
    log: LogConfiguration = LogConfiguration()

    def levels(self, format_name: str) -> tuple[Level, ...]:
        """Return the quantization levels requested of a format: its own setting or the common one; empty if it has no levels."""
        unquantized = formats()[format_name].quantization.unquantized
        return tuple(level for level in self._requested_levels(format_name) if level != unquantized)

    def unquantized(self, format_name: str) -> bool:
        """Return whether a format is delivered unquantized: by its setting, or by another name in its levels."""
        section = self.formats[format_name]
        by_setting = not isinstance(section, LevelSettings) or section.unquantized
        return by_setting or formats()[format_name].quantization.unquantized in self._requested_levels(format_name)

    def _requested_levels(self, format_name: str) -> tuple[Level, ...]:
        section = self.formats[format_name]
        if not isinstance(section, LevelSettings):
            return ()
        return self.optimization.quantization if section.quantization is None else section.quantization
