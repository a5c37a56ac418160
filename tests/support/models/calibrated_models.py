"""Small trained models to calibrate, and ways to judge what comes out."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.calibrations import values

SMALL = {"windows": 24, "window_tokens": 64, "time_budget_seconds": 1, "threads": 1}
"""Some forty steps of tuning on the model of one layer."""


@dataclass(frozen=True)
class Material:
    """A model, the text that it is calibrated with, and another text of the same kind."""

    model: Path
    data: Path
    other: str


def shortened(sample: Path, folder: Path, *, layers: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Save the first layers of the sample's base model: trained, and small enough to tune in a second."""
    source = sample / "qwen3-base"
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    weights = {
        name: tensor.to(dtype)
        for name, tensor in load_file(source / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_data(folder: Path, texts: list[str]) -> Path:
    """Write texts as the stage takes them."""
    folder.mkdir(parents=True)
    (folder / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "profile.json").write_text("{}")
    return folder


def rounded_divergence(model: Path, calibration: Path, text: str, *, tokens: int = 1024) -> float:
    """Return the mean divergence that a calibration's weights cause on a text, with transformers' own model in float32."""
    found = load_file(calibration / "weights.safetensors")
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name in {name.removesuffix(".codes") for name in found if name.endswith(".codes")}:
        parts = {part.removeprefix(f"{name}."): found[part].numpy() for part in found if part.startswith(f"{name}.")}
        rounded.get_parameter(name).data = torch.from_numpy(values(parts))
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"][:tokens]
    batch = torch.tensor(ids).reshape(-1, 64)
    with torch.no_grad():
        one, other = (each(batch).logits.log_softmax(-1) for each in (exact, rounded))
    return float((one.exp() * (one - other)).sum(-1).mean())
