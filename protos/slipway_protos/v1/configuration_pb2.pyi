from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExportConfiguration(_message.Message):
    __slots__ = ("checkpoint", "base_model", "optimization", "formats", "validation", "output", "recovery", "resources", "log", "combination")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZATION_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    COMBINATION_FIELD_NUMBER: _ClassVar[int]
    checkpoint: CheckpointConfiguration
    base_model: BaseModelConfiguration
    optimization: OptimizationConfiguration
    formats: FormatsConfiguration
    validation: ValidationConfiguration
    output: OutputConfiguration
    recovery: RecoveryConfiguration
    resources: ResourcesConfiguration
    log: LogConfiguration
    combination: CombinationConfiguration
    def __init__(self, checkpoint: _Optional[_Union[CheckpointConfiguration, _Mapping]] = ..., base_model: _Optional[_Union[BaseModelConfiguration, _Mapping]] = ..., optimization: _Optional[_Union[OptimizationConfiguration, _Mapping]] = ..., formats: _Optional[_Union[FormatsConfiguration, _Mapping]] = ..., validation: _Optional[_Union[ValidationConfiguration, _Mapping]] = ..., output: _Optional[_Union[OutputConfiguration, _Mapping]] = ..., recovery: _Optional[_Union[RecoveryConfiguration, _Mapping]] = ..., resources: _Optional[_Union[ResourcesConfiguration, _Mapping]] = ..., log: _Optional[_Union[LogConfiguration, _Mapping]] = ..., combination: _Optional[_Union[CombinationConfiguration, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("name", "load_in_4bit", "merge_onto", "trust")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_IN_4BIT_FIELD_NUMBER: _ClassVar[int]
    MERGE_ONTO_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    name: str
    load_in_4bit: bool
    merge_onto: str
    trust: bool
    def __init__(self, name: _Optional[str] = ..., load_in_4bit: _Optional[bool] = ..., merge_onto: _Optional[str] = ..., trust: _Optional[bool] = ...) -> None: ...

class QuantizationLevels(_message.Message):
    __slots__ = ("levels",)
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, levels: _Optional[_Iterable[str]] = ...) -> None: ...

class OptimizationConfiguration(_message.Message):
    __slots__ = ("quantization", "group_size", "remove_artifacts", "compress_weights")
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    quantization: QuantizationLevels
    group_size: int
    remove_artifacts: bool
    compress_weights: bool
    def __init__(self, quantization: _Optional[_Union[QuantizationLevels, _Mapping]] = ..., group_size: _Optional[int] = ..., remove_artifacts: _Optional[bool] = ..., compress_weights: _Optional[bool] = ...) -> None: ...

class FormatsConfiguration(_message.Message):
    __slots__ = ("pytorch", "onnx", "tensorrt")
    PYTORCH_FIELD_NUMBER: _ClassVar[int]
    ONNX_FIELD_NUMBER: _ClassVar[int]
    TENSORRT_FIELD_NUMBER: _ClassVar[int]
    pytorch: PyTorchConfiguration
    onnx: OnnxConfiguration
    tensorrt: TensorRTConfiguration
    def __init__(self, pytorch: _Optional[_Union[PyTorchConfiguration, _Mapping]] = ..., onnx: _Optional[_Union[OnnxConfiguration, _Mapping]] = ..., tensorrt: _Optional[_Union[TensorRTConfiguration, _Mapping]] = ...) -> None: ...

class PyTorchConfiguration(_message.Message):
    __slots__ = ("enabled", "save_tokenizer", "quantization")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    SAVE_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    save_tokenizer: bool
    quantization: QuantizationLevels
    def __init__(self, enabled: _Optional[bool] = ..., save_tokenizer: _Optional[bool] = ..., quantization: _Optional[_Union[QuantizationLevels, _Mapping]] = ...) -> None: ...

class OnnxConfiguration(_message.Message):
    __slots__ = ("enabled", "opset_version", "dynamic_axes", "optimize_graph", "quantization")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    OPSET_VERSION_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_AXES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZE_GRAPH_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    opset_version: int
    dynamic_axes: bool
    optimize_graph: bool
    quantization: QuantizationLevels
    def __init__(self, enabled: _Optional[bool] = ..., opset_version: _Optional[int] = ..., dynamic_axes: _Optional[bool] = ..., optimize_graph: _Optional[bool] = ..., quantization: _Optional[_Union[QuantizationLevels, _Mapping]] = ...) -> None: ...

class TensorRTConfiguration(_message.Message):
    __slots__ = ("enabled", "builder", "targets", "batch", "sequence", "past")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    BUILDER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    builder: str
    targets: _containers.RepeatedScalarFieldContainer[str]
    batch: DimensionRange
    sequence: DimensionRange
    past: DimensionRange
    def __init__(self, enabled: _Optional[bool] = ..., builder: _Optional[str] = ..., targets: _Optional[_Iterable[str]] = ..., batch: _Optional[_Union[DimensionRange, _Mapping]] = ..., sequence: _Optional[_Union[DimensionRange, _Mapping]] = ..., past: _Optional[_Union[DimensionRange, _Mapping]] = ...) -> None: ...

class DimensionRange(_message.Message):
    __slots__ = ("min", "opt", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    OPT_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: int
    opt: int
    max: int
    def __init__(self, min: _Optional[int] = ..., opt: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class ValidationConfiguration(_message.Message):
    __slots__ = ("enabled", "test_samples", "compare_outputs", "benchmark_performance", "heldout", "limits")
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
    enabled: bool
    test_samples: int
    compare_outputs: bool
    benchmark_performance: bool
    heldout: str
    limits: _containers.MessageMap[str, LimitOverrides]
    def __init__(self, enabled: _Optional[bool] = ..., test_samples: _Optional[int] = ..., compare_outputs: _Optional[bool] = ..., benchmark_performance: _Optional[bool] = ..., heldout: _Optional[str] = ..., limits: _Optional[_Mapping[str, LimitOverrides]] = ...) -> None: ...

class LimitOverrides(_message.Message):
    __slots__ = ("max_abs_diff", "mean_kl", "top1_agreement", "perplexity_ratio", "case_mean_kl", "adapter_strength_error")
    MAX_ABS_DIFF_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    CASE_MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_STRENGTH_ERROR_FIELD_NUMBER: _ClassVar[int]
    max_abs_diff: float
    mean_kl: float
    top1_agreement: float
    perplexity_ratio: float
    case_mean_kl: float
    adapter_strength_error: float
    def __init__(self, max_abs_diff: _Optional[float] = ..., mean_kl: _Optional[float] = ..., top1_agreement: _Optional[float] = ..., perplexity_ratio: _Optional[float] = ..., case_mean_kl: _Optional[float] = ..., adapter_strength_error: _Optional[float] = ...) -> None: ...

class OutputConfiguration(_message.Message):
    __slots__ = ("directory", "naming_pattern")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAMING_PATTERN_FIELD_NUMBER: _ClassVar[int]
    directory: str
    naming_pattern: str
    def __init__(self, directory: _Optional[str] = ..., naming_pattern: _Optional[str] = ...) -> None: ...

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

class LogConfiguration(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...
