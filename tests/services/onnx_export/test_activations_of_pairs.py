"""The two graphs of encoder–decoders return activations: the values that hooks of the test's own record in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.model.activations import CONTRACT, CONTRACT_PAGE, KINDS, read_contract
from slipway.stage import Context
from slipway_onnx_export.inspection.trial import read_graph, run_once
from support.models.family_models import CASES, make_family_model
from support.models.onnx_models import Exported
from support.models.packaged_models import cached, empty_cache, padded_source, session

SLOW = pytest.mark.slow
LIMIT = 1e-4
EVERY = {"layers": ("all",), "kinds": tuple(KINDS)}
LEGACY = {"engine": "legacy", "opset": 17}
TOKENS = np.random.default_rng(5).integers(3, 40, (3, 5))


def _of_bart(part: str, layer: str) -> dict[str, tuple[str, int]]:
    own = {f"{part}_attentions": (f"{layer}.self_attn", 1), f"{part}_mlp": (f"{layer}.fc2", 0)}
    return own | ({"cross_attentions": (f"{layer}.encoder_attn", 1)} if part == "decoder" else {})


def _of_t5(part: str, layer: str) -> dict[str, tuple[str, int]]:
    own = {f"{part}_attentions": (f"{layer}.layer.0.SelfAttention", 2)}
    if part == "encoder":
        return {**own, "encoder_mlp": (f"{layer}.layer.1.DenseReluDense", 0)}
    crossed = {"cross_attentions": (f"{layer}.layer.1.EncDecAttention", 2)}
    return {**own, **crossed, "decoder_mlp": (f"{layer}.layer.2.DenseReluDense", 0)}


def modules_of(name: str) -> dict[str, tuple[str, int]]:
    """Module and place in its result of each activation but the embeddings, by the names of the contract."""
    found: dict[str, tuple[str, int]] = {}
    for part in ("encoder", "decoder"):
        for index in range(2):
            layer = f"{part}.block.{index}" if name == "t5" else f"model.{part}.layers.{index}"
            parts = (_of_t5 if name == "t5" else _of_bart)(part, layer)
            found |= {f"{key}.{index}": place for key, place in parts.items()}
            found[f"{part}_hidden_states.{index}"] = layer, 0
    return found


def recorded(name: str, source: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Run transformers' model over the whole of both texts at once and return what its modules return."""
    import torch

    model = type(CASES[name].model()).from_pretrained(source, attn_implementation="eager").eval()
    found: dict[str, Any] = {}

    def keep(key: str, place: int) -> Callable[..., None]:
        def hook(_module: Any, _given: Any, output: Any) -> None:
            found[key] = (output if isinstance(output, tuple) else (output,))[place]

        return hook

    def first(key: str) -> Callable[..., None]:
        def hook(_module: Any, given: Any, named: dict[str, Any]) -> None:
            found[key] = given[0] if given else named["hidden_states"]

        return hook

    modules = modules_of(name)
    for key, (path, place) in modules.items():
        model.get_submodule(path).register_forward_hook(keep(key, place))
    for part in ("encoder", "decoder"):
        layer = model.get_submodule(modules[f"{part}_hidden_states.0"][0])
        layer.register_forward_pre_hook(first(f"{part}_embeddings"), with_kwargs=True)
    with torch.no_grad():
        model(
            **{key: torch.from_numpy(value) for key, value in given.items()},
            decoder_input_ids=torch.from_numpy(TOKENS),
            use_cache=False,
        )
    return {key: value.numpy() for key, value in found.items()}


