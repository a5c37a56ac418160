"""Where credentials of an S3 service come from: roles of Kubernetes service accounts, and files that are exchanged."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from minio.credentials.providers import Provider
from urllib3.exceptions import HTTPError

from slipway.artifacts.s3 import credentials as s3_credentials
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.credentials import check_agent, connections, credentials
from slipway.errors import ArtifactError
from slipway.settings.s3 import S3Options
from support.servers.credential_services import CredentialService
from support.servers.local_http import local_http
from support.servers.s3_server import ACCESS_KEY, BUCKET, READER_KEY, READER_SECRET, SECRET_KEY, S3Server

TOKEN = "the-token-of-a-service-account"
ROLE = "arn:aws:iam::123456789012:role/slipway"


@pytest.fixture
def service() -> Iterator[CredentialService]:
    with CredentialService(tokens={TOKEN}) as running:
        yield running


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def irsa(service: CredentialService, token: Path) -> dict[str, str]:
    return {
        "AWS_ROLE_ARN": ROLE,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ENDPOINT_URL_STS": service.endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


def pod_identity(service: CredentialService, token: Path) -> dict[str, str]:
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service.endpoint}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


WAYS = pytest.mark.parametrize("way", [irsa, pod_identity])


def provider(variables: dict[str, str]) -> Provider:
    return credentials(S3Options.from_environment(variables), connections(os.devnull))


@WAYS
def test_a_role_is_taken_on(service: CredentialService, token: Path, way: object) -> None:
    found = provider(way(service, token)).retrieve()  # type: ignore[operator]
    assert (found.access_key, found.secret_key, found.session_token) == ("KEY1", "a-secret", "session1")
    ((path, shown, form),) = service.seen
    assert shown == TOKEN
    if way is irsa:
        assert path == "/", "an address is in everybody's log"
        assert form.pop("RoleSessionName") == "slipway"
        asked = {"Action": "AssumeRoleWithWebIdentity", "RoleArn": ROLE, "Version": "2011-06-15"}
        assert form == asked | {"WebIdentityToken": TOKEN}
    else:
        assert path == "/v1/credentials"


def test_the_service_of_the_region_is_asked() -> None:
    def sts(**variables: str) -> str:
        return S3Options.from_environment(variables).sts_endpoint

    assert sts(AWS_REGION="eu-central-1") == "https://sts.eu-central-1.amazonaws.com"
    assert sts(AWS_REGION="cn-north-1") == "https://sts.cn-north-1.amazonaws.com.cn"
    assert sts(AWS_ENDPOINT_URL="http://minio:9000") == "http://minio:9000"
    assert (
        sts(AWS_ENDPOINT_URL="http://minio:9000", AWS_ENDPOINT_URL_STS="sts.example.org") == "https://sts.example.org"
    )


@WAYS
def test_credentials_are_renewed_before_they_expire_with_the_token_of_the_day(
    service: CredentialService, token: Path, way: object
) -> None:
    service.lifetime = 3.0  # whole seconds in the answer: at least two, renewed when a quarter is left
    found = provider(way(service, token))  # type: ignore[operator]
    assert [found.retrieve().access_key for _ in range(3)] == ["KEY1"] * 3
    service.tokens = {"another-token"}
    token.write_text("another-token")
    deadline = time.monotonic() + 10
    while (now := found.retrieve()).access_key == "KEY1":
        assert not now.is_expired() or service.lifetime < 10
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (now.access_key, service.handed_out) == ("KEY2", 2)


@WAYS
def test_one_thread_renews_while_the_others_go_on(
    service: CredentialService, token: Path, way: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_credentials, "_RENEW_SECONDS", 3600.0)
    service.lifetime = 40.0  # renewed after 30 s
    found = provider(way(service, token))  # type: ignore[operator]
    service.pause = 0.3
    keys: list[str] = []

    def ask() -> None:
        keys.append(found.retrieve().access_key)

    def ask_at_once() -> None:
        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ask_at_once()
    assert keys == ["KEY1"] * 12, "without any, all wait for the first"
    keys.clear()
    real, later = time.time, 31.0
    monkeypatch.setattr(s3_credentials.time, "time", lambda: real() + later)  # the clock, which nobody can wait for
    ask_at_once()
    assert sorted(keys) == ["KEY1"] * 11 + ["KEY2"]
    assert service.handed_out == 2


@WAYS
def test_credentials_that_are_valid_outlast_a_service_that_is_away(
    service: CredentialService, token: Path, way: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    found = provider(way(service, token))  # type: ignore[operator]
    found.retrieve()
    service.status = 503
    real = time.time
    monkeypatch.setattr(s3_credentials.time, "time", lambda: real() + 3400)
    with caplog.at_level(logging.WARNING):
        assert [found.retrieve().access_key for _ in range(5)] == ["KEY1"] * 5
    assert "cannot be renewed yet" in caplog.text
    assert TOKEN not in caplog.text
    asked = len(service.seen)
    monkeypatch.setattr(s3_credentials.time, "time", lambda: real() + 3440)
    service.status = 200
    assert (found.retrieve().access_key, len(service.seen)) == ("KEY2", asked + 1)


@WAYS
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("token", "InvalidIdentityToken"),
        ("no token", "No such file"),
        ("redirect", "it answers 307"),
        ("answer", "there are no credentials from"),
        ("list", "there are no credentials from"),
    ],
)
def test_what_is_refused_is_said_without_the_token(
    service: CredentialService, token: Path, way: object, wrong: str, said: str
) -> None:
    variables = way(service, token)  # type: ignore[operator]
    match wrong:
        case "token":
            token.write_text("a-token-of-nobody")
        case "no token":
            token.unlink()
        case "redirect":
            service.status = 307
        case "answer":
            service.body = '{"AccessKeyId": "x"}' if way is pod_identity else "<a/>"
        case "list":
            service.body = "[]" if way is pod_identity else "not XML"
    with pytest.raises(ArtifactError, match=said) as raised:
        provider(variables).retrieve()
    assert (raised.value.reason, raised.value.retryable) == ("STORE_DENIED", False)
    assert "a-token-of-nobody" not in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert not [path for path, *_ in service.seen if "elsewhere" in path]


def test_a_service_that_is_away_is_asked_again(s3: S3Server, token: Path) -> None:
    with CredentialService(tokens={TOKEN}, status=503) as service:
        variables = irsa(service, token) | {"AWS_ENDPOINT_URL_S3": s3.endpoint}
        bucket = S3Bucket(S3Options.from_environment(variables), BUCKET, patience_seconds=0.1)
        with pytest.raises(ArtifactError) as raised:
            bucket.listing("nothing/")
    assert (raised.value.reason, raised.value.retryable) == ("STORE_UNAVAILABLE", True)
    assert TOKEN not in str(raised.value)


@WAYS
def test_requests_to_the_store_carry_them(service: CredentialService, token: Path, way: object) -> None:
    seen: list[tuple[str | None, str | None]] = []

    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.headers["Authorization"], self.headers["X-Amz-Security-Token"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with local_http(Store, waits=False) as endpoint:
        variables = way(service, token) | {"AWS_ENDPOINT_URL_S3": endpoint}  # type: ignore[operator]
        S3Bucket(S3Options.from_environment(variables), BUCKET).get_range("x", 0, 1)
    ((authorization, session),) = seen
    assert authorization is not None
    assert "Credential=KEY1/" in authorization
    assert session == "session1"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://169.254.170.23/v1/credentials", True),
        ("http://[fd00:ec2::23]/v1/credentials", True),
        ("http://169.254.170.2/v2/x", True),
        ("http://127.0.0.1:8080/", True),
        ("http://localhost/", True),
        ("https://agent.example.org/", True),
        ("http://agent.example.org/", False),
        ("http://169.254.169.254/latest", False),
        ("http://10.0.0.1/", False),
        ("http://127.0.0.1.example.org/", False),
        ("http://localhost@10.0.0.1/", False),
        ("http://2130706433/", False),
        ("ftp://127.0.0.1/", False),
        ("file:///etc/passwd", False),
        ("169.254.170.23", False),
        ("http://[::1", False),
        ("https://[x]/", False),
    ],
)
def test_a_token_goes_to_the_platform_only(url: str, allowed: bool, token: Path) -> None:
    variables = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": url,
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    if allowed:
        check_agent(url)
        return
    with pytest.raises(ArtifactError, match="must not get the token") as raised:
        provider(variables)
    assert raised.value.reason == "STORE_INVALID"


def test_a_token_of_several_lines_is_no_header(service: CredentialService, token: Path) -> None:
    token.write_text("a\r\nX-Injected: b")
    with pytest.raises(ArtifactError, match="several lines"):
        provider(pod_identity(service, token)).retrieve()
    assert not service.seen


def test_the_agent_of_a_container_service_is_named_by_a_path(token: Path) -> None:
    options = S3Options.from_environment({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/x"})
    assert options.container_url == "http://169.254.170.2/v2/credentials/x"


def test_a_mounted_secret_is_exchanged_without_a_restart(s3: S3Server, tmp_path: Path) -> None:
    """As the kubelet does it: the files are links through a folder's link, which is replaced by a rename."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()

    def exchange(number: int, key: str, secret: str) -> None:
        folder = mounted / f"..{number}"
        folder.mkdir()
        (folder / "credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        (mounted / "..data_tmp").symlink_to(folder.name)
        (mounted / "..data_tmp").rename(mounted / "..data")

    exchange(1, READER_KEY, READER_SECRET)
    (mounted / "credentials").symlink_to("..data/credentials")
    variables = {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": str(mounted / "credentials"),
    }
    bucket = S3Bucket(S3Options.from_environment(variables), BUCKET, prefix="exchanged")
    with pytest.raises(ArtifactError) as raised:
        bucket.put("x", b"y")
    assert raised.value.reason == "STORE_DENIED"
    exchange(2, ACCESS_KEY, SECRET_KEY)
    bucket.put("x", b"y")
    assert bucket.get("x") == b"y"
    exchange(3, "NOBODY", "nothing")
    with pytest.raises(ArtifactError):
        bucket.get("x")


def test_a_file_that_is_being_written_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program that renews credentials without a rename leaves it for a moment: empty, cut, or away."""
    file, now = tmp_path / "credentials", time.monotonic()
    monkeypatch.setattr(s3_credentials, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))

    def written(key: str) -> str:
        return f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"

    file.write_text(written("first"))
    source = provider({"AWS_SHARED_CREDENTIALS_FILE": str(file)})
    assert source.retrieve().access_key == "first"
    for partial in ("", written("second")[:30], "[def", "nonsense"):
        file.write_text(partial)
        assert source.retrieve().access_key == "first"
    file.unlink()
    assert source.retrieve().access_key == "first"
    file.write_text(written("second"))
    assert source.retrieve().access_key == "second"
    file.write_text("")
    now += 31
    with pytest.raises(ArtifactError) as raised:
        source.retrieve()
    assert raised.value.reason == "STORE_DENIED"


def test_away_is_no_refusal() -> None:
    """The store's own patience covers the way to the service of roles: its errors are of the kind that is repeated."""
    variables = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/dev/null",
        "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:9",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    with pytest.raises(HTTPError):
        provider(variables).retrieve()
