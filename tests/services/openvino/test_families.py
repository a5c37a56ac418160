"""Each family as an IR: results of PyTorch at shapes that a cache and padding bring, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.errors import ONNXExportError, OpenVinoExportError
from slipway.model.families import DECODER, auto_model, family_of
from slipway.proof.runtime import Source, Step, positions_of
from slipway_openvino.runtime import load
from support.models.current_kinds import make_kind
from support.models.openvino_models import converted, exported
from support.models.table_models import ROWS, Row, make_row

pytestmark = pytest.mark.slow

NAMES = (
    *(
        "Gemma 2, window",
        "Gemma 3, window",
        "Phi-3",
        "GPT-2",
        "Qwen3-MoE",
        "DeepSeek-V3",
        "MiniLM, features",
        "RoBERTa, questions",
    ),
    *("DeBERTa v2, classes", "ModernBERT, masked", "Qwen3, classes"),
)
"""Those whose graphs differ: others are plain decoders, as every other test's, or BERT with another head."""
MIXTURES = ("gpt-oss", "gemma4-moe", "llama4")
"""Mixtures whose experts have forms of their own: biases and a bounded gate, a dense layer beside them, inputs that are scaled."""
PAIRS = ("M2M-100", "Whisper")
"""Positions that follow from the text, and a source without a mask; verdicts judge T5 and Whisper, and other tests run Marian."""
LENGTHS = (30, 17, 5)
LIMIT = 1e-4


def row(name: str) -> Row:
    return next(each for each in ROWS if each.name == name)


def graph_of(source: Path, work: Path) -> Path:
    """Return the graph of the engine that writes it; an export's rules try them in the same order."""
    for engine in ("auto", "dynamo"):
        try:
            return exported(source, work / engine, engine=engine, parity="always")
        except ONNXExportError as error:
            failure = error
    raise failure


def wanted(source: Path, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    assert family is not None
    model: Any = auto_model(family).from_pretrained(source, dtype=torch.float32).eval()
    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if family is DECODER:
        given["position_ids"] = torch.from_numpy(positions_of(mask))
    with torch.inference_mode():
        found = model(**given)
    return {name: found[name].numpy() for name in family.outputs}


def padded_batch(side: str) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(5).integers(3, 60, (len(LENGTHS), max(LENGTHS)))
    columns = np.arange(max(LENGTHS))
    counted = columns if side == "right" else columns[::-1]
    mask = (counted < np.array(LENGTHS)[:, None]).astype(np.int64)
    return np.where(mask == 1, ids, 1), mask


def largest(found: np.ndarray, expected: np.ndarray, mask: np.ndarray) -> float:
    """Return the largest difference at tokens, as a share of the largest result above 1."""
    per_token = expected.shape[:2] == mask.shape
    keep = mask.astype(bool) if per_token else np.ones(len(expected), bool)
    return float(abs(found[keep] - expected[keep]).max() / max(1.0, float(abs(expected[keep]).max())))


@pytest.mark.parametrize("name", NAMES)
def test_a_family_computes_what_pytorch_does(name: str, tmp_path: Path) -> None:
    source = make_row(row(name), tmp_path / "pytorch")
    folder, _ = converted(graph_of(source, tmp_path), tmp_path / "work")
    model = load(folder, threads=1)
    model.prepare_comparison()
    if model.has_cache:
        check_decoder(model, source)
    else:
        ids, mask = padded_batch("right")
        rows = (
            slice(0, 1) if name == "Qwen3, classes" else slice(None)
        )  # one row at a time: it has no padding token of its own
        check_text(folder, source, ids[rows], mask[rows])


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_computes_what_pytorch_does(name: str, tmp_path: Path) -> None:
    base = make_kind(name, tmp_path / "kind").base
    folder, _ = converted(graph_of(base, tmp_path), tmp_path / "work")
    model = load(folder, threads=1)
    model.prepare_comparison()
    check_decoder(model, base)


def check_decoder(model: Any, source: Path) -> None:
    ids, mask = padded_batch("left")
    positions = positions_of(mask)
    expected = wanted(source, ids, mask)["logits"]
    whole, _ = model.forward(Step(ids, mask, positions))
    assert largest(whole, expected, mask) < LIMIT
    past, parts = None, []
    for columns in (slice(0, 20), slice(20, 21), slice(21, 27), *(slice(at, at + 1) for at in range(27, 30))):
        step = Step(ids[:, columns], mask[:, : columns.stop], positions[:, columns], past)
        logits, past = model.forward(step)
        parts.append(logits)
    assert largest(np.concatenate(parts, axis=1), expected, mask) < LIMIT
    alone, _ = model.forward(Step(ids[:1], mask[:1], positions[:1]))  # a smaller batch after a larger one
    assert largest(alone, expected[:1], mask[:1]) < LIMIT


def check_text(folder: Path, source: Path, ids: np.ndarray, mask: np.ndarray) -> None:
    import openvino

    model = openvino.compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    found = model({port.any_name: given[port.any_name] for port in model.inputs})
    for output, expected in wanted(source, ids, mask).items():
        assert largest(found[output], expected, mask) < LIMIT, output


@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_and_its_decoder_compute_what_pytorch_does(name: str, tmp_path: Path) -> None:
    """In calls of several lengths, for a smaller batch after a larger one, and for another source after the first."""
    source = make_row(row(name), tmp_path / "pytorch")
    folder, _ = converted(graph_of(source, tmp_path), tmp_path / "work")
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    assert family is not None
    reference: Any = auto_model(family).from_pretrained(source, dtype=torch.float32).eval()
    model = load(folder, threads=1)
    model.prepare_comparison()
    random = np.random.default_rng(7)
    for rows in (3, 1, 2):
        given = source_rows(random, config, rows)
        tokens = random.integers(3, 40, (rows, 9))
        named = {"input_features": given.values} if given.mask is None else {"input_ids": given.values}
        masked = {} if given.mask is None else {"attention_mask": given.mask}
        with torch.inference_mode():
            tensors = {key: torch.from_numpy(value) for key, value in (named | masked).items()}
            expected = reference(**tensors, decoder_input_ids=torch.from_numpy(tokens)).logits.numpy()
        past, parts = None, []
        for columns in (slice(0, 4), slice(4, 5), slice(5, 8), slice(8, 9)):
            ones = np.ones((rows, columns.stop), np.int64)
            step = Step(tokens[:, columns], ones, positions_of(ones)[:, columns], past, given)
            logits, past = model.forward(step)
            parts.append(logits)
        found = np.concatenate(parts, axis=1)
        assert largest(found, expected, np.ones_like(tokens)) < LIMIT


def source_rows(random: np.random.Generator, config: dict[str, Any], rows: int) -> Source:
    """Return sources of different lengths; of sound, which has one length, without a mask."""
    if "num_mel_bins" in config:
        shape = (rows, config["num_mel_bins"], 2 * config["max_source_positions"])
        return Source(random.standard_normal(shape).astype(np.float32))
    ids = random.integers(3, 40, (rows, 8))
    mask = (np.arange(8) < np.array([8, 5, 2])[:rows, None]).astype(np.int64)
    return Source(np.where(mask == 1, ids, config["pad_token_id"]), mask)


def test_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    source = make_row(row("Qwen3"), tmp_path / "pytorch")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["ViTForImageClassification"]}))
    with pytest.raises(OpenVinoExportError, match="ViTForImageClassification") as caught:
        converted(source, tmp_path / "work")
    assert caught.value.reason == "FAMILY_UNSUPPORTED"
