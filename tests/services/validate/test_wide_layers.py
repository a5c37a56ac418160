"""Layers that widen their 16-bit weights while they compute give what a converted model gives, and are as before afterwards."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize, set_forward_quantized
from torch import nn

from slipway.model.adapters.saved import is_plain_lora
from slipway.model.pytorch import wide_layers
from slipway.model.pytorch.wide_layers import WideLinear, widen_while_computing
from slipway.proof import transformers_runtime
from slipway.proof.runtime import padded, plain_step, run_segments
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import run as quantize
from slipway_validate.runner.runtime_reference import load
from support.models.validation_models import Models


class Net(nn.Module):
    """An embedding tied to a head, layers with and without a bias, a norm, and a layer of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(300, 256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        self.norm, self.own = nn.LayerNorm(256), type("Own", (nn.Linear,), {})(256, 256)
        self.head = nn.Linear(256, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.own(self.down(self.up(self.embed(ids))))))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pieces_are_computed_side_by_side(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    monkeypatch.setattr(wide_layers, "PIECE_VALUES", 1 << 10)
    ids, seen, product = torch.arange(12).reshape(2, 6), set(), wide_layers._PRODUCT

    def noted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return product(rows, weight)

    monkeypatch.setattr(wide_layers, "_PRODUCT", noted)
    with mode():
        expected = Net().bfloat16().float()(ids)
        net = Net().bfloat16()
        restore = widen_while_computing(net)
        found = net.float()(ids)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.get_num_threads() == 2
        restore()
    assert {threads for _, threads in seen} == {1}
    assert len(seen) == 2
    assert not {name for name, _ in seen} & {thread.name for thread in threading.enumerate()}, "a thread is left"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece", [1 << 10, 1 << 22])
@torch.no_grad()
def test_the_results_are_those_of_a_converted_model(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(wide_layers, "PIECE_VALUES", piece)  # a small one, so that small weights have several
    ids = torch.arange(12).reshape(2, 6)
    expected = Net().to(dtype).float()(ids)
    net = Net().to(dtype)
    before = {name: (id(tensor), tensor.dtype) for name, tensor in net.named_parameters()}
    restore = widen_while_computing(net)
    assert [type(layer) is WideLinear for layer in (net.up, net.down, net.head, net.own)] == [True, True, True, False]
    assert torch.equal(net.up.weight, net.up.weight.to(dtype).float())
    assert net.embed.weight.dtype == torch.float32, "code that looks at the type sees that of the computation"
    net.float()
    found = net(ids)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    restore()
    net.own.to(dtype)
    net.norm.to(dtype)
    net.up.bias.data = net.up.bias.data.to(dtype)
    assert {name: (id(tensor), tensor.dtype) for name, tensor in net.named_parameters()} == before
    assert type(net.up) is nn.Linear


def test_a_layer_that_computes_otherwise_is_left_alone() -> None:
    net = Net().to(torch.bfloat16)
    net.up.forward = lambda values: values  # type: ignore[method-assign]
    widen_while_computing(net)
    assert type(net.up) is nn.Linear
    assert net.up.weight.dtype == torch.bfloat16


def in_bfloat16(base: Path, folder: Path) -> Path:
    """Copy a base with its weights in bfloat16."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def test_a_mapped_reference_gives_what_a_converted_one_gives(
    tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_layers, "SMALLEST_VALUES", 1 << 6)
    base = in_bfloat16(tiny.base, tmp_path / "base")
    rows, mask = padded([np.arange(2, 20), np.arange(5, 12)], side="left", token=0)
    found: list[Any] = []
    for mapped in (True, False):
        monkeypatch.setattr("slipway_validate.runner.runtime_reference.is_plain_lora", lambda _, mapped=mapped: mapped)
        model = load(base, tiny.adapter, threads=1)
        assert model.native_dtype == ("bfloat16" if mapped else "float32")
        model.prepare_comparison()
        assert any(type(layer) is WideLinear for layer in model.module.modules()) == mapped
        found.append(np.concatenate([part for _, part in run_segments(model, rows, mask, (16, 1, 1))], axis=1))
    assert np.abs(found[0] - found[1]).max() < 1e-5 * np.abs(found[1]).max()


def test_a_packed_folder_is_widened_after_it_is_decompressed(
    tiny: Models, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers have a function and a store of parameters of compressed-tensors, also afterwards."""
    merged = in_bfloat16(tiny.merged, tmp_path / "merged")
    params = QuantizeParams(format="pytorch", level="int4", group_size=16, check=False)
    folder = quantize({"model": merged}, params, context)["model"]
    rows, mask = padded([np.arange(2, 20), np.arange(5, 12)], side="left", token=0)
    found: list[Any] = []
    for smallest in (1 << 6, 1 << 30):
        monkeypatch.setattr(wide_layers, "SMALLEST_VALUES", smallest)
        model = transformers_runtime.load(folder, threads=1)
        before = model.forward(plain_step([3, 4], past=None, past_length=0))[0]  # decompresses
        model.prepare_comparison()
        wide = [layer for layer in model.module.modules() if type(layer) is WideLinear]
        packed = [layer for layer in model.module.modules() if hasattr(layer, "quantization_scheme")]
        assert len(wide) == (len(packed) + 1 if smallest < 1 << 30 else 0)  # and the head, which is tied
        found.append(np.concatenate([part for _, part in run_segments(model, rows, mask, (16, 1, 1))], axis=1))
        model.leave_comparison()
        assert np.array_equal(model.forward(plain_step([3, 4], past=None, past_length=0))[0], before)
    assert packed
    assert np.abs(found[0] - found[1]).max() < 1e-5 * np.abs(found[1]).max()


def test_a_layer_that_rounds_its_inputs_goes_on_rounding_them() -> None:
    scheme = QuantizationScheme(
        targets=["Linear"], input_activations=QuantizationArgs(num_bits=8, dynamic=True, strategy="token")
    )
    net = Net().to(torch.bfloat16)
    for status, layer in (("decompressed", net.up), ("initialized", net.down)):
        layer.quantization_scheme, layer.quantization_status = scheme, QuantizationStatus(status)
        set_forward_quantized(layer)
    values = torch.randn(3, 256)
    whole = net.up.weight.float()
    widen_while_computing(net)
    assert type(net.up) is WideLinear
    assert type(net.down) is nn.Linear, "its weight is not what is stored"
    net.float()
    rounded = forward_quantize(net.up, values, "input", scheme.input_activations)
    assert not torch.equal(rounded, values)
    assert torch.allclose(net.up(values), nn.functional.linear(rounded, whole, net.up.bias), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 2}}, True),
        ({"use_dora": True}, False),
        ({"modules_to_save": ["score"]}, False),
        ({"bias": "lora_only"}, False),
        ({"peft_type": "LOHA"}, False),
        ({"init_lora_weights": "pissa"}, False),
        ({"a_setting_of_a_later_version": 1}, False),
        ({"a_setting_of_a_later_version": None}, True),
    ],
)
def test_which_adapters_leave_the_base_as_it_is(
    tiny: Models, tmp_path: Path, change: dict[str, Any], plain: bool
) -> None:
    config = json.loads((tiny.adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": True, **change}))
    assert is_plain_lora(tmp_path) == plain
