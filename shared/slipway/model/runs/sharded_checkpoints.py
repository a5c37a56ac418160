"""Recognise checkpoints that training saved in pieces, one per process, and name the command that makes a whole adapter.

FSDP: ``pytorch_model_fsdp_0/`` with torch's distributed checkpoint (``accelerate/utils/fsdp_utils.py``, ``save_fsdp_model``).
DeepSpeed ZeRO: a folder ``global_step…`` of pickles. Their content is not read here. DeepSpeed's script ``zero_to_fp32.py`` needs an
installed DeepSpeed, which has it as a module; copies of checkpoints often lack the script and the file ``latest`` that it needs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from slipway.model.model_files import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from slipway.model.runs.foreign_adapters import OtherForm

FSDP_FOLDER = "pytorch_model_fsdp_0"
_DEEPSPEED_FOLDER = re.compile(r"global_step(\d+)")
_CONVERTED = "converted"
_PICKLES = "; converting them loads pickles, which can run code: do so only with a checkpoint that you trust"


def sharded_weights(folder: Path) -> OtherForm | None:
    """Return the shards in a checkpoint's folder, with the command that makes an adapter file of them; None if there are none."""
    if (folder / FSDP_FOLDER).is_dir():
        if not (folder / FSDP_FOLDER / ".metadata").is_file():
            return OtherForm(
                f"its weights are FSDP shards ({FSDP_FOLDER}) without their .metadata: the save did not finish",
                "use an earlier checkpoint, or copy this one again",
            )
        command = f"accelerate merge-weights {FSDP_FOLDER} {_CONVERTED}"
        return OtherForm(f"its weights are FSDP shards ({FSDP_FOLDER}){_PICKLES}", _steps(folder, command))
    steps = [int(match[1]) for entry in folder.iterdir() if (match := _DEEPSPEED_FOLDER.fullmatch(entry.name))]
    if not steps:
        return None
    tag = f"global_step{max(steps)}"
    options = f"--tag {tag} --safe_serialization --exclude_frozen_parameters"
    command = f"python -P -m deepspeed.utils.zero_to_fp32 . {_CONVERTED} {options}"
    return OtherForm(f"its weights are DeepSpeed ZeRO shards ({tag}){_PICKLES}", _steps(folder, command))


def _steps(folder: Path, command: str) -> str:
    """Return the remedy. Both tools write a model file, which has the adapter's tensors and must only be renamed."""
    return f"run: cd {shlex.quote(str(folder))} && {command} && mv {_CONVERTED}/{MODEL_WEIGHTS} {ADAPTER_WEIGHTS}"
