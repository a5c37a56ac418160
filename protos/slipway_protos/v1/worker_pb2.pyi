import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.rpc import status_pb2 as _status_pb2
from . import export_pb2 as _export_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SynchronizeRequest(_message.Message):
    __slots__ = ("worker_id", "stages", "capabilities", "free_slots", "draining", "running", "max_wait", "ending", "parameters", "slots", "only_task", "held")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StageParameters
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StageParameters, _Mapping]] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ONLY_TASK_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    capabilities: Capabilities
    free_slots: int
    draining: bool
    running: _containers.RepeatedCompositeFieldContainer[RunningTask]
    max_wait: _duration_pb2.Duration
    ending: bool
    parameters: _containers.MessageMap[str, StageParameters]
    slots: int
    only_task: str
    held: HeldArtifacts
    def __init__(self, worker_id: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., free_slots: _Optional[int] = ..., draining: _Optional[bool] = ..., running: _Optional[_Iterable[_Union[RunningTask, _Mapping]]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ending: _Optional[bool] = ..., parameters: _Optional[_Mapping[str, StageParameters]] = ..., slots: _Optional[int] = ..., only_task: _Optional[str] = ..., held: _Optional[_Union[HeldArtifacts, _Mapping]] = ...) -> None: ...

class HeldArtifacts(_message.Message):
    __slots__ = ("artifacts",)
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, artifacts: _Optional[_Iterable[int]] = ...) -> None: ...

class StageParameters(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("gpu_architecture", "gpu_memory_bytes", "memory_bytes", "scratch_bytes", "versions", "processors", "gpus")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GPU_ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    gpu_architecture: str
    gpu_memory_bytes: int
    memory_bytes: int
    scratch_bytes: int
    versions: _containers.ScalarMap[str, str]
    processors: int
    gpus: int
    def __init__(self, gpu_architecture: _Optional[str] = ..., gpu_memory_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., scratch_bytes: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., processors: _Optional[int] = ..., gpus: _Optional[int] = ...) -> None: ...

class RunningTask(_message.Message):
    __slots__ = ("task", "lease_epoch", "progress", "logs")
    TASK_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    task: str
    lease_epoch: int
    progress: _export_pb2.TaskProgress
    logs: _containers.RepeatedCompositeFieldContainer[_export_pb2.LogLine]
    def __init__(self, task: _Optional[str] = ..., lease_epoch: _Optional[int] = ..., progress: _Optional[_Union[_export_pb2.TaskProgress, _Mapping]] = ..., logs: _Optional[_Iterable[_Union[_export_pb2.LogLine, _Mapping]]] = ...) -> None: ...

class SynchronizeResponse(_message.Message):
    __slots__ = ("lease_ttl", "cancel_tasks", "leases")
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TASKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    lease_ttl: _duration_pb2.Duration
    cancel_tasks: _containers.RepeatedScalarFieldContainer[str]
    leases: _containers.RepeatedCompositeFieldContainer[TaskLease]
    def __init__(self, lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cancel_tasks: _Optional[_Iterable[str]] = ..., leases: _Optional[_Iterable[_Union[TaskLease, _Mapping]]] = ...) -> None: ...

class TaskLease(_message.Message):
    __slots__ = ("task", "lease_epoch", "stage", "params", "inputs", "timeout", "max_memory_bytes", "threads", "traceparent")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TASK_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    task: str
    lease_epoch: int
    stage: str
    params: _struct_pb2.Struct
    inputs: _containers.ScalarMap[str, str]
    timeout: _duration_pb2.Duration
    max_memory_bytes: int
    threads: int
    traceparent: str
    def __init__(self, task: _Optional[str] = ..., lease_epoch: _Optional[int] = ..., stage: _Optional[str] = ..., params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., inputs: _Optional[_Mapping[str, str]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_memory_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CompleteTaskRequest(_message.Message):
    __slots__ = ("worker_id", "task", "lease_epoch", "output", "error", "cancelled", "peak_memory_bytes", "logs", "memory")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    task: str
    lease_epoch: int
    output: TaskOutput
    error: _status_pb2.Status
    cancelled: _empty_pb2.Empty
    peak_memory_bytes: int
    logs: _containers.RepeatedCompositeFieldContainer[_export_pb2.LogLine]
    memory: _export_pb2.MemoryOverTime
    def __init__(self, worker_id: _Optional[str] = ..., task: _Optional[str] = ..., lease_epoch: _Optional[int] = ..., output: _Optional[_Union[TaskOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., cancelled: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., peak_memory_bytes: _Optional[int] = ..., logs: _Optional[_Iterable[_Union[_export_pb2.LogLine, _Mapping]]] = ..., memory: _Optional[_Union[_export_pb2.MemoryOverTime, _Mapping]] = ...) -> None: ...

class TaskOutput(_message.Message):
    __slots__ = ("outputs", "facts", "reused")
    class OutputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.ScalarMap[str, str]
    facts: _struct_pb2.Struct
    reused: bool
    def __init__(self, outputs: _Optional[_Mapping[str, str]] = ..., facts: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., reused: _Optional[bool] = ...) -> None: ...

class CompleteTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
