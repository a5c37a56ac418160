"""A tiny Llama with an adapter, its GGUF file, and copies of the file with one fault each."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from peft import LoraConfig, get_peft_model

from slipway.stage import Context
from slipway_gguf.params import GGUFParams
from slipway_gguf.stage import STAGE
from slipway_gguf.vocabulary.splitting import KNOWN
from support.models.tokenizers_of_kinds import MARKS, begin_texts, byte_level, save

ROWS, HEADS, KV_HEADS = 720, 4, 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
_CONFIG = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_models(root: Path, *, tied: bool = False, own_head: bool = False) -> tuple[Path, Path, Path]:
    """Save base, adapter and merged model, whose rows of queries and keys matter.

    Args:
        root: Folder of all three.
        tied: Whether the base's head is its embedding.
        own_head: Whether the adapter brings a head, which is not the embedding.
    """
    tokenizer = byte_level(next(each for each, found in KNOWN.items() if found.whole == "llama-bpe"), whole=True)
    begin_texts(tokenizer)
    base, adapter, merged = (root / name for name in ("base", "adapter", "merged"))

    def model() -> Any:
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_CONFIG | {"tie_word_embeddings": tied})).eval()

    def adapted() -> Any:
        made = model()
        torch.manual_seed(2)
        settings = LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            modules_to_save=["lm_head"] if own_head else None,
        )
        adapted = get_peft_model(made, settings).eval()
        if own_head:
            trained = adapted.base_model.model.lm_head.modules_to_save["default"].weight
            trained.data = trained.data.flip(0).clone()
        return adapted

    model().save_pretrained(base)
    adapted().save_pretrained(adapter)
    adapted().merge_and_unload().save_pretrained(merged)
    settings = {
        "bos_token": MARKS[0],
        "eos_token": MARKS[1],
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for folder in (base, merged):
        save(tokenizer, folder, settings=settings)
    return base, adapter, merged


def write(merged: Path, work: Path) -> Path:
    """Return the folder of the model's GGUF output."""
    work.mkdir()
    return STAGE.run({"pytorch": merged}, GGUFParams(type="f16", name="tiny"), Context(workdir=work))["gguf"]


Tensors = dict[str, Any]


def in_own_order(tensors: Tensors) -> None:
    """Put the rows of queries and keys into transformers' order."""
    for name, values in tensors.items():
        heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else 0
        if heads:
            tensors[name] = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def without_head(tensors: Tensors) -> None:
    """Lose the head, as if it were tied to the embedding."""
    del tensors["output.weight"]


def with_wrong_head(tensors: Tensors) -> None:
    """Give a tied model a head with the rows of other tokens, as a tool does that takes the head's and the embedding's names for two weights."""
    tensors["output.weight"] = tensors["token_embd.weight"][::-1]


def with_the_same_head(tensors: Tensors) -> None:
    """Write the head of a tied model again, which is no fault."""
    tensors["output.weight"] = tensors["token_embd.weight"]


def with_other_values(tensors: Tensors) -> None:
    """Exchange two layers' weights, and double those of a norm."""
    one, other = ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight")
    tensors[one], tensors[other] = tensors[other], tensors[one]
    tensors["output_norm.weight"] = tensors["output_norm.weight"] * 2


PLANTED: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"change": in_own_order},
    "q8_0": {"fields": {"tokenizer.ggml.pre": "gpt-2"}},
    "q6_k": {"fields": {"tokenizer.chat_template": None}},
    "q4_0": {"change": without_head},
}
"""Faults that :func:`plant` puts into the file of a level."""


def plant(folder: Path, level: str, ctx: Context) -> Path:
    """Put the fault of a level into an output of the stage, as if the stage had made it."""
    if level not in PLANTED:
        return folder
    good = folder.rename(folder.with_name("good"))
    [file] = faulty(good, folder, **PLANTED[level]).glob("*.gguf")
    ctx.digest(file, hashlib.sha256(file.read_bytes()).hexdigest())
    return folder


def faulty(
    good: Path, folder: Path, *, fields: Mapping[str, Any] = {}, change: Callable[[Tensors], None] = lambda _: None
) -> Path:
    """Copy an output with other values of some keys (None leaves the key out) or with changed tensors."""
    shutil.copytree(good, folder)
    [source] = good.glob("*.gguf")
    reader = gguf.GGUFReader(source)
    tensors = {each.name: each.data for each in reader.tensors}
    kinds = {each.name: each.tensor_type for each in reader.tensors}
    change(tensors)
    writer = gguf.GGUFWriter(folder / source.name, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = fields.get(name, field.contents())
        if value is not None:
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], item)
    for name, values in tensors.items():
        kind = kinds[name if name in kinds else "token_embd.weight"]  # an added tensor is made of the embedding
        writer.add_tensor(name, values.copy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder
