"""Publish to the Hugging Face hub: all files of an export as one commit of a model repository.

Large files are sent first, by the protocol of Git LFS, and are nobody's before the commit; small ones are part of it. The commit names its
parent, so it is refused if somebody else has committed meanwhile. The library's other way to send, Xet, is not needed.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from slipway.errors import ArtifactError
from slipway.files.checksums import MANIFEST, parse_checksums
from slipway.publishing.destination import Access, OnWait, Published, destination_error
from slipway.publishing.hub.address import COMMIT, SCHEME, parse_address
from slipway.publishing.hub.repository import HubRepository
from slipway.publishing.hub.sending import CountedFile, blob_id, quiet_library
from slipway.publishing.publication import MOST_FILES, PROOF
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_NOT_OURS = frozenset({".gitattributes", ".gitignore", "README.md", "LICENSE"})
"""Files that the hub's own page puts into a new repository."""
_LARGEST_SMALL = 64 << 20
"""Largest file that is put into the commit itself; the hub wants this for files below 10 MB."""
_SAMPLE = 512
_ASKED_OFTEN = 429
_MOST_ENTRIES = 4 * MOST_FILES
_NOT_UNDERSTOOD = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, AssertionError)
_HTTP = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
"""Libraries that huggingface_hub speaks HTTP with, depending on its version."""


