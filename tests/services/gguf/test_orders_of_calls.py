"""llama.cpp in one process, whatever is called first: compared, spoken with, left and opened again, beside other models that end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")

from slipway.stage import Context
from slipway_gguf.params import GGUFParams
from slipway_gguf.stage import STAGE
from support.commands import orders_of_llama_calls
from support.models.gguf_faults import save_models


@pytest.mark.parametrize("orders", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_order_of_calls_ends_the_process(orders: int, tmp_path: Path) -> None:
    _, _, merged = save_models(tmp_path)
    (tmp_path / "work").mkdir()
    params = GGUFParams(type="f32", name="tiny")
    folder = STAGE.run({"pytorch": merged}, params, Context(workdir=tmp_path / "work"))["gguf"]
    words = [sys.executable, "-P", "-X", "faulthandler", orders_of_llama_calls.__file__, str(folder), str(orders), "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [str(orders)]), done.stderr[-3000:]
