"""Count and time the calls of a server: rate, errors and duration of each method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipway.observability import metrics
from slipway.reasons import REASONS
from slipway.rpc.serving import Context
from slipway.security.access.audit import reason_of

_OK = "OK"


@contextmanager
def measure_call(method: str, context: Context, *, timed: bool, traceparent: Callable[[], str]) -> Iterator[None]:
    """Count the call that the block answers, under the gRPC status code of its end.

    Args:
        method: Its name; one of few, as each is a time series of its own.
        context: Its context.
        timed: Whether its duration says how fast the server is: that of a stream says how long its reader stays.
        traceparent: Returns the span that it belongs to, once it has ended.
    """
    began = time.monotonic()

    def count(code: str) -> None:
        metrics.CALLS.add(method=method, code=code)
        if timed:
            metrics.CALL_SECONDS.observe(time.monotonic() - began, traceparent=traceparent(), method=method)

    try:
        yield
    except BaseException as error:
        count(_status_code(reason_of(error, context)))
        raise
    count(_OK)


def _status_code(reason: str) -> str:
    known = REASONS.get(reason)
    return known.category.status_code if known is not None else reason
