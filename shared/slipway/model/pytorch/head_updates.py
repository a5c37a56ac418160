"""Divide an adapter that trained a multi-token head too: transformers loads no head with a model, so peft has no place for its factors.

The model's own part goes to peft. The head's part is merged into the head's stored tensors, as it is delivered.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipway.model.adapters.saved import pair_name, unwrap_name
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS, CONFIG
from slipway.model.pytorch.multi_token import HeadNotUnderstoodError
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import read_safetensors
from slipway.model.weights.parts import ModelPart, find_parts, number_of_layers

_WEIGHTS = "model.safetensors"


def head_keys(base: ModelFolder, adapter: Path) -> dict[str, str]:
    """Return the adapter's tensors that belong to the base's multi-token head, each with its name from the head on; empty if there are none.

    Raises:
        CheckpointValidationError: One of the two cannot be read.
    """
    plain = {
        unwrap_name(key).removeprefix(ADAPTER_PREFIX): key
        for key in read_safetensors(adapter / ADAPTER_WEIGHTS).tensors
    }
    # Layers that an adapter repeats lie behind the base's last one too.
    repeats = read_adapter_config(adapter).get("layer_replication")
    found = find_parts(plain, layers=None if repeats else number_of_layers(base.config))
    return {plain[each.name]: each.place for each in found if each.part is ModelPart.MULTI_TOKEN_HEAD}


@contextmanager
def without_head(model: nn.Module, base: ModelFolder, adapter: Path) -> Iterator[Path]:
    """Yield a folder with the adapter's part for the model itself; the adapter's own folder if it trained no multi-token head.

    Args:
        model: The transformers model.
        base: The folder of its weights.
        adapter: The adapter's folder, whose weights are safetensors.
    """
    keys = head_keys(base, adapter) if base.parts[ModelPart.MULTI_TOKEN_HEAD] else {}
    if not keys:
        yield adapter
        return
    settings: dict[str, Any] = dict(read_adapter_config(adapter))
    kept = {key: value for key, value in load_file(adapter / ADAPTER_WEIGHTS).items() if key not in keys}
    if not kept:
        # peft takes no adapter without a layer; one without saved factors has no effect.
        settings["target_modules"] = [next(name for name, each in model.named_modules() if isinstance(each, nn.Linear))]
    with TemporaryDirectory() as place:
        (Path(place) / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        save_file(kept, Path(place) / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        yield Path(place)


@contextmanager
def merged_head(base: ModelFolder, adapter: Path | None) -> Iterator[ModelFolder]:
    """Yield a folder with the multi-token head as it is delivered: that of the base, or another with what the adapter trained merged into it.

    Raises:
        HeadNotUnderstoodError: The adapter's update of the head has a form that is not known here.
    """
    keys = head_keys(base, adapter) if adapter is not None else {}
    if adapter is None or not keys:
        yield base
        return
    stored = {each.place: each.name for each in base.parts[ModelPart.MULTI_TOKEN_HEAD]}
    tensors: dict[str, Tensor] = {}
    for name in stored.values():
        with safe_open(base.tensors[name].file, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    for place, change in _updates(keys, adapter).items():
        name = stored.get(place, "")
        if not name or tensors[name].shape != change.shape:
            raise HeadNotUnderstoodError(f"the adapter's update of {place!r} has no place in it")
        tensors[name] = (tensors[name].float() + change).to(tensors[name].dtype)
    with TemporaryDirectory() as folder:
        shutil.copyfile(base.path / CONFIG, Path(folder) / CONFIG)
        save_file(tensors, Path(folder) / _WEIGHTS, metadata={"format": "pt"})
        yield ModelFolder(Path(folder), base.config)


def _updates(keys: Mapping[str, str], adapter: Path) -> dict[str, Tensor]:
    """Return the update of each weight of the head that the adapter trained, by the weight's name from the head on, in float32."""
    settings, saved = read_adapter_config(adapter), load_file(adapter / ADAPTER_WEIGHTS)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, place in keys.items():
        match = pair_name(unwrap_name(key))
        if match is None or settings.get("peft_type") != "LORA" or settings.get("use_dora"):
            raise HeadNotUnderstoodError(
                f"the adapter trained it too, and its tensor {key!r} is no half of a plain pair of factors"
            )
        module = place.partition(".lora_")[0]
        sides.setdefault(module, {})[match["side"]] = saved[key]
    changes = {}
    for module, pair in sides.items():
        if set(pair) != {"A", "B"} or pair["A"].dim() != 2 or pair["B"].shape[1:] != pair["A"].shape[:1]:
            raise HeadNotUnderstoodError(f"the adapter trained it too, and its factors of {module!r} are no plain pair")
        changes[f"{module}.weight"] = _scale(settings, module) * (pair["B"].double() @ pair["A"].double()).float()
    return changes


def _scale(settings: Mapping[str, Any], module: str) -> float:
    """Return the scaling of a module's update, as peft computes it."""
    ranks, alphas = (settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    rank = ranks.get(get_pattern_key(ranks, module), settings.get("r"))
    alpha = alphas.get(get_pattern_key(alphas, module), settings.get("lora_alpha"))
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise HeadNotUnderstoodError(f"the adapter's rank of {module!r} is {rank!r}, and its lora_alpha {alpha!r}")
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))
