"""What the tests on a GPU share: the GPU, two models and their exports, the time that is left, and a table of figures.

``make test-gpu`` makes the environment and runs them. Anywhere else they are skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipway.machine.processors import Gpu, first_gpu
from slipway.proof.runtime import LanguageModel
from support.commands.cli import slipway
from support.gpu.decoding import PROMPT, Decoded, TorchModel, agreement, decode
from support.gpu.nvml import Meter

FIGURES: list[dict[str, Any]] = []
"""Rows of the table, in the order in which they were measured."""

Add = Callable[..., None]
"""Function that adds a row."""


@dataclass(frozen=True)
class Model:
    """A sample and its export.

    Attributes:
        name: ``small`` (trained here, 4 layers) or ``real`` (SmolLM2-135M).
        sample: Folder of ``slipway sample``.
        out: Folder of the export.
        home: ``SLIPWAY_HOME`` of the export, whose store has what was made.
    """

    name: str
    sample: Path
    out: Path
    home: Path

    @property
    def report(self) -> dict[str, Any]:
        """Return the export's report."""
        found: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return found

    def folder(self, name: str) -> Path:
        """Return the folder of an output."""
        return Path(self.report["result"]["paths"][name])

    def prompt(self) -> list[int]:
        """Return the token ids of held-out text."""
        from tokenizers import Tokenizer

        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((self.sample / "heldout").iterdir()))
        ids: list[int] = Tokenizer.from_file(str(self.folder("pytorch") / "tokenizer.json")).encode(text).ids[:PROMPT]
        return ids


Measure = Callable[[Model, str, Callable[[], LanguageModel]], dict[str, float]]
"""Function that decodes by a runtime, adds a row of this name, and returns how far it agrees with PyTorch."""


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Gpu:
    """The first GPU of this machine."""
    found = first_gpu()
    if found is None:
        pytest.skip("not run: this machine has no NVIDIA GPU")
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"not run: PyTorch {torch.__version__} finds no GPU; make test-gpu makes an environment that does")
    return found


@pytest.fixture(scope="session")
def seconds_left() -> Callable[[], float]:
    """Seconds until ``make test-gpu`` ends; without it, as many as anybody wants."""
    deadline = os.environ.get("SLIPWAY_TEST_GPU_DEADLINE")
    return lambda: float(deadline) - time.time() if deadline else float("inf")


@pytest.fixture
def needs_seconds(seconds_left: Callable[[], float]) -> Callable[[float], None]:
    """Skip a test that would not end in time."""

    def check(seconds: float) -> None:
        if seconds_left() < seconds:
            pytest.skip(f"not run: {seconds_left():.0f} seconds are left, and it takes about {seconds:.0f}")

    return check


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the samples; ``make test-gpu`` trains them while it installs."""
    return Path(os.environ.get("SLIPWAY_TEST_GPU_FOLDER") or tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="session", params=["small", "real"])
def model(
    request: pytest.FixtureRequest,
    gpu: Gpu,
    folder: Path,
    seconds_left: Callable[[], float],
    tmp_path_factory: pytest.TempPathFactory,
) -> Model:
    """A sample that was exported to what a GPU runs, with its proof."""
    name, work = str(request.param), tmp_path_factory.mktemp("model")
    sample = _sample(name, folder, seconds_left)
    made = Model(name, sample, work / "out", work / "home")
    began = time.monotonic()
    done = slipway(*export(made), home=made.home, timeout=max(1.0, min(580.0, seconds_left())))
    # A verdict on an output is for a test of its own; here everything has to be made.
    assert done.code in {0, 4}, done.err
    FIGURES.append({"model": name, "what": "export with proof", "seconds": round(time.monotonic() - began, 1)})
    return made


def export(model: Model) -> list[str | Path]:
    """Return the arguments that export a model to what a GPU runs."""
    ranges = {"batch": [1, 1, 2], "sequence": [1, 64, 256], "past": [0, 128, 512]}
    words: list[str | Path] = ["export", "-c", model.sample / "export.yaml", "--out", model.out, "--progress", "plain"]
    words += ["-f", "pytorch:none+int4,onnx,tensorrt:none+fp16+int8_static"]
    # The sample's file names a target of engines that are built ahead of time.
    settings = ("validation.effort=quick", "optimization.method=rtn", "formats.tensorrt.targets=[]")
    words += [word for setting in settings for word in ("--set", setting)]
    for axis, values in ranges.items():
        words += ["--set", f"formats.tensorrt.{axis}={values}"]
    return words


def _sample(name: str, folder: Path, seconds_left: Callable[[], float]) -> Path:
    """Return a sample: the one that is being made in ``folder``, or a new one."""
    sample = folder / "samples" / name
    if "SLIPWAY_TEST_GPU_FOLDER" not in os.environ:
        done = slipway("sample", sample, *(["--real"] if name == "real" else []), home=folder / "home")
        assert done.code == 0, done.err
    while not (sample / "sample.json").is_file():
        if seconds_left() < 60:
            pytest.skip(f"not run: the sample {name!r} was not trained in time; see {folder / name}.log")
        time.sleep(1)
    return sample


@pytest.fixture(scope="session")
def reference(model: Model) -> Decoded:
    """What PyTorch says on the GPU in float32."""
    return decode(TorchModel(model.folder("pytorch"), dtype="float32"), model.prompt())


@pytest.fixture(scope="session")
def figures() -> Add:
    """Add a row to the table that is printed at the end."""
    return lambda **row: FIGURES.append(row)


@pytest.fixture
def measure(figures: Add, reference: Decoded, needs_seconds: Callable[[float], None]) -> Measure:
    """Decode what PyTorch decoded by another runtime; memory and power are the GPU's meanwhile."""
    library = pytest.importorskip("pynvml", reason="not run: nvidia-ml-py is not installed")
    needs_seconds(20)

    def run(model: Model, what: str, load: Callable[[], LanguageModel]) -> dict[str, float]:
        with Meter(library) as meter:
            found = decode(load(), model.prompt(), follow=reference.tokens)
        agreed = agreement(found, reference)
        speed = {"prefill_ms": found.prefill_ms, "step_ms": found.step_ms}
        used = {"peak_gib": meter.peak_bytes / 2**30, "watts": meter.watts or "not told"}
        figures(model=model.name, what=what, **speed, **used, **agreed)
        return agreed

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures as a table for docs/gpu.md, and write them beside the samples."""
    if not FIGURES:
        return
    names = list(dict.fromkeys(name for row in FIGURES for name in row))
    terminalreporter.write_line("| " + " | ".join(names) + " |")
    terminalreporter.write_line("|" + " --- |" * len(names))
    for row in FIGURES:
        terminalreporter.write_line("| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |")
    if place := os.environ.get("SLIPWAY_TEST_GPU_FOLDER"):
        (Path(place) / "figures.json").write_text(json.dumps(FIGURES, indent=2) + "\n")


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
