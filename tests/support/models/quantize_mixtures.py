"""Tiny mixtures of experts and hybrid models for quantization, and a reader of quantized folders that shares no code with the stage."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support.models.current_kinds import add_head_layer
from support.models.current_recipes import KINDS, Recipe

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS: dict[str, Recipe] = {
    **KINDS,
    "qwen3-moe": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
_FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_PER_WORD = 32


def save_model(kind: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, fused: bool = False) -> Path:
    """Save a tiny model of a kind in which every weight matters; with ``fused``, experts under the names of transformers' stacks."""
    recipe = MODELS[kind]
    model = recipe.build().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise * (0.2 if tensor.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder, save_original_format=not fused)
    file = folder / "model.safetensors"
    beside = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in (recipe.beside or {}).items()}
    if beside:
        tensors = load_file(file) | beside
        add_head_layer(tensors, recipe, generator)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    """Load a folder with the class that it names, in its own type."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(tf, name).from_pretrained(folder, dtype="auto").eval()


def logits(model: Any) -> torch.Tensor:
    """Return a model's logits for a few tokens, in double precision."""
    tokens = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens, use_cache=False).logits.double()


def expert_matrices(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``layer.expert.projection`` and the matrix (out, in) of each expert of an unquantized folder, by the layout that its class documents."""
    model = load(folder)
    for path, module in model.named_modules():
        stacks = dict(module.named_parameters(recurse=False))
        if "gate_up_proj" not in stacks:
            continue
        layer, kind = path.split("layers.")[1].split(".")[0], type(module).__name__
        for expert in range(len(stacks["gate_up_proj"])):
            both, down = (stacks[name][expert].detach().float() for name in ("gate_up_proj", "down_proj"))
            if kind in ("GptOssExperts", "Llama4TextExperts"):
                both, down = both.T, down.T
            half = len(both) // 2
            gate, up = (both[0::2], both[1::2]) if kind == "GptOssExperts" else (both[:half], both[half:])
            for name, matrix in (("gate", gate), ("up", up), ("down", down)):
                yield f"{layer}.{expert}.{name}", matrix


class QuantizedFolder:
    """The weights of a folder in a form of compressed-tensors, read and dequantized here.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.packing: dict[str, Any] = self.config["quantization_config"]
        self.tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                self.tensors |= {name: opened.get_tensor(name) for name in opened.offset_keys()}

    def rounded(self) -> set[str]:
        """Return the names of the modules whose weights are stored in the form."""
        return {name.removesuffix(".weight_scale") for name in self.tensors if name.endswith(".weight_scale")}

    def bits(self, module: str) -> int:
        """Return the bits of a module's codes, as its scheme says."""
        schemes = list(self.packing["config_groups"].values())
        named = next((scheme for scheme in schemes if module in scheme["targets"]), None)
        plain = next(scheme for scheme in schemes if "Linear" in scheme["targets"])
        return int((named or plain)["weights"]["num_bits"])

    def matrix(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a module's weight and the size of its scale at each place, float32."""
        parts = {
            part: self.tensors[f"{module}.{part}"]
            for part in ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale")
            if f"{module}.{part}" in self.tensors
        }
        match self.packing["format"]:
            case "pack-quantized":
                rows, columns = parts["weight_shape"].tolist()
                codes = unpack_words(parts["weight_packed"], self.bits(module), columns).float()
                scale = parts["weight_scale"].float().repeat_interleave(columns // parts["weight_scale"].shape[1], 1)
                assert codes.shape == (rows, columns)
                return codes * scale, scale
            case "float-quantized" | "int-quantized":
                scale = parts["weight_scale"].float().expand(parts["weight"].shape)
                return parts["weight"].float() * scale, scale
            case "mxfp4-pack-quantized":
                factors = torch.exp2(parts["weight_scale"].float() - 127)
            case "nvfp4-pack-quantized":
                factors = parts["weight_scale"].float() / parts["weight_global_scale"]
        values = unpack_floats(parts["weight_packed"])
        scale = factors.repeat_interleave(values.shape[1] // factors.shape[1], 1)
        return values * scale, scale


def unpack_words(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return signed codes of rows that are packed into words of 32 bits, the first in the lowest bits."""
    rows = []
    for words in packed.tolist():
        row = int.from_bytes(struct.pack(f"<{len(words)}i", *words), "little")
        rows.append([(row >> bits * place & (1 << bits) - 1) - (1 << bits - 1) for place in range(columns)])
    return torch.tensor(rows)


def unpack_floats(packed: torch.Tensor) -> torch.Tensor:
    """Return 4-bit floats that are packed two in a byte, the first in the low half. (…, bytes) → (…, 2 · bytes)."""
    return torch.stack([_FLOATS[(packed & 15).long()], _FLOATS[(packed >> 4).long()]], dim=-1).flatten(-2)


def grid_of(packing: Mapping[str, Any], bits: int) -> torch.Tensor:
    """Return the numbers that codes stand for before they are scaled, in rising order."""
    match packing["format"]:
        case "pack-quantized":
            return torch.arange(-(1 << bits - 1), 1 << bits - 1).float()
        case "int-quantized":
            return torch.arange(-127, 128).float()
        case "float-quantized":
            codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            return codes[codes.isfinite()].unique()
    return _FLOATS.unique()


def excess(exact: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor, grid: torch.Tensor) -> float:
    """Return how far rounded weights are at most from the nearest number of their grid, in its steps at that place."""
    wanted = exact / scale
    above = torch.searchsorted(grid, wanted.contiguous()).clamp_(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    least = torch.minimum((wanted - low).abs(), (wanted - high).abs())
    return float((((rounded / scale - wanted).abs() - least) / (high - low)).max())
