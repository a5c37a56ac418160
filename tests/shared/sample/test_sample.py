import json
import os
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipway.configuration import load
from slipway.errors import ModelExportError
from slipway.sample import Recipe, SampleSummary, make_sample
from slipway.sample.corpus import ADAPTER_MODULES, HELDOUT_MODULES, documentation, python_sources
from slipway.stage import Progress

TINY = Recipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=16,
    batch=2,
    sequence=32,
    base_steps=6,
    adapter_steps=6,
    save_steps=3,
    rank=2,
    alpha=3,
)
SCRIPT = """
import sys
from pathlib import Path
from slipway.sample import Recipe, make_sample
for seed, folder in enumerate(("same", "other")):
    make_sample(Path(sys.argv[1]) / folder, seed=seed, threads=1, recipe=Recipe(**eval(sys.argv[2])))
"""
CHECKPOINT_FILES = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "training_args.bin",
}


@pytest.fixture(scope="module")
def steps() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory, steps: list[Progress]) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, threads=1, recipe=TINY, on_progress=steps.append)
    return folder


def test_the_files_are_those_of_a_training_run(sample: Path) -> None:
    base = {path.name for path in (sample / "qwen3-base").iterdir()}
    assert base == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for step in (3, 6):
        checkpoint = sample / "qwen3-finetuned" / f"checkpoint-{step}"
        assert {path.name for path in checkpoint.iterdir()} == CHECKPOINT_FILES
        assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    assert {path.name for path in (sample / "qwen3-finetuned").iterdir()} == {
        "calibration.jsonl",
        "checkpoint-3",
        "checkpoint-6",
    }
    assert {path.name for path in sample.iterdir()} == {
        "export.yaml",
        "heldout",
        "qwen3-base",
        "qwen3-finetuned",
        "sample.json",
    }


def test_base_and_adapter_are_what_they_say(sample: Path) -> None:
    weights = load_file(sample / "qwen3-base" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "lm_head.weight" not in weights  # tied
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (48, 32)
    folder = sample / "qwen3-finetuned" / "checkpoint-6"
    adapter = load_file(folder / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2  # layers, linear layers of each, A and B
    assert all(torch.count_nonzero(tensor) for tensor in adapter.values())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "qwen3-base"
    assert (config["r"], config["lora_alpha"]) == (2, 3)


def test_it_loads_and_speaks(sample: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sample / "qwen3-finetuned" / "checkpoint-6"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sample / "qwen3-base"), folder)
    prompt = tokenizer("def f(self):\n    return 'ü€'", return_tensors="pt")
    assert tokenizer.decode(prompt.input_ids[0]) == "def f(self):\n    return 'ü€'"
    assert set(prompt) == {"input_ids", "attention_mask"}
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4)
    assert answer.shape[1] == prompt.input_ids.shape[1] + 4
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_the_configuration_is_one_that_slipway_takes(sample: Path) -> None:
    configuration = load(sample / "export.yaml", environment={}).configuration
    assert Path(configuration.checkpoint.path).resolve() == sample / "qwen3-finetuned"
    assert configuration.formats.tensorrt.enabled


def test_progress_counts_every_step(sample: Path, steps: list[Progress]) -> None:
    for phase in ("base", "adapter"):
        assert [(step.done, step.total) for step in steps if step.phase == phase] == [(n + 1, 6) for n in range(6)]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_in_another_process(sample: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), repr(asdict(TINY))]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    for name in ("qwen3-base/model.safetensors", "qwen3-finetuned/checkpoint-6/adapter_model.safetensors"):
        mine, same, other = (load_file(folder / name) for folder in (sample, tmp_path / "same", tmp_path / "other"))
        assert mine.keys() == same.keys()
        assert all(torch.equal(mine[key], same[key]) for key in mine)
        assert not all(torch.equal(mine[key], other[key]) for key in mine)
    tokenizers = {(folder / "qwen3-base" / "tokenizer.json").read_text() for folder in (sample, tmp_path / "other")}
    assert len(tokenizers) == 1


def test_a_complete_sample_is_kept_and_another_is_not_overwritten(sample: Path) -> None:
    weights = sample / "qwen3-base" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    summary = make_sample(sample, threads=1, recipe=TINY)
    assert summary == SampleSummary.model_validate_json((sample / "sample.json").read_text())
    for seed, recipe in ((1, TINY), (0, replace(TINY, rank=4))):
        with pytest.raises(ModelExportError, match="already holds") as caught:
            make_sample(sample, seed=seed, recipe=recipe)
        assert caught.value.reason == "OUTPUT_EXISTS"
    assert weights.stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.phase == "adapter":
            raise KeyboardInterrupt

    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    state, offline = torch.get_rng_state(), os.environ.get("HF_HUB_OFFLINE")
    with pytest.raises(KeyboardInterrupt):
        make_sample(tmp_path / "demo", threads=1, recipe=TINY, on_progress=interrupt)
    assert list((tmp_path / "demo").iterdir()) == []
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert os.environ.get("HF_HUB_OFFLINE") == offline


def test_held_out_text_is_of_the_domain_and_was_not_trained_on(sample: Path) -> None:
    assert not set(ADAPTER_MODULES) & set(HELDOUT_MODULES)
    python, english = python_sources(), documentation()
    heldout = (sample / "heldout" / "heldout.txt").read_text()
    assert all(text in heldout for text in python.heldout)
    assert not any(text in python.training for text in python.heldout)
    assert not set(english.training) & set(english.heldout)
    assert min(sum(map(len, corpus.heldout)) for corpus in (python, english)) > 20_000


def test_texts_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelExportError, match=r"argparse\.py") as caught:
        python_sources(tmp_path)
    assert caught.value.reason == "FILE_ERROR"
    # A Python packaged without its documentation topics: the import finds no such name.
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.ModuleType("pydoc_data.topics"))
    with pytest.raises(ModelExportError, match="pydoc_data") as caught:
        documentation()
    assert caught.value.reason == "FILE_ERROR"


def test_a_folder_that_cannot_be_made_is_an_error_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(ModelExportError, match="demo") as caught:
        make_sample(tmp_path / "demo", recipe=TINY)
    assert caught.value.reason == "FILE_ERROR"
