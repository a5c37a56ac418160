"""Count and time the calls of a server: rate, errors and duration of each method."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipway.observability import metrics
from slipway.reasons import REASONS
from slipway.rpc.serving import Context
from slipway.security.access.audit import reason_of

_OK = "OK"


@contextmanager
def measure_call(method: str, context: Context, *, timed: bool) -> Iterator[None]:
    """Count the call that the block answers, under the gRPC status code of its end.

    Args:
        method: Its name; one of few, as each is a time series of its own.
        context: Its context.
        timed: Whether its duration says how fast the server is: that of a stream says how long its reader stays.
    """
    began = time.monotonic()
    try:
        yield
    except BaseException as error:
        _count(method, _status_code(reason_of(error, context)), began if timed else None)
        raise
    _count(method, _OK, began if timed else None)


def _count(method: str, code: str, began: float | None) -> None:
    metrics.CALLS.add(method=method, code=code)
    if began is not None:
        metrics.CALL_SECONDS.observe(time.monotonic() - began, method=method)


def _status_code(reason: str) -> str:
    known = REASONS.get(reason)
    return known.category.status_code if known is not None else reason
