"""Marks of long work on a bucket, so that a collection keeps artifacts that the work will still need.

The grace period of collections protects what work of a few hours uses. Work that goes on longer writes a mark and renews it, until it
ends. Every artifact used since the beginning of marked work may belong to it. A mark that was not renewed for a grace period belongs
to a dead process.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator

from slipway.artifacts.s3.client import S3Bucket
from slipway.errors import ArtifactError

log = logging.getLogger("slipway.artifacts")

_FOLDER = "uses/"
_NAME = re.compile(rf"{_FOLDER}[0-9a-f]{{32}}")
_SECONDS, _MOST_BYTES = re.compile(rb"\d{1,12}"), 12
_RENEWALS = 4  # in a grace period


@contextlib.contextmanager
def mark_work(bucket: S3Bucket, *, grace_seconds: float) -> Iterator[None]:
    """Mark the bucket while the block runs, from a quarter of the grace period on."""
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_mark, args=(bucket, grace_seconds / _RENEWALS, ended), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join(timeout=1)  # a mark that cannot be removed now becomes old by itself


def _keep_mark(bucket: S3Bucket, pause: float, ended: threading.Event) -> None:
    began, name, written = time.monotonic(), f"{_FOLDER}{uuid.uuid4().hex}", False
    while not ended.wait(pause):
        try:
            # The service's clock gives the time of the mark, which says how long the work has gone on.
            bucket.put(name, b"%d" % (time.monotonic() - began + 1))
            written = True
        except ArtifactError as error:
            log.warning(
                f"{bucket.where} may remove what a long task needs, because its mark was refused: {error.message}"
            )
    if written:
        with contextlib.suppress(ArtifactError):
            bucket.delete([name])


def oldest(bucket: S3Bucket, *, grace_seconds: float, now: float) -> float | None:
    """Return when the oldest marked work began, in seconds since the epoch, or None; 0 if a mark cannot be understood.

    Raises:
        ArtifactError: As :meth:`S3Bucket.call`.
    """
    began = []
    for entry in bucket.listing(_FOLDER):
        if _NAME.fullmatch(entry.key) is None or now - entry.modified > grace_seconds:
            continue
        try:
            content = bucket.get(entry.key) if entry.size_bytes <= _MOST_BYTES else b""
        except ArtifactError as error:
            if error.reason != "ARTIFACT_NOT_FOUND":  # its work has ended just now
                raise
        else:
            began.append(entry.modified - int(content) if _SECONDS.fullmatch(content) else 0.0)
    return min(began, default=None)
