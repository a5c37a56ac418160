"""Traits of Qwen3 that need no profile of their own (docs/adr/0024); other tests hold those that it shares with every decoder."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from support.models.onnx_models import Exported

NORMS = tuple(f"model.layers.{layer}.self_attn.{kind}_norm.weight" for layer in (0, 1) for kind in ("q", "k"))
THINK, END_OF_THOUGHT, END_OF_TURN = 5, 6, 7


@pytest.mark.slow
def test_norms_of_queries_and_keys_are_in_the_graph_and_compared(
    family: Callable[[str], Path], export: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from slipway_onnx_export.engines import mobius
    from slipway_onnx_export.interface import EngineGraph, GraphRequest
    from slipway_onnx_export.source import ModelSource

    graph = export(family("qwen3-tied")).onnx.graph
    stored = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    read = {name for node in graph.node for name in node.input}
    assert {name: stored.get(name) for name in NORMS} == {name: [32] for name in NORMS}
    assert set(NORMS) <= read

    build = mobius.build

    def without_a_norm(source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
        (graph,) = build(source, request)
        return [replace(graph, weights={**graph.weights, NORMS[3]: torch.ones(32)})]

    monkeypatch.setattr(mobius, "build", without_a_norm)  # the fault that the comparison must see
    with pytest.raises(ModelExportError) as caught:
        export(family("qwen3-tied"))
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


@pytest.mark.slow
def test_thinking_is_a_matter_of_tokens(
    tmp_path: Path, family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    """The template that opens a thought, and every token that ends a text, travel; the text goes on through a thought to its end."""
    import torch
    import transformers

    source = Path(shutil.copytree(family("qwen3-tied"), tmp_path / "source"))
    template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking is not false %}<think>{% endif %}"
    )
    (source / "chat_template.jinja").write_text(template)
    prompt = [9, 17, THINK]
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[
        0, 3:
    ].tolist()
    end = whole[6]  # a token that this model writes later serves as a second end
    settings = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, end]}))
    folder = export(source, packaging=("genai",)).folder
    assert (folder / "chat_template.jinja").read_text() == template
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, end]
    assert json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"] == [2, end]
    import onnxruntime

    example = runpy.run_path(str(folder / "example.py"), run_name="example")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    wanted = whole[: min(whole.index(each) for each in (2, end) if each in whole)]
    assert example["generate"](session, prompt, max_new_tokens=12) == wanted
