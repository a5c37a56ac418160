"""From a finished LoRA training run to models that can be served, each proven to behave like the fine-tuned one.

What programs may build on is listed in ``__all__``; every other module is internal and may change with any version. Importing
this package is cheap: each name loads what it needs when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipway.advice.candidates import Candidate
    from slipway.advice.for_target import load_configuration
    from slipway.advice.recommendation import Recommendation
    from slipway.client import AsyncClient, Client
    from slipway.configuration import ExportConfiguration, LoadedConfiguration
    from slipway.configuration import parse as parse_configuration
    from slipway.errors import (
        AdapterExportError,
        ArtifactError,
        CheckpointValidationError,
        ConfigurationError,
        CoreMLExportError,
        ExecutorchExportError,
        FormatExportError,
        GGUFExportError,
        LiteRtExportError,
        ModelExportError,
        ModelMergeError,
        ONNXExportError,
        OpenVinoExportError,
        QuantizationError,
        ServiceError,
        StageError,
        TensorRTBuildError,
        TensorRTLLMExportError,
        TorchGraphError,
        TracerWarningError,
        UnorderedMapError,
        ValidationError,
    )
    from slipway.exporting.asynchronous import export_async, plan_async, recommend_async, verify_async
    from slipway.exporting.batches.planned import BatchPlan
    from slipway.exporting.batches.result import BatchEntry, BatchResult
    from slipway.exporting.calls import export, plan, recommend, verify
    from slipway.exporting.planned import ExportPlan
    from slipway.exporting.verification import Verification
    from slipway.formats import Format
    from slipway.parts import Part
    from slipway.progress.tracking import ExportProgress, TaskProgress
    from slipway.results.result import AttemptResult, ExportResult, FailedFormat, FormatResult, PublishedResult
    from slipway.settings.security import Security
    from slipway.stage import (
        Context,
        Deferral,
        Division,
        Effort,
        Forecast,
        Hardware,
        Installation,
        Keeps,
        Progress,
        Provider,
        Stage,
        StageParams,
    )

__all__ = [
    "AdapterExportError",
    "ArtifactError",
    "AsyncClient",
    "AttemptResult",
    "BatchEntry",
    "BatchPlan",
    "BatchResult",
    "Candidate",
    "CheckpointValidationError",
    "Client",
    "ConfigurationError",
    "Context",
    "CoreMLExportError",
    "Deferral",
    "Division",
    "Effort",
    "ExecutorchExportError",
    "ExportConfiguration",
    "ExportPlan",
    "ExportProgress",
    "ExportResult",
    "FailedFormat",
    "Forecast",
    "Format",
    "FormatExportError",
    "FormatResult",
    "GGUFExportError",
    "Hardware",
    "Installation",
    "Keeps",
    "LiteRtExportError",
    "LoadedConfiguration",
    "ModelExportError",
    "ModelMergeError",
    "ONNXExportError",
    "OpenVinoExportError",
    "Part",
    "Progress",
    "Provider",
    "PublishedResult",
    "QuantizationError",
    "Recommendation",
    "Security",
    "ServiceError",
    "Stage",
    "StageError",
    "StageParams",
    "TaskProgress",
    "TensorRTBuildError",
    "TensorRTLLMExportError",
    "TorchGraphError",
    "TracerWarningError",
    "UnorderedMapError",
    "ValidationError",
    "Verification",
    "export",
    "export_async",
    "load_configuration",
    "parse_configuration",
    "plan",
    "plan_async",
    "recommend",
    "recommend_async",
    "verify",
    "verify_async",
]

_HOMES = {
    "AsyncClient": "slipway.client",
    "AttemptResult": "slipway.results.result",
    "BatchEntry": "slipway.exporting.batches.result",
    "BatchPlan": "slipway.exporting.batches.planned",
    "BatchResult": "slipway.exporting.batches.result",
    "Candidate": "slipway.advice.candidates",
    "Client": "slipway.client",
    "Context": "slipway.stage",
    "Deferral": "slipway.stage",
    "Division": "slipway.stage",
    "Effort": "slipway.stage",
    "ExportConfiguration": "slipway.configuration",
    "ExportPlan": "slipway.exporting.planned",
    "ExportProgress": "slipway.progress.tracking",
    "ExportResult": "slipway.results.result",
    "FailedFormat": "slipway.results.result",
    "Forecast": "slipway.stage",
    "Format": "slipway.formats",
    "FormatResult": "slipway.results.result",
    "Hardware": "slipway.stage",
    "Installation": "slipway.stage",
    "Keeps": "slipway.stage",
    "LoadedConfiguration": "slipway.configuration",
    "Part": "slipway.parts",
    "Progress": "slipway.stage",
    "Provider": "slipway.stage",
    "PublishedResult": "slipway.results.result",
    "Recommendation": "slipway.advice.recommendation",
    "Security": "slipway.settings.security",
    "Stage": "slipway.stage",
    "StageParams": "slipway.stage",
    "TaskProgress": "slipway.progress.tracking",
    "Verification": "slipway.exporting.verification",
    **dict.fromkeys(("export", "plan", "recommend", "verify"), "slipway.exporting.calls"),
    **dict.fromkeys(
        ("export_async", "plan_async", "recommend_async", "verify_async"), "slipway.exporting.asynchronous"
    ),
    "load_configuration": "slipway.advice.for_target",
    "parse_configuration": "slipway.configuration:parse",
}
"""Where each public name is defined, and under which name if that is another one; all others are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES.get(name, "slipway.errors").partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
