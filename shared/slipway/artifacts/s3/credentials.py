"""Credentials of an S3 service: fixed, from a file, from a web identity (IRSA), or from the container (EKS Pod Identity, ECS).

The SDK implements the protocols. This module chooses one and adds rules that the SDK lacks: one thread renews temporary
credentials well before they expire; valid ones stay in use while the issuing service is unavailable; tokens are sent only to hosts
of the platform; no token appears in a message.
"""

from __future__ import annotations

import configparser
import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import (
    AWSConfigProvider,
    IamAwsProvider,
    Provider,
    StaticProvider,
    WebIdentityProvider,
)

from slipway.errors import ArtifactError
from slipway.files.paths import user_path
from slipway.settings.s3 import S3Options

log = logging.getLogger("slipway.store")

_RENEW_SECONDS = 300.0
_PAUSE_SECONDS = 30.0
_TRIES = 3
_BUSY = (429, 500, 502, 503, 504)
_QUERY = re.compile(r"\?\S*")
_CODE = re.compile(rb"(?:<Code>|\"[Cc]ode\"\s*:\s*\")([A-Za-z.]{1,80})")
_ANSWER_BYTES = 16 << 10
#: The agents of ECS and EKS Pod Identity. Over plain HTTP, a token is sent only to them and to this machine.
_AGENTS = frozenset(map(ipaddress.ip_address, ("169.254.170.2", "169.254.170.23", "fd00:ec2::23")))
_TOKEN_BYTES = 64 << 10


def credentials(options: S3Options, http: urllib3.PoolManager) -> Provider:
    """Return the first source of credentials that the options name, in the order of AWS's own tools.

    Args:
        options: The service and the sources of its credentials.
        http: Connections to the services that issue credentials.

    Raises:
        ArtifactError: ``STORE_DENIED`` if the options name no source, ``STORE_INVALID`` for an address that must not get the token.
    """
    access, secret = options.access_key.get_secret_value(), options.secret_key.get_secret_value()
    if access and secret:
        return StaticProvider(access, secret, options.session_token.get_secret_value() or None)
    if options.web_identity_token_file is not None:
        source = _Source(
            f"{options.sts_endpoint} for the token in {options.web_identity_token_file}",
            f"check AWS_WEB_IDENTITY_TOKEN_FILE, and that the role {options.role_arn or '(AWS_ROLE_ARN)'} trusts the service account",
        )
        return Renewed(lambda: _fetch_by_web_identity(options, http), source)
    file = user_path(options.credentials_file)
    if file.is_file():
        source = _Source(
            f"{options.credentials_file}, profile {options.profile}",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or correct AWS_SHARED_CREDENTIALS_FILE and AWS_PROFILE",
        )
        return _FromFile(AWSConfigProvider(str(file), options.profile), source)
    if options.container_url:
        check_agent(options.container_url)
        source = _Source(
            options.container_url,
            "check AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, and that the service account is associated with a role",
        )
        return Renewed(lambda: _fetch_from_container(options, http), source)
    raise ArtifactError(
        f"there are no credentials for the store at {options.endpoint}",
        reason="STORE_DENIED",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, or give the service account a role",
    )


def check_agent(url: str) -> None:
    """Check that the container's token may be sent to an address: any over HTTPS; otherwise this machine or a platform agent.

    Raises:
        ArtifactError: ``STORE_INVALID``.
    """
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.hostname or ""
    except ValueError:  # brackets around something other than an IPv6 address
        scheme = host = ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        local = host == "localhost"
    else:
        local = address.is_loopback or address in _AGENTS
    if not ((scheme == "https" and host) or (scheme == "http" and local)):
        raise ArtifactError(
            f"AWS_CONTAINER_CREDENTIALS_FULL_URI is {url!r}, an address that must not get the token",
            reason="STORE_INVALID",
            remedy="use https://, or http:// with this machine, 169.254.170.2, 169.254.170.23 or [fd00:ec2::23]",
        )


class Renewed(Provider):
    """Temporary credentials, renewed before they expire.

    They are renewed when five minutes or a quarter of their lifetime are left, whichever is less. Meanwhile the other threads use
    the old ones. While the service is unavailable, all threads do, until they expire.

    Args:
        fetch: Fetches new credentials.
        source: Names the source in messages.
    """

    def __init__(self, fetch: Callable[[], Credentials], source: _Source) -> None:
        self._fetch, self._source = fetch, source
        self._lock = threading.Lock()
        self._found: Credentials | None = None
        self._renew_at = 0.0

    def retrieve(self) -> Credentials:
        """Return credentials that are valid now.

        Raises:
            ArtifactError: ``STORE_DENIED`` if the service refuses.
            urllib3.exceptions.HTTPError: The service is unavailable; the call may be repeated.
        """
        current = self._found
        if current is not None and time.time() < self._renew_at:
            return current
        valid = current is not None and not current.is_expired()
        if not self._lock.acquire(blocking=not valid):
            assert current is not None
            return current  # another thread renews them
        try:
            if self._found is None or time.time() >= self._renew_at:  # not renewed while this thread waited
                self._renew()
            assert self._found is not None
            return self._found
        finally:
            self._lock.release()

    def _renew(self) -> None:
        now = time.time()
        try:
            fresh = self._source.fetch(self._fetch)
        except (ArtifactError, urllib3.exceptions.HTTPError) as error:
            if self._found is None or self._found.is_expired():
                raise
            log.warning(f"credentials from {self._source.name} cannot be renewed yet: {_error_summary(error)}")
            self._renew_at = now + _PAUSE_SECONDS
            return
        self._found = fresh
        left = float("inf") if fresh.expiration is None else fresh.expiration.replace(tzinfo=UTC).timestamp() - now
        self._renew_at = now + left - min(_RENEW_SECONDS, left / 4) if left != float("inf") else left


