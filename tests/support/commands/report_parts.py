"""Invented parts of a report, for tests of its rendering."""

from __future__ import annotations

from datetime import UTC, datetime

from slipway.results.result import AttemptResult, ExportResult, FormatResult
from slipway.validation.answers import AnswerComparison, AnswerExample, LongContinuation, Score
from slipway.validation.comparisons import Check, GreedyComparison, LogitComparison
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine, Memory, Speed
from slipway.validation.verdicts import Limits

ENGINE = Engine(runtime="onnxruntime", version="onnxruntime 1.31", stored_dtype="int4", compute_dtype="float32")


def comparison(kl: float | None, *, difference: float = 0.3, top1: float = 0.93) -> LogitComparison:
    return LogitComparison(
        tokens=1280,
        max_abs_diff=difference,
        mean_abs_diff=0.01,
        mean_kl=kl,
        max_kl=0.5,
        top1_agreement=top1,
        kl_by_position=() if kl is None else tuple(kl * (1 + part / 16) for part in range(32)),
    )


def output(name: str, kl: float | None = 0.004, *, limit: float = 0.02) -> OutputValidation:
    passed = kl is not None and kl <= limit
    check = Check(name="mean_kl", value=kl, limit=limit, comparison="<=", passed=passed, unit="nats/token")
    return OutputValidation(
        name=name,
        format=name.partition("-")[0],
        level=name.partition("-")[2] or "none",
        status=OutputStatus.PASSED if passed else OutputStatus.FAILED,
        size_bytes=2_400_000,
        engine=ENGINE,
        to_reference=comparison(kl),
        to_base=comparison(1.1),
        greedy=GreedyComparison(
            prompts=4,
            new_tokens=16,
            exact_match_share=0.5,
            mean_common_prefix=9.0,
            example_prompt="def f(",
            example_reference="self):",
            example_output="a < b",
        ),
        continuation=LongContinuation(
            prompts=1,
            new_tokens=256,
            same_tokens=40.0,
            mean_kl=kl,
            top1_agreement=0.97,
            cache_kl=1e-9,
            repetition=0.1,
            reference_repetition=0.09,
            example_reference="self):\n    return 1",
            example_output="self):\n    return 2",
        ),
        answers=AnswerComparison(
            inputs=20,
            with_expected=18,
            agreement=0.9,
            scores=(Score(name="as_expected", value=0.8, reference=0.85),),
            not_run=("chrf, bleu: sacrebleu is not installed: pip install 'slipway-ml[metrics]'",),
            examples=(AnswerExample(input="What is 1 + 1?", expected="2", reference="2", output="11"),),
        ),
        perplexity=76.4,
        speed=Speed(
            threads=1,
            device="cpu",
            dtype="float32",
            prefill_tokens=128,
            prefill_ms=5.03,
            decode_tokens_per_second=3306.5,
        ),
        load_seconds=0.173,
        memory=Memory(peak_rss_bytes=100_159_488, baseline_rss_bytes=64_000_000),
        limits=Limits(
            level="int4",
            max_abs_diff=None,
            mean_kl=limit,
            top1_agreement=0.9,
            perplexity_ratio=1.1,
            case_mean_kl=0.06,
            adapter_strength_error=0.1,
        ),
        checks=(check,),
        explanation="" if passed else "mean_kl is 0.4: the scale is wrong",
        remedy="" if passed else "use a smaller group_size",
    )


def not_run(name: str) -> OutputValidation:
    return OutputValidation(
        name=name, format=name, status=OutputStatus.NOT_RUN, status_reason="this machine has no NVIDIA GPU"
    )


def validation(*outputs: OutputValidation) -> ValidationReport:
    return ValidationReport(
        reference=Reference(
            description="base + adapter", engine=ENGINE, perplexity=76.0, base_perplexity=165.0, adapter_effect_kl=0.8
        ),
        inputs=ValidationInputs(
            samples=10,
            sequence_length=128,
            tokens=1280,
            requested_samples=10,
            vocabulary=1024,
            seed=0,
            prompts=4,
            new_tokens=16,
            text_source="held-out text, 1 file",
            held_out=True,
        ),
        outputs=outputs,
        seconds=17.1,
    )


def result(report: ValidationReport | None, names: tuple[str, ...], **more: object) -> ExportResult:
    formats = {name: FormatResult(digest="sha256:" + "0" * 64, size_bytes=2_400_000) for name in names}
    if report:
        for found in report.outputs:
            formats[found.name] = formats[found.name].model_copy(update={"status": found.status.value})
    values: dict[str, object] = {
        "export_id": "abc123",
        "timestamp": datetime(2026, 11, 21, 2, 0, tzinfo=UTC),
        "success": True,
        "output_directory": "/models/qwen3-finetuned_20261121",
        "formats": formats,
        "original_size_bytes": 12_900_000,
        "attempts": (
            AttemptResult(
                task="onnx", stage="onnx_export", number=1, outcome="failed", reason="OPSET_UNSUPPORTED",
                error_message="opset 7", params={"opset": 7.0}, duration_seconds=2.5,
            ),
            AttemptResult(
                task="onnx", stage="onnx_export", number=2, outcome="succeeded", rule="raise-opset",
                params={"opset": 20.0}, duration_seconds=71.0, peak_memory_bytes=368_000_000,
                memory_sample_seconds=2.0, memory_samples_bytes=tuple(10_000_000 * (1 + min(part, 35)) for part in range(36)),
            ),
            AttemptResult(task="merge", stage="merge", number=1, outcome="succeeded", reused=True),
        ),
    }  # fmt: skip
    return ExportResult.model_validate({**values, **more})


LINEAGE = {
    "labels": {"base_model": "qwen3-base", "checkpoint": "checkpoint-100", "model_name": "qwen3-finetuned"},
    "sources": {"base": "sha256:" + "1" * 64, "adapter": "sha256:" + "2" * 64},
    "tools": {"slipway": "0.1.0", "merge": {"version": 1, "torch": "2.13.0"}},
}
