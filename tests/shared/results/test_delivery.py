"""The output directory: complete, checked, atomic, and never over something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from slipway.artifacts import LocalStore
from slipway.errors import ArtifactError, Failure
from slipway.results.delivery import MANIFEST, check_target, deliver, lineage, verify_directory
from slipway.results.outcome import export_failure, export_result, recorded_failure
from slipway.rpc.statuses import status_of
from slipway.rpc.structs import struct_of
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine
from slipway_protos.v1 import export_pb2 as pb


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def put(store: LocalStore, tmp_path: Path, name: str, *, size: int = 3 << 20) -> str:
    folder = tmp_path / "made" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(name.encode() * (size // len(name)))
    (folder / "config.json").write_text(json.dumps({"name": name}))
    return store.put(folder)


@pytest.fixture
def export(store: LocalStore, tmp_path: Path) -> pb.Export:
    """Return a finished export of two formats; the second was quantized at the second attempt."""
    merged, small = put(store, tmp_path, "pytorch"), put(store, tmp_path, "pytorch-int4", size=1 << 20)
    export = pb.Export(
        name="projects/default/exports/e-1",
        state=pb.EXPORT_STATE_SUCCEEDED,
        sources={"base": f"sha256:{'a' * 64}", "adapter": f"sha256:{'b' * 64}"},
        outputs={"pytorch": merged, "pytorch-int4": small},
        labels={"model_name": "run", "checkpoint": "checkpoint-10"},
    )
    export.create_time.FromJsonString("2026-01-02T03:04:05Z")
    first = pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, params=struct_of({"group_size": 64}))
    first.error.CopyFrom(status_of(Failure("OUT_OF_MEMORY", "too large", "use less", "StageError")))
    second = pb.Attempt(number=2, state=pb.TASK_STATE_SUCCEEDED, params=struct_of({"group_size": 32}), rule="smaller")
    export.tasks.add(
        id="merge",
        stage="merge",
        format="pytorch",
        state=pb.TASK_STATE_SUCCEEDED,
        inputs={"base": "source:base", "adapter": "source:adapter"},
        outputs={"pytorch": merged},
        facts=struct_of({"warnings": ["the change of 1 module is lost in rounding"]}),
    )
    export.tasks.add(
        id="quantize-pytorch-int4",
        stage="quantize",
        format="pytorch-int4",
        state=pb.TASK_STATE_SUCCEEDED,
        inputs={"model": "task:merge/pytorch"},
        outputs={"model": small},
        attempts=[first, second],
    )
    return export


def describe(folder: Path) -> None:
    (folder / "report.json").write_text("{}")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_directory_is_delivered_whole_with_checksums_and_lineage(
    export: pb.Export, store: LocalStore, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "run"
    assert deliver(export, target, store=store, describe=describe)
    models = {f"{name}/{file}" for name in export.outputs for file in ("config.json", "model.safetensors")}
    assert files(target) == models | {"report.json", "lineage.json", MANIFEST}
    assert subprocess.run(["sha256sum", "-c", "--quiet", "--strict", MANIFEST], cwd=target).returncode == 0
    assert verify_directory(target) == (6, [])
    assert [path.name for path in target.parent.iterdir()] == ["run"]
    lineage = json.loads((target / "lineage.json").read_text())
    assert lineage["sources"] == dict(export.sources)
    assert lineage["tasks"][1]["params"] == {"group_size": 32}
    assert lineage["tasks"][1]["inputs"] == {"model": export.outputs["pytorch"]}
    assert lineage["tools"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_editing_a_delivered_file_changes_nothing_else(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    target = tmp_path / "out"
    deliver(export, target, store=store, describe=describe)
    (target / "pytorch" / "config.json").write_text("{}")
    weights = target / "pytorch" / "model.safetensors"
    if weights.stat().st_nlink > 1:
        assert weights.stat().st_mode & 0o222 == 0
    fresh = LocalStore(store.root).fetch(export.outputs["pytorch"], tmp_path / "again")
    assert json.loads((fresh / "config.json").read_text()) == {"name": "pytorch"}


def test_weights_of_a_graph_have_no_name_in_the_store(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    """``onnx.load`` refuses external data with a second hard link."""
    made = tmp_path / "made" / "onnx"
    (made / "package").mkdir(parents=True)
    for name in ("model.onnx.data", "other.bin"):
        (made / name).write_bytes(name.encode() * (1 << 18))
    for name in ("package/model.onnx_data", "package/again.onnx_data"):
        (made / name).hardlink_to(made / "model.onnx.data")
    export.outputs["onnx"] = store.put(made)
    deliver(export, tmp_path / "out", store=store, describe=describe)
    weights = tmp_path / "out" / "onnx" / "model.onnx.data"
    assert weights.stat().st_nlink in (1, 3)  # clones have one name each; a copy has the folder's three
    if weights.stat().st_nlink == 3:
        assert weights.stat().st_mode & 0o222 == 0
        assert weights.samefile(tmp_path / "out" / "onnx" / "package" / "again.onnx_data")
    kept = store.fetch(export.outputs["onnx"], tmp_path / "kept") / "model.onnx.data"
    assert not weights.samefile(kept)
    assert weights.read_bytes() == kept.read_bytes()
    assert verify_directory(tmp_path / "out")[1] == []
    shared = tmp_path / "out" / "onnx" / "other.bin"
    assert shared.samefile(kept.with_name("other.bin")) or shared.stat().st_nlink == 1  # a clone


def test_a_delivered_graph_is_loaded_by_onnx(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((512, 1024), np.float32), "weight")
    sizes = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 512]) for name in ("x", "y")]
    sizes[1].type.tensor_type.shape.dim[1].dim_value = 1024
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"])
    graph = onnx.helper.make_graph([node], "g", sizes[:1], sizes[1:], [weight])
    made = tmp_path / "made" / "onnx"
    made.mkdir(parents=True)
    onnx.save(
        onnx.helper.make_model(graph), made / "model.onnx", save_as_external_data=True, location="model.onnx.data"
    )
    export.outputs["onnx"] = store.put(made)
    deliver(export, tmp_path / "out", store=store, describe=describe)
    onnx.load(tmp_path / "out" / "onnx" / "model.onnx")
    onnx.checker.check_model(tmp_path / "out" / "onnx" / "model.onnx", full_check=True)


def test_a_second_delivery_keeps_what_is_whole_and_repairs_what_is_not(
    export: pb.Export, store: LocalStore, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    deliver(export, target, store=store, describe=describe)
    assert not deliver(export, target, store=store, describe=describe)
    (target / "pytorch" / "model.safetensors").unlink()
    assert deliver(export, target, store=store, describe=describe)
    assert verify_directory(target) == (6, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out", "store"]


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.mkdir() or (path / "x").touch()])
def test_something_else_is_never_overwritten(export: pb.Export, store: LocalStore, tmp_path: Path, make) -> None:
    target = tmp_path / "out"
    make(target)
    with pytest.raises(ArtifactError) as caught:
        deliver(export, target, store=store, describe=describe)
    assert caught.value.reason == "OUTPUT_EXISTS"
    assert target.is_file() or files(target) == {"x"}


def test_another_export_s_directory_is_something_else(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    target = tmp_path / "out"
    deliver(export, target, store=store, describe=describe)
    export.name = "projects/default/exports/e-2"
    with pytest.raises(ArtifactError, match="holds something else"):
        deliver(export, target, store=store, describe=describe)


def test_an_empty_directory_is_taken(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert deliver(export, tmp_path / "out", store=store, describe=describe)


def test_a_failed_delivery_leaves_nothing(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        assert (folder / "pytorch").is_dir()
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="No space"):
        deliver(export, tmp_path / "out" / "run", store=store, describe=fail)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_delivery_is_cleaned_up_by_the_next_and_a_living_one_is_left_alone(
    export: pb.Export, store: LocalStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script = f"""
        import os, sys, time
        from pathlib import Path
        from slipway.artifacts import LocalStore
        from slipway.results.delivery import deliver
        from slipway_protos.v1 import export_pb2 as pb
        export = pb.Export.FromString(bytes.fromhex(sys.argv[1]))
        def describe(folder):
            print(folder, flush=True)
            time.sleep(60)
        deliver(export, Path({str(out / "run")!r}), store=LocalStore(Path({str(store.root)!r})), describe=describe)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), export.SerializeToString().hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            partial = Path(process.stdout.readline().strip())
            assert deliver(export, out / "other", store=store, describe=describe)
            assert partial.is_dir(), "a living command's folder was removed"
        finally:
            process.kill()
    assert partial.is_dir()
    assert deliver(export, out / "run", store=store, describe=describe)
    assert sorted(path.name for path in out.iterdir()) == ["other", "run"]


