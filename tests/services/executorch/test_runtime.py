"""What is rounded and what is not, and what the runtime says of a file that is none; no program is lowered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


class Tiny(torch.nn.Module):
    """A table of tokens and a layer of the same width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, width)
        self.layer = torch.nn.Linear(64, 8)

    def get_input_embeddings(self) -> Any:
        return self.table


@pytest.mark.parametrize(("width", "kept"), [(64, ()), (48, ("table",))], ids=("divisible", "indivisible"))
def test_a_table_that_stays_float32_is_named(width: int, kept: tuple[str, ...]) -> None:
    from slipway_executorch.lowering import layers_in_float32

    assert layers_in_float32(Tiny(width), 32) == kept


@pytest.mark.slow
def test_what_the_runtime_says_of_no_program_is_one_short_line(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    from slipway.proof.runtime import Unusable
    from slipway_executorch.runtime import Program

    (tmp_path / "model.pte").write_bytes(b"no program")
    with pytest.raises(Unusable, match=r"cannot load model\.pte") as caught:
        Program(tmp_path / "model.pte", threads=1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_running_a_program_does_not_import_what_writes_one() -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    code = "import sys, slipway_executorch.runtime; print(sorted(name for name in sys.modules if name.startswith('slipway_executorch')))"
    said = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["['slipway_executorch',", "'slipway_executorch.params',", "'slipway_executorch.runtime']"]