class HubDestination:
    """:class:`~slipway.publishing.destination.Destination` in a model repository of the hub.

    Args:
        url: ``hf://OWNER/NAME[@REVISION][?public]``; a repository that is made is private without ``?public``.
        access: The environment with ``HF_TOKEN``, and settings with the hub's address.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``STORE_DENIED`` without a token.
        ServiceError: ``UNSUPPORTED`` if huggingface_hub is not installed.
    """

    by_content = False

    def __init__(self, url: str, access: Access) -> None:
        self._url = url
        self._name, self._revision, self._public = parse_address(url)
        self._repository = HubRepository(url, self._name, access)
        if not self._repository.token:
            raise self._repository.error("signing in", "there is no token", "STORE_DENIED")
        self._api = self._repository.api
        self._private, self._parent = not self._public, ""
        self._there: dict[str, Any] = {}
        self._earlier: set[str] = set()
        self._added: dict[str, CommitOperationAdd] = {}
        self._lock, self._stack = threading.Lock(), contextlib.ExitStack()
        self._stack.enter_context(quiet_library())

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
            ConfigurationError: ``DESTINATION_INVALID`` for a public repository that is not said to be public.
        """
        self._check_rights()
        self._find()

    def begin(self, release: Release) -> None:  # noqa: ARG002 - nothing is replaced before the commit
        """Make the repository and the branch if they are not there, and read what they hold.

        Raises:
            ArtifactError: As :meth:`reach`; ``OUTPUT_EXISTS`` for a repository of something else.
        """
        if self._find() is None:
            with self._repository.translate_errors("making"):
                self._api.create_repo(self._name, private=not self._public, exist_ok=True)
        self._parent = self._branch()
        self._there = self._repository.files(self._parent)
        self._earlier = self._listed_before()

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:
        """As :meth:`~slipway.publishing.destination.Destination.has`."""
        on_wait()
        there = self._there.get(file.path)
        if there is None or (file.size_bytes > _LARGEST_SMALL and there.lfs is None):
            return False
        if there.lfs is not None:
            return (there.lfs.sha256, there.lfs.size) == (file.sha256, file.size_bytes)
        return bool(there.size == file.size_bytes and there.blob_id == blob_id(file.read()))

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`; a small file is kept for the commit."""
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        with file.opened() as opened, self._repository.translate_errors(f"sending {file.path} to"):
            sample = opened.read(_SAMPLE)
            counted = CountedFile(opened, on_bytes)
            counted.seek(0)
            addition = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=b"")
            # The digest is known: made of the file itself, it would be read once more for that.
            addition.upload_info = UploadInfo(size=file.size_bytes, sample=sample, sha256=bytes.fromhex(file.sha256))
            addition.path_or_fileobj = counted  # type: ignore[assignment]  # the library takes any io.BufferedIOBase
            self._api.preupload_lfs_files(
                self._name, [addition], revision=self._revision, num_threads=1, gitignore_content=""
            )
            uploaded = isinstance(addition.path_or_fileobj, bytes)  # emptied by the library
            if not uploaded:  # the hub wants it in the commit
                addition.path_or_fileobj = self._small(file, counted)
        with self._lock:
            self._added[file.path] = addition
        sent = min(counted.done, file.size_bytes) if uploaded else file.size_bytes
        on_bytes(file.size_bytes - min(counted.done, file.size_bytes))
        return sent

    def commit(self, release: Release) -> Published:
        """Commit everything at once; remove what only an earlier export had."""
        from huggingface_hub import CommitOperationDelete

        now = {file.path for file in release.files}
        gone = sorted(self._earlier - now)
        details: dict[str, Any] = {"revision": self._revision, "private": self._private}
        if not self._added and not gone:
            return Published(f"{SCHEME}{self._name}@{self._parent}", details=details)
        operations: list[Any] = [
            *(self._added[path] for path in sorted(self._added)),
            *(CommitOperationDelete(path_in_repo=path) for path in gone),
        ]
        publication = release.publication
        with self._repository.translate_errors("committing to"):
            done = self._api.create_commit(
                self._name,
                operations,
                commit_message=f"{publication.name}: export {publication.export_id}",
                revision=self._revision,
                parent_commit=self._parent,
            )
            commit = str(done.oid)
            if COMMIT.fullmatch(commit) is None:
                raise ValueError("the hub names no commit")
        return Published(f"{SCHEME}{self._name}@{commit}", details=details)

    def close(self) -> None:
        """Drop what was kept for the commit; the library closes its own connections."""
        self._added.clear()
        self._stack.close()

    def _check_rights(self) -> None:
        """Refuse a token that may not write for the owner, as far as the hub says so.

        It does not where it is asked often, and not for tokens with rights of their own: then a later step is refused.
        """
        from huggingface_hub.errors import HfHubHTTPError

        doing = "signing in"
        with self._repository.translate_errors(doing):
            try:
                said = self._api.whoami()
            except HfHubHTTPError as error:
                if error.response.status_code != _ASKED_OFTEN:
                    raise
                return
            owners = {said["name"], *(each["name"] for each in said.get("orgs", ()))}
            role = str(((said.get("auth") or {}).get("accessToken") or {}).get("role") or "")
        owner = self._name.partition("/")[0]
        if owner not in owners and role != "fineGrained":
            raise self._repository.error(doing, f"{owner} is neither you nor an organization of yours", "STORE_DENIED")
        if role == "read":
            raise self._repository.error(doing, "the token may only read", "STORE_DENIED")

    def _find(self) -> Any:
        """Return what the hub says of the repository; None if there is none.

        Raises:
            ConfigurationError: ``DESTINATION_INVALID`` for a public repository that is not said to be public.
        """
        info = self._repository.find()
        if info is None:
            return None
        self._private = bool(info.private)
        if not self._private and not self._public:
            raise destination_error(self._url, "the repository is public; write ?public behind it if that is meant")
        return info

    def _branch(self) -> str:
        """Return the commit at the head of the branch; make the branch if it is not there."""
        head = self._repository.head(self._revision)
        if not head:
            with self._repository.translate_errors("making the branch of"):
                self._api.create_branch(self._name, branch=self._revision, exist_ok=True)
            head = self._repository.head(self._revision)
        if not head:
            raise self._repository.error("making the branch of", "the branch is not there", "STORE_UNAVAILABLE")
        return head

    def _listed_before(self) -> set[str]:
        """Return the files of an earlier export that are there still.

        Raises:
            ArtifactError: ``OUTPUT_EXISTS`` if there are files of something else.
        """
        if MANIFEST not in self._there:
            others = sorted(self._there.keys() - _NOT_OURS)
            if others:
                raise self._occupied(f"it has {others[0]!r}, and no {MANIFEST}")
            return set()
        content = self._repository.read(MANIFEST, self._parent)
        try:
            listed = set(parse_checksums(content, where=f"{self._url}/{MANIFEST}"))
        except (ArtifactError, UnicodeDecodeError) as error:
            raise self._occupied(f"its {MANIFEST} is no list of checksums") from error
        return (listed | {*PROOF, MANIFEST}) & self._there.keys()

    def _small(self, file: ReleasedFile, opened: CountedFile) -> bytes:
        if file.size_bytes > _LARGEST_SMALL:
            what = f"it wants {file.path} in the commit, of {file.size_bytes} bytes"
            raise self._repository.error(f"sending {file.path} to", what, "STORE_INVALID")
        opened.seek(0)
        return b"".join(iter(lambda: opened.read(file.size_bytes + 1), b""))

    def _occupied(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self._url} holds something else: {shortened(one_line(what))}",
            reason="OUTPUT_EXISTS",
            remedy="publish to another repository or revision, or remove what is there",
            about={"destination": self._url},
        )
