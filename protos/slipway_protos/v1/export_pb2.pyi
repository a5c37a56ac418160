import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from . import configuration_pb2 as _configuration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExportView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPORT_VIEW_UNSPECIFIED: _ClassVar[ExportView]
    EXPORT_VIEW_SUMMARY: _ClassVar[ExportView]
    EXPORT_VIEW_FULL: _ClassVar[ExportView]

class ExportState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPORT_STATE_UNSPECIFIED: _ClassVar[ExportState]
    EXPORT_STATE_QUEUED: _ClassVar[ExportState]
    EXPORT_STATE_RUNNING: _ClassVar[ExportState]
    EXPORT_STATE_CANCELLING: _ClassVar[ExportState]
    EXPORT_STATE_SUCCEEDED: _ClassVar[ExportState]
    EXPORT_STATE_FAILED: _ClassVar[ExportState]
    EXPORT_STATE_CANCELLED: _ClassVar[ExportState]

class TaskState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_STATE_UNSPECIFIED: _ClassVar[TaskState]
    TASK_STATE_WAITING: _ClassVar[TaskState]
    TASK_STATE_QUEUED: _ClassVar[TaskState]
    TASK_STATE_RUNNING: _ClassVar[TaskState]
    TASK_STATE_SUCCEEDED: _ClassVar[TaskState]
    TASK_STATE_FAILED: _ClassVar[TaskState]
    TASK_STATE_CANCELLED: _ClassVar[TaskState]
    TASK_STATE_SKIPPED: _ClassVar[TaskState]

class ExportChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPORT_CHANGE_KIND_UNSPECIFIED: _ClassVar[ExportChangeKind]
    EXPORT_CHANGE_KIND_CREATED: _ClassVar[ExportChangeKind]
    EXPORT_CHANGE_KIND_STATE_CHANGED: _ClassVar[ExportChangeKind]
    EXPORT_CHANGE_KIND_DELETED: _ClassVar[ExportChangeKind]
EXPORT_VIEW_UNSPECIFIED: ExportView
EXPORT_VIEW_SUMMARY: ExportView
EXPORT_VIEW_FULL: ExportView
EXPORT_STATE_UNSPECIFIED: ExportState
EXPORT_STATE_QUEUED: ExportState
EXPORT_STATE_RUNNING: ExportState
EXPORT_STATE_CANCELLING: ExportState
EXPORT_STATE_SUCCEEDED: ExportState
EXPORT_STATE_FAILED: ExportState
EXPORT_STATE_CANCELLED: ExportState
TASK_STATE_UNSPECIFIED: TaskState
TASK_STATE_WAITING: TaskState
TASK_STATE_QUEUED: TaskState
TASK_STATE_RUNNING: TaskState
TASK_STATE_SUCCEEDED: TaskState
TASK_STATE_FAILED: TaskState
TASK_STATE_CANCELLED: TaskState
TASK_STATE_SKIPPED: TaskState
EXPORT_CHANGE_KIND_UNSPECIFIED: ExportChangeKind
EXPORT_CHANGE_KIND_CREATED: ExportChangeKind
EXPORT_CHANGE_KIND_STATE_CHANGED: ExportChangeKind
EXPORT_CHANGE_KIND_DELETED: ExportChangeKind

