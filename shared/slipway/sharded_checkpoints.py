"""Checkpoints that training left in pieces, one per process, and the command that makes a whole adapter of each.

FSDP: ``pytorch_model_fsdp_0/`` with torch's distributed checkpoint in it (``accelerate/utils/fsdp_utils.py``,
``save_fsdp_model``). DeepSpeed ZeRO: a folder ``global_step…`` of pickles, and beside it ``zero_to_fp32.py``, which
DeepSpeed puts there for this purpose. Nothing of either is read here: DeepSpeed's files are pickles.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slipway.model_files import ADAPTER_WEIGHTS, MODEL_WEIGHTS

FSDP_FOLDER = "pytorch_model_fsdp_0"
DEEPSPEED_SCRIPT = "zero_to_fp32.py"
_DEEPSPEED_FOLDER = re.compile(r"global_step\d+")
_CONVERTED = "converted"


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """What a folder holds instead of an adapter file, and the command that makes one of it."""

    message: str
    remedy: str


def sharded_weights(folder: Path) -> ShardedWeights | None:
    """What training left in pieces in a checkpoint's folder; None when it did not."""
    if (folder / FSDP_FOLDER).is_dir():
        if not (folder / FSDP_FOLDER / ".metadata").is_file():
            return ShardedWeights(
                f"its weights are FSDP shards ({FSDP_FOLDER}) without their .metadata: the save did not finish",
                "use an earlier checkpoint, or copy this one again",
            )
        command = f"accelerate merge-weights {FSDP_FOLDER} {_CONVERTED}"
        return ShardedWeights(f"its weights are FSDP shards ({FSDP_FOLDER})", _steps(folder, command))
    zero = sorted(
        entry.name for entry in folder.iterdir() if _DEEPSPEED_FOLDER.fullmatch(entry.name) and entry.is_dir()
    )
    if not zero:
        return None
    what = f"its weights are DeepSpeed ZeRO shards ({zero[-1]})"
    if not (folder / DEEPSPEED_SCRIPT).is_file():
        return ShardedWeights(
            f"{what} without {DEEPSPEED_SCRIPT}",
            f"copy {DEEPSPEED_SCRIPT} and the file latest from the training run, or from deepspeed/utils of its environment",
        )
    command = f"python {DEEPSPEED_SCRIPT} . {_CONVERTED} --safe_serialization --exclude_frozen_parameters"
    return ShardedWeights(what, _steps(folder, command))


def _steps(folder: Path, command: str) -> str:
    """Both tools write a model's file; an adapter's has the same tensors under another name."""
    return f"run: cd {shlex.quote(str(folder))} && {command} && mv {_CONVERTED}/{MODEL_WEIGHTS} {ADAPTER_WEIGHTS}"
