"""Find pickles of weights below a folder by name, write them as safetensors, a tensor at a time, and say what became of each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch import Tensor

from slipway.distribution import own_version
from slipway.errors import ArtifactError, CheckpointValidationError
from slipway.files.paths import all_files, files_in, real_file
from slipway.machine.shortages import translate_disk_full
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    MODEL_INDEX,
    MODEL_PICKLE,
    MODEL_PICKLE_INDEX,
    MODEL_WEIGHTS,
    companion_files,
)
from slipway.model.safetensors_file import read_index
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_file
from slipway.model.weights.conversion import Conversion, ConvertedWeights, SkippedFile
from slipway.stage import Context
from slipway_prepare.faults import invalid_error
from slipway_prepare.params import ConvertParams
from slipway_prepare.pickles.loading import check_tensors, load_pickle
from slipway_prepare.recipes import STORED_AS, Recipe, write_safetensors
from slipway_prepare.source import MappedTensors
from slipway_prepare.structure import structure

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_STATE = re.compile(
    r"training_args\.bin|optimizer\.(pt|bin)|scheduler\.(pt|bin)|scaler\.pt|rng_state(_\d+)?\.pth|.*_states\.pt"
)
"""Files of a training run that hold no weights of a model."""
_MODEL_FILE = re.compile(r"pytorch_model(-\d+(-of-\d+)?)?\.bin")
_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")
_NOT_WEIGHTS = "training state, not weights"
_STORED = "the same weights are there as safetensors"


def convert(source: Path, output: Path, *, params: ConvertParams, ctx: Context) -> None:
    """Convert what lies below ``source`` into the new folder ``output``.

    If some weights are refused, the others are still converted.

    Raises:
        CheckpointValidationError: Nothing was found, or all was refused: the first refusal.
    """
    inputs, skipped = find_weights(source, file=params.file)
    if not inputs:
        raise CheckpointValidationError(
            f"{source} has no weights to convert: no .bin, .pt, .pth or .ckpt file that is not training state"
            + (" or there as safetensors" if skipped else ""),
            reason="CHECKPOINT_INCOMPLETE",
            remedy="name a file of weights, or a folder with models",
            about={"folder": source},
        )
    output.mkdir()
    results: list[ConvertedWeights] = []
    first: ArtifactError | CheckpointValidationError | None = None
    for number, weights in enumerate(inputs):
        ctx.progress("converting", done=number, total=len(inputs), unit="files")
        try:
            results.append(_convert(source, output, weights, params=params, ctx=ctx))
        except (ArtifactError, CheckpointValidationError) as error:
            if error.reason == "DISK_FULL":
                raise
            first = first or error
            results.append(ConvertedWeights(source=weights.first, reason=error.reason, message=str(error)))
    if first is not None and not any(one.target for one in results):
        raise first
    Conversion(weights=tuple(results), skipped=tuple(skipped)).write(output)
    ctx.record(converted=sum(bool(one.target) for one in results), refused=sum(bool(one.reason) for one in results))


def _convert(source: Path, output: Path, weights: Weights, *, params: ConvertParams, ctx: Context) -> ConvertedWeights:
    if weights.refused is not None:
        raise weights.refused
    folder, target = source / weights.folder, output / weights.folder
    values: dict[str, dict[str, Tensor]] = {}
    left_out: list[str] = []
    for name in weights.files:
        path = real_file(folder, name)
        tensors, others = _tensors(load_pickle(path, ctx.workdir), path, key=params.key)
        values[name] = tensors
        left_out += others
    merged = {name: value for part in values.values() for name, value in part.items()}
    if len(merged) < sum(map(len, values.values())):
        raise invalid_error(
            f"has a tensor in two of its files, the first is {weights.first}", file=folder / weights.files[0]
        )
    with MappedTensors(merged) as mapped:
        ties = _ties(folder, mapped) if weights.is_model else frozenset()
        target.mkdir(parents=True, exist_ok=True)
        files = [
            _plan(_free_name(target, weights.target(name), name), part, name, ties) for name, part in values.items()
        ]
        with translate_disk_full(CheckpointValidationError, "for the converted weights", at=target):
            try:
                _write(target, files, mapped, indexed=bool(weights.index), ctx=ctx)
                _copy_companions(folder, target)
            except BaseException:
                for name in (*(file.filename for file in files), MODEL_INDEX):
                    (target / name).unlink(missing_ok=True)
                raise
    return ConvertedWeights(
        source=weights.first,
        target=(weights.folder / files[0].filename).as_posix(),
        files=len(files),
        tensors=sum(len(file.tensors) for file in files),
        nbytes=sum(tensor.nbytes for file in files for tensor in file.tensors),
        ties=tuple(sorted(ties)),
        left_out=tuple(sorted(left_out)),
    )


def _tensors(loaded: Mapping[object, object], path: Path, *, key: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights in a pickle's dictionary, and the names of its other entries.

    Weights are the dictionary's own tensors, or those of the only dictionary of tensors in it, as trainers save them beside an epoch.
    """
    inner = {
        name: value
        for name, value in loaded.items()
        if isinstance(value, dict) and value and all(isinstance(one, Tensor) for one in value.values())
    }
    if key:
        if key not in inner:
            raise invalid_error(
                f"has no dictionary of tensors {key!r} in {path.name}", remedy="name another entry", file=path
            )
        return check_tensors(inner[key], path), [str(name) for name in loaded if name != key]
    own = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    if (own and inner) or len(inner) > 1:
        names = ", ".join(sorted(map(str, inner)))
        what = f"has several sets of tensors in {path.name}: {'its own, ' if own else ''}{names}"
        raise invalid_error(what, remedy="name the entry that holds the weights", file=path)
    if not own and not inner:
        raise invalid_error(f"has no tensors in {path.name}", remedy="name a file of weights", file=path)
    name, chosen = next(iter(inner.items())) if inner else (None, own)
    others = [
        str(other) for other, value in loaded.items() if other != name and not (own and isinstance(value, Tensor))
    ]
    return check_tensors(chosen, path), others


