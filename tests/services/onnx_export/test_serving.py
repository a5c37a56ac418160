"""The form for serving: one buffer for past and present keys and values, and logits of the last token alone."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from slipway.configuration import ExportConfiguration
from slipway.errors import ONNXExportError
from slipway.model.graphs.calls import Promise
from slipway.proof.runtime import LanguageModel, NotRunnable, Step, plain_step, run_segments
from slipway.stage import Context
from slipway_onnx_export.packaging.packages import write_packages
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.serving.variant import Columns
from slipway_onnx_export.source import open_source
from slipway_validate.runner.onnx_graphs.load import load
from support.models.onnx_models import Exported

SLOW = pytest.mark.slow
ROWS = [[5, 9, 17, 4, 30, 8], [7, 3, 21]]


def greedy_of_torch(folder: Path, ids: list[int], count: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, len(ids) :]]


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """Continue by the delivered example."""
    import onnxruntime

    example = runpy.run_path(str(folder / "example.py"), run_name="example")
    example["generate"].__globals__["end_tokens"] = set
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    found: list[int] = example["generate"](session, ids, max_new_tokens=count)
    return found


def left_padded(rows: list[list[int]], total: int) -> tuple[Any, Any]:
    ids = np.array([[0] * (total - len(row)) + row for row in rows])
    return ids, np.array([[0] * (total - len(row)) + [1] * len(row) for row in rows])


def results(model: LanguageModel, rows: list[list[int]], segments: tuple[int, ...]) -> list[Any]:
    """Logits of each row's tokens."""
    ids, mask = left_padded(rows, sum(segments))
    found = np.concatenate([logits for _, logits in run_segments(model, ids, mask, segments)], axis=1)
    return [row[real.astype(bool)] for row, real in zip(found, mask, strict=True)]


@pytest.mark.parametrize("name", ["qwen3-tied", *(pytest.param(name, marks=SLOW) for name in ("qwen2", "gpt2"))])
def test_all_that_it_promises_is_what_pytorch_computes(
    family: Callable[[str], Path], export: Callable[..., Exported], name: str
) -> None:
    served = export(family(name), past_present_share_buffer=True, logits_to_keep=1, packaging=("genai", "triton"))
    operators = served.facts["operators"]
    assert operators["com.microsoft.GroupQueryAttention"] == 2
    assert "Attention" not in operators
    assert "RotaryEmbedding" not in operators
    # one product for queries, keys and values, one for both halves of a gated network; GPT-2 has neither apart
    assert operators["MatMul"] == 9
    assert served.facts["parity"] == "passed"
    assert served.facts["parity_calls"] == 2 * (3 + 2 + 3 + 3)  # with two buffers and with one
    assert served.facts["statistics"]["before"]["nodes"] > served.facts["statistics"]["after"]["nodes"]
    assert greedy(served.folder, ROWS[0], 12) == greedy_of_torch(family(name), ROWS[0], 12)

    genai = json.loads((served.folder / "genai_config.json").read_text())
    assert genai["search"]["past_present_share_buffer"] is True
    assert genai["search"]["max_length"] == 128
    assert "max_batch_size: 0" in (served.folder / "triton" / "model" / "config.pbtxt").read_text()

    usual, graph = load(export(family(name), parity="never").folder, threads=1), load(served.folder, threads=1)
    for rows, segments in ((ROWS, (4, 1, 1)), (ROWS[:1], (2, 3, 1)), (ROWS[1:], (3,))):
        for found, wanted in zip(results(graph, rows, segments), results(usual, rows, segments), strict=True):
            assert np.abs(found - wanted).max() < 1e-4
    ids, mask = left_padded(ROWS, 6)
    with pytest.raises(NotRunnable, match="one token for each row"):
        list(run_segments(graph, ids, mask, (4, 2)))
    logits, _ = graph.forward(plain_step(ROWS[0], past=None, past_length=0))
    assert logits.shape[1] == 1  # who reads the last token alone does not pay for the others


