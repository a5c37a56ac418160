"""The operator's list of addresses that workers may import from: their credentials reach more than a client may read."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.errors import ArtifactError, ConfigurationError, ModelExportError
from slipway.settings.s3 import SCHEME as S3
from slipway.settings.s3 import parse_s3_url
from slipway.sources.hub import SCHEME as HUB
from slipway.sources.hub import parse_hub_url

_PROJECT = "{project}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """Allowed addresses, each with everything below it.

    Attributes:
        entries: ``s3://bucket/prefix``, ``hf://owner``, ``hf://owner/name``; ``s3://`` and ``hf://`` alone for all. ``{project}`` stands
            for the project of the export.
    """

    entries: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Parse the list in a setting, separated by spaces or commas.

        Raises:
            ConfigurationError: An entry is not an address.
        """
        entries = tuple(text.replace(",", " ").split())
        for entry in entries:
            scheme, parts = _split(entry)
            if not scheme or any(_PROJECT in part and part != _PROJECT for part in parts) or parts[:1] == [_PROJECT]:
                raise ConfigurationError(
                    f"SLIPWAY_IMPORT_FROM names {entry!r}",
                    remedy="name s3://bucket/prefix, hf://owner or hf://owner/name; {project} may stand for a whole folder",
                    about={"key": "SLIPWAY_IMPORT_FROM"},
                )
        return cls(entries)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def check(self, url: str, *, project: str) -> None:
        """Check that a source may be imported for a project.

        Raises:
            ArtifactError: ``SOURCE_NOT_ALLOWED``.
            ModelExportError: The address is malformed.
        """
        if not self._permits(url, project):
            raise ArtifactError(
                f"{url} may not be imported for the project {project}",
                reason="SOURCE_NOT_ALLOWED",
                remedy="ask the operator to name it in SLIPWAY_IMPORT_FROM of coordinator and workers, or upload it with --bring-sources",
                about={"source": url},
            )

    def _permits(self, url: str, project: str) -> bool:
        if url.startswith(S3):
            bucket, prefix = parse_s3_url(url)
            scheme, parts = S3, [bucket, *(prefix.split("/") if prefix else ())]
        elif url.startswith(HUB):
            scheme, parts = HUB, parse_hub_url(url)[0].split("/")
        else:
            return False
        if any(part in {"", ".", ".."} for part in parts):
            return False
        for entry in self.entries:
            allowed_scheme, allowed = _split(entry)
            if _PROJECT in allowed and not project:
                continue
            begin = [project if part == _PROJECT else part for part in allowed]
            if scheme == allowed_scheme and parts[: len(begin)] == begin:
                return True
        return False


NOWHERE = Allowed()


def is_url(source: str) -> bool:
    """Return whether a source has the form of one that a worker can import."""
    return source.startswith((S3, HUB))


def _split(entry: str) -> tuple[str, list[str]]:
    """Return scheme and folders of an entry; an empty scheme for an invalid one."""
    for scheme in (S3, HUB):
        if entry.startswith(scheme):
            rest = entry.removeprefix(scheme).rstrip("/")
            parts = rest.split("/") if rest else []
            if any(part in {"", ".", ".."} or "@" in part or "?" in part for part in parts):
                return "", []
            if scheme == S3 and parts:
                try:
                    parse_s3_url(f"{S3}{parts[0]}")
                except ModelExportError:
                    return "", []
            return scheme, parts
    return "", []
