"""A model repository of the hub: who asks for it, which files a commit has, and the library's errors as our own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slipway.errors import ArtifactError, ModelExportError, ServiceError
from slipway.publishing.destination import Access
from slipway.publishing.hub.address import COMMIT, check_endpoint
from slipway.publishing.hub.sending import causes_of
from slipway.publishing.publication import LARGEST_DOCUMENT, MOST_FILES
from slipway.texts import one_line, redact, shortened

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_MOST_ENTRIES = 4 * MOST_FILES
_NOT_UNDERSTOOD = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, AssertionError)
_HTTP = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
"""Libraries that huggingface_hub speaks HTTP with, depending on its version."""


class HubRepository:
    """A model repository, which may not exist.

    Args:
        url: Its address, for messages.
        name: ``OWNER/NAME``.
        access: The environment with ``HF_TOKEN``, and settings with the hub's address.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID`` if a token would be sent in clear.
        ServiceError: ``UNSUPPORTED`` if huggingface_hub is not installed.
    """

    def __init__(self, url: str, name: str, access: Access) -> None:
        self.url, self.name = url, name
        endpoint = access.settings.hub_endpoint
        check_endpoint(url, endpoint, insecure=access.insecure)
        if find_spec("huggingface_hub") is None:
            raise ServiceError(
                "the hub needs huggingface_hub", reason="UNSUPPORTED", remedy="pip install huggingface_hub"
            )
        from huggingface_hub import HfApi, get_token

        self.token = access.environment.get("HF_TOKEN") or get_token() or ""
        self.api: HfApi = HfApi(endpoint=endpoint or None, token=self.token or False, library_name="slipway")

    def find(self) -> Any:
        """Return what the hub says of the repository; None if there is none, or none that the caller may see.

        Raises:
            ArtifactError: As :meth:`translate_errors`.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with self.translate_errors("looking for"):
            try:
                return self.api.model_info(self.name)
            except RepositoryNotFoundError:
                return None

    def head(self, revision: str) -> str:
        """Return the commit of a branch; empty if there is no such branch.

        Raises:
            ArtifactError: As :meth:`translate_errors`.
        """
        from huggingface_hub.errors import RevisionNotFoundError

        with self.translate_errors("looking for the branch of"):
            try:
                head = str(self.api.model_info(self.name, revision=revision).sha or "")
            except RevisionNotFoundError:
                return ""
            if COMMIT.fullmatch(head) is None:
                raise ValueError("the hub names no commit")
            return head

    def files(self, commit: str) -> dict[str, Any]:
        """Return the files of a commit by their paths, as the library describes them.

        Raises:
            ArtifactError: As :meth:`translate_errors`.
        """
        there: dict[str, Any] = {}
        with self.translate_errors("listing"):
            for entry in self.api.list_repo_tree(self.name, revision=commit, recursive=True):
                if hasattr(entry, "blob_id"):
                    there[str(entry.path)] = entry
                if len(there) > _MOST_ENTRIES:
                    raise self.error("listing", f"it holds more than {_MOST_ENTRIES} files", "STORE_INVALID")
        return there

    def read(self, path: str, commit: str, *, most: int = LARGEST_DOCUMENT) -> bytes:
        """Return the content of a file at a commit.

        Raises:
            ArtifactError: As :meth:`translate_errors`.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        with self.translate_errors(f"reading {path} of"):
            url = hf_hub_url(self.name, path, revision=commit, endpoint=self.api.endpoint)
            headers = build_hf_headers(token=self.api.token) | {"Accept-Encoding": "identity"}
            data = bytearray()
            with http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > most:
                        raise ValueError(f"{path} has more than {most} bytes")
            return bytes(data)

    @contextlib.contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Translate the library's errors, which may be the causes of others; our own come back as they are."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except Exception as error:
            chain = list(causes_of(error))
            if own := next((each for each in chain if isinstance(each, ModelExportError)), None):
                raise own from error.__cause__
            if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
                raise self.error(doing, "HF_HUB_OFFLINE forbids to use the hub", "STORE_INVALID") from error
            if answer := next((each for each in chain if isinstance(each, HfHubHTTPError)), None):
                raise self._refusal(doing, answer.response.status_code) from error
            if any(type(each).__module__.partition(".")[0] in _HTTP or isinstance(each, OSError) for each in chain):
                raise self.error(doing, type(chain[-1]).__name__, "STORE_UNAVAILABLE") from error
            if not isinstance(error, _NOT_UNDERSTOOD):
                raise
            said = (
                f"its answer cannot be understood ({type(error).__name__}: {shortened(one_line(redact(str(error))))})"
            )
            raise self.error(doing, said, "STORE_INVALID") from error

    def _refusal(self, doing: str, status: int) -> ArtifactError:
        if status == 412:
            return self.error(doing, "somebody else has committed meanwhile", "STORE_UNAVAILABLE")
        if status in (401, 403):
            return self.error(doing, f"it answers {status}", "STORE_DENIED")
        passing = status >= 500 or status in (408, 409, 429)
        return self.error(doing, f"it answers {status}", "STORE_UNAVAILABLE" if passing else "STORE_INVALID")

    def error(self, doing: str, what: str, reason: str) -> ArtifactError:
        """Return the error for a call that failed."""
        remedies = {
            "STORE_UNAVAILABLE": "check that the hub can be reached (HF_ENDPOINT), then try again",
            "ARTIFACT_NOT_FOUND": "check the name; a private repository needs HF_TOKEN, or hf auth login",
            "STORE_DENIED": "set HF_TOKEN to a token that may write to the repository, or log in with hf auth login",
        }
        return ArtifactError(
            f"{doing} {self.url}: {what}",
            reason=reason,
            remedy=remedies.get(reason, "check the name, and that HF_ENDPOINT is the address of a hub"),
            about={"destination": self.url},
        )
