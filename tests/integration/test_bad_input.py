"""Bad input ends with its reason, exit code and nothing left behind; each by the command a user types."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipway.texts import printable
from support.commands.cli import Done, run_here, slipway
from support.models import tiny_models


@dataclass(frozen=True)
class Project:
    """A folder with a base, a run and a home; what an export may touch."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint-10"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def export(self, *more: str, **environment: str) -> Done:
        formats = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")
        where = ("--base-model", str(self.base), "--checkpoint", str(self.run), "--out", str(self.out))
        return slipway("export", "--json", *where, *formats, *more, home=self.home, **environment)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture
def project(models: Path, tmp_path: Path) -> Project:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    project = Project(tmp_path)
    config = project.checkpoint / "adapter_config.json"
    # The copy names its own base, so that a damaged one is not compared with the whole one.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(project.base)}))
    return project


def nothing_left(project: Project) -> bool:
    outputs = [] if not project.out.exists() else list(project.out.iterdir())
    scratch = project.home / "scratch"
    return outputs == [] and (not scratch.exists() or list(scratch.iterdir()) == [])


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


def unknown_adapter_type(project: Project) -> None:
    path = project.checkpoint / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "peft_type": "PROMPT_TUNING"}))


def weights_of_another_form(project: Project) -> None:
    path = project.checkpoint / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))


def other_base(project: Project) -> None:
    shutil.rmtree(project.base)
    tiny_models.make_base(project.base, hidden=96)


def nan_weights(project: Project) -> None:
    from safetensors.torch import load_file, save_file

    path = project.base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def adapter_without_effect(project: Project) -> None:
    from safetensors.torch import load_file, save_file

    path = project.checkpoint / "adapter_model.safetensors"
    tensors = {name: tensor * (0 if "lora_B" in name else 1) for name, tensor in load_file(path).items()}
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
    (project.base / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(project.root / "executed")))


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


def a_base_of_a_billion_layers(project: Project) -> None:
    path = project.base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1_000_000_000}))


def rank_beyond_all_numbers(project: Project) -> None:
    path = project.checkpoint / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', '"r": 1e400'))


def pattern_that_is_never_matched(project: Project) -> None:
    change_config(project, target_modules=r"(.*)*x")


def rank_pattern_that_is_never_matched(project: Project) -> None:
    change_config(project, rank_pattern={r"(.*)*x": 4})


def pattern_that_is_never_compiled(project: Project) -> None:
    change_config(project, target_modules="a{99999999999999}")


def header(path: Path, text: str) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


def shape_of_thousands_of_digits(project: Project) -> None:
    shape = ",".join(["9" * 4000] * 100)
    header(project.base / "model.safetensors", f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}')


def shape_of_thousands_of_dimensions(project: Project) -> None:
    shape = ",".join(["9" * 18] * 100_000)
    header(project.base / "model.safetensors", f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}')


def thousands_of_names_and_one_twice(project: Project) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = ",".join(f'"t{number % 49_999}":{entry}' for number in range(50_000))
    header(project.base / "model.safetensors", f"{{{names}}}")


def more_tensors_than_a_file_has(project: Project) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = ",".join(f'"t{number}":{entry}' for number in range(200_000))
    header(project.checkpoint / "adapter_model.safetensors", f"{{{names}}}")


def name_that_cannot_be_written(project: Project) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header(project.checkpoint / "adapter_model.safetensors", f'{{"\\ud800":{entry}}}')


