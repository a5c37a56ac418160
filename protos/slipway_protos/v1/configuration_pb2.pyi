from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExportConfiguration(_message.Message):
    __slots__ = ("checkpoint", "base_model", "optimization", "validation", "output", "recovery", "resources", "log", "combination", "formats", "execution")
    class FormatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FormatConfiguration
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FormatConfiguration, _Mapping]] = ...) -> None: ...
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    COMBINATION_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    checkpoint: CheckpointConfiguration
    base_model: BaseModelConfiguration
    optimization: OptimizationConfiguration
    validation: ValidationConfiguration
    output: OutputConfiguration
    recovery: RecoveryConfiguration
    resources: ResourcesConfiguration
    log: LogConfiguration
    combination: CombinationConfiguration
    formats: _containers.MessageMap[str, FormatConfiguration]
    execution: ExecutionConfiguration
    def __init__(self, checkpoint: _Optional[_Union[CheckpointConfiguration, _Mapping]] = ..., base_model: _Optional[_Union[BaseModelConfiguration, _Mapping]] = ..., optimization: _Optional[_Union[OptimizationConfiguration, _Mapping]] = ..., validation: _Optional[_Union[ValidationConfiguration, _Mapping]] = ..., output: _Optional[_Union[OutputConfiguration, _Mapping]] = ..., recovery: _Optional[_Union[RecoveryConfiguration, _Mapping]] = ..., resources: _Optional[_Union[ResourcesConfiguration, _Mapping]] = ..., log: _Optional[_Union[LogConfiguration, _Mapping]] = ..., combination: _Optional[_Union[CombinationConfiguration, _Mapping]] = ..., formats: _Optional[_Mapping[str, FormatConfiguration]] = ..., execution: _Optional[_Union[ExecutionConfiguration, _Mapping]] = ...) -> None: ...

class CheckpointConfiguration(_message.Message):
    __slots__ = ("path", "auto_detect_latest", "select")
    PATH_FIELD_NUMBER: _ClassVar[int]
    AUTO_DETECT_LATEST_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    path: str
    auto_detect_latest: bool
    select: str
    def __init__(self, path: _Optional[str] = ..., auto_detect_latest: _Optional[bool] = ..., select: _Optional[str] = ...) -> None: ...