def test_verify_names_every_difference(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    target = tmp_path / "out"
    deliver(export, target, store=store, describe=describe)
    weights = target / "pytorch" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[7] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    (target / "pytorch" / "config.json").unlink()
    (target / "pytorch" / "extra").touch()
    assert verify_directory(target)[1] == [
        "pytorch/config.json: missing",
        "pytorch/model.safetensors: does not have its checksum",
        f"pytorch/extra: not in {MANIFEST}",
    ]


def test_checksums_that_point_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(f"{'0' * 64}  ../../etc/passwd\n")
    with pytest.raises(ArtifactError) as caught:
        verify_directory(tmp_path)
    assert caught.value.reason == "ARTIFACT_INVALID"


def report(*outputs: OutputValidation) -> ValidationReport:
    reference = Reference(description="base + adapter", engine=Engine(runtime="transformers"))
    inputs = ValidationInputs(
        samples=1,
        sequence_length=8,
        tokens=8,
        requested_samples=1,
        vocabulary=64,
        seed=0,
        prompts=0,
        new_tokens=0,
        text_source="test",
        held_out=True,
    )
    return ValidationReport(reference=reference, inputs=inputs, outputs=outputs)


def test_the_result_says_what_was_made_and_how(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    passed = [OutputValidation(name=name, format="pytorch", status=OutputStatus.PASSED) for name in export.outputs]
    result = export_result(
        export, store=store, validation=report(*passed), output_directory=tmp_path / "out", warnings=["skipped one"]
    )
    assert result.success
    assert result.validation_passed
    assert result.error_message == ""
    assert result.paths == {name: str(tmp_path / "out" / name) for name in ("pytorch", "pytorch-int4")}
    assert result.original_size_bytes == result.formats["pytorch"].size_bytes
    assert result.optimized_size_bytes == result.formats["pytorch-int4"].size_bytes
    assert result.size_reduction_percent == pytest.approx(66.7, abs=0.1)
    assert result.warnings == ("skipped one", "merge: the change of 1 module is lost in rounding")
    first, second = result.attempts
    assert (first.outcome, first.reason, first.params) == ("failed", "OUT_OF_MEMORY", {"group_size": 64})
    assert (second.outcome, second.rule, second.params) == ("succeeded", "smaller", {"group_size": 32})
    assert json.loads(result.model_dump_json())["timestamp"] == "2026-01-02T03:04:05Z"


def test_an_output_that_fails_validation_fails_the_export(export: pb.Export, store: LocalStore) -> None:
    failed = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean KL is 0.4, limit 0.02",
        remedy="use int8",
    )
    failure = export_failure(export, report(failed))
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.remedy) == ("VALIDATION_FAILED", 4, "use int8")
    result = export_result(export, store=store, validation=report(failed))
    assert not result.success
    assert "pytorch-int4" in result.error_message
    assert "use int8" in result.error_message


