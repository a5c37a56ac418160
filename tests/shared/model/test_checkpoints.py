"""The newest whole checkpoint is found by step, broken ones are named, and only what must travel does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import CheckpointValidationError
from slipway.model.model_files import travelling_files
from slipway.model.runs.checkpoints import find_checkpoint, list_checkpoints
from support.models.tiny_models import base_model

HEADER = json.dumps({"base_model.model.x.lora_A.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(16)
LEFTOVERS = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin", "README.md")


def make(
    folder: Path, step: int | None = None, *, losses: tuple[float, ...] = (), mtime: int = 0, **config: Any
) -> Path:
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 6, "base_model_name_or_path": "some/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    if step is not None:
        log = [{"loss": loss, "step": number} for number, loss in enumerate(losses)]
        state = {"global_step": step, "log_history": [*log, {"eval_loss": 9.5}, {"train_runtime": 1.0}]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    if mtime:
        os.utime(folder, (mtime, mtime))
    return folder


def failure(path: Path, **options: Any) -> CheckpointValidationError:
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(path, **options)
    return caught.value


def test_newest_by_step_not_by_time_nor_by_name(tmp_path):
    make(tmp_path / "run/checkpoint-900", 900, mtime=2_000_000_000)
    make(tmp_path / "run/checkpoint-1000", 1000, losses=(3.0, 2.5), mtime=1_000_000_000)
    make(tmp_path / "run/checkpoint-50", 50, mtime=1_900_000_000)
    found = find_checkpoint(tmp_path / "run")
    assert found.path == tmp_path / "run/checkpoint-1000"
    assert (found.step, found.loss, found.eval_loss, found.rank) == (1000, 2.5, 9.5, 6)
    assert found.base_model == "some/base"
    assert found.warnings == ()
    steps = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")]
    assert steps == [1000, 900, 50]


def test_trainer_state_beats_the_folders_number(tmp_path):
    make(tmp_path / "run/checkpoint-900", 900)
    make(tmp_path / "run/checkpoint-7", 1200)
    found = find_checkpoint(tmp_path / "run")
    assert (found.path.name, found.step) == ("checkpoint-7", 1200)
    assert "1200" in found.warnings[0]


def test_number_serves_without_trainer_state(tmp_path):
    make(tmp_path / "run/checkpoint-30")
    broken = make(tmp_path / "run/checkpoint-40")
    (broken / "trainer_state.json").write_text("{half")
    found = find_checkpoint(tmp_path / "run")
    assert found.step == 40
    assert "trainer_state.json is not readable" in found.warnings[0]


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def pickle_only(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


DAMAGE = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "ADAPTER_CONFIG_MISSING", "adapter_config.json"),
    "bad config": (lambda f: (f / "adapter_config.json").write_text("{"), "ADAPTER_CONFIG_INVALID", "JSON"),
    "config is a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "ADAPTER_CONFIG_INVALID", "peft_type"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "CHECKPOINT_INCOMPLETE", "no adapter_model"),
    "empty": (lambda f: (f / "adapter_model.safetensors").write_bytes(b""), "CHECKPOINT_INCOMPLETE", "half-written"),
    "truncated": (cut, "SAFETENSORS_CORRUPT", "truncated"),
    "pickle": (pickle_only, "UNSAFE_PICKLE", "pickle"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_broken_newest_is_skipped_with_the_reason(tmp_path, case):
    damage, reason, words = DAMAGE[case]
    make(tmp_path / "run/checkpoint-100", 100)
    damage(make(tmp_path / "run/checkpoint-200", 200))
    found = find_checkpoint(tmp_path / "run")
    assert found.step == 100
    assert "checkpoint-200" in found.warnings[0]
    assert words in found.warnings[0]
    newest = list_checkpoints(tmp_path / "run")[0]
    assert not newest.healthy
    assert newest.problems[0].reason == reason
    json.dumps(newest.to_json())


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("inside", [True, False])
def test_broken_only_one_fails_with_its_own_reason(tmp_path, case, inside):
    damage, reason, words = DAMAGE[case]
    folder = make(tmp_path / "run/checkpoint-200", 200)
    damage(folder)
    error = failure(folder if inside else tmp_path / "run")
    assert error.reason == reason
    assert words in str(error)
    assert error.remedy


@pytest.mark.parametrize("place", ["run", "run/checkpoint-5"])
def test_adapters_with_names_are_in_folders_of_their_own(tmp_path, place):
    """peft puts an adapter that is not called ``default`` into a folder of its name."""
    make(tmp_path / place / "sql")
    make(tmp_path / place / "chat")
    error = failure(tmp_path / place)
    assert "chat, sql" in str(error)
    assert error.remedy == f"name {tmp_path / place / 'chat'}"
    assert find_checkpoint(tmp_path / place / "sql").healthy


MLX = {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}


@pytest.mark.parametrize(
    ("files", "reason", "words", "remedy"),
    [
        (("adapters.safetensors", "adapter_config.json"), "ADAPTER_CONFIG_INVALID", "an adapter of MLX", "mlx_lm.fuse"),
        (
            ("adapter_0.pt",),
            "CHECKPOINT_NOT_FOUND",
            "adapter_0.pt is an adapter of torchtune",
            "FullModelHFCheckpointer",
        ),
        (("megatron_lora.nemo",), "CHECKPOINT_NOT_FOUND", "megatron_lora.nemo is an adapter of NeMo", "NeMo"),
    ],
    ids=["mlx", "torchtune", "nemo"],
)
def test_adapters_of_other_tools_are_named(tmp_path, files, reason, words, remedy):
    for name in files:
        (tmp_path / name).write_text(json.dumps(MLX))
    error = failure(tmp_path)
    assert error.reason == reason
    assert words in str(error)
    assert remedy in error.remedy


def test_several_broken_ones_are_all_named(tmp_path):
    cut(make(tmp_path / "run/checkpoint-100", 100))
    pickle_only(make(tmp_path / "run/checkpoint-200", 200))
    error = failure(tmp_path / "run")
    assert error.reason == "UNSAFE_PICKLE"
    assert "checkpoint-100" in str(error)
    assert "checkpoint-200" in str(error)


def test_of_many_broken_ones_few_are_named_and_the_others_counted(tmp_path):
    make(tmp_path / "run/checkpoint-1", 1)
    for number in range(100, 140):
        (tmp_path / f"run/checkpoint-{number}").mkdir()
    found = find_checkpoint(tmp_path / "run")
    assert found.path == tmp_path / "run/checkpoint-1"
    assert len(found.warnings) == 6
    assert found.warnings[0].startswith(f"skipped {tmp_path / 'run/checkpoint-139'}: ")
    assert found.warnings[-1] == f"skipped 35 more checkpoints: slipway checkpoints {tmp_path / 'run'} names them"
    (tmp_path / "run/checkpoint-1/adapter_model.safetensors").unlink()
    error = failure(tmp_path / "run")
    assert "41 checkpoints, none usable" in error.message
    assert "36 more checkpoints" in error.message
    assert len(error.message) < 2500


def test_unfinished_save_is_not_taken(tmp_path):
    make(tmp_path / "run/checkpoint-100", 100)
    make(tmp_path / "run/tmp-checkpoint-200")
    found = find_checkpoint(tmp_path / "run")
    assert found.step == 100
    assert "still being written" in found.warnings[0]


def test_the_named_folder_itself(tmp_path):
    make(tmp_path / "run/checkpoint-100", 100)
    make(tmp_path / "run/checkpoint-200", 200)
    assert find_checkpoint(tmp_path / "run/checkpoint-100").step == 100
    final = make(tmp_path / "adapter")
    assert (find_checkpoint(final).path, find_checkpoint(final).step) == (final, None)
    assert find_checkpoint(final, auto_detect_latest=False).path == final


def test_no_search_unless_asked(tmp_path):
    make(tmp_path / "run/checkpoint-100", 100)
    error = failure(tmp_path / "run", auto_detect_latest=False)
    assert error.reason == "CHECKPOINT_NOT_FOUND"
    assert "auto_detect_latest" in error.remedy


def test_nothing_there(tmp_path):
    assert failure(tmp_path / "none").reason == "CHECKPOINT_NOT_FOUND"
    (tmp_path / "empty/checkpoint-x").mkdir(parents=True)
    (tmp_path / "empty/checkpoint-5").write_text("a file")
    assert failure(tmp_path / "empty").reason == "CHECKPOINT_NOT_FOUND"


def test_full_model_is_told_from_an_adapter(tmp_path):
    folder = tmp_path / "run/checkpoint-10"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    assert "whole model" in str(failure(tmp_path / "run"))


def test_only_what_must_travel(tmp_path):
    folder = make(tmp_path / "checkpoint-5", 5)
    for name in (*LEFTOVERS, "adapter_model.bin", "tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        (folder / name).write_text("x")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("x")
    names = [path.relative_to(folder).as_posix() for path in travelling_files(folder)]
    assert names == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "special_tokens_map.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
@pytest.mark.parametrize("below", ["", "checkpoint-20"])
def test_a_full_fine_tune_is_named_as_one(tmp_path, weights, below):
    run = tmp_path / "run"
    run.mkdir()
    folder = base_model(run / below if below else tmp_path / "model", "config.json", weights)
    found = folder.parent if below else folder
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(found)
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
    assert caught.value.failure().exit_code == 6
    assert "whole model" in caught.value.message
    assert "adapter_config.json" not in caught.value.remedy
    assert f"slipway export --base-model {folder}" in caught.value.remedy
    (checkpoint,) = list_checkpoints(found)
    assert [problem.reason for problem in checkpoint.problems] == ["ADAPTER_UNSUPPORTED"]


def test_an_adapter_beside_a_model_is_an_adapter(tmp_path):
    folder = base_model(tmp_path / "run", "config.json", "model.safetensors", "adapter_model.safetensors")
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(folder)
    assert caught.value.reason == "ADAPTER_CONFIG_MISSING"


def record_best(run: Path, *, name: str, metric: float = 1.25) -> None:
    """What Trainer writes into the state of every checkpoint saved from then on."""
    newest = list_checkpoints(run)[0].path / "trainer_state.json"
    state = json.loads(newest.read_text())
    newest.write_text(json.dumps({**state, "best_model_checkpoint": name, "best_metric": metric}))


@pytest.mark.parametrize("name", ["/mnt/runs/a/checkpoint-20", "outputs\\a\\checkpoint-20", "./a/checkpoint-20/"])
def test_best_by_the_newest_state_wherever_training_ran(tmp_path, name):
    for step in (10, 20, 30):
        make(tmp_path / f"run/checkpoint-{step}", step)
    record_best(tmp_path / "run", name=name)
    assert find_checkpoint(tmp_path / "run").step == 30
    best = find_checkpoint(tmp_path / "run", select="best")
    assert (best.step, best.best, best.best_metric) == (20, True, 1.25)
    assert [checkpoint.best for checkpoint in list_checkpoints(tmp_path / "run")] == [False, True, False]


def test_best_that_nobody_recorded(tmp_path):
    make(tmp_path / "run/checkpoint-10", 10)
    error = failure(tmp_path / "run", select="best")
    assert error.reason == "CHECKPOINT_NOT_FOUND"
    assert "no trainer_state.json names a best one" in error.message
    assert "checkpoint.select" in error.remedy


def test_best_that_is_gone(tmp_path):
    make(tmp_path / "run/checkpoint-10", 10)
    record_best(tmp_path / "run", name="run/checkpoint-5")
    error = failure(tmp_path / "run", select="best")
    assert error.reason == "CHECKPOINT_NOT_FOUND"
    assert "checkpoint-5, does not exist any more" in error.message


def test_best_that_is_broken_is_never_exchanged_for_another(tmp_path):
    make(tmp_path / "run/checkpoint-10", 10)
    make(tmp_path / "run/checkpoint-20", 20)
    cut(tmp_path / "run/checkpoint-10")
    record_best(tmp_path / "run", name="run/checkpoint-10")
    assert find_checkpoint(tmp_path / "run").step == 20
    assert failure(tmp_path / "run", select="best").reason == "SAFETENSORS_CORRUPT"


@pytest.mark.slow
def test_fsdp_shards_are_recognised_and_their_command_converts_them(tmp_path):
    """The command in the remedy is run as it stands, on shards as accelerate saves them."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    folder = make(tmp_path / "a run/checkpoint-10", 10)
    (folder / "adapter_model.safetensors").unlink()
    weights = {
        "base_model.model.x.lora_A.weight": torch.randn(2, 3),
        "base_model.model.x.lora_B.weight": torch.ones(4, 2),
    }
    dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"), no_dist=True)
    error = failure(tmp_path / "a run")
    assert error.reason == "CHECKPOINT_SHARDED"
    assert "FSDP" in error.message
    command = error.remedy.removeprefix("run: ")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=tools, check=False)
    assert done.returncode == 0, done.stderr
    assert find_checkpoint(tmp_path / "a run").step == 10
    converted = load_file(folder / "adapter_model.safetensors")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)


