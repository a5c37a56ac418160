"""Fetch content from the address that a coordinator gives for it, without the coordinator in between.

The content is compared with its digest like any other, so the service at the address need not be trusted. Nothing is sent to it but the
address, redirections are not followed, and no more is read than was asked for.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Generator
from urllib.parse import urlsplit

from slipway.artifacts.blobs import CHUNK_BYTES

_SECONDS = 30.0
"""Longest time without a byte."""
_WHOLE, _PART = 200, 206

FAULTS = (OSError, http.client.HTTPException, ValueError)
"""What :func:`read_address` raises, if the address does not give the content; the coordinator still may."""


def read_address(uri: str, *, offset: int, size_bytes: int) -> Generator[bytes]:
    """Yield the content at an address from an offset to its end.

    Args:
        uri: The address: ``http`` or ``https``.
        offset: Bytes to leave out at the beginning, fewer than there are.
        size_bytes: Size of the whole content.

    Raises:
        OSError: The service cannot be reached, or its certificate is not trusted.
        HTTPException: It breaks off, or speaks no HTTP.
        ValueError: It refuses, or has content of another size; or the address is of another kind.
    """
    parts = urlsplit(uri)
    if parts.hostname is None or parts.scheme not in ("http", "https"):
        raise ValueError("it is no address of HTTP")
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_SECONDS)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request("GET", target, headers={"Range": f"bytes={offset}-"} if offset else {})
        answer = connection.getresponse()
        if answer.status != (_PART if offset else _WHOLE):
            raise ValueError(f"it answers {answer.status}")
        if answer.length != size_bytes - offset:
            raise ValueError(f"it has {answer.length} bytes instead of {size_bytes - offset}")
        while data := answer.read(CHUNK_BYTES):
            yield data
    finally:
        connection.close()
