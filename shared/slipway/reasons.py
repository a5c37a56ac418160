"""The table of reasons: the meaning of each failure's stable name, with its exit code and gRPC status."""

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
    141: "the reader of the output has closed it",
    1: "a fault of Slipway itself: please report it",
}
"""Meanings of the commands' exit codes."""


class Category(Enum):
    """The kind of failure that a reason is; it decides the exit code and the gRPC status code.

    Only unforeseen failures are ``INTERNAL``. A limit of a library with this model is ``UNSUPPORTED``, a result that a check
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
        """Return the command's exit code for this kind of failure."""
        return self.value[0]

    @property
    def status_code(self) -> str:
        """Return the name of the gRPC status code, as in :class:`grpc.StatusCode`."""
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
    "STAGE_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution has a stage of this name"),
    "SERVICE_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution brings the coordinator"),
    "ENGINE_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution brings an engine of this name"),
    "FORMAT_UNKNOWN": Reason(_C.INVALID_INPUT, "no installed distribution has a format of this name"),
    "FORMAT_INVALID": Reason(
        _C.INVALID_INPUT,
        "an installed format cannot be loaded, plans tasks that cannot run, or clashes with another format",
    ),
    "INPUT_MISSING": Reason(_C.INVALID_INPUT, "a stage lacks one of its inputs, or was given an unknown one"),
    # Base model and checkpoint
    "BASE_MODEL_NOT_FOUND": Reason(
        _C.NOT_FOUND, "the base model is neither a folder nor in the local Hugging Face cache"
    ),
    "BASE_MODEL_INVALID": Reason(
        _C.INVALID_INPUT, "the base model's folder is incomplete or of an unknown architecture"
    ),
    "TOKENIZER_INVALID": Reason(
        _C.INVALID_INPUT,
        "the model's tekken.json is damaged, so no tokenizer that other libraries read can be made from it",
    ),
    "BASE_MODEL_MISMATCH": Reason(
        _C.INVALID_INPUT, "the adapter was trained on another base model; base_model.trust overrides this"
    ),
    "CHECKPOINT_NOT_FOUND": Reason(_C.NOT_FOUND, "the folder does not exist, or has no checkpoint"),
    "CHECKPOINT_INCOMPLETE": Reason(_C.INVALID_INPUT, "the newest usable checkpoint is half-written or lacks a file"),
    "CHECKPOINT_SHARDED": Reason(
        _C.INVALID_INPUT,
        "the checkpoint's weights are FSDP or DeepSpeed shards; the message has the command that converts them",
    ),
    "CHECKPOINT_HAS_MORE_WEIGHTS": Reason(
        _C.INVALID_INPUT,
        "a file beside the adapter holds weights that no part of an export reads, so the model would lack what was trained",
    ),
    "ADAPTER_CONFIG_MISSING": Reason(_C.INVALID_INPUT, "the checkpoint has no adapter_config.json"),
    "ADAPTER_CONFIG_INVALID": Reason(
        _C.INVALID_INPUT,
        "adapter_config.json is not readable, contradicts itself, or demands too much work",
    ),
    "ADAPTER_UNSUPPORTED": Reason(
        _C.UNSUPPORTED,
        "this version does not merge this type or option of adapter, or the folder holds a whole model instead",
    ),
    "SAFETENSORS_CORRUPT": Reason(_C.INVALID_INPUT, "a safetensors file is truncated or its header is not valid"),
    "UNSAFE_PICKLE": Reason(
        _C.INVALID_INPUT,
        "weights are a pickle that would run code when loaded, or use far more memory than the file's size",
    ),
    "BASE_QUANTIZATION_UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "the base model is quantized in a way that cannot be converted back to 16 bit"
    ),
    "DTYPE_UNSUPPORTED": Reason(_C.UNSUPPORTED, "a tensor has a data type that this stage does not convert"),
    # Merge
    "ADAPTER_TENSOR_UNUSED": Reason(_C.INVALID_INPUT, "an adapter tensor belongs to no base weight"),
    "ADAPTER_BASE_MISMATCH": Reason(_C.INVALID_INPUT, "the adapter's shapes do not fit this base model"),
    "ADAPTER_NO_EFFECT": Reason(_C.INVALID_INPUT, "merging the adapter changes nothing"),
    "NON_FINITE_WEIGHTS": Reason(_C.INVALID_INPUT, "weights contain NaN or infinity"),
    # Quantization and formats
    "QUANTIZATION_UNSUPPORTED": Reason(_C.UNSUPPORTED, "this level cannot be made for this model or format"),
    "CALIBRATION_DATA_INVALID": Reason(
        _C.INVALID_INPUT, "the text for calibration cannot be read, or too little of it is usable"
    ),
    "CALIBRATION_OVERLAP": Reason(
        _C.INVALID_INPUT, "the text for calibration holds part of the held-out text, which would then prove nothing"
    ),
    "CALIBRATION_MISMATCH": Reason(
        _C.INVALID_INPUT, "the calibration is of another model, number of bits or group size, or is damaged"
    ),
    "SIZE_BUDGET_UNMET": Reason(
        _C.UNSUPPORTED, "the output cannot be made within the size budget, even with the fewest bits for each weight"
    ),
    "WEIGHT_OVERFLOW": Reason(_C.UNSUPPORTED, "a weight is larger than the level's data type can hold"),
    "NON_FINITE_OUTPUT": Reason(_C.UNSUPPORTED, "the model computes NaN or infinity at this level"),
    "CALIBRATION_UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "models of this kind are not calibrated; method rtn rounds their weights without text"
    ),
    "QUANTIZATION_FAILED": Reason(_C.VALIDATION, "the quantized model cannot be loaded or run"),
    "FAMILY_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the stage does not support models of this kind on any machine"),
    "OPSET_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the export engine cannot write the requested opset"),
    "EXPORT_ENGINE_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the export engine does not know this architecture"),
    "EXPORT_ENGINE_FAILED": Reason(_C.UNSUPPORTED, "the export engine stopped with an error of its own on this model"),
    "EXPORT_PARITY_FAILED": Reason(_C.VALIDATION, "the results of the exported graph differ from PyTorch's"),
    "DYNAMIC_SHAPE": Reason(
        _C.UNSUPPORTED,
        "the model cannot be traced with varying shapes: an axis is fixed, or its code branches on values",
    ),
    "SHAPES_UNSUPPORTED": Reason(_C.UNSUPPORTED, "this model cannot have a graph of the requested fixed shapes"),
    "OPERATOR_UNSUPPORTED": Reason(_C.UNSUPPORTED, "the model uses an operator that the export engine cannot write"),
    "ONNX_TOO_LARGE": Reason(_C.UNSUPPORTED, "the weights exceed what a file without external data can hold"),
    "TRACER_WARNING": Reason(_C.UNSUPPORTED, "the trace of this model depends on its sample inputs"),
    "UNORDERED_MAP": Reason(_C.UNSUPPORTED, "the legacy tracer lost a value of this model (unordered_map)"),
    "ONNX_INVALID": Reason(_C.INVALID_INPUT, "the ONNX model is not readable or not valid"),
    "UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "this machine lacks a required library or device; the message says what to install"
    ),
    "TARGET_UNKNOWN": Reason(_C.INVALID_INPUT, "no target has this name"),
    "TARGET_UNFIT": Reason(_C.UNSUPPORTED, "no installed format runs on this target, or none within its memory"),
    "TENSORRT_TARGET_UNSUPPORTED": Reason(_C.UNSUPPORTED, "no installed TensorRT builds for this GPU architecture"),
    "TENSORRT_PARSE_FAILED": Reason(_C.UNSUPPORTED, "TensorRT cannot parse the ONNX model"),
    "GGUF_INVALID": Reason(_C.UNSUPPORTED, "the GGUF file that was written differs from the model"),
    "GGUF_TOKENIZER_UNSUPPORTED": Reason(
        _C.UNSUPPORTED, "llama.cpp cannot read text as the tokenizer of this model does"
    ),
    "TENSORRT_PROFILE_INVALID": Reason(_C.UNSUPPORTED, "the ranges of a TensorRT engine do not fit the model"),
    "TENSORRT_BUILD_FAILED": Reason(_C.UNSUPPORTED, "TensorRT could not build an engine for this model"),
    "TENSORRT_LLM_INVALID": Reason(
        _C.UNSUPPORTED, "the TensorRT-LLM checkpoint that was written differs from the model"
    ),
    "OPENVINO_CONVERSION_FAILED": Reason(_C.UNSUPPORTED, "OpenVINO cannot read the graph of this model"),
    "EXECUTORCH_EXPORT_FAILED": Reason(
        _C.UNSUPPORTED, "torch cannot trace the model, or ExecuTorch cannot lower its graph"
    ),
    "LITERT_CONVERSION_FAILED": Reason(
        _C.UNSUPPORTED, "torch cannot trace the model, or LiteRT's converter does not take its graph"
    ),
    "COREML_EXPORT_FAILED": Reason(
        _C.UNSUPPORTED, "torch cannot trace the model, or coremltools cannot convert its graph"
    ),
    "COREML_INVALID": Reason(_C.UNSUPPORTED, "the Core ML package that was written differs from the model"),
    "ADAPTER_NOT_SERVABLE": Reason(
        _C.UNSUPPORTED,
        "runtimes refuse this adapter beside its base, or would compute something else; a merged model has all of it",
    ),
    "TORCH_GRAPH_FAILED": Reason(_C.UNSUPPORTED, "torch cannot trace, capture, store or compile this model"),
    "TORCHSCRIPT_UNSCRIPTABLE": Reason(
        _C.UNSUPPORTED, "torch.jit.script cannot compile the module whose branch a trace would lose"
    ),
    # Validation
    "VALIDATION_FAILED": Reason(_C.VALIDATION, "an output differs from the fine-tuned model by more than its limit"),
    "TOO_COARSE": Reason(_C.VALIDATION, "an output keeps less of the fine-tune than it should, and was made again"),
    "VALIDATION_IMPOSSIBLE": Reason(_C.INVALID_INPUT, "an output cannot be loaded or run for comparison"),
    "CONTRACT_BROKEN": Reason(
        _C.VALIDATION, "a graph's outputs are not those that its contract of activations describes"
    ),
    "CONTRACT_INVALID": Reason(_C.INVALID_INPUT, "a contract of activations cannot be read or is not valid"),
    "GRAPH_NOT_RUN": Reason(
        _C.UNSUPPORTED, "an inspected graph was not run: it asks for absurd sizes, or does not run on dummy input"
    ),
    # Resources and the process that runs a stage
    "OUT_OF_MEMORY": Reason(_C.RESOURCE, "the stage needs more memory than it may use", retryable=True),
    "GPU_OUT_OF_MEMORY": Reason(_C.RESOURCE, "the stage needs more of the GPU's memory than is free", retryable=True),
    "DISK_FULL": Reason(_C.RESOURCE, "a file system has no space left", retryable=True),
    "STAGE_CRASHED": Reason(_C.ABORTED, "native code ended the stage's process by a signal", retryable=True),
    "STAGE_KILLED": Reason(_C.ABORTED, "a signal from outside ended the stage's process", retryable=True),
    "STAGE_TIMEOUT": Reason(_C.TIMEOUT, "the stage took longer than its limit", retryable=True),
    "STAGE_ERROR": Reason(_C.INTERNAL, "the stage stopped with an unforeseen error"),
    "RESULT_INVALID": Reason(
        _C.ABORTED, "a worker reported an invalid result: other outputs, no digests, or impossible facts"
    ),
    "PARTS_DIFFER": Reason(_C.ABORTED, "the parts of a divided task do not make one result"),
    "MERGE_NOT_VERIFIED": Reason(
        _C.VALIDATION, "the results of the merged model differ from those of base and adapter"
    ),
    "CANCELLED": Reason(_C.CANCELLED, "the export was cancelled"),
    # Artifacts
    "ARTIFACT_NOT_FOUND": Reason(_C.NOT_FOUND, "the store has no artifact with this digest"),
    "ARTIFACT_CORRUPT": Reason(_C.DATA_LOSS, "the content of a stored file does not match its digest", retryable=True),
    "ARTIFACT_INVALID": Reason(_C.INVALID_INPUT, "a folder or manifest cannot be stored safely"),
    "LINK_OUTSIDE": Reason(_C.INVALID_INPUT, "a link leads out of its folder, or replaced a file meanwhile"),
    "STORE_UNAVAILABLE": Reason(_C.UNAVAILABLE, "the artifact store does not respond in time", retryable=True),
    "STORE_DENIED": Reason(_C.PRECONDITION, "the artifact store refuses these credentials, or they are missing"),
    "STORE_INVALID": Reason(_C.INVALID_INPUT, "the artifact store's address or bucket is not usable"),
    "SOURCE_NOT_FOUND": Reason(_C.NOT_FOUND, "nothing is stored at the address of a source"),
    "SOURCE_NOT_ALLOWED": Reason(
        _C.FORBIDDEN,
        "the operator's list does not let workers import from this address for this project",
    ),
    "SOURCE_CHANGED": Reason(_C.PRECONDITION, "the content of an imported source has changed since the export began"),
    "REGISTRY_UNAVAILABLE": Reason(
        _C.UNAVAILABLE, "pip cannot fetch a pinned package from the package index", retryable=True
    ),
    "OUTPUT_EXISTS": Reason(_C.INVALID_INPUT, "the output folder already holds something else"),
    "OUTPUT_CLASH": Reason(
        _C.INVALID_INPUT, "two exports of a batch would be delivered to one folder, or published at one address"
    ),
    "BATCH_INVALID": Reason(
        _C.INVALID_INPUT,
        "what is named for several exports is itself a run or a model, holds too many entries, or is empty",
    ),
    "FILE_ERROR": Reason(_C.INVALID_INPUT, "a file or folder cannot be read or written"),
    # What is published
    "DESTINATION_INVALID": Reason(_C.INVALID_INPUT, "the address is none of a place that can be published to"),
    "SIGNING_KEY_INVALID": Reason(
        _C.INVALID_INPUT, "a key to sign or to check with is not readable, of another kind, or its passphrase is wrong"
    ),
    "SIGNING_CERTIFICATE_INVALID": Reason(
        _C.INVALID_INPUT,
        "a certificate to sign with is not readable, not of the key, not valid now, not for signing code, or leads to none of the others",
    ),
    "TRUST_ROOT_INVALID": Reason(
        _C.INVALID_INPUT,
        "roots of certificates, or a Sigstore trusted root, to check a signature with are not readable",
    ),
    "SIGNATURE_MISSING": Reason(_C.PRECONDITION, "a signature shall be checked, and there is none"),
    "SIGNATURE_INVALID": Reason(
        _C.VALIDATION, "the signature is not by the given key, certificate or identity, or is damaged"
    ),
    "CERTIFICATE_UNTRUSTED": Reason(
        _C.VALIDATION, "the certificate of a signature leads to none of the roots that were given"
    ),
    "CERTIFICATE_EXPIRED": Reason(
        _C.VALIDATION, "the certificate of a signature, or one that leads from it to a root, is not valid now"
    ),
    "CERTIFICATE_UNFIT": Reason(
        _C.VALIDATION,
        "the certificate of a signature is not for signing code, or one on its way to a root is weak or no authority",
    ),
    "SIGNED_CONTENT_CHANGED": Reason(
        _C.VALIDATION, "the files are not those that were signed: one was changed, is missing, or was added"
    ),
    "STATEMENT_MISMATCH": Reason(
        _C.VALIDATION, "the statement or the bill of materials says something else than the report and the files"
    ),
    # Services
    "EXPORT_NOT_FOUND": Reason(_C.NOT_FOUND, "there is no export of this name"),
    "EXPORT_EXISTS": Reason(_C.CONFLICT, "another request has created an export of this name"),
    "EXPORT_STATE": Reason(_C.PRECONDITION, "the export's state does not allow this call"),
    "CALL_NOT_FOUND": Reason(
        _C.NOT_FOUND, "no call over HTTP has this path and method, or the coordinator is older than the call"
    ),
    "REQUEST_INVALID": Reason(_C.INVALID_INPUT, "a field of the request is missing or malformed"),
    "UNAUTHENTICATED": Reason(_C.UNAUTHENTICATED, "the call has no valid token or certificate"),
    "ISSUER_UNAVAILABLE": Reason(
        _C.UNAVAILABLE, "the keys that check the tokens of an issuer cannot be fetched now", retryable=True
    ),
    "PERMISSION_DENIED": Reason(_C.FORBIDDEN, "the caller's role or projects do not allow this call"),
    "LIMIT_EXCEEDED": Reason(_C.RESOURCE, "a request, list or number of streams exceeds the server's limit"),
    "CALL_TIMEOUT": Reason(_C.TIMEOUT, "the server did not finish a call in time", retryable=True),
    "TLS_INVALID": Reason(_C.INVALID_INPUT, "a certificate, key or authority is not usable, or TLS is required"),
    "ACCESS_INVALID": Reason(_C.INVALID_INPUT, "the access file or a token file is not usable"),
    "ACCESS_OPEN": Reason(_C.INVALID_INPUT, "a coordinator would take commands from everybody on a network"),
    "WEBHOOKS_INVALID": Reason(_C.INVALID_INPUT, "the webhooks file, or a file it names, is not usable"),
    "LEASE_LOST": Reason(_C.PRECONDITION, "the task has since been given to another worker"),
    "WORKER_BUSY": Reason(_C.RESOURCE, "the worker already runs as many tasks as it may", retryable=True),
    "COORDINATOR_UNAVAILABLE": Reason(_C.UNAVAILABLE, "the coordinator does not respond", retryable=True),
    "COORDINATOR_LOCKED": Reason(_C.UNAVAILABLE, "another coordinator is active on this state", retryable=True),
    "STATE_DENIED": Reason(
        _C.PRECONDITION, "the coordinator's database refuses the user, password or database name, or lacks a right"
    ),
    "STATE_SCHEMA": Reason(_C.PRECONDITION, "the coordinator's tables do not fit this program"),
    "QUEUE_FULL": Reason(_C.RESOURCE, "the limit of running and waiting exports is reached", retryable=True),
    "QUOTA_EXCEEDED": Reason(
        _C.RESOURCE,
        "the project has as much as the access file allows it: exports, a priority, bytes in the store, or GPU seconds",
    ),
    "REQUESTS_FULL": Reason(_C.RESOURCE, "a request arrived slowly while others waited for its place", retryable=True),
    "UPLOADS_FULL": Reason(_C.RESOURCE, "the project's limit of open uploads is reached", retryable=True),
    "UPLOAD_LOST": Reason(
        _C.UNAVAILABLE, "the coordinator no longer has the beginning of an interrupted upload", retryable=True
    ),
    "TRANSFER_SLOW": Reason(
        _C.TIMEOUT, "a client sent or read a file or stream more slowly than the server allows", retryable=True
    ),
    "ETAG_MISMATCH": Reason(_C.ABORTED, "the export has changed since the caller read it"),
    "CURSOR_EXPIRED": Reason(
        _C.PRECONDITION, "the coordinator no longer has everything that happened to exports since this cursor"
    ),
    "RIGHTS_CHANGED": Reason(
        _C.UNAVAILABLE,
        "the role or the projects of the caller have changed since its stream began; call again",
        retryable=True,
    ),
    "NO_WORKER": Reason(_C.UNAVAILABLE, "no worker runs this stage", retryable=True),
    "WORKER_UNFIT": Reason(
        _C.UNAVAILABLE, "the workers that run this stage lack a GPU of that kind, memory or a library", retryable=True
    ),
    "WORKER_OUTDATED": Reason(
        _C.UNAVAILABLE,
        "the workers that run this stage are of another version, which lacks a parameter",
        retryable=True,
    ),
    "WORKERS_DRAINING": Reason(
        _C.UNAVAILABLE, "the workers that can run this stage take no new tasks at the moment", retryable=True
    ),
    "ENGINE_UNAVAILABLE": Reason(
        _C.UNAVAILABLE, "the cluster of an engine does not respond, or no address names one", retryable=True
    ),
    "ENGINE_UNFIT": Reason(
        _C.PRECONDITION,
        "a node of an engine lacks this version of Slipway, or does not see the artifact store or reach the coordinator",
    ),
    "ENGINE_FAILED": Reason(
        _C.ABORTED, "an engine started several workers for a task, and all ended before they took it"
    ),
    "INTERNAL": Reason(_C.INTERNAL, "a fault in Slipway itself"),
}
