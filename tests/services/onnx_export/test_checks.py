"""Each check of a written folder fails by name on a fault that is planted into the files of a correct export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.errors import ONNXExportError
from slipway_onnx_export.checks.folder import CHECKS, check_folder
from slipway_onnx_export.checks.written import WrittenFolder
from slipway_onnx_export.forms.components import untraced_decoder
from support.models.onnx_models import Exported

FILE = "model.onnx"
LINEAGE = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def correct(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """An export that the reference can run: with standard operators only."""
    from slipway.stage import Context
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    context = Context(workdir=tmp_path_factory.mktemp("correct"), input_digests={"pytorch": LINEAGE})
    params = OnnxExportParams(optimization="basic", parity="never", engine="mobius", provider="cpu")
    return Exported(STAGE.run({"pytorch": family("qwen3-tied")}, params, context)["onnx"], context.facts)


def edited(correct: Exported, folder: Path, edit: Callable[[Any, Path], Any]) -> WrittenFolder:
    """A copy of the export whose graph the test damages."""
    shutil.copytree(correct.folder, folder)
    model = onnx.load(folder / FILE, load_external_data=False)
    edit(model, folder)
    (folder / FILE).write_bytes(model.SerializeToString())
    return WrittenFolder(folder, (untraced_decoder(2),), 23, metadata=properties(correct))


def properties(exported: Exported) -> dict[str, str]:
    return {entry.key: entry.value for entry in exported.onnx.metadata_props}


def refused(written: WrittenFolder) -> ONNXExportError:
    with pytest.raises(ONNXExportError) as caught:
        check_folder(written, engine="mobius")
    assert caught.value.about["check"] in caught.value.message
    return caught.value


def first(model: Any, *, external: bool = True) -> Any:
    return next(
        tensor for tensor in model.graph.initializer if external == (tensor.data_location == TensorProto.EXTERNAL)
    )


def place(tensor: Any, **entries: object) -> None:
    for entry in tensor.external_data:
        entry.value = str(entries.get(entry.key, entry.value))


def test_all_checks_are_made_and_told(correct: Exported) -> None:
    assert correct.facts["checks"] == dict.fromkeys(CHECKS, "passed")
    found = properties(correct)
    assert found["architecture"] == "Qwen3ForCausalLM"
    assert (found["model_type"], found["family"]) == ("qwen3", "decoder")
    assert "slipway " in found["tools"]
    assert "mobius-onnx " in found["tools"]
    assert found["lineage"] == LINEAGE


def test_the_validation_computes_on_what_the_export_was_asked_for(correct: Exported, tmp_path: Path) -> None:
    from slipway_validate.runner.onnx_graphs.session import asked_provider

    assert asked_provider(correct.folder) == "cpu"
    assert asked_provider(tmp_path) == "auto"
    (tmp_path / "onnx_export.json").write_text('{"provider": ["cuda"]}')
    assert asked_provider(tmp_path) == "auto"


def _other_opset(model: Any, _: Path) -> None:
    model.opset_import[0].version = 22


def _outside(location: str) -> Callable[[Any, Path], None]:
    def edit(model: Any, folder: Path) -> None:
        shutil.copyfile(folder / "model.onnx.data", folder.parent / "elsewhere.data")
        place(first(model), location=location.replace("HERE", str(folder)))

    return edit


def _link(model: Any, folder: Path) -> None:
    (folder / "linked.data").symlink_to(folder / "model.onnx.data")
    place(first(model), location="linked.data")


def _beyond(model: Any, folder: Path) -> None:
    place(first(model), offset=(folder / "model.onnx.data").stat().st_size - 8)


def _no_number(model: Any, _: Path) -> None:
    place(first(model), offset="somewhere")


def _unknown_operator(model: Any, _: Path) -> None:
    model.graph.node[3].op_type = "Invented"


def _wrong_shape(model: Any, _: Path) -> None:
    next(value for value in model.graph.output if value.name == "logits").type.tensor_type.shape.dim[2].dim_value = 7


def _wrong_type(model: Any, _: Path) -> None:
    next(value for value in model.graph.output if value.name == "logits").type.tensor_type.elem_type = TensorProto.INT64


def _input_lost(model: Any, _: Path) -> None:
    mask = next(value for value in model.graph.input if value.name == "attention_mask")
    mask.name = "padding_mask"
    for node in model.graph.node:
        node.input[:] = ["padding_mask" if name == "attention_mask" else name for name in node.input]


def _mask_unread(model: Any, _: Path) -> None:
    shape = [1, 8]
    model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.int64), "always"))
    for node in model.graph.node:
        node.input[:] = ["always" if name == "attention_mask" else name for name in node.input]


def _cache_passed_on(model: Any, _: Path) -> None:
    """Return a constant instead of what the graph made."""
    node = next(node for node in model.graph.node if "present.0.key" in node.output)
    node.output[:] = ["made" if name == "present.0.key" else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 2, 3, 32), np.float32), "present.0.key"))


def _stored_twice(model: Any, folder: Path) -> None:
    """What a tied weight looks like where its two uses have a copy each."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "model.embed_tokens.weight")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    data = (folder / "model.onnx.data").read_bytes()
    again = data[int(entries["offset"]) :][: int(entries["length"])]
    (folder / "model.onnx.data").write_bytes(data + b"\0" * (-len(data) % 64) + again)
    copy = model.graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = "lm_head.weight"
    place(copy, offset=len(data) + -len(data) % 64)
    reader = next(node for node in model.graph.node if node.op_type == "Transpose" and tensor.name in node.input)
    reader.input[0] = copy.name


