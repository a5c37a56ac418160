"""Models that take sound beside text are compared behind sound too: right merges pass, faults that only a sound shows fail by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import is_timm_available

from slipway.machine.absent_parts import REMEDY
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, SPEECH
from slipway.proof.runtime import LanguageModel, NotRunnable
from slipway.proof.sights import read_sights
from slipway.proof.sounds import make_sound
from slipway.stage import Context
from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputStatus, OutputValidation, ValidationReport
from slipway.validation.pictures import PictureComparison, PictureEffect, Sense
from slipway.validation.speed import Engine
from slipway.validation.verdicts import Answer
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.judging import pictures
from slipway_validate.judging.explain import explain_checks
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.preparation import count_pictures, expected_senses
from slipway_validate.protocol.pictures import PICTURE_TOKENS, Looked
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.runner.pictures.looking import look
from slipway_validate.runner.pictures.making import senses_of
from slipway_validate.stage import STAGE as VALIDATE
from support.models.current_kinds import Kind, make_kind
from support.models.validated_here import PARAMS, Validated

NAME = "qwen3-asr"
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Tensors], None]


def merged(folder: Path, name: str = NAME) -> tuple[Kind, Path]:
    kind = make_kind(name, folder / "kind", dtype=torch.bfloat16)
    (folder / "merged").mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return kind, MERGE.run(inputs, MergeParams(verify="spot"), Context(workdir=folder / "merged"))["pytorch"]


def judge(kind: Kind, right: Path, work: Path, outputs: Mapping[str, Path]) -> dict[str, OutputValidation]:
    work.mkdir()
    run = Validated(kind.base, kind.adapter, work, merged=right)
    run.read_weights(outputs)
    return {name: run.output(name, folder) for name, folder in outputs.items()}


def behind(verdict: OutputValidation) -> PictureComparison:
    assert verdict.sound is not None
    assert verdict.sound.sense is Sense.SOUND
    return verdict.sound


@pytest.mark.parametrize("kind_name", [NAME, "voxtral", "gemma4-audio"])
def test_right_outputs_pass_behind_sound(kind_name: str, tmp_path: Path) -> None:
    """The merge, its levels, and the adapter beside its base."""
    kind, right = merged(tmp_path, kind_name)
    outputs = {"pytorch": right, "adapter": kind.adapter}
    for level in ("fp16", "int8"):
        (work := tmp_path / level).mkdir()
        params = QuantizeParams(format="pytorch", level=level)
        outputs[f"pytorch-{level}"] = QUANTIZE.run({"model": right}, params, Context(workdir=work))["model"]
    for name, verdict in judge(kind, right, tmp_path / "work", outputs).items():
        found = behind(verdict)
        assert verdict.passed, (name, verdict.explanation)
        assert not found.not_run
        assert (found.pictures, found.tokens) == (4, 96)
        assert found.kept is not None
        assert found.kept > (0.9 if name == "pytorch-int8" else 0.99)
        assert found.said.startswith("sound: behind 4 sounds, ")
        assert found.faithful.answer in (Answer.PASSED, Answer.NOT_JUDGED)
        assert "sound.mean_kl" in {check.name for check in verdict.checks}
        assert not any(check.name.startswith("pictures.") for check in verdict.checks)
        assert verdict.pictures is None
    (sight, *_) = read_sights(tmp_path / "work" / "samples", Sense.SOUND)
    assert sight.sense is Sense.SOUND
    heard = sight.arguments.get("input_features_mask")
    assert (kind_name == "voxtral") is (heard is None)
    assert heard is None or heard.sum() < heard.size


def lose(tensors: Tensors, base: Tensors) -> None:
    name = "model.multi_modal_projector.linear_2.weight"
    tensors[name] = base[name].clone()


def scale(tensors: Tensors, _: Tensors) -> None:
    tensors["model.audio_tower.ln_post.weight"] *= 1.05


def exchange_layers(tensors: Tensors, _: Tensors) -> None:
    for name in [name for name in tensors if ".audio_tower.layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


PLANTED: Mapping[str, tuple[Change, str]] = {
    "lost": (lose, "multi_modal_projector.linear_2"),
    "scaled": (scale, "audio_tower.ln_post.weight"),
    "swapped": (exchange_layers, "audio_tower.layers.0."),
}


def test_faults_that_only_a_sound_shows_fail_by_name(tmp_path: Path) -> None:
    kind, right = merged(tmp_path)
    outputs = {"pytorch": right}
    for fault, (change, _) in PLANTED.items():
        outputs[f"pytorch-{fault}"] = folder = tmp_path / fault
        shutil.copytree(right, folder)
        tensors = load_file(folder / WEIGHTS)
        change(tensors, load_file(kind.base / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    verdicts = judge(kind, right, tmp_path / "work", outputs)
    assert verdicts["pytorch"].passed
    for fault, (_, named) in PLANTED.items():
        verdict = verdicts[f"pytorch-{fault}"]
        assert not verdict.passed, fault
        assert named in verdict.explanation, (fault, verdict.explanation)
        of_results = {each.name for each in verdict.failed_checks if not each.name.startswith("module_")}
        assert of_results == {"sound.mean_kl"}, fault
        assert behind(verdict).faithful.answer is Answer.FAILED
    assert pictures.CAUSES["sound"] in verdicts["pytorch-scaled"].explanation
    assert "behind sound" in verdicts["pytorch-scaled"].explanation


def test_a_runtime_without_sound_is_not_run_by_name(tmp_path: Path) -> None:
    class Text(LanguageModel):
        engine = Engine(runtime="onnxruntime")

    with pytest.raises(NotRunnable, match=r"^onnxruntime is given no sound here$"):
        look(Text(), [SimpleNamespace(sense=Sense.SOUND)], report=lambda *_: None)  # type: ignore[abstract, list-item]
    said = Looked(sense=Sense.SOUND, not_run="onnxruntime is given no sound here")
    (tmp_path / Sense.SOUND).mkdir()
    said.write(tmp_path)
    read = Looked.read(tmp_path, Sense.SOUND)
    assert Looked.read(tmp_path) is None
    assert read == said
    compared = pictures.begin_comparison(PictureEffect(sense=Sense.SOUND, pictures=4, tokens=96), read)
    assert compared.said == "sound: not run (onnxruntime is given no sound here)"
    assert not pictures.check_unreadable(compared)


def test_an_output_that_cannot_compute_sound_fails_by_name() -> None:
    reference = PictureEffect(sense=Sense.SOUND, pictures=4, tokens=96)
    broken = pictures.begin_comparison(reference, Looked(sense=Sense.SOUND, failed="its encoder is gone"))
    assert [check.name for check in pictures.check_unreadable(broken)] == ["sound.unreadable"]
    assert pictures.explain(broken)[0] == "it cannot compute sound: its encoder is gone"


def test_warnings_name_what_was_not_compared() -> None:
    heard = PictureEffect(sense=Sense.SOUND, pictures=4, tokens=96, effect_kl=0.5)
    hears, both = ModelConfig({"audio_config": {}}), ModelConfig({"audio_config": {}, "vision_config": {}})
    assert pictures.list_warnings(hears, {Sense.SOUND: heard}) == []
    unseen = PictureEffect(not_run="nothing is known of its pictures")
    (said,) = pictures.list_warnings(both, {Sense.PICTURES: unseen, Sense.SOUND: heard})
    assert said.startswith(
        "the model takes images too, and its outputs were compared on text and sound (nothing is known of its pictures)"
    )
    seen = PictureEffect(pictures=4, tokens=96, effect_kl=1e-4)
    other, weak = pictures.list_warnings(both, {Sense.PICTURES: seen})
    assert other.startswith("the model takes sound too, and its outputs were compared on text and pictures: of")
    assert weak.startswith("the adapter has almost no effect behind pictures")
    (alone,) = pictures.list_warnings(both, {Sense.PICTURES: unseen})
    assert "compared on text alone (nothing is known of its pictures)" in alone


def test_a_reference_with_pictures_is_written_as_before(tmp_path: Path) -> None:
    """The sense is in the files of sound alone, so that stored references stay the same bytes."""
    (tmp_path / Sense.PICTURES).mkdir()
    Looked(pictures=4, tokens=24).write(tmp_path)
    (file,) = (tmp_path / Sense.PICTURES).iterdir()
    assert json.loads(file.read_text()) == {"pictures": 4, "tokens": 24, "not_run": "", "failed": ""}
    assert PictureEffect.model_validate_json('{"pictures": 4}').sense is Sense.PICTURES
    heard = PictureComparison(sense=Sense.SOUND).model_dump_json()
    assert PictureComparison.model_validate_json(heard).sense is Sense.SOUND


def test_the_same_sound_is_made_each_time_and_none_for_other_models() -> None:
    config = SimpleNamespace(
        model_type="qwen3_asr", audio_token_id=7, audio_config=SimpleNamespace(n_window=5, num_mel_bins=3)
    )
    one, again, other = (make_sound(config, seed=seed) for seed in (0, 0, 1))
    assert one is not None
    assert again is not None
    assert other is not None
    assert one.token == 7
    assert one.arguments["input_features"].shape == (1, 3, 20)
    assert np.array_equal(one.arguments["input_features"], again.arguments["input_features"])
    assert not np.array_equal(one.arguments["input_features"], other.arguments["input_features"])
    assert make_sound(SimpleNamespace(model_type="qwen3", audio_token_id=7), seed=0) is None


def test_a_reference_without_results_is_told_what_it_lacks(tmp_path: Path) -> None:
    """A model of sound alone has no pictures to miss."""
    found = pictures.describe_effects(tmp_path, {}, expected=(Sense.SOUND,))
    assert found == {Sense.SOUND: PictureEffect(sense=Sense.SOUND, not_run=pictures.EARLIER[Sense.SOUND])}
    assert found[Sense.SOUND].not_run.startswith("the reference has no sound: an earlier version made it")
    assert list(pictures.describe_effects(tmp_path, {}, expected=tuple(Sense))) == list(Sense)
    assert pictures.describe_effects(tmp_path, {}, expected=()) == {}
    assert pictures.describe_effects(None, {}, expected=(Sense.SOUND,)) == {}


def test_results_of_another_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / Sense.SOUND).mkdir()
    Looked(sense=Sense.SOUND, pictures=4, tokens=24).write(tmp_path)
    assert Looked.read(tmp_path, Sense.SOUND) is not None
    (tmp_path / Sense.SOUND).rename(tmp_path / Sense.PICTURES)
    with pytest.raises(ValueError, match=r"^pictures/pictures\.json is of sound$"):
        Looked.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "senses"),
    [
        ({"model_type": "gemma4", "vision_config": {}, "audio_config": {}}, tuple(Sense)),
        ({"model_type": "gemma4", "vision_config": {}, "audio_config": None}, (Sense.PICTURES,)),
        ({"model_type": "voxtral", "audio_config": {}}, (Sense.SOUND,)),
        ({"model_type": "gemma3n", "vision_config": {}, "audio_config": {}}, tuple(Sense)),
        ({"model_type": "qwen2_audio", "audio_config": {}}, (Sense.PICTURES,)),
        ({"model_type": ["voxtral"], "audio_config": {}}, (Sense.PICTURES,)),
        ({"model_type": "gemma4"}, ()),
    ],
)
def test_senses_are_those_that_the_reference_computes(config: dict[str, object], senses: tuple[Sense, ...]) -> None:
    """As the reference's process finds them in the configuration's class; sound takes no prompt from pictures."""
    told = ModelConfig(config | {"architectures": ["XForConditionalGeneration"], "vocab_size": 1000})
    assert expected_senses(told, DECODER) == senses
    assert expected_senses(told, SPEECH) == ()
    whole = SimpleNamespace(**{"vision_config": None, "audio_config": None} | config, audio_token_id=7)
    if senses and isinstance(config["model_type"], str):
        assert senses_of(whole) == senses
    room = 8 * 3 * 4 * 1000 * 4 * PICTURE_TOKENS  # of three prompts
    asked = SampleParams(max_logit_bytes=max(room, 1 << 20))
    assert count_pictures(told, DECODER, asked) == (3 if senses else 0)


def test_a_fault_behind_both_senses_is_explained_for_both() -> None:
    def failed(sense: Sense) -> Check:
        return Check(
            name=f"{sense}.mean_kl",
            value=1.0,
            limit=0.1,
            comparison="<=",
            passed=False,
            against="stored",
            unit="nats/token",
        )

    output = OutputValidation(
        name="pytorch",
        format="pytorch",
        status=OutputStatus.FAILED,
        checks=tuple(map(failed, Sense)),
        pictures=PictureComparison(blamed="a.weight"),
        sound=PictureComparison(sense=Sense.SOUND, blamed="b.weight"),
    )
    said, remedy = explain_checks(output)
    for sense, blamed in ((Sense.PICTURES, "a.weight"), (Sense.SOUND, "b.weight")):
        assert f"{pictures.CAUSES[sense]}: {blamed}" in said
    assert remedy == pictures.REMEDY
    (one,) = [explain_checks(output.model_copy(update={"checks": (failed(Sense.SOUND),)}))[0]]
    assert pictures.CAUSES["pictures"] not in one


@pytest.mark.parametrize(
    ("kind", "ear"),
    [
        ("qwen3_asr", {"n_window": 10**11, "num_mel_bins": 3}),
        ("voxtral", {"num_mel_bins": 10**9, "max_source_positions": 1500}),
        ("gemma3n", {"input_feat_size": 10**9}),
        ("gemma4", {"subsampling_conv_channels": [10**9]}),
        ("qwen3_asr", {"n_window": 0, "num_mel_bins": 3}),
    ],
)
def test_a_sound_that_needs_all_memory_is_not_made(kind: str, ear: dict[str, object]) -> None:
    config = SimpleNamespace(model_type=kind, audio_token_id=7, audio_config=SimpleNamespace(**ear))
    with pytest.raises(ValueError, match=r"^a sound of it has \d+ frames of \d+ mel bins$"):
        make_sound(config, seed=0)


def test_a_sound_of_more_tokens_than_a_prompt_is_not_made() -> None:
    ear = SimpleNamespace(input_feat_size=16)
    config = SimpleNamespace(model_type="gemma3n", audio_token_id=7, audio_config=ear, audio_soft_tokens_per_image=188)
    made = make_sound(config, seed=0)
    assert made is not None
    assert made.tokens == 188
    assert made.arguments["input_features"].shape == (1, 60, 16)
    config.audio_soft_tokens_per_image = 10**9
    with pytest.raises(ValueError, match=r"^a sound of it takes 1000000000 tokens$"):
        make_sound(config, seed=0)


def test_a_prompt_with_an_unknown_sense_is_refused(tmp_path: Path) -> None:
    kind, right = merged(tmp_path)
    judge(kind, right, tmp_path / "work", {"pytorch": right})
    meta = tmp_path / "work" / "samples" / "sound" / "00" / "sight.json"
    right_one = json.loads(meta.read_text())
    for sense, words in (("smell", "smell"), ("pictures", "the folder sound has a prompt with pictures")):
        meta.write_text(json.dumps(right_one | {"sense": sense}))
        with pytest.raises(ValueError, match=words):
            read_sights(tmp_path / "work" / "samples", Sense.SOUND)


@pytest.mark.slow
def test_a_model_of_images_and_sound_is_compared_behind_both(tmp_path: Path) -> None:
    """A fault of either part fails behind what that part reads, and not behind the other."""
    kind, right = merged(tmp_path, "gemma4-senses")
    outputs = {"pytorch": right}
    faults = {
        "pictures": "model.embed_vision.embedding_projection.weight",
        "sound": "model.embed_audio.embedding_projection.weight",
    }
    for sense, name in faults.items():
        outputs[f"pytorch-{sense}"] = folder = tmp_path / sense
        shutil.copytree(right, folder)
        tensors = load_file(folder / WEIGHTS)
        tensors[name] = load_file(kind.base / WEIGHTS)[name].clone()
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    verdicts = judge(kind, right, tmp_path / "work", outputs)
    for verdict in verdicts.values():
        assert verdict.pictures is not None
        assert not verdict.pictures.not_run
        assert not behind(verdict).not_run
    assert verdicts["pytorch"].passed, verdicts["pytorch"].explanation
    for sense in faults:
        of_results = {
            each.name for each in verdicts[f"pytorch-{sense}"].failed_checks if not each.name.startswith("module_")
        }
        assert f"{sense}.mean_kl" in of_results
        assert all(name.startswith(f"{sense}.") for name in of_results)


@pytest.mark.slow
def test_gemma_3n_is_compared_without_the_library_of_its_images(tmp_path: Path) -> None:
    """Behind pictures too if timm is installed; otherwise the report says what to install, and the part's tensors are delivered all the same."""
    kind, right = merged(tmp_path, "gemma3n-senses")
    lost = shutil.copytree(right, tmp_path / "lost")
    tensors, tower = load_file(right / WEIGHTS), "model.vision_tower.timm_model.conv1.0.weight"
    base = load_file(kind.base / WEIGHTS)
    assert torch.equal(tensors[tower], base[tower])
    name = "model.embed_audio.embedding_projection.weight"
    assert not torch.equal(tensors[name], base[name])
    tensors[name] = base[name].clone()
    save_file(tensors, lost / WEIGHTS, metadata={"format": "pt"})
    outputs = {"pytorch": right, "adapter": kind.adapter, "pytorch-lost": lost}
    verdicts = judge(kind, right, tmp_path / "work", outputs)
    verdict = verdicts["pytorch"]
    assert verdict.passed, verdict.explanation
    assert verdicts["adapter"].passed, verdicts[
        "adapter"
    ].explanation  # the scales that its class computes are not rounded
    assert (behind(verdict).pictures, behind(verdict).not_run) == (4, "")
    assert verdict.pictures is not None
    if is_timm_available():
        assert (verdict.pictures.pictures, verdict.pictures.not_run) == (2, "")
    else:
        assert REMEDY in verdict.pictures.not_run
    assert "sound.mean_kl" in {each.name for each in verdicts["pytorch-lost"].failed_checks}
    assert "embed_audio.embedding_projection" in verdicts["pytorch-lost"].explanation


@pytest.mark.slow
def test_the_stages_themselves_compare_sound(tmp_path: Path) -> None:
    kind, right = merged(tmp_path)
    inputs = {"base": kind.base, "adapter": kind.adapter}
    (tmp_path / "reference").mkdir()
    (tmp_path / "work").mkdir()
    params = {name: value for name, value in PARAMS.items() if name != "benchmark_performance"}
    ctx = Context(workdir=tmp_path / "reference")
    inputs |= {"reference": REFERENCE.run(inputs, SampleParams(**params), ctx)["reference"], "pytorch": right}
    made = VALIDATE.run(inputs, ValidateParams(**params), Context(workdir=tmp_path / "work"))["validation"]
    report = ValidationReport.read(made)
    assert report.reference.pictures is None
    assert report.reference.sound is not None
    assert report.reference.sound.said.startswith("sound: 4 prompts with sound, behind which the adapter moves")
    assert report.output("pytorch").passed
    assert not any("alone" in warning or "sound" in warning for warning in report.warnings)
