"""From base and adapter to a quantized model without the merged weights on disk: the same files as with them, and every fault named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.errors import ModelExportError
from slipway.model.weights.reading import DEFERRED, open_weights
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_merge.tensors.kernel import kernel
from slipway_merge.tensors.tensor_io import SAMPLE_ROWS, generator
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from support.models.merge_cases import CONFIGS, make_case, save_case
from support.models.merge_models import make_family
from support.models.quantize_mixtures import MODELS

LINES = ("quantization.json", "onnx_export.json")
"""Files that say how the result was made."""

Inputs = dict[str, Path]


class Chain:
    """Runs stages on a base and an adapter, each in a work folder of its own."""

    def __init__(self, folder: Path, inputs: Inputs) -> None:
        self.folder, self.inputs = folder, inputs
        self.facts: dict[str, Any] = {}

    def context(self) -> Context:
        workdir = self.folder / f"attempt-{len(list(self.folder.iterdir()))}"
        workdir.mkdir()
        return Context(workdir=workdir)

    def run(self, stage: Any, inputs: Inputs, params: Any) -> Path:
        ctx = self.context()
        made: Path = stage.run(inputs, params, ctx)[stage.main_output]
        self.facts = ctx.facts
        return made

    def merged(self, **params: Any) -> Path:
        return self.run(MERGE, self.inputs, MergeParams(verify="spot", **params))

    def graph(self, merged: Path, **params: Any) -> Path:
        return self.run(EXPORT, {"pytorch": merged, **self.inputs}, OnnxExportParams(parity="never", **params))

    def quantized(self, model: Path, form: str, *, level: str = "int4", group_size: int = 16, **more: Path) -> Path:
        packed = level != "dense int4"
        params = QuantizeParams(
            format=form, level=level.rsplit(maxsplit=1)[-1], group_size=group_size, packed=packed, check=False
        )
        return self.run(QUANTIZE, {"model": model, **self.inputs, **more}, params)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in LINES}


def lines(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "quantization.json").read_text())
    return {key: value for key, value in found.items() if key not in ("size_before_bytes", "reduction")}


@pytest.fixture
def no_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every matrix of a tiny model for a large one."""
    monkeypatch.setattr("slipway_onnx_export.source.SMALL_BYTES", 1 << 9)


def chain(folder: Path, kind: str, dtype: torch.dtype, target_modules: Any = "all-linear") -> Chain:
    (folder / "runs").mkdir()
    if kind in CONFIGS:
        made = make_case(folder, kind, dtype)
    else:
        made = save_case(folder, make_family(kind, dtype), task_type=None, target_modules=target_modules)
    return Chain(folder / "runs", {"base": made.base, "adapter": made.adapter})


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    make_case(folder, "qwen3-tied", torch.bfloat16)
    return folder


@pytest.fixture
def tied(originals: Path, tmp_path: Path) -> Chain:
    (tmp_path / "runs").mkdir()
    inputs = {name: shutil.copytree(originals / name, tmp_path / name) for name in ("base", "adapter")}
    return Chain(tmp_path / "runs", inputs)


def check_same(steps: Chain, forms: tuple[str, ...], levels: dict[str, int]) -> None:
    """Compare the files of three stages with those of the same stages without weights in between, at levels with a group size each."""
    merged, described = steps.merged(), steps.merged(weights="deferred")
    assert not list(described.glob("*.safetensors"))
    for form in forms:
        sources = merged, described
        if form == "onnx":
            sources = steps.graph(merged), steps.graph(described, weights="deferred")
            assert (sources[1] / DEFERRED).is_file()
        for level, group_size in levels.items():
            expected, found = (
                steps.quantized(source, form, level=level, group_size=group_size, pytorch=described)
                for source in sources
            )
            assert content(found) == content(expected), (form, level)
            assert lines(found) == lines(expected), (form, level)
            assert DEFERRED not in content(found)


@pytest.mark.usefixtures("no_small_tensors")
def test_the_result_is_the_same_to_the_bit(tied: Chain) -> None:
    levels = {"int4": 16, "int8": 32, "fp16": 16, "dense int4": 16}  # 48 columns have no groups of 32
    check_same(tied, ("onnx", "pytorch"), levels)


