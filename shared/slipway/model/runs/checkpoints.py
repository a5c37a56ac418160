"""Find the checkpoints of a LoRA training run: which exist, which are complete, which is the newest or the best.

A run's folder holds ``checkpoint-<step>`` folders as written by transformers' Trainer; a checkpoint's own folder, or a folder with
only a saved adapter, is accepted too. Steps come from ``trainer_state.json`` and the folder's number, never from modification times,
which copies and downloads do not keep. The best checkpoint is the one recorded in the run's latest state
(``best_model_checkpoint``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from slipway.errors import ArtifactError, CheckpointValidationError
from slipway.files.json_documents import check_texts, read_json
from slipway.files.paths import file_in, files_in, user_path
from slipway.model.limits import adapter_excess
from slipway.model.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    MODEL_INDEX,
    MODEL_PICKLE,
    MODEL_PICKLE_INDEX,
    MODEL_WEIGHTS,
    travelling_files,
)
from slipway.model.runs.saved_weights import Problem, foreign_adapter, foreign_file, weight_problems
from slipway.model.runs.trainer_state import TRAINER_STATE, TrainerState, read_trainer_state
from slipway.texts import counted

_BASE = "base_model_name_or_path"
_FOLDER = re.compile(r"checkpoint-([0-9]{1,18})")
_UNFINISHED = re.compile(r"tmp-checkpoint-([0-9]{1,18})")  # Trainer's name before the final rename
_MOST_NAMED = 5  # of the skipped checkpoints
_REMEDIES = {
    "UNSAFE_PICKLE": "save the adapter as safetensors where you trust it: model.save_pretrained(…)",
    "ADAPTER_UNSUPPORTED": "name a LoRA checkpoint; a fully trained model needs no merge: set base_model.name to it, and leave the "
    "checkpoint out (slipway export --base-model DIR)",
    "ADAPTER_CONFIG_MISSING": "copy adapter_config.json from the run, or name the folder that has it",
    "ADAPTER_CONFIG_INVALID": "copy adapter_config.json from the run again",
    "SAFETENSORS_CORRUPT": "copy the checkpoint again, or use another one",
    "FILE_ERROR": "make it readable, or use another checkpoint",
    "CHECKPOINT_INCOMPLETE": "let the upload or the save finish, or use another checkpoint",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint folder.

    Attributes:
        path: Its folder.
        step: Optimizer step it was saved at; None for an adapter saved outside a run.
        problems: Why it cannot be used; empty if it is complete.
        loss: Training loss last logged before it was saved, if any.
        eval_loss: Evaluation loss last logged before it was saved, if any.
        rank: ``r`` of the adapter.
        base_model: Name of the base model as the adapter's configuration gives it.
        best: Whether the run recorded it as its best one.
        best_metric: The metric that made it the best one, if any.
        warnings: Warnings for the user, such as skipped newer checkpoints with the reason, or contradictory steps.
    """

    path: Path
    step: int | None = None
    problems: tuple[Problem, ...] = ()
    loss: float | None = None
    eval_loss: float | None = None
    rank: int | None = None
    base_model: str | None = None
    best: bool = False
    best_metric: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether it can be merged, judged by the structure of its files."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return this checkpoint as JSON-ready data."""
        return {**asdict(self), "path": str(self.path), "healthy": self.healthy}


