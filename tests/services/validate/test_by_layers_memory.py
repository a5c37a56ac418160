"""Which decoders are computed layer by layer, and what that takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipway.errors import ValidationError
from slipway.model.folder import ModelFolder
from slipway.proof.runtime import Samples
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import run as quantize
from slipway_validate.by_layers import LIBRARIES, Memory
from slipway_validate.outputs import REFERENCE_CODE
from slipway_validate.params import SampleParams
from slipway_validate.protocol.messages import RunSpec, Spec
from slipway_validate.reference.files import NoReferenceError
from slipway_validate.reference.running import _check_run
from slipway_validate.runner.main import execute
from support.models.current_kinds import make_kind
from support.models.validation_models import Models


def memory(tmp_path: Path, bytes_allowed: int, *, weights: int = 0, by_layers: str = "auto") -> Memory:
    ctx = Context(workdir=tmp_path, max_memory_bytes=bytes_allowed)
    return Memory(SampleParams(by_layers=by_layers), ctx, weights=weights)  # type: ignore[arg-type]


def test_memory_decides(tiny: Models, context: Context, tmp_path: Path) -> None:
    params = QuantizeParams(format="pytorch", level="int8", group_size=16, check=False)
    packed = quantize({"model": tiny.merged}, params, context)["model"]
    ample, many = 4 * LIBRARIES, LIBRARIES  # bytes, and weights
    assert memory(tmp_path, ample).why_by_layers(tiny.merged) == ""
    assert memory(tmp_path, ample, by_layers="always").why_by_layers(tiny.merged) == "by_layers is always"
    # What is made of weights counts, and packed ones are unpacked; mapped ones may be read again.
    assert "may be used" in memory(tmp_path, ample, weights=2 * many).why_by_layers(packed)
    assert memory(tmp_path, ample, weights=2 * many).why_by_layers(tiny.merged) == ""
    assert "may be used" in memory(tmp_path, ample, weights=2 * many).why_by_layers(tiny.merged, makes_weights=True)
    assert memory(tmp_path, ample, weights=2 * many, by_layers="never").why_by_layers(packed) == ""
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    shutil.copyfile(tiny.merged / "model.safetensors", mixture / "model.safetensors")
    config = json.loads((tiny.merged / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
    assert "may be used" in memory(tmp_path, ample, weights=2 * many).why_by_layers(mixture)
    scarce = memory(tmp_path, ample)
    scarce.available = 0
    assert "are free" in scarce.why_by_layers(tiny.merged)
    with pytest.raises(ValidationError, match="nor does its largest layer") as error:
        memory(tmp_path, 1000, by_layers="always").why_by_layers(tiny.merged)
    assert error.value.reason == "OUT_OF_MEMORY"
    small = memory(tmp_path, LIBRARIES // 2)  # a small model does not need all that libraries take at most
    assert small.why_by_layers(tiny.merged) == small.why_by_layers(packed) == ""
    assert error.value.remedy == "let the stage use more memory, or use a machine with more"


def test_the_experts_of_a_layer_count(tmp_path: Path) -> None:
    kind = make_kind("mixtral", tmp_path, dtype=torch.bfloat16)
    tensors = ModelFolder.open(kind.base).tensors
    layer = 4 * max(sum(each.numel for name, each in tensors.items() if f".layers.{at}." in name) for at in (0, 1))

    def fits(bytes_allowed: int, adapter: Path) -> bool:
        limited = memory(tmp_path, bytes_allowed, by_layers="always")
        try:
            return bool(limited.why_by_layers(kind.base, adapter=adapter))
        except ValidationError:
            return False

    (attention := tmp_path / "attention").mkdir()
    (experts := tmp_path / "experts").mkdir()
    for folder, name in ((attention, "self_attn.q_proj"), (experts, "block_sparse_moe.experts.0.w1")):
        key = f"base_model.model.model.layers.0.{name}.lora_A.weight"
        save_file({key: torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    # Under small limits, half is for weights: a layer in float32, half of it as stored, or three copies while experts change.
    assert fits(2 * layer * 3 // 2 + 8, attention)
    assert not fits(2 * layer * 3 // 2 - 8, attention)
    assert fits(8 * layer + 8, experts)
    assert not fits(8 * layer - 8, experts)


def test_a_decoder_of_unknown_layers_is_not_run(tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Samples(np.arange(2, 22, dtype=np.int64)[None]).write(tmp_path / "samples")
    monkeypatch.setattr("slipway.model.pytorch.block_passes.find_blocks", lambda _: [])
    spec = RunSpec(runtime=REFERENCE_CODE, model=tiny.merged, samples=tmp_path / "samples", by_layers=True)
    result, _ = execute(Spec(run=spec), tmp_path)
    assert result.status == "not_run"
    assert result.message == (
        "it does not fit into memory, and cannot be computed layer by layer: Qwen3ForCausalLM has no blocks that follow each other"
    )
    with pytest.raises(NoReferenceError, match="layer by layer"):
        _check_run(result, spec, {"base": tiny.base}, prepared=None, folder=tmp_path)  # type: ignore[arg-type]


def test_an_adapter_that_is_no_plain_lora_is_computed_as_a_whole(tiny: Models, tmp_path: Path) -> None:
    config = json.loads((tiny.adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    always = memory(tmp_path, 4 << 30, by_layers="always")
    assert always.why_by_layers(tiny.base, adapter=tmp_path) == ""
    assert always.why_by_layers(tmp_path / "nothing") == ""
