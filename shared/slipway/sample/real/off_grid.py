"""Move a model and its adapter off the grid that the model's packed weights lie on.

Weights that were unpacked from 4 bits lie on a grid of 4 bits, so rounding them to 4 bits again costs less, or something else, than
rounding real weights. Norms are folded into the products after them, inner channels are scaled, and the adapter likewise: the same
function, in other weights. Half a step of noise then moves the embedding off its 8-bit grid: a base of its own, near the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor

_NORM_SPREAD, _CHANNEL_SPREAD = 0.3, 0.4
"""Logarithms of the scales are drawn evenly up to these."""
_GROUP, _STEPS = 32, 127
"""Weights of one scale of the embedding, and the steps of its grid on each side of zero."""
_WEIGHTS, _ADAPTER = "model.safetensors", "adapter_model.safetensors"
_AFTER_NORM = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def move_off_grid(base: Path, checkpoints: Sequence[Path], *, seed: int = 1) -> None:
    """Rewrite the weights of a Llama and of the adapters that were trained on it.

    Args:
        base: Folder of the model, with one file of weights and a tied head.
        checkpoints: Folders of adapters with LoRA on linear layers, trained on it.
        seed: Seed of the scales.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    stored = load_file(base / _WEIGHTS)
    types = {name: value.dtype for name, value in stored.items()}
    weights = {name: value.float() for name, value in stored.items()}
    adapters = [load_file(checkpoint / _ADAPTER) for checkpoint in checkpoints]
    draw = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        _move_layer(f"model.layers.{layer}.", weights, adapters, config=config, draw=draw)
    embedding = weights["model.embed_tokens.weight"]
    step = (embedding.view(-1, _GROUP).abs().amax(1, True) / _STEPS).expand(-1, _GROUP).reshape(embedding.shape)
    embedding += step * torch.empty_like(embedding).uniform_(-0.5, 0.5, generator=draw)
    moved = {name: value.to(types[name]).contiguous() for name, value in weights.items()}
    save_file(moved, base / _WEIGHTS, metadata={"format": "pt"})
    for checkpoint, adapter in zip(checkpoints, adapters, strict=True):
        whole = {name: value.contiguous() for name, value in adapter.items()}
        save_file(whole, checkpoint / _ADAPTER, metadata={"format": "pt"})


def _move_layer(
    layer: str,
    weights: dict[str, Tensor],
    adapters: Sequence[dict[str, Tensor]],
    *,
    config: dict[str, int],
    draw: Generator,
) -> None:
    def scale_inputs(module: str, scale: Tensor) -> None:
        weights[f"{layer}{module}.weight"] *= scale
        for adapter in adapters:
            adapter[f"base_model.model.{layer}{module}.lora_A.weight"] *= scale

    def scale_results(module: str, scale: Tensor) -> None:
        weights[f"{layer}{module}.weight"] *= scale[:, None]
        for adapter in adapters:
            adapter[f"base_model.model.{layer}{module}.lora_B.weight"] *= scale[:, None]

    for norm, modules in _AFTER_NORM.items():
        gain = weights[f"{layer}{norm}.weight"]
        scale = _scales(len(gain), _NORM_SPREAD, draw)
        for module in modules:
            scale_inputs(module, gain * scale)
        weights[f"{layer}{norm}.weight"] = 1 / scale
    scale = _scales(config["intermediate_size"], _CHANNEL_SPREAD, draw)
    scale_results("mlp.up_proj", scale)
    scale_inputs("mlp.down_proj", 1 / scale)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    scale = _scales(kv_heads * width, _CHANNEL_SPREAD, draw)
    scale_results("self_attn.v_proj", scale)
    # Each head of keys and values serves several query heads, which stand side by side.
    scale_inputs(
        "self_attn.o_proj", 1 / scale.view(kv_heads, width).repeat_interleave(heads // kv_heads, 0).reshape(-1)
    )


def _scales(count: int, spread: float, draw: Generator) -> Tensor:
    import torch

    return torch.exp(torch.empty(count).uniform_(-spread, spread, generator=draw))
