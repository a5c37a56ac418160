"""llama.cpp as a runtime of validation: logits of padded rows, through a cache that can be gone back to, and of long texts."""

from __future__ import annotations

import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
import torch
import transformers

from slipway.proof.runtime import NotRunnable, Step, Unusable, plain_step, positions_of, run_segments
from slipway.stage import Context
from slipway_gguf.params import GGUFParams
from slipway_gguf.runtime import llama as bindings
from slipway_gguf.runtime import load
from slipway_gguf.stage import STAGE
from support.models.gguf_faults import ROWS, save_models

pytestmark = pytest.mark.own_process
_TOKENS = np.random.default_rng(4).integers(4, 600, 700)


class _Both:
    """One model in both runtimes."""

    def __init__(self, root: Path) -> None:
        _, _, merged = save_models(root)
        (root / "work").mkdir()
        params = GGUFParams(type="f32", name="tiny")
        self.folder = STAGE.run({"pytorch": merged}, params, Context(workdir=root / "work"))["gguf"]
        self.model = load(self.folder, threads=1)
        self.model.prepare_comparison()
        self._theirs = transformers.LlamaForCausalLM.from_pretrained(merged).eval()

    def wanted(self, ids: Any) -> np.ndarray:
        with torch.no_grad():
            return self._theirs(torch.tensor(np.asarray(ids)[None])).logits[0].numpy()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> _Both:
    return _Both(tmp_path_factory.mktemp("both"))


def test_every_token_has_logits_in_one_pass_and_through_the_cache(both: _Both) -> None:
    ids = _TOKENS[None, :40]
    mask, wanted = np.ones_like(ids), both.wanted(_TOKENS[:40])
    for segments in ((40,), (1, 38, 1), (10, 10, 20)):
        found = np.concatenate([logits for _, logits in run_segments(both.model, ids, mask, segments)], axis=1)
        assert found.shape == (1, 40, ROWS)
        assert np.abs(found[0] - wanted).max() < 1e-4


def test_padding_on_the_left_changes_nothing(both: _Both) -> None:
    ids, mask = np.zeros((1, 30), np.int64), np.zeros((1, 30), np.int64)
    ids[0, 10:], mask[0, 10:] = _TOKENS[:20], 1
    parts = [logits for _, logits in run_segments(both.model, ids, mask, (5, 20, 5))]
    found = np.concatenate(parts, axis=1)[0]
    assert np.abs(found[10:] - both.wanted(_TOKENS[:20])).max() < 1e-4
    assert not found[:10].any()


def test_a_cache_can_be_gone_back_to(both: _Both) -> None:
    first = [int(token) for token in _TOKENS[:8]]
    _, past = both.model.forward(plain_step(first, past=None, past_length=0))
    for token in (50, 60, 70):
        logits, _ = both.model.forward(plain_step([token], past=past, past_length=8))
        assert logits.shape == (1, 1, ROWS)
        assert np.abs(logits[0, 0] - both.wanted([*first, token])[-1]).max() < 1e-4
    both.model.forward(plain_step([9, 8, 7], past=None, past_length=0))  # the cache holds another text now
    logits, _ = both.model.forward(plain_step([50], past=past, past_length=8))
    assert np.abs(logits[0, 0] - both.wanted([*first, 50])[-1]).max() < 1e-4


@pytest.mark.slow
def test_a_context_grows_with_the_text(both: _Both) -> None:
    ids = [int(token) for token in _TOKENS[:700]]
    _, past = both.model.forward(plain_step(ids[:500], past=None, past_length=0))
    logits, _ = both.model.forward(plain_step(ids[500:], past=past, past_length=500))
    assert np.abs(logits[0, 0] - both.wanted(ids)[-1]).max() < 1e-3


def test_it_is_served_in_another_arithmetic_than_compared(both: _Both) -> None:
    engine = both.model.engine
    assert (engine.stored_dtype, engine.compute_dtype, engine.native_dtype) == ("float32", "float32", "float16")
    both.model.leave_comparison()
    served, _ = both.model.forward(plain_step([5, 6, 7], past=None, past_length=0))
    both.model.prepare_comparison()
    wanted = both.wanted([5, 6, 7])[-1]
    assert 0 < np.abs(served[0, 0] - wanted).max() < 0.05
    ids = np.ones((2, 3), np.int64)
    with pytest.raises(Unusable, match="one row at a time"):
        both.model.forward(Step(ids, ids, positions_of(ids)))


def test_the_server_for_conversations_ends_before_speed_is_measured(both: _Both) -> None:
    assert both.model.rendered([{"role": "user", "content": "a"}])
    assert both.model._chat is not None
    address = both.model._chat._address
    place = (address.hostname, address.port)
    socket.create_connection(place, timeout=5).close()
    both.model.leave_comparison()
    both.model.prepare_comparison()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=5)


def test_errors_are_heard_again_when_the_chat_server_has_ended(both: _Both, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    model = load(both.folder, threads=1)
    model.rendered([{"role": "user", "content": "a"}])
    model.leave_comparison()
    functions = model._llama.functions
    assert not functions.llama_model_load_from_file(
        str(tmp_path / "a.gguf").encode(), functions.llama_model_default_params()
    )
    assert "failed to load model" in model._llama.errors()


def test_another_version_is_not_run(both: _Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "VERSIONS", ("1.2.3",))
    with pytest.raises(NotRunnable, match=r"may have other structs than 1\.2\.3"):
        load(both.folder, threads=1)


def test_a_missing_library_is_named(both: _Both, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bindings, "version", missing)  # the library itself is installed here
    with pytest.raises(NotRunnable, match="pip install xllamacpp"):
        load(both.folder, threads=1)


def test_a_file_that_is_none_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="0 GGUF files"):
        load(tmp_path, threads=1)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(Unusable, match=r"cannot load a\.gguf"):
        load(tmp_path, threads=1)
