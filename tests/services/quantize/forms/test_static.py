"""fp8_static: the scale of each layer's input is that of the largest value on the text."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.forms.ranges import WINDOW_TOKENS
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from support.models.calibrated_models import shortened, write_data


def static(tmp_path: Path, inputs: dict[str, Path]) -> tuple[Path, Context]:
    workdir = tmp_path / "attempt"
    workdir.mkdir()
    ctx = Context(workdir=workdir, log=logging.getLogger("test"))
    return STAGE.run(inputs, QuantizeParams(format="pytorch", level="fp8_static"), ctx)["model"], ctx


def test_scales_are_those_of_the_text(sample: Path, tmp_path: Path) -> None:
    model = shortened(sample, tmp_path / "model")
    text = (sample / "heldout" / "heldout.txt").read_text(encoding="utf-8")[:4000]
    folder, ctx = static(tmp_path, {"model": model, "data": write_data(tmp_path / "data", [text])})
    assert ctx.facts["check"] == "passed"
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    found: dict[str, float] = {}

    def watch(name: str):
        def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            found[name] = max(found.get(name, 0.0), float(inputs[0].abs().max()))

        return see

    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    ids = [*AutoTokenizer.from_pretrained(model)(text)["input_ids"], plain.config.eos_token_id]
    with torch.no_grad():
        for start in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS):
            plain(torch.tensor([ids[start : start + WINDOW_TOKENS]]))
    stored = load_file(folder / "model.safetensors")
    scales = {name.removesuffix(".input_scale"): value for name, value in stored.items() if "input_scale" in name}
    assert scales.keys() == found.keys() - {"lm_head"}, "the head is tied, and stays"
    for name, scale in scales.items():
        assert scale.shape == (1,)
        assert float(scale) == pytest.approx(found[name] / 448, rel=1e-4)


def test_without_text_it_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="needs text") as caught:
        static(tmp_path, {"model": tiny})
    assert caught.value.reason == "CALIBRATION_DATA_INVALID"
