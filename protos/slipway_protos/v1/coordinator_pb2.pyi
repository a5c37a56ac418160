import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_ACTIVE: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_ENDING: _ClassVar[WorkerState]

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_NO_WORKER: _ClassVar[WaitReason]
    WAIT_REASON_WORKER_UNFIT: _ClassVar[WaitReason]
    WAIT_REASON_WORKER_OUTDATED: _ClassVar[WaitReason]
    WAIT_REASON_WORKERS_DRAINING: _ClassVar[WaitReason]
    WAIT_REASON_NO_ROOM: _ClassVar[WaitReason]
    WAIT_REASON_POSTPONED: _ClassVar[WaitReason]
    WAIT_REASON_IMPORTING: _ClassVar[WaitReason]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_ACTIVE: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_ENDING: WorkerState
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_NO_WORKER: WaitReason
WAIT_REASON_WORKER_UNFIT: WaitReason
WAIT_REASON_WORKER_OUTDATED: WaitReason
WAIT_REASON_WORKERS_DRAINING: WaitReason
WAIT_REASON_NO_ROOM: WaitReason
WAIT_REASON_POSTPONED: WaitReason
WAIT_REASON_IMPORTING: WaitReason

class ListFormatsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListFormatsResponse(_message.Message):
    __slots__ = ("formats", "next_page_token", "validation_obstacle")
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    formats: _containers.RepeatedCompositeFieldContainer[Format]
    next_page_token: str
    validation_obstacle: _status_pb2.Status
    def __init__(self, formats: _Optional[_Iterable[_Union[Format, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., validation_obstacle: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Format(_message.Message):
    __slots__ = ("name", "title", "levels", "targets", "stages", "settings_schema", "available", "obstacle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    title: str
    levels: _containers.RepeatedCompositeFieldContainer[FormatLevel]
    targets: _containers.RepeatedCompositeFieldContainer[FormatTarget]
    stages: _containers.RepeatedScalarFieldContainer[str]
    settings_schema: _struct_pb2.Struct
    available: bool
    obstacle: _status_pb2.Status
    def __init__(self, name: _Optional[str] = ..., title: _Optional[str] = ..., levels: _Optional[_Iterable[_Union[FormatLevel, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[FormatTarget, _Mapping]]] = ..., stages: _Optional[_Iterable[str]] = ..., settings_schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., available: _Optional[bool] = ..., obstacle: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class FormatLevel(_message.Message):
    __slots__ = ("name", "stages", "available", "obstacle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    available: bool
    obstacle: _status_pb2.Status
    def __init__(self, name: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., available: _Optional[bool] = ..., obstacle: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class FormatTarget(_message.Message):
    __slots__ = ("name", "why", "levels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    levels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ..., levels: _Optional[_Iterable[str]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token", "hidden_workers", "queue")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    next_page_token: str
    hidden_workers: int
    queue: _containers.RepeatedCompositeFieldContainer[WaitingTasks]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., hidden_workers: _Optional[int] = ..., queue: _Optional[_Iterable[_Union[WaitingTasks, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "state", "stages", "slots", "running_tasks", "tasks", "machine", "join_time", "report_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TASKS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIME_FIELD_NUMBER: _ClassVar[int]
    REPORT_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: WorkerState
    stages: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    running_tasks: int
    tasks: _containers.RepeatedCompositeFieldContainer[WorkerTask]
    machine: WorkerMachine
    join_time: _timestamp_pb2.Timestamp
    report_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., stages: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ..., running_tasks: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[WorkerTask, _Mapping]]] = ..., machine: _Optional[_Union[WorkerMachine, _Mapping]] = ..., join_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., report_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class WorkerTask(_message.Message):
    __slots__ = ("export", "task", "attempt", "stage")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    export: str
    task: str
    attempt: int
    stage: str
    def __init__(self, export: _Optional[str] = ..., task: _Optional[str] = ..., attempt: _Optional[int] = ..., stage: _Optional[str] = ...) -> None: ...

class WorkerMachine(_message.Message):
    __slots__ = ("task_memory_bytes", "processors", "gpu_architecture", "gpu_memory_bytes", "scratch_bytes")
    TASK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    GPU_ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    task_memory_bytes: int
    processors: int
    gpu_architecture: str
    gpu_memory_bytes: int
    scratch_bytes: int
    def __init__(self, task_memory_bytes: _Optional[int] = ..., processors: _Optional[int] = ..., gpu_architecture: _Optional[str] = ..., gpu_memory_bytes: _Optional[int] = ..., scratch_bytes: _Optional[int] = ...) -> None: ...

class WaitingTasks(_message.Message):
    __slots__ = ("stage", "project", "count", "oldest_age_seconds", "reason", "detail")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    project: str
    count: int
    oldest_age_seconds: float
    reason: WaitReason
    detail: str
    def __init__(self, stage: _Optional[str] = ..., project: _Optional[str] = ..., count: _Optional[int] = ..., oldest_age_seconds: _Optional[float] = ..., reason: _Optional[_Union[WaitReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class ListProjectsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListProjectsResponse(_message.Message):
    __slots__ = ("projects", "next_page_token")
    PROJECTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    projects: _containers.RepeatedCompositeFieldContainer[Project]
    next_page_token: str
    def __init__(self, projects: _Optional[_Iterable[_Union[Project, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Project(_message.Message):
    __slots__ = ("name", "limits", "usage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: ProjectLimits
    usage: ProjectUsage
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[ProjectLimits, _Mapping]] = ..., usage: _Optional[_Union[ProjectUsage, _Mapping]] = ...) -> None: ...

class ProjectLimits(_message.Message):
    __slots__ = ("weight", "highest_priority", "unended_exports", "stored_bytes", "gpu_seconds")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    UNENDED_EXPORTS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    weight: int
    highest_priority: int
    unended_exports: int
    stored_bytes: int
    gpu_seconds: int
    def __init__(self, weight: _Optional[int] = ..., highest_priority: _Optional[int] = ..., unended_exports: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., gpu_seconds: _Optional[int] = ...) -> None: ...

class ProjectUsage(_message.Message):
    __slots__ = ("unended_exports", "stored_bytes", "unmeasured_artifacts", "gpu_seconds")
    UNENDED_EXPORTS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNMEASURED_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    unended_exports: int
    stored_bytes: int
    unmeasured_artifacts: int
    gpu_seconds: float
    def __init__(self, unended_exports: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., unmeasured_artifacts: _Optional[int] = ..., gpu_seconds: _Optional[float] = ...) -> None: ...