def _no_metadata(model: Any, _: Path) -> None:
    del model.metadata_props[:]


def _other_lineage(model: Any, _: Path) -> None:
    (lineage,) = (entry for entry in model.metadata_props if entry.key == "lineage")
    lineage.value = "sha256:" + "cd" * 32


def _no_kernel(model: Any, _: Path) -> None:
    """A graph that is valid, in types that ONNX Runtime has no kernel for."""
    node = next(node for node in model.graph.node if node.op_type == "Add")
    wide = [helper.make_node("Cast", [name], [f"{name}.wide"], to=TensorProto.BFLOAT16) for name in node.input]
    sum_ = helper.make_node("Add", [f"{name}.wide" for name in node.input], ["sum.wide"])
    back = helper.make_node("Cast", ["sum.wide"], [node.output[0]], to=TensorProto.FLOAT)
    index = list(model.graph.node).index(node)
    nodes = [*model.graph.node[:index], *wide, sum_, back, *model.graph.node[index + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _cache_of_length_zero(model: Any, _: Path) -> None:
    """What a merged decoder of other exporters returns for its cross-attention."""
    node = next(node for node in model.graph.node if "present.0.key" in node.output)
    node.output[:] = ["made" if name == "present.0.key" else name for name in node.output]
    bounds = {"from": 0, "to": 0, "axis": 2}
    for name, number in bounds.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), f"cut.{name}"))
    cut = ["made", *(f"cut.{name}" for name in bounds)]
    model.graph.node.append(helper.make_node("Slice", cut, ["present.0.key"]))


def _declared_length_zero(model: Any, folder: Path) -> None:
    _cache_of_length_zero(model, folder)
    output = next(value for value in model.graph.output if value.name == "present.0.key")
    output.type.tensor_type.shape.dim[2].dim_value = 0


FAULTS: dict[str, list[Callable[[Any, Path], None]]] = {
    "opset": [_other_opset],
    "paths": [
        _outside("../elsewhere.data"),
        _outside("HERE/model.onnx.data"),
        _outside(""),
        _link,
        _beyond,
        _no_number,
    ],
    "valid": [_unknown_operator],
    "shapes": [_wrong_shape, _wrong_type],
    "interface": [_input_lost, _mask_unread, _cache_passed_on],
    "stored once": [_stored_twice],
    "metadata": [_no_metadata, _other_lineage],
    "loads": [_no_kernel],
    "caches": [_cache_of_length_zero, _declared_length_zero],
}


@pytest.mark.parametrize(
    ("check", "fault"),
    [(check, fault) for check, faults in FAULTS.items() for fault in faults],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_a_planted_fault(correct: Exported, tmp_path: Path, check: str, fault: Callable[[Any, Path], None]) -> None:
    error = refused(edited(correct, tmp_path / "copy", fault))
    assert error.about["check"] == check
    assert error.reason == ("OPSET_UNSUPPORTED" if check == "opset" else "EXPORT_ENGINE_FAILED")
    assert error.about["engine"] == "mobius"


def test_a_file_that_is_no_graph(correct: Exported, tmp_path: Path) -> None:
    written = edited(correct, tmp_path / "copy", lambda *_: None)
    (written.folder / FILE).write_bytes(b"\xff" * 100)
    assert "cannot be read" in refused(written).message


def test_every_check_has_a_planted_fault() -> None:
    assert FAULTS.keys() | {"reference"} == CHECKS.keys()


def test_the_reference_disagrees_with_a_runtime_that_computes_something_else(
    correct: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime's results are those of other weights, which stands for a faulty kernel: no fault of a file divides the two."""
    from slipway_onnx_export.checks import folder as running

    written = edited(correct, tmp_path / "copy", lambda *_: None)
    other = tmp_path / "other"
    shutil.copytree(written.folder, other)
    data = np.fromfile(other / "model.onnx.data", np.float32)
    (data * 1.5).tofile(other / "model.onnx.data")
    run = running._run
    monkeypatch.setattr(
        running,
        "_run",
        lambda _, component, past: run(WrittenFolder(other, written.components, 23), component, past=past),
    )
    error = refused(written)
    assert (error.about["check"], error.reason) == ("reference", "EXPORT_PARITY_FAILED")


def test_the_reference_is_not_run_by_name(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    checks = export(family("llama"), parity="never").facts["checks"]
    assert checks["reference"].startswith("not run: the reference cannot run model.onnx: ")
    assert "SkipSimplifiedLayerNormalization" in checks["reference"]


def test_large_graphs_are_not_run(correct: Exported) -> None:
    large = WrittenFolder(correct.folder, (untraced_decoder(2),), 23)
    vars(large)["tiny"] = False
    checks = check_folder(large, engine="mobius")
    assert {name for name, result in checks.items() if result.startswith("not run")} == {"caches", "reference"}


def test_equal_weights_under_two_names_are_stored_once(
    family: Callable[[str], Path], tmp_path: Path, export: Callable[..., Exported]
) -> None:
    """A folder may hold a copy of a weight, as one that was tied before; then too the export stores it once."""
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(family("qwen3"), tmp_path / "copied"))
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    exported = export(source)
    assert exported.facts["checks"]["stored once"] == "passed"
    places = [
        {entry.key: entry.value for entry in tensor.external_data}["offset"]
        for tensor in exported.onnx.graph.initializer
        if "up_proj" in tensor.name
    ]
    assert len(places) == 2
    assert len(set(places)) == 1
