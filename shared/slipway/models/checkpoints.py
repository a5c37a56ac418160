"""Checkpoints of a LoRA training run: which there are, which are whole, and which is the newest or best of those.

A run's folder holds ``checkpoint-<step>`` folders as transformers' Trainer writes them; a checkpoint's own folder (or a
folder that only holds a saved adapter) is taken as well. Steps come from ``trainer_state.json`` and the folder's number,
never from modification times, which copies and downloads do not keep. Which one is the best is what the run itself
recorded (``best_model_checkpoint``), as its latest state has it.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from slipway.errors import ArtifactError, CheckpointValidationError
from slipway.files.json_documents import LARGEST_LIST, check_texts, read_json
from slipway.files.links import file_in, files_in
from slipway.files.user_paths import user_path
from slipway.models.adapter_limits import excess
from slipway.models.foreign_adapters import foreign_adapter
from slipway.models.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    MODEL_INDEX,
    MODEL_PICKLE,
    MODEL_PICKLE_INDEX,
    MODEL_WEIGHTS,
    travelling_files,
)
from slipway.models.safetensors_file import read_safetensors
from slipway.models.sharded_checkpoints import sharded_weights

TRAINER_STATE = "trainer_state.json"
_BASE = "base_model_name_or_path"
_FOLDER = re.compile(r"checkpoint-([0-9]{1,18})")
_UNFINISHED = re.compile(r"tmp-checkpoint-([0-9]{1,18})")  # the name under which Trainer writes before it renames
_REMEDIES = {
    "UNSAFE_PICKLE": "save the adapter as safetensors where you trust it: model.save_pretrained(…)",
    "ADAPTER_UNSUPPORTED": "name a LoRA checkpoint; what was trained as a whole needs no merge: set base_model.name to it, and leave the "
    "checkpoint out (slipway export --base-model DIR)",
    "ADAPTER_CONFIG_MISSING": "copy adapter_config.json from the run, or name the folder that has it",
    "ADAPTER_CONFIG_INVALID": "copy adapter_config.json from the run again",
    "SAFETENSORS_CORRUPT": "copy the checkpoint again, or use another one",
    "FILE_ERROR": "make it readable, or use another checkpoint",
    "CHECKPOINT_INCOMPLETE": "let the upload or the save finish, or use another checkpoint",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a checkpoint cannot be used, and what would make it usable when that is more than its reason tells."""

    reason: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint folder.

    Attributes:
        path: Its folder.
        step: Optimizer step it was saved at; None for an adapter saved outside a run.
        problems: Why it cannot be used; empty when it is whole.
        loss: Training loss last logged before it was saved, if any.
        eval_loss: Evaluation loss last logged before it was saved, if any.
        rank: ``r`` of the adapter.
        base_model: Name of the base model as the adapter's configuration gives it.
        best: Whether the run recorded it as its best one.
        best_metric: The metric that made it the best one, if any.
        warnings: What the user should know: skipped newer checkpoints with the reason, contradictory steps.
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
        """Whether it can be merged, as far as its files' structure tells."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """This checkpoint as JSON-ready data."""
        return {**asdict(self), "path": str(self.path), "healthy": self.healthy}


def find_checkpoint(
    path: Path | str, *, auto_detect_latest: bool = True, select: Literal["latest", "best"] = "latest"
) -> Checkpoint:
    """The checkpoint to export: the folder itself when it holds an adapter, else one of those below it.

    Newer checkpoints that are broken are named, with the reason, in :attr:`Checkpoint.warnings`.

    Args:
        path: Folder of a run, or of one checkpoint.
        auto_detect_latest: Whether to look below the folder.
        select: ``latest`` takes the newest whole one, ``best`` the one that the run recorded as its best.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` when there is none; the best or newest one's own reason
            (``CHECKPOINT_INCOMPLETE``, ``ADAPTER_CONFIG_MISSING``, ``ADAPTER_CONFIG_INVALID``, ``SAFETENSORS_CORRUPT``,
            ``UNSAFE_PICKLE``) when it, or none, is usable.
    """
    folder = user_path(path)
    found = list_checkpoints(folder)
    if not auto_detect_latest:
        found = [checkpoint for checkpoint in found if checkpoint.path == folder]
    if not found:
        raise no_checkpoint(folder, searched=auto_detect_latest)
    if select == "best":
        return _best(folder, found)
    skipped: list[str] = []
    for checkpoint in found:
        if checkpoint.healthy:
            return replace(checkpoint, warnings=(*checkpoint.warnings, *skipped))
        why = "; ".join(problem.message for problem in checkpoint.problems)
        skipped.append(f"skipped {checkpoint.path}: {why}")
    others = "" if len(found) == 1 else f" ({len(found)} checkpoints, none usable: {' | '.join(skipped)})"
    raise _unusable(found[0], others)


def _best(folder: Path, found: list[Checkpoint]) -> Checkpoint:
    """The run's best checkpoint.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` when the run names none, or it is gone; its own reason when it
            cannot be used.
    """
    best = next((checkpoint for checkpoint in found if checkpoint.best), None)
    if best is None:
        name, _ = _recorded_best(folder, found)
        what = f"its best checkpoint, {name}, is not there any more" if name else f"no {TRAINER_STATE} names a best one"
        raise CheckpointValidationError(
            f"cannot take the best checkpoint of {folder}: {what}",
            reason="CHECKPOINT_NOT_FOUND",
            remedy="set checkpoint.select to latest, or name a checkpoint's own folder; Trainer records and keeps the best "
            "one with load_best_model_at_end=True",
            about={"checkpoint": folder, "key": "checkpoint.select"},
        )
    if not best.healthy:
        raise _unusable(best, "; it is the best one by the run's own record")
    return best


def _unusable(checkpoint: Checkpoint, more: str) -> CheckpointValidationError:
    first = checkpoint.problems[0]
    return CheckpointValidationError(
        f"checkpoint {checkpoint.path}: {first.message}{more}",
        reason=first.reason,
        remedy=first.remedy or _REMEDIES.get(first.reason, "use another checkpoint"),
        about={"checkpoint": checkpoint.path},
    )


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints at a folder: itself when it holds an adapter, then those below it, newest step first.

    Raises:
        CheckpointValidationError: ``CHECKPOINT_NOT_FOUND`` when the folder does not exist.
    """
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
    below = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _number(entry) is not None]
    checkpoints = [_inspect_below(folder, entry) for entry in below]
    checkpoints.sort(key=lambda checkpoint: (checkpoint.step or 0, _number(checkpoint.path) or 0), reverse=True)
    found = [*([inspect_checkpoint(folder)] if itself else []), *checkpoints]
    name, metric = _recorded_best(folder, found)
    return [
        replace(checkpoint, best=True, best_metric=metric) if name and checkpoint.path.name == name else checkpoint
        for checkpoint in found
    ]


