"""What is planned, recommended and said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.configuration import parse
from slipway.errors import ConfigurationError
from slipway.formats.registry import load_format
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway.sizes import ModelSize
from slipway_tensorrt_llm.params import TensorRTLLMParams
from slipway_tensorrt_llm.stage import output_bytes
from support.models.tensorrt_llm_models import save_model, write_checkpoint


def planned(**settings: object) -> list[dict[str, object]]:
    data = {"formats": {"pytorch": {"enabled": False}, "tensorrt_llm": {"enabled": True, **settings}}}
    tasks = plan(parse(data), ("adapter", "base"))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return [dict(task.params) for task in tasks if task.format == "tensorrt_llm"]


def test_a_checkpoint_is_one_task() -> None:
    assert planned() == [{"dtype": "auto", "tp": 1, "pp": 1}]
    assert planned(dtype="float16", tp=4, pp=2) == [{"dtype": "float16", "tp": 4, "pp": 2}]


@pytest.mark.parametrize("settings", [{"tp": 0}, {"pp": 65}, {"dtype": "int8"}])
def test_settings_have_limits(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"formats\.tensorrt_llm"):
        planned(**settings)


def test_those_with_later_releases_are_sent_to_the_model_itself() -> None:
    [fit] = load_format("tensorrt_llm").fits
    ranks = [each.rank for each in load_format("pytorch").fits if each.target == "nvidia"]
    assert fit.target == "nvidia"
    assert "later releases load the pytorch output" in fit.why
    assert fit.rank > max(ranks)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_estimate_is_from_above(tp: int, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=tp)
    weights, largest = sum(each.numel() for each in model.parameters()), model.get_input_embeddings().weight.numel()
    size = ModelSize(weights, 4 * weights, largest, 4 * largest, 20_000)
    found = sum(path.stat().st_size for path in folder.iterdir())
    assert found < output_bytes(TensorRTLLMParams(tp=tp), size) < 3 * found


def test_validation_is_told_why_it_cannot_run_a_checkpoint(tmp_path: Path) -> None:
    from slipway.proof.runtime import NotRunnable
    from slipway_tensorrt_llm.runtime import load

    with pytest.raises(NotRunnable, match=r"tensorrt_llm needs an engine that TensorRT-LLM 1.2 or earlier builds"):
        load(tmp_path / "tensorrt_llm", threads=1)
