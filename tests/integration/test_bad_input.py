"""Bad models and checkpoints end with their reason, exit code and nothing left behind, by the command a user types.

Hostile input of other kinds has modules of its own: code in a checkpoint (``test_code_in_a_checkpoint``), settings and names
(``test_bad_settings``), clients (``test_bad_clients``, ``test_flooding_clients``), secrets (``test_secrets_stay_secret``), and
below ``tests/shared`` stores and their collection (``artifacts``), links and special files (``files``), terminals and odd places
(``cli``).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands.cli import slipway
from support.commands.project import Project, nothing_left
from support.models import tiny_models


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def truncated_base(project: Project) -> None:
    truncate(project.base / "model.safetensors")


def truncated_adapter(project: Project) -> None:
    truncate(project.checkpoint / "adapter_model.safetensors")


def no_adapter_config(project: Project) -> None:
    (project.checkpoint / "adapter_config.json").unlink()


def broken_adapter_config(project: Project) -> None:
    (project.checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA", ')


def other_base(project: Project) -> None:
    shutil.rmtree(project.base)
    tiny_models.make_base(project.base, hidden=96)


def nan_weights(project: Project) -> None:
    from safetensors.torch import load_file, save_file

    path = project.base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.target,))


def pickle_adapter(project: Project) -> None:
    (project.checkpoint / "adapter_model.safetensors").unlink()
    (project.checkpoint / "adapter_model.bin").write_bytes(pickle.dumps(Payload(project.root / "executed")))


def pickle_base(project: Project) -> None:
    (project.base / "model.safetensors").unlink()
    torch.save(Payload(project.root / "executed"), project.base / "pytorch_model.bin")


def change_config(project: Project, **options: Any) -> None:
    path = project.checkpoint / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def config_that_never_ends(project: Project) -> None:
    (project.checkpoint / "adapter_config.json").unlink()
    (project.checkpoint / "adapter_config.json").symlink_to("/dev/zero")


def config_that_nobody_writes(project: Project) -> None:
    (project.checkpoint / "adapter_config.json").unlink()
    os.mkfifo(project.checkpoint / "adapter_config.json")


def a_billion_layers(project: Project) -> None:
    change_config(project, layer_replication=[[0, 1_000_000_000]])


def rank_beyond_all_numbers(project: Project) -> None:
    path = project.checkpoint / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', '"r": 1e400'))


def pattern_that_is_never_matched(project: Project) -> None:
    change_config(project, target_modules=r"(.*)*x")


def header(path: Path, text: str) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


def shape_of_thousands_of_digits(project: Project) -> None:
    shape = ",".join(["9" * 4000] * 100)
    header(project.base / "model.safetensors", f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}')


def name_that_cannot_be_written(project: Project) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header(project.checkpoint / "adapter_model.safetensors", f'{{"\\ud800":{entry}}}')


def no_checkpoint(project: Project) -> None:
    shutil.rmtree(project.checkpoint)


def no_base(project: Project) -> None:
    shutil.rmtree(project.base)


@pytest.mark.parametrize(
    ("damage", "reason", "code", "says"),
    [
        (truncated_base, "SAFETENSORS_CORRUPT", 3, "model.safetensors"),
        (truncated_adapter, "SAFETENSORS_CORRUPT", 3, "adapter_model.safetensors"),
        (no_adapter_config, "ADAPTER_CONFIG_MISSING", 3, "adapter_config.json"),
        (broken_adapter_config, "ADAPTER_CONFIG_INVALID", 3, "adapter_config.json"),
        (other_base, "ADAPTER_BASE_MISMATCH", 3, "base"),
        pytest.param(nan_weights, "NON_FINITE_WEIGHTS", 3, "model.layers.1.mlp.up_proj.weight", marks=pytest.mark.slow),
        (pickle_adapter, "UNSAFE_PICKLE", 3, "adapter_model.bin"),
        pytest.param(pickle_base, "UNSAFE_PICKLE", 3, "pytorch_model.bin", marks=pytest.mark.slow),
        (config_that_never_ends, "LINK_OUTSIDE", 3, "/dev/zero"),
        (config_that_nobody_writes, "ARTIFACT_INVALID", 3, "special file"),
        (a_billion_layers, "ADAPTER_CONFIG_INVALID", 3, "layer_replication"),
        (rank_beyond_all_numbers, "ADAPTER_CONFIG_INVALID", 3, "r is or holds inf"),
        (pattern_that_is_never_matched, "ADAPTER_CONFIG_INVALID", 3, "target_modules"),
        (shape_of_thousands_of_digits, "SAFETENSORS_CORRUPT", 3, "4000 digits"),
        pytest.param(name_that_cannot_be_written, "SAFETENSORS_CORRUPT", 3, "surrogate", marks=pytest.mark.slow),
        (no_checkpoint, "CHECKPOINT_NOT_FOUND", 3, "run"),
        (no_base, "BASE_MODEL_NOT_FOUND", 3, "base"),
    ],
)
def test_bad_models_end_with_their_reason(
    project: Project, damage: Callable[[Project], None], reason: str, code: int, says: str
) -> None:
    damage(project)
    done = project.export()
    assert (done.code, done.json["reason"]) == (code, reason), done.err
    assert says in done.json["error_message"]
    assert "Traceback" not in done.err
    assert not (project.root / "executed").exists()
    assert nothing_left(project)


@pytest.mark.parametrize(
    "state",
    [
        '{"global_step": 10, "log_history": [{"loss": 1e400}]}',
        f'{{"global_step": {10**30}}}',
        "[" * 100_000,
    ],
    ids=["infinite-loss", "step-beyond-int64", "nested"],
)
def test_a_hostile_state_of_the_trainer_leaves_its_checkpoint_usable(project: Project, state: str) -> None:
    (project.checkpoint / "trainer_state.json").write_text(state)
    done = slipway("checkpoints", "--json", project.run, home=project.home)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out, parse_constant=pytest.fail)["checkpoints"]
    assert (found["step"], found["loss"], found["healthy"]) == (10, None, True)


def test_a_state_of_the_trainer_that_leads_out_makes_its_checkpoint_unusable(project: Project) -> None:
    path = project.checkpoint / "trainer_state.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    done = slipway("checkpoints", "--json", project.run, home=project.home)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out, parse_constant=pytest.fail)["checkpoints"]
    assert found["healthy"] is False
    assert [problem["reason"] for problem in found["problems"]] == ["LINK_OUTSIDE"]
    assert "trainer_state.json" in found["problems"][0]["message"]


@pytest.mark.slow
def test_a_broken_newest_checkpoint_is_named_and_skipped(project: Project) -> None:
    newest = shutil.copytree(project.checkpoint, project.run / "checkpoint-20")
    truncate(newest / "adapter_model.safetensors")
    done = project.export()
    assert done.code == 0, done.err
    assert any("checkpoint-20" in warning for warning in done.json["warnings"])
