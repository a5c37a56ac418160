"""Output on a terminal of 60, 80 and 100 columns: the real command on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from slipway.terminal.columns import Column, FittedTable, wrap
from support import TINY_STAGES
from support.commands.cli import SLIPWAY, Done, environment, in_process, slipway
from support.commands.terminal import WIDTHS, Screen, on_terminal, script_on_terminal
from support.models import tiny_models

LEVELS = ("pytorch", "pytorch-int8", "pytorch-int4", "onnx", "onnx-int8", "onnx-int4")

widths = pytest.mark.parametrize("width", WIDTHS)


def check(screen: Screen, width: int, *names: str, copied: tuple[str, ...] = ()) -> None:
    """Check that no line is wider than the terminal, except those to be copied, and that no name is split."""
    wide = [line for line in screen.too_wide(width) if not line.lstrip().startswith(copied)]
    assert wide == []
    missing = [name for name in names if name not in screen.words()]
    assert missing == [], screen.text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a base model, and a run with one truncated checkpoint; the files are real."""
    import numpy as np
    from safetensors.numpy import save_file

    root = tmp_path_factory.mktemp("p")
    base = root / "qwen3-base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.embed_tokens.weight": np.zeros((8, 16), np.float32)}, base / "model.safetensors")
    for step in (20, 40, 60):
        folder = root / "h_half" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": 1.5}]}))
        save_file({"lora": np.zeros((4, 16), np.float32)}, folder / "adapter_model.safetensors")
    newest = root / "h_half" / "checkpoint-60" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    return root


def where(project: Path) -> tuple[str | Path, ...]:
    levels = ("--set", "optimization.quantization=int8,int4")
    return ("--checkpoint", project / "h_half", "--base-model", project / "qwen3-base", *levels)


