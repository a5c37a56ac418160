"""``slipway export`` with integers chosen by text: shared by the formats, the same in each run, without its data if it fails."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands.cli import Done, slipway, start
from support.models import tiny_models

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a run on it, its training text, and held-out text."""
    root = tmp_path_factory.mktemp("calibrated")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    for name, seed in (("train", 1), ("heldout", 2)):
        (root / name).mkdir()
        (root / name / "a.txt").write_text(words(seed))
    return root


def words(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 8))) for _ in range(4000))


def command(project: Path, *settings: str, home: str) -> list[str | Path]:
    fast = ("validation.benchmark_performance=false", "validation.test_samples=2", "optimization.group_size=16")
    heldout = () if "validation.enabled=false" in settings else (f"validation.heldout={project / 'heldout'}",)
    given = (*fast, *heldout, "optimization.quantization=int4", *settings)
    where = ("--base-model", project / "base", "--checkpoint", project / "run", "--out", project / f"out-{home}")
    return ["export", "--json", *where, *(part for each in given for part in ("--set", each))]


def export(project: Path, *settings: str, home: str = "home") -> Done:
    return slipway(*command(project, *settings, home=home), home=project / home)


def quantization(done: Done, name: str) -> dict[str, Any]:
    return json.loads((Path(done.json["paths"][name]) / "quantization.json").read_text())


def methods_at(bits: int, quantized: dict[str, Any]) -> set[str]:
    """The methods of the weights of so many bits; those of 8 are rounded to the nearest."""
    tensors = quantized["tensors"]
    return {tensors["methods"][name] for name, width in tensors["bits"].items() if width == bits}


def test_both_formats_have_the_integers_of_one_calibration(project: Path) -> None:
    asked = ("optimization.method=gptq", "optimization.time_budget=5", f"optimization.calibration={project / 'train'}")
    done = export(project, *asked)
    assert done.code == 0, done.err
    tasks = [attempt["task"] for attempt in done.json["attempts"]]
    assert [task for task in tasks if task.startswith("calibra")] == ["calibration_data", "calibrate-int4"]
    found = [quantization(done, name) for name in ("pytorch-int4", "onnx-int4")]
    assert found[0]["calibration"] == found[1]["calibration"] != ""
    assert all(methods_at(4, one) == {"gptq"} for one in found)
    lineage = json.loads((Path(done.json["output_directory"]) / "lineage.json").read_text())
    assert set(lineage["sources"]) == {"adapter", "base", "calibration", "heldout", "own_text"}
    page = (Path(done.json["output_directory"]) / "report.html").read_text()
    assert "Text for calibration" in page


def test_a_second_run_gives_the_same_digests(project: Path) -> None:
    """In another home, so nothing is reused: of the calibration, of mixed precision and ranges of activations, and of every file of each folder."""
    asked = ("optimization.quantization=none", "optimization.method=gptq", "optimization.size_budget=65%")
    asked = (*asked, "formats.pytorch.quantization=int4,fp8_static", "formats.onnx.quantization=int8_static")
    asked = (*asked, "optimization.time_budget=1", "validation.enabled=false")
    asked = (*asked, f"optimization.calibration={project / 'train'}")
    runs = [export(project, *asked, home=f"run-{number}") for number in (1, 2)]
    assert [done.code for done in runs] == [0, 0], [done.err for done in runs]
    names = {"pytorch-int4", "pytorch-fp8_static", "onnx-int8_static"}
    assert names <= set(runs[0].json["paths"])
    assert len(set(quantization(runs[0], "pytorch-int4")["tensors"]["bits"].values())) > 1
    for name in sorted(names):
        one, other = (digests(Path(done.json["paths"][name])) for done in runs)
        assert one == other, name
        assert "quantization.json" in one, name


def test_a_killed_calibration_goes_on_at_its_block(project: Path) -> None:
    """By kill -9 of the command and its processes after the first block; the same command again takes that block, and the integers are the same."""
    asked = ("optimization.method=autoround", "optimization.time_budget=3", "validation.enabled=false")
    asked = (*asked, f"optimization.calibration={project / 'train'}", "formats.onnx.enabled=false")
    home = project / "killed"
    process = start(command(project, *asked, home="killed"), home)
    deadline = time.monotonic() + 300
    while not (kept := [*home.glob("scratch/.calibrate.slipway-kept-*/block-0.json")]):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes = [process, *psutil.Process(process.pid).children(recursive=True)]
    for each in processes:
        each.kill()
    process.communicate()
    assert kept[0].is_file()
    again, undisturbed = export(project, *asked, home="killed"), export(project, *asked, home="undisturbed")
    assert (again.code, undisturbed.code) == (0, 0), again.err + undisturbed.err
    used = re.search(r"blocks of an interrupted attempt are used: (\d) of 3", again.err)
    assert used, again.err
    assert int(used[1]) >= 1
    assert not kept[0].parent.exists(), "its result is in the store"
    one, other = (digests(Path(done.json["paths"]["pytorch-int4"])) for done in (again, undisturbed))
    assert one == other


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_export_goes_on_without_a_calibration_that_failed(project: Path) -> None:
    """The adapter's own sample is of conversations, and the tokenizer has no chat template."""
    sample = project / "run" / "calibration.jsonl"
    sample.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n{}\n")
    try:
        done = export(
            project, "optimization.method=gptq", "formats.onnx.enabled=false", "validation.enabled=false", home="third"
        )
    finally:
        sample.unlink()
    assert done.code == 0, done.err
    (failed,) = [attempt for attempt in done.json["attempts"] if attempt["outcome"] == "failed"]
    assert (failed["task"], failed["reason"]) == ("calibration_data", "CALIBRATION_DATA_INVALID")
    assert any("rounded to the nearest, without data" in warning for warning in done.json["warnings"])
    assert "methods" not in quantization(done, "pytorch-int4")["tensors"]
