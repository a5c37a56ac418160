"""Credentials of an S3 service: fixed, from a file, of a web identity (IRSA), or of the container (EKS Pod Identity, ECS).

The SDK speaks the protocols. What is here chooses among them, and keeps the rules that it does not: temporary credentials are
renewed well before they expire, by one thread; those that are still valid outlast a service that is away; tokens go to hosts of
the platform only, and no token is in a message.
"""

from __future__ import annotations

import configparser
import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable
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
from slipway.files.user_paths import user_path
from slipway.settings.s3 import S3Options

log = logging.getLogger("slipway.store")

_RENEW_SECONDS = 300.0
_PAUSE_SECONDS = 30.0
_TRIES = 3
_BUSY = (429, 500, 502, 503, 504)
_QUERY = re.compile(r"\?\S*")
_CODE = re.compile(rb"(?:<Code>|\"[Cc]ode\"\s*:\s*\")([A-Za-z.]{1,80})")
_ANSWER_BYTES = 16 << 10
#: The agents of ECS and of EKS Pod Identity; over plain HTTP, a token goes to them and to this machine only.
_AGENTS = frozenset(map(ipaddress.ip_address, ("169.254.170.2", "169.254.170.23", "fd00:ec2::23")))
_TOKEN_BYTES = 64 << 10


def credentials(options: S3Options, http: urllib3.PoolManager) -> Provider:
    """Return the first source of credentials that the options name, in the order of AWS's own tools.

    Args:
        options: The service and where its credentials are.
        http: Connections to the services that hand out credentials.

    Raises:
        ArtifactError: ``STORE_DENIED`` when they name none, ``STORE_INVALID`` for an address that may not see the token.
    """
    access, secret = options.access_key.get_secret_value(), options.secret_key.get_secret_value()
    if access and secret:
        return StaticProvider(access, secret, options.session_token.get_secret_value() or None)
    if options.web_identity_token_file is not None:
        return Renewed(lambda: _web_identity(options, http), _Source.web_identity(options))
    file = user_path(options.credentials_file)
    if file.is_file():
        return _FromFile(AWSConfigProvider(str(file), options.profile), _Source.file(options))
    if options.container_url:
        check_agent(options.container_url)
        return Renewed(lambda: _container(options, http), _Source.container(options))
    raise ArtifactError(
        f"there are no credentials for the store at {options.endpoint}",
        reason="STORE_DENIED",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, or give the service account a role",
    )


def check_agent(url: str) -> None:
    """See that the container's token may go to an address: any over HTTPS, else this machine or one of the platform's agents.

    Raises:
        ArtifactError: ``STORE_INVALID``.
    """
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        local = parts.hostname == "localhost"
    else:
        local = address.is_loopback or address in _AGENTS
    if not ((parts.scheme == "https" and parts.hostname) or (parts.scheme == "http" and local)):
        raise ArtifactError(
            f"AWS_CONTAINER_CREDENTIALS_FULL_URI is {url!r}, where the token may not go",
            reason="STORE_INVALID",
            remedy="use https://, or over http:// this machine, 169.254.170.2, 169.254.170.23 or [fd00:ec2::23]",
        )


class Renewed(Provider):
    """Temporary credentials, renewed before they expire.

    They are renewed when five minutes or a quarter of their time are left, whichever is less. Meanwhile the other threads go on
    with those there are; while the service is away, so do all, until they expire.

    Args:
        fetch: Fetches new ones.
        source: Where from, for messages.
    """

    def __init__(self, fetch: Callable[[], Credentials], source: _Source) -> None:
        self._fetch, self._source = fetch, source
        self._lock = threading.Lock()
        self._found: Credentials | None = None
        self._renew_at = 0.0

    def retrieve(self) -> Credentials:
        """Return credentials that are valid now.

        Raises:
            ArtifactError: ``STORE_DENIED`` when they are refused.
            urllib3.exceptions.HTTPError: The service is away; the call may be repeated.
        """
        found = self._found
        if found is not None and time.time() < self._renew_at:
            return found
        valid = found is not None and not found.is_expired()
        if not self._lock.acquire(blocking=not valid):
            assert found is not None
            return found  # another thread renews them
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
            fresh = self._source.told(self._fetch)
        except (ArtifactError, urllib3.exceptions.HTTPError) as error:
            if self._found is None or self._found.is_expired():
                raise
            log.warning(f"credentials from {self._source.name} cannot be renewed yet: {_shown(error)}")
            self._renew_at = now + _PAUSE_SECONDS
            return
        self._found = fresh
        left = float("inf") if fresh.expiration is None else fresh.expiration.replace(tzinfo=UTC).timestamp() - now
        self._renew_at = now + left - min(_RENEW_SECONDS, left / 4) if left != float("inf") else left


