"""A tiny Qwen3, an adapter merged by peft, an ONNX graph of it by torch, and broken variants of each, for validation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import numpy_helper
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast

torch.set_num_threads(1)
VOCABULARY = 160
TEXT = " ".join(f"the {a} of {b} is not in {c} or {a}{b}" for a in "abcdef" for b in "ghijkl" for c in "mnopq")


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(folder)


def make_base() -> transformers.Qwen3ForCausalLM:
    """Make a base whose weights are larger than an untrained model's, so that errors show in the logits."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def make_adapted(base: transformers.Qwen3ForCausalLM) -> PeftModel:
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config).eval()


class Models:
    """Folders of base, adapter and outputs, made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "base"
        self.adapter = root / "adapter"
        self.merged = root / "merged"
        make_base().save_pretrained(self.base)
        save_tokenizer(self.base)
        make_adapted(make_base()).save_pretrained(self.adapter)
        self.merged_module = make_adapted(make_base()).merge_and_unload()
        self._save(self.merged_module, self.merged)

    def variant(self, name: str, change: Callable[[Any], None]) -> Path:
        """Write the merged model with a change to its weights."""
        module = make_adapted(make_base()).merge_and_unload()
        with torch.no_grad():
            change(module)
        return self._save(module, self.root / name)

    def scaled(self, name: str, factor: float) -> Path:
        """Write the model with the adapter merged at another scale."""
        module = make_adapted(make_base())
        for layer in module.modules():
            if isinstance(getattr(layer, "scaling", None), dict):  # attention has a scaling too, a float
                layer.scaling = {key: value * factor for key, value in layer.scaling.items()}
        return self._save(module.merge_and_unload(), self.root / name)

    def without_adapter(self, name: str) -> Path:
        return self._save(make_base(), self.root / name)

    def copied(self, name: str) -> Path:
        return Path(shutil.copytree(self.merged, self.root / name))

    def _save(self, module: Any, folder: Path) -> Path:
        module.save_pretrained(folder)
        save_tokenizer(folder)
        return folder


class Flat(torch.nn.Module):
    """A decoder with flat inputs and outputs, like its ONNX graph."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        cache = DynamicCache(pairs)
        output = self.module(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache
        )
        present = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (output.logits, *present)


def export_onnx(module: Any, folder: Path) -> Path:
    """Write the graph with the usual names, dynamic in batch, sequence and past."""
    folder.mkdir()
    heads, size, layers = 2, 16, 2
    ids = torch.randint(0, VOCABULARY, (2, 3))
    past = tuple(torch.randn(2, heads, 4, size) for _ in range(2 * layers))
    sample = (ids, torch.ones(2, 7, dtype=torch.int64), torch.arange(4, 7)[None].repeat(2, 1), *past)
    cache_axes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    names = [f"{n}.{kind}" for n in range(layers) for kind in ("key", "value")]
    torch.onnx.export(
        Flat(module).eval(),
        sample,
        str(folder / "model.onnx"),
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=(axes, axes, axes, tuple(cache_axes for _ in past)),
        opset_version=18,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    return folder


def edited_onnx(source: Path, folder: Path, *, replaced: str, by: Callable[[str, str], list[onnx.NodeProto]]) -> Path:
    """Copy a graph and replace all uses of an input by the result of the given nodes."""
    model = onnx.load(source / "model.onnx")
    new = f"{replaced}.changed"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == replaced:
                node.input[index] = new
    for node in reversed(by(replaced, new)):
        model.graph.node.insert(0, node)
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return folder


def fixed_batch(source: Path, folder: Path) -> Path:
    """Copy a graph so that it accepts batch 1 only."""
    model = onnx.load(source / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return folder


def all_ones(name: str, new: str) -> list[onnx.NodeProto]:
    """Copy a graph so that it ignores its mask and uses a mask of ones."""
    one = numpy_helper.from_array(np.array([1], dtype=np.int64))
    return [
        onnx.helper.make_node("Shape", [name], [f"{new}.shape"]),
        onnx.helper.make_node("ConstantOfShape", [f"{new}.shape"], [new], value=one),
    ]


def negated(name: str, new: str) -> list[onnx.NodeProto]:
    """Copy a graph so that it reads its cache with the wrong sign."""
    return [onnx.helper.make_node("Neg", [name], [new])]
