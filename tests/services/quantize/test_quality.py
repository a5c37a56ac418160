"""Quality on a model that was really trained, judged on text it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from support.models.quantize_models import divergence, onnx_logits, torch_logits

Quantize = Callable[..., tuple[Path, Context]]

# Mean KL divergence in nats and top-1 agreement that a level must keep to.
LIMITS = {"fp16": (1e-5, 0.99), "int8": (1e-3, 0.98), "int4": (2e-2, 0.90)}


@pytest.fixture(scope="module")
def heldout(sample: Path) -> np.ndarray:
    """Windows of held-out text. (windows, tokens)."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((sample / "heldout").glob("*.txt")))
    tokens = AutoTokenizer.from_pretrained(sample / "qwen3-base")(text)["input_ids"]
    return np.array(tokens[: 16 * 96], np.int64).reshape(16, 96)


@pytest.fixture(scope="module")
def exact(sample: Path, heldout: np.ndarray) -> np.ndarray:
    return torch_logits(sample / "qwen3-base", heldout)


@pytest.mark.slow
def test_pytorch_levels(quantize: Quantize, sample: Path, heldout: np.ndarray, exact: np.ndarray) -> None:
    for level, (most, least) in LIMITS.items():
        result, ctx = quantize(sample / "qwen3-base", format="pytorch", level=level)
        kl, agreement = divergence(exact, torch_logits(result, heldout))
        assert kl < most, level
        assert agreement > least, level
        assert ctx.facts["reduction"] > 0.45, level


@pytest.mark.slow
def test_onnx_levels(quantize: Quantize, sample: Path, heldout: np.ndarray, exact: np.ndarray, tmp_path: Path) -> None:
    params = OnnxExportParams(parity="never")
    graph = EXPORT.run({"pytorch": sample / "qwen3-base"}, params, Context(workdir=tmp_path))["onnx"]
    for level, (most, least) in LIMITS.items():
        result, ctx = quantize(graph, format="onnx", level=level)
        kl, agreement = divergence(exact, onnx_logits(result, heldout))
        assert kl < most, level
        assert agreement > least, level
        assert ctx.facts["reduction"] > {"fp16": 0.45, "int8": 0.65, "int4": 0.8}[level], level
