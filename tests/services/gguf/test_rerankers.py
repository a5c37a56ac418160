"""Rerankers in GGUF: their heads, what llama.cpp's server makes of pairs of texts, and decoders that judge by the logits of two tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from slipway.errors import GGUFExportError
from slipway.proof.runtime import Step, positions_of
from slipway_gguf.diagnosis import explain
from slipway_gguf.runtime import load
from slipway_gguf.runtime.stored import stored
from support.models.gguf_models import file_fields, save_family, stored_tensors, write_gguf
from support.models.gguf_readers import JUDGE, NO, READERS, YES, save_judge, save_reader

pytestmark = pytest.mark.own_process
_TRANSFORMER = "sentence_transformers.models.Transformer"


def test_a_reranker_has_no_modelfile_and_keeps_its_head(tmp_path: Path) -> None:
    save_reader("qwen3-score", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="q8_0")
    assert not (file.parent / "Modelfile").exists()
    head = stored_tensors(file)["cls.output.weight"]
    assert head.dtype == np.float32
    assert head.shape == (2, 64)
    assert not head[1].any()
    assert file_fields(file)["qwen3.classifier.output_labels"] == ["yes", "no"]
    read = stored(file.parent, tmp_path / "model", lambda _: 0).weight("score.weight", turned=False)
    assert np.array_equal(read.take(slice(None)).values.numpy(), head[:1])


def test_a_cross_encoder_is_loaded_with_the_list_of_modules_that_its_library_writes(tmp_path: Path) -> None:
    """It has no pooling: its head makes a score. A pooler that no head reads is in old checkpoints."""
    base = tmp_path / "model"
    save_reader("xlm-roberta-score", base)
    (base / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER}]))
    tensors = load_file(base / "model.safetensors")
    tensors["roberta.pooler.dense.weight"] = torch.ones(64, 64)
    tensors["roberta.pooler.dense.bias"] = torch.ones(64)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    file, _ = write_gguf(base, tmp_path / "work")
    shutil.copyfile(base / "modules.json", file.parent / "modules.json")
    ids = np.array([[5, 6, 7, 8]])
    scores, _ = load(file.parent, threads=1).forward(Step(ids, np.ones_like(ids), positions_of(np.ones_like(ids))))
    assert np.isfinite(scores).all()


def _server_scores(file: Path, query: str, documents: list[str]) -> np.ndarray:
    """Return the scores that llama.cpp's server gives."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(file), 512, 0
    params.embedding, params.warmup = True, False
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    given = xllamacpp.Server(params).handle_rerank({"query": query, "documents": documents})["results"]
    return np.array([each["relevance_score"] for each in sorted(given, key=lambda each: each["index"])])


_QUERY, _DOCUMENTS = "the model", ["a b c def", "hello world and more", "x"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [each for each in READERS if not READERS[each].pooling])
def test_llama_cpps_server_scores_pairs_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """The server puts the tokens around and between the texts of a pair by what the file says of them."""
    model = save_reader(kind, tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    pairs = [torch.tensor([tokenizer.encode(_QUERY, each).ids]) for each in _DOCUMENTS]
    with torch.no_grad():
        scores = np.array([float(model(input_ids=each).logits) for each in pairs])
    expected = 1 / (1 + np.exp(-scores)) if kind == "qwen3-score" else scores
    assert np.abs(_server_scores(file, _QUERY, _DOCUMENTS) - expected).max() < 5e-4
    assert np.ptp(expected) > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_that_judges_by_two_tokens_has_their_rows_and_a_prompt_for_pairs(tied: bool, tmp_path: Path) -> None:
    model = save_judge(tmp_path / "model", tied=tied)
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f16")
    tensors, fields = stored_tensors(file), file_fields(file)
    assert np.array_equal(tensors["cls.output.weight"], model.lm_head.weight[[YES, NO]].detach().numpy())
    assert ("output.weight" in tensors) is not tied  # it predicts tokens as before
    assert fields["qwen3.pooling_type"] == 4
    prompt = "<s>Judge.\nQuery: {query}\nDocument: {document}\nAnswer:"
    assert fields["tokenizer.chat_template.rerank"] == prompt
    assert fields["tokenizer.chat_template"] == JUDGE
    assert not (file.parent / "Modelfile").exists()
    assert explain(file.parent, tmp_path / "model") == ""


@pytest.mark.slow
@pytest.mark.parametrize("no", [NO, None])
def test_llama_cpps_server_judges_as_the_logits_of_two_tokens_do(no: int | None, tmp_path: Path) -> None:
    model = save_judge(tmp_path / "model", no=no)
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    expected = []
    for each in _DOCUMENTS:
        ids = tokenizer.encode(f"<s>Judge.\nQuery: {_QUERY}\nDocument: {each}\nAnswer:", add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        expected.append(float(torch.sigmoid(logits[YES] - (logits[no] if no is not None else 0))))
    assert np.abs(_server_scores(file, _QUERY, _DOCUMENTS) - np.array(expected)).max() < 2e-3
    ours = load(file.parent, threads=1)
    ours.prepare_comparison()
    row = np.array([tokenizer.encode(_DOCUMENTS[1], add_special_tokens=False).ids])
    mask = np.ones_like(row)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(row)).logits.numpy()
    assert np.abs(ours.forward(Step(row, mask, positions_of(mask)))[0] - logits).max() < 1e-4


def _write_score(folder: Path, path: str = "1_LogitScore", tokens: object = None) -> None:
    """Write the files that say that a model makes a score of two tokens; ``tokens`` of None writes no module's settings."""
    modules = [("", "base.modules.transformer.Transformer"), (path, "cross_encoder.modules.logit_score.LogitScore")]
    listed = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.{kind}"}
        for at, (place, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if tokens is not None:
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(tokens))


def test_another_decoder_that_judges_by_two_tokens_is_refused(tmp_path: Path) -> None:
    """llama.cpp would take the score of the first token. Without the list of modules the model is a decoder alone."""
    save_family("llama", tmp_path / "model")
    _write_score(tmp_path / "model", tokens={"true_token_id": 5, "false_token_id": 6})
    with pytest.raises(GGUFExportError, match=r"LogitScore.*of LlamaForCausalLM it reads the first token") as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert (caught.value.reason, "modules.json" in caught.value.remedy) == ("FAMILY_UNSUPPORTED", True)
    (tmp_path / "model" / "modules.json").unlink()
    assert "output.weight" in stored_tensors(write_gguf(tmp_path / "model", tmp_path / "other")[0])


@pytest.mark.parametrize(
    ("path", "tokens", "words"),
    [
        ("1_LogitScore", {"true_token_id": None, "false_token_id": 6}, "its tokens are None and 6"),
        ("1_LogitScore", {"true_token_id": True}, "its tokens are True and None"),
        ("1_LogitScore", {"true_token_id": 5, "false_token_id": -2}, "its tokens are 5 and -2"),
        ("1_LogitScore", [5], "its config.json cannot be read"),
        ("1_LogitScore", None, "its config.json cannot be read"),
        ("../elsewhere", None, r"its folder is '\.\./elsewhere'"),
    ],
)
def test_a_score_of_no_tokens_is_refused(path: str, tokens: object, words: str, tmp_path: Path) -> None:
    save_judge(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "1_LogitScore")
    _write_score(tmp_path / "model", path, tokens)
    with pytest.raises(GGUFExportError, match=words) as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert caught.value.reason == "BASE_MODEL_INVALID"
