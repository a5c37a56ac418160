"""A merge that changes nothing is refused, and a module whose change rounding removes is named."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from support.models.merge_refusals import Q0, edit_config, edit_weights, refused


def test_untrained_adapter(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in t.items()})
    refused(case, "ADAPTER_NO_EFFECT", "zero")
    assert not (case.workdir / "pytorch").exists()


def test_untrained_adapter_with_unchanged_saved_module(make_case):
    case = make_case("qwen3", target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = load_file(case.base / "model.safetensors")["lm_head.weight"]
    edit_weights(
        case.adapter,
        lambda t: {
            k: torch.zeros_like(v) if "lora_B" in k else head.clone() if "lm_head" in k else v for k, v in t.items()
        },
    )
    refused(case, "ADAPTER_NO_EFFECT")


def test_a_saved_module_with_the_bases_values_alone(make_case):
    """There is no update to speak of, so none is called zero."""
    case = make_case("qwen3", target_modules=["q_proj"], modules_to_save=["lm_head"])
    edit_config(case, target_modules=[])
    head = load_file(case.base / "model.safetensors")["lm_head.weight"]
    edit_weights(case.adapter, lambda t: {key: head.clone() for key in t if "lm_head" in key})
    error = refused(case, "ADAPTER_NO_EFFECT", "the weights that it replaces (1) have")
    assert "updates" not in error.message


def test_untrained_adapter_with_a_copy_of_the_tied_weight(make_case):
    """A head of its own would be written, with the values it shares in the base."""
    case = make_case("qwen3-tied", target_modules=["embed_tokens"], modules_to_save=["lm_head"])
    shared = load_file(case.base / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(
        case.adapter,
        lambda t: {
            k: torch.zeros_like(v) if "lora_embedding_B" in k else shared.clone() if "lm_head" in k else v
            for k, v in t.items()
        },
    )
    refused(case, "ADAPTER_NO_EFFECT", "zero")


def test_untrained_adapter_with_copies_of_repeated_layers(make_case):
    case = make_case(
        "llama", target_modules=["q_proj"], modules_to_save=["input_layernorm"], layer_replication=[[0, 2], [0, 1]]
    )
    base = load_file(case.base / "model.safetensors")

    def untrained(tensors):
        norms = {
            key: base[f"model.layers.{layer % 2}.input_layernorm.weight"].clone()
            for layer in range(3)
            for key in tensors
            if f".layers.{layer}.input_layernorm" in key
        }
        assert len(norms) == 3
        return {k: torch.zeros_like(v) if "lora_B" in k else norms.get(k, v) for k, v in tensors.items()}

    edit_weights(case.adapter, untrained)
    refused(case, "ADAPTER_NO_EFFECT", "zero")


def away_from_zero(tensors):
    """Weights near zero have finer steps, where even a tiny update shows."""
    return {key: torch.where(t.abs() < 0.02, torch.full_like(t, 0.02), t) for key, t in tensors.items()}


def test_update_lost_in_rounding(make_case):
    """In bfloat16 a change of one part in a million changes nothing; in float32 it does."""
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj"])
    edit_weights(case.base, away_from_zero, "model.safetensors")
    edit_weights(case.adapter, lambda t: {key: value * (1e-5 if "lora_B" in key else 1) for key, value in t.items()})
    refused(case, "ADAPTER_NO_EFFECT", "rounding", "float32")
    case.workdir = case.workdir / "again"
    case.workdir.mkdir()
    _, ctx = case.merge(dtype="float32")
    assert ctx.facts["unchanged_share"] < 0.1


def test_module_lost_in_rounding_is_named(make_case):
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj"])
    edit_weights(case.base, away_from_zero, "model.safetensors")
    edit_weights(case.adapter, lambda t: {k: v * 1e-5 if f"{Q0}.lora_B" in k else v for k, v in t.items()})
    _, ctx = case.merge()
    assert any("layers.0.self_attn.q_proj" in warning for warning in ctx.facts["warnings"])
    shares = {module["module"]: module["unchanged_share"] for module in ctx.facts["modules"]}
    assert shares["model.layers.0.self_attn.q_proj"] == 1.0
    assert shares["model.layers.1.self_attn.q_proj"] < 0.5
