"""Say why an adapter cannot be used as saved: bad or missing weights, or another place or form than peft's.

Weights are judged by their headers: missing, in several files, empty, a pickle, or in pieces. Adapters of other tools, and adapters in
subfolders, are recognised.

For a checkpoint that was saved in pieces, one per process, the command that makes a whole adapter is named. FSDP:
``pytorch_model_fsdp_0/`` with torch's distributed checkpoint (``accelerate/utils/fsdp_utils.py``, ``save_fsdp_model``).
DeepSpeed ZeRO: a folder ``global_step…`` of pickles. The content of the pieces is not read here. DeepSpeed's script
``zero_to_fp32.py`` needs an installed DeepSpeed, which has it as a module; copies of checkpoints often lack the script and the file
``latest`` that it needs.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_PREFIX, ADAPTER_WEIGHTS, MODEL_WEIGHTS
from slipway.model.safetensors_file import read_safetensors
from slipway.texts import counted, printable

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

#: Files that only one tool writes, the tool, and how to convert them.
_TOOLS = (
    (
        "adapters.safetensors",
        "MLX",
        "convert it to a peft adapter, or fuse it with mlx_lm.fuse into a whole model, which is exported without a checkpoint (slipway export --base-model DIR)",
    ),
    (
        "adapter_[0-9]*.pt",
        "torchtune",
        "save it with torchtune's FullModelHFCheckpointer, which writes peft's files too",
    ),
    (
        "*.nemo",
        "NeMo",
        "convert it with NeMo to a peft adapter, or merge it there, and take the result to single stages (slipway stage)",
    ),
)

_IMAGES = (
    (("lora_unet_", "lora_te"), "kohya's scripts"),
    (("unet.", "transformer.", "text_encoder.", "text_encoder_2."), "diffusers"),
)
"""Beginnings of the names in files with the LoRA of an image model, and what writes them."""


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


@dataclass(frozen=True, slots=True)
class OtherForm:
    """Description of what a folder holds instead of a peft adapter's files, and the remedy."""

    message: str
    remedy: str


def foreign_adapter(folder: Path) -> OtherForm | None:
    """Return what a folder holds instead of a peft adapter; None if nothing is recognised.

    peft saves every adapter in a subfolder with its name, except the one named ``default``.
    """
    named = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    if named:
        folders = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        return OtherForm(f"there are adapters in subfolders ({folders})", f"name {folder / named[0]}")
    for pattern, tool, remedy in _TOOLS:
        files = sorted(path.name for path in folder.glob(pattern))
        if files:
            return OtherForm(f"{files[0]} is an adapter of {tool}", remedy)
    return None


def foreign_file(path: Path) -> OtherForm:
    """Return what a file holds that is named where the folder of a checkpoint belongs."""
    plain = OtherForm(f"{path} is a file", "name the folder of a training run, or of one checkpoint")
    if path.suffix != ".safetensors":
        return plain
    try:
        names = list(read_safetensors(path).tensors)
    except (ModelExportError, OSError):
        return OtherForm(f"{path} is a file, and cannot be read as safetensors", plain.remedy)
    for beginnings, tool in _IMAGES:
        if names and all(name.startswith(beginnings) for name in names):
            what = f"{path} is the LoRA of an image model, as {tool} writes it"
            return OtherForm(
                what, "slipway exports models of text and speech; fuse this one with diffusers (fuse_lora)"
            )
    if any(name.startswith(ADAPTER_PREFIX) for name in names):
        if (path.parent / ADAPTER_CONFIG).is_file():
            return OtherForm(f"{path} is a file of a checkpoint", f"name its folder: {path.parent}")
        what = f"{path} has the weights of an adapter, and no {ADAPTER_CONFIG} beside it says its rank and scale"
        return OtherForm(what, f"put the {ADAPTER_CONFIG} that was saved with it beside it, and name their folder")
    return OtherForm(
        f"{path} is a file of weights, not a checkpoint's folder",
        "name the folder with its config.json as --base-model to export a whole model, or a folder with adapter_config.json",
    )
