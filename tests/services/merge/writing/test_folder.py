"""The merged folder holds the right files and no others, and nothing else on the disk changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.writing import output_file
from slipway_merge.writing.folder import copy_small_files, merged_config
from support.models.sentence_models import write_modules
from support.models.tekken import write_tekken

LEFTOVERS = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "trainer_state.json", "training_args.bin")


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_leftovers_never_travel(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    for name in (*LEFTOVERS, "README.md", "events.out.tfevents.1", "modeling_custom.py", "pytorch_model.bin"):
        (case.adapter / name).write_bytes(b"leftover")
        (case.base / name).write_bytes(b"leftover")
    (case.adapter / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    out, _ = case.merge()
    assert names(out) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


def test_tokenizer_of_the_checkpoint_wins_and_is_not_mixed(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}", vocab_DOT_json="base", chat_template_DOT_jinja="base template")
    write(case.adapter, tokenizer_DOT_json='{"model": {}}', additional_chat_templates__rag_DOT_jinja="rag")
    write(case.adapter, chat_template_DOT_jinja="tuned template", generation_config_DOT_json='{"top_k": 7}')
    out, ctx = case.merge()
    assert (out / "tokenizer.json").read_text() == '{"model": {}}'
    assert (out / "chat_template.jinja").read_text() == "tuned template"
    assert (out / "additional_chat_templates/rag.jinja").read_text() == "rag"
    assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 7}
    assert not (out / "vocab.json").exists()
    assert "tokenizer.json" in ctx.facts["small_files"]


def test_a_checkpoint_of_mistrals_library_gets_a_usual_tokenizer(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json='{"model": {}}', chat_template_DOT_jinja="base template")
    write_tekken(case.adapter)
    out, ctx = case.merge()
    assert {"tekken.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names(out)
    assert "[INST]" in json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    assert "tokenizer.json" in ctx.facts["small_files"]


def test_base_processor_serves_a_checkpoint_that_saved_the_tokenizer_alone(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}")
    (case.base / "video_preprocessor_config.json").write_text("video")
    write(case.adapter, tokenizer_DOT_json='{"model": {}}')
    (case.base / "preprocessor_config.json").write_text("images")
    out, _ = case.merge()
    assert (out / "tokenizer.json").read_text() == '{"model": {}}'
    assert (out / "preprocessor_config.json").read_text() == "images"
    assert (out / "video_preprocessor_config.json").read_text() == "video"


def test_a_processor_of_the_checkpoint_is_not_mixed_and_is_no_tokenizer(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}")
    (case.base / "video_preprocessor_config.json").write_text("video")
    (case.adapter / "processor_config.json").write_text("tuned")
    out, _ = case.merge()
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "processor_config.json").read_text() == "tuned"
    assert not (out / "video_preprocessor_config.json").exists()


def test_base_tokenizer_serves_a_checkpoint_without(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}", chat_template_DOT_jinja="base template")
    out, _ = case.merge()
    assert (out / "tokenizer.json").exists()
    assert (out / "chat_template.jinja").read_text() == "base template"


@pytest.mark.parametrize(
    ("template", "files"),
    [
        ("base template", {"chat_template.jinja": "base template"}),
        (
            [{"name": "default", "template": "base template"}, {"name": "rag", "template": "rag"}],
            {"chat_template.jinja": "base template", "additional_chat_templates/rag.jinja": "rag"},
        ),
        ([{"name": "../../evil", "template": "x"}, {"name": "default", "template": 7}, "default", None], {}),
        ("a lone surrogate: \ud800", {}),
    ],
)
def test_a_template_among_the_bases_settings_serves_a_tokenizer_without_one(make_case, template, files):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}")
    write(case.base, tokenizer_config_DOT_json=json.dumps({"chat_template": template, "model_max_length": 7}))
    write(case.adapter, tokenizer_DOT_json='{"model": {}}', tokenizer_config_DOT_json="{}")
    out, ctx = case.merge()
    found = {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*.jinja")}
    assert found == files
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert set(files) <= set(ctx.facts["small_files"])


def test_files_of_more_templates_do_not_hide_the_one_among_the_settings(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}", tokenizer_config_DOT_json='{"chat_template": "base template"}')
    write(case.base, additional_chat_templates__rag_DOT_jinja="rag")
    write(case.adapter, tokenizer_DOT_json='{"model": {}}', tokenizer_config_DOT_json="{}")
    out, _ = case.merge()
    assert (out / "chat_template.jinja").read_text() == "base template"
    assert (out / "additional_chat_templates/rag.jinja").read_text() == "rag"


def test_a_template_of_the_checkpoints_settings_is_not_replaced(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}", tokenizer_config_DOT_json='{"chat_template": "base template"}')
    write(case.adapter, tokenizer_DOT_json="{}", tokenizer_config_DOT_json='{"chat_template": "tuned template"}')
    out, _ = case.merge()
    assert not list(out.rglob("*.jinja"))
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"chat_template": "tuned template"}


def test_without_tokenizer(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    write(case.base, tokenizer_DOT_json="{}", chat_template_DOT_jinja="base template")
    out, _ = case.merge(save_tokenizer=False)
    assert names(out) == {"config.json", "generation_config.json", "model.safetensors"}


def test_inputs_are_only_read_and_output_stays_in_the_workdir(make_case, tmp_path):
    case = make_case("llama", target_modules=["q_proj"])
    for folder in (case.base, case.adapter):
        for path in folder.iterdir():
            path.chmod(0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()}
    case.merge()
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: stat for path, stat in after.items() if case.workdir not in path.parents} == before


def test_untouched_tensors_are_the_same_bytes(make_case):
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj"])
    out, ctx = case.merge()
    base, merged = load_file(case.base / "model.safetensors"), load_file(out / "model.safetensors")
    assert base.keys() == merged.keys()
    different = {name for name in base if not torch.equal(base[name].view(torch.int16), merged[name].view(torch.int16))}
    assert different == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert (ctx.facts["tensors_merged"], ctx.facts["tensors_copied"]) == (2, len(base) - 2)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_copy_without_the_kernels_help(make_case, monkeypatch):
    """Between some file systems copy_file_range is refused; here it is made to be, since one cannot be mounted everywhere."""
    case = make_case("llama", target_modules=["q_proj"])
    expected, _ = case.merge()
    case.workdir = case.workdir / "again"
    case.workdir.mkdir()

    def refuse(*_):
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr(output_file.os, "copy_file_range", refuse)
    out, _ = case.merge()
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("memory", [1, 200_000, 4 << 30])
def test_blocks_of_any_size_give_the_same_bytes(make_case, memory):
    case = make_case("qwen3", torch.bfloat16, target_modules=["q_proj", "up_proj", "embed_tokens"])
    expected, _ = case.merge()
    ctx = Context(workdir=case.workdir / "again", max_memory_bytes=memory)
    ctx.workdir.mkdir()
    out = STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(), ctx)["pytorch"]
    one, other = load_file(expected / "model.safetensors"), load_file(out / "model.safetensors")
    for name in one:  # the order of float32 sums may depend on the block, which shows in a last bit now and then
        assert (one[name] != other[name]).float().mean() < 2e-3, name


def test_progress_counts_bytes(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    seen = []
    ctx = Context(workdir=case.workdir, on_progress=seen.append)
    STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(), ctx)
    assert seen[-1].phase == "verify"
    last = next(progress for progress in reversed(seen) if progress.phase == "merge")
    assert last.unit == "bytes"
    assert last.done == last.total == (case.workdir / "pytorch/model.safetensors").stat().st_size


def test_facts_per_module(make_case):
    case = make_case("llama", target_modules=["q_proj", "k_proj"], use_rslora=True, rank_pattern={"k_proj": 2})
    out, ctx = case.merge()
    base, merged = load_file(case.base / "model.safetensors"), load_file(out / "model.safetensors")
    assert ctx.facts["ranks"] == [2, 4]
    assert ctx.facts["scalings"] == [5.0, 10 / 2**0.5]
    assert len(ctx.facts["modules"]) == 4
    for module in ctx.facts["modules"]:
        weight = base[module["tensor"]].double()
        change = (merged[module["tensor"]].double() - weight).norm() / weight.norm()
        assert module["relative_change"] == pytest.approx(change.item(), rel=1e-4)
        assert module["unchanged_share"] < 0.01
    json.dumps(ctx.facts)
    assert ctx.facts["output_bytes"] == (out / "model.safetensors").stat().st_size


def test_config_keeps_what_it_does_not_change():
    config = {
        "model_type": "gemma3", "torch_dtype": "float32", "_name_or_path": "/home/me/run", "vocab_size": 10,
        "text_config": {"dtype": "float32", "vocab_size": 10, "tie_word_embeddings": True}, "rope_theta": 1e6,
    }  # fmt: skip
    merged = merged_config(config, dtype="bfloat16", untied=True, vocab_size=12)
    text = {"dtype": "bfloat16", "vocab_size": 12, "tie_word_embeddings": False}
    assert merged == {
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vocab_size": 12, "text_config": text, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    assert config["text_config"]["vocab_size"] == 10


@pytest.mark.parametrize(
    ("own", "trained", "expected"),
    [(False, "BertModel", "base"), (True, "BertModel", "checkpoint"), (False, "BertForSequenceClassification", "")],
)
def test_a_sentence_encoder_keeps_its_pooling_unless_it_got_a_head(
    tmp_path: Path, own: bool, trained: str, expected: str
) -> None:
    base, adapter, output = (tmp_path / name for name in ("base", "adapter", "output"))
    write_modules(base, settings={"pooling_mode": "mean", "of": "base"}, normalized=True)
    for folder in (adapter, output):
        folder.mkdir()
    if own:
        write_modules(adapter, settings={"pooling_mode": "cls", "of": "checkpoint"})
    for folder, name in ((base, "BertModel"), (output, trained)):
        (folder / "config.json").write_text(
            json.dumps({"model_type": "bert", "vocab_size": 9, "architectures": [name]})
        )
    copied = copy_small_files(ModelFolder.open(base), adapter, ModelFolder.open(output), tokenizer=False)
    pooling = output / "1_Pooling" / "config.json"
    assert (json.loads(pooling.read_text())["of"] if pooling.is_file() else "") == expected
    assert ("modules.json" in copied) is bool(expected)
