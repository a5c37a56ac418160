"""KEDA's external scaler: how many workers of a stage there is work for.

The metric is the number of tasks that wait or run, of those that the trigger's workers can take, and one replica is for one task.
Running tasks count, or KEDA would take workers away while they run; nothing to do at all is what scales to zero. While tasks wait,
workers that take none (their disks are full) count too, or they would be the replicas that the waiting tasks ask for.

A trigger names all stages of its workers: of several triggers Kubernetes takes the highest metric, not the sum.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc

from slipway.errors import ServiceError
from slipway.registry import IMPORT, stage_names
from slipway.requirements import NO_GPU
from slipway.rpc.serving import stream, unary
from slipway_coordinator.model.offers import Load
from slipway_protos.externalscaler import externalscaler_pb2, externalscaler_pb2_grpc

SERVICE = "externalscaler.ExternalScaler"

_ARCHITECTURE = re.compile(rf"sm[0-9]{{2,3}}|{NO_GPU}")
_LOOK_SECONDS = 1.0


class Demand(Protocol):
    """What the scaler asks the board."""

    def demand(self, stages: Collection[str], *, gpu_architecture: str = "") -> int:
        """How many such workers there should be."""
        ...

    def load(self) -> Load:
        """What waits, runs and serves now."""
        ...


@dataclass(frozen=True, slots=True)
class Trigger:
    """Which workers a trigger is for: those of some stages, with a GPU of an architecture, ``none`` for without, or all."""

    stages: tuple[str, ...]
    gpu_architecture: str = ""

    @property
    def metric_name(self) -> str:
        """Name of the metric, in the letters that Kubernetes takes."""
        name = "-".join(filter(None, ("slipway", *self.stages, self.gpu_architecture)))
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """The work of one coordinator, as KEDA asks for it.

    Args:
        board: Knows what waits and what runs.
        stages: Names of the stages there are, beside those that the board has seen.
    """

    def __init__(self, board: Demand, *, stages: Callable[[], Iterable[str]] = stage_names) -> None:
        self._board = board
        self._stages = stages

    @unary
    async def IsActive(  # noqa: N802 - the RPC's name
        self,
        request: externalscaler_pb2.ScaledObjectRef,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> externalscaler_pb2.IsActiveResponse:
        """Whether there is work."""
        return externalscaler_pb2.IsActiveResponse(result=self._wanted(self._trigger(request)) > 0)

    @stream
    async def StreamIsActive(  # noqa: N802
        self,
        request: externalscaler_pb2.ScaledObjectRef,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        """Whether there is work, now and whenever that changes."""
        trigger = self._trigger(request)
        told: bool | None = None
        while True:
            active = self._wanted(trigger) > 0
            if active is not told:
                yield externalscaler_pb2.IsActiveResponse(result=active)
                told = active
            await asyncio.sleep(_LOOK_SECONDS)

    @unary
    async def GetMetricSpec(  # noqa: N802
        self,
        request: externalscaler_pb2.ScaledObjectRef,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """One task for each replica, or one that is of no use."""
        name = self._trigger(request).metric_name
        spec = externalscaler_pb2.MetricSpec(metricName=name, targetSize=1, targetSizeFloat=1.0)
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    @unary
    async def GetMetrics(  # noqa: N802
        self,
        request: externalscaler_pb2.GetMetricsRequest,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> externalscaler_pb2.GetMetricsResponse:
        """How many replicas there should be."""
        trigger = self._trigger(request.scaledObjectRef)
        if request.metricName != trigger.metric_name:
            raise _refused("metricName", request.metricName, f"this trigger's metric is {trigger.metric_name}")
        wanted = self._wanted(trigger)
        value = externalscaler_pb2.MetricValue(
            metricName=trigger.metric_name, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _wanted(self, trigger: Trigger) -> int:
        return self._board.demand(trigger.stages, gpu_architecture=trigger.gpu_architecture)

    def _trigger(self, reference: externalscaler_pb2.ScaledObjectRef) -> Trigger:
        """What the trigger's metadata asks for.

        Raises:
            ServiceError: reason ``REQUEST_INVALID``.
        """
        metadata = reference.scalerMetadata
        stages, architecture = metadata.get("stage", "").split(","), metadata.get("gpuArchitecture", "")
        for stage in stages:
            if not self._is_known(stage):
                raise _refused("stage", stage, f"name some of {', '.join(self._stages())}, with commas between")
        if architecture and not _ARCHITECTURE.fullmatch(architecture):
            remedy = (
                "write sm89 for compute capability 8.9, none for workers without a GPU, or leave it out for all workers"
            )
            raise _refused("gpuArchitecture", architecture, remedy)
        return Trigger(tuple(sorted(set(stages))), architecture)

    def _is_known(self, stage: str) -> bool:
        """Installed here, or asked for or served by others: a stage of another distribution need not be installed here."""
        if not stage or stage == IMPORT or stage in self._stages():
            return bool(stage)
        load = self._board.load()
        return stage in load.served or stage in load.leased or any(stage == waiting for waiting, _ in load.waiting)


def _refused(field: str, value: str, remedy: str) -> ServiceError:
    # The remedy is in the message, because the message is all that KEDA logs.
    return ServiceError(f"{field} is {value!r}: {remedy}", reason="REQUEST_INVALID", about={"field": field})