class _FromFile(Provider):
    """Credentials in a file, read again for every request: a mounted Secret may change."""

    def __init__(self, provider: Provider, source: _Source) -> None:
        self._provider, self._source = provider, source

    def retrieve(self) -> Credentials:
        return self._source.told(self._provider.retrieve)


class _Source:
    """Where credentials come from, and what helps when they do not."""

    def __init__(self, name: str, remedy: str) -> None:
        self.name, self._remedy = name, remedy

    @classmethod
    def file(cls, options: S3Options) -> _Source:
        return cls(
            f"{options.credentials_file}, profile {options.profile}",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or correct AWS_SHARED_CREDENTIALS_FILE and AWS_PROFILE",
        )

    @classmethod
    def web_identity(cls, options: S3Options) -> _Source:
        return cls(
            f"{options.sts_endpoint} for the token in {options.web_identity_token_file}",
            f"check AWS_WEB_IDENTITY_TOKEN_FILE, and that the role {options.role_arn or '(AWS_ROLE_ARN)'} trusts the service account",
        )

    @classmethod
    def container(cls, options: S3Options) -> _Source:
        return cls(
            options.container_url,
            "check AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, and that the service account is associated with a role",
        )

    def told(self, fetch: Callable[[], Credentials]) -> Credentials:
        """Fetch credentials, and say of what is wrong with them where they come from; never what the token is."""
        try:
            return fetch()
        except ArtifactError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError, ParseError, configparser.Error) as error:
            raise ArtifactError(
                f"there are no credentials from {self.name}: {_shown(error)}",
                reason="STORE_DENIED",
                remedy=self._remedy,
            ) from None  # the cause holds the address with the token


def _web_identity(options: S3Options, http: urllib3.PoolManager) -> Credentials:
    """Exchange the service account's token, which Kubernetes replaces from time to time, for credentials of the role."""
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


def _container(options: S3Options, http: urllib3.PoolManager) -> Credentials:
    """Ask the container's agent for credentials, with the token as it is now."""
    token = options.container_token.get_secret_value()
    if options.container_token_file is not None:
        with options.container_token_file.open(encoding="utf-8") as file:
            token = file.read(_TOKEN_BYTES).strip()
    if "\n" in token or "\r" in token:
        raise ValueError("the token has several lines")
    provider = IamAwsProvider(http_client=http)  # its own choice of address knows neither these settings nor this check
    return provider.fetch(options.container_url, headers={"Authorization": token} if token else None)


class _Connections(urllib3.PoolManager):
    """Connections that send a form as a body: in the address, where the SDK puts it, logs and messages would show the token."""

    def urlopen(self, method: str, url: str, redirect: bool = True, **arguments: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        """Make a request.

        Raises:
            ValueError: The service refuses; the message is the code that it gives.
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
    """Return connections to what hands out credentials: a few quick tries, no redirection, no proxy.

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


def _shown(error: BaseException) -> str:
    """The first line of a message, without the query of an address."""
    lines = str(error).splitlines()
    if isinstance(error, KeyError):
        return f"the answer lacks {lines[0]}"
    return _QUERY.sub("", lines[0])[:300] if lines else type(error).__name__