@pytest.mark.slow
@pytest.mark.usefixtures("no_small_tensors")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3", "float16"),
        ("gpt2", "float32"),
        ("gemma3", "bfloat16"),
        ("marian", "float32"),
        ("bert", "float32"),
    ],
)
def test_the_result_is_the_same_for_other_models(tmp_path: Path, kind: str, dtype: str) -> None:
    """Rows that a graph splits, input features first, weights without a kernel, two graphs, and what engines trace."""
    check_same(chain(tmp_path, kind, getattr(torch, dtype)), ("onnx", "pytorch"), {"int4": 16})


@pytest.mark.slow
@pytest.mark.usefixtures("no_small_tensors")
def test_stacked_experts_need_the_merged_weights_within_the_export(tmp_path: Path) -> None:
    steps = chain(tmp_path, "qwen3-moe", torch.float32, ["q_proj", "v_proj"])
    check_same(steps, ("onnx",), {"int4": 16})


@pytest.mark.parametrize("kind", ["granite4-moe", "mixtral"])
def test_experts_of_a_checkpoint_without_weights(tmp_path: Path, kind: str) -> None:
    """In stacks, of which one expert is made at a time, and one by one."""
    (tmp_path / "runs").mkdir()
    model = MODELS[kind].build().to(torch.bfloat16)
    made = save_case(tmp_path, model, task_type=None, target_modules=["q_proj", "v_proj"])
    check_same(
        Chain(tmp_path / "runs", {"base": made.base, "adapter": made.adapter}), ("pytorch",), {"int4": 32, "fp8": 32}
    )


def test_a_half_precision_level_of_weights_that_were_left_out(tied: Chain) -> None:
    expected, found = (
        tied.quantized(tied.merged(**params), "pytorch", level="fp16") for params in ({}, {"weights": "deferred"})
    )
    assert content(found) == content(expected)


@pytest.mark.usefixtures("no_small_tensors")
def test_a_float32_graph_of_weights_that_were_left_out(tied: Chain) -> None:
    expected, found = (tied.graph(tied.merged(**params)) for params in ({}, {"weights": "deferred"}))
    assert content(found) == content(expected)


@pytest.mark.slow
def test_a_merged_model_whose_weights_are_stored(tied: Chain) -> None:
    merged = tied.merged()
    graph = tied.graph(merged, weights="deferred")
    found = tied.quantized(graph, "onnx", pytorch=merged)
    assert content(found) == content(tied.quantized(tied.graph(merged), "onnx"))


@pytest.mark.slow
def test_a_form_that_peft_computes_is_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    made = make_case(tmp_path, "qwen3-tied", torch.bfloat16, use_dora=True)
    steps = Chain(tmp_path / "runs", {"base": made.base, "adapter": made.adapter})
    merged = steps.merged(weights="deferred")
    assert steps.facts["weights"] == "stored"
    assert content(merged) == content(steps.merged())


MEASURED = ("unchanged_share", "modules")
"""Facts that depend on the values of the weights."""


def test_the_report_says_of_a_merge_without_files_what_it_says_of_one_with_them(tied: Chain) -> None:
    found = []
    for weights in ("stored", "deferred"):
        tied.merged(weights=weights)
        found.append(tied.facts)
    stored, deferred = found
    differing = {key for key in stored | deferred if stored.get(key) != deferred.get(key)}
    # Without the compiled kernel, blocks of rows are computed as a whole, which are all of a tiny weight.
    assert differing == {"weights", "changes_measured_on", *(MEASURED if kernel() else ())}
    assert stored["tensors_merged"] == 14
    assert deferred["changes_measured_on"] == "samples"
    assert deferred["unchanged_share"] == pytest.approx(stored["unchanged_share"], abs=0.01)
    for sampled, exact in zip(deferred["modules"], stored["modules"], strict=True):
        assert sampled["relative_change"] == pytest.approx(exact["relative_change"], rel=0.1)
        assert sampled["unchanged_share"] == pytest.approx(exact["unchanged_share"], abs=0.02)
        same = [
            {k: v for k, v in one.items() if k not in ("relative_change", "unchanged_share")}
            for one in (sampled, exact)
        ]
        assert same[0] == same[1]


