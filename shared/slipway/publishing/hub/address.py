"""Addresses on the Hugging Face hub: which model repository and branch, and whether it may be public."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from slipway.publishing.destination import destination_error
from slipway.publishing.oci.address import is_loopback

SCHEME = "hf://"
_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_ADDRESS = re.compile(
    rf"hf://(?P<name>{_NAME}/{_NAME})(?:@(?P<revision>[\w.][\w./-]{{0,199}}))?(?P<public>\?public)?", re.A
)
COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


def parse_address(url: str, *, pinned: bool = False) -> tuple[str, str, bool]:
    """Return repository, branch and whether it may be public.

    Args:
        url: ``hf://OWNER/NAME[@REVISION][?public]``.
        pinned: Whether the revision may be a commit, as for reading.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
    """
    parts = _ADDRESS.fullmatch(url)
    name = parts["name"] if parts else ""
    if parts is None or any(mark in name for mark in ("--", "..")) or name.endswith(".git"):
        raise destination_error(url, "names on the hub have letters, digits, and single . _ - between them")
    revision = parts["revision"] or _MAIN
    refused = ("..", "//", "/.", "@{")
    bad = any(mark in f"/{revision}" for mark in refused) or revision.endswith(("/", ".", ".lock"))
    if bad or revision.startswith("refs/") or (COMMIT.fullmatch(revision) and not pinned):
        raise destination_error(url, f"{revision!r} is not the name of a branch")
    return name, revision, parts["public"] is not None


def check_endpoint(url: str, endpoint: str, *, insecure: bool) -> None:
    """Refuse to send a token in clear."""
    try:
        parts = urlsplit(endpoint or "https://")
        safe = parts.scheme == "https" or (parts.scheme == "http" and (insecure or is_loopback(parts.hostname or "")))
    except ValueError:
        safe = False
    if not safe:
        raise destination_error(url, "HF_ENDPOINT is not https://…; --insecure allows plain HTTP")
