"""Tiny models of each architecture that is written as GGUF, and llama.cpp's logits for tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipway.stage import Context
from slipway_gguf.lora.stage import STAGE as ADAPTER_STAGE
from slipway_gguf.params import AdapterParams, GGUFParams
from slipway_gguf.stage import STAGE
from support.models.saved_adapters import edit

VOCABULARY = 320
"""More rows than the tokenizer has tokens, as in many models."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": None,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _longrope(width: int, original: int) -> dict[str, Any]:
    short = [1.0 + 0.05 * index for index in range(width // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "short_factor": short,
        "long_factor": [2 * factor for factor in short],
    }


def _of(config: str, model: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, model)(getattr(tf, config)(**{**_SIZES, **more}))


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _gemma(layers: int, period: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    }


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": _of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True),
    "qwen3-yarn": _of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=False, rope_parameters=_YARN),
    "qwen2": _of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=False),
    "qwen2moe": _of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3moe": _of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "llama": _of("LlamaConfig", "LlamaForCausalLM"),
    "llama3": _of("LlamaConfig", "LlamaForCausalLM", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-linear-bias": _of(
        "LlamaConfig", "LlamaForCausalLM", rope_parameters=_LINEAR, attention_bias=True, mlp_bias=True
    ),
    "mistral": _of("MistralConfig", "MistralForCausalLM", head_dim=32, sliding_window=None),
    "gemma2": _of("Gemma2Config", "Gemma2ForCausalLM", **_gemma(4, 2)),
    "gemma3": _of("Gemma3TextConfig", "Gemma3ForCausalLM", **_gemma(7, 6)),
    "phi3": _of("Phi3Config", "Phi3ForCausalLM"),
    "phi3-long": _of(
        "Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=16, rope_parameters=_longrope(16, 16)
    ),
    # llama.cpp chooses by the length of its context.
    "phi3-short": _of(
        "Phi3Config",
        "Phi3ForCausalLM",
        max_position_embeddings=1024,
        original_max_position_embeddings=512,
        rope_parameters=_longrope(16, 512),
    ),
    "smollm3": _of("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=True),
    "granite": _of(
        "GraniteConfig",
        "GraniteForCausalLM",
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=3.0,
    ),
    "gpt2": _gpt2,
}


def save_family(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model in which every weight matters, and return it: norms and biases differ from 1 and 0, and positions can be told apart."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder)
    _save_tokenizer(folder)
    return model


def _save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer of some 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the weights of the model are the weights of the file"] * 3, trainer)
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)


def write_gguf(
    model: Path, workdir: Path, *, level: str = "f16", importance: Path | None = None, **context: Any
) -> tuple[Path, Context]:
    """Run the stage; return the file, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, **context)
    inputs = {"pytorch": model} | ({"importance": importance} if importance else {})
    folder = STAGE.run(inputs, GGUFParams(type=level, name="tiny"), ctx)["gguf"]
    [file] = folder.glob("*.gguf")
    return file, ctx


def save_adapter(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """Save an adapter of a model whose factors all matter, and return the model with it; by default it changes every layer that it can."""
    layers = (module for module in model.named_modules() if type(module[1]).__name__ in ("Linear", "Conv1D"))
    options = {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": sorted(name for name, _ in layers if name != "lm_head"),
        "fan_in_fan_out": isinstance(model, tf.GPT2LMHeadModel),
    }
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(options | lora)))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.1).to(dtype))
    tuned.save_pretrained(folder, save_embedding_layers=False)
    if dtype is not torch.float32:
        edit(folder, tensors=lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return tuned.eval()


def write_adapter(base: Path, adapter: Path, workdir: Path, **context: Any) -> tuple[Path, Context]:
    """Run the stage of adapters; return the file, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, **context)
    folder = ADAPTER_STAGE.run({"base": base, "adapter": adapter}, AdapterParams(name="tiny"), ctx)["adapter"]
    [file] = folder.glob("*.gguf")
    return file, ctx


def llama_distributions(file: Path, tokens: Sequence[int], *, adapter: Path | None = None) -> np.ndarray:
    """Return llama.cpp's log probabilities of the next token behind each token. (tokens, vocabulary)."""
    from slipway.proof.runtime import Step
    from slipway_gguf.runtime.llama import Llama
    from slipway_gguf.runtime.model import Beside, GGUFModel

    ids = np.array([list(tokens)])
    model = GGUFModel(Llama(), file, threads=1, stored="", beside=Beside(adapter) if adapter else None)
    model.prepare_comparison()
    logits, _ = model.forward(
        Step(input_ids=ids, attention_mask=np.ones_like(ids), position_ids=np.arange(ids.size)[None])
    )
    return torch.log_softmax(torch.from_numpy(logits[0]).double(), -1).numpy()


def torch_distributions(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return transformers' log probabilities of the next token behind each token. (tokens, vocabulary)."""
    with torch.no_grad():
        logits = model.float()(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()
