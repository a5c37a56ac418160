"""The table of reasons: what each failure's stable name stands for, and which exit code and gRPC status follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

EXIT_CODES: Mapping[int, str] = {
    0: "done",
    2: "usage",
    3: "invalid input",
    4: "validation failed",
    5: "out of a resource",
    6: "unsupported",
    7: "unavailable, try again",
    130: "interrupted",
    141: "whoever read the output has closed it",
    1: "a fault of Slipway itself: please report it",
}
"""What a command's exit code says to a script."""


class Category(Enum):
    """What kind of failure a reason is: decides the exit code and the gRPC status code.

    Only what nobody foresaw is ``INTERNAL``: a limit of a library with this model is ``UNSUPPORTED``, a result that a check
    refuses is ``VALIDATION``, and a process that something else ended is ``ABORTED``.
    """

    USAGE = (2, "INVALID_ARGUMENT")
    INVALID_INPUT = (3, "INVALID_ARGUMENT")
    NOT_FOUND = (3, "NOT_FOUND")
    CONFLICT = (3, "ALREADY_EXISTS")
    UNAUTHENTICATED = (3, "UNAUTHENTICATED")
    FORBIDDEN = (3, "PERMISSION_DENIED")
    PRECONDITION = (3, "FAILED_PRECONDITION")
    VALIDATION = (4, "FAILED_PRECONDITION")
    RESOURCE = (5, "RESOURCE_EXHAUSTED")
    UNSUPPORTED = (6, "UNIMPLEMENTED")
    UNAVAILABLE = (7, "UNAVAILABLE")
    ABORTED = (7, "ABORTED")
    TIMEOUT = (7, "DEADLINE_EXCEEDED")
    DATA_LOSS = (7, "DATA_LOSS")
    CANCELLED = (130, "CANCELLED")
    INTERNAL = (1, "INTERNAL")

    @property
    def exit_code(self) -> int:
        """Exit code of the command line for this kind of failure."""
        return self.value[0]

    @property
    def status_code(self) -> str:
        """Name of the gRPC status code, as in :class:`grpc.StatusCode`."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Reason:
    """One row of the table of reasons: its category, whether repeating the same attempt can help, and its meaning."""

    category: Category
    meaning: str
    retryable: bool = False


_C = Category
REASONS: Mapping[str, Reason] = {
    # Configuration and command line
    "USAGE": Reason(_C.USAGE, "the command line is not valid: an unknown command or option, or a missing argument"),
    "CONFIGURATION_INVALID": Reason(_C.INVALID_INPUT, "one or more settings are unknown, impossible or in conflict"),
    "CONFIGURATION_NOT_FOUND": Reason(_C.INVALID_INPUT, "the configuration file does not exist or cannot be read"),
    "PARAMS_INVALID": Reason(_C.INVALID_INPUT, "a stage was given parameters that its model refuses"),
    "STAGE_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution brings a stage of this name"),
    "FORMAT_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution brings a format of this name"),
    "FORMAT_INVALID": Reason(
        _C.INVALID_INPUT, "an installed format cannot be loaded, plans what cannot run, or clashes with another one"
    ),
    "INPUT_MISSING": Reason(_C.INVALID_INPUT, "a stage was not given one of its inputs, or one it does not know"),
    # Base model and checkpoint
    "BASE_MODEL_NOT_FOUND": Reason(
        _C.NOT_FOUND, "the base model is neither a folder nor in the local Hugging Face cache"
    ),
    "BASE_MODEL_INVALID": Reason(
        _C.INVALID_INPUT, "the base model's folder is incomplete or of an unknown architecture"
    ),
    "BASE_MODEL_MISMATCH": Reason(
        _C.INVALID_INPUT, "the base model is not the one the adapter was trained on; base_model.trust overrides this"
    ),
    "CHECKPOINT_NOT_FOUND": Reason(_C.NOT_FOUND, "no folder, or no checkpoint in it"),
    "CHECKPOINT_INCOMPLETE": Reason(_C.INVALID_INPUT, "the newest usable checkpoint is half-written or lacks a file"),
    "CHECKPOINT_SHARDED": Reason(
        _C.INVALID_INPUT,
        "the checkpoint's weights are FSDP or DeepSpeed shards; the message has the command that converts them",
    ),
    "ADAPTER_CONFIG_MISSING": Reason(_C.INVALID_INPUT, "the checkpoint has no adapter_config.json"),
    "ADAPTER_CONFIG_INVALID": Reason(
        _C.INVALID_INPUT,
        "adapter_config.json is not readable, contradicts itself, or asks for more work than can be done",
    ),
    "ADAPTER_UNSUPPORTED": Reason(
        _C.UNSUPPORTED,
        "this adapter type or option is not merged by this version, or a whole model stands in its place",
    ),
    "SAFETENSORS_CORRUPT": Reason(_C.INVALID_INPUT, "a safetensors file is truncated or its header is not valid"),
    "UNSAFE_PICKLE": Reason(
        _C.INVALID_INPUT, "weights are a pickle that would run code when loaded, or take far more memory than its size"
    ),
    "BASE_QUANTIZATION_UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "the base model is quantized in a way that is not brought back to 16 bit"
    ),
    "DTYPE_UNSUPPORTED": Reason(_C.UNSUPPORTED, "a tensor has a data type this stage does not convert"),
    # Merge
    "ADAPTER_TENSOR_UNUSED": Reason(_C.INVALID_INPUT, "an adapter tensor belongs to no base weight"),
    "ADAPTER_BASE_MISMATCH": Reason(_C.INVALID_INPUT, "the adapter's shapes do not fit this base model"),
    "ADAPTER_NO_EFFECT": Reason(_C.INVALID_INPUT, "merging the adapter changes nothing"),
    "NON_FINITE_WEIGHTS": Reason(_C.INVALID_INPUT, "weights contain NaN or infinity"),
    # Quantization and formats
    "QUANTIZATION_UNSUPPORTED": Reason(_C.UNSUPPORTED, "this level cannot be made for this model or format"),
    "WEIGHT_OVERFLOW": Reason(_C.UNSUPPORTED, "a weight is larger than the level's data type can hold"),
    "NON_FINITE_OUTPUT": Reason(_C.UNSUPPORTED, "the model computes NaN or infinity at this level"),
    "QUANTIZATION_FAILED": Reason(_C.VALIDATION, "the quantized model cannot be loaded or run"),
    "FAMILY_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the stage does not take models of this kind, on no machine"),
    "OPSET_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the export engine cannot write the opset asked for"),
    "EXPORT_ENGINE_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the export engine does not know this architecture"),
    "EXPORT_ENGINE_FAILED": Reason(_C.UNSUPPORTED, "the export engine stopped with an error of its own on this model"),
    "EXPORT_PARITY_FAILED": Reason(_C.VALIDATION, "the exported graph does not compute what PyTorch computes"),
    "TRACER_WARNING": Reason(_C.UNSUPPORTED, "the trace of this model depends on the values it was made with"),
    "UNORDERED_MAP": Reason(_C.UNSUPPORTED, "the legacy tracer failed on this model with unordered_map::at"),
    "ONNX_INVALID": Reason(_C.INVALID_INPUT, "the ONNX model is not readable or not valid"),
    "UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "this machine lacks a library or device that is needed; the message says what to install"
    ),
    "TENSORRT_TARGET_UNSUPPORTED": Reason(_C.UNSUPPORTED, "no installed TensorRT builds for this GPU architecture"),
    "TENSORRT_PARSE_FAILED": Reason(_C.UNSUPPORTED, "TensorRT cannot parse the ONNX model"),
    "TENSORRT_BUILD_FAILED": Reason(_C.UNSUPPORTED, "TensorRT could not build an engine for this model"),
    # Validation
    "VALIDATION_FAILED": Reason(_C.VALIDATION, "an output differs from the fine-tuned model by more than its limit"),
    "VALIDATION_IMPOSSIBLE": Reason(_C.INVALID_INPUT, "an output cannot be loaded or run for comparison"),
    # Resources and the process that runs a stage
    "OUT_OF_MEMORY": Reason(_C.RESOURCE, "the stage needs more memory than it may use", retryable=True),
    "DISK_FULL": Reason(_C.RESOURCE, "a file system has no space left", retryable=True),
    "STAGE_CRASHED": Reason(_C.ABORTED, "native code ended the stage's process by a signal", retryable=True),
    "STAGE_KILLED": Reason(_C.ABORTED, "somebody else ended the stage's process", retryable=True),
    "STAGE_TIMEOUT": Reason(_C.TIMEOUT, "the stage took longer than its limit", retryable=True),
    "STAGE_ERROR": Reason(_C.INTERNAL, "the stage stopped with an error nobody foresaw"),
    "RESULT_INVALID": Reason(
        _C.ABORTED, "what a worker brought is not its task's result: other outputs, no digests, or impossible facts"
    ),
    "MERGE_NOT_VERIFIED": Reason(_C.VALIDATION, "the merged model does not compute what base and adapter do"),
    "CANCELLED": Reason(_C.CANCELLED, "the export was cancelled"),
    # Artifacts
    "ARTIFACT_NOT_FOUND": Reason(_C.NOT_FOUND, "no artifact with this digest in the store"),
    "ARTIFACT_CORRUPT": Reason(
        _C.DATA_LOSS, "stored bytes do not have the digest they are stored under", retryable=True
    ),
    "ARTIFACT_INVALID": Reason(_C.INVALID_INPUT, "a folder or manifest that cannot be stored safely"),
    "LINK_OUTSIDE": Reason(_C.INVALID_INPUT, "a link leads out of its folder, or took the place of a file meanwhile"),
    "STORE_UNAVAILABLE": Reason(_C.UNAVAILABLE, "the artifact store does not answer, or not in time", retryable=True),
    "STORE_DENIED": Reason(_C.PRECONDITION, "the artifact store refuses these credentials, or they are missing"),
    "STORE_INVALID": Reason(_C.INVALID_INPUT, "the artifact store's address or bucket is not one that can be used"),
    "SOURCE_NOT_FOUND": Reason(_C.NOT_FOUND, "nothing is stored under the address of a source"),
    "SOURCE_NOT_ALLOWED": Reason(
        _C.FORBIDDEN,
        "workers may not import a source from this address for this project: the operator's list does not have it",
    ),
    "SOURCE_CHANGED": Reason(_C.PRECONDITION, "an imported source has other content than when the export began"),
    "OUTPUT_EXISTS": Reason(_C.INVALID_INPUT, "the output folder holds something else already"),
    "FILE_ERROR": Reason(_C.INVALID_INPUT, "a file or folder cannot be read or written"),
    # Services
    "EXPORT_NOT_FOUND": Reason(_C.NOT_FOUND, "no export of this name"),
    "EXPORT_EXISTS": Reason(_C.CONFLICT, "an export of this name was created from another request"),
    "EXPORT_STATE": Reason(_C.PRECONDITION, "the export's state does not allow this call"),
    "REQUEST_INVALID": Reason(_C.INVALID_INPUT, "a field of the request is missing or malformed"),
    "UNAUTHENTICATED": Reason(_C.UNAUTHENTICATED, "the call shows no valid token or certificate"),
    "PERMISSION_DENIED": Reason(_C.FORBIDDEN, "the caller's role or projects do not allow this call"),
    "LIMIT_EXCEEDED": Reason(_C.RESOURCE, "a request, list or number of streams is over the server's limit"),
    "CALL_TIMEOUT": Reason(_C.TIMEOUT, "the server did not finish a call in time", retryable=True),
    "TLS_INVALID": Reason(_C.INVALID_INPUT, "a certificate, key or authority cannot be used, or TLS is needed"),
    "ACCESS_INVALID": Reason(_C.INVALID_INPUT, "the access file or a token file cannot be used"),
    "ACCESS_OPEN": Reason(_C.INVALID_INPUT, "a coordinator would take commands from everybody on a network"),
    "LEASE_LOST": Reason(_C.PRECONDITION, "the task was given to another worker since"),
    "WORKER_BUSY": Reason(_C.RESOURCE, "the worker already runs as many tasks as it takes", retryable=True),
    "COORDINATOR_UNAVAILABLE": Reason(_C.UNAVAILABLE, "the coordinator does not answer", retryable=True),
    "COORDINATOR_LOCKED": Reason(_C.UNAVAILABLE, "another coordinator is active on this state", retryable=True),
    "STATE_DENIED": Reason(
        _C.PRECONDITION, "the coordinator's database refuses this user, password or database name, or a needed right"
    ),
    "STATE_SCHEMA": Reason(_C.PRECONDITION, "the coordinator's tables are not those this program needs"),
    "QUEUE_FULL": Reason(_C.RESOURCE, "as many exports as are allowed are under way", retryable=True),
    "UPLOADS_FULL": Reason(_C.RESOURCE, "the project has as many uploads open as are allowed", retryable=True),
    "TRANSFER_SLOW": Reason(
        _C.TIMEOUT, "a client sent or read a file or stream more slowly than the server waits for", retryable=True
    ),
    "ETAG_MISMATCH": Reason(_C.ABORTED, "the export changed since the caller saw it"),
    "NO_WORKER": Reason(_C.UNAVAILABLE, "no worker takes this stage", retryable=True),
    "INTERNAL": Reason(_C.INTERNAL, "a fault in Slipway itself"),
}
