"""Folders of the levels load with plain transformers, compute with rounded activations, and are refused where they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams, reads_deferred, refusal_reason
from support.models.family_models import CASES, given_by, make_family_model
from support.models.quantize_models import prompt, save_tiny, torch_logits

Quantize = Callable[..., tuple[Path, Context]]
ACTIVATIONS = ["fp8", "w8a8"]
REFUSED = (("gpt2", "fp8"), ("t5", "fp8"), ("bert-features", "w8a8"))
"""What is unpacked while it loads has no rounded activations."""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("nvfp4", torch.bfloat16),
        pytest.param("mxfp4", torch.float32, marks=slow),
        pytest.param("mxfp4", torch.bfloat16, marks=slow),
        pytest.param("int3", torch.float16, marks=slow),
    ],
)
def test_weights_compute_what_their_dense_values_do(
    quantize: Quantize, tmp_path: Path, level: str, dtype: torch.dtype
) -> None:
    source = save_tiny(tmp_path / "source", dtype=dtype)
    packed, ctx = quantize(source, format="pytorch", level=level)
    dense, _ = quantize(source, format="pytorch", level=level, packed=False, check=False)
    assert ctx.facts["check"] == "passed"
    found = torch_logits(packed, prompt())
    assert (found == torch_logits(dense, prompt())).all()
    assert (found != torch_logits(source, prompt())).any()


@pytest.mark.parametrize("level", ["fp8", pytest.param("w8a8", marks=slow)])
def test_activations_are_rounded_too(quantize: Quantize, tiny: Path, level: str) -> None:
    folder, ctx = quantize(tiny, format="pytorch", level=level)
    assert ctx.facts["check"] == "passed"
    stored, model = load_file(folder / "model.safetensors"), tf.AutoModelForCausalLM.from_pretrained(tiny)
    own = model.state_dict()
    for name, scale in stored.items():
        if name.endswith(".weight_scale"):
            weight = name.removesuffix("_scale")
            own[weight].copy_(stored[weight].float() * scale)
    model.tie_weights()
    with torch.no_grad():
        weights_alone = model(torch.from_numpy(prompt())).logits
    found, exact = torch.from_numpy(torch_logits(folder, prompt())), torch.from_numpy(torch_logits(tiny, prompt()))
    assert 1e-4 < (found - weights_alone).abs().max() / exact.std() < 0.5
    assert (found - exact).abs().max() / exact.std() < 0.5


@pytest.mark.parametrize("level", ["nvfp4", pytest.param("w8a8", marks=slow), pytest.param("int3", marks=slow)])
def test_pieces_and_threads_change_nothing(quantize: Quantize, tiny: Path, level: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("checkpoints.compressed", "forms.choice"):
            patch.setattr(f"slipway_quantize.{module}.PIECE_WEIGHTS", 1 << 9)
        pieces, _ = quantize(tiny, threads=2, format="pytorch", level=level, check=False)
    whole, _ = quantize(tiny, format="pytorch", level=level, check=False)  # and torch has one thread again
    names = ("model.safetensors", "config.json")
    assert all((whole / name).read_bytes() == (pieces / name).read_bytes() for name in names)


def given(kind: str, folder: Path) -> torch.Tensor:
    model, loading = type(CASES[kind].model()).from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return given_by(model, kind)


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("bert-classes", "fp8"),
        ("marian-two-vocabularies", "int4"),
        *(
            pytest.param(kind, level, marks=slow)
            for kind, level in (
                ("bert-masked", "nvfp4"),
                ("bart-classes", "mxfp4"),
                ("distilbert-classes", "int3"),
                ("qwen3-classes", "int4"),
                ("bart-decoder", "w8a8"),
                # Unpacked while it loads: each level of weights, and what forces it.
                ("gpt2", "nvfp4"),
                ("gpt2", "int3"),
                ("t5", "mxfp4"),
                ("whisper", "nvfp4"),
                ("bert-features", "int3"),
                *REFUSED,
            )
        ),
    ],
)
def test_every_family_loads_or_is_refused(quantize: Quantize, tmp_path: Path, kind: str, level: str) -> None:
    source = make_family_model(kind, tmp_path / "source")
    # Some weights have more bits than others, as they have by default.
    params = {"format": "pytorch", "level": level, "group_size": 16, "wide_share": 0.22}
    why = refusal_reason(QuantizeParams(**params), ModelConfig.read(source))
    assert bool(why) == ((kind, level) in REFUSED), why
    if why:
        with pytest.raises(QuantizationError) as caught:
            quantize(source, **params)
        assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
        return
    folder, ctx = quantize(source, **params)
    assert ctx.facts["check"] == "passed"
    assert (given(kind, folder) - given(kind, source)).abs().max() > 0


@pytest.mark.parametrize("kind", ["t5", "gpt2", "whisper", "bert-features"])
def test_a_plan_says_what_cannot_round_activations(tmp_path: Path, kind: str) -> None:
    config = ModelConfig.read(make_family_model(kind, tmp_path / "source"))
    for level in (*ACTIVATIONS, "fp8_static"):
        assert "rounds activations" in refusal_reason(QuantizeParams(format="pytorch", level=level), config)
    assert not refusal_reason(QuantizeParams(format="pytorch", level="nvfp4"), config)


def test_dense_weights_have_no_activations(quantize: Quantize, tiny: Path) -> None:
    params = {"format": "pytorch", "level": "fp8", "packed": False}
    assert "compress_weights" in refusal_reason(QuantizeParams(**params), ModelConfig.read(tiny))
    with pytest.raises(QuantizationError, match="dense weights"):
        quantize(tiny, **params)


@pytest.mark.parametrize(("level", "instead"), [("nvfp4", "int8"), ("bf16", "fp16")])
def test_a_level_that_graphs_lack_is_refused(quantize: Quantize, tiny: Path, level: str, instead: str) -> None:
    with pytest.raises(QuantizationError, match=f"{level} is not made for ONNX") as caught:
        quantize(tiny, format="onnx", level=level)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert instead in caught.value.remedy


@pytest.mark.parametrize("kind", ["marian-two-vocabularies", "gpt2", "qwen3-classes"])
def test_a_model_that_is_unpacked_while_it_loads_has_weights_of_one_width(
    quantize: Quantize, tmp_path: Path, kind: str
) -> None:
    """transformers unpacks every weight of it by the first scheme: where others are wide, these keep their type; a size cannot be met so."""
    source = make_family_model(kind, tmp_path / "source")
    given = {"format": "pytorch", "level": "int4", "group_size": 16}
    made, _ = quantize(source, wide_share=0.5, check=False, **given)
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    widths = {group["weights"]["num_bits"] for group in config["config_groups"].values()}
    assert widths == ({4, 8} if kind == "qwen3-classes" else {4})
    assert ("lm_head" in config["ignore"]) == (kind != "qwen3-classes")
    sized = given | {"size_budget_share": 0.4}
    assert bool(refusal_reason(QuantizeParams(**sized), ModelConfig.read(source))) == (kind != "qwen3-classes"), (
        "said before anything runs"
    )
    assert not refusal_reason(QuantizeParams(**given), ModelConfig.read(source))
    if kind != "qwen3-classes":
        with pytest.raises(QuantizationError, match="unpacks all weights") as caught:
            quantize(source, size_budget_share=0.4, **given)
        assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
        assert "ONNX" in caught.value.remedy


def test_kept_layers_are_ignored_by_the_library(quantize: Quantize, tiny: Path) -> None:
    folder, _ = quantize(tiny, format="pytorch", level="fp8", keep=("down_proj",), head_bits=4, check=False)
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_only_levels_that_run_the_model_need_its_weights_stored() -> None:
    assert reads_deferred(QuantizeParams(format="pytorch", level="nvfp4")) == ("model",)
    assert reads_deferred(QuantizeParams(format="pytorch", level="fp8_static")) == ()