class Export(_message.Message):
    __slots__ = ("name", "configuration", "sources", "state", "error", "tasks", "outputs", "warnings", "recovery_profile", "trace_id", "etag", "create_time", "end_time", "labels", "priority", "creator")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class OutputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_PROFILE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    configuration: _configuration_pb2.ExportConfiguration
    sources: _containers.ScalarMap[str, str]
    state: ExportState
    error: _status_pb2.Status
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    outputs: _containers.ScalarMap[str, str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    recovery_profile: str
    trace_id: str
    etag: str
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    priority: int
    creator: str
    def __init__(self, name: _Optional[str] = ..., configuration: _Optional[_Union[_configuration_pb2.ExportConfiguration, _Mapping]] = ..., sources: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[ExportState, str]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., outputs: _Optional[_Mapping[str, str]] = ..., warnings: _Optional[_Iterable[str]] = ..., recovery_profile: _Optional[str] = ..., trace_id: _Optional[str] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., creator: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("id", "stage", "params", "inputs", "format", "state", "attempts", "outputs", "facts", "requested_format")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class OutputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FORMAT_FIELD_NUMBER: _ClassVar[int]
    id: str
    stage: str
    params: _struct_pb2.Struct
    inputs: _containers.ScalarMap[str, str]
    format: str
    state: TaskState
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    outputs: _containers.ScalarMap[str, str]
    facts: _struct_pb2.Struct
    requested_format: str
    def __init__(self, id: _Optional[str] = ..., stage: _Optional[str] = ..., params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., inputs: _Optional[_Mapping[str, str]] = ..., format: _Optional[str] = ..., state: _Optional[_Union[TaskState, str]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., outputs: _Optional[_Mapping[str, str]] = ..., facts: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., requested_format: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "state", "params", "worker", "error", "rule", "reused", "start_time", "end_time", "peak_memory_bytes", "note", "memory")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: TaskState
    params: _struct_pb2.Struct
    worker: str
    error: _status_pb2.Status
    rule: str
    reused: bool
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    peak_memory_bytes: int
    note: str
    memory: MemoryOverTime
    def __init__(self, number: _Optional[int] = ..., state: _Optional[_Union[TaskState, str]] = ..., params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., worker: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., rule: _Optional[str] = ..., reused: _Optional[bool] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., peak_memory_bytes: _Optional[int] = ..., note: _Optional[str] = ..., memory: _Optional[_Union[MemoryOverTime, _Mapping]] = ...) -> None: ...

class MemoryOverTime(_message.Message):
    __slots__ = ("sample_seconds", "samples_bytes")
    SAMPLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_BYTES_FIELD_NUMBER: _ClassVar[int]
    sample_seconds: float
    samples_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_seconds: _Optional[float] = ..., samples_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateExportRequest(_message.Message):
    __slots__ = ("parent", "export_id", "configuration", "sources", "labels", "validate_only", "request_id", "priority", "source_formats")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SourceFormatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PARENT_FIELD_NUMBER: _ClassVar[int]
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FORMATS_FIELD_NUMBER: _ClassVar[int]
    parent: str
    export_id: str
    configuration: _configuration_pb2.ExportConfiguration
    sources: _containers.ScalarMap[str, str]
    labels: _containers.ScalarMap[str, str]
    validate_only: bool
    request_id: str
    priority: int
    source_formats: _containers.ScalarMap[str, str]
    def __init__(self, parent: _Optional[str] = ..., export_id: _Optional[str] = ..., configuration: _Optional[_Union[_configuration_pb2.ExportConfiguration, _Mapping]] = ..., sources: _Optional[_Mapping[str, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., validate_only: _Optional[bool] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., source_formats: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetExportRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListExportsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token", "filter", "view", "order_by")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    filter: str
    view: ExportView
    order_by: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ..., view: _Optional[_Union[ExportView, str]] = ..., order_by: _Optional[str] = ...) -> None: ...

class ListExportsResponse(_message.Message):
    __slots__ = ("exports", "next_page_token")
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    exports: _containers.RepeatedCompositeFieldContainer[Export]
    next_page_token: str
    def __init__(self, exports: _Optional[_Iterable[_Union[Export, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelExportRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class RetryExportRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteExportRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteExportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchExportRequest(_message.Message):
    __slots__ = ("name", "after_sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class ExportEvent(_message.Message):
    __slots__ = ("sequence", "time", "export", "progress", "log")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    export: Export
    progress: TaskProgress
    log: LogLine
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., progress: _Optional[_Union[TaskProgress, _Mapping]] = ..., log: _Optional[_Union[LogLine, _Mapping]] = ...) -> None: ...

class TaskProgress(_message.Message):
    __slots__ = ("task", "attempt", "phase", "done", "total", "unit", "memory_bytes")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    task: str
    attempt: int
    phase: str
    done: int
    total: int
    unit: str
    memory_bytes: int
    def __init__(self, task: _Optional[str] = ..., attempt: _Optional[int] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("task", "level", "message")
    TASK_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    task: str
    level: str
    message: str
    def __init__(self, task: _Optional[str] = ..., level: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class WatchExportsRequest(_message.Message):
    __slots__ = ("parent", "filter", "cursor", "include_progress")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    parent: str
    filter: str
    cursor: str
    include_progress: bool
    def __init__(self, parent: _Optional[str] = ..., filter: _Optional[str] = ..., cursor: _Optional[str] = ..., include_progress: _Optional[bool] = ...) -> None: ...

class ExportsEvent(_message.Message):
    __slots__ = ("cursor", "time", "change", "progress", "bookmark")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    time: _timestamp_pb2.Timestamp
    change: ExportChange
    progress: ExportProgress
    bookmark: ExportsBookmark
    def __init__(self, cursor: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., change: _Optional[_Union[ExportChange, _Mapping]] = ..., progress: _Optional[_Union[ExportProgress, _Mapping]] = ..., bookmark: _Optional[_Union[ExportsBookmark, _Mapping]] = ...) -> None: ...

class ExportChange(_message.Message):
    __slots__ = ("kind", "export", "previous_state")
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_STATE_FIELD_NUMBER: _ClassVar[int]
    kind: ExportChangeKind
    export: Export
    previous_state: ExportState
    def __init__(self, kind: _Optional[_Union[ExportChangeKind, str]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., previous_state: _Optional[_Union[ExportState, str]] = ...) -> None: ...

class ExportProgress(_message.Message):
    __slots__ = ("export", "progress")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    export: str
    progress: TaskProgress
    def __init__(self, export: _Optional[str] = ..., progress: _Optional[_Union[TaskProgress, _Mapping]] = ...) -> None: ...

class ExportsBookmark(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
