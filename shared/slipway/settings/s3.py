"""Address and credentials of an S3 store, from the variables that AWS's and MinIO's own tools use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr

from slipway.errors import ArtifactError
from slipway.texts import redact_address

SCHEME = "s3://"
_AWS = "https://s3.amazonaws.com"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "MINIO_ENDPOINT")
_STS_ENDPOINTS = ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")
_ACCESS_KEYS = ("AWS_ACCESS_KEY_ID", "MINIO_ACCESS_KEY", "MINIO_ROOT_USER")
_SECRET_KEYS = ("AWS_SECRET_ACCESS_KEY", "MINIO_SECRET_KEY", "MINIO_ROOT_PASSWORD")
_BUCKET = r"(?![^/]*(?:\.\.|\.-|-\.))(?!(?:\d+\.){3}\d+(?:/|$))[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]"
_URL = re.compile(rf"s3://(?P<bucket>{_BUCKET})(?:/(?P<prefix>[^?#]*))?")
_ECS_AGENT = "http://169.254.170.2"


class S3Options(BaseModel):
    """An S3 service and the credentials for it. Keys are secrets: ``repr`` never shows them.

    Attributes:
        endpoint: ``http(s)://host[:port]`` (``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` or ``MINIO_ENDPOINT``).
        region: ``AWS_REGION`` or ``AWS_DEFAULT_REGION``.
        access_key: ``AWS_ACCESS_KEY_ID``, ``MINIO_ACCESS_KEY`` or ``MINIO_ROOT_USER``; if empty, the other sources below are used.
        secret_key: ``AWS_SECRET_ACCESS_KEY``, ``MINIO_SECRET_KEY`` or ``MINIO_ROOT_PASSWORD``.
        session_token: ``AWS_SESSION_TOKEN``.
        credentials_file: ``AWS_SHARED_CREDENTIALS_FILE``, read again for every request, so that keys can be exchanged.
        profile: Profile in that file (``AWS_PROFILE``).
        web_identity_token_file: Token of a service account (``AWS_WEB_IDENTITY_TOKEN_FILE``), read again whenever credentials are renewed.
        role_arn: Role for which the token is exchanged (``AWS_ROLE_ARN``).
        role_session_name: ``AWS_ROLE_SESSION_NAME``.
        sts_endpoint: Service that exchanges the token (``AWS_ENDPOINT_URL_STS``, ``AWS_ENDPOINT_URL``, or the endpoint of AWS in the region).
        container_url: Agent that provides a container's credentials (``AWS_CONTAINER_CREDENTIALS_FULL_URI``, or
            ``AWS_CONTAINER_CREDENTIALS_RELATIVE_URI`` of the ECS agent).
        container_token: ``AWS_CONTAINER_AUTHORIZATION_TOKEN``.
        container_token_file: ``AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE``, read again for every use; it wins over ``container_token``.
        ca_file: Certificates to trust (``AWS_CA_BUNDLE`` or ``SSL_CERT_FILE``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = _AWS
    region: str = "us-east-1"
    access_key: SecretStr = SecretStr("")
    secret_key: SecretStr = SecretStr("")
    session_token: SecretStr = SecretStr("")
    credentials_file: Path = Path("~/.aws/credentials")
    profile: str = "default"
    web_identity_token_file: Path | None = None
    role_arn: str = ""
    role_session_name: str = "slipway"
    sts_endpoint: str = ""
    container_url: str = ""
    container_token: SecretStr = SecretStr("")
    container_token_file: Path | None = None
    ca_file: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> S3Options:
        """Read the options from the standard variables."""
        region = _first(environment, ("AWS_REGION", "AWS_DEFAULT_REGION")) or "us-east-1"
        return cls(
            endpoint=_with_scheme(_first(environment, _ENDPOINTS) or _AWS),
            region=region,
            access_key=SecretStr(_first(environment, _ACCESS_KEYS)),
            secret_key=SecretStr(_first(environment, _SECRET_KEYS)),
            session_token=SecretStr(environment.get("AWS_SESSION_TOKEN", "")),
            credentials_file=Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"),
            profile=environment.get("AWS_PROFILE") or "default",
            web_identity_token_file=_path(environment, "AWS_WEB_IDENTITY_TOKEN_FILE"),
            role_arn=environment.get("AWS_ROLE_ARN", ""),
            role_session_name=environment.get("AWS_ROLE_SESSION_NAME") or "slipway",
            sts_endpoint=_with_scheme(_first(environment, _STS_ENDPOINTS) or _sts_of_region(region)),
            container_url=_container_url(environment),
            container_token=SecretStr(environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")),
            container_token_file=_path(environment, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
            ca_file=_first(environment, ("AWS_CA_BUNDLE", "SSL_CERT_FILE")),
        )


def parse_s3_url(url: str) -> tuple[str, str]:
    """Split ``s3://bucket/prefix`` into bucket and prefix; the prefix has no slash at either end.

    Raises:
        ArtifactError: ``STORE_INVALID``.
    """
    parts = _URL.fullmatch(url)
    if parts is None:
        url = redact_address(url)
        raise ArtifactError(
            f"{url!r} is not an address in S3",
            reason="STORE_INVALID",
            remedy="write s3://bucket/prefix, where the bucket's name has 3 to 63 letters, digits, dots and dashes; set the endpoint in AWS_ENDPOINT_URL and credentials in AWS_* variables",
            about={"url": url},
        )
    return parts["bucket"], (parts["prefix"] or "").strip("/")


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    return Path(environment[name]) if environment.get(name) else None


def _with_scheme(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"https://{endpoint}"


def _sts_of_region(region: str) -> str:
    return f"https://sts.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _container_url(environment: Mapping[str, str]) -> str:
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "")
    if relative:
        return f"{_ECS_AGENT}/{relative.lstrip('/')}"
    return environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
