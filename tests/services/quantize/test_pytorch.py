"""PyTorch levels: loaded by transformers with no further settings, and equal to the dequantized model."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from slipway.errors import ModelExportError, StageError
from slipway.stage import Context
from support.models.quantize_models import prompt, save_tiny, torch_logits
from support.models.tiny_models import describe_a_layer_more, make_base

Quantize = Callable[..., tuple[Path, Context]]


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_model_computes_exactly_what_its_dequantized_weights_do(
    quantize: Quantize, tmp_path: Path, level: str, dtype: torch.dtype, tied: bool
) -> None:
    source = save_tiny(tmp_path / "source", dtype=dtype, tied=tied)
    packed, ctx = quantize(source, format="pytorch", head_bits=4, level=level)
    dense, _ = quantize(source, format="pytorch", head_bits=4, level=level, packed=False)
    tokens = prompt()
    assert (torch_logits(packed, tokens) == torch_logits(dense, tokens)).all()
    assert (torch_logits(packed, tokens) != torch_logits(source, tokens)).any()
    assert ctx.facts["check"] == "passed"
    assert ctx.facts["lm_head_untied"] is tied


def test_config_is_that_of_compressed_tensors(quantize: Quantize, tiny: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    packed, _ = quantize(tiny, format="pytorch", head_bits=4, level="int4", group_size=64)
    config = json.loads((packed / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    weights = parsed.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, 64, True)
    assert parsed.quantization_status == "compressed"


def test_lm_head_is_quantized_and_sizes_are_those_of_the_files(quantize: Quantize, tiny: Path) -> None:
    packed, ctx = quantize(tiny, format="pytorch", head_bits=4, level="int4")
    report = json.loads((packed / "quantization.json").read_text())
    assert "lm_head.weight" in report["tensors"]["quantized"]
    assert report["tensors"]["kept"]["model.embed_tokens.weight"] == "not the weight of a linear layer"
    assert report["size_before_bytes"] == (tiny / "model.safetensors").stat().st_size
    assert report["size_after_bytes"] == (packed / "model.safetensors").stat().st_size
    assert ctx.facts["reduction"] == round(1 - report["size_after_bytes"] / report["size_before_bytes"], 4)
    with safe_open(packed / "model.safetensors", "pt") as file:
        assert list(file.get_slice("lm_head.weight_packed").get_shape()) == [512, 64 * 4 // 32]


@pytest.mark.parametrize(("level", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_levels_are_plain_casts(quantize: Quantize, tiny: Path, level: str, dtype: torch.dtype) -> None:
    half, ctx = quantize(tiny, format="pytorch", level=level)
    before, after = load_file(tiny / "model.safetensors"), load_file(half / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].to(dtype)) for name in before)
    assert json.loads((half / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert 0.49 < ctx.facts["reduction"] < 0.51


def test_level_that_saves_nothing_says_so(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", dtype=torch.bfloat16)
    _, ctx = quantize(source, format="pytorch", level="bf16")
    assert "already in bf16" in ctx.facts["warnings"][0]


def test_sharded_input_and_output_are_the_same_model(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", vocab_size=16384, tied=False)  # 4 MiB each of embedding and lm_head
    shards = tmp_path / "shards"
    shutil.copytree(source, shards)
    tensors = load_file(source / "model.safetensors")
    (shards / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {}}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, shards / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(names, file)
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, _ = quantize(source, format="pytorch", level="int8")
    parts, _ = quantize(shards, format="pytorch", level="int8", max_shard_bytes=1 << 20)
    assert (torch_logits(parts, prompt()) == torch_logits(whole, prompt())).all()
    written = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(set(written["weight_map"].values()))
    assert len(files) > 1
    assert all(re.fullmatch(rf"model-0000\d-of-0000{len(files)}\.safetensors", file) for file in files)
    assert {p.name for p in parts.glob("*.safetensors")} == set(files)
    by_module = {name.rpartition(".")[0]: file for name, file in written["weight_map"].items() if "packed" in name}
    assert all(written["weight_map"][f"{module}.weight_scale"] == file for module, file in by_module.items())


def test_unaligned_layers_keep_their_precision_and_are_named(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", intermediate_size=80)  # down_proj reads 80 = 2.5 groups
    packed, ctx = quantize(source, format="pytorch", head_bits=4, level="int4")
    assert "model.layers.0.mlp.down_proj" in ctx.facts["warnings"][0]
    assert "group size 32" in ctx.facts["warnings"][0]
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    dense, _ = quantize(source, format="pytorch", head_bits=4, level="int4", packed=False)
    assert (torch_logits(packed, prompt()) == torch_logits(dense, prompt())).all()


def test_other_files_travel_unchanged(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for path in source.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    packed, _ = quantize(source, format="pytorch", level="int4")
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "additional_chat_templates/tools.jinja",
    ):
        assert (packed / name).read_bytes() == (source / name).read_bytes()


def change_weight(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: value.clone() for name, value in load_file(source / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("level", ["fp16", "int4"])
def test_nan_is_refused_by_name(quantize: Quantize, tmp_path: Path, level: str) -> None:
    source = save_tiny(tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weight(source, lambda tensors: tensors[name].view(-1).__setitem__(7, float("nan")))
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", level=level)
    assert caught.value.reason == "NON_FINITE_WEIGHTS"
    assert caught.value.about == {"tensor": name, "count": "1"}


def test_overflow_of_fp16_is_refused_where_bf16_is_fine(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    name = "model.norm.weight"
    change_weight(source, lambda tensors: tensors[name].view(-1).__setitem__(0, 70000.0))
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", level="fp16")
    assert caught.value.reason == "WEIGHT_OVERFLOW"
    assert caught.value.about["tensor"] == name
    assert "70000" in caught.value.message
    assert "bf16" in caught.value.remedy
    quantize(source, format="pytorch", level="bf16")


def test_activations_beyond_fp16_are_found_by_the_check(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")

    def blow_up(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e6).clamp_(-6e4, 6e4)
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(1e4)

    change_weight(source, blow_up)
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", level="fp16")
    assert caught.value.reason == "NON_FINITE_OUTPUT"


def truncate(source: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[: len(data) // 2])


def empty_index(source: Path) -> None:
    (source / "model.safetensors").rename(source / "model.safetensors.index.json").write_text("{}")


def quantized_before(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "SAFETENSORS_CORRUPT"),
        (lambda source: (source / "model.safetensors").write_bytes(b"\xff" * 64), "SAFETENSORS_CORRUPT"),
        (lambda source: (source / "model.safetensors").unlink(), "BASE_MODEL_INVALID"),
        (empty_index, "BASE_MODEL_INVALID"),
        (lambda source: (source / "config.json").unlink(), "BASE_MODEL_INVALID"),
        (lambda source: (source / "config.json").write_text('{"model_type": "no-such"}'), "BASE_MODEL_INVALID"),
        (quantized_before, "QUANTIZATION_UNSUPPORTED"),
    ],
)
def test_damaged_input_has_its_reason(
    quantize: Quantize, tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    source = save_tiny(tmp_path / "source")
    damage(source)
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", level="int8")
    assert caught.value.reason == reason
    assert caught.value.remedy or caught.value.message


def test_float8_is_refused(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    change_weight(source, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", level="int8")
    assert caught.value.reason == "DTYPE_UNSUPPORTED"


def test_level_that_would_make_the_model_larger_is_refused(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", vocab_size=20_000)  # the tied head gets weights of its own
    with pytest.raises(ModelExportError) as caught:
        quantize(source, format="pytorch", head_bits=4, level="int8")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "larger" in caught.value.message
    assert int(caught.value.about["size_after_bytes"]) > int(caught.value.about["size_before_bytes"])


def test_model_without_a_fitting_linear_layer_is_refused(quantize: Quantize, tmp_path: Path) -> None:
    settings = GPT2Config(vocab_size=64, n_positions=32, n_embd=24, n_inner=40, n_layer=1, n_head=2)
    GPT2LMHeadModel(settings).save_pretrained(tmp_path / "source")  # neither 24 nor 40 is a multiple of 32
    with pytest.raises(ModelExportError) as caught:
        quantize(tmp_path / "source", format="pytorch", level="int8")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert caught.value.about["group_size"] == "32"


def test_too_large_to_load_is_quantized_without_the_check(tiny: Path, tmp_path: Path) -> None:
    from slipway_quantize.params import QuantizeParams
    from slipway_quantize.stage import STAGE

    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"), max_memory_bytes=1 << 10)
    folder = STAGE.run({"model": tiny}, QuantizeParams(format="pytorch", level="int4"), ctx)["model"]
    assert ctx.facts["check"].startswith("skipped")
    assert torch_logits(folder, prompt()).shape == (2, 9, 512)


def test_cancellation_stops_between_tensors(tiny: Path, tmp_path: Path) -> None:
    from slipway_quantize.params import QuantizeParams
    from slipway_quantize.stage import STAGE

    seen = []
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    ctx.on_progress = lambda progress: (seen.append(progress), ctx.cancelled.set() if len(seen) == 3 else None)
    with pytest.raises(StageError) as caught:
        STAGE.run({"model": tiny}, QuantizeParams(format="pytorch", level="int4"), ctx)
    assert caught.value.reason == "CANCELLED"
    assert len(seen) == 3
    assert all(progress.total > 0 for progress in seen)


def test_params_refuse_what_no_runtime_takes() -> None:
    from pydantic import ValidationError

    from slipway_quantize.params import QuantizeParams

    for bad in ({"group_size": 48}, {"group_size": 8}, {"level": "int2"}, {"format": "gguf"}, {"grup_size": 32}):
        with pytest.raises(ValidationError):
            QuantizeParams(**{"format": "pytorch", "level": "int4", **bad})


@pytest.mark.parametrize("level", ["int8", "fp16"])
def test_full_disk_is_reported_as_such(small_disk: Path, tmp_path: Path, level: str) -> None:
    from slipway_quantize.params import QuantizeParams
    from slipway_quantize.stage import STAGE

    source = save_tiny(
        tmp_path / "source", vocab_size=65536, tied=False
    )  # 16 MiB each of embedding and lm_head, on a disk of 8
    with pytest.raises(OSError, match="No space left"):
        STAGE.run({"model": source}, QuantizeParams(format="pytorch", level=level), Context(workdir=small_disk))


def test_a_model_that_describes_much_more_than_it_has_is_not_loaded(quantize: Quantize, tmp_path: Path) -> None:
    source = make_base(tmp_path / "base")
    describe_a_layer_more(source)
    with pytest.raises(ModelExportError, match="describes a model of") as caught:
        quantize(source, format="pytorch", level="bf16")
    assert caught.value.reason == "QUANTIZATION_FAILED"


def test_a_tied_head_stays_tied_and_one_of_its_own_gets_8_bits(quantize: Quantize, tmp_path: Path) -> None:
    """Below 8 bits only where that is asked for; the file has no second table."""
    tied, _ = quantize(save_tiny(tmp_path / "tied"), format="pytorch", level="int4")
    config = json.loads((tied / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert not [name for name in load_file(tied / "model.safetensors") if name.startswith("lm_head")]
    own, _ = quantize(save_tiny(tmp_path / "own", tied=False), format="pytorch", level="int4")
    schemes = json.loads((own / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert {each["weights"]["num_bits"]: each["targets"] for each in schemes} == {4: ["Linear"], 8: ["lm_head"]}
