"""Every adapter form for which the merge is compared with peft: name → model and configuration.

Run as a program it prints the table of docs/merging.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch

from support.models.merge_cases import Case
from support.models.merge_models import make_family

#: Options of LoRA that are configurations themselves, and their classes.
_CONFIGS = {"kasa_config": "KasaConfig", "monteclora_config": "MontecloraConfig", "velora_config": "VeloraConfig",
            "use_bdlora": "BdLoraConfig"}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One form. ``alone``: peft's own merge of it is wrong or missing, so that the unmerged model is the reference."""

    model: str
    config: str
    options: dict[str, Any]
    alone: bool = False

    def build(self) -> peft.PeftConfig:
        """Return the configuration as peft's object; peft changes its arguments, so it gets a copy."""
        options = copy.deepcopy(self.options)
        for name, cls in _CONFIGS.items():
            if name in options:
                options[name] = getattr(peft.tuners.lora.config, cls)(**options[name])
        return getattr(peft, self.config)(**options)


def lora(model: str, *targets: str, alone: bool = False, **options: Any) -> Form:
    return Form(model, "LoraConfig", {"r": 4, "lora_alpha": 10, "target_modules": list(targets), **options}, alone)


def form(model: str, config: str, *targets: str, **options: Any) -> Form:
    return Form(model, config, {"target_modules": list(targets), **options})


