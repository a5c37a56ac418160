"""Graphs as validation runs them, by torch alone, against PyTorch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import TorchGraphError
from slipway.model.families import DECODER, family_of
from support.models.quantize_models import save_tiny
from support.models.table_models import ROWS, Row, make_row

from .conftest import Export, difference, step, torch_results

LIMIT = 1e-4
STAGES = ("torchscript", "torch_export")
EQUAL = (
    "Gemma 3, window",  # rotary embeddings and a window by kind of layer
    "GPT-2",  # learned positions
    "GPT-Neo",  # eager attention, whose mask is a branch that padding proves; a window
    "Falcon",  # one head of keys and values, and no row of the cache is fixed to it
    "MPT",  # no positions at all, and branches on sizes
    "MiniLM, features",
    "RoBERTa, questions",
    "ELECTRA, tokens",
    "ModernBERT, masked",  # a window in an encoder
    "DeBERTa v2, classes",  # functions of TorchScript, eager attention, values and branches that a trace fixes
    "Qwen3, classes",  # a decoder that reads a whole text
)
REFUSED = {
    "Bloom": "TORCH_GRAPH_FAILED",  # its GELU is a function of Python, which no file holds
    "Mixtral": "FAMILY_UNSUPPORTED",
    "Whisper": "FAMILY_UNSUPPORTED",
}
TRIED = [row for row in ROWS if row.name in (*EQUAL, *REFUSED)]
"""A row for each way through the stage; Qwen3 goes through it everywhere else here."""
COMPILE = """
import json, sys
from pathlib import Path
from slipway.stage import Context
from slipway_torchscript.stage import TORCH_EXPORT
ctx = Context(workdir=Path(sys.argv[2]))
made = TORCH_EXPORT.run({"pytorch": Path(sys.argv[1])}, TORCH_EXPORT.params(aot=True), ctx)["torch_export"]
print(json.dumps([str(made), ctx.facts["compiled_differences"]]))
"""
"""Compiles in a process of its own: torch's compiler leaves its settings, its path and a recursion limit in it."""


def loaded(folder: Path) -> Any:
    from slipway_torchscript.runtime import load_program, load_script

    return (load_script if (folder / "model.pt").exists() else load_program)(folder, threads=1)


def tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(4, 64, (rows, length))


