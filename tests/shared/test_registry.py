"""Stages by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.registry import load_stage, stage_of
from slipway.stage import Role

IMPOSSIBLE = """
import threading
from slipway import Stage, StageParams
class Params(StageParams):
    lock: threading.Event
STAGE = Stage(name="a_broken", version=1, inputs=(), outputs=("out",), params=Params, run=None)
"""


@pytest.mark.parametrize(
    "code",
    ["raise ValueError('no')", "STAGE =", "import sys; sys.exit(1)", "import not_there", IMPOSSIBLE],
    ids=range(5),
)
def test_a_stage_that_cannot_be_loaded_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    metadata, module = tmp_path / "a_broken-1.0.dist-info", f"a_broken_{abs(hash(code))}"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: a-broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[slipway.stages]\na_broken = {module}:STAGE\n")
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    stage_of.cache_clear()
    with pytest.raises(ConfigurationError, match="there is no stage 'a_broken': ") as caught:
        load_stage("a_broken")
    assert caught.value.reason == "STAGE_UNKNOWN"
    assert stage_of(Role.MERGE).name == "merge"
