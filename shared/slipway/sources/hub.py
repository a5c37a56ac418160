"""Models of the Hugging Face hub: ``hf://owner/name@revision``."""

from __future__ import annotations

import re
from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.model_files import check_cached_reference
from slipway.redaction import redact_address

SCHEME = "hf://"
_NAME = re.compile(r"(?!\.)[\w.-]{1,96}(?:/(?!\.)[\w.-]{1,96})?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[\w.][\w./+-]{0,199}", re.ASCII)
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm")
"""Patterns of files to download; pickles, other frameworks' weights and code never match."""


def is_repository(name: str) -> bool:
    """Return whether a name is a possible repository name."""
    return bool(_NAME.fullmatch(name))


def parse_hub_url(url: str) -> tuple[str, str]:
    """Return repository and revision of ``hf://owner/name@revision``; the revision is empty if none is given.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND``.
    """
    name, at, revision = url.removeprefix(SCHEME).partition("@")
    if not is_repository(name) or (at and not _REVISION.fullmatch(revision)):
        shown = redact_address(url) if {":", "?"} & {*url.removeprefix(SCHEME)} else url  # a revision is no secret
        raise not_found_error(shown, "this is not a repository name", "write hf://owner/name@revision")
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
        raise not_found_error(url, "huggingface_hub is not installed", "pip install huggingface_hub") from error
    check_cached_reference(name, revision or None)
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except HFValidationError as error:
        raise not_found_error(url, "this is not a repository name", "write hf://owner/name@revision") from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(WANTED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        what = f"it is not in the local cache and cannot be downloaded ({type(error).__name__})"
        remedy = f"on a machine with access: hf download {name}" + (f" --revision {revision}" if revision else "")
        raise not_found_error(url, what, f"{remedy}; then name its folder, or copy the cache") from error


def not_found_error(url: str, what: str, remedy: str) -> CheckpointValidationError:
    """Return the error of a repository that cannot be read."""
    return CheckpointValidationError(
        f"{url}: {what}", reason="BASE_MODEL_NOT_FOUND", remedy=remedy, about={"source": url}
    )
