"""HTTP to a server that takes what is published: connections, repeats while it is unavailable, and limits on what it answers.

Whatever a server answers is hostile until it is checked: its size and the time that it takes, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import certifi
import urllib3
from urllib3.exceptions import HTTPError, SSLError

from slipway.backoff import Backoff
from slipway.distribution import own_version
from slipway.errors import ArtifactError
from slipway.texts import one_line, shortened

LARGEST_ANSWER = 4 << 20
"""Largest document that is read, as most registries have it for manifests."""
BLOCK_BYTES = 1 << 20
CONNECTIONS = 8
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 120.0
_LONGEST_ANSWER_SECONDS = 600.0
"""Longest time that an answer may take; each piece of it has the shorter limit of a read."""
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: Status code.
        headers: Headers, by their names in lower case.
        data: Content; empty where it was not asked for.
    """

    status: int
    headers: Mapping[str, str]
    data: bytes = b""


class Connections:
    """Connections to one server, and to those that it sends to.

    Args:
        make_error: Makes an error of what was done, what is wrong, and the reason.
        explain: Returns what an answer says of its fault, such as `` (code: message)``; empty if it says nothing.
        patience_seconds: How long a request is repeated while the server is unavailable.
        authorities: File of the authorities that certificates of servers are checked with; empty for the public ones.
    """

    def __init__(
        self,
        make_error: Callable[[str, str, str], ArtifactError],
        explain: Callable[[Answer], str],
        *,
        patience_seconds: float,
        authorities: str = "",
    ) -> None:
        self._make_error, self._explain, self._patience = make_error, explain, patience_seconds
        self._waiting = threading.local()
        self._http = urllib3.PoolManager(
            num_pools=4,
            maxsize=CONNECTIONS,
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            retries=False,
            cert_reqs="CERT_REQUIRED",
            ca_certs=authorities or certifi.where(),
            blocksize=BLOCK_BYTES,
            headers={"User-Agent": f"slipway/{own_version()}"},
        )

    def close(self) -> None:
        """Close the connections now, and not when a pool is no longer referenced."""
        pools = self._http.pools
        for key in pools.keys():  # noqa: SIM118 - it cannot be iterated itself
            pools[key].close()
        self._http.clear()

    def open(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: Any = None
    ) -> urllib3.BaseHTTPResponse:
        """Make one request, without following redirects; the caller closes the answer.

        Raises:
            HTTPError: The connection broke.
        """
        sent = {**self._http.headers, **(headers or {})}
        return self._http.request(method, url, headers=sent, body=body, redirect=False, preload_content=False)

    def read(self, response: urllib3.BaseHTTPResponse, doing: str, *, most: int = LARGEST_ANSWER) -> Answer:
        """Read an answer of at most ``most`` bytes.

        Raises:
            ArtifactError: ``STORE_INVALID`` for a longer one, ``STORE_UNAVAILABLE`` for one that takes too long.
            HTTPError: The connection broke.
        """
        data, end = bytearray(), time.monotonic() + _LONGEST_ANSWER_SECONDS
        while len(data) <= most and (piece := response.read1(min(BLOCK_BYTES, most + 1 - len(data)))):
            data += piece
            if time.monotonic() > end:
                what = f"its answer takes longer than {_LONGEST_ANSWER_SECONDS:.0f} s"
                raise self._make_error(doing, what, "STORE_UNAVAILABLE")
        if len(data) > most:
            raise self._make_error(doing, f"its answer has more than {most} bytes", "STORE_INVALID")
        return Answer(response.status, headers_of(response), bytes(data))

    def repeat(self, doing: str, call: Callable[[], Answer]) -> Answer:
        """Repeat a call while the server is unavailable.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_INVALID``, and what the call raises.
        """
        backoff = self.backoff()
        while True:
            try:
                answer = call()
                fault = f"it answers {answer.status}{self._explain(answer)}" if answer.status in _PASSING else ""
            except (HTTPError, OSError) as error:
                fault = _cause(error)
                if isinstance(error, SSLError):
                    raise self._make_error(doing, f"its certificate is not valid ({fault})", "STORE_INVALID") from error
            if not fault:
                return answer
            if backoff.is_over():
                raise self._make_error(doing, fault, "STORE_UNAVAILABLE")
            backoff.wait()

    def backoff(self) -> Backoff:
        """Return the pauses of one piece of work that is repeated."""
        return Backoff(self._patience, self._wait)

    @contextmanager
    def during(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Call ``on_wait`` while this thread waits for the server within the block; it may raise to stop that."""
        self._waiting.call = on_wait
        try:
            yield
        finally:
            self._waiting.call = None

    def _wait(self, seconds: float) -> None:
        """Sleep in short pieces, so that an interrupted command ends soon."""
        call, end = getattr(self._waiting, "call", None), time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if call is not None:
                call()
            time.sleep(min(left, 0.25))


def headers_of(response: urllib3.BaseHTTPResponse) -> dict[str, str]:
    """Return the headers of an answer, by their names in lower case."""
    return {name.lower(): value for name, value in response.headers.items()}


def _cause(error: BaseException) -> str:
    return shortened(one_line(str(error))) or type(error).__name__
