"""Damaged bytes anywhere: quantized, or refused with a reason of the table; never another exception."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE

EXPECTED = {
    "ONNX_INVALID", "SAFETENSORS_CORRUPT", "BASE_MODEL_INVALID", "QUANTIZATION_UNSUPPORTED", "QUANTIZATION_FAILED",
    "NON_FINITE_WEIGHTS", "NON_FINITE_OUTPUT", "WEIGHT_OVERFLOW", "DTYPE_UNSUPPORTED",
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "file", "reach"), [("onnx", "model.onnx", None), ("pytorch", "model.safetensors", 3000), ("pytorch", "config.json", None)]
)  # fmt: skip
def test_mutations(tiny: Path, tiny_onnx: Path, tmp_path: Path, form: str, file: str, reach: int | None) -> None:
    dice = random.Random(7)
    source = tiny if form == "pytorch" else tiny_onnx
    outcomes = []
    for number in range(24):
        damaged, workdir = tmp_path / f"damaged-{number}", tmp_path / f"work-{number}"
        shutil.copytree(source, damaged)
        workdir.mkdir()
        data = bytearray((damaged / file).read_bytes())
        for _ in range(dice.choice((1, 4))):
            data[dice.randrange(min(len(data), reach or len(data)))] = dice.randrange(256)
        (damaged / file).write_bytes(data)
        params = QuantizeParams(format=form, level=dice.choice(("fp16", "int4")))
        try:
            STAGE.run({"model": damaged}, params, Context(workdir=workdir, log=logging.getLogger("test")))
            outcomes.append("")
        except ModelExportError as error:
            outcomes.append(error.reason)
    assert set(outcomes) <= EXPECTED | {""}
    assert any(outcomes)