def test_fsdp_shards_without_their_metadata_never_became_a_checkpoint(tmp_path):
    folder = make(tmp_path / "run/checkpoint-10", 10)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "pytorch_model_fsdp_0").mkdir()
    error = failure(tmp_path / "run")
    assert error.reason == "CHECKPOINT_SHARDED"
    assert "did not finish" in error.message


def test_deepspeed_shards_are_recognised(tmp_path):
    folder = make(tmp_path / "run/checkpoint-10", 10)
    (folder / "adapter_model.safetensors").unlink()
    for step in (9, 10):
        shard = folder / f"global_step{step}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        shard.parent.mkdir()
        shard.write_bytes(b"pickle")
    error = failure(tmp_path / "run")
    assert error.reason == "CHECKPOINT_SHARDED"
    command = (
        f"cd {folder} && python -P -m deepspeed.utils.zero_to_fp32 . converted --tag global_step10 --safe_serialization"
    )
    assert command in error.remedy


def test_an_adapter_beside_its_shards_is_taken(tmp_path):
    folder = make(tmp_path / "run/checkpoint-10", 10)
    (folder / "global_step10").mkdir()
    assert find_checkpoint(tmp_path / "run").healthy


@pytest.mark.parametrize(
    "name",
    ["non_lora_trainables.bin", "value_head.safetensors", "new_embeddings.safetensors", "projector.pt", "head.pth"],
)
def test_trained_weights_that_nothing_reads_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "run")
    (folder / name).write_bytes(b"weights")
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(folder)
    assert caught.value.reason == "CHECKPOINT_HAS_MORE_WEIGHTS"
    assert name in caught.value.message
    assert "move the file" in caught.value.remedy


def test_what_trainers_leave_beside_an_adapter_is_known(tmp_path: Path) -> None:
    """Names of transformers, accelerate, peft, DeepSpeed, FSDP, TRL, Unsloth and Axolotl."""
    folder = make(tmp_path / "run")
    for name in (
        *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"),
        *("adapter_model.bin", "pytorch_model_fsdp.bin", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        *("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "random_states_0.pkl", "sampler.bin", "model.safetensors"),
        *("model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin", "tokenizer.model", "README.md", "events.out"),
    ):  # fmt: skip
        (folder / name).write_bytes(b"state")
    assert find_checkpoint(folder).healthy