def find_checkpoint(
    path: Path | str, *, auto_detect_latest: bool = True, select: Literal["latest", "best"] = "latest"
) -> Checkpoint:
    """Return the checkpoint to export: the folder itself if it holds an adapter, otherwise one of those below it.

    Newer checkpoints that are broken are named, with the reason, in :attr:`Checkpoint.warnings`.

    Args:
        path: Folder of a run, or of one checkpoint.
        auto_detect_latest: Whether to look below the folder.
        select: ``latest`` takes the newest complete one, ``best`` the one that the run recorded as its best.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` if there is none; if the best one, or every one, is unusable, the reason of
            the best or newest (``CHECKPOINT_INCOMPLETE``, ``ADAPTER_CONFIG_MISSING``, ``ADAPTER_CONFIG_INVALID``,
            ``SAFETENSORS_CORRUPT``, ``UNSAFE_PICKLE``).
    """
    folder = user_path(path)
    checkpoints, recorded_best = _survey(folder)
    if not auto_detect_latest:
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.path == folder]
    if not checkpoints:
        raise no_checkpoint(folder, searched=auto_detect_latest)
    if select == "best":
        return _find_best(folder, checkpoints, recorded_best)
    skipped: list[str] = []
    for checkpoint in checkpoints:
        if checkpoint.healthy:
            return replace(checkpoint, warnings=(*checkpoint.warnings, *_first_messages(skipped, folder)))
        skipped.append(f"skipped {checkpoint.path}: {'; '.join(problem.message for problem in checkpoint.problems)}")
    others = f" ({len(checkpoints)} checkpoints, none usable: {' | '.join(_first_messages(skipped, folder))})"
    raise _unusable_error(checkpoints[0], "" if len(checkpoints) == 1 else others)


def _first_messages(skipped: list[str], folder: Path) -> list[str]:
    """Return the first messages about skipped checkpoints, and one that counts the others."""
    more = counted(len(skipped) - _MOST_NAMED, "more checkpoint")
    rest = [f"skipped {more}: slipway checkpoints {folder} names them"] if len(skipped) > _MOST_NAMED else []
    return [*skipped[:_MOST_NAMED], *rest]


def _find_best(folder: Path, checkpoints: list[Checkpoint], name: str) -> Checkpoint:
    """Return the run's best checkpoint.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` if the run names none or it is gone; its own reason if it
            cannot be used.
    """
    best = next((checkpoint for checkpoint in checkpoints if checkpoint.best), None)
    if best is None:
        what = (
            f"its best checkpoint, {name}, does not exist any more" if name else f"no {TRAINER_STATE} names a best one"
        )
        raise CheckpointValidationError(
            f"cannot take the best checkpoint of {folder}: {what}",
            reason="CHECKPOINT_NOT_FOUND",
            remedy="set checkpoint.select to latest, or name a checkpoint's own folder; Trainer records and keeps the best "
            "one with load_best_model_at_end=True",
            about={"checkpoint": folder, "key": "checkpoint.select"},
        )
    if not best.healthy:
        raise _unusable_error(best, "; the run recorded it as its best one")
    return best


