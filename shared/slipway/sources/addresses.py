"""Addresses of sources: models of the Hugging Face hub, and addresses that workers may import from.

A model is ``hf://owner/name@revision``. The operator lists the addresses that workers may import from, because the workers'
credentials reach more than a client may read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ArtifactError, CheckpointValidationError, ConfigurationError, ModelExportError
from slipway.model.model_files import check_cached_reference
from slipway.settings.s3 import SCHEME as S3
from slipway.settings.s3 import parse_s3_url
from slipway.texts import redact_address

HUB = "hf://"
_REPOSITORY_NAME = re.compile(r"(?!\.)[\w.-]{1,96}(?:/(?!\.)[\w.-]{1,96})?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[\w.][\w./+-]{0,199}", re.ASCII)
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm")
"""Patterns of files to download; pickles, other frameworks' weights and code never match."""

_PROJECT = "{project}"


def is_repository(name: str) -> bool:
    """Return whether a name is a possible repository name."""
    return bool(_REPOSITORY_NAME.fullmatch(name))


def parse_hub_url(url: str) -> tuple[str, str]:
    """Return repository and revision of ``hf://owner/name@revision``; the revision is empty if none is given.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND``.
    """
    name, at, revision = url.removeprefix(HUB).partition("@")
    if not is_repository(name) or (at and not _REVISION.fullmatch(revision)):
        shown = redact_address(url) if {":", "?"} & {*url.removeprefix(HUB)} else url  # a revision is no secret
        raise hub_not_found_error(shown, "this is not a repository name", "write hf://owner/name@revision")
    return name, revision


def hub_folder(url: str) -> Path:
    """Return the folder of a repository's snapshot, from the local cache or downloaded.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND``.
    """
    name, revision = parse_hub_url(url)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise hub_not_found_error(url, "huggingface_hub is not installed", "pip install huggingface_hub") from error
    check_cached_reference(name, revision or None)
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except HFValidationError as error:
        raise hub_not_found_error(url, "this is not a repository name", "write hf://owner/name@revision") from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        what = f"it is not in the local cache and cannot be downloaded ({type(error).__name__})"
        remedy = f"on a machine with access: hf download {name}" + (f" --revision {revision}" if revision else "")
        raise hub_not_found_error(url, what, f"{remedy}; then name its folder, or copy the cache") from error


def hub_not_found_error(url: str, what: str, remedy: str) -> CheckpointValidationError:
    """Return the error of a repository that cannot be read."""
    return CheckpointValidationError(
        f"{url}: {what}", reason="BASE_MODEL_NOT_FOUND", remedy=remedy, about={"source": url}
    )


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
            scheme, parts = _split_entry(entry)
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
            allowed_scheme, allowed = _split_entry(entry)
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


def _split_entry(entry: str) -> tuple[str, list[str]]:
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
