"""Speed of real models: the trained sample, merged, in the types it is served in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipway.proof import transformers_runtime
from slipway.proof.runtime import plain_step
from slipway.stage import Context
from slipway.validation.findings import ValidationReport
from slipway.validation.speed import Speed
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.params import ValidateParams
from slipway_validate.stage import STAGE

ROUNDS = 5


def context(folder: Path) -> Context:
    folder.mkdir(parents=True)
    return Context(workdir=folder)


@pytest.fixture(scope="module")
def sources(sample: Path) -> dict[str, Path]:
    adapter = max((sample / "qwen3-finetuned").glob("checkpoint-*"))
    return {"base": sample / "qwen3-base", "adapter": adapter}


@pytest.fixture(scope="module")
def outputs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The merged model and its quantized levels."""
    root = tmp_path_factory.mktemp("outputs")
    merged = MERGE.run(sources, MergeParams(), context(root / "merge"))["pytorch"]
    made = {"pytorch": merged}
    for level in ("bf16", "int4"):
        params = QuantizeParams.model_validate({"format": "pytorch", "level": level})
        made[f"pytorch-{level}"] = QUANTIZE.run({"model": merged}, params, context(root / level))["model"]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch-bf16", "pytorch-int4"])
def test_after_the_comparison_a_model_computes_as_it_is_served(outputs: dict[str, Path], name: str) -> None:
    model = transformers_runtime.load(outputs[name], threads=1)
    step = plain_step([5, 6, 7, 8], past=None, past_length=0)
    before, _ = model.forward(step)
    tensors = {key: tensor.clone() for key, tensor in model._tensors()}
    model.prepare_comparison()
    compared, _ = model.forward(step)
    model.leave_comparison()
    after, _ = model.forward(step)
    assert (before == after).all()
    assert (before != compared).any() == (model.native_dtype != "float32"), "the comparison widens"
    for key, tensor in model._tensors():
        assert tensor.dtype == tensors[key].dtype, key
        assert torch.equal(tensor, tensors[key]), key


@pytest.mark.slow
def test_one_model_under_two_names_has_one_speed(
    sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    twice = {"pytorch": outputs["pytorch"], "pytorch-again": outputs["pytorch"]}
    params = ValidateParams(
        effort="thorough", test_samples=1, sequence_length=64, benchmark_repeats=ROUNDS, benchmark_seconds=60
    )
    ctx = context(tmp_path / "validate")
    ctx.threads = 2
    report = ValidationReport.read(STAGE.run({**sources, **twice}, params, ctx)["validation"])
    speeds: dict[str, Speed] = {output.name: output.speed for output in report.outputs if output.speed}
    assert set(speeds) == set(twice)
    for speed in speeds.values():
        assert (speed.rounds, speed.interleaved, speed.note) == (ROUNDS, True, "")
        assert speed.prefill_ms_range is not None
        assert speed.prefill_ms_range[0] <= speed.prefill_ms <= speed.prefill_ms_range[1]
        assert speed.decode_range is not None
        assert speed.other_cores is not None
    assert report.reference.speed is not None
    assert report.reference.speed.rounds == ROUNDS * len(twice)
    first, again = speeds["pytorch"].prefill_speedup, speeds["pytorch-again"].prefill_speedup
    assert first is not None
    assert again is not None
    # Medians of the same model agree, where they say of themselves that they can be relied on.
    assert not (first.stable and again.stable) or 0.6 < first.median / again.median < 1.6
    memory = {output.name: output.memory.peak_rss_bytes for output in report.outputs if output.memory}
    assert memory["pytorch"] == pytest.approx(memory["pytorch-again"], rel=0.05), "memory does not scatter"
