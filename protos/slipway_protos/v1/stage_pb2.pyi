from google.protobuf import struct_pb2 as _struct_pb2
from google.rpc import status_pb2 as _status_pb2
from . import export_pb2 as _export_pb2
from . import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("stages", "capabilities")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageDescription]
    capabilities: _worker_pb2.Capabilities
    def __init__(self, stages: _Optional[_Iterable[_Union[StageDescription, _Mapping]]] = ..., capabilities: _Optional[_Union[_worker_pb2.Capabilities, _Mapping]] = ...) -> None: ...

class StageDescription(_message.Message):
    __slots__ = ("name", "version", "inputs", "outputs", "more_inputs", "params_json_schema", "versions", "providers")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MORE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    inputs: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    more_inputs: bool
    params_json_schema: _struct_pb2.Struct
    versions: _containers.ScalarMap[str, str]
    providers: _containers.RepeatedCompositeFieldContainer[Provider]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., inputs: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[str]] = ..., more_inputs: _Optional[bool] = ..., params_json_schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., providers: _Optional[_Iterable[_Union[Provider, _Mapping]]] = ...) -> None: ...

class Provider(_message.Message):
    __slots__ = ("name", "available", "version", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    available: bool
    version: str
    detail: str
    def __init__(self, name: _Optional[str] = ..., available: _Optional[bool] = ..., version: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("stage", "params", "inputs")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    params: _struct_pb2.Struct
    inputs: _containers.ScalarMap[str, str]
    def __init__(self, stage: _Optional[str] = ..., params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., inputs: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("progress", "log", "output", "error")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    progress: _export_pb2.TaskProgress
    log: _export_pb2.LogLine
    output: _worker_pb2.TaskOutput
    error: _status_pb2.Status
    def __init__(self, progress: _Optional[_Union[_export_pb2.TaskProgress, _Mapping]] = ..., log: _Optional[_Union[_export_pb2.LogLine, _Mapping]] = ..., output: _Optional[_Union[_worker_pb2.TaskOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
