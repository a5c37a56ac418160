"""What a checkpoint's folder holds: the documented fields, the types that were asked for, and what lies beside the weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from slipway.model.safetensors_file import read_safetensors
from support.models.tensorrt_llm_models import VOCABULARY, Reader, logits_of, save_model, write_checkpoint

_TOKENS = list(range(3, 27))


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_the_configuration_has_the_documented_fields(tmp_path: Path) -> None:
    save_model("llama3", tmp_path / "model", dtype=torch.bfloat16)
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=2, pp=2)
    assert fields_of(folder) == {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32", "vocab_size": VOCABULARY,
        "max_position_embeddings": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_size": 16, "intermediate_size": 96, "norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_parallel_embedding": False,
        "embedding_sharding_dim": 0, "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}, "position_embedding_type": "rope_gpt_neox", "rotary_base": 10000.0,
        "rotary_scaling": {
            "type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "hidden_act": "silu", "attn_bias": False, "mlp_bias": False,
    }  # fmt: skip
    assert sorted(path.name for path in folder.glob("rank*")) == [f"rank{rank}.safetensors" for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2-window", {"qwen_type": "qwen2", "attn_bias": True, "runtime_defaults": {"max_attention_window": [128, 8]}}),
        ("qwen3", {"qwen_type": "qwen3", "attn_bias": False}),
        ("gemma2", {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 24.0,
            "runtime_defaults": {"max_attention_window": [8, 128, 8, 128]},
        }),
        ("gemma3", {"_sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "sliding_window": 8, "final_logit_softcapping": None}),
        ("phi3-long", {"position_embedding_type": "long_rope", "original_max_position_embeddings": 16, "hidden_act": "swiglu", "rotary_pct": 1.0}),
        ("gpt2", {"architecture": "GPT2LMHeadModel", "gpt_variant": "gpt2", "position_embedding_type": "learned_absolute", "bias": True}),
    ],
)  # fmt: skip
def test_each_graph_has_its_own_fields(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", dtype="float16")
    fields = fields_of(folder)
    assert {key: fields[key] for key in expected} == expected
    assert fields["dtype"] == "float16"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["auto", "float16", "bfloat16", "float32"])
def test_values_are_rounded_as_torch_rounds_them(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path / "model", dtype=stored)
    folder, ctx = write_checkpoint(tmp_path / "model", tmp_path / "work", dtype=wanted)
    expected = stored if wanted == "auto" else getattr(torch, wanted)
    found, source = load_file(folder / "rank0.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {expected}
    own = source["model.layers.1.mlp.down_proj.weight"].to(expected)
    assert torch.equal(found["transformer.layers.1.mlp.proj.weight"].view(torch.uint8), own.view(torch.uint8))
    assert ctx.facts["precision"] == str(expected).removeprefix("torch.")


def test_norms_of_gemma_have_their_one(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path / "model", dtype=torch.bfloat16)
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", dtype="bfloat16")
    found, source = load_file(folder / "rank0.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    for own, name in (("self_attn.q_norm", "attention.q_layernorm"), ("post_attention_layernorm", "post_layernorm")):
        expected = (source[f"model.layers.0.{own}.weight"].float() + 1).to(torch.bfloat16)
        assert torch.equal(found[f"transformer.layers.0.{name}.weight"], expected)


def test_more_ranks_than_heads_of_keys_repeat_them(tmp_path: Path) -> None:
    model = save_model("llama-one-kv", tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=4)
    ranks = [load_file(folder / f"rank{rank}.safetensors") for rank in range(4)]
    rows = [rank["transformer.layers.0.attention.qkv.weight"] for rank in ranks]
    assert all(torch.equal(each[16:], rows[0][16:]) for each in rows)  # keys and values
    assert not torch.equal(rows[0][:16], rows[1][:16])
    assert (Reader(folder).logits(_TOKENS) - logits_of(model, _TOKENS)).abs().max() < 1e-5


def test_the_folder_is_complete_on_its_own(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(tmp_path / "model")
    folder, ctx = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    described = json.loads((folder / "tensorrt_llm.json").read_text())
    for name, facts in described["files"].items():
        data = (folder / name).read_bytes()
        assert facts == {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_bytes": len(data),
            "tensors": len(read_safetensors(folder / name).tensors),
        }
        assert ctx.digests[folder / name] == f"sha256:{facts['sha256']}"
    assert described["tensors_compared"] == 2 * 17
    assert described["model_tensors_found"] == 2 * 9 + 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3", ["no sliding window: engines take it from runtime_defaults", ""]),
        ("mistral-window", ["no sliding window: engines take it from runtime_defaults", ""]),
        ("mistral", []),
    ],
)
def test_what_the_runtime_must_be_given_is_said(name: str, said: list[str], tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    _, ctx = write_checkpoint(tmp_path / "model", tmp_path / "work")
    warnings = ctx.facts.get("warnings", [])
    assert len(warnings) == min(len(said), 1)
    assert all(part in warning for part, warning in zip(said, warnings, strict=False))


def test_another_epsilon_of_the_runtime_is_said(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-6}))
    _, ctx = write_checkpoint(tmp_path / "model", tmp_path / "work")
    [warning] = ctx.facts["warnings"]
    assert "with an epsilon of 1e-05, whatever the checkpoint says; the model's is 1e-06" in warning


def test_the_first_checkpoints_of_gpt2_leave_the_beginning_of_names_out(tmp_path: Path) -> None:
    model = save_model("gpt2", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file, metadata={"format": "pt"})
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=2)
    assert (Reader(folder).logits(_TOKENS) - logits_of(model, _TOKENS)).abs().max() < 1e-5


def test_a_head_of_its_own_counts_before_a_tied_embedding(tmp_path: Path) -> None:
    save_model("llama3", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work")
    assert torch.equal(load_file(folder / "rank0.safetensors")["lm_head.weight"], head)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, head)  # as transformers does
