"""The output directory: complete, checked, atomic, and never over something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest

from slipway.artifacts import LocalStore
from slipway.errors import ArtifactError
from slipway.results.delivery import MANIFEST, check_target, deliver, verify_directory
from slipway_protos.v1 import export_pb2 as pb


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
    other = tmp_path / "out" / "onnx" / "other.bin"
    assert not other.samefile(kept.with_name("other.bin"))


@pytest.mark.parametrize("output", ["onnx", "onnx-int4", "adapter-onnx"])
def test_a_delivered_graph_is_loaded_by_onnx(export: pb.Export, store: LocalStore, tmp_path: Path, output: str) -> None:
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
    export.outputs[output] = store.put(made)
    deliver(export, tmp_path / "out", store=store, describe=describe)
    onnx.load(tmp_path / "out" / output / "model.onnx")
    onnx.checker.check_model(tmp_path / "out" / output / "model.onnx", full_check=True)


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


def test_a_file_that_was_edited_in_place_is_delivered_again(
    export: pb.Export, store: LocalStore, tmp_path: Path
) -> None:
    """Also by root, in its old size and with its old time."""
    target = tmp_path / "out"
    deliver(export, target, store=store, describe=describe)
    weights = target / "pytorch" / "model.safetensors"
    before, exact = weights.stat(), weights.read_bytes()
    weights.chmod(0o644)
    assert not deliver(export, target, store=store, describe=describe), "nothing but its mode changed"
    with weights.open("r+b") as file:
        file.write(bytes(byte ^ 255 for byte in exact[:8]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert deliver(export, target, store=store, describe=describe)
    assert weights.read_bytes() == exact
    assert verify_directory(target)[1] == []
    (target / "MANIFEST.sha256").write_text((target / "MANIFEST.sha256").read_text().replace("0", "1"))
    assert deliver(export, target, store=store, describe=describe)
    assert verify_directory(target)[1] == []


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


def test_a_name_that_no_file_system_takes_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="more than 200 bytes") as raised:
        check_target(tmp_path / ("ä" * 101), "e-1")
    assert raised.value.reason == "FILE_ERROR"
    assert "naming_pattern" in raised.value.remedy