def test_a_failed_export_keeps_its_reason(export: pb.Export, store: LocalStore) -> None:
    export.state = pb.EXPORT_STATE_FAILED
    export.error.CopyFrom(status_of(Failure("UNSUPPORTED", "no TensorRT", "pip install it", "TensorRTBuildError")))
    result = export_result(export, store=store)
    assert (result.success, result.reason, result.validation_passed) == (False, "UNSUPPORTED", None)
    assert "pip install it" in result.error_message


def test_an_attempt_that_failed_has_what_the_machine_had_left(export: pb.Export, store: LocalStore) -> None:
    left = {"machine_memory_available_bytes": "1500000000", "machine_memory_total_bytes": "8000000000"}
    about = {**left, "machine_scratch_free_bytes": "2000000000", "tensor": "w"}
    attempt = export.tasks[1].attempts[0]
    attempt.error.CopyFrom(status_of(Failure("OUT_OF_MEMORY", "too large", "use less", "StageError", about)))
    first, second = export_result(export, store=store).attempts
    assert first.machine == {
        "memory_available_bytes": 1_500_000_000,
        "memory_total_bytes": 8_000_000_000,
        "scratch_free_bytes": 2_000_000_000,
    }
    assert first.machine_left == "the machine had 1.5 GB of 8.0 GB memory available, 2.0 GB free for scratch"
    assert (second.machine, second.machine_left) == ({}, "")


