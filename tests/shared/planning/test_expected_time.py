"""The time that a plan is expected to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.formats import PlannedTask
from slipway.planning.preflight import preflight


def test_the_time_follows_from_the_sizes_and_leaves_out_what_is_in_reserve(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    with (big / "model.safetensors").open("wb") as file:  # 20 GB, all of it a hole
        shape, size = [100_000, 100_000], 2 * 100_000**2
        header = json.dumps({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)

    def expected(*tasks: PlannedTask) -> float:
        return preflight(tasks, base=big, home=tmp_path / "home", output=tmp_path / "out").expected_seconds

    floats, searched = (
        PlannedTask("gguf", "gguf", {"type": level}, {}, f"gguf-{level}") for level in ("bf16", "q4_k_m")
    )
    merge, judge = PlannedTask("merge", "merge", {}, {}, "pytorch"), PlannedTask("validate", "validate", {}, {})
    assert expected(merge) == pytest.approx(100, rel=0.05)  # 5 s for each of 20 GB
    assert expected(searched) > 2 * expected(floats)
    assert expected(merge, floats, judge) > expected(merge, judge) + expected(floats)
    calibrate = PlannedTask("calibrate", "calibrate", {}, {"model": "task:merge/pytorch"})
    int4 = PlannedTask(
        "int4",
        "quantize",
        {"level": "int4", "format": "pytorch"},
        {"model": "task:merge/pytorch"},
        "pytorch-int4",
        reserve={"calibration": "task:calibrate/calibration"},
    )
    assert expected(merge, calibrate, int4) == expected(merge, int4)
    checked = preflight((merge, judge), base=big, home=tmp_path / "home", output=tmp_path / "out")
    [said] = [each.message for each in checked.findings if each.check == "time"]
    assert said.startswith(f"about {round(checked.expected_seconds / 60)} min on two cores")