FORMS: dict[str, Form] = {
    # Sums of low-rank products, streamed by rows
    "lora": lora("qwen3", "q_proj", "up_proj"),
    "lora on every architecture: mistral": lora("mistral", "q_proj", "down_proj"),
    "lora on every architecture: gemma": lora("gemma", "o_proj", "gate_proj"),
    "lora on every architecture: phi3": lora("phi3", "qkv_proj", "gate_up_proj"),
    "lora on every architecture: bert": lora("bert", "query", "dense"),
    "lora on every architecture: t5": lora("t5", "q", "wi"),
    "lora on every architecture: marian": lora("marian", "q_proj", "fc1"),
    "lora on every architecture: whisper": lora("whisper", "q_proj", "fc2"),
    "lora on every architecture: vit (renamed)": lora("vit", "q_proj", "projection"),
    "lora on every architecture: qwen3-moe": lora("qwen3-moe", "q_proj", "o_proj"),
    "rslora": lora("llama", "q_proj", use_rslora=True),
    "rank and alpha patterns": lora(
        "qwen3", "q_proj", "up_proj", rank_pattern={"up_proj": 6}, alpha_pattern={"layers.0.*": 3}
    ),
    "lora on Conv1D": lora("gpt2", "c_attn", "mlp.c_proj", fan_in_fan_out=True),
    "lora on an embedding": lora("qwen3", "q_proj", "embed_tokens"),
    "lora on the output head": lora("qwen3", "q_proj", "lm_head"),
    "modules_to_save": lora("qwen3", "q_proj", modules_to_save=["lm_head"]),
    "bias=all": lora("bert", "query", bias="all"),
    "bias=lora_only": lora("bert", "query", bias="lora_only"),
    # Tied weights: the same change to both, which keeps the tie
    "lora on a tied embedding, ensure_weight_tying": lora(
        "qwen3-tied", "q_proj", "embed_tokens", alone=True, ensure_weight_tying=True, use_rslora=True
    ),
    "lora on a tied output head, ensure_weight_tying": lora(
        "qwen3-tied", "q_proj", "lm_head", alone=True, ensure_weight_tying=True
    ),
    "modules_to_save, ensure_weight_tying": lora(
        "qwen3-tied", "q_proj", modules_to_save=["lm_head"], ensure_weight_tying=True
    ),
    # Whole weights, computed here
    "trainable_token_indices": lora("qwen3", "q_proj", trainable_token_indices=[1, 5, 7]),
    "trainable_token_indices, tied": lora("qwen3-tied", "q_proj", trainable_token_indices=[1, 5, 7]),
    "trainable_token_indices by module": lora(
        "qwen3", "q_proj", trainable_token_indices={"embed_tokens": [3], "lm_head": [4, 6]}
    ),
    "trainable tokens alone": form("qwen3-tied", "TrainableTokensConfig", "embed_tokens", token_indices=[2, 9]),
    "target_parameters": lora(
        "qwen3-moe", "q_proj", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "target_parameters, rslora": lora(
        "qwen3-moe", target_parameters=["experts.down_proj"], use_rslora=True, rank_pattern={"experts.down_proj": 2}
    ),
    # peft makes target_parameters of the names that a model had before transformers stacked its experts
    "experts by their modules' names": lora("qwen3-moe", "q_proj", "gate_proj", "up_proj", "down_proj"),
    "experts stored under other names": lora("mixtral", "q_proj", "w1", "w2", "w3", use_rslora=True),
    "all-linear, with experts and routers": Form(
        "mixtral", "LoraConfig", {"r": 4, "lora_alpha": 10, "target_modules": "all-linear"}
    ),
    "layer_replication": lora("llama", "q_proj", alone=True, layer_replication=[[0, 2], [1, 2]]),
    # Through peft, module by module
    "lora on Conv2d": lora("resnet", "convolution", use_rslora=True, rank_pattern={"layer.0.convolution": 2}),
    "lora on Conv1d": lora("wav2vec2", "conv_layers.1.conv", "q_proj"),
    "lora on Conv3d": lora("videomae", "projection", rank_pattern={"projection": 3}),
    "lora on Conv3d, rslora and bias": lora("videomae", "projection", "query", use_rslora=True, bias="all"),
    "lora_bias": lora("bert", "query", "dense", lora_bias=True),
    "lora_bias and bias=all": lora("bert", "query", lora_bias=True, bias="all"),
    "dora": lora("qwen3", "q_proj", "up_proj", use_dora=True, rank_pattern={"up_proj": 6}),
    "dora on an embedding": lora("qwen3", "q_proj", "embed_tokens", use_dora=True),
    "dora on Conv1D": lora("gpt2", "c_attn", use_dora=True, fan_in_fan_out=True),
    "dora on Conv2d": lora("resnet", "convolution", use_dora=True),
    "dora on Conv3d": lora("videomae", "projection", use_dora=True),
    "dora on t5": lora("t5", "q", "wi", use_dora=True, use_rslora=True),
    "dora on qwen3-moe": lora("qwen3-moe", "q_proj", use_dora=True),
    "pissa": lora("llama", "q_proj", init_lora_weights="pissa"),
    "olora": lora("llama", "q_proj", init_lora_weights="olora"),
    "olora, as its paper writes it": lora("llama", "q_proj", init_lora_weights="OLoRA"),
    "mica": lora("llama", "q_proj", init_lora_weights="mica"),
    "kasa": lora("llama", "q_proj", kasa_config={}),
    "monteclora": lora("llama", "q_proj", monteclora_config={}),
    "velora": lora("llama", "q_proj", "down_proj", velora_config={}),
    "bd-lora": lora(
        "llama",
        "q_proj",
        "down_proj",
        use_bdlora={"nblocks": 2, "target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["down_proj"]},
    ),
    "adalora": form("llama", "AdaLoraConfig", "q_proj", init_r=6, lora_alpha=10, total_step=10),
    "boft": form("llama", "BOFTConfig", "q_proj", boft_block_size=4),
    "boft, bias=boft_only": form("bert", "BOFTConfig", "query", boft_block_size=4, bias="boft_only"),
    "boft on Conv2d": form("resnet", "BOFTConfig", "layer.0.convolution", boft_block_size=4),
    "beft": form("bert", "BeftConfig", "query"),
    "c3a": form("llama", "C3AConfig", "q_proj", block_size=8),
    "deft": form("llama", "DeftConfig", "q_proj", "up_proj"),
    "delora": form("llama", "DeloraConfig", "q_proj", "up_proj"),
    "fourierft": form("llama", "FourierFTConfig", "q_proj", n_frequency=50),
    "fourierft on Conv1D": form("gpt2", "FourierFTConfig", "c_attn", n_frequency=50, fan_in_fan_out=True),
    "frod": form("llama", "FrodConfig", "q_proj", "up_proj"),
    "glora": form("llama", "GloraConfig", "q_proj"),
    "gralora": form("llama", "GraloraConfig", "q_proj", "up_proj"),
    "hira": form("llama", "HiraConfig", "q_proj", "embed_tokens", r=4),
    "hra": form("llama", "HRAConfig", "q_proj", r=4),
    "hra on Conv2d": form("resnet", "HRAConfig", "convolution", r=4, apply_GS=True),
    "ia3": form("llama", "IA3Config", "k_proj", "down_proj", feedforward_modules=["down_proj"]),
    "ia3 with biases": form("bert", "IA3Config", "query", "output.dense", feedforward_modules=["output.dense"]),
    "ia3 on Conv2d": form("resnet", "IA3Config", "convolution", feedforward_modules=[]),
    "ia3 on Conv1D": form("gpt2", "IA3Config", "c_attn", "mlp.c_proj", feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True),
    "ln_tuning": form("llama", "LNTuningConfig", "input_layernorm", "norm"),
    "loha": form("phi3", "LoHaConfig", "qkv_proj", r=4, alpha=10),
    "loha with modules_to_save": form("qwen3", "LoHaConfig", "q_proj", r=4, alpha=10, modules_to_save=["lm_head"]),
    "loha on Conv2d": form("resnet", "LoHaConfig", "convolution", r=4, alpha=10, use_effective_conv2d=True),
    "lokr": form("llama", "LoKrConfig", "q_proj", r=2, alpha=10, decompose_both=True, decompose_factor=4),
    "lokr on Conv2d": form("resnet", "LoKrConfig", "convolution", r=4, alpha=10, use_effective_conv2d=True),
    "miss": form("llama", "MissConfig", "q_proj", r=8),
    "miss, bat": form("llama", "MissConfig", "q_proj", r=8, init_weights="bat"),
    "miss, mini": form("llama", "MissConfig", "q_proj", r=8, mini_r=4, init_weights="mini"),
    "oft": form("llama", "OFTConfig", "q_proj", r=0, oft_block_size=8, block_share=True),
    "oft, constrained": form("llama", "OFTConfig", "q_proj", r=0, oft_block_size=8, coft=True, eps=0.01),
    "osf": form("llama", "OSFConfig", "q_proj"),
    "peanut": form("llama", "PeanutConfig", "q_proj", scaling=1.5),
    "psoft": form("llama", "PsoftConfig", "q_proj", psoft_alpha=20),
    "pvera": form("llama", "PveraConfig", "q_proj", "up_proj", r=8),
    "randlora": form("llama", "RandLoraConfig", "q_proj", "down_proj", r=4),
    "randlora, projections not saved": form("llama", "RandLoraConfig", "q_proj", "down_proj", r=4, save_projection=False),
    "road": form("llama", "RoadConfig", "q_proj", group_size=8),
    "shira": form("llama", "ShiraConfig", "q_proj", r=4),
    "supertuning": form("llama", "SupertuningConfig", "q_proj"),
    "tinylora": form("llama", "TinyLoraConfig", "q_proj", "up_proj"),
    "unilora": form("llama", "UniLoraConfig", "q_proj", "up_proj"),
    "vblora": form("llama", "VBLoRAConfig", "q_proj", "up_proj", vector_length=8, num_vectors=16),
    "vera": form("llama", "VeraConfig", "q_proj", "down_proj", r=8),
    "vera, projections not saved": form(
        "gpt2", "VeraConfig", "c_attn", "mlp.c_fc", r=8, save_projection=False, fan_in_fan_out=True
    ),
    "waveft": form("llama", "WaveFTConfig", "q_proj", n_frequency=100),
}  # fmt: skip


def save_form(folder: Path, form: Form, dtype: torch.dtype) -> tuple[Case, type[Any]]:
    """Make a base, and an adapter of this form whose trained values all differ from their initial values."""
    case = Case(folder / "base", folder / "adapter", folder / "work")
    model = make_family(form.model, dtype)
    model.save_pretrained(case.base)
    tuned = peft.get_peft_model(type(model).from_pretrained(case.base), form.build())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(tuned.named_parameters()):
            if parameter.requires_grad:
                parameter.add_((0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
    tuned.save_pretrained(case.adapter)
    case.workdir.mkdir()
    return case, type(model)


def table() -> str:
    """Return the forms as a Markdown table, in the order above."""
    rows = ["| form | model of the test | peft configuration of the test |", "|---|---|---|"]
    for name, entry in FORMS.items():
        options = ", ".join(f"{key}={value!r}" for key, value in entry.options.items())
        rows.append(f"| {name} | {entry.model} | `{entry.config}({options})` |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