def test_a_failed_validation_decides_over_a_format_that_cannot_be_made(export: pb.Export, store: LocalStore) -> None:
    export.state = pb.EXPORT_STATE_FAILED
    export.error.CopyFrom(status_of(Failure("UNSUPPORTED", "no TensorRT", "pip install it", "TensorRTBuildError")))
    wrong = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean KL is 0.4",
        remedy="use int8",
    )
    result = export_result(export, store=store, validation=report(wrong))
    assert (result.success, result.reason) == (False, "VALIDATION_FAILED")
    assert result.error_message == (
        "pytorch-int4 failed validation: mean KL is 0.4; in addition, UNSUPPORTED: no TensorRT; use int8"
    )


def test_files_that_cannot_be_linked_are_copied(export: pb.Export, store: LocalStore) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == store.root.stat().st_dev:
        pytest.skip("needs a second file system")
    target = elsewhere / f"slipway-test-{os.getpid()}"
    try:
        assert deliver(export, target, store=store, describe=describe)
        assert verify_directory(target) == (6, [])
    finally:
        subprocess.run(["rm", "-rf", str(target)], check=True)


def test_a_full_output_disk_is_named_and_left_empty(export: pb.Export, store: LocalStore, small_disk: Path) -> None:
    with pytest.raises(ArtifactError, match="small-disk") as raised:
        deliver(export, small_disk / "out", store=store, describe=lambda folder: fill(folder / "report.html"))
    assert (raised.value.reason, raised.value.about["folder"]) == ("DISK_FULL", str(small_disk / "out"))
    assert "output.directory" in raised.value.remedy
    assert list(small_disk.iterdir()) == []


def test_the_same_file_under_several_names_takes_its_space_once(
    export: pb.Export, store: LocalStore, tmp_path: Path, small_disk: Path
) -> None:
    """As a package's weights beside those of the graph; also on another disk than the store's, where nothing links them."""
    folder = tmp_path / "packed"
    names = ("model.onnx.data", "optimum/model.onnx.data", "triton/model/1/model.onnx_data")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(3 << 20))
    export.outputs["pytorch"] = store.put(folder)
    target = small_disk / "out"
    assert deliver(export, target, store=store, describe=describe)
    assert verify_directory(target)[1] == []
    first, *others = (target / "pytorch" / name for name in names)
    assert all(first.samefile(other) for other in others)
    assert not first.stat().st_mode & 0o222  # a change would reach all names


def fill(path: Path) -> None:
    path.write_bytes(bytes(16 << 20))


def test_a_warning_is_given_once_with_all_its_tasks(export: pb.Export, store: LocalStore) -> None:
    """The coordinator also has the warnings of stages, and several stages may give the same warning."""
    lost = "the change of 1 module is lost in rounding"
    export.warnings.extend([lost, "skipped one"])
    export.tasks[1].facts.update({"warnings": [lost]})
    result = export_result(export, store=store, warnings=["skipped one", "skipped one"])
    merge, other = export.tasks[0].id, export.tasks[1].id
    assert result.warnings == ("skipped one", f"{merge}, {other}: {lost}")