def change_weights(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: change(name, value) for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def test_an_adapter_without_effect_is_refused_without_files(tied: Chain) -> None:
    change_weights(tied.inputs["adapter"] / "adapter_model.safetensors", lambda _, value: value * 1e-30)
    with pytest.raises(ModelExportError) as raised:
        tied.merged(weights="deferred")
    assert raised.value.reason == "ADAPTER_NO_EFFECT"


def test_a_weight_is_called_unchanged_only_if_all_of_it_is(tied: Chain) -> None:
    """One row of one weight changes, which its sample does not have; no row of another does."""
    gone, rare = ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj")

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        if "lora_B" not in name or not (gone in name or rare in name):
            return value
        kept = torch.zeros_like(value)
        if rare in name:
            kept[_row_outside(f"{rare}.weight", len(value))] = 8.0
        return kept

    change_weights(tied.inputs["adapter"] / "adapter_model.safetensors", change)
    found = []
    for weights in ("stored", "deferred"):
        tied.merged(weights=weights)
        shares = {module["module"]: module["unchanged_share"] for module in tied.facts["modules"]}
        found.append((shares[gone], shares[rare], tied.facts["warnings"]))
    assert found[0] == found[1]
    assert found[0][0] == 1.0 > found[0][1] > 0.9
    assert gone in found[0][2][0]
    assert rare not in found[0][2][0]


def _row_outside(name: str, rows: int) -> int:
    """Return a row that the sample of a weight does not have."""
    first = int(generator(name).integers(0, rows - SAMPLE_ROWS + 1))
    return first - 1 if first else first + SAMPLE_ROWS


@pytest.mark.skipif(kernel() is None, reason="without the compiled kernel, the merge itself reads more rows")
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.gate_proj.weight"])
def test_numbers_that_are_none_are_refused_where_they_are_read(tied: Chain, name: str) -> None:
    """In a tensor that the adapter does not touch, and in a row that the merge's sample does not have."""

    def change(each: str, value: torch.Tensor) -> torch.Tensor:
        if each == name:
            value[_row_outside(name, len(value))] = torch.nan
        return value

    change_weights(tied.inputs["base"] / "model.safetensors", change)
    described = tied.merged(weights="deferred")
    weights = open_weights(described, tied.inputs)
    with pytest.raises(ModelExportError, match="holds NaN or infinity") as raised:
        weights.rows(name, 0, weights.tensors[name].shape[0])
    assert (raised.value.reason, raised.value.about["tensor"]) == ("NON_FINITE_WEIGHTS", name)
    with pytest.raises(ModelExportError) as raised:
        tied.quantized(described, "pytorch")
    assert raised.value.reason == "NON_FINITE_WEIGHTS"


def test_a_wrong_computation_is_found_where_the_rows_are_read(tied: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipway_merge.tensors.deltas import LowRank

    right = LowRank.factors

    def wrong(update: LowRank) -> Any:  # as a processor or a kernel at fault would
        left, other = right(update)
        return left * np.float32(3), other

    described = tied.merged(weights="deferred")
    monkeypatch.setattr(LowRank, "factors", wrong)
    with pytest.raises(ModelExportError) as raised:
        tied.quantized(described, "pytorch")
    assert raised.value.reason == "MERGE_NOT_VERIFIED"
    assert "rounding explains" in raised.value.message


Change = Callable[[dict[str, Any], Inputs], None]


def _first(document: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in document["tensors"] if one["update"])


def _other_base(_: dict[str, Any], inputs: Inputs) -> None:
    path = inputs["base"] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x01\x3c"  # the first bytes of a tensor are a sample of it, and its last are not
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 2] = b"\x02\x3c"
    path.write_bytes(data)


def _shorter_base(_: dict[str, Any], inputs: Inputs) -> None:
    path = inputs["base"] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


FAULTS: dict[str, tuple[Change, str]] = {
    "another base": (_other_base, "is not the one that was merged"),
    "a truncated base": (_shorter_base, "is not in 'model.safetensors'"),
    "no base": (lambda _, inputs: inputs.pop("base") and None, "the input base is missing"),  # type: ignore[func-returns-value]
    "a file elsewhere": (lambda d, _: _first(d)["source"].update(file="../base/model.safetensors"), "is not in"),
    "an impossible place": (lambda d, _: _first(d)["source"].update(start=1 << 60), "is not in"),
    "an impossible type": (lambda d, _: _first(d)["source"].update(dtype="F12"), "has the type F12"),
    "a huge shape": (lambda d, _: _first(d)["source"].update(shape=[1 << 40, 1 << 40]), "is not in"),
    "a wrong shape": (lambda d, _: _first(d)["update"]["left"].update(transposed=True), "does not have its shape"),
    "a scaling that is no number": (lambda d, _: _first(d)["update"].update(scaling="1"), "cannot be read"),
    "another stage": (lambda d, _: d.update(stage="validate"), "reads no weights here"),
    "a module": (lambda d, _: d.update(stage="os:system"), "reads no weights here"),
    "no stage": (lambda d, _: d.pop("stage"), "reads no weights here"),
    "a tensor twice": (lambda d, _: d["tensors"].append(d["tensors"][0]), "names a tensor twice"),
    "numbers of no weight": (lambda d, _: _first(d).update(dtype="I16"), "cannot be computed from BF16 in I16"),
    "another version": (lambda d, _: d.update(version=2), "cannot be read"),
    "an unknown key": (lambda d, _: d.update(more=1), "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_description_that_does_not_fit_is_refused(tied: Chain, fault: str) -> None:
    change, message = FAULTS[fault]
    described = tied.merged(weights="deferred")
    document = json.loads((described / DEFERRED).read_text())
    change(document, tied.inputs)
    (described / DEFERRED).write_text(json.dumps(document))
    with pytest.raises(ModelExportError, match=message.replace("'", ".")) as raised:
        open_weights(described, tied.inputs)
    assert raised.value.reason == "BASE_MODEL_INVALID"


def test_two_weights_in_one_place_of_a_graph_are_refused(tied: Chain) -> None:
    merged = tied.merged()
    graph = tied.graph(merged, weights="deferred")
    document = json.loads((graph / DEFERRED).read_text())
    first, second, *_ = document["graphs"]["model.onnx"].values()
    second["index"] = first["index"]
    (graph / DEFERRED).write_text(json.dumps(document))
    with pytest.raises(ModelExportError, match="is not rows of the model's tensor") as raised:
        tied.quantized(graph, "onnx", pytorch=merged)
    assert raised.value.reason == "ONNX_INVALID"


def test_rows_do_not_depend_on_how_they_are_read(tied: Chain) -> None:
    merged, described = tied.merged(), tied.merged(weights="deferred")
    stored, made = open_weights(merged, {}), open_weights(described, tied.inputs)
    assert stored.tensors.keys() == made.tensors.keys()
    for name, info in stored.tensors.items():
        rows = info.shape[0]
        places = ((0, rows), (rows // 3, rows // 2), (rows - 1, 1))
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda place, name=name: made.rows(name, *place).tobytes(), places))
        assert found == [stored.rows(name, *place).tobytes() for place in places]
    made.close()


WRONG_PLACES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rows": 7}, "is not rows of the model's tensor"),
    ({"first": 1 << 40}, "is not rows of the model's tensor"),
    ({"tensor": "model.norm.weight"}, "is not rows of the model's tensor"),
    ({"tensor": "nothing"}, "is not rows of the model's tensor"),
    ({"transposed": 1}, "cannot be read"),
)


@pytest.mark.usefixtures("no_small_tensors")
def test_a_graph_whose_weights_do_not_fit_is_refused(tied: Chain) -> None:
    described = tied.merged(weights="deferred")
    model = tied.graph(described, weights="deferred")
    text = (model / DEFERRED).read_text()
    for change, message in WRONG_PLACES:
        document = json.loads(text)
        next(iter(document["graphs"]["model.onnx"].values())).update(change)
        (model / DEFERRED).write_text(json.dumps(document))
        with pytest.raises(ModelExportError, match=message):
            tied.quantized(model, "onnx", pytorch=described)
    (model / DEFERRED).write_text(text)
    with pytest.raises(ModelExportError, match="the input 'pytorch' with the model is missing") as raised:
        tied.quantized(model, "onnx")
    assert raised.value.reason == "ONNX_INVALID"
