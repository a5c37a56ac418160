"""Say why an adapter's saved weights cannot be used, from their headers: missing, in several files, empty, or a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.models.model_files import ADAPTER_PICKLE, ADAPTER_WEIGHTS
from slipway.models.safetensors_file import read_safetensors
from slipway.models.sharded_checkpoints import sharded_weights

_PARTS = "adapter_model-*-of-*.safetensors"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a checkpoint cannot be used, with a remedy if the one of its reason is not enough."""

    reason: str
    message: str
    remedy: str = ""


def weight_problems(folder: Path) -> list[Problem]:
    """Return why the weights in a checkpoint's folder cannot be used; nothing if they can."""
    weights = folder / ADAPTER_WEIGHTS
    problem = _problem_of(weights) if weights.is_file() else _problem_without_weights(folder)
    return [problem] if problem else []


def _problem_without_weights(folder: Path) -> Problem:
    if sharded := sharded_weights(folder):
        return Problem("CHECKPOINT_SHARDED", sharded.message, sharded.remedy)
    if (folder / ADAPTER_PICKLE).is_file():
        message = f"its weights are a pickle ({ADAPTER_PICKLE}), which can run code when it is loaded"
        return Problem("UNSAFE_PICKLE", message)
    if parts := sorted(path.name for path in folder.glob(_PARTS)):
        message = f"its adapter is in {len(parts)} files ({parts[0]} …), and peft reads one {ADAPTER_WEIGHTS}"
        remedy = (
            f"write the tensors of all parts into one {ADAPTER_WEIGHTS} with safetensors' save_file, or save the adapter again "
            "with max_shard_size above its size"
        )
        return Problem("CHECKPOINT_INCOMPLETE", message, remedy)
    return Problem("CHECKPOINT_INCOMPLETE", f"no {ADAPTER_WEIGHTS}")


def _problem_of(weights: Path) -> Problem | None:
    if weights.stat().st_size == 0:
        return Problem("CHECKPOINT_INCOMPLETE", f"{ADAPTER_WEIGHTS} is empty (half-written)")
    try:
        tensors = read_safetensors(weights).tensors
    except CheckpointValidationError as error:
        return Problem(error.reason, error.message)
    if not tensors:
        return Problem("CHECKPOINT_INCOMPLETE", f"{ADAPTER_WEIGHTS} holds no tensor")
    empty = sorted(name for name, tensor in tensors.items() if 0 in tensor.shape)
    if not empty:
        return None
    message = (
        f"{len(empty)} of {len(tensors)} tensors in {ADAPTER_WEIGHTS} are empty, first {empty[0]!r}, as DeepSpeed ZeRO-3 leaves "
        "them where weights are saved ungathered"
    )
    remedy = (
        "save with stage3_gather_16bit_weights_on_model_save, or make the weights from the ZeRO files beside it with "
        "zero_to_fp32.py"
    )
    return Problem("CHECKPOINT_INCOMPLETE", message, remedy)
