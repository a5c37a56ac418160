"""Make small base models and adapters that name one, in every form that files tell apart, and judge them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipway.base_match import BaseMatch
from slipway.base_match.evidence import UsedBase, match_base

VOCABULARY, HIDDEN, WIDE, LAYERS = 40, 16, 24, 3
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
}
Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0, *, hidden: int = HIDDEN, layers: int = LAYERS) -> Tensors:
    torch.manual_seed(seed)
    found = {"model.embed_tokens.weight": torch.randn(VOCABULARY, hidden), "model.norm.weight": torch.randn(hidden)}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(WIDE, hidden)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.randn(hidden, WIDE)
    return found


def make_model(folder: Path, tensors: Tensors | None = None, **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, *, first: int = 0, added: int = 0) -> None:
    vocabulary = {f"token{n}": n + first for n in range(VOCABULARY)}
    more = [{"id": VOCABULARY + n, "content": f"<new{n}>"} for n in range(added)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": more, "model": {"vocab": vocabulary}}))


def make_adapter(
    folder: Path, *, hidden: int = HIDDEN, layers: int = LAYERS, base: object = "base", **config: object
) -> Path:
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(layers):
        start = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        tensors |= {f"{start}.lora_A.weight": torch.randn(4, hidden), f"{start}.lora_B.weight": torch.randn(WIDE, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": base, **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    make_tokenizer(folder)
    return folder


def judge(used: Path, adapter: Path, *, trust: bool = False, contents: bool = True) -> BaseMatch:
    return match_base(UsedBase(used, used.name, contents=contents), [adapter], trust=trust)


def cache_snapshot(root: Path, tensors: Tensors, *, commit: str = "a" * 40) -> Path:
    """A snapshot of owner/base in a Hugging Face cache, of links to blobs."""
    snapshot = make_model(root / "hub" / "models--owner--base" / "snapshots" / commit, tensors)
    blobs = root / "hub" / "models--owner--base" / "blobs"
    blobs.mkdir(exist_ok=True)
    for path in sorted(snapshot.iterdir()):
        blob = blobs / f"{commit[0]}-{path.name}"
        path.rename(blob)
        path.symlink_to(blob)
    refs = root / "hub" / "models--owner--base" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(commit)
    return snapshot
