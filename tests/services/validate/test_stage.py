"""The stage on a tiny model: what is right passes, and each way of being wrong fails with the check made for it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, ValidationReport
from slipway_validate.params import ValidateParams
from slipway_validate.runner.runtime_tensorrt import gpu_targets
from slipway_validate.stage import STAGE
from support.models.validation_models import TEXT, Models, all_ones, edited_onnx, fixed_batch, negated

PARAMS: dict[str, Any] = {"sequence_length": 48, "test_samples": 4, "benchmark_decode_steps": 4, "benchmark_repeats": 2}


def make_int4(module: Any) -> None:
    """Weights rounded to 4 bits in groups of 16, kept in float32."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            groups = parameter.reshape(-1, 16)
            scale = groups.abs().amax(dim=1, keepdim=True) / 7
            parameter.copy_(((groups / scale).round() * scale).reshape(parameter.shape))


def broken_outputs(tiny: Models, onnx: Path) -> dict[str, Path]:
    nan = tiny.variant("nan", lambda m: m.model.layers[1].mlp.down_proj.weight[0].fill_(float("nan")))
    truncated = tiny.copied("truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    corrupt = tiny.root / "onnx-corrupt"
    corrupt.mkdir()
    (corrupt / "model.onnx").write_bytes(b"not a protobuf at all")
    engine = tiny.root / "tensorrt"
    engine.mkdir()
    (engine / "model.sm89.engine").write_bytes(b"engine")
    (engine / "engine.json").write_text(json.dumps({"builder": "tensorrt_rtx"}))
    weak = tiny.scaled("weak", 0.75)
    (weak / "quantization.json").write_text(json.dumps({"level": "int4"}))
    perturbed = tiny.variant("perturbed", lambda m: m.model.layers[0].self_attn.v_proj.weight.mul_(1.01))
    rounded = tiny.variant("rounded", make_int4)
    (rounded / "quantization.json").write_text(json.dumps({"level": "fp16"}))
    nomask = edited_onnx(onnx, tiny.root / "nomask", replaced="attention_mask", by=all_ones)
    return {
        "pytorch-perturbed": perturbed,
        "pytorch-scaled": tiny.scaled("scaled", 1.5),
        "pytorch-int4": weak,
        "pytorch-base": tiny.without_adapter("lost"),
        "pytorch-nan": nan,
        "pytorch-truncated": truncated,
        "pytorch-fp16": rounded,
        "onnx-nomask": nomask,
        "onnx-nomask1": fixed_batch(nomask, tiny.root / "nomask1"),
        "onnx-cache": edited_onnx(onnx, tiny.root / "cache", replaced="past_key_values.1.key", by=negated),
        "onnx-corrupt": corrupt,
        "tensorrt": engine,
    }


@pytest.fixture(scope="module")
def result(
    tiny: Models, tiny_onnx: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ValidationReport, Context]:
    """One validation of good and bad outputs together."""
    ctx = Context(workdir=tmp_path_factory.mktemp("work"))
    inputs = {
        "base": tiny.base,
        "adapter": tiny.adapter,
        "heldout": held_out,
        "pytorch": tiny.merged,
        "onnx": tiny_onnx,
        "onnx-batch1": fixed_batch(tiny_onnx, tiny.root / "batch1"),
        **broken_outputs(tiny, tiny_onnx),
    }
    out = STAGE.run(inputs, ValidateParams(**PARAMS), ctx)
    assert sorted(path.name for path in ctx.workdir.iterdir()) == ["validation"]  # logits are gone
    return ValidationReport.read(out["validation"]), ctx


@pytest.fixture
def report(result: tuple[ValidationReport, Context]) -> ValidationReport:
    return result[0]


def failed(report: ValidationReport, name: str) -> set[tuple[str, str]]:
    return {(check.name, check.against) for check in report.output(name).failed_checks}


@pytest.mark.slow
class TestOneValidation:
    def test_verdict(self, report: ValidationReport) -> None:
        passed = {output.name for output in report.outputs if output.passed}
        assert passed == {"pytorch", "onnx", "onnx-batch1"}
        assert not report.passed
        assert "tensorrt" not in report.failed_outputs or gpu_targets()

    def test_merged_model_equals_the_reference(self, report: ValidationReport) -> None:
        merged = report.output("pytorch")
        assert merged.to_reference is not None
        assert merged.to_reference.max_abs_diff is not None
        assert 0 <= merged.to_reference.max_abs_diff < 1e-5 * report.reference.logit_scale
        assert merged.to_reference.top1_agreement == 1
        assert merged.adapter_strength == pytest.approx(1, abs=1e-5)
        assert merged.to_reference.tokens == report.inputs.tokens == 4 * 48
        assert merged.greedy is not None
        assert merged.greedy.exact_match_share == 1
        assert merged.greedy.example_output == merged.greedy.example_reference != ""
        assert merged.perplexity == pytest.approx(report.reference.perplexity, rel=1e-5)
        assert merged.explanation == merged.remedy == ""

    def test_the_adapter_matters_here(self, report: ValidationReport) -> None:
        assert report.reference.adapter_effect_kl is not None
        assert report.reference.adapter_effect_kl > 0.05
        assert report.reference.base_perplexity != pytest.approx(report.reference.perplexity, rel=0.01)
        gains = report.reference.gain_per_window
        assert len(gains) == report.inputs.samples
        base, tuned = report.reference.base_perplexity, report.reference.perplexity
        assert base
        assert tuned
        assert sum(filter(None, gains)) / len(gains) == pytest.approx(math.log(base / tuned), rel=1e-6)
        assert "r=4 alpha=6" in report.reference.adapter

    def test_onnx_ran_through_its_cache(self, report: ValidationReport) -> None:
        onnx = report.output("onnx")
        assert onnx.engine is not None
        assert onnx.engine.runtime == "onnxruntime"
        assert {case.name for case in onnx.cases} == {
            "left_padded",
            "single_token",
            "decode",
            "decode_left_padded",
            "chunked",
        }
        assert not any(case.skipped for case in onnx.cases)
        assert onnx.to_merged is not None

    def test_speed_and_memory_are_the_outputs_own(self, report: ValidationReport) -> None:
        onnx, torch = report.output("onnx"), report.output("pytorch")
        for output in (onnx, torch):
            assert output.speed is not None
            assert output.speed.prefill_ms > 0
            assert output.speed.decode_tokens_per_second
            assert output.speed.rounds == 2
            assert output.speed.decode_steps == 2 * 4
            assert output.speed.interleaved
            for ratio in (output.speed.prefill_speedup, output.speed.decode_speedup):
                assert ratio is not None
                assert ratio.median > 0
            assert output.speed.other_cores is not None
            assert not output.speed.stable, "two rounds may agree by chance"
            assert output.memory is not None
            assert output.memory.peak_rss_bytes >= output.memory.baseline_rss_bytes > 10 << 20
        reference = report.reference.speed
        assert reference is not None
        timed = [output for output in report.outputs if output.speed]
        assert reference.rounds == 2 * len(timed) > 2 * 2, "the reference is timed beside every output"
        # Only a process of its own that never imported torch is that small.
        assert onnx.memory.peak_rss_bytes < torch.memory.peak_rss_bytes / 2  # type: ignore[union-attr]

    def test_one_changed_matrix(self, report: ValidationReport) -> None:
        assert ("max_abs_diff", "reference") in failed(report, "pytorch-perturbed")
        assert report.output("pytorch-perturbed").to_reference.mean_kl < 1e-2  # type: ignore[union-attr, operator]

    def test_wrong_scale(self, report: ValidationReport) -> None:
        assert {("max_abs_diff", "reference"), ("mean_kl", "reference")} <= failed(report, "pytorch-scaled")
        assert "the scale is wrong: all 14 adapted modules hold 1.50" in report.output("pytorch-scaled").explanation

    def test_a_wrong_scale_shows_in_stored_weights_even_within_what_4_bits_cost(self, report: ValidationReport) -> None:
        assert {name for name, _ in failed(report, "pytorch-int4")} == {"module_strength_error"}
        assert "the scale is wrong: all 14 adapted modules hold 0.75" in report.output("pytorch-int4").explanation

    def test_lost_adapter_is_recognised(self, report: ValidationReport) -> None:
        output = report.output("pytorch-base")
        assert "behaves like the base model" in output.explanation
        assert output.to_base is not None
        assert output.to_base.mean_kl == pytest.approx(0, abs=1e-9)

    def test_nan(self, report: ValidationReport) -> None:
        output = report.output("pytorch-nan")
        assert ("non_finite_logits", "itself") in failed(report, "pytorch-nan")
        assert "NaN" in output.explanation
        assert output.to_reference is not None
        assert output.to_reference.mean_kl is None

    def test_rounding_beyond_the_level(self, report: ValidationReport) -> None:
        assert ("mean_kl", "reference") in failed(report, "pytorch-fp16")
        assert "rounded more coarsely than its type" in report.output("pytorch-fp16").explanation

    @pytest.mark.parametrize("name", ["pytorch-truncated", "onnx-corrupt"])
    def test_files_that_do_not_load(self, report: ValidationReport, name: str) -> None:
        output = report.output(name)
        assert output.status is OutputStatus.FAILED
        assert output.status_reason == "VALIDATION_IMPOSSIBLE"
        assert "could not be loaded" in output.explanation
        assert output.remedy

    def test_batch_that_the_export_fixed(self, report: ValidationReport) -> None:
        cases = report.output("onnx-batch1").cases
        assert [case.name for case in cases] == [case.name for case in report.output("onnx").cases]
        assert not any(case.skipped for case in cases)

    @pytest.mark.parametrize("name", ["onnx-nomask", "onnx-nomask1"])
    def test_ignored_mask(self, report: ValidationReport, name: str) -> None:
        assert report.output(name).to_reference.max_abs_diff < 1e-3  # type: ignore[union-attr, operator]
        names = failed(report, name)
        assert {("left_padded.max_abs_diff", "itself"), ("left_padded.mean_kl", "itself")} <= names
        assert all(name.startswith(("left_padded", "decode_left_padded")) for name, _ in names)
        assert "attention_mask" in report.output(name).explanation

    def test_wrong_cache(self, report: ValidationReport) -> None:
        names = failed(report, "onnx-cache")
        assert ("decode.max_abs_diff", "itself") in names
        assert not any(name.startswith(("left_padded", "max_abs", "mean_kl", "top1")) for name, _ in names)
        assert "KV cache" in report.output("onnx-cache").explanation

    @pytest.mark.skipif(bool(gpu_targets()), reason="this machine has a GPU: the engine is tried")
    def test_engine_without_gpu_is_not_run(self, report: ValidationReport) -> None:
        output = report.output("tensorrt")
        assert output.status is OutputStatus.NOT_RUN
        assert not output.passed
        assert "no NVIDIA GPU" in output.status_reason

    def test_facts_for_the_result(self, result: tuple[ValidationReport, Context]) -> None:
        report, ctx = result
        assert ctx.facts["validation_passed"] is False
        assert ctx.facts["failed_outputs"] == list(report.failed_outputs)
        assert ctx.facts["outputs"]["onnx"]["peak_rss_bytes"] > 0
        assert any("onnx-nomask" in warning for warning in ctx.facts["warnings"])
        json.dumps(ctx.facts)


def run(inputs: dict[str, Path], ctx: Context, **params: Any) -> ValidationReport:
    return ValidationReport.read(STAGE.run(inputs, ValidateParams(**PARAMS, **params), ctx)["validation"])


def test_without_comparison_outputs_are_only_run(tiny: Models, tiny_onnx: Path, context: Context) -> None:
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "onnx": tiny_onnx}
    report = run(inputs, context, compare_outputs=False, benchmark_performance=False)
    onnx = report.output("onnx")
    assert onnx.passed
    assert [check.name for check in onnx.checks] == ["non_finite_logits"]
    assert onnx.speed is None
    assert onnx.to_reference is None
    assert report.reference.perplexity is None
    assert "built-in" in report.inputs.text_source
    assert not report.inputs.held_out


