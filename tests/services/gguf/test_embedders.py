"""llama.cpp makes the vectors and scores that transformers makes, of texts of different lengths at once, and faults are named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
import torch

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.sentences import load_pooling, pool
from slipway.proof.runtime import Step, Unusable, padded, positions_of
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, ValidationReport
from slipway_gguf.architectures import adapter_refusal, refusal_reason
from slipway_gguf.diagnosis import explain
from slipway_gguf.runtime import load
from slipway_gguf.runtime.stored import stored
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.texts import compare_texts, write_texts
from slipway_validate.stage import STAGE
from support.models.gguf_faults import faulty
from support.models.gguf_models import compute_like_llama, file_fields, stored_tensors, write_gguf
from support.models.gguf_readers import READERS, VOCABULARY, Reader, edit_weights, save_reader, write_pooling
from support.models.tokenizers_of_readers import word_pieces

pytestmark = pytest.mark.own_process

_DRAW = np.random.default_rng(1)
_TEXTS = [_DRAW.integers(5, VOCABULARY - 112, length) for length in (5, 17, 1, 60)]
_BY_TABLE = ("bert", "roberta", "xlm-roberta", "gemma")
"""Beginnings of the names of kinds for which llama.cpp looks GELU up in a table of float16, and approximates it by tanh."""
_FAST = ("qwen3", "xlm-roberta", "gemma-dense", "bert-score")


def _step(kind: str) -> Step:
    token = int(READERS[kind].settings.get("pad_token_id") or 0)
    ids, mask = padded(_TEXTS, side="right", token=token)
    return Step(ids, mask, positions_of(mask))


def _expected(model: Any, folder: Path, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Return what transformers gives for each token, or the scores, and what sentence-transformers makes of it."""
    ids, mask = (torch.tensor(each) for each in (step.input_ids, step.attention_mask))
    with torch.no_grad():
        output = model.float()(input_ids=ids, attention_mask=mask)
    if "logits" in output:
        return output.logits[:, None].numpy(), np.empty(0)
    hidden = output.last_hidden_state
    pooling = load_pooling(folder)
    assert pooling is not None
    return (hidden * mask[..., None]).numpy(), pool(hidden, mask, pooling).numpy()


def _cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return (ours * theirs).sum(-1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in _FAST else pytest.mark.slow) for each in READERS]
)
def test_vectors_and_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, step = save_reader(kind, tmp_path / "model"), _step(kind)
    exact = _expected(model, tmp_path / "model", step)
    if kind.startswith(_BY_TABLE):
        compute_like_llama(model)
    tokens, vectors = _expected(model, tmp_path / "model", step)
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    ours = load(file.parent, threads=1)
    ours.prepare_comparison()
    results, _ = ours.forward(step)
    most = 5e-4 if kind.startswith(_BY_TABLE) else 1e-5
    assert results.shape == tokens.shape
    assert np.abs(results - tokens).max() < most * max(1.0, np.abs(tokens).max())
    if not READERS[kind].pooling:
        assert np.abs(results - exact[0]).max() < 5e-4
        assert tokens.std() > 0.05  # the model is not undecided, so that a wrong head shows
        return
    made = ours.embed(step)[:, 0]
    assert _cosines(made, vectors).min() > 1 - 1e-6
    assert _cosines(made, exact[1]).min() > 1 - 1e-6  # also as published, with the exact GELU
    assert np.abs(made - vectors).max() < most * np.abs(vectors).max()  # lengths too
    other = tokens[:, 0] if READERS[kind].pooling == "mean" else tokens.sum(1)
    assert _cosines(vectors[:2], other[:2]).max() < 0.9999  # the pooling matters


@pytest.mark.slow
def test_levels_are_as_far_off_as_their_types(tmp_path: Path) -> None:
    step = _step("qwen3")
    _, expected = _expected(save_reader("qwen3", tmp_path / "model"), tmp_path / "model", step)
    for level, least in (("f16", 1 - 5e-6), ("q8_0", 0.998), ("q4_k_m", 0.97)):
        file, _ = write_gguf(tmp_path / "model", tmp_path / level, level=level)
        ours = load(file.parent, threads=1)
        ours.prepare_comparison()
        cosines = _cosines(ours.embed(step)[:, 0], expected)
        assert cosines.min() > least, (level, cosines)
        kinds = json.loads((file.parent / "gguf.json").read_text())
        assert (kinds["pooling"], kinds["normalized"]) == ("last", True)


