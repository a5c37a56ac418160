"""The tree of all errors that Slipway raises.

::

    ModelExportError
    ├── ConfigurationError          the export configuration is not valid
    ├── CheckpointValidationError   the base model or the checkpoint is not usable
    ├── ModelMergeError             the adapter cannot be merged exactly
    ├── QuantizationError
    ├── FormatExportError
    │   ├── ONNXExportError
    │   │   ├── TracerWarningError  a trace depends on the sample it was made with
    │   │   └── UnorderedMapError   the legacy tracer's "unordered_map::at"
    │   ├── TensorRTBuildError
    │   ├── TensorRTLLMExportError
    │   ├── OpenVinoExportError
    │   ├── ExecutorchExportError
    │   ├── LiteRtExportError
    │   ├── CoreMLExportError
    │   ├── AdapterExportError      the adapter cannot be delivered beside its base
    │   ├── GGUFExportError
    │   └── TorchGraphError
    ├── ValidationError             an output does not behave like the fine-tuned model
    ├── ArtifactError               the artifact store cannot read or store an artifact
    ├── StageError                  the process that ran a stage ended without a result
    └── ServiceError                the coordinator cannot be reached or refuses the call

Every error carries a stable ``reason`` of :mod:`slipway.reasons`. Recovery rules, exit codes and gRPC status codes follow from the reason alone,
never from the class or the message.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from slipway.reasons import REASONS
from slipway.texts import shortened

_DECIDING = (4, 1, 3, 2, 6, 5, 7, 130)
"""Exit codes of failures, in the order in which they decide: a wrong output before a missing one, and failures that a retry cannot
fix before those that it can, so that a script that retries on 7 does so only if that may help."""
_LOOKUPS = ("__getattr__", "__getattribute__")
"""Functions that only report a missing attribute; the mistake is in the line that called them."""

MOST_TEXT = 20_000
"""Most characters of a message, a remedy, or one entry of ``about``; they are limited because they quote values from anywhere."""


class ModelExportError(Exception):
    """Base of every error Slipway raises on purpose. Texts longer than :data:`MOST_TEXT` are shortened.

    Args:
        message: The fault, with the thing and its value.
        reason: Key of :data:`slipway.reasons.REASONS`.
        remedy: What the user can do about it; appended to the message.
        about: Subject of the error, as values by name (``tensor``, ``file``, ``key`` …).
        retryable: Whether the same attempt may succeed when repeated; None follows the reason.
    """

    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        remedy: str = "",
        about: Mapping[str, object] | None = None,
        retryable: bool | None = None,
    ) -> None:
        self.reason = reason or self.default_reason
        if self.reason not in REASONS:
            raise ValueError(f"unknown reason {self.reason!r}: add it to slipway.reasons.REASONS")
        self.message = message = shortened(message, MOST_TEXT)
        self.remedy = remedy = shortened(remedy, MOST_TEXT)
        self.about = {key: shortened(str(value), MOST_TEXT) for key, value in (about or {}).items()}
        self.retryable = REASONS[self.reason].retryable if retryable is None else retryable
        super().__init__(with_remedy(message, remedy))

    def failure(self) -> Failure:
        """Return this error as a value that can be sent to another process or machine."""
        return Failure(
            reason=self.reason,
            message=self.message,
            remedy=self.remedy,
            error_type=type(self).__name__,
            about=self.about,
            retryable=self.retryable,
        )


class ConfigurationError(ModelExportError):
    """The export configuration is not valid."""

    default_reason = "CONFIGURATION_INVALID"


class CheckpointValidationError(ModelExportError):
    """The base model or the checkpoint is missing, incomplete, corrupt or unsafe."""

    default_reason = "CHECKPOINT_INCOMPLETE"


class ModelMergeError(ModelExportError):
    """The adapter cannot be merged exactly into this base model."""

    default_reason = "ADAPTER_BASE_MISMATCH"


class QuantizationError(ModelExportError):
    """A quantization level cannot be made."""

    default_reason = "QUANTIZATION_FAILED"


class FormatExportError(ModelExportError):
    """A format cannot be written."""

    default_reason = "EXPORT_ENGINE_FAILED"


class ONNXExportError(FormatExportError):
    """The ONNX graph cannot be made, or its results differ from PyTorch's."""


class TracerWarningError(ONNXExportError):
    """A trace would silently depend on its sample inputs."""

    default_reason = "TRACER_WARNING"


class UnorderedMapError(ONNXExportError):
    """The legacy tracer lost track of a value (``unordered_map::at``)."""

    default_reason = "UNORDERED_MAP"


class TensorRTBuildError(FormatExportError):
    """TensorRT cannot parse the model or build an engine."""

    default_reason = "TENSORRT_BUILD_FAILED"


class TensorRTLLMExportError(FormatExportError):
    """A TensorRT-LLM checkpoint cannot be written, or is not what the model is."""

    default_reason = "TENSORRT_LLM_INVALID"


