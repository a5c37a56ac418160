"""Bad settings, files and places end with their reason, exit code and nothing left behind, by the command a user types."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from slipway.texts import printable
from support.commands.cli import run_here, slipway
from support.commands.project import Project, nothing_left
from support.models import tiny_models


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


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    assert slipway("export", "--nonesuch", home=tmp_path).code == 2
    assert slipway("nonesuch", home=tmp_path).code == 2


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    done = slipway("export", "-c", tmp_path / "nonesuch.yaml", "--json", home=tmp_path)
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_NOT_FOUND")
