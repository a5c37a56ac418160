"""Resume a watch after disconnects: which events were seen, whether to connect again, and when."""

from __future__ import annotations

import random
import time

from slipway.errors import Failure
from slipway.reasons import REASONS, Category
from slipway.rpc.state_names import ENDED
from slipway_protos.v1 import export_pb2 as pb

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class Resumption:
    """The state of one watch.

    Args:
        after_sequence: Number of the last event already seen.
        patience_seconds: How long the coordinator may be unavailable at a time.
    """

    def __init__(self, after_sequence: int, *, patience_seconds: float) -> None:
        self.sequence = after_sequence
        self.ended = False
        self._patience = patience_seconds
        self._was_connected = False
        self._gone_since: float | None = None
        self._failures = 0

    def is_new(self, event: pb.ExportEvent) -> bool:
        """Record an event; return False for one seen before the connection was lost."""
        self._was_connected, self._gone_since, self._failures = True, None, 0
        if event.sequence <= self.sequence:
            return False
        self.sequence = event.sequence
        self.ended = event.WhichOneof("event") == "export" and event.export.state in ENDED
        return True

    def pause_seconds(self, failure: Failure) -> float:
        """Return how long to wait before connecting again; raise at once if the first connection never succeeded.

        Raises:
            ModelExportError: The failure, if another connection cannot help or patience is over.
        """
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = self._patience if self._was_connected else 0.0
        # A server that stops cancels its streams; a server also ends streams whose client reads too slowly.
        if not is_temporary(failure, "CANCELLED", "TRANSFER_SLOW") or now - self._gone_since >= patience:
            raise failure.error()
        self._failures += 1
        longest = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10), _LONGEST_PAUSE_SECONDS)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - so that many watchers do not return all at once


def is_temporary(failure: Failure, *reasons: str) -> bool:
    """Return whether the same call may succeed later: the peer is unavailable, or the reason is one of those given."""
    return failure.reason in reasons or (
        failure.reason in REASONS and REASONS[failure.reason].category is Category.UNAVAILABLE
    )
