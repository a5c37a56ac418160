"""Find what can be exported in a folder: training runs, adapters and plain models, one level deep, each with its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ArtifactError, CheckpointValidationError, ConfigurationError
from slipway.files.paths import check_local, file_in, is_address, user_path
from slipway.model.runs.checkpoints import is_whole_model, list_checkpoints
from slipway.model.runs.saved_weights import foreign_adapter
from slipway.results.delivery import LINEAGE
from slipway.texts import counted, quoted

MOST_SUBJECTS = 1000
"""Most entries of a folder, and most runs of a list."""

_MOST_NAMED = 5
_CHECKPOINT = "checkpoint-"


@dataclass(frozen=True, slots=True)
class Subject:
    """What one export of a batch is made of.

    Attributes:
        name: Name for people: that of its folder, which for a checkpoint begins with its run's.
        path: Place of the run, the adapter or the model, as the configuration takes it.
        plain: Whether it is a whole model, which is exported as it is.
    """

    name: str
    path: str
    plain: bool = False

    def flags(self, flags: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the flags of an export of it alone, given those that all exports share."""
        own = {"--checkpoint": "none", "--base-model": self.path} if self.plain else {"RUN": self.path}
        return {**flags, **own}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An entry of the folder that is not exported.

    Attributes:
        name: Name of the entry.
        why: Why it is not exported.
    """

    name: str
    why: str


def find_subjects(folder: str | Path) -> tuple[list[Subject], list[LeftOut]]:
    """Return what can be exported in a folder, and what is left out, both sorted by name.

    Raises:
        ConfigurationError: ``BATCH_INVALID``: the folder is itself a run or a model, has too many entries, or is an address.
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND``: it does not exist, or nothing in it can be exported; ``FILE_ERROR``: it
            cannot be read.
    """
    check_local(folder, named_by="--each")
    place = user_path(folder).absolute()
    names = _names(place)
    _refuse_single(place)
    found = [_examine(place, name) for name in names]
    subjects = [each for each in found if isinstance(each, Subject)]
    left_out = [each for each in found if isinstance(each, LeftOut)]
    if not subjects:
        raise nothing_to_export(str(folder), left_out)
    return subjects, left_out


def subjects_of(runs: Iterable[str | os.PathLike[str]]) -> list[Subject]:
    """Return the subjects of a list of runs, in its order. A folder with a whole model is exported as it is.

    Raises:
        ConfigurationError: ``BATCH_INVALID``: the list is empty or too long.
    """
    places = [os.fspath(run) for run in runs]
    if not places or len(places) > MOST_SUBJECTS:
        raise ConfigurationError(
            f"a list of {counted(len(places), 'run')} is no batch",
            reason="BATCH_INVALID",
            remedy=f"name 1 to {MOST_SUBJECTS} runs",
            about={"key": "run"},
        )
    return [_subject(place) for place in places]


def nothing_to_export(folder: str, left_out: Iterable[LeftOut]) -> CheckpointValidationError:
    """Return the error for a folder in which nothing can be exported."""
    entries = list(left_out)
    named = "; ".join(f"{quoted(each.name)}: {each.why}" for each in entries[:_MOST_NAMED])
    more = f"; and {len(entries) - _MOST_NAMED} more" if len(entries) > _MOST_NAMED else ""
    return CheckpointValidationError(
        f"nothing in {folder} can be exported: " + (f"{named}{more}" if entries else "it is empty"),
        reason="CHECKPOINT_NOT_FOUND",
        remedy="name the folder that holds the folders of the runs, adapters or models",
        about={"folder": folder},
    )


def _names(folder: Path) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MOST_SUBJECTS:
                    break
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointValidationError(
            f"{folder} cannot be read: {why}",
            reason="CHECKPOINT_NOT_FOUND" if missing else "FILE_ERROR",
            remedy="name an existing folder that you may read",
            about={"folder": folder},
        ) from error
    if len(names) > MOST_SUBJECTS:
        raise ConfigurationError(
            f"{folder} has more than {MOST_SUBJECTS} entries",
            reason="BATCH_INVALID",
            remedy="move the runs into folders of their own, and export one folder after the other",
            about={"folder": folder},
        )
    return sorted(names)


def _refuse_single(folder: Path) -> None:
    whole = is_whole_model(folder)
    if whole or list_checkpoints(folder):
        raise ConfigurationError(
            f"{folder} is itself a {'model' if whole else 'run'}, and no folder of several",
            reason="BATCH_INVALID",
            remedy=f"export it alone: slipway export {'--base-model ' if whole else ''}{folder}",
            about={"folder": folder},
        )


def _examine(folder: Path, name: str) -> Subject | LeftOut:
    """Tell whether an entry can be exported."""
    path = folder / name
    try:
        why = _excluded(folder, path)
        plain = not why and is_whole_model(path)
        if plain or (not why and list_checkpoints(path)):
            return Subject(name, str(path), plain=plain)
        foreign = None if why else foreign_adapter(path)
    except ArtifactError as error:
        return LeftOut(name, str(error))
    except OSError as error:
        return LeftOut(name, f"it cannot be read: {error.strerror}")
    more = f"; {foreign.message}: {foreign.remedy}" if foreign else ""
    return LeftOut(name, why or f"it holds no checkpoint, adapter or model{more}")


def _excluded(folder: Path, path: Path) -> str:
    """Return why an entry is not looked into; empty if it is. Links follow the rule for all folders: one that leads out is refused.

    Raises:
        ArtifactError: ``LINK_OUTSIDE``, or ``ARTIFACT_INVALID`` for a special file.
        OSError: It cannot be examined.
    """
    if path.name.startswith("."):
        return "its name begins with a dot"
    file_in(folder, path.name)
    real = Path(os.path.realpath(path))
    if path.is_symlink() and real.parent == Path(os.path.realpath(folder)) and real.exists():
        return f"it is a link to {quoted(real.name)}, which stands for itself"
    if not path.is_dir():
        return "it is a file" if path.is_file() else "it is a link to nothing"
    return "it is the output of an export" if (path / LINEAGE).is_file() else ""


def _subject(place: str) -> Subject:
    if is_address(place) or place.startswith("sha256:"):
        return Subject(place.rstrip("/").rpartition("/")[2] or place, place)
    path = user_path(place).absolute()
    name = f"{path.parent.name}/{path.name}" if path.name.startswith(_CHECKPOINT) else path.name
    return Subject(name or place, place, plain=is_whole_model(path))