def pickle_that_grows(project: Project) -> None:
    """Kilobytes that become a gigabyte when they are unpacked."""
    (project.base / "model.safetensors").unlink()
    with zipfile.ZipFile(project.base / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/version", "3")
        with archive.open("archive/data.pkl", "w") as member:
            for _ in range(300):
                member.write(b"N" * (1 << 20))
            member.write(b".")


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
        pytest.param(unknown_adapter_type, "ADAPTER_UNSUPPORTED", 6, "PROMPT_TUNING", marks=pytest.mark.slow),
        pytest.param(
            weights_of_another_form, "CHECKPOINT_INCOMPLETE", 3, "lora_magnitude_vector", marks=pytest.mark.slow
        ),
        (other_base, "ADAPTER_BASE_MISMATCH", 3, "base"),
        pytest.param(nan_weights, "NON_FINITE_WEIGHTS", 3, "model.layers.1.mlp.up_proj.weight", marks=pytest.mark.slow),
        pytest.param(adapter_without_effect, "ADAPTER_NO_EFFECT", 3, "adapter", marks=pytest.mark.slow),
        (pickle_adapter, "UNSAFE_PICKLE", 3, "adapter_model.bin"),
        pytest.param(pickle_base, "UNSAFE_PICKLE", 3, "pytorch_model.bin", marks=pytest.mark.slow),
        (config_that_never_ends, "LINK_OUTSIDE", 3, "/dev/zero"),
        (config_that_nobody_writes, "ARTIFACT_INVALID", 3, "special file"),
        (a_billion_layers, "ADAPTER_CONFIG_INVALID", 3, "layer_replication"),
        pytest.param(a_base_of_a_billion_layers, "BASE_MODEL_INVALID", 3, "num_hidden_layers", marks=pytest.mark.slow),
        (rank_beyond_all_numbers, "ADAPTER_CONFIG_INVALID", 3, "r is or holds inf"),
        (pattern_that_is_never_matched, "ADAPTER_CONFIG_INVALID", 3, "target_modules"),
        pytest.param(
            rank_pattern_that_is_never_matched, "ADAPTER_CONFIG_INVALID", 3, "rank_pattern", marks=pytest.mark.slow
        ),
        pytest.param(
            pattern_that_is_never_compiled, "ADAPTER_CONFIG_INVALID", 3, "regular expression", marks=pytest.mark.slow
        ),
        (shape_of_thousands_of_digits, "SAFETENSORS_CORRUPT", 3, "4000 digits"),
        pytest.param(
            shape_of_thousands_of_dimensions, "SAFETENSORS_CORRUPT", 3, "impossible shape", marks=pytest.mark.slow
        ),
        pytest.param(thousands_of_names_and_one_twice, "SAFETENSORS_CORRUPT", 3, "'t0' twice", marks=pytest.mark.slow),
        pytest.param(more_tensors_than_a_file_has, "SAFETENSORS_CORRUPT", 3, "tensors", marks=pytest.mark.slow),
        pytest.param(name_that_cannot_be_written, "SAFETENSORS_CORRUPT", 3, "surrogate", marks=pytest.mark.slow),
        pytest.param(pickle_that_grows, "UNSAFE_PICKLE", 3, "compressed", marks=pytest.mark.slow),
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


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("formats.onx.enabled=true", ["formats.onx", "onnx"]),
        ("optimization.quantization=int5", ["optimization.quantization", "int5", "int4"]),
        ("optimization.group_size=33", ["optimization.group_size", "33", "32"]),
        ("formats.pytorch.enabled=false", ["formats"]),
    ],
)
def test_bad_settings_are_named_with_one_that_works(project: Project, setting: str, names: list[str]) -> None:
    done = project.export("--set", setting)
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID"), done.err
    assert [name for name in names if name not in done.json["error_message"]] == []
    assert nothing_left(project)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--checkpoint", "~nosuchuser/run"),
        ("--base-model", "~nosuchuser/base"),
        ("--out", "~nosuchuser/out"),
        ("--set", "output.naming_pattern=\x1b[31m{model_name}"),
        ("--set", "resources.max_memory_bytes=99999999999999999999"),
        ("--set", "combination.seed=" + "9" * 5000),
        ("--set", "combination.weights=1e400,1"),
        ("--set", "validation.heldout=a\u202eb"),
        ("--set", "x" * 100_000 + "=1"),
        ("--base-model", "x" * 100_000),
        ("--checkpoint", "\udcff"),
    ],
    ids=lambda words: f"{words[-1]!a:.30}",
)
def test_flags_that_nothing_can_be_made_of(
    project: Project, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--base-model", project.base, "--checkpoint", project.run, "--out", project.out)
    assert run_here("export", "--plan", "--json", *where, *arguments) == 3
    said, err = capsys.readouterr()
    assert json.loads(said)["reason"] in {"CONFIGURATION_INVALID", "CHECKPOINT_NOT_FOUND", "BASE_MODEL_NOT_FOUND"}
    assert len(said) < 100_000
    assert printable(said + err) == said + err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "document",
    [
        "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghij")),
                   "export: {combination: {adapters: *j}}"]),
        "export: {checkpoint: {path: 2001-99-99}}",
        "export: {resources: {threads: 0x_, max_memory_bytes: !!int abc}}",
        "export: {combination: {seed: " + "9" * 5000 + "}}",
        "export: " + "[" * 50_000,
        "export: {<<: 3}",
        'export: {validation: {heldout: "\\ud800"}}',
    ],
    ids=["bomb", "date", "scalars", "digits", "deep", "merge", "surrogate"],
)  # fmt: skip
def test_files_that_nothing_can_be_made_of(project: Project, document: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = project.root / "export.yaml"
    file.write_text(document)
    for source in ("--base-model", project.base, "--checkpoint", project.run), ():
        assert run_here("export", "-c", file, "--plan", "--json", *source) == 3
        said, err = capsys.readouterr()
        assert json.loads(said)["reason"] == "CONFIGURATION_INVALID", said
        assert len(said) < 100_000
        assert "Traceback" not in err


def test_a_file_without_an_end_is_no_configuration(project: Project) -> None:
    done = project.export("-c", "/dev/zero")
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID"), done.err


def test_a_checkpoint_whose_name_a_terminal_would_obey(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    run = project.run.rename(project.root / "run\x1b[31m\nforged\u202e")
    (run / "checkpoint-10" / "adapter_model.safetensors").write_bytes(b"")
    assert run_here("checkpoints", run) == 0
    assert run_here("checkpoints", run, "--json") == 0
    assert run_here("checkpoints", run / "gone") == 3
    said, err = capsys.readouterr()
    assert said
    assert err
    assert printable(said + err) == said + err


def test_all_bad_settings_are_reported_at_once(project: Project) -> None:
    done = project.export("--set", "formats.onx.enabled=true", "--set", "validation.test_samples=0")
    assert "formats.onx" in done.json["error_message"]
    assert "validation.test_samples" in done.json["error_message"]


@pytest.mark.slow
def test_a_full_disk_ends_with_its_reason_and_nothing_left(project: Project, small_disk: Path) -> None:
    # A base too large for the disk that SLIPWAY_HOME lies on, so that the merged model cannot be written.
    shutil.rmtree(project.base)
    tiny_models.make_base(project.base, hidden=448)
    shutil.rmtree(project.run)
    tiny_models.make_checkpoint(project.base, project.run)
    done = project.export(SLIPWAY_HOME=str(small_disk / "home"))
    assert (done.code, done.json["reason"]) == (5, "DISK_FULL"), done.err
    scratch = small_disk / "home" / "scratch"
    assert not scratch.exists() or list(scratch.iterdir()) == []
    assert not project.out.exists() or list(project.out.iterdir()) == []


def test_an_output_that_cannot_be_written_is_found_before_any_work(project: Project) -> None:
    project.out.touch()
    done = project.export("--progress", "json")
    assert (done.code, done.json["reason"]) == (3, "FILE_ERROR"), done.err
    assert str(project.out) in done.json["error_message"]
    assert '"task"' not in done.err


@pytest.mark.slow
def test_a_relative_base_of_the_adapter_is_found_beside_the_run(project: Project) -> None:
    config = project.checkpoint / "adapter_config.json"
    document = json.loads(config.read_text()) | {"base_model_name_or_path": "base"}
    config.write_text(json.dumps(document))
    done = slipway(
        *("export", "--plan", "--json", "--checkpoint", str(project.run), "--out", str(project.out)),
        home=project.home,
    )
    assert done.code == 0, done.err
    assert done.json["sources"]["base"] == str(project.base.resolve())


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    assert slipway("export", "--nonesuch", home=tmp_path).code == 2
    assert slipway("nonesuch", home=tmp_path).code == 2


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    done = slipway("export", "-c", tmp_path / "nonesuch.yaml", "--json", home=tmp_path)
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_NOT_FOUND")
