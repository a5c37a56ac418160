"""A GGUF file with an adapter: what it says and refuses, and that llama.cpp computes with it, beside the base's file, what peft computes."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import ModelExportError
from slipway.proof.runtime import Unusable
from slipway_gguf.runtime.adapter import load as load_beside
from support.models.gguf_models import (
    llama_distributions,
    save_adapter,
    save_family,
    torch_distributions,
    write_adapter,
    write_gguf,
)
from support.models.gguf_sizes import VOCABULARY
from support.models.saved_adapters import Tensors, edit, write

pytestmark = pytest.mark.own_process

_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 24).tolist()
_QUERIES, _VALUES, _DOWN = (
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
)
_PATTERNS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"q_proj": 8, "down_proj": 2}}


def values(file: Path) -> dict[str, np.ndarray]:
    return {each.name: np.array(each.data) for each in gguf.GGUFReader(file).tensors}


def field(file: Path, key: str) -> Any:
    found = gguf.GGUFReader(file).get_field(key)
    assert found is not None
    return found.contents()


@pytest.mark.parametrize(
    ("lora", "alpha", "folded"),
    [
        ({**_PATTERNS}, 10.0, 0),  # one alpha, which llama.cpp divides by each rank as peft does
        ({**_PATTERNS, "use_rslora": True}, 10 * math.sqrt(8), 4),
        ({**_PATTERNS, "alpha_pattern": {"v_proj": 3}}, 10.0, 2),
        ({"target_modules": ["embed_tokens", "lm_head", "k_proj"]}, 10.0, 0),
    ],
    ids=["ranks", "rslora", "alphas", "embedding-and-head"],
)
def test_each_scaling_is_that_of_peft_and_of_the_merged_file(
    lora: dict[str, Any], alpha: float, folded: int, tmp_path: Path
) -> None:
    model = save_family("llama", tmp_path / "base")
    base, _ = write_gguf(tmp_path / "base", tmp_path / "work", level="f32")
    tuned = save_adapter(model, tmp_path / "adapter", **lora)
    adapter, ctx = write_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "beside")
    assert field(adapter, "adapter.lora.alpha") == pytest.approx(alpha, rel=1e-7)
    assert ctx.facts["folded"] == folded
    found = llama_distributions(base, _TOKENS, adapter=adapter)
    assert np.abs(found - torch_distributions(tuned, _TOKENS)).max() < 2e-5
    (tmp_path / "merged").mkdir()
    for path in (tmp_path / "base").iterdir():
        (tmp_path / "merged" / path.name).write_bytes(path.read_bytes())
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, _ = write_gguf(tmp_path / "merged", tmp_path / "whole", level="f32")
    assert np.abs(found - llama_distributions(merged, _TOKENS)).max() < 2e-5


def test_the_file_says_what_it_is_and_has_the_rows_of_its_base(tmp_path: Path) -> None:
    model = save_family("llama", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    file, ctx = write_adapter(
        tmp_path / "base", tmp_path / "adapter", tmp_path / "work", threads=2, input_digests={"adapter": "sha256:1"}
    )
    expected = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 10.0,
        "general.name": "tiny", "slipway.lineage": "sha256:1",
    }  # fmt: skip
    assert {key: field(file, key) for key in expected} == expected
    assert file.name == "tiny-F32-LoRA.gguf"
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = values(file)
    assert len(found) == len(stored)
    for ours, theirs, heads in (("attn_q", "q_proj", 4), ("attn_v", "v_proj", 0)):
        a, b = (
            stored[f"base_model.model.model.layers.1.self_attn.{theirs}.lora_{half}.weight"].numpy() for half in "AB"
        )
        if heads:  # as llama.cpp's converter permutes the rows of a weight
            b = b.reshape(heads, 2, b.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(b.shape)
        assert np.array_equal(found[f"blk.1.{ours}.weight.lora_a"], a)
        assert np.array_equal(found[f"blk.1.{ours}.weight.lora_b"], b)
    described = json.loads((file.parent / "gguf_adapter.json").read_text())
    assert (described["file"], described["modules"], described["ranks"]) == (file.name, 4, [4])
    assert ctx.digests[file] == f"sha256:{described['sha256']}"
    again, _ = write_adapter(
        tmp_path / "base", tmp_path / "adapter", tmp_path / "again", input_digests={"adapter": "sha256:1"}
    )
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("dtype", "lora", "kinds"),
    [
        (torch.float16, {}, {"F16"}),
        (torch.bfloat16, {}, {"F32"}),
        (torch.float16, {"alpha_pattern": {"v_proj": 3}}, {"F16", "F32"}),
    ],
    ids=["float16", "bfloat16", "float16-folded"],
)
def test_factors_keep_their_values(dtype: torch.dtype, lora: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    model = save_family("qwen3", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", dtype=dtype, target_modules=["k_proj", "v_proj"], **lora)
    file, _ = write_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "work")
    assert {each.tensor_type.name for each in gguf.GGUFReader(file).tensors} == kinds
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for half in "AB":
        expected = stored[f"base_model.model.model.layers.0.self_attn.k_proj.lora_{half}.weight"].float().numpy()
        assert np.array_equal(values(file)[f"blk.0.attn_k.weight.lora_{half.lower()}"].astype(np.float32), expected)


class Planted(NamedTuple):
    """A fault in an adapter."""

    reason: str
    said: str
    tensors: Callable[[Tensors], Tensors] = dict
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed


def renamed(module: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(_QUERIES, module): tensor for name, tensor in tensors.items()}


def with_half(half: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    name = f"base_model.model.{_QUERIES}.lora_{half}.weight"
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


FAULTS = {
    "unknown": Planted(
        "ADAPTER_TENSOR_UNUSED", "has no weight in the base's file", renamed("model.layers.7.self_attn.q_proj")
    ),
    "traversal": Planted("ADAPTER_TENSOR_UNUSED", "../../etc/passwd", renamed("../../etc/passwd")),
    "twice": Planted(
        "ADAPTER_TENSOR_UNUSED",
        "belongs to the same weight as another",
        lambda tensors: (
            tensors | {name.replace(_QUERIES, "blk.0.attn_q"): tensor.clone() for name, tensor in tensors.items()}
        ),
    ),
    "rows": Planted("ADAPTER_BASE_MISMATCH", "blk.0.attn_q.weight has (64, 64)", with_half("B", lambda b: b[:32])),
    "columns": Planted("ADAPTER_BASE_MISMATCH", "shape (64, 32)", with_half("A", lambda a: a[:, :32])),
    "rank": Planted("ADAPTER_CONFIG_INVALID", "at most 65536", settings={"r": 1_000_000_000}),
    "half": Planted(
        "CHECKPOINT_INCOMPLETE", "no partner", lambda tensors: {k: v for k, v in tensors.items() if "lora_A" in k}
    ),
    "nan": Planted("NON_FINITE_WEIGHTS", "NaN or infinity", with_half("B", lambda b: b * float("nan"))),
    "too-strong": Planted("NON_FINITE_WEIGHTS", "NaN or infinity", settings={"alpha_pattern": {"q_proj": 1e60}}),
    "zero": Planted("ADAPTER_NOT_SERVABLE", "all its scalings are zero", settings={"lora_alpha": 0}),
    "empty": Planted("ADAPTER_NOT_SERVABLE", "no pair of factors", lambda _: {}),
    "dora": Planted("ADAPTER_NOT_SERVABLE", "a variant of LoRA", settings={"use_dora": True}),
    "modules_to_save": Planted("ADAPTER_NOT_SERVABLE", "modules_to_save", settings={"modules_to_save": ["lm_head"]}),
    "bias": Planted("ADAPTER_NOT_SERVABLE", "bias", settings={"bias": "all"}),
    "form": Planted("ADAPTER_NOT_SERVABLE", "peft_type", settings={"peft_type": "LOHA"}),
    "stranger": Planted(
        "ADAPTER_NOT_SERVABLE",
        "the tensor 'lm_head.weight'",
        lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.ones(2, 2)},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_adapter_of_this_base_is_refused(fault: str, faultless: tuple[Path, Path], tmp_path: Path) -> None:
    planted, (base, adapter) = FAULTS[fault], faultless
    stored = load_file(adapter / "adapter_model.safetensors")
    write(tmp_path / "adapter", {}, **json.loads((adapter / "adapter_config.json").read_text()))
    edit(tmp_path / "adapter", tensors=lambda _: planted.tensors(stored), **planted.settings)
    with pytest.raises(ModelExportError) as refused:
        write_adapter(base, tmp_path / "adapter", tmp_path / "work")
    assert refused.value.reason == planted.reason, refused.value
    assert planted.said in refused.value.message
    assert refused.value.remedy


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("faultless")
    save_adapter(save_family("llama", root / "base"), root / "adapter", target_modules=["q_proj", "v_proj"])
    return root / "base", root / "adapter"


def test_another_base_is_refused_before_a_file_is_written_and_by_llama(
    faultless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("qwen3", tmp_path / "other")
    file, _ = write_adapter(*faultless, tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Unusable, match=r"cannot load .* beside its base: .*arch"):
        load_beside(file.parent, tmp_path / "other", threads=1)
    assert not list(tmp_path.glob("base-*"))
    settings = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings | {"architectures": ["OPTForCausalLM"]}))
    with pytest.raises(ModelExportError, match="OPTForCausalLM") as refused:
        write_adapter(tmp_path / "other", faultless[1], tmp_path / "again")
    assert refused.value.reason == "FAMILY_UNSUPPORTED"
    with pytest.raises(Unusable, match="cannot be written as GGUF"):
        load_beside(file.parent, tmp_path / "other", threads=1)


def test_preparing_the_base_is_no_part_of_loading(
    faultless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_adapter(*faultless, tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shutil.copy(file, file.with_name("base.gguf"))  # where a user puts the base's
    model = load_beside(file.parent, faultless[0], threads=1)
    assert model.preparation_seconds > 0
    assert model.engine.stored_dtype == "float16"  # the base's file rounds more than the adapter's
    assert list(tmp_path.glob("base-*"))  # for a server that renders conversations
    model.leave_comparison()
    assert not list(tmp_path.glob("base-*"))
    assert model.tokens_of("the weights")


def test_tokens_that_the_base_lacks_are_a_warning_by_name(faultless: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = faultless
    _, plain = write_adapter(base, adapter, tmp_path / "plain")
    assert "warnings" not in plain.facts
    shutil.copytree(adapter, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|tool|>", "<|call|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    _, ctx = write_adapter(base, tmp_path / "adapter", tmp_path / "work")
    [said] = ctx.facts["warnings"]
    assert "2 tokens that the base's lacks, first '<|tool|>'" in said


def test_a_modelfile_names_the_base_and_the_adapter(faultless: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = faultless
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"do_sample": true, "top_k": 20, "eos_token_id": 2}')
    shutil.copytree(adapter, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "adapter", save_jinja_files=False)
    file, _ = write_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "work")
    assert (file.parent / "Modelfile").read_text().splitlines()[1:] == [
        "FROM ./base.gguf", f"ADAPTER ./{file.name}", 'PARAMETER stop "<eos>"', "PARAMETER top_k 20",
    ]  # fmt: skip
    assert (file.parent / "chat_template.jinja").read_text() == tokenizer.chat_template
