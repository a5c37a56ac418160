"""Refuse calls while a coordinator is starting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from slipway.errors import Failure, ServiceError
from slipway.observability import metrics
from slipway.rpc.serving import Context, abort

_OURS = "/slipway.v1."


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stubs are generic
    """Refuses Slipway's own calls while it is closed; health checks and reflection always pass."""

    def __init__(self) -> None:
        self.is_open = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of the call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if self.is_open or handler is None or not str(handler_call_details.method).startswith(_OURS):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse_stream, handler.request_deserializer)
        return grpc.unary_unary_rpc_method_handler(_refuse, handler.request_deserializer)


async def _refuse(_request: Any, context: Context) -> None:
    await abort(context, _starting_failure())


async def _refuse_stream(_request: Any, context: Context) -> AsyncIterator[None]:
    yield await abort(context, _starting_failure())


def _starting_failure() -> Failure:
    metrics.CALLS_REFUSED.add(reason="COORDINATOR_UNAVAILABLE")
    return ServiceError("this coordinator is starting", reason="COORDINATOR_UNAVAILABLE", remedy="try again").failure()
