"""Checkpoints that training left in pieces, one per process, and the command that makes a whole adapter of each.

FSDP: ``pytorch_model_fsdp_0/`` with torch's distributed checkpoint in it (``accelerate/utils/fsdp_utils.py``,
``save_fsdp_model``). DeepSpeed ZeRO: a folder ``global_step…`` of pickles. Nothing of either is read here: DeepSpeed's files
are pickles. The script ``zero_to_fp32.py`` that it puts beside them wants DeepSpeed to be installed, which has it as a module;
copies of checkpoints often come without the script, and without the file ``latest`` that it looks for.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slipway.models.model_files import ADAPTER_WEIGHTS, MODEL_WEIGHTS

FSDP_FOLDER = "pytorch_model_fsdp_0"
_DEEPSPEED_FOLDER = re.compile(r"global_step(\d+)")
_CONVERTED = "converted"
_PICKLES = "; what converts them loads pickles, which can run code: use it only on a checkpoint that you trust"


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """What a folder holds instead of an adapter file, and the command that makes one of it."""

    message: str
    remedy: str


def sharded_weights(folder: Path) -> ShardedWeights | None:
    """Return what training left in pieces in a checkpoint's folder; None when it did not."""
    if (folder / FSDP_FOLDER).is_dir():
        if not (folder / FSDP_FOLDER / ".metadata").is_file():
            return ShardedWeights(
                f"its weights are FSDP shards ({FSDP_FOLDER}) without their .metadata: the save did not finish",
                "use an earlier checkpoint, or copy this one again",
            )
        command = f"accelerate merge-weights {FSDP_FOLDER} {_CONVERTED}"
        return ShardedWeights(f"its weights are FSDP shards ({FSDP_FOLDER}){_PICKLES}", _steps(folder, command))
    steps = [int(match[1]) for entry in folder.iterdir() if (match := _DEEPSPEED_FOLDER.fullmatch(entry.name))]
    if not steps:
        return None
    tag = f"global_step{max(steps)}"
    options = f"--tag {tag} --safe_serialization --exclude_frozen_parameters"
    command = f"python -P -m deepspeed.utils.zero_to_fp32 . {_CONVERTED} {options}"
    return ShardedWeights(f"its weights are DeepSpeed ZeRO shards ({tag}){_PICKLES}", _steps(folder, command))


def _steps(folder: Path, command: str) -> str:
    """Both tools write a model's file; an adapter's has the same tensors under another name."""
    return f"run: cd {shlex.quote(str(folder))} && {command} && mv {_CONVERTED}/{MODEL_WEIGHTS} {ADAPTER_WEIGHTS}"