class _FromFile(Provider):
    """Credentials in a file, read again for every request: a mounted Secret may change.

    A file that is written in place is empty for a moment. So the last good content stays in use for half a minute.
    """

    def __init__(self, provider: Provider, source: _Source) -> None:
        self._provider, self._source = provider, source
        self._last: tuple[Credentials, float] | None = None  # with the time when it was read

    def retrieve(self) -> Credentials:
        last = self._last
        try:
            fresh = self._source.fetch(self._provider.retrieve)
        except ArtifactError:
            if last is None or time.monotonic() > last[1] + _PAUSE_SECONDS:
                raise
            return last[0]
        self._last = (fresh, time.monotonic())
        return fresh


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of credentials: its name and its remedy, for messages."""

    name: str
    remedy: str

    def fetch(self, fetch: Callable[[], Credentials]) -> Credentials:
        """Fetch credentials; translate a failure into an error that names the source and never the token."""
        try:
            return fetch()
        except ArtifactError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError, ParseError, configparser.Error) as error:
            raise ArtifactError(
                f"there are no credentials from {self.name}: {_error_summary(error)}",
                reason="STORE_DENIED",
                remedy=self.remedy,
            ) from None  # the cause holds the address with the token


def _fetch_by_web_identity(options: S3Options, http: urllib3.PoolManager) -> Credentials:
    """Exchange the service account's token for the role's credentials; Kubernetes replaces the token from time to time."""
    file = options.web_identity_token_file
    assert file is not None
    provider = WebIdentityProvider(
        jwt_provider_func=lambda: {"access_token": file.read_text(encoding="utf-8").strip()},
        sts_endpoint=options.sts_endpoint,
        role_arn=options.role_arn or None,
        role_session_name=options.role_session_name,
        http_client=http,
    )
    return provider.retrieve()


def _fetch_from_container(options: S3Options, http: urllib3.PoolManager) -> Credentials:
    """Ask the container's agent for credentials, with the current token."""
    token = options.container_token.get_secret_value()
    if options.container_token_file is not None:
        with options.container_token_file.open(encoding="utf-8") as file:
            token = file.read(_TOKEN_BYTES).strip()
    if "\n" in token or "\r" in token:
        raise ValueError("the token has several lines")
    provider = IamAwsProvider(http_client=http)  # fetch() below avoids its own, unchecked choice of address
    return provider.fetch(options.container_url, headers={"Authorization": token} if token else None)


class _Connections(urllib3.PoolManager):
    """Connections that send a form as the body. The SDK puts it in the URL, where logs and messages would show the token."""

    def urlopen(self, method: str, url: str, redirect: bool = True, **arguments: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        """Make a request.

        Raises:
            ValueError: The service refuses; the message has the service's code.
        """
        if method == "POST" and not arguments.get("body"):
            url, _, form = url.partition("?")
            arguments |= {"body": form, "headers": {"Content-Type": "application/x-www-form-urlencoded"}}
        response = super().urlopen(method, url, redirect=redirect, **arguments)
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            code = _CODE.search(response.data[:_ANSWER_BYTES])
            raise ValueError(f"it answers {response.status}" + (f" {code[1].decode()}" if code else ""))
        return response


def connections(ca_file: str) -> urllib3.PoolManager:
    """Return connections to services that issue credentials: a few quick tries, no redirects, no proxy.

    Args:
        ca_file: Certificates to trust.
    """
    retries = urllib3.Retry(
        total=_TRIES,
        redirect=0,
        raise_on_redirect=False,
        backoff_factor=0.2,
        status_forcelist=_BUSY,
        allowed_methods=None,
    )
    timeout = urllib3.Timeout(connect=5, read=20)
    return _Connections(timeout=timeout, retries=retries, cert_reqs="CERT_REQUIRED", ca_certs=ca_file)


def _error_summary(error: BaseException) -> str:
    """Return the first line of a message, without the query of an address."""
    lines = str(error).splitlines()
    if isinstance(error, KeyError):
        return f"the answer lacks {lines[0]}"
    return _QUERY.sub("", lines[0])[:300] if lines else type(error).__name__