@pytest.fixture(scope="module")
def tiny(project: Path) -> dict[str, str]:
    """Return variables that replace the stages by trivial ones, without int4 of ONNX."""
    folder = project / "stages"
    folder.mkdir()
    (folder / "fail-quantize").write_text("int4")
    path = os.pathsep.join(filter(None, [str(TINY_STAGES), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "SLIPWAY_TEST_STAGES": str(folder), "SLIPWAY_TEST_SECONDS": "0.3"}


@pytest.fixture(scope="module")
def first(project: Path, tiny: dict[str, str]) -> Done:
    """Export into a home, with pipes for what is said."""
    done = slipway("export", *where(project), *NO_VALIDATION, "--out", project / "first", home=project / "home", **tiny)
    assert done.code == 6, done.err
    return done


@pytest.fixture(scope="module")
def home(project: Path, first: Done) -> Path:
    """Make a home with one ended export, and one whose state is not a database."""
    home = project / "home"
    (home / "exports" / "e-damaged").mkdir()
    (home / "exports" / "e-damaged" / "state.db").write_bytes(b"no database" * 100)
    return home


NO_VALIDATION = ("--set", "validation.enabled=false")


@pytest.mark.slow
def test_an_export_on_a_terminal(project: Path, tiny: dict[str, str], tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    screen = on_terminal("export", *where(project), *NO_VALIDATION, *out, home=tmp_path / "home", width=60, **tiny)
    assert screen.code == 6, screen.text
    check(screen, 60, *LEVELS, "format", "state", "size", "reason", copied=("output", "report"))
    assert next(line for line in screen.lines if line) == "checkpoint-40 of h_half onto qwen3-base"
    start = max(number for number, line in enumerate(screen.lines) if re.match(r"format +state", line))
    rows = {line.split()[0]: line.split()[1:] for line in screen.lines[start + 1 : start + 7]}
    assert list(rows) == list(LEVELS), "the plan's order, with what was not made"
    for name, cells in rows.items():
        assert (cells[0], "UNSUPPORTED" in cells) == (("failed", True) if "int4" in name else ("not", False)), name
    assert "total" in screen.words()
    assert screen.redraws > 3
    assert " ".join(screen.lines[start:]).count("quantize fails because the test says so") == 1
    assert " ".join(screen.text.split()).count("more columns on a wider terminal, or with --json") == 1


@widths
def test_the_plan_on_a_terminal(project: Path, tmp_path: Path, width: int) -> None:
    screen = on_terminal("export", *where(project), "--plan", home=tmp_path / "home", width=width)
    assert screen.code == 0, screen.text
    tasks = ("merge", "quantize-pytorch-int8", "quantize-pytorch-int4", "onnx_export", "validate")
    check(screen, width, *tasks, "task", "preflight", "setting", copied=("checkpoint ", "base ", "heldout "))
    assert screen.lines[0] == "checkpoint-40 of h_half onto qwen3-base"
    assert screen.text.index("quantize-pytorch-int8") < screen.text.index("disk:") < screen.text.index("setting ")
    assert "optimization.quantization" in screen.words()
    assert "validation.test_samples" not in screen.words(), "a default, which nobody set"
    assert "--json shows them all" in " ".join(screen.text.split())
    assert screen.text.count("more columns on a wider terminal") == (
        1 if width < 100 else screen.text.count("more columns")
    )


@widths
def test_the_doctor_on_a_terminal(tmp_path: Path, width: int) -> None:
    screen = on_terminal("doctor", home=tmp_path / "home", width=width)
    assert screen.code == 0, screen.text
    names = ("merge", "quantize", "onnx_export", "tensorrt_build", "validate", "onnxruntime", "transformers")
    check(screen, width, *names, "format", "pytorch", "tensorrt")


@widths
def test_checkpoints_on_a_terminal(project: Path, tmp_path: Path, width: int) -> None:
    screen = on_terminal("checkpoints", project / "h_half", home=tmp_path / "home", width=width)
    assert screen.code == 0, screen.text
    check(screen, width, "checkpoint-20", "checkpoint-40", "checkpoint-60", "usable", "SAFETENSORS_CORRUPT:")
    assert "checkpoint" in screen.lines[0] or width == 60


@pytest.mark.slow
def test_local_exports_and_the_cache_on_a_terminal(home: Path) -> None:
    for width in (60, 80):
        screen = on_terminal("list", home=home, width=width)
        assert screen.code == 0, screen.text
        (name,) = {word for word in screen.words() if re.fullmatch(r"e-[0-9a-f]{18}", word)}
        check(screen, width, "export", "state", "failed", "e-damaged", "unreadable")
        assert width == 60 or "checkpoint-40 of h_half" in screen.text

    cache = on_terminal("cache", "ls", home=home, width=60)
    assert cache.code == 0, cache.text
    check(cache, 60, "artifact", "digest", "size", copied=("6 artifacts",))
    assert "h_half onnx-int8" in cache.text
    assert "h_half pytorch-int8" in cache.text
    assert "qwen3-base (base)" in cache.text
    assert "h_half checkpoint-40" in cache.text
    assert re.search(r"[0-9a-f]{16}", cache.text) is None

    one = on_terminal("get", name, home=home, width=60)
    check(one, 60, "quantize-onnx-int8", "quantize-onnx-int4", copied=("projects/", "slipway pull"))
    assert "checkpoint-40 of h_half onto qwen3-base" in one.text
    assert one.text.count("slipway pull sha256:") == 4


@pytest.mark.slow
def test_what_is_told_of_exports_on_this_machine(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The list takes filters and changes nothing; a command that ``get`` offers fetches the result."""

    def told(*words: str, home: Path = home) -> Done:
        return in_process(capfd, *words, home=home)

    states = sorted((home / "exports").glob("*/state.db"))
    before = [path.read_bytes() for path in states]
    listed = told("list", "--json").json["exports"]
    assert {entry["local_state"] for entry in listed} == {"failed", "unreadable"}
    damaged = next(entry for entry in listed if entry["local_state"] == "unreadable")
    assert "not a database" in damaged["problem"]
    succeeded = told("list", "--filter", "state=succeeded", "--json").json["exports"]
    assert [entry["local_state"] for entry in succeeded] == ["unreadable"]
    assert told("list", "--filter", "colour=red").code == 3
    assert [path.read_bytes() for path in states] == before

    name = next(entry["name"] for entry in listed if entry["local_state"] == "failed")
    got = told("get", name)
    assert "slipway pull" not in got.out, "standard output is for the answer alone"
    command = next(line.strip() for line in got.err.splitlines() if "pull" in line and line.endswith("onnx-int8"))
    assert told("get", name, "--json").json["commands"]["fetch onnx-int8"] == command
    pull = [SLIPWAY, *command.split()[1:]]
    subprocess.run(pull, env=environment(home), cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "onnx-int8" / "made").read_text().startswith("quantize")
    missing = told("get", "e-1", "--json")
    assert (missing.code, missing.json["reason"]) == (3, "EXPORT_NOT_FOUND")

    # One that was killed is interrupted, and one in use runs.
    other = tmp_path / "other"
    shutil.copytree(home / "exports", other / "exports")
    shutil.rmtree(other / "exports" / "e-damaged")
    (state,) = (other / "exports").glob("*/state.db")
    with sqlite3.connect(state) as connection:
        ((text,),) = connection.execute("SELECT record FROM slipway_exports").fetchall()
        record = json.loads(text) | {"state": "running", "end_time": None, "failure": None}
        connection.execute("UPDATE slipway_exports SET record = ?, state = 'running', ended = 0", (json.dumps(record),))
    connection.close()
    assert [entry["local_state"] for entry in told("list", "--json", home=other).json["exports"]] == ["interrupted"]
    with state.with_name("state.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [entry["local_state"] for entry in told("list", "--json", home=other).json["exports"]] == ["running"]


RESULT = """
import sys
from pathlib import Path
from slipway.terminal.console import show
from slipway.cli.export.summary import summary
from slipway.results.result import ExportResult
show(summary(ExportResult.model_validate_json(Path(sys.argv[1]).read_text())))
"""


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """Return a result with every figure, an output that failed validation, and two that were not made."""
    figures = {"mean_kl": 0.0012, "top1_agreement": 0.91, "decode_tokens_per_second": 165.2, "inference_speed_ms": 31.4}
    made = {"digest": "sha256:0", "size_bytes": 123_456_789, "reduction_percent": 61.2, "memory_usage_mb": 812.5}
    formats = {name: made | figures | {"status": "passed"} for name in LEVELS[:4]}
    formats["pytorch-int4"]["status"] = "failed"
    document = {
        "export_id": "e-1",
        "timestamp": "2026-01-02T03:04:05Z",
        "success": False,
        "formats": formats,
        "requested": LEVELS,
        "failed": {
            "onnx-int8": {
                "task": "quantize-onnx-int8",
                "state": "failed",
                "reason": "OUT_OF_MEMORY",
                "error_message": "too large",
            },
            "onnx-int4": {
                "task": "quantize-onnx-int4",
                "state": "skipped",
                "reason": "OUT_OF_MEMORY",
                "error_message": "onnx failed",
            },
        },
        "original_size_bytes": 318_000_000,
        "reason": "VALIDATION_FAILED",
        "error_message": "pytorch-int4 failed validation: mean_kl is 0.4; use a smaller group_size",
        "warnings": ["merge: a warning of many words that does not fit on one line of a narrow terminal"],
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    return path


@widths
def test_every_output_keeps_its_row_in_the_summary(result: Path, tmp_path: Path, width: int) -> None:
    screen = script_on_terminal(RESULT, result, home=tmp_path / "home", width=width)
    assert screen.code == 0, screen.text
    check(screen, width, *LEVELS, "format", "state", "reason", "VALIDATION_FAILED", "OUT_OF_MEMORY", "skipped")
    order = [line.split()[0] for line in screen.lines if line.split()[:1] and line.split()[0] in LEVELS]
    assert order == list(LEVELS)
    flat = " ".join(screen.text.split())
    assert flat.count("a warning of many words that does not fit on one line of a narrow terminal") == 1
    assert "not made onnx-int8: too large" in flat
    assert ("KL" in screen.words()) == (width > 60)


@widths
def test_every_failed_output_begins_a_line_of_the_summary(result: Path, tmp_path: Path, width: int) -> None:
    said = [f"onnx-int{number} failed validation: mean_kl is 0.4 (limit 0.02)" for number in range(11)]
    document = json.loads(result.read_text())
    document["error_message"] = "\n".join(["11 outputs failed validation", *said, "use a smaller group_size"])
    result.write_text(json.dumps(document))
    screen = script_on_terminal(RESULT, result, home=tmp_path / "home", width=width)
    assert sum(bool(re.match(r"onnx-int\d+ failed", line)) for line in screen.lines) == 11
    piped = subprocess.run([sys.executable, "-c", RESULT, result], capture_output=True, text=True, check=True).stdout
    assert [line for line in piped.splitlines() if " failed validation: " in line] == said
    assert "use a smaller group_size" in piped.splitlines()


@pytest.mark.slow
def test_real_stages_on_a_terminal(tmp_path: Path) -> None:
    """And a real validation at the narrowest width, with the answer in a pipe."""
    base, run = tmp_path / "tiny-base", tmp_path / "run"
    tiny_models.make_base(base)
    tiny_models.make_checkpoint(base, run)
    sources = ("--checkpoint", run, "--base-model", base, "--out", tmp_path / "out", "--json")
    few = (
        "formats.onnx.enabled=false",
        "optimization.quantization=int8",
        "validation.test_samples=2",
        "validation.benchmark_performance=false",
    )
    settings = [word for setting in few for word in ("--set", setting)]
    screen = on_terminal("export", *sources, *settings, home=tmp_path / "home", width=60, pipe_answer=True)
    document = json.loads(screen.answer)
    assert screen.code == (0 if document["success"] else 4), screen.text
    check(screen, 60, "merge", "quantize-pytorch-int8", "validate", "total")
    outputs = len(document["formats"])
    assert any(f"output {outputs} of {outputs}:" in line for line in screen.lines)
    assert "onto tiny-base" in next(line for line in screen.lines if line)
    warnings = document["warnings"]
    assert len(set(warnings)) == len(warnings)
    shares = [int(share) for share in re.findall(r"total.*?(\d+)%", screen.text)]
    assert shares == sorted(shares), "the bar only moves forward"
    assert shares[-1] == 100


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_and_whole_rows(first: Done) -> None:
    lines = first.err.splitlines()
    assert [line for line in lines if not re.match(r"\d\d:\d\d:\d\d ", line)] == []
    assert lines[0].endswith("checkpoint-40 of h_half onto qwen3-base")
    assert sum("warning: skipped" in line for line in lines) == 1
    assert any(re.search(r"quantize-onnx-int8: done in \d", line) for line in lines)
    assert not any("leased" in line or "projects/" in line for line in lines), "what a coordinator logs for itself"
    header = next(line for line in first.out.splitlines() if line.startswith("format"))
    assert header.split()[-2:] == ["merged", "reason"], "nothing is dropped"
    assert "\x1b" not in first.out + first.err


@pytest.mark.slow
def test_json_lines_have_one_schema_and_none_is_silent(project: Path, tiny: dict[str, str], tmp_path: Path) -> None:
    common = ("export", *where(project), *NO_VALIDATION, "--json")
    done = slipway(*common, "--out", tmp_path / "o", "--progress", "json", home=tmp_path / "h", **tiny)
    said = [json.loads(line) for line in done.err.splitlines()]
    assert {line["event"] for line in said} >= {"note", "export", "task", "progress", "log"}
    for line in said:
        assert {"time", "level", "logger", "message"} <= set(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert done.json["failed"]["onnx-int4"]["reason"] == "UNSUPPORTED"
    quiet = slipway(*common, "--out", tmp_path / "p", home=tmp_path / "h", SLIPWAY_PROGRESS="none", **tiny)
    assert quiet.err == ""
    assert set(quiet.json["failed"]) == {"pytorch-int4", "onnx-int4"}


@pytest.mark.slow
def test_terminals_without_utf_8_or_colours_keep_working(project: Path, home: Path, tmp_path: Path) -> None:
    shown = on_terminal("get", _ended(home), home=home, width=80, PYTHONIOENCODING="ascii")
    assert shown.code == 0, shown.text
    assert shown.text.isascii()
    assert "+ merge" in shown.text
    assert "x quantize-onnx-int4" in shown.text
    plan = ("export", *where(project), "--plan")
    assert "\x1b[3" in on_terminal(*plan, home=tmp_path, width=80).raw
    assert "\x1b[3" not in on_terminal(*plan, home=tmp_path, width=80, NO_COLOR="1").raw
    document = slipway("list", "--json", home=home, PYTHONIOENCODING="ascii")
    assert document.json["exports"]


def _ended(home: Path) -> str:
    return next(path.name for path in (home / "exports").iterdir() if path.name != "e-damaged")


def table(*rows: tuple[str, ...], width: int) -> list[str]:
    made = FittedTable(Column("name"), Column("text", rank=1, wrap=True), Column("size", rank=2, right=True))
    for row in rows:
        made.add_row(*row)
    stream = io.StringIO()
    Console(width=width, file=stream, color_system=None).print(made)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_columns_go_before_letters_do() -> None:
    row = ("onnx-int8", "a text of several words", "1.4 GB")
    assert table(row, width=60) == [
        "name       text                       size",
        "onnx-int8  a text of several words  1.4 GB",
    ]
    assert table(row, width=38)[:2] == ["name       text", "onnx-int8  a text of several words"]
    assert table(row, width=12)[:2] == ["name", "onnx-int8"]
    assert table(row, width=5)[:3] == ["name", "onnx-", "int8"], "narrower than the name itself"


def test_wrapping_loses_no_letter() -> None:
    text = "stage: merge  numpy 2.4.6, torch at /root/.cache/slipway/exports — ünïcode 模型 end"
    for width in range(1, 40):
        lines = wrap(Text(text), width).plain.split("\n")
        assert "".join("".join(lines).split()) == "".join(text.split())
        assert max(Text(line).cell_len for line in lines) <= max(width, 2)
