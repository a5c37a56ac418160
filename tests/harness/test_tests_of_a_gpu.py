"""What ``make test-gpu`` measures with, as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE
from slipway_validate.runner.onnx_graphs.load import load
from support.gpu.decoding import STEPS, Decoded, TorchModel, agreement, decode
from support.gpu.nvml import Meter
from support.models.quantize_models import save_tiny

SCRIPT = Path(__file__).parents[1] / "gpu" / "tools" / "gpu.sh"


def test_without_a_gpu_nothing_is_installed_and_it_is_said(tmp_path: Path) -> None:
    nothing = tmp_path / "nvidia-smi"
    nothing.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    nothing.chmod(0o755)
    before = sorted(path.name for path in SCRIPT.parents[3].iterdir())
    done = subprocess.run(
        [SCRIPT], capture_output=True, text=True, env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "not run: nvidia-smi lists no GPU on this machine\n"
    assert sorted(path.name for path in SCRIPT.parents[3].iterdir()) == before


def test_runtimes_that_say_the_same_agree(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    graph = STAGE.run({"pytorch": source}, OnnxExportParams(parity="never"), Context(workdir=tmp_path))["onnx"]
    prompt = list(range(5, 25))
    reference = decode(TorchModel(source, dtype="float32", device="cpu"), prompt)
    found = decode(load(graph, threads=1), prompt, follow=reference.tokens)
    assert reference.logits.shape == (STEPS + 1, 512)
    assert min(found.prefill_ms, found.step_ms) > 0
    agreed = agreement(found, reference)
    assert agreed["same_tokens"] > 0.9
    assert 0 <= agreed["kl"] < 1e-6
    other = decode(TorchModel(source, dtype="float32", device="cpu"), prompt[:-1], follow=reference.tokens)
    assert agreement(other, reference)["kl"] > 1e-4


def test_divergence_is_that_of_its_definition() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32))
    agreed = agreement(Decoded(other, 1, 1), Decoded(logits, 1, 1))
    assert agreed["same_tokens"] == 0.5
    assert np.isclose(agreed["kl"], 0.25 * np.log(2) / 2)


def test_a_meter_keeps_the_peak_and_the_mean() -> None:
    """NVML needs a GPU; a library with its names stands in. A slice of a GPU does not tell its power."""

    class NVMLError(Exception):
        pass

    def library(*, tells_power: bool) -> ModuleType:
        used, powers = iter([4 << 30, 9 << 30, *[5 << 30] * 10_000]), iter([100_000, 300_000] * 10_000)

        def power(_: object) -> int:
            if not tells_power:
                raise NVMLError
            return next(powers)

        made = ModuleType("pynvml")
        vars(made).update(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=next(used)),
            nvmlDeviceGetPowerUsage=power,
            NVMLError=NVMLError,
        )
        return made

    for tells_power in (True, False):
        with Meter(library(tells_power=tells_power)) as meter:
            time.sleep(0.2)
        assert meter.peak_bytes == 9 << 30
        assert meter.watts is None if not tells_power else 100 <= meter.watts <= 300
