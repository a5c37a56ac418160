"""Faults of an adapter's GGUF file are each found by name: lost factors, another base, rows in another order, another template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
import transformers

from slipway.proof.runtime import Unusable
from slipway.stage import Context
from slipway_gguf.lora.stage import STAGE
from slipway_gguf.params import AdapterParams
from slipway_gguf.runtime.adapter import load as load_beside
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.texts import compare_texts, write_texts
from slipway_validate.stage import STAGE as VALIDATE
from support.models.gguf_faults import HEADS, KV_HEADS, Tensors, faulty, save_models

pytestmark = pytest.mark.own_process

_QUERIES = "blk.0.attn_q.weight"


class _Tiny:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, self.adapter, _ = save_models(root)
        (root / "work").mkdir()
        inputs = {"base": self.base, "adapter": self.adapter}
        self.good = STAGE.run(inputs, AdapterParams(name="tiny"), Context(workdir=root / "work"))["adapter"]

    def verdict(self, folder: Path, work: Path) -> dict[str, Any]:
        work.mkdir()
        ctx = Context(workdir=work, threads=1)
        inputs = {"base": self.base, "adapter": self.adapter, "adapter-gguf": folder}
        VALIDATE.run(inputs, ValidateParams(test_samples=2, benchmark_performance=False), ctx)
        found: dict[str, Any] = ctx.facts["outputs"]["adapter-gguf"]
        return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(tmp_path_factory.mktemp("tiny"))


def without_a_pair(tensors: Tensors) -> None:
    for half in "ab":
        del tensors[f"{_QUERIES}.lora_{half}"]


def without_a_half(tensors: Tensors) -> None:
    del tensors[f"{_QUERIES}.lora_b"]


def in_own_order(tensors: Tensors) -> None:
    """Put the rows of queries and keys into transformers' order."""
    for name, values in tensors.items():
        heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else 0
        if heads and name.endswith(".lora_b"):
            tensors[name] = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"change": without_a_pair},
            f"has lost the factors of {_QUERIES}, without which llama.cpp would run it in silence",
        ),
        ({"change": in_own_order}, "something else than base + adapter"),
    ],
    ids=["pair", "rows"],
)
def test_a_fault_is_named(tiny: _Tiny, fault: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = tiny.verdict(faulty(tiny.good, tmp_path / "bad", **fault), tmp_path / "work")
    assert found["status"] == "failed"
    assert said in found["explanation"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"change": without_a_half}, f"has lost the factors of {_QUERIES}"),
        ({"fields": {"general.type": "model"}}, "cannot load tiny-F32-LoRA.gguf beside its base"),
    ],
    ids=["half", "model"],
)
def test_a_file_that_is_not_whole_is_not_loaded(tiny: _Tiny, fault: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=said):
        load_beside(faulty(tiny.good, tmp_path / "bad", **fault), tiny.base, threads=1)


def test_a_file_for_another_base_is_named(tiny: _Tiny, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny.base, hidden_size=128)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.base / name, tmp_path / "wide" / name)
    with pytest.raises(Unusable, match=r"cannot load .* beside its base: .*wrong base model"):
        load_beside(tiny.good, tmp_path / "wide", threads=1)


def test_the_template_is_that_of_the_training(tiny: _Tiny, tmp_path: Path) -> None:
    adapter = shutil.copytree(tiny.adapter, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.base)
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
    )
    tokenizer.save_pretrained(adapter)
    (tmp_path / "work").mkdir()
    ctx = Context(workdir=tmp_path / "work")
    folder = STAGE.run({"base": tiny.base, "adapter": adapter}, AdapterParams(name="tiny"), ctx)["adapter"]
    write_texts(TextSpec(tokenizer=adapter, base=tiny.base, file=tmp_path / "texts.json"))
    found = compare_texts(load_beside(folder, tiny.base, threads=1), tmp_path / "texts.json")
    assert found is not None
    assert found.conversations > 0
    assert (found.rendered_otherwise, found.different) == (0, 0), found
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    found = compare_texts(load_beside(folder, tiny.base, threads=1), tmp_path / "texts.json")
    assert found is not None
    assert found.rendered_otherwise == found.conversations
