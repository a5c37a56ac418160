"""Commands against a coordinator: their output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.client import Client
from support.commands.cli import run_here
from support.commands.drawn import left_on_screen
from support.commands.terminal import on_terminal
from support.coordinators.harness import Harness, tiny_export, tiny_task

FACTS = {
    "failed_outputs": ["onnx-int4"],
    "outputs": {
        "onnx-int4": {"explanation": "mean KL is 0.4, limit 0.02", "remedy": "use int8"},
        "onnx": {"explanation": "", "remedy": ""},
    },
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("h")) as harness:
        yield harness


@pytest.fixture(autouse=True)
def connected(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLIPWAY_COORDINATOR", harness.address)


def validated(harness: Harness, export_id: str, **facts: object) -> str:
    """Run an export whose validation records these facts; return its name."""
    tasks = (tiny_task("onnx"), tiny_task("validation", needs=("onnx",), facts=facts))
    name = harness.submit(tiny_export(export_id, *tasks, base=harness.base()))
    assert harness.finished(name).outputs["validation"]
    return name


def test_watching_leaves_the_code_that_an_export_would(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    wrong, right = validated(harness, "wrong", **FACTS), validated(harness, "right", failed_outputs=[], outputs={})
    assert run_here("watch", right) == 0
    assert "error" not in capfd.readouterr().out
    assert run_here("watch", wrong) == 4
    shown = " ".join(capfd.readouterr().out.split())
    assert "[VALIDATION_FAILED] onnx-int4 failed validation: mean KL is 0.4, limit 0.02; use int8" in shown
    both = {name: {"explanation": f"{name} is far off", "remedy": "use int8"} for name in ("onnx-int4", "onnx-int3")}
    assert run_here("watch", validated(harness, "both", failed_outputs=list(both), outputs=both)) == 4
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    assert lines[lines.index("error [VALIDATION_FAILED] 2 outputs failed validation") + 1 :][:3] == [
        "onnx-int4 failed validation: onnx-int4 is far off",
        "onnx-int3 failed validation: onnx-int3 is far off",
        "use int8",
    ]
    assert run_here("get", wrong) == 0  # what was asked for is there
    assert "VALIDATION_FAILED" in capfd.readouterr().out


def test_a_short_digest_is_looked_for_in_the_project(
    harness: Harness, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("of a project")
    with Client(harness.address) as client:
        digest = client.push_artifact(folder)
    assert run_here("pull", digest[:19], tmp_path / "pulled") == 0
    assert (tmp_path / "pulled" / "a").read_text() == "of a project"
    assert run_here("verify", digest[:19]) == 0
    capfd.readouterr()
    assert run_here("pull", "sha256:" + "0" * 12, tmp_path / "other", "--json") == 3
    told = json.loads(capfd.readouterr().out)
    assert (told["reason"], "no artifact begins with" in told["error_message"]) == ("ARTIFACT_NOT_FOUND", True)


def test_submit_says_how_much_is_brought(harness: Harness, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, adapter = tmp_path / "base", tmp_path / "run" / "checkpoint-5"
    base.mkdir()
    adapter.mkdir(parents=True)
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.embed_tokens.weight": np.zeros((8, 16), np.float32)}, base / "model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora": np.zeros((4, 16), np.float32)}, adapter / "adapter_model.safetensors")
    words = ("submit", "--checkpoint", adapter, "--base-model", base, "--priority", "-5")
    assert run_here(*words) == 0
    said = capfd.readouterr().err
    assert "checkpoint-5 of run onto base" in said
    assert "reading base: " in said
    assert "reading adapter: " in said
    assert run_here(*words, "--progress", "none") == 0
    assert "reading" not in capfd.readouterr().err


def test_a_watched_table_is_shown_once(harness: Harness, tmp_path: Path) -> None:
    name = harness.submit(tiny_export("slow", tiny_task("onnx", sleep_seconds=1.0), base=harness.base()))
    screen = on_terminal("watch", name, "--coordinator", harness.address, home=tmp_path / "home", width=100)
    assert screen.code == 0, screen.text
    assert screen.redraws > 0  # it was shown while it ran
    rows = [line for line in left_on_screen(screen.raw) if line.startswith("✔ onnx")]
    assert len(rows) == 1, screen.raw