def assert_close(name: str, found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape, name
    assert np.abs(found - wanted).max() < LIMIT * max(1.0, float(np.abs(wanted).max())), name


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param("marian", LEGACY, id="marian-legacy"),
        pytest.param("whisper", LEGACY, id="whisper-legacy", marks=SLOW),
        pytest.param("t5", {}, id="t5-dynamo", marks=SLOW),
        pytest.param("t5", {**LEGACY, "cache": False}, id="t5-without-cache", marks=SLOW),
    ],
)
def test_activations_of_both_graphs_are_those_of_hooks(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    source = make_family_model(name, tmp_path / "model")
    exported = export(source, activations=EVERY, **params)
    assert exported.facts["parity_activations"] < 1e-5
    given = padded_source(name)
    wanted = recorded(name, source, given)
    contract = read_contract(exported.folder / CONTRACT)
    assert [graph.file for graph in contract.graphs] == ["encoder_model.onnx", "decoder_model.onnx"]
    for part in contract.graphs:
        report = run_once(read_graph(exported.folder / part.file), exported.folder / part.file, threads=1)
        assert (report.ran, list(report.breaches(part))) == (True, [])
    names = [output.name for graph in contract.graphs for output in graph.outputs]
    assert sorted(names) == sorted(wanted)
    assert exported.facts["activations"] == names

    _, encode = session(exported.folder / "encoder_model.onnx")
    graph, decode = session(exported.folder / "decoder_model.onnx")
    heard = encode(given)
    mask = given.get("attention_mask", np.ones(heard["last_hidden_state"].shape[:2], np.int64)).astype(bool)
    for output in contract.outputs:
        value, reference = heard[output.name], wanted[output.name]
        if output.kind == "attentions":
            value, reference = value.transpose(0, 2, 1, 3), reference.transpose(0, 2, 1, 3)
        assert_close(output.name, value[mask], reference[mask])
    feed = {
        **cached(heard),
        **empty_cache(graph, 3, of=".decoder."),
        "encoder_hidden_states": heard["last_hidden_state"],
        **({"encoder_attention_mask": given["attention_mask"]} if "attention_mask" in given else {}),
    }
    for start, end in ((0, 4), (4, 5)):  # several tokens, then one after them
        begin = start if params.get("cache", True) else 0
        found = decode({**feed, "input_ids": TOKENS[:, begin:end]})
        feed |= cached(found)
        for output in contract.graphs[1].outputs:
            reference = wanted[output.name][..., begin:end, :]
            if output.kind == "attentions":
                reference = reference[..., :end]
            assert_close(output.name, found[output.name], reference)


@SLOW
def test_levels_and_packages_keep_the_activations(tmp_path: Path, export: Callable[..., Exported]) -> None:
    """Hidden states and cross-attention of a translator's last layer."""
    from slipway_quantize.stage import STAGE

    some = {"layers": ("last",), "kinds": ("hidden_states", "cross_attentions")}
    source = make_family_model("marian", tmp_path / "model")
    plain = export(source, activations=some, packaging=("transformers_js", "optimum"), **LEGACY).folder
    assert_kept(plain, "float32")
    for level, dtype in (("fp16", "float16"), ("int8", "float32")):
        (tmp_path / level).mkdir()
        params = STAGE.params(format="onnx", level=level)
        (folder,) = STAGE.run({"model": plain}, params, Context(workdir=tmp_path / level)).values()
        assert_kept(folder, dtype)


def assert_kept(folder: Path, dtype: str) -> None:
    contract = read_contract(folder / CONTRACT)
    names = [[output.name for output in graph.outputs] for graph in contract.graphs]
    assert names == [["encoder_hidden_states.1"], ["decoder_hidden_states.1", "cross_attentions.1"]]
    dtypes = {output.dtype for graph in contract.graphs for output in graph.outputs}
    assert dtypes == {dtype}
    assert "## `decoder_model.onnx`" in (folder / CONTRACT_PAGE).read_text()
    for graph in contract.graphs:
        report = run_once(read_graph(folder / graph.file), folder / graph.file, threads=1)
        assert report.ran
        assert list(report.breaches(graph)) == []
    merged = next((folder / "transformers_js" / "onnx").glob("decoder_model_merged*.onnx"))
    for path in (merged, folder / "optimum" / "decoder_with_past_model.onnx"):
        assert {"decoder_hidden_states.1", "cross_attentions.1"} <= {
            value.name for value in session(path)[0].get_outputs()
        }
