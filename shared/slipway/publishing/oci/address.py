"""Addresses of artifacts in registries, and the credentials for a registry."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json, read_json_object
from slipway.publishing.destination import OCI, destination_error

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_ADDRESS = re.compile(
    rf"oci://(?P<host>{_HOST})/(?P<name>{_COMPONENT}(?:/{_COMPONENT})*)"
    rf"(?::(?P<tag>{_TAG}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_MODELCAR = "?modelcar"
_LONGEST_NAME = 255
_USER, _PASSWORD = "SLIPWAY_REGISTRY_USER", "SLIPWAY_REGISTRY_PASSWORD"
_HELPER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HELPER_SECONDS = 30
_MOST_ANSWER = 64 << 10
_TOKEN_USER = "<token>"  # noqa: S105 - what helpers answer in place of a user


@dataclass(frozen=True, slots=True)
class Address:
    """A repository of a registry, with a tag or a digest in it.

    Attributes:
        host: Host of the registry, with a port if it has one.
        name: Name of the repository.
        tag: The tag; ``latest`` if none was given.
        digest: Digest of a manifest, which wins over the tag; empty if none was given.
    """

    host: str
    name: str
    tag: str = "latest"
    digest: str = ""

    @property
    def reference(self) -> str:
        """Return what names the manifest in the repository."""
        return self.digest or self.tag

    def __str__(self) -> str:
        return f"{OCI}{self.host}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")

    @property
    def is_local(self) -> bool:
        """Return whether the registry is on this machine."""
        host = self.host.rpartition(":")[0] if re.search(r":[0-9]+$", self.host) else self.host
        return is_loopback(host.strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(url: str) -> Address:
    """Read ``oci://REGISTRY/NAME[:TAG][@DIGEST]``.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
    """
    parts = _ADDRESS.fullmatch(url)
    if parts is None or len(parts["name"]) > _LONGEST_NAME:
        raise destination_error(
            url, "names in registries have lower-case letters, digits, and single . _ - / between them"
        )
    return Address(parts["host"], parts["name"], parts["tag"] or "latest", parts["digest"] or "")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to publish in a registry, and in which forms.

    Attributes:
        address: The repository and the tag.
        modelcar: Whether each output is also published as an image for KServe.
        base: Image of the same registry with which these images begin; None for none.
    """

    address: Address
    modelcar: bool = False
    base: Address | None = None


def parse_target(url: str) -> Target:
    """Read ``oci://REGISTRY/NAME[:TAG][?modelcar[=BASE]]``; the base is ``NAME[:TAG][@DIGEST]``.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
    """
    place, option, base = url.partition(_MODELCAR)
    if not option:
        return Target(parse_address(url))
    address = parse_address(place)
    if not base:
        return Target(address, modelcar=True)
    named = _ADDRESS.fullmatch(f"{OCI}{address.host}/{base[1:]}") if base.startswith("=") else None
    if named is None:
        what = "its option is ?modelcar or ?modelcar=NAME:TAG, where NAME is an image of the same registry"
        raise destination_error(url, what)
    return Target(address, modelcar=True, base=parse_address(named[0]))


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks a registry. Its ``repr`` shows no secret.

    Attributes:
        user: The user; empty for a refresh token.
        secret: Password or refresh token.
    """

    user: str
    secret: SecretStr

    @property
    def basic(self) -> str:
        """Return the header's value for HTTP's basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret.get_secret_value()}".encode()).decode()


def find_credentials(address: Address, environment: Mapping[str, str]) -> Credentials | None:
    """Return the credentials for a registry: from the variables, or from where docker and podman keep them; None without any.

    Raises:
        ArtifactError: ``STORE_DENIED`` if a file or a helper that has them cannot be understood.
    """
    user, password = environment.get(_USER), environment.get(_PASSWORD)
    if user and password:
        return Credentials(user, SecretStr(password))
    for file in _files(environment):
        if not file.is_file():
            continue
        try:
            document = read_json_object(file, lenient=True)
        except (OSError, ValueError) as error:
            raise _unusable_error(address, f"{file} cannot be read: {error}") from error
        if credentials := _of_document(document, address, environment):
            return credentials
    return None


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    if name := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(name)
    folder = environment.get("DOCKER_CONFIG")
    yield Path(folder, "config.json") if folder else Path("~/.docker/config.json").expanduser()
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers", "auth.json")


def _of_document(document: dict[str, Any], address: Address, environment: Mapping[str, str]) -> Credentials | None:
    """Look for the longest part of the repository's name that has credentials, then for its host."""
    parts = [address.host, *address.name.split("/")]
    places = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    helpers, entries = document.get("credHelpers"), document.get("auths")
    helper = helpers.get(address.host) if isinstance(helpers, dict) else None
    if helper or document.get("credsStore"):
        found = _of_helper(str(helper or document["credsStore"]), address, environment)
        if found or helper:
            return found
    entries = entries if isinstance(entries, dict) else {}
    for place in (*places, f"https://{address.host}", f"https://{address.host}/v2/", f"https://{address.host}/v1/"):
        entry = entries.get(place)
        if isinstance(entry, dict) and (found := _of_entry(entry, address)):
            return found
    return None


def _of_entry(entry: dict[str, Any], address: Address) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials("", SecretStr(str(token)))
    if not entry.get("auth"):
        return None
    try:
        user, separator, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except (binascii.Error, ValueError) as error:
        raise _unusable_error(address, "its entry in docker's configuration is not valid") from error
    return Credentials(user, SecretStr(password.rstrip("\0"))) if separator else None


def _of_helper(name: str, address: Address, environment: Mapping[str, str]) -> Credentials | None:
    """Ask a program that keeps docker's credentials; None if it has none for this registry."""
    program = (
        shutil.which(f"docker-credential-{name}", path=environment.get("PATH")) if _HELPER.fullmatch(name) else None
    )
    if program is None:
        raise _unusable_error(address, f"docker's configuration names the helper {name[:64]!r}, which is not installed")
    try:
        done = subprocess.run(
            [program, "get"],
            input=address.host.encode(),
            capture_output=True,
            timeout=_HELPER_SECONDS,
            env=dict(environment),
            check=False,
        )
        if done.returncode:
            return None
        answer = parse_json(done.stdout[:_MOST_ANSWER], lenient=True)
        user, secret = str(answer["Username"]), SecretStr(str(answer["Secret"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        raise _unusable_error(address, f"the helper {name} gave no answer that can be used") from error
    return Credentials("" if user == _TOKEN_USER else user, secret)


def _unusable_error(address: Address, what: str) -> ArtifactError:
    return ArtifactError(
        f"the credentials for {address.host} cannot be used: {what}",
        reason="STORE_DENIED",
        remedy=f"log in again with docker login {address.host}, or set {_USER} and {_PASSWORD}",
        about={"registry": address.host},
    )


def credentials_remedy(address: Address) -> str:
    """Say how to give credentials for a registry."""
    return f"check name and rights; log in with docker login {address.host}, or set {_USER} and {_PASSWORD}"
