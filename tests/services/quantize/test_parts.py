"""A quantization in parts: the joined folder has the bytes and facts of one quantization."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.artifacts.adopting import place_adopted
from slipway.division import input_names
from slipway.errors import StageError
from slipway.model.weights.divided_files import RECORD
from slipway.stage import Context
from slipway.stage_call import StageCall
from slipway_quantize.params import QuantizeParams, most_parts
from slipway_quantize.stage import STAGE
from support.models.calibrations import write_calibration
from support.models.quantize_models import prompt, save_tiny, torch_logits

PARTS = 3
CASES: dict[str, dict[str, Any]] = {
    "int4": {"level": "int4"},
    "int4 with its own head": {"level": "int4", "head_bits": 4},
    "int8 dense": {"level": "int8", "packed": False},
    "int4 but one layer": {"level": "int4", "keep": ["model.layers.0.mlp.down_proj"]},
    "fp16": {"level": "fp16"},
    "fp8": {"level": "fp8"},
}


def step(place: Path, name: str, inputs: dict[str, Path], **params: Any) -> tuple[Path, Context]:
    """Run one task of the divided quantization; its inputs have all files, as on plain folders."""
    digests = {key: f"sha256:{key}" for key in inputs}
    ctx = Context(workdir=place / name, input_digests=digests)
    ctx.workdir.mkdir()
    asked = {"format": "pytorch", "max_shard_bytes": 1 << 20, **params}
    call = StageCall("quantize", asked, {key: str(path) for key, path in inputs.items()})
    stage = call.step(STAGE)
    folder = stage.run(inputs, call.check(stage), ctx)[stage.main_output]
    place_adopted(folder, inputs, ctx.adopted)
    return folder, ctx


_ALONE = """
import json, sys
from pathlib import Path
from slipway.stage import Context
from slipway.stage_call import StageCall
from slipway_quantize.stage import STAGE
source, workdir, params = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
call = StageCall("quantize", params, {"model": str(source)})
stage = call.step(STAGE)
stage.run({"model": source}, call.check(stage), Context(workdir=workdir))
print(json.dumps(sorted({"torch", "transformers", "compressed_tensors", "onnx_ir", "onnxruntime", "scipy"} & sys.modules.keys())))
"""
"""A task in a process of its own, which says what it has imported."""


def parts_of(place: Path, source: Path, **params: Any) -> dict[str, Path]:
    made = (step(place, f"part-{n}", {"model": source}, parts=PARTS, part=n, **params)[0] for n in range(1, PARTS + 1))
    return dict(zip(input_names(PARTS), made, strict=True))


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models whose embedding is tied to the head or not. The embedding fills a file, so a head of its own is written by another part."""
    place = tmp_path_factory.mktemp("sources")
    return {
        True: save_tiny(place / "tied", vocab_size=4096, tied=True, dtype=torch.float32),
        False: save_tiny(place / "untied", vocab_size=16384, tied=False, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("int4 with its own head", True),
        ("fp16", False),
        *(
            pytest.param(kind, tied, marks=pytest.mark.slow)
            for kind in CASES
            for tied in (True, False)
            if (kind, tied) not in {("int4 with its own head", True), ("fp16", False)}
        ),
    ],
)
def test_joined_parts_are_the_whole(sources: dict[bool, Path], tmp_path: Path, kind: str, tied: bool) -> None:
    params = CASES[kind]
    whole, once = step(tmp_path, "whole", {"model": sources[tied]}, **params)
    parts = parts_of(tmp_path, sources[tied], **params)
    joined, ctx = step(tmp_path, "joined", parts, parts=PARTS, **params)
    assert content(joined) == content(whole)
    if not tied or params["level"] != "fp16":
        assert sum(name.endswith(".safetensors") for name in content(whole)) > 1
    assert ctx.facts.pop("check") == "not run: the weights were made in parts"
    assert once.facts.pop("check") == "passed"
    assert ctx.facts == once.facts


