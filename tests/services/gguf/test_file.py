"""The bytes of a file: what independent readers find in it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipway.errors import GGUFExportError
from support.models.gguf_models import save_family, write_gguf

pytestmark = pytest.mark.own_process

gguf = pytest.importorskip("gguf", reason="reads the files: pip install 'slipway-ml[gguf]'")
pytest.importorskip("xllamacpp", reason="quantizes: pip install 'slipway-ml[gguf]'")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_family("llama", folder)
    return folder


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Any:
    """A copy of the model with other tensors and settings."""

    def edit(change: Any = lambda _: None, **config: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(llama, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        found = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(found))
        return folder

    return edit


def _read(file: Path) -> tuple[Any, dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(file)
    return reader, {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}


@pytest.mark.parametrize("level", ["f16", "q8_0", "q4_k_m", "iq4_xs"])
def test_another_reader_finds_the_models_values(level: str, llama: Path, tmp_path: Path) -> None:
    file, ctx = write_gguf(llama, tmp_path, level=level, threads=2, input_digests={"pytorch": "sha256:1"})
    reader, values = _read(file)
    source = load_file(llama / "model.safetensors")
    assert len(values) == len(source) == ctx.facts["tensors"]
    down, norm = (
        source["model.layers.1.mlp.down_proj.weight"].numpy(),
        source["model.layers.0.input_layernorm.weight"].numpy(),
    )
    error = np.abs(values["blk.1.ffn_down.weight"] - down).max() / np.abs(down).max()
    assert error < {"f16": 1e-3, "q8_0": 1e-2}.get(level, 0.15)
    assert np.array_equal(values["blk.0.attn_norm.weight"], norm)  # float32 at every level
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType[f"MOSTLY_{level.upper()}"]
    assert reader.get_field("slipway.lineage").contents() == "sha256:1"
    assert ctx.facts["size_after_bytes"] == file.stat().st_size
    assert {Path(path).name for path in ctx.digests} == {file.name}


def test_rows_of_queries_and_keys_change_their_order_in_pairs(llama: Path, tmp_path: Path) -> None:
    file, _ = write_gguf(llama, tmp_path, level="f32")
    key = load_file(llama / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"].numpy()
    stored = _read(file)[1]["blk.0.attn_k.weight"]
    assert np.array_equal(stored[:4], key[[0, 8, 1, 9]])  # heads are 16 wide
    assert np.array_equal(stored[16:18], key[[16, 24]])


def test_the_same_bytes_whatever_the_threads(llama: Path, tmp_path: Path) -> None:
    one, _ = write_gguf(llama, tmp_path / "one", level="q4_k_m", threads=1)
    other, _ = write_gguf(llama, tmp_path / "other", level="q4_k_m", threads=3)
    assert one.read_bytes() == other.read_bytes()


def test_experts_of_one_tensor_give_the_same_file(tmp_path: Path) -> None:
    save_family("qwen3moe", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "one", level="q8_0")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = {
            part: torch.stack([tensors.pop(f"{prefix}{index}.{part}_proj.weight") for index in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
        tensors[f"{prefix}down_proj"] = each["down"].contiguous()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    fused, _ = write_gguf(tmp_path / "model", tmp_path / "other", level="q8_0")
    assert fused.read_bytes() == file.read_bytes()


def test_a_tied_head_is_left_out_also_where_the_model_stores_it(edited: Any, tmp_path: Path) -> None:
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    file, _ = write_gguf(edited(tie, tie_word_embeddings=True), tmp_path / "work")
    assert "output.weight" not in _read(file)[1]


def test_a_head_of_its_own_is_written_although_the_settings_tie_it(edited: Any, tmp_path: Path) -> None:
    file, _ = write_gguf(edited(tie_word_embeddings=True), tmp_path / "work")
    assert "output.weight" in _read(file)[1]


def test_the_diagnosis_misses_a_head_of_its_own_although_the_settings_tie_it(edited: Any, tmp_path: Path) -> None:
    from slipway_gguf.diagnosis import explain

    model = edited(tie_word_embeddings=True)
    shutil.copytree(model, tmp_path / "own")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    file, _ = write_gguf(model, tmp_path / "work")
    assert explain(file.parent, model) == ""
    assert explain(file.parent, tmp_path / "own").startswith("its head is lost")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_float16_keep_their_own_type(dtype: torch.dtype, edited: Any, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e6

    file, ctx = write_gguf(edited(enlarge), tmp_path / "work", level="q8_0")
    reader, values = _read(file)
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    assert kinds["blk.1.ffn_up.weight"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    assert values["blk.1.ffn_up.weight"][3, 5] == torch.tensor(1e6, dtype=dtype).item()
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert any("blk.1.ffn_up.weight" in warning for warning in ctx.facts["warnings"])


@pytest.mark.parametrize("level", ["f16", "q8_0", "q4_0"])
def test_rows_that_were_never_trained_are_no_damage(level: str, edited: Any, tmp_path: Path) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][-1] *= 1e-6

    file, _ = write_gguf(edited(shrink), tmp_path / "work", level=level)
    assert file.is_file()


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2, 2)


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        (_poison, "NON_FINITE_WEIGHTS", "model.layers.0.mlp.up_proj.weight"),
        (_add, "GGUF_INVALID", "model.layers.0.mlp.extra.weight"),
        (_integers, "DTYPE_UNSUPPORTED", "model.norm.weight"),
        (lambda tensors: tensors.pop("lm_head.weight"), "GGUF_INVALID", "output.weight"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "GGUF_INVALID", "blk.1.ffn_up.weight"),
    ],
    ids=["nan", "unknown", "integers", "no head", "lost"],
)
def test_wrong_tensors_are_refused_by_name(change: Any, reason: str, named: str, edited: Any, tmp_path: Path) -> None:
    with pytest.raises(GGUFExportError) as caught:
        write_gguf(edited(change), tmp_path / "work")
    assert caught.value.reason == reason
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3}, "num_key_value_heads is 2"),
        ({"head_dim": 24}, "do not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
    ],
    ids=["heads", "width", "layers", "vocabulary", "rope", "factor"],
)
def test_wrong_settings_are_refused_by_name(changes: Any, words: str, edited: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=words) as caught:
        write_gguf(edited(**changes), tmp_path / "work")
    assert type(caught.value).__name__ in ("GGUFExportError", "CheckpointValidationError")


def test_a_window_that_is_not_computed_limits_the_context(edited: Any, tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 48}
    file, ctx = write_gguf(edited(**changes), tmp_path / "work")
    assert _read(file)[0].get_field("llama.context_length").contents() == 48
    assert any("sliding window" in warning for warning in ctx.facts["warnings"])


def test_a_damaged_file_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipway_gguf.weights import writing

    # Nothing damages a file here, so that the test does it between writing and checking.
    def damaged(path: Path, *arguments: Any, **named: Any) -> Any:
        written = writing.write_file(path, *arguments, **named)
        raw = bytearray(path.read_bytes())
        raw[-96:] = bytes(96)
        path.write_bytes(raw)
        return written

    monkeypatch.setattr("slipway_gguf.export.write_file", damaged)
    with pytest.raises(GGUFExportError, match="times as far") as caught:
        write_gguf(llama, tmp_path)
    assert caught.value.reason == "GGUF_INVALID"


def narrow(llama: Path, folder: Path, *, inner: int) -> Path:
    """A Llama that is 80 wide, whose rows blocks of 32 weights do not divide, but for those of its ``inner`` width."""
    sizes = {
        "hidden_size": 80,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
    }
    config = transformers.AutoConfig.from_pretrained(llama, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for path in llama.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("level", ["q8_0", "q4_k_m"])
def test_a_level_that_would_round_nothing_is_refused(llama: Path, tmp_path: Path, level: str) -> None:
    """It got the size of f16 under the level's name."""
    model = narrow(llama, tmp_path / "model", inner=112)
    with pytest.raises(GGUFExportError) as caught:
        write_gguf(model, tmp_path / "work", level=level)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "multiple of 32" in caught.value.message


def test_a_level_that_most_weights_lack_is_said(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(narrow(llama, tmp_path / "model", inner=128), tmp_path / "work", level="q8_0")
    assert "of the weights stay in 16 bits at Q8_0" in caplog.text


@pytest.mark.parametrize(
    ("family", "approximates"), [("gptneox", True), ("falcon", True), ("mpt", True), ("gemma", False), ("llama", False)]
)
def test_a_gelu_that_llama_cpp_approximates_is_a_fact_of_the_file(
    family: str, approximates: bool, tmp_path: Path
) -> None:
    save_family(family, tmp_path / "model")
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    described = json.loads((file.parent / "gguf.json").read_text())
    assert described.get("gelu_approximation", False) is approximates
    assert ctx.facts.get("gelu_approximation", False) is approximates
