"""Every family is compared by what it gives: right outputs of every level pass, and one without the adapter fails by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import WhisperFeatureExtractor

from slipway.base_match.match import measure
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, OutputValidation, ValidationReport
from slipway.validation.verdicts import Answer
from slipway_merge.params import MergeParams
from slipway_merge.stage import run as merge
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.params import ValidateParams
from slipway_validate.stage import STAGE
from support.models import family_models, judged_families
from support.models.judged_families import MAKERS, FamilyModel
from support.models.merge_models import make_family
from support.models.sentence_models import write_modules
from support.models.validated_here import PARAMS, Validated
from support.models.validation_models import TEXT

FIGURES = {
    "gpt2": ("decoder", "mean_kl"),
    "marian": ("encoder-decoder", "mean_kl"),
    "bart": ("encoder-decoder", "mean_kl"),
    "t5": ("encoder-decoder", "mean_kl"),
    "whisper": ("speech encoder-decoder", "mean_kl"),
    "moonshine": ("raw speech encoder-decoder", "mean_kl"),
    "bert-classes": ("sequence classifier", "mean_kl"),
    "bert-labels": ("sequence classifier", "mean_kl"),
    "bert-score": ("sequence classifier", "relative_error"),
    "bert-tokens": ("token classifier", "mean_kl"),
    "bert-answers": ("question answering", "mean_kl"),
    "bert-masked": ("masked language model", "mean_kl"),
    "bert-embeddings": ("feature extraction", "relative_error"),
    "roberta-classes": ("sequence classifier", "mean_kl"),
    "qwen3-classes": ("sequence classifier", "mean_kl"),
}
"""By model: its family, and the figure that its distance is."""
GENERATING = ("gpt2", "marian", "bart", "t5", "whisper", "moonshine")
WITH_LABELS = (*GENERATING, "bert-masked")


def validated(model: FamilyModel, work: Path, *, adapter: bool = True) -> Validated:
    work.mkdir()
    merged = model.root / "pytorch"
    return Validated(
        model.base, model.adapter if adapter else None, work, merged=merged if merged.is_dir() else model.base
    )


def work_of(folder: Path, name: str) -> Context:
    (folder / name).mkdir()
    return Context(workdir=folder / name)


def work_in(folder: Path) -> Path:
    (folder / "work").mkdir()
    return folder / "work"


def failed(output: OutputValidation) -> set[str]:
    return {check.name for check in output.failed_checks}


@pytest.mark.parametrize("name", MAKERS)
def test_right_outputs_pass_and_wrong_ones_fail_by_name(name: str, tmp_path: Path) -> None:
    model = judged_families.make(name, tmp_path / name)
    outputs = model.outputs()
    run = validated(model, tmp_path / "work")
    family, figure = FIGURES[name]
    assert run.reference.family.name == family
    for level, folder in outputs.items():
        found = run.output(level, folder)
        assert found.status is OutputStatus.PASSED, found.explanation
        judged = {check.name for check in found.checks}
        assert judged & {"kept", figure}
        assert found.fit.answer is Answer.PASSED
        assert bool(found.greedy) is (name in GENERATING)
        assert (found.perplexity is not None) is (name in WITH_LABELS)
        assert any(not case.skipped for case in found.cases)
        assert ("native_dtype.mean_kl" in judged or "native_dtype.relative_error" in judged) is (level[-2:] in ("16",))
    lost = run.output("pytorch-noop", model.output("noop", model.base_module()))
    assert lost.explanation.startswith("broken: it behaves like the base model: the adapter is missing from it")
    assert figure in failed(lost)
    assert lost.fit.answer is Answer.FAILED
    weak = run.output("pytorch-weak", model.output("weak", model.merged(factor=0.8)))
    assert "further from the model than rounding its weights" in weak.explanation
    assert weak.faithful.answer is Answer.FAILED


@pytest.mark.parametrize("kind", family_models.CASES)
def test_what_training_saves_of_each_kind_is_merged_and_judged(kind: str, tmp_path: Path) -> None:
    """With whole heads beside the factors, of models that know no padding token or two vocabularies, too."""
    base = family_models.make_family_model(kind, tmp_path / "base")
    adapter = family_models.make_family_adapter(kind, base, tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(type(family_models.CASES[kind].model()).from_pretrained(base), adapter)
    merged.merge_and_unload().save_pretrained(tmp_path / "pytorch")
    if kind == "whisper":
        WhisperFeatureExtractor(feature_size=8, n_fft=400, hop_length=1000, chunk_length=2).save_pretrained(base)
    if kind == "moonshine":
        judged_families.save_raw_extractor(base)
    run = Validated(base, adapter, work_in(tmp_path), merged=tmp_path / "pytorch")
    found = run.output("pytorch", tmp_path / "pytorch")
    assert found.passed, found.explanation
    assert found.adapter_strength == pytest.approx(1, abs=1e-4)
    lost = run.output("pytorch-noop", base)
    assert "behaves like the base model" in lost.explanation


@pytest.mark.parametrize("kind", ["marian", "t5", "bart", "whisper", "moonshine", "bert-classes"])
def test_what_the_stages_merge_and_quantize_passes_and_generates(kind: str, tmp_path: Path) -> None:
    base = family_models.make_family_model(kind, tmp_path / "base")
    adapter = family_models.make_family_adapter(kind, base, tmp_path / "adapter")
    if kind == "whisper":
        WhisperFeatureExtractor(feature_size=8, hop_length=1000, chunk_length=2).save_pretrained(base)
    if kind == "moonshine":
        judged_families.save_raw_extractor(base)
    outputs = {"pytorch": merge({"base": base, "adapter": adapter}, MergeParams(), work_of(tmp_path, "m"))["pytorch"]}
    for level in ("fp16", "int8"):
        params = QUANTIZE.params(format="pytorch", level=level)
        made = QUANTIZE.run({"model": outputs["pytorch"]}, params, work_of(tmp_path, level))
        outputs[f"pytorch-{level}"] = made["model"]
    run = Validated(base, adapter, work_in(tmp_path), merged=outputs["pytorch"])
    for name, folder in outputs.items():
        found = run.output(name, folder)
        assert found.passed, f"{name}: {found.explanation}"
        assert found.engine is not None
        assert found.engine.stored_dtype == {"pytorch": "float32", "pytorch-fp16": "float16"}.get(name, "int8")
    if run.reference.family.generates:
        packed = type(family_models.CASES[kind].model()).from_pretrained(outputs["pytorch-int8"]).eval()
        source = family_models.inputs_of(kind)
        key = packed.main_input_name
        assert packed.generate(source[key], max_new_tokens=3, do_sample=False).shape[1] > 1


@pytest.mark.parametrize("name", ["gpt2", "marian", "bert-classes", "bert-embeddings"])
def test_a_plain_model_is_its_own_reference(name: str, tmp_path: Path) -> None:
    model = judged_families.make(name, tmp_path / name)
    run = validated(model, tmp_path / "work", adapter=False)
    for level, dtype in {"pytorch": torch.float32, "pytorch-fp16": torch.float16}.items():
        found = run.output(level, model.output(level, model.base_module().to(dtype)))
        assert found.status is OutputStatus.PASSED, found.explanation
        assert (found.to_base, found.adapter_strength) == (None, None)
        assert not any("adapter" in check.name for check in found.checks)
        assert found.notes == ("there is no adapter: its presence and strength were not judged",)
    changed = run.output("pytorch-changed", model.output("changed", model.merged()))
    assert changed.status is OutputStatus.FAILED
    assert "further from the model than rounding its weights" in changed.explanation


def test_a_sentence_encoder_s_vectors_are_compared_too(tmp_path: Path) -> None:
    model = judged_families.make("bert-embeddings", tmp_path / "model")
    right, other, lost = (model.output(name, model.merged()) for name in ("pytorch", "other", "lost"))
    for folder, mode in ((model.base, "mean"), (right, "mean"), (other, "cls")):
        write_modules(folder, settings={"pooling_mode": mode}, normalized=True)
    run = validated(model, tmp_path / "work")
    found = run.output("pytorch", right)
    assert found.passed, found.explanation
    (vector,) = (case for case in found.cases if case.name == "sentence_embedding")
    assert vector.relative_error is not None
    assert vector.relative_error < 1e-5
    assert failed(run.output("pytorch-other", other)) == {"sentence_embedding.relative_error"}
    assert "gives no sentence_embedding" in run.output("pytorch-lost", lost).explanation


def test_speech_without_a_tokenizer_is_taught_drawn_tokens(tmp_path: Path) -> None:
    model = judged_families.make("whisper", tmp_path / "whisper", tokenizer=False)
    merged = model.output("pytorch", model.merged())
    run = validated(model, tmp_path / "work")
    assert "labels are random" in run.prepared.source
    assert run.output("pytorch", merged).passed


def test_speech_needs_its_feature_extractor(tmp_path: Path) -> None:
    model = judged_families.make("whisper", tmp_path / "whisper")
    (model.base / "preprocessor_config.json").unlink()
    with pytest.raises(AssertionError, match="feature extractor"):
        validated(model, tmp_path / "work")


def test_a_classifier_without_a_padding_token_is_judged_row_by_row(tmp_path: Path) -> None:
    """It refuses a batch, and takes padding for text."""
    model = judged_families.make("qwen3-classes", tmp_path / "model")
    unpadded = []
    for name, module in {
        "base": model.base_module(),
        "pytorch": model.merged(),
        "bf16": model.merged().bfloat16(),
    }.items():
        module.config.pad_token_id = None
        unpadded.append(model.output(name, module))
    run = validated(model, tmp_path / "work")
    for name, folder in zip(("pytorch", "pytorch-bf16"), unpadded[1:], strict=True):
        found = run.output(name, folder)
        assert found.passed, found.explanation
        assert {case.name for case in found.cases if case.skipped} >= {"right_padded"}


def test_an_output_of_another_padding_token_fails(tmp_path: Path) -> None:
    model = judged_families.make("qwen3-classes", tmp_path / "model")
    module = model.merged()
    module.config.pad_token_id = 7
    run = validated(model, tmp_path / "work")
    padded = run.output("pytorch", model.output("pytorch", module))
    assert "another pad_token_id" in padded.explanation
    assert all(name.startswith(("right_padded", "left_padded")) for name in failed(padded))


def test_an_output_of_another_family_is_no_output(tmp_path: Path) -> None:
    model, other = (judged_families.make(name, tmp_path / name) for name in ("bert-classes", "bert-tokens"))
    found = validated(model, tmp_path / "work").output("pytorch", other.base)
    assert (
        "token classifier (BertForTokenClassification)): the base model is a sequence classifier" in found.explanation
    )


class TestAsAStage:
    """In processes of their own, as it is run."""

    def run(self, inputs: dict[str, Path], context: Context, **more: Any) -> ValidationReport:
        held_out = context.workdir.parent / "heldout"
        held_out.mkdir(exist_ok=True)
        (held_out / "text.txt").write_text(TEXT)
        params = ValidateParams(**{**PARAMS, **more})
        return ValidationReport.read(STAGE.run({**inputs, "heldout": held_out}, params, context)["validation"])

    @pytest.mark.slow  # the export of Marian by the command shows the same
    def test_marian(self, tmp_path: Path, context: Context) -> None:
        model = judged_families.make("marian", tmp_path / "marian")
        outputs = {"pytorch": model.output("pytorch", model.merged()), "onnx": tmp_path / "onnx"}
        outputs["onnx"].mkdir()
        (outputs["onnx"] / "config.json").write_bytes((model.base / "config.json").read_bytes())
        (outputs["onnx"] / "encoder_model.onnx").write_bytes(b"no graph of an encoder")
        timing = {"benchmark_performance": True, "benchmark_repeats": 1, "benchmark_decode_steps": 2}
        report = self.run({"base": model.base, "adapter": model.adapter, **outputs}, context, **timing)
        assert report.inputs.family == "encoder-decoder"
        assert report.inputs.prompts == 4
        merged = report.output("pytorch")
        assert merged.passed, merged.explanation
        assert merged.speed is not None
        assert merged.speed.prefill_tokens == report.inputs.sequence_length
        assert merged.speed.decode_steps == 2
        onnx = report.output("onnx")
        assert onnx.status is OutputStatus.FAILED
        assert "cannot load onnx/encoder_model.onnx" in onnx.explanation
        assert report.failed_outputs == ("onnx",)

    @pytest.mark.slow  # the export of a plain model by the command shows the same
    def test_a_plain_model(self, tmp_path: Path, context: Context) -> None:
        model = judged_families.make("gpt2", tmp_path / "gpt2")
        report = self.run({"base": model.base, "pytorch": model.base}, context)
        assert report.passed
        assert "without an adapter" in report.reference.description
        assert (report.reference.adapter, report.reference.adapter_effect_kl) == ("", None)
        assert report.reference.gain_per_window == ()
        assert report.reference.perplexity is not None

    def test_a_family_that_nothing_knows_is_not_run(self, tmp_path: Path, context: Context) -> None:
        model = judged_families.make("gpt2", tmp_path / "gpt2")
        config = model.base / "config.json"
        config.write_text(config.read_text().replace("GPT2LMHeadModel", "GPT2DoubleHeadsModel"))
        report = self.run({"base": model.base, "adapter": model.adapter, "pytorch": model.base}, context)
        assert report.not_run_outputs == ("pytorch",)
        assert "GPT2DoubleHeadsModel" in report.output("pytorch").status_reason
        assert not report.passed

    @pytest.mark.parametrize(
        ("kind", "named"),
        [("vit", "ViTForImageClassification"), ("clip", "CLIPModel"), ("t5 without a head", "T5Model"),
         ("bart without a head", "BartModel")],
    )  # fmt: skip
    def test_models_of_images_and_encoder_decoders_without_a_head_are_not_run(
        self, kind: str, named: str, tmp_path: Path, context: Context
    ) -> None:
        make_family(kind).save_pretrained(tmp_path / "base")
        report = self.run(dict.fromkeys(("base", "pytorch", "pytorch-fp16", "onnx"), tmp_path / "base"), context)
        assert report.not_run_outputs == ("onnx", "pytorch", "pytorch-fp16")
        assert all(named in output.status_reason for output in report.outputs)
        assert all(output.checks == () and output.to_reference is None for output in report.outputs)
        assert not report.passed
        assert named in measure(report).reason

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["whisper", "bert-classes"])
    def test_other_families(self, name: str, tmp_path: Path, context: Context) -> None:
        model = judged_families.make(name, tmp_path / name)
        inputs = {"base": model.base, "adapter": model.adapter, "pytorch": model.output("pytorch", model.merged())}
        report = self.run(inputs, context, benchmark_performance=True, benchmark_repeats=1)
        assert report.passed, [(output.name, output.explanation) for output in report.outputs]
        assert all(output.speed is not None for output in report.outputs)