@pytest.mark.parametrize("stage", [STAGES[0], pytest.param(STAGES[1], marks=pytest.mark.slow)])
def test_a_decoder_answers_as_pytorch_however_it_is_called(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """In one call, token by token through the cache, and with padding on the left.

    A program that is to be compiled, where no compiler is, is delivered as it is.
    """
    source = save_tiny(tmp_path / "source")
    program = stage == "torch_export"
    with monkeypatch.context() as alone:
        alone.setenv("PATH", "")
        folder, ctx = export(source, stage, **({"aot": True} if program else {}))
    assert not (folder / "model.aoti.pt2").exists()
    assert ("needs a C++ compiler" in "".join(ctx.facts.get("warnings", ()))) is program
    ids = tokens(2, 12)
    mask = np.ones_like(ids)
    wanted, model = torch_results(source, ids, mask), loaded(folder)
    whole, _ = model.forward(step(ids, mask))
    assert difference(whole, wanted) < LIMIT
    past, parts = None, []
    for start, end in ((0, 1), (1, 7), (7, 8), (8, 12)):
        found, past = model.forward(step(ids[:, :end], mask[:, :end], start, past))
        parts.append(found)
    assert difference(np.concatenate(parts, axis=1), wanted) < LIMIT
    mask[0, :4] = 0
    padded, _ = model.forward(step(ids, mask))
    assert difference(padded[0, 4:], torch_results(source, ids[:1, 4:], np.ones_like(ids[:1, 4:]))[0]) < LIMIT
    assert difference(padded[1], wanted[1]) < LIMIT

    described = json.loads((folder / f"{stage}.json").read_text())
    assert described["precision"] == "float32"
    assert len(described["differences"]) >= 5
    assert ctx.facts["files"] == described["files"]


def test_a_file_of_unknown_origin_is_not_loaded(tmp_path: Path, export: Export) -> None:
    from slipway.proof.runtime import Unusable

    folder, _ = export(save_tiny(tmp_path / "source"))
    with (folder / "model.pt").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(Unusable, match=r"is not the file that torchscript\.json describes"):
        loaded(folder)


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_a_pickle_in_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the folder has written its description too."""
    import io

    import torch

    from slipway.proof.runtime import Unusable
    from slipway_torchscript import runtime

    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    folder = save_tiny(tmp_path / "folder")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, folder / "good.pt2")
    evil = io.BytesIO()
    torch.save({"w": Runs(tmp_path / "ran")}, evil)
    with zipfile.ZipFile(folder / "good.pt2") as good, zipfile.ZipFile(folder / "model.pt2", "w") as made:
        for name in good.namelist():
            kept = good.read(name)
            made.writestr(
                name,
                evil.getvalue() if kept[:2] == b"PK" else kept.replace(b'"use_pickle":false', b'"use_pickle":true'),
            )
    digest = hashlib.sha256((folder / "model.pt2").read_bytes()).hexdigest()
    (folder / "torch_export.json").write_text(json.dumps({"files": {"model.pt2": {"sha256": digest}}}))
    with pytest.raises(Unusable):
        runtime.load_program(folder, threads=1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_a_level_stores_and_computes_in_its_type(tmp_path: Path, export: Export, level: str) -> None:
    source = save_tiny(tmp_path / "source")
    folder, _ = export(source, level=level)
    ids = tokens(2, 12)
    mask = np.ones_like(ids)
    model = loaded(folder)
    found, past = model.forward(step(ids, mask))
    assert difference(found, torch_results(source, ids, mask)) < 5e-2
    assert (
        str(past[0].dtype).removeprefix("torch.")
        == model.native_dtype
        == {"bf16": "bfloat16", "fp16": "float16"}[level]
    )
    assert (folder / "model.pt").stat().st_size < 0.6 * 4 * 130_000


@pytest.mark.slow
def test_the_optimized_graph_is_equal(tmp_path: Path, export: Export) -> None:
    folder, ctx = export(save_tiny(tmp_path / "source"), optimize=True)
    assert ctx.facts["optimized"] is True
    assert max(ctx.facts["differences"].values()) < LIMIT
    assert loaded(folder).has_cache


@pytest.mark.slow
def test_a_program_is_compiled_where_a_compiler_is(tmp_path: Path) -> None:
    from slipway_torchscript import capture

    if not capture.compiler():
        pytest.skip("no C++ compiler is here")
    source = save_tiny(tmp_path / "source", num_hidden_layers=1)
    (work := tmp_path / "compiled").mkdir()
    command = [sys.executable, "-P", "-c", COMPILE, source, work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    folder, differences = json.loads(done.stdout.splitlines()[-1])
    assert max(differences.values()) < LIMIT
    assert (Path(folder) / "model.aoti.pt2").stat().st_size > 0


@pytest.mark.parametrize("stage", ["torchscript", pytest.param("torch_export", marks=pytest.mark.slow)])
def test_rotary_frequencies_follow_the_text(tmp_path: Path, export: Export, stage: str) -> None:
    """transformers' code decides by a branch on values, which a trace loses and torch.export refuses."""
    import torch

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    source = save_tiny(tmp_path / "source", rope_parameters=rope, max_position_embeddings=32, num_hidden_layers=1)
    folder, ctx = export(source, stage=stage)
    assert ctx.facts["max_length"] == 32
    assert not ctx.facts.get("proven_branches")
    scripted = stage == "torchscript"
    graph = torch.jit.load(folder / "model.pt") if scripted else torch.export.load(folder / "model.pt2").module()
    past = [torch.zeros(1, heads, 0, width) for heads, width in ctx.facts["cache"]]
    for length in (9, 32, 50) if scripted else (9, 32):  # TorchScript refuses no text
        ids = tokens(1, length)
        given = torch.from_numpy(ids)
        found = graph(given, torch.ones_like(given), torch.arange(length)[None], past)[0].numpy()
        assert difference(found, torch_results(source, ids, np.ones_like(ids))) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("row", TRIED, ids=[row.name for row in TRIED])
def test_each_kind_of_model_is_equal_or_refused(tmp_path: Path, export: Export, row: Row) -> None:
    source = make_row(row, tmp_path / "source")
    try:
        folder, _ = export(source, control_flow="prove")
    except TorchGraphError as error:
        assert REFUSED.get(row.name) == error.reason
        return
    assert row.name not in REFUSED
    ids = tokens(2, 33)
    mask = np.ones_like(ids)
    if family_of(json.loads((source / "config.json").read_text())) is DECODER:
        mask[0, :5] = 0
    else:
        mask[0, -5:], ids[0, -5:] = 0, 1
    found, _ = loaded(folder).forward(step(ids, mask))
    wanted = torch_results(source, ids, mask)
    for one, other, real in zip(found, wanted, mask.astype(bool), strict=True):
        if len(other) == len(real):
            assert difference(one[real], other[real]) < LIMIT
        elif other.shape[-1] == len(real):
            assert difference(one[:, real], other[:, real]) < LIMIT
        else:
            assert difference(one, other) < LIMIT
