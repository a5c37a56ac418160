"""Rounding weighed by the importance of inputs: measured on text, read for this model, and used."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import GGUFExportError
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from support.models.gguf_models import save_family, write_gguf

pytestmark = pytest.mark.own_process

gguf = pytest.importorskip("gguf", reason="reads the files: pip install 'slipway-ml[gguf]'")
pytest.importorskip("xllamacpp", reason="quantizes: pip install 'slipway-ml[gguf]'")
_NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_family("llama", folder)
    return folder


def _importance(folder: Path, **vectors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({name.replace("__", "."): vector for name, vector in vectors.items()}, folder / "importance.safetensors")
    return folder


def _error(file: Path, model: Path, columns: slice) -> float:
    """Return the squared error of some columns."""
    [stored] = [each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_up.weight"]
    source = load_file(model / "model.safetensors")[_NAME].numpy()
    return float(np.square(gguf.quants.dequantize(stored.data, stored.tensor_type) - source)[:, columns].sum())


def test_inputs_that_matter_are_rounded_better(model: Path, tmp_path: Path) -> None:
    plain, _ = write_gguf(model, tmp_path / "plain", level="q4_0")
    vector = torch.ones(64)
    vector[::2] = 100.0
    folder = _importance(tmp_path / "importance", **{_NAME: vector})
    weighed, ctx = write_gguf(model, tmp_path / "weighed", level="q4_0", importance=folder)
    assert ctx.facts["weighed_tensors"] == 1
    assert _error(weighed, model, slice(0, None, 2)) < 0.95 * _error(plain, model, slice(0, None, 2))
    assert _error(weighed, model, slice(1, None, 2)) > _error(plain, model, slice(1, None, 2))


@pytest.mark.parametrize(
    "vector",
    [torch.ones(32), torch.full((64,), -1.0), torch.full((64,), float("nan")), torch.ones(64, dtype=torch.int32)],
    ids=["another width", "negative", "nan", "integers"],
)
def test_importance_of_another_model_is_refused(vector: torch.Tensor, model: Path, tmp_path: Path) -> None:
    folder = _importance(tmp_path / "importance", **{_NAME: vector})
    with pytest.raises(GGUFExportError) as caught:
        write_gguf(model, tmp_path / "work", level="q4_k_m", importance=folder)
    assert caught.value.reason == "CALIBRATION_MISMATCH"


@pytest.mark.slow
def test_the_stage_measures_the_inputs_mean_squares(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from slipway_quantize.calibration.importance.stage import STAGE
    from slipway_quantize.calibration.params import ImportanceParams

    data = tmp_path / "data"
    data.mkdir()
    texts = [topics[name] for name in sorted(topics)[:4]]
    (data / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def run(name: str) -> tuple[Path, Path, Context]:
        """Measure, and write a file with what was measured."""
        work = tmp_path / name
        work.mkdir()
        params = ImportanceParams(windows=8, window_tokens=32, threads=1)
        found = STAGE.run({"model": model, "data": data}, params, Context(workdir=work))["importance"]
        file, ctx = write_gguf(model, tmp_path / f"{name}-file", level="q4_0", importance=found)
        return found / "importance.safetensors", file, ctx

    (one, file, ctx), (other, again, _) = run("first"), run("second")
    assert one.read_bytes() == other.read_bytes()
    assert file.read_bytes() == again.read_bytes()
    measured = load_file(one)
    assert len(measured) == 2 * 7 + 1
    assert ctx.facts["weighed_tensors"] > 1

    seen: dict[str, Any] = {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded.model.layers[1].mlp.up_proj.register_forward_hook(lambda _, inputs, __: seen.update(rows=inputs[0]))
    from slipway_quantize.calibration.windows import read_windows

    windows = read_windows(data, ModelFolder.open(model), count=8, length=32, vocabulary=320, seed=0)
    with torch.no_grad():
        loaded(torch.stack([*windows.fit, *windows.held_out]))
    assert torch.allclose(measured[_NAME], seen["rows"].square().mean((0, 1)), rtol=1e-4)
