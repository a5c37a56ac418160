"""Small models with random weights and an adapter with a visible effect, saved as training runs save them."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "that",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
]


def save_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer of 64 entries."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<pad>": 1, "<eos>": 2} | {word: n for n, word in enumerate(WORDS, start=3)}
    vocabulary |= {f"w{n}": n for n in range(len(vocabulary), 64)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)


def make_base(folder: Path, *, seed: int = 0, hidden: int = 64) -> Path:
    """Save a Qwen3 of two layers with tied embeddings."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def describe_a_layer_more(folder: Path) -> None:
    """Let the configuration of :func:`make_base` name a layer with 125 million weights, which no file has."""
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": None,
        "mlp_only_layers": [0, 1],
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10_000,
        "decoder_sparse_step": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_checkpoint(base: Path, run: Path, *, step: int = 10, seed: int = 1) -> Path:
    """Save a LoRA on all linear layers, rank 4 and alpha 6, in ``run/checkpoint-<step>``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    folder = run / f"checkpoint-{step}"
    adapted.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "log_history": [{"loss": 1.5, "step": step}]})
    )
    torch.save({"state": {0: torch.zeros(3)}}, folder / "optimizer.pt")
    return folder


def base_model(folder: Path, *names: str) -> Path:
    """Write files with these names into a new folder."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder
