"""A repository of the Hugging Face hub at one commit, read over HTTP without the local cache."""

from __future__ import annotations

import copy
import hashlib
import re
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from slipway.artifacts.digests import is_digest
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError, CheckpointValidationError, ModelExportError
from slipway.machine.shortages import is_disk_full
from slipway.sources.addresses import HUB, HUB_FILES, hub_not_found_error, parse_hub_url
from slipway.sources.origins import OnWait, OriginFile

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_BYTES = 1 << 50
_NOT_UNDERSTOOD = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
_TRIES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_TIMEOUT_SECONDS = 30.0
_LEAST_RATE, _LEAST_ANSWER = 1 << 10, 32 << 10
"""Least progress: bytes a second of a response after its first half minute, and bytes of a response that breaks off."""


class HubOrigin:
    """A repository at the present commit of its revision.

    Args:
        url: ``hf://owner/name@revision``; without a revision, the main branch.
        endpoint: Address of the hub; empty for the library's default.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND`` if it does not exist or the credentials give no access.
        ArtifactError: ``STORE_UNAVAILABLE`` while the hub is unavailable.
    """

    def __init__(self, url: str, *, endpoint: str = "") -> None:
        from huggingface_hub import HfApi

        self.repository, self.revision = parse_hub_url(url)
        self._endpoint = endpoint or None
        self._on_wait: OnWait = lambda: None
        self.url = url
        with _translate_errors(url):
            info = HfApi(endpoint=self._endpoint).model_info(
                self.repository, revision=self.revision or None, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
            self._files = [
                _file(entry)
                for entry in info.siblings or ()
                if any(fnmatchcase(entry.rfilename, pattern) for pattern in HUB_FILES)
            ]
        self.commit = str(info.sha or "")
        if not _COMMIT.fullmatch(self.commit):
            raise _not_found_error(url, "the hub names no commit of it")
        self.pinned = f"{HUB}{self.repository}@{self.commit}"
        self.service = endpoint or HUB
        self.where = self.pinned if self._endpoint is None else f"{self.pinned} at {self._endpoint}"

    def during(self, on_wait: OnWait) -> Self:
        """As :meth:`~slipway.sources.origins.Origin.during`."""
        watched = copy.copy(self)
        watched._on_wait = on_wait
        return watched

    def listing(self, *, most: int) -> list[OriginFile]:  # noqa: ARG002 - one response has all files
        """As :meth:`~slipway.sources.origins.Origin.listing`; pickles and code are left out."""
        return sorted(self._files, key=lambda file: file.key)

    def read(self, file: OriginFile, offset: int, length: int) -> bytes:
        """As :meth:`~slipway.sources.origins.Origin.read`."""
        end = min(offset + length, file.size_bytes) if length else file.size_bytes
        return b"".join(self._chunks(file, range(offset, end)))

    def download(self, file: OriginFile, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes) -> str:  # noqa: ARG002
        """As :meth:`~slipway.sources.origins.Origin.download`; resume when a connection breaks off.

        Raises:
            ArtifactError: ``ARTIFACT_CORRUPT`` if the content does not have the hub's digest; ``DISK_FULL``.
        """
        sha = hashlib.sha256()
        try:
            with target.open("xb") as out:
                for data in self._chunks(file, range(file.size_bytes)):
                    out.write(data)
                    sha.update(data)
                    on_bytes(len(data))
        except OSError as error:
            if isinstance(error, ModelExportError) or not is_disk_full(error):
                raise
            raise ArtifactError(f"no space left for {file.key} of {self.pinned}", reason="DISK_FULL") from error
        digest = f"sha256:{sha.hexdigest()}"
        if file.digest and digest != file.digest:
            raise ArtifactError(
                f"{file.key} of {self.pinned} came with the digest {digest}, the hub says {file.digest}",
                reason="ARTIFACT_CORRUPT",
                retryable=True,
                about={"source": self.pinned, "file": file.key},
            )
        return digest

    def still_has(self, file: OriginFile) -> bool:  # noqa: ARG002
        """Return True: a commit does not change."""
        return True

    def _chunks(self, file: OriginFile, span: range) -> Iterator[bytes]:
        """Yield exactly the bytes of a span."""
        position, fruitless = span.start, 0
        while position < span.stop:
            self._on_wait()
            begin, began = position, time.monotonic()
            fault = _unavailable_error(self.url, f"{file.key} ends after {position} of {file.size_bytes} bytes")
            try:
                with _translate_errors(self.url), closing(self._request(file, range(position, span.stop))) as answer:
                    for data in answer:
                        self._on_wait()
                        taken = data[: span.stop - position]
                        position += len(taken)
                        yield taken
                        if (time.monotonic() - began - _TIMEOUT_SECONDS) * _LEAST_RATE > position - begin:
                            raise _unavailable_error(
                                self.url, f"{file.key} comes more slowly than {_LEAST_RATE} bytes a second"
                            )
                        if position == span.stop:
                            break
            except ArtifactError as error:
                if error.reason != "STORE_UNAVAILABLE":
                    raise
                fault = error
            fruitless = fruitless + 1 if position - begin < _LEAST_ANSWER else 0
            if fruitless == _TRIES:
                raise fault
            if position < span.stop:
                self._pause(min(_FIRST_PAUSE * 2**fruitless, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        """Sleep in short pieces, so that a cancelled import ends soon."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._on_wait()
            time.sleep(min(left, 0.25))

    def _request(self, file: OriginFile, span: range) -> Generator[bytes]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        url = hf_hub_url(self.repository, file.key, revision=self.commit, endpoint=self._endpoint)
        whole = span == range(file.size_bytes)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        headers |= {} if whole else {"Range": f"bytes={span.start}-{span.stop - 1}"}
        # No retries by the library: its context would swallow errors raised while the response is read.
        options: dict[str, Any] = {"timeout": _TIMEOUT_SECONDS, "follow_redirects": True, "max_retries": 0}
        with http_stream_backoff("GET", url, headers=headers, **options) as response:
            hf_raise_for_status(response)
            if not whole and response.status_code != 206:
                raise _unavailable_error(self.url, "the hub does not send parts of files")
            yield from response.iter_raw()


def _file(entry: Any) -> OriginFile:
    """Return a file that the hub lists.

    Raises:
        ValueError: The entry is not one of a file.
    """
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs is not None else ""
    size = entry.lfs.size if entry.lfs is not None else entry.size or 0
    if not isinstance(size, int) or not 0 <= size <= _LARGEST_BYTES or (digest and not is_digest(digest)):
        raise ValueError(f"{entry.rfilename} has the size {size!r} and the digest {digest!r}")
    return OriginFile(entry.rfilename, size, str(entry.blob_id or digest), digest)


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Translate the library's errors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except ModelExportError:
        raise
    except HFValidationError as error:
        raise _not_found_error(url, "this is not a repository name") from error
    except OfflineModeIsEnabled as error:
        raise _not_found_error(url, "HF_HUB_OFFLINE forbids this worker to use the hub") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status not in {408, 429}:
            raise _not_found_error(url, f"the hub answers {status} ({type(error).__name__})") from error
        raise _unavailable_error(url, f"the hub answers {status}") from error
    except _NOT_UNDERSTOOD as error:  # a proxy's page, or a hub of another kind
        raise _unavailable_error(url, f"the hub's answer cannot be understood ({type(error).__name__})") from error
    except Exception as error:
        if not _is_connection_error(error):
            raise
        raise _unavailable_error(url, type(error).__name__) from error


def _is_connection_error(error: Exception) -> bool:
    """Return whether an error is about the connection; the HTTP library depends on huggingface_hub's version."""
    if isinstance(error, OSError):
        return not is_disk_full(error)
    return type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}


def _not_found_error(url: str, what: str) -> CheckpointValidationError:
    remedy = "check owner, name and revision; a private or gated repository needs the workers' HF_TOKEN"
    return hub_not_found_error(url, what, remedy)


def _unavailable_error(url: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{url} cannot be read now: {what}",
        reason="STORE_UNAVAILABLE",
        remedy="check that the workers reach the hub (HF_ENDPOINT), then try again",
        about={"source": url},
    )
