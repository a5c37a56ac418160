"""KEDA's external scaler: report how many workers of a stage have work.

The metric counts the waiting and running tasks that the trigger's workers can take; the target is one task per replica.
Running tasks count, or KEDA would remove workers while they run. Tasks of workers that are shutting down do not count: their pods are no
replicas any more, so a replica would be kept or added for nothing. While tasks wait, workers that take none (their disks are full) count
too: otherwise they would fill the replicas meant for those tasks.

A trigger names all stages of its workers, because Kubernetes takes the highest metric of several triggers, not the sum.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from slipway.errors import ServiceError
from slipway.registry import IMPORT, stage_names
from slipway.requirements import NO_GPU
from slipway.rpc.serving import Context, stream, unary
from slipway.texts import quoted
from slipway_coordinator.broker.board import Board
from slipway_protos.externalscaler import externalscaler_pb2, externalscaler_pb2_grpc

SERVICE = "externalscaler.ExternalScaler"

_ARCHITECTURE = re.compile(rf"sm[0-9]{{2,3}}|{NO_GPU}")
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Trigger:
    """Workers that a trigger scales: their stages and GPU architecture (``none``: without a GPU; empty: any)."""

    stages: tuple[str, ...]
    gpu_architecture: str = ""

    @property
    def metric_name(self) -> str:
        """Name of the metric, in the characters that Kubernetes allows."""
        name = "-".join(filter(None, ("slipway", *self.stages, self.gpu_architecture)))
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Reports the work of one coordinator to KEDA.

    Args:
        board: Knows what waits and what runs.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    @unary
    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.IsActiveResponse:
        """Return whether there is work."""
        return externalscaler_pb2.IsActiveResponse(result=self._demand(self._trigger(request)) > 0)

    @stream
    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        """Stream whether there is work, now and whenever that changes."""
        trigger = self._trigger(request)
        told: bool | None = None
        while True:
            active = self._demand(trigger) > 0
            if active is not told:
                yield externalscaler_pb2.IsActiveResponse(result=active)
                told = active
            await asyncio.sleep(_LOOK_SECONDS)

    @unary
    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """Target one task per replica."""
        name = self._trigger(request).metric_name
        spec = externalscaler_pb2.MetricSpec(metricName=name, targetSize=1, targetSizeFloat=1.0)
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    @unary
    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        """Return how many replicas there should be."""
        trigger = self._trigger(request.scaledObjectRef)
        if request.metricName != trigger.metric_name:
            raise _metadata_error("metricName", request.metricName, f"this trigger's metric is {trigger.metric_name}")
        wanted = self._demand(trigger)
        value = externalscaler_pb2.MetricValue(
            metricName=trigger.metric_name, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _demand(self, trigger: Trigger) -> int:
        return self._board.demand(trigger.stages, gpu_architecture=trigger.gpu_architecture)

    def _trigger(self, reference: externalscaler_pb2.ScaledObjectRef) -> Trigger:
        """Parse the trigger's metadata.

        Raises:
            ServiceError: reason ``REQUEST_INVALID``.
        """
        metadata = reference.scalerMetadata
        stages, architecture = metadata.get("stage", "").split(","), metadata.get("gpuArchitecture", "")
        for stage in stages:
            if not self._is_known(stage):
                raise _metadata_error(
                    "stage", stage, f"name one or more of {', '.join(stage_names())}, separated by commas"
                )
        if architecture and not _ARCHITECTURE.fullmatch(architecture):
            remedy = (
                "write sm89 for compute capability 8.9, none for workers without a GPU, or leave it out for all workers"
            )
            raise _metadata_error("gpuArchitecture", architecture, remedy)
        return Trigger(tuple(sorted(set(stages))), architecture)

    def _is_known(self, stage: str) -> bool:
        """Return whether a stage is installed here, waits, runs or has a worker: a worker's stage may not be installed here."""
        if not stage or stage == IMPORT or stage in stage_names():
            return bool(stage)
        load = self._board.load()
        return stage in load.served or stage in load.leased or any(stage == waiting for waiting, _ in load.waiting)


def _metadata_error(field: str, value: str, remedy: str) -> ServiceError:
    # The remedy is in the message, because the message is all that KEDA logs.
    return ServiceError(f"{field} is {quoted(value)}: {remedy}", reason="REQUEST_INVALID", about={"field": field})
