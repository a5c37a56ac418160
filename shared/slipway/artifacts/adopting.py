"""Files of inputs that become files of an output without being read: the output's manifest names their content again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from slipway.artifacts.faults import not_found_error
from slipway.artifacts.files import link_or_copy
from slipway.artifacts.manifest import ManifestFile
from slipway.artifacts.store import ArtifactStore
from slipway.errors import StageError
from slipway.files.paths import open_unlinked
from slipway.parts import Adopted


def adopted_files(
    store: ArtifactStore, inputs: Mapping[str, str], adopted: Iterable[Adopted]
) -> tuple[ManifestFile, ...]:
    """Return the entries of the adopted files for the output's manifest.

    Args:
        store: The store of the inputs.
        inputs: Digest of each input artifact by the input's name.
        adopted: The files.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND``, naming the input that the store has lost.
        StageError: ``RESULT_INVALID`` if an input does not have a file with the expected digest.
    """
    known: dict[str, dict[str, ManifestFile]] = {}
    entries = []
    for each in adopted:
        if each.input not in known:
            digest = inputs[each.input]
            if not store.exists(digest):
                raise not_found_error(digest)
            known[each.input] = {file.path: file for file in store.manifest(digest).files}
        entry = known[each.input].get(each.path)
        if entry is None or entry.digest != each.digest:
            raise StageError(
                f"{each.path} of the input {each.input} is {entry.digest if entry else 'missing'}, and should be {each.digest}",
                reason="RESULT_INVALID",
                about={"input": each.input, "path": each.path},
            )
        entries.append(entry)
    return tuple(entries)


def require_blobs(files: Iterable[ManifestFile], has_blob: Callable[[ManifestFile], bool]) -> None:
    """Check that a store has the content of files.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND``.
    """
    for file in files:
        if not has_blob(file):
            raise not_found_error(file.digest)


def place_adopted(target: Path, inputs: Mapping[str, Path], adopted: Iterable[Adopted]) -> None:
    """Put the adopted files of plain folders into an output folder, as hard links where that is possible.

    Args:
        target: The output folder.
        inputs: The folder of each input by the input's name.
        adopted: The files.
    """
    for each in adopted:
        path = target / each.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_unlinked(inputs[each.input] / each.path) as source:
            link_or_copy(source, path)
