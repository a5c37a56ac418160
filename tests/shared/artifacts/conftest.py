"""Fixtures of the tests of artifact stores."""

from __future__ import annotations

import uuid

import pytest

from slipway.artifacts.s3.client import S3Bucket
from support.servers.s3_server import BUCKET, S3Server


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    """An empty part of the server's bucket."""
    return S3Bucket(s3.options(), BUCKET, prefix=uuid.uuid4().hex)