@pytest.mark.slow
def test_a_model_of_short_texts_is_timed_within_them(tiny: Models, tiny_onnx: Path, context: Context) -> None:
    """A graph does not say how long a text may be: past its table of positions it would end with an error."""
    inputs = {"base": tiny.base, "pytorch": tiny.base, "onnx": tiny_onnx}
    params = ValidateParams(**{**PARAMS, "sequence_length": 126, "compare_outputs": False})
    report = ValidationReport.read(STAGE.run(inputs, params, context)["validation"])
    for name in ("pytorch", "onnx"):
        speed = report.output(name).speed
        assert report.output(name).passed
        assert speed is not None
        assert (speed.prefill_tokens, speed.decode_tokens_per_second > 0) == (122, True)


@pytest.mark.slow
def test_limits_can_be_replaced(tiny: Models, tiny_onnx: Path, held_out: Path, context: Context) -> None:
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "heldout": held_out, "onnx": tiny_onnx}
    limits = {"float32": {"max_abs_diff": 1e-12, "mean_kl": 1e-30}}
    report = run(inputs, context, limits=limits, benchmark_performance=False)
    assert ("mean_kl", "reference") in failed(report, "onnx")
    assert report.output("onnx").limits.mean_kl == 1e-30  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "what",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adapter", "base")),
        *("tokenizer", "heldout", "outputs", "limits"),
    ],
)
def test_unusable_inputs_raise(tiny: Models, tiny_onnx: Path, tmp_path: Path, context: Context, what: str) -> None:
    base, adapter, held_out = tmp_path / "base", tmp_path / "adapter", tmp_path / "heldout"
    shutil.copytree(tiny.base, base)
    shutil.copytree(tiny.adapter, adapter)
    held_out.mkdir()
    (held_out / "text.txt").write_text("" if what == "heldout" else TEXT)
    inputs = {"base": base, "adapter": adapter, "heldout": held_out, "onnx": tiny_onnx}
    params: dict[str, Any] = {}
    match what:
        case "adapter":
            (adapter / "adapter_config.json").write_text("{")
        case "base":
            (base / "model.safetensors").write_bytes(b"")
        case "tokenizer":
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (base / name).unlink()
        case "outputs":
            del inputs["onnx"]
        case "limits":
            params["limits"] = {"int5": {"mean_kl": 1.0}}
    with pytest.raises(ModelExportError) as caught:
        run(inputs, context, **params)
    assert caught.value.reason == "VALIDATION_IMPOSSIBLE"
    assert caught.value.remedy
    assert not any(context.workdir.iterdir())