def _recorded_best(folder: Path, found: list[Checkpoint]) -> tuple[str, float | None]:
    """Folder name and metric of the best checkpoint by the newest state of the run; an empty name when none tells."""
    for place in dict.fromkeys([folder, *(checkpoint.path for checkpoint in found)]):
        state, _ = _trainer_state(place)
        best, metric = state.get("best_model_checkpoint"), state.get("best_metric")
        if isinstance(best, str) and best:
            name = PureWindowsPath(best).name  # takes both kinds of separators: training may have run anywhere
            return name, _figure(metric)
    return "", None


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """What one checkpoint folder holds and whether it is whole. Reads headers and JSON only; raises nothing."""
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    link = _link_problem(folder)
    if link is not None:
        return Checkpoint(folder, _number(folder), (link,))
    if is_whole_model(folder):
        what = "it holds a whole model, as full fine-tuning saves it, and no adapter"
        state, warnings = _trainer_state(folder)
        problem = Problem("ADAPTER_UNSUPPORTED", what, _REMEDIES["ADAPTER_UNSUPPORTED"].replace("DIR", str(folder)))
        return Checkpoint(folder, state.get("global_step", _number(folder)), (problem,), warnings=warnings)
    if _UNFINISHED.fullmatch(folder.name):
        problems.append(Problem("CHECKPOINT_INCOMPLETE", "it was still being written when its process ended"))
    try:
        config = read_adapter_config(folder)
    except CheckpointValidationError as error:
        problems.append(Problem(error.reason, error.message, error.remedy))
    try:
        problems.extend(_weight_problems(folder))
    except OSError as error:
        problems.append(Problem("FILE_ERROR", f"its files cannot be looked at ({error.strerror})"))
    state, warnings = _trainer_state(folder)
    rank = config.get("r")
    base = config.get(_BASE)
    return Checkpoint(
        path=folder,
        step=state.get("global_step", _number(folder)),
        problems=tuple(problems),
        loss=_last_logged(state, "loss"),
        eval_loss=_last_logged(state, "eval_loss"),
        rank=rank if isinstance(rank, int) else None,
        base_model=base if isinstance(base, str) and base else None,
        warnings=warnings,
    )


