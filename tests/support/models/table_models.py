"""One tiny model for each row of the table of families: the smallest that has every part its family has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.models.tiny_models import save_tokenizer

_WORDS = {"vocab_size": 64, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
_DECODER = {
    **_WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT = {**_WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_ALIBI = {**_WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER = {
    **_WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "num_labels": 3,
}  # fmt: skip
_PAIR = {
    **_WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {
    "vocab_size": 64, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "d_model": 32, "d_kv": 8,
    "d_ff": 48, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: The family, as the table names it.
        model: Class of transformers.
        settings: Settings of its configuration.
    """

    name: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _decoder(name: str, prefix: str, **more: Any) -> Row:
    return Row(name, f"{prefix}ForCausalLM", {**_DECODER, **more})


ROWS: tuple[Row, ...] = (
    _decoder("Qwen3", "Qwen3", head_dim=16, tie_word_embeddings=True),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Llama", "Llama"),
    _decoder("Mistral, window", "Mistral", sliding_window=8),
    _decoder("Gemma", "Gemma", head_dim=16),
    _decoder("Gemma 2, window", "Gemma2", head_dim=16, query_pre_attn_scalar=16, **_WINDOW),
    _decoder("Gemma 3, window", "Gemma3", head_dim=16, query_pre_attn_scalar=16, **_WINDOW),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("SmolLM3", "SmolLM3", no_rope_layers=[1, 0]),
    _decoder("StableLM", "StableLm"),
    _decoder("StarCoder2", "Starcoder2", sliding_window=None),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("Granite", "Granite"),
    _decoder("Cohere", "Cohere"),
    _decoder("Cohere 2, window", "Cohere2", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    _decoder("GLM", "Glm", head_dim=8),
    _decoder("Nemotron", "Nemotron"),
    _decoder("GPT-NeoX", "GPTNeoX", num_key_value_heads=4),
    Row("GPT-2", "GPT2LMHeadModel", _GPT),
    Row("GPT-J", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    Row(
        "GPT-Neo", "GPTNeoForCausalLM",
        {**_DECODER, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    _decoder("OPT", "OPT", ffn_dim=48, word_embed_proj_dim=32, num_key_value_heads=4),
    Row("Falcon", "FalconForCausalLM", {**_DECODER, "new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    Row("Bloom", "BloomForCausalLM", _ALIBI),
    Row("MPT", "MptForCausalLM", {**_WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    _decoder("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _decoder("Qwen3-MoE", "Qwen3Moe", head_dim=8, decoder_sparse_step=1, **_EXPERTS),
    _decoder("Qwen2-MoE", "Qwen2Moe", decoder_sparse_step=1, shared_expert_intermediate_size=24, **_EXPERTS),
    _decoder("OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder("DeepSeek-V3", "DeepseekV3", **_LATENT),
    Row("Marian", "MarianMTModel", _PAIR),
    Row(
        "Marian, two vocabularies", "MarianMTModel",
        {**_PAIR, "decoder_vocab_size": 48, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ),
    Row("BART", "BartForConditionalGeneration", _PAIR),
    Row("mBART", "MBartForConditionalGeneration", _PAIR),
    Row("Pegasus", "PegasusForConditionalGeneration", _PAIR),
    Row("M2M-100", "M2M100ForConditionalGeneration", {**_PAIR, "decoder_start_token_id": 2}),
    Row("T5", "T5ForConditionalGeneration", _T5),
    Row("mT5", "MT5ForConditionalGeneration", _T5),
    Row(
        "Whisper", "WhisperForConditionalGeneration",
        {**_PAIR, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
    ),
    Row("BERT, classes", "BertForSequenceClassification", _ENCODER),
    Row("BERT, masked", "BertForMaskedLM", _ENCODER),
    Row("MiniLM, features", "BertModel", _ENCODER),
    Row("RoBERTa, questions", "RobertaForQuestionAnswering", {**_ENCODER, "num_labels": 2, "type_vocab_size": 1}),
    Row("XLM-R, tokens", "XLMRobertaForTokenClassification", {**_ENCODER, "type_vocab_size": 1}),
    Row(
        "DistilBERT, classes", "DistilBertForSequenceClassification",
        {**_WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64, "num_labels": 3},
    ),
    Row("ALBERT, classes", "AlbertForSequenceClassification", {**_ENCODER, "embedding_size": 16}),
    Row("ELECTRA, tokens", "ElectraForTokenClassification", {**_ENCODER, "embedding_size": 16}),
    Row(
        "DeBERTa v2, classes", "DebertaV2ForSequenceClassification",
        {
            **_ENCODER, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8,
        },
    ),
    Row("ModernBERT, masked", "ModernBertForMaskedLM", {**_ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2}),
    Row("MPNet, features", "MPNetModel", _ENCODER),
    _decoder("Qwen3, classes", "Qwen3", head_dim=16, num_labels=3),
    _decoder("Llama, classes", "Llama", num_labels=3),
)  # fmt: skip


def make_row(row: Row, folder: Path) -> Path:
    """Save the model of a row, with weights far from their initial ones, so that each affects the results."""
    import torch
    import transformers

    name = row.model.replace("ForCausalLM", "ForSequenceClassification") if row.name.endswith("classes") else row.model
    kind = getattr(transformers, name)
    torch.manual_seed(7)
    with torch.no_grad():
        model = kind(kind.config_class(**row.settings)).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for key, buffer in model.named_buffers():
            if key in model.state_dict() and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
