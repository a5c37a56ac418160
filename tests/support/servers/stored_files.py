"""Files to store in a bucket, and stores behind a proxy."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from support.servers.s3_server import BUCKET, FaultyProxy, S3Server


def random_file(path: Path, size: int) -> Path:
    """Write a file of random bytes, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def through(proxy: FaultyProxy, s3: S3Server, *, patience: float = 120) -> S3Store:
    """Return an empty store that reaches its server through a proxy."""
    options = s3.options(endpoint=proxy.endpoint)
    return S3Store(S3Bucket(options, BUCKET, prefix=uuid.uuid4().hex, patience_seconds=patience))
