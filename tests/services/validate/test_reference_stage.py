"""The reference as an artifact: a validation with it gives the figures of one without, and refuses what does not belong to it."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.base_match.match import measure
from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway.validation.findings import ValidationReport
from slipway_validate.judging.distances import LIMITS
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol.messages import RunSpec, Spec
from slipway_validate.protocol.process import start_runner
from slipway_validate.reference.files import FILE, read_reference
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.stage import STAGE as VALIDATE
from slipway_validate.stored_weights import StoredWeights, survival_spec
from support.models.validation_models import Models

SAMPLES: dict[str, Any] = {"sequence_length": 48, "test_samples": 3, "max_new_tokens": 4, "continuation_tokens": 16}
DIGESTS = {"base": "sha256:" + "1" * 64, "adapter": "sha256:" + "2" * 64, "heldout": "sha256:" + "3" * 64}


def context(folder: Path, **digests: str) -> Context:
    folder.mkdir(parents=True)
    return Context(workdir=folder, input_digests=digests)


@pytest.fixture(scope="module")
def sources(tiny: Models, held_out: Path) -> dict[str, Path]:
    return {"base": tiny.base, "adapter": tiny.adapter, "heldout": held_out}


@pytest.fixture(scope="module")
def reference(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    ctx = context(tmp_path_factory.mktemp("reference") / "work", **DIGESTS)
    made = REFERENCE.run(sources, SampleParams(**SAMPLES), ctx)["reference"]
    assert [path.name for path in ctx.workdir.iterdir()] == ["reference"]
    return made


def read(folder: Path, sources: dict[str, Path], work: Path, **digests: str) -> Any:
    ctx = context(work, **{**DIGESTS, **digests})
    return read_reference(folder, inputs=sources, merged_level="float32", tokenizer=sources["base"], ctx=ctx)


def test_it_holds_what_outputs_are_compared_with(reference: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    run, prepared, file = read(reference, sources, tmp_path / "work")
    assert run.logits.shape == run.base_logits.shape == (3, 48, run.result.vocabulary)
    assert not np.array_equal(run.logits, run.base_logits)
    assert run.adapter_effect.mean_kl > 0.05
    assert len(run.result.continuations[0]) == 4
    assert (prepared.text.held_out, prepared.samples.tokens.shape) == (True, (3, 48))
    assert file.params.test_samples == 3


def damaged_json(folder: Path) -> None:
    (folder / FILE).write_text("{")


def another_schema(folder: Path) -> None:
    document = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**document, "schema_version": 2}))


def an_unknown_family(folder: Path) -> None:
    document = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**document, "family": "oracle"}))


def fewer_results(folder: Path) -> None:
    np.save(folder / "logits.npy", np.load(folder / "logits.npy")[:, :-1])


def wider_results(folder: Path) -> None:
    np.save(folder / "base_logits.npy", np.load(folder / "base_logits.npy").astype(np.float64))


def no_results(folder: Path) -> None:
    (folder / "base_logits.npy").unlink()


def a_pickle(folder: Path) -> None:
    np.save(folder / "logits.npy", np.array([object()]), allow_pickle=True)


def choices_for_other_tokens(folder: Path) -> None:
    np.save(folder / "routes.npy", np.zeros((2, 3, 1), np.uint16))


def choices_of_no_experts(folder: Path) -> None:
    np.save(folder / "base_routes.npy", np.zeros((2, 3, 1), np.float32))


def choices_with_a_header_that_describes_no_array(folder: Path) -> None:
    choices_for_other_tokens(folder)
    content = (folder / "routes.npy").read_bytes()
    (folder / "routes.npy").write_bytes(content.replace(b"(2, 3, 1)", b"(True, 1)"))


def negative_tokens(folder: Path) -> None:
    np.save(folder / "samples" / "tokens.npy", -np.load(folder / "samples" / "tokens.npy") - 1)


def fewer_results_of_a_long_continuation(folder: Path) -> None:
    np.save(folder / "long_0.npy", np.load(folder / "long_0.npy")[:-1])


def wider_results_of_a_long_continuation(folder: Path) -> None:
    np.save(folder / "long_0.npy", np.load(folder / "long_0.npy").astype(np.float64))


def no_results_of_a_long_continuation(folder: Path) -> None:
    (folder / "long_0.npy").unlink()


def unknown_test_inputs(folder: Path) -> None:
    (folder / "samples" / "inputs.json").write_text('{"inputs": [{"tokens": "many"}]}')


def broken_test_inputs(folder: Path) -> None:
    (folder / "samples" / "inputs.json").write_text("{")


def an_archive(folder: Path) -> None:
    np.savez(folder / "logits.npz", np.load(folder / "logits.npy"))
    (folder / "logits.npz").replace(folder / "logits.npy")


def too_many_tokens(folder: Path) -> None:
    np.lib.format.open_memmap(folder / "samples" / "tokens.npy", mode="w+", dtype=np.int64, shape=(1 << 15, 1 << 10))


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / FILE).read_text())
    change(document["result"])
    (folder / FILE).write_text(json.dumps(document))


def fewer_continuations(folder: Path) -> None:
    changed(folder, lambda result: result["continuations"].pop())


def a_shorter_continuation(folder: Path) -> None:
    changed(folder, lambda result: result["continuations"][1].pop())


def a_continuation_of_no_tokens(folder: Path) -> None:
    changed(folder, lambda result: result["continuations"][1].__setitem__(0, 1 << 40))


def fewer_divergences(folder: Path) -> None:
    changed(folder, lambda result: result["long"]["cache_divergences"].pop())


def answers_to_nothing(folder: Path) -> None:
    changed(folder, lambda result: result.update(answers={"answers": [[1.0]]}))


@pytest.mark.parametrize(
    "damage",
    [
        damaged_json,
        another_schema,
        an_unknown_family,
        fewer_results,
        wider_results,
        no_results,
        a_pickle,
        choices_for_other_tokens,
        choices_of_no_experts,
        choices_with_a_header_that_describes_no_array,
        negative_tokens,
        fewer_results_of_a_long_continuation,
        wider_results_of_a_long_continuation,
        no_results_of_a_long_continuation,
        an_archive,
        too_many_tokens,
        fewer_continuations,
        a_shorter_continuation,
        a_continuation_of_no_tokens,
        fewer_divergences,
        answers_to_nothing,
        unknown_test_inputs,
        broken_test_inputs,
    ],
)
def test_a_damaged_reference_is_refused(
    reference: Path, sources: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(reference, tmp_path / "damaged"))
    damage(folder)
    with pytest.raises(ModelExportError, match="the reference cannot be used: its files are damaged") as caught:
        read(folder, sources, tmp_path / "work")
    assert caught.value.reason == "VALIDATION_IMPOSSIBLE"
    assert caught.value.remedy


@pytest.mark.slow
@pytest.mark.parametrize("made_before", [True, False])
def test_outputs_of_an_adapter_that_is_not_understood_are_not_run(
    sources: dict[str, Path], tmp_path: Path, made_before: bool
) -> None:
    """Nothing shows that they are wrong: the export goes on, and each says why it was not compared."""
    adapter = Path(shutil.copytree(sources["adapter"], tmp_path / "adapter"))
    weights = adapter / "adapter_model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(weights).items()}
    of = "base_model.model.model.layers.0.self_attn.memory_proj"
    tensors |= {f"{of}.lora_A.weight": torch.ones(4, 32), f"{of}.lora_B.weight": torch.ones(32, 4)}
    save_file(tensors, weights, metadata={"format": "pt"})
    inputs = {**sources, "adapter": adapter}
    if made_before:
        ctx = context(tmp_path / "first", **DIGESTS)
        inputs["reference"] = REFERENCE.run(inputs, SampleParams(**SAMPLES), ctx)["reference"]
        assert [path.name for path in inputs["reference"].iterdir()] == [FILE]
        assert "memory_proj" in ctx.facts["reference"]
    given = {**inputs, "pytorch": sources["base"], "onnx": sources["base"]}
    ctx = context(tmp_path / "work", **DIGESTS)
    report = ValidationReport.read(VALIDATE.run(given, ValidateParams(**SAMPLES), ctx)["validation"])
    assert report.not_run_outputs == ("onnx", "pytorch")
    assert not report.passed
    assert all("memory_proj" in each.status_reason for each in report.outputs)
    assert "memory_proj" in measure(report).reason


def test_the_reference_of_another_adapter_is_refused(reference: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelExportError, match="made from the adapter sha256:2"):
        read(reference, sources, tmp_path / "other", adapter="sha256:" + "9" * 64)
    with pytest.raises(ModelExportError, match="made with an adapter"):
        read(reference, {"base": sources["base"]}, tmp_path / "none")


def test_a_reference_that_does_not_say_of_what_it_is_is_refused(
    reference: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(reference, tmp_path / "nameless"))
    document = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**document, "inputs": {}}))
    with pytest.raises(ModelExportError, match="made from the base nothing"):
        read(folder, sources, tmp_path / "work")


def test_the_reference_of_other_test_inputs_is_refused(
    reference: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelExportError, match="made from the test_inputs nothing, and this validation has sha256:4"):
        read(reference, sources, tmp_path / "work", test_inputs="sha256:" + "4" * 64)


def test_the_time_an_output_may_take_is_the_validation_s_own(
    reference: Path, sources: dict[str, Path], tiny: Models, tmp_path: Path
) -> None:
    params = ValidateParams(**SAMPLES, benchmark_performance=False, output_timeout_seconds=0.05)
    inputs = {**sources, "reference": reference, "pytorch": tiny.merged}
    report = ValidationReport.read(VALIDATE.run(inputs, params, context(tmp_path / "work", **DIGESTS))["validation"])
    assert report.output("pytorch").status_reason == "STAGE_TIMEOUT"


@pytest.mark.slow
def test_a_validation_with_it_gives_the_figures_of_one_without(
    reference: Path, sources: dict[str, Path], tiny: Models, tmp_path: Path
) -> None:
    outputs = {"pytorch": tiny.merged, "pytorch-base": tiny.without_adapter("lost-too")}
    params = ValidateParams(**SAMPLES, benchmark_performance=False)
    found = []
    for name, more in (("with", {"reference": reference}), ("without", {})):
        ctx = context(tmp_path / name)
        report = ValidationReport.read(VALIDATE.run({**sources, **outputs, **more}, params, ctx)["validation"])
        drop = {"memory": True, "load_seconds": True}
        shown = report.model_dump(exclude={"seconds": True, "reference": drop, "outputs": {"__all__": drop}})
        found.append(shown)
    assert found[0] == found[1]
    assert report.failed_outputs == ("pytorch-base",)


@pytest.mark.slow
def test_stored_weights_are_compared_again_if_the_process_beside_the_first_output_ended_early(
    sources: dict[str, Path], tiny: Models, tmp_path: Path
) -> None:
    """A finding must not depend on whether the reference could be loaded to be timed."""
    ctx, spec = context(tmp_path / "work"), survival_spec({**sources, "pytorch": tiny.merged}, LIMITS)
    broken = Spec(
        run=RunSpec(runtime="slipway_validate.runner.runtime_reference:load", model=tmp_path, samples=tmp_path)
    )
    folder = ctx.workdir / "timing"
    with start_runner(broken, folder, ctx, label="timing", timeout_seconds=240) as runner:
        stored = StoredWeights(spec, ctx, folder=ctx.workdir / "stored", timeout_seconds=240, beside=(runner, folder))
        found = stored.survival["pytorch"]
    assert not found.not_run
    assert len(found.modules) == 14


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_a_validation_with_little_memory_runs_one_process_at_a_time(
    reference: Path, sources: dict[str, Path], tiny: Models, tiny_onnx: Path, tmp_path: Path, ahead: bool
) -> None:
    ctx, most = context(tmp_path / "work"), [0]
    if not ahead:
        ctx.max_memory_bytes = 1 << 30
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            with contextlib.suppress(psutil.Error):  # one may end meanwhile
                lines = [child.cmdline() for child in psutil.Process().children()]
                most[0] = max(most[0], sum("outputs" in line[-1] for line in lines if line))

    watching = threading.Thread(target=watch)
    watching.start()
    params = ValidateParams(**SAMPLES, benchmark_repeats=1, benchmark_decode_steps=1)
    inputs = {**sources, "reference": reference, "onnx": tiny_onnx, "pytorch": tiny.merged}
    try:
        report = ValidationReport.read(VALIDATE.run(inputs, params, ctx)["validation"])
    finally:
        done.set()
        watching.join()
    assert report.passed
    assert most[0] == (2 if ahead else 1)
    speed = report.output("onnx").speed
    assert speed is not None
    assert speed.interleaved
    assert report.reference.speed is not None
    assert report.reference.speed.rounds == 2, "beside each output, though the reference was run elsewhere"
