"""Make tiny models of the architectures of this year, each with a saved LoRA on every kind of module that trainers reach.

A kind is a base folder and an adapter folder, as transformers and peft save them. Every weight matters: norms, biases, ``A_log`` and
``dt_bias`` are not at their first values, the LoRA's scaling is not 1, and its factors are not 0. Tensors that a checkpoint holds beside
what transformers loads (multi-token prediction) and files that processors need are there too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipway.model.pytorch.placing import without_conversion
from support.models.current_recipes import KINDS, Recipe
from support.models.saved_adapters import edit, write

__all__ = [
    "KINDS",
    "TEXT_PART",
    "Kind",
    "add_head_layer",
    "expert_adapter",
    "make_kind",
    "text_adapter",
]


@dataclass(frozen=True)
class Kind:
    """A saved base and adapter.

    Attributes:
        name: Its name in :data:`KINDS`.
        base: Folder of the base.
        adapter: Folder of the adapter.
    """

    name: str
    base: Path
    adapter: Path

    @property
    def model_class(self) -> Any:
        """The class of transformers that the base was saved from."""
        return getattr(tf, json.loads((self.base / "config.json").read_text())["architectures"][0])


TEXT_PART = "language_model."
"""The part of a name that a model of text and images has, and the adapter of a text-only training has not."""
_KEPT_WIDE = ("A_log", "e_score_correction_bias")
"""Last parts of names that published checkpoints keep in float32."""
_LARGEST = 8.0
"""Limit of values in layers that cut larger ones: their classes begin with infinity, and trained checkpoints have numbers."""
_UNTRAINED = ("lm_head", "patch_embed", "altup", "score", "classifier")
"""Modules without a LoRA: heads, whose merge has tests of its own, and those that no trainer reaches."""
_REFUSED = {
    "falcon_h1": ("out_proj",),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
    "llama4_text": ("router",),
}
"""Last parts of names that peft cannot train, by type of model: it refuses them, or its layer fails (Llama 4's router returns two values)."""


def make_kind(
    name: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Kind:
    """Save the base and the adapter of a kind into ``folder``, and return them; what is not packed of a packed one is bfloat16, as published.

    ``changes`` has settings that differ from the kind's.
    """
    dtype = torch.bfloat16 if KINDS[name].packed else dtype
    recipe, kind = KINDS[name], Kind(name, folder / "base", folder / "adapter")
    recipe = replace(recipe, settings={**recipe.settings, **changes})
    torch.manual_seed(0)
    model = recipe.build().eval()
    _scatter(model)
    model.to(dtype)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if path.endswith(_KEPT_WIDE):
            tensor.data = tensor.data.float()
    model.save_pretrained(kind.base)
    _add_tensors(kind.base, recipe, dtype)
    _save_files(kind.base, model.config)
    save_adapter(model.float(), kind, recipe.task)
    return kind


def _scatter(model: Any) -> None:
    """Move every weight, and every buffer that is stored, away from the value that its class begins with."""
    generator = torch.Generator().manual_seed(7)
    stored = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for _, tensor in sorted(stored.items()):
            if tensor.is_floating_point():
                tensor.nan_to_num_(posinf=_LARGEST, neginf=-_LARGEST)
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise * (0.2 if tensor.dim() == 1 else 0.08))


def _add_tensors(folder: Path, recipe: Recipe, dtype: torch.dtype) -> None:
    """Add tensors that transformers does not load; replace experts by their packed form."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(9)
    tensors = load_file(file)
    for name, shape in (recipe.beside or {}).items():
        tensors[name] = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    add_head_layer(tensors, recipe, generator)
    if recipe.packed:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            groups = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 125, groups, generator=generator, dtype=torch.uint8)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
        path.write_text(json.dumps(config))
    save_file(tensors, file, metadata={"format": "pt"})


def add_head_layer(tensors: dict[str, torch.Tensor], recipe: Recipe, generator: torch.Generator) -> None:
    """Add the layer of a multi-token head: tensors like those of the model's layer that the recipe names."""
    if recipe.head_layer is None:
        return
    layer, beginning = recipe.head_layer
    for name in [name for name in tensors if layer in name and not name.startswith(beginning)]:
        like = tensors[name]
        noise = torch.randn(like.shape, generator=generator) * 0.1
        tensors[beginning + name.partition(layer)[2]] = (like.float() + noise).to(like.dtype)


def _save_files(folder: Path, config: Any) -> None:
    """Save the tokenizer, a chat template and, for images, the settings of a processor."""
    _save_tokenizer(folder)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    if getattr(config, "vision_config", None) is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "X", "patch_size": 4}))
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": "X"}))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "X", "image_seq_length": 4}))


def _save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer of some 300 tokens; tests of all services use it, so it needs none of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the weights of the model are the weights of the file"] * 3, trainer)
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    # transformers takes the class of the type of model, which may split texts in a way of its own.
    tf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(folder)


def text_adapter(kind: Kind, folder: Path) -> Path:
    """Save the part of a kind's adapter for its text model, under the names of the text model alone, as a text-only training does."""

    def shorten(name: str) -> str:
        return name.replace(TEXT_PART, "")

    def keep(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {shorten(name): tensor for name, tensor in tensors.items() if TEXT_PART in name}

    shutil.copytree(kind.adapter, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    modules = {name.split(".")[-1] for name in settings["target_modules"] if TEXT_PART in name}
    parameters = {".".join(name.split(".")[-3:]) for name in settings["target_parameters"] or ()}
    edit(folder, tensors=keep, target_modules=sorted(modules), target_parameters=sorted(parameters) or None)
    return folder


def expert_adapter(kind: Kind, folder: Path) -> Path:
    """Save an adapter with a pair for each projection of each expert, as trainings with transformers 4 did, where experts are stored so."""
    generator, factors = torch.Generator().manual_seed(13), {}
    recipe = KINDS[kind.name]
    beside, head = recipe.beside or {}, recipe.head_layer[1] if recipe.head_layer else "\0"
    weights = load_file(kind.base / "model.safetensors").items()
    matrices = {
        name: value.shape
        for name, value in sorted(weights)
        if value.dim() == 2 and name not in beside and not name.startswith(head)
    }
    # Layers without experts have projections of the same names, which such a training changes too.
    targets = sorted({name.split(".")[-2] for name in matrices if ".experts." in name})
    for name, (rows, columns) in matrices.items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            factors[f"{module}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.1
            factors[f"{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
    return write(folder, factors, target_modules=targets)


def save_adapter(model: Any, kind: Kind, task: str) -> None:
    """Save a LoRA on all linear layers, stacks of experts and routers, with scaling 2.5 and random factors."""
    refused = _REFUSED.get(model.config.model_type, ())
    modules = {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] not in refused
    }
    stacks = [
        path
        for path, parameter in model.named_parameters()
        if (".experts." in path and parameter.dim() == 3)
        or (
            path.endswith((".gate.weight", ".router.weight"))
            and not isinstance(model.get_submodule(path[:-7]), torch.nn.Linear)
        )
    ]
    config = LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=sorted(path for path in modules if not any(part in path for part in _UNTRAINED)),
        target_parameters=stacks or None,
        task_type=task,
    )
    model.name_or_path = str(kind.base)
    with without_conversion():
        tuned = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in sorted(tuned.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tuned.save_pretrained(kind.adapter, save_embedding_layers=False)