def _unusable_error(checkpoint: Checkpoint, more: str) -> CheckpointValidationError:
    first = checkpoint.problems[0]
    return CheckpointValidationError(
        f"checkpoint {checkpoint.path}: {first.message}{more}",
        reason=first.reason,
        remedy=first.remedy or _REMEDIES.get(first.reason, "use another checkpoint"),
        about={"checkpoint": checkpoint.path},
    )


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints of a folder: itself if it holds an adapter, then those below it, newest step first.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` if the folder does not exist.
    """
    return _survey(folder)[0]


def _survey(folder: Path) -> tuple[list[Checkpoint], str]:
    """Return the checkpoints of :func:`list_checkpoints`, and the best one's name by the newest state of the run, if any."""
    if folder.is_file():
        foreign = foreign_file(folder)
        raise CheckpointValidationError(
            foreign.message, reason="CHECKPOINT_NOT_FOUND", remedy=foreign.remedy, about={"checkpoint": folder}
        )
    if not folder.is_dir():
        raise CheckpointValidationError(
            f"checkpoint folder {folder} does not exist",
            reason="CHECKPOINT_NOT_FOUND",
            remedy="name the folder of a training run, or of one checkpoint",
            about={"checkpoint": folder},
        )
    own_names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE)
    adapter = any((folder / name).exists() for name in own_names)
    itself = _FOLDER.fullmatch(folder.name) or adapter or is_whole_model(folder)
    contents: dict[Path, _Content] = {}
    below = [
        _examine_below(folder, entry, contents)
        for entry in sorted(folder.iterdir())
        if _number(entry) is not None and entry.is_dir()
    ]
    below.sort(key=lambda pair: (pair[0].step or 0, _number(pair[0].path) or 0), reverse=True)
    own = _read_content(folder) if itself else None
    checkpoints = [*([_name_content(folder, own)] if own else []), *(checkpoint for checkpoint, _ in below)]
    states = [own.state if own else _trainer_state(folder)[0], *(state for _, state in below)]
    recorded = next((state for state in states if state is not None and state.best), None)
    if recorded is None:
        return checkpoints, ""
    name = PureWindowsPath(recorded.best).name  # accepts both kinds of separators: training may have run on Windows
    return [
        replace(checkpoint, best=True, best_metric=recorded.best_metric)
        if name and checkpoint.path.name == name
        else checkpoint
        for checkpoint in checkpoints
    ], name


@dataclass(frozen=True, slots=True)
class _Content:
    """What a checkpoint's files say, under whatever names the folder has."""

    problems: tuple[Problem, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    state: TrainerState | None = None
    unread: str = ""
    """Why there is no state although there is a file of it."""
    whole_model: bool = False


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Examine one checkpoint folder and whether it is complete. Read only headers and JSON; never raise."""
    return _name_content(folder, _read_content(folder))


def _read_content(folder: Path) -> _Content:
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    link = _link_problem(folder)
    if link is not None:
        return _Content((link,))
    state, unread = _trainer_state(folder)
    if is_whole_model(folder):
        return _Content(state=state, unread=unread, whole_model=True)
    try:
        config = read_adapter_config(folder)
    except CheckpointValidationError as error:
        problems.append(Problem(error.reason, error.message, error.remedy))
    try:
        problems.extend(weight_problems(folder))
    except OSError as error:
        problems.append(Problem("FILE_ERROR", f"its files cannot be read ({error.strerror})"))
    return _Content(tuple(problems), config, state, unread)


def _name_content(folder: Path, content: _Content) -> Checkpoint:
    """Return the checkpoint of a folder with this content."""
    problems, state, warnings = list(content.problems), content.state, []
    number, (rank, base) = _number(folder), (content.config.get(key) for key in ("r", _BASE))
    if content.whole_model:
        what = "it holds a whole model, as saved by full fine-tuning, and no adapter"
        remedy = _REMEDIES["ADAPTER_UNSUPPORTED"].replace("DIR", str(folder))
        problems.append(Problem("ADAPTER_UNSUPPORTED", what, remedy))
    elif _UNFINISHED.fullmatch(folder.name):
        what = "it was still being written when its process ended"
        problems.insert(0, Problem("CHECKPOINT_INCOMPLETE", what))
    if content.unread:
        what = f"{folder / TRAINER_STATE} is not readable ({content.unread})"
        warnings.append(f"{what}: the step is taken from the folder's name")
    elif state is not None and number is not None and number != state.step:
        warnings.append(f"{folder} was saved at step {state.step} according to {TRAINER_STATE}")
    return Checkpoint(
        path=folder,
        step=number if state is None else state.step,
        problems=tuple(problems),
        loss=state.losses["loss"] if state else None,
        eval_loss=state.losses["eval_loss"] if state else None,
        rank=rank if isinstance(rank, int) else None,
        base_model=base if isinstance(base, str) and base else None,
        warnings=tuple(warnings),
    )


def _examine_below(run: Path, folder: Path, contents: dict[Path, _Content]) -> tuple[Checkpoint, TrainerState | None]:
    """As :func:`inspect_checkpoint`, but refuse a link out of the run's folder, and read what several names lead to only once."""
    try:
        with contextlib.suppress(OSError):  # reported by the next read
            file_in(run, folder.name)
    except ArtifactError as error:
        return Checkpoint(folder, _number(folder), (Problem(error.reason, error.message, error.remedy),)), None
    real = Path(os.path.realpath(folder))
    if real not in contents:
        contents[real] = _read_content(real if folder.is_symlink() else folder)
    return _name_content(folder, contents[real]), contents[real].state


def _link_problem(folder: Path) -> Problem | None:
    """Return the problem of a link that leads out of the folder, before any file is read."""
    try:
        files_in(folder, (TRAINER_STATE, ADAPTER_PICKLE))
        travelling_files(folder)
    except ArtifactError as error:
        return Problem(error.reason, error.message, error.remedy)
    except OSError:
        return None  # reported by the next read
    return None


def is_whole_model(folder: Path) -> bool:
    """Return whether a folder holds a model's weights instead of an adapter; False if it cannot be read."""
    adapter = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE)
    weights = (MODEL_WEIGHTS, MODEL_INDEX, MODEL_PICKLE, MODEL_PICKLE_INDEX)
    try:
        return not any((folder / name).exists() for name in adapter) and any(
            (folder / name).is_file() for name in weights
        )
    except OSError:
        return False


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read ``adapter_config.json`` of a checkpoint as plain data.

    Raises:
        CheckpointValidationError: ``ADAPTER_CONFIG_MISSING`` or ``ADAPTER_CONFIG_INVALID``.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = read_json(path, lenient=True, any_text=True)
        check_texts(config | {_BASE: None} if isinstance(config, dict) else config)
    except FileNotFoundError as error:
        raise _config_error(f"no {ADAPTER_CONFIG}", folder, "ADAPTER_CONFIG_MISSING") from error
    except OSError as error:
        raise _config_error(f"{ADAPTER_CONFIG} cannot be read ({error.strerror})", folder) from error
    except ValueError as error:
        raise _config_error(f"{ADAPTER_CONFIG} is not readable JSON ({error})", folder) from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise _config_error(f"{ADAPTER_CONFIG} does not say its peft_type", folder)
    if excess := adapter_excess(config):
        raise _config_error(f"{ADAPTER_CONFIG} has an impossible value: {excess}", folder)
    return config


def _config_error(what: str, folder: Path, reason: str = "ADAPTER_CONFIG_INVALID") -> CheckpointValidationError:
    foreign = foreign_adapter(folder)
    return CheckpointValidationError(
        f"{what}; {foreign.message}" if foreign else what,
        reason=reason,
        remedy=foreign.remedy if foreign else _REMEDIES[reason],
        about={"file": folder / ADAPTER_CONFIG},
    )


def _trainer_state(folder: Path) -> tuple[TrainerState | None, str]:
    """Return the trainer's state, or why it cannot be read; this never makes an adapter unusable."""
    try:
        path = file_in(folder, TRAINER_STATE)
        return (read_trainer_state(path) if path else None), ""
    except (ArtifactError, OSError, ValueError) as error:
        return None, str(error.strerror or error if isinstance(error, OSError) else error)


def _number(folder: Path) -> int | None:
    match = _FOLDER.fullmatch(folder.name) or _UNFINISHED.fullmatch(folder.name)
    return int(match[1]) if match else None


def no_checkpoint(folder: Path, *, searched: bool = True) -> CheckpointValidationError:
    """Return the error for a folder without a checkpoint in it or, if ``searched``, below it."""
    foreign = foreign_adapter(folder) if searched else None
    remedy = "name a run's folder with checkpoint-<step> folders, or a folder with adapter_config.json"
    if not searched:
        remedy = "name the checkpoint's own folder, or set checkpoint.auto_detect_latest"
    return CheckpointValidationError(
        f"no checkpoint in {folder}" + (f"; {foreign.message}" if foreign else ""),
        reason="CHECKPOINT_NOT_FOUND",
        remedy=foreign.remedy if foreign else remedy,
        about={"checkpoint": folder},
    )
