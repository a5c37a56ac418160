"""The NF4 round trip: the layers it takes, and what ends the work on it."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_prepare.bitsandbytes_format import nf4_round_trip
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE
from support.models.prepare_models import linears, loads, refusal, run, stored


def test_the_nf4_round_trip_takes_the_layers_that_load_in_4bit_takes(dense, tmp_path):
    out, found, facts = run(dense, tmp_path, merge_onto="nf4")
    expected = load_file(dense / "model.safetensors")
    for name, value in expected.items():
        wanted = nf4_round_trip(value) if name in linears(expected) else value
        assert torch.equal(found[name], wanted), name
        assert torch.equal(found[name], value) == (name not in linears(expected))
    assert (facts["merge_onto"], facts["computed"]) == ("nf4", len(linears(expected)))
    assert "NF4" in facts["warnings"][0]
    loads(out)


def test_the_nf4_round_trip_of_another_quantization_is_refused(gptq, tmp_path):
    error = refusal(gptq[0], tmp_path, merge_onto="nf4")
    assert error.reason == "BASE_QUANTIZATION_UNSUPPORTED"
    assert "original" in error.remedy


def test_a_full_disk_is_typed(dense, tmp_path, small_disk):
    folder = stored(dense, tmp_path, load_file(dense / "model.safetensors"))
    padding = small_disk / "padding"
    free = shutil.disk_usage(small_disk).free
    padding.write_bytes(bytes(max(0, free - 100_000)))
    ctx = Context(workdir=small_disk, log=logging.getLogger("test"))
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"base": folder}, PrepareParams(merge_onto="nf4"), ctx)
    assert caught.value.reason == "DISK_FULL"


def test_cancellation_ends_it(dense, tmp_path):
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    seen = []

    def cancel(progress):
        seen.append(progress)
        ctx.cancelled.set()

    ctx.on_progress = cancel
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"base": dense}, PrepareParams(merge_onto="nf4"), ctx)
    assert caught.value.reason == "CANCELLED"
    assert len(seen) == 1
