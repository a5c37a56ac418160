"""Places to publish to: what each of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipway.errors import ConfigurationError
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.settings import Settings
from slipway.texts import quoted, redact_address

OCI = "oci://"
OnWait = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Published:
    """What a destination holds now.

    Attributes:
        address: Where it is, pinned by a digest if the destination has one.
        sent_bytes: Bytes of files that were sent. What a destination itself returns is for what it makes of them, such as images.
        kept_bytes: Bytes that were there already, likewise.
        details: What only this kind of destination has.
    """

    address: str
    sent_bytes: int = 0
    kept_bytes: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what ``slipway publish --json`` prints."""
        sizes = {"sent_bytes": self.sent_bytes, "kept_bytes": self.kept_bytes}
        return {"address": self.address, **sizes, **self.details}


class Destination(Protocol):
    """A place to publish to. Nothing is published before :meth:`commit` ends."""

    by_content: bool
    """Whether files with the same content are sent once."""

    def reach(self) -> None:
        """Fail now if it cannot be reached or refuses the credentials; files of gigabytes are read next."""

    def begin(self, release: Release) -> None:
        """Prepare to take a release; what is there of another one is no longer whole from now on, or stays whole to the end."""

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:
        """Return whether it has the content of a file; ``on_wait`` is called while it waits, and may raise."""

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """Send a file, in pieces, and return how many bytes were sent; ``on_bytes`` gets the size of each piece."""

    def commit(self, release: Release) -> Published:
        """Publish what was sent, all at once; return its address."""

    def close(self) -> None:
        """Close its connections."""


@dataclass(frozen=True, slots=True)
class Access:
    """How destinations are reached.

    Attributes:
        settings: Settings of this machine, with the credentials of S3.
        environment: Environment variables, for the credentials of registries.
        insecure: Whether plain HTTP is allowed, and not only on this machine.
        patience_seconds: How long a request is repeated while a destination is unavailable.
    """

    settings: Settings
    environment: Mapping[str, str]
    insecure: bool = False
    patience_seconds: float = 60.0


def destination_error(url: str, what: str) -> ConfigurationError:
    """Return the error for an address that is none of a destination."""
    shown = redact_address(url)
    return ConfigurationError(
        f"{quoted(shown)} is not a place to publish to: {what}",
        reason="DESTINATION_INVALID",
        remedy="write oci://REGISTRY/NAME[:TAG][?modelcar[=BASE]], s3://BUCKET/PREFIX, hf://OWNER/NAME[@BRANCH][?public], mlflow:NAME with the "
        "server in MLFLOW_TRACKING_URI, or kubeflow:NAME@ADDRESS with the address of another place and the server in KUBEFLOW_MODEL_REGISTRY",
        about={"destination": shown},
    )