def _ties(folder: Path, mapped: MappedTensors) -> frozenset[str]:
    """Return names that share a tensor with one that the model's class ties them to; none if the class is not known."""
    if not mapped.aliases or not (folder / CONFIG).is_file():
        return frozenset()
    try:
        known = structure(folder, ModelConfig.read(folder))
    except CheckpointValidationError:
        return frozenset()
    left: set[str] = set()
    for group in mapped.aliases:
        own = {known.own_name(name): name for name in group}
        left |= {name for model_name, name in own.items() if known.tied.get(model_name) in own}
    return frozenset(left)


def _free_name(target: Path, name: str, source: str) -> str:
    """Return a name that no other conversion took: ``a.bin`` and ``a.pt`` would both become ``a.safetensors``."""
    return f"{source}.safetensors" if (target / name).exists() else name


def _plan(filename: str, tensors: Mapping[str, Tensor], source: str, ties: frozenset[str]) -> PlannedFile:
    specs = [
        TensorSpec(name, STORED_AS[value.dtype], tuple(value.shape))
        for name, value in sorted(tensors.items())
        if name not in ties
    ]
    return plan_file(filename, specs, metadata={"source": source, "tool": f"slipway {own_version()}"})


def _write(target: Path, files: Sequence[PlannedFile], mapped: MappedTensors, *, indexed: bool, ctx: Context) -> None:
    recipes = {name: Recipe(name, one.dtype, one.shape, (name,)) for name, one in mapped.tensors.items()}
    total, done = sum(tensor.nbytes for file in files for tensor in file.tensors), 0
    for file in files:
        for count in write_safetensors(target, file, recipes, mapped):
            done += count
            ctx.progress("converting", done=done, total=total, unit="bytes")
    weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
    if indexed and (index := index_file(weight_map, total_bytes=total)):
        (target / index[0]).write_text(index[1], encoding="utf-8")


def _copy_companions(folder: Path, target: Path) -> None:
    for path in [*companion_files(folder), *files_in(folder, (ADAPTER_CONFIG,))]:
        name = path.relative_to(folder)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real_file(folder, name), target / name)


@dataclass(frozen=True, slots=True)
class Weights:
    """One model, adapter or file of weights, below the source.

    Attributes:
        folder: Its folder, relative to the source.
        files: Names of its files in the folder.
        index: Name of the index that lists them; empty for a single file.
        refused: The error that forbids to convert them; None if there is none yet.
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
        ArtifactError: As :func:`slipway.files.paths.all_files`.
    """
    if file:
        real = real_file(source, file)
        refused = _missing_index_error(real) if _SHARD.fullmatch(file) else None
        return [Weights(PurePosixPath(), (file,), "", refused)], []
    names = {PurePosixPath(name) for name, _ in all_files(source)}
    weights, skipped, listed = [], [], set()
    for path in sorted(name for name in names if name.name == MODEL_PICKLE_INDEX):
        try:
            shards = tuple(sorted(set(read_index(source / path).values())))
        except CheckpointValidationError as error:
            weights.append(Weights(path.parent, (), path.name, error))
            listed |= {name for name in names if name.parent == path.parent and _SHARD.fullmatch(name.name)}
            continue
        listed |= {path.parent / shard for shard in shards}
        if path.parent / MODEL_PICKLE in names or _has_safetensors(path.parent, names):
            skipped += _skip((path.parent / shard for shard in shards), _STORED)
        else:
            weights.append(Weights(path.parent, shards, path.name))
    for path in sorted(names - listed):
        if path.suffix not in _SUFFIXES:
            continue
        if _STATE.fullmatch(path.name):
            skipped += _skip([path], _NOT_WEIGHTS)
        elif _is_converted(path, names):
            skipped += _skip([path], _STORED)
        elif _SHARD.fullmatch(path.name):
            weights.append(Weights(path.parent, (path.name,), "", _missing_index_error(source / path)))
        else:
            weights.append(Weights(path.parent, (path.name,)))
    # Models first: the name that transformers loads is theirs.
    return sorted(weights, key=lambda one: (not one.is_model, one.first)), sorted(skipped, key=lambda one: one.source)


def _missing_index_error(path: Path) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"{path.name} is a part of a model, and no {MODEL_PICKLE_INDEX} beside it lists the others",
        reason="BASE_MODEL_INVALID",
        remedy="copy the model again, with its index",
        about={"file": path},
    )


def _is_converted(path: PurePosixPath, names: set[PurePosixPath]) -> bool:
    if _MODEL_FILE.fullmatch(path.name) and _has_safetensors(path.parent, names):
        return True
    return path.with_suffix(".safetensors") in names


def _has_safetensors(folder: PurePosixPath, names: set[PurePosixPath]) -> bool:
    return any(folder / name in names for name in (MODEL_WEIGHTS, MODEL_INDEX))


def _skip(paths: Iterable[PurePosixPath], why: str) -> list[SkippedFile]:
    return [SkippedFile(source=path.as_posix(), why=why) for path in paths]
