"""Adapters with one LoRA per expert, as transformers 4 saved them, are whole in the reference: every factor counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.model.folder import ModelFolder
from slipway.proof.runtime import Unusable
from slipway_merge.verify.reload_check import reload_check
from slipway_validate.runner.runtime_reference import add_adapter, load
from slipway_validate.runner.survival.adapted import adapted_modules

SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "a shared expert": lambda: tf.Qwen2MoeConfig(**SMALL, num_experts=4, shared_expert_intermediate_size=8),
    "a dense first layer": lambda: tf.Glm4MoeConfig(**SMALL, **_ROUTED, head_dim=8),
    "deepseek": lambda: tf.DeepseekV3Config(
        **SMALL, **_ROUTED, q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8
    ),
    "qwen3 next": lambda: tf.Qwen3NextConfig(
        **SMALL,
        num_experts=4,
        shared_expert_intermediate_size=8,
        head_dim=8,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4),
}
EVERY = ("gate_proj", "up_proj", "down_proj", "q_proj", "w1", "w2", "w3")


class Mixture:
    """A base, an adapter with factors on layers by their stored names, and the weights that both make."""

    def __init__(self, folder: Path, kind: str, trains: Callable[[str], bool], **settings: Any) -> None:
        torch.manual_seed(0)
        self.base, self.adapter, self.merged = folder / "base", folder / "adapter", folder / "merged"
        model = tf.AutoModelForCausalLM.from_config(MODELS[kind]())
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(self.base)
        weights = load_file(self.base / "model.safetensors")
        self.factors: dict[str, torch.Tensor] = {}
        self.modules = [name.removesuffix(".weight") for name in weights if weights[name].dim() == 2 and trains(name)]
        for module in self.modules:
            weight = weights[f"{module}.weight"]
            rank = settings.get("rank_pattern", {}).get(module.rpartition(".")[2], 2)
            a, b = torch.randn(rank, weight.shape[1]), torch.randn(weight.shape[0], rank)
            self.factors |= {
                f"base_model.model.{module}.lora_{side}.weight": half for side, half in (("A", a), ("B", b))
            }
            weights[f"{module}.weight"] = weight + 0.1 / rank**0.5 * b @ a
        self.merged.mkdir()
        (self.merged / "config.json").write_bytes((self.base / "config.json").read_bytes())
        save_file(weights, self.merged / "model.safetensors", metadata={"format": "pt"})
        self.adapter.mkdir()
        leaves = sorted({module.rpartition(".")[2] for module in self.modules})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 0.1, "use_rslora": True}
        config |= {"target_modules": leaves, "base_model_name_or_path": "base", **settings}
        (self.adapter / "adapter_config.json").write_text(json.dumps(config))
        self.save()

    def save(self, more: Mapping[str, torch.Tensor] | None = None) -> None:
        save_file(
            {**self.factors, **(more or {})}, self.adapter / "adapter_model.safetensors", metadata={"format": "pt"}
        )


def _logits(module: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = module(torch.arange(1, 13)[None]).logits.numpy()
    return found


def _loaded(folder: Path) -> np.ndarray:
    return _logits(tf.AutoModelForCausalLM.from_pretrained(folder).eval())


def _named(*leaves: str) -> Callable[[str], bool]:
    return lambda name: name.removesuffix(".weight").rpartition(".")[2] in leaves


CASES: dict[str, tuple[str, Callable[[str], bool], dict[str, Any]]] = {
    "everything beside a shared expert": ("a shared expert", _named(*EVERY), {}),
    "everything beside a dense layer": ("a dense first layer", _named(*EVERY), {}),
    "deepseek": ("deepseek", _named(*EVERY), {}),
    "qwen3 next": ("qwen3 next", _named(*EVERY), {}),
    "another rank of the experts' last layer": ("a shared expert", _named(*EVERY), {"rank_pattern": {"down_proj": 3}}),
    "one expert's one layer": ("mixtral", lambda name: name.endswith("0.block_sparse_moe.experts.1.w1.weight"), {}),
    "the router too": ("a shared expert", _named(*EVERY, "gate"), {}),
    "all linear": ("a dense first layer", _named(*EVERY), {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_factor_is_in_the_reference(tmp_path: Path, case: str) -> None:
    kind, trains, settings = CASES[case]
    mixture = Mixture(tmp_path, kind, trains, **settings)
    model = load(mixture.base, mixture.adapter, threads=1)
    expected = _loaded(mixture.merged)
    assert np.abs(_logits(model.module) - expected).max() < 2e-5 * np.abs(expected).max()
    with model.without_adapter():
        assert np.abs(_logits(model.module) - _loaded(mixture.base)).max() < 1e-5
    assert np.abs(expected - _loaded(mixture.base)).max() > 1e-2


def test_a_factor_without_a_place_makes_no_reference(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path, "a shared expert", _named(*EVERY))
    lost = {
        f"base_model.model.model.layers.1.mlp.experts.7.up_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"
    }
    mixture.save(lost)
    with pytest.raises(Unusable, match=r"experts\.7\.up_proj"):
        load(mixture.base, mixture.adapter, threads=1)


def test_modules_that_are_joined_are_left_out_by_name(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path, "a shared expert", _named(*EVERY))
    found, left_out = adapted_modules(ModelFolder.open(mixture.base), mixture.adapter)
    assert sorted([*(each.name for each in found), *left_out]) == sorted(mixture.modules)
    assert all(".mlp.experts." in name and "joins" in why for name, why in left_out.items())


def test_a_stack_whose_factors_do_not_fit_is_named(tmp_path: Path) -> None:
    mixture = Mixture(tmp_path, "mixtral", _named("w1"))
    first = next(iter(mixture.factors))
    mixture.factors[first] = mixture.factors[first][:, :-1].contiguous()
    mixture.save()
    with pytest.raises(Unusable, match="do not fit its weight"):
        add_adapter(
            tf.AutoModelForCausalLM.from_pretrained(mixture.base), ModelFolder.open(mixture.base), mixture.adapter
        )


class _Work:
    def __init__(self, folder: Path) -> None:
        self.workdir, self.warnings = folder, list[str]()

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def test_the_merge_is_verified_with_every_factor(tmp_path: Path) -> None:
    mixture, ctx = Mixture(tmp_path, "a dense first layer", _named(*EVERY)), _Work(tmp_path)
    found = reload_check(
        ModelFolder.open(mixture.merged), ModelFolder.open(mixture.base), mixture.adapter,
        names=lambda: {name: name for name in mixture.factors}, dtype="F32", rounded=None, ctx=ctx,  # type: ignore[arg-type]
    )  # fmt: skip
    assert found["logits_difference"] <= found["logits_tolerance"] < found["logits_change"]
    assert not ctx.warnings