@pytest.mark.parametrize("fault", ["length", pytest.param("rotation", marks=SLOW)])
def test_a_wrong_graph_is_found(family: Callable[[str], Path], export: Callable[..., Exported], fault: str) -> None:
    """A token too many in each row, and pairs that are rotated in another order."""
    served = export(family("llama"), past_present_share_buffer=True, parity="never")
    model = served.onnx
    for node in model.graph.node:
        if fault == "length" and node.op_type == "Sub":
            node.op_type = "Add"
        for attribute in node.attribute if fault == "rotation" else ():
            attribute.i = 1 if attribute.name == "rotary_interleaved" else attribute.i
    onnx.save(model, served.folder / "model.onnx")
    with pytest.raises(ONNXExportError) as caught:
        check_parity(open_source(family("llama")), served.folder, tolerance=1e-4, promise=Promise(shared_buffer=True))
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


@pytest.mark.parametrize(
    "params",
    [
        {},
        pytest.param({"engine": "dynamo"}, marks=SLOW),
        pytest.param({"cache": False, "opset": 17}, marks=SLOW),
    ],
    ids=str,
)
def test_logits_of_the_last_token_alone(
    family: Callable[[str], Path], export: Callable[..., Exported], params: dict[str, Any]
) -> None:
    """The usual graph takes padding on both sides; the last token is the last that is no padding."""
    exported = export(family("gpt2"), logits_to_keep=1, **params)
    (logits,) = (value for value in exported.onnx.graph.output if value.name == "logits")
    assert [axis.dim_value or axis.dim_param for axis in logits.type.tensor_type.shape.dim] == ["batch", 1, 128]
    assert exported.facts["parity"] == "passed"
    every, one = load(export(family("gpt2"), parity="never").folder, threads=1), load(exported.folder, threads=1)
    for found, wanted in zip(results(one, ROWS, (6,)), results(every, ROWS, (6,)), strict=True):
        assert np.abs(found - wanted).max() < 1e-4
    ids = np.array([[*ROWS[1], 0, 0, 0], ROWS[0]])
    mask = np.array([[1, 1, 1, 0, 0, 0], [1] * 6])
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    step = Step(ids, mask, positions, last_only=True)
    assert np.abs(one.forward(step)[0][:, 0] - every.forward(step)[0][[0, 1], [2, 5]]).max() < 1e-4


@SLOW
def test_levels_keep_the_promise(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path
) -> None:
    from slipway_quantize.stage import STAGE

    def at_level(folder: Path, level: str) -> Path:
        (work := tmp_path / f"level-{len(list(tmp_path.iterdir()))}").mkdir()
        return STAGE.run({"model": folder}, STAGE.params(format="onnx", level=level), Context(workdir=work))["model"]

    plain = [
        export(family("qwen3-tied"), past_present_share_buffer=shared, parity="never").folder
        for shared in (True, False)
    ]
    # The same weights: only sums in half precision, and integers of activations, are rounded in another order.
    for level, most in {"fp16": 0.02, "int8": 0.05, "int4": 0.05}.items():
        served, usual = (at_level(folder, level) for folder in plain)
        found, wanted = (results(load(folder, threads=1), ROWS, (4, 1, 1)) for folder in (served, usual))
        assert max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)) < most, level
        assert greedy(served, ROWS[0], 5) == greedy(usual, ROWS[0], 5)


def test_a_model_without_such_a_form_is_refused_by_name(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path
) -> None:
    with pytest.raises(ONNXExportError) as caught:
        export(family("t5"), past_present_share_buffer=True)
    assert caught.value.reason == "OPERATOR_UNSUPPORTED"
    shutil.copytree(family("mistral-window"), tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text()) | {
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ONNXExportError, match="4096 tokens is too long") as caught:
        export(tmp_path / "long", past_present_share_buffer=True)
    assert caught.value.reason == "EXPORT_ENGINE_UNSUPPORTED"


