"""Find the pickles of weights below a folder, by their names alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slipway.errors import CheckpointValidationError
from slipway.files.links import all_files, real_file
from slipway.model.model_files import MODEL_INDEX, MODEL_PICKLE, MODEL_PICKLE_INDEX, MODEL_WEIGHTS
from slipway.model.safetensors_file import read_index
from slipway.model.weights.conversion import SkippedFile

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_STATE = re.compile(
    r"training_args\.bin|optimizer\.(pt|bin)|scheduler\.(pt|bin)|scaler\.pt|rng_state(_\d+)?\.pth|.*_states\.pt"
)
"""Files of a training run that hold no weights of a model."""
_MODEL_FILE = re.compile(r"pytorch_model(-\d+(-of-\d+)?)?\.bin")
_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")
_NOT_WEIGHTS = "training state, not weights"
_STORED = "the same weights are there as safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """One model, adapter or file of weights, below the source.

    Attributes:
        folder: Its folder, relative to the source.
        files: Names of its files in the folder.
        index: Name of the index that lists them; empty for a single file.
        refused: Why they cannot be converted; None if that is not known yet.
    """

    folder: PurePosixPath
    files: tuple[str, ...]
    index: str = ""
    refused: CheckpointValidationError | None = None

    @property
    def is_model(self) -> bool:
        """Return whether transformers loads it as a model's weights."""
        return bool(self.index) or _MODEL_FILE.fullmatch(self.files[0]) is not None

    @property
    def first(self) -> str:
        """Return the path of its first file, or of its index."""
        return (self.folder / (self.files[0] if self.files else self.index)).as_posix()

    def target(self, name: str) -> str:
        """Return the name of the file that replaces one of its files: that which transformers and peft load."""
        if self.is_model and len(self.files) == 1:
            return MODEL_WEIGHTS
        stem = name.rpartition(".")[0] or name
        return f"{stem.replace('pytorch_model', 'model', 1) if self.is_model else stem}.safetensors"


def find_weights(source: Path, *, file: str = "") -> tuple[list[Weights], list[SkippedFile]]:
    """Return the weights to convert below a folder, and the files left as they are, both sorted.

    Args:
        source: The folder.
        file: The only file to convert; empty for all.

    Raises:
        ArtifactError: As :func:`slipway.files.links.all_files`.
    """
    if file:
        real = real_file(source, file)
        refused = _without_index(real) if _SHARD.fullmatch(file) else None
        return [Weights(PurePosixPath(), (file,), "", refused)], []
    names = {PurePosixPath(name) for name, _ in all_files(source)}
    found, skipped, listed = [], [], set()
    for path in sorted(name for name in names if name.name == MODEL_PICKLE_INDEX):
        try:
            shards = tuple(sorted(set(read_index(source / path).values())))
        except CheckpointValidationError as error:
            found.append(Weights(path.parent, (), path.name, error))
            listed |= {name for name in names if name.parent == path.parent and _SHARD.fullmatch(name.name)}
            continue
        listed |= {path.parent / shard for shard in shards}
        if path.parent / MODEL_PICKLE in names or _has_safetensors(path.parent, names):
            skipped += _skip((path.parent / shard for shard in shards), _STORED)
        else:
            found.append(Weights(path.parent, shards, path.name))
    for path in sorted(names - listed):
        if path.suffix not in _SUFFIXES:
            continue
        if _STATE.fullmatch(path.name):
            skipped += _skip([path], _NOT_WEIGHTS)
        elif _stored(path, names):
            skipped += _skip([path], _STORED)
        elif _SHARD.fullmatch(path.name):
            found.append(Weights(path.parent, (path.name,), "", _without_index(source / path)))
        else:
            found.append(Weights(path.parent, (path.name,)))
    # Models first: the name that transformers loads is theirs.
    return sorted(found, key=lambda one: (not one.is_model, one.first)), sorted(skipped, key=lambda one: one.source)


def _without_index(path: Path) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"{path.name} is a part of a model, and no {MODEL_PICKLE_INDEX} beside it lists the others",
        reason="BASE_MODEL_INVALID",
        remedy="copy the model again, with its index",
        about={"file": path},
    )


def _stored(path: PurePosixPath, names: set[PurePosixPath]) -> bool:
    if _MODEL_FILE.fullmatch(path.name) and _has_safetensors(path.parent, names):
        return True
    return path.with_suffix(".safetensors") in names


def _has_safetensors(folder: PurePosixPath, names: set[PurePosixPath]) -> bool:
    return any(folder / name in names for name in (MODEL_WEIGHTS, MODEL_INDEX))


def _skip(paths: Iterable[PurePosixPath], why: str) -> list[SkippedFile]:
    return [SkippedFile(source=path.as_posix(), why=why) for path in paths]