def _inspect_below(run: Path, folder: Path) -> Checkpoint:
    """As :func:`inspect_checkpoint`; a checkpoint of a run lies in the run's folder."""
    try:
        with contextlib.suppress(OSError):  # who reads it next says why it cannot be looked at
            file_in(run, folder.name)
    except ArtifactError as error:
        return Checkpoint(folder, _number(folder), (Problem(error.reason, error.message, error.remedy),))
    return inspect_checkpoint(folder)


def _link_problem(folder: Path) -> Problem | None:
    """What is wrong with a file that would be read or travel, because of where a link leads; nothing is read before that."""
    try:
        files_in(folder, (TRAINER_STATE, ADAPTER_PICKLE))
        travelling_files(folder)
    except ArtifactError as error:
        return Problem(error.reason, error.message, error.remedy)
    except OSError:
        return None  # who reads it next says why it cannot be looked at
    return None


def is_whole_model(folder: Path) -> bool:
    """Whether a folder holds the weights of a model instead of an adapter; False where that cannot be seen."""
    adapter = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE)
    weights = (MODEL_WEIGHTS, MODEL_INDEX, MODEL_PICKLE, MODEL_PICKLE_INDEX)
    try:
        return not any((folder / name).exists() for name in adapter) and any(
            (folder / name).is_file() for name in weights
        )
    except OSError:
        return False


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` of a checkpoint as plain data.

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
    if found := excess(config):
        raise _config_error(f"{ADAPTER_CONFIG} has an impossible value: {found}", folder)
    return config


def _config_error(what: str, folder: Path, reason: str = "ADAPTER_CONFIG_INVALID") -> CheckpointValidationError:
    foreign = foreign_adapter(folder)
    return CheckpointValidationError(
        f"{what}; {foreign.message}" if foreign else what,
        reason=reason,
        remedy=foreign.remedy if foreign else _REMEDIES[reason],
        about={"file": folder / ADAPTER_CONFIG},
    )


def _weight_problems(folder: Path) -> list[Problem]:
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        if sharded := sharded_weights(folder):
            return [Problem("CHECKPOINT_SHARDED", sharded.message, sharded.remedy)]
        if (folder / ADAPTER_PICKLE).is_file():
            message = f"its weights are a pickle ({ADAPTER_PICKLE}), which can run code when it is loaded"
            return [Problem("UNSAFE_PICKLE", message)]
        return [Problem("CHECKPOINT_INCOMPLETE", f"no {ADAPTER_WEIGHTS}")]
    if weights.stat().st_size == 0:
        return [Problem("CHECKPOINT_INCOMPLETE", f"{ADAPTER_WEIGHTS} is empty (half-written)")]
    try:
        tensors = read_safetensors(weights).tensors
    except CheckpointValidationError as error:
        return [Problem(error.reason, error.message)]
    return [] if tensors else [Problem("CHECKPOINT_INCOMPLETE", f"{ADAPTER_WEIGHTS} holds no tensor")]


def _trainer_state(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The trainer's state (empty when there is none) and what is odd about it; it never makes an adapter unusable."""
    try:
        path = file_in(folder, TRAINER_STATE)
        if path is None:
            return {}, ()
        state = read_json(path, largest=LARGEST_LIST, lenient=True)
    except (ArtifactError, OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        return {}, (f"{folder / TRAINER_STATE} is not readable ({said}): the step is taken from the folder's name",)
    if not isinstance(state, dict) or not _is_step(state.get("global_step")):
        return {}, (f"{folder / TRAINER_STATE} names no global_step: the step is taken from the folder's name",)
    number = _number(folder)
    if number is not None and number != state["global_step"]:
        return state, (f"{folder} was saved at step {state['global_step']} according to {TRAINER_STATE}",)
    return state, ()


def _last_logged(state: dict[str, Any], key: str) -> float | None:
    history = state.get("log_history")
    values = (
        [entry[key] for entry in history if isinstance(entry, dict) and key in entry]
        if isinstance(history, list)
        else []
    )
    return _figure(values[-1]) if values else None


def _figure(value: object) -> float | None:
    """A logged figure; None for one that diverged, and for what is none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18


def _number(folder: Path) -> int | None:
    match = _FOLDER.fullmatch(folder.name) or _UNFINISHED.fullmatch(folder.name)
    return int(match[1]) if match else None


def no_checkpoint(folder: Path, *, searched: bool = True) -> CheckpointValidationError:
    """The error for a folder with no checkpoint in it nor, where that was ``searched``, below it."""
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