@pytest.mark.parametrize(
    ("name", "windows"), [("mistral-window", [16, 16]), pytest.param("gemma3-window", [16, 0], marks=SLOW)]
)
def test_a_sliding_window_is_kept(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path, name: str, windows: list[int]
) -> None:
    """Of all layers, or of some; a text continues beyond it as in transformers, and the comparison misses it if it is taken out."""
    source = family(name)
    served = export(source, past_present_share_buffer=True)
    assert served.facts["parity"] == "passed"
    path = served.folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    sizes = [{entry.name: entry.i for entry in node.attribute} for node in nodes]
    assert [each.get("local_window_size", 0) for each in sizes] == windows
    assert greedy(served.folder, ROWS[0], 30) == greedy_of_torch(source, ROWS[0], 30)
    for node in nodes:
        for entry in [entry for entry in node.attribute if entry.name == "local_window_size"]:
            entry.i = 17
    onnx.save(model, path)
    with pytest.raises(ONNXExportError, match="beyond the sliding window") as caught:
        check_parity(open_source(source), served.folder, tolerance=1e-4, promise=Promise(shared_buffer=True))
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


def test_attention_with_more_than_a_mask_of_padding_is_refused() -> None:
    """A window in the mask would be lost."""
    import onnx_ir as ir

    from slipway_onnx_export.serving.shared_buffer import share_buffers

    text = """<ir_version: 10, opset_import: ["" : 23]>
    decoder (float[b, s, 16] q, float[b, s, 16] k, float[b, s, 16] v, int64[b, t] attention_mask, bool[s, t] window,
             float[b, 1, p, 16] past_key, float[b, 1, p, 16] past_value) => (float[b, s, 16] out, float[b, 1, t, 16] keys, float[b, 1, t, 16] values)
    {
        seen = Cast <to = 9> (attention_mask)
        axes = Constant <value_ints = [1, 2]> ()
        wide = Unsqueeze (seen, axes)
        mask = MASKING
        out, keys, values = Attention <q_num_heads = 1, kv_num_heads = 1, is_causal = 1> (q, k, v, mask, past_key, past_value)
    }"""
    plain, masked = (
        ir.from_proto(onnx.parser.parse_model(text.replace("MASKING", how)))
        for how in ("Cast <to = 9> (wide)", "And (wide, window)")
    )
    with pytest.raises(ONNXExportError, match="a mask of padding alone") as caught:
        share_buffers(masked)
    assert caught.value.reason == "OPERATOR_UNSUPPORTED"
    share_buffers(plain)
    assert [node.op_type for node in plain.graph][-1] == "GroupQueryAttention"


def test_transformers_js_does_not_get_it(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path
) -> None:
    served = export(family("llama"), past_present_share_buffer=True, parity="never", packaging=("transformers_js",))
    context = Context(workdir=tmp_path)
    write_packages(served.folder, level="", ctx=context)
    assert context.facts["packages"]["transformers_js"].startswith(
        "not packaged: transformers.js pads batches on the left"
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"engine": "dynamo"}, "engine mobius or auto"),
        ({"optimization": "basic"}, "optimization all"),
        ({"runtime": "tensorrt"}, "runtime onnxruntime"),
        ({"activations": {"layers": ("last",)}}, "no activations"),
        ({"shapes": "static"}, "shapes dynamic or batch"),
    ],
    ids=str,
)
def test_parameters_that_exclude_it_are_named(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=f"past_present_share_buffer needs {said}"):
        OnnxExportParams(past_present_share_buffer=True, **params)


@pytest.mark.parametrize(
    "settings", [{"optimize_graph": False}, {"engine": "legacy"}, {"attention": "eager", "engine": "dynamo"}]
)
def test_settings_that_exclude_it_are_a_conflict(settings: dict[str, Any]) -> None:
    document = {
        "checkpoint": {"path": "run"},
        "base_model": {"name": "base"},
        "formats": {"onnx": {"past_present_share_buffer": True, **settings}},
    }
    with pytest.raises(ValidationError, match=f"leave formats.onnx.{next(iter(settings))} out"):
        ExportConfiguration.model_validate(document)


def test_joined_layers_are_their_parts_in_a_row() -> None:
    import torch

    first, second = torch.arange(6.0).reshape(2, 3), -torch.arange(9.0).reshape(3, 3)
    joined = Columns(((first, second),))
    whole = torch.cat([first, second])
    for found, wanted in (
        (joined, whole.T),
        (joined.permute((1, 0)), whole),
        (joined.permute((1, 0)).permute((1, 0)), whole.T),
    ):
        assert found.shape == wanted.shape
        assert len(found) == len(wanted)
        assert torch.equal(found[slice(1, 3)], wanted[1:3])