def test_a_file_says_how_it_is_read(tmp_path: Path) -> None:
    save_reader("roberta", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="q8_0")
    fields, tensors = file_fields(file), stored_tensors(file)
    assert fields["bert.pooling_type"] == 1
    assert fields["bert.attention.causal"] is False
    assert fields["bert.context_length"] == 158  # without the positions of the padding token and those before it
    assert tensors["position_embd.weight"].shape == (158, 64)
    assert [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "seperator")] == [2, 3, 3]
    assert (file.parent / "Modelfile").read_text() == f"FROM ./{file.name}\n"
    assert "output.weight" not in tensors
    read = stored(file.parent, tmp_path / "model", lambda _: 0)
    positions = read.weight("embeddings.position_embeddings.weight", turned=False).take(slice(None)).values
    assert positions.shape == (160, 64)
    assert not positions[:2].any()


def test_too_many_texts_and_empty_ones_are_refused(tmp_path: Path) -> None:
    save_reader("bert-mean", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    ours = load(file.parent, threads=1)
    for ids, mask in ((np.full((9, 2), 5), np.ones((9, 2), int)), (np.full((1, 2), 5), np.zeros((1, 2), int))):
        with pytest.raises(Unusable, match="at most 8 texts at once, each of at least one token"):
            ours.forward(Step(ids, mask, positions_of(mask)))


_Change = Callable[[Path], object]


def _modules(modules: list[str], **settings: Any) -> _Change:
    from support.models.sentence_models import write_modules

    return lambda folder: write_modules(folder, modules=modules, **settings)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("bert-mean", _modules(["Transformer", "Pooling"], settings={"pooling_mode": "max"}), "its pooling is max"),
        (
            "bert-mean",
            _modules(["Transformer", "Pooling"], settings={"pooling_mode": ["cls", "mean"]}),
            "its pooling is cls with mean",
        ),
        ("bert-mean", _modules(["Transformer", "WordWeights", "Pooling"]), "how a text becomes one vector, and"),
        (
            "bert-mean",
            lambda folder: write_pooling(folder, Reader("", "", {"hidden_size": 64}, word_pieces, "mean", dense=(64,))),
            "1 linear layers .Dense. follow its pooling, and llama.cpp computes no linear layer",
        ),
        (
            "gemma",
            lambda folder: write_pooling(folder, Reader("", "", {"hidden_size": 64}, word_pieces, "mean", dense=(64,))),
            "1 linear layers .Dense. follow its pooling, and llama.cpp computes 2 linear layers",
        ),
    ],
    ids=["max", "two", "unknown", "dense", "one-dense"],
)
def test_what_llama_cpp_does_not_pool_is_refused_by_name(
    kind: str, change: _Change, words: str, tmp_path: Path
) -> None:
    save_reader(kind, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(GGUFExportError, match=words) as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert caught.value.reason == "FAMILY_UNSUPPORTED"


_ONE = {"id2label": {"0": "score"}}
_GEMMA = {"use_bidirectional_attention": True, "query_pre_attn_scalar": 256, "sliding_window": 512}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Qwen3Model", {}, ""),
        ("BertModel", {}, ""),
        ("BertModel", {"hidden_act": "relu"}, "hidden_act"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("XLMRobertaForSequenceClassification", _ONE, ""),
        ("XLMRobertaForSequenceClassification", {}, "num_labels is 2"),
        ("BertForSequenceClassification", _ONE, "type_vocab_size is 2"),
        ("Qwen3ForSequenceClassification", _ONE, ""),
        ("Qwen3ForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "num_labels is 3"),
        ("ModernBertModel", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("ModernBertModel", {"norm_bias": True}, "norm_bias"),
        ("ModernBertForSequenceClassification", _ONE, ""),
        ("ModernBertForSequenceClassification", {**_ONE, "classifier_activation": "relu"}, "classifier_activation"),
        ("Gemma3TextModel", _GEMMA, ""),
        ("Gemma3TextModel", {**_GEMMA, "use_bidirectional_attention": False}, "use_bidirectional_attention"),
        ("Gemma3TextModel", {**_GEMMA, "query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("Gemma3TextModel", {**_GEMMA, "rope_local_base_freq": 5e4}, "rope_local_base_freq"),
        ("LlamaForSequenceClassification", {"model_type": "llama", **_ONE}, "sequence classifier"),
        ("BertForTokenClassification", {"model_type": "bert"}, "token classifier"),
    ],
    ids=range(19),
)
def test_settings_that_llama_cpp_computes_otherwise_are_refused(
    name: str, settings: dict[str, Any], words: str
) -> None:
    config = ModelConfig({"architectures": [name], "vocab_size": 8, **settings})
    reason = refusal_reason(config)
    assert words in reason
    assert bool(reason) == bool(words)
    assert adapter_refusal(config)  # adapters are written beside models that predict tokens


class _Embedder:
    """A model of BGE's kind, its file, and what transformers reads."""

    def __init__(self, root: Path) -> None:
        self.model = root / "model"
        save_reader("bert-cls", self.model)
        file, _ = write_gguf(self.model, root / "work")
        self.good, self.expected = file.parent, root / "texts.json"
        write_texts(TextSpec(tokenizer=self.model, base=self.model, file=self.expected))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> _Embedder:
    return _Embedder(tmp_path_factory.mktemp("embedder"))


def _without_a_layer(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("blk.2.")]:
        del tensors[name]


def _turned(tensors: dict[str, Any]) -> None:
    tensors["blk.1.attn_q.weight"] = tensors["blk.1.attn_q.weight"].T


def test_a_good_file_has_no_fault(embedder: _Embedder) -> None:
    assert explain(embedder.good, embedder.model) == ""
    found = compare_texts(load(embedder.good, threads=1), embedder.expected)
    assert found is not None
    assert (found.different, found.conversations) == (0, 0), found
    assert found.texts > 40


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"fields": {"bert.pooling_type": 1}}, "by the pooling 'mean', and the model by 'cls'"),
        ({"fields": {"bert.pooling_type": None}}, "by the pooling 'none', and the model by 'cls'"),
        ({"fields": {"bert.block_count": 2}, "change": _without_a_layer}, r"it lacks 16 tensors \(blk.2."),
        ({"change": _turned}, r"1 tensors hold other values than the model's \(blk.1.attn_q.weight\)"),
    ],
    ids=["pooling", "no-pooling", "layer", "turned"],
)
def test_faults_are_named(embedder: _Embedder, fault: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert re.search(words, explain(faulty(embedder.good, tmp_path / "bad", **fault), embedder.model))


def test_a_vocabulary_that_splits_otherwise_is_named(embedder: _Embedder, tmp_path: Path) -> None:
    bad = faulty(embedder.good, tmp_path / "bad", fields={"tokenizer.ggml.normalizer.lowercase": False})
    found = compare_texts(load(bad, threads=1), embedder.expected)
    assert found is not None
    assert found.different > 10
    assert "instead of" in found.first_difference


@pytest.mark.slow
def test_validation_proves_a_good_file_and_names_faults(embedder: _Embedder, tmp_path: Path) -> None:
    """The whole stage, in processes of its own; names of levels are those of copies of one f16 file."""
    outputs = {
        "gguf": embedder.good,
        "gguf-bf16": faulty(embedder.good, tmp_path / "a", fields={"bert.pooling_type": 1}),
        "gguf-q8_0": faulty(embedder.good, tmp_path / "b", change=_turned),
    }
    work = tmp_path / "work"
    work.mkdir()
    params = ValidateParams(effort="quick", sequence_length=48, test_samples=4, benchmark_performance=False)
    report = ValidationReport.read(
        STAGE.run({"base": embedder.model, **outputs}, params, Context(workdir=work))["validation"]
    )
    named = {each.name: each for each in report.outputs}
    assert named["gguf"].status is OutputStatus.PASSED, named["gguf"].explanation
    assert named["gguf"].faithful.yardstick == "stored weights"
    assert named["gguf-bf16"].status is OutputStatus.FAILED
    assert "its pooling or normalization is another" in named["gguf-bf16"].explanation
    assert named["gguf-q8_0"].status is OutputStatus.FAILED
    assert "blk.1.attn_q.weight" in named["gguf-q8_0"].explanation


def test_a_model_without_the_files_of_sentence_transformers_names_no_pooling(tmp_path: Path) -> None:
    save_reader("bert-mean", tmp_path / "model")
    (tmp_path / "model" / "modules.json").unlink()
    file, context = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    assert "bert.pooling_type" not in file_fields(file)
    assert any("--embedding --pooling mean" in each for each in context.facts["warnings"])
    ours = load(file.parent, threads=1)
    assert not ours.embeds
    assert explain(file.parent, tmp_path / "model") == ""


def test_checkpoints_of_other_heads_give_the_same_file(tmp_path: Path) -> None:
    """Names may begin with the body's name, and a head for masked words, or the pooler, makes no vector."""
    save_reader("bert-mean", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    shutil.copytree(tmp_path / "model", tmp_path / "other")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma")] = tensors.pop(name)
        tensors["cls.predictions.bias"] = torch.zeros(VOCABULARY)

    edit_weights(tmp_path / "other", rename)
    other, _ = write_gguf(tmp_path / "other", tmp_path / "again", level="f32")
    assert file.read_bytes() == other.read_bytes()
