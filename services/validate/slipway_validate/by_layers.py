"""Decide which PyTorch models are computed layer by layer, because they do not fit into memory, and say what that leaves out.

Results of given tokens take a few passes over the weights, however many windows and shapes there are. Each token that a model writes itself takes one more, so
those are left out, and so is speed: weights that are read from the disk in each pass say nothing of how fast a model serves.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ModelExportError, ValidationError
from slipway.machine.cgroup import ControlGroup, available_memory
from slipway.model.adapters.saved import is_plain_lora
from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_WEIGHTS
from slipway.model.safetensors_file import read_safetensors
from slipway.sizes import format_size
from slipway.stage import Context
from slipway_validate.params import SampleParams
from slipway_validate.protocol.inputs import INPUTS_FILE
from slipway_validate.protocol.messages import RunSpec

LIBRARIES = 1 << 30
"""Most memory that libraries and the results of one call take beside weights."""
LONGER = 8
"""How many times longer a process may take that computes layer by layer."""
ASKED = "by_layers is always"
ALONE = "timed alone: the reference is computed layer by layer"
_LAYER = re.compile(r"\.\d+\.")
_UNPACKED, _FLOAT32 = 2, 4
"""Bytes of a weight that is unpacked, and of one that is made."""
_CHANGED = 3
"""How many times the experts of a layer are there beside themselves while an adapter changes them: changes, joined changes and the sum."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of a model that is computed as a whole, in bytes.

    Attributes:
        mapped: Files that are mapped: they may be read again from the disk, at its speed.
        anonymous: What is made of them.
    """

    mapped: int
    anonymous: int = 0


class Memory:
    """What processes of a stage may use.

    Args:
        params: Parameters of the stage.
        ctx: Its context.
        weights: Weights of the base.

    Attributes:
        available: Memory of the machine or container that is free.
        own: What the stage may use of it for what is no copy of a file.
    """

    def __init__(self, params: SampleParams, ctx: Context, *, weights: int) -> None:
        self._params, self._weights = params, weights
        self.available = available_memory(ControlGroup().memory())
        self.own = min(self.available, ctx.max_memory_bytes)

    def why_by_layers(self, folder: Path, *, adapter: Path | None = None, makes_weights: bool = False) -> str:
        """Return why a model is computed layer by layer; empty if it is computed as a whole.

        Args:
            folder: Its folder.
            adapter: Its adapter, unmerged.
            makes_weights: Whether float32 weights are made of all stored ones.

        Raises:
            ValidationError: ``OUT_OF_MEMORY``: not even its largest layer fits.
        """
        try:
            model = ModelFolder.open(folder)
            need = self._need(model, makes_weights=makes_weights)
            largest = _largest_layer(model, makes_weights=makes_weights) + _joined_bytes(model, adapter)
        except (ModelExportError, OSError):  # the process that loads it will say so
            return ""
        if self._params.by_layers == "never" or model.family is not DECODER:
            return ""
        if adapter is not None and not is_plain_lora(adapter):  # its base is float32 as a whole
            return ""
        why = ASKED if self._params.by_layers == "always" else self._excess(need)
        if why and largest > _beside_libraries(self.own):
            raise ValidationError(
                f"{folder.name} does not fit into memory, nor does its largest layer: about "
                f"{format_size(largest + LIBRARIES)} are needed, {format_size(self.own)} may be used",
                reason="OUT_OF_MEMORY",
                remedy="let the stage use more memory, or use a machine with more",
            )
        return why

    def _need(self, model: ModelFolder, *, makes_weights: bool) -> Need:
        mapped = sum(each.nbytes for each in model.tensors.values())
        made = self._weights * _UNPACKED if model.config.quantization else 0
        if model.config.mixes_experts:  # transformers joins them into stacks, which are widened as a whole
            made += mapped + self._weights * _FLOAT32
        return Need(mapped, made + (self._weights * _FLOAT32 if makes_weights else 0))

    def _excess(self, need: Need) -> str:
        whole = need.mapped + need.anonymous
        if need.anonymous > _beside_libraries(self.own):
            return (
                f"{format_size(need.anonymous + LIBRARIES)} of memory would be needed as a whole, "
                f"and {format_size(self.own)} may be used"
            )
        if whole > _beside_libraries(self.available):
            return (
                f"{format_size(whole + LIBRARIES)} of memory would be needed as a whole, "
                f"and {format_size(self.available)} are free"
            )
        return ""


def _beside_libraries(limit: int) -> int:
    """Return what a limit leaves for weights; a small model under a small limit takes less for libraries and results than the most."""
    return max(limit - LIBRARIES, limit // 2)


def _largest_layer(model: ModelFolder, *, makes_weights: bool) -> int:
    """Return the size in float32 of the layer with most weights.

    A table beside the layers counts if it is packed, or made again; otherwise it is read row by row, or piece by piece.
    """
    sizes: Counter[str] = Counter()
    for name, tensor in model.tensors.items():
        layer, packed = _LAYER.search(name), tensor.dtype in ("I8", "U8", "I32")
        values = tensor.nbytes * 2 if packed else tensor.numel
        if layer is not None:
            sizes[name[: layer.end()]] += _FLOAT32 * values
        elif packed or makes_weights:
            sizes[name] += (_FLOAT32 + (_UNPACKED if packed else 0)) * values
    return max(sizes.values(), default=0)


def _joined_bytes(model: ModelFolder, adapter: Path | None) -> int:
    """Return what joining the experts of a layer takes beside its float32 weights."""
    if not model.config.mixes_experts:
        return 0
    layer = _largest_layer(model, makes_weights=False)
    changed = adapter is not None and any(
        ".experts." in name for name in read_safetensors(adapter / ADAPTER_WEIGHTS).tensors
    )
    return layer * _CHANGED if changed else layer // 2


def leave_out(spec: RunSpec, why: str) -> tuple[RunSpec, str]:
    """Return what a model computes layer by layer, and a sentence that names what it does not compute.

    Args:
        spec: What it would compute as a whole.
        why: Why it is not computed as a whole.
    """
    left = {
        "greedy continuations": bool(spec.prompts),
        "long continuations": spec.long is not None,
        "answers to the test inputs": (spec.samples / INPUTS_FILE).is_file(),
        "drafts of the multi-token head": spec.drafting,
        "prompts with pictures or sound": bool(spec.pictures),
        "speed": spec.benchmark is not None,
    }
    names = ", ".join(name for name, wanted in left.items() if wanted)
    said = f"computed layer by layer, because {why}" + (f"; not run: {names}" if names else "")
    return spec.model_copy(update={"by_layers": True, "prompts": (), "drafts": (), "benchmark": None}), said
