"""Verdicts on IRs: right ones are judged against the weights that they store, and planted faults are called by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.verdicts import Answer
from slipway_openvino.params import DECODER_MODEL
from slipway_validate.judging.yardsticks import Measured
from support.models.judged_families import make
from support.models.openvino_models import LEVELS, Ir, every_level, exported
from support.models.validated_here import Validated
from support.models.validation_models import Models

LAYER = "model.layers.1."
KEY, DOWN = f"{LAYER}self_attn.k_proj", f"{LAYER}mlp.down_proj"
Change = Callable[[Ir], object]


@dataclass
class Judged:
    """Outputs of one model and their verdicts."""

    run: Validated
    outputs: dict[str, Path]
    measured: Measured = field(default_factory=Measured)
    found: dict[str, OutputValidation] = field(default_factory=dict)

    def judge(self, merged: Path) -> Judged:
        outputs = {"pytorch": merged, **self.outputs}
        self.measured = self.run.read_weights(outputs)
        self.found = {name: self.run.output(name, folder) for name, folder in outputs.items()}
        return self


def zeroed(ir: Ir) -> None:
    ir.change(ir.constant(f"{DOWN}.weight.T"), lambda values: values.fill(0))


def transposed(ir: Ir) -> None:
    def turn(values: np.ndarray) -> None:
        values[:] = values.T.copy()

    ir.change(ir.constant(f"{KEY}.weight.T"), turn)


def halves_zeroed(ir: Ir) -> None:
    ir.change(ir.constant(f"{DOWN}.weight.T_compressed"), lambda values: values.fill(0))


def doubled_scale(suffix: str) -> Change:
    def double(values: np.ndarray) -> None:
        values *= 2

    return lambda ir: ir.change(ir.scale(f"{DOWN}.weight.T{suffix}"), double)


def read_otherwise(ir: Ir) -> None:
    """Let the product multiply with the stored weight transposed: what is stored is right, and what is computed is not."""
    text = ir.path.read_text()
    layer = text.index('type="MatMul"', text.index(f'name="{KEY}.weight.T"'))
    at = text.index('transpose_b="false"', layer)
    ir.path.write_text(
        f'{text[:at]}transpose_b="true"{text[at:].removeprefix("transpose_b=" + chr(34) + "false" + chr(34))}'
    )


def without_names(ir: Ir) -> None:
    """Name integers as files of earlier versions do."""
    text = ir.path.read_text()
    ir.path.write_text(
        re.sub(r'name="[^"]+\.q8(\.rows\.\d+x\d+)?"', lambda found: f'name="Constant_{found.start()}"', text)
    )


FAULTS: dict[str, tuple[str, Change]] = {
    "openvino-zeroed": ("", zeroed),
    "openvino-transposed": ("", transposed),
    "openvino-otherwise": ("", read_otherwise),
    "openvino-fp16_zeroed": ("fp16", halves_zeroed),
    "openvino-int8_scale": ("int8", doubled_scale(".q8")),
    "openvino-int4_scale": ("int4", doubled_scale(".q4")),
    "openvino-unnamed": ("int8", without_names),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    tiny = Models(tmp_path_factory.mktemp("tiny"))
    outputs = every_level(exported(tiny.merged, tiny.root / "graph"), tiny.root / "levels")
    right = {level: outputs[name] for name, level in LEVELS.items()}
    for name, (level, plant) in FAULTS.items():
        plant(Ir(right[level], tiny.root / name))
        outputs[name] = tiny.root / name
    (work := tiny.root / "work").mkdir()
    return Judged(Validated(tiny.base, tiny.adapter, work, merged=tiny.merged), outputs).judge(tiny.merged)


@pytest.mark.parametrize("name", LEVELS)
def test_a_right_output_is_judged_against_its_stored_weights(decoder: Judged, name: str) -> None:
    found = decoder.found[name]
    check_faithful(found)
    assert found.survival is not None
    assert len(found.survival.modules) == 14
    assert not found.survival.left_out
    assert not found.survival.faulty
    assert not found.notes
    strengths = [each.strength or 0.0 for each in found.survival.modules]
    assert all(abs(strength - 1) < 0.1 for strength in strengths)


def check_faithful(found: OutputValidation) -> None:
    assert found.faithful.answer is Answer.PASSED, found.explanation
    assert found.faithful.yardstick == "stored weights"
    assert "away from PyTorch on its own weights" in found.faithful.said
    assert found.to_stored is not None
    assert (found.to_stored.mean_kl or 0.0) < 1e-7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openvino-zeroed", rf"{DOWN} has lost the adapter: it holds 0\.0\d of its update"),
        ("openvino-transposed", rf"{KEY} has lost the adapter: it holds -?0\.\d+ of its update"),
        ("openvino-fp16_zeroed", rf"{DOWN} has lost the adapter: it holds 0\.0\d of its update"),
        ("openvino-int8_scale", rf"{DOWN} holds (2|1\.9\d) of its update instead of 1"),
        ("openvino-int4_scale", rf"{DOWN} holds (2|1\.9\d) of its update instead of 1"),
    ],
    ids=["zeroed", "transposed", "fp16-zeroed", "int8-scale", "int4-scale"],
)
def test_a_fault_of_stored_weights_is_named(decoder: Judged, name: str, said: str) -> None:
    """The module is called, and only that one; the graph does compute with what is stored."""
    found = decoder.found[name]
    assert found.status is OutputStatus.FAILED
    assert re.search(said, found.explanation), found.explanation
    assert found.survival is not None
    assert not any("coarse" in note for note in found.notes)
    assert [each.module for each in found.survival.faulty] == [KEY if "transposed" in name else DOWN]
    assert found.to_stored is not None
    assert (found.to_stored.mean_kl or 0.0) < 1e-7


def test_a_fault_of_the_graph_is_not_blamed_on_the_weights(decoder: Judged) -> None:
    found = decoder.found["openvino-otherwise"]
    assert found.status is OutputStatus.FAILED
    assert found.faithful.yardstick == "stored weights"
    assert "it computes something else than its own weights" in found.explanation
    assert found.survival is not None
    assert not found.survival.faulty


def test_weights_without_names_are_not_read_and_the_merged_model_is_the_yardstick(decoder: Judged) -> None:
    found = decoder.found["openvino-unnamed"]
    assert decoder.measured.missing["openvino-unnamed"] == "it has no weight model.embed_tokens.weight"
    assert found.faithful.answer is Answer.PASSED
    assert found.faithful.yardstick == "merged model"
    assert "away from the merged model" in found.faithful.said
    assert found.survival is not None
    assert found.survival.not_run == "the output has no weight of this name"
    assert any("was not compared" in note for note in found.notes)


@pytest.mark.slow
def test_a_classifier_is_judged_against_its_stored_weights(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "model")
    assert model.adapter is not None
    merged = model.outputs()["pytorch"]
    (work := tmp_path / "work").mkdir()
    run = Validated(model.base, model.adapter, work, merged=merged)
    judged = Judged(run, every_level(exported(merged, tmp_path / "graph"), tmp_path / "levels")).judge(merged)
    assert not judged.measured.missing
    for name in LEVELS:
        found = judged.found[name]
        check_faithful(found)
        assert found.survival is not None
        assert len(found.survival.modules) == 4
        assert not found.survival.faulty


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_both_models_of_a_pair_are_judged_against_what_they_store(name: str, tmp_path: Path) -> None:
    """Also where positions are looked up by code of their own; and a fault in the decoder's model is named."""
    model = make(name, tmp_path / "model")
    assert model.adapter is not None
    merged = model.outputs()["pytorch"]
    outputs = every_level(exported(merged, tmp_path / "graph"), tmp_path / "levels")
    ir = Ir(outputs["openvino"], tmp_path / "fault", DECODER_MODEL)
    text = ir.path.read_text()
    (weight, *_) = re.findall(r'name="([^"]+(?:v_proj|SelfAttention\.v)\.weight\.T)"', text)
    ir.change(ir.constant(weight), lambda values: values.fill(0))
    (work := tmp_path / "work").mkdir()
    run = Validated(model.base, model.adapter, work, merged=merged)
    judged = Judged(run, {**outputs, "openvino-fault": ir.folder}).judge(merged)
    assert not judged.measured.missing
    for output in LEVELS:
        check_faithful(judged.found[output])
    fault = judged.found["openvino-fault"]
    assert fault.status is OutputStatus.FAILED
    assert fault.survival is not None
    assert [each.module for each in fault.survival.faulty] == [weight.removesuffix(".weight.T")]
    assert weight.removesuffix(".weight.T") in fault.explanation
