"""Every stage after the other on a base as hubs hold it: bfloat16, untied, in shards, in a folder of links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from slipway.stage import Context
from slipway.validation.findings import ValidationReport
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.params import ValidateParams
from slipway_validate.stage import STAGE as VALIDATE
from support.models.validation_models import VOCABULARY, save_tokenizer

SHARD_BYTES = 60_000


def save_training_run(root: Path) -> tuple[Path, Path]:
    """Base and adapter; the base's files are links to read-only blobs, as in a hub's cache."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    blobs = root / "models--tiny--llama" / "blobs"
    folder = blobs.parent / "snapshots" / "1"
    base.save_pretrained(blobs, max_shard_size="60KB")
    save_tokenizer(blobs)
    folder.mkdir(parents=True)
    for path in sorted(blobs.iterdir()):
        path.chmod(0o444)
        (folder / path.name).symlink_to(path)
    lora = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base.float(), lora).save_pretrained(root / "adapter")
    return folder, root / "adapter"


def shards(folder: Path) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return set(index["weight_map"].values())


@pytest.mark.slow
def test_sharded_bfloat16_base_through_every_stage(tmp_path: Path, held_out: Path) -> None:
    base, adapter = save_training_run(tmp_path)
    assert len(shards(base)) > 2

    def context(name: str) -> Context:
        (tmp_path / name).mkdir()
        return Context(workdir=tmp_path / name)

    params = MergeParams(max_shard_bytes=SHARD_BYTES)
    merged = MERGE.run({"base": base, "adapter": adapter}, params, context("merge"))["pytorch"]
    assert len(shards(merged)) > 2
    onnx = EXPORT.run({"pytorch": merged}, OnnxExportParams(), context("export"))["onnx"]
    outputs = {"pytorch": merged, "onnx": onnx}
    quantized = QuantizeParams.model_validate({"format": "pytorch", "level": "int8"})
    outputs["pytorch-int8"] = QUANTIZE.run({"model": merged}, quantized, context("pytorch-int8"))["model"]
    sources = {"base": base, "adapter": adapter, "heldout": held_out}
    # Untrained weights give nearly flat distributions, whose largest value changes easily; KL and strength judge.
    limits = {"int8": {"top1_agreement": 0.9}}
    settings = ValidateParams.model_validate(
        {
            "sequence_length": 48,
            "test_samples": 4,
            "greedy_prompts": 1,
            "benchmark_performance": False,
            "limits": limits,
        }
    )
    folder = VALIDATE.run({**sources, **outputs}, settings, context("validate"))["validation"]
    report = ValidationReport.read(folder)
    assert {output.name: output.explanation for output in report.outputs if not output.passed} == {}
    assert {output.name for output in report.outputs} == set(outputs)
    assert report.reference.adapter_effect_kl is not None
    assert report.reference.adapter_effect_kl > 0.01