@pytest.mark.slow
def test_the_joined_folder_loads(sources: dict[bool, Path], tmp_path: Path) -> None:
    joined, _ = step(tmp_path, "joined", parts_of(tmp_path, sources[False], level="int4"), parts=PARTS, level="int4")
    assert np.isfinite(torch_logits(joined, prompt())).all()


def test_parts_of_other_parameters_are_refused(sources: dict[bool, Path], tmp_path: Path) -> None:
    parts = parts_of(tmp_path, sources[False], level="int4")
    (tmp_path / "again").mkdir()
    parts["part-002"] = parts_of(tmp_path / "again", sources[False], level="int4", group_size=64)["part-002"]
    with pytest.raises(StageError, match="part 2 has another") as refused:
        step(tmp_path, "joined", parts, parts=PARTS, level="int4")
    assert refused.value.reason == "PARTS_DIFFER"


def test_warnings_are_given_once_by_the_join(sources: dict[bool, Path], tmp_path: Path) -> None:
    parts = parts_of(tmp_path, sources[False], level="bf16")
    assert all(json.loads((part / RECORD).read_text())["warnings"] for part in parts.values())
    _, ctx = step(tmp_path, "joined", parts, parts=PARTS, level="bf16")
    assert len(ctx.facts["warnings"]) == 1


@pytest.mark.parametrize(
    ("params", "inputs", "most"),
    [
        ({"level": "int4"}, ("model",), 2),
        ({"level": "int4"}, ("model", "calibration"), 2),
        ({"level": "bf16"}, ("model",), 5),
        ({"level": "fp16"}, ("model", "data"), 1),
        ({"level": "int4", "size_budget_share": 0.3}, ("model",), 1),
        ({"level": "int4", "size_budget_share": 0.3}, ("model", "calibration"), 1),
        ({"level": "int4", "wide_share": 0.2}, ("model",), 1),
        ({"level": "int4", "wide_share": 0.2}, ("model", "calibration"), 2),
        ({"level": "nvfp4"}, ("model",), 1),
        ({"level": "int4", "format": "onnx"}, ("model",), 1),
    ],
)
def test_only_what_is_rounded_weight_by_weight_is_divided(
    params: dict[str, Any], inputs: tuple[str, ...], most: int
) -> None:
    asked = QuantizeParams.model_validate({"format": "pytorch", "max_shard_bytes": 1 << 30, **params})
    assert most_parts(asked, inputs, 5 << 30) == most


@pytest.mark.slow
def test_integers_of_a_calibration_are_written_in_parts(sources: dict[bool, Path], tmp_path: Path) -> None:
    calibration = write_calibration(sources[False], tmp_path / "calibration", bits=4, symmetric=False)
    inputs, params = {"model": sources[False], "calibration": calibration}, {"level": "int4", "wide_share": 0.2}
    whole, once = step(tmp_path, "whole", inputs, **params)
    made = [step(tmp_path, f"part-{n}", inputs, parts=PARTS, part=n, **params)[0] for n in range(1, PARTS + 1)]
    parts = dict(zip(input_names(PARTS), made, strict=True))
    joined, ctx = step(tmp_path, "joined", parts, parts=PARTS, **params)
    assert content(joined) == content(whole)
    assert ctx.facts["weights_by_method"] == once.facts["weights_by_method"]


@pytest.mark.parametrize("level", ["int4", "bf16"])
def test_a_part_of_integers_or_of_copies_loads_no_torch(sources: dict[bool, Path], tmp_path: Path, level: str) -> None:
    """The first import of torch and transformers takes longer than a part of some hundred megabytes."""
    params = {"format": "pytorch", "max_shard_bytes": 1 << 20, "level": level, "parts": PARTS, "part": 1}
    command = [sys.executable, "-c", _ALONE, str(sources[False]), str(tmp_path), json.dumps(params)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    made, _ = step(
        tmp_path, "here", {"model": sources[False]}, **{name: params[name] for name in params if name != "format"}
    )
    assert content(tmp_path / "part") == content(made)