def test_an_output_that_failed_validation_is_the_error_and_no_warning(export: pb.Export, store: LocalStore) -> None:
    failed = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean_kl is 0.4",
        remedy="smaller",
    )
    export.tasks[1].facts.update({"warnings": ["pytorch-int4 failed validation: mean_kl is 0.4; smaller"]})
    result = export_result(export, store=store, validation=report(failed))
    assert result.error_message.count("mean_kl is 0.4") == 1
    assert not any("mean_kl" in warning for warning in result.warnings)


def test_a_format_that_was_not_made_is_in_the_result_with_its_reason(export: pb.Export, store: LocalStore) -> None:
    error = status_of(Failure("OUT_OF_MEMORY", "too large"))
    attempts = [pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, error=error)]
    export.tasks.add(id="onnx_export", format="onnx", state=pb.TASK_STATE_FAILED, attempts=attempts)
    inputs = {"model": "task:onnx_export/onnx"}
    export.tasks.add(id="quantize-onnx-int4", format="onnx-int4", state=pb.TASK_STATE_SKIPPED, inputs=inputs)
    result = export_result(export, store=store)
    assert result.requested == ("pytorch", "pytorch-int4", "onnx", "onnx-int4")
    onnx, int4 = result.failed["onnx"], result.failed["onnx-int4"]
    assert (onnx.state, onnx.reason, "too large" in onnx.error_message) == ("failed", "OUT_OF_MEMORY", True)
    assert (int4.state, int4.reason) == ("skipped", "OUT_OF_MEMORY")
    assert int4.error_message == "onnx_export, which it needs, failed"


def test_a_format_whose_graph_is_not_made_of_such_models_names_their_kind(export: pb.Export, store: LocalStore) -> None:
    error = status_of(Failure("FAMILY_UNSUPPORTED", "the model is encoder-decoder (MarianMTModel)"))
    attempts = [pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, error=error)]
    export.tasks.add(id="onnx_export-tensorrt", state=pb.TASK_STATE_FAILED, attempts=attempts)
    inputs = {"onnx": "task:onnx_export-tensorrt/onnx"}
    export.tasks.add(id="tensorrt_build", format="tensorrt", state=pb.TASK_STATE_SKIPPED, inputs=inputs)
    found = export_result(export, store=store).failed["tensorrt"]
    assert (found.state, found.reason) == ("not_run", "FAMILY_UNSUPPORTED")
    assert found.error_message.startswith(
        "onnx_export-tensorrt, which it needs, was not run: the model is encoder-decoder"
    )


def test_a_name_that_no_file_system_takes_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="more than 200 bytes") as raised:
        check_target(tmp_path / ("ä" * 101), "e-1")
    assert raised.value.reason == "FILE_ERROR"
    assert "naming_pattern" in raised.value.remedy


@pytest.mark.parametrize(
    "facts",
    [
        {"failed_outputs": ["onnx"], "outputs": ["onnx"]},
        {"failed_outputs": ["onnx"], "outputs": {"onnx": "bad"}},
        {"failed_outputs": [["onnx"]], "outputs": {"onnx": {"explanation": 1, "remedy": None}}},
        {"failed_outputs": "onnx"},
        {"urls": ["s3://a"]},
    ],
)
def test_facts_of_another_form_are_survived(export: pb.Export, facts: dict[str, Any]) -> None:
    state = pb.TASK_STATE_SUCCEEDED
    export.tasks.add(id="validate", stage="validate", format="validation", state=state, facts=struct_of(facts))
    export.tasks.add(id="import", stage="import", state=state, facts=struct_of(facts))
    failure = recorded_failure(export)
    assert (failure is not None) == isinstance(facts.get("failed_outputs"), list)
    assert failure is None or failure.reason == "VALIDATION_FAILED"
    assert "imported_from" not in lineage(export)
