#!/usr/bin/env python3
"""Pin other people's images by digest: ``deploy/pin_images.py [--check]``.

Each foreign image is named once, with its tag: in ``compose.yaml``, or as ``BASE`` of a Dockerfile. This asks the image's registry for the
digest of that tag and writes it behind the tag (``haproxy:3.2.5@sha256:…``), where docker, podman and buildah obey it. Run it after a tag has
changed. ``--check`` writes nothing and ends with 1 if an image is not pinned, or its tag has moved. Uses only Python's own library.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
_NAMED = re.compile(
    r"^(?P<before>[ \t]*image:[ \t]*|ARG BASE=)(?P<image>(?!slipway-)[a-z0-9./:_-]+?:[\w][\w.-]*)(?P<digest>@sha256:[0-9a-f]{64})?[ \t]*$",
    re.MULTILINE,
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KINDS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_HUB, _SECONDS = "registry-1.docker.io", 30.0


class UnknownDigestError(Exception):
    """A registry does not say an image's digest; the text says why."""


def digest_of(image: str) -> str:
    """Ask an image's registry for the digest of its tag.

    Raises:
        UnknownDigestError: It cannot be reached, or has no such image.
    """
    name, _, tag = image.rpartition(":")
    host, _, path = name.partition("/")
    if not path or not ("." in host or ":" in host or host == "localhost"):
        host, path = _HUB, name if "/" in name else f"library/{name}"
    scheme = "http" if host.partition(":")[0] in {"localhost", "127.0.0.1"} else "https"
    address = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    try:
        try:
            found = _digest(address, "")
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            error.close()
            if error.code != 401 or not challenge:
                raise
            found = _digest(address, _token(challenge))
    except (OSError, ValueError, KeyError) as error:
        raise UnknownDigestError(f"{host} does not say the digest of {image} ({error})") from error
    if not _DIGEST.fullmatch(found):
        raise UnknownDigestError(f"{host} gives {found[:80]!r} as the digest of {image}")
    return found


def _digest(address: str, token: str) -> str:
    headers = {"Accept": _KINDS} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(address, method="HEAD", headers=headers)  # noqa: S310 - its scheme is ours
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        return str(answer.headers.get("Docker-Content-Digest", ""))


def _token(challenge: str) -> str:
    """Fetch the token of an anonymous reader, as ``WWW-Authenticate`` says."""
    parts = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: parts[key] for key in ("service", "scope") if key in parts})
    realm = parts["realm"]
    if not realm.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
        raise ValueError(f"its tokens come from {realm}")
    with urllib.request.urlopen(f"{realm}?{query}", timeout=_SECONDS) as answer:  # noqa: S310 - checked above
        found = json.load(answer)
    return str(found.get("token") or found["access_token"])


def pin(files: Sequence[Path], *, check: bool, ask: Callable[[str], str] = digest_of) -> int:
    """Pin the images that files name; return the exit code."""
    problems = 0
    for path in files:
        text = path.read_text(encoding="utf-8")

        def pinned(named: re.Match[str], file: str = path.name) -> str:
            nonlocal problems
            before = named["digest"] or ""
            try:
                after = f"@{ask(named['image'])}"
            except UnknownDigestError as error:
                problems += 1
                print(f"{file}: {error}", file=sys.stderr)
                return named[0]
            if before != after:
                problems += check
                print(
                    f"{file}: {named['image']} is {after[1:]}, {'pinned to ' + before[1:] if before else 'not pinned'}"
                )
            return f"{named['before']}{named['image']}{after}"

        changed = _NAMED.sub(pinned, text)
        if changed != text and not check:
            path.write_text(changed, encoding="utf-8")
    return 1 if problems else 0


def main() -> int:
    """Read the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Pin other people's images by digest.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 if an image is not pinned as its tag is"
    )
    parser.add_argument("files", nargs="*", type=Path, help="by default compose.yaml and the Dockerfiles here")
    given = parser.parse_args()
    return pin(given.files or [_FOLDER / "compose.yaml", *sorted(_FOLDER.glob("Dockerfile.*"))], check=given.check)


if __name__ == "__main__":
    sys.exit(main())
