"""Packaged folders run as they lie by transformers.js, in Node.js and in Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands.transformers_js import run_example, run_node
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.packaged_models import (
    LEGACY,
    WORDS,
    at_level,
    greedy,
)
from support.models.web_page import result_of_page


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fp16", "int8"])
def test_javascript_continues_as_the_folder_does(decoder: Exported, modules: Path, tmp_path: Path, level: str) -> None:
    folder = at_level(decoder.folder, level, tmp_path / "level")
    assert run_example(folder, modules, WORDS) == [{"generated_text": continued(folder)}]


def continued(folder: Path) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(WORDS).ids
    return str(tokenizer.decode(ids + greedy(folder, ids, 40)))


@pytest.mark.slow
def test_chromium_continues_as_the_folder_does(decoder: Exported, modules: Path, tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    folder = at_level(decoder.folder, "int4", tmp_path / "level")
    # Over many tokens, sums in another order choose another of two tokens that are equally likely.
    found = result_of_page(
        modules=modules / "node_modules", model=folder / "transformers_js", task="text-generation", dtype="q4", text=WORDS,
        options={"max_new_tokens": 40, "do_sample": False}, profile=tmp_path / "profile",
    )  # fmt: skip
    wanted, first = continued(folder), len(WORDS.split()) + 8
    assert found[0]["generated_text"].split()[:first] == wanted.split()[:first]


_TRANSLATE = """
import { env, AutoModelForSeq2SeqLM, Tensor } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = process.cwd() + "/";
const { ids, mask } = JSON.parse(process.argv[2]);
const tensor = (rows) => new Tensor("int64", BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);
const model = await AutoModelForSeq2SeqLM.from_pretrained("model", { dtype: "fp32" });
const found = await model.generate({ inputs: tensor(ids), attention_mask: tensor(mask), max_new_tokens: 12, do_sample: false });
console.log(JSON.stringify(found.tolist(), (_, value) => (typeof value === "bigint" ? Number(value) : value)));
"""


@pytest.mark.slow
def test_javascript_translates_as_transformers_does(
    tmp_path: Path, export: Callable[..., Exported], modules: Path
) -> None:
    import torch
    import transformers

    source = make_family_model("marian-two-vocabularies", tmp_path / "model")
    folder = export(source, packaging=("transformers_js",), **LEGACY).folder
    rows = {"ids": [[5, 6, 7, 8, 9, 2], [9, 10, 2, 1, 1, 1]], "mask": [[1] * 6, [1] * 3 + [0] * 3]}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    wanted = model.generate(
        input_ids=torch.tensor(rows["ids"]), attention_mask=torch.tensor(rows["mask"]), max_new_tokens=12, num_beams=1
    )
    shutil.rmtree(modules / "model", ignore_errors=True)
    shutil.copytree(folder / "transformers_js", modules / "model")
    (modules / "translate.mjs").write_text(_TRANSLATE)
    assert run_node(modules, "translate.mjs", json.dumps(rows)) == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-classes", "bert-tokens", "bert-masked"])
def test_javascript_reads_texts_as_the_graph_does(
    tmp_path: Path, export: Callable[..., Exported], modules: Path, name: str
) -> None:
    source = make_family_model(name, tmp_path / "model")
    text = WORDS
    if name == "bert-masked":
        tokenizer = json.loads((source / "tokenizer_config.json").read_text()) | {"mask_token": "w40"}
        (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        text = "the of w40 to in"
    folder = export(source, packaging=("transformers_js",), engine="legacy", opset=17).folder
    found = run_example(folder, modules, text)
    assert_agrees(name, found, folder, text)


def assert_agrees(name: str, found: Any, folder: Path, text: str) -> None:
    import onnxruntime
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    graph = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    feed = {"input_ids": np.array([tokens.ids]), "attention_mask": np.ones((1, len(tokens.ids)), np.int64)}
    result = graph.run(None, feed)[0]
    if name == "bert-classes":
        chances = np.exp(result[0]) / np.exp(result[0]).sum()
        assert found[0]["label"] == f"LABEL_{chances.argmax()}"
        assert found[0]["score"] == pytest.approx(chances.max(), abs=1e-4)
    elif name == "bert-tokens":
        assert {each["entity"] for each in found} <= {f"LABEL_{label}" for label in result[0].argmax(-1)}
    elif name == "bert-masked":
        assert found[0]["token"] == result[0, 2].argmax()