class OpenVinoExportError(FormatExportError):
    """OpenVINO cannot read the graph."""

    default_reason = "OPENVINO_CONVERSION_FAILED"


class ExecutorchExportError(FormatExportError):
    """No program for ExecuTorch can be made of the model."""

    default_reason = "EXECUTORCH_EXPORT_FAILED"


class LiteRtExportError(FormatExportError):
    """No program for LiteRT can be made of the model."""

    default_reason = "LITERT_CONVERSION_FAILED"


class CoreMLExportError(FormatExportError):
    """No package for Core ML can be made of the model, or it is not what the model is."""

    default_reason = "COREML_EXPORT_FAILED"


class AdapterExportError(FormatExportError):
    """The adapter cannot be delivered beside its base."""

    default_reason = "ADAPTER_NOT_SERVABLE"


class GGUFExportError(FormatExportError):
    """A GGUF file cannot be written, or is not what the model is."""

    default_reason = "GGUF_INVALID"


class TorchGraphError(FormatExportError):
    """PyTorch cannot write the model as a graph of its own (TorchScript, torch.export)."""

    default_reason = "TORCH_GRAPH_FAILED"


class ValidationError(ModelExportError):
    """An output does not behave like the fine-tuned model."""

    default_reason = "VALIDATION_FAILED"


class ArtifactError(ModelExportError):
    """The artifact store cannot read or store an artifact."""

    default_reason = "ARTIFACT_NOT_FOUND"


class StageError(ModelExportError):
    """The process that ran a stage ended without a result of its own."""

    default_reason = "STAGE_ERROR"


class ServiceError(ModelExportError):
    """The coordinator cannot be reached, or refuses a call."""

    default_reason = "COORDINATOR_UNAVAILABLE"


ERROR_TYPES: Mapping[str, type[ModelExportError]] = {
    cls.__name__: cls
    for cls in (
        ModelExportError,
        ConfigurationError,
        CheckpointValidationError,
        ModelMergeError,
        QuantizationError,
        FormatExportError,
        ONNXExportError,
        TracerWarningError,
        UnorderedMapError,
        TensorRTBuildError,
        TensorRTLLMExportError,
        OpenVinoExportError,
        ExecutorchExportError,
        LiteRtExportError,
        CoreMLExportError,
        AdapterExportError,
        GGUFExportError,
        TorchGraphError,
        ValidationError,
        ArtifactError,
        StageError,
        ServiceError,
    )
}


def error_of_reason(reason: str, message: str) -> ModelExportError:
    """Return an error with a reason, of the class whose usual reason it is; a reason that is unknown here becomes ``INTERNAL``."""
    usual = (cls for cls in ERROR_TYPES.values() if cls.__dict__.get("default_reason") == reason)
    return Failure(reason, message, error_type=next(usual, ModelExportError).__name__).error()


@dataclass(frozen=True, slots=True)
class Failure:
    """A :class:`ModelExportError` as plain data: the outcome of an unsuccessful attempt."""

    reason: str
    message: str
    remedy: str = ""
    error_type: str = "ModelExportError"
    about: dict[str, str] = field(default_factory=dict)
    retryable: bool = False

    @property
    def exit_code(self) -> int:
        """Return the command's exit code for this failure."""
        return REASONS[self.reason].category.exit_code if self.reason in REASONS else 1

    def error(self) -> ModelExportError:
        """Return the exception of this failure; an unknown reason (a newer peer's) becomes ``INTERNAL``."""
        cls = ERROR_TYPES.get(self.error_type, ModelExportError)
        reason, message = self.reason, self.message
        if reason not in REASONS:
            reason, message = "INTERNAL", f"{self.reason}: {self.message}"
        return cls(message, reason=reason, remedy=self.remedy, about=self.about, retryable=self.retryable)

    def to_json(self) -> dict[str, Any]:
        """Return this failure as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """Read the failure that :meth:`to_json` wrote."""
        return cls(**data)

    @staticmethod
    def deciding(failures: Iterable[Failure]) -> Failure | None:
        """Return the failure that decides the exit code; the first one among equals, None without any."""
        return min(failures, key=lambda failure: _DECIDING.index(failure.exit_code), default=None)

    def __str__(self) -> str:
        return with_remedy(self.message, self.remedy)


def with_remedy(message: str, remedy: str) -> str:
    """Return a message with its remedy behind it, or in lines below it if either has several."""
    between = "\n" if "\n" in message or "\n" in remedy else "; "
    return between.join(filter(None, (message, remedy)))


def is_own_fault(error: BaseException) -> bool:
    """Return whether an exception is a mistake in Slipway's own code: it asked for an attribute or a name that does not exist.

    Code around a model's own turns whatever that raises into a typed error. A mistake of ours says nothing about the model, so such code lets it
    through, to be reported as ``STAGE_ERROR`` or ``INTERNAL``.
    """
    if not isinstance(error, AttributeError | NameError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name not in _LOOKUPS]
    package = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] if frames else ""
    return package == "slipway" or package.startswith("slipway_")
