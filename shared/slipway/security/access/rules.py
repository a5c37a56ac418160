"""Access rules: roles, resource and limits for every RPC of any Slipway server.

An RPC without a rule is refused, so a new one cannot be forgotten here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipway.security.access.principals import EVERYBODY, OPERATORS, SUBMITTERS, VIEWERS, WORKERS, Role

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one RPC.

    Attributes:
        roles: Roles that may call it; empty allows everybody, even without an identity.
        resource: Field of the request (of a stream: the first request) whose value ``projects/{project}…`` must name one of the
            caller's projects.
        every_project: The call reaches all projects, so it is only for principals of all projects (and workers).
        max_bytes: Largest request; in a stream, of each.
        plain: Whether the limits for clients' texts and lists apply to the request.
        seconds: Longest time of a call with one response; for a stream of requests, the longest wait for the next one.
        rechecked: Whether the caller's rights are checked again and again while its stream of responses goes on, which may last for days.
    """

    roles: frozenset[Role]
    resource: str = ""
    every_project: bool = False
    max_bytes: int = _MIB
    plain: bool = True
    seconds: float = 30.0
    rechecked: bool = False


_SMALL = 16 << 10
_OPEN: frozenset[Role] = frozenset()
# Results and log lines of stages: as large as a message may be.
_REPORT = Rule(WORKERS, max_bytes=16 * _MIB, plain=False, seconds=90.0)
_SCALER = Rule(EVERYBODY, max_bytes=_SMALL)
_REFLECTION = Rule(EVERYBODY)

RULES: Mapping[str, Rule] = {
    "/slipway.v1.ExportService/CreateExport": Rule(SUBMITTERS, "parent"),
    "/slipway.v1.ExportService/GetExport": Rule(VIEWERS, "name", max_bytes=_SMALL),
    "/slipway.v1.ExportService/ListExports": Rule(VIEWERS, "parent", max_bytes=_SMALL),
    "/slipway.v1.ExportService/WatchExport": Rule(VIEWERS, "name", max_bytes=_SMALL, rechecked=True),
    "/slipway.v1.ExportService/WatchExports": Rule(VIEWERS, "parent", max_bytes=_SMALL, rechecked=True),
    "/slipway.v1.ExportService/CancelExport": Rule(SUBMITTERS, "name", max_bytes=_SMALL),
    "/slipway.v1.ExportService/RetryExport": Rule(SUBMITTERS, "name", max_bytes=_SMALL),
    # Results of a deleted export become collectable.
    "/slipway.v1.ExportService/DeleteExport": Rule(OPERATORS, "name", max_bytes=_SMALL),
    "/slipway.v1.ArtifactService/GetArtifact": Rule(VIEWERS, "name", max_bytes=_SMALL),
    "/slipway.v1.ArtifactService/ListArtifacts": Rule(VIEWERS, "parent", max_bytes=_SMALL),
    # Its content becomes collectable unless an export has it; whoever uploads may make room again.
    "/slipway.v1.ArtifactService/DeleteArtifact": Rule(OPERATORS, "name", max_bytes=_SMALL),
    "/slipway.v1.ArtifactService/ReadBlob": Rule(VIEWERS, "name", max_bytes=_SMALL),
    "/slipway.v1.ArtifactService/LocateBlob": Rule(VIEWERS, "name", max_bytes=_SMALL),
    "/slipway.v1.ArtifactService/WriteBlob": Rule(SUBMITTERS, "parent", max_bytes=5 * _MIB),
    "/slipway.v1.ArtifactService/GetUpload": Rule(SUBMITTERS, "parent", max_bytes=_SMALL),
    # A list of files: the service itself counts them, and checks their paths.
    "/slipway.v1.ArtifactService/CreateArtifact": Rule(
        SUBMITTERS, "parent", max_bytes=8 * _MIB, plain=False, seconds=120.0
    ),
    # Formats are the same for everybody; of workers and of what waits, each caller sees what its projects show.
    "/slipway.v1.CoordinatorService/ListFormats": Rule(VIEWERS, max_bytes=_SMALL),
    "/slipway.v1.CoordinatorService/ListWorkers": Rule(VIEWERS, max_bytes=_SMALL),
    # Each caller sees its own projects.
    "/slipway.v1.CoordinatorService/ListProjects": Rule(VIEWERS, max_bytes=_SMALL),
    "/slipway.v1.WorkerService/Synchronize": _REPORT,
    "/slipway.v1.WorkerService/CompleteTask": _REPORT,
    "/slipway.v1.StageService/Describe": Rule(VIEWERS, max_bytes=_SMALL),
    # Runs on any digests, of any project.
    "/slipway.v1.StageService/Run": Rule(OPERATORS, every_project=True, max_bytes=_MIB),
    # Numbers of waiting and running tasks by stage; nothing of any export.
    "/externalscaler.ExternalScaler/IsActive": _SCALER,
    "/externalscaler.ExternalScaler/StreamIsActive": _SCALER,
    "/externalscaler.ExternalScaler/GetMetricSpec": _SCALER,
    "/externalscaler.ExternalScaler/GetMetrics": _SCALER,
    # Probes have no identity to show.
    "/grpc.health.v1.Health/Check": Rule(_OPEN, max_bytes=_SMALL),
    "/grpc.health.v1.Health/List": Rule(_OPEN, max_bytes=_SMALL),
    "/grpc.health.v1.Health/Watch": Rule(_OPEN, max_bytes=_SMALL),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _REFLECTION,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _REFLECTION,
}
