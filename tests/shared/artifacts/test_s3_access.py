"""Credentials of a bucket that are refused, missing, or in a file."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError
from slipway.settings.s3 import S3Options
from support.servers.s3_server import BUCKET, READER_KEY, READER_SECRET, S3Server
from support.servers.stored_files import random_file


def test_refused_credentials_are_named_and_never_shown(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "wrong-and-still-secret"
    wrong = S3Store(S3Bucket(s3.options(secret_key=secret), BUCKET))
    reader = S3Store(S3Bucket(s3.options(access_key=READER_KEY, secret_key=READER_SECRET), BUCKET))
    for store in (wrong, reader):
        with pytest.raises(ArtifactError) as raised:
            store.put_files({"x": random_file(tmp_path / "x", 10)})
        assert raised.value.reason == "STORE_DENIED"
        assert not raised.value.retryable
        assert secret not in str(raised.value)
        assert READER_SECRET not in str(raised.value)
    assert secret not in caplog.text
    assert READER_SECRET not in caplog.text
    assert READER_SECRET not in repr(s3.options(secret_key=READER_SECRET))


def test_a_missing_bucket_and_missing_credentials(s3: S3Server) -> None:
    with pytest.raises(ArtifactError) as raised:
        S3Bucket(s3.options(), "no-such-bucket").listing()
    assert raised.value.reason == "STORE_INVALID"
    nobody = S3Options.from_environment(
        {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    )
    with pytest.raises(ArtifactError) as raised:
        S3Bucket(nobody, BUCKET)
    assert raised.value.reason == "STORE_DENIED"


def test_credentials_are_read_from_a_file_again_for_every_request(s3: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = NOBODY\naws_secret_access_key = nothing\n")
    options = S3Options.from_environment({"AWS_ENDPOINT_URL": s3.endpoint, "AWS_SHARED_CREDENTIALS_FILE": str(file)})
    bucket = S3Bucket(options, BUCKET)
    with pytest.raises(ArtifactError):
        bucket.listing("nothing/")
    file.write_text(f"[default]\naws_access_key_id = {READER_KEY}\naws_secret_access_key = {READER_SECRET}\n")
    assert bucket.listing("nothing/") == []


@pytest.mark.parametrize(
    ("content", "profile"),
    [
        ("[default]\naws_access_key_id = x\naws_secret_access_key = hidden\n", "other"),
        ("[other]\naws_access_key_id = hidden\n", "other"),
        ("hidden", "default"),
    ],
    ids=["no-such-profile", "half-a-profile", "no-profiles"],
)
def test_a_credentials_file_without_credentials_is_named(
    s3: S3Server, tmp_path: Path, content: str, profile: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(content)
    variables = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": profile}
    bucket = S3Bucket(S3Options.from_environment({"AWS_ENDPOINT_URL": s3.endpoint, **variables}), BUCKET)
    with pytest.raises(ArtifactError, match=re.escape(f"{file}, profile {profile}")) as raised:
        bucket.listing()
    assert raised.value.reason == "STORE_DENIED"
    assert "hidden" not in str(raised.value)
