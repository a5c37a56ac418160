"""Say from their headers why an adapter's saved weights cannot be used: missing, in several files, empty, a pickle, or in pieces.

For a checkpoint that was saved in pieces, one per process, the command that makes a whole adapter is named. FSDP:
``pytorch_model_fsdp_0/`` with torch's distributed checkpoint (``accelerate/utils/fsdp_utils.py``, ``save_fsdp_model``).
DeepSpeed ZeRO: a folder ``global_step…`` of pickles. Their content is not read here. DeepSpeed's script ``zero_to_fp32.py``
needs an installed DeepSpeed, which has it as a module; copies of checkpoints often lack the script and the file ``latest`` that
it needs.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slipway.counts import counted
from slipway.errors import CheckpointValidationError
from slipway.model.model_files import ADAPTER_PICKLE, ADAPTER_WEIGHTS, MODEL_WEIGHTS
from slipway.model.runs.foreign_adapters import OtherForm
from slipway.model.safetensors_file import read_safetensors
from slipway.texts import printable

_PARTS = "adapter_model-*-of-*.safetensors"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
"""Ends of the names of files that hold weights or training state."""
_STATE = re.compile(
    r"(optimizer|scheduler|lr_scheduler|scaler|sampler|dataloader|dl_state|rng_state|random_states|training_args|train_state|trainer_state"
    r"|custom_checkpoint|pytorch_model_fsdp|model_fsdp|zero_pp_rank|bf16_zero_pp_rank|mp_rank|accelerator|qlora_state|loss_scaler)"
)
"""Beginnings of the names of training state, which only a resumed training reads: of transformers, accelerate, DeepSpeed, torchtune and Axolotl."""
_MODEL = re.compile(r"(adapter_model|model|pytorch_model|consolidated)(-\d+-of-\d+|[.-]\d+)?\.(safetensors|bin|pth)")
"""Names of an adapter's and a base's weights, which are looked for by themselves."""

FSDP_FOLDER = "pytorch_model_fsdp_0"
_DEEPSPEED_FOLDER = re.compile(r"global_step(\d+)")
_CONVERTED = "converted"
_PICKLES = "; converting them loads pickles, which can run code: do so only with a checkpoint that you trust"


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
    return [problem] if problem else _more_weights(folder)


def whole_model_beside(folder: Path) -> str:
    """Return the name of a file beside the adapter that holds, or lists, a whole model's weights; empty for none."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return next((name for name in names if not name.startswith("adapter_model") and _MODEL.fullmatch(name)), "")


def _more_weights(folder: Path) -> list[Problem]:
    """Return the problem of trained weights in files that nothing reads: without them the model would lack a part of what was trained."""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES
        and not _STATE.match(path.name)
        and not _MODEL.fullmatch(path.name)
        and path.is_file()
    )
    if not names:
        return []
    more = f" and {counted(len(names) - 1, 'more file')}" if len(names) > 1 else ""
    message = f"it has weights beside the adapter, in {printable(names[0])}{more}, which no part of an export reads: {_kind(names[0])}"
    return [
        Problem(
            "CHECKPOINT_HAS_MORE_WEIGHTS",
            message,
            f"{_remedy(names[0])}; if they are not part of what you serve, move the file out of the folder",
        )
    ]


def _kind(name: str) -> str:
    known = {
        "non_lora": "weights that were trained beside the LoRA, such as the projector of a vision-language model",
        "value_head": "the head of a reward or value model",
        "new_embeddings": "rows for new tokens",
        "learned_embeds": "rows for new tokens",
    }
    return next(
        (what for start, what in known.items() if name.startswith(start)), "the model that was trained may need them"
    )


def _remedy(name: str) -> str:
    if "embed" in name:
        return "save the embedding with the adapter (modules_to_save or trainable_token_indices of peft)"
    return "train these modules with peft's modules_to_save, which the adapter's file then holds"


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