class CombinationConfiguration(_message.Message):
    __slots__ = ("adapters", "weights", "type", "density", "majority_sign", "seed")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    MAJORITY_SIGN_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    type: str
    density: float
    majority_sign: str
    seed: int
    def __init__(self, adapters: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ..., type: _Optional[str] = ..., density: _Optional[float] = ..., majority_sign: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class BaseModelConfiguration(_message.Message):
    __slots__ = ("name", "load_in_4bit", "merge_onto", "trust", "model_type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_IN_4BIT_FIELD_NUMBER: _ClassVar[int]
    MERGE_ONTO_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    load_in_4bit: bool
    merge_onto: str
    trust: bool
    model_type: str
    def __init__(self, name: _Optional[str] = ..., load_in_4bit: _Optional[bool] = ..., merge_onto: _Optional[str] = ..., trust: _Optional[bool] = ..., model_type: _Optional[str] = ...) -> None: ...

class QuantizationLevels(_message.Message):
    __slots__ = ("levels",)
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, levels: _Optional[_Iterable[str]] = ...) -> None: ...

class OptimizationConfiguration(_message.Message):
    __slots__ = ("quantization", "group_size", "remove_artifacts", "compress_weights", "method", "symmetric", "time_budget", "calibration", "size_budget", "wide_share", "head_bits")
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    TIME_BUDGET_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    WIDE_SHARE_FIELD_NUMBER: _ClassVar[int]
    HEAD_BITS_FIELD_NUMBER: _ClassVar[int]
    quantization: QuantizationLevels
    group_size: int
    remove_artifacts: bool
    compress_weights: bool
    method: str
    symmetric: bool
    time_budget: int
    calibration: str
    size_budget: str
    wide_share: float
    head_bits: int
    def __init__(self, quantization: _Optional[_Union[QuantizationLevels, _Mapping]] = ..., group_size: _Optional[int] = ..., remove_artifacts: _Optional[bool] = ..., compress_weights: _Optional[bool] = ..., method: _Optional[str] = ..., symmetric: _Optional[bool] = ..., time_budget: _Optional[int] = ..., calibration: _Optional[str] = ..., size_budget: _Optional[str] = ..., wide_share: _Optional[float] = ..., head_bits: _Optional[int] = ...) -> None: ...

class FormatConfiguration(_message.Message):
    __slots__ = ("enabled", "unquantized", "quantization", "settings")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    UNQUANTIZED_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    unquantized: bool
    quantization: QuantizationLevels
    settings: _struct_pb2.Struct
    def __init__(self, enabled: _Optional[bool] = ..., unquantized: _Optional[bool] = ..., quantization: _Optional[_Union[QuantizationLevels, _Mapping]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ValidationConfiguration(_message.Message):
    __slots__ = ("enabled", "test_samples", "compare_outputs", "benchmark_performance", "heldout", "limits", "effort", "on_failure", "continuation_tokens", "test_input_samples")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LimitOverrides
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LimitOverrides, _Mapping]] = ...) -> None: ...
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    TEST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COMPARE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    BENCHMARK_PERFORMANCE_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEST_INPUT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    test_samples: int
    compare_outputs: bool
    benchmark_performance: bool
    heldout: str
    limits: _containers.MessageMap[str, LimitOverrides]
    effort: str
    on_failure: str
    continuation_tokens: int
    test_input_samples: _struct_pb2.Value
    def __init__(self, enabled: _Optional[bool] = ..., test_samples: _Optional[int] = ..., compare_outputs: _Optional[bool] = ..., benchmark_performance: _Optional[bool] = ..., heldout: _Optional[str] = ..., limits: _Optional[_Mapping[str, LimitOverrides]] = ..., effort: _Optional[str] = ..., on_failure: _Optional[str] = ..., continuation_tokens: _Optional[int] = ..., test_input_samples: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...

class LimitOverrides(_message.Message):
    __slots__ = ("max_abs_diff", "mean_kl", "top1_agreement", "perplexity_ratio", "case_mean_kl", "adapter_strength_error", "cosine_distance", "relative_error", "module_strength_error", "module_weight_error", "quality_loss")
    MAX_ABS_DIFF_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    CASE_MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_STRENGTH_ERROR_FIELD_NUMBER: _ClassVar[int]
    COSINE_DISTANCE_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MODULE_STRENGTH_ERROR_FIELD_NUMBER: _ClassVar[int]
    MODULE_WEIGHT_ERROR_FIELD_NUMBER: _ClassVar[int]
    QUALITY_LOSS_FIELD_NUMBER: _ClassVar[int]
    max_abs_diff: float
    mean_kl: float
    top1_agreement: float
    perplexity_ratio: float
    case_mean_kl: float
    adapter_strength_error: float
    cosine_distance: float
    relative_error: float
    module_strength_error: float
    module_weight_error: float
    quality_loss: float
    def __init__(self, max_abs_diff: _Optional[float] = ..., mean_kl: _Optional[float] = ..., top1_agreement: _Optional[float] = ..., perplexity_ratio: _Optional[float] = ..., case_mean_kl: _Optional[float] = ..., adapter_strength_error: _Optional[float] = ..., cosine_distance: _Optional[float] = ..., relative_error: _Optional[float] = ..., module_strength_error: _Optional[float] = ..., module_weight_error: _Optional[float] = ..., quality_loss: _Optional[float] = ...) -> None: ...

class OutputConfiguration(_message.Message):
    __slots__ = ("directory", "naming_pattern", "target", "destinations", "license")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAMING_PATTERN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    LICENSE_FIELD_NUMBER: _ClassVar[int]
    directory: str
    naming_pattern: str
    target: str
    destinations: _containers.RepeatedScalarFieldContainer[str]
    license: str
    def __init__(self, directory: _Optional[str] = ..., naming_pattern: _Optional[str] = ..., target: _Optional[str] = ..., destinations: _Optional[_Iterable[str]] = ..., license: _Optional[str] = ...) -> None: ...

class RecoveryConfiguration(_message.Message):
    __slots__ = ("profile", "max_attempts")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    profile: str
    max_attempts: int
    def __init__(self, profile: _Optional[str] = ..., max_attempts: _Optional[int] = ...) -> None: ...

class ResourcesConfiguration(_message.Message):
    __slots__ = ("max_memory_bytes", "threads", "stage_timeout_seconds", "stage_timeouts")
    class StageTimeoutsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MAX_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    max_memory_bytes: int
    threads: int
    stage_timeout_seconds: int
    stage_timeouts: _containers.ScalarMap[str, int]
    def __init__(self, max_memory_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., stage_timeout_seconds: _Optional[int] = ..., stage_timeouts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ExecutionConfiguration(_message.Message):
    __slots__ = ("split_bytes", "shard_bytes")
    SPLIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    split_bytes: int
    shard_bytes: int
    def __init__(self, split_bytes: _Optional[int] = ..., shard_bytes: _Optional[int] = ...) -> None: ...

class LogConfiguration(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...
